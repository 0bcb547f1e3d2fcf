"""Runs a study: `hotrow study NAME` calls `run_study`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotrow.base.files import disk_free_bytes, size
from hotrow.costs.declared import modelled
from hotrow.costs.hardware import Hardware, another_machine, known_hardware, read_hardware, this_host
from hotrow.lab.study.cells import UNKNOWN, Studied
from hotrow.lab.study.data import NotHere
from hotrow.lab.study.runner import Sweep, run_sweep
from hotrow.lab.study.study import Study, find_study, read_study


def run_study(
    name: str,
    out: Path | str | None = None,
    *,
    quick: bool = False,
    estimate: bool = False,
    hardware: Path | str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures the cells of a study that are not in `out` yet, writes its files there, and returns what it found.

    name: one of hotrow's studies, or the path of a YAML file. out: by default studies/<name>, or <name>-quick. quick:
    only the ends of every axis. estimate: measure nothing. hardware: this machine's figures, instead of those that
    `hotrow probe` kept; or another machine, for which every cell is modelled instead of for those of the study.

    Raises NotHere if this machine lacks what the study needs, and ValueError naming file and field for a study that
    cannot be read, and if another process measures in `out`.
    """
    file = find_study(name)
    study, stem = read_study(file), file.stem
    folder = Path(out) if out is not None else Path("studies") / (f"{stem}-quick" if quick else stem)
    check_folder(folder)
    here, machines = machines_of(study, hardware)
    studied = Studied(study, str(file), quick=quick, hardware=here, machines=machines, say=say)
    cells = studied.cells  # what is wrong with the study is said before anything is made
    if study.predicts and here is None and not estimate:
        raise NotHere(f"study {file} predicts, which needs this machine's figures: run hotrow probe FOLDER first")
    disk = studied.disk_bytes()
    say(f"{stem}: {len(cells)} cells; the rows they train on take up to {size(disk)} in {folder / 'data'}")
    if not estimate and disk > (free := disk_free_bytes(folder)):
        raise NotHere(
            f"the rows of the study take {size(disk)}, and {folder} has {size(free)} free: choose another --out"
        )
    words = [
        "hotrow",
        "study",
        name,
        *(["--quick"] if quick else []),
        *(["--hardware", str(hardware)] if hardware is not None else []),
        *(["--out", str(out)] if out is not None else []),
    ]
    sweep = Sweep(name=stem, cells=studied, command=shlex.join(words), quick=quick)
    result = run_sweep(sweep, folder, estimate_only=estimate, say=say)
    result["disk_bytes"] = disk
    return result


def check_folder(out: Path) -> None:
    """Raises ValueError if no folder can be at `out`, because a file is there or above."""
    for place in (out, *out.parents):
        if place.exists():
            if not place.is_dir():
                raise ValueError(f"{place} is a file, so results cannot be in {out}: pass another --out")
            return


def machines_of(study: Study, hardware: Path | str | None) -> tuple[Hardware | None, dict[str, Hardware | str]]:
    """Returns this machine's figures, if they are known, and the machines that cells are modelled for, by name.

    hardware: see `run_study`. Raises ValueError for one that cannot be read.
    """
    here, names = known_hardware(), study.machines
    if hardware is not None:
        found = read_hardware(hardware)
        if another_machine(found, this_host()) is None:
            here = found
        else:
            names = [str(hardware)]
    return here, {Path(name).stem: _machine(name, here) for name in names}


def _machine(name: str, here: Hardware | None) -> Hardware | str:
    """Returns a machine, with steps modelled from those measured here if it has none; or why it cannot be modelled."""
    if here is None:
        return UNKNOWN
    try:
        found = read_hardware(name)
        return found if found.kernels else modelled(found, here)
    except ValueError as error:
        return str(error)
