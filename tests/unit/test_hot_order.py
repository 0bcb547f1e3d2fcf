"""hot.order: every sample once per epoch in batches of one class, turns of the size the rate says, and the rate itself
against the published rule played out by hand."""

import json
import math
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from hotrow.batch import Batch
from hotrow.config.schema import HotConfig
from hotrow.data.packed.reader import Split
from hotrow.hot import order as hot_order
from hotrow.hot.order import BatchOrder, Rate, Turn, batch_order
from loops import looped
from packed_data import make_rows, write_dataset

NUM_ROWS, BATCH = 517, 10


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_dataset(tmp_path_factory.mktemp("packed") / "data", make_rows(NUM_ROWS, lists=True)).split("train")


def mark(share: float) -> np.ndarray:
    return np.random.default_rng(3).random(NUM_ROWS) < share


def order_of(split: Split, is_hot: np.ndarray | None, seed: int | None = 4, **hot: object) -> BatchOrder:
    return batch_order(HotConfig.model_validate(hot), split, is_hot, batch_size=BATCH, shuffle_seed=seed)


def turns(order: BatchOrder, epoch: int, losses: list[float] | None = None) -> list[tuple[str, list[list[int]]]]:
    """(class, rows of each batch) of every turn of an epoch; losses: what the rate hears, one a turn."""
    found, left = [], order.num_batches
    while left:
        name, rows = order.turn.name, []
        for batch in order.batches(epoch):
            rows.append(numbers(batch))
            order.count()
        left -= len(rows)
        found.append((name, rows))
        order.end_turn(losses.pop(0) if losses else None)
    return found


def numbers(batch: Batch) -> list[int]:
    return batch.sparse.bags("row")[0].tolist()


