"""The cells of a sweep in YAML: rows made once for all cells that need the same, each cell trained in its own process.

The first pass over the data is not counted; with tiers, the first two are not, because rows come into being in the
first and are read back in the second. A round is one pass, or as many as take 0.2 s. Rounds are taken until there are
enough clean ones (other processes had the processors for at most 2 % of the time), or for MAX_S. The figure is the
median of the clean rounds; with few of them, of the less disturbed half, and `note` says so. A cell that hotrow
refuses, that diverges, or that the system ends for memory is a result too, with its `reason`.

If a cell says how much DRAM tables may take, it runs in a memory cgroup of what the process used before, that DRAM, and
SLACK_BYTES; the page cache counts. Where no group can be made, the field `unlimited` says why. With small tables the
slack holds the whole of a file tier, which is then as fast as DRAM.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import mpi_start
from benchmarks.plots import bar_chart
from benchmarks.rounds import how_clean
from benchmarks.study.group import GroupError, MemoryGroup, enter_and
from benchmarks.study.rows import prepared
from benchmarks.study.runner import Plan
from benchmarks.study.sweep import Cell, expand
from benchmarks.study.worker import MIN_ROUNDS, Spec
from hotrow.base.door import make_folder
from hotrow.base.files import write_json
from hotrow.base.waiting import wait_passively
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.draw import line_chart
from hotrow.kernels.types import NUM_STATES
from hotrow.tables import BYTES_PER_WEIGHT, TableConfig

START_S, MAX_S = 3.0, 2.5
"""A process's start, mostly the import of torch; and the seconds of rounds."""
CELL_S, QUALITY_S, RANK_S = START_S + MAX_S + 1.0, 15.0, 2.0
"""What a cell takes, for the estimate; and each rank beside the first."""
WARM_PASSES, WARM_PASSES_IN_TIERS = 1, 2
MANY_PASSES = 1_000_000
SLACK_BYTES = 256 << 20
"""What a cell in a memory group may use beside its DRAM: batches, activations, dense layers, page cache."""
CELL_TIMEOUT_S = 900.0


class CellError(RuntimeError):
    """A cell that ended in a way that is not a result."""


