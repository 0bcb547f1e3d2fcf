"""Ranks that mpiexec starts: `mpiexec("lost", 3, folder)` runs the function of this file with that name on each rank.

Such a function gets the communicator and the folder; what it returns is written to the file `said-RANK`, as JSON.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mpi_start
from hotrow.base.waiting import wait_passively

LIMIT_S = 300.0
needs_mpi = pytest.mark.skipif(
    mpi_start.mpiexec() is None, reason="mpi4py and mpiexec are needed: pip install 'hotrow[mpi]'"
)


def mpiexec(num_ranks: int, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts `python -m ARGUMENTS` on ranks; standard output and error are pipes."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return mpi_start.start(num_ranks, "-m", *arguments, **pipes, **options)


def ranks(name: str, num_ranks: int, folder: Path) -> subprocess.Popen[str]:
    """Starts ranks that each run the function `name` of this file."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return mpiexec(num_ranks, "mpi_ranks", name, str(folder), env={**os.environ, "PYTHONPATH": path})


def said(folder: Path, num_ranks: int) -> list[Any]:
    """Returns what the function returned on each rank."""
    return [json.loads((folder / f"said-{rank}").read_text()) for rank in range(num_ranks)]


def exchange(comm: Any, folder: Path) -> dict[str, bool]:
    """Returns what held: messages of each type arrive, also in pieces, in the order of their tags, and errors too."""
    import torch

    from hotrow.parallel import mpi
    from hotrow.parallel.communicator import Communicator

    assert isinstance(comm, Communicator) and comm.transport is not None
    held, mpi.PIECE_BYTES = {}, 24
    other = 1 - comm.rank
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float16):
        mine, theirs = ((torch.arange(29) + 7 * rank).to(dtype) for rank in (comm.rank, other))
        held[f"{dtype}"] = torch.equal(
            comm.gather(mine, purpose="test")[other].view(torch.uint8), theirs.view(torch.uint8)
        )
    tags = (0, 1, (1 << 31) - 1, 0)  # the last but one is more than some MPIs have
    sent = [comm.transport.send(torch.tensor([number]), other, tag) for number, tag in enumerate(tags)]
    come = [torch.zeros(1, dtype=torch.int64) for _ in tags]
    for number in (2, 0, 1, 3):  # of one tag in order, of different tags in any
        comm.transport.receive(come[number], other, tags[number]).wait()
    for message in sent:
        message.wait()
    held["tags"] = [int(each) for each in come] == [0, 1, 2, 3]

    def fails() -> Any:
        if comm.rank == 1:
            raise ValueError("no such row")
        return torch.arange(3)

    with pytest.raises(ValueError, match="rank 1: no such row"):
        comm.gather(fails, purpose="test")
    held["the same machine"] = (comm.ranks.local_rank, comm.ranks.local_size) == (comm.rank, 2)
    return held


def lost(comm: Any, folder: Path) -> None:
    """Steps together until a rank is lost; `pid-RANK` is there when the first step is taken."""
    from hotrow.parallel.agreement import everyone
    from hotrow.parallel.heartbeat import Heartbeat

    with Heartbeat(comm, cure="Try again"):
        while True:
            everyone(comm, comm.rank)
            (folder / f"pid-{comm.rank}").write_text(str(os.getpid()))
            time.sleep(0.01)


def one_fails(comm: Any, folder: Path) -> None:
    """The last rank raises what is not its own fault; others wait for it."""
    from hotrow.parallel.agreement import everyone
    from hotrow.parallel.heartbeat import Heartbeat, exit_code

    try:
        with Heartbeat(comm, cure="Try again"):
            if comm.rank == comm.size - 1:
                raise ValueError("a bad value")
            everyone(comm, "waits for a rank that will not come")
    except ValueError as error:
        sys.exit(exit_code(error))


def main() -> None:
    wait_passively()
    from hotrow.parallel.launch import joined

    name, folder = sys.argv[1], Path(sys.argv[2])
    with joined() as comm:
        found = globals()[name](comm, folder)
        (folder / f"said-{comm.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
