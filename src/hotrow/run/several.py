"""Several runs side by side, each in a process of its own: small models train on one thread, and cores would idle."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from hotrow.base.machine import default_threads, end_with_parent, usable_cores
from hotrow.config.load import load_config
from hotrow.config.schema import Config
from hotrow.run.folder import CONFIG, RunFolder
from hotrow.run.interrupt import Interrupt
from hotrow.run.runs import train

Job: TypeAlias = tuple[RunFolder, Config, bool]
"""A run to train, and whether it says nothing."""
LOOK_S = 0.02
"""Seconds between two looks at the processes."""
FEW_STEPS = 2000
"""A small model takes this many steps before processes that would share them have started."""


def trained_beside(jobs: Sequence[Job]) -> Sequence[Job]:
    """Trains several runs, as many at a time as there are cores for their threads; returns those that are left to this
    process: a single one, all if there is one core or few steps, and those whose process failed, so that their error is
    raised here.

    The first signal ends the processes at once, so that their runs have to begin anew; nothing is left then.
    """
    threads = max(default_threads() if (some := config.train.threads) == "auto" else some for _, config, _ in jobs)
    steps = sum(config.optimizer.schedule.decay_steps or 0 for _, config, _ in jobs)
    if (places := min(usable_cores() // threads, len(jobs))) < 2 or steps < FEW_STEPS:
        return jobs
    for own, config, _ in jobs:
        own.write_config(config.to_yaml())
    with Interrupt(quiet=True) as interrupt:
        running = [_process([str(own.path) for own, _, _ in jobs[place::places]]) for place in range(places)]
        try:
            while interrupt.signal is None and any(process.poll() is None for process in running):
                time.sleep(LOOK_S)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if interrupt.signal is not None:
            return []
    left = [job for job in jobs if RunFolder.open(job[0].path).record.status != "finished"]
    for own, _, _ in left:
        own.log("the process that trained it, or one before it, failed: it is trained again in that of `fit`")
    return left


def _process(folders: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that trains runs one after the other. It starts once for all: that takes seconds."""
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-m", "hotrow.run.several", *folders]
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)


def main() -> None:
    """Trains the runs whose folders are the arguments, by the configs in them."""
    end_with_parent()
    for path in map(Path, sys.argv[1:]):
        if train(load_config(path / CONFIG), folder=RunFolder.open(path), quiet=True).record.status != "finished":
            return


if __name__ == "__main__":
    main()
