"""Where the time of our own steps goes, part by part, each beside the limit of that part.

    python -m benchmarks.step_profile --out docs/measurements/benchmarks.json [--quick] [PROFILE ...]

For promises that are not held (docs/measurements/benchmarks.md says which): what of a step is left to win. Parts are
read off the clock within one step, so they add up to it. A step of embeddings of one id per bag stands beside a bare
loop too (bare_step.cpp): what a lookup and an exact SGD update take with nothing around them; both begin with caches
that hold nothing of theirs, as they do beside a peer. Whole training steps are those of benchmarks.end_to_end; there
the dense part stands beside what its matrix products take as fast as this machine multiplies at all, which is to be at
least 85 % of it."""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks import bench
from benchmarks.compiled import compiled
from benchmarks.results import end_on_signals, record
from benchmarks.step_peers import make_ours
from benchmarks.step_shapes import SHAPES, StepShape, floor_parts_s, make_setting, products_s
from hotrow.kernels import ops
from hotrow.optim import SparseOptimizer

MIN_DENSE_SHARE = 0.85
"""Of the dense part, its bare matrix products, by our own promise."""
BARE_DISTANCES = (4, 8, 16, 32, 64)
"""Rows that the bare loop prefetches ahead, of which it is given the best."""
ONE_HOT: dict[str, bench.Optimizer] = {"26x1_sgd": "sgd", "26x1_adam": "adam"}


Parts = dict[str, Callable[[], object]]
"""What a step is made of, in its order."""


def measured(
    name: str, parts: Parts, prepare: Callable[[int], None], limits: dict[str, float], num_rounds: int
) -> dict[str, Any]:
    """Medians of the parts and of the whole over rounds, in which they run one after another; limits beside them."""

    def one_round(number: int) -> list[float]:
        prepare(number)
        marks = [time.perf_counter()]
        for run in parts.values():
            run()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]

    for number in range(2):
        one_round(number)
    rounds = bench.clean_rounds(one_round, num_rounds)
    by_part = zip(*rounds.results, strict=True)
    return {
        "name": f"profile_{name}",
        "step_ms": 1e3 * statistics.median(map(sum, rounds.results)),
        "parts_ms": {part: 1e3 * statistics.median(own) for part, own in zip(parts, by_part, strict=True)},
        "limits_ms": {what: 1e3 * limit for what, limit in limits.items()},
        **rounds.counts(),
    }


KERNELS = ("lookup", "update", "first_nonfinite", "interact", "interact_backward", "mlp", "mlp_backward")
"""Of the native module: all that computes in a step but torch's loss and dense optimizer."""


