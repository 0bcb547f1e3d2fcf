"""The verb `plan`: what `forecast/explain.py` says of a config, and how it is shown to people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hotrow.base.files import size
from hotrow.base.progress import num_of
from hotrow.config.load import load_config
from hotrow.costs.declared import read_machine
from hotrow.costs.hardware import another_machine, known_hardware, this_host
from hotrow.data.packed.reader import PackedDataset
from hotrow.forecast.explain import Explanation, TablePlan, bind, explain
from hotrow.forecast.ranks import OverRanks
from hotrow.parallel.ranks import Ranks
from hotrow.setup.room import Room
from hotrow.setup.setup import Setup

MAX_LINES = 40
"""Tables that are shown to people; --json has all."""


def plan(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    hardware: Path | None = None,
    num_ranks: int | None = None,
    target: float | None = None,
) -> Explanation:
    """Returns the plan of a config on a machine: this one, if no hardware file is named."""
    if target is not None and not 0 < target < math.inf:
        raise ValueError(f"--target is {target:g}; give samples per second, a number above 0")
    if target is not None and num_ranks is not None:
        raise ValueError("--target asks about one machine; give it without --ranks")
    parsed = load_config(config, overrides)
    dataset = PackedDataset.open(parsed.data, verify="sizes")
    ranks = None
    if num_ranks is not None:
        if not 2 <= num_ranks <= parsed.train.batch_size:
            raise ValueError(
                f"--ranks is {num_ranks}; give a number from 2 to train.batch_size, {parsed.train.batch_size}"
            )
        ranks = Ranks(0, num_ranks, num_ranks)
    machine = known_hardware() if hardware is None else read_machine(hardware)
    described = machine is not None and another_machine(machine, this_host()) is not None
    room = Room.of(machine) if machine is not None and described else None
    folder = Path(parsed.run or "runs")
    setup = Setup.decide(parsed, dataset, folder, ranks=ranks, room=room, hardware=machine)
    alone = None
    if ranks is not None:
        with suppress(ValueError):  # one machine may be too small
            alone = Setup.decide(parsed, dataset, folder, room=room, hardware=machine)
    return explain(setup, target=target, alone=alone)


def lines_of(found: Explanation) -> Iterator[str]:
    """Yields the plan in words."""
    if found.ranks is not None:
        yield from _ranks(found, found.ranks)
        return
    where = "all in DRAM" if found.disk is None else f"{size(found.dram_bytes)} of DRAM, the rest in {found.disk}"
    yield f"tables and optimizer state take {size(found.needed_bytes)}: {where}"
    yield ""
    yield from _tables(found.tables)
    if found.hits_missed is not None:
        yield (
            "No other way to divide this DRAM would raise the hit rate by more than "
            f"{100 * found.hits_missed:.2f} percentage points."
        )
    yield ""
    if (step := found.predicted) is None:
        yield f"no speed is predicted: {found.not_predicted}"
        return
    assert found.hardware is not None and found.threads is not None
    phases = "  ".join(f"{phase} {ms:.3g}" for phase, ms in step.step_ms.items())
    machine = f"predicted on {found.hardware['name']} ({found.hardware['date']})"
    if found.modelled is not None:
        machine = f"modelled on {found.hardware['name']}, {found.modelled.removeprefix('modelled ')}"
    yield (
        f"{machine}, on {num_of(found.threads, 'thread')}: {step.samples_per_s:,.0f} samples/s, "
        f"{sum(step.step_ms.values()):.4g} ms a step"
    )
    yield f"  ms by phase: {phases} (waiting for rows {step.wait_ms:.3g}); {bind(step.binds)}"
    if found.written_bytes_per_day:
        rated = "" if found.rated_days is None else f"; the drive's rated life is {found.rated_days:,.0f} days of this"
        written = f"{size(found.written_bytes_per_day)} of rows a day of training"
        yield f"  to the drive: {written}, checkpoints not counted{rated}"
    if found.changes:
        yield 'What would change the speed (predicted; "modelled" means that the hardware was not measured):'
        for each in found.changes:
            if each.samples_per_s is None:
                yield f"   cannot  {each.what}: {each.cannot}"
                continue
            modelled = ", modelled" if each.modelled else ""
            yield f"  {each.gain:+7.1%}  {each.what} ({each.samples_per_s:,.0f} samples/s{modelled})"
    if (target := found.target) is not None:
        yield f"for {target.samples_per_s:,.0f} samples/s{', modelled' if found.modelled else ''}: {target.text}"


def _tables(tables: Sequence[TablePlan]) -> Iterator[str]:
    largest = sorted(tables, key=lambda own: -own.rows * own.record_bytes)
    width = max(len(own.name) for own in largest[:MAX_LINES])
    yield (
        f"{'table':<{width}} {'rows':>13} {'bytes/row':>9} {'pinned':>12} {'cached':>11} {'on disk':>13} "
        f"{'hits':>6}  why"
    )
    for own in largest[:MAX_LINES]:
        hits = "" if own.hit_rate is None else f"{own.hit_rate:.1%}"
        yield (
            f"{own.name:<{width}} {own.rows:>13,} {own.record_bytes:>9,} {own.pinned:>12,} {own.cached:>11,} "
            f"{own.on_disk:>13,} {hits:>6}  {own.why}"
        )
    if len(largest) > MAX_LINES:
        yield f"and {len(largest) - MAX_LINES} smaller tables (--json has all)"


def _ranks(found: Explanation, ranks: OverRanks) -> Iterator[str]:
    assert found.hardware is not None and found.threads is not None
    yield (
        f"{ranks.num_ranks} machines like {found.hardware['name']}, {size(ranks.capacity_bytes)} of DRAM for tables on "
        f"each; tables and optimizer state take {size(found.needed_bytes)}"
    )
    where = "all in DRAM" if ranks.disk is None else f"the rest in {ranks.disk}"
    least, most = min(ranks.held_bytes), max(ranks.held_bytes)
    yield f"a rank holds {size(most) if least == most else f'{size(least)} to {size(most)}'}: {where}"
    for owner in dict.fromkeys(ranks.owners.values()):
        own = [name for name, each in ranks.owners.items() if each == owner]
        words = {"row": "dealt out row by row", "replicated": "on every rank"}.get(owner, owner)
        more = f" and {len(own) - MAX_LINES} more" if len(own) > MAX_LINES else ""
        yield f"  {words}: {', '.join(own[:MAX_LINES])}{more}"
    step = ranks.step
    gain = "" if ranks.gain is None else f", {1 + ranks.gain:.2f}x one machine's"
    yield (
        f"modelled, on {num_of(found.threads, 'thread')} each: {step.samples_per_s:,.0f} samples/s{gain}, "
        f"{sum(step.step_ms.values()):.4g} ms a step; {bind(step.binds)}"
    )
    phases = "  ".join(f"{phase} {ms:.3g}" for phase, ms in step.step_ms.items())
    yield f"  ms by phase: {phases} (in exchanges {step.exchange_ms or 0:.3g}, waiting for rows {step.wait_ms:.3g})"
    by_purpose = (step.wire_bytes_per_step or {}).items()
    sent = ", ".join(f"{purpose} {size(num_bytes)}" for purpose, num_bytes in by_purpose)
    yield f"  a rank sends in a step: {sent}"
