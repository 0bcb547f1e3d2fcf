"""Tables whose rows lie on several ranks, as a placement: it stands in front of that of the rank's own rows.

    take     ids of the rank's samples -> distinct rows; those of other ranks are asked for, come, and lie beside
             copies of its own in a buffer of slots -> lookup
    update   sums of each row's gradients, one for each aligned subtree of micro-batches -> to the row's home, which
             adds them in the tree (kernels/tree.py) -> the placement below applies them

Each distinct row that a rank needs and does not hold comes once, as lookups read it, and a sum for each aligned subtree
goes back. Sums of replicated rows go to their home too, which tells all ranks the total. So no number of ranks changes
a bit of the result (law 2). Next: shards.py, which says where a row lies; world.py, which sends; pooled.py for tables
whose owners send pooled vectors instead of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops, tree
from hotrow.kernels.reference import Layout, RowSums, Rule
from hotrow.parallel.agreement import everyone, network_id
from hotrow.parallel.buffers import Buffers, ShardLease
from hotrow.parallel.exchange import WIRE_TYPES, Keys, WireDtype, pack, unpack
from hotrow.parallel.pooled import Collective, Pooled, Served, only
from hotrow.parallel.shards import Division, Numbers, Shard
from hotrow.parallel.shared_rows import SharedChanges, SharedRows
from hotrow.parallel.world import World
from hotrow.placement import AnyMemory, place
from hotrow.placement.base import Attached, Lease, Placement, Rows, TableState, Use
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.placement.slots import Span, check_ids, spans_of
from hotrow.tables import TableConfig

HELD = 0
"""The group of rows that the rank itself holds, in `Asked`; group 1 + r is what it asks of rank r."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What `EmbeddingCollection(memory=...)` takes to share the rows of its tables among the ranks of a world.

    shards: by table; a table that is not named is dealt out row by row. below: where each rank keeps its own rows, None
    (DRAM) or `Memory`, whose bytes are a rank's; it pins rows of whole tables. wire_dtype: in which rows, vectors and
    sums of gradients travel; all but fp32 round them, so that results depend on the number of ranks. collective: how
    vectors of "pooled" tables travel, which changes no result.
    Raises ValueError for tables that are not there, for shards that cannot be, and for memory on a device.
    """

    world: World
    shards: Mapping[str, Shard] = field(default_factory=dict)
    below: AnyMemory = None
    wire_dtype: WireDtype = "fp32"
    collective: Collective = "all_to_all"

    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Placement:
        if isinstance(self.below, DeviceMemory):
            raise ValueError("tables shared by ranks lie in DRAM or in tiers: pass Memory or None, not DeviceMemory")
        names = [table.name for table in tables]
        if unknown := [name for name in self.shards if name not in names]:
            raise ValueError(f"there is no table {unknown[0]!r} to share; the tables are {', '.join(names)}")
        shards = [self.shards.get(name, Shard()) for name in names]
        for table, shard in zip(tables, shards, strict=True):
            shard.check(table.name, table.num_embeddings, self.world.size)
        if self.world.micro_batches == 1:  # one rank, and nothing to add up
            return place(tables, self.below, seed=seed)
        below = self.below
        if isinstance(below, Memory) and below.pins:
            below = replace(below, pins=_own_pins(below.pins, tables, shards, self.world))
        local = [_local_table(*each, self.world) for each in zip(tables, shards, strict=True)]
        placed = place(local, below, seed=seed)
        return Sharded(
            self.world, tables, shards, placed, seed=seed, wire_dtype=self.wire_dtype, collective=self.collective
        )


def shard(
    memory: AnyMemory = None,
    *,
    shards: Mapping[str, Shard] | None = None,
    group: Any = None,
    micro_batches: int | None = None,
    wire_dtype: WireDtype = "fp32",
) -> Shards:
    """Returns what `EmbeddingCollection(memory=...)` takes to share its tables among the ranks of a process group.

        torch.distributed.init_process_group("gloo")
        shards = hotrow.shard(hotrow.Memory(dram="2GiB", ssd="/nvme"))
        emb = hotrow.EmbeddingCollection(tables, memory=shards)
        first, end = shards.world.samples(len(batch))      # what this rank trains of a global batch

    From then on all ranks must look up, step, read and write the collection in the same order, also for batches without
    a sample: `forward`, `sequence`, `step`, `state_dict`, `read_rows` and checkpoints wait for the other ranks.

    memory: where each rank keeps its own rows, as `EmbeddingCollection` takes it. shards: by table; a table that is not
    named is dealt out row by row. group: of torch.distributed; None means its default one. micro_batches: the number of
    parts of a global batch, since any number of ranks up to it gives the same bits; None means the number of ranks.
    wire_dtype: "fp32", or "bf16" and "fp16", in which numbers of float32 travel in half as many bytes and are rounded,
    so that results depend on the number of ranks.
    """
    world = World.of(group, micro_batches)
    return Shards(world=world, shards=dict(shards or {}), below=memory, wire_dtype=wire_dtype)


def part_of(table: TableConfig, shard: Shard, world: World) -> TableConfig:
    """Returns the part of a table that this rank holds, which has a row at least."""
    num_rows = max(1, shard.num_local(table.num_embeddings, world.rank, world.size))
    return table.part(num_rows, shard.births(world.rank, world.size))


def _local_table(table: TableConfig, shard: Shard, world: World) -> TableConfig:
    """Returns the table of a rank's own rows; their ids are looked up under the table's name."""
    return replace(part_of(table, shard, world), feature_names=(table.name,), pooling="sum")


def _own_pins(
    pins: Mapping[str, ArrayLike], tables: Sequence[TableConfig], shards: Sequence[Shard], world: World
) -> dict[str, ArrayLike]:
    """Returns the rows of `pins` that a rank holds, by their numbers there; ids outside their table stay."""
    found = dict(pins)
    for table, shard in zip(tables, shards, strict=True):
        ids = np.asarray(pins.get(table.name, ()), np.int64)
        if len(ids) and 0 <= ids.min() <= ids.max() < table.num_embeddings:
            found[table.name] = shard.local(ids[shard.held(ids, world.rank, world.size)], world.size)
    return found


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
    """What this rank pools for all; None if only rows travel."""


class Cut(NamedTuple):
    """Sums of rows of one table, cut into micro-batches: part v has those of the subtrees that begin with leaf v."""

    own: RowSums
    """A row may be in several parts, but once in each."""
    parts: tuple[int, ...]
    """Where the parts begin among the rows, and the end of the last: [V + 1]."""


class Sharded(Placement):
    """The rows of one collection over the ranks of `world`; below: the placement of this rank's own shard.

    tables: whole ones, as users see them; those of `below` have the shard's rows. Making it, `take`, `announce`,
    `update`, `agree`, `check` and reading rows are collective: every rank calls them in the same order, and if one
    fails, all raise its error.
    """

    def __init__(
        self,
        world: World,
        tables: Sequence[TableConfig],
        shards: Sequence[Shard],
        below: Placement,
        *,
        seed: int,
        wire_dtype: WireDtype = "fp32",
        collective: Collective = "all_to_all",
    ) -> None:
        self.world, self.tables, self.shards = world, tuple(tables), tuple(shards)
        self.below: Placement = below
        self.layout = Layout.of(self.tables)
        self.kernels = ops.KernelSet(self.layout)
        self.weights, self.low = below.weights, below.low
        ranks = everyone(world, [below.looks_ahead, below.changes is not None, network_id()])
        looks_ahead, knows_changes, where = zip(*ranks, strict=True)
        # Ranks announce together, also if the rows of some fit in DRAM.
        self.looks_ahead = any(looks_ahead)
        # Whole tables are written by several ranks into one file, whose pages only processes of one machine share.
        whole = not any(knows_changes) and len(set(where)) == 1
        self._changes = None if whole else SharedChanges(world, tables, shards, below.changes, seed=seed)
        self._division = Division(shards, world.size)
        sizes = [table.num_embeddings for table in tables]
        self._keys = Keys(sizes, [table.embedding_dim for table in tables], wire_dtype)
        self._pooled = Pooled(world, tables, shards, below, collective=collective, wire_dtype=wire_dtype)
        stored = [self.weights[table.name].dtype for table in tables]
        self._sent_types = [WIRE_TYPES[wire_dtype] if dtype == torch.float32 else dtype for dtype in stored]
        """By table, the type in which its rows travel."""
        sizes = [dtype.itemsize for dtype in self._sent_types]
        self._sent_order = sorted(range(len(tables)), key=lambda t: -sizes[t])
        """Tables in the order in which messages hold their rows: wider numbers come first, so that all lie aligned."""
        self._row_bytes = np.array([size * t.embedding_dim for size, t in zip(sizes, tables, strict=True)], np.int64)
        self._announced: dict[int, Asked] = {}
        self._buffers = Buffers(self._keys.dims.tolist(), [self.weights[table.name].dtype for table in tables])
        self._waited_s = 0.0

    @property
    def arrays(self) -> ops.Arrays:
        return self._buffers.arrays

    # ---- what is offered

    @property
    def changes(self) -> SharedChanges | None:
        """See Placement. None, so that checkpoints write whole tables, if all ranks are in DRAM of one machine."""
        return self._changes

    @property
    def stall_s(self) -> float:
        """Seconds that training batches waited for rows, from below and from other ranks."""
        return self.below.stall_s + self._waited_s

    def check(self, use: Use) -> None:
        if use == "copy":
            raise TypeError("a collection over several ranks cannot be copied or pickled; copy its state_dict()")
        if use == "hot_copies":
            raise ValueError("tables over several ranks take no copies of hot rows yet: hot.schedule must be none")
        if use == "freeze_some":
            self.below.check(use)
        else:  # a rank in DRAM must not wait for rows of one in tiers, which refuses
            self.world.gather(partial(self._checked, use), purpose="agreement")

    def _checked(self, use: Use) -> Tensor:
        self.below.check(use)
        return torch.empty(0, dtype=torch.uint8)

    def agree(self, found: str | None) -> str | None:
        each = everyone(self.world, found)
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
        than those of `World.samples`, and if a batch was changed after it was announced.
        """
        before = self.world.exchange_s
        known = self._announced.pop(id(sparse.values), None)
        if known is not None and rows and known.served is not None:  # it was announced for its vectors
            self.below.forget(known.below)
            known = None
        asked = self._ask(sparse, training=training, rows=rows) if known is None else known
        lease: Lease | None = None
        own_slots, batch = asked.below, None
        firsts = self._buffers.reserve(asked.counts.sum(1))

        def rows_for_others() -> list[Tensor]:
            nonlocal lease, own_slots
            if known is not None and not self._is_of(known, sparse):
                raise ValueError("a batch was changed after it was announced: with several ranks, change it before")
            lease, own_slots = self.below.take(asked.below, training=training)
            return self._rows_for_others(asked, own_slots, firsts)

        try:
            starts = self._starts(asked.strides) if training else None
            come = self.world.exchange(rows_for_others, purpose="rows")
            if asked.served is not None:
                pooled = self._pooled_slots(asked, own_slots)
                batch = self._pooled.bring(asked.served, pooled, sparse, training=training)
        except (ValueError, RuntimeError):
            self.below.forget(asked.below)
            if lease is not None:
                lease.release(updated=False)
            raise
        assert lease is not None
        bags = sparse if batch is None else self._pooled.without(sparse)
        slots = bags.with_values(self._fill(asked, come, firsts)).in_parts(starts)
        if batch is not None:
            lease = self._pooled.keep(batch, slots, lease)
        own = ShardLease(self._buffers.live, lease)
        self._waited_s += training * (self.world.exchange_s - before)
        return own, slots

    def look_up(self, kernels: ops.Kernels, slots: KeyedJaggedTensor, *, blame: KeyedJaggedTensor) -> Tensor:
        out = self._pooled.taken(slots)
        if out is None:
            return super().look_up(kernels, slots, blame=blame)
        rest = self.kernels.without(kernels, self._pooled.tables)
        return out if rest is None else rest.lookup(self.arrays, slots, out, blame=blame)

    def _is_of(self, asked: Asked, sparse: KeyedJaggedTensor) -> bool:
        bags = sparse if asked.served is None else self._pooled.without(sparse)
        same = torch.equal(asked.ids, sparse.values) and asked.spans == spans_of(self.layout, bags)
        return same and (asked.served is None or self._pooled.is_of(asked.served, sparse))

    def _ask(self, batch: KeyedJaggedTensor, *, training: bool, rows: bool = False) -> Asked:
        """Tells each rank what this one needs of its rows, and is told what they need of this one's.

        rows: of all tables; if not, of those without pooled vectors.
        """
        R, T = self.world.size, len(self.tables)
        pools = bool(self._pooled.tables) and not rows
        sparse = self._pooled.without(batch) if pools else batch
        spans = spans_of(self.layout, sparse)
        bags = [torch.empty(0, dtype=torch.int32)] * R
        own: list[Any] = []

        def requests() -> list[Tensor]:
            if pools:
                bags[:] = self._pooled.requests(batch, training=training)
            tables, rows, places = self._distinct(sparse, spans)
            homes = self._division.homes(tables, rows)
            held = (homes == self.world.rank) | self._division.replicated(tables, rows)
            codes = tables * (R + 1) + np.where(held, HELD, homes + 1)
            order = np.argsort(codes, kind="stable")  # keeps the tables, which rise
            counts = np.bincount(codes, minlength=T * (R + 1)).reshape(T, R + 1)
            rows, local = rows[order], self._division.local(tables, rows)[order]
            place_of = np.empty(len(order), np.int64)
            place_of[order] = np.arange(len(order))
            place_of -= np.repeat(counts.sum(1).cumsum() - counts.sum(1), counts.sum(1))
            own.extend((counts, place_of[places], rows, np.split(local, counts.ravel().cumsum()[:-1])))
            keys = np.split(local + self._keys.first[tables], counts.ravel().cumsum()[:-1])  # by table and group
            each = [np.concatenate([keys[t * (R + 1) + 1 + r] for t in range(T)]) for r in range(R)]
            stride = torch.tensor([sparse.stride], dtype=torch.int32)
            return [torch.cat([stride, pack(keys), more]) for keys, more in zip(each, bags, strict=True)]

        come = self.world.exchange(requests, purpose="ids")
        counts, places, rows, cells = own
        strides, found = [int(words[0]) for words in come], [unpack(words[1:]) for words in come]
        theirs = [keys for keys, _ in found]
        after = [words[1 + length :] for words, (_, length) in zip(come, found, strict=True)]
        served = self._pooled.serve(after, strides, bags) if pools else None
        given = np.stack([self._keys.counts(keys) for keys in theirs])
        parts = [np.split(keys, own.cumsum()[:-1]) for keys, own in zip(theirs, given, strict=True)]
        local = [
            np.concatenate([cells[t * (R + 1) + HELD], *(own[t] - self._keys.first[t] for own in parts)])
            for t in range(T)
        ]
        for t, ids in ({} if served is None else served.ids).items():
            local[t] = np.concatenate([local[t], ids])  # rows of a table on one rank have its numbers there too
        return Asked(
            sparse=sparse,
            ids=sparse.values[:0],
            spans=spans,
            places=places,
            rows=np.split(rows, counts.sum(1).cumsum()[:-1]),
            counts=counts,
            given=given,
            strides=strides,
            below=self._lookup_below(local),
            served=served,
        )

    def _distinct(self, sparse: KeyedJaggedTensor, spans: list[Span]) -> tuple[Numbers, Numbers, Numbers]:
        """Returns table and row of each distinct row, both rising, and the place of each id's row among them."""
        check_ids(self.layout, self.tables, sparse, spans)
        ids, nothing = sparse.values.numpy(), np.empty(0, np.int64)
        keys = np.concatenate([nothing, *(ids[start:stop] + self._keys.first[t] for t, start, stop in spans)])
        distinct, places = _distinct(keys)
        tables = self._keys.tables(distinct)
        return tables, distinct - self._keys.first[tables], places

    def _lookup_below(self, local: Sequence[Numbers]) -> KeyedJaggedTensor:
        """Returns a batch of one bag for each table, of rows of this rank's shard."""
        names = tuple(table.name for table in self.tables)
        return KeyedJaggedTensor(
            names, torch.from_numpy(np.concatenate(local)), lengths=torch.tensor([len(own) for own in local])
        )

    def _rows_for_others(self, asked: Asked, slots: KeyedJaggedTensor, firsts: Numbers) -> list[Tensor]:
        """Returns the rows for each rank as bytes; puts those that this rank needs of its own into their slots."""
        numbers = [slots.bags(table.name)[0] for table in self.tables]
        # Whole words, so that each message lies aligned behind those of other ranks.
        messages = [torch.empty(-(-int(own @ self._row_bytes) // 4) * 4, dtype=torch.uint8) for own in asked.given]
        at = [0] * self.world.size
        for t in self._sent_order:
            weights, buffer = self.weights[self.tables[t].name], self._buffers.weights[t]
            cuts = [int(asked.counts[t, HELD]), *asked.given[:, t].tolist()]
            held, *for_others = torch.split(numbers[t][: sum(cuts)], cuts)
            start = int(firsts[t])
            torch.index_select(weights, 0, held, out=buffer[start : start + len(held)])
            for rank, each in enumerate(for_others):
                if len(each):
                    num_bytes = len(each) * int(self._row_bytes[t])
                    out = messages[rank][at[rank] : at[rank] + num_bytes].view(self._sent_types[t])
                    if out.dtype == weights.dtype:
                        torch.index_select(weights, 0, each, out=out.view(len(each), -1))
                    else:
                        out.view(len(each), -1).copy_(weights[each])
                    at[rank] += num_bytes
        return messages

    def _pooled_slots(self, asked: Asked, slots: KeyedJaggedTensor) -> dict[int, Tensor]:
        """Returns by table the slots below of the ids that this rank pools."""
        assert asked.served is not None
        before = asked.counts[:, HELD] + asked.given.sum(0)
        return {t: slots.bags(self.tables[t].name)[0][int(before[t]) :] for t in asked.served.names}

    def _fill(self, asked: Asked, come: Sequence[Tensor], firsts: Numbers) -> Tensor:
        """Puts rows of other ranks into their slots; returns the slot of each id of the batch."""
        at = [0] * self.world.size
        for t in self._sent_order:
            buffer, start = self._buffers.weights[t], int(firsts[t] + asked.counts[t, HELD])
            for rank, count in enumerate(asked.counts[t, 1:].tolist()):
                if count:
                    num_bytes = count * int(self._row_bytes[t])
                    rows = come[rank][at[rank] : at[rank] + num_bytes].view(self._sent_types[t])
                    buffer[start : start + count] = rows.view(count, -1)
                    at[rank], start = at[rank] + num_bytes, start + count
            self._buffers.row_of[t][int(firsts[t]) : start] = asked.rows[t]
        slots = torch.zeros_like(asked.sparse.values)
        numbers, done = slots.numpy(), 0
        for t, start, stop in asked.spans:
            numbers[start:stop] = asked.places[done : done + stop - start] + firsts[t]
            done += stop - start
        return slots

    def _starts(self, strides: Sequence[int]) -> list[int]:
        """Returns where the rank's micro-batches begin among its samples, and the end of the last."""
        world, total = self.world, sum(strides)
        wanted = [end - first for first, end in (world.samples(total, rank) for rank in range(world.size))]
        if strides != wanted:
            raise ValueError(
                f"the ranks have {', '.join(map(str, strides))} samples of a batch of {total}; of "
                f"{world.micro_batches} micro-batches they must have {', '.join(map(str, wanted))}: cut batches by "
                "World.samples"
            )
        lo, hi = world.held
        starts = tree.starts(total, world.micro_batches)
        return [start - starts[lo] for start in starts[lo : hi + 1]]

    # ---- update

    def update(self, lookups: ops.Lookups, attached: Attached, rules: Sequence[Rule]) -> None:
        """See Placement. Each row gets one sum, of its gradients over all ranks, in the order of kernels/tree.py.

        A sum of a subtree of micro-batches is a row's only gradient there, so that it may stand for its first one: the
        placement below adds what has come in the same tree.
        """
        if not lookups:
            return
        by_row = self._pooled.tables_by_row(lookups)
        pooled = self._pooled.gradients(lookups, but=by_row)
        rows = self._by_row(self._with_rows(lookups, by_row) if by_row else lookups)
        nodes = self.kernels.pooled.row_sums(self.arrays, rows, self.world.held)
        tables = self._exchange_sums([nodes[node] for node in tree.aligned(*self.world.held)])
        tables = self._with_replicated(tables)
        lease, slots = self.below.take(self._lookup_below([own.rows.numpy() for own, _ in tables]), training=False)
        by_slot = [own._replace(rows=slots.bags(name)[0]) for (own, _), name in zip(tables, self.weights, strict=True)]
        parts = [parts for _, parts in tables]
        self.below.update([*self._lookups_below(by_slot, parts), *pooled], attached, rules)
        lease.release(updated=True)

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
        numbers, rows, places = self._distinct(bags, spans)
        counts = np.bincount(numbers, minlength=len(self.tables))
        ends, firsts = counts.cumsum(), self._buffers.reserve(counts)
        for t in tables:
            self._buffers.row_of[t][firsts[t] : firsts[t] + counts[t]] = rows[ends[t] - counts[t] : ends[t]]
        slots, done = np.empty(len(bags.values), np.int64), 0
        for t, start, stop in spans:
            slots[start:stop] = places[done : done + stop - start] - (ends[t] - counts[t]) + firsts[t]
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

    def _exchange_sums(self, nodes: Sequence[Sequence[RowSums]]) -> list[Cut]:
        """Sends sums, by slot, to the homes of their rows; returns by table those that come here, of all micro-batches.

        nodes: of each aligned subtree of this rank, by table.
        """
        world, num_heads = self.world, [0] * self.world.size

        def sums_for_others() -> list[Tensor]:
            by_home = [self._by_home(tables) for tables in nodes]
            made = [self._keys.pack_sums([own[rank] for own in by_home]) for rank in range(world.size)]
            num_heads[:] = [heads for _, heads in made]
            return [words for words, _ in made]

        come: list[list[RowSums]] = []
        leaves: list[int] = []
        for rank, words in enumerate(world.exchange(sums_for_others, purpose="gradients", num_heads=num_heads)):
            held = tree.aligned(*tree.held(world.micro_batches, rank, world.size))
            come += self._keys.unpack_sums(words, len(held))
            leaves += [leaf for leaf, _ in held]
        return [_joined([own[t] for own in come], leaves, world.micro_batches) for t in range(len(self.tables))]

    def _by_home(self, by_slot: Sequence[RowSums]) -> list[list[RowSums]]:
        """Returns what goes to each rank of sums by table, with the numbers of rows in its shard."""
        T, counts = len(by_slot), np.array([len(own.rows) for own in by_slot])
        rows = np.concatenate([of[own.rows.numpy()] for of, own in zip(self._buffers.row_of, by_slot, strict=True)])
        tables = np.repeat(np.arange(T), counts)
        homes, local = self._division.homes(tables, rows), self._division.local(tables, rows)
        # Rows rise within each group of the slots of one batch, so that only those of several need a sort.
        order = np.lexsort((rows, tables, homes)) if len(self._buffers.live) > 1 else np.argsort(homes, kind="stable")
        places = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        cells = np.bincount(homes * T + tables, minlength=self.world.size * T).tolist()
        numbers, at = (torch.split(torch.from_numpy(each[order]), cells) for each in (local, places))
        each = [RowSums(own, by_slot[k % T].sums[at[k]]) for k, own in enumerate(numbers)]
        return [each[rank * T : (rank + 1) * T] for rank in range(self.world.size)]

    def _with_replicated(self, tables: list[Cut]) -> list[Cut]:
        """Adds up the sums of replicated rows that came here and tells the totals to all ranks; they take the place of
        these sums, and count as of the first micro-batch."""
        if not any(shard.prefix for shard in self.shards):
            return tables
        common = [own.rows < shard.prefix for (own, _), shard in zip(tables, self.shards, strict=True)]
        split = [_divided(*each) for each in zip(tables, common, strict=True)]
        whole = 0, tree.width(self.world.micro_batches)
        lookups = self._lookups_below([own for _, (own, _) in split], [parts for _, (_, parts) in split])
        totals = self.below.kernels.pooled.row_sums(self.below.arrays, lookups, whole)[whole]
        words, heads = self._keys.pack_sums([totals])
        come = self.world.gather(words, purpose="replicated", num_heads=heads)
        told = [self._keys.unpack_sums(each, 1)[0] for each in come]
        found = []
        for t, (rest, _) in enumerate(split):
            first = [own[t] for own in told]
            count = sum(len(own.rows) for own in first)
            rows, sums = [own.rows for own in first], [own.sums for own in first]
            parts = (0, *(count + part for part in rest.parts[1:]))
            found.append(Cut(RowSums(torch.cat([*rows, rest.own.rows]), torch.cat([*sums, rest.own.sums])), parts))
        return found

    def _lookups_below(self, tables: Sequence[RowSums], parts: Sequence[Sequence[int]]) -> ops.Lookups:
        """Returns the sums of each table as a lookup below of as many bags of one row, cut into micro-batches."""
        sequences = self.below.kernels.sequences
        return [
            (sequences[name], KeyedJaggedTensor((name,), own.rows).in_parts(cuts), own.sums)
            for name, own, cuts in zip(self.weights, tables, parts, strict=True)
        ]

    # ---- optimizer states, and rows by their ids

    def attach(self, states: dict[str, Sequence[TableState]]) -> Attached:
        if self._changes is not None:
            self._changes.states = states
        return self.below.attach(states)

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        """Returns whole tables by row: every rank reads the same rows at the same time, and gets all of them."""
        t = next(t for t, each in enumerate(self.tables) if each.name == table)
        return SharedRows(self.world, self.shards[t], self.tables[t].num_embeddings, self.below.rows(table, state))

    def grow(self, table: TableConfig) -> None:
        raise ValueError(
            f"table {table.name!r} is shared by {self.world.size} ranks and cannot grow: save a checkpoint, and make a "
            "collection with more rows"
        )

    def flush(self) -> None:
        self.below.flush()


def _distinct(keys: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the different ones of `keys`, none below 0, rising; and the place of each key among them."""
    bits = len(keys).bit_length()
    if not len(keys) or int(keys.max()) >> (62 - bits):
        return np.unique(keys, return_inverse=True)
    # numpy sorts numbers several times as fast as it finds their order.
    both = np.sort(keys << bits | np.arange(len(keys)))
    rising = both >> bits
    new = np.append(True, rising[1:] != rising[:-1])
    places = np.empty(len(keys), np.int64)
    places[both & ((1 << bits) - 1)] = new.cumsum() - 1
    return rising[new], places


def _joined(nodes: Sequence[RowSums], leaves: Sequence[int], num_parts: int) -> Cut:
    """Joins the sums of nodes, whose first leaves rise."""
    counts = np.zeros(num_parts + 1, np.int64)
    counts[np.array(leaves) + 1] = [len(own.rows) for own in nodes]
    own = RowSums(torch.cat([own.rows for own in nodes]), torch.cat([own.sums for own in nodes]))
    return Cut(own, tuple(counts.cumsum().tolist()))


def _divided(table: Cut, which: Tensor) -> tuple[Cut, Cut]:
    """Returns the sums that are not `which`, and those that are."""
    own, parts = table
    before = np.concatenate([[0], which.numpy().cumsum()])[list(parts)]
    rest = Cut(RowSums(own.rows[~which], own.sums[~which]), tuple((np.array(parts) - before).tolist()))
    return rest, Cut(RowSums(own.rows[which], own.sums[which]), tuple(before.tolist()))
