"""`hotrow days`: walks over a folder of logs, a file or folder for each day, and does the days that are not done yet.

    CHAIN/days.json     the days that are done, with what the page says of each
    CHAIN/recipe.yaml   how the first day trains, if no recipe was given
    CHAIN/data/DAY  CHAIN/runs/DAY  CHAIN/deltas/DAY
    CHAIN/versions/DAY  CHAIN/report.html
    CHAIN/model         a link to the newest version, which servers follow

A version never changes, and goes once it is not the newest and no server holds it. A step begins once the one before it
is whole, and each of them is resumed, or begun anew, by the room that it belongs to. So a call that was killed is made
again, and ends in the same bits.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import JsonValue
from pydantic.dataclasses import dataclass as record

from hotrow.api import Run
from hotrow.base.door import is_taken, make_folder, remove
from hotrow.base.files import LOCK, PARTIAL_SUFFIX, check_name, claim, crc32, folder_bytes, remove_unheld, sync_folder
from hotrow.base.progress import num_of, progress_bar, say
from hotrow.base.records import STRICT, Document, nearest
from hotrow.config.load import apply_overrides, load_config, make_config, overrides_of
from hotrow.data.chunk import NoRowsError
from hotrow.data.packed.format import MANIFEST, DatasetInfo
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.init import RECIPE_FILE, run_init
from hotrow.data.prepare.prepare import NO_BASE, raw_rows, run_prepare
from hotrow.data.prepare.workfolder import OtherWorkError
from hotrow.data.sources.columns import SUFFIXES, SUFFIXES_OF_KINDS
from hotrow.data.sources.inputs import natural_key
from hotrow.data.sources.options import ReadOptions, with_read_options
from hotrow.data.sources.registry import OF_ANY_COLUMNS
from hotrow.data.sources.tabular import has_suffix
from hotrow.days.page import DoneDay, KnownFiles, write_page
from hotrow.export.delta import apply_delta
from hotrow.report.facts import number_in
from hotrow.run.folder import CONFIG, RUN, RunFolder
from hotrow.run.runs import config_of, resume, train
from hotrow.run.start import unknown_shares
from hotrow.tune.listing import remove_run

DAYS, REPORT, MODEL = "days.json", "report.html", "model"
STEPS = ("prepare", "train", "export")
LEFT_OUT = ("files", "parts")
"""Fields of a day that `walk_days` does not return."""
FACTOR, ENOUGH = 10, 16
"""A day's labels are odd if one value is so many times as frequent as on other days, or as rare, and one of both counts
is large enough that chance would show it once in 100,000 days."""
LATER = (
    *("train.epochs=1", "train.max_steps=null", "train.early_stopping=null", "train.eval_every=null"),
    "optimizer.schedule={warmup_steps: 0, decay_steps: 0}",
)
"""Options of a day that is not the first: it has no validation rows, all of its rows train, and by the first day's
schedule it would hardly leave the warm-up."""


@record(frozen=True, config=STRICT)
class Chain:
    """What days.json says."""

    asked: dict[str, JsonValue]
    """What was said of columns and of the first day's recipe, which may not change once something is made by it."""
    days: tuple[DoneDay, ...] = ()
    """The days that are done, the first one first."""
    empty: dict[str, KnownFiles] = field(default_factory=dict)
    """Files of the days without a row that came before a day that is done."""


_DOCUMENT = Document(Chain, marks={"hotrow_days": 1}, cure="restore it from a copy, or begin another chain")


class _Interrupted(Exception):  # noqa: N818  # not an error
    """Raised if training was stopped by a signal, which is its argument."""


@dataclass(frozen=True)
class _Walk:
    """Where a chain lies, and what it was asked for."""

    logs: Path
    chain: Path
    read: ReadOptions
    recipe: Path | str | None
    schema: Path | str | None
    overrides: Sequence[str]
    accept: Collection[str]
    verbose: bool

    def place(self, kind: str, day: str) -> Path:
        return self.chain / kind / day


