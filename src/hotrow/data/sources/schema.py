"""The schema of click logs: which column is the label, which are numbers, which are ids, and what is done with them.

A user writes it as YAML (`hotrow init` writes a first version from the files), the built-in sources have theirs in
code, and `dataset.json` keeps the one that was used. This file defines and checks the fields; `columns.py` reads rows
by them, `prepare.py` acts on them. docs/prepare.md lists every field.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from zoneinfo import available_timezones

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from hotrow.base.records import MAX_COUNT, SECTION, in_words, innermost, nearest, short
from hotrow.config.load import load_yaml
from hotrow.data.cells import MISSING, WRITTEN
from hotrow.data.transforms import Transform
from hotrow.objectives.objective import LabelKind

IdType = Literal["int", "text"]
FeatureKind = Literal["one_hot", "multi_hot", "sequence"]
SplitKind = Literal["time", "random", "reference"]
SPLITS = ("train", "val", "test")
DEFAULT = "default"
"""In `tables`, the name for all tables that are not named."""

_LAG_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_zones = lru_cache(available_timezones)  # a call walks through a folder of some hundred files


class _Strict(BaseModel):
    """A record with exact types and no unknown keys; immutable."""

    model_config = SECTION


class _Column(_Strict):
    """A record about one column; a string alone means `{column: <string>}`."""

    column: str
    """Name of the column in the files: any text, even empty."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"column": value} if isinstance(value, str) else value


class LabelSpec(_Column):
    """The label: 0/1 or true/false as stored; made from other values by `positive` or `at_least`; or any number."""

    name: str | None = Field(default=None, min_length=1)
    """Its name in metrics and scores. If None, it has the column's name."""
    kind: LabelKind = "binary"
    """binary: 0 or 1. number: any finite number, for a `model.objective` that predicts numbers."""
    positive: Annotated[tuple[str | int, ...], Field(strict=False, min_length=1)] | None = None
    """Values that mean 1; every other value means 0, or, with `negative`, only the values listed there."""
    negative: Annotated[tuple[str | int, ...], Field(strict=False, min_length=1)] | None = None
    """Values that mean 0; a row with any other value, unless it is positive, is then a bad row."""
    at_least: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Numbers from this one up mean 1, smaller ones mean 0."""

    @property
    def title(self) -> str:
        return self.column if self.name is None else self.name

    @model_validator(mode="after")
    def _one_rule(self) -> LabelSpec:
        if self.positive is not None and self.at_least is not None:
            raise ValueError("give either 'positive' or 'at_least', not both")
        if self.kind == "number" and (self.positive is not None or self.at_least is not None):
            raise ValueError("kind is number, but 'positive' and 'at_least' make labels of 0 and 1; leave them out")
        if self.negative is not None:
            if self.positive is None:
                raise ValueError("'negative' needs 'positive': the values that mean 1")
            if both := [value for value in self.negative if value in self.positive]:
                raise ValueError(f"{both[0]!r} is both 'positive' and 'negative'; list each value once")
        return self


class WeightSpec(_Column):
    """How much a row counts, in training and in metrics: a finite number, 0 or more."""


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


class TimeSpec(_Column):
    """The time of an event: timestamps, dates, numbers that rise with time, or text."""

    format: str | None = None
    """strptime format of times in text. If None, they are in ISO 8601."""


class DenseSpec(_Column):
    """One numeric input; a missing value becomes 0 after the transform, as in the reference DLRM."""

    transform: str = "standardize"
    """log1p_clip0: log(1 + max(x, 0)). standardize: (x - mean) / std of the training split. identity: x. Or any other
    transform of one column that needs no options."""
    decimal: Literal[".", ","] = "."
    """The sign before the decimals of numbers in text."""
    thousands: Literal[",", ".", " ", "'"] | None = None
    """The sign between groups of digits of numbers in text. If None, digits are not grouped."""
    unit: str | None = Field(default=None, min_length=1, pattern=r"^[^\d\s.,+\-']+$")
    """Text before or after a number, such as "$", "EUR" or "%". If None, there is none."""

    @field_validator("transform")
    @classmethod
    def _of_one_column(cls, name: str) -> str:
        if Transform(name).takes(1) != ("number",) or Transform(name).makes != "number":
            raise ValueError(f"{name} is no function of one column of numbers; list it under `transforms`")
        return name

    @model_validator(mode="after")
    def _two_signs(self) -> DenseSpec:
        if self.decimal == self.thousands:
            raise ValueError(f"'decimal' and 'thousands' are both {self.decimal!r}; they need two signs")
        return self


class CategoricalSpec(_Column):
    """One feature of ids, named after its column."""

    kind: FeatureKind = "one_hot"
    """one_hot: one id per row. multi_hot: a set of ids. sequence: ids in order."""
    table: str | None = None
    """Embedding table to look up in. If None, it has the column's name. Features that name one table share it."""
    type: IdType | None = None
    """int: reads text ids as 64-bit integers, which is faster; "007" and "7.0" become 7. text: reads numbers as their
    decimal text. If None, ids are as stored, which for CSV is text."""
    separator: str | None = Field(default=None, min_length=1)
    """Text that separates ids of a multi_hot or sequence feature, or JSON_LISTS. If None, the column holds lists."""
    buckets: Annotated[tuple[float, ...], Field(strict=False, min_length=1)] | None = None
    """Rising numbers that cut a column of numbers into buckets. A bucket's id is how many of these numbers are at most
    the value. If None, the values are the ids."""

    @model_validator(mode="after")
    def _options_fit(self) -> CategoricalSpec:
        if self.separator is not None and self.kind == "one_hot":
            raise ValueError("'separator' is for kind multi_hot or sequence; this feature is one_hot")
        if self.buckets is not None and (self.kind != "one_hot" or self.type is not None):
            raise ValueError("'buckets' cut single numbers; leave out 'type' and 'kind', or 'buckets'")
        self.cut()
        return self

    def cut(self) -> Transform | None:
        """Returns the transform that cuts numbers into buckets, if ids are buckets."""
        try:
            return None if self.buckets is None else Transform("bucketize", {"boundaries": self.buckets})
        except ValueError as error:
            raise ValueError(f"buckets: {error}") from None

    @property
    def table_name(self) -> str:
        return self.column if self.table is None else self.table


