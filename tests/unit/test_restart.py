"""Which folder a run goes on in when torchrun starts its ranks again, and what a user is told to do."""

import os
from pathlib import Path

import pytest
import torch

from hotrow.base import machine
from hotrow.config.load import make_config
from hotrow.parallel.launch import joined
from hotrow.parallel.ranks import Ranks
from hotrow.run import restart
from hotrow.run.folder import RUN, RunFolder, SilentFolder
from hotrow.run.restart import how_to_go_on, launch_of, restart_folder
from hotrow.run.runs import threads
from loops import looped

CONFIG = make_config({"data": "data/criteo"})


@pytest.fixture(autouse=True)
def _in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC"):
            monkeypatch.delenv(name)


class Torchrun:
    """The environment of a process that torchrun started, on a host with the process ids given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def starts(self, *, agent: int = 1, worker: int, restarts: int = 0, run_id: str = "none") -> None:
        self.patch.setenv("TORCHELASTIC_RUN_ID", run_id)
        self.patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        self.patch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
        self.patch.setattr(restart, "_process", lambda pid: f"{worker if pid == os.getpid() else agent}")


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Torchrun:
    return Torchrun(monkeypatch)


def made(name: str, config: object = CONFIG) -> Path:
    folder = RunFolder.create(Path("runs") / name, name=name)
    folder.update(launch=launch_of(config), started=f"2026-01-0{1 + len(list(Path('runs').iterdir()))}")  # type: ignore[arg-type]
    return folder.path


def test_without_torchrun_nothing_is_marked_or_found() -> None:
    assert RunFolder.open(made("a")).record.launch is None
    assert restart_folder(CONFIG) is None
    own = restart._process(os.getpid())
    assert own == restart._process(os.getpid()) != restart._process(os.getppid())


def test_a_restarted_process_finds_the_run_it_stands_in_for(torchrun: Torchrun) -> None:
    torchrun.starts(worker=10)
    assert restart_folder(CONFIG) is None
    path = made("a")
    assert restart_folder(CONFIG) is None, "its own run is not one to go on with: the program may train a second one"
    torchrun.starts(worker=11, restarts=1)
    assert restart_folder(CONFIG) == path
    torchrun.starts(worker=11)  # after a change of members torchrun counts no restart
    assert restart_folder(CONFIG) == path
    assert restart_folder(make_config({"data": "data/criteo", "train": {"seed": 2}})) is None


def test_another_launch_begins_a_run_of_its_own(torchrun: Torchrun) -> None:
    torchrun.starts(worker=10, run_id="job-7")
    path = made("a")
    torchrun.starts(agent=2, worker=20, run_id="job-7")
    assert restart_folder(CONFIG) is None, "the same command, given again"
    torchrun.starts(agent=2, worker=20, run_id="job-8", restarts=1)
    assert restart_folder(CONFIG) is None
    torchrun.starts(agent=2, worker=20, run_id="job-7", restarts=1)
    assert restart_folder(CONFIG) == path, "the first rank has moved to another host"
    torchrun.starts(agent=2, worker=20, run_id="none", restarts=1)
    assert restart_folder(CONFIG) is None


def test_a_named_folder_and_damaged_marks(torchrun: Torchrun) -> None:
    named = make_config({"data": "data/criteo", "run": "my/run"})
    torchrun.starts(worker=10)
    RunFolder.create("my/run", name="x").update(launch=launch_of(named))
    made("a", named)
    torchrun.starts(worker=11)
    assert restart_folder(named) == Path("my/run")
    (Path("my/run") / RUN).write_text("{}")
    assert restart_folder(named) is None


def test_the_newest_of_several_runs_goes_on(torchrun: Torchrun) -> None:
    torchrun.starts(worker=10)
    for name in "cab":
        made(name)
    torchrun.starts(worker=11)
    assert restart_folder(CONFIG) == Path("runs/b")


def test_how_to_go_on(torchrun: Torchrun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    command = "Continue with: torchrun --nproc-per-node 3 -m hotrow train --resume runs/a (or on fewer ranks)"
    assert how_to_go_on(Path("runs/a")) == command
    torchrun.starts(worker=1, restarts=1)
    assert how_to_go_on(Path("runs/a")) == "torchrun starts the run again, from that checkpoint (restart 2 of 2)"
    torchrun.starts(worker=1, restarts=2)
    assert how_to_go_on(Path("runs/a")) == command


@looped("environ", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_without_ranks_trains_alone(environ: dict[str, str]) -> None:
    with joined(environ) as comm:
        assert (comm.rank, comm.size, comm.ranks.micro_batches) == (0, 1, 1)


def test_an_environment_that_names_no_place_to_meet() -> None:
    text = "WORLD_SIZE is 4 in the environment, but RANK, MASTER_PORT not: start hotrow with torchrun"
    with pytest.raises(ValueError, match=text), joined({"WORLD_SIZE": "4", "MASTER_ADDR": "host"}):
        pass


@looped(
    ("given", "num_processes", "wanted"),
    [(None, 1, 3), (None, 2, 4), (None, 3, 2), (None, 16, 1), ("1", 2, 4), ("1", 1, 3), ("3", 2, 3)],
)
def test_processes_of_a_run_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str | None, num_processes: int, wanted: int
) -> None:
    """torchrun sets OMP_NUM_THREADS to 1, which nobody asked for."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert machine.default_threads(num_processes) == wanted


def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with threads("auto", ranks=Ranks(1, 2, 2, local_rank=1, local_size=2)) as used:
        assert used == torch.get_num_threads() == 3


def test_a_rank_that_is_not_the_first_writes_nothing(tmp_path: Path) -> None:
    folder = SilentFolder.at(tmp_path / "run")
    with folder, folder.claimed():
        folder.keep_encoder(tmp_path)
        folder.write_config("a: 1\n")
        folder.warn("code", "text")
        folder.log("text")
        folder.measure("train", step=1, loss=0.5)
        folder.rewind(1)
        folder.open_tensorboard(step=0)
        folder.update(status="interrupted", signal=15)
        folder.report()
        assert folder.measurements() == []
    assert (folder.record.status, folder.record.signal) == ("interrupted", 15)
    assert folder.record.warnings == {"code": {"count": 1, "text": "text"}}
    assert list(tmp_path.iterdir()) == []


def test_every_method_that_writes_is_silent() -> None:
    """A new one has to be thought of: those that only read, or call others, are named here."""
    reading = {
        "facts", "commands", "checkpoints", "encoder", "create", "begin", "open", "warn", "fail", "count_shown",
        "is_training", "options", "selection",
    }  # fmt: skip
    public = {name for name in vars(RunFolder) if not name.startswith("_")}
    assert public - reading <= set(vars(SilentFolder))
