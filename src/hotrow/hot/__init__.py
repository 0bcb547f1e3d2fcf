"""Hot embeddings (FAE): how many rows are hot, which samples need no others.

calibrate.py, from what was counted -> hot set -> classify.py. Hot rows are a prefix of each table, whose rows are
numbered by popularity, and a list.
"""
