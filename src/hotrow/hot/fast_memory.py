"""Memory in which copies of hot rows lie, and what computes there: DRAM, which plays a fast device, or a GPU's memory.

Rows go over and back in pieces: gathered on this side, copied through pinned memory, laid down on that side; copies.py
says which rows. On a device lookups and updates are those of hotrow.kernels.triton_ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hotrow.base.machine import available_memory_bytes
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.kernels.reference import Layout
from hotrow.placement.budget import free_bytes

PIECE_BYTES = 32 << 20
"""Of rows on their way at once, so that pinned memory stays small beside the copies."""


class FastMemory(Protocol):
    """Where copies lie."""

    kernels: ops.Kernels
    """What looks up and updates rows there."""
    sequence_kernels: dict[str, ops.Kernels]
    uploads: int
    """Times that the ids of a batch go there: for its lookup and, where kernels ask again, for its update."""
    piece_bytes: int | None
    """Of rows of one array on their way, at most so many; None: any number."""

    def room(self, num_rows: int, like: Tensor) -> Tensor:
        """Memory for so many rows of an array. MemoryError or torch's OutOfMemoryError where there is none."""

    def arrays(self, tensors: Sequence[Tensor], low: Sequence[Tensor | None] | None = None) -> Any:
        """As the kernels there take them."""

    def over(self, values: Tensor) -> Tensor:
        """`values`, which lie in DRAM, where copies lie."""

    def back(self, values: Tensor) -> Tensor:
        """`values`, which lie where copies do, in DRAM; until the next call."""

    def wait(self) -> None:
        """Sleep until what was asked for there is done."""


class InDram:
    """Memory of this machine beside the tables."""

    uploads: int = 1
    piece_bytes: int | None = None

    def __init__(self, emb: EmbeddingCollection) -> None:
        self.kernels, self.sequence_kernels = emb.kernels, emb.sequence_kernels

    def room(self, num_rows: int, like: Tensor) -> Tensor:
        """As tables are allocated."""
        return ops.allocate(num_rows, *like.shape[1:], dtype=like.dtype)

    def arrays(self, tensors: Sequence[Tensor], low: Sequence[Tensor | None] | None = None) -> ops.Arrays:
        """Of hotrow.kernels.ops."""
        return ops.Arrays(tensors, low)

    def over(self, values: Tensor) -> Tensor:
        """Themselves."""
        return values

    def back(self, values: Tensor) -> Tensor:
        """Themselves."""
        return values

    def wait(self) -> None:
        """Nothing is done later here."""


class OnDevice:
    """Memory of a device with the kernels of triton_ops.py; of the CPU only if Triton's interpreter runs them.

    Raises ImportError where Triton is not installed.
    """

    uploads: int = 2
    piece_bytes: int | None = PIECE_BYTES

    def __init__(self, emb: EmbeddingCollection, device: torch.device) -> None:
        try:
            from hotrow.kernels.triton_moves import Buffers, Streams
            from hotrow.kernels.triton_ops import Arrays, Kernels
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ImportError("copies of hot rows on a device need Triton: pip install 'hotrow[gpu]'") from error
        self.device = device
        self._streams, self._buffers, self._arrays = Streams(device), Buffers(device), Arrays
        layout = Layout.of(emb.tables)
        self.kernels: Any = Kernels(layout)
        self.sequence_kernels: Any = {
            name: Kernels(layout.sequence_of(name), among=layout) for name in emb.feature_names
        }

    def room(self, num_rows: int, like: Tensor) -> Tensor:
        """Of torch's allocator."""
        return torch.empty(num_rows, *like.shape[1:], dtype=like.dtype, device=self.device)

    def arrays(self, tensors: Sequence[Tensor], low: Sequence[Tensor | None] | None = None) -> Any:
        """Of hotrow.gpu. Raises ValueError for a device that the kernels do not run on."""
        return self._arrays(tensors, low)

    def over(self, values: Tensor) -> Tensor:
        """Through pinned memory; the host goes on meanwhile."""
        staged = self._buffers.take(values.nbytes)
        staged.view(values.dtype).view(values.shape).copy_(values)
        found = staged.to(self.device, non_blocking=True, copy=True)
        self._buffers.give_back(staged, self._streams.moment())
        return found.view(values.dtype).view(values.shape)

    def back(self, values: Tensor) -> Tensor:
        """Through pinned memory, when they are there."""
        staged = self._buffers.take(values.nbytes)
        found = staged.view(values.dtype).view(values.shape)
        found.copy_(values, non_blocking=True)
        arrived = self._streams.moment()
        arrived.wait()
        self._buffers.give_back(staged, arrived)
        return found

    def wait(self) -> None:
        """So that seconds are those of the copies."""
        self._streams.moment().wait()


def room_bytes(device: torch.device | None) -> int:
    """What copies may take: of a device's memory, or where that is None of this machine's."""
    if device is None:
        return available_memory_bytes()
    # What torch keeps of arrays that are gone is free for others.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return free_bytes(str(device)) + kept
