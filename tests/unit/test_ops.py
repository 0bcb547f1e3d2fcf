"""hotrow.kernels.ops: what runs, what it refuses, and that the reference steps in by announcement only."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forked import resident_bytes, run_forked
from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops
from hotrow.kernels.types import Layout
from loops import looped

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")

TABLES = (TableConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=("f", "g")),)
LAYOUT = Layout.of(TABLES)


@needs_native
def test_backend_says_what_runs() -> None:
    backend = ops.backend()
    assert (backend.name, backend.reason) == ("native", None)
    assert backend.isa == ops.isas()[-1]
    assert backend.threads == torch.get_num_threads()


FACTS = """
import json
from hotrow.kernels import ops
from hotrow.cli import tools
from hotrow.base.machine import lacks_bfloat16_products
facts = tools.doctor()
told = [facts[name] for name in ("isas", "isa_limit", "torch_isa")]
print(json.dumps([*told, ops.backend().isa, lacks_bfloat16_products()]))
"""


def facts_under(**variables: str) -> subprocess.CompletedProcess[str]:
    names = ("HOTROW_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    env = {name: value for name, value in os.environ.items() if name not in names} | variables
    return subprocess.run([sys.executable, "-c", FACTS], env=env, capture_output=True, text=True, check=False)


@needs_native
@pytest.mark.skipif("avx2" not in ops.isas(), reason="this machine has one instruction set only: nothing to limit")
def test_a_limit_holds_for_all_of_hotrow_and_for_torch() -> None:
    assert json.loads(facts_under(HOTROW_ISA="avx2").stdout) == [["baseline", "avx2"], "avx2", "AVX2", "avx2", True]


@needs_native
@pytest.mark.slow
@pytest.mark.skipif("avx2" not in ops.isas(), reason="this machine has one instruction set only: nothing to limit")
def test_the_lowest_limit_none_and_one_that_is_unknown() -> None:
    facts = json.loads(facts_under(HOTROW_ISA="baseline").stdout)
    assert facts == [["baseline"], "baseline", "DEFAULT", "baseline", True]
    assert json.loads(facts_under(HOTROW_ISA="").stdout)[1] is None
    assert "HOTROW_ISA is 'avx3'; set it to one of baseline, avx2, avx512" in facts_under(HOTROW_ISA="avx3").stderr


@needs_native
def test_a_limit_above_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_ISA", "avx512")
    with pytest.raises(ValueError, match="HOTROW_ISA='avx512', but this machine has only baseline, avx2: set it to"):
        ops._limit_isa(SimpleNamespace(isas=lambda: ["baseline", "avx2"]))


V3 = ["avx2", "bmi2", "f16c", "fma"]
V4 = [*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]


@needs_native
@looped(
    ("features", "widest"),
    [([], "baseline"), (V3, "avx2"), (V4, "avx512")]
    + [([f for f in V3 if f != lacking], "baseline") for lacking in V3]
    + [([f for f in V4 if f != lacking], "avx2" if lacking in V4[len(V3) :] else "baseline") for lacking in V4],
)
def test_each_processor_runs_the_widest_set_it_has_all_features_of(features: list[str], widest: str) -> None:
    """What starts on a processor of these features: a set that lacks one would end in an illegal instruction."""
    module = importlib.import_module("hotrow._native")
    built = ["baseline", "avx2", "avx512"][: module.num_runnable(V4)]
    assert built[module.num_runnable(features) - 1] == min(widest, built[-1], key=["baseline", "avx2", "avx512"].index)


PROGRAM = """
import warnings
import torch
from hotrow import TableConfig
from hotrow.kernels import ops
from hotrow.data import native
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import Adagrad
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    native.backend()  # raw rows are read before anything is trained
    emb = EmbeddingCollection([TableConfig(name="t", num_embeddings=50, embedding_dim=5, feature_names=("f",))])
    optimizer = Adagrad(emb, lr=0.1)
    for step in range(3):
        ids = torch.randint(0, 50, (8, 1), generator=torch.Generator().manual_seed(step))
        (emb(ids) ** 2).sum().backward()
        optimizer.step()
print(ops.backend().name, len(caught), *(str(w.message) for w in caught), sep="|")
print(emb.weights["t"].view(torch.int32).sum().item())
"""


def run_program(native: str) -> tuple[list[str], str]:
    env = {**os.environ, "HOTROW_NATIVE": native}
    done = run_forked(PROGRAM, env=env)
    assert done.returncode == 0, done.stderr
    first, checksum = done.stdout.splitlines()
    return first.split("|"), checksum


def test_the_reference_is_announced_once_and_trains_to_the_same_bits() -> None:
    (name, count, message), checksum = run_program("0")
    assert (name, count) == ("reference", "1")
    assert "HOTROW_NATIVE=0 is set" in message and "pip install -e ." in message
    if ops.isas():
        (name, count), native_checksum = run_program("1")
        assert (name, count) == ("native", "0")
        assert checksum == native_checksum


NOT_IN_DRAM = """
import sys, warnings
import hotrow
warnings.simplefilter("ignore")
table = hotrow.TableConfig(name="t", num_embeddings=50, embedding_dim=5, feature_names=("f",))
for memory in (hotrow.Memory(dram="1MiB", ssd=sys.argv[1]), hotrow.DeviceMemory(hbm="1MiB", device="cpu")):
    try:
        hotrow.EmbeddingCollection([table], memory=memory)
    except ValueError as error:
        print(error)
