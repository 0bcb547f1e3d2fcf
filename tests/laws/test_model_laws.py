"""The contract of a model: no option of any makes bits depend on the number of ranks or threads, on where a batch or a
row lies, or on an interruption; a sample's output depends on no other sample; an export computes the same.

Models and their options are those of the registry, so a new one is tested by existing. Torch's products depend on
addresses on processors for which MKL has no kernels of their own; MKL's kernels for SSE4.2 do so on every processor, so
all processes here use those.
"""

import inspect
import itertools
import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from hotrow.batch import Batch
from hotrow.config.load import make_config
from hotrow.config.schema import Config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.export import score
from hotrow.export.export import network_source
from hotrow.export.inputs import load_module
from hotrow.kernels import ops
from hotrow.models import MODELS
from hotrow.models.dlrm import DLRM
from hotrow.models.layers import sigmoid
from hotrow.objectives import OBJECTIVES
from hotrow.objectives.objective import Objective
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import OverRanks
from hotrow.placement.tiers import Tiers
from hotrow.run import runs, trainer
from hotrow.run.build import Parts, build, look_up
from hotrow.run.checkpoint import load_checkpoint, save_checkpoint
from hotrow.run.exact import CODE, FirstPart
from hotrow.run.meters import Session
from hotrow.setup.demand import required_bytes
from hotrow.setup.device import DenseDevice
from hotrow.setup.setup import Setup
from rank_pool import RankPool, rank_pool
from sampled import covering

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="the reference's products are torch's")
MAX_RANKS = 4
VS, RANKS, THREADS = (1, 3, 8), (1, 2, 3, 4), (1, 2)
BATCHES = {1: (61, 62, 63, 1), 3: (3 * 61 + 1, 3 * 62 + 2, 3, 2), 8: (8 * 61 + 3, 8 * 62 + 5, 8, 5)}
"""By V, samples of the batches: parts have 1, 61, 62 or 63, and of the last batch of an epoch some have none."""
OFFSETS = (1, 13, 64)
"""Floats before a part in its buffer."""
DENSE = 13
MANY = 2101
"""Samples of which every model has some tensor of more than 2^15 elements, which torch divides among threads."""


