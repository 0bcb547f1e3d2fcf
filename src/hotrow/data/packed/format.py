"""What a packed dataset holds, as plain data: `dataset.json` in both directions, column types, the values allowed.

A packed dataset is prepared rows in a folder of Arrow files, memory-mapped. docs/format.md is its specification; this
file and it say the same. `writer` turns rows into parts, `reader` maps the columns and checks them when first read,
`loader` makes shuffled batches and can resume at any of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass

from hotrow.base.door import check_folder, is_taken
from hotrow.base.files import check_name, check_text, file_name
from hotrow.base.records import MAX_COUNT, STRICT, Count, Document
from hotrow.base.version import __version__
from hotrow.data.transforms import Transform
from hotrow.objectives.objective import LabelKind

FORMAT = "hotrow-packed"
VERSION = 1
MANIFEST = "dataset.json"
WORK_FOLDER = ".prepare"
"""Folder of unfinished work inside the dataset's folder; removed when the dataset is complete."""
ROWS_PER_BLOCK = 65_536
"""One block is one Arrow record batch: the unit of checksums and of shuffling."""
MAX_ROWS_PER_BLOCK = 1 << 24
MAX_EDGES = 20
"""Edges of a column; of more, every second. With all of them bank.csv had a validation LogLoss of 0.174, not 0.170."""
RESERVED_SPLITS = frozenset({"vocab", "counts", "statistics", "rare"})

STATISTICS = "statistics/counts.safetensors"
"""Path, within the folder, of the label's statistics by value."""

FeatureKind = Literal["one_hot", "multi_hot", "sequence"]
Crc32 = Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass(frozen=True, config=STRICT)
class Label:
    """One label as stored: float32."""

    name: str = "label"
    kind: LabelKind = "binary"
    """binary: 0 or 1. number: any finite number."""


@dataclass(frozen=True, config=STRICT)
class DenseColumn:
    """One dense input as stored: float32, finite, `transform` already applied."""

    name: str
    transform: str = "none"
    """What preparation did to the raw number, in the schema's words; prediction does the same."""


@dataclass(frozen=True, config=STRICT)
class Feature:
    """One sparse feature: a column of row numbers of `table`."""

    name: str
    table: str
    kind: FeatureKind = "one_hot"
    """one_hot: exactly one id per row. multi_hot: a bag, whose order has no meaning. sequence: a list, oldest first."""


@dataclass(frozen=True, config=STRICT)
class Table:
    """The ids of one embedding table. Row 0 is for rare and unseen ids; the other rows follow by falling training
    count, and those of each later day behind them, or in rows whose ids have expired."""

    name: str
    num_embeddings: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    num_keys: Count = 0
    """Distinct raw ids that have a row of their own."""
    key_kind: Literal["int", "bytes"] = "int"
    missing_row: Count | None = None
    """The row that stands for a missing value; if None, no value was missing in training."""
    num_dropped: Count = 0
    """Distinct raw ids sent to row 0 by the minimum count or the cap; in a chain of days, those that wait for a row."""
    vocabulary: str | None = None
    """Content id of `vocab/<name>`; None if ids need no vocabulary."""
    parent: str | None = None
    """Content id of the vocabulary that this one extends."""

    @property
    def num_used(self) -> int:
        """Rows that stand for an id or for the missing value."""
        return self.num_keys + (self.missing_row is not None)

    @property
    def vocabulary_file(self) -> str:
        """Path of the vocabulary, below the dataset's folder."""
        return f"vocab/{file_name(self.name)}"

    @property
    def counts_file(self) -> str:
        """Path of the accesses per row, below the dataset's folder."""
        return f"counts/{file_name(self.name)}"

    @property
    def rare_files(self) -> tuple[str, str]:
        """Paths of the ids that wait for a row, and of their counts, within the dataset's folder."""
        return f"rare/{self.vocabulary_file}", f"rare/{self.counts_file}"

    @property
    def use_files(self) -> tuple[str, str]:
        """Paths, within the dataset's folder, of the days on which rows were last used, and ids that wait last seen."""
        return f"rare/used/{file_name(self.name)}", f"rare/seen/{file_name(self.name)}"

    @property
    def reborn_file(self) -> str:
        """Path of the rows that stand for other ids than in `parent`, within the dataset's folder; no file if there are
        none."""
        return f"rare/reborn/{file_name(self.name)}"

    @property
    def id_dtype(self) -> type[np.int32 | np.int64]:
        """int32 up to 2^31 rows, else int64."""
        return np.int32 if self.num_embeddings <= 1 << 31 else np.int64


