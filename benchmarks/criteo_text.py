"""Synthetic clicks as a raw text file in Criteo's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.synthetic import SyntheticSource
from benchmarks.synthetic_config import SyntheticConfig
from hotrow.base.files import atomic_write
from hotrow.data.chunk import Chunk

_COUNT_DIGITS = 8
"""Digits of a count; counts end at 2^24, above which float32 would round them."""
_TEXT_ROWS = 2_048
"""Rows turned into text at a time: 700 kB at full width, which stays in cache."""
_HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


def write_criteo(path: Path | str, config: SyntheticConfig) -> int:
    """Writes the rows of `config` as text in Criteo's layout; returns its size in bytes. The file appears whole.

    One row per line, tab-separated: label, 13 counts, 26 keys of 8 hex digits; an empty field is a missing value.
    Raises ValueError unless `config` has 13 dense columns and 26 one-hot tables.
    """
    if len(config.dense) != 13 or len(config.tables) != 26 or any(t.kind != "one_hot" for t in config.tables):
        raise ValueError(
            f"config {config.name!r} has {len(config.dense)} dense columns and {len(config.tables)} tables; "
            "Criteo's layout has 13, and 26 one-hot ones: use a criteo preset"
        )
    with atomic_write(path) as file:
        for chunk in SyntheticSource(config).chunks(rows_per_chunk=_TEXT_ROWS):
            file.write(_criteo_lines(chunk).data)
        return file.tell()


def _criteo_lines(chunk: Chunk) -> NDArray[np.uint8]:
    """Returns the text of `chunk`: lays out every field at full width, then drops the bytes that are not needed."""
    assert chunk.label is not None
    num_counts, num_keys = chunk.dense.shape[1], len(chunk.keys)
    count_width, key_width = _COUNT_DIGITS + 1, 8 + 1
    keys_at = 2 + num_counts * count_width
    text = np.full((chunk.num_rows, keys_at + num_keys * key_width), ord("\t"), np.uint8)
    keep = np.ones(text.shape, np.bool_)
    text[:, 0] = ord("0") + chunk.label.astype(np.uint8)
    text[:, -1] = ord("\n")

    shape = (chunk.num_rows, num_counts, count_width)
    digits, keep_digits = (a[:, 2:keys_at].reshape(shape)[:, :, :-1] for a in (text, keep))
    missing = np.isnan(chunk.dense)
    rest = np.where(missing, 0, chunk.dense).astype(np.uint32)
    for place in reversed(range(_COUNT_DIGITS)):
        tenth = rest // np.uint32(10)
        keep_digits[:, :, place] = (rest > 0) & ~missing if place < _COUNT_DIGITS - 1 else ~missing
        digits[:, :, place] = (ord("0") + (rest - tenth * np.uint32(10))).astype(np.uint8)
        rest = tenth

    shape = (chunk.num_rows, num_keys, key_width)
    hexes, keep_hexes = (a[:, keys_at:].reshape(shape)[:, :, :-1] for a in (text, keep))
    for j, keys in enumerate(chunk.keys.values()):
        octets = keys.values.astype(">u4").view(np.uint8)
        hexes[:, j] = _HEX_PAIRS[octets].view(np.uint8).reshape(chunk.num_rows, 8)
        if keys.valid is not None:
            keep_hexes[:, j] = keys.valid[:, None]
    return text[keep]
