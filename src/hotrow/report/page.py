"""The HTML page of one run: sentences and figures first, then charts, tables, commands."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrow.base.door import open_file
from hotrow.base.files import atomic_write, size
from hotrow.base.progress import duration, num_of
from hotrow.draw import load_template
from hotrow.report.facts import RunFacts, mapping_in, number_in, points
from hotrow.report.model import (
    SPLITS,
    calibration_chart,
    column_grid,
    column_text,
    gain_text,
    kept_text,
    left_out_grid,
    loss_chart,
    metrics_of,
    model_figures,
    scores_of,
    steps_of,
)
from hotrow.report.shapes import DASH, Cell, Chart, Figure, Grid, percent, shown

NAME = "report.html"


def write_report(path: Path, run: RunFacts) -> int:
    """Writes the page of `run` to `path`; returns its bytes. Raises OSError if the disk is full."""
    page = report_page(run).encode()
    with atomic_write(path) as file:
        file.write(page)
    return len(page)


def is_report(path: Path) -> bool:
    """Returns whether a file is a page of `write_report`, as its head says."""
    with open_file(path) as file:
        return b'<meta name="generator" content="hotrow report">' in file.read(1024)


def report_page(run: RunFacts) -> str:
    """Returns the HTML page. Text is escaped."""
    return str(load_template("report/report.html").render(view(run)))


def view(run: RunFacts) -> dict[str, Any]:
    """Returns what the template shows: the model first, then speed and memory."""
    ended, good, time = sentences(run)
    return {
        "name": run.name,
        "sentences": [ended, good, *how_selected(run)],
        "figures": model_figures(run),
        "left_out": run.lines_left_out,
        "model": _sections(
            ("Warnings", [], [warning_grid(run.record)], ""),
            ("Choice on validation rows", [], [choice_grid(run.record)], ""),
            ("Rivals on the same rows", [], [rival_grid(run.record)], rival_text(run.record)),
            ("Columns", [], [column_grid(run), left_out_grid(run)], column_text(run)),
            ("What each column gives", [], [], gain_text(run)),
            ("Scores", [calibration_chart(run)], [], ""),
            ("How it learned", [loss_chart(run)], [], kept_text(run)),
        ),
        "time": time,
        "speed": speed_figures(run),
        "machine": _sections(
            ("What a step is made of", [], [phase_grid(run)], ""),
            ("Processes", [], [rank_grid(run.record)], rank_text(run.record)),
            ("Where rows lie", [], [table_grid(run.record)], where_text(run.record)),
            ("Rows that are asked for", [], [tier_grid(run.record)], ""),
            ("Hot and cold phases", [], [hot_grid(run.record)], ""),
            ("Bytes to the drive", [], [drive_grid(run.record)], ""),
        ),
        "commands": run.commands,
        "environment": environment(run),
        "options": run.options,
    }


def _sections(*sections: tuple[str, Sequence[Chart], Sequence[Grid | None], str]) -> list[Any]:
    """Returns the sections without charts and tables that are empty."""
    return [
        (title, [chart for chart in charts if chart.svg], [grid for grid in grids if grid and grid[1]], text)
        for title, charts, grids, text in sections
    ]


# ---- what a reader wants first


def sentences(run: RunFacts) -> list[str]:
    """Returns three plain sentences: how it ended, how good the model is, where the time went."""
    return [how_it_ended(run), how_good(run), where_time_went(run)]


def how_it_ended(run: RunFacts) -> str:
    record, steps = run.record, steps_of(run)
    after = f"after {steps:,} step{'' if steps == 1 else 's'}" if steps else "before its first step"
    if steps and (epochs := number_in(record, "epochs")):
        after += f" ({epochs:.3g} epochs)"
    if seconds := number_in(record, "train_s"):
        after += f" and {duration(seconds)} of training" if seconds >= 60 else f" and {seconds:.1f} s of training"
    match record["status"]:
        case "finished":
            return f"The run finished {after}: {record.get('ended') or 'all is done'}."
        case "interrupted":
            number = record.get("signal")
            by = f" by {signal.Signals(number).name}" if number in set(signal.Signals) else ""
            return f"The run was interrupted{by} {after}; it saved a checkpoint and can be resumed."
        case "failed":
            return f"The run failed {after}: {record.get('error') or 'run.json does not say why'}."
        case _ if run.is_training:
            return f"The run is training: this page shows it {after}."
        case _:
            return f"The run was killed {after}, or its machine stopped: it did not record how it ended."


def how_good(run: RunFacts) -> str:
    metrics = metrics_of(run)
    if not metrics:
        if before := mapping_in(run.record, "parent", "metrics"):
            found = {name: number_in(before, name) for name in run.objective.figures}
            return (
                f"On its {number_in(before, 'num_rows') or 0:,.0f} training rows the weights that it started from had "
                f"{run.objective.verdict(found)}; nothing was scored after training."
            )
        losses = points(run.lines, "train", "loss")
        return (
            f"Nothing was scored; the last training loss is {losses[-1][1]:.4f}." if losses else "Nothing was scored."
        )
    split = SPLITS.get(str(metrics["split"]), str(metrics["split"]))
    found = {name: number_in(metrics, name) for name in run.objective.figures}
    rows = f"{number_in(metrics, 'num_rows') or 0:,.0f} rows of the {split} split"
    return f"On {rows} the model has {run.objective.verdict(found)}."


def how_selected(run: RunFacts) -> list[str]:
    """Returns a sentence about the run that found the number of steps; none if there was none."""
    metrics = (run.selection or {}).get("metrics")
    figures = metrics.get("val") if isinstance(metrics, Mapping) else None
    if not isinstance(figures, Mapping):
        return []
    found = {name: number_in(figures, name) for name in run.objective.figures}
    path = "/".join(["selection", *filter(None, [mapping_in(run.record, "choice").get("run")]), "report.html"])
    return [
        "A run without the validation rows found how many steps to train; on them it has "
        f"{run.objective.verdict(found)} ({path})."
    ]


def choice_grid(record: Mapping[str, Any]) -> Grid:
    """Returns the candidates of `fit`, and how far their loss is above the chosen one's."""
    choice, rows = mapping_in(record, "choice"), list[list[Cell | str]]()
    for name, tried in mapping_in(choice, "candidates").items():
        chosen = " (chosen)" if name == choice.get("chosen") else ""
        forms = {"epochs": ".0f", "loss": ".4f", "worse": "+.4f", "error": ".4f", "seconds": ",.1f"}
        cells = [Cell(shown(number_in(tried, field), form)) for field, form in forms.items()]
        rows.append([f"{name}{chosen}", *cells])
    return ["features", "epochs", "loss", "beside the chosen", "standard error", "seconds"], rows


