"""Law 2 for hot rows: a run whose hot rows are copied to a fast device and back has the bits of one without copies.

The truth is the same order of batches trained on the tables themselves: every tensor, state, loss, rate and score.
"""

import copy
import gc
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import config, outcome, signal_at

import hotrow
from at_step import raise_at
from hot_rig import InDram, copies_in_dram
from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot import turns
from hotrow.hot.hot_set import HotRows, HotSet
from hotrow.hot.turns import HotCopies
from hotrow.placement import copies as copies_module
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from hotrow.setup import setup
from loops import looped
from sampled import sampled

OPTIMIZERS = {  # and the bytes of a row with its states
    "sgd": (32, ["optimizer.sparse.name=sgd"]),
    "adagrad": (64, ["optimizer.sparse.name=adagrad"]),
    "row-wise adagrad": (36, ["optimizer.sparse.name=row_wise_adagrad"]),
    "adam": (96, ["optimizer.sparse.name=adam", "optimizer.sparse.lr=0.01"]),
    "ftrl": (96, ["optimizer.sparse.name=ftrl"]),
    "float16": (20, ["train.precision=fp16"]),
    "split": (96, ["train.precision=split_bf16", "optimizer.sparse.name=adam", "optimizer.sparse.lr=0.01"]),
}
GOLDEN = Path(__file__).parents[1] / "golden"
HOT_ROWS = 160
"""Of the dataset's 270."""
TURNS = ["hot.schedule=fae", "hot.small_table=0", f"hot.budget={36 * HOT_ROWS}", "hot.rate=40", "checkpoint.every=5"]


@pytest.fixture(scope="module", params=[True, False], ids=["ranked", "listed"])
def data(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]
) -> Path:
    """Without counts rows are hot wherever they stand in their table, so that copies have other numbers."""
    return make_dataset(tmp_path_factory.mktemp("hot") / "data", counts=request.param).path


def trained(data: Path, run: Path, *changes: str) -> RunFolder:
    return runs.train(config(data, run, [*TURNS, *changes]), quiet=True)


@pytest.fixture
def in_dram() -> Iterator[list[int]]:
    """As `copies_in_dram`, for the whole test."""
    with copies_in_dram() as steps:
        yield steps


