"""Law 2 for ranks on real rows: whoever holds, sends and stores a row, training gives the bits of one process.

    python -m benchmarks.rank_laws [--steps 500] [--rows FILE] [--folder DIR] [--transport mpi]

A DLRM trains on real Criteo rows in eight micro-batches, with every optimizer. The truth is one process in DRAM. It is
compared with one process in tiers, with 2, 3, 4 and 8 ranks, and with 4 ranks that a signal stops half way and 3
continue. Their tables are replicated, dealt out by row, on one rank each, which sends rows or pools them, or cut by
columns; rows lie in DRAM or mostly on disk. Of all combinations those are trained that are needed for any two of these
choices to meet.
Then models with other options and batches of other sizes are trained over ranks, past an epoch's last batch if --steps
allows; tests/laws/test_model_laws.py has all options, and TBSM, whose histories these rows lack.
SHA-256 of all weights, of all optimizer states, and of the losses of all steps must be equal. A line a case; the exit
code is 1 if one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rank_runs import TRANSPORTS, Transport, differing, outcome, session, wait
from benchmarks.results import end_on_signals
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.run.folder import METRICS, RunFolder
from hotrow.setup.demand import record_bytes
from hotrow.tables import TableConfig

ROWS = "criteo_terabyte_80k.tsv.gz"
STEPS, BATCH_SIZE = 500, 131
"""A batch does not divide into micro-batches, and 500 of them are a little less than an epoch."""
MICRO_BATCHES, DIM = 8, 8
OPTIMIZERS = {"sgd": "sgd", "adagrad": "adagrad", "row_wise_adagrad": "adam", "adam": "adam", "ftrl": "sgd"}
"""Of the tables, and of the dense layers beside it."""
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"name": "dlrm", "bottom_mlp": [16], "top_mlp": [16]},
    "dlrm, first order": {"name": "dlrm", "bottom_mlp": [16], "top_mlp": [16], "first_order": True},
    "dcn": {"name": "dcn", "num_cross_layers": 2, "deep_mlp": [16]},
    "dcn, stacked": {"name": "dcn", "num_cross_layers": 2, "low_rank": 5, "deep_mlp": [16], "structure": "stacked"},
    "dcn, cross alone": {"name": "dcn", "num_cross_layers": 2, "deep_mlp": []},
}
ODD_SIZES = (500, 505, 496)
"""Batch sizes whose micro-batches begin at other alignments on each number of ranks."""
RANKS = ((2,), (3,), (4,), (8,), (4, 3))
"""Of the sessions of a run, one after another."""
TABLES = ("replicated", "table", "row", "pooled", "column")
"""How tables are shared; "pooled" ones are as "table", and vectors travel instead of rows, as of "column"."""
DRAM_PARTS = 4
"""In tiers, the part of its rows' bytes that a rank has in DRAM."""
LIMIT_S = 600.0


class Case(NamedTuple):
    """One way to train."""

    optimizer: str
    ranks: tuple[int, ...] = (1,)
    tables: str = "-"
    memory: str = "dram"
    model: str = "dlrm"
    batch_size: int = BATCH_SIZE

    def __str__(self) -> str:
        ranks, batches = ", then ".join(map(str, self.ranks)), f"{self.model}, {self.batch_size}"
        return f"{self.optimizer:16} {ranks:>9}  {self.tables:10} {self.memory:5} {batches:22}"

    @property
    def truth(self) -> Case:
        return self._replace(ranks=(1,), tables="-", memory="dram")


def cases() -> dict[str, list[Case]]:
    """Returns by optimizer the cases beside its truth."""
    found = {optimizer: [Case(optimizer, memory="tiers")] for optimizer in OPTIMIZERS}
    for each in covering([tuple(OPTIMIZERS), RANKS, TABLES, ("dram", "tiers")], can_be):
        found[each[0]].append(Case(*each))
    return found


def can_be(each: tuple[Any, ...]) -> bool:
    """Returns whether hotrow shares tables so under this optimizer."""
    return each[0] != "row_wise_adagrad" or each[2] != "column"


def model_cases() -> dict[str, list[Case]]:
    """Returns cases of other models and batch sizes, by what has one truth."""
    found: dict[str, list[Case]] = {}
    for model, batch_size, ranks in covering([tuple(MODELS), ODD_SIZES, RANKS[:3]]):
        case = Case("row_wise_adagrad", ranks, "row", model=model, batch_size=batch_size)
        found.setdefault(f"{model}, {batch_size}", []).append(case)
    return found


def covering(
    factors: Sequence[Sequence[Any]], valid: Callable[[tuple[Any, ...]], bool] = lambda _: True
) -> list[tuple[Any, ...]]:
    """Returns few of all `valid` combinations of `factors`, in which any value of one meets any value of another if a
    valid combination has both."""
    everything = list(filter(valid, itertools.product(*factors)))
    left, found = set[Any]().union(*map(_pairs, everything)), []
    while left:
        found.append(max(everything, key=lambda each: len(left & _pairs(each))))
        left -= _pairs(found[-1])
    return found


def _pairs(values: Sequence[Any]) -> set[Any]:
    return set(itertools.combinations(enumerate(values), 2))


