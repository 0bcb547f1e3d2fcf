"""Training: one step on one screen, and the loop of a run.

`train_step` takes one step with the parts that build.py builds. `Training` takes step after step and does what is due
between them. The result of a run depends only on its config, its dataset and its seed. Runs start and resume in
runs.py; figures are in meters.py. `Interrupt` notes the signals that end a run in good order.
"""

from __future__ import annotations

import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hotrow.base.progress import ProgressLine, TimeLeft, duration, rate
from hotrow.batch import Batch
from hotrow.config.schema import interval_steps, is_due
from hotrow.data.packed.groups import Groups
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import Split
from hotrow.embedding import EmbeddingCollection
from hotrow.hot.turns import Turns
from hotrow.kernels import ops
from hotrow.models.layers import Network
from hotrow.objectives.calibration import Calibration, fitted
from hotrow.objectives.objective import Metrics, Objective
from hotrow.objectives.several import for_labels
from hotrow.optim import clip_grad_norm_, nonfinite_gradient, nonfinite_parameter_gradient
from hotrow.parallel.agreement import MAX_NAMED, StillSame, everyone
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import DenseExchange, OverRanks
from hotrow.placement.lookahead import lookahead
from hotrow.placement.tiers import Tiers
from hotrow.run.build import Parts, build, look_up
from hotrow.run.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from hotrow.run.checkpoint_files import CURE, MANIFEST, read_manifest
from hotrow.run.exact import ADVICE, ADVICE_FOR_BFLOAT16, CODE, FirstPart
from hotrow.run.folder import RunFolder, resume_command
from hotrow.run.items import MAX_JUDGED, Items, Places
from hotrow.run.meters import HotMeter, Meter, Notice, Session, StepClock, merged, meters_of_rows
from hotrow.run.micro import backward, cut
from hotrow.run.record import ALL_DONE, Extra, State, read_extra
from hotrow.run.scores import gains, scores_of, spread
from hotrow.run.selection import losses_of_parts
from hotrow.run.start import Start
from hotrow.run.storage import close_tiers
from hotrow.run.together import nonfinite_inputs
from hotrow.run.usual import usual_of
from hotrow.run.wear import WriteMeter, checkpoint_bytes
from hotrow.run.wire import WireMeter
from hotrow.setup.beside import EVAL_BATCH_SIZE
from hotrow.setup.device import DenseDevice
from hotrow.setup.setup import SELECTION, Setup

MakeMeter: TypeAlias = Callable[[Session], Meter]
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
    if parts.mean is not None:
        parts.mean.follow(step)
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


@torch.no_grad()
def evaluate(
    embedding: EmbeddingCollection,
    model: Network,
    split: Split,
    objective: Objective,
    *,
    num_batches: int | None = None,
    dense: DenseDevice | None = None,
    comm: Communicator | None = None,
    metrics: Metrics | None = None,
    items: Items | None = None,
) -> dict[str, Any]:
    """Returns the metrics of `objective` over a split; an undefined metric is None.

    num_batches: how many batches of EVAL_BATCH_SIZE to evaluate, from the first; if None, all. dense: where the model
    computes; if None, on the CPU. comm: the ranks that share the tables; each scores whole batches, and all return what
    one process returns. metrics: empty; holds the outputs, labels and weights afterwards, for who needs
    them. items: what is found, if the model finds items; outputs in `metrics` are then the places of the rows' items.
    """
    dense, comm = dense or DenseDevice(), comm or Communicator()
    metrics = objective.metrics() if metrics is None else metrics
    places = None if items is None else items.places(embedding, model, dense)
    for scored in islice(_scored(embedding, model, split, objective.by, dense, comm, places), num_batches):
        metrics.update(**scored)
    return metrics.figures()


