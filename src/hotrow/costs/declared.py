"""Training steps on a declared machine, which is not here: nothing was measured on it.

On its processors, `modelled`: what a unit of work takes here (`CostModel.units`) is divided by how many times faster
the declared machine is at that kind of work: arithmetic by float32 operations a second, rows and values from memory by
its rates, calls from Python not at all, and all else, which threads share and the caches serve, by the number of
threads. Every figure is `assumed`, and `notes` says from whom.

With its GPUs, `with_gpus`: by their rates alone, so a range.

    rows on the GPUs    each holds an equal share of the tables and looks up for the global batch; pooled vectors and
                        their gradients go from GPU to GPU
    rows on the host    its processors look up and update; pooled vectors go to the GPUs, and their gradients come back

Dense layers are on all GPUs, each of which takes its part of the batch; their gradients are added up over all of them.
The parts of a step follow each other; the host's loader works beside them. This is what hybrid-parallel training does
in general: hotrow itself trains with one GPU (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from hotrow.costs.cost import CACHES, CostModel
from hotrow.costs.hardware import CURE, Figure, Gpu, Hardware, Point, known_hardware, read_hardware
from hotrow.costs.work import Work

_DENSE = ("sgd", "adagrad", "adam", "split sgd")
_MIB = tuple(cache >> 20 for cache in CACHES)
_KINDS: dict[str, tuple[str, ...]] = {
    "one thread": (
        *("steps", "cold steps", "steps with lists", *(f"steps with {name}" for name in _DENSE)),
        *("calls", "products", "tables", "tensors", "split tensors"),
        *("features", "jagged features", "features beside lists", "dense columns"),
        *("in tiers", "tables in tiers", "I/Os"),
        # Python shares rows message by message and table by table; kernels sort, copy and add them.
        *("shared steps", "steps with others", "messages", "shared tables", "messages of tables"),
        *("shared tensors", "pooled features", "ids for owners"),
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
        *("shared ids", "shared rows", "shared values", "sent values", "values for owners", "shared weights"),
    ),
}
RATES = {kind: rate for rate, kinds in _KINDS.items() for kind in kinds}
"""By which rate each kind of amount scales; "one thread": not at all, however many threads there are."""
POINT_S, MIN_S = 1e-3, 1e-12


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
        amount = POINT_S / seconds if seconds > MIN_S**2 else POINT_S / MIN_S**2
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


# ---- with its GPUs

RowsOn = Literal["GPUs", "host"]
USABLE = 0.8
"""The share of a GPU's memory that may hold rows and their optimizer states; activations and batches need the rest."""
FIXED_LAUNCHES = 20
"""Kernels of a step beside those of its layers: lookup, update, loss, and copies. Tables are looked up together."""


class Shares(NamedTuple):
    """What a step gets of the declared rates, which are mostly peaks, and what else is assumed of it."""

    products: float
    memory: float
    links: float
    launch_s: float
    loader: float = 1.0
    """How much of its time hotrow's loader, of one thread, takes: none if many processes load."""


LIKELY, BEST, WORST = Shares(0.5, 0.6, 0.8, 10e-6), Shares(0.9, 0.9, 1.0, 4e-6, 0.0), Shares(0.15, 0.3, 0.5, 20e-6)
"""Assumed. Layers of DLRMs are small for a GPU, and rows of 64 to 512 bytes are short for its memory."""


@dataclass(frozen=True, kw_only=True)
class Accelerated:
    """A modelled step."""

    step_s: float
    range_s: tuple[float, float]
    """With the best and with the worst shares of the rates."""
    rows_on: RowsOn
    binds: str
    """The longest part: "data", "products", "memory of GPUs", "links between GPUs", "links to GPUs", "launches", or
    "rows on the host"."""


