"""Finds columns that give the label away, because they cannot be known when a row is scored, in a sample of rows.

A column leaks if it alone predicts the label (AUC above 0.95), if it is filled only for one of the two labels, or if it
holds a time after the event's. A guessed schema leaves out such a column and says so (`guess.py`); a column that the
user listed stays, and the run counts a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.data.sources.convert import TimeReader, is_list, plain, to_label
from hotrow.data.sources.schema import LabelSpec

MOST_AUC = 0.95
LEAST_OF_EACH = 20
"""Positives and negatives that are needed for a column's AUC: with fewer it may be high by chance."""
CHANCE = 1e-6
"""A column filled for one label only is a leak if chance explains it with less than this probability."""
MOSTLY_LATER = 0.5


def find_leaks(
    sample: pa.Table, label: LabelSpec, columns: Sequence[str], *, times: Sequence[str] = (), time: str | None = None
) -> dict[str, str]:
    """Returns the columns among `columns` that leak, each with the reason and its figure.

    times: columns that hold times. time: the column by which rows are split, None if there is none.
    """
    values, fault = to_label(sample.column(label.column).combine_chunks(), label)
    good = np.ones(len(values), np.bool_) if fault is None else ~fault.rows
    positive = values[good] == 1
    wanted = {*columns, *times, *(() if time is None else (time,))}
    rows = {name: plain(sample.column(name).combine_chunks()).filter(pa.array(good)) for name in wanted}
    later = {name: _later(rows, name, time) for name in times if time is not None and name != time}
    found = {name: later.get(name) or _leak(rows[name], positive) for name in columns}
    return {name: reason for name, reason in found.items() if reason}


def _leak(array: pa.Array, positive: NDArray[np.bool_]) -> str:
    """Returns why a column leaks; "" if it does not."""
    if is_list(array.type) or pa.types.is_nested(array.type):
        return ""
    filled: NDArray[np.bool_] = np.asarray(array.is_valid())
    if reason := _filled_for_one(filled, positive):
        return reason
    if min(positive.sum(), (~positive).sum()) < LEAST_OF_EACH:
        return ""
    auc = max(_auc_of_values(array, positive), _auc_of_order(array, filled, positive))
    return f"it alone predicts the label with AUC {auc:.3f}" if auc > MOST_AUC else ""


def _filled_for_one(filled: NDArray[np.bool_], positive: NDArray[np.bool_]) -> str:
    if not filled.any() or filled.all():
        return ""
    share = float(positive[filled].mean())
    rate = float(positive.mean())
    for wanted, chance, word in ((1.0, rate, "positive"), (0.0, 1 - rate, "negative")):
        if share == wanted and 0 < chance < 1 and filled.sum() * math.log(chance) < math.log(CHANCE):
            return f"it is filled for {word} rows only ({int(filled.sum()):,} of {len(filled):,} rows)"
    return ""


def _auc_of_values(array: pa.Array, positive: NDArray[np.bool_]) -> float:
    """Returns the AUC of each value's share of positives; each half of the rows is scored by the other half."""
    codes = pc.fill_null(array.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False) + 1
    half = np.random.default_rng(0).permutation(len(codes)) % 2 == 0
    rate, aucs = positive.mean(), []
    for own in (half, ~half):
        seen = np.bincount(codes[~own], minlength=codes.max() + 1)
        hits = np.bincount(codes[~own], positive[~own], minlength=codes.max() + 1)
        aucs.append(_auc(((hits + rate) / (seen + 1))[codes[own]], positive[own]))
    return float(np.mean(aucs))


def _auc_of_order(array: pa.Array, filled: NDArray[np.bool_], positive: NDArray[np.bool_]) -> float:
    """Returns the AUC of the numbers in rising or falling order, without missing ones; 0.5 for text."""
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        try:
            array = pc.cast(array, pa.float64())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return 0.5
    if min(positive[filled].sum(), (~positive[filled]).sum()) < LEAST_OF_EACH or filled.mean() < 0.5:
        return 0.5
    auc = _auc(np.asarray(array.drop_null().cast(pa.float64(), safe=False)), positive[filled])
    return max(auc, 1 - auc)


def _auc(score: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """Returns the share of positive-negative pairs that `score` orders, ties as half; 0.5 without pairs."""
    _, place = np.unique(score, return_inverse=True)
    positives = np.bincount(place, positive)
    negatives = np.bincount(place) - positives
    below = np.cumsum(negatives) - negatives
    pairs = positives.sum() * negatives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else 0.5


def _later(rows: Mapping[str, pa.Array], name: str, time: str) -> str:
    """Returns why a time seems to come after the event; "" if it does not."""
    found = {each: rows[each] for each in (name, time)}
    if found[name].type != found[time].type:
        return ""  # perhaps in another unit
    try:
        (own, own_fault), (event, event_fault) = (
            TimeReader.for_column(array, None)(array, each) for each, array in found.items()
        )
    except ValueError:
        return ""
    known = np.ones(len(own), np.bool_)
    for fault in (own_fault, event_fault):
        known &= True if fault is None else ~fault.rows
    share = float((own[known] > event[known]).mean()) if known.any() else 0.0
    return f"it is later than {time!r} in {share:.0%} of its rows" if share > MOSTLY_LATER else ""
