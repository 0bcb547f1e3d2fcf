"""Makes samples for a sequence model from events of users: what came next, or did not, after what a user did before.

    pip install hotrow polars
    python examples/histories.py UserBehavior.csv taobao.parquet --every 10
    hotrow prepare parquet taobao.parquet --schema examples/histories.yaml --out data/taobao-tbsm

    events   user  time  item            samples of user 7, length 2          came  user  item  item_history
             7     10    a               the event that came                  1     7     b     [a]
             7     20    b               drawn from what was seen before 20   0     7     x     [a]
             7     30    c                                                    1     7     c     [a, b]
                                                                              0     7     y     [a, b]

It reads UserBehavior.csv of Alibaba's Tianchi platform: user, item, category, behaviour, time, without a header. For a
log of your own change `read_events`; every column besides user and time describes the item. The events are held in
memory, about 100 bytes for each.

A target is a user's event with at least `min_length` events before it: each `every`-th one, from a position drawn for
the user on. Its history is the user's last `length` events before it, the oldest first; events of one second are in the
order of the file. A negative is an item drawn uniformly from all items that anyone saw before the target's time, but
for the target and its history; what describes it is as it was first seen. If 32 draws find none, the target is left
out.

Except for its target, a sample knows nothing about its own time or later. So a split by time leaks nothing: training
rows do not change with test rows. Everything drawn is a function of the seed, the user, and the number of the event
among the user's events.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

COLUMNS = ["user", "item", "category", "behaviour", "time"]
TRIES, TARGETS_AT_ONCE = 32, 1 << 14
GOLDEN, OF_NEGATIVES, OF_PHASES = 0x9E3779B97F4A7C15, 0xE6, 0x9B
Integers: TypeAlias = NDArray[np.int64]


def read_events(path: Path | str) -> pl.DataFrame:
    """Returns the events of UserBehavior.csv, compressed or not: user, item, category and time."""
    types = {name: pl.String if name == "behaviour" else pl.Int64 for name in COLUMNS}
    return pl.read_csv(path, has_header=False, schema=types).drop("behaviour")


def write_samples(events: pl.DataFrame, out: Path | str, **options: Any) -> tuple[int, int]:
    """Writes the samples as Parquet; returns the number of them, and of the targets that were left out."""
    num_rows = num_left_out = 0
    writer = None
    for table, left_out in samples(events, **options):
        writer = writer or pyarrow.parquet.ParquetWriter(out, table.schema)
        writer.write_table(table)
        num_rows, num_left_out = num_rows + table.num_rows, num_left_out + left_out
    if writer is not None:
        writer.close()
    return num_rows, num_left_out


def samples(
    events: pl.DataFrame, *, length: int = 20, min_length: int = 1, every: int = 1, negatives: int = 1, seed: int = 0
) -> Iterator[tuple[pa.Table, int]]:
    """Yields samples by user and time, each target before its negatives, and how many targets were left out."""
    pool = events.sort("time", maintain_order=True).unique("item", keep="first", maintain_order=True)
    seen = {name: column.to_numpy() for name, column in pool.sort("time", "item").to_dict().items()}
    events = events.sort("user", "time", maintain_order=True)
    came = {name: column.to_numpy() for name, column in events.to_dict().items()}
    positions = events.select(pl.int_range(pl.len()).over("user")).to_series().to_numpy()
    counted = positions.astype(np.uint64) + draw(seed, OF_PHASES, came["user"]) % np.uint64(every)
    targets = np.flatnonzero((positions >= min_length) & (counted % np.uint64(every) == 0))
    back = np.arange(length, 0, -1)
    for first in range(0, len(targets), TARGETS_AT_ONCE):
        target = targets[first : first + TARGETS_AT_ONCE, None]
        past, is_past = np.maximum(target - back, 0), back <= positions[target]
        itself = came["item"][target]
        known = np.hstack([itself, np.where(is_past, came["item"][past], itself)])
        num_seen = np.searchsorted(seen["time"], came["time"][target])
        number = positions[target] * negatives + np.arange(negatives)
        drawn = draw_negatives(seed, came["user"][target], number, seen["item"], num_seen, known)
        found = (drawn >= 0).all(1)
        target, past, is_past, drawn = target[found], past[found], is_past[found], drawn[found]
        ends = np.concatenate([[0], np.repeat(is_past.sum(1), 1 + negatives).cumsum()])
        past = np.repeat(past, 1 + negatives, 0)[np.repeat(is_past, 1 + negatives, 0)]
        made = {"came": np.tile([1] + [0] * negatives, len(target))}
        made |= {name: np.repeat(came[name][target], 1 + negatives) for name in ("user", "time")}
        for name in (name for name in came if name not in made):
            made[name] = np.hstack([came[name][target], seen[name][drawn]]).ravel()
            made[f"{name}_history"] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(came[name][past]))
        yield pa.table(made), int((~found).sum())


def draw_negatives(
    seed: int, user: Integers, number: Integers, items: Integers, num_seen: Integers, known: Integers
) -> Integers:
    """Returns the place in `items` of each negative, [targets, negatives]: one of the first `num_seen`, whose item is
    not among those `known`; -1 where none was found. number: of each negative among the user's."""
    found = np.full(number.shape, -1)
    for attempt in range(TRIES):
        if (found >= 0).all():
            break
        bits = draw(seed, OF_NEGATIVES, user, number * TRIES + attempt)
        place = (bits % np.maximum(num_seen, 1).astype(np.uint64)).astype(np.int64)
        is_new = (items[place][:, :, None] != known[:, None]).all(2) & (num_seen > 0)
        found = np.where((found < 0) & is_new, place, found)
    return found


def draw(seed: int, salt: int, *numbers: Integers) -> NDArray[np.uint64]:
    """Returns 64 random bits for each element of `numbers`, a function of it, seed and salt alone (splitmix64)."""
    bits = mix(np.array([(seed + salt * GOLDEN) % 2**64], np.uint64))
    for part in numbers:
        bits = mix(bits + mix(part.astype(np.uint64) * np.uint64(GOLDEN)))
    return bits


def mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ bits >> np.uint64(31)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events")
    parser.add_argument("out")
    for name, usual in {"length": 20, "min-length": 1, "every": 1, "negatives": 1, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = vars(parser.parse_args())
    num_rows, num_left_out = write_samples(read_events(given.pop("events")), given.pop("out"), **given)
    print(f"{num_rows:,} rows; {num_left_out:,} targets left out, for which no negative was found")
