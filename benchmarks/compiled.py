"""The native code that only benchmarks use (benchmarks/native), compiled for this machine at its first use."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sysconfig
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


def _compile(target: Path, sources: list[Path]) -> None:
    try:
        import nanobind
    except ImportError as error:
        raise ValueError("benchmarks/native needs nanobind to compile: pip install nanobind") from error
    nb = Path(nanobind.__file__).parent
    headers = [sysconfig.get_path("include"), nb / "include", nb / "ext/robin_map/include", ROOT / "native/include"]
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    flags = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi"]
    includes = [f"-I{path}" for path in (*headers, ROOT / "native")]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *includes, *sources, nb / "src/nb_combined.cpp", "-o", partial], check=True)
    partial.replace(target)
