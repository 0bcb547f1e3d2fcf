"""What tests share: real data where it is present, and small packed datasets made on the spot."""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Triton reads this once, when whatever test imports it first does (torch.utils.flop_counter does).
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from hotrow.base import files
from hotrow.base.machine import usable_cores
from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter
from hotrow.kernels import ops
from packed_data import counts_file

ROOT = Path(__file__).resolve().parents[1]
NO_REAL_ROWS = "the real rows are not"


def pytest_configure() -> None:
    """Ctrl-C works in tests of it even where the tests run in the background, which shells start with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A worker for each core: one more would import torch and collect all tests once more, for waits that are few."""
    return max(2, min(usable_cores(), 4))


LONGEST = ("test_torchrun", "test_walk", "test_mpi", "test_model_laws", "test_export", "test_worlds", "test_placement")
"""Test files that take longest; they go first, so that what workers take from each other at the end is short."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow(items, whole_files=not any("::" in argument for argument in config.args))
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def _mark_slow(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Does what `slow_but` says. A name of no test is an error: all that it stands among would be slow."""
    named, found = dict[tuple[Path, str], None](), set[tuple[Path, str]]()
    for item in items:
        if (mark := item.get_closest_marker("slow_but")) is None or mark.kwargs.get("unless"):
            continue
        function, _, case = item.name.removesuffix("]").partition("[")
        quick = {item.name, function, case} & {*mark.args}
        found |= {(item.path, name) for name in quick}
        named |= dict.fromkeys((item.path, name) for name in mark.args)
        if not quick:
            item.add_marker(pytest.mark.slow)
    if whole_files and (unknown := [f"{path.name}: {name}" for path, name in named if (path, name) not in found]):
        raise pytest.UsageError(f"slow_but names no test: {unknown}")


def pytest_collection_finish() -> None:
    """What has been imported by now lives until the end: a collection of garbage need not look at it every time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tests skipped for want of real rows are one line of the summary, which has a line for each place and reason."""
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        if NO_REAL_ROWS in reason:
            report.longrepr = ("tests", None, reason)


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """Tests kill processes, never the machine: waiting until the disk has each file would show nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_trials_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `hotrow plan` kept here would be in the records of runs; child processes inherit this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _tiers_need_the_native_module() -> Iterator[None]:
    """Without it tables in tiers and on a device are refused (test_ops.py): a test that asks for them is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        if not ops.isas():
            patch.setattr(ops, "native_module", lambda *_, **__: pytest.skip("these tables need the native module"))
        yield


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """`real_data(name)`: the path of a real data file; skips the test where it is absent."""

    def find(name: str) -> Path:
        path = Path(os.environ.get("HOTROW_DATA", ROOT.parent / "shared" / "data")) / name
        if not path.exists():
            pytest.skip(f"{NO_REAL_ROWS} at {path.parent}: set HOTROW_DATA to their folder, if you have them")
        return path

    return find


