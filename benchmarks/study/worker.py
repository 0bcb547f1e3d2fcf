"""One cell of a study, measured in this process: `python -m benchmarks.study.worker SPEC.json`.

It trains with `run.runs.train`, as a user's run does, with one more meter: `Passes` times pass after pass over the data
and ends the run when it has enough. It prints "ready" before tables exist and waits for a line, so that its parent can
limit its memory by what it uses by then. The result goes to the file that the spec names. If the environment makes the
process a rank (parallel/launch.py), the ranks train together, and the first one measures and decides for all.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic.dataclasses import dataclass as record
from typing_extensions import override

from benchmarks.disturbance import Disturbance
from benchmarks.rounds import Rounds, cleanest, wants_more
from hotrow.base.files import write_json
from hotrow.base.machine import end_with_parent
from hotrow.base.records import STRICT
from hotrow.batch import Batch
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.launch import joined
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from hotrow.run.meters import LoopPart, Session
from hotrow.run.parts import parts_of
from hotrow.run.runs import train
from hotrow.run.trainer import Training

PHASES = ("data", "lookup", "dense", "update")
"""What a run's seconds are kept by."""
MIN_ROUND_S = 0.2
"""A round is as many passes over the data as take this long: a shorter time says little of who had the processors."""
MIN_ROUNDS = 3


@record(frozen=True, config=STRICT, kw_only=True)
class Spec:
    """What a worker is to do."""

    config: dict[str, Any]
    run: str
    """The run's folder, which must not exist yet."""
    result: str
    """Where to write the result."""
    measures: str
    warm_passes: int
    rounds: int
    most_s: float
    """Seconds after which no round begins, if there are MIN_ROUNDS."""


class MeasuredEnough(SystemExit):  # not an error
    """Ends a run that has been measured; nobody needs the rest of it, nor its checkpoint. Ranks that leave a run by an
    exit in good order wait for each other (parallel/heartbeat.py).
    """


