"""The part of benchmarks.md on hot rows: what benchmarks.hot measured, in its own tables."""

from __future__ import annotations

from typing import Any

from benchmarks.hot_quality import link_table, quality_table
from benchmarks.markdown import heads, held, table
from benchmarks.processors import Found, best, where
from benchmarks.rounds import how_clean


def hot_tables(found: Found) -> list[str]:
    """A table for each kind of cell that there is."""
    kinds = (
        ("hot_classify", "Which samples are hot", classified),
        ("hot_calibrate", "Which rows are hot", calibrated),
        ("hot_track", "Tracking while training", tracked),
        ("hot_trackers", "Ways to track", compared),
        ("hot_quality", "Quality of hot and cold turns", quality_table),
        ("hot_link", "Bytes over the link to a fast device", link_table),
    )
    lines: list[str] = []
    for name, title, make in kinds:
        if own := {n: by for n, by in found.items() if n == name or n.startswith(f"{name}_")}:
            lines += ["", f"### {title}", "", where(own), "", *make([best(by) for by in own.values()])]
    return lines[1:]


def millions(value: float) -> str:
    """Samples a second."""
    return f"{value / 1e6:.1f}M"


def classified(cells: list[dict[str, Any]]) -> list[str]:
    """Which samples are hot."""
    samples, target = cells[0]["samples"], cells[0]["target"]
    rows = []
    for cell in cells:
        low, high = cell["spread"]
        row = [cell["name"], f"{millions(cell['samples_per_s'])} ({millions(low)}-{millions(high)})"]
        row.append(held(f"{target / 1e6:.0f}M", holds=cell["samples_per_s"] >= target))
        if "ratio" in cell:
            a, b = cell["ratio_spread"]
            row += [f"{cell['ratio']:.2f}x ({a:.2f}-{b:.2f})", f"{cell['dict_extrapolated_s']:.2f}"]
            row += [f"{cell['share_of_limit']:.0%}"]
        else:
            row += [""] * 3
        rows.append(row)
    head = ("cell", "samples/s", "promised", "numpy's bitmaps / ours", "dict and loop, s, **extrapolated**")
    on_slice = max(cell.get("dict_slice_samples", 0) for cell in cells)
    text = (
        f"{samples:,} synthetic samples of Criteo Kaggle's shape, 26 one-hot columns. Hot rows are prefixes (`prefix`; "
        "`first`: the data is opened anew, with its checks), or half a list (`listed`). The limit is reading the ids "
        "once. The dict and loop is FAE's released code, timed on "
        f"{on_slice:,} samples with its dict made beforehand."
    )
    return [text, "", *table(heads((*head, "share of limit")), rows)]


def calibrated(cells: list[dict[str, Any]]) -> list[str]:
    """What choosing rows takes."""
    (cell,) = cells
    most = f"at most {cell['most']:.0%}"
    rows = []
    for how, own in cell["ways"].items():
        low, high = own["spread"]
        promise = held(most, holds=own["share_of_epoch"] <= cell["most"])
        seconds = f"{own['seconds']:.3f} ({low:.3f}-{high:.3f})"
        rows.append([how, seconds, f"{own['hot_samples']:.1%}", f"{own['share_of_epoch']:.1%}", promise])
    text = (
        f"Choosing hot rows for {cell['budget_bytes'] / 1e6:.1f} MB from the same samples and their counts, which "
        f"preparation makes, then classifying ({cell['classify_s']:.3f} s). The epoch is **extrapolated**: "
        f"{cell['epoch_extrapolated_s']:.1f} s, from measured steps of {cell['step_ms']:.1f} ms at Kaggle's full "
        f"cardinalities, dim 16, SGD. {how_clean(cell)}."
    )
    head = ("way", "seconds", "hot samples", "with classifying, of the epoch", "promised")
    return [text, "", *table(heads(head), rows)]


def tracked(cells: list[dict[str, Any]]) -> list[str]:
    """What a batch takes beside its step."""
    (cell,) = cells
    low, high = cell["spread"]
    promise = held(f"at most {cell['most']:.0%}", holds=cell["share"] <= cell["most"])
    return [
        f"The tracker takes {cell['observe_ms']:.2f} ms on one thread for a batch of {cell['lookups']:,} lookups, "
        f"{cell['share']:.1%} ({low:.1%}-{high:.1%}) of a step of {cell['step_ms']:.1f} ms ({promise}). With a budget "
        f"of 256 MiB it names {cell['hot_rows']:,} rows hot in {cell['hot_set_s']:.2f} s, once, and takes "
        f"{cell['tracker_bytes'] / 2**20:.0f} MiB."
    ]


def compared(cells: list[dict[str, Any]]) -> list[str]:
    """Who tracks best."""
    (cell,) = cells
    names = list(next(iter(cell["streams"].values())))
    text = (
        "Real rows in their stored order; `renamed`: three rows in ten exchange their names after each tenth. Before "
        "each tenth k rows are named. A cell has three shares: how many of the k rows with most accesses so far are "
        "named; how many of those of the tenth before; and the accesses that the named rows take, of the most that any "
        "k rows take. Means over nine tenths. The ways are in benchmarks/hot_trackers.py."
    )
    fields = ("recall_so_far", "recall_last_part", "of_best")
    rows = [
        [stream, *(" / ".join(f"{ways[name][field]:.0%}" for field in fields) for name in names)]
        for stream, ways in cell["streams"].items()
    ]
    return [text, "", *table(heads(("rows, k of all", *names)), rows)]
