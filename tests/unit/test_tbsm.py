"""TBSM against the plain torch of tests/plain_tbsm.py: same weights, same logits, same gradients, any padding."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.models.tbsm import TBSM, TBSMSpec
from hotrow.optim import SGD
from hotrow.run.build import look_up
from loops import looped
from plain_tbsm import PlainTBSM

DIM, STEPS, ROWS = 8, 6, {"user": 30, "item": 50, "category": 9}
FEATURES = (("user", None), ("item", "item_history"), ("category", "category_history"))
MLPS: dict[str, Any] = {"bottom_mlp": [5], "top_mlp": [12, 7], "attention_mlp": [4], "final_mlp": [11]}
CONFIG = TBSMSpec(embedding_dim=DIM, history_steps=STEPS, **MLPS)


def make_embedding() -> EmbeddingCollection:
    names = {name: tuple(filter(None, (name, history))) for name, history in FEATURES}
    tables = [
        TableConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=names[name])
        for name, rows in ROWS.items()
    ]
    return EmbeddingCollection(tables, seed=3)


def built(spec: TBSMSpec, names: Sequence[str], *, num_dense: int = 0, seed: int = 0, dim: int = DIM) -> TBSM:
    generator = torch.Generator().manual_seed(seed)
    return spec.build(num_dense=num_dense, dims=dict.fromkeys(names, dim), generator=generator)


def make_model(embedding: EmbeddingCollection, *, num_dense: int = 0) -> TBSM:
    return built(CONFIG, embedding.feature_names, num_dense=num_dense, seed=5)


def twin_of(model: TBSM, embedding: EmbeddingCollection, *, num_dense: int) -> PlainTBSM:
    """The plain model with the same weights."""
    widths = {"bottom": [5], "top": [12, 7], "attention": [4], "final": [11]}
    twin = PlainTBSM(FEATURES, list(ROWS.values()), dim=DIM, steps=STEPS, seed=0, num_dense=num_dense, **widths)
    with torch.no_grad():
        for table, name in zip(twin.tables, ROWS, strict=True):
            table.weight.copy_(embedding.weights[name])
        twin.A.copy_(model.inner_MM)
        for part in widths:
            for mine, theirs in zip(getattr(model, part).layers, getattr(twin, part), strict=True):
                theirs.weight.copy_(mine.weight)
                theirs.bias.copy_(mine.bias)
    return twin


def make_ids(lengths: Sequence[int], seed: int = 1) -> dict[str, Tensor]:
    """One id per feature; ids of histories one behind the other."""
    g = torch.Generator().manual_seed(seed)
    ids = {}
    for name, history in FEATURES:
        ids[name] = torch.randint(0, ROWS[name], (len(lengths),), generator=g)
        if history is not None:
            ids[history] = torch.randint(0, ROWS[name], (sum(lengths),), generator=g)
    return ids


def jagged(ids: dict[str, Tensor], lengths: Sequence[int], **other: Sequence[int]) -> KeyedJaggedTensor:
    every = [other.get(name, lengths if name.endswith("_history") else [1] * len(lengths)) for name in ids]
    flat = torch.tensor([length for own in every for length in own])
    return KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=flat)


def padded(ids: dict[str, Tensor], lengths: Sequence[int], *, filler: int) -> dict[str, Tensor]:
    """Histories at the end of [B, STEPS], `filler` before."""
    out = dict(ids)
    for name in ids:
        if name.endswith("_history"):
            out[name] = torch.full((len(lengths), STEPS), filler)
            for row, own in zip(out[name], ids[name].split(list(lengths)), strict=True):
                row[STEPS - len(own) :] = own
    return out


LENGTHS = [3, 0, 6, 1, 6, 2, 0, 5]


@looped("num_dense", [0, 2])
@looped("filler", [0, 4])
def test_against_plain_torch(num_dense: int, filler: int) -> None:
    embedding = make_embedding()
    model = make_model(embedding, num_dense=num_dense)
    twin = twin_of(model, embedding, num_dense=num_dense)
    dense, ids = torch.randn(len(LENGTHS), num_dense), make_ids(LENGTHS)
    logits = model(dense, look_up(model, embedding, jagged(ids, LENGTHS)))
    expected = twin(dense, padded(ids, LENGTHS, filler=filler), torch.tensor(LENGTHS))
    assert logits.shape == (len(LENGTHS),)
    assert float(logits.detach().std()) > 1e-3, "the samples differ"
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    optimizer = SGD(embedding, lr=1.0)
    logits.square().sum().backward()
    expected.square().sum().backward()
    optimizer.step()
    for name, table in zip(ROWS, twin.tables, strict=True):
        updated = table.weight.detach() - table.weight.grad.to_dense()
        torch.testing.assert_close(embedding.weights[name], updated, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.inner_MM.grad, twin.A.grad, rtol=1e-4, atol=1e-5)
    for part in ("bottom", "top", "attention", "final"):
        for mine, theirs in zip(getattr(model, part).layers, getattr(twin, part), strict=True):
            torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, as a GPU does; on scalars it does not either."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim()}
        assert len(devices) <= 1, f"{func} of tensors on {devices}"
        return func(*args, **(kwargs or {}))


def test_all_is_computed_where_the_inputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's device of shapes alone: rows, dense inputs and weights are there, offsets in DRAM."""
    monkeypatch.setattr(ops, "_autocast", lambda values: False)  # which is not asked of that device
    embedding = make_embedding()
    model = make_model(embedding, num_dense=2)
    there = torch.device("meta")
    rows = look_up(model, embedding, jagged(make_ids(LENGTHS), LENGTHS))
    moved = {name: (own.detach().to(there).requires_grad_(), offsets) for name, (own, offsets) in rows.items()}
    model.to(there)
    with OneDevice():
        logits = model(torch.empty(len(LENGTHS), 2, device=there), moved)
        logits.sum().backward()
    gradients = [*(p.grad for p in model.parameters()), *(own.grad for own, _ in moved.values())]
    assert logits.shape == (len(LENGTHS),) and logits.device == there
    assert all(grad is not None and grad.device == there for grad in gradients)


