"""What is usual for a run: the ranges of its training numbers, and what its validation rows held, by column.

Both are read from the packed dataset when a run ends, and kept in run.json, so that every later scoring has something
to compare with (`data/seen.py`) though the dataset may be gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotrow.data.packed.format import Ragged
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.data.seen import Seen, usual_range
from hotrow.run.record import RunRecord

MAX_BLOCKS = 16
"""Blocks of training rows that ranges are found in: a million rows, spread evenly. More would not move a quantile that
a thousandth of the rows exceed, and a short run on much data should not end with a long pass over it."""


def training_ranges(split: Split) -> dict[str, tuple[float, float]]:
    """Returns the lowest and highest usual number of each number column of a split, as they are stored."""
    count = min(MAX_BLOCKS, split.num_blocks)
    if not count or not split.info.dense:
        return {}
    blocks = [split.block(i * split.num_blocks // count) for i in range(count)]
    return {
        name: usual_range(np.concatenate([block.dense[i] for block in blocks]))
        for i, name in enumerate(split.info.dense_names)
    }


def count_split(split: Split, seen: Seen) -> Seen:
    """Counts the rows of a split into `seen`, and returns it.

    A packed dataset keeps a missing number as 0, so numbers have `missing_or_zero` in place of `missing`; and a missing
    id as row 0 if training had none missing, so such a feature has no `missing`. Features without a vocabulary are not
    counted: their row 0 is a row like any other.
    """
    tables = {feature.name: split.info.table_by_name[feature.table] for feature in split.info.features}
    for index in range(split.num_blocks):
        block = split.block(index)
        for name, column in zip(split.info.dense_names, block.dense, strict=True):
            seen.add_numbers(name, column, column == 0)
        for (name, table), ids in zip(tables.items(), block.ids, strict=True):
            rows, missing = ids.values if isinstance(ids, Ragged) else ids, table.missing_row
            if table.vocabulary is not None:
                seen.add_ids(name, rows, None if missing is None else rows == missing)
    for name, own in seen.columns.items():
        del own["unreadable"]
        if name not in tables:
            own["missing_or_zero"] = own.pop("missing")
        elif tables[name].missing_row is None:
            del own["missing"]
    return seen


def seen_of(record: RunRecord) -> Seen:
    """Returns counts of rows yet to be scored, to compare with the rows that the run was validated on."""
    columns = record.columns or {}
    of = next((split for split in ("val", "test") if split in columns), "val")
    return Seen(columns.get(of), record.ranges, of=of)


def usual_of(dataset: PackedDataset) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Returns ranges of training numbers, counts by split and column, and warnings about the splits."""
    ranges = training_ranges(dataset.split("train"))
    columns: dict[str, dict[str, dict[str, int]]] = {}
    told: dict[str, str] = {}
    for name in ("val", "test"):
        if name in dataset.splits and dataset.split(name).num_rows:
            seen = count_split(dataset.split(name), Seen(columns.get("val", {}), ranges))
            columns[name] = seen.columns
            told |= {code: f"the {name} split has {text}" for code, text in seen.warnings().items()}
    return ranges, columns, told
