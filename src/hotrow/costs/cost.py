"""What a training step will cost on a machine, phase by phase, before it is run.

    config, dataset -- work_of --> Work -- amounts_of --> amounts by phase -- predict (with a Hardware) --> seconds

`work_of` counts what a step does, which no machine changes. `amounts_of` turns that into amounts of a few kinds by
phase: ids, multiply-adds, cache lines that come from afar, calls from Python. A machine's file says how long some real
steps of known amounts took there (`hotrow probe`; lab/step_probe.py); `predict` finds, by phase, what one unit of each
kind takes there, and adds up. Units take no less than nothing and amounts only grow with work, so more work is never
predicted to be faster.

For several ranks, the predicted step has three parts: the work on the rank's own samples, the extra processor time that
sharing costs, and the waits for exchanges that do not overlap with work (wire.py counts these, and says in which order
things happen).
Steps of two processes here say what sharing takes (`shared lookup`, and `shared update` for all that follows;
lab/rank_probe.py).

A row is found in a cache or not by what a step touched since its last use: amounts count the lines whose last use lies
more than so many bytes back, for each of CACHES, and the machine's own steps say what each of them costs there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hotrow.costs.fit import unit_seconds
from hotrow.costs.hardware import Hardware, Network, check_cost_version
from hotrow.costs.traffic import MAX_IOS, Traffic, disk_of, io_seconds, traffic_of
from hotrow.costs.wire import Shared
from hotrow.costs.work import TableWork, Work, lines_of
from hotrow.parallel.ranks import TransportName
from hotrow.placement.budget import TableSlots
from hotrow.tables import TableConfig

PHASES = ("data", "lookup", "dense", "update")
"""The phases of a step. data: waiting for the batch and announcing later batches, with nearly all of the wait for rows
from disk. lookup: the pooled lookup, with the rest of that wait: all of it without look-ahead. dense: dense layers
forward and backward (the backward of the lookup only keeps the pooled gradient), and their optimizer. update: sorting,
summing and updating the touched rows."""
CACHES = (1 << 21, 1 << 25)
"""Bytes: 2 and 32 MiB, about the second level of caches and the third."""
DIMS = (4, 8, 16, 32, 64, 128)
"""Numbers of columns for which the kernels have loops of their own."""
SORTED_BITS = 11
"""Bits of a row number by which one pass of the update's sort orders (batch_update.cpp)."""
BLIND_ERROR = 0.2
"""By how much predictions were wrong that were written before their step was measured: the geometric mean over the
random models of `hotrow study prediction` (docs/measurements/prediction-study*.json). Of the ratio of two steps it is
the same."""
LONGER = "measure the machine again with a longer probe (hotrow probe --seconds 50), with nothing else running"
Amounts = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's predicted time."""

    seconds: Mapping[str, float]
    """By phase, with the names of PHASES."""
    wait_s: float
    """The wait for rows from disk, what reads take beyond what the step hides: a part of `data`, because announcing a
    batch waits for slots and reads; without look-ahead a part of `lookup`."""
    binds: str
    """What a faster machine would need first: "dense", "rows in DRAM", "disk reads", "python", ..."""
    exchange_s: float = 0.0
    """What ranks take to send each other rows and sums: a part of all phases."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """For several ranks, what makes up the step: "own work", the processor's "sharing", with what it takes to send and
    receive messages, "latency", and "bytes on the link"."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


# ---- amounts


def amounts_of(work: Work, traffic: Traffic | None = None, *, beside: float = 1.0) -> dict[str, Amounts]:
    """Returns the amounts of each phase, and of `window`, the part of `data` that gathers windows of rows.

    Every amount grows with the work. traffic: of tables in tiers. beside: the share of its I/Os that are under way
    while the step computes; the others come while it waits.
    """
    amounts = {
        "data": _data(work),
        "window": _window(work),
        "lookup": _lookup(work),
        "dense": _dense(work),
        "update": _update(work),
    }
    for phase in PHASES:
        amounts[phase] |= _cold(work)
    if traffic is not None:
        ios = traffic.reads + traffic.writes
        moved = {"missed rows": traffic.misses, "I/Os": ios, "moved bytes": traffic.read_bytes + traffic.written_bytes}
        mapped = {"in tiers": 1.0, "tables in tiers": float(traffic.tables), "mapped ids": traffic.lookups}
        amounts["data"] |= {**mapped, "mapped rows": traffic.rows, **moved}
        amounts["lookup"] |= {**mapped, "I/Os": beside * ios}
        amounts["dense"] |= {"I/Os": beside * ios}
        amounts["update"] |= {**mapped, "mapped rows": traffic.rows, "I/Os": beside * ios}
    return amounts