class _FullDisk:
    """A file that takes `left` more bytes, counted together with those of its siblings."""

    def __init__(self, file: Any, left: list[int]) -> None:
        self._file, self._left = file, left

    def write(self, data: Any) -> int:
        self._left[0] -= memoryview(data).nbytes
        if self._left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """`with fill_disk(num_bytes):` the disk takes that many bytes through `files.atomic_write`, then is full."""

    @contextmanager
    def fill(num_bytes: int) -> Iterator[None]:
        left, plain = [num_bytes], files.open_private
        with monkeypatch.context() as patch:
            patch.setattr(files, "open_private", lambda path: _FullDisk(plain(path), left))
            yield

    return fill


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A folder that is a disk of its own, and a function that sets its size in KiB; skips where mounting is refused."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options: str) -> subprocess.CompletedProcess[str]:
        line = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    try:
        made = mount("size=64k")
    except OSError as error:
        pytest.skip(f"no small disk can be made here: {error}")
    if made.returncode:
        pytest.skip(f"no small disk can be made here: {made.stderr.strip()}")

    def resize(kib: int) -> None:
        assert mount("remount", f"size={kib}k").returncode == 0

    yield folder, resize
    # Lazy: a dataset that was opened there may still be mapped.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`command("train", "x.yaml", code=0)` in this process: its stdout, the JSON of its last line with --json, or else
    its stderr if `code` is not 0."""

    def run(*arguments: object, code: int = 0) -> Any:
        words = [*map(str, arguments)]
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["hotrow", *words])
            importlib.import_module("hotrow.cli.app").main()
        out, err = capfd.readouterr()
        run.err = err  # type: ignore[attr-defined]
        assert (ended.value.code or 0) == code, out + err
        return err if code else json.loads(out.splitlines()[-1]) if "--json" in words else out

    return run


@pytest.fixture(scope="session")
def make_dataset() -> Callable[..., PackedDataset]:
    """`make_dataset(folder, ...)`: clicks drawn from `seed` with a planted rule, for a model to learn."""
    return _make_dataset


def _make_dataset(
    folder: Path,
    *,
    rows: dict[str, int] | None = None,
    num_dense: int = 3,
    table_rows: tuple[int, ...] = (50, 20, 200),
    bag: bool = True,
    seed: int = 0,
    rows_per_block: int = 64,
    counts: bool = False,
) -> PackedDataset:
    """One one-hot feature per table, `x<t>` on table `t<t>`; with `bag` a multi-hot feature `bag` sharing table t0.

    Low rows are more popular in every table; with `counts` it is known how popular.
    """
    generator = np.random.default_rng(seed)
    features = [Feature(name=f"x{t}", table=f"t{t}") for t in range(len(table_rows))]
    features += [Feature(name="bag", table="t0", kind="multi_hot")] if bag else []
    info = DatasetInfo(
        name="planted",
        dense=tuple(DenseColumn(name=f"d{i}") for i in range(num_dense)),
        features=tuple(features),
        tables=tuple(Table(name=f"t{t}", num_embeddings=n) for t, n in enumerate(table_rows)),
    )
    effects = [generator.normal(0, 1, n) for n in table_rows]
    with PackedWriter(folder, info, rows_per_block=rows_per_block, rows_per_part=rows_per_block * 8) as writer:
        for split, num_rows in (rows or {"train": 512, "val": 128, "test": 128}).items():
            ids = {f"x{t}": (n * generator.random(num_rows) ** 2).astype(np.int64) for t, n in enumerate(table_rows)}
            dense = generator.normal(0, 1, (num_rows, num_dense)).astype(np.float32)
            logit = sum(effects[t][ids[f"x{t}"]] for t in range(len(table_rows))) + dense.sum(1) / 2
            label = (generator.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)
            columns: dict[str, object] = dict(ids)
            if bag:
                lengths = generator.integers(0, 4, num_rows)
                splits = np.concatenate([[0], np.cumsum(lengths)])
                columns["bag"] = (generator.integers(0, table_rows[0], splits[-1]), splits)
            writer.append(split, label, dense, columns)
            if counts and split == "train":
                (folder / "counts").mkdir()
                for t, n in enumerate(table_rows):
                    looked_up = [ids[f"x{t}"], *([columns["bag"][0]] if bag and t == 0 else [])]  # type: ignore[index]
                    found = np.bincount(np.concatenate(looked_up), minlength=n).astype(np.uint32)
                    (folder / "counts" / f"t{t}").write_bytes(counts_file(found))
        return writer.close()


@pytest.fixture(scope="session", autouse=True)
def small_batches_are_divided() -> Iterator[None]:
    """Tests of threads have small batches, which one thread would take alone (native/include/hotrow/parallel.h)."""
    if not ops.isas():
        yield
        return
    native = importlib.import_module("hotrow._native")
    before = native.min_parallel_bytes(0)
    yield
    native.min_parallel_bytes(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small work on several threads waits for threads: on a busy machine longer than it works."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
