"""Tells what kind the values of a sampled column are: whole or decimal numbers, however written, times, or text.

A few values of another kind, as many as preparation takes for slips (`chunk.most_odd`), do not change a column's kind.
`guess.py` decides by the kind what the column is.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.data.cells import (
    INTEGER,
    WHOLE_FLOAT,
    is_text,
    mask_of,
    numbers,
    pattern_of,
    with_plain_blanks,
    written_numbers,
)
from hotrow.data.chunk import most_odd
from hotrow.data.sources.schema import DenseSpec, Schema

Counts: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

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
"""The number of different texts that tell whether a column may hold numbers not written plainly."""
NO_NUMBERS = r"(?i)^[+-]?(nan|inf|infinity)$"
"""Words that appear in columns of floats; preparation refuses rows that have them."""
MOSTLY_FIT = 0.9
"""If at least this share of different texts have digits, signs and one unit alone, they may be numbers."""


@dataclass(frozen=True)
class Reading:
    """The kind of a column's values."""

    kind: str
    numbers: np.ndarray[Any, Any] | None = None
    """The values as numbers, if they are numbers."""
    num_odd: int = 0
    odd: str = ""
    """The first odd value."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The signs in numbers, as in a schema, if they are not plain."""


def read_as(values: pa.Array, counts: Counts, num_rows: int) -> Reading:
    """Returns the kind of a column's values, apart from as many odd ones as preparation takes for missing.

    values: the distinct values that are not missing, by first appearance. counts: the rows of each. num_rows: all rows,
    those without a value among them.
    """
    if not len(values) or pa.types.is_nested(values.type):
        return Reading("other")
    if is_text(values.type):
        return _read_text(pc.utf8_trim_whitespace(values), counts, most_odd(num_rows, ODD_SHARE))
    if pa.types.is_boolean(values.type):
        return Reading("bool", np.repeat(values.cast(pa.uint8()).to_numpy(zero_copy_only=False), counts))
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return Reading("time")
    if pa.types.is_integer(values.type) or (pa.types.is_decimal(values.type) and values.type.scale == 0):
        return Reading("int", np.repeat(values.cast(pa.float64(), safe=False).to_numpy(), counts))
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        numbers = np.repeat(values.cast(pa.float64()).to_numpy(), counts)
        numbers = numbers[np.isfinite(numbers)]
        # Integers with missing values arrive from pandas as floats.
        is_whole = len(numbers) and bool((np.floor(numbers) == numbers).all())
        return Reading("int" if is_whole else "float", numbers)
    is_bytes = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
    return Reading("text" if is_bytes else "other")


