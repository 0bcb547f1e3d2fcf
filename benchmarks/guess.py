"""How long the guess of a schema takes: 100 columns and 10 million rows, as CSV, Parquet and JSON Lines.

    python -m benchmarks.guess [--rows 10000000] [--columns 100] [--folder /tmp] [csv parquet jsonl]

The bar is 5 s. A file is one block of made-up rows (ids, numbers, counts, text, times, with gaps), written again and
again, so that making it takes less long than reading it. It is removed afterwards.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from hotrow.data.sources.guess import guess_columns

BLOCK_ROWS = 500_000
ROUNDS = 3
MAX_S = 5.0


def make_block(num_columns: int, num_rows: int) -> pa.Table:
    """Returns rows whose label depends on some of the columns."""
    rng = np.random.default_rng(0)
    kinds: list[Callable[[], Any]] = [
        lambda: rng.integers(1, 400, num_rows),
        lambda: rng.lognormal(3, 1, num_rows).round(2),
        lambda: np.where(rng.random(num_rows) < 0.6, 0, rng.integers(1, 5000, num_rows)),
        lambda: rng.zipf(1.3, num_rows) % 100_000,
        lambda: [f"{value:08x}" for value in rng.zipf(1.4, num_rows) % 2**32],
        lambda: rng.normal(0, 1, num_rows).round(4),
        lambda: pa.array(rng.integers(0, 24, num_rows), mask=rng.random(num_rows) < 0.1),
    ]
    columns = {f"c{i}": kinds[i % len(kinds)]() for i in range(num_columns - 2)}
    effect = rng.normal(0, 0.7, 400)[columns["c0"]] - 0.3 * np.log1p(columns["c1"])
    label = (rng.random(num_rows) < 1 / (1 + np.exp(1 - effect))).astype(int)
    return pa.table({"click": label, "ts": 1_700_000_000 + np.arange(num_rows), **columns})


def write(block: pa.Table, path: Path, times: int) -> None:
    """Writes the rows of `block` so many times, in the format of the file's name."""
    if path.suffix == ".parquet":
        with pq.ParquetWriter(path, block.schema) as writer:
            for _ in range(times):
                writer.write_table(block)
        return
    sink = io.BytesIO()
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(block, sink)
        header, _, text = sink.getvalue().partition(b"\n")
    else:
        names = block.column_names
        cells = [[f'"{name}":{json_of(value)}' for value in block[name].to_pylist()] for name in names]
        header, text = b"", b"".join(f"{{{','.join(row)}}}\n".encode() for row in zip(*cells, strict=True))
    with path.open("wb") as file:
        file.write(header + b"\n" if header else b"")
        for _ in range(times):
            file.write(text)


def json_of(value: Any) -> str:
    return "null" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("formats", nargs="*", default=["csv", "parquet", "jsonl"])
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--columns", type=int, default=100)
    options.add_argument("--folder", default=None)
    told = options.parse_args()
    block = make_block(told.columns, min(BLOCK_ROWS, told.rows))
    for suffix in told.formats:
        with TemporaryDirectory(dir=told.folder) as folder:
            path = Path(folder) / f"rows.{suffix}"
            write(block, path, -(-told.rows // len(block)))
            seconds, of_cpu = [], []
            for _ in range(ROUNDS):
                start, cpu = time.perf_counter(), time.process_time()
                guess = guess_columns(path, label="click")
                seconds.append(time.perf_counter() - start)
                of_cpu.append(time.process_time() - cpu)
            size = path.stat().st_size / 2**30
        verdict = "held" if min(seconds) <= MAX_S else "missed"
        span = f"{min(seconds):.2f} to {max(seconds):.2f} s"
        print(f"{suffix}: {span}, {min(of_cpu):.2f} s of CPU; {size:.2f} GiB; {verdict}")
        print(f"  {guess.origin}; {len(guess.of('dense'))} dense, {len(guess.of('categorical'))} of ids")


if __name__ == "__main__":
    main()
