"""Trials: what a step of a setup takes, found by taking some.

    Setup --build--> warm-up, then some 50 steps --> milliseconds by phase, reads and writes, the wait for them

The steps are those of `train`: the same loop, batches, look-ahead, hot phases and ranks, without a run folder,
evaluations and checkpoints. A fresh table on disk has no rows to read. So a setup with rows on disk is tried twice:
with full caches and nothing behind them, as in the first epoch, where rows are made as they come; then with every row
on disk, as in later epochs.
"""

from __future__ import annotations

import math
import re
import resource
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from typing_extensions import override

from hotrow.base.files import disk_free_bytes, explain_full_disk, size
from hotrow.base.progress import ProgressLine
from hotrow.batch import Batch
from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.placement.tiers import Tiers
from hotrow.run.folder import SilentFolder
from hotrow.run.interrupt import Interrupt
from hotrow.run.meters import LoopPart, sum_of
from hotrow.run.parts import Exactness
from hotrow.run.record import PHASES, Tried
from hotrow.run.runs import threads
from hotrow.run.storage import disk_bytes, dram_bytes
from hotrow.run.trainer import Batches, Training
from hotrow.run.trial_record import keep_trial
from hotrow.setup.memory import FOLDER
from hotrow.setup.setup import Setup

WARM_UP, STEPS = 10, 50
ENOUGH_S, MOST_S = 2.0, 8.0
"""Quick steps are timed for ENOUGH_S, more than STEPS; slow ones for MOST_S, but at least WARM_UP of them."""
MOST_DISK_BYTES = 4 << 30
"""Bytes of rows that a trial writes to disk. If tables have more there, it writes those with most accesses."""
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
    """The times that a quarter, half and three quarters of the steps stayed below."""
    wait_ms: float
    """The wait for rows that were not in DRAM; a part of `step_ms`."""
    samples_per_s: float
    io: dict[str, float]
    """Reads and writes of rows, and their bytes; empty if all rows lie in DRAM."""
    hits_per_lookup: float | None
    """The share of lookups whose row was in DRAM; None if all rows lie there."""

    @property
    def total_ms(self) -> float:
        return sum(self.step_ms.values())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The results of trying a setup."""

    steps: list[Steps]
    samples_per_s: float
    """Over all epochs of the config, hot phases weighted by their batches."""
    step_ms: dict[str, float]
    """By phase, weighted as `samples_per_s`."""
    io: dict[str, float]
    """Reads and writes of rows, and their bytes, weighted likewise; empty if all rows lie in DRAM."""
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
    setup: Setup, *, steps: int = STEPS, comm: Communicator | None = None, tell: Callable[[str], None] = lambda _: None
) -> Trial:
    """Tries `setup`: builds it, takes a warm-up and about `steps` real steps, and removes all that it made. Rows on
    disk lie where the run's would, in a folder of the trial's own. comm: the ranks of `setup`, which all call this; if
    None, this process alone. tell: is called with what begins. A signal that asks to stop acts after the step, when all
    is removed. Raises ValueError as a run of the setup does."""
    comm, interrupt, runs = comm or Communicator(setup.ranks), Interrupt(quiet=True), setup.folder
    full = explain_full_disk(runs, "trying steps", "Nothing is kept of it.", "try again, or choose another disk")
    team, quiet = threads(setup.config.train.threads, ranks=setup.ranks), ProgressLine(quiet=True)
    left = _removing([runs / FOLDER, *setup.config.tiers.folders])
    try:
        with left, full, _explain_full_memory(), team as num_threads, interrupt, quiet as progress:
            tell("making tables")
            trying = _Trying(setup, interrupt, progress, comm)
            with closing(trying.training):
                found = trying.all(steps, tell)
            return trying.result(found, num_threads)
    except KeyboardInterrupt:
        signal.raise_signal(interrupt.signal or signal.SIGINT)  # now that all is removed, it acts as it would have
        raise


@contextmanager
def _removing(folders: Sequence[Path]) -> Iterator[None]:
    """Removes those of `folders`, and of the folders above them, that did not exist before the block."""
    new = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):  # others' files may lie there by now
                path.rmdir()


@contextmanager
def _explain_full_memory() -> Iterator[None]:
    """Raises MemoryError, with the cure, for an allocation of the block that failed."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        cure = "lay more rows on disk (memory), or lower train.batch_size or memory.hbm"
        raise MemoryError(f"memory ran out while trying steps ({str(error).strip()[:200]}): {cure}") from error


