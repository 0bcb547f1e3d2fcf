"""Runs of several ranks on this machine, and what of two runs must be equal to the bit.

    with session(3, given, folder / "session") as ranks:   # trains, or goes on if the run's folder has begun
        assert ranks.join() == [0, 0, 0]
    assert outcome(Path(given["run"])) == expected

Ranks are forked from a server that has imported torch, with one thread each; over MPI, mpiexec starts them.
rank_faults.py and rank_laws.py use this.
The first session sets OMP_NUM_THREADS=1, as torchrun does: threads of numpy's BLAS wait for each other in busy loops.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import mpi_start
from hotrow.config.load import load_config, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.launch import joined
from hotrow.run import runs
from hotrow.run.build import build
from hotrow.run.checkpoint import list_checkpoints, load_checkpoint
from hotrow.run.folder import CONFIG, RunFolder
from hotrow.setup.setup import Setup

CONTEXT = multiprocessing.get_context("forkserver")
# torch's optimizers import torch._dynamo when the first is made, which takes a second.
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "hotrow.run.runs", "hotrow.parallel.launch"])
HANG_S = 180.0
"""Ranks of mpiexec each import torch, which takes a minute on a machine that has much else to do."""
ENDING_S = 5.0
"""In which mpiexec sees that a rank has failed, and ends the others."""
Transport = Literal["gloo", "mpi"]
TRANSPORTS: tuple[Transport, ...] = ("gloo", "mpi")


@dataclass
class OfMpi:
    """A rank that mpiexec started, as the process of `multiprocessing` that it would be over gloo. Its exit code is
    that of mpiexec, which ends all ranks if one ends with another than 0, and does not tell theirs. So it is 0 if the
    rank has gone and mpiexec goes on."""

    launcher: subprocess.Popen[bytes]
    noted: Path
    """Where the rank writes its process id."""

    @property
    def pid(self) -> int:
        return int(self.noted.read_text())

    @property
    def exitcode(self) -> int | None:
        if self.launcher.poll() is None and self.noted.exists() and not is_alive(self.pid):
            self.join(ENDING_S)
            return 0 if self.launcher.poll() is None else self.launcher.returncode
        return self.launcher.poll()

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.launcher.wait(timeout)

    def kill(self) -> None:
        if self.launcher.poll() is None:
            with suppress(ProcessLookupError):  # mpiexec may outlive its ranks for a moment
                os.kill(self.pid if self.noted.exists() else self.launcher.pid, signal.SIGKILL)


class Session:
    """The ranks of one session of a run, each a process with its standard error in a file."""

    def __init__(self, size: int, given: Mapping[str, Any], folder: Path, transport: Transport) -> None:
        """given: the config. If its run has begun, that goes on, with what the config says of memory and ranks."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.folder = folder
        folder.mkdir()
        self.processes: list[Any] = []
        if transport == "mpi":
            (folder / "given").write_text(json.dumps(given))
            code = "from benchmarks.rank_runs import serve_mpi; serve_mpi()"
            with (folder / "mpiexec").open("w") as said:
                launcher = mpi_start.start(size, "-c", code, str(folder), stdout=said, stderr=said)
            self.processes = [OfMpi(launcher, folder / f"pid-{rank}") for rank in range(size)]
            return
        port = _free_port()
        for rank in range(size):
            self.processes.append(CONTEXT.Process(target=_rank, args=(rank, size, port, given, folder)))
            self.processes[-1].start()

    def told(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def ends(self) -> str:
        """Returns how each rank ended, and the last that it said, on one line."""
        told = [" ".join(self.told(rank)[-800:].split()) for rank in range(len(self.processes))]
        ends = [f"{each.exitcode}: {text}" for each, text in zip(self.processes, told, strict=True)]
        return "; ".join([*ends, *filter(None, [self.told_by_mpiexec()])])

    def told_by_mpiexec(self) -> str:
        """Returns what mpiexec has said so far, on one line; "" of other launchers."""
        path = self.folder / "mpiexec"
        return " ".join(path.read_text(errors="replace").split()) if path.exists() else ""

    def join(self, limit_s: float = HANG_S) -> list[int | None]:
        """Returns the exit codes of all ranks; None for one that has not ended within `limit_s`."""
        until_s = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(0.0, until_s - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:  # over MPI none has ended before all have
            process.join()


@contextmanager
def session(size: int, given: Mapping[str, Any], folder: Path, transport: Transport = "gloo") -> Iterator[Session]:
    found = Session(size, given, folder, transport)
    try:
        yield found
    finally:
        found.end()


def _rank(rank: int, size: int, port: int, given: Mapping[str, Any], folder: Path) -> None:
    os.dup2(os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    torch.set_num_threads(1)
    _train(rank, size, port, given)


def _train(rank: int, size: int, port: int, given: Mapping[str, Any]) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    environ = {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ.update(environ)
    with joined(environ) as comm:
        _begin_or_go_on(comm, given)


def _begin_or_go_on(comm: Communicator, given: Mapping[str, Any]) -> None:
    if (Path(given["run"]) / CONFIG).is_file():
        changes = [f"{name}={json.dumps(given[name])}" for name in ("memory", "parallel") if name in given]
        runs.resume(given["run"], changes, quiet=True, comm=comm)
    else:
        runs.train(make_config(dict(given)), quiet=True, comm=comm)


def serve_mpi() -> None:
    """Is one of the ranks that mpiexec starts for the session whose folder is the argument."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with joined() as comm:
        os.dup2(os.open(folder / f"rank-{comm.rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        (folder / f"new-{comm.rank}").write_text(str(os.getpid()))
        (folder / f"new-{comm.rank}").rename(folder / f"pid-{comm.rank}")  # so it is whole when it is there
        _begin_or_go_on(comm, json.loads((folder / "given").read_text()))


def serve_whole_ends() -> None:
    """Forks the ranks of each run that a line of standard input describes; answers with their exit codes.

    Processes of `session` end by `os._exit`. A child of this returns from its function, so its interpreter ends as that
    of a command does: what can go wrong there, such as a thread that still holds tensors, ends it by a signal.
    """
    importlib.import_module("torch._dynamo")
    for line in sys.stdin:
        size, port, given = json.loads(line)
        children = []
        for rank in range(size):
            if (child := os.fork()) == 0:
                _train(rank, size, port, given)
                return
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def whole_ends(
    size: int, runs_given: Iterable[Mapping[str, Any]], transport: Transport = "gloo"
) -> Iterator[tuple[list[int | None], str]]:
    """Yields the exit codes of the ranks of each run, whose interpreters end as a command's do, and what they said."""
    if transport == "mpi":
        for given in runs_given:
            with tempfile.TemporaryDirectory() as name, session(size, given, Path(name) / "ranks", transport) as ranks:
                yield ranks.join(), ranks.ends()
        return
    command = [sys.executable, "-c", "from benchmarks.rank_runs import serve_whole_ends; serve_whole_ends()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        for given in runs_given:
            server.stdin.write(json.dumps([size, _free_port(), dict(given)]) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            said.seek(0)
            assert answer, said.read()
            yield json.loads(answer), said.read()
            said.truncate(0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait(done: Callable[[], bool], limit_s: float = HANG_S) -> bool:
    """Waits until `done` returns True; returns whether it did within `limit_s`."""
    until_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


def outcome(run: Path) -> dict[str, str]:
    """Returns what must be equal of two runs: losses and metrics as text, bits of the last checkpoint by SHA-256."""
    folder = RunFolder.open(run)
    losses = {
        f"{line['kind']} {line['step']} {line.get('split')}": line.get("loss", line.get("logloss"))
        for line in folder.measurements()
        if line["kind"] in ("train", "eval")
    }
    return {"losses": json.dumps(losses), "metrics": json.dumps(folder.record.final_metrics), **_bits(folder)}


def is_alive(pid: int) -> bool:
    """Returns whether a process runs or is stopped. Linux only."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Returns the names of what is not equal of two outcomes."""
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


def _bits(folder: RunFolder) -> dict[str, str]:
    """Returns SHA-256 of all weights and states of the last checkpoint, loaded into one process: files of one process
    in tiers have other names than those of several ranks."""
    config, checkpoints = load_config(folder.path / CONFIG, ["memory=dram"]), list_checkpoints(folder.checkpoints)
    parts = build(Setup.decide(config, PackedDataset.open(config.data), folder.path))
    load_checkpoint(checkpoints[max(checkpoints)], parts.with_state())
    tensors = {f"table {table.name}": parts.embedding.rows(table.name).whole() for table in parts.embedding.tables}
    tensors |= {f"state {name}": rows.whole() for name, rows in parts.sparse_optimizer.state_rows().items()}
    tensors |= {f"weight {name}": weight for name, weight in parts.model.state_dict().items()}
    for number, state in parts.dense_optimizer.state_dict()["state"].items():
        tensors |= {f"dense state {number}.{name}": value for name, value in state.items()}
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
