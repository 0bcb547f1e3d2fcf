"""Laws of a chain of days: an id keeps its row until it expires, new ids get rows by their counts over all days,
statistics go on. The truth counts ids in dictionaries, day after day, in plain Python.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forked import COMMAND, run_forked
from hotrow.base.files import crc32
from hotrow.data.chunk import Chunk, Keys, Position
from hotrow.data.native import Counter as KeyCounter
from hotrow.data.native import hash_keys
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Entries, Vocabulary, build_vocabulary, open_counts, write_counts
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.prepare import extend, pipeline, rows
from hotrow.data.prepare.days import Base
from hotrow.data.prepare.extend import Counted, Extension, Uses
from hotrow.data.prepare.pipeline import Options, prepare
from hotrow.data.prepare.prepare import Encoder, _Earlier, run_prepare
from hotrow.data.prepare.statistics import NUM_FOLDS, Statistics
from hotrow.data.sources.options import ReadOptions
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import SplitSpec, parse_schema
from hotrow.data.sources.split import FOLD_SALT, uniform_of
from hotrow.hot.hot_set import tables_of
from hotrow.inspect.accesses import split_accesses
from hotrow.run.folder import RunFolder, dataset_of
from hotrow.setup.shards import hot_prefixes
from kill_prepare import check_kills
from loops import looped
from packed_data import make_info
from prepare_data import SCHEMA, file_hashes, make_rows, stopping, to_table, write_parquet
from resealed import reseal

Rows = dict[str, list[Any]]
SIZES: dict[str, Any] = {"rows_per_block": 64, "rows_per_part": 128, "rows_per_chunk": 100}
NOTHING = Base()
ALL_TRAIN = SplitSpec(kind="random", fractions=(1.0, 0.0, 0.0))
DAYS_SCHEMA = parse_schema(
    SCHEMA.to_json()
    | {
        "tables": {
            "default": {"min_count": 3, "expire": {"unused_days": 2}},
            "item": {"min_count": 3, "expire": {"unused_days": 1}},
            "tags": {"min_count": 30},
            "hashed": {"hash_cap": 40, "min_count": 25},
        }
    }
    | {"statistics": ["user", ["user", "site"]]},
    where="test",
)


def without_expiry(schema: Any) -> Any:
    value = schema.to_json()
    for spec in value["tables"].values():
        spec.pop("expire", None)
    return parse_schema(value, where="test")


def day_rows(day: int, num_rows: int = 700) -> Rows:
    """Clicks of a day: most ids are those of the days before, some are new, and some come on no other day."""
    rows, rng = make_rows(num_rows, seed=day), np.random.default_rng(day)
    drifts = rng.integers(0, 40 * day + 1, num_rows).tolist()
    return rows | {
        "ts": [1_700_000_000 + 2000 * day + t for t in rows["ts"]],
        "item": [None if i is None else i + d for i, d in zip(rows["item"], drifts, strict=True)],
        "seen": [[i + d for i in ids or ()] for ids, d in zip(rows["seen"], drifts, strict=True)],
        "user": [
            f"w{day}-{d % 7}" if d % 5 == 0 else f"v{d}" if d > 60 else u
            for u, d in zip(rows["user"], drifts, strict=True)
        ],
    }


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("logs")
    return [write_parquet(folder / f"day_{day}", day_rows(day)) for day in range(1, 4)]


def first_day(logs: Path, out: Path, *, schema: Any = DAYS_SCHEMA, base: Base | None = NOTHING, **options: Any) -> None:
    opened = open_source("parquet", logs, schema=schema.model_copy(update={"split": ALL_TRAIN}))
    prepare(opened, out, Options(base=base, **SIZES | options))


def next_day(logs: Path, out: Path, base: Path, options: dict[str, Any]) -> None:
    earlier = _Earlier.open(str(base))
    opened = earlier.opened("parquet", logs, split=ALL_TRAIN, rows=None, read=ReadOptions())
    prepare(opened, out, Options(base=earlier.base, **SIZES | options))


@pytest.fixture(scope="module")
def days(logs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three days, each prepared on the one before."""
    folder = tmp_path_factory.mktemp("days")
    out = [folder / f"day_{day}" for day in range(1, 4)]
    first_day(logs[0], out[0])
    for i in (1, 2):
        next_day(logs[i], out[i], out[i - 1], {})
    return out


