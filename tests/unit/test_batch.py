"""KeyedJaggedTensor and what the tables make of it: everything a caller can get wrong, and the empty cases."""

from typing import Any

import pytest
import torch

from hotrow import FTRL, SGD, Adagrad, Adam, EmbeddingCollection, KeyedJaggedTensor, RowWiseAdagrad, TableConfig
from loops import looped

VALUES = torch.arange(5)
KEYS = ("a", "b")


def tensor(*numbers: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


@looped(
    ("arguments", "message"),
    [
        ({"keys": "ab", "values": tensor(1, 2)}, r"keys is the text 'ab'; pass a list of feature names, such as"),
        ({"keys": ("a", "b", "a"), "values": tensor(1, 2, 3)}, r"\('a', 'b', 'a'\) repeat a feature name"),
        ({"values": VALUES.float()}, r"values is torch.float32 with shape \(5,\); pass a 1-D int32 or int64"),
        ({"values": VALUES.to(torch.int16)}, "values is torch.int16"),
        ({"values": VALUES.view(1, 5)}, r"shape \(1, 5\); pass a 1-D"),
        ({"values": VALUES.to("meta")}, r"values is on meta; .* pass values.cpu\(\)"),
        (
            {"weights": torch.ones(5, dtype=torch.float64)},
            r"weights is torch.float64 \(5,\); pass float32 of the shape",
        ),
        ({"weights": torch.ones(5, dtype=torch.bfloat16)}, r"weights is torch.bfloat16 \(5,\); pass float32"),
        ({"weights": torch.ones(4)}, r"weights is torch.float32 \(4,\); .* shape of values \(5,\)"),
        ({"values": tensor(1, 2, 3)}, "3 bags do not divide among 2 keys; lengths must be"),
        ({"keys": (), "values": tensor(1)}, "1 bags do not divide among 0 keys"),
        ({"lengths": tensor(1, 2, 2)}, "3 bags do not divide among 2 keys"),
        ({"lengths": tensor(1, 3, -1, 2)}, "feature 'b', sample 0: the length is -1; it must be 0 or more"),
        ({"lengths": tensor(1, 3, 6, 2)}, "feature 'b', sample 0: the length is 6; there are 5 values in all"),
        ({"values": tensor(), "lengths": tensor(*[2**62] * 4)}, f"sample 0: the length is {2**62}; there are 0 values"),
        ({"lengths": tensor(1, 3, 0, 2)}, "lengths sum to 6, but there are 5 values"),
        ({"lengths": tensor(1, 1, 1, 2, dtype=torch.float32)}, r"lengths is torch.float32 \(4,\); pass a 1-D integer"),
        ({"lengths": tensor(1, 1, 1, 1, dtype=torch.bool)}, "lengths is torch.bool"),
        ({"lengths": tensor(1, 1, 1, 2).view(2, 2)}, r"lengths is torch.int64 \(2, 2\); pass a 1-D integer tensor \[F"),
        (
            {"offsets": tensor(0.0, 1.5, 5.0, dtype=torch.float32)},
            r"offsets is torch.float32 \(3,\); pass a 1-D integer",
        ),
        ({"offsets": tensor()}, r"offsets is torch.int64 \(0,\); pass a 1-D integer tensor \[F \* B \+ 1\]"),
        ({"offsets": tensor(0, 2, 3, 5)}, "3 bags do not divide among 2 keys"),
        ({"offsets": tensor(1, 2, 5)}, r"offsets must rise from 0 to the number of values \(5\); got 1 .. 5"),
        ({"offsets": tensor(0, 2, 4)}, "got 0 .. 4"),
        (
            {"offsets": tensor(0, 4, 3, 4, 5)},
            "feature 'a', sample 1: the length by the offsets is -1; offsets must rise",
        ),
        (
            {"values": tensor(), "offsets": tensor(0, 2**62, -(2**63), -(2**62), 0)},
            f"feature 'a', sample 0: the length by the offsets is {2**62}; there are 0 values in all",
        ),
        ({"lengths": tensor(2, 3), "offsets": tensor(0, 3, 5)}, "lengths and offsets disagree .*; pass one of them"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyedJaggedTensor(**{"keys": KEYS, "values": VALUES, **arguments})


@looped("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_lengths_and_offsets_of_any_integers_say_the_same(dtype: torch.dtype) -> None:
    lengths, offsets = tensor(2, 0, 1, 2, dtype=dtype), tensor(0, 2, 2, 3, 5, dtype=dtype)
    for arguments in ({"lengths": lengths}, {"offsets": offsets}, {"lengths": lengths, "offsets": offsets}):
        batch = KeyedJaggedTensor(KEYS, VALUES, **arguments)
        assert batch.offsets.dtype == torch.int64 and batch.offsets.tolist() == [0, 2, 2, 3, 5]
        assert batch.lengths.tolist() == [2, 0, 1, 2] and batch.stride == 2 and not batch.one_hot


def test_many_short_lengths_do_not_overflow_their_type() -> None:
    ids, lengths = torch.zeros(300, dtype=torch.int64), torch.full((3,), 100, dtype=torch.uint8)
    batch = KeyedJaggedTensor(["a"], ids, lengths=lengths)
    assert batch.offsets.tolist() == [0, 100, 200, 300]


@looped("shape", [(2, 3), (2,), (2, 2, 1)])
def test_a_matrix_of_ids_has_a_column_per_key(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ids are torch.int64 with shape .*; pass int32 or int64 \[B, 2\]"):
        KeyedJaggedTensor.from_dense(KEYS, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"ids are torch\.float32 with shape"):
        KeyedJaggedTensor.from_dense(KEYS, torch.zeros(2, 2))


@pytest.mark.parametrize(
    "ids", [[[0, 1]], torch.zeros(1, 2, dtype=torch.int64).numpy(), None], ids=["list", "numpy", "none"]
)
def test_ids_that_are_no_tensor_are_refused(ids: Any) -> None:
    emb = EmbeddingCollection([TableConfig(name="t", num_embeddings=4, embedding_dim=3, feature_names=KEYS)])
    for look_up in (emb, emb.sequence):
        with pytest.raises(
            ValueError, match=f"the ids are a {type(ids).__name__}; pass a hotrow.KeyedJaggedTensor, a torchrec"
        ):
            look_up(ids)
    with pytest.raises(ValueError, match="the ids are a Tensor"):
        emb.sequence(torch.zeros(1, 2, dtype=torch.int64))


EMPTY = {
    "no sample, one-hot": KeyedJaggedTensor(KEYS, tensor()),
    "no sample, bags": KeyedJaggedTensor(KEYS, tensor(), lengths=tensor()),
    "no sample, offsets": KeyedJaggedTensor(KEYS, tensor(), offsets=tensor(0)),
    "no id": KeyedJaggedTensor(KEYS, tensor(), lengths=tensor(0, 0, 0, 0, 0, 0)),
    "no id, weights": KeyedJaggedTensor(KEYS, tensor(), torch.ones(0), lengths=tensor(0, 0, 0, 0)),
    "int32": KeyedJaggedTensor(KEYS, tensor(dtype=torch.int32), lengths=tensor(0, 0)),
}


@looped("pooling", ["sum", "mean"])
@looped("optimizer_class", [SGD, Adagrad, RowWiseAdagrad, Adam, FTRL])
@looped("batch", EMPTY.values())
def test_batches_without_samples_or_ids_pool_to_zeros_and_train_nothing(
    batch: KeyedJaggedTensor, optimizer_class: type, pooling: str
) -> None:
    options = {"num_embeddings": 4, "embedding_dim": 3, "pooling": pooling}
    emb = EmbeddingCollection([TableConfig(name=name, feature_names=(name,), **options) for name in KEYS])
    optimizer = optimizer_class(emb, lr=0.1)
    before = {name: weight.clone() for name, weight in emb.weights.items()}
    out = emb(batch)
    assert out.shape == (batch.stride, 6) and (out == 0).all()
    out.sum().backward()
    values, offsets = emb.sequence(batch)["b"]
    assert values.shape == (0, 3) and offsets.tolist() == [0] * (batch.stride + 1)
    values.sum().backward()
    optimizer.step()
    assert emb.pending == []
    for name, weight in emb.weights.items():
        assert torch.equal(weight, before[name])


@looped("dim", [0, -1])
def test_a_table_has_columns(dim: int) -> None:
    with pytest.raises(ValueError, match=f"table 't': embedding_dim is {dim}; it must be at least 1"):
        TableConfig(name="t", num_embeddings=4, embedding_dim=dim, feature_names=("f",))


@looped("bad", [-1, 4, 2**31 - 1, -(2**31)])
@looped("dtype", [torch.int32, torch.int64])
def test_ids_outside_the_table_are_named_wherever_they_stand(dtype: torch.dtype, bad: int) -> None:
    emb = EmbeddingCollection([TableConfig(name="t", num_embeddings=4, embedding_dim=3, feature_names=KEYS)])
    lengths = tensor(1, 2, 0, 3)
    values = tensor(0, 1, 2, 3, 2, bad, dtype=dtype)
    with pytest.raises(ValueError, match=rf"feature 'b', sample 1, position 2: id {bad} is outside its table of 4"):
        emb(KeyedJaggedTensor(KEYS, values, lengths=lengths))
    assert emb.pending == []


@looped("weighted", [False, True])
def test_samples_of_a_batch_have_the_bags_they_had(weighted: bool) -> None:
    lengths, weights = tensor(1, 2, 0, 3), torch.arange(6.0) if weighted else None
    batch = KeyedJaggedTensor(("a", "b"), tensor(5, 6, 7, 1, 2, 3), weights, lengths=lengths)
    for start, stop in ((0, 1), (1, 2), (0, 2), (1, 1)):
        part = batch.samples(start, stop)
        assert part.stride == stop - start
        for key in batch.keys:
            values, offsets, own = batch.bags(key)
            first, last = int(offsets[start]), int(offsets[stop])
            found, ends, theirs = part.bags(key)
            assert torch.equal(found, values[first:last]) and torch.equal(ends, offsets[start : stop + 1] - first)
            assert own is None or torch.equal(theirs, own[first:last])
    assert KeyedJaggedTensor(("a", "b"), tensor(1, 2, 3, 4)).samples(1, 2).values.tolist() == [2, 4]
    assert KeyedJaggedTensor(("a", "b"), tensor(1, 2, 3, 4)).samples(1, 2).one_hot
