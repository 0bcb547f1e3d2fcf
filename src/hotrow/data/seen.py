"""What rows hold, by column, and what stands out beside the rows that a model was validated on.

    seen = Seen(usual={"user": {"values": 2000, "unknown": 61, "missing": 0}}, ranges={"price": (0.1, 6.4)})
    seen.add_ids("user", rows, missing)                 # for every batch that is scored
    seen.warnings()                                     # {"unknown_ids": "ids that ...: user 100 % (validation 3.1 %)"}

Every value gets a score: an id that training never saw uses row 0, and what cannot be read as its column's kind is
missing. So nothing fails if the ids of new rows are written in another way, and the scores are
worthless; these counts are what shows it. An export copies this file, so it imports NumPy alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_COUNT = 10
"""Fewer values than this never stand out: a single new user among a few rows is not news."""
MIN_SHARE = 0.01
"""A smaller share never stands out: it moves few scores, however sure its difference is."""
MAX_ERRORS = 5.0
"""Standard errors by which a share must exceed validation's: chance reaches them in one comparison of 3 million, and
rows of wide data have hundreds of comparisons."""
MAX_TIMES = 2.0
"""How many times validation's odds a share's must be: new rows always have somewhat more new ids than the rows that
validated the model, and with many rows that alone would exceed any number of errors."""
MANY_UNKNOWN = 1 / 3
"""A feature with this share of unknown ids is named even if validation's was as large: so many samples share row 0 that
the feature says little about them. Numbers that are ids too say it by their size."""
IDS_OF_NUMBERS = " (ids)"
INNER = 0.001
"""The training range of a column leaves out this share of its numbers at either end, so that one wild number cannot
make all others look usual. Validation is counted by the same range."""

MAX_NAMED = 10
"""Columns that a sentence names; `to_json` has them all."""

_SENTENCES = {
    "unknown": (
        "unknown_ids",
        "ids that training never saw: {columns}. Check that they are written as they were for training (case, blanks, "
        "leading zeros); if they are new indeed, train on newer rows",
    ),
    "missing": ("missing_values", "missing values: {columns}. Check that the columns are filled as for training"),
    "missing_or_zero": ("missing_values", "values that are missing or 0: {columns}. Check that the columns are filled"),
    "outside": (
        "numbers_outside_training",
        "numbers outside the range that training had: {columns}. Check their units",
    ),
}
"""By kind of count: the code of the warning, and its text."""
_BOUNDS = {"missing": ("missing", "missing_or_zero", "unknown")}
"""The usual count that a count is compared with, if another one than its own: the first that there is. In a packed
dataset a missing value may count among others (`run/usual.py`), so that at most so many were missing."""
_SPLITS = {"val": "validation", "test": "the test rows"}


class Seen:
    """Counts of what scored rows held, by column.

    usual: counts of the rows to compare with, in the form of `columns`; None if there are none. ranges: the lowest and
    highest usual number of each number column, after its transform. of: the name of the split that `usual` counts.
    """

    def __init__(
        self,
        usual: Mapping[str, Mapping[str, int]] | None = None,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        *,
        of: str = "val",
    ) -> None:
        self.usual, self.ranges, self.of = usual, ranges or {}, of
        self.columns: dict[str, dict[str, int]] = {}
        """By column. values: ids of a feature, or rows of a number column. unknown: ids that use row 0. missing.
        outside: numbers outside `ranges`. unreadable: values that are no id or number of the column's kind; they count
        as missing too."""

    def add_ids(
        self, name: str, rows: NDArray[Any], missing: NDArray[np.bool_] | None = None, *, unreadable: int = 0
    ) -> None:
        """Counts ids [n] of a feature by the rows that they use. missing: [n], True if there was no id.

        Ids of a column that is a number too count under `NAME (ids)`; add its numbers first.
        """
        if "outside" in self.columns.get(name, ()):
            name += IDS_OF_NUMBERS
        unknown = rows == 0 if missing is None else (rows == 0) & ~missing
        num_missing = 0 if missing is None else int(missing.sum())
        self._add(name, values=len(rows), unknown=int(unknown.sum()), missing=num_missing, unreadable=unreadable)

    def add_numbers(
        self, name: str, values: NDArray[np.float32], missing: NDArray[np.bool_], *, unreadable: int = 0
    ) -> None:
        """Counts transformed numbers [n] of a column. missing: [n], True if there was no number."""
        low, high = self.ranges.get(name, (-math.inf, math.inf))
        outside = ((values < low) | (values > high)) & ~missing
        counts = {"missing": int(missing.sum()), "outside": int(outside.sum())}
        self._add(name, values=len(values), **counts, unreadable=unreadable)

    def merge(self, other: Seen) -> None:
        """Adds what other rows held."""
        for name, counts in other.columns.items():
            self._add(name, **counts)

    def _add(self, name: str, **counts: int) -> None:
        own = self.columns.setdefault(name, dict.fromkeys(counts, 0))
        for kind, count in counts.items():
            own[kind] += count

    def standing_out(self) -> Iterator[tuple[str, str]]:
        """Yields column and kind ("unknown", "missing" or "outside") of what stands out."""
        for name, own in self.columns.items():
            for kind in _SENTENCES:
                if kind not in own or own[kind] < MIN_COUNT:
                    continue
                usual = self._usual(name, kind)
                is_id = kind == "unknown" and not name.endswith(IDS_OF_NUMBERS)
                is_many = is_id and own[kind] >= MANY_UNKNOWN * own["values"]
                if is_many or (usual is not None and is_far_more(own[kind], own["values"], *usual)):
                    yield name, kind

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Returns the counts by column, each with `usual` (the same of validation, or null) and `stands_out`."""
        found = list(self.standing_out())
        return {
            name: {
                **own,
                "usual": None if self.usual is None else dict(self.usual.get(name, {})) or None,
                "stands_out": [kind for column, kind in found if column == name],
            }
            for name, own in self.columns.items()
        }

    def warnings(self) -> dict[str, str]:
        """Returns warnings for the user, by the code under which runs count them; {} if all is as usual."""
        found = list(self.standing_out())
        told = {}
        for kind, (code, text) in _SENTENCES.items():
            shares = [(-own[kind] / own["values"], name) for name, own in self.columns.items() if (name, kind) in found]
            if shares:
                told[code] = text.format(columns=_listed([self._shown(name, kind) for _, name in sorted(shares)]))
        unreadable = {name: own["unreadable"] for name, own in self.columns.items() if own.get("unreadable")}
        if unreadable:
            columns = _listed([f"{name} {count:,}" for name, count in sorted(unreadable.items())])
            told["unreadable_values"] = f"values that are not of their column's kind were scored as missing: {columns}"
        if self.usual is None and any(own["values"] for own in self.columns.values()):
            told["nothing_to_compare_with"] = (
                "the run keeps no counts of validation rows, so nothing says whether these rows hold more unknown ids, "
                "missing values or unusual numbers than those that it was judged by"
            )
        return told

    def _usual(self, name: str, kind: str) -> tuple[int, int] | None:
        """Returns the usual count, and of how many values; None if there is none."""
        usual = (self.usual or {}).get(name, {})
        return next(((usual[each], usual["values"]) for each in _BOUNDS.get(kind, (kind,)) if each in usual), None)

    def _shown(self, name: str, kind: str) -> str:
        own, usual = self.columns[name], self._usual(name, kind)
        text = f"{name} {_percent(own[kind], own['values'])}"
        return text if usual is None else f"{text} ({_SPLITS.get(self.of, self.of)} {_percent(*usual)})"


