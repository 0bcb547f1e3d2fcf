"""docs/config.md, of the schema of a config: python scripts/config_page.py > docs/config.md"""

from __future__ import annotations

import ast
import inspect
import json
import re
from itertools import pairwise
from typing import cast

from pydantic import BaseModel

from hotrow.config.load import allowed_in, options_of, sections


def effects_of(section: type[BaseModel]) -> dict[str, str]:
    """Returns the text below each option in the source of its section. pydantic would read all sources at import."""
    found = dict[str, str]()
    for owner in reversed(section.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        (definition,) = cast(list[ast.ClassDef], ast.parse(inspect.getsource(owner)).body)
        for option, text in pairwise(definition.body):
            if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(option.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def config_markdown() -> str:
    """Returns docs/config.md: every option with its default, its allowed values, and its effect."""
    lines = [
        "# Configuration",
        "",
        "For everyone who writes a recipe: every option, its default, what is allowed, and its effect. One YAML file",
        "describes a run; `--set a.b=value` overrides a field from the command line. Unknown keys are refused. The",
        "page is made from `hotrow.config` (`python scripts/config_page.py > docs/config.md`).",
        "",
        "`--set model.name=dcn` trains a recipe with another model. Options that this model does not have are left",
        "out, with a warning; what the recipe does not say has its defaults. `hotrow init --model dcn` writes a recipe",
        "for it and the number of your rows.",
        "",
        "A section `tune` beside these says what `hotrow tune` searches (docs/tune.md); `train` and `plan` ignore it.",
    ]
    pages = {title: (section, rows_of(path, section)) for title, path, section in sections() if options_of(section)}
    models = [rows for title, (_, rows) in pages.items() if title.startswith(MODEL)]
    shared = [row for row in models[0] if 2 * sum(row in rows for rows in models) > len(models)]
    for title, (section, rows) in pages.items():
        if rows is models[0]:
            lines += [
                "",
                "## Every model",
                "",
                "A model that differs in one of these has it in its own table.",
                *table(shared),
            ]
        own = [row for row in rows if row not in shared] if title.startswith(MODEL) else rows
        lines += ["", f"## {title}", "", inspect.cleandoc(section.__doc__ or ""), *table(own)]
    return "\n".join(lines) + "\n"


MODEL = "model: "
"""How the titles of models begin."""


def rows_of(path: str, section: type[BaseModel]) -> list[str]:
    """Returns a line of the table for each option of a section."""
    effects = effects_of(section)
    rows = []
    for name, field in options_of(section).items():
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        effect = field.description or effects[name]
        allowed = re.sub(r">= (\S+) and <= (\S+)", r"from \1 to \2", allowed_in(section, name))
        rows.append(f"| `{path}{name}` | {default} | {allowed.removeprefix('an ').removeprefix('a ')} | {effect} |")
    return rows


def table(rows: list[str]) -> list[str]:
    """Returns the lines of a table, after an empty one."""
    return ["", "| option | default | allowed | effect |", "|---|---|---|---|", *rows]


if __name__ == "__main__":
    print(config_markdown(), end="")
