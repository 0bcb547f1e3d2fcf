"""The native module under callers' mistakes and without memory: an error that Python sees, never a lost output or the
end of the process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from forked import run_python
from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops
from hotrow.kernels.types import Layout, Rule

pytestmark = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")
native: Any = ops._native()


def test_outputs_that_would_be_copied_are_refused() -> None:
    """nanobind copies an array of another layout or type, and what is written to the copy is lost."""

    def strided(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]

    calls = {
        "fill_uniform": (7, 0, 1, 0, strided(4, 8), 1.0, 0, 1),
        "fill_uniform_rows": (7, torch.arange(4), strided(4, 8), 1.0, 0, 1),
        "split_halves": (torch.ones(4), strided(4, dtype=torch.int16), 1),
        "split_sgd": ([torch.ones(4)], [strided(4, dtype=torch.int16)], [torch.ones(4)], 0.1, 0.0, 1),
        "flush_denormals": ([strided(4)], 1),
        "interact": (torch.ones(2, 4), torch.ones(2, 1, 4), strided(2, 5), 1),
    }
    for name, arguments in calls.items():
        with pytest.raises(TypeError, match="incompatible function arguments"):
            getattr(native, name)(*arguments)


def test_rows_without_columns_are_no_division_by_zero() -> None:
    ops.fill_uniform(torch.zeros(4, 0), key=7, bound=1.0)
    native.fill_uniform_rows(7, torch.arange(4), torch.zeros(4, 0), 1.0, 0, 2)
    layout = Layout.of([TableConfig(name="t", num_embeddings=9, embedding_dim=1, feature_names=("a",))])
    arrays, kernels = ops.Arrays([torch.zeros(9, 0)]), ops.Kernels(layout)
    batch, rule = KeyedJaggedTensor(["a"], torch.arange(9) % 3), Rule(algorithm="sgd", lr=0.1)
    pending = [(kernels, batch, torch.zeros(9, 0))]
    for parts in (None, (0, 4, 9)):
        batch.parts = parts
        native.update(1, arrays.native, [], ops._native_lookups(pending), [rule.numbers], None, 2)
    with pytest.raises(ValueError, match="one or more"):
        state: tuple[Any, ...] = ((0, 0, 0), (1, 1.0, 0, (0, 0, 1, 0), 1, 0), [], native.open_dram_store(4, 1, "t"))
        native.make_caches().add(*state, native.Records([torch.zeros(0, 1)]))


NO_MEMORY = """
import resource
from pathlib import Path
import torch
from hotrow.kernels import ops, types

def within(extra, call):
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + extra, resource.RLIM_INFINITY))
    try:
        return call()
    except (MemoryError, RuntimeError) as error:  # the latter is torch's, of an output
        assert isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

limits = range(0, 64 << 20, 256 << 10)
"""

DISTINCT_ROWS = """
torch.set_num_threads(2)
ids = torch.randint(0, 1 << 20, (200_000,))
spans, num_rows = [(t, t * 50_000, (t + 1) * 50_000) for t in range(4)], [1 << 20] * 4
shares = types.Shares([0] * 4, [-1] * 4, 0, 200_000)  # a list of as many numbers is made for each table
call = lambda: ops.distinct_rows(ids, spans, num_rows, shares).rows
expected = call()
for tries, extra in enumerate(limits):
    if (found := within(extra, call)) is not None:
        break
assert (found == expected).all()
print(tries)
"""

PACKED_WEIGHTS = """
torch.set_num_threads(1)
sizes = [512, 768, 1024, 512]
weights = [torch.randn(o, i) for i, o in zip(sizes, sizes[1:])]
biases, x = [torch.randn(o) for o in sizes[1:]], torch.randn(64, sizes[0])
held = []  # so that no call finds the memory of one before it

def call():
    with torch.no_grad(), ops.weights_stay(held[-1]):
        return ops.mlp(x, weights, biases, last="linear")

held.append(ops.Packed())
expected = call()
for tries, extra in enumerate(limits):
    held.append(ops.Packed())
    if within(extra, call) is not None:
        break
    assert torch.equal(call(), expected), "weights that were not packed yet"
print(tries)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the process's memory")
def test_without_memory_a_call_raises_and_leaves_nothing_half_made() -> None:
    """Counters and lists of a sort are made on the threads; a bad_alloc that left one would end the process."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_ARENA_MAX": "1", "OMP_WAIT_POLICY": "passive"}
    said = run_python("-c", NO_MEMORY + PACKED_WEIGHTS + DISTINCT_ROWS, env=environment, timeout=60)
    assert min(map(int, said.split())) > 5