def with_gpus(work: Work, machine: Hardware, host_s: Mapping[str, float]) -> Accelerated:
    """Returns the step with rows on the GPUs or on the host, whichever makes it faster.

    work: of the global batch. host_s: what each phase takes on the machine's processors alone.
    Raises ValueError if the machine has no GPUs, or GPUs of which no rate of float32 products is declared.
    """
    if not machine.gpus:
        raise ValueError(f"{machine.name} declares no gpus")
    (gpu, *others) = machine.gpus
    if others:
        raise ValueError(f"{machine.name} has several kinds of GPU, and steps over all of them are not modelled")
    if "fp32" not in gpu.product_flops_per_s:
        raise ValueError(f"{machine.name} has no product_flops_per_s.fp32 of {gpu.name}: declare it (docs/probe.md)")
    places: list[RowsOn] = ["host"]
    if work.table_bytes <= USABLE * gpu.count * gpu.memory_bytes.value:
        places.append("GPUs")
    rows_on = min(places, key=lambda place: _step(work, gpu, host_s, place, LIKELY)[0])
    step_s, binds = _step(work, gpu, host_s, rows_on, LIKELY)
    best_s, worst_s = (_step(work, gpu, host_s, rows_on, shares)[0] for shares in (BEST, WORST))
    return Accelerated(step_s=step_s, range_s=(best_s, worst_s), rows_on=rows_on, binds=binds)


def _step(work: Work, gpu: Gpu, host_s: Mapping[str, float], rows_on: RowsOn, shares: Shares) -> tuple[float, str]:
    """Returns the seconds of a step, and its longest part."""
    parts = _parts(work, gpu, rows_on, shares)
    if rows_on == "host":
        parts["rows on the host"] = host_s["lookup"] + host_s["update"]
    chain_s, longest = sum(parts.values()), max(parts, key=lambda part: parts[part])
    loader_s = shares.loader * host_s["data"] + parts.get("rows on the host", 0.0)  # by the same processors
    return (loader_s, "data") if loader_s > chain_s else (chain_s, longest)


def _parts(work: Work, gpu: Gpu, rows_on: RowsOn, shares: Shares) -> dict[str, float]:
    count = gpu.count
    multiply_adds = sum(
        float(n) * inputs * outputs * (2 if k in work.constant_inputs else 3)
        for k, (n, inputs, outputs) in enumerate(work.products)
    ) + sum(1.5 * n * v * (v - 1) * columns for n, v, columns in work.pairs)
    to_gpus = 8 * sum(own.lookups for own in work.tables) + 4.0 * work.batch_size * work.num_dense
    vectors = 4 * work.pooled_values
    moved = 3 * 4 * work.layer_values + 3 * 4 * work.num_weights * count  # forward, backward; gradients, update
    from_gpus = between = 0.0
    if rows_on == "GPUs":
        # Read for the lookup and again with its gradient; read and written by the update.
        moved += sum(own.lookups * (own.weight_bytes + 4 * own.table.embedding_dim) for own in work.tables)
        moved += sum(2 * own.rows * own.record_bytes for own in work.tables)
        between += 2 * vectors * (count - 1) / count
    else:
        to_gpus, from_gpus = to_gpus + vectors, vectors
    between += 2 * (count - 1) * 4 * work.num_weights
    links_s = to_gpus / gpu.to_device_bytes_per_s.value + from_gpus / gpu.to_host_bytes_per_s.value
    peers_s = between * _s_per_byte_between(gpu)
    launches = 2 * work.num_calls + 3 * len(work.products) + 2 * len(work.pairs) + FIXED_LAUNCHES
    return {
        "products": 2 * multiply_adds / (count * gpu.product_flops_per_s["fp32"].value * shares.products),
        "memory of GPUs": moved / (count * gpu.memory_bytes_per_s.value * shares.memory),
        "links to GPUs": links_s / (count * shares.links),
        "links between GPUs": peers_s / (count * shares.links),
        "launches": launches * shares.launch_s,
    }


def _s_per_byte_between(gpu: Gpu) -> float:
    """Returns the seconds per byte that a GPU sends to another, if need be through the host."""
    if gpu.peer_bytes_per_s is not None:
        return 1 / gpu.peer_bytes_per_s.value
    return 1 / gpu.to_host_bytes_per_s.value + 1 / gpu.to_device_bytes_per_s.value
