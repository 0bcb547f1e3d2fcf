"""Law 2 on devices: with slots in device memory before tables in DRAM or tiers, all bits are those without.

To the bit where the kernels are interpreted, else within docs/numerics.md. Schedules are drawn at random, as in
test_tiers.py; the truth is the same schedule on a collection whose lookups find every row in DRAM.
"""

import copy
import errno
import gc
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE, assert_agrees, slow_interpreted
from test_tiers import OPTIMIZERS
from torch import Tensor

import hotrow
from hotrow import DeviceMemory, EmbeddingCollection, KeyedJaggedTensor
from hotrow.kernels import ops, triton_ops
from hotrow.kernels.triton_moves import Moment, Streams
from hotrow.optim import SGD
from hotrow.placement import device
from hotrow.placement.budget import MOVING_SHARE, TableDemand, TableSlots, plan_slots_on_device
from hotrow.placement.slots import COUNTS, RowSlots, directory_of
from hotrow.placement.stores import StoreError
from hotrow.placement.tiers import Flight, Tiers
from hotrow.placement.worker import Worker
from hotrow.tables import TableConfig, Uniform

pytestmark = pytest.mark.usefixtures("one_thread")
FEATURES = ("a", "b", "c", "d")
ROWS = {"t": 60, "u": 90, "v": 5}
WIDTH = 6 + 2 * 11 + 4


def tables(dtype: str) -> list[TableConfig]:
    init = Uniform(zero_rows=1)
    kind: Any = {"dtype": dtype}
    return [
        TableConfig(name="t", num_embeddings=60, embedding_dim=6, feature_names=("a",), init=init, **kind),
        TableConfig(name="u", num_embeddings=90, embedding_dim=11, feature_names=("b", "d"), pooling="mean", **kind),
        TableConfig(name="v", num_embeddings=5, embedding_dim=4, feature_names=("c",), **kind),
    ]


def make_batch(rng: np.random.Generator, *, size: int = 4) -> KeyedJaggedTensor:
    """Samples with bags of 0 to 2 skewed ids, or one-hot; weighted at times."""
    limits = [ROWS["t"], ROWS["u"], ROWS["v"], ROWS["u"]]
    one_hot = rng.random() < 0.4
    lengths = np.ones(4 * size, np.int64) if one_hot else rng.integers(0, 3, 4 * size)
    counts = lengths.reshape(4, size).sum(1)
    ids = np.concatenate([rng.integers(0, n, k) * (rng.random(k) < 0.7) for n, k in zip(limits, counts, strict=True)])
    values = torch.from_numpy(ids.astype(np.int64 if rng.random() < 0.5 else np.int32))
    weights = torch.from_numpy(rng.random(len(ids)).astype(np.float32)) if rng.random() < 0.3 else None
    return KeyedJaggedTensor(FEATURES, values, weights, lengths=None if one_hot else torch.from_numpy(lengths))


def plan_for(rows: int, pinned: int = 0) -> Any:
    """So many slots for each of the two large tables, of which the first for good."""

    def plan(demands: Any, budget_bytes: int) -> list[TableSlots]:
        return [TableSlots(min(pinned, rows - 1), rows - min(pinned, rows - 1))] * 2 + [TableSlots(5, 0)]

    return plan


def tiers(folder: Path, cached: int, kind: str = "ssd", **more: Any) -> hotrow.Memory:
    """So many rows of each of the two large tables in DRAM, the rest in files of one kind or two."""
    folders: dict[str, Any] = {"ssd": {"ssd": folder, "force": True}, "file": {"file": folder}}
    folders["both"] = {**folders["ssd"], "file": folder / "middle", "file_bytes": "64KiB"}
    plan = lambda demands, budget_bytes: [TableSlots(0, cached)] * 2 + [TableSlots(5, 0)]  # noqa: E731
    return hotrow.Memory(dram="256KiB", plan=plan, io="threads", **folders[kind], **more)


class Side:
    """A collection, its optimizer and a dense layer on the same device; `seen` is all it ever returned."""

    def __init__(self, dtype: str, optimizer: str, memory: DeviceMemory | None) -> None:
        self.emb = EmbeddingCollection(tables(dtype), memory=memory, seed=3)
        self.optimizer = OPTIMIZERS[optimizer](self.emb)
        self.device = torch.device("cpu") if memory is None else DEVICE
        self.dense = torch.nn.Linear(WIDTH, 1, bias=False)
        with torch.no_grad():
            self.dense.weight.copy_(torch.linspace(-1, 1, WIDTH))
        self.dense.to(self.device)
        self.dense_optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.05)
        self.seen: list[Tensor] = []

    def forward(self, batch: KeyedJaggedTensor) -> None:
        # One sample after the other: a matrix product of torch sums in an order that depends on the device.
        loss = (self.emb(batch) * self.dense.weight).sum(1).square().sum()
        loss.backward()
        self.seen.append(loss.detach().cpu())

    def sequence(self, batch: KeyedJaggedTensor) -> None:
        parts = self.emb.sequence(batch)
        self.seen.extend(values.detach().cpu().clone() for values, _ in parts.values())
        sum((values * values).sum() for values, _ in parts.values()).backward()  # type: ignore[union-attr]

    def evaluate(self, batch: KeyedJaggedTensor) -> None:
        with torch.no_grad():
            self.seen.append(self.emb(batch).cpu().clone())

    def step(self) -> None:
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad()
        self.optimizer.step()

    def train(self, batch: KeyedJaggedTensor) -> None:
        self.forward(batch)
        self.step()

    def arrays(self) -> list[Tensor]:
        """Weights, split ones joined, and states of every row, as they are below."""
        weights = [self.emb.read_rows(name, slice(0, num_rows)) for name, num_rows in ROWS.items()]
        if self.emb.placement.find(Tiers) is not None:
            return weights + [rows.read(slice(0, rows.shape[0])) for rows in self.optimizer.state_rows().values()]
        states = [tensor for state in self.optimizer.state_dict()["state"].values() for tensor in state.values()]
        return weights + states


