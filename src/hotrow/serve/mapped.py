"""Tables of an export as they lie in their files: mapped, so that a row is read when it is first looked up."""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from hotrow.base.door import open_file
from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.export.rows import RowFormat, StoredLookups
from hotrow.export.score import STORED, looked_up
from hotrow.placement.base import Placement
from hotrow.placement.dram import Dram
from hotrow.tables import TableConfig

MAX_HEAD_BYTES = 1 << 20
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


class MappedTables:
    """The tables in the files of an export, never written: of float32 for `EmbeddingCollection(memory=...)`.

    most_bytes: how much of mapped files may be in this process's memory, those of others included; if None, the system
    decides.
    """

    def __init__(self, export: Path, tables: Sequence[dict[str, Any]], most_bytes: int | None) -> None:
        self.weights: dict[str, Tensor] = {}
        self._maps: list[mmap.mmap] = []
        self._most = most_bytes
        for table in tables:
            dtype, more = STORED[table.get("stored_as", "float32")]
            shape = table["num_embeddings"], table["embedding_dim"] + more
            mapped, begin = _map(export / table["file"], table["tensor"], dtype, shape)
            self.bound(mapped)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch has no tensors that cannot be written to, and says so
                weights = torch.frombuffer(mapped, dtype=dtype, count=shape[0] * shape[1], offset=begin)
            self.weights[table["name"]] = weights.view(shape)

    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Placement:
        """Returns the placement of the tables."""
        return Dram(tables, weights=self.weights)

    def bound(self, mapped: mmap.mmap | None) -> None:
        """Counts a mapping among those that are let go of if there is too much of them in memory."""
        if self._most is not None and mapped is not None:
            # A row takes a page. Reading the pages around it too would fill the memory with rows nobody asks for.
            mapped.madvise(mmap.MADV_RANDOM)
            self._maps.append(mapped)

    def keep_within(self) -> None:
        """Lets go of all mapped pages if there are more than `most_bytes` of them. Call it after each lookup."""
        if self._most is not None and mapped_bytes() > self._most:
            self.let_go()

    def let_go(self) -> None:
        """Lets go of all mapped pages, if they are bounded. The system may still have them, and gives them back without
        reading the disk unless it needed their memory."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)


def mapped_bytes() -> int:
    """Returns how much of mapped files is in this process's memory."""
    with Path("/proc/self/statm").open("rb") as file:
        return int(file.read().split()[2]) * mmap.PAGESIZE


class SmallLookups(StoredLookups):
    """Looks up rows that are not stored as float32, which the kernels do not read."""

    def __init__(self, tables: Sequence[TableConfig], mapped: MappedTables, form: RowFormat) -> None:
        names = tuple(name for table in tables for name in table.feature_names)
        super().__init__(cast(EmbeddingCollection, SimpleNamespace(tables=tables, feature_names=names)), form)
        self._weights = {name: mapped.weights[table.name] for table in tables for name in table.feature_names}

    def sequence(self, sparse: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the row of every id, as `EmbeddingCollection.sequence` does."""
        bags = {name: sparse.bags(name) for name in self.feature_names}
        return {name: (looked_up(self._weights[name][ids.long()]), offsets) for name, (ids, offsets, _) in bags.items()}


def _map(path: Path, tensor: str, dtype: torch.dtype, shape: tuple[int, int]) -> tuple[mmap.mmap, int]:
    """Maps a safetensors file; returns the mapping, and where `tensor` begins in it.

    Raises ValueError, which names the file, if it does not hold the tensor in this type and shape.
    """
    with open_file(path) as file:
        head_bytes = int.from_bytes(file.read(8), "little")
        try:
            about = json.loads(file.read(min(head_bytes, MAX_HEAD_BYTES)))[tensor]
            begin, end = about["data_offsets"]
            fits = about["dtype"] == _NAMES[dtype] and tuple(about["shape"]) == shape and begin >= 0
            fits = fits and end - begin == dtype.itemsize * shape[0] * shape[1]
            fits = fits and 8 + head_bytes + end <= path.stat().st_size
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise ValueError(f"{path} does not hold {tensor} as {dtype} {list(shape)}; export the run again")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 8 + head_bytes + begin
