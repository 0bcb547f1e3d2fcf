"""Law: an export and the deltas after it are the whole export of that day, to the byte; other deltas are refused.

The whole export of a day is that of a run, or a made-up one, with tables and ids that change, come and go at random.
What a delta holds is compared with all rows and ids of both days, side by side.
"""

import json
import os
import random
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

import mutate
import mutate_sealed
from forked import resident_bytes, run_forked
from hotrow.cli import tools
from hotrow.data.chunk import Keys, keys_to_arrow
from hotrow.data.native import hash_keys
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, write_vocabulary
from hotrow.export import delta as deltas
from hotrow.export import export as exports
from hotrow.export.delta import apply_delta, write_delta
from hotrow.export.export import Description, Whole
from hotrow.export.rows import FORMATS, StoredRows
from hotrow.run.checkpoint_files import write_tensors
from resealed import reseal

DIM = 3
Day = dict[str, tuple[dict[Any, int], np.ndarray]]
"""By table: the row of each id, and the weights."""
MODEL = {"name": "dlrm", "num_dense": 0, "top_mlp": [4]}


class Pieces:
    """Rows of a table, five at a time."""

    dtype = torch.float32

    def __init__(self, weights: np.ndarray) -> None:
        self.shape, self._weights = torch.Size(weights.shape), torch.from_numpy(weights)

    def pieces(self) -> Iterator[slice]:
        return (slice(start, start + 5) for start in range(0, len(self._weights), 5))

    def read(self, piece: slice) -> Tensor:
        return self._weights[piece]


def keys_of(ids: list[Any]) -> Keys:
    if not ids or isinstance(ids[0], int):
        return Keys(np.array(ids, np.int64))
    return Keys(np.frombuffer(b"".join(ids), np.uint8), np.cumsum([0, *map(len, ids)]))


