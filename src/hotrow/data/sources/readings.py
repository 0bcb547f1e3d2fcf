"""Tells what kind the values of a sampled column are: whole or decimal numbers, however written, times, or text.

A few values of another kind, as many as preparation takes for slips (`chunk.most_odd`), do not change a column's kind.
`guess.py` decides by the kind what the column is.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.data.chunk import most_odd
from hotrow.data.sources.convert import (
    INTEGER,
    NUMBER,
    WHOLE_FLOAT,
    is_text,
    parse_written,
    with_plain_blanks,
    written_pattern,
)
from hotrow.data.sources.schema import DenseSpec, Schema

DATE_FORMATS = (
    *("%Y/%m/%d", "%Y.%m.%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%m.%d.%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d %b %Y", "%b %d %Y", "%b %d, %Y", "%d/%b/%Y"),
)
"""Dates as logs write them, apart from ISO 8601."""
TIME_FORMATS = tuple(date + time for date in DATE_FORMATS for time in ("", " %H:%M", " %H:%M:%S", ":%H:%M:%S"))
ODD_SHARE = float(Schema.model_fields["odd_share"].default)
CURRENCIES = frozenset(
    {"USD", "EUR", "GBP", "CHF", "JPY", "CNY", "INR", "RUB", "BRL", "US$", "R$", "kr", "zł", "Kč", "Fr"}
)
"""Units of money besides the signs that Unicode knows as such."""
WRITTEN_SIGNS = ((".", None), (".", ","), (",", "."), (",", None), (",", " "), (".", " "), (".", "'"))
"""Decimal signs and signs between groups of digits; among equally good ones the first is taken."""
LOOKED_AT = 1000
"""So many different texts tell whether a column may hold numbers that are not written plainly."""
NO_NUMBERS = r"(?i)^[+-]?(nan|inf|infinity)$"
"""Words that appear in columns of floats; preparation refuses rows that have them."""
MOSTLY_FIT = 0.9
"""If at least this share of different texts have digits, signs and one unit alone, they may be numbers."""


@dataclass(frozen=True)
class Reading:
    """What kind the values of a column are."""

    kind: str
    numbers: np.ndarray[Any, Any] | None = None
    """The values as numbers, if they are numbers."""
    num_odd: int = 0
    odd: str = ""
    """The first odd value."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The signs in numbers, as in a schema, if they are not plain."""


def read_as(array: pa.Array) -> Reading:
    """Returns what kind the values are, but for as many odd ones as preparation takes for missing."""
    values = array.drop_null()
    if not len(values) or pa.types.is_nested(values.type):
        return Reading("other")
    if is_text(values.type):
        return _read_text(pc.utf8_trim_whitespace(values), most_odd(len(array), ODD_SHARE))
    if pa.types.is_boolean(values.type):
        return Reading("bool", values.cast(pa.uint8()).to_numpy(zero_copy_only=False))
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return Reading("time")
    if pa.types.is_integer(values.type) or (pa.types.is_decimal(values.type) and values.type.scale == 0):
        return Reading("int", values.cast(pa.float64(), safe=False).to_numpy())
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        numbers = values.cast(pa.float64()).to_numpy()
        numbers = numbers[np.isfinite(numbers)]
        # Integers with missing values arrive from pandas as floats.
        is_whole = len(numbers) and bool((np.floor(numbers) == numbers).all())
        return Reading("int" if is_whole else "float", numbers)
    is_bytes = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
    return Reading("text" if is_bytes else "other")


