"""How fast tables train under the plan, beside simpler ways to divide the same DRAM: docs/plan.md.

    python -m benchmarks.plan --out docs/measurements/benchmarks.json [--folder DIR] [--quick] [CELL ...]

Four models, each with 1/4, 1/10 and 1/32 of its tables in DRAM and the rest on disk. Steps look rows up, sum them,
and update them by SGD, four batches ahead; there are no dense layers, in whose shadow reads would hide. Every row lies
on disk before anything is timed. The ways take turns in one process, a stretch of steps each, on the same batches:

    equal        small tables whole, then as many cached rows for each of the others
    by_size      the smallest tables whole, as many as fit
    by_density   so, but first the tables of which a byte is asked for most often
    counts       slots by hits per byte: the plan

A way whose least caches take more than there is does not fit, and is left out of the cell. A cell's `speed` is each
way's over the best of the other ways, by round. All ways end with the same rows, or the cell is refused. It takes about
twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import bench
from benchmarks.results import end_on_signals, record
from benchmarks.rivals.sides import write_zeros
from benchmarks.synthetic_config import KAGGLE_ROWS
from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import SGD
from hotrow.placement.budget import METADATA_BYTES, Memory, TableDemand, TableSlots, num_bytes, plan_slots
from hotrow.placement.lookahead import lookahead
from hotrow.placement.tiers import Tiers
from hotrow.setup.divide import plan_by_counts
from hotrow.tables import TableConfig

SEED, DEPTH = 1, 4
PARTS = (4, 10, 32)
WARM_UP, STEPS, ROUNDS = 300, 60, 12
"""Steps of each way before the first round, and in each round."""
QUICK_STEPS = {"warm_up": 3, "steps": 3, "rounds": 2}
QUICK_SIZES: dict[str, Any] = {"scale": 0.7, "batch_size": 32}


@dataclass(frozen=True, kw_only=True)
class Model:
    """Tables and how batches use them: rows, columns, Zipf exponent and ids per sample, by table."""

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    zipfs: tuple[float, ...]
    lengths: tuple[int, ...]
    batch_size: int

    @property
    def tables(self) -> list[TableConfig]:
        return [
            TableConfig(name=f"t{t}", num_embeddings=n, embedding_dim=dim, feature_names=(f"t{t}",))
            for t, (n, dim) in enumerate(zip(self.rows, self.dims, strict=True))
        ]

    @property
    def demands(self) -> list[TableDemand]:
        return [TableDemand(f"t{t}", n, 4 * dim) for t, (n, dim) in enumerate(zip(self.rows, self.dims, strict=True))]

    def chances(self, t: int) -> NDArray[np.float64]:
        weights = np.arange(1, self.rows[t] + 1) ** -self.zipfs[t]
        return weights / weights.sum()

    def counts(self) -> dict[str, NDArray[np.float64]]:
        """Expected accesses of each row in a step."""
        return {f"t{t}": self.chances(t) * self.batch_size * self.lengths[t] for t in range(len(self.rows))}

    def batches(self) -> Iterator[KeyedJaggedTensor]:
        sums = [self.chances(t).cumsum() for t in range(len(self.rows))]
        names = tuple(f"t{t}" for t in range(len(self.rows)))
        lengths = np.repeat(self.lengths, self.batch_size)
        generator = np.random.default_rng(SEED)
        while True:
            ids = [
                np.minimum(np.searchsorted(own, generator.random(self.batch_size * n)), len(own) - 1)
                for own, n in zip(sums, self.lengths, strict=True)
            ]
            values = torch.from_numpy(np.concatenate(ids))
            yield KeyedJaggedTensor(names, values, lengths=torch.from_numpy(lengths))


def models(scale: float = 1.0, batch_size: int = 256) -> dict[str, Model]:
    def sized(*rows: float) -> tuple[int, ...]:
        return tuple(max(200, int(scale * n)) for n in rows)

    made = partial(Model, batch_size=batch_size)
    kaggle = sized(*(0.008 * n for n in KAGGLE_ROWS))
    ramp = np.linspace(0, 1, 12)
    sizes = sized(*(7e3 * 8**x for x in ramp[::-1]))
    return {
        "alike": made(rows=sized(*[14_000] * 20), dims=(64,) * 20, zipfs=(1.05,) * 20, lengths=(1,) * 20),
        "kaggle": made(rows=kaggle, dims=(64,) * 26, zipfs=(1.05,) * 26, lengths=(1,) * 26),
        "skews": made(
            rows=sized(*[25_000] * 12),
            dims=(32,) * 12,
            zipfs=tuple((0.6 + 0.7 * ramp).tolist()),
            lengths=(1, 4, 1, 2, 1, 8, 1, 2, 1, 4, 1, 1),
        ),
        "widths": made(rows=sizes, dims=(8, 256, 16, 128, 32, 64) * 2, zipfs=(1.0,) * 12, lengths=(1, 2) * 6),
    }


# ---- ways to divide DRAM

Rule = Callable[[Sequence[TableDemand], int], Sequence[TableSlots]]


def whole_first(model: Model, key: Callable[[int], float]) -> Rule:
    """Returns a rule that keeps tables whole in the order of `key`; the others cache what a step may look up."""

    def rule(demands: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
        found = [
            TableSlots(0, min(own.num_rows, model.batch_size * length))
            for own, length in zip(demands, model.lengths, strict=True)
        ]
        left = budget_bytes - sum(num_bytes(own, slots) for own, slots in zip(demands, found, strict=True))
        for t in sorted(range(len(demands)), key=key):
            own, whole = demands[t], TableSlots(demands[t].num_rows, 0)
            more = num_bytes(own, whole) - num_bytes(own, found[t])
            if more <= left:
                found[t], left = whole, left - more
            else:
                extra = min(int(max(left, 0) // (own.record_bytes + METADATA_BYTES)), own.num_rows - found[t].cached)
                found[t], left = TableSlots(0, found[t].cached + extra), 0.0
        return found

    return rule


def rules(model: Model) -> dict[str, Rule]:
    """Returns the ways by name."""
    counts = model.counts()
    least = {f"t{t}": model.batch_size * length for t, length in enumerate(model.lengths)}
    by_counts = plan_by_counts(counts, num_steps=1, depth=DEPTH, least_cached=least)
    asked = [
        float((-np.expm1(-own)).sum()) / (own.size * dim) for own, dim in zip(counts.values(), model.dims, strict=True)
    ]
    return {
        "equal": plan_slots,
        "by_size": whole_first(model, lambda t: model.rows[t] * model.dims[t]),
        "by_density": whole_first(model, lambda t: -asked[t]),
        "counts": by_counts,
    }


class Way:
    """One way to divide DRAM, with tables of its own on disk."""

    def __init__(self, model: Model, rule: Rule, dram: int, folder: Path) -> None:
        folder.mkdir()
        self.emb = EmbeddingCollection(
            model.tables, memory=Memory(dram=dram, ssd=folder, plan=rule, writes="in_place", force=True), seed=SEED
        )
        self.optimizer = SGD(self.emb, lr=0.01)
        tiers = self.emb.placement.find(Tiers)
        assert tiers is not None
        self.tiers = tiers
        for store in tiers.stores:
            if store.path is not None:
                write_zeros(store.path)
        tiers.write_every_row()
        self.batches = iter(lookahead(model.batches(), self.emb, depth=DEPTH))

    def train(self, steps: int) -> float:
        """Returns the seconds of a step, the writes that follow included."""
        start = time.perf_counter()
        for _ in range(steps):
            out = self.emb(next(self.batches))
            out.backward(torch.ones_like(out))
            self.optimizer.step()
        while any(store.counters()["waiting_bytes"] for store in self.tiers.stores):
            time.sleep(0.0005)
        return (time.perf_counter() - start) / steps

    def misses(self) -> int:
        return sum(own["created_rows"] + own["read_rows"] for own in self.tiers.counters().values())

    def close(self) -> None:
        self.batches.close()  # type: ignore[attr-defined]
        self.emb.placement.close()


def measure_cell(name: str, model: Model, parts: int, folder: Path, how: dict[str, int]) -> Any:
    """Returns the row of a cell. Raises ValueError if two ways end with different rows."""
    total = sum(own.num_rows * own.record_bytes for own in model.demands)
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="hotrow-plan-", dir=folder) as files:
        ways: dict[str, Way] = {}
        do_not_fit: dict[str, str] = {}
        for rule_name, rule in rules(model).items():
            try:
                ways[rule_name] = Way(model, rule, total // parts, Path(files) / rule_name)
            except ValueError as error:
                if rule_name == "counts":
                    raise
                do_not_fit[rule_name] = str(error)
                continue
            stack.callback(ways[rule_name].close)
        for way in ways.values():
            way.train(how["warm_up"])
        before = {rule_name: way.misses() for rule_name, way in ways.items()}

        def one_round(number: int) -> dict[str, float]:
            order = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
            return {rule_name: ways[rule_name].train(how["steps"]) for rule_name in order}

        rounds = bench.clean_rounds(one_round, how["rounds"], of_disk=True)
        steps = how["steps"] * rounds.num_taken
        misses = {rule_name: (way.misses() - before[rule_name]) / steps for rule_name, way in ways.items()}
        _check_rows(name, model, ways)
    speeds = {each: [min(r[o] for o in r if o != each) / r[each] for r in rounds.results] for each in ways}
    return {
        "name": name,
        "dram_bytes": total // parts,
        "table_bytes": total,
        "ours": "counts",
        "step_ms": {each: 1e3 * statistics.median(r[each] for r in rounds.results) for each in ways},
        "speed": {each: statistics.median(own) for each, own in speeds.items()},
        "quartiles": {each: bench.spread(own) for each, own in speeds.items()},
        "misses": misses,
        "do_not_fit": do_not_fit,
        **rounds.counts(),
    }


def _check_rows(name: str, model: Model, ways: dict[str, Way]) -> None:
    first, *rest = ways.values()
    for table in model.tables:
        wanted = first.emb.float32(table.name)
        for way in rest:
            if not torch.equal(way.emb.float32(table.name), wanted):
                raise ValueError(f"{name}: table {table.name} differs between two ways to divide DRAM")


def main() -> None:
    """Measure and add the result to the file of results."""
    names = [f"plan_{model}_dram{parts}" for model in models() for parts in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CELL", help="cells to measure; all where none is named")
    parser.add_argument("--quick", action="store_true", help="small tables: tries the cells, measures nothing of worth")
    parser.add_argument("--folder", type=Path, default=Path(), help="where files lie: on the disk to measure")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    options = parser.parse_args()
    if unknown := [each for each in options.names if each not in names]:
        parser.error(f"no cell is called {unknown[0]!r}; choose from {', '.join(names)}")
    end_on_signals()
    options.folder.mkdir(parents=True, exist_ok=True)
    how, sizes = {"warm_up": WARM_UP, "steps": STEPS, "rounds": ROUNDS}, {}
    if options.quick:
        how, sizes = QUICK_STEPS, QUICK_SIZES
    rows = []
    for model_name, model in models(**sizes).items():
        for parts in PARTS:
            name = f"plan_{model_name}_dram{parts}"
            if name not in (options.names or names):
                continue
            start = time.perf_counter()
            rows.append(measure_cell(name, model, parts, options.folder, how))
            told = ", ".join(f"{each} {ms:.2f} ms" for each, ms in rows[-1]["step_ms"].items())
            spent = time.perf_counter() - start
            print(
                f"{name:22s} {rows[-1]['speed'][rows[-1]['ours']]:.3f}x  {told}; {bench.how_clean(rows[-1])}; "
                f"{spent:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    report = {"cells": rows, "quick": options.quick, **bench.circumstances()}
    record("plan", json.loads(json.dumps(report)), options.out)


if __name__ == "__main__":
    main()
