"""Hot rows (FAE): which rows are hot, which samples need no others, and when to train those.

    counts -> calibrate.py -> hot set -> classify.py -> hot samples -> order.py -> batches

turns.py trains them phase by phase, with copies of the hot rows on a GPU.
"""
