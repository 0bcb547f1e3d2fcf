"""The pages made from measurements: benchmarks.md and claims.md in docs/measurements/, and figures in other pages.

    python -m benchmarks.claims [--check | --missing]

Reads docs/measurements/benchmarks.json and docs/*-study.json (what was measured) and benchmarks/claims.yaml (what
papers say); writes no number of its own. With --check it writes nothing, and the exit status says whether the pages are
up to date. With --missing it lists the cells that are still to be measured, by processor."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.hot_lab import interval
from benchmarks.hot_page import hot_tables
from benchmarks.kernels import promises
from benchmarks.markdown import across, clean_rounds, heads, held, span, table
from benchmarks.plan_page import plan_table
from benchmarks.ranks_page import ranks_table
from benchmarks.results import Cell, Reports, missing, over_processors
from benchmarks.step_shapes import SHAPES
from benchmarks.study.figures import study_cells
from benchmarks.tiers_page import memory_chart, tiers_sentence, tiers_shown, tiers_table

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = Path(__file__).with_name("claims.yaml")
SUMMARY_CELLS = {
    "step_sgd_8x50_uniform": "embedding forward + backward + SGD, 8 tables x 1M rows x 64, 50 ids per bag, uniform",
    "step_sgd_8x50_zipf": "the same, skewed ids (Zipf 1.05)",
    "step_adagrad_26x1_dim64": "26 tables, one id each, dim 64, Adagrad",
    "interaction_26_dim64": "dot interaction of 27 vectors, dim 64, forward + backward",
    "train_step_kaggle_vs_torch": "whole DLRM training step, Criteo-Kaggle shape",
    "train_step_kaggle_vs_torch_as_intel": "the same, MKL told that it runs on an Intel processor",
    "train_step_kaggle_vs_dlrm": "the same step, against the reference implementation",
    "train_step_mlperf-like_vs_torchrec": "whole step, 26 tables of dim 128, large MLPs",
    "train_step_sc20-small_vs_dlrm": "whole step, 8 tables, 50 ids per bag, large MLPs",
    "train_step_embedding-bound_vs_torchrec": "whole step, 26 tables, 20 ids per bag, small MLPs",
    "peak_memory_kaggle_vs_torch": "peak memory beyond tables, Criteo-Kaggle step",
}
README_CELLS = {
    "train_step_kaggle_vs_torch": ("whole training step, tables as in Criteo's Kaggle data", "plain PyTorch"),
    "train_step_kaggle_vs_torch_as_intel": ("the same, PyTorch's matrix library on its fast path", "plain PyTorch"),
    "train_step_embedding-bound_vs_torchrec": ("whole step, 26 columns of 20 ids each", "torchrec (FBGEMM)"),
    "tiers_tiers_dram10_zipf1.05_ahead4": ("whole step, 1/10 of the tables in DRAM, the rest on SSD", "all in DRAM"),
    "tiers_tiers_dram32_zipf1.05_ahead4": ("whole step, 1/32 of the tables in DRAM, the rest on SSD", "all in DRAM"),
    "criteo.parse+encode/2.polars+categories": ("raw Criteo text read, its 33.8M ids numbered", "polars (categories)"),
}
"""The README's rows: cell -> what was done, and what it is compared with."""
ByProcessor = dict[str, Cell]
"""What was measured of one cell, by processor."""
FIGURES_OF_SPEED = ("relative_speed", "{:.0%}")
FIGURES = dict([("ratio", "{:.2f}x"), FIGURES_OF_SPEED])
"""Fields that are compared over processors, and how they are written."""
BEGIN, END = "<!-- figures: made by `python -m benchmarks.claims` -->\n", "<!-- end of figures -->"
BENCHMARKS_HEAD = """\
# Benchmarks

Read this page if you want to know how fast hotrow is, against what, and how that was measured. To measure your own
machine run `python -m benchmarks.kernels` (minutes, the kernels alone) or `make bench` (2 hours, everything below).

This page is generated from docs/measurements/benchmarks.json, which `make bench` fills. Studies of accuracy are filled
by the command printed above them. `make bench DLRM=path` also measures a checkout of facebookresearch/dlrm, and
torchrec is measured if it is installed. A peer that is not there is skipped and named.

**How a ratio is measured.** hotrow and the peer alternate in one process on the same ids, after their outputs were
compared. A figure is the median over rounds. The ratio is the median of peer / ours over rounds; the range beside it
holds four rounds in five.

**Clean rounds.** A round is clean if neither the hypervisor nor another process used the processors for more than 2 %
of its time. Figures come from clean rounds only. If fewer than half of the rounds wanted were clean, the figure comes
from the least disturbed rounds and is marked "disturbed": it enters no range, decides no promise, and is still to be
measured. Up to November 2026, rounds with other processes on the processors counted as clean.

**Processors.** Ratios differ from one processor to the next, so each processor has its own report. A benchmark that
was measured on several begins with the range over them. `python -m benchmarks.claims --missing` lists what is still
to be measured on which. "AMD EPYC" alone is a processor whose generation was not recorded; it enters no range.

**The limit** is what the hardware allows, measured by a separate loop (native/limit.cpp):

- for embeddings, a loop that only moves the same rows, and the pooled rows and their gradient once each;
- for an MLP, its arithmetic at the highest rate that a large torch.mm or bare multiply-adds in registers reach;
- for the interaction, the larger of moving its operands and of its arithmetic;
- for a whole training step, where it is called the floor, the sum of rows, interaction and products.

A share above 100 % means that the kernels did something the limit's loop failed to do. It is marked, and that loop
has to be fixed. If hotrow promises a ratio, the promise stands beside the measurement, with whether the median holds
it.

**torch's settings.** torch runs on huge pages (THP_MEM_ALLOC_ENABLE=1). Its matrix products come from MKL, which on
AMD processors of family 26 (Zen 5) picks code that is half as fast as the processor allows. With `--mkl-as-intel`
whole steps are measured a second time with MKL told that it runs on an Intel processor; no torch installation does
that by itself. Milliseconds mean something only beside each other: between machines, compare ratios and shares.

**Known gaps.** The limits of family 26 model 2 are from 22 November 2026. Those of matrix products were measured then
by bare multiply-adds, in `step_profile`. Those of rows come from a loop whose threads shared the cores with torch's
threads, which were still spinning; the loop has been fixed since, and shares above 100 % have to be measured again.
Shares of the interaction are left out until then."""
CLAIMS_HEAD = """\
# Claims

What the papers behind hotrow claim, and what we measured of it. The page is generated from
benchmarks/claims.yaml, docs/measurements/benchmarks.json and docs/*-study.json by `python -m benchmarks.claims`.

"Not read" means that the paper's body was not at hand, so we print no figure for it. "Not yet" means not built. The two
figures of a row come from different machines and were taken against different peers. The page of each paper has the
command, machine and date of ours, and says what is built and what differs; how ours were measured is in
[benchmarks.md](benchmarks.md)."""
NOT_MEASURED = "Not measured yet: `make bench` fills this in.\n"