def is_far_more(count: int, num: int, usual: int, usual_num: int) -> bool:
    """Returns whether `count` of `num` is far more than `usual` of `usual_num`: see the constants above.

    One imagined value of either kind is added to `usual`, so that a share of 0 has odds and an error too.
    """
    share, before = count / num, (usual + 1) / (usual_num + 2)
    both = (count + usual + 1) / (num + usual_num + 2)
    error = math.sqrt(both * (1 - both) * (1 / num + 1 / max(usual_num, 1)))
    is_sure = share - before > MAX_ERRORS * error
    return share >= MIN_SHARE and is_sure and share * (1 - before) > MAX_TIMES * before * (1 - share)


def _listed(columns: Sequence[str]) -> str:
    more = f" and {len(columns) - MAX_NAMED} more columns" if len(columns) > MAX_NAMED else ""
    return ", ".join(columns[:MAX_NAMED]) + more


def _percent(count: int, num: int) -> str:
    return f"{100 * count / max(num, 1):.3g} %"


def usual_range(values: NDArray[np.float32]) -> tuple[float, float]:
    """Returns the range of `values` [n > 0] without `INNER` of them at either end."""
    low, high = np.quantile(values, INNER, method="lower"), np.quantile(values, 1 - INNER, method="higher")
    return float(low), float(high)
