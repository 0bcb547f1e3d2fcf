"""Files that stand for more than they have, kills and full disks: errors in words, and the same call ends a run."""

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from forked import COMMAND, run_forked, start_forked
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from raw_rows import read

FIT = ["fit", "logs.csv", "--label=click", "--time=ts", "--set=run=run", "--set=train.epochs=2", "--no-refit"]
CLOSED = f"import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2); {COMMAND}"
WRITERS: list[Any] = [pq.write_table, pyarrow.feather.write_feather, orc.write_table]


def memory(name: str) -> int:
    pa.default_memory_pool().release_unused()
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


@contextmanager
def peak_below(num_bytes: int) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < num_bytes


def read_all(path: Path) -> None:
    read(ColumnsSource(path, guess_columns(path, label="y").schema()))


def test_a_text_of_2_mib_for_1000_rows_takes_no_gigabytes(tmp_path: Path) -> None:
    table = pa.table({"y": [0, 1] * 500, "user": pa.DictionaryArray.from_arrays([0] * 1000, ["a" * (2 << 20)])})
    pq.write_table(table, tmp_path / "x.parquet", store_schema=False, dictionary_pagesize_limit=8 << 20)
    with peak_below(150 << 20), pytest.raises(ValueError, match=r"x\.parquet: .* has 1\.95 GiB once it is decoded"):
        read_all(tmp_path / "x.parquet")


@pytest.mark.parametrize("num_cases", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_logs_are_errors_or_read_soon_and_leave_no_memory(num_cases: int, tmp_path: Path) -> None:
    rng, path, before = random.Random(num_cases), tmp_path / "x", 0
    for case in range(num_cases):
        text = "a" * rng.choice([1, 50, 2000, 20_000])
        user = pa.array([rng.choice([text, [text, "b"]])] * 64)
        rng.choice(WRITERS)(pa.table({"y": [0, 1] * 32, "user": user}), path, compression="zstd")
        content, start = bytearray(path.read_bytes()), time.process_time()
        for _ in range(rng.choice([0, 1, 1, 3])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        with suppress(ValueError):
            read_all(path)
        assert time.process_time() - start < 2.0, case
        before = before or (memory("VmRSS") if case == 20 else 0)  # what is loaded at first use stays
    assert memory("VmRSS") - before < 50 << 20


def write_logs(folder: Path, num_rows: int, labels: tuple[int, ...]) -> None:
    rows = [f"{labels[i * 7 % 11 % len(labels)]},{i},u{i * 13 % 30},i{i % 20}" for i in range(num_rows)]
    (folder / "logs.csv").write_text("\n".join(["click,ts,user,item", *rows]) + "\n")


def weights(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted((folder / "run/checkpoints").rglob("*.safetensors"))}


@pytest.mark.parametrize(("kills", "disks"), [(2, 1), pytest.param(60, 30, marks=pytest.mark.slow)])
def test_a_stopped_fit(kills: int, disks: int, small_disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, (disk, resize), start = random.Random(kills), small_disk, time.monotonic()
    resize(1 << 14)
    write_logs(disk, 1500, (0, 1, 0))
    monkeypatch.chdir(disk)
    assert run_forked(COMMAND, *FIT).returncode == 0
    expected, whole_s = weights(disk), time.monotonic() - start
    for case in range(kills + disks):
        shutil.rmtree("run", ignore_errors=True)
        if case < kills:
            with start_forked(COMMAND, *FIT):
                time.sleep(rng.uniform(0.1, whole_s))
        else:
            resize(rng.randrange(80, 480))
            done = run_forked(COMMAND, *FIT)
            assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
            resize(1 << 14)
        done = run_forked(COMMAND, *FIT)
        assert done.returncode == 0 or "is never overwritten" in done.stderr, done.stderr
        assert expected and weights(disk) == expected, case


def test_a_closed_pipe_and_rows_that_make_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path, 50, (1,))
    done = run_forked(COMMAND, *FIT)
    assert done.returncode == 2 and "has rows of label 1 alone" in done.stderr, done.stderr
    write_logs(tmp_path, 50, (0, 1))
    for words in (FIT, ["runs", "."], ["check", "run"], ["report", "run"]):
        assert run_forked(CLOSED, *words).returncode == 0, words
    assert "rows to train on are no basis for a model" in (tmp_path / "run" / "log.txt").read_text()
