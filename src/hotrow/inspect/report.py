"""The hotness report on disk: `hotness.json`, `hotness.csv` and `hotness.html`, one page with its charts inside."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrow.base.door import make_folder
from hotrow.base.files import atomic_write, size, write_json
from hotrow.draw import bar_chart, line_chart, load_template

NAME = "hotness"
Table = Mapping[str, Any]
ACCESSES = {"lookup": "lookup", "row": "distinct row of a batch"}
"""What counts as one access, in words."""


def write_inspection(folder: Path | str, report: Mapping[str, Any]) -> list[str]:
    """Writes what `hotrow inspect` found to `folder`, which is made if absent; returns the files: JSON, CSV, HTML."""
    folder = Path(folder)
    make_folder(folder)
    files = {suffix: folder / f"{NAME}.{suffix}" for suffix in ("json", "csv", "html")}
    write_json(files["json"], report)
    for suffix, text in (("csv", as_csv(report)), ("html", inspection_page(report))):
        with atomic_write(files[suffix]) as stream:
            stream.write(text.encode())
    return [str(file) for file in files.values()]


def flat_row(table: Table) -> dict[str, Any]:
    """Returns one table's figures without its curves: the columns of the CSV file and of the printed tables."""
    locality = table["locality"]
    scalars = {name: value for name, value in table.items() if not isinstance(value, (list, dict))}
    return {
        **scalars,
        **{name: value for name, value in table["demand"].items() if name not in scalars},
        **{name: locality[name] for name in ("unique_ratio", "rate", "rows_followed")},
        **{f"first_{per}": locality["first"][f"per_{per}"] for per in ("lookup", "row")},
        **{f"overlap_{k}": value for k, value in locality["overlap"].items()},
        **{f"miss_{per}_{at['share']:.0%}": at[f"per_{per}"] for per in ("lookup", "row") for at in table["caches"]},
    }


