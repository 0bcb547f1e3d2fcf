"""Extends the vocabulary of a table by the ids of a day: rows keep their numbers, and new ids get the next ones, or
those of ids that have expired.

    base   the ids that have rows
    rare   the ids of earlier days that have none, numbered by first sight, and how often each was seen
    day    the ids of the day's training rows, ranked and counted as if every one got a row

An id seen at least `min_count` times over all days gets a row. New rows follow by falling count over all days, ties by
first sight: ids of earlier days come first, then those of the day as they are ranked there. Ids that no training row
had for many days are forgotten, those with a row and those without. docs/vocabulary.md says the same.

The three are read side by side, a range of hashes at a time, and what is known of each id lies in unnamed files, so
memory does not grow with the tables.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.data.chunk import Keys, concatenate_keys, take_keys
from hotrow.data.packed.format import MANIFEST_CURE
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, open_counts, write_counts, write_vocabulary

IDS_PER_RANGE = 1 << 18
PLACES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Counted:
    """A vocabulary, and how often each of its rows was seen."""

    vocabulary: Vocabulary
    counts: NDArray[Any]

    @staticmethod
    def open(vocabulary: Path, counts: Path) -> Counted:
        """Opens and checks both files. Raises ValueError naming one that is damaged, or if they do not fit together."""
        found = Counted(Vocabulary.open(vocabulary), open_counts(counts))
        if (num_rows := found.vocabulary.num_embeddings) != len(found.counts):
            raise ValueError(
                f"{counts} counts {len(found.counts)} rows, but {vocabulary} has {num_rows}; {MANIFEST_CURE}"
            )
        return found

    def count(self, row: int) -> int:
        """Returns how often a row was seen; 0 if it is row 0, which here stands for no id."""
        return int(self.counts[row]) if row else 0


class Uses(NamedTuple):
    """When ids were last used, so that ids unused for `unused_days` expire."""

    rows: NDArray[Any]
    """The day on which each row of the base was last used."""
    rare: NDArray[Any]
    """The day on which each id that waits for a row was last seen, by its number."""
    today: int = 0
    """Number of the day in the chain, which is the last of the unused days."""
    unused_days: int = 1

    @staticmethod
    def on(day: int, base: Vocabulary, rare: Counted) -> Uses:
        """Returns the uses of ids that were all used on one day."""
        of_all = np.full(1, day, np.uint32)
        return Uses(np.broadcast_to(of_all, base.num_embeddings), np.broadcast_to(of_all, len(rare.counts)))


class _Fresh(NamedTuple):
    """Ids that have no row in the base."""

    ids: Entries
    """In no order. Their `rows` are places in the order of first sight, from 0 on."""
    totals: NDArray[np.int64]
    """How often each was seen over all days."""
    of_day: NDArray[np.int64]
    """How often on the day."""
    last_days: NDArray[Any]
    """When last."""


class Extension:
    """A vocabulary, extended by the ids of a day.

    min_count: how often an id must have been seen over all days to get a row. uses: if None, ids never expire. tmp_dir:
    for files without a name, of up to 21 bytes for each row and each id of `rare` and `day`.
    """

    def __init__(
        self,
        base: Vocabulary,
        rare: Counted,
        day: Counted,
        *,
        min_count: int,
        tmp_dir: Path,
        uses: Uses | None = None,
    ) -> None:
        self._base, self._rare, self._day, self._tmp_dir = base, rare, day, tmp_dir
        self._expires = uses is not None
        self._uses = uses or Uses.on(0, base, rare)
        self._oldest = max(0, self._uses.today - self._uses.unused_days + 1)
        """An id stays if it was used on this day or later."""
        self._free = self._free_rows() if uses else np.zeros(0, np.uint32)
        self._first_of_day = rare.vocabulary.num_embeddings - 1
        """The place of the day's first id; those of earlier days come before it."""
        self._numbers = self._mapped("<i8", self._first_of_day + day.vocabulary.num_embeddings - 1)
        """By place: the row of an id that gets one, else minus its number among the rare ids, from 1 on; 0: no id."""
        self.num_rare, self._rare_accesses = 0, 0
        num_new = self._number(min_count)
        self.num_reborn = min(num_new, len(self._free))
        self.num_embeddings = base.num_embeddings + num_new - self.num_reborn

    def write(self, vocabulary: Path, counts: Path, rare: Path, rare_counts: Path, *uses: Path) -> None:
        """Writes the extended vocabulary, the day's accesses by row, and the ids that still wait, with their counts.

        uses: if ids expire, three files: the days on which rows were last used, the days on which waiting ids were last
        seen, and the rows of the base that now stand for other ids, if any.
        """
        day, place = self._day.vocabulary, self._missing_place
        missing = 0 if place is None else int(self._numbers[place])
        left, old_missing = len(self._free) - self.num_reborn, self._base.missing_row
        for sign, paths, num_rows, num_free, missing_row, num_accesses in (
            (1, (vocabulary, counts), self.num_embeddings, left, old_missing or missing, day.header.num_accesses),
            (-1, (rare, rare_counts), self.num_rare + 1, 0, -missing, self._rare_accesses),
        ):
            missing_row = max(missing_row, 0)
            of_rows = self._mapped("<u8" if num_accesses >= 2**32 else "<u4", num_rows)
            last_days = self._mapped("<u4", num_rows if uses else 0)
            num_keys = num_rows - 1 - (missing_row > 0) - num_free
            summary = TableSummary(num_rows, num_keys, missing_row, num_keys, num_accesses)
            pieces = self._pieces(sign, of_rows, last_days)
            write_vocabulary(paths[0], pieces, summary, key_kind=day.key_kind, hash_cap=day.header.hash_cap)
            if uses:
                write_counts(uses[0 if sign > 0 else 1], last_days)
            if missing_row:
                of_rows[missing_row] = self._day.count(day.missing_row) if sign > 0 else self._missing_total
            of_rows[0] = num_accesses - int(of_rows.sum(dtype=np.uint64))
            write_counts(paths[1], of_rows)
        if uses and self.num_reborn:
            write_counts(uses[2], self._free[: self.num_reborn])

    def _mapped(self, dtype: str, size: int) -> NDArray[Any]:
        """Returns zeros in a file without a name. Raises OSError if the disk is full: a write to a mapped file of which
        the disk has no room ends the process."""
        with tempfile.TemporaryFile(dir=self._tmp_dir) as file:
            for start in range(0, size, PLACES_AT_ONCE):
                file.write(np.zeros(min(PLACES_AT_ONCE, size - start), dtype).data)
            file.flush()
            return np.memmap(file, dtype, "r+", shape=(size,)) if size else np.zeros(0, dtype)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yields first and last hash of ranges that all ids fall into."""
        num_ids = sum(v.num_keys for v in (self._base, self._rare.vocabulary, self._day.vocabulary))
        num_ranges = num_ids // IDS_PER_RANGE + 1
        for i in range(num_ranges):
            yield (i << 64) // num_ranges, (i + 1 << 64) // num_ranges - 1

    def _still_used(self, found: Entries, before: NDArray[Any]) -> tuple[Entries, NDArray[Any], NDArray[Any]]:
        """Returns those of the ids that have not expired, with their rows on the day, and when they were last used.

        before: the day on which each row or number was last used, by the end of the base.
        """
        of_day = self._day.vocabulary.rows_of(found)
        last_days = np.where(of_day > 0, self._uses.today, before[found.rows])
        stays = np.flatnonzero(last_days >= self._oldest)
        if len(stays) == len(last_days):
            return found, of_day, last_days
        ids = Entries(found.hashes[stays], found.rows[stays], _some_strings(found.strings, stays))
        return ids, of_day[stays], last_days[stays]

    def _free_rows(self) -> NDArray[Any]:
        """Returns the rows of the base that stand for no id, or for one that expires on this day, rising."""
        taken = self._mapped("<u1", self._base.num_embeddings)
        taken[[0, self._base.missing_row]] = 1
        for first, last in self._ranges():
            taken[self._still_used(self._base.within(first, last), self._uses.rows)[0].rows] = 1
        free = self._mapped("<u4" if len(taken) <= 2**32 else "<u8", len(taken) - int(taken.sum(dtype=np.int64)))
        end = 0
        for start in range(0, len(taken), PLACES_AT_ONCE):
            found = start + np.flatnonzero(taken[start : start + PLACES_AT_ONCE] == 0)
            free[end : end + len(found)] = found
            end += len(found)
        return free

    def _fresh(self, first: int, last: int) -> _Fresh:
        """Returns the ids with these hashes that have no row in the base."""
        rare, day = self._rare.vocabulary.within(first, last), self._day.vocabulary.within(first, last)
        rare, again, last_days = self._still_used(rare, self._uses.rare)
        known = [vocabulary.rows_of(day) for vocabulary in (self._base, self._rare.vocabulary)]
        new = np.flatnonzero((known[0] == 0) & (known[1] == 0))
        before = np.concatenate([self._rare.counts[rare.rows].astype(np.int64), np.zeros(len(new), np.int64)])
        # Row 0 of the day, which rare ids have that were not seen, counts nothing.
        of_day = self._day.counts[np.concatenate([again, day.rows[new]])].astype(np.int64)
        places = np.concatenate([rare.rows - 1, self._first_of_day + day.rows[new] - 1])
        strings = _joined_strings([rare.strings, _some_strings(day.strings, new)])
        last_days = np.concatenate([last_days, np.full(len(new), self._uses.today)])
        ids = Entries(np.concatenate([rare.hashes, day.hashes[new]]), places, strings)
        return _Fresh(ids, before + of_day, of_day, last_days)

    @property
    def _missing_place(self) -> int | None:
        """The place of the missing value; None if it has a row in the base, or was never missing."""
        rare, day = self._rare.vocabulary.missing_row, self._day.vocabulary.missing_row
        if self._base.missing_row or not (rare or day):
            return None
        return rare - 1 if rare else self._first_of_day + day - 1

    @property
    def _missing_total(self) -> int:
        return sum(found.count(found.vocabulary.missing_row) for found in (self._rare, self._day))

    def _number(self, min_count: int) -> int:
        """Numbers the ids, in the order of their places within each count; returns how many get a row."""
        num_ids = Counter[int]()
        for first, last in self._ranges():
            ids, totals, *_ = self._fresh(first, last)
            self._numbers[ids.rows] = totals
            num_ids.update(_sizes_of(totals[totals >= min_count]))
        if (place := self._missing_place) is not None:
            self._numbers[place] = total = self._missing_total
            num_ids.update({total: 1} if total >= min_count else {})
        num_new, next_new = 0, {}
        for total in sorted(num_ids, reverse=True):
            next_new[total] = num_new
            num_new += num_ids[total]
        for start in range(0, len(self._numbers), PLACES_AT_ONCE):
            own = self._numbers[start : start + PLACES_AT_ONCE]
            got, waits = np.flatnonzero(own >= min_count), np.flatnonzero((own > 0) & (own < min_count))
            self._rare_accesses += int(own[waits].sum())
            own[waits] = -1 - self.num_rare - np.arange(len(waits))
            self.num_rare += len(waits)
            got = got[np.argsort(own[got], kind="stable")]
            end = 0
            for total, size in _sizes_of(own[got]).items():
                begin, end = end, end + size
                own[got[begin:end]] = self._rows_of_new(next_new[total] + np.arange(size))
                next_new[total] += size
        return num_new

    def _rows_of_new(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of new ids by their places among all of them: the free ones, then those behind the base."""
        rows = self._base.num_embeddings - len(self._free) + places
        is_reborn = places < len(self._free)
        rows[is_reborn] = self._free[places[is_reborn]]
        return rows

    def _pieces(self, sign: int, counts: NDArray[Any], last_days: NDArray[Any]) -> Iterator[Entries]:
        """Yields the ids with a row, or with -1 those that wait for one, in the order of a vocabulary file; notes by
        row the accesses of the day, or of all days, and the day of the last one."""
        for first, last in self._ranges():
            fresh = self._fresh(first, last)
            numbers = sign * self._numbers[fresh.ids.rows]
            got = np.flatnonzero(numbers > 0)
            counts[numbers[got]] = (fresh.of_day if sign > 0 else fresh.totals)[got]
            if self._expires:
                last_days[numbers[got]] = fresh.last_days[got]
            parts = [Entries(fresh.ids.hashes[got], numbers[got], _some_strings(fresh.ids.strings, got))]
            if sign > 0:
                old, of_day, of_old = self._still_used(self._base.within(first, last), self._uses.rows)
                parts.append(old)
                counts[old.rows] = self._day.counts[of_day]
                if self._expires:
                    last_days[old.rows] = of_old
            yield from _in_order(parts)


