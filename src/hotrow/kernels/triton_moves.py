"""Moves rows between host and device memory: packed into one buffer, copied at once, written to their arrays.

    host arrays --index_select--> pinned buffer --copy--> device buffer --move_rows--> device arrays     (and back)

A buffer holds a block [n, ...] for each array of each table, one after another. Copies have their own stream;
`Moment`s order it and the compute stream. On the CPU there are no streams: a call returns when all is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hotrow.kernels import triton_kernels as kernels
from hotrow.kernels.triton_ops import TILE, launch

ALIGNMENT = 16
"""Blocks of a buffer start at multiples of this many bytes."""
BLOCK_W = 64
"""Words of a row that a program copies at a time."""
MAX_BUFFERS = 8
"""Limit of pinned buffers kept for copies under way; the next one waits for the oldest."""

Parts = Sequence[Sequence[Tensor]]
"""For each table, the arrays [N, ...] that hold its rows: weights, lower halves, states."""


class Moment:
    """A point in the work of a stream. Without streams it has always been reached."""

    def __init__(self, event: torch.cuda.Event | None = None, device: torch.device | None = None) -> None:
        self._event, self._device = event, device

    def reached(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def precede(self) -> None:
        """Makes later work of the device's current stream run after it; does not block."""
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(self._device))


class Streams:
    """The compute stream and the copy stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """Returns the stream that is current in this thread; None on the CPU."""
        return None if self._copying is None else torch.cuda.current_stream(self.device)

    def moment(self, stream: Any = None) -> Moment:
        """Returns the present moment on a stream; if None, on the current one."""
        if self._copying is None:
            return Moment()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self.device))
        return Moment(event, self.device)

    def share(self, arrays: Iterable[Tensor]) -> None:
        """Announces that both streams use `arrays`, so that their memory is not reused while either does."""
        if self._copying is not None:
            for array in arrays:
                array.record_stream(self._copying)

    @contextmanager
    def copying(self, *, after: Moment) -> Iterator[None]:
        """Makes the copy stream current inside the block; its work begins after a moment of the other stream."""
        if self._copying is None:
            yield
            return
        with torch.cuda.stream(self._copying):
            after.precede()
            yield


class Buffers:
    """Host memory for copies, pinned unless the device is the CPU, and reused when a copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._used: list[tuple[Tensor, Moment]] = []

    def take(self, num_bytes: int) -> Tensor:
        """Returns uint8 [num_bytes] that no copy reads or writes."""
        for k, (buffer, moment) in enumerate(self._used):
            if buffer.numel() >= num_bytes and moment.reached():
                del self._used[k]
                return buffer[:num_bytes]
        if len(self._used) >= MAX_BUFFERS:
            buffer, moment = self._used.pop(0)
            moment.wait()
            if buffer.numel() >= num_bytes:
                return buffer[:num_bytes]
        # Rounded up to a power of two, so that batches of about the same size can share it.
        whole = torch.empty(1 << (max(num_bytes, 1) - 1).bit_length(), dtype=torch.uint8, pin_memory=self._pin)
        return whole[:num_bytes]

    def give_back(self, buffer: Tensor, moment: Moment) -> None:
        """Allows `buffer` to be taken again after `moment`."""
        whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
        self._used.append((whole, moment))


class Block(NamedTuple):
    """The position of one array's rows in a buffer."""

    table: int
    part: int
    start: int
    """Start in bytes."""
    row_bytes: int
    num_rows: int


