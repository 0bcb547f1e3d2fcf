"""The turns of a run: which batches come next, on which side the hot rows live meanwhile, and what that cost.

`Turns` puts order.py (when hot, when cold), find.py and learner.py (what is hot), copies.py and link.py together for
the trainer, which trains turn after turn. Without a hot schedule there is one class of batches, and a turn is an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hotrow.base.files import parse_bytes
from hotrow.base.records import Amount
from hotrow.batch import Batch
from hotrow.config.schema import HotConfig
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.hot.calibrate import calibrate
from hotrow.hot.copies import HotCopies
from hotrow.hot.find import FoundHot, find_hot
from hotrow.hot.hot_set import check_budget
from hotrow.hot.learner import Learner, whole_batches
from hotrow.hot.link import Link
from hotrow.hot.order import BatchOrder, Turn, batch_order, mixed_samples
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


def _check_room(config: HotConfig, needed: int, device: torch.device | None) -> None:
    """Raises ValueError where copies of so many bytes find no room, with the cure."""
    if needed <= (free := room_bytes(device)):
        return
    if device is None:
        where, cure = f"there are {free:,}", "or set hot.link to null for a schedule without copies"
    else:
        where, cure = f"of the memory of {device} {free:,} are free", "and leave room there for dense layers"
    raise ValueError(
        f"hot.budget is {config.budget}: copies of hot rows take {needed:,} bytes, and {where}; lower hot.budget, "
        f"{cure}"
    )


@dataclass(frozen=True)
class TurnsState:
    """Where the turns of a run stand, as its checkpoints have it."""

    order: Turn
    classes: bool
    """Whether it was known what is hot."""
    link: Link | None
    """What crossed it so far; None where there are no copies of hot rows."""
    sync_s: Amount


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
        self.config, self.dataset = config, dataset
        self._batch_size, self._shuffle_seed = batch_size, shuffle_seed
        check_hot(config, dataset, record_bytes)
        self.found: FoundHot | None = None
        self.learner: Learner | None = None
        sizes: dict[str, Any] = {"small_table_bytes": parse_bytes(config.small_table), "seed": seed}
        budget = parse_bytes(config.budget)
        if config.schedule != "none" and config.rows == "tracked":
            self.learner = Learner(dataset, record_bytes, budget, **sizes)
        elif config.schedule != "none":
            calibration = calibrate(
                dataset, config.rows, budget, record_bytes=record_bytes, confidence=config.confidence, **sizes
            )
            self.found = find_hot(dataset, calibration)
        share = config.shuffled_end if config.takes_turns else 0.0
        num_samples = dataset.split("train").num_rows
        self._mixed = mixed_samples(num_samples, share, batch_size=batch_size, seed=seed)
        if share and self._mixed is None:
            raise ValueError(
                f"hot.shuffled_end is {share:g}: of {num_samples:,} training samples that is less than one batch of "
                f"{batch_size}; raise it, lower train.batch_size, or set it to 0"
            )
        self.order = self._make_order()
        self.link = Link()
        self.copies: HotCopies | None = None
        self.device: torch.device | None = None
        """Where copies of hot rows lie; None: in DRAM, where the config has a link, and else there are none."""
        self._live: tuple[EmbeddingCollection, SparseOptimizer] | None = None
        self._sequences, self._width = False, 0
        """Columns that the model takes: for an id of sequences, for a sample of pooled rows."""
        self._seconds_before = 0.0

    def _make_order(self) -> BatchOrder:
        is_hot = None if self.found is None else self.found.is_hot
        if is_hot is not None and self.learner is not None:
            is_hot = whole_batches(is_hot if self._mixed is None else is_hot & ~self._mixed, self._batch_size)
        return batch_order(
            self.config,
            self.dataset.split("train"),
            is_hot,
            batch_size=self._batch_size,
            shuffle_seed=self._shuffle_seed,
            mixed=self._mixed,
        )

    def attach(
        self,
        emb: EmbeddingCollection,
        optimizer: SparseOptimizer,
        *,
        sequences: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """These tables are trained: with copies of their hot rows where there is a device for them, or a link.

        sequences: whether the model takes a row for each id, not pooled.

        Raises ValueError where its memory does not hold the copies.
        """
        self._live, self._sequences, self.device = (emb, optimizer), sequences, device
        self._width = emb.tables[0].embedding_dim if sequences else emb.output_dim
        self._make_copies()

    def _make_copies(self) -> None:
        if self._live is None or self.found is None or not self._has_copies:
            return
        _check_room(self.config, self.found.rows.num_bytes, self.device)
        self.copies = HotCopies(*self._live, self.found.rows, self.link, device=self.device)

    @property
    def _has_copies(self) -> bool:
        return self.config.takes_turns and (self.device is not None or self.config.link is not None)

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

    def learn(self) -> dict[str, Any] | None:
        """Where an epoch has just ended and hot rows are learned: what is hot from here on."""
        if self.learner is None or not self.order.begins_epoch:
            return None
        self._go_by(self.learner.learn())
        assert self.found is not None
        names = ("budget_bytes", "hot_bytes", "hot_rows", "hot_samples")
        return {name: value for name, value in self.found.to_json().items() if name in names}

    def _go_by(self, found: FoundHot) -> None:
        """Batches and copies of these hot rows, from the epoch's beginning; the rate stays."""
        if self.copies is not None:
            self.copies.give_back()
            self._seconds_before += self.copies.seconds
            self.copies = None
        reached = None if self.found is None else self.order.turn.rate
        self.found = found
        self.order = self._make_order()
        if reached is not None:
            self.order.begin_at(reached)
        self._make_copies()

    @property
    def on_copies(self) -> bool:
        """Whether the copies of hot rows are live."""
        return self.copies is not None and self.copies.live

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The rest of the turn; hot rows are brought to its side first."""
        if self.copies is not None:
            self.copies.fetch() if self.order.turn.name == "hot" else self.copies.give_back()
        return self.order.batches(epoch)

    def count(self, batch: Batch) -> None:
        """A batch of the turn was trained."""
        self.order.count()
        if self.learner is not None:
            self.learner.observe(batch)
        uploads = 1 if self.copies is None else self.copies.uploads
        row_bytes = 4 * self._width * (len(batch.sparse.values) if self._sequences else len(batch))
        self.link.count(batch, row_bytes=row_bytes, hot=self.on_copies, uploads=uploads)

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

    def parts(self) -> dict[str, Learner]:
        """What a checkpoint holds beside `state`, by the names of the files."""
        return {} if self.learner is None else {"hot": self.learner}

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the tables are whole, to be read and not changed."""
        return nullcontext() if self.copies is None else self.copies.flushed()

    def close(self) -> None:
        """No more turns in this session: the tables are live."""
        if self.copies is not None:
            self.copies.give_back()

    def state(self) -> TurnsState:
        """Where the turns stand, and what they cost over all sessions; `restore` takes it up."""
        link = replace(self.link) if self._has_copies else None
        return TurnsState(self.order.state(), self.found is not None, link, self.sync_s if self._has_copies else 0.0)

    def restore(self, state: TurnsState) -> None:
        """Go on from there. Raises ValueError where it is of other data."""
        if self.learner is not None and state.classes:
            self._go_by(self.learner.found())
        self.order.restore(state.order)
        if state.link is not None:
            vars(self.link).update(asdict(state.link))
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
            rate = None if self.config.link is None else parse_bytes(self.config.link)
            figures |= {"sync_s": self.sync_s, "link": self.link.to_json(bytes_per_s=rate)}
        return figures

    def line(self) -> str:
        """For the progress line."""
        turn = self.order.turn
        if self.learner is not None and self.found is None:
            return "  learning"
        return f"  {turn.name} R({turn.rate.percent:g})" if self.config.takes_turns else ""
