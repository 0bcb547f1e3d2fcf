"""What tables in tiers refuse, with its cure, and what they leave behind: nothing."""

import copy
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotrow
from forked import run_python
from hotrow import KeyedJaggedTensor, Memory, TableConfig
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.placement.budget import MIDDLE_PLACE_BYTES, TableDemand, TableSlots
from hotrow.placement.stores import StoreError
from hotrow.run.storage import describe
from loops import looped

NUM_ROWS = 3000
pytestmark = pytest.mark.filterwarnings("ignore:table .* is read and written by 40 threads")


def make(folder: Path, *, dram: int = 150_000, tiers: bool = True, **memory: Any) -> EmbeddingCollection:
    tables = [TableConfig(name=n, num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=(n,)) for n in "ab"]
    place = memory or {"file": folder}
    return EmbeddingCollection(tables, memory=Memory(dram=dram, **place) if tiers else None, seed=5)


def batch_of(seed: int, size: int = 40) -> KeyedJaggedTensor:
    ids = torch.randint(0, NUM_ROWS, (2 * size,), generator=torch.Generator().manual_seed(seed))
    return KeyedJaggedTensor(("a", "b"), ids)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "rows"
    gc.collect()  # what a traceback held
    assert not (tmp_path / "rows").exists() or list((tmp_path / "rows").iterdir()) == [], "files were left behind"


@pytest.fixture
def emb(tmp_path: Path) -> EmbeddingCollection:
    return make(tmp_path / "kept")


@looped("dram", ["", "2 parsecs", "much", "-1GiB", "1e9", "0x10", "1.2.3GiB", "nan", "inf"])
def test_sizes_that_are_not_understood(tmp_path: Path, dram: str) -> None:
    with pytest.raises(ValueError, match="is not understood; write a number and a unit, such as 2GiB or 500MB"):
        Memory(dram=dram, ssd=tmp_path)


@looped("dram", [0, -5, "0", "0 GiB", 2.5, None, True, b"2GiB"])
def test_sizes_that_are_none(tmp_path: Path, dram: Any) -> None:
    with pytest.raises(ValueError, match=r"Memory: dram is .*; it must be a positive number of bytes, such as '2GiB'"):
        Memory(dram=dram, ssd=tmp_path)


@looped(
    "folders",
    [
        {}, {"ssd": "a", "file": "b"}, {"ssd": ""}, {"file": ""}, {"ssd": "a", "file_bytes": 9},
        {"file": "a", "file_bytes": 9}, {"ssd": "a", "file": "", "file_bytes": 9},
    ],
)  # fmt: skip
def test_one_folder_is_named_or_three_tiers(folders: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"ssd is .*, file is .* and file_bytes is .*; name exactly one folder, or"):
        Memory(dram="1GiB", **folders)  # type: ignore[arg-type]


@looped("size", [0, -1, True, 1.5, b"1GiB"])
def test_a_middle_tier_has_a_size(size: Any) -> None:
    with pytest.raises(ValueError, match=r"file_bytes is .*; it must be a positive number of bytes"):
        Memory(dram="1GiB", ssd="a", file="b", file_bytes=size)
    with pytest.raises(ValueError, match="io is 'aio'; choose one of auto, io_uring, threads"):
        Memory(dram="1GiB", ssd="a", io="aio")  # type: ignore[arg-type]


@looped("memory", ["disk", 3, {"dram": "1GiB"}])
def test_memory_of_another_kind(memory: Any) -> None:
    tables = [TableConfig(name="a", num_embeddings=9, embedding_dim=8, feature_names=("a",))]
    with pytest.raises(ValueError, match=r"memory is .*; pass None or 'dram' \(all rows in DRAM\), hotrow.Memory or"):
        EmbeddingCollection(tables, memory=memory)


