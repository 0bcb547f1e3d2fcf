"""Where tables lie when a GPU trains: four ways to run one DLRM, in one process, interleaved.

    python -m benchmarks.gpu [--rows 1000000] [--part 8] [--zipf 1.05] [--stretches 7] [--quick]

(27 GB of DRAM, 8.5 GB of device memory; a GPU has not run it yet.)
26 tables of dim 64, one id per feature and sample, SGD on tables and MLPs; the MLPs are torch's, on the GPU, always:
  torch hybrid   nn.EmbeddingBag(sparse=True) and torch.optim.SGD on the CPU; pooled rows and their gradients cross
  our hybrid     hotrow's tables in DRAM, its kernels on the CPU; pooled rows and their gradients cross
  cached         hotrow's tables in DRAM, a PART of their bytes as slots on the GPU, filled by look-ahead
  all in HBM     the same with slots for every row
Before anything is timed the losses of all four are compared. Then stretches of the same batches alternate; printed are
steps per second and the ratio to torch hybrid, median and range over the stretches, and hits of the cache. Refuses
without a GPU. `--device cpu` tries the script in Triton's interpreter and measures nothing of worth.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

import hotrow
from hotrow.models.dlrm import DLRM

DIM, NUM_DENSE, DEPTH, LR, SEED = 64, 13, 4, 0.05, 1
Batches = Sequence[hotrow.Batch]


class Side:
    """A way to run the model: tables somewhere, `self.model` on the device."""

    name = ""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = copy.deepcopy(model).to(device), device
        self.dense_optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def batches(self, batches: Batches) -> Batches:
        """As the loop is given them."""
        return batches

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """[B, F * D] on the device."""
        raise NotImplementedError

    def step(self) -> None:
        """Of the tables' optimizer."""
        raise NotImplementedError

    def train(self, batches: Batches) -> tuple[float, list[float]]:
        """Seconds for these steps, and their losses, which are read when the time is taken."""
        losses: list[Tensor] = []
        started = time.perf_counter()
        for batch in self.batches(batches):
            dense, label = batch.dense.to(self.device), batch.label.to(self.device)
            logits = self.model(dense, self.pooled(batch))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
            self.dense_optimizer.zero_grad()
            loss.backward()
            self.dense_optimizer.step()
            self.step()
            losses.append(loss.detach())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started, [float(loss) for loss in losses]


class TorchHybrid(Side):
    """torch's tables on the CPU."""

    name = "torch hybrid"

    def __init__(self, model: nn.Module, device: torch.device, emb: hotrow.EmbeddingCollection) -> None:
        super().__init__(model, device)
        self.bags = [
            nn.EmbeddingBag.from_pretrained(emb.float32(t.name).clone(), freeze=False, mode="sum", sparse=True)
            for t in emb.tables
        ]
        self.optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=LR)

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """Side by side, then across."""
        ids = batch.sparse.values.view(len(self.bags), -1, 1)
        pooled = torch.cat([bag(own) for bag, own in zip(self.bags, ids, strict=True)], dim=1)
        return pooled.to(self.device)

    def step(self) -> None:
        """Of the rows that have gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class OurHybrid(Side):
    """hotrow's tables and kernels on the CPU; with a DeviceMemory on the device."""

    name = "our hybrid"

    def __init__(self, model: nn.Module, device: torch.device, emb: hotrow.EmbeddingCollection) -> None:
        super().__init__(model, device)
        self.emb = emb
        self.optimizer = hotrow.SGD(emb, lr=LR, nonfinite=None)  # a look at gradients is a wait for the GPU

    def batches(self, batches: Batches) -> Batches:
        """With look-ahead, which matters where there are slots."""
        return hotrow.lookahead(batches, self.emb, depth=DEPTH)  # type: ignore[return-value]

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """There already, or across."""
        return self.emb(batch.sparse).to(self.device)

    def step(self) -> None:
        """Of the rows that were looked up."""
        self.optimizer.step()


def make_tables(num_tables: int, num_rows: int) -> list[hotrow.TableConfig]:
    """One feature each."""
    return [
        hotrow.TableConfig(name=f"t{t}", num_embeddings=num_rows, embedding_dim=DIM, feature_names=(f"f{t}",))
        for t in range(num_tables)
    ]


