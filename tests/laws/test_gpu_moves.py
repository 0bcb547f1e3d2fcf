"""Rows between host and device memory: every byte arrives, nothing beside it moves, what is under way is kept apart."""

import pytest
import torch
from gpu_device import DEVICE
from torch import Tensor

from hotrow.kernels import triton_moves as moves
from hotrow.kernels.triton_moves import Buffers, Moment, Mover, Streams
from hotrow.placement.base import NO_LEASE
from hotrow.placement.slots import Held

pytestmark = pytest.mark.usefixtures("one_thread")


def make_parts(num_rows: tuple[int, ...], seed: int) -> list[list[Tensor]]:
    """A split table with a state for each row, one of float16 with an odd dim, one wide: random bits."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        integers = torch.randint(-(2**15), 2**15, (*shape, 2 if dtype.itemsize == 4 else 1), generator=generator)
        return integers.to(torch.int16).view(dtype).view(shape)

    a, b, c = num_rows
    return [
        [random(a, 7, dtype=torch.bfloat16), random(a, 7, dtype=torch.int16), random(a, dtype=torch.float32)],
        [random(b, 3, dtype=torch.float16)],
        [random(c, 150, dtype=torch.float32), random(c, 150, dtype=torch.float32)],
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


def drawn(num_rows: tuple[int, ...], counts: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(n, generator=generator)[:count] for n, count in zip(num_rows, counts, strict=True)]


@pytest.mark.parametrize("tables", [(0, 1, 2), (0, 2), (2,)])
@pytest.mark.parametrize("counts", [(5, 9, 2), (0, 1, 20), (0, 0, 0)])
def test_rows_move_both_ways(counts: tuple[int, ...], tables: tuple[int, ...]) -> None:
    """Against plain indexing; with odd rows words are of two bytes, without of four."""
    rows_of, slots_of = (40, 30, 25), (10, 11, 20)
    host, before, slots = make_parts(rows_of, 1), make_parts(rows_of, 1), make_parts(slots_of, 2)
    kept = [[part.clone() for part in parts] for parts in slots]
    rows, places = ([each[t] for t in tables] for each in (drawn(rows_of, counts, 3), drawn(slots_of, counts, 4)))
    host, before, slots, kept = ([each[t] for t in tables] for each in (host, before, slots, kept))
    slots = [[part.to(DEVICE) for part in parts] for parts in slots]
    streams = Streams(DEVICE)
    mover = Mover(host, slots, streams)
    mover.bring(rows, places, after=streams.moment()).wait()
    for own, at, ids, parts, old in zip(slots, places, rows, host, kept, strict=True):
        for array, source, expected in zip(own, parts, old, strict=True):
            expected[at] = source[ids]
            assert same(array, expected)
            array += 1 if array.dtype != torch.int16 else 3
    if any(counts):
        mover.send_back(Held(NO_LEASE, list(rows)), places, after=streams.moment())
    mover.settle()
    for own, at, ids, parts, old in zip(slots, places, rows, host, before, strict=True):
        for array, source, expected in zip(own, parts, old, strict=True):
            expected[ids] = array.cpu()[at]
            assert same(source, expected)


def test_a_row_that_leaves_is_there_when_it_is_asked_for_again() -> None:
    host = [[torch.zeros(6, 4)]]
    slots = [[torch.arange(8.0).view(2, 4).to(DEVICE)]]
    streams = Streams(DEVICE)
    mover = Mover(host, slots, streams)
    target = Held(NO_LEASE, [torch.tensor([5])])
    mover.send_back(target, [torch.tensor([1])], after=streams.moment())
    mover.settle()
    mover.bring([torch.tensor([5])], [torch.tensor([0])], after=streams.moment()).wait()
    assert slots[0][0][0].tolist() == host[0][0][5].tolist() == [4.0, 5.0, 6.0, 7.0]


class _Unreached(Moment):
    waited = 0

    def reached(self) -> bool:
        return False

    def wait(self) -> None:
        self.waited += 1


def test_buffers_of_copies_under_way_are_not_handed_out() -> None:
    buffers = Buffers(torch.device("cpu"))
    first = buffers.take(100)
    buffers.give_back(first, Moment())
    assert buffers.take(60).data_ptr() == first.data_ptr(), "used again"
    moments = [_Unreached() for _ in range(moves.MAX_BUFFERS)]
    taken = [buffers.take(50) for _ in moments]
    for buffer, moment in zip(taken, moments, strict=True):
        buffers.give_back(buffer, moment)
    another = buffers.take(50)
    assert another.data_ptr() not in {buffer.data_ptr() for buffer in taken[1:]}
    assert [moment.waited for moment in moments] == [1] + [0] * (len(moments) - 1), "the oldest copy was waited for"
