"""What a training step will cost on a machine, phase by phase, before it is run.

`work_of` counts what a step does, which no machine changes; `predict` says how long a machine takes for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.placement.budget import TableSlots
from hotrow.plan.hardware import Hardware
from hotrow.tables import TableConfig


@dataclass(frozen=True, kw_only=True)
class TableWork:
    """What a step does to one table."""

    table: TableConfig
    lookups: float
    """Ids per step."""
    rows: float
    """Different rows per step."""
    record_bytes: int
    """Bytes of a row's weights and optimizer state."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step of a config does, on any machine."""

    batch_size: int
    num_dense: int
    products: tuple[tuple[int, int, int], ...]
    """Matrix products of the dense layers, forward: (samples, inputs, outputs)."""
    tables: tuple[TableWork, ...]
    optimizer: str
    dense_optimizer: str
    precision: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's predicted time."""

    seconds: Mapping[str, float]
    """By phase, with the names of `run.record.PHASES`; the wait for rows is in `lookup`."""
    wait_s: float
    """The part of `lookup` that waits for rows from disk: what reads take beyond what the step hides."""
    binds: str
    """What a faster machine would need first: "dense", "rows in DRAM", "disk reads", "python", ..."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def work_of(config: Config, tables: Sequence[TableConfig], dataset: PackedDataset) -> Work:
    """Counts what a training step does; different rows by the dataset's access counts."""
    raise NotImplementedError


def predict(work: Work, hardware: Hardware, slots: Sequence[TableSlots] | None = None) -> Prediction:
    """Returns the step's time; slots: each table's slots in DRAM, None if all rows lie there.

    Raises ValueError naming what the hardware file lacks.
    """
    raise NotImplementedError
