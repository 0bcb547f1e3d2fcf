"""hotrow.base.files: whole or absent, private, and inside the folder."""

import errno
import fcntl
import json
import os
import zlib
from pathlib import Path

import pytest

from hotrow.base import files
from hotrow.base.files import (
    LOCK,
    atomic_write,
    check_name,
    claim,
    crc32,
    disk_free_bytes,
    file_name,
    is_seen,
    join_crc32,
    take_room,
    write_json,
)
from hotrow.base.machine import _cgroup_available_bytes, available_memory_bytes
from loops import looped


def test_atomic_write_replaces_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [child.name for child in tmp_path.iterdir()] == ["a"]


@looped("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_atomic_write_leaves_the_old_file_when_the_block_raises(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_write(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["a"]


def test_atomic_write_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "a.partial").symlink_to(victim)
    with pytest.raises(ValueError, match="is a link"), atomic_write(tmp_path / "a") as file:
        file.write(b"x")
    assert victim.read_bytes() == b"precious"


@looped("reserves", [True, False])
def test_room_is_taken_and_bytes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserves: bool) -> None:
    """Where a system can reserve room, and where it cannot."""
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with (tmp_path / "a").open("w+b") as file:
        file.write(b"head")
        file.flush()
        for num_bytes in (100, 50):
            take_room(file, num_bytes)
            assert (tmp_path / "a").read_bytes() == b"head" + bytes(96)


@looped("refused", ["nothing", "folders", "unseen", "all"])
def test_a_folder_is_claimed_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """If folders cannot be locked, or their locks are not seen on other machines, a file is; else nobody can tell."""
    plain, folders = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112  # a link that pathlib would have to resolve
            folders.append(how)
            if refused in ("folders", "all"):
                raise OSError(errno.EBADF, "Bad file descriptor")
        elif refused == "all":
            raise OSError(errno.ENOLCK, "No locks available")
        plain(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    if refused == "unseen":
        monkeypatch.setattr(files, "file_system", lambda path: "nfs4")
    with claim(tmp_path) as first, claim(tmp_path) as second:
        assert (first, second) == ((None, None) if refused == "all" else (True, False))
    with claim(tmp_path) as again:
        assert again is (None if refused == "all" else True)
    assert (tmp_path / LOCK).exists() is (refused != "nothing")
    assert refused != "unseen" or not folders


def test_json_for_others(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"name": "Gerät", "n": 2**60})
    assert json.loads(path.read_bytes()) == {"name": "Gerät", "n": 2**60}
    with pytest.raises(ValueError):
        write_json(path, float("nan"))


@looped("name", ["a", "item id", "Gerät", "a.b", "x" * 200])
def test_check_name_accepts(name: str) -> None:
    assert check_name(name) == name


@looped("name", ["", ".", "..", ".a", "a/b", "/a", "a\0", "a\n", "..\\a", "x" * 201, "\ud800", 3, None])
def test_check_name_refuses(name: str) -> None:
    with pytest.raises(ValueError, match="table name"):
        check_name(name, what="table name")


@looped("cut", [0, 1, 7, 4096, 9_999, 10_000])
def test_checksums_of_pieces_join(tmp_path: Path, cut: int) -> None:
    data = os.urandom(5_000) + bytes(5_000)
    (tmp_path / "file").write_bytes(data)
    first, second = crc32(tmp_path / "file", 0, cut), crc32(tmp_path / "file", cut)
    assert (first, second) == (zlib.crc32(data[:cut]), zlib.crc32(data[cut:]))
    assert join_crc32(first, second, len(data) - cut) == zlib.crc32(data) == crc32(tmp_path / "file")


def test_a_path_is_seen_if_it_is_there(tmp_path: Path) -> None:
    assert is_seen(tmp_path) and not is_seen(tmp_path / "a") and not is_seen(tmp_path / "a" / "b")


def test_disk_free_bytes_of_a_path_not_there_yet(tmp_path: Path) -> None:
    assert disk_free_bytes(tmp_path / "no" / "such") > 0


def cgroup(root: Path, limit: str, use: int, cache: int, names: tuple[str, str, str]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / names[0]).write_text(limit + "\n")
    (root / names[1]).write_text(f"{use}\n")
    (root / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def test_cgroup_limits_of_both_versions_and_of_parents(tmp_path: Path) -> None:
    member = tmp_path / "member"
    member.write_text("0::/job/step\n")
    cgroup(tmp_path / "v2" / "job" / "step", "max", 10, 0, V2)
    assert _cgroup_available_bytes(tmp_path / "v2", member) is None
    cgroup(tmp_path / "v2" / "job", "1000", 400, 50, V2)
    assert _cgroup_available_bytes(tmp_path / "v2", member) == 650
    cgroup(tmp_path / "v2" / "job" / "step", "500", 300, 0, V2)
    assert _cgroup_available_bytes(tmp_path / "v2", member) == 200
    member.write_text("3:cpu:/x\n2:memory,swap:/docker/absent/here\n")
    cgroup(tmp_path / "v1" / "memory", "1000", 1200, 0, V1)
    assert _cgroup_available_bytes(tmp_path / "v1", member) == 0
    assert _cgroup_available_bytes(tmp_path / "v1", tmp_path / "absent") is None


def test_available_memory_is_positive_and_below_the_machine() -> None:
    assert 0 < available_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


NAMES = [
    *("", ".", "..", "..ip", "a/b", "a\\b", "%", "%2F", "%-x", "a", "A", "\x00", "a\nb", "é", "e\u0301"),
    *("x" * 300, "x" * 301, "ж" * 120),
]


def test_any_text_has_a_file_name_of_its_own() -> None:
    found = [file_name(name) for name in NAMES]
    assert len(set(found)) == len(NAMES)
    for name in found:
        assert check_name(name) == name
    assert [file_name(name) for name in ("C1", "user id", "ключ", "a.b")] == ["C1", "user id", "ключ", "a.b"]
    with pytest.raises(ValueError, match="must be valid Unicode"):
        file_name("\ud800")
