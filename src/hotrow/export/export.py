"""A run for other frameworks: a folder of weights, vocabularies and rules by which anyone can score raw rows.

    clicks-export/
      export.json                    format version, model, dense transforms, features, tables, size and crc32 of files
      model.safetensors              dense parameters, by their state_dict names
      tables/<table>.safetensors     `<table>.weight` [num_embeddings, embedding_dim], as lookups read it (rows.py)
      encoder/                       what makes inputs of raw rows, as in a dataset and a run (docs/format.md)
      model.py                       the network, in plain torch
      dense.onnx                     if asked for: the network, in ONNX (dense.py)
      transforms/<name>.py           the transforms that compute inputs from raw values
      score.py  inputs.py  cells.py  seen.py  README.md   raw rows -> scores, without hotrow; how to use it

It is made from a checkpoint and the vocabularies beside it, all in pieces: memory does not grow with tables or
vocabularies. The folder appears when it is complete, and follows the umask, since it is made to be given away.
docs/export.md is its specification. score.py here, cells.py, seen.py and the transforms in data/ are copied as they
are, README.md is made of guide.md, and model.py is plain.py followed by the model's own file and by the `scores` of its
objective. delta.py beside this file writes what changed since an earlier export.
"""

from __future__ import annotations

import ast
import errno
import inspect
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from stat import S_IMODE
from typing import Any, cast

import torch
from pydantic import JsonValue
from pydantic.dataclasses import dataclass as record
from torch import Tensor

from hotrow.base.door import check_folder, check_real, is_taken, is_there, open_file
from hotrow.base.files import (
    LOCK,
    PARTIAL_SUFFIX,
    atomic_write,
    check_name,
    check_room,
    claim,
    explain_full_disk,
    file_name,
    remove_unheld,
    sync_folder,
)
from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.base.records import STRICT, Count, Document, short
from hotrow.base.version import __version__
from hotrow.config.schema import Config
from hotrow.data import cells
from hotrow.data.cells import PLAIN, Written, is_plain
from hotrow.data.packed.format import MANIFEST, STATISTICS, DatasetInfo, DenseColumn, Feature, Table, write_info
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.prepare.prepare import RawRows, raw_rows
from hotrow.data.prepare.statistics import share_to_score
from hotrow.data.seen import Seen
from hotrow.data.sources.schema import Schema
from hotrow.data.transforms import Transform, source_of
from hotrow.export.dense import DENSE, check_packages, write_dense
from hotrow.export.rows import FORMATS, RowFormat, StoredRows
from hotrow.export.score import STORED
from hotrow.kernels import ops
from hotrow.models import MODELS
from hotrow.models.spec import ModelSpec
from hotrow.objectives.calibration import calibrated
from hotrow.objectives.objective import Objective
from hotrow.run.build import read_model
from hotrow.run.checkpoint import verify
from hotrow.run.checkpoint_files import (
    CURE,
    Chain,
    FileRecord,
    Manifest,
    Pieces,
    crc32,
    open_tensors,
    read_manifest,
    write_tensors,
)
from hotrow.run.checkpoint_rows import ROWS, check_chain
from hotrow.run.record import Extra, Means, read_extra
from hotrow.tables import TableConfig

FORMAT_VERSION = 1
EXPORT, WEIGHTS, NETWORK, README = "export.json", "model.safetensors", "model.py", "README.md"
SCORE, INPUTS, SEEN, CELLS = "score.py", "inputs.py", "seen.py", "cells.py"
CHAIN, ENCODER = "chain.json", "encoder"
FOLDERS = ("tables", "transforms", ENCODER, f"{ENCODER}/vocab", f"{ENCODER}/statistics")
_OWN_FILES = (EXPORT, WEIGHTS, NETWORK, DENSE, SCORE, INPUTS, SEEN, CELLS, README, CHAIN)
OWN_NAMES = (*_OWN_FILES, *FOLDERS)
"""What an interrupted export may have left. export.json is written last and makes the export complete."""
ALIGNMENT = 4096
"""The rows of a table begin at a multiple of this in its file: a page, so that a table that grows stays in place."""
_WITHOUT_VALUE = 0.0
"""The value of a missing dense input, after the transform."""