def _scored(
    embedding: EmbeddingCollection,
    model: Network,
    split: Split,
    by: str | None,
    dense: DenseDevice,
    comm: Communicator,
    places: Places | None,
) -> Iterator[dict[str, Tensor]]:
    """Yields outputs, labels and, if there are any, weights and groups by the feature `by`, of batch after batch of
    EVAL_BATCH_SIZE, on every rank.

    Of R batches in a row, each rank scores one, because a product's bits may depend on the rows it has.
    """
    first, groups = comm.rank * EVAL_BATCH_SIZE, None if by is None else Groups(split.info, by)

    def own(num_samples: int) -> tuple[int, int]:
        return min(first, num_samples), min(first + EVAL_BATCH_SIZE, num_samples)

    only = None if places is None else spread(split.num_rows, MAX_JUDGED)
    for batch in Loader(split, comm.size * EVAL_BATCH_SIZE, shuffle_seed=None, part=own, only=only).epoch(0):
        rows = look_up(model, embedding, batch.sparse)
        outputs_B = dense.outputs(model, batch.dense, rows) if len(batch) else batch.label
        outputs_B = outputs_B.cpu() if places is None or not len(batch) else places(outputs_B, batch)
        del rows  # before those of the next batch come beside them
        columns = {"outputs": outputs_B.view(len(batch), batch.labels.shape[1]), "labels": batch.labels}
        columns |= {} if batch.weight is None else {"weights": batch.weight[:, None]}
        # A float64 is as exact as float32 and row numbers.
        columns |= {} if groups is None else {"groups": groups.of(batch).double()[:, None]}
        widths = [column.shape[1] for column in columns.values()]
        for scored in comm.gather(torch.cat([*columns.values()], dim=1).flatten(), purpose="evaluation"):
            if len(scored):
                parts = torch.split(scored.view(-1, sum(widths)), widths, dim=1)
                yield dict(zip(columns, parts, strict=True))