def values_of(annotation: Any) -> list[Any]:
    """Returns values of an option that differ in what a model does: odd, none, beyond 16 floats; False and True."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(inner[0])
    if origin in (Union, types.UnionType):
        return [value for each in inner for value in values_of(each)]
    if origin is Literal:
        return list(inner)
    if origin is list:
        return [["item"], ["category", "item"]] if inner == (str,) else [[], [9], [6, 72]]
    if origin is dict:
        return [{"default": 3, "user": 9}]
    found = {type(None): [None], bool: [False, True], int: [3, 17], float: [0.0, 0.5]}
    assert annotation in found, f"say which values an option of type {annotation} is tried with"
    return found[annotation]


def cases(model: str, *more: Sequence[Any], pairs: bool = True) -> list[tuple[Any, ...]]:
    """Returns combinations of the options of a model, and of `more`: (options, *more), in which any value of one meets
    any value of another; if not `pairs`, so many of these that each value occurs."""
    spec = MODELS[model]
    options = {name: values_of(field.annotation) for name, field in spec.model_fields.items() if name != "name"}
    if "num_cross_layers" in options:
        options["num_cross_layers"] = [1, 3]  # untrained, 17 layers give outputs in the thousands, and steps overflow
    factors = [*options.values(), *more]

    def chosen(numbers: tuple[int, ...]) -> tuple[Any, ...]:
        values = [factor[k] for factor, k in zip(factors, numbers, strict=True)]
        return {"name": model, **dict(zip(options, values, strict=False))}, *values[len(options) :]

    def valid(numbers: tuple[int, ...]) -> bool:
        given, *others = chosen(numbers)
        if (spec.equal_dims and not isinstance(given["embedding_dim"], int)) or (others and others[1] > others[0]):
            return False
        try:
            spec.model_validate(given)
        except ValueError:
            return False
        return True

    found, seen = list[tuple[int, ...]](), set[tuple[int, int]]()
    for row in sorted(covering([len(factor) for factor in factors], 2, valid=valid)):
        if pairs or not {*enumerate(row)} <= seen:
            found.append(row)
            seen |= {*enumerate(row)}
    return [*map(chosen, found)]


each_value_or_pair = pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])


def takes_labels(model: str) -> bool:
    """Whether a model may have several outputs."""
    return "num_outputs" in inspect.signature(MODELS[model].build).parameters


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("models") / "data", ["label"])


@pytest.fixture(scope="module")
def three_labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("models") / "several", ["label", "second", "third"])


def prepared(path: Path, labels: Sequence[str]) -> Path:
    """Rows that every model takes: ids and their histories, dense inputs, and weights, every third of them 0."""
    rng, n = np.random.default_rng(1), 5200
    ids = {"user": rng.integers(0, 3000, n), "item": rng.integers(0, 2000, n), "category": rng.integers(0, 7, n)}
    dense = {f"x{k}": rng.standard_normal(n).astype(np.float32) for k in range(DENSE)}
    lengths = rng.integers(0, 4, n)
    lists = {f"{name}_history": [rng.integers(0, 9, k).tolist() for k in lengths] for name in ("item", "category")}
    other = {"label": rng.integers(0, 2, n), "time": np.arange(n), "weight": rng.random(n) * (np.arange(n) % 3)}
    other |= {name: rng.integers(0, 2, n) for name in labels[1:]}
    listed = [{"column": name, "kind": "sequence", "table": name.removesuffix("_history")} for name in lists]
    schema = {
        "label": list(labels), "weight": "weight", "time": "time", "dense": list(dense),
        "categorical": [*ids, *listed],
    }  # fmt: skip
    table = pa.table({**ids, **dense, **other, **{name: pa.array(own) for name, own in lists.items()}})
    return run_prepare("frame", table, path, schema=parse_schema(schema, where="test")).path


def config_of(data: Path, options: dict[str, Any], micro_batches: int) -> Config:
    train = {"micro_batches": micro_batches, "threads": 1, "seed": 5}
    return make_config({"data": str(data), "run": str(data / "run"), "model": options, "train": train})


def batch_of(data: Path, num_samples: int) -> Batch:
    return next(iter(Loader(PackedDataset.open(data).split("train"), num_samples, shuffle_seed=3).epoch(0)))


pool = rank_pool(MAX_RANKS)


def with_simple_products() -> None:
    """Before the first product of the process."""
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = "SSE4_2"


def bits(values: Tensor) -> bytes:
    return values.detach().contiguous().numpy().tobytes()


def elsewhere(values: Tensor, offset: int) -> Tensor:
    """Returns a copy that begins `offset` floats behind an address that 64 divides."""
    whole = torch.empty(offset + values.numel() + 16)
    first = offset - whole.data_ptr() // 4 % 16 % 16
    return whole[first % 16 + offset // 16 * 16 :][: values.numel()].view(values.shape).copy_(values)


def found_of(parts: Parts, batch: Batch, offset: int, threads: int) -> dict[str, bytes]:
    """Returns the bits of the loss and of all gradients of a batch, by name."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        rows = look_up(parts.model, parts.embedding, batch.sparse)
    rows = rows if isinstance(rows, dict) else {"": (rows, batch.sparse.offsets)}
    rows = {name: (elsewhere(own, offset).requires_grad_(), offsets) for name, (own, offsets) in rows.items()}
    logits = parts.model(elsewhere(batch.dense, offset), rows[""][0] if "" in rows else rows)
    leaves = dict(parts.model.named_parameters()) | {f"rows {name}": own for name, (own, _) in rows.items()}
    loss = parts.objective.loss(logits, parts.labelled(batch).labels, len(batch), batch.weight)
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    torch.set_num_threads(1)
    named = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {name: bits(value) for name, value in {"logits": logits, "loss": loss, **named}.items()}


def differing(comm: Communicator, data: Path, options: dict[str, Any]) -> list[str]:
    """Returns what of a model's output and gradients has other bits at another address or on other threads."""
    with_simple_products()
    config, dataset = config_of(data, options, 1), PackedDataset.open(data)
    parts = build(Setup.decide(config, dataset, data))
    with torch.no_grad():
        for weight in parts.model.parameters():  # some start at zero
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.2
    told = []
    for size, places in {1: OFFSETS, 61: OFFSETS, 62: OFFSETS, 63: OFFSETS, MANY: (1,)}.items():
        batch = batch_of(data, size)
        truth = found_of(parts, batch, 0, 1)
        for offset, threads in [*((offset, 1) for offset in places), (0, 2)]:
            found = found_of(parts, batch, offset, threads)
            told += [f"{name}: {size} samples, {offset=}, {threads=}" for name in truth if found[name] != truth[name]]
    return told


