"""Runs beside each other: lists and comparisons of them, several seeds of one recipe, a search over recipes."""
