"""How a process comes to be a rank, and what a rank that is not the first leaves to it."""

from pathlib import Path

import pytest
import torch

from hotrow.base import machine
from hotrow.parallel.launch import joined
from hotrow.parallel.ranks import Ranks
from hotrow.run.folder import RunFolder, SilentFolder
from hotrow.run.runs import threads


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_without_ranks_trains_alone(environ: dict[str, str]) -> None:
    with joined(environ) as comm:
        assert (comm.rank, comm.size, comm.ranks.micro_batches) == (0, 1, 1)


def test_an_environment_that_names_no_place_to_meet() -> None:
    text = "WORLD_SIZE is 4 in the environment, but RANK, MASTER_PORT not: start hotrow with torchrun"
    with pytest.raises(ValueError, match=text), joined({"WORLD_SIZE": "4", "MASTER_ADDR": "host"}):
        pass


@pytest.mark.parametrize(
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
        folder.keep_vocabulary(tmp_path)
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
        "facts",
        "commands",
        "checkpoints",
        "vocabulary",
        "create",
        "begin",
        "open",
        "warn",
        "fail",
        "count_shown",
        "is_training",
        "options",
    }
    public = {name for name in vars(RunFolder) if not name.startswith("_")}
    assert public - reading <= set(vars(SilentFolder))
