"""Two network namespaces joined by a link of set bandwidth, which stand for two machines. Linux, as root.

    namespace 0 --veth, tc tbf--> <--veth, tc tbf-- namespace 1

Each end limits what it sends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from types import TracebackType

NEEDED = ("ip", "tc", "nsenter")
BURST_BYTES, BURST_S, LATENCY_MS = 1 << 14, 0.0001, 100
"""What tc tbf lets through at once after a pause: so much, or what passes in so long, before which the kernel's timers
do not wake it (with half of it, a link of 10 Gbit/s carried 4.9, and with a third of 16 KiB one of 1 Gbit/s 0.7). It is
little, because each exchange of a step comes after a pause: a burst of 1 MiB hides whole ones.
And how long bytes may wait: what waits longer is lost, and comes again late."""
HOSTS = ("10.213.7.1", "10.213.7.2")


class LinkError(RuntimeError):
    """There can be no such link here; the message says why."""


class Link:
    """Two namespaces and their link, without a limit until `limit`. A context manager, which removes them.

    Raises LinkError on entering.
    """

    def __init__(self) -> None:
        own = os.getpid()
        self.names = tuple(f"hotrow-{own}-{end}" for end in (0, 1))
        self.devices = tuple(f"hr{own % 10**8}v{end}" for end in (0, 1))
        self.host = HOSTS[0]
        """The address of the first end."""

    def __enter__(self) -> Link:
        if missing := [name for name in NEEDED if shutil.which(name) is None]:
            raise LinkError(f"not installed here: {', '.join(missing)}")
        try:
            self._make()
        except LinkError:
            self._remove()
            raise
        return self

    def _make(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        first, second = self.devices
        _run("ip", "-n", self.names[0], "link", "add", first, "type", "veth", "peer", second, "netns", self.names[1])
        for name, device, host in zip(self.names, self.devices, HOSTS, strict=True):
            _run("ip", "-n", name, "address", "add", f"{host}/30", "dev", device)
            for each in ("lo", device):
                _run("ip", "-n", name, "link", "set", each, "up")

    def limit(self, bits_per_s: float | None) -> None:
        """Limits both directions; None: takes the limit away."""
        for name, device in zip(self.names, self.devices, strict=True):
            root = ("qdisc", "replace", "dev", device, "root")
            if bits_per_s is None:
                _run("tc", "-n", name, *root, "noqueue")
            else:
                burst = f"{max(BURST_BYTES, round(bits_per_s / 8 * BURST_S))}b"
                rate, latency = f"{bits_per_s:.0f}bit", f"{LATENCY_MS}ms"
                _run("tc", "-n", name, *root, "tbf", "rate", rate, "burst", burst, "latency", latency)

    def before(self, rank: int) -> list[str]:
        """Returns the words that start a command in a rank's namespace."""
        inside = ["nsenter", f"--net=/run/netns/{self.names[rank]}"]
        return [*inside, "env", f"GLOO_SOCKET_IFNAME={self.devices[rank]}"]

    def _remove(self) -> None:
        for name in self.names:
            with suppress(LinkError):
                _run("ip", "netns", "delete", name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()


def _run(*words: str) -> None:
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode:
        raise LinkError(f"`{' '.join(words)}` says: {found.stderr.strip() or found.returncode}")
