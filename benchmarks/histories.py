"""Packed samples of examples/histories.py, for the benchmarks and tests of models that read histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from examples.histories import read_events, write_samples
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import load_schema

SCHEMA = Path(__file__).resolve().parents[1] / "examples" / "histories.yaml"


def prepare(events: Path | pl.DataFrame, out: Path, **options: Any) -> PackedDataset:
    """Prepares the samples of events; options: as for `samples`. Every event of a user but the first is a target if
    `every` is not given, because samples of a log leave few events of a user."""
    rows = out.with_suffix(".parquet")
    rows.parent.mkdir(parents=True, exist_ok=True)
    write_samples(events if isinstance(events, pl.DataFrame) else read_events(events), rows, **options)
    return run_prepare("parquet", rows, out, schema=load_schema(SCHEMA))
