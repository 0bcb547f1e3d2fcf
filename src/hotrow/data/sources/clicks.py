"""Made-up clicks with the columns and the table sizes of Criteo Kaggle, for `hotrow demo`.

    C1 ... C26  ids by Zipf's law, some missing in large columns
    I1 ... I13  lognormal counts, some missing
    label       1 with probability sigmoid(bias + main + pair + dense). main: the sum of a weight of each id. pair: the
                products of two ids' hidden vectors, which only a model with interactions can learn. dense: the sum of a
                weight of each count

The same seed gives the same rows; benchmarks/synthetic.py has skews, drift, lists and exact truth for measurements.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SIZES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct ids per column of the Criteo Kaggle (Display Advertising Challenge) set, as published with DLRM systems."""
NUM_DENSE, HIDDEN, BLOCK_ROWS = 13, 4, 1 << 16
STRENGTHS = np.array([[0.8], [1.2], [0.6]])
"""Standard deviations, in logits, of main, pair and dense."""
CLICK_RATE, MISSING = 0.256, 0.04
START_S, SPAN_S = 1_577_836_800, 7 * 86_400
SCHEMA: dict[str, Any] = {
    "label": "label",
    "time": "time",
    "dense": [{"column": f"I{j}", "transform": "log1p_clip0"} for j in range(1, 1 + NUM_DENSE)],
    "categorical": [f"C{j}" for j in range(1, 1 + len(SIZES))],
    "licence": "made up by hotrow: no terms",
}
Floats: TypeAlias = NDArray[np.float64]


def make_clicks(num_rows: int, *, scale: float, seed: int = 0) -> pa.Table:
    """Makes rows in the order of time. scale: columns of more than 1,000 ids keep this share, at least 1,000."""
    sizes = [max(min(size, 1000), round(size * scale)) for size in SIZES]
    # By column [ids and the missing one, 1 + HIDDEN]. Small columns matter more, so that few rows teach the truth.
    weights = [
        np.random.default_rng([seed, 0, j]).standard_normal((size + 1, 1 + HIDDEN)) / (1 + math.log(size) / 4)
        for j, size in enumerate(sizes)
    ]
    ids, normal, _ = _drawn(sizes, [seed, 1, 0])
    for own, rows in zip(weights, ids, strict=True):
        own[:, 1:] -= own[rows, 1:].mean(0)
    parts = _parts(weights, ids, normal)
    mean, strength = parts.mean(1, keepdims=True), STRENGTHS / parts.std(1, keepdims=True)
    bias = _bias((strength * (parts - mean)).sum(0))
    tables = []
    for block in range(-(-num_rows // BLOCK_ROWS)):
        ids, normal, uniform = _drawn(sizes, [seed, 1, block])
        logits = bias + (strength * (_parts(weights, ids, normal) - mean)).sum(0)
        time = START_S + np.arange(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS) * SPAN_S // num_rows
        made: dict[str, Any] = {"label": (uniform < _sigmoid(logits)).astype(np.int8), "time": time}
        for j, own in enumerate(normal, 1):
            counts = np.maximum(np.floor(np.expm1(1 + j % 5 + own)), 0)
            made[f"I{j}"] = pa.array(counts.astype(np.float32), from_pandas=True)
        for j, (rows, size) in enumerate(zip(ids, sizes, strict=True), 1):
            key = rows.astype(np.uint32) * np.uint32(0x9E3779B1)  # a bijection, which hides the popularity
            made[f"C{j}"] = pa.array(key.astype(np.int64), mask=rows == size)
        tables.append(pa.table(made))
    return pa.concat_tables(tables).slice(0, num_rows)


def _drawn(sizes: list[int], seed: list[int]) -> tuple[list[NDArray[np.int64]], Floats, Floats]:
    """Draws a block: ids of each column [n], their number if missing; normal scores of counts [I, n]; uniforms [n]."""
    rng, ids = np.random.default_rng(seed), []
    for whole, size in zip(SIZES, sizes, strict=True):
        zipf = 1.0 if whole < 30 else 1.4 if whole < 10_000 else 1.2 if whole < 1_000_000 else 1.1
        own = draw_ranks(size, zipf, rng.integers(0, 1 << 64, BLOCK_ROWS, np.uint64))
        own[rng.random(BLOCK_ROWS) < MISSING * (whole > 1_000_000)] = size
        ids.append(own)
    normal = rng.standard_normal((NUM_DENSE, BLOCK_ROWS))
    normal[rng.random(normal.shape) < MISSING] = np.nan
    return ids, normal, rng.random(BLOCK_ROWS)


def _parts(weights: list[Floats], ids: list[NDArray[np.int64]], normal: Floats) -> Floats:
    """Returns main, pair and dense of each row before they are scaled, [3, n]."""
    taken = [own[rows] for own, rows in zip(weights, ids, strict=True)]
    total, squares = np.sum(taken, axis=0), np.sum([(own[:, 1:] ** 2).sum(1) for own in taken], axis=0)
    signs = np.array([(-1) ** j / math.sqrt(1 + j) for j in range(NUM_DENSE)])
    return np.stack([total[:, 0], ((total[:, 1:] ** 2).sum(1) - squares) / 2, signs @ np.nan_to_num(normal)])


def _bias(logits: Floats) -> float:
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logits + middle).mean() < CLICK_RATE else (low, middle)
    return low


def _sigmoid(logits: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def draw_ranks(num_rows: int, zipf: float, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Draws ranks 0 .. num_rows - 1 of rank k + 1 with probability proportional to the integral of x^-zipf over
    [k + 1/2, k + 3/2], by inverting the distribution function at the upper 53 bits of `words`."""
    uniform = (words >> np.uint64(11)).astype(np.float64)
    uniform *= 2.0**-53
    low, high, power = 0.5, num_rows + 0.5, 1.0 - zipf
    if abs(power) < 1e-9:
        x = low * np.exp(uniform * np.log(high / low))
    else:
        a, b = low**power, high**power
        x = (a + uniform * (b - a)) ** (1.0 / power)
    ranks: NDArray[np.int64] = np.rint(x).astype(np.int64)
    ranks -= 1
    np.clip(ranks, 0, num_rows - 1, out=ranks)
    return ranks
