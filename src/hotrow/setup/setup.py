"""The decisions made once, before the first step of a run: tables, devices, ranks, hot rows, and where rows lie.

`Setup` holds the decisions, and its errors say what the machine does not have. `train` builds a run from it, and
`hotrow plan` tries some steps of the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from hotrow.base.machine import available_memory_bytes
from hotrow.config.schema import Config
from hotrow.data.packed.groups import Groups
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import Calibration
from hotrow.hot.turns import check_hot, choose_rows
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded import table_of_rank
from hotrow.parallel.shards import Shard, pooled_tables
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.setup.beside import beside_bytes
from hotrow.setup.demand import demands_of, tables_of
from hotrow.setup.device import DenseDevice, device_of_copies
from hotrow.setup.memory import Room, moved, place_tables, shortage
from hotrow.setup.shards import shards_of
from hotrow.setup.slots import SlotPlanner
from hotrow.tables import TableConfig

SELECTION = "selection"
"""In a run's folder: the run that found how many steps to train, if `fit` trained again with the validation rows, or a
folder of several runs, from which it chose."""
FEW = 8
"""Tables that take this part of the free memory lie in it, whatever a scoring model takes beside them."""
MERGED = ("sgd", "adagrad", "row_wise_adagrad")
"""Optimizers whose states are sums over steps, so that the changes of several ranks may be added up."""


@dataclass(frozen=True)
class Setup:
    """Everything that is decided before the first step of a run, or before its model scores; see `decide`."""

    config: Config
    dataset: PackedDataset
    """What the run trains on; for scoring, the vocabularies that the run keeps."""
    tables: tuple[TableConfig, ...]
    dense: DenseDevice
    """Where dense layers compute."""
    memory: Memory | DeviceMemory | None
    """Where rows lie; if None, all in DRAM."""
    planner: SlotPlanner
    """What divided DRAM among the tables."""
    copies_on: torch.device | None
    """The device that holds copies of hot rows; None if there are no copies."""
    folder: Path
    """The run's folder, or the folder in which it will be made."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes of the run, and the micro-batches that they share."""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """By table, which ranks hold which rows; empty if there is one rank."""
    hot: Calibration | None = None
    """The hot rows; None without a schedule of them."""
    short_of_memory: str | None = None
    """Why memory may run out, if the config says how much of it tables take."""

    @classmethod
    def decide(
        cls,
        config: Config,
        dataset: PackedDataset,
        folder: Path,
        *,
        training: bool = True,
        ranks: Ranks | None = None,
        room: Room | None = None,
    ) -> Setup:
        """Decides what `config` leaves open, for a machine and this dataset.

        folder: the run's folder, or where it will be. training: if False, the model only scores: tables have no
        optimizer state, and rows that do not fit in DRAM go to disk even if the config says `memory: dram`. ranks:
        those that train together; if None, this process trains alone. room: if None, what this machine has now.
        Raises ValueError, with the cure, for what this machine, the dataset or a budget does not allow.
        """
        ranks = ranks or Ranks()
        if training:
            check_data(config, dataset, folder)
        ranks = ranks.with_micro_batches(config.train.micro_batches or ranks.size)
        config = config.with_micro_batches(ranks.micro_batches)
        tables, dense = tables_of(config, dataset), DenseDevice.of(config)
        if ranks.size > 1:
            check_ranks(config, dense)
        copies_on = device_of_copies(config, dense) if training else None
        check_freeze(config, tables, beside=copies_on is not None or config.hbm is not None)
        hot = hot_rows_of(config, tables, dataset, device=copies_on) if training else None
        shards = _shards(config, tables, dataset, ranks.size, hot) if ranks.size > 1 else {}
        # This comes before the room is measured: it imports modules, whose memory this process then holds.
        is_small = not training and FEW * sum(table.num_bytes for table in tables) <= available_memory_bytes()
        known = room is not None or is_small
        beside = 0 if known else beside_bytes(config, dataset, tables, training=training)
        room = room or Room.here(ranks.local_size)
        held = _held(tables, shards, ranks)
        memory, planner = place_tables(
            config, held, folder, str(dense.device), room=room, dataset=dataset, training=training, beside_bytes=beside
        )
        short = shortage(config, held, room, beside_bytes=beside) if training else None
        return cls(config, dataset, tables, dense, memory, planner, copies_on, folder, ranks, shards, hot, short)

    def in_folder(self, folder: Path) -> Setup:
        """Returns the same decisions for a run whose folder is now known to be `folder`."""
        memory, before = self.memory, self.folder
        if isinstance(memory, DeviceMemory):
            memory = replace(memory, below=moved(memory.below, before, folder))
        else:
            memory = moved(memory, before, folder)
        return replace(self, memory=memory, folder=folder)

    @property
    def below(self) -> Memory | None:
        """The tiers that rows lie in, on the CPU's side of a device; if None, all in DRAM."""
        return self.memory.below if isinstance(self.memory, DeviceMemory) else self.memory

    @property
    def in_tiers(self) -> bool:
        """Whether some rows lie in files."""
        return self.below is not None

    @property
    def held(self) -> tuple[TableConfig, ...]:
        """What this rank holds of the tables."""
        return _held(self.tables, self.shards, self.ranks)


