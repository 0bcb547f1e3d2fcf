"""Laws 2 and 3 for checkpoints of tables in tiers: they cost the rows that changed, and say what whole tables would.

The truth is a collection whose rows all lie in DRAM, trained on the same batches: its checkpoint, expanded by readers
that share no code with ours (tests/expanded.py).
"""

import errno
import json
import os
import resource
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_tiers import OPTIMIZERS, ROWS, budgets, make_batch, record_bytes, tables

import hotrow
from expanded import expanded
from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import RowWiseAdagrad
from hotrow.placement import tiers
from hotrow.placement.base import InitialRows
from hotrow.placement.stores import StoreError
from hotrow.run import checkpoint_rows
from hotrow.run.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint, verify
from hotrow.tables import TableConfig
from loops import looped
from resealed import reseal

RECORD = 8 * 4
"""Bytes of weights in a row of `t`, below."""


class Model:
    """A collection and its optimizer."""

    def __init__(self, emb: EmbeddingCollection, optimizer: str) -> None:
        self.emb, self.optimizer = emb, OPTIMIZERS[optimizer](emb)

    @property
    def parts(self) -> dict[str, Any]:
        return {"embedding": self.emb, "sparse": self.optimizer}

    def train(self, seed: int, *, num_batches: int = 6) -> None:
        """Skewed batches, several announced ahead; the loop is left with some still in flight."""
        rng = np.random.default_rng(seed)
        batches = [make_batch(rng, ROWS, wide=False) for _ in range(num_batches + 3)]
        for number, batch in enumerate(hotrow.lookahead(batches, self.emb, depth=3)):
            self.step(batch)
            if number == num_batches - 1:
                break

    def step(self, batch: KeyedJaggedTensor) -> None:
        self.emb(batch).square().sum().backward()
        self.optimizer.step()


def make(folder: Path | None, optimizer: str, dtype: str = "float32", *, seed: int = 3, **options: Any) -> Model:
    """Tables of test_tiers.py; folder: None for all in DRAM."""
    if folder is None:
        return Model(EmbeddingCollection(tables(dtype), seed=seed), optimizer)
    slots, kind = options.pop("slots", 120), options.pop("kind", "ssd")
    dram, _ = budgets(record_bytes(dtype, optimizer), slots, 0, gathered=False)
    memory = hotrow.Memory(dram=dram, **{kind: folder}, **options)
    return Model(EmbeddingCollection(tables(dtype), memory=memory, seed=seed), optimizer)


QUICK = [*((name, "float32") for name in OPTIMIZERS), ("adam", "float16"), ("sgd", "bfloat16")]


@pytest.mark.slow_but("sgd-bfloat16", "adam-float32")
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        for dtype in ("float32", "float16", "bfloat16")
    ],
)
def test_saved_pruned_and_resumed_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, dtype: str
) -> None:
    """On other placements too, from the newest or an older one, over chains that grow and begin anew."""
    monkeypatch.setattr(checkpoint_rows, "MAX_LINKS", 4)
    rng = np.random.default_rng(zlib.crc32(f"{optimizer} {dtype}".encode()))
    plain, tiered = (make(where, optimizer, dtype) for where in (None, tmp_path / "rows"))
    here, truths, kept, lengths = tmp_path / "checkpoints", {}, None, set()
    for step in range(1, 22):
        num_batches = int(rng.integers(0, 4))
        for model in (plain, tiered):
            model.train(step, num_batches=num_batches)
        path = save_checkpoint(here / f"step-{step}", tiered.parts)
        truths[step] = expanded(save_checkpoint(tmp_path / "plain" / f"step-{step}", plain.parts))
        assert expanded(path) == truths[step], f"step {step}"
        lengths |= {len(chain["links"]) for chain in chains(path).values()}
        kept = step if kept is None or rng.random() < 0.3 else kept
        prune_checkpoints(here, keep_last=2, keep=kept)
        if rng.random() < 0.35:
            start = step if rng.random() < 0.7 else kept
            load_checkpoint(tmp_path / "plain" / f"step-{start}", plain.parts)
            if rng.random() < 0.7:  # a new process, elsewhere
                where = None if rng.random() < 0.2 else tmp_path / f"rows-{step}"
                options = {"kind": rng.choice(["ssd", "file"])} if where else {}
                seed = int(rng.integers(3, 5))
                tiered = make(where, optimizer, dtype, seed=seed, slots=int(rng.integers(100, 500)), **options)
            load_checkpoint(here / f"step-{start}", tiered.parts)
    for path in here.iterdir():
        verify(path)
        assert expanded(path) == truths[int(path.name.removeprefix("step-"))], f"{path.name} changed after it was saved"
    assert {1, 2, 3} <= lengths and max(lengths) <= 4, "chains did not grow"


