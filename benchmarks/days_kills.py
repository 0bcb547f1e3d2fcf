"""Chains of days in which commands are killed: prepare, train, export --since, apply, at any moment, again and again.

A chain has three days. Each day is prepared on the one before, trained from its run, exported as a delta, and applied
to the model of the day before, which makes the next one. In a round half of the commands, drawn at random, get SIGKILL
at a random moment and are given again; a command may be killed twice. A training runs on one to three ranks, drawn anew
each time it is given, of which one is killed, with rows in DRAM or in tiers. Every dataset, delta and model, and all
that `outcome` compares of every run, must be those of a chain on one process in DRAM that nothing happened to. The last
model must be the whole export of the last day.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hotrow
from benchmarks.days_chain import cut, prepare_day
from benchmarks.days_quality import made_up
from benchmarks.rank_faults import settings
from benchmarks.rank_runs import CONTEXT, HANG_S, differing, outcome, session
from hotrow.data.packed.format import MANIFEST
from hotrow.export.delta import apply_delta
from hotrow.export.export import CHAIN
from hotrow.run.folder import CONFIG, RunFolder

DAYS, DAY_ROWS, DRIFT = 3, 2_000, 0.5
MAX_RANKS, MAX_KILLS = 3, 2
KILLED = 0.5
"""Share of commands, among those given for the first or second time, that are killed."""


class Step(NamedTuple):
    """A command of a chain."""

    name: str
    out: Path
    """What it makes or changes."""
    given: tuple[Any, ...]


class How(NamedTuple):
    """How a command is given once."""

    ranks: int = 1
    """Processes of a training; every other command has one."""
    tiers: bool = False
    """Whether the rows of a training lie in tiers."""
    victim: int = 0
    """The rank that is killed."""
    delay_s: float | None = None
    """Seconds until it is killed; None: it is not."""


class Round(NamedTuple):
    """What became of a chain."""

    kills: tuple[str, ...]
    longest_s: dict[str, float]
    """By name, the longest time of a command that ended by itself."""
    problems: tuple[str, ...]
    state: dict[str, str]


def export(run: Path, out: Path, since: Path | None) -> None:
    hotrow.load(run).export(out, since=since)


WORK: dict[str, Callable[..., Any]] = {"prepare": prepare_day, "export": export, "apply": apply_delta}


def chain(files: Sequence[Path], folder: Path) -> Iterator[Step]:
    """Yields the commands of all days."""
    base, before, since = None, None, None
    for number, file in enumerate(files, 1):
        data, run, delta, model = (folder / kind / f"day_{number}" for kind in ("data", "runs", "deltas", "model"))
        yield Step("prepare", data, (file, data, base))
        yield Step("train", run, (data, run, before))
        if before is None:
            yield Step("export", model, (run, model, None))
        else:
            yield Step("export", delta, (run, delta, since))
            yield Step("apply", model, (since, delta, model))
        base, before, since = data, run, model


def is_done(step: Step) -> bool:
    """Returns whether what the command makes is there, whole."""
    if step.name == "prepare":
        return (step.out / MANIFEST).is_file()
    if step.name == "train":
        return (step.out / CONFIG).is_file() and RunFolder.open(step.out).record.status == "finished"
    return step.out.is_dir()


def config(data: Path, run: Path, before: Path | None, *, tiers: bool) -> dict[str, Any]:
    given = settings(data, run, tiers=tiers)
    train = {**given["train"], "epochs": 1, "max_steps": None, "eval_every": None}
    return {**given, "train": train, "from_run": before and str(before)}


def _work(step: Step, said: Path) -> None:
    said.mkdir()
    os.dup2(os.open(said / "rank-0", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    torch.set_num_threads(1)
    WORK[step.name](*step.given)


@contextmanager
def running(step: Step, how: How, said: Path) -> Iterator[list[Any]]:
    """Gives a command; yields its processes, which are gone after the block. said: a folder for what they say."""
    if step.name == "train":
        if not (step.out / CONFIG).is_file():
            shutil.rmtree(step.out, ignore_errors=True)  # as its error says: it ended before its first step
        with session(how.ranks, config(*step.given, tiers=how.tiers), said) as found:
            yield found.processes
        return
    process = CONTEXT.Process(target=_work, args=(step, said))
    process.start()
    try:
        yield [process]
    finally:
        process.kill()
        process.join()


def give(step: Step, how: How, said: Path) -> tuple[float, list[int | None], bool]:
    """Gives a command once; returns its seconds, its exit codes and whether it was killed."""
    started = time.monotonic()
    with running(step, how, said) as processes:
        if is_killed := how.delay_s is not None:
            processes[how.victim].join(how.delay_s)
            if is_killed := processes[how.victim].exitcode is None:
                processes[how.victim].kill()
        for process in processes:
            process.join(HANG_S)
        codes = [process.exitcode for process in processes]
    return time.monotonic() - started, codes, is_killed


def one_chain(files: Sequence[Path], folder: Path, choose: Callable[[Step, int], How]) -> Round:
    """Gives the commands of a chain in the empty folder, each until it is done.

    choose: says how a command is given that has been given so many times.
    """
    kills, longest_s = [], dict.fromkeys(("prepare", "train", "export", "apply"), 0.0)
    for name in ("data", "runs", "deltas", "model", "said"):
        (folder / name).mkdir()
    for place, step in enumerate(chain(files, folder)):
        times = 0
        while not is_done(step):
            how, said = choose(step, times), folder / "said" / f"{place}-{times}"
            took_s, codes, is_killed = give(step, how, said)
            times += 1
            if is_killed:
                where = f" of {how.ranks} ranks" if step.name == "train" else ""
                kills.append(f"{step.name} of {step.out.name}{where} after {how.delay_s:.2f} s")
            elif any(codes) or not is_done(step):
                told = "; ".join(" ".join(path.read_text()[-400:].split()) for path in sorted(said.glob("rank-*")))
                return Round((*kills,), longest_s, (f"{step.name} of {step.out.name} ended with {codes}: {told}",), {})
            else:
                longest_s[step.name] = max(longest_s[step.name], took_s)
    hotrow.load(folder / "runs" / f"day_{len(files)}").export(folder / "whole")
    served, whole = (hashes(folder / name) for name in (f"model/day_{len(files)}", "whole"))
    served.pop(CHAIN, None)
    problems = [f"{name} is not that of the whole export" for name in differing(served, whole)]
    return Round((*kills,), longest_s, (*problems,), state(folder))


def hashes(folder: Path) -> dict[str, str]:
    """Returns SHA-256 of every file by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def state(folder: Path) -> dict[str, str]:
    """Returns what must be equal of two chains."""
    found = {
        f"{kind}/{name}": own for kind in ("data", "deltas", "model") for name, own in hashes(folder / kind).items()
    }
    for run in sorted((folder / "runs").glob("day_*")):
        found |= {f"runs/{run.name} {name}": own for name, own in outcome(run).items()}
    return found


