"""Ranks that mpiexec starts: they train to the bits of one process, end together, and refuse what cannot work."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_torchrun import config_file, outcome, raw_config, same

from hotrow.config.load import make_config
from hotrow.parallel import mpi
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.launch import joined
from hotrow.parallel.ranks import Ranks
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from mpi_ranks import LIMIT_S, mpiexec, needs_mpi, ranks, said
from packed_data import planted

HANG_S = 8.0
"""The promise is 5 s. On a busy machine the test only tells a slow end from none."""
data = planted(table_rows=(50, 20, 3000), counts=True)


@needs_mpi
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_number_of_ranks_is_invisible(data: Path, tmp_path: Path, num_ranks: int) -> None:
    process = mpiexec(num_ranks, "hotrow", "train", config_file(data, tmp_path, ["train.epochs=1"]), "--json")
    runs.train(make_config(raw_config(data, tmp_path / "one", ["train.epochs=1"])), quiet=True)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    same(tmp_path / "run", outcome(tmp_path / "one"))
    assert len(out.splitlines()) == 1 and json.loads(out)["ranks"]["num_ranks"] == num_ranks


@needs_mpi
@pytest.mark.slow
def test_interrupted_on_three_ranks_and_resumed_on_two(data: Path, tmp_path: Path) -> None:
    """mpiexec passes SIGUSR1 on to every rank; after SIGTERM it would kill ranks that take a second to save."""
    changes = ["train.epochs=40", "train.log_every=1"]
    process = mpiexec(3, "hotrow", "train", config_file(data, tmp_path, changes))
    lines = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (lines.exists() and lines.stat().st_size > 2000):
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=LIMIT_S)
    record = RunFolder.open(tmp_path / "run").record
    assert (record.status, record.signal) == ("interrupted", signal.SIGUSR1), err
    assert process.returncode != 0
    again = mpiexec(2, "hotrow", "train", "--resume", str(tmp_path / "run"))
    runs.train(make_config(raw_config(data, tmp_path / "one", changes)), quiet=True)
    _, err = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, err
    same(tmp_path / "run", outcome(tmp_path / "one"))


@pytest.mark.slow
@needs_mpi
def test_messages_arrive_whole_and_in_order(tmp_path: Path) -> None:
    process = ranks("exchange", 2, tmp_path)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    for held in said(tmp_path, 2):
        assert len(held) == 8 and all(held.values()), held


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_and_mpiexec_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    process, pids = ranks("lost", 3, tmp_path), [tmp_path / f"pid-{rank}" for rank in range(3)]
    until_s = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in pids):
        assert process.poll() is None and time.monotonic() < until_s, process.communicate()
        time.sleep(0.01)
    victim = int(pids[1].read_text())
    os.kill(victim, number)
    _, err = process.communicate(timeout=HANG_S)
    # mpiexec lets a stopped rank run again before it ends it, so that one may say it too.
    assert err.count("hotrow: rank 1 (") in ((2,) if number == signal.SIGKILL else (2, 3)), err
    assert f"process {victim}) was lost" in err and process.returncode != 0
    assert not any(Path(f"/proc/{path.read_text()}").exists() for path in pids)


@pytest.mark.slow
@needs_mpi
def test_an_error_of_one_rank_ends_all_with_its_text(tmp_path: Path) -> None:
    process = ranks("one_fails", 3, tmp_path)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2 and err.count("hotrow: rank 2: ValueError: a bad value") == 2, err


@pytest.mark.slow
@needs_mpi
def test_ranks_of_another_mpi_are_told() -> None:
    """As if mpiexec were of another MPI than mpi4py, or this process had been started by hand: it believes that it is
    alone."""
    command = [sys.executable, "-c", "from hotrow.parallel.launch import joined\nwith joined(): pass"]
    variables = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    started = [
        subprocess.Popen(command, env={**os.environ, variable: "2"}, stderr=subprocess.PIPE, text=True)
        for variable in variables
    ]
    for variable, process in zip(variables, started, strict=True):
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1 and f"ValueError: {variable} is 2 in the environment" in err
        assert "knows 1 process: start hotrow with the mpiexec of that MPI" in err


def entered(environ: dict[str, str]) -> str:
    """Returns the error with which a process of this environment refuses to be a rank."""
    with pytest.raises(ValueError, match="hotrow") as raised, joined(environ):
        pass
    return str(raised.value)


def test_mpiexec_without_mpi4py_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    environments: list[dict[str, str]] = [
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "3", "PMI_RANK": "0"},
        {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ]
    for environ in environments:
        assert "pip install 'hotrow[mpi]'" in entered(environ)


class WithoutThreads:
    """Stands in for mpi4py's module `MPI` over an MPI that was built without threads."""

    THREAD_SINGLE, THREAD_SERIALIZED = 0, 2
    COMM_WORLD = SimpleNamespace(size=2)

    def Is_initialized(self) -> bool:  # noqa: N802
        return False

    def Init_thread(self, wanted: int) -> int:  # noqa: N802
        return self.THREAD_SINGLE

    def Query_thread(self) -> int:  # noqa: N802
        return self.THREAD_SINGLE

    def Get_library_version(self) -> str:  # noqa: N802
        return "MPI of old, v1"


