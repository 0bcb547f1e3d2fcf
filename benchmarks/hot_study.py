"""docs/hot-study.md with its chart: the study `hot` as it was measured.

    hotrow study hot --out FOLDER [--data ...] && python -m benchmarks.hot_study FOLDER/hot.json

Without a file, the pages are made anew from docs/hot-study.json, which holds what they show of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import table
from benchmarks.study_docs import StudyDocs, table_of
from hotrow.draw.charts import line_chart
from hotrow.study.hot_page import SHOWN
from hotrow.study.runner import load_preset

CHART = "hot-study.svg"
COVERAGE = {
    "data": "name", "hot by": "rows", "amount": "amount", "hot MB": "hot_mb", "of the tables": "share",
    "hot rows": "hot_rows", "hot samples": "hot_samples", "MB over the link": "link_mb",
    "times fewer than the hybrid": "ratio",
}  # fmt: skip
CACHED = {
    "data": "name", "amount": "amount", "MB on the device": "slot_mb", "rows that were there": "hit_rows",
    "MB over the link": "link_mb", "times fewer than the hybrid": "ratio",
}  # fmt: skip
QUALITY = {
    "data": "name", "schedule": "schedule", "seeds": "seeds", "steps": "steps", "that learned nothing": "unlearned",
    "AUC": "auc", "difference": "auc_difference", "sd over seeds": "auc_sd", "LogLoss": "logloss",
    "accuracy": "accuracy", "epochs to the same AUC": "epochs",
}  # fmt: skip
COST = {
    "data": "name", "schedule": "schedule", "hot samples": "hot_samples", "swaps": "swaps",
    "copying, of training": "sync_share", "MB over the link": "link_mb", "times fewer than the hybrid": "ratio",
    "seconds on this CPU": "seconds", "modelled seconds on the link": "modelled",
}  # fmt: skip
TABLES = {"coverage": (COVERAGE,), "cached": (CACHED,), "quality": (QUALITY, COST)}
"""By kind of cell: heads of its tables, and the fields that hotrow.study.hot_page shows of it."""
KEPT = (
    "key", "group", "kind", "name", "rows", "amount", "small_table", "budget_bytes", "hot_bytes", "hot_rows",
    "hot_samples", "table_bytes", "calibrate_s", "classify_s", "link_bytes", "sync_bytes", "hybrid_bytes",
    "hybrid_ratio", "hit_rows", "schedule", "rate", "shuffled_end", "decay", "width", "seeds", "num_steps",
    "unlearned_seeds", "auc_baseline", "auc_fae", "auc_difference", "auc_difference_se", "auc_baseline_sd",
    "logloss_baseline", "logloss_fae", "logloss_difference", "logloss_difference_se", "accuracy_baseline",
    "accuracy_fae", "target_auc", "epochs_to_auc_baseline", "epochs_to_auc_fae", "num_swaps", "sync_share",
    "train_s_baseline", "train_s_fae", "modelled_link_s", "modelled_hybrid_link_s", "commit", "date",
)  # fmt: skip
"""Of a cell: no path of the machine is among them."""
HEAD = """\
# Study: hot rows

How few rows serve whole samples, what that saves on the link to a fast device, and what training hot and cold batches
in turns does to quality: how it is done, and what each field means, is in [Studies](study.md#hot). `kaggle`,
`terabyte` and `avazu`: synthetic samples over tables of those cardinalities, cut to the scale that the study names.
`criteo` and `taobao`: the real rows of [Locality](locality.md); they are few, so that a share of their tables holds
few rows. No fast device was used: hot rows are copied to a second memory of the machine, so rows, samples, bytes and
quality are measured; seconds on a link are bytes over its rate, and stand in the column titled "modelled" alone. MB
over the link: of one epoch. The hybrid: embeddings on the CPU, MLPs on the device. Pairs: shuffled order / the
schedule, means over seeds; differences are paired by seed, with their standard error.
"""


def charts_of(report: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """By heading: the chart's file, and the SVG. A line for each source, of the rows with most accesses."""
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
    """A table or two of each group's cells, and what of a GPU is promised."""
    lines = []
    for group in load_preset("hot")["groups"]:
        if rows := [SHOWN[group["kind"]](row) for row in report["cells"] if row["group"] == group["name"]]:
            lines += ["", f"## {group['name'].capitalize()}", "", group["about"]]
            for columns in TABLES[group["kind"]]:
                lines += ["", *table_of(columns, rows, words=("name", "rows", "schedule"))]
    ways = [[line["mode"], line["promised"], line["speedup"]] for line in report["speedups"]]
    heads = {"way": "left", "promised": "left", "speed-up": "right"}
    about = "Times as fast as torch's tables on the CPU with MLPs on the GPU; no cell of this study trains on one."
    return [*lines, "", "## Speed on a GPU", "", about, "", *table(heads, ways)]


STUDY = StudyDocs("hot", HEAD, KEPT, charts_of, body_of, also_kept=("speedups",))

if __name__ == "__main__":
    STUDY.main(__doc__)
