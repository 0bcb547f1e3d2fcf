"""Runs: `train` starts a run in a new folder, `resume` continues one from its newest checkpoint (law 3).

This module holds what surrounds the loop: what is refused before a folder is made, what is said and recorded at the
start, and how a failure ends. The loop and a single step are in trainer.py.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hotrow.base.door import is_taken, read_file
from hotrow.base.files import disk_free_bytes, explain_full_disk, is_seen, size
from hotrow.base.machine import default_threads, lacks_bfloat16_products, usable_cores
from hotrow.base.progress import ProgressLine, num_of
from hotrow.config.load import apply_overrides, make_config, parse_yaml
from hotrow.config.schema import Config
from hotrow.data.packed.format import MANIFEST
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import HotSet
from hotrow.kernels import ops
from hotrow.parallel.agreement import (
    check_same,
    everyone,
    facts_of,
    on_every_rank,
    on_first_rank,
)
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.gloo import unnamed_interface
from hotrow.parallel.heartbeat import Heartbeat
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.shards import pooled_tables
from hotrow.placement.store_file import remove_left_folders
from hotrow.placement.stores import StoreError
from hotrow.placement.tiers import Tiers
from hotrow.run.checkpoint import list_checkpoints, steps_without_manifest
from hotrow.run.folder import CONFIG, RunFolder, SilentFolder, noting, resume_command
from hotrow.run.record import Part
from hotrow.run.restart import how_to_go_on, mark_launch, restart_folder, was_restarted
from hotrow.run.start import Start, start_of, unknown_shares
from hotrow.run.storage import describe, disk_shortfall, full_device
from hotrow.run.trainer import Interrupt, MakeMeter, Training
from hotrow.run.trial_record import kept_trial
from hotrow.setup.demand import required_bytes
from hotrow.setup.device import storage_line
from hotrow.setup.memory import FOLDER
from hotrow.setup.setup import Setup
from hotrow.setup.shards import shards_line

TENTHS, MOST_UNKNOWN = 10, 3
"""Parts of new rows whose hours are not known, and tables that are named for their unknown ids."""


def train(
    config: Config,
    *,
    folder: RunFolder | None = None,
    quiet: bool = False,
    also: MakeMeter | None = None,
    comm: Communicator | None = None,
    until_s: float = math.inf,
    hidden: Collection[str] = (),
) -> RunFolder:
    """Trains a new run of `config`; returns its folder, whose run.json has the status "finished" or "interrupted".

    folder: a run folder that was made beforehand; if None, the folder that `config.run` names is made. also: makes one
    more meter, for who measures training. comm: the ranks that train together; all call this, and the first one alone
    writes the folder, which it returns; others return what they know of it. If None, this process alone. until_s: the
    `time.monotonic()` at which the run stops as by SIGUSR1. hidden: splits that the run does not look at.

    On SIGINT, SIGTERM or SIGUSR1 the run finishes the step, saves a checkpoint and returns; a second signal aborts it.
    Raises ValueError if the config or the data is wrong, before the folder is made if that can be known by then.
    """
    comm = comm or Communicator()
    interrupt = Interrupt(quiet=quiet or comm.rank > 0, until_s=until_s)
    with Heartbeat(comm, cure="Start it again") as heartbeat:
        if folder is None and (begun := everyone(comm, str(restart_folder(config) or ""))[0]):
            # torchrun started these processes again; the run may have ended before its first step.
            if everyone(comm, (Path(begun) / CONFIG).is_file())[0]:
                return _resume(Path(begun), (), heartbeat, interrupt, hidden)
            folder = on_every_rank(comm, lambda: RunFolder.open(begun))
        return _train_new(config, folder, heartbeat, interrupt, also, hidden)


def _train_new(
    config: Config,
    folder: RunFolder | None,
    heartbeat: Heartbeat,
    interrupt: Interrupt,
    also: MakeMeter | None,
    hidden: Collection[str],
) -> RunFolder:
    comm, runs = heartbeat.comm, folder.path if folder else Path(config.run or "runs")
    shown: list[str] = []

    def decide() -> tuple[Setup, Start | None]:
        """What cannot work is refused before a folder is made."""
        dataset = PackedDataset.open(config.data, verify="sizes", hidden=hidden)
        paths = {"data": str(dataset.path.resolve())}
        if config.from_run is not None:
            paths["from_run"] = str(Path(config.from_run).resolve())
        setup = Setup.decide(config.model_copy(update=paths), dataset, runs, ranks=comm.ranks)
        return setup, start_of(setup)

    with noting(shown.append):  # there is no folder yet
        setup, start = on_every_rank(comm, decide)
    check_same_setup(comm, setup)
    name = f"{setup.dataset.path.resolve().name}-{config.model.name}"
    made = folder or make_folder(comm, lambda: RunFolder.create(config.run, name=name))
    with _claimed(comm, made) as folder:
        folder.count_shown(shown)
        if comm.rank == 0:
            mark_launch(folder.path, config)
        folder.keep_vocabulary(setup.dataset.path)
        return _run(setup.in_folder(folder.path), folder, start, heartbeat, interrupt, also)


def make_folder(comm: Communicator, make: Callable[[], RunFolder]) -> RunFolder:
    """Returns the folder that `make` makes on the first rank, and on others one that writes nothing. Collective.

    Raises ValueError if a rank does not see the folder, to which it will have to write its part of each checkpoint.
    """
    made = on_first_rank(comm, make)
    path = Path(everyone(comm, "" if made is None else str(made.path.resolve()))[0])

    def look() -> None:
        if not is_seen(path):
            raise ValueError(
                f"run folder {path}, which rank 0 has made, is not here: set `run` to a folder on a file system that "
                "all ranks see, because each writes its part of a checkpoint there"
            )

    on_every_rank(comm, look)
    return SilentFolder.at(path) if made is None else made


@contextmanager
def _claimed(comm: Communicator, folder: RunFolder) -> Iterator[RunFolder]:
    """Reserves the folder for this run on the first rank; yields it, and on others one that writes nothing."""
    with ExitStack() as stack:
        on_first_rank(comm, lambda: stack.enter_context(folder.claimed()))
        yield SilentFolder.at(folder.path) if comm.rank else folder


def check_same_setup(comm: Communicator, setup: Setup) -> None:
    """Raises ValueError on every rank if ranks differ in what changes results."""
    check_same(comm, facts_of(setup.config, checksum=setup.dataset.checksum, micro_batches=setup.ranks.micro_batches))
    # These follow from the facts above, and would only hide which of them differ.
    check_same(comm, {f"who holds rows of table {name!r}": asdict(shard) for name, shard in setup.shards.items()})


RESUMABLE = (
    "train.threads",
    "train.epochs",
    "train.max_steps",
    "train.nonfinite",
    "calibration.method",
    "calibration.negatives_kept",
    "checkpoint.every",
    "checkpoint.keep_last",
    "data",
    "memory",
    "parallel",
)
"""Options that may change when a run is resumed. Any other change would make it another run."""


def resume(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    quiet: bool = False,
    comm: Communicator | None = None,
    until_s: float = math.inf,
    hidden: Collection[str] = (),
) -> RunFolder:
    """Continues the run at `path` from its newest checkpoint, to the bits it would have reached without the stop.

    overrides: `a.b=v` for the options in RESUMABLE. A finished run with nothing left to do is returned as it is. comm:
    as for `train`; any number of ranks up to `train.micro_batches` of the run may continue it. until_s, hidden: as for
    `train`. Raises ValueError if another process trains there.
    """
    comm = comm or Communicator()
    interrupt = Interrupt(quiet=quiet or comm.rank > 0, until_s=until_s)
    with Heartbeat(comm, cure="Start it again") as heartbeat:
        return _resume(Path(path), overrides, heartbeat, interrupt, hidden)


def _resume(
    path: Path, overrides: Sequence[str], heartbeat: Heartbeat, interrupt: Interrupt, hidden: Collection[str]
) -> RunFolder:
    found = on_every_rank(heartbeat.comm, lambda: RunFolder.open(path))
    with _claimed(heartbeat.comm, found) as folder:
        # What it says may have changed until it was claimed.
        folder.record = on_every_rank(heartbeat.comm, lambda: RunFolder.open(folder.path).record)
        return _go_on(folder, overrides, heartbeat, interrupt, hidden)


def _go_on(
    folder: RunFolder, overrides: Sequence[str], heartbeat: Heartbeat, interrupt: Interrupt, hidden: Collection[str]
) -> RunFolder:
    comm = heartbeat.comm
    if folder.record.status == "interrupted" and everyone(comm, was_restarted())[0]:
        return folder  # it was asked to stop, and torchrun takes that for a failure
    config = on_every_rank(comm, lambda: _resumed_config(folder, overrides))
    if folder.record.status == "finished" and not overrides:
        return folder
    newest = _newest_checkpoint(folder, comm)
    if comm.ranks.local_rank == 0:
        remove_left_rows(folder)  # the run may go on with its rows elsewhere, and nobody would look there again

    def decide() -> tuple[Setup, Start | None]:
        _check_is_there(config, folder)
        dataset = PackedDataset.open(config.data, verify="sizes", hidden=hidden)
        setup = Setup.decide(config, dataset, folder.path, ranks=comm.ranks)
        return setup, None if newest is not None else start_of(setup, folder.record.parent)

    with noting(lambda text: folder.count_shown([text])):
        setup, start = on_every_rank(comm, decide)
    check_same_setup(comm, setup)
    return _run(setup, folder, newest or start, heartbeat, interrupt)


def config_of(run: Path | str) -> Path:
    """Returns the config file of a run, to train another like it. Raises ValueError if it is not a run or has none."""
    path = RunFolder.open(run).path / CONFIG
    if not is_taken(path):
        raise ValueError(f"{run} ended before its first step, without a {CONFIG}: choose a run that has finished")
    return path


def _resumed_config(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """Returns the config of a run with the options that may change. Raises ValueError for others."""
    if not is_taken(folder.path / CONFIG):
        command = shlex.join(map(str, folder.record.command))
        if folder.record.preparation is not None:
            raise ValueError(
                f"{folder.path} was stopped while it prepared its data, before its first step; to continue, run again: "
                f"{command}"
            )
        raise ValueError(
            f"{folder.path} ended before its first step, without a {CONFIG}: there is nothing to continue from, so "
            f"{_start_again(folder)}"
        )
    raw = parse_yaml(read_file(folder.path / CONFIG).decode(), origin=str(folder.path / CONFIG))
    for override in overrides:
        option = override.partition("=")[0]
        if option not in RESUMABLE and not option.startswith(("memory.", "parallel.")):
            raise ValueError(
                f"--set {override!r}: a resumed run keeps its {option}; it may change {', '.join(RESUMABLE)}"
            )
    config = make_config(apply_overrides(raw, overrides), origin=str(folder.path / CONFIG))
    before = make_config(raw, origin=str(folder.path / CONFIG)).parallel.wire_dtype
    if config.parallel.wire_dtype != before:
        raise ValueError(
            f"parallel.wire_dtype is {config.parallel.wire_dtype!r}, but the run began with {before!r}: it changes "
            "results, so a resumed run keeps it"
        )
    return config.with_micro_batches(config.train.micro_batches or 1)  # a run of before there were any has one


def _check_is_there(config: Config, folder: RunFolder) -> None:
    """Raises ValueError if the dataset of a run is not where its config says."""
    if not is_taken(Path(config.data) / MANIFEST):
        raise ValueError(
            f"the run's dataset is not at {config.data} (data): if it has moved, continue with: "
            f"{resume_command(folder.path)} --set data=FOLDER"
        )


def remove_left_rows(folder: RunFolder) -> list[Path]:
    """Removes rows on disk that killed processes left where the run's config says; returns the folders.

    Also those of other runs, as every process does that lays rows there; never those of a process that lives.
    """
    places = [folder.path / FOLDER]
    if is_taken(path := folder.path / CONFIG):
        places += make_config(parse_yaml(read_file(path).decode(), origin=str(path)), origin=str(path)).tiers.folders
    removed = [left for place in places for left in remove_left_folders(place)]
    with suppress(OSError):  # it is in use, or was never made
        places[0].rmdir()
    return removed


def _newest_checkpoint(folder: RunFolder, comm: Communicator) -> Path | None:
    """Returns the newest whole checkpoint, as rank 0 sees it, and says if a newer one has lost its manifest."""
    checkpoints = list_checkpoints(folder.checkpoints)
    newest = checkpoints[max(checkpoints)] if checkpoints else None
    lost = [step for step in steps_without_manifest(folder.checkpoints) if step > max(checkpoints, default=-1)]
    if lost and comm.rank == 0:
        taken = f"step {max(checkpoints)}" if checkpoints else "the beginning"
        text = f"the checkpoint of step {lost[-1]} has lost its manifest; the run goes on from {taken}"
        folder.warn("checkpoint_lost", text)
        folder.log(text)
        print(f"hotrow: warning: {text}", file=sys.stderr)
    name = everyone(comm, None if newest is None else newest.name)[0]
    return None if name is None else folder.checkpoints / name


def _start_again(folder: RunFolder) -> str:
    return f"remove the folder and start it again, as by: {shlex.join(map(str, folder.record.command))}"


def _run(
    setup: Setup,
    folder: RunFolder,
    found: Path | Start | None,
    heartbeat: Heartbeat,
    interrupt: Interrupt,
    also: MakeMeter | None = None,
) -> RunFolder:
    """Builds, trains and finishes what was decided, from the checkpoint `found` on; otherwise from the first
    step, with the weights of another run or, if None, with random ones."""
    comm = heartbeat.comm.with_micro_batches(setup.ranks.micro_batches)
    heartbeat.cure, heartbeat.last_words = how_to_go_on(folder.path), folder.fail
    with _surroundings(setup, folder, interrupt, comm) as progress:
        training = Training(setup, folder, interrupt, progress, also, comm)
        heartbeat.step = lambda: training.state.step
        with closing(training):
            _begin(training, found)
            training.loop()
            _end(training)
    return folder


@contextmanager
def _surroundings(setup: Setup, folder: RunFolder, interrupt: Interrupt, comm: Communicator) -> Iterator[ProgressLine]:
    """Inside the block threads are as the config says, signals are noted, and a failure says how to go on."""
    full = explain_full_disk(
        folder.path, "training", "The checkpoints there are kept.", f"continue with: {resume_command(folder.path)}"
    )
    team, progress = threads(setup.config.train.threads, ranks=comm.ranks), ProgressLine(quiet=interrupt.quiet)
    # `full` is outermost: on a full disk the folder cannot record the failure either.
    with full, folder, _explain_failure(setup, folder), team, interrupt, progress:
        yield progress


def _begin(training: Training, found: Path | Start | None) -> None:
    """Takes up what was found, and says and records what was decided."""
    if isinstance(found, Start):
        training.start(found)
    elif found is not None:
        training.restore(found)
    config, kept = training.config, training.config.calibration.negatives_kept
    labels = [label.name for label in training.setup.dataset.info.labels]
    judged: dict[str, object] = {"objective": config.model.objective, "metrics_by": config.metrics.by}
    judged |= {"labels": labels} if len(labels) > 1 else {}
    training.folder.update(**judged, negatives_kept=None if kept == 1 else kept)  # on all ranks, which check metrics
    if training.writes_files:
        _say_what_was_decided(training)
    if isinstance(found, Start):
        _look_back(training, found)
    if guessed := unnamed_interface(training.comm):
        training.warn("guessed_interface", guessed)
    if training.state.ended:
        step, asked = training.state.step, training.num_steps
        wanted = f" of {asked}" if step <= asked else f", past the {asked} steps that the config now asks for"
        training.say(f"nothing to train: the run ended at step {step}{wanted} ({training.state.ended})")


def _look_back(training: Training, start: Start) -> None:
    """Says and records what the run starts with, and how good that is on rows that it has not seen."""
    training.say(start.line())
    placement = training.parts.embedding.placement
    goes_on = placement.changes is not None and placement.changes.saved is not None
    if goes_on and placement.find(Tiers) and start.checkpoint.stat().st_dev != training.folder.path.stat().st_dev:
        training.say(
            f"{start.record.path} is on another file system, which cannot share its files: the first checkpoint copies "
            "them"
        )
    if training.folder.record.parent is None:  # no earlier session has come so far
        metrics, parts = _score_new_rows(training, start) if start.is_new_data else (None, [])
        training.folder.update(parent=replace(start.record, metrics=metrics, parts=parts))
    asked, whole = training.num_steps, training.steps_per_epoch
    if start.is_new_data and asked < whole:  # the other run's recipe may have them, which fit wrote for its own rows
        training.warn(
            "part_of_rows",
            f"train.max_steps is {asked:,}, but an epoch of the new rows has {whole:,} steps, so some rows never "
            "train: set train.max_steps to null, and train.epochs to 1",
        )


def _score_new_rows(training: Training, start: Start) -> tuple[dict[str, Any], list[Part]]:
    """Says and records how good the weights are on rows that they have not seen, and what they do not know of them;
    returns the metrics of all rows, and of each hour or, if hours are not known, of each tenth in their order."""
    folder, objective, dataset = training.folder, training.parts.objective, training.setup.dataset
    num_rows, hours, judged = dataset.split("train").num_rows, dataset.hours(), objective.metrics()
    metrics, (share, tables) = training.score("train", metrics=judged), unknown_shares(dataset.info)
    firsts = [row for _, row in hours] or sorted({num_rows * k // TENTHS for k in range(TENTHS)})
    begins = {"begins_s": [begins for begins, _ in hours]} if hours else {"tenth": [*range(1, len(firsts) + 1)]}
    columns: dict[str, Sequence[Any]] = {**begins, "num_rows": np.diff([*firsts, num_rows]).tolist()}
    # A model that finds items is judged by some of the rows, which are spread evenly.
    figures = [*judged.parts([-(-row * judged.num_rows // num_rows) for row in firsts])]
    columns |= {name: [own.get(name) for own in figures] for name in objective.titles}
    if share is not None:
        columns["unknown"] = on_first_rank(training.comm, lambda: start.unknown(dataset, firsts)) or [None] * len(
            firsts
        )
        folder.measure("unknown_ids", step=0, share=share, tables=tables)
        worst = sorted(tables, key=lambda name: -tables[name])[:MOST_UNKNOWN]
        most = ", ".join(f"{name} {tables[name]:.1%}" for name in worst)
        training.say(f"  {share:.1%} of the lookups are of ids that the weights have no row for; most in {most}")
    for line in _lines_of_parts(columns, objective.titles):
        training.say(line)
    return metrics, [dict(zip(columns, part, strict=True)) for part in zip(*columns.values(), strict=True)]


def _lines_of_parts(columns: Mapping[str, Sequence[Any]], titles: Mapping[str, str]) -> Iterator[str]:
    """Returns a head and a line for each part of new rows."""
    heads = {"begins_s": "from (UTC)", "num_rows": "rows", "unknown": "unknown ids", **titles}
    forms, shown = {"begins_s": "", "tenth": "", "num_rows": ",", "unknown": ".1%"}, []
    for name, column in columns.items():
        if name == "begins_s":
            column = [str(np.datetime64(begins, "s"))[:16].replace("T", " ") for begins in column]
        texts = [heads.get(name, name), *("-" if v is None else format(v, forms.get(name, ".4f")) for v in column)]
        shown.append([text.rjust(max(map(len, texts))) for text in texts])
    return ("  " + "  ".join(line) for line in zip(*shown, strict=True))


def _end(training: Training) -> None:
    """Scores and records a run that has ended, or records by which signal it was stopped."""
    if training.state.ended:
        training.finish()
        return
    training.folder.update(status="interrupted", signal=training.signal, **training.figures())
    why = ", because its time is over" if training.signal == Interrupt.TIME_IS_OVER else ""
    command = resume_command(training.folder.path)
    training.say(f"stopped at step {training.state.step}{why}; continue with: {command}")


@contextmanager
def _explain_failure(setup: Setup, folder: RunFolder) -> Iterator[None]:
    """Raises a failure of a store, of memory or of the device again, with what is kept and how to go on."""

    def kept(option: str | None = None) -> str:
        steps = list_checkpoints(folder.checkpoints)
        if not (folder.path / CONFIG).is_file():
            return f"{folder.path} ended before its first step: {_start_again(folder)}"
        command = resume_command(folder.path) + (f" --set {option}" if option else "")
        if not steps:
            return f"There is no checkpoint yet; then {command} starts anew"
        return f"The checkpoint of step {max(steps)} is whole; then continue with: {command}"

    try:
        yield
    except StoreError as error:
        raise StoreError(f"{error}. Training stopped at the first row it could not be sure of. {kept()}") from error
    except torch.OutOfMemoryError as error:
        text, option = full_device(setup.config, setup.tables, error)
        raise ValueError(f"{text}. {kept(option)}") from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        cure = "lay more rows on disk (memory), lower train.batch_size, or start fewer processes on this machine"
        raise MemoryError(f"memory ran out while training ({str(error).strip()[:200]}): {cure}. {kept()}") from error


def _say_what_was_decided(training: Training) -> None:
    folder, config, dataset, backend = training.folder, training.setup.config, training.setup.dataset, ops.backend()
    emb = training.parts.embedding
    where = training.turns.device
    on_device = "" if where is None else f"; copies of hot rows on {where}, up to {config.hot.budget}"
    where_rows_lie = (
        describe(emb, required_bytes(config, training.setup.held)) + training.parts.dense.line() + on_device
    )
    if training.setup.shards:
        training.say(f"{shards_line(emb.tables, training.setup.shards, training.comm.size)}; of rank 0:")
        if (wire_dtype := config.parallel.wire_dtype) != "fp32":
            text = f"rows and gradients of tables travel as {wire_dtype}, which rounds them: results are inexact, and "
            training.warn("inexact_wire", f"{text}depend on the number of ranks (parallel.wire_dtype)")
    training.say(f"{describe_threads(training.comm.ranks.local_size)}; {where_rows_lie}")
    folder.write_config(config.to_yaml())  # only now, when all of it is known to fit: a later resume starts from it
    folder.rewind(training.state.step)
    folder.open_tensorboard(step=training.state.step)
    if backend.reason is not None:
        folder.warn("reference_backend", backend.reason)
    if backend.threads < torch.get_num_threads():
        folder.warn("forked_process", "this process was forked after hotrow's kernels were loaded: they use one thread")
    if training.turns.found is not None and not dataset.has_counts:
        text = f"{config.data} carries no counts: its training split was counted to find hot rows"
        folder.warn("counted_to_find_hot_rows", text)
    _say_what_is_hot(training)
    _warn_of_preparation(training)
    _warn_of_few_rows(training)
    if unused := config.hot.unused():
        text = f"hot.schedule is {config.hot.schedule}, which does not use {', '.join(unused)}"
        training.warn("unused_hot_options", text)
    if training.setup.short_of_memory is not None:
        training.warn("memory_may_run_out", training.setup.short_of_memory)
    _warn_of_tiers(training)
    _warn_of_little_disk(training)
    _warn_of_slow_products(training)
    folder.update(
        status="running",
        error=None,  # these are of a session before
        signal=None,
        write_budget=None,
        dataset={"path": config.data, "checksum": dataset.checksum, "name": dataset.info.name},
        rows={name: split.num_rows for name, split in dataset.splits.items()},
        seeds={"train.seed": config.train.seed},
        trial=kept_trial(training.setup),
        backend=asdict(backend),
        tables_bytes=sum(table.num_bytes for table in training.parts.embedding.tables),
        batches_dropped=0,
    )
    verb = "resumed at" if training.state.step else "training from"
    if config.train.precision != "fp32":
        training.say(f"train.precision {config.train.precision}: {storage_line(config, training.parts.dense)}")
    training.say(
        f"{folder.path}: {verb} step {training.state.step} of {training.num_steps}, {backend.name} kernels "
        f"({backend.isa}, {num_of(backend.threads, 'thread')})"
    )


@contextmanager
def threads(number: int | Literal["auto"], *, ranks: Ranks | None = None) -> Iterator[int]:
    """Makes torch and the kernels use `number` threads inside the block; "auto": `default_threads`.

    ranks: the ranks of this machine share its cores. Afterwards the old number holds again.
    """
    before, ranks = torch.get_num_threads(), ranks or Ranks()
    torch.set_num_threads(default_threads(ranks.local_size) if number == "auto" else number)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def describe_threads(num_processes: int = 1) -> str:
    """Returns how many threads torch and the kernels use, and how to use all cores, for the first line of a run.

    num_processes: processes of the run that share these cores.
    """
    used, cores = torch.get_num_threads(), usable_cores() // num_processes
    if used >= cores:
        return num_of(used, "thread")
    return f"{num_of(used, 'thread')} of {cores} cores (train.threads: {cores} uses all)"


def _say_what_is_hot(training: Training) -> None:
    """Says which rows are hot, if that is known when the session begins."""
    if (found := training.turns.found) is None:
        return
    facts, seconds = found.to_json(), found.calibration.seconds + found.classify_s
    training.say(
        f"hot: {facts['hot_rows']:,} rows ({facts['name']}) in {facts['hot_bytes']:,} of {facts['budget_bytes']:,} "
        f"bytes, {facts['hot_samples']:.1%} of the samples; found in {seconds:.2f} s"
    )
    if text := training.turns.nothing_hot:
        training.warn("no_hot_samples", text)
    if training.setup.shards and training.config.hot.takes_turns:
        _say_what_ranks_do(training, found.rows)


def _say_what_ranks_do(training: Training, hot: HotSet) -> None:
    """Says what in the phases of several ranks is not as it should be: rows that they ask for, and inexact sums."""
    config = training.config.hot
    if beyond := hot.num_beyond({name: shard.prefix for name, shard in training.setup.shards.items()}):
        pooled = pooled_tables(training.setup.shards)
        why = (
            f"parallel.exchange is pooled for {', '.join(pooled)}: {beyond:,} hot rows are not on every rank"
            if pooled
            else f"hot.rows is {config.rows}: {beyond:,} hot rows are not among the first of their tables, which every "
            "rank holds"
        )
        text = f"{why}, so that hot batches ask other ranks for them, as cold ones do"
        training.warn("hot_rows_not_on_every_rank", text)
    if config.merge_every > 1:
        text = (
            f"hot.merge_every is {config.merge_every}: in hot phases each rank updates hot rows alone for so many "
            "steps, which is not exact: weights depend on the number of ranks and on when the run saves and evaluates"
        )
        training.warn("inexact_merging", text)


def _warn_of_preparation(training: Training) -> None:
    """Counts what was said when the data was prepared: it was said then, and a run's reader may not have seen it."""
    summary = training.setup.dataset.info.summary
    if skipped := summary.get("rows_skipped"):
        text = f"{skipped} bad rows were left out when {training.config.data} was prepared"
        training.folder.warn("rows_skipped", text, count=1)
    notes = summary.get("notes")
    for code, texts in notes.items() if isinstance(notes, dict) else ():
        if isinstance(texts, list):
            training.folder.warn(code, "; ".join(map(str, texts)), count=len(texts))


