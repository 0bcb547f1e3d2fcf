"""Models: dense inputs and embedding rows in, logits out. One file per model, and the one list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hotrow.batch import KeyedJaggedTensor
from hotrow.config.schema import ModelConfig
from hotrow.embedding import EmbeddingCollection
from hotrow.models.dlrm import DLRM
from hotrow.models.tbsm import TBSM

MODELS: dict[str, Callable[..., nn.Module]] = {"dlrm": DLRM, "tbsm": TBSM}


def build_model(config: ModelConfig, *, num_dense: int, feature_names: Sequence[str], seed: int) -> nn.Module:
    """The model `config` names for `num_dense` inputs and the features `feature_names`, weights drawn from `seed`.

    It maps (dense [B, num_dense], what `look_up` gives) to logits [B].
    """
    own: dict[str, Any] = {"num_features": len(feature_names), "first_order": config.first_order}
    if config.name == "tbsm":
        own = {"feature_names": feature_names, **config.tbsm_options()}
    return MODELS[config.name](
        num_dense=num_dense,
        embedding_dim=config.embedding_dim,
        bottom_mlp=config.bottom_mlp,
        top_mlp=config.top_mlp,
        generator=torch.Generator().manual_seed(seed),
        **own,
    )


def takes_sequences(model: nn.Module) -> bool:
    """Whether `model` takes the row of every id, not pooled."""
    return getattr(model, "takes_sequences", False)


def look_up(model: nn.Module, embedding: EmbeddingCollection, sparse: KeyedJaggedTensor) -> Any:
    """The rows of a batch as `model` takes them: not pooled, by feature, where it `takes_sequences`; else pooled."""
    if takes_sequences(model):
        return embedding.sequence(sparse)
    return embedding(sparse)
