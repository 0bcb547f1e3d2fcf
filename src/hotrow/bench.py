"""`hotrow bench`: our kernels against torch's, interleaved in one process, beside what this machine allows.

Before anything is timed the outputs of both sides are compared, and a cell whose outputs differ is refused. Then
rounds of (ours, peer) alternate; a round in which the hypervisor took the processor away counts for neither. Reported
are medians of the times and of the rounds' ratios, between which ratios four rounds of five lie, and the time of a
separate loop (native/limit.cpp) that only moves the same rows. What is compared is in hotrow.cells.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hotrow import ops
from hotrow.cells import Cell, Contender, cells, timed
from hotrow.host import host_facts, versions

NUM_ROUNDS = 31
"""Enough that a neighbour's burst on the same memory, which nothing here can see, does not become the median."""
BUSY_SHARE = 0.05
"""Of a measurement's time, that in which others had the processors: from here on it is said to have taken too long."""
T = TypeVar("T")


def stolen_s() -> float:
    """Processor seconds the hypervisor took from this machine since it started; 0 where that is not told."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text().split("\n", 1)[0].split()[8])
    return ticks / os.sysconf("SC_CLK_TCK")


def waited_s() -> float:
    """Seconds for which this process's threads were ready to run and others had the processors; 0 where not told.

    Summed over the threads that it has now, from each one's start.
    """
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread that ended, a kernel without the numbers
            waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9


def check_agreement(name: str, ours: Contender, peer: Contender, *, batch: int = 0) -> None:
    """Run both once on `batch` and compare; raises ValueError naming the cell and the largest difference."""
    for side in (ours, peer):
        side.prepare(batch)
        side.run()
    for i, (a, b) in enumerate(zip(ours.outputs(), peer.outputs(), strict=True)):
        # Sums in another order: float32 rounding of up to thousands of addends; one update is lr * |g|, about 1e-2.
        if not torch.allclose(a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max())):
            worst = float((a - b).abs().max())
            raise ValueError(
                f"cell {name}: output {i} differs from the peer's by up to {worst:.3g}; not timed. "
                "Run the law tests (make test): one of the two is wrong"
            )


@dataclass(frozen=True)
class Rounds:
    """Seconds of the rounds that counted, and how many did not."""

    ours_s: list[float]
    peer_s: list[float]
    num_stolen: int


def clean_rounds(one_round: Callable[[int], T], num_rounds: int) -> tuple[list[T], int]:
    """What `num_rounds` rounds without stolen time returned, and how many had some; a round is given its number.

    Gives up after four times as many. With fewer than three clean rounds by then, all count: better than none.
    """
    clean: list[T] = []
    stolen: list[T] = []
    for number in range(4 * num_rounds):
        before, start = stolen_s(), time.perf_counter()
        result = one_round(number)
        is_stolen = stolen_s() - before > 0.01 * (time.perf_counter() - start)
        (stolen if is_stolen else clean).append(result)
        if len(clean) == num_rounds:
            break
    return clean if len(clean) >= 3 else clean + stolen, len(stolen)


def interleave(ours: Contender, peer: Contender, num_rounds: int) -> Rounds:
    """Alternate the two, swapping who goes first, until `num_rounds` rounds passed without stolen time."""

    def one_round(number: int) -> tuple[float, float]:
        seconds = {}
        for side in (ours, peer) if number % 2 == 0 else (peer, ours):
            side.prepare(number)
            seconds[side is ours] = timed(side.run)
        return seconds[True], seconds[False]

    kept, num_stolen = clean_rounds(one_round, num_rounds)
    return Rounds([a for a, _ in kept], [b for _, b in kept], num_stolen)


def measure_cell(cell: Cell, *, threads: int, num_rounds: int) -> dict[str, Any]:
    """One row of the report; raises ValueError where the outputs disagree."""
    limit_s = cell.limit_s(threads)
    ours, peer = cell.build()
    check_agreement(cell.name, ours, peer)
    rounds = interleave(ours, peer, num_rounds)
    ours_s, peer_s = statistics.median(rounds.ours_s), statistics.median(rounds.peer_s)
    ratios = [b / a for a, b in zip(rounds.ours_s, rounds.peer_s, strict=True)]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return {
        "name": cell.name,
        "ours_ms": ours_s * 1e3,
        "peer": cell.peer,
        "peer_ms": peer_s * 1e3,
        "ratio": statistics.median(ratios),
        "spread": [tenths[0], tenths[-1]],
        "limit_ms": None if limit_s is None else limit_s * 1e3,
        "share_of_limit": None if limit_s is None else limit_s / ours_s,
        **({} if cell.target is None else {"target": cell.target}),
        **({} if cell.most_over_limit is None else {"most_over_limit": cell.most_over_limit}),
        **({} if cell.note is None else {"note": cell.note()}),
        "rounds": len(ratios),
        "stolen_rounds": rounds.num_stolen,
    }


def measure(chosen: Sequence[Cell], *, quick: bool) -> dict[str, Any]:
    """Measure `chosen` in this process, one line per cell on stderr as they finish."""
    rows = []
    for cell in chosen:
        row = measure_cell(cell, threads=torch.get_num_threads(), num_rounds=3 if quick else NUM_ROUNDS)
        print(format_row(row), file=sys.stderr, flush=True)
        rows.append(row)
        gc.collect()  # gigabytes of tables hang on cycles of a few small objects: too few to be collected by themselves
    return {"cells": rows, "quick": quick, **circumstances()}


def circumstances() -> dict[str, Any]:
    """What a figure means nothing without: machine, versions, backend, threads, huge pages, commit, date."""
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
    """Run `python -m module arguments` with torch's huge pages on, and return the JSON it prints last.

    THP_MEM_ALLOC_ENABLE and the thread count are read when torch loads, so they need a process of their own.
    """
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with status {done.returncode}; its message is above")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def choose(names: Sequence[str] | None, available: Sequence[Cell]) -> list[Cell]:
    """The cells called `names`, all where None; raises ValueError with the known names."""
    by_name = {cell.name: cell for cell in available}
    for name in names or ():
        if name not in by_name:
            raise ValueError(f"no cell is called {name!r}; choose from {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]


def run_bench(names: Sequence[str] | None = None, *, quick: bool = False, threads: int | None = None) -> dict[str, Any]:
    """Measure the cells called `names` (all by default): `{"cells": [...], "machine": {...}, ...}`, JSON-ready.

    Each cell: name, ours_ms, peer, peer_ms (medians), ratio (the median over rounds of peer / ours), spread (the first
    and the last tenth of the rounds' ratios), limit_ms, share_of_limit (limit / ours), rounds, stolen_rounds.
    Full cells need about 7 GB of memory, `quick` ones 0.5 GB.
    """
    choose(names, cells())
    arguments = [*(names or ()), *(["--quick"] if quick else [])]
    return in_fresh_process("hotrow.bench", arguments, threads)


def format_row(row: dict[str, Any]) -> str:
    """One cell as a line for people."""
    low, high = row["spread"]
    share = "" if row["share_of_limit"] is None else f"  {row['share_of_limit']:4.0%} of the limit"
    stolen = f"  {row['stolen_rounds']} stolen rounds" if row["stolen_rounds"] else ""
    return (
        f"{row['name']:32s} {row['ours_ms']:9.2f} ms  peer {row['peer_ms']:9.2f} ms  "
        f"x {row['ratio']:5.2f} ({low:.2f} .. {high:.2f}){share}{stolen}"
    )


def main() -> None:
    """The process that measures: cell names and --quick in, one JSON line out."""
    parser = argparse.ArgumentParser(description="internal: `hotrow bench` runs this in a process of its own")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    chosen = choose(options.names or None, cells(quick=options.quick))
    print(json.dumps(measure(chosen, quick=options.quick)))


if __name__ == "__main__":
    main()
