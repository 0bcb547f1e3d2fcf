"""Ids of a feature as `Keys`, or by code, as Parquet's dictionary pages and categories of pandas and polars have them.

`cells.py` says which ids cells mean; here they get row splits, and a sentence of what is wrong. `DictionaryReader`
makes coded keys of Arrow's dictionary arrays; `key_hashes` and `column_of` take columns coded or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.cells import (
    NO_LIST,
    Column,
    Fault,
    IdEncoding,
    fault_of,
    filled,
    ids,
    is_binary,
    is_list,
    is_text,
    is_time,
    lists,
    no_id,
    plain,
    shown,
    valid,
    value_type,
    without_missing,
)
from hotrow.data.chunk import KeyKind, Keys, keys_from_arrow, take_keys
from hotrow.data.native import GOLDEN, count_codes, hash_keys

IdSpec: TypeAlias = Any
"""How a column holds ids: a schema's `CategoricalSpec`."""


def to_keys(column: Column, spec: IdSpec, encoding: IdEncoding) -> tuple[Keys, Fault | None]:
    """Returns the keys of one feature, and which of its cells are not ids. A missing value is a missing key; a missing
    list is an empty one."""
    if spec.kind == "one_hot":
        found, bad = ids(column, encoding)
        return keys_from_arrow(found), fault_of(spec.column, bad, column, no_id(column))
    items, splits, no_list = lists(column, spec.separator)
    found, bad = ids(items, encoding)
    keys = replace(keys_from_arrow(found), row_splits=splits)
    if not (bad.any() or no_list.any()):
        return keys, None
    places = np.flatnonzero(bad)
    of_items = np.searchsorted(splits, places, side="right") - 1
    rows = no_list.copy()
    rows[of_items] = True

    def describe(row: int) -> str:
        if no_list[row]:
            return f"{shown(column, row)} {NO_LIST}"
        return f"{shown(items, int(places[np.searchsorted(of_items, row)]))} {no_id(items)}"

    return keys, Fault(spec.column, rows, len(places) + int(no_list.sum()), describe)


def text_keys(array: pa.Array) -> Keys:
    """Returns the bytes of text or binary values."""
    return keys_from_arrow(ids(array, "bytes")[0])


def kind_of(encoding: IdEncoding) -> KeyKind:
    return "bytes" if encoding == "bytes" else "int"


def check_shape(kind: pa.DataType, spec: IdSpec) -> None:
    """Raises ValueError if a column of this type does not fit `spec.kind`."""
    if (is_list(kind) or (spec.separator is not None and is_text(kind))) == (spec.kind == "one_hot"):
        cure = "set kind: multi_hot or sequence" if spec.kind == "one_hot" else "give a separator, or set kind: one_hot"
        raise ValueError(f"column {spec.column!r} has type {kind}, which does not fit kind {spec.kind}; {cure}")


def default_encoding(kind: pa.DataType, spec: IdSpec) -> IdEncoding:
    """Returns how ids of an Arrow type are held if `spec.type` does not say so.

    Raises ValueError for types that cannot be ids: structs, maps, intervals.
    """
    kind = value_type(kind)
    if spec.type == "text":
        return "bytes"
    if pa.types.is_uint64(kind):
        return "uint64"
    if pa.types.is_decimal(kind):
        return "int" if kind.scale == 0 and kind.precision <= 18 else "bytes"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or is_time(kind):
        return "int"
    if is_text(kind) and spec.type == "int":
        return "int"
    if is_text(kind) or pa.types.is_null(kind) or is_binary(kind):
        return "bytes"
    raise ValueError(f"column {spec.column!r} has type {kind}, which cannot be an id; make it text or integers first")


MAX_ENTRIES_PER_ROW = 4
"""A dictionary with more entries per row than this is written out, because most of it would be looked up in vain."""


