"""Packed datasets: the format, its reader and writer, vocabularies, and the loader."""
