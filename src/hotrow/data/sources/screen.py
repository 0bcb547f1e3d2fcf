"""Chooses among many columns of numbers those that become inputs, by what each alone tells about the label.

A model of thousands of columns, most of them useless, learns their noise and trains slowly. So if there are more than
MANY, they are ranked by `strength` in sampled training rows, and taken as long as most strengths are not chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hotrow.data.sources.evidence import Floats, Tally, buckets_of

MANY = 256
"""All columns of numbers are inputs if there are no more than this; else at most this many are taken."""
FEWEST = 32
"""How many columns are taken in any case: some may tell more together than alone."""
MOST_IDS = 64
"""How many of the strongest are also buckets with statistics: a model pairs every feature of ids with every other."""
MAY_BE_IDS = 1024
"""Whole numbers with more values may be names of users or items, whose order shows nothing; they are not ranked."""
NUM_BUCKETS = 8


def strength(numbers: Floats, positive: NDArray[np.bool_]) -> float:
    """By how many standard errors the share of positives rises or falls with the number, or differs among eighths of
    the rows, whichever is more. numbers: NaN is a missing one; these rows are a group beside the eighths."""
    missing, share = np.isnan(numbers), float(positive.mean())
    tally = Tally.of(numbers[~missing], positive[~missing])
    found = tally.grouped(buckets_of(tally, NUM_BUCKETS)) if len(tally.rows) else tally
    rows, positives = np.append(found.rows, missing.sum()), np.append(found.positives, positive[missing].sum())
    excess, variance = positives - share * rows, share * (1 - share)
    place = np.append(np.cumsum(found.rows) - (found.rows + found.rows.sum()) / 2, 0.0)
    trend = abs(excess @ place) / math.sqrt(variance * (rows @ place**2) or 1.0)
    free = max(1, int((rows > 0).sum()) - 1)
    ratio = (excess**2 / np.maximum(rows, 1)).sum() / variance / free
    # The normal that is as improbable as a sum of squares (Wilson and Hilferty 1931).
    return max(float(trend), float((np.cbrt(ratio) - 1 + 2 / (9 * free)) / math.sqrt(2 / (9 * free))))


def strongest(found: Mapping[str, float]) -> list[str]:
    """The columns that are taken, the strongest first. found: strength by column."""
    ranked = sorted(found, key=lambda name: -found[name])
    by_chance = (len(found) * math.erfc(found[name] / math.sqrt(2)) for name in ranked[:MANY])
    last = max((k for k, expected in enumerate(by_chance, 1) if 2 * expected <= k), default=0)
    return ranked[: max(last, FEWEST)]