def _read_text(values: pa.Array, most: int) -> Reading:
    """Returns what texts without blanks around them are, but for at most `most` odd ones."""
    is_integer = pc.or_(pc.match_substring_regex(values, INTEGER), pc.match_substring_regex(values, WHOLE_FLOAT))
    whole = pc.cast(pc.if_else(is_integer, values, pa.scalar(None, values.type)), pa.float64())
    # More digits than 64 bits hold: no number, and an id only as text.
    is_long = pc.fill_null(pc.greater_equal(pc.abs(whole), 2.0**63), fill_value=False)
    if pc.sum(is_long).as_py() > most:
        return Reading("text")
    is_integer = pc.and_not(is_integer, is_long)
    if read := _if_most(values, is_integer, most, kind="int", written=DenseSpec(column="")):
        return read
    is_word = pc.match_substring_regex(values, NO_NUMBERS)
    is_number = pc.match_substring_regex(values, NUMBER)
    if pc.any(is_number).as_py() and pc.sum(pc.or_(is_word, is_number)).as_py() >= len(values) - most:
        is_padded = pc.sum(pc.match_substring_regex(values, r"^0\d")).as_py() > most
        if is_padded or pc.all(pc.or_(is_integer, is_word)).as_py():
            return Reading("text")
        return _if_most(values, is_number, len(values), kind="float", written=DenseSpec(column="")) or Reading("text")
    spaced = with_plain_blanks(values)
    for spec in _ways_to_write(spaced):
        good = pc.match_substring_regex(spaced, written_pattern(spec))
        if read := _if_most(values, good, most, kind="float", written=spec):
            return read
    is_time = pc.match_substring_regex(values, r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?$")
    return _if_most(values, is_time, most, kind="time") or Reading("time" if time_formats(values, most) else "text")


def _if_most(
    values: pa.Array, good: pa.Array, most: int, *, kind: str, written: DenseSpec | None = None
) -> Reading | None:
    """Returns the reading of a column whose `good` values are of `kind`; None if more than `most` are not.

    written: how they are written, if they are numbers.
    """
    odd = values.filter(pc.invert(good))
    if len(odd) > most or len(odd) == len(values):
        return None
    first = odd[0].as_py() if len(odd) else ""
    if written is None:
        return Reading(kind, None, len(odd), first)
    numbers = parse_written(values.filter(good), written)[0].to_numpy(zero_copy_only=False)
    signs = {name: value for name, value in written.model_dump(exclude_defaults=True).items() if name != "column"}
    return Reading(kind, numbers, len(odd), first, signs)


def _ways_to_write(values: pa.Array) -> list[DenseSpec]:
    """Returns the ways in which numbers may be written in a column of text, the likeliest first; none if it holds
    something else."""
    texts = pc.unique(values.slice(0, 20 * LOOKED_AT)).to_pylist()[:LOOKED_AT]
    rests = Counter(re.sub(r"[\d\s.,'+-]|(?<=\d)[eE](?=[+-]?\d)", "", text) for text in texts)
    unit = next((rest for rest, _ in rests.most_common(2) if rest and _is_unit(rest)), None)
    num_fit = rests[""] + (rests[unit] if unit else 0)
    if num_fit < MOSTLY_FIT * len(texts) or any(re.match(r"[+-]?0\d", text) for text in texts):
        return []
    specs = [DenseSpec(column="", decimal=d, thousands=t, unit=unit) for d, t in WRITTEN_SIGNS]  # type: ignore[arg-type]
    fits = [(sum(re.fullmatch(written_pattern(spec), text) is not None for text in texts), spec) for spec in specs]
    fits = [(count, spec) for count, spec in fits if unit or not _is_list(texts, spec)]
    return [spec for _, spec in sorted(fits, key=lambda fit: -fit[0])][:3]


def _is_unit(text: str) -> bool:
    return text == "%" or text in CURRENCIES or all(unicodedata.category(sign) == "Sc" for sign in text)


def _is_list(texts: Sequence[str], spec: DenseSpec) -> bool:
    """Returns whether what would be groups of digits may be ids of three digits: no number has a shorter first group
    or decimals."""
    if spec.thousands is None:
        return False
    grouped = [text for text in texts if spec.thousands in text]
    return all(re.fullmatch(rf"\d{{3}}(?:{re.escape(spec.thousands)}\d{{3}})+", text) for text in grouped)


def time_formats(values: pa.Array, most: int) -> tuple[str, ...]:
    """Returns the formats in TIME_FORMATS that read every value but `most`; none for ISO 8601, which needs none."""
    values = pc.unique(pc.utf8_trim_whitespace(values))
    most = min(most, len(values) // 10)
    if pc.sum(pc.match_substring_regex(values, r"^\d{4}-\d\d-\d\d")).as_py() >= len(values) - most:
        return ()
    found = TIME_FORMATS
    for some in (values[: most + 1], values):  # the first values refuse most formats; all of them take long
        found = tuple(f for f in found if pc.strptime(some, format=f, unit="s", error_is_null=True).null_count <= most)
    return found
