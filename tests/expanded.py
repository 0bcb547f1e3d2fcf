"""What a checkpoint says, read by the safetensors library and expanded by the readable formulas, whatever its files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hotrow.kernels.reference import uniform_rows
from hotrow.kernels.types import row_key, to_float16


def expanded(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor, `<file>:<name>` as if all tables had been in memory."""
    manifest = json.loads((path / "manifest.json").read_text())
    found: dict[str, Tensor] = {}
    for part, rest in manifest["parts"].items():
        if rest["chains"] is None:
            files = [file for file in manifest["files"] if file.startswith((f"{part}/", f"{part}."))]
            found |= {f"{file}:{name}": tensor for file in files for name, tensor in load_file(path / file).items()}
        for number, (table, chain) in enumerate((rest["chains"] or {}).items()):
            for name, tensor in _table(path / part / table, chain).items():
                at = f"{part}/{table}.safetensors:" if name == "weight" else f"{part}.safetensors:{number}."
                found[at + name] = tensor
    flat = ((name, tensor.reshape(-1).contiguous().view(torch.uint8)) for name, tensor in sorted(found.items()))
    return {name: own.numpy().tobytes() for name, own in flat}


def _table(folder: Path, chain: dict[str, Any]) -> dict[str, Tensor]:
    links = sorted(folder.iterdir())
    assert len(links) == len(chain["links"])
    tensors: dict[str, Tensor] = {}
    for link, num_rows in zip(links, chain["links"], strict=True):
        loaded = load_file(link)
        if chain["initial"] is None:
            assert chain["links"] == [chain["num_rows"]] and all(len(own) == num_rows for own in loaded.values())
            return loaded
        rows = loaded.pop("rows")
        assert rows.dtype == torch.int64 and len(rows) == num_rows and (rows.diff() > 0).all()
        for name, values in loaded.items():
            if name not in tensors:
                tensors[name] = _initial(name, chain, values.shape[1:])
            tensors[name][rows] = values
    return tensors


def _initial(name: str, chain: dict[str, Any], shape: torch.Size) -> Tensor:
    initial, num_rows = chain["initial"], chain["num_rows"]
    if name != "weight" and len(shape) == 0:
        return torch.full((num_rows,), initial["states"][name][0])
    key, rows = row_key(initial["seed"], initial["table"]), torch.arange(num_rows)
    weights = uniform_rows(key, rows, shape[0], initial["bound"], initial["zero_rows"])
    weights = to_float16(weights) if initial["dtype"] == "float16" else weights
    if name == "weight":
        return weights
    constant, of_weight, of_sign = initial["states"][name]
    state = of_weight * weights.float() if of_weight else torch.full(weights.shape, constant)
    return state + of_sign * weights.float().sign() if of_sign else state
