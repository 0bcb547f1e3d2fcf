"""One version of an export, opened without loading its tables: raw rows in, scores out.

Rows are read as in preparation, by `Encoder` or the short way of cells.py, and scored by the network that trained,
so that scores equal those of `Run.predict`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from hotrow.base.door import read_file
from hotrow.base.files import claim
from hotrow.base.records import nearest
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.data.chunk import RowError
from hotrow.data.packed.format import read_info
from hotrow.data.seen import Seen
from hotrow.data.sources.tabular import Mixed, frame_to_arrow
from hotrow.embedding import EmbeddingCollection
from hotrow.export.delta import checksum_of
from hotrow.export.export import DOCUMENT, ENCODER, EXPORT, WEIGHTS, verify_export
from hotrow.kernels import ops
from hotrow.models.spec import SampleError
from hotrow.run.build import look_up
from hotrow.run.explain import Explanation, explained, joined
from hotrow.serve.cells import cells_of
from hotrow.serve.described import encoder_of, explaining, network_of, seen_of, tables_of
from hotrow.serve.mapped import Budget, MappedTables, SmallLookups

ROWS_AT_ONCE = 1 << 16
NAME_DIGITS = 12
UNKNOWN = "an id that training never saw, or too rarely to give it a row"


class Version:
    """One export, opened: it never changes, and several threads may score with it.

    export: its folder, or a link to it, which may lead to another one later. The folder is held: nobody removes it
    before `leave`, or before the version is gone. budget: as for `MappedTables`. Raises ValueError, which names the
    file, if the export is damaged, or cannot be scored.
    """

    def __init__(self, export: Path, budget: Budget | None) -> None:
        stack = ExitStack()
        self.leave = weakref.finalize(self, stack.close)
        path = _held(export, stack)
        verify_export(path, unread=("tables/",))
        self.path, self.name = path, checksum_of(path)[:NAME_DIGITS]
        about = DOCUMENT.read(path / EXPORT)
        with explaining(path):
            encoder = encoder_of(path, about)
            self._shape = (0, len(about.labels)) if len(about.labels) > 1 else (0,)
            self.columns = tuple(n for n in encoder.schema.input_names if n not in encoder.schema.at_serving)
            self._own, self._known = frozenset(self.columns), frozenset(encoder.schema.column_names)
            self._none = f"none of the model's columns; they are {', '.join(self.columns)[:200]}"
            self.mapped = MappedTables(path, about.tables, budget)
            for vocabulary in encoder.vocabularies.values():
                self.mapped.bound(vocabulary.mapped)
            tables = tables_of(about)
            self._embedding: Any = SmallLookups(tables, self.mapped, about.form)
            if about.form == "float32":
                self._embedding = EmbeddingCollection(tables, memory=self.mapped)
            if sorted(self._embedding.feature_names) != sorted(encoder.schema.feature_names):
                raise ValueError("features of the tables are not those of the encoder")
            self._model, self._calibrated, self._objective = network_of(about, load(read_file(path / WEIGHTS)))
            self._means = about.means
            self._packed = ops.Packed(self._model.parameters())
            self.usual = seen_of(about)
            self._encoder, self._cells = encoder, cells_of(encoder, self.usual)
            self._call_once(encoder.schema.feature_names)

    def _call_once(self, names: Sequence[str]) -> None:
        """Scores a row, so that all that is made at first use is there when threads come."""
        if (cells := self._cells) is not None and (found := cells.read({}, [{}], 1)) is not None:
            cells.counts(cells.tally(found))
        nothing = Mixed(pa.table({name: pa.nulls(1) for name in self.columns}), {})
        (row,) = self._batches(nothing, Seen(), strict=False)
        # Some models refuse a row without ids, so each feature has one.
        self._made(row.dense, KeyedJaggedTensor(names, torch.zeros(len(names), dtype=torch.int64)), self._scores)

    def score(
        self, user: Mapping[str, Any], items: Any, *, strict: bool
    ) -> tuple[NDArray[np.float32], Seen | NDArray[np.int64], str]:
        """Returns the scores of rows, counts of what they held or a tally for `counted`, and a warning about names.

        Arguments as for `Scorer.score`; items: never a frame.
        """
        by_column, own = isinstance(items, Mapping), self._own
        num_rows = len(next(iter(items.values()), ())) if by_column else len(items)
        if num_rows and own.isdisjoint(user) and any(map(own.isdisjoint, [items] if by_column else items)):
            row = 0 if by_column else next(row for row, item in enumerate(items) if own.isdisjoint(item))
            raise SampleError(row, "the row", self._none)
        cells, names = self._cells, user.keys() | items.keys() if by_column else None
        if cells is None or not num_rows or (found := cells.read(user, items, num_rows)) is None:
            warning = self._warning(names or user.keys() | set().union(*items), strict=strict)
            columns = {name: _column(name, user, items, num_rows) for name in self.columns}
            return *self.score_frame(columns, strict=strict)[:2], warning
        num_cells = num_rows * len(names or user) + (0 if names else sum(map(len, items)))
        num_missing, warning = np.count_nonzero(found.missing) + np.count_nonzero(found.no_number), ""
        if strict or num_cells > num_rows * len(own) - num_missing:  # else every name is a column of the model
            warning = self._warning(names or user.keys() | set().union(*items), strict=strict)
        if strict and (unknown := (found.ids == 0) & ~found.missing).any():
            feature, row = np.argwhere(unknown)[0].tolist()
            raise ValueError(f"column {cells.names[feature]!r}, row {row}: {UNKNOWN}; check how it is written")
        sparse = KeyedJaggedTensor(cells.names, torch.from_numpy(found.ids.reshape(-1)))
        dense_BI = torch.from_numpy(found.dense).expand(num_rows, -1)
        return self._made(dense_BI, sparse, self._scores), cells.tally(found), warning

    def counted(self, tally: NDArray[np.int64]) -> Seen:
        """Returns counts of what rows held, from the sum of the tallies of `score`."""
        assert self._cells is not None, "it made the tally"
        seen = Seen()
        seen.columns = self._cells.counts(tally)
        return seen

    def score_frame(self, frame: Any, *, strict: bool) -> tuple[NDArray[np.float32], Seen, str]:
        """As `score`, for a frame or a dict of columns."""
        scores, seen, warning = self._each(frame, self._scores, strict=strict)
        return np.concatenate([np.empty(self._shape, np.float32), *scores]), seen, warning

    def explain(self, frame: Any, *, strict: bool) -> tuple[Explanation, Seen, str]:
        """As `score_frame`, what columns add to the outputs."""
        of = partial(explained, read_info(self.path / ENCODER), self._model, self._means, self._output)
        found, seen, warning = self._each(frame, of, strict=strict)
        return joined(found), seen, warning

    def _each(self, frame: Any, of: Callable[[Tensor, Any], Any], *, strict: bool) -> tuple[list[Any], Seen, str]:
        """What `of` makes of the inputs of rows, piece by piece."""
        given, seen = frame_to_arrow(frame, values="any"), Seen(None, self.usual.ranges)
        found = given if isinstance(given, Mixed) else Mixed(given, {})
        num_rows, there = len(found), {*found.table.column_names}
        if num_rows and self._own.isdisjoint(there):
            raise SampleError(0, "the data", self._none)
        warning = self._warning(there, strict=strict)
        columns = {name: found.table[name] if name in there else pa.nulls(num_rows) for name in self.columns}
        table = Mixed(pa.table(columns), {name: own for name, own in found.cells.items() if name in columns})
        made, first_row = [], 0
        try:
            for batch in self._batches(table, seen, strict=strict):
                made.append(self._made(batch.dense, batch.sparse, of))
                first_row += len(batch)
        except RowError as error:
            said = error.reason.partition("; ")[0]
            raise ValueError(f"column {error.name!r}, row {error.line - 1}: {said}; correct it") from None
        except SampleError as error:
            raise SampleError(first_row + error.sample, error.feature, error.reason) from None
        if strict and (unknown := next((name for name, own in seen.columns.items() if own.get("unknown")), None)):
            row = self._first_unknown(table, unknown)
            raise ValueError(f"column {unknown!r}, row {row}: {UNKNOWN}; check how it is written")
        return made, seen, warning

    def _batches(self, table: Mixed, seen: Seen, *, strict: bool) -> Iterator[Batch]:
        if not len(table):
            return iter(())
        values: Any = "strict" if strict else "any"
        return self._encoder.batches(table, batch_size=ROWS_AT_ONCE, values=values, seen=seen)

    def _warning(self, names: Set[Any], *, strict: bool) -> str:
        """Returns what to say of a name that no column of the model's data has, if one has none. strict: raises
        ValueError of it, and of an absent column."""
        shown = sorted(str(name)[:80] for name in names - self._known)
        if strict and (absent := next((name for name in self.columns if name not in names), None)):
            raise ValueError(f"column {absent!r} is missing{nearest(absent, shown[:80])}; add it to the rows")
        if not shown:
            return ""
        others = f" (and {len(shown) - 1} more)" if shown[1:] else ""
        text = f"column {shown[0]!r}{others} is none of the model's, and is not read{nearest(shown[0], self.columns)}"
        if strict:
            raise ValueError(f"{text}; correct its name, or leave it out")
        return text

    def _first_unknown(self, table: Mixed, name: str) -> int:
        """Returns the first row with an unknown id in a column."""
        low, high = 0, len(table)
        while high - low > 1:
            middle, seen = (low + high) // 2, Seen()
            list(self._batches(table.slice(low, middle - low), seen, strict=False))
            low, high = (low, middle) if seen.columns[name]["unknown"] else (middle, high)
        return low

    @torch.no_grad()
    def _made(self, dense_BI: Tensor, sparse: KeyedJaggedTensor, of: Callable[[Tensor, Any], Any]) -> Any:
        """What `of` makes of dense inputs and the tables' rows."""
        self.mapped.ask_for(sparse)
        with one_thread(), ops.weights_stay(self._packed):
            found = of(dense_BI, look_up(self._model, self._embedding, sparse))
        self.mapped.keep_within()
        return found

    def _output(self, dense_BI: Tensor, rows: Any) -> Tensor:
        return self._calibrated(self._model(dense_BI, rows))

    def _scores(self, dense_BI: Tensor, rows: Any) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = self._objective.scores(self._output(dense_BI, rows)).numpy()
        return scores


def _held(export: Path, stack: ExitStack) -> Path:
    """Returns the folder that `export` leads to, held until `stack` closes: a link may move before it is held."""
    path = Path()
    while (now := export.resolve()) != path:
        stack.close()
        stack.enter_context(claim(path := now, shared=True))
    return path


def _column(name: str, user: Mapping[str, Any], items: Any, num_rows: int) -> Any:
    """Returns the cells of a column; those that are absent are missing."""
    if name in user:
        return [user[name]] * num_rows
    return items.get(name, [None] * num_rows) if isinstance(items, Mapping) else [item.get(name) for item in items]


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block, torch and the kernels compute on the calling thread."""
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)
