"""A chain of days: a model that is trained on each day's new rows alone."""
