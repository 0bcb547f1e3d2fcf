"""Builds the native module with the address and undefined-behaviour sanitizers and runs its tests on it.

    python scripts/sanitize.py [pytest arguments]

The build goes to build/sanitize and leaves the installed one alone. Leaks are not looked for: Python frees late.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUILD = Path("build/sanitize")
TESTS = (
    "tests/laws/test_kernels.py",
    "tests/laws/test_kernels_truth.py",
    "tests/laws/test_storage.py",
    "tests/laws/test_dense.py",
    "tests/laws/test_sequences.py",
    "tests/laws/test_vocabulary_rows.py",
    "tests/laws/test_store_law.py",
    "tests/laws/test_tiers.py",
    "tests/laws/test_reuse.py",
    "tests/unit/test_ops.py",
    "tests/unit/test_batch.py",
    "tests/unit/test_gradients.py",
    "tests/unit/test_optim.py",
    "tests/unit/test_criteo_source.py",
    "tests/unit/test_vocabulary.py",
    "tests/unit/test_spill.py",
    "tests/unit/test_stores.py",
    "tests/unit/test_cached_store.py",
    "tests/unit/test_hot_tracker.py",
)
# The editable install answers for hotrow before sys.path does; here the sanitized copy must.
RUN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, sys.argv.pop(1))
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def build() -> Path:
    """Install hotrow with the sanitized module into a folder of its own; returns the folder."""
    site = BUILD / "site"
    flags = ["-q", "--no-deps", "--no-build-isolation", "--upgrade", "--target", str(site)]
    options = ["-C", "cmake.define.HOTROW_SANITIZE=ON", "-C", f"build-dir={BUILD / 'objects'}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *flags, *options, "."],
        check=True,
        env={**os.environ, "PATH": path},
    )
    return site


def runtime(name: str) -> str:
    """Where the compiler's sanitizer library lies: it must be loaded before Python."""
    found = subprocess.run(
        [os.environ.get("CXX", "c++"), f"-print-file-name={name}"], check=True, capture_output=True, text=True
    )
    return found.stdout.strip()


def main() -> None:
    """Build, then run the tests; ends with pytest's status."""
    site = build()
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    arguments = sys.argv[1:] or ["-q", *TESTS]
    done = subprocess.run([sys.executable, "-c", RUN, str(site), *arguments], env=environment, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    main()