"""


def test_tiers_and_devices_are_refused_without_the_native_module(tmp_path: Path) -> None:
    env = {**os.environ, "HOTROW_NATIVE": "0"}
    done = run_forked(NOT_IN_DRAM, tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    what = "need the native module, and HOTROW_NATIVE=0 is set: build it with `pip install"
    for line, tables in zip(done.stdout.splitlines(), ("tables in tiers", "tables on a device"), strict=True):
        assert line.startswith(f"{tables} {what}") and "keep the tables in DRAM" in line


def test_allocate_gives_zeros_that_live_as_long_as_the_tensor() -> None:
    large, small = ops.allocate(1 << 19, 4), ops.allocate(3)
    row = large[-1]
    del large
    assert row.tolist() == [0.0] * 4 and small.tolist() == [0.0] * 3
    assert ops.allocate(0, 7).shape == (0, 7)


@needs_native
def test_allocate_aligns_to_huge_pages_and_gives_memory_back() -> None:
    assert ops.allocate(1 << 19, 4).data_ptr() % (1 << 21) == 0
    before = resident_bytes()
    for _ in range(20):
        ops.allocate(1 << 22).fill_(1.0)
    assert resident_bytes() - before < 32 << 20, "16 MiB arrays are not freed"


@needs_native
def test_allocate_refuses_what_no_machine_has() -> None:
    with pytest.raises(MemoryError):
        ops.allocate(1 << 50)


@looped("bad", [torch.zeros(5, 4, dtype=torch.float64), torch.zeros(4, 5).t()])
def test_arrays_must_be_contiguous_float32(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"array 1 is .*pass contiguous float32"):
        ops.Arrays([torch.zeros(5, 4), bad])


def test_a_missing_feature_is_named() -> None:
    kernels, weights = ops.Kernels(LAYOUT), ops.Arrays([torch.zeros(5, 4)])
    with pytest.raises(ValueError, match="feature 'g' is missing from the batch, whose keys are f, x"):
        kernels.lookup(weights, KeyedJaggedTensor(["f", "x"], torch.tensor([0, 1])))


def test_weight_gradient_of_other_collections_features_is_zero() -> None:
    batch = KeyedJaggedTensor(["x", "f", "g"], torch.tensor([99, 1, 4]), torch.ones(3))
    weights = ops.Arrays([torch.arange(20.0).view(5, 4)])
    grad = ops.Kernels(LAYOUT).weight_gradient(weights, batch, torch.ones(1, 8))
    assert grad.tolist() == [0.0, 4.0 + 5 + 6 + 7, 16.0 + 17 + 18 + 19]


@looped(
    ("dense", "pooled"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, 5)),
        (torch.zeros(2, 3), torch.zeros(1, 4, 3)),
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 4, 3)),
    ],
)
def test_dot_interaction_refuses_what_does_not_fit(dense: torch.Tensor, pooled: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"pass float32 \[B, D\] and \[B, F, D\]"):
        ops.dot_interaction(dense, pooled)


@needs_native
def test_touch_rows_writes_one_word_of_each_line() -> None:
    rows = torch.zeros(10, 32)  # two cache lines each
    ops.touch_rows(rows, torch.tensor([3, 3, 7]), distance=2, write=True, threads=2)
    words = rows.view(torch.int64)
    assert words.nonzero().tolist() == [[3, 0], [3, 8], [7, 0], [7, 8]]
    assert words[3, 0] == 2 and words[7, 8] == 1
    with pytest.raises(ValueError, match="id out of range"):
        ops.touch_rows(rows, torch.tensor([10]), distance=2, write=False, threads=1)


@needs_native
def test_pages_of_a_step_are_used_again_but_never_twice_at_once() -> None:
    first = ops.empty(1 << 18).fill_(1.0)
    place = first.data_ptr()
    second = ops.empty(1 << 18).fill_(2.0)
    assert (first == 1.0).all() and (second == 2.0).all()
    del first
    third = ops.empty(1 << 18).fill_(3.0)
    fourth = ops.empty(1 << 18).fill_(4.0)
    assert third.data_ptr() == place
    assert (second == 2.0).all() and (third == 3.0).all() and (fourth == 4.0).all()


@needs_native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc tells the resident memory here")
def test_at_most_half_a_gibibyte_of_pages_is_kept() -> None:
    before = resident_bytes()
    arrays = [ops.empty(1 << 26).fill_(1.0) for _ in range(3)]  # 256 MiB each
    assert resident_bytes() - before > 700 << 20
    del arrays
    assert resident_bytes() - before < 600 << 20
