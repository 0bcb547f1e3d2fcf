"""The automatic recipe beside hand-made ones, on real rows: mean scores over seeds and paired differences.

    python -m benchmarks.recipe --data ../shared/data [--seeds 5] [--search] [--out FILE.json]

Hand-made: recipes/criteo-small.yaml, and the best of a search over optimizers, rates, batches and epochs for each file,
chosen by validation LogLoss (SEARCHED). With --search also the best of OTHERS, recipes outside that family: other
optimizers of tables and MLPs, other widths; the one with the lowest mean validation LogLoss is scored on the test rows.
A file's recipes train on the same rows from the same seeds; the weights that are best by validation LogLoss are scored
on its test rows. The label of Taobao is any behaviour but a page view. Each training has one thread.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import end_on_signals
from hotrow.config.load import apply_overrides, make_config
from hotrow.config.recipe import as_overrides, choose_recipe
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.run import runs

FILES = {
    "criteo 80k": "criteo_terabyte_80k.tsv.gz",
    "criteo 10k": "criteo_terabyte_day0_10k.tsv.gz",
    "taobao 110k": "taobao_userbehavior_110k.csv.gz",
    "taobao 10k": "taobao_userbehavior_tail_10k.csv.gz",
}
SEARCHED = {"criteo 80k": (1.8, 64, 3, 0.015), "criteo 10k": (4.0, 64, 6, 0.005)}
SEARCHED |= {"taobao 110k": (1.8, 64, 3, 0.015), "taobao 10k": (4.0, 64, 6, 0.015)}
"""Rate of the tables, batch, epochs and rate of the MLPs that had the lowest validation LogLoss (2 or 3 seeds)."""

OTHERS: dict[str, dict[str, Any]] = {
    "ftrl": {"optimizer.sparse": {"name": "ftrl", "lr": 0.1, "l1": 0.0, "l2": 1e-5}},
    "ftrl with l1": {"optimizer.sparse": {"name": "ftrl", "lr": 0.05, "l1": 1e-4, "l2": 1e-4}},
    "adagrad": {"optimizer.sparse": {"name": "adagrad", "lr": 0.02}},
    "adagrad, sum 0.01": {"optimizer.sparse": {"name": "adagrad", "lr": 0.05, "initial_accumulator_value": 0.01}},
    "row-wise adagrad": {
        "optimizer.sparse": {"name": "row_wise_adagrad", "lr": 0.03, "initial_accumulator_value": 0.001}
    },
    "adam": {
        "optimizer.sparse": {"name": "adam", "lr": 0.001},
        "optimizer.dense": {"name": "adam", "lr": 0.001},
    },
    "adam of the MLPs": {"optimizer.dense": {"name": "adam", "lr": 0.001, "weight_decay": 1e-5}},
    "sgd of the MLPs": {"optimizer.dense": {"name": "sgd", "lr": 0.1, "weight_decay": 1e-5}},
    "4 columns": {"model.embedding_dim": 4},
    "16 columns": {"model.embedding_dim": 16},
    "narrow MLPs": {"model.bottom_mlp": [32], "model.top_mlp": [32]},
    "wide MLPs": {"model.bottom_mlp": [128, 64], "model.top_mlp": [256, 128]},
}
"""What each recipe changes in the automatic one."""


def prepared(folder: Path, name: str, file: Path) -> PackedDataset:
    """The file as a packed dataset."""
    if name.startswith("criteo"):
        return run_prepare("criteo", file, folder / name)
    table = folder / f"{name}.csv"
    with gzip.open(file, "rt") as source, table.open("w", newline="") as target:
        rows = csv.writer(target)
        rows.writerow(["user", "item", "category", "ts", "wants"])
        for user, item, category, behaviour, ts in csv.reader(source):
            rows.writerow([user, item, category, ts, int(behaviour != "pv")])
    return run_prepare("csv", table, folder / name, label="wants", time="ts")


def hand_made(rate: float, batch_size: int, epochs: int, dense: float, num_rows: int) -> list[str]:
    """A recipe of the searched family."""
    small = {"model.embedding_dim": 8, "model.embedding_init": 0.0, "model.first_order": True}
    widths = {"model.bottom_mlp": [64], "model.top_mlp": [64, 32]}
    optimizers = {
        "optimizer.dense": {"name": "adagrad", "lr": dense, "weight_decay": 0.0003},
        "optimizer.sparse": {"name": "sgd", "lr": rate},
        "optimizer.schedule.decay_steps": epochs * math.ceil(num_rows / batch_size),
    }
    size = {"train.batch_size": batch_size, "train.epochs": epochs, "train.eval_every": 0.5, "train.early_stopping": 3}
    return as_overrides({**small, **widths, **optimizers, **size})


def scores(dataset: PackedDataset, overrides: list[str], seeds: int, *, split: str = "test") -> NDArray[np.float64]:
    """AUC, LogLoss and NE on the rows of `split`: [seeds, 3]."""
    found = []
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            raw: dict[str, Any] = {"data": str(dataset.path), "run": f"{folder}/run"}
            changes = [*overrides, f"train.seed={seed}", "train.threads=1"]
            run = runs.train(make_config(apply_overrides(raw, changes)), quiet=True)
            metrics = run.record.metrics[split]
            found.append([metrics["auc"], metrics["logloss"], metrics["ne"]])
    return np.array(found)


def automatic_of(dataset: PackedDataset) -> dict[str, Any]:
    """The recipe that `fit` would choose."""
    return choose_recipe(dataset.split("train").num_rows)


def search(dataset: PackedDataset) -> tuple[str, list[str]]:
    """The name and overrides of the recipe of OTHERS with the lowest mean validation LogLoss over two seeds."""
    automatic, found = automatic_of(dataset), {}
    for name, changes in OTHERS.items():
        logloss = scores(dataset, as_overrides(automatic | changes), 2, split="val")[:, 1].mean()
        found[name] = float(logloss)
        print(json.dumps({"recipe": name, "validation_logloss": round(found[name], 5)}), flush=True)
    best = min(found, key=found.__getitem__)
    return best, as_overrides(automatic | OTHERS[best])


def compare(dataset: PackedDataset, name: str, seeds: int, *, searching: bool) -> list[dict[str, Any]]:
    """A row for the automatic recipe, and one for each hand-made one with what the automatic one is better by."""
    num_rows = dataset.split("train").num_rows
    automatic = scores(dataset, as_overrides(automatic_of(dataset)), seeds)
    others = {"criteo-small": hand_made(1.8, 64, 3, 0.015, num_rows)}
    others["searched"] = hand_made(*SEARCHED[name], num_rows)
    others |= dict([search(dataset)]) if searching else {}
    rows = [row(name, "automatic", automatic)]
    for other, overrides in others.items():
        found = scores(dataset, overrides, seeds)
        rows.append(row(name, other, found) | {"automatic_minus": paired(automatic - found)})
    return rows


def row(file: str, recipe: str, found: NDArray[np.float64]) -> dict[str, Any]:
    """Means and standard deviations over seeds."""
    named = zip(("auc", "logloss", "ne"), found.mean(0), found.std(0, ddof=1), strict=True)
    return {"file": file, "recipe": recipe} | {name: [round(mean, 5), round(sd, 5)] for name, mean, sd in named}


def paired(difference: NDArray[np.float64]) -> dict[str, list[float]]:
    """Mean and standard error of a difference by seed."""
    errors = difference.std(0, ddof=1) / math.sqrt(len(difference))
    named = zip(("auc", "logloss", "ne"), difference.mean(0), errors, strict=True)
    return {name: [round(float(mean), 5), round(float(error), 5)] for name, mean, error in named}


def main() -> None:
    """Print a line a recipe, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--search", action="store_true", help="look outside the searched family too (half an hour)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)}; default: all")
    options = parser.parse_args()
    end_on_signals()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.files or FILES:
            dataset = prepared(Path(folder), name, options.data / FILES[name])
            for found in compare(dataset, name, options.seeds, searching=options.search):
                print(json.dumps(found), flush=True)
                rows.append(found)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