class OfAnotherLauncher(WithoutThreads):
    """Stands in for the module `MPI` over MPICH, which ends the process if it begins under the mpiexec of Open MPI."""

    def Init_thread(self, wanted: int) -> int:  # noqa: N802
        raise AssertionError("the process would end here")

    def Get_library_version(self) -> str:  # noqa: N802
        return "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026"


def test_an_mpi_that_cannot_begin_under_this_mpiexec_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace()))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", OfAnotherLauncher())  # type: ignore[arg-type]
    assert "the MPI of mpi4py (MPICH Version: 5.0.2) knows 1 process" in entered({"OMPI_COMM_WORLD_SIZE": "2"})


def test_an_mpi_without_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = SimpleNamespace(rc=SimpleNamespace(initialize=True))
    monkeypatch.setitem(sys.modules, "mpi4py", stand_in)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", WithoutThreads())  # type: ignore[arg-type]
    text = entered({"OMPI_COMM_WORLD_SIZE": "2"})
    assert text.startswith("MPI of old") and "MPI_THREAD_SERIALIZED" in text and not stand_in.rc.initialize


@pytest.mark.filterwarnings("error")
def test_ranks_that_mpiexec_bound_to_few_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    comm = Communicator(Ranks(1, 3, 3))
    monkeypatch.setattr(mpi, "everyone", lambda _, own: [{**own, "machine": "another"}, own, {**own, "cores": [31]}])
    with pytest.warns(UserWarning, match="all 2 ranks use .* of them by default: .*mpiexec --bind-to none"):
        bound = mpi._on_machine(comm)
    monkeypatch.setattr(mpi, "everyone", lambda _, own: [{**own, "machine": "another"}, own, own])
    assert bound == mpi._on_machine(comm) == Ranks(1, 3, 3, local_rank=0, local_size=2)  # a warning would be an error


@pytest.mark.parametrize("value", ["two", "-1"])
def test_a_number_of_processes_that_is_none_is_named(value: str) -> None:
    for variable in ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        assert f"{variable} is {value!r}" in entered({variable: value})


def test_a_script_of_mpiexec_may_name_the_same_ranks_for_gloo() -> None:
    """As `WORLD_SIZE=$OMPI_COMM_WORLD_SIZE RANK=$OMPI_COMM_WORLD_RANK`: then MASTER_ADDR is all that lacks here."""
    given = {"WORLD_SIZE": "2", "RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert "MASTER_ADDR" in entered(given)
    for other in ({"OMPI_COMM_WORLD_RANK": "0"}, {"WORLD_SIZE": "4"}, {"TORCHELASTIC_RUN_ID": "a"}):
        assert "as if mpiexec had started torchrun" in entered(given | other)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_torchrun_inside_mpiexec_is_refused(variable: str) -> None:
    inside = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", variable: "2"}
    text = entered(inside)
    assert "WORLD_SIZE is 4" in text and f"unset {variable}" in text


def test_variables_of_torchrun_count_inside_srun() -> None:
    """srun sets those of MPI for every program, as examples/cluster/slurm.sbatch has it."""
    text = entered({"WORLD_SIZE": "2", "SLURM_PROCID": "0", "PMI_SIZE": "2", "PMIX_RANK": "0"})
    assert "RANK, MASTER_ADDR, MASTER_PORT not" in text
