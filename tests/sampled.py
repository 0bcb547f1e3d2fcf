"""Products of parameters of which `make test` runs a sample and `make test-all` all.

    @pytest.mark.parametrize(("kind", "dim", "threads"), sampled(["dram", "ssd"], [1, 8, 33], [1, 2]))

The sample has every pair of values of any two axes (or, with pairs=False, every value), and is the same every time.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def sampled(*axes: Iterable[Any], pairs: bool = True) -> list[Any]:
    """Returns all combinations as parameters; those that are not in the sample are marked slow."""
    values = [list(axis) for axis in axes]
    chosen = covering([len(axis) for axis in values], min(2 if pairs else 1, len(values)))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(values, places, strict=True)),
            marks=() if places in chosen else pytest.mark.slow,
        )
        for places in itertools.product(*(range(len(axis)) for axis in values))
    ]


def covering(
    sizes: Sequence[int], strength: int, *, valid: Callable[[tuple[int, ...]], bool] = lambda row: True
) -> set[tuple[int, ...]]:
    """Returns `valid` rows of numbers, below `sizes`, that have every combination of any `strength` columns, except
    combinations with which none of 40 rows is valid."""
    draw, rows = random.Random(0), set[tuple[int, ...]]()
    columns = list(itertools.combinations(range(len(sizes)), strength))
    missing = {
        (chosen, at) for chosen in columns for at in itertools.product(*(range(sizes[column]) for column in chosen))
    }

    def found(row: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(chosen, tuple(row[column] for column in chosen)) for chosen in columns} & missing

    while missing:
        chosen, at = min(missing)  # each row has one that is missing, and as many more as 40 draws find
        fixed = dict(zip(chosen, at, strict=True))
        drawn = [tuple(fixed.get(c, draw.randrange(size)) for c, size in enumerate(sizes)) for _ in range(40)]
        if not (drawn := list(filter(valid, drawn))):
            missing.remove((chosen, at))
            continue
        best = max(drawn, key=lambda row: len(found(row)))
        rows.add(best)
        missing -= found(best)
    return rows
