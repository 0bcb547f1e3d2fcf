"""The pages made from measurements: benchmarks.md and claims.md in docs/measurements/, and figures in the README.

    python -m benchmarks.claims [--check | --missing]

Reads docs/measurements/benchmarks.json and docs/*-study.json (what was measured) and benchmarks/claims.yaml (what
papers say); writes no number of its own. With --check it writes nothing, and the exit status says whether the pages are
up to date. With --missing it lists the cells that are still to be measured, by processor."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.benchmarks_page import NOT_MEASURED, benchmarks_page, huge_sentence, score
from benchmarks.hot_lab import interval
from benchmarks.markdown import span, table
from benchmarks.processors import FIGURES_OF_SPEED, ByProcessor, best, factor, figure, range_of, spread_of
from benchmarks.results import Reports, missing, over_processors
from benchmarks.study.figures import study_cells
from benchmarks.tiers_page import memory_chart

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = Path(__file__).with_name("claims.yaml")
README_CELLS = {
    "train_step_kaggle_vs_torch": ("whole training step, tables as in Criteo's Kaggle data", "plain PyTorch"),
    "train_step_kaggle_vs_torch_as_intel": ("the same, PyTorch's matrix library on its fast path", "plain PyTorch"),
    "train_step_embedding-bound_vs_torchrec": ("whole step, 26 columns of 20 ids each", "torchrec (FBGEMM)"),
    "tiers_tiers_dram10_zipf1.05_ahead4": ("whole step, 1/10 of the tables in DRAM, the rest on SSD", "all in DRAM"),
    "tiers_tiers_dram32_zipf1.05_ahead4": ("whole step, 1/32 of the tables in DRAM, the rest on SSD", "all in DRAM"),
    "criteo.parse+encode/2.polars+categories": ("raw Criteo text read, its 33.8M ids numbered", "polars (categories)"),
}
"""The README's rows: cell -> what was done, and what it is compared with."""
BEGIN, END = "<!-- figures: made by `python -m benchmarks.claims` -->\n", "<!-- end of figures -->"
CLAIMS_HEAD = """\
# Claims

For readers of the papers behind hotrow: what each claims, beside what we measured, with the command, machine and date.
The page of each paper says what is built and what differs; [benchmarks.md](benchmarks.md) how figures were measured.

"Not read" means that the paper's body was not at hand, so we print no figure for it. "Not yet" means not built. The two
figures of a row come from different machines and peers. `python -m benchmarks.claims` makes the page from
benchmarks/claims.yaml and the JSON files beside it."""


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
        lines += table(dict.fromkeys(CLAIM_COLUMNS, "left"), [claim_cells(claim, cells) for claim in paper["claims"]])
    return "\n".join(lines) + "\n"


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


def pages() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    measured, reports = ROOT / "docs" / "measurements", load_reports()
    papers = yaml.safe_load(CLAIMS.read_text())
    cells = over_processors(reports)
    known = {**cells, **study_cells()}
    return {
        measured / "benchmarks.md": benchmarks_page(reports),
        measured / "claims.md": claims_page(papers, known),
        measured / "speed-by-memory.svg": memory_chart(cells),
        ROOT / "README.md": with_figures(ROOT / "README.md", readme_figures(cells)),
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
