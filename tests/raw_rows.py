"""Chunks as Python values, for tests of sources."""

from itertools import pairwise
from typing import Any

from hotrow.data.chunk import Keys, Source


def ids(keys: Keys) -> list[Any]:
    """Keys as Python values, None where missing, lists where rows hold lists."""
    if keys.offsets is None:
        flat: list[Any] = keys.values.tolist()
    else:
        ends = keys.offsets.tolist()
        flat = [keys.values[a:b].tobytes().decode() for a, b in pairwise(ends)]
    if keys.valid is not None:
        flat = [value if ok else None for value, ok in zip(flat, keys.valid, strict=True)]
    if keys.row_splits is None:
        return flat
    return [flat[a:b] for a, b in pairwise(keys.row_splits)]


def read(source: Source, **options: Any) -> dict[str, list[Any]]:
    """All rows of a source, by column."""
    rows: dict[str, list[Any]] = {name: [] for name in ("label", "time", "dense", *source.key_kinds)}
    for chunk in source.chunks(**options):
        rows["label"] += [] if chunk.label is None else chunk.label.tolist()
        rows["time"] += [] if chunk.time is None else chunk.time.tolist()
        rows["dense"] += chunk.dense.tolist()
        for name, keys in chunk.keys.items():
            assert keys.num_rows == chunk.num_rows
            rows[name] += ids(keys)
    return rows
