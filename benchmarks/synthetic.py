"""Synthetic clicks with known popularity, drift and truth, for measuring speed at any size and for tests.

    id      rank k = 1..N with P(k) proportional to the integral of x^-zipf over [k - 1/2, k + 1/2]: Zipf's law
            except for the first few ranks, and invertible in one step for any N
    item    the rank's item at that time; see `SyntheticTable.drift`
    key     a bijective hash of the item, 32 bits: neither keys nor their order reveal the popularity
    dense   floor(exp(mean + sd z) - 1), z standard normal: lognormal counts, some missing
    label   1 with probability sigmoid(teacher logit); see `Teacher`

Rows come in cells of 16,384. Everything random about a cell is Philox4x64-10(key=(seed, stream), counter=(0, 0, cell,
0)) with a stream per column, so a row can be made without those before it, and chunks of any size hold the same rows.
Rows are the same on every run on one machine; across machines the last bit of a power may move one id in 10^10.
`SyntheticSource` hands rows to preparation:

    prepare(opened(criteo_kaggle(1_000_000)), "data/kaggle-like")
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.synthetic_config import SyntheticConfig, SyntheticTable
from hotrow.data.chunk import Chunk, FileInfo, KeyKind, Keys, Position, SkippedRows, SourceInfo
from hotrow.data.native import mix64
from hotrow.data.sources.clicks import draw_ranks
from hotrow.data.sources.registry import OpenedSource
from hotrow.data.sources.schema import Schema, parse_schema

START_TIME = 1_577_836_800
"""2020-01-01 00:00 UTC: the time of the first row, in seconds since 1970."""
CELL_ROWS = 16_384
_LATENT = 4
"""Numbers per id in the products of the teacher's pairwise part."""
_LEVELS = 1 << 12
"""A normal draw takes one of this many equally likely values."""
_LABELS, _DENSE, _IDS, _LENGTHS = (n << 32 for n in range(4))
"""First stream of each family; a column adds its index."""

Floats = NDArray[np.float64]


# ---- rows and truth


@dataclass(frozen=True)
class Ids:
    """Items drawn for one feature: one per row, or split into rows by row_splits. Item N is a missing value."""

    items: NDArray[np.int64]
    row_splits: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Cell:
    """Consecutive rows as drawn, before levels become counts and items become keys."""

    first_row: int
    dense_levels: NDArray[np.int16]
    """[I, n], -1 = missing."""
    ids: tuple[Ids, ...]

    @property
    def num_rows(self) -> int:
        """Rows in this cell: 16,384, or fewer in the last cell."""
        return int(self.dense_levels.shape[1])


@cache
def _normal_levels() -> Floats:
    inverse = NormalDist().inv_cdf
    return np.array([inverse((level + 0.5) / _LEVELS) for level in range(_LEVELS)])


def _raw(config: SyntheticConfig, stream: int, cell: int, num_words: int) -> NDArray[np.uint64]:
    counter = np.array([0, 0, cell, 0], np.uint64)
    words: NDArray[np.uint64] = np.random.Philox(
        key=np.array([config.seed, stream], np.uint64), counter=counter
    ).random_raw(num_words)
    return words


