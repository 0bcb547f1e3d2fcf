"""What ranks that share a model send each other in a step, and what a step asks of each of them: counted, not timed.

    Work of all samples, who holds which rows  --share_of-->  Work of one rank's samples, and what sharing adds: Shared

Everything that parallel/ sends is counted here, by the purposes of `World.sent_bytes`, and nowhere else; cost.py says
what it takes. With R ranks, a row that p of them look up in a step, each in its samples, and q of all of them together
(0 to 1), sends, over all ranks,

    held by one rank    its number and its weights to each other rank that looks it up, and back a number and a sum
    replicated          a sum from each rank to the row's home, and from there the total to all others

which is (R - 1) p (2 ids + weights + sum) and (R - 1) (p + q) (id + sum). q is never below p, so copies never save
bytes. A row that every rank looks up at every step has p = q = 1: there they cost none, and no lookup waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.kernels import tree
from hotrow.parallel.shards import Shard
from hotrow.plan.work import TableWork, Work
from hotrow.tables import BYTES_PER_WEIGHT, TableConfig

ID_BYTES, LARGE_BYTES, SUM_BYTES = 2, 8, 4
"""On the wire: of a row's number, the gap to the one before it; what a gap of LARGE_GAP rows takes beside; and of each
number in a sum. See parallel/exchange.py."""
LARGE_GAP = 0xFFFF
KEYS_HEAD_BYTES, REQUEST_HEAD_BYTES = 8, 12
"""Before the numbers of a message, and of one that asks for rows: parallel/exchange.py `pack`, sharded.py `_ask`."""
SUMS_HEAD_BYTES, NODE_HEAD_BYTES = 12, 12
"""Before the dense sums of a message, and for each subtree in it: parallel/dense.py."""
COUNT_BYTES = 16
"""That each exchange sends to each rank before its message: `World.exchange`."""
Floats = NDArray[np.float64]


class Accesses(NamedTuple):
    """How often rows of a table are looked up."""

    rates: Floats
    """Times per step of all samples, falling."""
    rows: Floats
    """How many rows have each rate."""
    num_steps: float | None
    """Steps of an epoch, among which each row's accesses are spread; None: accesses are independent."""

    @classmethod
    def of(cls, own: TableWork) -> Accesses:
        rates, rows = own.by_rate()
        order = np.argsort(-rates, kind="stable")
        return cls(rates[order], rows[order], None if own.counts is None else own.num_steps)

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
    """Held by one rank each."""
    replicated: float
    large_gaps: float
    """Of the split ones, how many lie LARGE_GAP rows or more behind the one before them."""


class Wire(NamedTuple):
    """What the rows of one table send in a step, over all ranks."""

    split_bytes: float
    """If each row is held by one rank."""
    replicated_bytes: float
    """If every rank holds all rows."""
    rows: float
    """Different rows that all ranks together look up."""


def wire_of_table(table: TableConfig, accesses: Accesses, num_ranks: int) -> Wire:
    """Returns what a table's rows send in a step of ranks that hold a micro-batch each."""
    of_all, of_one = (accesses.distinct(share, num_ranks) for share in (1.0, 1 / num_ranks))
    weights, total = table.embedding_dim * BYTES_PER_WEIGHT[table.dtype], SUM_BYTES * table.embedding_dim
    large_bytes = 2 * LARGE_BYTES * of_one.large_gaps
    return Wire(
        split_bytes=(num_ranks - 1) * (of_one.split * (2 * ID_BYTES + weights + total) + large_bytes),
        replicated_bytes=(num_ranks - 1) * (of_one.split + of_all.split) * (ID_BYTES + total),
        rows=of_all.split,
    )