@dataclass(frozen=True, config=STRICT)
class Part:
    """One Arrow file. Its bytes are divided into ranges without gaps: header, each block, footer."""

    file: Annotated[str, Field(pattern=r"^part-[0-9]{5,9}\.arrow$")]
    block_rows: tuple[Annotated[int, Field(ge=1, le=MAX_ROWS_PER_BLOCK)], ...]
    range_ends: tuple[Count, ...]
    """Byte offset after each range, [blocks + 2]; the last one is the size of the file."""
    range_crc32: tuple[Crc32, ...]

    def __post_init__(self) -> None:
        num_ranges = len(self.block_rows) + 2
        if len(self.range_ends) != num_ranges or len(self.range_crc32) != num_ranges or not self.block_rows:
            raise ValueError(
                f"{self.file} has {len(self.block_rows)} blocks, {len(self.range_ends)} range_ends and "
                f"{len(self.range_crc32)} range_crc32; it needs at least one block and blocks + 2 of each"
            )
        if any(a >= b for a, b in zip((0, *self.range_ends), self.range_ends, strict=False)):
            raise ValueError(f"{self.file}: range_ends must rise from above 0")
        if len(set(self.block_rows[:-1])) > 1 or self.block_rows[-1] > self.block_rows[0]:
            raise ValueError(f"{self.file}: all blocks but the last must have the same rows, the last at most as many")

    @property
    def num_rows(self) -> int:
        return sum(self.block_rows)

    @property
    def num_bytes(self) -> int:
        return self.range_ends[-1]


@dataclass(frozen=True, config=STRICT)
class SplitInfo:
    """One split; its rows are stored in the order of its parts."""

    num_rows: Count
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if (rows := sum(part.num_rows for part in self.parts)) != self.num_rows:
            raise ValueError(f"num_rows is {self.num_rows} but the parts hold {rows}")
        if len({part.file for part in self.parts}) != len(self.parts):
            raise ValueError("a part is listed twice")


@dataclass(frozen=True, config=STRICT)
class FileRecord:
    """Size and checksum of a file other than a part."""

    num_bytes: Count
    crc32: Crc32


