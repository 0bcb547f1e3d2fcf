"""Sweeps in a sentence each, for docs/measurements/claims.md: what their results.json says."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

Row = Mapping[str, Any]
BATCH, SEED = "train.batch_size", "train.seed"
_NES = ("val_ne", "test_ne")
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


def quality_by_batch(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns, for each batch size, the point of the other axes with the lowest validation NE, and its gap on test.

    Figures are means over seeds. The gap is the test NE over the NE of the smallest batch size with the same seed, both
    at their own best point; `_sd` is the standard deviation over seeds, None for one seed. `at_the_edge`: no point
    beyond it was tried, so that a better one may lie there.
    """
    found: list[dict[str, Any]] = []
    base: dict[str, float] = {}
    for size in sorted({row["batch_size"] for row in rows if "batch_size" in row}):
        points: dict[str, list[Row]] = {}
        for row in rows:
            if row["batch_size"] == size:
                others = [f"{axis} {label}" for axis, label in row["axes"].items() if axis not in (BATCH, SEED)]
                points.setdefault(" ".join(others), []).append(row)
        scored = {
            point: own for point, own in points.items() if all(row.get(n) is not None for row in own for n in _NES)
        }
        if not scored:
            continue
        best = min(scored, key=lambda point: statistics.fmean(row["val_ne"] for row in scored[point]))
        by_seed = {row["axes"].get(SEED, ""): row["test_ne"] for row in scored[best]}
        base = base or by_seed
        gaps = [ne / base[seed] - 1 for seed, ne in by_seed.items() if seed in base]
        gaps = gaps or [statistics.fmean(by_seed.values()) / statistics.fmean(base.values()) - 1]
        found.append(
            {
                "batch_size": size,
                "point": best,
                "seeds": len(by_seed),
                **{name: _mean_of(scored[best], name) for name in ("test_ne", "test_auc", "samples_per_s")},
                "test_ne_sd": _sd([*by_seed.values()]),
                "ne_gap": statistics.fmean(gaps),
                "ne_gap_sd": _sd(gaps),
                "at_the_edge": _is_at_edge(points, best),
            }
        )
    return found


def _mean_of(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else None


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _is_at_edge(points: Mapping[str, Sequence[Row]], best: str) -> bool:
    """Returns whether the best of the points has the least or the most of them on an axis of numbers."""
    for axis in (name for name in points[best][0]["axes"] if name not in (BATCH, SEED)):
        tried = [number for own in points.values() if (number := _number(own[0]["axes"][axis])) is not None]
        if len(set(tried)) > 1 and _number(points[best][0]["axes"][axis]) in (min(tried), max(tried)):
            return True
    return False


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None


SWEEPS = ("models", "dense", "sparse", "mlp", "batch", "hash", "lookups", "placement")
"""Groups of the study `efficiency`."""
SENTENCES: Mapping[str, Mapping[str, Callable[[Report], str]]] = {
    "efficiency": {
        **{f"study_efficiency_{group}": partial(speeds_told, group) for group in SWEEPS},
    },
    "quality": {"study_quality": quality_told},
    "scaling": {"study_scaling_ranks": partial(speeds_told, "ranks")},
}
"""Study -> what a claim names -> what makes its sentence."""
