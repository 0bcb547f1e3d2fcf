"""The typed records of a run: what run.json says, and what the run adds to its checkpoints.

folder.py writes run.json, parts.py takes up the state of a checkpoint, build.py builds the model that one describes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass as record
from typing_extensions import TypedDict

from hotrow.base.records import STRICT, Amount, Count, checked
from hotrow.hot.turns import TurnsState
from hotrow.objectives import BY_GROUP, DEFAULT, OBJECTIVES, objective_of
from hotrow.objectives.calibration import Calibration
from hotrow.objectives.objective import Objective
from hotrow.objectives.several import for_labels
from hotrow.run.checkpoint_files import CURE, MANIFEST, Manifest
from hotrow.tables import TableConfig

PHASES = ("data", "lookup", "dense", "update")
"""The phases of a step. data: waiting for the batch and announcing later batches, with nearly all of the wait for rows
from disk. lookup: the pooled lookup, with the rest of that wait: all of it without look-ahead. dense: dense layers
forward and backward (the backward of the lookup only keeps the pooled gradient), and their optimizer. update: sorting,
summing and updating the touched rows."""
ALL_DONE = "all steps are done"
"""`RunRecord.ended` of a run that can train on with more epochs."""
Part = dict[str, Count | FiniteFloat | None]
"""The figures of an hour or of a tenth of rows."""


class Counted(TypedDict):
    """A warning, and how often it occurred."""

    count: Count
    text: str


class Tried(TypedDict):
    """The measurements of `plan/trial.py` for the setup of a run."""

    date: str
    step_ms: dict[str, Amount]
    """By phase, as `RunRecord.step_ms`."""


class _Dataset(TypedDict):
    path: str
    checksum: str
    name: str


class _Backend(TypedDict):
    name: str
    isa: str
    threads: Count
    reason: str | None


@record(config=STRICT)
class Gain:
    """What a column gives: how much the loss rises if its values are exchanged among rows."""

    increase: FiniteFloat
    error: Amount
    """The standard error of `increase`."""


@record(config=STRICT)
class Group:
    """Scored rows, their mean score and their mean label."""

    num_rows: Count
    score: FiniteFloat
    """The mean of the scores."""
    label: FiniteFloat
    """The mean of the labels."""


@record(config=STRICT)
class Scores:
    """What the scores of the final weights show, as `run/scores.py` finds it."""

    split: str
    rows: Group
    """All of them."""
    tenths: list[Group]
    """Tenths of the rows, by rising score."""
    gains_rows: Count
    """Rows that `gains` were found on."""
    gains: dict[str, Gain]
    """By column."""


@record(config=STRICT)
class Rivals:
    """Results of rivals on the rows of the run, from `hotrow/rivals.py`."""

    lines: list[str]
    """These results for people, and which model to use."""
    rivals: dict[str, dict[str, Any]]
    """By name: its AUC, LogLoss and NE, each after the run's, with the error of the difference; its setting."""


@record(config=STRICT)
class Means:
    """The mean inputs of the rows that judged the run, of training rows if none did; `run/explain.py` takes them."""

    step: Count
    """The step of the weights."""
    dense: list[FiniteFloat]
    """[I]"""
    pooled: dict[str, list[FiniteFloat]]
    """By feature, the mean of the sum of its rows, [D]; without the histories of a model that reads them in order."""


def _check_memory(memory: dict[str, Any]) -> dict[str, Any]:
    kinds = {"hits_per_lookup": (int, float, type(None))}
    for name in ("dram_bytes", "disk_bytes", "stall_share", "hits_per_lookup") if "dram_bytes" in memory else ():
        if name not in memory or type(memory[name]) not in kinds.get(name, (int, float)):
            raise ValueError(f"{name} is {memory.get(name)!r}; it must be a number")
    return memory


def _check_columns(columns: dict[str, dict[str, dict[str, int]]]) -> dict[str, dict[str, dict[str, int]]]:
    for split, by_column in columns.items():
        for name, counts in by_column.items():
            if any(count > counts.get("values", -1) for count in counts.values()):
                raise ValueError(f"{split}.{name}: its counts must be at most `values`, the number of its values")
    return columns


@record(config=STRICT)
class Parent:
    """The run from whose weights this one starts."""

    path: str
    step: Count
    """The step of its weights."""
    checksum: str
    """SHA-256 of the manifest of their checkpoint, which has the checksums of all files."""
    states: list[str]
    """The optimizers whose states go on: dense, sparse, both or none."""
    rows_added: dict[str, Count]
    """By table, the rows that the other run did not have."""
    rows_reborn: dict[str, Count] = Field(default_factory=dict)
    """By table, the rows that stood for expired ids, and stand for others now."""
    metrics: dict[str, Any] | None = None
    """Metrics of its weights, on this run's training rows before the first step; None if both have the same dataset."""
    parts: list[Part] = Field(default_factory=list)
    """The same for each hour of these rows (`begins_s`, since 1970), or of each tenth, and the share `unknown`."""


