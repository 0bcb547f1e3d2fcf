"""Sorting rows by time on disk, against Python's stable sort of everything at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from hotrow.data.chunk import Chunk, Keys, Position
from hotrow.data.prepare import timesort
from hotrow.data.prepare.cells import CellCounts
from hotrow.data.prepare.shares import Piece
from hotrow.data.prepare.timesort import COPIES, TimeSort, sorted_pieces
from hotrow.data.prepare.workfolder import Sorted
from hotrow.data.sources.schema import parse_schema
from loops import looped

SCHEMA = parse_schema({"label": "click", "time": "ts", "categorical": ["number"]}, where="test")


def pieces_of(times: list[int], rows_per_chunk: int) -> list[Piece]:
    """Rows of which a key holds the number."""
    pieces = []
    for first in range(0, len(times), rows_per_chunk):
        time = np.array(times[first : first + rows_per_chunk])
        number = np.arange(first, first + len(time))
        dense, label = np.empty((len(time), 0), np.float32), (number % 2).astype(np.float32)
        chunk = Chunk(len(time), label, dense, {"number": Keys(number)}, Position(), time)
        pieces.append(Piece(chunk, (number % 3).astype(np.uint8), first + len(time)))
    return pieces


@looped("num_times", [1, 2, 30, 10**12])
@looped("num_rows", [0, 1, 1000])
@looped("rows_in_run", [10, 64, 5000])
def test_order_and_memory(
    num_times: int, num_rows: int, rows_in_run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even rows have one time. No more rows than a run has, or one of each run, are held; any row can be read first."""
    rng, held = np.random.default_rng(num_rows), [0]
    times = np.where(np.arange(num_rows) % 2, rng.integers(-num_times, num_times, num_rows), 0).tolist()
    plain = timesort._by_time
    monkeypatch.setattr(timesort, "_by_time", lambda parts: held.append(sum(map(len, parts))) or plain(parts))
    pieces = pieces_of(times, 10)
    row_bytes = 8 + 1 + 4 + 8
    path = tmp_path / "rows.arrow"
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        sort = TimeSort(file, memory_bytes=COPIES * rows_in_run * row_bytes)
        for piece in pieces:
            sort.add(piece)
        assert sort.write(path, lambda: None) == num_rows
    assert max(held) <= max(rows_in_run, -(-num_rows // rows_in_run))
    order = sorted(range(num_rows), key=times.__getitem__)
    found = Sorted(num_rows, num_rows, 3, (), CellCounts())
    for start, stop in ((None, None), (Position(offset=num_rows // 3), Position(offset=num_rows // 2))):
        wanted = order[start.offset : stop.offset] if start and stop else order
        got = list(sorted_pieces(path, found, SCHEMA, start, stop, rows_per_chunk=13))
        assert [n for piece in got for n in piece.chunk.keys["number"].values] == wanted
        assert [n for piece in got for n in piece.codes] == [n % 3 for n in wanted]
        assert [int(n) for piece in got for n in piece.chunk.label] == [n % 2 for n in wanted]
        assert [t for piece in got for t in piece.chunk.time] == [times[n] for n in wanted]
        assert all(piece.chunk.num_rows <= 13 and piece.chunk.position.num_skipped == 3 for piece in got)
        assert not got or got[-1].next_row == got[-1].chunk.position.offset == (stop.offset if stop else num_rows)
