"""What storing weights in fewer bits costs in accuracy, over five seeds of recipes/criteo-small.yaml.

    python -m benchmarks.precision [--out docs/benchmarks.json] [--data criteo_terabyte_80k.tsv.gz] [VARIANT ...]

Each variant trains on rows 1 to 64,000 and is scored on the 8,000 that follow. The file's last 8,000 rows, the test,
are not read. `split_8_low_bits` is no option of hotrow: after each step it clears the lower 8 of the lower 16 bits, as
if a weight had 24 (the ablation of the Split-SGD-BF16 paper); it shows whether the lower half is needed in full. The
recipe's MLPs are trained by Adagrad and stay float32; `_dense_sgd` variants use SGD, which `split_bf16` splits
too.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import bench
from benchmarks.results import end_on_signals, record
from hotrow.batch import Batch
from hotrow.config.load import load_config
from hotrow.data.prepare.prepare import run_prepare
from hotrow.run import runs, trainer
from hotrow.run.meters import StepClock
from hotrow.run.setup import Parts

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "criteo-small.yaml"
DATA = ROOT.parent / "shared" / "data" / "criteo_terabyte_80k.tsv.gz"
NUM_TRAIN, NUM_VAL = 64_000, 8_000
SEEDS = (1, 2, 3, 4, 5)
NUM_THREADS = 1  # batches of 64 gain nothing from a second
KEEP_24_BITS = -(1 << 8)  # as a mask of the int16 lower half
SGD = "optimizer.dense={name: sgd, lr: 0.1}"
VARIANTS: dict[str, list[str]] = {
    "fp32": [],
    "split_bf16": ["train.precision=split_bf16"],
    "split_8_low_bits": ["train.precision=split_bf16"],
    "fp16": ["train.precision=fp16"],
    "fp32_dense_sgd": [SGD],
    "split_bf16_dense_sgd": [SGD, "train.precision=split_bf16"],
}
"""What each changes in the recipe. Others are compared to the fp32 one with the same dense optimizer."""


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


def validation_auc(variant: str, seed: int, data: Path, run: Path) -> float:
    """Train one seed of a variant and return the AUC of its last evaluation."""
    changes = [f"data={data}", f"run={run}", f"train.seed={seed}", f"train.threads={NUM_THREADS}"]
    config = load_config(RECIPE, [*changes, *VARIANTS[variant]])
    plain = trainer.train_step
    if variant == "split_8_low_bits":
        trainer.train_step = clearing_low_bits(plain)  # type: ignore[assignment]
    try:
        return float(runs.train(config, quiet=True).record.metrics["val"]["auc"])
    finally:
        trainer.train_step = plain


def measure(variants: list[str], data: Path) -> list[dict[str, Any]]:
    """One row per variant: AUC by seed, mean and sd, and the paired difference to the float32 run of the same seed."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        packed = pack(data, folder)
        for variant in variants:
            found[variant] = [validation_auc(variant, s, packed, folder / f"{variant}-{s}") for s in SEEDS]
            print(variant, [f"{auc:.4f}" for auc in found[variant]], file=sys.stderr, flush=True)
    rows = []
    for variant, aucs in found.items():
        base = "fp32_dense_sgd" if variant.endswith("_dense_sgd") else "fp32"
        name = f"precision_{variant}"
        row: dict[str, Any] = {"name": name, "auc": statistics.mean(aucs), "sd": statistics.stdev(aucs)}
        if base in found and variant != base:
            differences = [ours - theirs for ours, theirs in zip(aucs, found[base], strict=True)]
            row |= {"difference": statistics.mean(differences), "difference_sd": statistics.stdev(differences)}
        rows.append({**row, "aucs": aucs, "seeds": list(SEEDS)})
    return rows


def main() -> None:
    """Train every variant and record the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default: all")
    parser.add_argument("--data", type=Path, default=DATA, help="the sample of 80,000 rows of Criteo 1TB")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    options = parser.parse_args()
    end_on_signals()
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"no variant is called {', '.join(sorted(unknown))}; choose from {', '.join(VARIANTS)}")
    scores = measure(options.variants or list(VARIANTS), options.data)
    record("precision", {"scores": scores, **bench.circumstances(), "threads": NUM_THREADS}, options.out)


if __name__ == "__main__":
    main()
