"""The part of benchmarks.md on hot rows: what benchmarks.hot measured, in its own tables."""

from __future__ import annotations

from typing import Any

from benchmarks.bench import how_clean
from benchmarks.hot_quality import link_table, quality_table
from benchmarks.markdown import clean_rounds, heads, held, table


def hot_tables(cells: list[dict[str, Any]]) -> list[str]:
    """A table for each kind of cell that there is."""
    kinds = (
        ("hot_classify", classified),
        ("hot_calibrate", calibrated),
        ("hot_track", tracked),
        ("hot_trackers", compared),
        ("hot_quality", quality_table),
        ("hot_link", link_table),
    )
    lines: list[str] = []
    for name, make in kinds:
        own = [c for c in cells if c["name"] == name or c["name"].startswith(f"{name}_")]
        if own:
            lines += ["", *make(own)]
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
            row += [f"{millions(cell['bitmaps_samples_per_s'])}", f"{cell['ratio']:.2f}x ({a:.2f}-{b:.2f})"]
            row += [f"{cell['dict_extrapolated_s']:.2f}", f"{cell['listed_rows']:,}", f"{cell['share_of_limit']:.0%}"]
        else:
            row += [""] * 5
        rows.append([*row, clean_rounds(cell)])
    head = ("cell", "samples/s", "promised", "bitmaps of numpy, samples/s", "bitmaps / ours")
    head = (*head, "dict and loop, s, **extrapolated**", "listed rows", "share of limit", "clean rounds")
    on_slice = max(cell.get("dict_slice_samples", 0) for cell in cells)
    text = (
        f"How fast hotrow finds which of {samples:,} synthetic samples of Criteo Kaggle's shape are hot (26 one-hot "
        "columns). `prefix`: hot rows are prefixes, and the data was read once before. `listed`: the hot rows of a "
        "tracker, some of them a list. `first`: prefixes, and the data is opened anew, so checksums and values are "
        "checked as blocks are read. The limit is reading the ids once, at the rate at which as many threads can sum "
        "memory. The dict and loop of FAE's released code (one look-up per id, up to the first cold one) ran on "
        f"{on_slice:,} samples, with its dict made beforehand; its column is that time scaled to all samples."
    )
    return [text, "", *table(heads(head), rows)]


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
        f"Choosing hot rows for {cell['budget_bytes'] / 1e6:.1f} MB from the same {cell['samples']:,} samples, then "
        f"classifying them ({cell['classify_s']:.3f} s, measured). The epoch is **extrapolated**: "
        f"{cell['epoch_extrapolated_s']:.1f} s, from measured steps of 2,048 samples at Kaggle's full cardinalities, "
        f"dim 16, SGD ({cell['step_ms']:.1f} ms each). Counts are the dataset's own, made when it was prepared. "
        f"{how_clean(cell)}."
    )
    head = ("way", "calibrate, s, measured", "hot samples", "with classifying, of the epoch", "promised")
    return [text, "", *table(heads(head), rows)]


def tracked(cells: list[dict[str, Any]]) -> list[str]:
    """What a batch takes beside its step."""
    (cell,) = cells
    low, high = cell["spread"]
    promise = held(f"at most {cell['most']:.0%}", holds=cell["share"] <= cell["most"])
    return [
        f"The tracker takes {cell['observe_ms']:.2f} ms on one thread for a batch of {cell['lookups']:,} lookups. "
        f"A step takes {cell['step_ms']:.1f} ms at Kaggle's full cardinalities, dim 16, so that is {cell['share']:.1%} "
        f"({low:.1%}-{high:.1%}) of it ({promise}). With a budget of 256 MiB it names {cell['hot_rows']:,} rows hot in "
        f"{cell['hot_set_s']:.2f} s, once, and takes {cell['tracker_bytes'] / 2**20:.0f} MiB. "
        f"{how_clean(cell)}."
    ]


def compared(cells: list[dict[str, Any]]) -> list[str]:
    """Who tracks best."""
    (cell,) = cells
    names = list(next(iter(cell["streams"].values())))
    text = (
        "Ways to find hot rows in one pass (benchmarks/hot_trackers.py), on real rows in their stored order; "
        "`renamed`: three rows in ten exchange their names after each tenth. k rows are named before each tenth except "
        "the first. Each cell has three shares: of the k rows with most accesses so far, how many are named; of those "
        "of the tenth before, how many are named; and the accesses of the tenth that the named rows take, relative to "
        "the most that any k rows take. Means over nine tenths; no times."
    )
    fields = ("recall_so_far", "recall_last_part", "of_best")
    rows = [
        [stream, *(" / ".join(f"{ways[name][field]:.0%}" for field in fields) for name in names)]
        for stream, ways in cell["streams"].items()
    ]
    return [text, "", *table(heads(("rows, k of all", *names)), rows)]
