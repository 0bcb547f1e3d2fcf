"""A `Scorer` has one version of an export at a time, and scores raw rows with it while deltas make the next one.

    scorer = hotrow.Scorer("clicks-export", memory="1GiB")
    scorer.score(user={"user": "u1", "age": 30}, items=[{"item": "i7"}, {"item": "i9"}])
    scorer.apply("delta-1")                # makes the next version, and takes it while others score
    scorer.rollback()

A request sees one version from its first cell to its last score.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import is_taken, make_folder
from hotrow.base.files import parse_bytes, remove_unheld
from hotrow.data.seen import Seen
from hotrow.export.delta import check_next, checksum_of
from hotrow.export.export import verify_export
from hotrow.models.spec import SampleError
from hotrow.serve.mapped import Budget, mapped_bytes
from hotrow.serve.version import NAME_DIGITS, Version

VERSIONS, SUFFIX = "versions", ".serve"
_APPLY = """
import os, sys, threading
os.nice(5)
threading.Thread(target=lambda: sys.stdin.read() or os._exit(1), daemon=True).start()
from hotrow.__main__ import main
main()
"""
"""The command line, in a process that gives way to others and ends with the one that started it."""
Items = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]
"""Rows as dicts, or as a dict of columns."""


class Answer(NamedTuple):
    """What a request gets."""

    scores: NDArray[np.float32]
    """[B], or [B, L] of L > 1 labels."""
    version: str
    """The version that made them."""


class Scorer:
    """Scores raw rows with an export that `hotrow export` wrote, and takes deltas while it does.

    export: its folder, which is never written to, or a link to it. memory: how much of its tables and vocabularies may
    be in this process's memory, as bytes or text such as "1GiB": half of it for the first rows of all tables, which
    stay there, half for what else is looked up in the files. If None, the system decides. work: a folder for versions
    that deltas make; by default EXPORT.serve beside the export, made by the first delta. Several threads may score at
    once; each call computes on its own thread.

    Raises ValueError, which names the file and says what to do, if the export is damaged.
    """

    def __init__(self, export: Path | str, *, memory: int | str | None = None, work: Path | str | None = None) -> None:
        self._export = path = Path(export).absolute()
        # Once, so that a version's limit does not count what the one before it had in memory.
        self._budget: Budget | None = None
        if memory is not None:
            num_bytes = parse_bytes(memory, what="memory")
            self._budget = Budget(mapped_bytes() + num_bytes, num_bytes // 2)
        self._work = path.with_name(path.name + SUFFIX) if work is None else Path(work)
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
        items: a list of dicts or a dict of columns, with the others. Columns that the model does not take are not read.
        An id that training never saw uses row 0; a value that is no id or number of its column is missing, and so is a
        column that is absent; `seen` counts them. strict: refuse these instead. Raises ValueError, which names column
        and row, for what is refused, and if columns differ in length.
        """
        return self.answer(rows, user=user, items=items, strict=strict).scores

    def answer(
        self, rows: Any = None, *, user: Mapping[str, Any] | None = None, items: Any = None, strict: bool = False
    ) -> Answer:
        """Returns the scores as `score` does, with the version that made them."""
        version = self._versions[0]
        if (rows is None) == (items is None) or (user is not None and items is None):
            raise ValueError("pass either rows, or items with or without the user that they share")
        if user is not None and not isinstance(user, Mapping):
            raise ValueError(f"user is a {type(user).__name__}; pass a dict of its cells by column")
        given, shared = rows if items is None else items, dict(user or {})
        try:
            if isinstance(given, list | Mapping):
                _check(given, shared)
                scores, seen = version.score(shared, given, strict=strict)
            elif items is None:
                scores, seen = version.score_frame(given, strict=strict)
            else:
                raise ValueError(f"items is a {type(items).__name__}; pass a list of dicts or a dict of columns")
        except SampleError as error:
            raise ValueError(f"row {error.sample}: {error.feature} has {error.reason}") from None
        with self._counting:
            if isinstance(seen, Seen):
                self._seen.merge(seen)
            else:
                self._tallies[version] = self._tallies.get(version, 0) + seen
        return Answer(scores, version.name)

    def apply(self, delta: Path | str) -> str:
        """Brings the model forward by the next delta, which `hotrow export --since` wrote; returns the new version.

        A process of its own makes a new folder of both, which is opened while the version before scores on; then
        requests get the new one. The one before is kept for `rollback`. Raises ValueError, and nothing has changed, if
        the delta is not the next one or is damaged, or if another one is being applied.
        """
        with self._alone():
            now, before = self._versions
            found, _ = check_next(now.path, Path(delta))
            path = self._work / VERSIONS / f"{found.number}-{found.result[:NAME_DIGITS]}"
            self._make_folder(path.parent)
            if is_taken(path) and not _is_whole(path, found.result):
                remove_unheld(path)  # an earlier process ended while it removed it
            if not is_taken(path):
                make(now.path, Path(delta), path)
            self._take(Version(path, self._budget), now)
            for old in (own for own in (before, self._undone) if own is not None):
                old.leave()
                if old.path.parent == path.parent.resolve() and old.path not in (self.path, now.path):
                    remove_unheld(old.path)
            self._undone = None
            return self.version

    def follow(self) -> str:
        """Takes the version that `export`, a link, leads to by now; returns its name.

        It is opened while the version before scores on, which goes when nobody scores with it any more. Raises
        ValueError, and nothing has changed, if it is not an export that can be scored.
        """
        with self._alone():
            now = self._versions[0]
            if self._export.resolve() != now.path:
                self._take(Version(self._export, self._budget), None)
                now.leave()
            self._settle()  # else a tally keeps a version that is gone
            return self.version

    def _take(self, opened: Version, before: Version | None) -> None:
        now = self._versions[0]
        self._versions = opened, before
        now.mapped.unpin()
        opened.mapped.pin()
        self._settle()

    def rollback(self) -> str:
        """Goes back to the version before the last `apply`; returns its name. Raises ValueError if there is none."""
        with self._alone():
            now, before = self._versions
            if before is None:
                raise ValueError("there is no version before this one; apply a delta first")
            self._versions, self._undone = (before, None), now
            now.leave()
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
            yield
        finally:
            self._changing.release()


def make(export: Path, delta: Path, out: Path) -> None:
    """As `apply_delta`, in a process of its own: requests need not wait for the interpreter, nor for a core that others
    can use, and its memory comes back. It ends with this one. Raises ValueError, which says what it said."""
    words = ("apply", export.absolute(), delta.absolute(), "--out", out.absolute())
    command = [sys.executable, "-c", _APPLY, *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as child:
        assert child.stderr is not None, "it is a pipe"
        said = child.stderr.read().strip()
    if child.returncode and not is_taken(out):  # another server of this folder may have made it
        raise ValueError(said.rpartition("hotrow: ")[2] or f"the process that applied {delta} was ended; try again")


def _is_whole(version: Path, checksum: str) -> bool:
    """Returns whether a folder is the export of this checksum, with all of its files."""
    with suppress(ValueError, OSError):
        return checksum_of(version) == checksum and verify_export(version, unread=("tables/",)) >= 0
    return False


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
