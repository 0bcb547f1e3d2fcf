"""What a run writes to its drive, and the budget that keeps it from wearing that out: `memory.write_budget`.

`WriteLedger` knows when a run wrote how much, over all of its sessions. `WriteMeter` counts what one session writes. It
says when the rest of the budget is needed for the checkpoint that ends the session. docs/memory.md has the rules.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from typing_extensions import override

from hotrow.base.door import is_taken
from hotrow.base.files import ByteRate, folder_bytes, size
from hotrow.base.records import STRICT, Count, Document
from hotrow.batch import Batch
from hotrow.config.schema import Config
from hotrow.costs.demand import required_bytes
from hotrow.kernels.reference import NUM_STATES
from hotrow.placement.tiers import Tiers
from hotrow.run.checkpoint_files import read_manifest
from hotrow.run.meters import Meter, Notice, Session
from hotrow.tables import TableConfig

LEDGER = "writes.json"
"""The ledger's file in the run's folder."""
PIECE_S: Literal[300] = 300
"""Bytes are counted by pieces of time of this length. A piece counts until its last second is out of the window."""
LONGEST_WINDOW_S = 86_400
AHEAD, AHEAD_WITHOUT_BUDGET = 1000, 20
"""The file runs ahead by this fraction of the budget, or of the last day's bytes if there is no budget, so that it need
not be written at every step."""
CHECK_STEPS = 8
"""Steps between two looks at the counters. One look takes 50 us with 26 tables."""
ANNOUNCED_STEPS = 200
"""Steps after the first write before the rate is announced, because caches that are filling up write less."""

FEWER = "Fewer bytes are written with a larger memory.dram, fewer checkpoints, and, in a new run, train.precision fp16"
"""What helps beside a larger budget."""


@dataclass(frozen=True, config=STRICT)
class _Written:
    """The contents of the ledger's file."""

    seconds: Literal[300]
    """The length of a piece of time, PIECE_S."""
    bytes_by_start: dict[Annotated[str, Field(pattern=r"^[0-9]{1,12}$")], Count]
    """Bytes written, by the second since 1970 at which a piece of time begins."""


_DOCUMENT = Document(
    _Written,
    marks={"hotrow_writes": 1},
    cure="set memory.write_budget to null, or remove the file, and the run counts from 0 again",
)


class WriteBudgetError(ValueError):
    """Raised if the rest of `memory.write_budget` does not allow the next step; the text says when it will."""