def where_time_went(run: RunFacts) -> str:
    phases = step_ms_of(run)
    total = sum(phases.values())
    if not total:
        return "No step was timed."
    most = max(phases, key=lambda phase: phases[phase])
    waiting = number_in(run.record, "memory", "stall_share")
    text = f"A step takes {total:.3g} ms on average, {phases[most] / total:.0%} of it for {PHASES.get(most, most)}"
    return text + ("." if waiting is None else f"; waiting for rows from disk took {waiting:.1%} of the time.")


def last_line(run: RunFacts) -> Mapping[str, Any]:
    """Returns the last training line; {} if there is none."""
    return next((line for line in reversed(run.lines) if line["kind"] == "train"), {})


def step_ms_of(run: RunFacts) -> dict[str, float]:
    """Returns milliseconds of a step by phase; for a run without a record of them, from its last line."""
    return phases_of(run.record) or phases_of(last_line(run))


PHASES = {
    "data": "fetching batches",
    "lookup": "looking rows up",
    "dense": "dense layers",
    "update": "updating rows",
}


def speed_figures(run: RunFacts) -> list[Figure]:
    """Returns the figures of speed and memory."""
    record = run.record
    speed = number_in(record, "samples_per_s") or number_in(last_line(run), "samples_per_s")
    backend = mapping_in(record, "backend")
    kernels = f"{backend['name']} kernels ({backend['isa']}, {num_of(backend['threads'], 'thread')})" if backend else ""
    total = sum(step_ms_of(run).values())
    step = f"{total:.3g} ms a step" if total else ""
    return [
        Figure("Samples a second", shown(speed, ",.0f"), ", ".join(part for part in (step, kernels) if part)),
        memory_figure(record),
    ]


def memory_figure(record: Mapping[str, Any]) -> Figure:
    dram, disk = number_in(record, "memory", "dram_bytes"), number_in(record, "memory", "disk_bytes")
    if dram is None:
        whole = number_in(record, "tables_bytes")
        text = "all tables in DRAM, without optimizer state" if whole is not None else "the tables were not made yet"
        return Figure("Memory", DASH if whole is None else size(whole), text)
    hits = number_in(record, "memory", "hits_per_lookup")
    text = f"of DRAM for rows; {size(disk or 0)} on disk"
    return Figure(
        "Memory", size(dram), text + ("" if hits is None else f"; {hits:.1%} of lookups found their row in DRAM")
    )


# ---- where the time goes


