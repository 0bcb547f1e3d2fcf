"""A rank that dies, stops, fails or differs is named on every other rank, and all processes end; nothing hangs.

Every case is a run of three gloo processes, forked from a server that has imported torch.
"""

import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from benchmarks import rank_faults, rank_laws
from benchmarks.rank_runs import CONTEXT, outcome
from hotrow import EmbeddingCollection, Memory, TableConfig
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.kernels import ops
from hotrow.parallel import gloo, heartbeat
from hotrow.parallel.agreement import check_same, check_still_same, everyone, facts_of, on_every_rank
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.gloo import Gloo, explaining_no_group, fresh
from hotrow.parallel.heartbeat import LIMIT_S, LOST, START_S, Heartbeat
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded import ShardedMemory
from hotrow.run import checkpoint, runs
from hotrow.run.folder import RunFolder

RANKS = 3
HANG_S = 8.0
"""The promise is 5 s. On a busy machine the test only tells a slow end from none."""


class Run:
    """The processes of one run; each runs `scenario(comm, folder)` with its standard error in a file."""

    def __init__(self, folder: Path, scenario: Callable[[Communicator, Path], None]) -> None:
        folder.mkdir()
        self.folder = folder
        self.processes = [CONTEXT.Process(target=_rank, args=(rank, folder, scenario)) for rank in range(RANKS)]
        for process in self.processes:
            process.start()

    def wait_for(self, name: str) -> None:
        """Waits until every rank has made its file `name`."""
        until_s = time.monotonic() + 60
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(RANKS)):
            assert time.monotonic() < until_s and not any(p.exitcode for p in self.processes), self.told()
            time.sleep(0.01)

    def join(self, *ranks: int, limit_s: float = HANG_S) -> list[int | None]:
        """Returns the exit codes of `ranks` (none: all); None for one that has not ended within `limit_s`."""
        until_s = time.monotonic() + limit_s
        for rank in ranks or range(RANKS):
            self.processes[rank].join(max(0.0, until_s - time.monotonic()))
        return [self.processes[rank].exitcode for rank in ranks or range(RANKS)]

    def told(self, rank: int | None = None) -> str:
        ranks = range(RANKS) if rank is None else [rank]
        return "\n".join((self.folder / f"stderr-{each}").read_text() for each in ranks)

    def kill(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid or 0, number)


def _rank(rank: int, folder: Path, scenario: Callable[[Communicator, Path], None]) -> None:
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=RANKS)
    scenario(Communicator(Ranks(rank, RANKS, RANKS), Gloo()), folder)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(scenario: Callable[[Communicator, Path], None]) -> Run:
        runs.append(Run(tmp_path / f"run-{len(runs)}", scenario))
        return runs[-1]

    yield start
    for run in runs:
        for process in run.processes:
            process.kill()
            process.join()


@contextmanager
def watched(comm: Communicator, folder: Path) -> Iterator[list[int]]:
    """A block under a heartbeat, which yields this rank's step to count up; its last words go to a file."""
    step = [0]

    def last_words(text: str) -> None:
        (folder / f"last-{comm.rank}").write_text(json.dumps([time.monotonic(), text]))

    with Heartbeat(comm, step=lambda: step[0], cure="Try again", last_words=last_words):
        (folder / f"begun-{comm.rank}").touch()
        yield step