def _warn_of_few_rows(training: Training) -> None:
    """Warns of splits that have too few rows to judge a model by."""
    for name in ("val", "test"):
        split = training.setup.dataset.splits.get(name)
        if split is not None and split.num_rows:
            for place, label in enumerate(split.info.labels):
                labels = (split.block(i).labels[place] for i in range(split.num_blocks))
                for code, text in training.parts.objective.too_few(labels, name).items():
                    more = place > 0
                    training.warn(
                        f"{code}_of_{label.name}" if more else code, f"{label.name}: {text}" if more else text, count=1
                    )


def _warn_of_slow_products(training: Training) -> None:
    dense = training.parts.dense
    if dense.dtype == "bf16" and dense.device.type == "cpu" and lacks_bfloat16_products():
        text = (
            "train.dense_dtype is 'bf16', but this processor has no products of bfloat16: torch converts instead, "
            "which is slower than float32, without AVX-512 many times; fp32 in a new run is faster and more exact"
        )
        training.warn("slow_bfloat16", text)


def _warn_of_little_disk(training: Training) -> None:
    path, most = training.folder.path, training.writes.checkpoint_bytes
    if most > (free := disk_free_bytes(path)):
        text = (
            f"a checkpoint may take {size(most)}, and {size(free)} are free in {path}: training ends at the first "
            "checkpoint that does not fit; free some space, or stop and start the run elsewhere"
        )
        training.warn("disk_may_be_too_small_for_a_checkpoint", text)


def _warn_of_tiers(training: Training) -> None:
    tiers, folder = training.parts.embedding.placement.find(Tiers), training.folder
    if tiers is None:
        return
    fallbacks = [store.fallback for store in tiers.stores if store.fallback]
    if fallbacks:
        text = f"tables on disk are read and written by threads, which takes more of the processor: {fallbacks[0]}"
        folder.warn("stores_without_io_uring", text, count=len(fallbacks))
    if short := disk_shortfall(tiers):
        training.warn("disk_may_become_full", short)
