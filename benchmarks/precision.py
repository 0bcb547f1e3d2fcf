"""What storing and multiplying in fewer bits costs in accuracy, over five seeds on real and on synthetic rows.

    python -m benchmarks.precision [--out docs/measurements/benchmarks.json] [--data criteo_terabyte_80k.tsv.gz]
    [VARIANT ...]

Real rows: recipes/criteo-small.yaml trains on rows 1 to 64,000 and is scored on the 8,000 that follow. The file's last
8,000 rows, the test, are not read. The recipe trains tables by SGD and MLPs by Adagrad, which keeps the MLPs float32;
`dense_sgd` and `rowwise` variants train MLPs by SGD, whose weights `split_bf16` splits too. `rowwise` ones train tables
by row-wise Adagrad. Synthetic rows (variants `synthetic_`): two million clicks of Criteo Kaggle's shape with a planted
teacher, on a tenth of its rows, and 250,000 for the score.

`split_bf16` stores weights in two halves and computes in float32; `bf16` multiplies bfloat16 in the MLPs as well.
`split_8_low_bits` is no option of hotrow: after each step it clears the lower 8 of the lower 16 bits, as if a weight
had 24 (the ablation of the Split-SGD-BF16 paper); it shows whether the lower half is needed in full. Nor is
`bf16_interaction`, which rounds what goes into the interaction, and its gradients, to bfloat16 too.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks import bench
from benchmarks.hot_cells import make_shape
from benchmarks.results import end_on_signals, record
from hotrow.batch import Batch
from hotrow.config.load import load_config
from hotrow.data.prepare.prepare import run_prepare
from hotrow.kernels.ops import dot_interaction
from hotrow.models import dlrm
from hotrow.run import runs, trainer
from hotrow.run.build import Parts
from hotrow.run.meters import StepClock

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "criteo_terabyte_80k.tsv.gz"
NUM_TRAIN, NUM_VAL = 64_000, 8_000
NUM_SYNTHETIC, SYNTHETIC_SCALE = 2_500_000, 0.1
"""Clicks, of which four fifths are for training and a tenth for the score; share of the rows of Kaggle's tables."""
SEEDS = (1, 2, 3, 4, 5)
NUM_THREADS = 1  # batches of 64 gain nothing from a second
KEEP_24_BITS = -(1 << 8)  # as a mask of the int16 lower half
MAX_DIFFERENCE = 0.0005
"""How far the mean AUC and LogLoss of training in bfloat16 may lie from float32's, by our own promise."""

SGD = "optimizer.dense={name: sgd, lr: 0.1}"
SPLIT = "train.precision=split_bf16"
BF16 = (SPLIT, "train.dense_dtype=bf16")
ROWWISE = (SGD, "optimizer.sparse={name: row_wise_adagrad, lr: 0.005}")
SYNTHETIC = (
    "model.bottom_mlp=[256, 64]",
    "model.top_mlp=[256, 128]",
    "train.batch_size=2048",
    "train.eval_every=null",
)
SYNTHETIC_SGD = (*SYNTHETIC, "optimizer.sparse={name: sgd, lr: 20.0}")
SYNTHETIC_ROWWISE = (*SYNTHETIC, "optimizer.sparse={name: row_wise_adagrad, lr: 0.05}")


@dataclass(frozen=True)
class Variant:
    """A setting of a recipe, and the variant in float32 that it is compared to."""

    changes: tuple[str, ...]
    beside: str | None = None
    is_synthetic: bool = False

    @property
    def recipe(self) -> Path:
        return ROOT / "recipes" / ("criteo-kaggle.yaml" if self.is_synthetic else "criteo-small.yaml")


VARIANTS: dict[str, Variant] = {
    "fp32": Variant(()),
    "split_bf16": Variant((SPLIT,), "fp32"),
    "split_8_low_bits": Variant((SPLIT,), "fp32"),
    "fp16": Variant(("train.precision=fp16",), "fp32"),
    "fp32_dense_sgd": Variant((SGD,)),
    "split_bf16_dense_sgd": Variant((SGD, SPLIT), "fp32_dense_sgd"),
    "bf16_dense_sgd": Variant((SGD, *BF16), "fp32_dense_sgd"),
    "bf16_interaction": Variant((SGD, *BF16), "fp32_dense_sgd"),
    "fp32_rowwise": Variant(ROWWISE),
    "bf16_rowwise": Variant((*ROWWISE, *BF16), "fp32_rowwise"),
    "synthetic_fp32_sgd": Variant(SYNTHETIC_SGD, is_synthetic=True),
    "synthetic_bf16_sgd": Variant((*SYNTHETIC_SGD, *BF16), "synthetic_fp32_sgd", is_synthetic=True),
    "synthetic_fp32_rowwise": Variant(SYNTHETIC_ROWWISE, is_synthetic=True),
    "synthetic_bf16_rowwise": Variant((*SYNTHETIC_ROWWISE, *BF16), "synthetic_fp32_rowwise", is_synthetic=True),
}


