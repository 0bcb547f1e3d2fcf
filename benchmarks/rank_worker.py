"""The processes of benchmarks.ranks: a group of ranks, which a parent tells over pipes what to do, all at once.

`Group` is the parent's side, `RankServer` the child's; both speak the protocol of benchmarks/rivals/worker.py.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import mpi_start
from benchmarks.rank_peers import TorchrecRank
from benchmarks.rank_sides import MPI, OurRank, Rank, RankWork, Seat, link_bytes_per_s
from benchmarks.rivals import worker
from benchmarks.rivals.worker import Worker
from hotrow.parallel.agreement import everyone
from hotrow.parallel.gloo import Gloo
from hotrow.parallel.launch import joined
from hotrow.parallel.transport import Transport

TIMEOUT = timedelta(seconds=120)
"""Of a collective, so that a group whose rank failed ends."""
SETTLE_S = 0.2
"""After so long what a step has sent has left the sockets' buffers."""
BYTES_SENT = 200
"""Where Linux's struct tcp_info has tcpi_bytes_sent: bytes of data that a connection has sent, without headers."""


class Group:
    """The ranks of one side, each a process of one thread. A context manager, which ends them."""

    def __init__(self, side: str, work: RankWork, *, over_mpi: bool = False, **seat: Any) -> None:
        """over_mpi: ranks meet and exchange over MPI, not gloo. seat: of every rank, what `Seat` says beside its rank
        and address."""
        self.side, self.work, self.over_mpi, self.seat = side, work, over_mpi, seat
        self._stack = ExitStack()
        self.ranks: list[Worker] = []

    def start(self, *, host: str = "127.0.0.1", before: Sequence[Sequence[str]] = ()) -> Group:
        """Starts the processes. host: rank 0's. before: by rank, the words that start it elsewhere."""
        if self.over_mpi:
            launcher, connections = self._stack.enter_context(called_back(self.work.num_ranks))
            seat = Seat(rank=-1, address=MPI, **self.seat)
            ranks = [MpiRank(self.side, self.work, seat, connection, launcher) for connection in connections]
        else:
            address = f"tcp://{host}:{free_port()}"
            ranks = [
                Worker(
                    self.side,
                    self.work,
                    Seat(rank=rank, address=address, **self.seat),
                    threads=self.work.threads,
                    module="benchmarks.rank_worker",
                    before=before[rank] if before else (),
                )
                for rank in range(self.work.num_ranks)
            ]
        self.ranks = [self._stack.enter_context(rank) for rank in ranks]
        for each in self.ranks:
            each.ready()
        return self

    def ask(self, **what: Any) -> list[dict[str, Any]]:
        """Returns the answers of all ranks, which work at the same time. Raises WorkerError with the reason."""
        for rank in self.ranks:
            rank.tell(**what)
        return [rank.answer() for rank in self.ranks]

    def seconds(self, **what: Any) -> float:
        """Returns what the slowest rank took for what is asked."""
        return max(float(answer["seconds"]) for answer in self.ask(**what))

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def free_port() -> int:
    """Returns a port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class MpiRank(Worker):
    """A rank that mpiexec started. It has called back, and the connection stands for the pipes of a `Worker`."""

    def __init__(
        self, side: str, work: RankWork, seat: Seat, connection: socket.socket, launcher: subprocess.Popen[str]
    ) -> None:
        self.side, self.group, self._process = side, None, launcher
        self._asks, self._answers = connection.makefile("w"), connection.makefile("r")
        self._pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        connection.close()  # the files keep it open
        self.tell(side=side, work=asdict(work), settings=asdict(seat))

    @property
    def pid(self) -> int:
        return int(self._pid)

    def close(self) -> None:
        """Ends the rank; the launcher ends with the last one."""
        self._answers.close()
        self._asks.close()


@contextmanager
def called_back(num_ranks: int) -> Iterator[tuple[subprocess.Popen[str], list[socket.socket]]]:
    """Yields mpiexec, which starts ranks, and a connection to each of them. Ends mpiexec after the block."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/meet")
        listener.listen(num_ranks)
        listener.settimeout(TIMEOUT.total_seconds())
        code = "from benchmarks.rank_worker import call_back; call_back()"
        with mpi_start.start(num_ranks, "-c", code, f"{folder}/meet", env=worker.environment(1)) as launcher:
            try:
                yield launcher, [listener.accept()[0] for _ in range(num_ranks)]
                launcher.wait(TIMEOUT.total_seconds())
            finally:
                launcher.terminate()


