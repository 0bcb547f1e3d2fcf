"""Scores raw rows with an exported model: torch, safetensors, pyarrow and numpy, without hotrow.

    Scorer("FOLDER").score({"price": [1.5, None], "item": ["i7", None], "seen": [["i1", "i7"], []]})   # in Python
    python FOLDER/score.py ROWS.parquet                                     # prints one score per row

FOLDER is what `hotrow export` wrote, and this file is its score.py: how raw values become rows and scores. model.py
beside it is the network, transforms/ are functions of numbers, and seen.py counts what the rows hold. All are meant to
be read and to be taken over into other systems. They read export.json, the weights and the vocabularies, and nothing
else, and hold whole tables and vocabularies in memory.

Any value gets a score: what is no id or number of its column is missing. A table without a vocabulary takes row
numbers, and refuses anything else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Rows = dict[str, tuple[Tensor, Tensor]]
"""By feature: row numbers of all samples, one after another, and where each sample's begin, [B + 1]."""


NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
HEX = r"[0-9a-fA-F]{1,8}"
MAX_DIGITS = 20
"""No id of 64 bits has more."""
MAX_EXACT_FLOAT = 2**53


ABOUT_DENSE = ("name", "transform", "missing", "written")
"""What export.json says of a dense column besides the options of its transform."""


STORED = {"float32": (torch.float32, 0), "bf16": (torch.bfloat16, 0), "int8": (torch.uint8, 8)}
"""By `stored_as` of a table: the type of its tensor, and how many columns this has besides those of the table."""


class UnreadableError(ValueError):
    """A value that is not of its column's kind."""


