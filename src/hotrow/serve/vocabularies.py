"""The vocabularies of an export as searchable files (docs/vocabulary.md), which are made of its Parquet once.

An export has ids as Parquet, for everybody. Searched as they are, they would have to lie in memory; a file of
docs/vocabulary.md is mapped, and a search touches two or three of its pages. It is named after the dataset, the table
and the checksum of the Parquet, so that versions of an export share those that are the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hotrow.base.door import make_folder, open_file
from hotrow.base.files import claim
from hotrow.data.cells import IdEncoding
from hotrow.data.chunk import Keys
from hotrow.data.coded import kind_of, text_keys
from hotrow.data.native import hash_keys
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, write_vocabulary
from hotrow.export.export import Description

FOLDER = "vocab"
IDS_AT_ONCE = 1 << 17
WAIT_S = 0.05


def open_vocabulary(
    export: Path, about: Description, table: dict[str, Any], encoding: IdEncoding, work: Path
) -> Vocabulary:
    """Maps the vocabulary of a table; if `work` does not have it, or has it damaged, it is made there first.

    Raises ValueError, which names the file, if ids do not rise by their hashes, or do not fit the table; OSError, which
    names the file in `work`, if it cannot be read or made.
    """
    own, kind = table["vocabulary"], kind_of(encoding)
    source, missing_row, hash_cap = export / own["file"], int(own["missing_row"]), int(own["hash_cap"] or 0)
    record, num_rows = about.files[own["file"]], int(table["num_embeddings"])
    said = [about.dataset.get("name"), own, num_rows, record.num_bytes, record.crc32]
    name = f"{source.stem}-{sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]}"
    path = work / FOLDER / name
    make_folder(path.parent)
    found = _opened(path)
    while found is None:
        with claim(path.parent) as is_ours:
            if is_ours is False:  # another scorer, maybe of another process, makes vocabularies here
                time.sleep(WAIT_S)
            found = _opened(path)
            if found is None and is_ours is not False:
                num_keys = int(own["num_keys"])
                summary = TableSummary(num_rows, num_keys, missing_row, num_distinct=num_keys, num_accesses=0)
                entries = _entries(source, num_keys, strings=kind == "bytes" and not hash_cap)
                write_vocabulary(path, entries, summary, key_kind=kind, hash_cap=hash_cap)
                found = Vocabulary.open(path)
    if (found.key_kind, found.missing_row, found.num_embeddings) != (kind, missing_row, num_rows):
        raise ValueError(f"{source} is not of table {table['name']!r}; export the run again")
    return found


def _opened(path: Path) -> Vocabulary | None:
    """Returns the vocabulary in `path`; None if it is not there or damaged, so that it has to be made."""
    with suppress(ValueError, FileNotFoundError):
        return Vocabulary.open(path)
    return None


def _entries(source: Path, num_keys: int, *, strings: bool) -> Iterator[Entries]:
    """Yields the ids of a Parquet file with their hashes, by which they rise."""
    last = np.uint64(0)
    with open_file(source) as file:
        stored = pa.parquet.ParquetFile(file)
        if stored.metadata.num_rows != num_keys:
            raise ValueError(
                f"{source} has {stored.metadata.num_rows:,} ids, and not {num_keys:,}; export the run again"
            )
        for batch in stored.iter_batches(IDS_AT_ONCE, columns=["key", "row"]):
            keys = text_keys(batch["key"]) if strings else Keys(batch["key"].to_numpy())
            hashes = hash_keys(keys)
            if not len(hashes):
                continue
            if hashes[0] < last or (hashes[1:] < hashes[:-1]).any():
                raise ValueError(f"{source}: its ids do not rise by their hashes; export the run again")
            last = hashes[-1]
            yield Entries(hashes, batch["row"].to_numpy(), keys if strings else None)