def _mix32(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Applies the finalizer of MurmurHash3, a bijection of 32-bit words, in place."""
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0xC2B2AE35)
    words ^= words >> np.uint32(16)
    return words


def _salt(config: SyntheticConfig, table: SyntheticTable) -> int:
    digest = hashlib.sha256(f"{config.seed}/{table.name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _ranks(table: SyntheticTable, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    return draw_ranks(table.num_embeddings, table.zipf, words)


def _exchange(table: SyntheticTable, salt: int, ranks: NDArray[np.int64], time: Floats) -> NDArray[np.int64]:
    """Returns the item of each rank at `time`; see `SyntheticTable.drift`."""
    half = table.num_embeddings // 2
    if not table.drift or not half:
        return ranks
    pair = ranks % half
    moment = mix64(pair.astype(np.uint64) + np.uint64(salt ^ 0x5BD1E995)).astype(np.float64) * 2.0**-64
    partner = np.where(ranks < half, ranks + half, ranks - half)
    return np.where((moment < table.drift * time) & (ranks < 2 * half), partner, ranks)


def _lengths(table: SyntheticTable, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Draws Poisson or geometric lengths, cut at max_length, by inverting the distribution function."""
    mean, steps = table.mean_length, np.arange(table.max_length)
    if table.kind == "multi_hot":
        log_factorial = np.concatenate([[0.0], np.log(np.arange(1, table.max_length)).cumsum()])
        mass = np.exp(steps * np.log(max(mean, 1e-300)) - mean - log_factorial)
    else:
        mass = (mean / (1 + mean)) ** steps / (1 + mean)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.searchsorted(np.cumsum(mass), uniform, "right")


class Generator:
    """Draws everything in a cell except the label."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.salts = [_salt(config, table) for table in config.tables]

    def cell(self, index: int) -> Cell:
        """Draws cell `index`: rows from index * 16,384 on."""
        first = index * CELL_ROWS
        num_rows = min(CELL_ROWS, self.config.num_rows - first)
        time = np.arange(first, first + num_rows) / self.config.num_rows
        dense = np.empty((len(self.config.dense), num_rows), np.int16)
        for j, column in enumerate(self.config.dense):
            words = _raw(self.config, _DENSE + j, index, num_rows)
            dense[j] = words >> np.uint64(52)
            dense[j, (words & np.uint64(0xFFFFFFFF)) < np.uint64(column.missing * 2**32)] = -1
        return Cell(first, dense, tuple(self._ids(j, index, time) for j in range(len(self.config.tables))))

    def _ids(self, j: int, index: int, time: Floats) -> Ids:
        table, salt = self.config.tables[j], self.salts[j]
        if table.kind == "one_hot":
            words = _raw(self.config, _IDS + j, index, len(time))
            items = _exchange(table, salt, _ranks(table, words), time)
            if table.missing:
                # `draw_ranks` leaves only 11 bits, too few for a share; mixing makes more bits from the same word.
                items[mix64(words) < np.uint64(table.missing * 2.0**64)] = table.num_embeddings
            return Ids(items)
        lengths = _lengths(table, _raw(self.config, _LENGTHS + j, index, len(time)))
        splits = np.concatenate([[0], lengths.cumsum()])
        words = _raw(self.config, _IDS + j, index, int(splits[-1]))
        return Ids(_exchange(table, salt, _ranks(table, words), np.repeat(time, lengths)), splits)

    def labels(self, index: int, logits: Floats) -> NDArray[np.float32]:
        """Draws the labels [n] of cell `index`: 1 with probability sigmoid(logit)."""
        uniform = (_raw(self.config, _LABELS, index, len(logits)) >> np.uint64(11)) * 2.0**-53
        return (uniform < sigmoid(logits)).astype(np.float32)

    def count_levels(self) -> NDArray[np.float32]:
        """Returns the count for each level of a dense column, [I, levels + 1]; the last, at -1, is NaN for missing."""
        table = np.full((len(self.config.dense), _LEVELS + 1), np.nan, np.float32)
        for j, column in enumerate(self.config.dense):
            count = np.floor(np.expm1(column.mean + column.sd * _normal_levels()))
            table[j, :-1] = np.clip(count, 0, (1 << 24) - 1)
        return table

    def keys(self, j: int, items: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the raw ids of items."""
        return _mix32(items.astype(np.uint32) ^ np.uint32(self.salts[j] & 0xFFFFFFFF))


@dataclass(frozen=True)
class _Parts:
    """The three parts of the teacher's logit before scaling, [n] each."""

    main: Floats
    pair: Floats
    dense: Floats


class Teacher:
    """The truth behind the labels: logit = bias + main + pair + dense, each with the config's standard deviation.

        main   sum over features f of w_f u_f(id)                     u_f(id) ~ N(0, 1) by hash
        pair   sum over f < g of w_f w_g <v_f(id), v_g(id')>          v_f(id) in R^4 by hash, centred per feature
        dense  sum over columns j of a_j z_j                          z_j = normal score of the count, 0 when missing
        w_f    1 / (1 + ln(N_f) / 4): small tables matter more, so that the truth can be learnt from few rows

    A list counts as the mean of its ids. Nothing is stored per id: u and v are bits of a hash of (seed, table, id).
    Scales and bias are set with the first 16,384 rows.
    """

    def __init__(self, generator: Generator) -> None:
        config = generator.config
        self._generator = generator
        normal = _normal_levels().astype(np.float32)
        weights = [1 / (1 + math.log(table.num_embeddings) / 4) for table in config.tables]
        self._id_levels = [np.tile(np.float32(weight) * normal, (1 + _LATENT, 1)) for weight in weights]
        """By feature [1 + 4, levels]: what each level of u and of v adds, weighted and centred."""
        signs = [(-1) ** j / math.sqrt(1 + j) for j in range(len(config.dense))]
        # Level -1, a missing count, is the last level and adds nothing.
        self._dense_levels = [np.append(np.float32(sign) * normal, np.float32(0)) for sign in signs]
        # A full cell even if the data set is smaller, so that the truth does not depend on its size.
        pilot = Generator(replace(config, num_rows=max(config.num_rows, CELL_ROWS))).cell(0)
        for j, ids in enumerate(pilot.ids):
            self._id_levels[j][1:] -= self._effects(j, ids)[1:].mean(axis=1, keepdims=True)
        parts = self._parts(pilot)
        self._scales = [
            (strength / (std if (std := float(part.std())) > 0 else 1.0), float(part.mean()))
            for part, strength in (
                (parts.main, config.main_strength),
                (parts.pair, config.pair_strength),
                (parts.dense, config.dense_strength),
            )
        ]
        self.bias = 0.0
        self.bias = _bias_for(config.base_rate, self.logits(pilot))

    def logits(self, cell: Cell) -> Floats:
        """Returns logits [n]; the label was drawn with probability sigmoid(logit), and no model can do better."""
        parts = self._parts(cell)
        logit = np.full(cell.num_rows, self.bias)
        for part, (scale, mean) in zip((parts.main, parts.pair, parts.dense), self._scales, strict=True):
            logit += scale * (part - mean)
        return logit

    def _parts(self, cell: Cell) -> _Parts:
        main, dense, squares = (np.zeros(cell.num_rows, np.float32) for _ in range(3))
        total = np.zeros((_LATENT, cell.num_rows), np.float32)
        for j, ids in enumerate(cell.ids):
            u, v = np.split(self._effects(j, ids), [1])
            main += u[0]
            total += v
            squares += np.einsum("kn,kn->n", v, v)
        for levels, column in zip(self._dense_levels, cell.dense_levels, strict=True):
            dense += levels[column]
        pair = (np.einsum("kn,kn->n", total, total) - squares) / 2
        return _Parts(main.astype(np.float64), pair.astype(np.float64), dense.astype(np.float64))

    def _effects(self, j: int, ids: Ids) -> NDArray[np.float32]:
        """Returns [1 + 4, n]: u and v of each row's id, or their means over its list, weighted and centred."""
        words = mix64(ids.items.astype(np.uint64) + np.uint64(self._generator.salts[j]))
        bits, low = np.uint64(_LEVELS.bit_length() - 1), np.uint64(_LEVELS - 1)
        effects = np.empty((1 + _LATENT, len(words)), np.float32)
        for levels, effect in zip(self._id_levels[j], effects, strict=True):
            np.take(levels, (words & low).view(np.int64), out=effect, mode="clip")
            words >>= bits
        return effects if ids.row_splits is None else _bag_means(effects, ids.row_splits)


def _bag_means(values: NDArray[np.float32], row_splits: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the means [k, n] of `values` [k, sum of lengths] over each row's span, 0 for an empty span."""
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:], dtype=np.float64)
    means = (sums[:, row_splits[1:]] - sums[:, row_splits[:-1]]) / np.maximum(np.diff(row_splits), 1)
    return means.astype(np.float32)


