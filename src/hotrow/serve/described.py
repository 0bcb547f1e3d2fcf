"""What export.json says, as the objects that preparation, prediction and training have of the same.

Nothing of an export is run: its score.py, model.py and transforms/ are for readers and other systems. Rows are read by
the schema, transforms and statistics of preparation, and the network is the one that trained.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from hotrow.base.records import describe
from hotrow.data.cells import IdEncoding
from hotrow.data.prepare.prepare import Encoder
from hotrow.data.prepare.statistics import Statistics
from hotrow.data.seen import Seen
from hotrow.data.sources.schema import Schema, parse_schema
from hotrow.data.transforms import Transform
from hotrow.export.export import EXPORT, STATISTICS, Description
from hotrow.kernels import ops
from hotrow.models import MODELS
from hotrow.models.layers import Network
from hotrow.objectives.calibration import calibrated
from hotrow.objectives.objective import Objective
from hotrow.objectives.several import for_labels
from hotrow.serve.vocabularies import open_vocabulary
from hotrow.tables import TableConfig

CURE = "export the run again"
_ERRORS = (
    *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, MemoryError, OSError),
    *(SafetensorError, struct.error),
)
_OF_DENSE = ("name", "transform", "missing", "written")
"""Fields of a dense column besides the options of its transform."""


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Makes an error of a field that is absent, or of another form, one that names export.json and the cure."""
    try:
        yield
    except _ERRORS as error:
        of_machine = isinstance(error, OSError) and error.errno is not None  # Arrow's of damaged bytes have no number
        if of_machine or (isinstance(error, ValueError) and str(path) in str(error)):
            raise
        # An older native module, whose functions take other arguments, fails alike.
        cure = CURE + ops.rebuild() if isinstance(error, TypeError | AttributeError) else CURE
        said = describe(error) if isinstance(error, ValidationError) else " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path / EXPORT} does not describe a model that can be scored ({type(error).__name__}: {said}); {cure}"
        ) from None


def encoder_of(export: Path, about: Description, work: Path) -> Encoder:
    """The encoder of an export. work: where vocabularies are kept.

    Raises ValueError, which names the file, if ids are row numbers already, or if something does not fit.
    """
    for own in about.tables:
        about.files[str(own["file"])]  # so it is a file of the export, and lies in its folder
    if any(table["vocabulary"] is None for table in about.tables) or any("keys" not in own for own in about.features):
        raise ValueError(
            f"{export}: its model was trained on row numbers, not on raw ids, so there are no raw rows to score; give "
            "row numbers to its own score.py"
        )
    schema, encodings = schema_of(export, about), dict(_encodings(about))
    tables: Any = about.tables
    vocabularies = {
        own["name"]: open_vocabulary(export, about, own, encodings[own["features"][0]], work) for own in tables
    }
    statistics = Statistics.load(schema, export / STATISTICS, cure=CURE) if about.statistics else None
    if statistics is not None and any(own["bits"] != statistics.bits for own in about.statistics):
        raise ValueError(f"{export / EXPORT}: statistics.bits are not those of this hotrow; {CURE}")
    transforms = [_transform(own) for own in about.dense]
    transforms += [Transform("identity")] * (len(schema.dense_inputs) - len(transforms))
    return Encoder("frame", schema, encodings, transforms, statistics, vocabularies, threads=1)


def schema_of(export: Path, about: Description) -> Schema:
    """Returns the schema of raw rows, with what scoring needs of it. Raises ValueError, which names the field."""
    dense: Any = about.dense
    value: dict[str, Any] = {
        "label": [{"column": name} for name in about.labels or (f"label of {about.run}",)],
        "dense": [{"column": own["name"], **own.get("written", {})} for own in dense],
        "categorical": [
            {
                **{"column": own["name"], "kind": own["kind"], "table": own["table"]},
                **{name: own[name] for name in ("separator", "buckets") if own.get(name) is not None},
            }
            for own in about.features
        ],
        "transforms": [_computed(own) for own in about.transforms],
        "statistics": [
            {"columns": own["features"], "priors": own["priors"], "count": own.get("count", False)}
            for own in about.statistics
        ],
        "csv": {"null_values": list(about.missing)},
    }
    return parse_schema(value, where=str(export / EXPORT))


def _computed(own: Mapping[str, Any]) -> dict[str, Any]:
    columns = [column["name"] for column in own["columns"]]
    return {str(own["transform"]): {**own["options"], "columns": columns, "into": own["into"]}}


def _transform(own: Mapping[str, Any]) -> Transform:
    return Transform(own["transform"], {name: value for name, value in own.items() if name not in _OF_DENSE})


def _encodings(about: Description) -> Iterator[tuple[str, IdEncoding]]:
    """Yields how ids of each column are held."""
    taken: list[Any] = [column for own in about.transforms for column in own["columns"]]  # type: ignore[union-attr]
    for own in (*about.features, *taken):
        if "keys" in own:
            yield own["name"], own["keys"]


def tables_of(about: Description) -> list[TableConfig]:
    """Returns the tables, whose weights are float32 in an export."""
    fields = ("name", "num_embeddings", "embedding_dim", "pooling")
    own: list[dict[str, Any]] = list(about.tables)
    return [TableConfig(**{name: each[name] for name in fields}, feature_names=tuple(each["features"])) for each in own]


def network_of(about: Description) -> tuple[Network, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the network before its weights are loaded, and the function that makes scores of its outputs."""
    options: dict[str, Any] = dict(about.model)
    num_dense = options.pop("num_dense")
    spec = MODELS[options["name"]].model_validate_json(json.dumps(options))
    dims = {str(own["name"]): own["embedding_dim"] for own in about.tables}
    more = {"num_outputs": len(about.labels)} if len(about.labels) > 1 else {}
    network = spec.build(
        num_dense=num_dense,
        dims={str(own["name"]): dims[str(own["table"])] for own in about.features},  # type: ignore[misc]
        generator=torch.Generator(),
        **more,
    )
    return network, partial(_scores, for_labels(spec.trained_for, about.labels), about.calibration)


def _scores(objective: Objective, layers: tuple[Any, ...], outputs: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        outputs = calibrated(outputs, **layer)
    return objective.scores(outputs)


def seen_of(about: Description) -> Seen:
    """Returns counters that know what rows held that validated the model."""
    usual: Any = about.usual or {"of": "val", "columns": None, "ranges": {}}
    ranges = {name: (float(low), float(high)) for name, (low, high) in usual["ranges"].items()}
    return Seen(usual["columns"], ranges, of=usual["of"])
