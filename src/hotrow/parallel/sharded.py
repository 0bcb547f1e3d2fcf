"""Tables whose rows lie on several ranks, as a placement in front of the placement of the rank's own rows.

    take     ids of the rank's samples -> distinct rows; those of other ranks are asked for, come, and lie beside
             copies of its own in a buffer of slots -> lookup
    update   sums of each row's gradients, one for each aligned subtree of micro-batches -> to the row's home, which
             adds them in the tree (kernels/tree.py) -> the placement below applies them

Each distinct row that a rank needs and does not hold comes once, as lookups read it, and a sum for each aligned subtree
goes back. Sums of replicated rows go to their home too, which tells all ranks the total. So no number of ranks changes
a bit of the result (law 2). Next: shards.py, which says where a row lies; communicator.py, which sends; pooled.py for
tables whose owners send pooled vectors instead of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops, tree
from hotrow.kernels.keys import pack, unpack
from hotrow.kernels.types import ComingSums, Distinct, Layout, Rule, SentSums
from hotrow.parallel.agreement import everyone
from hotrow.parallel.buffers import Buffers, ShardLease
from hotrow.parallel.communicator import Arriving, Communicator
from hotrow.parallel.local_steps import LocalSteps
from hotrow.parallel.messages import Keys, WireDtype, recast, row_type
from hotrow.parallel.pooled import Pooled, Served, only
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded_rows import ShardedChanges, ShardedRows
from hotrow.parallel.shards import Homes, Numbers, Shard
from hotrow.placement import AnyMemory, place
from hotrow.placement.base import Attached, Lease, Placement, Rows, TableState, Use
from hotrow.placement.budget import DeviceMemory
from hotrow.placement.slots import Span, check_ids, spans_of
from hotrow.tables import TableConfig

HELD = 0
"""The group of rows that the rank itself holds, in `Asked`; group 1 + r is what it asks of rank r."""


@dataclass(frozen=True, kw_only=True)
class ShardedMemory:
    """What `EmbeddingCollection(memory=...)` takes to share the rows of its tables among ranks.

    shards: by table; a table that is not named is dealt out row by row. below: where each rank keeps its own rows, None
    (DRAM) or `Memory`, whose bytes are a rank's. wire_dtype: in which rows, vectors and
    sums of gradients travel; all but fp32 round them, so that results depend on the number of ranks.
    Raises ValueError for tables that are not there, for shards that cannot be, and for memory on a device.
    """

    comm: Communicator
    shards: Mapping[str, Shard] = field(default_factory=dict)
    below: AnyMemory = None
    wire_dtype: WireDtype = "fp32"

    @property
    def ranks(self) -> Ranks:
        return self.comm.ranks

    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Placement:
        if isinstance(self.below, DeviceMemory):
            raise ValueError("tables shared by ranks lie in DRAM or in tiers: pass Memory or None, not DeviceMemory")
        names = [table.name for table in tables]
        if unknown := [name for name in self.shards if name not in names]:
            raise ValueError(f"there is no table {unknown[0]!r} to share; the tables are {', '.join(names)}")
        shards = [self.shards.get(name, Shard()) for name in names]
        for table, shard in zip(tables, shards, strict=True):
            shard.check(table.name, table.num_embeddings, table.embedding_dim, self.ranks.size)
        if self.ranks.micro_batches == 1:  # one rank, and nothing to add up
            return place(tables, self.below, seed=seed)
        local = [_local_table(*each, self.ranks) for each in zip(tables, shards, strict=True)]
        placed = place(local, self.below, seed=seed)
        return Sharded(self.comm, tables, shards, placed, seed=seed, wire_dtype=self.wire_dtype)


def table_of_rank(table: TableConfig, shard: Shard, ranks: Ranks) -> TableConfig:
    """Returns the table of the rows and columns that this rank holds, with one row at least."""
    num_rows = max(1, shard.num_local(table.num_embeddings, ranks.rank, ranks.size))
    return table.part(num_rows, shard.births(ranks.rank, ranks.size), shard.columns(table.embedding_dim, ranks.rank))


def _local_table(table: TableConfig, shard: Shard, ranks: Ranks) -> TableConfig:
    """Returns the table of a rank's own rows; their ids are looked up under the table's name."""
    return replace(table_of_rank(table, shard, ranks), feature_names=(table.name,), pooling="sum")


class Asked(NamedTuple):
    """What a batch needs: its distinct rows by table and by group, and what other ranks ask for at the same time."""

    sparse: KeyedJaggedTensor
    ids: Tensor
    """The ids as they were, if the batch was announced; empty if it was not."""
    spans: list[Span]
    places: Numbers
    """For each id in the spans, one after another: the place of its row among the table's distinct rows."""
    rows: list[Numbers]
    """By table, the distinct rows [n], by group and rising in each."""
    counts: Numbers
    """Number of rows by table and group: [T, 1 + R]."""
    given: Numbers
    """Number of rows by table that each rank asks of this one: [R, T]."""
    strides: list[int]
    """By rank, the number of its samples."""
    below: KeyedJaggedTensor
    """By table, the rows of this rank's shard that it and the others need: own ones, then those for rank 0, 1, ...;
    then what it pools for all."""
    served: Served | None
    """What this rank pools for all ranks. None if only rows travel."""


