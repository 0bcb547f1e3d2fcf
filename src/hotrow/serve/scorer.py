"""A `Scorer` scores raw rows with one version of an export, and goes on with it while it opens the next one.

    scorer = hotrow.Scorer("chain/model", memory="1GiB")
    scorer.score(user={"user": "u1", "age": 30}, items=[{"item": "i7"}, {"item": "i9"}])
    scorer.follow()                        # takes the version to which the link now leads, while others score

A request sees one version from its first cell to its last score.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.base.files import parse_bytes
from hotrow.data.seen import Seen
from hotrow.models.spec import SampleError
from hotrow.run.explain import Explanation
from hotrow.serve.mapped import Budget, mapped_bytes
from hotrow.serve.version import Version

ROWS_OF_PIECE = 1 << 12
"""How many rows are scored between two looks at the clock, if there is a time limit."""
Items = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]
"""Rows as dicts, or as a dict of columns."""


class Answer(NamedTuple):
    """The answer to a request."""

    scores: NDArray[np.float32]
    """[B], or [B, L] of L > 1 labels."""
    version: str
    """The version that made the scores."""
    warning: str = ""
    """Names a column, if any, that the model does not know, and the nearest one that it knows."""


class Scorer:
    """Scores raw rows with an export that `hotrow export` wrote, and can change to its next version meanwhile.

    export: its folder, which is never written to, or a link to it. memory: how much of its tables and vocabularies may
    be in this process's memory, as bytes or text such as "1GiB": half for the first rows of all tables, which stay
    there, and half for all else that is read from the files. If None, the system decides. Several threads may score at
    once; each call computes on its own thread.

    Raises ValueError, which names the file and says what to do, if the export is damaged.
    """

    def __init__(self, export: Path | str, *, memory: int | str | None = None) -> None:
        self._export = path = Path(export).absolute()
        # Once, so that a version's limit does not count what the one before it had in memory.
        self._budget: Budget | None = None
        if memory is not None:
            num_bytes = parse_bytes(memory, what="memory")
            self._budget = Budget(mapped_bytes() + num_bytes, num_bytes // 2)
        self._now = opened = Version(path, self._budget)
        opened.mapped.pin()
        self._changing, self._counting = threading.Lock(), threading.Lock()
        self._seen = Seen(opened.usual.usual, opened.usual.ranges, of=opened.usual.of)
        self._tallies: dict[Version, Any] = {}
        """By version, the sum of what rows held that are not in `_seen` yet: to write it in there takes its time."""

    @property
    def version(self) -> str:
        """Name of the version that scores now: the first digits of the SHA-256 of its export.json."""
        return self._now.name

    @property
    def path(self) -> Path:
        """Folder of the version that scores now."""
        return self._now.path

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the raw columns that a score is made of."""
        return self._now.columns

    @property
    def seen(self) -> Seen:
        """Counts of what all scored rows held, by column; `seen.warnings()` says what stands out."""
        self._settle()
        return self._seen

    def _settle(self) -> None:
        with self._counting:
            for version, tally in self._tallies.items():
                self._seen.merge(version.counted(tally))
            self._tallies.clear()

    def score(
        self,
        rows: Any = None,
        *,
        user: Mapping[str, Any] | None = None,
        items: Items | None = None,
        strict: bool = False,
    ) -> NDArray[np.float32]:
        """Returns the score of each row, float32 [B]; of L > 1 labels [B, L]. They are those of `Run.predict`.

        rows: a list of dicts, a dict of columns, or an Arrow-capable frame. Or user: the cells that all rows share, and
        items: a list of dicts or a dict of columns, with the other cells. Columns that the model does not use are not
        read, and a warning names one that its training data did not have either.
        An id that training never saw uses row 0; a value that is not an id or number of its column counts as missing,
        and so does an absent column; `seen` counts them. strict: refuse these instead. Raises ValueError, which names
        column and row, for what is refused, and if columns differ in length.
        """
        scores, _, warning = self.answer(rows, user=user, items=items, strict=strict)
        if warning:
            warnings.warn(warning, stacklevel=2)
        return scores

    def explain(self, rows: Any, *, strict: bool = False) -> Explanation:
        """Returns what each raw column adds to the output of each row, as `Run.explain` does. rows, strict: as for
        `score`."""
        if isinstance(rows, list | Mapping):
            _check(rows, {})
        try:
            found, seen, warning = self._now.explain(rows, strict=strict)
        except SampleError as error:
            raise ValueError(f"row {error.sample}: {error.feature} has {error.reason}") from None
        with self._counting:
            self._seen.merge(seen)
        if warning:
            warnings.warn(warning, stacklevel=2)
        return found

    def answer(
        self, rows: Any = None, *, user: Any = None, items: Any = None, strict: bool = False, until: float = math.inf
    ) -> Answer:
        """Returns the scores as `score` does, with the version that made them. Raises TimeoutError, between two pieces
        of the rows, after the time `until` (of `time.monotonic`)."""
        version = self._now
        if (rows is None) == (items is None) or (user is not None and items is None):
            raise ValueError("pass either rows, or items with or without the user that they share")
        if user is not None and not isinstance(user, Mapping):
            raise ValueError(f"user is a {type(user).__name__}; pass a dict of its cells by column")
        given, shared = rows if items is None else items, dict(user or {})
        score: Any = version.score_frame
        if is_cells := isinstance(given, list | Mapping):
            _check(given, shared)
            score = partial(version.score, shared)
        elif items is not None:
            raise ValueError(f"items is a {type(items).__name__}; pass a list of dicts or a dict of columns")
        scores, warning = list[NDArray[np.float32]](), ""
        try:
            for piece in _pieces(given) if is_cells and not strict and until < math.inf else [given]:
                if time.monotonic() > until:
                    raise TimeoutError
                found, seen, told = score(piece, strict=strict)
                scores, warning = [*scores, found], warning or told
                with self._counting:
                    if isinstance(seen, Seen):
                        self._seen.merge(seen)
                    else:
                        self._tallies[version] = self._tallies.get(version, 0) + seen
        except SampleError as error:
            row = sum(map(len, scores)) + error.sample
            raise ValueError(f"row {row}: {error.feature} has {error.reason}") from None
        return Answer(scores[0] if len(scores) == 1 else np.concatenate(scores), version.name, warning)

    def follow(self) -> str:
        """Changes to the version that the link `export` now leads to; returns its name.

        While it is opened, the version before goes on scoring; that one is closed when no call uses it any more. Raises
        ValueError, and changes nothing, if the new version cannot be scored.
        """
        with self._changing:
            now = self._now
            if self._export.resolve() != now.path:
                self._now = opened = Version(self._export, self._budget)
                now.mapped.unpin()
                opened.mapped.pin()
                now.leave()
            self._settle()  # else a tally keeps a version that is gone
            return self.version


