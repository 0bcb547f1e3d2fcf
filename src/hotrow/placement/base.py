"""What a placement is: it keeps the rows of a collection's tables, and lookups, optimizers and checkpoints ask it.

    ids of a batch --take--> lease, slots --kernels on arrays--> pooled rows ... update --> lease.release

A collection, its optimizers and checkpoints never ask which placement they have. In DRAM a row's slot is its number and
the lease does nothing; other placements bring rows into slots before a lookup and take them back after the step. No
placement can change a bit of a result (law 2). To write one, subclass `Placement` and give `place` of a recipe that
makes it: docs/numerics.md shows how, tests/laws/test_toy_placement.py is a small one. Next: dram.py, tiers.py,
device.py, copies.py.
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
from hotrow.kernels.reference import Layout, Rule, row_key, to_float16, uniform_rows, widen, write_rows
from hotrow.tables import TableConfig

PIECE_BYTES = 1 << 24
"""Rows in memory are read and written in pieces of at most this size, so that a conversion needs little memory."""
RowIds = slice | Tensor
"""Rows of a table: a range of them, or their ids [n], int64."""
Use = Literal["state_dict", "load_state_dict", "optimizer_state_dict", "copy", "freeze_some", "hot_copies"]
"""What not every placement offers: `Placement.check`."""
SOME_FROZEN = (
    "some of the tables are frozen and others not, which tables on a device and copies of hot rows do not offer: "
    "freeze all, or make one EmbeddingCollection of the tables that stay and one of the others"
)
"""Why kernels that run beside the tables refuse "freeze_some"."""
Kind = TypeVar("Kind", bound="Placement")


class Lease(Protocol):
    """Keeps the rows of one batch in their slots until the batch is over."""

    released: bool

    def release(self, *, updated: bool) -> None:
        """Ends the lease; updated: the batch's rows have changed. Later calls do nothing."""


class _NoLease:
    released = False

    def wait(self) -> None:
        """Returns at once: the rows are always there."""

    def release(self, *, updated: bool) -> None:
        """Does nothing: the rows stay."""


NO_LEASE = _NoLease()
"""The lease of rows that never move."""


class Rows(Protocol):
    """One array of a table (its weights, or an optimizer state) by row, wherever the rows lie."""

    shape: torch.Size
    """[N, ...]: all rows."""
    dtype: torch.dtype
    """The type of what `read` gives: float32, or float16 if the table is float16. Split weights are joined."""
    piece_rows: int
    """How many rows to read or write at once."""

    def read(self, rows: RowIds, /) -> Tensor:
        """Returns these rows [n, ...], exactly; of rows in memory it may be a view."""

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        """Makes these rows `values`, of type `dtype`, or float32, which float16 tables round."""

    def pieces(self, start: int = 0) -> Iterator[slice]:
        """Yields ranges of rows that together are the table from row `start` on."""
        num_rows, step = self.shape[0], self.piece_rows
        return (slice(first, min(first + step, num_rows)) for first in range(start, num_rows, step))

    def whole(self) -> Tensor:
        """Returns all rows as one tensor; of rows in memory it may be their own."""
        out = ops.allocate(*self.shape, dtype=self.dtype)
        for rows in self.pieces():
            out[rows] = self.read(rows)
        return out


