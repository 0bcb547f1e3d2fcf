"""Keys rearranged, against plain Python lists."""

from itertools import chain
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data.chunk import Chunk, Keys, Position, interleave, select_rows
from raw_rows import ids

Column = list[list[str | None]]


def keys_of(rows: Column, kind: str, *, one_hot: bool) -> Keys:
    flat = [value for row in rows for value in row]
    valid = np.array([value is not None for value in flat], dtype=bool) if None in flat else None
    splits = None if one_hot else np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    if kind == "int":
        return Keys(np.array([int(value or 0) for value in flat], dtype=np.int64), None, valid, splits)
    texts = [(value or "").encode() for value in flat]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)])
    return Keys(np.frombuffer(b"".join(texts), dtype=np.uint8), offsets, valid, splits)


def values_of(keys: Keys) -> list[Any]:
    rows = ids(keys)
    rows = rows if keys.row_splits is not None else [[value] for value in rows]
    return [[None if v is None else str(v) for v in row] for row in rows]


VALUE = st.one_of(st.none(), st.integers(0, 999).map(str))


@st.composite
def columns(draw: Any) -> tuple[list[Column], list[bool]]:
    num_rows = draw(st.integers(0, 8))
    one_hot = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    lengths = [(1, 1) if single else (0, 3) for single in one_hot]
    rows = [[draw(st.lists(VALUE, min_size=a, max_size=b)) for _ in range(num_rows)] for a, b in lengths]
    return rows, one_hot


@given(columns(), st.sampled_from(["int", "bytes"]))
def test_interleaved_rows_hold_their_features_in_turn(made: tuple[list[Column], list[bool]], kind: str) -> None:
    rows, one_hot = made
    merged = interleave([keys_of(column, kind, one_hot=single) for column, single in zip(rows, one_hot, strict=True)])
    assert values_of(merged) == [list(chain(*row)) for row in zip(*rows, strict=True)]


@given(columns(), st.sampled_from(["int", "bytes"]), st.randoms())
def test_selected_rows_are_those_rows(made: tuple[list[Column], list[bool]], kind: str, random: Any) -> None:
    rows, one_hot = made
    n = len(rows[0])
    mask = np.array([random.random() < 0.5 for _ in range(n)], dtype=bool)
    keys = {str(i): keys_of(c, kind, one_hot=s) for i, (c, s) in enumerate(zip(rows, one_hot, strict=True))}
    label, dense = np.arange(n, dtype=np.float32), np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    chunk = Chunk(n, label, dense, keys, Position(1, 2))
    kept = select_rows(chunk, mask)
    assert kept.num_rows == mask.sum() and kept.position == Position(1, 2)
    assert kept.label is not None and kept.label.tolist() == np.flatnonzero(mask).tolist()
    assert kept.dense.tolist() == chunk.dense[mask].tolist()
    for i, column in enumerate(rows):
        assert values_of(kept.keys[str(i)]) == [row for row, keep in zip(column, mask, strict=True) if keep]
