"""How hot, how often again, how steady: what one pass over a table's lookups says about its locality.

reuse        miss-ratio curves, per lookup and per distinct row of a batch (data/reuse.py)
overlap      share of a batch's rows that were in one of the 1, 10 or 100 batches before it
drift        the hot set of the first tenth of the batches, and what it covers in each later tenth
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.inspect.accesses import RowCounts, TableAccesses
from hotrow.inspect.reuse import OVERLAP_BATCHES, Access, MissRatioCurve, ReuseProfile, is_sampled

AUTO_ROWS = 1 << 20
"""Rows of a table that are followed unless a rate is given: 80 MB for both curves, and no error up to so many rows."""
LEAST_ROWS = 1 << 13
"""Rows followed at least whatever the rate: the paper on SHARDS found this many enough [recall], fewer are noise."""
NUM_WINDOWS = 10
HOT_SHARE = 0.01
"""Of a table's rows: the hot set whose drift is watched."""


@dataclass(frozen=True)
class Window:
    """A tenth of the batches, looked at for drift."""

    first_hot_set: float
    """Share of the window's lookups that the hot set of the first window takes."""
    own_hot_set: float
    """The same for as many rows, the hottest of this window: the most that any set of that size could take."""


@dataclass(frozen=True)
class Locality:
    """What one pass found. Means over batches leave out a smaller last one."""

    num_batches: int
    num_lookups: int
    num_rows_read: int
    """Different rows of each batch, summed over all batches: the accesses of `by_row`."""
    lookups_per_batch: float
    rows_per_batch: float
    """Different rows of a batch."""
    rate: float
    """Share of the table's rows followed; 1: the curves are exact."""
    rows_followed: int
    by_lookup: MissRatioCurve
    by_row: MissRatioCurve
    """Each different row of a batch counted once."""
    overlap: dict[int, float | None]
    windows: tuple[Window, ...]

    @property
    def unique_ratio(self) -> float:
        """Different rows of a batch over its lookups."""
        return self.rows_per_batch / self.lookups_per_batch if self.lookups_per_batch else 0.0

    def num_accesses(self, per: Access) -> int:
        """Of that curve."""
        return self.num_lookups if per == "lookup" else self.num_rows_read

    def curve(self, per: Access) -> MissRatioCurve:
        """Per lookup, or per different row of a batch."""
        return self.by_lookup if per == "lookup" else self.by_row


def sampling_rate(num_embeddings: int, requested: float | None) -> float:
    """The share of a table's rows to follow: `requested`, else as many as 2^20 rows; never fewer than 2^13 rows."""
    if requested is not None and not 0 < requested <= 1:
        raise ValueError(f"sample is {requested}; the share of rows to follow is above 0 and at most 1")
    wanted = AUTO_ROWS / num_embeddings if requested is None else requested
    return min(1.0, max(wanted, LEAST_ROWS / num_embeddings))


def measure_locality(
    table: TableAccesses,
    *,
    num_samples: int,
    batch_size: int,
    sample: float | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda batches: None,
) -> Locality:
    """Read the table's lookups once. `advance` is told the number of batches read. Same seed, same result.

    Raises ValueError for a batch_size below 1, or a `sample` outside (0, 1].
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    rate = sampling_rate(table.num_embeddings, sample)
    by_lookup, by_row = (ReuseProfile(access, rate=rate, seed=seed) for access in ("lookup", "row"))
    num_batches = -(-num_samples // batch_size)
    num_full = max(num_samples // batch_size, 1)
    drift = _Drift(num_batches, rate, seed, table.num_embeddings)
    lookups_full = rows_full = 0
    for index, ids in enumerate(table.batches(batch_size)):
        by_lookup.add(ids)
        num_rows = by_row.add(ids)
        if index < num_full:
            lookups_full, rows_full = lookups_full + len(ids), rows_full + num_rows
        drift.add(index, ids)
        advance(index + 1)
    return Locality(
        num_batches=num_batches,
        num_lookups=by_lookup.num_accesses,
        num_rows_read=by_row.num_accesses,
        lookups_per_batch=lookups_full / num_full,
        rows_per_batch=rows_full / num_full,
        rate=rate,
        rows_followed=by_lookup.num_rows,
        by_lookup=by_lookup.curve(),
        by_row=by_row.curve(),
        overlap={k: by_row.overlap(k) for k in OVERLAP_BATCHES},
        windows=drift.windows(),
    )


class _Drift:
    """Counts of the followed rows in each tenth of the batches, one tenth in memory at a time beside the hot set."""

    def __init__(self, num_batches: int, rate: float, seed: int, num_embeddings: int) -> None:
        self._num_windows = min(NUM_WINDOWS, num_batches)
        self._num_batches, self._rate, self._seed = num_batches, rate, seed
        self._num_hot = max(1, round(HOT_SHARE * rate * num_embeddings))
        self._hot: NDArray[np.int64] | None = None
        self._found: list[Window] = []
        self._window = 0
        self._counts = RowCounts()

    def add(self, index: int, ids: NDArray[Any]) -> None:
        """Batch `index`."""
        window = index * self._num_windows // self._num_batches
        if window != self._window:
            self._close()
            self._window = window
        self._counts.add(ids if self._rate == 1 else ids[is_sampled(ids, self._rate, self._seed)])

    def windows(self) -> tuple[Window, ...]:
        """All windows, after the last batch; none where there are too few batches to compare."""
        self._close()
        return tuple(self._found) if len(self._found) > 1 else ()

    def _close(self) -> None:
        rows, counts = self._counts.sums()
        self._counts = RowCounts()
        total = int(counts.sum())
        hottest = np.argsort(-counts, kind="stable")[: self._num_hot]
        if self._hot is None:
            self._hot = rows[hottest]
        if total:
            in_hot = int(counts[np.isin(rows, self._hot)].sum())
            self._found.append(Window(in_hot / total, int(counts[hottest].sum()) / total))
