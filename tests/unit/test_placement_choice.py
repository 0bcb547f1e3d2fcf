"""hotrow.setup.memory: what lies in DRAM and what on disk, what is refused before training, and how it is said."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotrow.base.files import size
from hotrow.config.load import apply_overrides, make_config
from hotrow.data.packed.format import Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.placement.budget import Memory, TableDemand, plan_slots
from hotrow.placement.store_file import no_disk
from hotrow.setup import memory as placement
from hotrow.setup import memory as room
from hotrow.setup.demand import accesses_of, demands_of, required_bytes
from hotrow.tables import WHOLE, Births, TableConfig
from loops import looped

TABLES = [
    TableConfig(name="large", num_embeddings=1_000_000, embedding_dim=16, feature_names=("a", "b")),
    TableConfig(name="small", num_embeddings=100, embedding_dim=16, feature_names=("c",)),
]
NEEDED = 1_000_100 * 16 * 4 * 2  # weights and Adagrad's sums
MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_memory_bytes", lambda: 100 * MIB)


def choose(*arguments: Any, **options: Any) -> Memory | None:
    memory, _ = placement.choose(*arguments, **options)
    return memory


def config(memory: Any, *changes: str) -> Any:
    return make_config(apply_overrides({"data": "d", "memory": memory}, ["optimizer.sparse.name=adagrad", *changes]))


def test_auto_takes_up_to_60_percent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert required_bytes(config("auto"), TABLES) == NEEDED
    chosen = choose(config("auto"), TABLES, tmp_path)
    assert isinstance(chosen, Memory)
    assert 0.8 * 60 * MIB < chosen.dram_bytes < 60 * MIB, "a part is set aside for checkpoints and evaluations"
    assert chosen.folder == tmp_path / "memory" and not chosen.folder.exists()
    monkeypatch.setattr(room, "available_memory_bytes", lambda: int(NEEDED / 0.6) - 8)
    assert choose(config("auto"), TABLES, tmp_path) is not None
    monkeypatch.setattr(room, "available_memory_bytes", lambda: int(NEEDED / 0.6) + 8)
    assert choose(config("auto"), TABLES, tmp_path) is None


def test_a_mapping_decides_size_and_folder(tmp_path: Path) -> None:
    chosen = choose(config({"dram": "40MiB", "file": str(tmp_path)}), TABLES, tmp_path)
    assert (chosen.ssd, chosen.folder) == (None, tmp_path)
    assert choose(config({"ssd": str(tmp_path)}), TABLES, Path("run")).folder == tmp_path  # type: ignore[union-attr]
    assert choose(config({"dram": "99MiB"}, "optimizer.sparse.name=sgd"), TABLES, tmp_path) is None, "all of it fits"


def test_three_tiers(tmp_path: Path) -> None:
    """file with file_bytes lies before ssd, or before the run's own folder."""
    tiers = {"dram": "40MiB", "file": "fast", "file_bytes": "50MiB"}
    chosen = choose(config(tiers), TABLES, tmp_path)
    assert (chosen.middle, chosen.folder, chosen.file_bytes) == (Path("fast"), tmp_path / "memory", "50MiB")
    chosen = choose(config({**tiers, "ssd": str(tmp_path)}), TABLES, Path("run"))
    assert chosen is not None and (chosen.middle, chosen.folder) == (Path("fast"), tmp_path)
    with pytest.raises(ValueError, match=r"file_bytes is too small: fast .* raise it \(config memory\.file_bytes, or "):
        choose(config({**tiers, "file_bytes": 1000}), TABLES, tmp_path)
    with pytest.raises(ValueError, match="not enough memory for tables and optimizer state"):
        choose(config({**tiers, "dram": "200KiB", "file_bytes": "500MiB"}), TABLES, tmp_path)
    for wrong in ({"file": None}, {"file_bytes": 0}, {"file_bytes": None, "ssd": "slow"}):
        with pytest.raises(ValueError, match="file"):
            config({**tiers, **wrong})


@looped("memory", ["dram", {"dram": "1GiB"}])
def test_more_than_there_is_is_refused_with_the_shortfall(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"take 122\.\d MiB of DRAM, 22\.\d MiB more than the 100\.0 MiB this"):
        choose(config(memory), TABLES, tmp_path)


