"""A `Scorer` has one version of an export at a time, and scores raw rows with it while deltas make the next one.

    scorer = hotrow.Scorer("clicks-export", memory="1GiB")
    scorer.score(user={"user": "u1", "age": 30}, items=[{"item": "i7"}, {"item": "i9"}])
    scorer.apply("delta-1")                # makes the next version, and takes it while others score
    scorer.rollback()

A request sees one version from its first cell to its last score.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import is_taken, make_folder
from hotrow.base.files import parse_bytes
from hotrow.data.seen import Seen
from hotrow.export.delta import apply_delta, checksum_of, read_delta
from hotrow.export.export import verify_export
from hotrow.models.spec import SampleError
from hotrow.serve.mapped import Budget, mapped_bytes
from hotrow.serve.version import NAME_DIGITS, Version

VERSIONS, SUFFIX = "versions", ".serve"
ROWS_OF_PIECE = 1 << 12
"""Rows that are scored before the clock is looked at again, if there is an end."""
TURN_S, PAUSE_S = 1e-4, 5e-5
"""Seconds of Python after which a thread that applies a delta lets requests go on, and for how long it sleeps: long
enough for a waiting thread to wake up."""
Items = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]
"""Rows as dicts, or as a dict of columns."""


class Answer(NamedTuple):
    """What a request gets."""

    scores: NDArray[np.float32]
    """[B], or [B, L] of L > 1 labels."""
    version: str
    """The version that made them."""
    warning: str = ""
    """Names a column that the model does not know, and the nearest that it does, if there is one."""


class Scorer:
    """Scores raw rows with an export that `hotrow export` wrote, and takes deltas while it does.

    export: its folder, which is never written to. memory: how much of its tables and vocabularies may be in this
    process's memory, as bytes or text such as "1GiB": half of it for the first rows of all tables, which stay there,
    half for what else is looked up in the files. If None, the system decides. work: a folder for versions that deltas
    make; by default EXPORT.serve beside the export, made by the first delta. Several threads may score at once; each
    call computes on its own thread.

    Raises ValueError, which names the file and says what to do, if the export is damaged or half brought forward.
    """

    def __init__(self, export: Path | str, *, memory: int | str | None = None, work: Path | str | None = None) -> None:
        path = Path(export)
        # Once, so that a version's limit does not count what the one before it had in memory.
        self._budget: Budget | None = None
        if memory is not None:
            num_bytes = parse_bytes(memory, what="memory")
            self._budget = Budget(mapped_bytes() + num_bytes, num_bytes // 2)
        self._work = path.resolve().with_name(path.resolve().name + SUFFIX) if work is None else Path(work)
        opened = Version(path, self._budget)
        opened.mapped.pin()
        self._versions: tuple[Version, Version | None] = opened, None
        """The version that scores, and the one before it."""
        self._undone: Version | None = None
        """The version that `rollback` left, until a delta is applied: often it is the same one."""
        self._changing, self._counting = threading.Lock(), threading.Lock()
        self._seen = Seen(opened.usual.usual, opened.usual.ranges, of=opened.usual.of)
        self._tallies: dict[Version, Any] = {}
        """By version, the sum of what rows held that are not in `_seen` yet: to write it in there takes its time."""

    @property
    def version(self) -> str:
        """Name of the version that scores now: the first digits of the SHA-256 of its export.json."""
        return self._versions[0].name

    @property
    def path(self) -> Path:
        """Folder of the version that scores now."""
        return self._versions[0].path

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the raw columns that a score is made of."""
        return self._versions[0].columns

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
        items: a list of dicts or a dict of columns, with the others. Columns that the model does not take are not read,
        and a warning names one that its data did not have either.
        An id that training never saw uses row 0; a value that is no id or number of its column is missing, and so is a
        column that is absent; `seen` counts them. strict: refuse these instead. Raises ValueError, which names column
        and row, for what is refused, and if columns differ in length.
        """
        scores, _, warning = self.answer(rows, user=user, items=items, strict=strict)
        if warning:
            warnings.warn(warning, stacklevel=2)
        return scores

    def answer(
        self, rows: Any = None, *, user: Any = None, items: Any = None, strict: bool = False, until: float = math.inf
    ) -> Answer:
        """Returns the scores as `score` does, with the version that made them. until: when (`time.monotonic`) scoring
        is given up by a TimeoutError, after a piece of the rows."""
        version = self._versions[0]
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

    def apply(self, delta: Path | str) -> str:
        """Brings the model forward by the next delta, which `hotrow export --since` wrote; returns the new version.

        A new folder is made of both and opened while the version before scores on; then requests get the new one. The
        one before is kept for `rollback`. Raises ValueError, and nothing has changed, if the delta is not the next one
        or is damaged, or if another one is being applied.
        """
        with self._alone():
            now, before = self._versions
            found = read_delta(Path(delta))
            path = self._work / VERSIONS / f"{found.number}-{found.result[:NAME_DIGITS]}"
            self._make_folder(path.parent)
            is_next = found.exports[-1] == checksum_of(now.path)
            if is_next and is_taken(path) and not _is_whole(path, found.result):
                shutil.rmtree(path)  # an earlier process ended while it removed it
            if not (is_next and is_taken(path)):
                apply_delta(now.path, delta, path)  # which says why, if it is not the next one
            try:
                opened = Version(path, self._budget)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            self._versions = opened, now
            now.mapped.unpin()
            opened.mapped.pin()
            for old in (own for own in (before, self._undone) if own is not None):
                if old.path.parent == path.parent and old.path not in (path, now.path):
                    shutil.rmtree(old.path, ignore_errors=True)
            self._undone = None
            self._settle()  # else a tally keeps a version that is gone
            return opened.name

    def rollback(self) -> str:
        """Goes back to the version before the last `apply`; returns its name. Raises ValueError if there is none."""
        with self._alone():
            now, before = self._versions
            if before is None:
                raise ValueError("there is no version before this one; apply a delta first")
            self._versions, self._undone = (before, None), now
            now.mapped.unpin()
            before.mapped.pin()
            return before.name

    def _make_folder(self, path: Path) -> None:
        """Makes a folder in `work`. Raises ValueError, which says what to do, if this user may not."""
        try:
            make_folder(path)  # the folder itself may be there, and be another user's
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise ValueError(
                f"{self._work} cannot be written: {(error.strerror or str(error)).lower()} ({path}); pass --work (in "
                "Python work=), a folder of your own"
            ) from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise ValueError("another delta is being applied; wait for it and try again")
        try:
            with _giving_way():
                yield
        finally:
            self._changing.release()


@contextmanager
def _giving_way() -> Iterator[None]:
    """Inside the block, this thread often lets others have the interpreter.

    A request needs it back after each native call, for which it may wait `sys.getswitchinterval()`, 5 ms. That setting
    is the whole process's. A profile function is this thread's own, but from Python 3.12 on calls of all threads take
    some 0.05 us longer meanwhile. If there is one already, nothing is changed.
    """
    if sys.getprofile() is not None:
        yield
        return
    began = time.perf_counter()

    def pause(*_: Any) -> None:
        nonlocal began
        if time.perf_counter() - began > TURN_S:
            time.sleep(PAUSE_S)
            began = time.perf_counter()

    sys.setprofile(pause)
    try:
        yield
    finally:
        sys.setprofile(None)


def _is_whole(version: Path, checksum: str) -> bool:
    """Returns whether a folder is the export of this checksum, with all of its files."""
    with suppress(ValueError, OSError):
        return checksum_of(version) == checksum and verify_export(version, unread=("tables/",)) >= 0
    return False


def _pieces(rows: Any) -> list[Any]:
    """Rows, or columns of them, cut into ROWS_OF_PIECE."""
    columns = rows if isinstance(rows, Mapping) else {"": rows}
    starts = range(0, max(map(len, columns.values()), default=0), ROWS_OF_PIECE)
    parts = [{name: own[at : at + ROWS_OF_PIECE] for name, own in columns.items()} for at in starts]
    return [rows] if len(parts) < 2 else parts if columns is rows else [part[""] for part in parts]


def _check(rows: Any, user: Mapping[str, Any]) -> None:
    """Raises ValueError if rows are no dicts, or columns of other lengths, or if the user has one of their columns."""
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
