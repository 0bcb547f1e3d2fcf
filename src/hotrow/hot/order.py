"""When hot, when cold: the order of an epoch's batches, and how it follows the loss.

    none     batches as the loader shuffles them
    window   of every `window` batches as many as their hot samples fill come first, hot alone; nothing moves further
    fixed    cold batches, then hot ones, `rate` percent of each class at a time
    fae      so too, and after each swap the rate follows the validation loss (the shuffle scheduler of FAE, Adnan et
             al., VLDB'22): halved where it did not fall, doubled where it fell FALLS times running, within 1 .. 100

A `BatchOrder` is a few classes of batches, each with its own loader, taken in turn. `none` and `window` have one class,
whose turn is the epoch. `fixed` and `fae` may keep some samples of both classes for a last turn in shuffled order, so
that an epoch does not end on one class. Every sample comes once per epoch, whatever the rate does meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
"""Swaps in a row after which the loss had fallen, before the rate is doubled."""
MIXED = "mixed"
"""The class whose turn comes when the others have no batches left."""
LOWEST, HIGHEST = 1.0, 100.0
"""Percent of a class at a time."""


@dataclass(frozen=True)
class Rate:
    """How much of a class is trained at a time, and what the losses said of it."""

    percent: Annotated[float, Field(ge=LOWEST, le=HIGHEST)]
    loss: Amount | None = None
    """After the last swap."""
    falls: Annotated[int, Field(ge=0, lt=FALLS)] = 0
    """Swaps running by which the loss fell; counted anew where the rate is doubled."""

    def after(self, loss: float) -> Rate:
        """The rate once the loss after a swap is known. A loss that stays has not fallen; nor has one that is NaN."""
        if self.loss is None:
            return replace(self, loss=loss)
        if not loss < self.loss:
            return Rate(max(LOWEST, self.percent / 2), loss)
        if self.falls + 1 == FALLS:
            return Rate(min(HIGHEST, self.percent * 2), loss)
        return Rate(self.percent, loss, self.falls + 1)


@dataclass
class Turn:
    """Where the order stands; with the epoch's number, all that a checkpoint must bring back."""

    name: str
    """The class whose turn it is."""
    taken: dict[str, Count]
    """Batches of each class already taken in this epoch."""
    stop: Count
    """Of its class, the batch at which the turn ends."""
    rate: Rate


@dataclass
class _Reading:
    """A class' batches being read, from one turn to the next: a window of rows is gathered once."""

    epoch: int
    batch: int
    """The next one."""
    batches: Iterator[Batch]


