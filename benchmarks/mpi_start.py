"""How benchmarks and tests start ranks with mpiexec: also as root, and more of them than there are cores."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OF_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # by default each of two ranks is bound to one core
}
"""Options of its mpiexec, which others do not know, as variables."""


def mpiexec() -> str | None:
    """Returns the path of mpiexec, that beside this Python first; None if it or mpi4py is not installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path)


def command(num_ranks: int, *arguments: str) -> list[str]:
    """Returns what starts `python ARGUMENTS` on ranks. Raises ValueError, with the cure, without an mpiexec."""
    if (found := mpiexec()) is None:
        raise ValueError("mpi4py or mpiexec is not installed here: pip install 'hotrow[mpi]'")
    return [found, "-n", str(num_ranks), sys.executable, *arguments]


def start(
    num_ranks: int, *arguments: str, env: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[Any]:
    """Starts `python ARGUMENTS` on ranks; options: of Popen. Raises ValueError as `command`."""
    return subprocess.Popen(command(num_ranks, *arguments), env={**env, **OF_OPEN_MPI}, **options)
