"""FAE's own parameter: a row is hot where it takes at least so many percent of its table's accesses.

Budgets are what hotrow goes by; thresholds are here to draw the paper's curves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotRows, HotSet
from hotrow.hot.table_use import tables_of


def by_threshold(
    dataset: PackedDataset,
    percent: float,
    *,
    record_bytes: Mapping[str, int],
    small_table_bytes: int = SMALL_TABLE_BYTES,
) -> HotSet:
    """Rows of at least `percent` of the accesses to their table, by exact counts; small tables whole.

    Row 0, which stands for all rare ids, is hot, as in `calibrate`. Other rows without an access are cold. Raises
    ValueError unless percent is from 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; a threshold is from 0 to 100 percent of a table's accesses")
    rows = {}
    for table in tables_of(dataset, record_bytes, small_table_bytes=small_table_bytes):
        least = max(1.0, percent / 100 * float(table.counts.sum(dtype="u8")))
        first = 1 + int(np.count_nonzero(table.counts[1:] >= least))
        rows[table.name] = HotRows.first(len(table.counts)) if table.is_small else table.first(first)
    return HotSet(how="threshold", rows=rows, record_bytes=record_bytes)
