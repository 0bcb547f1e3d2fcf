"""Builds the native module with sanitizers and runs its tests on it.

    python scripts/sanitize.py [pytest arguments]            address and undefined behaviour
    python scripts/sanitize.py --thread [pytest arguments]   data races
    python scripts/sanitize.py --tiles [pytest arguments]    the first, and products of bfloat16 on emulated AMX tiles

Builds go to folders build/sanitize* and leave the installed one alone; Python processes that
tests start find the sanitized build too. Leaks are not looked for: Python frees late. The thread sanitizer does not
know the barriers of libgomp, so its build does without OpenMP: the same tasks run on std::thread (native/include/
hotrow/parallel.h). It sees every lock, Python's among them, but only our own code's accesses: Python and torch are not
instrumented. Where a report says <null>, this names the place: addr2line -f -C -e .../site/hotrow/_native*.so OFFSET
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Sanitizer(NamedTuple):
    """How to build and run under one."""

    name: str
    """Value of HOTROW_SANITIZE."""
    folder: Path
    library: str
    environment: dict[str, str]
    options: tuple[str, ...]
    """Of cmake."""
    tests: tuple[str, ...]
    left_out: tuple[str, ...]


# What a process takes is not what it would take without: freed memory is kept aside to catch later use.
MEASURES_MEMORY = "tests/unit/test_store_limits.py::test_what_waiting_rows_take_is_counted_and_bounded"
# 200 forks of a process with shadow memory take minutes; it has one.
FORKS_OFTEN = "tests/unit/test_forks_and_threads.py::test_a_fork_beside_threads_that_take_memory_leaves_no_lock_behind"
STORE_IN_A_CHILD = "tests/unit/test_store_faults.py::test_a_forked_child_is_told"
ADDRESS = Sanitizer(
    name="address",
    folder=Path("build/sanitize"),
    library="libasan.so",
    environment={"ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    options=(),
    tests=(
        "tests/laws/test_kernels.py",
        "tests/laws/test_kernels_truth.py",
        "tests/laws/test_row_sums.py",
        "tests/laws/test_storage.py",
        "tests/laws/test_dense.py",
        "tests/laws/test_dense_bf16.py",
        "tests/laws/test_sequences.py",
        "tests/laws/test_vocabulary_rows.py",
        "tests/laws/test_store_law.py",
        "tests/laws/test_checkpoint_rows.py",
        "tests/laws/test_tiers.py",
        "tests/laws/test_cache_policies.py",
        "tests/unit/test_ops.py",
        "tests/unit/test_batch.py",
        "tests/unit/test_gradients.py",
        "tests/unit/test_optim.py",
        "tests/unit/test_criteo_source.py",
        "tests/unit/test_vocabulary.py",
        "tests/unit/test_spill.py",
        "tests/unit/test_mapping_fault.py",
        "tests/unit/test_stores.py",
        "tests/unit/test_cached_store.py",
        "tests/unit/test_gathered_store.py",
        "tests/unit/test_forks_and_threads.py",
        "tests/unit/test_hot_tracker.py",
    ),
    left_out=(
        MEASURES_MEMORY,
        FORKS_OFTEN,
        # A lock of its allocator stays held in a child where another thread had it at the fork: threads there wait.
        STORE_IN_A_CHILD,
    ),
)
THREAD = Sanitizer(
    name="thread",
    folder=Path("build/sanitize-thread"),
    library="libtsan.so",
    environment={
        "TSAN_OPTIONS": "die_after_fork=0 handle_sigbus=0 second_deadlock_stack=1 suppressions={suppressions}",
    },
    options=("CMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON",),
    tests=(
        "tests/laws/test_kernels.py",
        "tests/laws/test_row_sums.py",
        "tests/laws/test_dense.py",
        "tests/laws/test_dense_bf16.py",
        "tests/laws/test_store_law.py",
        "tests/laws/test_tiers.py",
        "tests/unit/test_ops.py",
        "tests/unit/test_mapping_fault.py",
        "tests/unit/test_stores.py",
        "tests/unit/test_cached_store.py",
        "tests/unit/test_gathered_store.py",
        "tests/unit/test_forks_and_threads.py",
    ),
    left_out=(
        MEASURES_MEMORY,
        FORKS_OFTEN,
        # Its runtime stops or hangs forked children that start threads ("dup thread with used id").
        STORE_IN_A_CHILD,
        "tests/unit/test_forks_and_threads.py::test_a_forked_child_computes_the_same_on_one_thread_and_says_so",
        "tests/unit/test_forks_and_threads.py::test_a_forked_child_of_one_thread_may_use_torch_too",
        "tests/unit/test_forks_and_threads.py::test_multiprocessing_with_fork",
        # 33 threads started anew for each loop take minutes.
        "tests/unit/test_forks_and_threads.py::test_more_threads_than_cores",
        # Slowed down so much, nothing waits any more when it looks.
        "tests/unit/test_cached_store.py::test_a_row_is_read_while_its_write_down_waits",
    ),
)
TILES = ADDRESS._replace(
    folder=Path("build/sanitize-tiles"),
    environment={**ADDRESS.environment, "HOTROW_EMULATED_TILES": "1"},  # for tests: these tiles can be refused
    options=("HOTROW_EMULATED_TILES=ON",),
    tests=(
        "tests/laws/test_dense_bf16.py",
        "tests/laws/test_dense.py",
        "tests/laws/test_denormals.py",
        "tests/laws/test_device_runs.py::test_dense_layers_in_bfloat16",
        "tests/laws/test_resume.py::test_other_threads_and_products_are_counted",
    ),
)
# Not ours: libgomp's barriers are not seen, between which torch copies what its OpenMP team was given and after which
# glibc frees what belonged to threads of such a team; nor, therefore, the locks that torch takes in one library and
# gives back in another.
SUPPRESSIONS = """\
called_from_lib:libtorch_cpu.so
mutex:libtorch
race:dl_deallocate_tls
"""
# The editable install answers for hotrow before PYTHONPATH does; here the sanitized copy must, in every process.
SITE_CUSTOMIZE = """\
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


