"""The YAML schema of a run: what every option means, its unit, its effect and its allowed values.

The options of a model are in its file (hotrow.models); `Config.model` may be any of them, selected by `name`. Nothing
here acts on a value. load.py reads and checks a config; docs/config.md shows the same as tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import yaml
from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, model_validator

from hotrow.base.files import ByteRate, check_path, parse_byte_rate, parse_bytes
from hotrow.base.records import SECTION
from hotrow.models import MODELS
from hotrow.models.spec import ModelSpec
from hotrow.objectives import BY_GROUP, OBJECTIVES, objective_of
from hotrow.objectives.calibration import Method
from hotrow.objectives.objective import Objective

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
MAX_COUNT = 10**12
"""The most of anything that is counted: more than any run has, and few enough for 64 bits after a multiplication."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Folder = Annotated[str, AfterValidator(check_path)]
DenseDtype = Literal["fp32", "tf32", "bf16"]
Owner = Literal["replicated", "table", "row", "column"]
"""Which ranks hold the rows of a table: all of them, one, or each row another."""
Exchange = Literal["rows", "pooled"]
"""What ranks send each other of a table that they do not all hold."""
Interval = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""How often something happens in training: a share of an epoch (up to 1), or a whole number of steps (above 1)."""


class _Section(BaseModel):
    model_config = SECTION


def _model_name(value: Any) -> str:
    """Returns which model a `model` section is for."""
    default = next(iter(MODELS))
    return str(value.get("name", default)) if isinstance(value, dict) else str(getattr(value, "name", default))


if TYPE_CHECKING:
    Model = ModelSpec
    Monitor = str
else:
    Monitor = Literal[
        tuple(dict.fromkeys(name for each in (*OBJECTIVES.values(), *BY_GROUP.values()) for name in each.monitors))
    ]
    Model = Annotated[
        Union[tuple(Annotated[spec, Tag(name)] for name, spec in MODELS.items())],  # noqa: UP007  # made from a list
        Discriminator(_model_name),
    ]


class DenseOptimizerConfig(_Section):
    """The torch optimizer of the MLPs."""

    name: Literal["sgd", "adagrad", "adam", "adamw"] = "sgd"
    """`torch.optim.SGD`, `Adagrad`, `Adam` or `AdamW`, with torch's defaults for options that are not listed here."""
    lr: Positive = 0.1
    """Learning rate before the schedule."""
    weight_decay: NotNegative | None = None
    """L2 penalty on the weights and biases of the MLPs, at every step. `adamw` multiplies them by 1 - lr * weight_decay
    instead of adding to gradients. null means torch's default: 0.01 for adamw, else 0."""


class SparseOptimizerConfig(_Section):
    """The fused optimizer of the embedding tables."""

    name: Literal["sgd", "adagrad", "row_wise_adagrad", "adam", "ftrl"] = "row_wise_adagrad"
    """The optimizers differ in the state they keep: `adagrad` one sum of squares per weight, `row_wise_adagrad` one per
    row, `adam` (which changes only the rows of the batch) and `ftrl` two numbers per weight, `sgd` nothing."""
    lr: Positive = 0.05
    """Learning rate before the schedule."""
    initial_accumulator_value: Annotated[float, Field(ge=0, le=1e38)] | None = None
    """Initial value of the sums of squares; null means 0. Only for the Adagrads."""
    l1: NotNegative | None = None
    """L1 penalty, which makes small weights exactly 0; null means 0. Only for ftrl."""
    l2: NotNegative | None = None
    """L2 penalty, which makes weights smaller; null means 0. Only for ftrl, as its authors published it."""

    @model_validator(mode="after")
    def _only_what_acts(self) -> SparseOptimizerConfig:
        start = ("initial_accumulator_value",)
        acts = {"adagrad": start, "row_wise_adagrad": start, "ftrl": ("l1", "l2")}.get(self.name, ())
        for field, value in self:
            if field not in ("name", "lr", *acts) and value is not None:
                raise ValueError(
                    f"{field} is {value}, but {self.name} has no such option; remove it or choose another optimizer "
                    f"({self.name} has lr{''.join(f', {name}' for name in acts)})"
                )
        return self


