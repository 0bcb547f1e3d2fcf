"""Raw Criteo rows to columns and to row numbers: ours beside pyarrow's and polars' CSV readers, in one interleaved run.

    python -m benchmarks.parse --out docs/measurements/benchmarks.json [--rows 1000000] [--keys 33762577] [--rounds 5]

Makes a file of Criteo's shape (13 integers, 26 categories, Zipf-distributed ids over Kaggle's cardinalities scaled to
--keys in all, about a tenth of the fields empty), compares what the readers give, then times them in turn:

    parse               ours: text -> float32 and uint32 columns
    parse+encode        ours: the same, then every category to its row number by vocabularies of --keys ids
    pyarrow             pyarrow.csv.read_csv with the columns' types given (categories as strings)
    pyarrow+dictionary  the same, then dictionary_encode of every category
    polars              polars.read_csv with the schema given
    polars+categories   polars.scan_csv, every category cast to pl.Categorical and to its code, collected by streams:
                        the fastest of its ways (types in the schema, casts after read_csv, pl.Enum of known ids)

Single-threaded cells run with one thread on either side; the others may use two: ours then parses in one thread while
two others encode. Every cell reads the file from the page cache. Medians, ratios of peer to ours with their spread, and
rows per CPU second go to --out, or are printed; rows per CPU second, over all threads, is the figure per core, which a
busy machine disturbs least.

The same is done for JSON Lines, with a fifth of the rows, by one thread:

    jsonl.plain         ours: ten members of one value -> Arrow columns of text as it is written
    jsonl.lists         the same with two lists, of 20 and of 0 to 5 ids
    pyarrow             pyarrow.json.read_json, which makes floats of integers above 2^63 and of 7.0
    json                json.loads of each line alone, into dicts: what Python takes before there is a column
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from benchmarks import bench
from benchmarks.results import end_on_signals, record
from benchmarks.synthetic_config import KAGGLE_ROWS
from hotrow.data.chunk import Chunk, Keys
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.prepare.spill import CounterPool
from hotrow.data.sources.columns import open_table
from hotrow.data.sources.criteo import CATEGORY_NAMES, DENSE_NAMES, CriteoSource
from hotrow.data.sources.schema import CsvSpec

NAMES = ("label", *DENSE_NAMES, *CATEGORY_NAMES)
ROWS_PER_CHUNK = 65536


def cardinalities(num_keys: int) -> list[int]:
    return [max(3, round(n * num_keys / sum(KAGGLE_ROWS))) for n in KAGGLE_ROWS]


def ids_to_keys(ids: np.ndarray, feature: int) -> np.ndarray:
    """One-to-one on 32 bits, so that distinct ids stay distinct and look like Criteo's hashes."""
    return (ids.astype(np.uint32) * np.uint32(2654435761)) ^ np.uint32(feature * 0x9E3779B1 & 0xFFFFFFFF)


