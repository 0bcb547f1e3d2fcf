"""MMoE against plain torch that follows the paper's formulas: same weights, same logits and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from hotrow.config.load import make_config
from hotrow.models.layers import bag_softmax
from hotrow.models.mmoe import MMoE, MMoESpec

DIMS, EXPERTS = {"user": 8, "item": 16, "hour": 1, "bag": 16}, 3


def build(num_dense: int, num_labels: int, expert_mlp: list[int]) -> MMoE:
    raw = {"name": "mmoe", "experts": EXPERTS, "expert_mlp": expert_mlp, "tower_mlp": [5]}
    spec, generator = make_config({"data": "d", "model": raw}).model, torch.Generator().manual_seed(3)
    assert isinstance(spec, MMoESpec)
    return spec.build(num_dense=num_dense, dims=DIMS, generator=generator, num_outputs=num_labels)


def plain_mmoe(w: dict[str, Tensor], dense: Tensor, pooled: Tensor, num_labels: int) -> Tensor:
    """From a state dict of named tensors, [B, L]."""
    x, experts, logits = torch.cat([dense, pooled], 1), list[Tensor](), list[Tensor]()
    for e in range(EXPERTS):
        h = x
        for k in range(2):
            at = f"experts.{e}.layers.{k}."
            h = torch.relu(linear(h, w[f"{at}weight"], w[f"{at}bias"]))
        experts.append(h)
    gates = linear(x, w["gates.weight"], w["gates.bias"]).chunk(num_labels, 1)
    for label, gate in enumerate(gates):
        mixed = torch.einsum("be,ebw->bw", torch.softmax(gate, 1), torch.stack(experts))
        at = f"towers.{label}.layers."
        h = torch.relu(linear(mixed, w[f"{at}0.weight"], w[f"{at}0.bias"]))
        logits.append(linear(h, w[f"{at}1.weight"], w[f"{at}1.bias"]))
    return torch.cat(logits, 1)


def assert_close(ours: Tensor | None, truth: Tensor | None) -> None:
    """The tolerance of MLPs in docs/numerics.md."""
    assert ours is not None and truth is not None
    torch.testing.assert_close(ours, truth.float(), rtol=0, atol=1e-5 * float(truth.detach().abs().max()) + 1e-6)


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("num_labels", [1, 2, 4])
def test_against_plain_torch(num_dense: int, num_labels: int) -> None:
    model, g = build(num_dense, num_labels, [12, 6]), torch.Generator().manual_seed(1)
    dense, pooled = torch.randn(7, num_dense, generator=g), torch.randn(7, sum(DIMS.values()), generator=g)
    pooled.requires_grad_()
    twin = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    rows = pooled.detach().double().requires_grad_()
    logits, expected = model(dense, pooled), plain_mmoe(twin, dense.double(), rows, num_labels).squeeze(1)
    assert logits.shape == ((7,) if num_labels == 1 else (7, num_labels))
    assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    assert_close(pooled.grad, rows.grad)
    for name, value in model.named_parameters():
        assert_close(value.grad, twin[name].grad)


def test_experts_without_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expert_mlp is \[\]"):
        build(0, 2, [])


def test_softmax_of_large_scores_is_finite() -> None:
    scores = 1e6 * torch.randn(6, 1, generator=torch.Generator().manual_seed(1))
    found = bag_softmax(scores, torch.tensor([0, 4, 6, 6]))
    assert found.isfinite().all() and found[:4].sum() == found[4:].sum() == 1
