"""The `hotrow` command, also as `python -m hotrow`."""

import signal


def main() -> None:
    """Runs the command line; Ctrl-C ends the process without a traceback, whenever it comes."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are imported, there is nothing to save
    from hotrow.cli import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