class Truth:
    """The ids of one table over days. unused_days: None if ids never expire."""

    def __init__(self, min_count: int, unused_days: int | None = None) -> None:
        self.min_count, self.unused_days, self.day = min_count, unused_days, 0
        self.rows: dict[Any, int] = {}
        self.num_rows = 1
        self.seen = Counter[Any]()
        """Over all days, until an id has a row."""
        self.sight: dict[Any, tuple[int, int]] = {}
        """Day of first sight, and the place there by falling count, ties by first appearance."""
        self.last: dict[Any, int] = {}
        """The day on which an id was last seen."""
        self.reborn: list[int] = []
        self.num_expired = 0

    @staticmethod
    def of(table: str) -> Truth:
        spec = DAYS_SCHEMA.table(table)
        return Truth(spec.min_count, spec.expire and spec.expire.unused_days)

    def add(self, ids: list[Any]) -> None:
        self.day += 1
        of_day = Counter(ids)  # in the order of first appearance
        self.last |= dict.fromkeys(of_day, self.day)
        old = [k for k, d in self.last.items() if k is not None and self.day - d >= (self.unused_days or self.day)]
        self.num_expired = sum(key in self.rows for key in old)
        for key in old:
            for known in (self.rows, self.seen, self.sight, self.last):
                known.pop(key, None)
        for place, key in enumerate(sorted(of_day, key=lambda key: -of_day[key])):
            self.sight.setdefault(key, (self.day, place))
        self.seen.update({key: n for key, n in of_day.items() if key not in self.rows})
        enough = [k for k, n in self.seen.items() if n >= self.min_count and k not in self.rows]
        self.reborn, first = [], self.num_rows
        for key in sorted(enough, key=lambda key: (-self.seen[key], self.sight[key])):
            row = min({*range(1, self.num_rows + 1)} - {*self.rows.values()})
            self.rows[key], self.num_rows = row, max(self.num_rows, row + 1)
            self.reborn += [row] if row < first else []

    @property
    def waiting(self) -> list[Any]:
        return sorted((key for key in self.seen if key not in self.rows), key=lambda key: self.sight[key])

    def days_of(self, keys: dict[Any, int], size: int) -> list[int]:
        """The day of the last use of ids, by their numbers."""
        found = [0] * size
        for key, number in keys.items():
            found[number] = self.last[key] if key is not None else 0
        return found


def ids_of_table(rows: Rows, table: str) -> list[Any]:
    """Ids in the order of counting: by row, feature, place in a list."""
    features = {"item": ["item", "seen"], "hashed": ["site"]}.get(table, [table])
    cells = chain.from_iterable(zip(*(rows[feature] for feature in features), strict=True))
    return [as_counted(key, table) for cell in cells for key in (cell if isinstance(cell, list) else [cell])]


def as_counted(key: Any, table: str) -> Any:
    return key % 40 if table == "hashed" else key


def stored_ids(dataset: PackedDataset, feature: str) -> list[Any]:
    place, found = dataset.info.feature_names.index(feature), []
    part = dataset.split("train")
    for ids in (part.block(i).ids[place] for i in range(part.num_blocks)):
        if isinstance(ids, Ragged):
            found += [ids.values[a:b].tolist() for a, b in pairwise(ids.row_splits.tolist())]
        else:
            found += ids.tolist()
    return found


def rows_to_score(path: Path, rows: Rows) -> list[int]:
    """Feature by feature."""
    found: list[int] = next(Encoder.load(path).batches(to_table(rows))).sparse.values.tolist()
    return found