@record(config=STRICT)
class Candidate:
    """Features and epochs that `fit` tried, and their loss on validation rows."""

    epochs: Count
    loss: FiniteFloat
    worse: FiniteFloat
    """By how much its loss is above the chosen candidate's; `error` is the standard error."""
    error: Amount
    seconds: Amount


_Folder = Annotated[str, Field(pattern="^[a-z]+(-[a-z]+)*$")]


@record(config=STRICT)
class Choice:
    """The candidates of `fit`: folders in selection/ (run/choice.py). `run` found the steps."""

    chosen: _Folder
    run: _Folder
    candidates: dict[_Folder, Candidate]


@record(config=STRICT)
class Launch:
    """Which processes of torchrun a run's first rank belongs to: hashes, without names of hosts or users."""

    run_id: str
    """torchrun's --rdzv-id, or what it uses instead."""
    agent: str
    """The process of torchrun that started the first rank."""
    worker: str
    """The process of the first rank."""
    config: str
    """The config as it was given: one program may train several runs."""


@record(config=STRICT)
class RunRecord:
    """The content of run.json. The closing lines, `--json` and studies are made from it.

    A field is None, and absent from the file, until the run has come to it.
    """

    status: Literal["running", "interrupted", "finished", "failed"]
    command: list[str]
    started: str
    versions: dict[str, str]
    host: dict[str, JsonValue]
    warnings: dict[str, Counted]
    preparation: str | None = None
    choice: Choice | None = None
    """None if nothing was chosen but the number of steps."""
    launch: Launch | None = None
    """None if torchrun did not begin the run."""
    error: str | None = None
    dataset: _Dataset | None = None
    parent: Parent | None = None
    """None if the run begins with random weights."""
    rows: dict[str, Count] | None = None
    seeds: dict[str, Count] | None = None
    backend: _Backend | None = None
    tables_bytes: Count | None = None
    batches_dropped: Count | None = None
    steps: Count | None = None
    steps_skipped: Count | None = None
    epochs: Amount | None = None
    samples_per_s: Amount | None = None
    step_ms: dict[str, Amount] | None = None
    trial: Tried | None = None
    """What steps took when `hotrow plan` last tried this setup; None if it did not."""
    train_s: Amount | None = None
    best_step: Count | None = None
    objective: str = DEFAULT
    """What the model is trained for."""
    metrics_by: str | None = None
    """The feature whose values make groups that judge the model too."""
    labels: list[str] | None = None
    """Names of the labels, if there are several."""
    monitor: str | None = None
    memory: Annotated[dict[str, JsonValue], AfterValidator(_check_memory)] | None = None
    ranks: dict[str, JsonValue] | None = None
    """What several processes sent each other, and where the time of each went; see `run/wire.py`."""
    hot: dict[str, JsonValue] | None = None
    write_budget: dict[str, JsonValue] | None = None
    signal: int | None = None
    ended: str | None = None
    chosen_step: Count | None = None
    metrics: dict[str, dict[str, Any]] | None = None
    """By split, the metrics of the objective, None in place of NaN."""
    columns: Annotated[dict[str, dict[str, dict[str, Count]]], AfterValidator(_check_columns)] | None = None
    """By split, what its rows held by column, as `data/seen.py` counts it."""
    ranges: dict[str, tuple[FiniteFloat, FiniteFloat]] | None = None
    """The lowest and highest usual number of each number column in training, after its transform."""
    calibration: Calibration | None = None
    """The calibration of the network with the weights of its step."""
    negatives_kept: Amount | None = None
    """The share of rows with label 0 that the data has; None if it has all."""
    scores: Scores | None = None
    """None of runs without validation and test rows."""
    means: Means | None = None
    """None of a model that finds items, and if no row counts."""
    rivals: Rivals | None = None
    """None if nobody asked for them."""

    def __post_init__(self) -> None:
        """Raises ValueError if the metrics are not those of the objective."""
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}; this hotrow knows {', '.join(OBJECTIVES)}")
        if self.metrics_by is not None and self.objective not in BY_GROUP:
            raise ValueError(f"metrics_by is {self.metrics_by!r}, but objective is {self.objective!r}")
        if not 0 < (self.negatives_kept or 1.0) <= 1:
            raise ValueError(f"negatives_kept is {self.negatives_kept}; it must be above 0 and at most 1")
        for split, figures in (self.metrics or {}).items():
            try:
                self.trained_for.check(figures)
            except ValueError as error:
                raise ValueError(f"metrics.{split}: {error}") from None

    @property
    def trained_for(self) -> Objective:
        """The loss, metrics and scores that `objective` and `metrics_by` name, for each of `labels`."""
        return for_labels(objective_of(self.objective, self.metrics_by), self.labels or [])

    @property
    def final_metrics(self) -> dict[str, Any]:
        """The metrics on the test split (else the validation split) under their names, and `split`; {} before.

        `columns` there is what the split's rows held, by column, if that was counted.
        """
        for split in ("test", "val"):
            if self.metrics is not None and split in self.metrics:
                counted = {} if self.columns is None else {"columns": self.columns.get(split, {})}
                return {"split": split, **self.metrics[split], **counted}
        return {}

    def summary(self) -> dict[str, Any]:
        """Returns how the run went, flat: what `hotrow train --json` prints beside the folder."""
        metrics, names = self.final_metrics, [*self.trained_for.summary, "split"]
        fields = {
            **{name: getattr(self, name) for name in ("status", "ended", "signal", *_SPEED, "ranks", "write_budget")},
            "rivals": None if self.rivals is None else asdict(self.rivals),
            "memory": None if self.memory is None else _memory_summary(self.memory),
            "parent": None if self.parent is None else asdict(self.parent),
        }
        return {
            **{name: metrics.get(name) for name in names},
            **{name: value for name, value in fields.items() if value is not None},
            "metrics": self.metrics or {},
            "columns": self.columns or {},
            "warnings": self.warnings,
        }


