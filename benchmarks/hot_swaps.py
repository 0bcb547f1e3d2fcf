"""What a swap of hot rows has to copy, and how short phases may be for it: counted on data, with nothing timed.

    python -m benchmarks.hot_swaps [DATA] [--samples 1000000] [--scale 0.1] [--batch-size 2048]

DATA: a packed dataset; if none, clicks of Criteo Kaggle's shape are made. A tenth of the tables' bytes is hot, by
counts, with rows of 16 columns and row-wise Adagrad. For rates of 50, 10 and 2 %, means over the phases of an epoch:

    changed     the hot rows that a phase changes, of all hot rows
    not late    those of them that its last 64, 16, 4 batches and its last one leave alone, of those that it changes
    sent        rows that cross in all, of those that it changes, if a swap begins with as many batches left as a run
                begins it, and with half as many, until one is, and each part arrives before the next begins
    left        rows of these that cross when the phase is over

The same figures are then computed, not drawn, for the whole tables of Criteo Kaggle, 3.4 million hot rows, and longer
phases: each lookup is taken to name a row by the skew of its table, and of a hot batch, a hot row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.hot_cells import HotCell, make_shape, sizes_of
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.config.schema import HotConfig
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import FoundHot, calibrate, find_hot
from hotrow.hot.order import batch_order
from hotrow.hot.turns import STEP_BYTES

SHARE, RATES, LATE = 0.1, (50, 10, 2), (64, 16, 4, 1)
LONG = (300, 3000)


def phases(dataset: PackedDataset, found: FoundHot, rate: float, batch_size: int) -> list[list[NDArray[np.int64]]]:
    """Returns for each phase of an epoch the hot rows that each of its batches changes, numbered over all tables."""
    config = HotConfig(schedule="fixed", rate=rate)
    order = batch_order(config, dataset.split("train"), found.is_hot, batch_size=batch_size, shuffle_seed=1)
    sizes = [table.num_embeddings for table in dataset.info.tables]
    first = dict(zip([table.name for table in dataset.info.tables], np.cumsum([0, *sizes[:-1]]), strict=True))
    made, left = [], order.num_batches
    while left:
        rows = []
        for batch in order.batches(0):
            own = []
            for feature in dataset.info.features:
                ids = batch.sparse.values[batch.sparse.span(feature.name)].numpy()
                own.append(first[feature.table] + ids[found.rows.rows[feature.table].contains(ids)])
            rows.append(np.unique(np.concatenate(own)))
            order.count()
        left -= len(rows)
        made.append(rows)
        order.end_turn()
    return made


def counted(batches: list[NDArray[np.int64]], most: int) -> dict[str, float]:
    """Returns the figures of a phase; most: how many batches may be left when its swap begins."""
    last = {}
    for number, rows in enumerate(batches):
        last.update(dict.fromkeys(rows.tolist(), number))
    ends = np.fromiter(last.values(), np.int64, len(last))
    begun = [1 << k for k in reversed(range(most.bit_length())) if 1 << k < len(batches)]
    cuts = [0, *(len(batches) - left for left in begun), len(batches)]
    parts = [len(np.unique(np.concatenate(batches[a:b]))) for a, b in pairwise(cuts)]
    late = {f"not late {k}": float((ends < len(batches) - k).mean()) for k in LATE}
    return {"changed": float(len(last)), **late, "sent": sum(parts) / len(last), "left": parts[-1] / len(last)}


def expected(num_batches: int, batch_size: int, *, hot_alone: bool) -> dict[str, float]:
    """Returns the figures of a phase of cold or of hot batches on the whole tables of Criteo Kaggle."""
    shape = criteo_kaggle(1, scale=1.0)
    chances = [np.arange(1, table.num_embeddings + 1) ** -float(table.zipf) for table in shape.tables]
    chances = [own / own.sum() for own in chances]
    all_rows = np.concatenate(chances)
    least = np.partition(all_rows, -int(SHARE * len(all_rows)))[-int(SHARE * len(all_rows))]
    hot = [own[own >= least] for own in chances]
    rates = batch_size * np.concatenate([own / own.sum() if hot_alone else own for own in hot])

    def touched(batches: int) -> float:
        return float(-np.expm1(-rates * batches).sum())

    changed = touched(num_batches)
    late = {f"not late {k}": (changed - touched(k)) / changed for k in LATE}
    most = (1 + int(len(rates) * 68) // STEP_BYTES).bit_length()
    cuts = [num_batches, *(1 << k for k in reversed(range(most))), 0]
    parts = [touched(a - b) for a, b in pairwise(cuts)]
    return {"changed": changed / len(rates), **late, "sent": sum(parts) / changed, "left": parts[-1] / changed}


def words(figures: dict[str, float]) -> str:
    """Returns them in a line."""
    return ", ".join(f"{key} {value:.1%}" for key, value in figures.items())


def main() -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=2048)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.data or make_shape("kaggle", given.samples, given.scale, Path(folder) / "data")
        dataset = PackedDataset.open(path)
        cell = HotCell(group="swaps", kind="coverage", source=str(path), rows="exact", amount=SHARE)
        record_bytes, table_bytes = sizes_of(cell, dataset)
        small, budget = cell.small_table_bytes, int(SHARE * table_bytes)
        try:
            hot = calibrate(dataset, "exact", budget, record_bytes=record_bytes, small_table_bytes=small)
        except ValueError as error:
            sys.exit(f"{path}: {error}")
        found = find_hot(dataset, hot)
        if not 0 < (num_hot := int(found.is_hot.sum())) < len(found.is_hot):
            lacks = "cold" if num_hot else "hot"
            sys.exit(f"{path}: with a tenth of the tables' bytes hot, no sample is {lacks}; there are no phases")
        print(f"{found.rows.num_rows:,} hot rows of {found.rows.num_bytes / 1e6:.1f} MB, {found.is_hot.mean():.1%} hot")
        for rate in RATES:
            made = phases(dataset, found, rate, given.batch_size)
            for name, own in (("cold", made[0::2]), ("hot", made[1::2])):
                rows = [counted(batches, 1 + found.rows.num_bytes // STEP_BYTES) for batches in own]
                means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
                means["changed"] /= found.rows.num_rows
                print(f"rate {rate} %, {name} phases of {len(own[0])} batches: {words(means)}")
        for num_batches in LONG:
            for name in ("cold", "hot"):
                means = expected(num_batches, given.batch_size, hot_alone=name == "hot")
                print(f"whole tables, {name} phases of {num_batches:,} batches: {words(means)}")


if __name__ == "__main__":
    main()
