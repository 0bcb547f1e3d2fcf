"""Laws 2 and 3 for the dense part of a step in a graph: a run has the bits of one whose layers Python launches.

On the CPU a stand-in captures and replays: it computes again from the same memory, into the same memory. What a graph
of CUDA would forget, and what it would do to memory that somebody kept, shows there too.
"""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import BASE, VARIANTS, config, outcome, signal_at
from torch import Tensor, nn

from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.data.packed.reader import PackedDataset
from hotrow.models.dlrm import DLRM
from hotrow.run import build, runs
from hotrow.run.graph import DenseGraph, Outputs
from hotrow.setup.device import DenseDevice
from packed_data import planted

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: a stand-in took its place")


class Recorder:
    """Captures on the CPU, and counts what came of it."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        self.captures += 1
        loss, grads = work()

        def replay() -> None:
            self.replays += 1
            again, new = work()
            loss.copy_(again)
            for grad, value in zip(grads, new, strict=True):
                if grad is not None and value is not None:
                    grad.copy_(value)

        # A capture computes nothing: until it is replayed, its memory holds anything.
        for own in (loss, *(grad for grad in grads if grad is not None)):
            own.fill_(float("nan"))
        return (loss, grads), replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Runs in the test have a graph by the stand-in."""
    found = Recorder()
    monkeypatch.setattr(DenseGraph, "of", lambda model, dense: DenseGraph(model, CPU, found))
    return found


data = planted()


