"""HTML pages: self-contained, from templates beside the code, text escaped."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


def load_template(name: str, **filters: Any) -> Template:
    """The template `name`, a path below the package such as "study/page.html"; it may extend "draw/page.html"."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # late: importing hotrow stays lean

    loader = FunctionLoader(lambda path: files("hotrow").joinpath(path).read_text("utf-8"))
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(filters)
    return environment.get_template(name)
