"""Law: row numbers are what a Python dict says, to the last id, whatever the budget, the cut into chunks, the code.

The truth is counted here, in plain Python, from the same rows; nothing of hotrow takes part in it.
"""

import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.data import native, reference
from hotrow.data.chunk import Keys
from hotrow.data.packed import vocabulary
from hotrow.data.packed.vocabulary import Vocabulary, build_vocabulary, open_counts
from hotrow.data.prepare.encoder import EncoderPool
from hotrow.data.prepare.spill import CounterPool
from hotrow.data.sources.criteo import CriteoSource

try:
    NATIVE: ModuleType | None = importlib.import_module("hotrow._native")
except ImportError:
    NATIVE = None
needs_native = pytest.mark.skipif(NATIVE is None, reason="the native module is not built")
BACKENDS = [pytest.param(NATIVE, marks=needs_native, id="native"), pytest.param(reference, id="reference")]


def use(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setattr(native, "backend", lambda: module)
    monkeypatch.setattr(vocabulary, "backend", lambda: module)


@dataclass
class Case:
    """Chunks of rows of one table; an id is an int or bytes, None is a missing value."""

    chunks: list[list[tuple[int | bytes | None, bool]]]
    hash_cap: int = 0
    min_count: int = 1
    num_spills: int = 0
    used_parts: bool = False

    @property
    def kind(self) -> str:
        ids = [i for chunk in self.chunks for i, _ in chunk if i is not None]
        return "bytes" if any(isinstance(i, bytes) for i in ids) else "int"

    def keys(self, chunk: list[tuple[int | bytes | None, bool]], dtype: type = np.int64) -> Keys:
        valid = np.array([i is not None for i, _ in chunk], np.bool_)
        if self.kind == "int":
            return Keys(np.array([i or 0 for i, _ in chunk], dtype), valid=valid)
        strings = [i if isinstance(i, bytes) else b"" for i, _ in chunk]
        offsets = np.cumsum([0, *map(len, strings)]).astype(np.int64)
        return Keys(np.frombuffer(b"".join(strings), np.uint8), offsets, valid)

    def truth(self) -> tuple[list[list[int]], list[int]]:
        """`(row of every id by chunk, accesses by row)`, counted with a dict."""

        def same(i: int | bytes | None) -> int | bytes | None:
            if i is None or not self.hash_cap:
                return i
            return i % self.hash_cap if isinstance(i, int) else reference.hash_string(i) % self.hash_cap

        counts: dict[int | bytes | None, int] = {}  # a dict keeps first appearance, sorted() keeps it among ties
        for i in (same(i) for chunk in self.chunks for i, counted in chunk if counted):
            counts[i] = counts.get(i, 0) + 1
        ranked = sorted((i for i in counts if counts[i] >= self.min_count), key=lambda i: -counts[i])
        rows = {i: row for row, i in enumerate(ranked, start=1)}
        accesses = [sum(counts.values()) - sum(counts[i] for i in ranked), *(counts[i] for i in ranked)]
        return [[rows.get(same(i), 0) for i, _ in chunk] for chunk in self.chunks], accesses

    def run(self, folder: Path, *, memory_bytes: int) -> tuple[list[list[int]], list[int], bytes, bytes]:
        """The same through hotrow, and the two files."""
        with CounterPool(folder / "tmp", memory_bytes=memory_bytes) as counters:
            counters.declare("t", self.kind, hash_cap=self.hash_cap)  # type: ignore[arg-type]
            for chunk in self.chunks:
                counters.add({"t": [self.keys(chunk)]}, np.array([counted for _, counted in chunk], np.bool_))
            counters.build("t", folder / "v", folder / "c", min_count=self.min_count)
            self.num_spills = counters.num_spills
        rows, first = [], 0
        with EncoderPool({"t": folder / "v"}, folder / "tmp", memory_bytes=memory_bytes // 4) as encoders:
            for _ in encoders.passes():
                self.used_parts = True
                for chunk in self.chunks:
                    encoders["t"].add("f", self.keys(chunk))
            for chunk in self.chunks:
                rows.append(encoders["t"].encode("f", self.keys(chunk), first_key=first).tolist())
                first += len(chunk)
        assert list((folder / "tmp").glob("*")) == []
        return rows, open_counts(folder / "c").tolist(), (folder / "v").read_bytes(), (folder / "c").read_bytes()


def cases() -> st.SearchStrategy[Case]:
    # Few different ids, so that they repeat; and the values that arithmetic trips over.
    ints = st.one_of(st.integers(0, 99), st.sampled_from([-1, -(2**63), 2**63 - 1, 2**32 - 1, 2**32]))
    strings = st.one_of(
        st.binary(min_size=1, max_size=2), st.sampled_from([b"", b"\0", b"\0\0", b"12345678", b"12345678\0", b"x" * 99])
    )

    def chunks(ids: st.SearchStrategy[int | bytes]) -> st.SearchStrategy[list[list[tuple[int | bytes | None, bool]]]]:
        rows = st.tuples(st.one_of(ids, ids, ids, st.none()), st.sampled_from([True, True, False]))
        chunk = st.one_of(st.lists(rows, min_size=30, max_size=60), st.lists(rows, max_size=2))
        return st.lists(chunk, min_size=1, max_size=5)

    return st.builds(
        Case,
        st.sampled_from([ints, strings]).flatmap(chunks),
        st.sampled_from([0, 0, 0, 1, 7, 1000]),
        st.sampled_from([1, 1, 2, 4]),
    )


@pytest.mark.slow_but("in memory-reference", "spilled-native")
@pytest.mark.parametrize("module", BACKENDS)
@pytest.mark.parametrize("memory_bytes", [1 << 30, 512], ids=["in memory", "spilled"])
def test_against_a_dict(module: ModuleType, memory_bytes: int) -> None:
    spilled = []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(cases())
    def holds(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            use(patch, module)
            rows, accesses, _, _ = case.run(Path(folder), memory_bytes=memory_bytes)
        assert (rows, accesses) == case.truth()
        spilled.append((case.num_spills > 0, case.used_parts))

    holds()
    often = [sum(column) * 4 > len(spilled) for column in zip(*spilled, strict=True)]
    assert often == [memory_bytes == 512] * 2, f"of {len(spilled)}: {[sum(c) for c in zip(*spilled, strict=True)]}"


def skewed_case(kind: str, *, num_chunks: int = 8, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.3, (num_chunks, 700)) % 5000).tolist()
    masks = rng.random((2, num_chunks, 700))

    def name(i: int) -> int | bytes:
        return i - 100 if kind == "int" else b"id-%d" % i * (i % 4)

    return Case([
        [(None if missing < 0.05 else name(i), counted < 0.8) for i, missing, counted in zip(*chunk, strict=True)]
        for chunk in zip(ids, *masks, strict=True)
    ], min_count=2)  # fmt: skip


@needs_native
@pytest.mark.parametrize("kind", ["int", "bytes"])
def test_files_are_the_same_bytes_whatever_the_budget_and_the_code(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = skewed_case(kind)
    results = []
    for name, module, memory_bytes in [
        ("a", NATIVE, 1 << 30),
        ("b", NATIVE, 50_000),
        ("c", NATIVE, 20_000),
        ("d", reference, 1 << 30),
        ("e", reference, 300_000),
    ]:
        use(monkeypatch, module)  # type: ignore[arg-type]
        (tmp_path / name).mkdir()
        results.append(case.run(tmp_path / name, memory_bytes=memory_bytes))
    assert results[0][:2] == case.truth()
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("module", BACKENDS)
def test_keys_with_one_hash_are_told_apart(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two strings with equal 64-bit hashes are at hand, so the hash is replaced by a poor one."""
    use(monkeypatch, module)
    monkeypatch.setattr(native, "hash_keys", lambda keys, hash_cap=0: np.full(keys.num_keys, 42, np.uint64))
    monkeypatch.setattr(vocabulary, "hash_keys", native.hash_keys)
    case = Case([[(b"a", True), (b"b", True), (b"b", True), (b"", True), (None, True), (b"ab", False)]])
    rows, accesses, _, _ = case.run(tmp_path, memory_bytes=1 << 30)
    assert rows == [[2, 1, 1, 3, 4, 0]]
    assert accesses == [0, 2, 1, 1, 1]


@pytest.mark.parametrize("module", BACKENDS)
def test_rows_held_out_change_nothing(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 6: permuting the test rows changes no training byte."""
    use(monkeypatch, module)
    case = skewed_case("int", num_chunks=2)
    turned = Case([], min_count=2)
    for chunk in case.chunks:
        held_out = [i for i, counted in chunk if not counted][::-1]
        turned.chunks.append([(i if counted else held_out.pop(), counted) for i, counted in chunk])
    files = []
    for name, one in (("a", case), ("b", turned)):
        (tmp_path / name).mkdir()
        files.append(one.run(tmp_path / name, memory_bytes=1 << 30)[2:])
    assert files[0] == files[1]


@pytest.mark.parametrize("module", BACKENDS)
def test_uint32_and_int64_ids_are_the_same(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, module)
    case = Case([[(2**32 - 1, True), (5, True), (5, True), (None, True)]])
    case.run(tmp_path, memory_bytes=1 << 30)
    found = Vocabulary.open(tmp_path / "v").lookup(case.keys(case.chunks[0], np.uint32))
    assert found.tolist() == [2, 1, 1, 3]
    assert native.hash_keys(Keys(np.array([7], np.uint32)), hash_cap=5) == native.hash_keys(
        Keys(np.array([-3], np.int64)), hash_cap=5
    )


@pytest.mark.parametrize("module", BACKENDS)
@pytest.mark.parametrize("kind", ["int", "bytes"])
def test_counts_stand_for_repetitions_against_a_dict(
    module: ModuleType, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, module)
    rng = np.random.default_rng(3)
    numbers, counts = rng.integers(-1, 40, 300), rng.integers(0, 4, 300).astype(np.uint32)
    ids = [None if n < 0 else int(n) if kind == "int" else f"id {n}".encode() for n in numbers]
    expected: dict[int | bytes | None, int] = {}
    for i in np.repeat(np.arange(300), counts):
        expected[ids[i]] = expected.get(ids[i], 0) + 1
    assert len(expected) == 41 and counts.tolist().count(0) > 0, "some keys did not come"
    counter = native.Counter(kind)  # type: ignore[arg-type]
    for part in (slice(0, 120), slice(120, 300)):
        counter.add(Case([[(i, True) for i in ids]]).keys([(i, True) for i in ids[part]]), counts[part])
    assert (counter.num_keys, counter.num_missing) == (40, expected[None])
    counter.drain(tmp_path / "run")
    build_vocabulary(
        [tmp_path / "run"], tmp_path / "v", tmp_path / "c", key_kind=kind, memory_bytes=1 << 20, tmp_dir=tmp_path
    )  # type: ignore[arg-type]
    ranked = sorted(expected, key=lambda i: -expected[i])
    found = Vocabulary.open(tmp_path / "v").lookup(Case([[(i, True) for i in ids]]).keys([(i, True) for i in ranked]))
    assert found.tolist() == list(range(1, 42))
    assert open_counts(tmp_path / "c").tolist() == [0, *(expected[i] for i in ranked)]


def test_lists_are_counted_by_row(tmp_path: Path) -> None:
    keys = Keys(np.array([1, 2, 2, 3, 3, 3]), row_splits=np.array([0, 2, 2, 5, 6]))
    with CounterPool(tmp_path / "tmp", memory_bytes=1 << 20) as counters:
        counters.declare("t", "int")
        counters.add({"t": [keys]}, np.array([True, True, False, True]))
        counters.build("t", tmp_path / "v", tmp_path / "c")
    assert Vocabulary.open(tmp_path / "v").lookup(keys).tolist() == [1, 2, 2, 3, 3, 3]
    assert open_counts(tmp_path / "c").tolist() == [0, 1, 1, 1]


def test_against_a_dict_on_real_rows(real_data: object, tmp_path: Path) -> None:
    """Two real columns that share a table, the first 60,000 rows counted, under a budget that spills."""
    path = real_data("criteo_terabyte_80k.tsv.gz")  # type: ignore[operator]
    counts: dict[int | None, int] = {}
    seen: list[list[int | None]] = []
    with CounterPool(tmp_path / "tmp", memory_bytes=400_000) as counters:
        counters.declare("shared", "int")
        for n, chunk in enumerate(CriteoSource([path]).chunks(rows_per_chunk=10_000)):
            for name in ("C3", "C12"):
                keys = chunk.keys[name]
                counters.add({"shared": [keys]}, np.full(chunk.num_rows, n < 6))
                valid = [True] * chunk.num_rows if keys.valid is None else keys.valid.tolist()
                seen.append([i if ok else None for i, ok in zip(keys.values.tolist(), valid, strict=True)])
                for i in seen[-1] if n < 6 else []:
                    counts[i] = counts.get(i, 0) + 1
        assert counters.num_spills > 0
        summary = counters.build("shared", tmp_path / "v", tmp_path / "c", min_count=2)
    ranked = sorted((i for i in counts if counts[i] >= 2), key=lambda i: -counts[i])
    rows = {i: row for row, i in enumerate(ranked, start=1)}
    assert summary.num_embeddings == len(rows) + 1
    assert summary.missing_row == rows.get(None, 0)
    found = Vocabulary.open(tmp_path / "v")
    for ids in seen:
        keys = Keys(np.array([i or 0 for i in ids], np.uint32), valid=np.array([i is not None for i in ids]))
        assert found.lookup(keys).tolist() == [rows.get(i, 0) for i in ids]
