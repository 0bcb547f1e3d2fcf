"""The studies: our kernels over many shapes (`kernels`), training beside other stores (`memory`), hot rows (`hot`).

    python -m benchmarks.studies kernels --quick               # a first look in under a minute
    python -m benchmarks.studies memory --estimate             # how many cells, about how long; measures nothing
    python -m benchmarks.studies memory --data data/criteo     # measures the cells that are left
    python -m benchmarks.studies memory --docs FOLDER/memory.json

With --docs nothing is measured: docs/measurements/NAME-study.md and its charts are made from that file, or, if no file
is given, from docs/measurements/NAME-study.json, which holds what the page shows of an earlier one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import hot_study, hot_study_page, kernel_study, kernel_study_page
from benchmarks.rivals import memory
from benchmarks.rivals import page as memory_page
from benchmarks.study_runner import Study, read_preset, run_study
from hotrow.base.files import parse_bytes

CELLS: dict[str, Any] = {"kernels": kernel_study, "memory": memory, "hot": hot_study}
PRESETS = {"kernels": kernel_study_page.PRESET, "memory": memory_page.PRESET, "hot": hot_study_page.PRESET}
PAGES = {"kernels": kernel_study_page.kernels_page, "memory": memory_page.memory_page, "hot": hot_study_page.hot_page}
DOCS = {"memory": memory_page.STUDY, "hot": hot_study_page.STUDY}


def make_study(name: str, data: Sequence[str] = (), preset: dict[str, Any] | None = None) -> Study:
    """Returns the study `name` on its own data and on `data`. Raises ValueError if that cannot be used.

    data: packed datasets, or, for `memory`, plain traces too; none for `kernels`. preset: replaces the study's own.
    """
    cells = CELLS[name]
    return Study(
        name=name,
        preset=cells.with_data(preset or read_preset(PRESETS[name]), data),
        cells=cells,
        page=PAGES[name],
        command=("python", "-m", "benchmarks.studies", name, *(word for path in data for word in ("--data", path))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CELLS)
    parser.add_argument("--data", action="append", default=[], help="packed dataset (memory: or plain trace); repeats")
    parser.add_argument("--out", help="folder of results; default: studies/NAME; a study continues there")
    parser.add_argument("--quick", action="store_true", help="a first look, in minutes at most")
    parser.add_argument("--memory", type=parse_bytes, help="most that tables may take, such as 8GiB; default: 60 %%")
    parser.add_argument("--estimate", action="store_true", help="only count the cells and estimate the time")
    parser.add_argument("--docs", nargs="?", const="", metavar="FILE", help="only make the pages in docs/")
    options = parser.parse_args()
    if options.docs is not None and options.name not in DOCS:
        sys.exit(f"docs/ has no page of the study {options.name}; --docs makes those of {' and '.join(DOCS)}")
    if options.docs is not None:
        DOCS[options.name].write(Path(options.docs) if options.docs else None)
        return
    try:
        result = run_study(
            make_study(options.name, options.data),
            options.out,
            quick=options.quick,
            memory_bytes=options.memory,
            estimate_only=options.estimate,
            say=lambda line: print(line, file=sys.stderr),
        )
    except ValueError as error:
        sys.exit(str(error))
    for name, value in result.items():
        if name != "cells":
            print(f"{name:10s} {value}")


if __name__ == "__main__":
    main()
