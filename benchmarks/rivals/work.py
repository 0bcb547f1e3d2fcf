"""What the sides of the study `memory` train: a DLRM and an endless stream of batches, the same for every side."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.locality.traces import open_accesses
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.inspect.accesses import Accesses
from hotrow.models.dlrm import DLRM
from hotrow.tables import TableConfig

NUM_DENSE = 13
BOTTOM_MLP, TOP_MLP = (512, 256, 64), (512, 256)
"""The MLPs of the reference DLRM on Criteo Kaggle."""
LR = 0.1
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model and its batches."""

    rows: tuple[int, ...]
    """Number of rows of each table."""
    embedding_dim: int
    batch_size: int
    zipf: float | None = None
    """Exponent of the ids' Zipf law in each table; None: the ids of `trace`."""
    trace: str | None = None
    """A packed dataset or a plain trace, which starts again when it ends."""
    bottom_mlp: tuple[int, ...] = BOTTOM_MLP
    top_mlp: tuple[int, ...] = TOP_MLP

    @property
    def table_bytes(self) -> int:
        """Bytes of the float32 weights; SGD has no state."""
        return 4 * sum(self.rows) * self.embedding_dim

    @property
    def tables(self) -> list[TableConfig]:
        """One table for each feature."""
        return [
            TableConfig(name=name, num_embeddings=n, embedding_dim=self.embedding_dim, feature_names=(name,))
            for name, n in zip(names_of(len(self.rows)), self.rows, strict=True)
        ]

    def batches(self, *, stream: int = 0) -> Iterator[Batch]:
        """Yields batches without end. Another stream draws other batches, except from a trace, which has only one."""
        ids = zipf_ids(self, stream) if self.trace is None else trace_ids(open_accesses(self.trace), self.batch_size)
        for number, columns in enumerate(ids):
            yield self._batch(columns, np.random.default_rng((SEED, 2 + 2 * stream, number)))

    def counts(self) -> Mapping[str, NDArray[np.float64]]:
        """Returns how often a step is expected to look up each row, by table."""
        return _Counts(self, None if self.trace is None else open_accesses(self.trace))

    def _batch(self, columns: Sequence[np.ndarray[Any, Any]], generator: np.random.Generator) -> Batch:
        lengths = None
        if any(len(column) != self.batch_size for column in columns):
            lengths = torch.from_numpy(np.concatenate([even_lengths(len(c), self.batch_size) for c in columns]))
        values = torch.from_numpy(np.concatenate(columns).astype(np.int64))
        dense = np.log1p(generator.exponential(5.0, (self.batch_size, NUM_DENSE))).astype(np.float32)
        label = (generator.random(self.batch_size) < 0.25).astype(np.float32)
        sparse = KeyedJaggedTensor(names_of(len(columns)), values, lengths=lengths)
        return Batch(dense=torch.from_numpy(dense), sparse=sparse, label=torch.from_numpy(label))


@dataclass(frozen=True)
class _Counts(Mapping[str, NDArray[np.float64]]):
    """Counts made on demand: those of all tables at once would be as large as a small model."""

    work: Work
    accesses: Accesses | None

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        t = names_of(len(self)).index(name)
        if self.accesses is None:
            return zipf_chances(self.work, t) * self.work.batch_size
        counts = np.zeros(self.work.rows[t])
        for ids in self.accesses.tables[t].batches(self.work.batch_size):
            counts += np.bincount(ids, minlength=len(counts))
        return counts * self.work.batch_size / self.accesses.num_samples

    def __iter__(self) -> Iterator[str]:
        return iter(names_of(len(self)))

    def __len__(self) -> int:
        return len(self.work.rows)


def names_of(num_tables: int) -> tuple[str, ...]:
    """Returns the names of the tables, which are also those of their features."""
    return tuple(f"C{i + 1}" for i in range(num_tables))


