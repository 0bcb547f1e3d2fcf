"""Rounds of faults: one of three ranks is killed or stopped at a random moment, and the run goes on to the same bits.

    python -m benchmarks.rank_faults [--rounds 100] [--seed 1] [--tiers] [--folder DIR]

A round trains on three ranks, sends SIGKILL or SIGSTOP to one of them at a random moment (before the first step, in a
collective, while a checkpoint is written), waits until the others have named it and ended, and continues the run on one
to four ranks. Its losses, its metrics and every byte of its last checkpoint must be those of a run on one process that
nothing happened to. A line a round; the last line is JSON: how many rounds, the slowest naming, what differed or hung.
The exit code is 1 if anything did. Ranks are forked from a server that has imported torch, with one thread each.
--tiers: a rank has 192 KiB of DRAM for its rows, of 871 KiB of all ranks; the rest lies on disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hotrow.config.load import load_config, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.heartbeat import LOST
from hotrow.parallel.launch import joined
from hotrow.run import runs
from hotrow.run.checkpoint import list_checkpoints, load_checkpoint
from hotrow.run.folder import CONFIG, RunFolder
from hotrow.run.setup import Setup, build

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "hotrow.run.runs", "hotrow.parallel.launch"])
RANKS = 3
MOST_RANKS = 4
PROMISED_S = 5.0
"""A lost rank is named within."""
HANG_S = 60.0
STEPS = 40


class Round(NamedTuple):
    """What happened in one round."""

    signal: str
    rank: int
    delay_s: float
    """From the moment when the run's folder appeared."""
    named_s: float
    """From the signal until the last of the others had said which rank it was."""
    step: int
    """Of the newest checkpoint then; -1: there was none."""
    ranks: int
    """How many continued."""
    problems: tuple[str, ...]


def settings(data: Path, run: Path, *, tiers: bool) -> dict[str, Any]:
    return {
        "data": str(data),
        "run": str(run),
        "model": {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [16], "top_mlp": [16]},
        "optimizer": {"dense": {"name": "adam", "lr": 0.01}},
        "train": {
            "batch_size": 64,
            "epochs": 100,
            "max_steps": STEPS,
            "eval_every": 15,
            "log_every": 5,
            "micro_batches": MOST_RANKS,
            "threads": 1,
        },
        "checkpoint": {"every": 4},
        "memory": {"dram": "192KiB", "ssd": str(run.parent / "rows"), "force": True} if tiers else "dram",
    }


