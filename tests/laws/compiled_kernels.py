"""Compiles what the kernels' callers launch, for a GPU of compute capability 9.0 that need not be there.

    python tests/laws/compiled_kernels.py DIM [--whole]      (TRITON_INTERPRET unset)

Real calls on tables of DIM columns decide which kernels there are: their tiles, and whether pointers are divisible by
16. Triton's launcher compiles them and stops before the launch. --whole: every storage, optimizer and batch, with and
without a map of slots, and each kernel also with pointers that are not divisible and sizes of 64 bits. Every `f32`
instruction has to round to nearest, once: none is contracted, approximate or atomic.
"""

import re
import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hotrow import KeyedJaggedTensor
from hotrow.kernels import triton_moves, triton_ops, types
from hotrow.kernels.types import Feature, Layout, Rule

NUM_ROWS, NUM_SAMPLES = 40, 64
made: dict[str, int] = {}
"""How many variants of each kernel were compiled."""


class Absent:
    """As much of a driver as it takes to compile for its GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def check(kernel: Any, code: dict[str, Any]) -> None:
    assert code["cubin"]
    words = re.findall(r"[a-z]+[.][a-z0-9.]*f32", code["ptx"])
    bad = [word for word in words if re.match("fma|mad|ex2|lg2|rsqrt|rcp|red|atom", word) or "approx" in word]
    bad += [word for word in words if "ftz" in word or re.match("(add|sub|mul|div|sqrt)[.](?!rn[.])", word)]
    assert not bad and "atom" not in code["ptx"], (kernel, bad)


def otherwise(value: Any) -> Any:
    """The argument of the same kind that Triton compiles other code for."""
    if isinstance(value, torch.Tensor):
        return torch.empty(3, dtype=value.dtype)[1:]
    return 1 << 40 if type(value) is int else value


def stop_before_launches(*, whole: bool) -> None:
    run = triton.JITFunction.run

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **more: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | more
        constants = {own.name for own in kernel.params if own.is_constexpr} | {"num_warps", "enable_fp_fusion"}
        pointers = [own for own in given.values() if isinstance(own, torch.Tensor)]
        assert all(own.data_ptr() % 16 == 0 for own in pointers), "as torch allocates on a GPU"
        other = {name: own if name in constants else otherwise(own) for name, own in given.items()}
        for call in (given, other)[: 1 + whole]:
            try:
                found = run(kernel, grid=grid, warmup=True, **call)
            except Exception as error:
                chosen = {name: own for name, own in given.items() if name in constants}
                raise RuntimeError(f"Triton {triton.__version__} does not compile {kernel} for {chosen}") from error
            check(kernel, found.asm)
            made[kernel.fn.__name__] = made.get(kernel.fn.__name__, 0) + 1

    triton.JITFunction.run = compiled


def batch(*, one_hot: bool, weighted: bool) -> KeyedJaggedTensor:
    """Zeros; ids are int32 in batches of one id per sample, and int64 in the others."""
    num_ids = NUM_SAMPLES if one_hot else 2 * NUM_SAMPLES
    lengths = None if one_hot else torch.full((NUM_SAMPLES,), 2)
    values = torch.zeros(num_ids, dtype=torch.int32 if one_hot else torch.int64)
    return KeyedJaggedTensor(("f",), values, torch.ones(num_ids) if weighted else None, lengths=lengths)


def tables(dim: int, dtype: torch.dtype, *, mapped: bool) -> triton_ops.Arrays:
    """mapped: with slots for some rows, and a map."""
    low = torch.zeros(NUM_ROWS, dim, dtype=torch.int16) if dtype == torch.bfloat16 else None
    slots = triton_ops.SlotMap(torch.zeros(NUM_ROWS, dtype=torch.int32), [2 * NUM_ROWS], [NUM_ROWS], [-NUM_ROWS])
    return triton_ops.Arrays([torch.zeros(NUM_ROWS, dim, dtype=dtype)], [low], slots if mapped else None)


def call_kernels(dim: int, *, whole: bool) -> None:
    kernels = triton_ops.Kernels(Layout((Feature("f", 0, slice(0, dim), "sum"),), dim))
    grad = torch.zeros(NUM_SAMPLES, dim)
    kinds = [batch(one_hot=o, weighted=w) for o, w in (product((True, False), repeat=2) if whole else [(False, True)])]
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, mapped in product(dtypes, (True, False) if whole else (True,)):
        weights = tables(dim, dtype, mapped=mapped)
        for sparse in kinds:
            kernels.lookup(weights, sparse)
        for sparse in kinds[::2] if whole or dtype == torch.float32 else []:
            kernels.weight_gradient(weights, sparse, grad)
        if not whole and dtype != torch.bfloat16:
            continue
        for algorithm, sparse in product(types.ALGORITHMS, kinds[:2]):
            shape = (NUM_ROWS,) if algorithm == "row_wise_adagrad" else (NUM_ROWS, dim)
            states = [triton_ops.Arrays([torch.zeros(shape)]) for _ in range(types.NUM_STATES[algorithm])]
            kernels.update(weights, states, [(kernels, sparse, grad)], [Rule(algorithm=algorithm, lr=0.1)])


def call_interaction(dim: int) -> None:
    dense, pooled, grad = torch.zeros(2, dim), torch.zeros(2, 3, dim), torch.zeros(2, dim + 6)
    triton_ops.interact(dense, pooled)
    triton_ops.interact_backward(grad, dense, pooled)


def call_moves() -> None:
    """Words of four bytes, and of two."""
    rows = [torch.arange(5)]
    for dtype, into_buffer in product((torch.float32, torch.float16), (True, False)):
        parts = [[torch.zeros(NUM_ROWS, 7, dtype=dtype)]]
        blocks, num_bytes = triton_moves.lay_out(parts, [5])
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        triton_moves.move(parts, rows, buffer, blocks, into_buffer=into_buffer, upload=torch.clone)


if __name__ == "__main__":
    dim, whole = int(sys.argv[1]), "--whole" in sys.argv
    driver.set_active(Absent())
    triton_ops._check_device = lambda device: None  # the tensors lie in host memory, where nothing reads them
    stop_before_launches(whole=whole)
    call_kernels(dim, whole=whole)
    call_interaction(dim)
    call_moves()
    print(f"Triton {triton.__version__}, {dim} columns: {made}")
