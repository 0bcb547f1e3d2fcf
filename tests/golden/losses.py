"""Golden losses: what a few small runs learn, to the bit.

    PYTHONPATH=tests:. python -m golden.losses    records losses.json for this processor, instruction set and torch

The bits of dense layers depend on all three, so each set of them has a record of its own; test_losses.py skips where
there is none. HOTROW_ISA records for a narrower instruction set. Tables are summed up by a checksum of what the last
checkpoint says, read without hotrow's code for checkpoints.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from expanded import expanded
from golden.data import BASE, DCN, TBSM, write_dataset
from hotrow.base.machine import host_facts
from hotrow.config.load import apply_overrides, make_config
from hotrow.kernels import ops
from hotrow.parallel.communicator import Communicator
from hotrow.run import runs
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.folder import RunFolder
from rank_pool import RankPool

LOSSES = Path(__file__).with_name("losses.json")
STEPS, RANKS = 30, 2
RECIPES: dict[str, list[str]] = {
    "plain": [],
    "adam": ["optimizer.dense.name=adam", "optimizer.sparse.name=adam", "optimizer.sparse.lr=0.01"],
    "4 micro-batches": ["train.micro_batches=4"],
    "2 ranks": ["parallel.sharding={small: replicated, middle: table, large: row}"],
    "2 ranks, pooled": [
        "parallel={sharding: {middle: table}, exchange: {middle: pooled}}",
        "optimizer.sparse.name=sgd",
    ],
    "tiers": ["memory={dram: 124000, lookahead: 1}", "train.batch_size=16"],
    "tiers of halves": [
        "memory={dram: 173000, lookahead: 2, writes: in_place}",
        "train.batch_size=8",
        "train.precision=split_bf16",
        "optimizer.sparse.name=ftrl",
    ],
    "dcn": [f"model={json.dumps(DCN)}"],
    "tbsm": [f"model={json.dumps(TBSM)}", "data=histories"],
    "hot phases": ["hot={schedule: fae, budget: 200KiB, small_table: 0}"],
    "hot windows": ["hot={schedule: window, budget: 200KiB, small_table: 0}", "train.precision=fp16"],
}


def this_kind() -> str:
    """Returns what decides about the bits of dense layers."""
    return f"{str(host_facts()['cpu']).split()[0]}, {ops.backend().isa}, torch {torch.__version__.split('+')[0]}"


def prepare(folder: Path) -> None:
    """Writes the datasets of the recipes."""
    write_dataset(folder / "plain")
    write_dataset(folder / "histories", histories=True)


def config_of(folder: Path, name: str) -> dict[str, Any]:
    """Returns a recipe's config; its run is a folder of its own."""
    train = {**BASE["train"], "max_steps": STEPS, "log_every": 1, "eval_every": None, "seed": 5}
    raw = {**BASE, "data": "plain", "run": str(folder / "runs" / name), "train": train, "memory": "dram"}
    raw |= {"optimizer": {"dense": {"lr": 0.02}, "sparse": {"lr": 0.1}}}
    made = apply_overrides(raw, RECIPES[name])
    return made | {"data": str(folder / made["data"])}


def trained(comm: Communicator, raw: dict[str, Any]) -> None:
    """Trains a recipe on one rank."""
    runs.train(make_config(raw), quiet=True, comm=comm)


def learned(folder: Path, name: str, ranks: RankPool) -> dict[str, Any]:
    """Trains a recipe; returns its losses and scores as hexadecimal floats, and the checksum of its tables."""
    raw = config_of(folder, name)
    if name.startswith(f"{RANKS} ranks"):
        ranks.run(trained, raw, num_ranks=RANKS, micro_batches=RANKS)
    else:
        trained(Communicator(), raw)
    run = RunFolder.open(Path(raw["run"]))
    steps = list_checkpoints(run.checkpoints)
    tables = hashlib.sha256()
    for tensor, data in expanded(steps[max(steps)]).items():
        tables.update(tensor.encode() + data)
    scores = run.record.metrics["val"]
    return {
        "losses": [float(line["loss"]).hex() for line in run.measurements() if "loss" in line],
        "scores": {key: float(scores[key]).hex() for key in ("auc", "logloss")},
        "tensors": tables.hexdigest(),
    }


def main() -> None:
    known = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    with tempfile.TemporaryDirectory() as text, RankPool(RANKS) as ranks:
        prepare(Path(text))
        known[this_kind()] = {name: learned(Path(text), name, ranks) for name in RECIPES}
    LOSSES.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
