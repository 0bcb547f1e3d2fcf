"""The phases of a hot schedule in a run: which batches come next, and where the hot rows live meanwhile.

`Turns` puts together order.py (when hot, when cold), calibrate.py (what is hot) and copies.py for the trainer, which
trains one phase (a `Turn`) after another. Without a hot schedule there is one class of batches, and an epoch is one
phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hotrow.base.files import parse_bytes
from hotrow.base.records import Amount
from hotrow.batch import Batch
from hotrow.config.schema import HotConfig
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.hot.calibrate import FoundHot, calibrate, find_hot
from hotrow.hot.copies import HotCopies
from hotrow.hot.hot_set import check_budget
from hotrow.hot.order import Turn, batch_order, mixed_samples
from hotrow.optim import SparseOptimizer
from hotrow.placement.copies import room_bytes


def check_hot(
    config: HotConfig, dataset: PackedDataset, record_bytes: Mapping[str, int], *, device: torch.device | None = None
) -> None:
    """Raises ValueError for what cannot be whatever is hot: a budget below the least, or of more than is free on the
    device for copies, and "fae" without validation rows.
    """
    if config.schedule == "none":
        return
    if config.schedule == "fae" and not ("val" in dataset.splits and dataset.split("val").num_rows):
        raise ValueError(
            f"hot.schedule is fae, whose rate follows the validation loss, but {dataset.path} has no rows in a "
            "split 'val'; prepare the data with one, or set hot.schedule to fixed"
        )
    tables = [(table.num_embeddings, record_bytes[table.name]) for table in dataset.info.tables]
    try:
        check_budget(tables, parse_bytes(config.budget), parse_bytes(config.small_table))
    except ValueError as error:
        raise ValueError(f"hot.budget is {config.budget}: {error}, or lower hot.small_table") from None
    if device is not None:
        _check_room(config, min(parse_bytes(config.budget), sum(n * size for n, size in tables)), device)


def _check_room(config: HotConfig, needed: int, device: torch.device) -> None:
    """Raises ValueError where copies of so many bytes find no room, with the cure."""
    if needed <= (free := room_bytes(device)):
        return
    raise ValueError(
        f"hot.budget is {config.budget}: copies of hot rows take {needed:,} bytes, and of the memory of {device} "
        f"{free:,} are free; lower hot.budget, and leave room there for dense layers"
    )


@dataclass(frozen=True)
class TurnsState:
    """Where the turns of a run stand, as its checkpoints have it."""

    order: Turn
    sync_s: Amount
    """Seconds spent copying hot rows."""


class Turns:
    """The batches of the training split, turn by turn.

    record_bytes: of a row of each table, optimizer state included. seed: of the sampled and covering ways to find hot
    rows. Raises ValueError where no hot set fits, and for "fae" without validation rows.
    """

    def __init__(
        self,
        config: HotConfig,
        dataset: PackedDataset,
        record_bytes: Mapping[str, int],
        *,
        batch_size: int,
        shuffle_seed: int | None,
        seed: int,
    ) -> None:
        self.config = config
        self.found: FoundHot | None = None
        if config.schedule != "none":
            calibration = calibrate(
                dataset,
                config.rows,
                parse_bytes(config.budget),
                record_bytes=record_bytes,
                small_table_bytes=parse_bytes(config.small_table),
                seed=seed,
            )
            self.found = find_hot(dataset, calibration)
        share = config.shuffled_end if config.takes_turns else 0.0
        num_samples = dataset.split("train").num_rows
        mixed = mixed_samples(num_samples, share, batch_size=batch_size, seed=seed)
        if share and mixed is None:
            raise ValueError(
                f"hot.shuffled_end is {share:g}: of {num_samples:,} training samples that is less than one batch of "
                f"{batch_size}; raise it, lower train.batch_size, or set it to 0"
            )
        self.order = batch_order(
            config,
            dataset.split("train"),
            None if self.found is None else self.found.is_hot,
            batch_size=batch_size,
            shuffle_seed=shuffle_seed,
            mixed=mixed,
        )
        self.copies: HotCopies | None = None
        self.device: torch.device | None = None
        """Where copies of hot rows lie; None: there are none."""
        self._seconds_before = 0.0

    def attach(
        self, emb: EmbeddingCollection, optimizer: SparseOptimizer, *, device: torch.device | None = None
    ) -> None:
        """Trains these tables, with copies of their hot rows if there is a device for them.

        Raises ValueError if the device's memory does not hold the copies.
        """
        self.device = device
        if self.found is not None and device is not None and self.config.takes_turns:
            _check_room(self.config, self.found.rows.num_bytes, device)
            self.copies = HotCopies(emb, optimizer, self.found.rows, device=device)

    @property
    def nothing_hot(self) -> str:
        """Why the schedule has nothing to do, and the cure; empty where it has, or does not know yet."""
        if self.found is None or ("hot" in self.order.loaders if self.config.takes_turns else self.found.is_hot.any()):
            return ""
        return (
            f"hot.budget is {self.config.budget}: {int(self.found.is_hot.sum()):,} of {len(self.found.is_hot):,} "
            f"training samples have all their rows among the {self.found.rows.num_rows:,} hot ones, and fill no "
            f"batch; hot.schedule {self.config.schedule} does nothing: raise hot.budget, or try covering for hot.rows"
        )

    @property
    def on_copies(self) -> bool:
        """Whether the copies of hot rows are live."""
        return self.copies is not None and self.copies.live

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The rest of the turn; hot rows are brought to its side first."""
        if self.copies is not None:
            self.copies.fetch() if self.order.turn.name == "hot" else self.copies.give_back()
        return self.order.batches(epoch)

    def count(self) -> None:
        """A batch of the turn was trained."""
        self.order.count()

    def end(self, logloss: Callable[[], float]) -> dict[str, Any] | None:
        """To the next turn. Where that is another class', a swap, what was decided; logloss: on validation rows."""
        order, turn = self.order, self.order.turn
        if order.next_name == turn.name:
            order.end_turn()
            return None
        loss = logloss() if self.config.schedule == "fae" else None
        order.end_turn(loss)
        rates = {"rate": turn.rate.percent, "next_rate": order.turn.rate.percent}
        return {"turn": turn.name, "logloss": loss, **rates}

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the tables are whole, to be read and not changed."""
        return nullcontext() if self.copies is None else self.copies.flushed()

    def close(self) -> None:
        """No more turns in this session: the tables are live."""
        if self.copies is not None:
            self.copies.give_back()

    def state(self) -> TurnsState:
        """Where the turns stand, and what they cost over all sessions; `restore` takes it up."""
        return TurnsState(self.order.state(), self.sync_s)

    def restore(self, state: TurnsState) -> None:
        """Go on from there. Raises ValueError where it is of other data."""
        self.order.restore(state.order)
        self._seconds_before = state.sync_s

    @property
    def sync_s(self) -> float:
        """Seconds spent copying hot rows, over all sessions."""
        return round(self._seconds_before + (0.0 if self.copies is None else self.copies.seconds), 6)

    def figures(self) -> dict[str, Any]:
        """For run.json; docs/runs.md says what each is."""
        if self.found is None:
            return {}
        figures = {"schedule": self.config.schedule, **self.found.to_json()}
        if self.config.takes_turns:
            figures["rate"] = self.order.turn.rate.percent
        if self.copies is not None:
            figures["sync_s"] = self.sync_s
        return figures

    def line(self) -> str:
        """For the progress line."""
        turn = self.order.turn
        return f"  {turn.name} R({turn.rate.percent:g})" if self.config.takes_turns else ""
