"""Hot rows on a fast device: which side is live, the tables or the copies of their hot rows.

    cold turn   lookups and updates work on the tables
    fetch       tables --copy--> copies
    hot turn    lookups and updates work on the copies; the tables' hot rows are out of date
    give_back   copies --copy--> tables

Copying is placement/copies.py's part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hotrow.embedding import EmbeddingCollection
from hotrow.hot.hot_set import HotSet
from hotrow.optim import SparseOptimizer
from hotrow.placement.copies import Copies


class HotCopies:
    """Copies of the rows `hot` of the tables of `emb`, with the states of `optimizer`; the tables are live at first.

    optimizer: the only one of `emb`. device: where the copies lie, so that hot batches are looked up and updated there,
    their pooled rows included; None: in DRAM, beside the tables. Raises as `Copies`.
    """

    def __init__(
        self,
        emb: EmbeddingCollection,
        optimizer: SparseOptimizer,
        hot: HotSet,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self.emb, self.hot = emb, hot
        rows, where = [hot.rows[table.name] for table in emb.tables], None if device is None else torch.device(device)
        self.tables = emb.placement
        self.copies = Copies(emb.placement, optimizer.attached_to(emb), rows, device=where)
        self.seconds = 0.0
        """Spent copying rows to and fro."""
        self.num_copied = 0
        """How many times all hot rows were copied, either way."""

    @property
    def live(self) -> bool:
        """Whether the copies are, and not the tables' rows."""
        return self.emb.placement is self.copies

    def fetch(self) -> None:
        """From now on the copies are live: of every hot row, with its states, as the tables have them."""
        if self.live:
            return
        self._check_no_step_under_way()
        with self._timed():
            self.copies.load()
        self.emb.placement = self.copies

    def give_back(self) -> None:
        """From now on the tables are live, as the copies were."""
        with self.flushed():
            pass
        self.emb.placement = self.tables

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Inside, the tables are live and whole, to be read and not changed: for evaluations and checkpoints."""
        self._check_no_step_under_way()
        live = self.live
        self.emb.placement = self.tables
        try:  # where they cannot be written back they stay live, and the tables out of date
            if live and self.copies.changed:
                with self._timed():
                    self.copies.save()
            yield
        finally:
            if live:
                self.emb.placement = self.copies

    def _check_no_step_under_way(self) -> None:
        if self.emb.pending:
            raise RuntimeError("gradients of hot rows await the optimizer: call step() or zero_grad() first")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self.copies.wait()  # for steps that were asked for: their seconds are not the copies'
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.num_copied += 1
