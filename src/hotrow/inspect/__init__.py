"""Hotness of data: how often rows are used, how soon again, and how hot sets age."""