class Passes(LoopPart):
    """Times rounds of training: passes over the data, after some that warm caches and slots."""

    def __init__(
        self,
        session: Session,
        *,
        warm_passes: int,
        rounds: int,
        most_s: float,
        of_disk: bool = False,
        comm: Communicator | None = None,
    ) -> None:
        """of_disk: see `Disturbance`. comm: the ranks that train together; each has such a meter."""
        self._comm = comm or Communicator()
        self._others = [pid for pid in everyone(self._comm, os.getpid()) if pid != os.getpid()]
        self._session, self._warm_passes, self._rounds, self._most_s = session, warm_passes, rounds, most_s
        self._of_disk = of_disk
        self.taken: list[tuple[float, dict[str, float]]] = []
        self._first_s: float | None = None
        self._begin()

    def _begin(self) -> None:
        state = self._session.state
        self._before, self._step, self._samples = dict(state.seconds), state.step, state.num_samples
        self._stall_s = state.stall_s
        self._sent, self._exchange_s = dict(self._comm.counts.sent_bytes), self._comm.counts.exchange_s
        self._disturbance, self._start = Disturbance(self._others, of_disk=self._of_disk), time.perf_counter()

    def _agreed(self, decision: bool) -> bool:  # noqa: FBT001
        """Returns what the first rank decides; all ranks ask at the same step. It counts as no part of a step."""
        before = self._comm.counts.exchange_s
        decided = bool(everyone(self._comm, decision)[0])
        self._exchange_s += self._comm.counts.exchange_s - before
        return decided

    @override
    def after_step(self, batch: Batch, loss: float | None) -> None:
        """Ends a round with the pass that makes it long enough. Raises MeasuredEnough after the last one."""
        state, now = self._session.state, time.perf_counter()
        if state.batch:
            return
        if self._first_s is None:
            if state.epoch >= self._warm_passes:
                self._first_s = now
                self._begin()
            return
        if self._agreed(now - self._start < MIN_ROUND_S):
            return
        num_steps = state.step - self._step
        ms = {f"{phase}_ms": 1e3 * (state.seconds[phase] - self._before[phase]) / num_steps for phase in PHASES}
        whole = {"step_ms": sum(ms.values()), "wait_ms": 1e3 * (state.stall_s - self._stall_s) / num_steps}
        samples = {"samples": (state.num_samples - self._samples) / num_steps, "steps": float(num_steps)}
        self.taken.append((self._disturbance.share(), {**whole, **ms, **samples, **self._exchanged(num_steps)}))
        late = now - self._first_s > self._most_s and len(self.taken) >= min(MIN_ROUNDS, self._rounds)
        if self._agreed(late or not wants_more(self.taken, self._rounds)):
            raise MeasuredEnough
        self._begin()

    def _exchanged(self, num_steps: int) -> dict[str, float]:
        """Returns what this rank sent in a step of the round, and how long its exchanges took; {} if it is alone."""
        if self._comm.size == 1:
            return {}
        sent = sum(
            num_bytes - self._sent.get(purpose, 0)
            for purpose, num_bytes in self._comm.counts.sent_bytes.items()
            if purpose != "agreement"
        )
        exchange_ms = 1e3 * (self._comm.counts.exchange_s - self._exchange_s) / num_steps
        return {"exchange_ms": exchange_ms, "wire_bytes": sent / num_steps}

    def figures(self) -> dict[str, Any]:
        """Returns medians over the clean rounds; with few of those, over the less disturbed half, three at least."""
        num_taken = len(self.taken)
        return figures_of(cleanest(self.taken, max(min(MIN_ROUNDS, num_taken), (num_taken + 1) // 2)))


def figures_of(rounds: Rounds[dict[str, float]]) -> dict[str, Any]:
    """Returns the fields of a row: medians of the rounds, and the least and most of them.

    What one of the rounds lacks, because it could not be read, is absent.
    """
    names = [name for name in rounds.results[0] if all(name in one for one in rounds.results)]
    medians = {name: statistics.median(one[name] for one in rounds.results) for name in names}
    steps_ms = [one["step_ms"] for one in rounds.results]
    samples, num_steps = medians.pop("samples"), medians.pop("steps")
    return {
        "status": "measured",
        "samples_per_s": 1e3 * samples / medians["step_ms"],
        "spread": [1e3 * samples / max(steps_ms), 1e3 * samples / min(steps_ms)],
        **medians,
        "spread_ms": [min(steps_ms), max(steps_ms)],
        "noise": (max(steps_ms) - min(steps_ms)) / 2 / medians["step_ms"],
        "steps_per_round": round(num_steps),
        **rounds.counts(),
    }


def measure(spec: Spec) -> dict[str, Any]:
    """Trains as the spec says, and returns the fields of a row; of several ranks, all of them call it."""
    config = make_config(spec.config, origin="cell")
    if spec.measures == "quality":
        return _scored(train(config, folder=RunFolder.create(spec.run, name="cell"), quiet=True))
    meters: list[Passes] = []
    config = config.model_copy(update={"run": spec.run})
    with joined() as joined_comm:
        # The run's own communicator counts its exchanges.
        comm = joined_comm.with_micro_batches(config.train.micro_batches or joined_comm.size)

        def with_passes(training: Training) -> list[LoopPart]:
            made = Passes(
                training.session,
                warm_passes=spec.warm_passes,
                rounds=spec.rounds,
                most_s=spec.most_s,
                of_disk=not isinstance(config.memory, str),
                comm=comm,
            )
            meters.append(made)
            return [made, *parts_of(training)]

        with suppress(MeasuredEnough), patch.object(runs, "parts_of", with_passes):
            train(config, quiet=True, comm=comm)
    lines = [line for line in RunFolder.open(spec.run).measurements() if line["kind"] == "train"]
    hits = lines[-1].get("hits_per_lookup") if lines else None
    return {**meters[0].figures(), **({} if hits is None else {"hits_per_lookup": hits})}


def _scored(run: RunFolder) -> dict[str, Any]:
    test, val = ((run.record.metrics or {}).get(split) for split in ("test", "val"))
    found: dict[str, Any] = {"status": "measured", "steps": run.record.steps, "train_s": run.record.train_s}
    for split, metrics in (("test", test), ("val", val)):
        if metrics is not None:
            found |= {f"{split}_{name}": metrics[name] for name in run.record.trained_for.measures}
    return {**found, "samples_per_s": run.record.samples_per_s}


def outcome(spec: Spec) -> dict[str, Any]:
    """Returns the row of a cell that was measured, or why not: "refused" by hotrow, "diverged", or out of memory."""
    try:
        row = measure(spec)
    except MemoryError as error:
        row = {"status": "out of memory", "reason": str(error) or "MemoryError"}
    except ValueError as error:
        row = {"status": "diverged" if "diverged" in str(error) else "refused", "reason": str(error)}
    except RuntimeError as error:
        if "memory" not in str(error).lower():
            raise
        row = {"status": "out of memory", "reason": str(error).splitlines()[0]}
    return {**row, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main(arguments: Sequence[str] | None = None) -> None:
    (path,) = sys.argv[1:] if arguments is None else arguments
    spec = Spec(**json.loads(Path(path).read_text(encoding="utf-8")))
    end_with_parent()
    PackedDataset.open(spec.config["data"])
    print("ready", flush=True)
    # mpiexec passes standard input to the first rank alone; the others wait for it when they meet.
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
    if (rank == 0 or "RANK" in os.environ) and not sys.stdin.readline():
        return  # the study was killed
    found = outcome(spec)
    if rank == 0:
        write_json(spec.result, found)
    if "RANK" in os.environ:
        os._exit(0)  # a thread of gloo may abort a process that ends as usual; nothing is left to do


if __name__ == "__main__":
    main()
