"""Dropout, pieces and members of DLRM against plain torch and NumPy's own Philox."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotrow.models.dlrm import DLRM, DLRMs, DLRMSpec, Pieces
from hotrow.models.layers import Dropout

B, F, D, N = 50, 3, 4, 5


def built(seed: int = 0, *, num_dense: int = N, edges: Sequence[Sequence[float]] = (), **options: Any) -> Any:
    spec = DLRMSpec(embedding_dim=D, bottom_mlp=[7], top_mlp=[9, 6], **options)
    generator = torch.Generator().manual_seed(seed)
    dims = dict.fromkeys("abc", D * spec.members)
    return spec.build(num_dense=num_dense, dims=dims, generator=generator, edges=edges)


def inputs(columns: int = D) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, N, generator=generator), torch.randn(B, F * columns, generator=generator)


def layers(mlp: Any, x: Tensor, masks: list[Tensor]) -> Tensor:
    for layer, mask in zip(mlp.layers[:-1], masks, strict=True):
        x = torch.relu(x @ layer.weight.T + layer.bias) * mask
    last: Tensor = x @ mlp.layers[-1].weight.T + mlp.layers[-1].bias
    return torch.relu(last) if mlp.last == "relu" else last


def mask_of(place: int, step: int, sample: int, width: int, share: float, seed: int = 0) -> Tensor:
    """One sample after another, as the docstring says: 16 numbers of 16 bits a block."""
    rows = []
    blocks = -(-width // 16)
    for own in range(sample, sample + B):
        drawn = np.random.Philox(counter=[own * blocks, 0, step, 0], key=[seed, place]).random_raw(4 * blocks)
        rows.append(np.ascontiguousarray(drawn).view(np.uint16)[:width] >= round(share * 65536))
    return torch.from_numpy(np.stack(rows).astype(np.float32) / np.float32(1 - share))


def test_a_step_with_dropout_is_that_of_plain_torch() -> None:
    """The modules draw in the order in which they stand: bottom MLP, top MLP, rows."""
    model, (dense, pooled) = built(concatenated=True, first_order=True, dropout=0.3, embedding_dropout=0.4), inputs()
    step, sample = 7, 1000
    with model.drawing(step, sample):
        found = model(dense, pooled)
    bottom, top1, top2, rows = (
        mask_of(place, step, sample, width, share)
        for place, (width, share) in enumerate([(7, 0.3), (9, 0.3), (6, 0.3), (F, 0.4)])
    )
    vectors = pooled.view(B, F, D) * rows[:, :, None]
    x = layers(model.bottom, dense, [bottom])
    every = torch.cat([x[:, None], vectors], 1)
    i, j = torch.tril_indices(F + 1, F + 1, -1)
    top = torch.cat([x, (every @ every.transpose(1, 2))[:, i, j], vectors.flatten(1)], 1)
    expected = layers(model.top, top, [top1, top2])[:, 0] + vectors[:, :, 0].sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_dropped_outside_of_a_step() -> None:
    dense, pooled = inputs()
    options = {"concatenated": True, "first_order": True}
    drops = built(dropout=0.3, embedding_dropout=0.4, **options)
    assert torch.equal(drops(dense, pooled), built(**options)(dense, pooled))


def test_a_step_without_dropout_computes_what_scoring_computes() -> None:
    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found.append(str(func))
            return func(*args, **(kwargs or {}))

    model, each = built(concatenated=True, first_order=True), []
    for block in (nullcontext(), model.drawing(7, 0)):
        with block, Operations() as operations:
            model(*inputs())
        each.append(operations.found)
    assert each[0] == each[1]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_is_dropped_and_the_mean_stays(share: float) -> None:
    dropout = Dropout(share, generator=torch.Generator().manual_seed(3))
    dropout.moment = (0, 5, 0)
    found = dropout(torch.ones(4000, 50))
    zero = float((found == 0).float().mean())
    error = (share * (1 - share) / found.numel()) ** 0.5
    assert abs(zero - share) < 5 * error
    assert float(found.max()) == pytest.approx(1 / (1 - share))
    columns, samples = (found == 0).float().mean(0), (found == 0).float().mean(1)
    assert columns.std() < 2 * (share * (1 - share) / 4000) ** 0.5, "no column is favoured"
    assert samples.std() < 2 * (share * (1 - share) / 50) ** 0.5, "no sample is"


def test_steps_seeds_and_places_draw_anew() -> None:
    draws = []
    for seed, moment in ((0, (0, 0, 0)), (1, (0, 0, 0)), (0, (1, 0, 0)), (0, (0, 1, 0)), (0, (0, 0, 1))):
        dropout = Dropout(0.5, generator=torch.Generator().manual_seed(seed))
        dropout.moment = moment
        draws.append(dropout(torch.ones(64, 64)))
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert 0.4 < float((one == other).float().mean()) < 0.6
    assert torch.equal(draws[0][1:], draws[4][:-1]), "the place of a sample decides, not the part it came in"


def test_members_are_dlrms_side_by_side() -> None:
    """Each one's columns lie behind another in a row; scores are the mean of their logits."""
    model, (dense, pooled) = built(members=3, first_order=True), inputs(3 * D)
    assert isinstance(model, DLRMs)
    generator = torch.Generator().manual_seed(0)
    sizes: Any = {"num_dense": N, "num_features": F, "embedding_dim": D, "bottom_mlp": [7], "top_mlp": [9, 6]}
    alone = [DLRM(**sizes, first_order=True, generator=generator) for _ in range(3)]
    rows = pooled.view(B, F, 3, D)
    logits = torch.stack([own(dense, rows[:, :, k].reshape(B, F * D)) for k, own in enumerate(alone)])
    torch.testing.assert_close(model(dense, pooled), logits.mean(0))
    with model.drawing(0, 0):
        assert torch.equal(model(dense, pooled), logits), "in a step each has a loss of its own"


