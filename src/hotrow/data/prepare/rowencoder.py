"""Chunks of raw rows to model inputs: what preparation does to every row, and prediction to new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotrow.data.chunk import Chunk, Keys
from hotrow.data.packed.dataset import Ids, Ragged
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.sources.dictionary import CodedKeys, column_of
from hotrow.data.sources.schema import Schema
from hotrow.data.sources.transforms import DenseTransform


class Encoder(Protocol):
    """Raw ids to row numbers of one table; `hotrow.data.encoder.TableEncoder` is one."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The table's vocabulary."""

    @property
    def needs_occurrences(self) -> bool:
        """Whether rows are only found in the order in which keys were announced, not by asking the vocabulary."""

    def encode(self, feature: str, keys: Keys, *, first_key: int) -> NDArray[Any]:
        """Row numbers of keys, which `first_key` keys of the feature precede in the source."""


class RowEncoder:
    """Dense transforms and row numbers, a table at a time per thread. Chunks must come in the source's order."""

    def __init__(
        self,
        schema: Schema,
        transforms: Sequence[DenseTransform],
        tables: Mapping[str, Encoder],
        executor: Executor,
    ) -> None:
        self._schema, self._transforms, self._tables, self._executor = schema, transforms, tables, executor
        self._num_keys = dict.fromkeys(schema.feature_names, 0)
        self._entry_rows: dict[str, tuple[Keys, NDArray[Any]]] = {}

    def __call__(self, chunk: Chunk) -> tuple[NDArray[np.float32], dict[str, Ids]]:
        """Dense inputs [n, I], and ids by feature in the schema's order."""
        encoded = self._executor.map(lambda table: self._encode_table(table, chunk), self._schema.table_names)
        ids = {name: column for columns in encoded for name, column in columns.items()}
        dense = np.empty_like(chunk.dense)
        for i, transform in enumerate(self._transforms):
            dense[:, i] = transform(chunk.dense[:, i])
        return dense, {name: ids[name] for name in self._schema.feature_names}

    def _encode_table(self, table: str, chunk: Chunk) -> dict[str, Ids]:
        encoder = self._tables[table]
        columns: dict[str, Ids] = {}
        for name in self._schema.features_of(table):
            column = column_of(chunk.keys, name)
            if isinstance(column, CodedKeys) and not encoder.needs_occurrences:
                columns[name] = self._coded_rows(name, encoder.vocabulary, column)
                continue
            keys = chunk.keys[name]
            values = encoder.encode(name, keys, first_key=self._num_keys[name])
            self._num_keys[name] += keys.num_keys
            columns[name] = values if keys.row_splits is None else Ragged(values, keys.row_splits)
        return columns

    def _coded_rows(self, name: str, vocabulary: Vocabulary, coded: CodedKeys) -> NDArray[Any]:
        """Row numbers by code; a dictionary that came before is not looked up again."""
        entries, rows = self._entry_rows.get(name, (None, None))
        if entries is not coded.entries or rows is None:
            rows = vocabulary.lookup(coded.entries)
            self._entry_rows[name] = (coded.entries, rows)
        return rows.take(coded.codes)
