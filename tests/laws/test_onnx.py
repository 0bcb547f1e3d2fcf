"""Law: dense.onnx computes the scores of the export, for every model, in ONNX Runtime, at any batch size.

The truths are the export's own network in torch, and `predict` beside examples/onnx/score.py, which needs neither torch
nor hotrow.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from test_export import SCHEMA, clicks, prepared, scorer_of, train, write_parquet

import hotrow
import mutate
from forked import run_forked
from hotrow.cli import tools
from hotrow.config.load import make_config
from hotrow.export import dense as dense_file
from hotrow.export.dense import DENSE, write_dense
from hotrow.export.export import network_source
from hotrow.export.inputs import load_module
from hotrow.export.rows import FORMATS
from hotrow.models import MODELS

pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install 'hotrow[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime, another reader of ONNX")

SCORE = Path(__file__).resolve().parents[2] / "examples" / "onnx" / "score.py"
FEATURES = {"user": "one_hot", "item": "one_hot", "item_history": "sequence"}
LAYERS = {
    "none": [],
    "platt": [{"slope": 0.7, "intercept": -0.2, "x": [], "y": []}],
    "isotonic": [
        {"slope": 1.0, "intercept": 0.0, "x": [-3.0, -1.0, -0.4, 1.0], "y": [-2.0, -1.0, -1.0, 3.0]},
        {"slope": 1.0, "intercept": -2.3, "x": [], "y": []},
    ],
}


def made(
    folder: Path, name: str, *, num_dense: int, labels: list[str], layers: list[Any], **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The network of a model with random weights, its model.py and weights in `folder`, and what export.json says."""
    spec = make_config({"data": "d", "model": {"name": name, **options}}).model
    info = SimpleNamespace(labels=labels, dense=[None] * num_dense, edges=EDGES)
    generator = torch.Generator().manual_seed(4)
    network = spec.build_for(info, dims=dict.fromkeys(FEATURES, 6), generator=generator)
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    (folder / "model.py").write_text(network_source(name, spec.trained_for))
    save_file(network.state_dict(), folder / "model.safetensors")
    about = {
        "model": {**spec.model_dump(mode="json"), "num_dense": num_dense, "edges": spec.edges_of(info)},
        "labels": labels,
        "calibration": layers,
        "tables": [{"name": "t", "embedding_dim": 6}],
        "features": [{"name": name, "table": "t", "kind": kind} for name, kind in FEATURES.items()],
    }
    return network, about


