"""What a model is to the rest of hotrow: a `ModelSpec`, the `model` section of a config, which checks data and builds.

A new model is one file beside this one with a subclass of `ModelSpec` and a subclass of `Network`, and one entry in
`hotrow.models.MODELS`. The config's union, its error messages, docs/config.md, training, plans and exports follow from
these. A model's file imports torch, this module and layers.py alone: an export copies it, and puts export/plain.py in
place of the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from torch import Tensor

from hotrow.base.records import SECTION, nearest
from hotrow.models.layers import Network
from hotrow.objectives import DEFAULT as DEFAULT_OBJECTIVE
from hotrow.objectives import OBJECTIVES
from hotrow.objectives.objective import Objective
from hotrow.tables import Dtype, Pooling, TableConfig

Width = Annotated[int, Field(ge=1, le=65536)]
Steps = Annotated[int, Field(ge=1, le=1024)]
InitBound = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Members = Annotated[int, Field(ge=1, le=64)]
DropoutShare = Annotated[float, Field(ge=0, lt=1)]
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Edges = Sequence[Sequence[float]]
"""Of each dense column rising numbers, each two of which are the ends of a piece; none if it has no pieces."""
Features = Annotated[list[str], Field(min_length=1)]
DEFAULT = "default"
HISTORY = "_history"
"""Feature `X_history` holds the earlier ids of feature `X`."""


_MEANINGS = (f"`{name}`: {str(inspect.getdoc(objective)).splitlines()[0]}" for name, objective in OBJECTIVES.items())
if TYPE_CHECKING:
    ObjectiveName = str
else:
    ObjectiveName = Annotated[
        Literal[tuple(OBJECTIVES)],
        Field(description=" ".join(["What the network is trained for, and judged by.", *_MEANINGS])),
    ]


def _is_mapping(value: Any) -> str:
    return "by table" if isinstance(value, Mapping) else "number"


EmbeddingDim = Annotated[
    Annotated[Width, Tag("number")] | Annotated[dict[str, Width], Tag("by table")], Discriminator(_is_mapping)
]


class SampleError(ValueError):
    """A sample of a batch that the model cannot take. sample: its position in the batch, from 0."""

    def __init__(self, sample: int, feature: str, reason: str) -> None:
        super().__init__(f"{feature}, sample {sample} of the batch: {reason}")
        self.sample, self.feature, self.reason = sample, feature, reason


class Dataset(Protocol):
    """What a model may ask of a packed dataset."""

    path: Path
    info: Any

    @property
    def splits(self) -> Mapping[str, Any]:
        """The rows, by the name of their split."""

    def table_configs(self, embedding_dim: Mapping[str, int]) -> tuple[TableConfig, ...]:
        """The tables, with the given number of columns each."""

    def list_lengths(self, features: Iterable[str]) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """For each block of rows: its split, its first row there, and the number of ids of each row by feature."""


class ModelSpec(BaseModel):
    """The options of a model."""

    model_config = SECTION

    network: ClassVar[type[Network]]
    """What `build` returns. Its `lookup` says how the model takes the rows of a batch."""
    equal_dims: ClassVar[bool] = False
    """Whether the rows of all tables must have the same number of columns."""
    pooling: ClassVar[Pooling] = "sum"
    """How the rows of several ids become one."""
    small: ClassVar[Mapping[str, Any]] = {}
    """Options for data of few rows; for more rows the automatic recipe states their defaults."""

    name: str
    """The network."""
    embedding_dim: EmbeddingDim = 16
    """Columns D of every table: one number, or numbers by table such as `{default: 16, user: 8}`. `default` stands for
    all tables that are not named, one that is called so included."""
    embedding_init: InitBound | None = None
    """Initial rows are uniform between minus and plus this number. null means sqrt(1 / rows of the table), as in the
    reference DLRM. With 0 they start at zero, which is better on small data: an id then has no effect until it has been
    seen in training."""

    objective: ObjectiveName = DEFAULT_OBJECTIVE

    @model_validator(mode="after")
    def _options_agree(self) -> ModelSpec:
        if not self.fits(self.objective):
            others = " or ".join(name for name in OBJECTIVES if self.fits(name))
            raise ValueError(
                f"objective is {self.objective}, which model {self.name} cannot be trained for: set it to {others}"
            )
        self.check_options()
        return self

    @classmethod
    def fits(cls, objective: str) -> bool:
        """Returns whether what the network returns is what `objective` takes."""
        return OBJECTIVES[objective].retrieves == cls.network.retrieves

    def check_options(self) -> None:
        """Raises ValueError if options contradict each other."""

    @property
    def trained_for(self) -> Objective:
        """The loss, metrics and scores that `objective` names."""
        return OBJECTIVES[self.objective]

    def check(self, dataset: Dataset) -> None:
        """Raises ValueError, before a run has a folder, if the model cannot be trained on `dataset`."""
        self._check_labels(dataset)
        _check_weights(dataset)
        dims = self.dims_of(dataset)
        if self.equal_dims and len(set(dims.values())) > 1:
            listed = ", ".join(f"{name} {dim}" for name, dim in dims.items())
            raise ValueError(
                f"model.embedding_dim gives tables different numbers of columns ({listed}), but {self.name} multiplies "
                "rows of all tables with each other: set it to one number, or choose a model that takes any"
            )

    def _check_labels(self, dataset: Dataset) -> None:
        labels = dataset.info.labels
        if len(labels) > 1 and "num_outputs" not in inspect.signature(self.build).parameters:
            names = ", ".join(label.name for label in labels)
            raise ValueError(
                f"{dataset.path} has the labels {names}, but model {self.name} predicts one: choose another model, or "
                "prepare the data with one label"
            )
        numbers = [label for label in labels if label.kind == "number"]
        if self.trained_for.label == "binary" and numbers:
            others = [name for name, objective in OBJECTIVES.items() if objective.label == "number"]
            raise ValueError(
                f"label {numbers[0].name!r} of {dataset.path} is any number, but model.objective {self.objective} "
                f"takes 0 or 1: set model.objective to {' or '.join(others)}"
            )

    def build(self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator) -> Network:
        """Returns the network: (dense [B, num_dense], rows of the tables) -> logits [B].

        A model for datasets of several labels has one more argument, `num_outputs: int = 1`: the number L of labels. If
        it is above 1, the network returns logits [B, L]. A model that cuts numbers into pieces has `edges: Edges = ()`.

        dims: columns of the rows of each feature, features in the order of the collection. generator: the CPU generator
        from which all weights are drawn.
        """
        raise NotImplementedError

    def build_for(self, info: Any, *, dims: Mapping[str, int], generator: torch.Generator) -> Network:
        """Returns the network for the rows of a dataset, with an output for each label. info: its dataset.json."""
        more: dict[str, Any] = {"num_outputs": len(info.labels)} if len(info.labels) > 1 else {}
        more |= {"edges": edges} if (edges := self.edges_of(info)) else {}
        return self.build(num_dense=len(info.dense), dims=dims, generator=generator, **more)

    def edges_of(self, info: Any) -> list[list[float]]:
        """Returns the argument `edges` of `build`; nothing if it has none."""
        return []

    def tables(self, dataset: Dataset, *, dtype: Dtype = "float32") -> tuple[TableConfig, ...]:
        """Returns the tables of `dataset` as the model needs them."""
        tables = dataset.table_configs(self.dims_of(dataset))
        bound, pooling = self.embedding_init, self.pooling
        return tuple(replace(t, init=replace(t.init, bound=bound), dtype=dtype, pooling=pooling) for t in tables)

    def row_dim(self, embedding_dim: int) -> int:
        """Returns the columns of a table's rows, of which `embedding_dim` are for one network."""
        return embedding_dim

    def dims_of(self, dataset: Dataset) -> dict[str, int]:
        """Returns the columns of each table. Raises ValueError if `embedding_dim` does not fit the tables' names."""
        names = [table.name for table in dataset.info.tables]
        if isinstance(self.embedding_dim, int):
            return dict.fromkeys(names, self.row_dim(self.embedding_dim))
        given = self.embedding_dim
        for name in given:
            if name not in names and name != DEFAULT:
                hint = nearest(name, names) or f"; its tables are {', '.join(names)}"
                raise ValueError(
                    f"model.embedding_dim names table {name!r}, but {dataset.path} has no such table{hint}"
                )
        if DEFAULT not in given and (missing := [name for name in names if name not in given]):
            raise ValueError(
                f"model.embedding_dim has no number for table {missing[0]!r} of {dataset.path}; add it, or "
                f"`{DEFAULT}: 16` for all tables that are not named"
            )
        return {name: self.row_dim(given.get(name, given.get(DEFAULT, 0))) for name in names}


