"""How idle threads of a process wait for work: set in the environment, before torch is loaded.

This module does not import torch, whose OpenMP reads these variables once, when it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how threads wait; one that the user has set stays."""


def wait_passively(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes idle OpenMP threads sleep, here if torch is not loaded, and in child processes. Spinning takes the cores
    that others, even the thread waited for, need: two threads are then slower than one."""
    if not any(name in environ for name in VARIABLES):
        environ["OMP_WAIT_POLICY"] = "passive"
