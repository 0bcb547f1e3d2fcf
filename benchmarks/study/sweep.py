"""What a sweep measures: a YAML file, and the cells that it expands into.

    title: How many dense features?
    asks: What does a dense feature cost?
    rounds: 9
    base:                                  # a recipe; `data` describes synthetic rows, or names a file of real ones
      data: {tables: 8, rows: 100000}
      train: {batch_size: 512}
    groups:
      dense:
        asks: What does a dense feature cost?
        base: {train.threads: 1}           # fields that differ from the sweep's base
        measures: speed                    # or quality: cells are trained to their end and scored
        axes:
          data.dense: [16, 64, 256]        # a field, as in --set, and its values
          mlp:                             # or points with a name, each of several fields
            narrow: {model.bottom_mlp: [64], model.top_mlp: [64]}
            wide: {model.bottom_mlp: [512, 256], model.top_mlp: [512, 256]}

Every combination of points is a cell. Beside fields of a recipe and of `data` (rows.py), `ranks` says how many
processes train together, and `transport` over what they exchange messages (gloo or mpi). Sizes of `memory.dram` and
`memory.file_bytes` may be shares of the tables with their optimizer state: "25%".
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.study.rows import RealRows, SyntheticRows
from hotrow.base.files import check_name
from hotrow.base.records import checked
from hotrow.config.load import make_config, read_config, set_field
from hotrow.config.schema import Config

FOLDER = Path(__file__).parent
SWEEPS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
"""The sweeps that come with the benchmarks, by name."""
FIELDS = {"title", "asks", "base", "rounds", "groups"}
GROUP_FIELDS = {"asks", "base", "axes", "measures"}
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Cell:
    """One training to measure."""

    group: str
    labels: dict[str, str]
    """Where on each axis it lies."""
    config: dict[str, Any]
    """A recipe without `data`."""
    rows: SyntheticRows | RealRows
    measures: str = "speed"
    rounds: int = 9
    """Passes over the data that a figure is made of, if the machine is quiet."""
    ranks: int = 1
    transport: str = "gloo"

    @property
    def name(self) -> str:
        """The cell's place on the axes."""
        return "/".join([self.group, *(f"{axis}={label}" for axis, label in self.labels.items())])

    @property
    def key(self) -> str:
        """The cell's place, and a hash of all that its figure depends on."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.name}#{digest[:8]}"

    def resolved(self, *, data: str, tables_bytes: int, folder: Path | None = None) -> Config:
        """Returns the config for a packed dataset. tables_bytes: what shares of memory are shares of.

        folder: where relative paths of `memory.file` and `memory.ssd` lead.
        """
        raw: dict[str, Any] = {**deepcopy(self.config), "data": data}
        if isinstance(memory := raw.get("memory"), dict):
            for name in ("dram", "file_bytes"):
                if isinstance(memory.get(name), str) and (share := _SHARE.fullmatch(memory[name])):
                    memory[name] = max(1, int(tables_bytes * float(share[1]) / 100))
            for name in ("file", "ssd"):
                if folder is not None and memory.get(name) is not None:
                    memory[name] = str(folder / check_name(memory[name], what=f"memory.{name}"))
        return make_config(raw, origin=f"cell {self.name}")


def read_sweep(path: Path) -> dict[str, Any]:
    """Returns the sweep in a YAML file. Raises ValueError naming file and field."""
    raw = read_config(path, what="study", example="benchmarks/study/sweep.py describes", field="title: How wide?")
    _check_fields(raw, FIELDS, needed={"groups"}, where=f"study {path}")
    for name, group in raw["groups"].items():
        where = f"study {path}: groups.{check_name(name, what='group')}"
        _check_fields(group, GROUP_FIELDS, needed={"axes"}, where=where)
        if group.get("measures", "speed") not in ("speed", "quality"):
            raise ValueError(f"{where}: measures is {group['measures']!r}; choose speed or quality")
    return raw


def _check_fields(fields: Any, known: set[str], *, needed: set[str], where: str) -> None:
    if not isinstance(fields, dict) or not needed <= fields.keys() <= known:
        allowed = ", ".join(sorted(known))
        raise ValueError(f"{where} holds {fields!r:.60}; it must have {', '.join(needed)}, and no field but {allowed}")


def expand(sweep: Mapping[str, Any], *, origin: str, quick: bool = False) -> list[Cell]:
    """Returns the cells of all groups. quick: only the ends of every axis, and few rounds.

    Raises ValueError naming `origin`, group and field for a field that does not exist or may not have its value.
    """
    cells: list[Cell] = []
    rounds = sweep.get("rounds", 9)
    for name, group in sweep["groups"].items():
        where = f"study {origin}: groups.{name}"
        axes = {axis: list(_points(axis, points, where)) for axis, points in group["axes"].items()}
        if quick:
            axes = {axis: [points[0], points[-1]][: len(points)] for axis, points in axes.items()}
        for chosen in itertools.product(*axes.values()):
            labels = {axis: label for axis, (label, _) in zip(axes, chosen, strict=True)}
            raw = deepcopy(sweep.get("base", {}))
            for fields in (group.get("base", {}), *(fields for _, fields in chosen)):
                for field, value in fields.items():
                    set_field(raw, field, deepcopy(value), where=f"{where}: {field}")
            measures = group.get("measures", "speed")
            cells.append(_cell(name, labels, raw, measures, min(3, rounds) if quick else rounds, where=where))
    return cells


def _points(axis: str, points: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not points or not isinstance(points, (dict, list)):
        raise ValueError(f"{where}: axes.{axis} is {points!r}; list values, or points with a name")
    yield from points.items() if isinstance(points, dict) else ((_label(value), {axis: value}) for value in points)


def _label(value: Any) -> str:
    return "-".join(map(_label, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _cell(group: str, labels: dict[str, str], raw: dict[str, Any], measures: str, rounds: int, *, where: str) -> Cell:
    data = raw.pop("data", {})
    train = raw.get("train", {})
    if "run" in raw:
        raise ValueError(f"{where}: run is given; a study chooses the folders of its runs itself")
    for name in ("max_steps", "epochs"):
        if measures == "speed" and train.get(name) is not None:
            raise ValueError(f"{where}: train.{name} is given; a cell that measures speed ends after its rounds")
    ranks, transport = raw.pop("ranks", 1), raw.pop("transport", "gloo")
    if type(ranks) is not int or not 1 <= ranks <= 64 or transport not in ("gloo", "mpi"):
        raise ValueError(f"{where}: ranks is {ranks!r} over {transport!r}; allowed are 1 to 64, over gloo or mpi")
    kind: TypeAdapter[Any] = TypeAdapter(RealRows if "file" in data else SyntheticRows)
    rows = checked(kind, data, where=f"{where}: data", cure="benchmarks/study/rows.py describes the fields")
    cell = Cell(group, labels, raw, rows, measures, rounds, ranks, transport)
    try:
        cell.resolved(data="-", tables_bytes=1 << 40)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return cell