@record(frozen=True, config=STRICT)
class Description:
    """The content of export.json; docs/export.md is its specification."""

    created_by: str
    run: str
    step: Count
    dataset: dict[str, JsonValue]
    model: dict[str, JsonValue]
    dense: tuple[dict[str, JsonValue], ...]
    features: tuple[dict[str, JsonValue], ...]
    tables: tuple[dict[str, JsonValue], ...]
    files: dict[str, FileRecord]
    """All files except export.json itself."""
    missing: tuple[str, ...] = ()
    """Texts that mean a missing value in every column."""
    transforms: tuple[dict[str, JsonValue], ...] = ()
    """Columns that are computed from others, in the order in which they are computed."""
    at_serving: dict[str, JsonValue] = field(default_factory=dict)
    """What a raw column counts as in all rows."""
    statistics: tuple[dict[str, JsonValue], ...] = ()
    """The features whose label statistics are inputs, after the dense columns, and their priors."""
    calibration: tuple[dict[str, JsonValue], ...] = ()
    """The arguments of model.py's `calibrated`, for each time it is applied to the network's outputs."""
    labels: tuple[str, ...] = ()
    """The labels that a row's scores predict, in order."""
    usual: dict[str, JsonValue] | None = None
    """What the validation rows held by column, to compare rows with; None if the run does not know."""
    means: Means | None = None
    """Of the inputs, to explain scores by; None if the run has none of these weights."""
    row_cost: dict[str, JsonValue] | None = None
    """Metrics with the run's own rows and with those stored here; None if these are float32, or it was not measured."""

    def __post_init__(self) -> None:
        forms = [table.get("stored_as") for table in self.tables]
        if any(form not in FORMATS or form != forms[0] for form in forms):
            raise ValueError(f"tables: stored_as is {short(forms)}; it must be one of {', '.join(FORMATS)} in all")
        for file in self.files:
            for component in file.split("/"):
                check_name(component, what=f"files: file name in {file!r}")

    @property
    def form(self) -> RowFormat:
        """How rows are stored."""
        return cast(RowFormat, self.tables[0]["stored_as"] if self.tables else "float32")


DOCUMENT = Document(Description, marks={"hotrow_export": FORMAT_VERSION}, cure="export the run again")


def write_whole(
    out: Path | str, write: Callable[[Whole], Description], *, rows: RowFormat, onnx: bool = False
) -> dict[str, Any]:
    """Writes the folder `out` by `write`, with rows stored as `rows` says; returns the content of export.json.

    Raises ValueError if `out` exists or cannot be made, if the disk has too little room, or if a file is damaged, which
    it names; OSError if the disk becomes full.
    """
    if rows not in FORMATS:
        raise ValueError(f"rows is {rows!r}; it must be one of {', '.join(FORMATS)}")
    with becoming(Path(out), "export", OWN_NAMES, FOLDERS, doing=f"exporting to {out}") as partial:
        description = write(Whole(partial, rows, onnx=onnx))
    return {**DOCUMENT.marks, **asdict(description)}


class Whole:
    """Writes the tables and vocabularies of an export into files of `folder`. form: how rows are stored. onnx: whether
    the network is there as ONNX too."""

    def __init__(self, folder: Path, form: RowFormat = "float32", *, onnx: bool = False) -> None:
        self.folder, self.form, self.onnx = folder, form, onnx

    def begin(self, description: Description, num_bytes: int) -> None:
        """Raises ValueError if the export that is described, with `num_bytes` of rows, cannot be written."""
        check_room(self.folder, num_bytes, what="export", cure="choose another")

    def table(self, name: str, tensor: str, rows: Pieces) -> FileRecord:
        """Writes a table as file `name`; returns size and checksum of the file."""
        return write_tensors(self.folder / name, {tensor: rows}, alignment=ALIGNMENT)

    def vocabulary(self, name: str, own: Vocabulary) -> FileRecord:
        """Writes a vocabulary as file `name`; returns size and checksum of the file."""
        copy_file(own.path, self.folder / name)
        return file_record(self.folder / name)


