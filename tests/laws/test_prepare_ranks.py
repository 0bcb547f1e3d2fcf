"""Ranks that prepare together write the bytes of one process, whatever the input and wherever it is cut."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.data.prepare import estimate, pipeline, shares
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.sources import criteo
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import parse_schema
from hotrow.parallel.communicator import Communicator
from prepare_data import SCHEMA, file_hashes, make_rows, write_parquet
from rank_pool import RankPool

SIZES: dict[str, Any] = {"rows_per_block": 64, "rows_per_part": 128, "rows_per_chunk": 100}
CSV_SCHEMA = {"label": "click", "time": "ts", "dense": ["price"], "categorical": ["user", "note"]}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """1,500 lines in Criteo's layout."""
    path = tmp_path_factory.mktemp("clicks") / "clicks.txt"
    write_criteo(path, criteo_kaggle(1500, scale=0.001))
    return path.read_bytes()


def prepared(
    comm: Communicator | None,
    source: str,
    paths: Any,
    out: Path,
    given: dict[str, Any],
    stop_in: str | None = None,
) -> list[str]:
    """Prepares as a rank, or in one process. stop_in: the stage in which the last rank is asked to stop, after two of
    its chunks. Returns what was told, and the error by which it ended.
    """
    plain, said = pipeline._Stages._reported, list[str]()

    def reported(stages: Any, stage: str, row: int, pieces: Iterator[Any]) -> Iterator[Any]:
        for number, piece in enumerate(plain(stages, stage, row, pieces)):
            if stage == stop_in and number == 2 and (comm is None or comm.rank == comm.size - 1):
                stages._stop.set()
            yield piece

    options = {name: given[name] for name in ("sample", "rows", "memory_bytes") if name in given}
    changes = {name: given[name] for name in ("split", "seed") if name in given}
    schema = {"parquet": SCHEMA, "csv": parse_schema(CSV_SCHEMA, where="test")}.get(source)
    skip = given.get("skip_bad_rows", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline._Stages, "_reported", reported)
        patch.setattr(pipeline, "MIN_MEMORY_BYTES", 0)
        patch.setattr(shares, "REPORT_S", 0.01)
        # Rank 0 reads them before all begin.
        patch.setattr(estimate, "_first_chunks", lambda opened, _: [next(opened.source.chunks(rows_per_chunk=100))])
        try:
            opened = open_source(source, paths, schema=schema, skip_bad_rows=skip, rows=options.get("rows"))
            how = Options(**SIZES | options)
            prepare(opened.with_options(**changes), out, how, announce=said.append, comm=comm)
        except (ValueError, Interrupted) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def write_parquet_logs(folder: Path, clicks: bytes) -> Any:
    return write_parquet(folder, make_rows(1500), num_files=3, row_group_rows=200)


def one_file(folder: Path, clicks: bytes) -> Any:
    """Windows line ends, and no newline at the end."""
    (folder / "clicks.txt").write_bytes(clicks.replace(b"\n", b"\r\n").rstrip(b"\r\n"))
    return str(folder / "clicks.txt")


def days(folder: Path, clicks: bytes) -> Any:
    """Four days; one has bad lines in the middle and at the end, one is compressed, one has a header."""
    lines = clicks.splitlines(keepends=True)
    names = ["label", *criteo.DENSE_NAMES, *criteo.CATEGORY_NAMES]
    found = [lines[:700], lines[700:1000], ["\t".join(names).encode() + b"\n", *lines[1000:1100]], lines[1100:]]
    found[0] = [*found[0][:300], b"bad\n", *found[0][300:], b"bad\n", b"\n"]
    for day, own in enumerate(found):
        (folder / f"day_{day}").write_bytes(gzip.compress(b"".join(own)) if day == 1 else b"".join(own))
    return str(folder)


def quoted(folder: Path, clicks: bytes) -> Any:
    """Records of several lines, some of which look like records; blank lines; one file is compressed."""
    for file, num_rows in enumerate((300, 10, 400, 350)):
        rows = [f'u{k % 37},"a\n{k},{k % 7},""0"",\n",{k % 11}.5,{k * file},{k % 3 % 2}\n\n' for k in range(num_rows)]
        text = "".join(["user,note,price,ts,click\n", *rows]).encode()
        (folder / f"{file}.csv").write_bytes(gzip.compress(text) if file == 2 else text)
    return str(folder)


def odd(folder: Path, clicks: bytes) -> Any:
    """Words among numbers and rows without a time, also at the end of a file; missing texts."""
    for file, num_rows in enumerate((300, 100, 400, 350)):
        rows = [[f"u{k % 37}", "a", f"{k % 11}.5", f"{k * file}", f"{k % 3 % 2}"] for k in range(num_rows)]
        rows[5 + file][2], rows[40][2], rows[41][0] = "cheap", "NA", "null"
        rows[7 * file][3], rows[-1][3] = "", "later"
        text = "\n".join(",".join(row) for row in [["user", "note", "price", "ts", "click"], *rows])
        (folder / f"{file}.csv").write_text(text + "\n")
    return str(folder)


