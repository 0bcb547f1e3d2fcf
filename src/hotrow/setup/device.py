"""Where dense layers compute and in which arithmetic, and which device holds copies of hot rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.config.schema import Config, DenseDtype
from hotrow.kernels import ops

ARITHMETIC = {
    "fp32": "float32",
    "tf32": "float32 with products of TensorFloat-32",
    "bf16": "bfloat16 where torch's autocast has it, weights float32",
}


CPU = torch.device("cpu")


@dataclass(frozen=True)
class DenseDevice:
    """Where dense layers compute, and in which arithmetic."""

    device: torch.device = CPU
    dtype: DenseDtype = "fp32"

    @classmethod
    def of(cls, config: Config) -> DenseDevice:
        """Returns the device and arithmetic that `config` asks for. Raises ValueError if this machine does not have
        them; the error names the option and what to do."""
        dtype, wanted = config.train.dense_dtype, config.device
        if wanted == "auto":
            wanted = "cuda" if config.hbm is not None else "cpu"
        if wanted == "cuda" and not torch.cuda.is_available():
            asked = "device is 'cuda'" if config.device == "cuda" else f"memory.hbm is {config.hbm!r}, slots on a GPU"
            raise ValueError(
                f"{asked}, but torch {torch.__version__} finds no CUDA device here: set device to cpu and memory.hbm "
                "to null, or install a CUDA build of torch on a machine with an NVIDIA GPU"
            )
        if wanted == "cpu" and config.hbm is not None:
            _check_interpreter(config)
        if dtype == "tf32" and wanted == "cpu":
            raise ValueError(
                "train.dense_dtype is 'tf32', but dense layers compute on the CPU, which has no such products: choose "
                "fp32 or bf16, or set device to cuda"
            )
        if wanted == "cuda" and splits_dense(config):
            raise ValueError(
                "train.precision is 'split_bf16', which with dense sgd keeps the MLPs' weights in halves on the CPU, "
                "but device is cuda: choose fp32 or another optimizer.dense.name"
            )
        return cls(torch.device(wanted), dtype)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Inside the block, products of float32 matrices use `dtype`, forward and backward."""
        flags = torch.backends.cuda.matmul
        before = flags.allow_tf32
        flags.allow_tf32 = before or self.dtype == "tf32"
        try:
            yield
        finally:
            flags.allow_tf32 = before

    def outputs(self, model: nn.Module, dense_BI: Tensor, rows: Any) -> Tensor:
        """Returns the outputs of a batch, float32 [B] on the device. rows: what `look_up` returned, on any device."""
        cast = self.dtype == "bf16"
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16) if cast else nullcontext()
        with self.arithmetic(), autocast:
            outputs_B: Tensor = model(dense_BI.to(self.device), self._bring(rows))
        return outputs_B.float()

    def _bring(self, rows: Any) -> Any:
        if isinstance(rows, Tensor):
            return rows.to(self.device)
        return {name: (values.to(self.device), offsets) for name, (values, offsets) in rows.items()}

    def line(self) -> str:
        """Returns the device and arithmetic in words for the user; empty for float32 on the CPU."""
        if self == DenseDevice():
            return ""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return f"; dense layers on {self.device}{name}, {self.words()}"

    def words(self) -> str:
        if (self.dtype, self.device.type) == ("bf16", "cpu") and (products := ops.bfloat16_products()):
            amx = ", on AMX" if products == "amx_bf16" else ops.amx_refusal()
            return f"bfloat16 in products of MLPs, sums and weights float32{amx}"
        return ARITHMETIC[self.dtype]


def _check_interpreter(config: Config) -> None:
    try:
        from hotrow.kernels.triton_kernels import INTERPRETED
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            f"memory.hbm is {config.hbm!r}, but Triton is not installed: pip install 'hotrow[gpu]', or set memory.hbm "
            "to null"
        ) from None
    if not INTERPRETED:
        raise ValueError(
            f"memory.hbm is {config.hbm!r}, slots on a GPU, but device is 'cpu': set device to cuda, or memory.hbm to "
            "null (with TRITON_INTERPRET=1 in the environment the kernels are interpreted on the CPU, for tests)"
        )


def device_of_copies(config: Config, dense: DenseDevice) -> torch.device | None:
    """Returns the device that holds copies of hot rows: the GPU of the dense layers, unless tables have slots on it;
    None if there is none. Raises ValueError, with the cure, if the kernels for copies are not installed."""
    if not config.hot.takes_turns or config.hbm is not None or dense.device.type != "cuda":
        return None
    if find_spec("triton") is None:
        raise ValueError(
            f"hot.schedule is {config.hot.schedule!r} and device is 'cuda': copies of hot rows lie on the GPU, but "
            "Triton is not installed: pip install 'hotrow[gpu]', or set device to cpu"
        )
    return dense.device


def splits_dense(config: Config) -> bool:
    """Returns whether the weights of dense layers are kept in two halves."""
    return config.train.precision == "split_bf16" and config.optimizer.dense.name == "sgd"


def storage_line(config: Config, layers: DenseDevice) -> str:
    """Returns in words how weights are stored: bfloat16 storage does not mean bfloat16 arithmetic."""
    tables = {"fp32": "float32", "fp16": "float16", "split_bf16": "float32 in two halves, lookups read the upper"}
    dense, arithmetic = "the same" if splits_dense(config) else "float32", "all arithmetic is float32"
    if layers.dtype != "fp32":
        arithmetic = f"arithmetic of tables is float32, of dense layers {layers.words()}"
    return f"tables {tables[config.train.precision]}; MLPs {dense}; {arithmetic}"
