"""The page docs/measurements/locality.md and its plots: two observations about embedding accesses, on real data.

    python -m benchmarks.locality [--data FOLDER] [--check] [--speed]

Prepares the data sets into a temporary folder (FOLDER, $HOTROW_DATA or ../shared/data holds them), measures them,
and again in a random order of their samples, and writes every number of the page. With --check nothing is written, and
the exit status says whether the page is what the data makes. --speed prints how many accesses a second are followed,
and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.locality.reuse import Access, Locality, ReuseProfile, measure_locality
from benchmarks.locality.traces import open_accesses
from benchmarks.results import end_on_signals
from hotrow.data.prepare.prepare import run_prepare
from hotrow.draw import line_chart
from hotrow.inspect.accesses import Accesses, TableAccesses
from hotrow.inspect.hotness import CURVE_SHARES, Hotness, measure_hotness

ROOT = Path(__file__).resolve().parents[2]
BATCH_SIZE, DIM, SEED = 2048, 16, 0
FILES = {
    "Criteo 80k": ("criteo", "criteo_terabyte_80k.tsv.gz"),
    "Taobao 110k": ("taobao", "taobao_userbehavior_110k.csv.gz"),
    "access trace": (None, "embedding_trace_500k_medium.txt.gz"),
}
RATES = (0.3, 0.1, 0.03)
HEAD = """\
# Locality

For readers who ask whether tiered memory can work on real click logs. Tiered memory for embedding tables rests on two
observations, which the abstract of MTrainS (arXiv 2305.01515) states: the bandwidth demanded differs between tables,
and temporal locality is high. This page checks both on three real files. The paper's own figures were not read, so
none are printed here.

Every number and plot is made by `python -m benchmarks.locality`. How bytes and
coverage are defined is in [Inspect](../inspect.md).

