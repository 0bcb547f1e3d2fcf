"""Transforms against their formulas and in the forms that files keep; moments against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data.prepare.moments import Moments, MomentsRecord
from hotrow.data.sources.schema import parse_schema
from hotrow.data.transforms import Transform, fitted, is_fitted, names

RAW = np.array([-5, 0, 3, np.nan, 1e6])
SCHEMA: dict[str, Any] = {"label": "click", "dense": ["age"], "categorical": ["user"]}


def test_each_transform_against_its_formula() -> None:
    log = Transform("log1p_clip0")(RAW)
    np.testing.assert_allclose(log, np.log(np.array([0, 0, 3, np.nan, 1e6]) + 1), rtol=1e-15)
    np.testing.assert_array_equal(Transform("identity")(RAW), RAW)
    standardized = Transform("standardize", {"mean": 1.0, "std": 2.0})(RAW)
    np.testing.assert_array_equal(standardized, [-3, -0.5, 1, np.nan, 499999.5])


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (Transform("log1p_clip0"), "log1p_clip0"),
        (Transform("identity"), "identity"),
        (Transform("standardize", {"mean": -0.1, "std": 1e-30}), "standardize(mean=-0.1, std=1e-30)"),
    ],
)
def test_the_recorded_form_reads_back(transform: Transform, text: str) -> None:
    assert str(transform) == text
    assert Transform.parse(text) == transform


@pytest.mark.parametrize(
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
    moments = Moments.from_record(moments.to_record())
    moments.add(np.array([*values[cut:], np.nan], dtype=np.float32))
    options = fitted("standardize", moments).options
    assert options["mean"] == float(mean)
    assert options["std"] == pytest.approx(float(variance) ** 0.5 or 1.0, rel=1e-12)


def test_no_values_give_a_harmless_transform() -> None:
    assert fitted("standardize", Moments()) == Transform("standardize", {"mean": 0.0, "std": 1.0})


@pytest.mark.parametrize("record", [(0, {"1": "3"}, {"1": "9"}), (0, {}, {"1": "9"}), (1, {"1": "3"}, {"1": "8"})])
def test_moments_that_no_numbers_have_are_refused(record: tuple[int, dict[str, str], dict[str, str]]) -> None:
    """The first two would later give a variance below 0: fewer values than their sums come from."""
    with pytest.raises(ValueError, match="no numbers can have these sums and squares"):
        MomentsRecord(*record)
    assert MomentsRecord(1, {"1": "3"}, {"1": "9"}).num_values == 1


def computed(name: str = "log1p_clip0", **fields: Any) -> dict[str, Any]:
    entry = {name: {"column": "age", "into": "log_age", **fields}}
    return {**SCHEMA, "dense": ["log_age"], "transforms": [entry]}


def test_a_schema_computes_columns() -> None:
    schema = parse_schema(computed(), where="s.yaml")
    assert schema.computed == {"log_age": (Transform("log1p_clip0"), ("age",))}
    assert schema.column_names == ("click", "user", "age")
    assert parse_schema(schema.to_json(), where="again") == schema
    assert "transforms" not in parse_schema(SCHEMA, where="s.yaml").to_json()


@pytest.mark.parametrize(
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
    ],
)
def test_faults_of_computed_columns_are_named(schema: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # several parts of one message
        parse_schema(schema, where="s.yaml")
    assert str(caught.value).startswith("s.yaml: ")
    for field in fields:
        assert field in str(caught.value)
