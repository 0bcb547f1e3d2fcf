"""The pages of the study `memory`: the HTML file of a run, and memory-study.md, from the preset and the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import filled, heads, table
from benchmarks.rivals.memory import machines
from benchmarks.study.docs import StudyDocs, by_reason, machine_line
from benchmarks.study.presets import read_preset
from hotrow.draw import line_chart, load_template

Row = Mapping[str, Any]
PRESET = Path(__file__).with_name("memory.yaml")
SIDES = {"tiers": "hotrow", "mmap": "mapped files", "rocksdb": "RocksDB + LRU"}


def memory_page(preset: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Returns the HTML. report: the content of the study's JSON file. Text is escaped."""
    template = load_template("rivals/memory.html", folder=PRESET.parent.parent)
    rows: Sequence[Row] = report["cells"]
    return template.render(
        title=preset["title"],
        about=preset["about"],
        machine=machine_line(report),
        command=report["command"],
        quick=report["quick"],
        groups=[
            {"about": group["about"], "name": group["name"], "rows": shown_of(group["name"], rows)}
            for group in preset["groups"]
        ],
        charts=speed_charts(rows),
        machines=[line for line in report.get("machines", ()) if line["measured"]],
        skipped=by_reason(report["skipped"]),
    )


def who(row: Row) -> str:
    """Returns the side of a row in words."""
    io = "" if row["io"] == "auto" else f", {row['io']}"
    ahead = {"tiers": f", {row['ahead']} ahead", "mmap": ", advised" if row["ahead"] else ""}.get(row["side"], "")
    return SIDES[row["side"]] + io + ahead


def speed_charts(rows: Sequence[Row]) -> dict[str, str]:
    """Returns SVG by title: ours with look-ahead by ids, and all sides on the ids that most sides trained on."""
    sources = dict.fromkeys(row["source"] for row in rows)
    most = max(sources, key=lambda source: len({who(r) for r in rows if r["source"] == source}), default="")
    ours = [row for row in rows if row["side"] == "tiers" and row["ahead"] and row["io"] == "auto"]
    beside = sorted((row for row in rows if row["source"] == most), key=lambda row: (row["side"] != "tiers", who(row)))
    charts = {"By ids": speed_chart(ours, "source"), f"By side, {most}": speed_chart(beside, "who")}
    return {title: chart for title, chart in charts.items() if chart}


def speed_chart(rows: Sequence[Row], by: str) -> str:
    """Returns relative speed by share of DRAM, with a line for each source or each side."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(who(row) if by == "who" else row["source"], []).append(
            (row["dram_share"], row["relative_speed"])
        )
    parts = sorted({row["dram_parts"] for row in rows}, reverse=True)
    return line_chart(
        {name: sorted(line) for name, line in lines.items()},
        x_label="DRAM, share of the tables' bytes",
        y_label="samples/s over all in DRAM",
        ticks={1 / part: f"1/{part}" for part in parts},
        label="speed by DRAM",
    )


def shown_of(group: str, rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns the group's rows as text, sorted by ids, DRAM and speed."""
    own = [row for row in rows if row["group"] == group]
    own.sort(key=lambda row: (row["source"], row["dram_parts"], -row["relative_speed"]))
    return [shown(row) for row in own]


def shown(row: Row) -> dict[str, str]:
    """Returns the numbers of a row as text; empty for what a side does not count."""

    def text(name: str, form: str, scale: float = 1.0) -> str:
        return "" if row.get(name) is None else format(row[name] * scale, form)

    return {
        "who": who(row),
        "source": row["source"],
        "dram": f"1/{row['dram_parts']}",
        "speed": f"{row['relative_speed']:.0%} ({row['spread'][0]:.0%}-{row['spread'][1]:.0%})",
        "hit_rate": text("hit_rate", ".1%"),
        "row_hit_rate": text("row_hit_rate", ".1%"),
        "stall_share": text("stall_share", ".1%"),
        "read": text("bytes_read_per_step", ".2f", 1e-6),
        "written": text("bytes_written_per_step", ".2f", 1e-6),
        "rows_on_disk": text("rows_on_disk", ",.0f"),
        "peak": text("peak_bytes", ".2f", 1e-9),
        "rounds": f"{row['clean_rounds']} of {row['taken_rounds']}",
    }


