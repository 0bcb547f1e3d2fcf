"""What a run adds to its checkpoints: where it stands, and what it takes to build its model again.

checkpoint.py holds the tensors; trainer.py takes up the state, api.py and export.py the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass as record

from hotrow.base.records import STRICT, Amount, Count, checked
from hotrow.config.load import make_config
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.run.checkpoint_manifest import MANIFEST, Manifest
from hotrow.run.checkpoint_tensors import CURE
from hotrow.run.metrics import Metrics
from hotrow.run.session import PHASES
from hotrow.run.setup import tables_of
from hotrow.run.turns import TurnsState
from hotrow.tables import TableConfig


@dataclass
class State:
    """Where a run stands; with the parts, all that a checkpoint must bring back."""

    step: Count = 0
    epoch: Count = 0
    batch: Count = 0
    """Batches of the current epoch already taken."""
    turns: TurnsState | None = None
    """Where the order of batches stands, and what it cost; None before the first checkpoint."""
    window_loss: Amount = 0.0
    """Sum of the losses of the last `window_steps` steps, those not yet in metrics.jsonl."""
    window_steps: Count = 0
    val: Metrics | None = None
    """The last evaluation of the validation split."""
    best: Metrics | None = None
    """The best one by `train.monitor`, and where it was:"""
    best_step: Count = 0
    evals_since_best: Count = 0
    ended: str | None = None
    """Why training is over, once it is."""
    skipped: Count = 0
    """Steps that changed nothing, because their loss or gradients were not finite; `step` counts them too."""
    skipped_in_a_row: Count = 0
    num_samples: Count = 0
    seconds: dict[str, Amount] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Spent in steps, by phase, over all sessions of the run."""
    stall_s: Amount = 0.0
    """Seconds of steps spent waiting for rows that were not in DRAM."""
    drive_written_bytes: Count = 0
    """Rows in tiers and checkpoints, over all sessions of the run."""

    def __post_init__(self) -> None:
        """Raises ValueError where it is of another set of phases."""
        if self.seconds.keys() != set(PHASES):
            raise ValueError(f"seconds has {', '.join(self.seconds) or 'nothing'}; it needs {', '.join(PHASES)}")

    @property
    def train_s(self) -> float:
        """The sum over the phases."""
        return sum(self.seconds.values())


@record(frozen=True, config=STRICT)
class Extra:
    """The `extra` of a run's checkpoints."""

    state: State
    dataset: str
    """Checksum of the dataset."""
    tables: tuple[TableConfig, ...]
    num_dense: Count
    threads: Count
    isa: str
    device: str
    config: dict[str, JsonValue]


_EXTRA = TypeAdapter(Extra)


def read_extra(checkpoint: Path, manifest: Manifest) -> Extra:
    """What the run says in the manifest of its checkpoint. Raises ValueError naming file, field and cure."""
    return checked(_EXTRA, manifest.extra, where=f"{checkpoint / MANIFEST}: extra", cure=CURE)


def read_model(checkpoint: Path, manifest: Manifest, vocabulary: PackedDataset) -> tuple[Config, Sequence[TableConfig]]:
    """The config and the tables of a run's checkpoint, on the ids of `vocabulary`.

    Raises ValueError naming file and field where they are not of these.
    """
    extra, where = read_extra(checkpoint, manifest), f"{checkpoint / MANIFEST}: extra"
    config = make_config(extra.config, origin=f"{where}: config")
    if extra.num_dense != len(vocabulary.info.dense):
        raise ValueError(
            f"{where}: num_dense is {extra.num_dense}, but {vocabulary.path} has {len(vocabulary.info.dense)} dense "
            f"columns; {CURE}"
        )
    if extra.tables != tables_of(config, vocabulary):
        raise ValueError(
            f"{where}: tables and config are not of the features and ids in {vocabulary.path}; copy that folder from "
            f"the dataset the run used, or {CURE}"
        )
    return config, extra.tables
