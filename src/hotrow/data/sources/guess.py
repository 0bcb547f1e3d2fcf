"""Guesses a first schema from the files: what each column seems to be, and why, for a person to check.

Arrow types and a sample of rows decide, and names where labels, times and the order of lists are concerned. What a
column of numbers is, its evidence decides (`kinds.py`); what gives the label away is left out (`leaks.py`). Every guess
has its reason; columns that no rule fits are left out, and the result says so. `hotrow init` writes it as YAML,
`hotrow.fit` uses it as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.base.machine import usable_cores
from hotrow.base.records import nearest
from hotrow.data.chunk import most_odd
from hotrow.data.sources.columns import open_table
from hotrow.data.sources.convert import (
    INTEGER,
    NUMBER,
    TimeReader,
    is_list,
    is_text,
    mask_of,
    plain,
    to_label,
    to_numbers,
    without_missing,
)
from hotrow.data.sources.evidence import CLEAR, Tally, weigh
from hotrow.data.sources.kinds import Kind, as_dense, tell_kind
from hotrow.data.sources.leaks import find_leaks
from hotrow.data.sources.options import ReadOptions, Role, with_read_options
from hotrow.data.sources.readings import ODD_SHARE, Counts, read_as, time_formats
from hotrow.data.sources.sample import sample_rows
from hotrow.data.sources.schema import (
    JSON_LISTS,
    MISSING,
    CsvSpec,
    DenseSpec,
    LabelSpec,
    Schema,
    SplitKind,
    parse_schema,
)
from hotrow.data.sources.tabular import TableReader, TextReader

LABEL_NAMES = r"(is_?)?(label|click(ed)?|target|y|convert(ed)?|conversion|install(ed)?|purchased?|response)"
ACTION_NAMES = rf"{LABEL_NAMES}|.*(action|behaviou?r|event|outcome|status).*"
TIME_NAMES = r"(.*_)?(time|timestamp|ts|date|datetime|hour|day|dt|unix_?time|(created|updated|event)_?at)"
SEQUENCE_NAMES = r".*(hist|seq|recent|last|prev|session).*"
UNIX_TIMES = tuple((1e8 * unit, 4e9 * unit) for unit in (1, 1e3, 1e6, 1e9))
"""Seconds, milliseconds, microseconds and nanoseconds of the years 1973 to 2096."""
LABEL_RULE = re.compile(r"\s*(.*?\S)\s*(?:>=\s*(-?\d+(?:\.\d+)?)|=\s*(\S.*?))\s*", re.DOTALL)
"""A rule that makes a label from a column: "rating >= 4", "action = buy, cart"."""
JOINED_IDS = r"^[A-Za-z_]{0,3}\d+( [A-Za-z_]{0,3}\d+)*$"
SHOWN_VALUES = 8
"""A label may be made from a column of text that has no more values than this."""
_MONTH, _DAY, _HOUR = "(0[1-9]|1[0-2])", "([0-2][0-9]|3[01])", "([01][0-9]|2[0-3])"
WRITTEN_DATES = (f"(19|20)..{_MONTH}{_DAY}({_HOUR})?", f"..{_MONTH}{_DAY}{_HOUR}")
"""Forms of dates such as 20141021, 2014102113, and 14102113 as in Avazu's logs."""
WORD_PAIRS = (("no", "yes"), ("n", "y"), ("f", "t"), ("false", "true"))
"""Pairs of values that plainly mean 0 and 1."""
POSITIVE_WORDS = (
    r"(yes|y|true|t|1|clicked|click|buy|bought|purchased?|order(ed)?|convert(ed)?|conversion|install(ed)?|success|won|win|"
    r"like[ds]?|positive|pos|good|approved|signup|subscribed?)"
)
NEGATIVE_WORDS = (
    r"(no|n|false|f|0|-1|none|not?[ _-].*|non[ _-]?.*|un.*|view(ed)?|pv|impression|show[ns]?|skip(ped)?|dismiss(ed)?|"
    r"lost|lose|dislike[ds]?|negative|neg|bad|fail(ed)?|cancel(l?ed)?|rejected)"
)
MOSTLY = 0.9
"""If at least this share of a label is 0 or 1, another value is a bad row and not another kind of label."""
MANY_ROWS = 1000
"""With at least this many sampled rows, ids of which none repeats are names of rows."""
SOME_ROWS = 100
"""With at least this many, whole numbers that follow one another without a gap are names of rows."""


MOST_OF_TIME = 0.05
"""A time that takes away more than this share of the label's LogLoss is set with the outcome: rates of clicks change
over time, but not as much."""
KEEP = "keep it, if it is known when a row is scored, with categorical or dense in fit or in the schema"