@pytest.mark.slow_but("early stopping")
@pytest.mark.parametrize("kind", ["sgd", "adam, row-wise adagrad", "clipped", "early stopping"])
def test_a_run_its_odd_batches_and_its_resumption(
    data: Path, tmp_path: Path, kind: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates warm up and fall, every epoch ends on an odd batch, and a stopped run goes on from its checkpoint."""
    changes = VARIANTS[kind]
    with monkeypatch.context() as patch:
        patch.setattr(DenseGraph, "of", lambda model, dense: None)
        truth = outcome(runs.train(config(data, tmp_path / "plain", changes), quiet=True))
    run = runs.train(config(data, tmp_path / "graph", changes), quiet=True)
    num_rows, size = PackedDataset.open(data).split("train").num_rows, BASE["train"]["batch_size"]
    num_odd = run.record.steps // -(-num_rows // size)
    assert outcome(run) == truth
    assert num_rows % size and num_odd > 0
    assert (recorder.captures, recorder.replays) == (1, run.record.steps - num_odd - 1), "all but first and odd"
    with monkeypatch.context() as patch:
        signal_at(patch, 5, signal.SIGTERM)
        stopped = runs.train(config(data, tmp_path / "stopped", changes), quiet=True)
    assert stopped.record.steps == 5
    assert outcome(runs.resume(stopped.path, quiet=True)) == truth
    assert recorder.captures == 3


def test_a_capture_that_fails_is_said_and_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(work: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        work()
        raise RuntimeError("operation not permitted\nmore")

    plain = runs.train(config(data, tmp_path / "plain", ["train.max_steps=5"]), quiet=True)
    monkeypatch.setattr(DenseGraph, "of", lambda model, dense: DenseGraph(model, CPU, refuses))
    run = runs.train(config(data, tmp_path / "run", ["train.max_steps=5"]), quiet=True)
    assert outcome(run) == outcome(plain)
    told = run.record.warnings["dense_not_in_a_graph"]
    assert told["count"] == 1 and "operation not permitted" in told["text"] and "more" not in told["text"]


# ---- step by step


def batch_of(size: int, seed: int, *, weighted: bool = False) -> tuple[Batch, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sparse = KeyedJaggedTensor(("a",), torch.zeros(size, dtype=torch.int64))
    weight = torch.rand(size, generator=draw) if weighted else None
    batch = Batch(torch.randn(size, 3, generator=draw), sparse, torch.rand(size, generator=draw), weight=weight)
    return batch, torch.randn(size, 8, generator=draw).requires_grad_()


class Side:
    """A DLRM, with a graph or without one; `step` returns the loss and the gradients of weights and rows."""

    def __init__(self, recorder: Any, device: torch.device = CPU) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.model = DLRM(
            num_dense=3, num_features=2, embedding_dim=4, bottom_mlp=[5], top_mlp=[6], first_order=True, generator=drawn
        ).to(device)
        self.device = device
        self.graph = None if recorder is None else DenseGraph(self.model, device, *recorder)

    def loss_of(self, batch: Batch, rows: Tensor) -> Tensor:
        logits = self.model(batch.dense.to(self.device), rows.to(self.device))
        weight = None if batch.weight is None else batch.weight.to(self.device)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label.to(self.device), weight)

    def step(self, batch: Batch, rows: Tensor, *, zero: bool = True) -> list[Tensor | None]:
        rows = rows.detach().clone().requires_grad_(rows.requires_grad)
        if zero:
            self.model.zero_grad()
        loss = None if self.graph is None else self.graph.backward(batch, rows, self.loss_of)
        if loss is None:
            loss = self.loss_of(batch, rows)
            loss.backward()
        found = [loss, *(own.grad for own in self.model.parameters()), rows.grad]
        found = [None if own is None else own.detach().clone() for own in found]
        with torch.no_grad():
            for own in self.model.parameters():
                own -= 0.1 * (0.0 if own.grad is None else own.grad)
        return found


def both(*, graph: Any = None, device: torch.device = CPU) -> tuple[Side, Side, Recorder]:
    recorder = Recorder()
    return Side(None, device), Side((recorder,) if graph is None else graph, device), recorder


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]


def test_which_batches_are_replayed() -> None:
    """By hand: the second of a shape in a row is captured; odd ones between leave the graph; two of them replace it."""
    plain, side, recorder = both()
    came = [6, 6, 6, 4, 6, 4, 6, 3, 3, 3, 6, 6]
    replayed = [0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1]
    for k, (size, expected) in enumerate(zip(came, replayed, strict=True)):
        before = recorder.replays
        assert same(side.step(*batch_of(size, k)), plain.step(*batch_of(size, k))), k
        assert recorder.replays - before == expected, k
    assert recorder.captures == 3


def test_an_older_graph_is_gone_before_another_is_captured() -> None:
    recorder, older = Recorder(), list[weakref.ref[Tensor]]()

    def capture(work: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        assert not any(own() is not None for own in older)
        (loss, grads), replay = recorder(work)
        older.extend(weakref.ref(own) for own in (loss, *grads) if own is not None)
        return (loss, grads), replay

    side = Side([capture])
    for size in (8, 8, 5, 5):
        side.step(*batch_of(size, 1))
    assert recorder.captures == 2 and len(older) > 4


def test_sample_weights_and_rows_without_gradients_have_graphs_of_their_own() -> None:
    plain, side, recorder = both()
    for k, weighted in enumerate([False, False, True, True, True, False]):
        given = batch_of(5, k, weighted=weighted)
        assert same(side.step(*given), plain.step(*given))
    assert recorder.captures == 2
    for k in range(3):
        batch, rows = batch_of(5, k)
        found = side.step(batch, rows.detach())
        assert same(found, plain.step(batch, rows.detach())) and found[-1] is None
    assert recorder.captures == 3


def test_hooks_are_called() -> None:
    """Of modules and of weights, whenever they come; without them the same graph goes on."""
    plain, side, recorder = both()
    calls: list[int] = []

    def hooks(model: nn.Module) -> list[Any]:
        weight = next(model.parameters())
        return [
            model.register_forward_hook(lambda *_: calls.append(1)),
            model.register_forward_pre_hook(lambda *_: calls.append(1)),
            model.register_full_backward_hook(lambda *_: calls.append(1)),
            weight.register_hook(lambda grad: calls.append(1)),
            weight.register_post_accumulate_grad_hook(lambda own: calls.append(1)),
        ]

    for number in (None, 0, None, 1, 2, 3, 4, None):
        hook = None if number is None else hooks(side.model)
        for k, each in enumerate(hook or []):
            if k != number:
                each.remove()
        for k in range(2):
            given = batch_of(5, k)
            before = len(calls)
            assert same(side.step(*given), plain.step(*given))
            assert len(calls) - before == (number is not None), number
        if hook is not None and number is not None:
            hook[number].remove()
    assert recorder.captures == 1 and recorder.replays == 5


def test_gradients_that_are_there_are_added_to() -> None:
    plain, side, recorder = both()
    for k in range(6):
        given = batch_of(5, k)
        assert same(side.step(*given, zero=k % 2 == 0), plain.step(*given, zero=k % 2 == 0)), k
    assert recorder.replays == 2, "the second batch comes on top of gradients"


def test_weights_that_freeze_or_move_have_another_graph() -> None:
    """A state dict does neither."""
    plain, side, recorder = both()

    def steps() -> None:
        for k in range(3):
            given = batch_of(5, k)
            assert same(side.step(*given), plain.step(*given)), k

    steps()
    for own in (plain, side):
        own.model.load_state_dict({name: value + 0.5 for name, value in own.model.state_dict().items()})
    steps()
    assert recorder.captures == 1
    for own in (plain, side):
        next(own.model.parameters()).requires_grad_(requires_grad=False)
    steps()
    assert recorder.captures == 2
    for own in (plain, side):
        weight = [*own.model.parameters()][1]
        weight.data = weight.data.clone()
    steps()
    assert recorder.captures == 3


def test_weights_that_share_a_gradient_can_be_scaled_in_place() -> None:
    """Autograd gives both the same memory; so does a gradient that lies across its weight."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.wide = nn.Parameter(torch.ones(4, 2))

        def loss_of(self, batch: Batch, rows: Tensor) -> Tensor:
            return (rows @ (self.one + self.two)).sum() + (self.wide.t() * rows[:2]).sum()

    for graph in (True, False):
        model, recorder = Shared(), Recorder()
        replayed = DenseGraph(model, CPU, recorder)  # type: ignore[arg-type]
        for k in range(3):
            batch, _ = batch_of(5, k)
            rows = torch.arange(20.0).view(5, 4).requires_grad_()
            model.zero_grad()
            loss = replayed.backward(batch, rows, model.loss_of) if graph else None
            if loss is None:
                model.loss_of(batch, rows).backward()
        assert recorder.replays == 2 * graph
        torch._foreach_mul_([own.grad for own in model.parameters()], 2.0)
        found = [own.grad.clone() for own in model.parameters() if own.grad is not None]
        if graph:
            expected = found
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))


