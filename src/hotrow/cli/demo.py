"""`hotrow demo`: the whole way from raw rows to a trained model, on made-up clicks or on the user's own logs."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from hotrow.api import Run, fit
from hotrow.base.progress import progress_bar
from hotrow.config.load import apply_overrides, make_config
from hotrow.config.recipe import as_overrides, choose_recipe
from hotrow.data.packed.format import MANIFEST
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.synthetic import write_criteo
from hotrow.data.sources.synthetic_config import criteo_kaggle
from hotrow.kernels import ops
from hotrow.run.folder import RunFolder
from hotrow.run.runs import train

NUM_ROWS = 600_000
TABLE_SCALE = 0.01
"""Size of the tables relative to Criteo Kaggle's. With 1/70 of its rows, about the same share of ids is seen."""
DRAM = "4MiB"
"""Less than the tables take, so that the rest lies on disk, as it does if tables are larger than memory."""


def say(text: str) -> None:
    """Prints a line for the user, on stderr."""
    print(text, file=sys.stderr, flush=True)


def demo_on_synthetic(folder: Path) -> dict[str, Any]:
    """Writes synthetic clicks as Criteo text, packs them and trains a DLRM; reuses what `folder` already has."""
    started = time.monotonic()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    clicks = criteo_kaggle(NUM_ROWS, scale=TABLE_SCALE)
    raw, packed = folder / f"clicks-{clicks.digest}.txt", folder / f"packed-{clicks.digest}"
    tiers = ops.backend().reason is None  # tiers need the native module
    where = f"the tables in {DRAM} of memory, the rest on disk" if tiers else "the tables in memory"
    say(f"1/3  {NUM_ROWS:,} synthetic clicks: made up, in Criteo's layout, from a planted truth; {where}")
    if not raw.exists():
        write_criteo(raw, clicks)
    say(f"2/3  preparing {raw} ({raw.stat().st_size / 2**20:.0f} MiB)")
    if not (packed / MANIFEST).exists():
        with progress_bar() as progress:
            run_prepare("criteo", raw, packed, progress=progress)
    say("3/3  training a DLRM")
    memory = {"memory": {"dram": DRAM}} if tiers else {}
    dataset = PackedDataset.open(packed)
    recipe = choose_recipe(dataset.split("train").num_rows, num_features=len(dataset.info.features))
    config = make_config(apply_overrides({"data": str(packed), **memory}, as_overrides(recipe)), origin="demo")
    run = Run(train(config, folder=RunFolder.create(None, name=f"demo-{config.model.name}")).path)
    commands = ["hotrow demo --data YOUR_LOGS --label CLICK_COLUMN", "make demo DATA=YOUR_LOGS LABEL=CLICK_COLUMN"]
    return _result(run, f"{NUM_ROWS:,} synthetic rows", time.monotonic() - started, commands)


def demo_on_logs(data: str, **options: Any) -> dict[str, Any]:
    """Guesses the schema of the user's logs, packs them, trains and evaluates. options: those of `fit`."""
    started = time.monotonic()
    run = fit(data, **options)
    return _result(run, data, time.monotonic() - started, run.next_commands(shlex.quote(data)))


def _result(run: Run, rows: str, seconds: float, commands: list[str]) -> dict[str, Any]:
    summary = run.summary()
    return {
        **summary,
        "rows": rows,
        "seconds": round(seconds, 1),
        "next": commands[0],
        "text": run.closing_lines(f"DLRM on {rows}", commands),
    }