@with_read_options
def walk_days(
    logs: Path | str,
    out: Path | str,
    *,
    read: ReadOptions,
    recipe: Path | str | None = None,
    schema: Path | str | None = None,
    overrides: Sequence[str] = (),
    keep: int = 2,
    accept: Collection[str] = (),
    verbose: bool = False,
) -> dict[str, Any]:
    """Does the days of `logs` that the chain in `out` has not done yet; called again after a stop, it goes on.

    logs: a folder with a file or a folder for each day, day_2 before day_10. recipe: a YAML config for the first day;
    if None, it is chosen by the number of rows, and kept in `out`. schema: how to read tables; if None, it is guessed
    from the first day, with the help of what you say about columns:
    {read}
    overrides: `a.b=v` for every day that begins to train. keep: of so many days the dataset and the run stay.
    accept: days that train although their labels are odd: all equal, or one value ten times as frequent as before.
    verbose: say all that preparation, training and exports say, and not one line a day alone.

    A day without a row, and a file that holds no rows, is passed over, and a line says so. Returns how many days are
    done, which of them by this call, and the newest one's figures; with `status` "interrupted" and `signal`, if
    training was stopped. Raises ValueError if a day that is done has changed, if a new day comes before one that is
    done, or if the labels of a day are odd; and as preparation, training and exports do.
    """
    walk = _Walk(Path(logs), Path(out), read, recipe, schema, overrides, accept, verbose)
    _check_options(walk, keep)
    paths = _days_in(walk.logs, walk.chain)
    if unknown := [name for name in accept if name not in paths]:
        raise ValueError(f"--accept {unknown[0]}: {logs} has no such day{nearest(unknown[0], [*paths])}")
    make_folder(walk.chain)
    with claim(walk.chain) as is_ours:
        if is_ours is False:
            raise ValueError(f"another process works on {walk.chain}: wait until it has ended, or name another --out")
        chain = _open(walk)
        before, status = len(chain.days), dict[str, Any](status="finished")
        try:
            empty = dict(chain.empty)
            for name, path in _left(walk, paths, chain).items():
                files = _files_of(walk, path)  # before they are read: rows that come meanwhile are not passed over
                try:
                    done = _do(walk, name, path, chain.days)
                except NoRowsError as error:  # as of a quiet hour: those that follow need not wait
                    say(f"{name} has no rows and is passed over: {error}")
                    empty[name] = {file: (stat.st_size, "", 0) for file, stat in files.items()}
                    continue
                chain = replace(chain, days=(*chain.days, done), empty=empty)
                _DOCUMENT.write(walk.chain / DAYS, chain)
                _finish(walk, chain, keep)
        except _Interrupted as stopped:
            status = {"status": "interrupted", "signal": stopped.args[0]}
            say("stopped; the same command goes on")
        if before == len(chain.days):
            _finish(walk, chain, keep)
    return {
        **status,
        "days": len(chain.days),
        "new": [day.name for day in chain.days[before:]],
        "newest": {what: own for day in chain.days[-1:] for what, own in asdict(day).items() if what not in LEFT_OUT},
        "model": str(walk.chain / MODEL),
        "report": str(walk.chain / REPORT),
    }


def _check_options(walk: _Walk, keep: int) -> None:
    """Raises ValueError if one is wrong, before hours of work."""
    if keep < 1:
        raise ValueError(f"keep is {keep}; it must be at least 1, because the next day goes on from kept days")
    if chosen := [name for name in overrides_of(walk.overrides) if name in ("data", "run", "from_run")]:
        raise ValueError(f"--set {chosen[0]}: each day of a chain has its own; leave it out")
    if walk.recipe is not None:
        config = load_config(walk.recipe, ["data=''", *walk.overrides])
    elif (newest := _newest_run(walk.chain)) is not None:  # later days go on by its config, whatever is not said
        config = load_config(config_of(newest), [*LATER, *walk.overrides])
    else:
        config = make_config(apply_overrides({"data": ""}, walk.overrides), origin="days")
    fae = "fae" if config.hot.schedule == "fae" else None
    for option, value in (("calibration.method", config.calibration.method), ("hot.schedule", fae)):
        if value is not None:
            raise ValueError(
                f"{option} is {value!r}, which needs validation rows; only the first day has some: change it"
            )


