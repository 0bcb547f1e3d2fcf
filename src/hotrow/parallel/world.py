"""The processes of a run as a value: a rank among several, what micro-batches it holds, and how it sends bytes.

Everything that ranks send each other goes through `World.begin` and `World.tell`, which count its bytes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow.kernels import ops, tree


class Arriving:
    """What ranks send each other, while it may still be on its way."""

    def __init__(
        self, world: World, come: list[Tensor], works: Sequence[Any] = (), sent: Sequence[Tensor] = ()
    ) -> None:
        """works: of torch.distributed. sent: is kept until they are done."""
        self._world, self._come, self._works, self._sent = world, come, works, sent

    def wait(self) -> list[Tensor]:
        """Returns what each rank sent here, by rank, when all of it is here and what this rank sent has left."""
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        self._world.exchange_s += time.perf_counter() - start
        self._works, self._sent = (), ()
        return self._come


@dataclass
class World:
    """The ranks that share a model. Their calls must come in the same order on all of them."""

    rank: int = 0
    size: int = 1
    micro_batches: int = 1
    """V: parts of a global batch, fixed for the life of a run; at least `size`."""
    group: Any = None
    """The process group; None: torch's default one."""
    local_rank: int = 0
    """Number of this rank among those on its machine."""
    local_size: int = 1
    """Ranks on this machine, which share its cores and memory."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank has sent to others, by purpose."""
    exchange_s: float = 0.0
    """Seconds in exchanges, most of it waiting for other ranks."""
    num_exchanges: int = 0

    @classmethod
    def of(cls, group: Any, micro_batches: int | None = None) -> World:
        """Returns the world of a process group of torch.distributed. Raises ValueError for fewer parts than ranks."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(rank, size, size, group).in_parts(size if micro_batches is None else micro_batches)

    def in_parts(self, micro_batches: int) -> World:
        """Returns the same ranks for a number of micro-batches: this world, if it has as many.

        Raises ValueError if ranks would have none.
        """
        if micro_batches < self.size:
            raise ValueError(
                f"train.micro_batches is {micro_batches}, but there are {self.size} ranks, and each needs one: start "
                f"at most {micro_batches}, or set it to {self.size} or more in a new run"
            )
        return self if micro_batches == self.micro_batches else replace(self, micro_batches=micro_batches)

    @cached_property
    def held(self) -> tuple[int, int]:
        """The first micro-batch of this rank, and the end of its last one."""
        return tree.held(self.micro_batches, self.rank, self.size)

    def samples(self, num_samples: int, rank: int | None = None) -> tuple[int, int]:
        """Returns the first sample of a global batch that a rank (None: this one) holds, and the end of its last."""
        starts = tree.starts(num_samples, self.micro_batches)
        first, last = tree.held(self.micro_batches, self.rank if rank is None else rank, self.size)
        return starts[first], starts[last]

    def exchange(self, parts: Parts, *, purpose: str, num_heads: Sequence[int] | None = None) -> list[Tensor]:
        """As `begin`, and returns when the parts of all ranks are here."""
        return self.begin(parts, purpose=purpose, num_heads=num_heads).wait()

    def begin(
        self,
        parts: Parts,
        *,
        purpose: str,
        num_heads: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Arriving:
        """Sends parts[r] to rank r; returns what waits for what each rank sent here, by rank. Parts must stay as they
        are until then. All parts: 1-dim, contiguous, of one dtype; the one for this rank is returned as it is.

        Counts are exchanged first, so the lengths may be anything, also 0. parts: or a function that makes them; what
        it raises here is raised on all ranks, with the number of this one: no rank waits for one that failed.
        num_heads: how many leading elements of each part say what the others are; their bytes count as "ids". lengths:
        of what each rank sends here, if every rank knows; then no counts are exchanged, and nothing may fail.
        Raises ValueError if the function raised one on any rank, RuntimeError for any other error there and for a rank
        that is at another exchange.
        """
        made, error = _made(parts)
        if self.size == 1:
            if error is not None:
                raise error
            return Arriving(self, [made[0]])
        start = time.perf_counter()
        text = b"" if error is None else _described(error)
        counts = [len(part) for part in made] if error is None else [-len(text)] * self.size
        if lengths is None:
            lengths = self._exchange_counts(counts, purpose)
        if min(lengths) < 0:
            self._raise_together(text, lengths, error)
        arriving = self._send(made, lengths)
        self.exchange_s += time.perf_counter() - start
        away = [rank for rank in range(self.size) if rank != self.rank]
        heads = sum(num_heads[rank] * made[rank].itemsize for rank in away) if num_heads else 0
        self._count("ids", heads)
        self._count(purpose, sum(made[rank].nbytes for rank in away) - heads)
        return arriving

    def tell(self, number: int, *, purpose: str) -> list[int]:
        """Tells all ranks a number, 0 or more; returns theirs, by rank."""
        return [number] if self.size == 1 else self._exchange_counts([number] * self.size, purpose)

    def _send(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> Arriving:
        """Sends parts that other ranks expect, and gets ready for theirs, of these lengths.

        Each goes from where it lies to memory of its own: all_to_all_single would take one tensor of all, and so two
        more passes over the bytes.
        """
        come, works, tag = [], [], self.num_exchanges % (1 << 31)
        for rank, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            come.append(part if rank == self.rank else ops.empty(length, dtype=part.dtype))
            if rank != self.rank and length:
                works.append(dist.irecv(come[-1], group=self.group, group_src=rank, tag=tag))
            if rank != self.rank and len(part):
                works.append(dist.isend(part, group=self.group, group_dst=rank, tag=tag))
        return Arriving(self, come, works, parts)

    def gather(self, part: Tensor | Callable[[], Tensor], *, purpose: str, num_heads: int = 0) -> list[Tensor]:
        """Sends `part`, 1-dim, to all ranks; returns what each rank sent, by rank. Otherwise as `exchange`."""

        def parts() -> list[Tensor]:
            return [part if isinstance(part, Tensor) else part()] * self.size

        return self.exchange(parts, purpose=purpose, num_heads=[num_heads] * self.size)

    def _exchange_counts(self, counts: Sequence[int], purpose: str) -> list[int]:
        """Tells each rank how many elements come, or bytes of an error as a number below 0; returns theirs by rank."""
        mark = self.num_exchanges << 32 | zlib.crc32(purpose.encode())
        self.num_exchanges += 1
        given = torch.empty(2 * self.size, dtype=torch.int64)
        said = torch.tensor([number for count in counts for number in (count, mark)])
        dist.all_to_all_single(given, said, group=self.group)
        self._count("counts", 16 * (self.size - 1))
        lengths: list[int] = given[::2].tolist()
        marks = given[1::2].tolist()
        if (other := next((rank for rank, own in enumerate(marks) if own != mark), None)) is not None:
            at = marks[other] >> 32
            raise RuntimeError(
                f"rank {self.rank} is at exchange {mark >> 32} ({purpose}), rank {other} at exchange {at}"
                f"{'' if at != mark >> 32 else ', of something else'}: all ranks must look up, train, score, save and "
                "load in the same order; see what one of them left out, also for an empty batch"
            )
        return lengths

    def _raise_together(self, text: bytes, lengths: Sequence[int], error: Exception | None) -> NoReturn:
        """Raises on all ranks what was raised on the first that said so."""
        given = torch.empty(sum(-min(length, 0) for length in lengths), dtype=torch.uint8)
        sent = torch.tensor(list(text) * self.size, dtype=torch.uint8)
        come = [-min(length, 0) for length in lengths]
        dist.all_to_all_single(given, sent, come, [len(text)] * self.size, group=self.group)
        rank = next(rank for rank, length in enumerate(come) if length)
        kind, _, what = bytes(torch.split(given, come)[rank].tolist()).decode(errors="replace").partition(":")
        raised = ValueError if kind == "ValueError" else RuntimeError
        raise raised(f"rank {rank}: {what if raised is ValueError else f'{kind}: {what}'}") from error

    def _count(self, purpose: str, num_bytes: int) -> None:
        self.sent_bytes[purpose] = self.sent_bytes.get(purpose, 0) + num_bytes


Parts: TypeAlias = Sequence[Tensor] | Callable[[], Sequence[Tensor]]


def _made(parts: Parts) -> tuple[Sequence[Tensor], Exception | None]:
    if not callable(parts):
        return parts, None
    try:
        return parts(), None
    except Exception as error:  # all ranks raise it together
        return [], error


def _described(error: Exception) -> bytes:
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return f"{kind}:{error}".encode()[:LONGEST_ERROR]


LONGEST_ERROR = 1 << 14
"""Bytes of an error's text that other ranks are told."""
