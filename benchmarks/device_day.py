"""One visit to a machine with a GPU: its tests, cells, a profile, and the CPU benchmarks on its cores, in six minutes.

    python -m benchmarks.device_day OUT [--quick]

Writes OUT/device-day.json and OUT/device-day.md, anew after every part, so that what was found stays if the visit ends
early. Nothing is installed. Each part is a command with a time limit of its own; one that fails, or runs out of its
time, is named, and the rest goes on. Without a GPU the parts that need one are named too, and the CPU's benchmarks run.
`--quick` tries the script with small tables and measures nothing of worth.

  tests      the law tests of everything that runs on a device
  kaggle     benchmarks.gpu: all modes, a tenth of the rows in slots, batches of 2,048
  terabyte   most modes with batches of 4,096, on a twentieth of the rows
  profile    a step with all tables on the device: kernels by their time, and Python's functions by theirs
  cpu        benchmarks.end_to_end against torch: three shapes
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench, gpu
from benchmarks.markdown import table

VISIT_S = 350
"""For all parts together; the last ones get less than their limit if those before took theirs."""
LONGEST_TEXT = 6000
"""Characters of what a part printed that are kept: its end."""
NUM_STEPS, NUM_FUNCTIONS = 30, 25


@dataclass(frozen=True)
class Part:
    """A command that prints a JSON object as its last line, or text alone."""

    name: str
    arguments: tuple[str, ...]
    """What Python is started with."""
    limit_s: float
    needs_gpu: bool = True

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.arguments])


def parts(*, quick: bool) -> list[Part]:
    own = ("--quick",) if quick else ()
    cells = ("-m", "benchmarks.gpu", "--hbm", "10%", "--zipf", "1.05", "--json", *own)
    some = (*gpu.PEERS, "our_hybrid", "fae", "cached", "all_in_hbm")  # fewer modes leave room for more rows
    shapes = [word for name in ("kaggle", "mlperf-like", "embedding-bound") for word in ("--shape", name)]
    large = ("--shapes", "terabyte", "--batch-sizes", "4096", "--scale", "0.05", "--stretches", "3", "--modes", *some)
    return [
        Part("tests", ("-m", "pytest", "-q", "tests/laws", "-k", "gpu or device", "-m", "not slow"), 130),
        Part("kaggle", (*cells, "--shapes", "kaggle", "--batch-sizes", "2048", "--stretches", "5"), 90),
        Part("terabyte", (*cells, *large), 90),
        Part("profile", ("-m", "benchmarks.device_day", "--profile", *own), 60),
        Part("cpu", ("-m", "benchmarks.end_to_end", *shapes, "--peer", "torch", *own), 120, needs_gpu=False),
    ]


def run(part: Part, limit_s: float) -> dict[str, Any]:
    """Runs a part for at most so long; returns its status and seconds, the JSON it printed, and the end of its text."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *part.arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    status = "done"
    try:
        printed, text = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        status = f"ran out of its {limit_s:.0f} s"
        printed, text = _ended(process)
    except BaseException:
        _ended(process)
        raise
    if status == "done" and process.returncode:
        status = f"failed with status {process.returncode}"
    lines = printed.splitlines()
    found = _json(lines[-1]) if lines else None
    text += "" if found is not None else printed
    seconds = time.perf_counter() - started
    return {"status": status, "seconds": round(seconds, 1), "found": found, "text": text[-LONGEST_TEXT:]}


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a part and what it started; it has a moment to remove its files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return process.communicate()


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def visit(chosen: Sequence[Part], out: Path, *, visit_s: float = VISIT_S) -> dict[str, Any]:
    """Runs the parts one after another, and writes the report after each."""
    has_gpu, deadline = torch.cuda.is_available(), time.perf_counter() + visit_s
    absent = f"not run: torch {torch.__version__} finds no GPU here"
    where = torch.cuda.get_device_name() if has_gpu else absent.removeprefix("not run: ")
    report: dict[str, Any] = {"device": where, **bench.circumstances(), "parts": {}}
    for part in chosen:
        limit_s = min(part.limit_s, deadline - time.perf_counter())
        if part.needs_gpu and not has_gpu:
            own: dict[str, Any] = {"status": absent}
        elif limit_s < 1:
            own = {"status": f"not run: the parts before it took the {visit_s:.0f} s of the visit"}
        else:
            own = run(part, limit_s)
        report["parts"][part.name] = {"command": part.command, **own}
        print(f"{part.name}: {own['status']}", file=sys.stderr, flush=True)
        (out / "device-day.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "device-day.md").write_text(page(report))
    return report


def page(report: dict[str, Any]) -> str:
    """The report for people."""
    machine = report["machine"]
    lines = [
        "# A visit to a device",
        "",
        f"{report['device']}; {machine['cpu']}, {report['threads']} threads of {machine['cores']} cores; "
        f"torch {report['versions']['torch']}; commit {report['commit']}; {report['date']}.",
        "",
    ]
    heads = {"part": "left", "seconds": "right", "status": "left", "command": "left"}
    rows = [
        [name, own.get("seconds", ""), own["status"], f"`{own['command']}`"] for name, own in report["parts"].items()
    ]
    lines += table(heads, rows)
    for name, own in report["parts"].items():
        if own.get("text", "").strip():
            lines += ["", f"## {name}", "", "```", own["text"].strip(), "```"]
    return "\n".join(lines) + "\n"


def profile(*, device: str, quick: bool) -> dict[str, Any]:
    """Where the time of a step with all tables on the device goes: on the device, and on the host."""
    small: dict[str, Any] = {"num_tables": 3, "small_table_bytes": 0} if quick else {}
    scale, size, num_steps = (1e-5, 8, 2) if quick else (gpu.scale_of("kaggle", 1), 2048, NUM_STEPS)
    cell = gpu.Cell("kaggle", "40%", size, num_steps, scale, device, zipf=1.05, **small)
    sides, refused = gpu.make_sides(cell, ["all_in_hbm"], cell.hot_set())
    if refused:
        sys.exit(f"all_in_hbm: {refused['all_in_hbm']}")
    batches = gpu.make_batches(cell, gpu.draw(cell, size * num_steps))
    side, work = sides["all_in_hbm"], [gpu.Turn(hot=False, batches=batches)]
    side.train(work)  # compiles kernels
    started = time.process_time()
    seconds = side.train(work)[0]
    host_s = time.process_time() - started
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        side.train(work)
    own = [event for event in seen.key_averages() if event.device_type != torch.autograd.DeviceType.CPU]
    kernels = [
        {"name": event.key, "ms": event.self_device_time_total / 1e3 / num_steps, "launches": event.count / num_steps}
        for event in sorted(own, key=lambda event: -event.self_device_time_total)
    ]
    python = cProfile.Profile()
    python.runcall(side.train, work)
    return {
        "step_ms": seconds / num_steps * 1e3,
        "host_ms": host_s / num_steps * 1e3,
        "device_ms": sum(kernel["ms"] for kernel in kernels),
        "launches": sum(kernel["launches"] for kernel in kernels),
        "kernels": kernels[:NUM_FUNCTIONS],
        "functions": functions(python, num_steps),
    }


def functions(python: cProfile.Profile, num_steps: int) -> list[dict[str, Any]]:
    """Those of Python with the most time of their own, per step; cProfile itself makes them slower."""
    stats: dict[tuple[str, int, str], tuple[Any, ...]] = pstats.Stats(python).stats  # type: ignore[attr-defined]
    slowest = sorted(stats.items(), key=lambda item: -item[1][2])[:NUM_FUNCTIONS]
    return [
        {"name": f"{Path(file).name}:{line} {name}", "ms": own[2] / num_steps * 1e3, "calls": own[0] / num_steps}
        for (file, line, name), own in slowest
    ]


def profile_lines(found: dict[str, Any]) -> list[str]:
    head = (
        f"a step takes {found['step_ms']:.2f} ms, {found['host_ms']:.2f} ms of the host's processor and "
        f"{found['device_ms']:.2f} ms of the device in {found['launches']:.0f} launches"
    )
    kernels = [f"  {own['ms']:8.3f} ms {own['launches']:6.1f} launches  {own['name']}" for own in found["kernels"]]
    python = [f"  {own['ms']:8.3f} ms {own['calls']:6.1f} calls  {own['name']}" for own in found["functions"]]
    return [head, "on the device:", *kernels, "Python's functions, slowed by looking:", *python]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder for the report")
    parser.add_argument("--quick", action="store_true", help="small: tries the script, measures nothing of worth")
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.profile:
        found = profile(device="cuda", quick=options.quick)
        print("\n".join(profile_lines(found)), file=sys.stderr)
        print(json.dumps(found))
        return
    if options.out is None:
        parser.error("name a folder for the report")
    options.out.mkdir(parents=True, exist_ok=True)
    report = visit(parts(quick=options.quick), options.out)
    print(f"the report is {options.out / 'device-day.md'}")
    failed = [name for name, own in report["parts"].items() if own["status"].startswith(("failed", "ran out"))]
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


if __name__ == "__main__":
    main()
