"""Tables taken over from other libraries: torch.nn.EmbeddingBag and Embedding, and torchrec's collections of them.

Options that hotrow's tables do not have (padding, norms, scaling by frequency, max pooling) are refused by name, never
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotrow.tables import MAX_POOLING, Dtype, Pooling, TableConfig

_DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_WITHOUT = {
    "padding_idx": "leave padding ids out of the bags, which may be of any length: keep = ids != padding_idx, values = "
    "ids[keep], lengths = keep.sum(1), and an empty bag gives zeros",
    "max_norm": "rows are not renormalised when they are looked up; normalise what the lookup gives",
    "scale_grad_by_freq": "a row's gradient is the sum over its occurrences; give ids the weights 1 / count",
}
"""What to do instead of an option that hotrow's tables do not have."""


class Given(NamedTuple):
    """A table of another library."""

    config: TableConfig
    weight: Tensor
    """[N, D] float32, float16 or bfloat16."""
    trained: bool


def from_torch(modules: nn.Module | Mapping[str, nn.Module] | nn.ModuleDict) -> list[Given]:
    """Returns a table for each nn.EmbeddingBag or nn.Embedding, with a feature of its name ("embedding" for one alone).
    Raises ValueError for other modules, and for options that hotrow's tables do not have."""
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleDict):
        modules = {"embedding": modules}
    return [_of_torch(name, module) for name, module in modules.items()]


def _of_torch(name: str, module: nn.Module) -> Given:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise ValueError(
            f"{name!r} is a {type(module).__name__}; from_torch takes an nn.EmbeddingBag, an nn.Embedding, or a dict "
            "of them by name"
        )
    for option, cure in _WITHOUT.items():
        value = getattr(module, option)
        if value is not None and value is not False:
            raise ValueError(f"{name!r} has {option}={value}, which hotrow's tables do not have: {cure}")
    pooling: Any = getattr(module, "mode", "sum")
    return _given(name, module.weight, (name,), pooling)


def _given(name: str, weight: Any, features: tuple[str, ...], pooling: Pooling) -> Given:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in _DTYPES:
        what = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"the weight of {name!r} is {what}; pass float32, float16 or bfloat16 [N, D], whole: for "
            "float64, module.float(); for sharded modules, their tables gathered"
        )
    config = TableConfig(
        name=name,
        num_embeddings=weight.shape[0],
        embedding_dim=weight.shape[1],
        feature_names=features,
        pooling=pooling,
        dtype=_DTYPES[weight.dtype],
    )
    return Given(config, weight.detach(), weight.requires_grad)


def from_torchrec(collection: Any) -> list[Given]:
    """Returns the tables of a torchrec EmbeddingBagCollection, or of an EmbeddingCollection, whose rows are not pooled.
    Raises ValueError for other objects, and for tables whose options have no counterpart here."""
    for configs, modules in (("embedding_bag_configs", "embedding_bags"), ("embedding_configs", "embeddings")):
        if callable(getattr(collection, configs, None)):
            weights = dict(collection.named_parameters())
            return [
                _of_torchrec(config, weights.get(f"{modules}.{config.name}.weight"))
                for config in getattr(collection, configs)()
            ]
    raise ValueError(
        f"from_torchrec was given a {type(collection).__name__}; pass a torchrec.EmbeddingBagCollection or a "
        "torchrec.EmbeddingCollection"
    )


def _of_torchrec(config: Any, weight: Any) -> Given:
    for option in ("need_pos", "num_embeddings_post_pruning", "use_virtual_table"):
        if getattr(config, option, None):
            raise ValueError(f"table {config.name!r} has {option}, which hotrow's tables do not have")
    pooling: Any = getattr(getattr(config, "pooling", None), "name", "SUM").lower()
    if pooling not in ("sum", "mean"):
        raise ValueError(f"table {config.name!r} has pooling {pooling}; hotrow has sum and mean. {MAX_POOLING}")
    return _given(config.name, weight, tuple(config.feature_names), pooling)
