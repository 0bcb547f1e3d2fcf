"""The shape of the house: imports point down, importing does nothing, heavy or optional packages wait until called."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hotrow"

# A module imports modules of its own level or below. A folder's level holds for the files in it.
LEVELS = {
    "config_schema": 0,
    "config": 0,
    "tables": 0,
    "batch": 0,
    "files": 0,
    "faults": 0,
    "records": 0,
    "recipe": 0,
    "pages": 0,
    "host": 0,
    "charts": 0,
    "reference": 1,
    "torch_tables": 1,
    "ops": 1,
    "gpu": 1,
    "optim": 2,
    "embedding": 2,
    "gradients": 2,
    "data": 2,
    "memory": 2,
    "models": 2,
    "schedule": 2,
    "plan": 3,
    "hot": 3,
    "metrics": 4,
    "checkpoint": 4,
    "checkpoint_manifest": 4,
    "checkpoint_rows": 4,
    "checkpoint_tensors": 4,
    "export": 4,
    "export_tables": 4,
    "export_score": 4,
    "run_folder": 4,
    "run_state": 4,
    "progress": 4,
    "session": 4,
    "placement": 4,
    "device": 4,
    "device_report": 4,
    "tier_report": 4,
    "write_budget": 4,
    "parts": 4,
    "trainer": 4,
    "runs": 4,
    "cells": 4,
    "bench": 4,
    "study": 4,
    "inspection": 4,
    "api": 5,
    "tools": 5,
    "demo": 5,
    "cli": 5,
}
MAY_IMPORT_NATIVE = {"ops.py", "data/native.py", "memory/native.py"}
MODULES = sorted(
    path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in ("__init__.py", "__main__.py")
)


def imported(tree: ast.AST) -> set[str]:
    """Dotted names below hotrow that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            base = node.module or ""
            names |= {base} if base != "hotrow" else {f"hotrow.{alias.name}" for alias in node.names}
    return {name.removeprefix("hotrow.") for name in names if name.startswith("hotrow.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    own = relative.parts[0].removesuffix(".py")
    assert own in LEVELS, f"{relative} has no level; add it to LEVELS"
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        top = name.split(".")[0]
        if top == "_native":
            assert str(relative) in MAY_IMPORT_NATIVE, f"{relative} imports the native module"
        elif top != "__version__":
            assert LEVELS[top] <= LEVELS[own], f"{relative} (level {LEVELS[own]}) imports {name} (level {LEVELS[top]})"


HEAVY = [
    "tensorboard",
    "torch.utils.tensorboard",
    "plotly",
    "sklearn",
    "pandas",
    "polars",
    "pyarrow.dataset",
    "jinja2",
    "fbgemm_gpu",
    "triton",
]
LEAN = """
import os, sys, threading, torch
threads, state, files = threading.active_count(), torch.get_rng_state(), set(os.listdir())
num_threads = torch.get_num_threads()
import hotrow, hotrow.cli
assert threading.active_count() == threads, "a thread was started"
assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
assert torch.get_num_threads() == num_threads
assert set(os.listdir()) == files, "a file was made"
print([name for name in sys.argv[1:] if name in sys.modules])
"""


def test_import_is_lean(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN, *HEAVY], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", "import hotrow pulls these in"
    assert done.stderr == ""


def test_public_names() -> None:
    import hotrow

    assert all(hasattr(hotrow, name) for name in hotrow.__all__)
    assert len(set(hotrow.__all__)) == len(hotrow.__all__)
