"""A JSON file of hotrow changed on purpose, its checksum made right again: only what it says can give it away."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotrow.base.records import CHECKSUM, write_sealed


def reseal(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Do `change` to the object in the file at `path`."""
    fields = json.loads(path.read_text())
    del fields[CHECKSUM]
    change(fields)
    write_sealed(path, fields)