def hex_strings(keys: np.ndarray, empty: np.ndarray) -> pa.Array:
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    nibbles = (keys[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & 15
    text = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(8), len(keys), [None, pa.py_buffer(digits[nibbles].tobytes())]
    )
    return pc.if_else(pa.array(empty), pa.scalar(None, pa.string()), text.cast(pa.binary()).cast(pa.string()))


def write_rows(path: Path, num_rows: int, sizes: list[int], rng: np.random.Generator) -> None:
    """Writes the file; ids fall off as 1 / rank, sampled by inverting the logarithm."""
    with path.open("wb") as file:
        for first in range(0, num_rows, 1 << 18):
            n = min(1 << 18, num_rows - first)
            columns: dict[str, pa.Array] = {"label": pa.array(rng.integers(0, 4, n) == 0).cast(pa.int32())}
            for name in DENSE_NAMES:
                numbers = rng.geometric(0.02, n) ** rng.integers(1, 3)
                columns[name] = pa.array(numbers, mask=rng.random(n) < 0.1)
            for c, (name, size) in enumerate(zip(CATEGORY_NAMES, sizes, strict=True)):
                ids = np.minimum(np.exp(rng.random(n) * np.log(size + 1)).astype(np.int64) - 1, size - 1)
                columns[name] = hex_strings(ids_to_keys(ids, c), rng.random(n) < 0.1)
            options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
            pyarrow.csv.write_csv(pa.table(columns), file, options)


def build_vocabularies(folder: Path, sizes: list[int]) -> dict[str, Vocabulary]:
    """Vocabularies of every possible id, ranked as they are drawn."""
    with CounterPool(folder / "tmp", memory_bytes=4 << 30) as counters:
        for c, (name, size) in enumerate(zip(CATEGORY_NAMES, sizes, strict=True)):
            counters.declare(name, "int")
            for first in range(0, size, 1 << 20):
                ids = np.arange(first, min(first + (1 << 20), size))
                counters.add({name: [Keys(ids_to_keys(ids, c))]})
            counters.build(name, folder / name, folder / f"{name}.counts")
    return {name: Vocabulary.open(folder / name, verify="header").load() for name in CATEGORY_NAMES}


def read_ours(path: Path, *, threads: int) -> list[Chunk]:
    return list(CriteoSource([path]).chunks(rows_per_chunk=ROWS_PER_CHUNK, depth=threads - 1))


def encode_ours(path: Path, vocabularies: dict[str, Vocabulary], *, threads: int) -> int:
    """As preparation does it: `threads` tables at a time, while another thread parses."""
    last_row = 0
    with ThreadPoolExecutor(threads) as executor:
        in_turn = map if threads == 1 else executor.map
        for chunk in CriteoSource([path]).chunks(rows_per_chunk=ROWS_PER_CHUNK, depth=threads - 1):
            keys = [chunk.keys[name] for name in vocabularies]
            last_row += sum(int(rows[-1]) for rows in in_turn(Vocabulary.lookup, vocabularies.values(), keys))
    return last_row


def read_arrow(path: Path, *, threads: int, dictionary: bool = False) -> pa.Table:
    types = dict.fromkeys(NAMES, pa.int32()) | dict.fromkeys(CATEGORY_NAMES, pa.string())
    table = pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=NAMES, use_threads=threads > 1, block_size=8 << 20),
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    if dictionary:
        for name in CATEGORY_NAMES:
            table[name].combine_chunks().dictionary_encode()
    return table


def read_polars(path: Path, *, categories: bool = False) -> object:
    import polars as pl  # imported here: the process that times one thread sets its number before

    schema = dict.fromkeys(NAMES, pl.Int32) | dict.fromkeys(CATEGORY_NAMES, pl.String)
    if not categories:
        return pl.read_csv(path, separator="\t", has_header=False, schema=schema, quote_char=None)
    codes = pl.col(CATEGORY_NAMES).cast(pl.Categorical).to_physical()
    rows = pl.scan_csv(path, separator="\t", has_header=False, schema=schema, quote_char=None)
    return rows.with_columns(codes).collect(engine="streaming")


def check(path: Path, vocabularies: dict[str, Vocabulary]) -> None:
    """Refuses to time readers that disagree, row numbers that are not the ids' ranks, or other codes of the peers."""
    chunks, table, frame = read_ours(path, threads=2), read_arrow(path, threads=2), read_polars(path)
    categories = read_polars(path, categories=True)
    for name in DENSE_NAMES:
        truth = table[name].to_numpy().astype(np.float32)
        ours = np.concatenate([chunk.dense[:, DENSE_NAMES.index(name)] for chunk in chunks])
        theirs = frame[name].to_numpy().astype(np.float32)  # type: ignore[index]
        assert np.array_equal(ours, truth, equal_nan=True) and np.array_equal(ours, theirs, equal_nan=True), name
    for c, name in enumerate(CATEGORY_NAMES):
        ours = np.concatenate([chunk.keys[name].values for chunk in chunks])
        valid = np.concatenate(
            [k.valid if (k := chunk.keys[name]).valid is not None else np.ones(k.num_keys, bool) for chunk in chunks]
        )
        assert hex_strings(ours, ~valid).equals(table[name].combine_chunks()), name
        rows = np.concatenate([vocabularies[name].lookup(chunk.keys[name]) for chunk in chunks])
        ids = (ours ^ np.uint32(c * 0x9E3779B1 & 0xFFFFFFFF)) * np.uint32(pow(2654435761, -1, 2**32))
        assert np.array_equal(rows, np.where(valid, ids.astype(np.int64) + 1, 0)), name
        by_arrow = table[name].combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy()
        by_polars = categories[name].cast(int).fill_null(-1).to_numpy()  # type: ignore[index]
        assert is_one_to_one(rows, by_arrow) and is_one_to_one(rows, by_polars), name


