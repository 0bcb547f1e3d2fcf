"""The commands on the pages can be typed: verbs, flags and options of recipes exist, and benchmarks are there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from hotrow.cli.app import app
from hotrow.config.load import apply_overrides, make_config
from hotrow.plan.alternatives import groups

pytestmark = pytest.mark.package

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown(page: Path) -> Iterator[list[str]]:
    """Yields the words of each command on a page, without what a shell does with it."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(block for kind, block in FENCE.findall(text) if kind in ("", "bash")).replace("\\\n", " ")
    of_readme = re.findall(r"`(hotrow [a-z]+ [^`]+)`", text) if page.name == "README.md" else []
    for line in [*blocks.splitlines(), *of_readme]:
        line = re.sub(r"^(\$ )?(\.venv/bin/)?", "", line.strip())
        if line.startswith(("hotrow ", "python -m benchmarks.")):
            words = shlex.split(re.split(r" [|>] | && ", line)[0], comments=True)
            yield words[: words.index(";")] if ";" in words else words


COMMANDS = [(page, words) for page in PAGES for words in shown(page)]


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 100 and {words[1] for _, words in COMMANDS} >= {"days", "serve", "apply", "tune"}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda each: each.stem if isinstance(each, Path) else each[1])
def test_it_can_be_typed(page: Path, words: list[str]) -> None:
    if words[0] == "python":
        place = ROOT / words[2].replace(".", "/")
        path = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
        assert path.exists(), f"{page.name}: {words}"
        source = path.read_text()
        for flag in (word for word in words[3:] if word.startswith("--")):
            assert f'"{flag}"' in source, f"{page.name}: {words[2]} has no {flag}"
        return
    command = VERBS[words[1]]
    given, *_ = command.make_parser(command.context_class(command)).parse_args(words[2:])
    changes = groups(given.get("set_") or [])  # of plan, one --set may have several
    make_config(apply_overrides({"data": "data", "run": "run"}, [own for group in changes for own in group]))
