"""Raw logs of every kind read as columns, and logs made up for tests and demos."""
