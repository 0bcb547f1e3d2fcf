"""Law 1 on devices: the Triton kernels equal the reference, and torch; interpreted on the CPU where there is no GPU."""

import itertools
import os
from itertools import chain
from pathlib import Path

import kernel_cases
import pytest
import torch
from gpu_device import DEVICE, HAS_GPU, assert_agrees, needs_gpu, slow_interpreted, to_device
from kernel_cases import DTYPES, SENTINEL, Case, Guarded, assert_same_bits, bits, clones, make_case, rules, stored
from torch import Tensor, nn

from forked import run_python
from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops, reference, triton_kernels, triton_ops, types
from hotrow.kernels import triton_moves as moves
from hotrow.kernels.triton_moves import Buffers, Moment, Mover, Streams
from hotrow.kernels.triton_ops import Arrays, Kernels
from hotrow.kernels.types import ALGORITHMS, Algorithm, Layout, Rule
from hotrow.models.dlrm import DLRM
from hotrow.placement.base import NO_LEASE
from hotrow.placement.slots import Held
from hotrow.tables import Dtype
from sampled import sampled

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = [
    {"pooling": pooling, "weighted": weighted, "id_dtype": id_dtype, "jagged": jagged}
    for pooling, weighted, id_dtype, jagged in itertools.product(
        ("sum", "mean"), (False, True), (torch.int32, torch.int64), (False, True)
    )
][::3]  # each value of each axis occurs, and twice


def check_lookup(case: Case, what: object) -> None:
    batch, weights = case.batches[0], Arrays(to_device(case.weights), to_device(case.low))
    expected = torch.full((batch.stride, case.layout.width + 3), SENTINEL)
    out = expected.to(DEVICE, copy=True)
    reference.lookup(case.layout, case.weights, batch, expected[:, : case.layout.width])
    kernels = Kernels(case.layout)
    kernels.lookup(weights, batch, out)
    assert_agrees(out, expected, what)
    assert_agrees(kernels.lookup(weights, batch), expected[:, : case.layout.width].contiguous(), what)
    gradient = torch.zeros(batch.values.numel())
    reference.weight_gradient(case.layout, case.weights, batch, case.grads[0], gradient)
    assert_agrees(kernels.weight_gradient(weights, batch, case.grads[0].to(DEVICE)), gradient, what)


def check_update(case: Case, algorithm: Algorithm, what: object, *, runs: int = 1) -> None:
    """Several runs: the same bits."""
    lookups = [(case.layout, batch, grad) for batch, grad in zip(case.batches, case.grads, strict=True)]
    expected, expected_low, expected_states = clones(case.weights), clones(case.low), case.states(algorithm)
    reference.update(case.layout, expected, expected_states, lookups, rules(algorithm), low=expected_low)
    first: list[Tensor] = []
    for _ in range(runs):
        found, low = to_device(case.weights), to_device(case.low)
        states = [to_device(state) for state in case.states(algorithm)]
        kernels = Kernels(case.layout)
        pending = [(kernels, batch, grad.to(DEVICE)) for _, batch, grad in lookups]
        kernels.update(Arrays(found, low), [Arrays(state) for state in states], pending, rules(algorithm))
        ours, theirs = chain(found, low, *states), chain(expected, expected_low, *expected_states)
        results = []
        for mine, other in zip(ours, theirs, strict=True):
            if mine is not None and other is not None:
                results.append(mine)
                if mine.dtype in (torch.float32, torch.float16):
                    assert_agrees(mine, other, (what, algorithm))
                elif DEVICE.type == "cpu":
                    assert_same_bits(mine, other, (what, algorithm))
        for one, again in zip(first, results, strict=bool(first)):
            assert torch.equal(bits(one), bits(again)), "two runs differ"
        first = results


@pytest.mark.slow_but("rows17-5", "rows1-1", "rows20-2", unless=HAS_GPU)
@pytest.mark.parametrize(
    ("rows", "kind"), sampled([(1, "float32"), *((33, dtype) for dtype in DTYPES)], range(len(KINDS)), pairs=False)
)
def test_lookup_and_gradient_of_sample_weights(rows: tuple[int, Dtype], kind: int) -> None:
    dim, dtype = rows
    check_lookup(make_case(1, dim=dim, dtype=dtype, **KINDS[kind]), (dim, dtype, KINDS[kind]))


