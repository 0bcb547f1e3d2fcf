"""Law: a `Scorer` scores as `Run.predict` does, whatever form rows come in, on any thread, and version by version.

test_export.py compares the two for every kind of column, model and storage. Here rows are cut into users and items,
cells are of any kind, versions come and go while others score, and exports are hostile.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import safetensors.torch
import torch
from test_export import BASE, TOLERANCE, clicks, native, prepared, read_csv, scorer_of, train, write_csv, write_parquet
from test_sizes import memory, peak_below

import hotrow
import mutate_sealed
from benchmarks.serving_export import make
from forked import run_as_another, run_forked
from hotrow.base.files import claim, remove_unheld
from hotrow.config.load import make_config
from hotrow.data.chunk import take_keys
from hotrow.data.native import backend, hash_keys
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, write_vocabulary
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.export.export import file_record
from hotrow.kernels import ops
from hotrow.models.spec import SampleError
from hotrow.run import runs
from hotrow.run.checkpoint_files import MANIFEST
from hotrow.serve import mapped
from hotrow.serve.version import Version
from prepare_data import file_hashes
from resealed import reseal

SIMPLE: dict[str, Any] = {
    "categorical": [
        "user",
        {"column": "item", "type": "int"},
        {"column": "big", "table": "numbers"},
        {"column": "price", "buckets": [-1000, 1.5, 4.5, 20]},
        {"column": "age", "buckets": [30]},
    ],
    "tables": {"user": {"min_count": 2}},
    "statistics": ["user", ["item", "big"], "price"],
}
"""Columns of single ids and of plain numbers: those that a request's cells are read of in one call."""
USERS = ("price", "age", "user")
"""Columns that a request's rows may share."""
NUM_DAYS = 4
LARGE = {"C3": 2, "C12": 11, "C16": 15, "C21": 20}
"""Large tables of the export that the benchmark makes, and their numbers there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """old.* to train on, new.* to score, and the exports of a run's checkpoints, first to last."""
    path = tmp_path_factory.mktemp("serve")
    for name, columns in (("old", clicks(1500, 0)), ("new", clicks(300, 1))):
        write_csv(path / f"{name}.csv", columns)
        write_parquet(path / f"{name}.parquet", columns)
    return path


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    return prepared(folder, folder / "packed", suffix="parquet", **SIMPLE)


@pytest.fixture(scope="module")
def run(folder: Path, packed: Path) -> hotrow.Run:
    changes = ["checkpoint.every=10", f"checkpoint.keep_last={NUM_DAYS + 1}", "model.first_order=true"]
    return train(packed, folder / "run", *changes)


@pytest.fixture(scope="module")
def export(folder: Path, run: hotrow.Run) -> Path:
    run.export(folder / "out")
    return folder / "out"


@pytest.fixture
def scorer(export: Path) -> hotrow.Scorer:
    return hotrow.Scorer(export)


def some(num_rows: int = 300, seed: int = 1) -> dict[str, list[Any]]:
    """Columns that the model takes."""
    columns = clicks(num_rows, seed)
    return {name: columns[name] for name in ("price", "age", "x", "user", "item", "big")}


def rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def test_rows_in_every_form_have_the_scores_of_predict(
    scorer: hotrow.Scorer, run: hotrow.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = some()
    expected = run.predict(pa.table({**columns, "big": pa.array(columns["big"], pa.uint64())}))
    rows = rows_of(columns)
    assert expected.std() > 0.02
    frame = pa.table({**columns, "big": pa.array(columns["big"], pa.uint64())})
    arrays = {**columns, "x": np.array(columns["x"]), "big": np.array(columns["big"], np.uint64)}
    without_none = [{name: cell for name, cell in row.items() if cell is not None} for row in rows]
    more = [{**row, "click": "?", "other": object()} for row in rows]
    for form in (columns, rows, frame, pl.from_arrow(frame), arrays, without_none, more):
        found = scorer.score(form)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    assert scorer.score([]).shape == (0,)
    monkeypatch.setattr("hotrow.serve.scorer.ROWS_OF_PIECE", 7)
    for form in (rows, frame):
        np.testing.assert_array_equal(scorer.answer(form, until=1e12).scores, expected, err_msg="in pieces")
        with pytest.raises(TimeoutError):
            scorer.answer(form, until=0)


@native
def test_what_rows_share_is_given_once(scorer: hotrow.Scorer) -> None:
    rows = rows_of(some())
    user = {name: rows[7][name] for name in USERS}
    items = [{name: cell for name, cell in row.items() if name not in USERS} for row in rows]
    expected = scorer.score([{**item, **user} for item in items])
    columns = {name: [item[name] for item in items] for name in items[0]}
    for form in (items, columns):
        np.testing.assert_array_equal(scorer.score(user=user, items=form), expected)
    scorer._now._cells = None  # the long way
    np.testing.assert_array_equal(scorer.score(user=user, items=items), expected)


PLAIN: dict[str, list[Any]] = {
    "price": [1.5, 3, "2.25", "-1e3", None, "", " NA ", -0.0, "007"],
    "x": [0.5, -1, "1e-3", None, 2**53],
    "age": [30, "30", None],
    "user": ["user ä1", " user ä1", 17, None, "", "null", "\x00", -5, "x" * 99],
    "item": [1, -99, "5", "-7", None, "", -(2**63), "9" * 18, "0"],
    "big": [2**63 - 1, "1", None, "NA", "0", 5],
}
"""Cells that are read in one call, if a column has one kind of them."""
ODD: dict[str, list[Any]] = {
    "price": ["1e400", "word", 10**20, math.inf, math.nan, True, "5.", "+1", "-", ".5", [1.5], 1 << 70],
    "x": [b"1", "0x1", "1_0", "nan", 1e39],
    "user": [17.0, 12.5, True, b"user", [1], math.nan],
    "item": ["007", " 12", "12.0", 12.0, 12.5, "x", 2**63, "9" * 19, "-0", "--1", "+1", "-", True],
    "big": [2**64 - 1, 2**64 - 7920, "18446744073709551615", -1, "-1", 2**70, 1.0, "00", "18446744073709551616"],
}
"""Cells that are not."""


@native
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))])
def test_the_short_way_reads_cells_as_the_long_one(export: Path, tmp_path: Path, seed: int) -> None:
    """Scores and counts, of columns of one kind and of several, in users, items, dicts and lists."""
    rng = random.Random(seed)
    short, long = (hotrow.Scorer(export) for _ in range(2))
    ways: list[bool] = []
    read = short._now._cells.read
    short._now._cells.read = lambda *own: (found := read(*own), ways.append(found is not None))[0]
    long._now._cells = None
    for _ in range(12):
        num_rows, odd, columns = rng.randrange(1, 5), rng.choice([None, None, *ODD]), dict[str, list[Any]]()
        for name, cells in PLAIN.items():
            if name == odd:
                cells = [*cells, *ODD[name] * 2]
            kind = type(rng.choice(cells))
            like = cells if rng.random() < 0.2 else [cell for cell in cells if type(cell) in (kind, type(None))]
            columns[name] = [rng.choice(like) for _ in range(num_rows)]
        np.testing.assert_array_equal(short.score(columns), long.score(columns))
        rows = rows_of(columns)
        np.testing.assert_array_equal(short.score(rows), long.score(rows))
        user = {name: rows[0][name] for name in USERS}
        items = [{name: cell for name, cell in row.items() if name not in user} for row in rows]
        np.testing.assert_array_equal(short.score(user=user, items=items), long.score(user=user, items=items))
    assert short.seen.columns == long.seen.columns
    assert 0.1 < np.mean(ways) < 1, "both ways were taken"


def test_lists_and_the_like_go_the_long_way(folder: Path, tmp_path: Path) -> None:
    run = train(prepared(folder, tmp_path / "packed"), tmp_path / "run")
    run.export(tmp_path / "out")
    rows = rows_of(read_csv(folder / "new.csv"))
    found = hotrow.Scorer(tmp_path / "out").score(rows)
    np.testing.assert_array_equal(found, run.predict(str(folder / "new.csv")))


