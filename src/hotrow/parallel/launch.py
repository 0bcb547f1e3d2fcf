"""How a process comes to be a rank: its launcher says so in the environment, or a process group exists already.

    torchrun --nproc-per-node 4 -m hotrow train CONFIG
    mpiexec -n 4 python -m hotrow train CONFIG

torchrun, and whatever sets the same variables (srun, Kubernetes), gives each process WORLD_SIZE, RANK, MASTER_ADDR and
MASTER_PORT, and the ranks meet over gloo. If mpiexec or srun starts processes without these, they meet over MPI. Ray
Train makes the process group itself. A process without any of this trains alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from hotrow.parallel.communicator import Communicator
from hotrow.parallel.environment import nested, size_variable
from hotrow.parallel.gloo import begin_group, communicator
from hotrow.parallel.messages import WireDtype
from hotrow.parallel.mpi import joined_by_mpi
from hotrow.parallel.sharded import ShardedMemory
from hotrow.parallel.shards import Shard
from hotrow.placement import AnyMemory

NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables without which WORLD_SIZE says too little."""


@contextmanager
def joined(environ: Mapping[str, str] = os.environ) -> Iterator[Communicator]:
    """Yields the communicator of this process, with a micro-batch for each rank. Collective if there are several ranks.

    A process group that this makes is gone after the block. Raises ValueError, with the cure, for an environment that
    names no place to meet or two launchers, and if the ranks do not find each other.
    """
    if dist.is_initialized():
        # Tensors of the CPU are sent by gloo: by torch's default group (None), or by a new one of the same ranks.
        group = None if "gloo" in str(dist.get_backend_config()) else dist.new_group(backend="gloo")
        yield _on_machine(communicator(group), environ)
        return
    if (variable := size_variable(environ)) is None:
        yield Communicator()
        return
    size = environ[variable]
    if not size.isdecimal():
        raise ValueError(
            f"{variable} is {size!r} in the environment; it must be how many processes there are: start hotrow with "
            "torchrun or mpiexec, which set it, or unset it for one process"
        )
    if variable != "WORLD_SIZE":
        with joined_by_mpi(int(size), variable) as comm:
            yield comm
        return
    if (other := nested(environ)) is not None:
        raise ValueError(
            f"WORLD_SIZE is {size} and {other} is {environ[other]} in the environment, as if mpiexec had started "
            f"torchrun: start hotrow with one of them, or unset {other} if mpiexec shall start a torchrun on each host"
        )
    if missing := [name for name in NEEDED if name not in environ]:
        raise ValueError(
            f"WORLD_SIZE is {size} in the environment, but {', '.join(missing)} not: start hotrow with torchrun "
            "--nproc-per-node N -m hotrow ..., which sets them all, or unset WORLD_SIZE for one process"
        )
    begin_group()
    try:
        yield _on_machine(communicator(), environ)
    finally:
        dist.destroy_process_group()


def shard(
    memory: AnyMemory = None,
    *,
    shards: Mapping[str, Shard] | None = None,
    group: Any = None,
    micro_batches: int | None = None,
    wire_dtype: WireDtype = "fp32",
) -> ShardedMemory:
    """Returns what `EmbeddingCollection(memory=...)` takes to share its tables among the ranks of a process group.

        torch.distributed.init_process_group("gloo")
        shards = hotrow.shard(hotrow.Memory(dram="2GiB", ssd="/nvme"))
        emb = hotrow.EmbeddingCollection(tables, memory=shards)
        first, end = shards.ranks.samples(len(batch))      # what this rank trains of a global batch

    From then on all ranks must look up, step, read and write the collection in the same order, also for batches without
    a sample: `forward`, `sequence`, `step`, `state_dict`, `read_rows` and checkpoints wait for the other ranks.

    memory: where each rank keeps its own rows, as `EmbeddingCollection` takes it. shards: by table; a table that is not
    named is dealt out row by row. group: a process group of torch.distributed; if None, its default group.
    micro_batches: how many parts a global batch is cut into. Any number of ranks up to it gives the same bits; if None,
    the number of ranks. wire_dtype: "fp32"; or "bf16" or "fp16", in which numbers of float32 are rounded and travel in
    half as many bytes, so that results depend on the number of ranks.
    """
    comm = communicator(group, micro_batches)
    return ShardedMemory(comm=comm, shards=dict(shards or {}), below=memory, wire_dtype=wire_dtype)


def _on_machine(comm: Communicator, environ: Mapping[str, str]) -> Communicator:
    rank, size = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return replace(comm, ranks=replace(comm.ranks, local_rank=rank, local_size=size))
