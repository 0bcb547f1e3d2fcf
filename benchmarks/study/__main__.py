"""The studies: sweeps of short real trainings, and comparisons with other stores and kernels.

    python -m benchmarks.study efficiency --quick         # a first look: the ends of every axis
    python -m benchmarks.study efficiency                 # HPCA'21: features, tables, MLPs, rows, ids, batch, placement
    python -m benchmarks.study quality                    # NE by batch size, the rate tuned again; needs HOTROW_DATA
    python -m benchmarks.study scaling                    # SC'20: processes of this machine, over gloo and over MPI
    python -m benchmarks.study wide.yaml                  # your own sweep: benchmarks/study/sweep.py describes the file
    python -m benchmarks.study kernels --memory 8GiB      # our kernels over many shapes, beside the machine's row limit
    python -m benchmarks.study memory --data data/criteo  # training with less DRAM than tables, beside other stores
    python -m benchmarks.study hot --data data/criteo     # hot rows and hot samples
    python -m benchmarks.study memory --docs FOLDER/memory.json

A study that was interrupted goes on with the same command. With --docs nothing is measured: NAME-study.md in
docs/measurements and its charts are made from that file, or, if no file is given, from NAME-study.json beside them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import hot_study, hot_study_page, kernel_study, kernel_study_page
from benchmarks.rivals import memory
from benchmarks.rivals import page as memory_page
from benchmarks.study.cells import SweepCells
from benchmarks.study.presets import Study, command_of, read_preset, run_study
from benchmarks.study.runner import Sweep, run_sweep
from benchmarks.study.sweep import SWEEPS, read_sweep
from hotrow.base.files import parse_bytes

CELLS: dict[str, Any] = {"kernels": kernel_study, "memory": memory, "hot": hot_study}
PRESETS = {"kernels": kernel_study_page.PRESET, "memory": memory_page.PRESET, "hot": hot_study_page.PRESET}
PAGES = {"kernels": kernel_study_page.kernels_page, "memory": memory_page.memory_page, "hot": hot_study_page.hot_page}
DOCS = {"memory": memory_page.STUDY, "hot": hot_study_page.STUDY}


def make_study(name: str, data: Sequence[str] = (), preset: dict[str, Any] | None = None) -> Study:
    """Returns the comparison `name` on its own data and on `data`. Raises ValueError if that cannot be used.

    data: packed datasets, or, for `memory`, plain traces too; none for `kernels`. preset: replaces the study's own.
    """
    cells = CELLS[name]
    return Study(
        name=name,
        preset=cells.with_data(preset or read_preset(PRESETS[name]), data),
        cells=cells,
        page=PAGES[name],
        command=("python", "-m", "benchmarks.study", name, *(word for path in data for word in ("--data", path))),
    )


def run_yaml(name: str, out: Path | str | None, *, quick: bool = False, **options: Any) -> dict[str, Any]:
    """Runs a sweep by its name or file, as `run_sweep` says, in `out`, by default studies/NAME or NAME-quick."""
    path = SWEEPS.get(name, Path(name))
    cells = SweepCells(read_sweep(path), str(path), quick=quick)
    folder = Path(out) if out is not None else Path("studies") / (f"{path.stem}-quick" if quick else path.stem)
    command = command_of(("python", "-m", "benchmarks.study", name), out, quick=quick, memory_bytes=None)
    return run_sweep(Sweep(name=path.stem, cells=cells, command=command, quick=quick), folder, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=f"{', '.join([*SWEEPS, *CELLS])}, or the path of a YAML file")
    parser.add_argument("--data", action="append", default=[], help="packed dataset (memory: or plain trace); repeats")
    parser.add_argument("--out", help="folder of results; default: studies/NAME; a study continues there")
    parser.add_argument("--quick", action="store_true", help="a first look, in minutes at most")
    parser.add_argument("--memory", type=parse_bytes, help="most that tables may take, such as 8GiB; default: 60 %%")
    parser.add_argument("--estimate", action="store_true", help="only count the cells and estimate the time")
    parser.add_argument("--docs", nargs="?", const="", metavar="FILE", help="only make the pages in docs/")
    options = parser.parse_args()
    if options.name not in {*SWEEPS, *CELLS} and Path(options.name).suffix not in (".yaml", ".yml"):
        parser.error(
            f"there is no study {options.name!r}; choose one of {', '.join([*SWEEPS, *CELLS])}, or a YAML file"
        )
    if options.docs is not None:
        if options.name not in DOCS:
            sys.exit(f"docs/ has no page of the study {options.name}; --docs makes those of {' and '.join(DOCS)}")
        DOCS[options.name].write(Path(options.docs) if options.docs else None)
        return
    how: dict[str, Any] = {"quick": options.quick, "memory_bytes": options.memory, "estimate_only": options.estimate}
    how["say"] = lambda line: print(line, file=sys.stderr)
    try:
        if options.name in CELLS:
            result = run_study(make_study(options.name, options.data), options.out, **how)
        else:
            result = run_yaml(options.name, options.out, **how)
    except ValueError as error:
        sys.exit(str(error))
    for name, value in result.items():
        if name != "cells":
            print(f"{name:10s} {value}")


if __name__ == "__main__":
    main()
