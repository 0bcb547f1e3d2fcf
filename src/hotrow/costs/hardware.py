"""What a machine can do: figures that `hotrow probe` measured here, or that somebody declared, as `hardware.json`.

Every figure has a source and a spread. Nothing that could not be read is zero: it is absent (None, or not in its list),
and `Hardware.notes` says why.

A declared file (YAML) has the same fields and holds some of them: figures that replace measured ones, each with a note
that names its public source, or `source: assumed` and a note that gives the reason. If it has a `name`, it describes
another machine, of which it must say everything. machines/ holds some of these.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from dataclasses import fields as fields_of
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass as record

from hotrow.base.files import parse_bytes, size
from hotrow.base.machine import host_facts
from hotrow.base.progress import rate
from hotrow.base.records import STRICT, Amount, Count, Document, checked
from hotrow.config.load import load_yaml
from hotrow.kernels import ops

Source = Literal["measured", "declared", "assumed"]
MACHINES = Path(__file__).with_name("machines")
"""The folder of the declared machines that come with hotrow."""
CURE = "measure it again with hotrow probe"
COST_VERSION = 2
"""Of the cost model: raised whenever amounts of `costs/cost.py` change, so that points measured before go unused."""
DECLARED_CURE = "docs/probe.md says what a declared file holds"


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

    @classmethod
    def of(cls, repeats: Sequence[float], note: str = "") -> Figure:
        """Returns the median of at least two repeats, and their quartiles."""
        low, median, high = statistics.quantiles(repeats, n=4, method="inclusive")
        return cls(median, low, high, note=note)

    def __post_init__(self) -> None:
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        if not low <= self.value <= high:
            raise ValueError(f"value {self.value:g} is not between low {low:g} and high {high:g}")
        if self.source != "measured" and not self.note.strip():
            what = "its public source" if self.source == "declared" else "the reason for assuming it"
            raise ValueError(f"a figure that is {self.source} needs a note with {what}")


def _within(figure: Figure, least: float, most: float, unit: str) -> Figure:
    for value in (figure.low, figure.value, figure.high):
        if value is not None and not least <= value <= most:
            raise ValueError(f"{value:g} {unit} is absurd; it must be from {least:g} to {most:g}")
    return figure


def _by_number(figures: dict[str, Figure]) -> dict[str, Figure]:
    for key in figures:
        if not (key.isascii() and key.isdigit()) or key.startswith("0"):
            raise ValueError(f"key {key!r} must be a whole number of at least 1")
    return figures


# The limits are far from any machine that exists: they catch a wrong unit, a wrong sign and a broken measurement.
Bytes = Annotated[Figure, AfterValidator(partial(_within, least=2**20, most=2**60, unit="bytes"))]
BytesPerS = Annotated[Figure, AfterValidator(partial(_within, least=1e3, most=1e14, unit="bytes/s"))]
FlopsPerS = Annotated[Figure, AfterValidator(partial(_within, least=1e6, most=1e18, unit="operations/s"))]
IosPerS = Annotated[Figure, AfterValidator(partial(_within, least=0.1, most=1e10, unit="I/Os/s"))]
Seconds = Annotated[Figure, AfterValidator(partial(_within, least=1e-18, most=1e4, unit="s"))]
Watts = Annotated[Figure, AfterValidator(partial(_within, least=0.01, most=1e6, unit="W"))]
Crowding = Annotated[Figure, AfterValidator(partial(_within, least=0.5, most=1e3, unit="times"))]
Price = Annotated[Figure, AfterValidator(partial(_within, least=1e-6, most=1e6, unit="an hour"))]
ByNumber = AfterValidator(_by_number)


DISTURBED = "disturbed"
"""The begin of a measured figure's note if other work ran meanwhile."""


@record(frozen=True, config=STRICT)
class Point:
    """One measurement of a kernel: the sizes it ran at, and the seconds it took."""

    sizes: dict[str, Amount]
    seconds: Seconds

    @property
    def disturbed(self) -> bool:
        """Whether other work ran meanwhile."""
        return self.seconds.note.startswith(DISTURBED)


