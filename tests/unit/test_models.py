"""MLP and DLRM against plain torch, and their initialisation against the reference's distribution."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.histories import SCHEMA
from hotrow.config.load import load_config
from hotrow.data.sources.registry import AVAZU_SCHEMA, CRITEO_SCHEMA
from hotrow.data.sources.schema import load_schema
from hotrow.models.dlrm import DLRMSpec
from hotrow.models.layers import MLP, Linear, Network, linear
from hotrow.models.spec import ModelSpec
from loops import looped

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def names(num_features: int) -> list[str]:
    return [f"x{k}" for k in range(num_features)]


def built(spec: ModelSpec, *, num_dense: int, feature_names: Sequence[str], seed: int) -> Network:
    assert isinstance(spec.embedding_dim, int)
    dims = dict.fromkeys(feature_names, spec.embedding_dim)
    return spec.build(num_dense=num_dense, dims=dims, generator=seeded(seed))


def test_linear_is_drawn_as_in_the_reference() -> None:
    layer = linear(300, 500, seeded())
    for tensor, std in ((layer.weight, math.sqrt(2 / 800)), (layer.bias, math.sqrt(1 / 500))):
        tensor = tensor.detach()
        assert abs(float(tensor.mean())) < 4 * std / math.sqrt(tensor.numel())
        assert float(tensor.std()) == pytest.approx(std, rel=4 / math.sqrt(2 * tensor.numel()))


def test_only_the_generator_decides_and_nothing_global_moves() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = MLP([5, 4, 3], generator=seeded(7)).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = MLP([5, 4, 3], generator=seeded(7)).state_dict()
    other = MLP([5, 4, 3], generator=seeded(8)).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


@looped("bias", [True, False])
def test_linear_module_against_torch(bias: bool) -> None:
    layer, twin = Linear(6, 5, generator=seeded(), bias=bias), nn.Linear(6, 5, bias=bias)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(9, 6, generator=seeded(1))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(layer(ours), twin(theirs), rtol=1e-5, atol=1e-6)
    layer(ours).square().sum().backward()
    twin(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-5, atol=1e-5)


def plain_dlrm(model: nn.Module, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    x = dense
    for layer in model.bottom.layers if dense.shape[1] else ():
        x = torch.relu(nn.functional.linear(x, layer.weight, layer.bias))
    x = x if dense.shape[1] else model.bottom.bias.repeat(len(dense), 1)
    vectors = torch.cat([x.unsqueeze(1), pooled], dim=1)
    dots = vectors @ vectors.transpose(1, 2)
    pairs = [dots[:, i, j] for i in range(vectors.shape[1]) for j in range(i)]
    z = torch.cat([x, torch.stack(pairs, dim=1)], dim=1)
    for k, layer in enumerate(model.top.layers):
        z = nn.functional.linear(z, layer.weight, layer.bias)
        z = torch.relu(z) if k < len(model.top.layers) - 1 else z
    return z[:, 0]


@looped("num_dense", [0, 1, 4])
@looped(("num_features", "first_order"), [(1, False), (5, False), (5, True)])
def test_dlrm_against_plain_torch(num_dense: int, num_features: int, first_order: bool) -> None:
    config = DLRMSpec(embedding_dim=8, bottom_mlp=[16], top_mlp=[12, 6], first_order=first_order)
    model = built(config, num_dense=num_dense, feature_names=names(num_features), seed=3)
    dense = torch.randn(7, num_dense, generator=seeded(1))
    pooled = torch.randn(7, num_features, 8, generator=seeded(2), requires_grad=True)
    twin = pooled.detach().clone().requires_grad_()
    weights = torch.randn(num_dense, generator=seeded(4)).requires_grad_()
    expected = plain_dlrm(model, dense, twin)
    if first_order:
        model.first_order_I.data.copy_(weights.detach())
        expected = expected + twin[:, :, 0].sum(1) + dense @ weights
    logits = model(dense, pooled.reshape(7, -1))
    assert logits.shape == (7,)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(pooled.grad, twin.grad, rtol=1e-4, atol=1e-4)
    if first_order and num_dense:
        torch.testing.assert_close(model.first_order_I.grad, weights.grad, rtol=1e-4, atol=1e-4)


def test_first_order_at_the_start_is_the_logistic_regression_of_rows_at_zero() -> None:
    """Rows at zero get a gradient in their first column, equal for all features, and no draw differs from without."""
    configs = [DLRMSpec(embedding_dim=4, bottom_mlp=[8], top_mlp=[6], first_order=on) for on in (False, True)]
    without, model = (built(config, num_dense=3, feature_names=names(5), seed=3) for config in configs)
    dense = torch.randn(7, 3, generator=seeded(1))
    grads = []
    for network in (without, model):
        pooled = torch.zeros(7, 5, 4, requires_grad=True)
        network(dense, pooled.reshape(7, -1)).sum().backward()
        grads.append(pooled.grad)
    expected = torch.zeros(7, 5, 4)
    expected[:, :, 0] = 1.0
    torch.testing.assert_close(grads[1] - grads[0], expected)
    assert torch.equal(model(dense, torch.zeros(7, 20)), without(dense, torch.zeros(7, 20)))


# Of FAE (VLDB 2022, Table 2), RMC1 to RMC4: bottom MLP, top MLP of a step or sample, and TBSM's last.
SHAPES = {
    "taobao-tbsm": ([1, 16], [22, 15, 15], [30, 60, 1]),
    "criteo-kaggle": ([13, 512, 256, 64, 16], [367, 512, 256, 1], None),
    "criteo-terabyte": ([13, 512, 256, 64], [415, 512, 512, 256, 1], None),
    "avazu": (None, [16 + 21 * 22 // 2, 512, 256, 1], None),  # its bottom MLP has no input here: see the recipe
}
SCHEMAS = {"taobao": load_schema(SCHEMA), "criteo": CRITEO_SCHEMA, "avazu": AVAZU_SCHEMA}


def widths(mlp: nn.Module) -> list[int]:
    return [mlp.layers[0].in_features, *(layer.out_features for layer in mlp.layers)]  # type: ignore[union-attr, misc]


@looped("recipe", SHAPES)
def test_recipes_have_the_shapes_of_the_papers_workloads(recipe: str) -> None:
    config, schema = load_config(RECIPES / f"{recipe}.yaml").model, SCHEMAS[recipe.split("-")[0]]
    model = built(config, num_dense=len(schema.dense), feature_names=schema.feature_names, seed=0)
    bottom, top, final = SHAPES[recipe]
    assert bottom is None or widths(model.bottom) == bottom
    assert widths(model.top) == top
    assert final is None or widths(model.final) == final
