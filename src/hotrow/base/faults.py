"""Pydantic's errors in our words: the same sentences for configs, schemas and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

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
