"""Checkpoints: whole or absent, exact, readable by the safetensors library, and refused when damaged."""

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hotrow import optim
from hotrow.base.records import write_sealed
from hotrow.embedding import EmbeddingCollection
from hotrow.run.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    read_manifest,
    save_checkpoint,
    verify,
)
from hotrow.run.checkpoint_files import open_tensors, read_tensors, write_held, write_tensors
from hotrow.tables import TableConfig
from loops import looped
from resealed import reseal

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.uint8, torch.bool]


def make_parts(seed: int) -> dict[str, nn.Module | torch.optim.Optimizer]:
    sizes = (("a", 9), ("b", 3))
    tables = [TableConfig(name=n, num_embeddings=r, embedding_dim=4, feature_names=(n,)) for n, r in sizes]
    embedding = EmbeddingCollection(tables, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))
    parts = {"embedding": embedding, "model": model}
    return parts | {"adam": torch.optim.Adam(model.parameters(), lr=0.1), "sparse": optim.Adagrad(embedding, lr=0.1)}


def step(parts: dict[str, nn.Module | torch.optim.Optimizer], seed: int) -> None:
    ids = torch.randint(0, 3, (6, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    from hotrow.batch import KeyedJaggedTensor

    for name in ("adam", "sparse"):
        parts[name].zero_grad()
    parts["model"](parts["embedding"](KeyedJaggedTensor.from_dense(("a", "b"), ids))).square().sum().backward()
    for name in ("adam", "sparse"):
        parts[name].step()


def tensors_of(parts: dict[str, nn.Module | torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    found = {f"e.{k}": v.clone() for k, v in parts["embedding"].weights.items()}
    found |= {f"m.{k}": v.clone() for k, v in parts["model"].state_dict().items()}
    for name in ("adam", "sparse"):
        for index, entries in parts[name].state_dict()["state"].items():
            found |= {f"{name}.{index}.{k}": torch.as_tensor(v).clone() for k, v in entries.items()}
    return found


def test_round_trip_brings_every_tensor_back(tmp_path: Path) -> None:
    parts = make_parts(1)
    for k in range(3):
        step(parts, k)
    path = save_checkpoint(tmp_path / "c" / "step-3", parts, extra={"step": 3})
    saved = tensors_of(parts)
    step(parts, 3)
    after_one_more = tensors_of(parts)

    other = make_parts(2)
    assert load_checkpoint(path, other) == {"step": 3}
    restored = tensors_of(other)
    assert saved.keys() == restored.keys()
    assert all(torch.equal(saved[key], restored[key]) for key in saved)
    step(other, 3)
    continued = tensors_of(other)
    assert all(torch.equal(after_one_more[key], continued[key]) for key in saved)


def test_loading_goes_into_the_memory_that_is_there(tmp_path: Path) -> None:
    parts = make_parts(1)
    save_checkpoint(tmp_path / "step-1", parts)
    other = make_parts(2)
    weights, addresses = other["embedding"].weights, [w.data_ptr() for w in other["embedding"].weights.values()]
    sums = [other["sparse"].state[w]["sum"].data_ptr() for w in weights.values()]
    load_checkpoint(tmp_path / "step-1", other)
    assert [w.data_ptr() for w in weights.values()] == addresses
    assert [other["sparse"].state[w]["sum"].data_ptr() for w in weights.values()] == sums


@looped("dtype", DTYPES)
@looped("shape", [(), (0,), (7,), (13, 5), (2, 0, 3)])
def test_against_the_safetensors_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Some of them in one piece, and some in several."""
    monkeypatch.setattr("hotrow.run.checkpoint_files.CHUNK_BYTES", 40)
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    write_tensors(tmp_path / "f.safetensors", {"odd": torch.arange(3, dtype=torch.uint8), "x": values})
    loaded = load_file(tmp_path / "f.safetensors")
    assert loaded["x"].dtype == dtype
    assert torch.equal(loaded["x"], values)
    back = {"odd": torch.zeros(3, dtype=torch.uint8), "x": torch.ones_like(values)}
    read_tensors(tmp_path / "f.safetensors", back)
    assert torch.equal(back["x"], values)


def test_a_split_table_is_written_as_the_float32_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file has the bytes of a float32 table's, and each is read by the other without loss."""
    monkeypatch.setattr("hotrow.run.checkpoint_files.CHUNK_BYTES", 40)
    monkeypatch.setattr("hotrow.placement.dram.PIECE_BYTES", 48)
    make = {
        dtype: EmbeddingCollection(
            [TableConfig(name="a", num_embeddings=11, embedding_dim=4, feature_names=("a",), dtype=dtype)], seed=seed
        )
        for seed, dtype in enumerate(("float32", "bfloat16", "float16"))
    }
    make["bfloat16"].load_state_dict(make["float32"].state_dict())
    paths = {dtype: save_checkpoint(tmp_path / dtype, {"embedding": emb}) for dtype, emb in make.items()}
    files = {dtype: path / "embedding" / "a" / "000.safetensors" for dtype, path in paths.items()}
    assert files["float32"].read_bytes() == files["bfloat16"].read_bytes()
    assert load_file(files["float16"])["weight"].dtype == torch.float16
    expected = make["float32"].weights["a"].clone()
    for dtype, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        make[dtype].rows("a").write(slice(None), torch.zeros(11, 4))
        load_checkpoint(paths[other], {"embedding": make[dtype]})
        assert torch.equal(make[dtype].float32("a"), expected)
    with pytest.raises(ValueError, match=r"weight is F16 \[11, 4\]; this model has torch.float32"):
        load_checkpoint(paths["float16"], {"embedding": make["bfloat16"]})


def test_nothing_is_pickled_and_files_are_private(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "step-1", make_parts(1))
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".safetensors", ".json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


@looped("name", ["embedding/a/000.safetensors", "model.safetensors", "sparse/a/000.safetensors"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    parts = make_parts(1)
    path = save_checkpoint(tmp_path / "step-1", parts)
    verify(path)
    file = path / name
    whole = file.read_bytes()
    for position in (0, 20, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        before = tensors_of(parts)
        with pytest.raises(ValueError, match=rf"{name} has crc32 .* it is damaged"):
            load_checkpoint(path, parts)
        assert all(torch.equal(before[k], v) for k, v in tensors_of(parts).items()), "nothing is read before a check"


def test_a_manifest_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "step-1", make_parts(1))
    record = {"num_bytes": 1, "crc32": "00000000"}
    reseal(path / "manifest.json", lambda manifest: manifest["files"].update({"../../etc/passwd": record}))
    with pytest.raises(ValueError, match=r"manifest\.json: files: file name in '\.\./\.\./etc/passwd' is '\.\.'"):
        verify(path)


def test_other_manifests(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "step-1", make_parts(1))
    (path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json has no checksum at its end"):
        read_manifest(path)
    write_sealed(path / "manifest.json", {"hotrow_checkpoint": 99})
    with pytest.raises(ValueError, match="hotrow_checkpoint is 99, and this hotrow reads 1; use the hotrow that wrote"):
        read_manifest(path)
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path / "absent")


def test_another_shape_is_refused(tmp_path: Path) -> None:
    parts = make_parts(1)
    path = save_checkpoint(tmp_path / "step-1", parts)
    with pytest.raises(ValueError, match=r"0\.weight is F32 \[5, 8\]; this model has torch\.float32 \[6, 8\]"):
        load_checkpoint(path, {"model": nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 1))})
    with pytest.raises(ValueError, match=r"has no part 'other'; it has embedding, model"):
        load_checkpoint(path, {"other": nn.Linear(1, 1)})


@looped(("another", "options"), [(torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})])
def test_lower_halves_are_not_lost_in_another_optimizer(tmp_path: Path, another: Any, options: dict[str, Any]) -> None:
    """And by the way that the error names, all of them come along."""
    model = nn.Linear(7, 5)
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    saved = {"model": model, "dense_optimizer": optim.SplitSGDBF16(model.parameters(), lr=0.1)}
    save_checkpoint(tmp_path / "c", saved)
    other = nn.Linear(7, 5)
    plain = another(other.parameters(), lr=0.1, **options)
    lost = rf"'dense_optimizer' holds lower halves .* a {another.__name__} would lose; load it into hotrow.SplitSGDBF16"
    with pytest.raises(ValueError, match=lost):
        load_checkpoint(tmp_path / "c", {"model": other, "dense_optimizer": plain})
    assert not plain.state
    split = optim.SplitSGDBF16(other.parameters(), lr=0.1)
    load_checkpoint(tmp_path / "c", {"model": other, "dense_optimizer": split})
    assert all(torch.equal(a, b) for a, b in zip(split.weights(), whole, strict=True))


def test_no_more_is_read_than_what_is_held() -> None:
    written, read = [], []

    class Stored:
        def __getitem__(self, rows: slice) -> torch.Tensor:
            read.append(rows)
            return torch.arange(rows.start, rows.stop)

    class Third:
        """Holds rows that 3 divides."""

        def held(self, rows: slice) -> torch.Tensor:
            return (torch.arange(rows.start, rows.stop) % 3 == 0).nonzero().flatten()

        def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
            written.append((rows.tolist(), values.tolist()))

    for rows in (slice(10, 20), slice(20, 21)):
        write_held(Third(), rows, Stored(), 110 if rows.start == 10 else 120)  # type: ignore[arg-type]
    assert written == [([12, 15, 18], [112, 115, 118])] and read == [slice(112, 119)]


MAPS_NOTHING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""A file of a file system that cannot map files."""


@pytest.mark.skipif(not MAPS_NOTHING.exists(), reason=f"this machine has no {MAPS_NOTHING}")
def test_a_file_system_that_cannot_map_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"enabled cannot be read: its file system cannot map .*copy the run to"):
        open_tensors(MAPS_NOTHING)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty cannot be read: (?!its file system)"):
        open_tensors(tmp_path / "empty")


def test_a_full_disk_and_a_folder_that_is_taken_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "step-1", make_parts(1))
    with pytest.raises(ValueError, match="exists already"):
        save_checkpoint(tmp_path / "step-1", make_parts(1))
    monkeypatch.setattr("hotrow.base.files.disk_free_bytes", lambda path: 10)
    with pytest.raises(ValueError, match=r"step-2 needs 1 MiB more than the disk has free"):
        save_checkpoint(tmp_path / "step-2", make_parts(1))


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for number in (2, 4, 10, 100):
        save_checkpoint(tmp_path / f"step-{number}", {"model": model})
    (tmp_path / "step-5.partial").mkdir()  # left by a killed save
    assert list(list_checkpoints(tmp_path)) == [2, 4, 10, 100]
    prune_checkpoints(tmp_path, keep_last=2, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-100", "step-2"]


def test_an_optimizer_of_other_tables_is_refused(tmp_path: Path) -> None:
    """Tables of equal shapes in another order: nothing but their names tells whose states these are."""

    def make(*names: str) -> optim.Adagrad:
        tables = [TableConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=(n,)) for n in names]
        return optim.Adagrad(EmbeddingCollection(tables), lr=0.1)

    save_checkpoint(tmp_path / "step-1", {"sparse": make("user", "item")})
    other = make("item", "user")
    with pytest.raises(ValueError, match=r"name is 'user', this model's is 'item'; load it into the same model"):
        load_checkpoint(tmp_path / "step-1", {"sparse": other})
    assert [group["name"] for group in other.param_groups] == ["item", "user"]
