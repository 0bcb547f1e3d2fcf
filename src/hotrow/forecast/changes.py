"""What a change of the machine, or of one option, would do to the speed: `hotrow plan` and reports of runs show it.

An option is changed as a user would change it, and the step of that run is predicted: its tables, its division of DRAM,
its time. What rests on a machine that nobody measured is called modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hotrow.base.files import size
from hotrow.base.progress import num_of
from hotrow.config.load import apply_overrides, make_config
from hotrow.costs.cost import Prediction, network_of
from hotrow.costs.declared import modelled_by
from hotrow.costs.hardware import Disk, Figure
from hotrow.forecast.ranks import as_one_rank
from hotrow.parallel.shards import pooled_tables
from hotrow.placement.budget import Memory
from hotrow.setup.slots import SlotPlanner, looks_at_accesses, threads_of

FASTER = 2
"""How many times as fast the other disk is about which we say what it buys."""
GIB = 1 << 30
MORE_THREADS, ONE_PROCESS = "more threads", "one process"
"""How changes begin that the first line of a run names too; see `change_of`."""
MAX_LOOKAHEAD = 64
"""The largest `memory.lookahead`."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a change would do."""

    what: str
    samples_per_s: float | None
    gain: float | None
    """Its speed over the plan's speed, less 1; None if nothing can be said."""
    cannot: str | None
    """Why nothing can be said."""
    modelled: bool
    """Whether it rests on a machine, or on steps, that nobody measured."""


Question = tuple[str, bool, Callable[[], float]]
"""A change, whether it is modelled, and what returns its samples per second or raises ValueError."""


def changes(planner: SlotPlanner, memory: Memory | None, *, most_rows: float = math.inf) -> list[Change]:
    """Returns what each change would do to the speed of a run whose rows lie in `memory`, the best first.

    memory: if None, all in DRAM. most_rows: if tables have more, nothing is asked for which all accesses are looked at
    anew, which takes seconds. Raises ValueError if the run itself cannot be predicted.
    """
    assert planner.hardware is not None
    now = planner.predict(None if memory is None else planner.slots_in(memory)[1], memory)
    before, all_modelled = planner.work.batch_size / now.step_s, modelled_by(planner.hardware) is not None
    found = []
    for what, modelled, speed in [*_machines(planner, memory, now, most_rows), *_options(planner, memory, most_rows)]:
        samples_per_s = gain = cannot = None
        try:
            samples_per_s = round(speed(), 1)
            gain = round(samples_per_s / before - 1, 4)
        except ValueError as error:  # a figure is missing, or nothing fits
            cannot = str(error)
        is_modelled = modelled or all_modelled
        found.append(Change(what=what, samples_per_s=samples_per_s, gain=gain, cannot=cannot, modelled=is_modelled))
    return sorted(found, key=lambda change: math.inf if change.gain is None else -change.gain)


def change_of(kind: str, predicted: Mapping[str, object] | None) -> tuple[str, float] | None:
    """Returns a change and its gain as `predicted` of a run's record has them, None if it has not.

    kind: how the change begins. The record may come from anywhere. The first line of a run, `hotrow plan` and the
    report say the same of threads, because all show this prediction.
    """
    found = (predicted or {}).get("changes")
    for each in found if isinstance(found, list) else ():
        what, gain = (each.get("what"), each.get("gain")) if isinstance(each, Mapping) else (None, None)
        if isinstance(what, str) and what.startswith(kind) and isinstance(gain, float):
            return what, gain
    return None


def step_at(planner: SlotPlanner, budget: int) -> float:
    """Returns a step's seconds with `budget` bytes of DRAM. Raises ValueError if a step does not fit in them."""
    if budget >= planner.needed_bytes:
        return planner.predict(None).step_s
    writes = planner.writes(budget)
    if reason := planner.short(budget, writes):
        raise ValueError(reason)
    memory, _, slots = planner.divide(budget, writes)
    return planner.predict(slots, memory).step_s


# ---- other options


