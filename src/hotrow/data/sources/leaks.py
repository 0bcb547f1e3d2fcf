"""Finds columns that give the label away, because they cannot be known when a row is scored, in a sample of rows.

The shape of a column tells, not its strength. It leaks if it has a value, or a value that means something, for one of
the two labels only; if it is nearly the label itself; or if it holds a time after the event's. A guessed schema leaves
out such a column and says so (`guess.py`); a column that the user listed stays, and the run counts a warning. A column
that is merely strong, as the best ids of click logs are, is named and stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotrow.base.machine import usable_cores
from hotrow.data.cells import PLAIN, as_seconds, is_list, numbers, on_clock, plain, to_label
from hotrow.data.sources.evidence import MIN_OF_EACH, Tally, left_out_rates
from hotrow.data.sources.schema import LabelSpec

STRONG_AUC = 0.95
"""A column that alone has a higher AUC is named."""
LABEL_AUC = 0.999
"""Numbers whose order has a higher AUC are nearly the label."""
LABEL_LEFT = 0.15
"""Values are too, if less than this share of the label's LogLoss is left after them."""
CHANCE = 1e-6
"""A column with values for one label only is a leak if chance explains it with less than this probability."""
RARER, CHANCE_IF_RARER = 10, 1e-3
"""And if it is for the frequent label only, it must stay improbable for rows whose rarer label is so many times rarer:
an honest column may well name rows that hardly anyone clicks."""
MOSTLY_LATER = 0.5
NOTHING = ("", "0", "0.0", "no", "n", "none", "false", "f")
"""Values that say that something did not happen."""


@dataclass(frozen=True)
class Findings:
    """Columns that were found, each with the reason and its figure."""

    leaks: dict[str, str]
    strong: dict[str, str]
    """Columns that alone predict the label well, and do not leak."""


def find_leaks(
    sample: pa.Table, label: LabelSpec, columns: Sequence[str], *, times: Sequence[str] = (), time: str | None = None
) -> Findings:
    """Returns the columns among `columns` that leak or are strong.

    times: columns that hold times. time: the column by which rows are split, None if there is none.
    """
    values, fault = to_label(sample.column(label.column).combine_chunks(), label)
    good = np.ones(len(values), np.bool_) if fault is None else ~fault.rows
    wanted = {*columns, *times, *(() if time is None else (time,))}
    rows = {name: plain(sample.column(name).combine_chunks()).filter(pa.array(good)) for name in wanted}
    later = {name: _later(rows, name, time) for name in times if time is not None and name != time}
    positive, found = values[good] == 1, Findings({}, {})
    with ThreadPoolExecutor(usable_cores()) as executor:
        looks = list(executor.map(lambda name: _look(rows[name], positive), columns))
    for name, (leak, strong) in zip(columns, looks, strict=True):
        if leak := later.get(name) or leak:
            found.leaks[name] = leak
        elif strong:
            found.strong[name] = strong
    return found


def _look(array: pa.Array, positive: NDArray[np.bool_]) -> tuple[str, str]:
    """Returns why a column leaks, and why it is strong; "" if it does not or is not."""
    if is_list(array.type) or pa.types.is_nested(array.type):
        return "", ""
    values, tally = _values_of(array, positive)
    if reason := _for_one_label(values, tally):
        return reason, ""
    if tally.rarer < MIN_OF_EACH:
        return "", ""
    of_order = _auc_of_order(values, tally)
    auc = max(of_order, _auc_of_values(tally))
    if of_order > LABEL_AUC or _left_after(tally) < LABEL_LEFT:
        return f"it is nearly the label itself, with AUC {auc:.3f}", ""
    return "", f"alone predicts the label with AUC {auc:.3f}" if auc > STRONG_AUC else ""


def _values_of(array: pa.Array, positive: NDArray[np.bool_]) -> tuple[pa.Array, Tally]:
    """Returns the distinct values, and the tally of them and, as the last one, of missing values."""
    encoded = array.dictionary_encode()
    num_values = len(encoded.dictionary)
    codes = pc.fill_null(encoded.indices.cast(pa.int64()), num_values).to_numpy(zero_copy_only=False)
    rows = np.bincount(codes, minlength=num_values + 1)
    positives = np.bincount(codes, positive, minlength=num_values + 1).astype(np.int64)
    return encoded.dictionary, Tally(np.arange(num_values + 1), rows, positives)


