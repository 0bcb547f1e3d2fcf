"""What is decided and built before the first step of a run: tables, devices, where rows lie, model and optimizers.

`Setup` holds the decisions, and its errors say what this machine does not have. `build` makes the parts that a step
works on; all random draws are functions of `config.train.seed`. plan/ divides DRAM and disk among the tables,
placement/ moves their rows, and trainer.py takes the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotrow import optim
from hotrow.base.machine import has_amx
from hotrow.batch import KeyedJaggedTensor
from hotrow.config.load import make_config
from hotrow.config.schema import Config, DenseDtype
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.hot.calibrate import Calibration
from hotrow.hot.turns import check_hot, choose_rows
from hotrow.kernels import ops
from hotrow.models.layers import Network
from hotrow.parallel.sharded import Shards, part_of
from hotrow.parallel.shards import Shard, pooled_tables
from hotrow.parallel.world import World
from hotrow.placement import AnyMemory
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.plan.beside import beside_bytes
from hotrow.plan.changes import changes
from hotrow.plan.choose import moved, place_tables, shortage
from hotrow.plan.cost import BLIND_ERROR
from hotrow.plan.demand import demands_of, tables_of
from hotrow.plan.divide import Division, Sharing
from hotrow.plan.hardware import Hardware, known_hardware, why_unknown
from hotrow.plan.shards import shards_of
from hotrow.run.checkpoint import Part
from hotrow.run.checkpoint_files import CURE, MANIFEST, Manifest
from hotrow.run.record import Predicted, read_extra
from hotrow.run.together import Ranks
from hotrow.run.wear import check_write_budget
from hotrow.tables import TableConfig

ARITHMETIC = {
    "fp32": "float32",
    "tf32": "float32 with products of TensorFloat-32",
    "bf16": "bfloat16 where torch's autocast has it, weights float32",
}
CPU = torch.device("cpu")
QUICK_ROWS = 5_000_000
"""Rows whose accesses are looked at within a second, for predictions that the run itself does not need."""
MERGED = ("sgd", "adagrad", "row_wise_adagrad")
"""Optimizers whose states are sums over steps, so that the changes of several ranks may be added up."""


@dataclass(frozen=True)
class Setup:
    """Everything that is decided before the first step of a run, or before its model scores; see `decide`."""

    config: Config
    dataset: PackedDataset
    """What the run trains on; for scoring, the vocabularies that the run keeps."""
    tables: tuple[TableConfig, ...]
    dense: DenseDevice
    """Where dense layers compute."""
    memory: Memory | DeviceMemory | None
    """Where rows lie; None: all in DRAM."""
    copies_on: torch.device | None
    """The device that holds copies of hot rows; None: no device does."""
    folder: Path
    """The run's folder, or the folder in which it will be made."""
    world: World = field(default_factory=World)
    """The processes of the run, and the micro-batches that they share."""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """By table, which ranks hold which rows; empty if there is one rank."""
    hot: Calibration | None = None
    """The hot rows; None without a schedule of them."""
    predicted: Predicted | None = None
    """A step, as the plan has it; None if nothing is known of this machine."""
    not_predicted: str | None = None
    """Why nothing is predicted although there are figures of a machine."""
    short_of_memory: str | None = None
    """Why memory may run out, if the config says how much of it tables take."""

    @classmethod
    def decide(
        cls,
        config: Config,
        dataset: PackedDataset,
        folder: Path,
        *,
        training: bool = True,
        world: World | None = None,
        what_helps: bool = False,
    ) -> Setup:
        """Decides what `config` leaves open, for this machine and this dataset.

        folder: the run's folder, or where it will be. training: if False, the model only scores: tables have no
        optimizer state, and rows that do not fit in DRAM go to disk even if the config says `memory: dram`. world: the
        ranks that train together; None: this process alone. what_helps: whether to predict what would make it faster.
        Raises ValueError, with the cure, for what this machine, the dataset or a budget does not allow.
        """
        world = world or World()
        world = world.in_parts(config.train.micro_batches or world.size)
        config = config.with_micro_batches(world.micro_batches)
        tables, dense = tables_of(config, dataset), DenseDevice.of(config)
        if world.size > 1:
            check_ranks(config, dense)
        copies_on = device_of_copies(config, dense) if training else None
        hot = hot_rows_of(config, tables, dataset, device=copies_on) if training else None
        hardware = known_hardware() if training else None
        shards = _shards(config, tables, dataset, world, hot) if world.size > 1 else {}
        beside = beside_bytes(config, dataset, tables, training=training)
        held = _held(tables, shards, world)
        memory, division = place_tables(
            config,
            held,
            folder,
            str(dense.device),
            dataset=dataset,
            training=training,
            hardware=hardware,
            local_size=world.local_size,
            beside_bytes=beside,
        )
        setup = cls(config, dataset, tables, dense, memory, copies_on, folder, world, shards, hot)
        if training and hardware is None:
            setup = replace(setup, not_predicted=why_unknown())
        elif hardware is not None:
            if shards:
                division = replace(division, sharing=sharing_of(config, tables, shards, world))
            setup = replace(setup, **_prediction(division, memory, hardware, what_helps=what_helps))
        if training:
            short = shortage(config, held, beside_bytes=beside, local_size=world.local_size)
            setup = replace(setup, short_of_memory=short)
            check_write_budget(config, tables, in_tiers=setup.in_tiers)
        return setup

    def in_folder(self, folder: Path) -> Setup:
        """Returns the same decisions for a run whose folder is now known to be `folder`."""
        memory, before = self.memory, self.folder
        if isinstance(memory, DeviceMemory):
            memory = replace(memory, below=moved(memory.below, before, folder))
        else:
            memory = moved(memory, before, folder)
        return replace(self, memory=memory, folder=folder)

    @property
    def in_tiers(self) -> bool:
        """Whether some rows lie in files."""
        return (self.memory.below if isinstance(self.memory, DeviceMemory) else self.memory) is not None

    @property
    def held(self) -> tuple[TableConfig, ...]:
        """What this rank holds of the tables."""
        return _held(self.tables, self.shards, self.world)


