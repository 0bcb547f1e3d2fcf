"""Whether a model computes the same bits at another address and on another number of threads: tried once in a run.

Only then are results the same on any number of ranks, because where a micro-batch lies in memory depends on how many
there are. hotrow's own layers are exact (models/layers.py); torch's products and sums are not on every processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.kernels import ops
from hotrow.setup.device import DenseDevice

CODE = "inexact_model"
"""The warning's name in run.json."""
ADVICE = (
    "results will depend on the number of ranks: build the model from hotrow.models.layers, whose products and sums "
    "are exact, instead of torch's"
)
ADVICE_FOR_BFLOAT16 = (
    "torch's products in bfloat16 divide large batches among threads: train every rank on as many threads, or set "
    "train.dense_dtype to fp32"
)


class FirstPart:
    """Keeps what `model` is called with first, one micro-batch: dense inputs and rows."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._given = model, None
        self._hook = model.register_forward_pre_hook(self._keep)

    def _keep(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():  # rows may be scored before the first step
            self._hook.remove()
            self._given = _placed(given, 0)

    def differing(self, dense: DenseDevice) -> list[str]:
        """Returns what differs in its bits if the same micro-batch lies 4 bytes further, or if there is one more
        thread: "the logits", or gradients by the name of their parameter or of the rows' feature.

        Changes no weight, buffer, gradient or random state.
        """
        if self._given is None:  # this rank had no sample
            return []
        threads = torch.get_num_threads()
        with _unchanged(self._model) as anew:
            truth = self._computed(dense, 0, anew)
            told = _unlike(truth, self._computed(dense, 1, anew))
            try:
                torch.set_num_threads(threads + 1)
                if ops.backend().threads == threads + 1:  # not in a forked child
                    told += _unlike(truth, self._computed(dense, 0, anew))
            finally:
                torch.set_num_threads(threads)
        return list(dict.fromkeys(told))

    def _computed(self, dense: DenseDevice, offset: int, anew: Any) -> dict[str, Tensor]:
        """Returns the logits, and the gradients of weights and rows. offset: floats before each tensor."""
        anew()
        inputs_BI, rows = _placed(self._given, offset)
        logits_B = dense.outputs(self._model, inputs_BI, rows)
        values = (
            {"rows": rows} if isinstance(rows, Tensor) else {f"rows of {name}": own for name, (own, _) in rows.items()}
        )
        leaves = {n: leaf for n, leaf in [*self._model.named_parameters(), *values.items()] if leaf.requires_grad}
        grads = torch.autograd.grad(logits_B, [*leaves.values()], logits_B.detach(), allow_unused=True)
        named = {f"the gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
        return {"the logits": logits_B.detach(), **named}


def _placed(given: Any, offset: int) -> Any:
    """Returns a copy of what a model takes, its floats `offset` floats behind where torch puts a tensor."""
    if isinstance(given, Tensor) and given.is_floating_point():
        whole = given.new_empty(offset + given.numel())
        return whole[offset:].view(given.shape).copy_(given.detach()).requires_grad_(given.requires_grad)
    if isinstance(given, dict):
        return {name: _placed(each, offset) for name, each in given.items()}
    return tuple(_placed(each, offset) for each in given) if isinstance(given, tuple) else given


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[Any]:
    """Yields a function that puts buffers and torch's random state where they were; so does the end of the block."""
    before, state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()

    def restore() -> None:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, own in zip(model.buffers(), before, strict=True):
                buffer.copy_(own)

    try:
        yield restore
    finally:
        restore()


def _unlike(truth: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Returns the names of what has other bits."""

    def bits(values: Tensor) -> Tensor:
        return values.contiguous().view(-1).view(torch.uint8)  # a gradient may be one column of another

    return [name for name, values in truth.items() if not torch.equal(bits(values), bits(found[name]))]
