"""What recording spans costs: a step's laps of the clock, with and without `train.trace`, as a share of a step.

    python -m benchmarks.spans

The laps are those of `hotrow train`, timed alone, because their cost is far below the noise between two runs. They are
set beside a small step: 26 short tables, narrow layers, 64 samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.micro_batches import TrainStep
from benchmarks.step_shapes import SHAPES, make_setting
from hotrow.embedding import EmbeddingCollection
from hotrow.run.meters import Session, StepClock
from hotrow.run.record import PHASES
from hotrow.run.trace import Trace
from hotrow.tables import TableConfig

LAPS = (*PHASES, None)
"""One step's, and what lies between two steps."""
STEPS, ROUNDS = 2000, 15
SHAPE = SHAPES["kaggle"].small()


def laps_s(folder: Path, *, traced: bool) -> float:
    """Returns seconds that a step's laps take."""
    emb = EmbeddingCollection(
        [TableConfig(name="C1", num_embeddings=1, embedding_dim=1, feature_names=("C1",))], seed=1
    )
    session = Session()
    trace = Trace(folder / "trace.json", f"1:{STEPS}", session, emb.placement) if traced else None
    clock = StepClock(session, [] if trace is None else [trace])

    def step() -> None:
        for phase in LAPS:
            clock.lap(phase)
        session.state.step += 1

    return _seconds(step, STEPS)


def step_s() -> float:
    """Returns seconds of a step."""
    side = TrainStep(make_setting(SHAPE), 1)

    def step() -> None:
        side.prepare(0)
        side.run()

    return statistics.median(_seconds(step, 10) for _ in range(ROUNDS))


def _seconds(step: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        rounds = [(laps_s(folder, traced=False), laps_s(folder, traced=True)) for _ in range(ROUNDS)]
    off, on = (statistics.median(own) for own in zip(*rounds, strict=True))
    step = step_s()
    print(f"step of {SHAPE.name}: {1e3 * step:.2f} ms; laps {1e6 * off:.1f} us ({off / step:.2%})")
    print(f"with a trace: {1e6 * on:.1f} us ({on / step:.2%} of a step), {1e6 * (on - off):.1f} us more")


if __name__ == "__main__":
    main()