# ---- the page in docs/

CHARTS = ("memory-study-ids.svg", "memory-study-sides.svg")
OURS = "hotrow, 4 ahead"
COLUMNS = {
    "lookups that hit": "hit_rate", "waiting": "stall_share", "MB read a step": "read", "MB written": "written",
    "peak, GB": "peak",
}  # fmt: skip
"""Heads of hotrow's own figures, and the fields of `shown`."""
KEPT = (
    "key", "group", "side", "source", "io", "ahead", "dram_parts", "dram_share", "relative_speed", "spread", "hit_rate",
    "row_hit_rate", "stall_share", "bytes_read_per_step", "bytes_written_per_step", "rows_on_disk", "peak_bytes",
    "limit_bytes", "table_bytes", "step_ms", "dram_step_ms", "samples_per_s", "rounds", "clean_rounds",
    "taken_rounds", "steps_compared", "commit", "date",
)  # fmt: skip
"""Fields of a cell that are kept in docs/. None is a path of the machine."""
HEAD = """\
# Memory study

For readers who ask how much DRAM they need: the training speed with DRAM for 1/2 to 1/32 of the tables' bytes and the
rest on disk, beside mapped files and RocksDB. How it was measured is in [Studies](../study.md#memory).

- Speed is samples per second relative to all tables in DRAM, in stretches that alternate: the median, and the range
  of all rounds. Every loss equals that in DRAM to the bit. The last columns are of the first one of speeds. In the
  others stands what that side did: how long it waited for rows, or the MB that it read and wrote in a step.
- "Zipf" means ids drawn over the ranks of tables with Criteo Kaggle's cardinalities.
- `criteo`, `taobao` and `trace.txt.gz` are the three real files of [Locality](locality.md). Their tables are small,
  so a thirty-second holds little more than a batch.
"""


def charts_of(report: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns (file, SVG) by heading."""
    charts = speed_charts(report["cells"])
    return {title: (file, svg) for file, (title, svg) in zip(CHARTS, charts.items(), strict=False)}


def body_of(report: Mapping[str, Any]) -> list[str]:
    """Returns the table of machines, and a table for each group."""
    lines = ["", "## Machines", "", *machines_of(report)]
    for group in read_preset(PRESET)["groups"]:
        if rows := [row for row in report["cells"] if row["group"] == group["name"]]:
            lines += ["", f"## {group['name'].capitalize()}", "", group["about"], "", *group_table(rows)]
    return lines


def group_table(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each source and share of DRAM: the speed of each side, and what the first side did."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: (row["source"], row["dram_parts"])):
        found.setdefault((row["source"], row["dram_parts"]), {})[who(row)] = row
    sides = sorted({who(row) for row in rows}, key=lambda side: (not side.startswith("hotrow"), side != OURS, side))
    lines = []
    for (source, parts), own in found.items():
        texts = {side: shown(row) for side, row in own.items()}
        first = texts.get(OURS) or next(iter(texts.values())) if sides[0].startswith("hotrow") else {}
        speeds = [speed_text(texts[side], first) if side in texts else "" for side in sides]
        lines.append([source, f"1/{parts}", *speeds, *(first.get(field, "") for field in COLUMNS.values())])
    return filled(heads(("ids", "DRAM", *sides, *COLUMNS)), lines)


def speed_text(row: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Returns the speed of a side and, if its figures are not in the columns, what it waited for or moved."""
    did = f"waits {row['stall_share']}" if row["stall_share"] else f"{row['read']} + {row['written']} MB"
    return row["speed"] + ("" if row is first else f"; {did}")


def machines_of(report: Mapping[str, Any]) -> list[str]:
    """Returns the table of how many machines one with an SSD replaces."""
    text = (
        "How many machines, whose DRAM together would hold the tables, can one machine with the same DRAM and an SSD "
        "replace if it must keep at least 90 % of the speed?"
    )
    rows = [[line["source"], line["machines_in_dram"]] for line in machines(report["cells"]) if line["measured"]]
    return [text, "", *table({"ids": "left", "machines": "right"}, rows)]


STUDY = StudyDocs("memory", HEAD, KEPT, charts_of, body_of)
