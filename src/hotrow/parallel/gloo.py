"""The transport over torch's gloo, and how the ranks of a run meet, by what torchrun or another launcher says."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.hosts import interfaces, namespace_id
from hotrow.parallel.ranks import Ranks

T = TypeVar("T")
MEET_S = 300.0
"""Time in which all ranks must have come; hosts of a cluster may start minutes apart."""
MORE_S = 5.0
"""Time after MEET_S in which torch has to say that it is over."""
CONNECT_S = 120.0
"""Time in which gloo must have connected ranks that have met."""
_POLL_S = 0.05


@dataclass
class Gloo:
    """A `Transport` between the ranks of a process group that has gloo. If `group` is None, torch's default group."""

    group: Any = None

    def send(self, message: Tensor, to: int, tag: int) -> Any:
        return dist.isend(message, group=self.group, group_dst=to, tag=tag)

    def receive(self, into: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(into, group=self.group, group_src=source, tag=tag)


def communicator(group: Any = None, micro_batches: int | None = None) -> Communicator:
    """Returns the communicator of a process group of torch.distributed. group: if None, torch's default group.
    micro_batches: if None, one for each rank. Raises ValueError if there are fewer micro-batches than ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ranks = Ranks(rank, size, size, transport="gloo")
    ranks = ranks.with_micro_batches(size if micro_batches is None else micro_batches)
    lanes = _lanes.setdefault(dist.group.WORLD if group is None else group, itertools.count())
    return Communicator(ranks, Gloo(group), lane=next(lanes))


_lanes: MutableMapping[Any, Iterator[int]] = WeakKeyDictionary()
"""By process group, the lanes of its next communicators: its ranks make them in the same order."""


def begin_group() -> None:
    """Makes torch's default process group, with gloo, for the ranks of the environment (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT). Raises ValueError, with the cure, if the ranks cannot meet or cannot be connected."""
    with explaining_no_group():
        store, rank, size = _in_time(
            lambda: next(rendezvous("env://", timeout=timedelta(seconds=MEET_S))),
            MEET_S + MORE_S,
            "timed out: what listens there is no store of torch",
        )
    own = fresh(store, rank, size)
    check_addresses(own, rank, size)
    try:
        late = f"not within {CONNECT_S:.0f} s"
        _in_time(lambda: dist.init_process_group("gloo", store=own, rank=rank, world_size=size), CONNECT_S, late)
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"rank {rank} ({socket.gethostname()}) met the other ranks, but gloo did not connect them "
            f"({str(error).splitlines()[0]}): see whether another rank has failed, allow TCP between all hosts of the "
            f"run, and set GLOO_SOCKET_IFNAME on each to an interface that the others reach (here: {_named()})"
        ) from error


def _in_time(function: Callable[[], T], limit_s: float, late: str) -> T:
    """Returns what `function` returns. Raises RuntimeError with the text `late` if that takes longer than `limit_s`. A
    thread calls it, because torch (2.13) waits without end for another program that listens at the port and says
    nothing, and for half an hour for a rank that gloo cannot reach, deaf to signals."""
    made: list[T] = []
    failed: list[Exception] = []

    def call() -> None:
        try:
            made.append(function())
        except Exception as error:  # for the thread that waits
            failed.append(error)

    calling = threading.Thread(target=call, name="hotrow-meet", daemon=True)
    calling.start()
    calling.join(limit_s)
    if failed:
        raise failed[0]
    if not made:
        raise RuntimeError(late)
    return made[0]


def check_addresses(store: Store, rank: int, size: int) -> None:
    """Raises ValueError on all ranks if they are on several hosts, and gloo would give the others an address of one
    that only itself reaches: many systems let a host's own name mean 127.0.1.1."""
    own = {"host": socket.gethostname(), "net": namespace_id("net"), "address": _address(), "interfaces": _named()}
    store.set(f"address/{rank}", json.dumps(own))
    found = [json.loads(store.get(f"address/{each}")) for each in range(size)]
    store.set(f"read/{rank}", "")
    given = [each for each in found if each["address"]]
    unreachable = {each["host"]: each for each in given if ip_address(each["address"].partition("%")[0]).is_loopback}
    if unreachable and len({each["net"] for each in found}) > 1:
        told = "; ".join(
            f"the name of {host} means {each['address']} there: set GLOO_SOCKET_IFNAME on {host} to an interface that "
            f"other hosts reach ({each['interfaces']})"
            for host, each in unreachable.items()
        )
        with suppress(dist.DistError):  # rank 0 may hold the store, in which the others still read
            store.wait([f"read/{each}" for each in range(size)], timedelta(seconds=MORE_S))
        raise ValueError(f"the ranks are on several hosts, and gloo takes the address that a host's name means. {told}")


def _address() -> str | None:
    """The address that gloo will take. If None, it takes that of the interface in GLOO_SOCKET_IFNAME."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    return "127.0.0.1"


def _named() -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces().items()) or "it has none"


def fresh(store: Store, rank: int, size: int) -> Store:
    """Returns a part of `store` in which nothing is stored yet, the same part on all ranks. Collective.

    torchrun keeps its store when it starts ranks again, and gloo would call those that have ended, at the addresses
    they left in it (torch 2.13, with every kind of rendezvous). Restarts that torchrun counts name no generation of
    ranks: hosts may count differently. So each rank leaves a word of its own, rank 0 repeats them all, and a rank that
    reads its own there knows that rank 0 lives now. Raises ValueError if another process comes as the same rank, and
    after MEET_S, on rank 0 naming who did not come.
    """
    mine = secrets.token_hex(8)
    store.set(f"hotrow/here/{rank}", mine)
    others = range(1, size)
    until_s = time.monotonic() + MEET_S
    while time.monotonic() < until_s:
        if _value(store, f"hotrow/here/{rank}") != mine:
            raise ValueError(
                f"another process has come as rank {rank} of {size} too: start each rank once, with a RANK of its own, "
                "and each run with a MASTER_PORT of its own"
            )
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
    the port is in use or the ranks do not find each other."""
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


def unnamed_interface(comm: Communicator) -> str | None:
    """Returns a warning if gloo has to guess its network interface on some rank, otherwise None. Collective. gloo
    guesses if ranks run on several hosts (or network namespaces), GLOO_SOCKET_IFNAME is not set, and a host has several
    interfaces: it takes the address that the host's own name resolves to."""
    if not isinstance(comm.transport, Gloo):
        return None
    unset = not os.environ.get("GLOO_SOCKET_IFNAME")
    mine = {"host": socket.gethostname(), "net": namespace_id("net"), "interfaces": interfaces() if unset else {}}
    found = everyone(comm, mine)
    if len({each["net"] for each in found}) == 1:
        return None
    several = {each["net"]: each for each in found if len(each["interfaces"]) > 1}
    if not several:
        return None
    hosts = "; ".join(
        f"{each['host']} has {', '.join(f'{name} ({address})' for name, address in each['interfaces'].items())}"
        for each in several.values()
    )
    return (
        f"GLOO_SOCKET_IFNAME is not set, and {hosts}: gloo takes the interface that the host's name resolves to, which "
        "may be a slow one or one that other hosts cannot reach. Set GLOO_SOCKET_IFNAME to the name of the fast one"
    )
