"""Processes that are the ranks of a world, for tests: spawned once for a file, joined by gloo, given functions to run.

    with RankPool(4) as pool:
        results = pool.run(function, argument, num_ranks=3, micro_batches=5)  # function(world, argument) on three

A rank that raises sends the text, and the test fails with it; one that hangs ends the test after `timeout_s`.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from hotrow.parallel.world import World

_OK, _FAILED = "ok", "failed"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class RankPool:
    """`num_ranks` processes; the first R of them are the ranks of a world of R."""

    def __init__(self, num_ranks: int, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, num_ranks, port), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, num_ranks: int, micro_batches: int) -> list[Any]:
        """Returns what `function(world, *arguments)` returns on each of the first `num_ranks` ranks."""
        for pipe in self._pipes[:num_ranks]:
            pipe.send((function, arguments, num_ranks, micro_batches))
        answers = []
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            assert pipe.poll(self.timeout_s), f"rank {rank} has not answered in {self.timeout_s:g} s"
            answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{what}" for rank, (how, what) in enumerate(answers) if how != _OK]
        assert not failed, "\n".join(failed)
        return [what for _, what in answers]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    address, wait = f"tcp://127.0.0.1:{port}", timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=wait)
    groups = {n: dist.new_group(list(range(n)), timeout=wait) for n in range(1, num_ranks + 1)}
    while True:
        function, arguments, own_ranks, micro_batches = pipe.recv()
        try:
            pipe.send((_OK, function(World.of(groups[own_ranks], micro_batches), *arguments)))
        except BaseException:
            pipe.send((_FAILED, traceback.format_exc()))
