"""Text columns that arrive as a dictionary and codes (Parquet's pages, pandas and polars categories), kept that way.

    entries = ["de", "fr", missing]   codes = [1, 1, 0, 2]   ->   keys = ["fr", "fr", "de", missing]

Looking the entries up once and taking row numbers by code costs a fraction of looking every key up. Whoever asks for a
column's keys gets them written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.chunk import Keys
from hotrow.data.native import count_codes
from hotrow.data.sources.convert import filled, is_text, plain, text_keys
from hotrow.data.sources.jagged import take_keys

MAX_ENTRIES_PER_ROW = 4
"""A dictionary larger than this many times its rows is written out: most of it is of no use to them."""


class CodedKeys(NamedTuple):
    """One key per row, by code."""

    entries: Keys
    """Distinct keys; the last one is the missing value."""
    codes: NDArray[np.int64]
    """[num_rows] index into `entries`."""

    def written_out(self) -> Keys:
        """The same keys without a dictionary."""
        keys = take_keys(self.entries, self.codes)
        return replace(keys, valid=None) if keys.valid is None or keys.valid.all() else keys

    def distinct(self, row_mask: NDArray[np.bool_] | None = None) -> tuple[Keys, NDArray[np.uint32]]:
        """The keys of all rows, or of rows whose mask [num_rows] is set, by first appearance; and how often each comes.

        Entries that are equal stay apart.
        """
        appeared, counts = count_codes(self.codes, row_mask, num_codes=self.entries.num_keys)
        return take_keys(self.entries, appeared), counts


class KeyColumns(Mapping[str, Keys]):
    """Keys by feature, some of them coded."""

    def __init__(self, columns: Mapping[str, Keys | CodedKeys]) -> None:
        self._columns = columns

    def as_read(self, name: str) -> Keys | CodedKeys:
        """The column as it came."""
        return self._columns[name]

    def __getitem__(self, name: str) -> Keys:
        """The column's keys, written out."""
        column = self._columns[name]
        return column.written_out() if isinstance(column, CodedKeys) else column

    def __iter__(self) -> Iterator[str]:
        """Names, in order."""
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of features."""
        return len(self._columns)


@dataclass
class _Seen:
    """A dictionary met before, and its entries."""

    dictionary: pa.Array
    entries: Keys


def column_of(keys: Mapping[str, Keys], name: str) -> Keys | CodedKeys:
    """One feature's keys as they came."""
    return keys.as_read(name) if isinstance(keys, KeyColumns) else keys[name]


class DictionaryReader:
    """Coded keys from dictionary arrays; consecutive arrays that share a dictionary share one `entries` object."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def __call__(self, name: str, array: pa.DictionaryArray) -> CodedKeys | None:
        """The column `name`, or None where its dictionary is no text, holds null, or is too large for its rows."""
        dictionary = plain(array.dictionary)
        if not is_text(dictionary.type) or dictionary.null_count or len(dictionary) > MAX_ENTRIES_PER_ROW * len(array):
            return None
        seen = self._seen.get(name)
        # The dictionary seen last is held, so nothing else can lie at its address.
        if seen is None or _addresses(seen.dictionary) != _addresses(dictionary):
            keys = text_keys(pa.concat_arrays([dictionary, pa.nulls(1, dictionary.type)]))
            self._seen[name] = seen = _Seen(dictionary, keys)
        return CodedKeys(seen.entries, filled(array.indices.cast(pa.int64()), len(dictionary)))


def _addresses(array: pa.Array) -> tuple[int, ...]:
    return (len(array), array.offset, *(0 if buffer is None else buffer.address for buffer in array.buffers()))
