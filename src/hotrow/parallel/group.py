"""How the processes of a run meet: torch's process group of gloo, made of what torchrun or another launcher says."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

MEET_S = 300.0
"""Time in which all ranks must have come; hosts of a cluster may start minutes apart."""
MORE_S = 5.0
"""Time after MEET_S in which torch has to say that it is over."""
_POLL_S = 0.05


def begin_group() -> None:
    """Makes torch's default process group, with gloo, for the ranks of the environment (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT). Raises ValueError, with the cure, if the ranks cannot meet.
    """
    with explaining_no_group():
        store, rank, size = _met()
        dist.init_process_group("gloo", store=fresh(store, rank, size), rank=rank, world_size=size)


def _met() -> tuple[Store, int, int]:
    """Returns the store of the ranks, and rank and size. Raises RuntimeError if they do not meet.

    A thread asks, because torch (2.13) waits without end for another program that listens at the port and says nothing.
    """
    met: list[tuple[Store, int, int]] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            met.append(next(rendezvous("env://", timeout=timedelta(seconds=MEET_S))))
        except Exception as error:  # for the thread that waits
            failed.append(error)

    asking = threading.Thread(target=ask, name="hotrow-meet", daemon=True)
    asking.start()
    asking.join(MEET_S + MORE_S)
    if failed:
        raise failed[0]
    if not met:
        raise RuntimeError("timed out: what listens there is no store of torch")
    return met[0]


def fresh(store: Store, rank: int, size: int) -> Store:
    """Returns a part of `store` in which nothing is stored yet, the same on all ranks, which call this together.

    torchrun keeps its store when it starts ranks again, and gloo would call those that have ended, at the addresses
    they left in it (torch 2.13, with every kind of rendezvous). Restarts that torchrun counts name no generation of
    ranks: hosts may count differently. So each rank leaves a word of its own, rank 0 repeats them all, and a rank that
    reads its own there knows that rank 0 lives now. Raises ValueError after MEET_S, on rank 0 naming who did not come.
    """
    mine = secrets.token_hex(8)
    store.set(f"hotrow/here/{rank}", mine)
    others = range(1, size)
    until_s = time.monotonic() + MEET_S
    while time.monotonic() < until_s:
        if rank == 0:
            store.set("hotrow/words", json.dumps([_value(store, f"hotrow/here/{each}") for each in range(size)]))
            if all(store.check([f"hotrow/{mine}/{each}"]) for each in others):
                store.set(f"hotrow/{mine}/go", "")
                return PrefixStore(f"hotrow/{mine}/group", store)
        else:
            words = json.loads(_value(store, "hotrow/words") or "[]")
            if len(words) == size and words[rank] == mine:
                store.set(f"hotrow/{words[0]}/{rank}", "")
                if store.check([f"hotrow/{words[0]}/go"]):
                    return PrefixStore(f"hotrow/{words[0]}/group", store)
        time.sleep(_POLL_S)
    absent = [each for each in others if not store.check([f"hotrow/{mine}/{each}"])] if rank == 0 else [0]
    raise ValueError(
        f"rank {', '.join(map(str, absent))} of {size} did not come within {MEET_S:.0f} s; see that every rank was "
        "started, and look at the first error that one of them printed"
    )


def _value(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


@contextmanager
def explaining_no_group() -> Iterator[None]:
    """Inside the block a process group is made. Raises ValueError, with the cause and the cure, if that fails because
    the port is in use or the ranks do not find each other.
    """
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        where = f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT')}"
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise ValueError(
                f"the ranks cannot meet at {where}: another process uses this port. Set MASTER_PORT (torchrun: "
                "--master-port or --rdzv-endpoint) to a free one, the same on every rank"
            ) from error
        if "timed out" in text or "refused" in text or "getaddrinfo" in text:
            raise ValueError(
                f"the ranks did not meet at {where} ({text.splitlines()[0]}): see that every rank was started, that "
                "MASTER_ADDR is the host of rank 0, that no other program uses the port, and that no firewall closes it"
            ) from error
        raise