@pytest.fixture
def big(tmp_path: Path) -> Model:
    """A million rows, most of them on disk."""
    return make_big(tmp_path / "rows")


def make_big(folder: Path) -> Model:
    table = TableConfig(name="t", num_embeddings=1_000_000, embedding_dim=8, feature_names=("a",))
    emb = EmbeddingCollection([table], memory=hotrow.Memory(dram="1MiB", ssd=folder), seed=3)
    model = Model.__new__(Model)
    model.emb, model.optimizer = emb, RowWiseAdagrad(emb, lr=0.1)
    return model


def touch(model: Model, rows: torch.Tensor) -> None:
    for some in rows.split(4000):
        model.step(KeyedJaggedTensor.from_dense(("a",), some[:, None]))


def chains(path: Path) -> dict[str, Any]:
    """By stem."""
    parts = json.loads((path / "manifest.json").read_text())["parts"]
    return {f"{part}/{t}": chain for part, rest in parts.items() for t, chain in (rest["chains"] or {}).items()}


def files(path: Path) -> dict[str, os.stat_result]:
    return {str(file.relative_to(path)): file.stat() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_save_costs_the_rows_that_changed(big: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(0))
    touch(big, order[:20_000])
    asked: list[int] = []
    monkeypatch.setattr("hotrow.run.checkpoint.check_room", lambda path, num_bytes, **words: asked.append(num_bytes))
    first = save_checkpoint(tmp_path / "step-1", big.parts)
    touch(big, order[19_500:20_500])  # half of them for the first time
    second = save_checkpoint(tmp_path / "step-2", big.parts)
    third = save_checkpoint(tmp_path / "step-3", big.parts)

    header = 400
    assert files(first)["embedding/t/000.safetensors"].st_size < 20_000 * (8 + RECORD) + header
    assert files(second)["embedding/t/001.safetensors"].st_size < 1_000 * (8 + RECORD) + header
    assert files(second)["sparse/t/001.safetensors"].st_size < 1_000 * (8 + 4) + header
    assert asked == [20_000 * (8 + RECORD + 8 + 4), 1_000 * (8 + RECORD + 8 + 4), 0]
    assert chains(third)["embedding/t"]["links"] == [20_000, 1_000] == chains(second)["sparse/t"]["links"]
    inodes = [{name: stat.st_ino for name, stat in files(path).items()} for path in (first, second, third)]
    assert inodes[0]["embedding/t/000.safetensors"] == inodes[2]["embedding/t/000.safetensors"]
    assert inodes[1]["sparse/t/001.safetensors"] == inodes[2]["sparse/t/001.safetensors"]
    assert max(stat.st_size for stat in files(third).values()) < 1_000_000, "something is as large as the table"
    rows = load_file(second / "embedding" / "t" / "001.safetensors")["rows"]
    assert rows.tolist() == sorted(order[19_500:20_500].tolist())

    shutil.rmtree(first)
    shutil.rmtree(second)
    verify(third)
    loaded = EmbeddingCollection(big.emb.tables, seed=9)
    load_checkpoint(third, {"embedding": loaded})
    untouched = EmbeddingCollection(big.emb.tables, seed=3)
    differs = (loaded.weights["t"] != untouched.weights["t"]).any(dim=1)
    assert set(differs.nonzero().flatten().tolist()) == set(order[:20_500].tolist())
    assert torch.equal(loaded.weights["t"], big.emb.read_rows("t", slice(0, 1_000_000)))


def test_what_is_written_is_at_most_twice_what_changed(big: Model, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    changed = written = 0
    for step in range(40):
        rows = (torch.rand(500, generator=generator) ** 3 * 5_000).long().unique()
        touch(big, rows)
        path = save_checkpoint(tmp_path / f"step-{step}", big.parts)
        links = chains(path)["embedding/t"]["links"]
        changed, written = changed + len(rows), written + links[-1]
        assert sum(links) <= 2 * big.emb.placement.num_changed("t", ever=True)
        prune_checkpoints(tmp_path, keep_last=1)
    assert changed < written <= 2 * changed


def test_a_resumed_process_goes_on_with_the_chain(tmp_path: Path) -> None:
    before, after = (make(tmp_path / name, "adam") for name in ("one", "other"))
    before.train(1, num_batches=30)
    path = save_checkpoint(tmp_path / "step-1", before.parts)
    load_checkpoint(path, after.parts)
    after.train(2, num_batches=1)
    later = save_checkpoint(tmp_path / "step-2", after.parts)
    assert all(
        len(chain["links"]) == 2 and chain["links"][1] < 60 for chain in chains(later).values() if chain["num_rows"] > 5
    )


@looped("where", [None, "others"])
@looped("seed", [3, 8])
@looped("optimizer", ["row_wise_adagrad", "ftrl"])
def test_rows_in_no_link_become_what_they_were(tmp_path: Path, where: str | None, seed: int, optimizer: str) -> None:
    """Also those that were written to since, and where this collection made them from another seed."""
    model, plain = make(tmp_path / "rows", optimizer), make(None, optimizer)
    for each in (model, plain):
        each.train(1, num_batches=2)
    path = save_checkpoint(tmp_path / "step-1", model.parts)
    moved_on = make(where and tmp_path / where, optimizer, seed=seed)
    moved_on.train(2, num_batches=20)
    copy = shutil.copytree(path, tmp_path / "copy")
    load_checkpoint(copy, moved_on.parts)
    shutil.rmtree(copy)  # so that all is written again
    truth = expanded(save_checkpoint(tmp_path / "plain", plain.parts))
    assert expanded(save_checkpoint(tmp_path / "again", moved_on.parts)) == truth == expanded(path)


def test_a_load_makes_rows_in_no_link_alone(big: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed makes all rows others; those in links are written once, by their links."""
    held = [torch.randperm(1_000_000, generator=torch.Generator().manual_seed(7))[:2_000], torch.arange(8_190, 8_195)]
    for number, rows in enumerate(held):
        touch(big, rows)
        path = save_checkpoint(tmp_path / f"step-{number}", big.parts)
    made, read = torch.zeros(1_000_000, dtype=torch.int64), InitialRows.read

    def counted(own: InitialRows, name: str, rows: Any, shape: torch.Size) -> torch.Tensor:
        made[rows] += 1
        return read(own, name, rows, shape)

    monkeypatch.setattr(InitialRows, "read", counted)
    load_checkpoint(path, {"embedding": EmbeddingCollection(big.emb.tables, seed=9)})
    assert made.max() == 1
    assert set((made == 0).nonzero().flatten().tolist()) == set(torch.cat(held).tolist())


@looped("name", ["embedding", "sparse"])
def test_a_part_loaded_alone_leaves_the_other_as_it_is(tmp_path: Path, name: str) -> None:
    model, plain = make(tmp_path / "rows", "adagrad"), make(None, "adagrad")
    for number, each in enumerate((model, plain)):
        each.train(1, num_batches=20)
        path = save_checkpoint(tmp_path / f"step-1-{number}", each.parts)
        each.train(2)
        load_checkpoint(path, {name: each.parts[name]})
    path = save_checkpoint(tmp_path / "step-2", model.parts)
    assert expanded(path) == expanded(save_checkpoint(tmp_path / "plain", plain.parts))


def test_a_table_begins_without_a_copy_of_it(big: Model, tmp_path: Path) -> None:
    """Of 65,536 neighbours all, many, few or none are in a file, and some in two; they stay right as rows change."""
    few = [torch.arange(131_072, 196_608, 400), torch.arange(800_000, 800_003), torch.tensor([999_999])]
    touch(big, torch.cat([torch.arange(65_536), torch.arange(65_536, 131_072, 2), *few]))
    save_checkpoint(tmp_path / "step-1", big.parts)
    touch(big, torch.arange(60_000, 70_000, 3))
    path = save_checkpoint(tmp_path / "step-2", big.parts)
    model = make_big(tmp_path / "others")
    load_checkpoint(path, model.parts)
    counts = model.emb.placement.counters()["t"]
    assert counts["written_bytes"] == 0
    assert counts["saved_index_bytes"] < 1_000_000 / 8 + 25_000
    order = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(2))[:5_000]
    assert torch.equal(model.emb.rows("t").read(order), big.emb.rows("t").read(order))
    for each in (big, model):
        touch(each, torch.arange(50_000, 80_000, 7))
    ends = [expanded(save_checkpoint(tmp_path / f"end-{n}", each.parts)) for n, each in enumerate((big, model))]
    assert ends[0] == ends[1]
    assert model.emb.placement.counters()["t"]["saved_rows"] > 3_000
    shutil.rmtree(tmp_path / "end-1")
    shutil.rmtree(path)  # so that all is written again, from files that have no name any more
    assert expanded(save_checkpoint(tmp_path / "again", model.parts)) == ends[0]


@pytest.mark.parametrize("few", ["by the process", "by the system"])
def test_files_beyond_the_limit_are_copied(
    big: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: str
) -> None:
    for k in range(8):
        touch(big, torch.arange(100 * k, 100 * k + 100))
        path = save_checkpoint(tmp_path / f"step-{k}", big.parts)
    model = make_big(tmp_path / "others")
    assert len(chains(path)["embedding/t"]["links"]) == 8
    if few == "by the process":
        monkeypatch.setattr(tiers, "MAX_SAVED_FILES", 1)
    else:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    load_checkpoint(path, model.parts)
    assert torch.equal(model.emb.rows("t").whole(), big.emb.rows("t").whole())
    assert model.emb.placement.counters()["t"]["saved_rows"] == 0


@looped("named", [0, 40, 1000])
def test_rows_that_a_longer_table_adds_are_saved_as_they_are(tmp_path: Path, named: int) -> None:
    """A row begins smaller in a longer table, which the chain that goes on does not know of rows in no link."""

    def made(name: str, num_rows: int) -> tuple[EmbeddingCollection, dict[str, Any]]:
        table = TableConfig(name="t", num_embeddings=num_rows, embedding_dim=8, feature_names=("a",))
        emb = EmbeddingCollection([table], memory=hotrow.Memory(dram="20KiB", ssd=tmp_path / name, force=True))
        return emb, {"embedding": emb, "sparse": RowWiseAdagrad(emb, lr=0.1)}

    def train(parts: dict[str, Any], ids: torch.Tensor) -> None:
        parts["embedding"](KeyedJaggedTensor.from_dense(["a"], ids[:, None])).square().sum().backward()
        parts["sparse"].step()

    _, parts = made("first", 3000)
    train(parts, torch.arange(2000))
    first = save_checkpoint(tmp_path / "step-1", parts)
    longer, parts = made("longer", 4000)
    load_checkpoint(first, parts, anew=True)
    train(parts, torch.arange(4000 - named, 4000) if named else torch.arange(1500))
    second = save_checkpoint(tmp_path / "step-2", parts)
    again, parts = made("again", 4000)
    load_checkpoint(second, parts)
    assert torch.equal(again.rows("t").whole(), longer.rows("t").whole())
    assert len(chains(second)["embedding/t"]["links"]) == (2 if named == 1000 else 1)


def test_a_file_that_is_cut_under_a_table_is_named(big: Model, tmp_path: Path) -> None:
    touch(big, torch.arange(20_000))
    path = save_checkpoint(tmp_path / "step-1", big.parts)
    model = make_big(tmp_path / "others")
    load_checkpoint(path, model.parts)
    os.truncate(path / "embedding" / "t" / "000.safetensors", 300_000)
    cure = r"000\.safetensors: the file ends before .*; restore that checkpoint, then resume"
    with pytest.raises(StoreError, match=rf"reading row 19000 of table 't' in .*{cure}"):
        model.emb.rows("t").read(torch.tensor([19_000]))


def saved_once(folder: Path) -> tuple[Model, Model]:
    """A model in tiers, its checkpoint `step-1`, trained on since; and its twin in DRAM, which was not saved."""
    model, plain = make(folder / "rows", "adagrad"), make(None, "adagrad")
    for each in (model, plain):
        each.train(1, num_batches=20)
    save_checkpoint(folder / "step-1", model.parts)
    for each in (model, plain):
        each.train(2)
    return model, plain


def test_a_failed_save_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = saved_once(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for what in (
        "hotrow.run.checkpoint.write_tensors",
        "hotrow.run.checkpoint.link_or_copy",
        "hotrow.base.records.write_sealed",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(what, full)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(tmp_path / "step-2", model.parts)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "rows") == ["step-1"]
    path = save_checkpoint(tmp_path / "step-3", model.parts)
    assert expanded(path) == expanded(save_checkpoint(tmp_path / "plain", plain.parts))


def test_a_checkpoint_of_a_part_is_whole_and_ends_no_chain(tmp_path: Path) -> None:
    model, plain = saved_once(tmp_path)
    for name in ("embedding", "sparse"):
        paths = [
            save_checkpoint(tmp_path / f"{name}-{n}", {name: each.parts[name]}) for n, each in enumerate((model, plain))
        ]
        assert expanded(paths[0]) == expanded(paths[1])
    path = save_checkpoint(tmp_path / "step-2", model.parts)
    assert expanded(path) == expanded(save_checkpoint(tmp_path / "plain", plain.parts))
    assert [len(chains(path)[f"{part}/u"]["links"]) for part in ("embedding", "sparse")] == [2, 2]
    other = {"e": model.emb, "sparse": model.optimizer}  # other names: nothing to go on from
    assert len(chains(save_checkpoint(tmp_path / "step-3", other))["e/t"]["links"]) == 1


@looped("what", ["removed", "moved", "file removed", "cut", "another"])
def test_where_the_checkpoint_before_is_gone_a_chain_begins_anew(tmp_path: Path, what: str) -> None:
    model, plain = make(tmp_path / "rows", "adagrad"), make(None, "adagrad")
    for each in (model, plain):
        each.train(1)
    before = save_checkpoint(tmp_path / "step-1", model.parts)
    for each in (model, plain):
        each.train(2)
    if what == "removed":
        shutil.rmtree(before)
    if what == "moved":
        before.rename(tmp_path / "elsewhere")
    if what == "file removed":
        (before / "embedding" / "t" / "000.safetensors").unlink()
    if what == "cut":
        os.truncate(before / "embedding" / "t" / "000.safetensors", 100)
    if what == "another":
        shutil.rmtree(before)
        other = make(tmp_path / "others", "adagrad", seed=8)
        other.train(7)
        save_checkpoint(before, other.parts)
    path = save_checkpoint(tmp_path / "step-2", model.parts)
    verify(path)
    assert all(len(chain["links"]) == 1 for chain in chains(path).values())
    assert expanded(path) == expanded(save_checkpoint(tmp_path / "plain", plain.parts))


def test_files_are_copied_where_they_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    model = make(tmp_path / "rows", "adagrad")
    model.train(1, num_batches=20)
    one = save_checkpoint(tmp_path / "step-1", model.parts)
    model.train(2, num_batches=1)
    two = save_checkpoint(tmp_path / "step-2", model.parts)
    name = "embedding/t/000.safetensors"
    assert files(one)[name].st_ino != files(two)[name].st_ino
    assert oct(files(two)[name].st_mode) == oct(files(one)[name].st_mode) == "0o100600"
    assert (one / name).read_bytes() == (two / name).read_bytes()
    verify(two)


def damaged(tmp_path: Path) -> tuple[Model, Path]:
    model = make(tmp_path / "rows", "adagrad")
    model.train(1, num_batches=30)
    save_checkpoint(tmp_path / "step-1", model.parts)
    model.train(2, num_batches=1)
    path = save_checkpoint(tmp_path / "step-2", model.parts)
    return model, path


@looped("name", ["embedding/u/000.safetensors", "embedding/u/001.safetensors", "sparse/t/000.safetensors"])
def test_a_damaged_link_is_named(tmp_path: Path, name: str) -> None:
    model, path = damaged(tmp_path)
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{name} has crc32 .* it is damaged"):
        load_checkpoint(path, model.parts)
    (path / name).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{name} has {len(whole) - 1} bytes, not {len(whole)}"):
        load_checkpoint(path, model.parts)
    (path / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        load_checkpoint(path, model.parts)


@looped("rows", [[5, 4, 3], [1, 1, 2], [-1, 0, 1], [1, 2, 700]])
def test_rows_that_do_not_rise_are_refused_before_anything_changes(tmp_path: Path, rows: list[int]) -> None:
    model, path = damaged(tmp_path)
    file = path / "embedding" / "u" / "001.safetensors"
    file.unlink()
    save_file({"rows": torch.tensor(rows), "weight": torch.zeros(3, 19)}, file)

    def change(manifest: dict[str, Any]) -> None:
        record = {"num_bytes": file.stat().st_size, "crc32": f"{zlib.crc32(file.read_bytes()):08x}"}
        manifest["files"]["embedding/u/001.safetensors"] = record
        manifest["parts"]["embedding"]["chains"]["u"]["links"][1] = 3

    reseal(path / "manifest.json", change)
    before = model.emb.read_rows("u", slice(0, 700))
    with pytest.raises(ValueError, match=r"u/001\.safetensors: its rows do not rise within the table's 700"):
        load_checkpoint(path, {"embedding": model.emb})
    assert torch.equal(model.emb.read_rows("u", slice(0, 700)), before)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, path = damaged(tmp_path)
    with pytest.raises(ValueError, match=r"weight is F32 .*; this model has torch\.float16"):
        load_checkpoint(path, {"embedding": make(None, "adagrad", "float16").emb})
    with pytest.raises(ValueError, match=r"parts\.sparse\.param_groups\.0\..* this optimizer has no such option"):
        load_checkpoint(path, {"sparse": make(None, "adam").optimizer})
    for where in (None, tmp_path / "without states"):
        with pytest.raises(ValueError, match=r"parts\.sparse\.param_groups\.0\..* this optimizer has no such option"):
            load_checkpoint(path, make(where, "sgd").parts)
    with pytest.raises(ValueError, match=r"part 'embedding' holds embedding tables; this is a Linear"):
        load_checkpoint(path, {"embedding": torch.nn.Linear(1, 1)})
    smaller = [TableConfig(name="t", num_embeddings=300, embedding_dim=8, feature_names=("a",))]
    with pytest.raises(ValueError, match=r"embedding/t: weight has 400 rows; this model's has 300"):
        load_checkpoint(path, {"embedding": EmbeddingCollection(smaller)})
    other = [TableConfig(name="w", num_embeddings=300, embedding_dim=8, feature_names=("a",))]
    with pytest.raises(ValueError, match=r"has no table 'w' in its part 'embedding'"):
        load_checkpoint(path, {"embedding": EmbeddingCollection(other)})
    reseal(path / "manifest.json", lambda manifest: manifest["files"].pop("embedding/u/001.safetensors"))
    with pytest.raises(ValueError, match=r"does not list embedding/u/001\.safetensors, a link of its chain"):
        load_checkpoint(path, model.parts)
