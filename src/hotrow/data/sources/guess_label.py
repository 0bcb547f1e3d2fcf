"""Finds the column that holds the label, or the question that the user must answer before there is one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa

from hotrow.base.records import nearest
from hotrow.data.cells import INTEGER, to_label
from hotrow.data.sources.facts import KEEP, SHOWN_VALUES, ColumnFacts, Guess, is_like, shown
from hotrow.data.sources.options import ReadOptions
from hotrow.data.sources.schema import LabelSpec
from hotrow.objectives import DEFAULT, OBJECTIVES
from hotrow.objectives.objective import LabelKind

LABEL_NAMES = r"(is_?)?(label|click(ed)?|target|y|convert(ed)?|conversion|install(ed)?|purchased?|response)"
ACTION_NAMES = rf"{LABEL_NAMES}|.*(action|behaviou?r|event|outcome|status).*"
LABEL_RULE = re.compile(r"\s*(.*?\S)\s*(?:>=\s*(-?\d+(?:\.\d+)?)|=\s*(\S.*?))\s*", re.DOTALL)
"""A rule that makes a label from a column: "rating >= 4", "action = buy, cart"."""
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


@dataclass(frozen=True)
class Labels:
    """The labels of the sampled rows."""

    name: str
    positive: np.ndarray[Any, np.dtype[np.bool_]]
    """[num_rows]"""
    good: np.ndarray[Any, np.dtype[np.bool_]]
    """[num_rows], False if the label of a row is bad."""


def labels_of(sample: pa.Table, label: Guess) -> Labels | None:
    """Returns the labels of the sampled rows; None if they are numbers, with which no column is compared."""
    spec = LabelSpec.model_validate(label.spec)
    if spec.kind == "number":
        return None
    values, fault = to_label(sample.column(label.column).combine_chunks(), spec)
    good = np.ones(len(values), np.bool_) if fault is None else ~fault.rows
    return Labels(label.column, values == 1, good)


def other_labels(facts: Sequence[ColumnFacts], labels: Labels | None) -> list[Guess]:
    """Returns columns that are named like labels and hold 0 and 1: what happens after the event is not known before."""
    if labels is None:
        return []
    reason = f"a leak: named like a label itself, it may be known only after {shown(labels.name)}; {KEEP}"
    named = (f for f in facts if f.share_ones is not None and f.num_distinct == 2 and is_like(LABEL_NAMES, f.name))
    return [Guess("", f.name, {}, reason) for f in named]


def label_rule(text: str, names: Sequence[str]) -> tuple[str, dict[str, Any], str]:
    """Returns the column that a label is made from, its rule as in a schema, and a name that tells it from this
    column's other labels. names: names of columns, which are not rules."""
    rule = LABEL_RULE.fullmatch(text)
    if rule is None or text in names:
        return text, {}, text
    if rule[2]:
        return rule[1], {"at_least": float(rule[2])}, text
    return rule[1], {"positive": [value.strip() for value in rule[3].split(",")]}, rule[3]


def find_label(
    facts: Sequence[ColumnFacts], name: str | None, made: Mapping[str, Any], read: ReadOptions
) -> tuple[Guess | None, str, tuple[str, ...]]:
    """Returns the label or None, what the user must decide about it, and what the user may decide otherwise.

    made: how the label is made from the values of column `name`, as in a schema.
    """
    if label_kind(read.objective) == "number" and not made:
        question = f"objective {read.objective} takes a number as label; say which column (label=..., --label)"
        named = [f for f in facts if f.name == name]
        return (_number_label(named[0], read), "", ()) if named else (None, question, ())
    if name is not None:
        return _named_label(next(f for f in facts if f.name == name), made), "", ()
    binary = [f for f in facts if f.share_ones is not None and f.num_distinct == 2 and not f.num_missing]
    alike = [f for f in facts if is_like(LABEL_NAMES, f.name)]
    named = [f for f in alike if f in binary or f.word_pair is not None]
    named = named or [f for f in alike if f.share_binary >= MOSTLY]
    if named:
        others = [f"another column could be the label: {shown(f.name)} (--label {quote(f.name)})" for f in named[1:]]
        return _binary_label(named[0], "named like a label"), "", tuple(others)
    if len(binary) == 1:
        return _binary_label(binary[0], "the only column of 0 and 1"), "", ()
    ratings = [f for f in alike if f.kind in ("int", "float") and f.num_distinct <= SHOWN_VALUES]
    ratings += [f for f in facts if is_like(r"(.*_)?(rating|stars)", f.name) and f.kind in ("int", "float")]
    if len(binary) > 1:
        options = ", ".join(f"--label {quote(f.name)}" for f in binary[:10])
        return None, f"{len(binary)} columns hold 0 and 1; say which is the label: {options}", ()
    if ratings:
        return Guess("", ratings[0].name, {}, "may be the label"), ask_for_rule(ratings[0]), ()
    words = [f for f in facts if f.kind == "text" and f.values]
    actions = [f for f in words if is_like(ACTION_NAMES, f.name)] or words
    return None, f"no column holds 0 and 1; {ask_for_values(actions[0])}" if actions else "", ()


def label_kind(objective: str | None) -> LabelKind:
    """Returns the kind of label of an objective, by default the default one. Raises ValueError for an unknown name."""
    if objective is not None and objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; allowed: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[objective or DEFAULT].label


def ask_for_rule(facts: ColumnFacts) -> str:
    """Returns the question which numbers in a column are positive, and how to answer it."""
    for_numbers = [name for name, objective in OBJECTIVES.items() if objective.label == "number"]
    middle = math.ceil((facts.low + facts.high) / 2 + 0.5)
    rule = f"{facts.name} >= {middle}"
    return (
        f"column {facts.name!r} holds {facts.num_distinct} values from {facts.low:g} to {facts.high:g}, not 0 and 1; "
        f"say which are positive, for example from {middle} up: --label {quote(rule)}, in Python label={rule!r}, "
        f"in a schema label: {{column: {json.dumps(facts.name)}, at_least: {middle}}}"
        + "".join(
            f"; or, to predict the number itself: --label {quote(facts.name)} --objective {name}"
            for name in for_numbers[:1]
        )
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


def _number_label(facts: ColumnFacts, read: ReadOptions) -> Guess:
    if facts.kind not in ("int", "float"):
        raise ValueError(
            f"label column {facts.name!r} holds {facts.stored} values, but objective {read.objective} needs numbers"
        )
    spec = {"column": facts.name, "kind": "number"}
    return Guess("label", facts.name, spec, f"numbers from {facts.low:g} to {facts.high:g}")


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
