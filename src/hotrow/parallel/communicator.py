"""How ranks exchange messages: all ranks send each other something at the same time, and its bytes are counted.

Everything that ranks send each other in a run goes through `Communicator.begin` and `gather_number`. Ahead of a message
goes its head: its length, and at which exchange the rank is. So a rank that failed can say so, and ranks that are at
different exchanges find out. Nobody waits for a head before it sends its messages.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from hotrow.kernels import ops
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.transport import InFlight, Transport

_HEAD = struct.Struct("qq")
COUNT_BYTES = _HEAD.size
"""Bytes of a head; `gather_number` sends no more."""
MAX_ERROR_BYTES = 1 << 14
"""Bytes of an error's text that other ranks get."""
_HEADS_TAG, _TAGS, _LANES = 0, 1 << 20, 1 << 10
"""How many exchanges have tags of their own, and communicators of one group."""
Messages: TypeAlias = Sequence[Tensor] | Callable[[], Sequence[Tensor]]


class TransportError(RuntimeError):
    """Raised if messages cannot be exchanged, as after another rank has ended."""


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a transport raises
        raise TransportError(str(error)) from error


@dataclass
class ExchangeCounts:
    """What a rank has exchanged with others since it began."""

    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank has sent to others, by purpose."""
    exchange_s: float = 0.0
    """Seconds in exchanges, most of it waiting for other ranks."""
    clock: Callable[[], float] = time.perf_counter
    """What counts these seconds."""
    num_exchanges: int = 0
    num_meetings: int = 0
    """How often this rank waited for others; exchanges that begin before it waits for one are one meeting."""
    _has_waited: bool = True

    def add(self, purpose: str, num_bytes: int) -> None:
        self.sent_bytes[purpose] = self.sent_bytes.get(purpose, 0) + num_bytes

    def begin(self) -> int:
        """Counts an exchange that begins now; returns its number."""
        self.num_meetings += self._has_waited
        self._has_waited = False
        self.num_exchanges += 1
        return self.num_exchanges - 1

    def wait(self) -> None:
        """Notes that this rank waits now."""
        self._has_waited = True


class Arriving:
    """What ranks send each other in one exchange, while it may still be on its way."""

    def __init__(
        self,
        counts: ExchangeCounts,
        received: list[Tensor],
        in_flight: Sequence[InFlight] = (),
        *,
        sent: Sequence[Tensor] = (),
        opened: Callable[[list[Tensor]], tuple[Sequence[InFlight], Callable[[], object]]] | None = None,
    ) -> None:
        """sent: is kept until nothing is in flight any more. opened: waits for the heads of messages, puts memory for
        these into `received`, and returns what is in flight to it, and what raises if a rank has failed."""
        self._counts, self._received, self._in_flight, self._sent = counts, received, in_flight, sent
        self._opened = opened
        self._check: Callable[[], object] = lambda: None

    def wait(self) -> list[Tensor]:
        """Returns what each rank sent here, by rank, once all of it is here and what this rank sent has left. A second
        call returns or raises the same. Raises ValueError if the function that makes messages raised one on any rank,
        and RuntimeError for any other error there or if a rank is at another exchange."""
        if self._opened is not None or self._in_flight:
            start = self._counts.clock()
            self._counts.wait()
            opened, self._opened = self._opened, None
            more: Sequence[InFlight] = ()
            if opened is not None:
                more, self._check = opened(self._received)
            with _named_errors():
                for message in (*self._in_flight, *more):
                    message.wait()
            self._in_flight, self._sent = (), ()
            self._counts.exchange_s += self._counts.clock() - start
        self._check()
        return self._received


@dataclass
class Communicator:
    """Exchanges messages between `ranks`, over `transport`, and counts them. Without arguments it serves one process.
    transport: None only if there is one rank. All calls must come in the same order on all ranks."""

    ranks: Ranks = field(default_factory=Ranks)
    transport: Transport | None = None
    counts: ExchangeCounts = field(default_factory=ExchangeCounts)
    lane: int = 0
    """Communicators over one group have a lane each, so that none takes the messages of another."""

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def with_micro_batches(self, micro_batches: int) -> Communicator:
        """Returns a communicator of the same ranks for another number of micro-batches; it counts together with this
        one. Raises ValueError if a rank would have none."""
        return replace(self, ranks=self.ranks.with_micro_batches(micro_batches))

    def exchange(self, messages: Messages, *, purpose: str, num_heads: Sequence[int] | None = None) -> list[Tensor]:
        """Begins an exchange and waits for it; see `begin` and `Arriving.wait`."""
        return self.begin(messages, purpose=purpose, num_heads=num_heads).wait()

    def begin(
        self,
        messages: Messages,
        *,
        purpose: str,
        num_heads: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Arriving:
        """Sends messages[r] to rank r. Returns what waits for the messages that come here, by rank.

        messages: 1-dim, contiguous, of one dtype and any length, also 0; or a function that makes them. They must stay
        as they are until the caller has waited. The one for this rank is returned as it is. If the function raises on
        one rank, all ranks raise when they wait, and their errors name that rank.
        num_heads: how many leading elements of each message say what the others are; their bytes count as "ids".
        lengths: of what each rank sends here, if every rank knows it; then no counts are sent, and the function must
        not fail.
        """
        made, error = _made(messages)
        if self.size == 1:
            if error is not None:
                raise error
            return Arriving(self.counts, [made[0]])
        start = self.counts.clock()
        number = self.counts.begin()
        tag = 1 + self.lane % _LANES * _TAGS + number % _TAGS
        received = list[Tensor](made) if error is None else [torch.empty(0)] * self.size
        sent = [message.view(torch.uint8) for message in made] if error is None else [_described(error)] * self.size
        if lengths is None:
            heads = self._send_heads([len(own) if error is None else -len(own) for own in sent], number, purpose)
            opened = partial(self._open, heads, tag, error)
            arriving = Arriving(self.counts, received, self._send(sent, tag), sent=sent, opened=opened)
        else:
            come = self._receive([length * made[0].itemsize for length in lengths], tag, received)
            arriving = Arriving(self.counts, received, [*come, *self._send(sent, tag)], sent=sent)
        away = [rank for rank in range(self.size) if rank != self.rank]
        ids = sum(num_heads[rank] * made[rank].itemsize for rank in away) if num_heads and error is None else 0
        self.counts.add("ids", ids)
        self.counts.add(purpose, sum(len(sent[rank]) for rank in away) - ids)
        self.counts.exchange_s += self.counts.clock() - start
        return arriving

    def gather_number(self, number: int, *, purpose: str) -> list[int]:
        """Sends a number, 0 or more, to all ranks; returns theirs, by rank."""
        if self.size == 1:
            return [number]
        start = self.counts.clock()
        heads = self._send_heads([number] * self.size, self.counts.begin(), purpose)
        self.counts.wait()
        found = heads()
        self.counts.exchange_s += self.counts.clock() - start
        return found

    def gather(self, message: Tensor | Callable[[], Tensor], *, purpose: str, num_heads: int = 0) -> list[Tensor]:
        """Sends `message` to all ranks; returns what each rank sent, by rank. Otherwise as `exchange`."""

        def messages() -> list[Tensor]:
            return [message if isinstance(message, Tensor) else message()] * self.size

        return self.exchange(messages, purpose=purpose, num_heads=[num_heads] * self.size)

    def _send(self, messages: Sequence[Tensor], tag: int) -> list[InFlight]:
        """Sends each rank its message, uint8, from where it lies: a transport's all-to-all would take one tensor of all
        messages, and so two more passes over the bytes."""
        assert self.transport is not None, "several ranks need a transport"
        with _named_errors():
            return [
                self.transport.send(message, rank, tag)
                for rank, message in enumerate(messages)
                if rank != self.rank and len(message)
            ]

    def _receive(self, lengths: Sequence[int], tag: int, received: list[Tensor]) -> list[InFlight]:
        """Puts memory for messages of these sizes in the place of those in `received`, with their types."""
        assert self.transport is not None, "several ranks need a transport"
        come = []
        for rank, length in enumerate(lengths):
            if rank != self.rank:
                memory = ops.empty(length, dtype=torch.uint8)
                received[rank] = memory.view(received[rank].dtype)
                if length:
                    with _named_errors():
                        come.append(self.transport.receive(memory, rank, tag))
        return come

    def _send_heads(self, numbers: Sequence[int], number: int, purpose: str) -> Callable[[], list[int]]:
        """Sends each rank a number: the bytes of a message or, as a number below 0, those of an error. Returns a
        function that waits for the other ranks' numbers and returns them by rank. number: which exchange this is."""
        mark = (number & 0x7FFFFFFF) << 32 | zlib.crc32(purpose.encode())
        heads_of_all = torch.frombuffer(
            bytearray(b"".join(_HEAD.pack(own, mark) for own in numbers)), dtype=torch.uint8
        )
        told = torch.split(heads_of_all, COUNT_BYTES)  # one memory, which `received` keeps until all are sent
        received = [*told]
        come = self._receive([COUNT_BYTES] * self.size, _HEADS_TAG, received)
        in_flight = [*come, *self._send(told, _HEADS_TAG)]
        self.counts.add("counts", COUNT_BYTES * (self.size - 1))

        def heads() -> list[int]:
            with _named_errors():
                for message in in_flight:
                    message.wait()
            found, marks = map(list, zip(*(_HEAD.unpack(own.numpy().tobytes()) for own in received), strict=True))
            if (other := next((rank for rank, own in enumerate(marks) if own != mark), None)) is not None:
                at = marks[other] >> 32
                raise RuntimeError(
                    f"rank {self.rank} is at exchange {number} ({purpose}), rank {other} at exchange {at}"
                    f"{'' if at != number else ', of something else'}: all ranks must look up, train, score, save and "
                    "load in the same order; see what one of them left out, also for an empty batch"
                )
            return found

        return heads

    def _open(
        self, heads: Callable[[], list[int]], tag: int, error: Exception | None, received: list[Tensor]
    ) -> tuple[list[InFlight], Callable[[], object]]:
        """See Arriving. error: of this rank."""
        numbers = heads()
        failed = [rank for rank, own in enumerate(numbers) if own < 0]
        if failed:  # what the others made is dropped, so that the next exchange finds nothing of it
            received[:] = [torch.empty(0, dtype=torch.uint8)] * self.size
            if error is not None:
                received[self.rank] = _described(error)
        come = self._receive([abs(own) for own in numbers], tag, received)
        return come, partial(_raise_of, failed[0], received, error) if failed else lambda: None


def _raise_of(rank: int, received: Sequence[Tensor], error: Exception | None) -> NoReturn:
    """Raises what was raised on that rank. error: on this one."""
    kind, _, what = bytes(received[rank].tolist()).decode(errors="replace").partition(":")
    raised = ValueError if kind == "ValueError" else RuntimeError
    raise raised(f"rank {rank}: {what if raised is ValueError else f'{kind}: {what}'}") from error


def _made(messages: Messages) -> tuple[Sequence[Tensor], Exception | None]:
    if not callable(messages):
        return messages, None
    try:
        return messages(), None
    except Exception as error:  # all ranks raise it together
        return [], error


def _described(error: Exception) -> Tensor:
    """Returns the kind and the text of an error, uint8."""
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    text = f"{kind}:{error}".encode(errors="backslashreplace")
    return torch.frombuffer(bytearray(text[:MAX_ERROR_BYTES]), dtype=torch.uint8)
