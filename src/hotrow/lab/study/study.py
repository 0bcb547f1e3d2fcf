"""What a study measures: the YAML file as a record, and the cells that it expands into.

    title: How many dense features?
    asks: What does a dense feature cost?
    base:                                  # a recipe; `data` describes synthetic rows, or names real ones
      data: {tables: 8, rows: 100000}
      train: {batch_size: 512}
    groups:
      dense:
        axes:
          data.dense: [16, 64, 256]        # a field, as in --set, and its values
          mlp:                             # or points with a name, each of several fields
            narrow: {model.bottom_mlp: [64], model.top_mlp: [64]}
            wide: {model.bottom_mlp: [512, 256], model.top_mlp: [512, 256]}

Beside fields of a config and of `data`, `ranks` says how many processes train, `transport` over what they exchange
messages (gloo or mpi), and `batch_per_rank` the samples of each.

A group may instead, or besides, draw random models; every draw then meets every point of the axes. Sizes of
`memory.dram` and `memory.file_bytes` may be shares of the tables with their optimizer state: "25%".
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, JsonValue, Tag, TypeAdapter
from pydantic.dataclasses import dataclass as record

from hotrow.base.files import check_name
from hotrow.base.records import STRICT, Amount, checked
from hotrow.config.load import make_config, read_config, set_field
from hotrow.config.schema import Config
from hotrow.lab.study.data import RealRows, SyntheticRows
from hotrow.parallel.ranks import TransportName

STUDIES = Path(__file__).with_name("studies")
"""The folder of the studies that come with hotrow."""
_CURE = "docs/study.md describes the file"
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_MAX_CELLS = 10_000
_MAX_RANKS = 100_000
MODELLED = ("scaling", "nodes")
"""What `measures` says of groups whose cells are not run."""
Positive = Annotated[int, Field(ge=1, le=1_000_000)]
Fields = dict[str, JsonValue]
"""Values by dotted names of fields."""


def _form(value: Any) -> str:
    return "values" if isinstance(value, list) else "points"


@record(frozen=True, config=STRICT)
class Range:
    """Numbers to draw from: whole ones, if both ends are whole."""

    low: Amount | int
    high: Amount | int
    scale: Literal["linear", "log"] = "log"

    def __post_init__(self) -> None:
        if self.low > self.high or (self.scale == "log" and self.low <= 0):
            raise ValueError(f"low is {self.low} and high is {self.high}; low must not exceed high, nor be 0 if log")

    def draw(self, generator: random.Random) -> float:
        """Returns a number of the range, in four digits if it is not whole."""
        share = generator.random()
        if self.scale == "log":
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return min(self.high, max(self.low, round(value))) if whole else float(f"{value:.4g}")


@record(frozen=True, config=STRICT, kw_only=True)
class Draw:
    """Random models."""

    models: Positive
    seed: Annotated[int, Field(ge=0)] = 1
    datasets: Positive | None = None
    """How many different data the models share; if None, each model has its own."""
    fields: dict[
        str,
        Annotated[
            Annotated[list[JsonValue], Field(min_length=1), Tag("values")] | Annotated[Range, Tag("points")],
            Discriminator(_form),
        ],
    ]
    """Values to choose from, or a range, by dotted name of a field."""

    def model(self, number: int) -> Fields:
        """Returns the fields of a model: each a function of the seed, the model's number and the field's name alone."""
        drawn: Fields = {}
        for name, values in self.fields.items():
            own = number % self.datasets if self.datasets and name.startswith("data.") else number
            generator = random.Random(f"{self.seed}/{own}/{name}")
            drawn[name] = values.draw(generator) if isinstance(values, Range) else generator.choice(values)
        return drawn


@record(frozen=True, config=STRICT, kw_only=True)
class Group:
    """Cells that are shown together."""

    asks: str = ""
    base: Fields = field(default_factory=dict)
    """Fields that differ from the study's base, by dotted name."""
    axes: dict[
        str,
        Annotated[
            Annotated[list[JsonValue], Tag("values")] | Annotated[dict[str, Fields], Tag("points")],
            Discriminator(_form),
        ],
    ] = field(default_factory=dict)
    draw: Draw | None = None
    measures: Literal["speed", "quality", "scaling", "nodes"] = "speed"
    """Whether cells are timed over some passes, or trained to their end and scored; or modelled alone: the step of many
    ranks, or how many machines are needed."""

    def __post_init__(self) -> None:
        for name, points in self.axes.items():
            if not points:
                raise ValueError(f"axes.{name} has no values; list at least one, or remove the axis")
        if not self.axes and self.draw is None:
            raise ValueError("it has neither axes nor draw, so there is nothing to vary")


