"""The processes of the study `memory`, one per side. Pipes tell them when to train, so that no two compute at once.

A worker reads one JSON object a line and answers with one: {"do": "build"}, {"do": "train", ...}; it ends when its
input ends. `Worker` is the parent's side of the pipes, `Server` the child's. benchmarks/rank_worker.py has another
`Server`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from benchmarks.study.group import MemoryGroup, enter_and

ROOT = str(Path(__file__).resolve().parents[2])


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of a worker's process."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1", "PYTHONPATH": ROOT}


class WorkerError(RuntimeError):
    """A worker's process ended, or reported why it cannot continue."""


class Worker:
    """A side in a process of its own, inside `group` if there is one. A context manager, which ends the process.

    module: the one whose `main` serves. before: words of the command before Python, which start it elsewhere.
    """

    def __init__(
        self,
        side: str,
        work: Any,
        settings: Any,
        *,
        threads: int,
        group: MemoryGroup | None = None,
        module: str = __name__,
        before: Sequence[str] = (),
    ) -> None:
        self.side, self.group = side, group
        self._process: subprocess.Popen[str] = subprocess.Popen(
            enter_and(group, [*before, sys.executable, "-c", f"from {module} import main; main()"]),
            env=environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asks, self._answers = self._process.stdin, self._process.stdout
        self.tell(side=side, work=asdict(work), settings=asdict(settings))

    @property
    def pid(self) -> int:
        """The id of the worker's process."""
        return self._process.pid

    def ready(self) -> None:
        """Waits until the worker has warmed up; call it before the first `ask`. Raises WorkerError."""
        self.answer()

    def ask(self, **what: Any) -> dict[str, Any]:
        """Returns the answer. Raises WorkerError with the reason."""
        self.tell(**what)
        return self.answer()

    def tell(self, **what: Any) -> None:
        """Asks, and does not wait for the answer."""
        with suppress(BrokenPipeError):  # the missing answer reports it
            self._asks.write(json.dumps(what) + "\n")
            self._asks.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer. Raises WorkerError with the reason."""
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            why = "it was killed, as happens above the memory limit" if status in (-9, 137) else f"status {status}"
            raise WorkerError(f"the process of side {self.side} ended: {why}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"side {self.side}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process and removes its group."""
        with suppress(BrokenPipeError):
            self._asks.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        if self.group is not None:
            self.group.remove()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._process.kill()  # nobody needs its work any more
        self.close()


class Server:
    """The child's end: a side and the requests it answers."""

    def __init__(self, side: str, work: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        from benchmarks.rivals import sides, stores
        from benchmarks.rivals.work import Work

        lists: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in work.items()}
        self.work = Work(**lists)
        kinds = {"dram": sides.Side, "tiers": sides.InTiers, "mmap": stores.Mapped, "rocksdb": stores.Rocks}
        self._warm_up(sides)
        self.side = kinds[side](self.work, sides.Settings(**settings))

    def _warm_up(self, sides: Any) -> None:
        """Trains three steps on tables of one row, to load common buffers and code before the limit is set."""
        small = replace(self.work, rows=(1,) * len(self.work.rows), zipf=1.05, trace=None)
        side = sides.Side(small, None)
        side.build()
        side.train(list(islice(small.batches(), 3)), settle=1, steps=2, ahead=0)

    def build(self) -> dict[str, Any]:
        """Makes the tables and returns their facts. Memory that was needed only to make them is given back."""
        self.side.build()
        with suppress(AttributeError):  # another malloc
            ctypes.CDLL(None).malloc_trim(0)
        return self.side.facts()

    def train(self, *, batches: str, settle: int, steps: int, ahead: int) -> dict[str, Any]:
        """Trains on the batches of a file; to the last `ahead` of them it only looks ahead."""
        from benchmarks.rivals.work import read_batches

        return self.side.train([*read_batches(batches, self.work)], settle=settle, steps=steps, ahead=ahead)

    def save(self) -> dict[str, Any]:
        """Saves a checkpoint and returns what it took."""
        found: dict[str, Any] = self.side.save()
        return found


def serve(lines: TextIO, answers: TextIO, make: Callable[..., Any]) -> None:
    """Answers each line, until the input ends or a request fails. make: given the first line, returns what serves."""
    server: Any = None
    answer: dict[str, Any] = {}
    for line in lines:
        what = json.loads(line)
        try:
            if server is None:
                server = make(**what)
            else:
                answer = getattr(server, what.pop("do"))(**what)
        except Exception as error:  # the parent reports it
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            answers.flush()
            return
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(make: Callable[..., Any] = Server) -> None:
    """Answers on the original stdout; everything that prints goes to stderr. make: see `serve`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore", "table .* is read and written by .* threads")  # wanted, or reported by `facts`
    serve(sys.stdin, answers, make)
