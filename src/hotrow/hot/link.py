"""What crosses the link between the tables and a fast device, in bytes: counted here, timed by nobody.

    hybrid       every batch: its rows over, their gradients back, dense inputs and labels over
    hot turns    a hot batch: its ids, dense inputs and labels over; a cold one as in the hybrid
                 a swap: the hot rows with their optimizer states over, and back

A batch's rows are those that the model takes: pooled, one a sample and feature, or as sequences, one an id.
As of FAE (Adnan et al., VLDB'22), whose table of transfers leaves out gradients, dense inputs and labels; counting them
changes both sides. Seconds are bytes over the rate that was declared, and stand where it says that they are modelled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hotrow.base.records import Count
from hotrow.batch import Batch


@dataclass
class Link:
    """Bytes so far, by what they were for."""

    to_device_bytes: Count = 0
    from_device_bytes: Count = 0
    sync_bytes: Count = 0
    """Of both: hot rows, at swaps and before evaluations and checkpoints."""
    num_swaps: Count = 0
    """Copies of the hot rows, either way."""
    hot_batches: Count = 0
    cold_batches: Count = 0
    hybrid_bytes: Count = 0
    """What the same batches would have taken with all rows in the tables."""

    def swap(self, *, to_device_bytes: int = 0, from_device_bytes: int = 0) -> None:
        """Hot rows were copied."""
        self.to_device_bytes += to_device_bytes
        self.from_device_bytes += from_device_bytes
        self.sync_bytes += to_device_bytes + from_device_bytes
        self.num_swaps += 1

    def count(self, batch: Batch, *, row_bytes: int, hot: bool, uploads: int = 1) -> None:
        """A batch was trained; row_bytes: of its rows; uploads: times that the ids of a hot batch go over."""
        offsets = 0 if batch.sparse.one_hot else batch.sparse.offsets.nbytes
        inputs, ids = batch.dense.nbytes + batch.label.nbytes, uploads * (batch.sparse.values.nbytes + offsets)
        to_device, from_device = crossing(row_bytes=row_bytes, input_bytes=inputs, id_bytes=ids, hot=hot)
        self.to_device_bytes += to_device
        self.from_device_bytes += from_device
        self.hybrid_bytes += sum(crossing(row_bytes=row_bytes, input_bytes=inputs, id_bytes=ids, hot=False))
        self.hot_batches += hot
        self.cold_batches += not hot

    def to_json(self, *, bytes_per_s: float | None) -> dict[str, Any]:
        """For run.json; bytes_per_s: of the link, each way, where one is declared; None: nothing is modelled."""
        crossed = self.to_device_bytes + self.from_device_bytes
        counted = {**asdict(self), "hybrid_ratio": round(self.hybrid_bytes / crossed, 3) if crossed else None}
        if bytes_per_s is None:
            return counted
        return {
            **counted,
            "modelled_link_s": round(crossed / bytes_per_s, 6),
            "modelled_hybrid_link_s": round(self.hybrid_bytes / bytes_per_s, 6),
        }


def crossing(*, row_bytes: int, input_bytes: int, id_bytes: int, hot: bool) -> tuple[int, int]:
    """Bytes to the device and from it, of a batch whose rows, dense inputs with labels, and ids take so many."""
    return (input_bytes + id_bytes, 0) if hot else (input_bytes + row_bytes, row_bytes)