class CodedKeys(NamedTuple):
    """One key per row, by code: text columns as Parquet's dictionary pages and pandas and polars categories have them.

        entries = ["de", "fr", missing]   codes = [1, 1, 0, 2]   ->   keys = ["fr", "fr", "de", missing]

    Looking up the entries once and taking row numbers by code costs a fraction of looking up every key.
    """

    entries: Keys
    """Distinct keys; the last one is the missing value."""
    codes: NDArray[np.int64]
    """[num_rows] index into `entries`."""

    def written_out(self) -> Keys:
        """Returns the keys without a dictionary."""
        keys = take_keys(self.entries, self.codes)
        return replace(keys, valid=None) if keys.valid is None or keys.valid.all() else keys

    def distinct(self, row_mask: NDArray[np.bool_] | None = None) -> tuple[Keys, NDArray[np.uint32]]:
        """Returns the keys of all rows, or of rows whose mask [num_rows] is set, by first appearance; and how often
        each comes.

        Equal entries are counted separately.
        """
        appeared, counts = count_codes(self.codes, row_mask, num_codes=self.entries.num_keys)
        return take_keys(self.entries, appeared), counts


class KeyColumns(Mapping[str, Keys]):
    """Keys by feature, some of them coded; a coded column is written out when its keys are asked for."""

    def __init__(self, columns: Mapping[str, Keys | CodedKeys]) -> None:
        self._columns = columns

    def as_read(self, name: str) -> Keys | CodedKeys:
        """Returns the column as it was read, coded or not."""
        return self._columns[name]

    def __getitem__(self, name: str) -> Keys:
        column = self._columns[name]
        return column.written_out() if isinstance(column, CodedKeys) else column

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@dataclass
class _Seen:
    """A dictionary that has come before, and its entries."""

    dictionary: pa.Array
    entries: Keys
    lost: NDArray[np.bool_] | None
    """Which entries mean a missing value. If None, none does."""


def column_of(keys: Mapping[str, Keys], name: str) -> Keys | CodedKeys:
    """Returns the keys of one feature as they were read, coded or not."""
    return keys.as_read(name) if isinstance(keys, KeyColumns) else keys[name]


MISSING_HASH = np.uint64(GOLDEN)
"""The hash of a missing value."""


def key_hashes(column: Keys | CodedKeys) -> NDArray[np.uint64]:
    """Returns the 64-bit hash of each row's id [n], of a column without lists."""
    if isinstance(column, CodedKeys):
        return key_hashes(column.entries).take(column.codes)
    hashes = hash_keys(column)
    if column.valid is not None:
        hashes[~column.valid] = MISSING_HASH
    return hashes


class DictionaryReader:
    """Coded keys from dictionary arrays; consecutive arrays that share a dictionary share one `entries` object.

    missing: texts that mean a missing value, as in `without_missing`.
    """

    def __init__(self, missing: Sequence[str] = ()) -> None:
        self._missing = missing
        self._seen: dict[str, _Seen] = {}

    def __call__(self, name: str, array: pa.DictionaryArray) -> CodedKeys | None:
        """The column `name`, or None if its dictionary is not text, holds null, or is too large for its rows."""
        dictionary = plain(array.dictionary)
        if not is_text(dictionary.type) or dictionary.null_count or len(dictionary) > MAX_ENTRIES_PER_ROW * len(array):
            return None
        seen = self._seen.get(name)
        # The last dictionary is kept alive, so nothing else can have its address.
        if seen is None or addresses(seen.dictionary) != addresses(dictionary):
            keys = text_keys(pa.concat_arrays([dictionary, pa.nulls(1, dictionary.type)]))
            kept: Any = without_missing(dictionary, self._missing)
            lost = ~valid(kept) if kept.null_count else None
            self._seen[name] = seen = _Seen(dictionary, keys, lost)
        codes = filled(array.indices.cast(pa.int64()), len(dictionary))
        if seen.lost is not None:
            codes = np.where(np.append(seen.lost, True)[codes], len(dictionary), codes)
        return CodedKeys(seen.entries, codes)


def addresses(array: pa.Array) -> tuple[int, ...]:
    return (len(array), array.offset, *(0 if buffer is None else buffer.address for buffer in array.buffers()))
