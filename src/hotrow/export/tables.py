"""The tables of a checkpoint as lookups read them, in float32 and in pieces: no collection is built.

A checkpoint holds a table as one file or as a chain of files (checkpoint_rows.py); either becomes `Pieces` here, which
`write_tensors` streams into a file. The rest of an export is made in export.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hotrow.base.files import file_name
from hotrow.run.checkpoint_manifest import Manifest
from hotrow.run.checkpoint_rows import ROWS, Chain
from hotrow.run.checkpoint_tensors import CURE, check_like, open_tensors
from hotrow.tables import TableConfig

WEIGHT, PART = "weight", "embedding"
PIECE_BYTES = 1 << 22
"""Bytes of rows in memory at a time, as float32; the allocator keeps up to ten such pieces for reuse."""


class LookedUpRows:
    """[N, D] float32 of a table in the checkpoint at `path`: the numbers that a lookup adds up.

    float16 is widened, exactly. Lookups read the upper half of split weights ("bfloat16"), so the lower bits are
    0 here: these are the weights a run predicts with. The lower half is for further training and is not exported.
    done: called with the number of rows of every piece. Raises ValueError if the checkpoint holds another table.
    """

    dtype = torch.float32

    def __init__(self, path: Path, manifest: Manifest, table: TableConfig, *, done: Callable[[int], None]) -> None:
        self.shape = torch.Size((table.num_embeddings, table.embedding_dim))
        self._upper_half, self._done = table.dtype == "bfloat16", done
        dtype = torch.float16 if table.dtype == "float16" else torch.float32
        chain = Chain.of(manifest, PART, table.name)
        if chain is None:
            self._rows = _whole(path / PART / f"{file_name(table.name)}.safetensors", self.shape, dtype)
        else:
            self._rows = _merged(path, chain, self.shape, dtype)

    def pieces(self) -> Iterator[Tensor]:
        """Returns the rows as they are stored, in order."""
        return self._rows

    def read(self, piece: Tensor) -> Tensor:
        """Returns the piece as lookups see it."""
        self._done(len(piece))
        if self._upper_half:
            return (piece.view(torch.int32) & -(2**16)).view(torch.float32)
        return piece.to(torch.float32)


def _ranges(shape: torch.Size) -> Iterator[slice]:
    step = max(1, PIECE_BYTES // (4 * shape[1]))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _whole(path: Path, shape: torch.Size, dtype: torch.dtype) -> Iterator[Tensor]:
    for rows in _ranges(shape):
        with open_tensors(path) as file:  # opened again, so that pages read before do not stay mapped
            stored = file.get_slice(WEIGHT)
            check_like(path, WEIGHT, stored, dtype, shape)
            yield stored[rows]


def _merged(path: Path, chain: Chain, shape: torch.Size, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields the initial rows, replaced by those of each link in turn.

    The row numbers in a link rise, so one position in each link is enough to go on from.
    """
    if chain.num_rows != shape[0]:
        raise ValueError(f"{path / chain.stem} has {chain.num_rows:,} rows, its table {shape[0]:,}; take another step")
    if (dtype == torch.float16) != (chain.initial.dtype == "float16"):
        raise ValueError(f"{path / chain.stem} is made of {chain.initial.dtype}, its table of {dtype}; {CURE}")
    places = [0] * len(chain.links)
    for rows in _ranges(shape):
        piece = chain.initial.read(WEIGHT, rows, shape)
        for k, (file, num_rows) in enumerate(zip(chain.files, chain.links, strict=True)):
            places[k] = _overlay(piece, rows, path / file, places[k], num_rows)
        yield piece


def _overlay(piece: Tensor, rows: slice, path: Path, place: int, num_rows: int) -> int:
    """Copies into `piece`, the table's `rows`, those that a link has from `place` on; returns the next place."""
    if place == num_rows:
        return place
    with open_tensors(path) as link:
        ids = link.get_slice(ROWS)[place : min(num_rows, place + rows.stop - rows.start)]
        end = place + int(torch.searchsorted(ids, rows.stop))
        if end > place:
            values = link.get_slice(WEIGHT)
            check_like(path, WEIGHT, values, piece.dtype, (num_rows, piece.shape[1]))
            piece[ids[: end - place] - rows.start] = values[place:end]
    return end
