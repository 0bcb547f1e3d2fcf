"""What `hotrow doctor FOLDER` measures: figures of a tiny file, and what is left behind."""

import os
from pathlib import Path
from typing import Any

import pytest

from hotrow.kernels import ops
from hotrow.placement import store_file
from hotrow.plan import disks
from hotrow.plan.disks import measure_disk, measure_memory, measured

needs_native = pytest.mark.skipif(not ops.isas(), reason="kernels and stores are measured by the native module")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sizes = {"ROUNDS": 2, "ROUND_S": 0.001, "MEMORY_BYTES": 1 << 16, "FILE_BYTES": 9 << 19, "MAX_IOS": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(disks, name, value)
    monkeypatch.setattr(store_file, "file_system", lambda _: "ext4")
    if not store_file.direct_io(tmp_path)["direct_io"]:
        pytest.skip(f"{tmp_path} is on no disk")
    return tmp_path


@needs_native
def test_figures_of_memory_and_a_disk(tiny: Path) -> None:
    found = measured([tiny])
    own = found["disks"][str(tiny)]
    assert own["sector_bytes"] in store_file.SECTORS and own["engine"] in ("io_uring", "threads")
    assert all(own[name] > 0 for name in own if name != "engine") and len(own) == 8
    assert all(value > 0 for value in found["memory"].values()) and found["memory"] != measure_memory()
    assert list(tiny.iterdir()) == [] and measured([]) == {}


@needs_native
def test_rows_are_read_past_the_page_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    open_store = disks.open_store

    def watched(*arguments: Any, **options: Any) -> Any:
        opened.append(open_store(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(disks, "open_store", watched)
    monkeypatch.setattr(disks, "io_uring_refused", lambda: "it is refused")
    assert measure_disk(tiny)["engine"] == "threads"
    assert opened and all(store.fallback is None for store in opened), "a fallback would be the page cache"


@needs_native
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failure_leaves_no_file(tiny: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> int:
        assert list(tiny.iterdir()), "there is something to leave"
        raise error

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(type(error)) as raised:
        measure_disk(tiny)
    assert list(tiny.iterdir()) == []
    assert isinstance(error, KeyboardInterrupt) or f"disk full while measuring the disk in {tiny}" in str(raised.value)


def test_folders_that_cannot_be_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny / "file").touch()
    for name in ("file", "absent"):
        with pytest.raises(ValueError, match=f"{name} is not a folder; name a folder on the disk"):
            measure_disk(tiny / name)
    assert not (tiny / "absent").exists()
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"has 4\.5 MiB free, and measuring writes"):
        patch.setattr(disks, "disk_free_bytes", lambda _: disks.FILE_BYTES)
        measure_disk(tiny)
    monkeypatch.setattr(store_file, "file_system", lambda _: "tmpfs")
    with pytest.raises(ValueError, match=f"the disk of {tiny} cannot be measured: .*is memory"):
        measure_disk(tiny)
