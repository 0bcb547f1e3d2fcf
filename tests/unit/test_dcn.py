"""DCN V2 against plain torch: same weights, same inputs, same logits and gradients, for rows of any width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from hotrow.config.load import make_config
from hotrow.kernels import ops
from hotrow.models.dcn import DCN, DCNSpec
from loops import looped

DIMS = {"user": 8, "item": 16, "hour": 1, "bag": 16}


def build(num_dense: int, **options: Any) -> DCN:
    """With a config's strict checks; a deep tower of 12 and 6."""
    spec = make_config({"data": "d", "model": {"name": "dcn", "deep_mlp": [12, 6], **options}}).model
    assert isinstance(spec, DCNSpec)
    return spec.build(num_dense=num_dense, dims=DIMS, generator=torch.Generator().manual_seed(3))


def plain_dcn(w: dict[str, Tensor], dense: Tensor, pooled: Tensor, *, layers: int, structure: str) -> Tensor:
    """The paper's formulas, from a state dict of named tensors."""
    x0 = torch.cat([dense, pooled], dim=1)
    x = x0
    for k in range(layers):
        W = w[f"cross.{k}.W.weight"]
        matrix = W @ w[f"cross.{k}.V.weight"] if f"cross.{k}.V.weight" in w else W
        x = x0 * (x @ matrix.T + w[f"cross.{k}.W.bias"]) + x
    h = x if structure == "stacked" else x0
    k = 0
    while f"deep.layers.{k}.weight" in w:
        h = torch.relu(linear(h, w[f"deep.layers.{k}.weight"], w[f"deep.layers.{k}.bias"]))
        k += 1
    joined = h if structure == "stacked" else torch.cat([x, h], dim=1) if k else x
    return linear(joined, w["last.weight"], w["last.bias"])[:, 0]


def assert_close(ours: Tensor, truth: Tensor) -> None:
    """The tolerance of MLPs in docs/numerics.md."""
    torch.testing.assert_close(ours, truth.float(), rtol=0, atol=1e-5 * float(truth.detach().abs().max()) + 1e-6)


@looped("num_dense", [0, 3])
@looped("structure", ["parallel", "stacked"])
@looped("low_rank", [None, 5])
@looped(("layers", "deep"), [(1, [12, 6]), (3, [12, 6]), (2, [])])
def test_dcn_against_plain_torch(
    num_dense: int, structure: str, low_rank: int | None, layers: int, deep: list[int]
) -> None:
    model = build(num_dense, num_cross_layers=layers, low_rank=low_rank, structure=structure, deep_mlp=deep)
    g = torch.Generator().manual_seed(1)
    dense, pooled = torch.randn(7, num_dense, generator=g), torch.randn(7, sum(DIMS.values()), generator=g)
    pooled.requires_grad_()
    twin = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    rows = pooled.detach().double().requires_grad_()
    logits = model(dense, pooled)
    expected = plain_dcn(twin, dense.double(), rows, layers=layers, structure=structure)
    assert logits.shape == (7,)
    assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    assert_close(pooled.grad, rows.grad)  # type: ignore[arg-type]
    for name, value in model.named_parameters():
        assert_close(value.grad, twin[name].grad)  # type: ignore[arg-type]


@pytest.mark.skipif(ops.backend().name != "native", reason="torch's own products depend on the number of threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    model, g = build(4, low_rank=7), torch.Generator().manual_seed(1)
    dense, rows = torch.randn(513, 4, generator=g), torch.randn(513, sum(DIMS.values()), generator=g)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            pooled = rows.clone().requires_grad_()
            model.zero_grad()
            logits = model(dense, pooled)
            logits.square().sum().backward()
            seen.append([logits.detach(), pooled.grad, *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, first) for found in seen for one, first in zip(found, seen[0], strict=True))


def test_options_and_sizes() -> None:
    fields = DCNSpec.model_fields
    assert {name: fields[name].default for name in fields} == {
        "name": "dcn",
        "embedding_dim": 16,
        "embedding_init": None,
        "objective": "binary_cross_entropy",
        "dropout": 0.0,
        "num_cross_layers": 3,
        "low_rank": None,
        "deep_mlp": [512, 256],
        "structure": "parallel",
    }
    X = 4 + sum(DIMS.values())
    shapes = {name: tuple(value.shape) for name, value in build(4, low_rank=7, num_cross_layers=1).named_parameters()}
    assert shapes == {
        "cross.0.V.weight": (7, X),
        "cross.0.W.weight": (X, 7),
        "cross.0.W.bias": (X,),
        "deep.layers.0.weight": (12, X),
        "deep.layers.0.bias": (12,),
        "deep.layers.1.weight": (6, 12),
        "deep.layers.1.bias": (6,),
        "last.weight": (1, X + 6),
        "last.bias": (1,),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low_rank": 0}, r"model\.low_rank is 0; allowed: an integer >= 1"),
        ({"structure": "crossed"}, r"model\.structure is 'crossed'; allowed: parallel, stacked"),
        ({"num_cross_layer": 2}, r"unknown key model\.num_cross_layer for model dcn; did you mean 'num_cross_layers'"),
        ({"bottom_mlp": [4]}, r"unknown key model\.bottom_mlp for model dcn; it is one of dlrm and tbsm: remove it"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(0, **options)
