"""This checkout's steps beside those of another checkout of hotrow, on one machine in one run.

    python -m benchmarks.before_after TREE [--rounds 30] [--folder DIR] [CELL ...]

For changes that must not cost speed. Each checkout trains in a process of its own, by TREE/.venv/bin/python, on the
same ids from the same seed; rounds of steps alternate, and the checkout that goes first alternates too. Losses must be
equal to the bit. A line a cell: median seconds a step, the median of the paired ratios (other / this: above 1 is
faster now) with their quartiles, and the share of rounds without stolen time.

Cells: kernels (lookup and update alone: 8 tables x 200,000 rows x 64, 10 ids per bag), kaggle (26 tables, one id,
wide MLPs), bags (26 tables, 20 ids per bag, small MLPs), tiers (1/10 of the tables' bytes in DRAM). Ids are Zipf
1.05, all optimizers SGD. Three small ones, on one thread and by its processor time: fit (the step of `hotrow.fit` on
39 columns, 4 members and 128 rows), mlps (forward and backward of four MLPs at 1 to 256 rows each), scorer
(`hotrow.Scorer` on 200 candidates as dicts, of an export of that fit).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CELLS = {"kernels": 20, "kaggle": 10, "bags": 10, "tiers": 20, "fit": 20, "mlps": 5, "scorer": 50}
"""Steps of a round, by cell."""

WORKER = """
import hashlib, sys, time
from pathlib import Path
import numpy as np, torch
import hotrow
from hotrow import EmbeddingCollection, KeyedJaggedTensor, TableConfig

def rounds(step, num_steps, digest, clock=time.process_time):
    print("ready", flush=True)
    for line in sys.stdin:
        started = clock()
        for _ in range(num_steps):
            step()
        print((clock() - started) / num_steps, digest.hexdigest(), flush=True)

def clicks(folder):
    random, num_rows = np.random.default_rng(1), 20_000
    columns = [("click", random.random(num_rows) < 0.25), ("ts", 1_700_000_000 + np.arange(num_rows))]
    columns += [(f"I{i}", np.round(random.lognormal(1, 1, num_rows), 2)) for i in range(13)]
    columns += [(f"C{i}", random.zipf(1.3, num_rows) % 10 ** (1 + i % 4) + 100_000) for i in range(26)]
    rows = zip(*(own.astype(int) if own.dtype == bool else own for _, own in columns))
    lines = [",".join(name for name, _ in columns), *(",".join(map(str, row)) for row in rows)]
    (folder / "clicks.csv").write_text(chr(10).join(lines))
    return folder / "clicks.csv"

def fit(folder, num_steps, **options):
    options = {f"train.{name}": value for name, value in {**options, "max_steps": num_steps}.items()}
    # A schema of its own, and no map of scores: what `fit` guesses and chooses is not the same in all versions.
    ids = {"categorical": [f"C{i}" for i in range(26)], "tables": {"default": {"min_count": 2}}}
    schema = {"label": "click", "time": "ts", "dense": [f"I{i}" for i in range(13)], **ids}
    options["calibration.method"] = None
    return hotrow.fit(clicks(folder), schema=schema, run=folder / "run", quiet=True, refit=False, **options)

def run_fit(folder, num_steps):
    from hotrow.run import trainer
    plain, digest, asked, started = trainer.train_step, hashlib.sha256(), [0], []
    def step(*arguments):
        if asked[0] == 0:  # the loop is inside of `fit`: it waits here for the next round
            if started:
                print((time.process_time() - started.pop()) / num_steps, digest.hexdigest(), flush=True)
            if not sys.stdin.readline():
                sys.exit()
            asked[0] = num_steps
            started.append(time.process_time())
        asked[0] -= 1
        loss = plain(*arguments)
        digest.update(loss.numpy().tobytes())
        return loss
    trainer.train_step = step
    print("ready", flush=True)
    fit(folder, 10**6, epochs=10**4, threads=1, batch_size=128)

def run_mlps(num_steps):
    from hotrow.kernels import ops
    torch.set_num_threads(1)
    torch.manual_seed(1)
    digest, calls = hashlib.sha256(), []
    for widths in ((367, 512, 256, 1), (13, 64, 8), (64, 200, 80, 1), (567, 128, 64, 1)):
        weights = [(torch.randn(o, i) / i**0.5).requires_grad_() for i, o in zip(widths, widths[1:])]
        biases = [torch.randn(o).requires_grad_() for o in widths[1:]]
        for rows in (1, 8, 64, 128, 200, 256):
            calls.append((torch.randn(rows, widths[0]).requires_grad_(), weights, biases))
    def step():
        for x, weights, biases in calls:
            out = ops.mlp(x, weights, biases, last="linear").sum()
            torch.autograd.grad(out, [x, *weights, *biases])
            digest.update(out.detach().numpy().tobytes())
    rounds(step, num_steps, digest)

def run_scorer(folder, num_steps):
    torch.set_num_threads(1)
    fit(folder, 30).export(folder / "export")
    scorer, digest = hotrow.Scorer(folder / "export"), hashlib.sha256()
    random = np.random.default_rng(2)
    numbers = {f"I{i}": float(i) for i in range(13)} | {f"C{i}": 100_001 + i for i in range(13)}
    items = [{f"C{i}": 100_000 + int(random.zipf(1.3) % 10 ** (1 + i % 4)) for i in range(13, 26)} for _ in range(200)]
    def step():
        digest.update(scorer.score(user=numbers, items=items).tobytes())
    rounds(step, num_steps, digest)

