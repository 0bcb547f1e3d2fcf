"""Scores raw rows with an exported model: torch, safetensors, pyarrow and numpy, without hotrow.

    Scorer("FOLDER").score({"price": [1.5, None], "item": ["i7", None], "seen": [["i1", "i7"], []]})   # in Python
    python FOLDER/score.py ROWS.parquet                                     # prints one probability per row

FOLDER is what `hotrow export` wrote, and this file is its score.py: how raw values become rows and scores. model.py
beside it is the network. Both are meant to be read and to be taken over into other systems. They read export.json, the
weights and the vocabularies, and nothing else, and hold whole tables and vocabularies in memory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Rows = dict[str, tuple[Tensor, Tensor]]
"""By feature: row numbers of all samples, one after another, and where each sample's begin, [B + 1]."""


class Scorer:
    """The model in `folder`. bags: an nn.EmbeddingBag per table. model: the network on their rows."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.about = read_about(folder / "export.json")
        self.tables = {table["name"]: table for table in self.about["tables"]}
        self.bags: dict[str, nn.EmbeddingBag] = {}
        self.vocabularies: dict[str, dict[Any, int]] = {}
        for name, table in self.tables.items():
            weight = load_file(folder / table["file"])[table["tensor"]]
            self.bags[name] = nn.EmbeddingBag.from_pretrained(weight, mode=table["pooling"], include_last_offset=True)
            if (vocabulary := table["vocabulary"]) is not None:
                columns = pyarrow.parquet.read_table(folder / vocabulary["file"])
                pairs = zip(columns["key"].to_pylist(), columns["row"].to_pylist(), strict=True)
                self.vocabularies[name] = dict(pairs)
        self.model = build_network(folder / "model.py", self.about)
        self.model.load_state_dict(load_file(folder / "model.safetensors"))

    @torch.no_grad()
    def score(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """Returns the probability of a positive label for each row, [B].

        columns: raw values by name, None for a missing one.
        """
        columns = {name: [self._with_null(value) for value in values] for name, values in columns.items()}
        dense = [self._dense(column, columns[column["name"]]) for column in self.about["dense"]]
        rows = {feature["name"]: self._rows(feature, columns[feature["name"]]) for feature in self.about["features"]}
        num_rows = len(next(iter(rows.values()))[1]) - 1
        return torch.sigmoid(self.model(torch.stack(dense, 1) if dense else torch.empty(num_rows, 0), self._look(rows)))

    def _with_null(self, value: Any) -> Any:
        """Returns None for text that means a missing value, also within lists; any other value as it is."""
        if isinstance(value, list):
            return [self._with_null(item) for item in value]
        return None if isinstance(value, str) and value.strip(" ") in self.about.get("missing", ()) else value

    def _dense(self, column: dict[str, Any], values: Sequence[Any]) -> Tensor:
        values = [plain_number(column, value) for value in values]
        raw = np.array([math.nan if value is None else float(value) for value in values], np.float32)
        x = raw.astype(np.float64)  # rounded to float32 before and after, not between
        if column["transform"] == "log1p_clip0":
            x = np.log1p(np.maximum(x, 0.0))
        elif column["transform"] == "standardize":
            x = (x - column["mean"]) / column["std"]
        x[np.isnan(raw)] = column["missing"]
        return torch.from_numpy(x.astype(np.float32))

    def _rows(self, feature: dict[str, Any], values: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Returns the row numbers of a feature, and where each sample's begin."""
        bags = [[value] if feature["kind"] == "one_hot" else list_of(feature, value) for value in values]
        rows = [self._row(feature, value) for bag in bags for value in bag]
        offsets = np.cumsum([0, *map(len, bags)])
        return torch.tensor(rows, dtype=torch.int64), torch.from_numpy(offsets)

    def _row(self, feature: dict[str, Any], value: Any) -> int:
        about = self.tables[feature["table"]]["vocabulary"]
        if about is None:
            return int(value)
        if value is None or value != value:
            return int(about["missing_row"])
        if (buckets := feature.get("buckets")) is not None:
            value = bisect_right(buckets, float(plain_number(feature, value)))
        key: int | bytes = text_key(value) if feature["keys"] == "bytes" else integer_key(value, feature["base"])
        if (cap := about["hash_cap"]) is not None:
            key = (key if isinstance(key, int) else hash_of(key)) % cap
        row: int = self.vocabularies[feature["table"]].get(key, about["unknown_row"])
        return row

    def _look(self, rows: Rows) -> Any:
        """Returns pooled rows [B, sum of D]; for a network that takes every id's row ([all, D], offsets) by feature."""
        bags = {feature["name"]: self.bags[feature["table"]] for feature in self.about["features"]}
        if self.model.lookup == "sequence":
            return {name: (bags[name].weight[ids], offsets) for name, (ids, offsets) in rows.items()}
        return torch.cat([bags[name](ids, offsets) for name, (ids, offsets) in rows.items()], 1)


