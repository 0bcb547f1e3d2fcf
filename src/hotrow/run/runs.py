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
from hotrow.base.files import explain_full_disk, is_seen
from hotrow.base.machine import default_threads
from hotrow.base.progress import ProgressLine
from hotrow.config.load import apply_overrides, make_config, parse_yaml
from hotrow.config.schema import Config
from hotrow.data.packed.format import MANIFEST
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.agreement import check_same, everyone, facts_of, on_every_rank, on_first_rank
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.gloo import unnamed_interface
from hotrow.parallel.heartbeat import Heartbeat
from hotrow.parallel.ranks import Ranks
from hotrow.placement.store_file import remove_left_folders
from hotrow.placement.stores import StoreError
from hotrow.placement.tiers import Tiers
from hotrow.run.checkpoint import list_checkpoints, steps_without_manifest
from hotrow.run.folder import CONFIG, RunFolder, SilentFolder, noting, resume_command
from hotrow.run.interrupt import Interrupt
from hotrow.run.parts import parts_of, restore
from hotrow.run.record import Part
from hotrow.run.restart import how_to_go_on, launch_of, restart_folder, was_restarted
from hotrow.run.said import say_what_was_decided
from hotrow.run.start import Start, start_of, unknown_shares
from hotrow.run.storage import full_device
from hotrow.run.trainer import Training
from hotrow.setup.memory import FOLDER
from hotrow.setup.setup import Setup

TENTHS, MOST_UNKNOWN = 10, 3
"""Parts of new rows whose hours are not known, and tables that are named for their unknown ids."""


def train(
    config: Config,
    *,
    folder: RunFolder | None = None,
    quiet: bool = False,
    comm: Communicator | None = None,
    until_s: float = math.inf,
    hidden: Collection[str] = (),
) -> RunFolder:
    """Trains a new run of `config`; returns its folder, whose run.json has the status "finished" or "interrupted".

    folder: a run folder that was made beforehand; if None, the folder that `config.run` names is made. comm: the
    ranks that train together; all call this, and the first one alone writes the folder, which it returns; others return
    what they know of it. If None, this process alone. until_s: the `time.monotonic()` at which the run stops as by
    SIGUSR1. hidden: splits that the run does not look at.

    On SIGINT, SIGTERM or SIGUSR1 the run finishes the step, saves a checkpoint and returns; a second signal aborts it.
    Raises ValueError if the config or the data is wrong, before the folder is made if that can be known by then.
    """
    comm = comm or Communicator()
    interrupt = Interrupt(quiet=quiet or comm.rank > 0, until_s=until_s)
    with Heartbeat(comm, cure="Start it again") as heartbeat, ExitStack() as claims:
        if folder is None and (begun := everyone(comm, str(restart_folder(config) or ""))[0]):
            # torchrun started these processes again; the run may have ended before its first step.
            if everyone(comm, (Path(begun) / CONFIG).is_file())[0]:
                return _resume(Path(begun), (), heartbeat, interrupt, hidden)
            folder = on_every_rank(comm, lambda: RunFolder.open(begun))
        shown: list[str] = []
        with noting(shown.append):  # there is no folder yet, and what cannot work is refused before there is one
            where = folder.path if folder else Path(config.run or "runs")
            setup, start = on_every_rank(comm, lambda: _decide(config, where, comm.ranks, hidden))
        check_same_setup(comm, setup)
        name = f"{setup.dataset.path.resolve().name}-{config.model.name}"
        made = folder or make_folder(comm, lambda: RunFolder.create(config.run, name=name))
        folder = claims.enter_context(_claimed(comm, made))
        folder.count_shown(shown)
        folder.update(launch=launch_of(config))
        folder.keep_encoder(setup.dataset.path)
        return _run(setup.in_folder(folder.path), folder, start, heartbeat, interrupt)


