"""Runs whose hot rows have copies in DRAM, so that the laws of copies hold without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hotrow.hot import turns
from hotrow.hot.turns import HotCopies
from hotrow.run import trainer
from hotrow.setup import setup


@contextmanager
def copies_in_dram() -> Iterator[list[int]]:
    """Runs in here copy hot rows as for a GPU, but to DRAM; yields a list that grows with every step on copies."""
    made: list[HotCopies] = []
    steps: list[int] = []
    plain = trainer.train_step

    class InDram(HotCopies):
        def __init__(self, *arguments: Any, device: torch.device) -> None:
            super().__init__(*arguments)
            made.append(self)

    def step(*arguments: Any) -> Any:
        if made and made[-1].live:
            steps.append(1)
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "device_of_copies", lambda config, place: torch.device("cpu"))
        patch.setattr(turns, "HotCopies", InDram)
        patch.setattr(trainer, "train_step", step)
        yield steps