def _held(tables: tuple[TableConfig, ...], shards: Mapping[str, Shard], world: World) -> tuple[TableConfig, ...]:
    return tuple(part_of(table, shards[table.name], world) for table in tables) if shards else tables


def hot_rows_of(
    config: Config, tables: Sequence[TableConfig], dataset: PackedDataset, *, device: torch.device | None
) -> Calibration | None:
    """Returns the hot rows of a run; device: where copies of them will lie. Raises ValueError as `check_hot`."""
    record_bytes = {own.name: own.record_bytes for own in demands_of(config, tables, training=True)}
    check_hot(config.hot, dataset, record_bytes, device=device)
    return choose_rows(config.hot, dataset, record_bytes, seed=config.train.seed)


def _shards(
    config: Config, tables: Sequence[TableConfig], dataset: PackedDataset, world: World, hot: Calibration | None
) -> dict[str, Shard]:
    """Returns by table which ranks hold which rows: if hot batches have phases, every rank holds the hot rows."""
    if hot is None or not config.hot.takes_turns:
        return shards_of(config, tables, dataset, world.size)
    shards = shards_of(config, tables, dataset, world.size, hot=hot.hot.prefixes(ranked=dataset.has_counts))
    _check_merging(config, shards, hot.hot.num_beyond({name: shard.prefix for name, shard in shards.items()}))
    return shards


def _check_merging(config: Config, shards: Mapping[str, Shard], num_beyond: int) -> None:
    """Raises ValueError, with the cure, if ranks cannot merge what each of them changed in several steps.

    num_beyond: number of hot rows that not every rank holds.
    """
    if config.hot.merge_every == 1:
        return
    text, optimizer = f"hot.merge_every is {config.hot.merge_every}", config.optimizer.sparse.name
    if optimizer not in MERGED:
        raise ValueError(
            f"{text}, but optimizer.sparse.name is {optimizer!r}, whose states are no sums, so that the changes of "
            f"several ranks cannot be added up: set hot.merge_every to 1, or choose {', '.join(MERGED)}"
        )
    if num_beyond:
        pooled = pooled_tables(shards)
        cure = (
            f"parallel.exchange to rows for {', '.join(pooled)}"
            if pooled
            else "hot.rows to exact, with data whose rows are numbered by their counts, as hotrow prepare does"
        )
        raise ValueError(
            f"{text}, but {num_beyond:,} hot rows are not among the first of their tables, which every rank holds: set "
            f"hot.merge_every to 1, or {cure}"
        )


def check_ranks(config: Config, dense: DenseDevice) -> None:
    """Raises ValueError, with the cure, for options that several ranks cannot follow yet."""
    wanted = {
        "memory.hbm": (config.hbm, "null: the tables of a rank lie in DRAM and on disk"),
        "memory.write_budget": (config.write_budget and config.write_budget.text, "null: only one process counts it"),
        "train.trace": (config.train.trace, "null, and trace one process"),
        "device": (None if dense.device.type == "cpu" else dense.device.type, "cpu"),
    }
    for option, (value, cure) in wanted.items():
        if value is not None:
            raise ValueError(f"{option} is {value!r}, which does not work on several ranks yet: set it to {cure}")


