"""Batches from a packed split: shuffled by block and window, and resumable at any batch.

    stored    |  0  |  1  |  2  |  3  |  4  |      blocks of the split
    epoch     |  3  |  0  |  4  |  1  |  2  |      in an order drawn for each epoch
    windows   |-- 0 ---|-- 1 ---|-- 2 ---|- 3 |    the rows in that order, cut every window_rows
    batches   |0|1|2|3|4|5|6|7|8|9|...             rows permuted within each window, cut every batch_size

Every draw is a function of (seed, epoch) or (seed, epoch, window) alone, so batch k can be made without those before
it. No Python runs per row: a window's columns are gathered once, and a batch is slices of them. If rows are left out
(`only`), the drawing applies to the rows that remain; hot/order.py makes batches of hot and of cold rows that way.

With V micro-batches an epoch is cut into V streams, one for each micro-batch, and batch k takes its rows from all:

    epoch     |  3  |  0  |  4  |  1  |  2  |      V = 2
    streams   |------ 0 ------|----- 1 -----|      each has windows of its own, of window_rows / V rows
    batch 1     |1|             |1|

A rank of several has its part of every batch (`part`), and reads the blocks of its own streams alone. If there is
only one stream, it reads all blocks, and of a window it gathers the rows of its parts alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.data.packed.format import DatasetInfo, Ids, Ragged, columns_of, concatenate_ids, lengths_of, slice_ids
from hotrow.data.packed.reader import Split
from hotrow.kernels import tree

WINDOW_ROWS = 262_144
"""Four blocks: 40 MB with Criteo's 40 columns, and one column of them still fits an L2 cache of 1 MiB."""
_GATHER_ROWS = 16_384
"""Rows of lists gathered at a time; limits the size of the index built for them."""
_BLOCKS, _WINDOWS = 0, 1
"""The two families of permutations, as `permutation` numbers them."""


@dataclass(frozen=True)
class LoaderState:
    """Where the next batch is: `batch` batches of epoch `epoch` have been handed out."""

    epoch: int = 0
    batch: int = 0

    def to_json(self) -> dict[str, int]:
        """Returns the state as JSON-ready values; `LoaderState(**value)` is the inverse."""
        return asdict(self)


def permutation(num_items: int, *, seed: int, epoch: int, family: int, index: int = 0) -> NDArray[np.int64]:
    """Returns a random order of `range(num_items)`, a function of the arguments alone.

    Sorts words of 64 bits whose low bits are the item and whose high bits are Philox4x64-10(key=(seed, epoch),
    counter=(0, 0, index, family)). No two words are equal, so every correct sort gives the same order on any machine.
    """
    low_bits = np.uint64(max(num_items - 1, 0).bit_length())
    counter = np.array([0, 0, index, family], np.uint64)
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter).random_raw(num_items)
    words >>= low_bits
    words <<= low_bits
    words |= np.arange(num_items, dtype=np.uint64)
    words.sort()
    words &= (np.uint64(1) << low_bits) - np.uint64(1)
    return words.view(np.int64)


