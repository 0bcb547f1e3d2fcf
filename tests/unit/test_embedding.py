"""EmbeddingCollection: what goes in, what comes out, and what waits for the optimizer."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hotrow import KeyedJaggedTensor, TableConfig, Uniform
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels.types import split, to_float16
from hotrow.optim import SGD, RowWiseAdagrad
from hotrow.tables import Dtype
from loops import looped

TABLES = (
    TableConfig(name="user", num_embeddings=10, embedding_dim=3, feature_names=("user",)),
    TableConfig(name="item", num_embeddings=20, embedding_dim=2, feature_names=("clicked", "shown"), pooling="mean"),
)


def make(seed: int = 0, dtype: Dtype = "float32") -> EmbeddingCollection:
    return EmbeddingCollection([replace(table, dtype=dtype) for table in TABLES], seed=seed)


def batch_of(*bags: list[list[int]], keys: tuple[str, ...] = ("user", "clicked", "shown")) -> KeyedJaggedTensor:
    flat = [bag for feature in bags for bag in feature]
    values = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
    return KeyedJaggedTensor(keys, values, lengths=torch.tensor([len(bag) for bag in flat]))


BATCH = batch_of([[1], [2, 3]], [[4, 5], []], [[6], [4]])


def test_output_columns_follow_the_tables() -> None:
    emb = make()
    user, item = emb.weights["user"], emb.weights["item"]
    expected = torch.stack(
        [
            torch.cat([user[1], (item[4] + item[5]) / 2, item[6]]),
            torch.cat([user[2] + user[3], torch.zeros(2), item[4]]),
        ]
    )
    assert emb.feature_names == ("user", "clicked", "shown") and emb.output_dim == 7
    torch.testing.assert_close(emb(BATCH), expected)


def test_keys_may_come_in_any_order_and_bring_others() -> None:
    emb = make()
    mixed = batch_of([[6], [4]], [[999], [7]], [[1], [2, 3]], [[4, 5], []], keys=("shown", "x", "user", "clicked"))
    assert torch.equal(emb(mixed), emb(BATCH))


@looped("dtype", [torch.int32, torch.int64])
def test_a_plain_matrix_is_one_id_per_feature(dtype: torch.dtype) -> None:
    emb = make()
    ids_BF = torch.tensor([[1, 4, 6], [2, 5, 4]], dtype=dtype)
    assert torch.equal(emb(ids_BF), emb(batch_of([[1], [2]], [[4], [5]], [[6], [4]])))
    with pytest.raises(
        ValueError, match=r"shape \(2, 2\); pass int32 or int64 \[B, 3\], one column for each of user, clicked, shown"
    ):
        emb(ids_BF[:, :2])


def test_tables_are_no_parameters() -> None:
    """They are no values that an optimizer of torch could change: one Parameter of no rows each, to freeze it by."""
    emb = make()
    assert {n: tuple(own.shape) for n, own in emb.named_parameters()} == {"user.weight": (0, 3), "item.weight": (0, 2)}
    assert list(emb.buffers()) == [] and emb(BATCH).requires_grad


def test_rows_depend_on_seed_name_row_and_column_alone() -> None:
    small, large = (
        EmbeddingCollection(
            [TableConfig(name="t", num_embeddings=n, embedding_dim=6, feature_names=("f",), init=Uniform(bound=0.5))],
            seed=seed,
        ).weights["t"]
        for n, seed in ((10, 1), (1000, 1))
    )
    assert torch.equal(small, large[:10])
    other_seed, other_name = make(seed=1).weights["user"], make(seed=0).weights["item"]
    assert not torch.equal(make(seed=0).weights["user"], other_seed)
    assert not torch.equal(make(seed=0).weights["user"][:, :2], other_name[:10])
    assert small.abs().max() <= 0.5 and large.abs().max() > 0.49 and large.mean().abs() < 0.02


def test_pending_stands_in_forward_order_whatever_backward_does() -> None:
    emb = make()
    first, second = emb(BATCH), emb(BATCH)
    second.sum().backward()
    (2 * first).sum().backward()
    assert [p.grad[0, 0].item() for p in emb.pending] == [2.0, 1.0]


def test_no_grad_leaves_nothing_behind() -> None:
    emb = make()
    with torch.no_grad():
        assert not emb(BATCH).requires_grad
    assert emb.pending == []


def test_two_forwards_count_as_one_batch() -> None:
    """To the bit: the same bags, in the same order, in one forward or in two."""
    halves = [batch_of([[1], [2, 3]], [[4, 5], []], [[6], [4]]), batch_of([[3]], [[4, 4]], [[]])]
    whole = batch_of([[1], [2, 3], [3]], [[4, 5], [], [4, 4]], [[6], [4], []])
    results = []
    for batches in (halves, [whole]):
        emb = make()
        optimizer = RowWiseAdagrad(emb, lr=0.1)
        out = torch.cat([emb(batch) for batch in batches])
        (out * torch.arange(21.0).view(3, 7)).sum().backward()
        optimizer.step()
        results.append(emb.weights)
    for name in ("user", "item"):
        assert torch.equal(results[0][name], results[1][name])


def sample_weighted(weights: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(BATCH.keys, BATCH.values, weights, offsets=BATCH.offsets)


def test_gradient_of_sample_weights_against_autograd() -> None:
    emb = make()
    user, item = emb.weights["user"].clone(), emb.weights["item"].clone()
    ours, theirs = (torch.arange(1.0, 8.0).requires_grad_() for _ in range(2))
    g = torch.arange(14.0).view(2, 7)
    (emb(sample_weighted(ours)) * g).sum().backward()
    w = theirs
    rows = [
        torch.cat([w[0] * user[1], (w[3] * item[4] + w[4] * item[5]) / 2, w[5] * item[6]]),
        torch.cat([w[1] * user[2] + w[2] * user[3], torch.zeros(2), w[6] * item[4]]),
    ]
    (torch.stack(rows) * g).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_double_backward_is_refused() -> None:
    weights = torch.ones(7, requires_grad=True)
    out = make()(sample_weighted(weights))
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad((out**2).sum(), weights, create_graph=True)


def test_gradients_with_strides_are_taken_as_they_are() -> None:
    """A slice of a concatenation has gaps between its rows, an expanded scalar no memory of its own."""
    emb, other = make(), torch.ones(2, 4, requires_grad=True)
    cat = torch.cat([other, emb(BATCH)], dim=1)
    (cat * torch.arange(22.0).view(2, 11)).sum().backward()
    emb(BATCH).t().sum().backward()
    sliced, _expanded = emb.pending
    assert torch.equal(sliced.grad, torch.arange(22.0).view(2, 11)[:, 4:])
    SGD(emb, lr=1.0).step()
    reference = make()
    (reference(BATCH) * (sliced.grad + 1)).sum().backward()
    SGD(reference, lr=1.0).step()
    torch.testing.assert_close(emb.weights, reference.weights)


def test_initial_rows_of_every_storage_are_those_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.placement.dram.PIECE_BYTES", 28)  # pieces of two or three rows
    plain, rounded, halves = make(seed=1), make(seed=1, dtype="float16"), make(seed=1, dtype="bfloat16")
    assert list(halves.low) == ["user", "item"] and rounded.low == plain.low == {}
    for name, w in plain.weights.items():
        assert torch.equal(rounded.weights[name].view(torch.int16), to_float16(w).view(torch.int16))
        assert halves.weights[name].dtype == torch.bfloat16
        assert torch.equal(halves.weights[name].float(), split(w)[0].float())
        assert torch.equal(halves.float32(name), w)
        assert torch.equal(rounded.float32(name), rounded.weights[name].float())


@looped("dtype", ["float16", "bfloat16"])
def test_pooled_rows_are_float32_sums_of_what_is_stored(dtype: Dtype) -> None:
    emb = make(dtype=dtype)
    stored = {name: w.float() for name, w in emb.weights.items()}
    expected = torch.cat([stored["user"][1], (stored["item"][4] + stored["item"][5]) / 2, stored["item"][6]])
    out = emb(BATCH)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[0], expected)


def test_split_tables_go_through_float32_state_dicts_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.placement.dram.PIECE_BYTES", 28)
    plain, halves = make(seed=1), make(seed=2, dtype="bfloat16")
    places = [w.data_ptr() for w in (*halves.weights.values(), *halves.low.values())]
    halves.load_state_dict(plain.state_dict())
    assert [w.data_ptr() for w in (*halves.weights.values(), *halves.low.values())] == places
    state = halves.state_dict()
    assert {key: w.dtype for key, w in state.items()} == dict.fromkeys(("user.weight", "item.weight"), torch.float32)
    back = make(seed=3)
    back.load_state_dict(state)
    assert all(torch.equal(back.weights[name], w) for name, w in plain.weights.items())


def test_float16_state_dicts_are_float16() -> None:
    emb, other = make(seed=1, dtype="float16"), make(seed=2)
    assert emb.state_dict()["user.weight"] is emb.weights["user"]
    other.load_state_dict(emb.state_dict())
    assert torch.equal(other.weights["user"], emb.weights["user"].float())
    emb.load_state_dict(make(seed=4).state_dict())
    assert torch.equal(emb.weights["user"], make(seed=4).weights["user"].half())


def test_load_state_dict_names_what_does_not_fit() -> None:
    emb = make()
    state = {"user.weight": torch.zeros(10, 4), "extra": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"user.weight has shape \(10, 4\); the table is \(10, 3\)") as error:
        emb.load_state_dict(state)
    assert "item.weight" in str(error.value) and "extra" in str(error.value)


def test_weights_beyond_float16_are_refused_with_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 65520 up they round to infinity; what is infinite already is nobody's loss."""
    monkeypatch.setattr("hotrow.placement.dram.PIECE_BYTES", 28)
    emb, state = make(dtype="float16"), make(seed=3).state_dict()
    before = emb.float32("item").clone()
    state["user.weight"][0, 0], state["item.weight"][1, 0] = torch.inf, 65519.0
    state["item.weight"][4:, 1] = -65520.0
    with pytest.raises(RuntimeError, match=r"item.weight: row 4 has a weight of -65,520, and float16 ends") as error:
        emb.load_state_dict(state)
    assert "user.weight" not in str(error.value)
    assert torch.equal(emb.float32("item"), before), "the table stays as it was"
    state["item.weight"][4:] = 65519.0
    emb.load_state_dict(state)
    assert float(emb.float32("item").max()) == 65504.0