@pytest.mark.slow_but("dlrm-False", "tbsm-False", "din-False", "finalmlp-False")
@each_value_or_pair
@pytest.mark.parametrize("model", MODELS)
def test_addresses_and_threads_change_no_bit(pool: RankPool, data: Path, model: str, pairs: bool) -> None:
    for (options,) in cases(model, pairs=pairs):
        (told,) = pool.run(differing, data, options, num_ranks=1, micro_batches=1)
        assert not told, (options, told)


def trained(
    comm: Communicator,
    data: Path,
    options: dict[str, Any],
    sizes: Sequence[int],
    threads: int,
    moves: Path | None = None,
) -> dict[str, bytes]:
    """Takes a step on each of the batches; returns the bits of losses, weights and rows. moves: a folder through which
    the run goes from rows on disk to rows in DRAM before its third step."""
    with_simple_products()
    torch.set_num_threads(threads)
    config = config_of(data, options, comm.ranks.micro_batches)
    setup = Setup.decide(config, PackedDataset.open(data), data, ranks=comm.ranks)
    parts = build(setup if moves is None else on_disk(setup, moves), comm)
    if comm.size > 1:
        length = sum(weight.numel() for weight in parts.model.parameters())
        parts.exchange = OverRanks(comm, lambda: None, length=length)
    session = Session(len(sizes))
    whole, losses = batch_of(data, sum(sizes)), []
    for step, (first, last) in enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=0))):
        if moves is not None and step == 2:
            save_checkpoint(moves / "step", parts.with_state())
            assert any(store.path is not None for store in parts.embedding.placement.find(Tiers).stores)
            parts.embedding.placement.close()
            parts = build(setup, comm)
            load_checkpoint(moves / "step", parts.with_state())
        start, stop = (first + at for at in comm.ranks.samples(last - first))
        own = slice(start, stop)
        sparse = whole.sparse.samples(start, stop)
        dense, label, weight = (each[own].clone() for each in (whole.dense, whole.label, whole.weight))
        batch = Batch(dense, sparse, label, of_samples=last - first, weight=weight)
        losses.append(trainer.train_step(parts, batch, step, trainer.StepClock(session)))
    torch.set_num_threads(1)
    found = {f"loss {step}": loss for step, loss in enumerate(losses)} | parts.model.state_dict()
    found |= {table.name: parts.embedding.rows(table.name).whole() for table in parts.embedding.tables}
    return {name: bits(value) for name, value in found.items()}


def check_ranks(pool: RankPool, data: Path, options: dict[str, Any], V: int, R: int, threads: int) -> None:
    truth, *_ = pool.run(trained, data, options, BATCHES[V], 1, num_ranks=1, micro_batches=V)
    for rank, found in enumerate(pool.run(trained, data, options, BATCHES[V], threads, num_ranks=R, micro_batches=V)):
        assert found.keys() == truth.keys()
        told = [name for name in truth if found[name] != truth[name]]
        assert not told, (options, V, R, threads, rank, told)


@pytest.mark.slow_but("dlrm-False")
@each_value_or_pair
@pytest.mark.parametrize("model", MODELS)
def test_ranks_change_no_bit(pool: RankPool, data: Path, model: str, pairs: bool) -> None:
    for case in cases(model, VS, RANKS, THREADS, pairs=pairs):
        check_ranks(pool, data, *case)


@pytest.mark.slow_but("mmoe-False")
@each_value_or_pair
@pytest.mark.parametrize("model", [name for name in MODELS if takes_labels(name)])
def test_neither_ranks_nor_addresses_change_a_bit_of_several_labels(
    pool: RankPool, three_labels: Path, model: str, pairs: bool
) -> None:
    for k, (options,) in enumerate(cases(model, pairs=pairs)):
        V, R, threads = (VS[k % 3], min(VS[k % 3], RANKS[k % 4]), THREADS[k % 2])
        check_ranks(pool, three_labels, options, V, R, threads)
        if k < 3:
            (told,) = pool.run(differing, three_labels, options, num_ranks=1, micro_batches=1)
            assert not told, (options, told)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_ranks_change_no_bit_with_any_options(pool: RankPool, data: Path, model: str) -> None:
    for (options,) in cases(model):
        for V, R, threads in itertools.product(VS, RANKS, THREADS):
            if R <= V:
                check_ranks(pool, data, options, V, R, threads)


