"""Law: rows of bf16 and int8 come back as near as their format allows, and an export says what that costs.

The truths are the bits of a float32 cut by hand, torch's own reader of 8-bit rows, and metrics that scikit-learn makes
of the scores of the exported script.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sklearn.metrics import log_loss, roc_auc_score
from test_delta import Pieces
from test_export import SCHEMA, clicks, read_csv, scorer_of, train, write_csv

import hotrow
import mutate
from hotrow.cli import tools
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.data.sources.split import RandomPlan
from hotrow.export.rows import FORMATS, StoredLookups, StoredRows, stored
from hotrow.export.score import looked_up
from loops import looped
from resealed import reseal

finite = st.floats(allow_nan=False, allow_infinity=False, width=32, min_value=-(2.0**100), max_value=2.0**100)


def rows_of(num_rows: int, dim: int, seed: int) -> torch.Tensor:
    """Rows of every size, some all zero, some of one number alone, some far from zero beside how they differ."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_rows, dim)) * 10.0 ** rng.integers(-44, 30, (num_rows, 1))
    rows[::7], rows[1::7] = 0, rng.normal(size=(len(rows[1::7]), 1))
    rows[2::7] += 1000
    return torch.from_numpy(rows.astype(np.float32))


def check_bytes(rows: torch.Tensor) -> None:
    found = stored(rows, "int8")
    assert (found.dtype, found.shape) == (torch.uint8, (len(rows), rows.shape[1] + 8))
    back = looked_up(found).double()
    for row, bytes_, own in zip(rows.double(), found.numpy(), back, strict=True):
        step, least = struct.unpack("<ff", bytes_[-8:].tobytes())
        assert least == row.min() and step >= float(row.max() - row.min()) / 255 * (1 - 1e-6) and step > 0
        rounding = 3 * 2.0**-24 * float(row.abs().max()) + 2.0**-149  # of the product and of the sum
        assert float((own - row).abs().max()) <= step / 2 * (1 + 1e-6) + rounding


@looped("dim", [1, 3, 16, 130])
def test_a_number_comes_back_within_half_a_step(dim: int) -> None:
    rows = rows_of(200, dim, dim)
    check_bytes(rows)
    assert torch.equal(looked_up(stored(rows[::7], "int8")), torch.zeros_like(rows[::7]))


@settings(deadline=None)
@given(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=3))
def test_any_number_comes_back_within_half_a_step(rows: list[list[float]]) -> None:
    check_bytes(torch.tensor(rows))


def test_rows_of_bytes_are_what_torch_reads() -> None:
    """FBGEMM's layout, but for the rounding of a product."""
    rows = rows_of(100, 16, 0)
    found = stored(rows, "int8")
    truth = torch.ops.quantized.embedding_bag_byte_unpack(found)
    assert bool(((looked_up(found) - truth).abs() <= 2.0**-23 * rows.abs().amax(1, keepdim=True)).all())


