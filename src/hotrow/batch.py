"""The data of a step: a batch of dense values, jagged ids and labels.

Shape legend, used in suffixes everywhere: B batch, F sparse features, D embedding dim, I dense inputs, N table rows.

A `KeyedJaggedTensor` holds, for every feature and every sample, a bag of ids. Feature-major, as in torchrec:

                    sample 0   sample 1   sample 2
    feature "user"  [7]        []         [4, 7]         values  = [7, 4, 7 | 2, 2, 9]
    feature "item"  [2]        [2, 9]     []             offsets = [0, 1, 1, 3, 4, 6, 6]   (F * B + 1 of them)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


_TORCHREC_METHODS = ("keys", "values", "weights_or_none", "offsets")


class KeyedJaggedTensor:
    """Bags of ids by feature and sample; torchrec's layout and argument names.

    keys: feature names, length F. values: int32 or int64 ids [sum of lengths], feature-major.
    weights: optional float32 per-id weights, same length as values.
    lengths: int [F * B], or offsets: int [F * B + 1]. With neither, every bag holds exactly one id (values is [F * B]):
    the common case of one-hot features, for which kernels need no offsets.

    If lengths and offsets are both given, they must agree. Raises ValueError naming the argument, or the feature and
    sample, if shapes, dtypes or numbers do not fit together.
    """

    __slots__ = ("_offsets", "keys", "parts", "stride", "values", "weights")

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise ValueError(f"keys is the text {keys!r}; pass a list of feature names, such as [{keys!r}]")
        self.keys = tuple(keys)
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"keys {self.keys} repeat a feature name; each feature appears once")
        if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
            raise ValueError(
                f"values is {values.dtype} with shape {tuple(values.shape)}; pass a 1-D int32 or int64 tensor of ids"
            )
        if values.device.type != "cpu":
            raise ValueError(f"values is on {values.device}; this version computes on the CPU: pass values.cpu()")
        if weights is not None and (weights.shape != values.shape or weights.dtype != torch.float32):
            raise ValueError(
                f"weights is {weights.dtype} {tuple(weights.shape)}; pass float32 of the shape of values "
                f"{tuple(values.shape)}"
            )
        offsets = self._checked_offsets(lengths, offsets, values.numel())
        num_bags = values.numel() if offsets is None else offsets.numel() - 1
        self._check_bags(num_bags)
        self.values = values.contiguous()
        self.weights = None if weights is None else weights.contiguous()
        self._offsets = offsets
        self.stride = num_bags // max(len(self.keys), 1)
        """Number B of samples in the batch."""
        self.parts: tuple[int, ...] | None = None
        """Where micro-batches begin among the samples, and the end of the last, from 0 to B; if None, they are one."""

    def _checked_offsets(self, lengths: Tensor | None, offsets: Tensor | None, num_values: int) -> Tensor | None:
        """Returns int64 offsets that rise from 0 to `num_values`, from either argument; if both are given they must
        agree."""
        for name, given in (("lengths", lengths), ("offsets", offsets)):
            if given is None:
                continue
            if given.dtype not in _INTEGERS or given.dim() != 1 or (name == "offsets" and not given.numel()):
                wanted = "[F * B]" if name == "lengths" else "[F * B + 1]"
                raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}; pass a 1-D integer tensor {wanted}")
        if lengths is not None:
            self._check_bags(lengths.numel())
            lengths = lengths.to(torch.int64)
            self._check_lengths("length", lengths, num_values, "it must be 0 or more")
            summed = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
            torch.cumsum(lengths, 0, out=summed[1:])
            if int(summed[-1]) != num_values:
                raise ValueError(f"lengths sum to {int(summed[-1])}, but there are {num_values} values")
            if offsets is not None and not torch.equal(summed, offsets.to(torch.int64)):
                raise ValueError("lengths and offsets disagree about where bags start; pass one of them")
            return summed
        if offsets is None:
            return None
        offsets = offsets.to(torch.int64).contiguous()
        self._check_bags(offsets.numel() - 1)
        if int(offsets[0]) != 0 or int(offsets[-1]) != num_values:
            raise ValueError(
                f"offsets must rise from 0 to the number of values ({num_values}); "
                f"got {int(offsets[0])} .. {int(offsets[-1])}"
            )
        self._check_lengths("length by the offsets", offsets.diff(), num_values, "offsets must rise")
        return offsets

    def _check_lengths(self, what: str, lengths: Tensor, num_values: int, rule: str) -> None:
        """Raises ValueError unless each length is in [0, num_values]; longer ones could overflow to the right sum."""
        if bool((lengths < 0).any()):
            raise ValueError(self._explain_bag(what, lengths, lengths < 0, rule))
        if bool((lengths > num_values).any()):
            cure = f"there are {num_values} values in all"
            raise ValueError(self._explain_bag(what, lengths, lengths > num_values, cure))

    def _check_bags(self, num_bags: int) -> None:
        if num_bags % max(len(self.keys), 1) or (num_bags and not self.keys):
            raise ValueError(
                f"{num_bags} bags do not divide among {len(self.keys)} keys; lengths must be [F * B], offsets one "
                "more, and without them values [F * B]"
            )

    def _explain_bag(self, what: str, lengths: Tensor, bad: Tensor, cure: str) -> str:
        bag = int(bad.nonzero()[0])
        feature, sample = divmod(bag, lengths.numel() // len(self.keys))
        return f"feature {self.keys[feature]!r}, sample {sample}: the {what} is {int(lengths[bag])}; {cure}"

    @classmethod
    def from_dense(cls, keys: Sequence[str], ids_BF: Tensor) -> KeyedJaggedTensor:
        """Makes bags of one id from an integer matrix [B, F], column f for keys[f]. Raises ValueError for other
        input."""
        if ids_BF.dim() != 2 or ids_BF.shape[1] != len(keys) or ids_BF.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"ids are {ids_BF.dtype} with shape {tuple(ids_BF.shape)}; pass int32 or int64 [B, {len(keys)}], one "
                f"column for each of {', '.join(keys)}"
            )
        return cls(keys, ids_BF.t().reshape(-1))

    @classmethod
    def of_rows(cls, key: str, rows: Tensor, starts: Sequence[int]) -> KeyedJaggedTensor:
        """Returns one bag of one id for each of `rows`, in micro-batches as `in_parts` has them."""
        made = cls.unchecked((key,), rows, None, None, len(rows))
        made.parts = tuple(starts)
        return made

    @classmethod
    def unchecked(
        cls, keys: tuple[str, ...], values: Tensor, weights: Tensor | None, offsets: Tensor | None, stride: int
    ) -> KeyedJaggedTensor:
        """Returns bags of one micro-batch, of which nothing is checked: for those who make some at every step."""
        made = cls.__new__(cls)
        made.keys, made.values, made.weights, made._offsets = keys, values, weights, offsets
        made.stride, made.parts = stride, None
        return made

    @classmethod
    def of(cls, bags: Any) -> KeyedJaggedTensor:
        """Returns `bags`, or makes it from another library's object with torchrec's methods, sharing its ids.

        Raises ValueError for anything else, and for one whose features have different numbers of samples.
        """
        if isinstance(bags, cls):
            return bags
        if not all(callable(getattr(bags, name, None)) for name in _TORCHREC_METHODS):
            raise ValueError(
                f"the ids are a {type(bags).__name__}; pass a hotrow.KeyedJaggedTensor, a torchrec KeyedJaggedTensor, "
                "or to forward a tensor [B, F] of int32 or int64"
            )
        keys, offsets = list(bags.keys()), bags.offsets()
        if getattr(bags, "variable_stride_per_key", bool)():
            raise ValueError(
                f"the KeyedJaggedTensor of {', '.join(keys)} has a number of samples of its own for each feature; pass "
                "one with as many samples for every feature"
            )
        return cls(keys, bags.values(), bags.weights_or_none(), offsets=offsets)

    @property
    def one_hot(self) -> bool:
        """Whether every bag is known to hold exactly one id: it was made without lengths and offsets."""
        return self._offsets is None

    @property
    def offsets(self) -> Tensor:
        """Int64 bag starts [F * B + 1]; made on demand for one-hot batches."""
        if self._offsets is None:
            return torch.arange(self.values.numel() + 1)
        return self._offsets

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def with_values(self, values: Tensor) -> KeyedJaggedTensor:
        """Returns the same bags with other ids: int32 or int64, as many as before."""
        assert values.shape == self.values.shape
        changed = self.unchecked(self.keys, values, self.weights, self._offsets, self.stride)
        changed.parts = self.parts
        return changed

    def in_parts(self, starts: Sequence[int] | None) -> KeyedJaggedTensor:
        """Returns the same bags, cut into micro-batches: part k holds the samples from starts[k] to starts[k + 1].

        starts: rising from 0 to the number of samples; parts may be empty. If None, one micro-batch. Raises ValueError.
        """
        parts = None if starts is None else tuple(starts)
        if parts is not None and not (parts[0] == 0 and parts[-1] == self.stride and list(parts) == sorted(parts)):
            raise ValueError(
                f"parts start at {list(parts)}; they must rise from 0 to the {self.stride} samples there are"
            )
        changed = self.with_values(self.values)
        changed.parts = parts
        return changed

    def samples(self, start: int, stop: int) -> KeyedJaggedTensor:
        bags = [slice(f * self.stride + start, f * self.stride + stop) for f in range(len(self.keys))]
        offsets = self.offsets
        ids = [slice(int(offsets[own.start]), int(offsets[own.stop])) for own in bags]
        weights = None if self.weights is None else torch.cat([self.weights[own] for own in ids])
        lengths = None if self.one_hot else torch.cat([self.lengths[own] for own in bags])
        return KeyedJaggedTensor(self.keys, torch.cat([self.values[own] for own in ids]), weights, lengths=lengths)

    def key_ends(self) -> list[int]:
        """Returns where the ids of each key start, and where those of the last key end."""
        num_keys = len(self.keys)
        if self._offsets is None or not self.stride:
            return [k * self.stride for k in range(num_keys + 1)]
        ends: list[int] = self._offsets[:: self.stride].tolist()
        return ends

    def span(self, key: str) -> slice:
        """Returns the slice of `values` that holds the ids of a feature."""
        f = self.keys.index(key)
        ends = f * self.stride, (f + 1) * self.stride
        return slice(*ends) if self._offsets is None else slice(*(int(self._offsets[end]) for end in ends))

    def bags(self, key: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns `(values, offsets [B + 1], weights)` of one feature as views; offsets start at 0."""
        f, span = self.keys.index(key), self.span(key)
        offsets = self.offsets[f * self.stride : (f + 1) * self.stride + 1]
        return self.values[span], offsets - offsets[0], None if self.weights is None else self.weights[span]

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor({len(self.keys)} features x {self.stride} samples, {self.values.numel()} ids)"


@dataclass(frozen=True)
class Batch:
    """One mini-batch: dense float32 [B, I], sparse ids, label float32 [B], or [B, L] if samples have several labels."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor
    of_samples: int | None = None
    """Samples of the global batch, if this is one rank's part of it; None if this is the whole."""
    weight: Tensor | None = None
    """How much each sample counts in the loss, float32 [B]; if None, each counts 1."""

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return len(self) if self.of_samples is None else self.of_samples

    @property
    def labels(self) -> Tensor:
        """The labels as a matrix, [B, L]; L is 1 if `label` is [B]."""
        return self.label if self.label.dim() == 2 else self.label[:, None]

    def __len__(self) -> int:
        return len(self.label)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Returns the batch with dense values, labels and weights on `device`; ids stay in host memory."""
        dense, label = (each.to(device, non_blocking=non_blocking) for each in (self.dense, self.label))
        weight = None if self.weight is None else self.weight.to(device, non_blocking=non_blocking)
        return Batch(dense, self.sparse, label, self.of_samples, weight)

    def __iter__(self) -> Iterator[Tensor | KeyedJaggedTensor]:
        return iter((self.dense, self.sparse, self.label))