def on_disk(setup: Setup, folder: Path) -> Setup:
    """Returns a setup with half of the rows in files."""
    needed = required_bytes(setup.config, setup.tables)
    memory = {"dram": int(0.7 * needed), "ssd": str(folder / "rows"), "lookahead": 0}
    raw = setup.config.model_dump(mode="json")
    config = make_config({**raw, "memory": memory, "train": {**raw["train"], "batch_size": max(BATCHES[1])}})
    return Setup.decide(config, setup.dataset, folder)


@pytest.mark.slow_but("dlrm-False")
@each_value_or_pair
@pytest.mark.parametrize("model", MODELS)
def test_disks_and_a_stop_change_no_bit(pool: RankPool, data: Path, tmp_path: Path, model: str, pairs: bool) -> None:
    for number, (options,) in enumerate(cases(model, pairs=pairs)):
        (truth,) = pool.run(trained, data, options, BATCHES[1], 1, num_ranks=1, micro_batches=1)
        (tmp_path / str(number)).mkdir()
        (found,) = pool.run(trained, data, options, BATCHES[1], 1, tmp_path / str(number), num_ranks=1, micro_batches=1)
        assert [name for name in truth if found[name] != truth[name]] == [], options


@each_value_or_pair
@pytest.mark.parametrize("model", MODELS)
def test_a_sample_depends_on_no_other(data: Path, model: str, pairs: bool) -> None:
    """So a batch may be cut anywhere, in a training step too."""
    for (options,) in cases(model, pairs=pairs):
        setup = Setup.decide(config_of(data, options, 1), PackedDataset.open(data), data)
        parts, batch, found = build(setup), batch_of(data, 61), []
        for edges in ((0, 61), (0, 1, 30, 61)):
            for start, stop in itertools.pairwise(edges):
                rows = look_up(parts.model, parts.embedding, batch.sparse.samples(start, stop))
                with torch.no_grad(), parts.model.drawing(5, start):
                    found.append(parts.model(batch.dense[start:stop], rows))
        whole, cut = found[0], torch.cat(found[1:], 0 if parts.model.retrieves else -1)
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-5 * float(whole.abs().max()) + 1e-6, msg=str(options))


@each_value_or_pair
@pytest.mark.parametrize("model", MODELS)
def test_an_export_computes_the_same(data: Path, tmp_path: Path, model: str, pairs: bool) -> None:
    """Its file of the network is in plain torch; test_export.py has whole exports."""
    for number, (options,) in enumerate(cases(model, pairs=pairs)):
        setup = Setup.decide(config_of(data, options, 1), PackedDataset.open(data), data)
        parts, batch = build(setup), batch_of(data, 61)
        (tmp_path / f"{number}.py").write_text(network_source(model, parts.objective))
        about = {
            "model": {**setup.config.model.model_dump(mode="json"), "num_dense": DENSE},
            "tables": [{"name": table.name, "embedding_dim": table.embedding_dim} for table in setup.tables],
            "features": [
                {"name": name, "table": table.name}
                for name in parts.embedding.feature_names
                for table in setup.tables
                if name in table.feature_names
            ],
        }
        definition = load_module(tmp_path / f"{number}.py")
        exported = score.build_network(definition, about)
        with torch.no_grad():
            for weight in parts.model.parameters():  # some start at zero
                weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.2
            exported.load_state_dict(parts.model.state_dict())
            rows = look_up(parts.model, parts.embedding, batch.sparse)
            ours, theirs = parts.model(batch.dense, rows), exported(batch.dense, rows)
        assert float(ours.std()) > 0
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * float(ours.abs().max()) + 1e-6, msg=str(options))
        # torch's sigmoid may differ in the last bit from hotrow's, which gives a score the same bits beside any others.
        torch.testing.assert_close(definition.scores(ours), parts.objective.scores(ours), rtol=2e-7, atol=0)