def drive(sides: list[Side], seed: int, *, depth: int, num_batches: int = 9, size: int = 4) -> None:
    """The same random schedule on every side."""
    for side in sides:
        rng = np.random.default_rng(seed)
        batches = [make_batch(rng, size=size) for _ in range(num_batches)]
        stray, done = make_batch(rng, size=size), 0
        while done < num_batches:
            for batch in hotrow.lookahead(batches[done:], side.emb, depth=depth):
                done += 1
                what = rng.random(6)
                if what[0] < 0.08:
                    continue  # skipped
                if what[1] < 0.2 and batch.values.numel():
                    batch.values[int(rng.integers(batch.values.numel()))] = int(rng.integers(0, 5))
                if what[2] < 0.2:
                    side.evaluate(stray)
                if what[3] < 0.15:
                    side.sequence(batch)
                side.forward(batch)
                if what[3] > 0.9:
                    side.forward(batch)
                if what[4] > 0.9:
                    continue  # several batches to a step
                if what[4] < 0.05:
                    side.optimizer.zero_grad()
                if what[5] > 0.9:
                    side.arrays()  # read out between forward and step
                side.step()
                if what[5] < 0.1:
                    break  # the loop is left early
        side.step()


def check(plain: Side, other: Side) -> None:
    """On a GPU differences of single operations add up over steps, and float16 rounds some the other way."""
    for number, (a, b) in enumerate(zip(other.seen, plain.seen, strict=True)):
        assert_agrees(a, b, f"output {number}", rtol=1e-3, atol=1e-4)
    for number, (a, b) in enumerate(zip(other.arrays(), plain.arrays(), strict=True)):
        assert_agrees(a, b, f"array {number}", rtol=1e-3, atol=1e-4)


def make_sides(dtype: str, optimizer: str, **memory: Any) -> list[Side]:
    where = DeviceMemory(**{"hbm": "1MiB", "device": str(DEVICE), **memory})
    return [Side(dtype, optimizer, None), Side(dtype, optimizer, where)]


@pytest.mark.parametrize(
    ("optimizer", "dtype", "depth"),
    [
        ("adam", "float32", 2),
        *[
            pytest.param(*case, marks=slow_interpreted)
            for case in (("sgd", "float16", 0), ("adagrad", "float16", 3), ("ftrl", "bfloat16", 1))
        ],
        *[pytest.param(name, "float32", 2, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "adam"],
        pytest.param("row_wise_adagrad", "bfloat16", 2, marks=pytest.mark.slow),
    ],
)
def test_every_optimizer_and_storage(optimizer: str, dtype: str, depth: int) -> None:
    sides = make_sides(dtype, optimizer, plan=plan_for(22, pinned=3))
    drive(sides, seed=len(optimizer) + depth, depth=depth, num_batches=12, size=2)
    check(*sides)
    rows = sides[1].emb.placement
    counts = rows.counters()["u"]
    assert counts["evicted_rows"] > 5 and counts["written_rows"] > 5, "the schedule did not exercise the slots"
    assert (rows.announced.foreseen > 0) == (depth > 0)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "depth", "kind"),
    [
        pytest.param("row_wise_adagrad", "float32", 2, "both", marks=slow_interpreted),
        pytest.param("adagrad", "bfloat16", 3, "ssd", marks=slow_interpreted),
        ("sgd", "float16", 2, "file"),
        *[
            pytest.param(name, "float32", 4 - k, ("ssd", "both")[k % 2], marks=pytest.mark.slow)
            for k, name in enumerate(OPTIMIZERS)
        ],
    ],
)
def test_every_optimizer_before_tiers(tmp_path: Path, optimizer: str, dtype: str, depth: int, kind: str) -> None:
    """Fewer rows in DRAM than on the device: what leaves the one soon leaves the other too."""
    sides = make_sides(dtype, optimizer, plan=plan_for(22, pinned=3), below=tiers(tmp_path, 9, kind))
    drive(sides, seed=len(optimizer) + depth, depth=depth, num_batches=12, size=2)
    check(*sides)
    rows, below = sides[1].emb.placement, sides[1].emb.placement.below
    above, counts = rows.counters()["u"], below.counters()["u"]
    assert above["evicted_rows"] > 5 and above["written_rows"] > 5, "the schedule did not exercise the slots"
    read, written = counts["read_rows"] + counts["middle_hits"], counts["written_rows"] + counts["middle_written_bytes"]
    assert read > 5 and written > 5, "the schedule did not exercise the files"
    assert (rows.announced.foreseen > 0) == (depth > 0)


@slow_interpreted
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1))])
def test_random_schedules_before_tiers(tmp_path: Path, seed: int) -> None:
    """From caches that hold fewer rows than a batch to all in DRAM; waits for room, and pins."""
    rng = np.random.default_rng(seed)
    dtype, optimizer = str(rng.choice(["float32", "float16", "bfloat16"])), str(rng.choice(list(OPTIMIZERS)))
    below = tiers(tmp_path, int(rng.choice([3, 12, 60])), str(rng.choice(["ssd", "file", "both"])))
    rows = int(rng.choice([24, 40, 59]))
    plan = plan_for(rows, int(rng.integers(0, 8)))
    sides = make_sides(dtype, optimizer, hbm=["1MiB", "12KiB"][seed % 2], plan=plan, below=below)
    drive(sides, seed, depth=int(rng.integers(0, 6)), num_batches=7, size=int(rng.integers(2, 4)))
    check(*sides)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3))])
