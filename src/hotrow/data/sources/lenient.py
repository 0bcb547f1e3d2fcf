"""Reads columns of rows to score, where any value is something: an id, an unknown id, a number, or a missing number.

The strict converters (`convert.py`) do the reading; here their arrays are prepared and their faults are answered. Ids
that were written in another way than for training are read if there is no doubt: to a column of integers " 12", "012"
and 12.0 are 12. What is no id of its column is unknown and uses row 0, what is no number is missing, and both are
counted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.data.chunk import Keys
from hotrow.data.sources.convert import (
    HEX,
    INTEGER,
    MAX_EXACT_FLOAT,
    NUMBER,
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
from hotrow.data.sources.schema import JSON_LISTS, CategoricalSpec, DenseSpec

MAX_DIGITS = 20
"""No id of 64 bits has more."""


def lenient_numbers(array: pa.Array, column: str, spec: DenseSpec | None = None) -> tuple[NDArray[np.float64], int]:
    """Returns float64 per row, NaN = missing, and how many values are no finite number; those are missing.

    spec: how numbers are written in text; None: plainly.
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
    """Returns the keys of one feature, and how many values cannot be ids of it; those are `Keys.unknown`."""
    array = plain(array)
    num_bad = 0
    if spec.separator == JSON_LISTS and is_text(array.type):
        array, bad = json_lists(array)  # what is no list of ids is an empty one
        num_bad = int(bad.sum())
    if spec.kind == "one_hot" and is_list(array.type):
        array = _as_text(array)
    elif spec.kind != "one_hot" and not is_list(array.type) and (spec.separator is None or not is_text(array.type)):
        array = _as_lists(array)
    keys, fault = to_keys(array, spec, encoding, flat=_flat)
    assert fault is None, "_flat has none"
    return keys, num_bad + (0 if keys.unknown is None else int(keys.unknown.sum()))


def _flat(array: pa.Array, column: str, encoding: IdEncoding) -> tuple[Keys, Fault | None]:
    """Returns a key for each value, as `flat_keys`, with unknown ones instead of a fault."""
    if is_text(array.type):
        keys, fault = flat_keys(array, column, encoding)
        if fault is None:
            return keys, None  # the usual case, many times as fast
    unknown = np.zeros(len(array), np.bool_)
    kind = array.type
    if pa.types.is_nested(kind) or pa.types.is_duration(kind) or pa.types.is_interval(kind):
        array = _as_text(array)
    if encoding != "bytes" and not _is_whole(array.type):
        array, unknown = _integers_in(array if is_text(array.type) else _as_text(array), encoding)
    keys, fault = flat_keys(array, column, encoding)
    if fault is not None and encoding == "bytes":
        keys, fault = flat_keys(_as_text(array), column, encoding)  # 12.5 is a text like any other
    if fault is not None:
        unknown = unknown | fault.rows
    if not unknown.any():
        return keys, None
    return replace(keys, unknown=unknown, valid=None if keys.valid is None else keys.valid | unknown), None


def _is_whole(kind: pa.DataType) -> bool:
    """Returns whether `flat_keys` can take every value of a type as an integer, or say that it is none."""
    is_known = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(is_known or pa.types.is_null(kind) or pa.types.is_temporal(kind))


def _integers_in(array: pa.Array, encoding: IdEncoding) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns text as integers, and a mask of what is none. Every different text is looked at once."""
    encoded = array.dictionary_encode()
    found = [integer_of(text.as_py(), encoding) for text in encoded.dictionary]
    kind = pa.uint64() if encoding == "uint64" else pa.int64()
    numbers = pa.array(found, kind).take(encoded.indices)
    return numbers, mask_of(array.is_valid()) & mask_of(numbers.is_null())


def integer_of(text: str, encoding: IdEncoding) -> int | None:
    """Returns the integer id that a text means beyond doubt; None if it means none, or one that has too many bits."""
    text = text.strip()
    if encoding == "hex":
        return int(text, 16) if re.fullmatch(HEX, text) else None
    if re.fullmatch(INTEGER, text):
        number = int(text) if len(text) <= MAX_DIGITS else None
    elif re.fullmatch(NUMBER, text, re.ASCII) and (decimal := Decimal(text)).adjusted() < MAX_DIGITS:
        number = int(decimal) if decimal == decimal.to_integral_value() else None
    else:
        return None
    low, high = (0, 2**64) if encoding == "uint64" else (-(2**63), 2**63)
    return number if number is not None and low <= number < high else None


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
