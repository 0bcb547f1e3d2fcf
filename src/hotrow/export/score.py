"""Scores raw rows with an exported model: torch, safetensors, pyarrow and numpy, without hotrow.

    Scorer("FOLDER").score({"price": [1.5, None], "item": ["i7", None], "seen": [["i1", "i7"], []]})   # in Python
    python FOLDER/score.py ROWS.parquet                                     # prints one probability per row

FOLDER is what `hotrow export` wrote, and this file is its score.py: the definition of the model, meant to be read and
to be taken over into other systems. It reads export.json, the weights and the vocabularies, and nothing else. Whole
tables and vocabularies are held in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
    """The model in `folder`. bags: an nn.EmbeddingBag per table. model: the dense part."""

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
        features, made = self.about["features"], {"dlrm": DLRM, "tbsm": TBSM}[self.about["model"]["name"]]
        self.model: nn.Module = made(self.about["model"], [feature["name"] for feature in features])
        self.model.load_state_dict(load_file(folder / "model.safetensors"))

    @torch.no_grad()
    def score(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """The probability of a positive label for each row, [B]; columns: raw values by name, None where missing."""
        dense = [self._dense(column, columns[column["name"]]) for column in self.about["dense"]]
        rows = {feature["name"]: self._rows(feature, columns[feature["name"]]) for feature in self.about["features"]}
        num_rows = len(next(iter(rows.values()))[1]) - 1
        return torch.sigmoid(self.model(torch.stack(dense, 1) if dense else torch.empty(num_rows, 0), self._look(rows)))

    def _dense(self, column: dict[str, Any], values: Sequence[Any]) -> Tensor:
        raw = np.array([math.nan if value is None else float(value) for value in values], np.float32)
        x = raw.astype(np.float64)  # rounded to float32 before and after, not between
        if column["transform"] == "log1p_clip0":
            x = np.log1p(np.maximum(x, 0.0))
        elif column["transform"] == "standardize":
            x = (x - column["mean"]) / column["std"]
        x[np.isnan(raw)] = column["missing"]
        return torch.from_numpy(x.astype(np.float32))

    def _rows(self, feature: dict[str, Any], values: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Row numbers of a feature, and where each sample's begin."""
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
        key: int | bytes = text_key(value) if feature["keys"] == "bytes" else integer_key(value, feature["base"])
        if (cap := about["hash_cap"]) is not None:
            key = (key if isinstance(key, int) else hash_of(key)) % cap
        row: int = self.vocabularies[feature["table"]].get(key, about["unknown_row"])
        return row

    def _look(self, rows: Rows) -> dict[str, Any]:
        """By feature: pooled rows [B, D]; for TBSM, which takes rows one by one, ([all, D], offsets)."""
        bags = {feature["name"]: self.bags[feature["table"]] for feature in self.about["features"]}
        if isinstance(self.model, TBSM):
            return {name: (bags[name].weight[ids], offsets) for name, (ids, offsets) in rows.items()}
        return {name: bags[name](ids, offsets) for name, (ids, offsets) in rows.items()}


def read_about(path: Path) -> dict[str, Any]:
    """What export.json says. Raises ValueError unless its bytes are those whose SHA-256 is in its last line but one."""
    text = path.read_bytes()
    body, _, end = text.rpartition(b' "checksum": ')
    if end != f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode():
        raise ValueError(f"{path} differs from its checksum: it was edited or damaged; export the run again")
    about: dict[str, Any] = json.loads(text)
    return about


def list_of(feature: dict[str, Any], value: Any) -> list[Any]:
    """The ids in one value of a list feature."""
    if isinstance(value, str) and feature.get("separator") is None:
        raise ValueError(f"{feature['name']} has no separator to cut {value!r} at; pass lists")
    if value is None or len(value) == 0:
        return []
    return value.split(feature["separator"]) if isinstance(value, str) else [*value]


def exact_integer(value: Any, base: int) -> int:
    """Of an integer, a whole float, or text in the given base."""
    number = int(value, base) if isinstance(value, str) else int(value)
    exact = base == 16 or str(number) == value if isinstance(value, str) else number == value
    if not exact:
        raise ValueError(f"{value!r} is no exact integer id")
    return number


def integer_key(value: Any, base: int) -> int:
    """As int64: from 2^63 up in two's complement."""
    return (exact_integer(value, base) + 2**63) % 2**64 - 2**63


def text_key(value: Any) -> bytes:
    """Of text its UTF-8; of a whole number its decimal digits, of a boolean its name."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return str(value).lower().encode() if isinstance(value, bool) else str(exact_integer(value, 10)).encode()


def hash_of(key: bytes) -> int:
    """Of text in a table with a hash_cap; 64 bits."""

    def mix(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD % 2**64
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
        return x ^ x >> 33

    h = mix(len(key))
    for at in range(0, len(key), 8):
        h = mix(h ^ int.from_bytes(key[at : at + 8], "little"))
    return h


class MLP(nn.Module):
    """Linear layers, a ReLU after each; after the last only where `last_relu`."""

    def __init__(self, widths: Sequence[int], *, last_relu: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(widths))
        self.last_relu = last_relu

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output."""
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.relu(x) if self.last_relu or k + 1 < len(self.layers) else x
        return x