def inputs_of(network: Any, num_rows: int, num_dense: int) -> tuple[dict[str, np.ndarray], Any]:
    """Random inputs of dense.onnx, and as the network takes them."""
    rng = np.random.default_rng(num_rows)
    dense = rng.normal(size=(num_rows, num_dense)).astype(np.float32)
    feed = {"dense": dense} if num_dense else {}
    if network.lookup == "pooled":
        rows = rng.normal(size=(num_rows, 18)).astype(np.float32)
        return {**feed, "rows": rows}, (torch.from_numpy(dense), torch.from_numpy(rows))
    taken = {}
    for name, kind in FEATURES.items():
        lengths = np.ones(num_rows, np.int64) if kind == "one_hot" else rng.integers(0, 5, num_rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = rng.normal(size=(int(offsets[-1]), 6)).astype(np.float32)
        feed |= {f"{name}.rows": values, f"{name}.offsets": offsets}
        taken[name] = torch.from_numpy(values), torch.from_numpy(offsets)
    return feed, (torch.from_numpy(dense), taken)


EDGES = [[-1.0, -0.25, 0.5], [0.1, 2.0]]
CASES: list[Any] = [
    *((name, 3, ["a"], "none") for name in MODELS),
    *((name, 0, ["a"], "none") for name in ("dlrm", "din")),
    *((name, 2, ["a", "b", "c"], "none") for name in ("dlrm", "mmoe")),
    *(("dcn", 2, ["a"], layers) for layers in ("platt", "isotonic")),
]


@pytest.mark.slow_but("('dlrm', 2, ['a', 'b', 'c'], 'none')", "('dcn', 2, ['a'], 'isotonic')")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_what_the_network_does(case: Any, tmp_path: Path) -> None:
    name, num_dense, labels, layers = case
    options = {"first_order": True} if (name, num_dense) == ("dlrm", 2) else {}  # which takes numbers in pieces too
    network, about = made(tmp_path, name, num_dense=num_dense, labels=labels, layers=LAYERS[layers], **options)
    write_dense(tmp_path / DENSE, about, network=tmp_path / "model.py", weights=tmp_path / "model.safetensors")
    session = onnxruntime.InferenceSession(tmp_path / DENSE)
    definition = load_module(tmp_path / "model.py")
    for num_rows in (1, 2, 19):
        feed, taken = inputs_of(network, num_rows, num_dense)
        assert [*feed] == [each.name for each in session.get_inputs()]
        outputs = network(*taken).detach()
        for layer in LAYERS[layers]:
            outputs = definition.calibrated(outputs, **layer)
        truth = definition.scores(outputs)
        (found,) = session.run(["scores"], feed)
        assert found.shape == truth.shape and (num_rows == 1 or found.std() > 1e-3)
        np.testing.assert_allclose(found, truth.numpy(), rtol=1e-5, atol=1e-5 * float(truth.abs().max()))


@pytest.mark.slow
def test_its_bytes_do_not_depend_on_the_folder_and_name_no_file(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        _, about = made(folder, "dlrm", num_dense=2, labels=["a"], layers=LAYERS["platt"])
        write_dense(folder / DENSE, about, network=folder / "model.py", weights=folder / "model.safetensors")
        found.append((folder / DENSE).read_bytes())
    assert found[0] == found[1]
    assert b".py" not in found[0] and str(tmp_path).encode() not in found[0]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows to train on and to score as Parquet, and a run."""
    folder = tmp_path_factory.mktemp("onnx")
    write_parquet(folder / "old.parquet", clicks(900, 0))
    write_parquet(folder / "new.parquet", clicks(200, 1))
    buckets = [{"column": "price", "buckets": [1, 4.5, 20]}]
    data = prepared(folder, folder / "data", suffix="parquet", categorical=[*SCHEMA["categorical"], *buckets])
    train(data, folder / "run", "train.max_steps=40")
    return folder


SCRIPT = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ALONE = f"""
import sys
for name in ["hotrow", "torch", *sys.modules]:
    if name.partition(".")[0] in ("hotrow", "torch"):
        sys.modules[name] = None  # importing it is an error
{SCRIPT}"""


def alone(export: Path, rows: Path) -> list[float]:
    """The scores that examples/onnx/score.py prints where neither hotrow nor torch is."""
    scores, said = printed(SCORE, export, rows, program=ALONE)
    assert scores, said
    return scores


def printed(*words: object, program: str = SCRIPT) -> tuple[list[float], str]:
    """The scores that a script prints, and what it says."""
    done = run_forked(program, *words)
    return [float(line) for line in done.stdout.split()], done.stderr


@pytest.mark.slow_but("float32")
@pytest.mark.parametrize("form", FORMATS)
def test_numpy_and_onnxruntime_score_as_predict_does(logs: Path, tmp_path: Path, form: str) -> None:
    """At the command line, for all rows, and with rows of every format as score.py of the export does."""
    truth, out = hotrow.load(logs / "run").predict(str(logs / "new.parquet")), tmp_path / "out"
    assert truth.std() > 0.02
    outcome = mutate.run_command(["export", str(logs / "run"), "--out", str(out), "--onnx", "--rows", form])
    assert outcome.code == 0 and "torch" not in outcome.err, outcome.err
    assert tools.check(out)["ok"]
    if form != "float32":
        truth = scorer_of(out).score(pq.read_table(logs / "new.parquet").to_pydict()).numpy()
    np.testing.assert_allclose(alone(out, logs / "new.parquet"), truth, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_delta_of_an_export_with_it_has_it(logs: Path, tmp_path: Path) -> None:
    run = hotrow.load(logs / "run")
    first, last = (f(int(path.name[5:]) for path in run.folder.checkpoints.iterdir()) for f in (min, max))
    run.export(tmp_path / "base", step=first, onnx=True)
    run.export(tmp_path / "whole", step=last, onnx=True)
    run.export(tmp_path / "delta", step=last, since=tmp_path / "base")
    hotrow.apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    for path in (tmp_path / "whole").rglob("*.*"):
        if path.suffix == ".pyc":  # Python keeps what it has compiled of model.py
            continue
        assert path.read_bytes() == (tmp_path / "next" / path.relative_to(tmp_path / "whole")).read_bytes(), path
    assert (tmp_path / "delta/files" / DENSE).exists()
    with pytest.raises(ValueError, match=r"onnx: a delta .* has its files: leave it out"):
        run.export(tmp_path / "delta-2", since=tmp_path / "base", onnx=True)


def test_the_default_model_scores_text_with_statistics(tmp_path: Path) -> None:
    """By the example and by score.py, from CSV and JSON; what cannot be read is said in a line."""
    frame, out = pl.DataFrame(clicks(400, 0), strict=False), tmp_path / "out"
    frame.write_csv(tmp_path / "rows.csv", separator=";")
    frame.write_ndjson(tmp_path / "rows.jsonl")
    run = hotrow.fit(tmp_path / "rows.csv", label="click", run=tmp_path / "run", quiet=True, choice=False, epochs=1)
    run.export(out, onnx=True)
    assert json.loads((out / "export.json").read_text())["statistics"]
    truth = run.predict(tmp_path / "rows.csv")
    for name in ("rows.csv", "rows.jsonl"):
        np.testing.assert_allclose(alone(out, tmp_path / name), truth, rtol=0, atol=1e-5)
        np.testing.assert_allclose(printed(out / "score.py", tmp_path / name)[0], truth, rtol=0, atol=2e-5)
    frame.drop("item").write_csv(tmp_path / "less.csv")
    for script in ([SCORE, out], [out / "score.py"]):
        scores, said = printed(*script, tmp_path / "less.csv")
        assert not scores and "column 'item' is missing" in said and "Traceback" not in said


def test_an_operation_that_onnx_does_not_have_is_said(tmp_path: Path) -> None:
    _, about = made(tmp_path, "dcn", num_dense=2, labels=["a"], layers=[])
    network = tmp_path / "model.py"
    network.write_text(network.read_text().replace("torch.relu(x)", "torch.special.bessel_j0(x)"))
    with pytest.raises(ValueError, match=r"model dcn cannot be written as ONNX: .*bessel.*; export it without --onnx"):
        write_dense(tmp_path / DENSE, about, network=network, weights=tmp_path / "model.safetensors")
    assert not (tmp_path / DENSE).exists()


def test_packages_that_are_missing_are_named(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_file, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ONNX needs onnx and onnxscript: pip install 'hotrow\[onnx\]'"):
        hotrow.load(logs / "run").export(tmp_path / "out", onnx=True)
    assert list(tmp_path.iterdir()) == []
