"""Law 3 for a run that starts from another run's weights: it begins with that run's bits, wherever rows lie.

The truths are the other run itself, which says what it predicts and goes on by `resume`, and tensors in its checkpoint.
"""

import json
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotrow
from at_step import at_step, raise_at
from expanded import expanded
from hotrow.base.files import crc32
from hotrow.config.load import apply_overrides, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import write_counts
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.parallel.communicator import Communicator
from hotrow.run import runs
from hotrow.run.checkpoint import list_checkpoints, verify
from hotrow.run.folder import RunFolder
from hotrow.run.start import Start
from hotrow.setup.demand import tables_of
from hotrow.setup.setup import check_freeze
from loops import looped
from packed_data import OF_TOY_ROWS, planted
from rank_pool import RankPool, rank_pool
from resealed import reseal

BASE: dict[str, Any] = {
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16, 8]},
    "optimizer": {"dense": {"lr": 0.05}, "sparse": {"lr": 0.05}},
    "train": {"batch_size": 37, "eval_every": None, "log_every": 4, "seed": 5, "threads": 1, "micro_batches": 2},
    "memory": "dram",
}
ADAM = ["optimizer.dense.name=adam", "optimizer.sparse.name=adam"]
TIERS = ["memory={dram: 70KiB, writes: in_place}"]

TABLE_ROWS, GROWN = (50, 20, 3000), (57, 20, 3300)
data = planted(table_rows=TABLE_ROWS)
other = planted(table_rows=TABLE_ROWS, seed=1)
"""Other rows of the same columns and ids."""
grown = planted(table_rows=GROWN, seed=2)
"""Other rows, and ids that `data` does not have."""


