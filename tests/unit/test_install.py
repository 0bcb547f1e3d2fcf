"""The install steps behind `make`, by stub interpreters and a stub pip: what is kept, pinned and said, nothing fetched
but by the last test, which tries the wheel.

That a torch of the calling environment is kept is seen by importing it in the .venv that was made.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.package
ROOT = Path(__file__).resolve().parents[2]
PINS = "numpy==2.0.0\ntorch==2.13.0\ntriton==3.5.0\nrich==14.0.0\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    Path("constraints.txt").write_text(PINS)
    return module


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def calling_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **packages: str) -> Path:
    """Runs install.py as if by a Python that has just `packages` (name=source); returns their folder."""
    site = tmp_path / "caller" / "site-packages"
    for name, source in packages.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(source + "\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    # -m venv without pip: nothing here needs it, and unpacking it takes seconds.
    python = executable(
        tmp_path / "caller" / "python",
        f'[ "$2" = venv ] && exec "{sys.executable}" -m venv --without-pip "$3"\n'
        f'PYTHONPATH="{site}" exec "{sys.executable}" -S "$@"',
    )
    monkeypatch.setattr(sys, "executable", str(python))
    plain = [folder for folder in sys.path if not folder.endswith(("site-packages", "dist-packages"))]
    monkeypatch.setattr(sys, "path", [*plain, str(site)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    return site


def imported(package: str) -> str:
    code = f"import {package}; print({package}.__version__)"
    done = subprocess.run([".venv/bin/python", "-c", code], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip()


@pytest.mark.parametrize("version", ["2.10.0", "2.12.1+cu130"])
def test_a_new_enough_torch_of_the_caller_is_kept(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    version: str,
) -> None:  # fmt: skip
    site = calling_environment(tmp_path, monkeypatch, torch=f"__version__ = '{version}'")
    before = sorted(site.rglob("*"))
    install.make_venv()
    assert imported("torch") == version
    assert Path(".venv/constraints.txt").read_text() == PINS.replace("torch==2.13.0", f"torch=={version}")
    assert f"keeping torch {version} of {sys.executable}" in capsys.readouterr().out
    assert [path for path in sorted(site.rglob("*")) if "__pycache__" not in path.parts] == before
    install.make_venv()  # again, over its own
    assert imported("torch") == version


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("__version__ = '2.9.1'", "is older than 2.10; another is installed beside it"),
        ("raise ImportError('libcudart.so.12')", ""),
        (None, ""),
    ],
)
def test_another_torch_is_not_kept(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    source: str | None, said: str,
) -> None:  # fmt: skip
    calling_environment(tmp_path, monkeypatch, **({} if source is None else {"torch": source}))
    install.make_venv()
    assert "No module named 'torch'" in imported("torch")
    assert Path(".venv/constraints.txt").read_text() == PINS
    out = capsys.readouterr().out
    assert said in out and "keeping" not in out


def test_a_kept_triton_is_not_pinned(install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calling_environment(tmp_path, monkeypatch, torch="__version__ = '2.11.0'", triton="__version__ = '3.4.0'")
    install.make_venv()
    assert imported("triton") == "3.4.0"
    assert Path(".venv/constraints.txt").read_text() == "numpy==2.0.0\ntorch==2.11.0\nrich==14.0.0\n"


@pytest.mark.parametrize("kept", [True, False])
def test_pins_that_changed_are_taken_up_but_not_over_a_kept_torch(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    packages = {"torch": "__version__ = '2.11.0'", "triton": "__version__ = '3.4.0'"} if kept else {}
    calling_environment(tmp_path, monkeypatch, **packages)
    install.make_venv()
    changed = "numpy==2.1.0\ntorch==2.14.0\ntriton==3.6.0\n"
    Path("constraints.txt").write_text(changed)
    for _ in range(2):
        install.refresh_pins()
        assert Path(".venv/constraints.txt").read_text() == ("numpy==2.1.0\ntorch==2.11.0\n" if kept else changed)


@pytest.fixture
def venv(install: ModuleType) -> ModuleType:
    """With a .venv whose Python has no package, says what pip is asked for, and knows torch as report.json has it."""
    executable(
        Path(".venv/bin/python"),
        'case "$*" in *find_spec*) exit 1;; *--dry-run*) cat report.json;; *"pip install"*) echo "pip: $*";; esac',
    )
    Path(".venv/constraints.txt").write_text(PINS)
    write_report([])
    return install


def write_report(requires: list[str]) -> None:
    metadata = {"version": "2.13.0", "requires_dist": requires}
    Path("report.json").write_text(json.dumps({"install": [{"metadata": metadata}]}))


def test_a_build_with_cuda_says_so_and_what_else_there_is(
    venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_report(["filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20 * 2**30))
    venv.install_packages(["test"])
    first, *_, last = capfd.readouterr().out.splitlines()
    assert first.startswith("install: about 3091 MB to download") and last.startswith("pip: ")
    assert "triton" not in Path(".venv/constraints.txt").read_text()


def test_a_build_with_cuda_that_does_not_fit_is_not_fetched(
    venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_report(["cuda-bindings==13.0"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * 2**30))
    with pytest.raises(SystemExit, match=r"8\.0 GiB of disk are free, the CUDA build needs 9; see the line above"):
        venv.install_packages(["test"])
    assert "pip: " not in capfd.readouterr().out


def test_no_torch_for_this_python_is_said_with_the_cure(venv: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    executable(Path(".venv/bin/python"), 'case "$*" in *find_spec*|*--dry-run*) exit 1;; *pip*) echo "pip: $*";; esac')
    with pytest.raises(SystemExit, match=r"pip finds no torch==2\.13\.0 .*activate an environment with torch >= 2\.10"):
        venv.install_packages([])
    assert "pip: " not in capfd.readouterr().out


def test_a_pip_that_fails_ends_with_its_status(venv: ModuleType) -> None:
    executable(Path(".venv/bin/python"), 'case "$*" in *find_spec*triton*) exit 1;; *pip*) exit 7;; esac')
    with pytest.raises(SystemExit) as ended:
        venv.install_packages(["test"])
    assert ended.value.code == 7


@pytest.mark.skipif("CI" not in os.environ, reason="it compiles, and fetches torch: CI=true make test-package")
def test_the_wheel_alone_runs_in_an_empty_environment(tmp_path: Path) -> None:
    def run(*words: object) -> str:
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([*map(str, words)], cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    known = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.*")}
    made = ("hotrow/_native", "hotrow-0.1.0.dist-info/")
    assert {name for name in ZipFile(wheel).namelist() if not name.startswith(made)} <= known, "no tests, no docs"
    run(sys.executable, "-m", "venv", "own")
    run("own/bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    run("own/bin/hotrow", "--help")
    before = os.times()
    run("own/bin/hotrow", "--help")
    now = os.times()
    spent_s = now.children_user + now.children_system - before.children_user - before.children_system
    assert spent_s <= 0.5, "the command line answers before torch is loaded"
    (tmp_path / "x.csv").write_text("click,item\n" + "".join(f"{i % 3 % 2},i{i % 7}\n" for i in range(500)))
    assert json.loads(run("own/bin/hotrow", "fit", "x.csv", "--json").splitlines()[-1])["status"] == "finished"
    shutil.rmtree(tmp_path)  # over a gigabyte