@pytest.mark.parametrize(("algorithm", "dtype", "dim"), sampled(ALGORITHMS, DTYPES, [3, 33, 130]))
def test_update(algorithm: Algorithm, dtype: Dtype, dim: int) -> None:
    kind = {3: KINDS[1], 33: KINDS[2], 130: KINDS[5]}[dim]
    case = make_case(3, dim=dim, dtype=dtype, num_samples=7, **kind)
    check_update(case, algorithm, (dim, dtype, kind), runs=1 + (dim == 33))


@pytest.mark.slow_but("ftrl-True", "sgd-False", "adam-False", unless=HAS_GPU)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_that_a_batch_names_often(algorithm: Algorithm, weighted: bool) -> None:
    """Fewer and more times than are read together; gradients of all sizes, so that each order has its own bits."""
    chunk, generator = int(triton_kernels.CHUNK), torch.Generator().manual_seed(11)
    counts = torch.tensor([1, 2, chunk, chunk + 1, chunk + 2, 2 * chunk, 2 * chunk + 1, 2 * chunk + 2, 4 * chunk + 1])
    ids = torch.repeat_interleave(torch.arange(len(counts)), counts)
    ids = ids[torch.randperm(len(ids), generator=generator)]
    batch = KeyedJaggedTensor(("f",), ids, torch.rand(len(ids), generator=generator) if weighted else None)
    sizes = 10.0 ** torch.randint(-3, 4, (len(ids), 1), generator=generator)
    grad = torch.randn(len(ids), 5, generator=generator) * sizes
    layout = Layout((types.Feature("f", 0, slice(0, 5), "sum"),), 5)
    weights = torch.randn(len(counts) + 2, 5, generator=generator)
    check_update(Case(layout, [weights], [None], [batch], [grad]), algorithm, "often")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_batches_update_in_forward_order(algorithm: Algorithm) -> None:
    check_update(make_case(4, dim=8, num_batches=3, num_samples=5), algorithm, "three batches")


@pytest.mark.parametrize("num_samples", [0, 1])
@pytest.mark.parametrize("jagged", [True, False])
def test_tiny_batches(jagged: bool, num_samples: int) -> None:
    case = make_case(6, dim=8, num_samples=num_samples, jagged=jagged)
    check_lookup(case, num_samples)
    check_update(case, "adagrad", num_samples)


def mixed_tables() -> tuple[list[TableConfig], list[Tensor], list[Tensor | None]]:
    """Widths, storages and poolings of all sorts; the second table is shared by two features."""
    configs = [
        TableConfig(name="a", num_embeddings=30, embedding_dim=70, feature_names=("a",), pooling="mean"),
        TableConfig(name="b", num_embeddings=9, embedding_dim=5, feature_names=("b", "c"), dtype="float16"),
        TableConfig(name="d", num_embeddings=11, embedding_dim=19, feature_names=("d",), dtype="bfloat16"),
        TableConfig(name="e", num_embeddings=8, embedding_dim=6, feature_names=("e",)),
    ]
    generator = torch.Generator().manual_seed(5)
    weights, low = [], []
    for config in configs:
        values = torch.randn(config.num_embeddings, config.embedding_dim, generator=generator)
        high, halves = stored([values], config.dtype)
        weights += high
        low += halves
    return configs, weights, low


def mixed_batch(seed: int, *, weighted: bool) -> KeyedJaggedTensor:
    """Keys in another order than the tables', and one of another collection."""
    generator, keys, size = torch.Generator().manual_seed(seed), ("e", "x", "c", "a", "d", "b"), 6
    lengths = torch.randint(0, 4, (len(keys), size), generator=generator)
    limits = {"a": 30, "b": 9, "c": 9, "d": 11, "e": 8, "x": 10**9}
    counts = lengths.sum(1).tolist()
    ids = [torch.randint(limits[key], (n,), generator=generator) for key, n in zip(keys, counts, strict=True)]
    values = torch.cat(ids)
    weights = torch.randn(values.numel(), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths.flatten())


