"""docs/memory-study.md with its charts: the study `memory` as it was measured.

    hotrow study memory --out FOLDER [--data ...] && python -m benchmarks.memory_study FOLDER/memory.json

Without a file, the pages are made anew from docs/memory-study.json, which holds what they show of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import table
from benchmarks.study_docs import StudyDocs, table_of
from hotrow.study.memory import machines
from hotrow.study.memory_page import shown_of, speed_charts
from hotrow.study.runner import load_preset

CHARTS = ("memory-study-ids.svg", "memory-study-sides.svg")
COLUMNS = {
    "who": "who", "ids": "source", "DRAM": "dram", "speed (range of rounds)": "speed", "hits, per lookup": "hit_rate",
    "per tail row": "row_hit_rate", "waiting": "stall_share", "MB read a step": "read", "MB written": "written",
    "rows on disk": "rows_on_disk", "peak, GB": "peak", "clean rounds": "rounds",
}  # fmt: skip
"""Heads of the tables, and the fields of `shown_of`."""
KEPT = (
    "key", "group", "side", "source", "io", "ahead", "dram_parts", "dram_share", "relative_speed", "spread", "hit_rate",
    "row_hit_rate", "stall_share", "bytes_read_per_step", "bytes_written_per_step", "rows_on_disk", "peak_bytes",
    "limit_bytes", "table_bytes", "step_ms", "dram_step_ms", "samples_per_s", "rounds", "clean_rounds",
    "taken_rounds", "steps_compared", "commit", "date",
)  # fmt: skip
"""Of a cell: no path of the machine is among them."""
HEAD = """\
# Study: memory

Training with a half to a thirty-second of the tables' bytes as DRAM, the rest on disk: how, and what each field means,
is in [Studies](study.md#memory). Speed is samples per second over those with all tables in DRAM, in stretches that
alternate: the median, and the range of all rounds. Every loss equals that in DRAM to the bit. Zipf: ids drawn over the
ranks of tables of Criteo Kaggle's cardinalities. `criteo`, `taobao` and `trace.txt.gz`: the three real files of
[Locality](locality.md); their tables are small, so that a thirty-second holds little more than a batch.
"""


def charts_of(report: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """By heading: the chart's file, and the SVG."""
    charts = speed_charts(report["cells"])
    return {title: (file, svg) for file, (title, svg) in zip(CHARTS, charts.items(), strict=False)}


def body_of(report: Mapping[str, Any]) -> list[str]:
    """How many machines' memory one does without, and a table of each group's cells."""
    lines = ["", "## Machines", "", *machines_of(report)]
    for group in load_preset("memory")["groups"]:
        if rows := shown_of(group["name"], report["cells"]):
            table_lines = table_of(COLUMNS, rows, words=("who", "source"))
            lines += ["", f"## {group['name'].capitalize()}", "", group["about"], "", *table_lines]
    return lines


def machines_of(report: Mapping[str, Any]) -> list[str]:
    """How many machines' memory one with an SSD does without."""
    text = (
        "At 90 % of the speed in DRAM or more, one machine does the work of how many with as much DRAM that would hold "
        "the tables together:"
    )
    rows = [[line["source"], line["machines_in_dram"]] for line in machines(report["cells"]) if line["measured"]]
    return [text, "", *table({"ids": "left", "machines": "right"}, rows)]


STUDY = StudyDocs("memory", HEAD, KEPT, charts_of, body_of)

if __name__ == "__main__":
    STUDY.main(__doc__)
