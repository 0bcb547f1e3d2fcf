"""Laws 2 and 3 for several ranks, by the benchmarks that try them at length, in a few rounds of each.

Whichever rank is lost, and whenever, the run goes on to the bits of an untouched one; however ranks share real rows.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from benchmarks import rank_faults, rank_laws
from benchmarks.rank_runs import outcome
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.run import runs
from hotrow.run.folder import RunFolder

ROWS = {"train": 2000, "val": 200, "test": 200}
TABLE_ROWS = (500, 200, 30_000)
"""More than `rank_faults.settings` lets lie in DRAM."""
TRAIN = ("-m", "hotrow", "train", "config.yaml")


@pytest.mark.slow
def test_rounds_of_faults(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    """Eight rounds; `python -m benchmarks.rank_faults` has a hundred."""
    data = make_dataset(tmp_path / "data", rows=ROWS, table_rows=TABLE_ROWS, counts=True).path
    (folder := tmp_path / "rounds").mkdir()
    found = list(rank_faults.rounds(data, folder, 8, seed=2))
    assert [each for each in found if each.problems] == []
    assert {each.signal for each in found} == {"SIGKILL", "SIGSTOP"} and {each.tiers for each in found} == {False, True}


@pytest.mark.slow
def test_ranks_on_real_rows(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    """A few steps with one optimizer; `python -m benchmarks.rank_laws` takes 500 with each."""
    data = run_prepare("criteo", str(real_data(rank_laws.ROWS)), tmp_path / "data", min_count=1)
    assert all(rank_laws.compared(data, tmp_path, 60, {"adam": rank_laws.cases()["adam"]}))


@pytest.mark.slow
def test_torchrun_starts_a_run_again_in_its_folder(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    """Rank 1 is killed after the first checkpoint; the same torchrun ends with the bits of one process."""
    data = make_dataset(tmp_path / "data", rows=ROWS, table_rows=TABLE_ROWS, counts=True).path
    given = rank_faults.settings(data, tmp_path / "alone", tiers=False)
    runs.train(make_config(given), quiet=True)
    del given["run"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given))
    options = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *TRAIN]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launch:
        until_s = time.monotonic() + 60
        while not list(tmp_path.glob("runs/*/checkpoints/step-*/manifest.json")) and time.monotonic() < until_s:
            time.sleep(0.01)
        os.kill(_worker(launch.pid, local_rank=1), signal.SIGKILL)
        _, told = launch.communicate(timeout=120)
    assert launch.returncode == 0, told
    assert told.count(") was lost at ") == 2, told
    assert "torchrun starts the run again, from that checkpoint (restart 1 of 1)" in told
    (run,) = (tmp_path / "runs").iterdir()
    assert RunFolder.open(run).record.status == "finished"
    assert "resumed at step" in (run / "log.txt").read_text()
    assert outcome(run) == outcome(tmp_path / "alone")


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_ranks(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    """Two launchers stand for two machines. The second one is lost with its rank; the other goes on with its two."""
    data = make_dataset(tmp_path / "data", rows=ROWS, table_rows=TABLE_ROWS, counts=True).path
    given = rank_faults.settings(data, tmp_path / "alone", tiers=False)
    runs.train(make_config(given), quiet=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given | {"run": str(tmp_path / "run")}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "clicks"]
    options = [*meeting, "--rdzv-conf", "last_call_timeout=5", "--max-restarts", "1", "--nproc-per-node"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    with (tmp_path / "said").open("w") as said, ExitStack() as launchers:
        first, second = (
            launchers.enter_context(subprocess.Popen([*command, num, *TRAIN], cwd=tmp_path, stdout=said, stderr=said))
            for num in ("2", "1")
        )
        launchers.callback(first.kill)
        launchers.callback(second.kill)
        until_s = time.monotonic() + 60
        while not list(tmp_path.glob("run/checkpoints/step-*/manifest.json")) and time.monotonic() < until_s:
            time.sleep(0.01)
        lost = _worker(second.pid)
        second.kill()
        os.kill(lost, signal.SIGKILL)
        code = first.wait(timeout=120)
    told = (tmp_path / "said").read_text()
    assert code == 0, told
    assert f"process {lost}) was lost at " in told and "3 ranks share" in told and "2 ranks share" in told
    assert "resumed at step" in (tmp_path / "run" / "log.txt").read_text()
    assert outcome(tmp_path / "run") == outcome(tmp_path / "alone")


def _worker(launcher: int, *, local_rank: int = 0) -> int:
    """Returns the process of a rank that torchrun has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"LOCAL_RANK={local_rank}" in (path / "environ").read_text().split("\0"):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"torchrun has no rank {local_rank}")