def machine_line(report: dict[str, Any]) -> str:
    """Machine, versions and settings of a report in one line."""
    machine, backend, versions = report["machine"], report["backend"], report["versions"]
    memory = machine["memory_bytes"] / 2**30
    return (
        f"{machine['cpu']}, {report['threads']} threads of {machine['cores']} cores, {memory:.0f} GiB; "
        f"kernels {backend['name']} ({backend['isa']}); torch {versions['torch']}; commit {report['commit']}"
    )


def spread_of(cell: Cell, key: str, form: str) -> str:
    """The figure `key` of a cell in `form`, with its spread."""
    low, high = (form.format(value).removesuffix("x") for value in cell["spread"])
    return f"{form.format(cell[key])} ({low}-{high})"


def factor(cell: Cell) -> str:
    """The ratio with its spread."""
    return spread_of(cell, "ratio", "{:.2f}x")


def score(row: dict[str, Any], of: str = "") -> str:
    """A mean over seeds with its standard deviation, and the paired difference to float32; of: "logloss_", or AUC."""
    mean = row["logloss" if of else "auc"]
    text = f"{mean:.4f} ± {row[f'{of}sd']:.4f}"
    if f"{of}difference" in row:
        text += f" ({row[f'{of}difference']:+.5f} ± {row[f'{of}difference_sd']:.5f} beside float32)"
    return text


def near_float32(cell: Cell) -> str:
    """What is promised of both differences to float32; not resolved if their spread over seeds leaves it open."""
    if (most := cell.get("most_difference")) is None:
        return ""
    promise = f"both within {most}"
    means = [cell["difference"], cell["logloss_difference"]]
    if max(map(abs, means)) <= most:
        return held(promise, holds=True)
    seeds = len(cell["seeds"])
    errors = [cell[f"{score}difference_sd"] / math.sqrt(seeds) for score in ("", "logloss_")]
    ranges = [interval(mean, error, seeds) for mean, error in zip(means, errors, strict=True)]
    is_open = all(low <= most and high >= -most for low, high in ranges)
    return f"{promise}: not resolved" if is_open else held(promise, holds=False)


