"""What a study found: its figures by group, charts and one page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hotrow.bench import is_disturbed
from hotrow.draw import bar_chart, line_chart, load_template
from hotrow.lab.study.study import MODELLED, Group, Study

Row = Mapping[str, Any]
COSTS = {"samples/s": "samples_per_s", "samples/J": "samples_per_j", "samples per unit of money": "samples_per_unit"}
"""What is compared over machines: name of its column, and field."""
MOST_NAMED, LONGEST_NAMED = 8, 12
"""Points of a chart that have names instead of numbers, and characters of a name: more would overlap."""
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

    Figures are means over seeds. The gap is the test NE over that of the smallest batch size with the same seed, both
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


def charts_of(name: str, group: Group, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yields the names and the SVG of a group's charts: speed along its last axis."""
    if group.measures in MODELLED:
        yield from _modelled_charts(name, group, rows)
        return
    if group.draw is not None:
        points = {row["key"]: (row["step_ms"], ratio) for row in rows if (ratio := error_of(row)) is not None}
        lines = {
            "predicted over measured": sorted(points.values()),
            "1": [(x, 1.0) for x, _ in sorted(points.values())],
        }
        label = "Predicted over measured step time"
        if points:
            yield (
                name,
                line_chart(
                    lines,
                    x_label="measured step, ms",
                    y_label=label,
                    dashed=["1"],
                    dots=["predicted over measured"],
                    label=label,
                ),
            )
        return
    if group.measures == "quality":
        yield from _quality_chart(name, rows)
        return
    axis = [*group.axes][-1]
    lines = {}
    for line, own in lines_of(rows, axis).items():
        most = max(row["samples_per_s"] for row in own)
        places = [(_number(row["axes"][axis]), row["samples_per_s"] / most) for row in own]
        if all(x is not None and x > 0 for x, _ in places):
            lines[line] = sorted((float(x), share) for x, share in places if x is not None)
    label = f"{name}: speed along {axis}"
    if lines:
        ticks = {x: f"{x:g}" for line in lines.values() for x, _ in line}
        yield name, line_chart(lines, x_label=axis, y_label="speed, of the line's best", ticks=ticks, label=label)
    else:
        values = {" ".join(row["axes"].values()): row["samples_per_s"] for row in rows if row.get("samples_per_s")}
        if chart := bar_chart(values, y_label="samples/s", label=label):
            yield name, chart
    for number, (line, own) in enumerate(lines_of(rows, axis).items(), 1):
        title = f"{name}, {line}" if len(group.axes) > 1 else name
        for what, field in COSTS.items():
            if chart := machines_chart(own, axis, field, y_label=what, label=f"{title}: {what} of machines"):
                yield f"{name}-{number}-{field.removeprefix('samples_per_')}", chart


