"""Preparation in child processes that SIGKILL themselves at a chosen rename, and then go on to the same bytes.

Renames are where state becomes durable, so between any two of them a kill finds what a real one would. Children are
forked before any thread exists.
"""

import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from forked import run_forked
from hotrow.data.prepare.pipeline import Options, prepare
from hotrow.data.prepare.prepare import _Earlier
from hotrow.data.sources.options import ReadOptions
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import SplitSpec
from prepare_data import SCHEMA, file_hashes


def check_kills(logs: Path, folder: Path, num_kills: int, *base: Path) -> None:
    """base: the dataset of the day before, if `logs` are those of a next day."""
    program = "import kill_prepare; kill_prepare.main()"
    done = run_forked(program, logs, folder, num_kills, *base, timeout_s=300)
    assert done.returncode == 0, done.stderr


def run(logs: Path, out: Path, kill_at: int | None = None, when: str = "before") -> None:
    """Prepare; SIGKILL at the `kill_at`-th rename, or never. Writes the number of renames to `<out>.renames`."""
    numbers, rename = itertools.count(1), Path.replace

    def counted(path: Path, target: Any) -> Any:
        number = next(numbers)  # several threads rename
        if number == kill_at and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = rename(path, target)
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = counted  # type: ignore[method-assign, assignment]
    options = Options(rows_per_block=128, rows_per_part=256, rows_per_chunk=200)
    if len(sys.argv) > 4:
        earlier = _Earlier.open(sys.argv[4])
        split = SplitSpec(kind="random", fractions=(1.0, 0.0, 0.0))
        opened = earlier.opened("parquet", logs, split=split, rows=None, read=ReadOptions())
        options = replace(options, base=earlier.base)
    else:
        opened = open_source("parquet", logs, schema=SCHEMA)
    prepare(opened, out, options)
    out.with_suffix(".renames").write_text(str(next(numbers) - 1))


def in_child(*args: Any) -> int:
    """The wait status of `run(*args)` in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            run(*args)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    logs, folder, num_kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    assert in_child(logs, folder / "plain") == 0
    num_renames = int((folder / "plain.renames").read_text())
    plain = file_hashes(folder / "plain")
    assert num_renames > 20
    for i in range(num_kills):
        kill_at, when = 2 + i * (num_renames - 2) // (num_kills - 1), "before" if i % 2 else "after"
        out = folder / f"killed-{i}"
        status = in_child(logs, out, kill_at, when)
        assert os.WTERMSIG(status) == signal.SIGKILL, f"kill {kill_at} did not happen: status {status}"
        if (out / "dataset.json").exists():
            assert in_child(logs, out) != 0, "a finished dataset is never prepared again"
        else:
            assert in_child(logs, out) == 0
        assert file_hashes(out) == plain, f"{when} rename {kill_at}"
