"""Transforms against their formulas and in the forms that files keep; moments against exact fractions."""

import math
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data.prepare.moments import Moments
from hotrow.data.sources.schema import parse_schema
from hotrow.data.transforms import Transform, fitted, is_fitted, names
from loops import looped

RAW = np.array([-5, 0, 3, np.nan, 1e6])
SCHEMA: dict[str, Any] = {"label": "click", "dense": ["age"], "categorical": ["user"]}


def test_each_transform_against_its_formula() -> None:
    log = Transform("log1p_clip0")(RAW)
    np.testing.assert_allclose(log, np.log(np.array([0, 0, 3, np.nan, 1e6]) + 1), rtol=1e-15)
    np.testing.assert_array_equal(Transform("identity")(RAW), RAW)
    standardized = Transform("standardize", {"mean": 1.0, "std": 2.0})(RAW)
    np.testing.assert_array_equal(standardized, [-3, -0.5, 1, np.nan, 499999.5])


@given(st.lists(st.floats(-1e12, 1e12) | st.just(math.nan) | st.integers(-5, 30).map(float), min_size=1))
def test_transforms_of_numbers_against_plain_python(values: list[float]) -> None:
    def wanted(name: str, formula, **options: float) -> None:
        truth = [x if math.isnan(x) and name != "fill" else formula(x) for x in values]
        np.testing.assert_array_equal(Transform(name, options)(np.array(values)), truth)

    wanted("clip", lambda x: min(max(x, -1.5), 20), low=-1.5, high=20)
    wanted("clip", lambda x: max(x, 3), low=3)
    wanted("clip", lambda x: min(x, 3), high=3)
    wanted("fill", lambda x: -7 if math.isnan(x) else x, value=-7)


LISTS = st.lists(st.lists(st.integers(0, 6), max_size=9))


def as_lists(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([i for each in lists for i in each], np.uint64)
    return ids, np.cumsum([0, *map(len, lists)])


@given(LISTS, st.integers(1, 5))
def test_sequences_against_plain_python(lists: list[list[int]], length: int) -> None:
    ids, splits = as_lists(lists)

    def wanted(truth, **options: Any) -> None:
        kept = Transform("sequence", options)((ids, splits))
        found = [ids[i:j][kept[i:j]].tolist() for i, j in pairwise(splits)]
        assert found == [truth(each) for each in lists]

    def once(ids: list[int]) -> list[int]:
        return list(dict.fromkeys(ids))

    def once_late(ids: list[int]) -> list[int]:
        return once(ids[::-1])[::-1]

    wanted(lambda ids: ids[-length:], last=length)
    wanted(lambda ids: ids[:length], first=length)
    wanted(once_late, dedup=True)
    wanted(lambda ids: once_late(ids)[-length:], last=length, dedup=True)
    wanted(lambda ids: once(ids)[:length], first=length, dedup=True)


@given(LISTS)
def test_combo_count_against_plain_python(lists: list[list[int]]) -> None:
    ids = [row % 7 for row in range(len(lists))]
    found = Transform("combo_count")(as_lists(lists), np.array(ids, np.uint64))
    assert found.tolist() == [each.count(i) for each, i in zip(lists, ids, strict=True)]


TIMES = st.integers(-(10**10), 10**10)
OFFSETS = st.sampled_from([0, 1, -8, 5.5, 14])


@given(st.lists(TIMES, min_size=1), OFFSETS)
def test_parts_of_times_against_datetime(seconds: list[int], offset: float) -> None:
    local = [datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=s, hours=offset) for s in seconds]
    x = np.array([*seconds, np.nan], np.float64)
    options = {"utc_offset_hours": offset} if offset else {}
    np.testing.assert_array_equal(Transform("hour", options)(x), [*(t.hour for t in local), np.nan])
    np.testing.assert_array_equal(Transform("weekday", options)(x), [*(t.weekday() for t in local), np.nan])


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1))
def test_age_is_a_difference(pairs: list[tuple[int, int]]) -> None:
    later, earlier = np.array([*pairs, (np.nan, 1), (1, np.nan)], np.float64).T
    np.testing.assert_array_equal(Transform("age")(later, earlier), [*(a - b for a, b in pairs), np.nan, np.nan])


@looped(
    ("transform", "text"),
    [
        (Transform("log1p_clip0"), "log1p_clip0"),
        (Transform("identity"), "identity"),
        (Transform("standardize", {"mean": -0.1, "std": 1e-30}), "standardize(mean=-0.1, std=1e-30)"),
        (Transform("clip", {"low": 1}), "clip(low=1.0, high=None)"),
    ],
)
def test_the_recorded_form_reads_back(transform: Transform, text: str) -> None:
    assert str(transform) == text
    assert Transform.parse(text) == transform


