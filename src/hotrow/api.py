"""The functions for notebooks and the command line: `fit`, `load`, and a `Run` that scores and evaluates.

    run = hotrow.fit("clicks/*.parquet", label="click", time="ts")
    run.metrics["auc"], run.predict(frame), hotrow.load("runs/clicks-dlrm-001")

The functions here put preparation, training and scoring together; the packages they import do the work.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.base.door import is_taken, remove
from hotrow.base.files import atomic_write, explain_full_disk, size
from hotrow.base.progress import ProgressCallback, num_of, progress_bar
from hotrow.base.records import nearest
from hotrow.batch import Batch
from hotrow.config.load import apply_overrides, make_config, options, overrides_of, read_config, with_model
from hotrow.config.schema import Config
from hotrow.data.packed.format import MANIFEST
from hotrow.data.packed.groups import Groups
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.data.prepare.pipeline import fingerprint
from hotrow.data.prepare.prepare import SCORE, Encoder, score_names
from hotrow.data.seen import Seen
from hotrow.data.sources.columns import is_paths
from hotrow.data.sources.inputs import spooled
from hotrow.data.sources.options import NAMES, ReadOptions, with_read_options
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import Schema, check_options, load_schema, parse_schema
from hotrow.data.sources.tabular import frame_to_arrow
from hotrow.embedding import EmbeddingCollection
from hotrow.export.delta import write_delta
from hotrow.export.export import Description, Whole, write_export, write_whole
from hotrow.export.rows import RowFormat, StoredLookups
from hotrow.models.layers import Network
from hotrow.models.spec import SampleError
from hotrow.objectives.calibration import Calibration, calibrated, for_all_negatives
from hotrow.objectives.objective import Metrics, Objective
from hotrow.objectives.several import for_labels
from hotrow.parallel.agreement import on_every_rank
from hotrow.parallel.launch import joined as joined_ranks
from hotrow.report.facts import mapping_in
from hotrow.report.model import scores_of
from hotrow.report.page import NAME as REPORT
from hotrow.rivals import compare_rivals
from hotrow.run.build import build_network, look_up, read_model
from hotrow.run.checkpoint import list_checkpoints, load_checkpoint, steps_without_manifest
from hotrow.run.checkpoint_files import read_manifest
from hotrow.run.choice import Asked, Selection, can_refit, recipe_of, selection_line, with_validation_rows
from hotrow.run.evaluate import evaluate
from hotrow.run.explain import Explanation, explained, joined
from hotrow.run.folder import CONFIG, ROWS, RUN, RunFolder, check_free, resume_command
from hotrow.run.items import Items
from hotrow.run.record import Means, RunRecord, off_by
from hotrow.run.runs import config_of, make_folder, resume, train
from hotrow.run.several import trained_beside
from hotrow.run.storage import close_tiers
from hotrow.run.usual import count_split, seen_of
from hotrow.setup.beside import EVAL_BATCH_SIZE
from hotrow.setup.device import DenseDevice
from hotrow.setup.setup import Setup

_SCORE_WRITERS: dict[str, Any] = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}


class _Loaded(NamedTuple):
    """The tables and layers that a run scores with."""

    embedding: EmbeddingCollection
    model: Network
    dense: DenseDevice
    objective: Objective


class Run:
    """A run on disk; `hotrow.fit` and `hotrow.load` return one."""

    def __init__(self, path: Path | str) -> None:
        self.folder = RunFolder.open(path)
        self._told_of_loss = False
        self._doubts: dict[str, str] = {}
        self.seen: Seen | None = None
        """Counts of what the rows scored last held, by column, and which of these stand out."""

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def record(self) -> RunRecord:
        """The contents of run.json: status, versions, host, backend, warnings, metrics, timings."""
        return self.folder.record

    @property
    def metrics(self) -> dict[str, Any]:
        """The final metrics on the test split (else the validation split) by name, and `split`; {} if it has none."""
        return self.record.final_metrics

    @property
    def history(self) -> dict[str, list[Any]]:
        """The lines of metrics.jsonl as columns of one length, which `pandas.DataFrame` and `polars.DataFrame` take.

        `kind` (train, eval, swap, unknown_ids), `step`, `split` (of an eval) and a column for each number, None
        where a line has none: `loss`, `lr.dense` and others of training, the metrics of evaluations. Steps rise within
        a kind and split.
        """
        lines = [_flat_numbers(line) for line in self.folder.measurements()]
        names = dict.fromkeys(("kind", "step", "split", *(name for line in lines for name in line)))
        return {name: [line.get(name) for line in lines] for name in names}

    @property
    def importances(self) -> dict[str, tuple[float, float]]:
        """By column, how much the loss rises if the column is shuffled among rows that did not train, and the standard
        error, as in the report. If all rows trained, the run that found the steps has them; {} without one."""
        gains = mapping_in(scores_of(self.folder.facts()), "gains")
        return {name: (own["increase"], own["error"]) for name, own in gains.items()}

    def summary(self) -> dict[str, Any]:
        """Returns one flat record of how the run went: what `hotrow train --json` prints."""
        return {**self.record.summary(), "run_dir": str(self.path)}

    @property
    def checkpoint(self) -> Path:
        """The checkpoint this run predicts with: the one it chose at its end, else its newest.

        If that one cannot be read, the newest that can is taken, with a warning that the run counts. Raises ValueError
        if there is none.
        """
        checkpoints = list_checkpoints(self.folder.checkpoints)
        lost = steps_without_manifest(self.folder.checkpoints)
        if not checkpoints:
            gone = f"; the manifest of step {lost[-1]} is missing, restore it" if lost else ""
            raise ValueError(f"run {self.path} has no checkpoint yet; let it train, or resume it{gone}")
        newest = max(checkpoints)
        wanted = max([newest, *lost]) if self.record.chosen_step is None else self.record.chosen_step
        if wanted not in checkpoints:
            gone = f"{self.path}: the checkpoint of step {wanted} is missing or has lost its manifest"
            text = f"{gone}; step {newest} is used"
            if not self._told_of_loss:
                self._told_of_loss = True
                warnings.warn(text, stacklevel=2)
                self.folder.warn("checkpoint_lost", text)
        return checkpoints.get(wanted, checkpoints[newest])

    def export(
        self,
        out: Path | str,
        *,
        since: Path | str | None = None,
        step: int | None = None,
        rows: RowFormat | None = None,
        onnx: bool = False,
        progress: ProgressCallback | None = None,
    ) -> dict[str, Any]:
        """Writes weights, vocabularies and rules to the new folder `out`, to score without hotrow; see docs/export.md.

        since: an earlier export; `out` is then a delta, which `hotrow.apply_delta` takes. step: the step of the
        checkpoint; if None, the checkpoint that this run predicts with. rows: how tables store their rows, "float32" if
        None. onnx: whether the network is written as ONNX too. In a delta, `rows` and `onnx` are those of `since`.
        Returns the contents of export.json, or delta.json, and `row_cost`: metrics of the rows that the run is judged
        by, with the table rows of the run and with the exported ones. Raises ValueError if there is no such checkpoint,
        `out` exists already, the disk has too little room, `since` is damaged or of another model, a row cannot be
        stored as `rows` says, or the network cannot be written as ONNX.
        """
        checkpoints = list_checkpoints(self.folder.checkpoints)
        if step is not None and step not in checkpoints:
            kept = ", ".join(map(str, checkpoints)) or "none"
            raise ValueError(f"run {self.path} has no checkpoint of step {step}; it keeps {kept}")
        checkpoint = self.checkpoint if step is None else checkpoints[step]
        vocabulary, seen = self.folder.encoder, seen_of(self.record)
        layers = [calibration.layer] if (calibration := self._calibration(checkpoint)) else []
        layers += [for_all_negatives(self.record.negatives_kept)] if self.record.negatives_kept else []
        cost_of = functools.partial(self._row_cost, None if step is None else checkpoint)

        def write(to: Whole) -> Description:
            return write_export(to, checkpoint, vocabulary, layers, seen, self._means(checkpoint), progress, cost_of)

        if since is None:
            return write_whole(out, write, rows=rows or "float32", onnx=onnx)
        if rows is not None or onnx:
            given = "onnx" if rows is None else "rows"
            raise ValueError(f"{given}: a delta stores rows as {since} does, and has its files: leave it out")
        return write_delta(since, out, write)

    def _row_cost(self, checkpoint: Path | None, form: RowFormat) -> dict[str, Any] | None:
        """Returns the metrics of the rows that the run is judged by, each with the run's table rows and with those in
        `form`; None, with a warning, if that fails. checkpoint: if None, the one that the run predicts with."""
        try:
            if (split := self.metrics.get("split")) is None:
                raise ValueError("the run has neither test nor validation rows")
            loaded = self._network if checkpoint is None else self._loaded(checkpoint)
            stored = loaded._replace(embedding=cast(Any, StoredLookups(loaded.embedding, form)))
            try:
                own, other = (self._judged(split, None, each)[2] for each in (loaded, stored))
            finally:
                if checkpoint is not None:
                    close_tiers(loaded.embedding, self.path)
        except ValueError as error:
            warnings.warn(f"what {form} rows cost was not measured: {str(error).partition(';')[0]}", stacklevel=3)
            return None
        names = [name for name in loaded.objective.measures if own[name] is not None]
        metrics = {name: {"run": own[name], "export": other[name]} for name in names}
        return {"split": split, "num_rows": own["num_rows"], "metrics": metrics}

    def _calibration(self, checkpoint: Path) -> Calibration | None:
        """Returns the calibration of the weights of a checkpoint; warns if the run has only one of other weights."""
        found = self.record.calibration
        if found is None or checkpoint.name == f"step-{found.step}":
            return found
        text = f"the scores of {checkpoint} are not calibrated: {found.method} was fitted to step {found.step}"
        warnings.warn(text, stacklevel=4)
        return None

    def _means(self, checkpoint: Path) -> Means | None:
        """The mean inputs of the weights of a checkpoint, if the run knows them."""
        found = self.record.means
        return found if found is not None and checkpoint.name == f"step-{found.step}" else None

    @cached_property
    def _network(self) -> _Loaded:
        return self._loaded(self.checkpoint)

    def _loaded(self, checkpoint: Path) -> _Loaded:
        """Returns the tables and layers that a checkpoint scores with."""
        config, _ = read_model(checkpoint, read_manifest(checkpoint), self._kept)
        setup = Setup.decide(_on_this_machine(config), self._kept, self.path, training=False)
        embedding, model = build_network(setup)
        load_checkpoint(checkpoint, {"embedding": embedding, "model": model})
        if (calibration := self._calibration(checkpoint)) is not None:
            calibration.follow(model)
        return _Loaded(embedding, model, setup.dense, for_labels(config.objective, self._labels))

    def close(self) -> None:
        """Frees the model and the vocabularies, and removes the files of tables that do not fit in memory."""
        self.__dict__.pop("_encoder", None)
        if (network := self.__dict__.pop("_network", None)) is not None:
            close_tiers(network.embedding, self.path)

    def predict(self, data: Any, *, strict: bool = False) -> NDArray[np.float32]:
        """Returns the score of each row of `data`, in its order: float32 [num_rows]; of L > 1 labels [num_rows, L].

        A score is what `model.objective` makes of the model's output: for clicks the probability of a positive label.
        data: raw rows with the columns that training had, as paths, globs, URIs or pipes; an Arrow-capable frame, a
        polars LazyFrame, a dict of columns or a list of dicts. Label and time are not read. Every row gets a score: ids
        that training never saw use row 0, as rare ids do; a value that is not an id or number of its column counts as
        missing, as in training. `seen` counts these by column, and a warning names what stands out.
        strict: refuse a value that is not of its column's kind. Raises ValueError if columns are missing, naming file
        and column, and RowError naming a line that cannot be cut into columns.
        """
        pieces = [*self.predict_batches(data, strict=strict)]
        none = np.empty((0, len(self._labels)) if len(self._labels) > 1 else 0, np.float32)
        return np.concatenate([none, *pieces])

    @cached_property
    def _labels(self) -> list[str]:
        """Names of the labels that the model was trained for."""
        return [label.name for label in self._kept.info.labels]

    @cached_property
    def _kept(self) -> PackedDataset:
        """The dataset.json, vocabularies and statistics that the run keeps."""
        return PackedDataset.open(self.folder.encoder)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder.load(self._kept)

    def predict_batches(self, data: Any, *, strict: bool = False) -> Iterator[NDArray[np.float32]]:
        """Yields what `predict` returns, piece by piece, in bounded memory."""
        return (scores for scores, *_ in self._scored(data, (), strict=strict))

    def _scored(
        self, data: Any, keep: Sequence[str], *, strict: bool, explain: int = 0
    ) -> Iterator[tuple[NDArray[np.float32], list[NDArray[Any]], pa.RecordBatch | None]]:
        """Yields scores, the texts of `explain` columns by label, and the columns to keep, piece by piece."""
        for outputs_B, batch, kept in self._outputs(data, labels="ignored", strict=strict, keep=keep):
            texts = self._explained(batch).most(explain) if explain else []
            yield self._network.objective.scores(outputs_B).cpu().numpy(), texts, kept

    def explain(self, data: Any, *, strict: bool = False) -> Explanation:
        """Returns what each raw column adds to the output of each row of `data`, before the link: log odds for clicks.

        With f as the model, that is f(x) - f(x with all inputs that are made from the column at their means over the
        rows that judged the run). For a linear f the sum over columns is f(x) - f(means), and f(means) is the `base`;
        otherwise a product of columns counts for each of them. A history that the model reads in order is replaced by
        an empty one. data, strict, errors: as for `predict`; also ValueError if the run does not have these means.
        """
        pieces = self._outputs(data, labels="ignored", strict=strict)
        return joined(self._explained(batch) for _, batch, _ in pieces)

    def _explained(self, batch: Batch) -> Explanation:
        embedding, model, *_ = self._network
        rows, means = look_up(model, embedding, batch.sparse), self._means(self.checkpoint)
        return explained(self._kept.info, model, means, self._output, batch.dense, rows)

    def _output(self, dense_BI: Tensor, rows: Any) -> Tensor:
        """The model's outputs, calibrated, for rows with all negatives."""
        outputs_B, share = self._network.dense.outputs(self._network.model, dense_BI, rows), self.record.negatives_kept
        return outputs_B if share is None else calibrated(outputs_B, **for_all_negatives(share))

    @torch.no_grad()
    def _outputs(
        self, data: Any, *, labels: Literal["ignored", "alone"], strict: bool, keep: Sequence[str] = ()
    ) -> Iterator[tuple[Tensor, Batch, pa.RecordBatch | None]]:
        """Yields outputs of raw rows, the rows, and their columns to keep, piece by piece. labels: "alone": labels and
        weights are read, but not times."""
        embedding, model, *_ = self._network
        options: dict[str, Any] = {"values": "strict" if strict else "any", "labels": labels, "keep": keep}
        first_row, seen = 0, seen_of(self.record)
        with _readable(data, strict=strict) as rows:
            for batch, kept in self._encoder.rows(rows, batch_size=EVAL_BATCH_SIZE, seen=seen, **options):
                try:
                    outputs_B = self._output(batch.dense, look_up(model, embedding, batch.sparse))
                except SampleError as error:
                    row = first_row + error.sample
                    raise ValueError(f"row {row:,} of the data, from 0: {error.feature} has {error.reason}") from None
                first_row += len(outputs_B)
                yield outputs_B, batch, kept
        self._tell_of(seen)

    def _tell_of(self, seen: Seen) -> None:
        """Keeps the counts of rows that were scored, and warns of what stands out."""
        self.seen, self._doubts = seen, {}
        for text in seen.warnings().values():
            warnings.warn(text, stacklevel=2)

    def told(self) -> dict[str, Any]:
        """Returns what is known about the rows scored last: `columns`, and `warnings` as in run.json."""
        if self.seen is None:
            return {}
        texts = {**self.seen.warnings(), **self._doubts}
        warned = {code: {"count": 1, "text": text} for code, text in texts.items()}
        return {"columns": self.seen.to_json(), "warnings": warned}

    def write_scores(
        self,
        data: Any,
        out: Path | str | BinaryIO,
        *,
        keep: Sequence[str] = (),
        explain: int = 0,
        strict: bool = False,
    ) -> int:
        """Writes `predict(data)` as column `score` of the file `out` (.parquet or .csv); returns the number of rows.

        If there are several labels, the columns are called `score_LABEL`. out: an open binary file gets CSV. keep:
        columns of `data` that are written before the score, unchanged. explain: how many columns, those that matter
        most to a row, are named in a column after the scores, `explanation` or `explanation_LABEL`, such as "price
        -0.31; city +0.22". strict: as for `predict`. The file appears when it is complete. Raises ValueError if it
        exists already or has another suffix, or if a column to keep is missing or has the name of a score; OSError
        naming the file if the disk is full.
        """
        how: dict[str, Any] = {"keep": keep, "explain": explain, "strict": strict}
        if not isinstance(out, str | Path):
            return self._write_scores(data, out, pyarrow.csv.CSVWriter, **how)
        out = Path(out)
        if out.suffix not in _SCORE_WRITERS:
            raise ValueError(f"scores file {out} ends in {out.suffix!r}; choose {' or '.join(_SCORE_WRITERS)}")
        if out.exists():
            raise ValueError(f"scores file {out} exists already; remove it or choose another name")
        if not out.parent.is_dir():
            raise ValueError(f"scores file {out}: there is no folder {out.parent}; make it or choose another")
        full = explain_full_disk(out.parent, "writing scores", "No scores are kept; the run is as it was.")
        with full, atomic_write(out) as file:
            return self._write_scores(data, file, _SCORE_WRITERS[out.suffix], **how)

    def _write_scores(
        self, data: Any, file: BinaryIO, make: Any, *, keep: Sequence[str], explain: int, strict: bool
    ) -> int:
        """Writes kept columns, scores and explanations to an open file, with the writer that `make` makes."""
        num_rows, names = 0, score_names(self._labels)
        told = [f"explanation{name.removeprefix(SCORE)}" for name in names] if explain else []
        for name in keep:
            if (is_ours := name in [*names, *told]) or [*keep].count(name) > 1:
                reason = "has the name of the scores" if is_ours else "is named twice; name it once"
                raise ValueError(f"column {name!r} to keep {reason}")
        pieces = self._scored(data, keep, strict=strict, explain=explain)
        first = next(pieces, None)
        kinds = pa.schema(dict.fromkeys(keep, pa.string())) if first is None or first[-1] is None else first[-1].schema
        nested = [own.name for own in kinds if pa.types.is_nested(own.type)]
        if nested and make is pyarrow.csv.CSVWriter:
            raise ValueError(f"column {nested[0]!r} to keep has lists, which CSV cannot hold; write a .parquet file")
        ours = [(name, pa.float32()) for name in names] + [(name, pa.string()) for name in told]
        schema = pa.schema([*kinds, *(pa.field(*own, nullable=False) for own in ours)])
        with make(file, schema) as writer:
            for scores, texts, kept in chain([] if first is None else [first], pieces):
                columns = [pa.array(np.ascontiguousarray(own)) for own in scores.reshape(len(scores), -1).T]
                before = [] if kept is None else kept.cast(kinds).columns
                columns += [pa.array(text, pa.string()) for text in texts]
                writer.write_batch(pa.record_batch([*before, *columns], schema=schema))
                num_rows += len(scores)
        return num_rows

    def evaluate_rows(self, data: Any, *, strict: bool = False) -> dict[str, Any]:
        """Returns the metrics of the run's model on raw rows with labels, which are read as for training.

        data, strict: as for `predict`; times are not read. `seen` counts what the rows hold, and warnings name what
        stands out. Raises ValueError naming the file, row and column of a wrong value.
        """
        if self._network.model.retrieves:
            raise ValueError(
                "this run finds items among those of training rows, which raw rows do not name: prepare the rows with "
                "the training rows, and pass --data FOLDER"
            )
        metrics, by = (objective := self._network.objective).metrics(), objective.by
        groups = None if by is None else Groups(self._kept.info, by)
        with _readable(data, strict=strict) as rows:
            for outputs_B, batch, _ in self._outputs(rows, labels="alone", strict=strict):
                by_B = None if groups is None else groups.of(batch)
                metrics.update(outputs_B, batch.label, batch.weight, by_B)
        if not metrics.num_rows:
            shown = str(data) if is_paths(data) else "the frame"
            raise ValueError(f"{shown} has no rows to judge the run by; give a file that has some")
        found = metrics.figures()
        self._doubt(found, "these rows")
        return found

    def _doubt(self, metrics: Mapping[str, Any], rows: str) -> None:
        """Warns of metrics that are worse than those of no model."""
        self._doubts = self._network.objective.doubts(metrics, rows)
        for text in self._doubts.values():
            warnings.warn(text, stacklevel=3)

    def evaluate(self, split: str = "test", *, data: Path | str | None = None) -> dict[str, Any]:
        """Returns the metrics of the run's model on a split of a packed dataset (default: the one it was trained on).

        Raises ValueError if `data` was prepared with other vocabularies: its row numbers would mean other ids.
        """
        rows, _, found = self._judged(split, data)
        self._tell_of(count_split(rows, seen_of(self.record)))
        self._doubt(found, f"the {split} split")
        return found

    def judged(self, split: str = "test", *, data: Path | str | None = None) -> Metrics:
        """Returns the model's outputs for the rows of a split, with labels and weights, and the metrics of these.

        data and errors: as for `evaluate`.
        """
        return self._judged(split, data)[1]

    def _judged(
        self, split: str, data: Path | str | None, loaded: _Loaded | None = None
    ) -> tuple[Split, Metrics, dict[str, Any]]:
        """Returns the rows of a split, their outputs and labels, and the metrics of these. loaded: scores them; if
        None, what the run predicts with."""
        for given in (split, data):
            if not isinstance(given, str | Path | None):
                raise ValueError(
                    "evaluate and judged take the name of a split, such as 'test', and as data the folder of a packed "
                    f"dataset, but {type(given).__name__} was given; raw rows go to evaluate_rows"
                )
        dataset = PackedDataset.open(self._dataset_path() if data is None else data)
        own = self._kept
        for table in dataset.info.tables:
            mine = own.info.table_by_name.get(table.name)
            if mine is None or (mine.vocabulary, mine.num_embeddings) != (table.vocabulary, table.num_embeddings):
                raise ValueError(
                    f"{dataset.path}: table {table.name!r} has another vocabulary than run {self.path} has; "
                    "score its raw rows instead (`hotrow eval RUN ROWS` or `hotrow predict`)"
                )
        embedding, model, dense, objective = loaded or self._network
        rows, judged = dataset.split(split), objective.metrics()
        items = Items.of(dataset, model.item_features) if model.retrieves else None
        return rows, judged, evaluate(embedding, model, rows, objective, dense=dense, metrics=judged, items=items)

    def _dataset_path(self) -> Path:
        path = None if self.record.dataset is None else Path(self.record.dataset["path"])
        if path is None or not is_taken(path / MANIFEST):
            what = "no dataset yet" if path is None else f"the dataset {path}, and none is there"
            raise ValueError(f"{self.path / RUN} names {what}; pass another: --data FOLDER")
        return path

    def closing_lines(self, rows: str, next_commands: Sequence[str]) -> str:
        """Returns what a user reads after training: quality, speed, memory, where the run is, and what to do next."""
        record, metrics = self.record, self.metrics
        memory: Any = record.memory
        if record.status != "finished":
            return f"the run {self.path} is {record.status}; continue with: {resume_command(self.path)}"
        assert record.backend is not None, "RunFolder.open refuses a finished run without it"
        lines = [f"{rows}, not scored: there are no validation or test rows"]
        if metrics:
            lines = [
                f"{rows}, scored on {metrics['num_rows']:,} rows of the {metrics['split']} split:",
                *(f"  {line}" for line in record.trained_for.lines(metrics)),
                *(f"  {line}" for line in (record.rivals.lines if record.rivals else ())),
            ]
        lines += [
            f"  speed    {record.samples_per_s:,.0f} samples/s, {record.backend['name']} kernels "
            f"({record.backend['isa']}, {num_of(record.backend['threads'], 'thread')})",
            f"  weights  of step {record.chosen_step:,} of {record.steps:,}",
        ]
        if record.parent is not None:
            lines.append(f"  from     step {record.parent.step:,} of {record.parent.path}")
            if (before := record.parent.metrics) is not None:
                lines.append(f"           its weights on these training rows: {record.trained_for.line(before)}")
        if record.step_ms is not None:
            shown_ms = ", ".join(f"{phase} {ms:.3g}" for phase, ms in record.step_ms.items())
            lines.append(f"  step     {sum(record.step_ms.values()):.3g} ms: {shown_ms}{off_by(record)}")
        if record.ranks is not None:
            lines.append(f"  wire     {_wire_line(record.ranks)}")
        if record.calibration is not None:
            lines.append(f"  scores   {record.calibration.line()}")
        if memory is not None and "dram_bytes" in memory:
            lines += [
                f"  memory   {size(memory['dram_bytes'])} of DRAM, {size(memory['disk_bytes'])} on disk: "
                f"{memory['hits_per_lookup'] or 0:.1%} of lookups",
                f"           found their row in DRAM, waiting took {memory['stall_share']:.1%} of the time",
            ]
        if (self.path / REPORT).is_file():
            lines.append(f"  report   {self.path / REPORT}")
        return "\n".join([*lines, f"  run      {self.path}", "next:", *(f"  {command}" for command in next_commands)])

    def next_commands(self, rows: str = "NEW_ROWS") -> list[str]:
        """Returns commands that score, judge, export and continue the run. rows: the raw rows to name, quoted."""
        return list(self.folder.commands(rows).values())

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.record.status})"


