"""`hotrow bench`: our kernels against torch's, alternating in one process, beside the limit of this machine.

The outputs of both sides are compared before anything is timed, and a cell whose outputs differ is refused. Then rounds
of (ours, peer) alternate. A round during which the hypervisor or another process had the processors does not count, as
long as enough other rounds are clean. The report gives medians of the times and of the rounds' ratios, the range of
four ratios in five, the number of clean rounds, and the time of a separate loop (native/limit.cpp) that only moves the
same rows. cells.py says what is compared. Every benchmark and study takes its rounds with `clean_rounds` or `cleanest`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from hotrow.base.machine import Disturbance, host_facts, versions
from hotrow.kernels import ops
from hotrow.study.cells import Cell, Contender, cells, timed

NUM_ROUNDS = 31
"""Enough that a burst of memory traffic by a neighbour, which we cannot detect, does not become the median."""
CLEAN_SHARE = 0.02
"""A round is clean if other processes had the processors for at most this share of its time."""
MOST_ROUNDS = 2
"""Limit on the rounds that are taken, as a multiple of the clean rounds that are wanted."""
T = TypeVar("T")


# ---- how clean a round was


@dataclass(frozen=True)
class Rounds(Generic[T]):
    """The results of the rounds that a figure is made of, and how many of all rounds were clean."""

    results: list[T]
    num_clean: int
    num_taken: int

    def counts(self) -> dict[str, int]:
        """Returns the fields of a report."""
        return {"rounds": len(self.results), "clean_rounds": self.num_clean, "taken_rounds": self.num_taken}


def cleanest(taken: Sequence[tuple[float, T]], num_rounds: int) -> Rounds[T]:
    """Chooses the rounds of a figure. taken: pairs of the share of time that others took, and a result.

    The clean rounds, if they are at least half of `num_rounds`; otherwise the `num_rounds` least disturbed, in order.
    """
    clean = [i for i, (share, _) in enumerate(taken) if share <= CLEAN_SHARE]
    kept = clean
    if 2 * len(clean) < num_rounds:
        kept = sorted(sorted(range(len(taken)), key=lambda i: taken[i][0])[:num_rounds])
    return Rounds([taken[i][1] for i in kept], len(clean), len(taken))


def wants_more(taken: Sequence[tuple[float, T]], num_rounds: int) -> bool:
    """Returns whether to take another round: not after `num_rounds` clean ones or MOST_ROUNDS times as many in all.

    Also not after `num_rounds` rounds if so few were clean that as many again would hardly make half of those wanted.
    """
    num_clean = cleanest(taken, num_rounds).num_clean
    if num_clean >= num_rounds or len(taken) >= MOST_ROUNDS * num_rounds:
        return False
    return len(taken) < num_rounds or 2 * MOST_ROUNDS * num_clean >= num_rounds


def clean_rounds(one_round: Callable[[int], T], num_rounds: int) -> Rounds[T]:
    """Takes rounds while `wants_more`; `one_round` receives the number of the round. See `cleanest`."""
    taken: list[tuple[float, T]] = []
    while wants_more(taken, num_rounds):
        disturbance = Disturbance()
        result = one_round(len(taken))
        taken.append((disturbance.share(), result))
    return cleanest(taken, num_rounds)


def how_clean(row: Mapping[str, Any]) -> str:
    """Describes the rounds of a report's row in words."""
    words = f"{row['clean_rounds']} of {row['taken_rounds']} rounds clean"
    return f"{words}: a disturbed machine" if is_disturbed(row) else words


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Returns whether a figure is made of rounds that were not clean, because too few were."""
    return bool(row["clean_rounds"] < row["rounds"])


# ---- cells


def check_agreement(name: str, ours: Contender, peer: Contender, *, batch: int = 0) -> None:
    """Runs both sides once on `batch`. Raises ValueError with the largest difference if their outputs differ."""
    for side in (ours, peer):
        side.prepare(batch)
        side.run()
    for i, (a, b) in enumerate(zip(ours.outputs(), peer.outputs(), strict=True)):
        # The sides add up to thousands of float32 numbers in different orders. One update is lr * |g|, about 1e-2.
        if not torch.allclose(a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max())):
            worst = float((a - b).abs().max())
            raise ValueError(
                f"cell {name}: output {i} differs from the peer's by up to {worst:.3g}; not timed. "
                "Run the law tests (make test): one of the two is wrong"
            )


def interleave(ours: Contender, peer: Contender, num_rounds: int) -> Rounds[tuple[float, float]]:
    """Runs both sides in every round, in alternating order; returns the seconds of (ours, peer)."""

    def one_round(number: int) -> tuple[float, float]:
        seconds = {}
        for side in (ours, peer) if number % 2 == 0 else (peer, ours):
            side.prepare(number)
            seconds[side is ours] = timed(side.run)
        return seconds[True], seconds[False]

    return clean_rounds(one_round, num_rounds)


def spread(values: Sequence[float]) -> list[float]:
    """Returns the first and the last tenth, between which four values of five lie."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return [tenths[0], tenths[-1]]