def _check_weights(dataset: Dataset) -> None:
    """Raises ValueError if no row of a split counts. Nearly always the first block of a split has one that does."""
    for name, split in dataset.splits.items():
        weights = (split.block(i).weight for i in range(split.num_blocks if dataset.info.weight else 0))
        if dataset.info.weight and split.num_rows and not any(own.any() for own in weights):
            raise ValueError(
                f"{dataset.path}: the weight {dataset.info.weight!r} is 0 in all {split.num_rows:,} rows of the {name} "
                "split, so none of them counts: correct the column, split otherwise, or leave `weight` out"
            )


class MLPSpec(ModelSpec):
    """The options of a model whose MLPs have hidden layers that see whole samples."""

    dropout: DropoutShare = 0.0
    """Share of the MLPs' hidden units that each sample leaves out in training, another share each time."""


def histories_of(feature_names: Sequence[str], model: str) -> dict[str, str]:
    """Returns by feature X the feature X_history, which holds its earlier ids. Raises ValueError if there is none, or
    if one has no X; the error names `model`."""
    histories = {name.removesuffix(HISTORY): name for name in feature_names if name.endswith(HISTORY)}
    if not histories:
        raise ValueError(
            f"model {model} needs a history, a feature such as 'item{HISTORY}' beside 'item'; the data has "
            f"{', '.join(feature_names)}: examples/histories.py makes one of a log of events"
        )
    for name, history in histories.items():
        if name not in feature_names:
            raise ValueError(
                f"feature {history!r} is the history of {name!r}, which the data lacks; {model} needs both: add "
                f"{name!r} to the schema's categorical"
            )
    return histories
