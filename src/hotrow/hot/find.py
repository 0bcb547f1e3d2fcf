"""Hot rows and the samples they cover, and how long it took to know: what a run, a study and `inspect` report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import Calibration
from hotrow.hot.classify import hot_samples
from hotrow.hot.hot_set import HotSet


@dataclass(frozen=True)
class FoundHot:
    """What is hot, of rows and of training samples."""

    calibration: Calibration
    is_hot: NDArray[np.bool_]
    """bool [rows of the training split]."""
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
            "calibrate_s": self.calibration.seconds,
            "classify_s": self.classify_s,
        }


def find_hot(dataset: PackedDataset, calibration: Calibration, *, threads: int | None = None) -> FoundHot:
    """The samples of the training split that a calibration makes hot."""
    start = time.perf_counter()
    is_hot = hot_samples(dataset, calibration.hot, threads=threads)
    return FoundHot(calibration, is_hot, time.perf_counter() - start)
