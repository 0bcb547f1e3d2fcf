"""EmbeddingCollection: all embedding tables of a model as one module, whose lookup is one native call.

A table is a plain tensor, not a Parameter: its gradient is never a tensor either. Backward keeps the pooled gradient
[B, output_dim] beside the batch it belongs to (`pending`), and the sparse optimizer (hotrow.optim) applies both.
Next: optim.py for the step, reference.py for the arithmetic.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hotrow import torch_tables
from hotrow.base.files import size
from hotrow.base.machine import available_memory_bytes
from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.reference import Layout, row_key, to_float16, widen, write_rows
from hotrow.placement.below import InDram, InTiers
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.placement.device import DeviceFlight, DeviceRows
from hotrow.placement.table_rows import RowsInTiers
from hotrow.placement.tiers import Flight, Tiers
from hotrow.tables import TableConfig, check_tables

BATCHES_TO_WARN_OF = 3
"""So many batches without a step are a warning: it may have been forgotten."""
ADDRESS_SPACE = 1 << 47
"""Bytes that a process can address on x86-64; of arm64 at least as many."""
PIECE_FLOATS = 1 << 22
"""A table that is converted from one storage into another goes through float32 in pieces of so many weights."""


class Pending(NamedTuple):
    """A lookup and the gradient of its output, waiting for the optimizer."""

    kernels: ops.Kernels
    """What updates the rows: those of the collection, or of one feature's sequences; without tables frozen then."""
    sparse: KeyedJaggedTensor
    grad: Tensor
    """[B, output_dim], of a sequence [L, D]; float32."""
    flight: Flight | DeviceFlight | None = None
    """In tiers and on devices: what keeps the rows in their slots, which stand in `sparse` for ids."""


