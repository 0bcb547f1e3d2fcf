"""Python programs in processes of their own that need not import torch, which takes a new interpreter seconds.

    done = run_forked(PROGRAM, "argument")            # as subprocess.run([sys.executable, "-c", PROGRAM, "argument"])
    with start_forked(COMMAND, "train", "a.yaml") as child:   # as subprocess.Popen; COMMAND: hotrow itself
        os.kill(child.pid, signal.SIGUSR1)
        done = child.finish()

They are forked from the server of benchmarks.rank_runs. A test whose subject is an import, the memory of a process, the
end of an interpreter, or a variable that is read when a library is loaded starts an interpreter instead.
"""

import gc
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.rank_runs import CONTEXT

CONTEXT.set_forkserver_preload(
    ["pytest", "torch._dynamo", "torch.utils.tensorboard", "hotrow.parallel.launch", "hotrow.days.walk"]
)
COMMAND = "from hotrow.__main__ import main; main()"
NOT_ANOTHER_USER = 77
"""What a script ends with where root has to become another user, and may not: in a container without CAP_SETUID."""
BECOME = f"""
import os, sys
def become(user, change=os.setuid):
    try:
        change(user)
    except OSError as error:
        print(error)
        sys.exit({NOT_ANOTHER_USER})
"""


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Child:
    """A process that was forked; its standard output and error go to files in `folder`."""

    def __init__(
        self, program: str, arguments: tuple[object, ...], folder: Path, environment: Mapping[str, str] | None
    ) -> None:
        self._folder, self._words = folder, ["-c", *map(str, arguments)]
        environ = dict(os.environ if environment is None else environment)
        given = (program, self._words, str(Path.cwd()), environ, folder)
        self._process = CONTEXT.Process(target=_run, args=given)
        with pytest.MonkeyPatch.context() as patch:  # for the server, if this is its first child
            patch.setenv("OMP_NUM_THREADS", "1")
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def said(self) -> str:
        """Returns the standard output so far."""
        path = self._folder / "out"
        return path.read_text() if path.exists() else ""

    def finish(self, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Waits for the end; returncode: as of subprocess, so minus a signal that ended it."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"the child has not ended in {timeout_s:g} s; it printed: {self.said()}"
        return subprocess.CompletedProcess(self._words, code, self.said(), (self._folder / "err").read_text())

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def start_forked(program: str, *arguments: object, env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """program: Python source, run as __main__ in this folder, with this environment if `env` is None."""
    with tempfile.TemporaryDirectory(prefix="hotrow-forked-") as folder:
        child = Child(program, arguments, Path(folder), env)
        try:
            yield child
        finally:
            child.end()


def run_forked(
    program: str, *arguments: object, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    with start_forked(program, *arguments, env=env) as child:
        return child.finish(timeout_s)


def run_python(*words: object, env: Mapping[str, str] | None = None, **options: Any) -> str:
    """Returns what a new interpreter prints, which must end well; env: variables besides those of this process."""
    environ, line = {**os.environ, **(env or {})}, [sys.executable, *map(str, words)]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False, **{"timeout": 120, **options})
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_as_another(script: str, *arguments: object) -> str:
    """Returns what the script prints, which may call `become(user)`; skips where that is refused."""
    done = run_forked(BECOME + script, *arguments)
    if done.returncode == NOT_ANOTHER_USER:
        pytest.skip(f"root may not become another user here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run(program: str, words: list[str], folder: str, environ: dict[str, str], output: Path) -> None:
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), descriptor)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = words
    main = sys.modules["__main__"] = ModuleType("__main__")  # where pickle looks for the program's functions
    exec(compile(program, "<program>", "exec"), main.__dict__)  # a test's own program