class RowsInMemory(Rows):
    """The rows of a tensor [N, ...], or of split weights: the upper halves in `array`, the lower ones in `low`."""

    def __init__(self, array: Tensor, low: Tensor | None = None) -> None:
        self.array, self.low = array, low
        self.shape, self.dtype = array.shape, array.dtype if low is None else torch.float32
        self.piece_rows = max(1, PIECE_BYTES // max(1, 4 * array[:1].numel()))

    def read(self, rows: RowIds, /) -> Tensor:
        """See Rows."""
        return self.array[rows] if self.low is None else widen(self.array[rows], self.low[rows])

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        """See Rows."""
        if values.dtype == self.array.dtype:
            self.array[rows] = values
        else:
            write_rows(self.array, self.low, rows, values.float())

    def whole(self) -> Tensor:
        """See Rows."""
        return self.array if self.low is None else super().whole()


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `values` as rows of `dtype` have them: float32 becomes float16 as hotrow rounds it."""
    return to_float16(values) if dtype == torch.float16 and values.dtype != dtype else values


class State(NamedTuple):
    """An optimizer state of one table, by slot, and what it is for a row that was never touched:

    `(of_weight * w if of_weight else constant) + of_sign * sign(w)` for each element of the row.
    """

    name: str
    array: Tensor
    """float32 [slots, D] or [slots]."""
    constant: float = 0.0
    of_weight: float = 0.0
    of_sign: float = 0.0

    def of_untouched(self, table: TableConfig) -> State:
        """Returns this state for rows as the table makes them: those that start at zero have nothing to start from."""
        zero = not table.init.bound_for(table.num_embeddings)
        return self._replace(of_weight=0.0, of_sign=0.0) if zero else self

    def fill(self, rows: slice, weights: Tensor) -> None:
        """Makes these rows of `array`, zeros, those of rows never touched, whose weights [n, D] float32 are given."""
        if self.of_weight:
            torch.mul(weights, self.of_weight, out=self.array[rows])
        elif self.constant:
            self.array[rows] = self.constant
        if self.of_sign:
            self.array[rows].add_(weights.sign(), alpha=self.of_sign)


class Attached:
    """The states of an optimizer beside the rows they belong to: `attach` returns it, `update` takes it."""

    def __init__(self, states: dict[str, Sequence[State]], arrays: list[Any] | None = None) -> None:
        self.states = states
        """By table, in the tables' order."""
        self.arrays: list[Any] = [] if arrays is None else arrays
        """For each state, the arrays of all tables as the kernels take them."""
        if arrays is None:
            self.take_arrays()

    def take_arrays(self) -> None:
        """Takes the arrays as they are now: they move when a table grows."""
        by_state = zip(*self.states.values(), strict=True)
        self.arrays = [ops.Arrays([state.array for state in states]) for states in by_state]


@dataclass(frozen=True)
class InitialRows:
    """What the rows of a table are before they are first written to; checkpoints say it. See row_cache.h."""

    table: str
    seed: int
    bound: Amount
    zero_rows: Count
    dtype: Literal["float32", "float16"]
    """The type of the weights in files: "float32" (also of split ones) or "float16"."""
    states: dict[str, tuple[float, float, float]]
    """By name: constant, of_weight and of_sign of its `State`."""

    @classmethod
    def of(cls, table: TableConfig, seed: int, states: Sequence[State]) -> InitialRows:
        """Returns those of `table` in a collection with this seed, and of its optimizer's states."""
        formulas = {state.name: (state.constant, state.of_weight, state.of_sign) for state in states}
        dtype: Literal["float32", "float16"] = "float16" if table.dtype == "float16" else "float32"
        bound = float(table.init.bound_for(table.num_embeddings))
        return cls(table.name, seed, bound, table.init.zero_rows, dtype, formulas)

    def formula(self, name: str) -> tuple[Any, ...]:
        """Returns all that the values of one array depend on."""
        return self.table, self.seed, self.bound, self.zero_rows, self.dtype, self.states.get(name)

    def read(self, name: str, rows: RowIds, shape: torch.Size) -> Tensor:
        """Returns `rows` of the weights (name "weight") or of a state; shape: of the whole array."""
        if name == "weight":
            weights = self._weights(rows, shape[1])
            return to_float16(weights) if self.dtype == "float16" else weights
        num_rows = len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start
        state = State(name, torch.zeros(num_rows, *shape[1:]), *self.states[name])
        w = state.array
        if state.of_weight or state.of_sign:  # the state is as long as the row
            w = self._weights(rows, shape[1])
            w = to_float16(w).float() if self.dtype == "float16" else w  # as it is stored
        state.fill(slice(0, num_rows), w)
        return state.array

    def _weights(self, rows: RowIds, dim: int) -> Tensor:
        key = row_key(self.seed, self.table)
        if isinstance(rows, Tensor):
            return uniform_rows(key, rows, dim, self.bound, self.zero_rows)
        out = torch.empty(rows.stop - rows.start, dim)
        ops.fill_uniform(out, key=key, bound=self.bound, zero_rows=self.zero_rows, first_row=rows.start)
        return out


class Saved(NamedTuple):
    """The checkpoint that has every row of a collection as it is, except the changed ones."""

    path: Path
    manifest: Any
    """Its `hotrow.run.checkpoint_files.Manifest`."""


class Changes(Protocol):
    """What a placement knows of the rows that changed, so that a checkpoint need not write the others."""

    saved: Saved | None

    def initial(self, table: str) -> InitialRows:
        """Returns what the rows of a table are before they are first written to."""

    def num_changed(self, table: str, *, ever: bool) -> int:
        """Returns how many rows of a table were ever written to, or since `clear_changed`."""

    def changed_rows(self, table: str, *, ever: bool) -> Iterator[Tensor]:
        """Yields their ids, rising, in pieces to read at once."""

    def arrays_by_table(self) -> dict[str, list[str]]:
        """Returns by table the names of its arrays: "weight", and those of the attached states."""

    def clear_changed(self) -> None:
        """Forgets the changes so far: a checkpoint has every row as it is."""


class KernelSet:
    """The kernels of one collection: for pooled lookups, for the sequence of each feature, for some of the tables."""

    def __init__(self, layout: Layout, make: Callable[..., Any] = ops.Kernels) -> None:
        self.pooled: ops.Kernels = make(layout)
        self.sequences: dict[str, ops.Kernels] = {
            feature.name: make(layout.sequence_of(feature.name), among=layout) for feature in layout.features
        }
        self._partial: dict[frozenset[int], ops.Kernels] = {}  # by the tables that they update

    def are_pooled(self, kernels: ops.Kernels) -> bool:
        """Returns whether `kernels` update the rows of pooled lookups, of all tables or of some."""
        return kernels is self.pooled or kernels in self._partial.values()

    def without(self, kernels: ops.Kernels, frozen: frozenset[int]) -> ops.Kernels | None:
        """Returns `kernels` for an update that leaves the `frozen` tables alone; None if it updates no other."""
        kept = tuple(feature for feature in kernels.layout.features if feature.table not in frozen)
        if len(kept) == len(kernels.layout.features):
            return kernels
        if not kept:
            return None
        numbers = frozenset(feature.table for feature in kept)
        if numbers not in self._partial:
            whole = self.pooled.layout
            self._partial[numbers] = ops.Kernels(Layout(kept, whole.width), among=whole)
        return self._partial[numbers]


class Placement(Protocol):
    """Keeps the rows of the tables of one collection. What has a body here is so in DRAM; override what differs.

    Several threads may look up at once; `update`, `grow` and `close` are alone with the placement.
    """

    tables: tuple[TableConfig, ...]
    weights: dict[str, Tensor]
    """By table, what lookups read, by slot; an optimizer's param groups name these tensors."""
    low: dict[str, Tensor]
    """Lower halves [slots, D] int16 of the bfloat16 tables."""
    kernels: KernelSet
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
        return 0.0

    @property
    def changes(self) -> Changes | None:
        """What is known of changed rows, if checkpoints are to write those alone."""
        return None

    def find(self, kind: type[Kind]) -> Kind | None:
        """Returns the placement of this kind, this one or one below it, for reports about it; None if there is none."""
        if isinstance(self, kind):
            return self
        return None if self.below is None else self.below.find(kind)

    def check(self, use: Use) -> None:
        """Raises an error that says why, and what to do instead, if this placement does not offer `use`."""
        return

    # ---- batches

    def announce(self, sparse: KeyedJaggedTensor) -> None:
        """Brings the rows of a training batch that comes later."""
        return

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        """Lets go of an announced batch that will not come, or has been."""
        return

    def fits(self, sparse: KeyedJaggedTensor) -> bool:
        """Returns whether a batch can be looked up at once; if not, a no-grad lookup is made in halves."""
        return True

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[Lease, KeyedJaggedTensor]:
        """Returns the lease of a batch whose rows are there now, and the batch with slots for ids."""
        return NO_LEASE, sparse

    def update(
        self,
        lookups: Sequence[tuple[ops.Kernels, KeyedJaggedTensor, Tensor]],
        attached: Attached,
        rules: Sequence[Rule],
    ) -> None:
        """Applies the pending lookups, batches as `take` gave them, to the rows and states: `ops.Kernels.update`."""
        if lookups:
            self.kernels.pooled.update(self.arrays, attached.arrays, lookups, rules)

    # ---- optimizer states

    def new_state(self, shape: Sequence[int]) -> Tensor:
        """Returns zeros by slot for an optimizer state of shape [N, D] or [N]."""
        return ops.allocate(*shape)

    def attach(self, states: dict[str, Sequence[State]]) -> Attached:
        """Takes the states of an optimizer, by table, beside the weights, and gives them their initial values."""
        return Attached(states)

    # ---- rows by their ids

    def rows(self, table: str, state: State | None = None) -> Rows:
        """Returns the weights of a table, or one of its attached states, by row; they may be read and changed."""

    def grow(self, table: TableConfig) -> None:
        """Gives the table of this name more rows, as `EmbeddingCollection.grow` says; states grow with it."""
        raise ValueError(f"table {table.name!r} cannot grow where it lies: make a collection with more rows")

    def flush(self) -> None:
        """Brings everything that changed to where it is kept."""
        return

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns by table what the placement has counted."""
        return {}

    def close(self) -> None:
        """Removes what the placement made outside memory; nothing works afterwards."""
        return


class Recipe(Protocol):
    """What `EmbeddingCollection(memory=...)` takes: it says how to make a placement."""

    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Placement:
        """Makes the placement of `tables`, whose initial rows are functions of `seed`."""