def test_a_history_is_the_same_among_longer_ones() -> None:
    embedding = make_embedding()
    model, ids = make_model(embedding), make_ids(LENGTHS)
    logits = model(torch.empty(len(LENGTHS), 0), look_up(model, embedding, jagged(ids, LENGTHS)))
    for b, length in enumerate(LENGTHS):
        first = sum(LENGTHS[:b])
        own = {n: v[first : first + length] if n.endswith("_history") else v[b : b + 1] for n, v in ids.items()}
        alone = model(torch.empty(1, 0), look_up(model, embedding, jagged(own, [length])))
        torch.testing.assert_close(alone[0], logits[b], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_order_of_a_history_matters_and_so_does_each_step() -> None:
    embedding = make_embedding()
    model, ids = make_model(embedding), make_ids([5])
    logit = model(torch.empty(1, 0), look_up(model, embedding, jagged(ids, [5])))
    turned = {name: values.flip(0) for name, values in ids.items()}
    shorter = {name: values[1:] if name.endswith("_history") else values for name, values in ids.items()}
    for other, length in ((turned, 5), (shorter, 4)):
        assert abs(float(model(torch.empty(1, 0), look_up(model, embedding, jagged(other, [length]))) - logit)) > 1e-6


def test_batches_it_refuses() -> None:
    embedding = make_embedding()
    model = make_model(embedding)

    def score(sparse: KeyedJaggedTensor) -> None:
        model(torch.empty(sparse.stride, 0), look_up(model, embedding, sparse))

    longer = [2, STEPS + 1]
    with pytest.raises(ValueError, match=r"'item_history', sample 1 of the batch: 7 ids, but model.history_steps is 6"):
        score(jagged(make_ids(longer), longer))
    ids = make_ids([2, 3])
    with pytest.raises(ValueError, match=r"'category_history', sample 0 of the batch: 3 ids, but 'item_history' has"):
        score(jagged(ids, [2, 3], category_history=[3, 2]))
    ids = make_ids([2, 3]) | {"user": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match="'user', sample 1 of the batch: 2 ids, but tbsm needs exactly one"):
        score(jagged(ids, [2, 3], user=[1, 2]))


@looped(
    ("names", "message"),
    [
        (["user", "item"], "needs a history, a feature such as 'item_history' beside 'item'; the data has user, item"),
        (["user", "item_history"], "'item_history' is the history of 'item', which the data lacks"),
    ],
)
def test_data_it_refuses(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(CONFIG, names)


def test_a_batch_without_a_feature_is_refused() -> None:
    embedding = make_embedding()
    model, ids = make_model(embedding), make_ids([2, 3])
    del ids["user"]
    with pytest.raises(ValueError, match="feature 'user' is missing from the batch; it has item, item_history"):
        model(torch.empty(2, 0), look_up(model, embedding, jagged(ids, [2, 3])))