class Scorer:
    """The model in `folder`. bags: an nn.EmbeddingBag per table. model: the network on their rows. scores: the function
    that makes scores of its outputs.

    seen: what the rows that were scored last held, by column; see seen.py.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.about = read_about(folder / "export.json")
        self.tables = {table["name"]: table for table in self.about["tables"]}
        self.bags: dict[str, nn.EmbeddingBag] = {}
        self.vocabularies: dict[str, dict[Any, int]] = {}
        for name, table in self.tables.items():
            weight = rows_of(folder / table["file"], table)
            self.bags[name] = nn.EmbeddingBag.from_pretrained(weight, mode=table["pooling"], include_last_offset=True)
            if (vocabulary := table["vocabulary"]) is not None:
                columns = pyarrow.parquet.read_table(folder / vocabulary["file"])
                pairs = zip(columns["key"].to_pylist(), columns["row"].to_pylist(), strict=True)
                self.vocabularies[name] = dict(pairs)
        self._counting = load_module(folder / "seen.py")
        self._counts = Counts(self.about["statistics"], folder / "statistics.safetensors")
        paths = (folder / "transforms").glob("*.py")
        self._transforms = {path.stem: getattr(load_module(path), path.stem) for path in paths}
        self.seen: Any = None
        definition = load_module(folder / "model.py")
        self.model, self.scores = build_network(definition, self.about), definition.scores
        self._calibrated = definition.calibrated
        self.model.load_state_dict(load_file(folder / "model.safetensors"))

    @property
    def columns(self) -> list[str]:
        """Names of the raw columns that a score is made of."""
        made: dict[str, list[str]] = {}
        for each in self.about["transforms"]:
            taken = [column["name"] for column in each["columns"]]
            made[each["into"]] = [name for column in taken for name in made.get(column, [column])]
        inputs = [column["name"] for column in self.about["dense"] + self.about["features"]]
        return list(dict.fromkeys(name for each in inputs for name in made.get(each, [each])))

    @torch.no_grad()
    def score(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """Returns the score of each row, [B], or [B, L] if export.json lists L > 1 `labels`; README.md says what it is.

        columns: raw values by name, None for a missing one. Warns of what stands out beside the rows that validated the
        model: unknown ids, missing values, numbers outside the range of training. Raises ValueError, which names the
        column and the row, if a column is missing, has another length, or has no row number where one is needed.
        """
        outputs = self.model(*self.inputs(columns))
        for layer in self.about.get("calibration", ()):
            outputs = self._calibrated(outputs, **layer)
        scores: Tensor = self.scores(outputs)
        return scores

    @torch.no_grad()
    def inputs(self, columns: Mapping[str, Sequence[Any]]) -> tuple[Tensor, Any]:
        """Returns what the model takes for each row: dense inputs [B, I], and the tables' rows. columns: as for
        `score`."""
        for name in self.columns:
            if name not in columns:
                raise ValueError(f"column {name!r} is missing; pass it, with None for each missing value")
            if len(columns[name]) != (num_rows := len(columns[self.columns[0]])):
                raise ValueError(f"column {name!r} has {len(columns[name])} rows, {self.columns[0]!r} has {num_rows}")
        columns = {name: [self._with_null(value) for value in values] for name, values in columns.items()}
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
        return torch.stack(dense, 1) if dense else torch.empty(num_rows, 0), self._look(rows)

    def _with_null(self, value: Any) -> Any:
        """Returns None for text that means a missing value, also within lists; any other value as it is."""
        if isinstance(value, list):
            return [self._with_null(item) for item in value]
        return None if isinstance(value, str) and value.strip(" ") in self.about.get("missing", ()) else value

    def _computed(self, made: dict[str, Any], columns: Mapping[str, Sequence[Any]]) -> tuple[list[Any], int]:
        """Returns a column that is computed from others, None where it is missing, and how many of their values could
        not be read."""
        arguments: list[Any] = []
        lists: list[list[list[Any]]] = []
        unreadable = 0
        for column in made["columns"]:
            values = columns[column["name"]]
            if "keys" not in column:
                argument, count = numbers_of(column, [*map(seconds_of, values)])
            elif "kind" not in column:
                argument, count = self._hashes(column, values)
            else:
                bags, count = readable_lists(column, values)
                lists.append(bags)
                hashes, _ = self._hashes(column, [value for bag in bags for value in bag])
                argument = hashes, np.cumsum([0, *map(len, bags)])
            arguments.append(argument)
            unreadable += count
        found = self._transforms[made["transform"]](*arguments, **made["options"])
        if made.get("lists"):
            stays = iter(found.tolist())
            return [[value for value in bag if next(stays)] for bag in lists[0]], unreadable
        if made.get("ids"):
            return found.view(np.int64).tolist(), unreadable
        return [None if math.isnan(n) else n for n in found.tolist()], unreadable

    def _dense(self, column: dict[str, Any], values: Sequence[Any], unreadable: int) -> Tensor:
        """Returns the inputs of a dense column. unreadable: how many values of what it is computed from were not
        read."""
        numbers, more = numbers_of(column, values)
        # Rounded to float32 before and after the transform, not between.
        options = {name: value for name, value in column.items() if name not in ABOUT_DENSE}
        x = self._transforms[column["transform"]](numbers.astype(np.float32).astype(np.float64), **options)
        missing = np.isnan(x)
        dense = np.where(missing, column["missing"], x).astype(np.float32)
        self.seen.add_numbers(column["name"], dense, missing, unreadable=unreadable + more)
        return torch.from_numpy(dense)

    def _statistics(self, columns: Mapping[str, Sequence[Any]]) -> list[Tensor]:
        """Returns the label's statistics, in the order of `about["statistics"]`, of their priors, then the count."""
        features, found = {feature["name"]: feature for feature in self.about["features"]}, []
        for i, statistic in enumerate(self.about["statistics"]):
            hashes = [self._hashes(features[name], columns[name])[0] for name in statistic["features"]]
            numbers = self._counts.of(i, self._transforms["cross"](*hashes).tolist())
            inputs = [self._transforms["target_stat"](*numbers, prior=prior) for prior in statistic["priors"]]
            inputs += [self._transforms["log1p_clip0"](numbers[0])] if statistic["count"] else []
            found += [torch.from_numpy(x.astype(np.float32)) for x in inputs]
        return found

    def _hashes(self, feature: dict[str, Any], values: Sequence[Any]) -> tuple[Any, int]:
        """Returns the 64-bit hash of each value of a column of single ids, uint64 [n], and how many of them could not
        be read."""
        values, unreadable = self._in_buckets(feature, values)
        keys, more = keys_of(feature, values)
        hashes = [HASH_OF_MISSING if key is None else hash_of(key) for key in keys]
        return np.array(hashes, np.uint64), unreadable + more

    def _in_buckets(self, feature: dict[str, Any], values: Sequence[Any]) -> tuple[Sequence[Any], int]:
        """Returns the ids of a feature of buckets, and how many values could not be read; of others, their values."""
        if feature.get("buckets") is None:
            return values, 0
        numbers, unreadable = numbers_of(feature, values)
        return self._transforms["bucketize"](numbers, boundaries=feature["buckets"]).tolist(), unreadable

    def _rows(self, feature: dict[str, Any], values: Sequence[Any], unreadable: int) -> tuple[Tensor, Tensor]:
        """Returns the row numbers of a feature, and where each sample's begin. unreadable: as for `_dense`."""
        rows, missing = [], []
        values, more = self._in_buckets(feature, values)
        unreadable += more
        bags: list[list[Any]] = []
        for value in values:
            try:
                bags.append([value] if feature["kind"] == "one_hot" else list_of(feature, value))
            except UnreadableError:
                unreadable += 1
                bags.append([])
        for i, value in ((i, value) for i, bag in enumerate(bags) for value in bag):
            try:
                rows.append(self._row(feature, value, i))
            except UnreadableError:
                unreadable, value = unreadable + 1, None
                rows.append(self._row(feature, None, i))
            missing.append(is_missing(value))
        if self.tables[feature["table"]]["vocabulary"] is not None:  # else row 0 is a row like any other
            self.seen.add_ids(feature["name"], np.array(rows), np.array(missing, bool), unreadable=unreadable)
        offsets = np.cumsum([0, *map(len, bags)])
        return torch.tensor(rows, dtype=torch.int64), torch.from_numpy(offsets)

    def _row(self, feature: dict[str, Any], value: Any, i: int) -> int:
        """Returns the row of a value in row i of a feature."""
        table = self.tables[feature["table"]]
        about, num_rows = table["vocabulary"], table["num_embeddings"]
        if about is None:
            (number,), _ = keys_of({**feature, "keys": "int"}, [value])
            if not isinstance(number, int) or not 0 <= number < num_rows:
                where = f"column {feature['name']!r}, row {i}: {value!r}"
                raise ValueError(f"{where} is no row of its table; pass an integer from 0 to {num_rows - 1}")
            return number
        if is_missing(value):
            return int(about["missing_row"])
        key = key_of(feature, value)
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