class _Trying(LoopPart):
    """The part of a loop that notes what each step took; there is no other between the steps of a trial."""

    def __init__(self, setup: Setup, interrupt: Interrupt, progress: ProgressLine, comm: Communicator) -> None:
        self.training = training = Training(setup, SilentFolder.at(setup.folder), interrupt, progress, comm)
        training.num_steps = math.inf  # no number of steps ends a trial
        training.loop_parts += [Exactness(training), self]
        self.comm, self.state, self.turns = training.comm, training.state, training.turns
        self.tiers = training.parts.embedding.placement.find(Tiers)
        self.made_share, self.made_bytes = 1.0, 0
        self.dram_bytes: int | None = None
        self._taken: list[_Step] = []
        self._wanted = WARM_UP
        self._start_near_a_window()

    def _start_near_a_window(self) -> None:
        """Begins so late in the epoch that the loader gathers its second window of rows during the warm-up: the first
        one is gathered while files are still unknown to the system."""
        order = self.turns.order
        for name, loader in order.loaders.items():
            per_window = loader.window_rows * loader.num_streams // loader.batch_size
            if loader.num_windows > loader.num_streams and per_window > WARM_UP:
                order.turn.taken[name] = per_window - WARM_UP // 2
        self.state.batch = sum(order.turn.taken.values())

    def all(self, steps: int, tell: Callable[[str], None]) -> list[Steps]:
        """Takes all kinds of steps there are, each class of batches in turn; if some rank has rows on disk, all do."""
        if not any(everyone(self.comm, self.tiers is not None)):
            tell("taking steps")
            return self._each_class("", steps)
        self._write(0.0)
        tell("taking steps as in the first epoch")
        found = self._each_class(FIRST_EPOCH, steps)
        self.made_share = min(everyone(self.comm, self._share_of_disk()))
        self.made_bytes = sum(everyone(self.comm, round(self.made_share * self._disk_bytes())))
        tell(f"writing rows, {size(self.made_bytes)}")
        self._write(self.made_share)
        tell("taking steps as in later epochs")
        found += self._each_class(LATER, steps)
        self.dram_bytes = None if self.tiers is None else dram_bytes(self.tiers)
        return found

    def _write(self, share: float) -> None:
        if self.tiers is not None:
            with self.training.aside():
                self.tiers.write_every_row(share=share)

    def _disk_bytes(self) -> int:
        return 0 if self.tiers is None else disk_bytes(self.tiers)

    def _share_of_disk(self) -> float:
        """The share of its rows on disk that this rank may write, with others on the same disk."""
        if self.tiers is None:
            return 1.0
        most = min(MOST_DISK_BYTES, disk_free_bytes(self.tiers.memory.folder) // 2) // self.comm.ranks.local_size
        return min(1.0, most / max(1, self._disk_bytes()))

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
        self.training.loop(self._batches(name))
        if self.training.signal is not None:
            raise KeyboardInterrupt

    def _batches(self, name: str) -> Batches:
        while self.state.ended is None:
            self.turns.order.begin(name)
            yield from self.training.phase()

    def _now(self) -> _Step:
        counted = Counter[str]() if self.tiers is None else sum_of(map(Counter, self.tiers.counters().values()))
        gathered_s = sum(sum(loader.gathered_s) for loader in self.turns.order.loaders.values())
        return _Step(dict(self.state.seconds), self.state.stall_s, self.state.num_samples, gathered_s, counted)

    @override
    def after_step(self, batch: Batch, loss: float | None) -> None:
        """Notes the step that has ended; after the warm-up decides how many more there are."""
        self._taken.append(self._now())
        if len(self._taken) == WARM_UP + 1:
            recent = self._taken[-1] - self._taken[WARM_UP // 2]
            step_s = everyone(self.comm, sum(recent.seconds.values()) / (WARM_UP - WARM_UP // 2))[0]
            most = max(WARM_UP, int(MOST_S / max(step_s, 1e-6)))
            self._wanted += min(most, max(self._asked, int(ENOUGH_S / max(step_s, 1e-6))))
        if len(self._taken) >= self._wanted:
            self.state.ended = "the trial has enough steps"

    def _figures(self, kind: str, share: float) -> Steps:
        taken = [now - before for before, now in zip(self._taken, self._taken[1:], strict=False)]
        timed = taken[WARM_UP:]
        num_steps, totals = len(timed), sorted(1e3 * sum(step.seconds.values()) for step in timed)
        ms = {phase: 1e3 * sum(step.seconds[phase] for step in timed) / num_steps for phase in PHASES}
        ms["data"] += self._window_ms(sum(step.gathered_s for step in timed) / num_steps)
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
        )

    def _window_ms(self, seen_s: float) -> float:
        """What an epoch's windows of rows add to the mean step, beyond the `seen_s` of each timed step."""
        loader = self.turns.order.loaders[self.turns.order.turn.name]
        usual_s = statistics.median(loader.gathered_s[1:] or loader.gathered_s)
        return 1e3 * (usual_s * loader.num_windows / loader.num_batches - seen_s)

    def result(self, found: Sequence[Steps], num_threads: int) -> Trial:
        """Returns the trial, and keeps what a run of the setup will compare itself with."""
        setup, per_epoch = self.training.setup, self.training.steps_per_epoch
        options = setup.config.train
        first = per_epoch / min(per_epoch * options.epochs, options.max_steps or math.inf)
        first = 0.0 if setup.config.from_run is not None else min(1.0, first)  # another run has made its rows
        weights = {FIRST_EPOCH: first, LATER: 1 - first}
        of_kind = {own.kind: weights.get(own.kind.partition(",")[0], 1.0) * own.share for own in found}
        step_ms = {phase: round(sum(of_kind[own.kind] * own.step_ms[phase] for own in found), 4) for phase in PHASES}
        io = {name: round(sum(of_kind[own.kind] * own.io.get(name, 0.0) for own in found), 1) for name in IO}
        samples = sum(loader.num_rows for loader in self.turns.order.loaders.values()) / per_epoch
        if self.comm.rank == 0:
            keep_trial(setup, Tried(date=time.strftime("%Y-%m-%d %H:%M"), step_ms=step_ms))
        return Trial(
            steps=[*found],
            samples_per_s=round(1e3 * samples / sum(step_ms.values()), 1),
            step_ms=step_ms,
            io={} if not any(own.io for own in found) else io,
            threads=num_threads,
            dram_bytes=self.dram_bytes,
            made_bytes=self.made_bytes,
            made_share=self.made_share,
            peak_bytes=peak_bytes(),
            warnings=self._warnings(),
        )

    def _warnings(self) -> list[str]:
        """What a run would warn of, and what the steps showed."""
        found, short = [own["text"] for own in self.training.folder.record.warnings.values()], self.training.setup
        found += [] if short.short_of_memory is None else [short.short_of_memory]
        if self.turns.device is not None:
            found.append("copying hot rows to the GPU and back, between phases, is not part of these steps")
        if self.state.skipped:
            found.append(f"{self.state.skipped} steps met NaN or infinity and changed nothing, which takes less time")
        return found


def peak_bytes() -> int:
    """The most memory that this process has held. Unlike `ru_maxrss`, this leaves out what its parent held."""
    with suppress(OSError, AttributeError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return 1024 * int(cast(re.Match[str], found)[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(frozen=True)
class _Step:
    """What had been counted when a step ended; or, as a difference of two, what one step took."""

    seconds: dict[str, float]
    stall_s: float
    num_samples: int
    gathered_s: float
    """Seconds of `seconds["data"]` in which windows of rows were gathered."""
    counts: Counter[str]

    def __sub__(self, before: _Step) -> _Step:
        counts = Counter({name: n - before.counts[name] for name, n in self.counts.items()})
        seconds = {phase: s - before.seconds[phase] for phase, s in self.seconds.items()}
        samples, gathered_s = self.num_samples - before.num_samples, self.gathered_s - before.gathered_s
        return _Step(seconds, self.stall_s - before.stall_s, samples, gathered_s, counts)