def write_export(
    to: Whole,
    checkpoint: Path,
    vocabulary: Path,
    calibration: Sequence[dict[str, Any]],
    seen: Seen | None,
    means: Means | None,
    progress: ProgressCallback | None,
    cost_of: Callable[[RowFormat], dict[str, Any] | None],
) -> Description:
    """Writes the files of an export from `checkpoint` and from the run's encoder in the folder `vocabulary`,
    export.json last; returns its content.

    calibration: the arguments of `calibrated` for each layer of calibration that follows the network. seen: knows what
    is usual in rows to score; if None, nothing is known. means: of these weights, if they are known. cost_of: returns
    the `row_cost` of a format of rows that is not float32. Every file is verified before it is read.
    """
    if to.onnx:
        check_packages()
    manifest, kept = read_manifest(checkpoint), PackedDataset.open(vocabulary)
    wanted = {name: record for name, record in manifest.files.items() if name.startswith((f"{PART}/", WEIGHTS))}
    verify(checkpoint, replace(manifest, files=wanted))
    config, tables = read_model(checkpoint, manifest, kept)
    description = _describe(checkpoint, read_extra(checkpoint, manifest), config, kept, tables, seen, to.form)
    dtype, more = STORED[to.form]
    to.begin(description, sum(dtype.itemsize * t.num_embeddings * (t.embedding_dim + more) for t in tables))
    description = replace(description, calibration=tuple(calibration), means=means)
    files = _write_guide(to.folder, description.run, config.model)
    files |= _write_network(to, checkpoint, description)
    files |= _write_tables(to, checkpoint, manifest, tables, progress)
    files |= _write_encoder(to, kept, progress)
    files |= _write_transforms(to.folder, kept)
    description = replace(description, files=files, row_cost=None if to.form == "float32" else cost_of(to.form))
    DOCUMENT.write(to.folder / EXPORT, description)
    return description


@contextmanager
def _readable() -> Iterator[None]:
    """Raises ValueError, with the cure, for a file or folder that the system does not let this user read."""
    try:
        yield
    except PermissionError as error:
        raise ValueError(
            f"{error.filename} may not be read by this user: let its owner make the whole folder readable, as by "
            "`chmod -R a+rX`, or run this as its owner"
        ) from None


@_readable()
def verify_export(path: Path, *, unread: tuple[str, ...] = ()) -> int:
    """Compares every file of the export with its size and crc32; returns their bytes. unread: see `verify_files`.

    Raises ValueError naming the first file that is missing or may not be read, or whose size or checksum differs.
    """
    check_folder(path, files=_OWN_FILES, folders=FOLDERS)
    with suppress(NotADirectoryError):
        is_there(path / EXPORT)  # a folder that may not be read looks empty
    if not is_taken(path / EXPORT):
        raise ValueError(f"{path} has no {EXPORT}: export the run again")
    files = DOCUMENT.read(path / EXPORT).files
    return verify_files(path, files, said_by=EXPORT, cure="export the run again", unread=unread)


@_readable()
def verify_files(
    path: Path, files: Mapping[str, FileRecord], *, said_by: str, cure: str, unread: tuple[str, ...] = ()
) -> int:
    """Compares files in the folder `path` with their sizes and checksums; returns their bytes.

    unread: beginnings of names of files whose size alone is compared. Raises ValueError naming the first that is
    missing or may not be read, or that differs from what the file `said_by` says.
    """
    for name, wanted in files.items():
        file = path / name
        if not is_there(file, within=path) or (
            file.stat().st_size != wanted.num_bytes if name.startswith(unread) else file_record(file) != wanted
        ):
            raise ValueError(f"{file} is missing, cut off or altered: {said_by} says otherwise; {cure}")
    return sum(record.num_bytes for record in files.values())