def _for_one_label(values: pa.Array, tally: Tally) -> str:
    """Returns why a column says something for one label only; "" if it does not.

    Nothing is a missing value; or that, 0 and "no"; or that and the value of most rows.
    """
    missing = np.zeros(len(tally.rows), np.bool_)
    missing[-1] = True
    nothing, mode = missing.copy(), missing.copy()
    nothing[:-1] = _says_nothing(values)
    most = int(tally.rows.argmax())
    if 2 * tally.rows[most] >= tally.rows.sum():
        mode[most] = True
    for without, what in (
        (missing, "it is filled"),
        (nothing, "it is neither missing, 0 nor no"),
        (mode, f"it has another value than {'none' if most == len(values) else repr(values[most].as_py())}"),
    ):
        num_rows, positives = int(tally.rows[~without].sum()), int(tally.positives[~without].sum())
        for word, same, share in (
            ("positive", positives, tally.share),
            ("negative", num_rows - positives, 1 - tally.share),
        ):
            if 0 < same == num_rows < tally.rows.sum() and _is_no_chance(num_rows, share):
                return f"{what} for {word} rows only ({num_rows:,} of {int(tally.rows.sum()):,} rows)"
    return ""


def _says_nothing(values: pa.Array) -> NDArray[np.bool_]:
    try:
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(values.cast(pa.string())))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return np.zeros(len(values), np.bool_)
    found: NDArray[np.bool_] = pc.is_in(texts, pa.array(NOTHING)).to_numpy(zero_copy_only=False)
    return found


def _is_no_chance(num_rows: int, share: float) -> bool:
    """Returns whether rows that all have a label of this share can hardly have it by chance."""
    if not 0 < share < 1 or num_rows * math.log(share) >= math.log(CHANCE):
        return False
    return share <= 0.5 or num_rows * math.log1p(-(1 - share) / RARER) < math.log(CHANCE_IF_RARER)


def _left_after(tally: Tally) -> float:
    """Returns which share of the label's LogLoss is left once the value is known."""
    negatives = tally.rows - tally.positives
    without, known = (
        float(-(negatives * np.log1p(-rates[0]) + tally.positives * np.log(rates[1])).sum())
        for rates in (np.full((2, len(tally.rows)), tally.share), left_out_rates(tally, weight=1.0))
    )
    return known / without


def _auc_of_values(tally: Tally) -> float:
    """Returns the AUC of the share of positives that each row's value has in the other rows."""
    negative, positive = left_out_rates(tally, weight=1.0)
    nothing = np.zeros(len(tally.rows))
    return _auc(
        np.concatenate([negative, positive]),
        np.concatenate([nothing, tally.positives]),
        np.concatenate([tally.rows - tally.positives, nothing]),
    )


def _auc_of_order(values: pa.Array, tally: Tally) -> float:
    """Returns the AUC of the numbers in rising or falling order, without missing ones; 0.5 for text."""
    positives, negatives = tally.positives[:-1], (tally.rows - tally.positives)[:-1]
    if min(positives.sum(), negatives.sum()) < MIN_OF_EACH or 2 * tally.rows[-1] > tally.rows.sum():
        return 0.5
    try:
        pc.cast(values.slice(0, 1), pa.float64())  # an error late in much text takes long
        numbers = np.asarray(values.cast(pa.float64(), safe=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return 0.5
    auc = _auc(numbers, positives, negatives)
    return max(auc, 1 - auc)


def _auc(score: NDArray[np.float64], positives: NDArray[np.generic], negatives: NDArray[np.generic]) -> float:
    """Returns the share of positive-negative pairs that `score` orders, ties as half; 0.5 without pairs.

    positives, negatives: how many rows of each label have a score.
    """
    _, place = np.unique(score, return_inverse=True)
    above, below = np.bincount(place, positives), np.bincount(place, negatives)
    pairs = above.sum() * below.sum()
    return float((above * (np.cumsum(below) - below / 2)).sum() / pairs) if pairs else 0.5


def _later(rows: Mapping[str, pa.Array], name: str, time: str) -> str:
    """Returns why a time seems to come after the event; "" if it does not."""
    own, event = (on_clock(numbers(as_seconds(rows[each]), PLAIN)[0], None) for each in (name, time))
    known = ~np.isnan(own - event)
    share = float((own[known] > event[known]).mean()) if known.any() else 0.0
    return f"it is later than {time!r} in {share:.0%} of its rows" if share > MOSTLY_LATER else ""
