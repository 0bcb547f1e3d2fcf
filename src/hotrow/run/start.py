"""Runs that start from the weights of a finished run (`from_run`), maybe with other rates, losses, optimizers or rows.

`start_of` finds that run's checkpoint and refuses what does not fit, before the new run's folder is made; `Start.load`
takes the weights over. Before its first step the new run has every weight and every score of the other run, to the bit.
From then on it is a run like any other, and needs the other one no more once it has saved a checkpoint of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.base.door import read_file
from hotrow.config.load import make_config
from hotrow.config.schema import Config, OptimizerConfig, ScheduleConfig
from hotrow.data.packed.format import DatasetInfo, Ragged, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.report.facts import mapping_in, number_in
from hotrow.run.build import Parts
from hotrow.run.checkpoint import Part, list_checkpoints, load_checkpoint
from hotrow.run.checkpoint_files import MANIFEST, read_manifest
from hotrow.run.folder import CONFIG, RunFolder, resume_command
from hotrow.run.record import Extra, Parent, read_extra
from hotrow.setup.device import splits_dense
from hotrow.setup.setup import Setup
from hotrow.tables import TableConfig


@dataclass(frozen=True)
class Start:
    """The run whose weights a run starts from, and what it takes of them."""

    checkpoint: Path
    record: Parent
    is_new_data: bool
    """Whether the run trains on another dataset than the weights were trained on."""
    reborn: Mapping[str, NDArray[Any]]
    """By table, the rows that stood for expired ids, and stand for others now."""

    def load(self, parts: Parts) -> None:
        """Gives `parts` the weights, and the states of optimizers that go on. Collective.

        A row of a new id gets the weights of row 0, which stood for the id so far, and the states of a row that was
        never looked up.
        """
        optimizers: dict[str, Part] = {"dense": parts.dense_optimizer, "sparse": parts.sparse_optimizer}
        states = {f"{name}_optimizer": optimizers[name] for name in self.record.states}
        own = {"embedding": parts.embedding, "model": parts.model, **states}
        load_checkpoint(self.checkpoint, own, anew=True)
        for table, added in self.record.rows_added.items():
            rows = parts.embedding.rows(table)
            first, goes_on = rows.shape[0] - added, "sparse" in self.record.states
            row, reborn = rows.read(slice(0, 1)).clone(), self.reborn.get(table, np.empty(0))
            for piece in rows.pieces(first):
                rows.write(piece, row.repeat(piece.stop - piece.start, 1))
            for start in range(0, len(reborn), rows.piece_rows):
                ids = torch.from_numpy(reborn[start : start + rows.piece_rows].astype(np.int64))
                rows.write(ids, row.repeat(len(ids), 1))
                if goes_on:
                    parts.sparse_optimizer.forget(table, ids)
            parts.sparse_optimizer.follow_weights(table, first if goes_on else 0)

    def unknown(self, dataset: PackedDataset, firsts: Sequence[int]) -> list[float | None]:
        """Returns, by part of the training rows, the share of lookups whose id has no row in the weights. firsts: the
        first row of each part."""
        split, row, new = dataset.split("train"), 0, dict[str, NDArray[np.int64]]()
        for table in dataset.info.tables:
            first = table.num_embeddings - self.record.rows_added[table.name]
            # Rows of new ids one by one, and the row from which on all are of new ids.
            new[table.name] = np.append(self.reborn.get(table.name, ()), first).astype(np.int64)
        lookups, lost = np.zeros((2, len(firsts)), np.int64)
        for block in map(split.block, range(split.num_blocks)):
            cuts = np.clip(np.array([*firsts, split.num_rows]) - row, 0, block.num_rows)
            for feature, ids in zip(dataset.info.features, block.ids, strict=True):
                rows, at = (ids.values, ids.row_splits[cuts]) if isinstance(ids, Ragged) else (ids, cuts)
                own = new[feature.table]
                found = (rows == 0) | (rows >= own[-1]) | (own[np.searchsorted(own[:-1], rows)] == rows)
                lookups += np.diff(at)
                lost += np.diff(np.append(0, np.cumsum(found))[at])
            row += block.num_rows
        return [float(part / of) if of else None for part, of in zip(lost, lookups, strict=True)]

    def line(self) -> str:
        """Returns what the run starts with, in words."""
        kept, added = self.record.states, sum(self.record.rows_added.values())
        states = {0: "states of optimizers begin anew", 1: f"states of the {''.join(kept)} optimizer alone go on"}
        rows = {"new rows of tables": added, "rows of expired ids": sum(self.record.rows_reborn.values())}
        new = " and ".join(f"{number:,} {what}" for what, number in rows.items() if number)
        new = f"; {new} begin with the weights of their table's row 0" if new else ""
        return (
            f"starts with the weights of step {self.record.step} of {self.record.path}; "
            f"{states.get(len(kept), 'states of optimizers go on')}{new}"
        )


def start_of(setup: Setup, before: Parent | None = None) -> Start | None:
    """Returns what the run of `setup` starts from; None if it begins with random weights.

    before: what an earlier session of the run found. Raises ValueError, with the cure, if the run that `from_run` names
    has not finished, has changed its weights since, or has another model or other ids.
    """
    config = setup.config
    if config.from_run is None:
        return None
    folder = RunFolder.open(config.from_run)
    if folder.record.status != "finished":
        raise ValueError(
            f"from_run: {folder.path} is {folder.record.status}, and a run starts from a finished one: finish it with "
            f"{resume_command(folder.path)}, or choose another"
        )
    step = folder.record.chosen_step or 0
    if (checkpoint := list_checkpoints(folder.checkpoints).get(step)) is None:
        raise ValueError(
            f"from_run: {folder.path} has no checkpoint of step {step}, whose weights it chose: restore it from a "
            "copy, or choose another run"
        )
    extra = read_extra(checkpoint, read_manifest(checkpoint))
    theirs = make_config(extra.config, origin=f"{checkpoint / MANIFEST}: extra: config")
    trained_on = PackedDataset.open(folder.encoder).info
    added, known = _rows_added(setup, extra.tables, trained_on, folder.path), trained_on.table_by_name
    renewed = [own.name for own in setup.dataset.info.tables if own.vocabulary != known[own.name].vocabulary]
    reborn = {table: rows for table in renewed if len(rows := setup.dataset.reborn(table))}
    _check_model(setup, theirs, extra, folder.path)
    checksum = hashlib.sha256(read_file(checkpoint / MANIFEST)).hexdigest()
    if before is not None and before.checksum != checksum:
        raise ValueError(
            f"from_run: the weights of {folder.path} are not those that this run started from, and it has no "
            "checkpoint of its own yet: remove its folder and start it again"
        )
    num_reborn = {table: len(rows) for table, rows in reborn.items()}
    record = Parent(str(folder.path), step, checksum, _states_of(config.optimizer, theirs.optimizer), added, num_reborn)
    return Start(checkpoint, record, extra.dataset != setup.dataset.checksum, reborn)


def unknown_shares(info: DatasetInfo) -> tuple[float | None, dict[str, float]]:
    """Returns which share of the lookups in a day's training rows are of ids without a row in its base, over all tables
    and by table; None and {} for a dataset that extends no other."""
    tables = mapping_in(info.summary, "ids")
    lost, all_of = ({t: number_in(tables, t, what) or 0.0 for t in tables} for what in ("unknown_to_base", "lookups"))
    shares = {name: lost[name] / all_of[name] for name in tables if all_of[name]}
    return sum(lost.values()) / sum(all_of.values()) if shares else None, shares


def _check_model(setup: Setup, theirs: Config, extra: Extra, run: Path) -> None:
    """Raises ValueError if the weights of `run` do not fit the model of `setup`."""
    own = setup.config
    cure = f"set it to that, or leave out the recipe: {run / CONFIG} is taken then"
    options = {
        "model.name": (own.model.name, theirs.model.name),
        "model.objective": (own.model.objective, theirs.model.objective),
        "train.precision": (own.train.precision, theirs.train.precision),
    }
    if splits_dense(own) != splits_dense(theirs):  # the optimizer has the lower halves of the weights
        options["optimizer.dense.name"] = own.optimizer.dense.name, theirs.optimizer.dense.name
    for option, (mine, other) in options.items():
        if mine != other:
            raise ValueError(f"{option} is {mine!r}, and {run}, from which this run starts, has {other!r}: {cure}")
    if _shapes(own, setup.tables, extra.num_dense) != _shapes(theirs, extra.tables, extra.num_dense):
        differing = [name for name, value in theirs.model if getattr(own.model, name) != value]
        there = ", ".join(f"model.{name} is {getattr(theirs.model, name)!r}" for name in differing)
        raise ValueError(f"{run}, from which this run starts, has layers of other sizes; there {there}: {cure}")
    if own.optimizer.sparse.name == "ftrl" and (warmup := own.optimizer.schedule.warmup_steps):
        raise ValueError(
            f"optimizer.schedule.warmup_steps is {warmup}, but ftrl computes weights from the rate, so that a warm-up "
            "makes the weights of from_run small: set it to 0, or choose another optimizer.sparse.name"
        )


def _shapes(config: Config, tables: tuple[TableConfig, ...], num_dense: int) -> Mapping[str, object]:
    """Returns the shapes of all weights, without the rows of tables."""
    dims = {name: table.embedding_dim for table in tables for name in table.feature_names}
    with torch.device("meta"):  # without memory
        network = config.model.build(num_dense=num_dense, dims=dims, generator=torch.Generator())
    return {**{name: own.shape for name, own in network.state_dict().items()}, "rows": dims}


def _rows_added(setup: Setup, tables: tuple[TableConfig, ...], theirs: DatasetInfo, run: Path) -> dict[str, int]:
    """Returns by table how many rows were added. Raises ValueError if a row stands for another id than in `run`."""
    dataset, own = setup.dataset, setup.dataset.info
    mine, others = ([*zip(info.dense, map(tuple, info.edges), strict=True)] for info in (own, theirs))
    if (mine, own.features) != (others, theirs.features):
        names = sorted({column.name for column, _ in {*mine} ^ {*others}})
        names += sorted({each.name for each in {*own.features} ^ {*theirs.features}})
        raise ValueError(
            f"data: {dataset.path} does not have the columns of {run}, from which this run starts; they differ in "
            f"{', '.join(names) or 'their order'}: prepare it by that run's schema: hotrow prepare ... --base {run}"
        )
    if len(own.labels) != len(theirs.labels):
        raise ValueError(
            f"data: {dataset.path} has {len(own.labels)} labels, but {run}, from which this run starts, predicts "
            f"{len(theirs.labels)}: prepare it with as many"
        )
    names, before = ([label.name for label in info.labels] for info in (own, theirs))
    if moved := [name for place, name in enumerate(names) if name in before and before.index(name) != place]:
        raise ValueError(
            f"data: {dataset.path} has the labels {', '.join(names)}, but {run}, from which this run starts, predicts "
            f"{', '.join(before)}, {moved[0]!r} in another place: prepare the data with labels in that order"
        )
    for table in own.tables:
        if not _extends(table, theirs.table_by_name[table.name]):
            raise ValueError(
                f"data: {dataset.path}: rows of table {table.name!r} stand for other ids than in {run}, from which "
                f"this run starts; prepare the data as the next day of that run's: hotrow prepare ... --base {run}"
            )
    num_rows = {table.name: table.num_embeddings for table in tables}
    return {table.name: table.num_embeddings - num_rows[table.name] for table in setup.tables}


def _extends(table: Table, before: Table) -> bool:
    """Returns whether all rows of `before` stand for the same ids in `table`, or for others since these expired."""
    same = table.vocabulary == before.vocabulary or (table.parent is not None and table.parent == before.vocabulary)
    return same and table.num_embeddings >= before.num_embeddings


def _states_of(own: OptimizerConfig, theirs: OptimizerConfig) -> list[str]:
    """Returns the optimizers whose states go on: those of the same name. FTRL computes weights from states and rates,
    so its rates must have been the same too, and constant."""
    same = {"dense": own.dense.name == theirs.dense.name, "sparse": own.sparse.name == theirs.sparse.name}
    if own.sparse.name == "ftrl":
        same["sparse"] = own.sparse == theirs.sparse and own.schedule == theirs.schedule == ScheduleConfig()
    return [name for name, goes_on in same.items() if goes_on]
