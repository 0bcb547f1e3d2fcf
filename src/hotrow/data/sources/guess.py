"""Guesses a first schema from the files: what each column seems to be, and why, for a person to check.

Arrow types and a sample of rows decide, and names where labels, times and the order of lists are concerned. What a
column of numbers is, its evidence decides (`kinds.py`); what gives the label away is left out (`leaks.py`). Every guess
has its reason; columns that no rule fits are left out, and the result says so. `hotrow init` writes it as YAML,
`hotrow.fit` uses it as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.base.machine import usable_cores
from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.base.records import nearest
from hotrow.data.cells import JSON_LISTS, MISSING, NUMBER, numbers, without_missing
from hotrow.data.sources.columns import open_table
from hotrow.data.sources.crosses import find_crosses
from hotrow.data.sources.evidence import MIN_OF_EACH, Tally
from hotrow.data.sources.facts import KEEP, ColumnFacts, Guess, is_like, look_at, shown
from hotrow.data.sources.guess_label import MOSTLY, Labels, find_label, label_rule, labels_of, other_labels
from hotrow.data.sources.guess_time import clock_of, find_time, holds_unix_times
from hotrow.data.sources.kept import KeptReader
from hotrow.data.sources.kinds import MIN_BUCKETS, Kind, cuts, tell_kind
from hotrow.data.sources.leaks import find_leaks
from hotrow.data.sources.options import ReadOptions, Role, with_read_options
from hotrow.data.sources.sample import sample_rows
from hotrow.data.sources.schema import (
    DEFAULT,
    CsvSpec,
    DenseSpec,
    LabelSpec,
    Schema,
    SplitKind,
    SplitSpec,
    parse_schema,
)
from hotrow.data.sources.screen import MANY, MAY_BE_IDS, MOST_IDS, strength, strongest
from hotrow.data.sources.tabular import TableReader, TextReader
from hotrow.data.sources.training import Training

T = TypeVar("T")
R = TypeVar("R")
FURTHER_TIME = "a further time; the transforms hour, weekday and age make inputs of one"
PLACE_NAMES, MOST_PLACES = r"(.*_)?(position|pos|rank|slot)", 1000
SEQUENCE_NAMES = r".*(hist|seq|recent|last|prev|session).*"
MANY_ROWS = 1000
"""With at least this many sampled rows, ids of which none repeats are names of rows."""
SOME_ROWS = 100
"""With at least this many, whole numbers that follow one another without a gap are names of rows."""
MOST_LISTED = 200
"""Names of columns in a line."""
LEAST = "a column of numbers that alone tells least of the label"


@dataclass
class SchemaGuess:
    """Guesses about all columns in the order of the files; several labels come first, as they were told."""

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
    is_binary: bool = True
    """Whether the label is 0 or 1, so that statistics can count the positive ones."""
    crosses: tuple[tuple[str, ...], ...] = ()
    """Columns whose statistics are taken together as well: pairs, then triples."""
    clock: Mapping[str, list[Any]] = field(default_factory=dict)
    """What `transforms`, `categorical` and `statistics` have more if hours and weekdays are inputs."""
    at_serving: Mapping[str, Any] = field(default_factory=dict)
    """As in a schema."""
    reader: TableReader | None = None
    """The table, of which text has been read."""

    def of(self, role: str) -> list[Guess]:
        return [guess for guess in self.guesses if guess.role == role]

    def summary(self) -> str:
        """Returns the guesses in a few lines, for a user who wrote no schema."""
        roles = ("label", "weight", "time", "dense", "categorical", "")
        columns = {role: [shown(g.column) for g in self.of(role)] for role in roles}
        more = {role: f" and {n:,} more" for role, own in columns.items() if (n := len(own) - MOST_LISTED) > 0}
        names = {role: ", ".join(own[:MOST_LISTED]) + more.get(role, "") for role, own in columns.items()}
        told = ", ".join(f"{role} {names[role]}" for role in ("label", "weight", "time") if names[role])
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

    @property
    def statistics(self) -> list[list[str]]:
        """The columns of each statistic: every feature of one id, then `crosses`; none if labels are numbers."""
        return [*([name] for name in single_ids(self.guesses)), *map(list, self.crosses)] if self.is_binary else []

    @property
    def tables(self) -> dict[str, dict[str, int]]:
        """Options of tables. An id that is seen once has nothing to teach its own row but its label."""
        return {DEFAULT: {"min_count": 2}}

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
        value["label"] = [g.spec for g in self.of("label")]
        value |= {role: found[0].spec for role in ("weight", "time") if (found := self.of(role))}
        value |= {"csv": self.csv, "split": {"kind": self.split_kind}, "tables": self.tables}
        value |= {"statistics": self.statistics, "at_serving": self.at_serving}
        return parse_schema(value, where="guessed schema")


@with_read_options
def guess_columns(
    source: Any,
    *,
    read: ReadOptions,
    split: SplitSpec = SplitSpec(),  # noqa: B008
    rows: int | None = None,
    progress: ProgressCallback | None = None,
) -> SchemaGuess:
    """Returns the guess about every column with its reason; it need not find a label.

    {read}
    split: which rows will train; labels of other rows decide nothing (`training.py`). rows: how many of the first rows
    will be prepared; if None, all. progress: told of many columns.
    Raises ValueError if a named column is absent or cannot have its role.
    """
    weight, time, roles = read.weight, read.time, read.roles
    of_rules = [label_rule(text, ())[0] for text in read.label]
    reader, csv = _open(source, (*read.label, *of_rules, weight, time, *roles), read.null_values)
    names = list(reader.schema.names)
    told = [label_rule(text, names) for text in read.label]
    columns_of_labels = [column for column, *_ in told]
    named = [*(("label", column) for column in columns_of_labels), ("weight", weight), ("time", time)]
    named_at = (("at_serving", name) for name in read.at_serving)
    for what, name in (*named, *named_at, *((role, name) for name, role in roles.items())):
        if name is not None and name not in names:
            columns = ", ".join(map(shown, names))
            raise ValueError(f"{what} column {name!r} is not there{nearest(name, names)}; columns: {columns}")
    found = sample_rows(reader)
    sample, facts = _look_at_all(found.rows, names, csv.get("null_values", MISSING), progress)
    found = replace(found, rows=sample)
    if any(f.num_missing for f in facts):
        csv.setdefault("null_values", list(MISSING))
    given = [(name, what) for what, name in named if name is not None]
    if twice := [(name, what) for name, what in given if dict(given)[name] != what]:
        raise ValueError(
            f"column {twice[0][0]!r} cannot be both {twice[0][1]} and {dict(given)[twice[0][0]]}; name another"
        )
    weights = [_weight(f) for f in facts if f.name == weight]
    left = {weight, *(name for name, role in roles.items() if role == "exclude")}
    candidates = [f for f in facts if f.name in columns_of_labels or f.name not in left]
    nothing: list[tuple[str | None, dict[str, Any], str]] = [(None, {}, "")]
    looks = [find_label(candidates, column, made, read) for column, made, _ in told or nothing]
    question, notes = looks[0][1:]
    label_guesses = [guess for guess, *_ in looks if guess is not None]
    for g, (column, _, name) in zip(label_guesses, told, strict=False):
        g.spec.update({"name": name} if columns_of_labels.count(column) > 1 else {})
    left |= {g.column for g in label_guesses}
    others = [f for f in candidates if f.name not in left]
    every = [labels_of(sample, g) for g in label_guesses if g.role == "label"]
    labels = every[0] if every else None
    if labels is not None:
        labels = replace(labels, good=np.logical_and.reduce([each.good for each in every if each is not None]))
    training = Training(reader, csv.get("null_values", MISSING), split, read.skip_bad_rows, rows)
    time_guess, time_notes, set_later = find_time(others, time, read.time_format, found, labels, training)
    if labels is not None:
        labels = replace(labels, good=training.among(found, labels, time_guess))
    taken = {g.column: g for g in (*label_guesses, time_guess, *weights) if g is not None}
    if both := [name for name in roles if name in taken]:
        raise ValueError(f"column {both[0]!r} cannot be both {roles[both[0]]} and {taken[both[0]].role}; name it once")
    notes = (*notes, *(_several_currencies(f) for f in others if f.currencies and f.name not in (*taken, *roles)))
    later = [g for g in (*set_later, *other_labels(others, labels)) if g.column not in {**taken, **roles}]
    notes = (*notes, *time_notes, *(f"column {shown(g.column)} is left out as {g.reason}" for g in later))
    taken |= {g.column: g for g in later}
    taken |= {f.name: _told(f, roles[f.name]) for f in facts if f.name in roles}
    num_rows = max(reader.count_rows()[0], sample.num_rows)
    features = _features([f for f in facts if f.name not in taken], sample, labels)
    if num_left := sum(each[0].reason.startswith(LEAST) for each in features.values()):
        notes = (
            *notes,
            f"{num_left:,} columns are left out: {LEAST}; name in dense or categorical what you want to keep",
        )
    first = label_guesses if len(label_guesses) > 1 else []
    rest = [g for f in facts for g in ([taken[f.name]] if f.name in taken else features[f.name])]
    guesses = [*first, *(g for g in rest if g not in first)]
    more: dict[str, Any] = {"num_rows": num_rows, "is_binary": labels is not None, "reader": reader}
    more["at_serving"] = served = dict(read.at_serving)
    inputs = {g.column for g in guesses if g.role in ("dense", "categorical")}
    notes = (*notes, *_about_places([f for f in facts if f.name in inputs], served))
    guess = SchemaGuess(guesses, csv, found.origin, notes, question, **more)
    if labels is None:
        return _with_ids(guess, facts, sample)
    training_rows = sample.filter(pa.array(labels.good))
    for label in guess.of("label"):
        guess = _without_leaks(guess, label, facts, training_rows, roles)
    guess = _with_ids(_with_clock(guess, facts, training_rows), facts, sample)
    return _with_crosses(guess, facts, sample, labels)


def single_ids(guesses: Sequence[Guess]) -> list[str]:
    """Returns the columns that are features of one id per row."""
    return [g.column for g in guesses if g.role == "categorical" and "kind" not in g.spec]


def _with_ids(guess: SchemaGuess, facts: Sequence[ColumnFacts], sample: pa.Table) -> SchemaGuess:
    """Returns `guess`, in which the buckets of each number are ids if nothing else is: a model has tables."""
    if guess.of("categorical"):
        return guess
    by_name, more = {f.name: f for f in facts}, []
    for name in (g.column for g in guess.of("dense")):
        found = _numbers(by_name[name], sample.column(name))
        found = found[~np.isnan(found)]
        if buckets := cuts(Tally.of(found, np.zeros(len(found), np.bool_)), MIN_BUCKETS):
            reason = f"the number in {len(buckets) + 1} buckets, as there is no column of ids"
            more.append(Guess("categorical", name, {"column": name, "buckets": list(buckets)}, reason))
    return replace(guess, guesses=[*guess.guesses, *more])


def _about_places(facts: Sequence[ColumnFacts], at_serving: Mapping[str, Any]) -> Iterator[str]:
    """Yields what becomes of columns that seem to say where a row was shown when rows are scored."""
    for f in facts:
        if f.name in at_serving:
            yield f"column {shown(f.name)} counts as {at_serving[f.name]} in all rows that are scored"
        elif is_like(PLACE_NAMES, f.name) and f.kind == "int" and f.low >= 0 and f.high <= MOST_PLACES:
            constant = f"--at-serving {quote(f'{f.name}={f.low:.0f}')} scores as if all rows had {f.low:.0f}"
            yield f"column {shown(f.name)} must be known when a row is scored; if it is not, {constant}"


def _with_clock(guess: SchemaGuess, facts: Sequence[ColumnFacts], sample: pa.Table) -> SchemaGuess:
    """Returns `guess` with the hours and weekdays of its time, and of further times that do not give a label away."""
    formats = {g.column: g.spec.get("format") for g in guess.of("time")}
    time, names = next(iter(formats), None), sample.column_names
    further = [f.name for f in facts if f.kind == "time" and Guess("", f.name, {}, FURTHER_TIME) in guess.guesses]
    for g in guess.of("label"):
        found = find_leaks(sample, LabelSpec.model_validate(g.spec), further, times=further, time=time)
        further = [name for name in further if name not in {*found.leaks, *found.strong}]
    formats |= {f.name: None for f in facts if f.name in further and not f.time_formats}
    clocks = (clock_of(f, formats[f.name], sample.column(f.name), names) for f in facts if f.name in formats)
    made = [each for clock in clocks for each in clock]
    into = [spec["into"] for each in made for spec in each.values()]
    more = {"categorical": [{"column": name} for name in into], "statistics": [{"columns": [name]} for name in into]}
    return replace(guess, clock={"transforms": made, **more} if made else {})


def _with_crosses(guess: SchemaGuess, facts: Sequence[ColumnFacts], sample: pa.Table, labels: Labels) -> SchemaGuess:
    """Returns `guess` with the columns that may tell more together."""
    buckets = {g.column: g.spec.get("buckets") for g in guess.of("categorical")}
    by_name = {f.name: f for f in facts}

    def codes(name: str) -> NDArray[np.int64]:
        found: NDArray[np.int64]
        if edges := buckets[name]:
            numbers = _numbers(by_name[name], sample.column(name))
            found = np.where(np.isnan(numbers), -1, np.searchsorted(np.array(edges), numbers, "right"))
        else:
            coded = sample.column(name).combine_chunks().dictionary_encode()
            found = coded.indices.fill_null(-1).to_numpy().astype(np.int64)
        return found[labels.good.nonzero()[0]] + 1

    names = single_ids(guess.guesses)
    found = dict(zip(names, _each(codes, names), strict=True))
    return replace(guess, crosses=tuple(find_crosses(found, labels.positive[labels.good])))


def _look_at_all(
    rows: pa.Table, names: Sequence[str], missing: Sequence[str], progress: ProgressCallback | None
) -> tuple[pa.Table, list[ColumnFacts]]:
    """Returns the rows with null for each of the texts `missing`, and the facts about their columns."""
    meter = ProgressMeter(progress if len(names) > MANY else None, "guess", len(names), unit="columns")
    cells = _each(lambda name: without_missing(rows.column(name).combine_chunks(), missing), names)
    sample = pa.table(dict(zip(names, cells, strict=True)))
    facts = _each(lambda name: look_at(name, sample.column(name)), names, meter.update)
    meter.finish(len(facts))
    return sample, facts


def _each(function: Callable[[T], R], items: Sequence[T], report: Callable[[int], None] = lambda done: None) -> list[R]:
    """Returns what a function makes of each item, on all cores. report: takes how many are done."""
    found = list[R]()
    with ThreadPoolExecutor(usable_cores()) as executor:
        for each in executor.map(function, items):
            found.append(each)
            report(len(found))
    return found


def _features(facts: Sequence[ColumnFacts], sample: pa.Table, labels: Labels | None) -> dict[str, list[Guess]]:
    """Returns the guesses about columns that are neither told nor label nor time, by name."""
    many = [f for f in facts if f.kind == "float" or (f.kind in ("int", "bool") and f.num_distinct <= MAY_BE_IDS)]
    screened = _screened(many, sample, labels)
    others = [f for f in facts if f.name not in screened]
    found = _each(lambda f: _feature(f, sample.column(f.name), labels), others)
    return screened | {f.name: guesses for f, guesses in zip(others, found, strict=True)}


def _screened(facts: Sequence[ColumnFacts], sample: pa.Table, labels: Labels | None) -> dict[str, list[Guess]]:
    """Returns the guesses about columns of numbers that are left out because there are many, or are numbers alone."""
    if labels is None or len(facts) <= MANY:
        return {}
    good, positive = labels.good, labels.positive[labels.good]
    if min(positive.sum(), (~positive).sum()) < MIN_OF_EACH:
        return {}
    found = _each(lambda f: strength(_numbers(f, sample.column(f.name))[good], positive), facts)
    place = {name: i for i, name in enumerate(strongest({f.name: s for f, s in zip(facts, found, strict=True)}))}
    least = f"{LEAST} of {len(facts):,}"
    return {
        f.name: [
            _dense(f, Kind("a number alone, as there are many")) if f.name in place else Guess("", f.name, {}, least)
        ]
        for f in facts
        if place.get(f.name, MOST_IDS) >= MOST_IDS
    }


def _without_leaks(
    guess: SchemaGuess, of: Guess, facts: Sequence[ColumnFacts], sample: pa.Table, roles: Mapping[str, Role]
) -> SchemaGuess:
    """Returns `guess` without columns that give a label away; those that the user named stay, with a warning.

    Columns that are merely strong stay too, with a note.
    """
    label = LabelSpec.model_validate(of.spec)
    used = dict.fromkeys(g.column for role in ("dense", "categorical") for g in guess.of(role))
    times = [f.name for f in facts if f.name in used and (f.kind == "time" or holds_unix_times(f))]
    time = guess.of("time")[0].column if guess.of("time") else None
    found = find_leaks(sample, label, [*used], times=times, time=time)
    left = {name: reason for name, reason in found.leaks.items() if name not in roles}
    named = {name: reason for name, reason in found.leaks.items() if name in roles}
    notes = [f"{leak_text(name, reason)}; left out: {KEEP}" for name, reason in left.items()]
    notes += [
        f"column {shown(name)} {reason}; it stays: leave it out if it is not known when a row is scored"
        for name, reason in found.strong.items()
    ]
    kept = [f"{leak_text(name, reason)}; it stays, as you named it" for name, reason in named.items()]
    guesses: list[Guess] = []
    for g in guess.guesses:
        is_next = not guesses or guesses[-1].column != g.column  # both guesses of a column stand together
        leak = [Guess("", g.column, {}, f"a leak: {left[g.column]}")] if is_next and g.column in left else []
        guesses += leak if g.column in left else [g]
    notes, kept = ([*dict.fromkeys(texts)] for texts in ((*guess.notes, *notes), (*guess.warnings, *kept)))
    return replace(guess, guesses=guesses, notes=tuple(notes), warnings=tuple(kept))


def leak_text(column: str, reason: str) -> str:
    """Returns the sentence about a leak."""
    return f"column {shown(column)} may give the label away: {reason}"


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
        reader = TextReader(reader._files, CsvSpec.model_validate_json(json.dumps(csv)))
    return KeptReader(reader), csv


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


def _told(f: ColumnFacts, role: Role) -> Guess:
    """Returns the guess about a column to which the user gave a role. Raises ValueError if it cannot have the role."""
    if role == "exclude":
        return Guess("", f.name, {}, "left out, as told")
    if role == "text":
        if f.kind in ("list", "other") and f.num_missing < f.num_rows:
            raise ValueError(f"text lists column {f.name!r}, which holds {f.stored} values; name it in lists")
        spec = {"column": f.name, "type": "text"}
        return Guess(
            "categorical", f.name, spec, f"text, as told: {f.num_distinct:,} different values{f.missing}", f.in_all
        )
    is_empty = f.num_missing == f.num_rows
    if role == "dense":
        if f.kind not in ("int", "float", "bool") and not is_empty:
            cure = f": {_several_currencies(f)}" if f.currencies else ""
            raise ValueError(f"dense lists column {f.name!r}, which holds {f.stored} values that are not numbers{cure}")
        return _dense(f, Kind("as told"))
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


def _weight(f: ColumnFacts) -> Guess:
    if f.kind not in ("int", "float", "bool"):
        raise ValueError(f"weight column {f.name!r} holds {f.stored} values; it must hold numbers, 0 or more")
    return Guess("weight", f.name, {"column": f.name}, f"as told; {f.low:g} to {f.high:g}")


def _feature(f: ColumnFacts, column: pa.ChunkedArray, labels: Labels | None) -> list[Guess]:
    """Returns the guess about a column that is neither label nor time; two guesses if it is a number and ids."""
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
        return [Guess("", f.name, {}, FURTHER_TIME)]
    if f.kind == "list" or f.separator is not None:
        return [_list_feature(f)]
    kind = _kind_of_numbers(f, column, labels)
    if _names_rows(f, kind, column):
        return [Guess("", f.name, {}, "another value in every row: it names the row")]
    if kind is None:
        return [_categorical(f)]
    found = [_dense(f, kind)] if kind.is_number else []
    if kind.ids == "buckets":
        spec = {"column": f.name, "buckets": list(kind.buckets)}
        return [*found, Guess("categorical", f.name, spec, f"the number in {len(kind.buckets) + 1} buckets")]
    return [*found, _categorical(f, kind)] if kind.ids else found


def _kind_of_numbers(f: ColumnFacts, column: pa.ChunkedArray, labels: Labels | None) -> Kind | None:
    """Returns whether a column is a number, ids or both; None if it holds no numbers."""
    if f.kind not in ("int", "float"):
        return None
    good = np.ones(len(column), np.bool_) if labels is None else labels.good
    numbers = _numbers(f, column)[good]
    if np.isnan(numbers).all():
        return None
    positive = None if labels is None else labels.positive[good]
    return tell_kind(numbers, positive, transform=_transform(f))


def _numbers(f: ColumnFacts, column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the numbers of a column, NaN if a row has none."""
    return numbers(column.combine_chunks(), DenseSpec.model_validate({"column": f.name, **f.written}))[0]


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