def test_bf16_is_the_nearest_number_of_16_bits() -> None:
    rows = rows_of(200, 5, 3)
    bits = rows.view(torch.int32).numpy().astype(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    assert np.array_equal(stored(rows, "bf16").view(torch.int16).numpy().view(np.uint16), upper)
    assert torch.equal(looked_up(stored(rows, "bf16")), torch.from_numpy((upper << 16).astype(np.uint32).view("<f4")))
    exact = (rows.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(looked_up(stored(exact, "bf16")), exact), "what was trained in 16 bits stays as it is"


@looped("form", ["bf16", "int8"])
@looped("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_what_cannot_be_stored_is_named(form: Any, value: float) -> None:
    weights = np.ones((12, 3), np.float32)
    weights[7] = value, -value, 0
    rows = StoredRows(Pieces(weights), form, "item")
    with pytest.raises(ValueError, match=f"table 'item', row 7: .* {form} rows; export float32 rows, or train again"):
        [rows.read(piece) for piece in rows.pieces()]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rows.csv, and what was prepared of it: data."""
    folder = tmp_path_factory.mktemp("rows")
    write_csv(folder / "rows.csv", clicks(1500, 0))
    schema = parse_schema(SCHEMA, where="test")
    run_prepare("csv", str(folder / "rows.csv"), folder / "data", schema=schema)
    return folder


@pytest.fixture(scope="module")
def run(logs: Path) -> hotrow.Run:
    return train(logs / "data", logs / "run")


@pytest.mark.slow_but("fp32-bf16", "fp32-int8", "fp16-int8", "split_bf16-bf16")
@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "split_bf16"])
def test_an_export_says_what_its_scores_lose(logs: Path, tmp_path: Path, form: Any, precision: str) -> None:
    """Its metrics are those of its own script's scores of the test rows."""
    run = train(logs / "data", tmp_path / "run", f"train.precision={precision}")
    cost = run.export(tmp_path / "out", rows=form)["row_cost"]
    rows = read_csv(logs / "rows.csv")
    at = np.flatnonzero(RandomPlan(0, (0.8, 0.1, 0.1)).assign(np.arange(1500)) == 2)
    labels = [int(rows["click"][i]) for i in at]  # type: ignore[arg-type]
    columns = {name: [own[i] for i in at] for name, own in rows.items()}
    scores = scorer_of(tmp_path / "out").score(columns).numpy()
    served = hotrow.Scorer(tmp_path / "out").score(columns)
    np.testing.assert_allclose(served, scores, rtol=0, atol=1e-5, err_msg="hotrow's own scorer reads these rows too")
    assert cost["split"] == "test" and cost["num_rows"] == len(at)
    for name, truth in (("auc", roc_auc_score(labels, scores)), ("logloss", log_loss(labels, scores.astype(float)))):
        assert cost["metrics"][name]["export"] == pytest.approx(truth, abs=1e-5)
        assert cost["metrics"][name]["run"] == pytest.approx(run.metrics[name], abs=1e-6)
    is_exact = (form, precision) == ("bf16", "split_bf16")
    assert is_exact == (np.abs(scores - run.predict(str(logs / "rows.csv"))[at]).max() < 1e-6)
    assert json.loads((tmp_path / "out/export.json").read_text())["row_cost"] == cost


def test_the_files_hold_what_they_say(run: hotrow.Run, tmp_path: Path) -> None:
    described = {form: run.export(tmp_path / form, rows=form) for form in FORMATS}
    for form, (dtype, number) in {"bf16": (torch.bfloat16, 2), "int8": (torch.uint8, 1)}.items():
        assert tools.check(tmp_path / form)["ok"]
        for table in described[form]["tables"]:
            (whole,), (found,) = (load_file(tmp_path / each / table["file"]).values() for each in ("float32", form))
            assert table["stored_as"] == form and found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), stored(whole, form).view(torch.uint8))  # type: ignore[arg-type]
            size = described[form]["files"][table["file"]]["num_bytes"]
            assert size == 4096 + len(whole) * (6 + (8 if form == "int8" else 0)) * number


@looped("form", ["bf16", "int8"])
def test_lookups_are_those_of_stored_rows(form: Any) -> None:
    """Sums and means of lists, empty ones among them, and rows as they are."""
    tables = [
        hotrow.TableConfig(name=pooling, num_embeddings=50, embedding_dim=3, feature_names=(pooling,), pooling=pooling)
        for pooling in ("sum", "mean")
    ]
    emb = hotrow.EmbeddingCollection(tables, seed=0)
    lengths = torch.tensor([2, 0, 1, 3, 0, 4])
    ids = torch.randint(50, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    sparse = hotrow.KeyedJaggedTensor(("sum", "mean"), ids, lengths=lengths)
    lookups, pooled = StoredLookups(emb, form), []
    for name, own, count in zip(("sum", "mean"), ids.split([3, 7]), lengths.split(3), strict=True):
        rows = looked_up(stored(emb.state_dict()[f"{name}.weight"], form))[own]
        assert torch.equal(lookups.sequence(sparse)[name][0], rows)
        bags = [each.sum(0) / (max(len(each), 1) if name == "mean" else 1) for each in rows.split(count.tolist())]
        pooled.append(torch.stack(bags))
    torch.testing.assert_close(lookups(sparse), torch.cat(pooled, 1), rtol=1e-6, atol=1e-7)


def test_the_command_prints_and_records_it(run: hotrow.Run, tmp_path: Path) -> None:
    words = ["export", str(run.path), "--out", str(tmp_path / "out"), "--rows", "int8"]
    outcome = mutate.run_command(words)
    assert outcome.code == 0, outcome.err
    cost = json.loads((tmp_path / "out/export.json").read_text())["row_cost"]["metrics"]
    for name in ("auc", "logloss"):
        for own in cost[name].values():
            assert f"{own:.6f}" in next(line for line in outcome.out.splitlines() if line.split()[0] == name)


def test_other_formats_and_those_of_deltas_are_refused(run: hotrow.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows is 'fp8'; it must be one of float32, bf16, int8"):
        run.export(tmp_path / "out", rows="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rows: a delta stores rows as .*base does, .* leave it out"):
        run.export(tmp_path / "out", since=tmp_path / "base", rows="int8")
    assert list(tmp_path.iterdir()) == []


def test_rows_to_judge_by_that_are_gone_are_a_warning(logs: Path, tmp_path: Path) -> None:
    shutil.copytree(logs / "data", tmp_path / "data")
    run = train(tmp_path / "data", tmp_path / "run", "train.max_steps=3")
    shutil.rmtree(tmp_path / "data")
    with pytest.warns(UserWarning, match="what int8 rows cost was not measured: .*none is there$"):
        assert run.export(tmp_path / "out", rows="int8")["row_cost"] is None


@looped("form", ["int4", ["int8"], None, "bf16"])
def test_a_forged_format_is_refused(run: hotrow.Run, tmp_path: Path, form: Any) -> None:
    """By its name, or because the file holds another tensor."""
    run.export(tmp_path / "out", rows="int8")
    everywhere = form == "bf16"
    reseal(
        tmp_path / "out/export.json",
        lambda fields: [table.update(stored_as=form) for table in fields["tables"][: None if everywhere else 1]],
    )
    if everywhere:
        with pytest.raises(ValueError, match=r"safetensors holds torch.uint8 \[.*says torch.bfloat16 .*export the run"):
            scorer_of(tmp_path / "out")
    else:
        with pytest.raises(ValueError, match=r"tables: stored_as is .* must be one of float32, bf16, int8"):
            tools.check(tmp_path / "out")


def test_rows_of_another_size_are_refused(run: hotrow.Run, tmp_path: Path) -> None:
    table = run.export(tmp_path / "out", rows="int8")["tables"][0]
    ((name, tensor),) = load_file(tmp_path / "out" / table["file"]).items()
    save_file({name: tensor[:, :-1].contiguous()}, tmp_path / "out" / table["file"])
    with pytest.raises(ValueError, match=f"{table['file']} is missing, cut off or altered"):
        tools.check(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"{table['file']} holds torch.uint8 .* export the run again"):
        scorer_of(tmp_path / "out")