def phases_of(record: Any) -> dict[str, float]:
    """Returns milliseconds of a step by phase."""
    phases = mapping_in(record, "step_ms")
    return {str(phase): ms for phase in phases if (ms := number_in(phases, phase)) is not None}


def phase_grid(run: RunFacts) -> Grid | None:
    """Returns the phases in numbers, and those of the trial beside them if `hotrow plan` took one."""
    measured, tried = step_ms_of(run), phases_of(mapping_in(run.record, "trial"))
    if not measured:
        return None
    total = sum(measured.values())
    rows: list[list[Cell | str]] = []
    for phase, value in [*measured.items(), ("a step", total)]:
        row: list[Cell | str] = [
            PHASES.get(phase, phase),
            Cell(f"{value:.3f}"),
            Cell(f"{value / total:.1%}" if total else ""),
        ]
        if tried:
            before = sum(tried.values()) if phase == "a step" else tried.get(phase)
            row.append(Cell(shown(before, ".3f")))
        rows.append(row)
    return ["phase", "ms", "share", *(["ms in the trial"] if tried else [])], rows


def of_ranks(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns what the record has of each rank; [] for a run of one process, or if it is damaged."""
    found = mapping_in(record, "ranks").get("of_ranks")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def rank_text(record: Mapping[str, Any]) -> str:
    ranks, slowest = of_ranks(record), number_in(record, "ranks", "slowest_rank")
    if not ranks or slowest is None:
        return ""
    parts, wire_dtype = number_in(record, "ranks", "micro_batches") or 0, mapping_in(record, "ranks").get("wire_dtype")
    rounded = "" if wire_dtype in (None, "fp32") else f" Numbers of tables traveled as {wire_dtype}, rounded."
    return (
        f"{len(ranks)} ranks trained together, in {parts:.0f} micro-batches. All take as long for a step, because they "
        f"wait for each other: rank {slowest:.0f} was the slowest, as it spent most time outside exchanges.{rounded} "
        "What lies in memory and on disk is said of rank 0 below."
    )


def rank_grid(record: Mapping[str, Any]) -> Grid:
    """Returns where the time of each rank went."""
    rows: list[list[Cell | str]] = []
    for rank, own in enumerate(of_ranks(record)):
        step, exchange = number_in(own, "step_ms"), number_in(own, "exchange_ms")
        busy = None if step is None or exchange is None else step - exchange
        phases = [number_in(own, phase) for phase in PHASES]
        cells = [Cell(shown(value, ".3f")) for value in (*phases, step, exchange, busy)]
        rows.append([f"{rank} ({own.get('host', '')})", *cells])
    return ["rank", *(f"{what}, ms" for what in PHASES.values()), "a step, ms", "in exchanges, ms", "outside, ms"], rows


def of_tables(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns what the record has of each table in tiers."""
    tables = mapping_in(record, "memory", "tables")
    return {name: table for name, table in tables.items() if isinstance(table, Mapping)}


def rows_by_place(table: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns the rows of a table that are pinned in DRAM, cached there, and on disk."""
    rows, pinned, cached = (number_in(table, name) or 0.0 for name in ("rows", "pinned", "cached"))
    cached = min(cached, max(0.0, rows - pinned))
    return pinned, cached, max(0.0, rows - pinned - cached)


def where_text(record: Mapping[str, Any]) -> str:
    if of_tables(record):
        return ""
    whole = number_in(record, "tables_bytes")
    return "" if whole is None else f"All rows lie in DRAM: {size(whole)} of tables, and their optimizer state."


def table_grid(record: Mapping[str, Any]) -> Grid | None:
    rows: list[list[Cell | str]] = []
    for name, table in of_tables(record).items():
        counts = [Cell(f"{n:,.0f}") for n in (number_in(table, "rows") or 0, *rows_by_place(table))]
        hits = [percent(number_in(table, field)) for field in ("hits_per_lookup", "hits_per_row")]
        moved = [num_bytes(number_in(table, field)) for field in ("read_bytes", "written_bytes")]
        rows.append([name, *counts, *hits, *moved, Cell(str(table.get("store", "")))])
    heads = ["table", "rows", "pinned", "cached", "on disk", "hits / lookup", "hits / row", "read", "written", "store"]
    return heads, rows


def num_bytes(value: float | None) -> Cell:
    return Cell("") if value is None else Cell(size(value), value)


def tier_grid(record: Mapping[str, Any]) -> Grid | None:
    """Returns the figures of each tier."""
    memory, hbm = mapping_in(record, "memory"), mapping_in(record, "memory", "hbm")
    tiers = {**mapping_in(memory, "tiers"), **({"hbm": hbm} if hbm else {})}
    rows: list[list[Cell | str]] = []
    for name in tiers:
        tier = mapping_in(tiers, name)
        counts = [Cell(shown(number_in(tier, field), ",.0f")) for field in ("tables", "lookups", "reads", "writes")]
        if name == "hbm":
            counts[0] = Cell(str(len(mapping_in(hbm, "tables"))))
        hits = [percent(number_in(tier, field)) for field in ("hits_per_lookup", "hits_per_row")]
        moved = [num_bytes(number_in(tier, field)) for field in ("read_bytes", "written_bytes")]
        rows.append([name, *counts[:2], *hits, *counts[2:], *moved])
    return ["tier", "tables", "lookups", "hits / lookup", "hits / row", "reads", "writes", "read", "written"], rows


def hot_grid(record: Mapping[str, Any]) -> Grid | None:
    hot = mapping_in(record, "hot")
    plain = {name: value for name, value in hot.items() if isinstance(value, str | int | float)}
    forms: dict[str, Callable[[Any], str]] = {"hot_samples": lambda value: f"{value:.1%}", "hot_bytes": size}
    forms["budget_bytes"] = size
    rows: list[list[Cell | str]] = [
        [name.replace("_", " "), Cell(forms.get(name, any_text)(value))] for name, value in plain.items()
    ]
    return ["hot rows", "value"], rows


def any_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def drive_grid(record: Mapping[str, Any]) -> Grid | None:
    memory, budget = mapping_in(record, "memory"), mapping_in(record, "write_budget")
    fields = {
        "drive_written_bytes": ("rows and checkpoints, over all sessions", size),
        "written_bytes": ("rows, this session", size),
        "written_bytes_per_epoch": ("rows, an epoch", size),
        "read_bytes": ("rows read, this session", size),
        "write_amplification": ("write amplification", "{:.2f}".format),
    }
    rows: list[list[Cell | str]] = [
        [name, Cell(form(value), value)]
        for field, (name, form) in fields.items()
        if (value := number_in(memory, field)) is not None
    ]
    rows += [[f"write budget: {name.replace('_', ' ')}", Cell(any_text(value))] for name, value in budget.items()]
    return ["bytes", "value"], rows


# ---- the rest


def warning_grid(record: Mapping[str, Any]) -> Grid:
    rows = [[code, Cell(f"{warning['count']:,}"), warning["text"]] for code, warning in record["warnings"].items()]
    return ["warning", "times", "first of them"], rows


def rival_grid(record: Mapping[str, Any]) -> Grid:
    """The results of rivals on the rows that judged the run."""
    rows: list[list[Cell | str]] = []
    for name in (rivals := mapping_in(record, "rivals", "rivals")):
        loss = mapping_in(rivals, name, "logloss")
        figures = (
            number_in(rivals, name, "auc", "second"),
            *(number_in(loss, own) for own in ("second", "difference", "error")),
        )
        rows.append([name, *(Cell(shown(figure, ".4f")) for figure in figures)])
    return ["", "AUC", "LogLoss", "less hotrow's", "standard error"], rows


def rival_text(record: Mapping[str, Any]) -> str:
    told = mapping_in(record, "rivals").get("lines")
    return "; ".join(map(str, told[len(mapping_in(record, "rivals", "rivals")) :])) if isinstance(told, list) else ""


def environment(run: RunFacts) -> list[tuple[str, str]]:
    """Returns the facts of the machine and versions that it ran on."""
    record = run.record
    told: dict[str, Any] = {"started": record["started"], "command": " ".join(map(str, record["command"]))}
    for group in ("versions", "host", "backend", "dataset", "rows", "seeds"):
        told |= {f"{group}: {name}": value for name, value in mapping_in(record, group).items() if value is not None}
    return [(name, any_text(value)) for name, value in told.items()]


def summary(run: RunFacts) -> dict[str, Any]:
    """Returns the figures of a run that stand at the top of its page, for programs."""
    metrics = metrics_of(run)
    return {
        "run": run.name,
        "status": run.record["status"],
        "steps": steps_of(run),
        "sentences": sentences(run),
        **{name: number_in(metrics, name) for name in run.objective.measures},
        "split": str(metrics.get("split", "")),
        "importances": mapping_in(scores_of(run), "gains"),
        "samples_per_s": number_in(run.record, "samples_per_s") or number_in(last_line(run), "samples_per_s"),
        "warnings": sum(warning["count"] for warning in run.record["warnings"].values()),
        "lines_left_out": run.lines_left_out,
    }