@looped("counted", [False, True])
def test_less_than_a_batch_is_refused_with_what_suffices(tmp_path: Path, counted: bool) -> None:
    choose = partial(placement.choose, dataset=Counted() if counted else None)  # type: ignore[arg-type]
    message = r"table 'large' would keep [\d,]+ rows, but a step may look up 100,000 .*MiB more are needed"
    with pytest.raises(ValueError, match=message) as error:
        choose(config({"dram": "10MiB"}, "train.batch_size=50000"), TABLES, tmp_path)
    least = re.search(r"memory\.dram=(\d+)MiB", str(error.value))[1]  # type: ignore[index]
    enough = config({"dram": f"{least}MiB"}, "train.batch_size=50000")
    assert choose(enough, TABLES, tmp_path) is not None
    too_little = config({"dram": f"{int(least) - 1}MiB"}, "train.batch_size=50000")
    with pytest.raises(ValueError, match="would keep"):
        choose(too_little, TABLES, tmp_path)
    with pytest.raises(ValueError, match="the smallest caches there are do not fit"):
        choose(config({"dram": 1000}), TABLES, tmp_path)
    with pytest.raises(ValueError, match=r"which rows lie in memory\.hbm takes 3\.8 MiB .* are 1\.0 MiB for"):
        choose(config({"hbm": "1MiB", "dram": "1MiB"}), TABLES, tmp_path)
    num_rows = sum(table.num_embeddings for table in TABLES)
    all_there = f"which rows lie in memory.hbm takes {size(16 * num_rows)} of DRAM"
    with pytest.raises(ValueError, match=re.escape(all_there)):
        choose(config({"hbm": "1GiB", "dram": "1MiB"}), TABLES, tmp_path)


def test_a_small_shortfall_is_said_in_small_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "available_memory_bytes", lambda: NEEDED - 10_000)
    with pytest.raises(ValueError, match=r"take 122\.\d MiB of DRAM, 9\.8 KiB more than"):
        choose(config("dram"), TABLES, tmp_path)
    memory = Memory(dram=100, file=tmp_path)
    with pytest.raises(ValueError, match=r"About 15\.9 KiB more than the tables that lie in memory"):
        plan_slots([TableDemand("a", 1000, 128)], memory.slots_bytes)


class Counted:
    """In the place of a packed dataset: Zipf's accesses to `large`, of 1,000 batches of 50,000."""

    stored = tuple(Table(table.name, table.num_embeddings) for table in TABLES)
    info = SimpleNamespace(tables=stored, files={"counts/large": None, "counts/small": None})
    has_counts = PackedDataset.has_counts

    def split(self, name: str) -> SimpleNamespace:
        assert name == "train"
        return SimpleNamespace(num_rows=50_000 * 1000)

    def counts(self, table: str) -> np.ndarray:
        if table == "small":
            return np.full(100, 500_000, np.uint32)
        weights = 1 / np.arange(1, 1_000_001)
        return (weights / weights.sum() * 1e8).astype(np.uint32)


def test_the_accesses_of_the_training_split_decide(tmp_path: Path) -> None:
    demands = demands_of(config({}), TABLES, training=True)
    memory = choose(config({"dram": "40MiB"}, "train.batch_size=500"), TABLES, tmp_path, dataset=Counted())  # type: ignore[arg-type]
    assert memory is not None and memory.plan is not None
    large, small = memory.plan(demands, memory.slots_bytes)
    assert small == (100, 0) and large.pinned > 0.9 * sum(large) > 200_000 and large.cached >= 1000
    deeper = choose(
        config({"dram": "40MiB", "lookahead": 64}, "train.batch_size=500"),
        TABLES,
        tmp_path,
        dataset=Counted(),  # type: ignore[arg-type]
    )
    assert deeper is not None and deeper.plan is not None
    assert deeper.plan(demands, memory.slots_bytes)[0].cached > 2 * large.cached, "more batches in flight"


def test_where_none_were_counted_shares_are_equal(tmp_path: Path) -> None:
    class Uncounted(Counted):
        info = SimpleNamespace(tables=Counted.stored, files={"counts/small": None})

    for dataset in (None, Uncounted()):
        memory = choose(config({"dram": "40MiB"}), TABLES, tmp_path, dataset=dataset)  # type: ignore[arg-type]
        assert memory is not None and memory.plan is None
    scored = choose(config({"dram": "40MiB"}), TABLES, tmp_path, dataset=Counted(), training=False)  # type: ignore[arg-type]
    assert scored is not None and scored.plan is None


@looped(
    ("kind", "what"),
    [("tmpfs", "is memory"), *((name, "is on a network file system") for name in ("nfs4", "smb3", "fuse.glusterfs"))],
)
def test_what_is_no_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, what: str) -> None:
    monkeypatch.setattr("hotrow.placement.store_file.file_system", lambda path: kind)
    with pytest.raises(ValueError, match=rf"memory\.ssd is '{tmp_path}.*{what} \({kind}\).*memory\.force"):
        choose(config({"ssd": str(tmp_path)}), TABLES, tmp_path)
    for memory in ("auto", {"dram": "20MiB"}, {"file": str(tmp_path), "file_bytes": "8MiB", "dram": "20MiB"}):
        message = rf"^no folder is named for .*, so they go to the run's, but {tmp_path}/run {what} \({kind}\)"
        with pytest.raises(ValueError, match=rf"{message}.*memory\.ssd.* run on a disk.*memory\.force"):
            choose(config(memory), TABLES, tmp_path / "run")
    assert choose(config({"ssd": str(tmp_path), "force": True}), TABLES, tmp_path) is not None
    assert choose(config({"file": str(tmp_path)}), TABLES, tmp_path) is not None


