"""Law 3, the loader's half: batches after a resume are the batches of the uninterrupted run, bit for bit; every row
comes exactly once per epoch; and reading ahead changes nothing."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.batch import Batch
from hotrow.data.packed.loader import Loader, LoaderState, permutation
from hotrow.data.packed.reader import Split
from packed_data import make_rows, write_dataset

NUM_ROWS = 1037  # 4 parts, 11 blocks, the last of 37 rows


@pytest.fixture(scope="module", params=["lists", "one_hot"])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Split:
    rows = make_rows(NUM_ROWS, lists=request.param == "lists")
    return write_dataset(tmp_path_factory.mktemp("packed") / "data", rows).split("train")


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.dense, b.dense)
        and torch.equal(a.label, b.label)
        and a.sparse.keys == b.sparse.keys
        and torch.equal(a.sparse.values, b.sparse.values)
        and a.sparse.one_hot == b.sparse.one_hot
        and torch.equal(a.sparse.offsets, b.sparse.offsets)
    )


def assert_same(got: list[Batch], wanted: list[Batch]) -> None:
    assert len(got) == len(wanted)
    assert [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if not same(a, b)] == []


def row_numbers(batches: list[Batch] | Iterator[Batch]) -> list[int]:
    return [int(n) for batch in batches for n in batch.sparse.bags("row")[0]]


def some_rows(share: float, seed: int) -> np.ndarray:
    """Of which rows something is said; in stretches too, so that blocks are without any and full of them."""
    random = np.random.default_rng(seed)
    return (random.random(NUM_ROWS) < share) ^ (random.random(NUM_ROWS // 100 + 1) < 0.3).repeat(100)[:NUM_ROWS]


marks = st.builds(some_rows, st.sampled_from([0.0, 0.1, 0.5, 0.9]), st.integers(0, 9))
loaders = st.builds(
    lambda plain, rows: {**plain, **rows},
    st.fixed_dictionaries(
        {
            "batch_size": st.integers(20, 400),
            "window_rows": st.integers(60, 1200),
            "shuffle_seed": st.one_of(st.none(), st.integers(0, 2**64 - 1)),
            "micro_batches": st.integers(1, 5),
        }
    ),
    st.one_of(
        st.just({}),
        st.fixed_dictionaries({"only": marks.filter(lambda rows: rows.sum() >= 400)}),
        st.fixed_dictionaries({"front": marks, "front_batches": st.integers(1, 5)}),
    ),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(arguments=loaders, epoch=st.integers(0, 3), data=st.data())
def test_resume_at_any_batch_has_the_same_bits(split: Split, arguments: dict, epoch: int, data: st.DataObject) -> None:
    whole = Loader(split, **arguments, start=LoaderState(epoch, 0))
    wanted = [*whole, *whole]
    assert whole.state() == LoaderState(epoch + 2, 0)

    stop_after = data.draw(st.integers(0, len(wanted)), label="stop_after")
    interrupted = Loader(split, **arguments, start=LoaderState(epoch, 0))
    before: list[Batch] = []
    while len(before) < stop_after:
        for batch in interrupted:
            before.append(batch)
            if len(before) == stop_after:
                break
    state = LoaderState(**json.loads(json.dumps(interrupted.state().to_json())))
    resumed = Loader(split, **arguments, start=state)
    after: list[Batch] = []
    while resumed.state().epoch < epoch + 2:
        after.extend(resumed)
    assert_same(before + after, wanted)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(arguments=loaders, epoch=st.integers(0, 3))
def test_every_row_once_per_epoch_with_its_own_columns(split: Split, arguments: dict, epoch: int) -> None:
    rows = make_rows(NUM_ROWS, lists="bag" in split.info.feature_names)
    loader = Loader(split, **arguments)
    numbers: list[int] = []
    for batch in loader.epoch(epoch):
        here = batch.sparse.bags("row")[0].numpy()
        numbers.extend(here.tolist())
        np.testing.assert_array_equal(batch.label.numpy(), rows.label[here])
        np.testing.assert_array_equal(batch.dense.numpy(), rows.dense[here])
        for name, ids in rows.sparse.items():
            values, offsets, _ = batch.sparse.bags(name)
            if not isinstance(ids, tuple):
                np.testing.assert_array_equal(values.numpy(), ids[here])
                continue
            for sample, row in enumerate(here):
                wanted = ids[0][ids[1][row] : ids[1][row + 1]]
                np.testing.assert_array_equal(values[offsets[sample] : offsets[sample + 1]].numpy(), wanted)
    assert len(set(numbers)) == len(numbers)
    wanted = np.flatnonzero(arguments.get("only", np.ones(NUM_ROWS, bool)))
    assert len(numbers) == len(wanted) and set(numbers) <= set(wanted.tolist())
    if arguments["shuffle_seed"] is None and "front" not in arguments:
        assert numbers == wanted.tolist()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    front=marks,
    size=st.integers(5, 90),
    num_batches=st.integers(1, 6),
    window_rows=st.integers(60, 1200),
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
def test_whole_batches_of_front_rows_come_first_in_each_group(
    split: Split, front: np.ndarray, size: int, num_batches: int, window_rows: int, seed: int | None
) -> None:
    """Against the same order without `front`, grouped row by row."""
    loader = Loader(split, size, shuffle_seed=seed, window_rows=window_rows, front=front, front_batches=num_batches)
    if seed is None:
        order = list(range(NUM_ROWS))
    else:
        order = row_numbers(Loader(split, size, shuffle_seed=seed, window_rows=loader.window_rows).epoch(2))
    wanted: list[int] = []
    for start in range(0, NUM_ROWS, size * num_batches):
        group = order[start : start + size * num_batches]
        pure = [row for row in group if front[row]]
        pure = pure[: len(pure) // size * size]
        wanted += pure + [row for row in group if row not in set(pure)]
    batches = list(loader.epoch(2))
    assert row_numbers(batches) == wanted
    assert [len(batch) for batch in batches[:-1]] == [size] * (loader.num_batches - 1)


def test_rows_left_out_and_rows_moved_are_refused_together(split: Split) -> None:
    every = np.ones(NUM_ROWS, bool)
    with pytest.raises(ValueError, match="only and front are both given"):
        Loader(split, 8, shuffle_seed=1, only=every, front=every)
    for name in ("only", "front"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(5,\), but split 'train' has 1037 rows"):
            Loader(split, 8, shuffle_seed=1, **{name: every[:5]})
    with pytest.raises(ValueError, match="front_batches is 0"):
        Loader(split, 8, shuffle_seed=1, front=every, front_batches=0)
    nothing = Loader(split, 8, shuffle_seed=1, only=~every)
    assert nothing.num_batches == nothing.num_rows == 0 and list(nothing) == []


def test_the_order_is_a_function_of_seed_and_epoch(split: Split) -> None:
    orders = {
        (seed, epoch): tuple(row_numbers(Loader(split, 64, shuffle_seed=seed, window_rows=300).epoch(epoch)))
        for seed in (0, 1, 2**64 - 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 6
    np.random.seed(0)
    torch.manual_seed(0)
    again = tuple(row_numbers(Loader(split, 64, shuffle_seed=1, window_rows=300).epoch(1)))
    assert again == orders[1, 1]


def test_no_global_random_state_is_moved(split: Split) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(Loader(split, 64, shuffle_seed=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


def test_windows_mix_rows_of_several_blocks(split: Split) -> None:
    numbers = np.array(row_numbers(Loader(split, 1037, shuffle_seed=3, window_rows=400)))
    for window in range(2):
        blocks = set((numbers[window * 400 : window * 400 + 400] // 100).tolist())
        assert 4 <= len(blocks) <= 6
        assert len(set((numbers[window * 400 : window * 400 + 50] // 100).tolist())) >= 3


def test_a_block_order_is_uniform_enough() -> None:
    counts = np.zeros((5, 5))
    for epoch in range(2000):
        counts[np.arange(5), permutation(5, seed=3, epoch=epoch, family=0)] += 1
    # Each cell is Binomial(2000, 1/5): mean 400, standard deviation 18.
    assert np.abs(counts - 400).max() < 5 * 18


def test_the_random_order_is_pinned() -> None:
    """Checkpoints resume under later versions only if these never change; made with docs/format.md's rule by hand."""
    words = np.random.Philox(key=np.array([7, 2], np.uint64), counter=np.array([0, 0, 3, 1], np.uint64)).random_raw(10)
    by_hand = sorted(range(10), key=lambda i: (int(words[i]) >> 4, i))
    assert permutation(10, seed=7, epoch=2, family=1, index=3).tolist() == by_hand == [4, 2, 5, 3, 1, 6, 8, 9, 7, 0]
