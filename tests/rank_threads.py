"""Ranks as threads of one process, for tests: called as a RankPool, and without its processes.

    results = ThreadPool().run(function, argument, num_ranks=3, micro_batches=5)     # function(comm, argument) on three

Their transport is a list of messages for each sender, receiver and tag. What a function alters of a module is altered
for all ranks: such tests, and those of whole runs (signals, log files), need the processes of rank_pool.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotrow.parallel.communicator import Communicator
from hotrow.parallel.ranks import Ranks

LIMIT_S = 60.0


class Lane:
    """Messages of one sender to one receiver with one tag: the nth that is asked for is the nth that was sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.num_asked = 0
        self.more = threading.Condition()


@dataclass
class Mail:
    """Messages on their way between threads, by sender, receiver and tag."""

    lanes: defaultdict[tuple[int, int, int], Lane] = field(default_factory=lambda: defaultdict(Lane))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lane(self, sender: int, receiver: int, tag: int) -> Lane:
        with self.lock:
            return self.lanes[sender, receiver, tag]


@dataclass
class Threads:
    """A `Transport` of one rank, which is a thread."""

    rank: int
    mail: Mail

    def send(self, message: Tensor, to: int, tag: int) -> Sent:
        lane = self.mail.lane(self.rank, to, tag)
        with lane.more:
            lane.sent.append(message.clone())
            lane.more.notify_all()
        return Sent()

    def receive(self, into: Tensor, source: int, tag: int) -> Coming:
        lane = self.mail.lane(source, self.rank, tag)
        lane.num_asked += 1
        return Coming(lane, lane.num_asked - 1, into)


class Sent:
    def wait(self) -> None:
        pass


@dataclass
class Coming:
    lane: Lane
    number: int
    into: Tensor

    def wait(self) -> None:
        with self.lane.more:
            assert self.lane.more.wait_for(lambda: len(self.lane.sent) > self.number, timeout=LIMIT_S)
            message = self.lane.sent[self.number]
        assert (message.dtype, message.shape) == (self.into.dtype, self.into.shape)
        self.into.copy_(message)


class ThreadPool:
    """Ranks as threads: called as a RankPool."""

    def run(self, function: Callable[..., Any], *arguments: Any, num_ranks: int, micro_batches: int) -> list[Any]:
        mail = Mail()

        def on(rank: int) -> Any:
            return function(Communicator(Ranks(rank, num_ranks, micro_batches), Threads(rank, mail)), *arguments)

        before = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a RankPool; threads of threads would wait for each other
        try:
            with ThreadPoolExecutor(num_ranks) as threads:
                return list(threads.map(on, range(num_ranks)))
        finally:
            torch.set_num_threads(before)
