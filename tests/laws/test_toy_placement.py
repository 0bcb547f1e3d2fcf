"""Law 2 for a placement that hotrow has never seen: rows in dicts, brought into a few slots while batches need them.

Nothing in hotrow knows `Dicts`. The truth is a plain collection in DRAM, and both must agree to the bit.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import bits
from test_worlds import OPTIMIZERS
from torch import Tensor

import hotrow
from hotrow import EmbeddingCollection, KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops
from hotrow.kernels.types import Layout, as_stored
from hotrow.placement.base import NO_LEASE, Attached, InitialRows, Lease, Placement, RowIds, Rows, TableState
from hotrow.placement.dram import RowsInMemory
from hotrow.placement.slots import spans_of
from hotrow.tables import Uniform

SLOTS = 48


class DictRows(Rows):
    """One array of a table: a dict from row to value. A row that is not in it is as it was made."""

    piece_rows = 7

    def __init__(self, name: str, initial: InitialRows, fast: RowsInMemory, num_rows: int) -> None:
        self.name, self.initial, self.kept = name, initial, dict[int, Tensor]()
        self.shape, self.dtype = torch.Size((num_rows, *fast.shape[1:])), fast.dtype

    def read(self, rows: RowIds, /) -> Tensor:
        ids = torch.arange(self.shape[0])[rows]
        out = self.initial.read(self.name, ids, self.shape)
        for k, row in enumerate(ids.tolist()):
            out[k] = self.kept.get(row, out[k])
        return out

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        ids = torch.arange(self.shape[0])[rows].tolist()
        self.kept.update(zip(ids, as_stored(values, self.dtype).clone(), strict=True))


class Dicts(Placement):
    def __init__(self, tables: Sequence[TableConfig], seed: int) -> None:
        self.tables, self.layout, self.seed = tuple(tables), Layout.of(tables), seed
        self.kernels = ops.KernelSet(self.layout)
        self.weights = {t.name: torch.zeros(SLOTS, t.embedding_dim, dtype=getattr(torch, t.dtype)) for t in tables}
        split = [t for t in tables if t.dtype == "bfloat16"]
        self.low = {t.name: torch.zeros(SLOTS, t.embedding_dim, dtype=torch.int16) for t in split}
        self.arrays = ops.Arrays(list(self.weights.values()), [self.low.get(t.name) for t in tables])
        self.slot_of = {t.name: dict[int, int]() for t in tables}
        self.attach({t.name: () for t in tables})

    def new_state(self, table: str, row_shape: Sequence[int]) -> Tensor:
        return torch.zeros(SLOTS, *row_shape)

    def attach(self, states: dict[str, Sequence[TableState]]) -> Attached:
        self.kept: dict[str, dict[str, tuple[DictRows, RowsInMemory]]] = {}
        for t in self.tables:
            made = InitialRows.of(t, self.seed, [state.of_untouched(t) for state in states[t.name]])
            fast = {"weight": RowsInMemory(self.weights[t.name], self.low.get(t.name))}
            fast |= {state.name: RowsInMemory(state.array) for state in states[t.name]}
            self.kept[t.name] = {name: (DictRows(name, made, f, t.num_embeddings), f) for name, f in fast.items()}
        return Attached(states)

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        return self.kept[table]["weight" if state is None else state.name][0]

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[Lease, KeyedJaggedTensor]:
        slots = torch.zeros_like(sparse.values)
        for t, start, stop in spans_of(self.layout, sparse):
            name, ids = self.tables[t].name, sparse.values[start:stop]
            if new := sorted({*ids.tolist()} - {*self.slot_of[name]}):
                first = len(self.slot_of[name])
                self.slot_of[name] |= {row: slot for slot, row in enumerate(new, first)}
                for kept, fast in self.kept[name].values():
                    fast.write(slice(first, first + len(new)), kept.read(torch.tensor(new)))
            slots[start:stop] = torch.tensor([self.slot_of[name][row] for row in ids.tolist()])
        return NO_LEASE, sparse.with_values(slots)

    def update(self, *args: Any) -> None:
        super().update(*args)
        for name, slot_of in self.slot_of.items():
            for kept, fast in self.kept[name].values() if slot_of else ():
                kept.write(torch.tensor([*slot_of]), fast.read(torch.tensor([*slot_of.values()])))
            slot_of.clear()


class InDicts:
    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Placement:
        return Dicts(tables, seed)


def test_a_placement_takes_little() -> None:
    source = "".join(map(inspect.getsource, (DictRows, Dicts, InDicts)))
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 60


FEATURES = ("a", "b", "c", "d")
ROWS = {"t": 90, "u": 60, "v": 5}


def tables_of(dtype: Any) -> list[TableConfig]:
    """Three dims; two features share a table; one table starts with a row of zeros, and one of zeros alone."""
    more: dict[str, Any] = {"pooling": "mean", "dtype": dtype, "init": Uniform(zero_rows=1)}
    return [
        TableConfig(name="t", num_embeddings=90, embedding_dim=1, feature_names=("a",), dtype=dtype),
        TableConfig(name="u", num_embeddings=60, embedding_dim=19, feature_names=("b", "d"), **more),
        TableConfig(name="v", num_embeddings=50, embedding_dim=4, feature_names=("c",), init=Uniform(bound=0.0)),
    ]


class Side:
    """A collection and its optimizer; `seen` is all it ever returned."""

    def __init__(self, dtype: str, optimizer: str, memory: Any, *, seed: int = 3) -> None:
        self.emb = EmbeddingCollection(tables_of(dtype), memory=memory, seed=seed)
        self.optimizer = OPTIMIZERS[optimizer](self.emb)
        self.parts = {"embedding": self.emb, "sparse_optimizer": self.optimizer}
        self.seen: list[Tensor] = []

    def train(self, seed: int) -> None:
        """Six steps: one or two forward passes each, some of sequences, some scored or dropped, one table frozen."""
        generator = torch.Generator().manual_seed(seed)
        for step in range(6):
            self.emb.switches["u"].requires_grad_(step != 5)
            for _ in range(1 + step % 2):
                out = self.emb(make_batch(generator, weighted=step % 3 == 0))
                self.seen.append(out.detach().clone())
                out.backward(torch.randn(out.shape, generator=generator))
            if step in (1, 5):
                parts = self.emb.sequence(make_batch(generator))
                self.seen += [values.detach().clone() for values, _ in parts.values()]
                torch.stack([(values * values).sum() for values, _ in parts.values()]).sum().backward()
            with torch.no_grad():
                self.seen.append(self.emb(make_batch(generator)).clone())
            self.optimizer.zero_grad() if step == 3 else self.optimizer.step()

    def everything(self) -> list[Tensor]:
        """All that was returned, and every weight and state as users read them."""
        states = self.optimizer.state_dict()["state"]
        return [
            *self.seen,
            *self.emb.state_dict().values(),
            *(state for number in sorted(states) for state in states[number].values()),
            *(self.emb.float32(table.name) for table in self.emb.tables),
            *(self.emb.read_rows(table.name, slice(1, 4)) for table in self.emb.tables),
        ]


def make_batch(generator: torch.Generator, *, weighted: bool = False) -> KeyedJaggedTensor:
    """Three samples with bags of 0 to 3 ids, few of them different."""
    lengths = torch.randint(0, 4, (12,), generator=generator)
    limits = torch.tensor([ROWS["t"], ROWS["u"], ROWS["v"], ROWS["u"]]).repeat_interleave(3).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=generator) ** 3 * limits).long()
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(FEATURES, ids, weights, lengths=lengths)


def check(toy: Side, plain: Side) -> None:
    pairs = list(zip(toy.everything(), plain.everything(), strict=True))
    for number, (own, truth) in enumerate(pairs):
        assert own.dtype == truth.dtype and torch.equal(bits(own), bits(truth)), number


@pytest.mark.filterwarnings("ignore:3 batches wait")
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("sgd", "float16"), ("adagrad", "bfloat16"), ("row_wise_adagrad", "float32"), ("adam", "bfloat16"),
        ("ftrl", "float32"), ("ftrl", "float16"),
    ],
)  # fmt: skip
def test_rows_in_dicts_train_save_and_load_to_the_same_bits(optimizer: str, dtype: str, tmp_path: Path) -> None:
    toy, plain = Side(dtype, optimizer, InDicts()), Side(dtype, optimizer, None)
    for side in (toy, plain):
        side.train(1)
    check(toy, plain)
    assert any(weight.any() for weight in plain.emb.weights.values())
    paths = [hotrow.save_checkpoint(tmp_path / str(k), side.parts) for k, side in enumerate((toy, plain))]
    names = sorted(path.relative_to(paths[0]) for path in paths[0].rglob("*.safetensors"))
    assert len(names) >= 3
    for name in names:
        assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes(), name
    again = [Side(dtype, optimizer, InDicts(), seed=4), Side(dtype, optimizer, None, seed=4)]
    for side, path in zip(again, reversed(paths), strict=True):
        hotrow.load_checkpoint(path, side.parts)
        side.seen = list(plain.seen)
    for side in (toy, plain, *again):
        side.train(2)
    for side in (toy, *again):
        check(side, plain)


@pytest.mark.filterwarnings("ignore:3 batches wait")
def test_state_dicts_go_both_ways() -> None:
    toy, plain = Side("bfloat16", "adam", InDicts()), Side("bfloat16", "adam", None, seed=4)
    toy.train(1)
    plain.emb.load_state_dict(toy.emb.state_dict())
    plain.optimizer.load_state_dict(toy.optimizer.state_dict())
    back = Side("bfloat16", "adam", InDicts(), seed=5)
    back.emb.load_state_dict(plain.emb.state_dict())
    back.optimizer.load_state_dict(plain.optimizer.state_dict())
    for side in (toy, plain, back):
        side.seen = []
        side.train(2)
    check(toy, plain)
    check(back, plain)
