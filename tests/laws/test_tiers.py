"""Law 2: placement is invisible. Whatever lies where, tables, states and outputs are those of one plain array, bitwise.

Schedules are drawn at random: batches announced or not, altered after, skipped, looked up twice, evaluated in between,
several to a step, loops left early, steps dropped, tables growing; over optimizers, storages, policies, stores and
cache sizes. The truth is the same schedule on a collection whose rows all lie in DRAM.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import bits
from torch import Tensor

import hotrow
from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.optim import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad
from hotrow.placement import budget
from hotrow.placement.budget import METADATA_BYTES, MIDDLE_PLACE_BYTES, TableDemand, place_bytes
from hotrow.placement.tiers import Tiers
from hotrow.tables import TableConfig, Uniform
from sampled import sampled

OPTIMIZERS = {
    "sgd": lambda emb: SGD(emb, lr=0.1),
    "adagrad": lambda emb: Adagrad(emb, lr=0.1, initial_accumulator_value=0.25),
    "row_wise_adagrad": lambda emb: RowWiseAdagrad(emb, lr=0.1),
    "adam": lambda emb: Adam(emb, lr=0.01),
    "ftrl": lambda emb: FTRL(emb, lr=0.1, l1=0.01, l2=0.02),
}
pytestmark = [
    pytest.mark.skipif(not ops.isas(), reason="the native module is absent"),
    pytest.mark.filterwarnings("ignore:3 batches wait for the optimizer"),  # schedules of several before a step
]
FEATURES = ("a", "b", "c", "d")
ROWS = {"t": 400, "u": 700, "v": 5}
KINDS = ["ssd", "file", "both", "gathered", "both gathered"]


@pytest.fixture(autouse=True)
def tables_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they have some hundred rows; only the smallest lies in memory whole."""
    monkeypatch.setattr(budget, "MIN_GATHERED_ROWS", 10)
    monkeypatch.setattr(budget, "SMALL_TABLES_SHARE", 0.02)


def tables(dtype: str) -> list[TableConfig]:
    init, kind = Uniform(zero_rows=1), dict[str, Any](dtype=dtype)
    return [
        TableConfig(name="t", num_embeddings=ROWS["t"], embedding_dim=8, feature_names=("a",), init=init, **kind),
        TableConfig(name="u", num_embeddings=700, embedding_dim=19, feature_names=("b", "d"), pooling="mean", **kind),
        TableConfig(name="v", num_embeddings=ROWS["v"], embedding_dim=4, feature_names=("c",), **kind),
    ]


def make_batch(rng: np.random.Generator, rows: dict[str, int], *, wide: bool) -> KeyedJaggedTensor:
    """1 to 9 samples with bags of 0 to 4 skewed ids, or one-hot; weighted at times."""
    size = int(rng.integers(1, 10))
    limits = [rows["t"], rows["u"], rows["v"], rows["u"]]
    lengths = np.ones(4 * size, np.int64) if rng.random() < 0.4 else rng.integers(0, 5, 4 * size)
    ids = np.concatenate(
        [
            np.minimum(rng.zipf(1.3, int(lengths[f * size : (f + 1) * size].sum())) - 1, limit - 1)
            if rng.random() < 0.5
            else rng.integers(0, limit, int(lengths[f * size : (f + 1) * size].sum()))
            for f, limit in enumerate(limits)
        ]
    )
    values = torch.from_numpy(ids.astype(np.int64 if wide else np.int32))
    weights = torch.from_numpy(rng.random(len(ids)).astype(np.float32)) if rng.random() < 0.2 else None
    one_hot = bool((lengths == 1).all()) and rng.random() < 0.5
    return KeyedJaggedTensor(FEATURES, values, weights, lengths=None if one_hot else torch.from_numpy(lengths))


def altered(batch: KeyedJaggedTensor, rng: np.random.Generator) -> None:
    """Other ids in the same tensor."""
    if batch.values.numel():
        at = int(rng.integers(batch.values.numel()))
        batch.values[at] = int(rng.integers(0, 5))


class StepError(Exception):
    """What a step may raise anywhere; training goes on with the next batch."""


class Side:
    """A collection and its optimizer, driven step by step; `seen` is all it ever returned."""

    def __init__(self, emb: EmbeddingCollection, optimizer: str) -> None:
        self.emb, self.optimizer = emb, OPTIMIZERS[optimizer](emb)
        self.seen: list[Tensor] = []

    def forward(self, batch: KeyedJaggedTensor, upstream: Tensor, *, fails: bool = False) -> None:
        """fails: between forward and backward."""
        out = self.emb(batch)
        self.seen.append(out.detach().clone())
        if fails:
            raise StepError
        out.backward(upstream[: len(out)])

    def sequence(self, batch: KeyedJaggedTensor) -> None:
        parts = self.emb.sequence(batch)
        self.seen.extend(values.detach().clone() for values, _ in parts.values())
        sum((values * values).sum() for values, _ in parts.values()).backward()  # type: ignore[union-attr]

    def evaluate(self, batch: KeyedJaggedTensor) -> None:
        with torch.no_grad():
            self.seen.append(self.emb(batch).clone())

    def tables(self) -> list[Tensor]:
        """Weights, low halves and states of every row."""
        emb, found = self.emb, []
        for t, table in enumerate(emb.tables):
            weight = emb.weights[table.name]
            arrays = [weight, *([emb.low[table.name]] if table.name in emb.low else [])]
            arrays += [self.optimizer.state[weight][name] for name in self.optimizer.state_names]
            ids = torch.arange(table.num_embeddings)
            if emb.placement.find(Tiers) is None:
                found += [array.clone() for array in arrays]
            else:
                with emb.placement.in_slots(t, ids) as slots:
                    found += [array[slots] for array in arrays]
        return found


