"""The pages made of measurements: docs/benchmarks.md, docs/claims.md and the figures of the README.

    python -m benchmarks.claims [--check | --missing]

Reads docs/benchmarks.json (what was measured) and docs/claims.yaml (what papers say); writes no number of its own.
With --check nothing is written, and the exit status says whether the pages are what these two files make; with
--missing it is said which processors lack which cells.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.hot_lab import interval
from benchmarks.hot_page import hot_tables
from benchmarks.kernels import promises
from benchmarks.markdown import across, clean_rounds, held, table
from benchmarks.results import Cell, Reports, missing, over_processors
from benchmarks.step_shapes import SHAPES
from benchmarks.tiers_page import tiers_sentence, tiers_shown, tiers_table

ROOT = Path(__file__).resolve().parent.parent
README_CELLS = {
    "step_sgd_8x50_uniform": "embedding forward + backward + SGD, 8 tables x 1M rows x 64, 50 ids per bag, uniform",
    "step_sgd_8x50_zipf": "the same, skewed ids (Zipf 1.05)",
    "step_adagrad_26x1_dim64": "26 tables, one id each, dim 64, Adagrad",
    "interaction_26_dim64": "dot interaction of 27 vectors, dim 64, forward + backward",
    "train_step_kaggle_vs_torch": "whole DLRM training step, Criteo-Kaggle shape",
    "train_step_kaggle_vs_torch_as_intel": "the same, MKL told that it is on a processor of Intel's",
    "train_step_kaggle_vs_dlrm": "the same step",
    "train_step_mlperf-like_vs_torchrec": "whole step, 26 tables of dim 128, large MLPs",
    "train_step_sc20-small_vs_dlrm": "whole step, 8 tables, 50 ids per bag, large MLPs",
    "train_step_embedding-bound_vs_torchrec": "whole step, 26 tables, 20 ids per bag, small MLPs",
    "peak_memory_kaggle_vs_torch": "peak memory beyond tables, Criteo-Kaggle step",
}
ByProcessor = dict[str, Cell]
"""What was measured of one cell, by processor."""
FIGURES_OF_SPEED = ("relative_speed", "{:.0%}")
FIGURES = dict([("ratio", "{:.2f}x"), FIGURES_OF_SPEED])
"""Fields that are compared over processors, and how they are written."""
BEGIN, END = "<!-- figures: made by `python -m benchmarks.claims` -->\n", "<!-- end of figures -->"
BENCHMARKS_HEAD = """\
# Benchmarks

Made from docs/benchmarks.json, which `make bench` fills; studies of accuracy by the command above them. `make bench
DLRM=path` measures a checkout of facebookresearch/dlrm too, and torchrec is measured where it is installed. What is not
there is skipped and named.

Ours and the peer alternate in one process on the same ids, after their outputs were compared. Figures are medians over
rounds; the ratio is the median of the rounds' peer / ours, beside it the range of four rounds in five. A round is clean
if neither the hypervisor nor another process had the processors for more than 2 % of its time. Figures are of the clean
rounds; if fewer than half of those wanted are clean, of the rounds that were disturbed least, and marked "disturbed".
A disturbed figure counts in no range, says nothing of a promise, and is still to be measured.
Up to November 2026 rounds with other processes on the processors counted as clean.

Ratios differ from processor to processor: each has a report of its own, and a benchmark that was measured on several
begins with the range over them. `python -m benchmarks.claims --missing` names what is still to be measured on which.
"AMD EPYC" alone is a processor whose generation was not written down; it counts in no range.

The limit is a separate loop that only moves the same rows (native/limit.cpp), and the pooled rows and their gradient
once each; for an MLP its arithmetic, at the most operations a second that a large torch.mm or bare multiply-adds in
registers reach; for the interaction the larger of moving its operands and of its arithmetic; for a training step, where
it is called its floor, the sum of rows, interaction and products. A share above 100 % says that the kernels did what
the limit's loop did not: it is marked, and the loop is to be mended. Where hotrow promises a ratio it stands beside
what was measured, and whether the median holds it. torch runs on huge pages (THP_MEM_ALLOC_ENABLE=1). Its products are
MKL's, which on AMD's processors of family 26 (Zen 5) takes code half as fast as they can run; with `--mkl-as-intel`
whole steps are measured a second time, MKL being told that it is on one of Intel's, which nobody's torch does by
itself. Milliseconds mean something only beside each other: compare ratios and shares between machines.

