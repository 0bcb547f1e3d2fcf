"""Runs changed in structure, their checksums made right again, through every verb: only what they say gives them away.

A case changes some fields of a JSON file of a run, or the tensors of a file of its newest checkpoint, and makes all
checksums right, as anybody can. Every verb then ends with code 0, or with code 2 and a message that names the file. If
both `predict` and `export` take the run, the export scores rows as the run does: no verb takes what another refuses to
read, or reads something else in it.
"""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import torch
import yaml
from safetensors.torch import load_file, save_file

import mutate
from hotrow.base.records import CHECKSUM, write_sealed
from hotrow.export.score import Scorer
from hotrow.run.checkpoint_files import MANIFEST, crc32
from resealed import reseal

PREPARE = "prepare csv rows.csv --schema schema.yaml --out data"
MODEL = {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}
TRAIN = {"batch_size": 16, "epochs": 1, "max_steps": 8, "log_every": 1, "threads": 1}
TABLES = {name: {"min_count": 1} for name in ("item", "user", "tags")}
VERBS = (
    *("check run", "report run", "eval run", "predict run rows.csv --out scores.csv", "export run --out export-2"),
    *("train --resume run --set train.max_steps=10", "runs --clean run"),
)
"""`clean` comes last, because it removes checkpoints."""
VALUES: tuple[Any, ...] = (None, True, 0, -1, 1, 2.5, 2**40, 2**70, "", "x", "../x", [], [0], {}, {"x": 0})
"""What a field is changed to, beside its own value and one, twice it, and the negative of it."""
Change = tuple[tuple[Any, ...], str, Any]
"""Where, what is done there, and the new value."""


def make_artifacts() -> None:
    """Makes a dataset, a run in tiers with two checkpoints, and an export in the working directory, by the verbs."""
    header, *records = mutate.rows(0, 1200)
    for number, record in enumerate(records):
        record[header.index("user")] = str(number)
    Path("rows.csv").write_bytes(mutate.csv_bytes([header, *records]))
    Path("schema.yaml").write_text(yaml.safe_dump(mutate.text_schema(tables=TABLES)))
    config: dict[str, Any] = {"data": "data", "run": "run", "model": MODEL, "train": TRAIN}
    config |= {"checkpoint": {"every": 3}, "memory": {"dram": "8KB", "force": True, "write_budget": "1GB/day"}}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    for words in (PREPARE, "train config.yaml", "export run --out export"):
        outcome = mutate.run_command(words.split())
        assert outcome.code == 0, outcome.err


