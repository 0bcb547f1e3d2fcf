"""Days of a chain: a dataset of newer rows extends an older one, its base, so that a model can go on from day to day.

    base = Base(PackedDataset.open("data/day_1"), Day(1), transforms=("log1p_clip0",))
    dataset = prepare(opened, "data/day_2", Options(base=base))     # pipeline.py

The base gives the transforms with their parameters, the row of every id, the counts of ids that are still too rare for
a row, and the label's statistics. The first day has `Base()`, which is empty: it extends nothing, and keeps what the
next day needs. `extend.py` numbers new ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import make_folder
from hotrow.base.files import crc32
from hotrow.base.records import STRICT, Count
from hotrow.data.chunk import SourceInfo
from hotrow.data.packed.format import MANIFEST_CURE, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary, open_counts
from hotrow.data.prepare.extend import PLACES_AT_ONCE, Counted, Extension, Uses, empty_vocabulary
from hotrow.data.prepare.statistics import Statistics
from hotrow.data.sources.schema import Schema, TableSpec


@record(frozen=True, config=STRICT)
class Day:
    """The place of a dataset in a chain of days, as `ids` in dataset.json keeps it."""

    number: Count
    """1 for the first day."""
    parent: str | None = None
    """Name of the folder of the dataset that this one extends; None for the first day."""
    parent_checksum: str | None = None
    """Checksum of that dataset, the SHA-256 of its dataset.json."""
    last_time_s: float | None = None
    """Time of its last row, in seconds since 1970; None if its rows have no times of a known unit."""
    earlier: list[str] = field(default_factory=list)
    """By earlier day whose files have checksums, the beginning of the SHA-256 of these and the sizes."""


@dataclass(frozen=True)
class Base:
    """The dataset that a day extends."""

    dataset: PackedDataset | None = None
    """The day before; None if there is none."""
    own: Day = field(default_factory=lambda: Day(0))
    """Its place in the chain."""
    transforms: tuple[str, ...] = ()
    """Transforms of its dense columns."""

    @property
    def day(self) -> Day:
        """The day that extends this."""
        if self.dataset is None:
            return Day(1)
        earlier = [*self.own.earlier, *_digest((f.num_bytes, f.checksum) for f in self.dataset.info.sources)]
        return Day(self.own.number + 1, self.dataset.path.resolve().name, self.dataset.checksum, earlier=earlier)

    @property
    def num_bytes(self) -> int:
        """Bytes of the vocabularies and counts that a day takes over."""
        return 0 if self.dataset is None else sum(file.num_bytes for file in self.dataset.info.files.values())

    def check_is_new(self, info: SourceInfo) -> None:
        """Raises ValueError if files were already prepared as the day before: their rows would count twice."""
        if self.dataset is None:
            return
        known = {(Path(f.path).name, f.num_bytes): f.checksum for f in self.dataset.info.sources}
        again = [
            file.path
            for file in info.files
            if (checksum := known.get((Path(file.path).name, file.num_bytes)))
            and Path(file.path).is_file()
            and checksum == f"crc32:{crc32(Path(file.path)):08x}"
        ]
        if again:
            raise ValueError(
                f"{again[0]} was already prepared as {self.dataset.path}, and its rows would count twice; name the "
                "files of the new day alone"
            )

    def check_is_later(self, last_time_s: float | None) -> None:
        """Raises ValueError if all rows of the day are older than the last one of the day before."""
        before = self.own.last_time_s
        if self.dataset is not None and before is not None and last_time_s is not None and last_time_s < before:
            last, known = (np.datetime64(int(time_s), "s") for time_s in (last_time_s, before))
            raise ValueError(
                f"the last row is of {last} UTC, but {self.dataset.path} has rows up to {known}; prepare days in the "
                "order of time"
            )

    def check_is_no_earlier_day(self, info: SourceInfo, checksums: Sequence[str]) -> None:
        """Raises ValueError if the files, which have these checksums, are those of an earlier day."""
        sizes = (file.num_bytes for file in info.files)
        if self.dataset is not None and any(d in self.day.earlier for d in _digest(zip(sizes, checksums, strict=True))):
            raise ValueError(
                f"{info.files[0].path}: the files were already prepared as an earlier day of {self.dataset.path}, and "
                "their rows would count twice; name the files of the new day"
            )

    def vocabulary_id(self, table: str) -> str | None:
        """Returns the id of the vocabulary that the day extends; None for the first day."""
        return None if self.dataset is None else self.dataset.info.table_by_name[table].vocabulary

    def extend(self, table: str, day: Counted, out: Path, *, spec: TableSpec, work: Path) -> int:
        """Writes the vocabulary and counts of a table into the dataset `out`, from the ids of the day, all of which
        `day` counts; returns how many ids wait for a row. work: an empty folder for files.

        Raises ValueError naming the file of the base that was cut or altered.
        """
        base, rare = self._known(table, day.vocabulary, work)
        uses = None
        if spec.expire is not None:
            unused_days = spec.expire.unused_days
            uses = self._uses(table, base, rare)._replace(today=self.day.number, unused_days=unused_days)
        extension = Extension(base, rare, day, min_count=spec.min_count, tmp_dir=work, uses=uses)
        own = Table(table, 1)
        names = own.vocabulary_file, own.counts_file, *own.rare_files
        paths = [out / name for name in (*names, *((*own.use_files, own.reborn_file) if uses else ()))]
        for path in paths:
            make_folder(path.parent, within=out)
        extension.write(*paths)
        return extension.num_rare

    def _known(self, table: str, like: Vocabulary, work: Path) -> tuple[Vocabulary, Counted]:
        """Returns the vocabulary of the base, and the ids that wait for a row there."""
        nothing = empty_vocabulary(work / "nothing", like)
        none = Counted(nothing, np.zeros(1, np.uint32))
        if self.dataset is None:
            return nothing, none
        base, paths = Vocabulary.open(self.dataset.vocabulary(table).path), self.dataset.rare_paths(table)
        assert base.key_kind == like.key_kind, "rows are read by the encodings of the base"
        return base, none if paths is None else Counted.open(*paths)

    def _uses(self, table: str, base: Vocabulary, rare: Counted) -> Uses:
        """Returns when ids were last used by the end of the base. A base that does not keep this is a first day, whose
        ids all were."""
        if self.dataset is None or (found := self.dataset.last_uses(table)) is None:
            return Uses.on(self.own.number, base, rare)
        sizes = base.num_embeddings, len(rare.counts)
        for days, size, name in zip(found, sizes, Table(table, 1).use_files, strict=True):
            if len(days) != size:
                raise ValueError(f"{self.dataset.path / name} has {len(days)} days for {size} rows; {MANIFEST_CURE}")
        return Uses(*found)

    def statistics(self, schema: Schema, *, strict: bool = False) -> Statistics:
        """Returns the label's statistics at the end of the base. strict: as for `Statistics`."""
        if self.dataset is None:
            return Statistics(schema, strict=strict)
        return Statistics.load(schema, self.dataset.statistics_path(), strict=strict, cure=MANIFEST_CURE)

    def notes(self) -> Iterator[str]:
        """Yields notes about the base for the user: which ids it has forgotten."""
        for table in () if self.dataset is None else self.dataset.info.tables:
            if table.num_dropped and self.dataset is not None and self.dataset.rare_paths(table.name) is None:
                yield (
                    f"{self.dataset.path} does not know how often it saw the {table.num_dropped:,} ids of table "
                    f"{table.name!r} that are below min_count: they count from this day on; to count them from the "
                    "first day, prepare that day with --base none"
                )

    def unknown(self, out: Path, tables: Sequence[Table], say: Callable[[str], None]) -> dict[str, Any]:
        """Returns, for the summary of the dataset `out`, how many lookups of its training rows were of ids without a
        row, and says so."""
        if self.dataset is None:
            return {}
        found = {}
        say(f"ids that {self.day.parent} has no row for:")
        for table in tables:
            before, counts = self.dataset.info.table_by_name[table.name], open_counts(out / table.counts_file)
            first, path = before.num_embeddings, out / table.reborn_file
            reborn = open_counts(path) if path.exists() else np.empty(0, np.uint32)
            pieces = (reborn[start : start + PLACES_AT_ONCE] for start in range(0, len(reborn), PLACES_AT_ONCE))
            again = sum(int(counts[piece].sum(dtype=np.uint64)) for piece in pieces)
            left, new = int(counts[0]), int(counts[first:].sum(dtype=np.uint64)) + again
            new_rows = table.num_embeddings - first + len(reborn)
            found[table.name] = {
                "lookups": int(counts.sum(dtype=np.uint64)),
                "unknown_to_base": left + new,
                "unknown": left,
                "new_rows": new_rows,
                "ids_below_min_count": table.num_dropped,
            }
            if (out / table.use_files[0]).exists():
                found[table.name] |= {
                    "expired": before.num_used + new_rows - table.num_used,
                    "reused_rows": len(reborn),
                    "free_rows": table.num_embeddings - 1 - table.num_used,
                }
        for name, own in found.items():
            share, left_share = (own[key] / max(own["lookups"], 1) for key in ("unknown_to_base", "unknown"))
            say(
                f"  {name}: {share:.2%} of {own['lookups']:,} lookups; new rows: {own['new_rows']:,}, ids below "
                f"min_count: {own['ids_below_min_count']:,} ({left_share:.2%} of lookups)"
            )
            if "expired" in own:
                say(
                    f"    expired ids: {own['expired']:,}; new ids in rows of expired ones: {own['reused_rows']:,}; "
                    f"rows without an id: {own['free_rows']:,}"
                )
        return {"ids": found}


def _digest(files: Iterable[tuple[int, str]]) -> list[str]:
    """Returns what tells the files of a day, in any order, from others, by their sizes and checksums; nothing if one
    has no checksum."""
    found = sorted(files)
    known = found and all(checksum for _, checksum in found)
    return [sha256(repr(found).encode()).hexdigest()[:16]] if known else []
