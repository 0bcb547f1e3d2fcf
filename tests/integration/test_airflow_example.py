"""examples/daily/airflow_day.py, with a stand-in for Airflow: what its task does to a chain that a server follows."""

from __future__ import annotations

import random
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import hotrow

pytestmark = pytest.mark.package
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "daily" / "airflow_day.py"


def write_day(folder: Path, day: int) -> None:
    draw = random.Random(day)
    rows = ["ts,user,item,click"]
    for second in range(600):
        user, item = int(100 * draw.random() ** 2), int(20 * day * draw.random())
        rows.append(f"{1_700_000_000 + 86_400 * day + second},u{user},i{item},{int(draw.random() < 0.3)}")
    (folder / f"day_{day}.csv").write_text("\n".join([*rows, ""]))


def test_a_task_does_the_days_that_are_new_and_a_server_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    made: list[Callable[[], str]] = []
    sdk: Any = ModuleType("airflow.sdk")
    sdk.dag = lambda **_: lambda function: function
    sdk.task = SimpleNamespace(bash=lambda function: lambda: made.append(function))
    monkeypatch.setitem(sys.modules, "airflow", ModuleType("airflow"))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    (logs := tmp_path / "logs").mkdir()
    monkeypatch.setenv("HOTROW_LOGS", str(logs))
    monkeypatch.setenv("HOTROW_CHAIN", str(chain := tmp_path / "chain"))
    runpy.run_path(str(EXAMPLE))
    (train,) = made
    program, *words = shlex.split(train())
    assert program == "hotrow"
    write_day(logs, 1)
    command(*words)
    scorer = hotrow.Scorer(chain / "model")
    first = scorer.version
    assert scorer.follow() == first
    for day in (2, 3):
        write_day(logs, day)
    command(*words)
    assert scorer.follow() == hotrow.Scorer(chain / "versions" / "day_3").version != first
    command("export", chain / "runs" / "day_2", "--out", before := chain / "versions" / "day_2")  # back, as docs say
    (chain / "model").unlink()
    (chain / "model").symlink_to("versions/day_2")
    assert scorer.follow() == hotrow.Scorer(before).version
    write_day(logs, 4)
    command(*words)
    command("export", chain / "runs" / "day_4", "--out", tmp_path / "whole")
    assert scorer.follow() == hotrow.Scorer(tmp_path / "whole").version