@contextmanager
def becoming(out: Path, what: str, own: Collection[str], folders: Sequence[str], *, doing: str) -> Iterator[Path]:
    """Yields a folder with empty `folders`, which becomes `out` when the block ends, or is removed if the block raises.

    own: the names that an interrupted block may have left. what: names `out` in errors. Raises ValueError if `out`
    exists or cannot be made, if another process makes it, or if its place holds other files; OSError, which says
    `doing`, if the disk is full.
    """
    partial = _free_place(out, what, own)
    with explain_full_disk(out.absolute().parent, doing, f"Nothing of the {what} is kept."), ExitStack() as stack:
        _make(partial, out, what, folders, stack)
        try:
            yield partial
            _give_away(partial)
            for folder in (partial / name for name in folders):
                sync_folder(folder)
            (partial / LOCK).unlink(missing_ok=True)
            partial.rename(out)
            sync_folder(out.absolute().parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _give_away(folder: Path) -> None:
    """Gives what is in `folder` its own mode, which is what the umask left of it when it was made. A file that lies in
    another folder too has one already."""
    mode = S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        if path.is_dir() or path.stat().st_nlink == 1:
            path.chmod(mode if path.is_dir() else mode & 0o666)


def _free_place(out: Path, what: str, own: Collection[str]) -> Path:
    """Returns where a folder is made before it becomes `out`. Raises ValueError if either place is taken."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"{what} folder {out} exists already; remove it or choose another name")
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    names = {path.name.removesuffix(PARTIAL_SUFFIX) for path in partial.iterdir()} if partial.is_dir() else set()
    if (partial.exists() and not partial.is_dir()) or not names <= {*own, LOCK}:
        raise ValueError(f"{partial}, where the {what} would be made, holds other files; move it or choose another out")
    return partial


def _make(partial: Path, out: Path, what: str, folders: Sequence[str], stack: ExitStack) -> None:
    """Makes the folder anew, and claims it until `stack` closes."""
    try:
        check_real(partial)
        is_free = remove_unheld(partial)
        if is_free:
            partial.mkdir()
        if not is_free or stack.enter_context(claim(partial)) is False or is_taken(out):
            raise ValueError(f"another process makes {what} folder {out}: wait until it has ended")
        for folder in (partial / name for name in folders):
            folder.mkdir()
    except FileNotFoundError:
        raise ValueError(f"{what} folder {out}: there is no folder {out.parent}; make it or choose another") from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{what} folder {out} cannot be made: {reason}; choose another place") from None


def _write_network(to: Whole, checkpoint: Path, description: Description) -> dict[str, FileRecord]:
    """Writes the dense parameters, and if asked for the network as ONNX; returns sizes and checksums by file."""
    with open_tensors(checkpoint / WEIGHTS) as file:
        dense = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a mapping
    ops.flush_denormals(dense.values())
    files = {WEIGHTS: write_tensors(to.folder / WEIGHTS, dense)}
    if to.onnx:
        network, weights = to.folder / NETWORK, to.folder / WEIGHTS
        write_dense(to.folder / DENSE, asdict(description), network=network, weights=weights)
        files[DENSE] = file_record(to.folder / DENSE)
    return files


def _write_tables(
    to: Whole,
    checkpoint: Path,
    manifest: Manifest,
    tables: Sequence[TableConfig],
    progress: ProgressCallback | None,
) -> dict[str, FileRecord]:
    """Writes all tables; returns sizes and checksums by file."""
    counted = _Counted(progress, "tables", sum(table.num_embeddings for table in tables))
    files = {}
    for table in tables:
        name = f"tables/{file_name(table.name)}.safetensors"
        rows: Pieces = LookedUpRows(checkpoint, manifest, table, done=counted)
        rows = rows if to.form == "float32" else StoredRows(rows, to.form, table.name)
        files[name] = to.table(name, f"{table.name}.weight", rows)
    return files


def _write_encoder(to: Whole, kept: PackedDataset, progress: ProgressCallback | None) -> dict[str, FileRecord]:
    """Writes the dataset's encoder without what it says of the rows that it was made of, such as names of files;
    returns sizes and checksums by file. Nothing if rows hold row numbers."""
    tables = [table for table in kept.info.tables if _has_vocabulary(kept, table)]
    if not tables:
        return {}
    counted = _Counted(progress, "keys", sum(table.num_keys for table in tables))
    files = {}
    for table in tables:
        kept.vocabulary(table.name)  # raises if it is not the one that dataset.json names
        own = Vocabulary.open(kept.vocabulary_path(table.name))
        files[table.vocabulary_file] = to.vocabulary(f"{ENCODER}/{table.vocabulary_file}", own)
        counted(table.num_keys)
    if STATISTICS in kept.info.files:
        copy_file(kept.statistics_path(), to.folder / ENCODER / STATISTICS)
        files[STATISTICS] = file_record(to.folder / ENCODER / STATISTICS)
    records = {name: kept.info.files[name] for name in files}
    write_info(to.folder / ENCODER, replace(kept.info, splits={}, sources=(), summary={}, files=records))
    files[MANIFEST] = file_record(to.folder / ENCODER / MANIFEST)
    return {f"{ENCODER}/{name}": record for name, record in files.items()}


def _write_guide(folder: Path, name: str, model: ModelSpec) -> dict[str, FileRecord]:
    """Writes model.py, score.py, inputs.py, seen.py, cells.py and README.md; returns their sizes and checksums."""
    guide = Path(__file__).with_name("guide.md").read_text("utf-8")
    texts = {
        NETWORK: network_source(model.name, model.trained_for),
        **{name: Path(__file__).with_name(name).read_text("utf-8") for name in (SCORE, INPUTS)},
        SEEN: inspect.getsource(sys.modules[Seen.__module__]),
        CELLS: inspect.getsource(cells),
        README: guide.format(name=name, model=model.name.upper(), version=__version__, score=model.trained_for.score),
    }
    return _write_texts(folder, texts)


def _write_transforms(folder: Path, kept: PackedDataset) -> dict[str, FileRecord]:
    """Writes the files of the transforms that inputs are made by; returns their sizes and checksums."""
    made = raw_rows(kept)
    used = [_transform(column) for column in kept.info.dense]
    if made is not None:
        used += [transform for transform, _ in made.schema.computed.values()]
        used += [cut for cut in (feature.cut() for feature in made.schema.categorical) if cut is not None]
        used += [Transform("cross")] if made.schema.statistics else []
    names = {transform.name for transform in used}
    return _write_texts(folder, {f"transforms/{name}.py": source_of(name) for name in sorted(names)})


def _write_texts(folder: Path, texts: Mapping[str, str]) -> dict[str, FileRecord]:
    for name, text in texts.items():
        with atomic_write(folder / name) as file:
            file.write(text.encode())
    return {name: file_record(folder / name) for name in texts}


def network_source(model: str, objective: Objective) -> str:
    """Returns model.py: plain.py, then the file of the model without the imports that plain.py replaces, and the
    functions that calibrate its outputs and make scores of them."""
    text = inspect.getsource(sys.modules[MODELS[model].__module__])
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("hotrow", "__future__"):
            for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[line] = ""
    plain = Path(__file__).with_name("plain.py").read_text("utf-8")
    scores = inspect.cleandoc(inspect.getsource(objective.scores)).removeprefix("@staticmethod\n")
    return "\n\n".join([plain, "".join(lines), inspect.getsource(calibrated), scores + "\n"])


def copy_file(source: Path, target: Path) -> None:
    """Copies a file, whole or not at all."""
    with open_file(source) as file, atomic_write(target) as copy:
        shutil.copyfileobj(file, copy, 1 << 20)


def file_record(path: Path) -> FileRecord:
    """Returns size and checksum of a file."""
    return FileRecord(path.stat().st_size, crc32(path))


def _describe(
    checkpoint: Path,
    extra: Extra,
    config: Config,
    kept: PackedDataset,
    tables: Sequence[TableConfig],
    seen: Seen | None,
    form: RowFormat,
) -> Description:
    """Returns what export.json says, except of its files."""
    info, made, edges = kept.info, raw_rows(kept), cast(list[JsonValue], config.model.edges_of(kept.info))
    kinds = {feature.name: feature for feature in info.features}
    return Description(
        created_by=f"hotrow {__version__}",
        run=checkpoint.absolute().parents[1].name,
        step=extra.state.step,
        dataset={"name": info.name, "checksum": extra.dataset, "licence": info.licence},
        model={**config.model.model_dump(mode="json"), "num_dense": extra.num_dense, "edges": edges},
        missing=() if made is None else made.schema.missing,
        at_serving={} if made is None else {**made.schema.at_serving},
        transforms=() if made is None else _computed(made),
        statistics=() if made is None else _statistics(made.schema),
        dense=tuple(_dense(column, made) for column in _raw_columns(info, made)),
        features=tuple(_feature(kinds[name], made) for table in tables for name in table.feature_names),
        tables=tuple({**_table(table, kept, made), "stored_as": form} for table in tables),
        labels=tuple(label.name for label in info.labels),
        usual=_usual(seen),
        files={},
    )


def _raw_columns(info: DatasetInfo, made: RawRows | None) -> tuple[DenseColumn, ...]:
    """Returns the dense columns that are made of raw numbers, which come before the statistics."""
    return info.dense if made is None else info.dense[: len(made.schema.dense)]


def _dense(column: DenseColumn, made: RawRows | None) -> dict[str, Any]:
    """Returns how raw values of a column become numbers."""
    found = _transform(column)
    what = {"name": column.name, "transform": found.name, **found.options, "missing": _WITHOUT_VALUE}
    return what | _written(column.name, made)


def _statistics(schema: Schema) -> tuple[dict[str, Any], ...]:
    """Returns for each statistic its features, its priors, the names of its inputs, and the factor of its counts."""
    return tuple(
        {
            "features": list(spec.columns),
            "priors": list(spec.priors),
            "count": spec.count,
            "inputs": list(spec.inputs),
            "share": share_to_score(schema),
        }
        for spec in schema.statistics
    )


def _computed(made: RawRows) -> tuple[dict[str, Any], ...]:
    """Returns which columns are computed from others, and how."""
    return tuple(
        {
            "into": into,
            "transform": transform.name,
            "options": dict(transform.options),
            "columns": [
                {"name": name, **(_written if kind == "number" else _ids)(name, made)}
                for name, kind in zip(columns, transform.takes(len(columns)), strict=True)
            ],
            **({} if transform.makes == "number" else {f"{transform.makes}s": True}),
        }
        for into, (transform, columns) in made.schema.computed.items()
    )


def _written(column: str, made: RawRows | None) -> dict[str, Any]:
    """Returns how numbers of a column are written in text; nothing if plainly."""
    specs = () if made is None else made.schema.dense
    spec = next((spec for spec in specs if spec.column == column), PLAIN)
    return {} if is_plain(spec) else {"written": {name: getattr(spec, name) for name in Written._fields}}


def _usual(seen: Seen | None) -> dict[str, Any] | None:
    if seen is None or seen.usual is None:
        return None
    ranges = {name: list(ends) for name, ends in seen.ranges.items()}
    return {"of": seen.of, "columns": {name: dict(own) for name, own in seen.usual.items()}, "ranges": ranges}


def _transform(column: DenseColumn) -> Transform:
    # In a packed dataset that was not made from raw rows, it is "none".
    return Transform("identity") if column.transform == "none" else Transform.parse(column.transform)


def _feature(feature: Feature, made: RawRows | None) -> dict[str, Any]:
    """Returns how raw values of a column become keys."""
    found: dict[str, Any] = {"name": feature.name, "table": feature.table, "kind": feature.kind}
    return found if made is None else found | {"separator": None} | _ids(feature.name, made)


def _ids(column: str, made: RawRows) -> dict[str, Any]:
    """Returns how raw values of a column become ids."""
    encoding = "hex" if made.source == "criteo" else made.encodings[column]
    spec = next(each for each in made.schema.id_columns if each.column == column)
    found: dict[str, Any] = {"keys": encoding}
    found |= {} if spec.kind == "one_hot" else {"kind": spec.kind, "separator": spec.separator}
    return found if spec.buckets is None else found | {"buckets": list(spec.buckets), **_written(column, made)}


def _table(table: TableConfig, kept: PackedDataset, made: RawRows | None) -> dict[str, Any]:
    stored = kept.info.table_by_name[table.name]
    found: dict[str, Any] = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "pooling": table.pooling,
        "features": list(table.feature_names),
        "file": f"tables/{file_name(table.name)}.safetensors",
        "tensor": f"{table.name}.weight",
        "trained_as": table.dtype,
        "vocabulary": None,
    }
    if made is None or not _has_vocabulary(kept, stored):
        return found
    spec = made.schema.table(table.name)
    return found | {
        "vocabulary": {
            "file": f"{ENCODER}/{stored.vocabulary_file}",
            "num_keys": stored.num_keys,
            "unknown_row": 0,
            "missing_row": stored.missing_row or 0,
            "hash_cap": spec.hash_cap,
            "min_count": spec.min_count,
            "num_dropped": stored.num_dropped,
        }
    }


def _has_vocabulary(kept: PackedDataset, table: Table) -> bool:
    return "schema" in kept.info.ids and table.vocabulary_file in kept.info.files


class _Counted:
    """A counter of the rows written so far, which reports progress."""

    def __init__(self, progress: ProgressCallback | None, stage: str, total: int) -> None:
        self._meter, self._done, self._total = ProgressMeter(progress, stage, total), 0, total

    def __call__(self, num_rows: int) -> None:
        self._done += num_rows
        (self._meter.finish if self._done == self._total else self._meter.update)(self._done)


WEIGHT, PART = "weight", "embedding"
PIECE_BYTES = 1 << 22
"""Bytes of rows in memory at a time, as float32; the allocator keeps up to ten such pieces for reuse."""


class LookedUpRows:
    """[N, D] float32 of a table in the checkpoint at `path`: the numbers that a lookup adds up.

    float16 is widened, exactly. Lookups read the upper half of split weights ("bfloat16"), so the lower bits are
    0 here: these are the weights a run predicts with. The lower half is for further training and is not exported.
    done: called with the number of rows of every piece. Raises ValueError if the checkpoint holds another table.
    """

    dtype = torch.float32

    def __init__(self, path: Path, manifest: Manifest, table: TableConfig, *, done: Callable[[int], None]) -> None:
        self.shape = torch.Size((table.num_embeddings, table.embedding_dim))
        self._upper_half, self._done = table.dtype == "bfloat16", done
        dtype = torch.float16 if table.dtype == "float16" else torch.float32
        chain = manifest.chain(PART, table.name)
        if chain is None:
            raise ValueError(f"{path} has no table {table.name!r}; take another step")
        self._rows = _merged(path, chain, self.shape, dtype)

    def pieces(self) -> Iterator[Tensor]:
        """Returns the rows as they are stored, in order."""
        return self._rows

    def read(self, piece: Tensor) -> Tensor:
        """Returns the piece as lookups see it."""
        self._done(len(piece))
        if self._upper_half:
            return (piece.view(torch.int32) & -(2**16)).view(torch.float32)
        return piece.to(torch.float32)


def _ranges(shape: torch.Size) -> Iterator[slice]:
    step = max(1, PIECE_BYTES // (4 * shape[1]))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _merged(path: Path, chain: Chain, shape: torch.Size, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields the initial rows, replaced by those of each link in turn.

    The row numbers in a link rise, so one position in each link is enough to go on from.
    """
    if chain.record.num_rows != shape[0]:
        raise ValueError(
            f"{path / chain.stem} has {chain.record.num_rows:,} rows, its table {shape[0]:,}; take another step"
        )
    initial = chain.record.initial
    if initial is not None and (dtype == torch.float16) != (initial.dtype == "float16"):
        raise ValueError(f"{path / chain.stem} is made of {initial.dtype}, its table of {dtype}; {CURE}")
    check_chain(path, chain, {WEIGHT: (dtype, tuple(shape[1:]))})
    places = [0] * len(chain.record.links)
    for rows in _ranges(shape):
        if initial is None:  # opened again, so that pages read before do not stay mapped
            with open_tensors(path / chain.files[0]) as file:
                yield file.get_slice(WEIGHT)[rows]
            continue
        piece = initial.read(WEIGHT, rows, shape)
        for k, (file, num_rows) in enumerate(zip(chain.files, chain.record.links, strict=True)):
            places[k] = _overlay(piece, rows, path / file, places[k], num_rows)
        yield piece


def _overlay(piece: Tensor, rows: slice, path: Path, place: int, num_rows: int) -> int:
    """Copies into `piece`, the table's `rows`, those that a link has from `place` on; returns the next place."""
    if place == num_rows:
        return place
    with open_tensors(path) as link:
        ids = link.get_slice(ROWS)[place : min(num_rows, place + rows.stop - rows.start)]
        end = place + int(torch.searchsorted(ids, rows.stop))
        if end > place:
            piece[ids[: end - place] - rows.start] = link.get_slice(WEIGHT)[place:end]
    return end
