"""What the studies in NAME-study.json found, as cells that claims.yaml can quote like benchmarks.json's.

Such a cell holds a sentence, `told`, made of the study's rows, beside the command, machine and date of the study. For
sweeps the file is the results.json that they wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import cluster_model
from benchmarks.results import Cell, processor_of
from benchmarks.rivals.memory import ENOUGH, machines
from benchmarks.study.docs import DOCS
from benchmarks.study.sentences import SENTENCES

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


FIGURES: Mapping[str, Mapping[str, Callable[[Report], str]]] = {
    "memory": {"study_memory_machines": machines_told, "study_memory_rivals": rivals_told},
    "hot": {
        **{
            f"study_hot_samples_{name}": partial(hot_samples_told, name)
            for name in ("kaggle", "terabyte", "avazu", "criteo", "taobao")
        },
        "study_hot_bytes": bytes_told,
    },
    **SENTENCES,
}
"""Study -> name of a cell -> what makes its sentence."""


def study_cells() -> dict[str, dict[str, Cell]]:
    """Returns cell -> processor -> the sentence with its circumstances: of each study in docs/, and the modelled ones.

    Results of a second processor are docs/measurements/NAME-study-PROCESSOR.json.
    """
    found: dict[str, dict[str, Cell]] = {}
    for study, figures in FIGURES.items():
        for file in sorted(DOCS.glob(f"{study}-study*.json")):
            report = json.loads(file.read_text(encoding="utf-8"))
            beside = {
                "command": f"python -m benchmarks.study {study}",
                "machine": report["machine"],
                "date": max(row["date"] for row in report["cells"]),
            }
            for name, told in figures.items():
                cell = {"name": name, "told": told(report), **beside}
                found.setdefault(name, {})[processor_of(report)] = cell
    return found | cluster_model.claimed()
