"""What a sample of rows shows about each column, before anybody decides what the column is for.

    look_at("age", column)          # ColumnFacts(kind="int", num_distinct=71, low=17.0, high=90.0, ...)

`guess.py` decides by these facts; a decision about one column is a `Guess`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.data.cells import JSON_LISTS, is_list, is_number, is_text, mask_of, plain, to_label
from hotrow.data.chunk import most_odd
from hotrow.data.sources.readings import ODD_SHARE, Counts, currencies, read_as, time_formats
from hotrow.data.sources.schema import LabelSpec

SHOWN_VALUES = 8
"""A label may be made from a column of text that has no more values than this."""
UNIX_TIMES = tuple((1e8 * unit, 4e9 * unit) for unit in (1, 1e3, 1e6, 1e9))
"""Seconds, milliseconds, microseconds and nanoseconds of the years 1973 to 2096."""
JOINED_IDS = r"^[A-Za-z_]{0,3}\d+( [A-Za-z_]{0,3}\d+)*$"
KEEP = "keep it, if it is known when a row is scored, with categorical or dense in fit or in the schema"
"""The cure for a column that is left out as a leak."""
WORD_PAIRS = (("no", "yes"), ("n", "y"), ("f", "t"), ("false", "true"))
"""Pairs of values that plainly mean 0 and 1."""


@dataclass(frozen=True)
class ColumnFacts:
    """Facts that a sample shows about one column."""

    name: str
    kind: str
    """What the values are, with text parsed: text, int, float, bool, time, list or other."""
    stored: str
    """Arrow type."""
    num_rows: int
    num_missing: int
    num_distinct: int
    num_once: int
    """Values seen exactly once."""
    low: float = 0.0
    high: float = 0.0
    median: float = 0.0
    is_unix: bool = False
    """Whether all numbers but a few are unix times."""
    share_ones: float | None = None
    """Share of 1, for a column that has only 0 and 1."""
    share_binary: float = 0.0
    """Share of rows that hold 0 or 1."""
    values: tuple[str, ...] = ()
    """All values of a column of text, the most frequent first, if there are two to SHOWN_VALUES."""
    separator: str | None = None
    num_odd: int = 0
    """Values that are not of the column's kind, few enough to be taken for missing ones."""
    odd: str = ""
    """The first such value."""
    written: Mapping[str, str] = field(default_factory=dict)
    """How numbers are written in text, as in a schema; empty if plainly."""
    time_formats: tuple[str, ...] = ()
    """For text with times that are not in ISO 8601: the strptime formats that read all of them."""
    currencies: tuple[str, ...] = ()
    """For text with amounts of money in several: their signs."""

    @property
    def in_all(self) -> str:
        """How many values there may be, if the sample is too small for all of them: a lower estimate (Chao 1984)."""
        twice = max(1, (self.num_distinct - self.num_once) // 2)
        estimate = self.num_distinct + self.num_once**2 / (2 * twice)
        if self.num_once < 0.02 * self.num_distinct:
            return ""
        return f"in {self.num_rows:,} rows; in all probably above {_round(estimate):,} values"

    @property
    def missing(self) -> str:
        odd = f", {self.num_odd:,} read as missing, such as {self.odd!r}" if self.num_odd else ""
        return (f", {100 * self.num_missing / self.num_rows:.2g} % missing" if self.num_missing else "") + odd

    @property
    def is_nearly_full(self) -> bool:
        """Whether no more values are missing or odd than preparation takes for slips."""
        return self.num_missing + self.num_odd <= most_odd(self.num_rows, ODD_SHARE)

    @property
    def word_pair(self) -> tuple[str, str] | None:
        """The values that mean 0 and 1, as stored, if there are two whose words say so."""
        if self.kind in ("int", "float") and self.num_distinct == 2 and (self.low, self.high) == (-1, 1):
            return "-1", "1"
        by_word = {value.strip().lower(): value for value in self.values}
        pair = next((pair for pair in WORD_PAIRS if {*by_word} == {*pair} and len(self.values) == 2), None)
        return None if pair is None else (by_word[pair[0]], by_word[pair[1]])


@dataclass(frozen=True)
class Guess:
    """The guess about one column."""

    role: str
    """label, time, dense, categorical, or "" if the column is left out."""
    column: str
    spec: dict[str, Any]
    reason: str
    evidence: str = ""
    """The figures behind the reason."""


def look_at(name: str, column: pa.ChunkedArray) -> ColumnFacts:
    """Returns the facts about one sampled column, whose missing values are null."""
    array, stored = column.combine_chunks(), str(column.type)
    if is_list(array.type):
        items = plain(pc.list_flatten(plain(array)))
        inner = look_at(name, pa.chunked_array([items])) if not is_list(items.type) else None
        kind = "list" if inner is not None and inner.kind in ("text", "int") else "other"
        distinct, once = (inner.num_distinct, inner.num_once) if inner is not None else (0, 0)
        return ColumnFacts(name, kind, stored, len(array), array.null_count, distinct, once)
    array = plain(array)
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    values, counts = _distinct(array)
    facts: dict[str, Any] = {"num_distinct": len(counts), "num_once": int((counts == 1).sum())}
    facts["share_binary"] = counts[_is_binary(values)].sum() / max(len(array), 1)
    read = read_as(values, counts, len(array))
    kind, numbers = read.kind, read.numbers
    facts |= {"num_odd": read.num_odd, "odd": read.odd, "written": read.written}
    if numbers is not None and len(numbers):
        facts |= {"low": numbers.min(), "high": numbers.max(), "median": float(np.median(numbers))}
        outside = (((numbers < low) | (numbers > high)).sum() for low, high in UNIX_TIMES)
        facts["is_unix"] = min(outside) <= most_odd(len(array), ODD_SHARE)
        if set(np.unique(numbers)) <= {0.0, 1.0}:
            facts["share_ones"] = float(numbers.mean())
    elif kind == "text" and facts["share_binary"] == 1:
        facts["share_ones"] = float(np.mean(to_label(array, LabelSpec(column=name))[0]))
    separator = _separator(values, counts) if kind == "text" else None
    facts["currencies"] = currencies(values) if kind == "text" and is_text(array.type) else ()
    if kind == "text" and 2 <= len(counts) <= SHOWN_VALUES:
        facts["values"] = tuple(str(values[i].as_py()) for i in np.argsort(-counts, kind="stable").tolist())
    if kind == "time" and is_text(array.type):
        facts["time_formats"] = time_formats(values, most_odd(len(array), ODD_SHARE))
    return ColumnFacts(name, kind, stored, len(array), array.null_count, separator=separator, **facts)


def _distinct(array: pa.Array) -> tuple[pa.Array, Counts]:
    """Returns the distinct values by first appearance, missing ones left out, and the rows of each."""
    if pa.types.is_nested(array.type):
        return array[:0], np.empty(0, np.int64)
    found = pc.value_counts(array.drop_null())
    return found.field("values"), found.field("counts").to_numpy()


def _is_binary(values: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns which values are 0 or 1, or in text true or false."""
    if not (is_text(values.type) or is_number(values.type)):
        return np.zeros(len(values), np.bool_)
    fault = to_label(values, LabelSpec(column=""))[1]
    return np.ones(len(values), np.bool_) if fault is None else ~fault.rows


def _separator(values: pa.Array, counts: Counts) -> str | None:
    """Returns what joins several values in most rows of a text column: a character, or JSON_LISTS."""
    for separator in ("|", ";", "^"):
        if counts[mask_of(pc.match_substring(values, separator))].sum() > 0.3 * counts.sum():
            return separator
    if pc.all(pc.match_substring_regex(values, r"^\s*\[.*\]\s*$")).as_py():
        return JSON_LISTS
    if _is_joined_by_commas(values, counts):
        return "," if pc.any(pc.match_substring_regex(values, r",[^ ]")).as_py() else ", "
    return " " if _is_joined_by_blanks(values, counts) else None


def _is_joined_by_commas(values: pa.Array, counts: Counts) -> bool:
    """Whether most cells hold several items of a small set, which come at any place, unlike parts of an address."""
    several = mask_of(pc.match_substring(values, ","))
    if counts[several].sum() <= 0.5 * counts.sum():
        return False
    cells = pc.split_pattern(values.filter(pa.array(several)), ",")
    items, cell = pc.utf8_trim_whitespace(pc.list_flatten(cells)), pc.list_parent_indices(cells).to_numpy()
    rows, is_first = counts[several][cell], np.diff(cell, prepend=-1) > 0
    begins = mask_of(pc.is_in(items, items.filter(pa.array(is_first))))
    is_small_set = 5 * len(pc.unique(items)) <= rows.sum()
    return bool(is_small_set and rows[begins & ~is_first].sum() > 0.2 * rows[~is_first].sum())


def _is_joined_by_blanks(values: pa.Array, counts: Counts) -> bool:
    """Returns whether texts are ids with blanks between: short words that end in digits, and no grouped numbers."""
    joined = mask_of(pc.match_substring(values, " "))
    if counts[joined].sum() <= 0.3 * counts.sum():
        return False
    grouped = pc.match_substring_regex(values.filter(pa.array(joined)), r"^[+-]?\d{1,3}( \d{3})+$")
    return bool(pc.all(pc.match_substring_regex(values, JOINED_IDS)).as_py() and not pc.all(grouped).as_py())


def shown(name: str) -> str:
    """Returns a column's name for a list of names, quoted if it would be misread there."""
    plain = name.isprintable() and name == name.strip() and name and not re.search(r"[,;'\"]", name)
    return name if plain else repr(name)


def is_like(pattern: str, name: str) -> bool:
    """Returns whether a name fits; RecBole's files append the type to a name, as in `rating:float`."""
    plain_name = re.sub(r":(token|float|token_seq|float_seq)$", "", name)
    return re.fullmatch(pattern, plain_name, re.IGNORECASE) is not None


def _round(value: float) -> int:
    digits = max(0, len(str(int(value))) - 2)
    return int(round(value / 10**digits) * 10**digits)
