"""`<out>/.prepare`: what an interrupted preparation leaves behind, so that the same command goes on.

prepare.json   what was asked for (a resume must ask for the same), and the results of finished stages
counts/        counters, while counting (hotrow.data.spill)
encode/        ids of vocabularies larger than memory, while encoding (hotrow.data.encoder)
parts.json     finished parts (hotrow.data.packed_writer)
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrow.data.chunk import Position
from hotrow.data.packed_format import MANIFEST, WORK_FOLDER
from hotrow.data.schema import SPLITS
from hotrow.data.spill import SNAPSHOT
from hotrow.files import check_writable, read_json, write_json

STATE = "prepare.json"
COUNTS = "counts"


@dataclass(frozen=True)
class Mark:
    """A place between two chunks of the source, and how many rows of each split lie before it."""

    row: int = 0
    position: Position = field(default_factory=Position)
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    @property
    def start(self) -> Position | None:
        """The position to read from; None for the first row."""
        return self.position if self.row else None

    def to_json(self) -> dict[str, Any]:
        """This record as JSON-ready values; `from_json` is the inverse."""
        return {"row": self.row, "position": self.position.to_json(), "rows": self.rows}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Mark:
        """The record `to_json` wrote."""
        return Mark(value["row"], Position(**value["position"]), value["rows"])


class WorkFolder:
    """The state of one preparation, saved whole at the end of every stage and part.

    Raises ValueError where `out` holds a finished dataset, work on something else (naming what differs) or other files;
    with `overwrite` a dataset or its beginnings are replaced. Nothing is written or removed before `begin`.
    """

    def __init__(self, out: Path, identity: dict[str, Any], *, overwrite: bool) -> None:
        self.out, self.folder, self._identity, self._overwrite = out, out / WORK_FOLDER, identity, overwrite
        self._state: dict[str, Any] = {}
        self._made_out = not out.exists()
        check_out(out, overwrite=overwrite)
        if _is_ours(out) and not overwrite:
            self._resume()
        self.resumed = bool(self._state)

    def _resume(self) -> None:
        self._state = read_json(self.folder / STATE)
        differences = _differences(self._state.get("identity"), self._identity)
        if differences:
            raise ValueError(
                f"{self.out} holds unfinished work that was begun otherwise: {'; '.join(differences[:5])}; run the "
                "earlier command to finish it, or --overwrite to start again"
            )

    def begin(self) -> None:
        """Make the folder for new work, after removing what is to be overwritten."""
        if self._overwrite and _is_ours(self.out):
            # The manifest goes first: from here on nobody takes the rest for a dataset.
            (self.out / MANIFEST).unlink(missing_ok=True)
            for name in ("vocab", "counts", *SPLITS, WORK_FOLDER):
                shutil.rmtree(self.out / name, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self.save()
        except BaseException:
            self.abandon()  # without its state the folder would be nobody's, and the same command refused
            raise

    @property
    def plan(self) -> dict[str, Any] | None:
        """The split plan, once made."""
        return self._state.get("plan")

    @property
    def transforms(self) -> list[str] | None:
        """Dense transforms, once training rows were counted."""
        return self._state.get("transforms")

    @property
    def tables(self) -> dict[str, dict[str, Any]] | None:
        """Records of the tables, once their vocabularies are written."""
        return self._state.get("tables")

    @property
    def checksums(self) -> list[str] | None:
        """Of the input files, once counted."""
        return self._state.get("checksums")

    @property
    def rows_total(self) -> int | None:
        """Rows of the source, once counted."""
        return self._state.get("rows_total")

    def save(self, **results: Any) -> None:
        """Keep the results of a stage."""
        self._state |= results
        write_json(self.folder / STATE, self._state | {"identity": self._identity})

    def save_marks(self, marks: Sequence[Mark], finished_rows: Mapping[str, int]) -> list[Mark]:
        """Keep the marks a resume may need: from the last one that finished rows cover on. Returns them."""
        kept = list(marks[max(i for i, mark in enumerate(marks) if _covered(mark, finished_rows)) :])
        self.save(marks=[mark.to_json() for mark in kept])
        return kept

    def last_mark(self, finished_rows: Mapping[str, int]) -> Mark:
        """The last place before which no row is missing from the finished parts."""
        marks = [Mark(), *(Mark.from_json(value) for value in self._state.get("marks", []))]
        return next(mark for mark in reversed(marks) if _covered(mark, finished_rows))

    def fresh(self, name: str) -> Path:
        """The folder `name` for files of a stage, emptied of what an interrupted run left there."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name

    def abandon(self) -> bool:
        """After a fault of the data: remove the folder, unless it keeps counts to go on from; says whether."""
        if self.tables is not None or (self.folder / COUNTS / SNAPSHOT).exists():
            return False
        shutil.rmtree(self.folder)
        if self._made_out and not any(self.out.iterdir()):
            self.out.rmdir()
        return True

    def remove(self) -> None:
        """Remove the folder; the dataset is complete."""
        shutil.rmtree(self.folder)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raises ValueError where `out` holds a finished dataset or other files, or cannot be made. No row decides that."""
    if not _is_ours(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} exists and is no dataset folder; it is never overwritten: choose another")
        check_writable(out)
    elif (out / MANIFEST).exists() and not overwrite:
        shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)  # left where the last step was cut short
        raise ValueError(f"{out} already holds a finished dataset; choose another folder, or --overwrite to replace it")


def _is_ours(out: Path) -> bool:
    """Whether `out` is a dataset or the beginnings of one."""
    return (out / MANIFEST).exists() or (out / WORK_FOLDER / STATE).exists()


def _covered(mark: Mark, finished_rows: Mapping[str, int]) -> bool:
    return all(mark.rows[split] <= finished_rows[split] for split in SPLITS)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """'schema.split.seed is 1, was 0' for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    return [] if old == new else [f"{path} is {new!r}, was {old!r}"]
