"""Every number of a report's first tables against polars on the raw file, which knows nothing of hotrow."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import hotrow

NUM_ROWS, NUM_TEST = 1000, 100


def rows_of(seed: int) -> pl.DataFrame:
    """Clicks in no order of time, with cells that are missing, zeros that are not, and ids that the end alone has."""
    rng = np.random.default_rng(seed)

    def holed(values: Any, share: float) -> list[Any]:
        return [
            None if hole else value for value, hole in zip(values.tolist(), rng.random(NUM_ROWS) < share, strict=True)
        ]

    time = 1_700_000_000 + rng.permutation(NUM_ROWS) * 60
    city = rng.integers(0, 12, NUM_ROWS) + 20 * (time > time.max() - 60 * NUM_TEST // 2)
    return pl.DataFrame(
        {
            "click": (rng.random(NUM_ROWS) < np.where(city % 3 == 0, 0.7, 0.2)).astype(int),
            "ts": time,
            "visits": holed(rng.integers(0, 3, NUM_ROWS) * rng.integers(0, 900, NUM_ROWS), 0.2),
            "price": holed(rng.lognormal(0, 1, NUM_ROWS).round(3), rng.random() / 3),
            "city": holed(np.char.add("c", city.astype(str)), 0.1),
            "plain": (rng.integers(0, 2, NUM_ROWS) * 1000 + rng.random(NUM_ROWS)).round(2),
        }
    )


def spelled(text: str) -> Callable[[pl.DataFrame, Path], None]:
    return lambda frame, path: frame.write_csv(path, null_value=text)


FORMS: dict[str, Callable[[pl.DataFrame, Path], None]] = {
    "blank.csv": spelled(""),
    "na.csv": spelled("NA"),
    "null.csv": spelled("\\N"),
    "tabs.tsv": lambda frame, path: frame.write_csv(path, separator="\t"),
    "semicolons.csv": lambda frame, path: frame.write_csv(path, separator=";"),
    "lines.jsonl": lambda frame, path: frame.write_ndjson(path),
    "parts.parquet": lambda frame, path: frame.write_parquet(path, row_group_size=300),
    "mapped.feather": lambda frame, path: frame.write_ipc(path, compat_level=pl.CompatLevel.oldest()),
    "dates.csv": lambda frame, path: frame.with_columns(
        pl.from_epoch("ts").dt.strftime("%Y-%m-%d %H:%M:%S")
    ).write_csv(path),
    "nan.parquet": lambda frame, path: frame.with_columns(pl.col("price").fill_null(np.nan)).write_parquet(path),
}  # fmt: skip


def table(page: str, head: str) -> dict[str, list[str]]:
    """Cells of the table below a heading, by the first cell of a row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.partition(head)[2].partition("</table>")[0], re.DOTALL)
    cells = [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)] for row in rows
    ]
    return {row[0]: row[1:] for row in cells if row}


@pytest.mark.slow_but("blank.csv", "nan.parquet")
@pytest.mark.parametrize("form", FORMS)
def test_what_a_report_says_of_rows(form: str, tmp_path: Path) -> None:
    frame, path = rows_of(sorted(FORMS).index(form)), tmp_path / form
    FORMS[form](frame, path)
    run = hotrow.fit(
        path, label="click", time="ts", run=tmp_path / "run", quiet=True, choice=False, epochs=1, threads=1
    )
    page = (tmp_path / "run/report.html").read_text()
    ordered = frame.with_columns(score=pl.Series(run.predict(path))).sort("ts")
    train, test = ordered.head(NUM_ROWS - NUM_TEST), ordered.tail(NUM_TEST)
    label, score = test["click"].to_numpy(), test["score"].to_numpy().astype(float)
    losses = -np.log(np.where(label == 1, score, 1 - score))
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    above = (score[label == 1][:, None] > score[label == 0]) + (score[label == 1][:, None] == score[label == 0]) / 2
    rate = label.mean()
    constant = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    said = [float(number) for number in re.findall(r"\d\.\d{4}", text.partition("Mean score")[0].partition("AUC")[2])]
    expected = [above.mean(), above.mean(), losses.mean(), losses.mean() / constant]
    np.testing.assert_allclose([said[0], *said[-3:]], expected, atol=6e-5)
    assert f"the mean label is {label.mean():.4g}" in text and f"Mean score {score.mean():.4g}" in text
    assert f"Training rows {len(train):,} {len(test):,} test" in text
    columns = table(page, "<h2>Columns</h2>")
    assert columns.keys() == {"visits", "price", "city", "plain"}
    for name, (*_, missing) in columns.items():
        share = frame[name].fill_nan(None).null_count() if frame[name].dtype.is_float() else frame[name].null_count()
        assert missing == f"{share / NUM_ROWS:.1%}", (name, columns[name])
    known = set(train["city"].drop_nulls())
    unknown = test["city"].drop_nulls().is_in(list(known)).not_().sum() / NUM_TEST
    assert columns["city"][2] == f"{unknown:.1%}" and f"ids in {len(known) + 2:,} rows" in columns["city"][1]
    assert json.loads((tmp_path / "run/run.json").read_text())["rows"] == {"train": len(train), "test": len(test)}
