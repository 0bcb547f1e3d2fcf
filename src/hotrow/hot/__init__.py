"""Hot embeddings (FAE): how many rows are hot, which samples need no others.

calibrate.py, from what was counted, or tracker.py, from batches as they come -> hot set -> classify.py. Hot rows are a
prefix of each table, whose rows are numbered by popularity, and a list. drift.py says how hot sets age.
"""
