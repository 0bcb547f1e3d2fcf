"""Law 1 for sequence lookups: rows are plain indexing; their gradients join those of pooled lookups in one order."""

import pytest
import torch
from kernel_cases import DTYPES, assert_same_bits, clones, every_backend, make_case, rules

from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops, reference, types
from hotrow.kernels.types import ALGORITHMS, Algorithm
from hotrow.optim import SGD, RowWiseAdagrad
from hotrow.tables import Dtype
from loops import looped

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing to compare")


def make_collection(seed: int = 4) -> EmbeddingCollection:
    """Two features share a table; one table takes means, which a sequence must not."""
    return EmbeddingCollection(
        [
            TableConfig(name="items", num_embeddings=30, embedding_dim=20, feature_names=("shown", "clicked")),
            TableConfig(name="users", num_embeddings=9, embedding_dim=5, feature_names=("user",), pooling="mean"),
        ],
        seed=seed,
    )


def make_ids(seed: int, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (3 * 8,), generator=g)
    lengths[::5] = 0
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=g).to(dtype)
    return KeyedJaggedTensor(("user", "clicked", "shown"), ids, lengths=lengths)


@looped("dtype", [torch.int32, torch.int64])
def test_rows_are_plain_indexing(dtype: torch.dtype) -> None:
    emb, sparse = make_collection(), make_ids(1, dtype)
    found = emb.sequence(sparse)
    assert list(found) == ["shown", "clicked", "user"]
    for name, (values, offsets) in found.items():
        ids, expected_offsets, _ = sparse.bags(name)
        table = emb.weights["users" if name == "user" else "items"]
        assert torch.equal(values, table[ids.long()]) and torch.equal(offsets, expected_offsets)


def test_only_features_of_the_batch_and_none_for_empty_bags() -> None:
    emb = make_collection()
    no_ids, no_lengths = torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    empty = KeyedJaggedTensor(("clicked", "elsewhere"), no_ids, lengths=no_lengths)
    ((values, offsets),) = emb.sequence(empty).values()
    assert values.shape == (0, 20) and offsets.tolist() == [0, 0, 0, 0]


@needs_native
@looped("dtype", DTYPES)
@looped("algorithm", ALGORITHMS)
def test_update_of_pooled_and_sequences_together(algorithm: Algorithm, dtype: Dtype) -> None:
    """Two pooled lookups with sequences of a shared table's feature before, between and after them."""
    case = make_case(21, dim=12, num_batches=2, dtype=dtype)
    single = case.layout.sequence_of("c")
    g = torch.Generator().manual_seed(5)

    def sequence(batch: KeyedJaggedTensor) -> tuple[types.Layout, KeyedJaggedTensor, torch.Tensor]:
        ids, _, _ = batch.bags("c")
        return single, KeyedJaggedTensor(("c",), ids), torch.randn(len(ids), 12, generator=g)

    first, second = case.batches
    lookups = [
        sequence(first), (case.layout, first, case.grads[0]), sequence(second), (case.layout, second, case.grads[1]),
        sequence(first),
    ]  # fmt: skip
    expected, expected_low = clones(case.weights), clones(case.low)
    expected_states = case.states(algorithm)
    reference.update(case.layout, expected, expected_states, lookups, rules(algorithm), low=expected_low)
    whole, part = ops.Kernels(case.layout), ops.Kernels(single, among=case.layout)
    pending = [(part if layout is single else whole, batch, grad) for layout, batch, grad in lookups]
    for where in every_backend((1, 2, 3)):
        weights, low = clones(case.weights), clones(case.low)
        states = [ops.Arrays(state) for state in case.states(algorithm)]
        whole.update(ops.Arrays(weights, low), states, pending, rules(algorithm))
        for ours, theirs in zip((*weights, *low), (*expected, *expected_low), strict=True):
            if ours is not None:
                assert_same_bits(ours, theirs, (algorithm, where))


@looped("optimizer", ["sgd", "row_wise_adagrad"])
def test_steps_against_autograd_on_plain_tensors(optimizer: str) -> None:
    """Attention-like use: a sequence weighted by its own pooled sum; two forwards and one step, thrice."""
    emb = make_collection()
    plain = {name: w.double().requires_grad_() for name, w in emb.weights.items()}
    ours = SGD(emb, lr=0.1) if optimizer == "sgd" else RowWiseAdagrad(emb, lr=0.1, eps=1e-3)
    sums = {name: torch.zeros(len(w), dtype=torch.float64) for name, w in plain.items()}
    for step in range(3):
        loss = torch.zeros((), dtype=torch.float64)
        for seed in (10 * step, 10 * step + 1):
            sparse = make_ids(seed)
            pooled, sequences = emb(sparse), emb.sequence(sparse)
            mine = (pooled**2).sum() + sum((values.sum(1) ** 3).sum() for values, _ in sequences.values())
            mine.backward()
            for name in emb.feature_names:
                table = "users" if name == "user" else "items"
                ids, offsets, _ = sparse.bags(name)
                rows = plain[table][ids]
                bag = torch.repeat_interleave(torch.arange(8), offsets.diff())
                total = torch.zeros(8, rows.shape[1], dtype=torch.float64).index_add(0, bag, rows)
                if table == "users":
                    total = total / offsets.diff().clamp(min=1)[:, None]
                loss = loss + (total**2).sum() + (rows.sum(1) ** 3).sum()
        ours.step()
        grads = torch.autograd.grad(loss, list(plain.values()))
        for (name, weight), grad in zip(plain.items(), grads, strict=True):
            if optimizer == "sgd":
                rate = torch.tensor(0.1)
            else:
                sums[name] += (grad**2).mean(1)
                rate = (0.1 / (sums[name].sqrt() + 1e-3))[:, None]
            weight.data -= rate * grad
            torch.testing.assert_close(emb.weights[name], weight.detach().float(), rtol=1e-4, atol=1e-5)


def test_a_bad_id_is_named_by_sample_and_position() -> None:
    emb = make_collection()
    sparse = KeyedJaggedTensor(("clicked",), torch.tensor([1, 2, 30]), lengths=torch.tensor([1, 0, 2]))
    with pytest.raises(ValueError, match=r"feature 'clicked', sample 2, position 1: id 30 .* \[0, 30\)"):
        emb.sequence(sparse)
    assert emb.pending == []
