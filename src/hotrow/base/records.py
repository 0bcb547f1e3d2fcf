"""JSON files that hotrow writes and reads back: strict types, a checksum inside the file, errors in our words.

    RECORD = Document(Notes, marks={"hotrow_notes": 1}, cure="restore it from a copy")
    RECORD.write(path, Notes(...)); RECORD.read(path) == Notes(...)

The last member of the file is `checksum`, on a line of its own: the SHA-256 of all bytes before that line, as
`head -n -2 FILE | sha256sum` prints it. So a file that was edited, cut or damaged is refused before it is parsed. Its
content is checked all the same, since anyone can compute a checksum. JSON that is written for others (reports,
metrics.jsonl, `--json`) has none.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hotrow.base.door import read_file
from hotrow.base.files import atomic_write

T = TypeVar("T")
MAX_COUNT = (1 << 62) - 1
"""Upper limit of every count, size and offset, so that the sum of two fits int64."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number that is not negative: seconds, losses."""
STRICT = ConfigDict(strict=True, extra="forbid")
"""Configuration of a record: 3.0 is not an integer, "3" is not a number, and an unknown field is an error."""
SECTION = ConfigDict(extra="forbid", frozen=True, strict=True)
"""Configuration of a section of a config: as strict, never altered."""
CHECKSUM = "checksum"
_KEY = f' "{CHECKSUM}": "'


class Document(Generic[T]):
    """A kind of JSON file, which holds a `record`: a dataclass with `STRICT`, or a mapping. marks: fields that say what
    the file is and in which version. cure: what a user can do about a file that is refused."""

    def __init__(self, record: type[T], *, marks: Mapping[str, str | int], cure: str) -> None:
        self.marks, self.cure = dict(marks), cure
        self._record = TypeAdapter(record)

    def write(self, path: Path | str, record: T | Mapping[str, Any]) -> None:
        """Writes the file atomically (mode 0600). Raises ValueError for NaN and infinity, and OSError."""
        fields = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
        assert isinstance(fields, Mapping)
        write_sealed(path, {**self.marks, **fields})

    def read(self, path: Path | str) -> T:
        """Returns the record in the file. Raises ValueError, which names the file, the wrong field and the cure."""
        fields = read_sealed(path, cure=self.cure)
        for name, mark in self.marks.items():
            found = fields.pop(name, None)
            if found != mark or isinstance(found, bool):
                raise ValueError(
                    f"{path}: {name} is {short(found)}, and this hotrow reads {mark!r}; use the hotrow that wrote the "
                    f"file, or {self.cure}"
                )
        return checked(self._record, fields, where=str(path), cure=self.cure)


def checked(record: TypeAdapter[T], value: Any, *, where: str, cure: str) -> T:
    """Returns `value`, from JSON, as a record. Raises ValueError: `where`, the field, and the cure."""
    try:
        return record.validate_json(json.dumps(value))
    except ValidationError as error:
        raise ValueError(f"{where}: {describe(error)}; {cure}") from None
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply; {cure}") from None


def write_sealed(path: Path | str, fields: Mapping[str, Any]) -> None:
    """Writes a JSON object and its checksum, atomically. Raises ValueError for NaN and infinity."""
    assert CHECKSUM not in fields
    text = json.dumps({**fields, CHECKSUM: ""}, indent=1, ensure_ascii=False, allow_nan=False)
    body = text.removesuffix(f'{_KEY}"\n}}').encode()
    with atomic_write(path) as file:
        file.write(_sealed(body))


def read_sealed(path: Path | str, *, cure: str) -> dict[str, Any]:
    """Returns the fields in a file of `write_sealed`. Raises ValueError if its bytes have changed."""
    text = read_file(path)
    body, key, _ = text.rpartition(_KEY.encode())
    if not key:
        raise ValueError(f"{path} has no checksum at its end: it was cut off or edited; {cure}")
    if text != _sealed(body):
        raise ValueError(f"{path} differs from its checksum: it was edited or damaged; {cure}")
    fields = _parse(text, f"{path}", cure)
    del fields[CHECKSUM]
    return fields


def _sealed(body: bytes) -> bytes:
    return body + f'{_KEY}{sha256(body).hexdigest()}"\n}}\n'.encode()


def _parse(text: bytes, where: str, cure: str) -> dict[str, Any]:
    """Returns the object in `text`. Its checksum is right, so a fault here was made on purpose."""

    def refuse(word: str) -> Any:
        raise ValueError(f"it holds {word}, which is not a JSON number")

    def finite(word: str) -> float:
        return number if math.isfinite(number := float(word)) else refuse(word)

    try:
        fields = json.loads(text.decode(), parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is not JSON ({error})"
        raise ValueError(f"{where}: {reason}; {cure}") from None
    assert isinstance(fields, dict), "the text ends as an object does"
    return fields


def short(value: Any) -> str:
    """Returns the value as it is written in Python, cut to 80 characters."""
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns '; did you mean X?' if `known` has a similar name, else ''."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings by dotted name; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


# ---- pydantic's errors in our words: the same sentences for configs, schemas and records

_WORDS = {
    "missing": "it is missing",
    "string_type": "it must be text",
    "bool_type": "it must be true or false",
    "finite_number": "it must be a finite number",
    "float_type": "it must be a number",
    "json_invalid": "it holds text that is not valid Unicode",
    "extra_forbidden": "there is no such field",
    "unexpected_keyword_argument": "there is no such field",
}
_WORDS |= dict.fromkeys(("int_type", "int_from_float", "int_parsing", "int_parsing_size"), "it must be a whole number")
_WORDS |= dict.fromkeys(("tuple_type", "list_type"), "it must be a list")
_WORDS |= dict.fromkeys(("dict_type", "model_type", "dataclass_type", "model_attributes_type"), "it must be a mapping")
_LIMITS = {
    "literal_error": "it must be {expected}",
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be above {gt}",
    "less_than_equal": "it must be at most {le}",
    "less_than": "it must be below {lt}",
    "too_short": "it needs at least {min_length}",
    "string_too_short": "it needs at least {min_length} characters",
    "string_too_long": "it may have at most {max_length} characters",
    "string_pattern_mismatch": "it must look like {pattern}",
}


def in_words(fault: Mapping[str, Any]) -> str:
    """Returns the reason of one of `ValidationError.errors()`, without the field and its value."""
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if fault["type"] in _LIMITS:
        return _LIMITS[fault["type"]].format(**fault["ctx"])
    return _WORDS.get(fault["type"], "it has not the form of this field")


def innermost(faults: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Removes faults that follow from others: a list is too short because its entries were refused."""
    places = [fault["loc"] for fault in faults]
    return [
        fault
        for fault in faults
        if fault["type"] != "too_short" or not any(p[: len(fault["loc"])] == fault["loc"] != p for p in places)
    ]


def describe(error: ValidationError) -> str:
    """Returns the first fault as `field.subfield is <value>: <reason>`."""
    first = innermost(error.errors(include_url=False))[0]
    where = ".".join(str(step) for step in first["loc"])
    if not where:
        return in_words(first)
    if first["type"] in ("value_error", "missing", "unexpected_keyword_argument", "extra_forbidden"):
        return f"{where}: {in_words(first)}"
    return f"{where} is {str(first['input'])[:80]!r}: {in_words(first)}"
