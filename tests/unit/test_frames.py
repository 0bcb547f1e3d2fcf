"""How deep a step lies below the calls that lead to it: frames of our own code, `train_step` included."""

import inspect
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import hotrow
from hotrow import __main__
from hotrow.config.load import make_config
from hotrow.run import runs, trainer

OURS = str(Path(hotrow.__file__).parent)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of each step, the files and names of our functions on the stack."""
    stacks, plain = list[list[str]](), trainer.train_step

    def step(*arguments: Any) -> Any:
        above = [f"{own.filename}: {own.function}" for own in inspect.stack(0)[1:] if own.filename.startswith(OURS)]
        stacks.append([*above[::-1], "train_step"])
        return plain(*arguments)

    monkeypatch.setattr(trainer, "train_step", step)
    return stacks


def test_from_fit_to_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[list[str]]) -> None:
    lines = "".join(f"{k % 3 // 2},{k % 40}\n" for k in range(600))
    (logs := tmp_path / "clicks.csv").write_text("click,user\n" + lines)
    monkeypatch.setattr(sys, "argv", ["hotrow", "fit", str(logs), "--label", "click", "--split", "random"])
    sys.argv += ["--set", f"run={tmp_path}/run", "--set", "train.max_steps=2"]
    monkeypatch.setattr(signal, "getsignal", lambda _: None)  # else Ctrl-C ends this process in all tests to come
    with pytest.raises(SystemExit, match="0"):
        __main__.main()
    assert (tmp_path / "run" / "selection").is_dir() and len(found) == 4 and max(map(len, found)) <= 9, found


def test_from_train_or_resume_to_a_step(tmp_path: Path, make_dataset: Any, found: list[list[str]]) -> None:
    data = make_dataset(tmp_path / "data", rows={"train": 64})
    run = runs.train(make_config({"data": str(data.path), "run": str(tmp_path / "run")}), quiet=True)
    runs.resume(run.path, ["train.epochs=2"], quiet=True)
    assert len(found) >= 2 and max(map(len, found)) <= 6, found