def test_rows_are_those_of_dictionaries(days: list[Path]) -> None:
    truths = {t: Truth.of(t) for t in DAYS_SCHEMA.table_names}
    for number, path in enumerate(days, 1):
        dataset, rows = PackedDataset.open(path, verify="full"), day_rows(number)
        for name, truth in truths.items():
            table, ids, before = dataset.info.table_by_name[name], ids_of_table(rows, name), dict(truth.rows)
            truth.add(ids)
            assert table.num_embeddings == truth.num_rows
            assert (table.missing_row or 0) == truth.rows.get(None, 0)
            assert table.num_dropped == len(truth.waiting)
            counts = Counter(truth.rows.get(key, 0) for key in ids)
            assert dataset.counts(name).tolist() == [counts[row] for row in range(truth.num_rows)]
            rare = Counted.open(*(path / file for file in table.rare_files))
            assert rare.counts.tolist() == [0, *(truth.seen[key] for key in truth.waiting)]
            assert dataset.reborn(name).tolist() == truth.reborn
            if truth.unused_days:
                used, seen = dataset.last_uses(name) or ((), ())
                assert list(used) == truth.days_of(truth.rows, truth.num_rows)
                waiting = {key: number for number, key in enumerate(truth.waiting, 1)}
                assert list(seen) == truth.days_of(waiting, len(waiting) + 1)
            if number == 1:
                continue
            assert dataset.info.summary["ids"][name] == {
                "lookups": len(ids),
                "unknown_to_base": sum(key not in before for key in ids),
                "unknown": counts[0],
                "new_rows": sum(key not in before for key in truth.rows),
                "ids_below_min_count": len(truth.waiting),
            } | (
                {
                    "expired": truth.num_expired,
                    "reused_rows": len(truth.reborn),
                    "free_rows": truth.num_rows - 1 - len(truth.rows),
                }
                if truth.unused_days
                else {}
            )
            assert table.parent == PackedDataset.open(days[number - 2]).info.table_by_name[name].vocabulary
        for feature in dataset.info.features:
            found = truths[feature.table].rows
            for cell, row in zip(rows[feature.name], stored_ids(dataset, feature.name), strict=True):
                keys = cell if isinstance(cell, list) else [cell]
                of_cell = [found.get(as_counted(key, feature.table), 0) for key in keys]
                assert row == (of_cell if isinstance(cell, list) else of_cell[0])
        assert rows_to_score(path, day_rows(1)) == [  # many of their ids have expired
            truths[feature.table].rows.get(as_counted(key, feature.table), 0)
            for feature in dataset.info.features
            for cell in day_rows(1)[feature.name]
            for key in (cell if isinstance(cell, list) else [cell])
        ]
    grown = PackedDataset.open(days[2]).info.summary["ids"]
    assert all(own["new_rows"] > 0 for own in grown.values()) and any(own["unknown"] for own in grown.values())
    assert all(grown[name]["expired"] > 0 < grown[name]["reused_rows"] for name in ("user", "item")), grown


def test_an_id_keeps_its_row_for_life_if_it_does_not_expire(logs: list[Path], tmp_path: Path) -> None:
    first_day(logs[0], tmp_path / "day_1", schema=without_expiry(DAYS_SCHEMA))
    next_day(logs[1], tmp_path / "day_2", tmp_path / "day_1", {})
    older, newer = (np.array(rows_to_score(tmp_path / f"day_{day}", day_rows(1))) for day in (1, 2))
    had = older > 0
    assert (older[had] == newer[had]).all()
    assert (newer[~had] > 0).any(), "ids that were rare get rows later"
    assert not list((tmp_path / "day_2" / "rare").glob("[rsu]*"))


def test_the_chain_is_recorded_and_transforms_are_frozen(days: list[Path]) -> None:
    infos = [PackedDataset.open(path).info for path in days]
    last = [float(max(day_rows(day)["ts"])) for day in range(1, 4)]
    first = {"number": 1, "parent": None, "parent_checksum": None, "last_time_s": last[0], "earlier": []}
    assert infos[0].ids["day"] == first
    for i in (1, 2):
        checksum = PackedDataset.open(days[i - 1]).checksum
        wanted = {"number": i + 1, "parent": f"day_{i}", "parent_checksum": checksum, "last_time_s": last[i]}
        found: Any = infos[i].ids["day"]
        earlier = found.pop("earlier")
        assert found == wanted
        assert len({*earlier}) == i
        assert infos[i].dense == infos[0].dense
        assert infos[i].ids["schema"] == infos[0].ids["schema"]
    assert "standardize(mean=" in infos[0].dense[1].transform


def test_the_first_day_of_a_chain_is_a_plain_dataset_and_its_rare_ids(logs: list[Path], tmp_path: Path) -> None:
    for name, base in (("plain", None), ("chain", Base())):
        first_day(logs[0], tmp_path / name, base=base)
    plain, of_chain = (file_hashes(tmp_path / name) for name in ("plain", "chain"))
    assert {name for name in of_chain if name not in plain} == {
        f"rare/{kind}/{table}" for kind in ("vocab", "counts") for table in DAYS_SCHEMA.table_names
    } | {f"rare/{kind}/{table}" for kind in ("used", "seen") for table in ("user", "item")}
    assert {n: h for n, h in plain.items() if n != "dataset.json"}.items() <= of_chain.items()


def test_a_plain_dataset_is_a_base_that_has_forgotten_its_rare_ids(logs: list[Path], tmp_path: Path) -> None:
    first_day(logs[0], tmp_path / "day_1", base=None)
    said: list[str] = []
    dataset = run_prepare("parquet", logs[1], tmp_path / "day_2", base=tmp_path / "day_1", announce=said.append)
    truth = Truth(3)
    truth.add(ids_of_table(day_rows(1), "user"))
    truth.seen = Counter({key: n for key, n in truth.seen.items() if key in truth.rows})
    truth.sight = {key: place for key, place in truth.sight.items() if key in truth.rows}
    truth.add(ids_of_table(day_rows(2), "user"))
    assert stored_ids(dataset, "user") == [truth.rows.get(key, 0) for key in day_rows(2)["user"]]
    assert any("'user'" in line and "--base none" in line for line in said)
    assert {name: part.num_rows for name, part in dataset.splits.items()} == {"train": 700}


