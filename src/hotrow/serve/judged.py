"""How good the scores of each version were, by the labels that come back to a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.objectives.binary import BinaryCrossEntropy

MOST_WAITING = 1 << 18
"""So many rows may wait for their labels; beyond them, those that have waited longest are let go of."""
WINDOW = 1 << 16
"""The figures are those of so many rows, whose labels came last."""
MOST_CHARACTERS = 200
"""The longest id of a request."""
_LEAST = 2.0**-24
"""Scores are float32: one of 0 or 1 counts as being so far from it, because its LogLoss would be infinite."""


class Judgement(NamedTuple):
    """What a version's scores of one label were worth."""

    version: str
    label: str
    num_rows: int
    figures: dict[str, Any]
    """The metrics of `BinaryCrossEntropy`."""


class Judged:
    """Keeps scores until their labels come. names: of the labels; empty if scores are no probabilities of labels.

    Several threads may use it at once.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._lock = tuple(names), threading.Lock()
        self._waiting: dict[str, tuple[str, NDArray[np.float32]]] = {}
        self._num_waiting = self._num_known = 0
        # The last rows with labels, each at its number modulo WINDOW: version, scores and labels.
        self._versions: dict[str, int] = {}
        self._version_W = np.full(WINDOW, -1, np.int32)
        self._scores_WL, self._labels_WL = (np.empty((WINDOW, len(self._names)), np.float32) for _ in range(2))

    def wait(self, key: str, version: str, scores: NDArray[np.float32]) -> None:
        """Keeps the scores [B] or [B, L] that a version gave to the request `key`, until `take` has its labels.

        Raises ValueError if the key is empty or too long, or if the model has no labels of 0 or 1.
        """
        self._check(key)
        scores_BL = scores[:, None] if scores.ndim == 1 else scores
        with self._lock:
            self._forget(key)
            self._waiting[key] = version, scores_BL
            self._num_waiting += max(1, len(scores_BL))
            while self._num_waiting > MOST_WAITING:
                self._forget(next(iter(self._waiting)))

    def take(self, key: str, labels: Sequence[Any]) -> int:
        """Takes the labels of a request: one for each of its rows, 0, 1 or None if nobody knows; of L > 1 labels a list
        of L for each row. Returns how many rows have one.

        Raises ValueError, which names request and row, if no scores wait for them, or if they are of another form.
        """
        self._check(key)
        with self._lock:
            if (found := self._waiting.get(key)) is None:
                raise ValueError(f"no scores wait under id {key!r}: send it with /score first, and its labels once")
        version, scores_BL = found
        labels_BL = np.full(scores_BL.shape, np.nan, np.float32)
        if len(labels) != len(labels_BL):
            raise ValueError(f"request {key!r} has {len(labels_BL)} rows, but {len(labels)} labels; send one for each")
        for row, (own, out) in enumerate(zip(labels, labels_BL, strict=True)):
            cells = own if isinstance(own, list) else [own]
            if len(cells) != len(out) or any(cell is not None and cell not in (0, 1) for cell in cells):
                wanted = "0, 1 or null" if len(out) == 1 else f"a list of {len(out)}, each 0, 1 or null"
                raise ValueError(f"request {key!r}, row {row}: the label is {str(own)[:80]}; send {wanted}")
            out[:] = [np.nan if cell is None else cell for cell in cells]
        known_B = ~np.isnan(labels_BL).all(1)
        num_rows = int(known_B.sum())
        with self._lock:
            if self._waiting.get(key) is not found:
                raise ValueError(f"the labels of request {key!r} came twice at once, or it was scored again: send one")
            self._forget(key)
            places = np.arange(self._num_known, self._num_known + num_rows)[-WINDOW:] % WINDOW
            self._num_known += num_rows
            self._version_W[places] = self._versions.setdefault(version, len(self._versions))
            self._scores_WL[places], self._labels_WL[places] = (
                own[known_B][-WINDOW:] for own in (scores_BL, labels_BL)
            )
        return num_rows

    def found(self) -> Iterator[Judgement]:
        """Yields what the rows whose labels came last say of each version and label."""
        with self._lock:
            version_W, scores_WL, labels_WL = self._version_W.copy(), self._scores_WL.copy(), self._labels_WL.copy()
            versions = list(self._versions)
        for number in np.unique(version_W[version_W >= 0]).tolist():
            version = versions[number]
            scores_NL, labels_NL = (own[version_W == number] for own in (scores_WL, labels_WL))
            for name, scores_N, labels_N in zip(self._names, scores_NL.T, labels_NL.T, strict=True):
                is_known = ~np.isnan(labels_N)
                if not is_known.any():
                    continue
                p = np.clip(scores_N[is_known].astype(np.float64), _LEAST, 1 - _LEAST)
                outputs = (np.log(p) - np.log1p(-p)).astype(np.float32)
                figures = BinaryCrossEntropy().measured(outputs, labels_N[is_known] == 1)
                yield Judgement(version, name, int(is_known.sum()), figures)

    def _check(self, key: str) -> None:
        if not self._names:
            raise ValueError("the model's scores are no probabilities of labels of 0 or 1; leave out id and labels")
        if not 0 < len(key) <= MOST_CHARACTERS:
            raise ValueError(f"id has {len(key):,} characters; it must have 1 to {MOST_CHARACTERS}")

    def _forget(self, key: str) -> None:
        if (found := self._waiting.pop(key, None)) is not None:
            self._num_waiting -= max(1, len(found[1]))
