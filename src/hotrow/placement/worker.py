"""A thread beside the step, for work that must be done in the order in which it was asked for."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from hotrow.placement.stores import StoreError

T = TypeVar("T")


class Worker:
    """A thread that does what it is asked, in the order of the calls. It starts when it is first asked."""

    def __init__(self, name: str) -> None:
        self._name, self._process, self._closed = name, os.getpid(), False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child, which has no such thread."""
        return os.getpid() != self._process

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """Returns at once a future, which will have the result or the error. After `end` the caller does the work
        itself. It waits for no lock once the thread has started, so that finalizers may call it. Raises StoreError in a
        forked child, which has no such thread."""
        if self.forked:
            raise StoreError(
                "the tables on a device belong to the process that this one was forked from: use them there, or start "
                "workers with multiprocessing's 'spawn' and make a collection in each"
            )
        job = _Job(work)
        if self._closed:
            job.do()
            return job.answer
        self._jobs.put(job)
        if self._thread is None:
            thread = threading.Thread(target=_run, args=(self._jobs,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # not one that the system refused: nobody would do what the next call asks
            atexit.register(self.close)  # a thread in the middle of a copy would not survive the interpreter's end
        return job.answer

    def end(self) -> None:
        """Ends the thread when it has done what it was asked; finalizers may call it, since it does not wait."""
        self._closed = True
        self._jobs.put(None)
        atexit.unregister(self.close)

    def close(self) -> None:
        """As `end`, and waits for it."""
        self.end()
        if self._thread is not None and not self.forked:
            self._thread.join()


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self.answer = work, Future[Any]()

    def do(self) -> None:
        try:
            self.answer.set_result(self._work())
        except BaseException as error:  # whoever asked gets it
            self.answer.set_exception(error)


def _run(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.do()
        del job  # it keeps the tables alive