@pytest.mark.slow_but("adam", "sgd", unless=HAS_GPU)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tables_of_all_sorts_with_sequences_in_one_step(algorithm: Algorithm) -> None:
    """Two pooled lookups, one weighted, and a sequence of a shared table between them."""
    configs, weights, low = mixed_tables()
    layout = Layout.of(configs)
    single = layout.sequence_of("c")
    batches = [mixed_batch(1, weighted=False), mixed_batch(2, weighted=True)]
    sequence = KeyedJaggedTensor(("c",), torch.tensor([3, 8, 3, 0]))
    generator = torch.Generator().manual_seed(9)
    shapes = [(6, layout.width), (4, single.width), (6, layout.width)]
    grads = [torch.randn(shape, generator=generator) for shape in shapes]
    served = [(layout, batches[0]), (single, sequence), (layout, batches[1])]
    numbers = [rules(algorithm)[k % 3] for k in range(4)]
    num_states = types.NUM_STATES[algorithm]
    wide = algorithm != "row_wise_adagrad"
    states = [[torch.rand(w.shape if wide else w.shape[:1]) for w in weights] for _ in range(num_states)]
    expected, expected_low, expected_states = clones(weights), clones(low), [clones(state) for state in states]
    pending = [(own, batch, grad) for (own, batch), grad in zip(served, grads, strict=True)]
    reference.update(layout, expected, expected_states, pending, numbers, low=expected_low)

    found, found_low, found_states = to_device(weights), to_device(low), [to_device(state) for state in states]
    kernels, sequence_kernels = Kernels(layout), Kernels(single, among=layout)
    arrays = Arrays(found, found_low)
    for own, batch in zip((kernels, sequence_kernels, kernels), (batches[0], sequence, batches[1]), strict=True):
        pooled = torch.empty(batch.stride, own.layout.width)
        reference.lookup(own.layout, weights, batch, pooled)
        assert_agrees(own.lookup(arrays, batch), pooled)
    lookups = [
        (own, batch, grad.to(DEVICE))
        for own, (_, batch), grad in zip((kernels, sequence_kernels, kernels), served, grads, strict=True)
    ]
    kernels.update(arrays, [Arrays(state) for state in found_states], lookups, numbers)
    for mine, other in zip(chain(found, *found_states), chain(expected, *expected_states), strict=True):
        if mine.dtype != torch.bfloat16 or DEVICE.type == "cpu":
            assert_agrees(mine, other, algorithm)
    assert_agrees(types.widen(found[2].cpu(), found_low[2].cpu()), types.widen(expected[2], expected_low[2]))


def test_nothing_beside_the_arrays_is_written() -> None:
    case = make_case(3, dim=17)
    weights, states = ([Guarded(tensor) for tensor in part] for part in (case.weights, case.states("adagrad")[0]))
    if DEVICE.type != "cpu":
        pytest.skip("guard words stand in host memory")
    kernels = Kernels(case.layout)
    pending = [(kernels, case.batches[0], case.grads[0])]
    arrays = (Arrays([guarded.tensor for guarded in part]) for part in (weights, states))
    kernels.update(next(arrays), list(arrays), pending, rules("adagrad"))
    for guarded in (*weights, *states):
        guarded.check()


@pytest.mark.parametrize(("bad", "id_dtype"), [(-1, torch.int32), (9, torch.int64), (2**40, torch.int64)])
def test_bad_ids_are_named_and_change_nothing(bad: int, id_dtype: torch.dtype) -> None:
    """Feature c, table "shared" of 9 rows, sample 5: the second of its ids is bad."""
    case = make_case(9, dim=16, id_dtype=id_dtype)
    batch, grad = case.batches[0], case.grads[0].to(DEVICE)
    batch.values[int(batch.offsets[5]) + 1] = bad
    weights = to_device(case.weights)
    kernels, arrays = Kernels(case.layout), Arrays(weights)
    message = f"feature 'c', sample 5, position 1: id {bad} is outside its table of 9 rows"
    kernel_cases.assert_refused(message, kernels, arrays, batch, grad)
    for ours, before in zip(weights, case.weights, strict=True):
        assert torch.equal(ours.cpu(), before)


def test_altered_offsets_missing_features_and_arrays_elsewhere_are_refused() -> None:
    case = make_case(10, dim=4)
    batch, kernels, arrays = case.batches[0], Kernels(case.layout), Arrays(to_device(case.weights))
    with pytest.raises(ValueError, match="feature 'b' is missing from the batch"):
        kernels.lookup(arrays, KeyedJaggedTensor(("a",), batch.values[:1]))
    with pytest.raises(ValueError, match="pass contiguous float32"):
        Arrays([torch.zeros(4, 6, device=DEVICE)[:, ::2]])
    with pytest.raises(ValueError, match="arrays are on meta; Triton runs on"):
        Arrays([torch.zeros(4, 6, device="meta")])
    for bad in (-3, 10**9):
        batch.offsets[30] = bad
        kernel_cases.assert_refused("offsets have changed", kernels, arrays, batch, case.grads[0].to(DEVICE))


