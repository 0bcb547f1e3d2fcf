"""Parquet to row numbers: the two passes of preparation beside pyarrow's read + dictionary_encode of the same columns.

    python -m benchmarks.parquet_encode --out docs/measurements/benchmarks.json [--quick] [CELL ...]

The file has a label, two numbers, and six id columns of Zipf-distributed integers and text, as pyarrow writes it by
default. Both sides use every thread they like and read from the page cache. Outputs are compared as "which rows hold
the same id", numbered by first appearance. pyarrow knows every id of the file at once and keeps its dictionary in
memory; ours ranks ids by popularity over a training split, on vocabularies that may be larger than memory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import bench
from benchmarks.results import run_as_script
from hotrow.data.coded import column_of
from hotrow.data.prepare.encoder import EncoderPool, RowEncoder
from hotrow.data.prepare.spill import CounterPool
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.schema import parse_schema
from hotrow.data.transforms import Transform

INTEGERS = {"user": 1_000_000, "item": 300_000, "category": 5_000}
TEXTS = {"device": 400_000, "site": 20_000, "country": 200}
IDS = (*INTEGERS, *TEXTS)
ENCODE_TARGET = 2.0
"""Least ratio of the peer to ours, by our own promise."""
SCHEMA = parse_schema(
    {
        "label": "click",
        "dense": [{"column": c, "transform": "identity"} for c in ("price", "age")],
        "categorical": [*IDS],
    },
    where="benchmark",
)


def write_file(folder: Path, num_rows: int) -> Path:
    """The file, from a fixed seed; ids fall off as rank^-1.1."""
    rng = np.random.default_rng(7)
    columns: dict[str, object] = {
        "click": rng.integers(0, 2, num_rows).astype(np.int8),
        "price": rng.lognormal(0, 1, num_rows).astype(np.float32),
        "age": rng.integers(10, 90, num_rows).astype(np.int16),
    }
    for name, size in (INTEGERS | TEXTS).items():
        weights = np.cumsum(np.arange(1, size + 1) ** -1.1)
        ids = np.searchsorted(weights, rng.random(num_rows) * weights[-1])
        ids = rng.permutation(size)[ids]
        columns[name] = ids if name in INTEGERS else pa.array(np.char.add(f"{name}-", ids.astype(str)))
    path = folder / "clicks.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def by_first_appearance(ids: NDArray[np.int64]) -> Tensor:
    """Ids renumbered in the order in which they first appear."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return torch.from_numpy(rank[inverse]).double()


class Arrow:
    """pyarrow: read all columns, dictionary_encode the ids."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self, batch: int) -> None:
        """Forget the last table."""
        self.encoded: list[pa.ChunkedArray] = []

    def run(self) -> None:
        """Read and encode."""
        table = pq.read_table(self.path)
        self.encoded = [table[name].dictionary_encode() for name in IDS]

    def outputs(self) -> Iterable[Tensor]:
        """Codes of each id column."""
        for column in self.encoded:
            yield by_first_appearance(column.unify_dictionaries().combine_chunks().indices.to_numpy().astype(np.int64))


class Counting:
    """Ours, first pass: read, check, count every id."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent / "counts"
        self.executor = ThreadPoolExecutor(torch.get_num_threads())

    def prepare(self, batch: int) -> None:
        """Nothing."""

    def run(self) -> None:
        """Read and count."""
        source = ColumnsSource(self.path, SCHEMA)
        with CounterPool(self.folder, memory_bytes=4 << 30, executor=self.executor) as counters:
            for name in IDS:
                counters.declare(name, source.key_kinds[name])
            for chunk in source.chunks():
                counters.add({name: [column_of(chunk.keys, name)] for name in IDS})
            self.build(counters)

    def build(self, counters: CounterPool) -> None:
        """What follows counting; not part of the pass."""

    def outputs(self) -> Iterable[Tensor]:
        """Counting has none to compare; the encoding cell compares what it leads to."""
        return ()


class Encoding(Counting):
    """Ours, second pass: read, check, transform, look every id up in its vocabulary."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        super().run()
        paths = {name: path.parent / name for name in IDS}
        self.tables = EncoderPool(paths, path.parent / "encode", memory_bytes=4 << 30)

    def build(self, counters: CounterPool) -> None:
        """Writes the vocabularies."""
        for name in IDS:
            counters.build(name, self.path.parent / name, self.path.parent / f"{name}.counts")

    def run(self) -> None:
        """Read and encode."""
        transforms = [Transform("identity")] * len(SCHEMA.dense)
        encode = RowEncoder(SCHEMA, transforms, {name: self.tables[name] for name in IDS}, self.executor)
        self.encoded = [encode(chunk)[1] for chunk in ColumnsSource(self.path, SCHEMA).chunks()]

    def outputs(self) -> Iterable[Tensor]:
        """Row numbers of each id column."""
        for name in IDS:
            yield by_first_appearance(np.concatenate([chunk[name] for chunk in self.encoded]).astype(np.int64))


class Nothing(Arrow):
    """pyarrow beside our counting, where there are no outputs to compare."""

    def outputs(self) -> Iterable[Tensor]:
        """None."""
        return ()


def parquet_cells(options: argparse.Namespace) -> Sequence[bench.Cell]:
    """Both passes against the same peer."""
    folder = tempfile.TemporaryDirectory(prefix="hotrow-bench-")
    path = write_file(Path(folder.name), 200_000 if options.quick else 1_000_000)

    def no_limit(threads: int) -> None:
        # Keeps the folder as long as the cells: it goes with the last of them.
        assert folder.name
        return

    peer = "pyarrow read_table + dictionary_encode"
    return (
        bench.Cell(
            name="parquet.encode",
            peer=peer,
            limit_s=no_limit,
            build=lambda: (Encoding(path), Arrow(path)),
            target=ENCODE_TARGET,
        ),
        bench.Cell(name="parquet.count", peer=peer, limit_s=no_limit, build=lambda: (Counting(path), Nothing(path))),
    )


if __name__ == "__main__":
    run_as_script("parquet_encode", parquet_cells, __doc__)