@looped("dtype", ["float32", "bfloat16"])
@looped("duplicate", [copy.deepcopy, lambda emb: pickle.loads(pickle.dumps(emb))])
def test_copies_train_on_their_own(duplicate, dtype: Dtype) -> None:
    emb = make(dtype=dtype)
    before = emb.float32("user").clone()
    twin = duplicate(emb)
    twin(BATCH).sum().backward()
    SGD(twin, lr=1.0).step()
    assert torch.equal(emb.float32("user"), before) and emb.pending == []
    torch.testing.assert_close(twin.float32("user")[1], before[1] - 1.0)


def test_a_bad_id_in_forward_leaves_nothing_pending() -> None:
    emb = make()
    with pytest.raises(ValueError, match="feature 'shown', sample 1, position 0: id 20 is outside its table of 20"):
        emb(batch_of([[1], [2, 3]], [[4, 5], []], [[6], [20]]))
    assert emb.pending == []


def test_memory_must_be_known() -> None:
    with pytest.raises(ValueError, match="memory is 'ssd'; pass None or 'dram'"):
        EmbeddingCollection(TABLES, memory="ssd")
    assert EmbeddingCollection(TABLES, memory="dram").output_dim == 7


def test_a_table_that_is_not_there_is_named() -> None:
    emb = EmbeddingCollection([TableConfig(name="user", num_embeddings=3, embedding_dim=2, feature_names=("user",))])
    for read in (lambda: emb.read_rows("usr", slice(0, 1)), lambda: emb.float32("usr"), lambda: emb.rows("usr")):
        with pytest.raises(ValueError, match="there is no table 'usr'; the tables are user"):
            read()
