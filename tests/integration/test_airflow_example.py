"""examples/daily/airflow_day.py, with a stand-in for Airflow: what its tasks do to a chain and to its servers."""

from __future__ import annotations

import random
import runpy
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotrow
from hotrow.days.walk import walk_days

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from hotrow.serve.server import make_app  # noqa: E402  # not without these two

pytestmark = pytest.mark.package
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "daily" / "airflow_day.py"


class Task:
    """A task of the example: the function, and which one it comes after."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.after: list[str] = []

    def __call__(self) -> Task:
        return self

    def __rshift__(self, other: Task) -> Task:
        other.after.append(self.function.__name__)
        return other


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Task]:
    made: dict[str, Task] = {}

    def task(function: Callable[[], Any]) -> Task:
        return made.setdefault(function.__name__, Task(function))

    sdk = ModuleType("airflow.sdk")
    task.bash = task  # type: ignore[attr-defined]
    sdk.task, sdk.dag = task, lambda **_: lambda function: function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "airflow", ModuleType("airflow"))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    return made


def write_day(folder: Path, day: int) -> None:
    draw = random.Random(day)
    rows = ["ts,user,item,click"]
    for second in range(600):
        user, item = int(100 * draw.random() ** 2), int(20 * day * draw.random())
        rows.append(f"{1_700_000_000 + 86_400 * day + second},u{user},i{item},{int(draw.random() < 0.3)}")
    (folder / f"day_{day}.csv").write_text("\n".join([*rows, ""]))


def test_a_day_trains_and_every_server_gets_what_it_has_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Task]
) -> None:
    monkeypatch.setattr("hotrow.serve.scorer.make", hotrow.apply_delta)  # another process takes seconds to begin
    (logs := tmp_path / "logs").mkdir()
    write_day(logs, 1)
    chain, scorers, addresses = tmp_path / "chain", [], []
    walk_days(logs, chain, label="click", time="ts")
    with ExitStack() as stack:
        for name in ("one", "other"):
            shutil.copytree(chain / "model", tmp_path / name)
            scorers.append(hotrow.Scorer(tmp_path / name))
            app = make_app(scorers[-1], deltas=chain / "deltas")
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
            thread = threading.Thread(target=server.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            while not server.started:
                time.sleep(0.01)
            addresses.append(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        monkeypatch.setenv("HOTROW_LOGS", str(logs))
        monkeypatch.setenv("HOTROW_CHAIN", str(chain))
        monkeypatch.setenv("HOTROW_SERVERS", " ".join(addresses))
        runpy.run_path(str(EXAMPLE))
        assert list(tasks) == ["train", "serve"] and tasks["serve"].after == ["train"]
        tasks["serve"].function()  # nothing is new
        before = {scorer.version for scorer in scorers}
        for day in (2, 3):
            write_day(logs, day)
        verb, folder, *_ = shlex.split(tasks["train"].function())[1:]
        assert (verb, folder) == ("days", str(logs))
        walk_days(logs, chain, label="click", time="ts")
        scorers[1].apply(chain / "deltas" / "day_2")  # one server lacks two days, the other one
        tasks["serve"].function()
        assert {scorer.version for scorer in scorers} == {hotrow.Scorer(chain / "model").version} != before
