"""The dense part of a step as one CUDA graph: the host launches outputs, loss and gradients together.

    the first batch of a shape      launch by launch, as on a CPU
    the second one in a row         captured; from now on inputs are copied to memory of the graph, which is replayed
    an odd batch between these      launch by launch; the graph stays

A graph has the kernels of `loss.backward()` in their order, so the bits are the same. It knows where weights lie, not
what they are: steps, rates and checkpoints may change them. Numbers that are drawn, hooks, and sequences of rows are
left to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from typing_extensions import override

from hotrow.batch import Batch
from hotrow.models.layers import Dropout, Network
from hotrow.run.meters import LoopPart, Told, warning
from hotrow.setup.device import DenseDevice

Outputs: TypeAlias = tuple[Tensor, list[Any]]
"""A loss, and gradients, which are None for unused weights."""
Capture: TypeAlias = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]
"""From a function that computes them in memory that stays: where they lie, and a function that repeats it there."""


def on_cuda(work: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """As `Capture`. Raises RuntimeError if `work` waits for the device, or takes memory of the host."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # what is compiled or allocated at first use must not come while capturing
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may pin memory meanwhile. A capture that fails leaves its stream current.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    return found, graph.replay


class DenseGraph(LoopPart):
    """Replays forward, loss and backward of `model` on `device`; warns if they cannot be captured."""

    def __init__(self, model: nn.Module, device: torch.device, capture: Capture = on_cuda) -> None:
        self._model, self._device, self._capture = model, device, capture
        self._key: Any = None
        """What the graph was captured for."""
        self._last: Any = None
        self._replay: Callable[[], None]
        self._outputs: Outputs
        self.refused, self._is_said = "", False
        """Why nothing can be captured; empty if it can."""

    @classmethod
    def of(cls, model: Network, dense: DenseDevice) -> DenseGraph | None:
        """Returns a graph to capture, if the model computes on a GPU, from pooled rows, without dropout; else None."""
        draws = any(isinstance(module, Dropout) and module.share for module in model.modules())
        return None if dense.device.type != "cuda" or model.lookup != "pooled" or draws else cls(model, dense.device)

    def backward(self, batch: Batch, rows: Tensor, loss_of: Callable[[Batch, Tensor], Tensor]) -> Tensor | None:
        """Leaves the gradients that `loss_of(batch, rows).backward()` leaves, and returns the loss, 0-dim; both hold
        until the next call. Returns None, with nothing done, if the batch has to go launch by launch."""
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        if self.refused or _has_hooks(self._model) or any(weight.grad is not None for weight in weights):
            return None
        given = [own for own in (rows, batch.dense, batch.label, batch.weight) if own is not None]
        key = [(own.shape, own.dtype) for own in given], rows.requires_grad, [own.data_ptr() for own in weights]
        before, self._last = self._last, key
        if key != self._key and (key != before or not self._make(key, batch, given, weights, loss_of)):
            return None
        with torch.no_grad():
            for own, value in zip(self._inputs, given, strict=True):
                own.copy_(value, non_blocking=True)
        self._replay()
        loss, grads = self._outputs
        for weight, grad in zip(weights, grads, strict=False):
            weight.grad = grad
        if rows.requires_grad:
            rows.backward(grads[-1].to(rows.device))  # type: ignore[no-untyped-call]
        return loss

    def _make(self, key: Any, batch: Batch, given: list[Tensor], weights: list[nn.Parameter], loss_of: Any) -> bool:
        """Captures a graph for batches like this one; returns whether that is possible."""
        # An older graph gives its memory back, which it keeps as long as any of it is in use.
        self._key, self._replay, self._outputs = None, lambda: None, (torch.empty(0), [])
        self._inputs = [torch.empty(own.shape, dtype=own.dtype, device=self._device) for own in given]
        rows, dense, label, *weight = (
            own.copy_(value.detach()) for own, value in zip(self._inputs, given, strict=True)
        )
        rows.requires_grad_(given[0].requires_grad)
        static = replace(batch, dense=dense, label=label, weight=weight[0] if weight else None)
        wanted = [*weights, *([rows] if rows.requires_grad else [])]

        def work() -> Outputs:
            loss = loss_of(static, rows)
            return loss.detach(), _apart(torch.autograd.grad(loss, wanted, allow_unused=True), wanted)

        try:
            self._outputs, self._replay = self._capture(work)
        except RuntimeError as error:
            self.refused = str(error).partition("\n")[0]
            return False
        self._key = key
        return True

    @override
    def after_step(self, batch: Batch, loss: float | None) -> Told:
        if not self.refused or self._is_said:
            return None
        self._is_said = True
        text = f"dense layers are launched one by one, which is slower: a CUDA graph of them failed ({self.refused})"
        return warning(text, "dense_not_in_a_graph")


def _apart(grads: Iterable[Any], wanted: Iterable[Tensor]) -> list[Any]:
    """Returns gradients laid out as what they are of, no two in the same memory, as `backward` leaves them."""
    taken, found = set[int](), list[Any]()
    for grad, own in zip(grads, wanted, strict=True):
        if grad is not None and (grad.data_ptr() in taken or grad.stride() != own.stride()):
            grad = torch.empty_like(own).copy_(grad)
        taken.add(0 if grad is None else grad.data_ptr())
        found.append(grad)
    return found


def _has_hooks(model: nn.Module) -> bool:
    """Returns whether something is to be called while the model computes, which a graph would leave out."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    of_modules = any(getattr(module, name) for module in model.modules() for name in names)
    of_weights = any(own._backward_hooks or own._post_accumulate_grad_hooks for own in model.parameters())
    return of_modules or of_weights or _has_any_global_hook()  # type: ignore[no-untyped-call]
