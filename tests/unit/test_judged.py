"""Scores that wait for their labels: figures against scikit-learn, several labels, and bounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from sklearn.metrics import log_loss

from hotrow.serve import judged
from hotrow.serve.judged import Judged


def test_each_of_several_labels_has_figures_of_its_own() -> None:
    rng, own = np.random.default_rng(0), Judged(["click", "buy"])
    scores = rng.random((50, 2)).astype(np.float32)
    labels = [[int(rng.integers(2)), None if k % 4 == 0 else int(rng.integers(2))] for k in range(50)]
    own.wait("a", "v", scores)
    assert own.take("a", labels) == 50
    for column, found in enumerate(own.found()):
        known = np.array([row[column] is not None for row in labels])
        y, p = np.array([row[column] for row in labels])[known].astype(int), scores[known, column].astype(float)
        assert (found.version, found.label, found.num_rows) == ("v", ["click", "buy"][column], known.sum())
        assert found.figures["ne"] == pytest.approx(log_loss(y, p) / log_loss(y, np.full(len(y), y.mean())), rel=1e-5)
        assert found.figures["calibration"] == pytest.approx(p.mean() / y.mean(), rel=1e-5)
    with pytest.raises(ValueError, match="row 0: the label is 1; send a list of 2"):
        own.wait("a", "v", scores)
        own.take("a", [1] * 50)


def test_a_sure_score_that_is_wrong_has_a_finite_entropy() -> None:
    own = Judged(["click"])
    own.wait("a", "v", np.array([0.0, 1.0, 1.0], np.float32))
    own.take("a", [1, 0, 1])
    (found,) = own.found()
    assert 1 < found.figures["ne"] < 100


def test_what_waits_and_what_is_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest are kept; a request without rows takes a place too."""
    monkeypatch.setattr(judged, "MOST_WAITING", 10)
    monkeypatch.setattr(judged, "WINDOW", 6)
    own = Judged(["click"])
    for k in range(30):
        own.wait(f"{k}", "v", np.full(k % 2 * 2, 0.5, np.float32))
    with pytest.raises(ValueError, match="no scores wait under id '20'"):
        own.take("20", [])
    assert sum(own.take(f"{k}", [1, 0] if k % 2 else []) for k in range(24, 30)) == 6
    own.wait("x", "w", np.full(4, 0.9, np.float32))
    own.take("x", [1, 1, 1, 0])
    assert {found.version: found.num_rows for found in own.found()} == {"v": 2, "w": 4}


def test_the_latest_rows_are_judged_of_requests_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a list of all rows; some requests have more rows than are kept."""
    monkeypatch.setattr(judged, "WINDOW", 7)
    rng, own, rows = np.random.default_rng(2), Judged(["click"]), list[tuple[str, float, int]]()
    for k in range(60):
        scores, labels = rng.random(k % 10).astype(np.float32), rng.integers(2, size=k % 10).tolist()
        own.wait("a", f"v{k // 2}", scores)
        own.take("a", labels)
        rows += [(f"v{k // 2}", score, label) for score, label in zip(scores.tolist(), labels, strict=True)]
        for found in own.found():
            kept = np.array([each[1:] for each in rows[-7:] if each[0] == found.version])
            assert found.num_rows == len(kept)
            assert found.figures["base_rate"] == kept[:, 1].mean()
            assert found.figures["logloss"] == pytest.approx(log_loss(kept[:, 1], kept[:, 0], labels=[0, 1]), rel=1e-4)
        assert sum(found.num_rows for found in own.found()) == min(7, len(rows))


def test_an_id_that_comes_again_counts_once() -> None:
    own = Judged(["click"])
    for score in (0.2, 0.7):
        own.wait("a", "v", np.array([score], np.float32))
    own.take("a", [1])
    (found,) = own.found()
    assert found.num_rows == 1 and found.figures["calibration"] == pytest.approx(0.7)


def test_labels_that_are_sent_twice_at_once_count_once() -> None:
    """As by a client that tries again before it has an answer."""
    own = Judged(["click"])

    class Labels(list[int]):
        def __iter__(self) -> Iterator[int]:  # while one is read, the other one comes
            assert own.take("a", [0, 1]) == 2
            return super().__iter__()

    own.wait("a", "v", np.array([0.2, 0.3], np.float32))
    with pytest.raises(ValueError, match="the labels of request 'a' came twice at once"):
        own.take("a", Labels([0, 1]))
    (found,) = own.found()
    assert found.num_rows == 2


def test_scores_that_are_no_probabilities_wait_for_nothing() -> None:
    with pytest.raises(ValueError, match="leave out id and labels"):
        Judged([]).wait("a", "v", np.zeros(1, np.float32))
