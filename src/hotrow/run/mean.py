"""The moving mean of dense weights over steps (`train.ema`), by which a run scores while it trains the newest ones.

Rows of tables have none: a mean moves at every step, also where no batch looked, so it would touch every row of every
table and take as much memory again.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from hotrow.kernels import ops
from hotrow.models.layers import Network


class Mean:
    """`mean = mean + (1 - d) * (weight - mean)` after step t, from 0, with d = min(decay, (1 + t) / (10 + t)).

    Early means so forget the first, random weights. Each operation is rounded to float32, so that the bits depend on
    the weights alone, and weights that stay leave their mean as it is.
    """

    def __init__(self, model: Network, decay: float) -> None:
        self.network = copy.deepcopy(model).requires_grad_(requires_grad=False)
        """The model with the means for weights."""
        self._decay, self._of = decay, model
        self._means: list[Tensor] = [*self.network.parameters()]
        self._weights: list[Tensor] = [*model.parameters()]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Takes in the weights after step number `step`."""
        moves = torch._foreach_sub(self._weights, self._means)
        torch._foreach_mul_(moves, 1 - min(self._decay, (1 + step) / (10 + step)))
        torch._foreach_add_(self._means, moves)
        ops.flush_denormals(self._means)

    def restart(self) -> None:
        """Begins with the weights of now, as if there had been no step."""
        self.network.load_state_dict(self._of.state_dict())