@record(frozen=True, config=STRICT)
class Disk:
    """A folder's disk, past the page cache. Memory that serves as a file (CXL, DAX) is a disk with engine "mapped"."""

    folder: str
    reads_per_s: Annotated[dict[str, IosPerS], ByNumber]
    """Random reads of a sector a second, by queue depth."""
    writes_per_s: Annotated[dict[str, IosPerS], ByNumber]
    """Random writes of a sector a second over written blocks, by queue depth of the engine, half of which are writes at
    a time."""
    read_bytes_per_s: BytesPerS
    """Sequential."""
    write_bytes_per_s: BytesPerS
    cpu_s_per_io: Seconds
    """Processor time of one I/O."""
    engine: Literal["io_uring", "threads", "mapped"] = "io_uring"
    sector_bytes: Count = 4096
    """Bytes of one random I/O: the least that the disk reads or writes."""
    capacity_bytes: Bytes | None = None
    """Free bytes when it was probed, or what the disk holds."""
    endurance_bytes: Bytes | None = None
    """Bytes that the drive is rated to take in its life; declared."""

    def __post_init__(self) -> None:
        for name in ("reads_per_s", "writes_per_s"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; it needs a figure for one queue depth at least")
        if not 1 <= self.sector_bytes <= 1 << 20:
            raise ValueError(f"sector_bytes is {self.sector_bytes}; it must be from 1 to {1 << 20}")


@record(frozen=True, config=STRICT)
class Gpu:
    """A kind of GPU, of which the machine has `count`; figures are of one, while the others rest."""

    name: str
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerS
    """Bytes read and written, both counted."""
    to_device_bytes_per_s: BytesPerS
    """From pinned memory of the host."""
    to_host_bytes_per_s: BytesPerS
    product_flops_per_s: dict[str, FlopsPerS] = field(default_factory=dict)
    """Large matrix products, by arithmetic ("fp32", "bf16"); a multiplication with its addition counts as two."""
    peer_bytes_per_s: BytesPerS | None = None
    """To another GPU of the machine, one way; if None, only through the host."""
    watts: Watts | None = None
    count: Count = 1

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 1024:
            raise ValueError(f"count is {self.count}; it must be from 1 to 1024")


@record(frozen=True, config=STRICT)
class Network:
    """What processes of a run take to send each other bytes."""

    bytes_per_s: BytesPerS
    """That a process sends, and receives at the same time. `hotrow probe` measures it between two processes of this
    machine; between machines it is declared."""
    s_per_message: Seconds
    """What a message without bytes to one other process and one back take."""
    cpu_s_per_message: Seconds
    """Processor time, in a process, of one more such message, to a further process, and of the one back."""
    cpu_s_per_byte: Seconds
    """Processor time, of the sender and the receiver together, of a byte of a large message."""


@record(frozen=True, config=STRICT)
class Hardware:
    """A machine."""

    name: str
    date: str
    """Year-month-day of the measurement."""
    host: dict[str, JsonValue]
    """`this_host()`: processor, cores, instruction set."""
    versions: dict[str, str]
    num_cores: Count
    dram_bytes: Bytes
    stream_bytes_per_s: Annotated[dict[str, BytesPerS], ByNumber] = field(default_factory=dict)
    """Sequential reads of DRAM, by number of threads."""
    flops_per_s: Annotated[dict[str, FlopsPerS], ByNumber] = field(default_factory=dict)
    """float32 arithmetic without memory, by number of threads; a multiplication with its addition counts as two."""
    random_rows: list[Point] = field(default_factory=list)
    """Seconds of one random read of a row in DRAM, by `row_bytes` and `threads`, with the best prefetching."""
    kernels: dict[str, list[Point]] = field(default_factory=dict)
    """Times of our own kernels and of a step's fixed parts, by name; `costs/cost.py` says which it uses."""
    cost_version: Count = 1
    """COST_VERSION when `kernels` was measured; the first files do not say it."""
    disks: list[Disk] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    network: Network | None = None
    """Over gloo, which sends by TCP."""
    mpi: Network | None = None
    """Over MPI."""
    crowding: Crowding | None = None
    """How many times as long a process's step takes if as many other processes as there are cores left train too."""
    watts: Watts | None = None
    """Power of the machine under load, as somebody declares it."""
    price_per_hour: Price | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """By field: why it is absent, or where a fact that is not a figure is from."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("name is empty; give the machine one")
        try:
            time.strptime(self.date, "%Y-%m-%d")
        except ValueError:
            raise ValueError(f"date is {self.date!r}; write it as 2026-01-31") from None
        if not 1 <= self.num_cores <= 1 << 16:
            raise ValueError(f"num_cores is {self.num_cores}; it must be from 1 to {1 << 16}")
        needed = {"random_rows": ("row_bytes", "threads"), **dict.fromkeys(self.kernels, ("threads",))}
        for name, points in {"random_rows": self.random_rows, **self.kernels}.items():
            for i, point in enumerate(points):
                if lacking := [key for key in needed[name] if not point.sizes.get(key)]:
                    raise ValueError(
                        f"{name}.{i}: sizes lack {' and '.join(lacking)}; a number of at least 1 is needed"
                    )
        for name, threads in self._threads():
            if threads > self.num_cores:
                raise ValueError(f"{name} has a figure of {threads:g} threads, and num_cores is {self.num_cores}")
        for name, keys in {"disks": [d.folder for d in self.disks], "gpus": [g.name for g in self.gpus]}.items():
            if len(set(keys)) < len(keys):
                raise ValueError(f"{name} has {max(keys, key=keys.count)!r} twice; keep one")

    def _threads(self) -> Iterator[tuple[str, float]]:
        """Yields the numbers of threads that figures are of, with the name of their field."""
        for name in ("stream_bytes_per_s", "flops_per_s"):
            yield from ((name, int(key)) for key in getattr(self, name))
        for name, points in {"random_rows": self.random_rows, **self.kernels}.items():
            yield from ((name, point.sizes["threads"]) for point in points)

    @property
    def watts_without_gpus(self) -> Figure | None:
        """Power of the machine without its GPUs, for training on its processors; None if one of the two is unknown."""
        if self.watts is None or any(gpu.watts is None for gpu in self.gpus):
            return None
        own = [(gpu.count, gpu.watts) for gpu in self.gpus if gpu.watts is not None]
        watts = self.watts.value - sum(count * figure.value for count, figure in own)
        sources = {self.watts.source, *(figure.source for _, figure in own)}
        source: Source = self.watts.source if len(sources) == 1 else "assumed"
        note = f"{self.watts.note}; without its GPUs" if self.gpus else self.watts.note
        return Figure(watts, source=source, note=note) if watts > 0 else None

    def disk_at(self, folder: Path | str) -> Disk | None:
        """Returns the disk that `folder`, which may be absent yet, lies on; None if it was not measured.

        A disk whose folder exists here is known by its device, another one by its path. A declared machine that
        lists one disk uses it for every folder.
        """
        path = Path(folder).resolve()
        if "declared" in self.host and len(self.disks) == 1:
            return self.disks[0]
        for disk in sorted(self.disks, key=lambda disk: (Path(disk.folder).exists(), -len(disk.folder))):
            own = Path(disk.folder)
            if _device(path) == own.stat().st_dev if own.exists() else path.is_relative_to(own):
                return disk
        return None

    def with_declared(self, path: Path | str) -> Hardware:
        """Returns this machine with what the file at `path` declares instead of what was measured.

        A field of the file replaces the field here, except that disks are merged by folder, GPUs by name, and
        `network` and `mpi` field by field. If the file has a `name`, the result is that machine: nothing of this one is
        left but date and versions. Raises ValueError, which names the file, the field and the cure.
        """
        declared = read_declared(path)
        fields = asdict(self)
        if "name" in declared:
            fields = {"date": self.date, "versions": self.versions, "host": {"declared": Path(path).name}}
            fields["cost_version"] = self.cost_version
        for name, key in (("disks", "folder"), ("gpus", "name")):
            if isinstance(declared.get(name), list):
                declared[name] = _merged(fields.get(name, []), declared[name], key)
        for name in ("network", "mpi"):
            if isinstance(declared.get(name), dict):
                declared[name] = {**(fields.get(name) or {}), **declared[name]}
        notes = declared.get("notes")
        if isinstance(notes, Mapping):
            declared["notes"] = {**fields.get("notes", {}), **notes}
        return checked(TypeAdapter(Hardware), {**fields, **declared}, where=str(path), cure=DECLARED_CURE)


HARDWARE = Document(Hardware, marks={"hotrow_hardware": 1}, cure=CURE)


def _device(folder: Path) -> int:
    """Returns the device number of `folder`, or of its nearest parent that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists()).stat().st_dev


