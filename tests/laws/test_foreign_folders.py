"""A dataset, a run, a checkpoint or an export from anywhere: nothing in it leads a verb outside of its folder.

Every file and folder of an artifact, as it lies on disk, is put outside and a link to it in its place; or a link that
leads nowhere, a named pipe, a device, or a folder. Every verb then ends with code 2 and names the place, and what lies
outside stays as it was. What an artifact holds is read from the disk, so that a new file is in the test by existing.
"""

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

import mutate
from hotrow.kernels.ops import backend
from hotrow.run.checkpoint_files import crc32, read_manifest
from hotrow.run.folder import RunFolder
from loops import looped
from mutate_sealed import PREPARE, faults_of_case, make_artifacts, newest
from resealed import reseal

pytestmark = pytest.mark.skipif(backend().name != "native", reason="tables in tiers need the native module")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A dataset, a run in tiers with two checkpoints, and an export, as the verbs make them."""
    folder = tmp_path_factory.mktemp("foreign")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_artifacts()
        (Path("run") / ".lock").touch()
        yield folder


VERBS: dict[str, tuple[str, ...]] = {
    "run": (
        *("train --resume run --set train.max_steps=10", "eval run", "predict run rows.csv --out scores.csv"),
        *("export run --out export-2", "check run", "report run", "runs --clean run", "inspect run"),
    ),
    "data": (
        *("train config.yaml --set run=run-2", "train --resume run --set train.max_steps=10", "eval run --split val"),
        *("check data", "inspect data", "plan config.yaml", f"{PREPARE} --overwrite", PREPARE),
    ),
    "export": ("check export",),
}
KINDS = ("link", "dangling", "pipe", "device", "folder")


class Place(NamedTuple):
    """A file or folder of an artifact."""

    artifact: str
    name: str


def places(made: Path) -> list[Place]:
    return [Place(a, str(p.relative_to(made / a))) for a in VERBS for p in sorted((made / a).rglob("*"))]


def seen(folder: Path) -> dict[str, Any]:
    """What a verb may not change."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        what = path.lstat()
        found[str(path)] = (what.st_mode, what.st_mtime_ns, path.read_bytes() if path.is_file() else None)
    return found


def put(path: Path, kind: str, outside: Path) -> None:
    """Moves what is at `path` out of its folder, and puts something else in its place."""
    path.rename(outside / "it")
    if kind == "link":
        path.symlink_to(outside / "it")
    elif kind == "dangling":
        path.symlink_to(outside / "absent")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        except PermissionError:
            path.symlink_to("/dev/zero")


def fault(made: Path, place: Place, kind: str, verb: str) -> str:
    """What is wrong with how the verb takes the changed artifact; empty if nothing. All is put back."""
    outside, kept = made / "outside", made / "kept"
    shutil.copytree(made / place.artifact, kept, symlinks=True)
    outside.mkdir()
    (outside / "other").write_text("precious")
    path = made / place.artifact / place.name
    try:
        put(path, kind, outside)
        before = seen(outside)
        outcome = mutate.run_command(verb.split())
        if seen(outside) != before:
            return "something outside has changed"
        if outcome.faults:
            return f"{outcome.faults} {outcome.err[-300:]}"
        if outcome.code == 0 and kind == "folder" and (verb.split()[0] != "check" or "tensorboard" in place.name):
            return ""  # a file that this verb does not read
        named = place.name in outcome.err or f"{place.artifact} already holds" in outcome.err
        named = named or "is a run, and inspect reads data" in outcome.err
        return "" if outcome.code == 2 and named else f"code {outcome.code}: {outcome.err[-300:]}"
    finally:
        for folder in (outside, made / place.artifact, *(made / name for name in ("run-2", "export-2"))):
            shutil.rmtree(folder, ignore_errors=True)
        (made / "scores.csv").unlink(missing_ok=True)
        kept.rename(made / place.artifact)


def cases(made: Path) -> list[tuple[Place, str, str]]:
    """All that can be put in the place of a file or folder, and who may meet it there."""
    return [
        (place, kind, verb)
        for place in places(made)
        for kind in KINDS
        if kind != "folder" or (made / place.artifact / place.name).is_file()
        for verb in VERBS[place.artifact]
    ]


def test_nothing_leads_out_of_a_folder(made: Path) -> None:
    """Every place once, met by a verb and a kind that are drawn, and all that first looks for a dataset; all of them
    together below.
    """
    every = cases(made)
    random.Random(5).shuffle(every)
    dataset = [case for case in every if case[0] == ("data", "dataset.json")]
    chosen = {*{case[0]: case for case in every}.values(), *dataset}
    assert [(case, found) for case in chosen if (found := fault(made, *case))] == []


@pytest.mark.slow
def test_nothing_leads_out_of_a_folder_in_all_cases(made: Path) -> None:
    assert [(case, found) for case in cases(made) if (found := fault(made, *case))] == []


def test_folders_that_nest_too_deep_are_refused(made: Path) -> None:
    """Python follows no tree of a thousand levels: to walk it or to remove it was a bug in hotrow."""
    deep = made / "run" / "deep"
    levels = [deep / "/".join("a" * level) for level in range(1200)]
    try:
        for path in levels:
            path.mkdir()
        for verb in ("check run", "runs --clean run", "report run"):
            outcome = mutate.run_command(verb.split())
            assert outcome.code == 2 and "run/deep" in outcome.err and not outcome.faults, (verb, outcome)
    finally:
        for path in reversed(levels):
            path.rmdir()