def measure_cell(cell: Cell, *, threads: int, num_rounds: int) -> dict[str, Any]:
    """Returns one row of the report. Raises ValueError if the outputs of the two sides differ."""
    limit_s = cell.limit_s(threads)
    ours, peer = cell.build()
    check_agreement(cell.name, ours, peer)
    rounds = interleave(ours, peer, num_rounds)
    ours_s, peer_s = map(statistics.median, zip(*rounds.results, strict=True))
    ratios = [b / a for a, b in rounds.results]
    note = None if cell.note is None else cell.note()
    told = {"target": cell.target, "most_over_limit": cell.most_over_limit, "note": note}
    return {
        "name": cell.name,
        "ours_ms": ours_s * 1e3,
        "peer": cell.peer,
        "peer_ms": peer_s * 1e3,
        "ratio": statistics.median(ratios),
        "spread": spread(ratios),
        "limit_ms": None if limit_s is None else limit_s * 1e3,
        "share_of_limit": None if limit_s is None else limit_s / ours_s,
        **{name: value for name, value in told.items() if value is not None},
        **rounds.counts(),
    }


def measure(chosen: Sequence[Cell], *, quick: bool) -> dict[str, Any]:
    """Measures `chosen` in this process, and prints a line on stderr after each cell."""
    rows = []
    for cell in chosen:
        row = measure_cell(cell, threads=torch.get_num_threads(), num_rounds=3 if quick else NUM_ROUNDS)
        print(format_row(row), file=sys.stderr, flush=True)
        rows.append(row)
        gc.collect()  # the tables hang on cycles of a few small objects, too few for Python to collect them by itself
    return {"cells": rows, "quick": quick, **circumstances()}


def circumstances() -> dict[str, Any]:
    """Returns what a figure depends on: machine, versions, backend, threads, huge pages, commit and date."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "machine": host_facts(),
        "versions": versions(),
        "backend": asdict(ops.backend()),
        "threads": torch.get_num_threads(),
        "transparent_huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else None,
        "commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def in_fresh_process(module: str, arguments: Sequence[str], threads: int | None) -> dict[str, Any]:
    """Runs `python -m module arguments` with torch's huge pages, and returns the JSON on its last line of output.

    torch reads THP_MEM_ALLOC_ENABLE and the number of threads when it loads, so they need a process of their own.
    """
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1", **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()  # the with block then waits, as the process may have gigabytes of files to remove
            raise
    if process.returncode:
        raise RuntimeError(f"{module} ended with status {process.returncode}; its message is above")
    report: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return report


def choose(names: Sequence[str] | None, available: Sequence[Cell]) -> list[Cell]:
    """Returns the cells called `names`, or all. Raises ValueError with the known names."""
    by_name = {cell.name: cell for cell in available}
    for name in names or ():
        if name not in by_name:
            raise ValueError(f"no cell is called {name!r}; choose from {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]


def run_bench(names: Sequence[str] | None = None, *, quick: bool = False, threads: int | None = None) -> dict[str, Any]:
    """Measures the cells called `names`, or all; returns `{"cells": [...], "machine": {...}, ...}`, ready for JSON.

    Each cell has name, ours_ms, peer, peer_ms (medians), ratio (the median over rounds of peer / ours), spread (the
    first and the last tenth of the ratios), limit_ms, share_of_limit (limit / ours), and counts of rounds (`Rounds`).
    Full cells need about 7 GB of memory, quick ones 0.5 GB.
    """
    choose(names, cells())
    arguments = [*(names or ()), *(["--quick"] if quick else [])]
    return in_fresh_process("hotrow.study.bench", arguments, threads)


def format_row(row: dict[str, Any]) -> str:
    """Returns the row of a cell as a line of text."""
    low, high = row["spread"]
    share = "" if row["share_of_limit"] is None else f"  {row['share_of_limit']:4.0%} of the limit"
    return (
        f"{row['name']:32s} {row['ours_ms']:9.2f} ms  peer {row['peer_ms']:9.2f} ms  "
        f"x {row['ratio']:5.2f} ({low:.2f} .. {high:.2f}){share}  {how_clean(row)}"
    )


def main() -> None:
    """Measures in this process; prints the report as one line of JSON."""
    parser = argparse.ArgumentParser(description="internal: `hotrow bench` runs this in a process of its own")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    chosen = choose(options.names or None, cells(quick=options.quick))
    print(json.dumps(measure(chosen, quick=options.quick)))


if __name__ == "__main__":
    main()