def _cold(work: Work) -> Amounts:
    """Returns what decides how much of its code and data a step's calls from Python still find in the caches."""
    cold = work.touched_bytes / (work.touched_bytes + CACHES[0])
    return {"cold steps": cold, f"steps with {work.dense_optimizer}": 1.0}


def _data(work: Work) -> Amounts:
    num_features = sum(len(own.table.feature_names) for own in work.tables)
    jagged = [own for own in work.tables if own.jagged]
    jagged_features = sum(len(own.table.feature_names) for own in jagged)
    return {
        "steps": 1.0,
        "dense columns": float(work.num_dense),
        "features": float(num_features),
        "dense values": float(work.batch_size * work.num_dense),
        "ids": sum(own.lookups for own in work.tables),
        "jagged features": float(jagged_features),
        "steps with lists": float(bool(jagged)),
        "features beside lists": float(num_features * bool(jagged)),
    }


def _window(work: Work) -> Amounts:
    num_columns = 1 + work.num_dense + sum(len(own.table.feature_names) for own in work.tables if not own.jagged)
    jagged = [own for own in work.tables if own.jagged]
    lists = sum(len(own.table.feature_names) for own in jagged)
    ids = sum(own.lookups for own in jagged) / work.batch_size
    return {
        "gathered samples": work.gathered_samples,
        "gathered values": work.gathered_samples * num_columns,
        "gathered lists": work.gathered_samples * lists,
        "gathered ids of lists": work.gathered_samples * ids,
        "checked values": work.verified_samples * (num_columns + 2 * lists + ids),
    }


def _from_afar(work: Work, lines: Callable[[TableWork], float]) -> Amounts:
    """Returns lines of rows whose last use, in a step before, lies so many bytes back."""
    touched = work.touched_bytes
    found = {}
    for cache in CACHES:
        steps = cache / touched
        found[f"lines from beyond {cache >> 20} MiB"] = sum(
            lines(own) * float(rows @ (-np.expm1(-rates) * np.exp(-rates * steps)))
            for own, (rates, rows) in ((own, own.by_rate()) for own in work.tables)
        )
    return found


def _far_rows(work: Work) -> float:
    """Returns rows per step, times the doublings of the tables' bytes beyond 64 MiB: pages are found more slowly."""
    return sum(own.rows for own in work.tables) * math.log2(1 + work.table_bytes / (1 << 26))


def _of_other_widths(work: Work, count: Callable[[TableWork], float], what: str) -> Amounts:
    """Returns the numbers for which the kernels have no loop of its own, because of their tables' widths."""
    others = [own for own in work.tables if own.table.embedding_dim not in DIMS]
    return {f"{what} of other widths": sum(count(own) * own.table.embedding_dim for own in others)}


def _lookup(work: Work) -> Amounts:
    return {
        "steps": 1.0,
        "tensors": float(work.num_tensors),
        "ids": sum(own.lookups for own in work.tables),
        "bags": sum(float(work.batch_size * len(own.table.feature_names)) for own in work.tables if own.jagged),
        "lines": sum(own.lookups * lines_of(own.weight_bytes) for own in work.tables),
        **_of_other_widths(work, lambda own: own.lookups, "columns"),
        "pooled values": work.pooled_values,
        **_beyond("pooled values", work.pooled_values),
        **_from_afar(work, lambda own: lines_of(own.weight_bytes)),
        "far rows": _far_rows(work),
    }


