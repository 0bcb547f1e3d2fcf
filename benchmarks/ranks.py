"""Several processes that train one model: what they send, and how fast they are beside torchrec's.

    python -m benchmarks.ranks --out docs/measurements/benchmarks.json [--quick] [CELL ...]

`wire_*`: bytes that R ranks send in a training step, by the kernel's count of each TCP connection (tcpi_bytes_sent: all
data of the process, without headers of TCP and IP), less what they send when idle. They stand beside the least there
is to send: every distinct row that a rank lacks comes once, one gradient for each goes back, and 2 (R - 1) / R of the
dense gradients. Ids, which that does not contain, are counted by hotrow and taken off.
`rows_vs_pooled_*`: the bytes of the tables' part of a step on 4 ranks that send rows, beside those of 4 ranks that send
pooled vectors, both counted likewise; both contain ids. Tables at Criteo's cardinalities, Zipf 1.05, a share of each
table's rows on every rank; a table of which every rank has every row is not pooled.
`ranks_*_vs_process`: training steps of 2 processes of one thread over MPI beside those of one process of two threads on
the same batches, in turns; with `_4` and `_8` of so many processes, and with `_batch_128` of 2 processes and batches of
128 beside one process of one thread. `added_cpu_ms` is what a rank takes of its processor beyond a process of one
thread that trains a rank's part of the batch alone.
`mpi_vs_gloo_*`: training steps of R processes with a thread each over MPI and over gloo, in turns.
`ranks_*_vs_torchrec`: training steps of 2 processes with a thread each over gloo, hotrow's and torchrec's, in turns;
if MPI is installed, hotrow's over MPI beside them.
hotrow sends rows or pooled vectors, whatever its planner counts to be fewer bytes. Losses of the first steps are
compared. torchrec shares its tables row by row or table by table, with its pipeline or
without; all four are tried, and the fastest counts.
`not_hidden_*`: 2 ranks in two network namespaces that a link of 10 Gbit/s joins. The same steps are taken with what
ranks tell each other noted before, so that nothing is sent and nothing waited for; the difference, as a share of the
step over the link, is what the network takes. It contains what the kernel's TCP takes of the processors. After a
pause the link lets 125 KB through at once, what passes in 0.1 ms: with less it does not carry its rate.

Cells whose peer or whose link is not to be had here are skipped, with the reason. Measure in an environment with
torchrec (`pip install --no-deps torchrec` beside extra `bench`), and as root.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import bench, mpi_start
from benchmarks.links import Link, LinkError
from benchmarks.rank_sides import RankWork
from benchmarks.rank_worker import Group
from benchmarks.results import end_on_signals, record
from benchmarks.step_shapes import NUM_BATCHES, SHAPES

MAX_OVER_LEAST = 1.05
"""Bytes on the wire over the least there are, by our own promise."""
COUNTED_STEPS, QUICK_STEPS = 8, 2
POOLED_RANKS, POOLED_BATCH, QUICK_BATCH = 4, 16_384, 256
PREFIXES = (0.0, 0.01, 0.1)
"""Shares of each table's rows that every rank holds."""
MIN_FEWER = 5.0
"""Bytes of pooled vectors over those of rows, by our own promise."""
MIN_SPEED, SMALL_BATCH, MIN_SMALL_SPEED = 0.92, 128, 1.3
"""Least speed of two ranks over that of one process with as many threads, and in small batches over that of one process
of one thread, by our own promise."""
TARGETS = {"embedding-bound": 2.0, "kaggle": 1.4}
"""Least ratio torchrec / hotrow that is promised, by shape."""
WAYS = {
    f"{sharding.replace('_', '-')}{', ids ahead' if ahead else ''}": {"sharding": sharding, "ahead": ahead}
    for sharding in ("row_wise", "table_wise")
    for ahead in (False, True)
}
"""How torchrec may share tables, and whether its pipeline exchanges the ids of the next batch during a step."""
COMPARED_STEPS, CLOSE = 5, 1e-4
"""How many steps' losses are compared, and how far apart they may lie."""
WARM_UP, ROUND_STEPS, ROUNDS, QUICK_ROUNDS = 5, 10, 31, 3
MIN_ROUND_SAMPLES = 20_000
"""Samples that each side trains on in a round: what disturbs a shorter round cannot be told from the round."""
TRIED_ROUNDS = 3
"""Rounds in which each way of the peer is tried, to find its fastest."""
LINK_BITS_PER_S = 1e10
LINK_ROUNDS = 11
MAX_NOT_HIDDEN = 0.2
"""Share of a step, by our own promise."""
STILL_LR = 1e-9
"""A rate at which answers noted at the first step are still those of the last."""