class Counts:
    """Rows and positives by value in the training rows, as statistics.safetensors has them."""

    def __init__(self, statistics: Sequence[Mapping[str, Any]], path: Path) -> None:
        arrays = load_file(path) if statistics else {}
        self._bits = [statistic["bits"] for statistic in statistics]
        self._all = arrays["all"].tolist() if statistics else [0, 0]
        self._slots = [
            dict(zip(arrays[f"{i}.slots"].tolist(), arrays[f"{i}.counts"].tolist(), strict=True))
            for i in range(len(statistics))
        ]

    def of(self, i: int, hashes: Sequence[int]) -> tuple[Any, ...]:
        """Returns rows and positives of each value by statistic i, and rows and positives of all: four arrays [n]."""
        own = np.array([self._slots[i].get(h >> 64 - self._bits[i], [0, 0]) for h in hashes], np.float64).reshape(-1, 2)
        return *own.T, *(np.full(len(own), float(number)) for number in self._all)


def rows_of(path: Path, table: dict[str, Any]) -> Tensor:
    """Returns the rows of a table, float32 [num_embeddings, embedding_dim]. Raises ValueError if its file holds another
    tensor than export.json says."""
    stored = load_file(path)[table["tensor"]]
    dtype, more = STORED[table["stored_as"]]
    wanted = [table["num_embeddings"], table["embedding_dim"] + more]
    if (stored.dtype, [*stored.shape]) != (dtype, wanted):
        found = f"{stored.dtype} {[*stored.shape]}"
        raise ValueError(f"{path} holds {found}, but export.json says {dtype} {wanted}; export the run again")
    return looked_up(stored)