def _flat_numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the words of a line of metrics.jsonl, and its numbers by dotted name, all but the step as floats."""
    flat = {name: value for name, value in line.items() if name in ("kind", "step", "split")}
    for name, value in line.items():
        for inner, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(number, int | float) and name != "step":
                flat[f"{name}.{inner}" if inner else name] = float(number)
    return flat


def _wire_line(ranks: Mapping[str, Any]) -> str:
    """Returns what a rank sent in a step, and how long its exchanges took."""
    sent = sum(ranks["wire_bytes_per_step"].values())
    exchange_ms = fmean(own["exchange_ms"] for own in ranks["of_ranks"])
    return f"{size(sent)} a step and rank, {exchange_ms:.3g} ms of it in exchanges"


def _on_this_machine(config: Config) -> Config:
    """Returns `config`, or the same model on the CPU if the device is missing: scores agree within docs/numerics.md."""
    try:
        DenseDevice.of(config)
        return config
    except ValueError as error:
        warnings.warn(f"scores are computed on the CPU, in float32: {error}", stacklevel=3)
    train = config.train.model_copy(update={"dense_dtype": "fp32"})
    memory = config.memory if isinstance(config.memory, str) else config.memory.model_copy(update={"hbm": None})
    return config.model_copy(update={"device": "cpu", "train": train, "memory": memory})


def load(path: Path | str) -> Run:
    """Opens the run in the folder `path`. Raises ValueError if it is not a run."""
    return Run(path)


@with_read_options
def fit(
    data: Any,
    *,
    read: ReadOptions,
    schema: Schema | Path | str | Mapping[str, Any] | None = None,
    split: str | Mapping[str, Any] | None = None,
    config: Path | str | Mapping[str, Any] | None = None,
    model: str | None = None,
    run: Path | str | None = None,
    refit: bool = True,
    choice: bool = True,
    rivals: bool = False,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Prepares `data` if it is raw, trains a model on it, and returns the run.

    data: a packed dataset's folder; paths, globs, URIs or pipes of raw files (docs/prepare.md); an Arrow-capable frame
        (pandas, polars, duckdb, pyarrow), a polars LazyFrame, a dict of columns or a list of dicts. Raw data is packed
        into the run's folder, under data/; if that is interrupted, the same call continues in the same folder.
    {read}
    Whatever you leave out is guessed, and the guess is shown. With a time, the last rows are the test split.
    schema: a schema (docs/prepare.md) instead of a guess: a path, its content or a `Schema`.
    split: "time", "random" or "reference", or a mapping as in a schema, such as
        {"kind": "random", "fractions": [0.6, 0.2, 0.2], "seed": 1}.
    config: a recipe to train by, as a path or its content, instead of the one for this many rows (config/recipe.py).
    model: a name in docs/config.md, such as "dcn"; default "dlrm". run: the run's folder (default: the next
        runs/NAME-MODEL-NNN).
    refit: whether raw data that is split by time or at random is trained on twice. The first run, in RUN/selection,
        leaves the validation rows out and finds the last step at which they were scored best, within noise. The second
        run, in RUN, starts anew and trains on them too, with more steps in proportion to its rows. If False, or if
        there are no validation rows, there is one run.
    choice: whether several such first runs choose, by their validation rows, which statistics of the label are inputs
        and for how many epochs to train (docs/runs.md). If False, all statistics in the guessed schema are inputs.
        Nothing is chosen without `refit`, or if a schema, a recipe or the number of steps is given.
    rivals: whether to train a logistic regression and LightGBM on the same rows afterwards, to compare them with the
        model in `record.rivals` and the report (hotrow/rivals.py); needs pip install 'hotrow[rivals]'.
    overrides: config options, by their last name if only one option has it (`epochs=3`) or in full
        (`**{"optimizer.dense.lr": 0.1}`). The run's config.yaml has all options as they were used.

    Under torchrun or mpiexec, or inside a process group of torch.distributed, all processes call it and train together
    on a packed dataset, in a folder that all of them can read; the first one writes it.

    Ctrl-C saves the run and returns it with the status "interrupted"; during preparation it raises `Interrupted`
    (hotrow.data.prepare.pipeline). Raises ValueError if the data or an option is wrong.
    """
    changes = [f"{_option(name)}={_as_yaml(name, value)}" for name, value in overrides.items()]
    from_run = overrides_of(changes).get("from_run")
    recipe = recipe_of(config_of(from_run) if config is None and from_run is not None else config)
    named = {"model.name": model, "model.objective": read.objective}
    given = [f"{name}={_as_yaml(name, value)}" for name, value in named.items() if value is not None]
    changes = [*given, *changes]
    if recipe is not None:
        recipe = with_model(recipe, overrides_of(changes).get("model.name"))
    # Options are checked before hours of work.
    checked = make_config(apply_overrides({"data": ""} | (recipe or {}), changes), origin="fit")
    model = checked.model.name
    packed = isinstance(data, str | Path) and is_taken(Path(data) / MANIFEST)
    if from_run is not None and not packed:
        raise ValueError(
            f"from_run is {from_run!r}, whose weights belong to the row numbers of its data: pass a packed dataset "
            "that hotrow prepare --base has made of the raw data"
        )
    read = replace(read, objective=checked.model.objective)
    told = [
        *(name for name in read.given if name != "objective"),
        *(name for name, value in (("schema", schema), ("split", split)) if value),
    ]
    if packed and told:
        raise ValueError(f"{told[0]} is for raw data, but {data} is a packed dataset; leave it out")
    schema, changed = _schema(schema, read), _split_options(split)
    parts = check_options(**changed)
    name, asked = f"{_name_of(data)}-{model}", Asked(recipe, changes, quiet=quiet)
    with joined_ranks() as comm:
        stopped = None if packed or not isinstance(run, str | Path) or not is_taken(Path(run) / CONFIG) else Path(run)
        on_every_rank(comm, lambda: None if stopped else check_free(run))
        if packed:
            dataset = on_every_rank(comm, lambda: PackedDataset.open(data))
            folder = make_folder(comm, lambda: RunFolder.create(run, name=name))
            quiet = quiet or comm.rank > 0
            decided = replace(asked, quiet=quiet).config(folder, dataset)
            trained = Run(train(decided, folder=folder, quiet=quiet, comm=comm).path)
            return _beside(trained, rivals=rivals and not comm.rank, quiet=quiet)
        if comm.size > 1:
            raise ValueError(
                f"training with {comm.size} processes needs a packed dataset: run hotrow prepare on {_name_of(data)} "
                "in one process, then pass the folder that it writes as data"
            )
    with ExitStack() as spool:
        rows = spool.enter_context(_readable(data, Path("runs") if run is None else Path(run).parent, strict=True))
        source: dict[str, Any] = {"schema": schema, "split": parts, **vars(read)}
        with nullcontext() if quiet else progress_bar() as progress:
            opened = open_source("auto" if is_paths(data) else "frame", rows, progress=progress, **source)
        if schema is None and not opened.schema.statistics:  # a published layout, whose schema is as published
            opened = replace(opened, schema=opened.schema.with_defaults())
        opened = opened.with_options(**changed)
        if stopped is not None:
            raw, record = read_config(stopped / CONFIG), RunFolder.open(stopped).record
            same = make_config(apply_overrides(raw, changes), origin="fit") == make_config(raw, origin="fit")
            if not same or record.status == "finished" or record.preparation != fingerprint(opened):
                check_free(run)  # which says that another run is there
            return _beside(Run(resume(stopped, quiet=quiet).path), rivals=rivals, quiet=quiet)
        with RunFolder.begin(run, name=name, preparation=fingerprint(opened)) as folder:
            with folder:
                if refit and can_refit(opened, checked):
                    is_free = choice and schema is None
                    selection = Selection(folder, opened, asked, checked, choice=is_free)
                    with closing(selection.runs()) as found:
                        for jobs in found:
                            for own, decided, is_quiet in trained_beside(jobs):
                                if train(decided, folder=own, quiet=is_quiet).record.status != "finished":
                                    break
                    if selection.run.record.status != "finished":
                        folder.update(status=selection.run.record.status)
                        return Run(selection.run.path)
                    opened, asked = with_validation_rows(selection, quiet=quiet)
                    asked.announce(folder, selection_line(selection.run, asked.given))
            decided = asked.config(folder, asked.packed(folder, opened, rows=folder.path / ROWS))
            remove(folder.path / ROWS, within=folder.path)
            spool.close()  # training reads packed rows alone
            return _beside(Run(train(decided, folder=folder, quiet=quiet).path), rivals=rivals, quiet=quiet)


