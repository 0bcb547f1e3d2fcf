"""Which rank holds which row of a table, against a list made row by row; and messages of rows."""

import itertools

import numpy as np
import pytest
import torch

from hotrow.kernels.keys import pack, unpack
from hotrow.parallel.messages import WireDtype, narrow, widen
from hotrow.parallel.shards import Homes, Shard
from loops import looped

CASES = [
    (num_rows, num_ranks, Shard(prefix=prefix, kind=kind, owner=owner))
    for num_rows, num_ranks, prefix, kind in itertools.product((1, 2, 7, 12), (1, 2, 3, 5), (0, 1, 4), ("row", "table"))
    if prefix <= num_rows
    for owner in ((0,) if kind == "row" else range(num_ranks))
]


def holders(shard: Shard, num_rows: int, num_ranks: int) -> list[list[int]]:
    found, dealer = [], itertools.cycle(range(num_ranks))
    for row in range(num_rows):
        if row < shard.prefix:
            found.append(list(range(num_ranks)))
        else:
            found.append([next(dealer) if shard.kind == "row" else shard.owner])
    return found


@looped(("num_rows", "num_ranks", "shard"), CASES)
def test_numbers_of_rows_against_dealing_them_out(num_rows: int, num_ranks: int, shard: Shard) -> None:
    shard.check("t", num_rows, 9, num_ranks)
    truth, every = holders(shard, num_rows, num_ranks), np.arange(num_rows)
    homes = shard.homes(every, num_ranks)
    for rank in range(num_ranks):
        own = np.array([row for row in every if rank in truth[row]], np.int64)
        assert shard.held(every, rank, num_ranks).nonzero()[0].tolist() == own.tolist()
        assert shard.num_local(num_rows, rank, num_ranks) == len(own)
        assert shard.local(own, num_ranks).tolist() == list(range(len(own)))
        assert shard.rows(np.arange(len(own)), rank, num_ranks).tolist() == own.tolist()
        assert list(map(shard.births(rank, num_ranks).of, range(len(own)))) == own.tolist()
        assert all(rank in truth[row] for row in every[homes == rank])
    assert ((homes >= 0) & (homes < num_ranks)).all()


@looped(("dim", "owners"), [(8, (0, 1)), (19, (2, 0, 1)), (5, (3, 1)), (64, (0, 1, 2)), (7, (2,))])
def test_columns_are_cut_into_blocks_in_the_order_of_owners(dim: int, owners: tuple[int, ...]) -> None:
    shard, every = Shard(kind="table", owner=owners, exchange="pooled"), np.arange(12)
    shard.check("t", 12, dim, 4)
    blocks = [range(dim)[shard.columns(dim, rank)] for rank in owners]
    assert [column for block in blocks for column in block] == [*range(dim)]
    assert all(len(block) and block[0] % 4 == 0 for block in blocks)
    quads = [-(-len(block) // 4) for block in blocks]
    assert max(quads) - min(quads) <= 1, "blocks are about as wide"
    for rank in range(4):
        assert shard.num_local(12, rank, 4) == shard.held(every, rank, 4).sum() == 12 * (rank in owners)


def test_tables_side_by_side() -> None:
    shards = [shard for num_rows, num_ranks, shard in CASES if (num_rows, num_ranks) == (12, 3)]
    division = Homes(shards, 3)
    tables, rows = (each.ravel() for each in np.indices((len(shards), 12)))
    for name in ("homes", "local"):
        each = np.concatenate([getattr(shard, name)(np.arange(12), 3) for shard in shards])
        assert getattr(division, name)(tables, rows).tolist() == each.tolist()


@looped(
    ("shard", "text"),
    [
        (Shard(prefix=8), "table 'user': 8 rows are to be replicated, and it has 7: choose 0 to that"),
        (Shard(kind="table", owner=2), "table 'user': owner is 2; choose 0 to 1"),
        (Shard(owner=1), "table 'user': owner is 1; choose 0 for kind 'row'"),
        (Shard(exchange="pooled"), "table 'user': exchange is 'pooled', so one rank .* kind is 'row' and prefix 0"),
        (Shard(kind="table", prefix=2, exchange="pooled"), "table 'user': .* kind is 'table' and prefix 2: choose"),
        (Shard(exchange="row"), "table 'user': exchange is 'row'; choose 'rows' or 'pooled'"),  # type: ignore[arg-type]
        (Shard(kind="table", owner=(0, 2), exchange="pooled"), r"table 'user': owner is \(0, 2\); choose 0 to 1"),
        (Shard(kind="table", owner=(), exchange="pooled"), r"table 'user': owner is \(\); choose 0 to 1"),
        (Shard(kind="table", owner=(1, 1), exchange="pooled"), r"table 'user': owner is \(1, 1\) .* up to 2 different"),
        (Shard(kind="table", owner=(0, 1)), r"table 'user': owner is \(0, 1\) and exchange 'rows'; .* 'pooled'"),
        (Shard(kind="column"), "table 'user': kind is 'column'; choose 'row' or 'table'"),  # type: ignore[arg-type]
    ],
)
def test_shards_that_cannot_be_are_refused(shard: Shard, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shard.check("user", 7, 6, 2)


@looped("largest", [10, 60_000, 1 << 20, 1 << 60])
@looped("num_keys", [0, 1, 2, 9])
def test_keys_come_back_from_a_message(num_keys: int, largest: int) -> None:
    random = np.random.default_rng(num_keys)
    edges = np.array([0xFFFE, 0x1FFFD][: num_keys // 4], np.int64)  # gaps just below and at what takes more
    keys = np.unique(np.append(random.integers(0, largest, num_keys), edges))
    words = pack(keys)
    found, length = unpack(np.append(words, np.array([7, 8], np.int32)))
    assert found.tolist() == keys.tolist() and length == len(words)
    shifted = np.append(np.array([7], np.int32), words)[1:]
    assert unpack(shifted)[0].tolist() == keys.tolist()
    if (np.diff(keys, prepend=0) < 0xFFFF).all():
        assert len(words) == 2 + (len(keys) + 1) // 2, "two bytes a key"


@looped("wire_dtype", ["fp32", "bf16", "fp16"])
@looped("size", [0, 1, 2, 7])
@looped("scale", [1e-30, 1.0, 1e30])
def test_numbers_of_few_bits_against_torch(wire_dtype: WireDtype, size: int, scale: float) -> None:
    """bfloat16 has the range of float32; numbers of float16 are brought into its range by a power of two."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale
    words = torch.cat(narrow([numbers[:1], numbers[1:]], wire_dtype))
    assert len(words) == {"fp32": size, "bf16": -(-size // 2), "fp16": 1 + -(-size // 2)}[wire_dtype]
    found = widen(words, size, wire_dtype)
    if wire_dtype == "fp16":
        assert torch.allclose(found, numbers, rtol=2.0**-11, atol=0)
    else:
        assert torch.equal(found, numbers if wire_dtype == "fp32" else numbers.bfloat16().float())


@looped("wire_dtype", ["bf16", "fp16"])
def test_what_is_not_finite_stays_so(wire_dtype: WireDtype) -> None:
    numbers = torch.tensor([float("inf"), -2.0, float("-inf"), 0.0, float("nan")])
    found = widen(torch.cat(narrow([numbers], wire_dtype)), 5, wire_dtype)
    assert torch.equal(found[:4], numbers[:4]) and found[4].isnan()
