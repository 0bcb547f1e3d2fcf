"""The kernels of tables in device memory: they need Triton, which is installed with `hotrow[gpu]` alone."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def triton_ops(what: str) -> Any:
    """Returns kernels/triton_ops.py. Raises ImportError if Triton, which `what` needs, is not installed."""
    try:
        import hotrow.kernels.triton_ops
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(f"{what} need Triton: pip install 'hotrow[gpu]'") from error
    return hotrow.kernels.triton_ops
