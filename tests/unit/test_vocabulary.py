"""The vocabulary and counts files: their bytes, searching them without loading, and files that must be refused."""

import collections
import itertools
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hotrow.data import reference
from hotrow.data.chunk import Keys
from hotrow.data.native import Counter, hash_keys, merge_runs
from hotrow.data.packed.vocabulary import Vocabulary, build_vocabulary, open_counts
from loops import looped

STRINGS = [b"red", b"green", b"red", b"", b"red", b"green", b"blue and long enough for two words"]


def strings(values: list[bytes], valid: list[bool] | None = None) -> Keys:
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int64)
    return Keys(np.frombuffer(b"".join(values), np.uint8), offsets, None if valid is None else np.array(valid))


def build(folder: Path, keys: Keys, **options: object) -> Vocabulary:
    counter = Counter(keys.kind, hash_cap=options.get("hash_cap", 0))  # type: ignore[arg-type]
    counter.add(keys)
    counter.drain(folder / "run")
    build_vocabulary(
        [folder / "run"], folder / "v", folder / "c", key_kind=keys.kind, memory_bytes=0, tmp_dir=folder, **options
    )  # type: ignore[arg-type]
    return Vocabulary.open(folder / "v")


def test_the_bytes_of_a_file_of_strings(tmp_path: Path) -> None:
    """Written out by hand from docs/vocabulary.md; the hash is the page's own four lines."""

    def mix(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD % 2**64
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
        return x ^ x >> 33

    def hash_of(key: bytes) -> int:
        h = mix(len(key))
        for at in range(0, len(key), 8):
            h = mix(h ^ int.from_bytes(key[at : at + 8], "little"))
        return h

    build(tmp_path, strings(STRINGS))
    raw = (tmp_path / "v").read_bytes()
    rows = {b"red": 1, b"green": 2, b"": 3, STRINGS[-1]: 4}
    order = sorted(rows, key=hash_of)
    hashes = [hash_of(key) for key in order]
    directory = [sum(h >> 63 < bucket for h in hashes) for bucket in range(3)]
    sections = [
        struct.pack("<3I", *directory),
        struct.pack("<4Q", *hashes),
        struct.pack("<4I", *(rows[key] for key in order)),
        struct.pack("<5Q", *np.cumsum([0, *map(len, order)])),
        b"".join(order),
    ]
    header = struct.pack("<8s6I5Q", b"hotrowvb", 1, 0x01020304, 256, 1, 4, 1, 4, 5, 0, 0, 7)
    body, offset = b"", 256
    for section in sections:
        offset = -(-offset // 64) * 64
        header += struct.pack("<QQI4x", offset, len(section), zlib.crc32(section))
        body = body.ljust(offset - 256, b"\0") + section
        offset += len(section)
    header = header.ljust(252, b"\0")
    assert raw == header + struct.pack("<I", zlib.crc32(header)) + body
    counts = struct.pack("<5I", 0, 3, 2, 1, 1)
    header = struct.pack("<8s4IQI", b"hotrowct", 1, 0x01020304, 64, 4, 5, zlib.crc32(counts)).ljust(60, b"\0")
    assert (tmp_path / "c").read_bytes() == header + struct.pack("<I", zlib.crc32(header)) + counts


def test_a_vocabulary_describes_itself(tmp_path: Path) -> None:
    found = build(tmp_path, strings(STRINGS, [True] * 5 + [False] * 2), min_count=2)
    assert (found.num_embeddings, found.num_keys, found.missing_row, found.key_kind) == (3, 1, 2, "bytes")
    assert found.row_dtype is np.int32
    assert len(found.id) == 32
    (tmp_path / "other").mkdir()
    assert build(tmp_path / "other", strings(STRINGS)).id != found.id
    for name in ("v", "c", "run"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_lookup_in_memory_mapped_and_by_slices(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 500, dtype=np.uint32)
    asked = Keys(np.concatenate([values, rng.integers(0, 2**32, 100, dtype=np.uint32)]))
    truth = [*range(1, 501), *[0] * 100]
    found = build(tmp_path, Keys(values))
    assert found.lookup(asked).tolist() == truth
    assert found.load().lookup(asked).tolist() == truth
    for num_parts in (2, 16):
        parts = [found.load_slice(part, num_parts).lookup(asked) for part in range(num_parts)]
        assert np.sum(parts, axis=0).tolist() == truth
    with pytest.raises(ValueError, match=r"v: keys are of kind 'bytes', this vocabulary holds 'int'"):
        found.lookup(strings([b"x"]))


def test_rows_that_stand_for_no_id(tmp_path: Path) -> None:
    """The header is changed by the page's offsets."""
    build(tmp_path, strings(STRINGS))
    raw = (tmp_path / "v").read_bytes()

    def written(version: int, more_rows: int) -> Path:
        header = raw[:8] + struct.pack("<I", version) + raw[12:40] + struct.pack("<Q", 5 + more_rows) + raw[48:252]
        path = tmp_path / f"version-{version}-{more_rows}"
        path.write_bytes(header + struct.pack("<I", zlib.crc32(header)) + raw[256:])
        return path

    plain, found = (Vocabulary.open(written(1, more)) for more in (0, 3))
    assert (found.num_embeddings, found.num_keys, found.header.num_free) == (8, 4, 3)
    assert found.lookup(strings(STRINGS)).tolist() == plain.lookup(strings(STRINGS)).tolist()
    assert found.header.pack() == found.path.read_bytes()[:256] and found.id != plain.id
    with pytest.raises(ValueError, match=r"version-1--1: .* its header contradicts itself"):
        Vocabulary.open(written(1, -1))
    for version in (0, 2):
        with pytest.raises(ValueError, match=rf"format version is {version}; this hotrow reads 1$"):
            Vocabulary.open(written(version, 0))


def test_a_table_without_keys(tmp_path: Path) -> None:
    found = build(tmp_path, Keys(np.array([], np.int64)))
    assert (found.num_embeddings, found.num_keys) == (1, 0)
    assert found.lookup(Keys(np.array([1, 2]))).tolist() == [0, 0]
    assert found.load().lookup(Keys(np.array([1, 2]))).tolist() == [0, 0]
    assert open_counts(tmp_path / "c").tolist() == [0]


def test_hash_cap_goes_with_the_vocabulary(tmp_path: Path) -> None:
    found = build(tmp_path, Keys(np.array([3, 13, 23, 4])), hash_cap=10)
    assert found.lookup(Keys(np.array([3, 33, 14, 5, -7]))).tolist() == [1, 1, 2, 0, 1]
    found = build(tmp_path, strings([b"a", b"b", b"a"]), hash_cap=2**40)
    assert found.lookup(strings([b"a", b"b", b"c"])).tolist() == [1, 2, 0]
    assert found.header.sections[-1].num_bytes == 0


@pytest.mark.parametrize("keys", [strings(STRINGS), Keys(np.arange(100))], ids=["bytes", "int"])
def test_every_flipped_byte_is_refused(keys: Keys, tmp_path: Path) -> None:
    build(tmp_path, keys)
    for name, opener in (("v", Vocabulary.open), ("c", open_counts)):
        path = tmp_path / name
        whole = bytearray(path.read_bytes())
        padding = set(range(256, len(whole)))
        if name == "v":
            for section in Vocabulary.open(path).header.sections:
                padding -= set(range(section.offset, section.offset + section.num_bytes))
        else:
            padding = set()
        for at in range(len(whole)):
            if at in padding:
                continue
            whole[at] ^= 0x10
            path.write_bytes(whole)
            with pytest.raises(ValueError, match=f"{path}: "):
                opener(path)
            whole[at] ^= 0x10


@looped("name", ["v", "c"])
def test_every_truncation_is_refused(name: str, tmp_path: Path) -> None:
    build(tmp_path, strings(STRINGS))
    path, opener = tmp_path / name, {"v": Vocabulary.open, "c": open_counts}[name]
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{path}: "):
            opener(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=f"{path}: "):
        opener(path)


def forge(path: Path, section: int, change: object) -> None:
    """Alters a section and mends all checksums, as an attacker would."""
    raw = bytearray(path.read_bytes())
    at = struct.calcsize("<8s6I5Q") + 24 * section
    offset, num_bytes, _ = struct.unpack_from("<QQI", raw, at)
    raw[offset : offset + num_bytes] = change(bytes(raw[offset : offset + num_bytes]))  # type: ignore[operator]
    struct.pack_into("<I", raw, at + 16, zlib.crc32(raw[offset : offset + num_bytes]))
    struct.pack_into("<I", raw, 252, zlib.crc32(raw[:252]))
    path.write_bytes(raw)


@looped(
    ("section", "name", "change"),
    [
        (0, "directory", lambda raw: b"\xff" * 4 + raw[4:]),
        (0, "directory", lambda raw: raw[:-4] + b"\xff" * 4),
        (1, "hashes", lambda raw: raw[::-1]),
        (2, "rows", lambda raw: b"\0" * 4 + raw[4:]),
        (2, "rows", lambda raw: raw[:-4] + b"\5\0\0\0"),
        (3, "key_offsets", lambda raw: raw[:-8] + b"\xff" * 8),
        (3, "key_offsets", lambda raw: raw[:8] + b"\xff" * 8 + raw[16:]),
    ],
)
def test_a_forged_file_cannot_lead_outside_itself(section: int, name: str, change: object, tmp_path: Path) -> None:
    build(tmp_path, strings(STRINGS))
    forge(tmp_path / "v", section, change)
    with pytest.raises(ValueError, match=rf"v: truncated or altered: its section {name} contradicts the header"):
        Vocabulary.open(tmp_path / "v")


def test_a_file_changed_after_opening_is_refused(tmp_path: Path) -> None:
    found = build(tmp_path, Keys(np.arange(100)))
    raw = bytearray((tmp_path / "v").read_bytes())
    raw[found.header.sections[2].offset] ^= 1
    (tmp_path / "v").write_bytes(raw)
    with pytest.raises(ValueError, match=r"its section rows .* does not match its checksum"):
        found.load()


def test_numbers_out_of_range_are_named(tmp_path: Path) -> None:
    for option in ({"min_count": 0}, {"hash_cap": -1}):
        (name, value), *_ = option.items()
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be at least"):
            build_vocabulary(
                [], tmp_path / "v", tmp_path / "c", key_kind="int", memory_bytes=0, tmp_dir=tmp_path, **option
            )
    with pytest.raises(ValueError, match="integer keys are int16"):
        hash_keys(Keys(np.array([1], np.int16)))
    with pytest.raises(ValueError, match="keys are of kind 'int', this counter counts 'bytes'"):
        Counter("bytes").add(Keys(np.array([1])))


def test_damaged_runs_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    for kind, keys in (("int", Keys(np.arange(50))), ("bytes", strings(STRINGS))):
        counter = Counter(kind)  # type: ignore[arg-type]
        counter.add(keys)
        counter.drain(tmp_path / "whole")
        whole = (tmp_path / "whole").read_bytes()
        flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
        for damaged in [*flipped, b"", whole[:30], whole[:-1]]:
            (tmp_path / "run").write_bytes(damaged)
            runs = [tmp_path / "whole", tmp_path / "run"]
            with pytest.raises(ValueError, match=r"run: this file of counts is truncated or altered; delete"):
                build_vocabulary(runs, tmp_path / "v", tmp_path / "c", key_kind=kind, memory_bytes=0, tmp_dir=tmp_path)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="run: this file of counts is truncated or altered"):
                merge_runs(runs, tmp_path / "merged", memory_bytes=0)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_an_oserror(tmp_path: Path) -> None:
    counter = Counter("int")
    counter.add(Keys(np.arange(10)))
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left on device"):
            counter._counter.drain(fd)
    finally:
        os.close(fd)
    assert counter.num_keys == 10
    counter.add(Keys(np.arange(20)))
    assert counter.num_keys == 20


@looped("piece_bytes", [1, 100, 1 << 20])
def test_entries_are_every_key_with_its_row(tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a dictionary: integers of either sign come back from their hashes, texts from their bytes."""
    numbers = [0, -1, 2**63 - 1, -(2**63), 7919, 7919, *range(-300, 300, 7)]
    texts = [b"", b"a" * 300, *(b"id %d" % (i % 70) for i in range(100))]
    whole = Keys(np.array(numbers, np.int64))
    cases: dict[str, tuple[Keys, Sequence[int | bytes], int]] = {
        "numbers": (whole, numbers, 0),
        "texts": (strings(texts), texts, 0),
        "capped": (whole, [number % 101 for number in numbers], 101),
    }
    for name, (keys, values, cap) in cases.items():
        (tmp_path / name).mkdir()
        found: dict[int | bytes, int] = {}
        vocabulary = build(tmp_path / name, keys, hash_cap=cap)
        with monkeypatch.context() as patched:
            patched.setattr("hotrow.data.packed.vocabulary.READ_BYTES", piece_bytes)
            pieces = list(vocabulary.entries())
        for piece, rows in pieces:
            raw, ends = piece.values.tobytes(), piece.offsets
            given = piece.values.tolist() if ends is None else [raw[a:b] for a, b in itertools.pairwise(ends)]
            assert 0 < len(given) == len(rows)
            found |= dict(zip(given, rows.tolist(), strict=True))
        ranked = collections.Counter(values).most_common()  # ties by first appearance
        assert found == {value: row for row, (value, _) in enumerate(ranked, 1)}


def test_hash_against_python_integers() -> None:
    """The reference's vectorised hash against arithmetic on Python's integers."""
    for x in (0, 1, 2**63, 2**64 - 1, 123456789):
        y = x
        y = (y ^ y >> 33) * 0xFF51AFD7ED558CCD % 2**64
        y = (y ^ y >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
        assert int(reference.fmix64(np.array([x], np.uint64))[0]) == y ^ y >> 33
