"""Counter and encoder pools: budgets, full disks, and folders left clean."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data import native, reference
from hotrow.data.chunk import Keys
from hotrow.data.coded import CodedKeys, text_keys
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.prepare import encoder, spill
from hotrow.data.prepare.encoder import EncoderPool, TableEncoder
from hotrow.data.prepare.spill import CounterPool
from loops import looped


def chunk(seed: int, n: int = 1000, num_ids: int = 3000) -> Keys:
    rng = np.random.default_rng(seed)
    return Keys(rng.integers(0, num_ids, n), valid=rng.random(n) > 0.1)


def count(folder: Path, chunks: range, *, memory_bytes: int = 1 << 20) -> CounterPool:
    pool = CounterPool(folder, memory_bytes=memory_bytes)
    pool.declare("t", "int")
    for seed in chunks:
        pool.add({"t": [chunk(seed)]})
    return pool


def files_of(pool: CounterPool, folder: Path, *, table: str = "t") -> tuple[bytes, bytes]:
    folder.mkdir()
    pool.build(table, folder / "v", folder / "c")
    return (folder / "v").read_bytes(), (folder / "c").read_bytes()


@pytest.fixture
def two_threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


TABLES = ("a", "b", "c")
PART_BYTES = native.Counter("int").num_bytes_after(chunk(0))
"""Of one table's keys of a chunk, at most."""


def count_tables(pool: CounterPool, *, most_bytes: int) -> None:
    """Twenty chunks of three tables; after each, the counters hold at most `most_bytes`."""
    for table in TABLES:
        pool.declare(table, "int")
    for seed in range(20):
        pool.add({table: [chunk(seed + 100 * i, num_ids=10**6)] for i, table in enumerate(TABLES)})
        assert pool.num_bytes <= most_bytes


@pytest.mark.parametrize("memory_bytes", [4 * PART_BYTES, 2 * PART_BYTES], ids=["a chunk fits", "a table's part fits"])
def test_the_budget_is_kept(tmp_path: Path, two_threads: Executor, memory_bytes: int) -> None:
    with CounterPool(tmp_path / "tmp", memory_bytes=memory_bytes, executor=two_threads) as pool:
        count_tables(pool, most_bytes=memory_bytes)
        assert pool.num_spills > 0
    assert not (tmp_path / "tmp").exists()


@pytest.mark.parametrize("memory_bytes", [1 << 30, 4 * PART_BYTES, 2 * PART_BYTES])
def test_threads_move_no_byte(tmp_path: Path, two_threads: Executor, memory_bytes: int) -> None:
    files = []
    for name, executor in (("caller", None), ("two", two_threads)):
        with CounterPool(tmp_path / f"{name}.tmp", memory_bytes=memory_bytes, executor=executor) as pool:
            count_tables(pool, most_bytes=memory_bytes)
            files.append([files_of(pool, tmp_path / f"{name}.{table}", table=table) for table in TABLES])
    assert files[0] == files[1]
    assert len(set(files[0])) == len(TABLES)


def coded_chunks() -> list[tuple[CodedKeys, np.ndarray]]:
    """Chunks of 400 rows, each with a dictionary of its own that holds "twice" at two places, and a mask of rows."""
    rng, chunks = np.random.default_rng(8), []
    for seed in range(4):
        texts = [f"id {i}" for i in rng.permutation(150)] + ["twice"]
        texts.insert(int(rng.integers(100)), "twice")
        entries = text_keys(pa.array([*texts, None]))
        mask = np.ones(400, np.bool_) if seed == 0 else rng.random(400) < 0.7
        chunks.append((CodedKeys(entries, rng.integers(0, entries.num_keys, 400)), mask))
    return chunks


@looped("memory_bytes", [1 << 20, 1])
@looped("hash_cap", [0, 50])
@looped("num_features", [1, 2])
def test_codes_count_as_their_text(tmp_path: Path, num_features: int, hash_cap: int, memory_bytes: int) -> None:
    """Order, counts and ties of a table, of one feature and shared by two."""
    files = []
    for name in ("coded", "written_out"):
        with CounterPool(tmp_path / f"{name}.tmp", memory_bytes=memory_bytes) as pool:
            pool.declare("t", "bytes", hash_cap=hash_cap)
            for keys, mask in coded_chunks():
                turned = CodedKeys(keys.entries, keys.codes[::-1])
                features = [keys, turned][:num_features]
                columns = features if name == "coded" else [f.written_out() for f in features]
                pool.add({"t": columns}, None if mask.all() else mask)
            files.append(files_of(pool, tmp_path / name))
    assert files[0] == files[1]