def trained_alone(
    comm: Communicator, data: Path, run: Path, options: dict[str, Any], ranks: Sequence[int]
) -> dict[str, Any]:
    """Trains two steps of a model some of whose gradients are `options["factor"]` times as long on `ranks`; returns the
    run's warnings."""
    factor = FACTORS[options["factor"]]
    forward = DLRM.forward

    def own(model: DLRM, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        logits_B = forward(model, dense_BI, pooled_BP)
        value_B = dense_BI[:, 0] * model.first_order_I[0] * (factor(dense_BI) if comm.rank in ranks else 1.0)
        return logits_B + (value_B - value_B.detach())

    train = {"micro_batches": 4, "threads": 1, "max_steps": 2, "batch_size": 61, "eval_every": None}
    raw = {"data": str(data), "run": str(run), "model": {"first_order": True, **SMALL}, "train": train}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DLRM, "forward", own)
        return runs.train(make_config(raw), quiet=True, comm=comm).record.warnings


SMALL = {"embedding_dim": 4, "bottom_mlp": [5], "top_mlp": [5]}
FACTORS: dict[str, Callable[[Tensor], float]] = {
    "address": lambda dense_BI: 1.0 + dense_BI.data_ptr() % 64,
    "threads": lambda dense_BI: 1.0 + torch.get_num_threads(),
    "none": lambda dense_BI: 1.0 + torch.rand(1).item(),  # a draw is the same draw each time
}


@pytest.mark.slow_but("address-1-ranks0", "none-2-ranks2")
@pytest.mark.parametrize(("factor", "R", "ranks"), [("address", 1, (0,)), ("threads", 2, (1,)), ("none", 2, (0, 1))])
def test_a_model_that_breaks_the_law_is_told(
    pool: RankPool, data: Path, tmp_path: Path, factor: str, R: int, ranks: Sequence[int]
) -> None:
    given = data, tmp_path / "run", {"factor": factor}, ranks
    warnings, *_ = pool.run(trained_alone, *given, num_ranks=R, micro_batches=4)
    assert (CODE in warnings) == (factor != "none")
    if factor != "none":
        assert warnings[CODE]["count"] == 1
        assert "model dlrm: the gradient of first_order_I has" in warnings[CODE]["text"]


class Noisy(nn.Module):
    """A model that draws from torch's generator, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, dense_BI: Tensor, rows: Tensor) -> Tensor:
        self.calls += 1
        return dropout(dense_BI[:, 0] * self.weight[0] + rows[:, 0] * self.calls, 0.5)


def test_looking_for_it_changes_nothing() -> None:
    model, state = Noisy(), torch.get_rng_state()
    first = FirstPart(model)
    with torch.random.fork_rng(devices=[]):
        model(torch.randn(61, 3), torch.randn(61, 2).requires_grad_())
    threads = torch.get_num_threads()
    assert first.differing(DenseDevice()) == []
    assert model.calls == 1 and model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


@pytest.mark.parametrize("model", MODELS)
def test_no_model_of_ours_is_told(pool: RankPool, data: Path, model: str) -> None:
    for (options,) in cases(model)[:3]:
        (told,) = pool.run(looked_for, data, options, num_ranks=1, micro_batches=1)
        assert told == []


def looked_for(comm: Communicator, data: Path, options: dict[str, Any]) -> list[str]:
    with_simple_products()
    parts = build(Setup.decide(config_of(data, options, 1), PackedDataset.open(data), data))
    first, batch = FirstPart(parts.model), batch_of(data, 61)
    parts.dense.outputs(parts.model, batch.dense, look_up(parts.model, parts.embedding, batch.sparse))
    return first.differing(parts.dense)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_loss_of_many_samples_is_the_same_on_any_threads(objective: Objective) -> None:
    g, num = torch.Generator().manual_seed(3), 3_287 if objective.retrieves else 34_287
    logits_B = torch.randn([num, 34] if objective.retrieves else [num], generator=g).requires_grad_()
    labels_BL, threads, found = (logits_B.detach().view(num, -1)[:, :1] > 0.3).float(), torch.get_num_threads(), []
    if objective.retrieves:
        item_B = torch.randint(0, 900, (num,), generator=g)
        labels_BL = torch.stack([labels_BL[:, 0].double(), item_B.double(), -torch.rand(num, generator=g).double()], 1)
    weight_B = (logits_B.detach().view(num, -1)[:, 0] * 7).frac().abs()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        loss = objective.loss(logits_B, labels_BL, num) + objective.loss(logits_B, labels_BL, num, weight_B)
        found.append((bits(loss), bits(torch.autograd.grad(loss, logits_B)[0]), bits(sigmoid(logits_B))))
    torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