# ---- declared files


def read_declared(path: Path | str) -> dict[str, Any]:
    """Returns the fields of a declared file, in which a figure is declared unless it says that it is assumed."""
    fields = load_yaml(path, cure=DECLARED_CURE)
    if not isinstance(fields, dict) or not fields:
        raise ValueError(f"{path} declares nothing: it must hold fields such as price_per_hour; {DECLARED_CURE}")
    known = {each.name for each in fields_of(Hardware)}
    for name in fields:
        if name not in known:
            raise ValueError(f"{path}: {name}: there is no such field; {DECLARED_CURE}")
        if name in ("host", "versions", "date", "kernels", "cost_version"):
            raise ValueError(f"{path}: {name} cannot be declared: it comes from hotrow probe; remove it")
    if "num_cores" in fields and not (isinstance(fields.get("notes"), dict) and fields["notes"].get("num_cores")):
        raise ValueError(f"{path}: num_cores needs its public source, or the reason for it, as notes.num_cores")
    return {name: _with_source(value, f"{path}: {name}") for name, value in fields.items()}


def _with_source(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_with_source(each, f"{where}.{i}") for i, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "value" not in value:
        return {key: _with_source(each, f"{where}.{key}") for key, each in value.items()}
    if value.get("source") == "measured":
        raise ValueError(f"{where} is 'measured': hotrow probe measures; write declared or assumed, and a note")
    if isinstance(value["value"], str):
        try:
            value = {**value, "value": parse_bytes(value["value"])}
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return {"source": "declared", **value}


def _merged(ours: list[dict[str, Any]], theirs: list[Any], key: str) -> list[Any]:
    """Returns our entries, changed and followed by theirs; entries with the same `key` are of the same thing."""
    merged = {each[key]: each for each in ours}
    for i, each in enumerate(theirs):
        if isinstance(each, dict) and isinstance(name := each.get(key), str):
            merged[name] = {**merged.get(name, {}), **each}
        else:
            merged[f"entry {i}"] = each  # the check of the record refuses it
    return list(merged.values())


# ---- which machine


def this_host() -> dict[str, Any]:
    """Returns what identifies the kind of this machine: `host_facts` and the instruction set of our kernels."""
    return {**host_facts(), "isa": ops.backend().isa}


def hardware_path() -> Path:
    """Returns where `hotrow probe` keeps this machine's figures: $XDG_CACHE_HOME/hotrow, or ~/.cache/hotrow."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "hotrow" / "hardware.json"


def known_hardware() -> Hardware | None:
    """Returns the figures that `hotrow probe` kept for this machine; None if there are none.

    Figures of another machine (processor, cores or instruction set differ), and a file that cannot be read, are not
    taken: a warning says why.
    """
    found = _kept()
    if isinstance(found, str):
        warnings.warn(found, stacklevel=2)
        return None
    return found


def why_unknown() -> str | None:
    """Returns why the figures that `hotrow probe` kept are not taken; None if they are, or if there are none."""
    return found if isinstance(found := _kept(), str) else None


def _kept() -> Hardware | str | None:
    """Returns the figures that were kept, or why they are not taken; None if there are none."""
    path = hardware_path()
    try:
        if not path.exists():
            return None
        found = read_hardware(path)
    except (ValueError, OSError) as error:
        return f"no measured figures are used: {error}"
    if reason := another_machine(found, this_host()):
        return f"no measured figures are used: {path} is of another machine ({reason}); {CURE}"
    return found


def another_machine(hardware: Hardware, host: Mapping[str, Any]) -> str | None:
    """Returns how the machine of the figures differs from `host`; None if it does not."""
    names = ("cpu", "cores", "usable_cores", "isa")
    differing = [name for name in names if hardware.host.get(name) != host.get(name)]
    words = [f"{name} is {hardware.host.get(name)!r}, here {host.get(name)!r}" for name in differing]
    return ", ".join(words) or None


def read_hardware(path: Path | str) -> Hardware:
    """Returns the machine that a file describes. Raises ValueError, which names the file, the field and the cure.

    path: a hardware.json; a declared file (.yaml), whose figures replace those of this machine; or the name of one of
    MACHINES.
    """
    path = Path(path)
    if not path.exists() and (MACHINES / f"{path}.yaml").is_file():
        path = MACHINES / f"{path}.yaml"
    if path.suffix in (".yaml", ".yml"):
        known = known_hardware()
        if known is None:
            raise ValueError(f"{path} goes with figures measured here, and there are none: run hotrow probe first")
        return known.with_declared(path)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in MACHINES.glob("*.yaml")))
        raise ValueError(f"{path} is not a file; run hotrow probe, or name one of the declared machines: {names}")
    found = HARDWARE.read(path)
    check_cost_version(found, str(path))
    return found


def check_cost_version(hardware: Hardware, where: str) -> None:
    """Raises ValueError, which begins with `where`, if steps were measured for another cost model."""
    if hardware.kernels and hardware.cost_version != COST_VERSION:
        raise ValueError(f"{where}: measured for another version of hotrow: run hotrow probe again")


# ---- figures in words

_FIELDS = {each.name for kind in (Hardware, Disk, Gpu, Network) for each in fields_of(kind)}
_UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("bytes_per_s", lambda value: f"{value / 1e9:,.2f} GB/s"),
    ("flops_per_s", lambda value: f"{value / 1e9:,.1f} GFLOP/s"),
    ("_bytes", size),
    ("_s_per_io", lambda value: f"{value * 1e6:.2f} us"),
    ("s_per_message", lambda value: f"{value * 1e6:.2f} us"),
    ("_s_per_byte", lambda value: f"{value * 1e9:.3f} ns"),
    ("crowding", lambda value: f"{value:.2f}x"),
    ("_per_s", lambda value: f"{rate(value)}/s"),
    ("random_rows", lambda value: f"{value * 1e9:.2f} ns"),
    ("watts", lambda value: f"{value:,.1f} W"),
    ("price_per_hour", lambda value: f"{value:,.2f}"),
)
"""By the end of a field's name: how its figures are shown."""


def table_of(hardware: Hardware) -> list[tuple[str, str, str, str]]:
    """Returns place, value, spread and source of every figure, in words, but for those of kernels."""
    fields = {**asdict(hardware), "kernels": {}}
    fields["disks"] = {disk["folder"]: disk for disk in fields["disks"]}
    fields["gpus"] = {gpu["name"]: gpu for gpu in fields["gpus"]}
    fields["random_rows"] = {
        f"{point['sizes']['row_bytes']:g} bytes, {point['sizes']['threads']:g} threads": point["seconds"]
        for point in fields["random_rows"]
    }
    return list(_rows_of(fields, "", ""))


def _rows_of(value: Any, place: str, field: str) -> Iterator[tuple[str, str, str, str]]:
    if not isinstance(value, dict):
        return
    if "value" not in value:
        for name, each in value.items():
            yield from _rows_of(each, f"{place} {name}".strip(), name if name in _FIELDS else field)
        return
    text = next(text for end, text in _UNITS if field.endswith(end))
    spread = "" if value["low"] is None else f"{text(value['low'])} .. {text(value['high'])}"
    source = f"{value['source']}: {value['note']}" if value["note"] else value["source"]
    yield place, text(value["value"]), spread, source