def _pieces(rows: Any) -> list[Any]:
    """Rows, or columns of them, cut into ROWS_OF_PIECE."""
    columns = rows if isinstance(rows, Mapping) else {"": rows}
    starts = range(0, max(map(len, columns.values()), default=0), ROWS_OF_PIECE)
    parts = [{name: own[at : at + ROWS_OF_PIECE] for name, own in columns.items()} for at in starts]
    return [rows] if len(parts) < 2 else parts if columns is rows else [part[""] for part in parts]


def _check(rows: Any, user: Mapping[str, Any]) -> None:
    """Raises ValueError if rows are not dicts, or columns differ in length, or the user has one of their columns."""
    is_list, shared, lengths = isinstance(rows, list), user.keys(), dict[str, int]()
    if is_list and {*map(type, rows)} <= {dict} and all(map(shared.isdisjoint, rows)):
        return  # as the loop would find, at a fifth of its cost
    for row, own in enumerate(rows if is_list else [rows]):
        if not isinstance(own, Mapping):
            raise ValueError(f"row {row} is a {type(own).__name__}; pass a dict of its cells by column")
        if not shared.isdisjoint(own):
            name, where = next(iter(shared & own.keys())), f"row {row}" if is_list else "the items"
            raise ValueError(f"column {name!r} is given by the user and by {where}; give it once")
    for name, cells in () if is_list else rows.items():
        if isinstance(cells, str | bytes) or not hasattr(cells, "__len__"):
            raise ValueError(f"column {name!r} is a {type(cells).__name__}; pass a list of its cells")
        lengths[name] = len(cells)
    if len({*lengths.values()}) > 1:
        (first, most), (name, length) = next(pair for pair in pairwise(lengths.items()) if pair[0][1] != pair[1][1])
        raise ValueError(f"column {name!r} has {length} rows, {first!r} has {most}; pass as many of each")