Limits of family 26 model 2 are of 22 November 2026. Those of products were measured then by bare multiply-adds, in
`step_profile`. Those of rows are of a loop whose threads shared the cores with torch's, which still spun: it is mended
since, and shares above 100 % are to be measured again. Shares of the interaction are left out until then."""
CLAIMS_HEAD = """\
# Claims

What the papers behind hotrow say, and what was measured here; made from docs/claims.yaml and docs/benchmarks.json. "Not
read": the paper's body was not at hand, so no figure is printed for it. "Not yet": not built, or not measured. Figures
of one row come from different machines and peers: see docs/benchmarks.md."""
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


def score(row: dict[str, Any]) -> str:
    """A mean over seeds with its standard deviation, and the paired difference to float32."""
    text = f"{row['auc']:.4f} ± {row['sd']:.4f}"
    if "difference" in row:
        text += f" ({row['difference']:+.4f} ± {row['difference_sd']:.4f} beside float32)"
    return text


def scores_table(report: dict[str, Any]) -> list[str]:
    """The rows of a study: what was varied, and the AUC over seeds."""
    lines = ["| variant | validation AUC, mean ± sd over seeds (paired difference) | by seed |", "|---|---|---|"]
    for row in report["scores"]:
        lines.append(f"| {row['name']} | {score(row)} | {', '.join(f'{auc:.4f}' for auc in row['aucs'])} |")
    return lines


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
        "Promises that are not held. Allowed is the peer's time over the promise. Where the limit alone takes as long, "
        "only code faster than that limit would keep the promise on this machine; where it takes less, what lies "
        "between is measured part by part by `python -m benchmarks.step_profile`."
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
        "Our own steps, part by part, medians in ms; in brackets the limit of that part. Products: what the matrix "
        "products of the dense part take as fast as the machine multiplies at all; the dense part also holds "
        "interaction, biases, activations, loss and update. Outside kernels: while no kernel of ours runs, but Python, "
        "autograd, torch's loss and dense update, from caches that products have emptied. The bare loop copies the "
        "rows out and subtracts the gradients from them, in C++ with nothing around it; both begin with cold caches."
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
        "Memory that training adds, at its peak, to what is resident before the first step: imports, batches, model, "
        "tables and optimizer state. Each side in processes of its own; the range is that of all rounds."
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
        "How much longer other ways of applying the same gradients take than hotrow's backward and update, which sorts "
        "the ids and gives each thread the rows it owns. 2 tables of 1M rows, dim 64, 2048 bags of 50 ids, SGD."
    )
    head = {"variant": "left", **{f"variant / ours, {skew}": "right" for skew in skews}, "tables": "left"}
    return [text, "", *table(head, rows)]


def overlap_table(cells: list[dict[str, Any]]) -> list[str]:
    """What could run ahead of a step."""
    text = (
        "What could be taken out of a step, and what happens when it is: above 1 the plain step is faster. Ids are "
        "ordered for the update of row-wise Adagrad; where a second thread does it, the step still orders its own, so "
        "the saving would be at most what the note says. Nothing of it pays where every core computes: hotrow orders "
        "ids inline, makes batches inline, and pins threads only on machines of several NUMA nodes (`train.pin`)."
    )
    head = {"cell": "left", "beside": "left", "that / plain": "right", "plain, ms": "right", "note": "left"}
    rows = [[c["name"], c["peer"], factor(c), f"{c['ours_ms']:.3g}", c.get("note", "")] for c in cells]
    return [text, "", *table(head, rows)]


TABLES = {
    "kernels": kernel_tables,
    "step_profile": profile_tables,
    "overlap": overlap_table,
    "end_to_end": step_tables,
    "end_to_end_as_intel": step_tables,
    "peak_memory": memory_table,
    "updates": update_table,
    "tiers": tiers_table,
    "hot": hot_tables,
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
    """docs/benchmarks.md."""
    lines = [BENCHMARKS_HEAD]
    for name, by_processor in reports.items():
        lines += ["", f"## {name}", *over_table({name: by_processor})]
        for processor, report in by_processor.items():
            lines += ["", f"### {name}: {processor}", ""]
            lines += [f"`{report['command']}`, {report['date']}. {machine_line(report)}.", ""]
            lines += scores_table(report) if "scores" in report else TABLES.get(name, cell_table)(report["cells"])
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


def claim_row(claim: dict[str, Any], cells: dict[str, ByProcessor]) -> str:
    """One line of the table of claims."""
    found = cells.get(claim["ours"])
    if found is None:
        return f"| {claim['claim']} | {claim['figure']} | {claim.get('page', 'not yet')} | | | |"
    cell = best(found)
    note = f"; {claim['note']}" if "note" in claim else ""
    threads = cell["threads"] if "threads" in cell else cell["machine"]["usable_cores"]
    return (
        f"| {claim['claim']} | {claim['figure']} | {ours(found)}{note} | "
        f"`{cell['command']}` | {cell['machine']['cpu']}, {threads} threads | {cell['date']} |"
    )


def ours(found: ByProcessor) -> str:
    """What a cell says to a claim: the range over processors and the best of them, if it hangs on the processor."""
    cell = best(found)
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


def claims_page(papers: list[dict[str, Any]], cells: dict[str, ByProcessor]) -> str:
    """docs/claims.md."""
    lines = [CLAIMS_HEAD]
    for paper in papers:
        lines += ["", f"## {paper['paper']}", ""]
        lines += ["| claim | the paper's figure | ours | command | machine | date |", "|---|---|---|---|---|---|"]
        lines += [claim_row(claim, cells) for claim in paper["claims"]]
    return "\n".join(lines) + "\n"


def readme_figures(cells: dict[str, ByProcessor]) -> str:
    """The README's table."""
    shown = {name: cells[name] for name in README_CELLS if name in cells}
    if not shown:
        return NOT_MEASURED
    head = {
        "work": "left",
        "faster by": "right",
        "best (spread)": "right",
        "than": "left",
        "share of the limit": "right",
    }
    rows = [
        [README_CELLS[name], range_of(own), factor(best(own)), best(own)["peer"], shares(own)]
        for name, own in shown.items()
    ]
    machines = {p: cell for own in [*tiers_shown(cells), *shown.values()][::-1] for p, cell in own.items()}
    lines = [
        *table(head, rows),
        "",
        "A ratio hangs on the processor: how fast torch's own products are there, and how far memory is. Not every "
        "row was measured on every processor yet; `python -m benchmarks.claims --missing` names the cells. Share of "
        "the limit: the machine's own limit over our time; above 100 % another loop of ours did not reach what the "
        "kernels do. How measured: [docs/benchmarks.md](docs/benchmarks.md).",
    ]
    if sentence := tiers_sentence(cells):
        more = "more: [docs/memory-study.md](docs/memory-study.md)"
        lines += ["", f"Tables larger than memory: {sentence} {more[0].upper()}{more[1:]}."]
    lines += ["", *(f"- {machine_line(cell)}" for cell in machines.values())]
    return "\n".join(lines) + "\n"


def shares(found: ByProcessor) -> str:
    """The shares of the limit over processors."""
    known = [cell["share_of_limit"] for cell in found.values() if cell.get("share_of_limit") is not None]
    texts = list(dict.fromkeys(f"{value:.0%}" for value in sorted(known)))
    return " - ".join(texts if len(texts) < 2 else (texts[0], texts[-1]))


def pages() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    reports = load_reports()
    papers = yaml.safe_load((ROOT / "docs" / "claims.yaml").read_text())
    cells = over_processors(reports)
    readme = (ROOT / "README.md").read_text()
    figures = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not figures.search(readme):
        raise ValueError(f"README.md has no block from {BEGIN.strip()!r} to {END!r}; restore the two lines")
    return {
        ROOT / "docs" / "benchmarks.md": benchmarks_page(reports),
        ROOT / "docs" / "claims.md": claims_page(papers, cells),
        ROOT / "README.md": figures.sub(lambda _: BEGIN + readme_figures(cells) + END, readme),
    }


def load_reports() -> Reports:
    """What was measured, on every processor."""
    results = ROOT / "docs" / "benchmarks.json"
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
