"""hotrow.costs.hardware: files of a machine's figures, what is refused in them, and figures that somebody declared."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hotrow.base.records import write_sealed
from hotrow.costs import hardware as module
from hotrow.costs.hardware import (
    COST_VERSION,
    HARDWARE,
    MACHINES,
    Disk,
    Figure,
    Gpu,
    Hardware,
    Network,
    Point,
    hardware_path,
    known_hardware,
    read_declared,
    read_hardware,
    table_of,
    this_host,
)


def figure(value: float) -> Figure:
    return Figure(value, 0.9 * value, 1.1 * value)


DISK = Disk(
    folder="/nvme",
    reads_per_s={"1": figure(1e4), "128": figure(4e5)},
    writes_per_s={"128": figure(1e5)},
    read_bytes_per_s=figure(3e9),
    write_bytes_per_s=figure(2e9),
    cpu_s_per_io=figure(2e-6),
)
GPU = Gpu(
    name="G",
    memory_bytes=Figure(8e10),
    memory_bytes_per_s=figure(2e12),
    to_device_bytes_per_s=figure(5e10),
    to_host_bytes_per_s=figure(5e10),
    product_flops_per_s={"fp32": figure(5e13)},
)
WHOLE = Hardware(
    name="a machine",
    date="2026-01-31",
    host={"cpu": "C", "cores": 4, "usable_cores": 4, "isa": "avx2"},
    versions={"torch": "2"},
    num_cores=4,
    dram_bytes=Figure(2.0**34),
    stream_bytes_per_s={"1": figure(1e10), "4": figure(3e10)},
    flops_per_s={"1": figure(1e11)},
    random_rows=[Point({"row_bytes": 64.0, "threads": 4.0}, figure(1e-8))],
    kernels={"lookup": [Point({"threads": 1.0}, figure(1e-3))]},
    cost_version=COST_VERSION,
    disks=[DISK],
    gpus=[GPU],
    network=Network(figure(2e9), figure(5e-5), figure(2e-5), figure(3e-10)),
    mpi=Network(figure(6e9), figure(1e-5), figure(1e-5), figure(2e-10)),
    crowding=figure(1.25),
    watts=figure(100),
    notes={"price_per_hour": "not declared"},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    HARDWARE.write(tmp_path / "h.json", WHOLE)
    assert read_hardware(tmp_path / "h.json") == WHOLE


Change = Callable[[dict[str, Any]], None]


def put(path: str, value: Any) -> Change:
    """Sets, or with `...` removes, the field at a dotted path."""

    def change(fields: dict[str, Any]) -> None:
        *steps, last = path.split(".")
        at: Any = fields
        for step in steps:
            at = at[int(step) if step.isdigit() and isinstance(at, list) else step]
        if value is ...:
            del at[last]
        else:
            at[last] = value

    return change


MEASURED = {"value": 1.0, "low": None, "high": None, "source": "measured", "note": ""}
FAULTS: list[tuple[Change, str]] = [
    (put("name", " "), "name is empty"),
    (put("name", ...), r"name: it is missing"),
    (put("date", "yesterday"), "date is 'yesterday'; write it as"),
    (put("num_cores", 0), "num_cores is 0; it must be from 1"),
    (put("num_cores", 4.0), r"num_cores is '4\.0': it must be a whole number"),
    (put("num_cores", 2), "stream_bytes_per_s has a figure of 4 threads, and num_cores is 2"),
    (put("kernels.lookup.0.sizes.threads", 8.0), "lookup has a figure of 8 threads, and num_cores is 4"),
    (put("dram_bytes", ...), "dram_bytes: it is missing"),
    (put("dram_bytes.value", -1.0), r"dram_bytes\.value is '-1\.0': it must be at least 0"),
    (put("dram_bytes.value", 0.0), "dram_bytes: 0 bytes is absurd"),
    (put("dram_bytes.value", "16GiB"), r"dram_bytes\.value is '16GiB': it must be a number"),
    (put("stream_bytes_per_s.4.value", 2e14), r"stream_bytes_per_s\.4: value 2e\+14 is not between low"),
    (put("stream_bytes_per_s.4", {**MEASURED, "value": 2e14}), r"stream_bytes_per_s\.4: 2e\+14 bytes/s is absurd"),
    (put("stream_bytes_per_s.two", MEASURED | {"value": 1e9}), "stream_bytes_per_s: key 'two' must be a whole number"),
    (put("flops_per_s.1.low", 2e11), r"flops_per_s\.1: value 1e\+11 is not between low 2e\+11"),
    (put("random_rows.0.seconds", MEASURED | {"value": 0.0}), r"random_rows\.0\.seconds: 0 s is absurd"),
    (put("random_rows.0.sizes", {}), r"random_rows\.0: sizes lack row_bytes and threads; a number of at least 1"),
    (put("random_rows.0.sizes.threads", ...), r"random_rows\.0: sizes lack threads"),
    (put("kernels.lookup.0.sizes", {"ids": 1.0}), r"lookup\.0: sizes lack threads"),
    (put("disks.0.reads_per_s", {}), r"disks\.0: reads_per_s is empty"),
    (put("disks.0.writes_per_s.128", MEASURED | {"value": 0.0}), r"disks\.0\.writes_per_s\.128: 0 I/Os/s is absurd"),
    (put("disks.0.sector_bytes", 0), r"disks\.0: sector_bytes is 0"),
    (put("disks.0.engine", "tape"), r"disks\.0\.engine is 'tape': it must be"),
    (put("disks.0.cpu_s_per_io", ...), r"disks\.0\.cpu_s_per_io: it is missing"),
    (put("disks.0.endurance_bytes", MEASURED | {"value": 1e15, "source": "declared"}), "needs a note with its public"),
    (put("gpus.0.count", 0), r"gpus\.0: count is 0"),
    (put("watts", MEASURED | {"value": 0.0}), "watts: 0 W is absurd"),
    (put("watts.source", "guessed"), r"watts\.source is 'guessed': it must be"),
    (put("price_per_hour", MEASURED | {"source": "assumed"}), "price_per_hour: .* the reason for assuming it"),
    (lambda fields: fields["disks"].append(fields["disks"][0]), "disks has '/nvme' twice"),
    (put("speed", 1), "speed: there is no such field"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_faults_are_named_by_file_field_and_cure(tmp_path: Path, change: Change, message: str) -> None:
    fields = json.loads(json.dumps(asdict(WHOLE)))
    change(fields)
    write_sealed(tmp_path / "h.json", {"hotrow_hardware": 1, **fields})
    with pytest.raises(ValueError, match=rf"h\.json: .*{message}.*; measure it again with hotrow probe$"):
        read_hardware(tmp_path / "h.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_no_figure_is_endless_or_below_zero(value: float) -> None:
    with pytest.raises(ValueError, match="value"):
        Figure(value)


# ---- declared figures


@pytest.fixture
def declare(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "d.yaml").write_text(text)
        return tmp_path / "d.yaml"

    return write


def test_declared_figures_replace_measured_ones(declare: Callable[[str], Path]) -> None:
    path = declare("""