class WriteLedger:
    """The bytes that a run wrote, by time, in a file at `path`. A new session continues where the last one ended.

    The file says at least what was written: after a kill it says too much, by what the session was about to write.
    path: None: there is no file. budget: None: bytes are only counted, for a later session that may have one. now: the
    clock, in seconds since 1970; if it is set back, nothing is forgotten.
    """

    def __init__(self, path: Path | None, budget: ByteRate | None, *, now: Callable[[], float] = time.time) -> None:
        self.budget, self._path, self._now = budget, path, now
        found = _DOCUMENT.read(path).bytes_by_start if path is not None and is_taken(path) else {}
        self._pieces = {int(start) // PIECE_S: num_bytes for start, num_bytes in found.items()}
        self._saved_piece, self._ahead = -1, 0

    def add(self, num_bytes: int, *, ahead: int) -> None:
        """Adds bytes written since the last call; up to `ahead` more may be written before the next one."""
        piece = int(self._now() // PIECE_S)
        self._pieces[piece] = self._pieces.get(piece, 0) + num_bytes
        self._ahead -= num_bytes
        if self._ahead < ahead or piece != self._saved_piece:
            part = sum(self._pieces.values()) // AHEAD_WITHOUT_BUDGET
            self.expect(ahead + (part if self.budget is None else self.budget.num_bytes // AHEAD))

    def expect(self, num_bytes: int) -> None:
        """Writes the file as if `num_bytes` more had been written, so that a kill cannot make them be forgotten."""
        piece = self._saved_piece = int(self._now() // PIECE_S)
        oldest = (self._now() - LONGEST_WINDOW_S) / PIECE_S - 1
        self._pieces = {at: n for at, n in self._pieces.items() if at >= oldest}
        self._ahead = num_bytes
        shown = {**self._pieces, piece: self._pieces.get(piece, 0) + num_bytes}
        pieces = {str(at * PIECE_S): n for at, n in sorted(shown.items())}
        if self._path is not None:
            _DOCUMENT.write(self._path, _Written(PIECE_S, pieces))

    def written(self, at: float | None = None) -> int:
        """Returns bytes in the budget's window that ends now, or at `at`; its first piece counts in full."""
        at = self._now() if at is None else at
        return sum(n for piece, n in self._pieces.items() if self._leaves(piece) > at)

    def left(self) -> int:
        """Returns the bytes that may be written now; negative if the budget was made smaller since."""
        assert self.budget is not None
        return self.budget.num_bytes - self.written()

    def when(self, num_bytes: int) -> float | None:
        """Returns the first moment at which `num_bytes` may be written, if nothing else is written; None: never."""
        assert self.budget is not None
        now = self._now()
        moments = [now, *sorted(at for at in map(self._leaves, self._pieces) if at > now)]
        return next((at for at in moments if self.written(at) + num_bytes <= self.budget.num_bytes), None)

    def _leaves(self, piece: int) -> float:
        assert self.budget is not None
        return (piece + 1) * PIECE_S + self.budget.seconds


class WriteMeter(Meter):
    """What one session of a run writes to its drive: rows of tables in tiers, and checkpoints.

    checkpoint_bytes: the most that one checkpoint takes.
    """

    def __init__(self, tiers: Tiers | None, ledger: WriteLedger, session: Session, *, checkpoint_bytes: int) -> None:
        self._session = session
        self.ledger, self.checkpoint_bytes, self._tiers = ledger, checkpoint_bytes, tiers
        self.spent = False
        """Whether training has to end, because ending needs the rest of the budget."""
        self._stores = [] if tiers is None else [store for store in tiers.stores if store.path is not None]
        self._checkpoints = self._booked = self._num_steps = 0
        self._reserve = 0 if tiers is None else tiers.memory.waiting_bytes
        """Bytes kept for the steps until the next look at the counters."""
        self._first = (0, 0.0, 0)
        self.restore_bytes = self._restore_bytes()
        """The most that a new session may write to load the newest checkpoint."""
        self._announced = False
        self.book()

    @property
    def num_bytes(self) -> int:
        """Bytes written since the session began."""
        return self._checkpoints + self._counted("written_bytes")

    def total_bytes(self) -> int:
        """Returns what the run wrote, over all sessions, and notes it in the run's state."""
        total = self._session.state.drive_written_bytes = self._session.before.drive_written_bytes + self.num_bytes
        return total

    def _restore_bytes(self, path: Path | None = None, *, here: bool = False) -> int:
        """Returns the most that loading the checkpoint at `path` writes; None: one with every row on disk, once.

        Weights and each state are written in passes of their own: first the rows that this session has changed (if it
        is `here`; a new session has none), then every file of a chain. Rows of one pass rise, so that no sector is
        written twice in it.
        """
        if self._tiers is None:
            return 0
        manifest = None if path is None else read_manifest(path)
        total = 0.0
        for store in self._tiers.stores:
            rows, whole = store.rows, store.padded_record_bytes * store.rows.num_rows
            chain = None if manifest is None else manifest.chain("embedding", rows.table)
            links = [rows.num_rows] if chain is None else chain.record.links
            made_untouched = [self._tiers.num_changed(store.rows.table, ever=True)] if here else []
            passes = [*made_untouched, *links]
            if store.path is not None:
                total += len(rows.parts) * sum(min(num_rows * store.write_bytes, whole) for num_rows in passes)
        return int(total)

    def _counted(self, name: str) -> int:
        return sum(store.counters()[name] for store in self._stores)

    @override
    def end_step(self, batch: Batch) -> None:
        """Checks every few steps whether training has to end."""
        self._num_steps += 1
        if self._num_steps < CHECK_STEPS or self._num_steps % CHECK_STEPS == 0:
            self.book(spare=2)
            self._judge()

    def book(self, *, spare: int = 0) -> None:
        """Tells the ledger what was written since the last call, with what waits to be written.

        spare: how many times that amount to keep in reserve.
        """
        num_bytes = self.num_bytes + self._counted("waiting_bytes") + self._counted("held_bytes")
        since = max(0, num_bytes - self._booked)
        self._booked += since
        self._reserve = max(self._reserve, spare * since)
        self.ledger.add(since, ahead=self._reserve)

    def _judge(self) -> None:
        if self.ledger.budget is not None:
            self.spent = self.ledger.left() < self.checkpoint_bytes + self._reserve

    @contextmanager
    def saving(self, path: Path) -> Iterator[None]:
        """Counts the checkpoint that is written to the folder `path` inside the block."""
        self.book()
        self.ledger.expect(self.checkpoint_bytes)
        yield
        self._checkpoints += folder_bytes(path)
        self.restore_bytes = self._restore_bytes(path)
        self.book()
        self.ledger.expect(self._reserve)
        self._judge()

    @contextmanager
    def restoring(self, path: Path) -> Iterator[None]:
        """Counts the rows that are written when the checkpoint at `path` is loaded inside the block.

        Raises WriteBudgetError if these and the checkpoint that ends the session need more than is left.
        """
        restore_bytes = self._restore_bytes(path, here=True)
        needed = restore_bytes + self.checkpoint_bytes
        if self.ledger.budget is not None and needed > self.ledger.left():
            raise WriteBudgetError(
                f"{self._state(self.ledger.budget)}; to continue from {path} may write {size(restore_bytes)} of rows, "
                f"and a checkpoint takes {size(self.checkpoint_bytes)}. Try again "
                f"{self._when(self.ledger.budget, needed)}. {FEWER}"
            )
        self.ledger.expect(restore_bytes)
        yield
        self.restore_bytes = self._restore_bytes(path)
        self.book()
        self.ledger.expect(self._reserve)

    def too_little_to_resume(self) -> str | None:
        """Returns why this budget does not allow a session after this one; None if it does."""
        needed = self.restore_bytes + self.checkpoint_bytes
        if (budget := self.ledger.budget) is None or needed <= budget.num_bytes:
            return None
        return (
            f"memory.write_budget is {budget.text}: to resume this run may write {size(needed)}, and then "
            "needs a larger one"
        )

    @override
    def close(self) -> Iterable[Notice]:
        """Tells the ledger what was written, ahead of which its file stays until `settle`."""
        with suppress(OSError):  # on a full disk the file stays ahead of what was written
            self.book()
        return ()

    def settle(self) -> None:
        """Writes the ledger's file with what was written and no more: the session is over."""
        with suppress(OSError):
            self.ledger.expect(0)

    # ---- in words and figures

    @override
    def notices(self) -> Iterable[Notice]:
        """Returns, once the rate of writing is known, the share of the budget that it uses."""
        if (budget := self.ledger.budget) is None or self._announced or self._num_steps % CHECK_STEPS:
            return
        step, at, num_bytes = self._first
        rows = self._counted("written_bytes")
        if not num_bytes:
            self._first = (self._num_steps, time.monotonic(), rows)
        if not num_bytes or self._num_steps < step + ANNOUNCED_STEPS:
            return
        self._announced = True
        per_s = (rows - num_bytes) / (time.monotonic() - at)
        per_epoch = (rows - num_bytes) / (self._num_steps - step) * self._session.steps_per_epoch
        share = per_s * budget.seconds / budget.num_bytes
        text = (
            f"memory.write_budget {budget.text}: rows are written at {size(3600 * per_s)} an hour, {share:.1%} of the "
            f"budget, and {size(per_epoch)} an epoch, {per_epoch / budget.num_bytes:.1%} of it; a checkpoint takes "
            f"{size(self.checkpoint_bytes)}"
        )
        yield Notice(text)
        if share > 1:
            yield Notice(f"{text}: training will save and stop when it is spent", "write_budget_will_be_spent")

    def ended(self, step: int, command: str) -> WriteBudgetError:
        """Returns the error that says why training stopped at `step`. command: what resumes the run."""
        budget = self.ledger.budget
        assert budget is not None
        # A session needs more than it takes to resume, or it would have no step.
        needed = self.restore_bytes + self.checkpoint_bytes
        enough = min(budget.num_bytes, needed + budget.num_bytes // 10)
        return WriteBudgetError(
            f"{self._state(budget)}; the rest is not enough for more steps and a checkpoint after. Training "
            f"stopped at step {step}, whose checkpoint is whole. Continue "
            f"{self._when(budget, max(needed, enough))}: {command}. {FEWER}"
        )

    def _state(self, budget: ByteRate) -> str:
        hours = budget.seconds // 3600
        written = f"{size(self.ledger.written())} were written in the last {'hour' if hours == 1 else f'{hours} hours'}"
        return f"memory.write_budget is {budget.text}, and {written}"

    def _when(self, budget: ByteRate, num_bytes: int) -> str:
        at = self.ledger.when(num_bytes)
        if at is None:
            per = "hour" if budget.seconds == 3600 else "day"
            least = num_bytes + self.ledger.written()
            return f"with a memory.write_budget (--set) above {least:,} bytes per {per}, which this one never allows"
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(math.ceil(at)))
        return f"from {moment} on, or now with a larger memory.write_budget (--set)"

    @override
    def record(self) -> dict[str, Any]:
        """Returns how far the budget is used, if there is one."""
        if (budget := self.ledger.budget) is None:
            return {}
        seconds, epochs = self._session.seconds, self._session.epochs
        used = {
            "budget": budget.text,
            "budget_bytes": budget.num_bytes,
            "window_s": budget.seconds,
            "window_bytes": self.ledger.written(),
            "checkpoint_bytes": self.checkpoint_bytes,
            "share_used": round(self.ledger.written() / budget.num_bytes, 6),
            "share_per_epoch": round(self.num_bytes / budget.num_bytes / epochs, 6) if epochs else None,
            "share_at_this_rate": (
                round(self.num_bytes / seconds * budget.seconds / budget.num_bytes, 6) if seconds else None
            ),
        }
        return {"write_budget": used}


def checkpoint_bytes(config: Config, tables: Sequence[TableConfig], model: nn.Module, *, in_tiers: bool) -> int:
    """Returns the most that a checkpoint takes: tables and states, MLPs with two states per weight, and its manifest.

    Tables in tiers add the number of each row, beside the weights and beside each state.
    """
    dense = sum(parameter.nbytes for parameter in model.parameters())
    return _rows_bytes(config, tables, in_tiers=in_tiers) + 3 * dense + (len(tables) + 16 << 10)


def _rows_bytes(config: Config, tables: Sequence[TableConfig], *, in_tiers: bool) -> int:
    num_rows = in_tiers * sum(table.num_embeddings for table in tables)
    return required_bytes(config, tables) + 8 * num_rows * (1 + NUM_STATES[config.optimizer.sparse.name])


def check_write_budget(config: Config, tables: Sequence[TableConfig], *, in_tiers: bool) -> None:
    """Raises ValueError if the budget is too small for a checkpoint, with which every session ends."""
    budget, least = config.write_budget, _rows_bytes(config, tables, in_tiers=in_tiers)
    if budget is not None and budget.num_bytes < least:
        raise ValueError(
            f"memory.write_budget is {budget.text}, but a checkpoint takes {size(least)}: raise it, lower "
            "model.embedding_dim, or set train.precision to fp16"
        )