def sigmoid(logits: Floats) -> Floats:
    """Returns 1 / (1 + exp(-z)) without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def _bias_for(base_rate: float, logits: Floats) -> float:
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(logits + middle).mean() < base_rate else (low, middle)
    return (low + high) / 2


# ---- the source


class _CellRows(NamedTuple):
    """One cell as raw values."""

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    """[n, I], NaN = missing."""
    keys: list[Keys]
    time: NDArray[np.int64]


class SyntheticSource:
    """The rows of `config` as a `Source` for preparation; keys are uint32.

    Rows are made on demand, so `chunks` can start anywhere at no cost, and chunks of any size hold the same rows.
    """

    skip_bad_rows = 0

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.skipped = SkippedRows()
        self._generator = Generator(config)
        self._latest: tuple[int, _CellRows] | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def key_kinds(self) -> Mapping[str, KeyKind]:
        return {table.name: "int" for table in self.config.tables}

    def scout(self) -> SourceInfo:
        """Returns the exact number of rows, and one imaginary file whose name changes with the config."""
        num_bytes = self.config.num_rows * 4 * (1 + len(self.config.dense) + len(self.config.tables))
        file = FileInfo(f"synthetic:{self.config.digest}", num_bytes, mtime_ns=0)
        return SourceInfo(self.config.num_rows, num_rows_exact=True, files=(file,))

    def chunks(
        self, start: Position | None = None, *, stop: int | None = None, rows_per_chunk: int = 65_536
    ) -> Generator[Chunk, None, None]:
        """Yields the rows from `start.offset` on in chunks; only the last may have fewer rows."""
        end = self.config.num_rows
        for row in range(start.offset if start else 0, end, rows_per_chunk):
            yield self._chunk(row, min(row + rows_per_chunk, end))

    def _times(self, start: int, stop: int) -> NDArray[np.int64]:
        seconds_per_row = 86_400 * self.config.num_days / self.config.num_rows
        seconds: NDArray[np.int64] = np.floor(np.arange(start, stop) * seconds_per_row).astype(np.int64)
        return seconds + START_TIME

    @cached_property
    def teacher(self) -> Teacher:
        """The truth behind the labels."""
        return Teacher(self._generator)

    @cached_property
    def _counts(self) -> NDArray[np.float32]:
        return self._generator.count_levels()

    def _chunk(self, start: int, stop: int) -> Chunk:
        pieces = [(self._cell_rows(index), slice(a, b)) for index, a, b in _cell_spans(start, stop)]
        keys = {
            table.name: _join_keys([_slice_keys(rows.keys[j], span) for rows, span in pieces])
            for j, table in enumerate(self.config.tables)
        }
        return Chunk(
            num_rows=stop - start,
            label=np.concatenate([rows.label[span] for rows, span in pieces]),
            dense=np.concatenate([rows.dense[span] for rows, span in pieces]),
            keys=keys,
            position=Position(offset=stop),
            time=np.concatenate([rows.time[span] for rows, span in pieces]),
        )

    def _cell_rows(self, index: int) -> _CellRows:
        if self._latest is None or self._latest[0] != index:
            self._latest = (index, self._make_cell_rows(index))
        return self._latest[1]

    def _make_cell_rows(self, index: int) -> _CellRows:
        cell = self._generator.cell(index)
        time = self._times(cell.first_row, cell.first_row + cell.num_rows)
        keys = []
        for j, (table, ids) in enumerate(zip(self.config.tables, cell.ids, strict=True)):
            valid = ids.items != table.num_embeddings if table.kind == "one_hot" and table.missing else None
            keys.append(Keys(self._generator.keys(j, ids.items), valid=valid, row_splits=ids.row_splits))
        columns = np.arange(len(self.config.dense))[:, None]
        dense = self._counts[columns, cell.dense_levels].T
        return _CellRows(self._generator.labels(index, self.teacher.logits(cell)), dense, keys, time)


def _cell_spans(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields cell, first row and end row within it, for rows [start, stop)."""
    for index in range(start // CELL_ROWS, -(-stop // CELL_ROWS)):
        first = index * CELL_ROWS
        yield index, max(start - first, 0), min(stop - first, CELL_ROWS)


def _slice_keys(keys: Keys, rows: slice) -> Keys:
    if keys.row_splits is None:
        return Keys(keys.values[rows], valid=None if keys.valid is None else keys.valid[rows])
    splits = keys.row_splits[rows.start : rows.stop + 1]
    return Keys(keys.values[splits[0] : splits[-1]], row_splits=splits - splits[0])


def _join_keys(pieces: list[Keys]) -> Keys:
    if len(pieces) == 1:
        return pieces[0]
    values = np.concatenate([piece.values for piece in pieces])
    valid = [piece.valid for piece in pieces if piece.valid is not None]
    lengths = [np.diff(piece.row_splits) for piece in pieces if piece.row_splits is not None]
    splits = np.concatenate([[0], np.concatenate(lengths).cumsum()]) if lengths else None
    return Keys(values, valid=np.concatenate(valid) if valid else None, row_splits=splits)


def opened(config: SyntheticConfig, schema: Schema | None = None) -> OpenedSource:
    """Returns the rows of `config` for preparation. schema: how they are read; if None, counts become log(1 + x)."""
    ids = [table.name for table in config.tables]
    return OpenedSource(SyntheticSource(config), schema or _schema_of(config), dict.fromkeys(ids, "int"))


def _schema_of(config: SyntheticConfig) -> Schema:
    return parse_schema(
        {
            "label": "label",
            "time": "time",
            "dense": [{"column": column.name, "transform": "log1p_clip0"} for column in config.dense],
            "categorical": [{"column": table.name, "kind": table.kind} for table in config.tables],
            "licence": "made up by hotrow: no terms",
        },
        where=f"synthetic data {config.name!r}",
    )