def as_csv(report: Mapping[str, Any]) -> str:
    """Returns the CSV text, one line per table."""
    rows = [flat_row(table) for table in report["tables"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def print_inspection(report: Mapping[str, Any]) -> None:
    """Two tables and a few sentences, on stdout."""
    from rich.console import Console
    from rich.table import Table as Grid

    rows = [flat_row(table) for table in by_density(report)]
    console = Console(highlight=False)
    demand = Grid("table", title="bytes demanded per step, densest table first")
    locality = Grid("table", title="share taken by the hottest rows; share missed; overlap")
    for grid, columns in ((demand, DEMAND_COLUMNS), (locality, LOCALITY_COLUMNS)):
        for title in columns:
            grid.add_column(title, justify="right")
        for row in rows:
            grid.add_row(row["table"], *(show(row[name]) for name, show in columns.values()))
        console.print(grid)
    if "hot" in report:
        console.print(_hot_grid(report["hot"]))
    for line in sentences(report):
        console.print(line, soft_wrap=True)


def _hot_grid(hot: Mapping[str, Any]) -> Any:
    """Makes the table of the ways to choose hot rows."""
    from rich.table import Table as Grid

    grid = Grid("way", title=f"hot rows in {size(hot['budget_bytes'])}, optimizer {hot['optimizer']}")
    for title in HOT_COLUMNS:
        grid.add_column(title, justify="right")
    for way in hot["ways"]:
        cells = [show(way[name]) if name in way else "" for name, show in HOT_COLUMNS.values()]
        grid.add_row(way["name"], *cells)
    return grid


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


DEMAND_COLUMNS = {
    "rows": ("num_embeddings", "{:,}".format),
    "lookups": ("lookups", "{:,.0f}".format),
    "unique": ("unique_ratio", _share),
    "gross": ("gross_bytes", size),
    "training": ("training_bytes", size),
    "table": ("table_bytes", size),
    "density": ("density", "{:.3g}".format),
}
LOCALITY_COLUMNS = {
    "hottest": ("hottest", _share),
    "top 1%": ("top_1%", _share),
    "top 10%": ("top_10%", _share),
    "miss\n/lookup": ("miss_lookup_10%", _share),
    "miss\n/row": ("miss_row_10%", _share),
    "first": ("first_row", _share),
    "last 10": ("overlap_10", _share),
}


HOT_COLUMNS = {
    "taken": ("hot_bytes", size),
    "hot rows": ("hot_rows", "{:,}".format),
    "of\naccesses": ("hot_accesses", _share),
    "hot\nsamples": ("hot_samples", _share),
    "found\n(s)": ("calibrate_s", "{:.2f}".format),
    "sorted\n(s)": ("classify_s", "{:.2f}".format),
}


def sentences(report: Mapping[str, Any]) -> list[str]:
    """Returns the sentences below the tables."""
    demand, locality = report["demand"], report["locality"]
    what = "lookups" if report["kind"] == "trace" else "samples"
    lines = [
        f"{report['path']}: {report['samples']:,} {what} in {report['batches']:,} batches of {report['batch_size']:,}, "
        f"dim {report['embedding_dim']}, tables of {size(demand['table_bytes'])}.",
        f"A step: {size(demand['gross_bytes'])} gross, {size(demand['net_bytes'])} net of repeats in a batch, "
        f"{size(demand['training_bytes'])} in training.",
        "Miss: the share that an LRU cache of 10 % of the table's rows misses, per lookup and per distinct row of a "
        "batch. First: the share of those rows that are first accesses, which any cache misses. Last 10: the share of "
        "a batch's rows that were in one of the 10 batches before it.",
        order_note(report),
    ]
    if demand["gini"] is not None:
        ratio = demand["max_over_median"]
        densest = "" if ratio is None else f"; the densest table has {ratio:.3g} times the median density"
        half = f"{demand['bytes_of_half_the_demand']:.1%}"
        lines.insert(
            2, f"Half of that falls on {half} of the tables' bytes; Gini {demand['gini']:.2f} (0: uniform){densest}."
        )
    if "hot" in report:
        lines.append("A sample is hot if all its rows are hot: it can train on the device alone.")
        lines += [f"{way['name']}: {way['error']}" for way in report["hot"]["ways"] if "error" in way]
        lines += estimate_sentences(report["hot"])
    if not locality["exact"]:
        lines.append("Reuse and overlap of large tables are estimates from a sample of their rows (--sample).")
    return [*lines, *(f"wrote {file}" for file in report.get("files", ()))]


def estimate_sentences(hot: Mapping[str, Any]) -> list[str]:
    """Compares the estimate of the sampled way, at the threshold that it took, with the true size."""
    found = []
    for way in hot["ways"]:
        fitting = [t for t in way.get("thresholds", ()) if max(t["high_bytes"], t["true_bytes"]) <= hot["budget_bytes"]]
        if fitting:
            taken = fitting[-1]  # thresholds fall, and the last that fits is taken
            found.append(
                f"{way['name']}: rows of at least {taken['threshold_percent']:.3g} % of their table's accesses were "
                f"estimated at {size(taken['low_bytes'])} to {size(taken['high_bytes'])}, at "
                f"{100 * way['confidence']:g} % confidence; their true size is {size(taken['true_bytes'])}."
            )
    return found


def inspection_page(report: Mapping[str, Any]) -> str:
    """Returns the HTML page; text is escaped."""
    template = load_template("inspect/report.html", share=_share, size=size)
    return template.render(
        report=report,
        rows=[flat_row(table) for table in by_density(report)],
        order=order_note(report),
        charts=charts_of(report),
        estimate_sentences=estimate_sentences,
    )


def by_density(report: Mapping[str, Any]) -> list[Table]:
    """Returns the tables, those with most bytes demanded per byte of table first."""
    return sorted(report["tables"], key=lambda table: -table["demand"]["density"])


def order_note(report: Mapping[str, Any]) -> str:
    """Says what the order of the accesses was; without it reuse distances say nothing."""
    if report["kind"] == "trace":
        return "Accesses are taken in the order of the trace's lines."
    return (
        f"Accesses are taken in the stored order of the split {report['split']!r}: the order of the raw rows. Reuse, "
        "overlap and drift mean something over time only where that order is time; training that shuffles sees "
        "another order."
    )


def charts_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns every chart as SVG text, or "" if there is nothing to draw."""
    tables = by_density(report)
    largest = sorted(tables, key=lambda table: -table["demand"]["training_bytes"])
    locality, curve = report["locality"], report["demand"]["curve"]
    windows = locality["windows"]
    return {
        "density": bar_chart(
            {table["table"]: table["demand"]["density"] for table in tables} if len(tables) > 1 else {},
            y_label="bytes per step / table bytes",
            label="bandwidth density of the tables, densest first",
        ),
        "spread": line_chart(
            {} if curve is None else {"tables, densest first": curve, "if demand were uniform": [(0, 0), (1, 1)]},
            x_label="share of all table bytes",
            y_label="share of the bytes demanded",
            x_scale="linear",
            label="share of demand against share of bytes",
        ),
        "coverage": line_chart(
            {table["table"]: table["coverage"] for table in largest},
            x_label="share of the table's rows, hottest first",
            y_label="share of the accesses",
            label="coverage curves",
        ),
        "all_misses": line_chart(
            {f"per {what}": locality["miss_ratio"][f"per_{per}"] for per, what in ACCESSES.items()},
            x_label="cache, as a share of each table's rows",
            y_label="share missed",
            label="miss ratio over all tables",
        ),
        "distances": line_chart(
            {f"per {what}": _steps(locality["distances"][f"per_{per}"]) for per, what in ACCESSES.items()},
            x_label="other rows since the row was accessed last",
            y_label="share of the accesses",
            shape="stairs",
            label="histogram of reuse distances over all tables",
        ),
        "misses": line_chart(
            {table["table"]: _pairs(table["locality"]["miss_ratio"]["per_row"]) for table in largest},
            x_label="rows in the cache",
            y_label="share of distinct rows missed",
            shape="stairs",
            label="miss-ratio curves per distinct row of a batch",
        ),
        "drift": line_chart(
            {
                "hot set of the first window": [(k + 1, w["first_hot_set"]) for k, w in enumerate(windows)],
                "this window's own": [(k + 1, w["own_hot_set"]) for k, w in enumerate(windows)],
            },
            x_label="window",
            y_label="share of the lookups",
            x_scale="linear",
            label="coverage of hot sets over time",
        ),
    }


def _steps(distances: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns bins as the points of a staircase on a logarithmic axis; distance 0 starts half a bin below 1."""
    starts = [0.5, *(end for end, _ in distances)]
    return list(zip(starts, [*(share for _, share in distances), distances[-1][1]], strict=True))


def _pairs(curve: Mapping[str, Sequence[float]]) -> list[tuple[float, float]]:
    return [(c, r) for c, r in zip(curve["capacity_rows"], curve["miss_ratio"], strict=True) if c > 0]
