"""The order of an epoch's batches: when hot ones come, when cold ones, and how that follows the loss.

    none     batches in the loader's shuffled order
    window   within every `window` batches, hot samples fill the first batches; no sample leaves its window
    fixed    phases of cold batches and of hot batches in alternation, each `rate` percent of its class
    fae      as `fixed`, but after each phase the rate follows the validation loss (the shuffle scheduler of FAE, Adnan
             et al., VLDB'22): halved if the loss did not fall, doubled after FALLS falls in a row, from 1 to 100

A `BatchOrder` has a few classes of batches, each with its own loader, and alternates between them. One stretch of
batches of one class is a phase of the schedule, called `Turn` in the code. `none` and `window` have one class, and an
epoch is one phase. Every sample comes once per epoch, even if the rate changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hotrow.base.records import Amount, Count
from hotrow.batch import Batch
from hotrow.config.schema import HotConfig
from hotrow.data.packed.loader import WINDOW_ROWS, Loader
from hotrow.data.packed.reader import Split

FALLS = 4
"""The rate is doubled after the loss has fallen this many times in a row."""
LOWEST, HIGHEST = 1.0, 100.0
"""Bounds of the rate, in percent."""


@dataclass(frozen=True)
class Rate:
    """How much of a class is trained in one phase, and the losses that led to it."""

    percent: Annotated[float, Field(ge=LOWEST, le=HIGHEST)]
    loss: Amount | None = None
    """Validation loss after the last phase."""
    falls: Annotated[int, Field(ge=0, lt=FALLS)] = 0
    """How many times in a row the loss has fallen; 0 again when the rate is doubled."""

    def after(self, loss: float) -> Rate:
        """Returns the rate after a phase that ended with this loss. An equal loss, or NaN, has not fallen."""
        if self.loss is None:
            return replace(self, loss=loss)
        if not loss < self.loss:
            return Rate(max(LOWEST, self.percent / 2), loss)
        if self.falls + 1 == FALLS:
            return Rate(min(HIGHEST, self.percent * 2), loss)
        return Rate(self.percent, loss, self.falls + 1)


@dataclass
class Turn:
    """The position in an order. Together with the epoch's number, it is all that a checkpoint needs."""

    name: str
    """The class that is being trained."""
    taken: dict[str, Count]
    """Batches of each class already trained in this epoch."""
    stop: Count
    """The number of batches of its class after which the phase ends."""
    rate: Rate


@dataclass
class _Reading:
    """The iterator over a class' batches, kept from phase to phase so that no window of rows is gathered twice."""

    epoch: int
    batch: int
    """The number of the next batch."""
    batches: Iterator[Batch]


