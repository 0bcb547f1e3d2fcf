"""Rows under a mapped file that is cut short, or whose medium fails, are named before SIGBUS ends the process."""

import signal
import sys
from pathlib import Path

import pytest

from forked import run_forked
from hotrow.kernels import ops

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")

CUT_WHILE_COPIED = """
import mmap, os, sys, threading
import numpy as np
from hotrow.placement.stores import TableRows, open_store
path, how, cause = sys.argv[1:]
parts = range(128)  # of a record, copied slowly, so that the cut comes while they are
store = open_store(TableRows(table="item", record_bytes=16 * len(parts), num_rows=100), kind="mapped", path=path)
store.write([98, 99], [0, 0], [np.ones((1, 16), np.uint8) for _ in parts])
here = [np.frombuffer(mmap.mmap(-1, 4096), np.uint8, 16).reshape(1, 16) for _ in parts]  # shared with forks
for part in here:
    part[:] = 2
there = np.memmap(path, np.uint8, mode="r")

def cut():
    while here[0][0, 0] != 1 if how == "read" else there[4096 + 99 * 2048] != 2:
        pass
    if cause == "medium":  # a file that is whole for who asks for its length
        for number in map(int, os.listdir("/proc/self/fd")):
            if os.path.exists(f"/proc/self/fd/{number}") and os.path.samefile(f"/proc/self/fd/{number}", path):
                whole = os.open(path + "-whole", os.O_RDWR | os.O_CREAT)
                os.truncate(whole, 1 << 20)
                os.dup2(whole, number)
    os.truncate(path, 8192)

if cause == "medium":
    threading.Thread(target=cut, daemon=True).start()
elif not os.fork():  # faulthandler may crash on the frames of a thread that runs
    cut()
    os._exit(0)
many = np.full(4_000_000, 99)
getattr(store, how)(many, np.zeros_like(many), here)
print("went on")
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="finds the file's descriptors in /proc")
@pytest.mark.parametrize(
    ("how", "cause", "before"),
    [("read", "cut", ""), ("write", "cut", "import faulthandler; faulthandler.enable()"), ("read", "medium", "")],
)
def test_rows_lost_while_they_are_copied_are_named(tmp_path: Path, how: str, cause: str, before: str) -> None:
    """The signal is told and stays the end: exit status, and what faulthandler says, are the system's."""
    done = run_forked(before + CUT_WHILE_COPIED, tmp_path / "t", how, cause)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, ""), done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith(f"hotrow: rows 98 to 99 of table 'item' in {tmp_path / 't'} are lost"), "a page of 4096"
    assert ("something cut the file short" if cause == "cut" else "its medium failed") in first
    assert "hotrow train --resume" in first
    assert bool(rest) == bool(before), done.stderr
    assert not before or ("Bus error" in rest[0] and any("placement/stores.py" in line for line in rest))


OTHER_FAULTS = """
import ctypes, faulthandler, mmap, os, signal, sys
import numpy as np
from hotrow.placement.stores import TableRows, open_store

def run(what, folder):
    os.mkdir(folder)
    if what == "ignored":
        signal.signal(signal.SIGBUS, signal.SIG_IGN)
    if what == "handled":
        signal.signal(signal.SIGBUS, lambda *_: os.write(1, b"handled, "))
    if what == "traced":
        faulthandler.enable(open(f"{folder}/trace", "w"))
    rows = TableRows(table="t", record_bytes=512, num_rows=100)
    stores = [open_store(rows, kind="mapped", path=f"{folder}/{i}") for i in range(3)]
    if what in ("sent", "ignored", "handled"):
        os.kill(os.getpid(), signal.SIGBUS)
        return
    if what == "closed":  # memory that was watched may be the next mapping's
        for store in stores:
            store.close()
    if what == "child" and (child := os.fork()):
        os._exit(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    with open(f"{folder}/other", "w+b") as file:
        file.truncate(stores[0].path.stat().st_size)
        other = mmap.mmap(file.fileno(), 0)
        file.truncate(0)
    ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(other)), 1)

for what in ("other", "traced", "closed", "child", "sent", "ignored", "handled"):
    folder = f"{sys.argv[1]}/{what}"
    if not (child := os.fork()):
        run(what, folder)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(what, ended, flush=True)
"""


@needs_native
def test_other_faults_are_left_alone(tmp_path: Path) -> None:
    done = run_forked(OTHER_FAULTS, tmp_path)
    bus = signal.SIGBUS.value
    killed = [f"{what} {-bus}" for what in ("other", "traced", "closed")] + [f"child {bus}", f"sent {-bus}"]
    assert done.stdout.splitlines() == [*killed, "ignored 0", "handled, handled 0"], done.stderr
    assert done.stderr == ""
    assert (tmp_path / "traced" / "trace").read_text().startswith("Fatal Python error: Bus error")
