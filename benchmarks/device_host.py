"""The host's time for the tables of a step on a device, measured without a device.

    python -m benchmarks.device_host [--shape kaggle] [--scale SHARE] [--hbm 10%] [--zipf 1.05] [--batch-size 2048]
                                     [--steps 200] [--functions N]

Lookup, backward and update of `benchmarks.gpu`'s modes cached and all_in_hbm in Triton's interpreter, in which kernels
and sorts are left out; what else a device would do, such as copies, the CPU does here, and is counted. Printed are
milliseconds of the processor for a step: of the step's own thread, and of all threads. `--functions` also prints those
of Python in which the step's thread spends most time, slowed by looking.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import hotrow


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kaggle", choices=("kaggle", "terabyte"))
    parser.add_argument("--scale", type=float, default=0.1, help="share of the shape's rows")
    parser.add_argument("--hbm", default="10%", help="as of benchmarks.gpu")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--functions", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    from benchmarks import device_day, gpu

    cell = gpu.Cell(
        options.shape, options.hbm, options.batch_size, options.steps, options.scale, "cpu", zipf=options.zipf
    )
    warm = max(20, options.steps // 4)
    batches = gpu.make_batches(cell, gpu.draw(cell, (warm + options.steps) * cell.batch_size))
    torch.set_num_threads(1)
    leave_out_kernels()
    for mode in ("cached", "all_in_hbm"):
        emb = hotrow.EmbeddingCollection(cell.tables, memory=cell.memory(mode), seed=gpu.SEED)
        optimizer = hotrow.SGD(emb, lr=gpu.LR, nonfinite=None)
        train(emb, optimizer, batches[:warm])
        started = time.thread_time(), time.process_time()
        looked = cProfile.Profile()
        run = looked.runcall if options.functions else lambda work, *given: work(*given)
        run(train, emb, optimizer, batches[warm:])
        ended = time.thread_time(), time.process_time()
        own, whole = ((b - a) / options.steps * 1e3 for a, b in zip(started, ended, strict=True))
        counts = emb.placement.counters().values()
        coming = sum(each["read_rows"] for each in counts) / max(1, sum(each["rows"] for each in counts))
        print(f"{mode:<12} {own:.2f} ms in the step's thread, {whole:.2f} ms in all; {coming:.1%} of the rows come")
        if options.functions:
            for function in device_day.functions(looked, options.steps)[: options.functions]:
                print(f"  {function['ms']:8.3f} ms {function['calls']:6.1f} calls  {function['name']}")
        emb.placement.close()


def train(emb: hotrow.EmbeddingCollection, optimizer: Any, batches: Iterable[hotrow.Batch]) -> None:
    """Steps on these; the gradient is that of a sum, which costs nothing."""
    gradient = None
    for batch in hotrow.lookahead(batches, emb, depth=4):
        pooled = emb(batch.sparse)
        gradient = torch.ones_like(pooled) if gradient is None else gradient
        pooled.backward(gradient)
        optimizer.step()


def leave_out_kernels() -> None:
    """In this process."""
    from hotrow.kernels import triton_moves, triton_ops

    def nothing(*_: Any, **__: Any) -> None: ...

    triton_ops.launch = triton_moves.launch = nothing
    in_order = torch.empty(0, dtype=torch.int64)

    def unsorted(keys: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal in_order
        in_order = in_order if len(in_order) == len(keys) else torch.arange(len(keys))
        return keys, in_order

    torch.sort = unsorted  # type: ignore[assignment]


if __name__ == "__main__":
    main()
