"""What a user of torch.nn assumes of a module, its optimizer and its loader: so it is, or an error says no."""

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import hotrow
from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer
from loops import looped

ALL = [SGD, Adagrad, RowWiseAdagrad, Adam, FTRL]
ROWS, DIM = 12, 3


def tables(*names: str, **options: Any) -> list[TableConfig]:
    return [TableConfig(name=n, num_embeddings=ROWS, embedding_dim=DIM, feature_names=(n,), **options) for n in names]


@pytest.fixture(params=["dram", "tiers"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., EmbeddingCollection]:
    def made(*names: str, **options: Any) -> EmbeddingCollection:
        memory = None
        if request.param == "tiers":
            memory = hotrow.Memory(dram="100KiB", file=tmp_path / "-".join(names))
        return EmbeddingCollection(tables(*names, **options), memory=memory, seed=1)

    return made


def ids(step: int, num_features: int = 2) -> Tensor:
    return torch.randint(0, ROWS, (5, num_features), generator=torch.Generator().manual_seed(step))


def rows_of(emb: EmbeddingCollection) -> dict[str, Tensor]:
    return {name: emb.read_rows(name, slice(None)) for name in emb.weights}


def same(first: dict[str, Tensor], second: dict[str, Tensor], *names: str) -> bool:
    return all(torch.equal(first[name], second[name]) for name in names or first)


def step(emb: nn.Module, optimizer: torch.optim.Optimizer, number: int, num_features: int = 2) -> None:
    (emb(ids(number, num_features)) ** 2).sum().backward()
    optimizer.step()


class Model(nn.Module):
    def __init__(self, emb: EmbeddingCollection) -> None:
        super().__init__()
        self.emb = emb
        self.head = nn.Linear(emb.output_dim, 1)

    def forward(self, sparse: Tensor) -> Tensor:
        return self.head(self.emb(sparse))


@pytest.mark.parametrize("optimizer_class", ALL)
def test_a_frozen_collection_neither_moves_nor_collects_gradients(make: Any, optimizer_class: type) -> None:
    emb = make("a", "b")
    model, optimizer = Model(emb), optimizer_class(emb, lr=0.1)
    before = rows_of(emb)
    model.requires_grad_(False)
    assert not emb(ids(0)).requires_grad and emb.pending == []
    assert all(not values.requires_grad for values, _ in emb.sequence(bags()).values())
    model.head.requires_grad_(True)
    step(model, optimizer, 0)
    assert emb.pending == [] and same(rows_of(emb), before) and model.head.weight.grad is not None

    emb.requires_grad_(True)
    step(model, optimizer, 1)
    assert not same(rows_of(emb), before)


def bags() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 0, 1, 1]))


@looped("dtype", ["float32", "float16", "bfloat16"])
@looped("optimizer_class", ALL)
def test_a_frozen_table_stays_and_the_others_move_as_ever(make: Any, optimizer_class: type, dtype: str) -> None:
    """To the bit, states too: as if the frozen table had an optimizer that is not stepped."""
    emb, free = make("a", "b", dtype=dtype), EmbeddingCollection(tables("a", "b", dtype=dtype), seed=1)
    optimizer, other = optimizer_class(emb, lr=0.1), optimizer_class(free, lr=0.1)
    step(emb, optimizer, 0)  # so that a has states which a step with a gradient of 0 would move
    step(free, other, 0)
    before = rows_of(emb)
    for parameter in (own for name, own in emb.named_parameters() if name.startswith("a.")):
        parameter.requires_grad = False
    for number in range(1, 4):
        step(emb, optimizer, number)
        step(free, other, number)
    assert same(rows_of(emb), before, "a") and same(rows_of(emb), rows_of(free), "b")
    emb.requires_grad_(True)
    after_thawing = EmbeddingCollection(tables("a", "b", dtype=dtype), seed=1)
    other = optimizer_class(after_thawing, lr=0.1)
    step(after_thawing, other, 0)
    if optimizer_class is not Adam:  # whose steps go on
        step(emb, optimizer, 9)
        step(after_thawing, other, 9)
        assert same(rows_of(emb), rows_of(after_thawing), "a")


