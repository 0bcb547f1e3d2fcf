"""Rearranging keys: the keys of several features row by row, and some rows of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.chunk import Chunk, Keys
from hotrow.data.packed.dataset import Ids, Ragged


def row_splits_of(keys: Keys) -> NDArray[np.int64]:
    """Row splits [num_rows + 1], made for one-hot keys."""
    return np.arange(keys.num_rows + 1) if keys.row_splits is None else keys.row_splits


def interleave(features: Sequence[Keys]) -> Keys:
    """Keys of features that share a table, in the order a reader of the file meets them: by row, feature, position.

        a = [1, 2], b = [[7], [8, 9]]  ->  [[1, 7], [2, 8, 9]]

    Counted in this order, ties are broken alike however the rows are cut into chunks.
    """
    if len(features) == 1:
        return features[0]
    splits = [row_splits_of(keys) for keys in features]
    lengths = np.stack([np.diff(s) for s in splits])
    ends = np.cumsum(lengths, axis=0)
    row_splits = np.concatenate([[0], np.cumsum(ends[-1])])
    order = np.empty(row_splits[-1], dtype=np.int64)
    first = 0
    for keys, s, length, end in zip(features, splits, lengths, ends, strict=True):
        target = np.repeat(row_splits[:-1] + end - length - s[:-1], length) + np.arange(keys.num_keys)
        order[target] = np.arange(first, first + keys.num_keys)
        first += keys.num_keys
    return replace(take_keys(_concatenate(features), order), row_splits=row_splits)


def select_rows(chunk: Chunk, mask: NDArray[np.bool_]) -> Chunk:
    """The rows of `chunk` whose mask [num_rows] is set; the position stays that of the whole chunk."""
    if mask.all():
        return chunk
    keys = {}
    for name, column in chunk.keys.items():
        taken = take_keys(column, np.flatnonzero(column.key_mask(mask)))
        lengths = np.diff(row_splits_of(column))[mask]
        is_list = column.row_splits is not None
        keys[name] = replace(taken, row_splits=np.concatenate([[0], np.cumsum(lengths)]) if is_list else None)
    return replace(
        chunk,
        num_rows=int(mask.sum()),
        label=None if chunk.label is None else chunk.label[mask],
        dense=chunk.dense[mask],
        keys=keys,
        time=None if chunk.time is None else chunk.time[mask],
    )


def select_ids(ids: Ids, mask: NDArray[np.bool_]) -> Ids:
    """The rows of encoded ids whose mask [num_rows] is set."""
    if mask.all():
        return ids
    if not isinstance(ids, Ragged):
        return ids[mask]
    lengths = np.diff(ids.row_splits)
    values = ids.values[np.repeat(mask, lengths)]
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths[mask])]))


def _concatenate(features: Sequence[Keys]) -> Keys:
    """All keys, one feature after the other, row splits aside."""
    valid = None
    if any(keys.valid is not None for keys in features):
        valid = np.concatenate([np.ones(k.num_keys, np.bool_) if k.valid is None else k.valid for k in features])
    if features[0].kind == "bytes":
        arrow = pa.concat_arrays([_as_arrow(keys) for keys in features])
        return replace(_from_arrow(arrow), valid=valid)
    return Keys(np.concatenate([keys.values for keys in features]), None, valid)


def take_keys(keys: Keys, order: NDArray[np.int64]) -> Keys:
    """Keys at places `order` [any length], row splits aside."""
    valid = None if keys.valid is None else keys.valid[order]
    if keys.offsets is None:
        return Keys(keys.values[order], None, valid)
    return replace(_from_arrow(_as_arrow(keys).take(pa.array(order))), valid=valid)


def _as_arrow(keys: Keys) -> pa.Array:
    assert keys.offsets is not None, "kind bytes"
    buffers = [None, pa.py_buffer(np.ascontiguousarray(keys.offsets)), pa.py_buffer(np.ascontiguousarray(keys.values))]
    return pa.Array.from_buffers(pa.large_binary(), keys.num_keys, buffers)


def _from_arrow(array: pa.Array) -> Keys:
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    values = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    return Keys(values, ends - ends[0])
