"""The rows that a study trains on: synthetic ones of stated sizes, or a file of real ones.

Synthetic rows are written packed, with row numbers in place of raw ids: a table has as many rows as the study says,
whether or not they are ever looked up, which no preparation of raw rows would give. They are for speed; labels are
drawn by chance.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import make_folder
from hotrow.base.files import PARTIAL_SUFFIX, check_name
from hotrow.base.records import STRICT
from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import write_counts
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.clicks import draw_ranks

CLICKS = 0.25
Size = Annotated[int, Field(ge=1, le=1 << 30)]


@record(frozen=True, config=STRICT, kw_only=True)
class SyntheticRows:
    """Rows drawn at random."""

    tables: Annotated[int, Field(ge=1, le=4096)] = 8
    """Number of tables, each looked up by a feature of its own."""
    generated: Annotated[int, Field(ge=0, le=4096)] = 0
    """How many of the tables are of features that preprocessing makes of dense ones, by the bucket that a value is in:
    one id per sample, all buckets alike."""
    buckets: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Buckets of a generated feature, each a row of its table."""
    rows: Annotated[int, Field(ge=2, le=1 << 30)] = 100_000
    """Rows in a table that is not of a generated feature; with `spread`, in the table in the middle."""
    spread: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Rows of the largest table over `rows`, and of `rows` over those of the smallest; between them, evenly by
    powers."""
    dense: Annotated[int, Field(ge=0, le=65_536)] = 13
    """Number of dense features."""
    lookups: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Ids of a feature per sample, if it is not generated: 1, or a mean (Poisson, at least one)."""
    zipf: Annotated[float, Field(ge=0, le=5)] = 1.05
    """Exponent of the popularity law; 0 is uniform."""
    samples: Size = 16_384
    """Training rows. A round of a measurement is one pass over them, or several."""
    seed: Annotated[int, Field(ge=0)] = 1

    def __post_init__(self) -> None:
        if self.generated > self.tables:
            raise ValueError(f"generated is {self.generated} of {self.tables} tables; it must not exceed tables")

    @property
    def raw(self) -> int:
        """Tables that are not of generated features. They are the first."""
        return self.tables - self.generated

    @property
    def table_rows(self) -> list[int]:
        """Rows of each table."""
        places = [2 * t / (self.raw - 1) - 1 if self.raw > 1 else 0.0 for t in range(self.raw)]
        own = [max(2, round(self.rows * self.spread**place)) for place in places]
        return own + [self.buckets + 1] * self.generated

    @property
    def num_bytes(self) -> int:
        """About how many bytes the packed rows take."""
        per_row = 4 + 4 * self.dense + self.raw * (4 * self.lookups + (8 if self.lookups > 1 else 0))
        per_row += 4 * self.generated
        return int(self.samples * per_row) + 4 * sum(self.table_rows)

    def write(self, folder: Path) -> None:
        """Writes the packed dataset."""
        names = [f"t{t}" for t in range(len(self.table_rows))]
        kinds = ["one_hot" if self.lookups == 1 else "multi_hot"] * self.raw + ["one_hot"] * self.generated
        info = DatasetInfo(
            name=f"synthetic-{self.digest}",
            dense=tuple(DenseColumn(f"d{i}") for i in range(self.dense)),
            features=tuple(Feature(name, name, kind) for name, kind in zip(names, kinds, strict=True)),  # type: ignore[arg-type]
            tables=tuple(Table(name, rows) for name, rows in zip(names, self.table_rows, strict=True)),
            licence="drawn at random",
        )
        generator = np.random.default_rng([self.seed, 0])
        label = (generator.random(self.samples) < CLICKS).astype(np.float32)
        dense = generator.standard_normal((self.samples, self.dense), dtype=np.float32)
        sparse: dict[str, Any] = {}
        with PackedWriter(folder, info) as writer:
            make_folder(folder / "counts")
            for t, (name, rows) in enumerate(zip(names, self.table_rows, strict=True)):
                ids, splits, counts = self._ids(t, rows)
                sparse[name] = ids if splits is None else (ids, splits)
                write_counts(folder / "counts" / name, counts)
            writer.append("train", label, dense, sparse)
            writer.close()

    def _ids(self, table: int, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.uint32]]:
        """Returns row numbers by falling count, the samples' first ids if they are lists, and the counts.

        Row 0, which preparation keeps for rare and unseen ids, is not looked up.
        """
        generator = np.random.default_rng([self.seed, 1 + table])
        splits, num_ids, is_raw = None, self.samples, table < self.raw
        if self.lookups > 1 and is_raw:
            lengths = np.maximum(1, generator.poisson(self.lookups, self.samples))
            splits = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
            num_ids = int(splits[-1])
        words = generator.integers(0, 1 << 64, num_ids, np.uint64)
        zipf = self.zipf if is_raw else 0.0
        ranks = draw_ranks(rows - 1, zipf, words)
        seen, inverse, counts = np.unique(ranks, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        place = np.empty(len(seen), np.int64)
        place[order] = np.arange(1, len(seen) + 1)
        by_row = np.zeros(rows, np.uint32)
        by_row[1 : len(seen) + 1] = counts[order]
        return place[inverse], splits, by_row

    @property
    def digest(self) -> str:
        """Identifies exactly these rows."""
        return _digest(self)


class NotHere(ValueError):  # noqa: N818  # names what is the matter
    """A study needs something that this machine does not have."""


@record(frozen=True, config=STRICT, kw_only=True)
class RealRows:
    """A file of raw rows in the folder that HOTROW_DATA names, prepared as `hotrow prepare SOURCE` does."""

    file: str
    source: str = "criteo"
    samples: Size | None = None
    """Only the first so many rows; null: all."""

    @property
    def path(self) -> Path:
        """Where the file is."""
        folder = os.environ.get("HOTROW_DATA")
        if folder is None:
            raise NotHere(f"the study needs {self.file}: set the environment variable HOTROW_DATA to its folder")
        path = Path(folder) / check_name(self.file, what="data.file")
        if not path.is_file():
            raise NotHere(f"the study needs {path}, which does not exist: set HOTROW_DATA to the folder of the file")
        return path

    @property
    def num_bytes(self) -> int:
        """About how many bytes the packed rows take."""
        return 200 * (self.samples or 100_000)

    def write(self, folder: Path) -> None:
        """Prepares the packed dataset."""
        run_prepare(self.source, str(self.path), folder, rows=self.samples, split="random", seed=1)

    @property
    def digest(self) -> str:
        """Identifies exactly these rows."""
        return _digest(self)


def prepared(rows: SyntheticRows | RealRows, parent: Path) -> PackedDataset:
    """Returns the packed rows in a folder of `parent`, written there unless they are there already."""
    folder = parent / rows.digest
    if not folder.exists():
        partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True, mode=0o700)
        rows.write(partial)
        partial.replace(folder)
    return PackedDataset.open(folder)


def _digest(rows: SyntheticRows | RealRows) -> str:
    return hashlib.sha256(json.dumps(asdict(rows), sort_keys=True).encode()).hexdigest()[:16]
