"""DeepFM against plain torch that follows the paper: pairs one by one, tables of weights beside tables of vectors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotrow.config.load import make_config
from hotrow.models.deepfm import DeepFM, DeepFMSpec

FEATURES, DIM = ["user", "item", "hour", "bag"], 5


def build(num_dense: int, **options: Any) -> DeepFM:
    spec = make_config({"data": "d", "model": {"name": "deepfm", "embedding_dim": DIM, **options}}).model
    assert isinstance(spec, DeepFMSpec)
    dims = dict.fromkeys(FEATURES, spec.row_dim(DIM))
    return spec.build(num_dense=num_dense, dims=dims, generator=torch.Generator().manual_seed(3))


class PlainDeepFM(nn.Module):
    """In float64, with the wide part, every pair and the deep part as separate terms."""

    def __init__(self, num_dense: int, deep: list[int], *, second_order: bool) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(num_dense, dtype=torch.float64))
        widths = [num_dense + len(FEATURES) * DIM, *deep, 1]
        self.mlp = nn.ModuleList(nn.Linear(n, m, dtype=torch.float64) for n, m in itertools.pairwise(widths))
        self.second_order = second_order

    def forward(self, dense: Tensor, weights: list[Tensor], vectors: list[Tensor]) -> Tensor:
        logits = dense @ self.wide + sum(weights)
        if self.second_order:
            logits = logits + sum((one * other).sum(1) for one, other in itertools.combinations(vectors, 2))
        h = torch.cat([dense, *vectors], 1)
        for layer in self.mlp[:-1]:
            h = torch.relu(layer(h))
        return logits + self.mlp[-1](h)[:, 0]


def assert_close(ours: Tensor | None, truth: Tensor | None) -> None:
    """The tolerance of MLPs in docs/numerics.md."""
    assert ours is not None and truth is not None
    largest = float(truth.detach().abs().max()) if truth.numel() else 0.0
    torch.testing.assert_close(ours, truth.float(), rtol=0, atol=1e-5 * largest + 1e-6)


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("deep", [[], [12, 6]])
@pytest.mark.parametrize("second_order", [False, True])
def test_against_plain_torch(num_dense: int, deep: list[int], second_order: bool) -> None:
    model = build(num_dense, deep_mlp=deep, second_order=second_order)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.first_order_I.normal_(generator=g)
    twin = PlainDeepFM(num_dense, deep, second_order=second_order)
    pairs = {"first_order_I": "wide"} | {
        f"deep.layers.{k}.{name}": f"mlp.{k}.{name}" for k in range(len(deep) + 1) for name in ("weight", "bias")
    }
    assert pairs.keys() == model.state_dict().keys()
    twin.load_state_dict({pairs[name]: value.double() for name, value in model.state_dict().items()})
    weights = [torch.randn(7, generator=g, dtype=torch.float64).requires_grad_() for _ in FEATURES]
    vectors = [torch.randn(7, DIM, generator=g, dtype=torch.float64).requires_grad_() for _ in FEATURES]
    rows = [torch.cat([w[:, None], v], 1) for w, v in zip(weights, vectors, strict=True)]
    pooled = torch.cat(rows, 1).detach().float().requires_grad_()
    dense = torch.randn(7, num_dense, generator=g)
    logits, expected = model(dense, pooled), twin(dense.double(), weights, vectors)
    assert logits.shape == (7,)
    assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    grads = [torch.cat([w.grad[:, None], v.grad], 1) for w, v in zip(weights, vectors, strict=True)]  # type: ignore[index, list-item]
    assert_close(pooled.grad, torch.cat(grads, 1))
    theirs = dict(twin.named_parameters())
    for name, value in model.named_parameters():
        assert_close(value.grad, theirs[pairs[name]].grad)