def zipf_ids(work: Work, stream: int) -> Iterator[list[np.ndarray[Any, Any]]]:
    """Yields each table's ids: id k has a probability of about (k + 1) ** -zipf (the continuous law, truncated)."""
    assert work.zipf is not None
    power = 1.0 - work.zipf
    for number in itertools.count():
        u = np.random.default_rng((SEED, 1 + 2 * stream, number)).random((len(work.rows), work.batch_size))
        yield [
            np.minimum((1 + row * ((n + 1.0) ** power - 1)) ** (1 / power) - 1, n - 1).astype(np.int64)
            for n, row in zip(work.rows, u, strict=True)
        ]


def zipf_chances(work: Work, table: int) -> NDArray[np.float64]:
    """Returns the probability of each id of a table under `zipf_ids`."""
    assert work.zipf is not None
    power, n = 1.0 - work.zipf, work.rows[table]
    below: NDArray[np.float64] = (np.arange(1, n + 2, dtype=np.float64) ** power - 1) / ((n + 1.0) ** power - 1)
    return np.diff(below)


def trace_ids(accesses: Accesses, batch_size: int) -> Iterator[list[np.ndarray[Any, Any]]]:
    """Yields each table's ids as recorded, in whole batches, and starts again at the end."""
    while True:
        yield from itertools.islice(
            zip(*(table.batches(batch_size) for table in accesses.tables), strict=False),
            max(1, accesses.num_samples // batch_size),
        )


def even_lengths(num_ids: int, num_bags: int) -> np.ndarray[Any, Any]:
    """Returns lengths of bags that share the ids evenly: the rows of a batch are real, their samples are not."""
    return num_ids // num_bags + (np.arange(num_bags) < num_ids % num_bags)


def trace_rows(path: str) -> tuple[int, ...]:
    """Returns the number of rows of each table of a packed dataset or trace."""
    return tuple(table.num_embeddings for table in open_accesses(path).tables)


@contextmanager
def shared_batches(batches: Sequence[Batch]) -> Iterator[str]:
    """Yields the path of a file in memory with the batches, for other processes to read inside the block; Linux only.

    Its memory counts in this process's memory group, not in that of a reader.
    """
    tensors: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        tensors |= {f"dense{number}": batch.dense, f"label{number}": batch.label}
        tensors[f"values{number}"] = batch.sparse.values
        if not batch.sparse.one_hot:
            tensors[f"offsets{number}"] = batch.sparse.offsets
    with os.fdopen(os.memfd_create("batches"), "wb") as file:
        file.write(save(tensors))
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def read_batches(path: str, work: Work) -> Iterator[Batch]:
    """Yields the batches of `shared_batches`, without copying them."""
    with safe_open(path, "pt") as file:
        known = set(file.keys())
        for number in itertools.count():
            if f"values{number}" not in known:
                return
            name = f"offsets{number}"
            offsets = file.get_tensor(name) if name in known else None
            values = file.get_tensor(f"values{number}")
            sparse = KeyedJaggedTensor(names_of(len(work.rows)), values, offsets=offsets)
            yield Batch(dense=file.get_tensor(f"dense{number}"), sparse=sparse, label=file.get_tensor(f"label{number}"))


class Training:
    """The dense layers, initialized from a fixed seed, and the training step."""

    def __init__(self, work: Work) -> None:
        self.model = DLRM(
            num_dense=NUM_DENSE,
            num_features=len(work.rows),
            embedding_dim=work.embedding_dim,
            bottom_mlp=work.bottom_mlp,
            top_mlp=work.top_mlp,
            first_order=False,
            generator=torch.Generator().manual_seed(SEED),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, fused=True)

    def step(
        self, look_up: Callable[[KeyedJaggedTensor], Tensor], tables: torch.optim.Optimizer, batch: Batch
    ) -> Tensor:
        """Runs forward, backward and both optimizers; returns the loss."""
        loss = binary_cross_entropy_with_logits(self.model(batch.dense, look_up(batch.sparse)), batch.label)
        self.optimizer.zero_grad()
        tables.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        tables.step()
        return loss.detach()