def test_random_schedules_and_sizes(seed: int) -> None:
    """From slots that two batches fill to all rows on the device; rows on their way go in pieces at times."""
    rng = np.random.default_rng(seed)
    dtype, optimizer = str(rng.choice(["float32", "float16", "bfloat16"])), str(rng.choice(list(OPTIMIZERS)))
    rows = int(rng.choice([24, 40, 59]))
    more = {"plan": plan_for(rows, int(rng.integers(0, 8)))} if seed % 3 else {}
    sides = make_sides(dtype, optimizer, hbm=["1MiB", "12KiB"][seed % 2] if more else "1MiB", **more)
    drive(sides, seed, depth=int(rng.integers(0, 5)), num_batches=7, size=2)
    check(*sides)


def by_table(directory: Any, *, dirty: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The rows that have slots, and the slots."""
    return list(zip(*RowSlots.of(directory.resident(dirty=dirty)), strict=True))


def settled(rows: Any) -> Any:
    """The placement, when everything that it was asked is done."""
    rows.counters()
    return rows


def check_map(plain: Side, other: Side) -> int:
    """Rows that the map on the device gives a slot, and those below the prefix, lie there with the bits that they have
    in DRAM, each in a slot of its own. Returns how many there are."""
    rows, first, count = settled(other.emb.placement), 0, 0
    there = [dict(zip(ids.tolist(), slots.tolist(), strict=True)) for ids, slots in by_table(rows.directory)]
    assert rows.map.cpu().tolist() == [
        lies.get(row, -1)
        for lies, own, num_rows in zip(there, rows.slots, ROWS.values(), strict=True)
        for row in range(own.pinned, num_rows)
    ]
    for name, own, parts in zip(ROWS, rows.slots, rows._parts, strict=True):
        entries = rows.map[first : first + ROWS[name] - own.pinned].cpu()
        first += len(entries)
        there = torch.nonzero(entries >= 0).flatten()
        ids, slots = torch.cat([torch.arange(own.pinned), there + own.pinned]), torch.arange(own.pinned)
        slots = torch.cat([slots, entries[there].long()])
        assert len(set(slots.tolist())) == len(slots), "two rows share a slot"
        assert_agrees(parts[0].cpu()[slots], plain.emb.weights[name][ids], name, rtol=1e-3, atol=1e-4)
        count += len(there)
    return count


@pytest.mark.parametrize("pinned", [pytest.param(0, marks=slow_interpreted), 7])
def test_the_map_on_the_device_tells_where_rows_lie(pinned: int) -> None:
    """After every step of a skewed stream, some batches of it in micro-batches, some skipped."""
    sides = make_sides("float32", "adagrad", plan=plan_for(18, pinned))
    rng = np.random.default_rng(pinned)
    batches = [make_batch(rng).in_parts([0, 1, 4] if number % 5 == 4 else None) for number in range(14)]
    looking = [hotrow.lookahead(batches, side.emb, depth=3) for side in sides]
    for number, pair in enumerate(zip(*looking, strict=True)):
        if number % 6 == 3:
            continue
        for side, batch in zip(sides, pair, strict=True):
            side.train(batch)
        assert check_map(*sides) >= 8
    check(*sides)
    counts = sides[1].emb.placement.counters()
    assert all(counts[name]["evicted_rows"] > 5 for name in ("t", "u")), "the stream did not exercise the map"


def test_ids_that_change_after_their_lookup_change_no_other_row() -> None:
    """A row that the batch did not name may have no slot."""
    sides = make_sides("float32", "sgd", plan=plan_for(8))
    for side in sides:
        batch = KeyedJaggedTensor(FEATURES, torch.tensor([1, 2, 3, 4]))
        side.forward(batch)
        if side is sides[1]:
            batch.values[:2] = 50
        side.step()
    check(*sides)


def test_bags_that_change_after_their_lookup_change_no_other_row() -> None:
    """An id would look another table up."""
    sides = make_sides("float32", "sgd", plan=plan_for(8))
    for side in sides:
        batch = KeyedJaggedTensor(FEATURES, torch.tensor([40, 41, 3, 4, 5]), lengths=torch.tensor([2, 1, 1, 1]))
        given = side.emb.placement.take(batch, training=True)[1]
        side.forward(batch)
        if side is sides[1]:
            batch.offsets[1] = 1
            assert given.offsets.tolist() == [0, 2, 3, 4, 5], "the rest is memory of others"
        side.step()
    check(*sides)


class _Numbered(Moment):
    reached_by_compute = -1

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def precede(self) -> None:
        _Numbered.reached_by_compute = max(_Numbered.reached_by_compute, self.number)


def test_a_batch_waits_for_rows_that_were_brought_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that asked for them is skipped; nothing comes for this one. Their order is all that a CPU can show."""
    numbers, last = itertools.count(), list[int]()
    monkeypatch.setattr(Streams, "moment", lambda own, stream=None: _Numbered(next(numbers)))
    rows = make_sides("float32", "sgd", plan=plan_for(24))[1].emb.placement
    batches = [KeyedJaggedTensor(FEATURES, torch.tensor([1, 2, 3, 4])) for _ in range(2)]
    rows.announce(batches[0])
    settled(rows)
    last.append(next(numbers))
    rows.announce(batches[1])
    rows.forget(batches[0])
    rows._stale, _Numbered.reached_by_compute = False, -1
    brought = settled(rows).announced.get(batches[1]).batch.landing.arrived
    rows.take(batches[1], training=True)
    assert brought.number == last[0] - 1 == _Numbered.reached_by_compute


def test_copies_come_after_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after that of a batch which another thread ends last: its moment is of the stream of the lookup."""
    copying, waited = Streams.copying, list[Any]()

    def seen(own: Streams, *, after: Moment) -> Any:
        waited.append(after)
        return copying(own, after=after)

    streams = {threading.get_ident(): "of the step"}
    monkeypatch.setattr(Streams, "current", lambda own: streams.get(threading.get_ident(), "of another thread"))
    monkeypatch.setattr(Streams, "moment", lambda own, stream=None: _On(stream or own.current()))
    monkeypatch.setattr(Streams, "copying", seen)
    rows = make_sides("float32", "sgd", plan=plan_for(24))[1].emb.placement
    flights = [rows.take(batch_of(torch.arange(4 * k, 4 * k + 4)), training=False)[0] for k in range(3)]
    settled(rows)
    waited.clear()
    flights[0].release(updated=False)
    threads = [threading.Thread(target=flights.pop) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    settled(rows)
    assert [moment.stream for moment in waited] == ["of the step"] * 3


class _On(Moment):
    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream


def test_a_tiny_cache_serves_as_many_batches_as_fit() -> None:
    """Announcements beyond it wait for their turn, and no result shows it."""
    sides = make_sides("float32", "adagrad", plan=plan_for(24))
    for side in sides:
        rng = np.random.default_rng(1)
        batches = [make_batch(rng, size=6) for _ in range(8)]
        for batch in hotrow.lookahead(batches, side.emb, depth=5):
            side.train(batch)
    check(*sides)
    rows = sides[1].emb.placement
    assert rows.postponed > 0 and rows.announced.foreseen > 0
    assert settled(rows).directory.num_free == [24, 24, 0], "rows are still held"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4))])
def test_an_evaluation_may_look_up_more_rows_than_there_are_slots(seed: int) -> None:
    """Jagged, one-hot and weighted batches, in halves until they fit."""
    sides = make_sides("float32", "sgd", plan=plan_for(22, pinned=3))
    rng = np.random.default_rng(seed)
    small, crowd = make_batch(rng, size=2), make_batch(rng, size=40)
    rows = sides[1].emb.placement
    with torch.no_grad():
        assert rows.fits(small) and not rows.fits(crowd)
    assert rows.fits(crowd), "a training batch is never halved: it is refused"
    for side in sides:
        side.evaluate(crowd)
        side.train(small)
        side.evaluate(crowd)
    check(*sides)


def test_a_row_of_each_table_may_be_more_than_a_piece() -> None:
    """Rows on their way go in pieces of a sixteenth of the budget; none of them is without rows."""
    kinds = [TableConfig(name=n, num_embeddings=40, embedding_dim=64, feature_names=(n,)) for n in FEATURES]
    memory = DeviceMemory(hbm=40 * 64 * 4, device=str(DEVICE), plan=lambda *_: [TableSlots(0, 3)] * 4)
    plain, other = (EmbeddingCollection(kinds, memory=where, seed=3) for where in (None, memory))
    for emb in (plain, other):
        optimizer = SGD(emb, lr=0.1)
        for row in range(5):
            emb(KeyedJaggedTensor(FEATURES, torch.tensor([row] * 4))).sum().backward()
            optimizer.step()
    for name in FEATURES:
        assert_agrees(*(emb.read_rows(name, slice(0, 5)) for emb in (other, plain)), name, rtol=1e-3, atol=1e-4)


def test_too_few_slots_are_refused_with_the_number_to_use() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(limit, generator=generator)[:50] for limit in (60, 90)])
    lengths = torch.ones(4, 50, dtype=torch.int64)
    lengths[2:] = 0
    batch = KeyedJaggedTensor(FEATURES, ids.flatten(), lengths=lengths.flatten())
    small = Side("float32", "adam", DeviceMemory(hbm=4000, device=str(DEVICE)))
    with pytest.raises(ValueError, match=r"the batch looks up 50 rows of table 't', \d+ more than there are slots"):
        small.emb(batch)
    with pytest.raises(ValueError, match="raise it to") as refused:
        small.emb(batch)
    number = int(str(refused.value).split("hbm=")[1].split(")")[0])
    enough = Side("float32", "adam", DeviceMemory(hbm=number, device=str(DEVICE)))
    enough.train(batch)
    with pytest.raises(ValueError, match="would have 0 pinned and 0 other slots") as refused:
        Side("float32", "adam", DeviceMemory(hbm=200, device=str(DEVICE)))
    number = int(str(refused.value).split("hbm=")[1].split(")")[0])
    Side("float32", "adam", DeviceMemory(hbm=number, device=str(DEVICE)))


def test_tiers_are_asked_for_rows_before_their_batch(tmp_path: Path) -> None:
    """Also for a batch without room on the device; the far half of what was announced is not waited for."""
    side = make_sides("float32", "sgd", plan=plan_for(24), below=tiers(tmp_path, 50))[1]
    rows, below = side.emb.placement, side.emb.placement.below

    def asked() -> int:
        return below.counters()["t"]["rows"] + below.counters()["u"]["rows"]

    batches = [batch_of(torch.arange(*ids)) for ids in ((0, 8), (8, 16), (20, 40))]
    for batch, num_asked in zip(batches, (16, 16, 40), strict=True):
        before = asked()
        rows.announce(batch)
        settled(rows)
        assert asked() - before == num_asked, "rows of t and u, once each"
    assert rows.postponed == 1 and len(rows._landings) == 1
    for batch in batches:
        side.train(batch)
    assert not len(rows.announced) and not rows._landings
    assert rows.announced.foreseen == 2 and rows.stall_s > 0


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: its writes are made to fail")
def test_a_store_that_failed_ends_batches_whose_rows_are_there(tmp_path: Path) -> None:
    """Those announced before it too, the last of a loader, after which nothing is announced."""
    side = make_sides("float32", "sgd", below=tiers(tmp_path, 50))[1]
    rng = np.random.default_rng(0)
    batches = [make_batch(rng) for _ in range(3)]
    seen = []
    with pytest.raises(StoreError, match=r"writing row.* of table 'u' in .* Input/output error"):
        for batch in hotrow.lookahead(batches, side.emb, depth=3):
            side.train(batch)
            seen.append(batch)
            store = side.emb.placement.below.stores[1]
            store.native.inject(True, 1, errno.EIO)
            store.write([7], [0], [np.zeros((1, store.rows.record_bytes), np.uint8)])
            while store.failure() is None:
                time.sleep(0.001)
    assert seen == batches[:1]


def test_rows_whose_way_back_is_cut_short_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caught error of the device: the rows that were to leave are nowhere, so nothing is looked up or saved after."""
    side = make_sides("float32", "sgd", plan=plan_for(20))[1]
    rng = np.random.default_rng(0)

    def train() -> None:
        side.train(make_batch(rng))

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    train()
    with monkeypatch.context() as patch:
        patch.setattr(side.emb.placement._mover, "send_back", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(20):
                train()
    for call in (train, lambda: side.emb.read_rows("t", slice(0, 1))):
        with pytest.raises(StoreError, match=r"are lost: OutOfMemoryError .* load the last checkpoint"):
            call()


def test_a_step_that_waits_for_rows_has_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not while they come beside it. By a clock that stands still but for waits of a second."""
    rows = make_sides("float32", "sgd", plan=plan_for(24), below=tiers(tmp_path, 50))[1].emb.placement
    wait, now = Flight.wait, [0.0]

    def wait_longer(flight: Flight) -> None:
        now[0] += 1
        wait(flight)

    monkeypatch.setattr(Flight, "wait", wait_longer)
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    rows._stale = False
    batches = [batch_of(torch.arange(first, first + 8)) for first in (1, 9)]
    for batch in batches:
        rows.announce(batch)
    assert settled(rows).stall_s == 0 and now == [1], "the first one has landed"
    flights = [rows.take(batch, training=True)[0] for batch in batches]
    assert rows.stall_s == 1 and not any(own.released for own in flights)


def batch_of(ids: Tensor) -> KeyedJaggedTensor:
    """These ids in both large tables."""
    return KeyedJaggedTensor(FEATURES, torch.cat([ids, ids, torch.zeros_like(ids), ids]))


class Held:
    """Keeps a placement's worker from working until `let_go`."""

    def __init__(self, rows: Any) -> None:
        self._go = threading.Event()
        rows._worker.ask(self._go.wait)

    def let_go(self) -> None:
        self._go.set()


def test_a_step_announces_without_waiting_and_waits_for_its_own_rows_alone() -> None:
    """Both would wait for ever if they waited for what comes later."""
    sides = make_sides("float32", "adagrad", plan=plan_for(40))
    rows = sides[1].emb.placement
    zero, first, second = (batch_of(torch.arange(k, k + 8)) for k in (0, 8, 16))
    sides[1].train(zero)
    rows.announce(first)
    settled(rows)
    held = Held(rows)
    rows.announce(second)
    sides[1].train(first)
    assert rows.announced.foreseen == 1 and not rows.announced.get(second).asked.done()
    held.let_go()
    sides[1].train(second)
    for batch in (zero, first, second):
        sides[0].train(batch)
    check(*sides)
    assert rows.announced.foreseen == 2


def test_what_is_announced_are_the_ids_of_that_moment() -> None:
    """Those that a batch has when its turn comes may be others."""
    sides = make_sides("float32", "sgd", plan=plan_for(24))
    rows, batch = sides[1].emb.placement, batch_of(torch.arange(4))
    held = Held(rows)
    rows.announce(batch)
    batch.values[0] = 59
    held.let_go()
    for side in sides:
        side.train(batch)
    check(*sides)
    assert (rows.announced.altered, rows.announced.foreseen) == (1, 0)


def test_what_lands_does_not_depend_on_time(tmp_path: Path) -> None:
    """Rows that have landed make room below: a worker that comes late lands them as early as one that does not."""

    def outcome(name: str, *, late: bool) -> list[int]:
        rows = make_sides("float32", "sgd", plan=plan_for(59), below=tiers(tmp_path / name, 50))[1].emb.placement
        left = []
        held = Held(rows) if late else None
        for k in range(5):
            rows.announce(batch_of(torch.arange(6 * k, 6 * k + 6)))
            left.append(rows._worker.ask(lambda: len(rows._landings)))
            if held is None:
                settled(rows)
        if held is not None:
            held.let_go()
        return [number.result() for number in left]

    assert outcome("early", late=False) == outcome("late", late=True) == [1, 1, 2, 2, 3]


@slow_interpreted
def test_nothing_that_is_decided_depends_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow worker and a fast one: the same rows come and go, as many batches are postponed."""

    def outcome() -> list[Any]:
        side = make_sides("float32", "sgd", plan=plan_for(24, pinned=2))[1]
        drive([side], seed=8, depth=4, num_batches=10)
        rows = settled(side.emb.placement)
        lie = [own.tolist() for pair in by_table(rows.directory) for own in pair]
        seen = [float(own.sum()) for own in side.seen]
        return [rows.postponed, rows.counters(), rows.announced.counts(), lie, seen]

    admit, rng = device.Device._admit, np.random.default_rng(4)

    def admit_late(own: device.Device, batch: device.Admission) -> bool:
        time.sleep(0.003 * rng.random())
        return admit(own, batch)

    fast = outcome()
    monkeypatch.setattr(device.Device, "_admit", admit_late)
    assert outcome() == fast and fast[0] > 0


@pytest.mark.parametrize("unannounced", [False, True])
def test_what_stops_the_worker_is_raised_in_the_next_step(monkeypatch: pytest.MonkeyPatch, unannounced: bool) -> None:
    """As itself, so that a run can name the budget, and from then on as rows that are lost."""
    side = make_sides("float32", "sgd", plan=plan_for(20))[1]
    rows = side.emb.placement
    first = batch_of(torch.arange(4))
    side.train(batch_of(torch.arange(10, 14)))
    rows.announce(first)
    settled(rows)

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rows._mover, "point", no_memory)
    rows.announce(batch_of(torch.arange(20, 24)))
    settled(rows)
    with pytest.raises(torch.OutOfMemoryError):
        side.forward(batch_of(torch.arange(30, 34)) if unannounced else first)
    with pytest.raises(StoreError, match=r"are lost: OutOfMemoryError .* load the last checkpoint"):
        side.forward(first)


def test_a_thread_that_the_system_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker("tried")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            worker.ask(lambda: 1)
    assert worker.ask(lambda: 2).result(60) == 2
    worker.close()


def test_the_worker_ends_with_its_tables_and_leaves_nothing_undone() -> None:
    def worker(side: Side) -> threading.Thread:
        before = {*threading.enumerate()}
        side.emb.placement.announce(batch_of(torch.arange(4)))
        (thread,) = {*threading.enumerate()} - before
        return thread

    side = make_sides("float32", "sgd", plan=plan_for(24))[1]
    thread = worker(side)
    side.emb.placement.close()
    assert not thread.is_alive() and side.emb.placement.counters()["t"]["read_rows"] == 4
    side = make_sides("float32", "sgd", plan=plan_for(24))[1]
    thread = worker(side)
    side.train(batch_of(torch.arange(4)))
    del side
    for _ in range(600):  # while the worker is at work it holds the tables
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            return
    raise AssertionError("the tables have gone, and their thread has not")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="CUDA itself refuses a forked child")
def test_a_forked_child_drops_its_leases_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has copies of; the parent's stay."""
    side = make_sides("float32", "sgd", plan=plan_for(24))[1]
    out = side.emb(batch_of(torch.arange(4)))
    said = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    child = os.fork()
    if not child:
        del out
        gc.collect()
        os._exit(len(said))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert settled(side.emb.placement).directory.num_free == [20, 20, 0]
    out.sum().backward()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="CUDA itself refuses a forked child")
def test_a_forked_child_is_refused() -> None:
    """Its worker is not in it; waiting for it would never end."""
    side = make_sides("float32", "sgd", plan=plan_for(24))[1]
    side.train(batch_of(torch.arange(4)))
    reader, writer = os.pipe()
    if not os.fork():
        try:
            side.emb(batch_of(torch.arange(4)))
        except StoreError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "that this one was forked from" in said.read()
    side.forward(batch_of(torch.arange(4)))


def test_ids_are_copied_to_the_device_once() -> None:
    """Those of a batch that `take` gave; what else is looked up may have changed since."""
    batch = batch_of(torch.arange(4))
    own, meta = triton_ops.OwnIds.replacing(batch, batch.values.clone()), torch.device("meta")
    assert triton_ops._Uploaded.of(own, meta).values is triton_ops._Uploaded.of(own, meta).values
    assert triton_ops._Uploaded.of(batch, meta).values is not triton_ops._Uploaded.of(batch, meta).values
    rows = make_sides("float32", "sgd", plan=plan_for(24))[1].emb.placement
    assert isinstance(rows.take(batch, training=True)[1], triton_ops.OwnIds)


@slow_interpreted
def test_a_plan_by_counts_gives_often_used_rows_slots_for_good() -> None:
    counts = {name: np.arange(n, 0, -1) ** 3 for name, n in ROWS.items()}
    plan = hotrow.plan_by_counts(counts, num_steps=10_000_000, depth=1, least_cached=dict.fromkeys(ROWS, 20))
    sides = make_sides("float32", "adagrad", hbm=12_000, plan=plan)
    drive(sides, seed=3, depth=1, num_batches=6, size=2)
    check(*sides)
    rows = sides[1].emb.placement
    assert rows is not None and all(own.pinned for own in rows.slots)
    assert not all(own.pinned == n for own, n in zip(rows.slots, ROWS.values(), strict=True))


def test_slots_stay_within_the_budget() -> None:
    for hbm in (3000, 9000, 30_000, 10**6):
        side = Side("bfloat16", "adagrad", DeviceMemory(hbm=hbm, device=str(DEVICE)))
        rows = side.emb.placement
        held = sum(array.nbytes for parts in rows._parts for array in parts)
        assert held <= hbm - hbm // MOVING_SHARE
    assert [sum(own) for own in rows.slots] == list(ROWS.values()), "all rows fit into the last"


def test_a_plan_that_pins_prefixes_is_asked_a_few_times() -> None:
    """Where the map of all rows is more than the budget, each round would need a map of one row more."""
    calls = list[int]()

    def plan(tables: Any, left: int) -> list[TableSlots]:
        calls.append(left)
        return [TableSlots(min(left // 4, tables[0].num_rows), 0)]

    memory = DeviceMemory(hbm=400_000, device=str(DEVICE), plan=plan)
    assert memory.slots([TableDemand("item", 200_000, 4)]) == [TableSlots(0, 0)] and len(calls) < 20


def test_small_tables_come_whole_and_others_get_as_many_rows_each() -> None:
    demands = [TableDemand("a", 1000, 8), TableDemand("b", 10, 80), TableDemand("c", 70, 100)]
    assert plan_slots_on_device(demands, 10_000) == [TableSlots(0, 275), TableSlots(10, 0), TableSlots(0, 70)]
    assert plan_slots_on_device(demands, 15_800) == [TableSlots(1000, 0), TableSlots(10, 0), TableSlots(70, 0)]


def step_both(plain: Side, other: Side, seed: int) -> None:
    """Steps on the same batches from the same dense weights, then everything is the same."""
    plain.dense.load_state_dict(other.dense.state_dict())
    rng = np.random.default_rng(seed)
    for side in (plain, other):
        side.seen.clear()
    for batch in [make_batch(rng, size=2) for _ in range(3)]:
        for side in (plain, other):
            side.train(batch)
    check(plain, other)


@pytest.mark.parametrize("in_tiers", [pytest.param(False, marks=slow_interpreted), True], ids=["dram", "tiers"])
def test_checkpoints_load_into_the_other_kind(tmp_path: Path, in_tiers: bool) -> None:
    """Saved with slots on a device, loaded without, and back again into slots that hold rows as they were before."""
    below = tiers(tmp_path / "below", 9) if in_tiers else None
    plain, other = make_sides("bfloat16", "adam", plan=plan_for(24), below=below)
    drive([other], seed=5, depth=2, size=2, num_batches=6)
    one, two = ({"embedding": side.emb, "sparse": side.optimizer} for side in (plain, other))
    hotrow.save_checkpoint(tmp_path / "one", two)
    hotrow.load_checkpoint(tmp_path / "one", one)
    step_both(plain, other, seed=1)
    hotrow.load_checkpoint(tmp_path / "one", two)
    hotrow.load_checkpoint(tmp_path / "one", one)
    step_both(plain, other, seed=2)
    hotrow.save_checkpoint(tmp_path / "two", two)  # in tiers: what changed since
    hotrow.load_checkpoint(tmp_path / "two", one)
    step_both(plain, other, seed=3)


def test_state_dicts_are_taken_and_given() -> None:
    plain, other = make_sides("float32", "adagrad", plan=plan_for(24))
    drive([other], seed=5, depth=2, size=2, num_batches=6)
    taken = [copy.deepcopy(part.state_dict()) for part in (other.emb, other.optimizer)]
    for part, state in zip((plain.emb, plain.optimizer), taken, strict=True):
        part.load_state_dict(state)
    step_both(plain, other, seed=1)
    for side in (plain, other):
        for part, state in zip((side.emb, side.optimizer), taken, strict=True):
            part.load_state_dict(state)
    assert torch.equal(other.emb.read_rows("u", slice(0, 90)), taken[0]["u.weight"])
    step_both(plain, other, seed=2)


def test_what_cannot_be_is_refused() -> None:
    _, side = make_sides("float32", "sgd")
    with pytest.raises(ValueError, match="slots on the device already"):
        SGD(side.emb, lr=0.1)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(side.emb)
    with pytest.raises(ValueError, match="feature 'a', sample 0, position 0: id 60 is outside its table of 60 rows"):
        side.emb(KeyedJaggedTensor(FEATURES, torch.tensor([60, 0, 0, 0])))
    for hbm in (0, -1, True, "0"):
        with pytest.raises(ValueError, match="DeviceMemory: hbm is"):
            DeviceMemory(hbm=hbm, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA device"):
            DeviceMemory(hbm=1)


def test_the_first_lookup_may_be_made_in_inference_mode() -> None:
    """What it allocates is written outside of that mode later."""
    where = DeviceMemory(hbm="1MiB", device=str(DEVICE), plan=plan_for(24))
    plain, other = (EmbeddingCollection(tables("float32"), memory=memory, seed=3) for memory in (None, where))
    for first in range(0, 40, 8):
        batch = batch_of(torch.arange(first, first + 8))
        with torch.inference_mode():
            found = other(batch), plain(batch)
        assert_agrees(*found, first, rtol=1e-5, atol=1e-5)
        assert_agrees(other(batch), plain(batch), first, rtol=1e-5, atol=1e-5)


def test_a_lookup_that_nobody_wanted_lets_go_of_its_rows() -> None:
    _, side = make_sides("float32", "sgd", plan=plan_for(40))
    rows = side.emb.placement
    side.emb(make_batch(np.random.default_rng(0)))
    assert settled(rows).directory.num_free == [40, 40, 0]


def test_the_directory_against_dictionaries() -> None:
    """Random batches: a row has one slot, those of batches in flight keep theirs, updated ones are copied back, and
    a row leaves only if no other one was passed by the hand for less.

    The first table of three has two features, the second a slot for every row.
    """
    rng = np.random.default_rng(0)
    num_rows, slots = [50, 7, 30], [TableSlots(4, 20), TableSlots(7, 0), TableSlots(0, 12)]
    first_places = [-4, 46 - 7, 46]
    directory = directory_of(num_rows, slots)
    lies = [{row: row for row in range(own.pinned)} for own in slots]
    clocks = [Clock(own) for own in slots]
    dirty, named_rows, left = [set[int]() for _ in slots], [0, 0, 0], 0
    pointers = dict[int, int]()
    flights: list[tuple[list[set[int]], Any]] = []
    for _ in range(400):
        a, b, c = np.sort(rng.integers(0, 12, 3))
        spans = [(0, b, c), (0, 0, a), (1, a, b), (2, c, 12)]
        ids = np.concatenate(
            [rng.integers(0, num_rows[t], n) for t, n in ((0, a), (1, b - a), (0, c - b), (2, 12 - c))]
        ).astype(rng.choice([np.int32, np.int64]))
        batch = [set[int](), set[int](), set[int]()]
        for t, start, stop in spans:
            batch[t] |= set(ids[start:stop].tolist())
        held = [set[int]().union(*(other[t] for other, _ in flights)) for t in range(3)]
        new = [{row for row in (batch[t] | held[t]) if row >= slots[t].pinned} for t in range(3)]
        named = directory.find(ids, spans)
        assert named.numbers == [len(own) for own in batch]
        missing = [len(own) - each.cached for own, each in zip(new, slots, strict=True)]
        assert [max(0, own) for own in directory.missing(named)] == [max(0, own) for own in missing]
        alone = [sum(row >= own.pinned for row in each) <= own.cached for own, each in zip(slots, batch, strict=True)]
        assert directory.fits(named) == all(alone)
        absent = [sorted(batch[t] - {*own}) for t, own in enumerate(lies)]
        assert [own.tolist() for own in RowSlots.of(directory.coming(named)).rows] == absent
        if max(missing) <= 0:
            moves = directory.admit(named)
            assert (moves is None) == (not any(absent))
            coming, leaving = map(RowSlots.of, moves[:2]) if moves else (RowSlots([], []),) * 2
            places, entries = moves[2].reshape(2, -1).tolist() if moves else ([], [])
            pointers.update(zip(places, entries, strict=True))
            for t, own in enumerate(lies):
                wanted, gone = clocks[t].admit(absent[t], batch[t] - {*absent[t]}), dict[int, int]()
                if moves is not None:
                    assert dict(zip(coming.rows[t].tolist(), coming.slots[t].tolist(), strict=True)) == wanted
                    gone = dict(zip(leaving.rows[t].tolist(), leaving.slots[t].tolist(), strict=True))
                for row in [row for row, slot in own.items() if slot in wanted.values()]:
                    assert row not in held[t] | batch[t]
                    assert (row in gone) == (row in dirty[t]) and gone.get(row, own[row]) == own.pop(row)
                    dirty[t].discard(row)
                    left += 1
                own |= wanted
                assert len({*own.values()}) == len(own) <= sum(slots[t])
                named_rows[t] += len(batch[t])
            flights.append((batch, named))
        if flights and rng.random() < 0.6:
            batch, named = flights.pop(int(rng.integers(len(flights))))
            updated = bool(rng.random() < 0.5)
            directory.release(named, updated=updated)
            for t, own in enumerate(batch):
                dirty[t] |= own if updated else set()
                clocks[t].release(own)
        now = [dict(zip(ids.tolist(), at.tolist(), strict=True)) for ids, at in by_table(directory)]
        assert now == lies
        assert [set(ids.tolist()) for ids, _ in by_table(directory, dirty=True)] == dirty
        in_map = {(t, row): at for t, own in enumerate(lies) for row, at in own.items() if row >= slots[t].pinned}
        assert {place: at for place, at in pointers.items() if at >= 0} == {
            first_places[t] + row: at for (t, row), at in in_map.items()
        }
    counts = dict(zip(COUNTS, np.array(directory.counts).T.tolist(), strict=True))
    assert counts["rows"] == named_rows and counts["hit_rows"][1] == named_rows[1]
    assert sum(counts["evicted_rows"]) == left > 100 and counts["written_rows"][2] > 30
    for bad in (-1, 7):
        assert directory.find(np.array([3, bad, 11]), [(0, 0, 1), (1, 1, 2), (2, 2, 3)]) is None
    directory.clear_dirty()
    written = [own[-1] - before for own, before in zip(directory.counts, counts["written_rows"], strict=True)]
    assert written == [len(own) for own in dirty] and not any(len(ids) for ids, _ in by_table(directory, dirty=True))


class Clock:
    """The rule by which rows make room, in plain Python: what the directory of one table decides."""

    def __init__(self, slots: TableSlots) -> None:
        self.first, self.hand, self.pins, self.used = slots.pinned, 0, dict[int, int](), set[int]()
        self.ring: list[int | None] = [None] * slots.cached

    def admit(self, coming: list[int], here: set[int]) -> dict[int, int]:
        """Returns the slot of each row that comes, in rising order of rows."""
        for row in here:
            self.pins[row] = self.pins.get(row, 0) + 1
            self.used.add(row)
        found = {}
        for row in coming:
            while (old := self.ring[self.hand]) is not None and (self.pins.get(old) or old in self.used):
                if not self.pins.get(old):
                    self.used.discard(old)
                self.hand = (self.hand + 1) % len(self.ring)
            self.ring[self.hand], self.pins[row] = row, 1
            self.used.add(row)
            found[row] = self.first + self.hand
            self.hand = (self.hand + 1) % len(self.ring)
        return found

    def release(self, rows: set[int]) -> None:
        for row in rows:
            self.pins[row] -= 1


def test_a_directory_of_what_cannot_be_is_refused() -> None:
    for pinned, cached in ((-1, 2), (1, -1), (3, 3)):
        with pytest.raises(ValueError, match="within the table's rows"):
            directory_of([5], [TableSlots(pinned, cached)])
    directory, ids = directory_of([5, 5], [TableSlots(1, 2)] * 2), np.array([1, 2])
    for spans in ([(2, 0, 1)], [(0, -1, 1)], [(0, 0, 3)], [(0, 2, 1)]):
        with pytest.raises(ValueError, match="span outside the batch"):
            directory.find(ids, spans)
    with pytest.raises(ValueError, match="in the order of their tables"):
        directory.find(ids, [(1, 0, 1), (0, 1, 2)])
    with pytest.raises(ValueError, match="int32 or int64"):
        directory.find(np.array([1.0]), [(0, 0, 1)])


def test_frozen_tables_on_a_device_stay_and_a_part_of_them_is_refused() -> None:
    side = Side("float32", "adagrad", DeviceMemory(hbm="1MiB", device=str(DEVICE)))
    batch = make_batch(np.random.default_rng(0))
    side.emb.requires_grad_(False)
    before = {name: side.emb.read_rows(name, slice(None)) for name in ROWS}
    side.forward(batch)
    side.optimizer.step()
    assert side.emb.pending == [] and side.dense.weight.grad is not None
    assert all(torch.equal(side.emb.read_rows(name, slice(None)), rows) for name, rows in before.items())
    side.emb.switches["t"].requires_grad_(True)
    with pytest.raises(ValueError, match="some of the tables are frozen and others not, which tables on a device"):
        side.forward(batch)