@dataclass(frozen=True)
class SweepCells:
    """A sweep as the runner asks for it."""

    sweep: Mapping[str, Any]
    origin: str
    quick: bool = False

    FAILURES: ClassVar[tuple[type[Exception], ...]] = (CellError,)

    def plan(self, rows: Mapping[str, Mapping[str, Any]], *, memory_bytes: int, cores: int) -> Plan:
        """Returns all cells, without those over MPI if it is not installed."""
        cells = expand(self.sweep, origin=self.origin, quick=self.quick)
        if mpi_start.mpiexec() is not None:
            return Plan(tuple(cells))
        reason = "mpi4py or mpiexec is not installed here: pip install 'hotrow[mpi]'"
        skipped = tuple({"key": cell.key, "reason": reason} for cell in cells if cell.transport == "mpi")
        return Plan(tuple(cell for cell in cells if cell.transport != "mpi"), skipped)

    def estimate_s(self, cells: Sequence[Cell]) -> float:
        rows_s = sum(1.0 + rows.num_bytes / 50e6 for rows in {cell.rows for cell in cells})
        seconds = [QUALITY_S if cell.measures == "quality" else CELL_S + RANK_S * (cell.ranks - 1) for cell in cells]
        return rows_s + sum(seconds)

    def setup_of(self, cell: Cell) -> str:
        return cell.rows.digest

    def measure(self, cells: Sequence[Cell], folder: Path) -> Iterator[tuple[Cell, dict[str, Any] | str]]:
        """Yields each cell with its row; their data is removed afterwards."""
        dataset = prepared(cells[0].rows, folder / "data")
        for cell in cells:
            shutil.rmtree(folder / "work", ignore_errors=True)  # of a process that was killed
            try:
                yield cell, _row(cell, dataset, folder / "work")
            except CellError as error:
                yield cell, str(error)
            finally:
                shutil.rmtree(folder / "work", ignore_errors=True)
        shutil.rmtree(dataset.path, ignore_errors=True)

    def headline(self, row: Mapping[str, Any]) -> str:
        speed = row.get("samples_per_s")
        return str(row["status"]) if speed is None else f"{speed:,.0f} samples/s"

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {name: self.sweep[name] for name in ("title", "asks") if name in self.sweep}

    def files(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns a chart of each group that has a figure."""
        charts = {f"{name}.svg": _chart(name, report["cells"]) for name in self.sweep["groups"]}
        return {name: svg for name, svg in charts.items() if svg}


def _chart(group: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws the speed along a group's last axis, a line for each point of the others; bars if it has no numbers."""
    lines: dict[str, list[tuple[float, float]]] = {}
    bars: dict[str, float] = {}
    axis = ""
    for row in (row for row in rows if row["group"] == group and row.get("samples_per_s")):
        *others, axis = row["axes"]
        bars[" ".join(row["axes"].values())] = row["samples_per_s"]
        with suppress(ValueError):
            place = (float(row["axes"][axis]), row["samples_per_s"])
            lines.setdefault(" ".join(row["axes"][name] for name in others) or axis, []).append(place)
    if not lines:
        return bar_chart(bars, y_label="samples/s", label=group) if bars else ""
    shares = {name: [(x, y / max(y for _, y in own)) for x, y in sorted(own)] for name, own in lines.items()}
    ticks = {x: f"{x:g}" for own in lines.values() for x, _ in own}
    return line_chart(shares, x_label=axis, y_label="speed, of the line's best", ticks=ticks, label=group)


def _row(cell: Cell, dataset: PackedDataset, work: Path) -> dict[str, Any]:
    config = config_of(cell, dataset, work)
    row = {
        "key": cell.key,
        "group": cell.group,
        "measures": cell.measures,
        "axes": cell.labels,
        "ranks": cell.ranks,
        "batch_size": config.train.batch_size,
        "table_bytes": table_bytes(config, dataset),
        **run_cell(cell, config, work),
    }
    if "rounds" in row:
        few = [f"made of {row['rounds']} rounds only"] if row["rounds"] < MIN_ROUNDS else []
        row["note"] = "; ".join([how_clean(row), *few])
    return row


def config_of(cell: Cell, dataset: PackedDataset, work: Path) -> Config:
    """Returns the config that the cell trains with."""
    plain = cell.resolved(data=str(dataset.path), tables_bytes=1 << 40)
    config = cell.resolved(data=str(dataset.path), tables_bytes=table_bytes(plain, dataset), folder=work)
    for place in config.tiers.folders:
        make_folder(place)
    if cell.measures == "quality":
        return config
    passes = math.ceil(dataset.split("train").num_rows / config.train.batch_size)
    train = config.train.model_copy(update={"epochs": MANY_PASSES, "log_every": passes, "eval_every": None})
    return config.model_copy(update={"train": train})


def table_bytes(config: Config, dataset: PackedDataset) -> int:
    """Returns the bytes of all tables with their optimizer state."""
    dtypes: Any = {"fp32": "float32", "fp16": "float16", "split_bf16": "bfloat16"}
    optimizer = config.optimizer.sparse.name

    def record_bytes(table: TableConfig) -> int:
        state_dim = 1 if optimizer == "row_wise_adagrad" else table.embedding_dim
        return table.embedding_dim * BYTES_PER_WEIGHT[table.dtype] + 4 * NUM_STATES[optimizer] * state_dim

    tables = config.model.tables(dataset, dtype=dtypes[config.train.precision])
    return sum(table.num_embeddings * record_bytes(table) for table in tables)


def run_cell(cell: Cell, config: Config, work: Path) -> dict[str, Any]:
    """Returns the fields of a cell that were measured in a process of its own, in a memory group if it limits DRAM.

    Raises CellError if the process ended in another way than by its result or for memory.
    """
    make_folder(work)
    in_tiers = not isinstance(config.memory, str)
    spec = Spec(
        config=config.model_dump(mode="json"),
        run=str(work / "run"),
        result=str(work / "result.json"),
        measures=cell.measures,
        warm_passes=WARM_PASSES_IN_TIERS if in_tiers else WARM_PASSES,
        rounds=cell.rounds,
        most_s=MAX_S,
    )
    write_json(work / "spec.json", asdict(spec))
    limited: dict[str, Any] = {}
    with ExitStack() as stack:
        group = None
        if (dram := config.tiers.dram_bytes) is not None:
            try:
                group = stack.enter_context(MemoryGroup())
            except GroupError as error:
                limited["unlimited"] = str(error)
        ranks = [stack.enter_context(own) for own in _started(cell, work, group, stack)]
        try:
            for own in ranks:
                assert own.stdout is not None
                own.stdout.readline()
            if group is not None and dram is not None and ranks[0].poll() is None:
                limited["limit_bytes"] = group.used_bytes() + cell.ranks * (dram + SLACK_BYTES)
                group.limit(limited["limit_bytes"])
            for own in ranks:
                assert own.stdin is not None
                with suppress(BrokenPipeError):
                    own.stdin.write("go\n")
                    own.stdin.close()
            until_s = time.monotonic() + CELL_TIMEOUT_S
            codes = [own.wait(max(0.0, until_s - time.monotonic())) for own in ranks]
        except subprocess.TimeoutExpired:
            _kill(ranks)
            raise CellError(f"it took more than {CELL_TIMEOUT_S:.0f} s") from None
        except BaseException:
            _kill(ranks)
            raise
        return {**_result(max(codes, key=abs), work, group), **limited}


def _started(cell: Cell, work: Path, group: MemoryGroup | None, stack: ExitStack) -> list[subprocess.Popen[str]]:
    """Starts the processes of a cell, one for each rank; over MPI mpiexec, which starts them."""
    environ = dict(os.environ)
    wait_passively(environ)
    worker = ["-m", "benchmarks.study.worker", str(work / "spec.json")]
    root = Path(__file__).resolve().parents[2]
    environ["PYTHONPATH"] = os.pathsep.join([str(root), environ.get("PYTHONPATH", "")])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    if cell.ranks > 1 and cell.transport == "mpi":
        command = enter_and(group, mpi_start.command(cell.ranks, *worker))
        errors = stack.enter_context((work / "stderr").open("wb"))
        return [subprocess.Popen(command, env=environ | mpi_start.OF_OPEN_MPI, stderr=errors, **pipes)]
    if cell.ranks > 1:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environ |= {"WORLD_SIZE": str(cell.ranks), "LOCAL_WORLD_SIZE": str(cell.ranks)}
    ranks = []
    for rank in range(cell.ranks):
        command = enter_and(group, [sys.executable, *worker])
        own = environ | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if cell.ranks > 1 else {})
        errors = stack.enter_context((work / ("stderr" if rank == 0 else f"stderr-{rank}")).open("wb"))
        ranks.append(subprocess.Popen(command, env=own, stderr=errors, **pipes))
    return ranks


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _kill(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for own in ranks:
        own.kill()


def _result(returncode: int, work: Path, group: MemoryGroup | None) -> dict[str, Any]:
    if returncode == 0 and (work / "result.json").exists():
        row: dict[str, Any] = json.loads((work / "result.json").read_text(encoding="utf-8"))
        return row
    if group is not None and group.num_killed() > 0:
        return {"status": "out of memory", "reason": "the system ended the process for memory"}
    said = (work / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise CellError(f"the process ended with code {returncode}: {said[-1] if said else 'it said nothing'}")
