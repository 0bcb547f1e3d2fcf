"""What a run does between its steps: it says how far it is, evaluates, stops early, and keeps checkpoints.

Each is a `LoopPart` (meters.py); `parts_of` puts those of a run in their order. ending.py has what comes at the end.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from hotrow.base.progress import TimeLeft, duration, rate
from hotrow.batch import Batch
from hotrow.config.schema import interval_steps, is_due
from hotrow.kernels import ops
from hotrow.parallel.agreement import MAX_NAMED, check_still_same, everyone
from hotrow.run.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from hotrow.run.checkpoint_files import CURE, MANIFEST, read_manifest
from hotrow.run.ending import finish
from hotrow.run.exact import ADVICE, ADVICE_FOR_BFLOAT16, CODE, FirstPart
from hotrow.run.meters import LoopPart, Told, merged, warning
from hotrow.run.record import ALL_DONE, Extra, State, read_extra
from hotrow.run.trainer import Training


def parts_of(training: Training) -> list[LoopPart]:
    """What the run does between steps and at its end, in this order."""
    patience = training.config.train.early_stopping
    stopping = [] if patience is None else [EarlyStopping(training, patience)]
    return [Exactness(training), Log(training), Evaluation(training), *stopping, Checkpoints(training)]


class Exactness(LoopPart):
    """After the first step, warns if the model's bits depend on where a micro-batch lies."""

    def __init__(self, training: Training) -> None:
        in_parts = training.comm.ranks.micro_batches > 1 and training.parts.dense.device.type == "cpu"
        self._training, self._first = training, FirstPart(training.parts.model) if in_parts else None

    @override
    def after_step(self, batch: Batch, loss: float | None) -> Told:
        """Collective at the first step."""
        if self._first is None:
            return None
        training, first, self._first = self._training, self._first, None
        with training.aside():
            each = everyone(training.comm, first.differing(training.parts.dense))
        if not (found := list(dict.fromkeys(chain(*each)))):
            return None
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        advice = ADVICE if training.config.train.dense_dtype == "fp32" else ADVICE_FOR_BFLOAT16
        text = (
            f"model {training.config.model.name}: {', '.join(found[:MAX_NAMED])}{more} has other bits at another "
            f"address or on another number of threads; {advice}"
        )
        return warning(text, CODE, 1)


