"""Dense transforms against their formulas, and moments against exact fractions in any order."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data.prepare.encoder import DenseTransform, Moments, MomentsRecord

RAW = np.array([-5, 0, 3, np.nan, 1e6], dtype=np.float32)


def test_each_transform_against_its_formula() -> None:
    log = DenseTransform("log1p_clip0")(RAW)
    reference = np.log(np.array([0, 0, 3, 0, 1e6], dtype=np.float32) + 1)
    assert log.dtype == np.float32
    np.testing.assert_allclose(log, reference, rtol=3e-7)
    assert DenseTransform("identity")(RAW).tolist() == [-5, 0, 3, 0, 1e6]
    assert DenseTransform("standardize", 1.0, 2.0)(RAW)[[0, 2, 3]].tolist() == [-3, 1, 0]


@pytest.mark.parametrize(
    "transform",
    [DenseTransform("log1p_clip0"), DenseTransform("identity"), DenseTransform("standardize", -0.1, 1e-30)],
)
def test_the_recorded_form_reads_back(transform: DenseTransform) -> None:
    assert DenseTransform.parse(str(transform)) == transform


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="dense transform 'sqrt' is not known"):
        DenseTransform.parse("sqrt")


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
    transform = moments.transform()
    assert transform.mean == float(mean)
    assert transform.std == pytest.approx(float(variance) ** 0.5 or 1.0, rel=1e-12)


def test_no_values_give_a_harmless_transform() -> None:
    assert Moments().transform() == DenseTransform("standardize", 0.0, 1.0)


@pytest.mark.parametrize("record", [(0, {"1": "3"}, {"1": "9"}), (0, {}, {"1": "9"}), (1, {"1": "3"}, {"1": "8"})])
def test_moments_that_no_numbers_have_are_refused(record: tuple[int, dict[str, str], dict[str, str]]) -> None:
    """The first two would later give a variance below 0: fewer values than their sums come from."""
    with pytest.raises(ValueError, match="no numbers can have these sums and squares"):
        MomentsRecord(*record)
    assert MomentsRecord(1, {"1": "3"}, {"1": "9"}).num_values == 1
