"""What flows through a step: a batch of dense values, jagged ids and labels.

Shape legend, used in suffixes everywhere: B batch, F sparse features, D embedding dim, I dense inputs, N table rows.

A `KeyedJaggedTensor` holds, for every feature and every sample, a bag of ids. Feature-major, as in torchrec:

                    sample 0   sample 1   sample 2
    feature "user"  [7]        []         [4, 7]         values  = [7, 4, 7 | 2, 2, 9]
    feature "item"  [2]        [2, 9]     []             offsets = [0, 1, 1, 3, 4, 6, 6]   (F * B + 1 of them)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class KeyedJaggedTensor:
    """Bags of ids by feature and sample; torchrec's layout and argument names.

    keys: feature names, length F. values: int32 or int64 ids [sum of lengths], feature-major.
    weights: optional float32 per-id weights, same length as values.
    lengths: int [F * B], or offsets: int [F * B + 1]. With neither, every bag holds exactly one id (values is [F * B]),
    the common case of one-hot features, for which kernels skip the offsets altogether.

    Raises ValueError where shapes and dtypes do not fit together.
    """

    __slots__ = ("_offsets", "keys", "stride", "values", "weights")

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self.keys = tuple(keys)
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"keys {self.keys} repeat a feature name; each feature appears once")
        if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
            raise ValueError(
                f"values is {values.dtype} with shape {tuple(values.shape)}; pass a 1-D int32 or int64 tensor"
            )
        if weights is not None and (weights.shape != values.shape or weights.dtype != torch.float32):
            raise ValueError(
                f"weights is {weights.dtype} {tuple(weights.shape)}; pass float32 of the shape of values "
                f"{tuple(values.shape)}"
            )
        if lengths is not None and offsets is None:
            offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
            torch.cumsum(lengths, 0, out=offsets[1:])
        num_bags = values.numel() if offsets is None else offsets.numel() - 1
        if num_bags % max(len(self.keys), 1) or num_bags < 0:
            raise ValueError(f"{num_bags} bags do not divide among {len(self.keys)} keys; lengths must be [F * B]")
        if offsets is not None:
            offsets = offsets.to(torch.int64).contiguous()
            if int(offsets[0]) != 0 or int(offsets[-1]) != values.numel() or bool((offsets.diff() < 0).any()):
                raise ValueError(
                    f"offsets must rise from 0 to the number of values ({values.numel()}); "
                    f"got {int(offsets[0])} .. {int(offsets[-1])}"
                )
        self.values = values.contiguous()
        self.weights = None if weights is None else weights.contiguous()
        self._offsets = offsets
        self.stride = num_bags // max(len(self.keys), 1)
        """Samples B in the batch."""

    @classmethod
    def from_dense(cls, keys: Sequence[str], ids_BF: Tensor) -> KeyedJaggedTensor:
        """One id per bag from an integer matrix [B, F] (column f belongs to keys[f])."""
        return cls(keys, ids_BF.t().reshape(-1))

    @property
    def one_hot(self) -> bool:
        """Whether every bag is known to hold exactly one id (constructed without lengths and offsets)."""
        return self._offsets is None

    @property
    def offsets(self) -> Tensor:
        """Int64 bag starts [F * B + 1]; made on demand for one-hot batches."""
        if self._offsets is None:
            return torch.arange(self.values.numel() + 1)
        return self._offsets

    @property
    def lengths(self) -> Tensor:
        """Int64 bag lengths [F * B]."""
        return self.offsets.diff()

    def bags(self, key: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(values, offsets [B + 1], weights)` of one feature, as views, offsets starting at 0."""
        f = self.keys.index(key)
        offsets = self.offsets[f * self.stride : (f + 1) * self.stride + 1]
        span = slice(int(offsets[0]), int(offsets[-1]))
        return self.values[span], offsets - offsets[0], None if self.weights is None else self.weights[span]

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor({len(self.keys)} features x {self.stride} samples, {self.values.numel()} ids)"


@dataclass(frozen=True)
class Batch:
    """One mini-batch: dense float32 [B, I], sparse ids, label float32 [B]."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor

    def __len__(self) -> int:
        return self.label.numel()

    def __iter__(self) -> Iterator[Tensor | KeyedJaggedTensor]:
        return iter((self.dense, self.sparse, self.label))
