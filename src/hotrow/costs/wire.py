"""What ranks that share a model send each other in a step, and what a step asks of each of them: counted, not timed.

    Work of all samples, who holds which rows  --share_of-->  Work of one rank's samples, and what sharing adds: Shared

What parallel/ sends is counted here, by the purposes of `ExchangeCounts.sent_bytes`, with the functions that stand
beside the code that sends it; cost.py says what it takes. With R ranks, a row that p of them look up in a step, each in
its samples, and q of all of them together (0 to 1), sends, over all ranks,

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.costs.work import TableWork, Work
from hotrow.kernels import tree
from hotrow.kernels.keys import GAP_BYTES, LARGE_GAP, LARGE_GAP_BYTES
from hotrow.kernels.keys import HEAD_BYTES as KEYS_HEAD_BYTES
from hotrow.parallel.communicator import COUNT_BYTES
from hotrow.parallel.dense import bytes_of_heads
from hotrow.parallel.messages import WIRE_TYPES, WireDtype, bytes_of_gaps, row_type
from hotrow.parallel.pooled import bytes_of_bag_heads, bytes_of_bags
from hotrow.parallel.ranks import TransportName
from hotrow.parallel.sharded import REQUEST_HEAD_BYTES, SMALL_BYTES
from hotrow.parallel.shards import Shard
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

    @classmethod
    def of(cls, own: TableWork) -> Accesses:
        return cls(*own.by_rate(), None if own.counted is None else own.num_steps)

    def chances(self, share: float) -> Floats:
        """Returns the chance of a row of each rate to be looked up in this share of a batch."""
        if self.num_steps is None:
            return -np.expm1(-self.rates * share)
        rest = math.log1p(-min(share / self.num_steps, 1 - 1e-12))
        return -np.expm1(self.rates * self.num_steps * rest)

    def distinct(self, share: float, num_ranks: int, prefix: int = 0) -> Distinct:
        """Returns the different rows in this share of a batch. prefix: how many of the rows are replicated."""
        chance = self.chances(share)
        common = np.clip(prefix - (self.rows.cumsum() - self.rows), 0.0, self.rows)
        rest = self.rows - common
        apart = np.exp(-LARGE_GAP * chance)
        # Rows that nobody looks up lie behind all others: on each rank the next table's first row is far from the last.
        unused = num_ranks * (float(rest[chance == 0].sum()) / num_ranks > LARGE_GAP)
        return Distinct(float(rest @ chance), float(common @ chance), float(rest @ (chance * apart)) + unused)


class Distinct(NamedTuple):
    """Expected different rows of one table in a share of a batch."""

    split: float
    """One rank holds each of them."""
    replicated: float = 0.0
    large_gaps: float = 0.0
    """How many of the split ones lie LARGE_GAP rows or more behind the one before them."""


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
        bags = _Bags.of(table, batch_size, lookups, wire_dtype, jagged=jagged)
        large_bytes = 2 * LARGE_GAP_BYTES * of_one.large_gaps
        return cls(
            split_bytes=others * (of_one.split * (2 * GAP_BYTES + own.row + own.sum) + large_bytes),
            replicated_bytes=others * (of_one.split + of_all.split) * (GAP_BYTES + own.sum),
            rows=of_all.split,
            pooled_bytes=others * (bags.head_bytes + (bags.id_bytes + 2 * bags.vector_bytes) / num_ranks),
            owner_bytes=others * (bags.head_bytes + bags.id_bytes / num_ranks),
            lookups=lookups,
        )


class _Bags(NamedTuple):
    """Bytes of all bags of a step in one table, if none of them is pooled where its sample is."""

    head_bytes: float
    """What each rank that sends bags sends before them."""
    id_bytes: float
    vector_bytes: float
    """One way."""

    @classmethod
    def of(cls, table: TableConfig, batch_size: int, lookups: float, wire_dtype: WireDtype, *, jagged: bool) -> _Bags:
        num_features, own = len(table.feature_names), Bytes.of(table, wire_dtype)
        num_bags = batch_size * num_features
        ids = bytes_of_bags(table, lookups, num_bags, jagged=jagged)
        return cls(float(bytes_of_bag_heads(num_features)), ids, own.sum * num_bags)


def wire_of_table(
    table: TableConfig,
    accesses: Accesses,
    batch_size: int,
    num_ranks: int,
    *,
    jagged: bool = False,
    wire_dtype: WireDtype = "fp32",
) -> Wire:
    """Returns what a table is expected to send in a step of ranks that hold a micro-batch each."""
    of_all, of_one = (accesses.distinct(share, num_ranks) for share in (1.0, 1 / num_ranks))
    return Wire.of(
        table,
        batch_size,
        num_ranks,
        of_one=of_one,
        of_all=of_all,
        lookups=float(accesses.rates @ accesses.rows),
        jagged=jagged,
        wire_dtype=wire_dtype,
    )


def wire_of_work(own: TableWork, batch_size: int, num_ranks: int, *, wire_dtype: WireDtype = "fp32") -> Wire:
    """Returns the same of a table in a step of `batch_size` samples."""
    return wire_of_table(own.table, Accesses.of(own), batch_size, num_ranks, jagged=own.jagged, wire_dtype=wire_dtype)


# ---- a rank's share of a step


class Event(NamedTuple):
    """What a rank does at one moment of a step. tests/laws/test_wire.py compares their order with real steps."""

    phase: str
    kind: Literal["send", "wait", "work"]
    """What was sent travels until the rank waits for it; other messages follow on the same link."""
    name: str
    """What is sent and waited for, or which work is done; cost.py knows how long that takes."""
    sent_bytes: Mapping[str, float] = {}
    """By purpose, as `ExchangeCounts.sent_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What sharing adds to a step of one rank, the mean of all."""

    num_ranks: int
    local_size: int
    """Ranks on a machine, which share its cores and its link."""
    held: Work
    """What the samples of all ranks ask of the rows that the rank holds: what its tiers move."""
    events: Sequence[Event]
    amounts: Mapping[str, dict[str, float]]
    """What the processor does beside an unshared step: in its lookup, and in all that follows."""
    transport: TransportName | None = None
    """Over which the ranks exchange messages; None if that is not known."""

    @property
    def by_purpose(self) -> dict[str, float]:
        """Bytes that a rank sends in a step."""
        found: dict[str, float] = {}
        for event in self.events:
            for purpose, num_bytes in event.sent_bytes.items():
                found[purpose] = found.get(purpose, 0.0) + num_bytes
        return found


def share_of(
    work: Work,
    held: Work,
    shards: Mapping[str, Shard],
    *,
    num_ranks: int,
    micro_batches: int,
    local_size: int = 1,
    announced: bool = False,
    wire_dtype: WireDtype = "fp32",
    transport: TransportName | None = None,
) -> tuple[Work, Shared]:
    """Returns the work of the rank that has most samples of a step, and what sharing adds to it.

    work: of all samples, on whole tables. held: on what one rank holds of them. announced: ranks look ahead, because
    rows of some lie in tiers, so they ask for rows before the step that needs them.
    """
    spans = [tree.held(micro_batches, rank, num_ranks) for rank in range(num_ranks)]
    shares = [(hi - lo) / micro_batches for lo, hi in spans]
    nodes = [[size / micro_batches for _, size in tree.aligned(*span)] for span in spans]
    most = max(hi - lo for lo, hi in spans)
    own = _part_of(work, most / micro_batches, most)
    found = _Counted(work, shards, shares, nodes, wire_dtype)
    shared = Shared(
        num_ranks=num_ranks,
        local_size=local_size,
        held=held,
        events=_events(work, found, announced=announced),
        amounts=sharing_amounts(own, shards, num_ranks=num_ranks, num_nodes=found.num_nodes),
        transport=transport,
    )
    return own, shared


def _events(work: Work, found: _Counted, *, announced: bool) -> list[Event]:
    """Returns a rank's step, the mean of all ranks."""
    others, away, num_nodes = found.num_ranks - 1, found.away, found.num_nodes
    counts = float(COUNT_BYTES * others)
    rows, sums, totals, bags = found.rows, found.sums, found.totals, found.bags

    def exchange(phase: str, name: str, sent: dict[str, float]) -> list[Event]:
        return [Event(phase, "send", name, sent | {"counts": counts}), Event(phase, "wait", name)]

    ids = away * rows.key_bytes + others * REQUEST_HEAD_BYTES + others / found.num_ranks * bags.head_bytes
    events = exchange("data" if announced else "lookup", "ids", {"ids": ids + bags.id_bytes})
    come = exchange("lookup", "rows", {"rows": away * rows.row_bytes}) if found.rows_travel or not found.pools else []
    pooled = exchange("lookup", "pooled", {"pooled": bags.vector_bytes}) if found.pools else []
    events += [*come[:1], *pooled[:1], *come[1:], *pooled[1:]]
    # parallel/dense.py: slices travel while the sums of rows are made, and totals while rows are updated. Two ranks
    # send each other whole gradients.
    two = found.num_ranks == 2
    heads = others * bytes_of_heads(num_nodes)
    slices = {"dense": heads + (1 if two else away) * 4 * work.num_weights * num_nodes, "counts": counts}
    events.append(Event("dense", "send", "slices", slices))
    if found.pools:
        gradients = {"pooled_gradients": bags.gradient_bytes, "counts": counts}
        events.append(Event("dense", "send", "pooled_gradients", gradients))
    events.append(Event("dense", "work", "sums"))
    if found.sums_travel:
        keys = away * sums.all_key_bytes + others * num_nodes * KEYS_HEAD_BYTES
        gradients = {"ids": keys, "gradients": away * sums.all_sum_bytes, "counts": counts}
        events.append(Event("dense", "send", "gradients", gradients))
    events.append(Event("dense", "wait", "slices"))
    if found.pools:
        events.append(Event("dense", "wait", "pooled_gradients"))
    if found.sums_travel:
        events.append(Event("dense", "wait", "gradients"))
    if not two:
        events.append(Event("dense", "send", "totals", {"dense": away * 4 * work.num_weights}))
    if found.copied:
        keys = away * totals.common_key_bytes + others * KEYS_HEAD_BYTES
        events += exchange("update", "replicated", {"ids": keys, "replicated": away * totals.common_sum_bytes})
    events.append(Event("update", "work", "rows"))
    return events if two else [*events, Event("update", "wait", "totals")]


def sharing_amounts(
    own: Work, shards: Mapping[str, Shard], *, num_ranks: int, num_nodes: float = 1.0, dense: bool = True
) -> dict[str, dict[str, float]]:
    """Returns what the processor of a rank does beside an unshared step of its samples, in its lookup and in all that
    follows. own: that step. dense: dense layers are shared too.
    """
    pooled = [table for table in own.tables if shards[table.table.name].exchange == "pooled"]
    split = [table for table in own.tables if shards[table.table.name].exchange != "pooled"]
    values = sum(table.rows * table.table.embedding_dim for table in split)
    features = sum(len(shards[each.table.name].owners) * len(each.table.feature_names) for each in pooled)
    rows = {
        "shared steps": 1.0,
        "steps with others": float(num_ranks > 1),
        "shared tables": float(len(split)),
        "messages": float(num_ranks - 1),
        "messages of tables": float(len(split) * (num_ranks - 1)),
        "shared ids": sum(table.lookups for table in split),
        "shared rows": sum(table.rows for table in split),
        "shared values": values,
        "sent values": values * (num_ranks - 1) / num_ranks,
        "pooled features": float(features),
        "ids for owners": sum(len(shards[each.table.name].owners) * each.lookups for each in pooled),
        "values for owners": sum(
            float(own.batch_size * len(table.table.feature_names) * table.table.embedding_dim) for table in pooled
        ),
    }
    weights = {"shared tensors": num_nodes * own.num_tensors, "shared weights": num_nodes * own.num_weights}
    # Small sums of all ranks are put together; of large ones an update looks up each rank's by themselves.
    lookups = num_ranks if 4 * values > SMALL_BYTES * num_ranks * len(split) else 1
    update = {**rows, "shared tables": float(lookups * len(split)), "messages of tables": 0.0}
    return {"lookup": rows, "update": update | (weights if dense else {})}


class _Rows(NamedTuple):
    """Bytes of messages about rows that one rank makes, if it holds none of them; the mean over ranks."""

    key_bytes: float
    """The numbers of split rows."""
    row_bytes: float
    """Their weights."""
    all_key_bytes: float
    """The numbers of split and replicated rows."""
    all_sum_bytes: float
    common_key_bytes: float
    """The numbers of replicated rows."""
    common_sum_bytes: float


class _Pooled(NamedTuple):
    """Bytes about pooled vectors that one rank sends; the mean over ranks."""

    head_bytes: float
    """To all ranks."""
    id_bytes: float
    vector_bytes: float
    gradient_bytes: float


class _Counted:
    """The different rows of all tables in shares of a batch, and the bags that owners pool.

    shares: of a batch, by rank. nodes: by rank, the shares of its aligned subtrees of micro-batches.
    """

    def __init__(
        self,
        work: Work,
        shards: Mapping[str, Shard],
        shares: Sequence[float],
        nodes: Sequence[Sequence[float]],
        wire_dtype: WireDtype,
    ) -> None:
        self.num_ranks, self.num_nodes = len(shares), sum(map(len, nodes)) / len(shares)
        self.away = (self.num_ranks - 1) / self.num_ranks
        self.copied = any(shard.prefix for shard in shards.values())
        self._tables: list[tuple[Bytes, Accesses, int]] = []
        self._known: dict[float, Any] = {}
        bags = np.zeros(len(_Pooled._fields))
        self.pools = False
        for own in work.tables:
            shard = shards[own.table.name]
            if shard.exchange != "pooled":
                self._tables.append((Bytes.of(own.table, wire_dtype), Accesses.of(own), shard.prefix))
                continue
            self.pools = True
            each = _Bags.of(own.table, work.batch_size, own.lookups, wire_dtype, jagged=own.jagged)
            for owner in shard.owners:
                away = (1.0 - shares[owner]) / self.num_ranks  # the others send and get these bags
                vectors = away * each.vector_bytes * shard.width(own.table.embedding_dim, owner)
                bags += [each.head_bytes, away * each.id_bytes, vectors, vectors]
        # What no rank needs is not exchanged: see parallel/sharded.py.
        rows = [own.table for own in work.tables if shards[own.table.name].exchange == "rows"]
        self.rows_travel = any(shards[table.name].prefix < table.num_embeddings for table in rows)
        self.sums_travel = bool(rows)
        self.bags = _Pooled(*bags.tolist())
        self.rows = self._mean(shares)
        self.sums = self._mean([share for each in nodes for share in each])
        self.totals = self._mean([1.0], of=1)

    def _mean(self, shares: Sequence[float], *, of: int | None = None) -> _Rows:
        """Returns the sum over `shares`, divided by `of`, the number of ranks if it is None."""
        total = np.sum([self._of(share) for share in shares], axis=0)
        return _Rows(*(total / (of or self.num_ranks)).tolist())

    def _of(self, share: float) -> Floats:
        if share not in self._known:
            total = np.zeros(len(_Rows._fields))
            for each, accesses, prefix in self._tables:
                rows = accesses.distinct(share, self.num_ranks, prefix)
                keys, common = bytes_of_gaps(rows.split, rows.large_gaps), bytes_of_gaps(rows.replicated)
                both = each.sum * (rows.split + rows.replicated)
                total += [keys, rows.split * each.row, keys + common, both, common, each.sum * rows.replicated]
            self._known[share] = total
        return self._known[share]  # type: ignore[no-any-return]


def _part_of(work: Work, share: float, parts: int) -> Work:
    """Returns the work of this share of the samples, in `parts` micro-batches."""

    def samples(count: int) -> int:
        return max(1, round(count * share / parts))

    tables = []
    for own in work.tables:
        accesses = Accesses.of(own)
        rates = tuple((rate * share, rows, first * share) for rate, rows, first in own.rates)
        distinct = accesses.distinct(share, 1).split
        tables.append(replace(own, lookups=own.lookups * share, rows=distinct, rates=rates))
    num = len(work.products)
    return replace(
        work,
        batch_size=max(1, round(work.batch_size * share)),
        tables=tuple(tables),
        products=tuple((samples(n), i, o) for _ in range(parts) for n, i, o in work.products),
        constant_inputs=tuple(k + part * num for part in range(parts) for k in work.constant_inputs),
        pairs=tuple((samples(n), v, d) for _ in range(parts) for n, v, d in work.pairs),
        num_calls=work.num_calls * parts,
        call_values=work.call_values * share,
        gathered_samples=work.gathered_samples * share,
        verified_samples=work.verified_samples * share,
    )
