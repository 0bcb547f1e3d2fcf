"""The cost model: counts against brute force and torch's own, sums against formulas, and laws that hold anywhere."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hotrow.config.load import make_config
from hotrow.config.schema import Config
from hotrow.costs.cost import BLIND_ERROR, PHASES, amounts_of, predict
from hotrow.costs.demand import tables_of
from hotrow.costs.fit import least_squares, unit_seconds
from hotrow.costs.hardware import COST_VERSION, DISTURBED, Disk, Figure, Hardware, Network, Point
from hotrow.costs.traffic import Traffic, traffic_of
from hotrow.costs.wire import share_of, sharing_amounts
from hotrow.costs.work import Work, work_of
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops
from hotrow.parallel.shards import Shard
from hotrow.placement.budget import Memory, TableSlots
from hotrow.placement.lookahead import lookahead
from hotrow.placement.tiers import Tiers
from hotrow.run.build import build
from hotrow.run.meters import Session, StepClock
from hotrow.run.trainer import train_step
from hotrow.setup.device import DenseDevice
from hotrow.setup.setup import Setup
from hotrow.setup.slots import SlotPlanner

ROWS, BATCH = 16_000, 500
TRAFFIC_TOLERANCE = 0.1
IO_TOLERANCE = 0.3
DLRM: dict[str, Any] = {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [32], "top_mlp": [64, 24]}


def config_of(dataset: PackedDataset, **fields: Any) -> Config:
    wanted = {"data": str(dataset.path), "model": DLRM, "train": {"batch_size": BATCH, "threads": 2}}
    return make_config(wanted | fields)


@pytest.fixture(scope="module")
def dataset(make_dataset: Callable[..., PackedDataset], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("data") / "planted"
    rows = {"train": ROWS, "val": 64}
    return make_dataset(folder, rows=rows, table_rows=(50, 4000, 30_000), rows_per_block=1000, counts=True)


@pytest.fixture(scope="module")
def work(dataset: PackedDataset) -> Work:
    config = config_of(dataset)
    return replace(work_of(config, tables_of(config, dataset), dataset), folder=f"{ELSEWHERE}/rows")


def figures(**values: float) -> dict[str, Figure]:
    return {name.lstrip("d"): Figure(value, source="declared", note="made up") for name, value in values.items()}


ELSEWHERE = "/a disk of the test"
DISK = Disk(
    folder=ELSEWHERE,
    reads_per_s=figures(d1=1e4, d128=1e5),
    writes_per_s=figures(d1=1e4, d128=5e4),
    read_bytes_per_s=Figure(1e9),
    write_bytes_per_s=Figure(5e8),
    cpu_s_per_io=Figure(2e-6),
)
NETWORK = Network(
    bytes_per_s=Figure(1e9), s_per_message=Figure(1e-4), cpu_s_per_message=Figure(3e-5), cpu_s_per_byte=Figure(2e-9)
)
TRAFFIC = Traffic(**dict.fromkeys(Traffic.__dataclass_fields__, 1.0))


def machine(work: Work, unit_s: Callable[[str, str], float], *, threads: tuple[int, ...] = (1, 4)) -> Hardware:
    """A machine that takes `unit_s(phase, kind)` for a unit of every kind there is."""
    amounts = dict(amounts_of(work, TRAFFIC))
    amounts["update"] = amounts["update"] | amounts_of(replace(work, optimizer="sgd"), TRAFFIC)["update"]
    kernels = {
        phase: [
            Point({"threads": float(n), kind: 1.0}, Figure(unit_s(phase, kind) / n)) for kind in own for n in threads
        ]
        for phase, own in amounts.items()
    }
    for phase, own in sharing_amounts(work, dealt_out(work), num_ranks=2).items():
        kernels[f"shared {phase}"] = [
            Point({"threads": 1.0, kind: 1.0}, Figure(unit_s(f"shared {phase}", kind))) for kind in own
        ]
    return Hardware(
        name="made up",
        date="2026-01-01",
        host={},
        versions={},
        num_cores=4,
        dram_bytes=Figure(1e10),
        kernels=kernels,
        cost_version=COST_VERSION,
        disks=[DISK],
    )


def some_units(phase: str, kind: str) -> float:
    """Seconds of a unit, different for every kind, and small enough for any amount."""
    return 1e-9 * (1 + sum(map(ord, phase + kind)) % 17)


# ---- what a step does


def test_rows_of_a_step_against_real_batches(dataset: PackedDataset, work: Work) -> None:
    batches = list(Loader(dataset.split("train"), BATCH, shuffle_seed=3).epoch(0))
    seen: list[set[int]] = [set(), set(), set()]
    first = np.zeros(3)
    for step, batch in enumerate(batches):
        for t, own in enumerate(work.tables):
            ids = np.concatenate([batch.sparse.bags(name)[0].numpy() for name in own.table.feature_names])
            new = set(ids.tolist()) - seen[t]
            seen[t] |= new
            first[t] += len(new) if 4 <= step < 12 else 0
    for own in work.tables:
        ids = [
            np.concatenate([batch.sparse.bags(name)[0].numpy() for name in own.table.feature_names])
            for batch in batches
        ]
        assert own.lookups == pytest.approx(np.mean([len(each) for each in ids]), rel=1e-9)
        assert own.rows == pytest.approx(np.mean([len(np.unique(each)) for each in ids]), rel=0.01)
    config = config_of(dataset, train={"batch_size": BATCH, "max_steps": 12})
    short = work_of(config, tables_of(config, dataset), dataset, warmup=4)
    found = [own.first_rows() for own in short.tables]
    assert found[1:] == pytest.approx((first[1:] / 8).tolist(), rel=0.03) and found[0] < 0.5
    assert [own.first_rows(pinned=own.table.num_embeddings) for own in short.tables] == [0, 0, 0]


def test_without_counts_ids_are_taken_for_uniform(
    make_dataset: Callable[..., PackedDataset], tmp_path: Path, work: Work
) -> None:
    plain = make_dataset(tmp_path / "plain", rows={"train": 2000}, table_rows=(50, 4000, 30_000))
    config = config_of(plain)
    found = work_of(config, tables_of(config, plain), plain)
    assert found.tables[1].rows == pytest.approx(4000 * (1 - math.exp(-BATCH / 4000)), rel=1e-6)
    assert found.tables[1].rows > work.tables[1].rows, "popular rows come more than once"
    with pytest.raises(ValueError, match=r"table 't2': the dataset has no access counts"):
        predict(found, machine(work, some_units), [TableSlots(50, 0), TableSlots(4000, 0), TableSlots(10, 600)])


MODELS: dict[str, dict[str, Any]] = {
    "dlrm": DLRM,
    "first order": DLRM | {"first_order": True},
    "dcn": {"name": "dcn", "embedding_dim": {"default": 16, "t1": 4}, "deep_mlp": [48, 20], "num_cross_layers": 2},
    "low rank": {"name": "dcn", "embedding_dim": 8, "deep_mlp": [], "low_rank": 12, "structure": "stacked"},
}


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_that_torch_counts(
    dataset: PackedDataset, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(dataset, model=MODELS[name])
    tables = tables_of(config, dataset)
    found = work_of(config, tables, dataset)
    dims = {feature: table.embedding_dim for table in tables for feature in table.feature_names}
    model = config.model.build(num_dense=3, dims=dims, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(ops, "_native", lambda: None)  # the reference runs, which torch sees
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(BATCH, 3), torch.zeros(BATCH, sum(dims.values())))
    flops = sum(2 * n * i * o for n, i, o in found.products) + sum(2 * n * v * v * d for n, v, d in found.pairs)
    assert flops == counter.get_total_flops()  # which leaves out a product with a vector, dlrm's first order
    assert found.num_weights == sum(parameter.numel() for parameter in model.parameters())
    if "dlrm" in name:
        assert [found.products[k][1] for k in found.constant_inputs] == [3], "the layer of the dense inputs"


def test_the_loader_gathers_windows(dataset: PackedDataset) -> None:
    def gathered(warmup: int, **train: Any) -> tuple[float, float]:
        config = config_of(dataset, train={"batch_size": BATCH} | train)
        found = work_of(config, tables_of(config, dataset), dataset, warmup=warmup)
        return found.gathered_samples, found.verified_samples

    assert gathered(0, epochs=2) == (BATCH, BATCH / 2), "in the second epoch rows were read before"
    assert gathered(0, max_steps=4) == (ROWS / 4, ROWS / 4), "the one window there is"
    assert gathered(1, max_steps=4) == (0, 0)
    assert gathered(1, shuffle=False)[0] == BATCH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cuda"}, r"steps on a GPU \(.* set device to cpu"),
        ({"train": {"dense_dtype": "bf16"}}, r"dense layers in bf16 \(train\.dense_dtype"),
        ({"memory": {"file": "/dax"}}, r"rows in files used as memory \(memory\.file"),
        ({"memory": {"file": "/dax", "file_bytes": "1MiB", "ssd": "/nvme"}}, r"rows in files used as memory"),
        ({"hot": {"schedule": "fae"}}, r"hot and cold phases \(hot\.schedule: fae"),
    ],
)
def test_what_has_no_model_is_refused(dataset: PackedDataset, fields: dict[str, Any], message: str) -> None:
    config = config_of(dataset, **fields)
    with pytest.raises(ValueError, match=rf"^{message}.*\) cannot be predicted yet$"):
        work_of(config, [], dataset)


def test_a_model_that_sees_every_row_is_refused(dataset: PackedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.models.dlrm.DLRM.lookup", "sequence")
    config = config_of(dataset)
    with pytest.raises(ValueError, match=r"^models that see every row of a list \(dlrm\) cannot be predicted yet$"):
        work_of(config, tables_of(config, dataset), dataset)


# ---- sums


def test_a_machine_of_a_known_formula_is_predicted_exactly(work: Work) -> None:
    hardware = machine(work, some_units)
    found = predict(work, hardware)
    amounts = amounts_of(work)
    for phase in PHASES:
        wanted = sum(some_units(phase, kind) * amount for kind, amount in amounts[phase].items()) / 2
        if phase == "data":
            wanted += sum(some_units("window", kind) * amount for kind, amount in amounts["window"].items()) / 2
        assert found.seconds[phase] == pytest.approx(wanted, rel=1e-6), phase
    assert found.step_s == pytest.approx(sum(found.seconds.values())) and found.wait_s == 0


def test_units_are_found_from_steps_that_mix_them() -> None:
    rng = np.random.default_rng(0)
    units = {"a": 2e-6, "b": 3e-9, "c": 0.0}
    points = []
    for k in range(40):
        sizes = {"a": 1.0, "b": float(rng.integers(10, 10_000)), "c": float(rng.integers(1, 9)), "threads": 1.0}
        seconds = sum(units[kind] * sizes[kind] for kind in units)
        points.append(Point(sizes, Figure(seconds * (10 if k in (3, 17) else 1))))  # two were disturbed
    assert unit_seconds(points) == pytest.approx(units, rel=1e-3, abs=1e-9)


def test_points_that_other_work_disturbed_count_less() -> None:
    def fitted(note: str) -> float:
        taken = [*[(1.0, "")] * 4, *[(2.0, note)] * 5]
        return unit_seconds([Point({"a": 1.0}, Figure(seconds, note=text)) for seconds, text in taken])["a"]

    assert fitted(f"{DISTURBED}: by others") < fitted("") - 0.01


def test_least_squares_against_every_active_set() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        a, b = rng.standard_normal((8, 4)) + 0.5, rng.standard_normal(8)
        best = math.inf
        for chosen in range(16):
            columns = [j for j in range(4) if chosen >> j & 1]
            x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0] if columns else np.zeros(0)
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(a[:, columns] @ x - b)))
        found = least_squares(a, b)
        assert (found >= 0).all() and np.linalg.norm(a @ found - b) == pytest.approx(best, rel=1e-9)


# ---- laws


def grown(work: Work, table: Mapping[str, float] | None = None, **fields: Any) -> Work:
    tables = work.tables
    if table is not None:
        own = tables[2]
        tables = (*tables[:2], replace(own, **{name: getattr(own, name) * factor for name, factor in table.items()}))
    return replace(work, **({"tables": tables} | fields))


def with_dim(work: Work, dim: int) -> Work:
    tables = []
    for own in work.tables:
        table = replace(own.table, embedding_dim=dim)
        tables.append(replace(own, table=table, record_bytes=4 * dim + 4))
    return replace(work, tables=tuple(tables))


def test_more_work_is_never_predicted_faster(work: Work) -> None:
    hardware = machine(work, some_units)
    step_s = predict(work, hardware).step_s
    wider = tuple((n, i, o + 8) for n, i, o in work.products)
    for more in (
        grown(work, {"lookups": 1.5}),
        grown(replace(work, tables=tuple(replace(own, rates=()) for own in work.tables)), {"rows": 2}),
        with_dim(work, 32),
        with_dim(work, 64),
        replace(work, products=wider),
        replace(work, products=(*work.products, (BATCH, 8, 8))),
        replace(work, num_weights=2 * work.num_weights),
        replace(work, tables=(*work.tables, replace(work.tables[0], table=replace(work.tables[0].table, name="more")))),
    ):
        assert predict(more, hardware).step_s > step_s


def test_figures_twice_as_fast_predict_half(work: Work) -> None:
    slots = [TableSlots(50, 0), TableSlots(4000, 0), TableSlots(100, 600)]
    fast_disk = replace(
        DISK,
        reads_per_s=figures(d1=2e4, d128=2e5),
        writes_per_s=figures(d1=2e4, d128=1e5),
        read_bytes_per_s=Figure(2e9),
        write_bytes_per_s=Figure(1e9),
    )
    slow = machine(work, some_units)
    fast = replace(machine(work, lambda phase, kind: some_units(phase, kind) / 2), disks=[fast_disk])
    for placed in (None, slots):
        assert 2 * predict(work, fast, placed).step_s == pytest.approx(predict(work, slow, placed).step_s, rel=1e-6)


def test_rows_in_dram_are_never_slower_than_tiers(work: Work) -> None:
    hardware = machine(work, some_units)
    whole = [TableSlots(own.table.num_embeddings, 0) for own in work.tables]
    in_dram = predict(work, hardware)
    assert predict(work, hardware, whole).seconds == in_dram.seconds
    before = math.inf
    for slots in (TableSlots(0, 600), TableSlots(100, 600), TableSlots(4000, 3000), TableSlots(10_000, 19_000)):
        found = predict(work, hardware, [*whole[:2], slots])
        assert in_dram.step_s < found.step_s <= before and found.wait_s <= found.seconds["data"]
        before = found.step_s


def test_a_step_hides_what_it_can_of_its_reads(work: Work) -> None:
    slots = [*(TableSlots(own.table.num_embeddings, 0) for own in work.tables[:2]), TableSlots(0, 700)]
    steady = replace(work, steps=(0.0, math.inf))
    slow_steps, quick_steps = (machine(work, lambda *_, s=s: s) for s in (1e-6, 1e-12))  # type: ignore[misc]
    assert predict(steady, slow_steps, slots).wait_s == 0
    waits = predict(steady, quick_steps, slots)
    assert waits.wait_s > 0.9 * waits.step_s and waits.binds == "disk reads"
    traffic = traffic_of(steady, slots)
    assert traffic is not None and traffic.reads > 50
    ahead, late = (predict(replace(steady, lookahead=n), slow_steps, slots) for n in (4, 0))
    assert late.wait_s > 0, "without look-ahead nothing is hidden"
    assert late.seconds["lookup"] == pytest.approx(ahead.seconds["lookup"] + late.wait_s)
    assert waits.seconds["data"] > waits.wait_s > waits.seconds["lookup"], "announcing waits"


def test_rows_that_a_run_meets_first_are_made_and_not_read(dataset: PackedDataset) -> None:
    slots = [TableSlots(50, 0), TableSlots(4000, 0), TableSlots(0, 2000)]
    reads = []
    for epochs in (1, 20):
        config = config_of(dataset, train={"batch_size": BATCH, "epochs": epochs})
        traffic = traffic_of(work_of(config, tables_of(config, dataset), dataset), slots)
        assert traffic is not None and traffic.read_rows < traffic.misses < traffic.rows
        reads.append(traffic.read_rows / traffic.misses)
    assert reads[0] < 0.6 < reads[1]


@pytest.mark.usefixtures("one_thread")
def test_traffic_against_a_run_of_tiers(dataset: PackedDataset, tmp_path: Path) -> None:
    batch_size, epochs, warm = 100, 4, 1
    config = config_of(dataset, train={"batch_size": batch_size}, memory={"writes": "in_place"})
    tables, per_epoch = tables_of(config, dataset), ROWS // batch_size
    slots = [TableSlots(50, 0), TableSlots(100, 1200), TableSlots(30_000, 0)]
    memory = Memory(dram=64 << 20, ssd=tmp_path, writes="in_place", plan=lambda *_: slots, force=True)
    planner = SlotPlanner(config=config, tables=tables, memory=memory or Memory(dram=1, ssd=tmp_path))
    parts = build(Setup(config, dataset, tables, DenseDevice(), memory, planner, None, tmp_path))
    tiers = parts.embedding.placement.find(Tiers)
    assert tiers is not None and tiers.slots == slots
    loader, clock, counted = Loader(dataset.split("train"), batch_size, shuffle_seed=3), StepClock(Session(1)), []
    for epoch in range(epochs):
        if epoch in (0, warm):
            counted.append(tiers.counters()["t1"])
        for batch in lookahead(loader.epoch(epoch), parts.embedding, depth=config.tiers.lookahead):
            train_step(parts, batch, 0, clock)
            # A row that still waits to be written is not read from the disk: on a busy machine that spares many reads.
            while tiers.counters()["t1"]["waiting_bytes"]:
                time.sleep(0.0005)
    counted.append(tiers.counters()["t1"])
    tiers.close()
    # The first epoch fills the cache: the model spreads first times evenly over it, and predicts too few reads.
    cases = zip(itertools.pairwise(counted), ((0, warm, 0.4), (warm, epochs, TRAFFIC_TOLERANCE)), strict=True)
    for (before, after), (first, last, tolerance) in cases:
        num_steps = (last - first) * per_epoch
        moved = {name: (after[name] - before[name]) / num_steps for name in after}
        train = config.train.model_copy(update={"epochs": last})
        work = work_of(config.model_copy(update={"train": train}), tables, dataset, warmup=first * per_epoch)
        found = traffic_of(replace(work, writes="in_place"), slots)
        assert found is not None
        assert found.rows == pytest.approx(moved["rows"], rel=0.01)
        assert found.misses == pytest.approx(moved["rows"] - moved["hit_rows"], rel=tolerance)
        assert found.read_rows == pytest.approx(moved["read_rows"], rel=tolerance)
        assert found.written_rows == pytest.approx(moved["written_rows"], rel=tolerance)
    for name in ("reads", "read_bytes", "writes", "written_bytes"):
        assert getattr(found, name) == pytest.approx(moved[name], rel=IO_TOLERANCE), name


def test_what_is_absent_is_named(work: Work) -> None:
    hardware = machine(work, some_units)
    slots = [TableSlots(50, 0), TableSlots(4000, 0), TableSlots(0, 700)]
    kernels = hardware.kernels
    few = [Point({"threads": n, "steps": 1.0, "calls": 1.0}, Figure(1e-3)) for n in (1.0, 4.0)]
    cases: list[tuple[Hardware, Work, list[TableSlots] | None, str]] = [
        (
            replace(hardware, cost_version=0),
            work,
            None,
            r"^made up: measured for another version of hotrow: run hotrow",
        ),
        (replace(hardware, kernels={}), work, None, r"made up has no steps measured for phase 'data'.*hotrow probe"),
        (
            replace(hardware, kernels=kernels | {"update": []}),
            work,
            None,
            r"phase 'update'.*kernels\.update.*longer probe",
        ),
        (
            replace(hardware, kernels=kernels | {"dense": few}),
            work,
            None,
            r"made up has 1 steps measured for 2 kinds .*kernels\.dense, 1 threads.*too few: .* longer probe \(.* 50\)",
        ),
        (
            hardware,
            replace(work, dense_optimizer="adam"),
            None,
            r"no steps measured with: steps with adam .*kernels\.data.*longer probe",
        ),
        (hardware, replace(work, threads=8), None, r"no steps on 8 threads .*only on 1 to 4: set train\.threads"),
        (
            replace(hardware, disks=[]),
            replace(work, steps=(0, math.inf)),
            slots,
            r"no disk of /a disk of the test/rows in",
        ),
        (
            hardware,
            replace(work, steps=(0, math.inf), folder="/proc/rows"),
            slots,
            r"cannot be predicted: no disk of /proc/rows in the file of made up: hotrow probe /proc/rows",
        ),
    ]
    for given, what, placed, message in cases:
        with pytest.raises(ValueError, match=message):
            predict(what, given, placed)


def test_threads_between_measured_ones(work: Work) -> None:
    hardware = machine(work, some_units)
    one, two, four = (predict(replace(work, threads=n), hardware).step_s for n in (1, 2, 4))
    assert one == pytest.approx(2 * two, rel=1e-6) and two == pytest.approx(2 * four, rel=1e-6)


def test_what_binds(work: Work) -> None:
    def dear(*wanted: str) -> Callable[[str, str], float]:
        return lambda phase, kind: 1e-3 if kind in wanted else 1e-12

    assert predict(work, machine(work, dear("multiply-adds"))).binds == "dense"
    assert predict(work, machine(work, dear("rows", "ids"))).binds in ("rows in DRAM", "data")
    assert predict(work, machine(work, dear("tensors"))).binds == "python"


# ---- ranks


def dealt_out(work: Work) -> dict[str, Shard]:
    return {own.table.name: Shard() for own in work.tables}


def shared_work(work: Work, num_ranks: int, **options: Any) -> Any:
    return share_of(work, work, dealt_out(work), num_ranks=num_ranks, **{"micro_batches": num_ranks, **options})


def test_one_rank_is_predicted_as_one_process(work: Work) -> None:
    own, shared = shared_work(work, 1)
    hardware = machine(work, some_units)
    assert predict(own, hardware).seconds == pytest.approx(predict(work, hardware).seconds, rel=1e-6)
    assert sum(shared.by_purpose.values()) == 0


def test_a_step_of_ranks_by_hand(work: Work) -> None:
    """Its own samples, and what sharing adds. Sums of rows move to the dense phase, in which they are made."""
    own, shared = shared_work(replace(work, threads=1), 3)
    at_once = Network(Figure(1e14), *[Figure(1e-18)] * 3)
    hardware = replace(machine(work, some_units), network=at_once)
    found, alone = predict(own, hardware, None, shared), dict(predict(own, hardware).seconds)
    sums_s = sums_of(own)
    alone["dense"] += sums_s
    alone["update"] -= sums_s
    for name, amounts in shared.amounts.items():
        for kind, n in amounts.items():
            dense = kind in ("shared tensors", "shared weights")
            alone["dense" if dense else name] += n * some_units(f"shared {name}", kind)
    assert found.seconds == pytest.approx(alone, rel=1e-4) and 0 < found.exchange_s < 1e-8
    assert own.batch_size == round(work.batch_size / 3)


def sums_of(own: Work) -> float:
    amounts = amounts_of(own)["update"]
    kinds = [kind for kind in amounts if kind.split()[0] in ("keys", "sorted", "gradients")]
    assert len(kinds) >= 3
    return sum(amounts[kind] * some_units("update", kind) for kind in kinds)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_travels_while_a_rank_works(work: Work, num_ranks: int) -> None:
    """Slices of dense gradients behind sums of rows, totals, which two ranks do not send, behind updates; bytes that
    take longer are waited for."""
    own, shared = shared_work(replace(work, threads=1), num_ranks)
    events = {(event.kind, event.name): sum(event.sent_bytes.values()) for event in shared.events}
    free = {("send", name) for name in ("slices", "totals")}
    others = sum(num_bytes for key, num_bytes in events.items() if key not in free)

    def waits(bytes_per_s: float) -> Any:
        network = Network(Figure(bytes_per_s), *[Figure(1e-18)] * 3)
        return predict(own, replace(machine(work, some_units), network=network), None, shared)

    slices = events["send", "slices"]
    hidden = waits(1.001 * slices / sums_of(own))
    byte_s = sums_of(own) / slices / 1.001
    assert hidden.exchange_s == pytest.approx(byte_s * others, rel=1e-6), "slices travelled behind the sums"
    slow = waits(slices / sums_of(own) / 1e3)
    total = sum(shared.by_purpose.values())
    update_s = hidden.seconds["update"] if num_ranks > 2 else 0.0
    wanted = 1e3 * sums_of(own) / slices * total - sums_of(own) - update_s
    assert slow.exchange_s == pytest.approx(wanted), "a slow link is never idle"


def test_further_ranks_take_the_processor_alone(work: Work) -> None:
    """Two turns for ids, for rows, and for slices and sums together, and one for totals, if no byte takes time. With
    more than two ranks each of these exchanges takes the processor, one after another."""
    slow = Network(Figure(1e14), s_per_message=Figure(1.0), cpu_s_per_message=Figure(0.3), cpu_s_per_byte=Figure(1e-18))
    hardware = replace(machine(work, some_units), network=slow)
    for num_ranks, turns, messages in ((1, 0, 0), (2, 6, 0), (5, 7, 3 * 9)):
        own, shared = shared_work(work, num_ranks)
        found = predict(own, hardware, None, shared)
        assert found.exchange_s == pytest.approx(turns + 0.3 * messages, rel=1e-3), num_ranks
        assert found.parts_s["latency"] == pytest.approx(turns, abs=1e-2)
        assert sum(found.parts_s.values()) == pytest.approx(found.step_s)


def test_a_step_takes_the_network_of_its_transport(work: Work) -> None:
    """Over MPI nothing travels behind work, so a link of another speed costs all that its bytes take."""
    slow, fast = (Network(Figure(value), *[Figure(1e-18)] * 3) for value in (1e6, 1e9))
    both = replace(machine(work, some_units), network=slow, mpi=fast)
    own, shared = shared_work(work, 3)

    def exchange_s(hardware: Hardware, transport: Any) -> float:
        return predict(own, hardware, None, replace(shared, transport=transport)).exchange_s

    assert exchange_s(both, "mpi") == pytest.approx(sum(shared.by_purpose.values()) / 1e9, rel=1e-3)
    assert exchange_s(both, "gloo") == exchange_s(both, None) > 100 * exchange_s(both, "mpi")
    assert exchange_s(replace(both, network=None), None) == exchange_s(both, "mpi")
    assert exchange_s(replace(both, network=fast), "gloo") < exchange_s(both, "mpi")
    with pytest.raises(ValueError, match=r"made up has no mpi, .* hotrow probe, or declare it"):
        exchange_s(replace(both, mpi=None), "mpi")


def test_ranks_of_one_machine_share_its_cores(work: Work) -> None:
    """With four cores: two ranks of one thread are a third of a full machine, eight take turns."""
    hardware = replace(machine(work, some_units), network=NETWORK, crowding=Figure(1.6))
    work = replace(work, threads=1)

    def step_s(local_size: int) -> float:
        own, shared = shared_work(work, 8, local_size=local_size)
        found = predict(own, hardware, None, shared)
        assert found.step_s > found.exchange_s > 0
        return found.step_s - found.exchange_s

    own, shared = shared_work(work, 8)
    added_s = step_s(1) - (alone_s := predict(own, hardware).step_s)
    assert step_s(2) == pytest.approx(1.2 * (alone_s + added_s))
    assert step_s(8) == pytest.approx(2 * 1.6 * (alone_s + added_s))
    exchange_s = [predict(own, hardware, None, replace(shared, local_size=n)).exchange_s for n in (1, 2, 8)]
    assert exchange_s[0] < exchange_s[1] < exchange_s[2], "a link of several, and processors that copy for all"


def test_without_a_network_ranks_have_no_time(work: Work) -> None:
    own, shared = shared_work(work, 2)
    with pytest.raises(ValueError, match=r"made up has no network, .* hotrow probe, or declare it"):
        predict(own, machine(work, some_units), None, shared)


def test_uneven_parts_the_rank_with_most_samples_counts(work: Work) -> None:
    own, _ = shared_work(work, 3, micro_batches=4)  # ranks hold 1, 1 and 2 of them
    assert own.batch_size == work.batch_size // 2
    assert len(own.products) == 2 * len(work.products) and own.num_calls == 2 * work.num_calls
    assert sum(n for n, _, _ in own.products) == sum(n for n, _, _ in work.products) / 2


def test_the_stated_error_is_the_one_that_studies_found() -> None:
    docs = Path(__file__).parents[2] / "docs" / "measurements"
    errors = [
        json.loads(path.read_text())["prediction"]["geometric_mean_error"]
        for path in docs.glob("prediction-study*.json")
    ]
    assert max(errors) == pytest.approx(BLIND_ERROR, abs=0.03)