@dataclass(frozen=True, config=STRICT)
class SourceFile:
    """One raw input file, as it was when the dataset was made."""

    path: str
    num_bytes: Count
    checksum: str = ""
    """`<algorithm>:<hex>`; empty if the source has no bytes to check (a data frame, a generator)."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class DatasetInfo:
    """Everything in `dataset.json`. Raises pydantic's ValueError, which names the field that is wrong."""

    name: str
    """What the rows are, e.g. "criteo"."""
    labels: Annotated[tuple[Label, ...], Field(min_length=1)] = (Label(),)
    """What a model is to predict, in stored order."""
    weight: str | None = None
    """Name of the column of sample weights: float32, finite, 0 or more. If None, every row counts 1."""
    dense: tuple[DenseColumn, ...] = ()
    features: Annotated[tuple[Feature, ...], Field(min_length=1)]
    tables: tuple[Table, ...]
    splits: dict[str, SplitInfo] = Field(default_factory=dict)
    files: dict[str, FileRecord] = Field(default_factory=dict)
    """Files under vocab/, counts/, statistics/ and rare/, by path relative to the folder."""
    ids: dict[str, JsonValue] = Field(default_factory=dict)
    """How raw ids became row numbers: minimum count, cap, hashing, seed of the split."""
    sources: tuple[SourceFile, ...] = ()
    licence: str = ""
    """Note on the terms of the source's licence."""
    summary: dict[str, JsonValue] = Field(default_factory=dict)
    """What preparation counted, such as rows read and rows skipped."""
    created_by: str = f"hotrow {__version__}"

    def __post_init__(self) -> None:
        for what, names in (
            ("dense column", self.dense_names),
            ("feature", self.feature_names),
            ("column", self.stored_names),
            ("table", [table.name for table in self.tables]),
            ("split", list(self.splits)),
        ):
            _check_unique(what, names)
        for feature in self.features:
            if feature.table not in self.table_by_name:
                known = ", ".join(self.table_by_name) or "none"
                raise ValueError(f"feature {feature.name!r} names table {feature.table!r}; the tables are: {known}")
        unused = self.table_by_name.keys() - {feature.table for feature in self.features}
        if unused:
            raise ValueError(f"no feature looks up in table {sorted(unused)[0]!r}; drop the table or add the feature")
        if reserved := RESERVED_SPLITS & self.splits.keys():
            raise ValueError(f"split {sorted(reserved)[0]!r}: this name is taken by a folder of the format; rename it")
        for path in self.files:
            _check_side_path(path)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the columns of every part: labels, weight, dense, features. A feature may have the name of a dense
        column, which is made of the same raw column; then it is stored as "NAME (ids)". A weight that is an input too
        is stored as "NAME (weight)"."""
        numbers = {*self.dense_names}
        features = [f"{name} (ids)" if name in numbers else name for name in self.feature_names]
        inputs, weights = [*self.dense_names, *features], [] if self.weight is None else [self.weight]
        weights = [f"{name} (weight)" if name in inputs else name for name in weights]
        return (*(label.name for label in self.labels), *weights, *inputs)

    @property
    def num_targets(self) -> int:
        """Stored columns before the dense ones: labels and weight."""
        return len(self.labels) + (self.weight is not None)

    @cached_property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense columns in stored order."""
        return tuple(column.name for column in self.dense)

    @property
    def edges(self) -> list[list[float]]:
        """Of each dense column the boundaries of the buckets that its numbers are ids by too, as such numbers are
        stored: rising, and at most MAX_EDGES; [] without buckets."""
        schema: Any = self.ids.get("schema") or {"categorical": []}
        buckets = {each["column"]: each.get("buckets") or [] for each in schema["categorical"]}
        return [_stored(buckets.get(column.name, []), column.transform) for column in self.dense]

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the sparse features in stored order."""
        return tuple(feature.name for feature in self.features)

    @cached_property
    def table_by_name(self) -> dict[str, Table]:
        return {table.name: table for table in self.tables}

    @property
    def row_bytes(self) -> int:
        """Stored bytes per row, not counting the ids of lists."""
        sizes = (8 if f.kind != "one_hot" else np.dtype(self.id_dtype(f)).itemsize for f in self.features)
        return 4 * (self.num_targets + len(self.dense)) + sum(sizes)

    def id_dtype(self, feature: Feature) -> type[np.int32 | np.int64]:
        return self.table_by_name[feature.table].id_dtype

    def schema_fingerprint(self) -> str:
        """Returns a hex digest of everything that decides the bytes of the parts, and of how ids were made."""
        value = asdict(replace(self, splits={}, files={}, summary={}))
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _stored(boundaries: Sequence[float], transform: str) -> list[float]:
    """Returns what numbers at the boundaries are stored as: each is a normal float32 above the one before."""
    if not boundaries:
        return []
    with np.errstate(over="ignore"):
        numbers = Transform.parse(transform)(np.array(boundaries, np.float32).astype(np.float64)).astype(np.float32)
    edges = np.unique(numbers[np.isfinite(numbers)]).astype(np.float64)
    edges = edges[np.diff(edges, prepend=-np.inf) >= np.finfo(np.float32).tiny]
    return [float(edge) for edge in edges[:: max(1, math.ceil(len(edges) / MAX_EDGES))]]


MANIFEST_CURE = "restore the file or prepare the data again"


_DOCUMENT = Document(DatasetInfo, marks={"format": FORMAT, "version": VERSION}, cure=MANIFEST_CURE)


def _check_unique(what: str, names: tuple[str, ...] | list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        (check_name if what == "split" else check_text)(name, what=f"{what} name")  # a split is a folder
        if name in seen:
            raise ValueError(f"{what} name {name!r} is used twice; {what} names must be unique")
        seen.add(name)


def _check_side_path(path: str) -> None:
    folder, *rest = path.split("/")
    if folder not in RESERVED_SPLITS or not rest:
        raise ValueError(f"files names {path!r}; only paths below vocab/, counts/, statistics/ and rare/ are allowed")
    for component in rest:
        check_name(component, what=f"path component of files entry {path!r}")


def write_info(folder: Path, info: DatasetInfo) -> None:
    """Writes `dataset.json` atomically, which completes the dataset."""
    _DOCUMENT.write(folder / MANIFEST, info)


def read_info(folder: Path) -> DatasetInfo:
    """Reads and checks `dataset.json`. Raises ValueError naming the field, what is wrong and the cure."""
    path = folder / MANIFEST
    if not is_taken(path):
        unfinished = (folder / WORK_FOLDER).exists()
        raise ValueError(
            f"{folder}: no {MANIFEST}, so this is not a complete packed dataset; "
            + ("its preparation was interrupted, run the same prepare command again" if unfinished else "prepare one")
        )
    check_folder(folder, files=(MANIFEST,), folders=(*RESERVED_SPLITS, WORK_FOLDER))
    return _DOCUMENT.read(path)


def arrow_schema(info: DatasetInfo) -> pa.Schema:
    """Returns the columns of every part, none of them nullable: labels, weight, dense, features, in the manifest's
    order."""
    kinds = [pa.float32()] * (info.num_targets + len(info.dense))
    for feature in info.features:
        kind = pa.from_numpy_dtype(info.id_dtype(feature))
        if feature.kind != "one_hot":
            kind = pa.large_list(pa.field("item", kind, nullable=False))
        kinds.append(kind)
    named = zip(info.stored_names, kinds, strict=True)
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in named])


class Ragged(NamedTuple):
    """Lists of ids; row r holds `values[row_splits[r] : row_splits[r + 1]]`."""

    values: NDArray[Any]
    row_splits: NDArray[np.int64]


Ids = NDArray[Any] | Ragged


class Block(NamedTuple):
    """The columns of n consecutive rows: labels L x [n], dense I x [n], ids by feature [n] or ragged, and weights [n]
    or None."""

    labels: tuple[NDArray[np.float32], ...]
    dense: tuple[NDArray[np.float32], ...]
    ids: tuple[Ids, ...]
    weight: NDArray[np.float32] | None = None

    @property
    def label(self) -> NDArray[np.float32]:
        """The first label, [n]."""
        return self.labels[0]

    @property
    def num_rows(self) -> int:
        return len(self.label)

    @property
    def columns(self) -> tuple[Ids, ...]:
        """All columns, in stored order."""
        return (*self.labels, *([] if self.weight is None else [self.weight]), *self.dense, *self.ids)


def columns_of(info: DatasetInfo, columns: Sequence[Any]) -> Block:
    """Returns columns in stored order as a `Block`."""
    first, last = info.num_targets, info.num_targets + len(info.dense)
    weight = None if info.weight is None else columns[first - 1]
    return Block(tuple(columns[: len(info.labels)]), tuple(columns[first:last]), tuple(columns[last:]), weight)


def lengths_of(ids: Ids) -> NDArray[np.int64]:
    return np.diff(ids.row_splits) if isinstance(ids, Ragged) else np.ones(len(ids), np.int64)


def slice_ids(ids: Ids, start: int, stop: int) -> Ids:
    """Returns rows [start, stop) of `ids`, their values as a view."""
    if not isinstance(ids, Ragged):
        return ids[start:stop]
    splits = ids.row_splits[start : stop + 1]
    return Ragged(ids.values[splits[0] : splits[-1]], splits - splits[0])


def concatenate_ids(pieces: Sequence[Ids]) -> Ids:
    """Returns the rows of all `pieces`, one after the other, as a copy; either all pieces are ragged or none is."""
    ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
    if not ragged:
        return np.concatenate(pieces)
    splits = np.zeros(sum(len(piece.row_splits) - 1 for piece in ragged) + 1, np.int64)
    np.cumsum(np.concatenate([np.diff(piece.row_splits) for piece in ragged]), out=splits[1:])
    return Ragged(np.concatenate([piece.values for piece in ragged]), splits)


def select_ids(ids: Ids, mask: NDArray[np.bool_]) -> Ids:
    """Returns the rows of encoded ids whose mask [num_rows] is set."""
    if mask.all():
        return ids
    if not isinstance(ids, Ragged):
        return ids[mask]
    lengths = np.diff(ids.row_splits)
    values = ids.values[np.repeat(mask, lengths)]
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths[mask])]))


def check_values(info: DatasetInfo, block: Block) -> None:
    """Raises ValueError naming column and row unless labels are of their kind, weights and dense values finite, weights
    not negative, ids within their tables."""
    for label, column in zip(info.labels, block.labels, strict=True):
        good = (column == 0) | (column == 1) if label.kind == "binary" else np.isfinite(column)
        if not good.all():
            row, allowed = int((~good).argmax()), "0 or 1" if label.kind == "binary" else "a finite number"
            raise ValueError(f"column {label.name!r}, row {row}: label is {column[row]}; it must be {allowed}")
    if block.weight is not None and not (good := (block.weight >= 0) & (block.weight < np.inf)).all():
        row = int((~good).argmax())
        raise ValueError(
            f"column {info.weight!r}, row {row}: weight is {block.weight[row]}; it must be a finite number, 0 or more"
        )
    for name, column in zip(info.dense_names, block.dense, strict=True):
        if not np.isfinite(column).all():
            row = int((~np.isfinite(column)).argmax())
            raise ValueError(f"column {name!r}, row {row}: value is {column[row]}; dense values must be finite")
    for feature, ids in zip(info.features, block.ids, strict=True):
        _check_ids(feature, info.table_by_name[feature.table], ids, block.num_rows)


def _check_ids(feature: Feature, table: Table, ids: Ids, num_rows: int) -> None:
    values = ids
    if isinstance(ids, Ragged):
        values, splits = ids
        if len(splits) != num_rows + 1 or splits[0] != 0 or splits[-1] != len(values) or (np.diff(splits) < 0).any():
            raise ValueError(
                f"column {feature.name!r}: row_splits must be {num_rows + 1} numbers that rise from 0 to "
                f"{len(values)}, the number of ids"
            )
    assert isinstance(values, np.ndarray)
    # Read as unsigned, a negative id is too large, so one pass finds both kinds of bad ids.
    if len(values) and values.view(f"u{values.itemsize}").max() >= table.num_embeddings:
        index = int(((values < 0) | (values >= table.num_embeddings)).argmax())
        row = int(np.searchsorted(ids.row_splits, index, "right")) - 1 if isinstance(ids, Ragged) else index
        raise ValueError(
            f"column {feature.name!r}, row {row}: id is {values[index]}; table {table.name!r} has rows 0 to "
            f"{table.num_embeddings - 1}"
        )


def split_columns(info: DatasetInfo, sparse: Mapping[str, Any]) -> list[Any]:
    """Returns the values of `sparse` in stored order; raises ValueError if its names are not the features' names."""
    if sparse.keys() != set(info.feature_names):
        raise ValueError(f"sparse has features {sorted(sparse)}; the dataset's are {sorted(info.feature_names)}")
    return [sparse[name] for name in info.feature_names]