# ---- bytes


def counted(group: Group, *, steps: int, tables_only: bool) -> dict[str, Any]:
    """Returns what all ranks sent in a step: by the kernel, by hotrow, when idle, and at least; bytes."""
    group.ask(do="count", first=0, steps=1, tables_only=tables_only)  # ranks connect when they first send
    answers = group.ask(do="count", first=1, steps=steps, tables_only=tables_only)
    by_purpose: Counter[str] = Counter()
    for answer in answers:
        by_purpose.update(answer["counted_bytes"])
    idle = sum(answer["idle_bytes"] for answer in answers)
    return {
        "sent_bytes": (sum(answer["sent_bytes"] for answer in answers) - idle) / steps,
        "idle_bytes": idle,
        "counted_bytes": {purpose: num / steps for purpose, num in by_purpose.items()},
        "least_bytes": sum(answer["least_bytes"] for answer in answers) / steps,
        "steps": steps,
    }


def wire(name: str, shape: str, num_ranks: int, *, quick: bool) -> dict[str, Any]:
    """Returns the cell of the bytes of a training step."""
    work = RankWork(shape=shape, num_ranks=num_ranks, batch_size=SHAPES[shape].batch_size, small=quick)
    with Group("hotrow", work).start() as group:
        found = counted(group, steps=QUICK_STEPS if quick else COUNTED_STEPS, tables_only=False)
    ids_bytes = found["counted_bytes"].get("ids", 0.0)
    over = (found["sent_bytes"] - ids_bytes) / found["least_bytes"]
    told = f"{found['sent_bytes']:,.0f} bytes, {ids_bytes:,.0f} of them ids; at least {found['least_bytes']:,.0f}"
    print(f"{name}: {told}: {over:.4f}x", file=sys.stderr, flush=True)
    facts = {"num_ranks": num_ranks, "batch_size": work.batch_size, "ids_bytes": ids_bytes}
    return {"name": name, **facts, **found, "over_least": over, "most": MAX_OVER_LEAST}


def rows_vs_pooled(name: str, shape: str, *, quick: bool) -> dict[str, Any]:
    """Returns the cell of the bytes of rows beside those of pooled vectors."""
    batch_size = QUICK_BATCH if quick else POOLED_BATCH
    work = RankWork(shape=shape, num_ranks=POOLED_RANKS, batch_size=batch_size, small=quick)
    by_prefix = []
    for prefix in PREFIXES:
        with Group("hotrow", work, prefix=prefix).start() as group:
            found = counted(group, steps=QUICK_STEPS, tables_only=True)
        with Group("hotrow", work, prefix=prefix, pooled="all").start() as group:
            pooled = counted(group, steps=QUICK_STEPS, tables_only=True)["sent_bytes"]
        sent = {key: found[key] for key in ("sent_bytes", "counted_bytes")}
        by_prefix.append({"prefix": prefix, **sent, "pooled_bytes": pooled, "fewer": pooled / found["sent_bytes"]})
        told = f"rows {found['sent_bytes']:,.0f} bytes, pooled {pooled:,.0f}"
        print(f"{name}, {prefix:.0%} on every rank: {told}: {by_prefix[-1]['fewer']:.2f}x", file=sys.stderr, flush=True)
    best = max(by_prefix, key=lambda each: each["fewer"])
    facts = {"num_ranks": POOLED_RANKS, "batch_size": batch_size, "by_prefix": by_prefix}
    return {"name": name, **facts, **best, "least": MIN_FEWER}


# ---- beside torchrec


