"""What a run writes to its drive, and how that compares with `memory.write_budget`, which counts and warns.

docs/memory.md says what is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import override

from hotrow.base.files import ByteRate, folder_bytes, size
from hotrow.batch import Batch
from hotrow.config.schema import Config
from hotrow.kernels.types import NUM_STATES
from hotrow.placement.tiers import Tiers
from hotrow.run.meters import LoopPart, Notice, Session, Told, warning
from hotrow.setup.demand import required_bytes
from hotrow.tables import TableConfig

CHECK_STEPS = 8
"""Steps between two looks at the counters. One look takes 50 us with 26 tables."""
WARM_UP_STEPS = 200
"""Steps after the first write before the rate is judged, because caches that are filling up write less."""


class WriteMeter(LoopPart):
    """What one session of a run writes to its drive: rows of tables in tiers, and checkpoints.

    checkpoint_bytes: the most that one checkpoint takes.
    """

    def __init__(
        self, tiers: Tiers | None, budget: ByteRate | None, session: Session, *, checkpoint_bytes: int
    ) -> None:
        self.budget, self.checkpoint_bytes, self._session = budget, checkpoint_bytes, session
        self._stores = [] if tiers is None else [store for store in tiers.stores if store.path is not None]
        self._checkpoints = 0
        self._first: tuple[int, float, int] | None = None
        """Step, seconds of training and bytes of rows when rows were first written."""
        self._is_said = False

    @property
    def num_bytes(self) -> int:
        """Bytes written since the session began."""
        return self._checkpoints + self._rows_bytes()

    def total_bytes(self) -> int:
        """Returns what the run wrote, over all sessions, and notes it in the run's state."""
        total = self._session.state.drive_written_bytes = self._session.before.drive_written_bytes + self.num_bytes
        return total

    def _rows_bytes(self) -> int:
        return sum(store.counters()["written_bytes"] for store in self._stores)

    @contextmanager
    def saving(self, path: Path) -> Iterator[None]:
        """Counts the checkpoint that is written to the folder `path` inside the block."""
        yield
        self._checkpoints += folder_bytes(path)

    @override
    def after_step(self, batch: Batch, loss: float | None) -> Told:
        return () if self._session.state.step % CHECK_STEPS else self._warning()

    @override
    def close(self) -> Iterable[Notice]:
        return self._warning()

    def _warning(self) -> Iterable[Notice]:
        """Warns, once, if the session has written more than the budget, or would at the rate of its rows.

        Checkpoints are no part of the rate: a session may be short beside the time between two of them.
        """
        if self.budget is None or self._is_said:
            return ()
        text, now = "", (self._session.state.step, self._session.seconds, self._rows_bytes())
        if self._first is None and now[2]:
            self._first = now
        if self.num_bytes > self.budget.num_bytes:
            text = f"this session has written {size(self.num_bytes)}"
        elif self._first is not None and now[0] >= self._first[0] + WARM_UP_STEPS:
            per_s = (now[2] - self._first[2]) / (now[1] - self._first[1])
            if per_s * self.budget.seconds > self.budget.num_bytes:
                text = f"rows are written at {size(3600 * per_s)} an hour"
        if not text:
            return ()
        self._is_said = True
        cure = "fewer bytes are written with a larger memory.dram, fewer checkpoints, or, in a new run, fp16"
        text = f"memory.write_budget is {self.budget.text}, but {text}: {cure}"
        return warning(text, "write_budget_exceeded")

    @override
    def record(self) -> dict[str, Any]:
        """Returns the session's writes beside the budget, if there is one."""
        if (budget := self.budget) is None:
            return {}

        def share(of: float, amount: float) -> float | None:
            return round(self.num_bytes / of * amount / budget.num_bytes, 6) if of else None

        return {
            "write_budget": {
                "budget": budget.text,
                "budget_bytes": budget.num_bytes,
                "window_s": budget.seconds,
                "share_used": share(1, 1),
                "share_per_epoch": share(self._session.epochs, 1),
                "share_at_this_rate": share(self._session.seconds, budget.seconds),
            }
        }


def checkpoint_bytes(config: Config, tables: Sequence[TableConfig], model: nn.Module, *, with_ids: bool) -> int:
    """Returns the most that a checkpoint takes: tables and states, MLPs with two states per weight, and its manifest.

    with_ids: tables in tiers and those of several ranks add the number of each row, beside the weights and each state.
    """
    dense = sum(parameter.nbytes for parameter in model.parameters())
    num_rows = with_ids * sum(table.num_embeddings for table in tables)
    rows = required_bytes(config, tables) + 8 * num_rows * (1 + NUM_STATES[config.optimizer.sparse.name])
    return rows + 3 * dense + (len(tables) + 16 << 10)
