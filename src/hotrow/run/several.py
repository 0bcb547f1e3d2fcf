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
"""Between two looks at the processes."""


def train_all(jobs: Sequence[Job]) -> None:
    """Trains all runs, as many at a time as there are cores for their threads.

    A signal ends them all as `train` says, and none begins after it. A run whose process failed is trained in this
    process, which so raises its error.
    """
    threads = max(default_threads() if (some := config.train.threads) == "auto" else some for _, config, _ in jobs)
    left = list(jobs) if (places := usable_cores() // threads) < 2 or len(jobs) < 2 else _beside(jobs, places)
    for own, config, quiet in left:
        if train(config, folder=own, quiet=quiet).record.status != "finished":
            return


def _beside(jobs: Sequence[Job], places: int) -> list[Job]:
    """Trains all runs in processes, `places` at a time; returns those whose process failed, if no signal came."""
    left, running, failed = list(jobs), dict[int, tuple[subprocess.Popen[bytes], Job]](), list[Job]()
    with Interrupt(quiet=True) as interrupt:
        try:
            while running or (left and interrupt.signal is None):
                while left and len(running) < places:
                    process = _process(left[0])
                    running[process.pid] = process, left.pop(0)
                time.sleep(LOOK_S)
                for pid, (process, job) in list(running.items()):
                    if process.poll() is not None:
                        failed += [job] if process.returncode else []
                        del running[pid]
                if interrupt.signal is not None:
                    left.clear()
                    for process, _ in running.values():
                        process.send_signal(interrupt.signal)
                        process.wait()
        finally:
            for process, _ in running.values():
                process.kill()
        return failed if interrupt.signal is None else []


def _process(job: Job) -> subprocess.Popen[bytes]:
    folder, config, _ = job
    folder.write_config(config.to_yaml())
    command = [sys.executable, "-m", "hotrow.run.several", str(folder.path)]
    nothing = subprocess.DEVNULL
    # In a session of its own it does not get the terminal's Ctrl-C, which would be its second signal and abort it.
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def main() -> None:
    """Trains the run whose folder is the first argument, by the config in it."""
    end_with_parent()
    path = Path(sys.argv[1])
    train(load_config(path / CONFIG), folder=RunFolder.open(path), quiet=True)


if __name__ == "__main__":
    main()