def _read_text(values: pa.Array, counts: Counts, most: int) -> Reading:
    """Returns what distinct texts without blanks around them are, but for at most `most` odd rows."""

    def most_are(good: Mask) -> bool:
        return bool(good.any()) and int(counts[~good].sum()) <= most

    def reading(kind: str, good: Mask, numbers: NDArray[np.float64] | None = None) -> Reading:
        odd = values.filter(pa.array(~good))
        of_rows = None if numbers is None else np.repeat(numbers[good], counts[good])
        return Reading(kind, of_rows, int(counts[~good].sum()), odd[0].as_py() if len(odd) else "")

    is_whole = _fit(values, WHOLE_FLOAT, _fit(values, INTEGER))
    found, _ = numbers(values)
    whole = np.where(is_whole, found, np.nan)
    # More digits than 64 bits hold: no number, and an id only as text.
    is_integer = is_whole & (np.abs(whole) < 2.0**63)
    if counts[is_whole & ~is_integer].sum() > most:
        return Reading("text")
    if most_are(is_integer):
        return reading("int", is_integer, whole)
    is_word, is_number = _fit(values, NO_NUMBERS), ~np.isnan(found)
    if is_number.any() and counts[is_word | is_number].sum() >= counts.sum() - most:
        is_padded = counts[_fit(values, r"^0\d")].sum() > most
        if is_padded or (is_integer | is_word).all():
            return Reading("text")
        return reading("float", is_number, found)
    for spec in _ways_to_write(with_plain_blanks(values)):
        made, bad = written_numbers(values, spec)
        if most_are(~bad):
            signs = {name: sign for name, sign in spec.model_dump(exclude_defaults=True).items() if name != "column"}
            return replace(reading("float", ~bad, made.to_numpy(zero_copy_only=False)), written=signs)
    if most_are(is_time := _fit(values, r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?$")):
        return reading("time", is_time)
    return Reading("time" if time_formats(values, most) else "text")


def _fit(values: pa.Array, pattern: str, known: Mask | None = None) -> Mask:
    """Returns which texts a regular expression finds. known: texts that are known to fit."""
    if known is None:
        return mask_of(pc.match_substring_regex(values, pattern))
    known = known.copy()
    known[~known] = _fit(values.filter(pa.array(~known)), pattern)
    return known


def _ways_to_write(values: pa.Array) -> list[DenseSpec]:
    """The ways in which numbers may be written in a column of text, the likeliest first; none if it has none."""
    texts, rests = _rests(values)
    unit = next((rest for rest, _ in rests.most_common(2) if rest and _is_unit(rest)), None)
    num_fit = rests[""] + (rests[unit] if unit else 0)
    if num_fit < MOSTLY_FIT * len(texts) or any(re.match(r"[+-]?0\d", text) for text in texts):
        return []
    specs = [DenseSpec(column="", decimal=d, thousands=t, unit=unit) for d, t in WRITTEN_SIGNS]  # type: ignore[arg-type]
    fits = [(sum(re.fullmatch(pattern_of(spec), text) is not None for text in texts), spec) for spec in specs]
    fits = [(count, spec) for count, spec in fits if unit or not _is_list(texts, spec)]
    return [spec for _, spec in sorted(fits, key=lambda fit: -fit[0])][:3]


def _rests(values: pa.Array) -> tuple[list[str], Counter[str]]:
    """The first different texts, and how often each rest is left of them without digits and signs of numbers."""
    texts = pc.unique(values.slice(0, 2 * LOOKED_AT)).to_pylist()[:LOOKED_AT]
    return texts, Counter(re.sub(r"[\d\s.,'+-]|(?<=\d)[eE](?=[+-]?\d)", "", text) for text in texts)


def currencies(values: pa.Array) -> tuple[str, ...]:
    """The currencies of a column of text that holds amounts of money in several; else none."""
    texts, rests = _rests(values)
    found = tuple(rest for rest in rests if rest not in ("", "%") and _is_unit(rest))
    num_fit = sum(rests[rest] for rest in ("", *found))
    return found if len(found) > 1 and num_fit >= MOSTLY_FIT * len(texts) else ()


def _is_unit(text: str) -> bool:
    return text == "%" or text in CURRENCIES or all(unicodedata.category(sign) == "Sc" for sign in text)


def _is_list(texts: Sequence[str], spec: DenseSpec) -> bool:
    """Whether groups of digits may be ids of three digits: no number has a shorter first group or decimals."""
    if spec.thousands is None:
        return False
    grouped = [text for text in texts if spec.thousands in text]
    return all(re.fullmatch(rf"\d{{3}}(?:{re.escape(spec.thousands)}\d{{3}})+", text) for text in grouped)


def time_formats(values: pa.Array, most: int) -> tuple[str, ...]:
    """Returns the formats in TIME_FORMATS that read all but `most` values; none for ISO 8601, which needs none."""
    values = pc.unique(pc.utf8_trim_whitespace(values))
    most = min(most, len(values) // 10)
    if pc.sum(pc.match_substring_regex(values, r"^\d{4}-\d\d-\d\d")).as_py() >= len(values) - most:
        return ()
    found = TIME_FORMATS
    for some in (values[: most + 1], values):  # the first values refuse most formats; all of them take long
        found = tuple(f for f in found if pc.strptime(some, format=f, unit="s", error_is_null=True).null_count <= most)
    return found
