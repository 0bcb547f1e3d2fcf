"""Law: what a column adds to a row is the model's output less that without the column, from a run as from its export.

test_serve.py compares the two for every model.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from test_scores import NUM_ROWS, NUM_SCORED, OPTIONS, clicks, scored_rows, tbsm
from test_tbsm_law import prepared
from typer.testing import CliRunner

import hotrow
from hotrow.cli.app import app
from hotrow.run import runs
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.explain import Explanation

SCHEMA: dict[str, Any] = {
    "label": "click",
    "time": {"column": "day"},
    "dense": ["price", "unused"],
    "categorical": ["user", "colour", {"column": "tags", "kind": "multi_hot", "separator": " "}],
    "split": {"kind": "time", "fractions": [0.6, 0.1, 0.3]},
}
KEEP = {"checkpoint.every": 40, "checkpoint.keep_last": 3}
MODEL = {"model.first_order": True, "calibration.method": "platt"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    path = tmp_path_factory.mktemp("explain") / "run"
    return hotrow.fit(clicks(), schema=SCHEMA, run=path, quiet=True, **{**OPTIONS, **MODEL})


@pytest.fixture
def linear(run: hotrow.Run) -> hotrow.Run:
    """The run without what its MLPs give: a logistic regression, calibrated, that does not use the price."""
    run = hotrow.load(run.path)
    model: Any = run._network.model
    with torch.no_grad():
        for member in model.members:
            member.first_order_I[0] = 0
            for weight in member.top.parameters():
                weight.zero_()
    return run


def test_contributions_of_a_linear_model_add_up(linear: hotrow.Run) -> None:
    rows = scored_rows()
    found = linear.explain(rows)
    assert found.columns.keys() == {"price", "unused", "user", "colour", "tags"}
    total = sum(own.astype(np.float64) for own in found.columns.values())
    np.testing.assert_allclose(total, found.outputs - found.base, atol=1e-5)
    assert not found.columns["price"].any(), "the model does not use it"
    assert all(found.columns[name].std() > 1e-3 for name in ("user", "colour", "tags"))
    np.testing.assert_allclose(1 / (1 + np.exp(-found.outputs)), linear.predict(rows), atol=1e-6)
    for own in found.columns.values():  # the means are those of these rows, which judged the run
        assert abs(own.mean(dtype=np.float64)) < 1e-5
    assert found.base == pytest.approx(found.outputs.mean(dtype=np.float64), abs=1e-5)


def test_a_row_alone_is_explained_as_beside_others(run: hotrow.Run) -> None:
    rows = {name: column[:7] for name, column in scored_rows().items()}
    whole = run.explain(rows)
    for row in range(7):
        alone = run.explain({name: column[row : row + 1] for name, column in rows.items()})
        for name, own in whole.columns.items():
            assert alone.columns[name][0] == pytest.approx(own[row], abs=1e-6), name
    assert whole.columns["price"].std() > 0.1
    with pytest.raises(ValueError, match="no rows"):
        run.explain({name: column[:0] for name, column in rows.items()})


def test_a_number_that_is_replaced_by_its_mean_by_hand(run: hotrow.Run) -> None:
    rows, found = scored_rows(), run.explain(scored_rows())
    (transform,) = (column.transform for column in run._kept.info.dense if column.name == "price")
    assert transform.startswith(("standardize", "identity", "none"))
    score = run.predict({**rows, "price": np.full(NUM_SCORED, rows["price"].mean())}).astype(np.float64)
    np.testing.assert_allclose(found.outputs - found.columns["price"], np.log(score / (1 - score)), atol=1e-4)


def test_a_run_without_rows_to_judge_it_takes_means_of_training(tmp_path: Path) -> None:
    split = {"kind": "random", "fractions": [1.0, 0.0, 0.0]}
    run = hotrow.fit(clicks(), schema={**SCHEMA, "split": split}, run=tmp_path / "run", quiet=True, **OPTIONS, **KEEP)
    assert run.record.scores is None and run.record.means is not None
    assert run.record.means.dense[0] == pytest.approx(0, abs=0.1), "standardized"
    assert run.explain(clicks()).outputs.shape == (NUM_ROWS,)
    run.export(tmp_path / "out", step=min(list_checkpoints(run.folder.checkpoints)))
    with pytest.raises(ValueError, match="mean inputs"):  # of other weights
        hotrow.Scorer(tmp_path / "out").explain(clicks())


def test_histories_are_left_out_together(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", num_events=2600)
    run = hotrow.load(runs.train(tbsm(data, tmp_path / "run"), quiet=True).path)
    rows = {
        "user": ["1"],
        "item": ["2"],
        "category": ["3"],
        "item_history": [["1", "2"]],
        "category_history": [["1", "1"]],
    }
    found = run.explain(rows)
    assert found.columns.keys() == {"user", "item", "category", "item_history, category_history"}
    without = run.predict({**rows, "item_history": [[]], "category_history": [[]]}).astype(np.float64)
    assert found.outputs - found.columns["item_history, category_history"] == pytest.approx(
        np.log(without / (1 - without)), abs=1e-5
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_command_line_names_what_matters_most(run: hotrow.Run, tmp_path: Path, suffix: str) -> None:
    rows = {name: column[:50] for name, column in scored_rows().items()}
    pyarrow.csv.write_csv(pyarrow.table(rows), tmp_path / "rows.csv")
    out = tmp_path / f"scores.{suffix}"
    command = [
        "predict",
        str(run.path),
        str(tmp_path / "rows.csv"),
        "--out",
        str(out),
        "--explain",
        "2",
        "--keep",
        "user",
    ]
    assert (done := CliRunner().invoke(app, command)).exit_code == 0, done.output
    table = pyarrow.csv.read_csv(out) if suffix == "csv" else pyarrow.parquet.read_table(out)
    assert table.column_names == ["user", "score", "explanation"]
    found = run.explain(rows)
    for row, text in enumerate(table["explanation"].to_pylist()):
        own = sorted(((name, added[row]) for name, added in found.columns.items()), key=lambda each: -abs(each[1]))[:2]
        assert text == "; ".join(f"{name} {added:+.2f}" for name, added in own)


def test_texts_by_label() -> None:
    columns = {"a": np.array([[1.0, -2.0]], np.float32), "b": np.array([[0.0, 3.0]], np.float32)}
    found = Explanation(np.zeros(2, np.float32), np.zeros((1, 2), np.float32), columns).most(5)
    assert [own.tolist() for own in found] == [["a +1.00"], ["b +3.00; a -2.00"]]