@pytest.fixture
def dram_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for the device "cpu" lie in DRAM and need no Triton."""
    monkeypatch.setattr(copies_module, "OnDevice", InDram)


def without_cost(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "state": {**found["state"], "turns": found["state"]["turns"]["order"]}}


def stopped_and_resumed(
    data: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: RunFolder,
    stops: Iterable[int],
    changes: Iterable[str],
) -> Iterator[RunFolder]:
    """Law 3: `whole` again for each of `stops`: interrupted after that step and resumed, its outcome is the same."""
    for stop in stops:
        with monkeypatch.context() as patch:
            signal_at(patch, stop, signal.SIGTERM)
            run = trained(data, folder / f"stopped-{stop}", *changes)
        assert run.record.status == "interrupted" and run.record.steps == stop
        run = runs.resume(run.path, quiet=True)
        assert without_cost(outcome(run)) == without_cost(outcome(whole)), f"stopped after step {stop}"
        assert run.record.hot.get("swaps") == whole.record.hot.get("swaps")
        yield run


@pytest.mark.slow_but("True-ftrl", "True-float16")
@pytest.mark.filterwarnings("ignore:.* carries no counts")
@pytest.mark.parametrize(("data", "optimizer"), sampled([True, False], OPTIMIZERS, pairs=False), indirect=["data"])
def test_copies_are_invisible(data: Path, tmp_path: Path, optimizer: str) -> None:
    record_bytes, changes = OPTIMIZERS[optimizer]
    changes = [*changes, f"hot.budget={record_bytes * HOT_ROWS}"]
    plain = trained(data, tmp_path / "plain", *changes)
    with copies_in_dram() as steps:
        copied = trained(data, tmp_path / "copied", *changes)
    assert without_cost(outcome(copied)) == without_cost(outcome(plain))
    hot = copied.record.hot
    assert hot["hot_bytes"] <= record_bytes * HOT_ROWS and 0.1 < hot["hot_samples"] < 0.9
    assert len(steps) > 4 and copied.record.steps - len(steps) > 4 and len(hot["swaps"]) > 4
    assert hot["sync_s"] > 0 and "sync_s" not in plain.record.hot


@pytest.mark.slow_but("file-True")
@pytest.mark.filterwarnings("ignore:.* carries no counts")
@pytest.mark.parametrize(("place", "counts"), sampled(["ssd", "file"], [True, False], pairs=False))
def test_copies_in_tiers(tmp_path: Path, place: str, counts: bool, make_dataset: Callable[..., PackedDataset]) -> None:
    data = make_dataset(tmp_path / "data", table_rows=(50, 20, 4000), counts=counts).path
    tiers = [f"memory.{place}={tmp_path / 'rows'}", "memory.dram=85000"]
    tiers += ["memory.force=true"] if place == "ssd" else []
    changes = ["train.precision=split_bf16", "optimizer.sparse.name=adagrad", "hot.budget=25000"]
    plain = trained(data, tmp_path / "plain", *changes)
    with copies_in_dram() as steps:
        copied = trained(data, tmp_path / "copied", *changes, *tiers)
    assert copied.record.memory["disk_bytes"] > 0 and len(steps) > 2
    found, wanted = without_cost(outcome(copied)), without_cost(outcome(plain))
    assert found["tensors"] == wanted["tensors"] and found["metrics"] == wanted["metrics"]


@pytest.mark.filterwarnings("ignore:.* carries no counts")
def test_what_cannot_be_is_refused_and_what_is_done_is_said(
    data: Path, tmp_path: Path, make_dataset: Callable[..., PackedDataset]
) -> None:
    run = trained(data, tmp_path / "run", "train.max_steps=2")
    counted = "counted_to_find_hot_rows" in run.record.warnings
    assert counted == ("counts/t0" not in PackedDataset.open(data).info.files)
    least = r"hot\.budget is 40: a hot set of 40 bytes is too small: .* raise the budget by \d+ bytes, or lower"
    with pytest.raises(ValueError, match=least):
        trained(data, tmp_path / "small", "hot.budget=40")
    rows = {"train": 64, "test": 64}
    without = make_dataset(tmp_path / "without", rows=rows).path
    with pytest.raises(ValueError, match=r"hot\.schedule is fae, whose rate follows the validation loss"):
        trained(without, tmp_path / "unvalidated")
    assert not (tmp_path / "small").exists() and not (tmp_path / "unvalidated").exists(), "before there is a folder"
    trained(without, tmp_path / "fixed", "hot.schedule=fixed", "train.max_steps=2", "train.eval_every=null")


@pytest.mark.slow_but("listed-fixed", "listed-fae", "ranked-window")
@pytest.mark.filterwarnings("ignore:.* carries no counts")
@pytest.mark.parametrize("schedule", ["fae", "fixed", "window"])
def test_what_is_hot_is_said_and_that_nothing_is(data: Path, tmp_path: Path, schedule: str) -> None:
    changes = (f"hot.schedule={schedule}", "train.max_steps=2")
    run = trained(data, tmp_path / "run", *changes)
    hot = run.record.hot
    share = f"{hot['hot_samples']:.1%} of the samples"
    line = f"hot: {HOT_ROWS} rows (exact) in {36 * HOT_ROWS:,} of {36 * HOT_ROWS:,} bytes, {share}; found in "
    assert line in (run.path / "log.txt").read_text() and 0 < hot["hot_samples"] < 1
    assert "no_hot_samples" not in run.record.warnings
    cold = trained(data, tmp_path / "cold", *changes, f"hot.budget={36 * 5}")
    assert cold.record.hot["hot_samples"] == 0
    text = cold.record.warnings["no_hot_samples"]["text"]
    assert f"hot.budget is {36 * 5}" in text and f"hot.schedule {schedule} does nothing: raise hot.budget" in text


def test_the_schedule_is_in_the_report(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    """Every swap, as the published rule has it: halved where the loss did not fall, at times doubled where it did."""
    data = make_dataset(tmp_path / "data", counts=True).path
    hot = trained(data, tmp_path / "fae").record.hot
    swaps = hot["swaps"]
    assert len(swaps) > 4 and swaps[0]["rate"] == 40 and swaps[-1]["next_rate"] == hot["rate"]
    for before, after in pairwise(swaps):
        assert before["step"] < after["step"] and before["turn"] != after["turn"]
        assert after["rate"] == before["next_rate"]
        fell = after["logloss"] < before["logloss"]
        assert after["next_rate"] in ({after["rate"], 2 * after["rate"], 100} if fell else {max(1, after["rate"] / 2)})
    fixed = trained(data, tmp_path / "fixed", "hot.schedule=fixed").record.hot["swaps"]
    assert {(swap["logloss"], swap["rate"], swap["next_rate"]) for swap in fixed} == {(None, 40, 40)}
    assert "swaps" not in trained(data, tmp_path / "window", "hot.schedule=window").record.hot


TABLES = [
    TableConfig(name="a", num_embeddings=40, embedding_dim=4, feature_names=("a1", "a2")),
    TableConfig(name="b", num_embeddings=30, embedding_dim=6, feature_names=("b1",), pooling="mean", dtype="float16"),
    TableConfig(name="c", num_embeddings=25, embedding_dim=3, feature_names=("c1",), dtype="bfloat16"),
]
HOT = {"a": HotRows(5, np.array([7, 20, 39])), "b": HotRows(0, np.array([3, 4, 29])), "c": HotRows.first(25)}
HOT_SET = HotSet(how="exact", rows=HOT, record_bytes={"a": 16, "b": 12, "c": 12})
FEATURES = {"a1": "a", "a2": "a", "b1": "b", "c1": "c"}


def random_batch(generator: np.random.Generator, *, hot: bool, one_hot: bool) -> KeyedJaggedTensor:
    num_samples = 7
    lengths, values = [], []
    for table in FEATURES.values():
        num_rows = next(t.num_embeddings for t in TABLES if t.name == table)
        own = HOT[table]
        choices = np.concatenate([np.arange(own.prefix), own.listed]) if hot else np.arange(num_rows)
        own_lengths = np.ones(num_samples, int) if one_hot else generator.integers(0, 4, num_samples)
        lengths.append(own_lengths)
        values.append(generator.choice(choices, own_lengths.sum()))
    ids = torch.from_numpy(np.concatenate(values))
    if one_hot:
        return KeyedJaggedTensor(list(FEATURES), ids)
    weights = torch.rand(len(ids))
    return KeyedJaggedTensor(list(FEATURES), ids, weights, lengths=torch.from_numpy(np.concatenate(lengths)))


def everything(emb: hotrow.EmbeddingCollection, optimizer: Any) -> list[torch.Tensor]:
    states = [state for group in optimizer.param_groups for state in optimizer.state[group["params"][0]].values()]
    return [t.clone() for t in (*emb.weights.values(), *emb.low.values(), *states)]


@pytest.mark.usefixtures("dram_as_device")
@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("name", ["SGD", "RowWiseAdagrad", "Adam"])
@pytest.mark.parametrize("most", [0.25, 100.0], ids=["in ranges", "one by one"])
def test_any_turns_of_a_library_user(name: str, one_hot: bool, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of random lengths, with sequences, several forwards a step, and looks at the tables in between."""
    monkeypatch.setattr(copies_module, "MAX_LISTED", most)
    generator = np.random.default_rng(5)
    torch.manual_seed(0)
    plain = hotrow.EmbeddingCollection(TABLES, seed=3)
    plain_optimizer = getattr(hotrow, name)(plain, lr=0.1)
    emb = copy.deepcopy(plain)
    optimizer = getattr(hotrow, name)(emb, lr=0.1)
    copies = HotCopies(emb, optimizer, HOT_SET, device="cpu")
    for _ in range(12):
        hot = bool(generator.random() < 0.6)
        copies.fetch() if hot else copies.give_back()
        for _ in range(generator.integers(0, 3)):
            sparse, other = (random_batch(generator, hot=hot, one_hot=one_hot) for _ in range(2))
            for collection, its_optimizer in ((plain, plain_optimizer), (emb, optimizer)):
                found = collection.sequence(other)
                loss = collection(sparse).square().sum() + sum(values.cos().sum() for values, _ in found.values())
                loss.backward()
                its_optimizer.step()
        with copies.flushed():
            wanted, own = everything(plain, plain_optimizer), everything(emb, optimizer)
            assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True))
    assert copies.num_copied > 6


