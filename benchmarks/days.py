"""Days: what training every day gives, costs and survives, in seven measurements.

    python -m benchmarks.days monolith DATA [--rows 2000000] [--drift 0.3] [--seeds 3] [--shards 10 50 100]
    python -m benchmarks.days drift FOLDER [--days 7] [--rows 48000] [--drift 0.5] [--pieces 24]
    python -m benchmarks.days thirty FOLDER [--days 30] [--rows 20000] [--drift 0.5]
    python -m benchmarks.days real FOLDER --label click [--time ts]
    python -m benchmarks.days kills FOLDER [--rounds 60] [--seed 1]
    python -m benchmarks.days growth FOLDER [--rows 100000000] [--new 10000000] [--dim 8] [--dram 1GiB]
    python -m benchmarks.days stream FOLDER [--events 20000000] [--scale 0.1] [--dim 64] [--dram 384MiB]

monolith: Table 2 of Monolith (arXiv 2209.07663) by its Algorithm 1. DATA is a file in Criteo's layout, whose rows are
taken in order, or `made-up`: --rows of the shape of Criteo Kaggle over seven days, of whose ids --drift change their
popularity. A DeepFM trains on 5/7 of the rows; then each shard is scored and trained on, beside the same model frozen.
drift: made-up days, scored by a model of the first day, by one that trains on each day once it is over, and by one that
trains on each of its --pieces, as on its hours.
thirty: made-up days, each trained from the day before, beside retraining on all days so far.
real: FOLDER has a file with a header for each day, in the order of their names; `hotrow days` trains on one after the
other, and each day is scored by the model of the day before and by the one before that.
kills: see days_kills.py. growth and stream: see days_size.py.

Files are made below FOLDER, monolith's in the system's folder for such, and removed. Prints a table in Markdown; --out
FILE adds the cells to a JSON file of results. python -m benchmarks.deltas measures what an export of a day costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import bench, days_kills, days_quality, days_size
from benchmarks.days_chain import without_warnings
from benchmarks.markdown import table
from benchmarks.results import end_on_signals, record

MADE_UP = "made-up"
Cells = list[dict[str, Any]]


def monolith(given: argparse.Namespace, folder: Path) -> Cells:
    is_made = given.place == MADE_UP
    rows = days_quality.made_up(folder / "rows.tsv", given.rows, given.drift) if is_made else Path(given.place)
    name = f"made_up_{given.drift:g}" if is_made else "criteo"
    return days_quality.monolith(rows, name, folder, seeds=given.seeds, shards=given.shards)


def drift(given: argparse.Namespace, folder: Path) -> Cells:
    options = {"num_days": given.days, "day_rows": given.rows, "drift": given.drift, "pieces": given.pieces}
    return days_quality.drift(folder, **options)


def thirty(given: argparse.Namespace, folder: Path) -> Cells:
    return [days_quality.thirty(folder, num_days=given.days, day_rows=given.rows, drift=given.drift)]


def real(given: argparse.Namespace, folder: Path) -> Cells:
    return days_quality.real(Path(given.place), folder, given.label, given.time)


def kills(given: argparse.Namespace, folder: Path) -> Cells:
    return [days_kills.kills(folder, given.rounds, given.seed)]


def growth(given: argparse.Namespace, folder: Path) -> Cells:
    return days_size.growth(folder, given.rows, given.new, given.dim, given.dram)


def stream(given: argparse.Namespace, folder: Path) -> Cells:
    return [days_size.stream(folder, given.events, given.scale, given.dim, given.dram)]


MEASURED: dict[str, tuple[Callable[..., Cells], Callable[[Mapping[str, Any]], dict[str, str]], dict[str, Any]]] = {
    "monolith": (
        monolith,
        days_quality.monolith_row,
        {"rows": 2_000_000, "drift": 0.3, "seeds": 3, "shards": [10, 50, 100]},
    ),
    "drift": (drift, days_quality.drift_row, {"days": 7, "rows": 48_000, "drift": 0.5, "pieces": 24}),
    "thirty": (thirty, days_quality.thirty_row, {"days": 30, "rows": 20_000, "drift": 0.5}),
    "real": (real, days_quality.real_row, {"label": "click", "time": ""}),
    "kills": (kills, days_kills.kills_row, {"rounds": 60, "seed": 1}),
    "growth": (growth, days_size.growth_row, {"rows": 100_000_000, "new": 10_000_000, "dim": 8, "dram": "1GiB"}),
    "stream": (stream, days_size.stream_row, {"events": 20_000_000, "scale": 0.1, "dim": 64, "dram": "384MiB"}),
}
"""By name: what makes the cells, what shows one, and the options with their defaults."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, (_, _, options) in MEASURED.items():
        own = verbs.add_parser(verb)
        own.add_argument("place", metavar="DATA" if verb == "monolith" else "FOLDER")
        for name, default in options.items():
            is_list = isinstance(default, list)
            kind = int if is_list else type(default)
            own.add_argument(f"--{name}", type=kind, default=default, nargs="+" if is_list else None)
        own.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    given = parser.parse_args()
    end_on_signals()
    measure, row, _ = MEASURED[given.verb]
    parent = None if given.verb == "monolith" else Path(given.place)
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    inside = None if given.verb == "real" else parent  # a folder in it would be a day
    with tempfile.TemporaryDirectory(prefix="hotrow-days-", dir=inside) as folder, without_warnings():
        cells = measure(given, Path(folder))
    rows = [row(cell) for cell in cells]
    print("\n".join(table(dict.fromkeys(rows[0], "right"), [list(each.values()) for each in rows])), flush=True)
    place = {} if given.place == MADE_UP else {given.place: "DATA" if parent is None else "FOLDER"}
    record("days", {"cells": cells, **bench.circumstances()}, given.out, places=place)
    sys.exit(1 if any(cell.get("failed") for cell in cells) else 0)


if __name__ == "__main__":
    main()
