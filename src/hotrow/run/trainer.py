"""Training: one step on one screen, and the loop of a run.

`train_step` takes one step with the parts that build.py builds. `Training` takes step after step; its loop parts do all
else (meters.py, parts.py), each at the moment that the name of a method says. The result of a run depends only on its
config, its dataset and its seed. Runs start and resume in runs.py.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeAlias

from torch import Tensor

from hotrow.base.progress import ProgressLine
from hotrow.batch import Batch
from hotrow.hot.turns import Turns
from hotrow.kernels import ops
from hotrow.objectives.objective import Metrics
from hotrow.objectives.several import for_labels
from hotrow.optim import clip_grad_norm_, nonfinite_gradient, nonfinite_parameter_gradient
from hotrow.parallel.communicator import Communicator
from hotrow.placement.lookahead import lookahead
from hotrow.placement.tiers import Tiers
from hotrow.run.build import Parts, build, look_up
from hotrow.run.evaluate import evaluate
from hotrow.run.folder import RunFolder, resume_command
from hotrow.run.interrupt import Interrupt
from hotrow.run.meters import HotMeter, LoopPart, Notice, Session, StepClock, merged, meters_of_rows
from hotrow.run.micro import backward, cut, nonfinite_inputs
from hotrow.run.record import ALL_DONE, State
from hotrow.run.selection import losses_of_parts
from hotrow.run.storage import close_tiers
from hotrow.run.wear import WriteMeter, checkpoint_bytes
from hotrow.run.wire import WireMeter
from hotrow.setup.setup import Setup, is_selection

Batches: TypeAlias = Generator[Batch, None, None]
MAX_SKIPPED = 100
"""A run ends after this many skipped steps in a row: weights that have overflowed do not recover."""
TURN_BATCHES = 16
"""Batches of EVAL_BATCH_SIZE, 65,536 validation rows, give the loss that `hot.schedule` fae follows: its standard error
is then below a hundredth, and a look takes little of a phase."""


class NonFiniteError(ValueError):
    """Raised if a step met NaN or infinity. The step changed nothing; the text says where the value was."""


def train_step(parts: Parts, batch: Batch, step: int, clock: StepClock) -> Tensor:
    """Takes step number `step` (from 0) on `batch`; returns the mean loss before the update, 0-dim.

    If ranks train together, each calls it with its part of the batch, and all return the same loss.
    Raises NonFiniteError if the loss or a gradient is NaN or infinite; no weight and no row has changed then.
    """
    parts.schedule.apply(step)
    parts.dense_optimizer.zero_grad()
    parts.sparse_optimizer.zero_grad()
    batch = cut(batch, parts.ranks)
    rows = look_up(parts.model, parts.embedding, batch.sparse)
    clock.lap("lookup")
    with parts.dense.arithmetic():
        loss = backward(parts, batch, rows, step)
    check_finite(parts, batch, loss)
    clip(parts)
    clock.lap("dense")
    try:
        parts.sparse_optimizer.step()
    finally:
        parts.exchange.finish()  # the dense gradients of other ranks arrive while rows are updated
    clock.lap("update")
    parts.dense_optimizer.step()
    ops.flush_denormals(own for group in parts.dense_optimizer.param_groups for own in group["params"])
    clock.lap("dense")
    return loss


def check_finite(parts: Parts, batch: Batch, loss: Tensor) -> None:
    """Raises NonFiniteError if `loss` or a gradient is not finite, naming the first of the model and of the tables."""
    alone = parts.ranks.size == 1
    of_rows = nonfinite_gradient(parts.embedding) if alone else parts.exchange.found
    weights = (own for group in parts.dense_optimizer.param_groups for own in group["params"])
    is_fine = ops.all_finite([own.grad for own in weights if own.grad is not None])  # without a walk over all modules
    found = [None if is_fine else nonfinite_parameter_gradient(parts.model), of_rows]
    if math.isfinite(float(loss)) and not any(found):
        return
    if alone:
        found += nonfinite_inputs(batch)
    raise NonFiniteError("; ".join([f"the loss is {float(loss)}", *(text for text in found if text)]))


def clip(parts: Parts) -> None:
    """Scales all gradients down to `parts.clip_norm`. Raises NonFiniteError if their norm overflows."""
    if parts.clip_norm is not None:
        norm = clip_grad_norm_([parts.model, parts.embedding], parts.clip_norm)
        if not math.isfinite(norm):
            raise NonFiniteError(f"the norm of the gradients, which are finite, is {float(norm)}")


class Training:
    """The loop of one run. `loop_parts` act in their order after each step; its caller adds those of parts.py."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        interrupt: Interrupt,
        progress: ProgressLine,
        comm: Communicator | None = None,
    ) -> None:
        config, dataset, options = setup.config, setup.dataset, setup.config.train
        self.setup, self.config, self.dataset, self.folder, self.progress = setup, config, dataset, folder, progress
        self.comm = (comm or Communicator(setup.ranks)).with_micro_batches(setup.ranks.micro_batches)
        several = self.comm.size > 1
        self.turns = Turns(
            config.hot,
            dataset,
            setup.hot,
            batch_size=options.batch_size,
            shuffle_seed=options.seed if options.shuffle else None,
            part=self.comm.ranks.samples if several else None,
            micro_batches=self.comm.ranks.micro_batches,
        )
        self.steps_per_epoch = self.turns.order.num_batches
        self.num_steps = min(options.epochs * self.steps_per_epoch, options.max_steps or math.inf)
        self.session = Session(self.steps_per_epoch)
        self.parts = build(setup, self.comm, stop=lambda: interrupt.signal)
        embedding = self.parts.embedding
        self.turns.attach(embedding, self.parts.sparse_optimizer, device=setup.copies_on)
        most = checkpoint_bytes(config, setup.tables, self.parts.model, with_ids=setup.in_tiers or several)
        wire = [WireMeter(self.comm, self.session, wire_dtype=config.parallel.wire_dtype)] if several else []
        self.clock = StepClock(self.session, wire[0].lap if wire else None)
        tiers = embedding.placement.find(Tiers)
        self.writes = WriteMeter(tiers, config.write_budget, self.session, checkpoint_bytes=most)
        self.loop_parts: list[LoopPart] = [
            self.clock,
            HotMeter(self.turns, self.session, folder.measurements, self.parts.objective.loss_figure),
            self.writes,
            *meters_of_rows(embedding, self.session, drive_written_bytes=self.writes.total_bytes),
            *wire,
            *([] if self.parts.graph is None else [self.parts.graph]),
        ]

    @property
    def state(self) -> State:
        return self.session.state

    @property
    def writes_files(self) -> bool:
        """Whether this is the rank that writes the run's folder."""
        return self.comm.rank == 0

    @property
    def signal(self) -> int | None:
        """The signal by which the run is to stop; the same on all ranks, as the last step told them."""
        return self.parts.exchange.stop

    def loop(self, batches: Batches) -> None:
        """Trains on batches until the run has ended, a signal asks to stop, or there are no more."""
        with closing(batches):
            for batch in batches:
                self.clock.lap("data")
                try:
                    loss: float | None = float(train_step(self.parts, batch, self.state.step, self.clock))
                except NonFiniteError as error:
                    self._skip(str(error))
                    loss = None
                self._count(loss)
                for part in self.loop_parts:
                    self.tell(part.after_step(batch, loss) or ())
                if self.signal is not None or self.state.ended is not None:
                    break
                self.clock.lap(None)
        self.turns.close()

    def batches(self) -> Batches:
        """The batches from where the run stands to its end. Between phases, hot rows are swapped."""
        while self.state.ended is None:
            yield from self.phase()
            if swap := self.turns.end(self.parts.objective.loss_figure, self._turn_loss):
                self.folder.measure("swap", step=self.state.step, epoch=self.epochs, **swap)
                if swap["rate"] != swap["next_rate"]:
                    rates = f"{swap['next_rate']:g} % of a class, not {swap['rate']:g}"
                    self.say(f"step {self.state.step}: turns of {rates}")

    def phase(self) -> Batches:
        """The rest of a phase, or without a hot schedule of an epoch; rows of the next batches are read ahead."""
        self.clock.lap(None)
        batches, placement = self.turns.batches(self.state.epoch), self.parts.embedding.placement
        depth = self.config.tiers.lookahead if placement.looks_ahead and not self.turns.on_copies else 0
        yield from lookahead(batches, self.parts.embedding, depth=depth)

    def _turn_loss(self) -> float:
        """The loss on the validation rows by which a hot schedule sets its rate."""
        return float(self.evaluated("val", num_batches=TURN_BATCHES)[self.parts.objective.loss_figure])

    def _count(self, loss: float | None) -> None:
        """Counts a step; loss: None if it was skipped."""
        self.turns.count()
        state = self.state
        state.step, state.batch = state.step + 1, state.batch + 1
        if state.batch == self.steps_per_epoch:
            state.epoch, state.batch = state.epoch + 1, 0
        if loss is not None:
            state.window_loss, state.window_steps = state.window_loss + loss, state.window_steps + 1
            state.skipped_in_a_row = 0
        if state.step >= self.num_steps:
            state.ended = ALL_DONE

    def _skip(self, found: str) -> None:
        """Drops the gradients of a step that met NaN or infinity, and counts it. Raises ValueError if `train.nonfinite`
        forbids that, or after too many in a row.
        """
        state, optimizer = self.state, self.config.optimizer
        text = (
            f"{found} (step {state.step + 1}, epoch {state.epoch + 1}, batch {state.batch + 1}); this step changed "
            "nothing"
        )
        cure = (
            f"lower optimizer.dense.lr ({optimizer.dense.lr}) and optimizer.sparse.lr ({optimizer.sparse.lr}), or "
            f"raise optimizer.schedule.warmup_steps ({optimizer.schedule.warmup_steps}), and start again"
        )
        if self.config.train.nonfinite == "raise":
            left_out = f"{resume_command(self.folder.path)} --set train.nonfinite=skip"
            raise ValueError(f"{text}. Training diverged: {cure}; or leave such steps out: {left_out}")
        if state.skipped_in_a_row == MAX_SKIPPED:
            raise ValueError(
                f"{text}, and the {MAX_SKIPPED} steps before it were skipped too. Training diverged: {cure}"
            )
        self.parts.dense_optimizer.zero_grad()
        self.parts.sparse_optimizer.zero_grad()
        state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
        self.folder.warn("nonfinite_step_skipped", text, count=state.skipped)

    # ---- what loop parts share

    def warn(self, code: str, text: str, *, count: int | None = None) -> None:
        """Shows a warning, and counts it in run.json. count: as for `RunFolder.warn`."""
        self.folder.warn(code, text, count=count)
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """Tells the user, and log.txt."""
        self.progress.say(text)
        self.folder.log(text)

    def tell(self, notices: Iterable[Notice]) -> None:
        for text, code, times in notices:
            if code is None:
                self.say(text)
            else:
                self.folder.warn(code, text, count=times)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the block nothing counts as training, and the tables are complete."""
        with ExitStack() as stack:
            for part in self.loop_parts:
                stack.enter_context(part.aside())
            yield

    def evaluated(
        self, split: str, *, num_batches: int | None = None, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        """The metrics of a split. num_batches, metrics: as for `evaluate`."""
        parts = self.parts
        with self.aside():
            return evaluate(
                parts.embedding,
                parts.model,
                self.dataset.split(split),
                parts.objective,
                num_batches=num_batches,
                dense=parts.dense,
                comm=self.comm,
                metrics=metrics,
                items=parts.items,
            )

    def score(self, split: str, *, step: int | None = None, metrics: Metrics | None = None) -> dict[str, Any]:
        """Evaluates the model on `split`; says and records the result. step: the step of its weights, if not the last
        one. metrics: as for `evaluate`."""
        step = self.state.step if step is None else step
        objective = self.parts.objective
        metrics = objective.metrics() if metrics is None else metrics
        result = self.evaluated(split, metrics=metrics)
        epoch = round(step / self.steps_per_epoch, 4)
        has_losses = split == "val" and is_selection(self.folder.path) and not objective.retrieves
        names = [label.name for label in self.dataset.info.labels]
        plain = for_labels(self.config.model.trained_for, names)  # these losses are compared as metrics are
        losses = {"losses": losses_of_parts(metrics, plain)} if has_losses else {}
        self.folder.measure("eval", step=step, split=split, epoch=epoch, **result, **losses)
        self.say(f"{split} at step {step}: {objective.line(result)}")
        return result

    @property
    def monitor(self) -> str:
        """The metric that decides which weights are best."""
        return self.config.train.monitor or self.parts.objective.monitors[0]

    @property
    def epochs(self) -> float:
        return round(self.state.step / self.steps_per_epoch, 4)

    def has(self, split: str) -> bool:
        """Whether the dataset has rows in a split."""
        return split in self.dataset.splits and self.dataset.split(split).num_rows > 0

    def figures(self) -> dict[str, Any]:
        """How far and how fast the run came, for run.json."""
        state = self.state
        return {
            "steps": state.step,
            "steps_skipped": state.skipped,
            "epochs": self.epochs,
            "best_step": state.best_step if state.best else None,
            "monitor": self.monitor,
            **merged(part.record() for part in self.loop_parts),
        }

    def close(self) -> None:
        """Removes the files of tables in tiers, and counts what only now is known of them."""
        last = [notice for part in self.loop_parts for notice in part.close()]
        # First: on a full disk this makes room for what is to be said.
        close_tiers(self.parts.embedding, self.folder.path)
        self.tell(last)
        self.loop_parts.clear()  # they refer to the loop: now the memory of the tables is free as soon as it is left
