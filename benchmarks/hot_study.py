"""The study `hot`: how much of a dataset is hot, and what training on hot and cold batches does.

    coverage    a hot set of so many bytes, or by a threshold  ->  share of samples all of whose rows are hot, and
                what an epoch sends over the link to a fast device beside the hybrid of CPU tables and a device's MLP
    cached      so many bytes of slots before the tables, and mixed batches  ->  the same, and which rows were there
    quality     an epoch of a hot schedule beside one in shuffled order, from the same weights, over seeds

Bytes over the link are counted from the data; a quality cell has them only in reports of before, whose runs metered a
link that a second memory of the machine stood at the end of.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.hot_cells import SHAPES, HotCell, counted, has_histories, make_shape, sizes_of
from hotrow.config.load import make_config
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.run.runs import train

LINK = "12GB"
"""Bytes per second of the modelled link: what a PCIe 3.0 x16 slot carries, as in the paper's machine."""
PREPARE_PER_S, COVERAGE_PER_S, TRAIN_PER_S = 1e5, 1e6, 3e4  # samples; used in the estimate only
BELOW = 0.001
"""The target AUC is this much below the lowest final AUC of shuffled training."""
LEARNED = 0.99
"""A run whose LogLoss stays above this share of the LogLoss of the click rate alone has learned next to nothing."""
NOT_MEASURED = "not measured"
MODES = {
    "embeddings on the CPU by hotrow, MLPs on the GPU": "",
    "turns of hot and cold batches, as published": ">= 2.34",
    "slots on the GPU, mixed batches": ">= turns; a tenth of the rows in slots: >= 70% of all in HBM",
    "slots on the GPU, hot and cold batches": "",
    "all in HBM": "",
}
"""Ways to train with a GPU, and the promised speed relative to torch's tables on the CPU with MLPs on the GPU. This
study times none of them; benchmarks/gpu.py does."""
FAILURES = (ValueError,)
"""Errors that end the cells of one dataset but not the study."""


def expand(group: Mapping[str, Any], axes: Mapping[str, Any], *, memory_bytes: int) -> list[HotCell]:
    """Returns the cells of a group of the preset."""
    found = [{**group["fixed"], **dict(zip(axes, values, strict=True))} for values in product(*axes.values())]
    return [HotCell(group=group["name"], kind=group["kind"], **fields) for fields in found]