@contextmanager
def timed_kernels() -> Iterator[list[float]]:
    """Within, the seconds of each call of a kernel are appended."""
    module, seconds = importlib.import_module("hotrow._native"), list[float]()

    def timed(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return kernel(*arguments)
            finally:
                seconds.append(time.perf_counter() - start)

        return call

    kept = {name: getattr(module, name) for name in KERNELS}
    try:
        for name, kernel in kept.items():
            setattr(module, name, timed(kernel))
        yield seconds
    finally:
        for name, kernel in kept.items():
            setattr(module, name, kernel)


def outside_kernels_s(parts: Parts, prepare: Callable[[int], None], num_rounds: int) -> float | None:
    """Median seconds of a step in which no kernel of ours runs: Python, autograd, torch's own operations. Products
    leave caches without any of that, so it takes several times what it takes by itself. None without the native
    module."""
    if ops.backend().name != "native":
        return None
    with timed_kernels() as inside:

        def one_round(number: int) -> float:
            prepare(number)
            inside.clear()
            start = time.perf_counter()
            for run in parts.values():
                run()
            return time.perf_counter() - start - sum(inside)

        rounds = bench.clean_rounds(one_round, num_rounds)
    return statistics.median(rounds.results)


def outside(parts: Parts, prepare: Callable[[int], None], num_rounds: int) -> dict[str, float]:
    """The same as a part of a cell."""
    seconds = outside_kernels_s(parts, prepare, num_rounds)
    return {} if seconds is None else {"outside_kernels_ms": 1e3 * seconds}


# ---- whole training steps


class Training:
    """A step of benchmarks.end_to_end, taken apart."""

    def __init__(self, shape: StepShape) -> None:
        self.step, made = make_ours(make_setting(shape), "sgd")
        self.model, (self.dense_optimizer, tables) = made.model, self.step.optimizers
        self.table_optimizer = cast(SparseOptimizer, tables)

    def parts(self) -> Parts:
        """What a step is made of."""
        return {
            "lookup": self.look_up,
            "dense forward": self.forward,
            "dense backward": self.backward,
            "dense update": self.dense_optimizer.step,
            "tables' update": self.table_optimizer.step,
        }

    def look_up(self) -> None:
        """Pooled rows."""
        self.pooled = self.table_optimizer.emb(self.step.input[1])

    def forward(self) -> None:
        """Interaction and MLPs, and the loss."""
        logits = self.model(self.step.input[0], self.pooled)
        self.loss = binary_cross_entropy_with_logits(logits, self.step.label)

    def backward(self) -> None:
        """Of all that; the gradient of the pooled rows waits for the tables' update."""
        for optimizer in self.step.optimizers:
            optimizer.zero_grad()
        self.loss.backward()  # type: ignore[no-untyped-call]  # torch's


def profile_training(shape: StepShape, num_rounds: int) -> dict[str, Any]:
    """Of a whole step."""
    floor = floor_parts_s(shape, "sgd", torch.get_num_threads())
    side = Training(shape)
    found = measured(shape.name, side.parts(), side.step.prepare, floor or {}, num_rounds)
    dense_ms = sum(ms for part, ms in found["parts_ms"].items() if part.startswith("dense"))
    share = 1e3 * products_s(shape, torch.get_num_threads()) / dense_ms
    found |= {"dense_share": share, "least_dense_share": MIN_DENSE_SHARE}
    return found | outside(side.parts(), side.step.prepare, num_rounds)


# ---- embeddings alone


def cold(prepare: Callable[[int], None]) -> Callable[[int], None]:
    """`prepare`, and caches that hold nothing of the step afterwards."""
    evict = bench.evictor()

    def run(batch: int) -> None:
        prepare(batch)
        evict()

    return run


class Embedding(bench.Ours):
    """A step of embeddings alone, taken apart."""

    def parts(self) -> Parts:
        """What a step is made of."""
        return {
            "lookup": self.look_up,
            "backward": lambda: torch.autograd.backward(self.pooled, self.gradient),
            "update": self.optimizer.step,
        }

    def look_up(self) -> None:
        """Pooled rows."""
        self.pooled = self.emb(self.batch)


class Bare:
    """The bare loop on tables of its own, starting from the rows of `ours`."""

    def __init__(self, shape: bench.Shape, ours: bench.Ours, distance: int) -> None:
        self.shape, self.distance = shape, distance
        self.tables = [weight.clone() for weight in ours.emb.weights.values()]
        self.pointers = (ctypes.c_void_p * len(self.tables))(*(table.data_ptr() for table in self.tables))
        self.gradient = bench.upstream_gradient(shape)
        self.pooled = torch.empty_like(self.gradient)
        self.batches = [shape.ids(seed) for seed in range(bench.NUM_BATCHES)]
        self.function = compiled("bare_step.cpp").bare_step
        self.function.restype = ctypes.c_double

    def prepare(self, batch: int) -> None:
        """Choose the batch."""
        self.ids = self.batches[batch % bench.NUM_BATCHES]

    def run(self) -> None:
        """Both passes."""
        self.seconds: float = self.function(
            self.pointers, ctypes.c_void_p(self.ids.data_ptr()),
            *map(ctypes.c_int64, (self.shape.num_tables, self.shape.batch_size, self.shape.embedding_dim)),
            ctypes.c_void_p(self.pooled.data_ptr()), ctypes.c_void_p(self.gradient.data_ptr()),
            ctypes.c_float(bench.LR), ctypes.c_int64(self.distance), torch.get_num_threads(),
        )  # fmt: skip

    def outputs(self) -> list[Tensor]:
        """The rows looked up and every table."""
        return [self.pooled, *self.tables]


def bare_s(shape: bench.Shape, num_rounds: int) -> float:
    """Median seconds of the bare loop at its best distance, after its results were compared with ours."""
    ours = bench.Ours(shape, "step", "sgd")
    bare = Bare(shape, ours, BARE_DISTANCES[0])
    bench.check_agreement("bare loop", ours, bare)
    prepare = cold(bare.prepare)

    def one_round(number: int) -> dict[int, float]:
        seconds = {}
        for i, bare.distance in enumerate(BARE_DISTANCES):
            prepare(number * len(BARE_DISTANCES) + i)
            bare.run()
            seconds[bare.distance] = bare.seconds
        return seconds

    rounds = bench.clean_rounds(one_round, num_rounds).results
    return min(statistics.median(seconds[distance] for seconds in rounds) for distance in BARE_DISTANCES)


def profile_embedding(name: str, shape: bench.Shape, num_rounds: int) -> dict[str, Any]:
    """Of a step of embeddings alone; for SGD beside the bare loop."""
    optimizer, threads = ONE_HOT[name], torch.get_num_threads()
    limit = partial(bench.embedding_limit_s, shape, optimizer=optimizer, threads=threads)
    limits = {"lookup": limit(part="lookup"), "update": limit(part="update")}
    side = Embedding(shape, "step", optimizer)
    parts, prepare = side.parts(), cold(side.prepare)
    found = measured(name, parts, prepare, {k: v for k, v in limits.items() if v is not None}, num_rounds)
    found |= outside(parts, prepare, num_rounds)
    del side, parts, prepare
    gc.collect()
    return found | ({"bare_ms": 1e3 * bare_s(shape, num_rounds)} if optimizer == "sgd" else {})


# ---- the command


def profiles(*, quick: bool) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Every profile: of a number of rounds."""
    one_hot = replace(bench.ONE_HOT, embedding_dim=64, **({"num_embeddings": 2_000, "batch_size": 64} if quick else {}))
    return {
        **{name: partial(profile_embedding, name, one_hot) for name in ONE_HOT},
        **{name: partial(profile_training, shape.small() if quick else shape) for name, shape in SHAPES.items()},
    }


def measure(names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """The named profiles, in this process."""
    known, found = profiles(quick=quick), []
    for name in names or known:
        if name not in known:
            raise ValueError(f"no profile is called {name!r}; choose from {', '.join(known)}")
        found.append(known[name](3 if quick else bench.NUM_ROUNDS))
        print(f"{name}: {found[-1]['step_ms']:.2f} ms", file=sys.stderr, flush=True)
        gc.collect()
    return {"cells": found, "quick": quick, **bench.circumstances()}


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PROFILE", help=f"of {', '.join(profiles(quick=True))}; all")
    parser.add_argument("--quick", action="store_true", help="small tables: tries it, measures nothing of worth")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_on_signals()
    if options.here:
        print(json.dumps(measure(options.names, quick=options.quick)))
        return
    arguments = [*sys.argv[1:], "--here"]
    record("step_profile", bench.in_fresh_process("benchmarks.step_profile", arguments, options.threads), options.out)


if __name__ == "__main__":
    main()
