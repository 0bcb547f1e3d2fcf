"""What a cell means: a missing value, a number, an id, a list of ids, a time, a label or a weight.

A column is an Arrow array, or a list of Python values of any types, as requests have them. `number_of`, `id_of` and
`list_of` say what one value means, and thereby every reader: preparation, prediction, requests and exports. Columns of
one plain type are read at once, to the same result; tests/laws/test_cells.py compares.

A reading comes with a mask of the cells that are not of the column's kind. Preparation answers with a `Fault`, whose
sentence shows the value; scoring takes them for missing, and counts them. An id is never rounded: a float is one only
if it is a whole number that a float holds exactly.

Exports copy this file, so it imports NumPy and pyarrow alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

IdEncoding = Literal["int", "uint64", "hex", "bytes"]
"""How ids are held: int64; uint64 in an int64's bits; int64 from hex digits, as in Criteo's files; UTF-8 text."""
Column: TypeAlias = "pa.Array | list[Any]"
Mask: TypeAlias = NDArray[np.bool_]
LabelRule: TypeAlias = Any
"""The rule for labels: a schema's `LabelSpec`."""


class Written(NamedTuple):
    """How numbers are written in text. A schema's `DenseSpec` has these fields too and will do."""

    decimal: str = "."
    thousands: str | None = None
    unit: str | None = None


PLAIN = Written()
JSON_LISTS = "json"
"""The separator of a column whose texts are JSON arrays."""
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")
"""Texts that mean a missing value if a schema does not say otherwise."""
MAX_EXACT_FLOAT = 2**53
FLOAT32_END = 2.0**128 - 2.0**103
"""The least number that rounds to infinity in float32."""
MAX_DIGITS = 20
"""The most digits of a 64-bit id."""
NUMBER = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"
INTEGER = r"^(0|-?[1-9]\d*)$"
WHOLE_FLOAT = r"^(0|-?[1-9]\d*)\.0+$"
"""A whole number written as a float, as pandas writes integers if some are missing."""
WRITTEN = "written"
"""The time zone whose clock shows a time as it is written."""
ISO_DATE = r"^\s*\d{4}-\d\d-\d\d"
HEX = r"^[0-9a-fA-F]{1,8}$"
OTHER_BLANKS = ("\u00a0", "\u202f", "\u2009")
"""Blanks that stand between groups of digits besides the ordinary one."""
_MONTH, _DAY, _HOUR = "(0[1-9]|1[0-2])", "([0-2][0-9]|3[01])", "([01][0-9]|2[0-3])"
WRITTEN_DATES = (f"(19|20)..{_MONTH}{_DAY}({_HOUR}([0-5][0-9])?)?", f"..{_MONTH}{_DAY}{_HOUR}")
"""Forms of dates as whole numbers, such as 20141021, 2014102113, 201410211359, and 14102113 as in Avazu's logs."""
NO_NUMBER = "is not a finite float32 number; correct the row or leave it empty"
NO_LIST = "is not a JSON array of ids; correct the row"


class UnreadableError(ValueError):
    """A value that is not of its column's kind."""


class Fault(NamedTuple):
    """Cells of one column that are not of its kind."""

    column: str
    rows: Mask
    """[num_rows], True if the row has such a cell."""
    num_cells: int
    describe: Callable[[int], str]
    """Says what is wrong with such a row, and the cure."""


# ---- one value