def _beyond(what: str, values: float) -> Amounts:
    """Returns the part of `values` float32 numbers that the first of CACHES does not keep."""
    return {f"{what} beyond {CACHES[0] >> 20} MiB": max(0.0, values - CACHES[0] / 4)}


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _dense(work: Work) -> Amounts:
    wide = [(k, product) for k, product in enumerate(work.products) if product[2] > 1]
    forward = sum(float(n) * inputs * _round_up(outputs, 16) for _, (n, inputs, outputs) in wide)
    weights = sum(float(n) * _round_up(inputs, 16) * _round_up(outputs, 8) for _, (n, inputs, outputs) in wide)
    inward = sum(
        float(n) * _round_up(inputs, 16) * outputs for k, (n, inputs, outputs) in wide if k not in work.constant_inputs
    )
    return {
        "steps": 1.0,
        "calls": float(work.num_calls),
        "products": float(len(work.products)),
        "tensors": float(work.num_tensors),
        "split tensors": float(work.num_tensors) * (work.dense_optimizer == "split sgd"),
        "multiply-adds": forward + weights + inward,
        "layer values": work.layer_values,
        **_beyond("layer values", work.layer_values),
        f"weights by {work.dense_optimizer}": float(work.num_weights),
        "values of last layers": sum(float(n) * inputs for n, inputs, outputs in work.products if outputs == 1),
        "pairs": sum(float(n) * v * (v - 1) / 2 for n, v, _ in work.pairs),
        "pairs' multiply-adds": sum(float(n) * v * _round_up(v, 8) * d for n, v, d in work.pairs),
        "pooled values": work.pooled_values,
        "called values": work.call_values,
    }


def _update(work: Work) -> Amounts:
    passes = 1 if work.optimizer == "sgd" and work.precision != "fp16" else None
    touched = work.touched_bytes
    # SGD goes through the occurrences of rows, the other rules sum them first: two loops, of other speeds.
    by = " by sgd" if work.optimizer == "sgd" else ""
    found = {
        "steps": 1.0,
        "tables": float(len(work.tables)),
        f"keys{by}": sum(own.lookups for own in work.tables),
        f"sorted keys{by}": sum(own.lookups * (passes or _passes(own)) for own in work.tables),
        f"gradients{by}": sum(own.lookups * own.table.embedding_dim for own in work.tables),
        **_of_other_widths(work, lambda own: own.lookups, "gradients"),
        "rows": sum(own.rows for own in work.tables),
        "columns": sum(own.rows * own.table.embedding_dim for own in work.tables),
        "columns not float32": sum(
            own.rows * own.table.embedding_dim for own in work.tables if own.table.dtype != "float32"
        ),
        "state bytes": sum(own.rows * (own.record_bytes - _all_weight_bytes(own.table)) for own in work.tables),
        **_of_other_widths(work, lambda own: own.rows, "columns"),
        "far rows": _far_rows(work),
    }
    states = _from_afar(work, lambda own: lines_of(own.record_bytes - own.weight_bytes))
    for cache in CACHES:
        # Weights were read by the lookup of this step, after which its dense layers came.
        weights = sum(own.rows * lines_of(own.weight_bytes) for own in work.tables) * touched / (touched + cache)
        name = f"lines from beyond {cache >> 20} MiB"
        found[name] = weights + states[name]
    return found


def _all_weight_bytes(table: TableConfig) -> int:
    return table.num_bytes // table.num_embeddings


def _passes(own: TableWork) -> int:
    return max(1, math.ceil((own.table.num_embeddings - 1).bit_length() / SORTED_BITS))


# ---- seconds


