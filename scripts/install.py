"""The install steps behind `make`: one folder, .venv, that nothing outside it depends on.

    python scripts/install.py venv               make .venv; keep the torch of the calling environment, if it has one
    python scripts/install.py packages GROUP...  install what hotrow runs on, and what each GROUP of pyproject needs
    python scripts/install.py core               build hotrow itself (HOTROW_NATIVE=0: without the native module)

The calling environment is never changed: where it has a usable torch, .venv sees its packages through one .pth file.
Standard library only, because it runs before anything is installed. The Makefile calls it in this order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = VENV / "constraints.txt"  # constraints.txt of the repository, but for a torch that is kept
OURS = VENV / ".made-by-hotrow"
OLDEST_TORCH = (2, 10)
QUIET = ["--disable-pip-version-check", "--no-input"]
BUILD_TOOLS = ["cmake", "ninja"]
# Sums of wheel sizes on Linux x86-64 and Python 3.11; pip's cache and configuration decide what is really fetched.
CPU_TORCH_MB, CUDA_TORCH_MB = 200, 2700
GROUP_MB = {"tensorboard": 150, "test": 391, "dev": 65, "bench": 60}
CUDA_DISK_GIB = 9

TORCH_OF_CALLER = """
import torch
print(torch.__version__)
"""


def say(text: str) -> None:
    """One line for the reader, in order with what pip prints."""
    print(f"install: {text}", flush=True)


def run(*command: object) -> None:
    """Run `command`; where it fails, end with its own status and without a traceback."""
    status = subprocess.run([str(word) for word in command], check=False).returncode
    if status:
        sys.exit(status)


def caller_torch() -> str | None:
    """Version of the torch that the calling interpreter can import, or None where there is none or it is too old."""
    found = subprocess.run([sys.executable, "-c", TORCH_OF_CALLER], check=False, capture_output=True, text=True)
    version = found.stdout.strip()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if found.returncode or numbers is None:
        return None
    if (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        say(f"torch {version} of {sys.executable} is older than 2.10; another is installed beside it")
        return None
    return version


def make_venv() -> None:
    """Create .venv and its constraints; where the caller has a torch, make it visible and pin it instead of ours."""
    if VENV.exists() and not OURS.exists():
        sys.exit(f"install: {VENV} exists and was not made by `make`; move it away or clone into another folder")
    kept = caller_torch()
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    OURS.touch()
    run(sys.executable, "-m", "venv", VENV)
    pins = Path("constraints.txt").read_text()
    if kept is not None:
        folders = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
        base = {"base": str(VENV), "platbase": str(VENV)}
        purelib = Path(sysconfig.get_path("purelib", "venv", vars=base))
        (purelib / "caller.pth").write_text("\n".join(folders) + "\n")
        pins = re.sub(r"(?m)^torch==.*$", f"torch=={kept}", pins)
        if importlib.util.find_spec("triton") is not None:
            pins = without_triton(pins)
        say(f"keeping torch {kept} of {sys.executable}")
    CONSTRAINTS.write_text(pins)


def without_triton(pins: str) -> str:
    """A CUDA build of torch asks for one version of triton, its own."""
    return re.sub(r"(?m)^triton==.*\n", "", pins)


def refresh_pins() -> None:
    """Take up pins that changed since .venv was made; torch stays the caller's, triton that of another torch."""
    before, pins = CONSTRAINTS.read_text(), Path("constraints.txt").read_text()
    if any(VENV.glob("lib/python*/site-packages/caller.pth")):
        kept = next(pin for pin in before.split() if pin.startswith("torch=="))
        pins = re.sub(r"(?m)^torch==.*$", kept, pins)
    if "triton==" not in before and importable("triton"):
        pins = without_triton(pins)
    CONSTRAINTS.write_text(pins)


def requirements(groups: list[str]) -> list[str]:
    """Requirement lines of pyproject.toml: what runs and builds hotrow, and the optional `groups`."""
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    project = pyproject["project"]
    wanted = [*project["dependencies"], *pyproject["build-system"]["requires"], *BUILD_TOOLS]
    for group in groups:
        wanted += project["optional-dependencies"][group]
    return wanted


def announce_download(groups: list[str]) -> None:
    """Say how much will be fetched, before it is; end where a CUDA build of torch would not fit on the disk."""
    others = sum(GROUP_MB[group] for group in groups)
    if importable("torch"):
        say(f"about {others} MB to download for {', '.join(groups)}")
        return
    torch = next(pin for pin in CONSTRAINTS.read_text().split() if pin.startswith("torch=="))
    report = subprocess.run(
        [PYTHON, "-m", "pip", "install", *QUIET, "-q", "--dry-run", "--no-deps", "--report", "-", torch],
        check=False, stdout=subprocess.PIPE,
    )  # fmt: skip
    if report.returncode:
        sys.exit(
            f"install: pip finds no {torch} for this Python and platform; activate an environment with torch >= 2.10"
        )
    metadata = json.loads(report.stdout)["install"][0]["metadata"]
    cuda = any(re.match(r"nvidia-|cuda-", name) for name in metadata.get("requires_dist", []))
    size = CUDA_TORCH_MB if cuda else CPU_TORCH_MB
    say(f"about {size + others} MB to download: torch {metadata['version']} {size} MB, all else {others} MB")
    if cuda:
        CONSTRAINTS.write_text(without_triton(CONSTRAINTS.read_text()))
        say("this torch brings CUDA libraries, which hotrow does not need. For the CPU build, point pip at it first")
        say("(PIP_FIND_LINKS or PIP_INDEX_URL; torch's install page says where), or activate an environment with torch")
        if (free := shutil.disk_usage(".").free / 2**30) < CUDA_DISK_GIB:
            sys.exit(
                f"install: {free:.1f} GiB of disk are free, the CUDA build needs {CUDA_DISK_GIB}; see the line above"
            )


def importable(name: str) -> bool:
    """Whether .venv's Python finds the package `name`."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


def install_packages(groups: list[str]) -> None:
    """Install what `requirements` lists at the versions of constraints.txt."""
    refresh_pins()
    announce_download(groups)
    run(PYTHON, "-m", "pip", "install", *QUIET, "-c", CONSTRAINTS, *requirements(groups))


def build_core() -> None:
    """Build hotrow into .venv in place (Python edits need no rebuild), with the pinned build tools of .venv."""
    native = os.environ.get("HOTROW_NATIVE", "1") != "0"
    say("compiling the native module (about a minute)" if native else "without the native module (NATIVE=0)")
    # An absolute first PATH entry, so that CMake and Ninja are the pinned ones.
    os.environ["PATH"] = f"{(VENV / 'bin').absolute()}{os.pathsep}{os.environ['PATH']}"
    flags = [*QUIET, "-q", "--no-deps", "--no-build-isolation"]
    run(PYTHON, "-m", "pip", "install", *flags, "-e", ".")


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    match sys.argv[1:]:
        case ["venv"]:
            make_venv()
        case ["packages", *groups]:
            install_packages(groups)
        case ["core"]:
            build_core()
        case _:
            sys.exit(__doc__)
