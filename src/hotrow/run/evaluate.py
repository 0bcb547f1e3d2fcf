"""Scores of a split: each rank scores some batches, and all return the metrics that one process would return."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hotrow.data.packed.groups import Groups
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import Split
from hotrow.embedding import EmbeddingCollection
from hotrow.models.layers import Network
from hotrow.objectives.objective import Metrics, Objective
from hotrow.parallel.communicator import Communicator
from hotrow.run.build import look_up
from hotrow.run.items import MAX_JUDGED, Items
from hotrow.run.scores import spread
from hotrow.setup.beside import EVAL_BATCH_SIZE
from hotrow.setup.device import DenseDevice


@torch.no_grad()
def evaluate(
    embedding: EmbeddingCollection,
    model: Network,
    split: Split,
    objective: Objective,
    *,
    num_batches: int | None = None,
    dense: DenseDevice | None = None,
    comm: Communicator | None = None,
    metrics: Metrics | None = None,
    items: Items | None = None,
) -> dict[str, Any]:
    """Returns the metrics of `objective` over a split; an undefined metric is None.

    num_batches: how many batches of EVAL_BATCH_SIZE to evaluate, from the first; if None, all. dense: where the model
    computes; if None, on the CPU. comm: the ranks that share the tables; each scores whole batches, and all return what
    one process returns. metrics: empty; holds the outputs, labels and weights afterwards, for callers that need them.
    items: those to find, if the model finds items; outputs in `metrics` are then the places of the rows' items.
    """
    dense, comm = dense or DenseDevice(), comm or Communicator()
    metrics = objective.metrics() if metrics is None else metrics
    places = None if items is None else items.places(embedding, model, dense)
    groups = None if objective.by is None else Groups(split.info, objective.by)
    only, first = None if places is None else spread(split.num_rows, MAX_JUDGED), comm.rank * EVAL_BATCH_SIZE

    def own(num_samples: int) -> tuple[int, int]:
        return min(first, num_samples), min(first + EVAL_BATCH_SIZE, num_samples)

    def scored() -> Iterator[dict[str, Tensor]]:
        """Outputs, labels, weights and groups of batch after batch, on every rank. Of R batches in a row, each rank
        scores one, because a product's bits may depend on the rows it has."""
        for batch in Loader(split, comm.size * EVAL_BATCH_SIZE, shuffle_seed=None, part=own, only=only).epoch(0):
            rows = look_up(model, embedding, batch.sparse)
            outputs_B = dense.outputs(model, batch.dense, rows) if len(batch) else batch.label
            outputs_B = outputs_B.cpu() if places is None or not len(batch) else places(outputs_B, batch)
            del rows  # before those of the next batch come beside them
            columns = {"outputs": outputs_B.view(len(batch), batch.labels.shape[1]), "labels": batch.labels}
            columns |= {} if batch.weight is None else {"weights": batch.weight[:, None]}
            # A float64 is as exact as float32 and row numbers.
            columns |= {} if groups is None else {"groups": groups.of(batch).double()[:, None]}
            widths = [column.shape[1] for column in columns.values()]
            for each in comm.gather(torch.cat([*columns.values()], dim=1).flatten(), purpose="evaluation"):
                if len(each):
                    parts = torch.split(each.view(-1, sum(widths)), widths, dim=1)
                    yield dict(zip(columns, parts, strict=True))

    for found in islice(scored(), num_batches):
        metrics.update(**found)
    return metrics.figures()
