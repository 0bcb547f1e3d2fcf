"""Training steps on a machine that is not here: those measured on this one, scaled by the rates of both.

What a unit of work takes here (`CostModel.units`) is divided by how many times faster the declared machine is at that
kind of work: arithmetic by float32 operations a second, rows and values from memory by its rates, calls from Python not
at all, and all else, which threads share and the caches serve, by the number of threads. The result is a model on top
of a measurement, for the processor alone: every figure is `assumed`, and `notes` says from whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hotrow.plan.cost import CALLS, CostModel
from hotrow.plan.hardware import Figure, Hardware, Point, known_hardware, read_hardware

ONE_THREAD = (*CALLS, "features", "dense columns", "jagged columns", "in tiers", "tables in tiers", "I/Os")
"""Kinds of amounts that one thread works on however many there are."""
POINT_S, LEAST_S = 1e-3, 1e-12


def read_machine(path: Path | str) -> Hardware:
    """Returns the machine that a file describes, as `read_hardware`; one that is not here gets modelled steps."""
    machine = read_hardware(path)
    known = None if machine.kernels else known_hardware()
    return machine if known is None else modelled(machine, known)


def modelled(machine: Hardware, here: Hardware) -> Hardware:
    """Returns `machine` with steps modelled from those of `here`, on one thread and on all.

    Raises ValueError, which names the field, if one of them lacks a rate.
    """
    model = CostModel(here)
    kernels: dict[str, list[Point]] = {}
    for phase in here.kernels:
        measured = model.measured_threads(phase)
        pairs = {(1, 1), (measured[-1], machine.num_cores)} if 1 in measured else {(measured[-1], machine.num_cores)}
        kernels[phase] = [
            point
            for own, theirs in sorted(pairs)
            for point in _points(model.units(phase, own), faster(machine, theirs, here, own), theirs, here.name)
        ]
    note = f"modelled from steps measured on {here.name} on {here.date}, by the rates of both machines"
    return replace(machine, kernels=kernels, notes={**machine.notes, "kernels": note})


def _points(units: Mapping[str, float], faster: Mapping[str, float], threads: int, name: str) -> Iterator[Point]:
    """Yields a point for every kind, from which the cost model finds the unit's seconds again."""
    for kind, unit_s in units.items():
        by = rate_of(kind)
        seconds = unit_s / faster[by]
        # A unit that costs nothing here costs as good as nothing there.
        amount = POINT_S / seconds if seconds > LEAST_S**2 else POINT_S / LEAST_S**2
        note = f"{name}'s, {faster[by]:.3g} times faster ({by})"
        yield Point({"threads": float(threads), kind: amount}, Figure(POINT_S, source="assumed", note=note))


def rate_of(kind: str) -> str:
    """Returns the rate by which a kind of amount scales."""
    if kind in ONE_THREAD or kind.startswith(("steps", "tensors")):
        return "one thread"
    if kind.endswith("multiply-adds"):
        return "flops_per_s"
    if kind.startswith(("lines from", "gradients from", "far rows")):
        return "random_rows"
    return "stream_bytes_per_s" if " beyond " in kind else "threads"


def faster(machine: Hardware, threads: int, here: Hardware, own: int) -> dict[str, float]:
    """Returns by each rate how many times faster `machine` is on `threads` than `here` on `own` threads."""
    ratio = {
        name: _rate(machine, name, threads) / _rate(here, name, own) for name in ("flops_per_s", "stream_bytes_per_s")
    }
    rows = [{p.sizes["row_bytes"]: p.seconds.value for p in each.random_rows if p.sizes["threads"] == n}
            for each, n in ((machine, threads), (here, own))]  # fmt: skip
    common = sorted(rows[0].keys() & rows[1].keys())
    # Without rows of the same size on both, as streams: rows are then limited by the same channels.
    by_rows = rows[1][common[-1]] / rows[0][common[-1]] if common else ratio["stream_bytes_per_s"]
    return {"one thread": 1.0, "threads": threads / own, "random_rows": by_rows, **ratio}


def _rate(machine: Hardware, name: str, threads: int) -> float:
    known: dict[str, Figure] = getattr(machine, name)
    if str(threads) not in known:
        raise ValueError(
            f"{machine.name} has no {name} for {threads} threads, by which steps could be modelled: declare it "
            "(docs/probe.md), or measure the machine with hotrow probe"
        )
    return known[str(threads)].value
