"""Converts Arrow columns to labels, times, dense numbers and keys: exactly, or with a fault for rows that are wrong.

Each converter takes one Arrow array and returns its values and, if some rows cannot be converted, a `Fault`: which
rows, and what is wrong with each. Numbers and ids of faulty rows are missing; labels and times of them are meaningless.
An id is never rounded: integers stay integers, text stays text, and a float is an id only if it is a whole number that
a float holds exactly. `without_missing` comes first: it makes nulls of texts that mean a missing value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.data.chunk import KeyKind, Keys, keys_from_arrow

IdEncoding = Literal["int", "uint64", "hex", "bytes"]
"""How raw ids are held: int64; uint64 in the bits of an int64; int64 that text writes in hex digits, as Criteo's files
do; UTF-8 text."""

JSON_LISTS = "json"
"""The separator of a column whose texts are JSON arrays."""
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")
"""Texts that mean a missing value if a schema does not say otherwise."""
MAX_EXACT_FLOAT = 2**53
MAX_DIGITS = 20
"""No id of 64 bits has more."""
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
INTEGER = r"^(0|-?[1-9]\d*)$"
WHOLE_FLOAT = r"^(0|-?[1-9]\d*)\.0+$"
"""A whole number as text of floats has it: pandas writes integers with gaps so."""
OTHER_BLANKS = ("\u00a0", "\u202f", "\u2009")
"""Blanks that stand between groups of digits besides the ordinary one."""
HEX = r"^[0-9a-fA-F]{1,8}$"
_MONTH, _DAY, _HOUR = "(0[1-9]|1[0-2])", "([0-2][0-9]|3[01])", "([01][0-9]|2[0-3])"
WRITTEN_DATES = (f"(19|20)..{_MONTH}{_DAY}({_HOUR}([0-5][0-9])?)?", f"..{_MONTH}{_DAY}{_HOUR}")
"""Forms of dates as whole numbers, such as 20141021, 2014102113, 201410211359, and 14102113 as in Avazu's logs."""


def kind_of(encoding: IdEncoding) -> KeyKind:
    return "bytes" if encoding == "bytes" else "int"


NumberSpec: TypeAlias = Any
"""How a column's numbers are written: a schema's `DenseSpec`."""
IdSpec: TypeAlias = Any
LabelRule: TypeAlias = Any


@dataclass(frozen=True)
class Fault:
    """Rows of one column that could not be converted."""

    column: str
    rows: NDArray[np.bool_]
    """[num_rows], True if the row is bad."""
    describe: Callable[[int], str]
    """Says what is wrong with a bad row, and the cure."""


FlatKeys: TypeAlias = Callable[[pa.Array, str, IdEncoding], tuple[Keys, Fault | None]]
"""A function such as `flat_keys`."""


def plain(array: pa.Array) -> pa.Array:
    """Returns `array` without dictionaries, views and half floats, as one of the few types that converters know."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary).take(array.indices)
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.large_binary())
    if pa.types.is_float16(kind):
        return array.cast(pa.float32())
    return array


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a type is UTF-8 text in any layout."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Returns whether a type is a list in any layout."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def value_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the values inside dictionaries and lists."""
    while is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind


def without_missing(array: pa.Array, missing: Sequence[str], *, is_read: bool = False) -> pa.Array:
    """Returns `array` with null for each text, also within lists, that is one of `missing` but for blanks around it.

    is_read: the reader has made null of texts without blanks. An array of another type, or without such a text, comes
    back as it is.
    """
    if not missing:
        return array
    if is_list(array.type):
        return _list_without_missing(array, missing, is_read=is_read)
    if not is_text(value_type(array.type)):
        return array
    array = plain(array)
    found = _means_missing(array, missing, is_read=is_read)
    return array if found is None else pc.if_else(found, pa.scalar(None, array.type), array)


def _list_without_missing(array: pa.Array, missing: Sequence[str], *, is_read: bool) -> pa.Array:
    values = pc.list_flatten(array)
    kept = without_missing(values, missing, is_read=is_read)
    if kept.null_count == values.null_count:
        return array
    lengths = filled(pc.list_value_length(array), 0)
    splits = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    return pa.LargeListArray.from_arrays(splits, kept, mask=array.is_null())


