"""Every JSON file that hotrow reads back, altered in every way there is a name for: refused, by file, or read in full.

Altered as it lies there, no change may pass: the file's checksum tells. Altered with the checksum made right again, a
change may pass, or is a ValueError that names the file; no other error may leave hotrow, whatever field is gone, has
another name, or holds something else.
"""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_prepare_laws import StopAfter

import hotrow
from hotrow.base.progress import ProgressLine
from hotrow.base.records import CHECKSUM, write_sealed
from hotrow.cli import tools
from hotrow.config.load import load_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.prepare.prepare import Encoder
from hotrow.data.sources.registry import open_source
from hotrow.export.inputs import load_module
from hotrow.kernels.ops import backend
from hotrow.run import ending, parts, runs
from hotrow.run.folder import RunFolder
from hotrow.run.interrupt import Interrupt
from hotrow.run.trainer import Training
from hotrow.setup.setup import Setup
from loops import looped
from mutate_sealed import Change, changed, changes
from prepare_data import SCHEMA, make_rows, to_table

NEW_ROWS = to_table(make_rows(40, seed=1))
tiers_are_native = pytest.mark.skipif(backend().name != "native", reason="tables in tiers need the native module")


class Case(NamedTuple):
    """A file in the folder of a dataset, a run or an export, and what hotrow does with it."""

    folder: Path
    file: Path
    read: Callable[[], Any]