def test_a_step_of_members_has_the_bits_that_each_has_alone() -> None:
    """Logits, and gradients of weights and rows, with all that a DLRM may have; a member's modules come after those of
    the members before it, and draw as such."""
    options: dict[str, Any] = {"concatenated": True, "first_order": True, "dropout": 0.3, "embedding_dropout": 0.4}
    model, (dense, pooled) = built(members=3, **options), inputs(3 * D)
    together, apart = pooled.clone().requires_grad_(), pooled.clone().requires_grad_()
    with model.drawing(7, 1000):
        logits = model(dense, together)
        logits.sum().backward()
        grads = [own.grad.clone() for own in model.parameters()]
        model.zero_grad()
        rows = apart.view(B, F, 3, D)
        alone = [own(dense, rows[:, :, k].reshape(B, F * D)) for k, own in enumerate(model.members)]
        torch.stack(alone).sum().backward()
    assert torch.equal(logits, torch.stack(alone)) and torch.equal(together.grad, apart.grad)
    assert all(torch.equal(one, own.grad) for one, own in zip(grads, model.parameters(), strict=True))


@pytest.mark.parametrize("members", [1, 3])
def test_numbers_also_come_in_pieces(members: int) -> None:
    """One for each two neighbouring edges of a column, as if they had been dense inputs behind the others; a row has
    the same bits alone, beside others, and where all rows share their numbers without a copy."""
    edges = [[-1.0, -0.25, 0.5, 2.0], [], [0.0, 1e-30], [3.0], [-3e38, 3e38]]
    options: dict[str, Any] = {"concatenated": True, "first_order": True, "members": members}
    (dense, pooled), tiny = inputs(D * members), torch.finfo(torch.float32).tiny
    dense[:8, 0] = torch.tensor([-1, -0.25, 0.5, 2, -0.0, -tiny / 2, 3e38, -3e38])
    dense[:8, 2] = torch.tensor([0, 1e-30, 4e-31, -0.0, tiny, tiny / 2, 3e38, -3e38])
    pieces = [
        [min(max((np.float64(x) - low) / (high - low), 0), 1) for x in dense[:, i].numpy()]
        for i, own in enumerate(edges)
        for low, high in pairwise(own)
    ]
    model, wide = built(edges=edges, **options), built(num_dense=N + len(pieces), **options)
    every = torch.cat([dense, torch.tensor(np.array(pieces), dtype=torch.float32).T], 1)
    assert model.state_dict().keys() == wide.state_dict().keys(), "edges are not weights"
    (layer,) = {id(own): own for own in model.modules() if isinstance(own, Pieces)}.values()
    torch.testing.assert_close(layer(dense), every, rtol=1e-6, atol=1e-6)
    assert torch.equal(layer(dense)[:, :N], dense)
    for own in (model, wide):
        for name, parameter in own.named_parameters():
            if "first_order" in name:
                parameter.data += torch.linspace(-1, 1, len(parameter))
    found = model(dense, pooled)
    assert torch.equal(found, wide(layer(dense), pooled))
    for row in range(12):
        own = slice(row, row + 1)
        torch.testing.assert_close(model(dense[own], pooled[own]), found[own], rtol=0, atol=0, equal_nan=True)
        shared = dense[row].expand(B, -1)
        found_shared, copied = model(shared, pooled), model(shared.contiguous(), pooled)
        torch.testing.assert_close(found_shared, copied, rtol=0, atol=0, equal_nan=True)
