"""Kernels in a forked child, in several Python threads at once, and on more threads than there are cores.

Every case runs in a process of its own with a time limit, so that one that hangs fails.
"""

import ast

import pytest

from forked import run_forked
from hotrow.kernels import ops

pytestmark = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")

COMMON = """
import os, sys, threading, warnings, zlib
import torch
from hotrow import Adagrad, EmbeddingCollection, KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops

def make(seed=0, rows=5000, dim=24):
    return EmbeddingCollection(
        [TableConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=(n,)) for n in "ab"], seed=seed)

def ids_of(step, rows=5000, batch=2048):
    return torch.randint(0, rows, (batch, 2), generator=torch.Generator().manual_seed(step))

def train(seed, steps=3):
    emb = make(seed)
    optimizer = Adagrad(emb, lr=0.1)
    for step in range(steps):
        out = emb(ids_of(step))
        out.backward(out.detach().cos())
        optimizer.step()
    return checksum(emb)

def checksum(emb):
    return [int(w.view(torch.int32).to(torch.int64).mul(torch.arange(w.numel()).view_as(w) % 1009).sum())
            for w in emb.weights.values()]

# Torch's own parallel regions would hang in a forked child; of these operations none opens one.
gradient = torch.rand(2048, 48, generator=torch.Generator().manual_seed(1))

def dense(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()

def digest(seed=0):
    emb = make(seed)
    optimizer = Adagrad(emb, lr=0.1)
    for step in range(3):
        emb(ids_of(step)).backward(gradient)
        optimizer.step()
    inputs = dense(2, 2048, 96), dense(3, 80, 96), dense(4, 80), dense(5, 16, 80), dense(6, 16), dense(7, 2048, 5, 16)
    hidden = ops.mlp(inputs[0], inputs[1:4:2], inputs[2:5:2], last="linear")
    crossed = ops.dot_interaction(hidden, inputs[5])
    crossed.backward(dense(8, *crossed.shape).detach())
    parts = [emb(ids_of(9)), crossed, *(each.grad for each in inputs)]
    return zlib.crc32(b"".join(part.detach().numpy().tobytes() for part in parts))
"""


def run(program: str, timeout: float = 60) -> list[str]:
    done = run_forked(COMMON + program, timeout_s=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


FORK = """
torch.set_num_threads(2)
expected = digest()
read, write = os.pipe()
if (child := os.fork()) == 0:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = digest()
    messages = [str(w.message) for w in caught]
    os.write(write, repr((len(messages), messages[:1], ops.backend().threads, found)).encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(read, 10000).decode())
print(expected)
print(digest() == expected)
print(ops.backend().threads)
"""


def test_a_forked_child_computes_the_same_on_one_thread_and_says_so() -> None:
    child, expected, again, threads = run(FORK)
    count, messages, child_threads, found = ast.literal_eval(child)
    assert count == 1
    assert "forked after hotrow's kernels were loaded: they run on one thread here" in messages[0]
    assert "'spawn'" in messages[0] and "torch's own operations on large tensors wait" in messages[0]
    assert child_threads == 1
    assert found == int(expected)
    assert (again, threads) == ("True", "2"), "the parent goes on as before"


# A step whose tensors torch itself cuts among threads: the cure that the warning names.
CURE = """
torch.set_num_threads(2)

def whole_step():
    inputs = dense(1, 4096, 64), dense(2, 4096, 8, 64)
    crossed = torch.relu(ops.dot_interaction(*inputs) - 16)
    (crossed.t() * 2).sum().backward()
    return zlib.crc32(b"".join(each.grad.numpy().tobytes() for each in inputs))

expected = whole_step()
if (child := os.fork()) == 0:
    torch.set_num_threads(1)
    os._exit(whole_step() != expected)
print(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_of_one_thread_may_use_torch_too() -> None:
    assert run(CURE) == ["0"]


MULTIPROCESSING = """
import multiprocessing

def work(seed):
    return digest(seed), ops.backend().threads

torch.set_num_threads(2)
expected = [digest(seed) for seed in range(3)]
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(work, range(3))
print([result for result, _ in found] == expected, {threads for _, threads in found})
"""


def test_multiprocessing_with_fork() -> None:
    assert run(MULTIPROCESSING) == ["True {1}"]


# Many kept pages make every taker hold the lock for longer; steps take it without Python's own lock.
FORK_WHILE_BUSY = """
torch.set_num_threads(1)
stop = threading.Event()
kept = [ops.empty(1 << 16) for _ in range(1500)]
kept.clear()

def busy():
    emb = make(rows=10, dim=1)
    optimizer = Adagrad(emb, lr=0.1)
    ids, grad = ids_of(0, rows=10, batch=1), torch.ones(1, 2)
    while not stop.is_set():
        emb(ids).backward(grad)
        optimizer.step()

threads = [threading.Thread(target=busy) for _ in range(2)]
[t.start() for t in threads]
for _ in range(200):
    if (child := os.fork()) == 0:
        ops.empty(1 << 18)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
[t.join() for t in threads]
print("done")
"""


@pytest.mark.slow
def test_a_fork_beside_threads_that_take_memory_leaves_no_lock_behind() -> None:
    assert run(FORK_WHILE_BUSY) == ["done"]


THREADS = """
torch.set_num_threads(2)
expected = [train(seed) for seed in range(4)]
for _ in range(3):
    found = [None] * 4
    def work(seed):
        found[seed] = train(seed)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == expected, (found, expected)
print("collections")

emb = make()
wanted = [emb(ids_of(step)).detach() for step in range(4)]
wrong = []
def look_up(step):
    for _ in range(20):
        with torch.no_grad():
            if not torch.equal(emb(ids_of(step)), wanted[step]):
                wrong.append(step)
threads = [threading.Thread(target=look_up, args=(step,)) for step in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not wrong, wrong
print("lookups")

def forward_backward(step):
    for _ in range(20):
        emb(ids_of(step, batch=16)).sum().backward()
threads = [threading.Thread(target=forward_backward, args=(step,)) for step in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
numbers = [number for number, _ in emb._pending]
assert len(numbers) == len(set(numbers)) == 80
print("backwards")
"""


def test_several_python_threads() -> None:
    assert run(THREADS, timeout=120) == ["collections", "lookups", "backwards"]


OVERSUBSCRIBED = """
sums = []
for threads in (1, 8, 33):
    torch.set_num_threads(threads)
    emb = make(rows=70_000)
    optimizer = Adagrad(emb, lr=0.1)
    for step in range(2):
        emb(ids_of(step, rows=70_000, batch=40_000)).backward(ids_of(step, 1000, 40_000).repeat(1, 24).float())
        optimizer.step()
    sums.append(checksum(emb))
print(sums[0] == sums[1] == sums[2])
"""


def test_more_threads_than_cores() -> None:
    assert run(OVERSUBSCRIBED) == ["True"]