class ScheduleConfig(_Section):
    """The learning rate over the steps, for MLPs and tables: warm-up, then constant, then decay."""

    warmup_steps: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Steps over which the learning rate rises to lr, linearly from lr / warmup_steps."""
    decay_start_step: Count | None = None
    """First step of the decay; null means the step at which the warm-up ends."""
    decay_steps: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Length of the decay: at its k-th step the rate is lr * (1 - k / decay_steps)^2, at least 1e-7, and the last rate
    is kept. 0: no decay."""

    @model_validator(mode="after")
    def _in_order(self) -> ScheduleConfig:
        start = self.decay_start_step
        if start is not None and not self.decay_steps:
            raise ValueError(f"decay_start_step is {start}, but decay_steps is 0; set it to the length of the decay")
        if start is not None and start < self.warmup_steps:
            raise ValueError(f"decay_start_step is {start}, before the warm-up ends at step {self.warmup_steps}")
        return self


class OptimizerConfig(_Section):
    """The optimizers and their learning rates."""

    dense: DenseOptimizerConfig = DenseOptimizerConfig()
    sparse: SparseOptimizerConfig = SparseOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()


class TrainConfig(_Section):
    """How long to train, in which batches, with which arithmetic, and from which seed."""

    batch_size: Count = 2048
    """Samples per step. The last batch of an epoch may be smaller; it is trained too."""
    micro_batches: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Parts into which every batch is cut, for the life of the run. Gradients of MLPs and of rows are summed within a
    part, then over parts in a fixed order, so that any number of processes up to this one trains to the same bits;
    `sgd` then changes a row once per step, and each part of a shuffled batch comes from a part of the epoch of its own,
    so that a process reads that alone. null: the number of processes at the run's start, 1 on one."""
    epochs: Count = 1
    """Passes over the training split."""
    max_steps: Count | None = None
    """Stop after this many steps, even in the middle of an epoch; null means that only `epochs` counts."""
    shuffle: bool = True
    """Whether each epoch reads the rows in a new order drawn from `seed`: blocks, then rows in a window."""
    eval_every: Interval | None = 1.0
    """How often to score the validation split: a share of an epoch (up to 1) or a number of steps (above 1). null: only
    at the end."""
    early_stopping: Count | None = None
    """Stop after this many evaluations without a better validation score (`monitor`), and keep the best weights; null
    means never."""
    monitor: Monitor | None = None
    """The validation metric that decides which weights are best; each `model.objective` has its own. null: the first
    one that it has. binary_cross_entropy has `logloss`, of which the lowest is best, and `auc`, of which the highest is
    best; AUC depends only on the order of the scores, not on whether predicted rates are right. With `metrics.by` it
    has `gauc` too."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 1
    """Determines the initial weights, the initial rows of the tables and the order of samples, and nothing else."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Number of threads of torch and the kernels. `auto`: as many as torch uses (`OMP_NUM_THREADS`,
    `torch.set_num_threads`, otherwise one for each physical core), but no more than the cores this process may use,
    unless `OMP_NUM_THREADS` is set. Processes of a run on one machine divide its cores, unless `OMP_NUM_THREADS` is
    above 1."""
    precision: Literal["fp32", "fp16", "split_bf16"] = "fp32"
    """How weights are stored. `fp16`: tables are float16, rounded at every update, and take half the memory.
    `split_bf16`: tables are float32 in two halves; lookups read the upper half, a bfloat16, and updates use both, so
    they lose nothing. With dense `sgd` the MLPs' weights are stored in the same way (Split-SGD-BF16); with other dense
    optimizers they stay fp32."""
    dense_dtype: DenseDtype = "fp32"
    """The arithmetic of products in dense layers; weights and sums stay float32. `tf32`: TensorFloat-32, only on a GPU.
    `bf16`: bfloat16, on a CPU with `avx512_bf16` in hotrow's own products of MLPs (on AMX if it has it), elsewhere as
    torch's autocast does (slow on CPUs without such products)."""
    pos_weight: Positive = 1.0
    """Weight of samples with label 1 in the loss, as in torch's BCEWithLogitsLoss. It changes no metric:
    with another weight than 1, scores are not rates of clicks, so calibration and LogLoss become worse. Only for
    `model.objective` binary_cross_entropy."""
    clip_norm: Positive | None = None
    """The largest norm of a step's gradients: those of the MLPs and of pooled rows, all together, are scaled down to it
    (`hotrow.clip_grad_norm_`). Only on one process, in any number of micro-batches; plans leave out the time that it
    takes. null: gradients stay as they are."""
    freeze: list[str] = []
    """What keeps its weights: `dense` (the MLPs), `tables` (all of them), or names of tables. Makes sense with weights
    that were trained before (`from_run`); plans leave out the time that it saves."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """What happens at a step if its loss, or a gradient of MLPs or tables, is NaN or infinite. `raise`: the run ends
    and says what was found and where. `skip`: the step changes neither MLPs nor tables, is counted (`steps_skipped` in
    run.json), and the run continues."""
    log_every: Count = 50
    """Steps between two lines of metrics.jsonl; each line has means over these steps."""


class MetricsConfig(_Section):
    """What a model is judged by, beside the metrics of its objective (docs/runs.md)."""

    by: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """A feature with one id per row, such as the user. `gauc` is then the AUC among rows of the same value, as the mean
    over values with both labels, each weighted by its rows. Rare, unseen and missing values do not count. Only for
    `model.objective` binary_cross_entropy. null: there is no `gauc`."""


class CalibrationConfig(_Section):
    """What makes probabilities of a trained model's scores that are rates of clicks (docs/runs.md). It changes no
    weight. Only for `model.objective` binary_cross_entropy."""

    method: Method | None = None
    """What is fitted to the validation rows after training, and then belongs to the model. `platt`: a slope and an
    intercept of log odds, which need few rows. `slope`: that slope, with the mean rate kept, if it is below 1 by more
    than its standard error. `isotonic`: rates that rise with the score in steps, which need some thousand rows; scores
    become equal, which changes AUC a little. null: nothing is."""
    negatives_kept: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share r of the rows with label 0 that the dataset has, if the others were left out of it. `predict`, `eval`
    of raw rows, and exports then make p / (p + (1 - p) / r) of a probability p (He et al., 2014): the rate among all
    rows. Rows of the dataset are judged without it."""


