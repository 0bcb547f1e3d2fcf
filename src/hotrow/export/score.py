"""Scores raw rows with an exported model: torch, safetensors, pyarrow and numpy, without hotrow.

    Scorer("FOLDER").score({"price": [1.5, None], "item": ["i7", None], "seen": [["i1", "i7"], []]})   # in Python
    python FOLDER/score.py ROWS.csv                        # prints one score per row; ROWS.parquet and ROWS.jsonl too

FOLDER is what `hotrow export` wrote, and this file is its score.py: how rows of tables become scores. inputs.py beside
it makes inputs of raw values, and model.py is the network. All are meant to be read and to be taken over into other
systems. They read export.json, the weights and the vocabularies, and nothing else, and hold whole tables and
vocabularies in memory.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

_found = importlib.util.spec_from_file_location("inputs", Path(__file__).with_name("inputs.py"))
assert _found is not None and _found.loader is not None
inputs: Any = importlib.util.module_from_spec(_found)
_found.loader.exec_module(inputs)  # by its path, since several exports may be loaded side by side

STORED = {"float32": (torch.float32, 0), "bf16": (torch.bfloat16, 0), "int8": (torch.uint8, 8)}
"""By `stored_as` of a table: the type of its tensor, and how many columns this has besides those of the table."""


class Scorer:
    """The model in `folder`. read: makes its inputs of raw values. bags: an nn.EmbeddingBag per table. model: the
    network on their rows. scores: the function that makes scores of its outputs."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.read = inputs.Inputs(folder)
        self.about = self.read.about
        self.bags: dict[str, nn.EmbeddingBag] = {}
        for name, table in self.read.tables.items():
            weight = rows_of(folder / table["file"], table)
            self.bags[name] = nn.EmbeddingBag.from_pretrained(weight, mode=table["pooling"], include_last_offset=True)
        definition = inputs.load_module(folder / "model.py")
        self.model, self.scores = build_network(definition, self.about), definition.scores
        self._calibrated = definition.calibrated
        self.model.load_state_dict(load_file(folder / "model.safetensors"))

    @property
    def columns(self) -> list[str]:
        """Names of the raw columns that a score is made of."""
        found: list[str] = self.read.columns
        return found

    @property
    def seen(self) -> Any:
        """Counts of what the latest scored rows held, by column; see seen.py."""
        return self.read.seen

    @torch.no_grad()
    def score(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """Returns the score of each row, [B], or [B, L] if export.json has L `labels`; README.md says what it is.

        columns: raw values by name, None for a missing one; `Inputs.of` says what is warned of and refused.
        """
        outputs = self.model(*self.inputs(columns))
        for layer in self.about.get("calibration", ()):
            outputs = self._calibrated(outputs, **layer)
        scores: Tensor = self.scores(outputs)
        return scores

    @torch.no_grad()
    def inputs(self, columns: Mapping[str, Sequence[Any]]) -> tuple[Tensor, Any]:
        """Returns the dense inputs of each row [B, I], and its rows of the tables, pooled [B, sum of D]. A network that
        takes every id's row gets ([all, D], offsets) by feature instead. columns: as for `score`."""
        dense, numbers = self.read.of(columns)
        rows = {name: [torch.from_numpy(each) for each in both] for name, both in numbers.items()}
        bags = {feature["name"]: self.bags[feature["table"]] for feature in self.about["features"]}
        if self.model.lookup == "sequence":
            return torch.from_numpy(dense), {name: (bags[name].weight[ids], at) for name, (ids, at) in rows.items()}
        return torch.from_numpy(dense), torch.cat(
            [bags[name](ids, offsets) for name, (ids, offsets) in rows.items()], 1
        )


def rows_of(path: Path, table: dict[str, Any]) -> Tensor:
    """Returns the rows of a table, float32 [num_embeddings, embedding_dim]. Raises ValueError if its file holds another
    tensor than export.json says."""
    stored = load_file(path)[table["tensor"]]
    dtype, more = STORED[table["stored_as"]]
    wanted = [table["num_embeddings"], table["embedding_dim"] + more]
    if (stored.dtype, [*stored.shape]) != (dtype, wanted):
        found = f"{stored.dtype} {[*stored.shape]}"
        raise ValueError(f"{path} holds {found}, but export.json says {dtype} {wanted}; export the run again")
    return looked_up(stored)


def looked_up(stored: Tensor) -> Tensor:
    """Returns stored rows in float32, [N, D]. Rows of bytes [N, D + 8] are D bytes q, then the step and the least
    number of the row, both float32: q * step + least."""
    if stored.dtype != torch.uint8:
        return stored.float()
    ends = stored[:, -8:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned to 4 bytes
    return stored[:, :-8] * ends[:, :1] + ends[:, 1:]


def build_network(module: Any, about: dict[str, Any]) -> nn.Module:
    """Returns the network that model.py, loaded as `module`, defines, before weights are loaded."""
    (options,) = module.ModelSpec.__subclasses__()
    dims = {table["name"]: table["embedding_dim"] for table in about["tables"]}
    more = {"num_outputs": len(about["labels"])} if len(about.get("labels", [])) > 1 else {}
    more |= {"edges": edges} if (edges := about["model"].get("edges")) else {}
    network: nn.Module = options(**about["model"]).build(
        num_dense=about["model"]["num_dense"],
        dims={feature["name"]: dims[feature["table"]] for feature in about["features"]},
        generator=torch.Generator(),
        **more,
    )
    return network


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python score.py ROWS, a file of CSV, Parquet or JSON")
    try:
        scorer = Scorer(Path(__file__).parent)
        scores = scorer.score(inputs.read_columns(Path(sys.argv[1]), scorer.columns))
    except (ValueError, OSError) as error:
        sys.exit(f"score.py: {error}")
    print(*scores.tolist(), sep="\n")
