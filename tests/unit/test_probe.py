"""hotrow.lab.probe: figures of a tiny file, and what is left behind."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrow.cli import app as cli
from hotrow.costs.hardware import DISTURBED, MACHINES, Disk, Figure, Hardware, Point, known_hardware, read_hardware
from hotrow.kernels import ops
from hotrow.lab import probe as module
from hotrow.lab.probe import (
    check_folder,
    measure_disk,
    measure_dram,
    measure_gpus,
    print_probe,
    probe,
    run_probe,
)
from hotrow.placement import store_file

needs_native = pytest.mark.skipif(ops.backend().name != "native", reason="the native module is measured")


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are measured in test_step_probe.py, and those of several processes in test_rank_prediction.py."""
    monkeypatch.setattr(module, "measure_kernels", lambda **_: {})
    monkeypatch.setattr(module, "measure_ranks", lambda **_: {})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on a disk, and sizes that take no time."""
    monkeypatch.setattr(module, "NUM_ROUNDS", 3)
    monkeypatch.setattr(module, "FILE_BYTES", 9 << 19)
    monkeypatch.setattr(module, "DRAM_BYTES", 4 << 20)
    monkeypatch.setattr(module, "ROW_BYTES", (64, 512))
    monkeypatch.setattr(module, "DEPTHS", (1, 8))
    monkeypatch.setattr(module, "MAX_IOS", 256)
    folder = tmp_path / "disk"
    folder.mkdir()
    if not store_file.direct_io(folder)["direct_io"]:
        pytest.skip("direct I/O is refused where tests write")
    return folder


def figures(value: Any) -> Iterator[Figure]:
    if isinstance(value, Figure):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from figures(each)
    elif isinstance(value, list):
        for each in value:
            yield from figures(each)
    elif hasattr(value, "__dataclass_fields__"):
        yield from figures(vars(value))


def check_measured(value: Any, *, at_least: int) -> None:
    found = list(figures(value))
    assert len(found) >= at_least
    for figure in found:
        assert figure.source == "measured"
        if figure.low is not None and figure.high is not None:
            assert 0 < figure.low <= figure.value <= figure.high


@needs_native
def test_a_disk(tiny: Path) -> None:
    told: list[str] = []
    disk = measure_disk(tiny, seconds=0.1, tell=told.append)
    assert isinstance(disk, Disk)
    check_measured(disk, at_least=8)
    assert list(disk.reads_per_s) == list(disk.writes_per_s) == ["1", "8"]
    assert disk.folder == str(tiny) and disk.sector_bytes in store_file.SECTORS
    assert told[0].endswith("sequential writes") and told[-1].endswith("random writes, queue depth 8")
    assert list(tiny.iterdir()) == []


@needs_native
def test_a_disks_rows_are_read_past_the_page_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    open_store = module.open_store

    def watched(*arguments: Any, **options: Any) -> Any:
        opened.append(open_store(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(module, "open_store", watched)
    monkeypatch.setattr(module, "io_uring_refused", lambda: "it is refused")
    disk = measure_disk(tiny, seconds=0.05)
    assert disk.engine == "threads"
    assert opened and all(store.fallback is None for store in opened), "a fallback would be the page cache"


@needs_native
@pytest.mark.parametrize("at", ["sequential writes", "random reads, queue depth 1", "random writes, queue depth 8"])
def test_an_interrupted_probe_leaves_no_file(tiny: Path, at: str) -> None:
    def interrupt(figure: str) -> None:
        if figure.endswith(at):
            assert list(tiny.iterdir()), "there is something to leave"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_disk(tiny, seconds=0.05, tell=interrupt)
    assert list(tiny.iterdir()) == []


@needs_native
def test_a_full_disk_says_what_to_do(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match=rf"disk full while measuring the disk in {tiny} .* Free some space"):
        measure_disk(tiny, seconds=0.05)
    assert list(tiny.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "message"), [("tmpfs", "is memory"), ("nfs4", r"is on a network file system \(nfs4\); name a folder of")]
)
def test_folders_that_are_no_disk_of_this_machine(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    monkeypatch.setattr(store_file, "file_system", lambda _: kind)
    with pytest.raises(ValueError, match=f"the disk of {tiny} cannot be measured: .*{message}"):
        check_folder(tiny)


def test_folders_that_take_no_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny / "file").touch()
    with pytest.raises(ValueError, match="file is not a folder; name a folder on the disk to measure"):
        check_folder(tiny / "file")
    with pytest.raises(ValueError, match="absent is not a folder"):
        check_folder(tiny / "absent")
    assert not (tiny / "absent").exists()
    monkeypatch.setattr(module, "disk_free_bytes", lambda _: module.FILE_BYTES)
    with pytest.raises(ValueError, match=r"has 4\.5 MiB free, and the probe writes a file of 4\.5 MiB there"):
        check_folder(tiny)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=f"cannot be measured: this process may not write in {tiny}; name another"):
        check_folder(tiny)


@needs_native
def test_memory(tiny: Path) -> None:
    found = measure_dram(2)
    assert list(found["stream_bytes_per_s"]) == list(found["flops_per_s"]) == ["1", "2"]
    sizes = [(point.sizes["row_bytes"], point.sizes["threads"]) for point in found["random_rows"]]
    assert sizes == [(64, 1), (64, 2), (512, 1), (512, 2)]
    check_measured(dict(found), at_least=8)


def test_no_gpu_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure_gpus() == {}


def test_a_gpu_that_cannot_be_measured_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "G")
    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    found = measure_gpus()
    assert found == {"gpus": [], "notes": {"gpus": "G was not measured: CUDA error: out of memory"}}


POINT = Point({"threads": 1.0, "steps": 1.0}, Figure(1e-3))


# ---- all of it


@needs_native
def test_everything_becomes_a_file_that_plans_find(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: dict[str, Any] = {}

    def kernels(**options: Any) -> dict[str, list[Point]]:
        asked.update(options)
        return {"lookup": [Point({"threads": 1.0}, Figure(1e-3, 1e-3, 1e-3))]}

    monkeypatch.setattr(module, "measure_kernels", kernels)
    path, made = run_probe([tiny], seconds=0.2)
    assert known_hardware() == made == read_hardware(path)
    assert [disk.folder for disk in made.disks] == [str(tiny)]
    assert list(made.kernels) == ["lookup"]
    assert asked["folder"] == tiny and asked["threads"][0] == 1 and asked["seconds"] == 0.1, (
        "the rest took longer than it should"
    )
    assert path.stat().st_mode & 0o777 == 0o600


@needs_native
def test_a_probe_beside_other_work_warns_at_its_end(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(num_disturbed: int) -> str:
        notes = [f"{DISTURBED}: by others"] * num_disturbed + [""] * (4 - num_disturbed)
        kernels = {"dense": [Point({"threads": 1.0}, Figure(1e-3, note=note)) for note in notes]}
        monkeypatch.setattr(module, "measure_kernels", lambda **_: kernels)
        path, made = run_probe((), out=tiny.parent / "h.json", seconds=0.1)
        print_probe(made, path)
        return capsys.readouterr().out.splitlines()[-2]

    assert "warning" not in run(2)
    assert run(3).startswith("kernels: warning: other work ran during 75% of the measured steps, and predictions from")


@needs_native
def test_the_command(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "measure_kernels", lambda **_: {"data": [POINT]})
    shared = {"kernels": {"shared update": [POINT]}, "crowding": Figure(1.5), "notes": {"network": "none here"}}
    monkeypatch.setattr(module, "measure_ranks", lambda **_: shared)
    out, declared = tiny.parent / "h.json", tiny.parent / "d.yaml"
    declared.write_text(f"disks: [{{folder: {tiny}, endurance_bytes: {{value: 1e15, note: data sheet}}}}]")
    words = ["probe", str(tiny), "--out", str(out), "--declare", str(declared), "--seconds", "0.2"]
    for options in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["hotrow", *words, *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
    shown = capsys.readouterr()
    table, result = shown.out.splitlines()[:-1], json.loads(shown.out.splitlines()[-1])
    assert table[0].split() == ["figure", "value", "quartiles", "source"]
    row = next(line for line in table if "endurance_bytes" in line)
    assert row.split()[1:] == [str(tiny), "endurance_bytes", "931,322.57", "GiB", "declared:", "data", "sheet"]
    assert table[-1] == f"wrote {out}"
    assert result["out"] == str(out)
    found = read_hardware(out)
    assert found.kernels == {"data": [POINT], "shared update": [POINT]}
    assert (found.crowding, found.network) == (Figure(1.5), None) and found.notes["network"] == "none here"
    assert result["disks"][0]["read_bytes_per_s"] == asdict(found.disks[0].read_bytes_per_s)
    assert "measuring: " in shown.err


@needs_native
def test_measurements_outlive_a_fault_in_what_is_declared(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("watts: {value: 1e9, note: n}")
    with pytest.raises(ValueError, match="watts: 1e"):
        run_probe((), out=tmp_path / "h.json", declare=tmp_path / "d.yaml", seconds=0.1)
    assert isinstance(read_hardware(tmp_path / "h.json"), Hardware)


@needs_native
def test_steps_are_modelled_on_another_machine(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def kernels(*, threads: list[int], **_: Any) -> dict[str, list[Point]]:
        return {"dense": [Point({"threads": float(n), "calls": 1.0}, Figure(1e-6)) for n in threads]}

    declare = MACHINES / "cpu-server.yaml"
    monkeypatch.setattr(module, "measure_kernels", kernels)
    path, made = run_probe((), out=tmp_path / "h.json", declare=declare, seconds=0.1)
    assert read_hardware(path) == made
    assert (made.name, made.num_cores, made.notes["kernels"][:13]) == ("dual-socket CPU server", 48, "modelled from")
    assert {point.sizes["threads"] for point in made.kernels["dense"]} == {1, 48}


def test_what_is_asked_is_checked_before_anything_is_measured(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_dram", lambda *_: pytest.fail("measured"))
    (tmp_path / "other.yaml").write_text("name: another machine")
    with pytest.raises(ValueError, match=r"other\.yaml describes another machine .* name a file for it with --out"):
        run_probe((), declare=tmp_path / "other.yaml")
    with pytest.raises(ValueError, match="is a folder, or in none"):
        run_probe((), out=tmp_path)
    with pytest.raises(ValueError, match="absent is not a folder"):
        probe([tiny, tiny / "absent"])
    with pytest.raises(ValueError, match="seconds is 0; give a positive number"):
        probe([], seconds=0)
    monkeypatch.setattr(module.ops, "backend", lambda: ops.Backend("reference", "torch", 1, "it is not built"))
    with pytest.raises(ValueError, match="measures the native kernels and stores, but it is not built"):
        probe([])


@needs_native
def test_no_thread_is_left(tiny: Path) -> None:
    before = threading.active_count()
    measure_disk(tiny, seconds=0.02)
    assert threading.active_count() == before
