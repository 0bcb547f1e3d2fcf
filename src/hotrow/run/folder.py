"""The folder of a run: what it holds, how it is named, and the only code that writes to it.

runs/criteo-dlrm-001/
  run.json        status, command, versions, host, dataset, seeds, backend, counted warnings, final metrics
  report.html     how the run went, as a page (hotrow.report)
  config.yaml     every option as it was used
  metrics.jsonl   one JSON object per line: training means, evaluations
  log.txt         what the user was told, with times
  encoder/        dataset.json, vocabularies and statistics, to score raw rows without the dataset
  checkpoints/    step-N folders (checkpoint.py)
  data/           the dataset, if the run prepared its own (hotrow.fit)
  memory/         while it trains: rows of tables that do not fit in DRAM (hotrow.placement)
  tensorboard/    event files, if tensorboard is installed
  .lock           on a network file system: locked while a process trains here
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from hotrow.base.door import check_folder, is_taken, make_folder, open_file, read_file, remove
from hotrow.base.files import LOCK, atomic_write, check_path, check_writable, claim, open_private
from hotrow.base.machine import host_facts, versions
from hotrow.base.records import Document, flat
from hotrow.config.load import parse_yaml
from hotrow.data.packed.format import MANIFEST, read_info
from hotrow.data.packed.reader import PackedDataset
from hotrow.report.facts import RunFacts, line_of, read_lines
from hotrow.report.page import NAME as REPORT
from hotrow.report.page import write_report
from hotrow.run.checkpoint_rows import link_or_copy
from hotrow.run.record import ALL_DONE, Counted, RunRecord
from hotrow.setup.setup import SELECTION

RUN, CONFIG, METRICS, LOG = "run.json", "config.yaml", "metrics.jsonl", "log.txt"
_FILES = (RUN, CONFIG, METRICS, LOG, REPORT, LOCK)
ROWS = "rows"
"""Rows as they were read, while a run and its candidates are prepared."""
_FOLDERS = ("checkpoints", "encoder", "data", "memory", "tensorboard", ROWS, SELECTION)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""What could end a line of log.txt, or change how a terminal shows it."""


_WHEN_FINISHED = (
    "dataset",
    "backend",
    "steps",
    "epochs",
    "samples_per_s",
    "train_s",
    "ended",
    "chosen_step",
    "metrics",
)
"""Fields that every finished run has."""
_DOCUMENT = Document(RunRecord, marks={"hotrow_run": 1}, cure="restore it from a copy, or train a new run")
ENDING_S = 3.0
"""How long a process that was killed may take to let go of a run's folder: mpiexec ends before its last rank has."""


