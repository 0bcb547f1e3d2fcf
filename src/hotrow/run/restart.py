"""Runs that torchrun starts again: `torchrun --max-restarts N` begins all ranks anew, by the same command, if one ends.

The run.json of a run says which launch its first rank belongs to. When that rank begins anew, it finds the folder by it
(`restart_folder`), and the run goes on from its newest checkpoint. The same command, given by a person once more, is
another launch and makes a run of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from hotrow.config.schema import Config
from hotrow.parallel.environment import size_variable
from hotrow.run.folder import RUN, RunFolder, resume_command
from hotrow.run.record import Launch


def restart_folder(config: Config) -> Path | None:
    """The folder in which a run of `config` goes on, if torchrun started this process in place of an earlier one that
    had made it; otherwise None.

    The folder's run may have ended before its first step, without a config.yaml; then it begins in that folder.
    """
    if (own := launch_of(config)) is None:
        return None
    named = os.environ["TORCHELASTIC_RUN_ID"] not in ("", "none")  # torchrun's default is no name of one launch
    again = named and was_restarted()
    found = []
    for path in [Path(config.run)] if config.run else [file.parent for file in Path("runs").glob(f"*/{RUN}")]:
        with suppress(ValueError, OSError):
            record = RunFolder.open(path).record
            if (mark := record.launch) is None or mark.config != own.config or mark.worker == own.worker:
                continue
            if mark.agent == own.agent or (again and mark.run_id == own.run_id):
                found.append((record.started, path))
    return max(found)[1] if found else None


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


def launch_of(config: Config) -> Launch | None:
    """The launch of this process that trains `config`; None if torchrun did not start it."""
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
