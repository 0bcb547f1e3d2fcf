"""hotrow.run.wear's ledger against a plain list of what was written when, with kills and clocks set back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hotrow.base import records
from hotrow.base.files import parse_byte_rate
from hotrow.run.wear import LONGEST_WINDOW_S, PIECE_S, WriteLedger
from resealed import reseal

NOON = 1_700_000_000.0


class Clock:
    def __init__(self, at: float = NOON) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200GB/day", (200 * 10**9, 86_400)),
        ("1.5 TiB / Day", (3 * 2**39, 86_400)),
        ("10GiB/hour", (10 * 2**30, 3600)),
        ("500mb/h", (500 * 10**6, 3600)),
        ("4096/d", (4096, 86_400)),
    ],
)
def test_rates(text: str, expected: tuple[int, int]) -> None:
    assert parse_byte_rate(text)[:2] == expected


@pytest.mark.parametrize("text", ["", "200GB", "200GB/week", "/day", "GB/day", "0GB/day", "-1GB/day", "1GB/day/day"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate .* is not understood; write bytes per day or hour, such as 200GB/day"):
        parse_byte_rate(text)


@pytest.mark.parametrize("seed", range(6))
def test_no_window_of_a_greedy_writer_is_over_the_budget(tmp_path: Path, seed: int) -> None:
    """It writes whatever there is left for, is killed after every tenth write, and every window is summed by hand."""
    draws, clock = random.Random(seed), Clock()
    budget = parse_byte_rate("100000/hour" if seed % 2 else "100000/day")
    ledger = WriteLedger(tmp_path / "w.json", budget, now=clock)
    written: list[tuple[float, int]] = []
    refused = 0
    for _ in range(500):
        clock.at += draws.expovariate(60 / budget.seconds)
        num_bytes = draws.randrange(5000)
        refused += num_bytes > ledger.left()
        if num_bytes <= ledger.left():
            ledger.expect(num_bytes)
            written.append((clock.at, num_bytes))
            if draws.random() < 0.1:
                ledger = WriteLedger(tmp_path / "w.json", budget, now=clock)
            else:
                ledger.add(num_bytes, ahead=0)
    windows = [sum(n for at, n in written if end - budget.seconds < at <= end) for end, _ in written]
    assert max(windows) <= budget.num_bytes
    assert refused > 20 and max(windows) > 0.9 * budget.num_bytes, "the budget was hardly used"


def test_what_counts_and_until_when(tmp_path: Path) -> None:
    """Exactly what was written in pieces of time that the window still touches, over sessions that ended well."""
    draws, clock = random.Random(3), Clock()
    budget = parse_byte_rate("1MB/hour")
    written: list[tuple[float, int]] = []

    def counted(at: float) -> int:
        return sum(n for then, n in written if then // PIECE_S * PIECE_S + PIECE_S + 3600 > at)

    for _ in range(8):
        ledger = WriteLedger(tmp_path / "w.json", budget, now=clock)
        for _ in range(5):
            clock.at += draws.uniform(0, 200)
            assert (ledger.written(), ledger.left()) == (counted(clock.at), 1_000_000 - counted(clock.at))
            num_bytes = draws.randrange(60_000)
            ledger.add(num_bytes, ahead=100)
            written.append((clock.at, num_bytes))
        wanted = draws.randrange(1_000_000)
        moments = [clock.at, *(clock.at + 1 + s for s in range(4000))]
        first = next(at for at in moments if counted(at) + wanted <= 1_000_000)
        assert first - 1 < ledger.when(wanted) <= first  # type: ignore[operator]
        assert ledger.when(1_000_001) is None
        ledger.expect(0)


def test_a_clock_set_back_forgets_nothing(tmp_path: Path) -> None:
    clock = Clock()
    ledger = WriteLedger(tmp_path / "w.json", parse_byte_rate("1MB/day"), now=clock)
    ledger.add(1000, ahead=0)
    clock.at -= 30 * LONGEST_WINDOW_S
    ledger.add(500, ahead=0)
    ledger.expect(0)
    assert WriteLedger(tmp_path / "w.json", parse_byte_rate("1MB/day"), now=clock).written() == 1500


def test_the_file_stays_small_and_is_seldom_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, path = Clock(), tmp_path / "w.json"
    ledger, writes = WriteLedger(path, parse_byte_rate("1TB/day"), now=clock), []
    plain = records.write_sealed
    monkeypatch.setattr(records, "write_sealed", lambda path, value: (writes.append(1), plain(path, value)))
    for _ in range(10_000):
        clock.at += 60
        ledger.add(1 << 20, ahead=1 << 22)
    assert len(writes) <= 10_000 / 5 + 1
    assert len(json.loads(path.read_text())["bytes_by_start"]) <= LONGEST_WINDOW_S / PIECE_S + 2
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", [{"hotrow_writes": 2}, {"seconds": 60}, {"bytes_by_start": {"now": 1}}])
def test_a_file_that_says_nothing_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    budget = parse_byte_rate("1MB/day")
    WriteLedger(tmp_path / "w.json", budget, now=Clock()).expect(1)
    reseal(tmp_path / "w.json", lambda fields: fields.update(change))
    field = next(iter(change))
    with pytest.raises(ValueError, match=rf"w\.json: {field}.* set memory.write_budget to null, or remove the file"):
        WriteLedger(tmp_path / "w.json", budget)