class CheckpointConfig(_Section):
    """When the state of a run is saved, and which checkpoints are kept."""

    every: Interval | None = None
    """How often to save: a share of an epoch (up to 1) or a number of steps (above 1). null: at the end and when the
    run is interrupted."""
    keep_last: Count = 2
    """How many of the newest checkpoints are kept, beside that with the best validation score."""


class MemoryConfig(_Section):
    """Tables in tiers: some rows in DRAM, the rest on disk, with the same bits in every result."""

    hbm: str | int | None = None
    """Bytes, or text such as 8GiB, of a GPU's memory for slots, in which lookups and updates run (docs/gpu.md). null:
    there are none, and tables train on the CPU."""
    dram: str | int = "auto"
    """Bytes, or text such as 2GiB, for tables, optimizer state, bookkeeping about rows, and buffers of one process.
    `auto`: as with `memory: auto`; ranks on one machine share that evenly. A size that leaves too little for the rest
    of the process is a warning."""
    ssd: Folder | None = None
    """Folder on a disk of this machine for the rest, read and written past the page cache; null (and no `file`) means
    the folder `memory` of the run. The files are removed when the run ends."""
    file: Folder | None = None
    """Instead of `ssd`: a folder whose files are used as memory (DAX, CXL, tmpfs, or plain files). With `file_bytes`
    it is a tier between DRAM and `ssd`."""
    file_bytes: str | int | None = None
    """Bytes, or text such as 8GiB, of rows that `file` holds before they go to `ssd`; null: there is no such tier. To
    know which rows lie there takes at most 6 bytes of DRAM for each."""
    writes: Literal["auto", "in_place", "gathered"] = "auto"
    """How rows that leave DRAM are written to `ssd`. `in_place`: each to its own sector. `gathered`: side by side, a
    page in one I/O, wherever the file has room, which takes about 3 bytes of DRAM for each row and files of twice the
    rows' bytes. `auto`: gathered if there is room for both. It changes speed, never results."""
    lookahead: Annotated[int, Field(ge=0, le=64)] = 4
    """Batches whose rows are fetched before they are needed; 0: rows are read when they are looked up."""
    force: bool = False
    """Whether `ssd` may lie on a network file system or in memory (tmpfs), which is refused otherwise."""
    write_budget: str | None = None
    """Bytes that a run should write to its drive, rows and checkpoints, in a day or an hour: text such as 200GB/day or
    10GiB/hour, for instance the endurance a drive is rated for. The run's report has the share that is used, and a run
    that writes more warns once; it goes on. null: no budget."""

    @model_validator(mode="after")
    def _a_size_and_a_folder(self) -> MemoryConfig:
        if self.hbm is not None and parse_bytes(self.hbm, what="hbm") <= 0:
            raise ValueError(f"hbm is {self.hbm!r}; it must be a positive number of bytes, such as 8GiB")
        if self.dram_bytes is not None and self.dram_bytes <= 0:
            raise ValueError(f"dram is {self.dram!r}; it must be a positive number of bytes, such as 2GiB")
        if self.file_bytes is not None and (self.file is None or parse_bytes(self.file_bytes, what="file_bytes") <= 0):
            raise ValueError(
                f"file_bytes is {self.file_bytes!r} and file is {self.file!r}; a tier before ssd needs a folder and a "
                "positive number of bytes, such as 8GiB"
            )
        if self.ssd is not None and self.file is not None and self.file_bytes is None:
            raise ValueError(
                f"ssd is {self.ssd!r} and file is {self.file!r}; name one of them, or none, or say with file_bytes how "
                "much lies in file before it goes to ssd"
            )
        if self.write_budget is not None:
            try:
                parse_byte_rate(self.write_budget)
            except ValueError as error:
                raise ValueError(f"write_budget: {error}") from None
        return self

    @property
    def dram_bytes(self) -> int | None:
        """`dram` as a number; None for `auto`."""
        return None if self.dram == "auto" else parse_bytes(self.dram, what="dram")

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that `ssd` and `file` name."""
        return tuple(Path(folder) for folder in (self.ssd, self.file) if folder is not None)


class HotConfig(_Section):
    """Hot rows: in which order hot and cold samples train. A sample is hot if all its rows are hot."""

    schedule: Literal["none", "fae", "fixed", "window"] = "none"
    """`none`: samples train in the loader's shuffled order. `fixed`: phases of cold batches and of hot batches
    alternate, each with `rate` percent of its class. `fae`: as `fixed`, but after each phase the rate follows the loss
    on validation rows. `window`: within every `window` batches, hot samples fill the first batches."""
    budget: str | int = "512MiB"
    """Memory for hot rows with their optimizer states: bytes, or text such as 512MiB."""
    small_table: str | int = "1MiB"
    """Tables smaller than this, optimizer states included, are hot whole: bytes, or text such as 64KiB."""
    rows: Literal["exact", "sampled", "covering"] = "exact"
    """How hot rows are chosen. `exact`: those with most accesses. `sampled`: FAE's estimate of them from 5 % of the
    samples. `covering`: so that most samples are hot. `hotrow inspect --hot` compares the three."""
    rate: Annotated[float, Field(ge=1, le=100)] = 50
    """Percent of a class of batches, cold or hot, that one phase trains. `fae` starts with it, halves it if the loss
    did not fall, and doubles it after four falls in a row. Only for `fae` and `fixed`."""
    window: Annotated[int, Field(ge=2, le=1024)] = 4
    """Batches within which samples are reordered. Only for `window`."""
    merge_every: Annotated[int, Field(ge=1, le=65536)] = 1
    """Steps of a hot phase after which several processes add up what each has changed in the hot rows. 1 is exact. With
    more, less is sent and the result is *inexact*: it depends on the number of processes and on when the run saves and
    evaluates. Only for `fae` and `fixed`, and for sgd, adagrad and row_wise_adagrad. One process ignores it."""

    @model_validator(mode="after")
    def _bytes(self) -> HotConfig:
        for name, text in {"budget": self.budget, "small_table": self.small_table}.items():
            try:
                size = parse_bytes(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if size < (0 if name == "small_table" else 1):
                raise ValueError(f"{name} is {text!r}; it must be a positive number of bytes, such as 512MiB")
        return self

    def unused(self) -> list[str]:
        """Returns the options that differ from their default but do nothing with this schedule."""
        used = {"schedule"} | (set() if self.schedule == "none" else {"budget", "small_table", "rows"})
        used |= {"rate", "merge_every"} if self.takes_turns else set()
        used |= {"window"} if self.schedule == "window" else set()
        fields = type(self).model_fields
        return [f"hot.{name}" for name in fields if name not in used and getattr(self, name) != fields[name].default]

    @property
    def takes_turns(self) -> bool:
        """Whether phases of hot and of cold batches alternate."""
        return self.schedule in ("fae", "fixed")


class ParallelConfig(_Section):
    """Which process holds which rows, and what processes send each other, if several train one model (docs/cluster.md).
    It changes memory and traffic; only `wire_dtype` can change a result. One process ignores it."""

    sharding: Literal["auto"] | dict[str, Owner] = "auto"
    """Who holds a table, by its name. `replicated`: every rank. `row`: the ranks in turn, row by row. `table`: one
    rank. `column`: as many ranks as there are blocks of 4 columns have a block each, in all rows, and pool it
    (`exchange`); it works with every optimizer but `row_wise_adagrad`. `auto`, and tables that are not named: small
    tables are replicated, the others are dealt out by `row`, or given to one rank each, or to several by columns, if
    their pooled vectors are fewer bytes."""
    hot_rows: Share = 0
    """Every rank holds a copy of this share of the rows of tables that are not replicated: those with most accesses.
    No lookup waits for these rows; memory and bytes on the wire grow. Tables that send pooled vectors have no
    copies."""
    exchange: Literal["auto", "rows", "pooled"] | dict[str, Exchange] = "auto"
    """What travels of tables that are not replicated. `rows`: each row to the ranks that look it up, and a sum of its
    gradients back. `pooled`: ids to the rank that holds the table, or to all that share its columns, a pooled vector
    for each bag back, and the vector's gradient. `auto`, and tables that are not named: what is fewer bytes by the
    dataset's access counts, as long as ranks have about equal work. Models that look up sequences always use `rows`."""
    wire_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """In which type rows of float32 tables, pooled vectors and sums of gradients travel. `bf16` and `fp16` halve their
    bytes and round them, so that results depend on the number of ranks; a warning says so. A run keeps it when it is
    resumed."""