@record(frozen=True, config=STRICT, kw_only=True)
class Study:
    """A whole study."""

    title: str
    asks: str
    base: dict[str, JsonValue] = field(default_factory=dict)
    groups: Annotated[dict[str, Group], Field(min_length=1)]
    rounds: Positive = 9
    """Passes over the data that a figure is made of, if the machine is quiet."""
    keep: Literal["figures", "runs"] = "figures"
    """What stays of a measured cell: its row; or the folder of its run too, without checkpoints, as `hotrow report` and
    `hotrow inspect` read it."""
    predicts: bool = False
    """Whether the step time of every cell is predicted, and written to disk, before the first is measured."""
    machines: list[str] = field(default_factory=list)
    """Declared machines for which every cell is modelled; if some groups are modelled alone, they are for these."""

    @property
    def models_alone(self) -> bool:
        """Whether some cells are not run: then the machines are for these."""
        return any(group.measures in MODELLED for group in self.groups.values())


@record(frozen=True, config=STRICT)
class Cell:
    """One training to measure."""

    group: str
    labels: dict[str, str]
    """Where on each axis it lies."""
    config: dict[str, JsonValue]
    """A recipe without `data`."""
    data: SyntheticRows | RealRows
    measures: str = "speed"
    rounds: int = 9
    ranks: int = 1
    """Processes that train together."""
    batch_per_rank: int | None = None
    """Samples of each rank, if their number grows with the ranks."""
    transport: TransportName = "gloo"
    """Over which the ranks exchange messages."""

    @property
    def is_modelled(self) -> bool:
        """Whether nothing is measured."""
        return self.measures in MODELLED

    @property
    def key(self) -> str:
        """Identifies the cell: its place on the axes, and a hash of all that its figure depends on."""
        return f"{self.name}#{self.fingerprint()}"

    @property
    def name(self) -> str:
        """The cell's place on the axes."""
        return "/".join([self.group, *(f"{axis}={label}" for axis, label in self.labels.items())])

    def fingerprint(self) -> str:
        """Returns what changes if anything changes that the cell's figure depends on."""
        fields = asdict(self)
        usual = {"ranks": 1, "batch_per_rank": None, "transport": "gloo", "sizes": None, "generated": 0}
        usual["buckets"] = 1024
        for own in (fields, fields["data"]):  # cells keep the keys that they had before there were such fields
            for name in usual.keys() & own.keys():
                if own[name] == usual[name]:
                    del own[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]

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


def find_study(name: str) -> Path:
    """Returns the file of a study by its name, or the path itself. Raises ValueError naming the studies there are."""
    known = {path.stem: path for path in sorted(STUDIES.glob("*.yaml"))}
    if name in known:
        return known[name]
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    raise ValueError(f"there is no study {name!r}; choose one of {', '.join(known)}, or the path of a YAML file")


def read_study(path: Path) -> Study:
    """Returns the study in a YAML file. Raises ValueError naming file and field."""
    raw = read_config(path, what="study", example="docs/study.md describes", field="title: How wide?")
    study: Study = checked(TypeAdapter(Study), raw, where=f"study {path}", cure=_CURE)
    for name in study.groups:
        check_name(name, what=f"study {path}: group")
    return study


