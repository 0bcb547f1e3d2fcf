"""Trials: what a step of a setup takes, found by taking some.

    Setup --build--> warm-up, then some 50 steps --> milliseconds by phase, reads and writes, the wait for them

The steps are those of `train`: the same loop, batches, look-ahead, hot phases and ranks, without a run folder,
evaluations and checkpoints. A fresh table on disk has no rows to read. So a setup with rows on disk is tried twice:
with full caches and nothing behind them, as in the first epoch, where rows are made as they come; then with every row
on disk, as in later epochs.
"""

from __future__ import annotations

import math
import resource
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from typing_extensions import override

from hotrow.base.files import disk_free_bytes, explain_full_disk, size
from hotrow.base.machine import Disturbance
from hotrow.base.progress import ProgressLine
from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.placement.tiers import Tiers
from hotrow.run.folder import SilentFolder
from hotrow.run.meters import sum_of
from hotrow.run.record import PHASES, Tried
from hotrow.run.runs import threads
from hotrow.run.storage import disk_bytes, dram_bytes
from hotrow.run.trainer import Interrupt, Training
from hotrow.run.trial_record import keep_trial
from hotrow.setup.setup import Setup

WARM_UP, STEPS = 10, 50
ENOUGH_S, MOST_S = 2.0, 8.0
"""Quick steps are timed for ENOUGH_S, of which there are then more than STEPS; slow ones for MOST_S, but at least
WARM_UP of them."""
MOST_DISK_BYTES = 4 << 30
"""Rows that a trial writes to disk; of larger tables it makes a part, those with most accesses first."""
FIRST_EPOCH, LATER = "first epoch", "later epochs"
IO = ("reads", "read_bytes", "writes", "written_bytes")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the steps of one kind took: milliseconds, bytes and I/Os are means per step."""

    kind: str
    """FIRST_EPOCH, LATER or "", and which class of batches a hot schedule trained."""
    share: float
    """The share of an epoch's steps that are of this class of batches."""
    num_steps: int
    step_ms: dict[str, float]
    """By phase, as in run.json."""
    quartiles_ms: tuple[float, float, float]
    """Of whole steps: a quarter, half and three quarters of them took at most so long."""
    wait_ms: float
    """The wait for rows that were not in DRAM; a part of `step_ms`."""
    samples_per_s: float
    io: dict[str, float]
    """Reads and writes of rows, and their bytes; empty if all rows lie in DRAM."""
    hits_per_lookup: float | None
    """The share of lookups whose row was in DRAM; None if all rows lie there."""
    others: float
    """The share of the time in which other processes or the hypervisor had the processors."""

    @property
    def total_ms(self) -> float:
        return sum(self.step_ms.values())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What trying a setup showed."""

    steps: list[Steps]
    samples_per_s: float
    """Over all epochs of the config, hot phases weighted by their batches."""
    step_ms: dict[str, float]
    """By phase, weighted as `samples_per_s`."""
    threads: int
    dram_bytes: int | None
    """DRAM for rows, maps and buffers; None if all rows lie in DRAM."""
    made_bytes: int
    """Disk that the trial took for rows."""
    made_share: float
    """The share of the rows on disk that existed in LATER; 1 if all did."""
    peak_bytes: int
    """The most memory that this process has held."""
    warnings: list[str]


def trial(
    setup: Setup,
    *,
    steps: int = STEPS,
    comm: Communicator | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Trial:
    """Tries `setup`: builds it, takes a warm-up and about `steps` real steps, and removes all that it made.

    Rows on disk lie where the run's would, in a folder of the trial's own. comm: the ranks of `setup`, which all call
    this; if None, this process alone. tell: is called with what begins. Raises ValueError as a run of the setup does. A
    signal that asks to stop acts after the step, when all is removed.
    """
    comm = (comm or Communicator(setup.ranks)).with_micro_batches(setup.ranks.micro_batches)
    interrupt, runs = Interrupt(quiet=True), setup.folder
    existed = [path for path in (runs, *runs.parents) if path.exists()]
    full = explain_full_disk(runs, "the trial", "Nothing is kept of it.", "free some space, or choose another disk")
    team = threads(setup.config.train.threads, ranks=comm.ranks)
    try:
        with full, team as num_threads, interrupt, ProgressLine(quiet=True) as progress:
            tell("making tables")
            trying = _Trying(setup, interrupt, progress, comm)
            with closing(trying):
                found = trying.all(steps, tell)
                return trying.result(found, num_threads)
    except KeyboardInterrupt:
        signal.raise_signal(interrupt.signal or signal.SIGINT)  # now that all is removed, it acts as it would have
        raise
    finally:
        for path in [runs, *runs.parents][: -len(existed) or None]:
            with suppress(OSError):  # others' files may lie there by now
                path.rmdir()


class _Trying(Training):
    """A run's loop that notes what each step took, and does nothing else between steps."""

    def __init__(self, setup: Setup, interrupt: Interrupt, progress: ProgressLine, comm: Communicator) -> None:
        super().__init__(setup, SilentFolder.at(setup.folder), interrupt, progress, None, comm)
        self.num_steps = math.inf  # no number of steps ends a trial
        self.tiers = self.parts.embedding.placement.find(Tiers)
        self.made_share, self.made_bytes = 1.0, 0
        self._taken: list[_Step] = []
        self._wanted = WARM_UP
        self._disturbance = Disturbance()
        self._start_near_a_window()

    def _start_near_a_window(self) -> None:
        """Begins so late in the epoch that the loader gathers its second window of rows during the warm-up, if the
        timed steps see none: the first one is gathered while files are still unknown to the system."""
        order = self.turns.order
        for name, loader in order.loaders.items():
            per_window = loader.window_rows * loader.num_streams // loader.batch_size
            if STEPS < per_window < loader.num_batches - 2 * STEPS:
                order.turn.taken[name] = per_window - WARM_UP // 2
        self.state.batch = sum(order.turn.taken.values())

    def all(self, steps: int, tell: Callable[[str], None]) -> list[Steps]:
        """Takes all kinds of steps there are, each class of batches in turn."""
        if self.tiers is None:
            tell("taking steps")
            return self._each_class("", steps)
        whole = max(1, disk_bytes(self.tiers))
        most = min(MOST_DISK_BYTES, disk_free_bytes(self.tiers.memory.folder) // 2)
        shares = everyone(self.comm, min(1.0, most / whole))
        self.made_share = min(shares)
        self.made_bytes = round(self.made_share * whole)
        self.tiers.write_every_row(share=0.0)
        tell("taking steps as in the first epoch")
        found = self._each_class(FIRST_EPOCH, steps)
        tell(f"writing rows, {size(self.made_bytes)}")
        with self._aside():
            self.tiers.write_every_row(share=self.made_share)
        tell("taking steps as in later epochs")
        return found + self._each_class(LATER, steps)

    def _each_class(self, kind: str, steps: int) -> list[Steps]:
        order = self.turns.order
        num_batches = {name: loader.num_batches for name, loader in order.loaders.items()}
        found = []
        for name in num_batches:
            words = ", ".join(word for word in (kind, f"{name} batches" if len(num_batches) > 1 else "") if word)
            self._take(name, steps)
            found.append(self._figures(words, num_batches[name] / sum(num_batches.values())))
        return found

    def _take(self, name: str, steps: int) -> None:
        """Takes a warm-up and about `steps` steps on batches of the class `name`."""
        self._taken, self._wanted, self._asked, self.state.ended = [self._now()], WARM_UP + 1, steps, None
        while self.state.ended is None:
            self.turns.order.begin(name)
            self._phase()
            if self.signal is not None:
                raise KeyboardInterrupt

    def _now(self) -> _Step:
        counted = Counter[str]() if self.tiers is None else sum_of(map(Counter, self.tiers.counters().values()))
        return _Step(dict(self.state.seconds), self.state.stall_s, self.state.num_samples, counted)

    @override
    def _do_what_is_due(self, *, stop: bool) -> None:
        """Notes the step that has ended; after the warm-up decides how many more there are."""
        self._taken.append(self._now())
        if len(self._taken) == WARM_UP + 1:
            recent = self._taken[-1] - self._taken[WARM_UP // 2]
            step_s = everyone(self.comm, sum(recent.seconds.values()) / (WARM_UP - WARM_UP // 2))[0]
            most = max(WARM_UP, int(MOST_S / max(step_s, 1e-6)))
            self._wanted += min(most, max(self._asked, int(ENOUGH_S / max(step_s, 1e-6))))
            self._disturbance = Disturbance(of_disk=self.tiers is not None)
        if len(self._taken) >= self._wanted:
            self.state.ended = "the trial has enough steps"

    def _figures(self, kind: str, share: float) -> Steps:
        taken = [now - before for before, now in zip(self._taken, self._taken[1:], strict=False)]
        warm, timed = taken[:WARM_UP], taken[WARM_UP:]
        num_steps, totals = len(timed), sorted(1e3 * sum(step.seconds.values()) for step in timed)
        ms = {phase: 1e3 * sum(step.seconds[phase] for step in timed) / num_steps for phase in PHASES}
        ms["data"] += self._window_ms(warm, timed)
        counts = sum_of(step.counts for step in timed)
        lookups = counts["lookups"]
        in_dram = counts["pinned_lookups"] + counts["hit_lookups"]
        middle = statistics.quantiles(totals, n=4) if num_steps > 1 else totals * 3
        return Steps(
            kind=kind,
            share=share,
            num_steps=num_steps,
            step_ms={phase: round(own, 4) for phase, own in ms.items()},
            quartiles_ms=(round(middle[0], 4), round(middle[1], 4), round(middle[2], 4)),
            wait_ms=round(1e3 * sum(step.stall_s for step in timed) / num_steps, 4),
            samples_per_s=round(1e3 * sum(step.num_samples for step in timed) / num_steps / sum(ms.values()), 1),
            io={} if self.tiers is None else {name: round(counts[name] / num_steps, 1) for name in IO},
            hits_per_lookup=round(in_dram / lookups, 6) if lookups else None,
            others=round(self._disturbance.share(), 4),
        )

    def _window_ms(self, warm: Sequence[_Step], timed: Sequence[_Step]) -> float:
        """The mean milliseconds per step of gathering windows of rows, if the timed steps gathered none."""
        loader = self.turns.order.loaders[self.turns.order.turn.name]
        per_window = loader.window_rows * loader.num_streams / loader.batch_size
        if per_window <= len(timed) or loader.shuffle_seed is None:
            return 0.0
        usual = statistics.median(step.seconds["data"] for step in timed)
        first = 0 if per_window >= loader.num_batches else 1  # see `_start_near_a_window`
        return 1e3 * max(0.0, max(step.seconds["data"] for step in warm[first:]) - usual) / per_window

    def result(self, found: Sequence[Steps], num_threads: int) -> Trial:
        """Returns the trial, and keeps what a run of the setup will compare itself with."""
        epochs = max(1, self.config.train.epochs)
        weights = {FIRST_EPOCH: 1 / epochs, LATER: 1 - 1 / epochs}
        of_kind = {own.kind: weights.get(own.kind.partition(",")[0], 1.0) * own.share for own in found}
        step_ms = {phase: round(sum(of_kind[own.kind] * own.step_ms[phase] for own in found), 4) for phase in PHASES}
        if self.comm.rank == 0:
            keep_trial(self.setup, Tried(date=time.strftime("%Y-%m-%d %H:%M"), step_ms=step_ms))
        return Trial(
            steps=[*found],
            samples_per_s=round(1e3 * self.config.train.batch_size / sum(step_ms.values()), 1),
            step_ms=step_ms,
            threads=num_threads,
            dram_bytes=None if self.tiers is None else dram_bytes(self.tiers),
            made_bytes=self.made_bytes,
            made_share=self.made_share,
            peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            warnings=[own["text"] for code, own in self.folder.record.warnings.items() if code != "no_validation"],
        )


@dataclass(frozen=True)
class _Step:
    """What had been counted when a step ended; or, as a difference of two, what one step took."""

    seconds: dict[str, float]
    stall_s: float
    num_samples: int
    counts: Counter[str]

    def __sub__(self, before: _Step) -> _Step:
        counts = Counter({name: n - before.counts[name] for name, n in self.counts.items()})
        seconds = {phase: s - before.seconds[phase] for phase, s in self.seconds.items()}
        return _Step(seconds, self.stall_s - before.stall_s, self.num_samples - before.num_samples, counts)