def scores_table(cells: list[dict[str, Any]]) -> list[str]:
    """What was varied, and AUC and LogLoss over seeds."""
    columns = (
        "variant",
        "validation AUC, mean ± sd over seeds (paired difference)",
        "LogLoss",
        "promised",
        "AUC by seed",
    )
    rows = []
    for cell in cells:
        by_seed = ", ".join(f"{auc:.4f}" for auc in cell["aucs"])
        rows.append([cell["name"], score(cell), score(cell, "logloss_"), near_float32(cell), by_seed])
    return table(heads(columns, left=range(5)), rows)


def share(cell: dict[str, Any]) -> str:
    """The share of the machine's limit; above 100 % the kernels did what the limit's own loop did not."""
    found = cell.get("share_of_limit")
    return "" if found is None else f"{found:.0%}" + (" (limit not reached by the other loop)" if found > 1 else "")


def promised(cell: dict[str, Any]) -> str:
    """The least ratio that hotrow promises, if it promises one."""
    if "target" not in cell:
        return ""
    return held(f"{cell['target']:.2f}x", holds=cell["ratio"] >= cell["target"], of=cell)


def over_floor(cell: dict[str, Any]) -> str:
    """Our time over the floor, and whether that is within what is promised."""
    if cell["limit_ms"] is None:
        return ""
    over = cell["ours_ms"] / cell["limit_ms"]
    most = cell.get("most_over_limit")
    return f"{over:.2f}x" + ("" if most is None else f" ({held(f'at most {most:.2f}x', holds=over <= most, of=cell)})")


def milliseconds(cell: dict[str, Any]) -> list[str]:
    """Ours, the peer's and the limit's, in three digits; nothing for a limit that there is not."""
    return ["" if cell[f"{who}_ms"] is None else f"{cell[f'{who}_ms']:.3g}" for who in ("ours", "peer", "limit")]


def cell_table(cells: list[dict[str, Any]]) -> list[str]:
    """Cells of any kind, one line each."""
    head = {"cell": "left", "peer": "left"} | dict.fromkeys(
        ("peer / ours", "share of limit", "ours, ms", "peer, ms", "limit, ms", "clean rounds"), "right"
    )
    return table(
        head,
        [[c["name"], c["peer"], factor(c), share(c), *milliseconds(c), clean_rounds(c)] for c in cells],
    )


def kernel_tables(cells: list[dict[str, Any]]) -> list[str]:
    """Kernels, with what is promised of them; cells measured before the promise was written down have it too."""
    cells = [{**promises(cell["name"]), **cell} for cell in cells]
    head = {"cell": "left", "peer": "left", "peer / ours": "right", "promised": "left", "share of limit": "left"}
    head |= dict.fromkeys(("ours, ms", "peer, ms", "limit, ms", "clean rounds"), "right")
    rows = [
        [
            c["name"],
            c["peer"],
            factor(c),
            promised(c),
            promised_share(c),
            *milliseconds(c),
            clean_rounds(c),
        ]
        for c in cells
    ]
    return [*table(head, rows), *not_held_table(cells)]


def promised_share(cell: dict[str, Any]) -> str:
    """The share of the limit, and whether it is within what is promised."""
    if "most_over_limit" not in cell or cell["share_of_limit"] is None:
        return share(cell)
    least = 1 / cell["most_over_limit"]
    return f"{share(cell)} ({held(f'at least {least:.0%}', holds=cell['share_of_limit'] >= least, of=cell)})"


def not_held_table(cells: list[dict[str, Any]]) -> list[str]:
    """Promised ratios that are not held: the time that each would be, beside what the limit alone takes."""
    missed = [c for c in cells if "target" in c and c["ratio"] < c["target"] and c["limit_ms"] is not None]
    if not missed:
        return []
    text = (
        "Promises that are not held. Allowed is the peer's time over the promise. If the limit alone takes as long, "
        "only code faster than that limit would keep the promise on this machine. If it takes less, the difference "
        "is measured part by part by `python -m benchmarks.step_profile`."
    )
    head = {"cell": "left", "promised": "right", "measured": "right"} | dict.fromkeys(
        ("allowed, ms", "ours, ms", "limit alone, ms", "limit / allowed", "peer / limit"), "right"
    )
    return ["", text, "", *table(head, [missed_row(cell) for cell in missed])]


