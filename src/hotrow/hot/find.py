"""The hot rows of a dataset and the samples they cover, and how long it took to know."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed_reader import PackedDataset
from hotrow.hot.calibrate import Calibration, calibrate
from hotrow.hot.classify import hot_samples
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotSet


@dataclass(frozen=True)
class FoundHot:
    """What is hot, of rows and of training samples."""

    calibration: Calibration
    is_hot: NDArray[np.bool_]
    """bool [rows of the training split]."""
    calibrate_s: float
    classify_s: float

    @property
    def rows(self) -> HotSet:
        """The hot rows."""
        return self.calibration.hot

    def to_json(self) -> dict[str, Any]:
        """Sizes, shares and times."""
        hot = self.rows
        return {
            "name": hot.how,
            "budget_bytes": self.calibration.budget_bytes,
            "hot_bytes": hot.num_bytes,
            "hot_rows": hot.num_rows,
            "tables": {name: rows.num_rows for name, rows in hot.rows.items()},
            **self.calibration.detail,
            "hot_samples": float(self.is_hot.mean()) if len(self.is_hot) else 0.0,
            "calibrate_s": self.calibrate_s,
            "classify_s": self.classify_s,
        }


def find_hot(
    dataset: PackedDataset,
    how: str,
    budget_bytes: int,
    *,
    record_bytes: Mapping[str, int],
    small_table_bytes: int = SMALL_TABLE_BYTES,
    seed: int = 0,
    threads: int | None = None,
) -> FoundHot:
    """Calibrate and classify the training split; see `calibrate` for the arguments and what it raises."""
    start = time.perf_counter()
    found = calibrate(
        dataset, how, budget_bytes, record_bytes=record_bytes, small_table_bytes=small_table_bytes, seed=seed
    )
    middle = time.perf_counter()
    is_hot = hot_samples(dataset, found.hot, threads=threads)
    return FoundHot(found, is_hot, middle - start, time.perf_counter() - middle)
