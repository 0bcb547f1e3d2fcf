"""What a process holds beside its tables: `plan.beside` against the memory of real processes, and what `choose` makes
of it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotrow.base.files import parse_bytes
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from hotrow.setup import memory as room
from hotrow.setup.beside import FIXED_BYTES, beside_bytes
from hotrow.setup.demand import required_bytes, tables_of
from hotrow.setup.memory import choose, shortage

MIB = 1 << 20
TRAINED = """
import json, re, sys, threading, time
from hotrow.config.load import load_config
from hotrow.setup import memory as choose
from hotrow.setup import setup
from hotrow.run import runs

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1])

def placed(*arguments, beside_bytes, **options):
    facts.update(before=anonymous(), beside=beside_bytes)
    return plain(*arguments, beside_bytes=beside_bytes, **options)

def watch():
    while True:
        facts["peak"] = max(facts["peak"], anonymous())
        time.sleep(0.002)

facts, plain = {"peak": 0}, setup.place_tables
setup.place_tables = placed
threading.Thread(target=watch, daemon=True).start()
runs.train(load_config(sys.argv[1]), quiet=True)
print(json.dumps(facts))
"""


def write(folder: Path, data: PackedDataset, **changes: Any) -> Path:
    raw: dict[str, Any] = {"data": str(data.path), "run": str(folder / "run"), **changes}
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


@pytest.mark.slow_but("8192")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's memory")
@pytest.mark.parametrize("batch_size", [64, 8192])
def test_against_the_process_memory(
    tmp_path: Path, make_dataset: Callable[..., PackedDataset], batch_size: int
) -> None:
    """The sum is no less than what a process takes, and of its size: with a large batch, most is not the fixed part."""
    data = make_dataset(
        tmp_path / "data", rows={"train": 8192, "val": 4096, "test": 64}, table_rows=(50,) * 20, rows_per_block=8192
    )
    model = {"embedding_dim": 64, "bottom_mlp": [256], "top_mlp": [256]}
    train = {"batch_size": batch_size, "max_steps": 2}
    config = write(tmp_path, data, model=model, train=train, checkpoint={"every": 1})
    done = subprocess.run([sys.executable, "-c", TRAINED, config], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    taken = facts["peak"] - facts["before"]
    assert taken <= facts["beside"] < 2 * taken + FIXED_BYTES
    assert batch_size == 64 or taken > 3 * FIXED_BYTES


def test_auto_leaves_what_the_process_will_hold(
    tmp_path: Path, make_dataset: Callable[..., PackedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_dataset(tmp_path / "data", table_rows=(200_000, 20, 1400))
    config = make_config({"data": str(data.path), "train": {"batch_size": 64}})
    tables = tables_of(config, data)
    needed, beside = required_bytes(config, tables), beside_bytes(config, data, tables)

    def place(available: int, memory: Any = "auto", **options: Any) -> Any:
        monkeypatch.setattr(room, "available_memory_bytes", lambda: available)
        asked = config.model_copy(update={"memory": make_config({"data": "d", "memory": memory}).memory})
        return choose(asked, tables, tmp_path, dataset=data, beside_bytes=beside, **options)[0], shortage(
            asked, tables, room.Room.here(), beside_bytes=beside
        )

    assert place(needed + beside) == (None, None)
    memory, short = place(needed + beside - 1)
    assert memory is not None and memory.dram_bytes < needed and short is None
    memory, _ = place(20 * needed, training=False)
    assert memory is None
    for available in (beside - 1, beside + 1000):
        for training in (True, False) if available < beside else (True,):
            with pytest.raises(
                ValueError, match="give it more memory, or lower" if training else "give it more memory$"
            ):
                place(available, training=training)
    # What the user says stays, and is warned of.
    for said in ("dram", {"dram": "8MiB"}):
        taken = needed if said == "dram" else parse_bytes("8MiB")
        memory, short = place(taken + beside, said)
        assert (memory is None) == (said == "dram") and short is None
        memory, short = place(taken + beside - 1, said)
        assert (memory is None) == (said == "dram") and "memory.dram to auto" in str(short)


def test_a_run_says_that_memory_may_run_out(
    tmp_path: Path, make_dataset: Callable[..., PackedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_dataset(tmp_path / "data")
    monkeypatch.setattr(room, "available_memory_bytes", lambda: FIXED_BYTES)
    raw = {"data": str(data.path), "memory": "dram", "train": {"max_steps": 1}, "run": str(tmp_path / "run")}
    runs.train(make_config(raw), quiet=True)
    assert RunFolder.open(tmp_path / "run").record.warnings["memory_may_run_out"]["count"] == 1