# ---- a rank's share of a step


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What sharing adds to a step of one rank, the mean of all."""

    num_ranks: int
    local_size: int
    """Ranks on a machine, which share its cores and its link."""
    held: Work
    """What the samples of all ranks ask of the rows that the rank holds: what its tiers move."""
    sent_bytes: Mapping[str, Mapping[str, float]]
    """That a rank sends, by phase and, in it, by purpose, as `World.sent_bytes`."""
    exchanges: Mapping[str, int]
    """By phase: each sends every other rank two messages, its counts and what there is to say."""
    amounts: Mapping[str, dict[str, float]]
    """What the processor does beside an unshared step, by phase: cost.py knows the kinds."""

    @property
    def by_purpose(self) -> dict[str, float]:
        """Bytes that a rank sends in a step."""
        found: dict[str, float] = {}
        for own in self.sent_bytes.values():
            for purpose, num_bytes in own.items():
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
) -> tuple[Work, Shared]:
    """Returns the work of the rank that has most samples of a step, and what sharing adds to it.

    work: of all samples, on whole tables. held: on what one rank holds of them. announced: ranks look ahead, because
    rows of some lie in tiers, so they ask for rows before the step that needs them.
    """
    spans = [tree.held(micro_batches, rank, num_ranks) for rank in range(num_ranks)]
    nodes = [[size / micro_batches for _, size in tree.aligned(*span)] for span in spans]
    most = max(hi - lo for lo, hi in spans)
    own = _part_of(work, most / micro_batches, most)
    found = _Counted(work.tables, shards, num_ranks)
    rows = found.mean([(hi - lo) / micro_batches for lo, hi in spans])
    sums = found.mean([share for each in nodes for share in each], of=num_ranks)
    num_nodes = sum(map(len, nodes)) / num_ranks
    away, others = (num_ranks - 1) / num_ranks, num_ranks - 1
    ids = away * rows.key_bytes + others * REQUEST_HEAD_BYTES
    update = {
        "ids": away * sums.all_key_bytes + others * num_nodes * KEYS_HEAD_BYTES,
        "gradients": away * sums.all_sum_bytes,
    }
    copied = any(shard.prefix for shard in shards.values())
    if copied:
        totals = found.mean([1.0])
        update["ids"] += away * totals.common_key_bytes + others * KEYS_HEAD_BYTES
        update["replicated"] = away * totals.common_sum_bytes
    dense = {
        "dense": others * (SUMS_HEAD_BYTES + NODE_HEAD_BYTES * num_nodes)
        + away * 4 * work.num_weights * (num_nodes + 1)
    }
    exchanges = {"data": int(announced), "lookup": 2 - announced, "dense": 2, "update": 1 + copied}
    sent: dict[str, dict[str, float]] = {
        "data": {"ids": ids} if announced else {},
        "lookup": {"rows": away * rows.row_bytes} | ({} if announced else {"ids": ids}),
        "dense": dense,
        "update": update,
    }
    for phase, count in exchanges.items():
        sent[phase]["counts"] = float(COUNT_BYTES * others * count)
    shared = Shared(
        num_ranks=num_ranks,
        local_size=local_size,
        held=held,
        sent_bytes=sent,
        exchanges=exchanges,
        amounts=sharing_amounts(own, num_ranks=num_ranks, num_nodes=num_nodes),
    )
    return own, shared


def sharing_amounts(own: Work, *, num_ranks: int, num_nodes: float = 1.0) -> dict[str, dict[str, float]]:
    """Returns what the processor of a rank does beside an unshared step of its samples, by phase. own: that step."""
    values = sum(table.rows * table.table.embedding_dim for table in own.tables)
    rows = {
        "shared steps": 1.0,
        "shared tables": float(len(own.tables)),
        "messages of tables": float(len(own.tables) * (num_ranks - 1)),
        "shared ids": sum(table.lookups for table in own.tables),
        "shared rows": sum(table.rows for table in own.tables),
        "shared values": values,
        "sent values": values * (num_ranks - 1) / num_ranks,
    }
    weights = {"shared steps": 1.0, "shared tensors": num_nodes * own.num_tensors}
    return {"lookup": rows, "dense": {**weights, "shared weights": num_nodes * own.num_weights}, "update": rows}


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


class _Counted:
    """The different rows of all tables in shares of a batch."""

    def __init__(self, tables: Sequence[TableWork], shards: Mapping[str, Shard], num_ranks: int) -> None:
        self._tables = [(own, Accesses.of(own), shards[own.table.name].prefix) for own in tables]
        self._num_ranks = num_ranks
        self._known: dict[float, Any] = {}

    def mean(self, shares: Sequence[float], *, of: int | None = None) -> _Rows:
        """Returns the sum over `shares`, divided by `of`, their number if it is None."""
        total = np.sum([self._of(share) for share in shares], axis=0)
        return _Rows(*(total / (of or len(shares))).tolist())

    def _of(self, share: float) -> Floats:
        if share not in self._known:
            total = np.zeros(len(_Rows._fields))
            for own, accesses, prefix in self._tables:
                rows = accesses.distinct(share, self._num_ranks, prefix)
                keys = ID_BYTES * rows.split + LARGE_BYTES * rows.large_gaps
                common, each = ID_BYTES * rows.replicated, SUM_BYTES * own.table.embedding_dim
                both = each * (rows.split + rows.replicated)
                total += [keys, rows.split * own.weight_bytes, keys + common, both, common, each * rows.replicated]
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
    )
