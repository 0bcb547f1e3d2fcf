"""`python -m hotrow` is the `hotrow` command."""

from hotrow.cli import main

if __name__ == "__main__":
    main()
