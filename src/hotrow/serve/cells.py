"""The short way from the cells of a request to a model's inputs: all columns in one native call.

It reads columns of single ids, buckets and plain numbers, in Python lists or dicts, whose cells are what they should
be beyond doubt: text, whole numbers, floats or None. Everything else goes the long way, by `Encoder`, which defines
what a cell means; tests/laws/test_serve.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.data.cells import is_plain
from hotrow.data.native import backend
from hotrow.data.prepare.prepare import Encoder
from hotrow.data.seen import Seen

ENCODINGS = ("int", "uint64", "hex", "bytes")


class Inputs(NamedTuple):
    """A model's inputs for n rows, from `Cells.read`."""

    dense: NDArray[np.float32]
    """[n, I], or [1, I] if all rows have the same."""
    ids: NDArray[np.int64]
    """[F, n] rows of tables."""
    missing: NDArray[np.bool_]
    """[F, n] where there is no id."""
    no_number: NDArray[np.bool_]
    """[I, n] where there is no number; without the statistics."""


def cells_of(encoder: Encoder, usual: Seen) -> Cells | None:
    """Returns the reader of requests for these columns; None if some of them need more, or it is not built."""
    schema = encoder.schema
    simple = all(own.kind == "one_hot" for own in schema.categorical) and all(map(is_plain, schema.dense))
    simple = simple and not schema.computed and not schema.at_serving
    reader = getattr(backend(), "CellReader", None)
    return Cells(encoder, usual, reader) if simple and reader is not None else None


class Cells:
    """Reads requests. usual: knows the usual ranges of numbers."""

    def __init__(self, encoder: Encoder, usual: Seen, reader: Any) -> None:
        schema = encoder.schema
        self.names, self._numbers = schema.feature_names, schema.dense_names
        self._statistics = encoder.statistics
        self._of_statistics = {name for spec in schema.statistics for name in spec.columns}
        groups: dict[str, list[int]] = {}
        for place, transform in enumerate(encoder.transforms[: len(self._numbers)]):
            groups.setdefault(str(transform), []).append(place)
        self._groups = [(encoder.transforms[places[0]], places) for places in groups.values()]
        self._lows, self._highs = (
            np.array([usual.ranges.get(name, (-np.inf, np.inf))[end] for name in self._numbers])[:, None]
            for end in (0, 1)
        )
        self._native = reader(list(schema.missing))
        for name in self._numbers:
            self._native.add_numbers(name)
        for spec in schema.categorical:
            own = encoder.vocabularies[spec.table_name]
            header, table = own.header, own.table
            arrays = table.directory, table.hashes, table.rows, table.key_offsets, table.key_bytes
            encoding, buckets = ENCODINGS.index(encoder.encodings[spec.column]), list(spec.buckets or ())
            of_table = header.hash_cap, header.missing_row, table.directory_bits, *arrays
            self._native.add_ids(spec.column, encoding, buckets, *of_table)
        # Ids of a column that is a number too count under another name, as in `Seen`.
        self._counted = [f"{name} (ids)" if name in self._numbers else name for name in self.names]

    def read(self, user: Mapping[str, Any], items: Any, num_rows: int) -> Inputs | None:
        """Returns the inputs of rows; None if a cell of them needs the long way.

        user: cells that all rows share, by column. items: a list of dicts, one for each row, or a dict of lists.
        """
        shape = len(self.names), num_rows
        numbers, hashes = np.empty((len(self._numbers), num_rows)), np.empty(shape, np.uint64)
        ids, missing = np.empty(shape, np.int64), np.empty(shape, np.bool_)
        if not self._native.read(user, items, numbers, hashes, ids, missing):
            return None
        shared = 1 if user.keys() >= {*self._numbers, *self._of_statistics} else num_rows
        raw = numbers[:, :shared].astype(np.float32).astype(np.float64)  # rounded once, and again after the transform
        dense = np.empty((shared, len(self._numbers)), np.float32)
        for transform, places in self._groups:
            made = transform(raw[places].reshape(-1)).reshape(len(places), shared)
            dense[:, places] = np.where(np.isnan(made), 0.0, made).T
        if self._statistics is not None:
            of_column = {name: own[:shared] for name, own in zip(self.names, hashes, strict=True)}
            dense = np.concatenate([dense, self._statistics.inputs_to_score(of_column, shared)], 1)
        return Inputs(dense, ids, missing, np.isnan(numbers))

    def tally(self, found: Inputs) -> NDArray[np.int64]:
        """Returns how many rows there are and what they hold, in numbers that can be added to those of other rows."""
        values = np.broadcast_to(found.dense.T[: len(self._numbers)], found.no_number.shape)
        outside = ((values < self._lows) | (values > self._highs)) & ~found.no_number
        unknown = (found.ids == 0) & ~found.missing
        kinds = (found.no_number, outside, unknown, found.missing)
        return np.concatenate([[found.ids.shape[1]], *(np.count_nonzero(kind, axis=1) for kind in kinds)])

    def counts(self, tally: NDArray[np.int64]) -> dict[str, dict[str, int]]:
        """Returns a sum of tallies as `Seen.columns`."""
        num_rows, numbers, ids = int(tally[0]), *np.split(tally[1:], [2 * len(self._numbers)])
        of_numbers = zip(self._numbers, *numbers.reshape(2, -1).tolist(), strict=True)
        counts = {
            name: {"values": num_rows, "missing": none, "outside": out, "unreadable": 0}
            for name, none, out in of_numbers
        }
        of_ids = zip(self._counted, *ids.reshape(2, -1).tolist(), strict=True)
        counts |= {
            name: {"values": num_rows, "unknown": new, "missing": none, "unreadable": 0} for name, new, none in of_ids
        }
        return counts