class Session:
    """The ranks of one session of a run, each a process with its standard error in a file."""

    def __init__(self, size: int, given: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.processes = [CONTEXT.Process(target=_rank, args=(rank, size, port, given, folder)) for rank in range(size)]
        for process in self.processes:
            process.start()

    def told(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def join(self) -> list[int | None]:
        """Returns the exit codes of all ranks; None for one that has not ended within HANG_S."""
        until_s = time.monotonic() + HANG_S
        for process in self.processes:
            process.join(max(0.0, until_s - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _rank(rank: int, size: int, port: int, given: Mapping[str, Any], folder: Path) -> None:
    os.dup2(os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    torch.set_num_threads(1)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    environ = {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ.update(environ)
    with joined(environ) as world:
        if (Path(given["run"]) / CONFIG).is_file():
            runs.resume(given["run"], quiet=True, world=world)
        else:
            runs.train(make_config(dict(given)), quiet=True, world=world)


def outcome(run: Path) -> dict[str, str]:
    """Returns what must be equal of two runs: losses and metrics as text, bits of the last checkpoint by SHA-256."""
    folder = RunFolder.open(run)
    lines = [line for line in folder.measurements() if line["kind"] in ("train", "eval")]
    losses = {f"{line['kind']} {line['step']}": line.get("loss", line.get("logloss")) for line in lines}
    bits = _bits(folder)
    return {"losses": json.dumps(losses), "metrics": json.dumps(folder.record.final_metrics), **bits}


def _bits(folder: RunFolder) -> dict[str, str]:
    """Returns SHA-256 of all weights and states of the last checkpoint, loaded into one process: files of one process
    in tiers have other names than those of several ranks."""
    config = load_config(folder.path / CONFIG, ["memory=dram"])
    parts = build(Setup.decide(config, PackedDataset.open(config.data), folder.path))
    load_checkpoint(list_checkpoints(folder.checkpoints)[STEPS], parts.with_state())
    tensors = {f"table {table.name}": parts.embedding.rows(table.name).whole() for table in parts.embedding.tables}
    tensors |= {f"state {name}": rows.whole() for name, rows in parts.sparse_optimizer.state_rows().items()}
    tensors |= {f"weight {name}": weight for name, weight in parts.model.state_dict().items()}
    for number, state in parts.dense_optimizer.state_dict()["state"].items():
        tensors |= {f"dense state {number}.{name}": value for name, value in state.items()}
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


@contextmanager
def session(size: int, given: Mapping[str, Any], folder: Path) -> Iterator[Session]:
    found = Session(size, given, folder)
    try:
        yield found
    finally:
        found.end()


def one_round(
    number: int, data: Path, folder: Path, expected: Mapping[str, str], longest_s: float, *, seed: int, tiers: bool
) -> Round | None:
    """Returns what happened, or None if the run had ended before the signal came."""
    drawn = random.Random(seed * 1_000_003 + number)
    sent = drawn.choice([signal.SIGKILL, signal.SIGSTOP])
    victim, delay_s, ranks = drawn.randrange(RANKS), drawn.uniform(0, longest_s), drawn.randint(1, MOST_RANKS)
    others = [rank for rank in range(RANKS) if rank != victim]
    given, problems, named_s = settings(data, folder / "run", tiers=tiers), [], 0.0
    with session(RANKS, given, folder / "first") as first:
        _wait((folder / "run" / "run.json").exists, HANG_S)
        time.sleep(delay_s)
        if first.processes[victim].exitcode is not None:
            return None
        began_s = time.monotonic()
        os.kill(first.processes[victim].pid or 0, sent)

        def is_named() -> bool:
            return all(f"rank {victim} (" in first.told(rank) for rank in others)

        _wait(lambda: is_named() or any(first.processes[rank].exitcode == 0 for rank in others), HANG_S)
        if not is_named() and any(first.processes[rank].exitcode == 0 for rank in others):
            return None
        if not is_named():
            problems.append(f"rank {victim} was not named: {[first.told(rank)[-300:] for rank in others]}")
        named_s = time.monotonic() - began_s
        for rank in others:
            first.processes[rank].join(HANG_S)
        codes = [first.processes[rank].exitcode for rank in others]
        if codes != [LOST] * len(others):
            problems.append(f"the others ended with {codes}: {[first.told(rank)[-300:] for rank in others]}")
    if named_s > PROMISED_S:
        problems.append(f"named after {named_s:.1f} s")
    step = max(list_checkpoints(folder / "run" / "checkpoints"), default=-1)
    if not (folder / "run" / CONFIG).is_file():
        shutil.rmtree(folder / "run")  # as its error says: it ended before its first step
    with session(ranks, given, folder / "second") as second:
        codes = second.join()
        if codes != [0] * ranks:
            problems.append(
                f"continued on {ranks} ranks: {codes}: {[second.told(rank)[-300:] for rank in range(ranks)]}"
            )
        else:
            found = outcome(folder / "run")
            problems += [f"{name} differs" for name in expected.keys() | found.keys() if expected[name] != found[name]]
    return Round(sent.name, victim, delay_s, named_s, step, ranks, tuple(problems))


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    until_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


def rounds(data: Path, folder: Path, num_rounds: int, *, seed: int = 1, tiers: bool = False) -> Iterator[Round]:
    """Yields `num_rounds` rounds on the packed dataset `data`, in the empty folder `folder`."""
    (folder / "alone").mkdir()
    with session(1, settings(data, folder / "alone" / "run", tiers=tiers), folder / "alone" / "session") as alone:
        assert alone.join() == [0], alone.told(0)
    expected = outcome(folder / "alone" / "run")
    (folder / "timed").mkdir()
    with session(RANKS, settings(data, folder / "timed" / "run", tiers=tiers), folder / "timed" / "session") as timed:
        _wait((folder / "timed" / "run" / "run.json").exists, HANG_S)
        began_s = time.monotonic()
        assert timed.join() == [0] * RANKS, [timed.told(rank) for rank in range(RANKS)]
        longest_s = time.monotonic() - began_s
    assert outcome(folder / "timed" / "run") == expected, "three ranks differ from one without any fault"
    done = number = 0
    while done < num_rounds:
        number += 1
        (own := folder / f"round-{number}").mkdir()
        if (found := one_round(number, data, own, expected, longest_s, seed=seed, tiers=tiers)) is not None:
            done += 1
            yield found
        shutil.rmtree(own)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        from benchmarks.hot_cells import make_shape

        folder = Path(name)
        data = make_shape("kaggle", 8_000, 1e-3, folder / "data")
        found = []
        for each in rounds(data, folder, given.rounds, seed=given.seed, tiers=given.tiers):
            found.append(each)
            text = "; ".join(each.problems) or "equal"
            print(
                f"{len(found)}: {each.signal} of rank {each.rank} after {each.delay_s:.2f} s, named after "
                f"{each.named_s:.2f} s; from step {each.step} on {each.ranks} ranks: {text}",
                flush=True,
            )
    failed = [each for each in found if each.problems]
    slowest = {
        name: max((each.named_s for each in found if each.signal == name), default=0.0)
        for name in ("SIGKILL", "SIGSTOP")
    }
    print(json.dumps({"rounds": len(found), "failed": len(failed), "slowest_naming_s": slowest}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