def copied(optimizer: Any = hotrow.SGD) -> tuple[hotrow.EmbeddingCollection, Any, HotCopies]:
    """A collection, its optimizer, and copies of its hot rows."""
    emb = hotrow.EmbeddingCollection(TABLES, seed=3)
    made = optimizer(emb, lr=0.1)
    return emb, made, HotCopies(emb, made, HOT_SET, device="cpu")


def hot_rows_of(sparse: KeyedJaggedTensor) -> set[tuple[str, int]]:
    """The hot rows that a batch names, with their tables."""
    named = {(table, row) for name, table in FEATURES.items() for row in sparse.bags(name)[0].tolist()}
    return {(table, row) for table, row in named if HOT[table].contains(np.array([row])).all()}


@pytest.mark.usefixtures("dram_as_device")
@pytest.mark.parametrize("one_hot", [True, False])
def test_only_rows_that_have_changed_cross(one_hot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sets of the rows that batches named since the last swap, by the bytes of their records with states."""
    monkeypatch.setattr(copies_module, "MAX_LISTED", 100.0)
    generator = np.random.default_rng(7)
    emb, optimizer, copies = copied(hotrow.RowWiseAdagrad)
    record_bytes = {"a": 16 + 4, "b": 12 + 4, "c": 12 + 4}
    every = {(table, row) for table in HOT for row in range(40) if HOT[table].contains(np.array([row])).all()}
    changed = every  # at first the copies have nothing
    for turn in range(9):
        hot = turn % 2 == 0
        before = copies.copies.moved_bytes
        copies.fetch() if hot else copies.give_back()
        crossed = copies.copies.moved_bytes - before
        assert crossed == sum(record_bytes[table] for table, _ in changed), f"turn {turn}"
        changed = set()
        for _ in range(generator.integers(1, 3)):
            sparse = random_batch(generator, hot=hot, one_hot=one_hot)
            with torch.no_grad():
                emb(random_batch(generator, hot=hot, one_hot=one_hot))  # changes nothing
            emb(sparse).sum().backward()
            optimizer.step()
            changed |= hot_rows_of(sparse)
            if hot and turn == 4:  # what is written back here does not cross again
                before = copies.copies.moved_bytes
                with copies.flushed():
                    pass
                assert copies.copies.moved_bytes - before == sum(record_bytes[table] for table, _ in changed)
                changed = set()
    assert 0 < crossed < sum(record_bytes[table] for table, _ in every)


class Gate:
    """Lets pieces of rows pass that cross in the background: all, or so many as it is told to."""

    def __init__(self) -> None:
        self.passed = list[str]()
        self._may_pass, self._changed = math.inf, threading.Condition()

    def let(self, pieces: float = math.inf) -> None:
        with self._changed:
            self._may_pass = pieces
            self._changed.notify_all()

    def waited_at(self, name: str) -> Callable[..., Any]:
        plain = getattr(copies_module.RowsOfOne, name)

        def moved(*arguments: Any) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: self._may_pass > 0)
                self._may_pass -= 1
            self.passed.append(name)
            return plain(*arguments)

        return moved


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """An open one; a piece is a row or two, and in runs a swap begins with several batches left."""
    gate = Gate()
    for name in ("read", "write"):
        monkeypatch.setattr(copies_module.RowsOfOne, name, gate.waited_at(name))
    monkeypatch.setattr(copies_module, "PIECE_BYTES", 40)
    monkeypatch.setattr(turns, "STEP_BYTES", 1000)
    return gate


@pytest.mark.usefixtures("dram_as_device")
@pytest.mark.parametrize("name", ["SGD", "RowWiseAdagrad", "Adam"])
@pytest.mark.parametrize("most", [0.25, 100.0], ids=["in ranges", "one by one"])
def test_swaps_that_begin_beside_steps(name: str, most: float, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches change rows of which some have crossed and some have not, up to the last step of a turn; swaps begin
    while one is under way, and anew when it is done."""
    monkeypatch.setattr(copies_module, "MAX_LISTED", most)
    generator = np.random.default_rng(6)
    plain = hotrow.EmbeddingCollection(TABLES, seed=3)
    emb = copy.deepcopy(plain)
    plain_optimizer, optimizer = (getattr(hotrow, name)(each, lr=0.1) for each in (plain, emb))
    copies = HotCopies(emb, optimizer, HOT_SET, device="cpu")
    under_way = 0

    def check() -> None:
        wanted, own = everything(plain, plain_optimizer), everything(emb, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True))

    for turn in range(16):
        hot = turn % 2 == 1
        copies.fetch() if hot else copies.give_back()
        for _ in range(generator.integers(1, 5)):
            if generator.random() < 0.6:
                gate.let(0)
                copies.begin()
            gate.let(int(generator.integers(0, 40)))
            sparse = random_batch(generator, hot=hot, one_hot=False)
            for collection, its_optimizer in ((plain, plain_optimizer), (emb, optimizer)):
                collection(sparse).square().sum().backward()
                its_optimizer.step()
            under_way += (begun := copies.copies._begun) is not None and not begun.done()
            if generator.random() < 0.7:
                gate.let()
                begun is None or begun.result()
            if generator.random() < 0.2:
                gate.let()
                with copies.flushed():
                    check()
        gate.let()
    copies.give_back()
    check()
    assert under_way > 5 and {*gate.passed} == {"read", "write"}, "steps were taken while rows crossed, both ways"