Make = Callable[[Path, bytes], Any]
CASES: dict[str, tuple[str, Make, dict[str, Any], tuple[int, ...]]] = {
    "by time": ("parquet", write_parquet_logs, {"split": "time"}, (2, 3)),
    "little memory": ("parquet", write_parquet_logs, {"split": "random", "sample": 0.7, "memory_bytes": 24_000}, (3,)),
    "one file": ("criteo", one_file, {}, (2, 3)),
    "bad lines": ("criteo", days, {"split": "random", "skip_bad_rows": 3}, (2, 3)),
    "first rows": ("criteo", days, {"rows": 650, "skip_bad_rows": 3}, (3,)),
    "quotes": ("csv", quoted, {}, (2, 3)),
    "odd cells": ("csv", odd, {"split": "random"}, (2, 3)),
    "odd cells by time": ("csv", odd, {"split": "time", "sample": 0.9}, (3,)),
}


@pytest.mark.slow_but("by time", "little memory")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_write_the_bytes_of_one_process(
    pool: RankPool, tmp_path: Path, clicks: bytes, case: tuple[str, Make, dict[str, Any], tuple[int, ...]]
) -> None:
    source, make, given, numbers = case
    (tmp_path / "logs").mkdir()
    paths = make(tmp_path / "logs", clicks)
    told = prepared(None, source, paths, tmp_path / "one", given)
    want = file_hashes(tmp_path / "one")
    assert len(json.loads((tmp_path / "one" / "dataset.json").read_bytes())["splits"]["train"]["parts"]) > 3
    for size in numbers:
        said = pool.run(prepared, source, paths, tmp_path / f"{size}", given, num_ranks=size, micro_batches=size)
        assert file_hashes(tmp_path / f"{size}") == want, said
        assert [line for line in said[0] if "skipped" in line] == [line for line in told if "skipped" in line]


def test_a_bad_row_is_named_on_all_ranks_and_may_then_be_skipped(pool: RankPool, tmp_path: Path, clicks: bytes) -> None:
    """It lies in the middle, where the second of three ranks reads; all keep what they have counted."""
    lines = clicks.splitlines(keepends=True)
    (tmp_path / "clicks.txt").write_bytes(b"".join([*lines[:750], b"1\tbad\n", *lines[750:]]))
    paths, three = str(tmp_path / "clicks.txt"), {"num_ranks": 3, "micro_batches": 3}
    said = pool.run(prepared, "criteo", paths, tmp_path / "out", {"split": "random"}, **three)
    ends = [own[-1] for own in said]
    assert len(set(ends)) == 1
    assert ends[0].startswith(f"CommonError: rank 1 ({socket.gethostname()}): {paths}:751: 2 columns between tabs")
    skipping = {"split": "random", "skip_bad_rows": 1}
    said = pool.run(prepared, "criteo", paths, tmp_path / "out", skipping, **three)
    assert any(line.startswith(f"skipped 1 bad rows, for example:\n  {paths}:751: 2 columns") for line in said[0]), said
    prepared(None, "criteo", paths, tmp_path / "one", skipping)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "one")


@pytest.mark.slow_but("encode")
@pytest.mark.parametrize("stage", ["count", "encode"])
def test_stopped_on_one_rank_and_continued(pool: RankPool, tmp_path: Path, stage: str) -> None:
    """By as many ranks; if all rows were counted, also by one process, and what that leaves, by ranks."""
    paths, given = write_parquet(tmp_path / "logs", make_rows(1500)), {"split": "random"}
    arguments, three = ("parquet", paths, tmp_path / "out", given), {"num_ranks": 3, "micro_batches": 3}
    for own in pool.run(prepared, *arguments, stage, **three):
        assert own[-1].startswith("Interrupted: preparation stopped; its state is kept in"), own
    if stage == "encode":
        shutil.copytree(tmp_path / "out", tmp_path / "alone")
        prepared(None, "parquet", paths, tmp_path / "alone", given)
        prepared(None, "parquet", paths, tmp_path / "half", given, "encode")
        pool.run(prepared, "parquet", paths, tmp_path / "half", given, **three)
    said = pool.run(prepared, *arguments, **three)
    assert "continuing the work found in" in said[0][0], said
    assert not any("continuing" in line for line in said[1]), said
    prepared(None, "parquet", paths, tmp_path / "one", given)
    want = file_hashes(tmp_path / "one")
    assert file_hashes(tmp_path / "out") == want
    assert stage == "count" or file_hashes(tmp_path / "alone") == file_hashes(tmp_path / "half") == want


def test_what_ranks_cannot_prepare_is_refused_on_all(pool: RankPool, tmp_path: Path, clicks: bytes) -> None:
    """Files that differ between ranks; an --out that is taken, which stays as it was."""
    (tmp_path / "a.txt").write_bytes(clicks)
    (tmp_path / "b.txt").write_bytes(clicks[:-40])
    two = {"num_ranks": 2, "micro_batches": 2}
    texts = pool.run(_from_own_file, tmp_path, **two)
    assert len(set(texts)) == 1 and f"file {tmp_path}/a.txt is " in texts[0] and "all see the same files" in texts[0]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    said = pool.run(prepared, "criteo", str(tmp_path / "a.txt"), tmp_path / "mine", {}, **two)
    assert all("mine exists and is not a dataset folder" in own[-1] for own in said)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def _from_own_file(comm: Communicator, folder: Path) -> str:
    return prepared(comm, "criteo", str(folder / "ab"[comm.rank]) + ".txt", folder / "out", {})[-1]
