"""The cells of a study in YAML: data prepared once, predictions written first, each cell trained in its own process."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from hotrow.base.door import make_folder
from hotrow.base.files import write_json
from hotrow.base.records import read_sealed, write_sealed
from hotrow.base.waiting import wait_passively
from hotrow.bench import how_clean
from hotrow.config.schema import Config
from hotrow.costs.declared import faster, with_gpus
from hotrow.costs.demand import required_bytes, tables_of
from hotrow.costs.hardware import Figure, Hardware
from hotrow.costs.work import Work
from hotrow.data.packed.reader import PackedDataset
from hotrow.lab import mpi_start
from hotrow.lab.study.data import NotHere, prepared
from hotrow.lab.study.group import GroupError, MemoryGroup, enter_and
from hotrow.lab.study.results import files_of, summary_of
from hotrow.lab.study.runner import Plan
from hotrow.lab.study.scaling import modelled_of
from hotrow.lab.study.study import Cell, Study, expand
from hotrow.lab.study.worker import MIN_ROUNDS, Spec
from hotrow.parallel.ranks import Ranks
from hotrow.run.folder import RUN, RunFolder
from hotrow.setup.setup import Setup
from hotrow.setup.slots import threads_of

START_S = 3.0
"""A process's start: mostly the import of torch."""
MAX_S = 2.5
"""Seconds of rounds, if the machine is quiet or not."""
CELL_S, QUALITY_S, RANK_S, MODELLED_S = START_S + MAX_S + 1.0, 15.0, 2.0, 0.5
"""What a cell takes, for the estimate; and each rank beside the first."""
WARM_PASSES, WARM_PASSES_IN_TIERS = 1, 2
"""In the first pass rows come into being; those that tiers then moved out are read in the second."""
MANY_PASSES = 1_000_000
SLACK_BYTES = 256 << 20
"""What a cell in a memory group may use beside its DRAM: batches, activations, dense layers, page cache."""
CELL_TIMEOUT_S = 900.0
PREDICTIONS = "predictions.json"
MODEL_VERSION = 3
"""Of what is said of machines that are not here: rows with an older one are modelled again."""
UNKNOWN = "this machine's figures are missing, from which it would be modelled: run hotrow probe"
_CURE = "remove the folder, or pass another --out"


class CellError(RuntimeError):
    """A cell that ended in a way that is not a result."""


