"""HTML pages: self-contained, made from templates that lie beside the code. Text is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

PACKAGE = Path(__file__).resolve().parent.parent


def load_template(name: str, *, folder: Path = PACKAGE, **filters: Any) -> Template:
    """Returns the template at the path `name` below `folder`, or below the package, such as "study/page.html".

    A template may extend "draw/page.html".
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, because importing hotrow stays lean

    environment = Environment(
        loader=FileSystemLoader([folder, PACKAGE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(name)