def vs_torchrec(name: str, shape: str, *, quick: bool) -> dict[str, Any]:
    """Returns the cell of steps beside torchrec's at its fastest. Raises ValueError if losses differ."""
    work = RankWork(shape=shape, num_ranks=2, batch_size=128 if quick else SHAPES[shape].batch_size, small=quick)
    tried = {way: beside(name, work, way, TRIED_ROUNDS) for way in WAYS}
    peer_ms = {way: found["peer_ms"] for way, found in tried.items()}
    best = min(peer_ms, key=lambda way: peer_ms[way])
    row = {
        "name": name,
        "peer": f"torchrec's DistributedModelParallel over gloo (FBGEMM CPU, SGD), {best}",
        **(tried[best] if quick else beside(name, work, best, ROUNDS)),
        "limit_ms": None,
        "share_of_limit": None,
        "target": TARGETS[shape],
        "tried_ms": peer_ms,
    }
    print(bench.format_row(row), file=sys.stderr, flush=True)
    return row


def beside(name: str, work: RankWork, way: str, num_rounds: int) -> dict[str, Any]:
    """Returns hotrow's figures beside torchrec's, which shares tables in a way of WAYS."""
    sides = {"ours": Group("hotrow", work, pooled="planned"), "peer": Group("torchrec", work, **WAYS[way])}
    if mpi_start.mpiexec() is not None:
        sides["mpi"] = Group("hotrow", work, over_mpi=True, pooled="planned")
    return in_turns(f"{name}, {way}", sides, num_rounds)


def mpi_vs_gloo(name: str, shape: str, num_ranks: int, *, quick: bool) -> dict[str, Any]:
    """Returns the cell of steps over MPI beside those over gloo. Raises ValueError if losses differ."""
    batch_size = 128 if quick else SHAPES[shape].batch_size
    work = RankWork(shape=shape, num_ranks=num_ranks, batch_size=batch_size, small=quick)
    over_gloo = Group("hotrow", work, pooled="planned")
    sides = {"ours": Group("hotrow", work, over_mpi=True, pooled="planned"), "peer": over_gloo}
    found = in_turns(name, sides, QUICK_ROUNDS if quick else LINK_ROUNDS)
    return {"name": name, "num_ranks": num_ranks, "batch_size": batch_size, **found}


