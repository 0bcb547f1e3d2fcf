"""Locality of embedding accesses: how unevenly tables are demanded, and how soon rows come again."""
