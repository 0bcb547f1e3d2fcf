"""The commands and the Python of docs/tutorial.md run as written, in the page's order."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotrow.cli.app import app

pytestmark = pytest.mark.package

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run_line(line: str) -> str:
    """Runs one line of a shell block: hotrow in this process, anything else in a shell; returns what it printed."""
    if not line.startswith("hotrow "):
        return subprocess.run(["bash", "-ec", line], check=True, capture_output=True, text=True).stdout
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, f"{line}: {done.output}"
    return done.output


def test_the_tutorial_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = ""
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, PAGE.name, "exec"), names)
        else:
            printed += "".join(run_line(line) for line in block.splitlines())
    assert len(names["scores"]) == 1000  # type: ignore[arg-type]
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 1001
    auc = [float(found) for found in re.findall(r"^ +AUC +(0\.\d+)", printed, re.MULTILINE)]
    assert auc and auc[0] > 0.65, "the page's log can be learned"
