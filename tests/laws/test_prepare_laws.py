"""What may not move a byte of a prepared dataset: threads, chunks, memory, interruptions; law 6: other splits' rows.

Every test compares hashes of all files with those of one plain run.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare import pipeline, rows
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.prepare.spill import CounterPool
from hotrow.data.sources.registry import OpenedSource, open_source
from prepare_data import SCHEMA, file_hashes, make_rows, plan_of, to_table, write_parquet

SIZES: dict[str, Any] = {"rows_per_block": 128, "rows_per_part": 256}


def opened(data: Any, split: str) -> OpenedSource:
    return open_source("parquet", data, schema=SCHEMA).with_options(split=split)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("logs"), make_rows())


@pytest.fixture(scope="module", params=["time", "random"])
def plain(
    request: pytest.FixtureRequest, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str]]:
    """A split, and the hashes of a run in one piece."""
    out = tmp_path_factory.mktemp("plain") / "out"
    dataset = prepare(opened(logs, request.param), out, Options(**SIZES))
    assert [dataset.split(s).num_rows > 0 for s in ("train", "val", "test")] == [True] * 3
    assert len(dataset.info.splits["train"].parts) > 5, "several parts, or interruptions between them prove nothing"
    return request.param, file_hashes(out)


@pytest.mark.slow_but(
    "time-{'threads': 1}",
    "random-{'threads': 2}",
    "time-{'rows_per_chunk': 61}",
    "random-{'rows_per_chunk': 300}",
    "random-{'rows_per_chunk': 1000}",
)
@pytest.mark.parametrize(
    "options",
    [{"threads": 1}, {"threads": 2}, {"rows_per_chunk": 1000}, {"rows_per_chunk": 61}, {"rows_per_chunk": 300}],
    ids=str,
)
def test_ways_to_run_move_nothing(plain: tuple[str, dict[str, str]], logs: Path, tmp_path: Path, options: dict) -> None:
    split, want = plain
    prepare(opened(logs, split), tmp_path / "out", Options(**SIZES, **options))
    assert file_hashes(tmp_path / "out") == want


def test_chunks_move_no_byte_of_a_file_that_ends_in_a_bad_line(tmp_path: Path) -> None:
    """The bad line comes after a whole chunk or within one; the first rows of test and val are in one chunk or two."""
    write_criteo(tmp_path / "clicks.txt", criteo_kaggle(700, scale=0.001))
    with (tmp_path / "clicks.txt").open("ab") as file:
        file.write(b"bad\n")
    hashes = []
    for rows_per_chunk in (700, 50, 64):
        data = open_source("criteo", tmp_path / "clicks.txt", skip_bad_rows=1)
        dataset = prepare(data, tmp_path / f"{rows_per_chunk}", Options(**SIZES, rows_per_chunk=rows_per_chunk))
        assert dataset.info.summary.items() >= {"rows_read": 700, "rows_skipped": 1}.items()
        hashes.append(file_hashes(tmp_path / f"{rows_per_chunk}"))
    assert hashes[0] == hashes[1] == hashes[2]


def test_memory_moves_no_byte(
    plain: tuple[str, dict[str, str]], logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters that spill at every chunk, vocabularies too large for memory."""
    split, want = plain
    monkeypatch.setattr(pipeline, "MIN_MEMORY_BYTES", 0)
    spills: list[int] = []
    stages: list[str] = []
    close, drawn = CounterPool.close, pipeline.Stages._drawn
    monkeypatch.setattr(CounterPool, "close", lambda pool: (spills.append(pool.num_spills), close(pool))[1])
    monkeypatch.setattr(
        pipeline.Stages, "_drawn", lambda own, stage, *given: (stages.append(stage), drawn(own, stage, *given))[1]
    )
    prepare(opened(logs, split), tmp_path / "out", Options(**SIZES, memory_bytes=24_000, rows_per_chunk=200))
    assert spills[0] > 5 and stages.count("match") > 1, "the budget was small enough to matter"
    assert file_hashes(tmp_path / "out") == want