def missed_row(cell: dict[str, Any]) -> list[str]:
    """One promise that is not held."""
    allowed = cell["peer_ms"] / cell["target"]
    return [
        cell["name"],
        f"{cell['target']:.2f}x",
        factor(cell),
        f"{allowed:.3g}",
        f"{cell['ours_ms']:.3g}",
        f"{cell['limit_ms']:.3g}",
        f"{cell['limit_ms'] / allowed:.0%}",
        f"{cell['peer_ms'] / cell['limit_ms']:.2f}x",
    ]


def step_tables(cells: list[dict[str, Any]]) -> list[str]:
    """Whole training steps, a table for each shape."""
    head = {"peer": "left", "peer / ours": "right", "promised": "left", "step / floor": "left"} | dict.fromkeys(
        ("ours, ms", "peer, ms", "floor, ms", "clean rounds"), "right"
    )
    lines = []
    for shape in SHAPES.values():
        own = [cell for cell in cells if cell["name"].startswith(f"train_step_{shape.name}_vs_")]
        if own:
            lines += ["", f"#### {shape.name}", "", f"{shape.title}. Batches of {shape.batch_size:,}.", ""]
            lines += table(
                head,
                [
                    [
                        c["peer"],
                        factor(c),
                        promised(c),
                        over_floor(c),
                        *milliseconds(c),
                        clean_rounds(c),
                    ]
                    for c in own
                ],
            )
    return [*lines[1:], *not_held_table(cells)]


def profile_tables(cells: list[dict[str, Any]]) -> list[str]:
    """Our own steps part by part: whole training steps, then embeddings alone."""
    text = (
        "hotrow's own steps, part by part, medians in ms; in brackets the limit of that part. Products: the time of "
        "the dense part's matrix products at the highest rate at which the machine multiplies at all. The dense part "
        "also holds interaction, biases, activations, loss and update. Outside kernels: time in which no kernel of "
        "ours runs, but Python, autograd, torch's loss and dense update, with caches that products have emptied. The "
        "bare loop copies the rows out and subtracts the gradients from them, in C++ with nothing around it; both "
        "begin with cold caches."
    )
    steps = [cell for cell in cells if "dense_share" in cell]
    alone = [cell for cell in cells if "dense_share" not in cell]
    lines = [text]
    if steps:
        names = ("lookup", "dense forward", "dense backward", "dense update", "products", "interaction")
        head = {"step": "left", **dict.fromkeys(names, "right"), "products / dense": "left"}
        head |= dict.fromkeys(("tables' update", "whole", "outside kernels"), "right")
        lines += ["", *table(head, [step_profile_row(cell) for cell in steps])]
    if alone:
        head = {"step": "left"} | dict.fromkeys(
            ("lookup", "backward", "update", "whole", "outside kernels", "bare loop"), "right"
        )
        lines += ["", *table(head, [embedding_profile_row(cell) for cell in alone])]
    return lines


def beside_limit(ms: float, limit_ms: float | None) -> str:
    """A time, and its limit in brackets."""
    return f"{ms:.3g}" + ("" if limit_ms is None else f" ({limit_ms:.3g})")


def outside_kernels(cell: dict[str, Any]) -> str:
    """Its time, where it was measured."""
    return f"{cell['outside_kernels_ms']:.3g}" if "outside_kernels_ms" in cell else ""


def step_profile_row(cell: dict[str, Any]) -> list[str]:
    """A whole training step."""
    ms, limits, least = cell["parts_ms"], cell["limits_ms"], cell["least_dense_share"]
    return [
        cell["name"],
        beside_limit(ms["lookup"], limits.get("rows read")),
        *(f"{ms[part]:.3g}" for part in ("dense forward", "dense backward", "dense update")),
        f"{limits['products']:.3g}" if "products" in limits else "",
        f"{limits['interaction']:.3g}" if "interaction" in limits else "",
        f"{cell['dense_share']:.0%} ({held(f'at least {least:.0%}', holds=cell['dense_share'] >= least)})",
        beside_limit(ms["tables' update"], limits.get("rows updated")),
        beside_limit(cell["step_ms"], sum(limits.values()) or None),
        outside_kernels(cell),
    ]