def lay_out(parts: Parts, counts: Sequence[int]) -> tuple[list[Block], int]:
    """Returns the blocks for counts[t] rows of each table t, and the size of the buffer in bytes."""
    blocks, start = [], 0
    for t, (arrays, count) in enumerate(zip(parts, counts, strict=True)):
        for p, array in enumerate(arrays):
            if count:
                row_bytes = array[:1].nbytes
                blocks.append(Block(t, p, start, row_bytes, count))
                start += -(-row_bytes * count // ALIGNMENT) * ALIGNMENT
    return blocks, start


def pack(parts: Parts, rows: Sequence[Tensor], buffer: Tensor, blocks: Sequence[Block]) -> None:
    """Copies rows of arrays in host memory into their blocks; rows: int64 [n] for each table."""
    for block in blocks:
        array = parts[block.table][block.part]
        torch.index_select(array, 0, rows[block.table], out=_view(buffer, block, array))


def unpack(parts: Parts, rows: Sequence[Tensor], buffer: Tensor, blocks: Sequence[Block]) -> None:
    """Copies blocks back into arrays in host memory; no row may be given twice."""
    for block in blocks:
        array = parts[block.table][block.part]
        array.index_copy_(0, rows[block.table], _view(buffer, block, array))


def _view(buffer: Tensor, block: Block, array: Tensor) -> Tensor:
    piece = buffer[block.start : block.start + block.row_bytes * block.num_rows]
    return piece.view(array.dtype).view(block.num_rows, *array.shape[1:])


def move(
    parts: Parts,
    rows: Sequence[Tensor],
    buffer: Tensor,
    blocks: Sequence[Block],
    *,
    into_buffer: bool,
    upload: Callable[[Tensor], Tensor],
) -> None:
    """Does `pack` or `unpack` for arrays and a buffer on the device, in one launch. There must be a block. rows: in
    host memory. upload: copies int64 numbers from host memory to the device."""
    firsts, first = [], 0
    for own in rows:
        firsts.append(first)
        first += own.numel()
    wide = all(block.row_bytes % 4 == 0 for block in blocks)
    word = 4 if wide else 2
    told = [
        [parts[b.table][b.part].data_ptr(), b.row_bytes // word, firsts[b.table], b.num_rows, b.start // word]
        for b in blocks
    ]
    block_n = max(1, TILE // BLOCK_W)
    launch(
        kernels.move_rows,
        (-(-max(b.num_rows for b in blocks) // block_n), len(blocks)),
        (
            upload(torch.tensor(told, dtype=torch.int64)),
            upload(torch.cat(list(rows))),
            buffer.view(torch.int32 if wide else torch.int16),
        ),
        INTO_BUFFER=into_buffer,
        WIDE=wide,
        BLOCK_N=block_n,
        BLOCK_W=BLOCK_W,
    )


class Target(Protocol):
    """Rows of each table in host memory that will be written."""

    @property
    def places(self) -> Sequence[Tensor]:
        """For each table, int64 [n]: row numbers in the host's arrays."""

    def wait(self) -> None:
        """Blocks until the rows may be written."""

    def release(self, *, updated: bool) -> None:
        """Says that the rows were written."""


class Arriving(NamedTuple):
    """Rows that are being copied to the host and must still be written to its arrays."""

    target: Target
    buffer: Tensor
    blocks: list[Block]
    moment: Moment


class Mover:
    """Moves rows of tables between their arrays in host memory and slots on a device.

    host, slots: the same parts for each table. Calls return before their copies are done; copies run in the order of
    the calls, after the work before `after`.
    """

    def __init__(self, host: Parts, slots: Parts, streams: Streams) -> None:
        self._host, self._slots, self._streams = host, slots, streams
        self._buffers = Buffers(streams.device)
        self._leaving: deque[Arriving] = deque()
        self.num_settled = 0

    @property
    def num_sent(self) -> int:
        return self.num_settled + len(self._leaving)

    def bring(self, rows: Sequence[Tensor], slots: Sequence[Tensor], *, after: Moment) -> Moment:
        """Brings row rows[t][i] of each table t into slot slots[t][i]; returns the moment when all are there. If a row
        was sent back, `settle` must have been called since."""
        blocks, num_bytes = lay_out(self._host, [own.numel() for own in rows])
        if not blocks:
            return Moment()
        staged = self._buffers.take(num_bytes)
        pack(self._host, rows, staged, blocks)
        with self._streams.copying(after=after):
            buffer = staged.to(self._streams.device, non_blocking=True, copy=True)
            copied = self._streams.moment()
            move(self._slots, slots, buffer, blocks, into_buffer=False, upload=self._upload)
            arrived = self._streams.moment()
        self._buffers.give_back(staged, copied)
        return arrived

    def send_back(self, target: Target, slots: Sequence[Tensor], *, after: Moment) -> None:
        """Sends slot slots[t][i] of each table t to the i-th row of `target`. There must be at least one. Slots are
        read now; the rows are in the host's arrays after `settle`."""
        blocks, num_bytes = lay_out(self._host, [own.numel() for own in slots])
        staged = self._buffers.take(num_bytes)
        with self._streams.copying(after=after):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._streams.device)
            move(self._slots, slots, buffer, blocks, into_buffer=True, upload=self._upload)
            staged.copy_(buffer, non_blocking=True)
            moment = self._streams.moment()
        self._leaving.append(Arriving(target, staged, blocks, moment))

    def point(self, array: Tensor, numbers: Tensor, *, after: Moment) -> Moment:
        """Writes numbers[1] to places numbers[0] of an int32 array on the device; returns when they are there."""
        with self._streams.copying(after=after):
            places, values = self._upload(numbers).view(2, -1)
            array.index_copy_(0, places, values.int())
            return self._streams.moment()

    def _upload(self, numbers: Tensor) -> Tensor:
        staged = self._buffers.take(numbers.nbytes)
        staged.view(numbers.dtype).copy_(numbers.view(-1))
        found = staged.to(self._streams.device, non_blocking=True, copy=True)
        self._buffers.give_back(staged, self._streams.moment())
        return found.view(numbers.dtype)

    def settle(self, num: int | None = None) -> None:
        """Writes to the host's arrays what the first `num` calls of `send_back` sent; if None, all calls."""
        while self.num_settled < (self.num_sent if num is None else num):
            left = self._leaving[0]
            left.moment.wait()
            left.target.wait()
            unpack(self._host, left.target.places, left.buffer, left.blocks)
            left.target.release(updated=True)
            self._buffers.give_back(left.buffer, Moment())
            self._leaving.popleft()
            self.num_settled += 1
