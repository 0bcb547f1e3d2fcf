"""Raw files by URI: options are no pattern, and secrets are nobody's to read. The file system behind is a local one."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources import inputs

OPTIONS = "?region=eu-west-1&endpoint_override=127.0.0.1%3A9000"
SECRET = "AKIAKEY:sEcReT"
LINE = "\t".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26]) + "\n"


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def open_local(uri: str) -> tuple[Any, str]:
        names.append(uri)
        return fs.LocalFileSystem(), str(tmp_path / uri.partition("?")[0].partition("@")[2])

    monkeypatch.setattr(inputs, "_from_uri", open_local)
    for name in ("day_2.txt", "day_10.txt", "other.md"):
        (tmp_path / "clicks" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "clicks" / name).write_text(LINE * 20)
    return names


def found(uri: str) -> list[str]:
    return [file.name for file in inputs.find_files([uri], matches=lambda name: name.endswith(".txt"), wanted=".txt")]


@pytest.mark.parametrize("path", ["clicks", "clicks/", "clicks/day_*", "clicks/day_[0-9]*.txt", "clicks/**/*.txt"])
def test_options_reach_the_file_system_and_secrets_do_not_reach_names(path: str, opened: list[str]) -> None:
    assert found(f"s3://{SECRET}@{path}{OPTIONS}") == ["s3://clicks/day_2.txt", "s3://clicks/day_10.txt"]
    assert [uri.partition("?")[1:] for uri in opened] == [("?", OPTIONS[1:])]


@pytest.mark.parametrize("path", ["clicks/none.txt", "clicks/none/*", "none"])
def test_what_is_not_there_is_named_without_secrets(path: str, opened: list[str]) -> None:
    with pytest.raises(ValueError, match=f"^s3://{path.replace('*', '.')}: no ") as error:
        found(f"s3://{SECRET}@{path}{OPTIONS}")
    assert "sEcReT" not in str(error.value)


def test_a_uri_that_cannot_be_opened_is_named_without_secrets() -> None:
    with pytest.raises(ValueError, match="this URI cannot be opened") as error:
        found(f"s3://{SECRET}@clicks/day{OPTIONS}&regoin=x")
    assert "sEcReT" not in str(error.value)


def test_preparing_keeps_no_secret(opened: list[str], tmp_path: Path) -> None:
    out = tmp_path / "packed"
    run_prepare("criteo", [f"s3://{SECRET}@clicks/*.txt{OPTIONS}"], out)
    texts = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert b"s3://clicks/day_2.txt" in (out / "dataset.json").read_bytes()
    assert not any(b"sEcReT" in text for text in texts)
    assert all("?" in uri for uri in opened), "files found are not looked for again"


def test_rows_read_ahead_may_be_dropped_by_the_thread_that_reads_them() -> None:
    """As by a collection of garbage there. An error would be one that pytest sees."""
    asked, ended = threading.Event(), threading.Event()
    holder: list[Iterator[int]] = []

    def items() -> Iterator[int]:
        try:
            yield 1
            asked.wait(10)
            holder.clear()
            yield 2
            yield 3
        finally:
            ended.set()

    holder.append(inputs.prefetch(items()))
    assert next(holder[0]) == 1
    asked.set()
    assert ended.wait(10), "the thread must end"