def single(value: Any) -> Any:
    """The value of a cell in a column of single values: a list of one means its item; None if it is missing."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if len(value) > 1:
            raise UnreadableError("several values")
        return single(value[0]) if value else None
    is_nan = (isinstance(value, float) and value != value) or (isinstance(value, Decimal) and value.is_nan())
    return None if is_nan or type(value).__name__ in ("NAType", "NaTType") else value


def number_of(value: Any, written: Any = PLAIN) -> float:
    """The number that a value means, NaN if it is missing. Raises UnreadableError if it is not a finite float32."""
    value = single(value)
    if value is None:
        return math.nan
    if isinstance(value, str | bytes):
        value = plain_number(as_text(value), written)
    elif written.unit == "%":
        raise UnreadableError("perhaps a share")
    if isinstance(value, int | float | Decimal):
        with suppress(OverflowError):
            if abs(number := float(value)) < FLOAT32_END:
                return number
    raise UnreadableError("no number")


def plain_number(text: str, written: Any) -> float:
    """The number that text means. Raises UnreadableError if it is not written as `written` says."""
    plain = is_plain(written)
    for blank in () if plain else OTHER_BLANKS:
        text = text.replace(blank, " ")
    text = text.strip()
    if re.fullmatch(NUMBER if plain else pattern_of(written), text, re.ASCII) is None:
        raise UnreadableError("no number")
    for sign in () if plain else filter(None, (written.unit, " ", written.thousands)):
        text = text.replace(sign, "")
    return float(text.replace(written.decimal, "."))


def is_plain(written: Any) -> bool:
    """Whether numbers in text have neither another decimal sign than the point, nor groups, nor a unit."""
    return (written.decimal, written.thousands, written.unit) == PLAIN


@lru_cache
def pattern_of(written: Any) -> str:
    """The regular expression for numbers written as `written` says, without blanks around them.

    Groups of digits and a unit may be absent, except "%": 12 among percentages, and a number, may be a share.
    """
    digits, decimal = r"\d+", re.escape(written.decimal)
    if written.thousands is not None:
        sign = re.escape(written.thousands)
        digits = rf"(?:\d{{1,3}}(?:{sign}\d{{2,3}})*{sign}\d{{3}}|\d+)"
    number = rf"(?:{digits}(?:{decimal}\d*)?|{decimal}\d+)(?:[eE][+-]?\d+)?"
    if written.unit is None:
        return rf"^[+-]?{number}$"
    unit = re.escape(written.unit)
    before, after = rf"^[+-]? ?{unit} ?[+-]?{number}$", rf"^[+-]?{number} ?{unit}$"
    return f"{before}|{after}" if unit == "%" else f"{before}|{after}|^[+-]?{number}$"


def id_of(value: Any, encoding: IdEncoding) -> int | bytes | None:
    """The id that a value means: UTF-8 text, or an int64. Raises UnreadableError if it is not an id."""
    value = single(value)
    if value is None:
        return None
    if isinstance(value, date | time):  # pyarrow says which integer a time is, and which text
        return ids(pa.array([value]), encoding)[0][0].as_py()  # type: ignore[no-any-return]
    return text_of(value) if encoding == "bytes" else integer_of(value, encoding)


def text_of(value: Any) -> bytes:
    """UTF-8 of text; decimal digits of a whole number; 1 or 0; the shortest text of another float."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        if abs(value) >= MAX_EXACT_FLOAT:
            raise UnreadableError("not exact")
        value = int(value) if value.is_integer() else value
    if isinstance(value, str | int | float | Decimal | timedelta):
        with suppress(ValueError):  # half of a surrogate pair, or thousands of digits
            return str(int(value) if isinstance(value, bool) else value).encode()
    raise UnreadableError("no text")


def integer_of(value: Any, encoding: IdEncoding) -> int:
    """An integer, exactly: to a column of integers 12, 12.0, " 12", "012" and "1.2e1" are 12.

    From 2^63 up in two's complement, if `encoding` is uint64.
    """
    number: int | None = None
    if isinstance(value, str | bytes | Decimal):
        text = as_text(value).strip()
        if encoding == "hex" and not isinstance(value, Decimal):
            number = int(text, 16) if re.fullmatch(HEX, text) else None
        elif re.fullmatch(INTEGER, text, re.ASCII):
            number = int(text) if len(text) <= MAX_DIGITS else None
        elif re.fullmatch(NUMBER, text, re.ASCII):
            number = _whole(text)
    elif isinstance(value, float):
        number = int(value) if value.is_integer() and abs(value) < MAX_EXACT_FLOAT else None
    elif isinstance(value, int):
        number = int(value)
    low, high = (0, 2**64) if encoding == "uint64" else (-(2**63), 2**63)
    if number is None or not low <= number < high:
        raise UnreadableError("no integer")
    return (number + 2**63) % 2**64 - 2**63


