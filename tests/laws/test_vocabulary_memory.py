"""Law: memory is bounded whatever the number of ids. 50 million distinct ids under 256 MiB, each row number checked.

Key i occurs once, the last HOT keys twice. So by the ranking rule the HOT last keys have rows 1 .. HOT, and key i of
the others has row HOT + 1 + i: the truth is a formula, and needs no memory itself.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hotrow.data.chunk import Keys
from hotrow.data.native import backend
from hotrow.data.prepare.encoder import EncoderPool
from hotrow.data.prepare.spill import CounterPool

HOT = 1000
CHUNK = 1 << 16
MEMORY_BYTES = 256 << 20
CLEAR = Path("/proc/self/clear_refs")


def keys_of(first: int, last: int) -> Keys:
    index = np.arange(first, last, dtype=np.uint64)
    return Keys((index * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))  # an odd factor: one-to-one modulo 2^64


def count_and_encode(folder: Path, num_ids: int) -> None:
    with CounterPool(folder / "spill", memory_bytes=MEMORY_BYTES) as counters:
        counters.declare("ids", "int")
        for first in range(0, num_ids, CHUNK):
            counters.add({"ids": [keys_of(first, min(first + CHUNK, num_ids))]})
        counters.add({"ids": [keys_of(num_ids - HOT, num_ids)]})
        summary = counters.build("ids", folder / "vocab", folder / "counts")
        assert counters.num_spills > 3
    assert summary.num_embeddings == num_ids + 1
    with EncoderPool({"ids": folder / "vocab"}, folder / "spill", memory_bytes=MEMORY_BYTES) as encoders:
        assert encoders["ids"].num_passes
        for _ in encoders.passes():
            for first in range(0, num_ids, CHUNK):
                encoders["ids"].add("id", keys_of(first, min(first + CHUNK, num_ids)))
        for first in range(0, num_ids, CHUNK):
            last = min(first + CHUNK, num_ids)
            rows = encoders["ids"].encode("id", keys_of(first, last), first_key=first)
            index = np.arange(first, last)
            assert (rows == np.where(index < num_ids - HOT, index + HOT + 1, index - (num_ids - HOT) + 1)).all()
    assert list((folder / "spill").iterdir()) == []


def peak_bytes() -> int:
    """Not ru_maxrss, which begins at what the parent had when it forked, and would hide what is below that."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(not CLEAR.exists(), reason="peaks are measured as Linux does")
@pytest.mark.skipif(backend().__name__ != "hotrow._native", reason="the reference code holds everything in memory")
def test_50m_ids_within_256_mib(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path), "50000000"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert grown < MEMORY_BYTES + (64 << 20), f"{grown / 2**20:.0f} MiB beyond the imports"


if __name__ == "__main__":
    CLEAR.write_text("5")  # the peak is what there is now
    before = peak_bytes()
    count_and_encode(Path(sys.argv[1]), int(sys.argv[2]))
    print(peak_bytes() - before)
