"""An export as the objects that preparation, prediction and training use.

No code of an export is run: its score.py, model.py and transforms/ are for readers and other systems. Rows are read by
the encoder that preparation fitted, and the network is the one that trained.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from hotrow.base.records import describe
from hotrow.data.prepare.prepare import Encoder
from hotrow.data.seen import Seen
from hotrow.export.export import ENCODER, EXPORT, Description
from hotrow.kernels import ops
from hotrow.models import MODELS
from hotrow.models.layers import Network
from hotrow.objectives.calibration import calibrated
from hotrow.objectives.objective import Objective
from hotrow.objectives.several import for_labels
from hotrow.tables import TableConfig

CURE = "export the run again"
_ERRORS = (
    *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, MemoryError, OSError),
    *(SafetensorError, struct.error),
)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turns an error about a field that is absent or malformed into one that names export.json and the cure."""
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


def encoder_of(export: Path, about: Description) -> Encoder:
    """The encoder of an export, whose files were verified. Raises ValueError if ids are row numbers already, or if it
    does not have the model's tables and inputs."""
    for own in about.tables:
        about.files[str(own["file"])]  # so it is a file of the export, and lies in its folder
    if any(table["vocabulary"] is None for table in about.tables):
        raise ValueError(
            f"{export}: its model was trained on row numbers, not on raw ids, so there are no raw rows to score; give "
            "row numbers to its own score.py"
        )
    found = Encoder.load(export / ENCODER, mapped=True)
    sizes = {str(table["name"]): table["num_embeddings"] for table in about.tables}
    if sizes != {name: own.num_embeddings for name, own in found.vocabularies.items()}:
        raise ValueError("its encoder has other tables")
    num_dense, wanted = len(found.schema.dense_inputs), about.model["num_dense"]
    if num_dense != wanted:
        raise ValueError(f"its encoder makes {num_dense} numbers of a row, its model takes {wanted}")
    return replace(found, source="frame", threads=1)


def tables_of(about: Description) -> list[TableConfig]:
    """Returns the tables, whose weights are float32 in an export."""
    fields = ("name", "num_embeddings", "embedding_dim", "pooling")
    own: list[dict[str, Any]] = list(about.tables)
    return [TableConfig(**{name: each[name] for name in fields}, feature_names=tuple(each["features"])) for each in own]


def network_of(about: Description, weights: dict[str, Tensor]) -> tuple[Network, Callable[[Tensor], Tensor], Objective]:
    """Returns the network, the function that calibrates its outputs, and the objective that makes scores of these."""
    options: dict[str, Any] = dict(about.model)
    num_dense, edges = options.pop("num_dense"), options.pop("edges", ())
    spec = MODELS[options["name"]].model_validate_json(json.dumps(options))
    dims = {str(own["name"]): own["embedding_dim"] for own in about.tables}
    more: dict[str, Any] = {"num_outputs": len(about.labels)} if len(about.labels) > 1 else {}
    more |= {"edges": edges} if edges else {}
    build = partial(
        spec.build,
        num_dense=num_dense,
        dims={str(own["name"]): dims[str(own["table"])] for own in about.features},  # type: ignore[misc]
        generator=torch.Generator(),
        **more,
    )
    with torch.device("meta"):  # layers of other shapes are an error before they take memory
        build().load_state_dict(weights, assign=True)
    network = build()
    network.load_state_dict(weights)
    return network, partial(_calibrated, about.calibration), for_labels(spec.trained_for, about.labels)


def _calibrated(layers: tuple[Any, ...], outputs: Tensor) -> Tensor:
    for layer in layers:
        outputs = calibrated(outputs, **layer)
    return outputs


def seen_of(about: Description) -> Seen:
    """Returns counters that know what the model's validation rows held."""
    usual: Any = about.usual or {"of": "val", "columns": None, "ranges": {}}
    ranges = {name: (float(low), float(high)) for name, (low, high) in usual["ranges"].items()}
    return Seen(usual["columns"], ranges, of=usual["of"])