def build_network(path: Path, about: dict[str, Any]) -> nn.Module:
    """Returns the network that the file model.py at `path` defines, before weights are loaded.

    The file is run from its path, so that several exports can be loaded side by side.
    """
    found = importlib.util.spec_from_file_location("model", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    (options,) = module.ModelSpec.__subclasses__()
    dims = {table["name"]: table["embedding_dim"] for table in about["tables"]}
    network: nn.Module = options(**about["model"]).build(
        num_dense=about["model"]["num_dense"],
        dims={feature["name"]: dims[feature["table"]] for feature in about["features"]},
        generator=torch.Generator(),
    )
    return network


def read_about(path: Path) -> dict[str, Any]:
    """Returns export.json. Raises ValueError if its bytes differ from the SHA-256 in its last line but one."""
    text = path.read_bytes()
    body, _, end = text.rpartition(b' "checksum": ')
    if end != f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode():
        raise ValueError(f"{path} differs from its checksum: it was edited or damaged; export the run again")
    about: dict[str, Any] = json.loads(text)
    return about


def plain_number(column: dict[str, Any], value: Any) -> Any:
    """Returns text that is written as the column's numbers are ("$1,234.50") as a plain number ("1234.50").

    Other text becomes "?", which is no number; what is not text, and text of columns of plain numbers, stays as it is.
    """
    written = column.get("written")
    if written is None or not isinstance(value, str):
        return value
    for blank in written["blanks"]:
        value = value.replace(blank, " ")
    value = value.strip()
    if re.fullmatch(written["pattern"], value, re.ASCII) is None:
        return "?"
    for sign in written["remove"]:
        value = value.replace(sign, "")
    return value.replace(written["decimal"], ".")


def list_of(feature: dict[str, Any], value: Any) -> list[Any]:
    """Returns the ids in one value of a list feature."""
    if isinstance(value, str) and feature.get("separator") is None:
        raise ValueError(f"{feature['name']} has no separator to cut {value!r} at; pass lists")
    if value is None or len(value) == 0:
        return []
    if isinstance(value, str) and feature["separator"] == "json":
        return list(json.loads(value, parse_int=str, parse_float=str))
    return value.split(feature["separator"]) if isinstance(value, str) else [*value]


def exact_integer(value: Any, base: int) -> int:
    """Returns the number that an integer, a whole float, or a text in the given base stands for."""
    number = int(value, base) if isinstance(value, str) else int(value)
    exact = base == 16 or str(number) == value if isinstance(value, str) else number == value
    if not exact:
        raise ValueError(f"{value!r} is not an exact integer id")
    return number


def integer_key(value: Any, base: int) -> int:
    """Returns the id as an int64; from 2^63 up in two's complement."""
    return (exact_integer(value, base) + 2**63) % 2**64 - 2**63


def text_key(value: Any) -> bytes:
    """Returns the UTF-8 of a text, the decimal digits of a whole number, the name of a boolean."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return str(value).lower().encode() if isinstance(value, bool) else str(exact_integer(value, 10)).encode()


def hash_of(key: bytes) -> int:
    """Returns the 64-bit hash of a text's key, for tables with a hash_cap."""

    def mix(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD % 2**64
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
        return x ^ x >> 33

    h = mix(len(key))
    for at in range(0, len(key), 8):
        h = mix(h ^ int.from_bytes(key[at : at + 8], "little"))
    return h


if __name__ == "__main__":
    table = pyarrow.parquet.read_table(sys.argv[1])
    scores = Scorer(Path(__file__).parent).score({name: table[name].to_pylist() for name in table.column_names})
    print(*scores.tolist(), sep="\n")
