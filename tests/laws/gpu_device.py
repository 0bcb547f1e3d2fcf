"""Where tests of the Triton kernels run: on a CUDA device where there is one, else on the CPU by Triton's interpreter.

conftest.py asks for the interpreter, before anything imports Triton.
"""

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="triton is absent (pip install 'hotrow[gpu]'): no kernel for devices is tested")
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here: the kernels ran in Triton's interpreter alone")
slow_interpreted = pytest.mark.slow_but(unless=HAS_GPU)

from kernel_cases import assert_same_bits  # noqa: E402  # a sibling of the laws


def assert_agrees(
    found: Tensor, expected: Tensor, what: object = "", *, rtol: float = 1e-6, atol: float = 1e-7
) -> None:
    """Interpreted: to the bit. On a GPU: within a tolerance, of docs/numerics.md where none is given."""
    if not HAS_GPU:
        assert_same_bits(found, expected, what)
        return
    same = torch.isclose(found.cpu().float(), expected.float(), rtol=rtol, atol=atol, equal_nan=True)
    assert same.all(), f"{what}: {int((~same).sum())} of {same.numel()} differ"


def to_device(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Copies."""
    return [None if tensor is None else tensor.to(DEVICE, copy=True) for tensor in tensors]