def with_data(preset: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Returns the preset, and its quick form, with packed datasets among their sources.

    Raises ValueError if a path is not a packed dataset.
    """
    for path in paths:
        if not Path(path).is_dir():
            raise ValueError(
                f"data is {path!r}, which is not a folder: the study hot needs a packed dataset, which "
                "`hotrow prepare` makes; plain traces are for `python -m benchmarks.study memory`"
            )
        PackedDataset.open(path, verify="sizes")

    def more(axes: Mapping[str, Any]) -> dict[str, Any]:
        return {**axes, "source": [*axes["source"], *paths]} if "source" in axes else dict(axes)

    groups = [{**group, "axes": more(group["axes"])} for group in preset["groups"]]
    quick = {name: more(axes) for name, axes in preset["quick"]["axes"].items()}
    return {**preset, "groups": groups, "quick": {**preset["quick"], "axes": quick}}


def setup_of(cell: HotCell) -> tuple[Any, ...]:
    """Returns a value that is equal for cells on the same dataset."""
    return cell.source, str(cell.num_samples), str(cell.scale)


def refusal(cell: HotCell, *, memory_bytes: int, cores: int) -> str | None:
    """Returns why the cell cannot be measured here, or None."""
    if cell.source not in SHAPES:
        return None
    num_rows = sum(table.num_embeddings for table in SHAPES[cell.source](1, scale=cell.scale).tables)
    needed = 2 * num_rows * cell.embedding_dim * 4
    if needed > memory_bytes:
        return f"tables and copies of hot rows may take {needed / 1e9:.1f} GB, --memory allows {memory_bytes / 1e9:.1f}"
    return None


def estimate_s(cells: Sequence[HotCell]) -> float:
    """Returns about how many seconds the cells take: making the data of shapes, reading it, training on it."""
    samples = {setup_of(cell): samples_of(cell) for cell in {setup_of(cell): cell for cell in cells}.values()}
    made = sum(count / PREPARE_PER_S for setup, count in samples.items() if setup[0] in SHAPES)
    read = sum(samples[setup_of(cell)] / COVERAGE_PER_S for cell in cells)
    return made + read + sum(2 * c.seeds * samples[setup_of(c)] / TRAIN_PER_S for c in cells if c.kind == "quality")


def samples_of(cell: HotCell) -> int:
    """Returns the number of samples of its data, in all splits."""
    if cell.source in SHAPES:
        return cell.num_samples
    dataset = PackedDataset.open(cell.source, verify="sizes")
    return sum(dataset.split(name).num_rows for name in dataset.splits)


def headline(row: Mapping[str, Any]) -> str:
    """Returns the main figure of a row."""
    if row["kind"] == "coverage":
        return f"{row['hot_samples']:.1%} of the samples are hot"
    if row["kind"] == "cached":
        return f"{row['hybrid_ratio']:.2f} times fewer bytes"
    return f"AUC {row['auc_fae']:.4f}, shuffled {row['auc_baseline']:.4f}"


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the page needs beside the rows."""
    speedups = [{"mode": mode, "promised": bar, "speedup": NOT_MEASURED} for mode, bar in MODES.items()]
    return {"link_bytes_per_s": LINK, "speedups": speedups}


# ---- measuring


def measure(cells: Sequence[HotCell], *, quick: bool, folder: Path) -> Iterator[tuple[HotCell, dict[str, Any] | str]]:
    """Yields the cells, all of one dataset, with their rows, or with the reason why there is none."""
    first = cells[0]
    with tempfile.TemporaryDirectory(prefix="hotrow-study-", dir=folder) as there:
        path = Path(first.source)
        if first.source in SHAPES:
            path = make_shape(first.source, first.num_samples, first.scale, Path(there) / first.name)
        dataset = PackedDataset.open(path)
        for cell in cells:
            try:
                row = quality(cell, dataset, Path(there)) if cell.kind == "quality" else counted(cell, dataset)
            except ValueError as error:  # no hot set fits the budget, or no batch fits the slots
                yield cell, str(error)
            else:
                yield cell, {"key": cell.key, "name": cell.name, **asdict(cell), **row}


def quality(cell: HotCell, dataset: PackedDataset, folder: Path) -> dict[str, Any]:
    """Trains with the schedule and in shuffled order, for every seed."""
    _, table_bytes = sizes_of(cell, dataset)
    budget = int(cell.amount * table_bytes)
    runs: dict[str, list[dict[str, Any]]] = {"baseline": [], "fae": []}
    for seed in range(1, cell.seeds + 1):
        for side, schedule in (("baseline", "none"), ("fae", cell.schedule)):
            runs[side].append(epoch(config_of(cell, dataset, budget, schedule, seed), folder / f"{side}-{seed}"))
    return {"budget_bytes": budget, "table_bytes": table_bytes, "seeds": cell.seeds, **compared(runs)}


def config_of(cell: HotCell, dataset: PackedDataset, budget_bytes: int, schedule: str, seed: int) -> Config:
    """Returns the config of an epoch: of a DLRM with the defaults, or of the published TBSM for data with histories."""
    hot: dict[str, Any] = {"schedule": schedule}
    if schedule != "none":
        hot |= {"budget": budget_bytes, "rows": cell.rows, "small_table": cell.small_table}
    if schedule in ("fae", "fixed"):
        hot |= {"rate": cell.rate}
    return make_config(
        {
            "data": str(dataset.path),
            "model": {"embedding_dim": cell.embedding_dim, **model_of(cell, dataset)},
            "optimizer": {"sparse": {"name": cell.optimizer}, "dense": dense_of(dataset), **decay_of(cell, dataset)},
            "train": {"batch_size": cell.batch_size, "seed": seed, "eval_every": 0.1},
            "memory": "dram",
            "hot": hot,
        },
        origin="the study",
    )


def model_of(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """Returns the options of the model that FAE trains on such data."""
    if not has_histories(dataset):
        return {"bottom_mlp": [cell.width], "top_mlp": [cell.width]} if cell.width else {}
    widths: dict[str, Any] = {"bottom_mlp": [], "top_mlp": [15, 15], "attention_mlp": [15, 15], "final_mlp": [60]}
    return {"name": "tbsm", **widths}


def dense_of(dataset: PackedDataset) -> dict[str, Any]:
    """Returns the dense optimizer. The MLPs of a TBSM are narrow, and with the default, SGD, most seeds learn next to
    nothing in an epoch, so that two orders of the samples could not be compared.
    """
    return {"name": "adagrad", "lr": 0.05} if has_histories(dataset) else {}


def decay_of(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """Returns the schedule of the learning rates, if they fall at all."""
    steps = math.ceil(dataset.split("train").num_rows / cell.batch_size)
    falling = math.ceil(cell.decay * steps)
    return {"schedule": {"decay_start_step": max(1, steps - falling), "decay_steps": falling}} if falling else {}


def epoch(config: Config, folder: Path) -> dict[str, Any]:
    """Trains one epoch, removes the run's files, and returns its figures."""
    run = train(config.model_copy(update={"run": str(folder)}), quiet=True)
    record, lines = run.record, run.measurements()
    shutil.rmtree(folder)
    if record.status == "interrupted":  # the signal was meant for the study
        raise KeyboardInterrupt
    return {
        **{name: record.metrics["test"][name] for name in ("auc", "logloss", "accuracy", "ne")},
        "train_s": record.train_s,
        "num_samples": record.rows["train"],
        "num_steps": record.steps,
        "curve": [(line["step"], line["auc"]) for line in lines if line["kind"] == "eval" and line["split"] == "val"],
        "swaps": [line for line in lines if line["kind"] == "swap"],
        "hot": record.hot,
    }


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Compares both sides over seeds: means, spreads, paired differences, and the time to the same AUC."""
    unlearned = sum(not run["ne"] < LEARNED for run in runs["baseline"])
    found: dict[str, Any] = {"num_steps": runs["baseline"][0]["num_steps"], "unlearned_seeds": unlearned}
    for name in ("auc", "logloss", "accuracy"):
        found |= paired(name, {side: [float(run[name]) for run in own] for side, own in runs.items()})
    target = min(run["curve"][-1][1] for run in runs["baseline"]) - BELOW
    found["target_auc"] = target
    for side, own in runs.items():
        shares = [share_until(run, target) for run in own]
        reached = [share for share in shares if share is not None]
        found[f"epochs_to_auc_{side}"] = statistics.median(reached) if len(reached) == len(shares) else None
        found[f"train_s_{side}"] = statistics.median(float(run["train_s"]) for run in own)
    return {**found, **hot_figures(runs["fae"])}


def paired(name: str, values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns each side's mean and standard deviation over seeds, the mean difference and its standard error."""
    found: dict[str, float] = {}
    for side, own in values.items():
        found |= {f"{name}_{side}": statistics.mean(own), f"{name}_{side}_sd": statistics.stdev(own)}
    differences = [b - a for a, b in zip(values["baseline"], values["fae"], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {**found, f"{name}_difference": statistics.mean(differences), f"{name}_difference_se": error}


def share_until(run: Mapping[str, Any], auc: float) -> float | None:
    """Returns the share of the epoch after which the validation AUC reached `auc`; None if it never did."""
    return next((step / run["num_steps"] for step, value in run["curve"] if value >= auc), None)


def hot_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what was hot in the scheduled runs, and how often phases changed."""
    hot = [run["hot"] for run in runs]
    rates = [line["rate"] for line in runs[0]["swaps"]]
    return {
        "hot_bytes": hot[0]["hot_bytes"],
        "hot_rows": hot[0]["hot_rows"],
        "hot_samples": hot[0]["hot_samples"],
        "num_swaps": statistics.mean(len(run["swaps"]) for run in runs),
        "rates": rates,
        "preprocess_s": statistics.median(own["calibrate_s"] + own["classify_s"] for own in hot),
    }
