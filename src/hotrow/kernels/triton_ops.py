"""`Arrays` and `Kernels` of kernels/ops.py for tables in device memory: the same methods, orders and errors.

    lookup            one launch for each (storage, width) of the tables; a program takes some bags of one feature
    update            occurrences of all tables -> stable sort by (table, row) -> one launch for each (storage, width)

Batches stay where they are made, in host memory: their ids are checked there and copied once per call. No float is
added atomically, so repeated runs give the same bits; docs/numerics.md says which bits. Of arrays with slots
for some rows, kernels find a row's slot in a map (`SlotMap`). Next: triton_kernels.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import ge
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops, tree, triton_kernels, types
from hotrow.kernels.ops import ALTERED, check_arrays
from hotrow.kernels.types import Algorithm, Layout, Rule

TILE = 512
"""Elements that a program holds at a time: four for each thread of four warps."""
MAX_ROWS = 16
"""Rows of a tile: Triton 3.6 does not compile an update of 32 whose pointers are divisible by 16."""
VECTORS = 32
"""Vectors of a sample that a program of the interaction holds at a time."""
_STORAGES = {torch.float32: triton_kernels.FLOAT32, torch.float16: triton_kernels.FLOAT16}
_INTERPRETING = threading.Lock()
"""Held while a kernel is interpreted: Triton changes its own module for that time."""
_ROW_BITS = triton_kernels.ROW_BITS


class Kind(NamedTuple):
    """What a kernel is compiled for; tables of one kind share a launch."""

    storage: int
    block_d: int
    """Columns of a tile: the dim rounded up to a power of two, and at least 16, for fold16."""

    @property
    def rows(self) -> int:
        return max(1, min(MAX_ROWS, TILE // self.block_d))


class SlotMap(NamedTuple):
    """Which slot of a table's array holds which row: row r < prefix slot r, another slot `slot_of[first + r]`."""

    slot_of: Tensor
    """int32, of all tables, on the device; read when a kernel runs, so that copies before it may change it."""
    num_rows: Sequence[int]
    """By table, rows that ids may name; those that a batch names must have slots."""
    prefixes: Sequence[int]
    firsts: Sequence[int]


