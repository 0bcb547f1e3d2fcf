"""The items that a model finds: which there are, how often training has each, and the rank of a row's item among all.

An item is an id of the model's first item feature that a training row has; its other features are those of the last
such row. Row 0 of a table stands for many rare ids, so it is not an item. The places are exact: each user's vector is
multiplied with every item's, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels.ops import product
from hotrow.models.layers import Network
from hotrow.objectives.sampled_softmax import NO_ITEM
from hotrow.setup.beside import EVAL_BATCH_SIZE
from hotrow.setup.device import DenseDevice

PIECE = 1 << 24
"""Scores at a time, of some users with all items: 64 MB."""
MAX_JUDGED = 1 << 15
"""Rows of a split, spread evenly over it, whose items are sought among all: each costs a product with every item."""
Places: TypeAlias = Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class Items:
    """The items of a dataset's training rows. Memory: 8 bytes a row of the table of ids and a feature of an item."""

    names: tuple[str, ...]
    """The features of an item, its id first."""
    ids: Tensor
    """Their ids by item, int64 [N, F]."""
    number_of: Tensor
    """By row of the table of ids, the number of its item, int32; -1 if it has none."""
    log_share: Tensor
    """By row of that table, the logarithm of the share of training rows that have it, float32."""
    num_dense: int

    @classmethod
    def of(cls, dataset: PackedDataset, names: Sequence[str]) -> Items:
        """Reads the items from the training rows. Raises ValueError if there are none."""
        info, split = dataset.info, dataset.split("train")
        places = [info.feature_names.index(name) for name in names]
        num_rows = info.table_by_name[info.features[places[0]].table].num_embeddings
        count, lasts = np.zeros(num_rows, np.int64), np.zeros((len(names), num_rows), np.int64)
        for block in map(split.block, range(split.num_blocks)):
            id_B = block.ids[places[0]]
            np.add.at(count, id_B, 1)
            for last, place in zip(lasts, places, strict=True):
                last[id_B] = block.ids[place]
        found = np.flatnonzero(count[1:]) + 1
        if not len(found):
            raise ValueError(
                f"{dataset.path}: no training row has an id of {names[0]!r} with a row of its own, so there is no item "
                "to find; prepare more rows, or with a smaller minimum count"
            )
        number_of = np.full(num_rows, -1, np.int32)
        number_of[found] = np.arange(len(found))
        with np.errstate(divide="ignore"):
            log_share = np.log(count / split.num_rows).astype(np.float32)
        ids = torch.from_numpy(lasts[:, found].T.copy())
        return cls(tuple(names), ids, torch.from_numpy(number_of), torch.from_numpy(log_share), len(info.dense))

    def labels(self, batch: Batch) -> Tensor:
        """Returns what a loss over items needs for each sample: label, id of the item, log share; float64 [B, 3]."""
        id_B = batch.sparse.bags(self.names[0])[0].long()
        return torch.stack([batch.labels[:, 0].double(), id_B.double(), self.log_share[id_B].double()], dim=1)

    def places(self, embedding: EmbeddingCollection, model: Network, dense: DenseDevice) -> Places:
        """Returns a function of outputs [B, 2 M] and their batch to the places of the samples' items, float32 [B].

        A place is the number of items with a higher score for the sample's user, plus half of the others with an equal
        one. It is NO_ITEM for ids that are not items, 0 for samples without label 1, and NaN for a score that is not
        finite. Makes the vectors of all items now, 4 M bytes each; every rank has to call it.
        """
        pieces = torch.split(self.ids, EVAL_BATCH_SIZE)
        vector_NM = torch.cat([self._vectors(ids_BF, embedding, model, dense) for ids_BF in pieces])

        def places(outputs_BO: Tensor, batch: Batch) -> Tensor:
            number_B = self.number_of[batch.sparse.bags(self.names[0])[0].long()].long()
            user_BM, place_B = outputs_BO.chunk(2, dim=1)[0], torch.where(number_B < 0, NO_ITEM, 0.0)
            judged = torch.nonzero((number_B >= 0) & (batch.labels[:, 0] > 0))[:, 0]
            for own in torch.split(judged, max(1, PIECE // len(vector_NM))):
                score_NB = product(vector_NM, user_BM[own.to(user_BM.device)])
                mine_1B = score_NB.gather(0, number_B[None, own].to(score_NB.device))
                above_B, not_below_B = (score_NB > mine_1B).sum(0), (score_NB >= mine_1B).sum(0)
                place = torch.where(mine_1B[0].isfinite(), (above_B + not_below_B - 1) / 2, torch.nan)
                place_B[own] = place.to("cpu", torch.float32)
            return place_B

        return places

    def _vectors(self, ids_BF: Tensor, embedding: EmbeddingCollection, model: Network, dense: DenseDevice) -> Tensor:
        """Returns the vectors of items [B, M]: those of samples that have nothing but an item."""
        num_items, names = len(ids_BF), embedding.feature_names
        lengths = torch.cat([torch.full((num_items,), int(name in self.names)) for name in names])
        values = torch.cat([ids_BF[:, self.names.index(name)] for name in names if name in self.names])
        rows = embedding(KeyedJaggedTensor(names, values, lengths=lengths))
        return dense.outputs(model, torch.zeros(num_items, self.num_dense), rows).chunk(2, dim=1)[1].contiguous()
