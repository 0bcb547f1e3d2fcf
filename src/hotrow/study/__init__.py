"""Studies: published experiments repeated on this machine. A study is a YAML preset run by one sweep runner.

runner.py finds what is left to measure, measures it and writes JSON, CSV and one HTML page; kernels.py measures the
cells of the study `kernels`; page.py draws (with hotrow.charts). `run_study` is the way in.
"""

from hotrow.study.runner import run_study

__all__ = ["run_study"]
