"""docs/memory-study.md with its charts: the study `memory` as it was measured.

    hotrow study memory --out FOLDER [--data ...] && python -m benchmarks.memory_study FOLDER/memory.json

Without a file, the pages are made anew from docs/memory-study.json, which holds what they show of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from hotrow.study.memory import machines
from hotrow.study.memory_page import shown_of, speed_charts
from hotrow.study.page import by_reason, machine_line
from hotrow.study.runner import load_preset

DOCS = Path(__file__).resolve().parent.parent / "docs"
JSON = DOCS / "memory-study.json"
PAGE = "memory-study.md"
CHARTS = ("memory-study-ids.svg", "memory-study-sides.svg")
COLUMNS = {
    "who": "who", "ids": "source", "DRAM": "dram", "speed (range of rounds)": "speed", "hits, per lookup": "hit_rate",
    "per tail row": "row_hit_rate", "waiting": "stall_share", "MB read a step": "read", "MB written": "written",
    "rows on disk": "rows_on_disk", "peak, GB": "peak", "rounds": "rounds",
}  # fmt: skip
"""Heads of the tables, and the fields of `shown_of`."""
KEPT = (
    "key", "group", "side", "source", "io", "ahead", "dram_parts", "dram_share", "relative_speed", "spread", "hit_rate",
    "row_hit_rate", "stall_share", "bytes_read_per_step", "bytes_written_per_step", "rows_on_disk", "peak_bytes",
    "limit_bytes", "table_bytes", "step_ms", "dram_step_ms", "samples_per_s", "rounds", "stolen_rounds",
    "steps_compared", "commit", "date",
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


def kept_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of the study's file."""
    circumstances = {name: report[name] for name in ("machine", "backend", "versions", "skipped")}
    return {**circumstances, "cells": [{name: row.get(name) for name in KEPT} for row in report["cells"]]}


def files_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Names below docs/, and their text."""
    charts = speed_charts(report["cells"])
    lines = [
        HEAD,
        f"{machine_line(report)} Made by `hotrow study memory --data ...` and `python -m benchmarks.memory_study`.",
    ]
    for file, title in zip(CHARTS, charts, strict=False):
        lines += ["", f"## {title}", "", f"[![Speed over the share of DRAM]({file})]({file})"]
    lines += ["", "## Machines", "", *machines_of(report)]
    for group in load_preset("memory")["groups"]:
        if rows := shown_of(group["name"], report["cells"]):
            lines += ["", f"## {group['name'].capitalize()}", "", group["about"], "", *table_of(rows)]
    if report["skipped"]:
        lines += ["", "## Not measured", ""]
        reasons = [[line["reason"], line["count"], f"`{line['key']}`"] for line in by_reason(report["skipped"])]
        lines += table({"reason": "left", "cells": "right", "first of them": "left"}, reasons)
    return {PAGE: "\n".join(lines) + "\n", **dict(zip(CHARTS, charts.values(), strict=False))}


def machines_of(report: Mapping[str, Any]) -> list[str]:
    """How many machines' memory one with an SSD does without."""
    text = (
        "At 90 % of the speed in DRAM or more, one machine does the work of how many with as much DRAM that would hold "
        "the tables together:"
    )
    rows = [[line["source"], line["machines_in_dram"]] for line in machines(report["cells"]) if line["measured"]]
    return [text, "", *table({"ids": "left", "machines": "right"}, rows)]


def table_of(rows: list[dict[str, str]]) -> list[str]:
    """The rows of a group, as text."""
    heads = {head: "left" if field in ("who", "source") else "right" for head, field in COLUMNS.items()}
    return table(heads, [[row[field] for field in COLUMNS.values()] for row in rows])


def main() -> None:
    """Keep what is shown of a study's file, if one is named, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="memory.json of the study's folder of results")
    options = parser.parse_args()
    if options.file is not None:
        JSON.write_text(json.dumps(kept_of(json.loads(options.file.read_text())), indent=1) + "\n", encoding="utf-8")
    for name, text in files_of(json.loads(JSON.read_text())).items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
