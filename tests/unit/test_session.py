"""Threads of a session: their number, and that all is as before afterwards; how it is gone on with."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forked import run_forked
from hotrow.api import Run
from hotrow.base import progress
from hotrow.base.machine import _cgroup_quota, default_threads, usable_cores
from hotrow.base.progress import Progress, ProgressMeter, TimeLeft
from hotrow.base.records import write_sealed
from hotrow.base.waiting import VARIABLES, wait_passively
from hotrow.kernels import ops
from hotrow.run.folder import RunFolder, _new_folder, resume_command
from hotrow.run.said import describe_threads


def test_cpu_quotas_of_both_versions_and_of_parents(tmp_path: Path) -> None:
    member = tmp_path / "member"

    def group(folder: Path, **files: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"cpu.{name}").write_text(text + "\n")

    member.write_text("0::/slice/job\n")
    group(tmp_path / "v2" / "slice" / "job", max="max 100000")
    assert _cgroup_quota(tmp_path / "v2", member) is None
    group(tmp_path / "v2" / "slice", max="250000 100000")
    assert _cgroup_quota(tmp_path / "v2", member) == 2.5
    group(tmp_path / "v2" / "slice" / "job", max="50000 100000")
    assert _cgroup_quota(tmp_path / "v2", member) == 0.5
    member.write_text("3:memory:/x\n2:cpu,cpuacct:/docker/absent/here\n0::/\n")
    group(tmp_path / "v1" / "cpu" / "docker", cfs_quota_us="300000", cfs_period_us="100000")
    group(tmp_path / "v1" / "cpu", cfs_quota_us="-1", cfs_period_us="100000")
    assert _cgroup_quota(tmp_path / "v1", member) == 3
    assert _cgroup_quota(tmp_path / "v1", tmp_path / "absent") is None


def test_commands_to_go_on_with_are_those_a_shell_takes(tmp_path: Path) -> None:
    """Also of folders with a space."""
    path = tmp_path / "my runs" / "a"
    wanted = ["hotrow", "train", "--resume", str(path)]
    folder = RunFolder(path, {"warnings": {}})
    assert shlex.split(resume_command(folder.path)) == wanted
    run: Any = SimpleNamespace(path=path, record=SimpleNamespace(status="interrupted", memory=None), metrics={})
    told = Run.closing_lines(run, "", [])
    assert shlex.split(told.split("continue with: ")[1]) == wanted
    path.mkdir(parents=True)
    with pytest.raises(ValueError, match="exists already") as refused:
        _new_folder(path)
    assert shlex.split(str(refused.value).split("`")[1]) == wanted
    assert resume_command(Path("runs/a-001")) == "hotrow train --resume runs/a-001"


COUNT = """
import os, sys, torch
if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[1]))
import hotrow
from hotrow.run.runs import threads
from hotrow.run.said import describe_threads
from hotrow.cli.tools import doctor
before = len(os.listdir("/proc/self/task"))
with threads("auto") as used:
    emb = hotrow.EmbeddingCollection(
        [hotrow.TableConfig(name="t", num_embeddings=50_000, embedding_dim=64, feature_names=("f",))]
    )
    emb(torch.zeros(50_000, 1, dtype=torch.int64))
    started = len(os.listdir("/proc/self/task")) - before
    told = doctor()
    print(told["openmp_shared"], used, told["backend"]["threads"], 1 + started, describe_threads())