| data | what | order |
|---|---|---|
| Criteo 80k | a random sample of Criteo's 1TB click logs: 26 tables, training split | none: its lines are not in time |
| Taobao 110k | two hours of UserBehavior: users, items, categories, training split | time |
| access trace | lookups in one table of 500,000 rows | as they were made |
"""


def prepared(data: Path, work: Path) -> dict[str, Accesses]:
    """The accesses of each data set, by the name it has on the page."""
    found = {}
    for name, (source, file) in FILES.items():
        if not (data / file).is_file():
            raise SystemExit(f"{data / file} is absent; name the folder that holds it: --data FOLDER")
        if source is not None:
            run_prepare(source, str(data / file), work / source)
        found[name] = open_accesses(work / source if source is not None else data / file)
    return found


def shuffled(accesses: Accesses) -> Accesses:
    """The same samples in a random order: what popularity alone explains, with no time in it."""
    order = np.random.default_rng(SEED).permutation(accesses.num_samples)

    def table(own: TableAccesses) -> TableAccesses:
        ids = np.concatenate([*own.batches(1 << 16)])
        assert len(ids) == accesses.num_samples, "one lookup per sample in each table"
        ids = ids[order]
        return replace(own, batches=lambda size: (ids[start : start + size] for start in range(0, len(ids), size)))

    return replace(accesses, tables=tuple(map(table, accesses.tables)))


@dataclass(frozen=True)
class Measured:
    """What was found of a data set: what `hotrow inspect` reports, and how soon rows come again in each table."""

    hotness: Hotness
    localities: tuple[Locality, ...]

    def miss_ratio_of_share(self, share: float, *, per: Access) -> float:
        """Returns the miss ratio over all tables, each with an LRU cache of that share of its rows, at least one."""
        capacities = [own.rows_of(share) for own in self.hotness.tables]
        ratios = [own.curve(per).miss_ratio(rows) for own, rows in zip(self.localities, capacities, strict=True)]
        return weighted_mean(ratios, self._num_accesses(per))

    def first(self, *, per: Access) -> float:
        """Returns the share of first accesses over all tables; a cache of any size misses them."""
        return weighted_mean([own.curve(per).first for own in self.localities], self._num_accesses(per))

    def _num_accesses(self, per: Access) -> list[float]:
        return [own.num_accesses(per) for own in self.localities]

    @property
    def unique_ratio(self) -> float:
        """Returns the different rows of a batch over its lookups."""
        weights = [own.lookups_per_batch for own in self.localities]
        return weighted_mean([own.unique_ratio for own in self.localities], weights)

    def overlap(self, num_batches: int) -> float | None:
        """Returns the mean of the tables' overlaps, weighted by rows per batch; None if no table has one."""
        pairs = [(own.overlap[num_batches], own.rows_per_batch) for own in self.localities]
        known = [(value, weight) for value, weight in pairs if value is not None]
        return weighted_mean([value for value, _ in known], [weight for _, weight in known]) if known else None

    def windows(self) -> list[dict[str, float]]:
        """Returns the mean of the tables' windows, weighted by lookups; only tables that have all windows count."""
        most = max(len(own.windows) for own in self.localities)
        found = [own for own in self.localities if len(own.windows) == most]
        weights = [own.num_lookups for own in found]
        rows = ([asdict(own.windows[k]) for own in found] for k in range(most))
        names = ("first_hot_set", "own_hot_set")
        return [{name: weighted_mean([w[name] for w in row], weights) for name in names} for row in rows]


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Returns sum(w v) / sum(w), or 0 if all weights are 0."""
    total = sum(weights)
    return sum(w * v for v, w in zip(values, weights, strict=True)) / total if total else 0.0


def measure(accesses: Accesses) -> Measured:
    hotness = measure_hotness(accesses, batch_size=BATCH_SIZE, embedding_dim=DIM)
    how: Any = {"num_samples": accesses.num_samples, "batch_size": BATCH_SIZE, "seed": SEED}
    return Measured(hotness, tuple(measure_locality(table, **how) for table in accesses.tables))


# ---- the page


def lines_of(header: str, rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text."""
    columns = header.split(" | ")
    rule = "|---|" + "---:|" * (len(columns) - 1)
    return "\n".join([f"| {header} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def demand_section(reports: Mapping[str, Any]) -> str:
    rows = []
    for name, report in reports.items():
        demand, densities = report["demand"], [table["demand"]["density"] for table in report["tables"]]
        if demand["gini"] is None:
            continue
        tops = [f"{share(top['demand'])} on {share(top['bytes'])}" for top in demand["top_tables"]]
        figures = [f"{max(densities) / min(densities):.1f}", f"{demand['max_over_median']:.1f}"]
        figures += [share(demand["bytes_of_half_the_demand"]), f"{demand['gini']:.2f}", tops[1]]
        rows.append([name, str(len(densities)), *figures])
    header = "data | tables | density, max / min | max / median | bytes of half the demand | Gini | densest tenth"
    return f"""
## 1. The bandwidth demanded is not uniform

Density is training bytes per step of {BATCH_SIZE:,} samples at dim {DIM}, divided by the bytes of the table. "Bytes
of half the demand" is the share of the tables' bytes on which half of all demanded bytes fall. "Densest tenth" is the
share of the demand that falls on the densest tables that together have at most a tenth of the bytes.

{lines_of(header, rows)}
[![Share of demand against share of bytes](locality-demand.svg)](locality-demand.svg)

With so few samples, large tables stay small (Criteo's largest has {largest_rows(reports["Criteo 80k"]):,} rows here,
and millions in the full set), while small ones are as they are. So the spread in the full set must be wider than
this.
"""


def largest_rows(report: Mapping[str, Any]) -> int:
    return int(max(table["num_embeddings"] for table in report["tables"]))


def locality_row(name: str, order: str, found: Measured) -> list[str]:
    misses = [found.miss_ratio_of_share(at, per=per) for per in ("lookup", "row") for at in (0.01, 0.1)]
    overlaps = [share(found.overlap(k)) for k in (1, 10, 100)]
    firsts = [found.first(per=per) for per in ("lookup", "row")]
    return [name, order, share(found.unique_ratio), *overlaps, *map(share, [*misses, *firsts])]


def locality_section(stored: Mapping[str, Measured], random: Mapping[str, Measured]) -> str:
    rows = []
    for name in stored:
        rows += [locality_row(name, "stored", stored[name]), locality_row("", "shuffled", random[name])]
    header = (
        "data | order | unique | last 1 | last 10 | last 100 | miss/lookup, 1 % | 10 % | miss/row, 1 % | 10 % | "
        "first/lookup | first/row"
    )
    differences = {
        name: max(
            abs(stored[name].miss_ratio_of_share(at, per="lookup") - random[name].miss_ratio_of_share(at, per="lookup"))
            for at in CURVE_SHARES
        )
        for name in stored
    }
    told = "; ".join(f"{name} {difference:.1%}" for name, difference in differences.items())
    return f"""
## 2. Temporal locality

Batches of {BATCH_SIZE:,}, all tables of a data set together. The columns:

- unique: different rows of a batch over its lookups;
- last k: share of a batch's different rows that were in one of the k batches before it;
- miss: misses of LRU caches of 1 % and 10 % of each table's rows, per lookup and per different row of a batch (what
  is left for a cache after repeats within a batch are removed). A cache of c rows hits an access if fewer than c
  different rows were accessed since its row was last accessed, so one pass gives every c;
- first: the part of the misses that are first accesses, which no cache avoids. It is large, because the files are
  short.

{lines_of(header, rows)}
The second line of each shows the same samples in a random order: what popularity alone gives. The difference to the
first line is what the order adds. The largest difference of the two miss ratios per lookup, over caches of 0.01 % to
100 % of the rows: {told}.

The lines of the Criteo sample are in no order of time, so their reuse distances are those of a shuffle, and the
difference is noise. They show the locality that popularity makes, and say nothing about time. The other two show what
time adds.

[![Share of lookups missed against cache size](locality-misses.svg)](locality-misses.svg)
"""


def coverage_section(stored: Mapping[str, Measured]) -> str:
    rows = []
    for name, found in stored.items():
        report = found.hotness.to_json()
        tops = [share(report["coverage"][f"top_{at}"]) for at in ("0.1%", "1%", "10%")]
        windows = found.windows()
        mean_own = sum(w["own_hot_set"] for w in windows[1:]) / len(windows[1:])
        mean_first = sum(w["first_hot_set"] for w in windows[1:]) / len(windows[1:])
        rows.append([name, *tops, share(windows[0]["own_hot_set"]), share(mean_first), share(mean_own)])
    header = "data | top 0.1 % of rows | top 1 % | top 10 % | hot set, first tenth | later tenths | their own hot sets"
    return f"""
## Coverage and drift

The first three columns give the share of the accesses that the hottest rows of each table take. The others follow the
hottest 1 % of the rows of the first tenth of the batches: what they take of that tenth, what they take of the nine
later ones (mean), and what as many rows chosen anew in each tenth would take. If the last two are far apart, the hot
rows change, and a set that was pinned once becomes stale.

{lines_of(header, rows)}"""


def sampling_section(trace: Accesses) -> str:
    ids = [*trace.tables[0].batches(BATCH_SIZE)]
    sizes = np.unique(np.geomspace(100, trace.tables[0].num_embeddings, 200).astype(np.int64))
    exact = {per: followed(ids, per, rate=1.0).curve().miss_ratio(sizes) for per in ("lookup", "row")}
    rows = []
    for rate in RATES:
        row = [f"{rate:g}"]
        for per in ("lookup", "row"):
            curves = [followed(ids, per, rate=rate, seed=seed).curve() for seed in range(5)]
            errors = [np.abs(curve.miss_ratio(sizes) - exact[per]) for curve in curves]
            row += [f"{np.mean(errors):.4f}", f"{np.max(errors):.4f}"]
        rows.append([f"{followed(ids, 'lookup', rate=rate).num_rows:,}", *row])
    header = "rows followed | rate | mean error, per lookup | largest | mean error, per row | largest"
    return f"""
## What sampling costs

This is the access trace again. The table gives the absolute error of the miss ratio from a sample of its rows,
against the exact curve, at 200 cache sizes from 100 rows up, over five seeds. Tables of up to 1,048,576 rows are
followed exactly; of larger ones, a pseudo-random choice of rows is (SHARDS).

{lines_of(header, rows)}"""


def followed(ids: list[np.ndarray], per: Any, *, rate: float, seed: int = 0) -> ReuseProfile:
    profile = ReuseProfile(per, rate=rate, seed=seed)
    for batch in ids:
        profile.add(batch)
    return profile


def make(found: Mapping[str, Accesses]) -> dict[str, str]:
    """The page and its plots, by file name."""
    stored = {name: measure(accesses) for name, accesses in found.items()}
    random = {name: measure(shuffled(accesses)) for name, accesses in found.items()}
    reports = {name: found.hotness.to_json() for name, found in stored.items()}
    curves = {name: report["demand"]["curve"] for name, report in reports.items() if report["demand"]["curve"]}
    misses = {}
    for name in found:
        for order, of in (("stored", stored), ("shuffled", random)):
            misses[f"{name}, {order}"] = [(at, of[name].miss_ratio_of_share(at, per="lookup")) for at in CURVE_SHARES]
    page = (
        HEAD
        + demand_section(reports)
        + locality_section(stored, random)
        + coverage_section(stored)
        + sampling_section(found["access trace"])
    )
    return {
        "locality.md": page,
        "locality-demand.svg": line_chart(
            {**curves, "if demand were uniform": [(0.0, 0.0), (1.0, 1.0)]},
            x_label="share of all table bytes, densest tables first",
            y_label="share of the bytes demanded",
            x_scale="linear",
            label="share of demand against share of bytes",
        ),
        "locality-misses.svg": line_chart(
            misses,
            x_label="cache, as a share of each table's rows",
            y_label="share of the lookups missed",
            dashed=[name for name in misses if name.endswith("shuffled")],
            label="miss ratios in stored and in random order",
        ),
    }


def print_speed(trace: Accesses) -> None:
    """Best of five passes over the trace, in millions of accesses a second."""
    ids = [*trace.tables[0].batches(BATCH_SIZE)]
    for rate in (1.0, 0.1, 0.01):
        for per in ("lookup", "row"):
            times = []
            for _ in range(5):
                start = time.perf_counter()
                followed(ids, per, rate=rate)
                times.append(time.perf_counter() - start)
            print(f"rate {rate:g}, per {per}: {trace.num_samples / min(times) / 1e6:.1f} M accesses/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("HOTROW_DATA", ROOT.parent / "shared" / "data"), type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    end_on_signals()
    with tempfile.TemporaryDirectory() as work:
        found = prepared(options.data, Path(work))
        if options.speed:
            print_speed(found["access trace"])
            return
        files = make(found)
    stale = [name for name, text in files.items() if not _same(ROOT / "docs" / "measurements" / name, text)]
    if options.check:
        print(
            f"not what the data makes: {', '.join(stale)}"
            if stale
            else "docs/measurements/locality.md is what the data makes"
        )
        sys.exit(bool(stale))
    for name, text in files.items():
        (ROOT / "docs" / "measurements" / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