def empty_vocabulary(path: Path, like: Vocabulary) -> Vocabulary:
    """Writes and returns a vocabulary without ids, for the kind of keys in `like`."""
    write_vocabulary(path, (), TableSummary(1, 0, 0, 0, 0), key_kind=like.key_kind, hash_cap=like.header.hash_cap)
    return Vocabulary.open(path)


def _sizes_of(values: NDArray[np.int64]) -> dict[int, int]:
    """Returns how often each value comes, by rising value."""
    found, sizes = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), sizes.tolist(), strict=True))


def _in_order(parts: Sequence[Entries]) -> Iterator[Entries]:
    """Yields the entries of all parts in the order of a vocabulary file, if there are any."""
    hashes, rows = np.concatenate([part.hashes for part in parts]), np.concatenate([part.rows for part in parts])
    strings = _joined_strings([part.strings for part in parts])
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    if strings is not None and strings.offsets is not None and (ordered[1:] == ordered[:-1]).any():
        ends, data = strings.offsets.tolist(), strings.values.tobytes()
        order = np.array(sorted(order.tolist(), key=lambda i: (hashes[i], data[ends[i] : ends[i + 1]])))
    if len(order):
        yield Entries(ordered, rows[order], _some_strings(strings, order))


def _joined_strings(parts: Sequence[Keys | None]) -> Keys | None:
    """Returns the keys of all parts, one after the other; None if there are no strings."""
    found = [part for part in parts if part is not None]
    return concatenate_keys(found) if found else None


def _some_strings(keys: Keys | None, chosen: NDArray[np.intp]) -> Keys | None:
    return None if keys is None else take_keys(keys, chosen)
