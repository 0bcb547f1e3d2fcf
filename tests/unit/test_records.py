"""hotrow.base.records: what is written is read, what was altered is refused, and the checksum is that of sha256sum."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from pydantic.dataclasses import dataclass

from hotrow.base.records import STRICT, Count, Document, write_sealed
from loops import looped


@dataclass(frozen=True, config=STRICT)
class Notes:
    name: str
    pages: tuple[Count, ...] = ()
    rest: dict[str, JsonValue] | None = None


DOCUMENT = Document(Notes, marks={"notes": 1}, cure="write it again")
WHOLE = Notes('Gerät \n "checksum": "', (1, 2**60), {"x": [1.5, None, {"checksum": "y"}]})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    DOCUMENT.write(tmp_path / "n.json", WHOLE)
    assert DOCUMENT.read(tmp_path / "n.json") == WHOLE
    assert (tmp_path / "n.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "n.json").read_bytes())["name"] == WHOLE.name
    with pytest.raises(ValueError):
        DOCUMENT.write(tmp_path / "n.json", Notes("x", (), {"x": float("nan")}))
    assert DOCUMENT.read(tmp_path / "n.json") == WHOLE, "what cannot be written leaves what was there"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not there")
def test_against_sha256sum(tmp_path: Path) -> None:
    DOCUMENT.write(tmp_path / "n.json", WHOLE)
    command = ["sh", "-c", "head -n -2 n.json | sha256sum"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()[0]
    assert json.loads((tmp_path / "n.json").read_bytes())["checksum"] == told


def test_any_flipped_byte_and_any_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    DOCUMENT.write(path, WHOLE)
    text = path.read_bytes()
    flips = [text[:at] + bytes([text[at] ^ 1 << at % 8]) + text[at + 1 :] for at in range(len(text))]
    for other in [*flips, *(text[:end] for end in range(len(text))), text + b"\n", b" " + text]:
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"n\.json .* checksum.*; write it again"):
            DOCUMENT.read(path)


@looped(
    ("change", "message"),
    [
        ({"pages": [1, "2"]}, r"pages\.1 is '2': it must be a whole number; write it again"),
        ({"pages": [1.0]}, r"pages\.0 is '1\.0': it must be a whole number"),
        ({"pages": [2**62]}, r"pages\.0 is .*: it must be at most"),
        ({"pages": None}, r"pages is 'None': it must be a list"),
        ({"name": None}, r"name is 'None': it must be text"),
        ({"more": 1}, r"more: there is no such field"),
        ({"notes": 2}, r"notes is 2, and this hotrow reads 1; use the hotrow that wrote the file, or write it again"),
        ({"notes": True}, r"notes is True"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_sealed(tmp_path / "n.json", {"notes": 1, "name": "x", **change})
    with pytest.raises(ValueError, match=rf"^{tmp_path}/n\.json: {message}"):
        DOCUMENT.read(tmp_path / "n.json")


NO_JSON = ["NaN", "1e999", r'"\ud800"', "[" * 5000 + "]" * 5000, "[" * 300 + "]" * 300, "", "9" * 5000]


@pytest.mark.parametrize("value", NO_JSON, ids=range(len(NO_JSON)))
def test_what_is_no_json_of_ours_is_refused(tmp_path: Path, value: str) -> None:
    body = f'{{\n "notes": 1,\n "name": "x",\n "rest": {{"x": {value}}},\n'
    text = f'{body} "checksum": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'
    (tmp_path / "n.json").write_text(text)
    with pytest.raises(ValueError, match=r"n\.json: .*; write it again"):
        DOCUMENT.read(tmp_path / "n.json")