def looked_up(stored: Tensor) -> Tensor:
    """Returns stored rows in float32, [N, D]. Rows of bytes [N, D + 8] are D bytes q, then the step and the least
    number of the row, both float32: q * step + least."""
    if stored.dtype != torch.uint8:
        return stored.float()
    ends = stored[:, -8:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned to 4 bytes
    return stored[:, :-8] * ends[:, :1] + ends[:, 1:]


def build_network(module: Any, about: dict[str, Any]) -> nn.Module:
    """Returns the network that model.py, loaded as `module`, defines, before weights are loaded."""
    (options,) = module.ModelSpec.__subclasses__()
    dims = {table["name"]: table["embedding_dim"] for table in about["tables"]}
    more = {"num_outputs": len(about["labels"])} if len(about.get("labels", [])) > 1 else {}
    network: nn.Module = options(**about["model"]).build(
        num_dense=about["model"]["num_dense"],
        dims={feature["name"]: dims[feature["table"]] for feature in about["features"]},
        generator=torch.Generator(),
        **more,
    )
    return network


def load_module(path: Path) -> Any:
    """Returns the module in a file, run from its path, so that several exports can be loaded side by side."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def read_about(path: Path) -> dict[str, Any]:
    """Returns export.json. Raises ValueError if its bytes differ from the SHA-256 in its last line but one."""
    if not path.exists() and path.with_name("chain.json").exists():
        raise ValueError(f"{path.parent}: a delta has changed it in half; run the same `hotrow apply` again")
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


def is_missing(value: Any) -> bool:
    """Returns whether a value is None, a NaN, or an empty list in a column of single values."""
    is_nan = isinstance(value, float | np.floating) and bool(np.isnan(value))
    return value is None or is_nan or (isinstance(value, list) and not value)


def number_of(value: Any) -> float | None:
    """Returns the number that a value means, NaN if it is missing; None if it is no finite float32."""
    value = single(value)
    if is_missing(value):
        return math.nan
    if isinstance(value, str):
        value = value.strip() if re.fullmatch(NUMBER, value.strip()) else None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    with np.errstate(over="ignore"):
        return number if np.isfinite(np.float32(number)) else None


def numbers_of(column: dict[str, Any], values: Sequence[Any]) -> tuple[Any, int]:
    """Returns values as float64 [n], NaN if one is missing or no number, and how many are no numbers."""
    numbers = [number_of(plain_number(column, value)) for value in values]
    found = np.array([math.nan if number is None else number for number in numbers], np.float64)
    return found, numbers.count(None)


def seconds_of(value: Any) -> Any:
    """Returns a time or a date as unix seconds, rounded down to microseconds; any other value as it is."""
    if not isinstance(value, date):
        return value
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return (value - datetime(1970, 1, 1, tzinfo=value.tzinfo and UTC)) // timedelta(microseconds=1) / 1e6


def list_of(feature: dict[str, Any], value: Any) -> list[Any]:
    """Returns the ids in one value of a list feature."""
    if is_missing(value) or (isinstance(value, str) and not value):
        return []
    if isinstance(value, str):
        if feature.get("separator") == "json":
            return json_list(value)
        return [value] if feature.get("separator") is None else value.split(feature["separator"])
    return [*value] if isinstance(value, Sequence) or hasattr(value, "__len__") else [value]


def json_list(text: str) -> list[Any]:
    """Returns the ids in a JSON array, numbers as they are written. Raises UnreadableError if it is no such array."""
    try:
        found = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(item is None or isinstance(item, str) for item in found):
        raise UnreadableError(f"{text!r} is not a JSON array of ids")
    return found


def readable_lists(feature: dict[str, Any], values: Sequence[Any]) -> tuple[list[list[Any]], int]:
    """Returns the lists of a column, with None for ids that cannot be read, and how many ids and lists cannot."""
    bags: list[list[Any]] = []
    unreadable = 0
    for value in values:
        try:
            bags.append(list_of(feature, value))
        except UnreadableError:
            unreadable += 1
            bags.append([])
        keys, more = keys_of(feature, bags[-1])
        bags[-1] = [None if key is None else each for key, each in zip(keys, bags[-1], strict=True)]
        unreadable += more
    return bags, unreadable


def single(value: Any) -> Any:
    """Returns the value in a list of one, None for an empty list, and a longer list as text."""
    if not isinstance(value, list):
        return value
    return None if not value else single(value[0]) if len(value) == 1 else str(value)


def text_of(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def integer_of(value: Any, feature: dict[str, Any]) -> int:
    """Returns the integer id that a value means: 12, 12.0, " 12" and "012" are 12. Raises UnreadableError if none."""
    if isinstance(value, str | bytes | Decimal):
        text = text_of(value).strip()
        if feature.get("base") == 16:
            if re.fullmatch(HEX, text):
                return int(text, 16)
        elif re.fullmatch(r"0|-?[1-9][0-9]*", text):
            if len(text) <= MAX_DIGITS:
                return int(text)
        elif re.fullmatch(NUMBER, text) and is_whole(number := Decimal(text)):
            return int(number)
    elif isinstance(value, float | np.floating):
        if float(value).is_integer() and abs(float(value)) < MAX_EXACT_FLOAT:
            return int(value)
    elif hasattr(value, "__index__"):
        return int(value)
    raise UnreadableError(f"{value!r} is not an integer id")


def is_whole(number: Decimal) -> bool:
    """Returns whether a number is whole and short enough to be an id."""
    return number.adjusted() < MAX_DIGITS and number == number.to_integral_value()


def integer_key(value: Any, feature: dict[str, Any]) -> int:
    """Returns the id as an int64; from 2^63 up in two's complement. Raises UnreadableError if it has more bits."""
    number = integer_of(single(value), feature)
    low, high = (0, 2**64) if feature["keys"] == "uint64" else (-(2**63), 2**63)
    if not low <= number < high:
        raise UnreadableError(f"{value!r} is beyond the ids of {feature['name']}")
    return (number + 2**63) % 2**64 - 2**63


def text_key(value: Any) -> bytes:
    """Returns the UTF-8 of a text, the decimal digits of a whole number, the name of a boolean, others as text."""
    value = single(value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return str(value).lower().encode()
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(float(value)) < MAX_EXACT_FLOAT:
        return str(int(value)).encode()
    return str(value).encode()


def key_of(feature: dict[str, Any], value: Any) -> bytes | int:
    """Returns the id that a value means, as its column holds ids. Raises UnreadableError if it means none."""
    return text_key(value) if feature["keys"] == "bytes" else integer_key(value, feature)


def keys_of(feature: dict[str, Any], values: Sequence[Any]) -> tuple[list[bytes | int | None], int]:
    """Returns the ids that values mean, None if one is missing or none, and how many mean none."""
    keys: list[bytes | int | None] = []
    unreadable = 0
    for value in values:
        try:
            keys.append(None if is_missing(single(value)) else key_of(feature, value))
        except UnreadableError:
            unreadable += 1
            keys.append(None)
    return keys, unreadable


HASH_OF_MISSING = 0x9E3779B97F4A7C15


def hash_of(key: bytes | int) -> int:
    """Returns the 64-bit hash of an id, as integer_key or text_key gives it."""

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


if __name__ == "__main__":
    table = pyarrow.parquet.read_table(sys.argv[1])
    scores = Scorer(Path(__file__).parent).score({name: table[name].to_pylist() for name in table.column_names})
    print(*scores.tolist(), sep="\n")
