"""The nets among the peers of benchmarks/quality.py: a plain MLP, and DCN V2 and DeepFM of FuxiCTR's layers.

Every id has a row. For FuxiCTR's nets every number has a vector that it multiplies; the plain MLP takes it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.quality_peers import THREADS, Floats, Rows, dense_inputs, frequent_codes, logloss

MAX_EPOCHS = 30
MIN_COUNT = 2


class PlainMlp(nn.Module):
    """Rows of ids beside numbers, through layers with ReLU."""

    def __init__(self, sizes: Sequence[int], num_numbers: int, setting: Mapping[str, Any]) -> None:
        super().__init__()
        self.rows = _table(sum(sizes), setting["dim"])
        width, layers = len(sizes) * setting["dim"] + num_numbers, []
        for out in setting["widths"]:
            layers += [nn.Linear(width, out), nn.ReLU(), nn.Dropout(setting["dropout"])]
            width = out
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        return self.layers(torch.cat([self.rows(ids).flatten(1), numbers], 1)).squeeze(1)


class FuxiNet(nn.Module):
    """DCN V2 with a cross net beside an MLP, or DeepFM, as in FuxiCTR's model zoo, of FuxiCTR's layers."""

    def __init__(self, sizes: Sequence[int], num_numbers: int, setting: Mapping[str, Any]) -> None:
        from fuxictr.pytorch.layers import CrossNetV2, InnerProductInteraction, MLP_Block

        super().__init__()
        self.rows, self.vectors = (_table(size, setting["dim"]) for size in (sum(sizes), num_numbers))
        num_fields = len(sizes) + num_numbers
        width, widths = num_fields * setting["dim"], list(setting["widths"])
        own = {"dropout_rates": setting["dropout"], "batch_norm": setting["batch_norm"]}
        self.crossed = setting["net"] == "dcnv2"
        if self.crossed:
            self.deep = MLP_Block(width, widths, **own)
            self.cross, self.out = CrossNetV2(width, setting["crosses"]), nn.Linear(width + widths[-1], 1)
        else:
            self.deep = MLP_Block(width, widths, output_dim=1, **own)
            self.first, self.weights = _table(sum(sizes), 1), nn.Linear(num_numbers, 1)
            self.products = InnerProductInteraction(num_fields, output="product_sum")

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        fields = torch.cat([self.rows(ids), numbers.unsqueeze(2) * self.vectors.weight], 1)
        flat = fields.flatten(1)
        if self.crossed:
            return self.out(torch.cat([self.cross(flat), self.deep(flat)], 1)).squeeze(1)
        linear = self.first(ids).sum(1) + self.weights(numbers)
        return (linear + self.products(fields) + self.deep(flat)).squeeze(1)


def _table(num_rows: int, dim: int) -> nn.Embedding:
    """Returns a table of small rows."""
    table = nn.Embedding(num_rows, dim)
    nn.init.normal_(table.weight, std=0.01)
    return table


def fit(
    rows: Rows,
    train: NDArray[np.int64],
    scored: NDArray[np.int64],
    setting: Mapping[str, Any],
    seed: int,
    rounds: int | None,
) -> tuple[Floats, int]:
    """Trains a net by Adam as a peer; a round is an epoch, and two without a lower LogLoss end it.

    setting: `decay` is that of tables alone.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    places, sizes = frequent_codes(rows, train, MIN_COUNT)
    ids = torch.from_numpy(places + np.cumsum([0, *sizes])[:-1])
    numbers, label = (torch.from_numpy(one).float() for one in (dense_inputs(rows, train, log=True), rows.label))
    net = (FuxiNet if "net" in setting else PlainMlp)(sizes, numbers.shape[1], setting)
    adam = _adam(net, setting)
    order, best, best_epoch, found, epoch = torch.from_numpy(train), math.inf, 0, np.zeros(0), 0
    while epoch < (rounds or min(MAX_EPOCHS, best_epoch + 2)):
        for batch in order[torch.randperm(len(order))].split(setting["batch"]):
            loss = binary_cross_entropy_with_logits(net(ids[batch], numbers[batch]), label[batch])
            adam.zero_grad()
            loss.backward()
            adam.step()
        epoch += 1
        if rounds in (None, epoch):
            scores = _scores(net, ids[scored], numbers[scored])
            if (now := float(logloss(rows.label[scored], scores).mean())) < best:
                best, best_epoch, found = now, epoch, scores
    return found, best_epoch


def _adam(net: nn.Module, setting: Mapping[str, Any]) -> torch.optim.Adam:
    """Returns the optimizer, which shrinks the tables alone."""
    of_tables = {id(one) for layer in net.modules() if isinstance(layer, nn.Embedding) for one in layer.parameters()}
    groups = [[one for one in net.parameters() if (id(one) in of_tables) == side] for side in (True, False)]
    decay = [setting["decay"], 0.0]
    both = [{"params": own, "weight_decay": shrunk} for own, shrunk in zip(groups, decay, strict=True)]
    return torch.optim.Adam(both, lr=setting["lr"])


@torch.no_grad()
def _scores(net: nn.Module, ids: Tensor, numbers: Tensor) -> Floats:
    """Returns the probabilities of rows."""
    net.eval()
    parts = [net(*part) for part in zip(ids.split(8192), numbers.split(8192), strict=True)]
    net.train()
    return torch.cat(parts).sigmoid().double().numpy()
