"""`hotrow init`: looks at logs, or at a packed dataset, and writes the files for the next step as commented YAML.

Published layouts need no schema: for them, and for a packed dataset, it writes only a recipe and names the command. For
other tables it also writes the guessed schema (`guess.py`), each line with its reason.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hotrow.base.door import is_taken, make_folder
from hotrow.base.files import atomic_write, check_writable
from hotrow.config.load import make_config, set_field
from hotrow.config.recipe import choose_recipe
from hotrow.data.packed.format import MANIFEST, read_info
from hotrow.data.sources.columns import left_out
from hotrow.data.sources.facts import Guess
from hotrow.data.sources.guess import SchemaGuess, guess_columns
from hotrow.data.sources.inputs import spooled
from hotrow.data.sources.options import ReadOptions, with_read_options
from hotrow.data.sources.registry import open_source, recognise, tell_format
from hotrow.data.sources.schema import Schema
from hotrow.objectives import DEFAULT, OBJECTIVES

SCHEMA_FILE = "schema.yaml"
RECIPE_FILE = "recipe.yaml"
COMMENT_COLUMN = 64


@dataclass(frozen=True)
class InitResult:
    """The result of `hotrow init`."""

    found: str
    """The data in words."""
    schema: str | None
    """YAML of the schema; None if none is needed."""
    recipe: str
    """YAML of a training config."""
    commands: tuple[str, ...]
    """Commands to run next, in order."""
    files: tuple[Path, ...] = ()
    """Files written."""
    columns: tuple[Guess, ...] = ()
    """The guess about each column, if a schema is needed."""


@with_read_options
def run_init(
    paths: Any, *, read: ReadOptions, data: str | None = None, model: str | None = None, out: Path | str | None = None
) -> InitResult:
    """Looks at `paths` (logs, or the folder of a packed dataset) and says how to train on them.

    {read}
    data: the packed dataset that the recipe will name. model: `model.name` of the recipe; None means the default.
    out: a folder for schema.yaml and recipe.yaml; None writes nothing. Existing files are never overwritten.

    Raises ValueError if a path does not exist, a named column is missing, there is no such model, or a file to write
    exists.
    """
    model = make_config({"data": "", "model": {} if model is None else {"name": model}}, origin="init").model.name
    if out is not None:
        _check_absent(Path(out) / RECIPE_FILE)  # checked before the logs are read; there may be no schema to write
    with spooled(paths, Path(tempfile.gettempdir())) as files:
        result = _look(files, read, data, model=model, given=paths)
    if out is None:
        return result
    folder = Path(out)
    texts = {SCHEMA_FILE: result.schema, RECIPE_FILE: result.recipe}
    written = [folder / name for name, text in texts.items() if text is not None]
    for path in written:
        _check_absent(path)
    make_folder(folder)
    for path in written:
        with atomic_write(path) as file:
            file.write((texts[path.name] or "").encode())
    commands = tuple(re.sub(rf"\b({SCHEMA_FILE}|{RECIPE_FILE})\b", rf"{folder}/\1", c) for c in result.commands)
    return replace(result, commands=commands, files=tuple(written))


def _check_absent(path: Path) -> None:
    if path.exists():
        raise ValueError(f"{path} exists and will not be overwritten; move it away, or choose another folder")
    check_writable(path)


def _look(paths: Any, read: ReadOptions, data: str | None, *, model: str, given: Any) -> InitResult:
    render = partial(render_recipe, model=model)
    shown = shlex.join(map(str, given if isinstance(given, list | tuple) else [given]))
    if isinstance(paths, str | Path) and is_taken(Path(paths) / MANIFEST):
        info = read_info(Path(paths))
        rows = ", ".join(f"{name} {split.num_rows:,}" for name, split in info.splits.items())
        found = f"a packed dataset of {info.name!r}: rows {rows}; {len(info.dense)} dense, {len(info.features)} sparse"
        num_rows = info.splits["train"].num_rows if "train" in info.splits else 0
        fitting = (name for name, own in OBJECTIVES.items() if own.label in (info.labels[0].kind, "number"))
        recipe = render(str(paths), num_rows, exact=True, objective=read.objective or next(fitting))
        return InitResult(found, None, recipe, (f"hotrow train {RECIPE_FILE}",))
    skip = f" --skip-bad-rows {read.skip_bad_rows}" if read.skip_bad_rows else ""
    source = None if read.hints else recognise(paths)
    if source is not None:
        data = data or f"data/{source}"
        commands = (f"hotrow prepare {source} {shown} --out {data}{skip}", f"hotrow train {RECIPE_FILE}")
        opened = open_source(source, paths)
        num_rows = _training_rows(opened.source.scout().num_rows, opened.schema)
        recipe = render(data, num_rows, exact=False, objective=read.objective)
        return InitResult(f"{source} in its published layout", None, recipe, commands)
    guess = guess_columns(paths, **vars(read))
    data = data or "data/packed"
    source = tell_format(paths)
    commands = (
        f"hotrow prepare {source} {shown} --schema {SCHEMA_FILE} --out {data}{skip}",
        f"hotrow train {RECIPE_FILE}",
    )
    found = "; ".join(filter(None, [f"a table, guessed from {guess.origin}", left_out(paths)]))
    recipe = render(data, int(0.8 * guess.num_rows), exact=False, objective=read.objective)
    return InitResult(found, render_schema(guess), recipe, commands, columns=tuple(guess.guesses))


def _training_rows(num_rows: int, schema: Schema) -> int:
    """Returns about how many of `num_rows` rows are for training; a published split trains on 6 of 7 days."""
    return int(num_rows * (6 / 7 if schema.split.kind == "reference" else schema.split.fractions[0]))


def render_schema(guess: SchemaGuess) -> str:
    """Returns the guesses as YAML, each line with its reason; comments list the columns left out."""
    return "\n".join(_schema_lines(guess)) + "\n"


def _schema_lines(guess: SchemaGuess) -> Iterator[str]:
    yield f"# Schema guessed from {guess.origin}."
    yield "# Check every line: nothing else decides what the model sees. docs/prepare.md explains the fields."
    yield "version: 1"
    if not guess.of("label"):
        found = guess.question or "no column of 0 and 1 found; name yours, positive: [...] or at_least: N"
        yield _commented("label: {column: FILL_IN}", found)
    for note in guess.notes:
        yield f"# {' '.join(note.split())}"
    for role in ("label", "weight", "time", "dense", "categorical"):
        of_role = guess.of(role)
        if listed := role in ("dense", "categorical") or len(of_role) > 1:
            yield f"{role}:" if of_role else f"{role}: []"
        for g in of_role:
            yield _commented(f"{'  - ' if listed else f'{role}: '}{_flow(g.spec)}", g.reason)
    if left := guess.of(""):
        yield "# left out:"
        yield from (f"#   {_scalar(g.column)}: {g.reason}" for g in left)
    if guess.at_serving:
        yield _commented(f"at_serving: {_flow(dict(guess.at_serving))}", "what a column counts as in rows to score")
    tables = ", ".join(f"{name}: {_flow(spec)}" for name, spec in guess.tables.items())
    yield _commented(f"tables: {{{tables}}}", "ids that are seen once share a row")
    if guess.statistics:
        yield _commented("statistics:", "how often other training rows had its value, and a positive label")
        yield from (f"  - {_scalar(columns)}" for columns in guess.statistics)
    yield _commented(f"split: {{kind: {guess.split_kind}, fractions: [0.8, 0.1, 0.1]}}", "train, val, test")
    if guess.csv:
        yield _commented(f"csv: {_flow(guess.csv)}", "how lines are cut; found, not told")
    yield _commented('licence: ""', "a note kept with the data set")


def _flow(spec: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {_scalar(value)}" for key, value in spec.items()) + "}"


def _scalar(value: Any) -> str:
    """Returns a YAML flow scalar or list: bare if that is safe, else JSON, which is valid YAML."""
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) and value.lower() not in YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=True)


YAML_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that YAML 1.1 does not read as text."""


