"""The transform `bucketize` against NumPy, from raw rows to a data set, to predictions and to an export."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data.prepare.prepare import Encoder, run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.data.sources.split import RandomPlan
from hotrow.data.transforms import Transform
from loops import looped

BOUNDARIES = [18, 25, 40.5]
SCHEMA: dict[str, Any] = {
    "label": "click",
    "categorical": ["user", "age_bucket"],
    "transforms": [{"bucketize": {"column": "age", "boundaries": BOUNDARIES, "into": "age_bucket"}}],
    "split": {"kind": "random"},
}


def schema_with(**options: Any) -> dict[str, Any]:
    return {**SCHEMA, "transforms": [{"bucketize": {"column": "age", "into": "age_bucket", **options}}]}


def truth(age: list[float | None]) -> list[int | None]:
    return [None if a is None else sum(b <= a for b in BOUNDARIES) for a in age]


def people(num_rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    age: list[float | None] = rng.choice([-1.0, 17.999, 18, 24, 25, 40, 40.5, 41, 1e9], num_rows).tolist()
    age[:: 7 + seed] = [None] * len(age[:: 7 + seed])
    buckets = np.array([-1 if b is None else b for b in truth(age)])
    click = (rng.random(num_rows) < np.where(buckets % 2 == 0, 0.8, 0.1)).astype(int)
    return {"click": click.tolist(), "user": rng.integers(0, 20, num_rows).tolist(), "age": age}


def ids_of(age: list[float | None]) -> np.ndarray[Any, Any]:
    """The rows that these ages use, from the counts of the training rows alone."""
    codes, found = RandomPlan(0, (0.8, 0.1, 0.1)).assign(np.arange(len(age))), truth(age)
    counted: dict[int | None, int] = {}
    for bucket, code in zip(found, codes, strict=True):
        if code == 0:
            counted[bucket] = counted.get(bucket, 0) + 1
    rank = {bucket: row for row, bucket in enumerate(sorted(counted, key=lambda b: -counted[b]), 1)}
    return np.array([rank[bucket] for bucket in found])


def test_a_stored_column_is_not_replaced(tmp_path: Path) -> None:
    """Rows to score may hold anything under its name."""
    rows = people(200, 0)
    packed = run_prepare("frame", pa.table(rows), tmp_path / "packed", schema=parse_schema(SCHEMA, where="test"))
    double = pa.table({**rows, "age_bucket": [7] * 200})
    with pytest.raises(ValueError, match=r"<frame>: column 'age_bucket' is also the `into`"):
        run_prepare("frame", double, tmp_path / "other", schema=parse_schema(SCHEMA, where="test"))
    batches = [next(Encoder.load(packed).batches(data)) for data in (pa.table(rows), double)]
    np.testing.assert_array_equal(*(batch.sparse.values for batch in batches))


def test_against_searchsorted() -> None:
    x = np.concatenate([np.random.default_rng(0).normal(25, 20, 1000), BOUNDARIES, [np.nan, np.inf, -np.inf]])
    found = Transform("bucketize", {"boundaries": BOUNDARIES})(x)
    wanted = np.digitize(x, BOUNDARIES).astype(float)
    wanted[np.isnan(x)] = np.nan
    np.testing.assert_array_equal(found, wanted)


@looped(
    ("options", "fields"),
    [
        ({"boundaries": [25, 18]}, ["bucketize.boundaries", "[25.0, 18.0]", "rising"]),
        ({"boundaries": [18, 18]}, ["bucketize.boundaries", "[18.0, 18.0]", "rising"]),
        ({"boundaries": []}, ["bucketize.boundaries", "[]", "at least one"]),
        ({"boundaries": [18, float("nan")]}, ["bucketize.boundaries.1", "finite"]),
        ({"boundaries": [float("inf")]}, ["bucketize.boundaries.0", "finite"]),
        ({"boundaries": ["18"]}, ["bucketize.boundaries.0 is '18'", "a number"]),
        ({"boundaries": 18}, ["bucketize.boundaries is '18'", "a list"]),
        ({}, ["bucketize.boundaries", "missing"]),
        ({"boundaries": [18], "boundary": [18]}, ["bucketize.boundary", "options: boundaries"]),
    ],
)
def test_bad_boundaries_are_refused_by_field(options: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # several parts of one message
        parse_schema(schema_with(**options), where="s.yaml")
    for field in ("s.yaml: transforms[0]", *fields):
        assert field in str(caught.value)


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    entry = {"bucketise": {"column": "age", "into": "age_bucket", "boundaries": [18]}}
    with pytest.raises(ValueError, match=r"transforms\[0\].*'bucketise'; did you mean 'bucketize'"):
        parse_schema({**SCHEMA, "transforms": [entry]}, where="s.yaml")


def test_boundaries_are_asked_for_in_place() -> None:
    dense = [{"column": "age", "transform": "bucketize"}]
    with pytest.raises(ValueError, match=r"dense\[0\]\.transform: bucketize\.boundaries"):
        parse_schema({**SCHEMA, "dense": dense}, where="s.yaml")