def _whole(text: str) -> int | None:
    with suppress(InvalidOperation):  # an exponent of 19 digits
        decimal = Decimal(text)
        if decimal.adjusted() < MAX_DIGITS and decimal == decimal.to_integral_value():
            return int(decimal)
    return None


def as_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def list_of(value: Any, separator: str | None) -> list[Any]:
    """The values in a cell of lists; text is cut. Raises UnreadableError if it should be a JSON array and is not."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [*value]
    value = single(value)
    if value is None or value == "":
        return []
    if not isinstance(value, str) or separator is None:
        return [value]
    return json_list(value) if separator == JSON_LISTS else value.split(separator)


def json_list(text: str) -> list[str | None]:
    """The ids in a JSON array. Raises UnreadableError if it is not such an array."""
    try:
        found = _JSON.decode(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(item is None or isinstance(item, str) for item in found):
        raise UnreadableError("no JSON array of ids")
    return found


def json_float(literal: str) -> float | str:
    """A number in JSON that has a fraction or an exponent: as written if a float need not hold it exactly."""
    number = float(literal)
    return number if abs(number) < MAX_EXACT_FLOAT else literal


def json_text(literal: str) -> str:
    """The id that a number in JSON means: its text, often as it is written."""
    if len(literal) < 16 and literal[-1] != "0" and "0.000" not in literal and "e" not in literal.lower():
        return literal
    number = json_float(literal)
    return number if isinstance(number, str) else text_of(number).decode()


_JSON = json.JSONDecoder(parse_int=str, parse_float=json_text)


def seconds_of(value: Any, zone: str | None = None) -> Any:
    """A time or date, also in ISO 8601, as unix seconds, rounded down to microseconds; any other value as it is.
    zone: as for `as_seconds`."""
    if isinstance(value, str) and re.match(ISO_DATE, value):
        with suppress(ValueError):
            value = datetime.fromisoformat(value.strip())
    if not isinstance(value, date) or type(value).__name__ == "NaTType":
        return value
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    value = value.replace(tzinfo=None) if zone == WRITTEN else value
    return (value - datetime(1970, 1, 1, tzinfo=value.tzinfo and UTC)) // timedelta(microseconds=1) / 1e6


# ---- columns


def column_of(cells: Any) -> Column:
    """Values as an Arrow array if they are of one plain type, else as a list. Raises TypeError for anything else."""
    if isinstance(cells, str | bytes | Mapping):
        raise TypeError(f"{type(cells).__name__} is no column of cells; pass a list of them")
    if not isinstance(cells, list | tuple) and getattr(cells, "dtype", None) != np.dtype("O"):
        with suppress(pa.ArrowException, TypeError, OverflowError, ValueError):
            array = pa.array(cells, from_pandas=True)
            return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    cells = [*cells]
    kinds = {*map(type, cells)} - {type(None)}
    if kinds == {list}:
        kinds = {*map(type, chain.from_iterable(filter(None, cells)))} - {type(None)}
    if len(kinds) < 2 and kinds <= {bool, int, float, str}:
        with suppress(pa.ArrowException, OverflowError, ValueError):
            return pa.array(cells, from_pandas=True)
    return cells


def plain(array: pa.Array) -> pa.Array:
    """`array` without dictionaries, views and half floats, as one of the few types that are known here."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary).take(array.indices)
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.large_binary())
    if pa.types.is_float16(kind):
        return array.cast(pa.float32())
    return without_views(array)


