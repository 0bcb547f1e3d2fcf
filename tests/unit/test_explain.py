"""`hotrow plan`, and what a run says of its prediction: on a small dataset and a made-up machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cost import DISK, NETWORK, machine, some_units

import hotrow
from hotrow.base.machine import default_threads
from hotrow.cli import app as cli
from hotrow.config.load import load_config
from hotrow.costs import solve
from hotrow.costs.cost import BLIND_ERROR, Prediction
from hotrow.costs.demand import required_bytes, tables_of
from hotrow.costs.hardware import HARDWARE, MACHINES, Figure, Gpu, Hardware, Network, this_host
from hotrow.costs.work import work_of
from hotrow.data.packed.reader import PackedDataset
from hotrow.forecast import foretell as foretelling
from hotrow.forecast.changes import changes as changes_of
from hotrow.forecast.explain import bind
from hotrow.forecast.ranks import as_one_rank
from hotrow.placement.budget import Memory, TableDemand
from hotrow.placement.tiers import Tiers
from hotrow.run import runs, trainer
from hotrow.setup import setup
from hotrow.setup.room import Room
from hotrow.setup.shards import shards_of
from hotrow.setup.slots import SlotPlanner, miss_s
from resealed import reseal

MODEL = {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [8], "top_mlp": [8]}
TRAIN = {"batch_size": 200, "threads": 1, "max_steps": 4}
MIB = 1 << 20
FAST = Network(Figure(1e13), Figure(1e-12), Figure(1e-15), Figure(1e-15))


@pytest.fixture(scope="module")
def dataset(make_dataset: Callable[..., PackedDataset], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("explain") / "data"
    rows = {"train": 4000, "val": 64}
    return make_dataset(folder, rows=rows, table_rows=(50, 4000, 30_000), rows_per_block=1000, counts=True)


@pytest.fixture
def write(dataset: PackedDataset, tmp_path: Path) -> Callable[..., Path]:
    def config(memory: Any = "auto", **train: Any) -> Path:
        path = tmp_path / "config.yaml"
        fields = {"data": str(dataset.path), "run": str(tmp_path / "run"), "model": MODEL, "memory": memory}
        path.write_text(yaml.safe_dump({**fields, "train": TRAIN | train}))
        return path

    return config


@pytest.fixture
def hardware(write: Callable[..., Path], dataset: PackedDataset, tmp_path: Path) -> Hardware:
    """A machine whose disk is slow, so that memory matters."""
    config = load_config(write(), ())
    made = machine(work_of(config, tables_of(config, dataset), dataset), some_units)
    (disk,) = made.disks
    slow = {"reads_per_s": {"1": Figure(1e3)}, "writes_per_s": {"1": Figure(1e3)}}
    return replace(made, disks=[replace(disk, folder=str(tmp_path), **slow)])


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the machine that runs the tests plays no part."""
    monkeypatch.setattr("hotrow.cli.plan.known_hardware", lambda: None)
    monkeypatch.setattr(setup, "known_hardware", lambda: None)


@pytest.fixture
def no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that plan often, and do not look at what would change."""
    monkeypatch.setattr("hotrow.forecast.explain.changes", lambda *_: [])


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    def run(config: Path, *arguments: object, hardware: Hardware | None = None, code: int = 0) -> Any:
        options: list[object] = []
        if hardware is not None:
            HARDWARE.write(tmp_path / "hardware.json", hardware)
            options = ["--hardware", tmp_path / "hardware.json"]
        words = ["hotrow", "plan", config, *options, *arguments]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert (ended.value.code or 0) == code, out + err
        return err if code else json.loads(out.splitlines()[-1]) if "--json" in arguments else out

    return run


def test_without_a_hardware_file_it_says_where_rows_lie(plan: Any, write: Any) -> None:
    for memory in ("auto", "dram"):
        found = plan(write(memory), "--json")
        assert found["disk"] is None and found["predicted"] is None and found["changes"] == []
        assert [(own["pinned"], own["on_disk"], own["why"]) for own in found["tables"]] == [
            (n, 0, "whole in DRAM") for n in (50, 4000, 30_000)
        ]
    text = plan(write({"dram": "600KiB"}))
    assert "600.0 KiB of DRAM, the rest in" in text
    assert "no speed is predicted: no figures of this machine are known: measure it with hotrow probe" in text


@pytest.fixture
def measured(hardware: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Made-up figures of the machine that runs the tests, where `hotrow probe` keeps them."""
    rates = {"1": Figure(1e10), "4": Figure(2e10)}
    made = replace(hardware, host=this_host(), stream_bytes_per_s=rates, flops_per_s=rates)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache/hotrow").mkdir(parents=True)
    HARDWARE.write(tmp_path / "cache/hotrow/hardware.json", made)
    return made