@pytest.mark.usefixtures("dram_as_device")
def test_a_swap_that_was_begun_has_less_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sets of the rows that batches named before it was begun, and after, both ways."""
    monkeypatch.setattr(copies_module, "MAX_LISTED", 100.0)
    generator = np.random.default_rng(7)
    emb, optimizer, copies = copied(hotrow.RowWiseAdagrad)
    record_bytes = {"a": 16 + 4, "b": 12 + 4, "c": 12 + 4}
    copies.fetch()
    for hot in (True, False, True, False):
        crossed = []
        for move in (copies.begin, copies.give_back if hot else copies.fetch):
            sparse = random_batch(generator, hot=hot, one_hot=False)
            before = copies.copies.moved_bytes
            emb(sparse).sum().backward()
            optimizer.step()
            move()
            if copies.copies._begun is not None:
                copies.copies._begun.result()
            crossed.append(copies.copies.moved_bytes - before)
            assert crossed[-1] == sum(record_bytes[table] for table, _ in hot_rows_of(sparse))
        assert min(crossed) > 0


def trained_copies() -> tuple[hotrow.EmbeddingCollection, HotCopies]:
    """A collection, and copies of its hot rows that a step has changed."""
    emb, optimizer, copies = copied()
    copies.fetch()
    emb(random_batch(np.random.default_rng(5), hot=True, one_hot=True)).sum().backward()
    optimizer.step()
    return emb, copies


@pytest.mark.usefixtures("dram_as_device")
def test_a_swap_that_fails_in_the_background_is_said_and_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    emb, copies = trained_copies()
    wanted = [array.clone() for array in copies.copies.arrays.tensors]

    def fail(*_: Any) -> None:
        raise MemoryError("no room for a piece")

    with monkeypatch.context() as patch:
        patch.setattr(copies_module.RowsOfOne, "write", fail)
        copies.begin()
        with pytest.raises(MemoryError, match="no room for a piece"):
            copies.give_back()
    assert copies.live
    copies.give_back()
    for table, own in zip(TABLES, wanted, strict=True):
        rows = HOT[table.name]
        there = emb.weights[table.name][np.concatenate([np.arange(rows.prefix), rows.listed])]
        assert torch.equal(there, own), table.name


@pytest.mark.slow_but("ranked")
@pytest.mark.filterwarnings("ignore:.* carries no counts")
def test_saved_and_stopped_while_rows_cross(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_dram: list[int], gate: Gate
) -> None:
    """A checkpoint after every step, and a stop at steps with a swap under way: outcomes are those without copies."""
    changes = ["checkpoint.every=1", "hot.schedule=fixed", "train.epochs=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "device_of_copies", lambda config, place: None)
        plain = trained(data, tmp_path / "plain", *changes)
    assert not gate.passed
    swaps = [line["step"] for line in plain.measurements() if line["kind"] == "swap"]
    for _ in stopped_and_resumed(data, tmp_path, monkeypatch, plain, [step - 1 for step in swaps[:2]], changes):
        pass
    assert in_dram and {*gate.passed} == {"read", "write"}


@looped("seed", range(4))
def test_rows_that_changed_are_those_that_were_noted(seed: int) -> None:
    """Against a set. All are to cross if more than a share changed, and not long before."""
    generator, num_slots = np.random.default_rng(seed), 1000
    newer, most = copies_module.Newer(num_slots), copies_module.MAX_LISTED * num_slots
    for _ in range(2):
        noted = set[int]()
        while not newer.is_all:
            slots = np.minimum(generator.zipf(1.2, size=generator.integers(1, 60)), num_slots)
            newer.note(slots)
            noted |= {*slots.tolist()} - {num_slots}
            assert newer.is_all or set(newer.slots.tolist()) == noted
            assert (bool(newer) and len(noted) <= most) or newer.is_all
        assert len(noted) > most - 60
        newer.clear()
        assert not newer and not len(newer.slots)


def changed_by(way: str, emb: hotrow.EmbeddingCollection, optimizer: Any) -> None:
    """Changes a hot row, of weights or of a state, without a plain step."""
    if way == "a tensor":
        emb.weights["a"][3] = 7.0
    elif way == "a state":
        next(iter(optimizer.state[emb.weights["a"]].values()))[3] = 7.0
    elif way == "rows":
        emb.rows("b").write(slice(3, 5), torch.full((2, 6), 7.0))
    elif way == "state_dict":
        emb.load_state_dict({name: value + 1 for name, value in emb.state_dict().items()})
    elif way == "optimizer":
        optimizer.load_state_dict(hotrow.Adagrad(hotrow.EmbeddingCollection(TABLES), lr=0.3).state_dict())
    else:
        batch = random_batch(np.random.default_rng(8), hot=False, one_hot=True)

        def closure() -> float:
            emb(batch).sum().backward()
            return 0.0

        optimizer.step(closure)


def two_sides(optimizer: Any) -> list[tuple[hotrow.EmbeddingCollection, Any]]:
    """Two equal collections, each with its optimizer."""
    collections = [hotrow.EmbeddingCollection(TABLES, seed=3) for _ in range(2)]
    return [(emb, optimizer(emb, lr=0.1)) for emb in collections]


@pytest.mark.usefixtures("dram_as_device")
@pytest.mark.parametrize("way", ["a tensor", "a state", "rows", "state_dict", "optimizer", "closure"])
def test_rows_that_were_changed_in_another_way_cross_too(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "MAX_LISTED", 100.0)
    sides = two_sides(hotrow.Adagrad)
    (plain, plain_optimizer), (emb, optimizer) = sides
    copies = HotCopies(emb, optimizer, HOT_SET, device="cpu")
    copies.fetch()
    copies.give_back()
    for turn in range(3):
        generator = np.random.default_rng(turn)
        for collection, its_optimizer in sides:
            changed_by(way, collection, its_optimizer)
        copies.fetch()
        sparse = random_batch(generator, hot=True, one_hot=True)
        for collection, its_optimizer in sides:
            collection(sparse).square().sum().backward()
            its_optimizer.step()
        copies.give_back()
        wanted, own = everything(plain, plain_optimizer), everything(emb, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True)), turn


@pytest.mark.usefixtures("dram_as_device")
def test_a_batch_that_was_looked_up_before_a_swap_and_trained_after_the_next() -> None:
    (plain, plain_optimizer), (emb, optimizer) = two_sides(hotrow.SGD)
    copies = HotCopies(emb, optimizer, HOT_SET, device="cpu")
    batch = random_batch(np.random.default_rng(5), hot=True, one_hot=True)
    losses = [emb(batch).square().sum(), plain(batch).square().sum()]
    copies.fetch()
    copies.give_back()
    for loss in losses:
        loss.backward()
    optimizer.step(), plain_optimizer.step()
    copies.fetch()
    with torch.no_grad():
        assert torch.equal(emb(batch), plain(batch))


@pytest.mark.usefixtures("dram_as_device")
def test_copies_that_are_gone_leave_the_optimizer() -> None:
    _, optimizer, copies = copied()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    del copies
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.usefixtures("dram_as_device")
def test_one_side_is_live_at_a_time() -> None:
    emb, optimizer, copies = copied()
    generator = np.random.default_rng(5)
    copies.fetch()
    cold = KeyedJaggedTensor(list(FEATURES), torch.tensor([1, 39, 3, 29, 29, 0, 0]).repeat(4)[:28])
    with pytest.raises(ValueError, match=r"'a1' looks up row 29, which is not hot, .*hot rows live on the fast"):
        emb(cold)
    for read in (
        emb.state_dict,
        optimizer.state_dict,
        lambda: emb.read_rows("a", slice(0, 2)),
        lambda: emb.float32("a"),
        lambda: copy.deepcopy(emb),
        lambda: emb.load_state_dict({}),
        lambda: hotrow.save_checkpoint(Path("never"), {"embedding": emb}),
    ):
        with pytest.raises(RuntimeError, match="hot rows are out of date, their copies on the fast device are live"):
            read()
    emb(random_batch(generator, hot=True, one_hot=True)).sum().backward()
    with pytest.raises(RuntimeError, match=r"await the optimizer: call step\(\) or zero_grad\(\) first"):
        copies.give_back()
    optimizer.step()
    copies.give_back()
    assert emb.state_dict() and not copies.live and not Path("never").exists()


@pytest.mark.usefixtures("dram_as_device")
def test_sides_change_between_forward_and_backward() -> None:
    """What was flushed meanwhile is flushed again after the step; rows of one side are never taken for the other's."""
    batch = random_batch(np.random.default_rng(5), hot=True, one_hot=True)
    plain = hotrow.EmbeddingCollection(TABLES, seed=3)
    plain(batch).sum().backward()
    (plain_optimizer := hotrow.SGD(plain, lr=0.1)).step()
    emb, optimizer, copies = copied()
    copies.fetch()
    out = emb(batch).sum()
    with copies.flushed():
        pass
    out.backward()
    optimizer.step()
    out = emb(batch).sum()
    copies.give_back()
    wanted, own = everything(plain, plain_optimizer), everything(emb, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True))
    with pytest.raises(RuntimeError, match="between this lookup's forward and its backward"):
        out.backward()
    out = emb(batch).sum()
    copies.fetch()
    with pytest.raises(RuntimeError, match="between this lookup's forward and its backward"):
        out.backward()


