"""Raw logs to a packed dataset: count, number by popularity, encode; bounded memory, resumable."""
