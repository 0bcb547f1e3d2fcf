"""What statistics of the label add to preparation: 26 columns of Criteo's shape, and the choice among pairs of all 39.

    python -m benchmarks.statistics_cost [--rows 500000] [--keys 1000000] [--rounds 5] [--out FILE]

Rows are those of benchmarks/parse.py, as CSV with a header; ids that are seen once get no row. A round times, in turn:

    plain       `hotrow prepare` by a schema without statistics
    statistics  the same schema with the statistics of the 26 columns of ids
    chosen      the guess of the schema, which chooses among the pairs of all columns, and preparation by it

The bars are 1.5 and 3 times `plain`. The labels are made up and tell nothing, so the guess finds no pair to keep.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import bench
from benchmarks.parse import NAMES, cardinalities, write_rows
from benchmarks.results import end_on_signals, record
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.criteo import CATEGORY_NAMES
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import Schema, parse_schema

BARS = {"statistics": 1.5, "chosen": 3.0}


def prepared(path: Path, schema: Schema) -> None:
    """Prepares the rows as a user would, into a folder that is removed."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        run_prepare("csv", path, Path(name) / "data", schema=schema, split="random")


def chosen(path: Path) -> None:
    prepared(path, guess_columns(path, label="label").schema())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    told = parser.parse_args()
    end_on_signals()
    with tempfile.TemporaryDirectory() as name:
        raw, path = Path(name) / "raw.tsv", Path(name) / "rows.csv"
        write_rows(raw, told.rows, cardinalities(told.keys), np.random.default_rng(1))
        path.write_bytes("\t".join(NAMES).encode() + b"\n" + raw.read_bytes())
        guessed = guess_columns(path, label="label").schema().to_json()
        plain = parse_schema(guessed | {"statistics": []}, where="plain")
        single = parse_schema(guessed | {"statistics": [[each] for each in CATEGORY_NAMES]}, where="statistics")
        contenders: dict[str, Callable[[], None]] = {
            "plain": lambda: prepared(path, plain),
            "statistics": lambda: prepared(path, single),
            "chosen": lambda: chosen(path),
        }

        def one_round(_: int) -> dict[str, float]:
            found = {}
            for contender, run in contenders.items():
                start = time.perf_counter()
                run()
                found[contender] = time.perf_counter() - start
            return found

        rounds = bench.clean_rounds(one_round, told.rounds)
    seconds = {each: statistics.median(one[each] for one in rounds.results) for each in contenders}
    cells = []
    for contender, bar in BARS.items():
        ratios = [one[contender] / one["plain"] for one in rounds.results]
        cell = {"name": contender, "s": seconds[contender], "plain_s": seconds["plain"]}
        cell |= {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)], "target": bar}
        cells.append({**cell, **rounds.counts()})
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| {contender} | {seconds[contender]:.1f} s | {statistics.median(ratios):.2f}x ({span}) | <= {bar}x |")
    record("statistics_cost", {"cells": cells, "rows": told.rows, **bench.circumstances()}, told.out)


if __name__ == "__main__":
    main()