@pytest.mark.usefixtures("dram_as_device")
def test_copies_that_cannot_be_written_back_stay_live(monkeypatch: pytest.MonkeyPatch) -> None:
    emb, copies = trained_copies()

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(copies.copies, "save", fail)
    with pytest.raises(MemoryError):
        copies.give_back()
    assert copies.live
    with pytest.raises(RuntimeError, match="hot rows are out of date"):
        emb.state_dict()


@pytest.mark.usefixtures("dram_as_device")
def test_flushing_what_has_not_changed_copies_nothing() -> None:
    emb, _, copies = copied()
    copies.fetch()
    with torch.no_grad():
        emb(random_batch(np.random.default_rng(5), hot=True, one_hot=True))
    with pytest.raises(RuntimeError, match="stopped"), copies.flushed():
        assert not copies.live
        raise RuntimeError("stopped")
    assert copies.live, "an evaluation that failed leaves them live"
    copies.give_back()
    copies.give_back()
    assert copies.num_copied == 1, "the tables were never written"


@pytest.mark.slow_but("True-window")
@pytest.mark.filterwarnings("ignore:.* carries no counts")
@pytest.mark.parametrize(
    ("data", "schedule"), sampled([True, False], ["fae", "fixed", "window"], pairs=False), indirect=["data"]
)
def test_interrupted_at_any_step_of_a_turn(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, in_dram: list[int]
) -> None:
    """Law 3: within a turn, at its last step and its first, at the end of an epoch."""
    changes = [f"hot.schedule={schedule}"]
    whole = trained(data, tmp_path / "whole", *changes)
    swaps = [line["step"] for line in whole.measurements() if line["kind"] == "swap"]
    assert bool(swaps) == (schedule != "window")
    stops = sorted({15, *swaps[:2], *(step + 1 for step in swaps[:1])})
    for _ in stopped_and_resumed(data, tmp_path, monkeypatch, whole, stops, changes):
        pass
    assert bool(in_dram) == (schedule != "window")


@pytest.mark.slow_but("ranked")
@pytest.mark.filterwarnings("ignore:.* carries no counts")
def test_killed_after_a_swap(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_dram: list[int]) -> None:
    """Its decision was written, and the checkpoint is from before: it is decided again, and stands once."""
    changes = ["checkpoint.every=1"]
    whole = trained(data, tmp_path / "whole", *changes)
    swap = [line["step"] for line in whole.measurements() if line["kind"] == "swap"][1]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        raise_at(patch, swap, RuntimeError("killed"))
        trained(data, tmp_path / "killed", *changes)
    assert without_cost(outcome(runs.resume(tmp_path / "killed", quiet=True))) == without_cost(outcome(whole))