def drive(sides: list[Side], seed: int, *, depth: int, num_batches: int) -> None:
    """The same random schedule on every side."""
    width = sum(table.embedding_dim * len(table.feature_names) for table in tables("float32"))
    for side in sides:
        rng = np.random.default_rng(seed)
        upstream = torch.from_numpy(rng.standard_normal((16, width)).astype(np.float32))
        done = 0
        batches = [make_batch(rng, ROWS, wide=bool(rng.random() < 0.5)) for _ in range(num_batches)]
        stray = make_batch(rng, ROWS, wide=True)
        while done < num_batches:
            try:
                for batch in hotrow.lookahead(batches[done:], side.emb, depth=depth):
                    done += 1
                    what = rng.random(8)
                    if what[0] < 0.08:
                        continue  # skipped
                    if what[1] < 0.15:
                        altered(batch, rng)
                    if what[2] < 0.15:
                        side.evaluate(stray)
                    if what[2] > 0.9:
                        side.evaluate(batch)
                    if what[3] < 0.1:
                        side.sequence(batch)
                    side.forward(batch, upstream, fails=what[7] < 0.04)
                    if what[3] > 0.9:
                        side.forward(batch, upstream)
                    if what[4] < 0.1:
                        side.forward(stray, upstream)
                    if what[7] > 0.96:
                        raise StepError  # between backward and step
                    if what[4] > 0.9:
                        continue  # several batches to a step
                    if what[5] < 0.05:
                        side.optimizer.zero_grad()
                    side.optimizer.step()
                    if what[5] > 0.93:
                        break
            except StepError:
                if what[5] < 0.5:  # else the gradients there are go into the next step
                    side.optimizer.zero_grad()
        side.optimizer.step()


def record_bytes(dtype: str, optimizer: str) -> dict[str, int]:
    """Of a row of each table: weights and states."""
    per_weight = {"float32": 4, "float16": 2, "bfloat16": 4}[dtype]
    states = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 0, "adam": 2, "ftrl": 2}[optimizer]
    row_wise = 4 if optimizer == "row_wise_adagrad" else 0
    return {table.name: table.embedding_dim * (per_weight + 4 * states) + row_wise for table in tables(dtype)}