def call_back() -> None:
    """Serves as one of the ranks that `called_back` starts."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        for number in (0, 1):
            os.dup2(connection.fileno(), number)
    main()


class RankServer:
    """The child's end: a rank and the requests it answers. All ranks are asked the same at the same time."""

    def __init__(self, side: str, work: dict[str, Any], settings: dict[str, Any], *, stack: ExitStack) -> None:
        """stack: is closed when the rank has served."""
        seat, of = Seat(**settings), RankWork(**work)
        torch.set_num_threads(of.threads)
        self.meet: Callable[[], object] = dist.barrier
        transport: Transport = Gloo()
        if seat.address == MPI:
            comm = stack.enter_context(joined())
            assert comm.transport is not None
            seat, transport, self.meet = replace(seat, rank=comm.rank), comm.transport, partial(everyone, comm, None)
        else:
            dist.init_process_group(
                "gloo", init_method=seat.address, rank=seat.rank, world_size=of.num_ranks, timeout=TIMEOUT
            )
        made: Rank = OurRank(of, seat, transport) if side == "hotrow" else TorchrecRank(of, seat)
        self.rank: Any = made
        self.meet()

    def train(self, *, first: int, steps: int) -> dict[str, Any]:
        """Trains on batches number first, first + 1, ...; returns the seconds it took, those of the processor, and the
        losses."""
        self.meet()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = [self.rank.train(batch) for batch in range(first, first + steps)]
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return {"seconds": seconds, "cpu_s": cpu_s, "losses": losses}

    def listen(self, *, batches: int) -> dict[str, Any]:
        """Notes what the exchanges of one step on each of the first batches return."""
        losses = []
        for batch in range(batches):
            self.rank.comm.listen(batch)
            losses.append(self.rank.train(batch))
            self.rank.comm.live()
        return {"losses": losses}

    def replay(self, *, batches: int, steps: int) -> dict[str, Any]:
        """Trains on the first batches, over and over, with the answers that were noted in place of the wire."""
        losses, seconds = [], 0.0
        for step in range(steps):
            self.rank.comm.replay(step % batches)
            start = time.perf_counter()
            losses.append(self.rank.train(step % batches))
            seconds += time.perf_counter() - start
            self.rank.comm.live()
        return {"seconds": seconds, "losses": losses}

    def count(self, *, first: int, steps: int, tables_only: bool) -> dict[str, Any]:
        """Counts what this rank sends in steps on batches first, first + 1, ..., and what it has to at least.

        tables_only: only looks up and updates.
        """
        rank: OurRank = self.rank
        step: Any = rank.look_up_and_update if tables_only else rank.train
        rank.comm.counts.sent_bytes.clear()
        time.sleep(SETTLE_S)
        idle = sent_bytes()
        time.sleep(SETTLE_S)
        before = sent_bytes()
        for batch in range(first, first + steps):
            step(batch)
        time.sleep(SETTLE_S)
        return {
            "idle_bytes": before - idle,
            "sent_bytes": sent_bytes() - before,
            "counted_bytes": dict(rank.comm.counts.sent_bytes),
            "least_bytes": sum(rank.least_bytes(batch) for batch in range(first, first + steps)),
        }

    def link(self) -> dict[str, Any]:
        """Measures the link between two ranks."""
        return {"bytes_per_s": max(link_bytes_per_s() for _ in range(3))}


def sent_bytes() -> int:
    """Returns the bytes that the TCP connections of this process have sent, by the kernel's count of each."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_socket = str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:  # that of the folder itself
            continue
        if is_socket:
            with socket.socket(fileno=os.dup(int(entry.name))) as own:
                if own.type == socket.SOCK_STREAM and own.family in (socket.AF_INET, socket.AF_INET6):
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT + 8)
                    if len(info) < BYTES_SENT + 8:
                        raise OSError("this kernel does not count the bytes that a connection sends: Linux 4.19 does")
                    total += struct.unpack_from("<Q", info, BYTES_SENT)[0]
    return total


def main() -> None:
    with ExitStack() as stack:
        worker.main(partial(RankServer, stack=stack))
