"""FinalMLP against plain torch that follows the paper's formulas: same weights, same logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from hotrow.config.load import make_config
from hotrow.models.finalmlp import FinalMLP, FinalMLPSpec

DIMS = {"user": 8, "item": 16, "hour": 1, "bag": 16}


def build(num_dense: int, *, num_outputs: int = 1, **options: Any) -> FinalMLP:
    raw = {"name": "finalmlp", "first_mlp": [12, 6], "second_mlp": [4], **options}
    spec, generator = make_config({"data": "d", "model": raw}).model, torch.Generator().manual_seed(3)
    assert isinstance(spec, FinalMLPSpec)
    network = spec.build(num_dense=num_dense, dims=DIMS, generator=generator, num_outputs=num_outputs)
    assert isinstance(network, FinalMLP)
    return network


def plain_finalmlp(w: dict[str, Tensor], dense: Tensor, pooled: Tensor) -> Tensor:
    """From a state dict of named tensors."""
    x, streams = torch.cat([dense, pooled], 1), list[Tensor]()
    for s, num_layers in enumerate((2, 1)):
        h = x * 2 * torch.sigmoid(w[f"gates.{s}"])
        for k in range(num_layers):
            at = f"mlps.{s}.layers.{k}."
            h = torch.relu(linear(h, w[f"{at}weight"], w[f"{at}bias"]))
        streams.append(h)
    logits = linear(torch.cat(streams, 1), w["linear.weight"], w["linear.bias"])
    f, s = streams
    each = w["products_VO"].chunk(logits.shape[1])  # of each output
    return logits + torch.stack([torch.einsum("bo,uo,bu->b", f, one, s) for one in each], 1)


def assert_close(ours: Tensor | None, truth: Tensor | None) -> None:
    """The tolerance of MLPs in docs/numerics.md."""
    assert ours is not None and truth is not None
    torch.testing.assert_close(ours, truth.float(), rtol=0, atol=1e-5 * float(truth.detach().abs().max()) + 1e-6)


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_against_plain_torch(num_dense: int, num_outputs: int) -> None:
    model, g = build(num_dense, num_outputs=num_outputs), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in (*model.gates, model.products_VO):  # which begin at zero
            value.normal_(generator=g)
    dense, pooled = torch.randn(7, num_dense, generator=g), torch.randn(7, sum(DIMS.values()), generator=g)
    pooled.requires_grad_()
    twin = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    rows = pooled.detach().double().requires_grad_()
    logits, expected = model(dense, pooled), plain_finalmlp(twin, dense.double(), rows).squeeze(1)
    assert logits.shape == ((7,) if num_outputs == 1 else (7, num_outputs))
    assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    assert_close(pooled.grad, rows.grad)
    for name, value in model.named_parameters():
        assert_close(value.grad, twin[name].grad)


def test_an_mlp_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"second_mlp is \[\]: "):
        build(0, second_mlp=[])
