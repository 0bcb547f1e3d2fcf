"""Prepares files on many machines with Ray: byte for byte the dataset that `hotrow prepare` writes in one process.

    pip install hotrow ray                                      # on every machine; tried with ray 2.60
    ray start --head                                            # on one; on the others: ray start --address HEAD:6379
    python examples/prepare_ray.py csv /shared/logs/*.csv --schema schema.yaml --out /shared/clicks --address auto

Every machine sees the files and `--out` under the same paths. Without `--address`, Ray starts here alone.

    read     a task for each file: its rows, parsed once, to <out>/.prepare/rows
    plan     which rows train; rows are cut into spans, by time if statistics are counted as of it
    count    a task for each cut: ids, statistics, moments; they are merged here, in the order of the rows
    build    a task for each table: its vocabulary
    encode   a task for each cut; what it returns is written here, in the order of the rows

What it does not do: chains of days (`--base`), `statistics_lag`, `--rows`, `--sample` and `--skip-bad-rows`. A file is
one task, so a large one should come in pieces; JSON Lines are kept whole by the driver and should become Parquet first.
Rows that are sorted by time lie in the memory of their task. Work that failed starts again with `--overwrite`.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from hotrow.base.files import parse_bytes
from hotrow.data.packed.format import DatasetInfo
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.prepare.encoder import RowEncoder, TableEncoder
from hotrow.data.prepare.fit import EncodedRows, Fit, build_table, by_split, pieces, with_statistics
from hotrow.data.prepare.pipeline import Options, begin
from hotrow.data.prepare.rows import Ingested, Rows, Spans, ingest
from hotrow.data.prepare.statistics import Statistics, num_folds
from hotrow.data.sources.registry import OpenedSource, open_source
from hotrow.data.sources.schema import load_schema
from hotrow.data.sources.split import SplitPlan, TimeHistogram
from hotrow.data.transforms import Transform

Run = Callable[..., Iterator[Any]]
"""run(function, shared, tasks) calls function(*shared, *task) for each task, anywhere; yields the results in order."""


def read(opened: Any, folder: Path, how: dict[str, Any], i: int) -> tuple[Ingested, TimeHistogram, dict[str, int]]:
    """Reads file `i`; returns what is known of its rows, how many have which time, and the file's checksum."""
    rows = ingest(opened, folder / str(i), file=i, **how)
    return rows.known, rows.times(), opened.source.files[i].known


def count(opened: OpenedSource, plan: SplitPlan, rows: Rows, memory: int, spans: Spans, i: int, folder: Path) -> Fit:
    """Returns what the training rows of cut `i` teach; its counts of ids lie in `folder`."""
    fit = Fit(opened, folder, memory_bytes=memory, part=i)
    for piece in pieces(opened.schema, plan, rows.chunks_of(spans)):
        fit.add(piece)
    fit.counters.write_out()
    return fit


def merge(fits: Iterator[Fit], befores: list[Path]) -> Fit:
    """Merges what the cuts teach. befores: files for the statistics of the rows before each cut but the first."""
    fit = next(fits)
    for later, before in zip_longest(fits, befores):
        if before is not None:
            fit.statistics.save(before)
        fit.merge(later)
    return fit


def encode(
    plan: SplitPlan, rows: Rows, info: DatasetInfo, out: Path, of_all: Statistics, spans: Spans, before: Path | None
) -> list[EncodedRows]:
    """Returns the rows of a cut as the dataset stores them. before: the statistics of the rows before it, if any."""
    tables = {t.name: TableEncoder(Vocabulary.open(out / t.vocabulary_file, verify="header")) for t in info.tables}
    encoder = RowEncoder(rows.schema, [Transform.parse(column.transform) for column in info.dense], tables)
    found = pieces(rows.schema, plan, rows.chunks_of(spans))
    if rows.schema.statistics:
        own = Statistics(rows.schema, strict=True)
        if before is not None:
            own = Statistics.load(rows.schema, before, strict=True, cure="start again")
        found = with_statistics(found, of_all, own)
    return [split for piece in found for split in by_split(piece, *encoder(piece.chunk))]


def prepare(opened: OpenedSource, out: Path, run: Run, options: Options, *, memory: int, cut: int) -> PackedDataset:
    """Prepares `opened` into `out`. memory, cut: the bytes and rows of a task, which change no byte."""
    if opened.schema.statistics_lag is not None:
        raise ValueError("statistics_lag: rows that wait to be counted do not pass from cut to cut; leave it out")
    stages = begin(opened, out, options, announce=print)
    if stages.work.resumed:
        raise ValueError(f"{out} holds unfinished work, which is not continued here; add --overwrite")
    schema, source, folder = opened.schema, opened.source, stages.work.folder
    with stages.cleaning():
        known, times = Ingested({}, ()), TimeHistogram()
        how = {"info": stages.info, "by_time": stages.by_time, "memory_bytes": memory}
        found = run(read, (opened, folder / "rows", how), ((i,) for i in range(len(source.files))))
        for i, (of_file, times_of_file, about) in enumerate(found):
            known, times = known.merged(of_file, str(i)), times.merged(times_of_file)
            source.files[i].known.update(about)
        rows = Rows(folder / "rows", schema, known)
        if not len(rows):
            raise ValueError(f"{source.files[0].name} and the other files have no rows; there is nothing to prepare")
        stages.take(known)
        plan, cuts = stages.plan_by(lambda: times), rows.cut(cut, by_time=stages.by_time)
        tasks = ((spans, i, folder / "counts" / str(i)) for i, spans in enumerate(cuts))
        befores = [folder / f"before-{i}" for i in range(1, len(cuts))] if num_folds(schema) == 1 else []
        fit = merge(run(count, (opened, plan, rows, memory), tasks), befores)
        built = run(build_table, (fit.counters, schema, out), ((table,) for table in schema.table_names))
        stages.keep(fit, dict(zip(schema.table_names, built, strict=True)))

        info = stages.dataset_info(plan)
        with stages.writer(info) as writer:
            encoded = run(encode, (plan, rows, info, out, fit.statistics), zip_longest(cuts, [None, *befores]))
            return stages.write(writer, chain.from_iterable(encoded))


def over_ray(function: Callable[..., Any], shared: tuple[Any, ...], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Runs tasks with Ray, twice as many at a time as there are processors."""
    import ray

    remote, given, begun = ray.remote(function), [ray.put(each) for each in shared], deque[Any]()
    for task in tasks:
        begun.append(remote.remote(*given, *task))
        if len(begun) > 2 * ray.cluster_resources()["CPU"]:
            yield ray.get(begun.popleft())
    while begun:
        yield ray.get(begun.popleft())


def main() -> None:
    """Prepare the files that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schema", type=load_schema)
    parser.add_argument("--memory", type=parse_bytes, default="1GiB", help="of a task")
    parser.add_argument("--cut", type=int, default=1 << 20, help="rows of a task")
    parser.add_argument("--address", help="of a cluster, or auto")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    import ray

    ray.init(address=args.address)
    opened = open_source(args.source, args.paths, schema=args.schema)
    prepare(opened, args.out.absolute(), over_ray, Options(overwrite=args.overwrite), memory=args.memory, cut=args.cut)


if __name__ == "__main__":
    main()