def wait_in_collectives(comm: Communicator, folder: Path) -> None:
    """Steps that each wait for all ranks, which leave at the same one: others would wait for one that left alone."""
    with watched(comm, folder) as step:
        while not any(everyone(comm, (folder / "stop").exists())):
            step[0] += 1
            time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_on_all_others_which_end(ranks: Callable[..., Run], number: signal.Signals) -> None:
    """Rank 0, through which the others hear of each other, and another one."""
    found = {victim: ranks(wait_in_collectives) for victim in (0, 2)}
    began_s = {}
    for victim, run in found.items():
        run.wait_for("begun")
        time.sleep(0.7)  # a beat, so that its step is known
        began_s[victim] = time.monotonic()
        run.kill(victim, number)
    for victim, run in found.items():
        others = [rank for rank in range(RANKS) if rank != victim]
        assert run.join(*others) == [LOST, LOST], run.told()
        name = f"rank {victim} ({socket.gethostname()}, process {run.processes[victim].pid}) was lost at step "
        for rank in others:
            said_s, text = json.loads((run.folder / f"last-{rank}").read_text())
            assert text.startswith(name), text
            assert int(text.removeprefix(name).split(":")[0]) > 0
            assert run.told(rank).count("hotrow: ") == 1
            assert f"hotrow: {text}\n" in run.told(rank)
            print(f"{number.name} of rank {victim}: rank {rank} named it after {said_s - began_s[victim]:.2f} s")
            assert said_s - began_s[victim] < HANG_S
        if number == signal.SIGSTOP:
            assert f"no sign of life for {LIMIT_S} s" in run.told()
            run.kill(victim, signal.SIGCONT)
            assert run.join(victim) == [LOST], run.told()
        else:
            assert "ended without a word" in run.told()


def be_silent(comm: Communicator, folder: Path, wait: Callable[[], object]) -> None:
    """While rank 1 waits, no other thread of its process runs, and nothing is heard of it."""
    heartbeat.LIMIT_S, heartbeat.BEAT_S = 0.5, 0.1
    with watched(comm, folder):
        if comm.rank == 1:
            wait()
        everyone(comm, "waits for rank 1")


def compute(comm: Communicator, folder: Path) -> None:
    def wait() -> None:
        sys.setswitchinterval(60)
        until_s = time.monotonic() + 1.2
        while time.monotonic() < until_s:
            pass
        sys.setswitchinterval(0.005)

    be_silent(comm, folder, wait)


def sleep(comm: Communicator, folder: Path) -> None:
    be_silent(comm, folder, lambda: ctypes.PyDLL(None).sleep(20))


def test_a_silent_rank_of_this_machine_is_not_lost_while_it_runs(ranks: Callable[..., Run]) -> None:
    """As if the machine had too much to do."""
    running, sleeping = ranks(compute), ranks(sleep)
    assert sleeping.join(0, 2, limit_s=START_S) == [LOST, LOST], sleeping.told()
    assert all("no sign of life for 0.5 s" in sleeping.told(rank) for rank in (0, 2))
    assert running.join(limit_s=START_S) == [0, 0, 0], running.told()