class Come(NamedTuple):
    """Sums of rows of this rank's shard, as they came from a rank."""

    sums: ComingSums
    leaves: Sequence[int]
    """By node, its first micro-batch."""


class UnderWay(NamedTuple):
    """The messages that ranks send each other to update the rows of some lookups."""

    lookups: ops.Lookups
    gradients: Arriving | None
    """Gradients of pooled vectors; None if there are none."""
    pooled: Callable[[], ops.Lookups]
    """Returns these as lookups below."""
    sums: Arriving | None
    """Sums of rows. None if there are none to send."""

    def wait(self) -> None:
        """Returns when all of it is here; both are waited for, also if one of them raises."""
        try:
            if self.gradients is not None:
                self.gradients.wait()
        finally:
            if self.sums is not None:
                self.sums.wait()


class Sharded(Placement):
    """The rows of one collection over the ranks of `comm`; below: the placement of this rank's own shard.

    tables: whole ones, as users see them; those of `below` have the shard's rows. Making it, `take`, `announce`,
    `update`, `agree`, `check` and reading rows are collective: every rank calls them in the same order, and if one
    fails, all raise its error.
    """

    def __init__(
        self,
        comm: Communicator,
        tables: Sequence[TableConfig],
        shards: Sequence[Shard],
        below: Placement,
        *,
        seed: int,
        wire_dtype: WireDtype = "fp32",
    ) -> None:
        self.comm, self.tables, self.shards = comm, tuple(tables), tuple(shards)
        self.below: Placement = below
        self._names = tuple(table.name for table in tables)
        self.layout = Layout.of(self.tables)
        self.kernels = ops.KernelSet(self.layout)
        self.weights, self.low = below.weights, below.low
        # Ranks announce together, also if the rows of some fit in DRAM.
        self.looks_ahead = any(everyone(comm, below.looks_ahead))
        self._changes = ShardedChanges(comm, tables, shards, below.changes, seed=seed)
        self._homes = Homes(shards, comm.size).of_rank(comm.rank)
        self._prefix = [shard.prefix for shard in shards]
        self._num_rows = [table.num_embeddings for table in tables]
        self._keys = Keys(self._num_rows, [table.embedding_dim for table in tables], wire_dtype)
        self._pooled = Pooled(comm, tables, shards, below, wire_dtype=wire_dtype)
        each = list(zip(tables, shards, strict=True))
        self._rows_travel = any(s.exchange == "rows" and s.prefix < table.num_embeddings for table, s in each)
        """Whether some table has rows that ranks ask each other for in lookups of bags."""
        self._stored = [self.weights[table.name].dtype for table in tables]
        self._sent = [row_type(dtype, wire_dtype) for dtype in self._stored]
        """By table, the types of its rows and of those that travel."""
        self._row_bytes = self._keys.dims * [dtype.itemsize for dtype in self._stored]
        self.all_held = False
        """True while every rank holds all rows of the current batches, as in a phase of hot batches. Ranks then request
        no rows, and lookups are not collective."""
        self.merge_every = 1
        """If 1, ranks add up their gradients at every step. If above, and `all_held`, each rank updates its copies
        alone; after this many steps all ranks add up what each has changed, which is not exact."""
        self._local_steps = LocalSteps(comm, self.tables, shards, below)
        self._announced: dict[int, Asked] = {}
        self._buffers = Buffers(self._keys.dims.tolist(), self._stored)
        self._sums_under_way: UnderWay | None = None
        """What `prepare` sent."""
        self._waited_s = 0.0

    @property
    def arrays(self) -> ops.Arrays:
        return self._buffers.arrays

    # ---- what is offered

    @property
    def prefixes(self) -> dict[str, int]:
        """By table, how many of its first rows every rank holds."""
        return {table.name: shard.prefix for table, shard in zip(self.tables, self.shards, strict=True)}

    @property
    def changes(self) -> ShardedChanges:
        return self._changes

    @property
    def stall_s(self) -> float:
        """Seconds that training batches waited for rows, from below and from other ranks."""
        return self.below.stall_s + self._waited_s

    def check(self, use: Use) -> None:
        if use == "copy":
            raise TypeError("a collection over several ranks cannot be copied or pickled; copy its state_dict()")
        if use == "hot_copies":
            raise ValueError(
                "tables over several ranks take no copies of hot rows in front of them: let every rank hold the first "
                "rows of its tables (hotrow.Shard(prefix=...)), and choose hot rows among those"
            )
        if use == "freeze_some":
            self.below.check(use)
        else:  # a rank in DRAM must not wait for rows of one in tiers, which refuses
            self.comm.gather(partial(self._checked, use), purpose="agreement")

    def _checked(self, use: Use) -> Tensor:
        self.below.check(use)
        return torch.empty(0, dtype=torch.uint8)

    def agree(self, found: str | None) -> str | None:
        each = everyone(self.comm, found)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(each) if text is not None), None)

    # ---- batches

    def announce(self, sparse: KeyedJaggedTensor) -> None:
        """Asks for the rows of a training batch that comes later; ranks bring theirs from below. Raises as `take`."""
        if self.looks_ahead and id(sparse.values) not in self._announced:
            asked = self._ask(sparse, training=True)._replace(ids=sparse.values.clone())
            self._announced[id(sparse.values)] = asked
            self.below.announce(asked.below)

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        if (asked := self._announced.pop(id(sparse.values), None)) is not None:
            self.below.forget(asked.below)

    def take_rows(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[Lease, KeyedJaggedTensor]:
        return self.take(sparse, training=training, rows=True)

    def take(self, sparse: KeyedJaggedTensor, *, training: bool, rows: bool = False) -> tuple[Lease, KeyedJaggedTensor]:
        """Returns the lease of this rank's samples of a batch, whose rows lie in slots, and the samples with slots.

        rows: of all tables; if not, bags of those with pooled vectors are empty, and `look_up` has their vectors.
        Raises ValueError on all ranks if one has an id outside its table, if a training batch is cut into other parts
        than those of `Ranks.samples`, and if a batch was changed after it was announced.
        """
        before = self.comm.counts.exchange_s
        known = self._announced.pop(id(sparse.values), None)
        if known is not None and rows and known.served is not None:  # it was announced for its vectors
            self.below.forget(known.below)
            known = None
        asked = self._ask(sparse, training=training, rows=rows) if known is None else known
        lease: Lease | None = None
        own_slots, batch = asked.below, None
        firsts = self._buffers.reserve(asked.counts.sum(1))
        come = list[Tensor]()

        def rows_for_others() -> list[Tensor]:
            nonlocal lease, own_slots
            if known is not None and not self._is_of(known, sparse):
                raise ValueError("a batch was changed after it was announced: with several ranks, change it before")
            lease, own_slots = self.below.take(asked.below, training=training)
            return self._rows_for_others(asked, own_slots, firsts)

        def slots_to_pool() -> tuple[Tensor, dict[int, slice]]:
            if lease is None:
                come[:] = rows_for_others()  # empty: only its own rows are put into their slots
            return own_slots.values, self._pooled_slots(asked, own_slots)

        try:
            starts = self._starts(asked.strides, sparse.parts) if training else None
            travels = asked.served is None or self._rows_travel
            of_rows = self._begin(rows_for_others, purpose="rows") if travels else None
            bring = self._pooled.begin(asked.served, slots_to_pool, sparse, training=training) if asked.served else None
            try:
                come[:] = come if of_rows is None else of_rows.wait()
            finally:  # also if ranks failed, so that the next exchange finds nothing of this one
                batch = None if bring is None else bring()
        except (ValueError, RuntimeError):
            self.below.forget(asked.below)
            if lease is not None:
                lease.release(updated=False)
            raise
        assert lease is not None
        bags = sparse
        if batch is not None:  # weights may have changed since they were announced
            bags = asked.sparse if sparse.weights is None else self._pooled.without(sparse)
        slots = bags.with_values(self._fill(asked, come, firsts)).in_parts(starts)
        ended = (lambda: None) if batch is None else self._pooled.keep(batch, slots)
        own = ShardLease(self._buffers.live, lease, ended)
        self._waited_s += training * (self.comm.counts.exchange_s - before)
        return own, slots

    def look_up(self, kernels: ops.Kernels, slots: KeyedJaggedTensor, *, blame: KeyedJaggedTensor) -> Tensor:
        out = self._pooled.taken(slots)
        if out is None:
            return super().look_up(kernels, slots, blame=blame)
        rest = self.kernels.without(kernels, self._pooled.tables)
        return out if rest is None else rest.lookup(self.arrays, slots, out, blame=blame)

    def _begin(self, parts: Callable[[], list[Tensor]], *, purpose: str) -> Arriving:
        """As `Communicator.begin`, of requests and of rows. If all rows are held, nobody sends: every rank would say
        what this one says to itself, that it needs nothing."""
        if not self.all_held:
            return self.comm.begin(parts, purpose=purpose)
        return Arriving(self.comm.counts, [parts()[self.comm.rank]] * self.comm.size)

    def _is_of(self, asked: Asked, sparse: KeyedJaggedTensor) -> bool:
        bags = sparse if asked.served is None else self._pooled.without(sparse)
        same = torch.equal(asked.ids, sparse.values) and asked.spans == spans_of(self.layout, bags)
        return same and (asked.served is None or self._pooled.is_of(asked.served, sparse))

    def _ask(self, batch: KeyedJaggedTensor, *, training: bool, rows: bool = False) -> Asked:
        """Sends each rank the requests for its rows, and receives the other ranks' requests for rows of this one. rows:
        request rows of all tables; if False, only of those without pooled vectors."""
        R, T = self.comm.size, len(self.tables)
        pools = bool(self._pooled.tables) and not rows and not self.all_held
        sparse = self._pooled.without(batch) if pools else batch
        spans = spans_of(self.layout, sparse)
        bags = [torch.empty(0, dtype=torch.int32)] * R
        own: list[Any] = []

        def requests() -> list[Tensor]:
            if rows:
                self._check_whole(batch)
            if pools:
                bags[:] = self._pooled.requests(batch, training=training)
            found = self._distinct(sparse, spans)
            if self.all_held:
                self._check_held(found)
            keys = found.local + np.repeat(self._keys.first[:-1], found.counts.sum(1))
            groups = np.repeat(np.tile(np.arange(R + 1), T), found.counts.ravel())
            own.extend((found, keys[groups == HELD]))
            each = [keys[groups == 1 + rank] for rank in range(R)]
            stride = torch.tensor([sparse.stride], dtype=torch.int32)
            return [
                torch.cat([stride, torch.from_numpy(pack(keys)), more]) for keys, more in zip(each, bags, strict=True)
            ]

        come = self._begin(requests, purpose="ids").wait()
        distinct, held = own
        strides, found = [int(words[0]) for words in come], [unpack(words[1:].numpy()) for words in come]
        theirs = [keys for keys, _ in found]
        after = [words[1 + length :] for words, (_, length) in zip(come, found, strict=True)]
        served = self._pooled.serve(after, strides, bags) if pools else None
        given = np.stack([self._keys.counts(keys) for keys in theirs])
        ids = {} if served is None else served.ids  # rows of a table on one rank have their numbers there too
        below, lengths = self._by_table([held, *theirs], [distinct.counts[:, HELD], *given], ids)
        return Asked(
            sparse=sparse,
            ids=sparse.values[:0],
            spans=spans,
            places=distinct.places,
            rows=np.split(distinct.rows, distinct.counts.sum(1).cumsum()[:-1]),
            counts=distinct.counts,
            given=given,
            strides=strides,
            below=self._lookup_below(below, lengths),
            served=served,
        )

    def _check_whole(self, sparse: KeyedJaggedTensor) -> None:
        """Raises ValueError, with the cure, if no rank has whole rows of a feature's table."""
        for feature in self.layout.features:
            if (shard := self.shards[feature.table]).is_cut and feature.name in sparse.keys:
                raise ValueError(
                    f"sequences of feature {feature.name!r} need whole rows of table "
                    f"{self.tables[feature.table].name!r}, whose columns ranks {', '.join(map(str, shard.owners))} "
                    "share: give its Shard one owner, or leave the feature out of the batch"
                )

    def _distinct(self, sparse: KeyedJaggedTensor, spans: list[Span]) -> Distinct:
        """Returns the distinct rows of a batch. Raises ValueError for an id outside its table."""
        found = ops.distinct_rows(sparse.values, spans, self._num_rows, self._homes)
        if found is None:
            check_ids(self.layout, self.tables, sparse, spans)
        assert found is not None, "an id is outside its table"
        return found

    def _check_held(self, found: Distinct) -> None:
        """Raises ValueError, with the cure, if not every rank holds all of these rows."""
        tables = np.repeat(np.arange(len(self.tables)), found.counts.sum(1))
        beyond = found.rows >= np.array([shard.prefix for shard in self.shards])[tables]
        if beyond.any():
            first = int(np.argmax(beyond))
            raise ValueError(
                f"table {self.tables[tables[first]].name!r}: row {found.rows[first]:,} is not on every rank, and a "
                "batch of a hot phase asks for no rows: train it in a cold phase"
            )

    def _by_table(
        self, keys: Sequence[Numbers], counts: Sequence[Numbers], pooled: Mapping[int, Sequence[Numbers]]
    ) -> tuple[Numbers, Numbers]:
        """Returns the rows of several lists of keys, each table by table, of all tables in turn, behind those of a
        table its `pooled` ids; and the number of rows of each table. counts: by list, of each table."""
        ends = [own.cumsum().tolist() for own in counts]
        pieces = list[Numbers]()
        for t, first_key in enumerate(self._keys.first[:-1].tolist()):
            for own, end in zip(keys, ends, strict=True):
                start = end[t - 1] if t else 0
                if end[t] > start:
                    pieces.append(own[start : end[t]] - first_key)
            pieces.extend(pooled.get(t, ()))
        lengths = np.sum(counts, axis=0)
        for t, each in pooled.items():
            lengths[t] += sum(map(len, each))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64), lengths

    def _lookup_below(self, rows: Numbers, counts: Numbers) -> KeyedJaggedTensor:
        """Returns a batch of one bag for each table, of rows of this rank's shard, table by table."""
        offsets = torch.from_numpy(np.concatenate([[0], counts.cumsum()]))
        return KeyedJaggedTensor.unchecked(self._names, torch.from_numpy(rows), None, offsets, 1)

    def _rows_for_others(self, asked: Asked, slots: KeyedJaggedTensor, firsts: Numbers) -> list[Tensor]:
        """Returns the rows for each rank as bytes; puts those that this rank needs of its own into their slots."""
        counts = np.concatenate([asked.counts[:, :1], asked.given.T], axis=1)
        pooled = asked.below.lengths.numpy() - counts.sum(1)
        messages = [ops.empty(int(own @ self._row_bytes), dtype=torch.uint8) for own in asked.given]
        if not counts.any():
            return messages
        rows, groups = slots.values.long(), np.concatenate([counts, pooled[:, None]], axis=1)
        ops.pack_rows(self.below.arrays, rows, groups, self._buffers.arrays, firsts.tolist(), messages)
        sizes = (asked.given * self._keys.dims).tolist()
        return [recast(*each, self._stored, self._sent) for each in zip(messages, sizes, strict=True)]

    def _pooled_slots(self, asked: Asked, slots: KeyedJaggedTensor) -> dict[int, slice]:
        """Returns by table which of the slots below are those of the ids that this rank pools."""
        assert asked.served is not None
        before, ends = asked.counts[:, HELD] + asked.given.sum(0), slots.key_ends()
        return {t: slice(ends[t] + int(before[t]), ends[t + 1]) for t in asked.served.names}

    def _fill(self, asked: Asked, come: Sequence[Tensor], firsts: Numbers) -> Tensor:
        """Puts rows of other ranks into their slots; returns the slot of each id of the batch."""
        slots = torch.zeros_like(asked.sparse.values)
        if not len(slots):
            return slots
        sizes = (asked.counts[:, 1:].T * self._keys.dims).tolist()
        stored = [recast(*each, self._sent, self._stored) for each in zip(come, sizes, strict=True)]
        ops.unpack_rows(stored, asked.counts, self._buffers.arrays, firsts.tolist())
        for row_of, first, rows in zip(self._buffers.row_of, firsts.tolist(), asked.rows, strict=True):
            row_of[first : first + len(rows)] = rows
        numbers, done = slots.numpy(), 0
        for t, start, stop in asked.spans:
            numbers[start:stop] = asked.places[done : done + stop - start] + firsts[t]
            done += stop - start
        return slots

    def _starts(self, strides: Sequence[int], parts: Sequence[int] | None) -> Sequence[int]:
        """Returns where the rank's micro-batches begin among its samples, and where the last one ends. parts: what the
        batch says of it. That counts if all rows are held, because ranks do not exchange `strides` then."""
        if self.all_held:
            assert parts is not None, "a hot batch comes cut into micro-batches"
            return parts
        ranks, total = self.comm.ranks, sum(strides)
        wanted = [end - first for first, end in (ranks.samples(total, rank) for rank in range(ranks.size))]
        if strides != wanted:
            raise ValueError(
                f"the ranks have {', '.join(map(str, strides))} samples of a batch of {total}; of "
                f"{ranks.micro_batches} micro-batches they must have {', '.join(map(str, wanted))}: cut batches by "
                "Ranks.samples"
            )
        lo, hi = ranks.held
        starts = tree.starts(total, ranks.micro_batches)
        return [start - starts[lo] for start in starts[lo : hi + 1]]

    # ---- update

    def update(self, lookups: ops.Lookups, attached: Attached, rules: Sequence[Rule]) -> None:
        """See Placement. Each row gets one sum, of its gradients over all ranks, in the order of kernels/tree.py.

        A sum of a subtree of micro-batches is a row's only gradient there, so that it may stand for its first one: the
        placement below adds what has come in the same tree.
        """
        if not lookups:
            return
        alone = self._steps_locally
        pooled, come = ([], [self._own_sums(lookups)]) if alone else self._sums_of(lookups)
        if not alone and any(self._prefix):
            rest = [own._replace(sums=own.sums._replace(taken="from_prefix")) for own in come]
            come = [*self._replicated(come), *rest]
        found = self._unpacked(come)
        counts = found.pieces.counts.sum(1)
        if alone:
            self._local_steps.keep(attached, np.split(found.pieces.rows, counts.cumsum()[:-1]))
        lease, slots = self.below.take(self._lookup_below(found.pieces.rows, counts), training=False)
        sums, below = found._replace(slots=slots.values), self.below
        below.kernels.pooled.update(below.arrays, attached.arrays, pooled, rules, sums)
        lease.release(updated=True)
        if self._local_steps.num_steps == self.merge_every:
            self.merge()

    @property
    def _steps_locally(self) -> bool:
        return self.all_held and self.merge_every > 1

    def merge(self) -> None:
        """Gives all ranks the same rows again, if each has updated its copies alone. Collective."""
        self._local_steps.merge()

    def _with_rows(self, lookups: ops.Lookups, tables: frozenset[int]) -> ops.Lookups:
        """Adds, behind each lookup of pooled vectors, one of the rows that were pooled, for sums by row of `tables`."""
        others, found = frozenset(range(len(self.tables))) - tables, list[Any]()
        for kernels, sparse, grad in lookups:
            found.append((kernels, sparse, grad))
            ids, updates = self._pooled.of(sparse), self.kernels.without(kernels, others)
            if ids is not None and updates is not None:
                found.append((updates, self._in_slots(ids, tables).in_parts(sparse.parts), grad))
        return found

    def _in_slots(self, sparse: KeyedJaggedTensor, tables: frozenset[int]) -> KeyedJaggedTensor:
        """Returns the bags of `tables` with slots for ids. The slots are new, and hold no weights."""
        bags = only(sparse, [feature.name for feature in self.layout.features if feature.table in tables])
        spans = spans_of(self.layout, bags)
        found = self._distinct(bags, spans)
        counts = found.counts.sum(1)
        ends, firsts = counts.cumsum(), self._buffers.reserve(counts)
        for t in tables:
            self._buffers.row_of[t][firsts[t] : firsts[t] + counts[t]] = found.rows[ends[t] - counts[t] : ends[t]]
        slots, done = np.empty(len(bags.values), np.int64), 0
        for t, start, stop in spans:
            slots[start:stop] = found.places[done : done + stop - start] + firsts[t]
            done += stop - start
        return bags.with_values(torch.from_numpy(slots))

    def _by_row(self, lookups: ops.Lookups) -> ops.Lookups:
        """Returns lookups in which a row has one slot; several batches, each with its slots, may hold a row."""
        slot_of = self._buffers.one_slot_each()
        if slot_of is None:
            return lookups
        found = []
        for kernels, sparse, grad in lookups:
            values = sparse.values.clone()
            for t, start, stop in spans_of(kernels.layout, sparse):
                values[start:stop] = torch.from_numpy(slot_of[t])[values[start:stop].long()].to(values.dtype)
            found.append((kernels, sparse.with_values(values), grad))
        return found

    def prepare(self, lookups: ops.Lookups) -> Callable[[], object]:
        """Sends what `update` needs of other ranks: gradients of pooled vectors, and sums of the rows' gradients. Other
        exchanges may follow before they have come."""
        self._drop_sums()
        if not lookups or self._steps_locally:
            return lambda: None
        self._sums_under_way = self._begin_sums(lookups)
        return self._sums_under_way.wait

    def _drop_sums(self) -> None:
        """Lets sums arrive that no update took, because their step was left out."""
        dropped, self._sums_under_way = self._sums_under_way, None
        if dropped is not None:
            with suppress(ValueError, RuntimeError):  # who asked for them heard of it
                dropped.wait()

    def _begin_sums(self, lookups: ops.Lookups) -> UnderWay:
        """Sends gradients of pooled vectors to their owners; and a sum for each aligned subtree of this rank and each
        row to the row's home, unless no row is updated by such sums: that all ranks know."""
        by_row = self._pooled.tables_by_row(lookups)
        gradients, pooled = self._pooled.gradients(lookups, but=by_row)
        if len(self._pooled.tables) == len(self.tables) and not by_row:
            return UnderWay(lookups, gradients, pooled, None)
        num_heads = [0] * self.comm.size

        def sums_for_others() -> list[Tensor]:
            rows = self._by_row(self._with_rows(lookups, by_row) if by_row else lookups)
            sums = self.kernels.pooled.flat_row_sums(self.arrays, rows, self.comm.ranks.held)
            nodes = [sums[node] for node in tree.aligned(*self.comm.ranks.held)]
            made = self._keys.pack_sums(nodes, self._buffers.row_of, self._homes)
            num_heads[:] = [heads for _, heads in made]
            return [words for words, _ in made]

        sums = self.comm.begin(sums_for_others, purpose="gradients", num_heads=num_heads)
        return UnderWay(lookups, gradients, pooled, sums)

    def _sums_of(self, lookups: ops.Lookups) -> tuple[ops.Lookups, list[Come]]:
        """Returns gradients of pooled vectors, as lookups below, and the sums that come here, of all micro-batches."""
        if self._sums_under_way is not None and not _same(self._sums_under_way.lookups, lookups):
            self._drop_sums()
        if self._sums_under_way is None:
            self.prepare(lookups)
        assert self._sums_under_way is not None
        under_way, self._sums_under_way = self._sums_under_way, None
        under_way.wait()
        gradients, come = under_way.pooled(), list[Come]()
        for rank, words in enumerate(() if under_way.sums is None else under_way.sums.wait()):
            held = tree.aligned(*tree.held(self.comm.ranks.micro_batches, rank, self.comm.size))
            come.append(Come(ComingSums(self._keys.exact(words, len(held)), len(held)), [leaf for leaf, _ in held]))
        return gradients, come

    def _own_sums(self, lookups: ops.Lookups) -> Come:
        """Returns the sums of this rank alone, of rows that every rank holds."""
        held = tree.aligned(*self.comm.ranks.held)
        sums = self.kernels.pooled.flat_row_sums(self.arrays, self._by_row(lookups), self.comm.ranks.held)
        nodes = []
        for own in (sums[node] for node in held):
            slots = np.split(own.rows.numpy(), np.cumsum(own.counts)[:-1])
            rows = np.concatenate([row_of[each] for row_of, each in zip(self._buffers.row_of, slots, strict=True)])
            nodes.append(own._replace(rows=torch.from_numpy(rows)))
        ((words, _),) = ops.pack_sums(nodes, self._keys.first, self._keys.dims)
        return Come(ComingSums(words, len(held)), [leaf for leaf, _ in held])

    def _replicated(self, come: Sequence[Come]) -> list[Come]:
        """Adds up the sums of replicated rows that came here, and tells the totals to all ranks. Returns what they
        tell, which counts as of the first micro-batch."""
        common = [own._replace(sums=own.sums._replace(taken="below_prefix")) for own in come]
        whole, kernels = (0, tree.width(self.comm.ranks.micro_batches)), self.below.kernels.pooled
        sums = kernels.flat_row_sums(self.below.arrays, [], whole, self._unpacked(common))[whole]
        ((words, heads),) = self._keys.pack_sums([sums])
        told = self.comm.gather(words, purpose="replicated", num_heads=heads)
        return [Come(ComingSums(self._keys.exact(each, 1), 1), [0]) for each in told]

    def _unpacked(self, come: Sequence[Come]) -> SentSums:
        """Returns the sums of messages, in the order of micro-batches, with rows for slots."""
        each = ((leaf, m, k) for m, own in enumerate(come) for k, leaf in enumerate(own.leaves))
        leaves = sorted(each, key=itemgetter(0))
        messages, pieces = [own.sums for own in come], [(m, k) for _, m, k in leaves]
        found = self._keys.unpack_sums(messages, pieces, self._prefix)
        words, parts = [messages[m].words for m, _ in pieces], self.comm.ranks.micro_batches
        return SentSums(torch.from_numpy(found.rows), found, [leaf for leaf, _, _ in leaves], words, parts)

    # ---- optimizer states, and rows by their ids

    def new_state(self, table: str, row_shape: Sequence[int]) -> Tensor:
        """See Placement. Raises ValueError for a number per row if no rank has whole rows."""
        shard = next(shard for own, shard in zip(self.tables, self.shards, strict=True) if own.name == table)
        if not shard.is_cut:
            return self.below.new_state(table, row_shape)
        if not row_shape:
            raise ValueError(
                f"ranks {', '.join(map(str, shard.owners))} share the columns of table {table!r}, and this optimizer "
                "keeps a number for each whole row: give its Shard one owner, or choose an optimizer with a number for "
                "each column, such as Adagrad in place of RowWiseAdagrad"
            )
        return self.below.new_state(table, self.weights[table].shape[1:])

    def attach(self, states: dict[str, Sequence[TableState]]) -> Attached:
        self._changes.states = states
        return self.below.attach(states)

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        """Returns whole tables by row: every rank reads the same rows at the same time, and gets all of them."""
        t = next(t for t, each in enumerate(self.tables) if each.name == table)
        return ShardedRows(self.comm, self.shards[t], self.tables[t], self.below.rows(table, state))

    def flush(self) -> None:
        self.below.flush()


def _same(lookups: ops.Lookups, others: ops.Lookups) -> bool:
    return [[*map(id, own)] for own in lookups] == [[*map(id, own)] for own in others]