def _newest_run(chain: Path) -> Path | None:
    """Returns the run of the newest day that is done; None if there is none."""
    days = _DOCUMENT.read(chain / DAYS).days if is_taken(chain / DAYS) else ()
    runs = [chain / "runs" / day.name for day in days[-1:]]
    return next((run for run in runs if is_taken(run / CONFIG)), None)


# ---- which days there are


def _order(day: str) -> tuple[list[tuple[int, str]], str]:
    """Returns a key by which days are sorted: day_2 comes before day_10."""
    return natural_key(day), day


def _days_in(logs: Path, chain: Path) -> dict[str, Path]:
    """Returns the file or folder of each day by its name, in their order. Names without suffixes are those of days.

    Raises ValueError if there is none, if two are one day, or if the chain would be a day.
    """
    if not logs.is_dir():
        raise ValueError(f"{logs} is not a folder; name the folder that has a file or a folder of logs for each day")
    if chain.resolve().is_relative_to(logs.resolve()):
        raise ValueError(f"{chain} lies in {logs}, whose folders are days: name a folder outside of it with --out")
    found: dict[str, Path] = {}
    there = sorted(path for path in logs.iterdir() if not path.name.startswith((".", "_")))  # others are hidden
    known = [path for path in there if path.is_dir() or has_suffix(path.name, SUFFIXES)]
    if known and (others := [path.name for path in there if path not in known]):  # as in a folder of files to prepare
        say(f"passed over, of formats that are not read: {', '.join(others)}")
    for path in known or there:
        name = check_name(re.sub(r"(\.[A-Za-z]\w*)+$", "", path.name), what="name of a day")
        if name in found:
            raise ValueError(f"{found[name]} and {path} are both day {name!r}: put them into one folder of that name")
        found[name] = path
    if not found:
        raise ValueError(f"{logs} is empty; put a file or a folder of logs for each day into it")
    return {name: found[name] for name in sorted(found, key=_order)}


def _left(walk: _Walk, paths: Mapping[str, Path], chain: Chain) -> dict[str, Path]:
    """Returns the days that are not done. Raises ValueError if one of them comes before one that is, or if a day that
    is done, or had no rows, has changed; its logs may be gone as a whole."""
    over = {day.name: day.files for day in chain.days} | chain.empty
    for name, files in over.items():
        if name in paths:
            _check_unchanged(walk, name, _files_of(walk, paths[name]), files)
    left = {name: path for name, path in paths.items() if name not in over}
    made = (path.name for kind in ("deltas", "versions") for path in (walk.chain / kind).glob("*"))
    known = [*(day.name for day in chain.days), *(name for name in made if not name.endswith(PARTIAL_SUFFIX))]
    for name, path in left.items():  # a day with a delta may already be in the model, and in copies of it
        if name not in known and known and _order(name) < _order(last := max(known, key=_order)):
            raise ValueError(
                f"{path} comes before {last}, which is done: days train in the order of their names; give it a later "
                "name, move it away, or begin another chain with --out"
            )
    return left


def _files_of(walk: _Walk, path: Path) -> dict[str, os.stat_result]:
    """Returns the files of a day by their path below the logs, without hidden ones."""
    files = {file.relative_to(walk.logs).as_posix(): file for file in (path, *path.rglob("*")) if file.is_file()}
    return {name: file.stat() for name, file in files.items() if not re.search(r"(^|/)[._][^=/]*(/|$)", name)}