@pytest.mark.slow_but("{'threads': 1}", "{'memory_bytes': 24000}")
@pytest.mark.parametrize("options", [{"threads": 1}, {"rows_per_chunk": 61}, {"memory_bytes": 24_000}], ids=str)
def test_ways_to_run_move_nothing(
    days: list[Path], logs: list[Path], tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MIN_MEMORY_BYTES", 0)
    monkeypatch.setattr(extend, "IDS_PER_RANGE", 13)
    monkeypatch.setattr(extend, "PLACES_AT_ONCE", 7)
    next_day(logs[2], tmp_path / "day_3", days[1], options)
    assert file_hashes(tmp_path / "day_3") == file_hashes(days[2])


@pytest.mark.slow_but("count-6", "encode-0")
@pytest.mark.parametrize(("stage", "number"), [("count", 1), ("count", 6), ("encode", 0), ("encode", 5)])
def test_stopped_and_continued_moves_no_byte(
    days: list[Path], logs: list[Path], tmp_path: Path, stage: str, number: int
) -> None:
    with stopping(stage, number):
        next_day(logs[2], tmp_path / "day_3", days[1], {})
    with pytest.raises(ValueError, match=r"day\.number is 2, was 3"):
        next_day(logs[2], tmp_path / "day_3", days[0], {})
    next_day(logs[2], tmp_path / "day_3", days[1], {"rows_per_chunk": 77})
    assert file_hashes(tmp_path / "day_3") == file_hashes(days[2])


@pytest.mark.parametrize("num_kills", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_killed_at_any_rename_and_continued_gives_the_same_bytes(
    days: list[Path], logs: list[Path], tmp_path: Path, num_kills: int
) -> None:
    check_kills(logs[1], tmp_path, num_kills, days[0])


def dense_of(dataset: PackedDataset, first: int) -> np.ndarray:
    part = dataset.split("train")
    return np.concatenate([np.stack(part.block(i).dense[first:], 1) for i in range(part.num_blocks)])


def test_statistics_are_those_of_one_preparation(days: list[Path], logs: list[Path], tmp_path: Path) -> None:
    first_day(logs[0].parent, tmp_path / "all", base=None)
    whole, of_days = PackedDataset.open(tmp_path / "all"), [PackedDataset.open(path) for path in days]
    found = np.concatenate([dense_of(day, len(DAYS_SCHEMA.dense)) for day in of_days])
    assert found.tobytes() == dense_of(whole, len(DAYS_SCHEMA.dense)).tobytes()
    assert len(np.unique(found)) > 100
    assert of_days[2].statistics_path().read_bytes() == whole.statistics_path().read_bytes()


def test_statistics_without_a_time_count_earlier_days_and_other_folds(logs: list[Path], tmp_path: Path) -> None:
    """The truth counts a dictionary for each row; folds are drawn by row."""
    schema = parse_schema(
        {"label": "click", "categorical": ["site"], "statistics": [{"columns": ["site"], "priors": [5]}]}, where="test"
    )
    first_day(logs[0], tmp_path / "day_1", schema=schema)
    next_day(logs[1], tmp_path / "day_2", tmp_path / "day_1", {})
    dataset, (one, two) = PackedDataset.open(tmp_path / "day_2"), (day_rows(1), day_rows(2))
    fold = uniform_of(0, np.arange(700), salt=FOLD_SALT) * NUM_FOLDS // 1
    wanted = []
    for row, site in enumerate(two["site"]):
        others = [i for i in range(700) if fold[i] != fold[row]]
        seen = [*zip(one["site"], one["click"], strict=True), *((two["site"][i], two["click"][i]) for i in others)]
        own = [click for each, click in seen if each == site]
        p = (sum(click for _, click in seen) + 0.5) / (len(seen) + 1)
        q = (sum(own) + 5 * p) / (len(own) + 5)
        wanted.append(np.log(q / (1 - q)) - np.log(p / (1 - p)))
    np.testing.assert_allclose(dense_of(dataset, 0)[:, 0], wanted, rtol=1e-5, atol=1e-6)


def of_one_value(schema: Any, *counts: tuple[int, int], num_folds: int = 1) -> Statistics:
    """Statistics of one value in the first folds."""
    found = Statistics(schema, num_folds=num_folds)
    for fold, of_fold in enumerate(counts):
        found.counts[0].put(ONE_HASH, np.array([of_fold], np.uint32), fold=fold)
        found.all[fold] = of_fold
    return found


ONE_HASH = hash_keys(Keys(np.array([7], np.int64)))


def test_counts_of_many_days_stay_at_their_limit() -> None:
    schema = parse_schema({"label": "y", "time": "t", "categorical": ["a"], "statistics": ["a"]}, where="test")
    one, other = of_one_value(schema, (3 << 30, 7)), of_one_value(schema, (3 << 30, 7))
    one.merge(other)
    assert one.counts[0].get(ONE_HASH).tolist() == [[2**32 - 1, 14]]


def test_counts_of_a_day_and_of_many_before_it_stay_at_their_limit_without_a_time() -> None:
    schema = parse_schema({"label": "y", "categorical": ["a"], "statistics": ["a"]}, where="test")
    chunk = Chunk(1, None, np.zeros((1, 0), np.float32), {"a": Keys(np.array([7], np.int64))}, Position())
    day, earlier = of_one_value(schema, (5, 1), (3, 1), num_folds=NUM_FOLDS), of_one_value(schema, (2**32 - 1, 1))
    both = day.with_earlier(earlier)
    assert both.total().counts[0].get(ONE_HASH).tolist() == [[2**32 - 1, 3]]
    of_row = both.joined_out_of_fold(chunk, np.ones(1, np.bool_), np.zeros(1, np.uint8)).dense
    wanted = both.inputs([np.array([[2**32 - 1, 2]])], np.array([[2**32 + 2, 2]]))
    np.testing.assert_array_equal(of_row, wanted)


def test_what_asks_for_popularity_sorts_the_rows_of_later_days(days: list[Path]) -> None:
    first, last = PackedDataset.open(days[0]), PackedDataset.open(days[2])
    assert first.is_ranked and not last.is_ranked
    for use in tables_of(last, dict.fromkeys(DAYS_SCHEMA.table_names, 4)):
        assert (np.diff(use.counts[1:].astype(np.int64)) <= 0).all()
        assert use.order is not None and (use.counts == last.counts(use.name)[use.order]).all()
    for table in split_accesses(last).tables:
        assert table.counts.tolist() == sorted(last.counts(table.name)[1:].tolist(), reverse=True)


@looped("share", [0.1, 0.3, 0.9, 1.0])
def test_a_later_day_has_as_many_hot_rows_as_its_counts_say(days: list[Path], share: float) -> None:
    last = PackedDataset.open(days[2])
    tables: Any = [SimpleNamespace(name=table.name, num_embeddings=table.num_embeddings) for table in last.info.tables]
    found, num_rows = hot_prefixes(tables, last, share), sum(table.num_embeddings for table in tables)
    assert sum(found.values()) <= share * num_rows
    counts = np.concatenate([last.counts(table.name) for table in tables])
    least = min(n for n in range(1, counts.max() + 2) if (counts >= n).sum() <= share * num_rows)
    assert found == {table.name: int((last.counts(table.name) >= least).sum()) for table in tables}
    assert sum(found.values()) > 0


def damaged(change: Callable[[Path], object]) -> Callable[[Path, Path], Path]:
    def change_copy(day: Path, folder: Path) -> Path:
        shutil.copytree(day, folder / "day_2")
        change(folder / "day_2")
        return folder / "day_2"

    return change_copy


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@looped(
    ("change", "named"),
    [
        (lambda base: (base / "train" / "part-00002.arrow").unlink(), r"part-00002\.arrow.*missing"),
        (lambda base: (base / "dataset.json").unlink(), r"no dataset\.json"),
        (lambda base: flip(base / "vocab" / "user"), r"vocab/user.*altered"),
        (lambda base: flip(base / "rare" / "vocab" / "item"), r"rare/vocab/item.*altered"),
        (lambda base: flip(base / "rare" / "counts" / "item"), r"rare/counts/item.*altered"),
        (lambda base: flip(base / "rare" / "used" / "item"), r"rare/used/item.*altered"),
        (lambda base: flip(base / "rare" / "seen" / "item"), r"rare/seen/item.*altered"),
        (lambda base: flip(base / "statistics" / "counts.safetensors"), r"counts\.safetensors.*altered"),
        (lambda base: shutil.copy(base / "vocab" / "item", base / "vocab" / "user"), r"vocab/user"),
    ],
)
def test_a_damaged_base_is_refused_by_name(
    days: list[Path], logs: list[Path], tmp_path: Path, change: Callable[[Path], object], named: str
) -> None:
    base = damaged(change)(days[1], tmp_path)
    with pytest.raises(ValueError, match=named):
        run_prepare("parquet", logs[2], tmp_path / "day_3", base=base)
    assert not (tmp_path / "day_3" / "dataset.json").exists()


def test_what_would_break_the_chain_is_refused(days: list[Path], logs: list[Path], tmp_path: Path) -> None:
    def refused(
        named: str, *, data: Any = logs[2], source: str = "parquet", base: Path = days[1], **given: Any
    ) -> None:
        with pytest.raises(ValueError, match=named):
            run_prepare(source, data, tmp_path / "out", base=base, **given)
        assert not (tmp_path / "out").exists()

    with pytest.raises(ValueError, match="is the base itself"):
        run_prepare("parquet", logs[2], days[1], base=days[1], overwrite=True)
    refused("schema is given", schema=DAYS_SCHEMA)
    refused("min_count is given", min_count=5)
    refused("label is given", label="click")
    refused(r"part-0\.parquet was already prepared as .*day_2", data=logs[1])
    with pytest.raises(ValueError, match=r"last row is of 2023-11-14T\d\d:\d\d:\d\d UTC.*order of time"):
        run_prepare("parquet", logs[0], tmp_path / "earlier", base=days[1])
    refused("prepared by source parquet", source="criteo")
    (tmp_path / "empty").mkdir()
    refused("no dataset.json", base=tmp_path / "empty")
    with PackedWriter(tmp_path / "made", make_info()) as writer:
        rows = {f.name: ([0], [0, 1]) if f.kind != "one_hot" else [0] for f in writer.info.features}
        sparse = {name: tuple(map(np.array, r)) if isinstance(r, tuple) else np.array(r) for name, r in rows.items()}
        writer.append("train", np.zeros(1), np.zeros((1, len(writer.info.dense))), sparse)
        writer.close()
    refused("not made from raw rows", base=tmp_path / "made")
    texts = to_table(day_rows(3)).drop_columns("item").append_column("item", [["x"] * 700])
    refused("item", source="frame", data=texts)


def test_a_day_before_the_last_one_is_refused_without_a_time(tmp_path: Path) -> None:
    """With times, its rows would be older than those of the base."""
    schema = parse_schema({"label": "y", "categorical": ["a"]}, where="test")
    for day in range(1, 5):
        (tmp_path / f"{day}.csv").write_text("y,a\n" + "".join(f"{i % 2},{i * day % 5}\n" for i in range(20)))
    for day in range(1, 4):
        base = {"schema": schema, "base": "none"} if day == 1 else {"base": tmp_path / f"day_{day - 1}"}
        run_prepare("csv", tmp_path / f"{day}.csv", tmp_path / f"day_{day}", **base)
    for day in (1, 2):
        shutil.copy(tmp_path / f"{day}.csv", again := tmp_path / "again.csv")
        with pytest.raises(ValueError, match=r"again\.csv: .* already prepared as an earlier day of .*day_3"):
            run_prepare("csv", again, tmp_path / "out", base=tmp_path / "day_3", overwrite=True)
    run_prepare("csv", tmp_path / "4.csv", tmp_path / "out", base=tmp_path / "day_3", overwrite=True)


def test_a_run_stands_for_the_dataset_it_trained_on(days: list[Path], logs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(days[1], tmp_path / "day_2")
    run = RunFolder.create(tmp_path / "run", name="any")
    with pytest.raises(ValueError, match="has not come to its dataset"):
        dataset_of(str(run.path))
    checksum = PackedDataset.open(tmp_path / "day_2").checksum
    run.update(dataset={"path": str(tmp_path / "day_2"), "checksum": checksum, "name": "parquet"})
    done = run_forked(COMMAND, "prepare", "auto", logs[2], "--base", run.path, "--out", tmp_path / "day_3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["summary"]["ids"]["user"]["new_rows"] > 0
    for name in ("vocab", "rare"):
        assert file_hashes(tmp_path / "day_3", below=name) == file_hashes(days[2], below=name)
    shutil.copy(days[0] / "dataset.json", tmp_path / "day_2" / "dataset.json")
    with pytest.raises(ValueError, match=r"another one is there now"):
        dataset_of(str(run.path))
    assert dataset_of(str(tmp_path / "day_2")) == str(tmp_path / "day_2"), "a dataset stands for itself"


def test_a_disk_without_room_for_what_a_day_takes_over_is_refused(
    days: list[Path], logs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = sum(file.num_bytes for file in PackedDataset.open(days[1]).info.files.values())
    monkeypatch.setattr(rows, "disk_free_bytes", lambda _: taken)
    with pytest.raises(ValueError, match="are free"):
        run_prepare("parquet", logs[2], tmp_path / "day_3", base=days[1])


def test_a_full_disk_while_ids_are_numbered_leaves_what_can_be_continued(
    days: list[Path], logs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(extend, "tempfile", SimpleNamespace(TemporaryFile=full))
        with pytest.raises(OSError, match="day_3") as caught:
            next_day(logs[2], tmp_path / "day_3", days[1], {})
    assert caught.value.errno == errno.ENOSPC
    next_day(logs[2], tmp_path / "day_3", days[1], {})
    assert file_hashes(tmp_path / "day_3") == file_hashes(days[2])


def test_counts_of_another_vocabulary_are_refused(days: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"rare/counts/item counts \d+ rows, but .*rare/vocab/user has"):
        Counted.open(days[1] / "rare" / "vocab" / "user", days[1] / "rare" / "counts" / "item")


@looped("name", ["used", "seen"])
def test_last_uses_of_other_ids_are_refused(days: list[Path], logs: list[Path], tmp_path: Path, name: str) -> None:
    base = shutil.copytree(days[1], tmp_path / "base")
    write_counts(path := base / "rare" / name / "item", np.ones(3, np.uint32))
    record = {"num_bytes": path.stat().st_size, "crc32": crc32(path)}
    reseal(base / "dataset.json", lambda fields: fields["files"].update({f"rare/{name}/item": record}))
    with pytest.raises(ValueError, match=rf"rare/{name}/item has 3 days for \d+ rows"):
        run_prepare("parquet", logs[2], tmp_path / "out", base=base)


def test_days_with_a_lag_train_on_all_rows(tmp_path: Path) -> None:
    schema = {"label": "y", "time": "t", "categorical": ["a"], "statistics": ["a"], "statistics_lag": "1h"}
    for day in (1, 2):
        text = "\n".join(f"{i % 2},2024-01-0{day}T{i // 4:02}:00:00,{i % 3}" for i in range(40))
        (tmp_path / f"{day}.csv").write_text(f"y,t,a\n{text}\n")
    run_prepare("csv", tmp_path / "1.csv", tmp_path / "one", schema=parse_schema(schema, where="test"), base="none")
    with pytest.raises(ValueError, match="statistics_lag"):
        run_prepare("csv", tmp_path / "2.csv", tmp_path / "two", base=tmp_path / "one", split="time")
    dataset = run_prepare("csv", tmp_path / "2.csv", tmp_path / "two", base=tmp_path / "one")
    assert dataset.split("train").num_rows == 40


def test_a_day_may_have_a_split_and_joins_other_parts_of_it(days: list[Path], logs: list[Path], tmp_path: Path) -> None:
    dataset = run_prepare("parquet", logs[2], tmp_path / "out", base=days[1], split="time")
    assert all(dataset.split(name).num_rows > 50 for name in ("train", "val", "test"))
    assert dataset.counts("user").sum() == dataset.split("train").num_rows


def test_equal_hashes_are_in_the_order_of_their_bytes() -> None:
    def entries(hashes: list[int], texts: list[bytes], first_row: int) -> Entries:
        ends = np.cumsum([0, *map(len, texts)])
        keys = Keys(np.frombuffer(b"".join(texts), np.uint8), ends)
        return Entries(np.array(hashes, np.uint64), np.arange(first_row, first_row + len(hashes)), keys)

    (found,) = extend._in_order([entries([3, 9], [b"b", b"x"], 1), entries([3, 3], [b"a", b"bb"], 3)])
    assert found.hashes.tolist() == [3, 3, 3, 9]
    assert found.rows.tolist() == [3, 1, 4, 2]
    assert found.strings is not None and found.strings.values.tobytes() == b"abbbx"


def keys_of(kind: str, ids: list[Any]) -> Keys:
    """Integers, or their text; None is missing."""
    valid = np.array([key is not None for key in ids], np.bool_)
    if kind == "int":
        return Keys(np.array([key or 0 for key in ids], np.int64), None, valid)
    texts = [b"" if key is None else str(key).encode() for key in ids]
    return Keys(np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)]), valid)


def counted(path: Path, kind: Any, ids: list[Any]) -> Counted:
    """The vocabulary of a day and its counts."""
    counter = KeyCounter(kind)
    counter.add(keys_of(kind, ids))
    path.mkdir()
    counter.drain(path / "run")
    files = path / "vocab", path / "counts"
    build_vocabulary([path / "run"], *files, key_kind=kind, memory_bytes=1 << 20, tmp_dir=path)
    return Counted.open(*files)


@pytest.mark.slow_but("1-2-int", "3-5-bytes", "2-4-int", "0-1-bytes")
@pytest.mark.parametrize("kind", ["int", "bytes"])
@pytest.mark.parametrize(("seed", "unused_days"), [(0, 1), (1, 2), (2, 4), (3, 5)])
def test_random_days_with_expiry_are_those_of_dictionaries(
    kind: Any, seed: int, unused_days: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids come, go and come back, the missing value too; the day before is known by its files alone."""
    monkeypatch.setattr(extend, "IDS_PER_RANGE", 13)
    monkeypatch.setattr(extend, "PLACES_AT_ONCE", 7)
    truth, rng = Truth(2, unused_days), np.random.default_rng(seed)
    names = "vocab", "counts", "rare", "rare-counts", "used", "seen", "reborn"
    seen_states = set()
    for number in range(1, 13):
        ids = [int(i) if i else None for i in rng.zipf(1.5, rng.integers(0, 90)) % 60 + rng.choice([0, 30 * number])]
        ids += [None] * (number % 5 == 3)
        day, out = counted(tmp_path / f"day-{number}", kind, ids), tmp_path / str(number)
        before = tmp_path / str(number - 1)
        if number == 1:
            base = extend.empty_vocabulary(tmp_path / "none", day.vocabulary)
            rare = Counted(base, np.zeros(1, np.uint32))
            uses = Uses.on(0, base, rare)
        else:
            base, rare = Vocabulary.open(before / "vocab"), Counted.open(before / "rare", before / "rare-counts")
            uses = Uses(open_counts(before / "used"), open_counts(before / "seen"))
        uses = uses._replace(today=number, unused_days=unused_days)
        out.mkdir()
        Extension(base, rare, day, min_count=2, tmp_dir=out, uses=uses).write(*(out / name for name in names))
        truth.add(ids)
        found = Vocabulary.open(out / "vocab")
        every = [*truth.rows, *ids, *range(-5, 500)]
        keys = keys_of(kind, every)
        assert found.lookup(keys).tolist() == [truth.rows.get(key, 0) for key in every]
        num_keys = len(truth.rows) - (None in truth.rows)
        assert (found.num_embeddings, found.num_keys) == (truth.num_rows, num_keys)
        num_free = truth.num_rows - 1 - len(truth.rows)
        assert int.from_bytes((out / "vocab").read_bytes()[8:12], "little") == 1
        waiting = {key: place for place, key in enumerate(truth.waiting, 1)}
        assert Vocabulary.open(out / "rare").lookup(keys).tolist() == [waiting.get(key, 0) for key in every]
        assert open_counts(out / "rare-counts").tolist() == [0, *(truth.seen[key] for key in truth.waiting)]
        assert open_counts(out / "used").tolist() == truth.days_of(truth.rows, truth.num_rows)
        assert open_counts(out / "seen").tolist() == truth.days_of(waiting, len(waiting) + 1)
        assert (open_counts(out / "reborn").tolist() if (out / "reborn").exists() else []) == truth.reborn
        seen_states |= {"free"} if num_free else {"reborn"} if truth.reborn else set()
    assert seen_states == {"free", "reborn"} and None in truth.rows


@looped("kind", ["int", "bytes"])
def test_a_written_vocabulary_has_the_bytes_of_a_built_one(kind: Any, tmp_path: Path) -> None:
    """Of no ids, of one, and of many."""
    rng = np.random.default_rng(0)
    for num_keys in (0, 1, 3000):
        ids = rng.zipf(1.3, num_keys) % 900
        texts = [f"{i}" * (1 + i % 3) for i in ids.tolist()]
        data = np.frombuffer("".join(texts).encode(), np.uint8)
        counter = KeyCounter(kind)
        counter.add(Keys(ids) if kind == "int" else Keys(data, np.cumsum([0, *map(len, texts)])))
        counter.drain(tmp_path / "run")
        for name, least in (("all", 1), ("some", 3)):
            files = [tmp_path / f"{name}-{what}" for what in ("vocab", "counts")]
            build_vocabulary(
                [tmp_path / "run"], *files, key_kind=kind, min_count=least, memory_bytes=1 << 20, tmp_dir=tmp_path
            )
        day = Counted.open(tmp_path / "all-vocab", tmp_path / "all-counts")
        empty = extend.empty_vocabulary(tmp_path / "empty", day.vocabulary)
        extension = Extension(empty, Counted(empty, np.zeros(1, np.uint32)), day, min_count=3, tmp_dir=tmp_path)
        extension.write(*(tmp_path / name for name in ("vocab", "counts", "rare", "rare-counts")))
        assert (tmp_path / "vocab").read_bytes() == (tmp_path / "some-vocab").read_bytes()
        assert (tmp_path / "counts").read_bytes() == (tmp_path / "some-counts").read_bytes()
        assert open_counts(tmp_path / "rare-counts").sum() == open_counts(tmp_path / "counts")[0]
        assert Vocabulary.open(tmp_path / "rare").num_keys == extension.num_rare