def test_lookups_of_frozen_tables_leave_the_cache_alone(tmp_path: Path) -> None:
    emb = EmbeddingCollection(tables("a"), memory=hotrow.Memory(dram="100KiB", file=tmp_path / "rows"))
    emb.requires_grad_(False)
    emb(ids(0, 1))
    emb.requires_grad_(True)
    assert emb.placement.announced.unannounced == 0
    emb(ids(0, 1))
    assert emb.placement.announced.unannounced == 1


def test_a_frozen_tables_gradient_plays_no_part_in_clipping() -> None:
    emb = EmbeddingCollection(tables("a", "b"), seed=1)
    emb.switches["a"].requires_grad_(False)
    (emb(ids(0)) * 2).sum().backward()
    norm = hotrow.clip_grad_norm_(emb, 1e9)
    assert float(norm) == pytest.approx((5 * DIM * 4) ** 0.5)


def test_gradients_of_per_id_weights_reach_past_frozen_tables(make: Any) -> None:
    emb = make("a", "b")
    truth = rows_of(emb)["a"][1:3].sum(1)
    emb.requires_grad_(False)
    weights = torch.ones(4, requires_grad=True)
    out = emb(KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), weights, lengths=torch.tensor([2, 0, 1, 1])))
    out.sum().backward()
    assert emb.pending == [] and weights.grad is not None
    torch.testing.assert_close(weights.grad[:2], truth)


def test_a_frozen_sequence_beside_a_trained_one(make: Any) -> None:
    emb = make("a", "b")
    optimizer, before = SGD(emb, lr=0.1), rows_of(emb)
    emb.switches["a"].requires_grad_(False)
    sum(values.sum() for values, _ in emb.sequence(bags()).values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert same(rows_of(emb), before, "a") and not same(rows_of(emb), before, "b")


def test_freezing_survives_copies() -> None:
    emb = EmbeddingCollection(tables("a", "b"), seed=1)
    emb.switches["b"].requires_grad_(False)
    for twin in (copy.deepcopy(emb), pickle.loads(pickle.dumps(emb))):
        assert twin.frozen == {1}


def test_tables_are_averaged_as_the_docs_say() -> None:
    emb = EmbeddingCollection(tables("a"), seed=1)
    AveragedModel(Model(emb).head).update_parameters(Model(emb).head)
    whole = AveragedModel(Model(emb))
    assert same(rows_of(whole.module.emb), rows_of(emb))
    whole.update_parameters(Model(emb))
    for use in (
        whole.module.emb.state_dict,
        lambda: whole.module.emb(bags()),
        lambda: whole.module.emb.sequence(bags()),
    ):
        with pytest.raises(ValueError, match="tables are none of them: leave them out"):
            use()
    optimizer, averaged, seen = SGD(emb, lr=0.1), copy.deepcopy(emb), []
    for number in range(4):
        step(emb, optimizer, number, 1)
        seen.append(rows_of(emb)["a"])
        for name, weight in averaged.weights.items():
            weight.lerp_(emb.weights[name], 1 / (number + 1))
    torch.testing.assert_close(averaged.weights["a"], torch.stack(seen).mean(0))


def test_torch_save_and_load_of_the_module() -> None:
    emb = EmbeddingCollection(tables("a"), seed=1)
    file = io.BytesIO()
    torch.save(emb, file)
    file.seek(0)
    assert same(rows_of(torch.load(file, weights_only=False)), rows_of(emb))


def test_an_optimizer_is_not_copied() -> None:
    optimizer = SGD(EmbeddingCollection(tables("a")), lr=0.1)
    with pytest.raises(TypeError, match=r"SGD cannot be copied or pickled, .* load the state_dict\(\)"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.half(), r"do not become torch.float16: .*TableConfig.dtype"),
        (lambda model: model.to("meta"), r"do not move to meta: .*emb\(ids\).to\('meta'\)"),
        (lambda model: model.share_memory(), r"are not shared with other processes"),
    ],
)
def test_what_does_not_change_tables_says_so(make: Any, change: Callable[[nn.Module], Any], text: str) -> None:
    emb = make("a")
    model, before = Model(emb), rows_of(emb)
    with pytest.warns(UserWarning, match=f"the tables of this EmbeddingCollection {text}"):
        change(model)
    assert same(rows_of(emb), before) and emb.weights["a"].dtype == torch.float32