def is_one_to_one(rows: np.ndarray, codes: np.ndarray) -> bool:
    """Whether two numberings [n] of the same ids, each below 2^31, give equal numbers to the same ones."""
    pairs = np.unique(rows.astype(np.int64) << 32 | (codes.astype(np.int64) + 1))
    return len(pairs) == len(np.unique(rows)) == len(np.unique(codes))


Times = dict[str, tuple[float, float]]
"""Contender -> seconds by the clock, seconds of CPU over all threads."""
PEERS = {
    "pyarrow/1": "parse/1",
    "pyarrow/2": "parse/2",
    "polars/1": "parse/1",
    "polars/2": "parse/2",
    "polars+categories/1": "parse+encode/1",
    "polars+categories/2": "parse+encode/2",
    "pyarrow+dictionary/1": "parse+encode/1",
    "pyarrow+dictionary/2": "parse+encode/2",
}
"""Peer -> what of ours does the same work on as many threads."""
ENCODE_TARGET = 3.0
"""Least ratio of a peer that encodes to ours, by our own promise."""


def write_json(path: Path, num_rows: int, *, lists: bool) -> None:
    """Writes rows of ten members, among them 60-bit ids, decimals and texts; with `lists` of two more."""
    rng = np.random.default_rng(2)
    ids, users = rng.integers(0, 2**60, num_rows).tolist(), rng.integers(0, 10_000, num_rows).tolist()
    with path.open("w") as file:
        for i, (item, user) in enumerate(zip(ids, users, strict=True)):
            row: dict[str, Any] = {"ts": 1_700_000_000 + i, "user": f"u{user}", "item": item, "category": f"c{i % 20}"}
            row |= {"price": user / 100, "device": "mobile", "country": "de", "pos": i % 7, "click": i % 2}
            row["campaign"] = user % 500
            if lists:
                row |= {"last": [(user + k) % 9999 for k in range(20)], "tags": [f"t{k}" for k in range(i % 6)]}
            file.write(json.dumps(row) + "\n")


def read_json(path: Path) -> pa.Table:
    reader = open_table(path, CsvSpec())
    return pa.Table.from_batches([rows.batch for rows in reader.read(0, 0, reader.schema.names, ROWS_PER_CHUNK)])


def check_json(path: Path) -> None:
    """Refuses to time readers that disagree."""
    rows, ours = [json.loads(line) for line in path.open()], read_json(path).to_pydict()
    for name, found in ours.items():
        texts = [[str(v) for v in row[name]] if isinstance(row[name], list) else str(row[name]) for row in rows]
        assert found == texts, name


def json_round(paths: dict[str, Path]) -> Times:
    options = pyarrow.json.ReadOptions(use_threads=False)
    times: Times = {}
    for name, path in paths.items():
        times[f"jsonl.{name}/1"] = timed(lambda path=path: read_json(path))  # type: ignore[misc]
        times[f"jsonl.{name}.pyarrow/1"] = timed(lambda path=path: pyarrow.json.read_json(path, options))  # type: ignore[misc]
        times[f"jsonl.{name}.json/1"] = timed(lambda path=path: [json.loads(line) for line in path.open()])  # type: ignore[misc]
    return times


