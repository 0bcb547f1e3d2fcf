"""What it costs processes of this machine to train together: exchanges, sharing rows, and each other's presence.

    hotrow probe --starts--> python -m hotrow.lab.rank_probe FOLDER RANK SECONDS, four times; the first writes gloo.json
                 --starts--> mpiexec -n 2 python -m hotrow.lab.rank_probe FOLDER; the first writes mpi.json

Two processes exchange messages without bytes and large ones, over gloo, and over MPI if it is installed. Each takes the
other one for several, too: what each further one takes is what messages to a further rank take.
Then processes joined by gloo take real training steps of the shapes of step_probe.py: each for itself, two together,
and four. What the processor works for a step together beyond one of the same samples, exchanges left out, is what
sharing takes: points of `shared lookup`, and of `shared update` for all that follows, for costs/cost.py. It is the time
of one thread on its processor, in which no wait counts, as if the other processes rested. A process can share a
model with nobody, in two micro-batches: so one, two and four ranks say what each further rank adds. Plain steps while
the other processes rest say how much longer they take if one does not (`Hardware.crowding`).
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from hotrow.costs.cost import PHASES
from hotrow.costs.hardware import Figure, Network, Point
from hotrow.costs.wire import sharing_amounts
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import Split
from hotrow.lab import mpi_start
from hotrow.lab.step_probe import Drawn, Shape, build_shape, note_of, point_of, shapes, work_of_steps
from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import OverRanks
from hotrow.parallel.gloo import communicator
from hotrow.parallel.launch import joined
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.shards import Shard
from hotrow.parallel.transport import InFlight, Transport
from hotrow.run.build import Parts
from hotrow.run.trainer import train_step

SMALL, LARGE_BYTES = 50, 2 << 20
"""Exchanges of a round without bytes, and the bytes of a large message."""
RANKS, MANY = 4, 9
"""Processes that take steps together; as how many ranks two processes exchange messages, to see what each takes."""
ROUNDS = 9
WARMUP, TIMED = 2, 5
"""Steps with each batch size."""
SAMPLES, PARTS = 2048, (1, 8)
"""Steps have at least so many samples, or an eighth of them: in much smaller ones, what a value takes is less than the
noise."""
MAX_TABLE_BYTES = 48 << 20
REPLICATED_ROWS = 64
"""Tables of at most so many rows lie on both ranks, as small tables of a run do."""
PARTS_OF_STEP = {"lookup": ("lookup",), "update": ("dense", "update")}
"""What sharing adds to, by phases."""
MIN_SHAPES = 6
"""With fewer, there would be fewer points than kinds of amounts."""
SLACK_S, POLL_S = 180.0, 0.05
"""What processes may take beside the time that they measure in, to meet above all; and between two looks at them."""


def measure_ranks(*, seconds: float, progress: Callable[[str], object]) -> Mapping[str, Any]:
    """Returns fields of `Hardware`: `network`, `mpi`, `crowding`, points by phase as `kernels`; and `notes` that say
    why fields are missing, if processes cannot train together here.
    """
    progress("processes that train together")
    found: dict[str, Any] = {"notes": {}}
    with tempfile.TemporaryDirectory(prefix="hotrow-ranks-") as name:
        folder = Path(name)
        for field, run, kind in (("network", _run_over_gloo, _Measured), ("mpi", _run_over_mpi, Network)):
            if (reason := run(folder, seconds)) is not None:
                found["notes"][field] = f"two processes cannot train together here: {reason}"
                continue
            read = TypeAdapter(kind).validate_json((folder / f"{field}.json").read_bytes())
            found |= {field: read} if kind is Network else vars(read)
    return found


def _run_over_gloo(folder: Path, seconds: float) -> str | None:
    """Runs the processes over gloo; returns why they failed, None if they did not. seconds: for steps."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    wait_passively(environ)  # as the ranks of a run do
    command = [sys.executable, "-m", "hotrow.lab.rank_probe", str(folder)]
    with ExitStack() as stack:
        errors = stack.enter_context((folder / "errors").open("wb"))
        ranks = [
            subprocess.Popen([*command, str(rank), str(seconds)], env=environ, stdout=subprocess.DEVNULL, stderr=errors)
            for rank in range(RANKS)
        ]
        return _ended([stack.enter_context(rank) for rank in ranks], folder, seconds)