def test_runs_are_merged_when_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = files_of(count(tmp_path / "whole", range(9)), tmp_path / "a")
    monkeypatch.setattr(spill, "MAX_RUNS", 3)
    pool = count(tmp_path / "tmp", range(9), memory_bytes=1)
    assert len(pool._tables["t"].runs) <= 3
    assert files_of(pool, tmp_path / "b") == whole


def test_features_of_one_table_need_one_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"table 't' is declared with 'bytes' keys and hash_cap 0, before with 'int'"):
        count(tmp_path / "tmp", range(1)).declare("t", "bytes")


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_while_counting_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.Counter, "drain", full_disk)
    with (
        pytest.raises(OSError, match=r"disk full while writing out counts of table 't' .*rows that were read are kept"),
        count(tmp_path / "tmp", range(2), memory_bytes=1),
    ):
        pass
    with count(tmp_path / "tmp", range(2)) as pool, pytest.raises(OSError, match="disk full") as e:
        pool.build("t", tmp_path / "v", tmp_path / "c")
    assert e.value.errno == errno.ENOSPC
    assert not (tmp_path / "tmp").exists()


@pytest.mark.skipif(native.backend() is reference, reason="the native module checks what Python cannot overrun")
def test_codes_without_an_entry_are_refused() -> None:
    for code in (-1, 3):
        with pytest.raises(ValueError, match="codes must be at least 0 and below the number of counts"):
            native.count_codes(np.array([0, code]), None, num_codes=3)


def vocabulary(folder: Path) -> Path:
    pool = count(folder / "count", range(5))
    pool.build("t", folder / "v", folder / "c")
    pool.close()
    return folder / "v"


def test_an_encoder_that_does_not_fit_equals_one_that_does(tmp_path: Path) -> None:
    path = vocabulary(tmp_path)
    with EncoderPool({"t": path}, tmp_path / "tmp", memory_bytes=20_000) as encoders:
        num_passes = 0
        for _ in encoders.passes():
            num_passes += 1
            for seed in range(8):
                encoders["t"].add("f", chunk(seed))
                encoders["t"].add("g", chunk(seed + 100, n=10))
        assert num_passes > 1
        assert sorted(p.name for p in (tmp_path / "tmp").iterdir()) == ["v.0.rows", "v.1.rows"]
        truth = Vocabulary.open(path)
        for seed in range(8):
            assert (encoders["t"].encode("f", chunk(seed), first_key=1000 * seed) == truth.lookup(chunk(seed))).all()
            rows = encoders["t"].encode("g", chunk(seed + 100, n=10), first_key=10 * seed)
            assert (rows == truth.lookup(chunk(seed + 100, n=10))).all()
        with pytest.raises(ValueError, match="the source yields keys 8000 to 9000, more than in the pass before"):
            encoders["t"].encode("f", chunk(0), first_key=8000)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_small_vocabularies_are_loaded_first(tmp_path: Path) -> None:
    large = vocabulary(tmp_path)
    with CounterPool(tmp_path / "count", memory_bytes=1 << 20) as pool:
        pool.declare("small", "int")
        pool.add({"small": [Keys(np.arange(10))]})
        pool.build("small", tmp_path / "w", tmp_path / "d")
    paths = {"large": large, "small": tmp_path / "w"}
    with EncoderPool(paths, tmp_path / "tmp", memory_bytes=30_000) as encoders:
        assert not encoders["small"].num_passes
        assert encoders["large"].num_passes
    with EncoderPool(paths, tmp_path / "tmp", memory_bytes=1 << 20) as encoders:
        assert not list(encoders.passes())
    with pytest.raises(ValueError, match=r"a vocabulary of [\d,]+ bytes cannot be used within 100; give it at least"):
        TableEncoder(Vocabulary.open(large), tmp_path, memory_bytes=100)


def test_a_full_disk_while_encoding_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = vocabulary(tmp_path)
    monkeypatch.setattr(encoder, "open_private", full_disk)
    with (
        pytest.raises(OSError, match=r"disk full while encoding with the vocabulary 'v', which does not fit"),
        EncoderPool({"t": path}, tmp_path / "tmp", memory_bytes=20_000) as encoders,
    ):
        for _ in encoders.passes():
            encoders["t"].add("f", chunk(0))
    assert list((tmp_path / "tmp").iterdir()) == []
