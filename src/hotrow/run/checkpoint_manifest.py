"""The manifest of a checkpoint, as records: its parts, the chains of tables in tiers, size and checksum of every file.

checkpoint.py writes and loads what is said here; a checkpoint's folder is described there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass

from hotrow.base.files import check_name
from hotrow.base.records import STRICT, Count, Document
from hotrow.placement.base import InitialRows
from hotrow.run.checkpoint_tensors import CURE, FileRecord

FORMAT_VERSION = 2
MANIFEST = "manifest.json"

Plain: TypeAlias = bool | int | float | str | None
_Entry = Annotated[str, Field(pattern=r"^[0-9]{1,9}\..+$")]


@dataclass(frozen=True, config=STRICT)
class ChainRecord:
    """The files of a table in tiers in one part."""

    num_rows: Count
    """Rows of the table."""
    initial: InitialRows
    links: tuple[Count, ...]
    """The number of rows in each file."""


@dataclass(frozen=True, config=STRICT)
class PartRecord:
    """What a part is made of beside its tensors."""

    chains: dict[str, ChainRecord] | None = None
    """By table; None where the part was not in tiers."""
    values: dict[_Entry, Plain] = Field(default_factory=dict)
    """State of an optimizer that is no tensor, by `<parameter index>.<name>`."""
    param_groups: tuple[dict[str, Plain | tuple[Plain, ...]], ...] = ()
    """The options of an optimizer's parameter groups."""

    def __post_init__(self) -> None:
        for table, chain in (self.chains or {}).items():
            if chain.initial.table != table:
                raise ValueError(f"chains.{table}.initial.table is {chain.initial.table!r}; it must be {table!r}")


@dataclass(frozen=True, config=STRICT)
class Manifest:
    """What manifest.json says."""

    parts: dict[str, PartRecord]
    files: dict[str, FileRecord]
    """By path within the folder."""
    written_bytes: Count
    """Bytes of the files that are not hard links to those of an earlier checkpoint."""
    extra: dict[str, JsonValue]
    """What the caller added."""

    def __post_init__(self) -> None:
        for name in self.parts:
            check_name(name, what="checkpoint part")
        for file in self.files:
            for component in file.split("/"):
                check_name(component, what=f"files: file name in {file!r}")

    def chain(self, part: str, table: str) -> ChainRecord | None:
        """That of a table in a part; None where the part was not in tiers."""
        chains = self.parts[part].chains if part in self.parts else None
        return None if chains is None else chains.get(table)


DOCUMENT = Document(Manifest, marks={"hotrow_checkpoint": FORMAT_VERSION}, cure=CURE)


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of the checkpoint folder at `path`; ValueError naming file, field and cure where there is none."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise ValueError(
            f"{path} is no checkpoint: it holds no {MANIFEST}; pass a folder such as runs/NAME/checkpoints/step-N"
        )
    return DOCUMENT.read(path / MANIFEST)