def binding_table(reports: Reports) -> list[str]:
    """What the time of whole steps is made of on each processor; what binds is the largest part."""
    by_processor = reports.get("step_profile", {})
    names = ("products", "rows", "interaction", "outside kernels", "beyond limits")
    rows = []
    for name in (f"profile_{shape}" for shape in SHAPES):
        for processor, report in by_processor.items():
            for cell in (own for own in report["cells"] if own["name"] == name and own["limits_ms"]):
                limits, whole = cell["limits_ms"], cell["step_ms"]
                rows_ms = limits["rows read"] + limits["rows updated"]
                known = [limits["products"], rows_ms, limits["interaction"], cell["outside_kernels_ms"]]
                texts = (f"{ms / whole:.0%}" for ms in (*known, whole - sum(known)))
                rows.append([name.removeprefix("profile_"), processor, *texts])
    text = (
        "What binds a whole step: shares of its time. Products, rows and interaction count with their limits on that "
        "processor, outside kernels is time in which none of our kernels runs, and the rest is what kernels take "
        "beyond their limits (`python -m benchmarks.step_profile`)."
    )
    head = {"step": "left", "processor": "left"} | dict.fromkeys(names, "right")
    return ["", text, "", *table(head, rows)] if rows else []


def embedding_profile_row(cell: dict[str, Any]) -> list[str]:
    """A step of embeddings alone."""
    ms, limits = cell["parts_ms"], cell["limits_ms"]
    return [
        cell["name"],
        beside_limit(ms["lookup"], limits.get("lookup")),
        f"{ms['backward']:.3g}",
        beside_limit(ms["update"], limits.get("update")),
        beside_limit(cell["step_ms"], sum(limits.values()) or None),
        outside_kernels(cell),
        f"{cell['bare_ms']:.3g}" if "bare_ms" in cell else "",
    ]


def memory_table(cells: list[dict[str, Any]]) -> list[str]:
    """Peak memory."""
    text = (
        "The memory that training adds, at its peak, to what is resident before the first step (imports, batches, "
        "model, tables and optimizer state). Each side runs in processes of its own; the range is that of all "
        "rounds."
    )
    head = {"cell": "left", "peer": "left", "peer / ours": "right", "promised": "left"} | dict.fromkeys(
        ("ours, MB", "peer, MB", "tables, MB"), "right"
    )
    rows = [
        [c["name"], c["peer"], factor(c), promised(c), *(f"{c[k]:,.0f}" for k in ("ours_mb", "peer_mb", "tables_mb"))]
        for c in cells
    ]
    return [text, "", *table(head, rows)]


def update_table(cells: list[dict[str, Any]]) -> list[str]:
    """Other ways to apply the same SGD update: a line for each, skews side by side."""
    skews = list(dict.fromkeys(cell["name"].rsplit("_", 1)[1] for cell in cells))
    by_name = {cell["name"]: cell for cell in cells}
    rows = []
    for name in dict.fromkeys(cell["name"].rsplit("_", 1)[0] for cell in cells):
        own = [by_name.get(f"{name}_{skew}") for skew in skews]
        notes = [f"{skew}: {cell['note']}" for skew, cell in zip(skews, own, strict=True) if cell and "note" in cell]
        peer = next(cell["peer"] for cell in own if cell)
        rows.append([peer, *(factor(cell) if cell else "" for cell in own), "; ".join(notes) or "equal to ours"])
    text = (
        "How much longer other ways of applying the same gradients take than hotrow's backward and update, which "
        "sorts the ids and gives each thread the rows it owns. 2 tables of 1M rows, dim 64, 2048 bags of 50 ids, "
        "SGD."
    )
    head = {"variant": "left", **{f"variant / ours, {skew}": "right" for skew in skews}, "tables": "left"}
    return [text, "", *table(head, rows)]


def overlap_table(cells: list[dict[str, Any]]) -> list[str]:
    """What could run ahead of a step."""
    text = (
        "Work that could be taken out of a step, and what happens if it is: above 1 the plain step is faster. Ids "
        "are ordered for the update of row-wise Adagrad. If a second thread does it, the step still orders its own, "
        "so the saving would be at most what the note says. None of this pays if every core computes already. So "
        "hotrow orders ids and makes batches inline."
    )
    head = {"cell": "left", "beside": "left", "that / plain": "right", "plain, ms": "right", "note": "left"}
    rows = [[c["name"], c["peer"], factor(c), f"{c['ours_ms']:.3g}", c.get("note", "")] for c in cells]
    return [text, "", *table(head, rows)]