def as_vocabulary(path: Path, rows: dict[Any, int], kind: Any, num_rows: int, accesses: int) -> Vocabulary:
    """A vocabulary of these ids in `path`, written in two pieces."""
    hashes = hash_keys(keys_of([*rows])).tolist() if rows else []
    order = [key for _, key in sorted(zip(hashes, rows, strict=True))]
    halves = [half for half in (order[: len(order) // 2], order[len(order) // 2 :]) if half]
    pieces = [
        Entries(hash_keys(keys_of(half)), np.array([rows[key] for key in half], np.int64), keys_of(half))
        for half in halves
    ]
    pieces = [each if kind == "bytes" else each._replace(strings=None) for each in pieces]
    summary = TableSummary(num_rows, len(rows), 0, len(rows), accesses * len(rows))
    write_vocabulary(path, pieces, summary, key_kind=kind)
    return Vocabulary.open(path)


def ids_of(path: Path) -> dict[Any, int]:
    """The row of each id in a vocabulary."""
    pieces = [(keys_to_arrow(keys).to_pylist(), rows.tolist()) for keys, rows in Vocabulary.open(path).entries()]
    return {key: row for keys, rows in pieces for key, row in zip(keys, rows, strict=True)}


def described(to: Whole, name: str, rows: dict[Any, int], weights: Any) -> dict[str, Any]:
    """What export.json says of a table, as far as a delta needs it."""
    ids = {"file": f"encoder/vocab/{name}", "num_keys": len(rows), "missing_row": 0}
    return {"stored_as": to.form, "num_embeddings": len(weights), "vocabulary": None if name == "plain" else ids}


def write(to: Whole, day: Day, number: int, *, accesses: int = 3, **changes: Any) -> Description:
    """An export of `day`: a table of text ids, one of integers and one without a vocabulary."""
    description = Description(
        created_by="a test",
        run=f"run-{number}",
        step=number,
        dataset={},
        model={**MODEL, **changes},
        dense=(),
        features=tuple({"name": name} for name in day),
        tables=tuple(described(to, name, *own) for name, own in day.items()),
        files={},
    )
    to.begin(description, 0)
    dense = torch.full((4, 2), float(number))
    files = {"model.safetensors": write_tensors(to.folder / "model.safetensors", {"w": dense})}
    for name, (rows, weights) in day.items():
        file = f"tables/{name}.safetensors"
        stored: Any = Pieces(weights)
        if to.form != "float32":
            stored = StoredRows(Pieces(np.nan_to_num(weights)), to.form, name)
        files[file] = to.table(file, f"{name}.weight", stored)
        if name != "plain":
            kind = "bytes" if name == "text" else "int"
            with TemporaryDirectory() as folder:
                own = as_vocabulary(Path(folder) / name, rows, kind, len(weights), accesses)
                files[f"encoder/vocab/{name}"] = to.vocabulary(f"encoder/vocab/{name}", own)
    texts = {"README.md": "the same", f"transforms/of_{number % 2}.py": "x"}
    for name, text in texts.items():
        (to.folder / name).write_text(text)
        files[name] = exports.file_record(to.folder / name)
    description = replace(description, files=files)
    exports.DOCUMENT.write(to.folder / "export.json", description)
    return description


def write_whole(out: Path, day: Day, number: int, form: Any = "float32", **changes: Any) -> Path:
    exports.write_whole(out, lambda to: write(to, day, number, **changes), rows=form)
    return out


def next_day(day: Day, rng: np.random.Generator, number: int) -> Day:
    """Some rows change, some by the sign of a zero or a NaN alone; ids come, go, and take rows of others."""
    found: Day = {}
    for name, (old, weights) in day.items():
        rows, more = dict(old), int(rng.integers(-1 if number == 3 else 0, 9))
        size = max(len(weights) + more, 1)
        new = np.zeros((size, DIM), np.float32)
        new[: len(weights)] = weights[:size]
        new[len(weights) :] = rng.normal(size=(max(size - len(weights), 0), DIM))
        for row in rng.integers(0, size, 4):
            new[row, rng.integers(DIM)] = rng.choice([0.0, -0.0, np.nan, 1.5])
        rows = {key: row for key, row in rows.items() if row < size and rng.random() > 0.2}
        taken = set(rows.values())
        for row in sorted(set(range(1, size)) - taken):
            if rng.random() < 0.8:
                value = int(rng.integers(-(2**62), 2**62)) if rng.random() < 0.5 else int(rng.integers(0, 30))
                key: Any = value if name != "text" else ("\u00e4" * (value % 5)).encode() + str(value % 1000).encode()
                rows |= {} if key in rows else {key: row}
        found[name] = rows, new
    return found


def days(count: int, seed: int = 0) -> list[Day]:
    rng = np.random.default_rng(seed)
    found = [{name: ({}, rng.normal(size=(9, DIM)).astype(np.float32)) for name in ("text", "int", "plain")}]
    for number in range(1, count):
        found.append(next_day(found[-1], rng, number))
    return found


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Everything goes through in several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "IDS_AT_ONCE", 3)
        patch.setattr(deltas, "BYTES_AT_ONCE", 4 * DIM * 2)
        yield


def files_of(folder: Path) -> dict[str, bytes]:
    """Files of an export, but for chain.json, which a whole one does not have."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found.pop("chain.json", None)
    return found


def bring_forward(folder: Path, delta: Path) -> None:
    """Makes the next export beside it and lets it take its place."""
    apply_delta(folder, delta, new := folder.with_name("next"))
    shutil.rmtree(folder)
    new.rename(folder)


Chain = tuple[list[Path], list[Path]]


def make_chain(folder: Path, count: int = 4, seed: int = 0, form: Any = "float32") -> Chain:
    """Whole exports of the days, and the deltas between them, numbered."""
    wholes, made = [], []
    for number, day in enumerate(days(count, seed)):
        wholes.append(write_whole(folder / f"whole-{number}", day, number, form))
        if number == 0:
            shutil.copytree(wholes[0], folder / "upstream")
        else:
            out = folder / f"delta-{number}"
            write_delta(folder / "upstream", out, lambda to, day=day, number=number: write(to, day, number))
            made.append(out)
            bring_forward(folder / "upstream", out)
    return wholes, made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def base(made: Chain, tmp_path: Path) -> Path:
    """A copy of the first export."""
    return Path(shutil.copytree(made[0][0], tmp_path / "base"))


@pytest.mark.slow_but("0-float32", "1-bf16", "2-int8")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_an_export_and_its_deltas_are_the_whole_export(tmp_path: Path, seed: int, form: str) -> None:
    wholes, made = make_chain(tmp_path, 5, seed, form)
    for number, (whole, delta) in enumerate(zip(wholes[1:], made, strict=True), 1):
        previous = wholes[number - 1] if number == 1 else tmp_path / f"new-{number - 1}"
        new = tmp_path / f"new-{number}"
        kept = files_of(previous)
        assert apply_delta(previous, delta, new)["number"] == number
        assert files_of(new) == files_of(whole)
        assert files_of(previous) == kept
        assert (new / "README.md").samefile(previous / "README.md"), "what stays takes no room"
        assert tools.check(new)["kind"] == "export"
        assert tools.check(delta)["kind"] == "delta"


def test_a_delta_holds_what_differs_and_nothing_else(made: Chain) -> None:
    for before, after, delta in zip(made[0], made[0][1:], made[1], strict=False):
        described = json.loads((delta / "delta.json").read_text())
        for name in ("text", "int", "plain"):
            old, new = (load_file(each / f"tables/{name}.safetensors")[f"{name}.weight"] for each in (before, after))
            differ = {
                row: weights.tobytes()
                for row, weights in enumerate(new)
                if row >= len(old) or weights.tobytes() != old[row].tobytes()
            }
            path = delta / f"rows/{name}.parquet"
            found = pq.read_table(path).to_pydict() if path.exists() else {"row": [], "weight": []}
            assert dict(zip(found["row"], found["weight"], strict=True)) == differ
            assert described["tables"][name]["rows"] == len(differ)
        for name in ("text", "int"):
            old_ids, new_ids = ({*ids_of(each / f"encoder/vocab/{name}").items()} for each in (before, after))
            path = delta / f"ids/{name}.parquet"
            ids = pq.read_table(path).to_pydict() if path.exists() else {"key": [], "row": [], "gone": []}
            found = {*zip(ids["key"], ids["row"], ids["gone"], strict=True)}
            gone = {(*each, True) for each in old_ids - new_ids}
            assert found == {(*each, False) for each in new_ids - old_ids} | gone


def test_one_id_goes_and_two_come(tmp_path: Path) -> None:
    """The slot of one that goes is used again."""
    rows = {f"id {i}".encode(): i for i in range(1, 1000)}
    weights = np.zeros((1002, DIM), np.float32)
    later = {key: row for key, row in rows.items() if row != 7} | {b"new": 7, b"newer": 1000}
    base = write_whole(tmp_path / "base", {"text": (rows, weights)}, 0)
    whole = write_whole(tmp_path / "whole", {"text": (later, weights)}, 2)
    write_delta(base, tmp_path / "delta", lambda to: write(to, {"text": (later, weights)}, 2))
    ids = pq.read_table(tmp_path / "delta/ids/text.parquet").to_pylist()
    assert sorted(ids, key=lambda each: each["key"]) == [
        {"key": b"id 7", "row": 7, "gone": True},
        {"key": b"new", "row": 7, "gone": False},
        {"key": b"newer", "row": 1000, "gone": False},
    ]
    assert not (tmp_path / "delta/files/encoder/vocab/text").exists()
    bring_forward(base, tmp_path / "delta")
    assert files_of(base) == files_of(whole)


def test_a_vocabulary_that_counts_other_accesses_comes_whole(tmp_path: Path) -> None:
    """Its ids and their rows are the same."""
    one, two = days(3)[1:]
    two = {name: (one[name][0], two[name][1][: len(one[name][1])]) for name in two}
    base, whole = write_whole(tmp_path / "base", one, 0), write_whole(tmp_path / "whole", two, 1, accesses=7)
    write_delta(base, tmp_path / "delta", lambda to: write(to, two, 1, accesses=7))
    bring_forward(base, tmp_path / "delta")
    assert files_of(base) == files_of(whole)


def test_rows_at_another_place_in_their_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = days(3)[1:]
    with monkeypatch.context() as patch:
        patch.setattr(exports, "ALIGNMENT", 8)
        base = write_whole(tmp_path / "base", one, 0)
    write_delta(base, tmp_path / "delta", lambda to: write(to, two, 1))
    refused(base, tmp_path / "delta", r"its rows are not at byte \d+; take a whole export")


@pytest.mark.slow_but(" --rows int8")
@pytest.mark.parametrize("form", ["", " --rows int8"])
def test_three_days_at_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Each day has more ids than the one before, so tables and vocabularies grow; users of earlier days expire."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for day in (1, 2, 3):
        user, item = rng.integers(100 * (day - 1), 200 * day, 900), rng.integers(0, 60 * day, 900)
        rows = [f"{int(i % 3 == 0)},u{u},{i},{u % 7}" for u, i in zip(user, item, strict=True)]
        Path(f"day{day}.csv").write_text("\n".join(["click,user,item,price", *rows]))
    ids = [{"column": "user", "type": "text"}, {"column": "item", "type": "int"}]
    schema = {"version": 1, "label": "click", "dense": ["price"], "categorical": ids, "split": {"kind": "random"}}
    schema["tables"] = {"user": {"expire": {"unused_days": 1}}}
    Path("schema.yaml").write_text(json.dumps(schema))
    model = {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}
    train = {"batch_size": 50, "max_steps": 8, "threads": 1}
    Path("r.yaml").write_text(json.dumps({"data": "data1", "run": "run1", "model": model, "train": train}))
    for words in (
        "prepare csv day1.csv --schema schema.yaml --out data1",
        "train r.yaml",
        f"export run1 --out clicks1{form}",
        "export run1 --out whole1",
        *(
            word.format(day=day, before=day - 1)
            for day in (2, 3)
            for word in (
                "prepare csv day{day}.csv --base data{before} --out data{day}",
                "train --from run{before} --set data=data{day} --set run=run{day}",
                "export run{day} --since clicks{before} --out delta{before}",
                "apply clicks{before} delta{before} --out clicks{day}",
                "export run{day} --out whole{day}" + form,
            )
        ),
    ):
        outcome = mutate.run_command(words.split())
        assert outcome.code == 0, (words, outcome.err)
    for number in (1, 2):
        assert files_of(Path(f"clicks{number + 1}")) == files_of(Path(f"whole{number + 1}"))
        changes = json.loads(Path(f"delta{number}/delta.json").read_text())["tables"]
        assert changes["user"]["ids"] > 50 and changes["item"]["ids"] > 20
        first, last = ({*ids_of(Path(f"whole{day}/encoder/vocab/user"))} for day in (number, number + 1))
        told = pq.read_table(f"delta{number}/ids/user.parquet").to_pydict()
        gone = {key for key, is_gone in zip(told["key"], told["gone"], strict=True) if is_gone}
        assert gone == first - last and len(gone) > 50
        parent = json.loads(Path(f"run{number + 1}/run.json").read_text())["parent"]
        assert parent["rows_reborn"]["user"] > 50
        assert len({*told["row"]}) < len(told["row"]), "new ids have the rows of those that are gone"
    assert mutate.run_command(["train", "r.yaml", "--set", "run=other", "--set", "model.embedding_dim=8"]).code == 0
    outcome = mutate.run_command(["export", "other", "--since", "clicks3", "--out", "delta"])
    assert outcome.code == 2 and "its embedding_dim is 4, that of run other is 8" in outcome.err


KILLED = """
import os, signal, sys, threading
from hotrow.export.delta import apply_delta
export, delta, out, delay_s = sys.argv[1:]
threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
apply_delta(export, delta, out)
os._exit(0)
"""


@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_an_apply_that_was_killed_is_made_again(made: Chain, base: Path, tmp_path: Path, num_kills: int) -> None:
    """At any moment, with no more left of it than what the next call removes."""
    new, out, rng, killed, most_s = files_of(made[0][1]), tmp_path / "new", random.Random(0), 0, 0.1
    while killed < num_kills:
        done = run_forked(KILLED, base, made[1][0], out, delay_s := rng.uniform(0, most_s))
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        killed += done.returncode != 0
        most_s = 0.9 * max(most_s, 0.01) if done.returncode == 0 else max(most_s, 1.1 * delay_s)
        if not out.exists():
            apply_delta(base, made[1][0], out)
        assert files_of(out) == new and {path.name for path in tmp_path.iterdir()} == {"base", "new"}
        shutil.rmtree(out)


@pytest.mark.parametrize("num_cases", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_a_delta_of_any_content_is_an_error_or_the_next_export(
    made: Chain, base: Path, tmp_path: Path, num_cases: int
) -> None:
    """With its checksums made right again, as anybody can: soon, without memory, and with nothing left on disk."""
    new, rng, before = files_of(made[0][1]), random.Random(0), 0
    for number in range(num_cases):
        delta = Path(shutil.copytree(made[1][0], tmp_path / "delta"))
        what = change_delta(delta, rng)
        began = time.monotonic()
        with suppress(ValueError):
            apply_delta(base, delta, tmp_path / "new")
            assert exports.verify_export(tmp_path / "new"), (number, what)
            assert files_of(tmp_path / "new") == new or what.startswith("files/export.json"), (number, what)
            shutil.rmtree(tmp_path / "new")
        assert time.monotonic() - began < 2, (number, what)
        shutil.rmtree(delta)
        assert [path.name for path in tmp_path.iterdir()] == ["base"], (number, what)
        before = before or resident_bytes()
    assert resident_bytes() < before + (50 << 20)


def change_delta(delta: Path, rng: random.Random) -> str:
    """Changes a field of delta.json, or of the new export.json, or bytes of a file; returns what was done."""
    name = rng.choice(sorted(path.relative_to(delta).as_posix() for path in delta.rglob("*") if path.is_file()))
    path = delta / name
    if name.endswith(".json"):
        what = f"{name}: {mutate_sealed.change_json(path, rng)}"
    else:
        data, at = bytearray(path.read_bytes()), rng.randrange(path.stat().st_size)
        data[at : at + rng.choice([0, 1, 4])] = rng.randbytes(rng.choice([1, 1, 4]))
        what = f"{name} at {at}"
        path.write_bytes(data)

    def right(fields: dict[str, Any]) -> None:
        fields["files"][name] = asdict(exports.file_record(path))
        if name == "files/export.json":
            fields["result"] = deltas.checksum_of(path.parent)

    if name != "delta.json":
        reseal(delta / "delta.json", right)
    return what


@pytest.mark.slow_but("150")
@pytest.mark.parametrize("kib", [64, 150, 240])
def test_a_full_disk_is_said_and_the_same_call_ends_it(
    tmp_path: Path, small_disk: tuple[Path, Callable[[int], None]], monkeypatch: pytest.MonkeyPatch, kib: int
) -> None:
    """A table that grows from 24 KB to 240 KB, some of whose pages the disk does not hold."""
    disk, resize = small_disk
    monkeypatch.setattr(deltas, "BYTES_AT_ONCE", 4 * DIM * 200)
    weights = np.arange(60_000, dtype=np.float32).reshape(-1, DIM)
    base = write_whole(disk / "base", {"plain": ({}, weights[:2000])}, 0)
    whole = write_whole(tmp_path / "whole", {"plain": ({}, weights)}, 1)
    write_delta(base, tmp_path / "delta", lambda to: write(to, {"plain": ({}, weights)}, 1))
    resize(kib)
    with pytest.raises(ValueError, match=r"export .* needs 1 MiB more than the disk has free"):
        bring_forward(base, tmp_path / "delta")
    monkeypatch.setattr(deltas, "check_room", lambda *_, **__: None)  # others fill it meanwhile
    with pytest.raises(OSError, match=r"disk full while applying .*\. Free some .*, then run the same command again"):
        bring_forward(base, tmp_path / "delta")
    resize(1000)
    bring_forward(base, tmp_path / "delta")
    assert files_of(base) == files_of(whole)


def refused(export: Path, delta: Path, said: str) -> None:
    """It says so, and changes nothing."""
    before = {path: path.is_file() and path.read_bytes() for path in export.parent.rglob("*")}
    with pytest.raises(ValueError, match=said):
        apply_delta(export, delta, export.with_name("refused"))
    assert before == {path: path.is_file() and path.read_bytes() for path in export.parent.rglob("*")}


@pytest.mark.parametrize("row", [-1, 1 << 40])
def test_a_row_that_the_table_does_not_have(made: Chain, base: Path, tmp_path: Path, row: int) -> None:
    delta = tmp_path / "bad"
    shutil.copytree(made[1][0], delta)
    name = next(path for path in (delta / "rows").iterdir())
    rows = pq.read_table(name)
    numbers = pa.array([*rows["row"].to_pylist()[:-1], row])
    deltas._write(name, rows.schema, iter([pa.table([numbers, rows["weight"]], schema=rows.schema)]))
    record = asdict(exports.file_record(name))
    reseal(delta / "delta.json", lambda fields: fields["files"].update({f"rows/{name.name}": record}))
    refused(base, delta, f"rows/{name.name} names a row that")


def test_a_gap_a_repeat_and_another_order(made: Chain, base: Path) -> None:
    refused(base, made[1][1], "is delta 2, and .* lacks 1 to 1: apply these first")
    refused(base, made[1][2], "is delta 3, and .* lacks 1 to 2: apply these first")
    bring_forward(base, made[1][0])
    refused(base, made[1][0], "is delta 1, and .* has it already: go on with the delta after 1")
    refused(base, made[1][2], "lacks 2 to 2")
    bring_forward(base, made[1][1])
    refused(base, made[1][0], "has it already: go on with the delta after 2")
    bring_forward(base, made[1][2])


def test_a_fork(made: Chain, base: Path, tmp_path: Path) -> None:
    """Two deltas of one export, and what follows the other one."""
    day = days(2, seed=7)[1]
    other = Path(shutil.copytree(base, tmp_path / "other"))
    write_delta(other, tmp_path / "other-1", lambda to: write(to, day, 5))
    bring_forward(base, made[1][0])
    refused(base, tmp_path / "other-1", "of another branch, which parted from .* after delta 0")
    bring_forward(other, tmp_path / "other-1")
    refused(other, made[1][1], "of another branch")


def test_another_model_and_another_export(made: Chain, base: Path, tmp_path: Path) -> None:
    one, two = days(2)
    for number, (changes, said) in enumerate(
        [({"top_mlp": [5]}, r"top_mlp is \[4\], that of run run-1 is \[5\]"), ({"more": 1}, "more is None")]
    ):
        with pytest.raises(ValueError, match=f"is of another model: its {said}"):
            write_delta(base, tmp_path / "delta", lambda to, changes=changes: write(to, two, 1, **changes))
        assert not (tmp_path / "delta").exists() and number < 2
    foreign = write_whole(tmp_path / "foreign", one, 0, top_mlp=[5])
    write_delta(foreign, tmp_path / "of-foreign", lambda to: write(to, two, 1, top_mlp=[5]))
    refused(base, tmp_path / "of-foreign", "of another model or export")


def test_half_a_delta_and_altered_bytes(made: Chain, base: Path, tmp_path: Path) -> None:
    whole = made[1][0]
    for name in files_of(whole):
        for change in ("remove", "cut", "alter"):
            delta = Path(shutil.copytree(whole, tmp_path / "delta"))
            raw = (delta / name).read_bytes()
            (delta / name).unlink()
            if change != "remove":
                (delta / name).write_bytes(raw[:-1] if change == "cut" else bytes([raw[0] ^ 1]) + raw[1:])
            said = "delta.json" if name == "delta.json" else f"{Path(name).name} is missing, cut off or altered"
            refused(base, delta, f"{said}.*copy the delta again")
            with pytest.raises(ValueError, match="copy the delta again"):
                tools.check(delta) if (delta / "delta.json").exists() else deltas.verify_delta(delta)
            shutil.rmtree(delta)


def test_a_delta_that_is_written_in_half_is_not_there(base: Path, tmp_path: Path) -> None:
    def stop(to: Whole) -> Description:
        write(to, days(2)[1], 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_delta(base, tmp_path / "delta", stop)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_damaged_export_is_refused_by_both(made: Chain, base: Path, tmp_path: Path) -> None:
    path = base / "tables/int.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    refused(base, made[1][0], r"int.safetensors comes out otherwise than in the new export")
    with pytest.raises(ValueError, match=r"int.safetensors is missing, cut off or altered"):
        write_delta(base, tmp_path / "delta", lambda to: write(to, days(2)[1], 1))
    path.write_bytes(raw[:-1])
    refused(base, made[1][0], r"int.safetensors is missing, cut off or altered")
    path.write_bytes(raw)
    (base / "README.md").write_text("The same")
    refused(base, made[1][0], r"README.md is missing, cut off or altered")


def test_other_bad_input(made: Chain, base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", made[1][0], r"empty is not an export: it has no export.json")
    refused(base, tmp_path / "empty", "empty is not a delta, or half of one")
    with pytest.raises(ValueError, match="exists already; remove it or choose another name"):
        apply_delta(base, made[1][0], tmp_path / "empty")
    with pytest.raises(ValueError, match="exists already"):
        write_delta(base, tmp_path / "empty", lambda to: write(to, days(2)[1], 1))
    with pytest.raises(ValueError, match="base already is this export"):
        write_delta(base, tmp_path / "delta", lambda to: write(to, days(1)[0], 0))
    shutil.copy(made[0][0].parent / "upstream/chain.json", base / "chain.json")
    refused(base, made[1][0], r"chain.json is of another export; restore it")


def test_no_link_is_followed(made: Chain, base: Path, tmp_path: Path) -> None:
    """In either folder."""
    delta = Path(shutil.copytree(made[1][0], tmp_path / "delta"))
    for folder, name in (
        (base, "tables"),
        (base, "tables/int.safetensors"),
        (base, "encoder/vocab/int"),
        (delta, "rows"),
        (delta, "files/export.json"),
    ):
        (folder / name).rename(tmp_path / "outside")
        (folder / name).symlink_to(tmp_path / "outside")
        refused(base, delta, f"{name} is a link")
        (folder / name).unlink()
        (tmp_path / "outside").rename(folder / name)
    bring_forward(base, delta)
    assert files_of(base) == files_of(made[0][1])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("number", 2, "number is 2; it must be that of the exports before it, 1"),
        ("result", "0" * 64, "result is not the checksum of files/export.json"),
        ("tables", {"../x": {"tensor": "t", "num_embeddings": 1, "embedding_dim": 3}}, "must not start with"),
        ("tables", {"int": {"tensor": "t", "num_embeddings": 1 << 60, "embedding_dim": 3}}, "tables.int is not as"),
    ],
)
def test_a_forged_delta_is_refused(made: Chain, base: Path, tmp_path: Path, field: str, value: Any, said: str) -> None:
    delta = Path(shutil.copytree(made[1][0], tmp_path / "delta"))
    reseal(delta / "delta.json", lambda fields: fields.update({field: value}))
    refused(base, delta, said)


def test_a_vocabulary_that_comes_out_otherwise_is_refused(made: Chain, base: Path, tmp_path: Path) -> None:
    delta = Path(shutil.copytree(made[1][0], tmp_path / "delta"))
    reseal(delta / "delta.json", lambda fields: fields["tables"]["int"].update(accesses=1))
    refused(base, delta, "comes out otherwise than in the new export")


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_exports_and_deltas_follow_the_umask(tmp_path: Path, umask: int) -> None:
    one, two = days(2)
    before = os.umask(umask)
    try:
        base = write_whole(tmp_path / "base", one, 0)
        write_delta(base, tmp_path / "delta", lambda to: write(to, two, 1))
        apply_delta(base, tmp_path / "delta", tmp_path / "new")
    finally:
        os.umask(before)
    for folder in (base, tmp_path / "delta", tmp_path / "new"):
        for path in (folder, *folder.rglob("*")):
            wanted = (0o777 if path.is_dir() else 0o666) & ~umask
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path
