"""Which folder a run goes on in when torchrun starts its ranks again, and what a user is told to do."""

import os
from pathlib import Path

import pytest

from hotrow.config.load import make_config
from hotrow.run import restart
from hotrow.run.folder import RUN, RunFolder
from hotrow.run.restart import how_to_go_on, launch_of, restart_folder

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
