"""Models: dense inputs and pooled embeddings in, logits out. One file per model, and the one list of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hotrow.config import ModelConfig
from hotrow.models.dlrm import DLRM

MODELS: dict[str, Callable[..., nn.Module]] = {"dlrm": DLRM}


def build_model(config: ModelConfig, *, num_dense: int, num_features: int, seed: int) -> nn.Module:
    """The model `config` names for `num_dense` inputs and `num_features` pooled embeddings, weights drawn from `seed`.

    It maps (dense [B, num_dense], pooled [B, num_features * embedding_dim]) to logits [B].
    """
    return MODELS[config.name](
        num_dense=num_dense,
        num_features=num_features,
        embedding_dim=config.embedding_dim,
        bottom_mlp=config.bottom_mlp,
        top_mlp=config.top_mlp,
        first_order=config.first_order,
        generator=torch.Generator().manual_seed(seed),
    )