def _check_unchanged(walk: _Walk, day: str, now: Mapping[str, os.stat_result], known: KnownFiles) -> None:
    """Raises ValueError naming the file if one of a day is not as it was when the day was prepared: its checksum is
    compared if anything was done to the file since."""
    for name in sorted({*now, *known}):
        num_bytes, checksum, changed_ns = known.get(name, (-1, "", 0))
        is_same = name in now and now[name].st_size == num_bytes
        if is_same and checksum and now[name].st_ctime_ns != changed_ns:
            is_same = checksum == f"crc32:{crc32(walk.logs / name):08x}"
        if not is_same:
            what = "is gone" if name not in now else "has changed" if name in known else "is new"
            raise ValueError(
                f"{walk.logs / name} {what} since {day} was prepared: put back what was there, and other rows into "
                "a new day; or begin another chain with --out"
            )


def _open(walk: _Walk) -> Chain:
    """Returns what is known of the chain. Raises ValueError if it was begun with other options."""
    files = {"recipe": walk.recipe, "schema": walk.schema}
    asked: dict[str, Any] = {name: sha256(Path(path).read_bytes()).hexdigest() for name, path in files.items() if path}
    of_columns = [name for name in walk.read.given if name != "skip_bad_rows"]  # which a later day may need
    asked |= json.loads(json.dumps({name: getattr(walk.read, name) for name in of_columns}))
    if not is_taken(walk.chain / DAYS):
        if taken := sorted(path.name for path in walk.chain.iterdir() if path.name != LOCK):
            raise ValueError(f"{walk.chain} has no {DAYS}, but {taken[0]}: name a new folder with --out")
        _DOCUMENT.write(walk.chain / DAYS, Chain(asked))
    chain = _DOCUMENT.read(walk.chain / DAYS)
    # What nothing was made by may change: the first calls of a user are often wrong.
    made = {kind: any((walk.chain / kind).glob(f"*/{file}")) for kind, file in (("data", MANIFEST), ("runs", CONFIG))}
    free = {name for name in asked | chain.asked if not (chain.days or made["runs" if name == "recipe" else "data"])}
    if free:
        fixed = {name: own for name, own in chain.asked.items() if name not in free}
        chain = replace(chain, asked=fixed | {name: own for name, own in asked.items() if name in free})
        _DOCUMENT.write(walk.chain / DAYS, chain)
    given = asked if chain.days else asked | chain.asked  # later days are read as the first one, whatever is not said
    if other := sorted(name for name in given if asked.get(name) != chain.asked.get(name)):
        raise ValueError(
            f"{other[0]} is another one than {walk.chain} was begun with; give that again, change options of later "
            "days with --set, or begin another chain with --out"
        )
    return chain


# ---- a day


def _do(walk: _Walk, name: str, path: Path, days: Sequence[DoneDay]) -> DoneDay:
    """Prepares, trains and exports a day, as far as that was not done by an earlier call; returns what it came to."""
    before = days[-1].name if days else None
    if not any(stat.st_size for stat in _files_of(walk, path).values()):
        raise NoRowsError(f"{path} is empty")
    if walk.verbose:
        say(f"{name}: {'the first day' if before is None else f'the day after {before}'}")
    clock = [time.monotonic()]
    dataset = _prepared(walk, name, path, before)
    files = _files_of(walk, path)
    known = _known(dataset.info, files)
    _check_unchanged(walk, name, files, known)
    positives = _positives(walk, path, dataset, days)
    clock.append(time.monotonic())
    run = Run(_trained(walk, name, dataset, before).path)
    clock.append(time.monotonic())
    published = _published(walk, name, run, is_first=before is None)
    clock.append(time.monotonic())
    done = DoneDay(
        name=name,
        files={file: (*own[:2], files[file].st_ctime_ns) for file, own in known.items()},
        rows=dataset.split("train").num_rows,
        positives=positives,
        **_figures(run, dataset.info),
        published_bytes=published,
        seconds={what: round(b - a, 3) for what, (a, b) in zip(STEPS, pairwise(clock), strict=True)},
    )
    count = sum(warning["count"] for warning in run.record.warnings.values())
    counted = f", {num_of(count, 'warning')} in {run.path / RUN}" if count and not walk.verbose else ""
    say(done.line(run.record.trained_for, before) + counted)
    return done


