"""The verb `plan`: what was decided of a config, and what trying it showed, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotrow.base.files import size
from hotrow.base.progress import ProgressLine, num_of
from hotrow.parallel.agreement import on_every_rank
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.heartbeat import Heartbeat
from hotrow.plan.alternatives import Alternative, decided, groups, try_alternatives
from hotrow.plan.decision import Decision, TablePlan, decision_of
from hotrow.plan.trial import Steps, Trial, trial
from hotrow.run.runs import check_same_setup

MAX_LINES = 40
"""Tables that are shown to people; --json has all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `hotrow plan` found."""

    decision: Decision
    trial: Trial | None
    """None if nothing was tried."""
    alternatives: list[Alternative]
    """The config as it is, and each `--set`; empty without one."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of --json: speed and phases first, and all else under its name."""
        speed = {} if self.trial is None else {"samples_per_s": self.trial.samples_per_s, "step_ms": self.trial.step_ms}
        return {**speed, **asdict(self)}


def plan(config: Path, changes: Sequence[str] = (), *, tries: bool = True, comm: Communicator | None = None) -> Plan:
    """Returns the plan of a config on this machine. changes: alternatives to try beside it. comm: the ranks that would
    train together; all call this. Raises ValueError for what this machine does not allow."""
    comm, asked = comm or Communicator(), groups(changes)
    if asked and (comm.size > 1 or not tries):
        raise ValueError(
            "--set tries an alternative beside the config in processes of its own: leave out --no-trial, and start it "
            "without torchrun and mpiexec"
        )
    with ProgressLine(quiet=comm.rank > 0) as line:

        def tell(what: str) -> None:
            line.update(lambda: f"trying: {what}")

        if asked:
            found, rows = try_alternatives(config, asked, tell=tell)
            return Plan(decision=found.decision, trial=found.trial, alternatives=rows)
        with Heartbeat(comm, cure="Start it again"):
            setup = on_every_rank(comm, lambda: decided(config, comm=comm))
            check_same_setup(comm, setup)
            tried = trial(setup, comm=comm, tell=tell) if tries else None
        return Plan(decision=decision_of(setup), trial=tried, alternatives=[])


def lines_of(found: Plan) -> Iterator[str]:
    """Yields the plan in words."""
    yield from _decision(found.decision)
    if found.trial is not None:
        yield ""
        yield from _trial(found.trial)
    if found.alternatives:
        yield ""
        yield from _alternatives(found.alternatives)


def _decision(found: Decision) -> Iterator[str]:
    where = "all in DRAM" if found.disk is None else f"{size(found.dram_bytes)} of DRAM, the rest in {found.disk}"
    whose = f"rank 0 of {found.num_ranks} holds {size(found.needed_bytes)} of " if found.num_ranks > 1 else ""
    yield f"{whose}tables and optimizer state{'' if whose else f' take {size(found.needed_bytes)}'}: {where}"
    for owner in dict.fromkeys(found.owners.values()):
        own = [name for name, each in found.owners.items() if each == owner]
        words = {"row": "dealt out row by row", "replicated": "on every rank"}.get(owner, owner)
        more = f" and {len(own) - MAX_LINES} more" if len(own) > MAX_LINES else ""
        yield f"  {words}: {', '.join(own[:MAX_LINES])}{more}"
    yield ""
    yield from _tables(found.tables)


def _tables(tables: Sequence[TablePlan]) -> Iterator[str]:
    on_disk = [own for own in tables if own.on_disk or own.cached]
    if whole := len(tables) - len(on_disk):
        yield f"{num_of(whole, 'table')} whole in DRAM"
    if not on_disk:
        return
    largest = sorted(on_disk, key=lambda own: -own.rows * own.record_bytes)
    width = max(5, *(len(own.name) for own in largest[:MAX_LINES]))
    yield f"{'table':<{width}} {'rows':>13} {'bytes/row':>9} {'pinned':>12} {'cached':>11} {'on disk':>13}  why"
    for own in largest[:MAX_LINES]:
        yield (
            f"{own.name:<{width}} {own.rows:>13,} {own.record_bytes:>9,} {own.pinned:>12,} {own.cached:>11,} "
            f"{own.on_disk:>13,}  {own.why}"
        )
    if len(largest) > MAX_LINES:
        yield f"and {len(largest) - MAX_LINES} smaller ones (--json has all)"


def _trial(found: Trial) -> Iterator[str]:
    yield (
        f"tried on {num_of(found.threads, 'thread')}: {found.samples_per_s:,.0f} samples/s, "
        f"{sum(found.step_ms.values()):.4g} ms a step; the process held {size(found.peak_bytes)} at most"
    )
    for own in found.steps:
        yield from _steps(own)
    if found.made_bytes:
        part = "every row" if found.made_share == 1 else f"the first {found.made_share:.1%} of the rows"
        yield f"  for the later epochs {part} on disk was made first, {size(found.made_bytes)}; it is removed again"
    yield from (f"  warning: {text}" for text in found.warnings)


def _steps(own: Steps) -> Iterator[str]:
    low, _, high = own.quartiles_ms
    phases = "  ".join(f"{phase} {ms:.3g}" for phase, ms in own.step_ms.items())
    kind = f"{own.kind}: " if own.kind else ""
    yield (
        f"  {kind}{own.total_ms:.4g} ms a step ({own.num_steps} steps, half of them between {low:.4g} and {high:.4g}); "
        f"{phases}"
    )
    if own.io:
        hits = "" if own.hits_per_lookup is None else f"; {own.hits_per_lookup:.1%} of lookups found their row in DRAM"
        yield (
            f"    {own.io['reads']:,.0f} reads of {size(own.io['read_bytes'])} and {own.io['writes']:,.0f} writes of "
            f"{size(own.io['written_bytes'])} a step, {own.wait_ms:.3g} ms of waiting for them{hits}"
        )


def _alternatives(rows: Sequence[Alternative]) -> Iterator[str]:
    base = rows[0].samples_per_s or 1.0
    width = max(len(_name(own)) for own in rows)
    yield f"{'':<{width}} {'samples/s':>11} {'speed':>7} {'ms a step':>10} {'reads':>8} {'writes':>8} {'memory':>10}"
    for own in rows:
        if own.samples_per_s is None or own.step_ms is None or own.spread is None or own.peak_bytes is None:
            yield f"{_name(own):<{width}} refused: {own.refused}"
            continue
        reads, writes = (f"{own.io[name]:,.0f}" if own.io else "" for name in ("reads", "writes"))
        yield (
            f"{_name(own):<{width}} {own.samples_per_s:>11,.0f} {own.samples_per_s / base:>6.2f}x "
            f"{sum(own.step_ms.values()):>10.4g} {reads:>8} {writes:>8} {size(own.peak_bytes):>10}  "
            f"({own.spread[0]:,.0f} to {own.spread[1]:,.0f})"
        )


def _name(own: Alternative) -> str:
    return " ".join(own.changes) or "the config as it is"