def huge_lines(cells: list[dict[str, Any]]) -> list[str]:
    """Returns how tables of 600 GB were measured; what came of it is in the summary."""
    return [
        f"`{cell['name']}`: {cell['num_tables']} tables, created in {cell['build_s']:.1f} s; a step took "
        f"{cell['step_s'][1]:.2f} s (median; 8 steps in 10 took {cell['step_s'][0]:.2f} to {cell['step_s'][2]:.2f} s); "
        f"{cell['written_rows']:,} rows were written to the disk and {cell['read_rows']:,} read back."
        for cell in cells
    ]


TABLES = {
    "kernels": kernel_tables,
    "step_profile": profile_tables,
    "overlap": overlap_table,
    "precision": scores_table,
    "end_to_end": step_tables,
    "end_to_end_as_intel": step_tables,
    "peak_memory": memory_table,
    "updates": update_table,
    "tiers": tiers_table,
    "hot": hot_tables,
    "huge": huge_lines,
    "ranks": ranks_table,
    "plan": plan_table,
}
"""Of the reports that have a form of their own."""


def measured_elsewhere(report: dict[str, Any]) -> list[str]:
    """A line for each run but the report's own, with the cells that come from it."""
    runs: dict[str, list[str]] = {}
    for cell in report.get("cells", ()):
        if "measured" in cell:
            told = [f"`{cell['measured']['command']}`"] if "command" in cell["measured"] else []
            told += [
                f"{key} {cell['measured'][key]}" for key in ("date", "commit", "threads") if key in cell["measured"]
            ]
            runs.setdefault(", ".join(told) or "another machine or setting", []).append(cell["name"])
    return [f"- {run}: {', '.join(names)}" for run, names in runs.items()]


def benchmarks_page(reports: Reports) -> str:
    """docs/measurements/benchmarks.md."""
    lines = [BENCHMARKS_HEAD, *summary(over_processors(reports)), *binding_table(reports)]
    for name, by_processor in reports.items():
        lines += ["", f"## {name}", *over_table({name: by_processor})]
        for processor, report in by_processor.items():
            lines += ["", f"### {name}: {processor}", ""]
            lines += [f"`{report['command']}`, {report['date']}. {machine_line(report)}.", ""]
            lines += TABLES.get(name, cell_table)(report["cells"])
            if elsewhere := measured_elsewhere(report):
                lines += ["", "Measured in another run:", "", *elsewhere]
    return "\n".join(lines) + "\n" + ("" if reports else "\n" + NOT_MEASURED)


def over_table(reports: Reports) -> list[str]:
    """The cells that several known processors have: the range of their figures, and each processor's own."""
    found = {name: own for name, own in over_processors(reports).items() if len(own) > 1 and figure(own) is not None}
    processors = list(dict.fromkeys(p for own in found.values() for p in own))
    head = {"cell": "left", "peer": "left"} | dict.fromkeys(("over processors", *processors), "right")
    rows = []
    for name, own in found.items():
        key, form = figure(own) or ("", "")
        texts = [spread_of(own[p], key, form) if p in own else "" for p in processors]
        rows.append([name, best(own).get("peer", "all in DRAM"), range_of(own), *texts])
    return ["", *table(head, rows)] if rows else []


def figure(found: ByProcessor) -> tuple[str, str] | None:
    """The field of a cell that is compared over processors, and its form; None if it has no such figure."""
    cell = next(iter(found.values()))
    return next(((key, form) for key, form in FIGURES.items() if key in cell), None)


def best(found: ByProcessor) -> Cell:
    """The cell of the processor whose figure is the highest; the newest where cells have no such figure."""
    key, _ = figure(found) or ("date", "")
    return max(found.values(), key=lambda cell: cell[key])


def range_of(found: ByProcessor) -> str:
    """The figure over processors, in words."""
    key, form = figure(found) or ("", "")
    return across([cell[key] for cell in found.values()], form)


def claim_cells(claim: dict[str, Any], cells: dict[str, ByProcessor]) -> list[str]:
    """Returns one line of a table of claims: claim, the paper's figure, ours, its command, machine and date."""
    found = cells.get(claim["ours"])
    if found is None:
        none = "not yet" if claim["ours"] is None else "not measured yet"
        command = f"`{claim['command']}`" if "command" in claim else ""
        return [claim["claim"], claim["figure"], claim.get("page", none), command, "", ""]
    cell = best(found)
    note = f"; {claim['note']}" if "note" in claim else ""
    threads = cell["threads"] if "threads" in cell else cell["machine"]["usable_cores"]
    machine = f"{cell['machine']['cpu']}, {threads} threads"
    if "told" in cell and len(found) > 1:
        machine = f"each with {threads} threads"
    return [claim["claim"], claim["figure"], f"{ours(found)}{note}", f"`{cell['command']}`", machine, cell["date"]]


