"""Clusters on paper: SC'20's sockets, and MTrainS's machines, from bytes that are counted and processor time measured.

    python -m benchmarks.cluster_model            # every preset and machine
    python -m benchmarks.cluster_model --json

Nobody ran hotrow on such a cluster: every figure that this prints is modelled. A step of R ranks, all with the same
share of the batch, is a sum in which nothing overlaps:

    own work   products over the declared rate, and rows touched over the declared memory, each times the share of the
               machine's limit that hotrow's steps reach here; and what the smallest step takes here
    sharing    what two ranks take here beside half of a step and their waits, by step and by table
    messages   an exchange is a message from each rank to each other; each costs the processor and the wire its time
    link       bytes sent, over the link that the ranks of a machine share

Shares and processor times are read from docs/measurements (`Measured`), rates are declared below, and `assumed` stands
where no datasheet or measurement was read. Rows are counted by their law and not drawn. A table's rows travel, or its
pooled vectors, whichever is fewer bytes:

    rows       each rank asks the others for the different rows of its samples: a number and the weights, and back a
               number and a summed gradient
    pooled     the owner of a table gets the ids of all bags, sends a vector for each, and gets one back
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEASUREMENTS = Path(__file__).resolve().parent.parent / "docs" / "measurements"
SCALING, EFFICIENCY = "scaling-study-family-25.json", "efficiency-study.json"
PROCESSOR = "AMD EPYC, family 25 model 17, avx512"
DRAM_SHARE = 0.6
"""The share of a machine's DRAM that tables may take."""
ENOUGH = 0.9
"""The share of one machine's speed, as if its DRAM held all rows, that machines with slower memory must reach."""
GAP_BYTES, ID_BYTES, FLOAT_BYTES = 2, 4, 4
"""A row's number among the others of a message, and an id in a bag. Heads of messages are left out: they are few."""
EXCHANGES = 5
"""Exchanges of a step: ids, rows or vectors, gradients of rows, slices of dense gradients, and their totals."""
SOCKETS = (1, 2, 4, 8, 16, 32, 64)
STRONG_BATCH, WEAK_BATCH, NODE_BATCH = 16_384, 1024, 16_384
Floats = NDArray[np.float64]


# ---- models