MODELS: list[dict[str, Any]] = [
    {"name": "dlrm", "members": 2, "concatenated": True, "dropout": 0.1},
    {"name": "dcn"},
    {"name": "deepfm"},
    {"name": "finalmlp"},
    {"name": "mmoe"},
    {"name": "two_tower", "item": ["item"], "dense_inputs": "none"},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_every_model_scores_requests_as_predict_does(packed: Path, tmp_path: Path, model: dict[str, Any]) -> None:
    """Two towers score pairs of user and item."""
    config = {**BASE, "data": str(packed), "run": str(tmp_path / "run"), "model": {"embedding_dim": 6, **model}}
    config["train"] = {**BASE["train"], "max_steps": 12}
    run = hotrow.load(runs.train(make_config(config), quiet=True).path)
    run.export(tmp_path / "out")
    rows = rows_of(some(50))
    user = {name: rows[7][name] for name in USERS}
    items = [{name: cell for name, cell in row.items() if name not in USERS} for row in rows]
    columns = {name: [{**item, **user}[name] for item in items] for name in rows[0]}
    expected = run.predict(pa.table({**columns, "big": pa.array(columns["big"], pa.uint64())}))
    scorer = hotrow.Scorer(tmp_path / "out")
    np.testing.assert_array_equal(scorer.score(user=user, items=items), expected)
    np.testing.assert_array_equal([scorer.score(user=user, items=[item])[0] for item in items], expected)
    if model["name"] == "two_tower":
        with pytest.raises(ValueError, match="mean inputs"):
            scorer.explain(rows)
        return
    own, others = run.explain(columns), scorer.explain(columns)
    assert own.columns.keys() == others.columns.keys() == {*columns}
    for name, added in {**own.columns, "base": own.base, "outputs": own.outputs}.items():
        other = {**others.columns, "base": others.base, "outputs": others.outputs}[name]
        np.testing.assert_allclose(added, other, atol=1e-6, err_msg=name)


def test_what_does_not_fit_is_scored_by_rule_and_counted(scorer: hotrow.Scorer) -> None:
    rows = rows_of(some(20))
    odd = [{**row, "user": "nobody", "item": "word", "price": "a lot"} for row in rows]
    for row in odd:
        del row["big"]
    plain = [{**row, "user": "nobody", "item": None, "price": None, "big": None} for row in rows]
    np.testing.assert_array_equal(scorer.score(odd), scorer.score(plain))
    counts = scorer.seen.columns
    assert counts["user"]["unknown"] == 40
    assert (counts["item"]["missing"], counts["item"]["unreadable"]) == (40, 20)
    assert (counts["price"]["missing"], counts["price"]["unreadable"]) == (40, 20)
    assert counts["big"]["missing"] == 40
    assert "unknown_ids" in scorer.seen.warnings()


@pytest.mark.parametrize("short", [True, False])
def test_strict_names_column_and_row(scorer: hotrow.Scorer, *, short: bool) -> None:
    if not short:
        scorer._now._cells = None
    known = [{"price": 1.0, "age": 3, "x": 0.5, "user": "user ä1", "item": -99, "big": 2**64 - 7920} for _ in range(9)]
    assert len(scorer.score(known, strict=True)) == 9

    def but(row: int, **cells: Any) -> list[dict[str, Any]]:
        return [{**own, **cells} if place == row else own for place, own in enumerate(known)]

    without = [{name: cell for name, cell in row.items() if name != "age"} for row in known]
    for rows, said in (
        (but(5, user="nobody"), r"'user', row 5: an id that training never saw"),
        (but(3, price="a lot"), r"'price', row 3: 'a lot'"),
        (but(0, item="word"), r"'item', row 0: 'word'"),
        (without, r"column 'age' is missing"),
    ):
        with pytest.raises(ValueError, match=said):
            scorer.score(rows, strict=True)
    assert len(scorer.score(but(4, user=None), strict=True)) == 9, "a missing value is one that is expected"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "pass either rows, or items"),
        ({"rows": [{}], "items": [{}]}, "pass either rows, or items"),
        ({"rows": [{}], "user": {}}, "pass either rows, or items"),
        ({"rows": [{}, 3]}, "row 1 is a int"),
        ({"user": 3, "items": [{}]}, "user is a int; pass a dict"),
        ({"user": "ab", "items": [{}]}, "user is a str; pass a dict"),
        ({"user": {"item": 1}, "items": [{"big": 1}, {"item": 1}]}, "'item' is given by the user and by row 1"),
        ({"user": {"item": 1}, "items": {"item": [1]}}, "'item' is given by the user and by the items"),
        ({"rows": {"item": [1, 2], "big": [1]}}, "'big' has 1 rows, 'item' has 2"),
        ({"rows": {"item": "text"}}, "'item' is a str"),
        ({"rows": [{"item": 1}, {"itme": 1}]}, "row 1: the row has none of the model's columns; they are price, "),
        ({"rows": {"itme": [1]}}, "row 0: the row has none of the model's columns"),
        ({"rows": pa.table({"itme": [1]})}, "row 0: the data has none of the model's columns"),
        ({"rows": 7}, "int is not a path and not an Arrow-capable frame"),
    ],
)
def test_rows_of_no_known_form_are_refused(scorer: hotrow.Scorer, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scorer.score(**arguments)


def test_a_model_that_needs_ids_has_been_called_before_requests_come(tmp_path: Path) -> None:
    """So that its weights are arranged once, and not by threads beside each other."""
    rng, features = np.random.default_rng(2), ("user", "item")
    events = {name: rng.integers(0, 20, 600) for name in features}
    lists = [events["item"][max(at - 6, 0) : at] for at in range(600)]
    rows = pa.table({**events, "item_history": lists, "time": np.arange(600), "came": rng.integers(0, 2, 600)})
    schema = {
        "label": "came",
        "time": "time",
        "categorical": [*features, {"column": "item_history", "kind": "sequence", "table": "item"}],
    }
    data = run_prepare("frame", rows, tmp_path / "packed", schema=parse_schema(schema, where="test")).path
    run = train(data, tmp_path / "run", "model.name=tbsm", "model.history_steps=6", "train.max_steps=5")
    run.export(tmp_path / "out")
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        outputs = Version._scores
        patch.setattr(Version, "_scores", lambda *own: (found := outputs(*own), made.append(found))[0])
        scorer = hotrow.Scorer(tmp_path / "out")
    assert [found.shape for found in made] == [(1,)]
    with pytest.raises(ValueError, match="row 0: feature 'item_history' has 7 ids"):
        scorer.score([{"user": 1, "item": 1, "item_history": [1] * 7}])

    def refuse(*_: Any) -> None:
        raise SampleError(0, "item", "no ids")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Version, "_scores", refuse)
        with pytest.raises(ValueError, match=r"out.export\.json does not describe"):
            hotrow.Scorer(tmp_path / "out")


