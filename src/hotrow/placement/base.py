"""A placement keeps the rows of a collection's tables; lookups, optimizers and checkpoints ask it for them.

    batch --announce--> rows on their way --take--> lease, slots --lookup, update--> lease.release --> rows may leave

| who | calls | when |
|---|---|---|
| `lookahead` | `announce`, `forget` | some batches before a batch is trained; after it, or if it does not come |
| `EmbeddingCollection` | `take` | in `forward`: the kernels find the rows in `arrays` |
| | `look_up` | after it: the kernels run |
| | `take_rows` | instead of `take` in `sequence`, which needs the row of every id |
| an optimizer | `new_state`, `attach` | once, when it is made; its states follow the rows |
| its `prepare()`, its `step()` | `prepare`; `update`, then the lease's `release` | after `backward` |
| checkpoints, `state_dict`, exports | `rows`, `flush`, `changes`, `begin_with` | between steps |

A lease keeps the rows of one batch in their slots until the batch is over. In DRAM a row's slot is its number and the
lease does nothing; other placements bring rows into slots before a lookup and take them back after the step. Nobody
asks which placement it has, and no placement can change a bit of a result (law 2). To write one, subclass `Placement`
and pass `EmbeddingCollection(memory=...)` a `PlacementFactory` that makes it; tests/laws/test_toy_placement.py is a
small one. Next: dram.py, tiers.py, device.py, copies.py, and parallel/sharded.py for rows on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from hotrow.base.records import Amount, Count
from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.types import Rule, row_key, to_float16
from hotrow.tables import WHOLE, Births, TableConfig

RowIds = slice | Tensor
"""Rows of a table: a range of them, or their ids [n], int64."""
Use = Literal["state_dict", "load_state_dict", "optimizer_state_dict", "copy", "freeze_some", "hot_copies"]
"""What some placements do not offer: see `Placement.check`."""
Kind = TypeVar("Kind", bound="Placement")


class Lease(Protocol):
    """Keeps the rows of one batch in their slots until the batch is over."""

    @property
    def released(self) -> bool: ...
    def release(self, *, updated: bool) -> None:
        """Ends the lease; updated: the batch's rows have changed. Later calls do nothing."""


class Rows(Protocol):
    """One array of a table (its weights, or an optimizer state) by row, wherever the rows lie."""

    shape: torch.Size
    """[N, ...]: all rows."""
    dtype: torch.dtype
    """The type that `read` returns: float32, or float16 if the table is float16. Split weights are joined."""
    piece_rows: int
    """How many rows to read or write at once."""

    def read(self, rows: RowIds, /) -> Tensor:
        """Returns these rows [n, ...], exactly; for rows in memory it may be a view."""

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        """Makes these rows `values`, of type `dtype`, or float32, which float16 tables round."""

    def held(self, rows: RowIds, /) -> Tensor | None:
        """Returns the places [n] among `rows`, rising, of those that this process holds; if None, it holds all."""
        return None

    def own(self, rows: RowIds, /) -> tuple[RowIds, Tensor]:
        """Returns those of `rows` that this process saves in a checkpoint, and their values, asking no other rank."""
        return rows, self.read(rows)

    def pieces(self, start: int = 0) -> Iterator[slice]:
        """Yields ranges of rows that together are the table from row `start` on."""
        num_rows, step = self.shape[0], self.piece_rows
        return (slice(first, min(first + step, num_rows)) for first in range(start, num_rows, step))

    def whole(self) -> Tensor:
        """Returns all rows as one tensor; for rows in memory it may be their own."""
        out = ops.allocate(*self.shape, dtype=self.dtype)
        for rows in self.pieces():
            out[rows] = self.read(rows)
        return out


