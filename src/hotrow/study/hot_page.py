"""The page of the study `hot`: one HTML file with its chart inside, from the preset and the measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.draw.charts import line_chart
from hotrow.draw.pages import load_template
from hotrow.study.page import by_reason, machine_line

Row = Mapping[str, Any]


def hot_page(preset: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The HTML; `report` is what the study's JSON file holds. Text is escaped."""
    rows: Sequence[Row] = report["cells"]
    charts = {
        source: line_chart(
            lines,
            x_label="hot rows with their optimizer states, MB",
            y_label="hot samples",
            dashed=["covering"],  # often on the line of exact
            label=f"share of hot samples by bytes, {source}",
        )
        for source, lines in coverage_lines(rows).items()
    }
    return load_template("study/hot.html").render(
        title=preset["title"],
        about=preset["about"],
        machine=machine_line(report),
        command=report["command"],
        quick=report["quick"],
        link=report.get("link_bytes_per_s"),
        speedups=report["speedups"],
        charts=charts,
        groups=[
            {**group, "rows": [SHOWN[group["kind"]](row) for row in rows if row["group"] == group["name"]]}
            for group in preset["groups"]
        ],
        skipped=by_reason(report["skipped"]),
    )


def coverage_lines(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Source -> way -> (MB, share of hot samples)."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in sorted((r for r in rows if r["kind"] == "coverage"), key=lambda row: float(row["hot_bytes"])):
        lines = found.setdefault(row["name"], {})
        lines.setdefault(row["rows"], []).append((row["hot_bytes"] / 1e6, row["hot_samples"]))
    return {source: {way: lines[way] for way in sorted(lines)} for source, lines in found.items()}


def megabytes(num_bytes: float) -> str:
    """To three digits, or to one megabyte."""
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g}"


def shown_coverage(row: Row) -> dict[str, str]:
    """A row's numbers as text."""
    amount = f"{row['amount']:g} %" if row["rows"] == "threshold" else f"{row['amount']:.0%} of the bytes"
    return {
        "name": row["name"],
        "rows": row["rows"],
        "amount": amount,
        "hot_mb": megabytes(row["hot_bytes"]),
        "hot_rows": f"{row['hot_rows']:,}",
        "share": f"{row['hot_bytes'] / row['table_bytes']:.1%}",
        "hot_samples": f"{row['hot_samples']:.1%}",
        "link_mb": megabytes(row["link_bytes"]),
        "ratio": f"{row['hybrid_ratio']:.2f}",
    }


def shown_cached(row: Row) -> dict[str, str]:
    """A row's numbers as text."""
    return {
        "name": row["name"],
        "amount": f"{row['amount']:.0%} of the bytes",
        "slot_mb": megabytes(row["budget_bytes"]),
        "hit_rows": f"{row['hit_rows']:.1%}",
        "link_mb": megabytes(row["link_bytes"]),
        "ratio": f"{row['hybrid_ratio']:.2f}",
    }


def shown_quality(row: Row) -> dict[str, str]:
    """A row's numbers as text; empty where the schedule has none."""

    def pair(name: str, form: str) -> str:
        return f"{row[name + '_baseline']:{form}}\u00a0/\u00a0{row[name + '_fae']:{form}}"

    def difference(name: str) -> str:
        value, error = row[f"{name}_difference"], row[f"{name}_difference_se"]
        return f"{value:+.5f} \u00b1 {error:.5f}" if value or error else "none, to the bit"

    def either(name: str, form: str) -> str:
        return "" if row.get(name) is None else f"{row[name]:{form}}"

    epochs = [row["epochs_to_auc_baseline"], row["epochs_to_auc_fae"]]
    return {
        "name": row["name"],
        "schedule": schedule_of(row),
        "seeds": str(row["seeds"]),
        "steps": f"{row['num_steps']:,}",
        "unlearned": str(row["unlearned_seeds"] or ""),
        "hot_samples": f"{row['hot_samples']:.1%}",
        "auc": pair("auc", ".4f"),
        "auc_difference": difference("auc"),
        "auc_sd": f"{row['auc_baseline_sd']:.5f}",
        "logloss": pair("logloss", ".4f"),
        "accuracy": pair("accuracy", ".4f"),
        "epochs": " / ".join("never" if share is None else f"{share:.1f}" for share in epochs),
        "swaps": f"{row['num_swaps']:.0f}",
        "link_mb": megabytes(row["link_bytes"]) if "link_bytes" in row else "",
        "sync_share": either("sync_share", ".1%"),
        "ratio": either("hybrid_ratio", ".2f"),
        "seconds": pair("train_s", ".1f"),
        "modelled": (
            f"{row['modelled_hybrid_link_s']:.2f} / {row['modelled_link_s']:.2f}" if "modelled_link_s" in row else ""
        ),
    }


def schedule_of(row: Row) -> str:
    """Its name, first rate and end, and what becomes of the learning rates."""
    end = f", {row['shuffled_end']:.0%} shuffled at the end" if row["shuffled_end"] else ""
    falling = f", learning rates falling over the last {row['decay']:.0%}" if row.get("decay") else ""
    width = f", hidden layers of {row['width']}" if row.get("width") else ""
    return str(row["schedule"]) + ("" if row["schedule"] == "window" else f" R({row['rate']:g}){end}") + falling + width


SHOWN = {"coverage": shown_coverage, "cached": shown_cached, "quality": shown_quality}
