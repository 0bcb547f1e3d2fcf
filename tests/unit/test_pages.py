"""The README's picture and its line on very large tables: what they show of the cells they are made from."""

from __future__ import annotations

import re

from benchmarks.claims import huge_sentence
from benchmarks.tiers_page import memory_chart


def test_the_picture_has_a_line_for_each_side_and_processor() -> None:
    def cell(side: str, ahead: int, parts: int, speed: float, **more: object) -> dict[str, object]:
        row = {"side": side, "ahead": ahead, "dram_parts": parts, "relative_speed": speed, "zipf": 1.05, "io": "auto"}
        return {**row, **more}

    one, other = "AMD EPYC, family 25 model 17, avx512", "AMD EPYC, family 26 model 2, avx512"
    cells = {
        "tenth": {one: cell("tiers", 4, 10, 0.9), other: cell("tiers", 4, 10, 0.8)},
        "least": {one: cell("tiers", 4, 32, 0.7)},
        "mapped": {other: cell("mmap", 1, 32, 0.3)},
        "no look-ahead": {one: cell("tiers", 0, 32, 0.4)},
        "more skew": {one: cell("tiers", 4, 32, 0.95, zipf=1.2)},
    }
    chart = memory_chart(cells)
    assert re.findall(r"<text[^>]*>((?:hotrow|mapped files|RocksDB)[^<]*)", chart) == [
        "hotrow, EPYC 25.17",
        "hotrow, EPYC 26.2",
        "mapped files, EPYC 26.2",
    ]
    first, second = (
        re.search(rf'points="([^"]*)"[^>]*><title>hotrow, EPYC {name}', chart) for name in ("25.17", "26.2")
    )
    assert first and len(first[1].split()) == 3, (
        "1/32, 1/10 and all in DRAM, and neither another skew nor no look-ahead"
    )
    assert second and len(second[1].split()) == 2


def test_tables_of_600_gb_are_told_with_their_conditions() -> None:
    cell = {
        "name": "huge", "table_bytes": 600e9, "dram_bytes": 6 << 30, "num_rows": 293_051_712, "dim": 512,
        "num_steps": 1000, "zipf": 1.05, "read_rows": 12_345, "samples_per_s": 2000.0, "peak_bytes": 7 << 30,
        "checked_rows": 500, "checked_steps": 60, "machine": {"memory_bytes": 24 << 30}, "note": "on a busy machine",
    }  # fmt: skip
    text = huge_sentence(cell)
    for figure in (
        "600 GB",
        "24 GiB",
        "6 GiB of it",
        "293,051,712 rows of 512",
        "1,000 steps",
        "12,345 rows had come back",
    ):
        assert figure in text
    assert "2,000 samples/s (on a busy machine); memory peaked at 7.0 GiB" in text
