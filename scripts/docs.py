"""The documentation as a folder of plain HTML that reads offline: python scripts/docs.py [FOLDER]

Renders the pages at the root and in docs/ and fails on a link to a file or heading that does not exist. Files that
pages link to (sources, recipes) are copied beside them, so that every link works in the folder alone.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import markdown

ROOT = Path(__file__).resolve().parent.parent
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
nav { border-bottom: 1px solid #ccc; padding-bottom: .5rem; } nav a { margin-right: 1rem; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; } code { font-size: .9em; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border: 1px solid #ddd; padding: .3rem .6rem; }
"""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Returns the Markdown files of the site, in the order of docs/index.md; those it does not list come last."""
    index = ROOT / "docs" / "index.md"
    listed = [(index.parent / target).resolve() for target in LINK.findall(index.read_text(encoding="utf-8"))]
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(found, key=lambda page: (listed.index(page) if page in listed else len(listed), page))


def render(page: Path) -> tuple[str, set[str]]:
    """Returns the HTML of `page` and the ids of its headings."""
    html = markdown.markdown(page.read_text(encoding="utf-8"), extensions=["tables", "fenced_code", "toc"])
    return html, set(re.findall(r' id="([^"]+)"', html))


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
            elif heading and file.suffix == ".md" and heading not in render(file)[1]:
                problems.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
    return problems


def title(page: Path) -> str:
    """Returns the first heading, or the file's name."""
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1].split(":")[0] if heading else page.stem


def write(page: Path, site: Path) -> None:
    """Writes one page with its navigation, and the files it links to."""
    out = site / page.relative_to(ROOT).with_suffix(".html")
    out.parent.mkdir(parents=True, exist_ok=True)
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    menu = "".join(f'<a href="{up}{p.relative_to(ROOT).with_suffix(".html")}">{title(p)}</a>' for p in pages())
    html = re.sub(r'href="(?![a-z]+:)([^"#]*)\.md(#[^"]*)?"', r'href="\1.html\2"', render(page)[0])
    out.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title(page)}</title><style>{STYLE}</style>'
        f"<nav>{menu}</nav>{html}</html>\n",
        encoding="utf-8",
    )
    for file, _, _ in links(page):
        if file.is_file() and file.suffix != ".md":
            copy = site / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def main() -> None:
    """Checks the links, then writes the site into each folder given."""
    if problems := dead_links():
        sys.exit("\n".join(["dead links:", *problems]))
    for folder in sys.argv[1:]:
        site = Path(folder)
        for page in pages():
            write(page, site)
        shutil.copyfile(site / "README.html", site / "index.html")
        print(f"{len(pages())} pages; open {site / 'index.html'}")


if __name__ == "__main__":
    main()