def config(data: Path, run: Path, *changes: str) -> Any:
    return make_config(apply_overrides({**BASE, "data": str(data), "run": str(run)}, changes))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`trained(*changes)`: a finished run; one for each set of changes."""
    found: dict[tuple[str, ...], Path] = {}

    def run_of(*changes: str) -> Path:
        if changes not in found:
            found[changes] = runs.train(config(data, tmp_path_factory.mktemp("parent") / "run", *changes)).path
        return found[changes]

    return run_of


Trained = Callable[..., Path]


def newest(run: Path) -> dict[str, bytes]:
    """The bytes of all tensors of the newest checkpoint."""
    checkpoints = list_checkpoints(run / "checkpoints")
    return expanded(checkpoints[max(checkpoints)])


def of_part(tensors: dict[str, bytes], part: str) -> dict[str, bytes]:
    return {name: own for name, own in tensors.items() if name.startswith(part)}


@pytest.mark.slow_but("tiers", "early stopping")
@pytest.mark.parametrize(
    "changes",
    [
        [],
        ADAM,
        ["train.precision=fp16"],
        ["train.precision=split_bf16", "optimizer.sparse.name=sgd"],
        ["train.early_stopping=1", "train.eval_every=3", "optimizer.dense.lr=1.5"],
        TIERS,
    ],
    ids=["row-wise adagrad", "adam", "float16", "split", "early stopping", "tiers"],
)
def test_it_begins_with_its_predictions(trained: Trained, other: Path, tmp_path: Path, changes: list[str]) -> None:
    parent = trained(*changes)
    loaded = hotrow.load(parent)
    expected = loaded.evaluate("train", data=other)
    loaded.close()
    run = runs.train(config(other, tmp_path / "run", *changes, f"from_run={parent}", "train.max_steps=1"))
    found = run.record.parent
    assert found is not None
    assert found.metrics == expected
    assert (found.step, found.states) == (loaded.record.chosen_step, ["dense", "sparse"])
    first = run.measurements()[0]
    assert (first["step"], first["split"], first["auc"]) == (0, "train", expected["auc"])


@pytest.mark.slow_but("from tiers-tiers")
@pytest.mark.parametrize("wanted", [[], TIERS, ["train.seed=9"]], ids=["DRAM", "tiers", "another seed"])
@pytest.mark.parametrize("before", [[], TIERS], ids=["from DRAM", "from tiers"])
def test_frozen_parts_keep_the_other_runs_bits(
    trained: Trained, data: Path, tmp_path: Path, before: list[str], wanted: list[str]
) -> None:
    parent = trained(*before)
    start = newest(parent)
    changes = [*wanted, f"from_run={parent}", "train.max_steps=6"]
    for frozen, kept in {
        "[tables]": ["embedding/t0.", "embedding/t1.", "embedding/t2.", "sparse_optimizer."],
        "[t0, t2]": ["embedding/t0.", "embedding/t2."],
        "[dense, t1]": ["embedding/t1.", "model."],
    }.items():
        run = runs.train(config(data, tmp_path / frozen, *changes, f"train.freeze={frozen}"))
        end = newest(run.path)
        for part in ("embedding/t0.", "embedding/t1.", "embedding/t2.", "sparse_optimizer.", "model."):
            if part in kept:
                assert of_part(end, part) == of_part(start, part), (frozen, part)
            elif part != "sparse_optimizer.":
                assert of_part(end, part) != of_part(start, part), (frozen, part)


@pytest.mark.slow_but("DRAM-adam")
@pytest.mark.parametrize(
    "changes",
    [
        ["optimizer.dense.name=adagrad", "optimizer.sparse.name=adagrad"],
        ADAM,
        ["optimizer.sparse.name=ftrl"],
        ["train.precision=split_bf16"],
    ],
    ids=["adagrad", "adam", "ftrl", "split"],
)
@pytest.mark.parametrize("memory", [[], TIERS], ids=["DRAM", "tiers"])
def test_it_goes_on_as_the_other_run_would(
    trained: Trained, data: Path, tmp_path: Path, changes: list[str], memory: list[str]
) -> None:
    """With constant rates and rows in stored order, a second epoch is the first epoch of a run that starts there."""
    parent = trained(*changes, "train.shuffle=false")
    whole = shutil.copytree(parent, tmp_path / "whole")
    runs.resume(whole, ["train.epochs=2"])
    run = runs.train(config(data, tmp_path / "run", *changes, *memory, "train.shuffle=false", f"from_run={parent}"))
    assert newest(run.path) == newest(whole)


def test_ftrl_starts_from_the_weights_of_another_optimizer(trained: Trained, data: Path, tmp_path: Path) -> None:
    """A step with so small a rate changes hardly anything: without its z, FTRL would forget the rows of the batch."""
    parent = trained()
    ftrl = ["optimizer.sparse={name: ftrl, lr: 1e-4, l1: 1e-3, l2: 0.1}", "train.freeze=[dense]", "train.max_steps=1"]
    run = runs.train(config(data, tmp_path / "run", *ftrl, f"from_run={parent}"))
    assert run.record.parent is not None
    assert run.record.parent.states == ["dense"]
    start, end = (newest(each) for each in (parent, run.path))
    for name in of_part(start, "embedding/"):
        before, after = (torch.frombuffer(bytearray(each[name]), dtype=torch.float32) for each in (start, end))
        torch.testing.assert_close(after, before, rtol=0, atol=2e-4)
        assert not torch.equal(after, before)


def test_each_tenth_of_new_rows_is_scored(trained: Trained, other: Path, tmp_path: Path) -> None:
    import sklearn.metrics  # late: ranks import this file

    parent = trained()
    run = hotrow.load(runs.train(config(other, tmp_path / "run", f"from_run={parent}", "train.max_steps=1")).path)
    loaded = hotrow.load(parent)
    outputs, labels, _ = loaded.judged("train", data=other).rows()
    assert run.record.parent is not None and len(run.record.parent.parts) == 10
    first = 0
    for part in run.record.parent.parts:
        stop = first + int(part["num_rows"] or 0)
        z, y = outputs[first:stop].astype(np.float64), labels[first:stop]
        logloss = sklearn.metrics.log_loss(y, 1 / (1 + np.exp(-z)))
        assert part["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(y, z), abs=1e-12)
        assert part["logloss"] == pytest.approx(logloss, abs=1e-9)
        assert part["ne"] == pytest.approx(logloss / sklearn.metrics.log_loss(y, np.full(len(y), y.mean())))
        first = stop
    assert first == len(labels)
    assert "unknown_ids" not in run.history["kind"], "these rows are not of a day that extends another"
    assert not any("unknown" in part for part in run.record.parent.parts)


@pytest.mark.slow_but("", "ftrl")
@pytest.mark.parametrize(
    "changes",
    [[], ADAM, ["optimizer.sparse={name: ftrl, l1: 1e-3}"], ["optimizer.sparse.initial_accumulator_value=0.001"]],
    ids=["", "adam", "ftrl", "sums"],
)
def test_new_rows_begin_as_row_0(
    trained: Trained, grown: Path, tmp_path: Path, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, found = trained(*changes), dict[str, list[torch.Tensor]]()
    plain = Start.load

    def load(start: Start, parts: Any) -> None:
        plain(start, parts)
        emb, optimizer = parts.embedding, parts.sparse_optimizer
        names = [emb.tables[int(key.partition(".")[0])].name + key.partition(".")[2] for key in optimizer.state_rows()]
        states = dict(zip(names, optimizer.state_rows().values(), strict=True))
        found[str(len(found))] = [
            *(emb.rows(f"t{t}").whole().clone() for t in range(3)),
            *(each.whole().clone() for each in states.values()),
        ]

    monkeypatch.setattr(Start, "load", load)
    ends = []
    for number, memory in enumerate(([], TIERS)):
        run = runs.train(config(grown, tmp_path / str(number), *changes, *memory, f"from_run={parent}"))
        ends.append(newest(run.path))
        assert run.record.parent is not None
        assert run.record.parent.rows_added == {"t0": 7, "t1": 0, "t2": 300}
    assert ends[0] == ends[1]
    assert all(map(torch.equal, *found.values()))
    start = newest(parent)
    for t, (own, num_before) in enumerate(zip(found["0"], TABLE_ROWS, strict=False)):
        before = torch.frombuffer(bytearray(start[f"embedding/t{t}.safetensors:weight"]), dtype=torch.float32)
        assert torch.equal(own[:num_before], before.view(num_before, 8))
        assert (own[num_before:] == own[0]).all()
    if not changes:
        for own, num_before in zip(found["0"][3:], TABLE_ROWS, strict=True):
            assert own[:num_before].any() and not own[num_before:].any()


def test_a_grown_ftrl_row_keeps_its_weight(trained: Trained, grown: Path, tmp_path: Path) -> None:
    """New rows have a z that gives row 0's weight, so that a small step from there is small."""
    ftrl = ["optimizer.sparse={name: ftrl, lr: 1e-4}"]
    parent = trained(*ftrl, "train.epochs=2")
    run = runs.train(config(grown, tmp_path / "run", *ftrl, f"from_run={parent}", "train.max_steps=2"))
    start, end = (
        torch.frombuffer(bytearray(newest(each)["embedding/t0.safetensors:weight"]), dtype=torch.float32).view(-1, 8)
        for each in (parent, run.path)
    )
    torch.testing.assert_close(end[50:], start[:1].expand(7, 8), rtol=0, atol=1e-3)