def rounds(folder: Path, num_rounds: int, *, seed: int = 1) -> Iterator[Round]:
    """Yields `num_rounds` rounds, whose problems name what differs; works in the empty folder `folder`."""
    rows = made_up(folder / "rows.tsv", DAYS * DAY_ROWS, DRIFT, DAYS)
    files = cut(rows, [DAY_ROWS] * DAYS, folder / "rows")
    untouched = []
    for name, how in {"alone": How(), "ranks": How(ranks=MAX_RANKS, tiers=True)}.items():
        (folder / name).mkdir()
        untouched.append(one_chain(files, folder / name, lambda step, times, how=how: how))
        assert not untouched[-1].problems, untouched[-1].problems
    expected = untouched[0].state
    assert not (differ := differing(expected, untouched[1].state)), f"{MAX_RANKS} ranks in tiers differ: {differ}"
    longest_s = {name: max(each.longest_s[name] for each in untouched) for name in untouched[0].longest_s}
    for number in range(num_rounds):
        (own := folder / f"round-{number}").mkdir()
        found = one_chain(files, own, chooser(random.Random(seed * 1_000_003 + number), longest_s))
        problems = found.problems or tuple(f"{name} differs" for name in differing(expected, found.state))
        yield found._replace(problems=problems)
        shutil.rmtree(own)


def chooser(drawn: random.Random, longest_s: Mapping[str, float]) -> Callable[[Step, int], How]:
    """Returns what draws how a command is given."""

    def choose(step: Step, times: int) -> How:
        is_killed = times < MAX_KILLS and drawn.random() < KILLED
        ranks, tiers = (
            (drawn.randint(1, MAX_RANKS), drawn.choice([False, True])) if step.name == "train" else (1, False)
        )
        delay_s = drawn.uniform(0, longest_s[step.name]) if is_killed else None
        return How(ranks, tiers, drawn.randrange(ranks), delay_s)

    return choose


def kills(folder: Path, num_rounds: int, seed: int) -> dict[str, Any]:
    """Returns the cell, and prints a line a round."""
    found = []
    for each in rounds(folder, num_rounds, seed=seed):
        found.append(each)
        text = "; ".join(each.problems) or "equal"
        print(f"{len(found)}: {', '.join(each.kills) or 'nothing killed'}: {text}", flush=True)
    return {
        "name": "days_kills",
        "rounds": len(found),
        "kills": sum(len(each.kills) for each in found),
        "killed": {
            name: sum(kill.startswith(name) for each in found for kill in each.kills) for name in WORK | {"train": None}
        },
        "failed": sum(bool(each.problems) for each in found),
        "seed": seed,
    }


def kills_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of the cell, by column."""
    by_command = ", ".join(f"{name} {number}" for name, number in cell["killed"].items())
    return {
        "rounds": str(cell["rounds"]),
        "kills": f"{cell['kills']} ({by_command})",
        "rounds with other bits": str(cell["failed"]),
    }
