"""Studies of `hotrow study` in a sentence each, for docs/measurements/claims.md: what their results.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hotrow.lab.study.results import quality_by_batch

Report = Mapping[str, Any]
"""The content of a study's results.json."""


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


def gains_told(report: Report) -> str:
    """Returns how many times as fast declared machines are modelled to be, with their GPUs if any: for the models that
    gain least and most."""
    gains: dict[str, list[tuple[float, str]]] = {}
    for row in report["cells"]:
        if row["group"] != "models" or not row.get("samples_per_s"):
            continue
        for machine, alone in row.get("modelled", {}).items():
            for name, found in ((machine, alone), (f"{machine} with its GPUs", alone.get("with_gpus", {}))):
                if "samples_per_s" in found:
                    rows_on = f", rows on {found['rows_on']}" if "rows_on" in found else ""
                    gain = found["samples_per_s"] / row["samples_per_s"]
                    gains.setdefault(name, []).append((gain, f"{row['axes']['point']} {gain:.1f}x{rows_on}"))
    texts = [f"{name}: {min(own)[1]}, to {max(own)[1]}" for name, own in gains.items()]
    return f"modelled, not measured: {'; '.join(texts)}" if texts else "not modelled: see the page of the study"


def quality_told(report: Report) -> str:
    """Returns by how much NE rises with the batch size, each with the rate that was best on validation rows."""
    found = quality_by_batch(report["cells"])
    first, *others = found
    spreads = ["" if one["ne_gap_sd"] is None else f" ± {one['ne_gap_sd']:.2%}" for one in others]
    texts = [f"{one['batch_size']:,} {one['ne_gap']:+.2%}{sd}" for one, sd in zip(others, spreads, strict=True)]
    told = f"test NE beside batches of {first['batch_size']:,}: {', '.join(texts)}"
    seeds = f" (means and standard deviations of {first['seeds']} seeds)" if first["seeds"] > 1 else ""
    edges = [f"{one['batch_size']:,}" for one in found if one["at_the_edge"]]
    edge = f"; at {', '.join(edges)} the best rate is the last that was tried" if edges and not report["quick"] else ""
    return told + seeds + edge


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


def ranks_told(report: Report) -> str:
    """Returns how fast more processes on this machine are, and how far their predictions were off."""
    texts = [speeds_told("ranks", report)]
    if "prediction" in report:
        texts.append(f"predictions of all measured cells: {prediction_told(report)}")
    return "; ".join(texts)


def sockets_told(machine: str, report: Report) -> str:
    """Returns the efficiency that is modelled for most ranks of each preset on a declared machine, with what binds
    there, and says that it is modelled."""
    texts = []
    for group in ("strong", "weak"):
        found = {}
        for row in (row for row in report["cells"] if row["group"] == group):
            modelled = row["modelled"].get(machine, {})
            if "efficiency" in modelled:
                told = f"{modelled['efficiency']:.0%} on {row['ranks']}"
                found[row["axes"]["preset"]] = f"{told} ({modelled['binds']})" if "parts_ms" in modelled else told
        told = ", ".join(f"{preset} {each}" for preset, each in found.items())
        texts += [f"{group} scaling: {told}"] if found else []
    return f"modelled, not measured; {'; '.join(texts)}" if texts else "not modelled: see the page of the study"


def nodes_told(report: Report) -> str:
    """Returns how many machines are modelled to hold the tables in DRAM, and how many with an SSD do as much."""
    texts = []
    for row in report["cells"]:
        if row["group"] == "nodes":
            found: dict[str, Any] = row["modelled"].get("cpu-server", {})
            told = f"{found['nodes_in_dram']} / {found['nodes_with_ssd']}" if "fewer" in found else "not known"
            texts.append(f"{row['axes']['preset']} {told}")
    return f"modelled, machines in DRAM / with an SSD: {', '.join(texts)}"


SWEEPS = ("models", "dense", "sparse", "mlp", "batch", "hash", "lookups", "placement")
"""Groups of the study `efficiency`."""
SENTENCES: Mapping[str, Mapping[str, Callable[[Report], str]]] = {
    "efficiency": {
        **{f"study_efficiency_{group}": partial(speeds_told, group) for group in SWEEPS},
        "study_efficiency_machines": gains_told,
    },
    "quality": {"study_quality": quality_told},
    "prediction": {"study_prediction": prediction_told},
    "scaling": {
        "study_scaling_ranks": ranks_told,
        "study_scaling_sockets": partial(sockets_told, "sc20-cluster"),
        "study_scaling_ethernet": partial(sockets_told, "cpu-server"),
        "study_scaling_nodes": nodes_told,
    },
}
"""Study -> what a claim names -> what makes its sentence."""