def _known(info: DatasetInfo, files: Mapping[str, os.stat_result]) -> KnownFiles:
    """Returns which of a day's files were there when it was prepared: those that were read, whose checksums are to be
    compared, and those of formats that are not."""
    depths = {len(name.split("/")) for name in files}  # the paths of sources begin as an earlier call named the logs
    sources = {"/".join(file.path.split("/")[-depth:]): file for file in info.sources for depth in depths}
    read = {name: (sources[name].num_bytes, sources[name].checksum, 0) for name in files if name in sources}
    kinds = [kind for kind in SUFFIXES_OF_KINDS if any(has_suffix(name, kind) for name in read)]
    if info.ids.get("source") not in OF_ANY_COLUMNS:  # others choose their files by names
        kinds = []
    # A file that would have been read came while others were.
    late = {name for name in files.keys() - read.keys() if any(has_suffix(name, kind) for kind in kinds)}
    return {name: (stat.st_size, "", 0) for name, stat in files.items() if name not in late} | read


def _positives(walk: _Walk, path: Path, dataset: PackedDataset, days: Sequence[DoneDay]) -> dict[str, int]:
    """Returns how many rows that train are 1, by label of 0 or 1. Raises ValueError if a label is odd, as that of a day
    whose clicks were not joined; its dataset is then gone, so that mended logs are prepared anew."""
    split, name = dataset.split("train"), dataset.path.name
    counts = sum(np.count_nonzero(split.block(i).labels, axis=1) for i in range(split.num_blocks))
    labels = zip(dataset.info.labels, np.ravel(counts).tolist(), strict=True)
    found, num_rows = {label.name: count for label, count in labels if label.kind == "binary"}, split.num_rows
    for label, count in found.items():
        # Beside the day before and beside all: neither a day that was accepted nor a new rate for good stops the next.
        of = [[(day.positives[label], day.rows) for day in own] for own in (days[-1:], days) if own]
        usual = [float(np.divide(*np.sum(each, 0))) for each in of]
        is_odd = all(_is_odd(count, share * num_rows, num_rows) for share in usual) if usual else count in (0, num_rows)
        if is_odd and name not in walk.accept:
            remove(dataset.path)
            before = f", and in {usual[0]:.2%} of those of the day before" if usual else ""
            raise ValueError(
                f"{path}: label {label!r} is 1 in {count:,} of {num_rows:,} rows{before}; see whether its labels are "
                f"complete and mend them, or train on them with --accept {name}"
            )
    return found


def _is_odd(count: int, usual: float, num_rows: int) -> bool:
    """Returns whether so many rows of a value are far from the usual number, or those of the other value are."""
    pairs = (sorted((count, usual)), sorted((num_rows - count, num_rows - usual)))
    return any(most >= max(ENOUGH, FACTOR * least) for least, most in pairs)


def _figures(run: Run, info: DatasetInfo) -> dict[str, Any]:
    """Returns how good the day before's model was on the rows of a day, and what became of ids."""
    parent = run.record.parent
    table_rows = sum(table.num_embeddings for table in info.tables)

    def total(what: str) -> int | None:
        found = [number_in(info.summary, "ids", table.name, what) for table in info.tables]
        return int(sum(number or 0 for number in found)) if any(number is not None for number in found) else None

    return {
        "metrics": None if parent is None else parent.metrics,
        "parts": [] if parent is None else parent.parts,
        "unknown": unknown_shares(info)[0],
        "table_rows": table_rows,
        "new_rows": table_rows if (new := total("new_rows")) is None else new,
        "gone_rows": total("expired"),
    }