@looped(
    "text",
    [
        "sqrt", "", "identity(", "identity(1)", "a.b", "standardize(mean=x)", "standardize(mean=1, med=2)", "0",
        "standardize(std=0)", "standardize(mean=nan)", "standardize(**{})", "identity" + "(" * 1000, "x\0",
    ],
)  # fmt: skip
def test_an_unknown_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="prepare the data set again"):
        Transform.parse(text)


def test_only_standardize_is_fitted() -> None:
    assert [name for name in names() if is_fitted(name)] == ["standardize"]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50), st.randoms())
def test_moments_against_exact_fractions(values: list[float], random) -> None:
    exact = [Fraction(v) for v in values]
    mean = sum(exact, Fraction(0)) / len(exact)
    variance = sum(((v - mean) ** 2 for v in exact), Fraction(0)) / len(exact)
    random.shuffle(values)
    moments, cut = Moments(), random.randrange(len(values))
    moments.add(np.array(values[:cut], dtype=np.float32))
    later = Moments()
    later.add(np.array([*values[cut:], np.nan], dtype=np.float32))
    moments.merge(later)
    options = fitted("standardize", moments).options
    assert options["mean"] == float(mean)
    assert options["std"] == pytest.approx(float(variance) ** 0.5 or 1.0, rel=1e-12)


def test_no_values_give_a_harmless_transform() -> None:
    assert fitted("standardize", Moments()) == Transform("standardize", {"mean": 0.0, "std": 1.0})


def computed(name: str = "log1p_clip0", **fields: Any) -> dict[str, Any]:
    entry = {name: {"column": "age", "into": "log_age", **fields}}
    return {**SCHEMA, "dense": ["log_age"], "transforms": [entry]}


def chain(*made: tuple[str, str, str], **changes: Any) -> dict[str, Any]:
    options = {"hash": {"buckets": 9}, "fill": {"value": 0}, "clip": {"low": 0}}
    transforms = [{name: {"column": column, "into": into, **options[name]}} for name, column, into in made]
    return {**SCHEMA, "dense": ["y"] if len(made) > 1 else [], "transforms": transforms, **changes}


def of_list(*, into: Any = "made", column: str = "seen", **options: Any) -> dict[str, Any]:
    """A schema with a part of a list of ids. into: what is listed of it."""
    name = into["column"] if isinstance(into, dict) else into
    options = options or {"last": 3}
    made = {"column": column, "into": name, **options}
    return {**SCHEMA, "categorical": ["user", into], "transforms": [{"sequence": made}]}


MADE = {"column": "made", "kind": "sequence"}


def test_a_part_of_a_list_is_read_as_the_list() -> None:
    schema = parse_schema(of_list(into={**MADE, "separator": "|", "type": "int"}), where="s.yaml")
    assert {spec.column: (spec.kind, spec.separator, spec.type) for spec in schema.id_columns} == {
        "user": ("one_hot", None, None), "made": ("sequence", "|", "int"), "seen": ("sequence", "|", "int"),
    }  # fmt: skip
    assert schema.column_names == ("click", "age", "user", "seen")
    both = {**of_list(into=MADE), "categorical": [MADE, {"column": "seen", "kind": "multi_hot", "separator": ";"}]}
    assert [spec.separator for spec in parse_schema(both, where="s.yaml").id_columns] == [";", ";"]


def test_a_transform_takes_what_an_earlier_one_computes() -> None:
    schema = parse_schema(chain(("fill", "age", "x"), ("clip", "x", "y")), where="s.yaml")
    assert schema.column_names == ("click", "user", "age")
    assert list(schema.computed) == ["x", "y"]


def test_a_schema_computes_columns() -> None:
    schema = parse_schema(computed(), where="s.yaml")
    assert schema.computed == {"log_age": (Transform("log1p_clip0"), ("age",))}
    assert schema.column_names == ("click", "user", "age")
    assert parse_schema(schema.to_json(), where="again") == schema
    assert parse_schema(SCHEMA, where="s.yaml").to_json()["transforms"] == []