class Log(LoopPart):
    """The progress line, and a `train` line in metrics.jsonl every `train.log_every` steps."""

    def __init__(self, training: Training) -> None:
        self._training, self._left = training, TimeLeft()

    @override
    def after_step(self, batch: Batch, loss: float | None) -> None:
        training, state = self._training, self._training.state
        training.progress.update(self._progress)
        if state.step % training.config.train.log_every == 0 or state.ended:
            self._log_window()

    def _log_window(self) -> None:
        training, state = self._training, self._training.state
        loss = state.window_loss / state.window_steps if state.window_steps else None
        optimizers = {"dense": training.parts.dense_optimizer, "sparse": training.parts.sparse_optimizer}
        lr = {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
        figures = merged(part.window() for part in training.loop_parts)
        skipped = {"steps_skipped": state.skipped} if state.skipped else {}
        training.folder.measure("train", step=state.step, epoch=training.epochs, loss=loss, lr=lr, **figures, **skipped)
        state.window_loss, state.window_steps = 0.0, 0

    def _progress(self) -> str:
        """The progress line: how far and how fast, in 80 columns; then where the time goes, and the epoch."""
        training, state = self._training, self._training.state
        shares = ", ".join(own for part in training.loop_parts if (own := part.line()))
        remaining_s = self._left.seconds(state.step, training.num_steps, state.train_s)
        left = "" if remaining_s is None else f" {duration(remaining_s)} left"
        loss = f" loss {state.window_loss / state.window_steps:.4f}" if state.window_steps else ""
        name, measure = next(iter(training.parts.objective.measures.items()))
        value = (state.val or {}).get(name)
        val = "" if value is None else f" {measure.title} {value:.4f}"
        step = f"{state.step / training.num_steps:.0%} step {state.step}/{training.num_steps}"
        speed = f"{rate(state.num_samples / state.train_s)}/s"
        skipped = f", {state.skipped} steps skipped" if state.skipped else ""
        epoch = f"epoch {training.epochs:.2f}/{training.config.train.epochs}{training.turns.line()}{skipped}"
        return f"{step} {speed}{loss}{val}{left}\n{shares}\n{epoch}"


def _due(state: State, every: float | None) -> bool:
    return is_due(state.step, every) or (every is not None and state.ended is not None)


class Evaluation(LoopPart):
    """Scores the validation split every `train.eval_every`, remembers the best scores, and has the last word."""

    def __init__(self, training: Training) -> None:
        self._training, options = training, training.config.train
        self._every = interval_steps(options.eval_every, steps_per_epoch=training.steps_per_epoch)
        if self._every is not None and not training.has("val"):
            text = f"{training.dataset.path} has no rows in a split 'val': nothing is evaluated"
            training.folder.warn("no_validation", text)
            self._every = None

    @override
    def after_step(self, batch: Batch, loss: float | None) -> None:
        if _due(self._training.state, self._every):
            is_best = self._is_best()
            for part in self._training.loop_parts:
                part.after_eval(is_best=is_best)

    @override
    def at_end(self) -> None:
        finish(self._training)

    def _is_best(self) -> bool:
        """Evaluates; returns whether the weights are the best so far by `train.monitor`."""
        training, state, monitor = self._training, self._training.state, self._training.monitor
        state.val, measure = training.score("val"), training.parts.objective.measures[monitor]
        if state.val["undefined"] is not None:
            self._without_metrics(state.val["undefined"])
        if state.val[monitor] is None:
            return False
        if best := state.best is None or measure.sign * state.val[monitor] > measure.sign * state.best[monitor]:
            state.best, state.best_step, state.evals_since_best = state.val, state.step, 0
        else:
            state.evals_since_best += 1
        return best

    def _without_metrics(self, reason: str) -> None:
        training, state = self._training, self._training.state
        objective, monitor = training.parts.objective, training.monitor
        missing = [name for name in objective.measures if state.val and state.val[name] is None]
        first = missing[0] if missing else "loss"  # of rows whose items are all unknown, recall is 0 and no loss known
        title = objective.measures[first].title if missing else objective.loss_title
        text = f"the validation split has no {title}: {reason}"
        if training.config.train.early_stopping is not None and monitor in missing:
            others = [name for name in objective.monitors if name not in missing]
            cure = f"set train.monitor to {others[0]}" if others else "set it to null"
            raise ValueError(f"{text}; train.early_stopping needs it: {cure}, or split the data differently")
        training.folder.warn(f"no_validation_{first}", text)


class EarlyStopping(LoopPart):
    """Ends the run after `patience` evaluations in a row that were not the best."""

    def __init__(self, training: Training, patience: int) -> None:
        self._training, self._patience = training, patience

    @override
    def after_eval(self, *, is_best: bool) -> None:
        state, monitor = self._training.state, self._training.monitor
        if state.evals_since_best >= self._patience and state.ended is None:
            title = self._training.parts.objective.measures[monitor].title
            state.ended = f"no better validation {title} in {self._patience} evaluations"


class Checkpoints(LoopPart):
    """Saves every `checkpoint.every`, the best weights, and those that the run ends or stops with; compares ranks."""

    def __init__(self, training: Training) -> None:
        self._training, config = training, training.config
        self._every = interval_steps(config.checkpoint.every, steps_per_epoch=training.steps_per_epoch)
        self._is_best = False

    @override
    def after_eval(self, *, is_best: bool) -> None:
        self._is_best = is_best

    @override
    def after_step(self, batch: Batch, loss: float | None) -> None:
        training, state = self._training, self._training.state
        self._check_ranks()
        if self._is_best or training.signal is not None or state.ended or _due(state, self._every):
            self._is_best = False
            self._save()

    def _check_ranks(self, *, now: bool = False) -> None:
        """Raises ValueError if ranks went apart. `now`, before a checkpoint: it is then of one model."""
        training, state = self._training, self._training.state
        weights = training.parts.model.parameters()
        check_still_same(training.comm, state.step, (state.epoch, state.batch), weights, now=now)

    def _save(self) -> None:
        """Saves a checkpoint, and removes older ones as the config says."""
        training, state, config = self._training, self._training.state, self._training.config
        path = training.folder.checkpoints / f"step-{state.step}"
        if not everyone(training.comm, path.exists())[0]:
            self._check_ranks(now=True)
            training.writes.total_bytes()
            state.turns = training.turns.state()
            extra = Extra(
                state=state,
                dataset=training.dataset.checksum,
                tables=tuple(training.parts.embedding.tables),
                num_dense=len(training.dataset.info.dense),
                config=config.model_dump(mode="json"),
                **_surroundings(training),
            )
            with training.aside(), training.writes.saving(path) if training.writes_files else nullcontext():
                save_checkpoint(path, training.parts.with_state(), extra=asdict(extra))
        keep = state.best_step if state.best else None
        if training.writes_files:
            prune_checkpoints(training.folder.checkpoints, keep_last=config.checkpoint.keep_last, keep=keep)


def _surroundings(training: Training) -> dict[str, Any]:
    """What of a session the last bits of sums in dense layers may depend on."""
    isa, device = ops.isa_of(training.config.train.dense_dtype), training.parts.dense.device.type
    return {"threads": torch.get_num_threads(), "isa": isa, "device": device}


def restore(training: Training, path: Path) -> None:
    """Continues from the checkpoint at `path`; a run that had ended goes on if there are more steps to do now.

    Raises ValueError if the dataset is another one. Another number of threads or another ISA is a counted warning,
    because sums in dense layers may then differ in their last bits.
    """
    manifest = read_manifest(path)
    extra = read_extra(path, manifest)
    where, state = f"{path / MANIFEST}: extra", extra.state
    if extra.dataset != training.dataset.checksum:
        raise ValueError(f"{training.dataset.path} is not the dataset {path} was trained on: its checksum differs")
    _check_metrics(training, state, where)
    if state.turns is None or (state.best is not None and state.best[training.monitor] is None):
        raise ValueError(f"{where}: state.turns, or the {training.monitor} of state.best, is null; {CURE}")
    with training.aside():
        load_checkpoint(path, training.parts.with_state())
    for name, now in _surroundings(training).items():
        if (then := getattr(extra, name)) != now:
            training.folder.warn(
                f"resumed_with_other_{name}",
                f"checkpoint {path} was written with {name} {then}, this session has {now}: "
                "results agree within docs/numerics.md, not to the bit",
            )
    try:
        training.turns.restore(state.turns)
    except ValueError as error:
        raise ValueError(f"{where}: state.turns: {error}; {CURE}") from None
    # The checkpoint was not yet counted when its state was saved.
    state.drive_written_bytes += manifest.written_bytes
    training.session.resume_at(state)
    if state.ended == ALL_DONE and state.step < training.num_steps:
        state.ended = None
    elif state.ended is None and state.step == training.num_steps:
        state.ended = ALL_DONE
    elif state.ended is None and state.step > training.num_steps:
        raise ValueError(
            f"the run is at step {state.step}, past the {training.num_steps} steps that train.epochs and "
            f"train.max_steps now ask for: ask for at least {state.step} steps, which are "
            f"{math.ceil(state.step / training.steps_per_epoch)} epochs or a part of them"
        )


def _check_metrics(training: Training, state: State, where: str) -> None:
    """Raises ValueError if what a checkpoint says of evaluations are not the metrics of this objective."""
    for name, figures in {"val": state.val, "best": state.best}.items():
        try:
            if figures is not None:
                training.parts.objective.check(figures)
        except ValueError as error:
            raise ValueError(f"{where}: state.{name}: {error}; {CURE}") from None
