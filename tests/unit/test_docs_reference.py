"""The Python reference of the site: how functions are called, and their docstrings as Markdown."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import hotrow

pytest.importorskip("markdown")
pytestmark = pytest.mark.package
SPEC = importlib.util.spec_from_file_location(
    "docs_script", Path(__file__).resolve().parents[2] / "scripts" / "docs.py"
)
docs = importlib.util.module_from_spec(SPEC)  # type: ignore[arg-type]
SPEC.loader.exec_module(docs)  # type: ignore[union-attr]


def test_calls_can_be_made_as_they_are_shown() -> None:
    """What must be named stands after a star, and texts stand in quotes."""
    assert "    export: Path | str,\n    *,\n" in docs.call_of("Scorer" + " " * 40, hotrow.Scorer)
    assert docs.call_of("evaluate", hotrow.Run.evaluate).startswith(
        "```python\nevaluate(split: str = 'test', *, data: Path | str | None = None) -> dict[str, Any]"
    )
    assert "label: str | None = None" in docs.call_of("fit", hotrow.fit)
    for name in ("Config", "fit", "Scorer", "EmbeddingCollection"):
        assert " at 0x" not in docs.call_of(name, getattr(hotrow, name)), "the site is the same at each build"


def test_a_line_that_goes_on_stays_in_its_item() -> None:
    text = ["Scores rows.", "", "export: its folder, which is", "never written to.", "memory: how much", "    of it."]
    assert docs.described("\n".join([*text, "Raises ValueError if not."])).split("\n") == [
        *("Scores rows.", "", "", "- **export**: its folder, which is", "  never written to."),
        *("- **memory**: how much", "      of it.", "", "Raises ValueError if not."),
    ]
