"""A model of hotrow beside the same one of FuxiCTR's layers: the same rows, width, batches and epochs, and no tuning.

    pip install fuxictr==2.3.10
    hotrow prepare criteo LOG.tsv --out DATA --min-count 2
    python -m benchmarks.models DATA [--seeds 5] [--out models.json]

DATA is a packed dataset with features of one id per row. Each model trains on its training rows for EPOCHS epochs with
Adam, by WIDTH columns and the layers of WIDTHS, for each seed; both sides take THREADS threads, in turns. AUC and
LogLoss are those of the test rows, with standard errors over seeds; a difference is hotrow's mean less FuxiCTR's, with
its error. Samples a second are those of training alone: FuxiCTR's side has all rows in tensors, and reads nothing. Its
Adam moves all rows of a table in each step, hotrow's those of the batch; and on its side numbers have vectors
(benchmarks/quality_nets.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from benchmarks.quality_nets import FuxiNet
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.objectives import OBJECTIVES
from hotrow.run.runs import train

EPOCHS, BATCH, WIDTH, WIDTHS, CROSSES, LR, THREADS = 2, 512, 16, (128, 64), 3, 0.001, 2
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "deepfm": ({"deep_mlp": list(WIDTHS), "dropout": 0.0}, "deepfm"),
    "dcn": ({"deep_mlp": list(WIDTHS), "num_cross_layers": CROSSES}, "dcnv2"),
}
"""By the name of hotrow's model: its options, and FuxiCTR's name."""


def ours(data: Path, name: str, seed: int) -> dict[str, float]:
    """Returns the metrics of hotrow's model, and the samples a second of its training."""
    raw = {
        "data": str(data),
        "model": {"name": name, "embedding_dim": WIDTH, "embedding_init": 0.01, **MODELS[name][0]},
        "optimizer": {"dense": {"name": "adam", "lr": LR}, "sparse": {"name": "adam", "lr": LR}},
        "train": {"batch_size": BATCH, "epochs": EPOCHS, "seed": seed, "threads": THREADS, "early_stopping": None},
        "memory": "dram",
    }
    with tempfile.TemporaryDirectory() as folder:
        record = train(make_config({**raw, "run": f"{folder}/run"}), quiet=True).record
        run = hotrow.load(f"{folder}/run")
        metrics = run.evaluate("test")
        run.close()
    return {"auc": metrics["auc"], "logloss": metrics["logloss"], "samples_per_s": float(record.samples_per_s or 0)}


def tensors_of(split: Split, firsts: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids in one table for all features, numbers and labels of all rows."""
    blocks = [split.block(index) for index in range(split.num_blocks)]
    ids = np.concatenate([np.stack([np.asarray(own, np.int64) for own in block.ids], 1) for block in blocks])
    numbers = np.concatenate([np.stack(block.dense, 1) for block in blocks])
    label = np.concatenate([block.label for block in blocks])
    return torch.from_numpy(ids + firsts), torch.from_numpy(numbers), torch.from_numpy(label)


def theirs(data: Path, name: str, seed: int) -> dict[str, float]:
    """Returns the same of FuxiCTR's."""
    dataset = PackedDataset.open(data)
    sizes = [dataset.info.table_by_name[feature.table].num_embeddings for feature in dataset.info.features]
    firsts = np.cumsum([0, *sizes])[:-1]
    ids, numbers, label = tensors_of(dataset.split("train"), firsts)
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    setting = {"dim": WIDTH, "widths": WIDTHS, "dropout": 0.0, "batch_norm": False, "crosses": CROSSES}
    net = FuxiNet(sizes, numbers.shape[1], setting | {"net": MODELS[name][1]})
    adam = torch.optim.Adam(net.parameters(), lr=LR)
    start_s = time.perf_counter()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(ids)).split(BATCH):
            loss = binary_cross_entropy_with_logits(net(ids[batch], numbers[batch]), label[batch])
            adam.zero_grad()
            loss.backward()
            adam.step()
    seconds = time.perf_counter() - start_s
    metrics = OBJECTIVES["binary_cross_entropy"].metrics()
    net.eval()
    with torch.no_grad():
        for own_ids, own_numbers, own_label in zip(
            *(each.split(8192) for each in tensors_of(dataset.split("test"), firsts)), strict=True
        ):
            metrics.update(net(own_ids, own_numbers), own_label)
    found = metrics.compute()
    return {"auc": found["auc"], "logloss": found["logloss"], "samples_per_s": EPOCHS * len(ids) / seconds}


def cell(data: Path, name: str, num_seeds: int) -> dict[str, Any]:
    """Returns means and standard errors over seeds of both sides, and how they differ."""
    sides: dict[str, list[dict[str, float]]] = {"hotrow": [], "fuxictr": []}
    for seed in range(1, num_seeds + 1):
        for side, run in (("hotrow", ours), ("fuxictr", theirs)):
            sides[side].append(run(data, name, seed))
    found: dict[str, Any] = {"model": name, "seeds": num_seeds}
    for side, runs in sides.items():
        found[side] = {"samples_per_s": statistics.median(one["samples_per_s"] for one in runs)}
        for figure in ("auc", "logloss"):
            values = [one[figure] for one in runs]
            error = statistics.stdev(values) / math.sqrt(num_seeds) if num_seeds > 1 else math.nan
            found[side] |= {figure: statistics.fmean(values), f"{figure}_se": error}
    one, other = found["hotrow"], found["fuxictr"]
    found["speedup"] = one["samples_per_s"] / other["samples_per_s"]
    for figure in ("auc", "logloss"):
        error = math.hypot(one[f"{figure}_se"], other[f"{figure}_se"])
        found[f"{figure}_difference"] = {"mean": one[figure] - other[figure], "error": error}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    found = []
    for name in given.models:
        found.append(cell(given.data, name, given.seeds))
        print(json.dumps(found[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
