"""How a process comes to be a rank: by torchrun, which says so in the environment, or in a process group that exists.

    torchrun --nproc-per-node 4 -m hotrow train CONFIG

torchrun, and whatever sets the same variables (srun, Kubernetes), gives each process WORLD_SIZE, RANK, MASTER_ADDR and
MASTER_PORT; Ray Train makes the process group itself. A process without either is a world of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from hotrow.parallel.group import begin_group
from hotrow.parallel.world import World

NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables without which WORLD_SIZE says too little."""


@contextmanager
def joined(environ: Mapping[str, str] = os.environ) -> Iterator[World]:
    """Yields the world of this process, with a micro-batch for each rank. Collective, if there are several.

    A process group that this makes is gone after the block. Raises ValueError, with the cure, for an environment that
    names no place to meet, and if the ranks do not find each other.
    """
    if dist.is_initialized():
        yield _on_machine(World.of(_with_gloo()), environ)
        return
    size = environ.get("WORLD_SIZE", "1")
    if size == "1":
        yield World()
        return
    if missing := [name for name in NEEDED if name not in environ]:
        raise ValueError(
            f"WORLD_SIZE is {size} in the environment, but {', '.join(missing)} not: start hotrow with torchrun "
            "--nproc-per-node N -m hotrow ..., which sets them all, or unset WORLD_SIZE for one process"
        )
    begin_group()
    try:
        yield _on_machine(World.of(None), environ)
    finally:
        dist.destroy_process_group()


def _on_machine(world: World, environ: Mapping[str, str]) -> World:
    rank, size = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return replace(world, local_rank=rank, local_size=size)


def _with_gloo() -> Any:
    """Returns a group that sends tensors of the CPU: torch's default one (None), or a new one of the same ranks."""
    return None if "gloo" in str(dist.get_backend_config()) else dist.new_group(backend="gloo")