def changes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[Change]:
    """Every field removed, renamed, and changed to every one of VALUES and its neighbours."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from changes(inner, (*path, key))
    if path:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        near = [value + 1, -value, 2 * value] if number else [f"{value}x"] if isinstance(value, str) else []
        yield path, "remove", None
        yield from [] if isinstance(path[-1], int) else [(path, "rename", None)]
        yield from ((path, "change", new) for new in (*VALUES, *near) if json.dumps(new) != json.dumps(value))


def changed(fields: dict[str, Any], change: Change) -> dict[str, Any]:
    """A copy of `fields` after the change."""
    (*path, last), what, new = change
    result = inner = copy.deepcopy(fields)
    for step in path:
        inner = inner[step]
    if what == "change":
        inner[last] = new
    else:
        old = inner.pop(last)
        if what == "rename":
            inner[f"{last}_"] = old
    return result


def change_json(file: Path, rng: random.Random) -> str:
    """Changes a field of a sealed file; returns what was done."""
    fields = json.loads(file.read_text())
    del fields[CHECKSUM]
    tops = sorted({path[0] for path, _, _ in changes(fields)}, key=str)
    top = rng.choice(tops)  # so that a long list does not take all the changes
    change = rng.choice([each for each in changes(fields) if each[0][0] == top])
    file.unlink()  # it may be a hard link to the dataset's
    write_sealed(file, changed(fields, change))
    return f"{'.'.join(map(str, change[0]))} {change[1]} {change[2]!r}"


def change_tensors(file: Path, checkpoint: Path, rng: random.Random) -> str:
    """Changes a tensor of a checkpoint's file, and the size and checksum in its manifest; returns what was done."""
    tensors = load_file(file) or {"0.x": torch.zeros(2)}  # plain SGD has no state: one too many
    name = "rows" if "rows" in tensors and rng.random() < 0.6 else rng.choice(sorted(tensors))
    tensor, what = tensors[name], rng.choice(["drop", "rename", "cut", "reshape", "dtype", "rows", "rows", "rows"])
    if what == "rows" and (name != "rows" or len(tensor) < 2):
        what = "cut"
    if what in ("drop", "rename"):
        del tensors[name]
        tensors |= {f"{name}_": tensor} if what == "rename" else {}
    elif what == "cut":
        tensors[name] = tensor[: len(tensor) // 2].clone() if tensor.dim() else tensor[None]
    elif what == "reshape":
        tensors[name] = tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor.reshape(-1)
    elif what == "dtype":
        tensors[name] = tensor.to(torch.float64 if tensor.is_floating_point() else torch.int32)
    else:
        at = rng.randrange(len(tensor) - 1)
        kind = rng.choice(["swap", "negative", "twice", "large", "huge", "reversed"])
        what = f"rows, {kind} at {at}"
        if kind == "swap":
            tensor[at : at + 2] = tensor[at : at + 2].flip(0)
        elif kind == "reversed":
            tensors[name] = tensor.flip(0).contiguous()
        elif kind == "twice":
            tensor[at + 1] = tensor[at]
        else:
            tensor[at] = {"negative": -5, "large": 10_000, "huge": 2**40}[kind]
    file.unlink()
    save_file(tensors, file)
    record = {"num_bytes": file.stat().st_size, "crc32": crc32(file)}
    key = str(file.relative_to(checkpoint))
    reseal(checkpoint / MANIFEST, lambda manifest: manifest["files"].update({key: record}))
    return f"{name}: {what}"


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def is_sealed(path: Path) -> bool:
    return path.suffix == ".json" and f'"{CHECKSUM}": "'.encode() in path.read_bytes()


def faults_of_case(seed: int, number: int) -> list[str]:
    """What is wrong with how the verbs take the changed run; the run and what they made are put back."""
    rng, run, kept = random.Random(f"{seed}-{number}"), Path("run"), Path("kept")
    shutil.copytree(run, kept, symlinks=True)
    try:
        checkpoint = newest(run)
        sealed = [path for path in sorted(run.rglob("*.json")) if is_sealed(path)]
        stored = sorted(checkpoint.rglob("*.safetensors"))
        file = rng.choice(sealed if rng.random() < 0.6 else stored)
        what = change_json(file, rng) if file in sealed else change_tensors(file, checkpoint, rng)
        return [f"case {number}, {file}: {what}: {fault}" for fault in _faults(file)]
    finally:
        for folder in (run, Path("export-2")):
            shutil.rmtree(folder, ignore_errors=True)
        Path("scores.csv").unlink(missing_ok=True)
        kept.rename(run)


def _faults(file: Path) -> Iterator[str]:
    taken, names = {}, (file.name, str(file.parent), "run/")
    for words in VERBS:
        verb, *arguments = words.split()
        outcome = mutate.run_command([verb, *arguments])
        outcome.faults += mutate.faults_of(mutate.Case(verb, "", arguments, names), outcome)
        taken[verb] = outcome
        yield from (f"{verb} {fault}: {outcome.err[-400:]}" for fault in outcome.faults)
    if taken["export"].code == 0 and "embedding/" in str(file) and taken["predict"].code != 0:
        yield f"export takes what predict refuses: {taken['predict'].err[-400:]}"
    if taken["check"].code == 0 and "do not rise" in taken["predict"].err:
        yield f"check takes rows that predict refuses: {taken['predict'].err[-400:]}"
    if taken["export"].code == taken["predict"].code == 0 and (fault := other_scores()):
        yield fault


def other_scores() -> str:
    """Says how the export scores rows otherwise than the run did."""
    scores = pyarrow.csv.read_csv("scores.csv")["score"].to_numpy()
    rows = pyarrow.csv.read_csv("rows.csv").slice(0, 40)
    columns = {name: rows[name].to_pylist() for name in rows.column_names}
    columns["tags"] = [[tag for tag in (text or "").split("|") if tag] for text in columns["tags"]]
    try:
        found = Scorer(Path("export-2")).score(columns).numpy()
    except Exception as error:
        return f"the export's own script cannot read it: {type(error).__name__}: {error}"
    apart = float(np.abs(found - scores[:40]).max())
    return "" if apart < 1e-5 else f"the export scores rows otherwise than predict, by {apart:.2g}"
