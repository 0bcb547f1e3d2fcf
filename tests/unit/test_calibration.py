"""Calibration against scikit-learn: Platt's scaling, isotonic regression, and the rate of left-out negatives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from hotrow.config.load import make_config
from hotrow.objectives.calibration import Calibration, Method, calibrated, fitted, for_all_negatives
from loops import looped


def clicks(num_rows: int, *, seed: int = 0, decimals: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are too far apart and too high, and labels; with few decimals many logits are equal."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(-2, 1, num_rows)
    return (1.7 * truth + 1.5).round(decimals).astype(np.float32), rng.random(num_rows) < 1 / (1 + np.exp(-truth))


def rates(found: Calibration, logits: np.ndarray) -> np.ndarray:
    return torch.sigmoid(calibrated(torch.from_numpy(logits), **found.layer).double()).numpy()


@looped("decimals", [0, 8])
@looped("shift", [0.0, 50.0])
def test_platt_against_logistic_regression(decimals: int, shift: float) -> None:
    """A label t that is between 0 and 1 is two rows, of label 1 with weight t and of label 0 with weight 1 - t."""
    logits, labels = clicks(3000, decimals=decimals)
    logits += np.float32(shift)
    ones, zeros = labels.sum(), (~labels).sum()
    target = np.where(labels, (ones + 1) / (ones + 2), 1 / (zeros + 2))
    theirs = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000)
    theirs.fit(
        np.concatenate([logits, logits])[:, None].astype(np.float64) - shift,
        np.repeat([1, 0], 3000),
        sample_weight=np.concatenate([target, 1 - target]),
    )
    found = fitted("platt", logits, labels, step=1)
    assert found.slope == pytest.approx(theirs.coef_[0, 0], rel=1e-4)
    wanted = theirs.predict_proba(logits[:, None].astype(np.float64) - shift)[:, 1]
    np.testing.assert_allclose(rates(found, logits), wanted, rtol=1e-3)
    assert rates(found, logits).mean() == pytest.approx(labels.mean(), abs=1e-3)


def test_platt_is_finite_where_no_other_fit_is() -> None:
    apart = np.arange(-50, 50, dtype=np.float32)
    found = fitted("platt", apart, apart > 0, step=1)
    assert 0 < found.slope < 100 and np.isfinite(rates(found, 1000 * apart)).all()
    same = fitted("platt", np.full(100, 3.0, np.float32), np.arange(100) < 20, step=1)
    np.testing.assert_allclose(rates(same, np.full(1, 3.0, np.float32)), 0.2, atol=0.01)


def test_slope_is_taken_if_it_is_below_1_by_more_than_its_error() -> None:
    """The error is that of the inverse Hessian of slope and intercept, here of logits as they are."""
    rng, taken = np.random.default_rng(3), list[float]()
    truth = rng.normal(-2, 1, 4000) - (rng.random(4000) < 0.1) * 9  # some are sure negatives, far from the others
    labels = rng.random(4000) < 1 / (1 + np.exp(-truth))
    for times in (0.6, 1.0, 1.02, 1.05, 1.1, 1.7):
        logits = (times * (truth + 2) - 2).astype(np.float32)
        platt, found = (fitted(method, logits, labels, step=1) for method in ("platt", "slope"))
        p = rates(platt, logits)
        inputs = np.stack([logits.astype(np.float64), np.ones(4000)], 1)
        error = np.sqrt(np.linalg.inv(inputs.T @ (inputs * (p * (1 - p))[:, None]))[0, 0])
        outputs = calibrated(torch.from_numpy(logits), **found.layer).numpy()
        assert roc_auc_score(labels, outputs) == roc_auc_score(labels, logits)
        if platt.slope < 1 - error:
            taken.append(times)
            assert found.slope == platt.slope == pytest.approx(1 / times, abs=3 * error)
            given, made = (1 / (1 + np.exp(-own.astype(np.float64))) for own in (logits, outputs))
            assert made.mean() == pytest.approx(given.mean(), rel=1e-6)
            assert made[labels].mean() < given[labels].mean() and made[~labels].mean() > given[~labels].mean()
            assert "fitted to 4,000 validation rows" in found.line()
        else:
            assert np.array_equal(outputs, logits) and "changes nothing: 4,000 validation rows" in found.line()
    assert 1.7 in taken and not {0.6, 1.0} & {*taken}


@looped("clicked", [[False] * 9, [True] * 9, [k < 5 for k in range(9)]])
@looped("logits", [np.linspace(-3, 4, 9), np.arange(9) ** 3, np.zeros(9)])
def test_slope_never_turns_the_order_and_needs_both_labels(logits: np.ndarray, clicked: list[bool]) -> None:
    found = fitted("slope", logits.astype(np.float32), np.array(clicked), step=1)
    assert (found.slope, found.intercept, found.x) == (1, 0, ())


@looped(("num_rows", "decimals"), [(2, 8), (500, 0), (500, 1), (20_000, 8), (20_000, 2)])
def test_isotonic_against_sklearn(num_rows: int, decimals: int) -> None:
    logits, labels = clicks(num_rows, decimals=decimals)
    labels[:2] = [False, True]
    least = 1 / (num_rows + 2)
    theirs = IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip")
    wanted = theirs.fit(logits.astype(np.float64), labels.astype(np.float64)).predict(logits.astype(np.float64))
    found = fitted("isotonic", logits, labels, step=1)
    np.testing.assert_allclose(rates(found, logits), wanted, rtol=1e-5)
    beyond = np.array([logits.min() - 9, logits.max() + 9], np.float32)
    np.testing.assert_allclose(rates(found, beyond), [wanted.min(), wanted.max()], rtol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=30))
def test_isotonic_is_the_best_rising_function(rows: list[tuple[int, bool]]) -> None:
    """Against scikit-learn on few rows with many ties; between two fitted logits it never falls."""
    logits, labels = np.array([z for z, _ in rows], np.float32), np.array([y for _, y in rows])
    least = 1 / (len(rows) + 2)
    theirs = IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip")
    found = fitted("isotonic", logits, labels, step=1)
    wanted = theirs.fit(logits.astype(np.float64), labels.astype(np.float64)).predict(logits.astype(np.float64))
    np.testing.assert_allclose(rates(found, logits), wanted, rtol=1e-5)
    assert (np.diff(rates(found, np.linspace(-5, 5, 333, dtype=np.float32))) >= 0).all()


@looped("method", ["platt", "slope", "isotonic"])
def test_weights_count_as_rows_that_are_repeated(method: Method) -> None:
    logits, labels = clicks(2000, decimals=2)
    times = np.random.default_rng(2).integers(0, 4, 2000)
    weighted = fitted(method, logits, labels, times.astype(np.float32), step=1)
    repeated = fitted(method, np.repeat(logits, times), np.repeat(labels, times), step=1)
    least = 1 / (np.count_nonzero(times) + 2)  # which is of rows, whatever they weigh
    wanted = rates(repeated, logits)
    wanted = np.clip(wanted, least, 1 - least) if method == "isotonic" else wanted
    np.testing.assert_allclose(rates(weighted, logits), wanted, rtol=1e-5)
    assert weighted.num_rows == 2000


@looped("method", ["platt", "slope", "isotonic"])
def test_bits_depend_on_no_other_row(method: Method) -> None:
    logits, labels = clicks(4000)
    found, all_logits = fitted(method, logits, labels, step=1), torch.from_numpy(logits)
    whole = calibrated(all_logits, **found.layer)
    alone = torch.cat([calibrated(part, **found.layer) for part in all_logits.split([1, 2, 3, 64, 1000, 2930])])
    assert torch.equal(whole, alone)
    order = np.random.default_rng(1).permutation(4000)
    again = fitted(method, logits[order], labels[order], step=1)
    assert again == found if method == "isotonic" else again.slope == pytest.approx(found.slope, rel=1e-9)


def test_the_rate_among_all_negatives() -> None:
    logits = torch.linspace(-8, 8, 101)
    p, kept = torch.sigmoid(logits.double()), 0.05
    ours = torch.sigmoid(calibrated(logits, **for_all_negatives(kept)).double())
    torch.testing.assert_close(ours, p / (p + (1 - p) / kept), rtol=1e-5, atol=0)


def test_what_cannot_be_calibrated_is_refused() -> None:
    for kept in (0, 1.5, -1):
        with pytest.raises(ValueError, match=rf"calibration\.negatives_kept is {kept}; allowed: .*> 0 and <= 1"):
            make_config({"data": "d", "calibration": {"negatives_kept": kept}})
    for option, value in (("method", "platt"), ("negatives_kept", 0.5)):
        with pytest.raises(ValueError, match=rf"calibration\.{option} is .*{value}.*squared_error.*binary"):
            make_config({"data": "d", "model": {"objective": "squared_error"}, "calibration": {option: value}})
    with pytest.raises(ValueError, match=r"calibration\.method is 'plat'; allowed: platt, slope, isotonic or null"):
        make_config({"data": "d", "calibration": {"method": "plat"}})
    for x, y in (((1.0,), (1.0,)), ((1.0, 1.0), (0.0, 1.0)), ((1.0, 2.0), (0.0,))):
        with pytest.raises(ValueError, match="x must rise"):
            Calibration("isotonic", 1, 2, x=x, y=y)
