"""A setup and alternatives to it, each tried in processes of its own, in rounds that alternate.

`python -m hotrow.plan.alternatives` is such a process: it reads what to try from standard input and prints what it
found, so that its threads, its memory and a crash of it are its own.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hotrow.base.machine import end_with_parent
from hotrow.config.load import load_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.communicator import Communicator
from hotrow.plan.decision import Decision, decision_of
from hotrow.plan.trial import Trial, trial
from hotrow.run.start import start_of
from hotrow.setup.setup import Setup

ROUNDS = 3
"""Processes that try each setup; the first round goes forward, the next one back."""
LEAVING_S = 20.0
"""Seconds that a process has to remove its rows once it is asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The results of trying a setup in several processes."""

    changes: list[str]
    """Overrides of the config, such as "train.threads=2"; empty for the config as it is."""
    refused: str | None = None
    """Why this machine cannot train the setup; nothing else is known then."""
    samples_per_s: float | None = None
    """The speed of the middle round."""
    spread: tuple[float, float] | None = None
    """The lowest and highest speed of the rounds."""
    step_ms: dict[str, float] | None = None
    """Milliseconds by phase in the same round."""
    io: dict[str, float] | None = None
    """`Trial.io` of the same round."""
    peak_bytes: int | None = None
    """The most memory that a process held."""


def groups(options: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each `--set`: "A=B C=D" sets both together. Raises ValueError for other text."""
    found = [re.split(r"\s+(?=[\w.]+=)", option.strip()) for option in options]
    for group in found:
        for override in group:
            if not re.match(r"[\w.]+=", override):
                raise ValueError(
                    f"--set {override!r}: write NAME=VALUE, or NAME=VALUE NAME=VALUE to change both at once"
                )
    return found


def decided(config: Path, overrides: Sequence[str] = (), comm: Communicator | None = None) -> Setup:
    """Returns the setup of a run of `config` here. Raises ValueError for what this machine does not allow."""
    parsed = load_config(config, overrides)
    dataset = PackedDataset.open(parsed.data, verify="sizes")
    ranks = None if comm is None else comm.ranks
    setup = Setup.decide(parsed, dataset, Path(parsed.run or "runs"), ranks=ranks)
    start_of(setup)  # refuses a `from_run` that a run could not start from
    return setup


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of one process that tried a setup."""

    decision: Decision
    trial: Trial


_FOUND = TypeAdapter(Found)


def try_alternatives(
    config: Path,
    changes: Sequence[Sequence[str]],
    *,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Found, list[Alternative]]:
    """Tries `config` and each of `changes`; returns what was found of `config`, and the result of each, `config` first.
    tell: is called with what is tried next. Raises ValueError if `config` itself is refused."""
    asked = [[], *map(list, changes)]
    for overrides in asked:
        load_config(config, overrides)  # a name that is wrong is not worth a round
    found: list[list[Found]] = [[] for _ in asked]
    refused: dict[int, str] = {}
    for number in range(rounds):
        for k in range(len(asked))[:: -1 if number % 2 else 1]:
            if k in refused:
                continue
            tell(f"round {number + 1} of {rounds}: {' '.join(asked[k]) or 'the config as it is'}")
            answer = _in_a_process(config, asked[k])
            if isinstance(answer, Found):
                found[k].append(answer)
            elif k == 0 and not found[0]:
                raise ValueError(answer)
            elif not found[k]:
                refused[k] = answer
    return _middle(found[0]), [
        Alternative(changes=own, refused=refused[k]) if k in refused else _row(own, found[k])
        for k, own in enumerate(asked)
    ]


def _in_a_process(config: Path, overrides: Sequence[str]) -> Found | str:
    """Returns what a new process finds of a setup, or why it refuses it. If this process is stopped meanwhile, it waits
    until the other one has removed its rows."""
    command = [sys.executable, "-m", "hotrow.plan.alternatives"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            said, _ = child.communicate(json.dumps([str(config), *overrides]))
        except BaseException:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=LEAVING_S)
            child.kill()
            raise
    return f"the process that tried it ended with status {child.returncode}" if child.returncode else answer_of(said)


def answer_of(said: str) -> Found | str:
    """Returns what `main` printed: what was found, or why the setup was refused."""
    answer = said.splitlines()[-1]
    return str(json.loads(answer)) if answer.startswith('"') else _FOUND.validate_json(answer)


def _middle(found: Sequence[Found]) -> Found:
    """The round of middle speed; of two, the slower one."""
    return sorted(found, key=lambda own: own.trial.samples_per_s)[(len(found) - 1) // 2]


def _row(changes: list[str], found: Sequence[Found]) -> Alternative:
    speeds, middle = [own.trial.samples_per_s for own in found], _middle(found).trial
    return Alternative(
        changes=changes,
        samples_per_s=middle.samples_per_s,
        spread=(min(speeds), max(speeds)),
        step_ms=middle.step_ms,
        io=middle.io,
        peak_bytes=max(own.trial.peak_bytes for own in found),
    )


def main() -> None:
    """Tries the setup that standard input names, and prints what was found, or why it is refused."""
    end_with_parent()
    config, *overrides = json.loads(sys.stdin.read())
    try:
        setup = decided(Path(config), overrides)
        answer = _FOUND.dump_json(Found(decision=decision_of(setup), trial=trial(setup))).decode()
    except (ValueError, OSError, MemoryError) as error:
        answer = json.dumps(str(error) or type(error).__name__)
    except KeyboardInterrupt:  # its parent says so
        sys.exit(128 + signal.SIGINT)
    print(answer)


if __name__ == "__main__":
    main()
