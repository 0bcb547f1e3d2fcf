"""The study `memory`: sides that compute the same, groups that limit or say why not, cells that add up."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rivals import memory, page
from benchmarks.rivals.memory import LossError, MemoryCell, Turns, check_losses
from benchmarks.rivals.sides import InTiers, Settings, Side
from benchmarks.rivals.stores import Mapped, Rocks, RowLru
from benchmarks.rivals.work import Work, even_lengths, read_batches, shared_batches
from benchmarks.rivals.worker import Server, Worker, WorkerError
from benchmarks.study import __main__ as studies
from benchmarks.study import presets as study_runner
from benchmarks.study.group import MemoryGroup
from benchmarks.tiers import open_table
from benchmarks.tiers_page import tiers_sentence, tiers_table
from hotrow import Batch, EmbeddingCollection, KeyedJaggedTensor, Memory
from hotrow.placement.budget import TableSlots

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
        },
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


# ---- sides


@pytest.mark.parametrize(("kind", "ahead"), [(InTiers, 2), (InTiers, 0), (Mapped, 1), (Mapped, 0), (Rocks, 0)])
def test_a_side_trains_to_the_losses_of_dram(kind: type[Side], ahead: int, tmp_path: Path) -> None:
    if kind is Rocks and importlib.util.find_spec("rocksdict") is None:
        pytest.skip("rocksdict is not installed")
    settings = Settings(dram_bytes=WORK.table_bytes // 2, folder=str(tmp_path))
    side = kind(WORK, settings)
    assert losses(side, ahead=ahead) == losses(Side(WORK, settings), ahead=0)
    assert side.facts()["rows_on_disk"] > 1000 and side.facts()["disk_bytes"] > 0


def test_a_side_counts_what_its_steps_took(tmp_path: Path) -> None:
    side = InTiers(WORK, Settings(dram_bytes=WORK.table_bytes // 2, folder=str(tmp_path)))
    side.build()
    found = side.train(list(islice(WORK.batches(), 8)), settle=2, steps=5, ahead=1)
    assert len(found["steps_s"]) == 5 and len(found["losses"]) == 7
    row = memory.shares_of([found, found], 5)
    assert found["lookups"] == 5 * 3 * 64
    assert 0 < row["hit_rate"] <= 1 and 0 <= row["stall_share"] < 1 and row["rows_per_step"] > 0


@pytest.mark.parametrize("pinned", [0, 900])
def test_written_rows_keep_their_initial_values(tmp_path: Path, pinned: int) -> None:
    plain = EmbeddingCollection(WORK.tables, seed=1)
    memory = Memory(
        dram=WORK.table_bytes, ssd=tmp_path, plan=lambda *_: [TableSlots(n, 0) for n in (3, 900)] + [(pinned, 500)]
    )
    tiered = EmbeddingCollection(WORK.tables, memory=memory, seed=1)
    tiered.placement.write_every_row(piece_rows=70)
    for name, num_rows in (("C1", 3), ("C3", 4000)):
        assert torch.equal(tiered.read_rows(name, slice(0, num_rows)), plain.read_rows(name, slice(0, num_rows)))
    counts = tiered.placement.counters()["C3"]
    assert counts["created_rows"] == 4000 - pinned and counts["written_rows"] == counts["evicted_rows"] > 1000


def test_lru_of_arrays_against_lru_of_a_dictionary() -> None:
    lru, plain, g = RowLru(300, 40), OrderedDict[int, int](), np.random.default_rng(2)
    for _ in range(400):
        rows = np.unique(np.minimum(g.geometric(0.03, 25), 299))
        slots, absent, left, freed = lru.take(rows)
        assert rows[absent].tolist() == [row for row in rows if row not in plain]
        assert len(np.unique(slots)) == len(slots) and len(left) == len(freed)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            plain[row] = slot
            plain.move_to_end(row)
        for row, slot in zip(left.tolist(), freed.tolist(), strict=True):
            assert plain.pop(row) == slot
        assert len(plain) <= 40 and all(lru.slot_of[row] == slot for row, slot in plain.items())
    oldest = {row: lru.last[slot] for row, slot in plain.items()}
    assert [oldest[row] for row in plain] == sorted(oldest.values())


def test_a_trace_is_repeated_and_its_bags_share_the_ids(tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("\n".join(str(i % 7) for i in range(40)))
    work = Work(rows=(7,), embedding_dim=4, batch_size=16, trace=str(trace))
    first, second, third = islice(work.batches(), 3)
    assert first.sparse.values.tolist() == [i % 7 for i in range(16)]
    assert third.sparse.values.tolist() == first.sparse.values.tolist() != second.sparse.values.tolist()
    assert even_lengths(5, 3).tolist() == [2, 2, 1]


def test_expected_counts_against_what_is_drawn() -> None:
    counts, num_steps = WORK.counts(), 400
    drawn = [np.zeros(n) for n in WORK.rows]
    for batch in islice(WORK.batches(), num_steps):
        for each, ids in zip(drawn, batch.sparse.values.view(len(drawn), -1).numpy(), strict=True):
            each += np.bincount(ids, minlength=len(each))
    assert list(counts) == ["C1", "C2", "C3"]
    for each, (name, own) in zip(drawn, counts.items(), strict=True):
        assert own.sum() == pytest.approx(64), name
        assert own[0] * num_steps == pytest.approx(each[0], rel=0.1)
        assert np.abs(np.cumsum(own * num_steps) - np.cumsum(each)).max() < 0.01 * each.sum()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")
def test_batches_are_shared_as_they_are() -> None:
    wanted = [*islice(WORK.batches(), 11)]
    ids, lengths = torch.arange(5), torch.tensor([2, 0, 1, 0, 1, 1])
    bags = KeyedJaggedTensor(("C1", "C2", "C3"), ids, lengths=lengths)
    wanted.append(Batch(dense=torch.rand(2, 13), sparse=bags, label=torch.zeros(2)))
    with shared_batches(wanted) as path:
        found = [*read_batches(path, WORK)]
    assert [batch.sparse.one_hot for batch in found] == [True] * 11 + [False]
    for a, b in zip(wanted, found, strict=True):
        assert a.sparse.keys == b.sparse.keys
        assert torch.equal(a.sparse.values, b.sparse.values) and torch.equal(a.sparse.offsets, b.sparse.offsets)
        assert torch.equal(a.dense, b.dense) and torch.equal(a.label, b.label)
    assert not Path(path).exists()


def test_the_next_stretch_begins_with_what_was_looked_ahead_to() -> None:
    seen: list[list[Any]] = []

    class Fake:
        def ask(self, *, do: str, batches: str, settle: int, steps: int, ahead: int) -> dict[str, Any]:
            seen.append([batch.label for batch in read_batches(batches, WORK)])
            return {}

    feed, wanted = memory.Feed(WORK), [batch.label for batch in islice(WORK.batches(), 12)]
    for steps, ahead in ((3, 2), (2, 0), (4, 3)):
        feed.train([Fake(), Fake()], settle=0, steps=steps, ahead=ahead)  # type: ignore[list-item]
    for found, (first, last) in zip(seen, [(0, 5)] * 2 + [(3, 5)] * 2 + [(5, 12)] * 2, strict=True):
        assert torch.equal(torch.stack(found), torch.stack(wanted[first:last]))


def test_a_side_in_tiers_saves_what_changed(tmp_path: Path) -> None:
    """The second checkpoint has the rows of the steps between."""
    work = replace(WORK, rows=(3, 900, 40_000))
    side = InTiers(work, Settings(dram_bytes=work.table_bytes // 2, folder=str(tmp_path), turns=2))
    side.build()
    first = side.save()
    side.train(list(islice(work.batches(), 2)), settle=0, steps=2, ahead=0)
    second = side.save()
    assert first["checkpoint_bytes"] > work.table_bytes / 2, "every row that is not pinned exists"
    assert 0 < second["checkpoint_bytes"] < first["checkpoint_bytes"] / 4


@pytest.mark.parametrize(("wanted", "stretches"), [(0, []), (7, [3, 3, 1]), (6, [3, 3])])
def test_a_checkpoint_is_timed_some_steps_after_another(wanted: int, stretches: list[int]) -> None:
    asked: list[dict[str, Any]] = []

    class Fake:
        def ask(self, **what: Any) -> dict[str, Any]:
            asked.append(what)
            return {"checkpoint_s": float(len(asked))}

    cell = MemoryCell(group="g", side="tiers", dram_parts=2, ahead=4, steps=3, checkpoint_steps=wanted)
    found = memory.checkpoint_of(memory.Feed(WORK), Fake(), cell)  # type: ignore[arg-type]
    for what in asked:
        what.pop("batches", None)
    trained = [{"do": "train", "settle": 0, "steps": steps, "ahead": 4} for steps in stretches]
    assert asked == ([{"do": "save"}, *trained, {"do": "save"}] if wanted else [])
    assert found == ({"checkpoint_s": len(asked)} if wanted else {})


@pytest.mark.slow
def test_a_worker_enters_its_group_trains_and_says_why_it_ends(tmp_path: Path) -> None:
    group = NoGroup(tmp_path / "procs")
    with Worker("dram", WORK, Settings(dram_bytes=0, folder=""), threads=1, group=group) as worker:  # type: ignore[arg-type]
        worker.ready()
        assert int(group.entry.read_text()) == worker._process.pid
        assert worker.ask(do="build") == {"rows_on_disk": 0, "disk_bytes": 0}
        feed = memory.Feed(WORK)
        ((first,), (second,)) = (feed.train([worker], settle=1, steps=n, ahead=0) for n in (2, 1))
        assert len(first["losses"]) == 3 and second["losses"][:1] != first["losses"][:1]
        with pytest.raises(WorkerError, match=r"side dram: TypeError: .*unexpected keyword"):
            worker.ask(do="train", stride=1)
        with pytest.raises(WorkerError, match="the process of side dram ended: status 0"):
            worker.ask(do="build")
    assert not group.entry.exists()


# ---- losses and groups


def test_a_loss_that_differs_in_a_bit_is_refused() -> None:
    same = [(0.5).hex(), (0.25).hex()]
    check_losses("cell", 0, same, same)
    with pytest.raises(LossError, match=r"cell c: the loss of step 11 .* where rows lie has changed the result"):
        check_losses("c", 10, same, [(0.5).hex(), np.nextafter(0.25, 1).hex()])
    with pytest.raises(LossError):
        check_losses("c", 0, [float("nan").hex()], [float("nan").hex()])


def test_stretches_compare_every_step() -> None:
    class Fake:
        pid = os.getpid()

        def __init__(self, losses: Sequence[float]) -> None:
            self.losses = [loss.hex() for loss in losses]

        def ask(self, **what: Any) -> dict[str, Any]:
            return {"seconds": 1.0, "losses": self.losses}

    cell = MemoryCell(group="g", side="tiers", dram_parts=2, ahead=0, zipf=1.05)
    feed = memory.Feed(WORK)
    turns = Turns(feed, Fake([0.5, 0.7]), Fake([0.5, 0.7]))  # type: ignore[arg-type]
    turns.stretch(cell, steps=2, ahead=0)
    assert turns.num_compared == 2
    with pytest.raises(LossError, match="step 1 "):
        Turns(feed, Fake([0.5, 0.7]), Fake([0.5, 0.8])).stretch(cell, steps=2, ahead=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("disturbed", "num_taken"), [([1, 0, 1, 0, 0], 5), ([1] * 3, 3)], ids=["some", "all"])
def test_disturbed_rounds_are_taken_again_and_there_is_always_a_figure(disturbed: list[int], num_taken: int) -> None:
    rounds = iter(disturbed)
    side = {"seconds": 2.0, "cpu_s": 1.0, "losses": [], "steps_s": [0.1]}

    class Stretches:
        def stretch(self, cell: MemoryCell, *, steps: int, ahead: int) -> dict[str, Any]:
            return {"disturbed": float(next(rounds)), "dram": {**side, "seconds": 1.0}, "side": side}

    cell = MemoryCell(group="g", side="tiers", ahead=4, dram_parts=10, zipf=1.05, rounds=3)
    found = memory.measure_rounds(Stretches(), [cell])[cell.key]  # type: ignore[arg-type]
    row = memory.row_of(cell, found, {})
    assert (row["clean_rounds"], row["taken_rounds"]) == (min(3, disturbed.count(0)), num_taken)
    assert (row["relative_speed"], row["spread"], row["rounds"]) == (0.5, [0.5, 0.5], 3)


@pytest.mark.parametrize(
    ("side", "scale", "said"),
    [
        ("mmap", 0.01, "cache would hold more"),
        ("mmap", 1, None),
        ("tiers", 0.01, None),
        ("tiers", 0.001, "rows of a batch"),
    ],
)
def test_what_needs_more_dram_is_refused(
    side: str, scale: float, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "group_refused", lambda: None)
    cell = MemoryCell(group="g", side=side, ahead=0, dram_parts=32, zipf=1.05, scale=scale)
    reason = memory.refusal(cell, memory_bytes=1 << 40, cores=2)
    assert (reason is None) if said is None else said in str(reason)


@pytest.mark.parametrize(
    ("v1", "files"),
    [
        (False, {"memory.max": "5000", "memory.swap.max": "0"}),
        (True, {"memory.limit_in_bytes": "5000", "memory.memsw.limit_in_bytes": "5000"}),
        (False, {"memory.max": "5000"}),
        (True, {"memory.limit_in_bytes": "5000"}),
    ],
)
def test_a_limit_leaves_nothing_to_swap(tmp_path: Path, v1: bool, files: dict[str, str]) -> None:
    """Else a side that is short of memory has more, on another disk. Where swap is not counted there is no file."""
    group = object.__new__(MemoryGroup)
    group.path, group._v1 = tmp_path, v1
    for name in files:
        (tmp_path / name).write_text("max")
    group.limit(5000)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_without_groups_no_cell_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "group_refused", lambda: "no memory group: run as root")
    result = run_tiny(tmp_path)
    assert (result["num_cells"], result["cells"], result["skipped"]) == (0, [], 2)
    report = json.loads((tmp_path / "memory.json").read_text())
    assert report["cells"] == [] and {cell["reason"] for cell in report["skipped"]} == {"no memory group: run as root"}


# ---- the study


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


def test_machines_count_where_enough_speed_is_kept() -> None:
    def row(parts: int, speed: float, ahead: int = 4) -> dict[str, Any]:
        return {"source": "z", "side": "tiers", "ahead": ahead, "dram_parts": parts, "relative_speed": speed}

    rows = [row(2, 1.0), row(8, 0.93), row(32, 0.6), row(32, 0.99, ahead=0)]
    assert memory.machines(rows) == [{"source": "z", "machines_in_dram": 8, "measured": True}]


def test_ratios_are_of_one_machine_and_ranges_over_all() -> None:
    own = {"dram_parts": 32, "zipf": 1.05, "io": "auto", "spread": [0.1, 0.9]}
    own |= {"rounds": 10, "clean_rounds": 10, "taken_rounds": 10}
    ours = {**own, "name": "ours", "side": "tiers", "ahead": 4, "relative_speed": 0.6}
    rival = {**own, "name": "mapped", "side": "mmap", "ahead": 1, "relative_speed": 0.2}
    assert "| ours over the whole tables mapped | 3.00x |" in "\n".join(tiers_table([ours, rival]))
    rocks = {**rival, "name": "rocks", "side": "rocksdb", "ahead": 0, "relative_speed": 0.15}
    tenth = {**ours, "name": "tenth", "dram_parts": 10, "relative_speed": 0.85}
    names = ("tiers_tiers_dram32_zipf1.05_ahead4", "mapped", "rocks", "tiers_tiers_dram10_zipf1.05_ahead4")
    one = dict(zip(names, (ours, rival, rocks, tenth), strict=True))
    cells = {name: {"A CPU": cell} for name, cell in one.items()}
    found = re.findall(r"[\d.]+(?:%| times)", tiers_sentence(cells) or "")
    assert found == ["85%", "60%", "3.0 times", "4.0 times"]
    for name, cell in one.items():
        cells[name]["Another"] = {**cell, "relative_speed": cell["relative_speed"] * (0.9 if "tiers" in name else 1)}
    found = re.findall(r"[\d.%]+ - [\d.]+%?", tiers_sentence(cells) or "")
    assert found == ["76% - 85%", "54% - 60%", "2.7 - 3.0", "3.6 - 4.0"]
    assert tiers_sentence({name: own for name, own in cells.items() if name != "rocks"}) is None


def test_a_table_that_is_opened_is_timed_and_its_file_goes(tmp_path: Path) -> None:
    row = open_table(tmp_path, quick=True)
    assert row["table_bytes"] == pytest.approx(1e9, rel=0.01)
    assert 0 < row["open_s"] <= row["worst_s"] and row["collection_s"] > 0
    assert not [*tmp_path.iterdir()]
