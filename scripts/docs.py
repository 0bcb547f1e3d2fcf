"""The documentation as a site that reads offline, with search: python scripts/docs.py [FOLDER]

Checks every link of the pages at the root and in docs/, and fails on one that leads to no file or heading. Then it
writes the site into FOLDER, by mkdocs with the theme Material. The sections and titles of docs/index.md are its
navigation. Files that pages link to (sources, recipes) are copied beside them, so that links work in the folder alone.
A line `::: hotrow.NAME` becomes what that name's signature and docstrings say.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import shutil
import sys
import tempfile
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import markdown

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "docs" / "index.md"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
TITLED = re.compile(r"\[([^\]]+)\]\(([^)\s#]+\.md)\)")


def pages() -> list[Path]:
    """Returns the Markdown files of the site."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def headings(page: Path) -> set[str]:
    """Returns the ids of the headings of `page`."""
    html = markdown.markdown(page.read_text(encoding="utf-8"), extensions=["tables", "fenced_code", "toc"])
    return set(re.findall(r' id="([^"]+)"', html))


def links(page: Path) -> list[tuple[Path, str, str]]:
    """Returns the relative links of `page` outside code blocks: (file, heading or "", the link as written)."""
    found = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if not re.match(r"[a-z]+:", target):
            name, _, heading = target.partition("#")
            found.append(((page.parent / name).resolve() if name else page, heading, target))
    return found


def dead_links() -> list[str]:
    """Returns one line for each dead link; an empty list if there are none."""
    problems = []
    for page in pages():
        for file, heading, target in links(page):
            if not file.exists():
                problems.append(f"{page.relative_to(ROOT)}: {target} does not exist")
            elif heading and file.suffix == ".md" and heading not in headings(file):
                problems.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
    return problems


def navigation() -> list[dict[str, object]]:
    """Returns the sections of docs/index.md and the pages listed there, each where it is listed first."""
    top = {ROOT / "README.md": "Home", INDEX: "All pages"}
    nav: list[dict[str, object]] = [{title: str(page.relative_to(ROOT))} for page, title in top.items()]
    seen = {*top}
    for section in INDEX.read_text(encoding="utf-8").split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        own: list[dict[str, str]] = []
        for title, target in TITLED.findall(text):
            if (page := (INDEX.parent / target).resolve()) not in seen:
                seen.add(page)
                own.append({title[0].upper() + title[1:]: str(page.relative_to(ROOT))})
        nav.append({name: own})
    return nav


def described(docstring: str | None) -> str:
    """Returns a docstring as Markdown: its lines `name: text` become a list, each with the lines below it that go on
    with it, because they are indented or because the line before them ends within a sentence."""
    lines, in_list, ended = inspect.cleandoc(docstring or "").split("\n"), False, True
    made = list[str]()
    for line in lines:
        named = re.match(r"(\w+(?:, \w+)*): ", line) if ended else None
        goes_on = in_list and bool(line) and (line.startswith(" ") or not ended)
        gap = "\n" if in_list != (bool(named) or goes_on) else ""
        made.append(gap + (f"- **{named[1]}**: {line[named.end() :]}" if named else "  " * goes_on + line))
        in_list, ended = bool(named) or goes_on, not line or line.endswith(".")
    return "\n".join(made)


def call_of(name: str, function: Any) -> str:
    """Returns how a function is called, as a code block, with a line for each parameter if it is long."""
    signature, is_config = inspect.signature(function), hasattr(function, "model_fields")  # whose types are long
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    own, kinds = list[str](), set[Any]()
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind == each.KEYWORD_ONLY and kinds.isdisjoint([each.kind, each.VAR_POSITIONAL]):
            own.append("*")
        kinds.add(each.kind)
        kind = each.annotation if isinstance(each.annotation, str) else inspect.formatannotation(each.annotation)
        text = (
            stars.get(each.kind, "") + each.name + ("" if is_config or each.annotation is each.empty else f": {kind}")
        )
        if each.default is not each.empty:
            text += "=..." if is_config else f" = {each.default!r}"
        own.append(text)
    end = f" -> {found}" if isinstance(found := signature.return_annotation, str) and found != "None" else ""
    text = f"{name}({', '.join(own)}){end}"
    if len(text) > 100:
        text = f"{name}(\n" + "".join(f"    {each},\n" for each in own) + f"){end}"
    return "```python\n" + text.replace("collections.abc.", "") + "\n```"


def fields_of(made: type) -> list[str]:
    """Returns a line for each field of a class that has a docstring below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(made))).body[0].body  # type: ignore[attr-defined]
    return [
        f"- `{ast.unparse(field)}`: {' '.join(inspect.cleandoc(note.value.value).split())}"
        for field, note in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant)
    ]


def reference(name: str) -> str:
    """Returns a section of the Python reference: signatures and docstrings of `hotrow.NAME` and of its members."""
    import hotrow

    made = getattr(hotrow, name)
    parts = [f"### {name}", call_of(name, made), described(made.__doc__)]
    if inspect.isclass(made):
        parts += ["\n".join(fields_of(made))]
        for member, own in vars(made).items():
            bare = own.__func__ if isinstance(own, classmethod | staticmethod) else own
            if (
                member.startswith("_")
                or not (inspect.isfunction(bare) or isinstance(bare, property))
                or not bare.__doc__
            ):
                continue
            call = [] if isinstance(bare, property) else [call_of(f"{name}.{member}", bare)]
            parts += [f"#### {member}", *call, described(bare.__doc__)]
    return "\n\n".join(filter(None, parts))


def stage(folder: Path) -> None:
    """Copies the pages, and the files that they link to or show, into `folder`."""
    shown = {ROOT / "docs" / "icon.svg", ROOT / "scripts" / "iframe-worker.js"}
    for page in pages():
        images = re.findall(r"!\[[^\]]*\]\(([^)\s:]+)\)", page.read_text(encoding="utf-8"))
        shown |= {page, *(file for file, *_ in links(page)), *((page.parent / image).resolve() for image in images)}
    inside = {file for linked in shown if linked.is_dir() for file in linked.iterdir()}
    for file in (file for file in shown | inside if file.is_file()):
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for page in (folder / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"^::: hotrow\.(\w+)$", lambda found: reference(found[1]), text, flags=re.MULTILINE))


def write(site: Path) -> None:
    """Writes the site into the folder `site`."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # what ends a strict build
    with tempfile.TemporaryDirectory() as name:
        staged = Path(name)
        stage(staged)
        settings = str(ROOT / "scripts" / "docs.yml")
        build(load_config(settings, docs_dir=name, site_dir=str(site.absolute()), nav=navigation(), strict=True))


def main() -> None:
    """Checks the links, then writes the site into each folder given."""
    if problems := dead_links():
        sys.exit("\n".join(["dead links:", *problems]))
    for folder in map(Path, sys.argv[1:]):
        write(folder)
        print(f"{len(pages())} pages; open {folder / 'index.html'}")


if __name__ == "__main__":
    main()