class RunFolder:
    """The files of one run: `create` makes a new folder, `open` opens an existing one.

    Use it as a context manager while the run works: an exception is then recorded before it propagates.
    """

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record
        """What run.json holds; `update` changes it."""
        self._board: Any = None
        """TensorBoard's writer."""
        self._is_claimed = False
        self._depth, self._thread = 0, threading.get_ident()
        """How many `with` blocks of this folder are open, and in which thread; `_note` counts warnings meanwhile."""
        self._noting = ExitStack()
        self._shown_warnings: list[str] = []

    @classmethod
    def create(cls, path: str | Path | None, *, name: str) -> RunFolder:
        """Makes a new run folder at `path`, or at runs/`name`-NNN with the next free number.

        Raises ValueError if `path` exists: a run is never overwritten.
        """
        folder = _new_folder(Path(path)) if path else _next_folder(Path("runs"), name)
        for file_name in (METRICS, LOG):
            open_private(folder / file_name).close()
        record = RunRecord("running", sys.argv, _now(), versions(), host_facts(), warnings={})
        run = cls(folder, record)
        run.update()
        return run

    @classmethod
    @contextmanager
    def begin(cls, path: str | Path | None, *, name: str, preparation: str) -> Iterator[RunFolder]:
        """Returns the folder of a run that prepares its own data. Inside the block no other process may use it.

        preparation: identifies what is prepared. If a run at `path`, or of that name, began with the same preparation
        and was stopped before its first step, its folder is used; also one at `path` whose preparation failed, as rows
        that were wrong may have been corrected. Otherwise `create` makes a new one.
        """
        for found in [Path(path)] if path else _numbered(Path("runs"), name).values():
            if not _stopped_before_training(found, preparation, is_named=path is not None):
                continue
            with claim(found) as claimed:
                # The process that owned it may have taken its first step meanwhile.
                if claimed is not False and _stopped_before_training(found, preparation, is_named=path is not None):
                    folder = cls.open(found)
                    folder._is_claimed = True
                    if folder.record.preparation != preparation:
                        for other in ("data", ROWS, SELECTION):
                            remove(found / other)
                    folder.update(status="running", command=sys.argv, error=None, preparation=preparation)
                    try:
                        yield folder
                    finally:
                        folder._is_claimed = False
                    return
        folder = cls.create(path, name=name)
        with folder.claimed():
            folder.update(preparation=preparation)
            yield folder

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Opens the run at `path`. Raises ValueError if it is not a run, or naming the wrong field of run.json, or what
        is in the folder and is neither a regular file nor a real folder.
        """
        path = Path(path)
        if not is_taken(path / RUN):
            raise ValueError(f"{path} is not a run: it has no {RUN}; pass a folder such as runs/criteo-dlrm-001")
        check_folder(path, files=_FILES, folders=_FOLDERS)
        record = _DOCUMENT.read(path / RUN)
        if record.status == "finished":
            for name in _WHEN_FINISHED:
                if getattr(record, name) is None:
                    raise ValueError(f"{path / RUN}: {name}: it is missing; {_DOCUMENT.cure}")
        return cls(path, record)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Reserves the folder for this process inside the block. Raises ValueError if another process has it: two that
        train in one folder would mix their measurements and remove each other's checkpoints.
        """
        if self._is_claimed:
            yield
            return
        with ExitStack() as claims:
            claimed = claims.enter_context(claim(self.path))
            until_s = time.monotonic() + ENDING_S
            while claimed is False and time.monotonic() < until_s:
                time.sleep(0.1)
                claimed = claims.enter_context(claim(self.path))
            if claimed is False:
                raise ValueError(
                    f"another process trains in {self.path}: wait until it has ended, or end it (SIGTERM lets it save "
                    "a checkpoint first)"
                )
            if claimed is None:
                text = f"the file system of {self.path} has no locks: take care that no other process trains there"
                self.warn("folder_without_locks", text)
                print(f"hotrow: warning: {text}", file=sys.stderr)
            self._is_claimed = True
            try:
                yield
            finally:
                self._is_claimed = False

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def selection(self) -> Path:
        """The folder of the run that found the steps of this one, if there is one."""
        choice = self.record.choice
        return self.path / SELECTION / ("" if choice is None else choice.run)

    @property
    def encoder(self) -> Path:
        """The encoder's folder: dataset.json, the vocabularies and statistics."""
        return self.path / "encoder"

    def write_config(self, config_yaml: str) -> None:
        """Writes config.yaml: the options that the run uses from here on."""
        with atomic_write(self.path / CONFIG) as file:
            file.write(config_yaml.encode())

    def update(self, **values: Any) -> None:
        """Sets fields of run.json, which are checked as on reading, and writes it. A field set to None is left out."""
        self.record = replace(self.record, **values)
        fields = {name: value for name, value in asdict(self.record).items() if value is not None}
        _DOCUMENT.write(self.path / RUN, fields)

    def warn(self, code: str, text: str, *, count: int | None = None) -> None:
        """Counts one more occurrence of the warning `code` in run.json; the first is logged in full.

        count: how many there are now, if a resumed run may meet the same ones again; if None, one more.
        """
        before = self.record.warnings.get(code, {"count": 0, "text": text})
        if not before["count"]:
            self.log(f"warning ({code}): {text}")
        now: Counted = {"count": before["count"] + 1 if count is None else count, "text": before["text"]}
        if self.record.warnings.get(code) != now:
            self.update(warnings={**self.record.warnings, code: now})

    def log(self, text: str) -> None:
        """Writes a line with the time to log.txt. A line break within `text` is escaped: nobody can forge a line."""
        line = _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
        with open_file(self.path / LOG, "ab") as file:
            file.write(f"{_now()} {line}\n".encode(errors="backslashreplace"))

    def commands(self, rows: str = "NEW_ROWS") -> dict[str, str]:
        """Returns commands that score, judge, export and continue the run, by purpose, as far as it has come to them.

        rows: the raw rows to name, quoted.
        """
        run, command = shlex.quote(str(self.path)), shlex.join(map(str, self.record.command))
        if not is_taken(self.path / CONFIG):
            again = "Start it again, after removing the folder"
            return {again if self.record.preparation is None else "Continue its preparation": command}
        commands = {}
        rows_to_judge = "--data PREPARED_ROWS" if self.record.trained_for.retrieves else rows
        if any(self.checkpoints.glob("step-*")):
            commands = {
                "Score new rows": f"hotrow predict {run} {rows} --out scores.csv",
                "Judge it on new rows": f"hotrow eval {run} {rows_to_judge}",
                "Export it": f"hotrow export {run} --out {shlex.quote(self.path.name + '-export')}",
            }
        if self.record.status != "finished":
            commands = {"Resume it": resume_command(self.path), **commands}
        elif self.record.ended == ALL_DONE and not is_taken(self.selection / RUN):  # which found how long to train
            commands["Train on"] = f"{resume_command(self.path)} --set train.epochs=MORE"
        return commands

    def is_training(self) -> bool:
        """Returns whether a process trains here now."""
        if self.record.status != "running":
            return False
        with claim(self.path) as claimed:
            return claimed is False

    def options(self) -> dict[str, str]:
        """Returns the options in config.yaml by dotted name, as JSON without the quotes of a text; {} before the first
        step, or if the file is damaged."""
        with suppress(OSError, ValueError):
            found = flat(parse_yaml(read_file(self.path / CONFIG).decode(), origin=CONFIG))
            return {name: own if isinstance(own, str) else json.dumps(own, default=str) for name, own in found}
        return {}

    def facts(self) -> RunFacts:
        """Returns the facts that a report shows. Lines of metrics.jsonl that are damaged are counted and left out."""
        lines, left_out = read_lines(self.path / METRICS)
        record, info, selection = asdict(self.record), None, None
        with suppress(OSError, ValueError):  # before the run has its vocabularies
            info = read_info(self.encoder)
        if is_taken(self.selection / RUN):
            with suppress(OSError, ValueError):  # the page is of this run, whatever became of that one
                selection = asdict(_DOCUMENT.read(self.selection / RUN))
        return RunFacts(
            name=str(self.path),
            record=record,
            lines=lines,
            lines_left_out=left_out,
            is_training=self.is_training(),
            commands=self.commands(),
            options=self.options(),
            info=info,
            selection=selection,
        )

    def report(self) -> None:
        """Writes report.html. If it cannot be written, that is only a counted warning."""
        try:
            write_report(self.path / REPORT, self.facts())
        except Exception as error:  # a full disk, or a bug
            cure = f"hotrow report {shlex.quote(str(self.path))}"
            text = f"{REPORT} was not written ({type(error).__name__}: {error}); to try again: {cure}"
            warnings.warn(text, stacklevel=2)
            with suppress(OSError):
                (self.path / REPORT).unlink(missing_ok=True)  # one of an earlier session would mislead
                self.warn("no_report", text)

    def measure(self, kind: str, *, step: int, **values: Any) -> None:
        """Writes a line of metrics.jsonl, and gives its numbers to TensorBoard if its file is open.

        Scalars of a split carry its name, as in `val/auc`; otherwise two splits at one step would make one curve.
        """
        with open_file(self.path / METRICS, "ab") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n")
        group = values.get("split", kind)
        scalars = {
            "/".join(part for part in (group, name, tag) if part): number
            for name, value in values.items()
            for tag, number in (value.items() if isinstance(value, Mapping) else [("", value)])
            if isinstance(number, int | float)
        }
        with self._going_on_without_board():
            for tag, number in scalars.items() if self._board is not None else ():
                self._board.add_scalar(tag, number, step)

    @contextmanager
    def _going_on_without_board(self) -> Iterator[None]:
        """If TensorBoard's writer fails in the block, such as on a full disk, the run goes on without it."""
        try:
            yield
        except Exception as error:
            self._board = None
            self.warn("sink_lost", f"no more numbers go to tensorboard: {type(error).__name__}: {error}")

    def measurements(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl, without a last line that a kill cut off. Raises ValueError naming file
        and line if one is damaged, and if there is no such file.
        """
        path = self.path / METRICS
        if not is_taken(path):
            raise ValueError(f"{path} is missing; restore it from a copy, or make an empty file to go on without it")
        lines = read_file(path).split(b"\n")[:-1]
        found = [line_of(line) for line in lines]
        if None in found:
            where = f"{path}, line {1 + found.index(None)}"
            raise ValueError(f"{where}: it was damaged or edited; restore it from a copy, or remove the line")
        return [line for line in found if line is not None]

    def rewind(self, step: int) -> None:
        """Removes lines of metrics.jsonl after `step`, and of a swap right after it: they will come again."""
        kept = [line for line in self.measurements() if line["step"] < step + (line["kind"] != "swap")]
        with atomic_write(self.path / METRICS) as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in kept)

    def open_tensorboard(self, *, step: int) -> None:
        """Writes events from `step` on; if tensorboard is not installed, the log says so."""
        if importlib.util.find_spec("tensorboard") is None:
            self.log("no TensorBoard events: tensorboard is not installed (pip install hotrow[tensorboard])")
            return
        from torch.utils.tensorboard import SummaryWriter  # heavy, and an extra

        make_folder(self.path / "tensorboard", within=self.path)
        self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)
        self._board.flush()  # only now is the file there, which anybody may read
        for path in (self.path / "tensorboard").iterdir():
            if path.is_file():
                path.chmod(0o600)

    def keep_encoder(self, dataset: Path) -> None:
        """Takes dataset.json, vocab/ and statistics/ of a packed dataset into the run, so that it can score raw rows by
        itself.

        They are hard links, which take no space, or copies if the file system has no links.
        """
        folders = [name for name in ("vocab", "statistics") if name == "vocab" or (dataset / name).is_dir()]
        for name in folders:
            make_folder(self.encoder / name, within=self.path)
        for source in [dataset / "dataset.json", *(file for name in folders for file in (dataset / name).glob("*"))]:
            target = self.encoder / source.relative_to(dataset)
            remove(target, within=self.path)
            link_or_copy(source, target)

    def fail(self, text: str) -> None:
        """Records that the run failed, and how."""
        self.log(f"failed: {text}")
        self.update(status="failed", error=text)

    def __enter__(self) -> RunFolder:
        self._depth += 1
        if self._depth == 1:
            self._thread = threading.get_ident()
            self._noting.enter_context(noting(self._note))
        return self

    def _note(self, text: str) -> None:
        """Counts a warning that Python has shown: what a terminal says of a run is in its record."""
        self._shown_warnings.append(text)
        if threading.get_ident() == self._thread:
            self.count_shown()

    def count_shown(self, texts: Sequence[str] = ()) -> None:
        """Counts warnings that Python has shown: `texts`, and those that were noted and not counted yet."""
        self._shown_warnings += texts
        with suppress(OSError):  # on a full disk they are counted later
            while self._shown_warnings:
                self.warn("shown_warning", self._shown_warnings[0])
                del self._shown_warnings[0]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._noting.close()
            self.count_shown()
        with self._going_on_without_board():
            if self._board is not None:
                self._board.close()
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        if self.record.status != "running":
            self.report()


@contextmanager
def noting(note: Callable[[str], None]) -> Iterator[None]:
    """Calls `note` with the text of each warning that Python shows inside the block, in whatever thread."""
    show = warnings.showwarning

    def show_and_note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        show(message, category, *place, **more)
        note(str(message))

    warnings.showwarning = show_and_note
    try:
        yield
    finally:
        warnings.showwarning = show


class SilentFolder(RunFolder):
    """The folder of a run as ranks other than the first have it: it can be read, and nothing is written to it."""

    @classmethod
    def at(cls, path: Path) -> SilentFolder:
        """Returns the folder that the first rank made at `path`."""
        return cls(path, RunRecord("running", sys.argv, _now(), versions(), host_facts(), warnings={}))

    @contextmanager
    @override
    def claimed(self) -> Iterator[None]:
        yield

    @override
    def update(self, **values: Any) -> None:
        """Sets fields of `record`."""
        self.record = replace(self.record, **values)

    @override
    def measurements(self) -> list[dict[str, Any]]:
        return []

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    write_config = log = report = measure = rewind = open_tensorboard = keep_encoder = _nothing


def resume_command(path: Path) -> str:
    """Returns the command that continues the interrupted run in the folder `path`."""
    return f"hotrow train --resume {shlex.quote(str(path))}"


def _new_folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise _taken(path) from None
    return path


def check_free(path: Path | str | None) -> None:
    """Raises ValueError if no run can be made at `path`, or prepared further there; if None, a name will be found."""
    if path is None:
        return
    if not isinstance(path, str | Path):
        raise ValueError(f"run is {path!r}; give the path of a new folder")
    check_path(str(path), what="run")
    if Path(path).exists() and not _is_unbegun(Path(path)):
        raise _taken(Path(path))
    check_writable(Path(path))


def _is_unbegun(path: Path) -> bool:
    return is_taken(path / RUN) and not is_taken(path / CONFIG)


def _taken(path: Path) -> ValueError:
    other = f"or continue it with `{resume_command(path)}`"
    if _is_unbegun(path):
        other = "or remove it: the run there ended before its first step"
    return ValueError(
        f"run folder {path} exists already and is never overwritten; choose another with --set run=..., {other}"
    )


def _next_folder(parent: Path, name: str) -> Path:
    make_folder(parent)
    number = max(_numbered(parent, name), default=0)
    while True:  # another process may take the number first
        number += 1
        try:
            (path := parent / f"{_safe(name)}-{number:03d}").mkdir(mode=0o700)
            return path
        except FileExistsError:
            continue


def _numbered(parent: Path, name: str) -> dict[int, Path]:
    """Returns the folders `name`-NNN by number, the newest first."""
    found = {
        int(m[1]): path
        for path in (parent.iterdir() if parent.is_dir() else ())
        if (m := re.fullmatch(rf"{re.escape(_safe(name))}-(\d+)", path.name))
    }
    return dict(sorted(found.items(), reverse=True))


def _safe(name: str) -> str:
    """Returns `name` with only characters that a file name may have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def _stopped_before_training(path: Path, preparation: str, *, is_named: bool) -> bool:
    """Returns whether a run was to prepare this, or failed to prepare something else and is named, and has not trained:
    the first step writes its config."""
    if not is_taken(path / RUN) or is_taken(path / CONFIG):
        return False
    try:
        record = _DOCUMENT.read(path / RUN)
        return record.preparation == preparation or (is_named and record.status == "failed")
    except ValueError:  # a run.json that cannot be read is not continued
        return False


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def dataset_of(path: str) -> str:
    """Returns the folder of the dataset that the run at `path` was trained on; `path` itself if it is not a run.

    Raises ValueError if that dataset is not there any more.
    """
    if not is_taken(Path(path) / RUN):
        return path
    known = RunFolder.open(path).record.dataset
    if known is None:
        raise ValueError(f"{path} is a run that has not come to its dataset; name a packed dataset")
    found = Path(known["path"])
    if not is_taken(found / MANIFEST) or PackedDataset.open(found).checksum != known["checksum"]:
        raise ValueError(
            f"{path} was trained on the dataset {found}, and none or another one is there now; name the folder where "
            "that dataset lies"
        )
    return str(found)