class BatchOrder:
    """Alternates between classes of batches, `rate` percent of a class at a time; the first begins. loaders: by class;
    a class without rows is left out. rate: percent, from LOWEST to HIGHEST."""

    def __init__(self, loaders: Mapping[str, Loader], *, rate: float = HIGHEST) -> None:
        self.loaders = {name: loader for name, loader in loaders.items() if loader.num_batches}
        self.num_batches = sum(loader.num_batches for loader in self.loaders.values())
        """Batches per epoch."""
        self._reading: dict[str, _Reading] = {}
        self.turn = Turn("", {}, 0, Rate(rate))
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.turn = replace(self.turn, taken=dict.fromkeys(self.loaders, 0))
        self._begin_turn(next(iter(self.loaders), ""))

    def _begin_turn(self, name: str) -> None:
        """Begins a phase of the class `name`; if no other class has batches left, it takes all the rest."""
        total, taken = self._total(name), self.turn.taken.get(name, 0)
        share = math.ceil(total * self.turn.rate.percent / 100 - 1e-9)  # 0.29 * 100 is above 29
        alone = not any(self._has_more(other) for other in self.loaders if other != name)
        self.turn = replace(self.turn, name=name, stop=total if alone else min(total, taken + share))

    def _total(self, name: str) -> int:
        return self.loaders[name].num_batches if name else 0

    def _has_more(self, name: str) -> bool:
        return self.turn.taken[name] < self._total(name)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yields the rest of the phase. The caller calls `count` for each batch that was trained."""
        name = self.turn.name
        first = self.turn.taken[name]
        reading = self._reading.get(name)
        if reading is None or (reading.epoch, reading.batch) != (epoch, first):
            reading = self._reading[name] = _Reading(epoch, first, self.loaders[name].epoch(epoch, first))
        for batch in islice(reading.batches, self.turn.stop - first):
            reading.batch += 1
            yield batch

    def count(self) -> None:
        self.turn.taken[self.turn.name] += 1

    @property
    def next_name(self) -> str:
        """The class of the next phase, which may belong to the next epoch."""
        names = [*self.loaders]
        at = names.index(self.turn.name)
        return next((name for name in names[at + 1 :] + names[: at + 1] if self._has_more(name)), names[0])

    def end_turn(self, loss: float | None = None) -> None:
        """Goes to the next phase. loss: on validation rows, for the rate to follow."""
        if loss is not None:
            self.turn = replace(self.turn, rate=self.turn.rate.after(loss))
        if any(self._has_more(name) for name in self.loaders):
            self._begin_turn(self.next_name)
        else:
            self._begin_epoch()

    def begin(self, name: str) -> None:
        """Begins a phase that takes all the rest of a class, from its first batch again if none is left."""
        left = self.turn.taken if self._has_more(name) else {**self.turn.taken, name: 0}
        self.turn = replace(self.turn, name=name, taken=left, stop=self._total(name))

    def state(self) -> Turn:
        return replace(self.turn, taken=dict(self.turn.taken))

    def restore(self, turn: Turn) -> None:
        """Continues from a position. Raises ValueError if it has other classes, or more batches than there are."""
        most = {name: loader.num_batches for name, loader in self.loaders.items()}
        fits = turn.taken.keys() == most.keys() and all(turn.taken[name] <= most[name] for name in most)
        if not fits or (most and not turn.taken.get(turn.name, math.inf) <= turn.stop <= most[turn.name]):
            raise ValueError(
                f"the saved order stands at {turn.taken} batches, in a phase of {turn.name} batches up to {turn.stop}, "
                f"but an epoch has {most}: it is of other data, another batch size or another hot set"
            )
        self.turn = replace(turn, taken=dict(turn.taken))


def batch_order(
    config: HotConfig,
    split: Split,
    is_hot: NDArray[np.bool_] | None,
    *,
    batch_size: int,
    shuffle_seed: int | None,
    part: Callable[[int], tuple[int, int]] | None = None,
    micro_batches: int = 1,
) -> BatchOrder:
    """Makes the order that `config.schedule` asks for. is_hot: bool [rows of the split]; None if the schedule is none.
    part, micro_batches: see `Loader`; a schedule of hot batches has one stream for each class."""
    if is_hot is None:
        loader = Loader(split, batch_size, shuffle_seed=shuffle_seed, part=part, micro_batches=micro_batches)
        return BatchOrder({"all": loader})
    if config.schedule == "window":
        loader = Loader(
            split, batch_size, shuffle_seed=shuffle_seed, front=is_hot, front_batches=config.window, part=part
        )
        return BatchOrder({"all": loader})
    classes = {"cold": ~is_hot, "hot": is_hot}  # cold first: it touches more rows
    loaders = {
        name: Loader(split, batch_size, shuffle_seed=shuffle_seed, only=only, window_rows=_window_rows(only), part=part)
        for name, only in classes.items()
    }
    return BatchOrder(loaders, rate=config.rate)


def _window_rows(only: NDArray[np.bool_]) -> int:
    """Returns a class' part of WINDOW_ROWS: how many rows of it lie in a window of all samples. All classes' windows
    are in memory at once. With these sizes they take no more than one window of all samples, and rows are mixed over
    the same distance."""
    return max(1, -(-WINDOW_ROWS * int(only.sum()) // max(1, len(only))))