class CostModel:
    """What units of work take on one machine; see `predict`. Raises ValueError for steps of another version."""

    def __init__(self, hardware: Hardware) -> None:
        check_cost_version(hardware, hardware.name)
        self.hardware = hardware
        self._units: dict[tuple[str, int], Amounts] = {}

    def units(self, phase: str, threads: int) -> Amounts:
        """Returns the seconds of a unit of each kind of amount. Raises ValueError if points are fewer than kinds."""
        if (phase, threads) not in self._units:
            points = [p for p in self.hardware.kernels.get(phase, []) if p.sizes.get("threads") == threads]
            kinds = {kind for point in points for kind, amount in point.sizes.items() if amount > 0} - {"threads"}
            if len(points) < len(kinds):
                raise ValueError(
                    f"{self.hardware.name} has {len(points)} steps measured for {len(kinds)} kinds of work in its "
                    f"hardware file (kernels.{phase}, {threads} threads), which is too few: {LONGER}"
                )
            self._units[phase, threads] = unit_seconds(points)
        return self._units[phase, threads]

    def measured_threads(self, phase: str) -> list[int]:
        """Returns the numbers of threads for which the phase was measured. Raises ValueError if there are none."""
        found = sorted({int(point.sizes["threads"]) for point in self.hardware.kernels.get(phase, [])})
        if not found:
            raise ValueError(
                f"{self.hardware.name} has no steps measured for phase {phase!r} in its hardware file "
                f"(kernels.{phase}): {LONGER if self.hardware.kernels else 'measure the machine with hotrow probe'}"
            )
        return found

    def seconds(self, phase: str, amounts: Amounts, threads: int) -> float:
        """Returns what the amounts of a phase take; between measured numbers of threads along their logarithms."""
        known = self.measured_threads(phase)
        if not known[0] <= threads <= known[-1]:
            raise ValueError(
                f"{self.hardware.name} has no steps on {threads} threads in its hardware file, only on {known[0]} to "
                f"{known[-1]}: set train.threads to one of these, or measure the machine with hotrow probe"
            )
        near = [max(n for n in known if n <= threads), min(n for n in known if n >= threads)]
        found = [self._total(phase, amounts, n) for n in near]
        if near[0] == near[1] or min(found) <= 0:
            return found[0]
        return math.exp(float(np.interp(math.log(threads), np.log(near), np.log(found))))

    def _total(self, phase: str, amounts: Amounts, threads: int) -> float:
        units = self.units(phase, threads)
        if missing := [kind for kind, amount in amounts.items() if amount > 0 and kind not in units]:
            raise ValueError(
                f"{self.hardware.name} has no steps measured with: {', '.join(missing)} in its hardware file "
                f"(kernels.{phase}, {threads} threads): {LONGER}"
            )
        return sum(units[kind] * amount for kind, amount in amounts.items() if amount > 0)

    def predict(
        self, work: Work, slots: Sequence[TableSlots] | None = None, shared: Shared | None = None
    ) -> Prediction:
        """Returns the step's time; see the function `predict`."""
        held = work if shared is None else shared.held
        traffic = None if slots is None else traffic_of(held, slots)
        amounts = amounts_of(work, traffic)
        seconds, wait_s = self._phases(work, amounts), 0.0
        if traffic is not None and traffic.reads + traffic.writes > 0:
            together = min(MAX_IOS, max(1.0, (traffic.reads + traffic.writes) * max(1, work.lookahead)))
            io_s = io_seconds(disk_of(held, self.hardware), traffic, together=together)
            if io_s > (busy_s := sum(seconds.values())):
                amounts = amounts_of(work, traffic, beside=busy_s / io_s)
                seconds = self._phases(work, amounts)
            wait_s = max(0.0, io_s - (sum(seconds.values()) if work.lookahead else 0.0))
        binds = self._binds(work, amounts, seconds, wait_s)
        seconds["data" if work.lookahead else "lookup"] += wait_s
        alone = Prediction(seconds=seconds, wait_s=wait_s, binds=binds)
        return alone if shared is None else self._shared(alone, work, shared)

    def _shared(self, alone: Prediction, work: Work, shared: Shared) -> Prediction:
        """Returns the step of a rank. alone: what its own samples take."""
        crowd = self._crowd(shared.local_size, work.threads)
        seconds = {phase: own_s * crowd.step for phase, own_s in alone.seconds.items()}
        own_s = sum(seconds.values())
        # Sums of a row's gradients are made beside the dense layers, to be sent.
        sums_s = self._sums_s(work) * crowd.step
        seconds["update"] -= sums_s
        seconds["dense"] += sums_s
        for name, amounts in shared.amounts.items():
            own = [{kind: n for kind, n in amounts.items() if (kind in OF_WEIGHTS) == dense} for dense in (False, True)]
            for phase, each in zip((name, "dense"), own, strict=True):
                if any(each.values()):
                    seconds[phase] += self._sharing_s(name, each, work.threads) * crowd.step
        sharing_s = sum(seconds.values()) - own_s
        work_s, pace = {"sums": sums_s, "rows": seconds["update"]}, self._pace(work, shared)
        waits = _waits(shared, work_s, pace)
        seconds = {phase: own_s + waits.get(phase, 0.0) for phase, own_s in seconds.items()}
        exchange_s = sum(waits.values())
        messages_s, latency_s = (
            sum(_waits(shared, work_s, less).values())
            for less in (pace._replace(byte_s=0.0), pace._replace(byte_s=0.0, further_s=0.0))
        )
        return Prediction(
            seconds=seconds,
            wait_s=alone.wait_s,
            binds="the network" if exchange_s > sum(seconds.values()) / 2 else alone.binds,
            exchange_s=exchange_s,
            parts_s={
                "own work": own_s,
                "sharing": sharing_s + messages_s - latency_s,
                "latency": latency_s,
                "bytes on the link": exchange_s - messages_s,
            },
        )

    def _sharing_s(self, name: str, amounts: Amounts, threads: int) -> float:
        """Returns what sharing takes, which the probe measures for one number of threads: that counts for all."""
        known = self.measured_threads(f"shared {name}")
        return self.seconds(f"shared {name}", amounts, min(max(threads, known[0]), known[-1]))

    def _sums_s(self, work: Work) -> float:
        """Returns the part of an update that adds up each row's gradients."""
        amounts = {kind: n for kind, n in _update(work).items() if kind.startswith(SUMMED)}
        return self.seconds("update", amounts, work.threads)

    def _crowd(self, local_size: int, threads: int) -> _Crowd:
        """Returns how much longer steps take because other ranks of this machine use its cores."""
        cores = self.hardware.num_cores
        busy, free = (local_size - 1) * threads, max(1, cores - threads)
        full = 1.0 if self.hardware.crowding is None else self.hardware.crowding.value
        share = local_size * threads / cores
        return _Crowd(share, (1 + (full - 1) * min(1.0, busy / free)) * max(1.0, share))

    def _pace(self, work: Work, shared: Shared) -> _Pace:
        """Returns how fast messages between the ranks travel. Either the link binds, which the ranks of a machine share
        if there are others elsewhere, or the processors, which all of them need at the same time. Raises ValueError if
        the network is not known.
        """
        network = network_of(self.hardware, shared.transport)
        if shared.num_ranks == 1:
            return _Pace(0.0, 0.0, 0.0)
        crowd = max(1.0, self._crowd(shared.local_size, work.threads).cores)
        cpu_s = network.cpu_s_per_byte.value * shared.local_size / self.hardware.num_cores
        on_link = shared.local_size if shared.local_size < shared.num_ranks else 1
        return _Pace(
            byte_s=max(on_link / network.bytes_per_s.value, cpu_s),
            turn_s=network.s_per_message.value * crowd,
            further_s=(shared.num_ranks - 2) * network.cpu_s_per_message.value * crowd,
            stops=transport_of(self.hardware, shared.transport) == "mpi",
        )

    def _phases(self, work: Work, amounts: Mapping[str, Amounts]) -> dict[str, float]:
        """Returns seconds by phase, without the wait for rows."""
        seconds = {phase: self.seconds(phase, amounts[phase], work.threads) for phase in PHASES}
        if any(amounts["window"].values()):
            seconds["data"] += self.seconds("window", amounts["window"], work.threads)
        return seconds

    def _binds(
        self,
        work: Work,
        amounts: Mapping[str, Amounts],
        seconds: Mapping[str, float],
        wait_s: float,
    ) -> str:
        """Returns what takes most of the step. seconds: without the wait."""
        threads = min(self.measured_threads("dense"), key=lambda n: abs(n - work.threads))
        shares = dict.fromkeys(("dense", "rows in DRAM", "python", "data"), 0.0) | {"disk reads": wait_s}
        shares["data"] = seconds["data"]
        for phase in ("lookup", "dense", "update"):
            units = self.units(phase, threads)
            for kind, amount in amounts[phase].items():
                what = "python" if kind in CALLS else "dense" if phase == "dense" else "rows in DRAM"
                shares[what] += units.get(kind, 0.0) * amount
        return max(shares, key=lambda what: shares[what])