class StoredTable(NamedTuple):
    """The weights of one table as they lie in memory."""

    weight: Tensor
    """[N, D] float32, float16 or, of split weights, the upper halves as bfloat16: what lookups read."""
    low: Tensor | None
    """[N, D] int16: the lower halves of split weights, else None. Only updates read them."""

    @property
    def shape(self) -> torch.Size:
        """[N, D]."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that `read` gives."""
        return torch.float32

    def pieces(self, start: int = 0) -> Iterator[slice]:
        """Ranges of rows that together are the table from row `start` on, each of about PIECE_FLOATS weights."""
        num_rows, dim = self.weight.shape
        step = max(1, PIECE_FLOATS // dim)
        return (slice(first, min(first + step, num_rows)) for first in range(start, num_rows, step))

    def read(self, rows: slice | Tensor) -> Tensor:
        """These rows, a range or ids [n], as float32, exactly."""
        return widen(self.weight[rows], None if self.low is None else self.low[rows])

    def write(self, rows: slice | Tensor, values: Tensor) -> None:
        """These rows, a range or ids [n], from float32: exactly, but for float16, which rounds."""
        write_rows(self.weight, self.low, rows, values)


class Copies(Protocol):
    """Copies of some rows of every table, with the states of its optimizer."""

    arrays: ops.Arrays
    states: list[ops.Arrays]
    """For each state of the optimizer."""
    kernels: ops.Kernels
    """What looks them up and updates them, where they lie."""
    sequence_kernels: dict[str, ops.Kernels]
    """By feature."""

    def slots(self, sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with rows of the copies for ids."""

    def updated(self) -> None:
        """A step changes them."""


class EmbeddingCollection(nn.Module):
    """Tables of embedding rows, looked up and pooled together.

    emb(sparse)[b, columns of feature f] = pool(rows of the ids of f in sample b), side by side in the tables' order.

        tables:  user [N_u, 16]: features (user,)      item [N_i, 8]: features (clicked, shown)
        output:  [ user 16 | clicked 8 | shown 8 ]     output_dim = 32

    tables: one TableConfig each. memory: None or "dram": all rows in DRAM; a `Memory`: part of them, the rest on disk,
    with the same bits in every result, but for `state_dict` and copies, which such a collection refuses; a
    `DeviceMemory`: lookups and updates in slots of a device, before all rows in DRAM or in tiers (docs/gpu.md). seed:
    of the initial rows, each a function of (seed, table name, row, column) alone. `state_dict()` holds
    `<table>.weight`: float32 also of bfloat16 tables, whose halves it joins and loading splits again, without loss;
    float16 of float16 tables. `parameters()` gives one Parameter [0, D] per table: it has no values, and its
    `requires_grad` says whether the table is trained, so that `requires_grad_(False)`, on the collection or on a module
    around it, freezes its tables.

    `sequence(sparse)` gives rows without pooling. Several forward passes before one optimizer step, sequences among
    them, count as one batch whose bags stand in forward order; a forward under torch.no_grad leaves nothing behind.
    Python threads may use different collections at once, and look up the same one; an optimizer step must be alone with
    its collection. A forked child computes on one thread, and cannot use its parent's collection in tiers.
    What else a user of torch.nn may expect: docs/python.md.
    Raises ValueError for repeated names, for an unknown `memory` and for tables larger than the memory there is.
    """

    device_rows: DeviceRows | None = None
    """Slots in device memory, where the collection was made with them."""
    copies: Copies | None = None
    """What lookups and updates work on instead of the tables, whose rows are out of date then (hot/copies.py)."""

    def __init__(
        self, tables: Iterable[TableConfig], *, memory: Memory | DeviceMemory | str | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if not isinstance(memory, Memory | DeviceMemory) and memory not in (None, "dram"):
            raise ValueError(
                f"memory is {memory!r}; pass None or 'dram' (all rows in DRAM), hotrow.Memory or hotrow.DeviceMemory"
            )
        self.tables = check_tables(tables)
        for table in self.tables:  # not by register_parameter, which refuses dots; state_dict has the same names
            self._parameters[f"{table.name}.weight"] = nn.Parameter(torch.empty(0, table.embedding_dim))
        self.seed = seed
        self.tiers: Tiers | None = None
        below = memory.below if isinstance(memory, DeviceMemory) else memory
        if isinstance(below, Memory):
            self.tiers = Tiers(self.tables, Layout.of(self.tables), below, seed=seed)
        else:
            _check_memory(self.tables)
        self.weights = self._new_weights() if self.tiers is None else self.tiers.weights
        """Rows of each table [N, D] in its dtype, by table name: what lookups read; updated in place. In tiers they are
        indexed by slot, not by row, and only slots in use mean anything."""
        self.low = self._new_low() if self.tiers is None else self.tiers.low
        """Lower halves [N, D] int16 of the bfloat16 tables: with the upper ones in `weights`, float32 bit for bit. They
        are here and not in an optimizer because initial rows and checkpoints are float32 before there is one."""
        for table in self.tables if self.tiers is None else ():
            _fill_initial_rows(self.stored(table.name), table, seed)
        if isinstance(memory, DeviceMemory):
            self.device_rows = DeviceRows(self.tables, Layout.of(self.tables), memory, self._below())
        self._prepare()

    def _new_weights(self) -> dict[str, Tensor]:
        shapes = {table: (table.num_embeddings, table.embedding_dim) for table in self.tables}
        return {t.name: ops.allocate(*shape, dtype=getattr(torch, t.dtype)) for t, shape in shapes.items()}

    def _new_low(self) -> dict[str, Tensor]:
        split = [name for name, weight in self.weights.items() if weight.dtype == torch.bfloat16]
        return {name: ops.allocate(*self.weights[name].shape, dtype=torch.int16) for name in split}

    def _below(self) -> InDram | InTiers:
        """What slots of a device stand before."""
        if self.tiers is not None:
            return InTiers(self.tiers)
        low = {name: [half] for name, half in self.low.items()}
        return InDram({name: [weight, *low.get(name, [])] for name, weight in self.weights.items()})

    @classmethod
    def from_torch(cls, modules: nn.Module | Mapping[str, nn.Module] | nn.ModuleDict) -> EmbeddingCollection:
        """The tables of an nn.EmbeddingBag or nn.Embedding, or of a dict of them, with their weights to the bit.

            emb = EmbeddingCollection.from_torch({"user": nn.EmbeddingBag(100, 8, mode="mean"), "item": ...})

        Each is the table and the feature of its name in the dict; a single one is "embedding". Float16 and bfloat16
        weights give tables of that dtype, weights that do not require grad a frozen table; `sparse=` and
        `include_last_offset=` have no meaning here. The tables lie in DRAM: for tiers, save a checkpoint of this
        collection and load it into one with Memory.
        Raises ValueError, saying how to do without, for padding_idx, max_norm, scale_grad_by_freq and max pooling, for
        float64 and for other modules.
        """
        return cls._of(torch_tables.from_torch(modules))

    @classmethod
    def from_torchrec(cls, collection: Any) -> EmbeddingCollection:
        """As `from_torch`, of a torchrec EmbeddingBagCollection or EmbeddingCollection, with its names and pooling.

        Per-id weights are used if a batch has them, also if the collection was made with is_weighted=False.
        """
        return cls._of(torch_tables.from_torchrec(collection))

    @classmethod
    def _of(cls, given: Sequence[torch_tables.Given]) -> EmbeddingCollection:
        emb = cls([table.config for table in given])
        for config, weight, trained in given:
            stored = emb.stored(config.name)
            for rows in stored.pieces():
                stored.write(rows, weight[rows].cpu().float())
            emb.switches[config.name].requires_grad_(trained)
        return emb

    def to_torch(self) -> dict[str, nn.EmbeddingBag]:
        """A copy of each table as an nn.EmbeddingBag of its pooling, float32 but for float16 tables, by name.

        Raises ValueError in tiers, whose tables may be larger than memory.
        """
        modules = {}
        for number, table in enumerate(self.tables):
            weight = self._whole(table.name)
            bag = nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode=table.pooling, _weight=weight.clone())
            bag.weight.requires_grad_(number not in self.frozen)
            modules[table.name] = bag
        return modules

    def torchrec_state_dict(self, kind: str = "embedding_bags") -> dict[str, Tensor]:
        """The tables under torchrec's names, for load_state_dict of an EmbeddingBagCollection with tables of ours.

        kind: "embedding_bags", or "embeddings" for torchrec's EmbeddingCollection. Raises ValueError in tiers.
        """
        return {f"{kind}.{name}.weight": self._whole(name) for name in self.weights}

    def grow(self, table: str, num_embeddings: int) -> None:
        """Give `table` rows up to `num_embeddings`; those it has keep their numbers, values and optimizer states.

        New rows are what they would be had they been there from the start and never looked up: the same function of
        (seed, table name, row, column), within the bound of the table as it was created, which its TableConfig in
        `tables` now says; their optimizer states are initial. The tensors in `weights` and of the optimizers stay the
        same objects, longer: param groups, schedulers and state dicts go on. It may be called at any time, also between
        forward and step and while batches are announced, but no other thread may use the collection meanwhile.

        The table's arrays move to larger memory: for a moment they are there twice. In tiers more rows take disk, two
        bits of memory each, and of a table that lies in memory whole their slots; a warning says what goes over the
        budget. Checkpoints fit collections whose tables have as many rows.

        Raises ValueError for an unknown table and for fewer rows than it has, MemoryError where there is no memory;
        then nothing has changed. Raises StoreError where the store cannot grow, after which it does no more.
        """
        self.check_tables_are_live()
        names = [config.name for config in self.tables]
        if table not in names:
            raise ValueError(f"there is no table {table!r} to grow; the tables are {', '.join(names)}")
        old = self._table(table)
        if not isinstance(num_embeddings, int) or num_embeddings < old.num_embeddings:
            raise ValueError(
                f"table {table!r} has {old.num_embeddings:,} rows and cannot be given {num_embeddings!r}: tables only "
                "grow; for fewer rows make a new collection"
            )
        if self.device_rows is not None:
            raise ValueError(f"table {table!r} has slots on a device and cannot grow: make a collection with more rows")
        bound = old.init.bound_for(old.num_embeddings)
        new = replace(old, num_embeddings=num_embeddings, init=replace(old.init, bound=bound))
        if self.tiers is not None:
            self.tiers.grow(new)
        else:
            weight, low = self.stored(table)
            states = [state for optimizer in self.optimizers for state in optimizer.state[weight].values()]
            arrays = [array for array in (weight, low, *states) if array is not None]
            for array, longer in [(array, _longer(array, num_embeddings)) for array in arrays]:
                array.data = longer
            _fill_initial_rows(self.stored(table), new, self.seed, start=old.num_embeddings)
        self.tables = tuple(new if config is old else config for config in self.tables)
        self._take_arrays()
        for optimizer in self.optimizers:
            optimizer.follow_growth(table, old.num_embeddings)

    def _prepare(self) -> None:
        layout = Layout.of(self.tables)
        self.feature_names = tuple(feature.name for feature in layout.features)
        self.output_dim = layout.width
        make: Any = ops.Kernels if self.device_rows is None else self.device_rows.make_kernels
        self.kernels: ops.Kernels = make(layout)
        self.sequence_kernels: dict[str, ops.Kernels] = {
            feature.name: make(layout.sequence_of(feature.name), among=layout) for feature in layout.features
        }
        self._partial: dict[frozenset[int], ops.Kernels] = {}  # by the tables that they update
        self._take_arrays()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Sparse optimizers of these tables, which grow with them."""
        self.newest_optimizer: Callable[[], Any] = _nobody
        """Gives the one that was made last, the only one that may step; None where it is gone."""
        self._pending: list[tuple[int, Pending]] = []
        self._waiting = Waiting()
        self._forwards = itertools.count()  # its next() is one step for Python's threads, += is not
        # Autograd calls backward only below an input that requires grad, and the tables are none.
        self._leaf = torch.zeros(0, requires_grad=True)
        self._frozen_leaf = torch.zeros(0)

    def _take_arrays(self) -> None:
        self.arrays = ops.Arrays(list(self.weights.values()), [self.low.get(name) for name in self.weights])

    def forward(self, sparse: KeyedJaggedTensor | Tensor) -> Tensor:
        """Pooled rows [B, output_dim], float32.

        sparse: every feature's bags, keys in any order, features of other collections ignored; torchrec's
        KeyedJaggedTensor will do; or an integer tensor [B, F] with one id per feature, columns as `feature_names`.

        Raises ValueError for a missing feature, and for an id outside its table (feature, sample, id, rows).
        """
        if isinstance(sparse, Tensor):
            sparse = KeyedJaggedTensor.from_dense(self.feature_names, sparse)
        sparse = KeyedJaggedTensor.of(sparse)
        if halves := self._halves(sparse):
            return torch.cat([self(half) for half in halves])
        flight, slots = self._take(sparse)
        out = self._look_up(self.live_kernels, slots, blame=sparse, flight=flight)
        if flight is not None and not out.requires_grad:
            flight.release(updated=False)
        return out

    def _halves(self, sparse: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        """A batch that is scored in two, where it looks up more rows than there are slots on the device; else none."""
        if self.device_rows is None or torch.is_grad_enabled() or not self.device_rows.is_crowded_by(sparse):
            return []
        middle = sparse.stride // 2
        return [sparse.samples(0, middle), sparse.samples(middle, sparse.stride)]

    @property
    def in_slots(self) -> Tiers | DeviceRows | None:
        """What brings rows before their batches; None where lookups find all of them by their ids."""
        return self.tiers if self.device_rows is None else self.device_rows

    def _take(self, sparse: KeyedJaggedTensor) -> tuple[Flight | DeviceFlight | None, KeyedJaggedTensor]:
        """What keeps the rows of a batch in their slots, and the batch with slots for ids."""
        if self.copies is not None:
            return None, self.copies.slots(sparse)
        if self.in_slots is None:
            return None, sparse
        training = torch.is_grad_enabled() and len(self.frozen) < len(self.tables)
        flight, slots = self.in_slots.take(sparse, training=training)
        if self.device_rows is not None:
            self.arrays = self.device_rows.arrays
        return flight, slots

    def sequence(self, sparse: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The row of every id, not pooled: feature -> (values [L, D] float32, offsets int64 [B + 1]).

            values[offsets[b]:offsets[b + 1]] = rows of the ids of the feature in sample b, in their order

        For each feature of this collection among `sparse.keys`; per-sample weights play no part. Gradients go the way
        of `forward`'s, into the same `step()`. Raises ValueError for an id outside its table.
        """
        sparse = KeyedJaggedTensor.of(sparse)
        if halves := self._halves(sparse):
            first, second = map(self.sequence, halves)
            return {name: _joined(own, second[name]) for name, own in first.items()}
        found = {}
        flight, slots = self._take(sparse)
        kernels = self.sequence_kernels if self.copies is None else self.copies.sequence_kernels
        for name in self.feature_names:
            if name in sparse.keys:
                values, offsets, _ = slots.bags(name)
                single = KeyedJaggedTensor((name,), values)
                found[name] = self._look_up(kernels[name], single, blame=sparse, flight=flight), offsets
        if flight is not None and not any(values.requires_grad for values, _ in found.values()):
            flight.release(updated=False)
        return found

    @property
    def pooled_kernels(self) -> tuple[ops.Kernels, ...]:
        """What updates the rows of a `forward`: all of them, or those of some tables."""
        return self.live_kernels, *self._partial.values()

    @property
    def switches(self) -> dict[str, nn.Parameter]:
        """By table, the Parameter without values whose `requires_grad` says whether the table is trained."""
        return {t.name: own for t, own in zip(self.tables, self._parameters.values(), strict=True) if own is not None}

    @property
    def frozen(self) -> frozenset[int]:
        """The numbers of the tables that are not trained: those whose Parameter does not require grad."""
        switches = self._parameters.values()  # not by name: every lookup asks
        return frozenset(t for t, own in enumerate(switches) if own is not None and not own.requires_grad)

    def kernels_without(self, kernels: ops.Kernels, frozen: frozenset[int]) -> ops.Kernels | None:
        """`kernels` for an update that leaves the `frozen` tables alone; None where it updates no other."""
        kept = tuple(feature for feature in kernels.layout.features if feature.table not in frozen)
        if len(kept) == len(kernels.layout.features):
            return kernels
        if not kept:
            return None
        if self.device_rows is not None or self.copies is not None:
            raise ValueError(
                "some of the tables are frozen and others not, which tables on a device and copies of hot rows do not "
                "offer: freeze all, or make one EmbeddingCollection of the tables that stay and one of the others"
            )
        numbers = frozenset(feature.table for feature in kept)
        if numbers not in self._partial:
            self._partial[numbers] = ops.Kernels(Layout(kept, self.output_dim), among=self.kernels.layout)
        return self._partial[numbers]

    @property
    def live_arrays(self) -> ops.Arrays:
        """What lookups read and updates write: the tables' rows, or their copies."""
        return self.arrays if self.copies is None else self.copies.arrays

    @property
    def live_kernels(self) -> ops.Kernels:
        """What looks up and updates `live_arrays`."""
        return self.kernels if self.copies is None else self.copies.kernels

    def check_tables_are_live(self) -> None:
        """Raises RuntimeError where copies of hot rows are live and the tables are out of date."""
        if self.copies is not None:
            raise RuntimeError(
                "the tables' hot rows are out of date, their copies on the fast device are live: read and change "
                "tables inside `with copies.flushed()`, or after copies.give_back()"
            )

    def _look_up(
        self,
        kernels: ops.Kernels,
        sparse: KeyedJaggedTensor,
        *,
        blame: KeyedJaggedTensor,
        flight: Flight | DeviceFlight | None = None,
    ) -> Tensor:
        number = self._waiting.newest = next(self._forwards)
        frozen = self.frozen
        leaf = self._leaf if any(f.table not in frozen for f in kernels.layout.features) else self._frozen_leaf
        return _Lookup.apply(leaf, sparse.weights, sparse, blame, self, kernels, number, flight, frozen)  # type: ignore[no-any-return, no-untyped-call]

    def new_state(self, shape: torch.Size, value: float) -> Tensor:
        """An optimizer state of every row at `value`; in tiers address space for it, filled row by row when needed."""
        tensor = ops.allocate(*shape, sparse=self.tiers is not None)
        # Zero pages are not touched: rows that never train cost no memory.
        return tensor.fill_(value) if value and self.tiers is None else tensor

    def stored(self, name: str) -> StoredTable:
        """The table `name` as it lies in memory; with slots on a device, after they were written back to it."""
        self.check_tables_are_live()
        if self.device_rows is not None:
            self.device_rows.flush()
        return StoredTable(self.weights[name], self.low.get(name))

    def float32(self, name: str) -> Tensor:
        """The table `name` in float32, exactly: its own memory where that is its dtype, else a copy."""
        if self.tiers is not None:
            return self.read_rows(name, slice(0, self._table(name).num_embeddings))
        table = self.stored(name)
        if table.weight.dtype == torch.float32:
            return table.weight
        out = ops.allocate(*table.weight.shape)
        for rows in table.pieces():
            out[rows] = table.read(rows)
        return out

    def _table(self, name: str) -> TableConfig:
        return next(table for table in self.tables if table.name == name)

    def rows(self, name: str) -> RowsInTiers:
        """The weights of the table `name` of a collection in tiers, to be read and written piece by piece."""
        self.check_tables_are_live()
        assert self.tiers is not None
        if self.device_rows is not None:
            self.device_rows.flush()
        return RowsInTiers(self.tiers, list(self.weights).index(name), self.weights[name], self.low.get(name))

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Rows of the table `name` as float32 [n, D], a copy, wherever they lie."""
        if self.tiers is None:
            return self.stored(name).read(rows).clone()
        start, stop, _ = rows.indices(self._table(name).num_embeddings)
        return self.rows(name).read(slice(start, stop)).float()

    @property
    def pending(self) -> list[Pending]:
        """Batches whose gradients await `optimizer.step()`, in the order of their forward passes."""
        if self.device_rows is not None:
            self.device_rows.refresh()
        return [pending for _, pending in sorted(self._pending, key=lambda entry: entry[0])]

    def clear_pending(self, *, updated: bool = False) -> None:
        """Drops the pending gradients: what `step()` (updated: it changed their rows) and `zero_grad()` end with."""
        for _, pending in self._pending:
            if pending.flight is not None:
                pending.flight.release(updated=updated)
        self._pending.clear()
        self._waiting.num_batches = 0

    def _add_pending(self, number: int, pending: Pending) -> None:
        self._pending.append((number, pending))
        if not self._waiting.count(number):
            return
        optimizer = self.newest_optimizer()
        cure = (
            f"call step() of the {type(optimizer).__name__} that was made for them"
            if optimizer is not None
            else "make an optimizer of hotrow for them, such as hotrow.Adagrad(emb, lr=0.05), and call its step(): "
            "those of torch do not see tables"
        )
        warnings.warn(
            f"{self._waiting.num_batches} batches wait for the optimizer of tables "
            f"{', '.join(table.name for table in self.tables)}; their gradients and batches stay in memory, and the "
            f"next step() applies them as one: {cure} after each batch. If you add up several batches on purpose, "
            "ignore this; it is said once",
            stacklevel=2,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Drops the pending gradients, as the optimizer's `zero_grad()`."""
        super().zero_grad(set_to_none)
        self.clear_pending()

    def scale_pending(self, factor: float) -> None:
        """Multiplies the pending gradients by `factor`; the tensors backward was given stay as they are."""
        self._pending = [(number, p._replace(grad=p.grad * factor)) for number, p in self._pending]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        for name in self.weights:
            destination[f"{prefix}{name}.weight"] = self._whole(name)

    def _whole(self, name: str) -> Tensor:
        """The table `name` as float32, of a float16 table float16: its own memory but for split tables."""
        self.check_tables_are_live()
        if self.tiers is not None:
            raise ValueError(
                "a collection in tiers has no state_dict, since its tables may be larger than memory; "
                "hotrow.save_checkpoint writes them piece by piece, read_rows() gives some rows"
            )
        return self.float32(name) if name in self.low else self.stored(name).weight

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.tiers is not None:
            raise ValueError(
                "a collection in tiers takes no state_dict; hotrow.load_checkpoint fills it piece by piece"
            )
        wanted = {f"{prefix}{name}.weight": self.stored(name) for name in self.weights}
        for key, table in wanted.items():
            shape = tuple(table.weight.shape)
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != shape:
                error_msgs.append(f"{key} has shape {tuple(state_dict[key].shape)}; the table is {shape}")
            elif (beyond := _beyond_float16(table, state_dict[key])) is not None:
                row, weight = beyond
                error_msgs.append(
                    f"{key}: row {row:,} has a weight of {weight:,.0f}, and float16 ends at 65,504; "
                    "keep such a table in float32 or bfloat16 (TableConfig.dtype)"
                )
            else:
                for rows in table.pieces():
                    table.write(rows, state_dict[key][rows].float())
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in wanted)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingCollection:  # noqa: FBT001, FBT002
        """What `.half()`, `.to(...)`, `.cuda()` and their like call: tables stay as they are, and a warning says so."""
        probe = torch.zeros(1)
        changed = fn(probe)
        devices = {"cpu", *([] if self.device_rows is None else [self.device_rows.device.type])}
        if changed.device.type not in devices:
            self._say_unchanged(
                f"do not move to {changed.device}: they stay where memory= of the collection puts them. Move what "
                f"they give, emb(ids).to({str(changed.device)!r}); hotrow.DeviceMemory keeps rows on a GPU"
            )
        if changed.dtype != probe.dtype:
            self._say_unchanged(
                f"do not become {changed.dtype}: they keep the storage they were made with (TableConfig.dtype: "
                "float32, float16 or bfloat16), and give float32"
            )
        if changed.is_shared():  # type: ignore[no-untyped-call]
            self._say_unchanged("are not shared with other processes: train them in one, on several threads")
        return self

    def _say_unchanged(self, what: str) -> None:
        warnings.warn(f"the tables of this EmbeddingCollection {what}", stacklevel=2)

    def _replicate_for_data_parallel(self) -> EmbeddingCollection:
        raise TypeError(
            "nn.DataParallel cannot copy an EmbeddingCollection to its devices: keep it out of the model that is "
            "replicated, and pass that one the pooled rows"
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies: all but native handles and what belongs to steps under way."""
        _refuse_averaging()
        self.check_tables_are_live()
        if self.tiers is not None:
            raise TypeError("a collection in tiers cannot be copied or pickled: its files belong to it alone")
        if self.device_rows is not None:
            raise TypeError("a collection with slots on a device cannot be copied or pickled; copy its state_dict()")
        made = ("kernels", "sequence_kernels", "arrays", "optimizers", "newest_optimizer", "_partial")
        passing = ("_pending", "_waiting", "_forwards", "_leaf", "_frozen_leaf")
        return {name: value for name, value in self.__dict__.items() if name not in made + passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuilds what `__getstate__` left out, around the copied tables."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def extra_repr(self) -> str:
        """One line per table."""
        frozen = self.frozen
        return "\n".join(
            f"{t.name}: [{t.num_embeddings}, {t.embedding_dim}] {t.dtype} {t.pooling} of {', '.join(t.feature_names)}"
            + (", frozen" if number in frozen else "")
            for number, t in enumerate(self.tables)
        )


class Waiting:
    """How many batches wait for an optimizer: forward passes that one or several backward passes have been through.

    Forward passes without a backward pass between them are one batch: towers, or a positive and its negatives.
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self.newest = -1
        """Number of the latest forward pass."""
        self._newest_counted, self._said = -1, False

    def count(self, number: int) -> bool:
        """Count the batch of forward pass `number`; whether it is the first ever that is one too many."""
        if number > self._newest_counted:
            self.num_batches += 1
            self._newest_counted = self.newest
        if self.num_batches < BATCHES_TO_WARN_OF or self._said:
            return False
        self._said = True
        return True


def _nobody() -> None:
    return None


AVERAGING = {
    "torch.optim.swa_utils": "torch.optim.swa_utils.AveragedModel",
    "lightning.pytorch.callbacks.stochastic_weight_avg": "Lightning's StochasticWeightAveraging",
    "pytorch_lightning.callbacks.stochastic_weight_avg": "Lightning's StochasticWeightAveraging",
}
"""What copies a module to average its parameters, by the name of the Python module it stands in."""


def _refuse_averaging() -> None:
    """Raises TypeError if one of AVERAGING makes the copy: it averages parameters(), and no table is among them."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (what := AVERAGING.get(frame.f_globals.get("__name__", ""))) is not None:
            raise TypeError(
                f"{what} averages parameters(), and the tables of an EmbeddingCollection are not among them: average "
                "the module without them, AveragedModel(model.head); docs/python.md shows how to average tables"
            )
        frame = frame.f_back


def _check_memory(tables: Sequence[TableConfig]) -> None:
    """Raises ValueError where tables do not fit in the memory there is, of which those that start at zero need none."""
    filled = sum(table.num_bytes for table in tables if table.init.bound_for(table.num_embeddings))
    every = sum(table.num_bytes for table in tables)
    available = available_memory_bytes()
    if filled <= available and every < ADDRESS_SPACE:
        return
    largest = max(tables, key=lambda table: table.num_bytes)
    raise ValueError(
        f"the tables are {size(every)}, and {size(available)} of memory are available; the largest, {largest.name!r}, "
        f"has {largest.num_embeddings:,} rows of {largest.embedding_dim} {largest.dtype}: keep part of the rows on "
        "disk (memory=hotrow.Memory(dram=..., ssd=...)), or give the tables fewer rows or columns"
    )


def _beyond_float16(table: StoredTable, weights: Tensor) -> tuple[int, float] | None:
    """The first row [D] of a float16 table with a weight that would become infinite, and that weight."""
    if table.weight.dtype != torch.float16:
        return None
    for rows in table.pieces():
        given = weights[rows].float()
        lost = given.isfinite() & to_float16(given).isinf()
        if lost.any():
            row = int(lost.any(dim=1).nonzero()[0])
            return rows.start + row, float(given[row][lost[row]][0])
    return None


def _joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Sequences of two batches as of one: (values [L, D], offsets [B + 1])."""
    offsets = torch.cat([first[1], second[1][1:] + first[1][-1]])
    return torch.cat([first[0], second[0]]), offsets


def _longer(array: Tensor, num_rows: int) -> Tensor:
    """A copy of `array` [N, ...] with `num_rows`, zeros beyond N."""
    longer = ops.allocate(num_rows, *array.shape[1:], dtype=array.dtype)
    step = max(1, PIECE_FLOATS // max(1, array[:1].numel()))
    for start in range(0, len(array), step):
        piece = array[start : start + step]
        if piece.view(torch.int16).any():  # pages that were never touched stay so
            longer[start : start + len(piece)] = piece
    return longer


def _fill_initial_rows(stored: StoredTable, table: TableConfig, seed: int, *, start: int = 0) -> None:
    bound, key = table.init.bound_for(table.num_embeddings), row_key(seed, table.name)
    if not bound:
        return  # zero as allocated, and no page touched
    for rows in stored.pieces(start):
        plain = stored.weight.dtype == torch.float32
        values = stored.weight[rows] if plain else torch.empty(stored.weight[rows].shape)
        ops.fill_uniform(values, key=key, bound=bound, zero_rows=table.init.zero_rows, first_row=rows.start)
        if not plain:
            stored.write(rows, values)


class _Lookup(torch.autograd.Function):
    """The lookup in the autograd graph; `leaf` is there to be differentiated, and gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        sample_weights: Tensor | None,
        sparse: KeyedJaggedTensor,
        blame: KeyedJaggedTensor,
        emb: EmbeddingCollection,
        kernels: ops.Kernels,
        number: int,
        flight: Flight | DeviceFlight | None,
        frozen: frozenset[int],
    ) -> Tensor:
        ctx.sparse, ctx.emb, ctx.kernels, ctx.number, ctx.flight = sparse, emb, kernels, number, flight
        ctx.frozen = frozen
        ctx.copies = emb.copies
        return kernels.lookup(emb.live_arrays, sparse, blame=blame)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "EmbeddingCollection cannot be differentiated twice: call backward without create_graph=True"
            )
        if ctx.flight is not None and ctx.flight.released:
            raise RuntimeError(
                "the rows of this lookup have left their slots: an optimizer step or zero_grad() came between its "
                "forward and this backward; call them in the order forward, backward, step"
            )
        if ctx.copies is not ctx.emb.copies:  # whose rows are numbered otherwise
            raise RuntimeError(
                "copies of hot rows became live, or the tables again, between this lookup's forward and its backward; "
                "call forward, backward and step on one side"
            )
        grad = grad.detach()
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        emb: EmbeddingCollection = ctx.emb
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = ctx.kernels.weight_gradient(emb.live_arrays, ctx.sparse, grad)
        updates = emb.kernels_without(ctx.kernels, ctx.frozen)
        if updates is not None:
            if updates is not ctx.kernels:
                grad = _zeroed(grad, ctx.kernels.layout, ctx.frozen)
            emb._add_pending(ctx.number, Pending(updates, ctx.sparse, grad, ctx.flight))
        return None, weight_grad, *[None] * 7


def _zeroed(grad: Tensor, layout: Layout, frozen: frozenset[int]) -> Tensor:
    """A copy of a pooled gradient that is 0 for features of the frozen tables, as if it had not been computed."""
    grad = grad.clone()
    for feature in layout.features:
        if feature.table in frozen:
            grad[:, feature.columns] = 0
    return grad
