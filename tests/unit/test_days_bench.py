"""The measurements of days: what they cut, train, kill and compare, against scikit-learn and against themselves."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from benchmarks import days, days_size
from benchmarks.days_chain import cut, labels_of, prepare_day, scores_of, train_day
from benchmarks.days_quality import gains, made_up, stream

pytestmark = [pytest.mark.package, pytest.mark.filterwarnings("ignore")]
RANDOM = np.random.default_rng(5)


def test_days_are_consecutive_lines(tmp_path: Path) -> None:
    lines = [f"{i % 2}\t{i}\n".encode() for i in range(20)]
    path = tmp_path / "rows.gz"
    path.write_bytes(gzip.compress(b"".join(lines)))
    files = cut(path, [7, 5], tmp_path / "days", skip=3)
    assert [file.read_bytes() for file in files] == [b"".join(lines[3:10]), b"".join(lines[10:15])]
    assert labels_of(files[1]).tolist() == [i % 2 for i in range(10, 15)]
    with pytest.raises(ValueError, match="fewer than 21 lines"):
        cut(path, [7, 5], tmp_path / "days", skip=9)


def test_gains_are_those_of_scikit_learn() -> None:
    labels = [RANDOM.integers(2, size=60).astype(float) for _ in range(3)] + [np.zeros(60)]
    online, frozen = ([[RANDOM.random(60) for _ in labels] for _ in range(2)] for _ in range(2))
    found = gains(labels, online, frozen)
    by_seed = [
        [np.mean([roc_auc_score(own, one) for own, one in zip(labels[:3], scores[:3], strict=True)]) for scores in side]
        for side in (online, frozen)
    ]
    assert found["online_auc"] == pytest.approx(100 * np.mean(by_seed[0]))
    assert found["frozen_auc"] == pytest.approx(100 * np.mean(by_seed[1]))
    difference = 100 * np.subtract(*by_seed)
    assert found["gain_se"] == pytest.approx(np.std(difference, ddof=1) / np.sqrt(2))
    every = np.concatenate(labels)
    pooled = [np.mean([roc_auc_score(every, np.concatenate(one)) for one in side]) for side in (online, frozen)]
    assert found["pooled_gain"] == pytest.approx(100 * (pooled[0] - pooled[1]))


def test_online_scores_are_those_of_the_frozen_model_until_it_has_trained_on_a_shard(tmp_path: Path) -> None:
    rows = made_up(tmp_path / "rows.tsv", 1500, 0.5)
    files = cut(rows, [900, 300, 300], tmp_path / "days")
    base = prepare_day(files[0], tmp_path / "base")
    frozen = [train_day(base, tmp_path / f"frozen-{seed}", seed).path for seed in (1, 2)]
    found = stream(frozen, files[1:], base, tmp_path / "stream")
    for seed, (run, online) in enumerate(zip(frozen, found, strict=True), 1):
        alone = np.split(scores_of(run, *files[1:]), 2)
        assert online[0].tolist() == alone[0].tolist()
        assert online[1].tolist() != alone[1].tolist()
        after = train_day(prepare_day(files[1], tmp_path / f"day-{seed}", base), tmp_path / f"after-{seed}", seed, run)
        assert online[1].tolist() == scores_of(after.path, files[2]).tolist()
    assert not (tmp_path / "stream").exists()


def test_a_measurement_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, out = tmp_path / "here", tmp_path / "results.json"
    words = ["days", "thirty", str(place), "--days", "4", "--rows", "300", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        days.main()
    assert ended.value.code == 0
    (report,) = json.loads(out.read_text())["days"].values()
    assert report["cells"][0]["days"] == 4 and 0 < report["cells"][0]["ne_daily"] < 2


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(days_size, "in_fresh_process", lambda work, *args: work(*args))


@pytest.mark.usefixtures("here")
def test_growth_writes_new_rows_and_starts_from_the_old_ones(tmp_path: Path) -> None:
    (day,) = days_size.growth(tmp_path, 300_000, 30_000, 8, "2MiB")
    assert day["loss"] > 0 and day["start_s"] > 0
    assert day["memory"]["disk_bytes"] > 0, "the table does not fit in DRAM"
    assert day["start_written_bytes"] < 4 * 8 * 300_000, "the table is not copied"


@pytest.mark.usefixtures("here")
def test_a_stream_has_the_tables_of_yambda(tmp_path: Path) -> None:
    assert sum(days_size.TABLES.values()) == 293_051_712
    cell = days_size.stream(tmp_path, 20_000, 1e-3, 64, "8MiB")
    config = days_size.yambda_shaped(20_000, 1e-3)
    assert cell["prepared"]["num_embeddings"] <= sum(table.num_embeddings + 1 for table in config.tables)
    assert cell["tiers"]["memory"]["disk_bytes"] > 0
