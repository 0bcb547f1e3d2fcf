"""Random batches and tables for the kernel tests, every one a function of a stated seed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops
from hotrow.kernels.types import NUM_STATES, Algorithm, Layout, Rule, split, to_float16
from hotrow.tables import Dtype

DIMS = (1, 2, 3, 8, 10, 12, 16, 17, 20, 33, 40, 64, 100, 128)
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
GUARD = 64
SENTINEL = -12345.0


def bits(x: Tensor) -> Tensor:
    """A tensor as integers: equality of these tells -0 from +0."""
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.dtype.itemsize])


def assert_same_bits(ours: Tensor, reference: Tensor, what: object = "") -> None:
    differ = bits(ours) != bits(reference)
    assert not differ.any(), (
        f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {differ.nonzero()[0].tolist()}"
    )


def use(isa: str) -> None:
    """Switches the whole process to the native kernels of `isa`. Results do not change (law 1)."""
    ops._native().use_isa(ops.isas().index(isa))


@contextmanager
def running(isa: str, threads: int) -> Iterator[None]:
    """Native kernels of one instruction set on `threads` threads, and everything as before afterwards."""
    before, threads_before = ops.backend().isa, torch.get_num_threads()
    use(isa)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        use(before)


def every_backend(threads: Sequence[int] = (1, 2)) -> Iterator[tuple[str, int]]:
    """Runs the loop's body once per instruction set and thread count."""
    for isa in ops.isas():
        for count in threads:
            with running(isa, count):
                yield isa, count


class Guarded:
    """A tensor with guard words before and after it in memory."""

    def __init__(self, values: Tensor) -> None:
        self._buffer = torch.full((values.numel() + 2 * GUARD,), SENTINEL).to(values.dtype)
        self._guard = self._buffer[:GUARD].clone()
        self.tensor = self._buffer[GUARD:-GUARD].view(values.shape)
        self.tensor.copy_(values)

    def check(self) -> None:
        assert torch.equal(self._buffer[:GUARD], self._guard), "words before the array were written"
        assert torch.equal(self._buffer[-GUARD:], self._guard), "words after the array were written"


def guarded(tensors: Sequence[Tensor]) -> list[Guarded]:
    return [Guarded(torch.full_like(tensor, float("nan"))) for tensor in tensors]


@dataclass
class Case:
    """Tables (one large, one shared by two features, one of a single row) and batches that look them up."""

    layout: Layout
    weights: list[Tensor]
    low: list[Tensor | None]
    """Lower halves of bfloat16 weights."""
    batches: list[KeyedJaggedTensor]
    grads: list[Tensor]

    def states(self, algorithm: Algorithm, seed: int = 7) -> list[list[Tensor]]:
        """State as it stands in the middle of training, an array per table; none for SGD."""
        g = torch.Generator().manual_seed(seed)
        shapes = [w.shape[:1] if algorithm == "row_wise_adagrad" else w.shape for w in self.weights]
        return [[torch.rand(shape, generator=g) for shape in shapes] for _ in range(NUM_STATES[algorithm])]


RATES = (0.1, 0.03, 1.7)


def rules(algorithm: Algorithm, num_tables: int = 3) -> list[Rule]:
    """Different numbers for each of three tables; further ones take them in turn."""
    three = [
        Rule(algorithm=algorithm, lr=lr, eps=eps, beta1=0.9, beta2=0.97, beta=0.5, l1=l1, l2=0.1)
        for lr, eps, l1 in zip(RATES, (1e-8, 1e-3, 0.5), (0.0, 0.3, 0.05), strict=True)
    ]
    return [three[t % 3] for t in range(num_tables)]


def make_case(
    seed: int,
    *,
    dim: int,
    pooling: str = "sum",
    weighted: bool = False,
    id_dtype: torch.dtype = torch.int64,
    jagged: bool = True,
    num_batches: int = 1,
    num_samples: int = 13,
    num_rows: int = 200,
    longest: int = 6,
    crowded: bool = False,
    dtype: Dtype = "float32",
) -> Case:
    """A case with empty bags, ids repeated within and across bags, last rows, and keys in another order.

    crowded: half of the ids fall into the first 1/256 of the rows.
    """
    g = torch.Generator().manual_seed(seed)
    config = {"embedding_dim": dim, "pooling": pooling}
    tables = (
        TableConfig(name="large", num_embeddings=num_rows, feature_names=("a",), **config),
        TableConfig(name="shared", num_embeddings=9, feature_names=("b", "c"), **config),
        TableConfig(name="one", num_embeddings=1, feature_names=("d",), **config),
    )
    layout = Layout.of(tables)
    weights, low = stored([torch.randn(t.num_embeddings, dim, generator=g) for t in tables], dtype)
    sizes = {"c": 9, "elsewhere": 10**6, "a": num_rows, "d": 1, "b": 9}
    batches, grads = [], []
    for _ in range(num_batches):
        batches.append(_make_batch(g, sizes, num_samples, id_dtype, jagged, weighted, longest, crowded))
        # Rows further apart than they are wide, as autograd hands over slices of a concatenation.
        grads.append(torch.randn(num_samples, layout.width + 5, generator=g)[:, : layout.width])
    return Case(layout, weights, low, batches, grads)


def stored(weights: Sequence[Tensor], dtype: Dtype) -> tuple[list[Tensor], list[Tensor | None]]:
    """float32 weights in the storage `dtype`: (weights, lower halves of split ones)."""
    if dtype == "bfloat16":
        high, low = zip(*map(split, weights), strict=True)
        return list(high), list(low)
    return [to_float16(w) if dtype == "float16" else w for w in weights], [None] * len(weights)


def clones(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def _make_batch(
    g: torch.Generator,
    sizes: dict[str, int],
    num_samples: int,
    id_dtype: torch.dtype,
    jagged: bool,
    weighted: bool,
    longest: int,
    crowded: bool,
) -> KeyedJaggedTensor:
    lengths = torch.ones(len(sizes), num_samples, dtype=torch.int64)
    if jagged:
        lengths = torch.randint(0, longest + 1, lengths.shape, generator=g)
        lengths[:, ::4] = 0
        # Small tables' rows repeat often enough anyway, and the reference takes a turn per repetition.
        small = torch.tensor([size < 10 for size in sizes.values()])
        lengths[small] = lengths[small].clamp(max=2)
    values = []
    for size, count in zip(sizes.values(), lengths.sum(1).tolist(), strict=True):
        ids = torch.randint(0, size, (count,), generator=g)
        if crowded:
            ids[: count // 2] %= max(1, size // 256)
            ids = ids[torch.randperm(count, generator=g)]
        if count:
            ids[-1] = size - 1
            ids[: min(count // 3, 40)] = ids[0].clone()
        values.append(ids)
    flat = torch.cat(values).to(id_dtype)
    sample_weights = torch.randn(flat.numel(), generator=g) if weighted else None
    return KeyedJaggedTensor(list(sizes), flat, sample_weights, lengths=lengths.flatten() if jagged else None)


def assert_refused(
    message: str, kernels: Any, arrays: Any, batch: Any, grad: Tensor, algorithm: Algorithm = "sgd", states: Any = ()
) -> None:
    """By a lookup, by the gradient of weights, and by an update."""
    with pytest.raises(ValueError, match=message):
        kernels.lookup(arrays, batch)
    with pytest.raises(ValueError, match=message):
        kernels.weight_gradient(arrays, batch, grad)
    with pytest.raises(ValueError, match=message):
        kernels.update(arrays, [*states], [(kernels, batch, grad)], rules(algorithm))
