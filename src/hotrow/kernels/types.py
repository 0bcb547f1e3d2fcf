"""What kernels and their callers share: rules, layouts, storage of rows, and what ranks sum, as plain values.

Nothing here computes an op: `reference` says what each op computes, `ops` runs it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.tables import Pooling, TableConfig

Algorithm = Literal["sgd", "adagrad", "row_wise_adagrad", "adam", "ftrl"]
Activation = Literal["relu", "linear"]
Numbers = NDArray[np.int64]
ALGORITHMS: tuple[Algorithm, ...] = ("sgd", "adagrad", "row_wise_adagrad", "adam", "ftrl")
NUM_STATES: dict[Algorithm, int] = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 1, "adam": 2, "ftrl": 2}
"""Number of state arrays by algorithm: of the weights' shape [N, D], or [N] for "row_wise_adagrad"."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What an optimizer does to a row of one table; each number is rounded to float32 when it is used."""

    algorithm: Algorithm
    lr: float
    """Learning rate; for "adam" it includes the bias correction of the step."""
    eps: float = 0.0
    """For "adagrad", "row_wise_adagrad" and "adam"."""
    beta1: float = 0.0
    beta2: float = 0.0
    """Both betas: for "adam"."""
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    """The three: for "ftrl" alone, whose published algorithm has both penalties; no other one shrinks rows."""

    @functools.cached_property
    def numbers(self) -> tuple[float, ...]:
        """The rule as kernels take it: index of the algorithm, then the rest; 1 - beta is computed before rounding."""
        betas = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        return ALGORITHMS.index(self.algorithm), self.lr, self.eps, *betas, self.beta, self.l1, self.l2


class Drop(NamedTuple):
    """What one dropout of a network drops in one step: a function of these numbers, by `reference.kept`."""

    seed: int
    place: int
    """Of the dropout in its network."""
    step: int
    sample: int
    """Number of the first sample in the batch of all ranks."""
    limit: int
    """An element whose number of 16 bits is below it is dropped."""
    scale: float
    """Of what is kept."""


@dataclass(frozen=True)
class Feature:
    """One feature of a collection: the table that it reads and the output columns that it fills."""

    name: str
    table: int
    columns: slice
    pooling: Pooling


@dataclass(frozen=True)
class Layout:
    """The fixed part of a lookup: table and output columns of each feature, in the order of the tables."""

    features: tuple[Feature, ...]
    width: int
    """Columns of the pooled output: the sum of the features' dims."""

    @staticmethod
    def of(tables: Iterable[TableConfig]) -> Layout:
        """Returns the layout of `tables`: features in the tables' order, side by side."""
        features: list[Feature] = []
        width = 0
        for t, table in enumerate(tables):
            for name in table.feature_names:
                features.append(Feature(name, t, slice(width, width + table.embedding_dim), table.pooling))
                width += table.embedding_dim
        return Layout(tuple(features), width)

    def check_keys(self, keys: tuple[str, ...]) -> None:
        """Raises ValueError naming a feature that is missing among the keys of a batch."""
        for feature in self.features:
            if feature.name not in keys:
                raise ValueError(
                    f"feature {feature.name!r} is missing from the batch, whose keys are {', '.join(keys) or '-'}; "
                    "every feature of the tables must be among them (other keys are for other collections)"
                )

    def sequence_of(self, name: str) -> Layout:
        """Returns the layout of a lookup [L, D] of feature `name` alone, whose bags are its single ids."""
        (feature,) = (f for f in self.features if f.name == name)
        dim = feature.columns.stop - feature.columns.start
        return Layout((replace(feature, columns=slice(0, dim), pooling="sum"),), dim)


def widen(weight: Tensor, low: Tensor | None = None) -> Tensor:
    """Returns stored weights as exact float32; bfloat16 is joined with its lower halves `low` (int16). Without `low`,
    bfloat16 is read as lookups read it: the lower 16 bits are 0."""
    if low is None:
        return weight.float()
    return (weight.view(torch.int16).int() << 16 | low.int() & 0xFFFF).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 into upper halves (bfloat16 by truncation) and lower halves (int16); `widen` joins them."""
    bits = x.contiguous().view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def to_float16(x: Tensor) -> Tensor:
    """Rounds to nearest, ties to even, from 65520 up to infinity; NaN becomes quiet, with sign and leading payload."""
    bits = x.contiguous().view(torch.int32)
    nan = (bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF).to(torch.int16)
    return torch.where(x.isnan(), nan, x.half().view(torch.int16)).view(torch.float16)


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `values` as rows of `dtype` hold them: float32 becomes float16 by `to_float16`."""
    return to_float16(values) if dtype == torch.float16 and values.dtype != dtype else values


def write_rows(weight: Tensor, low: Tensor | None, rows: Tensor | slice, x: Tensor) -> None:
    """Writes the float32 `x` to `rows` of a table in the table's dtype."""
    if low is not None:
        weight[rows], low[rows] = split(x)
    else:
        weight[rows] = to_float16(x) if weight.dtype == torch.float16 else x


@dataclass(frozen=True)
class BadId:
    """The first id of a batch that is not a row of its table; `position` counts within the bag."""

    feature: Feature
    sample: int
    position: int
    id: int

    def text(self, num_embeddings: int) -> str:
        return (
            f"feature {self.feature.name!r}, sample {self.sample}, position {self.position}: id {self.id} is outside "
            f"its table of {num_embeddings} rows; ids must be in [0, {num_embeddings}): raise num_embeddings or "
            "map unknown ids to a row of their own"
        )