def _beside(run: Run, *, rivals: bool, quiet: bool) -> Run:
    """Records the metrics of rivals on the run's rows, if they are wanted and the run was judged."""
    if rivals and run.metrics and run.record.status == "finished":
        data, judged = PackedDataset.open(run._dataset_path()), run.judged(run.metrics["split"])
        run.close()
        say = functools.partial(Asked(None, (), quiet=quiet).announce, run.folder)
        run.folder.update(rivals=compare_rivals(run.folder, data, judged, say))
        run.folder.report()
    return run


def _schema(schema: Any, read: ReadOptions) -> Schema | None:
    """Returns `schema`, read if it is a path or content. Raises ValueError if hints for a guess are given too."""
    if schema is None:
        return None
    if read.hints:
        raise ValueError(f"{read.hints[0]} is a hint for guessing a schema, but a schema is given; say it there")
    if isinstance(schema, Mapping):
        return parse_schema(dict(schema), where="schema")
    if not isinstance(schema, Schema | str | Path):
        raise ValueError(f"schema is {reprlib.repr(schema)}; pass the path of a YAML file, or its content as a dict")
    return schema if isinstance(schema, Schema) else load_schema(schema)


def _split_options(split: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the options of a split, as `OpenedSource.with_options` takes them."""
    if not (split is None or isinstance(split, str | Mapping)):
        raise ValueError(f"split is {reprlib.repr(split)}; give time, random or reference, or a dict with fractions")
    given = {"kind": split} if split is None or isinstance(split, str) else dict(split)
    if unknown := [name for name in given if name not in ("kind", "fractions", "seed")]:
        raise ValueError(f"split has {unknown[0]!r}; it may have kind, fractions and seed")
    return {"split": given.pop("kind", None), **given}


def _readable(data: Any, folder: Path | None = None, *, strict: bool) -> AbstractContextManager[Any]:
    """Returns paths, with a file for each pipe, or a frame, columns or rows as an Arrow table.

    folder: holds the files of pipes until the end. If None, it is the folder for temporary files. Raises ValueError if
    a path is a packed dataset, whose files could be read as rows too, but hold row numbers where raw rows have ids.
    """
    for path in data if isinstance(data, list | tuple) and is_paths(data) else [data]:
        if isinstance(path, str | Path) and is_taken(Path(path) / MANIFEST):
            raise ValueError(
                f"{path} is a packed dataset, which has no raw rows: pass the rows that it was made of, or judge a run "
                f"by it with hotrow eval RUN --data {path}"
            )
    rows = data if is_paths(data) else frame_to_arrow(data, values="strict" if strict else "any")
    return spooled(rows, folder or Path(tempfile.gettempdir()))


def _as_yaml(name: str, value: Any) -> str:
    """Returns an option's value as JSON, which is YAML. Raises ValueError if it is not a number, a text or a list."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(
            f"option {name} is {value!r}; give a number, a text, true or false, or a list of them"
        ) from None


def _option(name: str) -> str:
    """Returns the dotted path of the option `name`: a full path, or a last part that only one option has."""
    paths = list(options())
    found = [path for path in paths if name in (path, path.rpartition(".")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"option {name!r} may mean {' or '.join(found)}; give one in full: **{{{found[0]!r}: ...}}")
    known = [*NAMES, *paths, *(path.rpartition(".")[2] for path in paths)]
    raise ValueError(f"unknown option {name!r}{nearest(name, known) or '; see docs/config.md'}")


def _name_of(data: Any) -> str:
    """Returns the name for a run on `data`: the name of its file or folder, up to the first dot or star."""
    first = data[0] if isinstance(data, list | tuple) and data else data
    if not isinstance(first, str | Path):
        return "frame"
    parts = [re.split(r"[.*?\[]", part)[0] for part in str(first).rstrip("/").split("/")]
    return next((part for part in reversed(parts) if part), "data")
