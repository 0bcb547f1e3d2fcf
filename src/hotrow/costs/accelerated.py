"""A training step with the GPUs of a declared machine, by its rates alone: a range, since nothing was measured there.

    rows on the GPUs    each holds an equal share of the tables and looks up for the global batch; pooled vectors and
                        their gradients go from GPU to GPU
    rows on the host    its processors look up and update; pooled vectors go to the GPUs, and their gradients come back

Dense layers are on all GPUs, each of which takes its part of the batch; their gradients are added up over all of them.
The parts of a step follow each other; the host's loader works beside them. This is what hybrid-parallel training does
in general: hotrow itself trains with one GPU (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hotrow.costs.hardware import Gpu, Hardware
from hotrow.costs.work import Work

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
    table_bytes = sum(own.table.num_embeddings * own.record_bytes for own in work.tables)
    if table_bytes <= USABLE * gpu.count * gpu.memory_bytes.value:
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
