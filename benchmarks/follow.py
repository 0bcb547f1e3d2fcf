"""Requests beside `hotrow days`: what a swap to the next day's version costs those who ask.

    python -m benchmarks.follow FOLDER [--days 21] [--rows 20000]

A server follows the chain's link, two clients ask for 50 candidates without end, and `hotrow days` trains the other
days on one thread. Every answer must have a version and status 200. For each swap: p99 over the 5 s around it beside
that of the minute before.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

HOTROW = [sys.executable, "-m", "hotrow"]
PORT, CLIENTS, CANDIDATES = 18766, 2, 50


def write_day(folder: Path, day: int, num_rows: int) -> None:
    """Writes clicks on items and by users of whom some are new each day."""
    rng = np.random.default_rng(day)
    item = rng.integers(0, 3000 + 200 * day, num_rows)
    click = (rng.random(num_rows) < np.where(item % 3 == 0, 0.7, 0.1)).astype(int)
    user, price = rng.integers(1, 20_000 + 1000 * day, num_rows), rng.lognormal(1, 1, num_rows)
    columns = {"click": click, "item": [f"i{i}" for i in item], "user": user, "price": price}
    pyarrow.csv.write_csv(pa.table(columns), folder / f"day_{day:03}.csv")


def ask(seed: int, stop: Any, answers: Any) -> None:
    """Asks until told to stop; puts (moment, seconds, status, version) of each request."""
    rng, own = np.random.default_rng(seed), list[tuple[float, float, int, str]]()
    client = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    while not stop.is_set():
        items = [{"item": f"i{i}"} for i in rng.integers(0, 3000, CANDIDATES)]
        body = json.dumps({"user": {"user": int(rng.integers(1, 20_000)), "price": 2.5}, "items": items})
        moment, began = time.time(), time.perf_counter()
        client.request("POST", "/score", body, {"Content-Type": "application/json"})
        answer = client.getresponse()
        found = json.loads(answer.read())
        own.append((moment, time.perf_counter() - began, answer.status, found.get("version", "")))
    answers.put(own)


def asked(folder: Path, num_days: int, num_rows: int) -> list[tuple[float, float, int, str]]:
    """Returns the requests that were made while the days were trained, by moment."""
    logs, stop, answers = folder / "logs", multiprocessing.Event(), multiprocessing.Queue()
    logs.mkdir()
    days = ["nice", "-n", "5", *HOTROW, "days", str(logs), "--out", str(folder / "chain"), "--label", "click"]
    days += ["--keep", "2", "--set", "train.threads=1", "--set", "train.epochs=1"]
    write_day(logs, 0, num_rows)
    subprocess.run(days, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    serve = [*HOTROW, "serve", str(folder / "chain" / "model"), "--port", str(PORT), "--follow"]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None and "serving" in server.stderr.readline()
        clients = [multiprocessing.Process(target=ask, args=(k, stop, answers)) for k in range(CLIENTS)]
        for each in clients:
            each.start()
        time.sleep(10)
        for day in range(1, num_days):
            write_day(logs, day, num_rows)
        subprocess.run(days, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        time.sleep(5)
        stop.set()
        found = sorted(each for _ in clients for each in answers.get())
        server.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--days", type=int, default=21)
    parser.add_argument("--rows", type=int, default=20_000)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    found = asked(given.folder, given.days, given.rows)
    moments, ms = np.array([each[0] for each in found]), 1e3 * np.array([each[1] for each in found])
    swaps = {version: moment for moment, _, _, version in reversed(found)}  # when each version answered first
    ratios = []
    for moment in sorted(swaps.values())[1:]:
        around = ms[abs(moments - moment) < 2.5]
        before = ms[(moments >= moment - 62.5) & (moments < moment - 2.5)]
        ratios.append(np.quantile(around, 0.99) / np.quantile(before, 0.99))
    failed = sum(status != 200 or not version for *_, status, version in found)
    print(f"{len(found):,} requests, {failed} failed; p50 {np.median(ms):.1f} ms, p99 {np.quantile(ms, 0.99):.1f} ms")
    print(f"{len(ratios)} swaps: p99 around them {min(ratios):.2f} to {max(ratios):.2f} of the minute before")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