def test_what_changes_nothing_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Model(EmbeddingCollection(tables("a")))
        model.float().cpu().to("cpu").train().eval().to(memory_format=torch.contiguous_format)
        model.apply(lambda part: None)


def test_data_parallel_names_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"nn.DataParallel cannot copy an EmbeddingCollection"):
        Model(EmbeddingCollection(tables("a"))).emb._replicate_for_data_parallel()


def test_model_zero_grad_drops_what_waits() -> None:
    emb = EmbeddingCollection(tables("a"))
    emb(ids(0, 1)).sum().backward()
    emb.zero_grad()
    assert emb.pending == []


def test_load_state_dict_is_strict_and_not() -> None:
    emb = EmbeddingCollection(tables("a", "b"), seed=1)
    state = {"a.weight": torch.ones(ROWS, DIM)}
    with pytest.raises(RuntimeError, match=r'Missing key.*"b.weight"'):
        emb.load_state_dict(state)
    found = emb.load_state_dict({**state, "c": torch.zeros(1)}, strict=False)
    assert found.missing_keys == ["b.weight"] and found.unexpected_keys == ["c"]
    assert (emb.weights["a"] == 1).all() and not (emb.weights["b"] == 1).any()


def test_compiled_models_train_to_the_same_bits() -> None:
    results = []
    for compiled in (False, True):
        emb = EmbeddingCollection(tables("a", "b"), seed=1)
        torch.manual_seed(0)
        model = Model(emb)
        optimizer = Adagrad(emb, lr=0.1)
        called = torch.compile(model, backend="eager") if compiled else model
        for number in range(3):
            step(called, optimizer, number)  # type: ignore[arg-type]
        results.append(rows_of(emb))
    assert same(*results)


@looped(
    ("change", "text"),
    [
        ({"feature_names": "user"}, r"feature_names is the text 'user'; pass a tuple of feature names, such as"),
        ({"feature_names": (1,)}, r"feature_names is \(1,\); name at least one feature, as text"),
        ({"num_embeddings": True}, r"num_embeddings is True; it must be an integer"),
        ({"num_embeddings": 0}, r"num_embeddings is 0; it must be at least 1"),
        ({"num_embeddings": 1 << 63}, r"num_embeddings is 9,223,.*below 2\^63"),
        ({"pooling": "max"}, r"pooling is 'max'; choose one of sum, mean; .*torch.segment_reduce\(values, 'max'"),
        ({"lr_scale": float("nan")}, r"lr_scale is nan; it must be 0 or a positive number"),
    ],
)
def test_tables_that_are_none(change: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {"name": "t", "num_embeddings": 4, "embedding_dim": 2, "feature_names": ("f",)}
    with pytest.raises(ValueError, match=f"table 't': {text}"):
        TableConfig(**{**fields, **change})


def test_counts_of_numpy_are_integers() -> None:
    (table,) = tables("a")
    config = TableConfig(name="t", num_embeddings=np.int64(4), embedding_dim=np.uint8(2), feature_names=["f"])  # type: ignore[arg-type]
    assert (type(config.num_embeddings), type(config.embedding_dim)) == (int, int) and table.num_embeddings == ROWS


@looped("bound", [None, 0.0])
@looped("num_rows", [1 << 50, 1 << 62])
def test_tables_larger_than_memory_are_refused_with_the_figures(num_rows: int, bound: float | None) -> None:
    table = TableConfig(
        name="t", num_embeddings=num_rows, embedding_dim=16, feature_names=("f",), init=hotrow.Uniform(bound=bound)
    )
    with pytest.raises(
        ValueError, match=rf"the tables are [\d,.]+ GiB, and [\d.]+ GiB of memory are available; .*{num_rows:,} rows"
    ) as error:
        EmbeddingCollection([table])
    assert "memory=hotrow.Memory(dram=..., ssd=...)" in str(error.value)


def test_max_pooling_as_the_error_says_it(make: Any) -> None:
    emb = make("a")
    optimizer = SGD(emb, lr=0.5)
    truth = nn.EmbeddingBag(ROWS, DIM, mode="max", _weight=rows_of(emb)["a"])
    values, offsets = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 5])
    rows, starts = emb.sequence(KeyedJaggedTensor(["a"], values, offsets=offsets))["a"]
    found = torch.segment_reduce(rows, "max", offsets=starts)
    assert torch.equal(found, truth(values, offsets[:-1]))
    found.pow(2).sum().backward()
    truth(values, offsets[:-1]).pow(2).sum().backward()
    optimizer.step()
    assert truth.weight.grad is not None
    torch.testing.assert_close(rows_of(emb)["a"], truth.weight.detach() - 0.5 * truth.weight.grad)


