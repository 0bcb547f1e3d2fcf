"""Scores behind requests: an export opened without loading its tables, served, and followed to newer versions."""