class Interrupt:
    """A block in which the first of `SIGNALS` is only noted in `signal`; the next one acts as usual.

    Outside the main thread signals cannot be caught, and act as usual. quiet: say nothing when one comes. until_s: from
    this `time.monotonic()` on it is as if TIME_IS_OVER had come.
    """

    TIME_IS_OVER = signal.SIGUSR1
    """Schedulers of clusters send it some minutes before the time of a job is over."""
    SIGNALS = (signal.SIGINT, signal.SIGTERM, TIME_IS_OVER)

    def __init__(self, *, quiet: bool = False, until_s: float = math.inf) -> None:
        self._noted: int | None = None
        self.quiet, self._until_s = quiet, until_s
        self._before: dict[int, Any] = {}

    @property
    def signal(self) -> int | None:
        """The signal by which the run is to stop."""
        if self._noted is None and time.monotonic() >= self._until_s:
            self._noted = self.TIME_IS_OVER
        return self._noted

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = self._noted or number
        self._restore()
        if not self.quiet:
            print("\nfinishing this step and saving a checkpoint; a second signal aborts", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()


class Training:
    """The loop of one run: steps, and after each what is due (a metrics line, an evaluation, a checkpoint)."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        interrupt: Interrupt,
        progress: ProgressLine,
        also: MakeMeter | None = None,
        comm: Communicator | None = None,
    ) -> None:
        config, dataset, options = setup.config, setup.dataset, setup.config.train
        self.setup, self.config, self.dataset, self.folder = setup, config, dataset, folder
        self.comm = comm or Communicator(setup.ranks)
        self.progress, self._left = progress, TimeLeft()
        shuffle_seed = options.seed if options.shuffle else None
        self.turns = Turns(
            config.hot,
            dataset,
            setup.hot,
            batch_size=options.batch_size,
            shuffle_seed=shuffle_seed,
            part=None if self.comm.size == 1 else self.comm.ranks.samples,
            micro_batches=self.comm.ranks.micro_batches,
        )
        self.steps_per_epoch = self.turns.order.num_batches
        self.session = Session(self.steps_per_epoch)
        self.num_steps = min(options.epochs * self.steps_per_epoch, options.max_steps or math.inf)
        self.eval_steps = interval_steps(options.eval_every, steps_per_epoch=self.steps_per_epoch)
        self.save_steps = interval_steps(config.checkpoint.every, steps_per_epoch=self.steps_per_epoch)
        self._still_same = StillSame(self.comm)
        self.parts = build(setup, self.comm)
        in_parts = self.comm.ranks.micro_batches > 1 and self.parts.dense.device.type == "cpu"
        self._first_part = FirstPart(self.parts.model) if in_parts else None
        self.parts.exchange = DenseExchange(self.comm.ranks, lambda: interrupt.signal)
        if self.comm.size > 1:
            length = sum(weight.numel() for weight in self.parts.model.parameters() if weight.requires_grad)
            self.parts.exchange = OverRanks(self.comm, lambda: interrupt.signal, length=length)
        self.turns.attach(self.parts.embedding, self.parts.sparse_optimizer, device=setup.copies_on)
        embedding = self.parts.embedding
        self.lookahead = config.tiers.lookahead if embedding.placement.looks_ahead else 0
        most = checkpoint_bytes(config, setup.tables, self.parts.model, with_ids=setup.in_tiers or bool(setup.shards))
        dtype = config.parallel.wire_dtype
        wire = [WireMeter(self.comm, self.session, wire_dtype=dtype)] if self.comm.size > 1 else []
        self.clock = StepClock(self.session, wire)
        tiers = embedding.placement.find(Tiers)
        self.writes = WriteMeter(tiers, config.write_budget, self.session, checkpoint_bytes=most)
        hot = HotMeter(self.turns, self.session, folder.measurements, self.parts.objective.loss_figure)
        self.meters: list[Meter] = [self.clock, hot, self.writes]
        self.meters += meters_of_rows(embedding, self.session, drive_written_bytes=self.writes.total_bytes)
        self.meters += wire
        self.meters += [] if self.parts.graph is None else [self.parts.graph]
        self.meters += [] if also is None else [also(self.session)]
        if not self._has("val"):
            self._without_validation()

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

    def _has(self, split: str) -> bool:
        return split in self.dataset.splits and self.dataset.split(split).num_rows > 0

    def _without_validation(self) -> None:
        if self.eval_steps is not None:
            self.folder.warn("no_validation", f"{self.dataset.path} has no rows in a split 'val': nothing is evaluated")
            self.eval_steps = None

    def loop(self) -> None:
        """Trains until the run has ended or a signal asks to stop; the state is then on disk."""
        while self._phase():
            if swap := self.turns.end(self.parts.objective.loss_figure, self._turn_loss):
                self.folder.measure("swap", step=self.state.step, epoch=self.epochs, **swap)
                if swap["rate"] != swap["next_rate"]:
                    rates = f"{swap['next_rate']:g} % of a class, not {swap['rate']:g}"
                    self.say(f"step {self.state.step}: turns of {rates}")
        self.turns.close()

    def warn(self, code: str, text: str, *, count: int | None = None) -> None:
        """Shows a warning, and counts it in run.json. count: as for `RunFolder.warn`."""
        self.folder.warn(code, text, count=count)
        self.say(f"warning: {text}")

    def _phase(self) -> bool:
        """Trains the rest of the phase (without a hot schedule: of the epoch); returns whether another may follow."""
        if self.state.ended is not None:
            return False
        self.clock.lap(None)
        batches = self.turns.batches(self.state.epoch)
        depth = 0 if self.turns.on_copies else self.lookahead
        for batch in lookahead(batches, self.parts.embedding, depth=depth):
            self.clock.lap("data")
            try:
                loss: float | None = float(train_step(self.parts, batch, self.state.step, self.clock))
            except NonFiniteError as error:
                self._skip(str(error))
                loss = None
            self._check_exact()
            self.turns.count()
            self._count(batch, loss)
            self._check_ranks()
            stop = self.signal is not None
            self._do_what_is_due(stop=stop)
            if stop or self.state.ended:
                return False
            self.clock.lap(None)
        return True

    def _check_ranks(self, *, now: bool = False) -> None:
        """Raises ValueError if ranks went apart. `now`, before a checkpoint: it is then of one model."""
        position = self.state.epoch, self.state.batch
        self._still_same.check(self.state.step, position, self.parts.model.parameters(), now=now)

    def _check_exact(self) -> None:
        """After the first step, warns if the model's bits depend on where a micro-batch lies. Collective."""
        if self._first_part is None:
            return
        first, self._first_part = self._first_part, None
        with self._aside():
            each = everyone(self.comm, first.differing(self.parts.dense))
        if found := list(dict.fromkeys(itertools.chain(*each))):
            more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            advice = ADVICE if self.config.train.dense_dtype == "fp32" else ADVICE_FOR_BFLOAT16
            text = (
                f"model {self.config.model.name}: {', '.join(found[:MAX_NAMED])}{more} has other bits at another "
                f"address or on another number of threads; {advice}"
            )
            self.warn(CODE, text, count=1)

    def _turn_loss(self) -> float:
        """Returns the loss on the validation rows by which a hot schedule sets its rate."""
        return float(self._evaluated("val", num_batches=TURN_BATCHES)[self.parts.objective.loss_figure])

    def _evaluated(
        self, split: str, *, num_batches: int | None = None, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        parts = self.parts
        with self._aside():
            return evaluate(
                parts.embedding,
                parts.scoring,
                self.dataset.split(split),
                parts.objective,
                num_batches=num_batches,
                dense=parts.dense,
                comm=self.comm,
                metrics=metrics,
                items=parts.items,
            )

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

    def _count(self, batch: Batch, loss: float | None) -> None:
        """Counts a step on `batch`; loss: None if the step was skipped."""
        state = self.state
        state.step, state.batch = state.step + 1, state.batch + 1
        if state.batch == self.steps_per_epoch:
            state.epoch, state.batch = state.epoch + 1, 0
        if loss is not None:
            state.window_loss, state.window_steps = state.window_loss + loss, state.window_steps + 1
            state.skipped_in_a_row = 0
        for meter in self.meters:
            meter.end_step(batch)
        if state.step >= self.num_steps:
            state.ended = ALL_DONE

    def _do_what_is_due(self, *, stop: bool) -> None:
        state = self.state
        self.progress.update(self._line)
        self._tell(notice for meter in self.meters for notice in meter.notices())
        if state.step % self.config.train.log_every == 0 or state.ended:
            self._log_window()
        best = self._due(self.eval_steps) and self._evaluate()
        if best or stop or state.ended or self._due(self.save_steps):
            self.save()

    def _tell(self, notices: Iterable[Notice]) -> None:
        for text, code, times in notices:
            if code is None:
                self.say(text)
            else:
                self.folder.warn(code, text, count=times)

    def _due(self, every: float | None) -> bool:
        return is_due(self.state.step, every) or (every is not None and self.state.ended is not None)

    def _log_window(self) -> None:
        state = self.state
        loss = state.window_loss / state.window_steps if state.window_steps else None
        lr = {
            "dense": self.parts.dense_optimizer.param_groups[0]["lr"],
            "sparse": self.parts.sparse_optimizer.param_groups[0]["lr"],
        }
        figures = merged(meter.window() for meter in self.meters)
        skipped = {"steps_skipped": state.skipped} if state.skipped else {}
        self.folder.measure("train", step=state.step, epoch=self.epochs, loss=loss, lr=lr, **figures, **skipped)
        state.window_loss, state.window_steps = 0.0, 0

    def _evaluate(self) -> bool:
        """Scores the validation split; returns whether this is the best so far and its checkpoint should be kept."""
        state = self.state
        state.val, monitor = self.score("val"), self.config.monitor
        measure = self.parts.objective.measures[monitor]
        if state.val["undefined"] is not None:
            self._without_metrics(state.val["undefined"])
        if state.val[monitor] is None:
            return False
        sign = measure.sign
        best = state.best is None or sign * state.val[monitor] > sign * state.best[monitor]
        if best:
            state.best, state.best_step, state.evals_since_best = state.val, state.step, 0
        else:
            state.evals_since_best += 1
        patience = self.config.train.early_stopping
        if patience is not None and state.evals_since_best >= patience and state.ended is None:
            state.ended = f"no better validation {measure.title} in {patience} evaluations"
        return best

    def _without_metrics(self, reason: str) -> None:
        objective, monitor = self.parts.objective, self.config.monitor
        missing = [name for name in objective.measures if self.state.val and self.state.val[name] is None]
        first = missing[0] if missing else "loss"  # of rows whose items are all unknown, recall is 0 and no loss known
        title = objective.measures[first].title if missing else objective.loss_title
        text = f"the validation split has no {title}: {reason}"
        if self.config.train.early_stopping is not None and monitor in missing:
            others = [name for name in objective.monitors if name not in missing]
            cure = f"set train.monitor to {others[0]}" if others else "set it to null"
            raise ValueError(f"{text}; train.early_stopping needs it: {cure}, or split the data differently")
        self.folder.warn(f"no_validation_{first}", text)

    def score(self, split: str, *, step: int | None = None, metrics: Metrics | None = None) -> dict[str, Any]:
        """Evaluates the model on `split`, says and records the result. step: the step of its weights, if not the last
        one. metrics: as for `evaluate`."""
        step = self.state.step if step is None else step
        objective = self.parts.objective
        metrics = objective.metrics() if metrics is None else metrics
        result = self._evaluated(split, metrics=metrics)
        epoch = round(step / self.steps_per_epoch, 4)
        is_selection = split == "val" and self.folder.path.resolve().name == SELECTION and not objective.retrieves
        names = [label.name for label in self.dataset.info.labels]
        plain = for_labels(self.config.model.trained_for, names)  # these losses are compared as metrics are
        losses = {"losses": losses_of_parts(metrics, plain)} if is_selection else {}
        self.folder.measure("eval", step=step, split=split, epoch=epoch, **result, **losses)
        self.say(f"{split} at step {step}: {objective.line(result)}")
        return result

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside the block nothing counts as training, and the tables are complete."""
        with ExitStack() as stack:
            for meter in self.meters:
                stack.enter_context(meter.aside())
            yield

    def save(self) -> Path:
        """Saves a checkpoint, and removes older ones as the config says."""
        path = self.folder.checkpoints / f"step-{self.state.step}"
        if not everyone(self.comm, path.exists())[0]:
            self._check_ranks(now=True)
            self.writes.total_bytes()
            self.state.turns = self.turns.state()
            extra = Extra(
                state=self.state,
                dataset=self.dataset.checksum,
                tables=tuple(self.parts.embedding.tables),
                num_dense=len(self.dataset.info.dense),
                threads=torch.get_num_threads(),
                isa=ops.isa_of(self.config.train.dense_dtype),
                device=self.parts.dense.device.type,
                config=self.config.model_dump(mode="json"),
            )
            with self._aside(), self.writes.saving(path) if self.writes_files else nullcontext():
                save_checkpoint(path, self.parts.with_state(), extra=asdict(extra))
        keep = self.state.best_step if self.state.best else None
        if self.writes_files:
            prune_checkpoints(self.folder.checkpoints, keep_last=self.config.checkpoint.keep_last, keep=keep)
        return path

    def start(self, start: Start) -> None:
        """Takes over the weights of another run, before the first step."""
        with self._aside():
            start.load(self.parts)

    def restore(self, path: Path) -> None:
        """Continues from the checkpoint at `path`; a run that had ended goes on if there are more steps to do now.

        Raises ValueError if the dataset is another one. Another number of threads or another ISA is a counted warning,
        because sums in dense layers may then differ in their last bits.
        """
        manifest = read_manifest(path)
        extra = read_extra(path, manifest)
        where, state, device = f"{path / MANIFEST}: extra", extra.state, self.parts.dense.device.type
        if extra.dataset != self.dataset.checksum:
            raise ValueError(f"{self.dataset.path} is not the dataset {path} was trained on: its checksum differs")
        self._check_metrics(state, where)
        if state.turns is None or (state.best is not None and state.best[self.config.monitor] is None):
            raise ValueError(f"{where}: state.turns, or the {self.config.monitor} of state.best, is null; {CURE}")
        with self._aside():
            load_checkpoint(path, self.parts.with_state())
        isa = ops.isa_of(self.config.train.dense_dtype)
        for name, now in (("threads", torch.get_num_threads()), ("isa", isa), ("device", device)):
            if (then := getattr(extra, name)) != now:
                self.folder.warn(
                    f"resumed_with_other_{name}",
                    f"checkpoint {path} was written with {name} {then}, this session has {now}: "
                    "results agree within docs/numerics.md, not to the bit",
                )
        try:
            self.turns.restore(state.turns)
        except ValueError as error:
            raise ValueError(f"{where}: state.turns: {error}; {CURE}") from None
        # The checkpoint was not yet counted when its state was saved.
        state.drive_written_bytes += manifest.written_bytes
        self.session.resume_at(state)
        if self.state.ended == ALL_DONE and self.state.step < self.num_steps:
            self.state.ended = None
        elif self.state.ended is None and self.state.step == self.num_steps:
            self.state.ended = ALL_DONE
        elif self.state.ended is None and self.state.step > self.num_steps:
            raise ValueError(
                f"the run is at step {state.step}, past the {self.num_steps} steps that train.epochs and "
                f"train.max_steps now ask for: ask for at least {state.step} steps, which are "
                f"{math.ceil(state.step / self.steps_per_epoch)} epochs or a part of them"
            )

    def _check_metrics(self, state: State, where: str) -> None:
        """Raises ValueError if what a checkpoint says of evaluations are not the metrics of this objective."""
        for name, figures in {"val": state.val, "best": state.best}.items():
            try:
                if figures is not None:
                    self.parts.objective.check(figures)
            except ValueError as error:
                raise ValueError(f"{where}: state.{name}: {error}; {CURE}") from None

    def finish(self) -> None:
        """Chooses the weights (the best with early stopping, else the last), scores them and writes run.json."""
        state = self.state
        chosen, val = state.step, state.val if self.eval_steps else None
        if self.config.train.early_stopping is not None:
            chosen, val = state.best_step, state.best
            best = self.folder.checkpoints / f"step-{chosen}"
            with self._aside():
                load_checkpoint(best, {"embedding": self.parts.embedding, "model": self.parts.scoring})
        judged = {split: self.parts.objective.metrics() for split in ("val", "test") if self._has(split)}
        metrics = {"val": val} if val else {}
        if "val" in judged and not val:
            metrics["val"] = self.score("val", step=chosen, metrics=judged["val"])
        calibration = self._calibrate(judged.get("val"), chosen)
        if "test" in judged:
            metrics["test"] = self.score("test", step=chosen, metrics=judged["test"])
        doubts = self.parts.objective.doubts
        self._warn_of([doubts(metrics[split], f"the {split} split") for split in ("val", "test") if split in metrics])
        if self.writes_files:
            self._count_columns()
        if judged and self.parts.items is None:
            self._look_at_scores(*list(judged.items())[-1])
        self.folder.update(
            status="finished",
            ended=state.ended,
            chosen_step=chosen,
            metrics=metrics,
            calibration=calibration,
            **self.figures(),
        )

    def _calibrate(self, judged: Metrics | None, step: int) -> Calibration | None:
        """Returns the map of `calibration.method` for the weights of `step`, which from here on follows the model.

        It is fitted to the validation rows, which are judged without it: `judged` holds their outputs, or will. Without
        such rows it is the map of the selection, whose weights had not seen them. Collective.
        """
        if (method := self.config.calibration.method) is None:
            return None
        if judged is not None:
            if not judged.num_rows:  # it was scored when these weights were the newest
                self._evaluated("val", metrics=judged)
            found = fitted(method, *judged.rows(), step=step)
        else:
            selected = RunFolder.open(self.folder.path / SELECTION).record.calibration
            if selected is None or selected.method != method:
                text = (
                    f"{self.folder.path / SELECTION} has no calibration by {method}, and this run no rows to fit it to"
                )
                self.warn("not_calibrated", text, count=1)
                return None
            found = replace(selected, step=step, from_selection=True)
        self.say(f"calibration: {found.line()}")
        if self._has("test"):
            found.follow(self.parts.scoring)
        return found

    def _count_columns(self) -> None:
        """Keeps what the splits hold by column. A run is not lost if a block that it did not train on is damaged."""
        try:
            ranges, columns, told = usual_of(self.dataset)
        except (OSError, ValueError) as error:
            self.warn("columns_not_counted", f"later scores will have nothing to be compared with: {error}", count=1)
            return
        self._warn_of([told])
        self.folder.update(ranges=ranges, columns=columns)

    def _look_at_scores(self, split: str, judged: Metrics) -> None:
        """Keeps what the scores of a split show. A run is not lost if that cannot be told. Collective."""
        if not judged.num_rows:  # it was scored when these weights were the newest
            self._evaluated(split, metrics=judged)
        own, first = self.dataset.split(split), self.writes_files
        try:
            with self._aside():
                gained = gains(self.parts, own, train_s=self.state.train_s, is_first=first)
            if first:
                found = scores_of(self.dataset, split, self.parts.objective, judged.rows(), gained)
                self.folder.update(scores=found)
        except (OSError, ValueError) as error:
            self.warn("scores_not_looked_at", f"the report will not say what columns give: {error}", count=1)

    def _warn_of(self, found: Sequence[Mapping[str, str]]) -> None:
        """Shows and counts warnings about the end of the run, by code; a resumed run comes to it again."""
        for code in dict.fromkeys(code for told in found for code in told):
            texts = [told[code] for told in found if code in told]
            self.warn(code, "; ".join(texts), count=len(texts))

    @property
    def epochs(self) -> float:
        return round(self.state.step / self.steps_per_epoch, 4)

    def figures(self) -> dict[str, Any]:
        """Returns how far and how fast the run came, for run.json."""
        state = self.state
        return {
            "steps": state.step,
            "steps_skipped": state.skipped,
            "epochs": self.epochs,
            "best_step": state.best_step if state.best else None,
            "monitor": self.config.monitor,
            **merged(meter.record() for meter in self.meters),
        }

    def close(self) -> None:
        """Removes the files of tables in tiers, and counts what only now is known of them."""
        last = [notice for meter in self.meters for notice in meter.close()]
        # First: on a full disk this makes room for what is to be said.
        close_tiers(self.parts.embedding, self.folder.path)
        self._tell(last)

    def say(self, text: str) -> None:
        """Tells the user, and log.txt."""
        self.progress.say(text)
        self.folder.log(text)

    def _line(self) -> str:
        """Returns the progress line: how far and how fast, in 80 columns; then where the time goes, and the epoch."""
        state, shares = self.state, ", ".join(part for meter in self.meters if (part := meter.line()))
        remaining_s = self._left.seconds(state.step, self.num_steps, state.train_s)
        left = "" if remaining_s is None else f" {duration(remaining_s)} left"
        loss = f" loss {state.window_loss / state.window_steps:.4f}" if state.window_steps else ""
        name, measure = next(iter(self.parts.objective.measures.items()))
        value = (state.val or {}).get(name)
        val = "" if value is None else f" {measure.title} {value:.4f}"
        step = f"{state.step / self.num_steps:.0%} step {state.step}/{self.num_steps}"
        speed = f"{rate(state.num_samples / state.train_s)}/s"
        skipped = f", {state.skipped} steps skipped" if state.skipped else ""
        epoch = f"epoch {self.epochs:.2f}/{self.config.train.epochs}{self.turns.line()}{skipped}"
        return f"{step} {speed}{loss}{val}{left}\n{shares}\n{epoch}"
