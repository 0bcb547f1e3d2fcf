"""What a study found: its figures by group, charts and one page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotrow.bench import is_disturbed
from hotrow.draw import bar_chart, line_chart, load_template
from hotrow.lab.study.study import MODELLED, Group, Study

Row = Mapping[str, Any]
COSTS = {"samples/J": "samples_per_j", "samples per unit of money": "samples_per_unit"}
"""What is compared over machines beside the speed: name of its column, and field."""
BATCH, SEED = "train.batch_size", "train.seed"
GOOD_SHARE = 0.95
"""A batch size is good for speed if it reaches this share of the highest."""
_NES = ("val_ne", "test_ne")
CLOSE = 0.15
SAME_PLACEMENT = 0.03
"""A placement counts as chosen well if it is slower than the fastest by at most this."""


# ---- summaries


def summary_of(study: Study, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the fields that sum a study up."""
    fields: dict[str, Any] = {"title": study.title, "asks": study.asks}
    errors = prediction_summary(rows)
    return fields | ({"prediction": errors} if errors else {})


def error_of(row: Row) -> float | None:
    """Returns predicted over measured step time; None if one of them is missing."""
    predicted = row.get("predicted", {}).get("step_ms")
    return predicted / row["step_ms"] if predicted and row.get("step_ms") else None


def prediction_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns how far predictions were off, over all cells that were predicted and measured; {} if none were."""
    ratios = [ratio for row in rows if (ratio := error_of(row)) is not None]
    if not ratios:
        return {}
    off = [abs(math.log(ratio)) for ratio in ratios]
    noise = [row["noise"] for row in rows if error_of(row) is not None]
    return {
        "cells": len(ratios),
        "geometric_mean_error": math.exp(statistics.fmean(off)) - 1,
        "median_error": math.exp(statistics.median(off)) - 1,
        "worst_error": math.exp(max(off)) - 1,
        "share_within_15_percent": sum(abs(ratio - 1) <= CLOSE for ratio in ratios) / len(ratios),
        "median_bias": statistics.median(ratios) - 1,
        "median_noise": statistics.median(noise),
        "predicted_first": predicted_first(rows),
        "not_predicted": sum(row.get("predicted", {}).get("reason") is not None for row in rows),
        **_placements(rows),
    }


def predicted_first(rows: Sequence[Row]) -> int:
    """Returns in how many cells the prediction was on disk before any cell was measured."""
    first = min((row.get("measured_at", "") for row in rows if row.get("status") != "modelled"), default="")
    return sum(row["predicted"].get("written", first + "~") <= first for row in rows if error_of(row) is not None)


def _placements(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns in how many models the placement that was predicted fastest is the fastest, or within 3 % of it.

    The fastest is that of all that were measured, predicted or not. `models_incomplete` is in how many of the models
    one of those was not predicted.
    """
    models: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("step_ms") and "model" in row["axes"]:
            models.setdefault(f"{row['group']}/{row['axes']['model']}", []).append(row)
    good = compared = incomplete = 0
    for own in models.values():
        predicted = [row for row in own if error_of(row) is not None]
        if len(own) > 1 and predicted:
            chosen = min(predicted, key=lambda row: row["predicted"]["step_ms"])
            good += chosen["step_ms"] <= (1 + SAME_PLACEMENT) * min(row["step_ms"] for row in own)
            compared += 1
            incomplete += len(predicted) < len(own)
    if not compared:
        return {}
    return {
        "models_with_placements": compared,
        "models_incomplete": incomplete,
        "share_placement_chosen_well": good / compared,
    }