class ComputedSpec(BaseModel):
    """A column that a transform computes from other columns. Fields besides these are the transform's options."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    column: str | None = None
    """The column that the transform takes, if it takes one."""
    columns: tuple[str, ...] = ()
    """The columns that it takes, in its order, if it takes several."""
    into: str
    """Name of the column that it computes, which `dense` or `categorical` list like any other."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that the transform takes, in its order."""
        return self.columns if self.column is None else (self.column,)

    def transform(self, name: str) -> Transform:
        """Returns the transform `name` with these options. Raises ValueError if it does not take them."""
        made = Transform(name, self.model_extra or {})
        if (zone := made.options.get("zone")) not in (None, WRITTEN) and zone not in _zones():
            near = nearest(zone, sorted(_zones()))
            raise ValueError(f"{name}.zone is {zone!r}{near}; it is {WRITTEN}, or a time zone such as Europe/Berlin")
        missing = made.num_columns - len(self.inputs)
        if missing > 0 or (missing < 0 and not made.takes_more) or (self.column is not None and self.columns):
            more = " or more" if made.takes_more else ""
            wanted = "`column`" if made.num_columns == 1 else f"{made.num_columns}{more} `columns`"
            raise ValueError(f"{name}: {len(self.inputs)} columns are named, but it takes {wanted}")
        return made


def _known_transform(value: dict[str, ComputedSpec]) -> dict[str, ComputedSpec]:
    if len(value) != 1:
        raise ValueError(
            f"{len(value)} transforms are in one entry; write each as an entry {{NAME: {{...}}}} of its own"
        )
    for name, spec in value.items():
        spec.transform(name)
    return value


