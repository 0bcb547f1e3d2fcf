"""The commands and the Python of docs/tutorial.md and docs/daily.md run as written, in the page's order, and so does
the task of examples/daily/airflow_day.py."""

import random
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


def write_day(day: int, num_rows: int) -> None:
    """Writes the clicks of a day, with new items and users, into the folder logs."""
    draw, logs = random.Random(day), ["ts,user,item,click"]
    for second in range(num_rows):
        user, item = int(400 * draw.random() ** 3), int(60 * day * draw.random())
        logs.append(f"{1_700_000_000 + 86_400 * day + second},u{user},i{item},{int(draw.random() < 0.3)}")
    (folder := Path("logs") / f"day_{day}").mkdir(parents=True)
    (folder / "rows.csv").write_text("\n".join([*logs, ""]))


def test_the_days_run_as_written_and_both_ways_serve_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for day in (1, 2):
        write_day(day, 2_000)
    lines = [line for _, block in blocks("daily.md") for line in block.replace("\\\n", " ").splitlines()]
    verbs = {line.split()[1] for line in lines if not line.startswith("ln ")}
    assert verbs == {"days", "init", "prepare", "train", "export", "apply"}
    for line in lines:
        run_line(line)
    one, other = (hotrow.Scorer(folder) for folder in ("chain/model", "model"))
    rows = [{"user": f"u{n}", "item": f"i{n % 120}"} for n in range(400)]
    assert one.score(rows).tolist() == other.score(rows).tolist()


def test_a_task_of_airflow_does_the_days_that_are_new_and_a_server_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Airflow. A day is taken back, as docs/serve.md says, before the last one."""
    monkeypatch.chdir(tmp_path)
    made: list[Callable[[], str]] = []
    sdk: Any = ModuleType("airflow.sdk")
    sdk.dag = lambda **_: lambda function: function
    sdk.task = SimpleNamespace(bash=lambda function: lambda: made.append(function))
    monkeypatch.setitem(sys.modules, "airflow", ModuleType("airflow"))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    monkeypatch.setenv("HOTROW_LOGS", "logs")
    monkeypatch.setenv("HOTROW_CHAIN", "chain")
    runpy.run_path(str(DOCS.parent / "examples" / "daily" / "airflow_day.py"))
    (train,) = made
    write_day(1, 600)
    run_line(train())
    scorer = hotrow.Scorer("chain/model")
    first = scorer.version
    assert scorer.follow() == first
    for day in (2, 3):
        write_day(day, 600)
    run_line(train())
    assert scorer.follow() == hotrow.Scorer("chain/versions/day_3").version != first
    run_line("hotrow export chain/runs/day_2 --out chain/versions/day_2")
    run_line("ln -sfn versions/day_2 chain/model")
    assert scorer.follow() == hotrow.Scorer("chain/versions/day_2").version
    write_day(4, 600)
    run_line(train())
    run_line("hotrow export chain/runs/day_4 --out whole")
    assert scorer.follow() == hotrow.Scorer("whole").version