def _quality_chart(name: str, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    found = quality_by_batch(rows)
    if len(found) < 2:
        return
    sizes = [float(one["batch_size"]) for one in found]
    band = [
        (size, one["test_ne"] - (one["test_ne_sd"] or 0.0), one["test_ne"] + (one["test_ne_sd"] or 0.0))
        for size, one in zip(sizes, found, strict=True)
    ]
    line = f"mean of {found[0]['seeds']} seeds, and their standard deviation" if found[0]["seeds"] > 1 else "one seed"
    yield (
        name,
        line_chart(
            {line: [(size, one["test_ne"]) for size, one in zip(sizes, found, strict=True)]},
            x_label=BATCH,
            y_label="NE on test rows, rate tuned again",
            y_scale="value",
            bands={line: band},
            ticks={size: f"{size:g}" for size in sizes},
            label=f"{name}: quality along the batch size",
        ),
    )


def machines_chart(rows: Sequence[Row], axis: str, field: str, *, y_label: str, label: str) -> str:
    """Returns a chart of a figure along an axis, here (measured) and on declared machines (modelled); else nothing.

    Points without a number on the axis are set side by side, if their names are short and few.
    """
    names = [row["axes"][axis] for row in rows]
    at = [_number(name) for name in names]
    is_number = all(x is not None and x > 0 for x in at)
    if not is_number and (len(names) > MOST_NAMED or max(map(len, names)) > LONGEST_NAMED):
        return ""
    places = [float(x) for x in at if x is not None] if is_number else [*map(float, range(1, len(names) + 1))]
    lines: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for x, row in zip(places, rows, strict=True):
        for name, found in {"this machine, measured": row, **_modelled_of(row)}.items():
            if found.get(field) is not None:
                lines.setdefault(name, []).append((x, found[field]))
                if found is not row and is_number:
                    low, high = (found[field] * end / found["samples_per_s"] for end in found["spread"])
                    bands.setdefault(name, []).append((x, low, high))
    modelled = [name for name in lines if name.startswith("modelled")]
    if not modelled and field == "samples_per_s":
        return ""
    return line_chart(
        {name: sorted(line) for name, line in lines.items()},
        x_label=axis,
        y_label=y_label,
        x_scale="log" if is_number else "linear",
        y_scale="value",
        dots=() if is_number else [*lines],
        dashed=modelled,
        bands={name: sorted(band) for name, band in bands.items()},
        ticks=dict(zip(places, names, strict=True)),
        label=label,
    )


def _modelled_of(row: Row) -> dict[str, Row]:
    found = {}
    for name, own in row.get("modelled", {}).items():
        for head, each in {name: own, f"{name} + GPUs": own.get("with_gpus", {})}.items():
            if "samples_per_s" in each:
                found[f"modelled: {head}"] = each
    return found


def _modelled_charts(name: str, group: Group, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yields how many times as fast more ranks are modelled to be, for the first machine, beside ranks that cost
    nothing."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found: dict[str, Any] = next(iter(row["modelled"].values()), {})
        if "speedup" in found:
            line = " ".join(label for axis, label in row["axes"].items() if axis != "ranks")
            lines.setdefault(line, []).append((float(row["ranks"]), found["efficiency"]))
    ticks = {x: f"{x:g}" for line in lines.values() for x, _ in line}
    label = f"{name}: modelled speed of a rank, of that with the fewest ranks that hold the tables"
    if lines:
        yield name, line_chart(lines, x_label="ranks", y_label="modelled efficiency", ticks=ticks, label=label)


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
        charts = dict(charts_of(name, group, own))
        files |= {f"{chart}.svg": svg for chart, svg in charts.items()}
        if group.measures in MODELLED:
            groups.append(_shown_modelled(name, group, own, charts, machines=machines))
        else:
            groups.append(_shown_group(name, group, own, charts, machines=[] if study.models_alone else machines))
    off = model_error_words(report.get("prediction"))
    for group, one in zip(study.groups.values(), groups, strict=True):
        one["off"] = off if group.measures in MODELLED else ""
    machine = report["machine"]
    template = load_template("lab/study/study.html")
    files["report.html"] = template.render(
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
        "cells predicted before they were measured": f"{found['cells']}",
        "geometric mean error": f"{found['geometric_mean_error']:.1%}",
        "median error": f"{found['median_error']:.1%}",
        "worst error": f"{found['worst_error']:.0%}",
        "within 15 %": f"{found['share_within_15_percent']:.0%}",
        "predictions are too high by (median)": f"{found['median_bias']:+.1%}",
        "half the range of a cell's own rounds (median)": f"{found['median_noise']:.1%}",
        "cells that could not be predicted": f"{found['not_predicted']}",
    }
    if "share_placement_chosen_well" in found:
        words["the placement predicted fastest is the fastest, or within 3 % of it"] = (
            f"{found['share_placement_chosen_well']:.0%} of {found['models_with_placements']} models"
        )
        words["models in which a placement that was measured has no prediction"] = f"{found['models_incomplete']}"
    return words


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


def _shown_group(
    name: str, group: Group, rows: Sequence[Row], charts: Mapping[str, str], *, machines: Sequence[str]
) -> dict[str, Any]:
    quality = group.measures == "quality"
    axes = [*(["model"] if group.draw else []), *group.axes]
    columns: dict[str, Callable[[Row], str]] = {}
    if quality:
        columns |= {head: _digits(field, "{:.5f}") for head, field in _QUALITY.items()}
    columns |= {
        "samples/s": _digits("samples_per_s", "{:,.0f}"),
        "least to most": lambda row: "{:,.0f} to {:,.0f}".format(*row["spread"]) if "spread" in row else "",
    }
    if not quality:
        columns["step, ms"] = _digits("step_ms", "{:.3f}")
    if any("exchange_ms" in row for row in rows):
        columns |= {
            "of it in exchanges, ms": _digits("exchange_ms", "{:.3f}"),
            "predicted exchanges, ms": lambda row: _predicted_field(row, "exchange_ms", "{:.3f}"),
            "bytes sent by a rank": _digits("wire_bytes", "{:,.0f}"),
            "predicted bytes": lambda row: _predicted_field(row, "wire_bytes", "{:,.0f}"),
        }
    for head, field in [*COSTS.items()][1:]:
        if any(field in row for row in rows):
            columns[head] = _with_source(field)
    if any("predicted" in row for row in rows):
        columns |= {
            "predicted, ms": _predicted,
            "predicted / measured": _ratio,
            "own noise": _digits("noise", "±{:.1%}"),
        }
    for machine in machines:
        columns[f"modelled: {machine}, its processors alone, samples/s (range)"] = _modelled(machine)
        if any("with_gpus" in row.get("modelled", {}).get(machine, {}) for row in rows):
            columns[f"modelled: {machine}, with its GPUs, samples/s (range), and where rows lie"] = _with_gpus(machine)
        for head, field in [*COSTS.items()][1:]:
            if any(field in row.get("modelled", {}).get(machine, {}) for row in rows):
                columns[f"modelled: {machine}, {head}"] = _modelled(machine, field)
    columns["how clean, or why not measured"] = lambda row: str(row.get("note") or row.get("reason") or row["status"])
    return {
        "name": name,
        "asks": group.asks,
        "charts": [*charts.values()],
        "heads": [*axes, *columns],
        "num_words": len(axes),
        "rows": [
            [row["axes"].get(axis, "") for axis in axes] + [form(row) for form in columns.values()] for row in rows
        ],
        "best": best_batches(rows) if BATCH in axes and not quality else [],
        "quality": quality_by_batch(rows) if quality else [],
    }


def _shown_modelled(
    name: str, group: Group, rows: Sequence[Row], charts: Mapping[str, str], *, machines: Sequence[str]
) -> dict[str, Any]:
    """Returns a group of which nothing was measured."""
    axes = [*group.axes]
    columns: dict[str, Callable[[Row], str]] = {}
    figures = _NODES if group.measures == "nodes" else _SCALING
    for machine in machines:
        columns |= {f"modelled: {machine}, {head}": _of_model(machine, *what) for head, what in figures.items()}
    return {
        "name": name,
        "asks": group.asks,
        "charts": [*charts.values()],
        "heads": [*axes, *columns],
        "num_words": len(axes),
        "rows": [
            [row["axes"].get(axis, "") for axis in axes] + [form(row) for form in columns.values()] for row in rows
        ],
        "best": [],
        "quality": [],
    }


_SCALING = {
    "samples/s": ("samples_per_s", "{:,.0f}"),
    "step, ms": ("step_ms", "{:,.2f}"),
    "of it in exchanges, ms": ("exchange_ms", "{:,.2f}"),
    "times the fewest ranks' speed": ("speedup", "{:.2f}x"),
    "efficiency": ("efficiency", "{:.0%}"),
    "binds, or why nothing is said": ("binds", "{}"),
}
_NODES = {
    "machines that hold the tables in DRAM": ("nodes_in_dram", "{}"),
    "with an SSD in each": ("nodes_with_ssd", "{}"),
    "times fewer": ("fewer", "{:.1f}x"),
    "samples/s wanted, or why nothing is said": ("target_samples_per_s", "{:,.0f}"),
}


def _of_model(machine: str, field: str, form: str) -> Callable[[Row], str]:
    last = field in ("binds", "target_samples_per_s")

    def text(row: Row) -> str:
        found = row["modelled"].get(machine, {})
        if field in found:
            return form.format(found[field])
        return str(found.get("reason", "")) if last else ""

    return text


_QUALITY = {"validation NE": "val_ne", "test NE": "test_ne", "test AUC": "test_auc"}


def _digits(field: str, form: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(field) is None else form.format(row[field])


def _with_source(field: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        if field not in row:
            return ""
        value = f"{row[field]:,.0f}" if row[field] >= 1000 else f"{row[field]:.4g}"
        return f"{value} ({row[f'{field}_source']})"

    return text


def _predicted(row: Row) -> str:
    found = row.get("predicted", {})
    return f"{found['step_ms']:.3f}" if "step_ms" in found else str(found.get("reason", ""))


def _predicted_field(row: Row, field: str, form: str) -> str:
    found = row.get("predicted", {})
    return form.format(found[field]) if field in found else ""


def _ratio(row: Row) -> str:
    ratio = error_of(row)
    return "" if ratio is None else f"{ratio:.2f}"


def _with_gpus(machine: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found = row.get("modelled", {}).get(machine, {}).get("with_gpus", {})
        if "samples_per_s" not in found:
            return str(found.get("reason", ""))
        return "{:,.0f} ({:,.0f} to {:,.0f}), {}".format(found["samples_per_s"], *found["spread"], found["rows_on"])

    return text


def _modelled(machine: str, field: str = "samples_per_s") -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found = row.get("modelled", {}).get(machine, {})
        if "samples_per_s" not in found:
            return str(found.get("reason", "")) if field == "samples_per_s" else ""
        if field != "samples_per_s":
            return _with_source(field)(found)
        return "{:,.0f} ({:,.0f} to {:,.0f})".format(found[field], *found["spread"])

    return text