class Config(_Section):
    """One training run."""

    data: Folder
    """Folder of a packed dataset, as `hotrow prepare` writes it; relative to the working directory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where dense layers compute. `auto`: on the CPU, or on a GPU if `memory.hbm` gives tables slots there. `cuda`
    without `memory.hbm`: tables train on the CPU, and pooled rows and their gradients are copied between CPU and GPU;
    with `hot.schedule` `fae` or `fixed`, hot batches train on copies of the hot rows on the GPU."""
    model: Model = next(iter(MODELS.values())).model_validate({})
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    metrics: MetricsConfig = MetricsConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    memory: Annotated[
        Annotated[Literal["auto", "dram"], Tag("word")] | Annotated[MemoryConfig, Tag("mapping")],
        Discriminator(lambda value: "word" if isinstance(value, str) else "mapping"),
    ] = "auto"
    """Where tables and optimizer state live. `auto`: in DRAM, up to 60 % of what this process may use (cgroup limits
    count) and no more than batches and dense layers leave, the rest on disk in the run's folder. `dram`: all in DRAM; a
    run that does not fit is refused. A mapping says how much and where (below). The log's first line says what came of
    it; results are the same bits."""
    hot: HotConfig = HotConfig()
    parallel: ParallelConfig = ParallelConfig()
    from_run: Folder | None = None
    """Folder of a finished run whose weights this one starts from (`hotrow train --from`); null: random weights."""
    run: Folder | None = None
    """Folder of the run, which must not exist yet; null means runs/<dataset>-<model>-NNN with the next free number."""

    @model_validator(mode="after")
    def _events_come(self) -> Config:
        if self.train.early_stopping is not None and self.train.eval_every is None:
            raise ValueError("train.eval_every is null, but early_stopping counts evaluations; set it, e.g. to 0.1")
        for path, value in (("train.eval_every", self.train.eval_every), ("checkpoint.every", self.checkpoint.every)):
            if value is not None and value > 1 and value != int(value):
                raise ValueError(f"{path} is {value}; it is a share of an epoch up to 1, above that a whole number")
        return self

    @model_validator(mode="after")
    def _only_clicks_have_rates(self) -> Config:
        if self.model.objective in BY_GROUP:
            return self
        for path, section in (("metrics", self.metrics), ("calibration", self.calibration)):
            for name, value in section:
                if value != (neutral := type(section).model_fields[name].default):
                    raise ValueError(
                        f"{path}.{name} is {value!r}, but model.objective {self.model.objective} predicts no rates of "
                        f"clicks: set it to {'null' if neutral is None else neutral}, or choose {' or '.join(BY_GROUP)}"
                    )
        return self

    @model_validator(mode="after")
    def _monitor_is_measured(self) -> Config:
        allowed = self.objective.monitors
        if self.train.monitor not in (None, *allowed):
            needs = "gauc needs metrics.by, and " if self.train.monitor == "gauc" else ""
            raise ValueError(
                f"train.monitor is {self.train.monitor!r}; {needs}with model.objective {self.model.objective} it may "
                f"be {', '.join(allowed)} or null"
            )
        return self

    @model_validator(mode="after")
    def _loss_has_options(self) -> Config:
        taken = self.model.trained_for.loss_options
        for name in dict.fromkeys(name for each in OBJECTIVES.values() for name in each.loss_options):
            value, neutral = getattr(self.train, name), TrainConfig.model_fields[name].default
            if name not in taken and value != neutral:
                raise ValueError(
                    f"train.{name} is {value}, but model.objective {self.model.objective} has no such option; set it "
                    f"to {neutral}, or choose another objective"
                )
        return self

    @property
    def objective(self) -> Objective:
        """What the model is trained for, with the options of `train` that change its loss, judged as `metrics` says."""
        objective, by = objective_of(self.model.objective, self.metrics.by), {"by": self.metrics.by}
        options = {name: getattr(self.train, name) for name in objective.loss_options}
        return type(objective)(**options, **(by if objective.by else {}))

    @property
    def monitor(self) -> str:
        """The metric that `train.monitor` names, or the first one of the objective."""
        return self.train.monitor or self.model.trained_for.monitors[0]

    @property
    def tiers(self) -> MemoryConfig:
        """`memory` as a mapping; the defaults if it is `auto` or `dram`."""
        return MemoryConfig() if isinstance(self.memory, str) else self.memory

    @property
    def hbm(self) -> str | int | None:
        return self.tiers.hbm

    @property
    def write_budget(self) -> ByteRate | None:
        """`memory.write_budget` in numbers. If None, there is no budget."""
        return None if self.tiers.write_budget is None else parse_byte_rate(self.tiers.write_budget)

    def with_micro_batches(self, number: int) -> Config:
        return self.model_copy(update={"train": self.train.model_copy(update={"micro_batches": number})})

    def to_yaml(self) -> str:
        """Returns this config as YAML with every field written out; `load_config` reads it back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def interval_steps(interval: float | None, *, steps_per_epoch: int) -> float | None:
    """Returns the steps, not rounded, between two events that come every `interval` (see `Interval`); None for None."""
    if interval is None:
        return None
    return interval if interval > 1 else max(1.0, interval * steps_per_epoch)


def is_due(step: int, every: float | None) -> bool:
    """Returns whether an event that comes every `every` steps comes after step number `step` (from 1). A quarter of an
    epoch of 1,005 steps is 251.25 steps: it is due after steps 252, 503, 754 and 1,005."""
    if every is None:
        return False
    slack = 1e-9  # 0.1 * 30 is above 3
    return int(step / every + slack) > int((step - 1) / every + slack)
