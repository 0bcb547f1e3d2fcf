"""Hot rows learned while a run trains: every epoch goes by the rows that batches used most until it began.

    epoch 0       shuffled order, nothing is hot yet; the tracker sees every batch
    an epoch ends learn: the tracker's rows are the next epoch's hot rows, and its samples are classified anew

So needs no counts, and follows data whose hot rows move on (after Hotline, which looks at some of the first epoch's
batches). State is buffers of a module, which a checkpoint holds as any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hotrow.batch import Batch
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import Calibration
from hotrow.hot.find import FoundHot, find_hot
from hotrow.hot.tracker import HotTracker


class Learner(nn.Module):
    """The tracker of a run, and what it knew when the epoch began.

    record_bytes, budget_bytes, small_table_bytes: as `HotTracker` has them, and its errors.
    """

    slots: Tensor
    numbers: Tensor
    began_with: Tensor

    def __init__(
        self,
        dataset: PackedDataset,
        record_bytes: Mapping[str, int],
        budget_bytes: int,
        *,
        small_table_bytes: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        info = dataset.info
        self.features = {table.name: [f.name for f in info.features if f.table == table.name] for table in info.tables}
        rows = {table.name: table.num_embeddings for table in info.tables}
        self.tracker = HotTracker(rows, record_bytes, budget_bytes, small_table_bytes=small_table_bytes, seed=seed)
        self.register_buffer("slots", self.tracker.slots)
        self.register_buffer("numbers", self.tracker.numbers)
        self.register_buffer("began_with", self.tracker.slots.clone())

    def observe(self, batch: Batch) -> None:
        """A batch was trained."""
        ids = batch.sparse.values.numpy()
        for table, names in self.features.items():
            own = [ids[batch.sparse.span(name)] for name in names]
            if own:
                self.tracker.observe({table: own[0] if len(own) == 1 else np.concatenate(own)})

    def learn(self) -> FoundHot:
        """An epoch begins: what is hot in it."""
        self.began_with.copy_(self.slots)
        return self.found()

    def found(self) -> FoundHot:
        """What is hot in the epoch that began last."""
        start = time.perf_counter()
        hot = self.tracker.hot_set(self.began_with)
        return find_hot(self.dataset, Calibration(hot, self.tracker.budget_bytes, {}, time.perf_counter() - start))


def whole_batches(is_hot: NDArray[np.bool_], batch_size: int) -> NDArray[np.bool_]:
    """Of the hot samples as many as fill batches, the first ones; the others are trained with the cold.

    So every epoch has as many batches as one in shuffled order, whatever is hot in it.
    """
    places = np.flatnonzero(is_hot)
    kept = np.zeros_like(is_hot)
    kept[places[: len(places) // batch_size * batch_size]] = True
    return kept
