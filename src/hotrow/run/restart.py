"""Runs that torchrun starts again: `torchrun --max-restarts N` begins all ranks anew, by the same command, if one ends.

The first rank marks the folder of its run with the launch that it belongs to (`mark_launch`, launch.json). Begun anew,
it finds the folder by that mark (`restart_folder`), and the run goes on there from its newest checkpoint. The same
command, given by a person once more, is another launch and makes a run of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from pydantic.dataclasses import dataclass as record

from hotrow.base.records import STRICT, Document
from hotrow.config.schema import Config
from hotrow.parallel.environment import size_variable
from hotrow.run.folder import resume_command

LAUNCH = "launch.json"


@record(config=STRICT)
class Launch:
    """What launch.json says: which processes a run's first rank belongs to. Hashes, without names of hosts or users."""

    run_id: str
    """torchrun's --rdzv-id, or what it uses instead."""
    agent: str
    """The process of torchrun that started this one."""
    worker: str
    """This process."""
    config: str
    """The config as it was given: one program may train several runs."""


_DOCUMENT = Document(Launch, marks={"hotrow_launch": 1}, cure="remove it: a restart then begins a new run")


def mark_launch(folder: Path, config: Config) -> None:
    """Writes launch.json into the folder of a new run of `config`, if torchrun started this process."""
    if (launch := _own(config)) is not None:
        _DOCUMENT.write(folder / LAUNCH, launch)


def read_launch(folder: Path) -> Launch:
    """Returns what the launch.json of a run says. Raises ValueError naming the file, the field and the cure."""
    return _DOCUMENT.read(folder / LAUNCH)


def restart_folder(config: Config) -> Path | None:
    """Returns the folder in which a run of `config` goes on, if torchrun started this process in place of an earlier
    one that had made it; otherwise None.

    The folder's run may have ended before its first step, without a config.yaml; then it begins in that folder.
    """
    if (own := _own(config)) is None:
        return None
    named = os.environ["TORCHELASTIC_RUN_ID"] not in ("", "none")  # torchrun's default is no name of one launch
    again = named and was_restarted()
    found = []
    for path in [Path(config.run)] if config.run else [file.parent for file in Path("runs").glob(f"*/{LAUNCH}")]:
        with suppress(ValueError, OSError):
            mark = read_launch(path)
            same = mark.agent == own.agent or (again and mark.run_id == own.run_id)
            if same and mark.config == own.config and mark.worker != own.worker:
                found.append(path)
    return max(found, key=lambda path: (path / LAUNCH).stat().st_mtime_ns, default=None)


def was_restarted() -> bool:
    """Returns whether torchrun started this process in place of an earlier one."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def how_to_go_on(folder: Path) -> str:
    """Returns a sentence that says how a run of several ranks goes on after one was lost."""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count < most:
        return f"torchrun starts the run again, from that checkpoint (restart {count + 1} of {most})"
    launcher = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', '1')} -m"
    if (variable := size_variable(os.environ)) not in (None, "WORLD_SIZE"):
        launcher = f"mpiexec -n {os.environ[variable]} python -m"
    return f"Continue with: {launcher} {resume_command(folder)} (or on fewer ranks)"


def _own(config: Config) -> Launch | None:
    """Returns the launch of this process; None if torchrun did not start it."""
    if (run_id := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return None
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return Launch(_hash(run_id), _process(os.getppid()), _process(os.getpid()), _hash(text))


def _process(pid: int) -> str:
    """Returns what tells a process from all others, also from a later one with its number."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return _hash(f"{boot.strip()} {pid} {started}")
    return _hash(os.urandom(16).hex())  # not Linux: equal to no other


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