@looped(
    ("schema", "fields"),
    [
        (computed("log1p_clip"), ["transforms[0]", "log1p_clip", "did you mean 'log1p_clip0'", "standardize"]),
        (computed(base=2), ["transforms[0]", "log1p_clip0.base", "options: none"]),
        (computed("standardize", std=0), ["transforms[0]", "standardize.std is 0"]),
        (computed("standardize", mean="1"), ["transforms[0]", "standardize.mean is '1'", "a number"]),
        (computed("standardize", mean=float("inf")), ["transforms[0]", "standardize.mean", "a finite number"]),
        (computed(into="click"), ["transforms", "'click'", "rename"]),
        (computed(into="age"), ["transforms", "'age'", "rename"]),
        (computed(column="click"), ["transforms", "'click'", "label"]),
        (computed(into="other"), ["transforms", "'other'", "categorical or dense"]),
        (computed(columns=["age", "user"], column=None), ["transforms[0]", "log1p_clip0", "2 columns", "`column`"]),
        (computed(column=5), ["transforms[0].log1p_clip0.column is 5"]),
        (computed(columns=["a"]), ["transforms[0]", "`column`"]),
        ({**SCHEMA, "transforms": [{}]}, ["transforms[0]", "0 transforms"]),
        ({**SCHEMA, "transforms": [{"log1p_clip0": {"column": "age"}}]}, ["transforms[0].log1p_clip0.into", "missing"]),
        ({**SCHEMA, "transforms": {"log1p_clip0": {}}}, ["transforms is", "a list"]),
        ({**SCHEMA, "dense": [{"column": "age", "transform": "sqrt"}]}, ["dense[0].transform", "'sqrt'", "identity"]),
        ({**SCHEMA, "dense": [{"column": "age", "transform": "age"}]}, ["dense[0].transform", "age", "`transforms`"]),
        ({**SCHEMA, "dense": [{"column": "age", "transform": "hash"}]}, ["dense[0].transform", "hash.buckets"]),
        (
            {**SCHEMA, "dense": [{"column": "age", "transform": "fill"}]},
            ["dense[0].transform", "fill.value", "missing"],
        ),
        (computed("clip"), ["transforms[0]", "clip.low", "high"]),
        (computed("clip", low=2, high=1), ["transforms[0]", "clip.low is 2", "1.0"]),
        (computed("fill"), ["transforms[0]", "fill.value", "missing"]),
        (computed("hour", utc_offset_hours="CET"), ["transforms[0]", "hour.utc_offset_hours is 'CET'", "a number"]),
        (computed("age"), ["transforms[0]", "age", "1 columns", "2 `columns`"]),
        (computed("cross"), ["transforms[0]", "cross", "1 columns", "2 or more `columns`"]),
        (computed("hash", buckets=0), ["transforms[0]", "hash.buckets is 0"]),
        (computed("hash", buckets=9, seed=-1), ["transforms[0]", "hash.seed is -1"]),
        (computed("hash", buckets=9), ["transforms", "hash", "'log_age'", "categorical"]),
        (chain(("hash", "user", "x"), ("clip", "x", "y")), ["transforms", "hash", "'x'", "categorical"]),
        (chain(("fill", "y", "x"), ("clip", "x", "y")), ["transforms", "'x'", "'y'", "later", "first", "remove"]),
        (chain(("fill", "y", "x"), ("clip", "age", "y")), ["transforms", "'x'", "'y'", "later", "first"]),
        (chain(("fill", "click", "x"), ("clip", "x", "y")), ["transforms", "'x'", "'click'", "label"]),
        (of_list(into=MADE, first=2, last=2), ["transforms[0]", "sequence.last is 2", "first is 2"]),
        (of_list(into=MADE, dedup=False), ["transforms[0]", "sequence.last is None", "dedup"]),
        (of_list(into=MADE, last=0), ["transforms[0]", "sequence.last is 0", "at least 1"]),
        (of_list(into=MADE, last=2.5), ["transforms[0]", "sequence.last is", "a whole number"]),
        (of_list(into="made"), ["transforms", "sequence", "'made'", "`kind: sequence`"]),
        ({**of_list(into=MADE), "dense": ["made"]}, ["transforms", "sequence", "'made'", "under categorical alone"]),
        (
            of_list(into=MADE, column="user"),
            ["transforms", "sequence", "'user'", "one value per row", "column of lists"],
        ),
        (of_list(into=MADE, column="age"), ["transforms", "sequence", "'age'", "one value per row"]),
        (
            {**of_list(into=MADE), "categorical": [{**MADE, "separator": "|"}, {"column": "seen", "kind": "sequence"}]},
            ["separator", "'made'", "'seen'", "leave out"],
        ),
        (
            computed("combo_count", column=None, columns=["age", "user"], into="times"),
            ["transforms", "no input is 'times'"],
        ),
        (
            {**computed("combo_count", column=None, columns=["age", "user"]), "dense": ["log_age", "age"]},
            ["transforms", "combo_count", "'age'", "one value per row"],
        ),
        (
            {
                **SCHEMA,
                "categorical": ["x"],
                "transforms": [
                    {"sequence": {"column": "seen", "last": 2, "into": "made"}},
                    {"hash": {"column": "made", "buckets": 9, "into": "x"}},
                ],
            },
            ["transforms", "hash", "'made'", "list"],
        ),
        (
            chain(("hash", "tags", "x"), categorical=["x", {"column": "tags", "kind": "multi_hot"}]),
            ["transforms", "hash", "'tags'", "list"],
        ),
    ],
)
def test_faults_of_computed_columns_are_named(schema: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # several parts of one message
        parse_schema(schema, where="s.yaml")
    assert str(caught.value).startswith("s.yaml: ")
    for field in fields:
        assert field in str(caught.value)