def timed(run: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def one_round(path: Path, vocabularies: dict[str, Vocabulary]) -> Times:
    """Every contender once, in turn."""
    contenders: dict[str, Callable[[], object]] = {
        "parse/1": lambda: read_ours(path, threads=1),
        "pyarrow/1": lambda: read_arrow(path, threads=1),
        "parse+encode/1": lambda: encode_ours(path, vocabularies, threads=1),
        "pyarrow+dictionary/1": lambda: read_arrow(path, threads=1, dictionary=True),
        "parse/2": lambda: read_ours(path, threads=2),
        "pyarrow/2": lambda: read_arrow(path, threads=2),
        "parse+encode/2": lambda: encode_ours(path, vocabularies, threads=2),
        "pyarrow+dictionary/2": lambda: read_arrow(path, threads=2, dictionary=True),
        "polars/2": lambda: read_polars(path),
        "polars+categories/2": lambda: read_polars(path, categories=True),
    }
    alone = {"polars/1": False, "polars+categories/1": True}
    times = {name: timed(run) for name, run in contenders.items()}
    return times | {name: polars_alone(path, 1, categories=categories) for name, categories in alone.items()}


def polars_alone(path: Path, threads: int, *, categories: bool) -> tuple[float, float]:
    """Times of polars with another number of threads, which it fixes at import: in a process of its own."""
    code = (
        "import sys; from benchmarks.parse import read_polars, timed; from pathlib import Path; p = Path(sys.argv[1]); "
    )
    code += f"r = lambda: read_polars(p, categories={categories}); r(); print(*timed(r))"
    environment = os.environ | {"POLARS_MAX_THREADS": str(threads)}
    command = [sys.executable, "-c", code, str(path)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=sum(KAGGLE_ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    args = parser.parse_args()
    end_on_signals()
    pa.set_cpu_count(2)
    with tempfile.TemporaryDirectory() as name:
        path, sizes = Path(name) / "rows.tsv", cardinalities(args.keys)
        write_rows(path, args.rows, sizes, np.random.default_rng(1))
        vocabularies = build_vocabularies(Path(name), sizes)
        check(path, vocabularies)
        rounds = bench.clean_rounds(lambda _: one_round(path, vocabularies), args.rounds)
        facts = {"rows": args.rows, "text_bytes": path.stat().st_size, "vocabulary_keys": sum(sizes)}
        paths = {kind: Path(name) / f"{kind}.jsonl" for kind in ("plain", "lists")}
        for kind, path in paths.items():
            write_json(path, args.rows // 5, lists=kind == "lists")
            check_json(path)
        of_json = bench.clean_rounds(lambda _: json_round(paths), args.rounds)
    cells = [compared(rounds, ours, peer, args.rows) for peer, ours in PEERS.items()]
    for kind in paths:
        for peer in ("pyarrow", "json"):
            cell = compared(of_json, f"jsonl.{kind}/1", f"jsonl.{kind}.{peer}/1", args.rows // 5)
            cells.append({**cell, "name": f"jsonl.{kind}.{peer}", "peer": f"{peer}, threads: 1"})
    for cell in cells:
        rows_per_cpu_s = f"{cell['ours_rows_per_cpu_s']:,} rows/CPU s, peer {cell['peer_rows_per_cpu_s']:,}"
        print(f"{bench.format_row(cell)}  {rows_per_cpu_s}", file=sys.stderr)
    record("parse", {"cells": cells, **facts, **bench.circumstances()}, args.out)


def name_of(ours: str, peer: str) -> str:
    """The cell of a contender of ours and a peer."""
    return f"criteo.{ours}.{peer.split('/')[0]}"


def compared(rounds: bench.Rounds[Times], ours: str, peer: str, num_rows: int) -> dict[str, Any]:
    """One cell of docs/measurements/benchmarks.json, and rows per second of CPU."""

    def median(name: str, clock: int) -> float:
        return statistics.median(one[name][clock] for one in rounds.results)

    ratios = [one[peer][0] / one[ours][0] for one in rounds.results]
    promised = {"target": ENCODE_TARGET} if "encode" in ours else {}
    return {
        "name": name_of(ours, peer),
        "ours_ms": median(ours, 0) * 1e3,
        "peer": f"{peer.split('/')[0]}, threads: {peer.split('/')[1]}",
        "peer_ms": median(peer, 0) * 1e3,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        **promised,
        "limit_ms": None,
        "share_of_limit": None,
        **rounds.counts(),
        "ours_rows_per_cpu_s": round(num_rows / median(ours, 1)),
        "peer_rows_per_cpu_s": round(num_rows / median(peer, 1)),
    }


if __name__ == "__main__":
    main()