def test_a_folder_that_is_itself_a_link_is_taken(made: Path, tmp_path: Path) -> None:
    """Users link their data folders."""
    for artifact in VERBS:
        (tmp_path / artifact).symlink_to(made / artifact)
        outcome = mutate.run_command(["check", str(tmp_path / artifact)])
        assert outcome.code == 0, outcome.err


def test_a_logged_line_break_is_no_new_line(made: Path) -> None:
    """A foreign config chose what the next line of log.txt says."""
    folder = RunFolder.open(made / "run")
    before = (made / "run/log.txt").read_bytes()
    try:
        folder.log("rows in /disk\n2026-01-01 forged\r\x1b[2Jforged\u2028forged\x85 \udcff")
        written = (made / "run/log.txt").read_bytes().removeprefix(before).decode()
    finally:
        (made / "run/log.txt").write_bytes(before)
    assert len(written.splitlines()) == 1 and written.endswith("\n") and written.count("forged") == 3
    assert "\\n" in written and "\x1b" not in written


def test_files_and_folders_are_for_their_owner_alone(made: Path) -> None:
    """Under the usual umask, which the tests run with: what an open gives is 0644, and a mkdir 0755."""
    umask = os.umask(0o022)
    os.umask(umask)
    assert umask & 0o077 != 0o077, "this umask hides what is tested"
    for artifact in ("data", "run"):
        for path in (made / artifact, *(made / artifact).rglob("*")):
            if path.name != ".lock":  # the fixture's
                assert path.stat().st_mode & 0o077 == 0, path


def links_of(made: Path) -> list[Path]:
    """The files of the newest checkpoint that hold rows by their ids, the weights."""
    return sorted((newest(made / "run") / "embedding").rglob("*.safetensors"))


def two_swapped(ids: Any) -> None:
    ids[:2] = ids[:2].flip(0)


def negative(ids: Any) -> None:
    ids[0] = -5


def too_large(ids: Any) -> None:
    ids[-1] = 2**40


def twice(ids: Any) -> None:
    ids[1] = ids[0]


@looped("change", [two_swapped, negative, too_large, twice])
def test_row_ids_that_do_not_rise_are_refused_by_every_verb(made: Path, change: Callable[[Any], None]) -> None:
    """Export wrote wrong weights from them, and check called them whole. All checksums are right."""
    file = next(path for path in links_of(made) if len(load_file(path)["rows"]) > 1)
    checkpoint = file.parents[2]
    shutil.copytree(made / "run", made / "kept")
    try:
        tensors = load_file(file)
        change(tensors["rows"])
        file.unlink()  # other checkpoints have the same file
        save_file(tensors, file)
        name = str(file.relative_to(checkpoint))
        record = {"num_bytes": file.stat().st_size, "crc32": crc32(file)}
        reseal(checkpoint / "manifest.json", lambda manifest: manifest["files"].update({name: record}))
        assert read_manifest(checkpoint).files[name].crc32 == record["crc32"]
        for verb in (*VERBS["run"][:5], f"check {checkpoint}"):
            outcome = mutate.run_command(verb.split())
            assert outcome.code == 2 and name in outcome.err and not outcome.faults, (verb, outcome)
            assert not (made / "export-2").exists()
    finally:
        shutil.rmtree(made / "run")
        (made / "kept").rename(made / "run")


def damage(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 4
    path.unlink()
    path.write_bytes(text)


def test_check_reads_every_file_that_is_read_back(made: Path) -> None:
    """What is only written (a log, pages for people) has no checksum."""
    only_written = ("log.txt", "report.html", "metrics.jsonl", "config.yaml", ".lock")
    shutil.copytree(made / "run", made / "kept")
    try:
        for place in places(made):
            path = made / "run" / place.name
            if place.artifact != "run" or path.is_dir() or path.name in only_written or "tensorboard" in place.name:
                continue
            damage(path)
            outcome = mutate.run_command(["check", "run"])
            assert outcome.code == 2 and place.name in outcome.err, (place, outcome)
            shutil.copy2(made / "kept" / place.name, path)
        (made / "run" / "metrics.jsonl").unlink()
        outcome = mutate.run_command(["check", "run"])
        assert outcome.code == 2 and "metrics.jsonl is missing" in outcome.err, outcome
        for name, text in (("metrics.jsonl", b"{\n"), ("config.yaml", b"train: {epochs: many}\n")):
            (made / "run" / name).write_bytes(text)
            assert mutate.run_command(["check", "run"]).code == 2, name
            shutil.copy2(made / "kept" / name, made / "run" / name)
    finally:
        shutil.rmtree(made / "run")
        (made / "kept").rename(made / "run")


def test_a_run_sealed_again_after_a_change_is_refused_or_read_alike(made: Path) -> None:
    assert [fault for number in range(4) for fault in faults_of_case(7, number)] == []


@pytest.mark.slow
def test_many_more_runs_sealed_again_are_refused_or_read_alike(made: Path) -> None:
    assert [fault for number in range(500) for fault in faults_of_case(1, number)] == []
