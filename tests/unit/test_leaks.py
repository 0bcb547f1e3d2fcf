"""Columns that give the label away are found with their figure; honest ones, also of real rows, are not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pytest
from sklearn.metrics import roc_auc_score

from hotrow.data.sources import leaks
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.leaks import find_leaks
from hotrow.data.sources.schema import LabelSpec
from loops import looped

N = 4000
LABEL = LabelSpec(column="click")


def rows(seed: int = 0, rate: float = 0.05, **columns: object) -> pa.Table:
    generator = np.random.default_rng(seed)
    click = (generator.random(N) < rate).astype(np.int64)
    made = {name: make(generator, click) if callable(make) else make for name, make in columns.items()}
    return pa.table({"click": click, "user": generator.integers(0, 500, N), "ts": np.arange(N) + 1_700_000_000, **made})


def only_for(value: int, text: str = "x") -> Callable[[np.random.Generator, np.ndarray], pa.Array]:
    return lambda generator, click: pa.array([f"{text}{i % 9}" if c == value else None for i, c in enumerate(click)])


PLANTED = {
    "dwell": (lambda g, c: c * 10 + g.normal(0, 1, N), "it is nearly the label itself, with AUC 1.000"),
    "falling": (lambda g, c: -c * 10 + g.normal(0, 1, N), "it is nearly the label itself, with AUC 1.000"),
    "page": (lambda g, c: pa.array([f"p{x}" for x in c * 50 + g.integers(0, 50, N)]), "it is nearly the label"),
    "order_id": (only_for(1), "it is filled for positive rows only"),
    "reason_not": (only_for(0), "it is filled for negative rows only"),
    "shipped_at": (lambda g, c: np.arange(N) + 1_700_000_000 + g.integers(1, 9000, N), "it is later than 'ts' in 100%"),
}


@looped("name", PLANTED)
def test_planted_leaks_are_found_and_left_out(name: str) -> None:
    make, reason = PLANTED[name]
    guess = guess_columns(rows(**{name: make}), label="click", time="ts")
    assert {g.column for g in guess.of("")} == {name}
    assert f"column {name} may give the label away: {reason}" in guess.summary()
    assert guess.of("")[0].reason.startswith(f"a leak: {reason}")
    assert name not in guess.schema().column_names
    role = "dense" if name in ("dwell", "falling", "shipped_at") else "categorical"
    kept = guess_columns(rows(**{name: make}), label="click", time="ts", **{role: [name]})
    assert name in kept.schema().column_names
    assert len(kept.warnings) == 1 and reason in kept.warnings[0] and "it stays, as you named it" in kept.warnings[0]


def test_a_name_of_the_row_is_left_out_whatever_it_is_called() -> None:
    guess = guess_columns(rows(ticket=[f"t{i * 7919 % N}" for i in range(N)]), label="click", time="ts")
    assert [g.column for g in guess.of("")] == ["ticket"]
    assert "it names the row" in guess.of("")[0].reason


@looped("seed", range(10))
def test_honest_columns_are_not(seed: int) -> None:
    table = rows(
        seed,
        rate=0.01,
        strong=lambda g, c: c * 1.5 + g.normal(0, 1, N),
        unique=lambda g, c: pa.array([f"s{x}" for x in g.integers(0, 10**9, N)]),
        rare=lambda g, c: pa.array([f"r{x}" if x < 20 else None for x in g.integers(0, N // 2, N)]),
        half=lambda g, c: pa.array([f"h{x % 30}" if x % 2 else None for x in g.integers(0, 1000, N)]),
    )
    assert find_leaks(table, LABEL, [name for name in table.column_names if name != "click"]).leaks == {}


@looped("name", ["criteo_terabyte_80k.tsv.gz", "criteo_terabyte_day0_10k.tsv.gz"])
def test_honest_files_have_none(name: str, real_data: Callable[[str], Path]) -> None:
    guess = guess_columns(real_data(name), label="c0")
    assert not [g for g in guess.of("") if "leak" in g.reason] and not guess.notes


def test_honest_events_have_none(real_data: Callable[[str], Path]) -> None:
    names = ["user", "item", "category", "behaviour", "ts"]
    table = pyarrow.csv.read_csv(
        real_data("taobao_userbehavior_110k.csv.gz"), read_options=pyarrow.csv.ReadOptions(column_names=names)
    )
    click = pc.not_equal(table["behaviour"], "pv")
    guess = guess_columns(table.drop_columns("behaviour").append_column("click", click), label="click")
    assert guess.schema().feature_names == ("user", "item", "category") and not guess.notes


def test_auc_against_scikit_learn() -> None:
    generator = np.random.default_rng(1)
    score, positive = generator.integers(0, 40, 3000).astype(float), generator.random(3000) < 0.1
    assert leaks._auc(score, positive, ~positive) == pytest.approx(roc_auc_score(positive, score))
