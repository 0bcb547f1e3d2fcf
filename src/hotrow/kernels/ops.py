"""One function per op: it runs the native kernel if that is built, else the readable one in `reference`.

Only this module and data/native.py import the native module. Functions check what a caller can get wrong, allocate
outputs and follow `torch.get_num_threads()`; native/include/hotrow/kernels.h and docs/numerics.md state arithmetic and
the order of sums. `backend()` says what runs.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotrow.base.machine import isa_limit
from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import reference, tree, types
from hotrow.kernels.on_device import has_triton, triton_ops
from hotrow.kernels.types import (
    Activation,
    ComingSums,
    Distinct,
    Drop,
    FlatSums,
    Layout,
    Numbers,
    Pieces,
    RowSums,
    Rule,
    SentSums,
    Shares,
)
from hotrow.tables import WHOLE, Births

ALTERED = "the batch's offsets have changed since it was made and point outside its values; rebuild it"
TILE_ROWS = 8
"""Rows of a tile of a product (native/include/hotrow/types.h): pairs of bfloat16 have rows up to a whole one."""
FULL = 64
"""Elements that fill torch's vectors: it takes two at a time, of up to 32 numbers."""
KEPT_FLOATS = 1 << 16
"""From this size up `empty` reuses pages; below it, malloc does so itself."""


@dataclass(frozen=True)
class Backend:
    """What runs the ops in this process, for reports."""

    name: str
    """"native" or "reference"."""
    isa: str
    """Instruction set of the native kernels ("baseline", "avx2", "avx512"), or "torch" for the reference."""
    threads: int
    """Threads of the kernels: torch's number, but 1 in a forked child."""
    reason: str | None
    """Why the reference runs; None if native kernels run."""


@functools.cache
def _load() -> tuple[Any, str | None]:
    """Returns the native module and None, or None and the reason, which is announced once."""
    if os.environ.get("HOTROW_NATIVE", "1") == "0":
        reason = "HOTROW_NATIVE=0 is set"
    else:
        try:
            module = importlib.import_module("hotrow._native")
        except ImportError as error:
            reason = f"the native module does not load ({error})"
        else:
            _limit_isa(module)
            _announce_fork(module)
            return module, None
    _limit_torch(isa_limit())
    warnings.warn(
        f"hotrow runs on its reference kernels, many times slower, because {reason}; "
        "build the native ones with `pip install -e .` (needs a C++20 compiler) and leave HOTROW_NATIVE unset",
        stacklevel=3,
    )
    return None, reason


def native_module(need: str = "tables in tiers need") -> Any:
    """Returns the native module. Raises ValueError, with the command that builds it, if there is none. need: who needs
    it, for the message."""
    module, reason = _load()
    if module is None:
        raise ValueError(
            f"{need} the native module, and {reason}: build it with `pip install -e .` (needs a C++20 compiler) and "
            "leave HOTROW_NATIVE unset, or keep the tables in DRAM (config memory: dram; in Python memory=None)"
        )
    return module


SOURCES = Path(__file__).parents[3] / "native"
"""The native module's sources, if hotrow runs from a clone."""


def rebuild() -> str:
    """Returns, to follow an error, how to build the native module again if it is older than its sources; else ""."""
    module, _ = _load()
    newest = max((path.stat().st_mtime for path in SOURCES.rglob("*.[ch]*")), default=0.0)
    if module is None or Path(module.__file__).stat().st_mtime >= newest:
        return ""
    return f", or, as {module.__file__} was built before its sources changed, build that again with `pip install -e .`"


def _limit_isa(module: Any) -> None:
    """Limits the native kernels, and torch, to the instruction set that HOTROW_ISA names. Raises ValueError if this
    machine or build does not have it."""
    if (limit := isa_limit()) is None:
        return
    if limit not in (available := module.isas()):
        raise ValueError(
            f"HOTROW_ISA={limit!r}, but this machine has only {', '.join(available)}: set it to one of them"
        )
    module.use_isa(available.index(limit))
    if limit == "avx512":
        module.use_amx(use=False)
    _limit_torch(limit)


def _limit_torch(limit: str | None) -> None:
    """Sets the same limit for torch and its libraries, which read it at their first operation."""
    for name, value in _TORCH_LIMITS.get(limit or "", {}).items():
        os.environ.setdefault(name, value)


