"""Runs whose hot rows have copies in DRAM, so that the laws of copies hold without a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow.hot import turns
from hotrow.hot.turns import HotCopies
from hotrow.kernels import ops
from hotrow.placement import copies
from hotrow.placement.base import Placement
from hotrow.run import trainer
from hotrow.setup import setup


class InDram:
    """Takes the place of `copies.OnDevice`: memory beside the tables, in which nothing is done later."""

    def __init__(self, below: Placement, device: torch.device) -> None:
        self.device, self.kernels = device, below.kernels

    def room(self, num_rows: int, like: Tensor) -> Tensor:
        return ops.allocate(num_rows, *like.shape[1:], dtype=like.dtype)

    def arrays(self, tensors: Sequence[Tensor], low: Sequence[Tensor | None] | None = None) -> Any:
        return ops.Arrays(tensors, low)

    def over(self, values: Tensor) -> Tensor:
        return values

    back = over

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        pass


@contextmanager
def copies_in_dram() -> Iterator[list[int]]:
    """Runs in here copy hot rows as for a GPU, but to DRAM; yields a list that grows with every step on copies."""
    made: list[HotCopies] = []
    steps: list[int] = []
    plain = trainer.train_step

    class Noted(HotCopies):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    def step(*arguments: Any) -> Any:
        if made and made[-1].live:
            steps.append(1)
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "device_of_copies", lambda config, place: torch.device("cpu"))
        patch.setattr(copies, "OnDevice", InDram)
        patch.setattr(turns, "HotCopies", Noted)
        patch.setattr(trainer, "train_step", step)
        yield steps