def without_views(column: Any) -> Any:
    """A column without the layouts of views, also in lists, for which Arrow lacks functions."""
    kind = column.type.value_type if is_list(column.type) else column.type
    if kind not in (pa.string_view(), pa.binary_view()):
        return column
    kind = pa.large_string() if is_text(kind) else pa.large_binary()
    return column.cast(pa.large_list(kind) if is_list(column.type) else kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is UTF-8 text in any layout."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is a list in any layout."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Whether a type is bytes in any layout."""
    is_wide = pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return bool(is_wide or pa.types.is_binary(kind) or pa.types.is_binary_view(kind))


def is_time(kind: pa.DataType) -> bool:
    """Whether a type is a timestamp, a date or a time of day, in any unit."""
    is_span = pa.types.is_duration(kind) or pa.types.is_interval(kind)
    return bool(pa.types.is_temporal(kind) and not is_span)


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values inside dictionaries and lists."""
    while is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind


def without_missing(column: Column, missing: Sequence[str], *, is_read: bool = False) -> Column:
    """`column` with null for each text, also within lists, that is one of `missing` apart from blanks around it.

    is_read: the reader has already made nulls of texts without blanks, except in lists. An array of another type, or
    without such a text, comes back as it is.
    """
    if isinstance(column, list):
        return [_with_null(value, missing) for value in column]
    if not missing:
        return column
    if is_list(column.type):
        return _list_without_missing(column, missing)
    if not is_text(value_type(column.type)):
        return column
    array = plain(column)
    found = _means_missing(array, missing, is_read=is_read)
    return array if found is None else pc.if_else(found, pa.scalar(None, array.type), array)


def _with_null(value: Any, missing: Sequence[str]) -> Any:
    if isinstance(value, list | tuple):
        return [_with_null(item, missing) for item in value]
    return None if isinstance(value, str) and value.strip(" ") in missing else value


def _list_without_missing(array: pa.Array, missing: Sequence[str]) -> pa.Array:
    values = pc.list_flatten(array)
    kept: Any = without_missing(values, missing)
    if kept.null_count == values.null_count:
        return array
    return pa.LargeListArray.from_arrays(pa.array(_splits(array)), kept, mask=array.is_null())


def _splits(array: pa.Array) -> NDArray[np.int64]:
    lengths = filled(pc.list_value_length(array), 0)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _has_blank(array: pa.Array) -> bool:
    """Whether there is a blank anywhere in text."""
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return False
    kind = np.int32 if pa.types.is_string(array.type) else np.int64
    first, last = np.frombuffer(offsets, kind)[[array.offset, array.offset + len(array)]]
    return bool((np.frombuffer(data, np.uint8)[first:last] == ord(" ")).any())


def _means_missing(array: pa.Array, missing: Sequence[str], *, is_read: bool) -> pa.Array | None:
    """A mask of the texts that mean a missing value; None if there is none."""
    wanted = pa.array(list(missing), array.type)
    if _has_blank(array):
        found = pc.is_in(pc.utf8_trim(array, " "), value_set=wanted)
    else:
        found = None if is_read else pc.is_in(array, value_set=wanted)
    return found if found is not None and pc.any(found).as_py() else None


def _each(column: Column, read: Callable[[Any], Any], kind: pa.DataType) -> tuple[pa.Array, Mask]:
    """What `read` makes of each cell, null if it raises UnreadableError, and a mask of where it does."""
    if isinstance(column, pa.Array) and not pa.types.is_nested(column.type) and not pa.types.is_null(column.type):
        encoded = column.dictionary_encode()  # each different value once
        made, lost = _each(encoded.dictionary.to_pylist(), read, kind)
        rows = filled(encoded.indices, 0)
        return made.take(encoded.indices), lost[rows] & valid(column) if len(lost) else np.zeros(len(rows), np.bool_)
    found, bad = _read(column, read)
    return pa.array(found, kind), bad


def _read(column: Column, read: Callable[[Any], Any]) -> tuple[list[Any], Mask]:
    cells = column.to_pylist() if isinstance(column, pa.Array) else column
    found, bad = [None] * len(cells), np.zeros(len(cells), np.bool_)
    for row, value in enumerate(cells):
        try:
            found[row] = read(value)
        except UnreadableError:
            bad[row] = True
    return found, bad


def numbers(column: Column, written: Any = PLAIN) -> tuple[NDArray[np.float64], Mask]:
    """Numbers [n], NaN if a cell is missing or not a finite float32, and a mask [n] of those that are not."""
    array = plain(column) if isinstance(column, pa.Array) else None
    if array is not None and is_text(array.type):
        made = _plain_numbers(array) if is_plain(written) else written_numbers(array, written)[0]
    elif array is not None and is_number(array.type) and written.unit != "%":
        made = array.cast(pa.uint8()) if pa.types.is_boolean(array.type) else array
        made = made.cast(pa.float64(), safe=False)
    else:
        made, bad = _each(column if array is None else array, lambda value: number_of(value, written), pa.float64())
        return filled(made, np.nan), bad
    values = filled(made, np.nan)
    bad = ~(np.abs(values) < FLOAT32_END)
    if bad.any():
        bad &= valid(array) if is_text(array.type) else ~np.isnan(values)
        values = np.where(bad, np.nan, values)
    return values, bad


def is_number(kind: pa.DataType) -> bool:
    """Whether a type holds numbers that float64 can hold or approximate."""
    is_other = pa.types.is_boolean(kind) or pa.types.is_null(kind)
    return bool(is_other or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def check_number(kind: pa.DataType, name: str) -> None:
    """Raises ValueError if a column of this type holds neither numbers nor text."""
    kind = value_type(kind) if pa.types.is_dictionary(kind) else kind
    if not (is_number(kind) or is_text(kind) or pa.types.is_decimal(kind)):
        raise ValueError(f"column {name!r} has type {kind}, which is not a number; list it under categorical")


def _plain_numbers(array: pa.Array) -> pa.Array:
    """Text as float64, null if it is no number."""
    try:
        return pc.cast(array, pa.float64())
    except pa.ArrowInvalid:
        array = pc.utf8_trim_whitespace(array)
        good = pc.match_substring_regex(array, NUMBER)
        return pc.cast(pc.if_else(good, array, pa.scalar(None, array.type)), pa.float64())


def written_numbers(array: pa.Array, written: Any) -> tuple[pa.Array, Mask]:
    """Numbers in text as float64, and a mask of text that is not written as `written` says."""
    array = with_plain_blanks(array)
    good = pc.match_substring_regex(array, pattern_of(written))
    array = pc.if_else(good, array, pa.scalar(None, array.type))
    for sign in (written.unit, " ", written.thousands):
        array = array if sign is None else pc.replace_substring(array, sign, "")
    return pc.cast(pc.replace_substring(array, written.decimal, "."), pa.float64()), mask_of(pc.invert(good))


def with_plain_blanks(array: pa.Array) -> pa.Array:
    """Text without blanks around it, and with ordinary blanks in place of others."""
    for blank in OTHER_BLANKS:
        array = pc.replace_substring(array, blank, " ")
    return pc.utf8_trim_whitespace(array)


def as_seconds(column: Column, *, zone: str | None = None, format: str | None = None) -> Column:
    """Times and dates as unix seconds, rounded down to microseconds; any other column as it is.

    zone: if WRITTEN, seconds count on the clock of the offset that each time is written with. format: strptime format
    of times in text. If None, they are in ISO 8601.
    """
    if format is not None:
        return _by_format(column, format)
    if isinstance(column, list):
        return [seconds_of(value, zone) for value in column]
    kind = column.type
    is_coded = pa.types.is_dictionary(kind) and is_text(kind.value_type)
    if (is_coded or is_text(kind)) and pc.any(pc.match_substring_regex(plain(column), ISO_DATE)).as_py():
        return as_seconds(column.to_pylist(), zone=zone)
    if zone == WRITTEN and pa.types.is_timestamp(kind) and kind.tz is not None:
        return as_seconds(pc.local_timestamp(column))
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return column
    ticks = column.cast(pa.timestamp("ms") if pa.types.is_date(kind) else kind).cast(pa.int64())
    unit = kind.unit if pa.types.is_timestamp(kind) else "ms"
    whole = filled(ticks, 0) // (1000 if unit == "ns" else 1)
    return pa.array(whole / {"s": 1, "ms": 1e3}.get(unit, 1e6), mask=~valid(column))


def _by_format(column: Column, format: str) -> Column:
    """Text as unix seconds, as TimeReader reads it; any other value, and text that is not so written, as it is."""
    values = column if isinstance(column, list) else plain(column).to_pylist()
    texts = pa.array([value if isinstance(value, str) else None for value in values], pa.string())
    times: Any = as_seconds(pc.strptime(texts, format=format, unit="us", error_is_null=True))
    return column_of([value if time is None else time for value, time in zip(values, times.to_pylist(), strict=True)])


def on_clock(times: NDArray[np.float64], zone: str | None) -> NDArray[np.float64]:
    """Unix times of seconds, thousandths, millionths or billionths, which their size tells, as the seconds that the
    clock of a zone shows [n]. zone: a name such as Europe/Berlin; those that count there already if WRITTEN, or UTC."""
    scales = [(times >= least) for least in (1e17, 1e14, 1e11)]
    seconds: NDArray[np.float64] = times / np.select(scales, [1e9, 1e6, 1e3], 1.0)
    if zone in (None, WRITTEN):
        return seconds
    good = np.abs(seconds) < 1e11
    whole = np.floor(np.where(good, seconds, 0.0))
    moments = pa.array(whole.astype(np.int64)).cast(pa.timestamp("s", zone))
    shown = pc.local_timestamp(moments).cast(pa.int64()).to_numpy()
    return np.where(good, shown + (seconds - whole), np.nan)


def ids(column: Column, encoding: IdEncoding) -> tuple[pa.Array, Mask]:
    """Ids [n] as int64 or large binary, null if a cell is missing or not an id; and a mask [n] of these last."""
    kind = pa.large_binary() if encoding == "bytes" else pa.int64()
    array = plain(column) if isinstance(column, pa.Array) else column
    if isinstance(array, list) or pa.types.is_decimal(array.type):
        return _each(array, lambda value: id_of(value, encoding), kind)
    none = np.zeros(len(array), np.bool_)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    is_whole = pa.types.is_integer(array.type) or pa.types.is_null(array.type) or is_time(array.type)
    if encoding == "bytes" and (is_whole or is_text(array.type) or is_binary(array.type)):
        return (array if is_binary(array.type) else array.cast(pa.large_string())).cast(kind), none
    if encoding == "int" and is_text(array.type):
        with suppress(pa.ArrowInvalid):
            found = pc.cast(array, kind)
            padded = pc.and_(pc.starts_with(array, "0"), pc.greater(pc.binary_length(array), 1))
            if not pc.any(padded).as_py():  # Arrow also reads 0x1f
                return found, none
    if encoding != "bytes" and (is_whole or pa.types.is_floating(array.type)):
        return _integers(array, encoding)
    return _each(array, lambda value: id_of(value, encoding), kind)


def _integers(array: pa.Array, encoding: IdEncoding) -> tuple[pa.Array, Mask]:
    """Integers, whole floats, times and dates as int64, and a mask of what is no id of `encoding`.

    A NaN is missing, as pandas writes missing integers.
    """
    kind, missing = array.type, ~valid(array) if array.null_count else np.zeros(len(array), np.bool_)
    if pa.types.is_floating(kind):
        values = filled(array, np.nan).astype(np.float64)
        missing = np.isnan(values)
        bad = ~missing & ~((np.floor(values) == values) & (np.abs(values) < MAX_EXACT_FLOAT))
        values = np.where(missing | bad, 0, values).astype(np.int64)
    else:
        if not pa.types.is_integer(kind):
            array = array.cast(pa.int32() if is_time(kind) and kind.bit_width == 32 else pa.int64())
        values, bad = filled(array, 0), np.zeros(len(array), np.bool_)
    if (values.dtype == np.uint64) != (encoding == "uint64"):
        bad |= values > np.iinfo(np.int64).max if values.dtype == np.uint64 else values < 0
    values = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    missing |= bad
    return pa.array(values, mask=missing if missing.any() else None), bad


def no_id(column: Column) -> str:
    """Why cells of a column are not ids, and the cure."""
    kind = column.type if isinstance(column, pa.Array) else pa.null()
    if pa.types.is_floating(kind):
        cure = "an id must be a whole number below 2^53; correct the file, or list the column under dense"
    elif pa.types.is_integer(kind):  # only in prediction
        cure = "the data set was prepared from integers of another signedness; cast the column"
    else:
        cure = "set type: text for this column"
    return f"is not an exact integer id; {cure}"


def lists(column: Column, separator: str | None) -> tuple[Column, NDArray[np.int64], Mask]:
    """The items of all cells: of lists, of text that is cut at `separator`, or the cells themselves; where each cell's
    items begin [n + 1]; and a mask [n] of cells that are not lists, which have no items."""
    array = plain(column) if isinstance(column, pa.Array) else None
    if array is not None and separator not in (None, JSON_LISTS) and is_text(array.type):
        array = pc.split_pattern(pc.if_else(pc.equal(array, ""), pa.scalar(None, array.type), array), separator)
    if array is not None and is_list(array.type):
        return plain(pc.list_flatten(array)), _splits(array), np.zeros(len(array), np.bool_)
    if array is not None and not is_text(array.type):
        array = pc.if_else(pc.is_nan(array), None, array) if pa.types.is_floating(array.type) else array
        return array.drop_null(), np.cumsum([0, *valid(array)]), np.zeros(len(array), np.bool_)
    read, bad = _read(column, lambda value: list_of(value, separator))
    found = [items or [] for items in read]
    return column_of([*chain.from_iterable(found)]), np.cumsum([0, *map(len, found)], dtype=np.int64), bad


def fault_of(column: str, bad: Mask, cells: Column, reason: str) -> Fault | None:
    """A fault whose sentence shows the value as it was found; None if no cell is bad."""
    found = Fault(column, bad, int(bad.sum()), lambda row: f"{shown(cells, row)} {reason}")
    return found if found.num_cells else None


def shown(cells: Column, row: int) -> str:
    value = cells[row] if isinstance(cells, list) else cells[row].as_py()
    text = "an empty value" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- labels, weights and times, of rows that train or are judged


def to_label(column: Column, spec: LabelRule) -> tuple[NDArray[np.float32], Fault | None]:
    """A float32 per row, 0 or 1 unless `spec.kind` is number.

    Faults: a missing label; a number that is not finite; of a binary label without a rule in `spec`, any value but 0
    and 1, and in text "true" and "false" in any case.
    """
    array = plain(in_arrow(column))
    if spec.positive is not None:
        return _label_by_value(array, spec)
    check_number(array.type, spec.column)
    found, bad = numbers(array)
    if bad.any() and spec.kind == "binary" and spec.at_least is None and is_text(array.type):
        found, bad = numbers(_with_digits(array))
    bad |= np.isnan(found)
    if spec.at_least is not None:
        with np.errstate(invalid="ignore"):
            label = (found >= spec.at_least).astype(np.float32)
        return label, fault_of(spec.column, bad, array, "is not a number to compare with 'at_least'")
    label = found.astype(np.float32)
    if spec.kind == "number":
        return label, fault_of(spec.column, bad, array, "is not a finite number; every row needs a label")
    bad |= ~((label == 0) | (label == 1))
    reason = "is not a label; it must be 0 or 1 (or set label.positive or label.at_least)"
    return label, fault_of(spec.column, bad, array, reason)


def in_arrow(column: Column) -> pa.Array:
    """A column as an array, as text if its values are of several types."""
    return column if isinstance(column, pa.Array) else as_texts(column)


def as_texts(column: Column) -> pa.Array:
    """Text ids as text, null if a cell has none."""
    return _each(column, lambda value: as_text(text_of(single(value))), pa.string())[0]


def to_weight(column: Column, name: str) -> tuple[NDArray[np.float32], Fault | None]:
    """The weight of each row, and a fault for cells that are missing, not finite numbers, or below 0."""
    column = in_arrow(column)
    check_number(column.type, name)
    found, bad = numbers(column)
    bad |= ~((found >= 0) & (found <= np.finfo(np.float32).max))
    reason = "is not a weight; it must be a finite number, 0 or more"
    return np.where(bad, 0, found).astype(np.float32), fault_of(name, bad, column, reason)


def _with_digits(array: pa.Array) -> pa.Array:
    """Text with 1 for "true" and 0 for "false"."""
    words = pc.utf8_lower(pc.utf8_trim_whitespace(array))
    one, zero = (pa.scalar(digit, array.type) for digit in "10")
    return pc.if_else(pc.equal(words, "true"), one, pc.if_else(pc.equal(words, "false"), zero, array))


def _label_by_value(array: pa.Array, spec: LabelRule) -> tuple[NDArray[np.float32], Fault | None]:
    if not is_text(array.type) and not pa.types.is_integer(array.type):
        raise ValueError(f"label column {spec.column!r} has type {array.type}; 'positive' needs text or integers")
    positive = _is_one_of(array, spec, "positive", spec.positive)
    label = positive.astype(np.float32)
    if spec.negative is not None:
        known = positive | _is_one_of(array, spec, "negative", spec.negative)
        allowed = ", ".join(str(value) for value in (*spec.positive, *spec.negative))
        return label, fault_of(spec.column, ~known, array, f"is not a label; it must be one of {allowed}")
    return label, fault_of(spec.column, ~valid(array), array, "is missing; every row needs a label")


def _is_one_of(array: pa.Array, spec: LabelRule, name: str, values: Sequence[str | int]) -> Mask:
    try:
        wanted = pa.array([str(v) if is_text(array.type) else v for v in values], type=array.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        raise ValueError(
            f"label.{name} {list(values)} cannot be compared with column {spec.column!r} of type {array.type}"
        ) from None
    return mask_of(pc.is_in(array, value_set=wanted))


class TimeReader(NamedTuple):
    """How text times of a column are read, decided once from the first rows, so that all chunks are read alike."""

    target: pa.DataType | None = None
    format: str | None = None

    @staticmethod
    def for_column(sample: pa.Array, format: str | None) -> TimeReader:
        """A reader for numbers as they are, else for `format`, else for ISO 8601, zoned if most values are."""
        sample = plain(sample).drop_null()
        if not is_text(sample.type) or format is not None or not len(sample):
            return TimeReader(format=format)
        sample = pc.utf8_trim_whitespace(sample)
        # Most of the values decide: a bad first value must not make good ones bad.
        targets = (pa.int64(), pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
        counts = list[int]()
        while len(sample) not in counts and len(counts) < len(targets):
            counts.append(len(sample) - cast_each(sample, targets[len(counts)]).null_count)
        return TimeReader(targets[counts.index(max(counts))] if max(counts) else pa.timestamp("us"))

    def __call__(self, array: pa.Array, column: str) -> tuple[NDArray[np.int64], Fault | None]:
        """An int64 that rises with time: the unit of timestamps and integers, microseconds for float seconds."""
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
        missing = ~valid(array)
        values = filled(array.cast(pa.int64(), safe=False), 0)
        return values, self._fault(column, missing, source)

    def ticks_per_s(self, sample: pa.Array, column: str) -> float | None:
        """Units per second of the times that are read; None if they are numbers, and those in `sample`, its first
        cells, are not unix times in seconds (whole ones also of thousandths, millionths or billionths), or are whole
        and all look like dates that digits write."""
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
    def _fault(column: str, bad: Mask, source: pa.Array) -> Fault | None:
        cure = "correct the row, or give its format (time.format, --time-format)"
        return fault_of(column, bad, source, f"is not a time like the others; {cure}")


def cast_each(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Casts value by value, to null if a value does not cast."""
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


def filled(array: pa.Array, value: float) -> NDArray[Any]:
    """Numbers as NumPy, null as `value`. Without nulls it makes no copy, which `fill_null` would."""
    numbers: NDArray[Any] = (array.fill_null(value) if array.null_count else array).to_numpy(zero_copy_only=False)
    return numbers


def mask_of(array: Any) -> Mask:
    """A boolean Arrow array as a NumPy mask of its own memory, null as False."""
    return np.array(pc.coalesce(array, pa.scalar(value=False)).to_numpy(zero_copy_only=False), dtype=bool)


def valid(array: pa.Array) -> Mask:
    """A mask of the cells that are not null."""
    return mask_of(array.is_valid())
