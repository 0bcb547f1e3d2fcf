"""What a column of numbers is taken for: right on planted columns, and the same whatever stands beside it or how often.

Every column is made by a seeded generator that plants what moves the label: the order of its values, which value it is,
both, or nothing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from hotrow.data.sources.evidence import Tally, _loss, left_out_rates, weigh
from hotrow.data.sources.guess import SchemaGuess, guess_columns
from hotrow.data.sources.kinds import as_dense, cuts
from hotrow.data.sources.schema import SplitSpec
from hotrow.data.sources.split import RandomPlan
from loops import looped

N = 16_000
Made = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Values, and what they add to the logit of the label."""
Maker = Callable[[np.random.Generator], Made]

NUMBER, IDS, BOTH, LEFT_OUT = {"dense"}, {"ids"}, {"dense", "ids"}, {""}
BUCKETS = {"dense", "buckets"}


def ids(count: int, *, zipf: float = 0.8, start: int = 1, step: int = 1, effect: float = 1.0) -> Maker:
    """Ids whose numbers say nothing about their popularity or effect."""

    def make(rng: np.random.Generator) -> Made:
        share = 1 / np.arange(1, count + 1) ** zipf
        drawn = rng.choice(count, N, p=share / share.sum())
        return (rng.permutation(count) * step + start)[drawn], rng.normal(0, effect, count)[drawn]

    return make


def number(draw: Callable[[np.random.Generator], Any], effect: Callable[[Any], Any]) -> Maker:
    def make(rng: np.random.Generator) -> Made:
        values = np.asarray(draw(rng))
        return values, np.asarray(effect(values), float)

    return make


def zip_codes(rng: np.random.Generator) -> Made:
    """Codes near each other are alike, and each has its own effect."""
    codes = np.sort(rng.choice(np.arange(10_000, 99_999), 600, replace=False))
    effects = np.sin(np.arange(600) / 60) + rng.normal(0, 0.7, 600)
    drawn = rng.integers(0, 600, N)
    return codes[drawn], effects[drawn]


def gains(rng: np.random.Generator) -> Made:
    """Amounts of money with a heavy zero, in which single sums mean something."""
    sums = np.concatenate([[0], np.sort(rng.choice(np.arange(100, 99_999), 110, replace=False))])
    drawn = np.where(rng.random(N) < 0.6, 0, rng.integers(1, 111, N))
    return sums[drawn], np.concatenate([[-0.3], rng.normal(0.3, 1.5, 110)])[drawn]


def with_gaps(make: Maker) -> Maker:
    """As pandas stores whole numbers of which some are missing: as floats."""

    def gapped(rng: np.random.Generator) -> Made:
        values, effects = make(rng)
        return np.where(rng.random(N) < 0.1, np.nan, values), effects

    return gapped


def zero_or(rng: np.random.Generator) -> Any:
    return np.where(rng.random(N) < 0.5, 0, np.floor(rng.lognormal(3, 1.2, N)))


PLANTED: dict[str, tuple[Maker, set[str]]] = {
    "publisher": (ids(399), IDS),
    "creative": (ids(399, zipf=0.0), IDS),
    "price_id": (ids(399, start=100_000), IDS),
    "num_sku": (ids(250, step=7), IDS),
    "agent": (with_gaps(ids(330, zipf=1.1)), IDS),
    "company": (with_gaps(ids(150, start=20, step=3)), IDS),
    "big": (ids(2_000, start=10**17, step=10**13 + 7), IDS),
    "count_user": (ids(3_000), IDS),
    "popular_first": (lambda rng: (lambda d: (d, rng.normal(0, 1, 300)[d]))(rng.zipf(1.5, N) % 300), IDS),
    "weekday": (ids(7), IDS),
    "mode": (ids(12, effect=0.6), IDS),
    "zip": (zip_codes, BOTH),
    "gain": (gains, IDS),
    "hour": (number(lambda r: r.integers(0, 24, N), lambda x: np.sin(x / 24 * 6.28)), BOTH),
    "smooth": (number(lambda r: r.normal(0, 1, N), lambda x: 0.7 * x), BUCKETS),
    "user_id": (number(lambda r: r.normal(50, 9, N).round(2), lambda x: 0.1 * (x - 50)), BUCKETS),
    "code": (number(lambda r: r.lognormal(10, 1, N).round(), lambda x: 0.7 * (np.log(x) - 10)), BUCKETS),
    "clicks": (number(zero_or, lambda x: 0.4 * np.log1p(x) - 0.6), BUCKETS),
    "age": (number(lambda r: r.normal(45, 14, N).clip(17, 120).round(), lambda x: 0.05 * (x - 45)), BUCKETS),
    "days": (number(lambda r: r.integers(0, 365, N), lambda x: (x - 180) / 150), BUCKETS),
    "uniform": (number(lambda r: r.integers(0, 10**6, N), lambda x: x / 3e5 - 1.5), BUCKETS),
    "weight": (number(lambda r: r.lognormal(12, 0.6, N).round(), lambda x: 0 * x), NUMBER),
    "bent": (number(lambda r: r.normal(0, 1, N), lambda x: x * x - 1), BUCKETS),
    "step": (number(lambda r: r.integers(0, 900, N), lambda x: np.where((x > 300) & (x < 500), 1.5, -0.3)), BUCKETS),
    "level": (
        number(
            lambda r: r.choice(np.arange(40) + 0.5, N),
            lambda x: np.random.default_rng(5).normal(0, 1, 41)[x.astype(int)],
        ),
        BUCKETS,
    ),
    "rows": (number(lambda r: np.arange(N) + 5, lambda x: 0 * x), LEFT_OUT),
    "token": (number(lambda r: r.choice(10**15, N, replace=False), lambda x: 0 * x), LEFT_OUT),
}


