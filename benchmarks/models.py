"""A model of hotrow beside the same model as FuxiCTR publishes it: the same rows, widths, batches, epochs and rates.

    pip install fuxictr==2.3.10
    git clone https://github.com/reczoo/FuxiCTR
    python -m benchmarks.models LOGS --zoo FuxiCTR [--seeds 5] [--models din ...] [--out models.json]

LOGS is a folder with the two files of `prepare`. Nobody tunes: all sides train EPOCHS epochs by Adam and are judged by
their last weights. FuxiCTR's side is the class of its model_zoo with its own loss and optimizer, whose options are as
published if `PAIRS` has no others. Its Adam moves all rows of a table at each step, hotrow's those of the batch; so on
a third side, `lazy`, FuxiCTR's class has an Adam that moves the batch's rows alone. Rows of ids begin on all sides
between minus and plus INIT, those of rare ids at 0. So do the vectors that FuxiCTR multiplies by numbers: as published
they begin so large that DeepFM's products of numbers drown all else (FuxiCTR itself makes ids of Criteo's numbers).

Each seed trains all sides, one after the other, with THREADS threads. AUC and LogLoss are those of the test rows, with
standard errors over seeds; a difference is hotrow's mean less the other side's. Samples a second are those of training
alone, the median of the seeds. FuxiCTR's sides have all rows in tensors, so they read nothing.

What remains different: hotrow has no vectors of numbers; dense layers begin with other distributions; and DIN's
attention has Dice in FuxiCTR, a ReLU in hotrow.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import histories
from hotrow.config.load import make_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.registry import TAOBAO_COLUMNS
from hotrow.data.sources.schema import parse_schema
from hotrow.objectives import OBJECTIVES
from hotrow.objectives.several import for_labels
from hotrow.run.runs import train

EPOCHS, BATCH, WIDTH, LR, INIT, THREADS = 2, 512, 16, 0.001, 0.01, 2
DEEP = [128, 64]
"""Widths of the hidden layers of every MLP that has no others."""


class Pair(NamedTuple):
    """A model on both sides."""

    rows: str
    """What it trains on, as `prepare` names it."""
    ours: dict[str, Any]
    """Options of hotrow's model."""
    file: str
    """The file of FuxiCTR's class, which has the class's name, in its model_zoo."""
    theirs: dict[str, Any]
    """Options of FuxiCTR's class."""


PAIRS = {
    "deepfm": Pair("criteo", {"deep_mlp": DEEP}, "DeepFM/DeepFM_torch/src/DeepFM.py", {"hidden_units": DEEP}),
    "dcn": Pair(
        "criteo",
        {"deep_mlp": DEEP, "num_cross_layers": 3},
        "DCNv2/src/DCNv2.py",
        {"parallel_dnn_hidden_units": DEEP, "num_cross_layers": 3},
    ),
    "finalmlp": Pair(
        "criteo",
        {"first_mlp": DEEP, "second_mlp": DEEP},
        "FinalMLP/src/FinalMLP.py",
        {"mlp1_hidden_units": DEEP, "mlp2_hidden_units": DEEP},
    ),
    "din": Pair(
        "histories",
        {"attention_mlp": [64], "top_mlp": DEEP},
        "DIN/src/DIN.py",
        {
            "attention_hidden_units": [64],
            "dnn_hidden_units": DEEP,
            "din_target_field": ["item", "category"],
            "din_sequence_field": ["item_history", "category_history"],
        },
    ),
    "mmoe": Pair(
        "labels",
        {"experts": 4, "expert_mlp": DEEP, "tower_mlp": [32]},
        "multitask/MMoE/src/MMoE.py",
        {
            "num_experts": 4,
            "expert_hidden_units": DEEP,
            "gate_hidden_units": [],
            "tower_hidden_units": [32],
            "num_tasks": 2,
            "task": ["binary_classification"] * 2,
        },
    ),
}
"""By the name of hotrow's model."""


