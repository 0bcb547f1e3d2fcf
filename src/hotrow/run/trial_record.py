"""Where the last trial of a setup is kept, so that a run of it can say at its end how far off the trial was."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hotrow.base.files import write_json
from hotrow.base.machine import host_facts
from hotrow.run.record import Tried
from hotrow.setup.setup import Setup

MOST_KEPT = 100
"""Trials that are kept; the oldest goes when another one comes."""
_WITHOUT = ("data", "run", "checkpoint", "metrics", "calibration")
"""Parts of a config that no step depends on, and the path of the data, whose checksum counts."""
_OF_TRAIN = ("log_every", "eval_every", "early_stopping", "monitor", "nonfinite")
_TRIED = TypeAdapter(Tried)


def _path(setup: Setup) -> Path:
    """The file of trials of this setup, by what its steps depend on, in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    without: dict[str, Any] = {**dict.fromkeys(_WITHOUT, True), "from_run": True, "train": {*_OF_TRAIN}}
    options = setup.config.model_dump(mode="json", exclude=without)
    options["starts_from_a_run"] = setup.config.from_run is not None
    facts: list[Any] = [options, setup.dataset.checksum, setup.ranks.size, host_facts()["cpu"]]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "hotrow" / "trials" / f"{key}.json"


def keep_trial(setup: Setup, tried: Tried) -> None:
    """Keeps what a trial of `setup` measured. If there is no place to write, it is lost and no run mentions it."""
    path = _path(setup)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, tried)
        kept = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in kept[:-MOST_KEPT]:
            old.unlink(missing_ok=True)


def kept_trial(setup: Setup) -> Tried | None:
    """The last trial of `setup` on a processor like this one; None if there was none, or its file is damaged."""
    try:
        return _TRIED.validate_json(_path(setup).read_bytes())
    except (OSError, ValidationError):
        return None