def _run_over_mpi(folder: Path, seconds: float) -> str | None:
    """The same of two processes over MPI."""
    environ = dict(os.environ)
    wait_passively(environ)
    with (folder / "errors").open("wb") as errors:
        try:
            outputs: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": errors}
            launcher = mpi_start.start(2, "-m", "hotrow.lab.rank_probe", str(folder), env=environ, **outputs)
        except ValueError as error:
            return str(error)
        with launcher:
            return _ended([launcher], folder, seconds)


def _ended(processes: Sequence[subprocess.Popen[Any]], folder: Path, seconds: float) -> str | None:
    """Waits for processes, and ends those that are late; returns why they failed, None if they did not."""
    until_s = time.monotonic() + seconds + SLACK_S
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > until_s:
                return "they did not come to an end"
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.terminate()
    said = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return (said[-1] if said else "one of them ended without a word") if any(codes) else None


@dataclass
class _Measured:
    network: Network
    crowding: Figure
    kernels: dict[str, list[Point]]


# ---- in the processes


def main(arguments: Sequence[str]) -> None:
    folder, *of_gloo = arguments
    if not of_gloo:
        with joined() as comm:
            over_mpi = _network(comm, _others(comm))
            if comm.rank == 0:
                write_json(Path(folder, "mpi.json"), asdict(over_mpi))
            everyone(comm, None)
        return
    rank, seconds = int(of_gloo[0]), float(of_gloo[1])
    until_s = time.monotonic() + seconds
    torch.set_num_threads(max(1, usable_cores() // 2))
    limit = timedelta(seconds=seconds + SLACK_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=limit)
    comm, group = communicator(), dist.new_group([0, 1])
    two = communicator(group) if rank < 2 else None
    network = _network(two, _others(two)) if two is not None else None
    everyone(comm, None)  # the others rest meanwhile
    crowding, kernels = _steps(comm, two, until_s)
    points = {phase: [asdict(point) for point in own] for phase, own in kernels.items()}
    if network is not None and rank == 0:
        found = {"network": asdict(network), "crowding": asdict(crowding), "kernels": points}
        write_json(Path(folder, "network.json"), found)
    dist.barrier()
    os._exit(0)  # a thread of gloo may abort a process that ends as usual


def _others(comm: Communicator) -> list[int]:
    return [pid for pid in everyone(comm, os.getpid()) if pid != os.getpid()]


@dataclass
class _AsMany:
    """A transport to one process that stands for all other ranks, each with tags of its own."""

    transport: Transport
    other: int

    def send(self, message: torch.Tensor, to: int, tag: int) -> InFlight:
        return self.transport.send(message, self.other, tag * MANY + to)

    def receive(self, into: torch.Tensor, source: int, tag: int) -> InFlight:
        return self.transport.receive(into, self.other, tag * MANY + source)


def _network(comm: Communicator, pids: Sequence[int]) -> Network:
    """Returns what exchanges of two ranks take. Both call it."""
    assert comm.transport is not None
    many = Communicator(Ranks(size=MANY, micro_batches=MANY), _AsMany(comm.transport, 1 - comm.rank))

    def messages(own: Communicator, num_bytes: int) -> list[torch.Tensor]:
        return [torch.zeros(num_bytes * (rank != own.rank), dtype=torch.uint8) for rank in range(own.size)]

    rounds: list[tuple[float, float, float, float]] = []
    disturbance = Disturbance(pids)
    for _ in range(ROUNDS):
        # Each message has a head, which is a message too.
        message_s, message_cpu_s = (each / 2 for each in _exchange_s(comm, messages(comm, 1), SMALL))
        _, all_cpu_s = (each / 2 for each in _exchange_s(many, messages(many, 1), SMALL))
        further_s = max(1e-9, all_cpu_s - message_cpu_s) / (MANY - 2)
        whole_s, cpu_s = _exchange_s(comm, messages(comm, LARGE_BYTES), 4)
        bytes_s = max(whole_s / 4, whole_s - 2 * message_s)  # a disturbed message may seem to take all of it
        rounds.append((LARGE_BYTES / bytes_s, message_s, further_s, cpu_s / LARGE_BYTES))
    note = note_of(disturbance.share())
    return Network(*(Figure.of(values, note) for values in zip(*rounds, strict=True)))


def _exchange_s(comm: Communicator, parts: list[torch.Tensor], times: int) -> tuple[float, float]:
    """Returns the seconds that an exchange takes, and the seconds of processor time in this process."""
    comm.exchange(parts, purpose="probe")
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(times):
        comm.exchange(parts, purpose="probe")
    return (time.perf_counter() - start) / times, (time.process_time() - cpu_start) / times


def _steps(comm: Communicator, two: Communicator | None, until_s: float) -> tuple[Figure, dict[str, list[Point]]]:
    """Returns how much longer plain steps take beside another process's, and points of what sharing takes. All ranks of
    `comm` call it; the first two of them have `two`."""
    crowded, points = list[float](), {f"shared {name}": [] for name in PARTS_OF_STEP}  # type: ignore[var-annotated]
    in_dram = (shape for shape in shapes(MAX_TABLE_BYTES) if shape.in_tiers is None)
    for number, shape in enumerate(in_dram):
        if number >= MIN_SHAPES and not everyone(comm, time.monotonic() < until_s)[0]:
            break
        with ExitStack() as stack:
            sides = [_Sides(shape, own, stack, pools=number % 2 == 1) for own in (two, comm) if own is not None]
            for part, own in itertools.product(PARTS, sides):
                found = own.measure(max(SAMPLES, shape.config.train.batch_size) // part, seed=number)
                crowded += [found.crowded] * (own.comm is two)
                for name, taken, amounts in found.added:
                    points[f"shared {name}"].append(point_of(torch.get_num_threads(), amounts, taken, 0.0))
            everyone(comm, None)  # others wait here while two take their steps
    return Figure.of(crowded or [1.0, 1.0]), points


@dataclass(frozen=True)
class _Found:
    crowded: float
    added: list[tuple[str, list[float], dict[str, float]]]
    """One of PARTS_OF_STEP, what each shared step took beyond a plain one, exchanges left out, and its amounts."""


class _Sides:
    """The same model three times: of this process alone, shared with nobody, and shared with the others of `comm`."""

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
        """Takes steps on this rank's part of batches; all ranks of `comm` call it."""
        num_steps = WARMUP + TIMED
        split = Drawn(self.shape, batch_size * num_steps, np.random.default_rng([seed, batch_size]))
        loader = Loader(cast(Split, split), batch_size, shuffle_seed=1, part=self.comm.ranks.samples)
        batches = list(islice(loader.epoch(0), num_steps))
        rests = self._taken(self.plain, batches) if self.comm.rank == 0 else None
        everyone(self.comm, None)  # the others have waited here
        plain, beside_s = self._taken(self.plain, batches)
        alone, alone_s = rests or (plain, beside_s)
        everyone(self.comm, None)
        with _counting_work(self.comm):
            together, _ = self._taken(self.together, batches)
        lonely, _ = self._taken(self.lonely, [replace(batch, of_samples=None) for batch in batches])
        everyone(self.comm, None)
        work = work_of_steps(self.shape, self.plain, batches[WARMUP:])
        added = []
        # With nobody, dense layers run in two parts, which a rank's do not here.
        for num_ranks, steps, dense in ((self.comm.size, together, True), (1, lonely, False)):
            amounts = sharing_amounts(work, self.shards[num_ranks], num_ranks=num_ranks, dense=dense)
            for name, phases in PARTS_OF_STEP.items():
                own = [phase for phase in phases if dense or phase != "dense"]
                plain_s, quiet_s = (
                    statistics.median(sum(step[phase] for phase in own) for step in each) for each in (plain, alone)
                )
                # All that a processor does beside other ranks takes longer, which the model counts for itself.
                taken = [quiet_s / plain_s * (sum(step[phase] for phase in own) - plain_s) for step in steps]
                added.append((name, [max(1e-7, each) for each in taken], amounts[name]))
        return _Found(max(1.0, beside_s / alone_s), added)

    def _taken(self, parts: Parts, batches: Sequence[Batch]) -> tuple[list[dict[str, float]], float]:
        """Returns the processor's seconds of each step, by phase, and the median step's seconds; warm-up left out."""
        found = []
        for step, batch in enumerate(batches):
            clock, start_s = _Laps(self.comm), time.perf_counter()
            float(train_step(parts, batch, step, cast(Any, clock)))
            found.append((clock.seconds, time.perf_counter() - start_s))
        return [seconds for seconds, _ in found[WARMUP:]], statistics.median(s for _, s in found[WARMUP:])


@contextmanager
def _counting_work(comm: Communicator) -> Iterator[None]:
    """Inside the block `comm` counts this thread's time on its processor for exchanges, instead of their seconds."""
    before, comm.counts.clock = comm.counts.clock, time.thread_time
    yield
    comm.counts.clock = before


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
    """What this thread works for a step on its processor, in seconds by phase, without its exchanges."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = self._now()

    def _now(self) -> float:
        return time.thread_time() - self._comm.counts.exchange_s

    def lap(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] += now - self._last
        self._last = now


if __name__ == "__main__":
    main(sys.argv[1:])
