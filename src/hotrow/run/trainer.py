"""Training: one step on one screen, and the loop of a run.

`train_step` sequences the parts that parts.py builds, `Training` takes step after step and does what is due between
them. A run is a function of its config, its dataset and its seed. Starting and resuming runs is in runs.py, scoring raw
rows in api.py, what surrounds a run (clock, threads, signals) in session.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hotrow.base.files import size
from hotrow.base.progress import ProgressLine, duration, rate
from hotrow.batch import Batch
from hotrow.config.schema import Config, MemoryConfig, interval_steps, is_due
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.gradients import nonfinite_gradient, nonfinite_parameter_gradient
from hotrow.kernels import ops
from hotrow.models.layers import Network
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.placement.device import Device
from hotrow.placement.lookahead import lookahead
from hotrow.placement.tiers import Tiers
from hotrow.plan.choose import close_tiers
from hotrow.plan.demand import record_bytes
from hotrow.run.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from hotrow.run.checkpoint_manifest import MANIFEST, read_manifest
from hotrow.run.checkpoint_tensors import CURE
from hotrow.run.device import Place, device_of_copies, in_tiers
from hotrow.run.folder import RunFolder, resume_command
from hotrow.run.meters_device import DeviceReport
from hotrow.run.meters_tiers import TierReport
from hotrow.run.metrics import BinaryMetrics
from hotrow.run.session import Interrupt, StepClock
from hotrow.run.setup import Parts, build, look_up, tables_of
from hotrow.run.state import Extra, State, read_extra
from hotrow.run.turns import Turns
from hotrow.run.wear import LEDGER, WriteLedger, Writes, checkpoint_bytes

EVAL_BATCH_SIZE = 4096
LOOKAHEAD = MemoryConfig().lookahead
ALL_DONE = "all steps are done"
MOST_SKIPPED = 100
"""Steps skipped one after another; after so many a run ends, because weights that overflow mend in none."""


class NonFiniteError(ValueError):
    """A step met NaN or infinity, and changed nothing; the text says where."""


def train_step(parts: Parts, batch: Batch, step: int, clock: StepClock) -> Tensor:
    """Step number `step` (from 0) on `batch`; returns the mean binary cross-entropy before the update, 0-dim.

    Raises NonFiniteError where the loss or a gradient is NaN or infinite; no weight and no row has changed then.
    """
    parts.schedule.apply(step)
    parts.dense_optimizer.zero_grad()
    parts.sparse_optimizer.zero_grad()
    rows = look_up(parts.model, parts.embedding, batch.sparse)
    clock.lap("lookup")
    with parts.place.arithmetic():
        logits_B = parts.place.logits(parts.model, batch.dense, rows)
        loss = binary_cross_entropy_with_logits(logits_B, batch.label.to(logits_B.device))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    check_finite(parts, batch, loss.detach())
    parts.dense_optimizer.step()
    clock.lap("dense")
    parts.sparse_optimizer.step()
    clock.lap("update")
    return loss.detach()


def check_finite(parts: Parts, batch: Batch, loss: Tensor) -> None:
    """Raises NonFiniteError where `loss` or a gradient of either side is not finite, naming the first of each."""
    found = [nonfinite_parameter_gradient(parts.model), nonfinite_gradient(parts.embedding)]
    if math.isfinite(float(loss)) and not any(found):
        return
    inputs = {"the dense input": batch.dense, "the label": batch.label}
    for what, values in inputs.items():
        if (place := ops.first_nonfinite(values)) is not None:
            column = "".join(f", column {c}" for c in place[1:])
            found.append(f"{what} of sample {place[0]}{column} is {float(values[place])}, so look at the data first")
    raise NonFiniteError("; ".join([f"the loss is {float(loss)}", *(text for text in found if text)]))


@torch.no_grad()
def evaluate(
    embedding: EmbeddingCollection,
    model: Network,
    loader: Loader,
    *,
    num_batches: int | None = None,
    place: Place | None = None,
) -> dict[str, Any]:
    """The metrics of `BinaryMetrics` over the rows of the loader's split, None for those it leaves undefined.

    num_batches: over the first so many of its batches; None: all. place: of the model; None: the CPU.
    """
    place = place or Place()
    metrics = BinaryMetrics()
    for batch in islice(loader.epoch(0), num_batches):
        metrics.update(place.logits(model, batch.dense, look_up(model, embedding, batch.sparse)), batch.label)
    values = metrics.compute()
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


class Training:
    """The loop of one run: steps, and after each what is due (a metrics line, an evaluation, a checkpoint).

    memory: where rows lie, as `place_tables` has it.
    """

    def __init__(
        self,
        config: Config,
        dataset: PackedDataset,
        memory: Memory | DeviceMemory | None,
        folder: RunFolder,
        interrupt: Interrupt,
        progress: ProgressLine,
    ) -> None:
        options = config.train
        self.config, self.dataset, self.folder = config, dataset, folder
        self.interrupt, self.progress, self.clock, self.state = interrupt, progress, StepClock(), State()
        tables = tables_of(config, dataset)
        shuffle_seed = options.seed if options.shuffle else None
        self.turns = Turns(
            config.hot,
            dataset,
            record_bytes(config, tables),
            batch_size=options.batch_size,
            shuffle_seed=shuffle_seed,
            seed=options.seed,
        )
        self.steps_per_epoch = self.turns.order.num_batches
        self.num_steps = min(options.epochs * self.steps_per_epoch, options.max_steps or math.inf)
        self.eval_steps = interval_steps(options.eval_every, steps_per_epoch=self.steps_per_epoch)
        self.save_steps = interval_steps(config.checkpoint.every, steps_per_epoch=self.steps_per_epoch)
        place = Place.of(config)
        self.parts = build(config, tables, num_dense=len(dataset.info.dense), memory=memory, place=place)
        device = device_of_copies(config, place)
        self.turns.attach(self.parts.embedding, self.parts.sparse_optimizer, device=device)
        tiers = self.parts.embedding.placement.find(Tiers)
        slots = self.parts.embedding.placement.find(Device)
        self.reports: list[TierReport | DeviceReport] = [] if tiers is None else [TierReport(tiers)]
        self.reports += [] if slots is None else [DeviceReport(slots)]
        self.lookahead = config.memory.lookahead if isinstance(config.memory, MemoryConfig) else LOOKAHEAD
        ledger = WriteLedger(folder.path / LEDGER, config.write_budget)
        most = checkpoint_bytes(config, tables, self.parts.model, in_tiers=in_tiers(memory))
        self.writes = Writes(tiers, ledger, checkpoint_bytes=most)
        self._before = State()  # where this session began
        if not self._has("val"):
            self._without_validation()

    def _has(self, split: str) -> bool:
        return split in self.dataset.splits and self.dataset.split(split).num_rows > 0

    def _without_validation(self) -> None:
        if self.config.train.early_stopping is not None:
            raise ValueError(
                f"train.early_stopping is {self.config.train.early_stopping}, but {self.dataset.path} has no rows in a "
                "split 'val' to stop by; prepare the data with one, or set it to null"
            )
        if self.eval_steps is not None:
            self.folder.warn("no_validation", f"{self.dataset.path} has no rows in a split 'val': nothing is evaluated")
            self.eval_steps = None

    def run(self) -> None:
        """Train until the run has ended or a signal asks to stop; the state is then on disk."""
        while self._train_turn():
            if swap := self.turns.end(self._turn_loss):
                self.folder.measure("swap", step=self.state.step, epoch=self.epochs, **swap)
                if swap["rate"] != swap["next_rate"]:
                    rates = f"{swap['next_rate']:g} % of a class, not {swap['rate']:g}"
                    self.say(f"step {self.state.step}: turns of {rates}")
        self.turns.close()

    def warn_of_nothing_hot(self) -> None:
        """Say and count it where the schedule has nothing to do."""
        if text := self.turns.nothing_hot:
            self.folder.warn("no_hot_samples", text)
            self.say(f"warning: {text}")

    def _train_turn(self) -> bool:
        """Train what is left of the turn, which without a hot schedule is the epoch; whether another may follow."""
        if self.state.ended is not None:
            return False
        self.clock.lap(None)
        batches = self.turns.batches(self.state.epoch)
        depth = self.lookahead if self.reports and not self.turns.on_copies else 0
        for batch in lookahead(batches, self.parts.embedding, depth=depth):
            self.clock.lap("data")
            try:
                loss: float | None = float(train_step(self.parts, batch, self.state.step, self.clock))
            except NonFiniteError as error:
                self._skip(str(error))
                loss = None
            self.turns.count()
            self._count(len(batch), loss)
            stop = self.interrupt.signal is not None or self.writes.spent
            self._do_what_is_due(stop=stop)
            if stop or self.state.ended or self.writes.spent:  # by the checkpoint that was due
                return False
            self.clock.lap(None)
        return True

    def _turn_loss(self) -> float:
        """LogLoss of the validation rows that a schedule goes by."""
        loader = Loader(self.dataset.split("val"), EVAL_BATCH_SIZE, shuffle_seed=None)
        num_batches = math.ceil(self.config.hot.eval_samples / EVAL_BATCH_SIZE)
        with self._aside():
            result = evaluate(
                self.parts.embedding, self.parts.model, loader, num_batches=num_batches, place=self.parts.place
            )
        return float(result["logloss"])

    def _skip(self, found: str) -> None:
        """Drop the gradients of a step that is not to be taken and count it; ValueError where that is not allowed."""
        state, optimizer = self.state, self.config.optimizer
        text = (
            f"{found} (step {state.step + 1}, epoch {state.epoch + 1}, batch {state.batch + 1}); nothing was changed "
            "by this step"
        )
        cure = (
            f"lower optimizer.dense.lr ({optimizer.dense.lr}) and optimizer.sparse.lr ({optimizer.sparse.lr}), or "
            f"raise optimizer.schedule.warmup_steps ({optimizer.schedule.warmup_steps}), and start again"
        )
        if self.config.train.nonfinite == "raise":
            left_out = f"{resume_command(self.folder.path)} --set train.nonfinite=skip"
            raise ValueError(f"{text}. Training diverged: {cure}; or leave such steps out: {left_out}")
        if state.skipped_in_a_row == MOST_SKIPPED:
            raise ValueError(f"{text}, nor by the {MOST_SKIPPED} before it, all skipped. Training diverged: {cure}")
        self.parts.dense_optimizer.zero_grad()
        self.parts.sparse_optimizer.zero_grad()
        state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
        self.folder.warn("nonfinite_step_skipped", text, count=state.skipped)

    def _count(self, num_samples: int, loss: float | None) -> None:
        """Count a step of `num_samples`; loss: None where it was skipped."""
        state = self.state
        state.step, state.batch = state.step + 1, state.batch + 1
        if state.batch == self.steps_per_epoch:
            state.epoch, state.batch = state.epoch + 1, 0
        if loss is not None:
            state.window_loss, state.window_steps = state.window_loss + loss, state.window_steps + 1
            state.skipped_in_a_row = 0
        state.num_samples += num_samples
        self.clock.end_step()
        state.seconds = dict(self.clock.seconds)
        self.writes.end_step()
        state.stall_s = round(self._before.stall_s + self.parts.embedding.placement.stall_s, 6)
        if state.step >= self.num_steps:
            state.ended = ALL_DONE

    def _do_what_is_due(self, *, stop: bool) -> None:
        state = self.state
        self.progress.update(self._line)
        if announcement := self.writes.announcement(self.steps_per_epoch):
            self._announce(*announcement)
        if state.step % self.config.train.log_every == 0 or state.ended:
            self._log_window()
        best = self._due(self.eval_steps) and self._evaluate()
        if best or stop or state.ended or self._due(self.save_steps):
            self.save()

    def _announce(self, writes: str, share: float) -> None:
        self.say(writes)
        if share > 1:
            self.folder.warn("write_budget_will_be_spent", f"{writes}: training will save and stop when it is spent")

    def _due(self, every: float | None) -> bool:
        return is_due(self.state.step, every) or (every is not None and self.state.ended is not None)

    def _log_window(self) -> None:
        state = self.state
        loss = state.window_loss / state.window_steps if state.window_steps else None
        lr = {
            "dense": self.parts.dense_optimizer.param_groups[0]["lr"],
            "sparse": self.parts.sparse_optimizer.param_groups[0]["lr"],
        }
        speed = {"samples_per_s": round(state.num_samples / state.train_s, 1), "step_ms": self.clock.step_ms()}
        skipped = {"steps_skipped": state.skipped} if state.skipped else {}
        self._count_writes()
        tiers = self._tier_figures() if self.reports else {}
        for report in self.reports:
            tiers |= report.window()
        self.folder.measure("train", step=state.step, epoch=self.epochs, loss=loss, lr=lr, **speed, **tiers, **skipped)
        state.window_loss, state.window_steps = 0.0, 0

    def _tier_figures(self) -> dict[str, Any]:
        """How long steps waited for rows, and what went to the drive, over all sessions."""
        stall_share = round(self.state.stall_s / max(self.state.train_s, 1e-9), 4)
        written = self.state.drive_written_bytes
        return {"stall_s": self.state.stall_s, "stall_share": stall_share, "drive_written_bytes": written}

    def _count_writes(self) -> None:
        self.state.drive_written_bytes = self._before.drive_written_bytes + self.writes.num_bytes

    def _evaluate(self) -> bool:
        """Score the validation split; whether it is the best so far and is to be kept."""
        state = self.state
        state.val, monitor = self.score("val"), self.config.train.monitor
        if state.val["auc"] is None:
            self._without_auc(state.val["undefined"])
        if state.val[monitor] is None:
            return False
        sign = -1 if monitor == "logloss" else 1
        best = state.best is None or sign * state.val[monitor] > sign * state.best[monitor]
        if best:
            state.best, state.best_step, state.evals_since_best = state.val, state.step, 0
        else:
            state.evals_since_best += 1
        patience = self.config.train.early_stopping
        if patience is not None and state.evals_since_best >= patience and state.ended is None:
            name = {"auc": "AUC", "logloss": "LogLoss"}[monitor]
            state.ended = f"no better validation {name} in {patience} evaluations"
        return best and self.config.checkpoint.keep_best

    def _without_auc(self, reason: str) -> None:
        text = f"the validation split has no AUC: {reason}"
        if self.config.train.early_stopping is not None and self.config.train.monitor == "auc":
            raise ValueError(
                f"{text}; train.early_stopping goes by it: set train.monitor to logloss, or split the data differently"
            )
        self.folder.warn("no_validation_auc", text)

    def score(self, split: str, *, step: int | None = None) -> dict[str, Any]:
        """Evaluate the parts on `split`, say and record it; step: that of their weights, if it is not the last."""
        step = self.state.step if step is None else step
        loader = Loader(self.dataset.split(split), EVAL_BATCH_SIZE, shuffle_seed=None)
        with self._aside():
            result = evaluate(self.parts.embedding, self.parts.model, loader, place=self.parts.place)
        epoch = round(step / self.steps_per_epoch, 4)
        self.folder.measure("eval", step=step, split=split, epoch=epoch, **result)
        self.say(f"{split} at step {step}: {scores(result)}")
        return result

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What happens inside is not training, and finds the tables whole."""
        with ExitStack() as stack:
            stack.enter_context(self.turns.whole())
            for report in self.reports:
                stack.enter_context(report.aside())
            yield

    def save(self) -> Path:
        """A checkpoint of the parts and the state; older ones go as the config says."""
        path = self.folder.checkpoints / f"step-{self.state.step}"
        if not path.exists():
            self._count_writes()
            self.state.turns = self.turns.state()
            extra = Extra(
                state=self.state,
                dataset=self.dataset.checksum,
                tables=tuple(self.parts.embedding.tables),
                num_dense=len(self.dataset.info.dense),
                threads=torch.get_num_threads(),
                isa=ops.backend().isa,
                device=self.parts.place.device.type,
                config=self.config.model_dump(mode="json"),
            )
            with self._aside(), self.writes.saving(path):
                save_checkpoint(path, self.parts.with_state(), extra=asdict(extra))
        keep = self.state.best_step if self.state.best and self.config.checkpoint.keep_best else None
        prune_checkpoints(self.folder.checkpoints, keep_last=self.config.checkpoint.keep_last, keep=keep)
        return path

    def restore(self, path: Path) -> None:
        """Take up the state of the checkpoint at `path`; a run that had ended goes on where there are steps to do now.

        Raises ValueError where the dataset is another one; another thread count or ISA is a counted warning, because
        the dense layers' sums may then differ in their last bits.
        """
        manifest = read_manifest(path)
        extra = read_extra(path, manifest)
        where, state, device = f"{path / MANIFEST}: extra", extra.state, self.parts.place.device.type
        if extra.dataset != self.dataset.checksum:
            raise ValueError(f"{self.dataset.path} is not the dataset {path} was trained on: its checksum differs")
        if state.turns is None or (state.best is not None and state.best[self.config.train.monitor] is None):
            raise ValueError(f"{where}: state.turns, or the {self.config.train.monitor} of state.best, is null; {CURE}")
        with self._aside(), self.writes.restoring(path):
            load_checkpoint(path, self.parts.with_state())
        for name, now in (("threads", torch.get_num_threads()), ("isa", ops.backend().isa), ("device", device)):
            if (then := getattr(extra, name)) != now:
                self.folder.warn(
                    f"resumed_with_other_{name}",
                    f"checkpoint {path} was written with {name} {then}, this session has {now}: "
                    "results agree within docs/numerics.md, not to the bit",
                )
        self.state = state
        try:
            self.turns.restore(state.turns)
        except ValueError as error:
            raise ValueError(f"{where}: state.turns: {error}; {CURE}") from None
        # When it was written, it did not count itself.
        self.state.drive_written_bytes += manifest.written_bytes
        self._before = replace(self.state)
        self.clock.seconds, self.clock.num_steps = dict(self.state.seconds), self.state.step
        if self.state.ended == ALL_DONE and self.state.step < self.num_steps:
            self.state.ended = None

    def finish(self) -> None:
        """Choose the weights (the best under early stopping, else the last), score them, write run.json."""
        state = self.state
        chosen, val = state.step, state.val if self.eval_steps else None
        if self.config.train.early_stopping is not None:
            chosen, val = state.best_step, state.best
            best = self.folder.checkpoints / f"step-{chosen}"
            with self._aside(), self.writes.restoring(best):
                load_checkpoint(best, {"embedding": self.parts.embedding, "model": self.parts.model})
        metrics = {
            split: self.score(split, step=chosen)
            for split in ("val", "test")
            if self._has(split) and not (split == "val" and val)
        }
        metrics |= {"val": val} if val else {}
        self.folder.update(status="finished", ended=state.ended, chosen_step=chosen, metrics=metrics, **self.figures())

    @property
    def epochs(self) -> float:
        """Epochs trained so far."""
        return round(self.state.step / self.steps_per_epoch, 4)

    def figures(self) -> dict[str, Any]:
        """How far and how fast, for run.json."""
        self._count_writes()
        seconds = self.state.train_s - self._before.train_s
        epochs = (self.state.step - self._before.step) / self.steps_per_epoch
        writes = self.writes.to_json(seconds=seconds, epochs=epochs)
        memory: dict[str, Any] = {}
        for report in self.reports:
            memory |= report.to_json(seconds=seconds, epochs=epochs)
        return {
            "steps": self.state.step,
            "steps_skipped": self.state.skipped,
            "epochs": self.epochs,
            "samples_per_s": round(self.state.num_samples / max(self.state.train_s, 1e-9), 1),
            "step_ms": self.clock.step_ms(),
            "train_s": round(self.state.train_s, 3),
            "best_step": self.state.best_step if self.state.best else None,
            "monitor": self.config.train.monitor,
            **({"memory": {**self._tier_figures(), **memory}} if memory else {}),
            **({"hot": hot | self._swaps()} if (hot := self.turns.figures()) else {}),
            **({"write_budget": writes} if writes else {}),
        }

    def _swaps(self) -> dict[str, Any]:
        """How the turns went, over all sessions."""
        if not self.config.hot.takes_turns:
            return {}
        names = ("step", "turn", "logloss", "rate", "next_rate")
        lines = [line for line in self.folder.measurements() if line["kind"] == "swap"]
        return {"swaps": [{name: line.get(name) for name in names} for line in lines]}

    def close(self) -> None:
        """Remove the files of tables in tiers, and count what only now is known of them."""
        with suppress(OSError):  # on a full disk the ledger stays ahead of what was written
            self.writes.book()
        overflow = sum(report.overflow_rows for report in self.reports)
        # First: where the disk is full, this makes room for what is to be said.
        close_tiers(self.parts.embedding, self.folder.path)
        with suppress(OSError):
            self.writes.close()
        if overflow:
            text = (
                "rows of training batches for which no cached row could leave lay beside the caches: raise memory.dram"
            )
            self.folder.warn("overflow_rows", text, count=overflow)

    def say(self, text: str) -> None:
        """To the user and to log.txt."""
        self.progress.say(text)
        self.folder.log(text)

    def _line(self) -> str:
        """How far and how fast, in 80 columns behind the time; then where the time goes, and the epoch."""
        state, times = self.state, self.clock.seconds
        total = sum(times.values()) or 1.0
        shares = " ".join(f"{phase} {100 * s / total:.0f}%" for phase, s in times.items())
        left = duration((self.num_steps - state.step) * state.train_s / state.step)
        loss = f" loss {state.window_loss / state.window_steps:.4f}" if state.window_steps else ""
        auc = (state.val or {}).get("auc")
        val = "" if auc is None else f" AUC {auc:.4f}"
        step = f"{state.step / self.num_steps:.0%} step {state.step}/{self.num_steps}"
        speed = f"{rate(state.num_samples / state.train_s)}/s"
        if self.reports:
            shares += f", waiting {state.stall_s / total:.0%}, {size(self.writes.num_bytes)} written"
        skipped = f", {state.skipped} steps skipped" if state.skipped else ""
        epoch = f"epoch {self.epochs:.2f}/{self.config.train.epochs}{self.turns.line()}{skipped}"
        return f"{step} {speed}{loss}{val} {left} left\n{shares}\n{epoch}"


def scores(metrics: Mapping[str, Any]) -> str:
    """The three figures everybody asks for, in one line."""
    named = {"AUC": metrics["auc"], "LogLoss": metrics["logloss"], "NE": metrics["ne"]}
    return " ".join(f"{name} {'undefined' if value is None else f'{value:.4f}'}" for name, value in named.items())