def vs_process(
    name: str,
    shape: str,
    num_ranks: int = 2,
    batch_size: int | None = None,
    threads: int = 2,
    least: float | None = MIN_SPEED,
    *,
    quick: bool,
) -> dict[str, Any]:
    """Returns the cell of ranks over MPI beside one process, and what sharing takes of a rank's processor.

    batch_size: of all ranks together; the shape's by default. threads: of the one process. Raises ValueError if losses
    differ.
    """
    batch_size = batch_size or SHAPES[shape].batch_size
    batch_size = min(batch_size, 128) if quick else batch_size
    work = RankWork(shape=shape, num_ranks=num_ranks, batch_size=batch_size, small=quick)
    alone = replace(work, num_ranks=1)
    sides = {
        "ours": Group("hotrow", work, over_mpi=True, pooled="planned"),
        "peer": Group("hotrow", replace(alone, threads=threads)),
        "part": Group("hotrow", replace(alone, batch_size=batch_size // num_ranks)),
    }
    found = in_turns(name, sides, QUICK_ROUNDS if quick else LINK_ROUNDS)
    added_ms = found["ours_cpu_ms"] - found["part_cpu_ms"]
    facts = {"batch_size": batch_size, "num_ranks": num_ranks, "peer_threads": threads, "least": least}
    return {"name": name, **facts, **found, "added_cpu_ms": added_ms}


def in_turns(name: str, sides: dict[str, Group], num_rounds: int) -> dict[str, Any]:
    """Starts the sides, "ours" and "peer" among them, compares their losses, and returns the figures of their steps."""
    with ExitStack() as stack:
        for side in sides.values():
            stack.enter_context(side).start()
        batch_size = sides["ours"].work.batch_size
        compare(name, [side for side in sides.values() if side.work.batch_size == batch_size])
        found = row_of(taken_in_turns(sides, num_rounds))
    told = ", ".join(f"{what} {found[f'{what}_ms']:.1f} ms (CPU {found[f'{what}_cpu_ms']:.1f})" for what in sides)
    print(f"{name}: {told}; {bench.how_clean(found)}", file=sys.stderr, flush=True)
    return found


def compare(name: str, sides: Sequence[Group]) -> None:
    """Trains all sides on the same batches. Raises ValueError unless the losses of the whole batches are those of the
    first side."""
    own, *others = [
        [answer["losses"] for answer in side.ask(do="train", first=0, steps=COMPARED_STEPS)] for side in sides
    ]
    for parts in others:
        theirs = [statistics.mean(losses) for losses in zip(*parts, strict=True)]  # ranks have equally many samples
        for step, (a, b) in enumerate(zip(own[0], theirs, strict=True)):
            if not abs(a - b) <= CLOSE:
                raise ValueError(
                    f"cell {name}: the loss of step {step} is {a:.6f}, another side's {b:.6f}; not timed. Run the law "
                    "tests (make test): one of the two is wrong"
                )


def taken_in_turns(sides: dict[str, Group], num_rounds: int) -> bench.Rounds[dict[str, float]]:
    """Returns milliseconds of a step on each side, of the clock and of a rank's processor; while one side trains, the
    others wait."""
    for side in sides.values():
        side.ask(do="train", first=COMPARED_STEPS, steps=WARM_UP)

    steps = max(ROUND_STEPS, MIN_ROUND_SAMPLES // sides["ours"].work.batch_size)

    def one_round(number: int) -> dict[str, float]:
        found = {}
        for name, side in list(sides.items())[:: 1 if number % 2 == 0 else -1]:
            answers = side.ask(do="train", first=number * steps, steps=steps)
            found[f"{name}_ms"] = 1e3 * max(answer["seconds"] for answer in answers) / steps
            found[f"{name}_cpu_ms"] = 1e3 * max(answer["cpu_s"] for answer in answers) / steps
        return found

    return clean_rounds(one_round, num_rounds, [pid for side in sides.values() for pid in side.pids])


def clean_rounds(one_round: Callable[[int], Any], num_rounds: int, pids: Sequence[int]) -> bench.Rounds[Any]:
    """Takes rounds as bench.clean_rounds, with the processes `pids` as our own."""
    taken: list[tuple[float, Any]] = []
    while bench.wants_more(taken, num_rounds):
        disturbance = bench.Disturbance(pids)
        result = one_round(len(taken))
        taken.append((disturbance.share(), result))
    return bench.cleanest(taken, num_rounds)


def row_of(rounds: bench.Rounds[dict[str, float]]) -> dict[str, Any]:
    """Returns medians, ratio and spread of rounds."""
    medians = {key: statistics.median(each[key] for each in rounds.results) for key in rounds.results[0]}
    ratios = [each["peer_ms"] / each["ours_ms"] for each in rounds.results]
    return {**medians, "ratio": statistics.median(ratios), "spread": bench.spread(ratios), **rounds.counts()}


# ---- time that is not hidden


def not_hidden(name: str, shape: str, *, quick: bool) -> dict[str, Any]:
    """Returns the cell of the share of a step that the network takes. Raises LinkError, and ValueError if losses with
    noted answers differ."""
    batch_size = 128 if quick else SHAPES[shape].batch_size
    work = RankWork(shape=shape, num_ranks=2, batch_size=batch_size, small=quick, lr=STILL_LR)
    with ExitStack() as stack:
        link = stack.enter_context(Link())
        group = stack.enter_context(Group("hotrow", work, pooled="planned"))
        group.start(host=link.host, before=[link.before(rank) for rank in (0, 1)])
        group.ask(do="train", first=0, steps=NUM_BATCHES)
        noted = group.ask(do="listen", batches=NUM_BATCHES)
        replayed = group.ask(do="replay", batches=NUM_BATCHES, steps=NUM_BATCHES)
        for a, b in zip(noted, replayed, strict=True):
            if not all(abs(x - y) <= CLOSE for x, y in zip(a["losses"], b["losses"], strict=True)):
                raise ValueError(f"cell {name}: the losses with noted answers differ from those over the link")
        speeds = {}
        for what, bits_per_s in (("link", LINK_BITS_PER_S), ("unlimited", None)):
            link.limit(bits_per_s)
            speeds[f"{what}_bits_per_s"] = 8 * min(each["bytes_per_s"] for each in group.ask(do="link"))

        def one_round(number: int) -> dict[str, float]:
            live = {"do": "train", "first": 0, "steps": NUM_BATCHES}
            seconds = {}
            for what, bits_per_s in (("link", LINK_BITS_PER_S), ("unlimited", None)):
                link.limit(bits_per_s)
                seconds[what] = group.seconds(**live)
            seconds["without"] = group.seconds(do="replay", batches=NUM_BATCHES, steps=NUM_BATCHES)
            return {what: each / NUM_BATCHES for what, each in seconds.items()}

        rounds = clean_rounds(one_round, QUICK_ROUNDS if quick else LINK_ROUNDS, group.pids)
    shares = [1 - each["without"] / each["link"] for each in rounds.results]
    ms = {f"{what}_ms": 1e3 * statistics.median(r[what] for r in rounds.results) for what in rounds.results[0]}
    facts = {"num_ranks": 2, "batch_size": batch_size, **speeds, **ms}
    row = {"name": name, **facts, "not_hidden": statistics.median(shares), "spread": bench.spread(shares)}
    row |= {"most": MAX_NOT_HIDDEN, **rounds.counts()}
    told = ", ".join(f"{what.removesuffix('_ms')} {value:.1f} ms" for what, value in ms.items())
    print(f"{name}: {row['not_hidden']:.1%} not hidden; {told}; {bench.how_clean(row)}", file=sys.stderr, flush=True)
    return row


# ---- the command


@dataclass(frozen=True)
class Cell:
    """A cell by name."""

    name: str
    measure: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    modules: tuple[str, ...] = ()
    """What must be importable."""

    def run(self, *, quick: bool) -> dict[str, Any] | None:
        """Returns what was measured; None, with the reason on stderr, if that cannot be here."""
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        reason = f"not installed here: {', '.join(absent)}" if absent else None
        try:
            if reason is None:
                return self.measure(self.name, *self.arguments, quick=quick)
        except LinkError as error:
            reason = str(error)
        print(f"skipped: {self.name}: {reason}", file=sys.stderr, flush=True)
        return None


def rank_cells() -> list[Cell]:
    """Returns all of them."""
    torchrec, mpi = ("torchrec", "fbgemm_gpu"), ("mpi4py",)
    return [
        *(Cell(f"wire_{shape}_{n}_ranks", wire, (shape, n)) for shape in ("kaggle", "sc20-small") for n in (2, 4)),
        *(Cell(f"rows_vs_pooled_{shape}", rows_vs_pooled, (shape,)) for shape in ("kaggle", "terabyte")),
        *(Cell(f"mpi_vs_gloo_kaggle_{n}_ranks", mpi_vs_gloo, ("kaggle", n), mpi) for n in (2, 4)),
        *(Cell(f"ranks_{shape}_vs_process", vs_process, (shape,), mpi) for shape in SHAPES),
        *(Cell(f"ranks_kaggle_{n}_vs_process", vs_process, ("kaggle", n, None, 2, None), mpi) for n in (4, 8)),
        Cell(
            f"ranks_kaggle_batch_{SMALL_BATCH}_vs_process",
            vs_process,
            ("kaggle", 2, SMALL_BATCH, 1, MIN_SMALL_SPEED),
            mpi,
        ),
        *(Cell(f"ranks_{shape}_vs_torchrec", vs_torchrec, (shape,), torchrec) for shape in TARGETS),
        Cell("not_hidden_sc20-small", not_hidden, ("sc20-small",)),
    ]


def main() -> None:
    """Measure and add the result to the file of results."""
    cells = {cell.name: cell for cell in rank_cells()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CELL", help="cells to measure; all where none is named")
    parser.add_argument("--quick", action="store_true", help="small tables: tries the cells, measures nothing of worth")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    options = parser.parse_args()
    if unknown := [each for each in options.names if each not in cells]:
        parser.error(f"no cell is called {unknown[0]!r}; choose from {', '.join(cells)}")
    end_on_signals()
    rows = [cells[name].run(quick=options.quick) for name in options.names or cells]
    report = {"cells": [row for row in rows if row is not None], "quick": options.quick, **bench.circumstances()}
    record("ranks", json.loads(json.dumps(report)) | {"threads": 1}, options.out)


if __name__ == "__main__":
    main()
