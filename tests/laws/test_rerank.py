"""Laws of numbering rows anew: `prepare --base --rerank` changes which row an id has, and nothing else.

The truth is the same day prepared without it: what a dictionary of ids says of both must be equal, to the bit.
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_delta import files_of
from test_from_run import OF_IDS, config, ids_of, newest

import hotrow
import mutate
from hotrow.base.files import crc32
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary, write_counts
from hotrow.data.prepare import extend, rerank
from hotrow.data.prepare.prepare import run_prepare
from hotrow.parallel.communicator import Communicator
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from rank_pool import RankPool
from resealed import reseal

TABLES = "user", "item"
BIG = ["train.batch_size=128", "train.epochs=1"]
TIERS = ["memory={dram: 30KiB, writes: in_place}"]


def day_rows(day: int) -> list[tuple[int, int, str]]:
    """Clicks of a day. Ids that were rare the day before are popular on the next one; each day has a missing item."""
    rng = np.random.default_rng(day)
    users = (rng.zipf(1.2, 6000) + 700 * day) % 2500
    items = (rng.zipf(1.5, 6000) * (day + 3)) % 90
    return [
        ((u * i + k) % 3 // 2, u, "" if k % 50 == 0 else f"i{i}")
        for k, (u, i) in enumerate(zip(users.tolist(), items.tolist(), strict=True))
    ]


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: two days, the second and the third after it also with rows that the second one numbered anew."""
    folder = tmp_path_factory.mktemp("days")
    ids = [{"column": "user", "type": "int"}, {"column": "item", "type": "text"}]
    tables = {"default": {"min_count": 2, "expire": {"unused_days": 2}}}
    (folder / "schema.yaml").write_text(json.dumps({"label": "click", "categorical": ids, "tables": tables}))
    for day in range(3):
        rows = "".join(f"{click},{user},{item}\n" for click, user, item in day_rows(day))
        (folder / f"{day}.csv").write_text("click,user,item\n" + rows)

    def made(name: str, day: int, base: str | Path, **options: Any) -> Path:
        return run_prepare("csv", folder / f"{day}.csv", folder / name, base=base, **options).path

    first = made("0", 0, "none", schema=folder / "schema.yaml", split="random", fractions=[1, 0, 0])
    found = {"0": first, "1": made("1", 1, first), "1r": made("1r", 1, first, rerank=True)}
    return found | {"2": made("2", 2, found["1"]), "2r": made("2r", 2, found["1r"])}


def by_id(dataset: PackedDataset, table: str) -> dict[Any, int]:
    """The row of each id, of the missing value if it has one, and of all others."""
    missing = dataset.info.table_by_name[table].missing_row
    return ids_of(dataset, table) | ({None: missing} if missing else {}) | {"others": 0}


def test_each_id_has_a_row_and_what_it_had(days: dict[str, Path]) -> None:
    for name in ("1", "2"):
        plain, other = (PackedDataset.open(days[each], verify="full") for each in (name, f"{name}r"))
        for table in TABLES:
            rows, moved = by_id(plain, table), by_id(other, table)
            assert rows.keys() == moved.keys() and len(set(moved.values())) == len(moved)
            assert rows != moved and (None in rows) == (table == "item") and rows["others"] == moved["others"] == 0
            used = [each.last_uses(table)[0] for each in (plain, other)]  # type: ignore[index]
            for key, row in rows.items():
                assert plain.counts(table)[row] == other.counts(table)[moved[key]]
                assert used[0][row] == used[1][moved[key]]
            to = np.zeros(len(used[0]), np.int64)
            to[[*rows.values()]] = [*moved.values()]
            column, renumbered = (each.split("train").block(0).ids[TABLES.index(table)] for each in (plain, other))
            assert np.array_equal(to[column], renumbered)
            for old, new in zip(plain.rare_paths(table) or (), other.rare_paths(table) or (), strict=True):
                assert old.read_bytes() == new.read_bytes()
        assert plain.info.summary == other.info.summary | {"ids": plain.info.summary["ids"]}
        assert plain.info.summary["ids"] == other.info.summary["ids"]