def _several_currencies(f: ColumnFacts) -> str:
    return (
        f"column {shown(f.name)} holds amounts in {', '.join(f.currencies)}, so it is read as text: convert them to "
        f"one currency to have numbers, or leave it out (--exclude {quote(f.name)}, in Python exclude=[{f.name!r}])"
    )


def _dense(f: ColumnFacts, kind: Kind) -> Guess:
    tail = ", with a long tail" if _transform(f) == "log1p_clip0" else ""
    spec = {"column": f.name, "transform": _transform(f), **f.written}
    return Guess("dense", f.name, spec, f"{kind.reason}; {f.low:g} to {f.high:g}{tail}{f.missing}", kind.evidence)


def _categorical(f: ColumnFacts, kind: Kind | None = None) -> Guess:
    spec: dict[str, Any] = {"column": f.name}
    if f.kind == "int" and f.stored == "string" and not f.num_odd:
        spec["type"] = "int"
    what = {"text": "text", "bool": "true or false"}.get(f.kind, "ids")
    why, evidence = ("", "") if kind is None else (f"; {kind.reason}", kind.evidence)
    evidence = "; ".join(filter(None, (f.in_all, evidence)))
    return Guess("categorical", f.name, spec, f"{what}: {f.num_distinct:,} different values{f.missing}{why}", evidence)


def _list_feature(f: ColumnFacts) -> Guess:
    kind = "sequence" if is_like(SEQUENCE_NAMES, f.name) else "multi_hot"
    spec: dict[str, Any] = {"column": f.name, "kind": kind}
    if f.separator is not None:
        spec["separator"] = f.separator
    joined = "JSON arrays as text" if f.separator == JSON_LISTS else f"text joined by {f.separator!r}"
    what = "lists" if f.separator is None else joined
    order = "its name speaks of order" if kind == "sequence" else "taken for a set"
    return Guess(
        "categorical", f.name, spec, f"{what}, {order}: {f.num_distinct:,} different values{f.missing}", f.in_all
    )
