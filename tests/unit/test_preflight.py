"""The install path, without installing: what preflight says on machines that lack something, and what is pinned."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.package
ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "awk", "tr", "mktemp", "rm", "cat", "dirname")


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))
    stub(tmp_path, "df", "printf 'head\\ndisk 99999999 1 9999999 1%% /\\n'")
    stub(tmp_path, "apt-get", "exit 0")
    stub(tmp_path, "apt-cache", '[ "$2" = python3.12 ]')
    return tmp_path


def python_stub(machine: Path, *, name: str = "python3", version: str = "3.11", venv: bool = True) -> None:
    """A Python that answers as preflight asks: its version, whether venv works, its path, its headers."""
    (machine / "include").mkdir(exist_ok=True)
    (machine / "include" / "Python.h").touch()
    stub(
        machine,
        name,
        f"case $2 in *version_info*) echo {version};; *ensurepip*) exit {int(not venv)};; "
        f"*executable*) echo {machine}/{name};; *sysconfig*) echo {machine}/include;; *) exit 9;; esac",
    )


def compiler_stub(machine: Path, *, name: str = "c++", works: bool = True) -> None:
    stub(machine, name, f"exit {int(not works)}")


def preflight(machine: Path, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(ROOT / "scripts" / "preflight")],
        env={"PATH": str(machine), **environment},
        cwd=machine, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_complete_machine_passes_and_names_its_python(machine: Path) -> None:
    python_stub(machine)
    compiler_stub(machine)
    status, out, err = preflight(machine)
    assert (status, out) == (0, f"{machine}/python3\n"), err


def test_the_first_python_that_is_new_enough_is_taken(machine: Path) -> None:
    python_stub(machine, version="3.9")
    python_stub(machine, name="python3.12", version="3.12")
    compiler_stub(machine)
    assert preflight(machine)[1] == f"{machine}/python3.12\n"


@pytest.mark.parametrize(("version", "ok"), [("2.7", False), ("3.10", False), ("3.11", True), ("4.0", True)])
def test_versions(machine: Path, version: str, ok: bool) -> None:
    python_stub(machine, version=version)
    compiler_stub(machine)
    status, _, err = preflight(machine)
    assert (status == 0) is ok
    assert ok or f"python3 is {version}" in err


def test_a_bare_machine_is_told_everything_in_one_line(machine: Path) -> None:
    status, out, err = preflight(machine)
    assert (status, out) == (1, "")
    assert "install with: sudo apt-get install -y python3.12 python3.12-venv python3.12-dev g++" in err


def test_an_asked_for_python_is_not_replaced_silently(machine: Path) -> None:
    python_stub(machine)
    compiler_stub(machine)
    status, _, err = preflight(machine, PYTHON="python3.99")
    assert status == 1 and "python3.99 does not run" in err


def test_venv_module_and_headers_are_looked_for(machine: Path) -> None:
    python_stub(machine, venv=False)
    compiler_stub(machine)
    (machine / "include" / "Python.h").unlink()
    status, _, err = preflight(machine)
    assert status == 1
    assert "install with: sudo apt-get install -y python3.11-venv python3.11-dev" in err


def test_an_old_compiler_is_told_from_none_and_another_is_offered(machine: Path) -> None:
    python_stub(machine)
    compiler_stub(machine, works=False)
    assert "c++ fails on a small C++20 program" in preflight(machine)[2]
    assert "apt-get install -y g++-12" in preflight(machine)[2]
    compiler_stub(machine, name="clang++")
    assert "run again with CXX=clang++" in preflight(machine)[2]
    assert preflight(machine, CXX="clang++")[0] == 0


def test_without_native_no_compiler_is_needed(machine: Path) -> None:
    python_stub(machine)
    status, _, err = preflight(machine, NATIVE="0")
    assert status == 0 and "no compiler needed" in err


def test_a_full_disk_is_said(machine: Path) -> None:
    python_stub(machine)
    compiler_stub(machine)
    stub(machine, "df", "printf 'head\\ndisk 99999999 1 102400 1%% /\\n'")
    status, _, err = preflight(machine)
    assert status == 1 and "100 MiB of disk are free here" in err and "3072 MiB are needed" in err


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_dependencies() -> list[str]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = [*project["dependencies"], *pyproject["build-system"]["requires"], "cmake", "ninja"]
    lines += [line for group in project["optional-dependencies"].values() for line in group]
    return sorted({normal(re.match(r"[\w.-]+", line)[0]) for line in lines})  # type: ignore[index]


@pytest.mark.parametrize("name", direct_dependencies())
def test_every_dependency_is_pinned_and_has_its_reason(name: str) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line)
    assert name in {normal(pin) for pin in pins}, f"{name} is not pinned in constraints.txt"
    table = re.findall(r"^\| ([\w, -]+) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert name in {normal(word.strip()) for row in table for word in row.split(",")}, f"{name}: no reason given"


DISTRIBUTIONS = {"yaml": "pyyaml", "mkdocs": "mkdocs-material", "sklearn": "scikit-learn"}
DISTRIBUTIONS["fbgemm_gpu"] = "fbgemm-gpu-cpu"
INSIDE = {"ray", "airflow", "inputs"}
"""What an example runs inside of, and whoever starts it has; `inputs` is a file of each export."""
EXTRAS = {"src": ("gpu", "rivals", "serve"), "examples": ("test",), "tests": ("test",), "benchmarks": ("bench", "test")}
EXTRAS["scripts"] = ("dev",)


@pytest.mark.parametrize("folder", EXTRAS)
def test_every_import_is_a_declared_dependency(folder: str) -> None:
    """A package that is there because another one brought it, or because a developer has it, is missed by users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [line for extra in EXTRAS[folder] for line in project["optional-dependencies"][extra]]
    declared += project["dependencies"]
    # Peers that a benchmark compares with on request: its docstring says how to install them, with versions.
    docs = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in (ROOT / folder).glob("*.py")]
    declared += [pin for doc in docs if doc for pin in re.findall(r"\b[\w.-]+==\d[\w.]*", doc)]
    names = {normal(re.match(r"[\w.-]+", line)[0]) for line in declared}  # type: ignore[index]
    own = {path.stem for glob in ("tests/*.py", "tests/*/*.py", "examples/*.py") for path in ROOT.glob(glob)}
    own |= {path.parent.name for path in ROOT.glob("tests/*/*.py")}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            given = sys.stdlib_module_names | own | INSIDE | {"hotrow", "benchmarks", "examples"}
            for module in {name.split(".")[0] for name in modules} - given:
                name = normal(DISTRIBUTIONS.get(module, module))
                assert name in names, f"{path.relative_to(ROOT)} imports {module}, which pyproject does not list for it"


def test_the_tree_names_no_package_index() -> None:
    """Where packages come from is the user's choice: no host is written into the install path."""
    files = [ROOT / name for name in ("Makefile", "constraints.txt", "pyproject.toml", ".pre-commit-config.yaml")]
    for file in [*files, *(ROOT / "scripts").iterdir()]:
        if file.is_file():
            assert not re.search(r"https?://", file.read_text()), file


def test_an_environment_that_make_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install.py", tmp_path / "scripts")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").touch()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "scripts" / "install.py"), "venv"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "was not made by `make`" in done.stderr
    assert (tmp_path / ".venv" / "precious").exists()
