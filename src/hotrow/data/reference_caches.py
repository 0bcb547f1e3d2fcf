"""Readable twins of native/{optimum,sketch}.cpp: caches run row by row, Misra and Gries' counters slot by slot."""

# ruff: noqa: D103, RUF100 - the native module's signatures, documented in its headers

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.reference_reuse import fmix64

SLOTS = 4
SCORE = (1 << 24) - 1


def lru_hits(rows: NDArray[np.uint32], num_rows: int, capacity: int, out: NDArray[np.bool_]) -> None:
    _check(rows, num_rows, out)
    cached: OrderedDict[int, None] = OrderedDict()
    for i, row in enumerate(rows.tolist()):
        out[i] = row in cached
        cached[row] = None
        cached.move_to_end(row)
        if len(cached) > capacity:
            cached.popitem(last=False)


def belady_hits(rows: NDArray[np.uint32], num_rows: int, capacity: int, out: NDArray[np.bool_]) -> None:
    _check(rows, num_rows, out)
    uses: dict[int, list[int]] = {}
    for i in range(len(rows) - 1, -1, -1):
        uses.setdefault(int(rows[i]), []).append(i)  # the next one last
    cached: set[int] = set()
    for i, row in enumerate(rows.tolist()):
        out[i] = row in cached
        uses[row].pop()
        cached.add(row)
        cached = {own for own in cached if uses[own]}
        if len(cached) > capacity:
            cached.remove(max(cached, key=lambda own: uses[own][-1]))


def _check(rows: NDArray[np.uint32], num_rows: int, out: NDArray[np.bool_]) -> None:
    if len(out) != len(rows):
        raise ValueError("out must have one entry per access")
    if len(rows) and int(rows.max()) >= num_rows:
        raise ValueError("rows must be below num_rows")


def sketch_add(slots: NDArray[np.uint64], seed: int, first_key: int, num_rows: int, ids: NDArray[Any]) -> None:
    if len(slots) == 0 or len(slots) % SLOTS:
        raise ValueError("slots must be four for each of 1 to 2^32 - 2 buckets")
    if not 0 < first_key < 1 << 40 or num_rows > (1 << 40) - first_key:
        raise ValueError("keys must be below 2^40")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise ValueError("ids must be at least 0 and below num_rows")
    keys = (ids[ids != 0].astype(np.int64) + first_key).view(np.uint64)
    hashes = fmix64(keys ^ fmix64(np.array([seed + 1], np.uint64)))
    buckets = ((hashes >> np.uint64(32)) * np.uint64(len(slots) // SLOTS)) >> np.uint64(32)
    for key, bucket in zip(keys.tolist(), buckets.tolist(), strict=True):
        own = slots[bucket * SLOTS : (bucket + 1) * SLOTS].tolist()
        scores = [slot & SCORE for slot in own]
        found = [k for k, slot in enumerate(own) if slot >> 24 == key]
        least = scores.index(min(scores))
        if found:
            own[found[0]] += scores[found[0]] < SCORE
        elif scores[least] > 1:
            own[least] -= 1
        else:
            own = [*own[:least], *own[least + 1 :], key << 24 | 1]
        slots[bucket * SLOTS : (bucket + 1) * SLOTS] = own
