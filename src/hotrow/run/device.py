"""Where a run computes: the device of its dense layers, their arithmetic, and slots for rows on that device.

`Place.of` and `place_tables` turn the config's `device`, `train.dense_dtype` and `memory` into what is there, or say
what is missing. What lies below the slots is placement.py's business, how rows are moved that of hotrow.placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.base.files import parse_bytes, size
from hotrow.config.schema import Config, DenseDtype
from hotrow.data.packed.reader import PackedDataset
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.plan.choose import choose, moved
from hotrow.plan.demand import demands_of, most_rows, required_bytes
from hotrow.tables import TableConfig

ARITHMETIC = {
    "fp32": "float32",
    "tf32": "float32 with products of TensorFloat-32",
    "bf16": "bfloat16 where torch's autocast has it, weights float32",
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where dense layers compute, and in which arithmetic."""

    device: torch.device = CPU
    dense_dtype: DenseDtype = "fp32"

    @classmethod
    def of(cls, config: Config) -> Place:
        """The place `config` asks for. Raises ValueError, naming option and cure, where this machine has it not."""
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
        if wanted == "cuda":
            _check_cuda(config)
        return cls(torch.device(wanted), dtype)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Inside, products of float32 matrices are those of `dense_dtype`: forward and backward."""
        flags = torch.backends.cuda.matmul
        before = flags.allow_tf32
        flags.allow_tf32 = before or self.dense_dtype == "tf32"
        try:
            yield
        finally:
            flags.allow_tf32 = before

    def logits(self, model: nn.Module, dense_BI: Tensor, rows: Any) -> Tensor:
        """What `model` says of a batch, float32 [B] on the device; rows: of `look_up`, wherever they lie."""
        cast = self.dense_dtype == "bf16"
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16) if cast else nullcontext()
        with self.arithmetic(), autocast:
            logits_B: Tensor = model(dense_BI.to(self.device), self._bring(rows))
        return logits_B.float()

    def _bring(self, rows: Any) -> Any:
        if isinstance(rows, Tensor):
            return rows.to(self.device)
        return {name: (values.to(self.device), offsets) for name, (values, offsets) in rows.items()}

    def line(self) -> str:
        """For the user; empty where it is float32 on the CPU."""
        if self == Place():
            return ""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return f"; dense layers on {self.device}{name}, {ARITHMETIC[self.dense_dtype]}"


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


def _check_cuda(config: Config) -> None:
    if config.train.precision == "split_bf16" and config.optimizer.dense.name == "sgd":
        raise ValueError(
            "train.precision is 'split_bf16', which with dense sgd keeps the MLPs' weights in halves on the CPU, but "
            "they are to be on cuda: choose fp32 or another optimizer.dense.name"
        )


def place_tables(
    config: Config,
    tables: Sequence[TableConfig],
    run: Path,
    place: Place,
    *,
    dataset: PackedDataset | None = None,
    training: bool = True,
) -> Memory | DeviceMemory | None:
    """Where rows lie: what `placement.choose` says, and slots on the device before it where there is `memory.hbm`.

    Raises ValueError as `choose`, and for slots that do not hold the rows of a step, with the bytes to give.
    """
    below = choose(config, tables, run, dataset=dataset, training=training)
    if config.hbm is None:
        return below
    memory = DeviceMemory(hbm=config.hbm, below=below, device=str(place.device))
    if training:
        _check_a_step_fits(config, tables, memory)
    return memory


def in_folder(memory: Memory | DeviceMemory | None, run: Path, *, chosen_for: Path) -> Memory | DeviceMemory | None:
    """What `place_tables` said for a run in the folder `chosen_for`, for one in the folder `run`."""
    if isinstance(memory, DeviceMemory):
        return replace(memory, below=moved(memory.below, chosen_for, run))
    return moved(memory, chosen_for, run)


def _check_a_step_fits(config: Config, tables: Sequence[TableConfig], memory: DeviceMemory) -> None:
    demands, most = demands_of(config, tables, training=True), [most_rows(config, table) for table in tables]
    for table, own, needed in zip(tables, memory.checked_slots(demands), most, strict=True):
        if own.cached < min(needed, table.num_embeddings - own.pinned):
            least = memory.least_bytes(demands, [min(n, t.num_embeddings) for n, t in zip(most, tables, strict=True)])
            raise ValueError(
                f"memory.hbm is {config.hbm!r}: table {table.name!r} would have {own.cached:,} slots on the device, "
                f"but a step may look up {needed:,} different rows; raise it to {least:,} bytes (memory.hbm={least}), "
                f"or choose a train.batch_size below {config.train.batch_size}"
            )


def device_of_copies(config: Config, place: Place) -> torch.device | None:
    """Where copies of hot rows lie for turns of hot batches: on the GPU of the dense layers, unless tables have slots.

    None: not on a device. Raises ValueError, with the cure, where there are no kernels for that.
    """
    if not config.hot.takes_turns or config.hbm is not None or place.device.type != "cuda":
        return None
    if find_spec("triton") is None:
        raise ValueError(
            f"hot.schedule is {config.hot.schedule!r} and device is 'cuda': copies of hot rows lie on the GPU, but "
            "Triton is not installed: pip install 'hotrow[gpu]', or set device to cpu"
        )
    return place.device


def in_tiers(memory: Memory | DeviceMemory | None) -> bool:
    """Whether some rows lie in files."""
    return (memory.below if isinstance(memory, DeviceMemory) else memory) is not None


def full_device(config: Config, tables: Sequence[TableConfig], error: torch.OutOfMemoryError) -> tuple[str, str | None]:
    """What to say where the memory of the device was full while training, and the option to resume with.

    None: nothing that a resumed run may change needs less.
    """
    text = f"the device's memory is full ({str(error).splitlines()[0]})"
    if config.hbm is not None:
        taken, holder = parse_bytes(config.hbm), "slots take"
    elif config.hot.takes_turns:
        taken, holder = min(parse_bytes(config.hot.budget), required_bytes(config, tables)), "copies of hot rows take"
    else:
        return f"{text}: a smaller train.batch_size or smaller MLPs need less, in a new run", None
    needed = [min(most_rows(config, table), table.num_embeddings) for table in tables]
    least = DeviceMemory(hbm=taken, device="cpu").least_bytes(demands_of(config, tables, training=True), needed)
    text = f"{text}: {holder} {size(taken)} of it, and a step needs the rest"
    tried = max(least, taken * 3 // 4)
    if tried >= taken:
        return f"{text}; slots of less do not hold the rows of a step, so lower train.batch_size, in a new run", None
    instead = "" if config.hbm is not None else ", slots in place of the copies, or a lower hot.budget in a new run"
    return f"{text}; try memory.hbm={tried}{instead}", f"memory.hbm={tried}"


def cpu_instead(config: Config) -> Config:
    """The same model without a device, for results within docs/numerics.md."""
    train = config.train.model_copy(update={"dense_dtype": "fp32"})
    memory = config.memory if isinstance(config.memory, str) else config.memory.model_copy(update={"hbm": None})
    return config.model_copy(update={"device": "cpu", "train": train, "memory": memory})
