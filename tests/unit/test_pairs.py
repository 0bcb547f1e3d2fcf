"""Pairs of columns that tell more together are found, and none where columns act alone or not at all."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from hotrow.data.sources.pairs import FOLDS, MAX_PAIRS, MAX_STEPS, MIN_OF_EACH, PRIOR, find_pairs, gains_of

Codes = dict[str, NDArray[np.int64]]
ROWS = 10_000


def columns(num_rows: int, seed: int, num_columns: int = 8) -> tuple[Codes, np.random.Generator]:
    """Returns columns of 2 to 30 values, some of them popular, that have nothing to do with each other."""
    draw = np.random.default_rng(seed)
    sizes = np.linspace(2, 30, num_columns).astype(int)
    return {f"c{i}": (n * draw.random(num_rows) ** 1.5).astype(np.int64) for i, n in enumerate(sizes)}, draw


def clicks(logits: NDArray[np.float64], draw: np.random.Generator) -> NDArray[np.bool_]:
    return draw.random(len(logits)) < 1 / (1 + np.exp(-logits))


def either(codes: Codes, *names: str) -> NDArray[np.float64]:
    """Returns 1 or -1 by whether an odd number of the columns has an odd value: each of them alone tells nothing."""
    return np.where(sum(codes[name] for name in names) % 2 == 0, 1.0, -1.0)


def found(codes: Codes, positive: NDArray[np.bool_]) -> list[frozenset[str]]:
    return [frozenset(pair) for pair in find_pairs(codes, positive)]


@pytest.mark.parametrize("seed", range(3))
def test_planted_pairs_are_found_the_stronger_first(seed: int) -> None:
    codes, draw = columns(ROWS, seed)
    positive = clicks(1.0 * either(codes, "c1", "c4") + 0.6 * either(codes, "c2", "c6") - 1, draw)
    assert found(codes, positive) == [{"c1", "c4"}, {"c2", "c6"}]


@pytest.mark.parametrize("additive", [True, False])
def test_columns_that_act_alone_or_not_at_all_make_no_pairs(additive: bool) -> None:
    """In 20 draws of 28 pairs each, at most one is taken by chance."""
    false = []
    for seed in range(20):
        codes, draw = columns(ROWS, seed)
        effects = [draw.normal(0, 0.7 * additive, 30)[codes[f"c{i}"]] for i in range(4)]
        false += found(codes, clicks(np.sum(effects, 0) - 1, draw))
    assert len(false) <= 1


def test_the_order_of_rows_and_columns_and_the_numbers_of_values_change_nothing() -> None:
    codes, draw = columns(20_000, seed=0)
    positive = clicks(0.8 * either(codes, "c0", "c5") + 0.5 * either(codes, "c3", "c7"), draw)
    want = found(codes, positive)
    assert want == [{"c0", "c5"}, {"c3", "c7"}]
    assert found(dict(reversed(codes.items())), positive) == want
    for order in (draw.permutation(len(positive)), np.argsort(positive, kind="stable")):
        assert found({name: own[order] for name, own in codes.items()}, positive[order]) == want
    renamed = {name: draw.permutation(1000)[own] for name, own in codes.items()}
    assert found(renamed, positive) == want


def test_no_more_pairs_are_taken_than_allowed() -> None:
    codes, draw = columns(30_000, seed=0, num_columns=7)
    codes = {name: own % 2 for name, own in codes.items()}
    every = [either(codes, *pair) for pair in combinations(codes, 2)]
    assert len(found(codes, clicks(0.2 * np.sum(every, 0), draw))) == MAX_PAIRS < len(every)


@pytest.mark.parametrize("missing", [0, 1])
def test_few_rows_of_a_label_make_no_pairs(missing: int) -> None:
    """The pair tells the label, and one row decides whether there are enough of it."""
    codes = {"a": np.arange(4000) % 2, "b": np.arange(4000) // 2 % 2}
    positive = (codes["a"] != codes["b"]) & (np.cumsum(codes["a"] != codes["b"]) <= MIN_OF_EACH - missing)
    assert found(codes, positive) == ([] if missing else [{"a", "b"}])
    assert found(codes, ~positive) == found(codes, positive)
    assert find_pairs({"a": codes["a"]}, positive) == []


def test_gains_are_those_of_a_loop_over_rows() -> None:
    draw = np.random.default_rng(0)
    slots, fold = draw.integers(0, 9, 200), draw.integers(0, FOLDS, 200)
    p = draw.random(200)
    residual, curvature = (draw.random(200) < p) - p, p * (1 - p)
    want = []
    for i in range(200):
        others = [j for j in range(200) if slots[j] == slots[i] and fold[j] != fold[i]]
        step = sum(residual[j] for j in others) / (sum(curvature[j] for j in others) + PRIOR * sum(curvature) / 200)
        want.append(residual[i] * step - curvature[i] * step * step / 2)
    np.testing.assert_allclose(gains_of(slots, residual, curvature, fold), want, rtol=1e-12)


@pytest.mark.slow
def test_of_many_columns_fewer_rows_are_looked_at() -> None:
    """And a pair that acts strongly is found among 1,770."""
    codes, draw = columns(30_000, 5, num_columns=60)
    assert len(codes) * (len(codes) - 1) // 2 * 30_000 > MAX_STEPS
    positive = clicks(1.5 * either(codes, "c3", "c7") - 1.0, draw)
    assert find_pairs(codes, positive)[0] == ("c3", "c7")
    every = {name: own[::3] for name, own in codes.items()}
    assert find_pairs(codes, positive) == find_pairs(every, positive[::3])
