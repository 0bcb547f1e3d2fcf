"""Forecasts: what a step of a setup will take, and what would change it."""