class BatchOrder:
    """Classes of batches taken in turn, `rate` percent of a class at a time; the first class begins, MIXED ends.

    loaders: by class; one without rows has no turns. rate: percent, from LOWEST to HIGHEST.
    """

    def __init__(self, loaders: Mapping[str, Loader], *, rate: float = HIGHEST) -> None:
        self.loaders = {name: loader for name, loader in loaders.items() if loader.num_batches}
        self.num_batches = sum(loader.num_batches for loader in self.loaders.values())
        """Per epoch."""
        self._reading: dict[str, _Reading] = {}
        self.turn = Turn("", {}, 0, Rate(rate))
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.turn = replace(self.turn, taken=dict.fromkeys(self.loaders, 0))
        self._begin_turn(next(iter(self.loaders), ""))

    def _begin_turn(self, name: str) -> None:
        """A turn of the class `name`: where no other has batches left, all of its own."""
        total, taken = self._total(name), self.turn.taken.get(name, 0)
        share = math.ceil(total * self.turn.rate.percent / 100 - 1e-9)  # 0.29 * 100 is above 29
        alone = not any(self._has_more(other) for other in self.loaders if other not in (name, MIXED))
        self.turn = replace(self.turn, name=name, stop=total if alone else min(total, taken + share))

    def _total(self, name: str) -> int:
        return self.loaders[name].num_batches if name else 0

    def _has_more(self, name: str) -> bool:
        return self.turn.taken[name] < self._total(name)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The rest of the turn; `count` says which of them were trained."""
        name = self.turn.name
        first = self.turn.taken[name]
        reading = self._reading.get(name)
        if reading is None or (reading.epoch, reading.batch) != (epoch, first):
            reading = self._reading[name] = _Reading(epoch, first, self.loaders[name].epoch(epoch, first))
        for batch in islice(reading.batches, self.turn.stop - first):
            reading.batch += 1
            yield batch

    def count(self) -> None:
        """A batch of the turn was trained."""
        self.turn.taken[self.turn.name] += 1

    @property
    def next_name(self) -> str:
        """The class whose turn comes after this one; of the next epoch's first where this one ends its epoch."""
        names = [*self.loaders]
        at = names.index(self.turn.name)
        left = [name for name in names[at + 1 :] + names[: at + 1] if self._has_more(name)]
        return next((name for name in left if name != MIXED), left[0] if left else names[0])

    def end_turn(self, loss: float | None = None) -> None:
        """To the next turn; loss: on validation rows, for the rate to follow."""
        if loss is not None:
            self.turn = replace(self.turn, rate=self.turn.rate.after(loss))
        if any(self._has_more(name) for name in self.loaders):
            self._begin_turn(self.next_name)
        else:
            self._begin_epoch()

    def state(self) -> Turn:
        """Where it stands; `restore` takes it up."""
        return replace(self.turn, taken=dict(self.turn.taken))

    def restore(self, turn: Turn) -> None:
        """Go on from there. Raises ValueError where it is of other classes, or of more batches than there are."""
        most = {name: loader.num_batches for name, loader in self.loaders.items()}
        fits = turn.taken.keys() == most.keys() and all(turn.taken[name] <= most[name] for name in most)
        if not fits or (most and not turn.taken.get(turn.name, math.inf) <= turn.stop <= most[turn.name]):
            raise ValueError(
                f"the order stands at {turn.taken} batches, in a turn of {turn.name} up to {turn.stop}, but an epoch "
                f"has {most}: it is of other data, another batch size or another hot set"
            )
        self.turn = replace(turn, taken=dict(turn.taken))


def batch_order(
    config: HotConfig,
    split: Split,
    is_hot: NDArray[np.bool_] | None,
    *,
    batch_size: int,
    shuffle_seed: int | None,
    mixed: NDArray[np.bool_] | None = None,
) -> BatchOrder:
    """The order `config.schedule` asks for. is_hot: bool [rows of the split]; None if `config.schedule` is none.

    mixed: bool [rows of the split], samples kept for the end of the epoch where batches come in turns.
    """
    if is_hot is None:
        return BatchOrder({"all": Loader(split, batch_size, shuffle_seed=shuffle_seed)})
    if config.schedule == "window":
        loader = Loader(split, batch_size, shuffle_seed=shuffle_seed, front=is_hot, front_batches=config.window)
        return BatchOrder({"all": loader})
    classes = {"cold": ~is_hot, "hot": is_hot}  # cold first: it touches more rows
    if mixed is not None:
        classes = {**{name: own & ~mixed for name, own in classes.items()}, MIXED: mixed}
    loaders = {
        name: Loader(split, batch_size, shuffle_seed=shuffle_seed, only=only, window_rows=_window_rows(only))
        for name, only in classes.items()
    }
    return BatchOrder(loaders, rate=config.rate)


def _window_rows(only: NDArray[np.bool_]) -> int:
    """A class' part of WINDOW_ROWS: its rows of a stretch as long as a window of all samples.

    So classes, whose windows are held at once, hold no more together, and rows are mixed over the same distance.
    """
    return max(1, -(-WINDOW_ROWS * int(only.sum()) // max(1, len(only))))


def mixed_samples(num_samples: int, share: float, *, batch_size: int, seed: int) -> NDArray[np.bool_] | None:
    """bool [num_samples]: those kept for the end of an epoch, drawn by `seed`, whole batches of them; None for none."""
    count = int(num_samples * share) // batch_size * batch_size
    if not count:
        return None
    kept = np.zeros(num_samples, np.bool_)
    kept[np.random.default_rng(seed).permutation(num_samples)[:count]] = True
    return kept