def check_data(config: Config, dataset: PackedDataset, folder: Path) -> None:
    """Raises ValueError, with the cure, if the dataset lacks what training with `config` in `folder` needs."""
    for table in dataset.info.tables:
        # Training reads no vocabulary, and reading all takes a second per GB, so this looks at sizes and headers alone;
        # the contents are left to `hotrow check` and `predict`. Preparing the same data again makes the same ones.
        if table.vocabulary_file in dataset.info.files:
            dataset.vocabulary(table.name)
    if not dataset.split("train").num_rows:
        raise ValueError(f"{dataset.path} has no rows in the split 'train': prepare data of which some rows train")
    config.model.check(dataset)
    of_one = {"metrics.by": config.metrics.by, "calibration.method": config.calibration.method}
    of_one |= {"calibration.negatives_kept": None if config.calibration.negatives_kept == 1 else "below 1"}
    if len(dataset.info.labels) > 1 and (given := [name for name, value in of_one.items() if value is not None]):
        raise ValueError(
            f"{given[0]} is for one label, but {dataset.path} has {len(dataset.info.labels)}: leave it out, or prepare "
            "the data with one label"
        )
    if config.metrics.by is not None:
        Groups(dataset.info, config.metrics.by)
    patience = config.train.early_stopping
    if patience is not None and not ("val" in dataset.splits and dataset.split("val").num_rows):
        raise ValueError(
            f"train.early_stopping is {patience}, but {dataset.path} has no rows in a split 'val' to stop by; prepare "
            "the data with one, or set it to null"
        )
    if config.calibration.method not in (None, "slope") and not (folder / SELECTION).is_dir():
        check_labels(f"calibration.method is {config.calibration.method!r}", dataset, "val", "or set it to null")


def is_selection(folder: Path) -> bool:
    """Whether the run in a folder is one by whose validation rows another is trained."""
    return SELECTION in folder.resolve().parts[-2:]


def check_labels(asked: str, dataset: PackedDataset, name: str, cure: str, k: int = 0) -> None:
    """Raises ValueError, with the cure, if the rows of a split do not have both values of the k-th label."""
    split, found = dataset.splits.get(name), set[float]()
    for block in () if split is None else map(split.block, range(split.num_blocks)):
        found |= {*map(float, np.unique(block.labels[k]))}
        if len(found) > 1:
            return
    has = f"has rows of label {found.pop():g} alone" if found else "has no rows"
    raise ValueError(
        f"{asked}, but the split {name!r} of {dataset.path} {has}, to which nothing can be fitted; split the data "
        f"differently, {cure}"
    )