def ours(found: ByProcessor) -> str:
    """What a cell says to a claim: the range over processors and the best of them, if it hangs on the processor."""
    cell = best(found)
    if "told" in cell:
        return str(cell["told"]) if len(found) == 1 else "; ".join(f"{p}: {own['told']}" for p, own in found.items())
    if "relative_speed" in cell:
        return f"{range_of(found)} of the speed with all in memory; best {spread_of(cell, *FIGURES_OF_SPEED)}"
    if "auc_difference" in cell:
        low, high = interval(cell["auc_difference"], cell["auc_difference_se"], cell["seeds"])
        difference = f"{cell['auc_difference']:+.4f} (95 %: {low:+.4f} to {high:+.4f})"
        return f"AUC {difference} beside shuffled order, {cell['seeds']} seeds"
    if "budgets" in cell:
        half = next(own for own in cell["budgets"] if own["rows"] == "covering" and own["amount"] == 0.5)
        return f"half of the bytes serve {half['hot_samples']:.1%}"
    if "ways" in cell:
        shares = [f"{how} {own['share_of_epoch']:.1%}" for how, own in cell["ways"].items()]
        return f"of an epoch: {', '.join(shares)}"
    if "auc" in cell:
        return f"validation AUC {score(cell)}"
    return f"{range_of(found)}; best {factor(cell)} over {cell['peer']}"


CLAIM_COLUMNS = ("claim", "the paper's figure", "ours", "command", "machine", "date")


def claims_page(papers: list[dict[str, Any]], cells: dict[str, ByProcessor]) -> str:
    """docs/measurements/claims.md."""
    lines = [CLAIMS_HEAD]
    for paper in papers:
        lines += [
            "",
            f"## {paper['paper']}",
            "",
            f"[What is built of it, and how to repeat it](../{paper['about']}).",
            "",
        ]
        lines += claims_table(paper["claims"], cells, 3)
    return "\n".join(lines) + "\n"


def claims_table(claims: list[dict[str, Any]], cells: dict[str, ByProcessor], num_columns: int) -> list[str]:
    """Returns the first columns of the table of one paper's claims."""
    head = dict.fromkeys(CLAIM_COLUMNS[:num_columns], "left")
    return table(head, [claim_cells(claim, cells)[:num_columns] for claim in claims])


def paper_page(page: Path, claims: list[dict[str, Any]], cells: dict[str, ByProcessor]) -> str:
    """Returns the text of a paper's page, which lies in a folder of its own, with the whole table of its claims."""
    lines = claims_table(claims, cells, len(CLAIM_COLUMNS))
    return with_figures(page, re.sub(r"\]\((?=[\w-]+\.md)", "](../measurements/", "\n".join(lines) + "\n"))


def with_figures(page: Path, figures: str) -> str:
    """Returns the text of a page with `figures` between its two marks. Raises ValueError if a mark is missing."""
    text = page.read_text()
    block = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not block.search(text):
        raise ValueError(f"{page.name} has no block from {BEGIN.strip()!r} to {END!r}; restore the two lines")
    return block.sub(lambda _: BEGIN + figures + END, text)


def readme_figures(cells: dict[str, ByProcessor]) -> str:
    """Returns the README's table, and the line on very large tables."""
    shown = {name: cells[name] for name in README_CELLS if name in cells}
    if not shown:
        return NOT_MEASURED
    head = {"work": "left", "compared with": "left", "speed": "right", "processors": "right"}
    rows = [[*README_CELLS[name], speed_of(own), len(own)] for name, own in shown.items()]
    lines = [*table(head, rows), "", where_measured(shown)]
    if huge := cells.get("huge"):
        lines += ["", huge_sentence(best(huge))]
    return "\n".join(lines) + "\n"


def where_measured(shown: dict[str, ByProcessor]) -> str:
    """Returns which machines the README's rows come from, in a sentence or two."""
    machines = {own["machine"]["cpu"]: own["machine"] for found in shown.values() for own in found.values()}
    sizes = " or ".join(
        dict.fromkeys(f"{m['usable_cores']} cores and {m['memory_bytes'] / 2**30:.0f} GiB" for m in machines.values())
    )
    return (
        "Medians; a range is over the processors measured, each with its own disk. A ratio depends on the processor: "
        f"these are {' and '.join(sorted(machines))}, with {sizes} each."
    )