def first_bad_id(layout: Layout, weights: Sequence[Tensor], sparse: KeyedJaggedTensor) -> BadId | None:
    """Returns the first id outside [0, N) in the order (feature, sample, position), or None."""
    for feature in layout.features:
        values, offsets, _ = sparse.bags(feature.name)
        bad = ((values < 0) | (values >= weights[feature.table].shape[0])).nonzero()
        if bad.numel():
            at = int(bad[0])
            sample = int(torch.searchsorted(offsets, at, right=True)) - 1
            return BadId(feature, sample, at - int(offsets[sample]), int(values[at]))
    return None


class RowSums(NamedTuple):
    """The summed gradients of those rows of a table that were looked up."""

    rows: Tensor
    """int64 [n], rising; slots, if the batch holds slots."""
    sums: Tensor
    """float32 [n, D]."""


class FlatSums(NamedTuple):
    """The `RowSums` of all tables, one behind another."""

    counts: Sequence[int]
    """Number of rows by table."""
    rows: Tensor
    """int64 [n]."""
    sums: Tensor
    """float32, 1-dim."""

    @classmethod
    def of(cls, tables: Sequence[RowSums]) -> FlatSums:
        rows, sums = [own.rows for own in tables], [own.sums.reshape(-1) for own in tables]
        return cls([*map(len, rows)], torch.cat(rows), torch.cat(sums))

    def tables(self, dims: Sequence[int]) -> list[RowSums]:
        """Returns those of each table, as views. dims: by table."""
        rows = torch.split(self.rows, list(self.counts))
        sums = torch.split(self.sums, [n * dim for n, dim in zip(self.counts, dims, strict=True)])
        return [RowSums(own, g.view(len(own), dim)) for own, g, dim in zip(rows, sums, dims, strict=True)]


Pending = Iterable[tuple[Layout, KeyedJaggedTensor, Tensor]]


def count_parts(batches: Iterable[KeyedJaggedTensor]) -> int:
    """Returns into how many micro-batches all of `batches` are cut. Raises ValueError if they differ."""
    counts = {1 if sparse.parts is None else len(sparse.parts) - 1 for sparse in batches}
    if len(counts) > 1:
        raise ValueError(
            f"the lookups of one step are cut into {' and '.join(map(str, sorted(counts)))} micro-batches; cut their "
            "batches alike (KeyedJaggedTensor.in_parts)"
        )
    return counts.pop() if counts else 1


@dataclass(frozen=True)
class Shares:
    """How ranks share the rows of tables. Each holds some, which it numbers by rising row: those of its shard."""

    prefix: Sequence[int]
    """By table: rows below it lie on every rank."""
    owner: Sequence[int]
    """By table, the rank that holds all other rows; -1: row prefix + k lies on rank k mod num_ranks."""
    rank: int
    num_ranks: int


class Distinct(NamedTuple):
    """The distinct rows of a batch, by table and by group: group 0 lies on this rank, group 1 + r on rank r instead."""

    counts: Numbers
    """By table and group: [T, 1 + R]."""
    rows: Numbers
    """Table by table, in each group by group, rising: [n]."""
    local: Numbers
    """The number of each in the shard of the rank that holds it: [n]."""
    places: Numbers
    """For each id, span after span: the place of its row among the table's."""


Taken = Literal["all", "below_prefix", "from_prefix"]
"""Which rows of a message of sums: all, those below the prefix of their table, or the others."""
TAKEN: tuple[Taken, ...] = ("all", "below_prefix", "from_prefix")


class ComingSums(NamedTuple):
    """A message of sums of rows: of each node the rows' keys, then of each node their sums, table by table."""

    words: Tensor
    """int32 [n]."""
    num_nodes: int
    taken: Taken = "all"


class Pieces(NamedTuple):
    """Rows of sums, table by table, and in each table piece by piece: a piece is a node of a message."""

    counts: Numbers
    """Number of rows by table and piece: [T, P]."""
    starts: Numbers
    """Likewise, where their sums begin among the words of their message."""
    rows: Numbers
    """[n]."""


class SentSums(NamedTuple):
    """Sums of rows as ranks sent them, for one update of all tables."""

    slots: Tensor
    """Of the rows of `pieces`, int32 or int64."""
    pieces: Pieces
    leaves: Sequence[int]
    """By piece, its first micro-batch; rising."""
    messages: Sequence[Tensor]
    """By piece, its message."""
    num_parts: int
    """Number of micro-batches."""

    def lookups(self, layout: Layout) -> list[tuple[Layout, KeyedJaggedTensor, Tensor]]:
        """Returns the same as lookups of bags of one row: of each table, of a layout of one feature each, by piece."""
        found, first = list[tuple[Layout, KeyedJaggedTensor, Tensor]](), 0
        for t, feature in enumerate(layout.features):
            own, dim = layout.sequence_of(feature.name), feature.columns.stop - feature.columns.start
            for leaf, words, start, n in zip(
                self.leaves, self.messages, self.pieces.starts[t], self.pieces.counts[t], strict=True
            ):
                parts = [0] * (leaf + 1) + [int(n)] * (self.num_parts - leaf)
                bags = KeyedJaggedTensor.of_rows(feature.name, self.slots[first : first + n], parts)
                found.append((own, bags, words[start : start + n * dim].view(torch.float32).view(-1, dim)))
                first += int(n)
        return found


def row_key(seed: int, table: str) -> int:
    """The 64-bit Philox key of a table: the 8-byte BLAKE2b digest of "<seed>:<table name>", little-endian."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{table}".encode(), digest_size=8).digest(), "little")
