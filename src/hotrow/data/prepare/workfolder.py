"""`<out>/.prepare`: what an interrupted preparation leaves behind, so that the same command can continue.

prepare.json   what was asked for (a resume must ask for the same), and the results of finished stages
rows.arrow     rows in the order of time, if they had to be sorted (timesort.py)
counts/        counters, while counting (spill.py)
encode/        ids of vocabularies larger than memory, while encoding (encoder.py)
parts.json     finished parts (packed/writer.py)

If several ranks prepare together (shares.py), each has the last three for itself, with its number in their names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass as record
from typing_extensions import override

from hotrow.base.door import check_folder, is_taken, make_folder, remove
from hotrow.base.files import check_writable
from hotrow.base.records import STRICT, Count, Document
from hotrow.data.chunk import Position
from hotrow.data.packed.format import MANIFEST, RESERVED_SPLITS, WORK_FOLDER, Table
from hotrow.data.prepare.cells import CellCounts
from hotrow.data.prepare.spill import SNAPSHOT
from hotrow.data.sources.schema import SPLITS
from hotrow.data.sources.split import SplitPlan
from hotrow.data.transforms import Transform

STATE = "prepare.json"
COUNTS = "counts"
ROWS = "rows.arrow"


@dataclass(frozen=True)
class Mark:
    """A position between two chunks of the source, and how many rows of each split come before it."""

    row: Count = 0
    position: Position = field(default_factory=Position)
    rows: dict[str, Count] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    def __post_init__(self) -> None:
        """Raises ValueError if `rows` lacks a split."""
        if self.rows.keys() != set(SPLITS):
            raise ValueError(f"rows has {', '.join(self.rows) or 'no splits'}; it needs {', '.join(SPLITS)}")

    @property
    def start(self) -> Position | None:
        """The position to read from; None at the first row."""
        return self.position if self.row else None


@record(frozen=True, config=STRICT)
class Sorted:
    """What is known of the rows that were sorted by time; they are all that is left to read of the source."""

    num_rows: Count
    """Number of rows that were stored."""
    rows_read: Count
    """Number of rows of the source, also those that a sample leaves out."""
    num_skipped: Count
    """Bad rows that were skipped."""
    examples: tuple[str, ...]
    """Errors of a few of them."""
    cells: CellCounts
    """What was odd."""


SORTED = TypeAdapter(Sorted)


@record(frozen=True, config=STRICT)
class Results:
    """The content of prepare.json: what was asked for, and the results of stages; None if a stage is not finished."""

    identity: dict[str, JsonValue]
    plan: SplitPlan | None = None
    """Which rows train."""
    in_order: bool = True
    """Whether the rows can be counted in the order in which they come."""
    sorted: Sorted | None = None
    """The rows in the order of time, if they do not come in it."""
    transforms: tuple[str, ...] | None = None
    """Transforms of the dense columns, once training rows are counted."""
    tables: dict[str, Table] | None = None
    """Tables by name, once their vocabularies are written."""
    last_time_s: float | None = None
    """Time of the last row, in seconds since 1970, if a day of a chain has times of a known unit."""
    hours: list[list[int]] = field(default_factory=list)
    """When each hour of the training rows begins, in seconds since 1970, and its first row, if that is known."""
    checksums: tuple[str, ...] | None = None
    """Checksums of the input files, once their rows are counted."""
    rows_total: Count | None = None
    """Number of rows of the source, once counted."""
    cells: CellCounts | None = None
    """What was missing or odd, once counted."""
    marks: tuple[Mark, ...] = ()
    """The ends of all chunks, and of the source, once counted."""

    def __post_init__(self) -> None:
        for text in self.transforms or ():
            Transform.parse(text)
        for name, table in (self.tables or {}).items():
            if table.name != name:
                raise ValueError(f"tables.{name}.name is {table.name!r}; it must be {name!r}")


CURE = "start again with --overwrite, or remove the folder .prepare"
RESULTS = TypeAdapter(Results)
_DOCUMENT = Document(Results, marks={"hotrow_prepare": 1}, cure=CURE)


class OtherWorkError(ValueError):
    """A folder holds unfinished work on other rows, or with other options."""


class WorkFolder:
    """The state of one preparation, saved whole after every stage and part.

    Raises ValueError if `out` holds a finished dataset or other files, and OtherWorkError, which names what differs,
    if it holds other unfinished work;
    with `overwrite`, a dataset or unfinished work is replaced. Nothing is written or removed before `begin`.
    """

    def __init__(self, out: Path, identity: dict[str, Any], *, overwrite: bool) -> None:
        self.out, self.folder, self._overwrite = out, out / WORK_FOLDER, overwrite
        self.results = Results(identity)
        self.resumed = False
        self._made_out = not out.exists()
        check_out(out, overwrite=overwrite)
        if _is_ours(out):
            check_folder(out, files=(MANIFEST,), folders=(WORK_FOLDER, *RESERVED_SPLITS, *SPLITS))
            if not overwrite:
                self._resume()

    def _resume(self) -> None:
        found = _DOCUMENT.read(self.folder / STATE)
        differences = _differences(found.identity, self.results.identity)
        if differences:
            raise OtherWorkError(
                f"{self.out} holds unfinished work of another command: {'; '.join(differences[:5])}; run the "
                "earlier command to finish it, or --overwrite to start again"
            )
        self.results, self.resumed = found, True

    def begin(self) -> None:
        """Makes the folder for new work, after removing what is to be overwritten."""
        if self._overwrite and _is_ours(self.out):
            # The manifest goes first: without it, nobody takes the rest for a dataset.
            for name in (MANIFEST, *RESERVED_SPLITS, *SPLITS, WORK_FOLDER):
                remove(self.out / name)
        make_folder(self.folder, within=self.out)
        try:
            self.save()
        except BaseException:
            self.abandon()  # a folder without state belongs to nobody, and the same command would be refused
            raise

    def save(self, **results: Any) -> None:
        """Saves the results of a stage."""
        self.results = replace(self.results, **results)
        _DOCUMENT.write(self.folder / STATE, self.results)

    def fresh(self, name: str) -> Path:
        """Returns the folder `name` for files of a stage; what an interrupted run left there is removed."""
        remove(self.folder / name, within=self.out)
        return self.folder / name

    def abandon(self) -> bool:
        """Removes the folder after an error in the data, unless it holds counts to continue from; returns whether."""
        if self.results.tables is not None or any(self.folder.glob(f"{COUNTS}*/{SNAPSHOT}")):
            return False
        remove(self.folder)
        if self._made_out and not any(self.out.iterdir()):
            self.out.rmdir()
        return True

    def remove(self) -> None:
        """Removes the folder when the dataset is complete."""
        remove(self.folder)


class SilentWork(WorkFolder):
    """The state of a preparation as ranks other than the first have it: they know it, and do not write prepare.json."""

    def __init__(self, out: Path, results: Results) -> None:
        self.out, self.folder, self.results = out, out / WORK_FOLDER, results

    @override
    def save(self, **results: Any) -> None:
        self.results = replace(self.results, **results)

    @override
    def abandon(self) -> bool:
        return True

    @override
    def remove(self) -> None: ...


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raises ValueError if `out` holds a finished dataset or other files, or cannot be made; needs no row for that."""
    if not _is_ours(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} exists and is not a dataset folder; it is never overwritten: choose another")
        check_writable(out)
    elif is_taken(out / MANIFEST) and not overwrite:
        remove(out / WORK_FOLDER)  # left behind if the last step was interrupted
        raise ValueError(f"{out} already holds a finished dataset; choose another folder, or --overwrite to replace it")


def _is_ours(out: Path) -> bool:
    """Returns whether `out` is a dataset or the unfinished work on one."""
    return is_taken(out / MANIFEST) or is_taken(out / WORK_FOLDER / STATE)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Returns 'schema.split.seed is 1, was 0' for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    return [] if old == new else [f"{path} is {new!r}, was {old!r}"]
