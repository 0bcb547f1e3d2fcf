"""What ranks must agree on: config, data, versions, kernels at the start; step, position and weights while they train.

Each rank says what it has, all compare, and all raise the same error, which names the ranks that differ from rank 0.
A rank that is lost while others wait for it is the heartbeat's matter (heartbeat.py).
"""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hotrow.base.machine import versions
from hotrow.base.records import flat
from hotrow.config.schema import Config
from hotrow.kernels import ops
from hotrow.parallel.communicator import Communicator

T = TypeVar("T")
CHECK_EVERY = 100
"""Steps between two checks while training. One costs an exchange of 32 bytes a rank and a checksum of the dense
weights, about a millisecond for each 2 MiB of them."""
PER_RANK = ("data", "run", "memory", "train.threads")
"""Options that may differ between ranks: paths on a rank's machine, and how much of it a rank uses. They change no bit;
threads do so only if torch computes products in bfloat16, or a model is not built of hotrow's layers.
`memory.lookahead` is compared all the same, because ranks announce batches together."""
MAX_NAMED = 3
"""How many differences an error names; it counts the others."""
_PURPOSE = "agreement"


class CommonError(ValueError):
    """An error that every rank raises with the same text: none of them has to be told by another."""


def everyone(comm: Communicator, value: Any) -> list[Any]:
    """Returns the JSON-ready `value` of each rank, by rank. Collective: every rank calls it."""
    if comm.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in comm.gather(text, purpose=_PURPOSE)]


def on_every_rank(comm: Communicator, function: Callable[[], T]) -> T:
    """Returns the result of `function` on this rank. Collective: if it raises ValueError or OSError on any rank, every
    rank raises a ValueError that names these ranks and says what each met."""
    result, met = None, None
    try:
        result = function()
    except (ValueError, OSError) as error:
        if comm.size == 1:
            raise
        met = f"{error}" or type(error).__name__
    found = everyone(comm, {"host": socket.gethostname(), "met": met})
    if not any(each["met"] for each in found):
        return result  # type: ignore[return-value]  # it did not raise
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        if each["met"]:
            ranks.setdefault(each["met"], []).append(rank)
    raise CommonError("; ".join(f"{_named(where, found)}: {text}" for text, where in ranks.items()))


def on_first_rank(comm: Communicator, function: Callable[[], T]) -> T | None:
    """Returns what `function` returns on the first rank, and None on others. If it raises, every rank raises."""
    return on_every_rank(comm, lambda: function() if comm.rank == 0 else None)


# ---- at the start


def facts_of(config: Config, *, checksum: str, micro_batches: int) -> dict[str, Any]:
    """The values that must be the same on all ranks, by name: the dataset's `checksum`, options of `config` by their
    dotted names, and the rest. Paths, threads and memory of a rank are left out (PER_RANK)."""
    found = versions()
    options, per_rank = dict(flat(config.model_dump(mode="json"))), tuple(f"{option}." for option in PER_RANK)
    return {
        "the version of hotrow": found["hotrow"],
        "the version of torch": found["torch"],
        "kernels": ops.backend().name,
        "the instruction set": ops.isa_of(config.train.dense_dtype),
        "the checksum of the dataset": checksum,
        **{name: value for name, value in options.items() if not f"{name}.".startswith(per_rank)},
        "memory.lookahead": config.tiers.lookahead,
        "train.micro_batches": micro_batches,
    }


_CURES = {
    "the version of hotrow": "install the same one on every host",
    "the version of torch": "install the same one on every host",
    "kernels": "build the native module on every host, or set HOTROW_NATIVE=0 on all (many times slower)",
    "the instruction set": "set HOTROW_ISA to the narrowest of them on every rank, because others round otherwise",
    "the checksum of the dataset": "copy one packed dataset to every host; two preparations may number ids differently",
}
_CONFIG_CURE = "start every rank with the same config file and the same --set"


def check_same(comm: Communicator, facts: Mapping[str, Any]) -> None:
    """Compares `facts` (JSON-ready values by name) of all ranks. Collective. Raises ValueError on every rank if any
    differs: it names the field, each value with its ranks and hosts, and the cure."""
    found = everyone(comm, {"host": socket.gethostname(), "facts": facts})
    names = dict.fromkeys(name for each in found for name in each["facts"])
    told, cures = [], []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            value = json.dumps(each["facts"][name]) if name in each["facts"] else "nothing"
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            told.append(f"{name} is " + ", ".join(f"{value} on {_named(on, found)}" for value, on in ranks.items()))
            cures.append(_CURES.get(name, _CONFIG_CURE))
    if told:
        more = f"; and {len(told) - MAX_NAMED} more differences" if len(told) > MAX_NAMED else ""
        all_cures = "; ".join(dict.fromkeys(cures[:MAX_NAMED]))
        raise CommonError(f"the ranks of a run must agree, but {'; '.join(told[:MAX_NAMED])}{more}: {all_cures}")


def _named(ranks: Sequence[int], found: Sequence[Mapping[str, Any]]) -> str:
    """Returns ranks with their hosts, in words."""
    hosts = list(dict.fromkeys(found[rank]["host"] for rank in ranks))
    numbers = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers} ({', '.join(hosts)})"


# ---- while training


def check_still_same(
    comm: Communicator, step: int, position: tuple[int, int], weights: Iterable[Tensor], *, now: bool = False
) -> None:
    """Compares where ranks are, and a checksum of their dense weights, every CHECK_EVERY steps or if `now`. Collective.

    position: epoch and batch that come next. weights: the dense weights, in the same order on every rank.
    Raises ValueError on every rank if one differs from rank 0; it names these ranks and what differs.
    """
    if comm.size == 1 or (step % CHECK_EVERY and not now):
        return
    mine = torch.tensor([step, *position, checksum_of(weights)])
    values = [part.tolist() for part in comm.gather(mine, purpose=_PURPOSE)]
    first = values[0]
    names = ("step", "epoch", "batch", "checksum of the dense weights")
    told = [
        f"rank {rank} has {name} {own}, rank 0 {value}"
        for rank, each in enumerate(values)
        for name, own, value in zip(names, each, first, strict=True)
        if own != value
    ]
    if told:
        raise CommonError(
            f"the ranks of this run went apart by step {step}: {'; '.join(told)}. They compute the same numbers "
            "unless memory or a processor fails, or libraries differ: look at the hosts of these ranks, and go on "
            "from the newest checkpoint, before which they were still the same"
        )


def checksum_of(weights: Iterable[Tensor]) -> int:
    """Returns the crc32 of all bytes of `weights`, in order."""
    found = 0
    for weight in weights:
        array = weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found = zlib.crc32(array.data, found)
    return found