@native
@pytest.mark.parametrize("is_older", [True, False])
def test_a_native_module_that_is_older_than_its_callers_is_named(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_older: bool
) -> None:
    """A function of it takes other arguments then; without newer sources it is the export that does not fit."""
    (tmp_path / "source.cpp").touch()
    os.utime(tmp_path / "source.cpp", (2**32, 2**32) if is_older else (0, 0))
    monkeypatch.setattr(ops, "SOURCES", tmp_path)
    monkeypatch.setattr("hotrow.serve.version.cells_of", lambda: None)
    with pytest.raises(ValueError, match="export the run again") as raised:
        hotrow.Scorer(export)
    assert ("build that again with `pip" in str(raised.value)) == is_older


@native
def test_threads_do_not_disturb_each_other(scorer: hotrow.Scorer) -> None:
    requests = [rows_of(some(20, seed)) for seed in range(12)]
    expected = [scorer.score(rows) for rows in requests]
    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(scorer.score, requests * 5))
    for own, wanted in zip(found, expected * 5, strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_memory_is_let_go_of(days: Days, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files stay what they were, and so do scores, if every page is let go of all the time; a version that no
    longer scores has none in memory."""
    (first, _), (second, _), *_ = days
    link, expected = lead(tmp_path / "model", first), [hotrow.Scorer(own).score(some()) for own in (first, second)]
    let_go: list[str] = []
    monkeypatch.setattr(mapped, "mapped_bytes", lambda: 1 << 60)
    scorer = hotrow.Scorer(link, memory="1MiB")
    own = mapped.MappedTables.let_go
    monkeypatch.setattr(
        mapped.MappedTables, "let_go", lambda tables: (own(tables), let_go.append(str(tables._budget)))[0]
    )
    for wanted, after in zip(expected, (second, first), strict=True):
        for _ in range(3):
            np.testing.assert_array_equal(scorer.score(some()), wanted)
        lead(link, after)
        scorer.follow()
    assert len({*let_go}) == 1 and len(let_go) == 10, "after each score, the first of a version too, and at its end"


def locked_bytes() -> int:
    """Bytes that this process has locked in memory."""
    return 1024 * int(re.search(r"^VmLck:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


@native
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 1 << 22, reason="no memory may be locked here")
def test_the_first_rows_are_pinned(tmp_path: Path) -> None:
    """As many of each table as fit in half of the budget, by one version at a time, and no score changes."""
    for day, name in enumerate(("base", "next")):
        make(tmp_path / name, 20_000, day=day)
    link = lead(tmp_path / "model", tmp_path / "base")
    rows = [{"C3": "9e3779b3", "C4": format((7 * 2654435761 + 3) % 2**32, "x"), "I1": 3.0}, {"I1": None}]
    expected = hotrow.Scorer(tmp_path / "base").score(rows)
    before = locked_bytes()
    scorer = hotrow.Scorer(link, memory="512KiB")
    pages = len(scorer._now.mapped.weights) * mmap.PAGESIZE
    head_bytes = sum(own.begin for own in scorer._now.mapped._rows)

    def pinned_bytes() -> int:
        return locked_bytes() - before

    assert (1 << 18) - pages < pinned_bytes() <= (1 << 18) + head_bytes + pages
    np.testing.assert_array_equal(scorer.score(rows), expected)
    first = pinned_bytes()
    for name in ("next", "base"):
        lead(link, tmp_path / name)
        scorer.follow()
        assert pinned_bytes() == first
    np.testing.assert_array_equal(scorer.score(rows), expected)
    assert hotrow.Scorer(tmp_path / "base", memory=0).score(rows).tobytes() == expected.tobytes()
    del scorer
    gc.collect()
    assert not pinned_bytes()


def there(pages: np.memmap) -> set[int]:
    """The pages of a mapped file that the system has in memory."""
    found = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
    ctypes.CDLL(None).mincore(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(len(pages)), found)
    return set(np.flatnonzero(np.frombuffer(found, np.uint8) & 1).tolist())


def on_disk(file: IO[bytes]) -> np.memmap:
    """Maps a file of which no page is in memory; skips the test if the file system keeps them there."""
    os.fsync(file.fileno())
    pages = np.memmap(file, np.uint8, "r")
    for _ in range(50):  # pages that are on their way to a list of the system's stay at first
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not there(pages):
            return pages
        time.sleep(0.01)
    pytest.skip("this file system keeps files in memory")


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits while the disk reads."""
    until = time.monotonic() + 30
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    assert holds()


@native
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 1 << 22, reason="no memory may be locked here")
def test_rows_that_are_locked_as_others_are_let_go_of(tmp_path: Path) -> None:
    """A request lets go of a version's pages while `follow` locks its first rows."""
    make(tmp_path / "base", 20_000)
    scorer = hotrow.Scorer(tmp_path / "base", memory="512KiB")
    for own in scorer._now.mapped._rows:
        own.num_pinned = 0  # as the request has seen it
    scorer._now.mapped.let_go()


@native
def test_first_rows_are_read_that_must_not_be_locked(tmp_path: Path) -> None:
    """All of them, where the system reads ahead less, and not one after another when they are looked up."""
    num_rows, dim, num_pinned = 1 << 18, 32, 180_000
    safetensors.torch.save_file({"rows": torch.zeros(num_rows, dim)}, tmp_path / "rows.safetensors")
    table = {"name": "item", "file": "rows.safetensors", "tensor": "rows", "features": ["item"]}
    table |= {"num_embeddings": num_rows, "embedding_dim": dim, "stored_as": "float32"}
    with (tmp_path / "rows.safetensors").open("rb") as file:
        pages = on_disk(file)
        tables = mapped.MappedTables(tmp_path, [table], mapped.Budget(1 << 40, num_pinned * dim * 4))
        tables._libc = SimpleNamespace(mlock=lambda *_: -1, munlock=lambda *_: -1)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the head was read
        tables.pin()
        assert tables._rows[0].num_pinned == num_pinned
        wanted = set(range(-(-tables._rows[0].pinned_bytes // mmap.PAGESIZE)))
        wait_until(lambda: wanted <= there(pages))


@native
def test_rows_are_read_before_a_lookup(tmp_path: Path) -> None:
    """All that are not pinned, and no others; seen by mincore."""
    path, begin, row_bytes = tmp_path / "rows", 100, 5000
    path.write_bytes(bytes(begin + 100 * row_bytes))
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        pages = on_disk(file)
        asked = [60, 60, 99, 3, 20]
        backend().ask_for_rows(file.fileno(), begin, row_bytes, np.array(asked), 20)
        expected = {
            page
            for row in asked
            if row >= 20
            for page in range(
                (begin + row * row_bytes) // mmap.PAGESIZE, -(-(begin + (row + 1) * row_bytes) // mmap.PAGESIZE)
            )
        }
        wait_until(lambda: there(pages) == expected)


@native
@pytest.mark.slow
def test_memory_stays_near_its_budget(tmp_path: Path) -> None:
    """Tables have 256 MB, and requests ask for rows all over them."""
    make(tmp_path / "out", 4_000_000)
    rng, found = np.random.default_rng(0), dict[str | None, int]()
    sizes = {name: Vocabulary.open(tmp_path / "out/encoder/vocab" / name).num_keys for name in LARGE}
    for budget in ("32MiB", None):
        scorer = hotrow.Scorer(tmp_path / "out", memory=budget)
        before, most = mapped.mapped_bytes(), 0
        for _ in range(1500):
            rows = {name: rng.integers(1, size, 10) for name, size in sizes.items()}
            hexed = {n: [f"{(int(row) * 2654435761 + LARGE[n]) % 2**32:x}" for row in own] for n, own in rows.items()}
            scorer.score(hexed)
            most = max(most, mapped.mapped_bytes() - before)
        assert not sum(scorer.seen.columns[name]["unknown"] for name in LARGE)
        found[budget] = most
    assert found["32MiB"] < 48 << 20 and found[None] > 150 << 20, found


def lead(link: Path, folder: Path) -> Path:
    """Lets a link lead to a folder from now on, in one step."""
    (beside := link.with_name(f"{link.name}-2")).symlink_to(folder)
    return beside.replace(link)


Days = list[tuple[Path, Path]]
"""Of each day the version that a delta made of the one before, and the whole export."""


@pytest.fixture(scope="module")
def days(folder: Path, run: hotrow.Run) -> Days:
    """The checkpoints of a run as days."""
    found: Days = []
    for step in sorted(int(path.name.removeprefix("step-")) for path in run.checkpoint.parent.iterdir())[:NUM_DAYS]:
        run.export(whole := folder / f"whole-{step}", step=step)
        if found:
            run.export(delta := folder / f"delta-{step}", since=found[-1][0], step=step)
            hotrow.apply_delta(found[-1][0], delta, folder / f"version-{step}")
        found.append((folder / f"version-{step}" if found else whole, whole))
    assert len(found) == NUM_DAYS
    return found


def test_it_follows_a_link_forward_and_back(days: Days, tmp_path: Path) -> None:
    before, link = {own: file_hashes(own) for own, _ in days}, lead(tmp_path / "model", days[0][0])
    scorer, versions = hotrow.Scorer(link), list[str]()
    for version, whole in (*days, *reversed(days[:-1])):
        lead(link, version)
        for _ in range(2):  # the second time nothing is new
            versions.append(scorer.follow())
            assert scorer.version == versions[-1] == hotrow.Scorer(whole).version and scorer.path == version
            np.testing.assert_array_equal(scorer.score(some()), hotrow.Scorer(whole).score(some()))
    assert versions == versions[::-1] and len({*versions}) == len(days)
    assert {own: file_hashes(own) for own in before} == before and [*tmp_path.iterdir()] == [link]


@pytest.mark.parametrize(
    "name",
    ["export.json", "README.md", "tables/item.safetensors", "encoder/vocab/user", "model.safetensors", "."],
)
def test_a_version_that_cannot_be_opened_changes_nothing(days: Days, tmp_path: Path, name: str) -> None:
    (first, _), (second, _), *_ = days
    link, scorer = lead(tmp_path / "model", first), hotrow.Scorer(tmp_path / "model")
    expected, version, bad = scorer.score(some()), scorer.version, Path(shutil.copytree(second, tmp_path / "bad"))
    (damaged := bad / name if name != "." else bad).rename(tmp_path / "away")
    lead(link, bad)
    for _ in range(2):
        with pytest.raises(ValueError, match=name if name != "." else "export.json"):
            scorer.follow()
        np.testing.assert_array_equal(scorer.score(some()), expected)
    assert (scorer.path, scorer.version) == (first, version)
    (tmp_path / "away").rename(damaged)
    assert scorer.follow() == scorer.version == hotrow.Scorer(second).version


def test_a_version_is_held_until_no_server_scores_with_it(days: Days, tmp_path: Path) -> None:
    """Two servers follow a link, and one of them is behind."""
    folders = [Path(shutil.copytree(own, tmp_path / own.name)) for own, _ in days]
    link = lead(tmp_path / "model", folders[0])
    ahead, behind = hotrow.Scorer(link), hotrow.Scorer(link)
    for before, after in pairwise(folders):
        lead(link, after)
        assert ahead.follow() != behind.version and behind.path == before
        assert not remove_unheld(before) and not remove_unheld(after)
        np.testing.assert_array_equal(behind.score(some()), hotrow.Scorer(before).score(some()))
        assert behind.follow() == ahead.version
        assert remove_unheld(before) and not before.exists() and not remove_unheld(after)


FOLLOWING = """
import os, signal, sys, threading, hotrow
from pathlib import Path
link, other, delay_s = sys.argv[1:]
scorer = hotrow.Scorer(link)
threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
for turn in range(1000):
    (beside := Path(link + "-2")).symlink_to((other, scorer.path)[turn % 2])
    beside.replace(link)
    scorer.follow()
    scorer.score({"item": [1]})
"""


@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_server_that_was_killed_as_it_followed_holds_nothing(days: Days, tmp_path: Path, num_kills: int) -> None:
    (base, _), (whole, _), *_ = days
    expected = {own.name: hotrow.Scorer(own).score(some()) for own in (base, whole)}
    before, rng, link = {own: file_hashes(own) for own in (base, whole)}, random.Random(0), tmp_path / "model"
    for _ in range(num_kills):
        link.symlink_to(base)
        done = run_forked(FOLLOWING, link, whole, rng.uniform(0, 0.5))
        assert done.returncode == -signal.SIGKILL, done.stderr
        scorer = hotrow.Scorer(link)
        np.testing.assert_array_equal(scorer.score(some()), expected[scorer.path.name])
        del scorer
        gc.collect()
        with claim(base) as is_free, claim(whole) as is_free_too:
            assert is_free and is_free_too
        (tmp_path / "model-2").unlink(missing_ok=True)
        link.unlink()
    assert {own: file_hashes(own) for own in before} == before


@pytest.mark.parametrize("num_turns", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_every_answer_under_load_is_of_one_version(days: Days, tmp_path: Path, num_turns: int) -> None:
    """No request fails, and none has rows of two versions; one that nobody scores with goes with its folder."""
    wholes, rows, left = [hotrow.Scorer(whole) for _, whole in days], some(40), list[weakref.ref[Version]]()
    expected = {own.version: own.score(rows) for own in wholes}
    folder = Path(shutil.copytree(days[0][0], tmp_path / "0"))
    scorer = hotrow.Scorer(link := lead(tmp_path / "model", folder), memory="1MiB")
    found: list[tuple[str, bool]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            scores, version, _ = scorer.answer(rows)
            found.append((version, bool((scores == expected[version]).all())))

    with ThreadPoolExecutor(2) as executor:
        asking = [executor.submit(ask) for _ in range(2)]
        try:
            for turn in range(1, num_turns + 1):
                before, folder = folder, Path(shutil.copytree(days[turn % NUM_DAYS][0], tmp_path / f"{turn}"))
                left.append(weakref.ref(scorer._now))
                lead(link, folder)
                assert scorer.follow() == wholes[turn % NUM_DAYS].version
                assert remove_unheld(before) and not before.exists()
        finally:
            done.set()
        for each in asking:
            each.result()
    assert all(same for _, same in found) and {version for version, _ in found} == {*expected}
    assert scorer.seen.columns["user"]["values"] == len(rows["user"]) * len(found)
    gc.collect()
    assert not any(version() for version in left)


def test_rows_may_stand_for_no_id(export: Path, tmp_path: Path) -> None:
    """As in a chain of days after ids have expired; the truth is the script of the export."""
    other, name = tmp_path / "other", "encoder/vocab/item"
    shutil.copytree(export, other)
    own, kept = Vocabulary.open(other / name), list[Entries]()
    for keys, rows in own.entries():
        stays = rows % 3 > 0
        kept.append(
            Entries(hash_keys(keys)[stays], rows[stays].astype(np.int64), take_keys(keys, np.flatnonzero(stays)))
        )
    kept = [each if own.key_kind == "bytes" else each._replace(strings=None) for each in kept]
    summary = TableSummary(own.num_embeddings, sum(len(each.rows) for each in kept), own.missing_row, 0, 0)
    write_vocabulary(other / name, kept, summary, key_kind=own.key_kind)
    record, found = file_record(other / name), Vocabulary.open(other / name)

    def change_encoder(info: dict[str, Any]) -> None:
        info["files"]["vocab/item"] = {"num_bytes": record.num_bytes, "crc32": int(record.crc32, 16)}
        table = next(table for table in info["tables"] if table["name"] == "item")
        table.update(vocabulary=found.id, num_keys=found.num_keys)

    def change(about: dict[str, Any]) -> None:
        about["files"] |= {each: asdict(file_record(other / each)) for each in (name, "encoder/dataset.json")}

    reseal(other / "encoder/dataset.json", change_encoder)
    reseal(other / "export.json", change)
    scorer = hotrow.Scorer(other)
    scores = scorer.score(some())
    np.testing.assert_allclose(scores, scorer_of(other).score(some()).numpy(), rtol=0, atol=TOLERANCE)
    assert scorer.seen.columns["item"]["unknown"] > 60


def test_an_export_that_was_altered_is_refused(export: Path, tmp_path: Path) -> None:
    def changed(name: str, change: Callable[[Path], object]) -> Path:
        other = tmp_path / f"{name}-{len([*tmp_path.iterdir()])}"
        shutil.copytree(export, other)
        change(other)
        return other

    def described(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
        return lambda path: reseal(path / "export.json", change)

    def encoder(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
        """The encoder's dataset.json is changed, and export.json says so."""
        name = "encoder/dataset.json"

        def both(path: Path) -> None:
            reseal(path / name, change)
            reseal(path / "export.json", lambda about: about["files"].update({name: asdict(file_record(path / name))}))

        return both

    for other in (
        changed("gone", lambda path: (path / "encoder/vocab/user").unlink()),
        changed("cut", lambda path: os.truncate(path / "tables" / "user.safetensors", 5000)),
        changed("no", lambda path: (path / "export.json").unlink()),
        changed("model", described(lambda about: about["model"].update(name="other"))),
        changed("dims", described(lambda about: about["tables"][0].update(embedding_dim=5))),
        changed("rows", described(lambda about: about["tables"][0].update(num_embeddings=10**9))),
        changed("field", described(lambda about: about["tables"][0].pop("features"))),
        changed("schema", encoder(lambda info: info["ids"]["schema"]["categorical"].pop())),
        changed("keys", encoder(lambda info: info["ids"]["encodings"].popitem())),
        changed("transform", encoder(lambda info: info["dense"][0].update(transform="../../evil"))),
        changed("vocabulary", encoder(lambda info: info["tables"][0].update(vocabulary="0" * 32))),
        changed("link", encoder(lambda info: info["files"].update({"../x": {"num_bytes": 1, "crc32": 1}}))),
        changed("file", described(lambda about: about["tables"][0].update(file="../new.csv"))),
        tmp_path / "typo" / "clicks",
    ):
        with pytest.raises(ValueError, match=str(other.name)):
            print(other.name, hotrow.Scorer(other).version, "is taken")
    assert not (tmp_path / "typo").exists()


def test_layers_are_refused_before_they_take_memory(export: Path, run: hotrow.Run, tmp_path: Path) -> None:
    out, wide = Path(shutil.copytree(export, tmp_path / "out")), {"bottom_mlp": [40_000, 40_000]}
    reseal(out / "export.json", lambda about: about["model"].update(wide))
    manifest = shutil.copytree(run.path, tmp_path / "run") / run.checkpoint.relative_to(run.path) / MANIFEST
    reseal(manifest, lambda fields: fields["extra"]["config"]["model"].update(wide))
    with peak_below(200 << 20):
        with pytest.raises(ValueError, match=r"export\.json does not describe a model"):
            hotrow.Scorer(out)
        with pytest.raises(ValueError, match=r"model\.safetensors holds .*; this model has"):
            hotrow.load(tmp_path / "run").predict(some(3))


def test_a_limit_of_memory_that_a_system_cannot_keep_is_refused(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no /proc to count it by; without the limit it scores."""
    expected = hotrow.Scorer(export).score(some(3))
    monkeypatch.setattr(mapped, "STATM", tmp_path / "absent")
    with pytest.raises(ValueError, match=r"memory.*leave it out"):
        hotrow.Scorer(export, memory="1MiB")
    np.testing.assert_array_equal(hotrow.Scorer(export).score(some(3)), expected)


OF_ANOTHER = """
import os, shutil, sys, tempfile
from pathlib import Path
import hotrow
export, change, mode = sys.argv[1:]
with tempfile.TemporaryDirectory() as name:
    os.chmod(name, 0o777)
    out = Path(name) / "out"
    shutil.copytree(export, out)
    for path in (out, *out.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    hotrow.Scorer(out)  # loads all modules, from a folder that only root may be able to read
    os.chmod(Path(name) / change, int(mode, 8))
    become(65534, os.seteuid)
    for _ in range(2):
        try:
            print(hotrow.Scorer(out).version, "is taken")
        except ValueError as error:
            print(str(error).replace(name, ""))
    os.seteuid(0)
"""


@pytest.mark.slow_but("out-700", "out/tables/user.safetensors-600")
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user, who may not read what root made")
@pytest.mark.parametrize(
    ("change", "mode"),
    [
        *(("out", "700"), ("out", "744"), ("out/export.json", "600")),
        *(("out/tables", "700"), ("out/tables/user.safetensors", "600")),
    ],
)
def test_what_a_server_may_not_read_is_named_with_a_cure(export: Path, change: str, mode: str) -> None:
    said = run_as_another(OF_ANOTHER, export, change, mode).splitlines()
    assert len(said) == 2 and all(f"/{change}" in line and "chmod" in line and "Errno" not in line for line in said)


@pytest.mark.parametrize("num_cases", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_whatever_an_export_says_it_scores_or_is_refused_by_name(export: Path, tmp_path: Path, num_cases: int) -> None:
    """A field of export.json is changed, renamed or removed, and its checksum is made right again, as anybody can."""
    other, rng, rows = tmp_path / "other", random.Random(num_cases), rows_of(some(5))
    shutil.copytree(export, other)
    num_files, num_refused, before = len(list(tmp_path.rglob("*"))), 0, 0
    for case in range(num_cases):
        shutil.copyfile(export / "export.json", other / "export.json")
        what, start = mutate_sealed.change_json(other / "export.json", rng), time.process_time()
        try:
            hotrow.Scorer(other).score(rows)
        except ValueError as error:
            assert str(other) in str(error), what
            num_refused += 1
        assert time.process_time() - start < 2, what
        before = memory("VmRSS") if case == num_cases // 3 else before  # what is loaded at first use stays
    assert num_refused > num_cases / 4 and len(list(tmp_path.rglob("*"))) == num_files
    assert memory("VmRSS") - before < 50 << 20


def mutated(file: Path, others: list[Path], rng: random.Random) -> str:
    """Changes the bytes of a file; returns how."""
    content, kind = file.read_bytes(), rng.choice(["bit", "noise", "zeros", "cut", "longer", "other", "gone"])
    at, length = rng.randrange(len(content)), rng.randrange(1, 200)
    changes: dict[str, Callable[[], bytes]] = {
        "bit": lambda: content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        "noise": lambda: content[:at] + rng.randbytes(length) + content[at + length :],
        "zeros": lambda: content[:at] + bytes(length) + content[at + length :],
        "cut": lambda: content[:at],
        "longer": lambda: content + rng.randbytes(length),
        "other": lambda: rng.choice(others).read_bytes(),
    }
    if kind == "gone":
        file.unlink()
    else:
        file.write_bytes(changes[kind]())
    return kind


@pytest.mark.parametrize("num_cases", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_an_export_with_other_bytes_is_an_error_or_scores(export: Path, tmp_path: Path, num_cases: int) -> None:
    """As it lies there, sizes and checksums tell; if export.json has the new ones, what it says of the file does."""
    other, rng, rows = tmp_path / "other", random.Random(num_cases), rows_of(some(5))
    shutil.copytree(export, other)
    files, num_refused, before = sorted(path for path in export.rglob("*") if path.is_file()), 0, 0
    num_files = len(list(tmp_path.rglob("*")))
    for case in range(num_cases):
        file = other / rng.choice(files).relative_to(export)
        how = mutated(file, files, rng)
        is_sealed = file.exists() and file.name != "export.json" and rng.random() < 0.6
        if is_sealed:
            name, record = file.relative_to(other).as_posix(), asdict(file_record(file))
            reseal(other / "export.json", lambda about, name=name, record=record: about["files"].update({name: record}))
        start = time.process_time()
        try:
            assert hotrow.Scorer(other).score(rows).shape == (5,)
        except ValueError as error:
            assert str(other) in str(error), (case, file.name, how, error)
            num_refused += 1
        else:
            # Tables are not read when they are opened: of them only the sizes are compared.
            same = not is_sealed and file.read_bytes() == (export / file.relative_to(other)).read_bytes()
            assert is_sealed or same or "tables" in file.parts, (case, file.name, how)
        assert time.process_time() - start < 2, (case, file.name, how)
        before = memory("VmRSS") if case == num_cases // 3 else before
        for path in (file, other / "export.json"):
            shutil.copyfile(export / path.relative_to(other), path)
    assert num_refused > num_cases / 3 and len(list(tmp_path.rglob("*"))) == num_files
    assert memory("VmRSS") - before < 50 << 20