class Constant(nn.Module):
    """In place of the bottom MLP where there is no dense input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """The same vector for every row of x."""
        return self.bias.expand(len(x), -1)


def interact(dense: Tensor, rows: Tensor) -> Tensor:
    """[dense, products of all pairs of vectors]; dense [B, D], rows [B, F, D]."""
    vectors = torch.cat([dense[:, None], rows], 1)
    i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    return torch.cat([dense, (vectors @ vectors.transpose(1, 2))[:, i, j]], 1)


class DLRM(nn.Module):
    """Dense inputs [B, I] and pooled rows by feature -> logits [B]."""

    def __init__(self, about: dict[str, Any], features: Sequence[str]) -> None:
        super().__init__()
        dim, num_dense, num_features = about["embedding_dim"], about["num_dense"], len(features)
        self.features = list(features)
        widths = [num_dense, *about["bottom_mlp"], dim]
        self.bottom = MLP(widths, last_relu=True) if num_dense else Constant(dim)
        num_pairs = num_features * (num_features + 1) // 2
        self.top = MLP([dim + num_pairs, *about["top_mlp"], 1], last_relu=False)
        self.first_order_I = nn.Parameter(torch.zeros(num_dense)) if about["first_order"] else None

    def forward(self, dense: Tensor, pooled: dict[str, Tensor]) -> Tensor:
        """Logits [B]."""
        rows = torch.stack([pooled[name] for name in self.features], 1)
        logits: Tensor = self.top(interact(self.bottom(dense), rows))[:, 0]
        if self.first_order_I is not None:
            logits = logits + rows[:, :, 0].sum(1) + dense @ self.first_order_I
        return logits


class TBSM(nn.Module):
    """Dense inputs [B, I] and rows one by one -> logits [B]: a DLRM per step of a history, attention over the steps."""

    def __init__(self, about: dict[str, Any], features: Sequence[str]) -> None:
        super().__init__()
        dim, steps = about["embedding_dim"], about["history_steps"] or 20
        self.steps, top = steps, about["top_mlp"]
        self.single = [name for name in features if not name.endswith("_history")]
        self.histories = {name: f"{name}_history" for name in self.single if f"{name}_history" in features}
        num_pairs = len(self.single) * (len(self.single) + 1) // 2
        attention, final = about["attention_mlp"], about["final_mlp"]
        self.bottom = MLP([1 + about["num_dense"], *about["bottom_mlp"], dim], last_relu=True)
        self.top = MLP([dim + num_pairs, *top], last_relu=True)
        self.inner_MM = nn.Parameter(torch.empty(top[-1], top[-1]))
        self.attention = MLP([steps, *([15, 15] if attention is None else attention), steps], last_relu=False)
        self.final = MLP([2 * top[-1], *([60] if final is None else final), 1], last_relu=False)

    def forward(self, dense: Tensor, rows: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Logits [B]; T steps of history at the end of their slots, then the target."""
        num, T = len(dense), self.steps
        lengths = rows[next(iter(self.histories.values()))][1].diff()
        there = torch.arange(T) >= T - lengths[:, None]
        steps = [torch.cat([self._past(name, rows, there), rows[name][0][:, None]], 1) for name in self.single]
        position = (torch.arange(T + 1) / (T + 1))[None, :, None].expand(num, -1, -1)
        inputs = torch.cat([position, dense[:, None].expand(-1, T + 1, -1)], 2)
        z = self.top(interact(self.bottom(inputs.flatten(0, 1)), torch.stack(steps, 2).flatten(0, 1)))
        z = nn.functional.normalize(z, dim=1).view(num, T + 1, -1)
        history, target = z[:, :T] * there[:, :, None], z[:, T]
        products = torch.einsum("btm,bm->bt", history, target @ self.inner_MM.T @ self.inner_MM)
        context = torch.einsum("bt,btm->bm", torch.sigmoid(self.attention(products)), history)
        logits: Tensor = self.final(torch.cat([context, target], 1))[:, 0]
        return logits

    def _past(self, name: str, rows: dict[str, tuple[Tensor, Tensor]], there: Tensor) -> Tensor:
        """[B, T, D] of a feature's history; of a feature without one its own row in every slot."""
        own = rows[name][0]
        if name not in self.histories:
            return own[:, None].expand(-1, self.steps, -1)
        past = own.new_zeros(*there.shape, own.shape[1])
        past[there] = rows[self.histories[name]][0]
        return past


if __name__ == "__main__":
    table = pyarrow.parquet.read_table(sys.argv[1])
    scores = Scorer(Path(__file__).parent).score({name: table[name].to_pylist() for name in table.column_names})
    print(*scores.tolist(), sep="\n")