@pytest.mark.parametrize("name", sorted(path.stem for path in MACHINES.glob("*.yaml")))
def test_a_step_on_a_declared_machine(plan: Any, write: Any, measured: Hardware, name: str) -> None:
    for memory in ("auto", {"dram": "600KiB"}):
        found = plan(write(memory), "--json", "--hardware", name)
        assert found["predicted"] is not None, found["not_predicted"]
        assert found["predicted"]["samples_per_s"] > 0
        assert found["modelled"].startswith("modelled from steps measured on made up on 2026-01-01")
        assert all(each["modelled"] for each in found["changes"])
    text = plan(write(), "--hardware", name)
    assert f"modelled on {found['hardware']['name']}, from steps measured on made up" in text
    assert "predicted on" not in text


@pytest.mark.usefixtures("no_changes")
def test_another_machine_has_its_own_threads_and_memory(
    plan: Any, write: Any, measured: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.setup.room.available_memory_bytes", lambda: MIB)
    monkeypatch.setattr(setup, "beside_bytes", lambda *_, **__: 0)
    declared = tmp_path / "declared.yaml"
    declared.write_text("price_per_hour: {value: 2, note: a list of prices}")
    config = write(threads="auto")
    here, there = (plan(config, "--json", "--hardware", each) for each in (declared, "cpu-server"))
    assert here["dram_bytes"] == int(0.6 * MIB) and here["disk"] is not None, "the same machine at another price"
    assert here["threads"] == default_threads() and here["modelled"] is None
    assert there["disk"] is None and there["threads"] == 48
    assert ", on 48 threads: " in plan(config, "--hardware", "cpu-server")
    assert plan(write(threads=3), "--json", "--hardware", "cpu-server")["threads"] == 3


def test_another_machine_has_its_own_disk(write: Any, dataset: PackedDataset, hardware: Hardware) -> None:
    config = load_config(write({"dram": "900KiB"}), ())

    def writes(capacity: float | None) -> str:
        (disk,) = hardware.disks
        disk = replace(disk, capacity_bytes=None if capacity is None else Figure(capacity))
        division = SlotPlanner(
            config=config,
            tables=[replace(tables_of(config, dataset)[2], num_embeddings=40_000)],
            memory=Memory(dram=64 * MIB, ssd="/tmp", writes="auto"),
            hardware=replace(hardware, disks=[disk]),
            room=Room.of(replace(hardware, disks=[disk])),
        )
        return division.settled(division.memory).writes

    assert [writes(each) for each in (None, 1e12, MIB)] == ["gathered", "gathered", "in_place"]


def test_the_plan_of_tiers_is_that_of_training(
    plan: Any, write: Any, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write({"dram": "600KiB"}, max_steps=None, epochs=10)
    slots: list[Any] = []
    begin = trainer.build

    def build(*decided: Any) -> Any:
        parts = begin(*decided)
        tiers = parts.embedding.placement.find(Tiers)
        assert tiers is not None
        slots.extend(tiers.slots)
        return parts

    monkeypatch.setattr(trainer, "build", build)
    monkeypatch.setattr(setup, "known_hardware", lambda: hardware)
    found = plan(config, "--json", hardware=hardware)
    record = runs.train(load_config(config, ()), quiet=True).record
    assert [(own["pinned"], own["cached"]) for own in found["tables"]] == [tuple(own) for own in slots]
    of_one = {name: value for name, value in found["predicted"].items() if value is not None}
    named = {"hardware": {"name": "made up", "date": "2026-01-01"}, "error": BLIND_ERROR}
    assert record.predicted == {**of_one, **named, "changes": found["changes"]}
    assert found["predicted"]["wait_ms"] > 0 and found["written_bytes_per_day"] > 0
    assert 0 <= found["hits_missed"] < 0.05 and found["modelled"] is None
    assert all(own["pinned"] + own["cached"] + own["on_disk"] == own["rows"] for own in found["tables"])
    changes = {each["what"]: each for each in found["changes"]}
    disk, dram = changes["a disk 2 times as fast"], next(each for what, each in changes.items() if "every row" in what)
    assert disk["modelled"] and not dram["modelled"]
    assert disk["gain"] > 0 and dram["gain"] > 0


@pytest.mark.usefixtures("no_changes")
def test_a_target_names_the_least_memory(plan: Any, write: Any, hardware: Hardware) -> None:
    long = {"max_steps": None, "epochs": 10}

    def speed(num_bytes: int | str) -> float:
        found = plan(write({"dram": num_bytes}, **long), "--json", hardware=hardware)
        return float(found["predicted"]["samples_per_s"])

    wanted = (speed("600KiB") + speed("1GiB")) / 2
    target = plan(write(**long), "--json", "--target", wanted, hardware=hardware)["target"]
    assert target["reached"]

    assert speed(target["memory_bytes"]) >= 0.999 * wanted
    assert speed(int(0.97 * target["memory_bytes"])) < wanted


def test_a_target_that_no_memory_reaches(plan: Any, write: Any, hardware: Hardware) -> None:
    text = plan(write(), "--target", 1e12, hardware=hardware)
    assert "for 1,000,000,000,000 samples/s: no amount of memory is enough: with every row in DRAM it is" in text


@pytest.mark.usefixtures("no_changes")
def test_four_ranks(plan: Any, write: Any, hardware: Hardware, dataset: PackedDataset) -> None:
    assert "has no network" in plan(write(), "--ranks", 4, hardware=hardware, code=2)
    linked = replace(hardware, network=NETWORK)
    config = load_config(write(), ())
    tables = tables_of(config, dataset)
    needed = required_bytes(config, tables)
    text = plan(write({"dram": needed // 3}), "--ranks", 4, hardware=linked)
    assert "modelled, on 1 thread each: " in text and "x one machine's" in text
    assert "4 machines like made up" in text and "dealt out row by row: " in text and "all in DRAM" in text
    found = plan(write({"dram": needed // 3}), "--json", "--ranks", 4, hardware=linked)["ranks"]
    assert max(found["held_bytes"]) <= needed // 3 == found["capacity_bytes"]
    shards = shards_of(config, tables, dataset, 4)
    wanted = {name: "replicated" if shard.prefix else "row" for name, shard in shards.items()}
    assert found["owners"] == wanted, "as training shares them"
    step = found["step"]
    assert sum(step["step_ms"].values()) > step["exchange_ms"] > 0 and step["wire_bytes_per_step"]["rows"] > 0
    assert "all in DRAM" not in plan(write({"dram": needed // 8}), "--ranks", 4, hardware=linked)
    assert "there are 4 ranks, and each needs one" in plan(
        write(micro_batches=3), "--ranks", 4, hardware=linked, code=2
    )


@pytest.mark.usefixtures("no_changes")
def test_ranks_that_share_columns(plan: Any, write: Any, hardware: Hardware, dataset: PackedDataset) -> None:
    linked, name = replace(hardware, network=NETWORK), dataset.info.tables[2].name
    options = ["--set", "optimizer.sparse.name=adagrad", "--set", f"parallel.sharding={{{name}: column}}", "--ranks", 2]
    assert f"columns on ranks 0, 1: {name}" in plan(write(), *options, hardware=linked)
    found = plan(write(), "--json", *options, hardware=linked)["ranks"]
    tables = tables_of(load_config(write(), ("optimizer.sparse.name=adagrad",)), dataset)
    copied = [own.num_embeddings for own in tables if found["owners"][own.name] == "replicated"]
    rows = sum(own.num_embeddings for own in tables) + sum(copied)
    record = 2 * 4 * tables[0].embedding_dim
    assert sum(found["held_bytes"]) == rows * record, "each column lies once"
    assert max(found["held_bytes"]) - min(found["held_bytes"]) <= record * len(tables)


def test_a_second_machine_and_a_gpu_are_modelled(
    plan: Any, write: Any, hardware: Hardware, dataset: PackedDataset
) -> None:
    gpu = Gpu(
        name="a GPU",
        memory_bytes=Figure(1e10),
        memory_bytes_per_s=Figure(1e12),
        to_device_bytes_per_s=Figure(2e10),
        to_host_bytes_per_s=Figure(1e10),
        product_flops_per_s={"fp32": Figure(1e10)},
    )
    found = plan(write(), "--json", hardware=replace(hardware, network=FAST, gpus=[gpu]))
    changes = {each["what"]: each for each in found["changes"]}
    second_name, gpu_name = "a second machine like this", "dense layers on a GPU, at most"
    assert {name for name, each in changes.items() if each["modelled"]} == {second_name, gpu_name}
    config, before = load_config(write(), ()), found["predicted"]["step_ms"]
    work = work_of(config, tables_of(config, dataset), dataset)
    flops = 6 * sum(n * inputs * outputs for n, inputs, outputs in work.products)
    pooled_bytes = 4 * 200 * 16 * 4
    step_ms = sum(before.values()) - before["dense"] + 1e3 * (flops / 1e10 + pooled_bytes * (1 / 2e10 + 1 / 1e10))
    modelled = changes[gpu_name]
    assert modelled["modelled"] and modelled["samples_per_s"] == pytest.approx(200e3 / step_ms, rel=1e-3)
    second = changes[second_name]
    assert 0.3 < second["gain"] <= 1
    two = plan(write(), "--json", "--ranks", 2, hardware=replace(hardware, network=FAST))["ranks"]
    assert second["samples_per_s"] == pytest.approx(two["step"]["samples_per_s"], rel=1e-3)


def test_other_exchanges_of_ranks(plan: Any, write: Any, hardware: Hardware, dataset: PackedDataset) -> None:
    linked, config = replace(hardware, network=NETWORK), load_config(write(), ())
    alone = SlotPlanner(
        config=config,
        tables=tables_of(config, dataset),
        memory=Memory(dram=64 * MIB, ssd="/tmp"),
        dataset=dataset,
        hardware=linked,
    )
    found = {each.what: each for each in changes_of(as_one_rank(alone, config, 2), None)}
    for what, option in (
        ("another exchange of rows", "parallel.exchange=pooled"),
        ("numbers that travel rounded", "parallel.wire_dtype=bf16"),
    ):
        there = plan(write(), "--json", "--ranks", 2, "--set", option, hardware=linked)["ranks"]["step"]
        assert found[f"{what} ({option})"].samples_per_s == pytest.approx(there["samples_per_s"], rel=1e-3)


def test_a_change_that_cannot_be_predicted_says_why(plan: Any, write: Any, hardware: Hardware) -> None:
    gpu = Gpu(
        name="a GPU",
        memory_bytes=Figure(1e10),
        memory_bytes_per_s=Figure(1e12),
        to_device_bytes_per_s=Figure(2e10),
        to_host_bytes_per_s=Figure(1e10),
    )
    text = plan(write(), hardware=replace(hardware, gpus=[gpu]))
    assert "cannot  dense layers on a GPU, at most: a GPU has no product_flops_per_s of fp32" in text
    changes = {
        each["what"]: each for each in plan(write(), "--json", hardware=replace(hardware, gpus=[gpu]))["changes"]
    }
    reasons = {
        "dense layers on a GPU, at most": "fp32",
        "a second machine like this": "has no network",
        "hot and cold phases (hot.schedule=fae)": "cannot be predicted yet",
    }
    for what, reason in reasons.items():
        change = changes[what]
        assert change["samples_per_s"] is None and change["gain"] is None and reason in change["cannot"]


def test_a_change_of_an_option_is_predicted_as_a_run_with_it(
    plan: Any, write: Any, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the plan of the config that has the option; with all rows in DRAM, and with some on disk."""
    for memory in ("auto", {"dram": "600KiB", "lookahead": 1}):
        config = write(memory, max_steps=None, epochs=10)
        monkeypatch.setattr("hotrow.forecast.explain.changes", changes_of)
        found = plan(config, "--json", hardware=hardware)
        options = {each["what"].partition("(")[2].rstrip(")"): each for each in found["changes"] if "=" in each["what"]}
        wanted = {"train.threads=4", "train.batch_size=400", "hot.schedule=fae"}
        wanted |= {"train.precision=fp16", "train.precision=split_bf16"}
        assert set(options) == wanted | ({"memory.lookahead=4"} if memory != "auto" else set())
        monkeypatch.setattr("hotrow.forecast.explain.changes", lambda *_: [])
        for option, each in options.items():
            there = plan(config, "--json", "--set", option, hardware=hardware)
            assert each["cannot"] == there["not_predicted"] and not each["modelled"]
            if each["cannot"] is None:
                speed = there["predicted"]["samples_per_s"]
                assert each["samples_per_s"] == pytest.approx(speed, rel=1e-3), option
                assert each["gain"] == pytest.approx(speed / found["predicted"]["samples_per_s"] - 1, abs=2e-3)
        assert sum(each["cannot"] is None for each in options.values()) == 3 + (memory != "auto")
        gains = [each["gain"] for each in found["changes"] if each["gain"] is not None]
        assert gains == sorted(gains, reverse=True)


@pytest.mark.usefixtures("no_changes")
def test_the_rated_life_of_a_drive(plan: Any, write: Any, hardware: Hardware) -> None:
    config = write({"dram": "600KiB"}, max_steps=None, epochs=10)
    rated = replace(hardware, disks=[replace(hardware.disks[0], endurance_bytes=Figure(1e15))])
    found = plan(config, "--json", hardware=rated)
    assert found["rated_days"] == pytest.approx(1e15 / found["written_bytes_per_day"])
    assert f"the drive's rated life is {found['rated_days']:,.0f} days of this" in plan(config, hardware=rated)
    assert plan(config, "--json", hardware=hardware)["rated_days"] is None
    assert "rated life" not in plan(config, hardware=hardware)
    assert plan(write("dram"), "--json", hardware=rated)["rated_days"] is None, "nothing is written"


@pytest.mark.usefixtures("no_changes")
def test_words_for_what_binds(plan: Any, write: Any, hardware: Hardware) -> None:
    assert [bind(what) for what in ("disk", "rows in DRAM", "dense layers and their sums", "python")] == [
        "disk binds",
        "rows in DRAM bind",
        "dense layers and their sums bind",
        "python binds",
    ]
    found = plan(write({"dram": "600KiB"}, max_steps=None, epochs=10), "--json", hardware=hardware)
    assert found["written_bytes_per_day"] > 0 and found["predicted"]["binds"] == "disk", "not its reads alone"


def test_bad_questions(plan: Any, write: Any, hardware: Hardware, tmp_path: Path) -> None:
    for target in ("0", "inf", "nan"):
        assert f"--target is {target}; give" in plan(write(), "--target", target, code=2)
    assert "--target and --ranks need a prediction, and there is none: no figures" in plan(
        write(), "--target", 10, code=2
    )
    assert "--ranks is 1; give a number from 2" in plan(
        write(), "--ranks", 1, hardware=replace(hardware, network=NETWORK), code=2
    )
    assert "more are needed (memory.dram=" in plan(write({"dram": "20KiB"}), code=2)
    assert "is not a file" in plan(write(), "--hardware", tmp_path / "absent.json", code=2)


def test_training_says_predicted_beside_measured(
    write: Any, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "known_hardware", lambda: hardware)
    run = hotrow.Run(runs.train(load_config(write(), ()), quiet=True).path)
    assert run.record.predicted is not None and run.record.step_ms is not None
    assert set(run.record.predicted["step_ms"]) == set(run.record.step_ms)
    assert run.summary()["predicted"] == run.record.predicted
    text = run.closing_lines("rows", [])
    assert "ms measured (predicted);" in text and f"{run.record.predicted['binds']} binds" in text


def test_counts_are_checked_and_read_once_before_a_run(
    write: Any, dataset: PackedDataset, hardware: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the slots, for the work of a step, and for what caches hit.

    Of large tables no change of the run is predicted that reads them again.
    """
    checked, read = [], []
    side_file, rates = PackedDataset._side_file, solve._rates
    monkeypatch.setattr(
        PackedDataset, "_side_file", lambda self, name, **k: (checked.append(name), side_file(self, name, **k))[1]
    )
    monkeypatch.setattr(solve, "_rates", lambda name, *a: (read.append(name), rates(name, *a))[1])
    monkeypatch.setattr(setup, "known_hardware", lambda: hardware)
    monkeypatch.setattr(foretelling, "QUICK_ROWS", 34_000)
    config = load_config(write({"dram": "600KiB", "force": True}), ())
    decided = setup.Setup.decide(config, PackedDataset.open(dataset.path), tmp_path / "run")
    forecast = foretelling.foretell(decided, what_helps=True)
    assert decided.in_tiers and forecast.predicted is not None
    assert sorted(checked) == [f"counts/t{t}" for t in range(3)]
    assert sorted(read) == ["t0", "t1", "t2"]
    left = [each["what"] for each in forecast.predicted["changes"] if "ask hotrow plan" in (each["cannot"] or "")]
    assert len(left) == 2 and "train.batch_size=400" in left[0] and "memory.lookahead=8" in left[1], left


@pytest.mark.parametrize("fault", ["a figure is missing", "the model fails"])
def test_training_does_not_fail_for_want_of_a_prediction(
    write: Any, hardware: Hardware, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("a fault of the model")

    if fault == "the model fails":
        monkeypatch.setattr("hotrow.setup.slots.predict", fail)
    else:
        hardware = replace(hardware, kernels={})
    monkeypatch.setattr(setup, "known_hardware", lambda: hardware)
    record = runs.train(load_config(write({"dram": "600KiB"}), ()), quiet=True).record
    assert record.status == "finished" and record.predicted is None
    assert record.warnings["not_predicted"]["count"] == 1


def test_figures_that_are_not_taken_are_a_counted_warning(
    write: Any, hardware: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hotrow").mkdir()
    HARDWARE.write(tmp_path / "hotrow/hardware.json", hardware)
    reseal(tmp_path / "hotrow/hardware.json", lambda fields: fields["dram_bytes"].update(value=-1))
    run = runs.train(load_config(write(), ()), quiet=True)
    warning = run.record.warnings["not_predicted"]
    assert warning["count"] == 1 and "hardware.json: dram_bytes.value is '-1'" in warning["text"]
    assert "dram_bytes.value" in (run.path / "report.html").read_text()


def test_what_a_miss_costs() -> None:
    """By hand: an I/O each way, or by bandwidth; rows that are gathered are written by the page."""
    disk = replace(DISK, sector_bytes=512, reads_per_s={"1": Figure(1e3), "8": Figure(1e5)})
    assert miss_s(TableDemand("t", 1, 100), disk) == pytest.approx(1e-5 + 2e-6 + 2e-5 + 2e-6)
    wide = TableDemand("t", 1, 100_000)
    assert miss_s(wide, disk) == pytest.approx(196 * 512 * (1e-9 + 2e-9) + 4e-6)
    assert miss_s(TableDemand("t", 1, 100, place_bytes=3), disk) == pytest.approx(1e-5 + 2e-6 + 100 / 5e8)


@pytest.mark.parametrize("known", ["figures", "no figures", "a fault of the model"])
def test_of_two_divisions_the_one_with_the_faster_step_is_taken(
    write: Any, dataset: PackedDataset, hardware: Hardware, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Where a step takes what its misses cost, and the disk moves bytes at a rate, wide rows are the dear ones."""
    (disk,) = hardware.disks
    slow = replace(disk, sector_bytes=16, read_bytes_per_s=Figure(1e4), write_bytes_per_s=Figure(1e4))
    tables = dataset.table_configs({"t0": 4, "t1": 128, "t2": 4})
    division = SlotPlanner(
        config=load_config(write({"dram": "900KiB"}), ()),
        tables=tables,
        memory=Memory(dram=900 << 10, ssd="/tmp"),
        dataset=dataset,
        hardware=None if known == "no figures" else replace(hardware, disks=[slow]),
    )
    demands = division.plain

    def cost(slots: Any) -> float:
        each = zip(division.uses(demands), slots, strict=True)
        return sum((use.rows_per_step - use.hits(own)) * miss_s(use.demand, slow) for use, own in each)

    def step(work: Any, machine: Hardware, slots: Any, shared: Any) -> Prediction:
        if known == "a fault of the model":
            raise ZeroDivisionError
        return Prediction(seconds={"lookup": cost(slots)}, wait_s=0.0, binds="disk reads")

    config = load_config(write(), ())
    work = work_of(config, tables_of(config, dataset), dataset)
    monkeypatch.setattr("hotrow.setup.slots.work_of", lambda *_, **__: work)
    monkeypatch.setattr("hotrow.setup.slots.predict", step)
    memory, _, slots = division.divide(900 << 10, "in_place")
    assert division.plan is not None
    equal = division.plan(demands, memory.slots_bytes)
    assert memory.plan is not None and [*memory.plan(demands, memory.slots_bytes)] == [*slots]
    if known == "figures":
        assert cost(slots) < 0.999 * cost(equal)
        assert sum(slots[1]) > sum(equal[1]), "wide rows"
    else:
        assert [*slots] == [*equal]
