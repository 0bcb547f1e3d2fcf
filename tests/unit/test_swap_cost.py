"""hot.swap_cost: rows that change against draws, and the lowest rate against a search over all rates."""

from __future__ import annotations

import numpy as np
import pytest

from hotrow.costs.declared import LIKELY
from hotrow.costs.hardware import Figure, Gpu, Hardware
from hotrow.hot.hot_set import HotRows, HotSet
from hotrow.hot.swap_cost import SWAP_SHARE, lowest_rate, swaps_s
from hotrow.placement.copies import MAX_LISTED

ROWS = {"a": HotRows(600, np.arange(900, 1300)), "b": HotRows.first(3000), "c": HotRows.first(50)}
RECORD_BYTES = {"a": 68, "b": 100, "c": 20}
HOT = HotSet(how="exact", rows=ROWS, record_bytes=RECORD_BYTES)
COUNTS = {name: np.minimum(40_000 // np.arange(1, 4001) ** 1.1, 3000) for name in ("a", "b")}


def machine_of(link: float, *, dram: float = 1e13) -> tuple[Hardware, Gpu]:
    gpu = Gpu("made up", Figure(2**34), Figure(1e12), Figure(link), Figure(link / 3))
    fields = {"name": "made up", "date": "2026-01-01", "host": {}, "versions": {}, "num_cores": 1}
    return Hardware(**fields, dram_bytes=Figure(2**36), stream_bytes_per_s={"1": Figure(dram)}), gpu  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.002, 0.05, 0.6])
def test_rows_that_change_against_draws(share: float) -> None:
    """Accesses at random times: the rows with one in a phase, of every table; many of a table, and all of it cross."""
    generator, crossing = np.random.default_rng(3), []
    for _ in range(40):
        num_bytes = 0
        for name, rows in ROWS.items():
            hot = rows.contains(np.arange(4000))
            changed = 50
            if name in COUNTS:
                changed = int((generator.binomial(COUNTS[name].astype(int), share) > 0)[hot].sum())
            many = changed > MAX_LISTED * rows.num_rows
            num_bytes += (rows.num_rows if many else changed) * RECORD_BYTES[name]
        crossing.append(num_bytes)
    machine, gpu = machine_of(1e4)
    calls_s = 16 * len(ROWS) * LIKELY.launch_s
    link_s = swaps_s(HOT, COUNTS, machine, gpu, share=share) - calls_s
    assert link_s == pytest.approx(np.mean(crossing) * (1 + 3) / 1e4, rel=0.02)


def test_memory_of_the_host_counts_too() -> None:
    fast, slow = (machine_of(1e10, dram=dram) for dram in (1e12, 1e6))
    quick, long = (swaps_s(HOT, {}, *each, share=1.0) for each in (fast, slow))
    assert long - quick == pytest.approx(4 * HOT.num_bytes / 1e6, rel=1e-3)


@pytest.mark.parametrize("first", [50.0, 3.0, 100.0])
def test_the_lowest_rate_against_a_search(first: float) -> None:
    """A slower link never makes phases shorter; swaps take at most the share, and more at half of the rate."""
    found = []
    for link in (1e5, 1e6, 1e7, 1e8, 1e9):
        machine, gpu = machine_of(link)
        rate = lowest_rate(first, HOT, COUNTS, machine, gpu, epoch_s=60.0)
        share = {each: swaps_s(HOT, COUNTS, machine, gpu, share=each / 100) / (60.0 * each / 100) for each in
                 (rate, rate / 2)}  # fmt: skip
        assert share[rate] <= SWAP_SHARE or rate == 100
        assert share[rate / 2] > SWAP_SHARE or rate == 1
        assert rate in {1, 100, *(first * 2.0**k for k in range(-8, 8))}
        found.append(rate)
    assert found == sorted(found, reverse=True) and found[0] == 100 and found[-1] == 1