def test_a_forgotten_step_is_said_once_at_the_third_batch() -> None:
    emb = EmbeddingCollection(tables("a", "b"))
    optimizer = SGD(emb, lr=0.1)
    for number in range(2):
        emb(ids(number)).sum().backward()
    with pytest.warns(UserWarning, match=r"3 batches wait for the optimizer of tables a, b; .*step\(\) of") as said:
        for number in range(5):
            emb(ids(number)).sum().backward()
    assert len(said) == 1
    optimizer.step()


def test_without_an_optimizer_the_warning_says_which_to_make() -> None:
    emb = EmbeddingCollection(tables("a", "b"))
    torch.optim.SGD(emb.parameters(), lr=0.1)  # what a user of torch would write
    with pytest.warns(UserWarning, match=r"such as hotrow.Adagrad\(emb, lr=0.05\).*those of torch do not see tables"):
        for number in range(3):
            emb(ids(number)).sum().backward()


def test_towers_and_steps_in_time_are_no_forgotten_step() -> None:
    """Several forward passes for one backward, or several sequences, are one batch."""
    emb = EmbeddingCollection(tables("a", "b"))
    optimizer = SGD(emb, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            rows = [values.sum() for _ in range(2) for values, _ in emb.sequence(bags()).values()]
            (sum(emb(ids(number + k)).sum() for k in range(4)) + sum(rows)).backward()  # type: ignore[union-attr]
            first, second = emb(ids(number)).sum(), emb(ids(number)).sum()
            first.backward()
            second.backward()
            optimizer.step()


@pytest.mark.parametrize("optimizer_class", ALL)
def test_several_collections_under_one_optimizer(make: Any, optimizer_class: type) -> None:
    """To the bit what one optimizer each does; one that has nothing pending is left alone."""
    together, apart = [make("a"), make("b")], [EmbeddingCollection(tables(n), seed=1) for n in ("a", "b")]
    optimizer = optimizer_class(together, lr=0.1)
    others = [optimizer_class(emb, lr=0.1) for emb in apart]
    optimizer.param_groups[1]["lr"] = others[1].param_groups[0]["lr"] = 0.02
    assert [group["name"] for group in optimizer.param_groups] == ["a", "b"] and optimizer.collections == (*together,)
    for number in range(4):
        for k, (first, second) in enumerate(zip(together, apart, strict=True)):
            if number != 2 or k:
                for emb in (first, second):
                    (emb(ids(number, 1)) ** 2).sum().backward()
        optimizer.step()
        for other in others:
            other.step()
    for first, second in zip(together, apart, strict=True):
        assert same(rows_of(first), rows_of(second))


def test_several_collections_resume_from_a_state_dict_and_a_checkpoint(tmp_path: Path) -> None:
    def make_all() -> tuple[list[EmbeddingCollection], SparseOptimizer]:
        both = [EmbeddingCollection(tables(name), seed=1) for name in ("a", "b")]
        return both, Adam(both, lr=0.1)

    def train(both: list[EmbeddingCollection], optimizer: SparseOptimizer, number: int) -> None:
        sum((emb(ids(number, 1)) ** 2).sum() for emb in both).backward()  # type: ignore[union-attr]
        optimizer.step()

    both, optimizer = make_all()
    train(both, optimizer, 0)
    parts = {"a": both[0], "b": both[1], "optimizer": optimizer}
    hotrow.save_checkpoint(tmp_path / "saved", parts)
    state, rows = copy.deepcopy(optimizer.state_dict()), [copy.deepcopy(emb.state_dict()) for emb in both]
    train(both, optimizer, 1)
    for loaded in ("state_dict", "checkpoint"):
        again, other = make_all()
        if loaded == "checkpoint":
            hotrow.load_checkpoint(tmp_path / "saved", {"a": again[0], "b": again[1], "optimizer": other})
        else:
            other.load_state_dict(state)
            for emb, own in zip(again, rows, strict=True):
                emb.load_state_dict(own)
        train(again, other, 1)
        assert all(same(rows_of(x), rows_of(y)) for x, y in zip(again, both, strict=True))


@looped(
    ("given", "text"),
    [
        (lambda: [], "was given no EmbeddingCollection"),
        (lambda: nn.Linear(2, 2).parameters(), "was given a Parameter; pass an EmbeddingCollection or several"),
        (lambda: [EmbeddingCollection(tables("a")) for _ in range(2)], "table 'a' is in two of the collections"),
    ],
)
def test_what_no_optimizer_of_tables_takes(given: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SGD(given(), lr=0.1)


def test_groups_are_tables_for_good() -> None:
    optimizer = SGD(EmbeddingCollection(tables("a")), lr=0.1)
    with pytest.raises(ValueError, match="SGD updates tables, one group each"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_one_optimizer_updates_a_collection() -> None:
    """Made later, it takes the tables over; the earlier one does not step beside it."""
    emb = EmbeddingCollection(tables("a"), seed=1)
    first = SGD(emb, lr=0.1)
    second = Adagrad(emb, lr=0.1)
    emb(ids(0, 1)).sum().backward()
    before = rows_of(emb)
    with pytest.raises(ValueError, match=r"tables a have another optimizer, a Adagrad that was made after this SGD"):
        first.step()
    assert same(rows_of(emb), before) and len(emb.pending) == 1
    second.step()
    assert not same(rows_of(emb), before)
    first.step()  # nothing waits
    del second
    step(emb, first, 1, 1)


def test_grad_scaler_is_refused_by_name_and_the_way_round_it_works() -> None:
    emb, plain = EmbeddingCollection(tables("a"), seed=1), EmbeddingCollection(tables("a"), seed=1)
    optimizer, other = SGD(emb, lr=0.1), SGD(plain, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((emb(ids(0, 1)) ** 2).sum()).backward()
    with pytest.raises(RuntimeError, match=r"torch.amp.GradScaler cannot step SGD: .*emb.scale_pending\(1 / scaler"):
        scaler.step(optimizer)
    emb.scale_pending(1 / scaler.get_scale())
    optimizer.step()
    step(plain, other, 0, 1)
    assert same(rows_of(emb), rows_of(plain))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.5**k),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum="betas" in o.defaults),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8, cycle_momentum="betas" in o.defaults),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


class Plain(nn.Module):
    """torch's own table, one id a feature."""

    def __init__(self, weight: Tensor, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=sparse)

    def forward(self, ids_BF: Tensor) -> Tensor:
        return self.table(ids_BF[:, 0])


OF_TORCH: dict[type, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    SGD: (lambda parameters: torch.optim.SGD(parameters, lr=0.1), False),
    Adagrad: (lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), False),
    Adam: (lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1), True),
}


