"""The hotness report on disk: `hotness.json` and `hotness.html`, one page with its charts inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotrow.base.door import make_folder
from hotrow.base.files import atomic_write, size, write_json
from hotrow.draw import line_chart, load_template

NAME = "hotness"
Table = Mapping[str, Any]


def write_inspection(folder: Path | str, report: Mapping[str, Any]) -> list[str]:
    """Writes what `hotrow inspect` found to `folder`, which is made if absent; returns the files: JSON, HTML."""
    folder = Path(folder)
    make_folder(folder)
    files = {suffix: folder / f"{NAME}.{suffix}" for suffix in ("json", "html")}
    write_json(files["json"], report)
    with atomic_write(files["html"]) as stream:
        stream.write(inspection_page(report).encode())
    return [str(file) for file in files.values()]


def flat_row(table: Table) -> dict[str, Any]:
    """Returns one table's figures without its curves: the columns of printed tables."""
    scalars = {name: value for name, value in table.items() if not isinstance(value, (list, dict))}
    return {**scalars, **{name: value for name, value in table["demand"].items() if name not in scalars}}


def print_inspection(report: Mapping[str, Any]) -> None:
    """Prints a table and a few sentences."""
    from rich.console import Console
    from rich.table import Table as Grid

    rows = [flat_row(table) for table in by_density(report)]
    console = Console(highlight=False)
    grid = Grid("table", title="bytes demanded per step, densest table first; share taken by the hottest rows")
    for title in COLUMNS:
        grid.add_column(title, justify="right")
    for row in rows:
        grid.add_row(row["table"], *(show(row[name]) for name, show in COLUMNS.values()))
    console.print(grid)
    if "hot" in report:
        console.print(_hot_grid(report["hot"]))
    for line in sentences(report):
        console.print(line, soft_wrap=True)


def _hot_grid(hot: Mapping[str, Any]) -> Any:
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


COLUMNS = {
    "rows": ("num_embeddings", "{:,}".format),
    "lookups": ("lookups", "{:,.0f}".format),
    "unique": ("unique_ratio", _share),
    "gross": ("gross_bytes", size),
    "training": ("training_bytes", size),
    "table": ("table_bytes", size),
    "density": ("density", "{:.3g}".format),
    "hottest": ("hottest", _share),
    "top 1%": ("top_1%", _share),
    "top 10%": ("top_10%", _share),
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
    demand = report["demand"]
    lines = [
        f"{report['path']}: {report['samples']:,} samples in {report['batches']:,} batches of "
        f"{report['batch_size']:,}, dim {report['embedding_dim']}, tables of {size(demand['table_bytes'])}.",
        f"A step: {size(demand['gross_bytes'])} gross, {size(demand['net_bytes'])} net of repeats in a batch, "
        f"{size(demand['training_bytes'])} in training.",
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
        coverage=coverage_chart(report),
        estimate_sentences=estimate_sentences,
    )


def by_density(report: Mapping[str, Any]) -> list[Table]:
    """Returns the tables, those with most bytes demanded per byte of table first."""
    return sorted(report["tables"], key=lambda table: -table["demand"]["density"])


def order_note(report: Mapping[str, Any]) -> str:
    """Says how batches are made, because the different rows of a step depend on it."""
    return (
        f"Batches are taken in the stored order of the split {report['split']!r}: the order of the raw rows. Training "
        "that shuffles sees other batches."
    )


def coverage_chart(report: Mapping[str, Any]) -> str:
    """The coverage curves of the tables as SVG text, those with the largest demand first."""
    largest = sorted(report["tables"], key=lambda table: -table["demand"]["training_bytes"])
    return line_chart(
        {table["table"]: table["coverage"] for table in largest},
        x_label="share of the table's rows, hottest first",
        y_label="share of the accesses",
        label="coverage curves",
    )
