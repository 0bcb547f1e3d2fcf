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

from hotrow.costs.cost import CACHES, CostModel
from hotrow.costs.hardware import CURE, Figure, Hardware, Point, known_hardware, read_hardware

_DENSE = ("sgd", "adagrad", "adam", "split sgd")
_MIB = tuple(cache >> 20 for cache in CACHES)
_KINDS: dict[str, tuple[str, ...]] = {
    "one thread": (
        *("steps", "cold steps", "steps with lists", *(f"steps with {name}" for name in _DENSE)),
        *("calls", "products", "tables", "tensors", "split tensors"),
        *("features", "jagged features", "features beside lists", "dense columns"),
        *("in tiers", "tables in tiers", "I/Os"),
        # What sharing asks of a rank's processor is done by one thread (parallel/sharded.py).
        *("shared steps", "steps with others", "shared tables", "messages of tables"),
        *("shared ids", "shared rows", "shared values"),
        *("pooled features", "messages of features", "ids for owners", "values for owners"),
        *("sent values", "shared tensors", "shared weights"),
        # The probe measures windows once, for all numbers of threads.
        *("gathered samples", "gathered values", "gathered lists", "gathered ids of lists", "checked values"),
    ),
    "flops_per_s": ("multiply-adds", "pairs' multiply-adds"),
    "random_rows": ("far rows", *(f"lines from beyond {mib} MiB" for mib in _MIB)),
    "stream_bytes_per_s": tuple(f"{what} values beyond {_MIB[0]} MiB" for what in ("pooled", "layer")),
    "threads": (
        *("ids", "bags", "lines", "rows", "columns", "columns not float32", "columns of other widths", "state bytes"),
        *(f"{what}{by}" for what in ("keys", "sorted keys", "gradients") for by in ("", " by sgd")),
        *("gradients of other widths", "dense values", "pooled values", "layer values", "called values"),
        *("values of last layers", "pairs", *(f"weights by {name}" for name in _DENSE)),
        *("mapped ids", "mapped rows", "missed rows", "moved bytes"),
    ),
}
RATES = {kind: rate for rate, kinds in _KINDS.items() for kind in kinds}
"""By which rate each kind of amount scales; "one thread": not at all, however many threads there are."""
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
        pairs = {machine.num_cores: measured[-1]} | ({1: 1} if 1 in measured else {})
        kernels[phase] = [
            point
            for theirs, own in sorted(pairs.items())
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
    """Returns the rate by which a kind of amount scales. Raises ValueError for an unknown kind."""
    if kind not in RATES:
        raise ValueError(f"steps with {kind!r} cannot be modelled: measured for another version of hotrow: {CURE}")
    return RATES[kind]


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


def modelled_by(hardware: Hardware) -> str | None:
    """Returns how the steps of a machine were found if some were not measured on it, else None."""
    points = (point for phase in hardware.kernels.values() for point in phase)
    if all(point.seconds.source == "measured" for point in points):
        return None
    return hardware.notes.get("kernels", "modelled from steps that nobody measured")