def _prediction(
    division: Division, memory: Memory | DeviceMemory | None, hardware: Hardware, *, what_helps: bool
) -> dict[str, Any]:
    """Returns the fields of a `Setup` that say what a step will take."""
    below = memory.below if isinstance(memory, DeviceMemory) else memory
    try:
        found = division.step(below)
        others = changes(division, below, most_rows=QUICK_ROWS) if what_helps else []
    except Exception as error:  # a run does not fail for want of a prediction
        return {"not_predicted": str(error) or type(error).__name__}
    fields = {name: value for name, value in asdict(found).items() if value is not None}
    fields |= {"error": BLIND_ERROR, "changes": [asdict(each) for each in others]}
    return {"predicted": {**fields, "hardware": {"name": hardware.name, "date": hardware.date}}}


def sharing_of(config: Config, tables: Sequence[TableConfig], shards: Mapping[str, Shard], world: World) -> Sharing:
    """Returns what predictions know of the ranks of `world`."""
    return Sharing(
        tables=tables,
        shards=shards,
        num_ranks=world.size,
        micro_batches=world.micro_batches,
        local_size=world.local_size,
        wire_dtype=config.parallel.wire_dtype,
    )


@dataclass(frozen=True)
class DenseDevice:
    """Where dense layers compute, and in which arithmetic."""

    device: torch.device = CPU
    dtype: DenseDtype = "fp32"

    @classmethod
    def of(cls, config: Config) -> DenseDevice:
        """Returns the device and arithmetic that `config` asks for.

        Raises ValueError if this machine does not have them; the error names the option and what to do.
        """
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

    def logits(self, model: nn.Module, dense_BI: Tensor, rows: Any) -> Tensor:
        """Returns the logits of a batch, float32 [B] on the device. rows: what `look_up` returned, on any device."""
        cast = self.dtype == "bf16"
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16) if cast else nullcontext()
        with self.arithmetic(), autocast:
            logits_B: Tensor = model(dense_BI.to(self.device), self._bring(rows))
        return logits_B.float()

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
        """Returns the arithmetic in words for the user."""
        if (self.dtype, self.device.type) == ("bf16", "cpu"):
            if ops.bfloat16_products():
                return "bfloat16 in products of MLPs, sums and weights float32"
            if has_amx() and ops.backend().isa == "avx512":
                return f"{ARITHMETIC[self.dtype]}, on AMX"
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
    """Returns the device that holds copies of hot rows: the GPU of the dense layers, unless tables have slots on it.

    None: no device. Raises ValueError, with the cure, if the kernels for that are not installed.
    """
    if not config.hot.takes_turns or config.hbm is not None or dense.device.type != "cuda":
        return None
    if find_spec("triton") is None:
        raise ValueError(
            f"hot.schedule is {config.hot.schedule!r} and device is 'cuda': copies of hot rows lie on the GPU, but "
            "Triton is not installed: pip install 'hotrow[gpu]', or set device to cpu"
        )
    return dense.device


def read_model(checkpoint: Path, manifest: Manifest, vocabulary: PackedDataset) -> tuple[Config, Sequence[TableConfig]]:
    """Returns the config and the tables of a run's checkpoint, for the ids of `vocabulary`.

    Raises ValueError naming file and field if the checkpoint belongs to other ids.
    """
    extra, where = read_extra(checkpoint, manifest), f"{checkpoint / MANIFEST}: extra"
    config = make_config(extra.config, origin=f"{where}: config")
    if extra.num_dense != len(vocabulary.info.dense):
        raise ValueError(
            f"{where}: num_dense is {extra.num_dense}, but {vocabulary.path} has {len(vocabulary.info.dense)} dense "
            f"columns; {CURE}"
        )
    if extra.tables != tables_of(config, vocabulary):
        raise ValueError(
            f"{where}: tables and config do not fit the features and ids in {vocabulary.path}; copy that folder from "
            f"the dataset the run used, or {CURE}"
        )
    return config, extra.tables


_DENSE_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
_SPARSE_OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
    "row_wise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam,
    "ftrl": optim.FTRL,
}


