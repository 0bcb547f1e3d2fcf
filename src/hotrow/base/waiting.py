"""How idle threads of a process wait for work: set in the environment, before torch is loaded.

This module does not import torch, whose OpenMP reads these variables once, when it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how threads wait; one that the user has set stays."""


def wait_passively(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes idle OpenMP threads sleep, in this process if torch is not loaded yet, and in those that it starts. By
    default they spin for milliseconds. If other processes want the cores, a thread that waits spins away the time of
    the one it waits for, and two threads are several times slower than one."""
    if not any(name in environ for name in VARIABLES):
        environ["OMP_WAIT_POLICY"] = "passive"
