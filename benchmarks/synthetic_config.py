"""Describes a synthetic data set: tables, counts, and the shapes of public data sets as presets.

`synthetic` makes the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hotrow.base.files import check_name
from hotrow.data.packed.format import FeatureKind
from hotrow.data.sources.clicks import SIZES as KAGGLE_ROWS

MAX_ROWS_PER_TABLE = 1 << 32
"""Keys have 32 bits, like Criteo's."""
MIN_SCALED_ROWS = 1_000
"""Tables with at most this many rows keep their size when a preset is scaled down."""


@dataclass(frozen=True, kw_only=True)
class SyntheticTable:
    """One table and the feature of the same name that looks up in it."""

    name: str
    num_embeddings: int
    """Number N of items, that is of raw ids before preparation drops rare ones."""
    zipf: float = 1.1
    """Exponent of the popularity law; 0 is uniform, 1 to 1.3 is usual in click logs."""
    missing: float = 0.0
    """Share of rows without a value, in [0, 1); for one_hot tables."""
    drift: float = 0.0
    """Share of ranks, in [0, 1], whose item has changed by the last row. Ranks k and k + N/2 exchange their items once,
    at time hash(k) / drift (time is 0 to 1 over all rows): a popular item falls into the tail, and another rises."""
    kind: FeatureKind = "one_hot"
    mean_length: float = 5.0
    """Mean ids per row of multi_hot (Poisson) and sequence (geometric) features before the cut at max_length; may be
    0."""
    max_length: int = 50

    def __post_init__(self) -> None:
        ends = {"num_embeddings": (1, MAX_ROWS_PER_TABLE), "zipf": (0, 5), "missing": (0, 0.999), "drift": (0, 1)}
        _check("table", self, {**ends, "mean_length": (0, 10_000), "max_length": (1, 100_000)})
        if self.kind not in ("one_hot", "multi_hot", "sequence"):
            raise ValueError(f"table {self.name!r}: kind is {self.kind!r}; choose one_hot, multi_hot or sequence")


@dataclass(frozen=True, kw_only=True)
class SyntheticDense:
    """One column of counts: log(1 + count) is about normal."""

    name: str
    mean: float = 2.0
    sd: float = 1.2
    missing: float = 0.1
    """Share of rows without a value, in [0, 1)."""

    def __post_init__(self) -> None:
        _check("dense column", self, {"mean": (0, 20), "sd": (0, 20), "missing": (0, 0.999)})


