"""The native module's stores, or their readable twin in `reference` where `hotrow.kernels.ops` says why, once."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hotrow.kernels import ops


@functools.cache
def backend() -> Any:
    """The module that moves rows: `hotrow._native`, or `hotrow.placement.reference`."""
    if ops.backend().reason is None:
        return importlib.import_module("hotrow._native")
    from hotrow.placement import reference

    return reference