class StopAfter:
    """Sets the pipeline's stop event once `count` chunks were read in a stage; parts of rows are small."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str, count: int) -> None:
        self.left = count
        drawn, ingest = pipeline.Stages._drawn, pipeline.ingest
        monkeypatch.setattr(rows, "ROWS_PER_PART", 250)

        def seen(stages: Any) -> None:
            self.left -= 1
            if self.left == 0:
                stages._stop.set()

        def stopping(stages: Any, begun: str, *given: Any) -> Iterator[Any]:
            for piece in drawn(stages, begun, *given):
                yield piece
                if begun == stage:
                    seen(stages)

        def reading(*given: Any, check_stop: Any, **named: Any) -> Any:
            def checked() -> None:
                seen(check_stop.__self__)
                check_stop()

            return ingest(*given, check_stop=checked if stage == "read" else check_stop, **named)

        monkeypatch.setattr(pipeline.Stages, "_drawn", stopping)
        monkeypatch.setattr(pipeline, "ingest", reading)


@pytest.mark.slow_but(
    "random-7-read", "random-1-count", "random-20-encode", "time-1-read", "time-7-count", "time-20-encode"
)
@pytest.mark.parametrize("stage", ["read", "count", "encode"])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_stopped_and_continued_moves_no_byte(
    plain: tuple[str, dict[str, str]], logs: Path, tmp_path: Path, stage: str, count: int
) -> None:
    split, want = plain
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        StopAfter(monkeypatch, stage, count)
        with pytest.raises(Interrupted):
            prepare(opened(logs, split), out, Options(**SIZES, rows_per_chunk=100))
    lines: list[str] = []
    prepare(opened(logs, split), out, Options(**SIZES, rows_per_chunk=77), announce=lines.append)
    assert any("continuing" in line for line in lines)
    assert file_hashes(out) == want


def test_stopped_many_times_moves_no_byte(plain: tuple[str, dict[str, str]], logs: Path, tmp_path: Path) -> None:
    split, want = plain
    out, stops = tmp_path / "out", 0
    for rows_per_chunk in (150, 110, 210, 130, 170, 190, 230, 250):
        with pytest.MonkeyPatch.context() as monkeypatch:
            StopAfter(monkeypatch, "read", 9)
            StopAfter(monkeypatch, "encode", 9)
            try:
                prepare(opened(logs, split), out, Options(**SIZES, rows_per_chunk=rows_per_chunk))
                break
            except Interrupted:
                stops += 1
    else:
        prepare(opened(logs, split), out, Options(**SIZES))
    assert stops >= 4
    assert file_hashes(out) == want


def others_changed(own: dict[str, list[Any]], is_train: np.ndarray) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """The same training rows with the other rows permuted, and with the other rows' contents replaced."""
    rng = np.random.default_rng(9)
    others = np.flatnonzero(~is_train)
    order = np.arange(len(is_train))
    order[others] = rng.permutation(others)
    fixed = {"ts"}
    yield "permuted", {n: c if n in fixed else [c[i] for i in order] for n, c in own.items()}
    strange = make_rows(len(is_train), seed=99)
    strange["user"] = [f"new{i}" for i in range(len(is_train))]
    strange["raw"] = [1e30] * len(is_train)
    yield (
        "replaced",
        {
            n: c if n in fixed else [c[i] if is_train[i] else strange[n][i] for i in range(len(c))]
            for n, c in own.items()
        },
    )


@pytest.mark.parametrize("split", ["time", "random"])
def test_law_6_other_rows_move_no_training_byte(tmp_path: Path, split: str) -> None:
    own = make_rows()
    dataset = prepare(opened(to_table(own), split), tmp_path / "plain", Options(**SIZES))
    plan = plan_of(dataset.info.ids["split"])
    is_train = plan.assign(np.arange(len(own["ts"])), np.array(own["ts"])) == 0
    kept = [file_hashes(tmp_path / "plain", below=name) for name in ("train", "vocab", "counts")]
    assert all(kept)
    for name, changed in others_changed(own, is_train):
        prepare(opened(to_table(changed), split), tmp_path / name, Options(**SIZES))
        assert [file_hashes(tmp_path / name, below=part) for part in ("train", "vocab", "counts")] == kept
        assert file_hashes(tmp_path / name, below="test") != file_hashes(tmp_path / "plain", below="test")
        again = PackedDataset.open(tmp_path / name).info
        assert (again.dense, again.tables) == (dataset.info.dense, dataset.info.tables)


def test_threads_are_gone_when_it_ends(logs: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    prepare(opened(logs, "random"), tmp_path / "out", Options(**SIZES))
    assert threading.active_count() == before
