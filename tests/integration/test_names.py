"""Columns may be called anything: forty names that break paths, YAML, HTML or modules, from raw file to scores."""

import csv
import html
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

import hotrow
from hotrow.cli import tools
from hotrow.data.prepare.init import run_init
from hotrow.data.prepare.prepare import run_prepare
from hotrow.export.inputs import load_module

NAMES = [
    *("..ip", ".", "..", "a/b", "a\\b", "/etc/passwd", " ", " lead", "trail ", "", "<script>alert(1)</script>"),
    *("&amp;", "vocab", "counts", "CON", 'q"uote', "it's", "%s", "%2F", "{x}", "null", "1", "true", "a: b", "# x"),
    *("new\nline", "tab\tname", "bell\x07", "😀", "שלום", "é", "e\u0301", "ID", "id", "n" * 300, "score", "train"),
    *("- x", "*", "~", "__index_level_0__", "k=v", "weight", "a.b", "dup", "dup", "dup (2)", "embedding", "label"),
    "C:\\d",
]
LABEL = "clicked?/0"
NUM_ROWS = 300
OPTIONS = {"batch_size": 64, "epochs": 1, "embedding_dim": 2, "bottom_mlp": [4], "top_mlp": [4], "threads": 1}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """By distinct name, as hotrow tells repeated ones apart."""
    generator = np.random.default_rng(3)
    names = ["dup (3)" if name == "dup" and i == NAMES.index("dup") + 1 else name for i, name in enumerate(NAMES)]
    columns = {name: [f"v{v}" for v in generator.integers(0, 5 + i, NUM_ROWS)] for i, name in enumerate(names)}
    return {**columns, LABEL: [str(v) for v in generator.integers(0, 2, NUM_ROWS)]}


def write(path: Path, names: list[str], columns: list[list[str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *zip(*columns, strict=True)])
    return path


def test_any_names_from_raw_file_to_scores(tmp_path: Path, rows: dict[str, list[str]]) -> None:
    raw = write(tmp_path / "raw.csv", [*NAMES, LABEL], list(rows.values()))
    made = run_init(raw, label=LABEL, out=tmp_path)
    dataset = run_prepare("csv", raw, tmp_path / "packed", schema=tmp_path / "schema.yaml")
    assert made.files[0] == tmp_path / "schema.yaml"
    assert set(dataset.info.feature_names) == set(rows) - {LABEL}
    run = hotrow.fit(dataset.path, run=tmp_path / "run", quiet=True, **OPTIONS)
    outside = [path for path in tmp_path.parent.rglob("*") if "passwd" in path.name and tmp_path not in path.parents]
    assert not outside
    assert tools.check(run.path)["ok"]

    # The label is absent and columns come in another order; names, not places, decide.
    order = [name for name in reversed(rows) if name != LABEL and not name.startswith("dup")]
    values = [rows[name] for name in (*order, "dup", "dup (3)", "dup (2)")]
    mixed = write(tmp_path / "mixed.csv", [*order, "dup", "dup", "dup (2)"], values)
    scores = run.predict(raw)
    assert len(np.unique(scores)) > NUM_ROWS // 2
    np.testing.assert_array_equal(run.predict(mixed), scores)
    np.testing.assert_array_equal(run.predict(pa.table(rows)), scores)

    run.export(tmp_path / "export")
    assert tools.check(tmp_path / "export")["ok"]
    module = load_module(tmp_path / "export" / "score.py")
    np.testing.assert_allclose(module.Scorer(tmp_path / "export").score(rows).numpy(), scores, rtol=1e-5)

    report = tools.inspect(dataset.path, out=tmp_path / "hotness")
    page = (tmp_path / "hotness" / "hotness.html").read_text()
    assert {table["table"] for table in report["tables"]} == set(rows) - {LABEL}
    assert "<script>alert" not in page and html.escape("<script>alert(1)</script>") in page


def test_a_header_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_bytes(b"click,caf\xe9\n" + b"0,a\n1,b\n" * 50)
    with pytest.raises(ValueError, match=r"raw\.csv:1: byte 9 is not UTF-8; convert it \(iconv -t UTF-8\)"):
        hotrow.fit(tmp_path / "raw.csv", label="click", run=tmp_path / "run", quiet=True)
