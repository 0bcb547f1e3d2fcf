"""What the studies in docs/NAME-study.json found, as cells that docs/claims.yaml can quote like benchmarks.json's.

Such a cell holds a sentence, `told`, made of the study's rows, beside the command, machine and date of the study. For
studies of `hotrow study` the file is the results.json that it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.results import Cell, processor_of
from benchmarks.rivals.memory import ENOUGH, machines
from benchmarks.study_docs import DOCS

Report = Mapping[str, Any]
"""The content of a study's JSON file."""


def machines_told(report: Report) -> str:
    """Returns how many machines one with an SSD replaces, by ids."""
    by_number: dict[int, list[str]] = {}
    for line in machines(report["cells"]):
        if line["measured"]:
            by_number.setdefault(line["machines_in_dram"], []).append(line["source"])
    texts = [f"{number} ({', '.join(by_number[number])})" for number in sorted(by_number)]
    return f"one machine with an SSD replaces {', '.join(texts)} at {ENOUGH:.0%} of the speed in DRAM"


def rivals_told(report: Report) -> str:
    """Returns the best speed of each kind of store on the ids that all of them trained on, at the least DRAM."""
    rows = report["cells"]
    others = [row for row in rows if row["group"] == "rivals"]
    parts, source = max(row["dram_parts"] for row in others), others[0]["source"]
    speeds = {
        side: max(
            row["relative_speed"]
            for row in rows
            if (row["side"], row["source"], row["dram_parts"]) == (side, source, parts)
        )
        for side in ("tiers", "mmap", "rocksdb")
    }
    return (
        f"DRAM for 1/{parts}, {source}: hotrow {speeds['tiers']:.0%} of the speed in DRAM, "
        f"mapped files {speeds['mmap']:.0%}, RocksDB behind a cache of rows {speeds['rocksdb']:.0%}"
    )


def hot_samples_told(name: str, report: Report) -> str:
    """Returns which share of one data set's samples the rows with most accesses serve, by budget."""
    own = [row for row in report["cells"] if (row["kind"], row["name"], row["rows"]) == ("coverage", name, "exact")]
    own.sort(key=lambda row: row["amount"])
    texts = [f"{row['amount']:.0%} serve {row['hot_samples']:.1%}" for row in own]
    return f"of the bytes, {', '.join(texts)}"


def bytes_told(report: Report) -> str:
    """Returns how many times fewer bytes cross the link with hot and cold phases."""
    own = [row for row in report["cells"] if (row["group"], row.get("schedule")) == ("quality", "fae")]
    texts = [f"{row['name']} {row['hybrid_ratio']:.2f}x" for row in own]
    return (
        f"fewer than with all tables on the CPU, with {own[0]['amount']:.0%} of the bytes on the device: "
        f"{', '.join(texts)}; counted, no device was used"
    )


def speeds_told(group: str, report: Report) -> str:
    """Returns the speeds of a group of a sweep, line by line: that of its first point, and the others beside it."""
    lines: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for row in report["cells"]:
        if row["group"] == group:
            *others, point = row["axes"].values()
            lines.setdefault(" ".join(others), []).append((point, row))
    texts = []
    for name, points in lines.items():
        first = next((row for _, row in points if row.get("samples_per_s")), None)
        said = [f"{point} {_beside(row, first)}" for point, row in points]
        texts.append((f"{name}: " if name else "") + ", ".join(said))
    return "; ".join(texts)


def _beside(row: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Returns a speed in samples/s if it is the first of its line, else as a share of the first."""
    if not row.get("samples_per_s") or first is None:
        return str(row.get("status", "not measured"))
    if row is first:
        return f"{row['samples_per_s']:,.0f} samples/s"
    return f"{row['samples_per_s'] / first['samples_per_s']:.0%}"


def quality_told(report: Report) -> str:
    """Returns by how much NE rises with the batch size, each with the rate that was best on validation rows."""
    best: dict[int, Mapping[str, Any]] = {}
    for row in report["cells"]:
        size = int(row["axes"]["train.batch_size"])
        if row.get("val_ne") is not None and (size not in best or row["val_ne"] < best[size]["val_ne"]):
            best[size] = row
    base = best[min(best)]["test_ne"]
    texts = [f"{size:,} {best[size]['test_ne'] / base - 1:+.2%}" for size in sorted(best)[1:]]
    return f"test NE beside batches of {min(best):,}: {', '.join(texts)}"


def prediction_told(report: Report) -> str:
    """Returns how far blind predictions were off, and how often they chose the fastest placement."""
    found = report["prediction"]
    text = (
        f"geometric mean error {found['geometric_mean_error']:.1%} over {found['cells']} cells, "
        f"{found['share_within_15_percent']:.0%} within 15 %, repeat noise {found['median_noise']:.1%}"
    )
    if "share_placement_chosen_well" in found:
        text += f"; the placement predicted fastest was, within 3 %, in {found['share_placement_chosen_well']:.0%}"
    return text


SWEEPS = ("models", "dense", "sparse", "mlp", "batch", "hash", "lookups", "placement")
"""Groups of the study `efficiency`."""
FIGURES: Mapping[str, Mapping[str, Callable[[Report], str]]] = {
    "memory": {"study_memory_machines": machines_told, "study_memory_rivals": rivals_told},
    "hot": {
        **{
            f"study_hot_samples_{name}": partial(hot_samples_told, name)
            for name in ("kaggle", "terabyte", "avazu", "criteo", "taobao")
        },
        "study_hot_bytes": bytes_told,
    },
    "efficiency": {f"study_efficiency_{group}": partial(speeds_told, group) for group in SWEEPS},
    "quality": {"study_quality": quality_told},
    "prediction": {"study_prediction": prediction_told},
}
"""Study -> name of a cell -> what makes its sentence."""
OF_BENCHMARKS = ("memory", "hot")
"""Studies that `python -m benchmarks.studies` runs; `hotrow study` runs the others."""


def study_cells() -> dict[str, dict[str, Cell]]:
    """Returns cell -> processor -> the sentence with its circumstances, for each study that docs/ has results of."""
    found: dict[str, dict[str, Cell]] = {}
    for study, figures in FIGURES.items():
        file = DOCS / f"{study}-study.json"
        if not file.exists():
            continue
        report = json.loads(file.read_text(encoding="utf-8"))
        beside = {
            "command": f"python -m benchmarks.studies {study}" if study in OF_BENCHMARKS else f"hotrow study {study}",
            "machine": report["machine"],
            "date": max(row["date"] for row in report["cells"]),
        }
        for name, told in figures.items():
            found[name] = {processor_of(report): {"name": name, "told": told(report), **beside}}
    return found
