"""One thread against two, by how idle threads wait: quiet, and beside processes that keep the cores busy.

    python -m benchmarks.waiting [CONTENDER ...] [--rounds 30] [--busy 0 2] [--batch 64 2048]

Each contender trains the model of recipes/criteo-kaggle.yaml in a process of its own, because OpenMP reads how to wait
when it is loaded. Tables have 20,000 rows at most. The losses of all contenders must be equal to the bit before
anything is timed, and after it. Rounds of steps alternate, and each round begins with another contender. A line of JSON
for each batch size and number of busy processes: the median samples per second, and the median of the paired ratios to
one thread, with their quartiles. "default" is what `hotrow` chooses; "spinning" is OpenMP's own choice.

The bars: beside two busy processes two threads have at least 0.7 of one thread's speed; quiet, "default" is at most 2 %
slower than "spinning".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hotrow.base.waiting import VARIABLES, wait_passively

CONTENDERS: dict[str, tuple[int, dict[str, str] | None]] = {
    "one": (1, None),
    "default": (2, None),
    "spinning": (2, {}),
    "passive": (2, {"OMP_WAIT_POLICY": "passive"}),
    "spin-1000": (2, {"GOMP_SPINCOUNT": "1000"}),
    "spin-3000": (2, {"GOMP_SPINCOUNT": "3000"}),
    "spin-10000": (2, {"GOMP_SPINCOUNT": "10000"}),
}
"""Threads, and what the environment says of waiting; None: what hotrow's command sets."""
MAX_ROWS = 20_000
SAMPLES = 8_192
"""Samples of a round, at least."""


def work(batch_size: int, num_threads: int) -> None:
    """Trains a round for every line of standard input; answers with its seconds and a digest of all losses so far."""
    import torch

    from benchmarks.step_peers import make_ours
    from benchmarks.step_shapes import SHAPES, make_setting

    torch.set_num_threads(num_threads)
    shape = SHAPES["kaggle"]
    shape = replace(shape, batch_size=batch_size, rows=tuple(min(rows, MAX_ROWS) for rows in shape.rows))
    step, _ = make_ours(make_setting(shape), "sgd")
    digest, number, num_steps = hashlib.sha256(), 0, max(8, SAMPLES // 4 // batch_size)
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        for _ in range(num_steps):
            step.prepare(number)
            step.run()
            digest.update(step.last_loss.numpy().tobytes())
            number += 1
        print(batch_size * num_steps, time.perf_counter() - began_s, digest.hexdigest(), flush=True)


class Side:
    """A contender's process, which trains a round when it is told to."""

    def __init__(self, name: str, batch_size: int) -> None:
        threads, waiting = CONTENDERS[name]
        environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        wait_passively(environment) if waiting is None else environment.update(waiting)
        command = [sys.executable, "-m", "benchmarks.waiting", "--work", str(batch_size), str(threads)]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.samples_per_s: list[float] = []
        self.digest = ""
        self._answer()

    def _answer(self) -> list[str]:
        assert self.process.stdout is not None
        if not (words := self.process.stdout.readline().split()):
            raise RuntimeError(f"{self.process.args!r} ended: {self.process.wait()}")
        return words

    def train(self) -> float:
        """Trains a round; returns samples per second."""
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        samples, seconds, self.digest = self._answer()
        return int(samples) / float(seconds)


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Inside the block so many other processes compute without end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def check_equal(sides: dict[str, Side]) -> None:
    if len({side.digest for side in sides.values()}) != 1:
        raise RuntimeError(f"losses differ: { ({name: side.digest[:12] for name, side in sides.items()}) }")


def measure(names: Sequence[str], batch_size: int, num_busy: int, num_rounds: int) -> dict[str, Any]:
    """Returns the figures of one line."""
    sides = {name: Side(name, batch_size) for name in dict.fromkeys(["one", *names])}
    try:
        for side in sides.values():
            side.train()
        check_equal(sides)
        order = list(sides.values())
        with busy(num_busy):
            for number in range(num_rounds):
                first = number % len(order)
                for side in order[first:] + order[:first]:
                    side.samples_per_s.append(side.train())
        check_equal(sides)
    finally:
        for side in sides.values():
            side.process.kill()
            side.process.wait()
    return {"batch": batch_size, "busy": num_busy, "rounds": num_rounds} | {
        name: figures(side.samples_per_s, sides["one"].samples_per_s) for name, side in sides.items()
    }


def figures(own: Sequence[float], one: Sequence[float]) -> dict[str, Any]:
    ratios = [mine / other for mine, other in zip(own, one, strict=True)]
    low, middle, high = (round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4))
    return {"samples_per_s": round(statistics.median(own)), "over_one": middle, "quartiles": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.work:
        work(*options.work)
        return
    for batch_size in options.batch:
        for num_busy in options.busy:
            names = options.contenders or ["default", "spinning"]
            print(json.dumps(measure(names, batch_size, num_busy, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