@looped("scheduler", SCHEDULERS)
@looped("optimizer_class", ALL)
def test_schedulers_drive_rates_and_betas(optimizer_class: type, scheduler: str) -> None:
    """As they drive torch's own optimizer: the same groups after every step, the same rows."""
    emb = EmbeddingCollection(tables("a"), seed=1)
    of_torch, sparse = OF_TORCH.get(optimizer_class, OF_TORCH[SGD])
    plain = Plain(emb.weights["a"], sparse=sparse)
    optimizer, truth = optimizer_class(emb, lr=0.1), of_torch(plain.parameters())
    schedules = [SCHEDULERS[scheduler](each) for each in (optimizer, truth)]
    for number in range(6):
        for module, each, schedule in zip((emb, plain), (optimizer, truth), schedules, strict=True):
            each.zero_grad()
            step(module, each, number, 1)
            schedule.step(*[1.0] if scheduler == "ReduceLROnPlateau" else [])
        for name in ("lr", "betas"):
            assert optimizer.param_groups[0].get(name) == pytest.approx(truth.param_groups[0].get(name)), number
    assert torch.isfinite(emb.weights["a"]).all()
    if optimizer_class in OF_TORCH:
        torch.testing.assert_close(emb.weights["a"], plain.table.weight.detach())