_TORCH_LIMITS = {
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
"""Settings that limit torch's own kernels, oneDNN and MKL to an instruction set; avx512 leaves AMX out."""


def _announce_fork(module: Any) -> None:
    """Warns once in a forked child that the kernels run on one thread there; elsewhere prepares for such a child."""
    if not module.in_forked_child():
        os.register_at_fork(after_in_child=_load.cache_clear)
    elif torch.get_num_threads() > 1:
        warnings.warn(
            "this process was forked after hotrow's kernels were loaded: they run on one thread here, because a fork "
            "does not copy the parent's threads; results are the same. Start it with "
            "multiprocessing's 'spawn' or 'forkserver' for all threads, or call torch.set_num_threads(1) here: "
            "otherwise torch's own operations on large tensors wait for those threads for ever",
            stacklevel=4,
        )


def _native() -> Any:
    return _load()[0]


def backend() -> Backend:
    """Returns which kernels run, with which instruction set and on how many threads."""
    module, reason = _load()
    name, isa = ("reference", "torch") if module is None else ("native", module.isa())
    alone = module is not None and module.in_forked_child()
    return Backend(name, isa, 1 if alone else torch.get_num_threads(), reason)


def isas() -> tuple[str, ...]:
    """Returns the instruction sets of the native kernels that may run here, narrowest first: those of the machine, up
    to HOTROW_ISA if it is set. Empty for the reference."""
    module, limit = _native(), isa_limit()
    available = () if module is None else tuple(module.isas())
    return available[: available.index(limit) + 1] if limit in available else available


def bfloat16_products() -> str:
    """The name of hotrow's own products of bfloat16 that run here, "amx_bf16" or "avx512_bf16"; "" if none does.

    The processor needs avx512_bf16, and the kernels must be avx512's.
    """
    module = _native()
    return "" if module is None else str(module.bfloat16_products())


def amx_refusal() -> str:
    """Why products of bfloat16 do not run on the AMX of this processor, to follow what runs; "" if it has none."""
    refused = native_module().tiles_refused()
    return f", not on AMX, because the system refuses its tiles ({os.strerror(refused)})" if refused > 0 else ""


def isa_of(dense_dtype: str) -> str:
    """Returns the instruction set by which results may differ in their last bits. It names our products of bfloat16 if
    they run, because other processors with the same set may leave them to torch."""
    isa = backend().isa
    return f"{isa} with {products}" if dense_dtype == "bf16" and (products := bfloat16_products()) else isa


def allocate(*shape: int, dtype: torch.dtype = torch.float32, sparse: bool = False) -> Tensor:
    """Returns a zeroed tensor; from 2 MiB up on huge pages if the system grants them (see `grants_huge_pages`). dtype:
    at most 4 bytes wide. sparse: most of it will never be touched, so it may be larger than memory. Pages cost nothing
    until they are touched. Raises MemoryError if there is no address space left."""
    module = _native()
    if module is None:
        return torch.zeros(shape, dtype=dtype)
    if dtype == torch.float32:
        return torch.from_numpy(module.allocate(shape, sparse)[0])
    num_elements = math.prod(shape)
    floats = torch.from_numpy(module.allocate((-(-num_elements * dtype.itemsize // 4),), sparse)[0])
    return floats.view(dtype)[:num_elements].view(shape)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns an uninitialised tensor for values that live no longer than a step. Large ones reuse pages of earlier
    ones: pages that are new to the process cost as much as a pass over them."""
    num_elements = math.prod(shape)
    num_floats = -(-num_elements * dtype.itemsize // 8) * 2 if num_elements * 2 > KEPT_FLOATS else 0  # in 8 bytes each
    if num_floats < KEPT_FLOATS or (module := _native()) is None:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.float32:
        return torch.from_numpy(module.take(shape))
    return torch.from_numpy(module.take((num_floats,))).view(dtype)[:num_elements].view(shape)


def grants_huge_pages() -> bool:
    """Returns whether `allocate` gets huge pages here; without them access to random rows is up to twice as slow."""
    module = _native()
    if module is None or not module.allocate((1 << 20,))[1]:
        return False
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:  # noqa: PTH123
            return "[never]" not in file.read()
    except OSError:
        return False


class Arrays:
    """One array per table: weights [N, D], or optimizer state [N, D] or [N], float32; rows are addressed by slot.

    Weights may be float16, or bfloat16 with their lower halves in `low` (int16 [N, D]; None for other tables). Keeps
    the tensors and, for the native kernels, their checked pointers, so that steps need not collect them. Raises
    ValueError if an array has another type, is not contiguous or is not on the CPU.
    """

    def __init__(self, tensors: Sequence[Tensor], low: Sequence[Tensor | None] | None = None) -> None:
        self.tensors, self.low = tuple(tensors), tuple(low or [None] * len(tensors))
        check_arrays(self.tensors, self.low, torch.device("cpu"))
        module = _native()
        self.native = None if module is None else module.Arrays([t.detach() for t in self.tensors], self.low)


def check_arrays(tensors: Sequence[Tensor], low: Sequence[Tensor | None], device: torch.device) -> None:
    """Raises ValueError unless each array and its lower halves are contiguous, on `device` and of types that fit."""
    for t, (tensor, halves) in enumerate(zip(tensors, low, strict=True)):
        _check_array(tensor, (torch.float32, torch.float16, torch.bfloat16), f"array {t}", device)
        if halves is not None:
            _check_array(halves, (torch.int16,), f"low half {t}", device)
        if (tensor.dtype == torch.bfloat16) != (halves is not None and halves.shape == tensor.shape):
            raise ValueError(
                f"array {t} is {tensor.dtype} {tuple(tensor.shape)}, its lower halves are "
                f"{None if halves is None else tuple(halves.shape)}; bfloat16 needs as many, others none"
            )


def _check_array(tensor: Tensor, dtypes: Sequence[torch.dtype], what: str, device: torch.device) -> None:
    if tensor.dtype not in dtypes or not tensor.is_contiguous() or tensor.device != device:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{what} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}; "
            f"pass contiguous {allowed} on {'the cpu' if device.type == 'cpu' else device}"
        )


class Kernels:
    """The ops of a collection, or of some of its features. layout: the features that a lookup serves. among: the layout
    of the whole collection if `layout` is a part of it. The object keeps only positions of features among a batch's
    keys, so results do not depend on earlier calls."""

    def __init__(self, layout: Layout, *, among: Layout | None = None) -> None:
        self.layout = layout
        served = {feature.name: feature for feature in layout.features}
        self._features = [served.get(feature.name) for feature in (among or layout).features]
        self._positions: dict[tuple[str, ...], list[int]] = {}
        module = _native()
        if module is not None:
            specs = [f and (f.table, f.columns.start, f.pooling == "mean") for f in self._features]
            self._native_layout = module.Layout(specs)

    def _batch(self, sparse: KeyedJaggedTensor) -> Any:
        stride = sparse.stride
        offsets = None if sparse.one_hot else sparse.offsets
        return _native().Batch(
            *_views(sparse.values, offsets, sparse.weights),
            [position * stride for position in self.positions(sparse.keys)],
            stride,
            sparse.parts or (),
        )

    def positions(self, keys: tuple[str, ...]) -> list[int]:
        """Returns the position of each feature of the collection among `keys`; 0 for features that are not served.
        Raises ValueError if a feature of the layout is missing; the error names it."""
        found = self._positions.get(keys)
        if found is None:
            self.layout.check_keys(keys)
            found = self._positions[keys] = [keys.index(f.name) if f else 0 for f in self._features]
        return found

    def lookup(
        self,
        weights: Arrays,
        sparse: KeyedJaggedTensor,
        out: Tensor | None = None,
        *,
        blame: KeyedJaggedTensor | None = None,
    ) -> Tensor:
        """Returns the pooled rows of every feature: [B, width] float32, columns in the layout's order
        (`reference.lookup`).

        blame: the batch whose samples and positions an error names; None means `sparse`.
        Raises ValueError for a missing feature and for an id outside its table.
        """
        if out is None:
            out = empty(sparse.stride, self.layout.width)
        if _native() is None:
            self.positions(sparse.keys)
            if types.first_bad_id(self.layout, weights.tensors, sparse) is not None:  # `sparse` may hold slots
                self._raise_bad_ids(weights, blame or sparse)
            reference.lookup(self.layout, weights.tensors, sparse, out)
        elif not _native().lookup(
            self._native_layout, weights.native, self._batch(sparse), *_views(out), torch.get_num_threads()
        ):
            self._raise_bad_ids(weights, blame or sparse)
        return out

    def weight_gradient(self, weights: Arrays, sparse: KeyedJaggedTensor, grad: Tensor) -> Tensor:
        """Returns the gradient of the per-sample weights, shaped as `sparse.values`; grad: of `lookup`'s output.
        Positions of features that are not in the layout get 0. Raises as `lookup`."""
        out = torch.zeros(sparse.values.numel())
        if _native() is None:
            self._check_ids(weights, sparse)
            reference.weight_gradient(self.layout, weights.tensors, sparse, grad, out)
        elif not _native().weight_gradient(
            self._native_layout, weights.native, self._batch(sparse), *_views(grad, out), torch.get_num_threads()
        ):
            self._raise_bad_ids(weights, sparse)
        return out

    def update(
        self,
        weights: Arrays,
        states: Sequence[Arrays],
        pending: Lookups,
        rules: Sequence[Rule],
        sums: SentSums | None = None,
    ) -> None:
        """Runs backward and update of all tables in one pass, in place (`reference.update`).

        pending: lookups in forward order: the kernels that made each (these, or kernels for some of the features), the
        batch, and the gradient of the output [B, width] with contiguous rows. states: NUM_STATES of the algorithm.
        rules: one per table. If the batches are cut into micro-batches, a row's gradients are first summed as by
        `row_sums`, and the rule is applied once to the sum. sums: of rows of other tables than `pending`. Raises
        ValueError for an id outside its table, and for batches that are cut into different numbers of parts; then no
        row has changed.
        """
        types.count_parts(sparse for _, sparse, _ in pending)
        if _native() is None:
            for kernels, sparse, _ in pending:
                kernels._check_ids(weights, sparse)
            lookups = [(kernels.layout, sparse, grad) for kernels, sparse, grad in pending]
            lookups += [] if sums is None else sums.lookups(self.layout)
            state_tensors = [state.tensors for state in states]
            reference.update(self.layout, weights.tensors, state_tensors, lookups, rules, low=weights.low)
            return
        result = _native().update(
            len(self._features),
            weights.native,
            [state.native for state in states],
            _native_lookups(pending),
            [rule.numbers for rule in rules],
            _native_sums(sums),
            torch.get_num_threads(),
        )
        if result == 1:
            self._raise_altered(weights, pending)
        assert result == 0, f"update failed with code {result}"

    def row_sums(self, weights: Arrays, pending: Lookups, leaves: tuple[int, int]) -> dict[tree.Node, list[RowSums]]:
        """Returns the summed gradients of the rows that `pending` lookups read, by node of `tree.aligned(*leaves)`.

        Of each node, by table: the rows, rising, and their sums [n, D] (`reference.row_sums`). Part k of the batches
        (`KeyedJaggedTensor.parts`) is leaf leaves[0] + k; leaves beyond the parts are absent, so that leaves
        (0, tree.width(V)) give all V micro-batches of one process as one node. pending: as for `update`. Of
        `weights` only the shapes count.
        Raises ValueError for an id outside its table, and for batches that are cut into different numbers of parts.
        """
        dims = [tensor.shape[1] for tensor in weights.tensors]
        return {node: sums.tables(dims) for node, sums in self.flat_row_sums(weights, pending, leaves).items()}

    def flat_row_sums(
        self, weights: Arrays, pending: Lookups, leaves: tuple[int, int], sums: SentSums | None = None
    ) -> dict[tree.Node, FlatSums]:
        """As `row_sums`, with those of all tables of a node one behind another. sums: as for `update`."""
        types.count_parts(sparse for _, sparse, _ in pending)
        if _native() is None:
            for kernels, sparse, _ in pending:
                kernels._check_ids(weights, sparse)
            lookups = [(kernels.layout, sparse, grad) for kernels, sparse, grad in pending]
            lookups += [] if sums is None else sums.lookups(self.layout)
            found = reference.row_sums(self.layout, lookups, leaves)
            return {node: FlatSums.of(tables) for node, tables in found.items()}
        nodes = tree.aligned(*leaves)
        lookups, threads = _native_lookups(pending), torch.get_num_threads()
        found = _native().sum_rows(
            len(self._features), weights.native, lookups, leaves[0], nodes, _native_sums(sums), threads
        )
        if found is None:
            self._raise_altered(weights, pending)
        num_rows, rows, totals = found
        dims = [tensor.shape[1] for tensor in weights.tensors]
        floats = [sum(n * dim for n, dim in zip(counts, dims, strict=True)) for counts in num_rows]
        each = torch.split(torch.from_numpy(rows), [*map(sum, num_rows)]), torch.split(torch.from_numpy(totals), floats)
        return {node: FlatSums(*own) for node, own in zip(nodes, zip(num_rows, *each, strict=True), strict=True)}

    def _check_ids(self, weights: Arrays, sparse: KeyedJaggedTensor) -> None:
        self.positions(sparse.keys)
        bad = types.first_bad_id(self.layout, weights.tensors, sparse)
        if bad is not None:
            raise ValueError(bad.text(weights.tensors[bad.feature.table].shape[0]))

    def _raise_altered(self, weights: Arrays, pending: Lookups) -> NoReturn:
        for kernels, sparse, _ in pending:
            kernels._check_ids(weights, sparse)
        raise ValueError(ALTERED)

    def _raise_bad_ids(self, weights: Arrays, sparse: KeyedJaggedTensor) -> None:
        self._check_ids(weights, sparse)
        raise ValueError(ALTERED)


def _native_lookups(pending: Lookups) -> list[tuple[Any, ...]]:
    return [(kernels._native_layout, kernels._batch(sparse), *_views(grad)) for kernels, sparse, grad in pending]


def _native_sums(sums: SentSums | None) -> Any:
    if sums is None:
        return None
    counts, starts = (own.ravel() for own in (sums.pieces.counts, sums.pieces.starts))
    return *_views(sums.slots), counts, starts, sums.leaves, _views(*sums.messages)


def first_nonfinite(values: Tensor) -> tuple[int, ...] | None:
    """Returns the index of the first NaN or infinity in `values`, in row-major order; None if all are finite."""
    matrix = values.detach()
    if matrix.dim() != 2 or matrix.stride(1) != 1:
        matrix = matrix.reshape(1, -1)
    if _native() is None or matrix.dtype != torch.float32 or matrix.device.type != "cpu":
        bad = (~torch.isfinite(matrix)).view(-1).nonzero()
        flat = int(bad[0]) if len(bad) else -1
    else:
        flat = _native().first_nonfinite(*_views(matrix), torch.get_num_threads())
    if flat < 0:
        return None
    index: list[int] = []
    for size in reversed(values.shape):
        flat, place = divmod(flat, size)
        index.insert(0, place)
    return tuple(index)


def all_finite(values: Sequence[Tensor]) -> bool:
    """Returns whether no value [...] has NaN or infinity: `first_nonfinite` for many small tensors, in one call."""
    module = _native()
    if module is None or any(not v.is_cpu or v.dtype != torch.float32 or not v.is_contiguous() for v in values):
        return all(first_nonfinite(own) is None for own in values)
    addresses, sizes = [own.data_ptr() for own in values], [own.numel() for own in values]
    return bool(module.all_finite(addresses, sizes, torch.get_num_threads()))


def are_upper_halves(weight: Tensor) -> bool:
    """Returns whether the lower 16 bits of all of `weight` [...], float32, are 0."""
    if _native() is None or not weight.is_contiguous():
        return not (weight.view(torch.int32) & 0xFFFF).any()
    return bool(_native().are_upper_halves(*_views(weight.detach()), torch.get_num_threads()))


@torch.no_grad()
def split_halves(weight: Tensor, low: Tensor) -> None:
    """Moves the lower halves of `weight`, float32 on the CPU, to `low`, int16; `weight` has zeros in their place."""
    if _native() is None or not weight.is_contiguous():
        high, lower = types.split(weight)
        weight.copy_(high)
        low.copy_(lower)
    else:
        _native().split_halves(*_views(weight.detach(), low), torch.get_num_threads())


@torch.no_grad()
def split_sgd(
    weights: Sequence[Tensor], low: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float, weight_decay: float
) -> None:
    """One step of SGD of weights in two halves, in place, to the bits of `reference.split_sgd` on every processor.
    weights: upper halves, float32 on the CPU, with zeros below; low: int16 of the same shapes; grads: float32."""
    if _native() is None or not all(weight.is_contiguous() for weight in weights):
        for weight, lower, grad in zip(weights, low, grads, strict=True):
            reference.split_sgd(weight, lower, grad, lr=lr, weight_decay=weight_decay)
        return
    own = ([weight.detach() for weight in weights], low, [grad.detach().contiguous() for grad in grads])
    _native().split_sgd(*(_views(*group) for group in own), lr, weight_decay, torch.get_num_threads())


@torch.no_grad()
def flush_denormals(weights: Iterable[Tensor]) -> None:
    """Makes zeros, which keep their signs, of denormal numbers in float32 `weights` on the CPU. torch's products and
    optimizers take up to fifty times as long for denormal numbers; our products make zeros of them as they read."""
    own = [weight.detach() for weight in weights if weight.device.type == "cpu" and weight.dtype == torch.float32]
    if _native() is None or not all(weight.is_contiguous() for weight in own):
        for weight in own:
            weight.mul_(weight.abs() >= torch.finfo(torch.float32).tiny)
    else:
        _native().flush_denormals(_views(*own), torch.get_num_threads())


def distinct_rows(
    values: Tensor, spans: Sequence[tuple[int, int, int]], num_rows: Sequence[int], shares: Shares
) -> Distinct | None:
    """Returns the distinct rows of a batch by table and holder (`reference.distinct_rows`); None if an id is outside
    its table. spans: a table's number, which rises, and the first and the end of its ids in `values`. num_rows: by
    table."""
    if _native() is None:
        return reference.distinct_rows(values, spans, num_rows, shares)
    found = _native().distinct_rows(*_views(values), spans, num_rows, _shares(shares), torch.get_num_threads())
    if found is None:
        return None
    counts, *arrays = found
    return Distinct(np.array(counts, np.int64).reshape(len(num_rows), -1), *arrays)


def pack_sums(
    nodes: Sequence[FlatSums],
    first_keys: Numbers,
    dims: Numbers,
    row_of: Sequence[Numbers] = (),
    shares: Shares | None = None,
) -> list[tuple[Tensor, int]]:
    """Returns sums of rows as int32 messages, and how many words of each are keys (`reference.pack_sums`). first_keys:
    [T + 1]; the last one is the end of all keys. Raises ValueError for slots and rows out of range."""
    if _native() is None:
        return reference.pack_sums(nodes, first_keys, dims.tolist(), row_of, shares)
    each = [(own.counts, *_views(own.rows, own.sums)) for own in nodes]
    homes = _shares(shares or Shares((), (), 0, 1))
    made = _native().pack_sums(each, row_of, first_keys.tolist(), dims.tolist(), homes, torch.get_num_threads())
    return [(torch.from_numpy(words), num_keys) for words, num_keys in made]


def unpack_sums(
    messages: Sequence[ComingSums],
    pieces: Sequence[tuple[int, int]],
    first_keys: Numbers,
    dims: Numbers,
    prefix: Sequence[int],
) -> Pieces:
    """Returns the rows of some nodes (message, node) of messages (`reference.unpack_sums`). Raises RuntimeError if
    a message is not one that `pack_sums` makes."""
    if _native() is None:
        return reference.unpack_sums(messages, pieces, first_keys, dims.tolist(), prefix)
    each = [(*_views(words), num_nodes, types.TAKEN.index(taken)) for words, num_nodes, taken in messages]
    found = _native().unpack_sums(each, pieces, first_keys.tolist(), dims.tolist(), prefix)
    if found is None:
        raise RuntimeError("a message of another rank is damaged: its rows or their number are not those of this run")
    *numbers, rows = found
    counts, starts = (np.array(own, np.int64).reshape(len(dims), len(pieces)) for own in numbers)
    return Pieces(counts, starts, rows)


def _shares(shares: Shares) -> Any:
    return _native().Shares(shares.prefix, shares.owner, shares.rank, shares.num_ranks)


def pack_rows(
    weights: Arrays, rows: Tensor, counts: Numbers, slots: Arrays, firsts: Sequence[int], messages: Sequence[Tensor]
) -> None:
    """Copies rows of `weights`, as stored, into messages and slots (`reference.pack_rows`).

    rows: int64, table by table, in each group by group. counts: their number by table and group [T, G]. Group 0 goes to
    the slots of its table from firsts[t] on; group 1 + m to messages[m], uint8, table after table; others stay.
    Raises ValueError for rows outside their table, and for messages and slots that are too few.
    """
    if _native() is None:
        reference.pack_rows(weights.tensors, rows, counts, slots.tensors, firsts, messages)
        return
    to = slots.native, firsts, _views(*messages)
    _native().pack_rows(weights.native, *_views(rows), counts.ravel(), *to, torch.get_num_threads())


def unpack_rows(messages: Sequence[Tensor], counts: Numbers, slots: Arrays, firsts: Sequence[int]) -> None:
    """Copies rows from messages that `pack_rows` made to slots, behind those of group 0 (`reference.unpack_rows`).
    counts: rows by table and group; messages[m] is group 1 + m. Raises ValueError as `pack_rows` does."""
    if _native() is None:
        reference.unpack_rows(messages, counts, slots.tensors, firsts)
        return
    _native().unpack_rows(_views(*messages), counts.ravel(), slots.native, firsts, torch.get_num_threads())


Lookups: TypeAlias = Sequence[tuple[Kernels, KeyedJaggedTensor, Tensor]]
"""Lookups in forward order: the kernels that made each, the batch, and the gradient of the output."""


class KernelSet:
    """The kernels of one collection: for pooled lookups, for the sequence of each feature, for some of the tables."""

    def __init__(self, layout: Layout, make: Callable[..., Any] = Kernels) -> None:
        self.pooled: Kernels = make(layout)
        self.sequences: dict[str, Kernels] = {
            feature.name: make(layout.sequence_of(feature.name), among=layout) for feature in layout.features
        }
        self._partial: dict[frozenset[int], Kernels] = {}  # by the tables that they update

    def are_pooled(self, kernels: Kernels) -> bool:
        """Returns whether `kernels` update the rows of pooled lookups, of all tables or of some."""
        return kernels is self.pooled or kernels in self._partial.values()

    def without(self, kernels: Kernels, frozen: frozenset[int]) -> Kernels | None:
        """Returns `kernels` for an update that leaves the `frozen` tables alone; None if it updates no other."""
        if not frozen:
            return kernels
        kept = tuple(feature for feature in kernels.layout.features if feature.table not in frozen)
        if len(kept) == len(kernels.layout.features):
            return kernels
        if not kept:
            return None
        numbers = frozenset(feature.table for feature in kept)
        if numbers not in self._partial:
            whole = self.pooled.layout
            self._partial[numbers] = Kernels(Layout(kept, whole.width), among=whole)
        return self._partial[numbers]


def fill_uniform(
    out: Tensor,
    *,
    key: int,
    bound: float,
    zero_rows: int = 0,
    first_row: int = 0,
    births: Births = WHOLE,
    column: int = 0,
) -> None:
    """Writes a table's initial rows from `first_row` on into out [n, D]: U(-bound, bound), see `reference`.

    births: which rows of a whole table these are; zero_rows: of the whole table; column: of the whole table, the first
    of the D columns, a multiple of 4.
    """
    done = 0
    for rows in births.runs(first_row, first_row + len(out)):
        part, done = out[done : done + len(rows)], done + len(rows)
        if not len(rows):
            continue
        if _native() is None:
            reference.fill_uniform(key, rows.start, part, bound, zero_rows, rows.step, column)
        else:
            _native().fill_uniform(key, rows.start, rows.step, column, part, bound, zero_rows, torch.get_num_threads())


def uniform_rows(
    rows: slice | Tensor, dim: int, *, key: int, bound: float, zero_rows: int, births: Births = WHOLE
) -> Tensor:
    """Returns the initial values [n, dim] of rows of a table, given as a range or by their ids; see `fill_uniform`."""
    if isinstance(rows, Tensor):
        behind = births.first + (rows - births.prefix) * births.step
        born = torch.where(rows < births.prefix, rows, behind)
        if _native() is None:
            return reference.uniform_rows(key, born, dim, bound, zero_rows)
        out = torch.empty(len(rows), dim)
        _native().fill_uniform_rows(key, *_views(born, out), bound, zero_rows, torch.get_num_threads())
        return out
    out = torch.empty(rows.stop - rows.start, dim)
    fill_uniform(out, key=key, bound=bound, zero_rows=zero_rows, first_row=rows.start, births=births)
    return out


class _Interaction(torch.autograd.Function):
    """As `interactions`, by the native kernels."""

    @staticmethod
    def forward(ctx: Any, dense_BD: Tensor, pooled_BFD: Tensor, concatenated: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        ctx.save_for_backward(dense_BD, pooled_BFD)
        ctx.set_materialize_grads(False)
        return _interact(dense_BD.detach(), pooled_BFD.detach(), concatenated), pooled_BFD[:, :, 0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_BF: Tensor | None) -> tuple[Tensor, Tensor, None]:
        dense_BD, pooled_BFD = ctx.saved_tensors
        grads = empty(*dense_BD.shape), empty(*pooled_BFD.shape)
        given = grad.contiguous(), None if grad_BF is None else grad_BF.contiguous(), dense_BD, pooled_BFD
        _native().interact_backward(*_views(*given, *grads), torch.get_num_threads())
        return *grads, None


def _interact(dense_BD: Tensor, pooled_BFD: Tensor, concatenated: bool) -> Tensor:  # noqa: FBT001
    B, F, D = pooled_BFD.shape
    out = empty(B, D + (F + 1) * F // 2 + (F * D if concatenated else 0))
    _native().interact(*_views(dense_BD, pooled_BFD, out), torch.get_num_threads())
    return out


class _TritonInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
        dense_BD, pooled_BFD = dense_BD.detach().contiguous(), pooled_BFD.detach().contiguous()
        ctx.save_for_backward(dense_BD, pooled_BFD)
        return triton_ops("products of vectors").interact(dense_BD, pooled_BFD)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return triton_ops("products of vectors").interact_backward(grad.contiguous(), *ctx.saved_tensors)  # type: ignore[no-any-return]


def dot_interaction(dense_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
    """`[dense, T_i . T_j for i > j]` with T = [dense; pooled], the dot interaction of DLRM: [B, D + (F + 1) F / 2].

    float32; pairs in the order (1,0), (2,0), (2,1), (3,0), ...; vector 0 is the dense one. Differentiable once. On
    GPUs the kernels of triton_ops.py run. Torch's operations run under autocast, without the native module, and on a
    GPU without Triton.
    Raises ValueError if shapes or dtypes do not fit.
    """
    return interactions(dense_BD, pooled_BFD)[0]


def interactions(dense_BD: Tensor, pooled_BFD: Tensor, *, concatenated: bool = False) -> tuple[Tensor, Tensor]:
    """The `dot_interaction`, and the first column of the pooled rows, [B, F], as one operation of autograd.
    concatenated: whether the pooled rows themselves stand behind the products."""
    fits = dense_BD.dim() == 2 and pooled_BFD.dim() == 3 and dense_BD.shape == pooled_BFD.shape[::2]
    wide = _autocast(dense_BD) or dense_BD.dtype == pooled_BFD.dtype == torch.float32
    if not fits or not wide:
        raise ValueError(
            f"dense is {dense_BD.dtype} {tuple(dense_BD.shape)} and pooled {pooled_BFD.dtype} "
            f"{tuple(pooled_BFD.shape)}; pass float32 [B, D] and [B, F, D]"
        )
    if _by_triton(dense_BD):
        out = _TritonInteraction.apply(dense_BD.float(), pooled_BFD.float())  # type: ignore[no-untyped-call]
    elif _left_to_torch(dense_BD):
        out = reference.interact(dense_BD, pooled_BFD)
    else:
        dense_BD, pooled_BFD = dense_BD.float().contiguous(), pooled_BFD.float().contiguous()
        if torch.is_grad_enabled() and (dense_BD.requires_grad or pooled_BFD.requires_grad):
            return _Interaction.apply(dense_BD, pooled_BFD, concatenated)  # type: ignore[no-any-return, no-untyped-call]
        return _interact(dense_BD.detach(), pooled_BFD.detach(), concatenated), pooled_BFD[:, :, 0]
    return torch.cat([out, pooled_BFD.flatten(1)], dim=1) if concatenated else out, pooled_BFD[:, :, 0]


class _MemberRows(torch.autograd.Function):
    """[B, F, M, D] -> [M, B, F, D], multiplied on the way by what `drops` keep."""

    @staticmethod
    def forward(ctx: Any, together: Tensor, drops: Sequence[Drop]) -> Tensor:
        ctx.drops, (B, F, M, D) = drops, together.shape
        apart = empty(M, B, F, D)
        views = _views(apart, together.detach().contiguous())
        _native().move_member_rows(*views, True, drops, torch.get_num_threads())  # noqa: FBT003
        return apart

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        M, B, F, D = grad.shape
        together = empty(B, F, M, D)
        views = _views(grad.contiguous(), together)
        _native().move_member_rows(*views, False, ctx.drops, torch.get_num_threads())  # noqa: FBT003
        return together, None


def member_rows(pooled_BFMD: Tensor, drops: Sequence[Drop]) -> Tensor:
    """The pooled rows of each member, [M, B, F, D]. drops: which of its rows each member leaves out; may be empty."""
    if not _left_to_torch(pooled_BFMD):
        return _MemberRows.apply(pooled_BFMD.float(), drops)  # type: ignore[no-any-return, no-untyped-call]
    rows_MBFD = pooled_BFMD.permute(2, 0, 1, 3).contiguous()
    return rows_MBFD * kept(drops, *rows_MBFD.shape[1:3]).to(rows_MBFD.device)[..., None] if drops else rows_MBFD


def _autocast(values: Tensor) -> bool:
    """Returns whether autocast is on, so that inputs may have any type."""
    return torch.is_autocast_enabled("cpu" if values.is_cpu else values.device.type)


def _by_triton(values: Tensor) -> bool:
    """Returns whether the kernels for GPUs run, which multiply in float32 alone."""
    return values.device.type == "cuda" and has_triton() and not _autocast(values)


def _left_to_torch(values: Tensor) -> bool:
    """Returns whether torch's operations run: on devices, without the native module, and under most autocasts. Ours run
    under autocast to bfloat16 on the CPU if we have products: `mlp` in bfloat16, the rest in float32."""
    if _native() is None or not values.is_cpu:
        return True
    return _autocast(values) and not (bfloat16_products() and torch.get_autocast_dtype("cpu") == torch.bfloat16)


def _views(*tensors: Tensor | None) -> list[Any]:
    """Returns CPU tensors as the native module takes them; `Tensor.__dlpack__` would take ten times as long."""
    view = torch.to_dlpack  # type: ignore[attr-defined]  # public, but not in torch's __all__
    return [None if each is None else view(each) for each in tensors]


class Packed:
    """Weights of MLPs in the layout that their products take. only: the weights to keep so; if None, all that come.
    With `only`, several threads may use it at once after each of these weights came once."""

    def __init__(self, only: Iterable[Tensor] | None = None) -> None:
        self._native = None if (module := _native()) is None else module.PackedWeights()
        self._weights: list[Tensor] = [] if only is None else list(only)
        self._addresses = None if only is None else {weight.data_ptr() for weight in self._weights}

    def keep(self, weights: Sequence[Tensor]) -> Any:
        """Returns the native object; `weights` live as long as it does, so that none takes another's address."""
        if self._addresses is None:
            self._weights += weights
        elif not self._addresses.issuperset(weight.data_ptr() for weight in weights):
            return None
        return self._native


_packed: ContextVar[Packed | None] = ContextVar("packed", default=None)


class weights_stay:  # noqa: N801  # a block, entered at every call of a server
    """Inside the block no weight of an MLP may change: each is rearranged for its products once, not once a call. This
    helps many small batches in a row; results are the same. packed: of earlier blocks; if None, a new one."""

    def __init__(self, packed: Packed | None = None) -> None:
        self._own = packed or Packed()

    def __enter__(self) -> None:
        self._token = _packed.set(self._own)

    def __exit__(self, *error: object) -> None:
        _packed.reset(self._token)


How: TypeAlias = tuple[tuple[int, ...], list[int], Activation, Sequence[Drop]]
"""x's shape [M, B, I], the widths of the layers, `last`, and what the layers of each member drop, one after another."""


def empty_like(own: Tensor) -> Tensor:
    """Returns an uninitialised tensor like `own`, float32 on any device; a large one on the CPU is made by `empty`."""
    return torch.empty_like(own) if own.numel() < KEPT_FLOATS or not own.is_cpu else empty(*own.shape)


class _MLP(torch.autograd.Function):
    """As `_mlp_forward`. Keeps the outputs of the hidden layers for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How, *parameters: Tensor) -> Tensor:
        shape, widths, last, _ = how
        hidden = empty(shape[0] * shape[1] * (sum(widths) - widths[-1]))
        out, ctx.packed = _mlp_forward(x, how, parameters, hidden.data_ptr())
        ctx.save_for_backward(x, hidden, out if last == "relu" else x, *parameters[::2])
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd is on in here only if somebody wants to differentiate again.
        return (_once if torch.is_grad_enabled() else _mlp_backward)(ctx, grad)


def _mlp_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, hidden, out, *weights), (shape, widths, last, drops) = ctx.saved_tensors, ctx.how
    scale = drops[0].scale if drops else 1.0
    if len(drops) == len(weights):  # the last layer's outputs too
        grad = grad * scale
    grad = torch.ops.aten.threshold_backward(grad, out, 0) if last == "relu" else grad.contiguous()
    grad_x = empty_like(x) if ctx.needs_input_grad[0] else None
    grads = [own for weight in weights for own in (empty_like(weight), torch.empty(weight.shape[0]))]
    inputs = [own.data_ptr() for own in weights], x.data_ptr(), hidden.data_ptr(), grad.data_ptr()
    outputs = [own.data_ptr() for own in grads], 0 if grad_x is None else grad_x.data_ptr()
    _native().mlp_backward(shape, widths, *inputs, *outputs, scale, torch.get_num_threads(), ctx.packed)
    return grad_x, None, *grads


_once = once_differentiable(_mlp_backward)


def _mlp_forward(x: Tensor, how: How, parameters: Sequence[Tensor], hidden: int = 0) -> tuple[Tensor, Any]:
    """The layers of an MLP on x [1, B, I], or of M of them, each on its own x [M, B, I]; and the packed weights if they
    are kept. parameters: weight [O, I] and bias [O] in turn, all of one MLP before those of the next. hidden: where to
    write what the layers hand on, or 0."""
    shape, widths, last, drops = how
    packed = None if (own := _packed.get()) is None else own.keep(parameters[::2])
    out, addresses = empty(*x.shape[:-1], widths[-1]), [parameter.data_ptr() for parameter in parameters]
    outputs = hidden, out.data_ptr(), last == "relu", drops
    _native().mlp(shape, widths, addresses, x.data_ptr(), *outputs, torch.get_num_threads(), packed)
    return out, packed


def _mlp(x: Tensor, how: How, parameters: list[Tensor]) -> Tensor:
    """As `_mlp_forward`; autograd learns of it only if a gradient is wanted."""
    if torch.is_grad_enabled() and (x.requires_grad or any(own.requires_grad for own in parameters)):
        return _MLP.apply(x, how, *parameters)  # type: ignore[no-any-return, no-untyped-call]
    return _mlp_forward(x, how, parameters)[0]


class _BFloat16MLP(torch.autograd.Function):
    """As `_MLP`, in bfloat16 with float32 sums (docs/numerics.md); the layers' inputs are pairs, words of int32."""

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, last: Activation, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        x_BI = x_BI.detach().contiguous()
        rows = -(-len(x_BI) // TILE_ROWS) * TILE_ROWS
        inputs = [empty(rows, -(-w.shape[1] // 2)).view(torch.int32) for w in weights]
        out_BO = empty(len(x_BI), len(biases[-1]))
        ctx.packed = None if (packed := _packed.get()) is None else packed.keep(weights)
        views = _views(x_BI)[0], _views(*weights), _views(*biases), last == "relu", _views(*inputs), *_views(out_BO)
        _native().mlp_bf16(*views, torch.get_num_threads(), ctx.packed)
        ctx.save_for_backward(out_BO, *inputs, *weights)
        ctx.last = last
        return out_BO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, ...]:
        out_BO, *saved = ctx.saved_tensors
        inputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        grad = torch.ops.aten.threshold_backward(grad_BO, out_BO, 0) if ctx.last == "relu" else grad_BO.contiguous()
        grad_weights, grad_biases = [empty(*w.shape) for w in weights], [empty(len(w)) for w in weights]
        grad_x = empty(len(grad), weights[0].shape[1]) if ctx.needs_input_grad[0] else None
        views = *_views(grad), *(_views(*group) for group in (inputs, weights, grad_weights, grad_biases))
        _native().mlp_bf16_backward(*views, *_views(grad_x), torch.get_num_threads(), ctx.packed)
        return grad_x, None, *(grad for pair in zip(grad_weights, grad_biases, strict=True) for grad in pair)


def mlp(x_BI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, last: Activation) -> Tensor:
    """`x = relu(x W^T + b)` for each W [O, I], b [O] in turn; after the last one only if `last` is "relu".

    float32 [B, I] -> [B, O of the last]; NaN goes through. Differentiable once. Devices as `dot_interaction`. Under
    torch's autocast to bfloat16, products are of bfloat16: our own if `bfloat16_products()`, else torch's.
    Raises ValueError if shapes or dtypes do not fit.
    """
    parameters, widths = _layers(x_BI, weights, biases)
    if _left_to_torch(x_BI):
        return reference.mlp(x_BI, weights, biases, last=last)
    if _autocast(x_BI):
        return _BFloat16MLP.apply(x_BI.float(), last, *(own.float() for own in parameters))  # type: ignore[no-any-return, no-untyped-call]
    return _mlp(x_BI.contiguous(), ((1, *x_BI.shape), widths, last, ()), parameters)


def kept(drops: Sequence[Drop], num_samples: int, width: int) -> Tensor:
    """Returns what each member's dropout multiplies each element by, 0 or its scale, [M, B, W] (`reference.kept`)."""
    if _native() is None:
        return torch.stack([reference.kept(drop, num_samples, width) for drop in drops])
    return member_rows(torch.ones(num_samples, width, len(drops), 1), drops)[..., 0]


def mlps(
    x_MBI: Tensor,
    weights: Sequence[Sequence[Tensor]],
    biases: Sequence[Sequence[Tensor]],
    *,
    last: Activation,
    drops: Sequence[Sequence[Drop]] = (),
) -> Tensor:
    """Returns the `mlp` of each of M members on its own x, [M, B, O], as one operation of autograd.

    Members have layers of the same widths; the bits of each are those of its `mlp` alone. drops: of each member, what
    the outputs of its layers are multiplied by before they go on: of all layers, or of all but the last, and the same
    share of each.
    """
    if _left_to_torch(x_MBI) or _autocast(x_MBI):
        for k, own in enumerate(zip(*drops, strict=True)):
            x_MBI = mlps(x_MBI, *([[of[k]] for of in each] for each in (weights, biases)), last="relu")
            x_MBI = x_MBI * kept(own, *x_MBI.shape[1:]).to(x_MBI.device)
        dropped = len(drops[0]) if drops else 0
        if dropped == len(weights[0]):
            return x_MBI
        each = zip(x_MBI, *([own[dropped:] for own in of] for of in (weights, biases)), strict=True)
        return torch.stack([mlp(x_BI, *layers, last=last) for x_BI, *layers in each])
    each_layers = [_layers(x_MBI, *layers) for layers in zip(weights, biases, strict=True)]
    parameters = [own for layers, _ in each_layers for own in layers]
    return _mlp(
        x_MBI.contiguous(),
        (tuple(x_MBI.shape), each_layers[0][1], last, [own for of in drops for own in of]),
        parameters,
    )


def _layers(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Returns weights and biases of an MLP in turn, contiguous, and the widths of its layers. Raises ValueError if
    shapes or dtypes do not fit."""
    width = x.shape[-1]
    widths: list[int] = []
    parameters: list[Tensor] = []
    for weight, bias in zip(weights, biases, strict=True):
        outputs = bias.shape[0]
        narrow = not x.dtype == weight.dtype == bias.dtype == torch.float32 and not _autocast(x)
        if weight.shape != (outputs, width) or narrow:
            raise ValueError(
                f"layer {len(widths)}: inputs are {x.dtype} of width {width}, weight {weight.dtype} "
                f"{tuple(weight.shape)}, bias {bias.dtype} {tuple(bias.shape)}; pass float32 [B, I], [O, I] and [O]"
            )
        width = outputs
        widths.append(width)
        parameters += (weight, bias) if weight.is_contiguous() else (weight.contiguous(), bias.contiguous())
    return parameters, widths


def product(x_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x W^T` [B, O], the one layer of an `mlp` without bias or ReLU. float32, also under autocast."""
    with torch.autocast(x_BI.device.type, enabled=False) if _autocast(x_BI) else nullcontext():
        x_BI, weight_OI = x_BI.float(), weight_OI.float()
        return mlp(x_BI, [weight_OI], [weight_OI.new_zeros(len(weight_OI))], last="linear")


def each_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of `x`, the same bits wherever it stands and whatever stands beside it.

    torch computes the end of a thread's share, which fills no vector, in another way than what comes before. So zeros
    follow x until vectors are full, and what one thread takes, SERIAL elements, is one operation.
    """
    padded = torch.cat([x.reshape(-1), x.new_zeros(-x.numel() % FULL)])
    made = [function(each) for each in torch.split(padded, tree.SERIAL)]
    return (made[0] if len(made) == 1 else torch.cat(made))[: x.numel()].view_as(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of each element alone."""
    return each_alone(torch.sigmoid, x)


PREFETCHES: tuple[tuple[int, Literal["l1", "l2"]], ...] = ((8, "l1"), (32, "l1"), (16, "l2"), (32, "l2"), (64, "l2"))
"""Distances in rows, and the cache to prefetch into. A machine's limit is the best over these."""


def touch_rows(
    rows: Tensor, ids: Tensor, *, distance: int, write: bool, threads: int, into: Literal["l1", "l2"] = "l2"
) -> float:
    """Returns the seconds to load (and store) a word of every cache line of `rows[ids]`: the machine's limit.

    For benchmarks. rows: float32 [N, D], D even; contents change if `write`. ids: int64, in range; each thread takes a
    piece. distance: how many rows ahead to prefetch, and `into` which cache. Raises RuntimeError without the native
    module.
    """
    module = _native()
    if module is None:
        raise RuntimeError(f"touch_rows needs the native module, but {backend().reason}")
    return float(module.touch_rows(rows, ids, distance, into == "l2", write, threads))
