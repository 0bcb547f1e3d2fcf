"""TBSM in plain torch, one DLRM call per step over padded histories: what ours is held against."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Step = tuple[str, str | None]
"""A feature and its history, None for one that stands in every step."""


def layers(widths: Sequence[int], generator: torch.Generator) -> nn.ModuleList:
    """Linear layers as the reference draws them."""
    made = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(widths))
    with torch.no_grad():
        for layer in made:
            layer.weight.normal_(0, (2 / sum(layer.weight.shape)) ** 0.5, generator=generator)
            layer.bias.normal_(0, (1 / len(layer.bias)) ** 0.5, generator=generator)
    return made


def apply(x: Tensor, made: nn.ModuleList, last: str) -> Tensor:
    for k, layer in enumerate(made):
        x = layer(x)
        x = torch.relu(x) if last == "relu" or k < len(made) - 1 else x
    return x


class PlainTBSM(nn.Module):
    """features: (name, history name or None) in the order of the dot products; rows: of each one's nn.Embedding."""

    def __init__(
        self,
        features: Sequence[Step],
        rows: Sequence[int],
        *,
        dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
        attention: Sequence[int],
        final: Sequence[int],
        steps: int,
        seed: int,
        num_dense: int = 0,
        init_bound: float | None = None,
    ) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.features, self.steps, width = list(features), steps, top[-1]
        self.tables = nn.ModuleList(nn.Embedding(n, dim, sparse=True) for n in rows)
        for table in self.tables:
            bound = len(table.weight) ** -0.5 if init_bound is None else init_bound
            with torch.no_grad():
                table.weight.uniform_(-bound, bound, generator=g)
                table.weight[0] = 0  # rare and unseen ids
        num_pairs = len(rows) * (len(rows) + 1) // 2
        self.bottom = layers([1 + num_dense, *bottom, dim], g)
        self.top = layers([dim + num_pairs, *top], g)
        self.A = nn.Parameter(torch.empty(width, width).normal_(0, width**-0.5, generator=g))
        self.attention = layers([steps, *attention, steps], g)
        self.final = layers([2 * width, *final, 1], g)

    def step(self, slot: int, dense: Tensor, ids: Sequence[Tensor]) -> Tensor:
        """The unit vector of one step, from one id per feature [B]."""
        position = torch.full((len(dense), 1), slot / (self.steps + 1))
        x = apply(torch.cat([position, dense], 1), self.bottom, "relu")
        vectors = torch.stack([x, *(table(i) for table, i in zip(self.tables, ids, strict=True))], 1)
        dots = vectors @ vectors.transpose(1, 2)
        pairs = [dots[:, i, j] for i in range(vectors.shape[1]) for j in range(i)]
        z = apply(torch.cat([x, torch.stack(pairs, 1)], 1), self.top, "relu")
        return z / z.norm(dim=1, keepdim=True).clamp(min=1e-12)

    def forward(self, dense: Tensor, ids: dict[str, Tensor], lengths: Tensor) -> Tensor:
        """Logits [B]; ids: [B] of features, [B, steps] of histories, at the end of their slots, anything before."""
        H = []
        for slot in range(self.steps):
            at = [ids[name] if history is None else ids[history][:, slot] for name, history in self.features]
            there = (slot >= self.steps - lengths)[:, None]
            H.append(torch.where(there, self.step(slot, dense, at), 0.0))
        w = self.step(self.steps, dense, [ids[name] for name, _ in self.features])
        target = torch.einsum("nm,bm->bn", self.A.T @ self.A, w)
        products = torch.stack([(h * target).sum(1) for h in H], 1)
        y = torch.sigmoid(apply(products, self.attention, "linear"))
        context = sum(y[:, [slot]] * h for slot, h in enumerate(H))
        return apply(torch.cat([context, w], 1), self.final, "linear")[:, 0]
