"""DCN V2, DeepFM, FinalMLP and MMoE against plain torch in float64 that follows each paper's formulas.

Same weights and inputs, same logits and gradients, for rows of any width.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from hotrow.config.load import make_config
from hotrow.models.layers import Network, bag_softmax
from loops import looped

DIMS = {"user": 8, "item": 16, "hour": 1, "bag": 16}
DIM, EXPERTS = 5, 3
Weights = dict[str, Tensor]


def build(name: str, num_dense: int, *, num_outputs: int = 1, **options: Any) -> Network:
    spec: Any = make_config({"data": "d", "model": {"name": name, **options}}).model
    dims = dict.fromkeys(DIMS, spec.row_dim(DIM)) if name == "deepfm" else DIMS
    generator = torch.Generator().manual_seed(3)
    return spec.build(num_dense=num_dense, dims=dims, generator=generator, num_outputs=num_outputs)


def check(model: Network, num_dense: int, num_outputs: int, plain: Callable[[Weights, Tensor, Tensor], Tensor]) -> None:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith(("first_order", "gates.", "products")) and not value.any():  # which begin at zero
                value.normal_(generator=g)
    dims = len(DIMS) * (1 + DIM) if hasattr(model, "first_order_I") else sum(DIMS.values())
    dense, pooled = torch.randn(7, num_dense, generator=g), torch.randn(7, dims, generator=g, requires_grad=True)
    twin = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    rows = pooled.detach().double().requires_grad_()
    logits, expected = model(dense, pooled), plain(twin, dense.double(), rows)
    assert logits.shape == ((7,) if num_outputs == 1 else (7, num_outputs))
    assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    assert_close(pooled.grad, rows.grad)
    for name, value in model.named_parameters():
        assert_close(value.grad, twin[name].grad)


def assert_close(ours: Tensor | None, truth: Tensor | None) -> None:
    """The tolerance of MLPs in docs/numerics.md."""
    assert ours is not None and truth is not None
    largest = float(truth.detach().abs().max()) if truth.numel() else 0.0
    torch.testing.assert_close(ours, truth.float(), rtol=0, atol=1e-5 * largest + 1e-6)


def mlp(w: Weights, at: str, x: Tensor, *, relu_last: bool = True) -> Tensor:
    num_layers = next(k for k in itertools.count() if f"{at}layers.{k}.weight" not in w)
    for k in range(num_layers):
        x = linear(x, w[f"{at}layers.{k}.weight"], w[f"{at}layers.{k}.bias"])
        x = torch.relu(x) if relu_last or k + 1 < num_layers else x
    return x


@looped("num_dense", [0, 3])
@looped("structure", ["parallel", "stacked"])
@looped("low_rank", [None, 5])
@looped(("layers", "deep"), [(1, [12, 6]), (3, [12, 6]), (2, [])])
def test_dcn(num_dense: int, structure: str, low_rank: int | None, layers: int, deep: list[int]) -> None:
    def plain(w: Weights, dense: Tensor, pooled: Tensor) -> Tensor:
        x0 = x = torch.cat([dense, pooled], dim=1)
        for k in range(layers):
            W = w[f"cross.{k}.W.weight"]
            matrix = W @ w[f"cross.{k}.V.weight"] if f"cross.{k}.V.weight" in w else W
            x = x0 * (x @ matrix.T + w[f"cross.{k}.W.bias"]) + x
        h = mlp(w, "deep.", x if structure == "stacked" else x0)
        joined = h if structure == "stacked" else torch.cat([x, h], dim=1) if deep else x
        return linear(joined, w["last.weight"], w["last.bias"])[:, 0]

    options = {"num_cross_layers": layers, "low_rank": low_rank, "structure": structure, "deep_mlp": deep}
    check(build("dcn", num_dense, **options), num_dense, 1, plain)


@looped("num_dense", [0, 3])
@looped("deep", [[], [12, 6]])
@looped("second_order", [False, True])
def test_deepfm(num_dense: int, deep: list[int], second_order: bool) -> None:
    """Tables of weights beside tables of vectors, and every pair by itself."""

    def plain(w: Weights, dense: Tensor, pooled: Tensor) -> Tensor:
        rows = pooled.view(7, len(DIMS), 1 + DIM).unbind(1)
        vectors = [row[:, 1:] for row in rows]
        logits = dense @ w["first_order_I"] + sum(row[:, 0] for row in rows)
        if second_order:
            logits = logits + sum((one * other).sum(1) for one, other in itertools.combinations(vectors, 2))
        return logits + mlp(w, "deep.", torch.cat([dense, *vectors], 1), relu_last=False)[:, 0]

    model = build("deepfm", num_dense, embedding_dim=DIM, deep_mlp=deep, second_order=second_order)
    check(model, num_dense, 1, plain)


@looped("num_dense", [0, 3])
@looped("num_outputs", [1, 3])
def test_finalmlp(num_dense: int, num_outputs: int) -> None:
    def plain(w: Weights, dense: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([dense, pooled], 1)
        f, s = (mlp(w, f"mlps.{s}.", x * 2 * torch.sigmoid(w[f"gates.{s}"])) for s in range(2))
        logits = linear(torch.cat([f, s], 1), w["linear.weight"], w["linear.bias"])
        each = w["products_VO"].chunk(num_outputs)  # of each output
        return (logits + torch.stack([torch.einsum("bo,uo,bu->b", f, one, s) for one in each], 1)).squeeze(1)

    model = build("finalmlp", num_dense, num_outputs=num_outputs, first_mlp=[12, 6], second_mlp=[4])
    check(model, num_dense, num_outputs, plain)


@looped("num_dense", [0, 3])
@looped("num_labels", [1, 2, 4])
def test_mmoe(num_dense: int, num_labels: int) -> None:
    def plain(w: Weights, dense: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([dense, pooled], 1)
        experts = torch.stack([mlp(w, f"experts.{e}.", x) for e in range(EXPERTS)])
        gates = linear(x, w["gates.weight"], w["gates.bias"]).chunk(num_labels, 1)
        mixed = [torch.einsum("be,ebw->bw", torch.softmax(gate, 1), experts) for gate in gates]
        logits = [mlp(w, f"towers.{label}.", each, relu_last=False) for label, each in enumerate(mixed)]
        return torch.cat(logits, 1).squeeze(1)

    options = {"experts": EXPERTS, "expert_mlp": [12, 6], "tower_mlp": [5]}
    check(build("mmoe", num_dense, num_outputs=num_labels, **options), num_dense, num_labels, plain)


@looped(
    ("name", "options", "message"),
    [
        ("dcn", {"low_rank": 0}, r"model\.low_rank is 0; allowed: an integer >= 1"),
        ("dcn", {"structure": "crossed"}, r"model\.structure is 'crossed'; allowed: parallel, stacked"),
        ("dcn", {"num_cross_layer": 2}, r"unknown key model\.num_cross_layer for model dcn; .* 'num_cross_layers'"),
        ("dcn", {"bottom_mlp": [4]}, r"unknown key model\.bottom_mlp for model dcn; it is one of dlrm and tbsm: rem"),
        ("finalmlp", {"second_mlp": []}, r"second_mlp is \[\]: "),
        ("mmoe", {"expert_mlp": []}, r"expert_mlp is \[\]"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, 0, **options)


def test_softmax_of_large_scores_is_finite() -> None:
    scores = 1e6 * torch.randn(6, 1, generator=torch.Generator().manual_seed(1))
    found = bag_softmax(scores, torch.tensor([0, 4, 6, 6]))
    assert found.isfinite().all() and found[:4].sum() == found[4:].sum() == 1