def _decide(config: Config, where: Path, ranks: Ranks, hidden: Collection[str]) -> tuple[Setup, Start | None]:
    dataset = PackedDataset.open(config.data, verify="sizes", hidden=hidden)
    paths = {"data": str(dataset.path.resolve())}
    if config.from_run is not None:
        paths["from_run"] = str(Path(config.from_run).resolve())
    setup = Setup.decide(config.model_copy(update=paths), dataset, where, ranks=ranks)
    return setup, start_of(setup)


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
    *("train.threads", "train.epochs", "train.max_steps", "train.nonfinite", "calibration.method"),
    *("calibration.negatives_kept", "checkpoint.every", "checkpoint.keep_last", "data", "memory", "parallel"),
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
    comm = heartbeat.comm
    found = on_every_rank(comm, lambda: RunFolder.open(path))
    with _claimed(comm, found) as folder:
        # What it says may have changed until it was claimed.
        folder.record = on_every_rank(comm, lambda: RunFolder.open(folder.path).record)
        if folder.record.status == "interrupted" and everyone(comm, was_restarted())[0]:
            return folder  # it was asked to stop, and torchrun takes that for a failure
        config = on_every_rank(comm, lambda: _resumed_config(folder, overrides))
        if folder.record.status == "finished" and not overrides:
            return folder
        newest = _newest_checkpoint(folder, comm)
        if comm.ranks.local_rank == 0:
            remove_left_rows(folder)  # the run may go on with its rows elsewhere, and nobody would look there again

        def decide() -> tuple[Setup, Start | None]:
            if not is_taken(Path(config.data) / MANIFEST):
                raise ValueError(
                    f"the run's dataset is not at {config.data} (data): if it has moved, continue with: "
                    f"{resume_command(folder.path)} --set data=FOLDER"
                )
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
    return config


def remove_left_rows(folder: RunFolder) -> list[Path]:
    """Removes rows on disk that killed processes left where the run's config says; returns the folders.

    Rows of other runs go too, as for every process that lays rows there, but never rows of a living process.
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
    setup: Setup, folder: RunFolder, found: Path | Start | None, heartbeat: Heartbeat, interrupt: Interrupt
) -> RunFolder:
    """Builds, trains and finishes what was decided, from the checkpoint `found` on; otherwise from the first
    step, with the weights of another run or, if None, with random ones."""
    heartbeat.cure, heartbeat.last_words = how_to_go_on(folder.path), folder.fail
    with _surroundings(setup, folder, interrupt) as progress:
        training = Training(setup, folder, interrupt, progress, heartbeat.comm)
        heartbeat.step = lambda: training.state.step
        with closing(training):
            training.loop_parts += parts_of(training)
            _begin(training, found)
            training.loop(training.batches())
            _end(training)
    return folder


@contextmanager
def _surroundings(setup: Setup, folder: RunFolder, interrupt: Interrupt) -> Iterator[ProgressLine]:
    """Inside the block threads are as the config says, signals are noted, and a failure says how to go on."""
    full = explain_full_disk(
        folder.path, "training", "The checkpoints there are kept.", f"continue with: {resume_command(folder.path)}"
    )
    team, progress = threads(setup.config.train.threads, ranks=setup.ranks), ProgressLine(quiet=interrupt.quiet)
    # `full` is outermost: on a full disk the folder cannot record the failure either.
    with full, folder, _explain_failure(setup, folder), team, interrupt, progress:
        yield progress


def _begin(training: Training, found: Path | Start | None) -> None:
    """Takes up what was found, and says and records what was decided."""
    if isinstance(found, Start):
        with training.aside():
            found.load(training.parts)
    elif found is not None:
        restore(training, found)
    config, kept = training.config, training.config.calibration.negatives_kept
    labels = [label.name for label in training.setup.dataset.info.labels]
    judged: dict[str, object] = {"objective": config.model.objective, "metrics_by": config.metrics.by}
    judged |= {"labels": labels} if len(labels) > 1 else {}
    training.folder.update(**judged, negatives_kept=None if kept == 1 else kept)  # on all ranks, which check metrics
    if training.writes_files:
        say_what_was_decided(training)
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
        for part in training.loop_parts:
            part.at_end()
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