def build(sanitizer: Sanitizer) -> Path:
    """Install hotrow with the sanitized module into a folder of its own; returns the folder."""
    site = sanitizer.folder / "site"
    flags = ["-q", "--no-deps", "--no-build-isolation", "--upgrade", "--target", str(site)]
    settings = [f"build-dir={sanitizer.folder / 'objects'}", f"cmake.define.HOTROW_SANITIZE={sanitizer.name}"]
    settings += ["install.strip=false", *(f"cmake.define.{option}" for option in sanitizer.options)]
    options = [word for setting in settings for word in ("-C", setting)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *flags, *options, "."],
        check=True,
        env={**os.environ, "PATH": path},
    )
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    return site.resolve()


def runtime(name: str) -> str:
    """Where the compiler's sanitizer library lies: it must be loaded before Python."""
    found = subprocess.run(
        [os.environ.get("CXX", "c++"), f"-print-file-name={name}"], check=True, capture_output=True, text=True
    )
    return found.stdout.strip()


def main(arguments: list[str]) -> int:
    """Build, then run the tests; returns pytest's status, or the sanitizer's where it has found something."""
    sanitizer = {"--thread": THREAD, "--tiles": TILES}.get(arguments[0] if arguments else "", ADDRESS)
    arguments = arguments if sanitizer is ADDRESS else arguments[1:]
    environment = {
        **os.environ,
        "PYTHONPATH": str(build(sanitizer)),
        "LD_PRELOAD": f"{runtime(sanitizer.library)} {runtime('libstdc++.so')}",
    }
    suppressions = sanitizer.folder.resolve() / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    for name, options in sanitizer.environment.items():
        environment[name] = options.format(suppressions=suppressions)
    # Captured file descriptors would swallow reports beside tests that pass.
    left_out = [word for test in sanitizer.left_out for word in ("--deselect", test)]
    command = [sys.executable, "-m", "pytest", "--capture=sys", *left_out, *(arguments or ["-q", *sanitizer.tests])]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    sys.exit(main(sys.argv[1:]))
