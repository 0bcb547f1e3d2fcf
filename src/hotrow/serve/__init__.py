"""Scores behind requests: an export opened without loading its tables, brought forward by deltas, and served."""