def _commented(line: str, comment: str) -> str:
    # A reason may quote a column's text, and a line break in it must not end the comment.
    return f"{line:<{COMMENT_COLUMN}}  # {' '.join(comment.split())}"


def render_recipe(data: str, num_rows: int, *, exact: bool, model: str = "dlrm", objective: str | None = None) -> str:
    """Returns the config that `fit` would choose for the packed dataset `data` with `num_rows` training rows.

    model: `model.name`. objective: `model.objective`; if None, the default.
    """
    recipe = choose_recipe(num_rows, model=model)
    named = {"name": model, **({} if objective in (None, DEFAULT) else {"objective": objective})}
    sections: dict[str, Any] = {"model": named, "optimizer": {}, "train": {}}
    for name, value in recipe.items():
        set_field(sections, name, value, where="recipe")
    sections["train"]["seed"] = 1
    rows = f"{num_rows:,}" if exact else f"about {num_rows:,}"
    lines = [
        f"# Trains a model on {' '.join(data.split())}; docs/config.md lists every option.",
        f"# Chosen for {rows} training rows, as by `hotrow fit` (reasons: hotrow/config/recipe.py).",
        f"data: {json.dumps(data)}",
        f"model: {_flow(sections['model'])}",
        "optimizer:",
        *(f"  {name}: {_flow(value)}" for name, value in sections["optimizer"].items()),
        f"train: {_flow(sections['train'])}",
    ]
    return "\n".join(lines) + "\n"