class StatisticSpec(_Strict):
    """How often other training rows had a row's value, of a column or of several together, and a positive label."""

    columns: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Features of one id per row, by name."""
    priors: Annotated[tuple[float, ...], Field(strict=False, min_length=1)] = (1.0, 10.0, 100.0)
    """Each makes one input: this many rows of the usual rate are added to the value's rows."""
    count: bool = False
    """Whether there is one more input: the logarithm of 1 + the rows of the value."""

    @model_validator(mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        return {"columns": [value] if isinstance(value, str) else value} if isinstance(value, str | list) else value

    @model_validator(mode="after")
    def _transforms(self) -> StatisticSpec:
        for name, values in (("columns", self.columns), ("priors", self.priors)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} are {list(values)}; list each once")
        for prior in self.priors:
            Transform("target_stat", {"prior": prior})
        return self

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms that make the inputs from the value's rows, its positives, all rows and all positives, or from
        the first of these."""
        counts = (Transform("log1p_clip0"),) if self.count else ()
        return (*(Transform("target_stat", {"prior": prior}) for prior in self.priors), *counts)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that it makes."""
        kinds = (*(f"prior {prior:g}" for prior in self.priors), *(["count"] if self.count else []))
        return tuple(f"{' x '.join(self.columns)} ({kind})" for kind in kinds)


def _a_lag(value: str) -> str:
    if re.fullmatch("[1-9][0-9]{0,5}[smhdw]", value) is None:
        raise ValueError(f"{value!r} is not a whole number from 1 to 999999 and s, m, h, d or w, such as 1d")
    return value


class ExpireSpec(_Strict):
    """When an id loses its row, in a chain of days."""

    unused_days: int = Field(ge=1, le=MAX_COUNT)
    """An id loses its row when no training row of this many newest days has it."""


class TableSpec(_Strict):
    """How the raw ids of one table become rows."""

    min_count: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Ids seen fewer times in the training split share row 0."""
    hash_cap: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Integer ids become id mod hash_cap (text: 64-bit hash mod hash_cap) before counting. If None, ids are
    exact."""
    expire: ExpireSpec | None = None
    """When ids lose their rows in a chain of days. If None, they keep them for life."""


class SplitSpec(_Strict):
    """How rows are split into train, val and test."""

    kind: SplitKind | None = None
    """time: oldest rows train. random: by hash of (seed, row number). reference: the source's published split.
    If None, it is reference if the source has one, else time if there is a time column, else random."""
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Shares of train, val and test for time and random; their sum is 1."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random split."""

    @model_validator(mode="after")
    def _sum(self) -> SplitSpec:
        if min(self.fractions) < 0 or abs(sum(self.fractions) - 1) > 1e-6 or self.fractions[0] == 0:
            raise ValueError(
                f"fractions {list(self.fractions)} must be [train, val, test], none negative, train above 0, "
                "with sum 1, e.g. [0.8, 0.1, 0.1]"
            )
        return self


class CsvSpec(_Strict):
    """How text files are split into columns."""

    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Character between columns. If None, it is found from the first lines."""
    column_names: tuple[str, ...] | None = None
    """Column names for files without a header line. If None, the first line has them."""
    null_values: tuple[str, ...] = MISSING
    """Texts that mean "missing", in files of every format and in frames."""


class Schema(_Strict):
    """Everything that preparation needs to know about tabular logs; docs/prepare.md has an example."""

    version: Literal[1] = 1
    labels: Annotated[tuple[LabelSpec, ...], BeforeValidator(_listed), Field(alias="label", min_length=1)]
    """The labels that a model predicts: one, or a list of several."""
    weight: WeightSpec | None = None
    """The column of sample weights. If None, every row counts 1."""
    time: TimeSpec | None = None
    dense: tuple[DenseSpec, ...] = ()
    categorical: tuple[CategoricalSpec, ...] = Field(min_length=1)
    at_serving: dict[str, int | float | str] = {}
    """What a column counts as in all rows to score, which need not have it. Training and evaluation see it as it is."""
    transforms: tuple[Annotated[dict[str, ComputedSpec], AfterValidator(_known_transform)], ...] = ()
    """Columns that are computed from columns: mappings from a transform's name to what it computes from stored columns,
    and from columns that earlier entries compute."""
    statistics: tuple[StatisticSpec, ...] = ()
    """Inputs besides `dense` and `categorical`: the label's statistics by value."""
    statistics_by: str | None = None
    """Which training rows a training row sees in its statistics. time: rows of strictly earlier times. rows: rows of
    other folds, which are drawn by row, or by moment if rows have a time. The name of a feature: rows of other folds,
    which are drawn by its values. If None, it is time if the schema has one, else rows."""
    statistics_lag: Annotated[str, AfterValidator(_a_lag)] | None = None
    """How much older, such as 1d or 6h, rows must be to be seen in the statistics of time: training rows see those that
    train, other rows those of every split. If None, rows that do not train see the training rows."""
    tables: dict[str, TableSpec] = {}
    """Options of tables by name; tables that are not listed have the defaults."""
    split: SplitSpec = SplitSpec()
    csv: CsvSpec = CsvSpec()
    odd_share: float = Field(default=0.001, ge=0, le=1)
    """A cell that is not of its column's kind is missing, and a row without a readable time is left out, if a column
    has no more of them than this share of the rows; in small data see `chunk.most_odd`. 0: the first is an error."""
    licence: str = ""
    """Note about the licence of the data, kept in dataset.json."""

    @model_validator(mode="after")
    def _fits_together(self) -> Schema:
        for kind, names in (("dense", self.dense_names), ("categorical", self.feature_names)):
            if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
                raise ValueError(f"{kind} lists column {repeated[0]!r} twice; list each column once")
            if told := [name for name in self.label_names if name in names]:
                raise ValueError(
                    f"{kind} lists {told[0]!r}, which is the label: the model would see the answer; remove it"
                )
        titles = [spec.title for spec in self.labels]
        if repeated := [title for title in titles if titles.count(title) > 1]:
            raise ValueError(f"label: two labels are called {repeated[0]!r}; give each a `name` of its own")
        if self.weight_names and self.weight_names[0] in self.label_names:
            raise ValueError(
                f"weight is {self.weight_names[0]!r}, which is the label; name another column, or leave it out"
            )
        others = {*self.dense_inputs, *self.feature_names, *self.weight_names}
        if taken := [title for title in titles if title in others]:
            raise ValueError(
                f"label: a label is called {taken[0]!r}, as another column of the dataset is; give it another `name`"
            )
        if self.split.kind == "time" and self.time is None:
            raise ValueError("split.kind is 'time', but no time column is named; name one under 'time', or use random")
        if unknown := sorted(set(self.tables) - {*self.table_names, DEFAULT}):
            raise ValueError(
                f"tables lists {unknown[0]!r}, which no feature uses{nearest(unknown[0], self.table_names)}"
            )
        return self

    @model_validator(mode="after")
    def _computed_fit(self) -> Schema:
        made = [(spec, spec.transform(name)) for entry in self.transforms for name, spec in entry.items()]
        into, taken = [spec.into for spec, _ in made], [column for spec, _ in made for column in spec.inputs]
        taken_as = [
            use for spec, transform in made for use in zip(spec.inputs, transform.takes(len(spec.inputs)), strict=True)
        ]
        stored = set(self.target_names)
        numbers = {*self.dense_names, *(c.column for c in self.categorical if c.buckets is not None)}
        numbers |= {column for column, kind in taken_as if kind == "number"}
        lists = {c.column for c in self.categorical if c.kind != "one_hot"}
        lists |= {spec.into for spec, transform in made if transform.makes == "list"}
        single = {*numbers, *self.feature_names, *into} - lists
        for i, (spec, transform) in enumerate(made):
            if spec.into in (*stored, *spec.inputs) or into.count(spec.into) > 1:
                raise ValueError(
                    f"transforms: into {spec.into!r} names two columns, a computed one and another; rename it"
                )
            if later := [column for column in spec.inputs if column in into[i:]]:
                raise ValueError(
                    f"transforms: {spec.into!r} is computed from {later[0]!r}, which a later entry computes; list that "
                    "entry first, and if it needs this one, remove one of the two"
                )
            if told := [name for name in self.label_names if name in spec.inputs]:
                raise ValueError(
                    f"transforms: {spec.into!r} is computed from {told[0]!r}, which is the label: the model "
                    "would see the answer; remove it"
                )
            if spec.into not in (*self.dense_names, *self.feature_names, *taken):
                raise ValueError(f"transforms: no input is {spec.into!r}; list it under categorical or dense")
            if transform.makes == "id" and spec.into in numbers:
                raise ValueError(
                    f"transforms: {transform.name} makes {spec.into!r}, which is an id and no number; list it under "
                    "categorical alone, without `buckets`"
                )
            listed = [c.kind for c in self.categorical if c.column == spec.into]
            if transform.makes == "list" and (spec.into in numbers or "one_hot" in listed):
                raise ValueError(
                    f"transforms: {transform.name} makes {spec.into!r}, which is a list of ids; list it under "
                    "categorical alone, with `kind: sequence` or `multi_hot`"
                )
            for column, kind in zip(spec.inputs, transform.takes(len(spec.inputs)), strict=True):
                if kind == "id" and column in lists:
                    raise ValueError(
                        f"transforms: {transform.name} takes columns of one id per row, but {column!r} is a list; "
                        "leave it out"
                    )
                if kind == "list" and column in single:
                    raise ValueError(
                        f"transforms: {transform.name} takes a list of ids, but {column!r} has one value per row; name "
                        "a column of lists, or list it under categorical with `kind: sequence`"
                    )
        if unknown := [name for name in self.at_serving if name not in self.input_names]:
            raise ValueError(f"at_serving: no input is made of {unknown[0]!r}{nearest(unknown[0], self.input_names)}")
        self._lists_fit()
        return self

    def _lists_fit(self) -> None:
        """Raises ValueError if a computed list is to be read in another way than the list that it is part of."""
        of_name, sources = {feature.column: feature for feature in self.categorical}, self._list_sources
        for name, feature in of_name.items():
            source = of_name.get(sources.get(name, name), feature)
            for field in ("type", "separator"):
                own = getattr(feature, field)
                if own is not None and own != getattr(source, field):
                    raise ValueError(
                        f"categorical: {field} of {name!r} is {own!r}, but it holds ids of {source.column!r}, which "
                        f"says how they are read; leave out {field} of {name!r}"
                    )

    @model_validator(mode="after")
    def _statistics_fit(self) -> Schema:
        single = dict.fromkeys(feature.column for feature in self.categorical if feature.kind == "one_hot")
        for spec in self.statistics:
            for name in spec.columns:
                if name not in single:
                    raise ValueError(
                        f"statistics: {name!r} is no feature of one id per row{nearest(name, single)}; list it under "
                        "categorical, a column of numbers with `buckets`"
                    )
        if repeated := sorted(name for name, count in Counter(self.dense_inputs).items() if count > 1):
            raise ValueError(f"statistics: two inputs are called {repeated[0]!r}; list each statistic once")
        if self.statistics and self.label.kind != "binary":
            raise ValueError(f"statistics count positive labels, but label.kind is {self.label.kind!r}; remove them")
        by_time = self.statistics_rule == "time"
        if by_time and self.statistics_by is not None and self.time is None:
            raise ValueError("statistics_by is 'time', but the schema has no time; name its column under time")
        if not by_time and self.statistics_rule not in ("rows", *single):
            known = ", ".join(("time", "rows", *single))
            raise ValueError(f"statistics_by is {self.statistics_by!r}; it is one of {known}")
        if self.statistics_lag is not None and not (by_time and self.statistics):
            what = "no time" if self.time is None else "statistics by folds" if self.statistics else "no statistics"
            raise ValueError(
                f"statistics_lag is {self.statistics_lag!r}, but the schema has {what}; add it or leave out the lag"
            )
        return self

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Columns of numeric inputs, in order."""
        return tuple(d.column for d in self.dense)

    @property
    def dense_inputs(self) -> tuple[str, ...]:
        """All numeric inputs as a dataset stores them: the dense columns, then the statistics."""
        return self.dense_names + tuple(name for spec in self.statistics for name in spec.inputs)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Columns of ids, in order."""
        return tuple(c.column for c in self.categorical)

    @property
    def statistics_rule(self) -> str:
        """`statistics_by`, or what it stands for."""
        return self.statistics_by or ("rows" if self.time is None else "time")

    @property
    def statistics_lag_s(self) -> int | None:
        """`statistics_lag` in seconds."""
        lag = self.statistics_lag
        return None if lag is None else int(lag[:-1]) * _LAG_UNITS_S[lag[-1]]

    @property
    def table_names(self) -> tuple[str, ...]:
        """Tables, in order of their first feature."""
        return tuple(dict.fromkeys(c.table_name for c in self.categorical))

    @property
    def computed(self) -> dict[str, tuple[Transform, tuple[str, ...]]]:
        """By the name of each computed column: the transform, and the columns that it takes."""
        specs = [(name, spec) for entry in self.transforms for name, spec in entry.items()]
        return {spec.into: (spec.transform(name), spec.inputs) for name, spec in specs}

    @property
    def _list_sources(self) -> dict[str, str]:
        """By the name of each computed list: the stored column whose ids it holds."""
        found: dict[str, str] = {}
        for name, (transform, (first, *_)) in self.computed.items():
            if transform.makes == "list":
                found[name] = found.get(first, first)
        return found

    @property
    def id_columns(self) -> tuple[CategoricalSpec, ...]:
        """How columns of ids are read: the features, then columns whose ids transforms take.

        A computed list has the ids of a stored one: they are read as the stored column says, or if it is not listed, as
        the computed one does.
        """
        found = {feature.column: feature for feature in self.categorical}
        for transform, names in self.computed.values():
            for name, kind in zip(names, transform.takes(len(names)), strict=True):
                if kind != "number" and name not in found:
                    found[name] = CategoricalSpec(column=name, kind="sequence" if kind == "list" else "one_hot")
        sources, read = self._list_sources, dict[str, dict[str, Any]]()
        for feature in sorted(self.categorical, key=lambda feature: feature.column in sources):
            source = sources.get(feature.column, feature.column)
            read.setdefault(source, {"type": feature.type, "separator": feature.separator})
        return tuple(spec.model_copy(update=read.get(sources.get(name, name), {})) for name, spec in found.items())

    @property
    def input_names(self) -> tuple[str, ...]:
        """Every column of the rows that inputs are made of, once: dense, categorical, what transforms take."""
        computed = self.computed
        taken = [column for _, columns in computed.values() for column in columns]
        return tuple(dict.fromkeys(n for n in (*self.dense_names, *self.feature_names, *taken) if n not in computed))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Every column to read, once: label, weight, time, inputs."""
        return tuple(dict.fromkeys((*self.target_names, *self.input_names)))

    @property
    def label(self) -> LabelSpec:
        """The first label, of which `statistics` are taken."""
        return self.labels[0]

    @property
    def label_names(self) -> tuple[str, ...]:
        """The columns of the labels, once each."""
        return tuple(dict.fromkeys(spec.column for spec in self.labels))

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The column of weights, if there is one."""
        return () if self.weight is None else (self.weight.column,)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The columns of label, weight and time."""
        return (*self.label_names, *self.weight_names, *(() if self.time is None else (self.time.column,)))

    @property
    def missing(self) -> tuple[str, ...]:
        """Texts that mean a missing value in every format."""
        return self.csv.null_values

    def table(self, name: str) -> TableSpec:
        """Returns the options of a table: its own, else those of `default`."""
        return self.tables.get(name, self.tables.get(DEFAULT, TableSpec()))

    def features_of(self, table: str) -> tuple[str, ...]:
        """Returns the features that look up `table`, in order."""
        return self._features.get(table, ())

    @cached_property
    def _features(self) -> dict[str, tuple[str, ...]]:
        found = dict[str, tuple[str, ...]]()
        for c in self.categorical:
            found[c.table_name] = (*found.get(c.table_name, ()), c.column)
        return found

    def with_options(
        self,
        *,
        split: str | None = None,
        fractions: Sequence[float] | None = None,
        seed: int | None = None,
        min_count: int | None = None,
        hash_cap: int | None = None,
    ) -> Schema:
        """Returns this schema with another split, and `min_count` or `hash_cap` set for every table, if given."""
        for_tables = {"min_count": min_count, "hash_cap": hash_cap}
        for_split = {"kind": split, "fractions": None if fractions is None else list(fractions), "seed": seed}
        value = self.to_json()
        value["split"] |= {k: v for k, v in for_split.items() if v is not None}
        changed = {k: v for k, v in for_tables.items() if v is not None}
        if changed:
            value["tables"] = {name: self.table(name).model_dump() | changed for name in self.table_names}
        return parse_schema(value, where="options")

    def with_defaults(self) -> Schema:
        """Returns this schema with the defaults of `fit`: statistics of every feature of one id per row, and no rows
        for ids seen once, which could only learn that row's label."""
        single = [[c.column] for c in self.categorical if c.kind == "one_hot"]
        counted = single if self.label.kind == "binary" else []
        value = self.to_json() | {"tables": {DEFAULT: {"min_count": 2}}, "statistics": counted}
        return parse_schema(value, where="defaults")

    def to_json(self) -> dict[str, Any]:
        """Returns the schema as JSON-ready values; `parse_schema` reads it."""
        value = self.model_dump(mode="json", by_alias=True)
        value["label"] = value["label"] if len(self.labels) > 1 else value["label"][0]
        return value


def parse_schema(value: Any, *, where: str) -> Schema:
    """Returns the schema in parsed YAML or JSON. Every error begins with `where` (a file name).

    Raises ValueError naming the field, the value got, what is allowed and, for an unknown key, the nearest known one.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a schema is a mapping with at least 'label' and 'categorical'; got {short(value)}")
    try:
        return _checked(json.dumps(value, default=str))
    except ValidationError as error:
        faults = _explained(error, where)
        several = isinstance(value.get("label"), list)
        raise ValueError(faults if several else faults.replace("label[0]", "label")) from None


@lru_cache(maxsize=16)
def _checked(text: str) -> Schema:
    """The schema in a JSON text. It is never altered, so a run whose parts each read it checks it once."""
    # JSON mode: strict about scalars, while a list may stand for a tuple.
    return Schema.model_validate_json(text)


def check_options(**options: Any) -> SplitSpec:
    """Returns the split that options of `Schema.with_options` ask for. Raises ValueError if no schema can take them."""
    any_schema = {"label": "label", "time": "time", "categorical": ["id"]}
    return parse_schema(any_schema, where="options").with_options(**options).split


def load_schema(path: Path | str) -> Schema:
    """Reads a schema. Raises ValueError naming file and line if the file is not YAML, else as `parse_schema`."""
    return parse_schema(load_yaml(path, cure="`hotrow init PATHS` writes a schema from your logs"), where=str(path))


Place: TypeAlias = tuple[int | str, ...]
"""The path of a field, such as ("categorical", 2, "kind")."""


def _explained(error: ValidationError, where: str) -> str:
    """Returns the faults, one per line."""
    lines = []
    for fault in innermost(error.errors()):
        path = _path(fault["loc"])
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = _fields_at(fault["loc"][:-1])
            lines.append(f"unknown key {path!r}{nearest(str(fault['loc'][-1]), known)}; known: {', '.join(known)}")
        elif fault["type"] == "json_invalid":
            lines.append("a name or text in it is not valid Unicode; write it in UTF-8")
        elif fault["type"] == "missing":
            lines.append(f"{path} is missing; add it")
        elif fault["type"] == "value_error":
            lines.append(f"{path}: {fault['ctx']['error']}" if path else str(fault["ctx"]["error"]))
        else:
            lines.append(f"{path or 'a name'} is {short(fault['input'])}: {in_words(fault)}")
    return "\n".join(f"{where}: {line}" for line in dict.fromkeys(lines))


def _path(loc: Place) -> str:
    """Returns "categorical[2].kind" for ('categorical', 2, 'kind')."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


SECTIONS: dict[str, type[BaseModel]] = {
    "label": LabelSpec,
    "weight": WeightSpec,
    "time": TimeSpec,
    "dense": DenseSpec,
    "categorical": CategoricalSpec,
    "transforms": ComputedSpec,
    "statistics": StatisticSpec,
    "tables": TableSpec,
    "expire": ExpireSpec,
    "split": SplitSpec,
    "csv": CsvSpec,
}


def _fields_at(loc: Place) -> list[str]:
    section = "expire" if loc[:1] == ("tables",) and loc[2:] == ("expire",) else str(loc[0]) if loc else ""
    model = SECTIONS.get(section, Schema)
    return [field.alias or name for name, field in model.model_fields.items()]