class _Pace(NamedTuple):
    """What messages between ranks take."""

    byte_s: float
    turn_s: float
    """What a message to one other rank and one back take."""
    further_s: float
    """What the processor takes for the same to all further ranks."""
    stops: bool = False
    """Whether bytes travel only while the rank waits, as over MPI (parallel/mpi.py)."""


def _waits(shared: Shared, work_s: Mapping[str, float], pace: _Pace) -> dict[str, float]:
    """Returns how long a rank sends to others and waits for them, by phase. work_s: what its work takes, by name of the
    event.

    A message takes its turn, and one whose length is not known waits for its head, which takes another. Messages follow
    each other on the link, while the rank works or waits.
    """
    now = free = 0.0
    arrived, waits = dict[str, float](), dict[str, float]()
    for event in shared.events:
        start = now
        if event.kind == "send":
            turns = 2 if "counts" in event.sent_bytes else 1
            now += turns * pace.further_s
            free = max(free, now) + sum(event.sent_bytes.values()) * pace.byte_s
            arrived[event.name] = free + turns * pace.turn_s
        elif event.kind == "wait":
            now = max(now, arrived[event.name])
        else:
            now += work_s[event.name]
            if pace.stops:
                free = max(free, start) + work_s[event.name]
                arrived = {name: max(at, start) + work_s[event.name] for name, at in arrived.items()}
            continue
        waits[event.phase] = waits.get(event.phase, 0.0) + now - start
    return waits


