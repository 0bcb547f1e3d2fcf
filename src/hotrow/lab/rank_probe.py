"""What it costs two processes of this machine to train together: exchanges, sharing rows, and each other's presence.

    hotrow probe --starts--> python -m hotrow.lab.rank_probe FOLDER RANK SECONDS, twice; the first writes result.json

Two processes joined by gloo over loopback, each with half of the cores, exchange messages without bytes and large ones.
Then they take real training steps of the shapes of step_probe.py: each for itself, and together. What a step together
takes beyond one of the same samples, its waits for exchanges left out, is what sharing takes: points of `shared
lookup`, and of `shared update` for all that follows, for costs/cost.py. A process can share a model with nobody, in two
micro-batches: beside steps of two, such steps say what each further rank adds. Plain steps while the other process
rests say how much longer they take if it does not (`Hardware.crowding`).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from hotrow.base.files import write_json
from hotrow.base.machine import Disturbance, usable_cores
from hotrow.base.waiting import wait_passively
from hotrow.batch import Batch
from hotrow.bench import CLEAN_SHARE
from hotrow.costs.cost import PHASES
from hotrow.costs.hardware import DISTURBED, Figure, Network, Point
from hotrow.costs.wire import sharing_amounts
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import Split
from hotrow.lab.step_probe import PARTS, Drawn, Shape, build_shape, point_of, shapes, work_of_steps
from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import OverRanks
from hotrow.parallel.gloo import communicator
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.shards import Shard
from hotrow.run.build import Parts
from hotrow.run.trainer import train_step

SMALL, LARGE_BYTES = 50, 2 << 20
"""Exchanges of a round without bytes, and the bytes of a large message."""
ROUNDS = 9
WARMUP, TIMED = 2, 5
"""Steps with each batch size."""
MAX_TABLE_BYTES = 48 << 20
REPLICATED_ROWS = 64
"""Tables of at most so many rows lie on both ranks, as small tables of a run do."""
PARTS_OF_STEP = {"lookup": ("lookup",), "update": ("dense", "update")}
"""What sharing adds to, by phases."""
MIN_SHAPES = 6
"""With fewer, there would be fewer points than kinds of amounts."""
MEET_S, SLACK_S, POLL_S = 30.0, 60.0, 0.05
"""Time in which the processes must have met; what they may take beside what they measure in; between two looks."""


def measure_ranks(*, seconds: float, progress: Callable[[str], object]) -> Mapping[str, Any]:
    """Returns fields of `Hardware`: `network`, `crowding`, points by phase as `kernels`; or `notes`, if two processes
    cannot train together here.
    """
    progress("two processes that train together")
    with tempfile.TemporaryDirectory(prefix="hotrow-ranks-") as folder:
        reason = _run_both(Path(folder), seconds)
        if reason is not None:
            return {"notes": {"network": f"two processes cannot train together here: {reason}"}}
        found = TypeAdapter(_Measured).validate_json((Path(folder) / "result.json").read_bytes())
    return vars(found)


def _run_both(folder: Path, seconds: float) -> str | None:
    """Runs the two processes; returns why they failed, None if they did not. seconds: for steps."""
    command = [sys.executable, "-m", "hotrow.lab.rank_probe", str(folder)]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    wait_passively(environ)  # as the ranks of a run do
    outputs: dict[str, Any] = {"env": environ, "stdout": subprocess.DEVNULL}
    with (folder / "errors").open("wb") as errors, ExitStack() as stack:
        ranks = [
            stack.enter_context(subprocess.Popen([*command, str(rank), str(seconds)], stderr=errors, **outputs))
            for rank in (0, 1)
        ]
        until_s = time.monotonic() + seconds + SLACK_S
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                if time.monotonic() > until_s:
                    return "they did not come to an end"
                time.sleep(POLL_S)
        finally:
            for rank in ranks:
                rank.kill()
    said = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return (said[-1] if said else "one of them ended without a word") if any(codes) else None


@dataclass
class _Measured:
    network: Network
    crowding: Figure
    kernels: dict[str, list[Point]]


# ---- in the two processes


def main(arguments: Sequence[str]) -> None:
    folder, rank, seconds = arguments
    until_s = time.monotonic() + float(seconds)
    torch.set_num_threads(max(1, usable_cores() // 2))
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=int(rank), world_size=2, timeout=timedelta(seconds=MEET_S))
    comm = communicator()
    pids = [pid for pid in everyone(comm, os.getpid()) if pid != os.getpid()]
    network = _network(comm, pids)
    crowding, kernels = _steps(comm, pids, until_s)
    points = {phase: [asdict(point) for point in own] for phase, own in kernels.items()}
    found = {"network": asdict(network), "crowding": asdict(crowding), "kernels": points}
    if comm.rank == 0:
        write_json(Path(folder, "result.json"), found)
    dist.barrier()
    os._exit(0)  # a thread of gloo may abort a process that ends as usual


def _network(comm: Communicator, pids: Sequence[int]) -> Network:
    small, large = (
        [torch.zeros(num_bytes if rank != comm.rank else 0, dtype=torch.uint8) for rank in range(comm.size)]
        for num_bytes in (1, LARGE_BYTES)
    )
    rounds: list[tuple[float, float, float, float]] = []
    disturbance = Disturbance(pids)
    for _ in range(ROUNDS):
        message_s, message_cpu_s = (each / 2 for each in _exchange_s(comm, small, SMALL))  # its head, then the message
        whole_s, cpu_s = _exchange_s(comm, large, 4)
        bytes_s = max(whole_s / 4, whole_s - 2 * message_s)  # a disturbed message may seem to take all of it
        rounds.append((LARGE_BYTES / bytes_s, message_s, message_cpu_s, cpu_s / LARGE_BYTES))
    note = _note(disturbance)
    return Network(*(_figure(values, note) for values in zip(*rounds, strict=True)))


def _exchange_s(comm: Communicator, parts: list[torch.Tensor], times: int) -> tuple[float, float]:
    """Returns the seconds that an exchange takes, and the seconds of processor time in this process."""
    comm.exchange(parts, purpose="probe")
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(times):
        comm.exchange(parts, purpose="probe")
    return (time.perf_counter() - start) / times, (time.process_time() - cpu_start) / times


def _figure(values: Sequence[float], note: str = "") -> Figure:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(median, low, high, note=note)


def _note(disturbance: Disturbance) -> str:
    share = disturbance.share()
    return f"{DISTURBED}: other work had the processors for {share:.0%} of the time" if share > CLEAN_SHARE else ""


def _steps(comm: Communicator, pids: Sequence[int], until_s: float) -> tuple[Figure, dict[str, list[Point]]]:
    """Returns how much longer plain steps take beside the other rank's, and points of what sharing takes."""
    times, points = [], {f"shared {name}": [] for name in PARTS_OF_STEP}  # type: ignore[var-annotated]
    in_dram = (shape for shape in shapes(MAX_TABLE_BYTES) if shape.in_tiers is None)
    for number, shape in enumerate(in_dram):
        if number >= MIN_SHAPES and not everyone(comm, time.monotonic() < until_s)[0]:
            break
        with ExitStack() as stack:
            sides = _Sides(shape, comm, stack, pools=number % 2 == 1)
            for part in PARTS:
                disturbance = Disturbance(pids)
                found = sides.measure(max(2, shape.config.train.batch_size // part), seed=number)
                times.append(found.crowded)
                for name, taken, amounts in found.added:
                    points[f"shared {name}"].append(point_of(1, amounts, taken, disturbance.share()))
    return _figure(times), points


@dataclass(frozen=True)
class _Found:
    crowded: float
    added: list[tuple[str, list[float], dict[str, float]]]
    """One of PARTS_OF_STEP, what each shared step took beyond a plain one, waits left out, and its amounts."""


class _Sides:
    """The same model three times: of this process alone, shared with nobody, and shared with the other."""

    def __init__(self, shape: Shape, comm: Communicator, stack: ExitStack, *, pools: bool) -> None:
        """pools: owners pool the tables that are not small."""
        self.shape, self.comm = shape, comm
        alone = Communicator(Ranks(micro_batches=2))
        self.shards = {own.size: _shards(shape, own.size, pools=pools) for own in (alone, comm)}
        self.plain = build_shape(shape, stack)
        self.lonely = build_shape(shape, stack, alone, shards=self.shards[alone.size])
        self.together = build_shape(shape, stack, comm, shards=self.shards[comm.size])
        length = sum(weight.numel() for weight in self.together.model.parameters() if weight.requires_grad)
        self.together.exchange = OverRanks(comm, lambda: None, length=length)

    def measure(self, batch_size: int, *, seed: int) -> _Found:
        """Takes steps on this rank's part of batches; both ranks call it."""
        num_steps = WARMUP + TIMED
        split = Drawn(self.shape, batch_size * num_steps, np.random.default_rng([seed, batch_size]))
        loader = Loader(cast(Split, split), batch_size, shuffle_seed=1, part=self.comm.ranks.samples)
        batches = list(islice(loader.epoch(0), num_steps))
        alone = self._alone(batches)
        beside = [*self._taken(self.plain, batches)][WARMUP:]
        everyone(self.comm, None)
        together = [*self._taken(self.together, batches)][WARMUP:]
        whole = [replace(batch, of_samples=None) for batch in batches]
        lonely = [*self._taken(self.lonely, whole)][WARMUP:]
        everyone(self.comm, None)
        work = work_of_steps(self.shape, self.plain, batches[WARMUP:])
        added = []
        # With nobody, dense layers run in two parts, which a rank's do not here.
        for num_ranks, steps, dense in ((self.comm.size, together, True), (1, lonely, False)):
            amounts = sharing_amounts(work, self.shards[num_ranks], num_ranks=num_ranks, dense=dense)
            for name, phases in PARTS_OF_STEP.items():
                own = [phase for phase in phases if dense or phase != "dense"]
                plain_s = statistics.median(sum(step[phase] for phase in own) for step in beside)
                taken = [max(1e-7, sum(step[phase] for phase in own) - plain_s) for step in steps]
                added.append((name, taken, amounts[name]))
        crowded = statistics.median(sum(step.values()) for step in beside) / alone
        return _Found(max(1.0, crowded), added)

    def _alone(self, batches: Sequence[Batch]) -> float:
        """Returns the seconds of a plain step of the first rank while the other one rests; both ranks call it."""
        steps = [*self._taken(self.plain, batches)][WARMUP:] if self.comm.rank == 0 else []
        everyone(self.comm, None)  # the other one waits here
        return statistics.median(sum(step.values()) for step in steps) if steps else 1.0

    def _taken(self, parts: Parts, batches: Sequence[Batch]) -> Iterator[dict[str, float]]:
        for step, batch in enumerate(batches):
            clock = _Laps(self.comm)
            float(train_step(parts, batch, step, cast(Any, clock)))
            yield clock.seconds


def _shards(shape: Shape, num_ranks: int, *, pools: bool) -> dict[str, Shard]:
    found = {}
    for t, table in enumerate(shape.info.tables):
        if table.num_embeddings <= REPLICATED_ROWS:
            found[table.name] = Shard(prefix=table.num_embeddings)
        elif pools:
            found[table.name] = Shard(kind="table", owner=t % num_ranks, exchange="pooled")
        else:
            found[table.name] = Shard()
    return found


class _Laps:
    """Seconds of a step by phase, without its exchanges."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._comm.counts.exchange_s

    def lap(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] += now - self._last
        self._last = now


if __name__ == "__main__":
    main(sys.argv[1:])
