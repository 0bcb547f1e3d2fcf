"""The study `memory`: sides that compute the same, groups that limit or say why not, cells that add up."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rivals import memory, page
from benchmarks.rivals.memory import LossError, check_losses
from benchmarks.rivals.sides import InTiers, Settings, Side
from benchmarks.rivals.stores import Mapped, Rocks
from benchmarks.rivals.work import Work
from benchmarks.rivals.worker import Server
from benchmarks.study import __main__ as studies
from benchmarks.study import presets as study_runner

WORK = Work(rows=(3, 900, 4000), embedding_dim=8, batch_size=64, zipf=1.05, bottom_mlp=(16,), top_mlp=(16,))
FEW = {"rounds": 3, "steps": 2, "settle": 1, "warm_up": 2}
TINY: dict[str, Any] = {
    "title": "Tiny",
    "about": "For tests.",
    "groups": [
        {
            "name": "tiers",
            "about": "Ours.",
            "fixed": {**FEW, "scale": 1e-4, "batch_size": 32, "threads": 1},
            "axes": {"zipf": [1.05], "dram_parts": [2]},
            "variants": [["tiers", 2], ["tiers", 0]],
        }
    ],
    "quick": {"leave_out": [], "axes": {}},
}


pytestmark = pytest.mark.usefixtures("one_thread")


class NoGroup:
    """In the place of a group: a file to write the process id into, and no limit."""

    def __init__(self, entry: Path) -> None:
        self.entry = entry

    def limit(self, num_bytes: int) -> None:
        self.limited = num_bytes

    def used_bytes(self) -> int:
        return 1000

    def peak_bytes(self) -> int:
        return 5

    def remove(self) -> None:
        self.entry.unlink()


class InThisProcess:
    """A worker without its process."""

    pid = os.getpid()

    def __init__(self, side: str, work: Work, settings: Settings, *, threads: int, group: Any = None) -> None:
        self.server = Server(side, asdict(work), asdict(settings))

    def ready(self) -> None:
        pass

    def ask(self, **what: Any) -> dict[str, Any]:
        return dict(json.loads(json.dumps(getattr(self.server, what.pop("do"))(**what))))

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        del self.server


@pytest.fixture
def no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "group_refused", lambda: None)
    monkeypatch.setattr(memory, "MemoryGroup", lambda: NoGroup(tmp_path / "procs"))
    monkeypatch.setattr(memory, "Worker", InThisProcess)


def run_tiny(out: Path, **changes: Any) -> dict[str, Any]:
    return study_runner.run_study(studies.make_study("memory", preset=TINY), out, memory_bytes=1 << 30, **changes)


def losses(side: Side, *, ahead: int) -> list[str]:
    side.build()
    batches = list(islice(side.work.batches(), 9 + ahead))
    return list(side.train(batches, settle=2, steps=7, ahead=ahead)["losses"])


@pytest.mark.parametrize(("kind", "ahead"), [(InTiers, 2), (InTiers, 0), (Mapped, 1), (Mapped, 0), (Rocks, 0)])
def test_a_side_trains_to_the_losses_of_dram(kind: type[Side], ahead: int, tmp_path: Path) -> None:
    if kind is Rocks and importlib.util.find_spec("rocksdict") is None:
        pytest.skip("rocksdict is not installed")
    settings = Settings(dram_bytes=WORK.table_bytes // 2, folder=str(tmp_path))
    side = kind(WORK, settings)
    assert losses(side, ahead=ahead) == losses(Side(WORK, settings), ahead=0)
    assert side.facts()["rows_on_disk"] > 1000 and side.facts()["disk_bytes"] > 0


def test_a_loss_that_differs_in_a_bit_is_refused() -> None:
    same = [(0.5).hex(), (0.25).hex()]
    check_losses("cell", 0, same, same)
    with pytest.raises(LossError, match=r"cell c: the loss of step 11 .* where rows lie has changed the result"):
        check_losses("c", 10, same, [(0.5).hex(), np.nextafter(0.25, 1).hex()])
    with pytest.raises(LossError):
        check_losses("c", 0, [float("nan").hex()], [float("nan").hex()])


def test_the_study_measures_once_and_holds_its_fields(
    tmp_path: Path, no_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else rounds are taken again, and more is compared.
    monkeypatch.setattr(memory.bench.Disturbance, "share", lambda self: 0.0)
    out = tmp_path / "out"
    result = run_tiny(out)
    assert (result["num_cells"], result["measured"], result["skipped"]) == (2, 2, 0)
    report = json.loads((out / "memory.json").read_text())
    assert result["cells"] == report["cells"] and len(report["cells"]) == 2
    for row in report["cells"]:
        assert row["relative_speed"] > 0 and row["rounds"] == 3
        assert row["steps_compared"] == 3 + 3 * ((1 + 2) + (2 + 2)) + 1  # warm-up looks two ahead: it settles for two
        assert row["limit_bytes"] == 1000 + row["table_bytes"] // 2 + memory.SLACK_BYTES["tiers"]
    kept = page.STUDY.kept_of(report)
    assert page.body_of(kept) == page.body_of(report), "the page in docs/ shows what is kept of it"
    assert page.charts_of(kept) == page.charts_of(report)
    assert not [*out.glob("hotrow-study-*")]
    before = report["cells"]
    run_tiny(out)
    assert json.loads((out / "memory.json").read_text())["cells"] == before
