"""What a figure is made of: clean rounds where there are enough, else the least disturbed ones; and its circumstances.

A round during which the hypervisor or another process had the processors does not count, as long as enough other rounds
are clean; every benchmark and study takes its rounds with `clean_rounds` or `cleanest`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from benchmarks.disturbance import Disturbance
from hotrow.base.machine import host_facts, versions
from hotrow.kernels import ops

CLEAN_SHARE = 0.02
"""A round is clean if other processes had the processors for at most this share of its time."""
MAX_ROUNDS = 2
"""Limit on the rounds that are taken, as a multiple of the clean rounds that are wanted."""
T = TypeVar("T")


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
    """Returns whether to take another round: not after `num_rounds` clean ones or MAX_ROUNDS times as many in all.

    Also not after `num_rounds` rounds if so few were clean that as many again would hardly make half of those wanted.
    """
    num_clean = cleanest(taken, num_rounds).num_clean
    if num_clean >= num_rounds or len(taken) >= MAX_ROUNDS * num_rounds:
        return False
    return len(taken) < num_rounds or 2 * MAX_ROUNDS * num_clean >= num_rounds


def clean_rounds(one_round: Callable[[int], T], num_rounds: int, *, of_disk: bool = False) -> Rounds[T]:
    """Takes rounds while `wants_more`; `one_round` receives the number of the round. See `cleanest`.

    of_disk: the rounds read or write a disk; see `Disturbance`.
    """
    taken: list[tuple[float, T]] = []
    while wants_more(taken, num_rounds):
        disturbance = Disturbance(of_disk=of_disk)
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