def budgets(records: dict[str, int], slots: int, middle: int, *, gathered: bool) -> tuple[int, int]:
    """Bytes that give the two large tables about so many cached rows, and so many in a tier before their files."""
    large = records["t"] + records["u"]
    level = large + 2 * METADATA_BYTES
    maps = MIDDLE_PLACE_BYTES * min(sum(ROWS.values()) + 48, middle * level // records["v"])
    places = sum(place_bytes(TableDemand(n, ROWS[n], records[n])) * ROWS[n] for n in "tu") if gathered else 0
    return int((slots * level + 5 * records["v"] + maps + places + 320) * 8 / 7) + 16, middle * large


def make_sides(
    folder: Path,
    *,
    dtype: str = "float32",
    optimizer: str = "sgd",
    slots: int = 120,
    kind: str = "ssd",
    middle: int = 150,
    **more: Any,
) -> list[Side]:
    """kind: where what is not in DRAM lies; "both": in a file that holds `middle` rows of a table, and on disk;
    "gathered", "both gathered": so too, and on disk wherever there is a place."""
    records = record_bytes(dtype, optimizer)
    dram, file_bytes = budgets(records, slots, middle if "both" in kind else 0, gathered="gathered" in kind)
    place: dict[str, Any] = {"file": folder} if kind == "file" else {"ssd": folder}
    if "both" in kind:
        place = {"file": folder, "file_bytes": file_bytes, "ssd": folder}
    if "gathered" in kind:
        place["writes"] = "gathered"
    place |= more
    memory = hotrow.Memory(dram=dram, **place)  # type: ignore[arg-type]
    return [Side(EmbeddingCollection(tables(dtype), memory=where, seed=3), optimizer) for where in (None, memory)]


def check(plain: Side, tiered: Side) -> None:
    assert len(plain.seen) == len(tiered.seen)
    for number, (a, b) in enumerate(zip(plain.seen, tiered.seen, strict=True)):
        assert torch.equal(bits(a), bits(b)), f"output {number}"
    for number, (a, b) in enumerate(zip(plain.tables(), tiered.tables(), strict=True)):
        assert torch.equal(bits(a), bits(b)), f"array {number}"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "files were left behind"


@pytest.mark.parametrize(
    ("optimizer", "dtype", "kind"), sampled(OPTIMIZERS, ["float32", "float16", "bfloat16"], ["ssd", "gathered"])
)
def test_every_optimizer_and_storage(folder: Path, optimizer: str, dtype: str, kind: str) -> None:
    sides = make_sides(folder, dtype=dtype, optimizer=optimizer, kind=kind)
    drive(sides, seed=1, depth=3, num_batches=60)
    check(*sides)
    tiers = sides[1].emb.placement
    assert tiers.stores[1].kind == ("gathered" if kind == "gathered" else "block")
    counters = tiers.counters()["u"]
    assert counters["read_rows"] > 20 and counters["written_rows"] > 20, "the schedule did not exercise the store"


@pytest.mark.parametrize(("optimizer", "middle"), sampled(OPTIMIZERS, [112, 200, 720], pairs=False))
def test_three_tiers_and_every_optimizer(folder: Path, optimizer: str, middle: int) -> None:
    """The middle tier holds few rows, many, or all."""
    dtype = {"sgd": "bfloat16", "adam": "float16"}.get(optimizer, "float32")
    sides = make_sides(folder, dtype=dtype, optimizer=optimizer, slots=100, kind="both", middle=middle)
    drive(sides, seed=2, depth=3, num_batches=60)
    check(*sides)
    tiers = sides[1].emb.placement
    counters = tiers.counters()["u"]
    assert counters["middle_hits"] > 20, "the schedule did not exercise the middle tier"
    assert counters["evicted_rows"] > 20
    if middle == 720:
        assert counters["read_rows"] == counters["written_rows"] == 0, "the middle tier held all rows"
    else:
        assert counters["read_rows"] > 0 and counters["written_rows"] > 0, "nothing came to the disk"


@pytest.mark.parametrize(("kind", "depth", "slots"), sampled(KINDS, [0, 1, 4, 9], [100, 350]))
def test_every_store_depth_and_size(folder: Path, kind: str, depth: int, slots: int) -> None:
    sides = make_sides(folder, optimizer="adagrad", kind=kind, slots=slots)
    drive(sides, seed=depth * 1000 + slots, depth=depth, num_batches=50)
    check(*sides)


def check_random_schedule(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sides = make_sides(
        folder,
        dtype=str(rng.choice(["float32", "float16", "bfloat16"])),
        optimizer=str(rng.choice(list(OPTIMIZERS))),
        slots=int(rng.integers(120, 500)),
        kind=str(rng.choice(KINDS)),
        middle=int(rng.choice([112, 150, 320, 720])),
    )
    drive(sides, seed, depth=int(rng.integers(0, 12)), num_batches=40)
    check(*sides)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 15))])
def test_random_schedules(folder: Path, seed: int) -> None:
    check_random_schedule(folder, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 50))
def test_thousands_of_random_schedules(folder: Path, first: int) -> None:
    for seed in range(first, first + 50):
        try:
            check_random_schedule(folder, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_evaluation_leaves_the_cache_as_it_is(folder: Path) -> None:
    """Two runs of the same steps, one evaluated in between: the same rows leave, come and are written."""
    sides = [make_sides(folder, slots=110)[1] for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    limits = [ROWS["t"], ROWS["u"], ROWS["v"], ROWS["u"]]
    batches = [
        KeyedJaggedTensor(FEATURES, torch.cat([torch.randint(0, n, (30,), generator=generator) for n in limits]))
        for _ in range(40)
    ]
    for k, batch in enumerate(batches):
        for side in sides:
            out = side.emb(batch)
            out.backward(torch.ones_like(out))
            side.optimizer.step()
        before = counted(sides[1])
        sides[1].evaluate(batches[-1 - k])
        after = counted(sides[1])
        assert all(after[name] == before[name] for name in ("evicted_rows", "written_rows", "overflow_rows"))
    names = ("evicted_rows", "written_rows", "overflow_rows")
    ours, other = counted(sides[0]), counted(sides[1])
    assert ours["evicted_rows"] > 300 and [ours[name] for name in names] == [other[name] for name in names]
    for a, b in zip(sides[0].tables(), sides[1].tables(), strict=True):
        assert torch.equal(bits(a), bits(b))


def counted(side: Side) -> dict[str, int]:
    """The counters of all tables together."""
    tables = side.emb.placement.counters().values()
    return {name: sum(table[name] for table in tables) for name in next(iter(tables))}


def test_rows_that_start_at_zero_have_no_sign(folder: Path) -> None:
    """+0.0 as in DRAM, whether a row was looked up, updated by nothing, or never touched."""
    table = TableConfig(name="t", num_embeddings=5000, embedding_dim=16, feature_names=("a",), init=Uniform(bound=0.0))
    for dtype in ("float32", "float16", "bfloat16"):
        memory = hotrow.Memory(dram="100KB", ssd=folder, force=True)
        emb = EmbeddingCollection([replace(table, dtype=dtype)], memory=memory)
        optimizer = SGD(emb, lr=0.1)
        emb(torch.arange(400)[:, None]).mul(0).sum().backward()
        optimizer.step()
        assert not emb.read_rows("t", slice(0, 900)).view(torch.int32).any()
        emb.placement.close()