def prepare(rows: str, logs: Path, out: Path) -> PackedDataset:
    """Prepares rows of clicks (`criteo`), of histories with drawn negatives, or of two labels, cart and buy."""
    events = logs / "taobao_userbehavior_110k.csv.gz"
    if rows == "criteo":
        return run_prepare("criteo", logs / "criteo_terabyte_80k.tsv.gz", out, min_count=2)
    if rows == "histories":
        return histories.prepare(events, out)
    schema = {
        "label": [{"column": "behaviour", "name": name, "positive": [name]} for name in ("cart", "buy")],
        "time": "time",
        "categorical": ["user", "item", "category"],
        "tables": {"default": {"min_count": 2}},
        "csv": {"column_names": list(TAOBAO_COLUMNS), "delimiter": ","},
    }
    return run_prepare("csv", events, out, schema=parse_schema(schema, where="labels"))


def ours(dataset: PackedDataset, name: str, seed: int) -> dict[str, float]:
    """Returns the metrics of hotrow's model, and the samples a second of its training."""
    adam = {"name": "adam", "lr": LR}
    raw = {
        "data": str(dataset.path),
        "model": {"name": name, "embedding_dim": WIDTH, "embedding_init": INIT, **PAIRS[name].ours},
        "optimizer": {"dense": adam, "sparse": adam},
        "train": {"batch_size": BATCH, "epochs": EPOCHS, "seed": seed, "threads": THREADS, "eval_every": None},
        "memory": "dram",
    }
    with tempfile.TemporaryDirectory() as folder:
        record = train(make_config({**raw, "run": f"{folder}/run"}), quiet=True).record
    return figures((record.metrics or {})["test"]) | {"samples_per_s": float(record.samples_per_s or 0)}


def theirs(dataset: PackedDataset, name: str, seed: int, zoo: Path, *, lazy: bool) -> dict[str, float]:
    """Returns the same of FuxiCTR's class. lazy: whether its Adam moves the rows of the batch alone."""
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    columns = columns_of(dataset, "train")
    model = published(dataset, columns, PAIRS[name], zoo)
    optimizers = lazy_adam(model) if lazy else [model.optimizer]
    start_s = time.perf_counter()
    for _ in range(EPOCHS):
        for batch in batches(columns, torch.randperm(dataset.split("train").num_rows), BATCH):
            loss = model.compute_loss(model(batch), model.get_labels(batch))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    seconds = time.perf_counter() - start_s
    labels = [label.name for label in dataset.info.labels]
    metrics = for_labels(OBJECTIVES["binary_cross_entropy"], labels).metrics()
    model.eval()
    with torch.no_grad():
        for batch in batches(columns_of(dataset, "test"), torch.arange(dataset.split("test").num_rows), 8192):
            scores = torch.cat([*model(batch).values()], 1).double()
            metrics.update(scores.logit(1e-7), torch.stack([batch[label] for label in labels], 1))
    return figures(metrics.compute()) | {"samples_per_s": EPOCHS * dataset.split("train").num_rows / seconds}


def published(dataset: PackedDataset, columns: dict[str, Tensor], pair: Pair, zoo: Path) -> Any:
    """Returns a model of FuxiCTR's class for these columns."""
    path = zoo / "model_zoo" / pair.file
    if not path.is_file():
        raise ValueError(f"--zoo is {zoo}, which has no model_zoo/{pair.file}: give a checkout of reczoo/FuxiCTR")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = {"optimizer": "adam", "loss": "binary_crossentropy", "learning_rate": LR, "embedding_dim": WIDTH}
    unused = {"verbose": 0, "model_root": "", "metrics": []}
    model = getattr(module, path.stem)(features_of(dataset, columns), **settings, **unused, **pair.theirs)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding) and layer.embedding_dim == WIDTH:
            nn.init.uniform_(layer.weight, -INIT, INIT)
            layer.weight.data[:2] = 0  # padding, and rare ids
        elif isinstance(layer, nn.Linear) and layer.in_features == 1:  # the vector of a number
            nn.init.uniform_(layer.weight, -INIT, INIT)
    return model


