"""dense.onnx: what an export computes from looked-up rows, up to scores, for servers that run ONNX.

| input | what |
|---|---|
| `dense` [batch, I] | dense inputs after their transforms, then the statistics; not there if the model has none |
| `rows` [batch, sum of D] | pooled rows of all features, side by side in the order of export.json |
| `X.rows` [ids, D], `X.offsets` [batch + 1] | in place of `rows` if the model takes every id's row: of each feature X |

The output `scores` is [batch], or [batch, labels] for several labels. It is made of the export's own model.py, weights
and calibration.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hotrow.base.files import atomic_write
from hotrow.export.inputs import load_module
from hotrow.export.score import build_network

DENSE = "dense.onnx"
PACKAGES = ("onnx", "onnxscript")


def check_packages() -> None:
    """Raises ValueError if a package that writes ONNX is missing."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f"ONNX needs {' and '.join(missing)}: pip install 'hotrow[onnx]', or export without --onnx")


def write_dense(path: Path, about: dict[str, Any], *, network: Path, weights: Path) -> None:
    """Writes the network of an export, whose export.json is `about`, as ONNX. network, weights: its model.py and
    model.safetensors.

    The bytes depend on these alone, not on the machine. Raises ValueError, which names the model, if it has an
    operation that cannot be written as ONNX.
    """
    definition = load_module(network)
    definition.len = _length  # Python's own makes an int of the batch's size, which would then be fixed
    module = _Scores(definition, about)
    module.network.load_state_dict(load_file(weights))
    inputs, aten = module.examples(), torch.ops.aten
    try:
        with _quiet():
            program = torch.onnx.export(
                module.eval(),
                tuple(example for example, _ in inputs.values()),
                input_names=[*inputs],
                output_names=["scores"],
                dynamic_shapes=(tuple({0: axis} for _, axis in inputs.values()),),
                custom_translation_table={aten.searchsorted.Tensor: _searchsorted, aten.squeeze.dim: _squeeze},
                verbose=False,
            )
    except RuntimeError as error:
        name, reason = about["model"]["name"], str(error.__cause__ or error).strip().splitlines()[0]
        raise ValueError(f"model {name} cannot be written as ONNX: {reason}; export it without --onnx") from error
    assert program is not None
    proto = program.model_proto
    graph = proto.graph
    for each in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        each.ClearField("metadata_props")  # paths and lines of source files
        each.ClearField("doc_string")
    with atomic_write(path) as file:
        file.write(proto.SerializeToString(deterministic=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """A block in which torch's exporter does not say what it does without, and what it will change one day."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Scores(nn.Module):
    """Inputs, in the order of `examples`, to the scores of an export."""

    def __init__(self, definition: Any, about: dict[str, Any]) -> None:
        super().__init__()
        self.network, self._definition = build_network(definition, about), definition
        self._calibration, self._num_dense = about["calibration"], about["model"]["num_dense"]
        dims = {table["name"]: table["embedding_dim"] for table in about["tables"]}
        self._dims = {feature["name"]: dims[feature["table"]] for feature in about["features"]}
        self._single = {feature["name"] for feature in about["features"] if feature["kind"] == "one_hot"}

    def examples(self) -> dict[str, tuple[Tensor, str]]:
        """Returns the inputs of five samples by name, each with the name of its first axis. Their values do not
        matter."""
        found = {"dense": (torch.zeros(5, self._num_dense), "batch")} if self._num_dense else {}
        if self.network.lookup == "pooled":
            return found | {"rows": (torch.zeros(5, sum(self._dims.values())), "batch")}
        for name, dim in self._dims.items():
            num_ids, axis = (5, "batch") if name in self._single else (7, f"{name}.ids")
            found[f"{name}.rows"] = torch.zeros(num_ids, dim), axis
            found[f"{name}.offsets"] = torch.zeros(6, dtype=torch.int64), "batch + 1"
        return found

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the scores, [B] or [B, L]."""
        taken, is_pooled = iter(inputs), self.network.lookup == "pooled"
        dense = next(taken) if self._num_dense else torch.zeros(inputs[-1].shape[0] - (not is_pooled), 0)
        rows: Any = inputs[-1] if is_pooled else dict(zip(self._dims, zip(taken, taken, strict=True), strict=True))
        outputs = self.network(dense, rows)
        for layer in self._calibration:
            outputs = self._definition.calibrated(outputs, **layer)
        scores: Tensor = self._definition.scores(outputs)
        return scores


def _length(of: Any) -> Any:
    """Returns the number of rows of a tensor, which may be a symbol, and of anything else what `len` does."""
    return of.shape[0] if isinstance(of, Tensor) else len(of)


# What torch's exporter does not know, or knows wrongly.


def _searchsorted(rising: Any, values: Any, *, right: bool = False, **_: Any) -> Any:
    """Returns how many of the rising numbers are at most each value."""
    assert right, "so `calibrated` calls it"
    op: Any = import_module("onnxscript").opset18
    is_below = op.LessOrEqual(rising, op.Unsqueeze(values, op.Constant(value_ints=[-1])))
    return op.ReduceSum(op.Cast(is_below, to=7), op.Constant(value_ints=[-1]), keepdims=0)  # 7: int64


def _squeeze(x: Any, dim: int) -> Any:
    """Returns x without the axis `dim` if it has one element there, else x; torch's exporter would drop any."""
    op: Any = import_module("onnxscript").opset18
    return op.Squeeze(x, op.Constant(value_ints=[dim])) if x.shape[dim] == 1 else op.Identity(x)