def _prepared(walk: _Walk, name: str, path: Path, before: str | None) -> PackedDataset:
    """Returns the dataset of a day, which extends that of the day before it."""
    out, base = walk.place("data", name), None if before is None else walk.place("data", before)
    if not is_taken(out / MANIFEST):
        given: dict[str, Any] = {"skip_bad_rows": walk.read.skip_bad_rows, "base": base}
        if base is None:
            given = {**vars(walk.read), "schema": walk.schema, "base": NO_BASE}
        with progress_bar(quiet=not walk.verbose) as progress:
            announce = say if walk.verbose else None
            prepare = partial(run_prepare, "auto", str(path), out, announce=announce, progress=progress, **given)
            try:
                prepare()
            except OtherWorkError:  # a call before this one ended with an error of the day's rows, which were mended
                say(f"what was prepared of {name} is of other rows, or of another day before it: starting again")
                prepare(overwrite=True)
    dataset = PackedDataset.open(out, verify="sizes")
    rows = raw_rows(dataset)
    if rows is None or rows.day.parent_checksum != (None if base is None else PackedDataset.open(base).checksum):
        raise ValueError(
            f"{out} was prepared on another day than {before}: remove it and {walk.place('runs', name)}, and give the "
            "same command again"
        )
    return dataset


def _trained(walk: _Walk, name: str, dataset: PackedDataset, before: str | None) -> RunFolder:
    """Returns the finished run of a day. Raises _Interrupted if a signal stops it."""
    path = walk.place("runs", name)
    if is_taken(path / CONFIG):
        folder = resume(path, quiet=not walk.verbose)
    else:
        remove(path)  # a kill came before its first step
        overrides = [f"data={json.dumps(str(dataset.path))}", f"run={json.dumps(str(path))}"]
        if before is None:
            config = Path(walk.recipe or walk.chain / RECIPE_FILE)
            if not is_taken(config):
                run_init(str(dataset.path), out=walk.chain, objective=walk.read.objective)
        else:
            config = config_of(parent := walk.place("runs", before))
            overrides += [f"from_run={json.dumps(str(parent))}", *LATER]
        own, known = (load_config(config, [*overrides, *more]) for more in (walk.overrides, ()))
        if before is not None and own.model != known.model:
            other = next(option for option, value in own.model if getattr(known.model, option, None) != value)
            raise ValueError(
                f"--set model.{other}: a chain of days has one model, because a delta changes weights and ids alone: "
                "leave it out, or begin another chain with --out"
            )
        folder = train(own, quiet=not walk.verbose)
    if folder.record.status == "interrupted":
        raise _Interrupted(folder.record.signal)
    return folder


def _published(walk: _Walk, name: str, run: Run, *, is_first: bool) -> int:
    """Lets the served model be that of a day; returns the bytes of the delta, or of the first day's model."""
    model, delta, version = walk.chain / MODEL, walk.place("deltas", name), walk.place("versions", name)
    out, since = (version, None) if is_first else (delta, model)
    for path in (delta, version):  # from the first day on, for servers to be started with
        path.parent.mkdir(exist_ok=True)  # as the umask says, like what is in it
    if not is_taken(out):
        with progress_bar(quiet=not walk.verbose) as progress:
            run.export(out, since=since, progress=progress)
    if not is_taken(version):
        apply_delta(model, delta, version)
    if model.resolve() != version.resolve():
        remove(link := model.with_name(MODEL + PARTIAL_SUFFIX))
        link.symlink_to(version.relative_to(walk.chain))
        link.replace(model)
        sync_folder(walk.chain)
    return folder_bytes(out)


def _finish(walk: _Walk, chain: Chain, keep: int) -> None:
    """Removes what older days need no longer, and writes the page."""
    for day in chain.days[:-keep]:
        remove(walk.place("data", day.name))
        if is_taken((run := walk.place("runs", day.name)) / RUN):
            remove_run(run)
        else:  # what a call that was killed left of it
            remove(run)
    for version in (walk.chain / "versions").glob("*"):
        if not (walk.chain / MODEL).samefile(version):
            remove_unheld(version)
    if chain.days:
        newest = Run(walk.place("runs", chain.days[-1].name)).record
        write_page(walk.chain / REPORT, walk.chain.name, chain.days, newest.trained_for)
