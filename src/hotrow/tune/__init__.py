"""Runs beside each other: lists and comparisons of them, and several seeds of one recipe."""