@dataclass(frozen=True)
class Model:
    """A DLRM with dot interaction, SGD in float32: tables, their ids, and MLPs."""

    sizes: tuple[int, ...]
    """Rows of each table."""
    dim: int
    lookups: int
    """Ids of a sample in each table."""
    zipf: float
    num_dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def table_bytes(self) -> int:
        return sum(self.sizes) * self.dim * FLOAT_BYTES

    @property
    def products(self) -> int:
        """Multiply-adds of a sample forward, of the MLPs and the interaction."""
        vectors = len(self.sizes) + 1
        return self._layers(weights_alone=True) + vectors * (vectors - 1) // 2 * self.dim

    @property
    def num_weights(self) -> int:
        """Weights of dense layers, with biases."""
        return self._layers(weights_alone=False)

    def _layers(self, *, weights_alone: bool) -> int:
        vectors = len(self.sizes) + 1
        bottom = (self.num_dense, *self.bottom, self.dim)
        top = (self.dim + vectors * (vectors - 1) // 2, *self.top, 1)
        pairs = [*pairwise(bottom), *pairwise(top)]
        return sum((i if weights_alone else i + 1) * o for i, o in pairs)


SC20_SMALL = Model((1_000_000,) * 8, 64, 50, 0.0, 512, (512,), (1024,) * 3)
LARGE = Model((6_000_000,) * 64, 256, 100, 0.0, 2048, (2048,) * 4, (4096,) * 4)
MODELS = {
    "sc20-small": SC20_SMALL,  # tables and MLPs of the public benchmark script that SC'20's authors quote in threads
    "large": LARGE,  # sizes of ours: tables that need several machines, wide MLPs
    "mlperf": Model(  # Criteo Terabyte with ids capped at 40 million, and the MLPs of MLPerf's DLRM
        (40_000_000, 39_060, 17_295, 7424, 20_265, 3, 7122, 1543, 63, 40_000_000, 3_067_956, 405_282, 10, 2209, 11_938,
         155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
        128, 1, 1.05, 13, (512, 256), (1024, 1024, 512, 256),
    ),
    "terabyte": Model(  # Criteo Terabyte with ids modulo ten million, and the MLPs of recipes/criteo-terabyte.yaml
        (9_980_333, 36_084, 17_217, 7378, 20_134, 3, 7112, 1442, 61, 9_758_201, 1_333_352, 313_829, 10, 2208, 11_156,
         122, 4, 970, 14, 9_994_222, 7_267_859, 9_946_608, 415_421, 12_420, 101, 36),
        64, 1, 1.05, 13, (512, 256), (512, 512, 256),
    ),
}  # fmt: skip
OF_NODES = {**MODELS, "large, Zipf 1.05, 8x rows": replace(LARGE, sizes=(48_000_000,) * 64, zipf=1.05)}
"""The last has tables of 3 TB with the skew of clicks, which is what slower memory is for."""


def rates_of(num_rows: int, zipf: float, lookups: float) -> tuple[Floats, Floats]:
    """Returns how often rows are looked up per step, falling, and how many rows have each rate.

    Rows of nearly the same popularity, 8 classes for each doubling of their rank, count as equally popular.
    """
    edges = np.unique(np.round(np.geomspace(1.0, num_rows + 1.0, math.ceil(8 * math.log2(num_rows + 1)) + 1)))
    ends, power = edges - 0.5, 1.0 - zipf
    below = np.log(ends) if abs(power) < 1e-9 else ends**power / power
    shares, rows = np.diff(below) / (below[-1] - below[0]), np.diff(edges)
    return lookups * shares / rows, rows


@cache
def distinct_rows(num_rows: int, zipf: float, lookups: float) -> float:
    """Returns the expected different rows among so many lookups."""
    rates, rows = rates_of(num_rows, zipf, lookups)
    return float(rows @ -np.expm1(-rates))


# ---- machines


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Memory behind DRAM, as declared."""

    name: str
    capacity_bytes: float
    reads_per_s: float
    writes_per_s: float
    bytes_per_s: float
    unit_bytes: int
    """Bytes that a read moves at least."""
    cpu_s_per_io: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, as declared. Figures marked `assumed` were read in no datasheet or measurement."""

    name: str
    cores: int
    sockets: int = 2
    dram_bytes: float
    flops_per_s: float
    """Of all cores."""
    row_s: float
    """A random row of 512 bytes, all threads together."""
    link_bytes_per_s: float
    """Of the one port that its ranks share."""
    s_per_message: float
    cpu_s_per_message: float
    cpu_s_per_byte: float
    tiers: tuple[Tier, ...] = ()


SCM = Tier(  # assumed: twelve modules of 128 GB; a module reads 6.8 GB/s in sequence, about a third of it at random
    name="SCM", capacity_bytes=1.5e12, reads_per_s=12 * 8e6, writes_per_s=12 * 2e6, bytes_per_s=27e9, unit_bytes=256,
)  # fmt: skip
SSD = Tier(  # Intel SSD DC P3600, 2 TB, specification 330569: 450K random reads/s, 56K writes/s of 4 KB, 2.6 GB/s; the
    # processor's 1 us for an I/O is assumed: hotrow's engine took 0.5 to 2.5 us on machines that it was measured on
    name="SSD", capacity_bytes=2e12, reads_per_s=450e3, writes_per_s=56e3, bytes_per_s=2.6e9, unit_bytes=512,
    cpu_s_per_io=1e-6,
)  # fmt: skip
MACHINES = {
    # Two sockets of 28 cores, as of a Xeon Platinum 8280. DRAM: twelve modules of 16 GiB (assumed). Arithmetic: 64
    # operations a cycle at 1.8 GHz (assumed). Rows: half of the node's bandwidth, 225.6 GB/s by Intel's Memory Latency
    # Checker (github.com/gjbex/Code-optimization). Link: 12.38 GB/s, one pair of processes by osu_mbw_mr over one port
    # of Omni-Path (gist.github.com/hppritcha/8da4436a216c9d96bf10ad9d403da03f). Messages (assumed): 2 us on the wire,
    # beside 14 us that hotrow and mpi4py take of the processor.
    "sc20-cluster": Machine(
        name="SC'20-style node, Omni-Path, MPI", cores=56, dram_bytes=192 * 2**30, flops_per_s=6.45e12, row_s=4.5e-9,
        link_bytes_per_s=12.38e9, s_per_message=16e-6, cpu_s_per_message=14e-6, cpu_s_per_byte=0.04e-9,
    ),
    # A server of about 2018, all assumed but the SSD: two sockets of 24 cores, 384 GiB, 25 Gb/s less headers.
    "cpu-server": Machine(
        name="server of 2018, 25 Gb/s Ethernet, gloo", cores=48, dram_bytes=384 * 2**30, flops_per_s=3.07e12,
        row_s=5e-9, link_bytes_per_s=2.95e9, s_per_message=40e-6, cpu_s_per_message=15e-6, cpu_s_per_byte=0.4e-9,
        tiers=(SCM, SSD),
    ),
}  # fmt: skip


# ---- what was measured here


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Processor time of hotrow's steps, measured on one machine, whose figures are in docs/measurements."""

    dense_share: float
    """Of the time of bare products over that of a step of Criteo Kaggle's shape."""
    rows_share: float
    """Of the time that only touching the rows takes over that of a lookup with its update."""
    step_s: float
    """The smallest step: 64 samples of the study's `m1-style`."""
    sharing_s: float
    """What sharing adds to a step, whatever is shared."""
    table_s: float
    """And for each table."""


@cache
def measured() -> Measured:
    """Reads the figures. Sharing is what two ranks over MPI took beside half of one rank's step and their waits: of
    the shape with 26 tables, and of that with 8 tables and most bytes."""
    benchmarks = json.loads((MEASUREMENTS / "benchmarks.json").read_text(encoding="utf-8"))

    def share(kind: str, name: str) -> float:
        return next(float(row["share_of_limit"]) for row in benchmarks[kind][PROCESSOR]["cells"] if row["name"] == name)

    rows = json.loads((MEASUREMENTS / EFFICIENCY).read_text(encoding="utf-8"))["cells"]
    small = {"point": "m1-style", "train.batch_size": "64"}
    ranks = {
        (row["axes"]["shape"], row["axes"]["ranks"]): row
        for row in json.loads((MEASUREMENTS / SCALING).read_text(encoding="utf-8"))["cells"]
        if row["axes"].get("transport") == "mpi"
    }

    def sharing_ms(shape: str) -> float:
        one, two = ranks[shape, "1"], ranks[shape, "2"]
        return float(two["step_ms"] - two["exchange_ms"] - one["step_ms"] / 2)

    table_ms = (sharing_ms("clicks") - sharing_ms("wide")) / (26 - 8)
    return Measured(
        dense_share=share("end_to_end", "train_step_kaggle_vs_torch"),
        rows_share=share("kernels", "step_sgd_8x50_uniform"),
        step_s=next(row["step_ms"] for row in rows if row["axes"] == small) / 1e3,
        sharing_s=(sharing_ms("wide") - 8 * table_ms) / 1e3,
        table_s=table_ms / 1e3,
    )


# ---- a step


def bytes_of_rank(model: Model, batch_size: int, num_ranks: int, *, jagged: bool = False) -> float:
    """Returns the bytes that a rank sends in a step, the mean of all. jagged: bags differ in length, which is sent."""
    if num_ranks == 1:
        return 0.0
    vector = model.dim * FLOAT_BYTES
    lookups = batch_size * model.lookups
    total = 0.0
    for size in model.sizes:
        rows = distinct_rows(size, model.zipf, lookups / num_ranks)
        of_rows = (num_ranks - 1) * rows * 2 * (GAP_BYTES + vector)
        of_bags = ID_BYTES * (lookups + batch_size * jagged) + 2 * vector * batch_size
        total += min(of_rows, (num_ranks - 1) / num_ranks * of_bags)
    # Two ranks send each other whole gradients; more of them slices, and then their totals.
    dense = model.num_weights * FLOAT_BYTES * (1 if num_ranks == 2 else 2 * (num_ranks - 1) / num_ranks)
    return total / num_ranks + dense


def step_parts(model: Model, batch_size: int, machine: Machine, *, num_ranks: int, each: int) -> dict[str, float]:
    """Returns the seconds of a rank's step by part, with all rows in DRAM. each: ranks on a machine, which share it."""
    here, samples = measured(), batch_size / num_ranks
    flops = 2 * 3 * samples * model.products  # forward, and two products backward
    lookups = samples * model.lookups
    # A lookup reads each id's row. An update reads and writes the different rows, a rank its part of those of all.
    held = sum(distinct_rows(size, model.zipf, batch_size * model.lookups) for size in model.sizes) / num_ranks
    touched = (len(model.sizes) * lookups + 2 * held) * model.dim * FLOAT_BYTES / 512
    parts = {
        "own work": flops * each / machine.flops_per_s / here.dense_share
        + touched * machine.row_s * each / here.rows_share
        + here.step_s
    }
    if num_ranks > 1:
        sent, others = bytes_of_rank(model, batch_size, num_ranks), num_ranks - 1
        local = min(each, num_ranks)
        away = (num_ranks - local) / others
        parts |= {
            "sharing": here.sharing_s + here.table_s * len(model.sizes) + sent * machine.cpu_s_per_byte,
            "messages": EXCHANGES * (machine.s_per_message + others * machine.cpu_s_per_message),
            "link": sent * away * local / machine.link_bytes_per_s,
        }
    return parts


def scaling(model: Model, machine: Machine, num_ranks: int, *, weak: bool) -> dict[str, Any]:
    """Returns the modelled efficiency of a rank on each of so many sockets, beside the fewest that hold the tables."""
    each = machine.sockets
    least = math.ceil(model.table_bytes / (DRAM_SHARE * machine.dram_bytes / each))
    if num_ranks < least:
        return {"ranks": num_ranks, "least_ranks": least}

    def speed(ranks: int) -> tuple[float, dict[str, float]]:
        batch_size = WEAK_BATCH * ranks if weak else STRONG_BATCH
        parts = step_parts(model, batch_size, machine, num_ranks=ranks, each=each)
        return batch_size / sum(parts.values()), parts

    (fast, parts), (base, _) = speed(num_ranks), speed(least)
    return {
        "ranks": num_ranks,
        "least_ranks": least,
        "samples_per_s": fast,
        "efficiency": fast / base * least / num_ranks,
        "binds": max(parts, key=lambda part: parts[part]),
        "parts_ms": {part: 1e3 * seconds for part, seconds in parts.items()},
    }


# ---- machines with slower memory


def nodes(model: Model, machine: Machine) -> dict[str, Any]:
    """Returns how many machines hold the tables in DRAM, and how many with the machine's tiers do as well: they hold
    the tables and reach ENOUGH of the speed of one machine that could hold all in its DRAM."""
    room = DRAM_SHARE * machine.dram_bytes
    in_dram = math.ceil(model.table_bytes / room)
    capacity = room + sum(tier.capacity_bytes for tier in machine.tiers)
    one = sum(step_parts(model, NODE_BATCH, machine, num_ranks=1, each=1).values())
    enough = (
        num
        for num in range(math.ceil(model.table_bytes / capacity), in_dram)
        if tiered_step_s(model, machine, num) <= one / ENOUGH
    )
    with_tiers = next(enough, in_dram)
    return {"in_dram": in_dram, "with_tiers": with_tiers, "fewer": in_dram / with_tiers}


def tiered_step_s(model: Model, machine: Machine, num: int) -> float:
    """Returns the step of `num` machines whose DRAM keeps the most used rows, and each tier the next ones.

    Each different row of a batch that is not in DRAM is read, and written back in pages of 4 KiB with others. Reads are
    announced, so a tier works while the processors do. Nothing is cached beside the most used rows, so more is read
    than would be.
    """
    busy_s = sum(step_parts(model, NODE_BATCH, machine, num_ranks=num, each=1).values())
    row_bytes, start, slowest_s = model.dim * FLOAT_BYTES, num * DRAM_SHARE * machine.dram_bytes, 0.0
    for tier in machine.tiers:
        end = start + num * tier.capacity_bytes
        missed = (rows_behind(model, start / row_bytes) - rows_behind(model, end / row_bytes)) / num
        moved = missed * tier.unit_bytes * math.ceil(row_bytes / tier.unit_bytes)
        reads_s = max(missed / tier.reads_per_s, moved / tier.bytes_per_s)
        writes_s = max(missed * row_bytes / 4096 / tier.writes_per_s, missed * row_bytes / tier.bytes_per_s)
        slowest_s = max(slowest_s, reads_s + writes_s)
        busy_s += missed * tier.cpu_s_per_io / machine.cores
        start = end
    return max(busy_s, slowest_s)


def rows_behind(model: Model, kept: float) -> float:
    """Returns the expected different rows of a step that are not among the `kept` most used ones of all tables."""
    found = [rates_of(size, model.zipf, NODE_BATCH * model.lookups) for size in model.sizes]
    rates, rows = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(-rates, kind="stable")
    rates, rows = rates[order], rows[order]
    behind = np.clip(rows.cumsum() - kept, 0.0, rows)
    return float(behind @ -np.expm1(-rates))


# ---- what is said


def sockets_told(machine: str) -> str:
    """Returns the modelled efficiency on 64 sockets of a machine, and what takes most of the step there."""
    texts = []
    for kind in ("strong", "weak"):
        rows = {name: scaling(model, MACHINES[machine], 64, weak=kind == "weak") for name, model in MODELS.items()}
        told = (f"{name} {row['efficiency']:.0%} ({row['binds']})" for name, row in rows.items())
        texts.append(f"{kind} scaling: {', '.join(told)}")
    return f"modelled, not measured; efficiency on 64 sockets, {'; '.join(texts)}"


def nodes_told() -> str:
    """Returns how many servers hold each model's tables, without and with slower memory."""
    found = {name: nodes(model, MACHINES["cpu-server"]) for name, model in OF_NODES.items()}
    told = ", ".join(f"{name} {row['in_dram']} / {row['with_tiers']}" for name, row in found.items())
    return f"modelled, not measured; machines in DRAM / with SCM and an SSD: {told}"


TOLD: Mapping[str, Callable[[], str]] = {
    "model_sockets": partial(sockets_told, "sc20-cluster"),
    "model_ethernet": partial(sockets_told, "cpu-server"),
    "model_nodes": nodes_told,
}
"""What a claim names -> what makes its sentence."""


def claimed() -> dict[str, Any]:
    """Returns the sentences as cells that claims.yaml can quote, with the machine that the processor time is of."""
    report = json.loads((MEASUREMENTS / SCALING).read_text(encoding="utf-8"))
    beside = {"command": "python -m benchmarks.cluster_model", "machine": report["machine"], "date": report["date"]}
    return {name: {PROCESSOR: {"name": name, "told": told(), **beside}} for name, told in TOLD.items()}


def report() -> dict[str, Any]:
    """Returns all modelled figures."""
    found: dict[str, Any] = {"modelled": True, "measured_here": asdict(measured())}
    for name, machine in MACHINES.items():
        found[name] = {
            f"{kind} scaling": {
                model_name: [scaling(model, machine, ranks, weak=kind == "weak") for ranks in SOCKETS]
                for model_name, model in MODELS.items()
            }
            for kind in ("strong", "weak")
        }
        if machine.tiers:
            found[name]["nodes"] = {model_name: nodes(model, machine) for model_name, model in OF_NODES.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    if parser.parse_args().json:
        print(json.dumps(report()))
        return
    found = report()
    print("everything below is modelled; measured here:", found["measured_here"])
    for name, machine in MACHINES.items():
        for kind in ("strong scaling", "weak scaling"):
            print(f"\nmodelled: {machine.name}, {kind}: samples/s (efficiency) by sockets {SOCKETS}")
            for model_name, rows in found[name][kind].items():
                held = [row for row in rows if "binds" in row]
                cells = [f"{row['samples_per_s']:,.0f} ({row['efficiency']:.0%})" for row in held]
                print(f"  {model_name:12s} {'  '.join(['-'] * (len(rows) - len(held)) + cells)}")
        if machine.tiers:
            print(f"\nmodelled: {machine.name}, machines that hold the tables:")
        for model_name, row in found[name].get("nodes", {}).items():
            print(f"  {model_name}: {row['in_dram']} in DRAM, {row['with_tiers']} with SCM and an SSD")


if __name__ == "__main__":
    main()