"""


@pytest.mark.slow_but("3-2-2")
@pytest.mark.skipif(not ops.isas(), reason="the threads of the kernels need the native module")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads")
@pytest.mark.parametrize(("variable", "call", "expected"), [("1", None, 1), ("3", 2, 2)])
def test_the_users_number_of_threads_is_the_kernels(variable: str | None, call: int | None, expected: int) -> None:
    """OMP_NUM_THREADS, or torch.set_num_threads: so many the system counts, of one OpenMP runtime (not sklearn's)."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if variable is not None:
        environment["OMP_NUM_THREADS"] = variable
    command = [sys.executable, "-c", COUNT, *([] if call is None else [str(call)])]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    cores = usable_cores()
    more = f" of {cores} cores (train.threads: {cores} uses all)" if expected < cores else ""
    said = f"{expected} thread{'' if expected == 1 else 's'}{more}"
    assert out.strip() == f"True {expected} {expected} {expected} {said}"


SHORT = """
import os, torch, hotrow
torch.set_num_threads(3)
names = [f"f{i}" for i in range(8)]
tables = [hotrow.TableConfig(name=n, num_embeddings=1000, embedding_dim=16, feature_names=(n,)) for n in names]
emb = hotrow.EmbeddingCollection(tables)
for rows in (64, 50_000):
    before = len(os.listdir("/proc/self/task"))
    emb(torch.zeros(rows, len(names), dtype=torch.int64))
    print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not ops.isas(), reason="the threads of the kernels need the native module")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads")
def test_a_short_region_wakes_no_other_thread() -> None:
    """A thread that sleeps takes longer to wake up than 64 rows take."""
    done = run_forked(SHORT)
    assert done.stdout.split() == ["0", "2"]


def test_the_first_line_says_how_to_use_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.run.said.usable_cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert describe_threads() == "1 thread of 4 cores (train.threads: 4 uses all)"
    assert describe_threads(4) == "1 thread", "each of four processes has a core"


def test_without_a_number_of_the_users_a_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes its number from the machine, which a container may use a part of."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("hotrow.base.machine.usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert default_threads() == 64


def test_run_json_of_another_version_is_refused(tmp_path: Path) -> None:
    """Fields that have nothing to say may be null or absent."""
    speed = {"steps": 3, "steps_skipped": 0, "epochs": 1.0, "samples_per_s": 9.5, "step_ms": {"data": 0.1}}
    backend = {"name": "native", "isa": "avx2", "threads": 1, "reason": None}
    begun = {"command": ["hotrow"], "started": "2026-01-01T00:00:00+0000", "versions": {}, "host": {}, "warnings": {}}
    dataset = {"path": "data", "checksum": "0", "name": "clicks"}
    ended = {"train_s": 0.5, "best_step": None, "monitor": "auc", "ended": "all steps are done", "chosen_step": 3}
    fields = {"status": "finished", **begun, "dataset": dataset, "backend": backend, **speed, **ended, "metrics": {}}
    write_sealed(tmp_path / "run.json", {"hotrow_run": 1, **fields})
    record = RunFolder.open(tmp_path).record
    assert (record.steps, record.best_step, record.memory) == (3, None, None)
    write_sealed(tmp_path / "run.json", {"hotrow_run": 2, **fields})
    with pytest.raises(ValueError, match=r"run\.json: hotrow_run is 2, and this hotrow reads 1; use the hotrow that"):
        RunFolder.open(tmp_path)


COMMAND = ("-m", "hotrow", "doctor", "--json")
IMPORT = ("-c", "import hotrow; hotrow.EmbeddingCollection")


def spins(*words: str, **given: str) -> set[str]:
    """Returns how often idle threads look for work before they sleep, as OpenMP says when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return set(re.findall(r"GOMP_SPINCOUNT\s*=\s*'(\d+)'", done.stderr))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "passive"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
    ],
)
def test_what_the_user_set_holds(given: dict[str, str], expected: dict[str, str]) -> None:
    wait_passively(given)
    assert given == expected


@pytest.mark.package
def test_the_command_waits_passively_and_an_import_changes_nothing() -> None:
    """OpenMP reads the environment when torch is loaded, so what it displays shows that the order is right."""
    if not (found := spins(*IMPORT)):
        pytest.skip("torch's OpenMP does not say how it waits")
    assert "0" not in found
    assert spins(*COMMAND) == {"0"}
    assert spins(*COMMAND, GOMP_SPINCOUNT="777") == {"777"}


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_rate_and_remaining_time_count_from_where_this_process_began(clock: Clock) -> None:
    reports: list[Progress] = []
    meter = ProgressMeter(reports.append, "count", rows_total=1000, rows_done=400)
    clock.now += 10
    meter.update(600)
    meter.update(601)  # too soon after the last
    clock.now += 10
    meter.update(700, rows_total=2200)
    clock.now += 20
    meter.finish(2000)
    assert reports == [
        Progress("count", 600, 1000, rows_per_s=20.0, remaining_s=None),
        Progress("count", 700, 2200, rows_per_s=15.0, remaining_s=150.0),
        Progress("count", 2000, 2000, rows_per_s=40.0, remaining_s=0.0),
    ]


def test_only_stages_of_over_a_second_get_a_line_and_one_each(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar() as show:
        for stage, seconds in (("count", 0.4), ("encode", 1.5)):
            meter = ProgressMeter(show, stage, rows_total=3000)
            clock.now += seconds / 2
            meter.update(1000)
            clock.now += seconds / 2
            meter.update(3000)
            meter.finish(3000)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "encode: 3,000 of 3,000 rows" in said[0]


def test_a_slow_start_is_not_counted_into_the_time_left() -> None:
    """Three seconds for the first of a thousand steps, then ten milliseconds each."""
    left = TimeLeft()
    assert left.seconds(1, 1000, 3.0) is None
    assert left.seconds(1, 1000, 3.1) is None, "no pace without a step"
    assert left.seconds(101, 1000, 4.0) == pytest.approx(9.0, rel=0.01)
    assert left.seconds(1000, 1000, 13.0) == 0
