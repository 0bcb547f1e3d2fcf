"""`<out>/.prepare`: what an interrupted preparation leaves behind, so that the same command can continue.

prepare.json   what was asked for (a resume must ask for the same), and the results of finished stages
rows/          the rows as they were read, in parts (rows.py)
counts/        counters that exceed memory, while counting (spill.py)
encode/        ids of vocabularies larger than memory, while encoding (encoder.py)
parts.json     finished parts (packed/writer.py)
"""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import check_folder, is_taken, make_folder, remove
from hotrow.base.files import PARTIAL_SUFFIX, check_writable
from hotrow.base.records import STRICT, Document
from hotrow.data.packed.format import MANIFEST, RESERVED_SPLITS, WORK_FOLDER, Table
from hotrow.data.prepare.rows import CURE
from hotrow.data.sources.schema import SPLITS
from hotrow.data.transforms import Transform

STATE = "prepare.json"
COUNTS = "counts"
ROWS = "rows"


@record(frozen=True, config=STRICT)
class Results:
    """The content of prepare.json: what was asked for, and the results of stages; None if a stage is not finished."""

    identity: dict[str, JsonValue]
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

    def __post_init__(self) -> None:
        for text in self.transforms or ():
            Transform.parse(text)
        for name, table in (self.tables or {}).items():
            if table.name != name:
                raise ValueError(f"tables.{name}.name is {table.name!r}; it must be {name!r}")


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

    def abandon(self) -> None:
        """Removes all that this work has made."""
        for name in (*RESERVED_SPLITS, *SPLITS):
            remove(self.out / name)
        remove(self.folder)
        if self._made_out and not any(self.out.iterdir()):
            self.out.rmdir()

    def remove(self) -> None:
        """Removes the folder when the dataset is complete."""
        remove(self.folder)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raises ValueError if `out` holds a finished dataset or other files, or cannot be made; needs no row for that."""
    if not _is_ours(out):
        work = out / WORK_FOLDER
        left = (work, work / f"{STATE}{PARTIAL_SUFFIX}")  # by a call that was killed before it saved anything
        if out.exists() and (not out.is_dir() or any(path not in left for path in out.rglob("*"))):
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
