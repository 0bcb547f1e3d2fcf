"""Processes that are ranks, for tests: made once for a file, joined by gloo, given functions to run.

    with RankPool(4) as pool:                          # or pool = rank_pool(4), a fixture
        results = pool.run(function, argument, num_ranks=3, micro_batches=5)  # function(comm, argument) on three

A rank that raises sends the text, and the test fails with it; one that hangs ends the test after `timeout_s`. One that
crashes prints where. They are forked from the server of benchmarks.rank_runs, which has imported torch for all.
"""

from __future__ import annotations

import faulthandler
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.rank_runs import CONTEXT
from hotrow.parallel.gloo import communicator

_OK, _FAILED = "ok", "failed"


class RankPool:
    """`num_ranks` processes; the first R of them can be ranks of a run."""

    def __init__(self, num_ranks: int, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="hotrow-pool-")
        meeting = f"file://{self._folder.name}/meeting"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(there, rank, num_ranks, meeting), daemon=True)
            # As torchrun does: threads of numpy's BLAS wait for each other in busy loops, minutes on a loaded machine.
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OMP_NUM_THREADS", "1")
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, num_ranks: int, micro_batches: int) -> list[Any]:
        """Returns what `function(comm, *arguments)` returns on each of the first `num_ranks` ranks."""
        for pipe in self._pipes[:num_ranks]:
            pipe.send((function, arguments, num_ranks, micro_batches))
        answers = []
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            assert pipe.poll(self.timeout_s), f"rank {rank} has not answered in {self.timeout_s:g} s"
            try:
                answers.append(pipe.recv())
            except EOFError:
                self._processes[rank].join(self.timeout_s)
                codes = [process.exitcode for process in self._processes]
                raise AssertionError(f"rank {rank} has ended; exit codes by rank: {codes}") from None
        failed = [f"rank {rank}:\n{what}" for rank, (how, what) in enumerate(answers) if how != _OK]
        assert not failed, "\n".join(failed)
        return [what for _, what in answers]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def rank_pool(num_ranks: int) -> Any:
    """A fixture: a pool for the tests of a module."""

    @pytest.fixture(scope="module")
    def pool() -> Iterator[RankPool]:
        with RankPool(num_ranks) as ranks:
            yield ranks

    return pool


def _serve(pipe: Connection, rank: int, num_ranks: int, meeting: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    wait = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks, timeout=wait)
    groups = {n: dist.new_group(list(range(n)), timeout=wait) for n in range(1, num_ranks + 1)}
    while True:
        function, arguments, own_ranks, micro_batches = pipe.recv()
        try:
            pipe.send((_OK, function(communicator(groups[own_ranks], micro_batches), *arguments)))
        except BaseException:
            pipe.send((_FAILED, traceback.format_exc()))
