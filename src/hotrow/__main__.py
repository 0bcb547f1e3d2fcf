"""The `hotrow` command, also as `python -m hotrow`."""

import io
import os
import signal
import sys
from typing import Any

from hotrow.base.waiting import wait_passively


class _Lasting(io.FileIO):
    """Standard output or error; what is written after its reader has closed it goes nowhere, and the verb goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def main() -> None:
    """Runs the command line; Ctrl-C ends the process without a traceback, whenever it comes."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        raw = io.BufferedWriter(_Lasting(old.fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=old.line_buffering))
    wait_passively()  # here, because no verb has loaded torch yet
    # While modules are imported, and after a verb, there is nothing to save; the verb itself takes what was here.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hotrow.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
