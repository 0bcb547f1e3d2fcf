"""Deltas of exports: their size, and the seconds that applying one takes, beside copying a table and writing its rows.

    python -m benchmarks.deltas [--size 1GB] [--share 0.01] [--dim 16] [--rounds 3] [--folder DIR]

An export has one table of `--size`, and the next one differs in `--share` of its rows, drawn uniformly: the worst case,
because what people look up is less spread. A round makes the next export of the export and the delta; then it copies
the table alone and writes the same rows into the copy with NumPy: `memmap[rows] = weights`, then `flush`. Every round
verifies the export against the checksums of the whole one. The disk holds the table twice.

Prints a line of JSON: bytes and seconds, medians over the rounds. The bars: `size_ratio`, bytes of the delta to those
of the changed rows, at most 1.1; `time_ratio`, of the medians, at most 2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.base.files import folder_bytes, parse_bytes
from hotrow.export.delta import apply_delta, write_delta
from hotrow.export.export import DOCUMENT, FOLDERS, OWN_NAMES, Description, Whole, becoming, verify_export

PIECE_ROWS = 1 << 16
FILE = "tables/t.safetensors"


class Table:
    """[num_rows, dim] of random numbers, made piece by piece; of a share of the rows other ones on another day."""

    dtype = torch.float32

    def __init__(self, num_rows: int, dim: int, share: float, day: int) -> None:
        self.shape, self._share, self._day = torch.Size((num_rows, dim)), share, day

    def pieces(self) -> Iterator[int]:
        return iter(range(0, self.shape[0], PIECE_ROWS))

    def changed(self, start: int) -> np.ndarray:
        """The rows of a piece that the second day changes."""
        rng = np.random.default_rng((start, 1))
        return np.flatnonzero(rng.random(min(PIECE_ROWS, self.shape[0] - start)) < self._share)

    def read(self, start: int) -> Tensor:
        num_rows = min(PIECE_ROWS, self.shape[0] - start)
        found = np.random.default_rng(start).random((num_rows, self.shape[1]), np.float32)
        if self._day:
            found[self.changed(start)] += 1
        return torch.from_numpy(found)


def write(to: Whole, table: Table, day: int) -> Description:
    """The export of a day, which is its table alone."""
    nothing: dict[str, Any] = dict.fromkeys(("dense", "features", "tables"), ())
    description = Description("", f"day-{day}", day, {}, {}, None, **nothing, files={})
    to.begin(description, 0)
    description = replace(description, files={FILE: to.table(FILE, "t.weight", table)})
    DOCUMENT.write(to.folder / "export.json", description)
    return description


def seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(folder: Path, num_rows: int, dim: int, share: float, rounds: int) -> dict[str, Any]:
    """Times both in `folder`."""
    tables = [Table(num_rows, dim, share, day) for day in range(2)]
    base, delta, copy, plain = (folder / name for name in ("base", "delta", "copy", "plain"))
    with becoming(base, "export", OWN_NAMES, FOLDERS, doing="measuring") as partial:
        write(Whole(partial), tables[0], 0)
    making_s = seconds(lambda: write_delta(base, delta, lambda to: write(to, tables[1], 1)))
    starts = list(tables[1].pieces())
    rows = np.concatenate([start + tables[1].changed(start) for start in starts])
    weights = np.concatenate([tables[1].read(start).numpy()[tables[1].changed(start)] for start in starts])
    begin = (base / FILE).stat().st_size - 4 * num_rows * dim

    def write_rows() -> None:
        shutil.copyfile(base / FILE, plain)
        file = np.memmap(plain, np.float32, "r+", offset=begin, shape=(num_rows, dim))
        file[rows] = weights
        file.flush()

    applying, writing = [], []
    for _ in range(rounds):
        os.sync()
        applying.append(seconds(lambda: apply_delta(base, delta, copy)))
        verify_export(copy)
        shutil.rmtree(copy)
        os.sync()
        writing.append(seconds(write_rows))
        plain.unlink()
    applying_s, writing_s = statistics.median(applying), statistics.median(writing)
    return {
        "table_bytes": 4 * num_rows * dim,
        "changed_rows": len(rows),
        "changed_bytes": weights.nbytes,
        "delta_bytes": folder_bytes(delta),
        "size_ratio": round(folder_bytes(delta) / weights.nbytes, 4),
        "making_s": round(making_s, 3),
        "applying_s": round(applying_s, 3),
        "writing_s": round(writing_s, 3),
        "time_ratio": round(applying_s / writing_s, 3),
        "rounds": {"applying_s": applying, "writing_s": writing},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GB", help="of the table")
    parser.add_argument("--share", type=float, default=0.01, help="of its rows that change")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where files are made and removed; default: the system's")
    options = parser.parse_args()
    num_rows = parse_bytes(options.size) // (4 * options.dim)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(measure(Path(folder), num_rows, options.dim, options.share, options.rounds)))


if __name__ == "__main__":
    main()
