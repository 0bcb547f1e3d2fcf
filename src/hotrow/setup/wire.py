"""What a table sends between ranks in a step, by how often its rows are looked up: shards.py chooses owners by it.

With R ranks, a row that p of them look up in a step, each in its samples, and q of all of them together (0 to 1),
sends, over all ranks,

    held by one rank    its number and its weights to each other rank that looks it up, and back a number and a sum
    replicated          a sum from each rank to the row's home, and from there the total to all others

which is (R - 1) p (2 ids + weights + sum) and (R - 1) (p + q) (id + sum). q is never below p, so copies never save
bytes. A row that every rank looks up at every step has p = q = 1: there they cost none, and no lookup waits for it.

A rank that holds a table whole can also get the ids of B bags, L each, and send a pooled vector for each: with its
gradient that is (R - 1) / R B (L ids + 2 vectors), whatever the rows are. If ranks share the table's columns, each of
them gets the ids, and the vectors are cut.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.kernels.keys import GAP_BYTES, LARGE_GAP, LARGE_GAP_BYTES
from hotrow.parallel.messages import WIRE_TYPES, WireDtype, row_type
from hotrow.parallel.pooled import bytes_of_bag_heads, bytes_of_bags
from hotrow.tables import TableConfig

Floats = NDArray[np.float64]


class Accesses(NamedTuple):
    """How often rows of a table are looked up."""

    rates: Floats
    """Times per step of all samples, falling."""
    rows: Floats
    """How many rows have each rate."""
    num_steps: float | None
    """Steps of an epoch, among which each row's accesses are spread; if None, accesses are independent."""

    def chances(self, share: float) -> Floats:
        """Returns the chance of a row of each rate to be looked up in this share of a batch."""
        if self.num_steps is None:
            return -np.expm1(-self.rates * share)
        rest = math.log1p(-min(share / self.num_steps, 1 - 1e-12))
        return -np.expm1(self.rates * self.num_steps * rest)

    def distinct(self, share: float, num_ranks: int) -> Distinct:
        chance, apart = self.chances(share), np.exp(-LARGE_GAP * self.chances(share))
        # Rows that nobody looks up lie behind all others: on each rank the next table's first row is far from the last.
        unused = num_ranks * (float(self.rows[chance == 0].sum()) / num_ranks > LARGE_GAP)
        return Distinct(float(self.rows @ chance), float(self.rows @ (chance * apart)) + unused)


class Distinct(NamedTuple):
    """Expected different rows of one table in a share of a batch."""

    split: float
    """How many there are, of which one rank holds each."""
    large_gaps: float = 0.0
    """How many of them lie LARGE_GAP rows or more behind the one before them."""


class Bytes(NamedTuple):
    """What values of one table take on the wire."""

    row: int
    """A row's weights."""
    sum: int
    """A gradient, or a pooled vector."""

    @classmethod
    def of(cls, table: TableConfig, wire_dtype: WireDtype = "fp32") -> Bytes:
        row = row_type(getattr(torch, table.dtype), wire_dtype)
        return cls(table.embedding_dim * row.itemsize, table.embedding_dim * WIRE_TYPES[wire_dtype].itemsize)


class Wire(NamedTuple):
    """What one table sends in a step, over all ranks."""

    split_bytes: float
    """If each row is held by one rank."""
    replicated_bytes: float
    """If every rank holds all rows."""
    rows: float
    """Different rows that all ranks together look up."""
    pooled_bytes: float
    """If one rank holds all rows and pools them."""
    owner_bytes: float
    """What each further rank adds that shares the columns and pools its own."""
    lookups: float
    """Ids that all ranks together look up."""

    @classmethod
    def of(
        cls,
        table: TableConfig,
        batch_size: int,
        num_ranks: int,
        *,
        of_one: Distinct,
        of_all: Distinct,
        lookups: float,
        jagged: bool = False,
        wire_dtype: WireDtype = "fp32",
    ) -> Wire:
        """Returns what ranks send that hold a micro-batch each. of_one, of_all: the different rows that one of them
        looks up, and all together. jagged: bags differ in length."""
        own, others = Bytes.of(table, wire_dtype), num_ranks - 1
        num_bags = batch_size * len(table.feature_names)
        # Of all bags of a step, if none of them is pooled where its sample is; each rank sends a head before its own.
        head_bytes, vector_bytes = float(bytes_of_bag_heads(len(table.feature_names))), own.sum * num_bags
        id_bytes = bytes_of_bags(table, lookups, num_bags, jagged=jagged)
        large_bytes = 2 * LARGE_GAP_BYTES * of_one.large_gaps
        return cls(
            split_bytes=others * (of_one.split * (2 * GAP_BYTES + own.row + own.sum) + large_bytes),
            replicated_bytes=others * (of_one.split + of_all.split) * (GAP_BYTES + own.sum),
            rows=of_all.split,
            pooled_bytes=others * (head_bytes + (id_bytes + 2 * vector_bytes) / num_ranks),
            owner_bytes=others * (head_bytes + id_bytes / num_ranks),
            lookups=lookups,
        )
