"""What a tier between DRAM and disk gives: its share of hits, and the speed beside two tiers of the same DRAM.

    python -m benchmarks.three_tiers --ssd FOLDER [--file /dev/shm] [--zipf 1.05] [--quick] [PART ...]

Eight tables of dim 64, lookups and row-wise Adagrad alone, a sixteenth of their bytes as DRAM; every row lies on
disk before anything is timed. The middle tier holds a PART of the bytes: a sixteenth, a quarter, all. Stretches of the
same batches alternate between two and three tiers; outputs that differ by a bit end it. Printed: rows found in the
middle among those that slots lacked and the store had, and steps per second over those of two tiers, median and range
over the stretches. `--file` on tmpfs is memory, and so the most that a middle tier can give: byte-addressable storage
is slower.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import hotrow
from benchmarks import bench
from benchmarks.markdown import clean_rounds, table
from benchmarks.results import end_on_signals
from hotrow.placement.budget import Memory

NUM_TABLES, DIM, BATCH_SIZE, DEPTH, SEED = 8, 64, 2048, 4, 1
DRAM_PARTS = 16
MIDDLE_PARTS = [16, 4, 1]


class Side:
    """A collection in tiers with its optimizer; every row lies in the stores."""

    def __init__(self, num_rows: int, memory: Memory) -> None:
        tables = [
            hotrow.TableConfig(name=f"t{t}", num_embeddings=num_rows, embedding_dim=DIM, feature_names=(f"t{t}",))
            for t in range(NUM_TABLES)
        ]
        self.emb = hotrow.EmbeddingCollection(tables, memory=memory, seed=SEED)
        self.optimizer = hotrow.RowWiseAdagrad(self.emb, lr=0.01)
        self.tiers = self.emb.placement
        self.tiers.write_every_row()
        self.sums: list[float] = []

    def train(self, batches: Sequence[hotrow.KeyedJaggedTensor]) -> float:
        """Seconds for these steps."""
        started = time.perf_counter()
        for batch in hotrow.lookahead(batches, self.emb, depth=DEPTH):
            out = self.emb(batch)
            self.sums.append(float(out.detach().sum()))
            out.backward(torch.ones_like(out))
            self.optimizer.step()
        return time.perf_counter() - started

    def count(self, name: str) -> int:
        """Over all tables."""
        return sum(own[name] for own in self.tiers.counters().values())


def zipf_batches(num_rows: int, exponent: float, count: int, seed: int) -> list[hotrow.KeyedJaggedTensor]:
    """Each table's ids by their chance 1 / rank ** exponent; rows are numbered by popularity."""
    rng = np.random.default_rng(seed)
    reach = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
    keys = tuple(f"t{t}" for t in range(NUM_TABLES))
    drawn = [np.searchsorted(reach, rng.random(NUM_TABLES * BATCH_SIZE) * reach[-1]) for _ in range(count)]
    return [hotrow.KeyedJaggedTensor(keys, torch.from_numpy(ids.astype(np.int64))) for ids in drawn]


def measure(args: argparse.Namespace, part: int) -> str:
    """A line of the table."""
    num_rows, steps, rounds = (20_000, 4, 3) if args.quick else (100_000, 25, 5)
    table_bytes = NUM_TABLES * num_rows * (DIM * 4 + 4)
    # Of it the third tier's map is taken, which leaves fewer slots: the last column.
    dram = table_bytes // DRAM_PARTS
    with tempfile.TemporaryDirectory(dir=args.ssd) as ssd, tempfile.TemporaryDirectory(dir=args.file) as file:
        memory = Memory(dram=dram, ssd=ssd, file=file, file_bytes=table_bytes // part + 16 * NUM_TABLES * 260)
        two, three = Side(num_rows, Memory(dram=dram, ssd=ssd)), Side(num_rows, memory)

        def one_round(number: int) -> float:
            batches = zipf_batches(num_rows, args.zipf, steps, seed=number)
            sides = (two, three) if number % 2 else (three, two)
            seconds = {side: side.train(batches) for side in sides}
            if two.sums != three.sums:
                raise SystemExit("three tiers gave another output than two: not reported")
            return seconds[two] / seconds[three]

        one_round(0)  # fills the tiers
        before = {name: three.count(name) for name in ("middle_hits", "read_rows")}
        found = bench.clean_rounds(lambda number: one_round(number + 1), rounds, of_disk=True)
        grown = {name: three.count(name) - n for name, n in before.items()}
        share = grown["middle_hits"] / max(1, grown["middle_hits"] + grown["read_rows"])
        slots = [sum(own.pinned + own.cached for own in side.tiers.slots) for side in (two, three)]
        two.tiers.close()
        three.tiers.close()
    ratios = found.results
    median = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| 1/{part} | {share:.1%} | {median} | {slots[1] / slots[0]:.2f} | {clean_rounds(found.counts())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", type=Path, required=True)
    parser.add_argument("--file", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("parts", nargs="*", type=int, default=MIDDLE_PARTS, metavar="PART")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    args = parser.parse_args()
    end_on_signals()
    heads = ("middle, of the tables' bytes", "hits there, of what slots lacked", "speed over two", "slots over two")
    print("\n".join(table(dict.fromkeys((*heads, "clean rounds"), "left"), [])), flush=True)
    for part in args.parts:
        print(measure(args, part), flush=True)


if __name__ == "__main__":
    main()