def bytes_of(folder: Path) -> dict[str, int]:
    """The checksums of all files below a folder, by path."""
    return {str(file.relative_to(folder)): crc32(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def last_of(run: Path) -> Path:
    checkpoints = list_checkpoints(run / "checkpoints")
    return checkpoints[max(checkpoints)]


@pytest.fixture
def parent(trained: Trained, tmp_path: Path) -> Path:
    """A run in tiers of this test's own."""
    return shutil.copytree(trained(*TIERS), tmp_path / "parent")


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("grows", [False, True])
def test_a_start_in_tiers_writes_new_rows_alone(
    parent: Path, other: Path, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, grows: bool
) -> None:
    """And, in a table that grows, rows that nobody looked up: as part of a larger table they would begin smaller."""
    before, found, plain = bytes_of(parent), dict[str, int](), Start.load

    def load(start: Start, parts: Any) -> None:
        plain(start, parts)
        found.update(parts.embedding.placement.counters()["t2"])

    monkeypatch.setattr(Start, "load", load)
    data = grown if grows else other
    run = runs.train(config(data, tmp_path / "run", *TIERS, f"from_run={parent}", "train.max_steps=1")).path
    manifest = json.loads((last_of(parent) / "manifest.json").read_text())
    (num_saved,) = manifest["parts"]["embedding"]["chains"]["t2"]["links"]
    assert found["written_rows"] == (300 + 3000 - num_saved if grows else 0)
    assert found["saved_index_bytes"] > 0
    old, new = last_of(parent), last_of(run)
    for file in ("embedding/t2/000.safetensors", "sparse_optimizer/t2/000.safetensors"):
        assert (old / file).samefile(new / file)
    links = json.loads((new / "manifest.json").read_text())["parts"]["embedding"]["chains"]["t2"]["links"]
    assert 300 * grows < links[-1] <= 300 * grows + 37, "and those of a batch"
    assert bytes_of(parent) == before
    shutil.rmtree(run)
    assert bytes_of(parent) == before


def test_each_run_outlives_the_other(parent: Path, grown: Path, tmp_path: Path) -> None:
    run = runs.train(config(grown, tmp_path / "run", *TIERS, f"from_run={parent}")).path
    own = newest(run)
    shutil.rmtree(parent)
    assert verify(last_of(run)) and newest(run) == own


@pytest.mark.slow_but("removed")
@pytest.mark.parametrize("what", ["removed", "on another file system"])
def test_a_start_in_tiers_does_without_links(
    parent: Path, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The other run's folder goes while the new one trains, or its files can have no second name."""
    whole = newest(runs.train(config(grown, tmp_path / "whole", *TIERS, f"from_run={parent}")).path)
    at_step(monkeypatch, 1, lambda _: shutil.rmtree(parent) if what == "removed" else None)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        if what != "removed":
            parent = shutil.copytree(parent, Path(folder) / "parent")
            if parent.stat().st_dev == tmp_path.stat().st_dev:
                pytest.skip("/dev/shm is no other file system here")
        run = runs.train(config(grown, tmp_path / "run", *TIERS, f"from_run={parent}")).path
    assert newest(run) == whole
    assert ("another file system" in (run / "log.txt").read_text()) == (what != "removed")


OF_IDS = [f"model={json.dumps({'embedding_dim': 8, 'bottom_mlp': [], 'top_mlp': [8]})}"]


@pytest.fixture(scope="module")
def expiring(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three days whose ids drift. On the second rows of expired ids stay free or get new ids, and on the third too."""
    folder, found = tmp_path_factory.mktemp("expiring"), list[Path]()
    ids = [{"column": "user", "type": "int"}, {"column": "item", "type": "text"}]
    tables = {"default": {"min_count": 2, "expire": {"unused_days": 1}}}
    schema = {"label": "click", "categorical": ids, "tables": tables}
    (folder / "schema.yaml").write_text(json.dumps(schema))
    for day, first in enumerate((0, 150, 100)):
        # Each 29th item is a rare one, so that row 0 is trained.
        items = [k % 40 + first // 4 if k % 29 else 1000 * (day + 1) + k for k in range(400)]
        pairs = [(first + k * k % 499 % (200 - 30 * day), item) for k, item in enumerate(items)]
        rows = "".join(f"{(user + item) % 2},{user},i{item}\n" for user, item in pairs)
        (folder / f"{day}.csv").write_text("click,user,item\n" + rows)
        begun = {"base": "none", "schema": folder / "schema.yaml", "fractions": [1, 0, 0]}
        base = {"base": found[-1]} if found else begun
        found.append(run_prepare("csv", folder / f"{day}.csv", folder / f"data-{day}", split="random", **base).path)
    return found


@pytest.mark.slow_but("adam")
@pytest.mark.parametrize(
    "changes", [[], ADAM, ["optimizer.sparse={name: ftrl, l1: 1e-3}"]], ids=["row-wise adagrad", "adam", "ftrl"]
)
def test_rows_of_expired_ids_and_no_others_begin_as_row_0(
    expiring: list[Path], tmp_path: Path, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows to begin anew follow from the vocabularies: those of ids that the day before has not, or elsewhere."""
    found: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    plain = Start.load

    def load(start: Start, parts: Any) -> None:
        plain(start, parts)
        emb, optimizer = parts.embedding, parts.sparse_optimizer
        states = {
            f"{emb.tables[int(number)].name}.{name}": rows.whole().clone()
            for key, rows in optimizer.state_rows().items()
            for number, _, name in [key.partition(".")]
        }
        found.append(({table.name: emb.rows(table.name).whole().clone() for table in emb.tables}, states))

    monkeypatch.setattr(Start, "load", load)
    parent = runs.train(config(expiring[0], tmp_path / "0", *OF_IDS, *changes)).path
    for day in (1, 2):
        found.clear()
        both = [
            runs.train(config(expiring[day], tmp_path / name, *OF_IDS, *changes, *memory, f"from_run={parent}"))
            for name, memory in ((f"{day}-tiers", TIERS), (str(day), []))
        ]
        assert newest(both[0].path) == newest(both[1].path)
        before, now = (PackedDataset.open(expiring[number]) for number in (day - 1, day))
        start, num_reborn = newest(parent), dict[str, int]()
        for table in now.info.table_by_name:
            old_ids, new_ids = (ids_of(each, table) for each in (before, now))
            size = before.info.table_by_name[table].num_embeddings
            reborn = sorted(row for key, row in new_ids.items() if old_ids.get(key) != row and row < size)
            kept = [row for row in range(size) if row not in reborn]
            num_reborn[table] = len(reborn)
            for weights, states in found:
                own = weights[table]
                was = torch.frombuffer(bytearray(start[f"embedding/{table}.safetensors:weight"]), dtype=torch.float32)
                assert torch.equal(own[kept], was.view(size, -1)[kept])
                assert (own[[*reborn, *range(size, len(own))]] == own[0]).all()
                for name in (name for name in states if name.startswith(table)):
                    state = states[name]
                    assert (state[reborn] == state[reborn[0]]).all()
                    assert not state[reborn].any() or name.endswith(".z")
                    assert state[kept].any()
        assert min(num_reborn.values()) > 5
        record = both[1].record.parent
        assert record is not None and record.rows_reborn == num_reborn
        parent = both[1].path
    again = runs.train(config(expiring[2], tmp_path / "again", *OF_IDS, *changes, f"from_run={parent}")).record.parent
    assert again is not None and again.rows_reborn == {}, "the same day once more has no new ids"


@pytest.mark.slow_but("tiers")
@pytest.mark.parametrize("memory", [[], TIERS], ids=["DRAM", "tiers"])
def test_an_interrupted_start_on_rows_of_expired_ids_ends_in_the_same_bits(
    expiring: list[Path], tmp_path: Path, memory: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before its first checkpoint, it begins these rows anew once more; after it, never again."""
    parent = runs.train(config(expiring[0], tmp_path / "parent", *OF_IDS, *memory)).path
    wanted = [*OF_IDS, *memory, f"from_run={parent}", "checkpoint.every=2"]
    whole = runs.train(config(expiring[1], tmp_path / "whole", *wanted))
    for stop in (1, 5):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            raise_at(patch, stop, KeyboardInterrupt)
            runs.train(config(expiring[1], tmp_path / str(stop), *wanted))
        assert newest(runs.resume(tmp_path / str(stop)).path) == newest(whole.path)


def ids_of(dataset: PackedDataset, table: str) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for keys, rows in dataset.vocabulary(table).entries():
        texts = keys.values.tobytes()
        ids = keys.values.tolist() if keys.offsets is None else [texts[a:b] for a, b in pairwise(keys.offsets.tolist())]
        found |= zip(ids, rows.tolist(), strict=True)
    return found


def test_rows_outside_the_table_are_refused(expiring: list[Path], tmp_path: Path) -> None:
    parent = runs.train(config(expiring[0], tmp_path / "parent", *OF_IDS)).path
    for rows in ([0, 3], [3, 3], [3, 10_000]):
        data = shutil.copytree(expiring[1], tmp_path / "data", dirs_exist_ok=True)
        write_counts(path := data / "rare" / "reborn" / "user", np.array(rows, np.uint32))
        size, checksum = path.stat().st_size, crc32(path)
        changed = {"num_bytes": size, "crc32": checksum}
        reseal(
            data / "dataset.json", lambda fields, changed=changed: fields["files"].update({"rare/reborn/user": changed})
        )
        with pytest.raises(ValueError, match=r"rare/reborn/user must name rows 1 to \d+, rising"):
            runs.train(config(data, tmp_path / "run", *OF_IDS, f"from_run={parent}"))


@pytest.mark.slow_but("adam-9")
@pytest.mark.parametrize("stop", [1, 9])
@pytest.mark.parametrize("changes", [ADAM, TIERS], ids=["adam", "tiers"])
def test_an_interrupted_start_ends_in_the_same_bits(
    trained: Trained, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], stop: int
) -> None:
    """Killed before its first checkpoint, it starts from the other run once more; later, from its own checkpoint."""
    parent = trained(*changes)
    wanted = [*changes, f"from_run={parent}", "optimizer.dense.lr=0.01", "train.pos_weight=2"]
    wanted += ["checkpoint.every=4", "train.freeze=[t1]"]
    whole = runs.train(config(grown, tmp_path / "whole", *wanted))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        raise_at(patch, stop, KeyboardInterrupt)
        runs.train(config(grown, tmp_path / "run", *wanted))
    run = runs.resume(tmp_path / "run")
    assert newest(run.path) == newest(whole.path)
    assert run.record.metrics == whole.record.metrics
    assert run.record.parent == whole.record.parent
    evals = [[line for line in each.measurements() if line["kind"] == "eval"] for each in (run, whole)]
    assert evals[0] == evals[1]
    assert set(run.record.warnings) <= {"reference_backend", *OF_TOY_ROWS}


def test_it_needs_the_other_run_only_until_its_first_checkpoint(
    trained: Trained, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = shutil.copytree(trained(), tmp_path / "parent")
    wanted = config(other, tmp_path / "run", f"from_run={parent}", "checkpoint.every=4")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        raise_at(patch, 2, KeyboardInterrupt)
        runs.train(wanted)
    kept = shutil.copytree(parent, tmp_path / "kept")
    runs.resume(parent, ["train.epochs=2"])
    with pytest.raises(ValueError, match="are not those that this run started from"):
        runs.resume(tmp_path / "run")
    shutil.rmtree(parent)
    kept.rename(parent)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        raise_at(patch, 6, KeyboardInterrupt)
        runs.resume(tmp_path / "run")
    shutil.rmtree(parent)
    assert runs.resume(tmp_path / "run").record.status == "finished"


pool = rank_pool(2)


def _train(comm: Communicator, raw: dict[str, Any]) -> None:
    runs.train(make_config(raw), comm=comm, quiet=True)


@pytest.mark.slow_but("tiers, frozen tables")
@pytest.mark.parametrize(
    "changes",
    [ADAM, ["optimizer.sparse.name=ftrl", "train.freeze=[dense]"], [*TIERS, "train.freeze=[tables]"]],
    ids=["adam", "ftrl, frozen layers", "tiers, frozen tables"],
)
def test_ranks_start_with_the_same_bits(
    trained: Trained, grown: Path, tmp_path: Path, pool: RankPool, changes: list[str]
) -> None:
    wanted = [*changes, f"from_run={trained()}"]
    alone = runs.train(config(grown, tmp_path / "one", *wanted))
    sharded = "parallel.sharding={t0: replicated, t1: row, t2: row}"
    raw = config(grown, tmp_path / "two", *wanted, sharded).model_dump(mode="json")
    pool.run(_train, raw, num_ranks=2, micro_batches=2)
    two = RunFolder.open(tmp_path / "two")
    assert newest(two.path) == newest(alone.path)
    assert two.record.metrics == alone.record.metrics
    assert two.record.parent == alone.record.parent


@pytest.mark.slow_but("adam")
@pytest.mark.parametrize(
    ("user", "changes"),
    [
        ("row", ADAM),
        ("row", [*TIERS, "optimizer.sparse.name=ftrl"]),
        ("column", [*TIERS, "optimizer.sparse.name=adagrad"]),
    ],
    ids=["adam", "ftrl in tiers", "columns in tiers"],
)
def test_ranks_begin_the_rows_of_expired_ids_with_the_same_bits(
    expiring: list[Path], tmp_path: Path, pool: RankPool, user: str, changes: list[str]
) -> None:
    parent = runs.train(config(expiring[0], tmp_path / "parent", *OF_IDS, *changes)).path
    wanted = [*OF_IDS, *changes, f"from_run={parent}"]
    alone = runs.train(config(expiring[1], tmp_path / "one", *wanted))
    raw = config(expiring[1], tmp_path / "two", *wanted, f"parallel.sharding={{user: {user}, item: replicated}}")
    pool.run(_train, raw.model_dump(mode="json"), num_ranks=2, micro_batches=2)
    two = RunFolder.open(tmp_path / "two")
    assert newest(two.path) == newest(alone.path)
    assert two.record.parent == alone.record.parent
    assert two.record.parent is not None and min(two.record.parent.rows_reborn.values()) > 5


@looped(
    ("changes", "error"),
    [
        (["from_run=PARENT/nowhere"], r"nowhere is not a run"),
        (["model.name=dcn"], r"model\.name is 'dcn', and .* has 'dlrm': set it to that, or leave out the recipe"),
        (["model.top_mlp=[4]"], r"layers of other sizes; there model\.top_mlp is \[16, 8\]: set it to that"),
        (["model.embedding_dim=16"], r"other sizes; there model\.embedding_dim is 8: set it to that"),
        (["train.precision=fp16"], r"train\.precision is 'fp16', and .* has 'fp32'"),
        (
            ["optimizer.sparse.name=ftrl", "optimizer.schedule.warmup_steps=9"],
            r"optimizer\.schedule\.warmup_steps is 9, but ftrl .*: set it to 0",
        ),
        (["train.freeze=[t9]"], r"train\.freeze names 't9'; it may name dense, tables, t0, t1, t2"),
        (["train.freeze=[dense, t0, t1, t2]"], r"train\.freeze leaves nothing to train"),
        (["train.freeze=[dense, tables]"], r"train\.freeze leaves nothing to train"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    trained: Trained, data: Path, tmp_path: Path, changes: list[str], error: str
) -> None:
    parent = trained()
    raw = {**BASE, "data": str(data), "run": str(tmp_path / "run"), "from_run": str(parent)}
    if "model.name=dcn" in changes:
        raw["model"] = {"embedding_dim": 8}
    with pytest.raises(ValueError, match=error):
        runs.train(make_config(apply_overrides(raw, [each.replace("PARENT", str(parent)) for each in changes])))
    assert not (tmp_path / "run").exists()


def test_rows_beside_the_cpu_are_frozen_together_or_not_at_all(data: Path, tmp_path: Path) -> None:
    dataset, free = PackedDataset.open(data), config(data, tmp_path / "run")
    tables = tables_of(free, dataset)
    for frozen in ("[]", "[tables]", "[t0, t1, t2]", "[dense]"):
        check_freeze(config(data, tmp_path / "run", f"train.freeze={frozen}"), tables, beside=True)
    some = config(data, tmp_path / "run", "train.freeze=[t0]")
    check_freeze(some, tables, beside=False)
    with pytest.raises(ValueError, match=r"train\.freeze leaves t1, t2 to train, .*name tables, .*memory\.hbm: null"):
        check_freeze(some, tables, beside=True)


def test_runs_not_ended_are_refused(
    trained: Trained, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "parent"
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda _: signal.raise_signal(signal.SIGTERM))
        runs.train(config(data, parent))
    with pytest.raises(ValueError, match=r"is interrupted, .*: finish it with hotrow train --resume .*parent"):
        runs.train(config(data, tmp_path / "run", f"from_run={parent}"))
    gone = shutil.copytree(trained(), tmp_path / "gone")
    shutil.rmtree(gone / "checkpoints")
    with pytest.raises(ValueError, match=r"gone has no checkpoint of step \d+, .* restore it"):
        runs.train(config(data, tmp_path / "run", f"from_run={gone}"))


def test_other_columns_and_fewer_rows_are_refused(
    trained: Trained, make_dataset: Callable[..., PackedDataset], tmp_path: Path
) -> None:
    for name, shape, error in (
        ("columns", {"num_dense": 2}, "they differ in d2: prepare it by that run's schema"),
        ("fewer", {"table_rows": (50, 20, 2999)}, "rows of table 't2' stand for other ids"),
    ):
        dataset = make_dataset(tmp_path / name, **{"table_rows": TABLE_ROWS, **shape})
        with pytest.raises(ValueError, match=error):
            runs.train(config(dataset.path, tmp_path / "run", f"from_run={trained()}"))


def test_other_buckets_of_the_same_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("click,price\n" + "0,0.5\n1,1.5\n0,4\n1,9\n" * 40)
    for name, edges in (("first", [1, 2, 5]), ("other", [1, 3, 5])):
        prices = {"dense": ["price"], "categorical": [{"column": "price", "buckets": edges}]}
        schema = parse_schema({"label": "click", "split": {"kind": "random"}, **prices}, where="test")
        run_prepare("csv", str(tmp_path / "rows.csv"), tmp_path / name, schema=schema)
    start = f"from_run={runs.train(config(tmp_path / 'first', tmp_path / 'parent')).path}"
    with pytest.raises(ValueError, match="they differ in price: prepare it by that run's schema"):
        runs.train(config(tmp_path / "other", tmp_path / "run", start))


def test_a_day_fits_its_base_and_other_ids_do_not(tmp_path: Path) -> None:
    for number, ids in enumerate(("abcab", "abdcabd")):
        rows = "click,item\n" + "".join(f"{k % 2},{name}\n" for k, name in enumerate(ids * 20))
        (tmp_path / f"{number}.csv").write_text(rows)
    first, day, other = (tmp_path / name for name in ("first", "day", "other"))
    run_prepare("csv", str(tmp_path / "0.csv"), first, label="click", base="none")
    run_prepare("csv", str(tmp_path / "1.csv"), day, base=str(first))
    run_prepare("csv", str(tmp_path / "1.csv"), other, label="click")
    small = [f"model={json.dumps({'embedding_dim': 4, 'bottom_mlp': [], 'top_mlp': [4]})}"]
    start = f"from_run={runs.train(config(first, tmp_path / 'parent', *small)).path}"
    with pytest.raises(ValueError, match=r"rows of table 'item' stand for other ids .*; prepare the data .*--base"):
        runs.train(config(other, tmp_path / "run", *small, start))
    found = runs.train(config(day, tmp_path / "run", *small, start)).record.parent
    assert found is not None and found.metrics is not None
    assert found.rows_added["item"] == 1
    (line,) = [line for line in RunFolder.open(tmp_path / "run").measurements() if line["kind"] == "unknown_ids"]
    assert line["share"] == line["tables"]["item"] == 40 / 140, "two of seven are d"
    assert "28.6% of the lookups" in (tmp_path / "run" / "log.txt").read_text()


def test_fit_takes_the_other_runs_recipe(trained: Trained, other: Path, tmp_path: Path) -> None:
    run = hotrow.fit(other, run=tmp_path / "run", from_run=str(trained()), max_steps=2)
    assert run.record.steps == 2
    assert run.record.warnings["part_of_rows"]["count"] == 1
    parent = run.record.parent
    assert parent is not None and parent.metrics is not None
    assert re.search(rf"from +step {parent.step} of {re.escape(parent.path)}\n", run.closing_lines("rows", []))
    assert run.summary()["parent"]["metrics"] == parent.metrics
    with pytest.raises(ValueError, match="pass a packed dataset"):
        hotrow.fit({"click": [0, 1] * 50}, label="click", from_run=str(trained()))
