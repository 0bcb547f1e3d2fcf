"""How idle threads wait is set before torch is loaded, and what the user has set holds."""

import os
import re
import subprocess
import sys

import pytest

from hotrow.base.waiting import VARIABLES, wait_passively

COMMAND = ("-m", "hotrow", "doctor", "--json")
IMPORT = ("-c", "import hotrow; hotrow.EmbeddingCollection")


def spins(*words: str, **given: str) -> set[str]:
    """Returns how often idle threads look for work before they sleep, as OpenMP says when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return set(re.findall(r"GOMP_SPINCOUNT\s*=\s*'(\d+)'", done.stderr))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "passive"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
    ],
)
def test_what_the_user_set_holds(given: dict[str, str], expected: dict[str, str]) -> None:
    wait_passively(given)
    assert given == expected


@pytest.mark.package
def test_the_command_waits_passively_and_an_import_changes_nothing() -> None:
    """OpenMP reads the environment when torch is loaded, so what it displays shows that the order is right."""
    if not (found := spins(*IMPORT)):
        pytest.skip("torch's OpenMP does not say how it waits")
    assert "0" not in found
    assert spins(*COMMAND) == {"0"}
    assert spins(*COMMAND, GOMP_SPINCOUNT="777") == {"777"}
