"""Training with tables in tiers: what it says and counts, and what happens when the disk fails it."""

import errno
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hotrow
from at_step import at_step
from expanded import expanded
from hotrow.cli.tools import clean
from hotrow.config.load import apply_overrides, make_config
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops
from hotrow.placement.store_file import SUFFIX, OwnFolder
from hotrow.placement.stores import Engines, StoreError
from hotrow.run import parts as loop_parts
from hotrow.run import runs, said, storage
from hotrow.run.checkpoint import list_checkpoints, verify
from hotrow.run.folder import RunFolder
from packed_data import planted

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")

BASE: dict[str, Any] = {
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]},
    "optimizer": {"sparse": {"name": "adagrad", "lr": 0.1}},
    "train": {"batch_size": 37, "epochs": 2, "threads": 1, "log_every": 10},
    "checkpoint": {"every": 7, "keep_last": 9},
}
DRAM = 75_000
"""Bytes: of 2,020 rows of 64 and a little more, about half."""
dataset = planted(opened=True, table_rows=(600, 20, 1400))


def config(dataset: PackedDataset, run: Path, *changes: str, **memory: Any) -> Config:
    raw = {**BASE, "data": str(dataset.path), "run": str(run), "memory": {"dram": DRAM, **memory}}
    return make_config(apply_overrides(raw, changes))


def newest(run: Path) -> tuple[int, dict[str, bytes]]:
    step, path = max(list_checkpoints(run / "checkpoints").items())
    verify(path)
    return step, expanded(path)


def test_the_first_line_says_what_lies_where(dataset: PackedDataset, tmp_path: Path) -> None:
    runs.train(config(dataset, tmp_path / "run", "train.max_steps=1"), quiet=True)
    first = (tmp_path / "run" / "log.txt").read_text().splitlines()[0]
    assert "memory: of 126.2 KiB of tables and optimizer state, 58.3 KiB in DRAM (1 of 3 tables whole)" in first
    assert f"KiB on disk in {tmp_path}/run/memory" in first
    runs.train(config(dataset, tmp_path / "plain", "memory=auto", "train.max_steps=1"), quiet=True)
    first = (tmp_path / "plain" / "log.txt").read_text().splitlines()[0]
    assert first.endswith("memory: tables and optimizer state are 126.2 KiB, all in DRAM")
    assert re.search(r"\b\d+ threads?( of \d+ cores \([^)]*train\.threads.*\))?; memory: ", first)


def test_what_the_tiers_did_is_in_the_record(dataset: PackedDataset, tmp_path: Path) -> None:
    run = runs.train(config(dataset, tmp_path / "run", "train.epochs=4"), quiet=True)
    memory = json.loads((run.path / "run.json").read_text())["memory"]
    steps = run.record.steps
    assert memory["batches"] == {"foreseen": steps, "unannounced": 0, "altered": 0}
    assert memory["tables"]["t1"]["hits_per_lookup"] == 1.0
    large = memory["tables"]["t2"]
    assert large["lookups"] == 4 * 512, "evaluations and checkpoints are not counted here"
    assert 0.2 < large["hits_per_row"] <= large["hits_per_lookup"] < 1
    assert large["read_rows"] <= (1 - large["hits_per_row"]) * large["lookups"]
    assert memory["reads"] == sum(table["reads"] for table in memory["tables"].values())
    assert large["reads"] > 0 and large["read_bytes"] >= 64 * large["read_rows"] // 8
    assert memory["aside"]["lookups"] > 4 * 512
    assert 0 < memory["stall_s"] < run.record.train_s
    lines = [line for line in run.measurements() if line["kind"] == "train"]
    assert lines[-1]["stall_s"] == memory["stall_s"]
    assert hotrow.load(run.path).summary()["memory"]["hits_per_lookup"] == memory["hits_per_lookup"]
    assert memory["dram_bytes"] <= DRAM


def test_depth_0_stalls_and_foresees_nothing_less(dataset: PackedDataset, tmp_path: Path) -> None:
    run = runs.train(config(dataset, tmp_path / "run", lookahead=0), quiet=True)
    assert run.record.memory["batches"] == {"foreseen": 0, "unannounced": run.record.steps, "altered": 0}