def config_of(data: Path, run: Path, **more: Any) -> dict[str, Any]:
    return {
        "data": str(data),
        "run": str(run),
        "model": {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"batch_size": 50, "epochs": 2, "max_steps": 12, "eval_every": 5, "log_every": 4, "threads": 1},
        "optimizer": {"dense": {"name": "adam"}, "sparse": {"name": "adam"}},
        "checkpoint": {"every": 3, "keep_last": 2},
        **more,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a run in memory and one in tiers with hot turns, an export, and work that was stopped."""
    folder = tmp_path_factory.mktemp("altered")
    opened = open_source("frame", to_table(make_rows(600)), schema=SCHEMA)
    prepare(opened, folder / "data", Options(rows_per_part=200, rows_per_block=100))
    hot = {"schedule": "fixed", "budget": "20KB", "small_table": 0}
    memory = {"dram": "60KB", "ssd": str(folder), "force": True}
    for name, more in (("plain", {"hot": hot}), ("tiered", {"memory": memory})):
        (folder / f"{name}.yaml").write_text(json.dumps(config_of(folder / "data", folder / name, **more)))
        runs.train(load_config(folder / f"{name}.yaml"), quiet=True)
    hotrow.load(folder / "plain").export(folder / "export")
    hotrow.load(folder / "tiered").export(folder / "delta", since=folder / "export")
    hotrow.apply_delta(folder / "export", folder / "delta", folder / "forward")
    for stage, count in (("count", 2), ("encode", 5)):
        with pytest.MonkeyPatch.context() as patch:
            StopAfter(patch, stage, count)
            with pytest.raises(Interrupted):
                prepare(again(), folder / stage, STOPPED)
    return folder


STOPPED = Options(rows_per_part=100, rows_per_block=100, rows_per_chunk=100)


def again() -> Any:
    return open_source("frame", to_table(make_rows(600)), schema=SCHEMA)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def use(run: Path, out: Path) -> None:
    with closing(hotrow.load(run)) as loaded:
        loaded.predict(NEW_ROWS)
        loaded.evaluate("val")
        shutil.rmtree(out, ignore_errors=True)
        loaded.export(out)


def tell(run: Path) -> None:
    """What `hotrow train --resume`, `eval` and notebooks say of a run."""
    tools.check(run)
    with closing(hotrow.load(run)) as loaded:
        loaded.summary()
        loaded.closing_lines("rows", loaded.next_commands())
        loaded.evaluate("val")
    if loaded.record.status == "finished":
        runs.resume(run, quiet=True)


def restore(run: Path) -> None:
    """What `--resume` does, without a step."""
    config = load_config(run / "config.yaml")
    dataset = PackedDataset.open(config.data)
    setup, folder = Setup.decide(config, dataset, run), RunFolder.open(run)
    with closing(Training(setup, folder, Interrupt(), ProgressLine(quiet=True))) as training:
        parts.restore(training, newest(run))
        ending.finish(training)


def scorer(folder: Path) -> None:
    load_module(folder / "score.py").Scorer(folder)


def bring_forward(export: Path, delta: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    hotrow.apply_delta(export, delta, out)


def go_on_from(export: Path, run: Path, out: Path) -> None:
    """Write the next delta."""
    shutil.rmtree(out, ignore_errors=True)
    with closing(hotrow.load(run)) as loaded:
        loaded.export(out, since=export)


def read_dataset(folder: Path) -> None:
    tools.check(folder)
    for _ in Encoder.load(folder).batches(NEW_ROWS):
        pass


def go_on(made: Path, stage: str) -> None:
    """Prepare in a copy, since it removes what it went on from."""
    shutil.rmtree(made / "copy", ignore_errors=True)
    shutil.copytree(made / stage, made / "copy")
    try:
        prepare(again(), made / "copy", STOPPED)
    except ValueError as error:
        raise ValueError(str(error).replace(f"{made / 'copy'}", f"{made / stage}")) from None


def cases(made: Path) -> dict[str, Case]:
    """By a name of the file, and of what reads it if several do."""
    data, plain, tiered, export, delta, forward, count, encode = (
        made / name for name in ("data", "plain", "tiered", "export", "delta", "forward", "count", "encode")
    )
    out = made / "out"
    work = ".prepare/prepare.json"
    return {
        "dataset": Case(data, data / "dataset.json", lambda: read_dataset(data)),
        "vocabulary": Case(plain, plain / "encoder/dataset.json", lambda: use(plain, out)),
        "manifest": Case(plain, newest(plain) / "manifest.json", lambda: use(plain, out)),
        "manifest, resumed": Case(plain, newest(plain) / "manifest.json", lambda: restore(plain)),
        "chains": Case(tiered, newest(tiered) / "manifest.json", lambda: use(tiered, out)),
        "chains, resumed": Case(tiered, newest(tiered) / "manifest.json", lambda: restore(tiered)),
        "run": Case(plain, plain / "run.json", lambda: tell(plain)),
        "run in tiers": Case(tiered, tiered / "run.json", lambda: tell(tiered)),
        "export": Case(export, export / "export.json", lambda: tools.check(export)),
        "delta": Case(delta, delta / "delta.json", lambda: bring_forward(export, delta, out)),
        "chain": Case(forward, forward / "chain.json", lambda: go_on_from(forward, plain, out)),
        "rows": Case(count, count / ".prepare/rows/rows.json", lambda: go_on(made, "count")),
        "work, counting": Case(count, count / work, lambda: go_on(made, "count")),
        "work, encoding": Case(encode, encode / work, lambda: go_on(made, "encode")),
        "parts": Case(encode, encode / ".prepare/parts.json", lambda: go_on(made, "encode")),
    }


NAMES = [
    *("dataset", "vocabulary", "manifest", "manifest, resumed", "chains", "chains, resumed", "run", "run in tiers"),
    *("export", "delta", "chain", "rows", "work, counting", "work, encoding", "parts"),
]


def flipped(text: bytes, generator: random.Random) -> bytes:
    """Any bit of `text` changed."""
    at = generator.randrange(8 * len(text))
    return text[: at // 8] + bytes([text[at // 8] ^ 1 << at % 8]) + text[at // 8 + 1 :]


def put(path: Path, text: bytes) -> None:
    """Make it the file's content, and not that of others which are hard links to it."""
    path.unlink()
    path.write_bytes(text)


def refused(case: Case, *, may_pass: bool) -> str:
    """What is wrong with how hotrow takes the file as it is now; empty if nothing."""
    try:
        case.read()
    except (ValueError, OSError) as error:
        named = case.file.name in str(error) or str(case.folder) in str(error)
        return "" if named and "pydantic" not in str(error) else f"{type(error).__name__} without a name: {error}"
    except Exception as error:  # which one is what this is about
        return f"{type(error).__name__}: {error}"
    return "" if may_pass else "it passed"


def faults(case: Case, num_forged: int, num_plain: int) -> list[str]:
    """What goes wrong with so many changes whose checksum is made right, and so many without."""
    text, generator, found = case.file.read_bytes(), random.Random(case.file.name), []
    fields = json.loads(text)
    everything = list(changes(fields))
    kept = {path: path.read_bytes() for path in case.folder.rglob("*.json")}  # whoever reads one may write others

    def altered(change: Change) -> bytes:
        return json.dumps(changed(fields, change), indent=1, ensure_ascii=False).encode() + b"\n"

    try:
        for change in generator.sample(everything, min(num_plain, len(everything))):
            put(case.file, altered(change))
            found += [f"{change}: {fault}" for fault in [refused(case, may_pass=False)] if fault]
        for _ in range(num_plain):
            put(case.file, flipped(text, generator))
            found += [f"a bit: {fault}" for fault in [refused(case, may_pass=False)] if fault]
        del fields[CHECKSUM]
        everything = list(changes(fields))
        for change in generator.sample(everything, min(num_forged, len(everything))):
            write_sealed(case.file, changed(fields, change))
            found += [f"{change}, sealed: {fault}" for fault in [refused(case, may_pass=True)] if fault]
            for path, before in kept.items():
                put(path, before)
    finally:
        for path, before in kept.items():
            put(path, before)
    return found


FORGED = {"dataset": 20, "export": 60, "delta": 30, "chain": 10, "run": 12, "manifest": 10}
"""Changes of the quick test with the checksum made right; of others 4, which take up to a tenth of a second each."""


@tiers_are_native
@pytest.mark.parametrize("name", NAMES)
def test_an_altered_file_is_refused(made: Path, name: str) -> None:
    case = cases(made)[name]
    case.read()
    assert faults(case, FORGED.get(name, 4), 10) == []


@tiers_are_native
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_more_altered_files_are_refused(made: Path, name: str) -> None:
    """A thousand changes to each file, which is all there are of the smaller ones."""
    assert faults(cases(made)[name], 1000, 300) == []


def test_a_rate_of_a_table_cannot_be_turned(made: Path) -> None:
    """-1 trained away from the data, without a word."""
    case = cases(made)["manifest, resumed"]
    text = case.file.read_bytes()
    assert b'"lr_scale": 1.0' in text
    for sealed in (False, True):
        try:
            put(case.file, text.replace(b'"lr_scale": 1.0', b'"lr_scale": -1.0'))
            if sealed:
                fields = json.loads(case.file.read_bytes())
                del fields[CHECKSUM]
                write_sealed(case.file, fields)
            with pytest.raises(ValueError, match=r"lr_scale is|differs from its checksum"):
                case.read()
        finally:
            put(case.file, text)


def test_an_edited_export_is_refused_by_its_script(made: Path) -> None:
    """score.py, which knows nothing of hotrow."""
    path, text = made / "export/export.json", (made / "export/export.json").read_bytes()
    scorer(made / "export")
    for altered in (text.replace(b'"missing": 0.0', b'"missing": 1.0'), text.replace(b'"checksum"', b'"checksun"')):
        try:
            put(path, altered)
            with pytest.raises(ValueError, match=r"export\.json differs from its checksum"):
                scorer(made / "export")
        finally:
            put(path, text)


@looped("line", [b"", b"{", b"[]", b'{"kind": 1, "step": 2}', b'{"kind": "eval"}', b"\xff", b"[" * 9**5])
def test_a_damaged_line_of_metrics_is_named(made: Path, line: bytes) -> None:
    path = made / "plain/metrics.jsonl"
    text = path.read_bytes()
    first, rest = text.split(b"\n", 1)
    try:
        path.write_bytes(first + b"\n" + line + b"\n" + rest)
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: it was damaged or edited"):
            RunFolder.open(made / "plain").measurements()
    finally:
        path.write_bytes(text)
