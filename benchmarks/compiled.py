"""Native code that only benchmarks use, compiled for this machine at its first use with CXX, or c++.

What lies in benchmarks/native needs nanobind, which also builds hotrow: `pip install nanobind==3.1.0`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # its OpenMP comes first: both then share one pool of threads

ROOT = Path(__file__).parents[1]


@functools.cache
def native() -> Any:
    """Returns the module. Raises ValueError, with the cure, if it cannot be compiled."""
    target = ROOT / "build" / f"_yardsticks{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [*(ROOT / "benchmarks/native").iterdir(), *(ROOT / "native").glob("*.h")]
    if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        _compile(target, [source for source in sources if source.suffix == ".cpp"])
    spec = importlib.util.spec_from_file_location("_yardsticks", target)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled(source: str, *more_flags: str) -> ctypes.CDLL:
    """The file `source` of this folder as a library."""
    with tempfile.TemporaryDirectory(prefix="hotrow-compiled-") as folder:
        return ctypes.CDLL(str(compile_into(Path(folder), source, *more_flags)))


def compile_into(folder: Path, source: str, *more_flags: str) -> Path:
    """The same as a file in `folder`."""
    _run([Path(__file__).parent / source], folder / "library.so", [*more_flags])
    return folder / "library.so"


def _compile(target: Path, sources: list[Path]) -> None:
    try:
        import nanobind
    except ImportError as error:
        raise ValueError("benchmarks/native needs nanobind to compile: pip install nanobind") from error
    nb = Path(nanobind.__file__).parent
    headers = [sysconfig.get_path("include"), nb / "include", nb / "ext/robin_map/include", ROOT / "native/include"]
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    includes = [f"-I{path}" for path in (*headers, ROOT / "native")]
    flags = ["-fvisibility=hidden", "-Wno-psabi", *includes]
    _run([*sources, nb / "src/nb_combined.cpp"], partial, flags)
    partial.replace(target)


def _run(sources: list[Path], target: Path, flags: list[str]) -> None:
    """Raises ValueError, with the reason, if there is no compiler or it refuses."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        raise ValueError("no C++ compiler is on the path: set CXX")
    flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", *flags]
    done = subprocess.run([compiler, *flags, *sources, "-o", target], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{compiler} does not compile {sources[0]}: {done.stderr.strip().splitlines()[-1]}")
