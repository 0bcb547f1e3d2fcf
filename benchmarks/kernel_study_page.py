"""The page of the study `kernels`: one HTML file with its charts, from the preset and the measured rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import CLEAN_SHARE, is_disturbed
from benchmarks.plots import heat_map, roofline
from benchmarks.study.docs import by_reason, machine_line
from hotrow.draw import load_template

Row = Mapping[str, Any]
PRESET = Path(__file__).with_name("kernels.yaml")


def kernels_page(preset: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Returns the HTML. report: the content of the study's JSON file."""
    template = load_template("kernels.html", folder=PRESET.parent)
    rows: Sequence[Row] = report["cells"]
    threads = max((row["threads"] for row in rows), default=1)
    widest = [row for row in rows if row["threads"] == threads]
    return template.render(
        title=preset["title"],
        about=preset["about"],
        machine=machine_line(report),
        command=report["command"],
        quick=report["quick"],
        num_cells=len(rows),
        num_disturbed=sum(map(is_disturbed, rows)),
        clean=f"{CLEAN_SHARE:.0%}",
        groups=[
            group_table(group, rows, left_out=report["quick"] and group["name"] in preset["quick"]["leave_out"])
            for group in preset["groups"]
        ],
        maps=share_maps(widest),
        map_threads=threads,
        roofline=roofline(
            {
                part: [(r["flops_per_byte"], r["gflop_per_s"], r["key"]) for r in widest if r["part"] == part]
                for part in ("lookup", "update")
            },
            gb_per_s=report["roofs"]["sequential_gb_per_s"],
            gflop_per_s=report["roofs"]["matmul_gflop_per_s"],
        ),
        skipped=report["skipped"],
        skipped_by_reason=by_reason(report["skipped"]),
        rows=[shown(row) for row in sorted(rows, key=lambda row: str(row["key"]))],
    )


def shown(row: Row) -> dict[str, Any]:
    """Returns the numbers of a row as text."""
    limit = row["limit_ms"]
    return {
        "key": row["key"],
        "part": row["part"],
        "optimizer": row["optimizer"],
        "zipf": f"{row['zipf']:g}" if row["zipf"] else "uniform",
        "threads": row["threads"],
        "ms": f"{row['ms']:.3g}",
        "spread": f"{row['spread_ms'][0]:.3g}-{row['spread_ms'][1]:.3g}",
        "gb_per_s": f"{row['gb_per_s']:.1f}",
        "gflop_per_s": f"{row['gflop_per_s']:.2f}",
        "limit_ms": "" if limit is None else f"{limit:.3g}",
        "share": "" if limit is None else f"{row['share_of_limit']:.0%}",
        "rounds": f"{row['clean_rounds']} of {row['taken_rounds']}",
    }


def group_table(group: Mapping[str, Any], rows: Sequence[Row], *, left_out: bool) -> dict[str, Any]:
    """Returns a group's description, what was cut in it, and its rows, except for those of a large grid."""
    own = [row for row in rows if row["group"] == group["name"]]
    wanted = group["fixed"].get("num_embeddings")
    cut = sorted({row["num_embeddings"] for row in own if wanted and row["num_embeddings"] < wanted})
    lines = [f"Measured with {rows_here:,} rows a table instead of {wanted:,}." for rows_here in cut]
    if not own:
        lines.append("A quick look leaves it out." if left_out else "No cell of this group was measured.")
    return {
        "name": group["name"],
        "about": group["about"],
        "cut": lines,
        "rows": [shown(row) for row in own] if wanted else [],
    }


def share_maps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a heat map for each part of the grid: the median share of the limit by dim and ids per bag."""
    grid = [row for row in rows if row["group"] == "grid" and row["share_of_limit"] is not None]
    maps = []
    for part in ("lookup", "update"):
        own = [row for row in grid if row["part"] == part]
        dims, lookups = (sorted({row[name] for row in own}) for name in ("embedding_dim", "lookups"))
        values: dict[tuple[str, str], float | None] = {}
        for dim in dims:
            for count in lookups:
                shares = [r["share_of_limit"] for r in own if (r["embedding_dim"], r["lookups"]) == (dim, count)]
                values[str(dim), str(count)] = statistics.median(shares) if shares else None
        if values:
            drawn = heat_map(values, x_label="dim", y_label="ids per bag", label=f"share of the limit, {part}")
            maps.append({"title": part, "svg": drawn})
    return maps
