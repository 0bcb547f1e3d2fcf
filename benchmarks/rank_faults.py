"""Rounds of faults: one of three ranks is killed or stopped at a random moment, and the run goes on to the same bits.

    python -m benchmarks.rank_faults [--rounds 100] [--seed 1] [--folder DIR] [--transport mpi]
    python -m benchmarks.rank_faults --ends 300 [--transport mpi]

A round trains on three ranks, sends SIGKILL or SIGSTOP to one of them at a random moment (before the first step, in a
collective, while a checkpoint is written), waits until the others have named it and ended, and continues the run on one
to four ranks. Its losses, its metrics and every byte of its last checkpoint must be those of a run on one process that
nothing happened to. In half of the rounds, drawn at random too, rows lie in tiers: a rank has 256 KiB of DRAM for them,
a third of what they take. A line a round; the last line is JSON: how many rounds, the slowest naming, what differed or
hung. The exit code is 1 if anything did.

`--ends 300` has no faults: two ranks train 300 short runs, one after another, and end as commands do. It counts exit
codes that are not 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rank_runs import HANG_S, TRANSPORTS, Transport, differing, outcome, session, wait, whole_ends
from hotrow.parallel.heartbeat import LOST
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.folder import CONFIG, RUN

RANKS = 3
MAX_RANKS = 4
PROMISED_S = 5.0
"""A lost rank is named within."""
STEPS = 40
ENDS: dict[Transport, tuple[int, ...]] = {"gloo": (LOST,), "mpi": (LOST, 128 + signal.SIGKILL)}
"""How ranks end after one was lost; mpiexec ends as the first process that did, which may be the lost one."""


class Round(NamedTuple):
    """What happened in one round."""

    signal: str
    rank: int
    tiers: bool
    """Whether rows lay in tiers."""
    delay_s: float
    """From the moment when the run's folder appeared."""
    named_s: float
    """From the signal until the last of the others had said which rank it was."""
    step: int
    """Of the newest checkpoint then; -1: there was none."""
    ranks: int
    """How many continued."""
    problems: tuple[str, ...]


def settings(data: Path, run: Path, *, tiers: bool) -> dict[str, Any]:
    return {
        "data": str(data),
        "run": str(run),
        "model": {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [16], "top_mlp": [16]},
        "optimizer": {"dense": {"name": "adam", "lr": 0.01}},
        "train": {
            "batch_size": 64,
            "epochs": 100,
            "max_steps": STEPS,
            "eval_every": 15,
            "log_every": 5,
            "micro_batches": MAX_RANKS,
            "threads": 1,
        },
        "checkpoint": {"every": 4},
        "memory": {"dram": "256KiB", "ssd": str(run.parent / "rows"), "force": True} if tiers else "dram",
    }


def one_round(
    number: int,
    data: Path,
    folder: Path,
    expected: Mapping[str, str],
    longest_s: Mapping[bool, float],
    *,
    seed: int,
    transport: Transport,
) -> Round | None:
    """Returns what happened, or None if the run had ended before the signal came. longest_s: of a run, by `tiers`."""
    drawn = random.Random(seed * 1_000_003 + number)
    sent, tiers = drawn.choice([signal.SIGKILL, signal.SIGSTOP]), drawn.choice([False, True])
    victim, delay_s, ranks = drawn.randrange(RANKS), drawn.uniform(0, longest_s[tiers]), drawn.randint(1, MAX_RANKS)
    others = [rank for rank in range(RANKS) if rank != victim]
    given, problems = settings(data, folder / "run", tiers=tiers), []
    with session(RANKS, given, folder / "first", transport) as first:
        wait((folder / "run" / RUN).exists)
        time.sleep(delay_s)
        began_s = time.monotonic()
        if first.processes[victim].exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(first.processes[victim].pid or 0, sent)

        def is_named() -> bool:
            # mpiexec tells at once of a process that was killed, and ends the others, maybe before they could.
            return f"process rank {victim} with" in first.told_by_mpiexec() or all(
                f"rank {victim} (" in first.told(rank) for rank in others
            )

        wait(lambda: is_named() or any(first.processes[rank].exitcode == 0 for rank in others))
        named_s = time.monotonic() - began_s
        if not is_named() and any(first.processes[rank].exitcode == 0 for rank in others):
            return None
        if not is_named():
            problems.append(f"rank {victim} was not named")
        for rank in others:
            first.processes[rank].join(HANG_S)
        if any(first.processes[rank].exitcode not in ENDS[transport] for rank in others):
            problems.append(f"the others did not end with {ENDS[transport]}: {first.ends()}")
    if named_s > PROMISED_S:
        problems.append(f"named after {named_s:.1f} s")
    step = max(list_checkpoints(folder / "run" / "checkpoints"), default=-1)
    if not (folder / "run" / CONFIG).is_file():
        shutil.rmtree(folder / "run")  # as its error says: it ended before its first step
    with session(ranks, given, folder / "second", transport if ranks > 1 else "gloo") as second:
        if second.join() != [0] * ranks:
            problems.append(f"{ranks} ranks did not continue: {second.ends()}")
        else:
            problems += [f"{name} differs" for name in differing(expected, outcome(folder / "run"))]
    return Round(sent.name, victim, tiers, delay_s, named_s, step, ranks, tuple(problems))