@looped("kind", ["ssd", "file", "middle"])
@looped("below", [False, True])
def test_a_folder_that_is_a_file(tmp_path: Path, kind: str, below: bool) -> None:
    (tmp_path / "taken").write_text("mine")
    path = tmp_path / "taken" / "deeper" if below else tmp_path / "taken"
    place: dict[str, Any] = {kind: path}
    if kind == "middle":
        place = {"file": path, "file_bytes": 20_000, "ssd": tmp_path / "slow"}
    with pytest.raises(OSError, match=r"^no files can be made in .*taken.*; choose another folder for tables on disk"):
        hotrow.SGD(make(tmp_path, dram=200_000, **place), lr=0.1)
    assert (tmp_path / "taken").read_text() == "mine"


@looped("kind", ["ssd", "file"])
def test_a_folder_that_cannot_be_written(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/proc takes files from nobody, not even from root."""
    path = Path("/proc/self/fdinfo")
    if not path.is_dir():
        pytest.skip("there is no /proc here")
    with pytest.raises(OSError, match=r"^no files can be made in /proc/self/fdinfo: .*; choose another folder"):
        hotrow.SGD(make(tmp_path, **{kind: path}), lr=0.1)


def test_a_file_system_without_locks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    text = r"^no files can be made in .*/rows: its file system \(.*\) cannot lock what is in use \(No locks available\)"
    with pytest.raises(OSError, match=text + "; choose another folder for tables on disk"):
        hotrow.SGD(make(tmp_path, ssd=tmp_path / "rows"), lr=0.1)
    assert list((tmp_path / "rows").iterdir()) == []


@looped("num_rows", [2**31 - 1, 2**31, 2**40])
def test_a_table_of_too_many_rows(tmp_path: Path, num_rows: int) -> None:
    table = TableConfig(name="vast", num_embeddings=num_rows, embedding_dim=1, feature_names=("x",))
    with pytest.raises(ValueError, match=r"table 'vast' has [\d,]+ rows; .*fewer than 2,147,483,647: hash its ids"):
        EmbeddingCollection([table], memory=Memory(dram="1GiB", file=tmp_path))


def test_a_budget_below_the_least(folder: Path) -> None:
    emb = make(folder, dram=10_000)
    with pytest.raises(ValueError, match=r"too small: table 'a' would keep \d+ of its 3,000 rows. About .* KiB more"):
        hotrow.Adam(emb)
    assert not folder.exists(), "refused before anything was made"


DEMANDS = [TableDemand("a", 10_000, 64), TableDemand("b", 300, 64), TableDemand("c", 50, 128), TableDemand("d", 9, 64)]


def three(file_bytes: int, dram: int = 1 << 20) -> Memory:
    return Memory(dram=dram, file="fast", file_bytes=file_bytes, ssd="slow")


def test_the_middle_is_shared_by_tails() -> None:
    """As many rows each, in sets of 16 places, and no more than a table's tail needs."""
    slots = [TableSlots(100, 50), TableSlots(0, 60), TableSlots(10, 10), TableSlots(9, 0)]
    places = three(200_000).plan_places(DEMANDS, slots)
    assert places == [(200_000 - 304 * 64 - 48 * 128) // 64 // 16 * 16, 304, 48, 0]
    assert sum(n * table.record_bytes for n, table in zip(places, DEMANDS, strict=True)) <= 200_000
    places = three(112 * 128 + 48 * 128).plan_places(DEMANDS, slots)
    assert places == [112, 112, 48, 0], "the least that is useful"
    with pytest.raises(ValueError, match=r"fast would hold 96 of the \d[\d,]* rows of table 'b'.*[^\d]8 bytes more"):
        three(112 * 128 + 48 * 128 - 8).plan_places(DEMANDS, slots)
    assert three(1 << 40).plan_places(DEMANDS, slots) == [9904, 304, 48, 0], "places for every row of the tails"
    assert Memory(dram=1000, ssd="slow").plan_places(DEMANDS, slots) == [0, 0, 0, 0]


def test_what_is_known_of_the_middle_is_counted_in_dram() -> None:
    memory = three(64_000, dram=100_000)
    assert memory.budget_bytes(DEMANDS) == memory.slots_bytes - 6000
    assert three(1 << 40).budget_bytes(DEMANDS) == three(1).slots_bytes - 6 * (10_359 + 4 * 16)
    with pytest.raises(ValueError, match=r"which rows lie in fast, file_bytes of 64000 take 5\.9 KiB, and there"):
        three(64_000, dram=6000).budget_bytes(DEMANDS)


def test_three_tiers_lie_where_they_should(folder: Path) -> None:
    emb = make(folder, dram=150_000, file=folder / "fast", file_bytes=60_000, ssd=folder / "slow")
    optimizer = hotrow.SGD(emb, lr=0.1)
    for seed in range(20):
        emb(batch_of(seed, size=1000)).sum().backward()
        optimizer.step()
    before = list((folder / "fast").rglob("*.rows"))
    below = list((folder / "slow").rglob("*.rows"))
    assert len(before) == len(below) == 2
    assert all(sum(f.stat().st_size - 8192 for f in files) > 55_000 for files in (before, below))
    assert sum(f.stat().st_size - 8192 for f in before) <= 60_000
    for store, counts in zip(emb.placement.stores, emb.placement.counters().values(), strict=True):
        assert counts["middle_map_bytes"] <= MIDDLE_PLACE_BYTES * store.middle.rows.num_rows
        assert 0 < counts["middle_rows"] <= store.middle.rows.num_rows
        assert counts["middle_hits"] > 0 and counts["written_rows"] > 0
    line = describe(emb, 192_000)
    assert re.search(r" in DRAM \(0 of 2 tables whole\), .* on disk in .*/slow, [\d.]+ KiB before it in .*/fast", line)
    emb.placement.close()
    assert list((folder / "fast").iterdir()) == list((folder / "slow").iterdir()) == []
    (folder / "fast").rmdir()
    (folder / "slow").rmdir()


def test_a_middle_in_memory_is_fine_where_the_disk_is_none(
    folder: Path, small_disk: tuple[Path, Callable[[int], None]]
) -> None:
    disk, _ = small_disk
    place = {"dram": 200_000, "file_bytes": 20_000}
    with pytest.raises(ValueError, match=r"ssd is .* is memory \(tmpfs\)"):
        make(folder, file=folder, ssd=disk, **place)
    emb = make(folder, file=disk, ssd=folder, **place)
    with torch.no_grad():
        emb(batch_of(1))
    assert len(list(disk.rglob("*.rows"))) == 2


# ---- a collection in tiers


def test_an_optimizer_comes_first_and_alone(emb: EmbeddingCollection, folder: Path) -> None:
    optimizer = hotrow.Adagrad(emb, lr=0.1)
    with pytest.raises(ValueError, match="laid out on disk already, by the first lookup or another optimizer"):
        hotrow.Adagrad(emb, lr=0.1)
    emb(batch_of(1)).sum().backward()
    optimizer.step()  # the first is as it was
    late = make(folder)
    with torch.no_grad():
        late(batch_of(1))
    with pytest.raises(ValueError, match="make the optimizer right after the EmbeddingCollection"):
        hotrow.Adagrad(late, lr=0.1)


def test_copies_and_states(emb: EmbeddingCollection) -> None:
    for make_copy in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="in tiers cannot be copied or pickled: its files belong to it alone"):
            make_copy(emb)
    with pytest.raises(ValueError, match="in tiers has no state_dict, since its tables may be larger than memory"):
        emb.state_dict()
    with pytest.raises(ValueError, match="in tiers has no state_dict"):
        torch.nn.Sequential(emb).state_dict()
    with pytest.raises(ValueError, match="in tiers takes no state_dict"):
        emb.load_state_dict({})


def test_rows_are_read_by_any_slice(emb: EmbeddingCollection, tmp_path: Path) -> None:
    plain = make(tmp_path, tiers=False)
    for rows in (slice(0, 5), slice(None), slice(2990, None), slice(7, 7), slice(2990, 9999)):
        assert torch.equal(emb.read_rows("a", rows), plain.read_rows("a", rows))


def test_backward_after_the_step(emb: EmbeddingCollection) -> None:
    optimizer = hotrow.SGD(emb, lr=0.1)
    out = emb(batch_of(1)).sum()
    out.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="call them in the order forward, backward, step"):
        out.backward()