def _options(planner: SlotPlanner, memory: Memory | None, most_rows: float) -> Iterator[Question]:
    """Yields the options that may make a run faster on the same machines."""
    assert planner.hardware is not None and planner.dataset is not None
    config, work, sharing = planner.config, planner.work, planner.sharing
    num_threads = threads_of(config, 1 if sharing is None else sharing.local_size)
    threads = max(int(point.sizes["threads"]) for point in planner.hardware.kernels["dense"])
    batch_size, lookahead = 2 * config.train.batch_size, min(MAX_LOOKAHEAD, max(4, 2 * work.lookahead))
    alone, in_fp32 = sharing is None, work.precision == "fp32"
    exchange = None if sharing is None else "rows" if pooled_tables(sharing.shards) else "pooled"
    asked = {
        f"train.threads={threads}": (MORE_THREADS, alone and num_threads < threads),
        f"train.batch_size={batch_size}": (
            "larger batches, which train another model",
            batch_size <= planner.dataset.split("train").num_rows,
        ),
        "train.precision=fp16": ("rows in half the bytes, rounded", in_fp32),
        "train.precision=split_bf16": ("lookups that read half of a row", in_fp32),
        f"memory.lookahead={lookahead}": ("a longer look-ahead", memory is not None and work.lookahead < lookahead),
        "hot.schedule=fae": ("hot and cold phases", config.hot.schedule == "none"),
        f"parallel.exchange={exchange}": ("another exchange of rows", not alone),
        "parallel.wire_dtype=bf16": ("numbers that travel rounded", not alone and config.parallel.wire_dtype == "fp32"),
    }
    for option, (what, applies) in asked.items():
        if applies:
            yield f"{what} ({option})", False, lambda option=option: _speed_with(planner, memory, option, most_rows)  # type: ignore[misc]
    if sharing is not None and sharing.local_size == sharing.num_ranks and memory is None:
        what = f"{ONE_PROCESS} of {num_of(threads, 'thread')} instead of {sharing.num_ranks} ranks"
        yield what, False, lambda: _speed_of_one(planner, threads, most_rows)


def _speed_of_one(planner: SlotPlanner, threads: int, most_rows: float) -> float:
    """Returns samples per second of one process that holds the rows of all ranks, in DRAM as they do."""
    assert planner.sharing is not None
    _check_few(planner, most_rows)
    train = planner.config.train.model_copy(update={"threads": threads})
    config = planner.config.model_copy(update={"train": train})
    tables = planner.sharing.tables
    alone = replace(planner, config=config, tables=tables, sharing=None, _uses={}, _weighted={})
    return alone.work.batch_size / alone.predict(None).step_s


def _speed_with(planner: SlotPlanner, memory: Memory | None, option: str, most_rows: float) -> float:
    """Returns samples per second of the run with this option, in as much DRAM; all rows are there if they are now."""
    config, sharing = make_config(apply_overrides(planner.config.model_dump(mode="json"), [option])), planner.sharing
    if sharing is not None:
        _check_few(planner, most_rows)
        other = as_one_rank(planner, config, sharing.num_ranks, local_size=sharing.local_size)
    else:
        if looks_at_accesses(planner.config, config):
            _check_few(planner, most_rows)
        other = planner.with_config(config)
    step_s = other.predict(None).step_s if memory is None else step_at(other, planner.budget)
    return other.work.batch_size / step_s


def _check_few(planner: SlotPlanner, most_rows: float) -> None:
    if (num_rows := sum(table.num_embeddings for table in planner.tables)) > most_rows:
        raise ValueError(f"with {num_rows:,} rows it takes seconds, which a run does not wait for: ask hotrow plan")


# ---- other machines


def _machines(planner: SlotPlanner, memory: Memory | None, now: Prediction, most_rows: float) -> Iterator[Question]:
    """Yields more memory, and what another machine has."""
    hardware, batch_size, budget = planner.hardware, planner.work.batch_size, planner.budget
    assert hardware is not None
    if memory is not None:
        missing, faster = planner.needed_bytes - budget, replace(hardware, disks=[*map(_faster, hardware.disks)])
        slots = planner.slots_in(memory)[1]
        if missing > GIB:
            yield "1 GiB more of DRAM", False, lambda: batch_size / step_at(planner, budget + GIB)
        every = f"{size(missing)} more of DRAM, which hold every row"
        yield every, False, lambda: batch_size / planner.predict(None).step_s
        disk = f"a disk {FASTER} times as fast"
        yield disk, True, lambda: batch_size / planner.predict(slots, memory, faster).step_s
    if planner.sharing is not None:
        return
    for gpu in hardware.gpus:
        on_gpu = f"dense layers on {gpu.name}, at most"
        yield on_gpu, True, lambda gpu=gpu: batch_size / planner.on_gpu(now, gpu)[0]  # type: ignore[misc]
    yield "a second machine like this", True, lambda: _speed_of_two(planner, most_rows)


def _speed_of_two(planner: SlotPlanner, most_rows: float) -> float:
    assert planner.hardware is not None
    network_of(planner.hardware)
    _check_few(planner, most_rows)
    config = planner.config.with_micro_batches(max(2, planner.config.train.micro_batches or 0))
    other = as_one_rank(planner, config, 2)
    return other.work.batch_size / step_at(other, planner.budget)


def _faster(disk: Disk) -> Disk:
    def times(figure: Figure) -> Figure:
        return replace(figure, value=FASTER * figure.value, low=None, high=None, source="assumed", note="another disk")

    return replace(
        disk,
        reads_per_s={depth: times(figure) for depth, figure in disk.reads_per_s.items()},
        writes_per_s={depth: times(figure) for depth, figure in disk.writes_per_s.items()},
        read_bytes_per_s=times(disk.read_bytes_per_s),
        write_bytes_per_s=times(disk.write_bytes_per_s),
    )