@looped("below", [False, True])
def test_a_folder_that_is_a_file_is_refused_by_its_field(tmp_path: Path, below: bool) -> None:
    (tmp_path / "taken").write_text("mine")
    path = str(tmp_path / "taken" / "deeper" if below else tmp_path / "taken")
    tiers = {"file": path, "file_bytes": "8MiB", "ssd": str(tmp_path / "new")}
    for name, memory in (("ssd", {"ssd": path}), ("file", {"file": path}), ("file", tiers)):
        message = rf"^memory\.{name} is '{path}', but {tmp_path}/taken is not a folder: choose another folder"
        with pytest.raises(ValueError, match=message):
            choose(config({"dram": "20MiB", **memory}), TABLES, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_scoring_needs_no_state_and_has_no_words_for_less(tmp_path: Path) -> None:
    assert choose(config("dram"), TABLES, tmp_path, training=False) is not None
    assert choose(config("dram"), TABLES[1:], tmp_path, training=False) is None
    assert choose(config({"dram": "1GiB"}), TABLES, tmp_path, training=False) is not None
    small = choose(config({"dram": "10MiB"}, "train.batch_size=50000"), TABLES, tmp_path, training=False)
    assert small is not None and small.dram_bytes < 10 * MIB


def test_a_real_file_system_in_memory_is_known() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or os.statvfs(shared).f_blocks == 0:
        pytest.skip("there is no /dev/shm here")
    reason = no_disk(shared / "not" / "made yet")
    assert reason is not None and "/dev/shm/not/made yet is memory (tmpfs)" in reason


def test_counts_of_a_part_are_those_of_its_rows() -> None:
    counts = np.random.default_rng(1).integers(0, 99, 1_000_000).astype(np.uint32)
    dataset: Any = SimpleNamespace(counts=lambda name: counts)
    births = Births(prefix=14, first=14 + 2, step=4)
    part = TABLES[0].part(249_999, births)  # rows of rank 2 of 4, but for those beyond the last
    rows = [row for row in range(249_999) if births.of(row) < 1_000_000]
    assert np.array_equal(accesses_of(part, dataset)[rows], counts[[births.of(row) for row in rows]])
    assert np.array_equal(accesses_of(TABLES[0], dataset), counts)
    assert len(accesses_of(TABLES[0].part(1, WHOLE), dataset)) == 1, "of a table that another rank owns"
    lone = TABLES[0].part(2, Births(first=999_999, step=8))
    assert accesses_of(lone, dataset).tolist() == [counts[-1], 0], "nobody looks up a row beyond the last"


def test_a_rank_needs_memory_for_its_part_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And shares the machine's with the other ranks there."""
    parts = [table.part(table.num_embeddings // 4, Births(first=1, step=4)) for table in TABLES]
    monkeypatch.setattr(room, "available_memory_bytes", lambda: NEEDED)
    assert choose(config("auto"), TABLES, tmp_path) is not None, "60 % are too little for all"
    assert choose(config("auto"), parts, tmp_path, room=room.Room.here(2)) is None
    memory = choose(config("auto"), parts, tmp_path, room=room.Room.here(4))
    assert memory is not None and 0.8 * 0.15 * NEEDED < memory.dram_bytes < 0.15 * NEEDED
    assert choose(config("dram"), parts, tmp_path, room=room.Room.here(3)) is None
    with pytest.raises(ValueError, match=r"more than the .* each of the 5 processes on this machine may use; set mem"):
        choose(config("dram"), parts, tmp_path, room=room.Room.here(5))


def test_slots_of_a_part_follow_its_counts(tmp_path: Path) -> None:
    """The rows that other ranks hold do not count."""
    counts = np.zeros(1_000_000, np.uint32)
    counts[1::4] = np.maximum(1, 1_000_000 // np.arange(1, 250_001))
    data: Any = SimpleNamespace(
        has_counts=True, counts=lambda name: counts, split=lambda name: SimpleNamespace(num_rows=4_000_000)
    )
    busy, idle = (TABLES[0].part(250_000, Births(first=rank, step=4)) for rank in (1, 2))
    tables = [busy, replace(idle, name="idle", feature_names=("d",))]
    asked = config({"dram": "20MiB", "ssd": str(tmp_path)}, "train.batch_size=1000")
    memory, division = placement.choose(asked, tables, tmp_path, dataset=data)
    assert memory is not None
    (pinned, cached), (pinned_idle, cached_idle) = division.slots_in(memory)[1]
    assert pinned > 50_000 and pinned + cached > 5 * (pinned_idle + cached_idle)