def _has_blank(array: pa.Array) -> bool:
    """Returns whether there is a blank anywhere in text."""
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return False
    kind = np.int32 if pa.types.is_string(array.type) else np.int64
    first, last = np.frombuffer(offsets, kind)[[array.offset, array.offset + len(array)]]
    return bool((np.frombuffer(data, np.uint8)[first:last] == ord(" ")).any())


def _means_missing(array: pa.Array, missing: Sequence[str], *, is_read: bool) -> pa.Array | None:
    """Returns a mask of the texts that mean a missing value; None if there is none."""
    wanted = pa.array(list(missing), array.type)
    if _has_blank(array):
        found = pc.is_in(pc.utf8_trim(array, " "), value_set=wanted)
    else:
        found = None if is_read else pc.is_in(array, value_set=wanted)
    return found if found is not None and pc.any(found).as_py() else None


def to_numbers(
    array: pa.Array, column: str, spec: NumberSpec | None = None
) -> tuple[NDArray[np.float64], Fault | None]:
    """Returns float64 per row, NaN = missing. Text is parsed. Faults: infinity in the data, and text that is not a
    number; a NaN that is not text is a missing value.

    spec: how numbers are written in text; if None, plainly. Raises ValueError for a column of another type (time, list,
    struct).
    """
    source = array = plain(array)
    if is_text(array.type):
        array, bad = _parse_numbers(array) if spec is None or is_plain(spec) else parse_written(array, spec)
    else:
        array, bad = _as_float64(array, column), np.zeros(0, np.bool_)
    values = filled(array, np.nan)
    with np.errstate(over="ignore"):
        infinite = ~np.isfinite(values.astype(np.float32))
    if infinite.any():
        infinite &= mask_of(array.is_valid()) if is_text(source.type) else ~np.isnan(values)
    if bad.any():
        infinite |= bad
    if infinite.any():
        values = np.where(infinite, np.nan, values)
    return values, _fault(column, infinite, source, "is not a finite float32 number; correct the row or leave it empty")


def as_seconds(array: pa.Array) -> pa.Array:
    """Returns times and dates as unix seconds, rounded down to microseconds; any other array as it is."""
    kind = array.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return array
    ticks = array.cast(pa.timestamp("ms") if pa.types.is_date(kind) else kind).cast(pa.int64())
    unit = kind.unit if pa.types.is_timestamp(kind) else "ms"
    numbers = filled(ticks, 0) // (1000 if unit == "ns" else 1)
    return pa.array(numbers / {"s": 1, "ms": 1e3}.get(unit, 1e6), mask=~mask_of(array.is_valid()))


def _as_float64(array: pa.Array, column: str) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8()).cast(pa.float64())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return array.cast(pa.float64(), safe=False)
    raise ValueError(f"column {column!r} has type {kind}, which is not a number; list it under categorical")


