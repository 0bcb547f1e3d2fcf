"""What a test does in the middle of a run: before a step of it, by the step's number from 0."""

from collections.abc import Callable
from typing import Any

import pytest

from hotrow.run import trainer


def at_step(patch: pytest.MonkeyPatch, number: int | None, act: Callable[[Any], object]) -> None:
    """Calls `act` with what a step works on before step `number`; if None, before each."""
    plain = trainer.train_step

    def step(parts: Any, batch: Any, own: int, clock: Any) -> Any:
        if number is None or own == number:
            act(parts)
        return plain(parts, batch, own, clock)

    patch.setattr(trainer, "train_step", step)


def raise_at(patch: pytest.MonkeyPatch, number: int | None, error: BaseException | type[BaseException]) -> None:
    """Raises `error` before step `number`; if None, before the first one that a session takes."""

    def act(_: Any) -> None:
        raise error

    at_step(patch, number, act)
