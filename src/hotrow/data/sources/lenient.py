"""Reads columns of rows to score, where any value is something: an id, a number, or missing.

The strict converters (`data/cells.py`) do the reading, by one rule for training and scoring; here arrays of any type
are prepared for them and their faults are answered: what is no id or number of its column is missing, and counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.data.cells import (
    JSON_LISTS,
    MAX_EXACT_FLOAT,
    Fault,
    IdEncoding,
    flat_keys,
    is_list,
    is_text,
    json_lists,
    mask_of,
    plain,
    to_keys,
    to_numbers,
)
from hotrow.data.chunk import Keys
from hotrow.data.sources.schema import CategoricalSpec, DenseSpec


def lenient_numbers(array: pa.Array, column: str, spec: DenseSpec | None = None) -> tuple[NDArray[np.float64], int]:
    """Returns float64 per row, NaN = missing, and how many values are no finite number; those are missing.

    spec: how numbers are written in text; if None, plainly.
    """
    array = plain(array)
    if is_list(array.type):
        array = _as_text(array)
    kind = array.type
    if not (is_text(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind) or _is_number(kind)):
        return np.full(len(array), np.nan), len(array) - array.null_count
    values, fault = to_numbers(array, column, spec)
    if fault is None:
        return values, 0
    return values, int(fault.rows.sum())


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def lenient_keys(array: pa.Array, spec: CategoricalSpec, encoding: IdEncoding) -> tuple[Keys, int]:
    """Returns the keys of one feature, and how many values cannot be ids of it; those are missing."""
    array = plain(array)
    num_bad = 0
    if spec.separator == JSON_LISTS and is_text(array.type):
        array, bad = json_lists(array)  # what is no list of ids is an empty one
        num_bad = int(bad.sum())
    if spec.kind == "one_hot" and is_list(array.type):
        array = _as_text(array)
    elif spec.kind != "one_hot" and not is_list(array.type) and (spec.separator is None or not is_text(array.type)):
        array = _as_lists(array)

    def counted(array: pa.Array, column: str, encoding: IdEncoding) -> tuple[Keys, None]:
        nonlocal num_bad
        keys, fault = _flat(array, column, encoding)
        num_bad += 0 if fault is None else int(fault.rows.sum())
        return keys, None

    keys, fault = to_keys(array, spec, encoding, flat=counted)
    assert fault is None, "counted has none"
    return keys, num_bad


def _flat(array: pa.Array, column: str, encoding: IdEncoding) -> tuple[Keys, Fault | None]:
    """Returns a key for each value, as `flat_keys`, of any type."""
    kind = array.type
    is_span = pa.types.is_duration(kind) or pa.types.is_interval(kind)
    if is_span or pa.types.is_nested(kind) or not (encoding == "bytes" or is_text(kind) or _is_whole(kind)):
        array = _as_text(array)
    keys, fault = flat_keys(array, column, encoding)
    if fault is not None and encoding == "bytes":
        return flat_keys(_as_text(array), column, encoding)  # 12.5 is a text like any other
    return keys, fault


def _is_whole(kind: pa.DataType) -> bool:
    """Returns whether `flat_keys` can take every value of a type as an integer, or say that it is none."""
    is_known = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(is_known or pa.types.is_null(kind) or pa.types.is_temporal(kind))


def _as_text(array: pa.Array) -> pa.Array:
    return pa.array([text_of(value) for value in array.to_pylist()], pa.string())


def text_of(value: Any) -> str | None:
    """Returns any value as text, an id in the form that columns of its type give it; None if it is missing.

    A NaN and an empty list are missing, a list of one is that one.
    """
    if isinstance(value, list):
        return None if not value else text_of(value[0]) if len(value) == 1 else str(value)
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_FLOAT:
        return str(int(value))
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _as_lists(array: pa.Array) -> pa.Array:
    """Returns lists of one, and empty ones of missing values."""
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    valid = mask_of(array.is_valid())
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *valid]), pa.int32()), array.drop_null())