def _check(what: str, given: SyntheticTable | SyntheticDense, ends: Mapping[str, tuple[float, float]]) -> None:
    """Raises ValueError if a field is outside its `ends`."""
    check_name(given.name, what=f"{what} name")
    for field, (low, high) in ends.items():
        if not low <= (value := getattr(given, field)) <= high:
            raise ValueError(f"{what} {given.name!r}: {field} is {value}; it must be from {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """A whole synthetic data set."""

    num_rows: int
    tables: tuple[SyntheticTable, ...]
    dense: tuple[SyntheticDense, ...] = ()
    name: str = "synthetic"
    seed: int = 0
    num_days: float = 7.0
    """Days from the first row to the last."""
    base_rate: float = 0.25
    """Mean label."""
    main_strength: float = 0.8
    """Standard deviation, in logits, of the part that adds up single ids: what logistic regression can learn."""
    pair_strength: float = 1.2
    """The same for products of two ids' hidden vectors: what only a model with interactions can learn."""
    dense_strength: float = 0.6
    """The same for the counts."""

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("tables is empty; a synthetic data set needs at least one table")
        names = [*(t.name for t in self.tables), *(d.name for d in self.dense)]
        if len(set(names)) != len(names):
            raise ValueError(f"names {names} repeat; tables and dense columns need names of their own")
        if self.num_rows < 1:
            raise ValueError(f"num_rows is {self.num_rows}; it must be at least 1")
        if not 0 < self.base_rate < 1:
            raise ValueError(f"base_rate is {self.base_rate}; it must be between 0 and 1")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2^64 - 1")

    @property
    def digest(self) -> str:
        """Identifies exactly these rows."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


TERABYTE_ROWS = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
)  # fmt: skip
"""Distinct ids per column of the Criteo 1TB click logs, as published with DLRM systems."""
_TERABYTE_ZIPF = (
    1.1, 1.25, 1.1, 1.4, 1.2, 1.0, 1.2, 1.6, 2.5, 1.15, 1.25, 1.15, 1.0,
    1.5, 1.35, 2.5, 1.0, 1.85, 1.0, 1.1, 1.15, 1.1, 1.2, 1.2, 2.5, 2.5,
)  # fmt: skip
"""Fitted by us to the distinct ids among 80,000 public rows; 1 for columns with 14 ids or fewer, which say nothing."""
_TERABYTE_MISSING = (
    0.04, 0, 0, 0, 0, 0, 0, 0, 0, 0.04, 0.04, 0, 0, 0.42, 0, 0.42, 0.42, 0, 0, 0.04, 0.04, 0.04, 0.42, 0, 0, 0,
)  # fmt: skip
_TERABYTE_DENSE = (
    (2.2, 1.2, 0.2), (5.2, 1.6, 0.1), (1.7, 0.9, 0.23), (3.6, 1.7, 0.26), (2.2, 1.2, 0.41), (0.5, 0.8, 0.07),
    (0.1, 0.3, 0.02), (2.2, 2.1, 0), (1.8, 1.2, 0), (0.2, 0.4, 0.07), (1.3, 0.7, 0.41), (7.6, 2.8, 0.01),
    (1.8, 0.9, 0.23),
)  # fmt: skip
"""Mean and standard deviation of log(1 + count), and share of missing values, in the same 80,000 rows."""
_CRITEO_DENSE = tuple(
    SyntheticDense(name=f"I{j}", mean=mean, sd=sd, missing=missing)
    for j, (mean, sd, missing) in enumerate(_TERABYTE_DENSE, 1)
)
AVAZU_ROWS = {
    "C1": 7, "banner_pos": 7, "site_id": 4737, "site_domain": 7745, "site_category": 26, "app_id": 8552,
    "app_domain": 559, "app_category": 36, "device_id": 2686408, "device_ip": 6729486, "device_model": 8251,
    "device_type": 5, "device_conn_type": 4, "C14": 2626, "C15": 8, "C16": 9, "C17": 435, "C18": 4, "C19": 68,
    "C20": 172, "C21": 60,
}  # fmt: skip
"""Distinct ids per column of the Avazu set, as commonly reported; no primary source was read. 9.4 million in all."""


@dataclass(frozen=True)
class _Shape:
    """The shape of a public data set."""

    tables: Sequence[tuple[str, int, float, float]]
    """Name, rows, exponent of the popularity law, share of missing values."""
    dense: tuple[SyntheticDense, ...]
    base_rate: float
    num_days: float


def _by_size(rows: Mapping[str, int]) -> list[tuple[str, int, float, float]]:
    """Gives each table a skew by its size, in the range fitted to Criteo 1TB."""
    return [
        (
            name,
            num_rows,
            1.0 if num_rows < 30 else 1.4 if num_rows < 10_000 else 1.2 if num_rows < 1_000_000 else 1.1,
            0.04 * (num_rows > 1_000_000),
        )
        for name, num_rows in rows.items()
    ]


_CRITEO_NAMES = tuple(f"C{j}" for j in range(1, 27))
_SHAPES = {
    # 26 tables of 33.8 million rows, a quarter clicks
    "criteo-kaggle": _Shape(_by_size(dict(zip(_CRITEO_NAMES, KAGGLE_ROWS, strict=True))), _CRITEO_DENSE, 0.256, 7.0),
    # 26 tables of 882 million rows, 3.2 % clicks; skews and shares of missing values are fitted to 80,000 public rows
    "criteo-terabyte": _Shape(
        list(zip(_CRITEO_NAMES, TERABYTE_ROWS, _TERABYTE_ZIPF, _TERABYTE_MISSING, strict=True)),
        _CRITEO_DENSE,
        0.032,
        24.0,
    ),
    # 21 tables of 9.4 million rows, 17 % clicks
    "avazu": _Shape(_by_size(AVAZU_ROWS), (SyntheticDense(name="hour", mean=2.3, sd=0.7, missing=0.0),), 0.17, 10.0),
}


def _made(preset: str, num_rows: int, *, scale: float = 1.0, drift: float = 0.0, **fields: Any) -> SyntheticConfig:
    """Returns the shape of a public data set.

    scale: tables of more than 1,000 rows keep this share of their rows, at least 1,000. drift: of every table.
    fields: other fields of `SyntheticConfig`.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale is {scale}; it must be above 0 and at most 1")
    shape = _SHAPES[preset]
    tables = tuple(
        SyntheticTable(
            name=column,
            num_embeddings=max(min(rows, MIN_SCALED_ROWS), round(rows * scale)),
            zipf=zipf,
            missing=missing,
            drift=drift,
        )
        for column, rows, zipf, missing in shape.tables
    )
    fields = {"name": preset, "base_rate": shape.base_rate, "num_days": shape.num_days, **fields}
    return SyntheticConfig(num_rows=num_rows, tables=tables, dense=shape.dense, **fields)


PRESETS: dict[str, Callable[..., SyntheticConfig]] = {name: partial(_made, name) for name in _SHAPES}
"""Ready-made shapes by name: functions of the number of rows, and of the options of `_made`."""
criteo_kaggle, criteo_terabyte, avazu = (PRESETS[name] for name in ("criteo-kaggle", "criteo-terabyte", "avazu"))