def run(cell, folder, num_steps, name):
    own = Path(folder) / name  # the sides must not write the same files
    own.mkdir()
    if cell in ("fit", "scorer"):
        return (run_fit if cell == "fit" else run_scorer)(own, num_steps)
    if cell == "mlps":
        return run_mlps(num_steps)
    torch.set_num_threads(2)
    wide = {"kernels": (8, 200_000, 64, 10), "kaggle": (26, 100_000, 16, 1), "bags": (26, 100_000, 64, 20)}
    num, rows, dim, bag = wide.get(cell, (8, 250_000, 64, 1))
    batch, names = 2048, [f"t{i}" for i in range(num)]
    tables = [TableConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=(n,)) for n in names]
    memory = None
    if cell == "tiers":
        memory = hotrow.Memory(dram=num * rows * dim * 4 // 10, ssd=folder, force=True)
    emb = EmbeddingCollection(tables, memory=memory, seed=1)
    mlps = {"kaggle": (512, 256), "bags": (64,)}.get(cell, ())
    torch.manual_seed(1)
    widths = [emb.output_dim, *mlps, 1]
    parts = [p for n, m in zip(widths, widths[1:]) for p in (torch.nn.Linear(n, m), torch.nn.ReLU())][:-1]
    head = torch.nn.Sequential(*parts)
    sparse, dense = hotrow.SGD(emb, lr=0.01), torch.optim.SGD(head.parameters(), lr=0.01)
    random = np.random.default_rng(1)
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -1.05)
    def made():
        ids = np.searchsorted(weights, random.random(num * batch * bag) * weights[-1])
        lengths = torch.full((num * batch,), bag)
        return KeyedJaggedTensor(names, torch.from_numpy(ids), lengths=lengths)
    label = (torch.arange(batch) % 3 == 0).float()[:, None]
    kept = [made() for _ in range(100 if cell == "tiers" else 8)]
    def batches():
        number = 0
        while True:
            batch = kept[number % len(kept)]
            yield KeyedJaggedTensor(batch.keys, batch.values.clone(), offsets=batch.offsets)
            number += 1
    source = iter(hotrow.lookahead(batches(), emb, depth=4) if cell == "tiers" else batches())
    digest = hashlib.sha256()
    def step():
        out = emb(next(source))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(out), label)
        loss.backward(); dense.step(); dense.zero_grad(); sparse.step()
        digest.update(loss.detach().numpy().tobytes())
    for _ in range(300 if cell == "tiers" else 5):
        step()
    rounds(step, num_steps, digest, time.perf_counter)

run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
"""
"""Written against names that README and docs promise, `train_step` and `ops.mlp`, so that it runs on both checkouts."""


class Side:
    """One checkout's process, which trains a round when it is told to."""

    def __init__(self, tree: Path, cell: str, folder: str, name: str) -> None:
        command = [str(tree / ".venv/bin/python"), "-c", WORKER, cell, folder, str(CELLS[cell]), name]
        self.process = subprocess.Popen(command, cwd=tree, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer("ready")

    def answer(self, expected: str = "") -> list[str]:
        """Its next line. Raises RuntimeError if it ended instead."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words or (expected and words != [expected]):
            raise RuntimeError(f"{self.process.args!r} ended: {self.process.wait()}")
        return words

    def train(self) -> tuple[float, str]:
        """Seconds a step over one round, and a digest of all losses so far."""
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        seconds, digest = self.answer()
        return float(seconds), digest


def stolen_ticks() -> int:
    """Time that the hypervisor took from this machine's processors so far."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8])


def measure(cell: str, trees: Sequence[Path], num_rounds: int, folder: str | None) -> dict[str, Any]:
    """The figures of one cell; trees: this one and the other."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        sides = [Side(tree, cell, own, name) for tree, name in zip(trees, ("this", "other"), strict=True)]
        seconds: list[list[float]] = [[], []]
        clean = 0
        for number in range(num_rounds):
            before, digests = stolen_ticks(), ["", ""]
            for side in (0, 1) if number % 2 else (1, 0):
                own_seconds, digests[side] = sides[side].train()
                seconds[side].append(own_seconds)
            if digests[0] != digests[1]:
                raise RuntimeError(f"{cell}: losses differ between {trees[0]} and {trees[1]} in round {number}")
            clean += stolen_ticks() == before
        for side in sides:
            side.process.kill()  # a run would end its step first, and wait for the next round
            side.process.wait()
    ratios = [other / this for this, other in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    step_ms = [round(1e3 * statistics.median(own), 3) for own in seconds]
    return {
        "cell": cell,
        "step_ms": step_ms[0],
        "other_step_ms": step_ms[1],
        "other_over_this": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "clean_rounds": f"{clean} of {num_rounds}",
    }


def main() -> None:
    """Print a line of JSON a cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}; default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", help="where the tables' files lie")
    options = parser.parse_intermixed_args()
    here = Path(__file__).resolve().parent.parent
    for cell in options.cells or CELLS:
        print(json.dumps(measure(cell, (here, options.tree), options.rounds, options.folder)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
