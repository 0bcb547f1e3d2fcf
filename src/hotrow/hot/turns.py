"""The phases of a hot schedule in a run: which batches come next, and where the hot rows live meanwhile.

`Turns` puts together order.py (when hot, when cold) and calibrate.py (what is hot) for the trainer, which trains one
phase (a `Turn`) after another; `HotCopies` says which side is live, and placement/copies.py copies. Without a hot
schedule there is one class of batches, and an epoch is one phase.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hotrow.base.files import parse_bytes
from hotrow.base.records import Amount
from hotrow.batch import Batch
from hotrow.config.schema import HotConfig
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.hot.calibrate import Calibration, FoundHot, calibrate, find_hot
from hotrow.hot.hot_set import HotSet, check_budget
from hotrow.hot.order import Turn, batch_order
from hotrow.optim import SparseOptimizer
from hotrow.parallel.sharded import Sharded
from hotrow.placement.copies import Copies, room_bytes

STEP_BYTES = 4 << 20
"""Bytes of hot rows that are assumed to cross beside a step: a swap begins as many batches early as there are such."""


def check_hot(
    config: HotConfig, dataset: PackedDataset, record_bytes: Mapping[str, int], *, device: torch.device | None = None
) -> None:
    """Raises ValueError for options that no data can satisfy: a budget that is too small or that exceeds the memory of
    the device for copies, and "fae" without validation rows."""
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


def choose_rows(
    config: HotConfig, dataset: PackedDataset, record_bytes: Mapping[str, int], *, seed: int
) -> Calibration | None:
    """Returns the hot rows of a run; None without a schedule. record_bytes: by table, bytes of a row with its optimizer
    state. seed: for the sampled and covering ways to find hot rows. Raises ValueError if no hot set fits."""
    if config.schedule == "none":
        return None
    return calibrate(
        dataset,
        config.rows,
        parse_bytes(config.budget),
        record_bytes=record_bytes,
        small_table_bytes=parse_bytes(config.small_table),
        seed=seed,
    )


def _check_room(config: HotConfig, needed: int, device: torch.device) -> None:
    """Raises ValueError, with the cure, if there is no room for copies of this size."""
    if needed <= (free := room_bytes(device)):
        return
    raise ValueError(
        f"hot.budget is {config.budget}: copies of hot rows take {needed:,} bytes, and of the memory of {device} "
        f"{free:,} are free; lower hot.budget, and leave room there for dense layers"
    )


class HotCopies:
    """Copies of the rows `hot` of the tables of `emb`, with the states of `optimizer`. One side is live at a time:

        cold phase  lookups and updates work on the tables, which are live at first
        fetch       tables --copy--> copies
        hot phase   lookups and updates work on the copies; the tables' hot rows are out of date
        give_back   copies --copy--> tables

    Only rows that have changed are copied; of tables in tiers all that have copies go to the device. optimizer: the
    only one of `emb`. device: where the copies lie, so that hot batches are looked up and updated there, their pooled
    rows included. Raises as `Copies`.
    """

    def __init__(
        self, emb: EmbeddingCollection, optimizer: SparseOptimizer, hot: HotSet, *, device: torch.device | str
    ) -> None:
        self.emb, self.hot = emb, hot
        rows = [hot.rows[table.name] for table in emb.tables]
        self.tables = emb.placement
        self.copies = Copies(emb.placement, optimizer.attached_to(emb), rows, device=torch.device(device))
        note = weakref.WeakMethod(self._note)  # the optimizer lives on when the copies are gone
        hook = optimizer.register_step_pre_hook(lambda *step: None if (own := note()) is None else own(*step))
        weakref.finalize(self, hook.remove)
        self.seconds = 0.0
        """Seconds spent copying rows, either way."""
        self.num_copied = 0
        """How many times hot rows were copied, either way."""

    @property
    def live(self) -> bool:
        """Whether the copies are live, and not the tables' rows."""
        return self.emb.placement is self.copies

    def _note(self, optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Before a step: notes which rows of the tables it changes."""
        if self.live:
            return  # the copies see what changes in them
        if len(arguments) > 1 or options:  # a closure, whose batches are yet to come
            self.copies.note_all()
        self.copies.note(self.emb.pending)

    def fetch(self) -> None:
        """Copies the hot rows that have changed in the tables, with their states, and makes the copies live."""
        if self.live:
            return
        self._check_no_step_under_way()
        with self._timed():
            self.copies.load()
        self.emb.placement = self.copies

    def give_back(self) -> None:
        """Copies back the hot rows that have changed, and makes the tables live."""
        with self.flushed():
            pass
        self.emb.placement = self.tables

    def begin(self) -> None:
        """Begins the next `fetch` or `give_back`, of rows in DRAM, in the background, beside any steps of this side."""
        self.copies.begin(to_copies=not self.live)

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Makes the tables live and whole inside the block, to be read and not changed, as evaluation does."""
        self._check_no_step_under_way()
        live = self.live
        self.emb.placement = self.tables
        try:  # if they cannot be written back, the copies stay live and the tables out of date
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
        self.copies.wait()  # for steps under way, whose seconds are not those of copying
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.num_copied += 1


class HotReplicas:
    """The hot rows of tables over several ranks: every rank holds them among the first rows of its tables. As those of
    `HotCopies` they are live in hot phases, when ranks ask each other for no rows. merge_every: see `Sharded`; before
    rows are read, and before a cold phase, all ranks have the same rows."""

    def __init__(self, tables: Sharded, *, merge_every: int) -> None:
        self.tables = tables
        tables.merge_every = merge_every

    @property
    def live(self) -> bool:
        return self.tables.all_held

    def fetch(self) -> None:
        self.tables.all_held = True

    def give_back(self) -> None:
        self.tables.merge()
        self.tables.all_held = False

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Makes whole tables readable inside the block, rows that other ranks hold included."""
        live = self.live
        self.give_back()
        try:
            yield
        finally:
            self.tables.all_held = live


@dataclass(frozen=True)
class TurnsState:
    """The position in the phases of a run, as its checkpoints have it."""

    order: Turn
    sync_s: Amount
    """Seconds spent copying hot rows."""


class Turns:
    """The batches of the training split, phase by phase. hot: the rows that `choose_rows` returned. part,
    micro_batches: see `Loader`."""

    def __init__(
        self,
        config: HotConfig,
        dataset: PackedDataset,
        hot: Calibration | None,
        *,
        batch_size: int,
        shuffle_seed: int | None,
        part: Callable[[int], tuple[int, int]] | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.found: FoundHot | None = None if hot is None else find_hot(dataset, hot)
        self.config = config
        self.order = batch_order(
            config,
            dataset.split("train"),
            None if self.found is None else self.found.is_hot,
            batch_size=batch_size,
            shuffle_seed=shuffle_seed,
            part=part,
            micro_batches=micro_batches,
        )
        self.copies: HotCopies | HotReplicas | None = None
        self.device: torch.device | None = None
        """The device of the copies of hot rows; None if there are none."""
        self._seconds_before = 0.0

    def attach(
        self, emb: EmbeddingCollection, optimizer: SparseOptimizer, *, device: torch.device | None = None
    ) -> None:
        """Trains these tables, with copies of their hot rows on `device`, or with the hot rows that every one of
        several ranks holds. Raises ValueError if the device's memory does not hold the copies."""
        self.device = device
        if self.found is None or not self.config.takes_turns:
            return
        if device is not None:
            _check_room(self.config, self.found.rows.num_bytes, device)
            self.copies = HotCopies(emb, optimizer, self.found.rows, device=device)
        elif (shared := emb.placement.find(Sharded)) and not self.found.rows.num_beyond(shared.prefixes):
            self.copies = HotReplicas(shared, merge_every=self.config.merge_every)

    @property
    def nothing_hot(self) -> str:
        """Why the schedule has nothing to do, and the cure; empty if it has something to do, or cannot know yet."""
        if self.found is None or ("hot" in self.order.loaders if self.config.takes_turns else self.found.is_hot.any()):
            return ""
        return (
            f"hot.budget is {self.config.budget}: {int(self.found.is_hot.sum()):,} of {len(self.found.is_hot):,} "
            f"training samples have all their rows among the {self.found.rows.num_rows:,} hot ones, and fill no "
            f"batch; hot.schedule {self.config.schedule} does nothing: raise hot.budget, or try covering for hot.rows"
        )

    @property
    def on_copies(self) -> bool:
        """Whether batches are looked up in copies beside the tables, for which no row has to be brought."""
        return isinstance(self.copies, HotCopies) and self.copies.live

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Brings the hot rows to the side of this phase and returns the rest of its batches."""
        if self.copies is not None:
            self.copies.fetch() if self.order.turn.name == "hot" else self.copies.give_back()
        return self.order.batches(epoch)

    def count(self) -> None:
        """Counts a batch that was trained. Near the end of a phase its swap begins; again with half as many left."""
        self.order.count()
        copies, left = self.copies, self.order.turn.stop - self.order.turn.taken[self.order.turn.name]
        if isinstance(copies, HotCopies) and left.bit_count() == 1 and left <= 1 + copies.hot.num_bytes // STEP_BYTES:
            copies.begin()

    def end(self, loss_figure: str, evaluate: Callable[[], float]) -> dict[str, Any] | None:
        """Goes to the next phase. Returns the decision if the phase is of another class. evaluate: returns the loss on
        validation rows, which the decision holds under the name `loss_figure`."""
        order, turn = self.order, self.order.turn
        if order.next_name == turn.name:
            order.end_turn()
            return None
        loss = evaluate() if self.config.schedule == "fae" else None
        order.end_turn(loss)
        rates = {"rate": turn.rate.percent, "next_rate": order.turn.rate.percent}
        return {"turn": turn.name, loss_figure: loss, **rates}

    def whole(self) -> AbstractContextManager[None]:
        """Returns a context in which the tables are whole and may be read, but not changed."""
        return nullcontext() if self.copies is None else self.copies.flushed()

    def close(self) -> None:
        """Makes the tables live, because this session has no more phases."""
        if self.copies is not None:
            self.copies.give_back()

    def state(self) -> TurnsState:
        """Returns the position, and the seconds of copying over all sessions, for `restore`."""
        return TurnsState(self.order.state(), self.sync_s)

    def restore(self, state: TurnsState) -> None:
        """Continues from a position. Raises ValueError if it belongs to other data."""
        self.order.restore(state.order)
        self._seconds_before = state.sync_s

    @property
    def sync_s(self) -> float:
        return round(self._seconds_before + (self.copies.seconds if isinstance(self.copies, HotCopies) else 0.0), 6)

    def figures(self) -> dict[str, Any]:
        """Returns what run.json has about the schedule; docs/hot.md explains each figure."""
        if self.found is None:
            return {}
        figures = {"schedule": self.config.schedule, **self.found.to_json()}
        if self.config.takes_turns:
            figures["rate"] = self.order.turn.rate.percent
        if isinstance(self.copies, HotCopies):
            figures["sync_s"] = self.sync_s
        if isinstance(self.copies, HotReplicas):
            figures["merge_every"] = self.config.merge_every
        return figures

    def line(self) -> str:
        """Returns the schedule's part of the progress line."""
        turn = self.order.turn
        return f"  {turn.name} R({turn.rate.percent:g})" if self.config.takes_turns else ""
