"""Hot rows (FAE): which rows are hot, which samples need no others, and when to train those.

    counts -> calibrate.py -> hot set and samples (hot_set.py) -> order.py -> batches

copies.py keeps copies of the hot rows on a GPU.
"""