@dataclass(frozen=True)
class Studied:
    """A study as the runner asks for it."""

    study: Study
    origin: str
    quick: bool = False
    hardware: Hardware | None = None
    """This machine, for predictions, and its watts and price; if None, neither is shown."""
    machines: Mapping[str, Hardware | str] | None = None
    """Declared machines to model every cell for, or why one cannot be."""
    say: Callable[[str], None] = lambda line: None
    """Receives what the user should know before the first cell is measured."""

    FAILURES: ClassVar[tuple[type[Exception], ...]] = (CellError,)

    @cached_property
    def _in_order(self) -> list[Cell]:
        """All cells in the order of pages, without those over MPI if it is not installed."""
        cells = expand(self.study, origin=self.origin, quick=self.quick)
        if mpi_start.mpiexec() is not None or not any(map(_is_over_mpi, cells)):
            return cells
        self.say("cells over MPI are left out: mpi4py or mpiexec is not installed here (pip install 'hotrow[mpi]')")
        return [cell for cell in cells if not _is_over_mpi(cell)]

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells; those with the same data are next to each other."""
        return sorted(self._in_order, key=self.setup_of)

    def plan(self, rows: Mapping[str, Mapping[str, Any]], *, memory_bytes: int, cores: int) -> Plan:
        return Plan(tuple(self.cells))

    def estimate_s(self, cells: Sequence[Cell]) -> float:
        data = {cell.data for cell in cells if not cell.is_modelled}
        rows_s = sum(1.0 + rows.num_bytes / 50e6 for rows in data)
        return rows_s + sum(_cell_s(cell) for cell in cells)

    def disk_bytes(self) -> int:
        """Returns about how many bytes packed rows take at a time: if the study predicts, those of all cells."""
        sizes = [rows.num_bytes for rows in {cell.data for cell in self.cells if not cell.is_modelled}]
        return sum(sizes) if self.study.predicts else max(sizes, default=0)

    def setup_of(self, cell: Cell) -> str:
        return cell.data.digest

    def begin(self, cells: Sequence[Cell], folder: Path) -> None:
        """Writes the predictions that the study wants, before anything is measured."""
        shutil.rmtree(folder / "work", ignore_errors=True)  # of a process that was killed
        if self.study.predicts and cells:
            self._predict_all(cells, folder)

    def _predict_all(self, cells: Sequence[Cell], folder: Path) -> None:
        """Predicts `cells`, none of which has a row yet, unless they have a prediction already.

        Raises NotHere if this machine's file lacks figures, or no cell can be predicted.
        """
        if self.hardware is None:
            raise NotHere(
                f"study {self.origin} predicts, which needs this machine's figures: run hotrow probe FOLDER first"
            )
        known = self.predictions(folder)
        cells = [cell for cell in cells if not cell.is_modelled]
        missing = [cell for cell in cells if "step_ms" not in known.get(cell.key, {})]
        origin = {"hardware": self.hardware.name, "hardware_date": self.hardware.date}
        for cell in missing:
            known[cell.key] = {**self.predicted(cell, self.hardware, folder), **origin}
        reasons = Counter(known[cell.key]["reason"] for cell in missing if "reason" in known[cell.key])
        for reason, times in reasons.items():
            told = f"{times} of {len(cells)} cells cannot be predicted: {reason}"
            if "hotrow probe" in reason:
                raise NotHere(f"{told}: run hotrow probe FOLDER")
            if not any("step_ms" in one for one in known.values()):
                raise NotHere(f"{told}: change that, or leave out predicts")
            self.say(told)
        if missing:
            written = now()
            known |= {cell.key: {**known[cell.key], "written": written} for cell in missing}
            write_sealed(folder / PREDICTIONS, {"hotrow_predictions": 1, "cells": known})

    def predictions(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Returns what was predicted of each cell; nothing if the study does not predict."""
        if not (folder / PREDICTIONS).exists():
            return {}
        fields = read_sealed(folder / PREDICTIONS, cure=_CURE)
        return dict(fields["cells"])

    def config_of(self, cell: Cell, dataset: PackedDataset, folder: Path) -> Config:
        """Returns the config that the cell trains with."""
        plain = cell.resolved(data=str(dataset.path), tables_bytes=1 << 40)
        needed = required_bytes(plain, tables_of(plain, dataset))
        config = cell.resolved(data=str(dataset.path), tables_bytes=needed, folder=folder)
        for place in config.tiers.folders:
            make_folder(place)
        if cell.measures == "quality":
            return config
        passes = math.ceil(dataset.split("train").num_rows / config.train.batch_size)
        train = config.train.model_copy(update={"epochs": MANY_PASSES, "log_every": passes, "eval_every": None})
        return config.model_copy(update={"train": train})

    def predicted(self, cell: Cell, hardware: Hardware, folder: Path, *, threads: int | None = None) -> dict[str, Any]:
        """Returns the step's predicted time on a machine, or why there is none. threads: instead of the config's."""
        dataset = prepared(cell.data, folder / "data")
        ranks = Ranks(0, cell.ranks, cell.ranks, local_size=cell.ranks, transport=cell.transport)
        try:
            config = self.config_of(cell, dataset, folder / "work")
            setup = Setup.decide(config, dataset, folder, ranks=ranks)
            warm = WARM_PASSES_IN_TIERS if setup.in_tiers else WARM_PASSES
            warmup = warm * math.ceil(dataset.split("train").num_rows / config.train.batch_size)
            train = {"epochs": warm + cell.rounds, "threads": threads or threads_of(config, cell.ranks)}
            config = config.model_copy(update={"train": config.train.model_copy(update=train)})
            planner = replace(setup.planner, config=config, hardware=hardware, warmup=warmup)
            slots = None if setup.below is None else planner.slots_in(setup.below)[1]
            found, work = planner.predict(slots, setup.below), planner.work
            _, shared = planner.shared(work, announced=slots is not None)
        except ValueError as error:
            return {"reason": str(error)}
        phases = {f"{phase}_ms": 1e3 * seconds for phase, seconds in found.seconds.items()}
        whole: dict[str, Any] = {"step_ms": 1e3 * found.step_s, **phases, "wait_ms": 1e3 * found.wait_s}
        if shared is not None:
            whole |= {"exchange_ms": 1e3 * found.exchange_s, "wire_bytes": sum(shared.by_purpose.values())}
        if hardware.gpus and hardware is not self.hardware and cell.ranks == 1:
            whole["with_gpus"] = _with_gpus(work, hardware, found.seconds)
        return {**whole, "binds": found.binds, "threads": work.threads}

    def measure(self, cells: Sequence[Cell], folder: Path) -> Iterator[tuple[Cell, dict[str, Any] | str]]:
        """Yields each cell with its row; their data is removed afterwards."""
        before = self.predictions(folder)
        for cell in cells:
            try:
                row = self._row(cell, folder, before.get(cell.key))
                if self.study.keep == "runs":
                    row |= _kept_run(cell, folder)
                yield cell, row
            except CellError as error:
                yield cell, str(error)
            finally:
                shutil.rmtree(folder / "work", ignore_errors=True)
        shutil.rmtree(folder / "data" / cells[0].data.digest, ignore_errors=True)

    def _row(self, cell: Cell, folder: Path, predicted: Mapping[str, Any] | None) -> dict[str, Any]:
        if cell.is_modelled:
            return self._completed(cell, _unmeasured(cell), folder)
        dataset = prepared(cell.data, folder / "data")
        config = self.config_of(cell, dataset, folder / "work")
        tables = tables_of(config, dataset)
        facts: dict[str, Any] = {
            "group": cell.group,
            "measures": cell.measures,
            "axes": cell.labels,
            "batch_size": config.train.batch_size,
            "table_bytes": required_bytes(config, tables),
            **({"ranks": cell.ranks} if cell.ranks > 1 else {}),
        }
        row = {"key": cell.key, "measured_at": now(), **facts, **run_cell(cell, config, folder / "work")}
        if "rounds" in row:
            few = [f"made of {row['rounds']} rounds only"] if row["rounds"] < MIN_ROUNDS else []
            row["note"] = "; ".join([how_clean(row), *few, *([row["note"]] if "note" in row else [])])
        if predicted is not None:
            row["predicted"] = dict(predicted)
        return self._completed(cell, row, folder)

    def complete(self, rows: dict[str, dict[str, Any]], folder: Path) -> None:
        """Adds machines that were not named when a row was measured, and costs that were not declared. Puts rows into
        the order of the study."""
        for digest, cells in itertools.groupby(self.cells, self.setup_of):
            for cell in cells:
                if cell.key in rows:
                    rows[cell.key] = self._completed(cell, rows[cell.key], folder)
            shutil.rmtree(folder / "data" / digest, ignore_errors=True)
        for cell in self._in_order:
            if cell.key in rows:
                rows[cell.key] = rows.pop(cell.key)

    def _completed(self, cell: Cell, row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Returns a row with its costs, and with the machines that it lacks or that were declared anew since."""
        modelled = dict(row.get("modelled", {}))
        wanted = cell.is_modelled or not self.study.models_alone
        for name, machine in (self.machines or {}).items() if wanted else ():
            state = "unknown" if isinstance(machine, str) else state_of(machine)
            if modelled.get(name, {}).get("state") != state:
                modelled[name] = {**self._modelled(cell, row, machine, folder), "state": state}
        return {**row, **self._costs(row), **({"modelled": modelled} if modelled else {})}

    def _modelled(self, cell: Cell, row: Mapping[str, Any], machine: Hardware | str, folder: Path) -> dict[str, Any]:
        """Returns a step's modelled time on a machine that is not here, and a range; or why there is none.

        It is what was measured here, times what was predicted there over what was predicted here. The range is what was
        measured here, divided by how many times faster the machine is at the work that it speeds up most and least.
        A cell that is not run has no range.
        """
        if cell.is_modelled:
            return modelled_of(cell, machine)
        if isinstance(machine, str) or "step_ms" not in row:
            return {"reason": machine if isinstance(machine, str) else "not measured here"}
        assert self.hardware is not None, "machines are modelled from this one"
        there = self.predicted(cell, machine, folder, threads=machine.num_cores)
        here = self.predicted(cell, self.hardware, folder)
        for found in (there, here):
            if "step_ms" not in found:
                return found
        try:
            rates = faster(machine, machine.num_cores, self.hardware, here["threads"])
        except ValueError as error:
            return {"reason": str(error)}
        step_ms = row["step_ms"] * there["step_ms"] / here["step_ms"]
        times_ms = [step_ms, *(row["step_ms"] / rate for rate in rates.values())]
        speed, low, high = (1e3 * row["batch_size"] / ms for ms in (step_ms, max(times_ms), min(times_ms)))
        found = {"step_ms": step_ms, "samples_per_s": speed, "spread": [low, high], "binds": there["binds"]}
        found |= costs_of(speed, machine.watts_without_gpus, machine.price_per_hour)
        return found | ({"with_gpus": there["with_gpus"]} if "with_gpus" in there else {})

    def _costs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns samples per joule and per unit of money; what is not declared is absent."""
        if row.get("samples_per_s") is None:
            return {}
        watts, price = (None, None) if self.hardware is None else (self.hardware.watts, self.hardware.price_per_hour)
        return costs_of(row["samples_per_s"], watts, price)

    def headline(self, row: Mapping[str, Any]) -> str:
        speed = row.get("samples_per_s")
        return str(row["status"]) if speed is None else f"{speed:,.0f} samples/s"

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return summary_of(self.study, self._own(rows))

    def _own(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the rows of this study's cells in their order: the file may hold those of an earlier version."""
        place = {cell.key: at for at, cell in enumerate(self._in_order)}
        return sorted((row for row in rows if row["key"] in place), key=lambda row: place[row["key"]])

    def files(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        own = {**report, "cells": self._own(report["cells"])}
        return files_of(self.study, own, machines=[*(self.machines or {})])


def costs_of(samples_per_s: float, watts: Figure | None, price_per_hour: Figure | None) -> dict[str, Any]:
    """Returns samples per joule and per unit of money, each with its source; without a figure, it is absent."""
    found: dict[str, Any] = {}
    for name, figure, seconds in (("samples_per_j", watts, 1.0), ("samples_per_unit", price_per_hour, 3600.0)):
        if figure is not None:
            found |= {name: samples_per_s * seconds / figure.value, f"{name}_source": figure.source}
    return found


def _with_gpus(work: Work, machine: Hardware, host_s: Mapping[str, float]) -> dict[str, Any]:
    """Returns a step with the GPUs of a machine that is not here, as fields of a row; or why there is none."""
    try:
        found = with_gpus(work, machine, host_s)
    except ValueError as error:
        return {"reason": str(error)}
    speed, high, low = (work.batch_size / seconds for seconds in (found.step_s, *found.range_s))
    fields = {"step_ms": 1e3 * found.step_s, "samples_per_s": speed, "spread": [low, high]}
    fields |= {"rows_on": found.rows_on, "binds": found.binds}
    return fields | costs_of(speed, machine.watts, machine.price_per_hour)


def state_of(machine: Hardware) -> str:
    """Returns what changes if a machine's figures do, or how it is modelled. Those of its steps are dated."""
    figures = asdict(replace(machine, kernels={}, notes={}, versions={})) | {"modelled": MODEL_VERSION}
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:8]


def _kept_run(cell: Cell, folder: Path) -> dict[str, str]:
    """Moves the cell's run to where it stays, and returns the field that names it; {} if it left none."""
    run, kept = folder / "work" / "run", folder / "runs" / f"{cell.group}-{cell.fingerprint()}"
    if not (run / RUN).is_file():
        return {}
    shutil.rmtree(RunFolder.open(run).checkpoints, ignore_errors=True)
    shutil.rmtree(kept, ignore_errors=True)  # of a cell whose row a killed study did not write
    make_folder(kept.parent)
    run.rename(kept)
    return {"run": str(kept.relative_to(folder))}


def _unmeasured(cell: Cell) -> dict[str, Any]:
    facts = {"group": cell.group, "measures": cell.measures, "axes": cell.labels, "ranks": cell.ranks}
    return {"key": cell.key, **facts, "status": "modelled", "modelled": {}}


def _is_over_mpi(cell: Cell) -> bool:
    return cell.transport == "mpi" and not cell.is_modelled


def _cell_s(cell: Cell) -> float:
    if cell.is_modelled:
        return MODELLED_S
    return QUALITY_S if cell.measures == "quality" else CELL_S + RANK_S * (cell.ranks - 1)


def now() -> str:
    """Returns the time in UTC; of two, the text of the earlier comes first."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


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
        slow_s=CELL_TIMEOUT_S / (MIN_ROUNDS + 2),
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
            if not (work / "result.json").exists():
                raise CellError(f"it took more than {CELL_TIMEOUT_S:.0f} s") from None
            return {**_kept(work), "note": f"stopped after {CELL_TIMEOUT_S:.0f} s", **limited}
        except BaseException:
            _kill(ranks)
            raise
        return {**_result(max(codes, key=abs), work, group), **limited}


def _started(cell: Cell, work: Path, group: MemoryGroup | None, stack: ExitStack) -> list[subprocess.Popen[str]]:
    """Starts the processes of a cell, one for each rank; over MPI mpiexec, which starts them."""
    environ = dict(os.environ)
    wait_passively(environ)
    worker = ["-m", "hotrow.lab.study.worker", str(work / "spec.json")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    if cell.ranks > 1 and _is_over_mpi(cell):
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


def _kept(work: Path) -> dict[str, Any]:
    row = json.loads((work / "result.json").read_text(encoding="utf-8"))
    assert isinstance(row, dict)
    return row


def _result(returncode: int, work: Path, group: MemoryGroup | None) -> dict[str, Any]:
    if returncode == 0 and (work / "result.json").exists():
        return _kept(work)
    if group is not None and group.num_killed() > 0:
        return {"status": "out of memory", "reason": "the system ended the process for memory"}
    said = (work / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise CellError(f"the process ended with code {returncode}: {said[-1] if said else 'it said nothing'}")