class Relay(threading.Thread):
    """The network between the heartbeats of ranks 0 and 1, which can be paused."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.paused, self.ended = folder, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            write_whole(self.folder / "relay", listener.getsockname()[1])
            (caller, _), port = listener.accept(), read_when_there(self.folder / "port")
            with caller, socket.create_connection(("127.0.0.1", port)) as called:
                while not self.ended.is_set():
                    if self.paused.is_set():
                        time.sleep(0.02)
                        continue
                    ready, _, _ = select.select([caller, called], [], [], 0.02)
                    for end in ready:
                        if not (data := end.recv(4096)):
                            return
                        (called if end is caller else caller).sendall(data)


def write_whole(path: Path, number: int) -> None:
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").rename(path)


def read_when_there(path: Path) -> int:
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())


def wait_through_a_relay(comm: Communicator, folder: Path) -> None:
    plain = heartbeat._call

    def through(place: dict[str, Any], rank: int) -> Any:
        write_whole(folder / "port", place["port"])
        return plain({**place, "port": read_when_there(folder / "relay")}, rank)

    if comm.rank == 1:
        heartbeat._call = through  # type: ignore[assignment]
    wait_in_collectives(comm, folder)


@pytest.mark.slow
def test_a_pause_below_the_limit_ends_nothing_and_a_longer_one_all(ranks: Callable[..., Run]) -> None:
    """One rank pauses; all do, for longer than the limit, as when a machine sleeps; and the network does."""
    ways = (wait_in_collectives, wait_in_collectives, wait_through_a_relay)
    one, all_of_them, network = map(ranks, ways)
    relay = Relay(network.folder)
    for run in (one, all_of_them, network):
        run.wait_for("begun")
    one.kill(1, signal.SIGSTOP)
    relay.paused.set()
    for rank in range(RANKS):
        all_of_them.kill(rank, signal.SIGSTOP)
    time.sleep(LIMIT_S - 1.0)
    one.kill(1, signal.SIGCONT)
    relay.paused.clear()
    time.sleep(2.0)
    for rank in range(RANKS):
        all_of_them.kill(rank, signal.SIGCONT)
    relay.paused.set()
    for run in (one, all_of_them):
        (run.folder / "stop").touch()
        assert run.join() == [0, 0, 0], run.told()
        assert "hotrow" not in run.told()
    assert network.join() == [LOST, LOST, LOST], network.told()
    relay.ended.set()
    for rank, lost in enumerate((1, 0, 1)):
        assert network.told(rank).count("hotrow: ") == 1
        assert f"hotrow: rank {lost} (" in network.told(rank)
        assert "or the network to it is interrupted" in network.told(rank)


def dies_before_the_manifest(comm: Communicator, folder: Path) -> None:
    """Saves a checkpoint; rank 1 is killed when it has written its files of the next one."""
    table = TableConfig(name="t", num_embeddings=300, embedding_dim=4, feature_names=("a",))
    memory = Memory(dram="64KiB", file=str(folder / "rows"), force=True)
    emb = EmbeddingCollection([table], memory=ShardedMemory(comm=comm, below=memory), seed=5)
    plain = checkpoint._write_files

    def write(*given: Any) -> Any:
        (folder / "written").write_text(str(plain(*given)))
        os.kill(os.getpid(), signal.SIGKILL)

    with watched(comm, folder):
        for number in range(2):
            emb.placement.rows("t").write(slice(9 * number, 9 * number + 9), torch.full((9, 4), 0.5))
            if number and comm.rank == 1:
                checkpoint._write_files = write
            checkpoint.save_checkpoint(folder / f"step-{number}", {"embedding": emb})


def test_a_rank_killed_before_the_manifest_leaves_the_checkpoint_before(ranks: Callable[..., Run]) -> None:
    run = ranks(dies_before_the_manifest)
    assert run.join(0, 2, limit_s=START_S) == [LOST, LOST], run.told()
    assert all("hotrow: rank 1 (" in run.told(rank) for rank in (0, 2))
    assert "004.safetensors" in (run.folder / "written").read_text()
    assert list(checkpoint.list_checkpoints(run.folder)) == [0]
    assert checkpoint.steps_without_manifest(run.folder) == []
    table = TableConfig(name="t", num_embeddings=300, embedding_dim=4, feature_names=("a",))
    found, truth = (EmbeddingCollection([table], seed=seed) for seed in (8, 5))
    checkpoint.load_checkpoint(run.folder / "step-0", {"embedding": found})
    truth.weights["t"][:9] = 0.5
    assert torch.equal(found.weights["t"], truth.weights["t"])
    checkpoint.prune_checkpoints(run.folder, keep_last=1)
    assert sorted(path.name for path in run.folder.glob("step-*")) == ["step-0"]


def one_fails(
    comm: Communicator, folder: Path, *, rank: int, error: Exception, after_s: float = 0, others_s: float | None = None
) -> None:
    """others_s: how long the others sleep, and end; if None, they wait for the rank."""
    with watched(comm, folder):
        if comm.rank == rank:
            time.sleep(after_s)
            raise error
        everyone(comm, "waits for a rank that will not come") if others_s is None else time.sleep(others_s)


def all_fail(comm: Communicator, folder: Path) -> None:
    with watched(comm, folder):
        raise ValueError(f"own text {comm.rank}")


def one_has_no_memory(comm: Communicator, folder: Path) -> None:
    with watched(comm, folder):
        if comm.rank == 1:
            np.empty(1 << 60, np.uint8)
        everyone(comm, "waits for a rank that will not come")


def test_an_error_on_one_rank_ends_all_with_its_text(ranks: Callable[..., Run]) -> None:
    one = ranks(partial(one_fails, rank=1, error=ValueError("a bad\nvalue")))
    first = ranks(partial(one_fails, rank=0, error=RuntimeError("a bug"), others_s=60))
    late = ranks(partial(one_fails, rank=2, error=OSError("no space"), after_s=1, others_s=0))
    everywhere, full = ranks(all_fail), ranks(one_has_no_memory)
    assert full.join(0, 2, limit_s=START_S) == [2, 2], full.told()
    for rank in (0, 2):
        told = full.told(rank).splitlines()[-1]
        assert "hotrow: rank 1: " in told and "MemoryError: Unable to allocate 1.00 EiB" in told
    for run, rank, text, code in (
        (one, 1, "ValueError: a bad value", 2),
        (first, 0, "RuntimeError: a bug", 1),
        (late, 2, "OSError: no space", 2),
    ):
        others = [each for each in range(RANKS) if each != rank]
        assert run.join(*others, limit_s=START_S) == [code, code], run.told()
        for each in others:
            assert run.told(each).splitlines()[-1] == f"hotrow: rank {rank}: {text}"
        assert run.join(rank) == [1]  # multiprocessing prints the error itself
        assert "Traceback" in run.told(rank)
        assert "hotrow: " not in run.told(rank)
    # Each tells its own error; none is ended by another's.
    assert everywhere.join(limit_s=START_S) == [1, 1, 1]
    assert all(f"own text {rank}" in everywhere.told(rank) for rank in range(RANKS))
    assert "hotrow: " not in everywhere.told()


def met(function: Callable[[], Any]) -> str:
    try:
        return f"returned {function()}"
    except ValueError as error:
        return str(error)


def disagree(comm: Communicator, folder: Path) -> None:
    config = make_config({"data": f"/home/rank-{comm.rank}/criteo", "train": {"threads": comm.rank + 1}})
    other = make_config({"data": "x", "train": {"batch_size": 64 if comm.rank == 1 else 32}})
    facts = facts_of(config, checksum="c", micro_batches=3)
    narrow = make_config({"data": "x", "train": {"dense_dtype": "bf16"}})
    with patch.object(ops, "bfloat16_products", lambda: "avx512_bf16" if comm.rank == 0 else ""):
        products = facts_of(narrow, checksum="c", micro_batches=3)
    first, last = comm.rank == 0, comm.rank == 2

    def missing() -> str:
        if not first:
            raise FileNotFoundError("no dataset at data/criteo")
        return "opened"

    weights = [torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.bfloat16)]
    apart = [*weights[:-1], weights[-1] * (2 if last else 1)]
    found = {
        "same": met(lambda: check_same(comm, facts)),
        "config": met(lambda: check_same(comm, facts_of(other, checksum="c", micro_batches=3))),
        "version": met(lambda: check_same(comm, facts | {"the version of hotrow": "1" if last else "2"})),
        "isa": met(lambda: check_same(comm, facts | {"the instruction set": "avx2" if first else "avx512"})),
        "products": met(lambda: check_same(comm, products)),
        "data": met(lambda: check_same(comm, facts | {"the checksum of the dataset": comm.rank})),
        "missing": met(lambda: on_every_rank(comm, missing)),
        "there": met(lambda: on_every_rank(comm, lambda: comm.rank)),
        "not due": met(lambda: check_still_same(comm, 99, (0, 99), apart)),
        "together": met(lambda: check_still_same(comm, 100, (0, 100), weights)),
        "at a checkpoint": met(lambda: check_still_same(comm, 199, (0, 199), apart, now=True)),
        "weights": met(lambda: check_still_same(comm, 200, (0, 200), apart)),
        "position": met(lambda: check_still_same(comm, 200, (comm.rank, 200), weights)),
    }
    (folder / f"found-{comm.rank}").write_text(json.dumps(found))


def test_ranks_that_differ_are_named_on_all(ranks: Callable[..., Run]) -> None:
    run = ranks(disagree)
    run.wait_for("found")
    assert run.join() == [0, 0, 0], run.told()
    all_found = [json.loads((run.folder / f"found-{rank}").read_text()) for rank in range(RANKS)]
    assert [found.pop("there") for found in all_found] == ["returned 0", "returned 1", "returned 2"]
    assert all_found[0] == all_found[1] == all_found[2]
    found, host = all_found[0], socket.gethostname()
    assert found["same"] == found["not due"] == found["together"] == "returned None"
    assert found["config"] == (
        f"the ranks of a run must agree, but train.batch_size is 32 on ranks 0, 2 ({host}), 64 on rank 1 ({host}): "
        "start every rank with the same config file and the same --set"
    )
    assert f'the version of hotrow is "2" on ranks 0, 1 ({host}), "1" on rank 2' in found["version"]
    assert f'the instruction set is "avx2" on rank 0 ({host}), "avx512" on ranks 1, 2' in found["isa"]
    assert "HOTROW_ISA" in found["isa"]
    assert re.search(
        r'the instruction set is "\w+ with avx512_bf16" on rank 0 .*, "\w+" on ranks 1, 2', found["products"]
    )
    assert "the checksum of the dataset is 0 on rank 0" in found["data"]
    assert found["missing"] == f"ranks 1, 2 ({host}): no dataset at data/criteo"
    assert "went apart by step 200: rank 2 has checksum of the dense weights" in found["weights"]
    assert "went apart by step 199: rank 2 has checksum" in found["at a checkpoint"]
    assert "rank 1 has epoch 1, rank 0 0; rank 2 has epoch 2, rank 0 0" in found["position"]


class Held:
    """Stands for a run, whose tensors a heartbeat reaches by what it is given."""

    def step(self) -> int:
        return 0

    def last_words(self, text: str) -> None:
        """Says nothing."""


def enter_and_leave(comm: Communicator, folder: Path) -> None:
    """A thread that outlived the block could drop the last tensor while the interpreter ends, which aborts."""
    heartbeat.TICK_S = heartbeat.BEAT_S = 0.01
    for _ in range(100):
        held = Held()
        seen = weakref.ref(held)
        with Heartbeat(comm, step=held.step, last_words=held.last_words, cure="Try again") as watching:
            pass
        assert "hotrow-heartbeat" not in [thread.name for thread in threading.enumerate()]
        del held
        assert seen() is None, f"{watching} holds the run"


@pytest.mark.slow
def test_nothing_of_a_heartbeat_outlives_its_block(ranks: Callable[..., Run]) -> None:
    run = ranks(enter_and_leave)
    assert run.join() == [0, 0, 0], run.told()


def test_one_rank_watches_nothing() -> None:
    with Heartbeat(Communicator(), step=lambda: 0, cure="") as alone:
        assert alone._thread is None
    assert everyone(Communicator(), 3) == [3]
    with pytest.raises(FileNotFoundError):
        on_every_rank(Communicator(), lambda: Path("/nothing/here").read_text())


def test_ranks_that_begin_again_share_nothing_with_those_before() -> None:
    """Of the second generation rank 1 comes late, and finds what the first one left; then there are fewer ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    seen = set[bytes]()

    def meet(rank: int, size: int, found: list[bytes]) -> None:
        time.sleep(0.2 * rank)
        store = fresh(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), rank, size)
        if rank == 0:
            store.set("address", os.urandom(8))
        found[rank] = store.get("address")

    for size in (2, 2, 3, 2, 1):
        found = [b""] * size
        threads = [threading.Thread(target=meet, args=(rank, size, found), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(set(found)) == 1 and found[0] and found[0] not in seen
        seen.add(found[0])
    del server


def test_a_rank_that_was_started_twice_is_named() -> None:
    """The first one waited until MEET_S was over, and then blamed rank 0."""
    store, told = dist.HashStore(), list[str]()
    first = threading.Thread(target=lambda: told.append(met(lambda: fresh(store, 1, 2))), daemon=True)
    first.start()
    while not store.check(["hotrow/here/1"]):
        time.sleep(0.01)
    store.set("hotrow/here/1", "another word")
    first.join(10)
    assert told and told[0].startswith("another process has come as rank 1 of 2 too: start each rank once")


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        expected = f"127.0.0.1:{port}: another process uses this port. Set MASTER_PORT"
        with pytest.raises(ValueError, match=expected), explaining_no_group():
            dist.init_process_group("gloo", rank=0, world_size=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # for a rank that calls there, and hears nothing
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": taken.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        for name in ("MEET_S", "MORE_S"):
            monkeypatch.setattr(gloo, name, 0.2)
        expected = r"did not meet at 127.0.0.1:\d+ \(timed out: what listens there is no store of torch\): see that"
        with pytest.raises(ValueError, match=expected):
            gloo.begin_group()
    with pytest.raises(RuntimeError, match="something else"), explaining_no_group():
        raise RuntimeError("something else")


def test_ranks_that_gloo_cannot_connect_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a rank that failed ends too; and 127.0.1.1 is no address for another host."""
    monkeypatch.setattr(gloo, "CONNECT_S", 0.1)
    monkeypatch.setattr(gloo, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(gloo, "interfaces", lambda: {"eth0": "10.0.0.1"})
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: time.sleep(1))
    with pytest.raises(ValueError, match=r"gloo did not connect them \(not within 0 s\).* reach \(here: eth0 \(10"):
        gloo.begin_group()

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    other = {"host": "node8", "net": "another", "address": "10.0.0.2", "interfaces": "eth0 (10.0.0.2)"}
    store = dist.HashStore()
    store.set("address/1", json.dumps(other))
    store.set("read/1", "")
    cure = "set GLOO_SOCKET_IFNAME on node7 to an interface .* (eth0 (10.0.0.1))"
    expected = f"name of node7 means 127.0.1.1 there: {cure}"
    with pytest.raises(ValueError, match=re.escape(expected).replace(r"\.\*", ".*")):
        gloo.check_addresses(store, 0, 2)
    store.set("address/1", json.dumps(other | {"net": gloo.namespace_id("net")}))
    gloo.check_addresses(store, 0, 2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    store.set("address/1", json.dumps(other))
    gloo.check_addresses(store, 0, 2)


def test_a_guessed_interface_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    other = {"eth0": "10.0.0.2"}
    found = [{"host": "a", "net": "1", "interfaces": two}, {"host": "b", "net": "2", "interfaces": other}]
    monkeypatch.setattr(gloo, "everyone", lambda *_: found)
    text = gloo.unnamed_interface(Communicator(Ranks(0, 2, 2), Gloo()))
    assert text is not None
    assert "a has eth0 (10.0.0.1), ib0 (10.1.0.1)" in text and "b has" not in text
    found[0]["interfaces"] = {}  # GLOO_SOCKET_IFNAME is set there
    assert gloo.unnamed_interface(Communicator(Ranks(0, 2, 2), Gloo())) is None
    assert all(not address.startswith("127.") for address in gloo.interfaces().values())


def test_strangers_are_not_taken_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token, or bytes that are no line, close the connection; the rank that comes after them is taken."""
    place = {"addresses": ["127.0.0.1"], "token": "right"}
    who = [{"host": "a"}, {"host": "b"}]
    with heartbeat._listener(is_local=True) as listener:
        place["port"] = listener.getsockname()[1]
        strangers = [socket.create_connection(("127.0.0.1", place["port"])) for _ in range(2)]
        strangers[0].sendall(b'{"token": "wrong", "rank": 1}\n')
        strangers[1].sendall(b"\xff" * 10 + b"\n")
        found: dict[int, Any] = {}
        answering = threading.Thread(target=lambda: found.update(heartbeat._answer(listener, place, who)), daemon=True)
        answering.start()
        connection, _ = heartbeat._call(place, 1)
        answering.join(5)
        assert set(found) == {1}
        assert all(stranger.recv(1) == b"" for stranger in strangers)
        monkeypatch.setattr(heartbeat, "START_S", 0.1)
        with pytest.raises(ValueError, match=r"rank 1 \(b\) did not connect to the heartbeat of rank 0"):
            heartbeat._answer(listener, place, who)
    with pytest.raises(ValueError, match=r"rank 1 .* did not reach the heartbeat of rank 0, port"):
        heartbeat._call(place, 1)
    for each in (connection, *strangers, *(pair[0] for pair in found.values())):
        each.close()


ROWS = {"train": 2000, "val": 200, "test": 200}
TABLE_ROWS = (500, 200, 30_000)
"""More than `rank_faults.settings` lets lie in DRAM."""
TRAIN = ("-m", "hotrow", "train", "config.yaml")


@pytest.mark.slow
def test_rounds_of_faults(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    """Eight rounds; `python -m benchmarks.rank_faults` has a hundred."""
    data = make_dataset(tmp_path / "data", rows=ROWS, table_rows=TABLE_ROWS, counts=True).path
    (folder := tmp_path / "rounds").mkdir()
    found = list(rank_faults.rounds(data, folder, 8, seed=2))
    assert [each for each in found if each.problems] == []
    assert {each.signal for each in found} == {"SIGKILL", "SIGSTOP"} and {each.tiers for each in found} == {False, True}


@pytest.mark.slow
def test_ranks_on_real_rows(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    """A few steps with one optimizer; `python -m benchmarks.rank_laws` takes 500 with each."""
    data = run_prepare("criteo", str(real_data(rank_laws.ROWS)), tmp_path / "data", min_count=1)
    assert all(rank_laws.compared(data, tmp_path, 60, {"adam": rank_laws.cases()["adam"]}))


@pytest.mark.slow
def test_torchrun_starts_a_run_again_in_its_folder(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    """Rank 1 is killed after the first checkpoint; the same torchrun ends with the bits of one process."""
    data = make_dataset(tmp_path / "data", rows=ROWS, table_rows=TABLE_ROWS, counts=True).path
    given = rank_faults.settings(data, tmp_path / "alone", tiers=False)
    runs.train(make_config(given), quiet=True)
    del given["run"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given))
    options = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *TRAIN]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launch:
        until_s = time.monotonic() + 60
        while not list(tmp_path.glob("runs/*/checkpoints/step-*/manifest.json")) and time.monotonic() < until_s:
            time.sleep(0.01)
        os.kill(_worker(launch.pid, local_rank=1), signal.SIGKILL)
        _, told = launch.communicate(timeout=120)
    assert launch.returncode == 0, told
    assert told.count(") was lost at ") == 2, told
    assert "torchrun starts the run again, from that checkpoint (restart 1 of 1)" in told
    (run,) = (tmp_path / "runs").iterdir()
    assert RunFolder.open(run).record.status == "finished"
    assert "resumed at step" in (run / "log.txt").read_text()
    assert outcome(run) == outcome(tmp_path / "alone")


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_ranks(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    """Two launchers stand for two machines. The second one is lost with its rank; the other goes on with its two."""
    data = make_dataset(tmp_path / "data", rows=ROWS, table_rows=TABLE_ROWS, counts=True).path
    given = rank_faults.settings(data, tmp_path / "alone", tiers=False)
    runs.train(make_config(given), quiet=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given | {"run": str(tmp_path / "run")}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "clicks"]
    options = [*meeting, "--rdzv-conf", "last_call_timeout=5", "--max-restarts", "1", "--nproc-per-node"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    with (tmp_path / "said").open("w") as said, ExitStack() as launchers:
        first, second = (
            launchers.enter_context(subprocess.Popen([*command, num, *TRAIN], cwd=tmp_path, stdout=said, stderr=said))
            for num in ("2", "1")
        )
        launchers.callback(first.kill)
        launchers.callback(second.kill)
        until_s = time.monotonic() + 60
        while not list(tmp_path.glob("run/checkpoints/step-*/manifest.json")) and time.monotonic() < until_s:
            time.sleep(0.01)
        lost = _worker(second.pid)
        second.kill()
        os.kill(lost, signal.SIGKILL)
        code = first.wait(timeout=120)
    told = (tmp_path / "said").read_text()
    assert code == 0, told
    assert f"process {lost}) was lost at " in told and "3 ranks share" in told and "2 ranks share" in told
    assert "resumed at step" in (tmp_path / "run" / "log.txt").read_text()
    assert outcome(tmp_path / "run") == outcome(tmp_path / "alone")


def _worker(launcher: int, *, local_rank: int = 0) -> int:
    """Returns the process of a rank that torchrun has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"LOCAL_RANK={local_rank}" in (path / "environ").read_text().split("\0"):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"torchrun has no rank {local_rank}")