def test_signed_zeros_and_infinities() -> None:
    case = make_case(8, dim=33, jagged=False)
    case.weights[0].fill_(-0.0)
    case.weights[1][:, ::3] = float("inf")
    check_lookup(case, "specials")


def test_float16_rounds_as_the_reference() -> None:
    """From 65520 up infinite; NaN keeps its sign and leading payload; ties to even."""
    patterns = torch.tensor([0x7FC00000, 0x7F812345, -0x7EDCB0, 0x477FF000, 0x477FEFFF, 0x3F801000, 0x33000000, 1])
    values = patterns.to(torch.int32).view(torch.float32)[:, None]
    layout = Layout((types.Feature("f", 0, slice(0, 1), "sum"),), 1)
    batch, rule = KeyedJaggedTensor(("f",), torch.arange(len(values))), [Rule(algorithm="sgd", lr=1.0)]
    found, expected = torch.zeros(len(values), 1).half().to(DEVICE), torch.zeros(len(values), 1).half()
    kernels = Kernels(layout)
    kernels.update(Arrays([found]), [], [(kernels, batch, -values.to(DEVICE))], rule)
    reference.update(layout, [expected], [], [(layout, batch, -values)], rule)
    numbers = ~values[:, 0].isnan()  # what the sum made of a NaN is the machine's matter
    assert_same_bits(found.cpu()[numbers], expected[numbers])
    assert found.cpu()[~numbers].isnan().all()


@slow_interpreted
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_steps_against_torch(optimizer: str, mode: str) -> None:
    """nn.EmbeddingBag, autograd and torch.optim on one table: three steps with empty bags and repeated ids."""
    num_rows, dim, size = 12, 10, 8
    generator = torch.Generator().manual_seed(2)
    bag = nn.EmbeddingBag(num_rows, dim, mode=mode, include_last_offset=True)
    layout = Layout((types.Feature("f", 0, slice(0, dim), mode),), dim)  # type: ignore[arg-type]
    weight = bag.weight.detach().to(DEVICE, copy=True)
    state = torch.zeros_like(weight)
    theirs = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer](bag.parameters(), lr=0.3)
    kernels, rule = Kernels(layout), Rule(algorithm=optimizer, lr=0.3, eps=1e-10)  # type: ignore[arg-type]
    for _ in range(3):
        lengths = torch.randint(0, 5, (size,), generator=generator)
        ids = torch.randint(num_rows, (int(lengths.sum()),), generator=generator)
        batch = KeyedJaggedTensor(("f",), ids, lengths=lengths)
        sample_weights = torch.rand(len(ids), generator=generator).requires_grad_() if mode == "sum" else None
        upstream = torch.randn(size, dim, generator=generator)
        out = bag(ids, batch.offsets, per_sample_weights=sample_weights)
        theirs.zero_grad()
        out.backward(upstream)
        given = KeyedJaggedTensor(
            ("f",), ids, None if sample_weights is None else sample_weights.detach(), lengths=lengths
        )
        arrays = Arrays([weight])
        torch.testing.assert_close(kernels.lookup(arrays, given).cpu(), out.detach(), rtol=2e-5, atol=2e-5)
        if sample_weights is not None:
            gradient = kernels.weight_gradient(arrays, given, upstream.to(DEVICE))
            torch.testing.assert_close(gradient, sample_weights.grad, rtol=1e-4, atol=1e-4)
        states = [Arrays([state])] if optimizer == "adagrad" else []
        kernels.update(arrays, states, [(kernels, given, upstream.to(DEVICE))], [rule])
        theirs.step()
        torch.testing.assert_close(weight.cpu(), bag.weight.detach(), rtol=2e-5, atol=2e-5)