def test_a_rate_of_zero_leaves_ftrl_as_it_is() -> None:
    emb = EmbeddingCollection(tables("a", "b"), seed=1)
    optimizer = FTRL(emb, lr=0.1)
    step(emb, optimizer, 0)
    before, states = rows_of(emb), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["lr"] = 0.0
    step(emb, optimizer, 1)
    assert same(rows_of(emb), before, "a") and not same(rows_of(emb), before, "b")
    assert all(torch.equal(states[0][name], optimizer.state_dict()["state"][0][name]) for name in ("z", "n"))


def test_a_cycle_of_momentum_needs_one() -> None:
    """As torch.optim.Adagrad has it: no option is taken and then does nothing."""
    for optimizer_class in (SGD, Adagrad, RowWiseAdagrad, FTRL):
        with pytest.raises(ValueError, match="optimizer must support momentum or beta1 with `cycle_momentum`"):
            lr_scheduler.OneCycleLR(optimizer_class(EmbeddingCollection(tables("a")), lr=0.1), 0.1, total_steps=4)


@looped("dtype", [torch.float32, torch.float16, torch.bfloat16])
@looped("mode", ["sum", "mean"])
def test_from_torch_and_back(mode: str, dtype: torch.dtype) -> None:
    bag = nn.EmbeddingBag(ROWS, DIM, mode=mode, dtype=dtype, include_last_offset=True)
    given = {"user": bag, "item": nn.Embedding.from_pretrained(torch.randn(4, 2), sparse=True)}
    emb = EmbeddingCollection.from_torch(given)
    assert emb.frozen == {1}
    batch = KeyedJaggedTensor(["user", "item"], torch.tensor([3, 1, 4, 2, 0]), lengths=torch.tensor([2, 1, 1, 1]))
    truth = bag.float()(torch.tensor([3, 1, 4]), torch.tensor([0, 2, 3]))
    torch.testing.assert_close(emb(batch)[:, :DIM], truth)
    assert torch.equal(emb(batch)[:, DIM:], given["item"].weight[[2, 0]])
    back = emb.to_torch()
    kept = torch.float16 if dtype == torch.float16 else torch.float32
    assert back["user"].mode == mode and torch.equal(back["user"].weight, bag.weight.to(kept))
    assert torch.equal(back["item"].weight, given["item"].weight) and not back["item"].weight.requires_grad
    back["user"].weight.data.zero_()
    assert emb.float32("user").any(), "a copy"
    assert EmbeddingCollection.from_torch(nn.Embedding(3, 2)).feature_names == ("embedding",)
    assert EmbeddingCollection.from_torch(nn.ModuleDict({"x": nn.Embedding(3, 2)})).feature_names == ("x",)


