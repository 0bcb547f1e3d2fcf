"""How ranks exchange messages: all ranks send each other something at the same time, and its bytes are counted.

Everything that ranks send each other in a run goes through `Communicator.begin` and `Communicator.tell`. Before the
messages each rank sends every other one their lengths, and which exchange it is at. So a rank that failed can say so,
and ranks that are at different exchanges find out.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from hotrow.kernels import ops
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.transport import InFlight, Transport

COUNT_BYTES = 16
"""What an exchange sends to each rank before its message; `gather_number` sends no more."""
MAX_ERROR_BYTES = 1 << 14
"""Bytes of an error's text that other ranks get."""
_COUNTS_TAG, _MAX_TAG = 0, (1 << 31) - 1
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
    num_exchanges: int = 0

    def add(self, purpose: str, num_bytes: int) -> None:
        self.sent_bytes[purpose] = self.sent_bytes.get(purpose, 0) + num_bytes


class Arriving:
    """What ranks send each other in one exchange, while it may still be on its way."""

    def __init__(
        self,
        counts: ExchangeCounts,
        received: list[Tensor],
        in_flight: Sequence[InFlight] = (),
        sent: Sequence[Tensor] = (),
    ) -> None:
        """sent: is kept until nothing is in flight any more."""
        self._counts, self._received, self._in_flight, self._sent = counts, received, in_flight, sent

    def wait(self) -> list[Tensor]:
        """Returns what each rank sent here, by rank, when all of it is here and what this rank sent has left."""
        start = time.perf_counter()
        self.finish()
        self._counts.exchange_s += time.perf_counter() - start
        return self._received

    def finish(self) -> list[Tensor]:
        """As `wait`, in time that somebody else counts."""
        with _named_errors():
            for message in self._in_flight:
                message.wait()
        self._in_flight, self._sent = (), ()
        return self._received


@dataclass
class Communicator:
    """Exchanges messages between `ranks`, over `transport`, and counts them. Without arguments, for one process.

    transport: None only if there is one rank. All calls must come in the same order on all ranks.
    """

    ranks: Ranks = field(default_factory=Ranks)
    transport: Transport | None = None
    counts: ExchangeCounts = field(default_factory=ExchangeCounts)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def with_micro_batches(self, micro_batches: int) -> Communicator:
        """Returns the communicator of the same ranks for a number of micro-batches. It counts together with this one.

        Raises ValueError if a rank would have none.
        """
        return replace(self, ranks=self.ranks.with_micro_batches(micro_batches))

    def exchange(self, messages: Messages, *, purpose: str, num_heads: Sequence[int] | None = None) -> list[Tensor]:
        """As `begin`, and returns when the messages of all ranks are here."""
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
        one rank, all ranks raise, and their errors name that rank.
        num_heads: how many leading elements of each message say what the others are; their bytes count as "ids".
        lengths: of what each rank sends here, if every rank knows it; then no counts are exchanged, and the function
        must not fail.
        Raises ValueError if the function raised one on any rank, and RuntimeError for any other error there and for a
        rank that is at another exchange.
        """
        made, error = _made(messages)
        if self.size == 1:
            if error is not None:
                raise error
            return Arriving(self.counts, [made[0]])
        start = time.perf_counter()
        text = b"" if error is None else _described(error)
        own = [len(message) for message in made] if error is None else [-len(text)] * self.size
        if lengths is None:
            lengths = self._exchange_counts(own, purpose)
        if min(lengths) < 0:
            self._raise_together(text, lengths, error)
        arriving = self._send(made, lengths)
        self.counts.exchange_s += time.perf_counter() - start
        away = [rank for rank in range(self.size) if rank != self.rank]
        heads = sum(num_heads[rank] * made[rank].itemsize for rank in away) if num_heads else 0
        self.counts.add("ids", heads)
        self.counts.add(purpose, sum(made[rank].nbytes for rank in away) - heads)
        return arriving

    def gather_number(self, number: int, *, purpose: str) -> list[int]:
        """Sends a number, 0 or more, to all ranks; returns theirs, by rank."""
        return [number] if self.size == 1 else self._exchange_counts([number] * self.size, purpose)

    def gather(self, message: Tensor | Callable[[], Tensor], *, purpose: str, num_heads: int = 0) -> list[Tensor]:
        """Sends `message` to all ranks; returns what each rank sent, by rank. Otherwise as `exchange`."""

        def messages() -> list[Tensor]:
            return [message if isinstance(message, Tensor) else message()] * self.size

        return self.exchange(messages, purpose=purpose, num_heads=[num_heads] * self.size)

    def _send(self, messages: Sequence[Tensor], lengths: Sequence[int], *, tag: int | None = None) -> Arriving:
        """Sends messages that other ranks expect, and gets ready for theirs, of these lengths.

        Each goes from where it lies to memory of its own: a transport's all-to-all would take one tensor of all, and so
        two more passes over the bytes.
        """
        assert self.transport is not None, "several ranks need a transport"
        received, in_flight = [], []
        tag = 1 + self.counts.num_exchanges % _MAX_TAG if tag is None else tag
        for rank, (message, length) in enumerate(zip(messages, lengths, strict=True)):
            received.append(message if rank == self.rank else ops.empty(length, dtype=message.dtype))
            with _named_errors():
                if rank != self.rank and length:
                    in_flight.append(self.transport.receive(received[-1], rank, tag))
                if rank != self.rank and len(message):
                    in_flight.append(self.transport.send(message, rank, tag))
        return Arriving(self.counts, received, in_flight, messages)

    def _exchange_counts(self, counts: Sequence[int], purpose: str) -> list[int]:
        """Sends each rank how many elements come, or how many bytes of an error as a number below 0. Returns theirs, by
        rank."""
        mark = self.counts.num_exchanges << 32 | zlib.crc32(purpose.encode())
        self.counts.num_exchanges += 1
        told = torch.tensor([[count, mark] for count in counts])
        come = torch.stack(self._send([*told], [2] * self.size, tag=_COUNTS_TAG).finish())
        self.counts.add("counts", COUNT_BYTES * (self.size - 1))
        lengths, marks = come.T.tolist()
        if (other := next((rank for rank, own in enumerate(marks) if own != mark), None)) is not None:
            at = marks[other] >> 32
            raise RuntimeError(
                f"rank {self.rank} is at exchange {mark >> 32} ({purpose}), rank {other} at exchange {at}"
                f"{'' if at != mark >> 32 else ', of something else'}: all ranks must look up, train, score, save and "
                "load in the same order; see what one of them left out, also for an empty batch"
            )
        return lengths  # type: ignore[no-any-return]

    def _raise_together(self, text: bytes, lengths: Sequence[int], error: Exception | None) -> NoReturn:
        """Raises on all ranks what was raised on the first rank that failed."""
        messages = [torch.tensor(list(text), dtype=torch.uint8)] * self.size
        come = self._send(messages, [-min(length, 0) for length in lengths]).wait()
        rank = next(rank for rank, words in enumerate(come) if len(words))
        kind, _, what = bytes(come[rank].tolist()).decode(errors="replace").partition(":")
        raised = ValueError if kind == "ValueError" else RuntimeError
        raise raised(f"rank {rank}: {what if raised is ValueError else f'{kind}: {what}'}") from error


def _made(messages: Messages) -> tuple[Sequence[Tensor], Exception | None]:
    if not callable(messages):
        return messages, None
    try:
        return messages(), None
    except Exception as error:  # all ranks raise it together
        return [], error


def _described(error: Exception) -> bytes:
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return f"{kind}:{error}".encode()[:MAX_ERROR_BYTES]