def check_freeze(config: Config, tables: Sequence[TableConfig], *, beside: bool) -> None:
    """Raises ValueError if `train.freeze` names what is not there, leaves nothing to train, or freezes some tables of
    which others than the CPU keep rows (beside)."""
    names, frozen = [table.name for table in tables], config.train.freeze
    for name in frozen:
        if name not in ("dense", "tables", *names):
            raise ValueError(f"train.freeze names {name!r}; it may name dense, tables, {', '.join(names)}")
    trained = [] if "tables" in frozen else [name for name in names if name not in frozen]
    if "dense" in frozen and not trained:
        raise ValueError("train.freeze leaves nothing to train: leave out dense, or tables")
    if beside and 0 < len(trained) < len(names):
        raise ValueError(
            f"train.freeze leaves {', '.join(trained)} to train, but rows on a GPU are trained for all tables or none: "
            "name tables, or none of them, or keep rows on the CPU (memory.hbm: null, hot.schedule: none)"
        )


def _held(tables: tuple[TableConfig, ...], shards: Mapping[str, Shard], ranks: Ranks) -> tuple[TableConfig, ...]:
    return tuple(table_of_rank(table, shards[table.name], ranks) for table in tables) if shards else tables


def hot_rows_of(
    config: Config, tables: Sequence[TableConfig], dataset: PackedDataset, *, device: torch.device | None
) -> Calibration | None:
    """Returns the hot rows of a run; device: where copies of them will lie. Raises ValueError as `check_hot`."""
    record_bytes = {own.name: own.record_bytes for own in demands_of(config, tables, training=True)}
    check_hot(config.hot, dataset, record_bytes, device=device)
    return choose_rows(config.hot, dataset, record_bytes, seed=config.train.seed)


def _shards(
    config: Config, tables: Sequence[TableConfig], dataset: PackedDataset, num_ranks: int, hot: Calibration | None
) -> dict[str, Shard]:
    """Returns by table which ranks hold which rows: if hot batches have phases, every rank holds the hot rows."""
    if hot is None or not config.hot.takes_turns:
        return shards_of(config, tables, dataset, num_ranks)
    shards = shards_of(config, tables, dataset, num_ranks, hot=hot.hot.prefixes(ranked=dataset.is_ranked))
    _check_merging(config, shards, hot.hot.num_beyond({name: shard.prefix for name, shard in shards.items()}))
    return shards


def _check_merging(config: Config, shards: Mapping[str, Shard], num_beyond: int) -> None:
    """Raises ValueError, with the cure, if ranks cannot merge what each of them changed in several steps. num_beyond:
    number of hot rows that not every rank holds."""
    if config.hot.merge_every == 1:
        return
    text, optimizer = f"hot.merge_every is {config.hot.merge_every}", config.optimizer.sparse.name
    if optimizer not in MERGED:
        raise ValueError(
            f"{text}, but optimizer.sparse.name is {optimizer!r}, whose states are no sums, so that the changes of "
            f"several ranks cannot be added up: set hot.merge_every to 1, or choose {', '.join(MERGED)}"
        )
    if num_beyond:
        pooled = pooled_tables(shards)
        cure = (
            f"parallel.exchange to rows for {', '.join(pooled)}"
            if pooled
            else "hot.rows to exact, with data whose rows are numbered by their counts, as hotrow prepare does"
        )
        raise ValueError(
            f"{text}, but {num_beyond:,} hot rows are not among the first of their tables, which every rank holds: set "
            f"hot.merge_every to 1, or {cure}"
        )


def check_ranks(config: Config, dense: DenseDevice) -> None:
    """Raises ValueError, with the cure, for options that several ranks cannot follow yet."""
    wanted = {
        "memory.hbm": (config.hbm, "null: the tables of a rank lie in DRAM and on disk"),
        "memory.write_budget": (config.write_budget and config.write_budget.text, "null: only one process counts it"),
        "train.clip_norm": (config.train.clip_norm, "null: ranks send gradients before any knows the norm of all"),
        "device": (None if dense.device.type == "cpu" else dense.device.type, "cpu"),
    }
    for option, (value, cure) in wanted.items():
        if value is not None:
            raise ValueError(f"{option} is {value!r}, which does not work on several ranks yet: set it to {cure}")
