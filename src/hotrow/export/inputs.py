"""Turns raw rows into the inputs of an exported model, by NumPy, pyarrow and safetensors, without hotrow or torch.

    Inputs("FOLDER").of({"price": [1.5, None], "item": ["i7", None], "seen": [["i1", "i7"], []]})

FOLDER is what `hotrow export` wrote, and this file is its inputs.py. cells.py beside it says what a cell means,
transforms/ are functions of numbers, and seen.py counts what the rows hold. All are meant to be read, and copied into
other systems. They read export.json, the vocabularies and the counts of statistics, and hold these in memory.

Any value gets an input: one that is not an id or number of its column counts as missing. A table without a vocabulary
takes row numbers, and refuses anything else.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import math
import struct
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from safetensors.numpy import load_file

Rows = dict[str, tuple[Any, Any]]
"""By feature: the row numbers of all samples in sequence, int64, and where those of each sample begin, [B + 1]."""


ABOUT_DENSE = ("name", "transform", "missing", "written")
"""Fields of a dense column in export.json besides the options of its transform."""


class Inputs:
    """Makes the inputs of the model in `folder` from raw values.

    seen: counts of what the latest rows held, by column; see seen.py.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.about = read_about(folder / "export.json")
        self.tables = {table["name"]: table for table in self.about["tables"]}
        found = {name: table["vocabulary"] for name, table in self.tables.items() if table["vocabulary"] is not None}
        self.vocabularies = {name: vocabulary_of(folder / each["file"]) for name, each in found.items()}
        self._counting, self._cells = load_module(folder / "seen.py"), load_module(folder / "cells.py")
        self._counts = Counts(self.about["statistics"], folder / "encoder/statistics/counts.safetensors")
        paths = (folder / "transforms").glob("*.py")
        self._transforms = {path.stem: getattr(load_module(path), path.stem) for path in paths}
        self.seen: Any = None

    @property
    def columns(self) -> list[str]:
        """Names of the raw columns that a score is made of."""
        made: dict[str, list[str]] = {}
        for each in self.about["transforms"]:
            taken = [column["name"] for column in each["columns"]]
            made[each["into"]] = [name for column in taken for name in made.get(column, [column])]
        inputs = [column["name"] for column in self.about["dense"] + self.about["features"]]
        fixed = self.about["at_serving"]
        return [*dict.fromkeys(n for each in inputs for n in made.get(each, [each]) if n not in fixed)]

    def of(self, columns: Mapping[str, Sequence[Any]]) -> tuple[Any, Rows]:
        """Returns the dense inputs of each row, float32 [B, I], and the row numbers of its ids.

        columns: raw values by name, None for a missing one. Warns of what stands out against the rows that validated
        the model: unknown ids, missing values, numbers outside the range of training. Raises ValueError, which names
        column and row, if a column is missing, has another length, or has no row number where one is needed.
        """
        for name in self.columns:
            if name not in columns:
                raise ValueError(f"column {name!r} is missing; pass it, with None for each missing value")
            if len(columns[name]) != (num_rows := len(columns[self.columns[0]])):
                raise ValueError(f"column {name!r} has {len(columns[name])} rows, {self.columns[0]!r} has {num_rows}")
        missing = self.about.get("missing", ())
        columns = {name: self._cells.without_missing([*columns[name]], missing) for name in self.columns}
        columns |= {name: [value] * num_rows for name, value in self.about["at_serving"].items()}
        usual = self.about["usual"] or {"of": "val", "columns": None, "ranges": {}}
        self.seen = self._counting.Seen(usual["columns"], usual["ranges"], of=usual["of"])
        unreadable: dict[str, int] = {}
        for made in self.about["transforms"]:
            columns[made["into"]], count = self._computed(made, columns)
            unreadable[made["into"]] = count + sum(unreadable.get(column["name"], 0) for column in made["columns"])
        dense, rows = [], {}
        for column in self.about["dense"]:
            name = column["name"]
            dense.append(self._dense(column, columns[name], unreadable.get(name, 0)))
        for feature in self.about["features"]:
            name = feature["name"]
            rows[name] = self._rows(feature, columns[name], unreadable.get(name, 0))
        dense += self._statistics(columns)
        for text in self.seen.warnings().values():
            warnings.warn(text, stacklevel=3)
        num_rows = len(next(iter(rows.values()))[1]) - 1
        return np.stack(dense, 1) if dense else np.empty((num_rows, 0), np.float32), rows

    def _computed(self, made: dict[str, Any], columns: Mapping[str, Sequence[Any]]) -> tuple[list[Any], int]:
        """Returns a column that is computed from others, None where it is missing, and how many of their values could
        not be read."""
        arguments: list[Any] = []
        lists: list[list[list[Any]]] = []
        unreadable = 0
        for column in made["columns"]:
            values = columns[column["name"]]
            if "keys" not in column:
                how = {name: made["options"].get(name) for name in ("zone", "format")}
                argument, count = self._numbers(column, self._cells.as_seconds(values, **how))
                argument = self._cells.on_clock(argument, how["zone"]) if "zone" in made["options"] else argument
            elif "kind" not in column:
                argument, count = self._hashes(column, values)
            else:
                items, splits, no_list = self._cells.lists(values, column.get("separator"))
                keys, count = self._keys(column, items)
                lists.append([keys[first:end] for first, end in pairwise(splits.tolist())])
                argument, count = (hashes_of(keys), splits), count + int(no_list.sum())
            arguments.append(argument)
            unreadable += count
        found = self._transforms[made["transform"]](*arguments, **made["options"])
        if made.get("lists"):
            stays = iter(found.tolist())
            return [[value for value in bag if next(stays)] for bag in lists[0]], unreadable
        if made.get("ids"):
            return found.view(np.int64).tolist(), unreadable
        return [None if math.isnan(n) else n for n in found.tolist()], unreadable

    def _dense(self, column: dict[str, Any], values: Sequence[Any], unreadable: int) -> Any:
        """Returns the inputs of a dense column. unreadable: how many of the values that it is computed from could not
        be read."""
        numbers, more = self._numbers(column, values)
        # Rounded to float32 before and after the transform, not between.
        options = {name: value for name, value in column.items() if name not in ABOUT_DENSE}
        x = self._transforms[column["transform"]](numbers.astype(np.float32).astype(np.float64), **options)
        missing = np.isnan(x)
        dense = np.where(missing, column["missing"], x).astype(np.float32)
        self.seen.add_numbers(column["name"], dense, missing, unreadable=unreadable + more)
        return dense

    def _statistics(self, columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Returns the label's statistics in the order of `about["statistics"]`: for each its priors, then the count."""
        features, found = {feature["name"]: feature for feature in self.about["features"]}, []
        for i, statistic in enumerate(self.about["statistics"]):
            hashes = [self._hashes(features[name], columns[name])[0] for name in statistic["features"]]
            numbers = self._counts.of(i, self._transforms["cross"](*hashes))
            inputs = [self._transforms["target_stat"](*numbers, prior=prior) for prior in statistic["priors"]]
            inputs += [self._transforms["log1p_clip0"](numbers[0])] if statistic["count"] else []
            found += [x.astype(np.float32) for x in inputs]
        return found

    def _hashes(self, feature: dict[str, Any], values: Sequence[Any]) -> tuple[Any, int]:
        """Returns the 64-bit hash of each value of a column of single ids, uint64 [n], and how many of them could not
        be read."""
        values, unreadable = self._in_buckets(feature, values)
        keys, more = self._keys(feature, values)
        return hashes_of(keys), unreadable + more

    def _numbers(self, column: dict[str, Any], values: Sequence[Any]) -> tuple[Any, int]:
        """Returns values as float64 [n], NaN if one is missing or not a number, and how many are not numbers."""
        numbers, bad = self._cells.numbers(values, self._cells.Written(**column.get("written", {})))
        return numbers, int(bad.sum())

    def _keys(self, feature: dict[str, Any], values: Sequence[Any]) -> tuple[list[bytes | int | None], int]:
        """Returns the id of each value, None if it is missing or not an id, and how many are not ids."""
        keys, bad = self._cells.ids(values, feature["keys"])
        return keys.to_pylist(), int(bad.sum())

    def _in_buckets(self, feature: dict[str, Any], values: Sequence[Any]) -> tuple[Sequence[Any], int]:
        """Returns the bucket ids of a feature with buckets, else its values, and how many values could not be read."""
        if feature.get("buckets") is None:
            return values, 0
        numbers, unreadable = self._numbers(feature, values)
        return self._transforms["bucketize"](numbers, boundaries=feature["buckets"]).tolist(), unreadable

    def _rows(self, feature: dict[str, Any], values: Sequence[Any], unreadable: int) -> tuple[Any, Any]:
        """Returns the row numbers of a feature, and where those of each sample begin. unreadable: as for `_dense`."""
        values, more = self._in_buckets(feature, values)
        items, splits, no_list = values, np.arange(len(values) + 1), np.zeros(0)
        if feature["kind"] != "one_hot":
            items, splits, no_list = self._cells.lists(values, feature.get("separator"))
        table = self.tables[feature["table"]]
        keys, bad = self._keys({"keys": "int", **feature}, items)
        if (about := table["vocabulary"]) is None:
            rows = [row_number(feature, table, key, items[i], i, splits) for i, key in enumerate(keys)]
        else:
            rows = [self._row(feature["table"], about, key) for key in keys]
            missing = np.array([key is None for key in keys], bool)
            unreadable += more + bad + int(no_list.sum())
            self.seen.add_ids(feature["name"], np.array(rows), missing, unreadable=unreadable)
        return np.array(rows, np.int64), splits

    def _row(self, table: str, about: dict[str, Any], key: bytes | int | None) -> int:
        """Returns the row of an id."""
        if key is None:
            return int(about["missing_row"])
        if (cap := about["hash_cap"]) is not None:
            key = (key if isinstance(key, int) else hash_of(key)) % cap
        key = hash_of(key) if isinstance(key, int) else key
        return int(self.vocabularies[table].get(key, about["unknown_row"]))


class Counts:
    """Rows and positives by value in the training rows, as statistics/counts.safetensors has them."""

    def __init__(self, statistics: Sequence[Mapping[str, Any]], path: Path) -> None:
        arrays = load_file(path) if statistics else {}
        self._shares = [statistic["share"] for statistic in statistics]
        self._all = arrays["all"].reshape(-1).tolist() if statistics else [0, 0]
        self._of_value = [
            dict(zip(arrays[f"{i}.values"].tolist(), arrays[f"{i}.counts"].tolist(), strict=True))
            for i in range(len(statistics))
        ]

    def of(self, i: int, hashes: Any) -> tuple[Any, ...]:
        """Returns, for statistic i, the rows and positives of each value and of all values: four arrays [n], multiplied
        by the share of rows that training rows saw. hashes: uint64 [n]."""
        values = hashes.view(np.int64).tolist()
        own = np.array([self._of_value[i].get(value, [0, 0]) for value in values], np.float64).reshape(-1, 2)
        share = self._shares[i]
        return *(own * share).T, *(np.full(len(own), number * share) for number in self._all)


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Returns columns of a file by name: Parquet, JSON (a list of rows, or a row per line), or else CSV with a header,
    whose cells are text. Raises ValueError if the file has none of them."""
    columns: dict[str, list[Any]] = {}
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        columns = {name: table[name].to_pylist() for name in table.column_names if name in names}
    elif path.suffix in (".json", ".jsonl"):
        text = path.read_text("utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        columns = {name: [row.get(name) for row in rows] for name in names if any(name in row for row in rows)}
    else:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = max(",\t;|", key=file.readline().count)
            file.seek(0)
            rows = list(csv.DictReader(file, delimiter=delimiter))
        columns = {name: [row[name] for row in rows] for name in names if rows and name in rows[0]}
    if not columns:
        raise ValueError(f"{path} has none of the columns {', '.join(names)}; give it a header of names")
    return columns


def vocabulary_of(path: Path) -> dict[bytes | int, int]:
    """Returns the row of each id. The key of a text id is its bytes; that of a number is its 64-bit hash. The file's
    layout is in docs/vocabulary.md: a directory for searching the file, hashes, rows, and for text ids also where each
    begins, and all texts."""
    stored = path.read_bytes()
    index_bytes, num_keys = struct.unpack_from("<24xI4xQ", stored)
    starts = [place for place, _ in struct.iter_unpack("<QQ8x", stored[72:192])]
    hashes = np.frombuffer(stored, "<u8", num_keys, starts[1]).tolist()
    rows = np.frombuffer(stored, f"<u{index_bytes}", num_keys, starts[2]).tolist()
    if starts[3] == starts[4]:
        return dict(zip(hashes, rows, strict=True))
    ends = (np.frombuffer(stored, "<u8", num_keys + 1, starts[3]) + np.uint64(starts[4])).tolist()
    return {stored[first:end]: row for (first, end), row in zip(pairwise(ends), rows, strict=True)}


def load_module(path: Path) -> Any:
    """Returns the module in a file, run from its path, so that several exports can be loaded side by side."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def read_about(path: Path) -> dict[str, Any]:
    """Returns export.json. Raises ValueError if its bytes differ from the SHA-256 in its last line but one."""
    text = path.read_bytes()
    body, _, end = text.rpartition(b' "checksum": ')
    if end != f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode():
        raise ValueError(f"{path} differs from its checksum: it was edited or damaged; export the run again")
    about: dict[str, Any] = json.loads(text)
    return about


def row_number(feature: dict[str, Any], table: dict[str, Any], key: Any, value: Any, at: int, splits: Any) -> int:
    """Returns an id that already is a row number. Raises ValueError if it is not one."""
    if key is None or not 0 <= key < table["num_embeddings"]:
        where = f"column {feature['name']!r}, row {int(np.searchsorted(splits, at, side='right')) - 1}: {value!r}"
        raise ValueError(f"{where} is no row of its table; pass an integer from 0 to {table['num_embeddings'] - 1}")
    return int(key)


HASH_OF_MISSING = 0x9E3779B97F4A7C15


def hashes_of(keys: Sequence[bytes | int | None]) -> Any:
    """Returns the 64-bit hashes of ids, uint64 [n]."""
    return np.array([HASH_OF_MISSING if key is None else hash_of(key) for key in keys], np.uint64)


def hash_of(key: bytes | int) -> int:
    """Returns the 64-bit hash of an id, an int64 or bytes."""

    def mix(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD % 2**64
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
        return x ^ x >> 33

    if isinstance(key, int):
        return mix(key % 2**64)
    h = mix(len(key))
    for at in range(0, len(key), 8):
        h = mix(h ^ int.from_bytes(key[at : at + 8], "little"))
    return h