def planted(name: str, *, seed: int = 0, rate: float = -1.2) -> pa.Table:
    rng = np.random.default_rng([seed, *name.encode()])
    values, effect = PLANTED[name][0](rng)
    label = rng.random(N) < 1 / (1 + np.exp(-(rate + effect + rng.normal(0, 0.5, N))))
    column = pa.array(values, mask=np.isnan(values) if values.dtype.kind == "f" else None)
    return pa.table({"label": label.astype(int), name: column, "tag": rng.choice(["a", "b", "c"], N)})


def kinds(guess: SchemaGuess, name: str) -> set[str]:
    found = [g for g in guess.guesses if g.column == name]
    return {"buckets" if "buckets" in g.spec else g.role.replace("categorical", "ids") for g in found}


def verdicts(guess: SchemaGuess, name: str) -> list[tuple[str, dict[str, Any], str]]:
    return [(g.role, g.spec | {"column": ""}, g.reason) for g in guess.guesses if g.column == name]


@looped("name", PLANTED)
def test_planted_columns_are_told(name: str) -> None:
    guess = guess_columns(planted(name), label="label")
    assert kinds(guess, name) == PLANTED[name][1], [g.reason for g in guess.guesses if g.column == name]


@looped("name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, name in enumerate(PLANTED)])
def test_no_verdict_depends_on_order_names_or_other_columns(name: str) -> None:
    table = planted(name, seed=1)
    rng = np.random.default_rng(2)
    want = verdicts(guess_columns(table, label="label"), name)
    order, trains = np.arange(N), RandomPlan(0, SplitSpec().fractions).assign(np.arange(N)) == 0
    for own in (trains, ~trains):  # a row that trains still trains
        order[own] = rng.permutation(order[own])
    other = table.take(pa.array(order)).rename_columns({name: "user_count", "tag": "x y"})
    other = other.append_column("noise", pa.array(rng.random(N))).select(["noise", "x y", "user_count", "label"])
    assert verdicts(guess_columns(other, label="label"), "user_count") == want
    alone = verdicts(guess_columns(table.drop_columns("tag"), label="label"), name)
    assert alone[: len(want)] == want
    more = [spec["buckets"] for _, spec, _ in alone[len(want) :]]  # a model needs ids, if only those of buckets
    assert len(more) == ({role for role, _, _ in want} == {"dense"}) and all(more)


def test_a_label_that_says_nothing_leaves_the_shape() -> None:
    """Few positives or none known: decimal numbers are numbers, whole numbers ids, unless they lie like amounts."""
    rng = np.random.default_rng(0)
    table = pa.table({name: planted(name)[name] for name in ("publisher", "big", "smooth", "weight", "weekday")})
    want = {"publisher": IDS, "big": IDS, "smooth": NUMBER, "weight": NUMBER, "weekday": IDS}
    few = np.zeros(N, int)
    few[rng.choice(N, 15, replace=False)] = 1
    for guess in (guess_columns(table), guess_columns(table.append_column("label", pa.array(few)), label="label")):
        assert {name: kinds(guess, name) for name in want} == want


def test_a_line_against_scikit_learn() -> None:
    """The line's LogLoss, which buckets must beat, is that of a logistic regression."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 400, 5000).astype(float)
    positive = rng.random(5000) < 1 / (1 + np.exp(2 - x / 100))
    tally = Tally.of(x, positive)
    found = weigh(tally, as_dense(tally, "standardize"))
    assert found is not None
    inputs = ((x - x.mean()) / x.std())[:, None]
    model = LogisticRegression(C=1e6).fit(inputs, positive)
    assert found.line == pytest.approx(log_loss(positive, model.predict_proba(inputs)[:, 1]), abs=1e-6)
    assert found.base == pytest.approx(log_loss(positive, np.full(5000, positive.mean())))


def test_left_out_losses_by_brute_force() -> None:
    """Every row predicted by a tally that was made without it gives the same LogLoss."""
    rng = np.random.default_rng(1)
    values, positive = rng.integers(0, 30, 400), rng.random(400) < 0.3
    tally = Tally.of(values, positive)
    rates = left_out_rates(tally, weight=4.0)
    losses = []
    for row in range(400):
        others = (values == values[row]) & (np.arange(400) != row)
        rate = (positive[others].sum() + 4 * positive.mean()) / (others.sum() + 4)
        losses.append(-np.log(rate if positive[row] else 1 - rate))
        assert rates[int(positive[row]), values[row]] == pytest.approx(rate)
    assert _loss(tally, rates) == pytest.approx(np.mean(losses))


def test_cuts_lie_between_values_and_are_short() -> None:
    rng = np.random.default_rng(2)
    tally = Tally.of(np.where(rng.random(5000) < 0.4, 0.0, rng.lognormal(3, 1, 5000)), rng.random(5000) < 0.5)
    edges = cuts(tally, 10)
    buckets = np.bincount(np.searchsorted(edges, np.repeat(tally.values, tally.rows), side="right"))
    assert buckets[0] == tally.rows[0], "a frequent value has a bucket of its own"
    assert 8 <= len(buckets) <= 12 and buckets[1:].max() < 2 * 3000 / 10, "the others share the rest evenly"
    assert max(len(f"{edge:g}") for edge in edges) <= 7
