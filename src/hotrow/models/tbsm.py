"""TBSM (Ishkhanov et al., 2020): a DLRM makes a vector of each step, attention compares them with a target's.

    step j: its ids' and the sample's other rows, (position, dense) --bottom MLP, dots, top MLP--> z_j / |z_j|

    history z_0 .. z_{L-1} --> H_BTM --- H_BTM A^T A w_BM --attention MLP, sigmoid--> y_BT --> c_BM = sum_T y_BT H_BTM
    target  z_L            --> w_BM                                             [c | w] --final MLP--> logits_B

Names decide which ids are steps: feature `item_history` holds the earlier values of `item`, oldest first, and `item` is
the target's id; a feature without a history, such as `user`, is part of every step. The position of a step is
slot / (T + 1), and T / (T + 1) for the target; a history fills the last of its T slots.

The model follows facebookresearch/tbsm with the options of its Taobao script (`tsl`, `def`, one head, mechanism `mlp`):
vectors on the unit sphere, the inner product by A^T A with A ~ N(0, sqrt(1 / M)), an attention MLP over all T products
with a sigmoid at its end, ReLU after every layer of the step's DLRM, the position as a dense input, and the way weights
are drawn. It differs as follows. In the reference an absent step is an id 0 that is looked up, trained and attended to;
here it has no row, no product and no vector, so the other samples of a batch do not change what a short history gives.
The reference calls the DLRM once per step or for all slots; here it is called once, for the steps that exist. Dense
inputs of a sample, which the reference's data does not have, are part of every step. The reference's other options
(several heads, `mha`, `rnn`, other inner products) are not implemented.

Shape suffixes as in hotrow.batch, and: T history_steps, M width of z, S steps of a batch (histories, then targets), L
steps of its histories alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hotrow.models.layers import (
    MLP,
    Lookup,
    Network,
    dot_interaction,
    dots,
    product,
    repeated,
    sigmoid,
    unit,
    weighted_sum,
)
from hotrow.models.spec import Dataset, MLPSpec, SampleError, Steps, Width, histories_of


class TBSM(Network):
    """dense [B, I], rows of every feature not pooled (`EmbeddingCollection.sequence`) -> logits [B], or [B, L]
    if `num_outputs`, L, is above 1.

    num_dense: I. feature_names: of the collection. bottom_mlp: hidden widths, D is appended. top_mlp: widths of the
    step's top MLP, the last is M. attention_mlp: hidden widths between T and T. final_mlp: hidden, L is appended.
    history_steps: T. dropout: of the final MLP's hidden layers. generator: CPU generator from which all
    weights are drawn, in the order of the drawing above.

    Raises ValueError if no feature has a history, or a history has no feature; for a batch, if a history is longer than
    T, if histories of a sample differ in length, or if another feature does not have exactly one id.
    """

    lookup: ClassVar[Lookup] = "sequence"

    def __init__(
        self,
        *,
        num_dense: int,
        feature_names: Sequence[str],
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        attention_mlp: Sequence[int],
        final_mlp: Sequence[int],
        history_steps: int,
        dropout: float = 0.0,
        num_outputs: int = 1,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.histories = histories_of(feature_names, "tbsm")
        self.single = tuple(name for name in feature_names if name not in self.histories.values())
        self.history_steps = history_steps
        num_vectors = len(self.single) + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        width = top_mlp[-1]
        self.bottom = MLP([1 + num_dense, *bottom_mlp, embedding_dim], generator=generator)
        self.top = MLP([embedding_dim + num_pairs, *top_mlp], generator=generator)
        A_MM = torch.empty(width, width).normal_(0.0, math.sqrt(1.0 / width), generator=generator)
        self.inner_MM = nn.Parameter(A_MM)
        self.attention = MLP([history_steps, *attention_mlp, history_steps], generator=generator, last="linear")
        final = [2 * width, *final_mlp, num_outputs]
        self.final = MLP(final, generator=generator, last="linear", dropout=dropout)

    def forward(self, dense_BI: Tensor, rows: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Returns logits. rows: feature -> (values [.., D], offsets [B + 1]); offsets are in DRAM."""
        num_samples, num_slots = len(dense_BI), self.history_steps
        place_L = self._places(self._lengths(rows, num_samples)).to(dense_BI.device)
        z_SM = self._steps(dense_BI, rows, place_L)
        z_LM, w_BM = z_SM[: len(place_L)], z_SM[len(place_L) :]
        width = z_SM.shape[1]
        history_NM = z_SM.new_zeros(num_samples * num_slots, width).index_copy(0, place_L, z_LM)  # N = B * T
        target_BM = product(product(w_BM, self.inner_MM), self.inner_MM.T)
        products_BT = dots(history_NM, repeated(target_BM, num_slots)).view(num_samples, num_slots)
        y_BT = sigmoid(self.attention(products_BT))
        c_BM = weighted_sum(history_NM.view(num_samples, num_slots, width), y_BT)
        logits_BL: Tensor = self.final(torch.cat([c_BM, w_BM], dim=1))
        return logits_BL.squeeze(1)

    def _places(self, lengths_B: Tensor) -> Tensor:
        """Returns sample * T + slot of the histories' steps [L], in DRAM as the lengths are: no GPU is awaited."""
        num_slots, device = self.history_steps, lengths_B.device
        sample_L = torch.repeat_interleave(torch.arange(len(lengths_B), device=device), lengths_B)
        starts_B = lengths_B.cumsum(0) - lengths_B
        past_L = torch.arange(len(sample_L), device=device) - starts_B[sample_L]
        return sample_L * num_slots + num_slots - lengths_B[sample_L] + past_L

    def _steps(self, dense_BI: Tensor, rows: Mapping[str, tuple[Tensor, Tensor]], place_L: Tensor) -> Tensor:
        """Returns unit vectors z [S, M] of all steps, by one call of the DLRM. place_L: from `_places`."""
        num_slots = self.history_steps
        slot_S = torch.cat([place_L % num_slots, torch.full((len(dense_BI),), num_slots, device=place_L.device)])
        position_S = slot_S.to(torch.float32) / (num_slots + 1)
        dense_SI = torch.cat([dense_BI[place_L // num_slots], dense_BI])
        vectors = []
        for name in self.single:
            values_BD, history = rows[name][0], self.histories.get(name)
            # Every slot gets a copy, and each is taken once: backward sums in one order on any number of threads.
            past_LD = repeated(values_BD, num_slots)[place_L] if history is None else rows[history][0]
            vectors.append(torch.cat([past_LD, values_BD]))
        x_SD = self.bottom(torch.cat([position_S[:, None], dense_SI], dim=1))
        z_SM = self.top(dot_interaction(x_SD, torch.stack(vectors, dim=1)))
        return unit(z_SM)

    def _lengths(self, rows: Mapping[str, tuple[Tensor, Tensor]], num_samples: int) -> Tensor:
        """Returns the number of steps of each sample's history [B], after checking it."""
        for name in (*self.single, *self.histories.values()):
            if name not in rows:
                raise ValueError(f"feature {name!r} is missing from the batch; it has {', '.join(rows)}")
        for name in self.single:
            lengths_B = rows[name][1].diff()
            _check(lengths_B == 1, lengths_B, name, "but tbsm needs exactly one: names of histories end in _history")
        first, *others = self.histories.values()
        expected_B: Tensor = rows[first][1].diff()
        assert len(expected_B) == num_samples
        cure = f"but model.history_steps is {self.history_steps}; raise it, or prepare shorter histories"
        _check(expected_B <= self.history_steps, expected_B, first, cure)
        for name in others:
            lengths_B = rows[name][1].diff()
            _check(lengths_B == expected_B, lengths_B, name, f"but {first!r} has another number; steps must agree")
        return expected_B


class TBSMSpec(MLPSpec):
    """A DLRM makes a vector of every step of a history, and attention compares them with the last step's.

    Features named X_history hold the earlier ids of feature X (docs/prepare.md).
    """

    network: ClassVar = TBSM
    equal_dims: ClassVar = True
    small: ClassVar[Mapping[str, Any]] = {"bottom_mlp": [64], "top_mlp": [64, 32]}

    name: Literal["tbsm"] = "tbsm"
    """TBSM (Ishkhanov et al., 2020)."""
    bottom_mlp: list[Width] = [512, 256, 64]
    """Widths of the hidden layers of a step's bottom MLP; a last layer of `embedding_dim` is added."""
    top_mlp: list[Width] = [512, 256]
    """Widths of all layers of a step's top MLP; the last one is the width of the step's vector."""
    history_steps: Steps = 20
    """Most ids of a history; a longer one is an error."""
    attention_mlp: list[Width] = [15, 15]
    """Widths of the hidden layers between the products of all steps with the last and the steps' weights."""
    final_mlp: list[Width] = [60]
    """Widths of the hidden layers on the attended history beside the last step's vector; one logit is added.
    `dropout` acts on these alone."""

    def check_options(self) -> None:
        if not self.top_mlp:
            raise ValueError("top_mlp is [], but with tbsm its last width is that of a step's vector; give one or more")

    def check(self, dataset: Dataset) -> None:
        """Raises ValueError if histories are absent, longer than `history_steps`, or differ in length in a sample.

        The model itself would say so when it meets the batch. Reads every block once; checksums that are verified on
        the way are not verified again.
        """
        super().check(dataset)
        histories = histories_of([feature.name for feature in dataset.info.features], self.name)
        first, *others = histories.values()
        long = f"but model.history_steps is {self.history_steps}; raise it, or prepare shorter histories"
        unlike = f"but {first!r} has another number; steps must agree: prepare histories of equal lengths"
        for split, row, lengths in dataset.list_lengths([first, *others]):
            try:
                for name, own_B in lengths.items():
                    _check(own_B <= self.history_steps, own_B, name, long)
                    _check(own_B == lengths[first], own_B, name, unlike)
            except SampleError as error:
                at = f"{error.feature}, sample {row + error.sample:,} of {split} in {dataset.path}"
                raise ValueError(f"{at}: {error.reason}") from None

    def build(
        self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator, num_outputs: int = 1
    ) -> TBSM:
        (embedding_dim,) = set(dims.values())
        return TBSM(
            num_dense=num_dense,
            feature_names=list(dims),
            embedding_dim=embedding_dim,
            bottom_mlp=self.bottom_mlp,
            top_mlp=self.top_mlp,
            attention_mlp=self.attention_mlp,
            final_mlp=self.final_mlp,
            history_steps=self.history_steps,
            dropout=self.dropout,
            num_outputs=num_outputs,
            generator=generator,
        )


def _check(good_B: Tensor, lengths_B: Tensor, name: str, reason: str) -> None:
    if not torch.compiler.is_exporting() and not bool(good_B.all()):  # an exported graph has no errors
        sample = int((~good_B).nonzero()[0])
        raise SampleError(sample, f"feature {name!r}", f"{int(lengths_B[sample])} ids, {reason}")
