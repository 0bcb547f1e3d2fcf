"""Files that stand for more than they have, kills and full disks: errors in words, and the same call ends a run."""

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from forked import COMMAND, run_forked, start_forked
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import parse_schema
from raw_rows import read

FIT = ["fit", "logs.csv", "--label", "click", "--time", "ts", "--set", "run=run", "--set", "train.epochs=2"]
CLOSED = f"import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2); {COMMAND}"
MOST_S, KEPT_BYTES = 2.0, 50 << 20
"""Processor seconds of a hostile file, and what all of them may leave in memory."""
WRITERS = {"parquet": pq.write_table, "feather": pyarrow.feather.write_feather, "orc": orc.write_table}
COLUMNS = {
    "text": lambda cell, n: pa.array([cell] * n, pa.large_string()),
    "bytes": lambda cell, n: pa.array([cell.encode()] * n, pa.large_binary()),
    "list": lambda cell, n: pa.array([[cell, "b"]] * n),
}


def memory(name: str) -> int:
    pa.default_memory_pool().release_unused()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@contextmanager
def peak_below(num_bytes: int) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < num_bytes


def read_all(path: Path, kind: str = "text") -> None:
    guess_columns(path, label="y")
    column = {"column": "user", "kind": "multi_hot"} if kind == "list" else "user"
    read(ColumnsSource(path, parse_schema({"label": "y", "categorical": [column]}, where="test")))


def test_a_text_of_2_mib_for_1000_rows_takes_no_gigabytes(tmp_path: Path) -> None:
    user = pa.DictionaryArray.from_arrays([0] * 1000, ["a" * (2 << 20)])
    options = {"store_schema": False, "dictionary_pagesize_limit": 8 << 20}
    pq.write_table(pa.table({"y": [0, 1] * 500, "user": user}), tmp_path / "x.parquet", **options)
    with peak_below(150 << 20), pytest.raises(ValueError, match=r"x\.parquet: .* has 1\.95 GiB once it is decoded"):
        read_all(tmp_path / "x.parquet")


@pytest.mark.parametrize("num_cases", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_logs_are_errors_or_read_soon_and_leave_no_memory(num_cases: int, tmp_path: Path) -> None:
    rng, path, before = random.Random(num_cases), tmp_path / "x", 0
    for case in range(num_cases):
        kind, form, width = rng.choice([*COLUMNS]), rng.choice([*WRITERS]), rng.choice([1, 50, 2000, 20_000])
        table = pa.table({"y": [0, 1] * 32, "user": COLUMNS[kind]("a" * width, 64)})
        WRITERS[form](table, path, compression="zstd")
        content, start = bytearray(path.read_bytes()), time.process_time()
        for _ in range(rng.choice([0, 1, 1, 3])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        with suppress(ValueError):
            read_all(path, kind)
        assert time.process_time() - start < MOST_S, (case, kind, form)
        before = before or (memory("VmRSS") if case == 20 else 0)  # what is loaded at first use stays
    assert memory("VmRSS") - before < KEPT_BYTES


def write_logs(folder: Path, num_rows: int = 1500, labels: tuple[int, ...] = (0, 1, 0, 0, 1)) -> None:
    rng = random.Random(num_rows)
    rows = [f"{rng.choice(labels)},{1_700_000_000 + i},u{rng.randrange(30)},i{i % 20}" for i in range(num_rows)]
    (folder / "logs.csv").write_text("\n".join(["click,ts,user,item", *rows]) + "\n")


def weights(folder: Path) -> dict[str, str]:
    found = sorted((folder / "run" / "checkpoints").rglob("*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(folder)
    done = run_forked(COMMAND, *FIT, "--no-refit")
    assert done.returncode == 0, done.stderr
    return weights(folder)


@pytest.mark.parametrize(("kills", "disks"), [(2, 1), pytest.param(60, 30, marks=pytest.mark.slow)])
def test_fit_that_is_stopped_at_any_time_ends_by_the_same_call_in_the_same_bits(
    kills: int,
    disks: int,
    tmp_path: Path,
    small_disk: tuple[Path, Callable[[int], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, start, (disk, resize) = random.Random(kills), time.monotonic(), small_disk
    resize(1 << 14)
    write_logs(tmp_path)
    write_logs(disk)
    expected, whole_s = fit(tmp_path, monkeypatch), time.monotonic() - start
    monkeypatch.chdir(disk)
    for case in range(kills + disks):
        if case < kills:
            with start_forked(COMMAND, *FIT, "--no-refit"):
                time.sleep(rng.uniform(0.1, whole_s))
        else:
            resize(rng.randrange(80, 480))
            done = run_forked(COMMAND, *FIT, "--no-refit")
            resize(1 << 14)
            assert not done.returncode or (done.returncode == 2 and "hotrow: " in done.stderr), done.stderr
        record = disk / "run" / "run.json"
        if not record.exists() or json.loads(record.read_text())["status"] != "finished":
            fit(disk, monkeypatch)
        assert weights(disk) == expected, case
        for path in sorted((disk / "run").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        (disk / "run").rmdir()


def test_a_closed_pipe_and_rows_that_make_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for labels in ((0,), (1,)):
        write_logs(tmp_path, labels=labels)
        done = run_forked(COMMAND, *FIT, "--no-refit")
        assert done.returncode == 2 and f"has rows of label {labels[0]} alone" in done.stderr, done.stderr
    write_logs(tmp_path, 10, labels=(0, 1))
    for words in ([*FIT, "--no-refit"], ["runs", "."], ["check", "run"], ["report", "run"]):
        assert run_forked(CLOSED, *words).returncode == 0, words
    assert "rows to train on are no basis for a model" in (tmp_path / "run" / "log.txt").read_text()
