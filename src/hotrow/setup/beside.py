"""What a process will hold beside its tables: memory that a budget for tables has to leave.

What the process holds already is not counted here, because the system counts it in what is available. memory.py takes
the sum from a budget, before anything is made.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotrow.config.schema import Config
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.loader import WINDOW_ROWS
from hotrow.data.packed.reader import PackedDataset
from hotrow.models.layers import Network
from hotrow.tables import TableConfig

EVAL_BATCH_SIZE = 4096
"""Samples that are scored at once."""
FIXED_BYTES = 48 << 20
"""What the smallest model takes: thread pools, buffers of files, checksums. 20 MiB were measured on two cores; the rest
is for what the kernel holds for a process, and for pages of libraries that it cannot drop."""
COMPILER_BYTES = 80 << 20
"""torch's compiler, which the first optimizer imports: 74 MiB were measured."""
WEIGHT_COPIES = {True: 5, False: 2}
"""Copies of the dense layers' weights: with gradients, two states of the optimizer, and one on its way to a file."""
LOOKUP_BYTES = 64
"""For each id of a batch: the id, its place, its slot, and the same again in sorted order."""
TIERS_COPIES = 3
"""Copies of the rows of a batch, if rows lie in tiers: those on their way from and to the disk, for
the batches that are looked up ahead. 1.3 to 2.5 were measured."""
_METRIC_BYTES, _METRIC_PIECE = 17, (1 << 20, 48)
"""The bytes that metrics keep and sort for each scored row, and the rows that they turn into float64 at a time."""
_SAMPLES = (2, 4)
"""Sizes of the batches on which a model shows what it allocates: the difference is for each sample."""


def beside_bytes(
    config: Config, dataset: PackedDataset, tables: Sequence[TableConfig], *, training: bool = True
) -> int:
    """Returns about how many bytes this process will take beside its tables and what it holds now.

    dataset: what is trained on, or the vocabularies of a run that scores. tables: all of the run's. training: if False,
    the model only scores. Ask before you ask the system what is available: building a model imports modules, which the
    process then holds.
    """
    dims = {name: table.embedding_dim for table in tables for name in table.feature_names}
    num_dense = len(dataset.info.dense)
    model = config.model.build_for(dataset.info, dims=dims, generator=torch.Generator().manual_seed(0))
    lengths = mean_lengths(dataset) if training else dict.fromkeys(dims, 1.0)  # nobody knows those of new rows
    rows = {name: split.num_rows for name, split in dataset.splits.items()}
    scored = max((number for name, number in rows.items() if name != "train"), default=EVAL_BATCH_SIZE)
    total = FIXED_BYTES + WEIGHT_COPIES[training] * sum(4 * p.numel() for p in model.parameters())
    total += _sample_bytes(model, num_dense, dims, lengths, training=False) * min(EVAL_BATCH_SIZE, scored)
    total += _METRIC_BYTES * len(dataset.info.labels) * scored + _METRIC_PIECE[1] * min(scored, _METRIC_PIECE[0])
    if training:
        total += 0 if "torch._dynamo" in sys.modules else COMPILER_BYTES
        batch_size = min(config.train.batch_size, rows.get("train", 0))
        total += _sample_bytes(model, num_dense, dims, lengths, training=True) * batch_size
        total += math.ceil(TIERS_COPIES * 4 * sum(dims.values()) * batch_size)
        total += _window_bytes(config, dataset, lengths)
    return total


def mean_lengths(dataset: PackedDataset) -> dict[str, float]:
    """Returns the mean number of ids of each feature, from the first block of training rows."""
    found = {feature.name: 1.0 for feature in dataset.info.features}
    lists = [feature.name for feature in dataset.info.features if feature.kind != "one_hot"]
    if lists and dataset.split("train").num_blocks:
        block = dataset.split("train").block(0)
        for name in lists:
            ids = cast(Ragged, block.ids[dataset.info.feature_names.index(name)])
            found[name] = len(ids.values) / max(1, len(block.label))
    return found


def _window_bytes(config: Config, dataset: PackedDataset, lengths: Mapping[str, float]) -> int:
    """Returns what the loader gathers at a time. Columns of lists are there twice while a window follows another."""
    if not config.train.shuffle:
        return 0
    info = dataset.info
    lists = [feature for feature in info.features if feature.kind != "one_hot"]
    ids = sum(2 * lengths[own.name] * np.dtype(info.id_dtype(own)).itemsize for own in lists)
    loaders = 2 if config.hot.takes_turns else 1  # of hot and of cold batches
    return math.ceil(loaders * min(WINDOW_ROWS, dataset.split("train").num_rows) * (info.row_bytes + ids + 8))


def _sample_bytes(
    model: Network, num_dense: int, dims: Mapping[str, int], lengths: Mapping[str, float], *, training: bool
) -> int:
    """Returns what a sample of a batch takes: its ids and rows, and all that the model allocates for it. What is freed
    on the way counts too: the allocator seldom gives it back, and cannot always use it again."""

    def allocated(num_samples: int) -> int:
        """Bytes of the rows of a batch, and of what the model allocates for it."""
        seen = _Allocations()
        with torch.set_grad_enabled(training), seen:
            rows: Any = torch.zeros(num_samples, sum(dims.values()), requires_grad=training)
            if model.lookup == "sequence":
                per_sample = {name: math.ceil(lengths[name]) for name in dims}
                rows = {
                    name: (
                        torch.zeros(num_samples * per_sample[name], dim, requires_grad=training),
                        torch.arange(num_samples + 1) * per_sample[name],
                    )
                    for name, dim in dims.items()
                }
            logits_B: Tensor = model(torch.zeros(num_samples, num_dense), rows)
            if training:
                logits_B.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return seen.num_bytes

    few, many = map(allocated, _SAMPLES)
    ids = sum(lengths[name] for name in dims)
    return (many - few) // (_SAMPLES[1] - _SAMPLES[0]) + math.ceil(LOOKUP_BYTES * ids + 8 * num_dense)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Counts the bytes of the tensors that torch's operations make; views and what is changed in place are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because nothing compiles this; otherwise torch imports its compiler here, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = {
            storage.data_ptr(): storage.nbytes()
            for leaf in tree_leaves(out)
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()).data_ptr() not in given
        }
        self.num_bytes += sum(made.values())
        return out
