"""Preparation, the time of `fit` beside its steps, and a first score: this checkout beside another one.

    python -m benchmarks.ingest TREE [--rows 10000000] [--rounds 3] [--folder DIR] [prepare] [fit] [predict]

Each checkout works in processes of its own, by TREE/.venv/bin/python, on the same files; the one that goes first
alternates, and packed bytes must be equal. A line a cell: medians, and the ratio this / other with its range.

prepare: Criteo text of that many rows, two threads: seconds, peak memory, and the most that lies in the work folder,
over the bytes of the packed rows. fit: seconds outside training steps, on clicks of 6,000, 30,000 and 140,000 rows;
imports came before. predict: milliseconds of the first score of one row, once the run is open.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.base.files import crc32

FIT_ROWS = (6_000, 30_000, 140_000)
WORKER = """
import json, shutil, sys, time
import hotrow
from hotrow.run import trainer
task, source, folder = sys.argv[1:]
spent = 0.0
plain = trainer.train_step
def step(*given, **named):
    global spent
    began = time.perf_counter()
    found = plain(*given, **named)
    spent += time.perf_counter() - began
    return found
trainer.train_step = step
def fit(path, name):
    return hotrow.fit(path, label="click", time="ts", run=f"{folder}/{name}", quiet=True, **{"train.threads": 2})
if task == "fit":
    fit(source.replace("clicks", "first"), "first")  # whatever is imported late
    began, spent = time.perf_counter(), 0.0
    fit(source, "run")
    print(json.dumps(time.perf_counter() - began - spent))
else:
    run = fit(source, "run")
    row = {"ts": 1_700_000_000, "user": "u1", "item": 7, "site": "s1", "price": 0.5, "age": 30}
    run = hotrow.load(run.path)
    began = time.perf_counter()
    run.predict([row])
    print(json.dumps(1e3 * (time.perf_counter() - began)))
"""


def clicks(path: Path, num_rows: int) -> Path:
    """A CSV of clicks: three columns of ids, two of numbers, in the order of time."""
    rng = np.random.default_rng(0)
    user, item = rng.zipf(1.3, num_rows) % 5000, rng.zipf(1.2, num_rows) % 3000
    label = rng.random(num_rows) < 0.1 + 0.5 * (user % 3 == 0)
    with path.open("w") as file:
        file.write("click,ts,user,item,site,price,age\n")
        for i in range(num_rows):
            head = f"{int(label[i])},{1_700_000_000 + i},u{user[i]},{item[i]},s{user[i] % 7}"
            file.write(f"{head},{item[i] * 0.5},{user[i] % 80}\n")
    return path


def prepare(tree: Path, text: Path, out: Path) -> tuple[dict[str, float], str]:
    """Seconds, peak memory, and the most bytes in the work folder over those of the packed rows; and what tells the
    bytes of the parts and vocabularies from others."""
    shutil.rmtree(out, ignore_errors=True)
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            sizes = [_size(path) for path in (out / ".prepare").rglob("*")] if out.exists() else []
            most = max(most, sum(sizes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    command = [tree / ".venv/bin/hotrow", "prepare", "criteo", text, "--out", out, "--threads", "2"]
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tree)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {os.waitstatus_to_exitcode(status)}")
    packed = sum(_size(path) for split in ("train", "val", "test") for path in (out / split).glob("*"))
    made = [path for folder in ("train", "val", "test", "vocab") for path in sorted((out / folder).glob("*"))]
    digest = " ".join(f"{crc32(path):08x}" for path in made)
    shutil.rmtree(out)
    return {"s": seconds, "MB": usage.ru_maxrss / 1e3, "temporary / packed": most / packed}, digest


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def worker(tree: Path, task: str, source: Path, folder: Path) -> float:
    """What a process of a checkout says."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [tree / ".venv/bin/python", "-c", WORKER, task, source, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("cells", nargs="*", default=["prepare", "fit", "predict"])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    trees = {"this": Path(__file__).parents[1], "other": given.tree.absolute()}
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    measured: dict[str, dict[str, list[float]]] = {}
    digests = set[str]()

    def note(cell: str, side: str, value: float) -> None:
        measured.setdefault(cell, {name: [] for name in trees})[side].append(value)

    try:
        files: dict[str, Any] = {}
        if "prepare" in given.cells:
            files["prepare"] = folder / "clicks.txt"
            write_criteo(files["prepare"], criteo_kaggle(given.rows, scale=0.1))
        clicks(folder / "first.csv", 400)
        for cell in (*(f"fit {n:,}" for n in FIT_ROWS if "fit" in given.cells), *({"predict"} & {*given.cells})):
            num_rows = int(cell.partition(" ")[2].replace(",", "") or 6_000)
            (folder / cell).mkdir()
            files[cell] = clicks(folder / cell / "clicks.csv", num_rows)
            clicks(folder / cell / "first.csv", 400)
        for turn in range(given.rounds):
            for cell, file in files.items():
                for side in sorted(trees, reverse=bool(turn % 2)):
                    if cell == "prepare":
                        figures, digest = prepare(trees[side], file, folder / "out")
                        digests.add(digest)
                        if len(digests) > 1:
                            raise SystemExit("the two checkouts make other bytes of the same rows: nothing to compare")
                        for name, value in figures.items():
                            note(f"prepare, {name}", side, value)
                    else:
                        note(cell, side, worker(trees[side], cell.partition(" ")[0], file, folder / "runs"))
                    print(
                        f"{cell}, {side}: {[each[side][-1] for n, each in measured.items() if n.startswith(cell)]}",
                        file=sys.stderr,
                    )
    finally:
        shutil.rmtree(folder)
    for cell, sides in measured.items():
        ratios = [a / b for a, b in zip(sides["this"], sides["other"], strict=True)]
        this, other = (statistics.median(sides[side]) for side in ("this", "other"))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{cell}: {this:.4g}, other {other:.4g}; {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
