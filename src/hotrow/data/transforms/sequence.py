"""The latest or the earliest ids of a list, each of them once if wanted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sequence(
    ids: tuple[NDArray[np.uint64], NDArray[np.int64]],
    *,
    last: int | None = None,
    first: int | None = None,
    dedup: bool = False,
) -> NDArray[np.bool_]:
    """Returns which ids stay: the `last` ones of each list, or the `first` ones. With `dedup`, equal ids of a list
    first become one: the last of them, or with `first` the first."""
    if (last is None) == (first is None) and not (dedup and last is None):
        raise ValueError(f"last is {last} and first is {first}; give one of them, or dedup alone")
    for name, length in (("last", last), ("first", first)):
        if length is not None and length < 1:
            raise ValueError(f"{name} is {length}; it must be at least 1")
    hashes, splits = ids
    rows = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
    # Counted from the end that stays.
    step = 1 if last is None and first is not None else -1
    kept = np.ones(len(hashes), np.bool_)
    if dedup:
        order = np.lexsort((hashes[::step], rows[::step]))
        again = (hashes[::step][order][1:] == hashes[::step][order][:-1]) & (np.diff(rows[::step][order]) == 0)
        kept[::step][order[1:][again]] = False
    if (length := first if last is None else last) is not None:
        num_kept = np.concatenate([[0], np.cumsum(kept)])
        if last is None:
            kept &= num_kept[1:] - num_kept[splits[:-1]][rows] <= length
        else:
            kept &= num_kept[splits[1:]][rows] - num_kept[:-1] <= length
    return kept