def pack(data: Path, folder: Path) -> Path:
    """The rows as two days, of which Criteo's published split takes the second as half test, half validation.

    Its first half is the validation rows once more, so that the test rows stay unread.
    """
    with gzip.open(data) as file:
        lines = [file.readline() for _ in range(NUM_TRAIN + NUM_VAL)]
    for name, rows in (("day_0.tsv", lines[:NUM_TRAIN]), ("day_1.tsv", lines[NUM_TRAIN:] * 2)):
        (folder / name).write_bytes(b"".join(rows))
    return run_prepare("criteo", str(folder / "day_*.tsv"), folder / "packed", min_count=1).path


def clearing_low_bits(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`train_step`, after which lower halves keep their upper 8 bits alone."""

    def clearing(parts: Parts, batch: Batch, number: int, clock: StepClock) -> Tensor:
        loss = step(parts, batch, number, clock)
        for low in parts.embedding.low.values():
            low &= KEEP_24_BITS
        return loss

    return clearing


def rounding_vectors(interact: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """`dot_interaction` of vectors of bfloat16, whose gradients are rounded by the same casts."""
    return lambda dense, pooled: interact(dense.bfloat16().float(), pooled.bfloat16().float())


def validation(variant: str, seed: int, data: Path, run: Path) -> tuple[float, float]:
    """Train one seed of a variant and return the AUC and the LogLoss of its last evaluation."""
    chosen = VARIANTS[variant]
    changes = [f"data={data}", f"run={run}", f"train.seed={seed}", f"train.threads={NUM_THREADS}"]
    config = load_config(chosen.recipe, [*changes, *chosen.changes])
    plain = trainer.train_step
    rounding = patch.object(dlrm, "dot_interaction", rounding_vectors(dot_interaction))
    if variant == "split_8_low_bits":
        trainer.train_step = clearing_low_bits(plain)  # type: ignore[assignment]
    try:
        with rounding if variant == "bf16_interaction" else nullcontext():
            scores = runs.train(config, quiet=True).record.metrics["val"]
    finally:
        trainer.train_step = plain
        shutil.rmtree(run)
    return float(scores["auc"]), float(scores["logloss"])


def measure(variants: list[str], data: Path) -> list[dict[str, Any]]:
    """One row per variant: scores by seed, mean and sd, and the paired difference to the float32 run of the same seed.

    Prints every row as soon as it is there.
    """
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        packed: dict[bool, Path] = {}
        for name in variants:
            variant = VARIANTS[name]
            if variant.is_synthetic not in packed:
                packed[variant.is_synthetic] = (
                    make_shape("kaggle", NUM_SYNTHETIC, SYNTHETIC_SCALE, folder / "synthetic")
                    if variant.is_synthetic
                    else pack(data, folder)
                )
            found = [validation(name, s, packed[variant.is_synthetic], folder / f"{name}-{s}") for s in SEEDS]
            rows[name] = row_of(name, found, rows.get(variant.beside or ""))
            print(rows[name], file=sys.stderr, flush=True)
    return list(rows.values())


def row_of(name: str, found: Sequence[tuple[float, float]], beside: dict[str, Any] | None) -> dict[str, Any]:
    """The row of a variant whose seeds gave these AUCs and LogLosses; beside: float32's row, if it was measured."""
    row: dict[str, Any] = {"name": f"precision_{name}", "seeds": list(SEEDS)}
    aucs, loglosses = ([*values] for values in zip(*found, strict=True))
    row |= {"auc": statistics.mean(aucs), "sd": statistics.stdev(aucs), "aucs": aucs}
    row |= {"logloss": statistics.mean(loglosses), "logloss_sd": statistics.stdev(loglosses), "loglosses": loglosses}
    if beside is not None:
        for prefix, key in (("", "aucs"), ("logloss_", "loglosses")):
            differences = [ours - theirs for ours, theirs in zip(row[key], beside[key], strict=True)]
            row[f"{prefix}difference"] = statistics.mean(differences)
            row[f"{prefix}difference_sd"] = statistics.stdev(differences)
    if VARIANTS[name].changes[-len(BF16) :] == BF16:
        row["most_difference"] = MAX_DIFFERENCE
    return row


def main() -> None:
    """Train the variants and record the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default: all")
    parser.add_argument("--data", type=Path, default=DATA, help="the sample of 80,000 rows of Criteo 1TB")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    options = parser.parse_args()
    end_on_signals()
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"no variant is called {', '.join(sorted(unknown))}; choose from {', '.join(VARIANTS)}")
    cells = measure(options.variants or list(VARIANTS), options.data)
    record("precision", {"cells": cells, **bench.circumstances(), "threads": NUM_THREADS}, options.out)


if __name__ == "__main__":
    main()