def all_can_be_admitted(emb: EmbeddingCollection) -> bool:
    """No row is pinned by a batch: as many as there are slots find theirs without overflow."""
    tiers = emb.placement
    before = tiers.counters()
    for t, slots in enumerate(tiers.slots):
        batch = KeyedJaggedTensor(("ab"[t],), torch.arange(NUM_ROWS - slots.cached, NUM_ROWS))
        tiers.announce(batch)
        tiers.forget(batch)
    return all(tiers.counters()[name]["overflow_rows"] == before[name]["overflow_rows"] for name in "ab")


def test_the_check_of_pins_can_fail(emb: EmbeddingCollection) -> None:
    kept = batch_of(1)
    emb(kept)
    assert all_can_be_admitted(emb)
    emb.placement.announce(kept)
    assert not all_can_be_admitted(emb)


@pytest.mark.parametrize("where", ["before", "forward", "backward", "step"])
def test_an_exception_lets_go_of_all_rows(emb: EmbeddingCollection, where: str) -> None:
    optimizer = hotrow.SGD(emb, lr=0.1)

    def fail(at: str) -> None:
        if at == where:
            raise KeyError(at)

    def train() -> None:
        for batch in hotrow.lookahead([batch_of(seed) for seed in range(9)], emb, depth=4):
            fail("before")
            out = emb(batch)
            fail("forward")
            out.backward(torch.ones_like(out))
            fail("backward")
            optimizer.step()
            fail("step")

    with pytest.raises(KeyError, match=where):
        train()
    optimizer.zero_grad()  # gradients outlive an exception, as everywhere in torch
    gc.collect()
    assert all_can_be_admitted(emb)


