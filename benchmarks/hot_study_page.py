"""The pages of the study `hot`: the HTML file of a run, and hot-study.md, from the preset and the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.study.docs import StudyDocs, by_reason, machine_line, table_of
from benchmarks.study.presets import read_preset
from hotrow.draw import line_chart, load_template

Row = Mapping[str, Any]
PRESET = Path(__file__).with_name("hot.yaml")


def hot_page(preset: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Returns the HTML. report: the content of the study's JSON file. Text is escaped."""
    rows: Sequence[Row] = report["cells"]
    charts = {
        source: line_chart(
            lines,
            x_label="hot rows with their optimizer states, MB",
            y_label="hot samples",
            dashed=["covering"],  # often covers the line of exact
            label=f"share of hot samples by bytes, {source}",
        )
        for source, lines in coverage_lines(rows).items()
    }
    return load_template("hot.html", folder=PRESET.parent).render(
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
    """Returns (MB, share of hot samples) by source and way to choose hot rows."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in sorted((r for r in rows if r["kind"] == "coverage"), key=lambda row: float(row["hot_bytes"])):
        lines = found.setdefault(row["name"], {})
        lines.setdefault(row["rows"], []).append((row["hot_bytes"] / 1e6, row["hot_samples"]))
    return {source: {way: lines[way] for way in sorted(lines)} for source, lines in found.items()}


def megabytes(num_bytes: float) -> str:
    """Formats megabytes with three digits, or as a whole number from 100 on."""
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g}"


def shown_coverage(row: Row) -> dict[str, str]:
    """Returns the numbers of a row as text."""
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
    """Returns the numbers of a row as text."""
    return {
        "name": row["name"],
        "amount": f"{row['amount']:.0%} of the bytes",
        "slot_mb": megabytes(row["budget_bytes"]),
        "hit_rows": f"{row['hit_rows']:.1%}",
        "link_mb": megabytes(row["link_bytes"]),
        "ratio": f"{row['hybrid_ratio']:.2f}",
    }


def shown_quality(row: Row) -> dict[str, str]:
    """Returns the numbers of a row as text; empty if the schedule does not have them."""

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
    """Returns the schedule in words: name, first rate, learning rates, and width of the layers."""
    falling = f", learning rates falling over the last {row['decay']:.0%}" if row.get("decay") else ""
    width = f", hidden layers of {row['width']}" if row.get("width") else ""
    return str(row["schedule"]) + ("" if row["schedule"] == "window" else f" R({row['rate']:g})") + falling + width


SHOWN = {"coverage": shown_coverage, "cached": shown_cached, "quality": shown_quality}


# ---- the page in docs/

CHART = "hot-study.svg"
THRESHOLDS = {
    "data": "name", "threshold": "amount", "of the tables' bytes": "share", "hot samples": "hot_samples",
    "MB over the link": "link_mb", "times fewer than the hybrid": "ratio",
}  # fmt: skip
CACHED = {
    "data": "name", "amount": "amount", "rows that were there": "hit_rows", "MB over the link": "link_mb",
    "times fewer than the hybrid": "ratio",
}  # fmt: skip
QUALITY = {
    "data": "name", "schedule": "schedule", "hot samples": "hot_samples", "swaps": "swaps", "AUC": "auc",
    "difference": "auc_difference", "sd over seeds": "auc_sd", "LogLoss": "logloss", "accuracy": "accuracy",
    "epochs to the same AUC": "epochs", "times fewer than the hybrid": "ratio", "copying, of training": "sync_share",
    "seconds": "seconds",
}  # fmt: skip
TABLES = {"cached": CACHED, "quality": QUALITY}
"""The table of each kind of cell: its heads, and the fields of SHOWN below them."""
KEPT = (
    "key", "group", "kind", "name", "rows", "amount", "small_table", "budget_bytes", "hot_bytes", "hot_rows",
    "hot_samples", "table_bytes", "calibrate_s", "classify_s", "link_bytes", "sync_bytes", "hybrid_bytes",
    "hybrid_ratio", "hit_rows", "schedule", "rate", "decay", "width", "seeds", "num_steps",
    "unlearned_seeds", "auc_baseline", "auc_fae", "auc_difference", "auc_difference_se", "auc_baseline_sd",
    "logloss_baseline", "logloss_fae", "logloss_difference", "logloss_difference_se", "accuracy_baseline",
    "accuracy_fae", "target_auc", "epochs_to_auc_baseline", "epochs_to_auc_fae", "num_swaps", "sync_share",
    "train_s_baseline", "train_s_fae", "modelled_link_s", "modelled_hybrid_link_s", "commit", "date",
)  # fmt: skip
"""Fields of a cell that are kept in docs/. None is a path of the machine."""
HEAD = """\
# Hot rows study

For readers who ask whether hot batches are worth it: how few rows serve whole samples, what that saves on the link to a
fast device, and what training hot and cold batches in turns does to quality. How it was measured is in
[Studies](../study.md#hot).

- `kaggle`, `terabyte` and `avazu` are synthetic samples over tables of those cardinalities, cut to the scale that
  the study names. `criteo` and `taobao` are the real rows of [Locality](locality.md). They are few, so a share of
  their tables holds few rows.
- No fast device was used: a second memory of the machine held the hot rows. Rows, samples, bytes and quality are
  measured; no time on a link is.
- Bytes over the link are those of one epoch. "The hybrid" has embeddings on the CPU and MLPs on the device; a
  figure below 1 says that it sends fewer bytes.
- Pairs are shuffled order / the schedule, means over seeds. Differences are paired by seed, with their standard
  error. `fae R(50)`: turns whose rate begins at 50 and follows the loss; `fixed`: the rate stays; `window`: no turns,
  but the hot batches of every few come first.
"""


def charts_of(report: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns (file, SVG) by heading. The lines are of the rows with most accesses, one per source."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report["cells"]:
        if row["kind"] == "coverage" and row["rows"] == "exact":
            lines.setdefault(row["name"], []).append((row["hot_bytes"] / row["table_bytes"], row["hot_samples"]))
    chart = line_chart(
        {name: sorted(line) for name, line in lines.items()},
        x_label="hot rows, share of the tables' bytes",
        y_label="hot samples",
        label="share of hot samples by share of hot rows",
    )
    return {"Hot samples by hot rows": (CHART, chart)} if chart else {}


def body_of(report: Mapping[str, Any]) -> list[str]:
    """Returns a table per group, and what is promised for a GPU."""
    lines = []
    for group in read_preset(PRESET)["groups"]:
        if own := [row for row in report["cells"] if row["group"] == group["name"]]:
            lines += ["", f"## {group['name'].capitalize()}", "", group["about"] + seeds_of(own), ""]
            lines += budgets_table(own) if group["name"] == "budgets" else group_table(group["kind"], own)
    ways = [[line["mode"], line["promised"], line["speedup"]] for line in report["speedups"]]
    heads = {"way": "left", "promised": "left", "speed-up": "right"}
    about = "Times as fast as torch's tables on the CPU with MLPs on the GPU; no cell of this study trains on one."
    return [*lines, "", "## Speed on a GPU", "", about, "", *table(heads, ways)]


def group_table(kind: str, rows: Sequence[Row]) -> list[str]:
    """Returns a line for each cell."""
    shown = [SHOWN[kind](row) for row in rows]
    return table_of(TABLES.get(kind, THRESHOLDS), shown, words=("name", "schedule"))


def budgets_table(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each share of each table's bytes, with a column for each way to find hot rows."""
    ways = list(dict.fromkeys(row["rows"] for row in rows))
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["name"], row["amount"]), {})[row["rows"]] = row
    lines = []
    for (name, amount), own in found.items():
        told = [budget_text(own[way], amount) if way in own else "" for way in ways]
        lines.append([name, f"{amount:.0%}", megabytes(next(iter(own.values()))["hybrid_bytes"]), *told])
    heads = {"data": "left", "of the bytes": "right", "hybrid, MB": "right"} | dict.fromkeys(ways, "right")
    text = (
        "A cell has the share of hot samples, how many times fewer bytes than the hybrid cross the link, and the share "
        "of the tables' bytes if the way finds fewer hot rows than fit."
    )
    return [text, "", *table(heads, lines)]


def budget_text(row: Row, amount: float) -> str:
    """Returns the hot samples and how many times fewer bytes cross the link, with the bytes if they are fewer."""
    share = row["hot_bytes"] / row["table_bytes"]
    less = "" if share > 0.95 * amount else f" with {share:.1%}"
    return f"{row['hot_samples']:.1%}, {row['hybrid_ratio']:.2f}x{less}"


def seeds_of(rows: Sequence[Row]) -> str:
    """Returns how many seeds and steps the cells of a group have, and those whose scores training did not raise."""
    if rows[0]["kind"] != "quality":
        return ""
    seeds = " or ".join(str(n) for n in sorted({row["seeds"] for row in rows}))
    steps = {row["name"]: row["num_steps"] for row in rows}
    told = f" {seeds} seeds; steps: " + ", ".join(f"{name} {n}" for name, n in steps.items()) + "."
    unlearned = {row["name"]: row["unlearned_seeds"] for row in rows if row["unlearned_seeds"]}
    return told + "".join(f" {n} seeds of {name} learned nothing." for name, n in unlearned.items())


STUDY = StudyDocs("hot", HEAD, KEPT, charts_of, body_of, also_kept=("speedups",))
