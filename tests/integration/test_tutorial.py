"""The commands and the Python of docs/tutorial.md and docs/daily.md run as written, in the page's order."""

import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hotrow
from hotrow.cli.app import app

pytestmark = pytest.mark.package

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """Returns the language and the text of each block of a page that runs."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


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
    for language, block in blocks("tutorial.md"):
        if language == "python":
            exec(compile(block, "tutorial.md", "exec"), names)
        else:
            printed += "".join(run_line(line) for line in block.splitlines())
    assert len(names["scores"]) == 1000  # type: ignore[arg-type]
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 1001
    auc = [float(found) for found in re.findall(r"^ +AUC +(0\.\d+)", printed, re.MULTILINE)]
    assert auc and auc[0] > 0.65, "the page's log can be learned"


def test_the_days_run_as_written_and_both_ways_serve_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(7)
    for day in (1, 2):
        (folder := tmp_path / "logs" / f"day_{day}").mkdir(parents=True)
        logs = ["ts,user,item,click"]
        for second in range(2_000):
            user, item = int(400 * draw.random() ** 3), int(60 * day * draw.random())
            logs.append(f"{1_700_000_000 + 86_400 * day + second},u{user},i{item},{int(draw.random() < 0.3)}")
        (folder / "rows.csv").write_text("\n".join([*logs, ""]))
    lines = [line for _, block in blocks("daily.md") for line in block.replace("\\\n", " ").splitlines()]
    verbs = {line.split()[1] for line in lines if not line.startswith("ln ")}
    assert verbs == {"days", "init", "prepare", "train", "export", "apply"}
    for line in lines:
        run_line(line)
    one, other = (hotrow.Scorer(folder) for folder in ("chain/model", "model"))
    rows = [{"user": f"u{n}", "item": f"i{n % 120}"} for n in range(400)]
    assert one.score(rows).tolist() == other.score(rows).tolist()
