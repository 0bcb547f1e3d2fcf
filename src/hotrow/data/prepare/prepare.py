"""Preparation as users call it, with plain arguments, and its counterpart for new rows: raw rows in, batches out.

    run_prepare("criteo", "train.txt", "data/criteo")            # hotrow prepare
    for batch in Encoder.load("data/criteo").batches("new.txt"):   # hotrow predict

`pipeline.py` does the work, `sources/registry.py` opens the sources; docs/prepare.md is for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass as record

from hotrow.base.files import parse_bytes
from hotrow.base.machine import available_memory_bytes, usable_cores
from hotrow.base.progress import ProgressCallback
from hotrow.base.records import STRICT, Count, checked
from hotrow.batch import Batch
from hotrow.data.cells import IdEncoding
from hotrow.data.chunk import SKIP_CURE, Chunk, Keys, RowError
from hotrow.data.coded import CodedKeys, column_of
from hotrow.data.packed.format import MANIFEST, MANIFEST_CURE, Ids, Ragged
from hotrow.data.packed.loader import keyed
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.prepare.days import Base, Day
from hotrow.data.prepare.encoder import RowEncoder, TableEncoder
from hotrow.data.prepare.pipeline import Options, prepare
from hotrow.data.prepare.statistics import Statistics
from hotrow.data.prepare.workfolder import check_out
from hotrow.data.seen import Seen
from hotrow.data.sources.columns import format_of, is_paths
from hotrow.data.sources.inputs import find_files, spooled
from hotrow.data.sources.options import ReadOptions, with_read_options
from hotrow.data.sources.registry import SOURCE_NAMES, OpenedSource, looks_like_criteo, open_source
from hotrow.data.sources.schema import Schema, SplitSpec, check_options, load_schema, parse_schema
from hotrow.data.sources.split import SplitPlan
from hotrow.data.sources.tabular import TextReader
from hotrow.data.transforms import Transform

NO_BASE = "none"
"""In place of a base, for the first day of a chain."""
SCORE = "score"
"""Name of the column of scores in the file that prediction writes."""


def score_names(labels: Sequence[str]) -> list[str]:
    """Returns the names of the columns of scores, one for each label of a model."""
    return [SCORE] if len(labels) == 1 else [f"{SCORE}_{label}" for label in labels]


@with_read_options
def run_prepare(
    source: str,
    paths: Any,
    out: Path | str,
    *,
    read: ReadOptions,
    schema: Schema | Path | str | None = None,
    split: str | None = None,
    fractions: Sequence[float] | None = None,
    seed: int | None = None,
    min_count: int | None = None,
    hash_cap: int | None = None,
    rows: int | None = None,
    sample: float = 1.0,
    memory: int | str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    announce: Callable[[str], None] | None = None,
    base: Path | str | None = None,
) -> PackedDataset:
    """Prepares raw logs into the packed dataset `out`; called again with the same arguments, it continues after a stop.

    source: one of `SOURCE_NAMES`, as docs/prepare.md lists them; auto decides by the first line. paths: files, folders,
    patterns, URIs, pipes, or one Arrow-capable frame. schema: a path or a `Schema` for tables without a published
    layout (`hotrow init` writes one); if None, it is guessed, with the help of what you say about columns:
    {read}
    split: time, random or reference. If None, it is reference for criteo, else time if there is a time column, else
    random.
    fractions: shares of train, val and test (0.8, 0.1, 0.1) for time and random. seed: for the random split and
    `sample`. min_count: ids seen fewer times in training rows share row 0. hash_cap: ids are taken modulo this. Both
    apply to all tables.
    rows: only the first rows. sample: keep this share of the rows.
    memory: bytes or text such as "4GiB" for counters, vocabularies and buffers (the libraries take some 0.4 GB more);
    if None, half of what is free. threads: tables counted or encoded at a time. Neither of the two changes a byte.
    progress, announce: see `pipeline.prepare`.
    base: the dataset of the day before, which the rows extend: with its schema, its rows of ids and its statistics.
    All rows then train, unless `split` or `fractions` is given. "none": the rows are the first day of such a chain.

    Raises ValueError naming the field, file, row or option that is wrong; OSError when the disk is full, and
    `pipeline.Interrupted` on Ctrl-C: after these two the same call continues.
    """
    # Checks that need no row come first.
    options = Options(
        rows=rows, sample=sample, memory_bytes=_memory_bytes(memory), threads=threads, overwrite=overwrite
    )
    changes = {"split": split, "fractions": fractions, "seed": seed, "min_count": min_count, "hash_cap": hash_cap}
    parts = check_options(**changes)
    earlier = None if base in (None, NO_BASE) else _Earlier.open(str(base))
    if earlier is not None:
        given = {"schema": schema, "min_count": min_count, "hash_cap": hash_cap, **dict.fromkeys(read.hints, True)}
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{named[0]} is given, but a day has that of its base {base}: leave {named[0]} out")
        if Path(out).resolve() == Path(str(base)).resolve():
            raise ValueError(f"{out} is the base itself; choose another folder for the day")
        if split is None and fractions is None:
            parts = check_options(split="random", fractions=(1.0, 0.0, 0.0), seed=seed)
    if base is not None:
        options = replace(options, base=Base() if earlier is None else earlier.base)

    check_out(Path(out), overwrite=overwrite)
    with spooled(paths, Path(out).absolute().parent) as paths:
        if earlier is not None:
            opened = earlier.opened(source, paths, split=parts, rows=rows, read=read)
        else:
            own = load_schema(schema) if isinstance(schema, str | Path) else schema
            opened = open_source(source, paths, schema=own, split=parts, rows=rows, progress=progress, **vars(read))
            opened = opened.with_options(**changes)
        return prepare(opened, out, options, progress=progress, announce=announce)


def _memory_bytes(memory: int | str | None) -> int | None:
    """Returns the bytes that a number or text means. Raises ValueError for other text."""
    try:
        return None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise ValueError(f"memory is {memory!r}: {error}") from None


@record(frozen=True, config=STRICT)
class _Ids:
    """What preparation writes under `ids` in dataset.json."""

    source: str
    schema: dict[str, JsonValue]
    encodings: dict[str, IdEncoding]
    split: SplitPlan
    rows: Count | None
    sample: float
    day: Day | None = None


_IDS = TypeAdapter(_Ids)


@dataclass(frozen=True)
class RawRows:
    """How raw rows became the rows of a dataset."""

    source: str
    schema: Schema
    encodings: dict[str, IdEncoding]
    """How raw ids are held, by feature."""
    transforms: list[Transform]
    """Transforms of the dense columns, then of the statistics."""
    day: Day
    """The place of the dataset in a chain of days; the first if it extends none."""


def raw_rows(dataset: PackedDataset) -> RawRows | None:
    """Returns what dataset.json says about raw rows; None if there were none. Raises ValueError naming the field."""
    info, where = dataset.info, f"{dataset.path / MANIFEST}"
    if "schema" not in info.ids:
        return None
    made = checked(_IDS, info.ids, where=f"{where}: ids", cure=MANIFEST_CURE)
    schema = parse_schema(made.schema, where=f"{where}: ids.schema")
    for what, wanted, found in (
        ("dense columns", schema.dense_inputs, info.dense_names),
        ("features", schema.feature_names, info.feature_names),
        ("kinds", [c.kind for c in schema.categorical], [f.kind for f in info.features]),
        ("encodings", sorted(c.column for c in schema.id_columns), sorted(made.encodings)),
        ("tables", sorted(schema.table_names), sorted(info.table_by_name)),
    ):
        if list(wanted) != list(found):
            raise ValueError(f"{where}: {what} are {list(found)}, by ids.schema {list(wanted)}; {MANIFEST_CURE}")
    try:
        transforms = [Transform.parse(column.transform) for column in info.dense]
    except ValueError as error:
        raise ValueError(f"{where}: dense: {error}") from None
    return RawRows(made.source, schema, made.encodings, transforms, made.day or Day(1))


@dataclass(frozen=True)
class _Earlier:
    """The dataset of the day before, and how its rows are read."""

    base: Base
    path: str
    raw: RawRows

    @staticmethod
    def open(path: str) -> _Earlier:
        """Raises ValueError if there is no whole dataset at `path`, or rows cannot extend it."""
        dataset = PackedDataset.open(path, verify="sizes")
        raw = raw_rows(dataset)
        if raw is None:
            raise ValueError(f"{path}: its ids were not made from raw rows, so no rows can extend it; prepare raw rows")
        transforms = [str(transform) for transform in raw.transforms[: len(raw.schema.dense)]]
        return _Earlier(Base(dataset, raw.day, tuple(transforms)), path, raw)

    def opened(self, source: str, paths: Any, *, split: SplitSpec, rows: int | None, read: ReadOptions) -> OpenedSource:
        """Opens the rows of the day, with the schema of the base but for the split."""
        is_criteo, schema = self.raw.source == "criteo", self.raw.schema.model_copy(update={"split": split})
        source = "criteo" if is_criteo and source == "auto" else source
        if (source == "criteo") != is_criteo:
            raise ValueError(f"source is {source}, but {self.path} was prepared by source {self.raw.source}: name that")
        if schema.statistics_lag is not None and split.fractions[0] < 1:
            raise ValueError(
                "statistics_lag: all rows of a day must train, because rows that wait to be counted are not kept from "
                "day to day; leave out split and fractions"
            )
        found = open_source(source, paths, rows=rows, schema=schema, encodings=self.raw.encodings, **vars(read))
        return replace(found, schema=schema)


@dataclass(frozen=True)
class Encoder:
    """Reads and encodes raw rows as preparation did, by what training rows taught: for prediction, evaluation, serving.

    Ids that no training row had, and ids too rare for a row of their own, become row 0; so do missing values, unless
    training rows had missing values too, which then have a row. Missing dense values are 0 after the transform. A value
    that is not an id or number of its column is missing, so that every row has inputs.
    """

    source: str
    """The kind of source; "auto" is decided by the rows' form."""
    schema: Schema
    encodings: Mapping[str, IdEncoding]
    transforms: Sequence[Transform]
    """Transforms of the dense columns, then those of the statistics."""
    statistics: Statistics | None
    vocabularies: Mapping[str, Vocabulary]
    """By table."""
    threads: int = field(default_factory=lambda: min(8, usable_cores()))

    @staticmethod
    def load(dataset: PackedDataset | Path | str, *, mapped: bool = False) -> Encoder:
        """The encoder in a dataset, a run's or an export's encoder folder; see docs/format.md. Vocabularies are loaded
        if they take at most half of the free memory, else searched on disk; with `mapped` they always are."""
        dataset = dataset if isinstance(dataset, PackedDataset) else PackedDataset.open(dataset)
        made = raw_rows(dataset)
        if made is None:
            raise ValueError(
                f"{dataset.path}: its ids were not made from raw rows (source {dataset.info.name!r}); it cannot encode "
                "any"
            )
        # Rows of a source that is not opened by name, as benchmarks/synthetic.py has, are a table with these columns.
        source = made.source if made.source in SOURCE_NAMES else "auto"
        # Criteo's own reader takes hex digits for numbers; in other files and in frames they are text.
        encodings: dict[str, IdEncoding] = made.encodings
        if source == "criteo":
            encodings = dict.fromkeys(made.encodings, "hex")
        vocabularies = {table.name: dataset.vocabulary(table.name) for table in dataset.info.tables}
        if mapped:  # an export comes from anywhere
            vocabularies = {name: Vocabulary.open(own.path) for name, own in vocabularies.items()}
        elif sum(v.num_bytes for v in vocabularies.values()) <= available_memory_bytes() // 2:
            # Loading reads every byte, so it checks them; vocabularies searched on disk were checked in preparation.
            vocabularies = {name: own.load() for name, own in vocabularies.items()}
        statistics = None
        if made.schema.statistics:
            statistics = Statistics.load(made.schema, dataset.statistics_path(), cure=MANIFEST_CURE)
        return Encoder(source, made.schema, encodings, made.transforms, statistics, vocabularies)

    def batches(self, data: Any, **options: Any) -> Iterator[Batch]:
        """Yields the batches of `rows`."""
        return (batch for batch, _ in self.rows(data, **options))

    def rows(
        self,
        data: Any,
        *,
        batch_size: int = 65536,
        labels: Literal["ignored", "alone"] = "ignored",
        values: Literal["any", "strict"] = "any",
        seen: Seen | None = None,
        keep: Sequence[str] = (),
    ) -> Iterator[tuple[Batch, pa.RecordBatch | None]]:
        """Yields batches of at most `batch_size` rows, in the data's order, and their columns to keep.

        data: paths or an Arrow-capable frame, as for `run_prepare`. labels: "ignored": label and time are not read and
        may hold anything, and `Batch.label` is NaN; "alone": label and weight are read, the time is not. values:
        "strict": a value that is not of its column's kind is a RowError naming the row, as in preparation. seen: counts
        what the rows hold. keep: columns to yield as the data has them. Raises ValueError naming file and column, and
        RowError for a line that cannot be cut into columns or has no label.
        """
        opened = open_source(
            self._source_of(data),
            data,
            schema=self.schema,
            labels=labels,
            encodings=self.encodings,
            values=values,
            keep=keep,
        )
        is_one = self.threads == 1
        pool = nullcontext() if is_one else ThreadPoolExecutor(self.threads, thread_name_prefix="hotrow-encode")
        with pool as executor:
            tables = {name: TableEncoder(vocabulary) for name, vocabulary in self.vocabularies.items()}
            encode = RowEncoder(self.schema, self.transforms, tables, executor)
            for chunk in _none_left_out(opened.source.chunks(rows_per_chunk=batch_size)):
                if self.statistics is not None:
                    chunk = self.statistics.of_rows_to_score(chunk)
                dense, ids = encode(chunk)
                if seen is not None:
                    _count(seen, self.schema, chunk, dense, ids)
                label = np.full(chunk.num_rows, np.nan, np.float32) if chunk.label is None else chunk.label
                weight = None if chunk.weight is None else torch.from_numpy(chunk.weight)
                sparse = keyed(tuple(ids), [*ids.values()])
                yield Batch(torch.from_numpy(dense), sparse, torch.from_numpy(label), weight=weight), chunk.kept

    def _source_of(self, data: Any) -> str:
        """Returns the source that reads `data`: for rows of Criteo's columns in another form, the source of that
        form."""
        if self.source != "criteo":
            return self.source
        if not is_paths(data):
            return "frame"
        paths = [data] if isinstance(data, str | Path) else data
        file = find_files(paths, matches=bool, wanted="any file")[0]
        if (form := format_of(file)) != "csv":
            return form
        if looks_like_criteo(file.first_line()):
            return "criteo"
        return "csv" if {*self.schema.input_names} <= {*TextReader([file], self.schema.csv).names} else "criteo"


def _count(seen: Seen, schema: Schema, chunk: Chunk, dense: NDArray[np.float32], ids: Mapping[str, Ids]) -> None:
    """Adds the values of an encoded chunk to `seen`."""
    for i, name in enumerate(schema.dense_names):
        unreadable = chunk.unreadable.get(name, 0)
        seen.add_numbers(name, dense[:, i], np.isnan(chunk.dense[:, i]), unreadable=unreadable)
    for name, column in ids.items():
        rows = column.values if isinstance(column, Ragged) else column
        seen.add_ids(name, rows, _missing(column_of(chunk.keys, name)), unreadable=chunk.unreadable.get(name, 0))


def _missing(keys: Keys | CodedKeys) -> NDArray[np.bool_] | None:
    """Returns which keys are missing values; None if none is."""
    if isinstance(keys, CodedKeys):
        return None if keys.entries.valid is None else ~keys.entries.valid[keys.codes]
    return None if keys.valid is None else ~keys.valid


def _none_left_out(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yields the same chunks; errors do not offer to skip a bad row, because every row to predict gets a score."""
    try:
        yield from chunks
    except RowError as error:
        raise error.but(reason=error.reason.replace(f", or {SKIP_CURE}", "")) from None
