"""What a machine can do: figures that `hotrow probe` measured here, or that somebody declared, as `hardware.json`.

Every figure has a source and a spread. Nothing that could not be read is zero: it is absent (None).
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue
from pydantic.dataclasses import dataclass as record

from hotrow.base.records import STRICT, Amount, Count, Document

Source = Literal["measured", "declared", "assumed"]


@record(frozen=True, config=STRICT)
class Figure:
    """A figure of a machine."""

    value: Amount
    """The median of the repeats, if it was measured."""
    low: Amount | None = None
    """The lower quartile of the repeats; None for a figure that was not measured."""
    high: Amount | None = None
    source: Source = "measured"
    note: str = ""
    """For a declared or assumed figure: where it is from, or why it is assumed."""


@record(frozen=True, config=STRICT)
class Point:
    """One measurement of a kernel: the sizes it ran at, and the seconds it took."""

    sizes: dict[str, Amount]
    seconds: Figure


@record(frozen=True, config=STRICT)
class Disk:
    """A folder's disk, past the page cache."""

    folder: str
    reads_per_s: dict[str, Figure]
    """Random reads of a sector a second, by queue depth."""
    writes_per_s: dict[str, Figure]
    """Random writes of a sector a second over written blocks, by queue depth."""
    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    cpu_s_per_io: Figure
    """Processor time of one I/O."""
    engine: str = "io_uring"
    endurance_bytes: Figure | None = None
    """Bytes that the drive is rated to take in its life; declared."""


@record(frozen=True, config=STRICT)
class Hardware:
    """A machine."""

    name: str
    date: str
    host: dict[str, JsonValue]
    """`host_facts()`: processor, cores, instruction set."""
    versions: dict[str, str]
    num_cores: Count
    dram_bytes: Figure
    stream_bytes_per_s: dict[str, Figure] = field(default_factory=dict)
    """Sequential reads of DRAM, by number of threads."""
    kernels: dict[str, list[Point]] = field(default_factory=dict)
    """Times of our own kernels and of a step's fixed parts, by name; `plan/cost.py` says which it uses."""
    disks: list[Disk] = field(default_factory=list)
    gpus: list[dict[str, JsonValue]] = field(default_factory=list)
    network_bytes_per_s: Figure | None = None
    watts: Figure | None = None
    """Power of the machine under load: declared, or from energy counters while the probe ran."""
    price_per_hour: Figure | None = None


HARDWARE = Document(Hardware, marks={"hotrow_hardware": 1}, cure="measure it again with hotrow probe")


def read_hardware(path: Path | str) -> Hardware:
    """Returns the machine that a file describes. Raises ValueError, which names the file, the field and the cure."""
    return HARDWARE.read(path)