@dataclass(frozen=True)
class ColumnFacts:
    """What a sample shows about one column."""

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
    """The first of them."""
    written: Mapping[str, str] = field(default_factory=dict)
    """How numbers are written in text, as in a schema; nothing if plainly."""
    time_formats: tuple[str, ...] = ()
    """For text with times that are not in ISO 8601: the strptime formats that read all of them."""

    @property
    def cardinality(self) -> str:
        """Distinct values; if the sample is too small for all of them, with a lower estimate (Chao 1984)."""
        twice = max(1, (self.num_distinct - self.num_once) // 2)
        estimate = self.num_distinct + self.num_once**2 / (2 * twice)
        if self.num_once < 0.02 * self.num_distinct:
            return f"{self.num_distinct:,} values"
        return f"{self.num_distinct:,} values in {self.num_rows:,} rows, in all probably above {_round(estimate):,}"

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
        """The values that mean 0 and 1, as stored, if there are two and they say so."""
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


@dataclass
class SchemaGuess:
    """Guesses about all columns, in the order of the files."""

    guesses: list[Guess]
    csv: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    """What the guesses are based on, in words."""
    notes: tuple[str, ...] = ()
    """Choices that the user may want to change, each with the option for that."""
    question: str = ""
    """What the user must decide before there is a label; "" if the label is clear."""
    warnings: tuple[str, ...] = ()
    """Columns that the user named although they seem to give the label away."""
    num_rows: int = 0
    """About how many rows all files have."""

    def of(self, role: str) -> list[Guess]:
        return [guess for guess in self.guesses if guess.role == role]

    def summary(self) -> str:
        """Returns the guesses in a few lines, for a user who wrote no schema."""
        roles = ("label", "time", "dense", "categorical", "")
        names = {role: ", ".join(shown(g.column) for g in self.of(role)) for role in roles}
        told = ", ".join(f"{role} {names[role]}" for role in ("label", "time") if names[role])
        left_out = f"; left out {names['']}" if names[""] else ""
        line = (
            f"schema guessed: {told}; dense {names['dense'] or 'none'}; ids {names['categorical']}{left_out} "
            "(`hotrow init` writes it out for correction)"
        )
        return "\n".join([line, *(f"  {note}" for note in (*self.notes, *self.warnings))])

    @property
    def split_kind(self) -> SplitKind:
        """Split by time if there is a time column."""
        return "time" if self.of("time") else "random"

    def schema(self) -> Schema:
        """Returns the guesses as a schema. Raises ValueError if no label or no id column was found."""
        value: dict[str, Any] = {role: [g.spec for g in self.of(role)] for role in ("dense", "categorical")}
        if not self.of("label"):
            raise ValueError(
                self.question
                or f"no label column found in {self.origin}; name it (label=..., --label ...). Columns: "
                + ", ".join(shown(g.column) for g in self.guesses)
            )
        if not value["categorical"]:
            raise ValueError(
                f"no id column found in {self.origin}; name one (--categorical COLUMN, in Python categorical=[...])"
            )
        value["label"] = self.of("label")[0].spec
        if self.of("time"):
            value["time"] = self.of("time")[0].spec
        value |= {"csv": self.csv, "split": {"kind": self.split_kind}}
        return parse_schema(value, where="guessed schema")


@with_read_options
def guess_columns(source: Any, *, read: ReadOptions) -> SchemaGuess:
    """Returns the guess about every column with its reason; it need not find a label.

    {read}
    Raises ValueError if a named column is absent or cannot have its role.
    """
    label, time, roles = read.label, read.time, read.roles
    rule = LABEL_RULE.fullmatch(label or "")
    reader, csv = _open(source, (label, rule and rule[1], time, *roles), read.null_values)
    names = list(reader.schema.names)
    made: dict[str, Any] = {}
    if rule and label not in names:
        label = rule[1]
        made = {"at_least": float(rule[2])} if rule[2] else {"positive": [v.strip() for v in rule[3].split(",")]}
    for what, name in (("label", label), ("time", time), *((role, name) for name, role in roles.items())):
        if name is not None and name not in names:
            columns = ", ".join(map(shown, names))
            raise ValueError(f"{what} column {name!r} is not there{nearest(name, names)}; columns: {columns}")
    found = sample_rows(source, reader, CsvSpec.model_validate_json(json.dumps(csv)))
    sample, facts = _look_at_all(found.rows, names, csv.get("null_values", MISSING))
    if any(f.num_missing for f in facts):
        csv.setdefault("null_values", list(MISSING))
    candidates = [f for f in facts if f.name == label or roles.get(f.name) != "exclude"]
    label_guess, question, notes = _find_label(candidates, label, made)
    label_name = None if label_guess is None else label_guess.column
    others = [f for f in candidates if f.name != label_name and roles.get(f.name) != "exclude"]
    labels = None if label_guess is None or label_guess.role != "label" else _labels(sample, label_guess)
    time_guess, time_notes, set_later = _find_time(others, time, read.time_format, sample, labels)
    taken = {g.column: g for g in (label_guess, time_guess) if g is not None}
    if both := [name for name in roles if name in taken]:
        raise ValueError(f"column {both[0]!r} cannot be both {roles[both[0]]} and {taken[both[0]].role}; name it once")
    later = [g for g in (*set_later, *_other_labels(others, labels)) if g.column not in {**taken, **roles}]
    notes = (*notes, *time_notes, *(f"column {shown(g.column)} is left out as {g.reason}" for g in later))
    taken |= {g.column: g for g in later}
    taken |= {f.name: _told(f, roles[f.name]) for f in facts if f.name in roles}
    num_rows = max(reader.count_rows()[0], sample.num_rows)
    features = _features([f for f in facts if f.name not in taken], sample, labels, sample.num_rows / num_rows)
    guesses = [g for f in facts for g in ([taken[f.name]] if f.name in taken else features[f.name])]
    guess = SchemaGuess(guesses, csv, found.origin, notes, question, num_rows=num_rows)
    return _without_leaks(guess, facts, sample, roles) if guess.of("label") else guess


def _look_at_all(rows: pa.Table, names: Sequence[str], missing: Sequence[str]) -> tuple[pa.Table, list[ColumnFacts]]:
    """Returns the rows with null for each of the texts `missing`, and the facts about their columns."""
    with ThreadPoolExecutor(usable_cores()) as executor:
        cells = executor.map(lambda name: without_missing(rows.column(name).combine_chunks(), missing), names)
        sample = pa.table(dict(zip(names, cells, strict=True)))
        return sample, list(executor.map(lambda name: look_at(name, sample.column(name), ()), names))


def _features(
    facts: Sequence[ColumnFacts], sample: pa.Table, labels: _Labels | None, sampled: float
) -> dict[str, list[Guess]]:
    """Returns the guesses about columns that are neither told nor label nor time, by name."""
    with ThreadPoolExecutor(usable_cores()) as executor:
        found = executor.map(lambda f: _feature(f, sample.column(f.name), labels, sampled), facts)
        return {f.name: guesses for f, guesses in zip(facts, found, strict=True)}


@dataclass(frozen=True)
class _Labels:
    """The labels of the sampled rows."""

    name: str
    positive: np.ndarray[Any, np.dtype[np.bool_]]
    """[num_rows]"""
    good: np.ndarray[Any, np.dtype[np.bool_]]
    """[num_rows], False if the label of a row is bad."""


def _labels(sample: pa.Table, label: Guess) -> _Labels:
    values, fault = to_label(sample.column(label.column).combine_chunks(), LabelSpec.model_validate(label.spec))
    good = np.ones(len(values), np.bool_) if fault is None else ~fault.rows
    return _Labels(label.column, values == 1, good)


def _other_labels(facts: Sequence[ColumnFacts], labels: _Labels | None) -> list[Guess]:
    """Returns columns that are named like labels and hold 0 and 1: what happens after the event is not known before."""
    if labels is None:
        return []
    reason = f"a leak: named like a label itself, it may be known only after {shown(labels.name)}; {KEEP}"
    named = (f for f in facts if f.share_ones is not None and f.num_distinct == 2 and _like(LABEL_NAMES, f.name))
    return [Guess("", f.name, {}, reason) for f in named]


def _without_leaks(
    guess: SchemaGuess, facts: Sequence[ColumnFacts], sample: pa.Table, roles: Mapping[str, Role]
) -> SchemaGuess:
    """Returns `guess` without columns that give the label away; those that the user named stay, with a warning.

    Columns that are merely strong stay too, with a note.
    """
    label = LabelSpec.model_validate(guess.of("label")[0].spec)
    used = [*dict.fromkeys(g.column for role in ("dense", "categorical") for g in guess.of(role))]
    times = [f.name for f in facts if f.name in used and (f.kind == "time" or _holds_unix_times(f))]
    time = guess.of("time")[0].column if guess.of("time") else None
    found = find_leaks(sample, label, used, times=times, time=time)
    left = {name: reason for name, reason in found.leaks.items() if name not in roles}
    named = {name: reason for name, reason in found.leaks.items() if name in roles}
    notes = [f"{leak_text(name, reason)}; left out: {KEEP}" for name, reason in left.items()]
    notes += [
        f"column {shown(name)} {reason}; it stays: leave it out if it is not known when a row is scored"
        for name, reason in found.strong.items()
    ]
    kept = [f"{leak_text(name, reason)}; it stays, as you named it" for name, reason in named.items()]
    guesses: dict[tuple[str, str], Guess] = {}
    for g in guess.guesses:
        g = Guess("", g.column, {}, f"a leak: {left[g.column]}") if g.column in left else g
        guesses[g.column, g.role] = g
    return replace(guess, guesses=[*guesses.values()], notes=(*guess.notes, *notes), warnings=tuple(kept))


def leak_text(column: str, reason: str) -> str:
    """Returns the sentence about a leak."""
    return f"column {shown(column)} may give the label away: {reason}"


def shown(name: str) -> str:
    """Returns a column's name for a list of names, quoted if it would be misread there."""
    plain = name.isprintable() and name == name.strip() and name and not re.search(r"[,;'\"]", name)
    return name if plain else repr(name)


def _open(source: Any, told: Sequence[str | None], null_values: Sequence[str]) -> tuple[TableReader, dict[str, Any]]:
    """Returns the reader, and how text is read, as in a schema.

    told: known column names, which only a header can hold. null_values: more texts that mean a missing value.
    """
    missing = {"null_values": list(dict.fromkeys([*CsvSpec().null_values, *null_values]))} if null_values else {}
    reader = open_table(source, CsvSpec.model_validate_json(json.dumps(missing)))
    if not isinstance(reader, TextReader):
        return reader, missing
    csv: dict[str, Any] = {"delimiter": reader.delimiter, **missing}
    if not any(name in reader.names for name in told) and not _is_header(*reader.first_records()):
        csv["column_names"] = [f"c{i}" for i in range(len(reader.names))]
    return open_table(source, CsvSpec.model_validate_json(json.dumps(csv))), csv


def _is_header(first: list[str], *rows: list[str]) -> bool:
    """Returns whether the first line names columns: above columns of numbers it holds mostly no numbers.

    If there is no column of numbers, names must be distinct, and none of them a number or empty, except the first,
    which is the row index that pandas writes.
    """

    def is_number(text: str) -> bool:
        return re.match(NUMBER, text) is not None

    rows = tuple(row for row in rows if len(row) == len(first))
    below = [[row[i] for row in rows if row[i]] for i in range(len(first))]
    numeric = [name for name, values in zip(first, below, strict=True) if values and all(map(is_number, values))]
    votes = sum(-1 if is_number(name) else bool(name) for name in numeric)
    if votes:
        return votes > 0
    return any(first) and len(set(first)) == len(first) and not any(map(is_number, first)) and "" not in first[1:]


def look_at(name: str, column: pa.ChunkedArray, missing: Sequence[str] = MISSING) -> ColumnFacts:
    """Returns the facts about one sampled column. missing: texts that mean a missing value."""
    array = without_missing(column.combine_chunks(), missing)
    stored = str(column.type)
    if is_list(array.type):
        items = plain(pc.list_flatten(plain(array)))
        inner = look_at(name, pa.chunked_array([items]), missing) if not is_list(items.type) else None
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
    kind = values.type
    if is_text(kind):
        return mask_of(pc.match_substring_regex(values, r"^\s*([01](\.0+)?|(?i:true|false))\s*$"))
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return mask_of(pc.is_in(values.cast(pa.float64(), safe=False), pa.array([0.0, 1.0])))
    return np.zeros(len(values), np.bool_)


def _separator(values: pa.Array, counts: Counts) -> str | None:
    """Returns what joins several values in most rows of a text column: a character, or JSON_LISTS."""
    for separator in ("|", ";", "^"):
        if counts[mask_of(pc.match_substring(values, separator))].sum() > 0.3 * counts.sum():
            return separator
    if pc.all(pc.match_substring_regex(values, r"^\s*\[.*\]\s*$")).as_py():
        return JSON_LISTS
    return " " if _is_joined_by_blanks(values, counts) else None


def _is_joined_by_blanks(values: pa.Array, counts: Counts) -> bool:
    """Returns whether texts are ids with blanks between: short words that end in digits, and no grouped numbers."""
    joined = mask_of(pc.match_substring(values, " "))
    if counts[joined].sum() <= 0.3 * counts.sum():
        return False
    grouped = pc.match_substring_regex(values.filter(pa.array(joined)), r"^[+-]?\d{1,3}( \d{3})+$")
    return bool(pc.all(pc.match_substring_regex(values, JOINED_IDS)).as_py() and not pc.all(grouped).as_py())


def _find_label(
    facts: Sequence[ColumnFacts], name: str | None, made: Mapping[str, Any]
) -> tuple[Guess | None, str, tuple[str, ...]]:
    """Returns the label or None, what the user must decide about it, and what the user may decide otherwise.

    made: how the label is made from the values of column `name`, as in a schema.
    """
    if name is not None:
        return _named_label(next(f for f in facts if f.name == name), made), "", ()
    binary = [f for f in facts if f.share_ones is not None and f.num_distinct == 2 and not f.num_missing]
    alike = [f for f in facts if _like(LABEL_NAMES, f.name)]
    named = [f for f in alike if f in binary or f.word_pair is not None]
    named = named or [f for f in alike if f.share_binary >= MOSTLY]
    if named:
        others = [f"another column could be the label: {shown(f.name)} (--label {quote(f.name)})" for f in named[1:]]
        return _binary_label(named[0], "named like a label"), "", tuple(others)
    if len(binary) == 1:
        return _binary_label(binary[0], "the only column of 0 and 1"), "", ()
    ratings = [f for f in alike if f.kind in ("int", "float") and f.num_distinct <= SHOWN_VALUES]
    ratings += [f for f in facts if _like(r"(.*_)?(rating|stars)", f.name) and f.kind in ("int", "float")]
    if len(binary) > 1:
        options = ", ".join(f"--label {quote(f.name)}" for f in binary[:10])
        return None, f"{len(binary)} columns hold 0 and 1; say which is the label: {options}", ()
    if ratings:
        return Guess("", ratings[0].name, {}, "may be the label"), ask_for_rule(ratings[0]), ()
    actions = sorted((f for f in facts if f.kind == "text" and f.values), key=lambda f: not _like(ACTION_NAMES, f.name))
    return None, "; ".join(f"no column holds 0 and 1; {ask_for_values(f)}" for f in actions[:1]), ()


def ask_for_rule(facts: ColumnFacts) -> str:
    """Returns the question which numbers in a column are positive, and how to answer it."""
    middle = math.ceil((facts.low + facts.high) / 2 + 0.5)
    rule = f"{facts.name} >= {middle}"
    return (
        f"column {facts.name!r} holds {facts.num_distinct} values from {facts.low:g} to {facts.high:g}, not 0 and 1; "
        f"say which are positive, for example from {middle} up: --label {quote(rule)}, in Python label={rule!r}, "
        f"in a schema label: {{column: {json.dumps(facts.name)}, at_least: {middle}}}"
    )


def ask_for_values(facts: ColumnFacts) -> str:
    """Returns the question which words in a column are positive, and how to answer it."""
    positive = likely_positive(facts.values)
    rule = f"{facts.name} = {positive.strip()}"
    return (
        f"column {facts.name!r} holds {', '.join(map(shown, facts.values))}; if the label is made of it, say which are "
        f"positive: "
        f"--label {quote(rule)}, in Python label={rule!r}, in a schema label: {{column: {json.dumps(facts.name)}, "
        f"positive: {json.dumps([positive])}}}"
    )


def likely_positive(values: Sequence[str]) -> str:
    """Returns the value that means 1, as far as words tell; else one that is not plainly the other one.

    values: the most frequent first.
    """

    def like(words: str, value: str) -> bool:
        return re.fullmatch(words, value.strip(), re.IGNORECASE) is not None

    told = [value for value in values if like(POSITIVE_WORDS, value)]
    others = [value for value in values if not like(NEGATIVE_WORDS, value)]
    return told[-1] if told else others[0] if 0 < len(others) < len(values) else values[1]


def _binary_label(facts: ColumnFacts, why: str) -> Guess:
    if (pair := facts.word_pair) and facts.share_ones is None:
        return _label_of_words(facts, pair, why)
    if facts.share_ones is None or facts.share_binary < 1:
        num_others = round((1 - facts.share_binary) * facts.num_rows)
        return Guess("label", facts.name, {"column": facts.name}, f"{why}; {num_others:,} rows are neither 0 nor 1")
    return Guess("label", facts.name, {"column": facts.name}, f"{why}; {100 * facts.share_ones:.3g} % are 1")


def _label_of_words(facts: ColumnFacts, pair: tuple[str, str], why: str) -> Guess:
    """Returns a label of two values that plainly mean 0 and 1."""
    rule = {"positive": [pair[1]], "negative": [pair[0]]} if facts.kind == "text" else {"at_least": 1}
    spec = {"column": facts.name, **rule}
    return Guess("label", facts.name, spec, f"{why}; {pair[1].strip()!r} is 1 and {pair[0].strip()!r} is 0")


def _named_label(facts: ColumnFacts, made: Mapping[str, Any]) -> Guess:
    if "at_least" in made:
        if facts.kind not in ("int", "float"):
            raise ValueError(f"label column {facts.name!r} holds no numbers to compare with {made['at_least']:g}")
        return Guess("label", facts.name, {"column": facts.name, **made}, f"{made['at_least']:g} and more are 1")
    if "positive" in made:
        # Some files have spaces around a value, which a rule cannot hold.
        stored = {value.strip(): value for value in facts.values}
        positive = [stored.get(value, value) for value in made["positive"]]
        if facts.values and (unknown := [value for value in positive if value not in facts.values]):
            raise ValueError(
                f"in the rows looked at, label column {facts.name!r} holds "
                f"{', '.join(map(shown, facts.values))}, never "
                f"{unknown[0]!r}{nearest(unknown[0], facts.values)}"
            )
        if "string" not in facts.stored and all(re.fullmatch(INTEGER, value) for value in positive):
            positive = [int(value) for value in positive]
        return Guess("label", facts.name, {"column": facts.name, "positive": positive}, f"{positive} are 1")
    if facts.share_ones is not None or facts.share_binary >= MOSTLY:
        return _binary_label(facts, "0 and 1")
    if facts.word_pair is not None:
        return _binary_label(facts, "as told")
    if facts.kind in ("int", "float"):
        raise ValueError(f"label {ask_for_rule(facts)}")
    if facts.values:
        raise ValueError(f"label {ask_for_values(facts)}")
    raise ValueError(
        f"label column {facts.name!r} holds {facts.num_distinct} different {facts.stored} values, not 0 and 1; write "
        f"a schema that says which are positive: label: {{column: {json.dumps(facts.name)}, positive: [...]}}"
    )


def _find_time(
    facts: Sequence[ColumnFacts], name: str | None, format: str | None, sample: pa.Table, labels: _Labels | None
) -> tuple[Guess | None, tuple[str, ...], list[Guess]]:
    """Returns the time column or None, what the user may decide otherwise, and times that are set with the outcome.

    name, format: of the time column, as the user told.
    """
    for f in facts:
        if f.name == name:
            spec = _time_spec(f) if format is None else told_time(f, format)
            return Guess("time", f.name, spec, "as told"), (), []
    if name is not None:
        raise ValueError(f"column {name!r} cannot be both label and time; name another")
    notes = [
        f"column {shown(f.name)} holds times that may be read in {len(f.time_formats)} ways; to split by it: "
        f"--time {quote(f.name)} --time-format {quote(f.time_formats[0])}, or the format {quote(f.time_formats[1])} "
        "(in Python time=..., time_format=...)"
        for f in facts
        if len(f.time_formats) > 1
    ]
    able = [(f, kind) for f in facts if (kind := _kind_of_time(f)) and f.is_nearly_full]
    set_later: list[Guess] = []
    # Of several times the one that tells most moments apart is the event's: neither a day nor a user's first visit.
    for f, kind in sorted(able, key=lambda pair: (-pair[0].num_distinct, pair[0].name)):
        if labels is None or not (share := _told_by_time(f, sample, labels)):
            return Guess("time", f.name, _time_spec(f), kind), tuple(notes), set_later
        why = f"a leak: this time tells {share:.0%} of the label, so it may be set with it; to split by it nonetheless:"
        set_later.append(Guess("", f.name, {}, f"{why} --time {quote(f.name)}"))
    return None, (*notes, *_times_with_gaps(facts)), set_later


def _kind_of_time(f: ColumnFacts) -> str:
    """Returns what kind of time a column holds; "" if rows cannot be split by it."""
    if f.kind == "time" and len(f.time_formats) < 2:
        return f"holds times ({f.stored})"
    if _is_unix_time(f):
        return "unix times"
    return "dates as whole numbers, which rise with time" if _is_written_date(f) else ""


def _told_by_time(f: ColumnFacts, sample: pa.Table, labels: _Labels) -> float:
    """Returns which share of the label's LogLoss a time takes away, if it is too large for a change over time."""
    spec, array = _time_spec(f), sample.column(f.name).combine_chunks()
    times, fault = TimeReader.for_column(array.slice(0, 1024), spec.get("format"))(array, f.name)
    good = labels.good if fault is None else labels.good & ~fault.rows
    tally = Tally.of(times[good], labels.positive[good])
    found = weigh(tally, as_dense(tally, "standardize"))
    share = 0.0 if found is None else 1 - found.values / found.base
    return share if found is not None and found.gain >= CLEAR and share > MOST_OF_TIME else 0.0


def _times_with_gaps(facts: Sequence[ColumnFacts]) -> list[str]:
    """Returns a sentence about each column that would be the time if fewer of its values were missing."""
    notes = []
    for f in facts:
        if not f.is_nearly_full and _kind_of_time(f):
            lost = f.num_missing + f.num_odd
            notes.append(
                f"column {shown(f.name)} holds times, but {lost:,} of {f.num_rows:,} sampled rows have none; rows are "
                f"split at random. To leave those rows out and split by it: --time {quote(f.name)} --skip-bad-rows "
                f"{lost} or more (in Python time={f.name!r}, skip_bad_rows={lost})"
            )
    return notes


def told_time(f: ColumnFacts, format: str) -> dict[str, Any]:
    """Returns the time column as in a schema. Raises ValueError if `format` is for text, and there is none."""
    if not any(kind in f.stored for kind in ("string", "null", "dictionary")):
        raise ValueError(f"time_format is for text, but column {f.name!r} holds {f.stored} values; leave it out")
    return {"column": f.name, "format": format}


def _time_spec(f: ColumnFacts) -> dict[str, Any]:
    if len(f.time_formats) > 1:
        ways = " or ".join(map(repr, f.time_formats))
        raise ValueError(
            f"time column {f.name!r} may be read as {ways}; say which: "
            f"--time {quote(f.name)} --time-format {quote(f.time_formats[0])}, in Python time_format=..."
        )
    return {"column": f.name, **({"format": f.time_formats[0]} if f.time_formats else {})}


def _is_unix_time(f: ColumnFacts) -> bool:
    return _holds_unix_times(f) and _like(TIME_NAMES, f.name)


def _holds_unix_times(f: ColumnFacts) -> bool:
    return f.kind in ("int", "float") and not f.written and f.is_unix


def _is_written_date(f: ColumnFacts) -> bool:
    """Returns whether a column holds whole numbers such as 20141021 or 2014102113, which rise with time."""
    if f.kind != "int" or not _like(TIME_NAMES, f.name):
        return False
    return all(any(re.fullmatch(form, f"{value:.0f}") for form in WRITTEN_DATES) for value in (f.low, f.high))


def _told(f: ColumnFacts, role: Role) -> Guess:
    """Returns the guess about a column to which the user gave a role. Raises ValueError if it cannot have the role."""
    if role == "exclude":
        return Guess("", f.name, {}, "left out, as told")
    if role == "text":
        return _text_ids(f)
    is_empty = f.num_missing == f.num_rows
    if role == "dense":
        if f.kind not in ("int", "float", "bool") and not is_empty:
            raise ValueError(f"dense lists column {f.name!r}, which holds {f.stored} values that are not numbers")
        return _dense(f, "as told")
    is_list = f.kind == "list" or f.separator is not None
    if role == "lists":
        if not is_list:
            raise ValueError(
                f"lists lists column {f.name!r}, which holds single values ({f.stored}); name it in categorical, or "
                "write a schema with its separator"
            )
        return _list_feature(f)
    if f.kind in ("list", "other") and not is_empty:
        raise ValueError(f"categorical lists column {f.name!r}, which holds {f.stored} values; name it in lists")
    return _categorical(f)


def _feature(f: ColumnFacts, column: pa.ChunkedArray, labels: _Labels | None, sampled: float) -> list[Guess]:
    """Returns the guess about a column that is neither label nor time; two guesses if it is a number and ids.

    sampled: the share of all rows that were looked at.
    """
    if f.kind == "other":
        why = (
            "no value in the sample"
            if f.num_missing == f.num_rows
            else f"type {f.stored} is not an id, a number or a list of ids"
        )
        return [Guess("", f.name, {}, why)]
    if f.num_distinct <= 1 and not f.num_missing and f.kind != "list":
        return [Guess("", f.name, {}, "the same value in every sampled row")]
    if f.kind == "time":
        return [Guess("", f.name, {}, "a further time; derive an hour or weekday column to use it")]
    if f.kind == "list" or f.separator is not None:
        return [_list_feature(f)]
    kind = _kind_of_numbers(f, column, labels, sampled)
    if _names_rows(f, kind, column):
        return [Guess("", f.name, {}, "another value in every row: it names the row")]
    if kind is None:
        return [_categorical(f)]
    found = [_dense(f, kind.reason)] if kind.is_number else []
    if kind.ids == "buckets":
        spec = {"column": f.name, "buckets": list(kind.buckets)}
        return [*found, Guess("categorical", f.name, spec, f"the number in {len(kind.buckets) + 1} buckets")]
    return [*found, _categorical(f, kind.reason)] if kind.ids else found


def _kind_of_numbers(f: ColumnFacts, column: pa.ChunkedArray, labels: _Labels | None, sampled: float) -> Kind | None:
    """Returns whether a column is a number, ids or both; None if it holds no numbers."""
    if f.kind not in ("int", "float"):
        return None
    good = np.ones(len(column), np.bool_) if labels is None else labels.good
    numbers = _numbers(f, column)[good]
    if np.isnan(numbers).all():
        return None
    positive = None if labels is None else labels.positive[good]
    return tell_kind(numbers, positive, transform=_transform(f), sampled=sampled)


def _numbers(f: ColumnFacts, column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the numbers of a column, NaN if a row has none."""
    return to_numbers(column.combine_chunks(), f.name, DenseSpec.model_validate({"column": f.name, **f.written}))[0]


def _names_rows(f: ColumnFacts, kind: Kind | None, column: pa.ChunkedArray) -> bool:
    """Returns whether a column that repeats no value is taken for a name of the row."""
    if f.num_distinct != f.num_rows - f.num_missing or f.num_rows < SOME_ROWS or f.kind not in ("text", "int"):
        return False
    if f.kind == "int":
        numbers = _numbers(f, column)
        steps = np.diff(np.sort(numbers[~np.isnan(numbers)]))
        if (steps == 1).mean() >= MOSTLY:  # a sample has gaps between the runs of rows that it is made of
            return True
    return f.num_rows >= MANY_ROWS and (kind is None or not kind.is_number)


def _transform(f: ColumnFacts) -> str:
    return "log1p_clip0" if f.low >= 0 and f.high > 20 * f.median else "standardize"


def _dense(f: ColumnFacts, reason: str) -> Guess:
    why = "never negative, long tail" if _transform(f) == "log1p_clip0" else "spread evenly enough"
    spec = {"column": f.name, "transform": _transform(f), **f.written}
    return Guess("dense", f.name, spec, f"{reason}; {f.low:g} to {f.high:g}, {why}{f.missing}")


def _categorical(f: ColumnFacts, why: str = "") -> Guess:
    spec: dict[str, Any] = {"column": f.name}
    if f.kind == "int" and f.stored == "string" and not f.num_odd:
        spec["type"] = "int"
    return Guess(
        "categorical", f.name, spec, f"{f'{why}; ' if why else f'{_kind_words(f)}, '}{f.cardinality}{f.missing}"
    )


def _text_ids(f: ColumnFacts) -> Guess:
    if f.kind in ("list", "other") and f.num_missing < f.num_rows:
        raise ValueError(f"text lists column {f.name!r}, which holds {f.stored} values; name it in lists")
    return Guess(
        "categorical", f.name, {"column": f.name, "type": "text"}, f"text, as told, {f.cardinality}{f.missing}"
    )


def _list_feature(f: ColumnFacts) -> Guess:
    kind = "sequence" if _like(SEQUENCE_NAMES, f.name) else "multi_hot"
    spec: dict[str, Any] = {"column": f.name, "kind": kind}
    if f.separator is not None:
        spec["separator"] = f.separator
    joined = "JSON arrays as text" if f.separator == JSON_LISTS else f"text joined by {f.separator!r}"
    what = "lists" if f.separator is None else joined
    order = "its name speaks of order" if kind == "sequence" else "taken for a set"
    return Guess("categorical", f.name, spec, f"{what}, {order}, {f.cardinality}{f.missing}")


def _kind_words(f: ColumnFacts) -> str:
    words = {"text": "text", "int": "whole numbers taken for ids", "bool": "true or false"}
    return words.get(f.kind, f"{f.stored} taken for ids")


def _like(pattern: str, name: str) -> bool:
    """Returns whether a name fits; RecBole's files append the type to a name, as in `rating:float`."""
    plain_name = re.sub(r":(token|float|token_seq|float_seq)$", "", name)
    return re.fullmatch(pattern, plain_name, re.IGNORECASE) is not None


def _round(value: float) -> int:
    digits = max(0, len(str(int(value))) - 2)
    return int(round(value / 10**digits) * 10**digits)
