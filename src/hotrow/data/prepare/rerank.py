"""Numbers the rows of a table anew, by how often the training rows of a day have them.

In a chain of days an id keeps its row, so that after some weeks the popular ids are no longer the first rows. `rerank`
restores that order in the dataset of a day. A model that goes on from the day before moves its rows as `moved` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import make_folder
from hotrow.data.packed.format import Table
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, open_counts, write_counts, write_vocabulary
from hotrow.data.prepare.extend import IDS_PER_RANGE, PLACES_AT_ONCE, sizes_of

MakeMapped = Callable[[str, int], NDArray[Any]]


def rerank(out: Path, table: Table, make_mapped: MakeMapped) -> None:
    """Numbers the rows of a table of the dataset `out` by falling accesses; at equal accesses they keep their order.
    Row 0 stays. Writes `table.moved_file`: by the row that an id would have had, the row that it has.

    make_mapped: makes zeros in a file, of a type and a size, so that memory does not grow with the table.
    """
    vocabulary, counts = Vocabulary.open(out / table.vocabulary_file), open_counts(out / table.counts_file)
    moved = _ranks(counts, make_mapped)
    make_folder((out / table.moved_file).parent, within=out)
    write_counts(out / table.moved_file, moved)
    header = vocabulary.header
    missing_row = int(moved[header.missing_row])
    summary = TableSummary(len(moved), header.num_keys, missing_row, header.num_keys, header.num_accesses)
    given: Any = {"key_kind": header.key_kind, "hash_cap": header.hash_cap}
    write_vocabulary(vocabulary.path, _renumbered(vocabulary, moved), summary, **given)
    for path in (out / table.counts_file, out / table.use_files[0]):
        if path.exists():
            before = open_counts(path)
            after = make_mapped(before.dtype.str, len(before))
            for piece in _pieces(len(before)):
                after[moved[piece]] = before[piece]
            write_counts(path, after)
    if (path := out / table.reborn_file).exists():
        write_counts(path, np.sort(moved[open_counts(path)]))


def _ranks(counts: NDArray[Any], make_mapped: MakeMapped) -> NDArray[Any]:
    """Returns by row its place among all by falling count, ties in order, behind row 0."""
    num_rows = Counter[int]()
    for piece in _pieces(len(counts), 1):
        num_rows.update(sizes_of(counts[piece]))
    following, end = dict[int, int](), 1
    for count in sorted(num_rows, reverse=True):
        following[count], end = end, end + num_rows[count]
    ranks = make_mapped("<u4" if len(counts) <= 2**32 else "<u8", len(counts))
    for piece in _pieces(len(counts), 1):
        order, begin = np.argsort(counts[piece], kind="stable"), 0
        for count, size in sizes_of(counts[piece]).items():
            ranks[piece.start + order[begin : begin + size]] = following[count] + np.arange(size)
            following[count], begin = following[count] + size, begin + size
    return ranks


def _renumbered(vocabulary: Vocabulary, moved: NDArray[Any]) -> Iterator[Entries]:
    """Yields the keys of a vocabulary with other rows, in the order of its file."""
    num_ranges = vocabulary.num_keys // IDS_PER_RANGE + 1
    for i in range(num_ranges):
        found = vocabulary.within((i << 64) // num_ranges, (i + 1 << 64) // num_ranges - 1)
        if len(found.rows):
            yield found._replace(rows=moved[found.rows].astype(np.int64))


def _pieces(num_rows: int, first: int = 0) -> Iterator[slice]:
    return (slice(start, min(start + PLACES_AT_ONCE, num_rows)) for start in range(first, num_rows, PLACES_AT_ONCE))