class Arrays:
    """One array per table in the memory of one device: weights [N, D], or optimizer state [N, D] or [N], float32.

    As `ops.Arrays`. slots: which row lies where, if arrays have slots for some rows alone.
    Raises ValueError if an array has another type or is not contiguous, if arrays are on different devices, and for a
    device on which these kernels do not run.
    """

    def __init__(
        self, tensors: Sequence[Tensor], low: Sequence[Tensor | None] | None = None, slots: SlotMap | None = None
    ) -> None:
        self.tensors, self.low = tuple(tensors), tuple(low or [None] * len(tensors))
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        _check_device(self.device)
        check_arrays(self.tensors, self.low, self.device)
        self.slots = slots
        self.num_rows = [len(tensor) for tensor in self.tensors] if slots is None else list(slots.num_rows)
        self.kinds = [Kind(_STORAGES.get(a.dtype, triton_kernels.SPLIT), _block_d(a)) for a in self.tensors]
        """For each table, the kind of its weights."""
        self.by_rank = sorted(range(len(self.kinds)), key=lambda t: self.kinds[t])
        """Tables, those of one kind together: the order in which keys are sorted."""
        self.bases = [0] * len(self.kinds)
        """For each table, the key of its row 0."""
        for rank, t in enumerate(self.by_rank):
            self.bases[t] = rank << _ROW_BITS

    @cached_property
    def addresses(self) -> Tensor:
        return self.numbers([tensor.data_ptr() for tensor in self.tensors])

    @cached_property
    def low_addresses(self) -> Tensor:
        """The address of each table's lower halves, on the device; 0 if there are none."""
        return self.numbers([0 if half is None else half.data_ptr() for half in self.low])

    @cached_property
    def maps(self) -> Tensor:
        """[T, 2] on the device, as `slots_of` takes it; a placeholder if there is no map."""
        if self.slots is None:
            return self.addresses
        start = self.slots.slot_of.data_ptr()
        rows = zip(self.slots.prefixes, self.slots.firsts, strict=True)
        return self.numbers([(prefix, start + 4 * first) for prefix, first in rows])

    @cached_property
    def dims(self) -> Tensor:
        return self.numbers([math.prod(tensor.shape[1:]) for tensor in self.tensors])

    @cached_property
    def ranked(self) -> Tensor:
        return self.numbers(self.by_rank)

    def numbers(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def _block_d(array: Tensor) -> int:
    return max(16, 1 << (math.prod(array.shape[1:]) - 1).bit_length())


def _check_device(device: torch.device) -> None:
    wanted = "cpu" if triton_kernels.INTERPRETED else "cuda"
    if device.type != wanted:
        raise ValueError(
            f"arrays are on {device}; Triton runs on {wanted} here, because TRITON_INTERPRET is "
            f"{'' if triton_kernels.INTERPRETED else 'not '}set: it must be 1 before Triton kernels are imported "
            "for them to be interpreted on the cpu, which is for tests, and unset for a GPU"
        )


class OwnIds(KeyedJaggedTensor):
    """A batch with ids that its maker has checked and that nobody changes: they are copied to the device once."""

    __slots__ = ("_copied",)
    _copied: Tensor | None

    @classmethod
    def replacing(cls, sparse: KeyedJaggedTensor, values: Tensor) -> OwnIds:
        """Returns the bags of `sparse` with other ids, in host memory, as many as before."""
        made = cls.__new__(cls)
        made.keys, made.weights, made.stride, made.parts = sparse.keys, sparse.weights, sparse.stride, sparse.parts
        # Offsets that the caller changes would give an id to another table, whose row may have no slot.
        offsets = None if sparse._offsets is None else sparse._offsets.clone()
        made.values, made._offsets, made._copied = values, offsets, None
        return made

    def on(self, device: torch.device) -> Tensor:
        """Returns the ids there."""
        if self._copied is None:
            self._copied = self.values.to(device, non_blocking=True)
        return self._copied


@dataclass
class _Uploaded:
    """A batch on the device; `offsets` and `weights` are placeholders if it has none."""

    values: Tensor
    offsets: Tensor
    weights: Tensor
    one_hot: bool
    weighted: bool

    @classmethod
    def of(cls, sparse: KeyedJaggedTensor, device: torch.device) -> _Uploaded:
        values = sparse.on(device) if isinstance(sparse, OwnIds) else sparse.values.to(device, non_blocking=True)
        offsets = values if sparse.one_hot else sparse.offsets.to(device, non_blocking=True)
        weights = values if sparse.weights is None else sparse.weights.detach().to(device, non_blocking=True)
        return cls(values, offsets, weights, sparse.one_hot, sparse.weights is not None)


class _Pieces(NamedTuple):
    """The occurrences of one lookup: one for each position of its batch, also of features that are not looked up."""

    keys: Tensor
    """int64 [n]: the key of the row."""
    sources: Tensor
    """int64 [n]: the address of the gradient."""
    scales: Tensor | None
    """float32 [n]; if None, 1."""


class Kernels:
    """The ops of one collection, or of some of its features, on tables in device memory; see `ops.Kernels`.

    layout: the features that a lookup serves. among: the layout of the whole collection if `layout` is a part of it.
    Outputs are on the tables' device, and gradients must be; batches may be, but are cheaper to check in host memory.
    """

    def __init__(self, layout: Layout, *, among: Layout | None = None) -> None:
        self.layout = layout
        self._on_host = ops.Kernels(layout, among=among)
        self._sequences: dict[str, Kernels] = {}
        self._numbers = {feature.name: k for k, feature in enumerate((among or layout).features)}
        self._positions: dict[tuple[str, ...], list[int]] = {}
        self._made: dict[Any, Any] = {}  # small tensors on the device, for keys and kinds that have come before

    def positions(self, keys: tuple[str, ...]) -> list[int]:
        """Returns each feature's position among `keys`. Raises ValueError naming a feature that is missing."""
        found = self._positions.get(keys)
        if found is None:
            self.layout.check_keys(keys)
            found = self._positions[keys] = [keys.index(feature.name) for feature in self.layout.features]
        return found

    def lookup(
        self,
        weights: Arrays,
        sparse: KeyedJaggedTensor,
        out: Tensor | None = None,
        *,
        blame: KeyedJaggedTensor | None = None,
    ) -> Tensor:
        """As `ops.Kernels.lookup`, on the tables' device."""
        self._check_batch(weights, sparse, blame)
        if out is None:
            out = torch.empty(sparse.stride, self.layout.width, device=weights.device)
        batch = _Uploaded.of(sparse, weights.device)
        for kind, num_features, features in self._features(weights, sparse.keys):
            launch(
                triton_kernels.lookup,
                (-(-sparse.stride // kind.rows), num_features),
                (out, out.stride(0), batch.values, batch.offsets, batch.weights, features, weights.addresses),
                maps=weights.maps,
                num_samples=sparse.stride,
                ONE_HOT=batch.one_hot,
                WEIGHTED=batch.weighted,
                MAPPED=weights.slots is not None,
                STORAGE=kind.storage,
                BLOCK_B=kind.rows,
                BLOCK_D=kind.block_d,
            )
        return out

    def weight_gradient(self, weights: Arrays, sparse: KeyedJaggedTensor, grad: Tensor) -> Tensor:
        """As `ops.Kernels.weight_gradient`, on the device of `sparse.values`."""
        self._check_batch(weights, sparse, None)
        batch = _Uploaded.of(sparse, weights.device)
        grad = _rows_contiguous(grad, weights.device)
        out = torch.zeros(sparse.values.numel(), device=weights.device)
        for kind, num_features, features in self._features(weights, sparse.keys):
            launch(
                triton_kernels.weight_gradient,
                (-(-sparse.stride // kind.rows), num_features),
                (out, grad, grad.stride(0), batch.values, batch.offsets, features, weights.addresses),
                maps=weights.maps,
                num_samples=sparse.stride,
                ONE_HOT=batch.one_hot,
                MAPPED=weights.slots is not None,
                STORAGE=kind.storage,
                BLOCK_B=kind.rows,
                BLOCK_D=kind.block_d,
            )
        return out.to(sparse.values.device)

    def update(
        self,
        weights: Arrays,
        states: Sequence[Arrays],
        pending: Sequence[tuple[Kernels, KeyedJaggedTensor, Tensor]],
        rules: Sequence[Rule],
    ) -> None:
        """As `ops.Kernels.update`, with the same bits in every run. Gradients are on the tables' device, and all rules
        are of one algorithm. If the batches are cut into micro-batches, rows are summed in host memory. Raises
        ValueError for an id outside its table; then no row has changed."""
        if (num_parts := types.count_parts(sparse for _, sparse, _ in pending)) > 1:
            pending = self._summed(weights, pending, num_parts)
        algorithms = sorted({rule.algorithm for rule in rules})
        if len(algorithms) != 1:
            raise ValueError(f"rules are of {', '.join(algorithms) or 'none'}; one update takes one algorithm")
        for served, sparse, _ in pending:
            served._check_batch(weights, sparse, None)
        grads = [_rows_contiguous(grad, weights.device) for _, _, grad in pending]
        parts = [
            served._pieces(weights, sparse, grad) for (served, sparse, _), grad in zip(pending, grads, strict=True)
        ]
        spans = sorted(span for p, (served, sparse, _) in enumerate(pending) for span in self._spans(served, sparse, p))
        if not any(stop > start for *_, start, stop in spans):
            return
        keys, order = torch.sort(_cat([part.keys for part in parts], spans), stable=True)
        sources = _cat([part.sources for part in parts], spans)[order]
        scales = None
        if any(part.scales is not None for part in parts):
            scales = _cat([_or_ones(part) for part in parts], spans)[order]
        self._apply(weights, states, rules, algorithms[0], _Pieces(keys, sources, scales), self._counts(spans))

    def _summed(
        self, weights: Arrays, pending: Sequence[tuple[Kernels, KeyedJaggedTensor, Tensor]], num_parts: int
    ) -> list[tuple[Kernels, KeyedJaggedTensor, Tensor]]:
        """Returns lookups in which each row occurs once; its gradient is its sum over all micro-batches."""
        whole = (0, tree.width(num_parts))
        lookups = [(served._on_host, sparse, grad.cpu()) for served, sparse, grad in pending]
        tables = self._on_host.row_sums(self._shapes(weights), lookups, whole)[whole]
        found = []
        for t, (rows, sums) in enumerate(tables):
            name = next(feature.name for feature in self.layout.features if feature.table == t)
            if name not in self._sequences:
                self._sequences[name] = Kernels(self.layout.sequence_of(name), among=self.layout)
            found.append((self._sequences[name], KeyedJaggedTensor((name,), rows), sums.to(weights.device)))
        return found

    def _shapes(self, weights: Arrays) -> ops.Arrays:
        """Returns arrays in host memory of the whole tables' shapes; nothing touches them, so they take no memory."""
        made = tuple((n, *tensor.shape[1:]) for n, tensor in zip(weights.num_rows, weights.tensors, strict=True))
        if made not in self._made:
            self._made[made] = ops.Arrays([ops.allocate(*shape, sparse=True) for shape in made])
        found: ops.Arrays = self._made[made]
        return found

    def _apply(
        self,
        weights: Arrays,
        states: Sequence[Arrays],
        rules: Sequence[Rule],
        algorithm: Algorithm,
        found: _Pieces,
        counts: Sequence[int],
    ) -> None:
        """Launches once for each kind of table. found: in the order of their keys; counts: occurrences by table."""
        numbers = torch.tensor([rule.numbers[1:] for rule in rules], dtype=torch.float32)
        numbers = numbers.to(weights.device, non_blocking=True)
        scaled = found.scales is not None
        addresses = [state.addresses for state in states] + [weights.addresses] * (2 - len(states))
        first = 0
        for kind in sorted(set(weights.kinds)):
            last = first + sum(n for n, own in zip(counts, weights.kinds, strict=True) if own == kind)
            launch(
                triton_kernels.update,
                (-(-(last - first) // kind.rows),),
                (found.keys, found.sources, found.scales if scaled else found.keys, first, last, weights.ranked),
                dims=weights.dims,
                weights=weights.addresses,
                lows=weights.low_addresses,
                states_a=addresses[0],
                states_b=addresses[1],
                maps=weights.maps,
                numbers=numbers,
                ALGORITHM=triton_kernels.ALGORITHMS[algorithm],
                STORAGE=kind.storage,
                SCALED=scaled,
                MAPPED=weights.slots is not None,
                BLOCK_N=kind.rows,
                BLOCK_D=kind.block_d,
            )
            first = last

    def _features(self, weights: Arrays, keys: tuple[str, ...]) -> list[tuple[Kind, int, Tensor]]:
        """Returns, for each kind of table, how many features look up in it, and what `lookup` gets about them."""
        made = (keys, tuple(weights.kinds), weights.device)
        if made not in self._made:
            rows: dict[Kind, list[tuple[int, ...]]] = {}
            for feature, position in zip(self.layout.features, self.positions(keys), strict=True):
                start, stop = feature.columns.start, feature.columns.stop
                row = (feature.table, start, stop - start, feature.pooling == "mean", position)
                rows.setdefault(weights.kinds[feature.table], []).append(row)
            self._made[made] = [(kind, len(own), weights.numbers(own)) for kind, own in sorted(rows.items())]
        found: list[tuple[Kind, int, Tensor]] = self._made[made]
        return found

    def _by_key(self, weights: Arrays, keys: tuple[str, ...]) -> Tensor:
        """Returns int64 [3, K] for a batch's keys: base of the table, first column, 1 for "mean"; 0 if not served."""
        made = (keys, tuple(weights.bases), weights.device)
        if made not in self._made:
            rows = [[0, 0, 0] for _ in keys]
            for feature, position in zip(self.layout.features, self.positions(keys), strict=True):
                rows[position] = [weights.bases[feature.table], feature.columns.start, int(feature.pooling == "mean")]
            self._made[made] = weights.numbers(rows).t().contiguous()
        found: Tensor = self._made[made]
        return found

    def _pieces(self, weights: Arrays, sparse: KeyedJaggedTensor, grad: Tensor) -> _Pieces:
        batch = _Uploaded.of(sparse, weights.device)
        scales = batch.weights if batch.weighted else None
        if batch.one_hot:
            bases, offsets = self._of_one_hot(weights, sparse, grad)
            return _Pieces(batch.values + bases, grad.data_ptr() + offsets, scales)
        base, column, mean = self._by_key(weights, sparse.keys)
        num_ids, stride = sparse.values.numel(), max(1, sparse.stride)
        of_bag = batch.offsets.diff()
        bag = torch.repeat_interleave(of_bag, output_size=num_ids)
        lengths = of_bag[bag]
        key = bag // stride
        sources = grad.data_ptr() + 4 * ((bag - key * stride) * grad.stride(0) + column[key])
        if any(feature.pooling == "mean" for feature in self.layout.features):
            each = torch.ones(num_ids, device=weights.device) if scales is None else scales
            scales = torch.where(mean[key] == 1, each / lengths.float(), each)
        return _Pieces(batch.values + base[key], sources, scales)

    def _of_one_hot(self, weights: Arrays, sparse: KeyedJaggedTensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what depends on sizes alone, for each id: the key of its table's row 0, and where its gradient starts
        behind the first one, in bytes. The last batch's are kept, because most batches have the same sizes."""
        made = (sparse.keys, sparse.stride, grad.stride(0), tuple(weights.bases), weights.device)
        if self._made.get("one_hot", (None,))[0] != made:
            base, column, _ = self._by_key(weights, sparse.keys)
            bag = torch.arange(sparse.values.numel(), device=weights.device)
            key = bag // max(1, sparse.stride)
            offsets = 4 * ((bag - key * sparse.stride) * grad.stride(0) + column[key])
            self._made["one_hot"] = made, base[key], offsets
        _, bases, offsets = self._made["one_hot"]
        return bases, offsets

    def _spans(self, served: Kernels, sparse: KeyedJaggedTensor, p: int) -> list[tuple[int, int, int, int]]:
        """Returns, for each feature of lookup p: its number in this collection, p, and first and end of its ids."""
        ends = sparse.key_ends()
        positions = served.positions(sparse.keys)
        return [
            (self._numbers[feature.name], p, ends[position], ends[position + 1])
            for feature, position in zip(served.layout.features, positions, strict=True)
        ]

    def _counts(self, spans: Sequence[tuple[int, int, int, int]]) -> list[int]:
        counts = [0] * (1 + max(feature.table for feature in self.layout.features))
        for number, _, start, stop in spans:
            counts[self.layout.features[number].table] += stop - start
        return counts

    def _check_batch(self, weights: Arrays, sparse: KeyedJaggedTensor, blame: KeyedJaggedTensor | None) -> None:
        """Raises ValueError for a missing feature, an id outside its table, or offsets outside the ids."""
        positions = self.positions(sparse.keys)
        if not sparse.one_hot:
            offsets = sparse.offsets
            good = (offsets.diff() >= 0).all() & (offsets[0] == 0) & (offsets[-1] == sparse.values.numel())
            if not bool(good):
                raise ValueError(ALTERED)
        if isinstance(sparse, OwnIds) and sparse.one_hot:
            return
        sizes = [weights.num_rows[feature.table] for feature in self.layout.features]
        if sparse.one_hot and sparse.stride:  # all features at once
            ids = sparse.values.view(len(sparse.keys), -1)
            whole = positions == list(range(len(sparse.keys)))
            least, most = torch.aminmax(ids if whole else ids[positions], dim=1)
            if min(least.tolist()) < 0 or any(map(ge, most.tolist(), sizes)):
                self._raise_bad_id(weights, blame or sparse)
            return
        ends = sparse.key_ends()
        for position, size in zip(positions, sizes, strict=True):
            ids = sparse.values[ends[position] : ends[position + 1]]
            if ids.numel():
                least, most = torch.aminmax(ids)
                if int(least) < 0 or int(most) >= size:
                    self._raise_bad_id(weights, blame or sparse)

    def _raise_bad_id(self, weights: Arrays, sparse: KeyedJaggedTensor) -> None:
        bad = types.first_bad_id(self.layout, [torch.empty(n, 0) for n in weights.num_rows], sparse)
        if bad is not None:
            raise ValueError(bad.text(weights.num_rows[bad.feature.table]))
        raise ValueError(ALTERED)


def _cat(parts: Sequence[Tensor], spans: Sequence[tuple[int, int, int, int]]) -> Tensor:
    merged: list[tuple[int, int, int]] = []
    for _, p, start, stop in spans:
        if merged and merged[-1][0] == p and merged[-1][2] == start:
            merged[-1] = (p, merged[-1][1], stop)
        else:
            merged.append((p, start, stop))
    pieces = [parts[p][start:stop] for p, start, stop in merged]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _or_ones(part: _Pieces) -> Tensor:
    return torch.ones(part.keys.numel(), device=part.keys.device) if part.scales is None else part.scales


def _rows_contiguous(grad: Tensor, device: torch.device) -> Tensor:
    if grad.dtype != torch.float32 or grad.device != device:
        raise ValueError(f"a gradient is {grad.dtype} on {grad.device}; pass float32 on {device}, where the tables are")
    return grad if grad.dim() == 2 and grad.stride(1) == 1 else grad.contiguous()


def interact(dense_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
    """As `reference.interact`, of contiguous tensors; each product is summed in the order of the columns."""
    B, F, D = pooled_BFD.shape
    out = dense_BD.new_empty(B, D + (F + 1) * F // 2)
    tile = {"BLOCK": VECTORS, "BLOCK_D": _block_d(dense_BD)}
    grid = (B, F // VECTORS + 1)
    launch(triton_kernels.interact, grid, (out, dense_BD, pooled_BFD), num_features=F, dim=D, **tile)
    return out


def interact_backward(grad: Tensor, dense_BD: Tensor, pooled_BFD: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `reference.interact`, of contiguous tensors; each is summed in the order of the vectors."""
    B, F, D = pooled_BFD.shape
    grads = torch.empty_like(dense_BD), torch.empty_like(pooled_BFD)
    tile = {"BLOCK": VECTORS, "BLOCK_D": min(64, _block_d(dense_BD))}
    grid = (B, F // VECTORS + 1, -(-D // tile["BLOCK_D"]))
    launch(triton_kernels.interact_backward, grid, (*grads, grad, dense_BD, pooled_BFD), num_features=F, dim=D, **tile)
    return grads


def launch(kernel: Any, grid: tuple[int, ...], arrays: Sequence[Any], **more: Any) -> None:
    """Runs a kernel, if there is work, without contraction, so that a * b + c rounds twice as in the reference."""
    if 0 in grid:
        return
    device = arrays[0].device
    with torch.cuda.device(device) if device.type == "cuda" else _INTERPRETING:
        kernel[grid](*arrays, **more, num_warps=4, enable_fp_fusion=False)
