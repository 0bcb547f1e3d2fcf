"""The pages made of measurements: docs/benchmarks.md, docs/claims.md and the figures of the README.

    python -m benchmarks.claims [--check]

Reads docs/benchmarks.json (what was measured) and docs/claims.yaml (what papers say); writes no number of its own.
With --check nothing is written, and the exit status says whether the pages are what these two files make.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
README_CELLS = {
    "step_sgd_8x50_uniform": "embedding forward + backward + SGD, 8 tables x 1M rows x 64, 50 ids per bag, uniform",
    "step_sgd_8x50_zipf": "the same, skewed ids (Zipf 1.05)",
    "step_adagrad_26x1_dim64": "26 tables, one id each, dim 64, Adagrad",
    "interaction_26_dim64": "dot interaction of 27 vectors, dim 64, forward + backward",
    "train_step_criteo_kaggle": "whole DLRM training step, Criteo-Kaggle shape",
}
BEGIN, END = "<!-- figures: made by `python -m benchmarks.claims` -->\n", "<!-- end of figures -->"
BENCHMARKS_HEAD = """\
# Benchmarks

Made from docs/benchmarks.json, which `make bench` fills; studies of accuracy by the command above them. Ours and the
peer alternate in one process on the same ids, after their outputs were compared. Figures are medians over rounds; the
ratio is the median of the rounds' peer / ours, beside it the range of four rounds in five; rounds in which the
hypervisor took processor time away are dropped for both.

The limit is a separate loop that only moves the same rows (native/limit.cpp); for the interaction the larger of moving
its operands and of its arithmetic at the speed of a large matrix product; for a training step the sum of these and of
its matrix products. torch runs on huge pages (THP_MEM_ALLOC_ENABLE=1). Milliseconds mean something only beside each
other: compare ratios and shares between machines."""
CLAIMS_HEAD = """\
# Claims

What the papers behind hotrow say, and what was measured here; made from docs/claims.yaml and docs/benchmarks.json. "Not
read": the paper's body was not at hand, so no figure is printed for it. "Not yet": not built, or not measured. Figures
of one row come from different machines and peers: see docs/benchmarks.md."""
NOT_MEASURED = "Not measured yet: `make bench` fills this in.\n"


def load_cells(reports: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every measured cell by name, with the circumstances of its report beside its numbers."""
    return {
        cell["name"]: {**cell, **{key: value for key, value in report.items() if key not in ("cells", "scores")}}
        for report in reports.values()
        for cell in (*report.get("cells", ()), *report.get("scores", ()))
    }


def machine_line(report: dict[str, Any]) -> str:
    """Machine, versions and settings of a report in one line."""
    machine, backend, versions = report["machine"], report["backend"], report["versions"]
    memory = machine["memory_bytes"] / 2**30
    return (
        f"{machine['cpu']}, {report['threads']} threads of {machine['cores']} cores, {memory:.0f} GiB; "
        f"kernels {backend['name']} ({backend['isa']}); torch {versions['torch']}; commit {report['commit']}"
    )


def factor(cell: dict[str, Any]) -> str:
    """The ratio with its spread."""
    low, high = cell["spread"]
    return f"{cell['ratio']:.2f}x ({low:.2f}-{high:.2f})"


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
    """The share of the machine's limit."""
    return "" if cell["share_of_limit"] is None else f"{cell['share_of_limit']:.0%}"


def benchmarks_page(reports: dict[str, Any]) -> str:
    """docs/benchmarks.md."""
    lines = [BENCHMARKS_HEAD]
    for report in reports.values():
        lines += [
            "",
            f"## `{report['command']}`",
            "",
            f"{report['date']}. {machine_line(report)}.",
            "",
        ]
        if "scores" in report:
            lines += scores_table(report)
            continue
        lines += [
            "| cell | peer | peer / ours | share of limit | ours, ms | peer, ms | limit, ms | rounds | stolen |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for cell in report["cells"]:
            limit = "" if cell["limit_ms"] is None else f"{cell['limit_ms']:.3g}"
            lines.append(
                f"| {cell['name']} | {cell['peer']} | {factor(cell)} | {share(cell)} | {cell['ours_ms']:.3g} | "
                f"{cell['peer_ms']:.3g} | {limit} | {cell['rounds']} | {cell['stolen_rounds']} |"
            )
    return "\n".join(lines) + "\n" + ("" if reports else "\n" + NOT_MEASURED)


def claim_row(claim: dict[str, Any], cells: dict[str, dict[str, Any]]) -> str:
    """One line of the table of claims."""
    cell = cells.get(claim["ours"])
    if cell is None:
        return f"| {claim['claim']} | {claim['figure']} | not yet | | | |"
    note = f"; {claim['note']}" if "note" in claim else ""
    ours = f"validation AUC {score(cell)}" if "auc" in cell else f"{factor(cell)} over {cell['peer']}"
    return (
        f"| {claim['claim']} | {claim['figure']} | {ours}{note} | "
        f"`{cell['command']}` | {cell['machine']['cpu']}, {cell['threads']} threads | {cell['date']} |"
    )


def claims_page(papers: list[dict[str, Any]], cells: dict[str, dict[str, Any]]) -> str:
    """docs/claims.md."""
    lines = [CLAIMS_HEAD]
    for paper in papers:
        lines += ["", f"## {paper['paper']}", ""]
        lines += ["| claim | the paper's figure | ours | command | machine | date |", "|---|---|---|---|---|---|"]
        lines += [claim_row(claim, cells) for claim in paper["claims"]]
    return "\n".join(lines) + "\n"


def readme_figures(cells: dict[str, dict[str, Any]]) -> str:
    """The README's table."""
    shown = {name: cells[name] for name in README_CELLS if name in cells}
    if not shown:
        return NOT_MEASURED
    rows = [
        f"| {README_CELLS[name]} | {factor(cell)} | {cell['peer']} | {share(cell)} |" for name, cell in shown.items()
    ]
    head = ["| work | faster by (spread) | than | share of the machine's limit |", "|---|---:|---|---:|"]
    where = machine_line(next(iter(shown.values())))
    return "\n".join([*head, *rows, "", f"{where}. How measured: [docs/benchmarks.md](docs/benchmarks.md)."]) + "\n"


def pages() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    results = ROOT / "docs" / "benchmarks.json"
    reports = json.loads(results.read_text()) if results.exists() else {}
    papers = yaml.safe_load((ROOT / "docs" / "claims.yaml").read_text())
    cells = load_cells(reports)
    readme = (ROOT / "README.md").read_text()
    figures = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not figures.search(readme):
        raise ValueError(f"README.md has no block from {BEGIN.strip()!r} to {END!r}; restore the two lines")
    return {
        ROOT / "docs" / "benchmarks.md": benchmarks_page(reports),
        ROOT / "docs" / "claims.md": claims_page(papers, cells),
        ROOT / "README.md": figures.sub(lambda _: BEGIN + readme_figures(cells) + END, readme),
    }


def main() -> None:
    """Write the pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is out of date; run python -m benchmarks.claims", file=sys.stderr)
        else:
            path.write_text(pages()[path])
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