def test_rows_follow_the_days_counts(days: dict[str, Path]) -> None:
    plain, other = PackedDataset.open(days["1"]), PackedDataset.open(days["1r"])
    assert other.is_ranked and not plain.is_ranked
    for table in TABLES:
        counts, moved = plain.counts(table), other.moved(table)
        assert moved is not None and plain.moved(table) is None
        expected = [0, *sorted(range(1, len(counts)), key=lambda row, counts=counts: -int(counts[row]))]
        assert np.argsort(moved).tolist() == expected
        assert sorted(moved[plain.reborn(table)].tolist()) == other.reborn(table).tolist()


def values_of(run: Path, dataset: Path) -> dict[Any, list[bytes]]:
    """By table and id, the weights and states of its row in the newest checkpoint of a run."""
    tensors, opened = newest(run), PackedDataset.open(dataset)
    found: dict[Any, list[bytes]] = {}
    for number, table in enumerate(TABLES):
        names = [f"embedding/{table}.safetensors:weight"]
        names += [name for name in tensors if name.startswith(f"sparse_optimizer.safetensors:{number}.")]
        num_rows = opened.info.table_by_name[table].num_embeddings
        for key, row in by_id(opened, table).items():
            sizes = [len(tensors[name]) // num_rows for name in names]
            found[table, key] = [
                tensors[name][row * size : (row + 1) * size] for name, size in zip(names, sizes, strict=True)
            ]
    return found | {"dense": [own for name, own in tensors.items() if name.startswith(("model", "dense"))]}


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["optimizer.sparse.name=adam"],
        ["optimizer.sparse={name: ftrl, l1: 1e-3}"],
        [*TIERS, "optimizer.sparse.name=adagrad"],
        ["train.precision=split_bf16", "optimizer.sparse.name=sgd"],
    ],
    ids=["row-wise adagrad", "adam", "ftrl", "tiers", "split"],
)
def test_scores_and_training_are_those_of_the_old_numbers(
    days: dict[str, Path], tmp_path: Path, changes: list[str]
) -> None:
    wanted, raw = [*OF_IDS, *BIG, *changes], days["0"].parent / "2.csv"
    before = runs.train(config(days["0"], tmp_path / "0", *wanted)).path
    ends, scores = [], []
    for suffix in ("", "r"):
        runs_of = [before]
        for day in ("1", "2"):
            name = f"{day}{suffix}"
            run = runs.train(config(days[name], tmp_path / f"run-{name}", *wanted, f"from_run={runs_of[-1]}"))
            runs_of.append(run.path)
            assert run.record.parent is not None
            assert (run.record.memory is not None) == (TIERS[0] in changes)
            ends.append((run.record.parent.metrics, values_of(run.path, days[name])))
        loaded = hotrow.load(runs_of[-1])
        scores.append(loaded.predict(raw))
        loaded.close()
    for plain, other in zip(ends[:2], ends[2:], strict=True):
        assert plain[0] == other[0], "scored before it trained"
        assert plain[1] == other[1]
    assert np.array_equal(*scores)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no other file system here")