def test_stores_that_run_on_threads_are_a_counted_warning(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engines._start
    monkeypatch.setattr(Engines, "_start", lambda self, ring: (None, "not today") if ring else plain(self, ring=False))
    with pytest.warns(UserWarning, match="threads, which takes more"):
        run = runs.train(config(dataset, tmp_path / "run"), quiet=True)
    warning = run.record.warnings["stores_without_io_uring"]
    assert (warning["count"], "not today" in warning["text"]) == (2, True)
    assert run.record.memory["fallbacks"] == {"t0": "not today", "t2": "not today"}


@pytest.mark.parametrize(
    ("asks", "code"),
    [(storage, "disk_may_become_full"), (said, "disk_may_be_too_small_for_a_checkpoint")],
    ids=["rows", "a checkpoint"],
)
def test_a_disk_that_may_become_full_is_said_before(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Any, code: str
) -> None:
    monkeypatch.setattr(asks, "disk_free_bytes", lambda path: 1000)
    run = runs.train(config(dataset, tmp_path / "run", "train.max_steps=1"), quiet=True)
    assert "1,000 bytes are free" in run.record.warnings[code]["text"]


def test_too_little_memory_is_refused_before_a_folder_is_made(dataset: PackedDataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a step may look up 1,200? different|a step may look up .* more are needed"):
        runs.train(config(dataset, tmp_path / "run", "train.batch_size=512"), quiet=True)
    assert not (tmp_path / "run").exists()


def stops_and_goes_on(dataset: PackedDataset, run: Path, what: str, *, mend: Callable[[], None] = lambda: None) -> None:
    """Training fails with `what`, the table, the row and the file; what is kept is whole, and leads to the same end."""
    message = rf"{what} row.* of table 't2' in .*\.rows: .*The checkpoint of step \d+ is whole; .*--resume {run}"
    with pytest.raises(StoreError, match=message):
        runs.train(config(dataset, run), quiet=True)
    record = RunFolder.open(run).record
    assert record.status == "failed" and "of table 't2'" in record.error
    step, _ = newest(run)
    assert step in (14, 21)
    mend()
    resumed = runs.resume(run, quiet=True)
    assert resumed.record.status == "finished"
    runs.train(config(dataset, run.with_name("plain"), "memory=dram"), quiet=True)
    assert newest(run) == newest(run.with_name("plain"))


@pytest.mark.parametrize("what", ["reading", "writing"])
def test_a_disk_that_fails(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, 15, lambda own: own.embedding.placement.stores[2].native.inject(what == "writing", 1, errno.EIO))
        stops_and_goes_on(dataset, tmp_path / "run", what, mend=patch.undo)


def test_a_disk_that_fails_while_a_checkpoint_is_written(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loop_parts.save_checkpoint

    def save(path: Path, parts: Any, **options: Any) -> Path:
        if path.name == "step-21":
            parts["embedding"].placement.stores[2].native.inject(False, 2, errno.EIO)
        return plain(path, parts, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop_parts, "save_checkpoint", save)
        stops_and_goes_on(dataset, tmp_path / "run", "reading", mend=patch.undo)


def test_a_disk_that_becomes_full(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_dataset: Callable[..., PackedDataset],
    small_disk: tuple[Path, Callable[[int], None]],
) -> None:
    folder, resize = small_disk
    resize(8192)
    dataset = make_dataset(tmp_path / "data", table_rows=(600, 20, 100_000))  # rows far apart: each write needs space
    filler, run = folder / "filler", tmp_path / "run"

    def fill(_: object) -> None:
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC

    with monkeypatch.context() as patch:
        at_step(patch, 8, fill)
        message = r"writing row.* of table 't[02]' in .*\.rows: No space left on device.*free some.*step 7 is whole"
        with pytest.raises(StoreError, match=message):
            runs.train(config(dataset, run, dram=90_000, file=str(folder)), quiet=True)
    assert newest(run)[0] == 7
    assert [path.name for path in folder.iterdir()] == ["filler"], "the rows' files are removed"
    filler.unlink()
    assert runs.resume(run, quiet=True).record.status == "finished"
    runs.train(config(dataset, tmp_path / "plain", "memory=dram"), quiet=True)
    assert newest(run) == newest(tmp_path / "plain")


def test_a_folder_that_cannot_be_written(
    dataset: PackedDataset, tmp_path: Path, small_disk: tuple[Path, Callable[[int], None]]
) -> None:
    folder, _ = small_disk
    assert subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=False).returncode == 0
    for name in ("file", "ssd"):
        message = rf"^memory\.{name} is '{folder}/new', but this process may not write in {folder}: .*another folder"
        with pytest.raises(ValueError, match=message):
            runs.train(config(dataset, tmp_path / "run", **{name: str(folder / "new")}), quiet=True)
        assert not (tmp_path / "run").exists()
    message = f"^no files can be made in {folder}: Read-only file system; choose another folder .*memory.ssd"
    tables = [hotrow.TableConfig(name="t", num_embeddings=10_000, embedding_dim=8, feature_names=("a",))]
    with pytest.raises(OSError, match=message):
        hotrow.SGD(hotrow.EmbeddingCollection(tables, memory=hotrow.Memory(dram="100KiB", file=folder)), lr=0.1)


def test_what_killed_processes_left_goes_and_nothing_else(dataset: PackedDataset, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    for name in ("hotrow-rows-dead", "hotrow-rows-other", "hotrow-models"):
        (folder / name).mkdir(parents=True)
        (folder / name / "0001.rows").write_bytes(b"x")
    (folder / "hotrow-rows-other" / "thesis.txt").write_text("mine")
    alive = hotrow.EmbeddingCollection(
        [hotrow.TableConfig(name="t", num_embeddings=10_000, embedding_dim=8, feature_names=("a",))],
        memory=hotrow.Memory(dram="100KiB", ssd=folder),
    )
    hotrow.SGD(alive, lr=0.1)
    left = {path.name for path in folder.iterdir()}
    assert "hotrow-rows-dead" not in left and {"hotrow-rows-other", "hotrow-models"} < left and len(left) == 3
    runs.train(config(dataset, tmp_path / "run", "train.max_steps=1", ssd=str(folder)), quiet=True)
    assert {path.name for path in folder.iterdir()} == left


def left_rows(folder: Path) -> Path:
    """Rows that a killed process left in a folder of others'."""
    left = OwnFolder(folder)
    (left.path / f"0{SUFFIX}").write_bytes(bytes(1 << 16))
    os.close(left._descriptor)  # as a kill does
    (folder / "others").mkdir(exist_ok=True)
    return left.path


@pytest.mark.slow_but("clean-ssd", "resume-file")
@pytest.mark.parametrize("named", ["ssd", "file"])
@pytest.mark.parametrize("by", ["clean", "resume"])
def test_rows_that_a_killed_run_left_elsewhere_go(dataset: PackedDataset, tmp_path: Path, named: str, by: str) -> None:
    """By `clean`, and by going on with rows elsewhere: nobody would look into that folder again."""
    elsewhere = tmp_path / "elsewhere"
    memory = {named: str(elsewhere), **({"force": True} if named == "ssd" else {})}
    run = runs.train(config(dataset, tmp_path / "run", "train.max_steps=2", **memory), quiet=True)
    left, inside = left_rows(elsewhere), left_rows(run.path / "memory")
    (run.path / "memory" / "others").rmdir()
    busy = OwnFolder(tmp_path / "busy")
    if by == "clean":
        removed = clean(run.path)["removed"]
        assert sorted(removed) == sorted(map(str, (left, inside)))
    else:
        runs.resume(run.path, ["train.max_steps=3", "memory=dram"], quiet=True)
    assert [path.name for path in elsewhere.iterdir()] == ["others"] and not (run.path / "memory").exists()
    assert busy.path.exists()
    busy.remove()


def test_clean_keeps_the_chosen_and_the_newest_checkpoint(dataset: PackedDataset, tmp_path: Path) -> None:
    changes = ["train.early_stopping=1", "train.eval_every=7", "optimizer.sparse.lr=5", "checkpoint.keep_last=9"]
    run = runs.train(config(dataset, tmp_path / "run", *changes), quiet=True)
    (run.path / "data").mkdir()
    assert clean(run.path)["bytes_kept"] > 0 and (run.path / "data").exists()
    steps = {f"step-{run.record.chosen_step}", f"step-{run.record.steps}"}
    assert {path.name for path in run.checkpoints.iterdir()} == steps
