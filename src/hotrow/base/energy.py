"""The energy that this machine's processors and GPUs use, from the counters that the system shows (RAPL, NVML).

What cannot be read is absent and has a reason, never zero. The counters leave out disks, fans and what power supplies
lose.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
Counter = Callable[[], float]
"""Returns the joules of one part of the machine since some moment. Raises OSError if it cannot be read."""


class EnergyMeter:
    """Counts joules from when it is made, as long as every counter can be read.

    powercap: the folder of the RAPL counters; nvml: the library of NVIDIA's driver, which may be absent.
    """

    def __init__(self, powercap: Path = POWERCAP, nvml: str = NVML) -> None:
        self.absent: str | None = None
        """Why there are no figures; None if there are."""
        self._counters: dict[str, Counter] = {}
        self._before: dict[str, float] = {}
        try:
            processors = rapl_counters(powercap)
            if not processors:
                raise OSError(f"{powercap} has no counters, as is usual in virtual machines")
            self._counters = {**processors, **nvml_counters(nvml)}
            self._start = self._read()
        except OSError as error:
            self.absent = str(error)

    @property
    def parts(self) -> str:
        """What is counted, in words."""
        return f"{', '.join(self._counters)}; not disks, fans and losses"

    def joules(self) -> float | None:
        """Returns the joules since the meter was made; None if a counter could not be read, or began again."""
        if self.absent is None:
            try:
                return self._read() - self._start
            except OSError as error:
                self.absent = str(error)
        return None

    def _read(self) -> float:
        found = {name: counter() for name, counter in self._counters.items()}
        for name, joules in found.items():
            if joules < self._before.get(name, 0):  # how often it did so in between is not known
                raise OSError(f"the energy counter of {name} began again at zero")
        self._before = found
        return sum(found.values())


def rapl_counters(powercap: Path) -> dict[str, Counter]:
    """Returns the counters of processor packages and their DRAM. A package's own figure includes its cores."""
    counters: dict[str, Counter] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's have the same name
        name = (zone / "name").read_text().strip()
        if name.startswith("package"):
            counters[name] = _file_counter(zone / "energy_uj")
        elif name == "dram" and (package := re.fullmatch(r"intel-rapl:(\d+):\d+", zone.name)):
            counters[f"DRAM {package[1]}"] = _file_counter(zone / "energy_uj")
    return counters


def _file_counter(path: Path) -> Counter:
    def read() -> float:
        try:
            return int(path.read_text()) / 1e6
        except ValueError:
            raise OSError(f"{path} holds no number") from None
        except OSError as error:
            raise OSError(f"{path} cannot be read ({error.strerror}); since 2020 only root may") from None

    return read


def nvml_counters(library: str) -> dict[str, Counter]:
    """Returns the counters of all GPUs; empty without a driver. Raises OSError if a driver has no such counters."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return {}
    count = ctypes.c_uint()
    _call(nvml, "nvmlInit_v2")
    _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    return {f"GPU {i}": _gpu_counter(nvml, i) for i in range(count.value)}


def _gpu_counter(nvml: ctypes.CDLL, index: int) -> Counter:
    device = ctypes.c_void_p()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        _call(nvml, "nvmlDeviceGetTotalEnergyConsumption", device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    return read


def _call(nvml: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        status = getattr(nvml, name)(*arguments)
    except AttributeError:
        status = "this driver has no such function"
    if status:
        raise OSError(f"NVML's {name} failed ({status})")