def _parse_numbers(array: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns text as float64, and a mask of what is not a number; the mask is empty if all text is."""
    try:
        return pc.cast(array, pa.float64()), np.zeros(0, np.bool_)
    except pa.ArrowInvalid:
        array = pc.utf8_trim_whitespace(array)
        good = pc.match_substring_regex(array, NUMBER)
        numbers = pc.cast(pc.if_else(good, array, pa.scalar(None, array.type)), pa.float64())
        return numbers, mask_of(pc.invert(good))


def is_plain(spec: NumberSpec) -> bool:
    """Returns whether numbers in text have neither another decimal sign than the point, nor groups, nor a unit."""
    return spec.decimal == "." and spec.thousands is None and spec.unit is None


def written_pattern(spec: NumberSpec) -> str:
    """Returns the regular expression of numbers that are written as `spec` says, without blanks around them.

    Groups of digits and a unit may be absent, except "%": 12 among percentages may be a share.
    """
    digits = r"\d+"
    if spec.thousands is not None:
        sign = re.escape(spec.thousands)
        digits = rf"(?:\d{{1,3}}(?:{sign}\d{{2,3}})*{sign}\d{{3}}|\d+)"
    decimal = re.escape(spec.decimal)
    number = rf"(?:{digits}(?:{decimal}\d*)?|{decimal}\d+)(?:[eE][+-]?\d+)?"
    if spec.unit is None:
        return rf"^[+-]?{number}$"
    unit = re.escape(spec.unit)
    before, after = rf"^[+-]? ?{unit} ?[+-]?{number}$", rf"^[+-]?{number} ?{unit}$"
    return f"{before}|{after}" if spec.unit == "%" else f"{before}|{after}|^[+-]?{number}$"


def with_plain_blanks(array: pa.Array) -> pa.Array:
    """Returns text without blanks around it, and with the ordinary blank for others."""
    for blank in OTHER_BLANKS:
        array = pc.replace_substring(array, blank, " ")
    return pc.utf8_trim_whitespace(array)


def parse_written(array: pa.Array, spec: NumberSpec) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns text that is written as `spec` says as float64, and a mask of what is not."""
    array = with_plain_blanks(array)
    good = pc.match_substring_regex(array, written_pattern(spec))
    array = pc.if_else(good, array, pa.scalar(None, array.type))
    for sign in (spec.unit, " ", spec.thousands):
        array = array if sign is None else pc.replace_substring(array, sign, "")
    numbers = pc.cast(pc.replace_substring(array, spec.decimal, "."), pa.float64())
    return numbers, mask_of(pc.invert(good))


def to_label(array: pa.Array, spec: LabelRule) -> tuple[NDArray[np.float32], Fault | None]:
    """Returns a float32 per row, 0 or 1 unless `spec.kind` is number.

    Faults: a missing label; a number that is not finite; of a binary label without a rule in `spec`, any value but 0
    and 1, and in text "true" and "false" in any case.
    """
    array = plain(array)
    if spec.positive is not None:
        return _label_by_value(array, spec)
    numbers, fault = to_numbers(array, spec.column)
    if fault is not None and spec.kind == "binary" and spec.at_least is None and is_text(array.type):
        numbers, fault = to_numbers(_with_digits(array), spec.column)
    bad = np.isnan(numbers) if fault is None else np.isnan(numbers) | fault.rows
    if spec.at_least is not None:
        with np.errstate(invalid="ignore"):
            label = (numbers >= spec.at_least).astype(np.float32)
        return label, _fault(spec.column, bad, array, "is not a number to compare with 'at_least'")
    with np.errstate(invalid="ignore", over="ignore"):
        label = numbers.astype(np.float32)
    if spec.kind == "number":
        reason = "is not a finite number; every row needs a label"
        return label, _fault(spec.column, bad | ~np.isfinite(label), array, reason)
    bad |= ~((label == 0) | (label == 1))
    reason = "is not a label; it must be 0 or 1 (or set label.positive or label.at_least)"
    return label, _fault(spec.column, bad, array, reason)


def to_weight(array: pa.Array, column: str) -> tuple[NDArray[np.float32], Fault | None]:
    """Returns the weight of each row. Faults: a missing one, one that is no finite number, and one below 0."""
    array = plain(array)
    numbers, fault = to_numbers(array, column)
    bad = ~((numbers >= 0) & (numbers <= np.finfo(np.float32).max))
    bad = bad if fault is None else bad | fault.rows
    reason = "is not a weight; it must be a finite number, 0 or more"
    return np.where(bad, 0, numbers).astype(np.float32), _fault(column, bad, array, reason)


def _with_digits(array: pa.Array) -> pa.Array:
    """Returns text with 1 for "true" and 0 for "false"."""
    words = pc.utf8_lower(pc.utf8_trim_whitespace(array))
    one, zero = (pa.scalar(digit, array.type) for digit in "10")
    return pc.if_else(pc.equal(words, "true"), one, pc.if_else(pc.equal(words, "false"), zero, array))


def _label_by_value(array: pa.Array, spec: LabelRule) -> tuple[NDArray[np.float32], Fault | None]:
    assert spec.positive is not None
    if not is_text(array.type) and not pa.types.is_integer(array.type):
        raise ValueError(f"label column {spec.column!r} has type {array.type}; 'positive' needs text or integers")
    positive = _is_one_of(array, spec, "positive", spec.positive)
    label = positive.astype(np.float32)
    if spec.negative is not None:
        known = positive | _is_one_of(array, spec, "negative", spec.negative)
        allowed = ", ".join(str(value) for value in (*spec.positive, *spec.negative))
        return label, _fault(spec.column, ~known, array, f"is not a label; it must be one of {allowed}")
    return label, _fault(spec.column, mask_of(array.is_null()), array, "is missing; every row needs a label")


def _is_one_of(array: pa.Array, spec: LabelRule, name: str, values: Sequence[str | int]) -> NDArray[np.bool_]:
    try:
        wanted = pa.array([str(v) if is_text(array.type) else v for v in values], type=array.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        raise ValueError(
            f"label.{name} {list(values)} cannot be compared with column {spec.column!r} of type {array.type}"
        ) from None
    return mask_of(pc.is_in(array, value_set=wanted))


@dataclass(frozen=True)
class TimeReader:
    """How text times of a column are read; decided once from the first rows, so that every chunk is read the same
    way."""

    target: pa.DataType | None = None
    format: str | None = None

    @staticmethod
    def for_column(sample: pa.Array, format: str | None) -> TimeReader:
        """Returns a reader for numbers as they are, else for `format`, else for ISO 8601, zoned if most values are."""
        sample = plain(sample).drop_null()
        if not is_text(sample.type) or format is not None or not len(sample):
            return TimeReader(format=format)
        sample = pc.utf8_trim_whitespace(sample)
        # Most of the values decide: a bad first value must not make good ones bad.
        targets = (pa.int64(), pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
        counts = [sum(_castable(sample[i : i + 1], target) for i in range(len(sample))) for target in targets]
        return TimeReader(targets[counts.index(max(counts))] if max(counts) else pa.timestamp("us"))

    def __call__(self, array: pa.Array, column: str) -> tuple[NDArray[np.int64], Fault | None]:
        """Returns int64 that rises with time: the unit of timestamps and integers, microseconds for float seconds."""
        source = array = plain(array)
        if is_text(array.type):
            array = self._parse(array)
        if pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
            seconds = filled(array.cast(pa.float64()), np.nan)
            good = np.abs(seconds) < 2**62 / 1e6
            return np.floor(np.where(good, seconds, 0) * 1e6).astype(np.int64), self._fault(column, ~good, source)
        if pa.types.is_date32(array.type):
            array = array.cast(pa.int32())
        elif not (
            pa.types.is_integer(array.type) or pa.types.is_timestamp(array.type) or pa.types.is_date64(array.type)
        ):
            raise ValueError(
                f"time column {column!r} has type {array.type}; it must be a timestamp, date, number or text"
            )
        missing = mask_of(array.is_null())
        values = filled(array.cast(pa.int64(), safe=False), 0)
        return values, self._fault(column, missing, source)

    def ticks_per_s(self, sample: pa.Array, column: str) -> float | None:
        """Returns how many units of the times that are read a second has; None if they are numbers, and those of
        `sample`, its first cells, are no unix times of seconds (whole ones also of thousandths, millionths or
        billionths), or are whole and all look like dates that digits write."""
        sample = plain(sample).drop_null()
        kind = sample.type
        if is_text(kind):
            kind = pa.timestamp("us") if self.format is not None else self.target or pa.timestamp("us")
        if pa.types.is_date32(kind):
            return 1 / 86400
        if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
            return {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit if pa.types.is_timestamp(kind) else "ms"]
        times, fault = self(sample, column)
        times = times if fault is None else times[~fault.rows]
        if not pa.types.is_integer(kind):
            return 1e6 if len(times) and 1e14 <= np.median(times) < 4e15 else None
        if all(any(re.fullmatch(form, str(time)) for form in WRITTEN_DATES) for time in times):
            return None
        of_units = (unit for unit in (1.0, 1e3, 1e6, 1e9) if len(times) and 1e8 * unit <= np.median(times) < 4e9 * unit)
        return next(of_units, None)

    def _parse(self, array: pa.Array) -> pa.Array:
        if self.format is not None:
            return pc.strptime(array, format=self.format, unit="us", error_is_null=True)
        target = self.target or pa.timestamp("us")
        try:
            return pc.cast(array, target)
        except pa.ArrowInvalid:
            return cast_each(pc.utf8_trim_whitespace(array), target)

    @staticmethod
    def _fault(column: str, bad: NDArray[np.bool_], source: pa.Array) -> Fault | None:
        cure = "correct the row, or give its format (time.format, --time-format)"
        return _fault(column, bad, source, f"is not a time like the others; {cure}")


def to_keys(
    array: pa.Array,
    spec: IdSpec,
    encoding: IdEncoding,
    *,
    flat: FlatKeys | None = None,
) -> tuple[Keys, Fault | None]:
    """Returns the keys of one feature. A missing value is a missing key; a missing list is an empty one.

    flat: reads the values, without lists; if None, `flat_keys` does. Raises ValueError if the column's shape does not
    fit `spec.kind`.
    """
    source = array = plain(array)
    flat, no_list = flat or flat_keys, None
    if spec.separator == JSON_LISTS and is_text(array.type):
        array, bad = json_lists(array)
        no_list = _fault(spec.column, bad, source, "is not a JSON array of ids; correct the row")
    elif spec.separator is not None and is_text(array.type):
        array = pc.split_pattern(pc.if_else(pc.equal(array, ""), pa.scalar(None, array.type), array), spec.separator)
    if is_list(array.type) == (spec.kind == "one_hot"):
        cure = "set kind: multi_hot or sequence" if spec.kind == "one_hot" else "give a separator, or set kind: one_hot"
        raise ValueError(f"column {spec.column!r} has type {array.type}, which does not fit kind {spec.kind}; {cure}")
    if spec.kind == "one_hot":
        return flat(array, spec.column, encoding)
    lengths = filled(pc.list_value_length(array), 0)
    row_splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    keys, fault = flat(plain(pc.list_flatten(array)), spec.column, encoding)
    keys = replace(keys, row_splits=row_splits)
    if fault is not None:
        rows = np.repeat(np.arange(len(lengths)), lengths)
        bad_rows, first_keys = np.unique(rows[fault.rows], return_index=True)
        first = dict(zip(bad_rows.tolist(), np.flatnonzero(fault.rows)[first_keys].tolist(), strict=True))
        bad, describe = np.isin(np.arange(len(lengths)), bad_rows), fault.describe
        fault = Fault(spec.column, bad, lambda row: describe(first[row]))
    return keys, _either(no_list, fault)


def _either(one: Fault | None, other: Fault | None) -> Fault | None:
    """Returns the fault of the rows of two faults in one column."""
    if one is None or other is None:
        return one or other
    return Fault(one.column, one.rows | other.rows, lambda row: (one if one.rows[row] else other).describe(row))


def json_lists(array: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns the lists of text in JSON arrays, numbers as they are written, and a mask of what is no such array."""
    lists: list[list[str | None] | None] = []
    bad = np.zeros(len(array), np.bool_)
    decode = json.JSONDecoder(parse_int=str, parse_float=str).decode
    for row, text in enumerate(array.to_pylist()):
        try:
            found = decode(text) if text else None
        except (ValueError, RecursionError):
            found = ""
        is_list = isinstance(found, list) and all(item is None or isinstance(item, str) for item in found)
        bad[row] = found is not None and not is_list
        lists.append(None if bad[row] else found)
    return pa.array(lists, pa.list_(pa.string())), bad


def default_encoding(kind: pa.DataType, spec: IdSpec) -> IdEncoding:
    """Returns how ids of an Arrow type are held if `spec.type` does not say so.

    Raises ValueError for types that cannot be ids: structs, maps, intervals.
    """
    kind = value_type(kind)
    if spec.type == "text":
        return "bytes"
    if pa.types.is_uint64(kind):
        return "uint64"
    if pa.types.is_decimal(kind):
        return "int" if kind.scale == 0 and kind.precision <= 18 else "bytes"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return "int"
    if pa.types.is_temporal(kind) and not pa.types.is_duration(kind) and not pa.types.is_interval(kind):
        return "int"
    if is_text(kind) and spec.type == "int":
        return "int"
    if is_text(kind) or pa.types.is_null(kind) or _is_binary(kind):
        return "bytes"
    raise ValueError(f"column {spec.column!r} has type {kind}, which cannot be an id; make it text or integers first")


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def flat_keys(array: pa.Array, column: str, encoding: IdEncoding) -> tuple[Keys, Fault | None]:
    """Returns a key for each value of an array without lists."""
    source, bad = array, np.zeros(len(array), dtype=bool)
    cure = "set type: text for this column"
    if pa.types.is_floating(array.type):
        array, bad = _whole_numbers(array)
        cure = "an id must be a whole number below 2^53; correct the file, or list the column under dense"
    if encoding == "bytes":
        array = pc.if_else(pa.array(bad), pa.scalar(None, array.type), array) if bad.any() else array
        return text_keys(array), _fault(column, bad, source, f"is not an exact id; {cure}")
    if is_text(array.type):
        array, bad = _integers_in(array, encoding)
    valid = None if array.null_count == 0 else mask_of(array.is_valid())
    values = _integers(array)
    if (values.dtype == np.uint64) != (encoding == "uint64"):
        # Only in prediction: values on one side of zero or of 2^63 have no counterpart in the data set's integers.
        bad = bad | (values > np.iinfo(np.int64).max if values.dtype == np.uint64 else values < 0)
        cure = "the data set was prepared from integers of another signedness; cast the column"
    values = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    if bad.any():
        valid = ~bad if valid is None else valid & ~bad
    return Keys(values, None, valid), _fault(column, bad, source, f"is not an exact integer id; {cure}")


def _integers(array: pa.Array) -> NDArray[Any]:
    """Returns integers of any width, booleans, whole decimals, times and dates as NumPy integers; null as 0."""
    if pa.types.is_null(array.type) or pa.types.is_decimal(array.type):
        array = array.cast(pa.int64())
    elif pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    elif pa.types.is_temporal(array.type):
        array = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64())
    return filled(array, 0)


def text_keys(array: pa.Array) -> Keys:
    """Returns the bytes of text or binary values; integers, decimals and times as their text."""
    if not _is_binary(array.type):
        array = array.cast(pa.large_string())
    return keys_from_arrow(array.cast(pa.large_binary()))


def _integers_in(array: pa.Array, encoding: IdEncoding) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns text as integers, and a mask of text that means none."""
    if encoding == "int":
        with suppress(pa.ArrowInvalid):
            numbers = pc.cast(array, pa.int64())
            padded = pc.and_(pc.starts_with(array, "0"), pc.greater(pc.binary_length(array), 1))
            if not pc.any(padded).as_py():  # Arrow also reads 0x1f
                return numbers, np.zeros(len(array), np.bool_)
    encoded = array.dictionary_encode()
    found = [integer_of(text.as_py(), encoding) for text in encoded.dictionary]
    numbers = pa.array(found, pa.uint64() if encoding == "uint64" else pa.int64()).take(encoded.indices)
    return numbers, mask_of(array.is_valid()) & mask_of(numbers.is_null())


def integer_of(text: str, encoding: IdEncoding) -> int | None:
    """Returns the integer id that a text means beyond doubt, to training as to scoring: to a column of integers " 12",
    "012" and "12.0" are 12. None if it means none, or one that has too many bits."""
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


def _whole_numbers(array: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns floats as int64, NaN as missing (as pandas writes missing integers), and a mask of inexact ones."""
    values = filled(array, np.nan).astype(np.float64)
    missing = np.isnan(values)
    bad = ~missing & ~((np.floor(values) == values) & (np.abs(values) < MAX_EXACT_FLOAT))
    whole = np.where(missing | bad, 0, values).astype(np.int64)
    return pa.array(whole, mask=missing), bad


def cast_each(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Casts value by value, to null if a value does not cast; for the rare chunk with bad rows."""
    encoded = array.dictionary_encode()
    return pa.concat_arrays(_cast_parts(encoded.dictionary, target)).take(encoded.indices)


def _cast_parts(array: pa.Array, target: pa.DataType) -> list[pa.Array]:
    """Casts an array as a whole, else each of its halves: a few bad values need few casts."""
    try:
        return [pc.cast(array, target)]
    except pa.ArrowInvalid:
        if len(array) == 1:
            return [pa.nulls(1, target)]
    middle = len(array) // 2
    return [*_cast_parts(array[:middle], target), *_cast_parts(array[middle:], target)]


def _castable(array: pa.Array, target: pa.DataType) -> bool:
    try:
        pc.cast(array, target)
    except pa.ArrowInvalid:
        return False
    return True


def filled(array: pa.Array, value: float) -> NDArray[Any]:
    """Returns numbers as NumPy, null as `value`. Without nulls it makes no copy, which `fill_null` would."""
    numbers: NDArray[Any] = (array.fill_null(value) if array.null_count else array).to_numpy(zero_copy_only=False)
    return numbers


def mask_of(array: Any) -> NDArray[np.bool_]:
    """Returns a boolean Arrow array as a NumPy mask of its own memory, null as False."""
    return np.array(pc.coalesce(array, pa.scalar(value=False)).to_numpy(zero_copy_only=False), dtype=bool)


def _fault(column: str, bad: NDArray[np.bool_], source: pa.Array, reason: str) -> Fault | None:
    """Returns a fault whose sentence shows the value as it was found."""
    if not bad.any():
        return None
    return Fault(column, bad, lambda row: f"{_shown(source[row].as_py())} {reason}")


def _shown(value: Any) -> str:
    text = "an empty value" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