def test_files_go_with_the_collection(folder: Path) -> None:
    emb = make(folder)
    optimizer = hotrow.Adagrad(emb, lr=0.1)
    for batch in hotrow.lookahead([batch_of(seed) for seed in range(4)], emb, depth=2):
        emb(batch).sum().backward()
        optimizer.step()
    assert len(list(folder.rglob("*.rows"))) == 2
    del emb, optimizer
    gc.collect()
    assert list(folder.iterdir()) == []


def test_a_failure_while_files_are_made_can_be_tried_again(
    emb: EmbeddingCollection, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotrow.placement import tiers

    plain, calls = tiers.open_store, []

    def fail_once(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return plain(*args, **options)

    monkeypatch.setattr(tiers, "open_store", fail_once)
    with pytest.raises(OSError, match="No space left"):
        emb(batch_of(1))
    with torch.no_grad():
        assert torch.equal(emb(batch_of(1)), make(folder, tiers=False)(batch_of(1)))
    assert [store.rows.table for store in emb.placement.stores] == ["a", "b"], "those of the first try are gone"


@pytest.mark.parametrize("depth", [-1, 1.5, None])
def test_depths_that_are_refused(emb: EmbeddingCollection, depth: Any) -> None:
    with pytest.raises(ValueError, match=rf"depth is {depth}; it must be 0"):
        hotrow.lookahead([], emb, depth=depth)


def test_nothing_to_look_ahead_for(emb: EmbeddingCollection, tmp_path: Path) -> None:
    assert list(hotrow.lookahead([], emb)) == []
    batches = [batch_of(seed) for seed in range(3)]
    assert list(hotrow.lookahead(batches, make(tmp_path, tiers=False))) == batches
    assert list(hotrow.lookahead(batches, torch.nn.Linear(2, 2))) == batches
    with pytest.raises(ValueError, match=r"was given a list to look ahead for; pass the nn\.Module"):
        hotrow.lookahead(batches, [emb])  # type: ignore[arg-type]


def test_batches_of_another_kind(emb: EmbeddingCollection) -> None:
    for item in (torch.zeros(3, 2, dtype=torch.int64), (batch_of(1), 1.0), {"sparse": 1}, None):
        with pytest.raises(ValueError, match=rf"given a {type(item).__name__} among the batches; it knows Batch"):
            list(hotrow.lookahead([batch_of(0), item, batch_of(2)], emb))  # type: ignore[list-item]


@looped("depth", [0, 2])
def test_no_batch_is_taken_for_the_end(tmp_path: Path, depth: int) -> None:
    """Without tiers nobody looks at the batches, and one that is None is as good as any other."""
    batches = [batch_of(0), None, batch_of(2)]
    assert list(hotrow.lookahead(batches, make(tmp_path, tiers=False), depth=depth)) == batches  # type: ignore[type-var]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_bad_id_is_refused_when_its_turn_comes(emb: EmbeddingCollection, depth: int) -> None:
    """Not when it is announced: depth cannot move the step at which a run ends, nor what was trained until then."""
    batches = [batch_of(seed) for seed in range(6)]
    batches[3].values[50] = NUM_ROWS
    seen = []
    with pytest.raises(ValueError, match="feature 'b', sample 10, position 0: id 3000 is outside its table of 3000"):
        for batch in hotrow.lookahead(batches, emb, depth=depth):
            emb(batch)
            seen.append(batch)
    assert len(seen) == 3
    assert all_can_be_admitted(emb)
    skipped = [batch for batch in hotrow.lookahead(batches, emb, depth=depth) if batch is not batches[3]]
    assert len(skipped) == 5


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: its locks are tested here")
def test_threads_look_up_while_another_looks_ahead(folder: Path) -> None:
    """The first of them lays the files out, once; each gets the rows as they are."""
    emb, plain = make(folder), make(folder, tiers=False)
    errors: list[BaseException] = []

    def look_up(first: int, training: bool) -> None:
        try:
            batches = [batch_of(seed) for seed in range(first, first + 60)]
            for batch in hotrow.lookahead(batches, emb, depth=3) if training else batches:
                with torch.set_grad_enabled(training):
                    assert torch.equal(emb(batch).detach(), plain(batch).detach())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look_up, args=(100 * k, k == 0)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all_can_be_admitted(emb)
    assert len(list(folder.iterdir())) == 1


FORK = """
import os, sys, warnings, torch
warnings.simplefilter("ignore")
import hotrow
from hotrow.placement.stores import StoreError
torch.set_num_threads(1)

def make(folder):
    tables = [hotrow.TableConfig(name=n, num_embeddings=3000, embedding_dim=8, feature_names=(n,)) for n in "ab"]
    return hotrow.EmbeddingCollection(tables, memory=hotrow.Memory(dram=150_000, **{sys.argv[1]: folder}))

def batch_of(seed):
    ids = torch.randint(0, 3000, (400,), generator=torch.Generator().manual_seed(seed))
    return hotrow.KeyedJaggedTensor(("a", "b"), ids)

emb = make(sys.argv[2])
waiting = [batch_of(seed) for seed in range(4)]
with emb.placement.in_slots(0, torch.arange(2000), write=True):  # so that rows are read below
    pass
for batch in waiting:
    emb.placement.announce(batch)
if (child := os.fork()) == 0:
    for call in (lambda: emb(waiting[0]), lambda: emb.read_rows("a", slice(3)), emb.placement.flush,
                 lambda: next(iter(hotrow.lookahead([batch_of(8)], emb)))):
        try: call()
        except StoreError as error: print(error, flush=True)
    own = make(sys.argv[2])
    own(batch_of(9))
    del own, emb, waiting
    sys.exit(0)  # runs what is run at exit
assert os.waitpid(child, 0)[1] == 0
for batch in waiting:
    emb(batch)
emb.placement.flush()
print(sum(len(files) for _, _, files in os.walk(sys.argv[2])))
"""


@pytest.mark.slow_but("file")
@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: these are its threads")
@pytest.mark.parametrize("kind", ["ssd", "file"])
def test_a_forked_child_is_told_and_takes_nothing_away(folder: Path, kind: str) -> None:
    lines = run_python("-c", FORK, kind, folder, timeout=60).splitlines()
    assert len(lines) == 5 and lines[-1] == "2", "the parent's files are still there"
    assert all("belong to the process that this one was forked from" in line and "spawn" in line for line in lines[:4])


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: its map is measured")
def test_the_map_of_a_large_batch_is_given_back(emb: EmbeddingCollection) -> None:
    """The budget counts 8 bytes a slot; what is above is there while rows lie beside the cache."""
    emb(batch_of(1))
    tiers = emb.placement

    def map_bytes() -> list[int]:
        return [counts["map_bytes"] for counts in tiers.counters().values()]

    counted = [8 * slots.cached for slots in tiers.slots]
    large = KeyedJaggedTensor(("a", "b"), torch.arange(NUM_ROWS).repeat(2))
    for _ in range(3):
        assert map_bytes() == counted
        tiers.announce(large)
        assert all(now > least for now, least in zip(map_bytes(), counted, strict=True)), "the batch was too small"
        tiers.forget(large)


def resident_bytes(array: torch.Tensor, first: int) -> int:
    start = array.data_ptr() + first * array[:1].nbytes
    start += -start % mmap.PAGESIZE
    num_pages = (array.data_ptr() + array.nbytes - start) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * num_pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * mmap.PAGESIZE), found) == 0
    return mmap.PAGESIZE * sum(each & 1 for each in found)


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: its slots are measured")
@pytest.mark.skipif(sys.platform != "linux", reason="mincore of other systems says other things")
@pytest.mark.parametrize("in_flight", [0, 9000])
def test_the_slots_of_a_large_piece_are_given_back(folder: Path, in_flight: int) -> None:
    """Also while a batch lies beside the cache, whose rows stay what they are."""
    num_rows, dim = 140_000, 64
    table = TableConfig(name="a", num_embeddings=num_rows, embedding_dim=dim, feature_names=("a",))
    emb = EmbeddingCollection([table], memory=Memory(dram="2MiB", ssd=folder, force=True), seed=5)
    tiers = emb.placement
    tiers.write_every_row()
    batch = KeyedJaggedTensor(("a",), torch.arange(max(in_flight, 1)))
    tiers.announce(batch)
    beside = max(0, len(batch.values) - tiers.slots[0].cached)
    assert (beside > 0) == (in_flight > 0), "the batch was too small"
    plain = EmbeddingCollection([table], seed=5)
    for first in (50_000, 100_000, 50_000):
        with tiers.in_slots(0, torch.arange(first, first + 40_000)) as slots:
            assert torch.equal(tiers.weights["a"][slots], plain.placement.weights["a"][first : first + 40_000])
            used = resident_bytes(tiers.weights["a"], tiers.slots[0].cached)
        left = resident_bytes(tiers.weights["a"], tiers.slots[0].cached)
        assert used > 4 * dim * 40_000, "the piece was too small"
        assert left <= 4 * dim * beside + mmap.PAGESIZE
    assert torch.equal(emb(batch), plain(batch))


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing waits without it")
def test_waiting_for_room_is_a_stall(folder: Path) -> None:
    """Of batches that are announced and released, not of rows that are laid down for a checkpoint."""
    table = TableConfig(name="a", num_embeddings=20_000, embedding_dim=64, feature_names=("a",))
    emb = EmbeddingCollection([table], memory=Memory(dram=400_000, ssd=folder, force=True), seed=5)
    optimizer = hotrow.SGD(emb, lr=0.1)
    tiers = emb.placement

    def blocked_s() -> float:
        return tiers.counters()["a"]["blocked_ns"] / 1e9

    with tiers.in_slots(0, torch.arange(20_000), write=True):
        pass
    aside = blocked_s()
    assert aside > 0 and tiers.stall_s == 0, "nothing waited"
    for seed in range(4):
        ids = torch.randperm(20_000, generator=torch.Generator().manual_seed(seed))[:8000]
        batch = KeyedJaggedTensor(("a",), ids)
        tiers.announce(batch)
        assert tiers.stall_s >= (blocked_s() - aside) * (1 - 1e-9)
        emb(batch).sum().backward()
        before = tiers.stall_s, blocked_s()
        optimizer.step()
        assert tiers.stall_s - before[0] == pytest.approx(blocked_s() - before[1])
        assert blocked_s() > before[1] > aside, "nothing waited"


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: its writes are made to fail")
def test_a_write_that_fails_ends_batches_whose_rows_are_there(folder: Path) -> None:
    """Those announced before it too, the last of a loader, after which nothing is announced."""
    emb = make(folder, ssd=folder, force=True)
    optimizer = hotrow.SGD(emb, lr=0.1)
    batches = [batch_of(seed) for seed in range(3)]
    seen = []
    with pytest.raises(StoreError, match=r"writing row.* of table 'b' in .* Input/output error"):
        for batch in hotrow.lookahead(batches, emb, depth=3):
            emb(batch).sum().backward()
            optimizer.step()
            seen.append(batch)
            store = emb.placement.stores[1]
            store.native.inject(True, 1, errno.EIO)
            store.write([7], [0], [np.zeros((1, 32), np.uint8)])
            while store.failure() is None:
                time.sleep(0.001)
    assert seen == batches[:1]


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: its reads are made to fail")
def test_a_read_that_fails_ahead_ends_batches_whose_rows_are_there(folder: Path) -> None:
    """That of a loader's last batch, when all are announced: those before it need no row from disk."""
    emb = make(folder, ssd=folder, force=True)
    optimizer = hotrow.SGD(emb, lr=0.1)
    for seed in [*range(40), 99]:
        emb(batch_of(seed)).sum().backward()
        optimizer.step()
    emb.placement.flush()
    store, seen = emb.placement.stores[1], []
    reads = store.counters()["read_rows"]
    with torch.no_grad():
        emb(batch_of(99))
    assert store.counters()["read_rows"] == reads, "they do"
    store.native.inject(False, 1, errno.EIO)
    with pytest.raises(StoreError, match=r"reading row.* of table 'b' in .* Input/output error"):
        for batch in hotrow.lookahead([batch_of(99), batch_of(99), batch_of(0)], emb, depth=3):
            if seen:  # the first step may come before the error
                while store.failure() is None:
                    time.sleep(0.001)
            emb(batch).sum().backward()
            optimizer.step()
            seen.append(batch)
    assert len(seen) <= 1, "a step more was taken"


def test_a_file_that_is_cut_off_ends_the_run(folder: Path) -> None:
    """Rows that cannot be read are an error that names the table; nothing goes on with others in their place.

    Of a mapped file it would be a signal: docs/memory.md.
    """
    emb = make(folder, ssd=folder)
    optimizer = hotrow.SGD(emb, lr=0.1)

    def train(seeds: range) -> None:
        for batch in hotrow.lookahead([batch_of(seed, size=400) for seed in seeds], emb, depth=2):
            emb(batch).sum().backward()
            optimizer.step()

    train(range(20))
    for path in folder.rglob("*.rows"):
        os.truncate(path, 4096)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"table '[ab]' .*"):
            train(range(20, 30))