def features_of(dataset: PackedDataset, columns: dict[str, Tensor]) -> Any:
    """Returns what FuxiCTR must know of the columns: a FeatureMap."""
    from fuxictr.features import FeatureMap

    info, found = dataset.info, FeatureMap("rows", "")
    first = {feature.table: feature.name for feature in reversed(info.features)}
    found.features.update({dense.name: {"type": "numeric", "source": ""} for dense in info.dense})
    for feature in info.features:
        num_rows = info.table_by_name[feature.table].num_embeddings + 1
        own = {"type": "categorical", "source": "", "padding_idx": 0, "vocab_size": num_rows}
        if columns[feature.name].dim() == 2:
            own |= {"type": "sequence", "max_len": columns[feature.name].shape[1]}
        if first[feature.table] != feature.name:
            own["share_embedding"] = first[feature.table]
        found.features[feature.name] = own
    found.labels, found.num_fields = [label.name for label in info.labels], found.get_num_fields()
    found.default_emb_dim = WIDTH
    return found


def lazy_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns Adam for the tables, of which it moves the rows that have gradients, and Adam for all else."""
    tables = {layer.weight: layer for layer in model.modules() if isinstance(layer, nn.Embedding)}
    for layer in tables.values():
        layer.sparse = True
    rest = [own for own in model.parameters() if own not in tables]
    return [torch.optim.SparseAdam([*tables], lr=LR), torch.optim.Adam(rest, lr=LR)]


def columns_of(dataset: PackedDataset, split: str) -> dict[str, Tensor]:
    """Returns all rows of a split as FuxiCTR has them: a tensor for each column. Ids are one higher, since 0 pads."""
    info, num_rows = dataset.info, dataset.split(split).num_rows
    rows = next(iter(Loader(dataset.split(split), num_rows, shuffle_seed=None)))
    columns = {dense.name: rows.dense[:, k] for k, dense in enumerate(info.dense)}
    for feature in info.features:
        values, offsets, _ = rows.sparse.bags(feature.name)
        ids = values.long() + 1
        if feature.kind != "one_hot":
            ids = nn.utils.rnn.pad_sequence(ids.tensor_split(offsets[1:-1]), batch_first=True)
        columns[feature.name] = ids
    return columns | {label.name: rows.labels[:, k] for k, label in enumerate(info.labels)}


def batches(columns: dict[str, Tensor], order: Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    """Yields the rows in this order."""
    for own in order.split(size):
        yield {name: column[own] for name, column in columns.items()}


def figures(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns AUC and LogLoss of each label; the names of all but the first begin with the label."""
    return {name: metrics[name] for name in metrics if name.rpartition(".")[2] in ("auc", "logloss")}


def cell(dataset: PackedDataset, name: str, num_seeds: int, zoo: Path) -> dict[str, Any]:
    """Returns means and standard errors over seeds of all sides, and how hotrow differs from each other one."""
    sides: dict[str, list[dict[str, float]]] = {"hotrow": [], "fuxictr": [], "lazy": []}
    for seed in range(1, num_seeds + 1):
        sides["hotrow"].append(ours(dataset, name, seed))
        for side in ("fuxictr", "lazy"):
            sides[side].append(theirs(dataset, name, seed, zoo, lazy=side == "lazy"))
    speeds = {side: statistics.median(run.pop("samples_per_s") for run in runs) for side, runs in sides.items()}
    found: dict[str, Any] = {"model": name, "seeds": num_seeds, "samples_per_s": speeds}
    for figure in sides["hotrow"][0]:
        found[figure] = own = {}
        for side, runs in sides.items():
            values = [run[figure] for run in runs]
            error = statistics.stdev(values) / math.sqrt(num_seeds) if num_seeds > 1 else math.nan
            own[side] = {"mean": statistics.fmean(values), "error": error}
            if side != "hotrow":
                own[side]["difference"] = own["hotrow"]["mean"] - own[side]["mean"]
                own[side]["difference_error"] = math.hypot(own["hotrow"]["error"], error)
    return found


def main() -> None:
    """Prints one JSON object a line, for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("logs", type=Path)
    parser.add_argument("--zoo", type=Path, required=True, help="a checkout of FuxiCTR's repository")
    parser.add_argument("--models", nargs="*", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given, found = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        datasets = {
            rows: prepare(rows, given.logs, Path(folder) / rows)
            for rows in dict.fromkeys(PAIRS[name].rows for name in given.models)
        }
        for name in given.models:
            found.append(cell(datasets[PAIRS[name].rows], name, given.seeds, given.zoo))
            print(json.dumps(found[-1]), flush=True)
            if given.out:
                given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