def best_batches(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns, for each line of a group in which the batch size varies, the fastest and the smallest good one."""
    found = []
    for line, own in lines_of(rows, BATCH).items():
        fastest = max(own, key=lambda row: row["samples_per_s"])
        enough = [row for row in own if row["samples_per_s"] >= GOOD_SHARE * fastest["samples_per_s"]]
        good = min(enough, key=lambda row: row["batch_size"])
        found.append(
            {
                "line": line,
                "fastest": fastest["batch_size"],
                "samples_per_s": fastest["samples_per_s"],
                "smallest_good": good["batch_size"],
                "at_the_end": fastest["batch_size"] == max(row["batch_size"] for row in own),
            }
        )
    return found


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


def lines_of(rows: Sequence[Row], axis: str) -> dict[str, list[Row]]:
    """Returns the rows that have a speed and vary along `axis`, by what they have in common otherwise."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("samples_per_s") is not None and axis in row["axes"]:
            others = [label for name, label in row["axes"].items() if name != axis]
            found.setdefault(" ".join(others) or axis, []).append(row)
    return found


# ---- pictures


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None


def charts_of(name: str, group: Group, rows: Sequence[Row]) -> dict[str, str]:
    """Returns the SVG of a group's chart by its name; {} if there is nothing to draw."""
    if group.measures in MODELLED:
        svg = _modelled_chart(name, rows)
    elif group.draw is not None:
        svg = _prediction_chart(rows)
    else:
        svg = _quality_chart(name, rows) if group.measures == "quality" else _speed_chart(name, [*group.axes][-1], rows)
    return {name: svg} if svg else {}


def _speed_chart(name: str, axis: str, rows: Sequence[Row]) -> str:
    """Draws the speed along an axis; bars if its points are not numbers."""
    lines, label = {}, f"{name}: speed along {axis}"
    for line, own in lines_of(rows, axis).items():
        most = max(row["samples_per_s"] for row in own)
        places = [(_number(row["axes"][axis]), row["samples_per_s"] / most) for row in own]
        if all(x is not None and x > 0 for x, _ in places):
            lines[line] = sorted((float(x), share) for x, share in places if x is not None)
    if lines:
        ticks = {x: f"{x:g}" for line in lines.values() for x, _ in line}
        return line_chart(lines, x_label=axis, y_label="speed, of the line's best", ticks=ticks, label=label)
    values = {" ".join(row["axes"].values()): row["samples_per_s"] for row in rows if row.get("samples_per_s")}
    return bar_chart(values, y_label="samples/s", label=label)


def _prediction_chart(rows: Sequence[Row]) -> str:
    points = sorted((row["step_ms"], ratio) for row in rows if (ratio := error_of(row)) is not None)
    if not points:
        return ""
    what, label = "predicted over measured", "Predicted over measured step time"
    lines = {what: points, "1": [(x, 1.0) for x, _ in points]}
    return line_chart(lines, x_label="measured step, ms", y_label=label, dashed=["1"], dots=[what], label=label)


def _quality_chart(name: str, rows: Sequence[Row]) -> str:
    found = quality_by_batch(rows)
    if len(found) < 2:
        return ""
    points = [(float(one["batch_size"]), one["test_ne"], one["test_ne_sd"] or 0.0) for one in found]
    line = f"mean of {found[0]['seeds']} seeds, and their standard deviation" if found[0]["seeds"] > 1 else "one seed"
    return line_chart(
        {line: [(size, ne) for size, ne, _ in points]},
        x_label=BATCH,
        y_label="NE on test rows, rate tuned again",
        y_scale="value",
        bands={line: [(size, ne - sd, ne + sd) for size, ne, sd in points]},
        ticks={size: f"{size:g}" for size, _, _ in points},
        label=f"{name}: quality along the batch size",
    )


def _modelled_chart(name: str, rows: Sequence[Row]) -> str:
    """Draws how efficient more ranks are modelled to be on the first machine."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found: dict[str, Any] = next(iter(row["modelled"].values()), {})
        if "speedup" in found:
            line = " ".join(label for axis, label in row["axes"].items() if axis != "ranks")
            lines.setdefault(line, []).append((float(row["ranks"]), found["efficiency"]))
    ticks = {x: f"{x:g}" for line in lines.values() for x, _ in line}
    label = f"{name}: modelled speed of a rank, of that with the fewest ranks that hold the tables"
    return line_chart(lines, x_label="ranks", y_label="modelled efficiency", ticks=ticks, label=label) if lines else ""


# ---- the page


def files_of(study: Study, report: Mapping[str, Any], *, machines: Sequence[str] = ()) -> dict[str, str]:
    """Returns charts and page by file name.

    report: the content of results.json, only this study's rows. machines: those that have columns of modelled figures.
    """
    rows: Sequence[Row] = report["cells"]
    files: dict[str, str] = {}
    groups = []
    for name, group in study.groups.items():
        own = [row for row in rows if row["group"] == name]
        charts, modelled = charts_of(name, group, own), group.measures in MODELLED
        files |= {f"{chart}.svg": svg for chart, svg in charts.items()}
        others = machines if modelled or not study.models_alone else []
        columns = _modelled_columns(group, others) if modelled else _columns(group, own, others)
        axes = [*(["model"] if group.draw and not modelled else []), *group.axes]
        shown = {
            "name": name,
            "asks": group.asks,
            "off": model_error_words(report.get("prediction")) if modelled else "",
            "charts": [*charts.values()],
            "heads": [*axes, *columns],
            "num_words": len(axes),
            "rows": [
                [row["axes"].get(axis, "") for axis in axes] + [form(row) for form in columns.values()] for row in own
            ],
            "best": best_batches(own) if BATCH in axes and group.measures == "speed" else [],
            "quality": quality_by_batch(own) if group.measures == "quality" else [],
        }
        groups.append(shown)
    machine = report["machine"]
    files["report.html"] = load_template("lab/study/study.html").render(
        title=study.title,
        asks=study.asks,
        command=report["command"],
        quick=report["quick"],
        machine=f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB",
        backend=f"{report['backend']['name']} ({report['backend']['isa']})",
        torch=report["versions"]["torch"],
        commit=report.get("commit"),
        num_cells=sum(row.get("status") != "modelled" for row in rows),
        num_disturbed=sum(is_disturbed(row) for row in rows if "rounds" in row),
        prediction=_prediction_words(report.get("prediction")),
        when_predicted=_when_predicted(report.get("prediction")),
        groups=groups,
        skipped=report["skipped"],
        no_power=not any("samples_per_j" in row for row in rows),
        no_price=not any("samples_per_unit" in row for row in rows),
    )
    return files


def _prediction_words(found: Mapping[str, Any] | None) -> dict[str, str]:
    if not found:
        return {}
    words = {
        "cells predicted before they were measured": "{cells}",
        "geometric mean error": "{geometric_mean_error:.1%}",
        "median error": "{median_error:.1%}",
        "worst error": "{worst_error:.0%}",
        "within 15 %": "{share_within_15_percent:.0%}",
        "predictions are too high by (median)": "{median_bias:+.1%}",
        "half the range of a cell's own rounds (median)": "{median_noise:.1%}",
        "cells that could not be predicted": "{not_predicted}",
    }
    if "share_placement_chosen_well" in found:
        words |= {
            "the placement predicted fastest is the fastest, or within 3 % of it": (
                "{share_placement_chosen_well:.0%} of {models_with_placements} models"
            ),
            "models in which a placement that was measured has no prediction": "{models_incomplete}",
        }
    return {what: form.format(**found) for what, form in words.items()}


def model_error_words(found: Mapping[str, Any] | None) -> str:
    """Returns how far the cost model was off where it could be measured, for what it says of machines elsewhere."""
    if not found:
        return "None of this was measured, and no cell here says how far the model is off."
    return (
        f"None of this was measured. The same model was off by {found['geometric_mean_error']:.1%} (geometric mean; at "
        f"worst {found['worst_error']:.0%}) over the {found['cells']} cells that could be measured here."
    )


def _when_predicted(found: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    if found["predicted_first"] == found["cells"]:
        return "All predictions were on disk before the first cell was measured."
    return (
        f"{found['predicted_first']} of {found['cells']} predictions were on disk before the first cell was measured, "
        "the others before their own cell was."
    )


# ---- columns of its tables

Columns = dict[str, Callable[[Row], str]]


def _figure(form: str, *path: str, why: bool = False) -> Callable[[Row], str]:
    """Returns what shows the figure at `path` of a row; its neighbours may be in `form`, too.

    why: whether the reason stands in its place if there is none.
    """

    def text(row: Row) -> str:
        found: Any = row
        for name in path[:-1]:
            found = found.get(name, {})
        if (value := found.get(path[-1])) is not None:
            if isinstance(value, dict):
                value = ", ".join(f"{part} {number:,.2f}" for part, number in value.items())
            return form.format(value, **found)
        return str(found.get("reason", "")) if why else ""

    return text


def _with_source(*path: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found: Any = row
        for name in path[:-1]:
            found = found.get(name, {})
        value = found.get(path[-1])
        form = "{:.4g} ({})" if value is None or value < 1000 else "{:,.0f} ({})"
        return "" if value is None else form.format(value, found[f"{path[-1]}_source"])

    return text


def _columns(group: Group, rows: Sequence[Row], machines: Sequence[str]) -> Columns:
    """Returns what the table of a measured group shows beside its axes."""
    of_spread = "{spread[0]:,.0f} to {spread[1]:,.0f}"
    columns: Columns = {}
    if group.measures == "quality":
        heads = {"validation NE": "val_ne", "test NE": "test_ne", "test AUC": "test_auc"}
        columns |= {head: _figure("{:.5f}", field) for head, field in heads.items()}
    columns |= {"samples/s": _figure("{:,.0f}", "samples_per_s"), "least to most": _figure(of_spread, "spread")}
    if group.measures == "speed":
        columns["step, ms"] = _figure("{:.3f}", "step_ms")
    if any("exchange_ms" in row for row in rows):
        columns |= {
            "of it in exchanges, ms": _figure("{:.3f}", "exchange_ms"),
            "predicted exchanges, ms": _figure("{:.3f}", "predicted", "exchange_ms"),
            "bytes sent by a rank": _figure("{:,.0f}", "wire_bytes"),
            "predicted bytes": _figure("{:,.0f}", "predicted", "wire_bytes"),
        }
    columns |= {head: _with_source(field) for head, field in COSTS.items() if any(field in row for row in rows)}
    if any("predicted" in row for row in rows):
        columns |= {
            "predicted, ms": _figure("{:.3f}", "predicted", "step_ms", why=True),
            "predicted / measured": lambda row: "" if (ratio := error_of(row)) is None else f"{ratio:.2f}",
            "own noise": _figure("±{:.1%}", "noise"),
        }
    for machine in machines:
        found, head = [row.get("modelled", {}).get(machine, {}) for row in rows], f"modelled: {machine}"
        speed, form = ("modelled", machine, "samples_per_s"), f"{{:,.0f}} ({of_spread})"
        columns[f"{head}, its processors alone, samples/s (range)"] = _figure(form, *speed, why=True)
        if any("with_gpus" in own for own in found):
            columns[f"{head}, with its GPUs, samples/s (range), and where rows lie"] = _figure(
                form + ", {rows_on}", "modelled", machine, "with_gpus", "samples_per_s", why=True
            )
        for cost, field in COSTS.items():
            if any(field in own for own in found):
                columns[f"{head}, {cost}"] = _with_source("modelled", machine, field)
    columns["how clean, or why not measured"] = lambda row: str(row.get("note") or row.get("reason") or row["status"])
    return columns


_SCALING = {
    "samples/s": ("samples_per_s", "{:,.0f}"),
    "step, ms": ("step_ms", "{:,.2f}"),
    "of it in exchanges, ms": ("exchange_ms", "{:,.2f}"),
    "times the fewest ranks' speed": ("speedup", "{:.2f}x"),
    "efficiency": ("efficiency", "{:.0%}"),
    "binds, or why nothing is said": ("binds", "{}"),
    "what a step is made of, ms": ("parts_ms", "{}"),
}
_NODES = {
    "machines that hold the tables in DRAM": ("nodes_in_dram", "{}"),
    "with an SSD in each": ("nodes_with_ssd", "{}"),
    "times fewer": ("fewer", "{:.1f}x"),
    "samples/s wanted, or why nothing is said": ("target_samples_per_s", "{:,.0f}"),
}


def _modelled_columns(group: Group, machines: Sequence[str]) -> Columns:
    """Returns what the table of a group shows of which nothing was measured."""
    columns: Columns = {}
    for machine in machines:
        for head, (field, form) in (_NODES if group.measures == "nodes" else _SCALING).items():
            why = head.endswith("why nothing is said")
            columns[f"modelled: {machine}, {head}"] = _figure(form, "modelled", machine, field, why=why)
    return columns