@looped(
    ("module", "text"),
    [
        (lambda: nn.EmbeddingBag(4, 2, padding_idx=0), r"has padding_idx=0, .*: leave padding ids out of the bags"),
        (lambda: nn.EmbeddingBag(4, 2, max_norm=1.0), r"has max_norm=1.0"),
        (lambda: nn.EmbeddingBag(4, 2, scale_grad_by_freq=True), r"has scale_grad_by_freq=True"),
        (lambda: nn.EmbeddingBag(4, 2, mode="max"), r"pooling is 'max'.*segment_reduce"),
        (lambda: nn.Embedding(4, 2, dtype=torch.float64), r"is torch.float64 \(4, 2\); .*module.float\(\)"),
        (lambda: nn.Linear(4, 2), "is a Linear; from_torch takes"),
    ],
)
def test_what_tables_do_not_have_is_refused_by_name(module: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(ValueError, match=f"'t'.* ?{text}"):
        EmbeddingCollection.from_torch({"t": module()})


def test_padding_as_the_error_says_it() -> None:
    bag = nn.EmbeddingBag(ROWS, DIM, padding_idx=0)
    padded = torch.tensor([[3, 1, 0], [0, 0, 0], [5, 0, 0]])
    keep = padded != 0
    plain = EmbeddingCollection.from_torch({"f": nn.EmbeddingBag(ROWS, DIM, mode="mean", _weight=bag.weight)})
    found = plain(KeyedJaggedTensor(["f"], padded[keep], lengths=keep.sum(1)))
    torch.testing.assert_close(found, bag(padded))


class OfTorchrec:
    """The methods of torchrec.KeyedJaggedTensor that hotrow asks for, and no other."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=self._lengths.dtype), self._lengths.cumsum(0)])

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def variable_stride_per_key(self) -> bool:
        return len(self._lengths) % len(self._keys) != 0


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, -1.0, 3.0])])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_keyed_jagged_tensor_of_torchrec_is_taken_as_it_is(make: Any, weights: Any, dtype: torch.dtype) -> None:
    emb, values, lengths = make("a", "b"), torch.tensor([1, 2, 3, 4], dtype=dtype), torch.tensor([2, 0, 1, 1])
    given = OfTorchrec(["b", "a"], values, lengths, weights)
    own = KeyedJaggedTensor(["b", "a"], values, weights, lengths=lengths)
    assert torch.equal(emb(given), emb(own))
    for name, (rows, offsets) in emb.sequence(given).items():
        assert torch.equal(rows, emb.sequence(own)[name][0]) and torch.equal(offsets, emb.sequence(own)[name][1])


def test_look_ahead_announces_batches_of_torchrec(tmp_path: Path) -> None:
    emb = EmbeddingCollection(tables("a"), memory=hotrow.Memory(dram="100KiB", file=tmp_path / "rows"))
    optimizer = SGD(emb, lr=0.1)
    batches = [OfTorchrec(["a"], ids(k, 1).flatten(), torch.ones(5, dtype=torch.int64)) for k in range(4)]
    for batch in hotrow.lookahead(batches, emb, depth=2):
        assert isinstance(batch, OfTorchrec)
        emb(batch).sum().backward()
        optimizer.step()
    assert (emb.placement.announced.foreseen, emb.placement.announced.unannounced) == (4, 0)


def test_features_with_their_own_numbers_of_samples_are_refused() -> None:
    emb = EmbeddingCollection(tables("a", "b"))
    with pytest.raises(ValueError, match="a number of samples of its own for each feature"):
        emb(OfTorchrec(["a", "b"], torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])))


class Config:
    """What hotrow asks of a torchrec.EmbeddingBagConfig."""

    def __init__(self, name: str, feature_names: list[str], **options: Any) -> None:
        self.name, self.feature_names = name, feature_names
        self.__dict__.update(options)


class Pooling:
    def __init__(self, name: str) -> None:
        self.name = name


class BagCollection(nn.Module):
    """What hotrow asks of a torchrec.EmbeddingBagCollection."""

    def __init__(self, *configs: Config) -> None:
        super().__init__()
        self._configs = configs
        self.embedding_bags = nn.ModuleDict({c.name: nn.EmbeddingBag(ROWS, DIM) for c in configs})

    def embedding_bag_configs(self) -> list[Config]:
        return [*self._configs]


def test_from_torchrec_and_back_by_its_interface() -> None:
    user, item = Config("user", ["u"], pooling=Pooling("SUM")), Config("item", ["x", "y"], pooling=Pooling("MEAN"))
    theirs = BagCollection(user, item)
    ours = EmbeddingCollection.from_torchrec(theirs)
    found = [(t.name, t.feature_names, t.pooling) for t in ours.tables]
    assert found == [("user", ("u",), "sum"), ("item", ("x", "y"), "mean")]
    state = ours.torchrec_state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in state.items())
    for options, text in (({"need_pos": True}, "has need_pos"), ({"pooling": Pooling("NONE")}, "pooling none")):
        with pytest.raises(ValueError, match=f"table 't' {text}|table 't' has {text}"):
            EmbeddingCollection.from_torchrec(BagCollection(Config("t", ["f"], **options)))
    with pytest.raises(ValueError, match="from_torchrec was given a Linear"):
        EmbeddingCollection.from_torchrec(nn.Linear(2, 2))


def test_the_pages_python_runs_as_written() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:  # each goes on from the one before
        exec(compile(block, "docs/python.md", "exec"), names)
    assert len(blocks) == 4 and names["bags"].keys() == {"user", "item"}