@looped("share", [0.0, 0.02, 0.5, 1.0])
@looped("schedule", ["fixed", "fae", "window", "none"])
def test_every_sample_once_per_epoch_in_batches_of_one_class(split: Split, schedule: str, share: float) -> None:
    is_hot = mark(share)
    order = order_of(split, None if schedule == "none" else is_hot, schedule=schedule, rate=30)
    seen = []
    for epoch in (0, 1):
        percent = order.turn.rate.percent
        found = turns(order, epoch, [0.5, 0.4, 0.45] if schedule == "fae" else None)
        rows = [row for _, batches in found for batch in batches for row in batch]
        assert Counter(rows) == Counter(range(NUM_ROWS))
        seen.append(rows)
        for name, batches in found:
            kinds = {bool(is_hot[row]) for batch in batches for row in batch}
            assert name == "all" or kinds == {name == "hot"}
        if schedule in ("fixed", "fae") and 0 < share < 1:
            assert found[0][0] == "cold"
            num_cold = -(-int((~is_hot).sum()) // BATCH)
            assert len(found[0][1]) == math.ceil(num_cold * percent / 100)
    assert seen[0] != seen[1], "each epoch has an order of its own"


@looped("share", [0.02, 0.3, 0.5])
def test_classes_share_one_window(split: Split, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Together they hold as many rows as one class alone would, and each mixes rows of as long a stretch."""
    monkeypatch.setattr(hot_order, "WINDOW_ROWS", 200)
    order = order_of(split, mark(share), schedule="fixed", rate=20)
    windows = {name: loader.window_rows for name, loader in order.loaders.items()}
    assert 200 <= sum(windows.values()) < 200 + len(windows)
    for name, loader in order.loaders.items():
        assert 200 / NUM_ROWS <= windows[name] / loader.num_rows < (200 + NUM_ROWS / loader.num_rows) / NUM_ROWS
    rows = [row for _, batches in turns(order, 0) for batch in batches for row in batch]
    assert Counter(rows) == Counter(range(NUM_ROWS))


def test_a_fixed_rate_takes_so_many_percent_of_each_class_in_turn(split: Split) -> None:
    found = turns(order_of(split, mark(0.5), schedule="fixed", rate=25), 0)
    assert [name for name, _ in found] == ["cold", "hot"] * 4
    assert [name for name, _ in turns(order_of(split, mark(0.5), schedule="fixed", rate=100), 0)] == ["cold", "hot"]


def test_the_last_class_with_batches_goes_to_its_end(split: Split) -> None:
    """The rate rises while cold batches are ahead: hot ones are left over, and nothing is left to swap with."""
    order = order_of(split, mark(0.5), schedule="fae", rate=50)
    found = turns(order, 0, [0.5, 0.6])  # 50 % cold, 50 % hot, then a rise: 25 % cold, 25 % hot, ...
    assert [name for name, _ in found] == ["cold", "hot", "cold", "hot", "cold", "hot"]
    order = order_of(split, mark(0.5), schedule="fae", rate=50)
    found = turns(order, 0, [0.5, 0.4, 0.6])  # all cold ones are through when the rate is halved
    assert [name for name, _ in found] == ["cold", "hot", "cold", "hot"]


@looped("seed", [None, 4])
def test_window_keeps_the_order_of_samples_within_its_batches(split: Split, seed: int | None) -> None:
    is_hot = mark(0.6)
    plain = [row for _, batches in turns(order_of(split, None, seed), 0) for batch in batches for row in batch]
    order = order_of(split, is_hot, seed, schedule="window", window=4)
    ((_, batches),) = turns(order, 0)
    rows = [row for batch in batches for row in batch]
    pure = 0
    for start in range(0, NUM_ROWS, 4 * BATCH):
        group, own = plain[start : start + 4 * BATCH], rows[start : start + 4 * BATCH]
        assert sorted(own) == sorted(group)
        kinds = [all(is_hot[row] for row in batch) for batch in batches[start // BATCH : start // BATCH + 4]]
        assert sum(kinds) >= sum(bool(is_hot[row]) for row in group) // BATCH
        pure += sum(kinds)
    assert pure > 15, "a shuffled batch would hardly ever be hot"


def test_the_rate_by_the_published_rule() -> None:
    """Halved on a rise or a standstill, never below 1; doubled after four falls running, never above 100."""
    rate, seen = Rate(50), []
    for loss in (0.50, 0.49, 0.48, 0.47, 0.46, 0.45, 0.44, 0.43, 0.42, 0.43, 0.42, 0.42):
        rate = rate.after(loss)
        seen.append(rate.percent)
    assert seen == [50, 50, 50, 50, 100, 100, 100, 100, 100, 50, 50, 25]
    for _ in range(9):
        rate = rate.after(1.0)
    assert rate.percent == 1
    for loss in (0.9, 0.8, 0.7, float("nan"), 0.6):
        rate = rate.after(loss)
    assert rate.percent == 1 and rate.loss == 0.6


def test_resumed_at_any_batch_it_goes_on_alike(split: Split) -> None:
    is_hot, losses = mark(0.5), [0.5, 0.6, 0.4, 0.3, 0.2, 0.1, 0.3, 0.2]

    def play(stop: int | None) -> list[object]:
        order = order_of(split, is_hot, schedule="fae", rate=20)
        heard, log, epoch, left, done = list(losses), [], 0, order.num_batches, 0
        while epoch < 2:
            broken = False
            for batch in order.batches(epoch):
                log.append((order.turn.name, numbers(batch)))
                order.count()
                left, done = left - 1, done + 1
                if done == stop:
                    broken = True
                    break
            if broken:  # also at the very end of a turn, before what ends it
                saved = TypeAdapter(Turn).validate_json(json.dumps(asdict(order.state())))
                order = order_of(split, is_hot, schedule="fae", rate=20)
                order.restore(saved)
                continue
            log.append(("loss", heard[0] if heard else None))
            order.end_turn(heard.pop(0) if heard else None)
            if not left:
                epoch, left = epoch + 1, order.num_batches
        return log

    whole = play(None)
    for stop in range(1, 106, 8):
        assert play(stop) == whole, stop


def test_an_order_of_other_data_is_refused(split: Split) -> None:
    saved = order_of(split, mark(0.5), schedule="fixed").state()
    with pytest.raises(ValueError, match="it is of other data, another batch size or another hot set"):
        order_of(split, None).restore(saved)
    with pytest.raises(ValueError, match="it is of other data"):
        order_of(split, mark(0.5), schedule="fixed").restore(replace(saved, taken={"cold": 99, "hot": 0}))
