"""Hot rows that a run learns: what they are beside counts by hand, and laws 2 and 3 with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_hot_placement import stopped_and_resumed, trained, without_cost
from test_resume import outcome

from hotrow.batch import Batch
from hotrow.config.load import make_config
from hotrow.config.schema import HotConfig
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.learner import whole_batches
from hotrow.hot.turns import Turns

RECORD = {f"t{t}": 36 for t in range(3)}
TRACKED = "hot.rows=tracked"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> Path:
    return make_dataset(tmp_path_factory.mktemp("learning") / "data").path


def counted(batches: list[Batch], dataset: PackedDataset) -> Counter[tuple[str, int]]:
    """Accesses by hand, of (table, row)."""
    found: Counter[tuple[str, int]] = Counter()
    for batch in batches:
        for feature in dataset.info.features:
            found.update((feature.table, row) for row in batch.sparse.values[batch.sparse.span(feature.name)].tolist())
    return found


def samples(batches: list[Batch]) -> list[bytes]:
    """What tells samples apart: their dense inputs."""
    return sorted(row.tobytes() for batch in batches for row in batch.dense.numpy())


@pytest.mark.parametrize(("schedule", "end"), [("fae", 0), ("fixed", 0.2), ("window", 0)])
def test_every_epoch_goes_by_what_was_used_before(data: Path, schedule: str, end: float) -> None:
    dataset = PackedDataset.open(data)
    sizes = {"budget": 36 * 150, "small_table": 0, "rate": 40, "shuffled_end": end}
    config = HotConfig.model_validate({"schedule": schedule, "rows": "tracked", **sizes})
    turns = Turns(config, dataset, RECORD, batch_size=37, shuffle_seed=1, seed=0)
    everything = samples([*turns.order.batches(0)])
    turns = Turns(config, dataset, RECORD, batch_size=37, shuffle_seed=1, seed=0)
    for epoch in range(3):
        hot = None if turns.found is None else {(t, r) for t, o in turns.found.rows.rows.items() for r in rows_of(o)}
        assert (hot is None) == (epoch == 0)
        batches: list[Batch] = []
        while len(batches) < turns.order.num_batches:
            name = turns.order.turn.name
            assert (name == "all") == (hot is None or schedule == "window")
            for batch in turns.batches(epoch):
                turns.count(batch)
                batches.append(batch)
                assert name != "hot" or (len(batch) == 37 and counted([batch], dataset).keys() <= hot)  # type: ignore[operator]
            turns.end(lambda: 0.5)
            learned = turns.learn()
            assert (learned is not None) == (len(batches) == turns.order.num_batches)
        assert samples(batches) == everything and len(batches) == -(-len(everything) // 37)
        assert learned is not None and turns.found is not None
        own = counted(batches, dataset)
        found = sum(own[t, r] for t, rows in turns.found.rows.rows.items() for r in rows_of(rows))
        best = sum(number for _, number in own.most_common(learned["hot_rows"]))
        assert 140 < learned["hot_rows"] <= 150 and found > 0.95 * best


def rows_of(own: Any) -> list[int]:
    return [*range(own.prefix), *own.listed.tolist()]


def test_hot_samples_beyond_whole_batches_are_trained_with_the_cold() -> None:
    is_hot = np.array([True, False, True, True, False, True, True])
    assert whole_batches(is_hot, 2).tolist() == [True, False, True, True, False, True, False]
    assert not whole_batches(is_hot, 6).any()


@pytest.mark.parametrize("schedule", ["fae", "window"])
def test_interrupted_at_any_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Law 3: while the first hot rows are learned, at the end of an epoch, and within and after the next."""
    turns = ["hot.link=1GB", "hot.shuffled_end=0.2"] if schedule == "fae" else []
    changes = [TRACKED, f"hot.schedule={schedule}", *turns]
    whole = trained(data, tmp_path / "whole", *changes)
    assert [line["step"] for line in whole.measurements() if line["kind"] == "hot"] == [14, 28]
    assert whole.record.steps == 3 * 14, "as many as in shuffled order"
    for run in stopped_and_resumed(data, tmp_path, monkeypatch, whole, (5, 14, 15, 27, 28, 33), changes):
        if schedule == "fae":
            assert run.record.hot["link"]["hybrid_bytes"] == whole.record.hot["link"]["hybrid_bytes"]


def test_copies_of_learned_rows_are_invisible(data: Path, tmp_path: Path) -> None:
    """Law 2, with other copies in each epoch."""
    plain = trained(data, tmp_path / "plain", TRACKED)
    copied = trained(data, tmp_path / "copied", TRACKED, "hot.link=1GB")
    assert without_cost(outcome(copied)) == without_cost(outcome(plain))
    link = copied.record.hot["link"]
    assert link["hot_batches"] > 4 and link["num_swaps"] > 4
    assert copied.record.warnings == plain.record.warnings == {}, "no counts are needed"


def test_an_epoch_alone_learns_for_nobody(data: Path) -> None:
    raw = {"data": str(data), "hot": {"schedule": "fae", "rows": "tracked"}}
    with pytest.raises(ValueError, match=r"hot\.rows is tracked, .* but train\.epochs is 1: raise it, or"):
        make_config(raw)
    assert make_config({**raw, "hot": {"schedule": "none", "rows": "tracked"}}).hot.rows == "tracked"


def test_an_end_of_less_than_a_batch_is_refused(data: Path) -> None:
    config = HotConfig.model_validate({"schedule": "fixed", "rows": "tracked", "shuffled_end": 0.01})
    with pytest.raises(ValueError, match=r"hot\.shuffled_end is 0\.01: of [\d,]+ training samples .* one batch of 37"):
        Turns(config, PackedDataset.open(data), RECORD, batch_size=37, shuffle_seed=1, seed=0)
