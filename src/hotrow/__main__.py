"""The `hotrow` command, also as `python -m hotrow`."""

import signal

from hotrow.base.waiting import wait_passively


def main() -> None:
    """Runs the command line; Ctrl-C ends the process without a traceback, whenever it comes."""
    wait_passively()  # here, because no verb has loaded torch yet
    # While modules are imported, and after a verb, there is nothing to save; the verb itself takes what was here.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hotrow.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
