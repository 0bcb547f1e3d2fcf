"""What slots by access counts gain over equal shares, in expected hits, and what planning takes: docs/memory-plan.md.

    python -m benchmarks.plan [--data FOLDER]

Two cases: tables of the Criteo-Kaggle cardinalities with each row's chance Zipf over its rank (2048 lookups of each
table per step), and the real Criteo sample (FOLDER, $HOTROW_DATA or ../shared/data holds it), prepared into a
temporary folder, whose slots are judged by its measured miss-ratio curves too. Nothing is trained: these are the
planner's own expectations, and for the real data what LRU caches of these sizes would have missed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.results import end_on_signals
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.sources.synthetic_config import KAGGLE_ROWS
from hotrow.inspect.accesses import open_accesses
from hotrow.inspect.hotness import measure_hotness
from hotrow.placement.budget import TableDemand, TableSlots, plan_slots
from hotrow.plan.solve import TableUse, expected_hit_rate, solve

BATCH_SIZE, DIM, STATE_BYTES = 2048, 64, 4
SHARES = (2, 4, 10, 32)


def demand(name: str, num_rows: int) -> TableDemand:
    return TableDemand(name, num_rows, 4 * DIM + STATE_BYTES)


def zipf_uses(exponent: float) -> list[TableUse]:
    uses, seconds = [], 0.0
    for t, num_rows in enumerate(KAGGLE_ROWS):
        weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
        counts = weights / weights.sum() * BATCH_SIZE
        start = time.process_time()
        uses.append(TableUse(demand(f"C{t + 1}", num_rows), counts, num_steps=1))
        seconds += time.process_time() - start
    total = sum(table.demand.num_rows * table.demand.record_bytes for table in uses)
    start = time.process_time()
    solve(uses, total // 10)
    print(
        f"\nplanned {sum(KAGGLE_ROWS):,} rows: counts read in {seconds:.2f} s of processor time, a budget solved in "
        f"{time.process_time() - start:.2f} s"
    )
    return uses


def print_table(title: str, uses: dict[str, Sequence[TableUse]]) -> None:
    """A line for each budget and each way to judge a plan: expected hit rates of equal shares, then of our plans."""
    first = next(iter(uses.values()))
    demands = [use.demand for use in first]
    total = sum(table.num_rows * table.record_bytes for table in demands)
    names = ["equal shares", *(f"by {name}" for name in uses)]
    print(f"\n{title}\n\n| DRAM | judged by | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for share in SHARES:
        plans: list[Sequence[TableSlots]] = [plan_slots(demands, total // share)]
        plans += [solve(own, total // share) for own in uses.values()]
        for judge, own in uses.items():
            rates = " | ".join(f"{expected_hit_rate(own, plan):.1%}" for plan in plans)
            print(f"| 1/{share} | {judge} | {rates} |")


def real_uses(source: Path, folder: Path) -> tuple[list[TableUse], list[TableUse]]:
    """The tables by counts, and by measured curves."""
    from hotrow.data.prepare.prepare import run_prepare

    run_prepare("criteo", str(source), folder)
    dataset = PackedDataset.open(folder)
    num_steps = dataset.split("train").num_rows / BATCH_SIZE
    hotness = measure_hotness(open_accesses(folder), batch_size=BATCH_SIZE)
    found: tuple[list[TableUse], list[TableUse]] = ([], [])
    for own in hotness.tables:
        name = own.table.name
        table, counts = demand(name, own.table.num_embeddings), dataset.counts(name)
        found[0].append(TableUse(table, counts, num_steps=num_steps))
        found[1].append(TableUse(table, counts, num_steps=num_steps, curve=own.locality.by_row))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("HOTROW_DATA", "../shared/data"))
    data = Path(parser.parse_args().data)
    end_on_signals()
    for exponent in (1.05, 0.9):
        print_table(f"Criteo-Kaggle cardinalities, Zipf {exponent}", {"counts": zipf_uses(exponent)})
    source = data / "criteo_terabyte_80k.tsv.gz"
    with tempfile.TemporaryDirectory() as folder:
        by_counts, by_curves = real_uses(source, Path(folder) / "criteo")
    print_table(source.name, {"counts": by_counts, "curves": by_curves})


if __name__ == "__main__":
    main()