class Placement(Protocol):
    """Keeps the rows of the tables of one collection. Override what differs from DRAM, or from the placement below.
    Several threads may look up at once, but no other thread may use the placement during `update` and `close`."""

    tables: tuple[TableConfig, ...]
    weights: dict[str, Tensor]
    """By table, what lookups read, by slot; an optimizer's param groups name these tensors."""
    low: dict[str, Tensor]
    """Lower halves [slots, D] int16 of the bfloat16 tables."""
    kernels: ops.KernelSet
    arrays: Any
    """All tables as the kernels take them: `weights` and `low`, or copies of them on another device."""
    device: torch.device = torch.device("cpu")
    """Where lookups run and their results lie."""
    below: Placement | None = None
    """The placement that this one stands in front of."""
    looks_ahead: bool = False
    """Whether `announce` does anything."""

    @property
    def stall_s(self) -> float:
        """Seconds that training batches waited for their rows."""
        return 0.0 if self.below is None else self.below.stall_s

    @property
    def changes(self) -> Changes | None:
        """What is known of changed rows, if checkpoints are to write those alone."""
        return None if self.below is None else self.below.changes

    def find(self, kind: type[Kind]) -> Kind | None:
        """Returns the placement of this kind, this one or one below it, for reports; None if there is none."""
        if isinstance(self, kind):
            return self
        return None if self.below is None else self.below.find(kind)

    def check(self, use: Use) -> None:
        """Raises an error that says why, and what to do instead, if this placement does not offer `use`."""
        return

    def agree(self, found: str | None) -> str | None:
        """Returns `found`, what speaks against a step; of tables over several ranks, what the first of them found."""
        return found if self.below is None else self.below.agree(found)

    # ---- batches

    def announce(self, sparse: KeyedJaggedTensor) -> None:
        """Brings the rows of a training batch that comes later."""
        return

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        """Lets go of an announced batch that will not come, or that has been trained."""
        return

    def fits(self, sparse: KeyedJaggedTensor) -> bool:
        """Returns whether a batch can be looked up at once; if not, a no-grad lookup is made in halves."""
        return True

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[Lease, KeyedJaggedTensor]:
        """Returns the lease of a batch whose rows are there now, and the batch as the kernels take it: with slots for
        ids, or, on a device whose kernels know the slots, with ids."""
        return NO_LEASE, sparse

    def take_rows(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[Lease, KeyedJaggedTensor]:
        """As `take`, for a lookup that does not pool."""
        return self.take(sparse, training=training)

    def look_up(self, kernels: ops.Kernels, slots: KeyedJaggedTensor, *, blame: KeyedJaggedTensor) -> Tensor:
        """Returns the output of `kernels` for a batch as `take` gave it; blame: the batch that errors name."""
        return kernels.lookup(self.arrays, slots, blame=blame)

    def prepare(self, lookups: ops.Lookups) -> Callable[[], object]:
        """Starts what `update` with these lookups needs of other ranks, and returns what waits for it; `update` waits
        too. The step may still be left out."""
        return lambda: None

    def update(self, lookups: ops.Lookups, attached: Attached, rules: Sequence[Rule]) -> None:
        """Applies the pending lookups, batches as `take` gave them, to the rows and states: `ops.Kernels.update`."""
        if lookups:
            self.kernels.pooled.update(self.arrays, attached.arrays, lookups, rules)

    # ---- optimizer states

    def new_state(self, table: str, row_shape: Sequence[int]) -> Tensor:
        """Returns zeros by slot for an optimizer state of a table; row_shape: of one row, (D,) or ()."""
        if self.below is not None:
            return self.below.new_state(table, row_shape)
        return ops.allocate(len(self.weights[table]), *row_shape)

    def attach(self, states: dict[str, Sequence[TableState]]) -> Attached:
        """Takes the states of an optimizer, by table, beside the weights, and gives them their initial values."""
        return Attached(states)

    # ---- rows by their ids

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        """Returns the weights of a table, or one of its attached states, by row; they may be read and changed."""

    def begin_with(self, table: str, links: Sequence[SavedLink]) -> bool:
        """Makes the rows of a table what `links` say, the last of them first. Each is read from its file until it
        changes, so the files may lose their names meanwhile, but must keep their bytes. Returns False, with nothing
        changed, if the placement cannot do this for the table as it is now."""
        return False

    def flush(self) -> None:
        """Brings everything that changed to where it is kept."""
        return

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns by table what the placement has counted."""
        return {} if self.below is None else self.below.counters()

    def close(self) -> None:
        """Removes what the placement made outside memory; nothing works afterwards."""
        if self.below is not None:
            self.below.close()


class PlacementFactory(Protocol):
    """What `EmbeddingCollection(memory=...)` takes: it says how to make a placement."""

    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Placement:
        """Makes the placement of `tables`, whose initial rows are functions of `seed`."""


# ---- helpers


class _NoLease:
    released = False

    def wait(self) -> None: ...
    def release(self, *, updated: bool) -> None: ...


NO_LEASE = _NoLease()
"""The lease of rows that never move."""


class TableState(NamedTuple):
    """An optimizer state of one table, by slot, and what it is for a row that was never touched:

    `(of_weight * w if of_weight else constant) + of_sign * sign(w)` for each element of the row.
    """

    name: str
    array: Tensor
    """float32 [slots, D] or [slots]."""
    constant: float = 0.0
    of_weight: float = 0.0
    of_sign: float = 0.0

    def of_untouched(self, table: TableConfig) -> TableState:
        """Returns this state for rows as the table makes them: a row that starts at zero has no weight to follow."""
        zero = not table.init.bound_for(table.num_embeddings)
        return self._replace(of_weight=0.0, of_sign=0.0) if zero else self

    def fill(self, rows: slice, weights: Tensor) -> None:
        """Gives rows of `array`, zeros so far, the values of untouched rows; weights: theirs, float32 [n, D]."""
        if self.of_weight:
            # + 0.0: a weight of zero gives +0.0, which is also what a table without any other weight has.
            torch.mul(weights, self.of_weight, out=self.array[rows]).add_(0.0)
        elif self.constant:
            self.array[rows] = self.constant
        if self.of_sign:
            self.array[rows].add_(weights.sign(), alpha=self.of_sign)


class Attached:
    """The states of an optimizer beside the rows they belong to: `attach` returns it, `update` takes it."""

    def __init__(self, states: dict[str, Sequence[TableState]], arrays: list[Any] | None = None) -> None:
        self.states = states
        """By table, in the tables' order."""
        self.arrays: list[Any] = [] if arrays is None else arrays
        """For each state, the arrays of all tables as the kernels take them."""
        if arrays is None:
            by_state = zip(*states.values(), strict=True)
            self.arrays = [ops.Arrays([state.array for state in each]) for each in by_state]


@dataclass(frozen=True)
class InitialRows:
    """The values of a table's rows before they are first written to, as checkpoints record them; see row_cache.h."""

    table: str
    seed: int
    bound: Amount
    zero_rows: Count
    dtype: Literal["float32", "float16"]
    """The type of the weights in files: "float32" (also for split ones) or "float16"."""
    states: dict[str, tuple[float, float, float]]
    """By name: constant, of_weight and of_sign of its `TableState`."""
    births: Births = WHOLE
    """Which rows of a whole table they are, if the table is a part of one."""

    @classmethod
    def of(cls, table: TableConfig, seed: int, states: Sequence[TableState]) -> InitialRows:
        """Returns those of `table` in a collection with this seed, and of its optimizer's states."""
        formulas = {state.name: (state.constant, state.of_weight, state.of_sign) for state in states}
        dtype: Literal["float32", "float16"] = "float16" if table.dtype == "float16" else "float32"
        bound = float(table.init.bound_for(table.num_embeddings))
        return cls(table.name, seed, bound, table.init.zero_rows, dtype, formulas, table.init.births)

    def formula(self, name: str) -> tuple[Any, ...]:
        """Returns all that the values of one array depend on."""
        own = self.states.get(name)
        return self.table, self.seed, self.bound, self.zero_rows, self.births, self.dtype, own

    def read(self, name: str, rows: RowIds, shape: torch.Size) -> Tensor:
        """Returns `rows` of the weights (name "weight") or of a state; shape: of the whole array."""
        if name == "weight":
            return self._weights(rows, shape[1])
        num_rows = len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start
        state = TableState(name, torch.zeros(num_rows, *shape[1:]), *self.states[name])
        # A state that follows the weights is as long as they are.
        follows = state.of_weight or state.of_sign
        state.fill(slice(0, num_rows), self._weights(rows, shape[1]).float() if follows else state.array)
        return state.array

    def _weights(self, rows: RowIds, dim: int) -> Tensor:
        key = row_key(self.seed, self.table)
        out = ops.uniform_rows(rows, dim, key=key, bound=self.bound, zero_rows=self.zero_rows, births=self.births)
        return to_float16(out) if self.dtype == "float16" else out


class Saved(NamedTuple):
    """The checkpoint that has every row of a collection as it is, except the changed ones."""

    path: Path
    manifest: Any
    """Its `hotrow.run.checkpoint_files.Manifest`."""


class SavedLink(NamedTuple):
    """Some rows of a table as a checkpoint has them: one file of its chain, or one for each part."""

    num_rows: int
    ids: tuple[Path, int]
    """The file with their ids, int64, rising, and the byte at which they begin."""
    arrays: dict[str, tuple[Path, int]]
    """By the name of an array, the file with its values in these rows, and the byte at which they begin."""


class Changes(Protocol):
    """What a placement knows of the rows that changed, so that a checkpoint need not write the others."""

    saved: Saved | None

    def initial(self, table: str) -> InitialRows:
        """Returns what the rows of a table are before they are first written to."""

    def num_changed(self, table: str, *, ever: bool) -> int:
        """Returns how many rows of a table were ever written to, or since `clear_changed`; of several ranks, how many
        of those that this one saves."""

    def changed_rows(self, table: str, *, ever: bool) -> Iterator[Tensor]:
        """Yields their ids, rising, in pieces to read at once."""

    def touched_rows(self, table: str) -> Iterator[Tensor]:
        """Yields the ids of all rows in this process that may differ from what they were made as, in such pieces."""

    def arrays_by_table(self) -> dict[str, list[str]]:
        """Returns by table the names of its arrays: "weight", and those of the attached states."""

    def writer(self, table: str) -> int | None:
        """Returns the rank that saves the changed rows of a table whose columns several ranks share; all ranks then ask
        for them, and read them, together. None if each rank saves rows of its own."""

    def clear_changed(self) -> None:
        """Forgets the changes so far: a checkpoint has every row as it is."""