def rounds(
    data: Path, folder: Path, num_rounds: int, *, seed: int = 1, transport: Transport = "gloo"
) -> Iterator[Round]:
    """Yields `num_rounds` rounds on the packed dataset `data`, in the empty folder `folder`."""
    expected, _ = untouched(data, folder / "alone", 1, tiers=False, transport="gloo")
    longest_s = {}
    for tiers in (False, True):
        found, longest_s[tiers] = untouched(data, folder / f"timed-{tiers}", RANKS, tiers=tiers, transport=transport)
        assert found == expected, "three ranks differ from one without any fault"
    done = number = 0
    while done < num_rounds:
        number += 1
        (own := folder / f"round-{number}").mkdir()
        if (found := one_round(number, data, own, expected, longest_s, seed=seed, transport=transport)) is not None:
            done += 1
            yield found
        shutil.rmtree(own)


def ends(data: Path, folder: Path, num_runs: int, transport: Transport) -> Iterator[tuple[list[int | None], str]]:
    """Yields the exit codes of the two ranks of each of `num_runs` short runs, and what they said."""

    def given(number: int) -> dict[str, Any]:
        found = settings(data, folder / f"run-{number}", tiers=False)
        return {**found, "train": {**found["train"], "max_steps": 2, "micro_batches": 2}}

    for number, found in enumerate(whole_ends(2, map(given, range(num_runs)), transport)):
        yield found
        shutil.rmtree(folder / f"run-{number}", ignore_errors=True)


def count_ends(data: Path, folder: Path, num_runs: int, transport: Transport) -> int:
    """Runs `ends`, prints what failed and how many did, and returns the exit code of this program."""
    failed = 0
    for number, (codes, said) in enumerate(ends(data, folder, num_runs, transport), 1):
        if any(codes):
            failed += 1
            print(f"{number}: {codes} {' '.join(said.split())[-800:]}", flush=True)
    print(json.dumps({"runs": num_runs, "failed": failed}))
    return 1 if failed else 0


def untouched(
    data: Path, folder: Path, ranks: int, *, tiers: bool, transport: Transport
) -> tuple[dict[str, str], float]:
    """Trains without a fault; returns the outcome, and the seconds from the run's folder to the end."""
    folder.mkdir()
    with session(ranks, settings(data, folder / "run", tiers=tiers), folder / "session", transport) as alone:
        wait((folder / "run" / RUN).exists)
        began_s = time.monotonic()
        assert alone.join() == [0] * ranks, alone.ends()
        longest_s = time.monotonic() - began_s
    return outcome(folder / "run"), longest_s


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ends", type=int, metavar="RUNS", help="count exit codes of so many short runs of two ranks")
    parser.add_argument("--folder", type=Path, help="where runs and rows lie while they train")
    parser.add_argument("--transport", choices=TRANSPORTS, default="gloo", help="what carries the ranks' messages")
    given = parser.parse_args()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        from benchmarks.hot_cells import make_shape

        folder = Path(name)
        data = make_shape("kaggle", 8_000, 1e-3, folder / "data")
        if given.ends is not None:
            return count_ends(data, folder, given.ends, given.transport)
        found = []
        for each in rounds(data, folder, given.rounds, seed=given.seed, transport=given.transport):
            found.append(each)
            text, where = "; ".join(each.problems) or "equal", "tiers" if each.tiers else "DRAM"
            print(
                f"{len(found)}: {each.signal} of rank {each.rank} after {each.delay_s:.2f} s in {where}, named after "
                f"{each.named_s:.2f} s; from step {each.step} on {each.ranks} ranks: {text}",
                flush=True,
            )
    failed = [each for each in found if each.problems]
    slowest = {
        name: max((each.named_s for each in found if each.signal == name), default=0.0)
        for name in ("SIGKILL", "SIGSTOP")
    }
    print(json.dumps({"rounds": len(found), "failed": len(failed), "slowest_naming_s": slowest}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