def expand(study: Study, *, origin: str, quick: bool = False) -> list[Cell]:
    """Returns the cells of all groups. quick: only the ends of every axis, few draws and few rounds.

    Raises ValueError naming `origin`, group and field for a field that does not exist or may not have its value.
    """
    cells: list[Cell] = []
    for name, group in study.groups.items():
        where = f"study {origin}: groups.{name}"
        num_cells = math.prod(len(points) for points in group.axes.values()) * (group.draw.models if group.draw else 1)
        if num_cells > _MAX_CELLS:
            raise ValueError(f"{where}: it has {num_cells:,} cells; at most {_MAX_CELLS:,} are allowed")
        axes = {axis: list(_points(axis, points)) for axis, points in group.axes.items()}
        if quick:
            axes = {axis: [points[0], points[-1]][: len(points)] for axis, points in axes.items()}
        for drawn in _draws(group.draw, quick=quick):
            for chosen in itertools.product(*axes.values()):
                labels = {axis: label for axis, (label, _) in zip(axes, chosen, strict=True)}
                raw = deepcopy(study.base)
                for fields in (group.base, drawn[1], *(fields for _, fields in chosen)):
                    for field_name, value in fields.items():
                        set_field(raw, field_name, deepcopy(value), where=f"{where}: {field_name}")
                rounds = min(3, study.rounds) if quick else study.rounds
                cells.append(_cell(name, {**drawn[0], **labels}, raw, group.measures, rounds, where=where))
    repeated = [cell.name for cell in cells]
    if len(set(repeated)) < len(repeated):
        twice = next(key for key in repeated if repeated.count(key) > 1)
        raise ValueError(f"study {origin}: the cell {twice} is there twice; an axis repeats a value")
    return cells


def _draws(draw: Draw | None, *, quick: bool) -> Iterator[tuple[dict[str, str], Fields]]:
    if draw is None:
        yield {}, {}
        return
    for number in range(min(draw.models, 3) if quick else draw.models):
        yield {"model": str(number)}, draw.model(number)


def _points(axis: str, points: Sequence[JsonValue] | Mapping[str, Fields]) -> Iterator[tuple[str, Fields]]:
    if isinstance(points, Mapping):
        yield from points.items()
    else:
        for value in points:
            yield label_of(value), {axis: value}


def label_of(value: JsonValue) -> str:
    """Returns a value in the words of a table."""
    if isinstance(value, list):
        return "-".join(map(label_of, value))
    if isinstance(value, dict):
        return " ".join(f"{name} {label_of(inner)}" for name, inner in value.items())
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _cell(group: str, labels: dict[str, str], raw: dict[str, Any], measures: str, rounds: int, *, where: str) -> Cell:
    data = raw.pop("data", {})
    if not isinstance(data, dict):
        raise ValueError(f"{where}: data is {data!r}; it must be a mapping such as tables: 8")
    if "run" in raw:
        raise ValueError(f"{where}: run is given; a study chooses the folders of its runs itself")
    train = raw.get("train")
    for name in ("max_steps", "epochs"):
        if measures == "speed" and isinstance(train, dict) and train.get(name) is not None:
            raise ValueError(
                f"{where}: train.{name} is {train[name]!r}; a cell that measures speed ends after its rounds: "
                "remove it, or set measures: quality"
            )
    kind: TypeAdapter[Any] = TypeAdapter(RealRows if "file" in data else SyntheticRows)
    rows = checked(kind, data, where=f"{where}: data", cure=_CURE)
    cell = Cell(group, labels, raw, rows, measures, rounds, **_ranks_of(raw, where))
    if cell.is_modelled and not isinstance(rows, SyntheticRows):
        raise ValueError(f"{where}: measures is {measures}, which needs rows that are drawn: remove data.file")
    try:
        cell.resolved(data="-", tables_bytes=1 << 40)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return cell


_OF_RANKS: dict[str, Any] = {"ranks": 1, "batch_per_rank": None, "transport": "gloo"}


def _ranks_of(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of a cell about its ranks, which no config has, and sets the batch that they ask for."""
    ranks, each, transport = (raw.pop(name, usual) for name, usual in _OF_RANKS.items())
    for name, value in {"ranks": ranks, "batch_per_rank": each}.items():
        if value is not None and (type(value) is not int or not 1 <= value <= _MAX_RANKS):
            raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number from 1 to {_MAX_RANKS:,}")
    if transport not in get_args(TransportName):
        raise ValueError(f"{where}: transport is {transport!r}; choose one of {', '.join(get_args(TransportName))}")
    if each is not None:
        raw.setdefault("train", {})["batch_size"] = each * ranks
    return {"ranks": ranks, "batch_per_rank": each, "transport": transport}
