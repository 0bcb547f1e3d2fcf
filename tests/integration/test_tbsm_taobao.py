"""TBSM on real rows: two hours of Taobao prepared, trained, and held against plain torch on the same samples.

The truth is tests/plain_tbsm.py under torch's own optimizers: other code, other draws, the same task.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

from hotrow import runs
from hotrow.config import make_config
from hotrow.data.loader import Loader
from hotrow.data.packed import PackedDataset
from hotrow.data.prepare import run_prepare
from hotrow.data.schema import parse_schema
from hotrow.data.taobao import HISTORIES_SCHEMA
from plain_tbsm import PlainTBSM

FEATURES = (("user", None), ("item", "item_history"), ("category", "category_history"))
DIM, STEPS, BATCH_SIZE = 8, 6, 128
DENSE_LR, SPARSE_LR = 0.002, 0.1
MODEL: dict[str, Any] = {"bottom_mlp": [], "top_mlp": [15, 15], "attention_mlp": [15, 15], "final_mlp": [60]}


@pytest.fixture(scope="module")
def dataset(real_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Every event of a user but the first is a target; two hours leave few of a user."""
    value = HISTORIES_SCHEMA.to_json()
    value["histories"] |= {"every": 1, "length": STEPS}
    out = tmp_path_factory.mktemp("taobao") / "data"
    path = real_data("taobao_userbehavior_110k.csv.gz")
    return run_prepare("taobao-histories", path, out, schema=parse_schema(value, where="test"))


def ours(dataset: PackedDataset, folder: Path, *, seed: int, epochs: int) -> dict[str, float]:
    """Test metrics of a run."""
    raw = {
        "data": str(dataset.path),
        "run": str(folder),
        "model": {"name": "tbsm", "embedding_dim": DIM, "history_steps": STEPS, **MODEL},
        "optimizer": {"dense": {"name": "adam", "lr": DENSE_LR}, "sparse": {"name": "adagrad", "lr": SPARSE_LR}},
        "train": {"batch_size": BATCH_SIZE, "epochs": epochs, "eval_every": None, "seed": seed, "threads": 2},
    }
    metrics: dict[str, float] = runs.train(make_config(raw), quiet=True).record["metrics"]["test"]
    return metrics


def padded(batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """A batch as PlainTBSM takes it."""
    ids = {}
    for name, history in FEATURES:
        ids[name] = batch.sparse.bags(name)[0].long()
        if history is not None:
            values, offsets, _ = batch.sparse.bags(history)
            lengths = offsets.diff()
            slots = torch.arange(STEPS) >= STEPS - lengths[:, None]
            ids[history] = torch.zeros(len(lengths), STEPS, dtype=torch.int64).masked_scatter(slots, values.long())
    return batch.dense, ids, lengths


def plain(dataset: PackedDataset, *, seed: int, epochs: int) -> dict[str, float]:
    """Test metrics of plain torch."""
    rows = {table.name: table.num_embeddings for table in dataset.info.tables}
    widths = {name.removesuffix("_mlp"): value for name, value in MODEL.items()}
    model = PlainTBSM(FEATURES, [rows[name] for name, _ in FEATURES], dim=DIM, steps=STEPS, seed=seed, **widths)
    tables = list(model.tables.parameters())
    others = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizers = [torch.optim.Adam(others, lr=DENSE_LR), torch.optim.Adagrad(tables, lr=SPARSE_LR)]
    loader = Loader(dataset.split("train"), BATCH_SIZE, shuffle_seed=1000 + seed)
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(*padded(batch)), batch.label).backward()
            for optimizer in optimizers:
                optimizer.step()
    with torch.no_grad():
        test = list(Loader(dataset.split("test"), 4096, shuffle_seed=None).epoch(0))
        logits = torch.cat([model(*padded(batch)) for batch in test])
    label = torch.cat([batch.label for batch in test])
    return {"auc": auc(logits.numpy(), label.numpy()), "logloss": float(binary_cross_entropy_with_logits(logits, label))}


def auc(scores: NDArray[np.float32], label: NDArray[np.float32]) -> float:
    """Share of pairs in the right order, ties half."""
    positive, negative = scores[label == 1], np.sort(scores[label == 0])
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.mean() / 2 / len(negative))