def transport_of(hardware: Hardware, transport: TransportName | None) -> TransportName:
    """Returns the transport; if None, gloo, or MPI if only MPI is known of the machine."""
    return transport or ("mpi" if hardware.network is None and hardware.mpi is not None else "gloo")


def network_of(hardware: Hardware, transport: TransportName | None = None) -> Network:
    """Returns what exchanges between ranks take over the transport of `transport_of`.

    Raises ValueError, with the cure, if nobody knows.
    """
    name = transport_of(hardware, transport)
    found = hardware.mpi if name == "mpi" else hardware.network
    if found is None:
        raise ValueError(
            f"the hardware file of {hardware.name} has no {'mpi' if name == 'mpi' else 'network'}, without which "
            "an exchange between ranks has no time: measure it again with hotrow probe, or declare it (docs/probe.md)"
        )
    return found


CALLS = ("steps", "tables", "tensors", "calls", "products")
"""Amounts that Python takes time for, however small the tensors are."""


SUMMED = ("keys", "sorted keys", "gradients")
"""How kinds of amounts of an update begin that adding up each row's gradients takes."""
OF_WEIGHTS = ("shared tensors", "shared weights")


class _Crowd(NamedTuple):
    """What the ranks of a machine do to each other."""

    cores: float
    """Threads of all ranks, over cores."""
    step: float
    """How many times as long a step without exchanges takes."""


def predict(
    work: Work, hardware: Hardware, slots: Sequence[TableSlots] | None = None, shared: Shared | None = None
) -> Prediction:
    """Returns the step's time; slots: each table's slots in DRAM, None if all rows lie there.

    shared: what sharing adds, if ranks train together; `work` is then one rank's, and slots are those of the rows that
    it holds. Raises ValueError naming what the hardware file lacks.
    """
    return _model_of(hardware).predict(work, slots, shared)


_MODELS: OrderedDict[int, CostModel] = OrderedDict()
"""By the address of a Hardware, which its model keeps alive."""
MAX_MODELS = 8


def _model_of(hardware: Hardware) -> CostModel:
    """Returns the model of a machine; it is made once, because a planner asks for thousands of predictions."""
    if id(hardware) not in _MODELS:
        _MODELS[id(hardware)] = CostModel(hardware)
        if len(_MODELS) > MAX_MODELS:
            _MODELS.popitem(last=False)
    return _MODELS[id(hardware)]