def settings(case: Case, data: PackedDataset, run: Path, steps: int) -> dict[str, Any]:
    names = [table.name for table in data.info.tables]
    parallel: dict[str, Any] = {}
    if case.tables != "-":
        parallel["sharding"] = dict.fromkeys(names, "table" if case.tables == "pooled" else case.tables)
    if case.tables != "-":  # otherwise hotrow chooses by bytes
        parallel["exchange"] = "pooled" if case.tables in ("pooled", "column") else "rows"
    return {
        "data": str(data.path),
        "run": str(run),
        "model": {"embedding_dim": DIM, **MODELS[case.model]},
        "optimizer": {"dense": {"name": OPTIMIZERS[case.optimizer], "lr": 0.01}, "sparse": {"name": case.optimizer}},
        "train": {
            "batch_size": case.batch_size,
            "epochs": 1 + steps * case.batch_size // data.split("train").num_rows,
            "max_steps": steps,
            "eval_every": None,
            "log_every": 1,
            "micro_batches": MICRO_BATCHES,
            "threads": 1,
        },
        "memory": memory_of(case, data, run) if case.memory == "tiers" else "dram",
        "parallel": parallel,
    }


def memory_of(case: Case, data: PackedDataset, run: Path) -> dict[str, Any]:
    """Returns the memory of a rank that has `DRAM_PARTS` of the bytes that its rows take."""
    tables = [
        TableConfig(name=t.name, num_embeddings=t.num_embeddings, embedding_dim=DIM, feature_names=(t.name,))
        for t in data.info.tables
    ]
    total = sum(table.num_embeddings * record_bytes(table, case.optimizer) for table in tables)
    held = total if case.tables == "replicated" else total // max(case.ranks)
    return {"dram": held // DRAM_PARTS, "ssd": str(run.parent / "rows"), "force": True}


def trained(case: Case, data: PackedDataset, folder: Path, steps: int, transport: Transport = "gloo") -> dict[str, str]:
    """Trains in the empty folder `folder`; returns the outcome. Raises ValueError if a rank failed, or if the run is
    not of this case."""
    run, given = folder / "run", settings(case, data, folder / "run", steps)
    for number, size in enumerate(case.ranks):
        goes_on = number + 1 < len(case.ranks)
        with session(size, given, folder / f"session-{number}", transport if size > 1 else "gloo") as ranks:
            if goes_on:
                wait(lambda: _num_lines(run) >= steps // 2 or ranks.processes[-1].exitcode is not None, LIMIT_S)
                with suppress(ProcessLookupError):  # a rank that failed has ended, which `join` tells
                    os.kill(ranks.processes[-1].pid or 0, signal.SIGTERM)
            if ranks.join(LIMIT_S) != [0] * size:
                raise ValueError(f"{size} ranks failed: {ranks.ends()}")
        record = RunFolder.open(run).record
        if record.status != ("interrupted" if goes_on else "finished"):
            raise ValueError(f"after {size} ranks the run is {record.status} at step {record.steps} of {steps}")
    if case.memory == "tiers" and not (record.memory or {}).get("read_rows"):
        raise ValueError("no row came from disk: raise DRAM_PARTS")
    return outcome(run)


def _num_lines(run: Path) -> int:
    return (run / METRICS).read_bytes().count(b"\n") if (run / METRICS).exists() else 0


def digests(found: Mapping[str, str]) -> list[str]:
    """Returns SHA-256 of the weights, of the states, and of the losses and metrics of an outcome."""
    groups: list[dict[str, str]] = [{}, {}, {}]
    for name, value in found.items():
        groups[0 if name.startswith(("table", "weight")) else 1 if "state" in name else 2][name] = value
    return [hashlib.sha256(json.dumps(group, sort_keys=True).encode()).hexdigest() for group in groups]


def compared(
    data: PackedDataset, folder: Path, steps: int, chosen: Mapping[str, Sequence[Case]], transport: Transport = "gloo"
) -> Iterator[bool]:
    """Trains every case, prints its line, and yields whether it is equal to its truth, one for each key of `chosen`."""
    heads = f"{'optimizer':16} {'ranks':>9}  {'tables':10} {'in':5} {'model, batch size':22}"
    print(f"{heads}  seconds  {'weights':16} states, losses")
    for name, others in chosen.items():
        truth = None
        for number, case in enumerate([others[0].truth, *others]):
            (own := folder / f"{name}-{number}").mkdir()
            start = time.monotonic()
            try:
                found = trained(case, data, own, steps, transport)
                truth = truth or found
                differs = differing(truth, found)
                verdict = "equal" if not differs else f"DIFFERS: {', '.join(differs[:3])} of {len(differs)}"
                told = " ".join(digest[:16] for digest in digests(found))
            except ValueError as error:
                verdict, told = f"FAILED: {error}", ""
            print(f"{case}  {time.monotonic() - start:7.0f}  {told} {verdict}", flush=True)
            shutil.rmtree(own)
            yield verdict == "equal"


def real_rows() -> Path:
    return Path(os.environ.get("HOTROW_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")) / ROWS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rows", type=Path, default=real_rows(), help=f"default: {ROWS} of $HOTROW_DATA")
    parser.add_argument("--folder", type=Path, help="where runs and rows lie while they train")
    parser.add_argument("--transport", choices=TRANSPORTS, default="gloo", help="what carries the ranks' messages")
    given = parser.parse_args()
    if not given.rows.exists():
        parser.error(f"{given.rows} is not there: set HOTROW_DATA to the folder of real rows, or pass --rows")
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    end_on_signals()
    with tempfile.TemporaryDirectory(prefix="hotrow-laws-", dir=given.folder) as name:
        folder = Path(name)
        data = run_prepare("criteo", str(given.rows), folder / "data", min_count=1)
        equal = list(compared(data, folder, given.steps, cases() | model_cases(), given.transport))
    print(f"{sum(equal)} of {len(equal)} cases equal")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