@dataclass
class Parts:
    """The objects that a step works on."""

    embedding: EmbeddingCollection
    model: Network
    dense_optimizer: Optimizer
    sparse_optimizer: optim.SparseOptimizer
    schedule: Schedule
    dense: DenseDevice = field(default_factory=DenseDevice)
    """Where the model computes."""
    world: World = field(default_factory=World)
    ranks: Ranks | None = None
    """What joins the ranks that train together; None: this process trains alone."""

    def with_state(self) -> dict[str, Part]:
        """Returns the parts that a checkpoint holds, by the names of their files."""
        return {name: part for name, part in vars(self).items() if name not in ("schedule", "dense", "world", "ranks")}


def build_network(setup: Setup) -> tuple[EmbeddingCollection, Network]:
    """Returns the tables, and the model on its device; all random draws follow from `config.train.seed`."""
    config, tables = setup.config, setup.tables
    seed, dims = config.train.seed, {name: table.embedding_dim for table in tables for name in table.feature_names}
    generator = torch.Generator().manual_seed(seed)
    model = config.model.build(num_dense=len(setup.dataset.info.dense), dims=dims, generator=generator)
    memory: AnyMemory = setup.memory
    if setup.shards:
        wire_dtype = config.parallel.wire_dtype
        memory = Shards(world=setup.world, shards=setup.shards, below=setup.memory, wire_dtype=wire_dtype)
    return EmbeddingCollection(tables, memory=memory, seed=seed), model.to(setup.dense.device)


def build(setup: Setup) -> Parts:
    """Returns what a step works on, before the first step."""
    embedding, model = build_network(setup)
    dense_optimizer, sparse_optimizer = build_optimizers(setup.config, embedding, model)
    schedule = Schedule([dense_optimizer, sparse_optimizer], **setup.config.optimizer.schedule.model_dump())
    return Parts(embedding, model, dense_optimizer, sparse_optimizer, schedule, setup.dense, setup.world)


def build_optimizers(
    config: Config, embedding: EmbeddingCollection, model: nn.Module
) -> tuple[Optimizer, optim.SparseOptimizer]:
    """Returns the torch optimizer of `model` and the fused one of `embedding`."""
    dense, sparse = config.optimizer.dense, config.optimizer.sparse
    options = sparse.model_dump(exclude={"name", "lr"}, exclude_none=True)
    fused = True if all(parameter.device.type == "cpu" for parameter in model.parameters()) else None  # torch's choice
    make = optim.SplitSGDBF16 if splits_dense(config) else partial(_DENSE_OPTIMIZERS[dense.name], fused=fused)
    return (
        make(model.parameters(), lr=dense.lr, weight_decay=dense.weight_decay),
        # nonfinite=None: train_step checks both sides itself, before either is changed.
        _SPARSE_OPTIMIZERS[sparse.name](embedding, lr=sparse.lr, nonfinite=None, **options),
    )


def look_up(model: Network, embedding: EmbeddingCollection, sparse: KeyedJaggedTensor) -> Any:
    """Returns the rows of a batch as `model` takes them."""
    return embedding.sequence(sparse) if model.lookup == "sequence" else embedding(sparse)


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


MIN_LR = 1e-7
"""The rate at which the decay ends; the value of the reference DLRM."""


class Schedule:
    """Sets every parameter group's `lr` to its initial value times a factor of the step alone, counted from 0:

        step < warmup_steps              (step + 1) / warmup_steps
        up to decay_start_step           1
        then, k = step + 1 - start       (1 - k / decay_steps)^2, the rate itself never below 1e-7
        from start + decay_steps - 1 on  as at the last step of the decay

    optimizers: their groups' `lr` at construction is the initial value, so build the schedule before loading a state.
    decay_start_step: None means warmup_steps. The one deviation from the reference: between warm-up and decay the rate
    is the initial one, where the reference freezes the last warm-up step's (warmup_steps - 1) / warmup_steps of it.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        warmup_steps: int = 0,
        decay_start_step: int | None = None,
        decay_steps: int = 0,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._initial = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.decay_start_step = warmup_steps if decay_start_step is None else decay_start_step

    def factor(self, step: int) -> float:
        """Returns what the initial rate is multiplied by at `step`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decayed = min(step + 1 - self.decay_start_step, self.decay_steps - 1)
        return (1 - decayed / self.decay_steps) ** 2 if self.decay_steps and decayed > 0 else 1.0

    def apply(self, step: int) -> None:
        """Sets the rates for step number `step`."""
        factor = self.factor(step)
        floor = MIN_LR if factor < 1.0 and step >= self.warmup_steps else 0.0
        # Groups are looked up anew each time: load_state_dict puts other dicts in their place.
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            for group, lr in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = max(floor, lr * factor)