def make_batches(options: argparse.Namespace, count: int) -> list[hotrow.Batch]:
    """Ids by their chance 1 / rank ** zipf; rows are numbered by popularity."""
    rng, keys = np.random.default_rng(SEED), tuple(f"f{t}" for t in range(options.tables))
    reach = np.cumsum(np.arange(1, options.rows + 1, dtype=np.float64) ** -options.zipf)
    found = []
    for _ in range(count):
        ids = np.searchsorted(reach, rng.random(len(keys) * options.batch_size) * reach[-1])
        dense = rng.standard_normal((options.batch_size, NUM_DENSE)).astype(np.float32)
        label = (rng.random(options.batch_size) < 0.3).astype(np.float32)
        sparse = hotrow.KeyedJaggedTensor(keys, torch.from_numpy(ids.astype(np.int64)))
        found.append(hotrow.Batch(torch.from_numpy(dense), sparse, torch.from_numpy(label)))
    return found


def make_sides(options: argparse.Namespace) -> list[Side]:
    """The four, from the same rows and weights."""
    device, tables = torch.device(options.device), make_tables(options.tables, options.rows)
    generator = torch.Generator().manual_seed(SEED)
    model = DLRM(
        num_dense=NUM_DENSE, num_features=options.tables, embedding_dim=DIM,
        bottom_mlp=(512, 256), top_mlp=(512, 256), generator=generator,
    )  # fmt: skip
    num_bytes = options.tables * options.rows * DIM * 4
    plain = hotrow.EmbeddingCollection(tables, seed=SEED)
    sides: list[Side] = [TorchHybrid(model, device, plain), OurHybrid(model, device, plain)]
    for name, hbm in (("cached", num_bytes // options.part), ("all in HBM", num_bytes * 8 // 7 + 1024)):
        memory = hotrow.DeviceMemory(hbm=hbm, device=options.device)
        side = OurHybrid(model, device, hotrow.EmbeddingCollection(tables, memory=memory, seed=SEED))
        side.name = name
        sides.append(side)
    return sides


def check_losses(sides: Sequence[Side], batches: Batches) -> None:
    """Raises ValueError where one of them trains something else."""
    first, *others = [side.train(batches)[1] for side in sides]
    for side, losses in zip(sides[1:], others, strict=True):
        if not np.allclose(losses, first, rtol=1e-3):
            raise ValueError(f"{side.name}: losses {losses} are not {sides[0].name}'s, {first}; nothing is timed")


def report(sides: Sequence[Side], seconds: dict[str, list[float]], num_steps: int) -> list[str]:
    """A line for each side."""
    lines, base = [], seconds[sides[0].name]
    for side in sides:
        own = seconds[side.name]
        ratios = [b / a for a, b in zip(own, base, strict=True)]
        line = (
            f"{side.name:<13} {num_steps / statistics.median(own):9.1f} steps/s   "
            f"{statistics.median(ratios):6.2f} times torch hybrid ({min(ratios):.2f} to {max(ratios):.2f})"
        )
        rows = side.emb.device_rows if isinstance(side, OurHybrid) else None
        if rows is not None:
            counts = rows.counters().values()
            hits, total = (sum(own[name] for own in counts) for name in ("hit_rows", "rows"))
            line += f"   rows found on the device: {hits / max(1, total):.1%}"
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--part", type=int, default=8, help="cached: slots for one in so many bytes of the tables")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--stretches", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small: tries the script, measures nothing of worth")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"benchmarks.gpu needs a GPU; torch {torch.__version__} finds none here, so nothing was measured")
    options.tables, options.batch_size, num_steps = (3, 4, 2) if options.quick else (26, 2048, 100)
    options.rows = min(options.rows, 200) if options.quick else options.rows
    sides = make_sides(options)
    batches = make_batches(options, 2 * num_steps)
    check_losses(sides, batches[:num_steps])  # compiles the kernels and warms the cache, too
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for stretch in range(options.stretches):
        turn = stretch % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            seconds[side.name].append(side.train(batches)[0])
    where = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "interpreted on the CPU"
    print(f"{where}, torch {torch.__version__}; {options.tables} tables of {options.rows:,} rows, dim {DIM}")
    print("\n".join(report(sides, seconds, len(batches))))


if __name__ == "__main__":
    main()