def interaction_in_order(dense: Tensor, pooled: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients, each sum one rounded product after another: over columns, and over vectors."""
    t = torch.cat([dense[:, None], pooled], dim=1)
    n, dim = t.shape[1:]
    i, j = torch.tril_indices(n, n, offset=-1)
    products, z, grad_t = torch.zeros(len(t), len(i)), torch.zeros(len(t), n, n), torch.zeros_like(t)
    for d in range(dim):
        products += t[:, i, d] * t[:, j, d]
    z[:, i, j] = z[:, j, i] = grad[:, dim:]
    for k in range(n):
        others = torch.arange(n) != k
        grad_t[:, others] += z[:, others, k, None] * t[:, k, None]
    return torch.cat([dense, products], dim=1), grad_t[:, 0] + grad[:, :dim], grad_t[:, 1:]


@pytest.mark.slow_but("sizes3", "sizes4", unless=HAS_GPU)
@pytest.mark.parametrize("sizes", [(3, 26, 16), (2, 1, 3), (1, 40, 70), (2, 31, 5), (0, 3, 4)])
def test_dot_interaction(sizes: tuple[int, int, int]) -> None:
    """In the stated order, and near the reference in float64."""
    size, num_features, dim = sizes
    generator = torch.Generator().manual_seed(dim)
    dense, pooled = (torch.randn(size, *shape, generator=generator) for shape in ((dim,), (num_features, dim)))
    grad = torch.randn(size, dim + num_features * (num_features + 1) // 2, generator=generator)
    there = [own.to(DEVICE) for own in (grad, dense, pooled)]
    found = [triton_ops.interact(*there[1:]), *triton_ops.interact_backward(*there)]
    leaves = [own.double().requires_grad_() for own in (dense, pooled)]
    out = reference.interact(*leaves)
    near = [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]
    atol = [1e-5 * dim**0.5, *[1e-5 * (num_features + 1) ** 0.5] * 2]  # of docs/numerics.md
    for own, exact, other, most in zip(found, interaction_in_order(dense, pooled, grad), near, atol, strict=True):
        assert_agrees(own, exact, sizes, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own.cpu().double(), other, rtol=1e-5, atol=most)


def test_a_vector_that_is_infinite_spoils_no_gradient_but_those_of_its_pairs() -> None:
    """Its own is finite: the gradient of a pair of a vector with itself does not exist."""
    dense, pooled, grad = torch.ones(1, 2), torch.ones(1, 2, 2), torch.ones(1, 5)
    pooled[0, 1] = float("inf")
    _, grad_pooled = triton_ops.interact_backward(*(own.to(DEVICE) for own in (grad, dense, pooled)))
    assert grad_pooled.cpu().tolist() == [[[float("inf")] * 2, [2.0, 2.0]]]


def test_models_on_a_gpu_take_this_interaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DLRM's outputs and gradients are near those on the CPU. Without a GPU the interpreter stands in for one."""
    model = DLRM(
        num_dense=5, num_features=3, embedding_dim=8, bottom_mlp=[16], top_mlp=[16],
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    dense, pooled = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), torch.randn(6, 24)

    def outcome(model: nn.Module, device: torch.device) -> list[Tensor]:
        rows = pooled.to(device).requires_grad_()
        logits = model(dense.to(device), rows)
        grads = torch.autograd.grad(logits.square().sum(), [rows, *model.parameters()])
        return [own.detach().cpu() for own in (logits, *grads)]

    expected, calls = outcome(model, torch.device("cpu")), list[str]()
    for name in ("interact", "interact_backward"):
        plain = getattr(triton_ops, name)
        monkeypatch.setattr(triton_ops, name, lambda *own, name=name, plain=plain: calls.append(name) or plain(*own))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(ops, "_by_triton", lambda values: True)
    for own, other in zip(outcome(model.to(DEVICE), DEVICE), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert calls == ["interact", "interact_backward"]


def compiled(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What compiled_kernels.py prints: by the Triton that is installed, or that in the folder $HOTROW_TRITON."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if folder := os.environ.get("HOTROW_TRITON"):
        monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    script = str(Path(__file__).with_name("compiled_kernels.py"))
    return run_python(script, *arguments, timeout=1200)


@pytest.mark.slow
def test_kernels_compile_to_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU that need not be there: every float operation rounds to nearest once, none is contracted or atomic.

    The widest tile in rows, which Triton 3.6 once could not compile; the others take minutes.
    """
    assert "'update': 5" in compiled(monkeypatch, "16")


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256, 512, 1024])
def test_every_tile_and_storage_compiles(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All optimizers, batches and storages, with divisible and other pointers, sizes of 32 and 64 bits."""
    assert "'update': 120" in compiled(monkeypatch, str(dim), "--whole")


@needs_gpu
@pytest.mark.gpu
def test_large_batches_repeat_to_the_bit() -> None:
    """Many programs at once on a real device: ten runs of one update."""
    case = make_case(5, dim=64, num_samples=5000, num_rows=30_000, longest=19, crowded=True)
    check_lookup(case, "large")
    for algorithm in ALGORITHMS:
        for _ in range(5):
            check_update(case, algorithm, "large", runs=2)


def make_parts(num_rows: tuple[int, ...], seed: int) -> list[list[Tensor]]:
    """A split table with a state for each row, one of float16 with an odd dim, one wide: random bits."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        integers = torch.randint(-(2**15), 2**15, (*shape, 2 if dtype.itemsize == 4 else 1), generator=generator)
        return integers.to(torch.int16).view(dtype).view(shape)

    a, b, c = num_rows
    return [
        [random(a, 7, dtype=torch.bfloat16), random(a, 7, dtype=torch.int16), random(a, dtype=torch.float32)],
        [random(b, 3, dtype=torch.float16)],
        [random(c, 150, dtype=torch.float32), random(c, 150, dtype=torch.float32)],
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


def drawn(num_rows: tuple[int, ...], counts: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(n, generator=generator)[:count] for n, count in zip(num_rows, counts, strict=True)]


@pytest.mark.parametrize("tables", [(0, 1, 2), (0, 2), (2,)])
@pytest.mark.parametrize("counts", [(5, 9, 2), (0, 1, 20), (0, 0, 0)])
def test_rows_move_both_ways(counts: tuple[int, ...], tables: tuple[int, ...]) -> None:
    """Against plain indexing; with odd rows words are of two bytes, without of four."""
    rows_of, slots_of = (40, 30, 25), (10, 11, 20)
    host, before, slots = make_parts(rows_of, 1), make_parts(rows_of, 1), make_parts(slots_of, 2)
    kept = [[part.clone() for part in parts] for parts in slots]
    rows, places = ([each[t] for t in tables] for each in (drawn(rows_of, counts, 3), drawn(slots_of, counts, 4)))
    host, before, slots, kept = ([each[t] for t in tables] for each in (host, before, slots, kept))
    slots = [[part.to(DEVICE) for part in parts] for parts in slots]
    streams = Streams(DEVICE)
    mover = Mover(host, slots, streams)
    mover.bring(rows, places, after=streams.moment()).wait()
    for own, at, ids, parts, old in zip(slots, places, rows, host, kept, strict=True):
        for array, source, expected in zip(own, parts, old, strict=True):
            expected[at] = source[ids]
            assert same(array, expected)
            array += 1 if array.dtype != torch.int16 else 3
    if any(counts):
        mover.send_back(Held(NO_LEASE, list(rows)), places, after=streams.moment())
    mover.settle()
    for own, at, ids, parts, old in zip(slots, places, rows, host, before, strict=True):
        for array, source, expected in zip(own, parts, old, strict=True):
            expected[ids] = array.cpu()[at]
            assert same(source, expected)


def test_a_row_that_leaves_is_there_when_it_is_asked_for_again() -> None:
    host = [[torch.zeros(6, 4)]]
    slots = [[torch.arange(8.0).view(2, 4).to(DEVICE)]]
    streams = Streams(DEVICE)
    mover = Mover(host, slots, streams)
    target = Held(NO_LEASE, [torch.tensor([5])])
    mover.send_back(target, [torch.tensor([1])], after=streams.moment())
    mover.settle()
    mover.bring([torch.tensor([5])], [torch.tensor([0])], after=streams.moment()).wait()
    assert slots[0][0][0].tolist() == host[0][0][5].tolist() == [4.0, 5.0, 6.0, 7.0]


class _Unreached(Moment):
    waited = 0

    def reached(self) -> bool:
        return False

    def wait(self) -> None:
        self.waited += 1


def test_buffers_of_copies_under_way_are_not_handed_out() -> None:
    buffers = Buffers(torch.device("cpu"))
    first = buffers.take(100)
    buffers.give_back(first, Moment())
    assert buffers.take(60).data_ptr() == first.data_ptr(), "used again"
    moments = [_Unreached() for _ in range(moves.MAX_BUFFERS)]
    taken = [buffers.take(50) for _ in moments]
    for buffer, moment in zip(taken, moments, strict=True):
        buffers.give_back(buffer, moment)
    another = buffers.take(50)
    assert another.data_ptr() not in {buffer.data_ptr() for buffer in taken[1:]}
    assert [moment.waited for moment in moments] == [1] + [0] * (len(moments) - 1), "the oldest copy was waited for"
