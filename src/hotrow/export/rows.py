"""How an export stores the rows of its tables: in float32, in bfloat16, or as a byte for each number.

A row is stored by itself, so that what has changed between two exports is found row by row. `rows_of` in score.py
reverses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.export.score import STORED, looked_up
from hotrow.models.layers import bag_sums
from hotrow.run.checkpoint_files import Pieces

RowFormat = Literal["float32", "bf16", "int8"]
FORMATS = get_args(RowFormat)


def as_bytes(rows_ND: Tensor) -> Tensor:
    """Returns each row as D bytes q, its step and its least number, [N, D + 8] uint8: q = round((x - least) / step).

    step = (most - least) / 255, so a number comes back within half a step. This is the layout of FBGEMM's 8-bit rows.
    """
    low_N1, high_N1 = rows_ND.aminmax(dim=1, keepdim=True)
    step_N1 = ((high_N1 - low_N1) / 255).clamp_min(torch.finfo(torch.float32).tiny)  # of equal numbers it is not 0
    q_ND = ((rows_ND.double() - low_N1) / step_N1).round().clamp(0, 255).to(torch.uint8)
    return torch.cat([q_ND, torch.cat([step_N1, low_N1], 1).view(torch.uint8)], 1)


def stored(rows_ND: Tensor, form: RowFormat) -> Tensor:
    """Returns float32 rows as an export stores them."""
    return as_bytes(rows_ND) if form == "int8" else rows_ND.to(STORED[form][0])


class StoredRows:
    """The rows of `table` as an export stores them, piece by piece.

    Raises ValueError, which names table and row, if a number is infinite or NaN, or becomes so.
    """

    def __init__(self, rows: Pieces, form: RowFormat, table: str) -> None:
        self.dtype, more = STORED[form]
        self.shape = torch.Size((rows.shape[0], rows.shape[1] + more))
        self._rows, self._form, self._table, self._start = rows, form, table, 0

    def pieces(self) -> Iterator[Any]:
        """Returns the pieces of the rows, which are read in their order."""
        self._start = 0
        return iter(self._rows.pieces())

    def read(self, piece: Any) -> Tensor:
        """Returns the piece as it is stored."""
        found = stored(self._rows.read(piece), self._form)
        fine = torch.isfinite(looked_up(found)).all(1)
        if not bool(fine.all()):
            row = self._start + int((~fine).nonzero()[0])
            raise ValueError(
                f"table {self._table!r}, row {row:,}: a number is infinite, NaN or too large for {self._form} rows; "
                "export float32 rows, or train again with a lower optimizer.sparse.lr"
            )
        self._start += len(found)
        return found


class StoredLookups:
    """Looks up rows of `embedding` as an export stores them, for an evaluation in place of the collection."""

    def __init__(self, embedding: EmbeddingCollection, form: RowFormat) -> None:
        self.feature_names, self._embedding, self._form = embedding.feature_names, embedding, form
        self._means = {name for table in embedding.tables if table.pooling == "mean" for name in table.feature_names}

    def sequence(self, sparse: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the row of every id, as `EmbeddingCollection.sequence` does."""
        found = self._embedding.sequence(sparse)
        return {name: (looked_up(stored(rows_LD, self._form)), offsets) for name, (rows_LD, offsets) in found.items()}

    def __call__(self, sparse: KeyedJaggedTensor) -> Tensor:
        """Returns pooled rows, [B, sum of D]."""
        pooled = []
        for name, (rows_LD, offsets) in self.sequence(sparse).items():
            sums_BD = bag_sums(rows_LD, offsets)
            counts_B = offsets.diff().clamp_min(1).to(sums_BD.device)
            pooled.append(sums_BD / counts_B[:, None] if name in self._means else sums_BD)
        return torch.cat(pooled, 1)