@pytest.mark.parametrize("day", ["1", "1r"])
def test_a_day_that_shares_no_file_does_not_speak_of_copies(days: dict[str, Path], tmp_path: Path, day: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        less = "memory={dram: 15KiB, writes: in_place, force: true}"
        before = runs.train(config(days["0"], Path(folder) / "0", *OF_IDS, *BIG, less)).path
        if before.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is no other file system here")
        run = runs.train(config(days[day], tmp_path / "run", *OF_IDS, *BIG, *TIERS, f"from_run={before}")).path
    assert ("the first checkpoint copies them" in (run / "log.txt").read_text()) == (day == "1")


def test_another_optimizer_begins_anew(days: dict[str, Path], tmp_path: Path) -> None:
    before = runs.train(config(days["0"], tmp_path / "0", *OF_IDS, *BIG)).path
    ftrl = [*OF_IDS, *BIG, "optimizer.sparse={name: ftrl, l1: 1e-3}", f"from_run={before}"]
    ends = [values_of(runs.train(config(days[name], tmp_path / name, *ftrl)).path, days[name]) for name in ("1", "1r")]
    assert ends[0] == ends[1]


def _train(comm: Communicator, raw: dict[str, Any]) -> None:
    runs.train(make_config(raw), comm=comm, quiet=True)


def test_ranks_move_the_same_rows(days: dict[str, Path], tmp_path: Path) -> None:
    changes = [*OF_IDS, *BIG, *TIERS]
    before = runs.train(config(days["0"], tmp_path / "0", *changes)).path
    wanted = [*changes, f"from_run={before}"]
    alone = runs.train(config(days["1r"], tmp_path / "one", *wanted))
    raw = config(days["1r"], tmp_path / "two", *wanted, "parallel.sharding={user: row, item: replicated}")
    with RankPool(2) as pool:
        pool.run(_train, raw.model_dump(mode="json"), num_ranks=2, micro_batches=2)
    assert newest(RunFolder.open(tmp_path / "two").path) == newest(alone.path)


def test_a_delta_leads_across(days: dict[str, Path], tmp_path: Path) -> None:
    before = runs.train(config(days["0"], tmp_path / "before", *OF_IDS, *BIG)).path
    after = runs.train(config(days["1r"], tmp_path / "after", *OF_IDS, *BIG, f"from_run={before}")).path
    for words in (
        f"export {before} --out {tmp_path}/clicks",
        f"export {after} --since {tmp_path}/clicks --out {tmp_path}/delta",
        f"apply {tmp_path}/clicks {tmp_path}/delta",
        f"export {after} --out {tmp_path}/whole",
    ):
        outcome = mutate.run_command(words.split())
        assert outcome.code == 0, (words, outcome.err)
    assert files_of(tmp_path / "clicks") == files_of(tmp_path / "whole")


# ---- files


@pytest.mark.parametrize("at_once", [7, 100])
def test_pieces_make_no_difference(
    days: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    for module, name in ((rerank, "PLACES_AT_ONCE"), (rerank, "IDS_PER_RANGE"), (extend, "PLACES_AT_ONCE")):
        monkeypatch.setattr(module, name, at_once)
    again = run_prepare("csv", days["0"].parent / "1.csv", tmp_path / "1r", base=days["0"], rerank=True)
    assert again.info.files == PackedDataset.open(days["1r"]).info.files
    for table in TABLES:
        Vocabulary.open(again.vocabulary(table).path)


def test_what_does_not_fit_is_refused(days: dict[str, Path], tmp_path: Path) -> None:
    for base in (None, "none"):
        with pytest.raises(ValueError, match=r"rerank is given without a base, .*: name the day before in base"):
            run_prepare("csv", days["0"].parent / "1.csv", tmp_path / "no", label="click", base=base, rerank=True)
    dataset = PackedDataset.open(days["1r"])
    path, rows = days["1r"] / "rare" / "moved" / "user", np.array(dataset.moved("user"))
    whole = path.read_bytes(), (days["1r"] / "dataset.json").read_bytes()
    for wrong in (rows[:-1], np.where(rows == 5, 6, rows), np.where(rows == 5, 10_000, rows), rows[::-1]):
        write_counts(path, wrong.astype(np.uint32))
        changed = {"num_bytes": path.stat().st_size, "crc32": crc32(path)}
        reseal(
            days["1r"] / "dataset.json",
            lambda fields, changed=changed: fields["files"].update({"rare/moved/user": changed}),
        )
        with pytest.raises(ValueError, match=r"rare/moved/user must name each of the rows 0 to \d+ once, 0 first"):
            PackedDataset.open(days["1r"]).moved("user")
    path.write_bytes(whole[0])
    (days["1r"] / "dataset.json").write_bytes(whole[1])


def test_rows_are_numbered_by_falling_counts_at_random(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)

    def zeros(dtype: str, size: int) -> Any:
        return extend.mapped_zeros(tmp_path, dtype, size)

    for num_rows in (1, 2, 50, 3000):
        counts = rng.integers(0, 9, num_rows).astype(np.uint32)
        ranks = rerank._ranks(counts, zeros)
        order = np.argsort(ranks)
        assert order[0] == 0 and sorted(ranks.tolist()) == [*range(num_rows)]
        for before, after in pairwise(order[1:].tolist()):
            assert (-int(counts[before]), before) < (-int(counts[after]), after)
