"""`hotrow fit` that a kill, a full disk or a closed pipe stops: the same call ends it, in the same bits."""

import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import COMMAND, run_forked, start_forked

FIT = ("fit", "logs.csv", "--label", "click", "--time", "ts", "--set", "run=run", "--set", "train.epochs=2")
CLOSED = f"import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2); {COMMAND}"
"""The command with a pipe that nobody reads for its standard output and error."""


def write_logs(folder: Path, num_rows: int = 1500, label: Callable[[int], int] = lambda i: i * 7 % 11 % 2) -> None:
    rng = random.Random(num_rows)
    lines = [f"{label(i)},{1_700_000_000 + i},u{rng.randrange(30)},i{rng.randrange(20)}" for i in range(num_rows)]
    (folder / "logs.csv").write_text("\n".join(["click,ts,user,item", *lines]) + "\n")


def weights(folder: Path) -> dict[str, str]:
    found = sorted((folder / "run" / "checkpoints").rglob("*.safetensors"))
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def is_finished(folder: Path) -> bool:
    record = folder / "run" / "run.json"
    return record.exists() and json.loads(record.read_text())["status"] == "finished"


def fit_again(expected: dict[str, str], folder: Path) -> None:
    done = run_forked(COMMAND, *FIT)
    assert done.returncode == 0, done.stderr
    assert weights(folder) == expected


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], float, Path]:
    """The weights of a run that nothing stops, how long it takes, and a folder with the same rows for others."""
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        write_logs(tmp_path / name)
    monkeypatch.chdir(tmp_path / "whole")
    start = time.monotonic()
    assert run_forked(COMMAND, *FIT).returncode == 0
    monkeypatch.chdir(tmp_path / "stopped")
    found = weights(tmp_path / "whole")
    assert found
    return found, time.monotonic() - start, tmp_path / "stopped"


@pytest.mark.parametrize("num_kills", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_any_time(made: tuple[dict[str, str], float, Path], num_kills: int) -> None:
    (expected, whole_s, folder), rng = made, random.Random(num_kills)
    for kill in range(num_kills):
        with start_forked(COMMAND, *FIT):
            time.sleep(rng.uniform(0.1, whole_s))
        if kill % 3 == 2 or kill == num_kills - 1 or is_finished(folder):  # some are killed again and again
            if not is_finished(folder):
                fit_again(expected, folder)
            assert weights(folder) == expected, kill
            (folder / "run").rename(folder / f"run-{kill}")


@pytest.mark.parametrize("num_disks", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_full_disk(
    made: tuple[dict[str, str], float, Path],
    num_disks: int,
    small_disk: tuple[Path, Callable[[int], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (expected, *_), (folder, resize) = made, small_disk
    resize(1 << 14)
    write_logs(folder)
    monkeypatch.chdir(folder)
    for disk in range(num_disks):
        resize(80 + (disk + 1) * 400 // num_disks)
        stopped = run_forked(COMMAND, *FIT)
        if stopped.returncode:
            last = stopped.stderr.strip().splitlines()[-1]
            assert stopped.returncode == 2 and last.startswith("hotrow: "), stopped.stderr
            assert "free" in last or "space" in last or "full" in last, last
        resize(1 << 14)
        if stopped.returncode:
            fit_again(expected, folder)
        for path in sorted((folder / "run").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        (folder / "run").rmdir()


def test_a_closed_pipe_ends_the_printing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_logs(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in ([*FIT, "--no-refit"], ["runs", "."], ["check", "run"], ["report", "run"], ["doctor"], ["--help"]):
        assert run_forked(CLOSED, *words).returncode == 0, words
    assert weights(tmp_path) and (tmp_path / "run" / "report.html").exists()


def test_rows_that_make_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in (0, 1):
        write_logs(tmp_path, label=lambda _, kind=kind: kind)
        done = run_forked(COMMAND, *FIT)
        assert done.returncode == 2 and f"label 'click' is {kind} in all 1,200 rows to train on" in done.stderr
    write_logs(tmp_path, 10, label=lambda i: i % 2)
    assert "9 rows to train on are no basis for a model" in run_forked(COMMAND, *FIT).stderr
