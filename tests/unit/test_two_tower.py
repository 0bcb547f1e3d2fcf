"""Two towers: their vectors, the places of items among all, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.config.load import load_config, make_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.export.score import Scorer
from hotrow.models.two_tower import TwoTowerSpec
from hotrow.parallel.communicator import Communicator
from hotrow.run import evaluate, runs, trainer
from hotrow.run.build import look_up
from hotrow.run.items import Items
from hotrow.setup.setup import Setup
from rank_pool import RankPool

NUM_USERS, NUM_ITEMS, NUM_GROUPS = 40, 60, 6
TRAIN = {"batch_size": 128, "epochs": 4, "threads": 1, "eval_every": 0.5, "early_stopping": 4}

pytestmark = pytest.mark.usefixtures("one_thread")


def events(num_rows: int, seed: int = 0) -> pa.Table:
    """Users who keep to items of one group; some that they were shown and left, and items of the last rows alone."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, NUM_USERS, num_rows), rng.integers(0, NUM_ITEMS, num_rows)
    taken = rng.random(num_rows) < 0.8
    item = np.where(taken, item // NUM_GROUPS * NUM_GROUPS + user % NUM_GROUPS, item)
    item = np.where((np.arange(num_rows) > 0.95 * num_rows) & (rng.random(num_rows) < 0.3), NUM_ITEMS + 1, item)
    groups = user % NUM_GROUPS
    past = [[int(groups[k] + NUM_GROUPS * each) for each in rng.integers(0, 9, k % 4)] for k in range(num_rows)]
    return pa.table({
        "user": user, "item": item, "group": item % NUM_GROUPS, "age": rng.standard_normal(num_rows),
        "label": taken.astype(int), "time": np.arange(num_rows), "item_history": pa.array(past, pa.list_(pa.int64())),
    })  # fmt: skip


SCHEMA: dict[str, Any] = {
    "label": "label",
    "time": "time",
    "dense": ["age"],
    "categorical": ["user", "item", "group", {"column": "item_history", "kind": "sequence", "table": "item"}],
    "split": {"kind": "time"},
}


def prepared(folder: Path, table: pa.Table, **changes: Any) -> PackedDataset:
    return run_prepare("frame", table, folder, schema=parse_schema(SCHEMA | changes, where="test"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return prepared(tmp_path_factory.mktemp("towers") / "data", events(6000))


def config_of(dataset: PackedDataset, run: Path, **model: Any) -> Any:
    options = {"name": "two_tower", "item": ["item", "group"], "embedding_dim": 8, "vector_dim": 16, "tower_mlp": [24]}
    optimizer = {"dense": {"name": "adam", "lr": 0.003}, "sparse": {"name": "adagrad", "lr": 0.1}}
    raw = {"data": str(dataset.path), "run": str(run), "model": options | model, "optimizer": optimizer, "train": TRAIN}
    return make_config(raw)


@pytest.fixture(scope="module")
def run(dataset: PackedDataset, tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("run") / "run"
    runs.train(config_of(dataset, folder), quiet=True)
    return hotrow.load(folder)


def test_it_finds_what_users_take(run: hotrow.Run, dataset: PackedDataset) -> None:
    """Ten items of a user's group are as likely as each other, so recall@20 is nearly 1 for items that training saw."""
    assert run.metrics["recall_20"] > 0.9 * (1 - run.metrics["unseen"]) > 0.5
    assert 0 < run.metrics["unseen"] < 0.5, "the last rows have an item of their own"
    assert run.metrics["mrr"] > 0.1
    with pytest.warns(UserWarning, match="ids that training never saw: item"):
        found = run.evaluate("test")
    assert found == {name: run.metrics[name] for name in found}
    assert run.summary()["recall_100"] == run.metrics["recall_100"]


def test_places_against_scores_of_all_pairs(run: hotrow.Run, dataset: PackedDataset) -> None:
    """Every test user is scored with every item by `predict`, from raw rows."""
    table = events(6000)
    train, test = table.slice(0, dataset.split("train").num_rows), table.slice(6000 - dataset.split("test").num_rows)
    items = sorted({*zip(train["item"].to_pylist(), train["group"].to_pylist(), strict=True)})
    seen, found = {item for item, _ in items}, []
    rows = [row for row in test.to_pylist() if row["label"]][-60:]
    for row in rows:
        pairs = [{**row, "item": item, "group": group} for item, group in items]
        scores = run.predict(pa.Table.from_pylist(pairs, schema=table.schema))
        if row["item"] not in seen:
            found.append(-1.0)
            continue
        own = scores[[item for item, _ in items].index(row["item"])]
        found.append(((scores > own).sum() + (scores >= own).sum() - 1) / 2)
    embedding, model, dense, _ = run._network
    split = dataset.split("test")
    batch = next(iter(Loader(split, split.num_rows, shuffle_seed=None)))
    with torch.no_grad():
        places = Items.of(dataset, model.item_features).places(embedding, model, dense)
        mine = places(dense.outputs(model, batch.dense, look_up(model, embedding, batch.sparse)), batch)
    mine = mine[batch.label > 0][-60:].numpy()
    assert ((mine < 0) == (np.array(found) < 0)).all() and (mine < 0).any()
    assert np.abs(mine - np.array(found)).max() <= 1, "scores that differ in the last bit may change places"
    assert np.mean(mine == np.array(found)) > 0.9


def test_many_rows_are_judged_by_some_that_lie_evenly(
    run: hotrow.Run, dataset: PackedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, labels, *_ = run.judged("val").rows()
    assert len(places) == dataset.split("val").num_rows == 600
    monkeypatch.setattr(evaluate, "MAX_JUDGED", 200)
    fewer, own, *_ = run.judged("val").rows()
    assert fewer.tolist() == places[::3].tolist() and own.tolist() == labels[::3].tolist()


def test_items_are_counted_in_training_rows(dataset: PackedDataset) -> None:
    items = Items.of(dataset, ["item", "group"])
    batch = next(iter(Loader(dataset.split("train"), 10_000, shuffle_seed=None)))
    ids = batch.sparse.bags("item")[0].numpy()
    values, counts = np.unique(ids, return_counts=True)
    assert items.ids[:, 0].tolist() == [value for value in values if value]
    share = dict(zip(values.tolist(), (counts / len(ids)).tolist(), strict=True))
    label, of_item, log_share = items.labels(batch).T
    assert torch.equal(label.float(), batch.label) and of_item.tolist() == ids.tolist()
    np.testing.assert_allclose(log_share.exp(), [share[value] for value in ids.tolist()], rtol=1e-6)
    group = dict(zip(ids.tolist(), batch.sparse.bags("group")[0].tolist(), strict=True))
    assert items.ids[:, 1].tolist() == [group[value] for value in items.ids[:, 0].tolist()]


def test_equal_scores_share_places_and_no_number_is_no_place() -> None:
    items = Items(("item",), torch.arange(1, 5)[:, None], torch.tensor([-1, 0, 1, 2, 3]), torch.zeros(5), 0)
    vectors = torch.tensor([[1.0], [2.0], [2.0], [0.0]])

    class Fixed:
        feature_names = ("item",)

        def __call__(self, sparse: Any) -> Tensor:
            return vectors[sparse.values - 1]

    class Same:
        def outputs(self, model: Any, dense: Tensor, rows: Tensor) -> Tensor:
            return torch.cat([torch.ones_like(rows), rows], dim=1)

    places = items.places(Fixed(), None, Same())  # type: ignore[arg-type]
    sparse = hotrow.KeyedJaggedTensor(["item"], torch.tensor([1, 2, 3, 4, 0, 1, 1]))
    batch = hotrow.Batch(torch.zeros(7, 0), sparse, torch.tensor([1.0, 1, 1, 1, 1, 0, 1]))
    user = torch.tensor([1.0, 1, 1, 1, 1, 1, torch.nan])
    found = places(torch.stack([user, torch.zeros(7)], dim=1), batch)
    assert found[:6].tolist() == [2, 0.5, 0.5, 3, -1, 0] and bool(found[6].isnan())


def test_the_parts_alone_are_those_of_the_whole(run: hotrow.Run, dataset: PackedDataset, tmp_path: Path) -> None:
    """Also in an export; and `predict` is their product."""
    table = events(300, seed=1)
    embedding, model, *_ = run._network
    batch = next(iter(Loader(dataset.split("train"), 300, shuffle_seed=None)))
    with torch.no_grad():
        rows = embedding(batch.sparse)
        user_BP, item_BP = model.divided(rows)
        assert (user_BP.shape, item_BP.shape) == ((300, 16), (300, 16))
        whole = model(batch.dense, rows)
        parts = torch.cat([model.user(batch.dense, user_BP), model.item(item_BP)], dim=1)
        assert torch.equal(whole, parts)
        torch.testing.assert_close(whole[:, :16].norm(dim=1), torch.full((300,), 20.0))
        torch.testing.assert_close(whole[:, 16:].norm(dim=1), torch.ones(300))
    run.export(tmp_path / "out")
    scorer = Scorer(tmp_path / "out")
    scores = scorer.score({name: table[name].to_pylist() for name in scorer.columns})
    mine = run.predict(table)
    np.testing.assert_allclose(scores, mine, rtol=1e-4, atol=1e-4)
    assert mine.std() > 1
    dense, rows = scorer.inputs({name: table[name].to_pylist() for name in scorer.columns})
    with torch.no_grad():
        user_BP, item_BP = scorer.model.divided(rows)
        users, items = scorer.model.user(dense, user_BP), scorer.model.item(item_BP)
    np.testing.assert_allclose((users @ items.T).diagonal(), mine, rtol=1e-4, atol=1e-4)


def test_a_list_counts_as_its_mean(dataset: PackedDataset, tmp_path: Path) -> None:
    parts = trainer.build(Setup.decide(config_of(dataset, tmp_path / "run"), dataset, tmp_path / "run"))
    batch = next(iter(Loader(dataset.split("train"), 50, shuffle_seed=None)))
    values, offsets, _ = batch.sparse.bags("item_history")
    at = list(parts.embedding.feature_names).index("item_history")
    pooled = parts.embedding(batch.sparse)[:, 8 * at : 8 * at + 8].detach()
    weight = parts.embedding.weights["item"]
    for k in range(50):
        own = weight[values[offsets[k] : offsets[k + 1]].long()]
        torch.testing.assert_close(pooled[k], own.mean(0) if len(own) else torch.zeros(8))


def test_micro_batches_of_whole_stretches_have_the_same_negatives(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a batch does not depend on its micro-batches, but for the order of sums, if stretches divide them."""
    monkeypatch.setattr("hotrow.objectives.sampled_softmax.SampledSoftmax.stretch", 16)
    losses = []
    for number in (1, 2, 4):
        config = config_of(dataset, tmp_path / "run").with_micro_batches(number)
        setup = Setup.decide(config, dataset, tmp_path / "run")
        parts = trainer.build(setup)
        batch = next(iter(Loader(dataset.split("train"), 64, shuffle_seed=None)))
        losses.append(float(trainer.train_step(parts, batch, 0, trainer.StepClock(trainer.Session(1)))))
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)


def trained(comm: Communicator, data: Path, folder: Path) -> dict[str, Any]:
    """The metrics of a run whose rows lie on all ranks."""
    with_it = config_of(PackedDataset.open(data), folder / f"run-{comm.size}").model_dump(mode="json")
    with_it["train"] |= {"micro_batches": 4, "epochs": 1}
    with_it["parallel"]["sharding"] = {"item": "row"}
    return dict(runs.train(make_config(with_it), quiet=True, comm=comm).record.metrics or {})


@pytest.mark.slow
def test_ranks_find_the_same_items(dataset: PackedDataset, tmp_path: Path) -> None:
    with RankPool(3) as pool:
        alone, *_ = pool.run(trained, dataset.path, tmp_path, num_ranks=1, micro_batches=4)
        together = pool.run(trained, dataset.path, tmp_path, num_ranks=3, micro_batches=4)
    assert alone["test"]["recall_20"] > 0.2
    assert all(found == alone for found in together)


def test_options_that_do_not_fit() -> None:
    for own, name in (("dlrm", "sampled_softmax"), ("two_tower", "binary_cross_entropy")):
        with pytest.raises(ValueError, match=rf"objective is {name}.*model {own}.*set it to"):
            make_config({"data": "d", "model": {"name": own, "objective": name}})
    with pytest.raises(ValueError, match="'group' twice"):
        make_config({"data": "d", "model": {"name": "two_tower", "item": ["item", "group"], "user": ["group"]}})
    with pytest.raises(ValueError, match="item"):
        make_config({"data": "d", "model": {"name": "two_tower", "item": []}})


def test_features_that_are_not_there(dataset: PackedDataset, tmp_path: Path) -> None:
    def refused(**model: Any) -> str:
        with pytest.raises(ValueError) as error:
            runs.train(config_of(dataset, tmp_path / "run", **model), quiet=True)
        assert not (tmp_path / "run").exists()
        return str(error.value)

    assert "model.item names 'movie'" in refused(item=["movie"]) and "user, item, group" in refused(item=["movie"])
    assert "model.user names 'age'" in refused(user=["age"])
    assert "'item_history', a list" in refused(item=["item", "item_history"])
    assert "model.item has all" in refused(item=["user", "group", "item", "item_history"])[:200]


def test_inputs_of_the_user_that_are_made_of_the_item(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "data", events(400), statistics=["user", ["user", "item"]])
    with pytest.raises(ValueError, match=r"statistics of 'item'.*model\.dense_inputs to none"):
        runs.train(config_of(dataset, tmp_path / "run"), quiet=True)
    without = config_of(dataset, tmp_path / "run", dense_inputs="none")
    parts = trainer.build(Setup.decide(without, dataset, tmp_path / "run"))
    rows = torch.randn(5, 32)
    assert torch.equal(parts.model(torch.randn(5, 7), rows), parts.model(torch.randn(5, 7), rows))


def test_raw_rows_cannot_be_judged(run: hotrow.Run) -> None:
    with pytest.raises(ValueError, match="--data FOLDER"):
        run.evaluate_rows(events(50))


def test_validation_rows_by_which_nothing_is_known(tmp_path: Path) -> None:
    """Rows without label 1 have no metric at all; rows of items that training did not have lack the loss alone."""
    table, is_late = events(600), np.arange(600) >= 480
    for column, late in (("label", 0), ("item", NUM_ITEMS + 2)):
        values = pa.array(np.where(is_late, late, table[column].to_numpy()))
        changed = table.set_column(table.schema.get_field_index(column), column, values)
        config = config_of(prepared(tmp_path / column / "data", changed), tmp_path / column / "run")
        if column == "label":
            with pytest.raises(ValueError, match=r"no R@100: .*early_stopping needs it: set it to null, or split"):
                runs.train(config, quiet=True)
        else:
            record = runs.train(config, quiet=True).record
            assert (record.metrics or {})["val"]["recall_100"] == 0
            assert "no sampled softmax loss" in record.warnings["no_validation_loss"]["text"]


def test_training_rows_without_an_item(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "data", events(200), tables={"default": {"min_count": 10_000}})
    with pytest.raises(ValueError, match=r"no training row has an id of 'item'"):
        runs.train(config_of(dataset, tmp_path / "run"), quiet=True)


def test_fit_needs_the_name_alone(tmp_path: Path) -> None:
    table = events(1500).drop_columns(["item_history"])
    run = hotrow.fit(table, label="label", time="time", model="two_tower", run=tmp_path / "run", quiet=True,
                     dense_inputs="none", threads=1, epochs=1, categorical=["user", "item", "group"])  # fmt: skip
    assert run.record.objective == "sampled_softmax" and run.metrics["recall_100"] > 0.5
    spec = load_config(run.path / "config.yaml").model
    assert isinstance(spec, TwoTowerSpec) and spec.item == ["item"]
