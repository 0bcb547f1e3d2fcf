"""Columns that tell more together come first among the pairs and triples."""

import numpy as np
import pytest
from numpy.typing import NDArray

from hotrow.data.sources.crosses import FOLDS, MAX_STEPS, MIN_OF_EACH, MOST, PRIOR, find_crosses, gains_of

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


def found(codes: Codes, positive: NDArray[np.bool_], size: int = 2) -> list[frozenset[str]]:
    return [frozenset(cross) for cross in find_crosses(codes, positive) if len(cross) == size]


@pytest.mark.parametrize("seed", range(3))
def test_planted_pairs_are_found_the_stronger_first(seed: int) -> None:
    codes, draw = columns(ROWS, seed)
    positive = clicks(1.0 * either(codes, "c1", "c4") + 0.6 * either(codes, "c2", "c6") - 1, draw)
    assert found(codes, positive)[:2] == [{"c1", "c4"}, {"c2", "c6"}]


def test_a_planted_triple_grows_from_one_of_its_pairs() -> None:
    codes, draw = columns(ROWS, 1)
    logits = 1.2 * either(codes, "c1", "c3", "c6") + 0.7 * either(codes, "c3", "c6") - 1
    positive = clicks(logits, draw)
    assert found(codes, positive)[0] == {"c3", "c6"}
    assert found(codes, positive, 3)[0] == {"c1", "c3", "c6"}
    assert [*map(len, find_crosses(codes, positive))] == [2] * len(found(codes, positive)) + [3] * MOST


def test_the_order_of_rows_and_columns_and_the_numbers_of_values_change_nothing() -> None:
    codes, draw = columns(8_000, seed=0)
    positive = clicks(0.8 * either(codes, "c0", "c5") + 0.5 * either(codes, "c3", "c7"), draw)
    want = [{"c0", "c5"}, {"c3", "c7"}]
    assert found(codes, positive)[:2] == want
    assert found(dict(reversed(codes.items())), positive)[:2] == want
    for order in (draw.permutation(len(positive)), np.argsort(positive, kind="stable")):
        assert found({name: own[order] for name, own in codes.items()}, positive[order])[:2] == want
    renamed = {name: draw.permutation(1000)[own] for name, own in codes.items()}
    assert found(renamed, positive)[:2] == want


def test_no_more_are_taken_than_allowed() -> None:
    codes, draw = columns(3_000, seed=0, num_columns=9)
    pairs, triples = (found(codes, clicks(np.zeros(3_000), draw), size) for size in (2, 3))
    assert len(set(pairs)) == len(set(triples)) == MOST
    few = {name: codes[name] for name in ("c2", "c4", "c8")}
    assert len(find_crosses(few, clicks(np.zeros(3_000), draw))) == 4


@pytest.mark.parametrize("missing", [0, 1])
def test_few_rows_of_a_label_make_no_pairs(missing: int) -> None:
    """The pair tells the label, and one row decides whether there are enough of it."""
    codes = {"a": np.arange(4000) % 2, "b": np.arange(4000) // 2 % 2}
    positive = (codes["a"] != codes["b"]) & (np.cumsum(codes["a"] != codes["b"]) <= MIN_OF_EACH - missing)
    assert found(codes, positive) == ([] if missing else [{"a", "b"}])
    assert found(codes, ~positive) == found(codes, positive)
    assert find_crosses({"a": codes["a"]}, positive) == []


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
    assert find_crosses(codes, positive)[0] == ("c3", "c7")
    every = {name: own[::3] for name, own in codes.items()}
    assert find_crosses(codes, positive) == find_crosses(every, positive[::3])