class Loader:
    """Yields the rows of `split` as `Batch`es, one epoch per iteration; iterating again gives the next epoch.

        loader = Loader(dataset.split("train"), 2048, shuffle_seed=1)
        for batch in loader: ...          # epoch 0
        for batch in loader: ...          # epoch 1, another order
        Loader(..., start=loader.state()) # the rest, bit for bit

    split: a split of an open `PackedDataset`. batch_size: rows B per batch.
    shuffle_seed: 0 .. 2^64 - 1, or None for stored order. Every row comes exactly once per epoch.
    window_rows: rows held and mixed at a time; stored order is mostly read in place.
    only: bool [rows of the split], the rows to use; the others are left out. If None, all rows.
    front, front_batches: bool [rows of the split], and the number W of batches in a group. In each group of W batches,
    rows of `front` come first, as many as fill whole batches; the other rows keep their order, and no row leaves its
    group. `window_rows` is then a multiple of W * batch_size.
    start: where to begin.
    part: which samples [start, stop) of a batch of so many are handed out, such as `Ranks.samples`; it may be none.
    Batches, their order and their number are the same as for the whole. If None, all samples.
    micro_batches: V, the parts of a batch that have streams of their own. Stored order, and `front`, have one stream.

    `len(loader)` is the number of batches per epoch, wherever the loader starts.

    Batch: dense float32 [B, I]; label float32 [B], or [B, L] if the dataset has several; weight float32 [B] or None;
    sparse with one key per
    feature in the dataset's order, int32 ids (int64 if a table has more than 2^31 rows), without offsets if all
    features are one-hot.

    Raises ValueError for arguments out of range, and, from the reader, for a damaged block.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        shuffle_seed: int | None,
        window_rows: int = WINDOW_ROWS,
        only: NDArray[np.bool_] | None = None,
        front: NDArray[np.bool_] | None = None,
        front_batches: int = 1,
        start: LoaderState = LoaderState(),
        part: Callable[[int], tuple[int, int]] | None = None,
        micro_batches: int = 1,
    ) -> None:
        sizes = {
            "batch_size": batch_size,
            "window_rows": window_rows,
            "front_batches": front_batches,
            "micro_batches": micro_batches,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name, rows in (("only", only), ("front", front)):
            if rows is not None and rows.shape != (split.num_rows,):
                raise ValueError(f"{name} has shape {rows.shape}, but split {split.name!r} has {split.num_rows} rows")
        if shuffle_seed is not None and not 0 <= shuffle_seed < 1 << 64:
            raise ValueError(f"shuffle_seed is {shuffle_seed}; it must be from 0 to 2^64 - 1, or None for stored order")
        if only is not None and front is not None:
            raise ValueError("only and front are both given; a loader leaves rows out or moves some to the front")
        self.num_rows = split.num_rows if only is None else int(only.sum())
        """Rows per epoch."""
        self.split, self.batch_size, self.shuffle_seed = split, batch_size, shuffle_seed
        self.gathered_s: list[float] = []
        """Seconds that each window of rows took to gather so far."""
        self.only, self.front, self.group_rows = only, front, front_batches * batch_size
        self.part = part
        self.num_streams = micro_batches if shuffle_seed is not None and front is None else 1
        # In stored order a window is only read, so a window is one block and is used in the mapping.
        most = split.num_rows if shuffle_seed is not None else int(split.block_rows.max(initial=1))
        self.window_rows = -(-min(window_rows, max(most, 1)) // self.num_streams)
        """Rows of a window of one stream."""
        if front is not None:
            self.window_rows = max(1, window_rows // self.group_rows) * self.group_rows
        self.num_batches = -(-self.num_rows // batch_size)
        """Batches per epoch; the last one may be shorter."""
        self.stream_starts = self._starts_of_streams()
        """Where each stream begins among the rows of an epoch, and the end of the last."""
        if start.epoch < 0 or not 0 <= start.batch <= self.num_batches:
            raise ValueError(
                f"start is {start}; an epoch of this split has {self.num_batches} batches of {batch_size} rows: "
                "resume with the data and batch_size of the interrupted run"
            )
        self._state = start

    def __len__(self) -> int:
        return self.num_batches

    def state(self) -> LoaderState:
        """Returns how many batches have been handed out."""
        return self._state

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rest of the current epoch; at its end the state moves to the next epoch."""
        epoch = self._state.epoch
        for batch in self.epoch(epoch, self._state.batch):
            self._state = LoaderState(epoch, self._state.batch + 1)
            yield batch
        self._state = LoaderState(epoch + 1, 0)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Yields the batches of `epoch` from `start_batch` on, without changing `state()`."""
        streams: dict[int, _Stream] = {}
        for k in range(start_batch, self.num_batches):
            pieces: list[list[Ids]] = []
            for number, first, stop in self.spans(k):
                if number not in streams:
                    streams[number] = _Stream(self, epoch, number)
                pieces += streams[number].rows(first, stop)
            columns = _joined(pieces) if pieces else [slice_ids(own, 0, 0) for own in self.split.block(0).columns]
            yield _assemble(columns, self.split.info, None if self.part is None else self._rows_of_batch(k))

    def spans(self, k: int) -> Iterator[tuple[int, int, int]]:
        """Yields what is handed out in batch `k`: a stream, and its rows [first, stop) among those of an epoch."""
        num_rows = self._rows_of_batch(k)
        first, last = (0, num_rows) if self.part is None else self.part(num_rows)
        starts, whole = (tree.starts(size, self.num_streams) for size in (num_rows, self.batch_size))
        for number in range(self.num_streams):
            a, b = max(first, starts[number]), min(last, starts[number + 1])
            if a < b:
                before = self.stream_starts[number] + k * (whole[number + 1] - whole[number])
                yield number, before + a - starts[number], before + b - starts[number]

    def _starts_of_streams(self) -> list[int]:
        whole, rest = divmod(self.num_rows, self.batch_size)
        sizes = [(whole, self.batch_size), (self.num_batches - whole, rest)]
        of_sizes = ([n * start for start in tree.starts(size, self.num_streams)] for n, size in sizes)
        return [sum(each) for each in zip(*of_sizes, strict=True)]

    @property
    def num_windows(self) -> int:
        """Windows per epoch, over all streams."""
        return sum(-(-(b - a) // self.window_rows) for a, b in pairwise(self.stream_starts))

    def _rows_of_batch(self, k: int) -> int:
        return min(self.batch_size, self.num_rows - k * self.batch_size)


class _Stream:
    """The rows of one stream of an epoch in their shuffled order; holds the columns of one window at a time."""

    def __init__(self, loader: Loader, epoch: int, number: int = 0) -> None:
        self._loader, self._split, self._seed, self._epoch = loader, loader.split, loader.shuffle_seed, epoch
        self._number, (self._first, self._last) = number, loader.stream_starts[number : number + 2]
        blocks, seed = self._split.num_blocks, self._seed
        self._order = np.arange(blocks) if seed is None else permutation(blocks, seed=seed, epoch=epoch, family=_BLOCKS)
        self._block_starts = np.cumsum(self._split.block_rows) - self._split.block_rows
        self._block_rows = self._split.block_rows
        if loader.only is not None:
            self._block_rows = np.array([int(self._of_block(loader.only, index).sum()) for index in range(blocks)], int)
        self._ends = np.cumsum(self._block_rows[self._order])
        self._window_index = -1
        self._window: list[Ids] = []
        self._own: NDArray[np.int64] | None = None
        """Which rows of the window are handed out, rising; `_window` has these alone. If None, all of them."""

    def _of_block(self, rows: NDArray[np.bool_], index: int) -> NDArray[np.bool_]:
        """Returns the part of `rows` [rows of the split] that belongs to a block."""
        start = int(self._block_starts[index])
        return rows[start : start + int(self._split.block_rows[index])]

    def rows(self, start: int, stop: int) -> list[list[Ids]]:
        """Returns the columns of rows [start, stop) of the epoch, in pieces; the next call overwrites the last one."""
        pieces: list[list[Ids]] = []
        while start < stop:
            window_index, first = divmod(start - self._first, self._loader.window_rows)
            last = min(first + stop - start, self._loader.window_rows)
            window = self._load(window_index)
            at = (first, last) if self._own is None else np.searchsorted(self._own, (first, last)).tolist()
            piece = [slice_ids(column, *at) for column in window]
            start += last - first
            # The next window overwrites this one, so copy first what is needed of it.
            pieces.append(piece if start == stop else [concatenate_ids([column]) for column in piece])
        return pieces

    def _load(self, window_index: int) -> list[Ids]:
        if window_index != self._window_index:
            start = time.perf_counter()
            self._window = self._gather(window_index)
            self._window_index = window_index
            self._loader.gathered_s.append(time.perf_counter() - start)
        return self._window

    def _gather(self, window_index: int) -> list[Ids]:
        start = self._first + window_index * self._loader.window_rows
        stop = min(start + self._loader.window_rows, self._last)
        order = None
        if self._seed is not None:
            index = self._number << 32 | window_index
            order = permutation(stop - start, seed=self._seed, epoch=self._epoch, family=_WINDOWS, index=index)
        pieces, front = [], []
        for index, first, last in self._segments(start, stop):
            pieces.append(self._rows_of_block(index, first, last))
            if self._loader.front is not None:
                front.append(self._of_block(self._loader.front, index)[first:last])
        if front:
            order = _grouped(np.arange(stop - start) if order is None else order, np.concatenate(front), self._loader)
        alone = self._loader.num_streams == 1 and self._loader.part is not None
        self._own = self._own_rows(start, stop) if alone and order is not None else None
        if order is not None and self._own is not None:
            order = order[self._own]
        window: list[Ids] = []
        for j, parts in enumerate(zip(*pieces, strict=True)):
            column = parts[0] if len(parts) == 1 else concatenate_ids(parts)
            room = self._window[j] if self._window else None
            window.append(column if order is None else _take(column, order, room))
        return window

    def _own_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns which of the epoch's rows [start, stop) are handed out, counted from `start`."""
        size = self._loader.batch_size
        spans = [span for k in range(start // size, -(-stop // size)) for span in self._loader.spans(k)]
        ranges = [np.arange(max(first, start), min(last, stop)) for _, first, last in spans]
        return np.concatenate([*ranges, np.empty(0, np.int64)]) - start

    def _rows_of_block(self, index: int, first: int, last: int) -> list[Ids]:
        """Returns the columns of a block's rows [first, last), counting only rows that are used."""
        block, only = self._split.block(index), self._loader.only
        columns = block.columns
        if only is None:
            return [slice_ids(column, first, last) for column in columns]
        picked = np.flatnonzero(self._of_block(only, index))[first:last]
        return [_take(column, picked, None) for column in columns]

    def _segments(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields block, first row and end row for each run of the epoch's rows [start, stop)."""
        index = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            block = int(self._order[index])
            block_start = int(self._ends[index] - self._block_rows[block])
            end = min(stop, int(self._ends[index]))
            yield block, start - block_start, end - block_start
            start, index = end, index + 1


def _grouped(order: NDArray[np.int64], front: NDArray[np.bool_], loader: Loader) -> NDArray[np.int64]:
    """Returns `order` with whole batches of `front` rows first in every group; `front` is in the order before
    `order`."""
    groups = []
    for start in range(0, len(order), loader.group_rows):
        group = order[start : start + loader.group_rows]
        moved = np.flatnonzero(front[group])
        moved = moved[: len(moved) // loader.batch_size * loader.batch_size]
        groups += [group[moved], np.delete(group, moved)]
    return np.concatenate(groups)


def _take(column: Ids, order: NDArray[np.int64], room: Ids | None) -> Ids:
    """Returns rows `order` of `column`; overwrites `room`, a column that is no longer needed, if it fits."""
    # mode="clip": "raise" would copy through a buffer, and a permutation needs no check.
    if not isinstance(column, Ragged):
        out = room if isinstance(room, np.ndarray) and len(room) == len(order) else np.empty(len(order), column.dtype)
        np.take(column, order, out=out, mode="clip")
        return out
    splits = np.zeros(len(order) + 1, np.int64)
    np.cumsum(np.diff(column.row_splits)[order], out=splits[1:])
    shift = column.row_splits[order] - splits[:-1]
    values = np.empty(int(splits[-1]), column.values.dtype)
    for a in range(0, len(order), _GATHER_ROWS):
        b = min(a + _GATHER_ROWS, len(order))
        index = np.repeat(shift[a:b], np.diff(splits[a : b + 1])) + np.arange(splits[a], splits[b])
        np.take(column.values, index, out=values[splits[a] : splits[b]], mode="clip")
    return Ragged(values, splits)


def _joined(pieces: list[list[Ids]]) -> list[Ids]:
    return pieces[0] if len(pieces) == 1 else [concatenate_ids(parts) for parts in zip(*pieces, strict=True)]


def _assemble(columns: list[Ids], info: DatasetInfo, of_samples: int | None) -> Batch:
    """Returns the batch of `columns`, in stored order, in new tensors."""
    labels, dense, ids, weights = columns_of(info, columns)
    num_rows, num_dense = len(labels[0]), len(dense)
    # torch transposes in blocks: np.stack, which writes column by column, takes several times as long for many columns.
    stacked = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *dense])).view(num_dense, num_rows).t()
    label = torch.from_numpy(labels[0].copy() if len(labels) == 1 else np.stack(labels, axis=1))
    weight = None if weights is None else torch.from_numpy(weights.copy())
    return Batch(stacked.contiguous(), keyed(info.feature_names, ids), label, of_samples, weight)


def keyed(names: tuple[str, ...], columns: Sequence[Ids]) -> KeyedJaggedTensor:
    """Returns the ids of features, a column each, as a batch has them."""
    values = np.concatenate([column.values if isinstance(column, Ragged) else column for column in columns])
    offsets = None
    if any(isinstance(column, Ragged) for column in columns):
        lengths = np.concatenate([lengths_of(column) for column in columns])
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        np.cumsum(lengths, out=offsets.numpy()[1:])
    return KeyedJaggedTensor(names, torch.from_numpy(values), offsets=offsets)