price_per_hour: {value: 0.5, note: "https://example.org/prices"}
dram_bytes: {value: 64GiB, source: assumed, note: "four more modules"}
disks:
  - {folder: /nvme, endurance_bytes: {value: 1e15, note: "https://example.org/drive"}}
  - folder: /cxl
    engine: mapped
    sector_bytes: 64
    reads_per_s: {"1": {value: 1e6, note: n}}
    writes_per_s: {"1": {value: 1e6, note: n}}
    read_bytes_per_s: {value: 2e10, note: n}
    write_bytes_per_s: {value: 2e10, note: n}
    cpu_s_per_io: {value: 1e-6, source: assumed, note: n}
notes: {dram_bytes: "not bought yet"}
""")
    made = WHOLE.with_declared(path)
    assert made.price_per_hour == Figure(0.5, source="declared", note="https://example.org/prices")
    assert made.dram_bytes == Figure(2.0**36, source="assumed", note="four more modules")
    endurance = Figure(1e15, source="declared", note="https://example.org/drive")
    assert made.disks[0] == replace(DISK, endurance_bytes=endurance), "the measured figures of the disk stay"
    assert (made.disks[1].folder, made.disks[1].engine) == ("/cxl", "mapped")
    assert made.notes == {"price_per_hour": "not declared", "dram_bytes": "not bought yet"}
    undone = replace(made, price_per_hour=None, dram_bytes=WHOLE.dram_bytes, disks=WHOLE.disks, notes=WHOLE.notes)
    assert undone == WHOLE, "nothing else has changed"


def test_the_example_of_the_docs(declare: Callable[[str], Path]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "probe.md").read_text()
    made = WHOLE.with_declared(declare(page.split("```yaml\n")[1].split("```")[0]))
    endurance = made.disks[0].endurance_bytes
    assert endurance is not None and endurance.value == 10.95e15
    assert (made.dram_bytes.value, made.disks[0].reads_per_s) == (2.0**36, DISK.reads_per_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "declares nothing"),
        ("- 1", "declares nothing"),
        ("price: 1", "price: there is no such field"),
        ("host: {}", "host cannot be declared: it comes from hotrow probe"),
        ("watts: 100", r"watts is '100': it must be a mapping; docs/probe\.md"),
        ("watts: {value: 100}", "watts: a figure that is declared needs a note with its public source; docs/probe"),
        ("watts: {value: 100, source: assumed, note: ' '}", "needs a note with the reason for assuming it"),
        ("watts: {value: 100, source: measured}", "watts is 'measured': hotrow probe measures; write declared"),
        ("watts: {value: much, note: n}", "watts: size 'much' is not understood"),
        ("watts: {value: .nan, note: n}", r"watts\.value is 'nan': it must be a finite number"),
        ("watts: {value: 1e9, note: n}", r"watts: 1e\+09 W is absurd; it must be from 0\.01 to 1e\+06"),
        ("num_cores: 8", r"num_cores needs its public source, or the reason for it, as notes\.num_cores"),
        ("num_cores: 2\nnotes: {num_cores: n}", "has a figure of 4 threads, and num_cores is 2"),
        ("disks: [{folder: /new}]", r"disks\.1\.reads_per_s: it is missing"),
        (
            "random_rows: [{sizes: {row_bytes: 64}, seconds: {value: 1e-8, note: n}}]",
            r"random_rows\.0: sizes lack threads",
        ),
        ("disks: [7]", r"disks\.1 is '7': it must be"),
        ("disks: 7", "disks is '7': it must be a list"),
        ("disks: [{folder: [1]}]", r"disks\.1\.folder is '\[1\]': it must be text"),
        ("name: other\ndram_bytes: {value: 1GiB, note: n}", "num_cores: it is missing"),
        ("watts: {value: 1, note: n}\nwatts: {value: 2, note: n}", "given twice"),
    ],
)
def test_faults_of_declared_files(declare: Callable[[str], Path], text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"d\.yaml[:, ].*{message}"):
        WHOLE.with_declared(declare(text))


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_declared_machines_are_whole_and_say_where_each_figure_is_from(path: Path) -> None:
    made = WHOLE.with_declared(path)
    assert made.host == {"declared": path.name}
    assert (made.kernels, made.watts is None) == ({}, False), "nothing of the measured machine is left"
    rows = table_of(made)
    assert len(rows) > 10
    for place, _, spread, source in rows:
        assert source.startswith(("declared: ", "assumed: ")) and not spread, place
    for _, note in _declared_notes(read_declared(path)):
        assert "http" in note or note.startswith("the same specification")


def _declared_notes(value: Any) -> list[tuple[str, str]]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [("", value["note"])] if isinstance(value, dict) and value.get("source") == "declared" else []
    return [*own, *(found for part in parts for found in _declared_notes(part))]


def test_there_are_four_declared_machines() -> None:
    assert {path.stem for path in MACHINES.glob("*.yaml")} == {"cpu-server", "gpu-box", "sc20-cluster", "zion-style"}


# ---- which machine


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the figures of this machine are kept, in an empty folder of caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hotrow").mkdir()
    return tmp_path / "hotrow" / "hardware.json"


def test_this_machines_figures_are_found(kept: Path) -> None:
    assert hardware_path() == kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_hardware() is None
        mine = replace(WHOLE, host=this_host())
        HARDWARE.write(kept, mine)
        assert known_hardware() == mine


def test_the_folder_of_caches_must_be_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert hardware_path() == tmp_path / ".cache" / "hotrow" / "hardware.json"


@pytest.mark.parametrize("field", ["cpu", "cores", "usable_cores", "isa"])
def test_figures_of_another_machine_are_not_taken(kept: Path, field: str) -> None:
    host = this_host()
    HARDWARE.write(kept, replace(WHOLE, host={**host, field: "other"}))
    with pytest.warns(UserWarning, match=re.escape(f"{field} is 'other', here {host[field]!r}); measure it again")):
        assert known_hardware() is None


def test_steps_for_another_cost_model_are_not_taken(kept: Path) -> None:
    other = replace(WHOLE, host=this_host(), cost_version=module.COST_VERSION + 1)
    HARDWARE.write(kept, other)
    with pytest.warns(UserWarning, match=r"hardware\.json: measured for another version of hotrow"):
        assert known_hardware() is None
    with pytest.raises(ValueError, match="measured for another version of hotrow: run hotrow probe again"):
        read_hardware(kept)
    HARDWARE.write(kept, replace(other, kernels={}))
    assert known_hardware() is not None, "the rest does not depend on the model"
    assert other.with_declared(MACHINES / "cpu-server.yaml").cost_version == other.cost_version


def test_a_damaged_file_is_not_taken(kept: Path) -> None:
    kept.write_text("{}")
    with pytest.warns(UserWarning, match=r"hardware\.json has no checksum"):
        assert known_hardware() is None


def test_a_declared_file_goes_with_figures_of_this_machine(
    kept: Path, declare: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declare("price_per_hour: {value: 2, note: n}")
    with pytest.raises(ValueError, match="there are none: run hotrow probe first"):
        read_hardware(path)
    monkeypatch.setattr(module, "known_hardware", lambda: WHOLE)
    assert read_hardware(path) == WHOLE.with_declared(path)
    assert read_hardware("zion-style").name == "Zion-style server"
    with pytest.raises(ValueError, match=r"absent is not a file; .* cpu-server, gpu-box, sc20-cluster, zion-style"):
        read_hardware("absent")


def test_power_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "known_hardware", lambda: WHOLE)
    watts = {name: read_hardware(name).watts_without_gpus for name in ("cpu-server", "gpu-box", "zion-style")}
    assert {name: own and own.value for name, own in watts.items()} == {
        "cpu-server": 500, "gpu-box": 3300 - 8 * 300, "zion-style": 4400 - 8 * 300
    }  # fmt: skip
    box = read_hardware("gpu-box")
    assert replace(box, gpus=[replace(box.gpus[0], watts=None)]).watts_without_gpus is None


def test_the_disk_of_a_folder(tmp_path: Path) -> None:
    machine = replace(WHOLE, disks=[replace(DISK, folder=str(tmp_path))])
    assert machine.disk_at(tmp_path / "not" / "made yet") == machine.disks[0]
    assert machine.disk_at("/proc") is None
    gone = replace(DISK, folder="/gone")
    both = replace(WHOLE, disks=[gone, *machine.disks])
    assert both.disk_at("/gone/rows") == gone, "what is not here is known by its path"
    assert both.disk_at(tmp_path) == machine.disks[0]
    assert replace(WHOLE, disks=[gone], host={"declared": "d.yaml"}).disk_at(tmp_path) == gone


def test_figures_are_shown_in_their_units() -> None:
    rows = {place: (value, spread, source) for place, value, spread, source in table_of(WHOLE)}
    assert rows["dram_bytes"] == ("16.00 GiB", "", "measured")
    assert rows["stream_bytes_per_s 4"][:2] == ("30.00 GB/s", "27.00 GB/s .. 33.00 GB/s")
    assert rows["random_rows 64 bytes, 4 threads"][0] == "10.00 ns"
    assert rows["disks /nvme reads_per_s 128"][0] == "400k/s"
    assert rows["disks /nvme cpu_s_per_io"][0] == "2.00 us"
    assert rows["gpus G product_flops_per_s fp32"][0] == "50,000.0 GFLOP/s"
    assert rows["watts"][0] == "100.0 W"
    assert rows["network bytes_per_s"][0] == "2.00 GB/s" and rows["network s_per_message"][0] == "50.00 us"
    assert rows["network cpu_s_per_byte"][0] == "0.300 ns" and rows["crowding"][0] == "1.25x"


def test_a_declared_network_keeps_what_it_does_not_say(declare: Callable[[str], Path]) -> None:
    made = WHOLE.with_declared(declare("network: {bytes_per_s: {value: 3.0e9, note: https://example.org/nic}}"))
    assert made.network is not None and WHOLE.network is not None
    assert made.network.bytes_per_s.value == 3e9 and made.network.s_per_message == WHOLE.network.s_per_message
    made = WHOLE.with_declared(declare("mpi: {bytes_per_s: {value: 1.2e10, note: https://example.org/nic}}"))
    assert made.network == WHOLE.network and made.mpi is not None and WHOLE.mpi is not None
    assert made.mpi.bytes_per_s.value == 1.2e10 and made.mpi.s_per_message == WHOLE.mpi.s_per_message
