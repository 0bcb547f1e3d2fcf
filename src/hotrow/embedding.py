"""EmbeddingCollection: all embedding tables of a model as one module, whose lookup is one native call.

A table is a plain tensor, not a Parameter: its gradient is never a tensor either. Backward keeps the pooled gradient
[B, output_dim] beside the batch it belongs to (`pending`), and the sparse optimizer (hotrow.optim) applies both.
Next: optim.py for the step, reference.py for the arithmetic.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotrow import torch_tables
from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.types import Layout, to_float16
from hotrow.placement import AnyMemory, place
from hotrow.placement.base import Lease, Placement, Rows
from hotrow.tables import TableConfig, check_tables

BATCHES_TO_WARN_OF = 3
"""The number of batches without a step after which a warning says that the step may have been forgotten."""


class Pending(NamedTuple):
    """A lookup and the gradient of its output, waiting for the optimizer."""

    kernels: ops.Kernels
    """The kernels that update the rows, of the collection or of one feature's sequences, without frozen tables."""
    sparse: KeyedJaggedTensor
    grad: Tensor
    """[B, output_dim], or [L, D] for a sequence; float32."""
    lease: Lease
    """Keeps the rows in their slots; `sparse` is as `Placement.take` gave it."""


class EmbeddingCollection(nn.Module):
    """Tables of embedding rows, looked up and pooled together.

    emb(sparse)[b, columns of feature f] = pool(rows of the ids of f in sample b), side by side in the tables' order.

        tables:  user [N_u, 16]: features (user,)      item [N_i, 8]: features (clicked, shown)
        output:  [ user 16 | clicked 8 | shown 8 ]     output_dim = 32

    tables: a TableConfig for each. memory: None or "dram" keeps all rows in DRAM. A `Memory` keeps some there and the
    rest on disk; results have the same bits, but `state_dict` and copies raise an error. A `DeviceMemory` looks up and
    updates rows in slots of a device, in front of DRAM or tiers (docs/gpu.md). seed: initial rows are functions of
    (seed, table name, row, column) alone. `state_dict()` holds `<table>.weight`: float16 for float16 tables, float32
    for others; it joins the halves of bfloat16 tables, and loading splits them again, without loss. `parameters()`
    gives a Parameter [0, D] for each table. It has no values; its `requires_grad` says whether the table is trained, so
    that `requires_grad_(False)`, on the collection or on a module around it, freezes the tables.

    `sequence(sparse)` returns rows without pooling. Several forward passes before one optimizer step, sequences
    included, count as one batch whose bags come in forward order; a forward under torch.no_grad leaves nothing behind.
    Python threads may use different collections at once, and may look up the same one, but only one thread may use a
    collection during an optimizer step. A forked child computes on one thread, and cannot use its parent's collection
    in tiers. docs/python.md says what else a user of torch.nn may expect.
    Raises ValueError for repeated names, for an unknown `memory` and for tables larger than the memory there is.
    """

    def __init__(self, tables: Iterable[TableConfig], *, memory: AnyMemory = None, seed: int = 0) -> None:
        super().__init__()
        self.tables = check_tables(tables)
        for table in self.tables:  # not by register_parameter, which refuses dots; state_dict has the same names
            self._parameters[f"{table.name}.weight"] = nn.Parameter(torch.empty(0, table.embedding_dim))
        self.seed = seed
        self.placement: Placement = place(self.tables, memory, seed=seed)
        """Keeps the rows (placement/base.py); everything that reads, updates or saves them asks it."""
        self._prepare()

    @property
    def weights(self) -> dict[str, Tensor]:
        """By table, its rows [N, D] in its dtype: what lookups read; updated in place. In tiers they are indexed by
        slot, not by row, and only slots in use mean anything."""
        return self.placement.weights

    @property
    def low(self) -> dict[str, Tensor]:
        """Lower halves [N, D] int16 of the bfloat16 tables; joined with the upper halves in `weights` they are the
        float32 rows bit for bit. They belong to the collection, because initial rows and checkpoints need them before
        there is an optimizer."""
        return self.placement.low

    @classmethod
    def from_torch(cls, modules: nn.Module | Mapping[str, nn.Module] | nn.ModuleDict) -> EmbeddingCollection:
        """Makes a collection of an nn.EmbeddingBag or nn.Embedding, or of a dict of them, with exactly their weights.

            emb = EmbeddingCollection.from_torch({"user": nn.EmbeddingBag(100, 8, mode="mean"), "item": ...})

        A module's name in the dict becomes the name of its table and feature; a single module is "embedding". Float16
        and bfloat16 weights give tables of that dtype, and weights that do not require grad give a frozen table.
        `sparse=` and `include_last_offset=` are ignored. The tables lie in DRAM: for tiers, save a checkpoint of this
        collection and load it into one with Memory.
        Raises ValueError, saying how to do without, for padding_idx, max_norm, scale_grad_by_freq and max pooling, for
        float64 and for other modules.
        """
        return cls._of(torch_tables.from_torch(modules))

    @classmethod
    def from_torchrec(cls, collection: Any) -> EmbeddingCollection:
        """Makes a collection of a torchrec EmbeddingBagCollection or EmbeddingCollection, with its names and pooling.
        Per-id weights are used if a batch has them, even if the collection was made with is_weighted=False."""
        return cls._of(torch_tables.from_torchrec(collection))

    @classmethod
    def _of(cls, given: Sequence[torch_tables.Given]) -> EmbeddingCollection:
        emb = cls([table.config for table in given])
        for config, weight, trained in given:
            stored = emb.rows(config.name)
            for rows in stored.pieces():
                stored.write(rows, weight[rows].cpu().float())
            emb.switches[config.name].requires_grad_(trained)
        return emb

    def to_torch(self) -> dict[str, nn.EmbeddingBag]:
        """Returns a copy of each table, by name, as an nn.EmbeddingBag of its pooling; float16 only if the table is.
        Raises ValueError in tiers, whose tables may be larger than memory."""
        modules = {}
        for number, table in enumerate(self.tables):
            weight = self._whole(table.name)
            bag = nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode=table.pooling, _weight=weight.clone())
            bag.weight.requires_grad_(number not in self.frozen)
            modules[table.name] = bag
        return modules

    def torchrec_state_dict(self, kind: str = "embedding_bags") -> dict[str, Tensor]:
        """Returns the tables under torchrec's names, for load_state_dict of an equal EmbeddingBagCollection. kind:
        "embedding_bags", or "embeddings" for torchrec's EmbeddingCollection. Raises ValueError in tiers."""
        return {f"{kind}.{name}.weight": self._whole(name) for name in self.weights}

    def _prepare(self) -> None:
        layout = Layout.of(self.tables)
        self.feature_names = tuple(feature.name for feature in layout.features)
        self.output_dim = layout.width
        self.newest_optimizer: Callable[[], Any] = lambda: None
        """Returns the optimizer that was made last, the only one that may step; None if it was deleted."""
        self._pending: list[tuple[int, Pending]] = []
        self._waiting = Waiting()
        self._forwards = itertools.count()  # its next() is one step for Python's threads, += is not
        # Autograd calls backward only below an input that requires grad, and the tables are none.
        self._leaf = torch.zeros(0, requires_grad=True)
        self._frozen_leaf = torch.zeros(0)
        self._copied: list[int] | None = None

    def forward(self, sparse: KeyedJaggedTensor | Tensor) -> Tensor:
        """Returns the pooled rows [B, output_dim], float32.

        sparse: every feature's bags, keys in any order, features of other collections ignored; torchrec's
        KeyedJaggedTensor will do; or an integer tensor [B, F] with one id per feature, columns as `feature_names`.

        Raises ValueError for a missing feature, and for an id outside its table (feature, sample, id, rows).
        """
        if isinstance(sparse, Tensor):
            sparse = KeyedJaggedTensor.from_dense(self.feature_names, sparse)
        sparse = KeyedJaggedTensor.of(sparse)
        placement, frozen = self.placement, self.frozen
        if not placement.fits(sparse):
            return torch.cat([self(half) for half in _halves(sparse)])
        lease, slots = placement.take(sparse, training=self._trains(frozen))
        out = self._look_up(placement.kernels.pooled, slots, sparse, lease, frozen)
        if not out.requires_grad:
            lease.release(updated=False)
        return out

    def _trains(self, frozen: frozenset[int]) -> bool:
        self._check_copy()
        return torch.is_grad_enabled() and len(frozen) < len(self.tables)

    def _check_copy(self) -> None:
        """Raises ValueError if this is a copy whose Parameters, which hold no row, were written to as if they did."""
        if self._copied is not None and self._copied != [own._version for own in self.switches.values()]:
            raise ValueError(
                "the parameters of this copy were averaged or set, and tables are none of them: leave them out, as in "
                "torch's AveragedModel(model.head), and move the weights of a copy as docs/python.md shows"
            )

    def sequence(self, sparse: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the row of every id, not pooled: feature -> (values [L, D] float32, offsets int64 [B + 1]).

            values[offsets[b]:offsets[b + 1]] = rows of the ids of the feature in sample b, in their order

        For each feature of this collection among `sparse.keys`; per-sample weights play no part. Gradients wait for the
        same `step()` as those of `forward`. Raises ValueError for an id outside its table.
        """
        sparse = KeyedJaggedTensor.of(sparse)
        placement, frozen = self.placement, self.frozen
        if not placement.fits(sparse):
            first, second = map(self.sequence, _halves(sparse))
            return {name: _joined(own, second[name]) for name, own in first.items()}
        found = {}
        lease, slots = placement.take_rows(sparse, training=self._trains(frozen))
        for name in self.feature_names:
            if name in sparse.keys:
                values, offsets, _ = slots.bags(name)
                starts = None if slots.parts is None else offsets[list(slots.parts)].tolist()
                single = KeyedJaggedTensor((name,), values).in_parts(starts)
                kernels = placement.kernels.sequences[name]
                found[name] = self._look_up(kernels, single, sparse, lease, frozen), offsets
        if not any(values.requires_grad for values, _ in found.values()):
            lease.release(updated=False)
        return found

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
        """Returns `kernels` for an update that leaves the `frozen` tables alone; None if no table is left."""
        updates = self.placement.kernels.without(kernels, frozen)
        if updates is not None and updates is not kernels:
            self.placement.check("freeze_some")
        return updates

    def _look_up(
        self,
        kernels: ops.Kernels,
        sparse: KeyedJaggedTensor,
        blame: KeyedJaggedTensor,
        lease: Lease,
        frozen: frozenset[int],
    ) -> Tensor:
        number = self._waiting.newest = next(self._forwards)
        leaf = self._leaf if any(f.table not in frozen for f in kernels.layout.features) else self._frozen_leaf
        return _Lookup.apply(leaf, sparse.weights, sparse, blame, self, kernels, number, lease, frozen)  # type: ignore[no-any-return, no-untyped-call]

    def rows(self, name: str) -> Rows:
        """Returns the weights of the table `name` by row, to be read and written piece by piece, wherever they lie."""
        return self.placement.rows(self._table(name).name)

    def float32(self, name: str) -> Tensor:
        """Returns the table `name` in float32, exactly: its own memory if it lies there in float32, else a copy."""
        return self.rows(name).whole().float()

    def _table(self, name: str) -> TableConfig:
        for table in self.tables:
            if table.name == name:
                return table
        raise ValueError(f"there is no table {name!r}; the tables are {', '.join(self.weights)}")

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Returns rows of the table `name` as float32 [n, D], a copy, wherever they lie."""
        start, stop, _ = rows.indices(self._table(name).num_embeddings)
        found = self.rows(name).read(slice(start, stop))
        return found.clone() if found.dtype == torch.float32 else found.float()

    @property
    def pending(self) -> list[Pending]:
        """Batches whose gradients await `optimizer.step()`, in the order of their forward passes."""
        return [pending for _, pending in sorted(self._pending, key=lambda entry: entry[0])]

    def clear_pending(self, *, updated: bool = False) -> None:
        """Drops the pending gradients, at the end of `step()` (updated: it changed their rows) and `zero_grad()`."""
        for _, pending in self._pending:
            pending.lease.release(updated=updated)
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
        super().zero_grad(set_to_none)
        self.clear_pending()

    def scale_pending(self, factor: float) -> None:
        """Multiplies the pending gradients by `factor`; the tensors backward was given stay as they are."""
        self._pending = [(number, p._replace(grad=p.grad * factor)) for number, p in self._pending]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        for name in self.weights:
            destination[f"{prefix}{name}.weight"] = self._whole(name)

    def _whole(self, name: str) -> Tensor:
        """Returns the table `name` as float32, or float16 if it is; its own memory unless it is split."""
        self.placement.check("state_dict")
        self._check_copy()
        return self.rows(name).whole()

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
        self.placement.check("load_state_dict")
        wanted = {f"{prefix}{name}.weight": self.rows(name) for name in self.weights}
        for key, table in wanted.items():
            shape = tuple(table.shape)
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
        """Leaves the tables as they are and warns: `.half()`, `.to(...)`, `.cuda()` and the like call this."""
        probe = torch.zeros(1)
        changed = fn(probe)
        if changed.device.type not in ("cpu", self.placement.device.type):
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
        """Returns the state for copies: everything but native handles and steps under way."""
        self.placement.check("copy")
        passing = ("newest_optimizer", "_pending", "_waiting", "_forwards", "_leaf", "_frozen_leaf")
        return {name: value for name, value in self.__dict__.items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuilds what `__getstate__` left out, around the copied tables."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()
        self._copied = [own._version for own in self.switches.values()]

    def extra_repr(self) -> str:
        frozen = self.frozen
        return "\n".join(
            f"{t.name}: [{t.num_embeddings}, {t.embedding_dim}] {t.dtype} {t.pooling} of {', '.join(t.feature_names)}"
            + (", frozen" if number in frozen else "")
            for number, t in enumerate(self.tables)
        )


class Waiting:
    """Counts the batches that wait for an optimizer: forward passes with at least one backward pass. Forward passes
    without a backward pass between them are one batch: towers, or a positive and its negatives."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.newest = -1
        """Number of the latest forward pass."""
        self._newest_counted, self._said = -1, False

    def count(self, number: int) -> bool:
        """Counts the batch of forward pass `number`; returns whether to warn, which happens once."""
        if number > self._newest_counted:
            self.num_batches += 1
            self._newest_counted = self.newest
        if self.num_batches < BATCHES_TO_WARN_OF or self._said:
            return False
        self._said = True
        return True


def _beyond_float16(table: Rows, weights: Tensor) -> tuple[int, float] | None:
    """The first row of a float16 table that would get an infinite weight, and the weight; None if none would."""
    if table.dtype != torch.float16:
        return None
    for rows in table.pieces():
        given = weights[rows].float()
        lost = given.isfinite() & to_float16(given).isinf()
        if lost.any():
            row = int(lost.any(dim=1).nonzero()[0])
            return rows.start + row, float(given[row][lost[row]][0])
    return None


def _joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins sequences of two batches: (values [L, D], offsets [B + 1])."""
    offsets = torch.cat([first[1], second[1][1:] + first[1][-1]])
    return torch.cat([first[0], second[0]]), offsets


def _halves(sparse: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
    middle = sparse.stride // 2
    return [sparse.samples(0, middle), sparse.samples(middle, sparse.stride)]


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
        lease: Lease,
        frozen: frozenset[int],
    ) -> Tensor:
        ctx.sparse, ctx.emb, ctx.kernels, ctx.number, ctx.lease = sparse, emb, kernels, number, lease
        ctx.frozen = frozen
        ctx.placement = placement = emb.placement
        return placement.look_up(kernels, sparse, blame=blame)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "EmbeddingCollection cannot be differentiated twice: call backward without create_graph=True"
            )
        if ctx.lease.released:
            raise RuntimeError(
                "the rows of this lookup have left their slots: an optimizer step or zero_grad() came between its "
                "forward and this backward; call them in the order forward, backward, step"
            )
        if ctx.placement is not ctx.emb.placement:  # whose rows have other slots
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
            weight_grad = ctx.kernels.weight_gradient(emb.placement.arrays, ctx.sparse, grad)
        updates = emb.kernels_without(ctx.kernels, ctx.frozen)
        if updates is not None:
            if updates is not ctx.kernels:
                grad = _zeroed(grad, ctx.kernels.layout, ctx.frozen)
            emb._add_pending(ctx.number, Pending(updates, ctx.sparse, grad, ctx.lease))
        return None, weight_grad, *[None] * 7


def _zeroed(grad: Tensor, layout: Layout, frozen: frozenset[int]) -> Tensor:
    """Returns a copy of a pooled gradient with 0 for the features of frozen tables."""
    grad = grad.clone()
    for feature in layout.features:
        if feature.table in frozen:
            grad[:, feature.columns] = 0
    return grad
