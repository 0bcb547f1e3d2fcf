"""The columns of a run's files: which inputs of the model are made of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hotrow.data.packed.format import DatasetInfo
from hotrow.data.sources.schema import Schema, parse_schema


class Column(NamedTuple):
    """The inputs that are made of a column of the files."""

    dense: list[int]
    """Places among the dense inputs, its statistics included."""
    features: list[str]


def columns_of(info: DatasetInfo) -> dict[str, Column]:
    """Returns what is made of each column, in the order of the inputs.

    An input that is made of several columns, such as the statistics of a pair, is listed with each of them.
    """
    schema, found = schema_of(info), dict[str, Column]()
    made: dict[str, Sequence[str]] = {}
    if schema is not None:
        made = {name: inputs for name, (_, inputs) in schema.computed.items()}
        made |= {name: spec.columns for spec in schema.statistics for name in spec.inputs}

    def sources(name: str) -> list[str]:
        parents = made.get(name)
        return [name] if parents is None else [column for parent in parents for column in sources(parent)]

    for place, name in enumerate(info.dense_names):
        for column in dict.fromkeys(sources(name)):
            found.setdefault(column, Column([], [])).dense.append(place)
    for name in info.feature_names:
        for column in dict.fromkeys(sources(name)):
            found.setdefault(column, Column([], [])).features.append(name)
    return found


def schema_of(info: DatasetInfo) -> Schema | None:
    """Returns the schema that a dataset was prepared by; None if it does not have a readable one."""
    stored: Any = info.ids.get("schema")
    try:
        return parse_schema(stored, where="schema") if isinstance(stored, dict) else None
    except ValueError:
        return None
