"""docs/config.md, of the schema of a config: python scripts/config_page.py > docs/config.md"""

from __future__ import annotations

import ast
import inspect
import json
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
        "One YAML file describes a run; `--set a.b=value` overrides a field from the command line. Unknown keys are",
        "refused. This page is generated from `hotrow.config` (`python scripts/config_page.py > docs/config.md`).",
        "",
        "`--set model.name=dcn` is enough to train a recipe with another model. Options in the recipe that the new",
        "model does not have are left out, with a warning; what the recipe does not say has the new model's default.",
        "`hotrow init --model dcn` writes a recipe for that model and the number of your rows.",
        "",
        "A section `tune` beside these says what `hotrow tune` searches (docs/tune.md); `train` and `plan` ignore it.",
    ]
    for title, path, section in sections():
        if not (own := options_of(section)):
            continue
        lines += ["", f"## {title}", "", inspect.cleandoc(section.__doc__ or "")]
        lines += ["", "| option | default | allowed | effect |", "|---|---|---|---|"]
        effects = effects_of(section)
        for name, field in own.items():
            default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
            lines.append(
                f"| `{path}{name}` | {default} | {allowed_in(section, name)} | {field.description or effects[name]} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(config_markdown(), end="")