def speed_of(found: ByProcessor) -> str:
    """Returns a figure's range over processors without their number: "2.72x", or "81% - 90%"."""
    key, form = figure(found) or ("", "")
    return span([cell[key] for cell in found.values()], form)


def huge_sentence(cell: Cell) -> str:
    """Returns what tables of 600 GB took, with the conditions of the measurement."""
    machine, gib = cell["machine"], 2**30
    busy = f" ({cell['note']})" if "note" in cell else ""
    back = f"{cell['read_rows']:,} rows had come back from the SSD" if cell["read_rows"] else "no row had left DRAM yet"
    return (
        f"**Tables of {cell['table_bytes'] / 1e9:.0f} GB train on a machine with "
        f"{machine['memory_bytes'] / gib:.0f} GiB of memory**, "
        f"{cell['dram_bytes'] / gib:.0f} GiB of it for rows: {cell['num_rows']:,} rows of {cell['dim']}, "
        "as many and as wide as the tables of MLPerf training v6.1's dlrm_v4. "
        f"After {cell['num_steps']:,} steps of 2,048 samples, whose ids follow Zipf's law (exponent {cell['zipf']}) "
        f"and touched only a small part of the rows, {back}. The last steps ran at {cell['samples_per_s']:,.0f} "
        f"samples/s{busy}; memory peaked at {cell['peak_bytes'] / gib:.1f} GiB. Every loss "
        f"and all {cell['checked_rows']:,} rows of the first {cell['checked_steps']} steps are exactly those "
        "of a run in DRAM (`python -m benchmarks.huge`)."
    )


def summary(cells: dict[str, ByProcessor]) -> list[str]:
    """Returns the section of docs/measurements/benchmarks.md that gives the main figures at a glance."""
    shown = {name: cells[name] for name in SUMMARY_CELLS if name in cells}
    if not shown:
        return []
    heads = ("work", "times faster, over processors", "best (range of rounds)", "than", "share of the limit")
    head = dict(zip(heads, ("left", "right", "right", "left", "right"), strict=True))
    rows = [
        [SUMMARY_CELLS[name], range_of(own), factor(best(own)), best(own)["peer"], shares(own)]
        for name, own in shown.items()
    ]
    machines = {p: cell for own in [*tiers_shown(cells), *shown.values()][::-1] for p, cell in own.items()}
    lines = ["", "## At a glance", "", *table(head, rows)]
    if sentence := tiers_sentence(cells):
        lines += ["", f"Tables larger than memory: {sentence} More: [memory-study.md](memory-study.md)."]
    if huge := cells.get("huge"):
        lines += ["", huge_sentence(best(huge))]
    return [*lines, "", *(f"- {machine_line(cell)}" for cell in machines.values())]


def shares(found: ByProcessor) -> str:
    """The shares of the limit over processors."""
    known = [cell["share_of_limit"] for cell in found.values() if cell.get("share_of_limit") is not None]
    texts = list(dict.fromkeys(f"{value:.0%}" for value in sorted(known)))
    return " - ".join(texts if len(texts) < 2 else (texts[0], texts[-1]))


def pages() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    docs, reports = ROOT / "docs", load_reports()
    measured = docs / "measurements"
    papers = yaml.safe_load(CLAIMS.read_text())
    cells = over_processors(reports)
    known = {**cells, **study_cells()}
    return {
        measured / "benchmarks.md": benchmarks_page(reports),
        measured / "claims.md": claims_page(papers, known),
        measured / "speed-by-memory.svg": memory_chart(cells),
        ROOT / "README.md": with_figures(ROOT / "README.md", readme_figures(cells)),
        **{docs / paper["about"]: paper_page(docs / paper["about"], paper["claims"], known) for paper in papers},
    }


def load_reports() -> Reports:
    """What was measured, on every processor."""
    results = ROOT / "docs" / "measurements" / "benchmarks.json"
    return json.loads(results.read_text()) if results.exists() else {}


def main() -> None:
    """Write the pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is out of date")
    parser.add_argument("--missing", action="store_true", help="write nothing; name the cells that processors lack")
    options = parser.parse_args()
    check = options.check
    if options.missing:
        print("\n".join(missing(load_reports())))
        return
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is out of date; run python -m benchmarks.claims", file=sys.stderr)
        else:
            path.write_text(pages()[path])
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