_SPEED = ("samples_per_s", "steps", "steps_skipped", "epochs", "step_ms", "trial", "train_s", "backend")


def off_by(record: RunRecord) -> str:
    """Returns by how much the steps of the run differ from its trial, in words for the end of a line; may be empty."""
    if record.trial is None or not (tried := sum(record.trial["step_ms"].values())) or record.step_ms is None:
        return ""
    return (
        f"; the trial of {record.trial['date']} took {tried:.3g} ms ({tried / sum(record.step_ms.values()) - 1:+.1%})"
    )


def _memory_summary(memory: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of `memory` that most users want, for all tables together."""
    sizes, io = ("dram_bytes", "disk_bytes"), ("bytes_per_read", "bytes_per_write", "cpu_us_per_io")
    hits, stall = ("hits_per_lookup", "hits_per_row"), ("stall_s", "stall_share")
    written = ("read_bytes", "written_bytes", "written_bytes_per_epoch", "write_amplification", "drive_written_bytes")
    return {name: memory[name] for name in (*sizes, *hits, *stall, *io, *written) if memory.get(name) is not None}


@dataclass
class State:
    """Where a run stands. A checkpoint holds this and the parts, and nothing else."""

    step: Count = 0
    epoch: Count = 0
    batch: Count = 0
    """Batches of the current epoch that were trained."""
    turns: TurnsState | None = None
    """Where the order of batches stands, and what copies of hot rows cost; None before the first checkpoint."""
    window_loss: Amount = 0.0
    """The sum of the losses of the last `window_steps` steps, which are not yet in metrics.jsonl."""
    window_steps: Count = 0
    val: dict[str, Any] | None = None
    """The last evaluation of the validation split."""
    best: dict[str, Any] | None = None
    """The best evaluation by `train.monitor`; `best_step` is its step."""
    best_step: Count = 0
    evals_since_best: Count = 0
    ended: str | None = None
    """Why training is over, once it is."""
    skipped: Count = 0
    """Steps that changed nothing, because their loss or gradients were not finite; `step` counts them too."""
    skipped_in_a_row: Count = 0
    num_samples: Count = 0
    seconds: dict[str, Amount] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Time spent in steps, by phase, over all sessions of the run."""
    stall_s: Amount = 0.0
    """Seconds of steps spent waiting for rows that were not in DRAM."""
    drive_written_bytes: Count = 0
    """Bytes of rows and of checkpoints, over all sessions of the run."""

    def __post_init__(self) -> None:
        """Raises ValueError if the phases are other ones than PHASES."""
        if self.seconds.keys() != set(PHASES):
            raise ValueError(f"seconds has {', '.join(self.seconds) or 'nothing'}; it needs {', '.join(PHASES)}")

    @property
    def train_s(self) -> float:
        """Seconds in steps, over all phases."""
        return sum(self.seconds.values())


@record(frozen=True, config=STRICT)
class Extra:
    """The `extra` that a run adds to the manifest of its checkpoints."""

    state: State
    dataset: str
    """The checksum of the dataset."""
    tables: tuple[TableConfig, ...]
    num_dense: Count
    threads: Count
    isa: str
    device: str
    config: dict[str, JsonValue]


_EXTRA = TypeAdapter(Extra)


def read_extra(checkpoint: Path, manifest: Manifest) -> Extra:
    """Returns what the run added to the manifest of its checkpoint. Raises ValueError naming file, field and cure."""
    return checked(_EXTRA, manifest.extra, where=f"{checkpoint / MANIFEST}: extra", cure=CURE)
