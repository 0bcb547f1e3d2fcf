"""Peak memory of training beyond what must be there anyway: hotrow's DLRM and plain PyTorch's at the Kaggle shape.

    python -m benchmarks.peak_memory --out docs/measurements/benchmarks.json [--shape NAME] [--quick]

Each side trains in a process of its own. Before the first step everything that stays is resident: imports, batches,
model, every row of every table, optimizer state; freed memory is given back; then the kernel's high-water mark is reset
(/proc/self/clear_refs). The figure is the mark after the steps less what was resident before them: activations,
gradients, scratch, threads, and whatever an allocator keeps. Linux only. Both sides on huge pages, as they are timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from benchmarks import bench
from benchmarks.results import end_on_signals, record
from benchmarks.step_peers import Parts, Step, make_model, make_ours, make_plain, peers
from benchmarks.step_shapes import SHAPES, Setting, StepShape, make_setting

Side = Literal["ours", "torch"]
NUM_STEPS = 16
NUM_ROUNDS = 5
TARGET = 1.0  # ours takes no more than plain PyTorch


def status_bytes(field: str) -> int:
    """A field of /proc/self/status: VmRSS is resident now, VmHWM the most there was since the last reset."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, field
    return int(match[1]) * 1024


def build(side: Side, setting: Setting) -> tuple[Step, list[torch.Tensor]]:
    """A side's step and its tables, without the other side's in memory."""
    if side == "ours":
        step, parts = make_ours(setting, "sgd")
        return step, parts.weights
    dim = setting.shape.embedding_dim
    rows = [torch.empty(n, dim).uniform_(-(n**-0.5), n**-0.5) for n in setting.shape.rows]
    return make_plain(setting, Parts(make_model(setting), rows), copy_rows=False), rows


def grown_bytes(side: Side, shape: StepShape) -> int:
    """What training added, at its peak, to what was resident before the first step of this process."""
    step, tables = build(side, make_setting(shape))
    with torch.no_grad():
        for table in tables:
            table.mul_(1)  # every page exists
    ctypes.CDLL(None).malloc_trim(0)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for batch in range(NUM_STEPS):
        step.prepare(batch)
        step.run()
    return status_bytes("VmHWM") - before


def measured(side: Side, options: argparse.Namespace) -> int:
    """`grown_bytes` of a fresh process."""
    arguments = ["--side", side, "--shape", options.shape, *(["--quick"] if options.quick else [])]
    grown: int = bench.in_fresh_process("benchmarks.peak_memory", arguments, options.threads)["grown_bytes"]
    return grown


def cell(options: argparse.Namespace) -> dict[str, Any]:
    """The comparison, sides taking turns."""
    rounds = [
        {side: measured(side, options) / 1e6 for side in get_args(Side)}
        for _ in range(1 if options.quick else NUM_ROUNDS)
    ]
    ratios = [each["torch"] / each["ours"] for each in rounds]
    shape = SHAPES[options.shape]
    return {
        "name": f"peak_memory_{shape.name}_vs_torch",
        "peer": peers(None)[0].title,
        "ours_mb": statistics.median(each["ours"] for each in rounds),
        "peer_mb": statistics.median(each["torch"] for each in rounds),
        "tables_mb": shape.table_bytes / 1e6,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "target": TARGET,
        "rounds": len(rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kaggle", choices=SHAPES)
    parser.add_argument("--quick", action="store_true", help="small tables and one round: tries it")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    parser.add_argument("--side", choices=get_args(Side), help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_on_signals()
    if not Path("/proc/self/clear_refs").exists():
        sys.exit("benchmarks.peak_memory needs Linux's /proc/self/clear_refs")
    if options.side:
        shape = SHAPES[options.shape].small() if options.quick else SHAPES[options.shape]
        print(json.dumps({"grown_bytes": grown_bytes(options.side, shape)}))
        return
    found = cell(options)
    print(
        f"{found['name']}: ours {found['ours_mb']:.1f} MB, peer {found['peer_mb']:.1f} MB, x {found['ratio']:.2f} "
        f"({found['spread'][0]:.2f} .. {found['spread'][1]:.2f})",
        file=sys.stderr,
    )
    record("peak_memory", {"cells": [found], "quick": options.quick, **bench.circumstances()}, options.out)


if __name__ == "__main__":
    main()
