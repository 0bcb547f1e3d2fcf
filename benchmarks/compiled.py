"""C++ beside a benchmark, compiled on demand with the system's compiler (CXX, or c++) for this processor."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def compiled(source: str, *more_flags: str) -> ctypes.CDLL:
    """The file `source` of this folder as a library. Raises ValueError with the reason where it cannot be compiled."""
    with tempfile.TemporaryDirectory(prefix="hotrow-compiled-") as folder:
        return ctypes.CDLL(str(compile_into(Path(folder), source, *more_flags)))


def compile_into(folder: Path, source: str, *more_flags: str) -> Path:
    """The same as a file in `folder`."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        raise ValueError("no C++ compiler is on the path: set CXX")
    library = folder / "library.so"
    flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", *more_flags]
    path = Path(__file__).parent / source
    done = subprocess.run(
        [compiler, *flags, str(path), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{compiler} does not compile {source}: {done.stderr.strip().splitlines()[-1]}")
    return library
