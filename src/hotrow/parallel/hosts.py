"""What a process knows of its host's network."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Literal


def interfaces() -> dict[str, str]:
    """Returns the IPv4 address of each network interface of this process that has one, except the loopback, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                address = socket.inet_ntoa(ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24])
                if not address.startswith("127."):
                    found[name] = address
    return found


_SIOCGIFADDR = 0x8915


def namespace_id(kind: Literal["net", "pid"]) -> str:
    """Returns the name of this process's host and namespace. It is the same for two processes if they can reach each
    other at 127.0.0.1 (net), or see each other's process ids (pid)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