def test_which_models_have_a_graph(data: Path, tmp_path: Path) -> None:
    def made(**options: Any) -> Any:
        drawn = torch.Generator().manual_seed(1)
        sizes = {"num_dense": 3, "num_features": 2, "embedding_dim": 4}
        return DLRM(**sizes, bottom_mlp=[5], top_mlp=[6], generator=drawn, **options)

    gpu = DenseDevice(torch.device("cuda"))
    assert isinstance(DenseGraph.of(made(), gpu), DenseGraph)
    assert DenseGraph.of(made(), DenseDevice()) is None
    assert DenseGraph.of(made(dropout=0.1), gpu) is None and DenseGraph.of(made(embedding_dropout=0.1), gpu) is None
    sequences = made()
    sequences.lookup = "sequence"
    assert DenseGraph.of(sequences, gpu) is None
    assert build.Parts.__dataclass_fields__["graph"].default is None


@needs_gpu
@pytest.mark.gpu
def test_a_graph_of_cuda_has_the_bits_of_launches() -> None:
    """Rows on the CPU and on the GPU, odd batches, weights that change between steps."""
    device = torch.device("cuda")
    for where in (CPU, device):
        plain, side, _ = both(graph=(), device=device)
        for k, size in enumerate([64, 64, 64, 40, 64, 64]):
            batch, rows = batch_of(size, k, weighted=True)
            rows = rows.detach().to(where).requires_grad_()
            assert same(side.step(batch, rows), plain.step(batch, rows)), (where, k)
        assert side.graph is not None and not side.graph.refused and side.graph._key is not None
