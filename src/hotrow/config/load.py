"""Configs as text: YAML read, overridden and checked against config_schema.py, errors and options in words.

`load_config` reads a file, applies `--set a.b=v` overrides and checks everything; an unknown key, a value out of range
or a choice this version does not implement is a ValueError naming the field, the value and what is allowed.
`python -m hotrow.config.load` prints docs/config.md.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hotrow.config.schema import MEMORY_TAGS, Config, MemoryConfig

_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number"}


_MOST_VALUES = 100_000
"""Most values in one YAML text, aliases counted as what they stand for; a schema of 1,000 columns has about 4,000."""


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, refusing repeated keys, values within themselves and aliases that multiply, and reading
    1e-3 as a number (YAML 1.1 reads it as text)."""

    def construct_document(self, node: yaml.Node) -> Any:
        """The value of the whole text."""
        _count_values(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """The mapping of `node`; a key that stands twice raises, where PyYAML would keep the last."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = ""
            if isinstance(key, list | dict):
                problem = "is no name"
            elif not isinstance(key, str):
                problem = f"is read as {_KINDS.get(type(key), type(key).__name__)}, not as a name; put it in quotes"
            elif key in seen:
                problem = "stands here twice; keep one"
            if problem:
                problem = f"key {reprlib.repr(key)} {problem}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Values in `node`; `counts` holds those of nodes seen before, 0 of the nodes that are being counted."""
    if id(node) not in counts:
        counts[id(node)] = 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in inner)
    problem = ""
    if counts[id(node)] == 0:
        problem = "a value contains itself; remove the alias"
    elif counts[id(node)] > _MOST_VALUES:
        problem = f"more than {_MOST_VALUES:,} values, aliases counted as what they stand for; write fewer"
    if problem:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return counts[id(node)]


def parse_yaml(text: str, *, origin: str) -> Any:
    """The value of a YAML text; ValueError names `origin`, line and column where it is none or repeats a key."""
    try:
        return yaml.load(text, Loader=_YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{origin}{place}: {error.problem}") from None
    except RecursionError:
        raise ValueError(f"{origin} is nested too deeply to be read") from None
    except ValueError as error:  # a date that there is not, a number of too many digits
        raise ValueError(f"{origin}: a value cannot be read ({error}); put it in quotes if it is text") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{origin} is no readable YAML: {error}") from None


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The config in the YAML file at `path`, with `a.b=v` overrides (values in YAML) put over it.

    Raises ValueError naming file, field, value and what is allowed; FileNotFoundError as ValueError with the cure.
    """
    return make_config(apply_overrides(read_config(path), overrides), origin=f"config {path}")


def read_config(path: Path | str) -> dict[str, Any]:
    """The fields in the YAML file at `path`, unchecked. Raises ValueError naming the file where it holds none."""
    if not isinstance(path, str | Path):
        raise ValueError(f"config is {reprlib.repr(path)}; pass the path of a YAML file, or its content as a dict")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config {path} is no file; pass a YAML file such as recipes/criteo-small.yaml")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"config {path}: byte {error.start} is not UTF-8; pass a YAML file in UTF-8") from None
    raw = parse_yaml(text, origin=f"config {path}")
    if not isinstance(raw, dict):
        raise ValueError(f"config {path} holds {reprlib.repr(raw)}; it must be a mapping such as `data: data/criteo`")
    return raw


def make_config(raw: dict[str, Any], *, origin: str = "config") -> Config:
    """The checked Config of a nested dict; ValueError lists every wrong field with its value and what is allowed."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ValueError(f"{origin}: " + "; ".join(dict.fromkeys(_explain(error)))) from None


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `raw` with each `a.b=v` set; ValueError where one has no `=` or goes through a plain value, or where
    a key of `raw` is not a text."""
    result: dict[str, Any] = _copy(raw)
    for override in overrides:
        ((path, value),) = overrides_of([override]).items()
        *parents, leaf = path.split(".")
        section = result
        for depth, name in enumerate(parents):
            if isinstance(section.get(name), str) and _section_at(parents[: depth + 1]) is MemoryConfig:
                section[name] = {}  # instead of its word
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ValueError(f"--set {override!r}: {name} holds {reprlib.repr(section)}, which has no fields")
        section[leaf] = value
    return result


def overrides_of(overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=v` overrides as `{"a.b": value}`; ValueError where one has no name and value."""
    split = [override.partition("=") for override in overrides]
    for override, (path, equals, _) in zip(overrides, split, strict=True):
        if not equals or not all(name.strip() for name in path.split(".")):
            raise ValueError(f"--set {override!r} has no name and value; write it as --set train.batch_size=4096")
    return {path.strip(): parse_yaml(text, origin=f"--set {path}") for path, _, text in split}


def _copy(value: Any) -> Any:
    if isinstance(value, dict) and (odd := [key for key in value if not isinstance(key, str)]):
        raise ValueError(f"config: key {odd[0]!r} is not a text; put it in quotes")
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        # Union branches appear in a location as tags of their own; the path of the field is the part the schema knows.
        names = list(_known(problem["loc"]))
        path = ".".join(name or "''" for name in names)
        if problem["type"] == "extra_forbidden":
            known = list(_section_at(names[:-1]).model_fields)
            near = difflib.get_close_matches(names[-1], known, n=1, cutoff=0.5)
            where = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(known)}"
            yield f"{path} is no known key{where}"
        elif problem["type"] == "value_error":
            yield (f"{path}: " if path else "") + problem["msg"].removeprefix("Value error, ")
        elif problem["type"] == "missing":
            yield f"{path} is missing; set it to {_allowed(names)}"
        else:
            yield f"{path} is {reprlib.repr(problem['input'])}; allowed: {_allowed(names)}"


def _known(location: tuple[int | str, ...]) -> Iterator[str]:
    section: type[BaseModel] | None = Config
    for part in location:
        if section is MemoryConfig and part in MEMORY_TAGS:
            continue
        yield str(part)
        section = _subsection(section, str(part)) if section else None
        if section is None:
            return


def _subsection(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = section.model_fields.get(name)
    annotation: Any = field.annotation if field else None
    found = [part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return found[0] if found else None


def _parts(annotation: Any) -> list[Any]:
    """`annotation`, or those of a union, without what annotates them."""
    inner = [getattr(part, "__origin__", part) for part in get_args(annotation)]
    return inner if any(isinstance(part, type) and issubclass(part, BaseModel) for part in inner) else [annotation]


def _section_at(names: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for name in names:
        section = _subsection(section, name) or section
    return section


def _allowed(names: Sequence[str]) -> str:
    parent, name = _section_at(names[:-1]), names[-1]
    if section := _subsection(parent, name):
        mapping = f"a mapping with {', '.join(section.model_fields)}"
        words = [word for part in get_args(parent.model_fields[name].annotation) for word in get_args(part.__origin__)]
        return f"{', '.join(words)} or {mapping}" if words else mapping
    return _render(parent.model_json_schema()["properties"][name])


def _render(schema: dict[str, Any]) -> str:
    """A field's JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(_render(option) for option in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "array":
        return f"a list of {_render(schema['items']).replace('an integer', 'integers')}"
    words = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false"}
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    return " ".join([words.get(kind, kind), " and ".join(limits)]).strip()


def options(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option as `(dotted path, pydantic field)`: a section's own first, then those of the sections in it."""
    inner = {name: _subsection(section, name) for name in section.model_fields}
    for name, field in section.model_fields.items():
        if inner[name] is None or field.annotation is not inner[name]:  # a union has a value of its own too
            yield prefix + name, field
    for name, subsection in inner.items():
        if subsection is not None:
            yield from options(subsection, f"{prefix}{name}.")


def config_markdown() -> str:
    """docs/config.md: every option with its default, what it may be, and its effect."""
    lines = [
        "# Configuration",
        "",
        "One YAML file describes a run; `--set a.b=value` overrides a field from the command line. Unknown keys are",
        "refused. This page is generated from `hotrow.config.load` (`python -m hotrow.config.load > docs/config.md`).",
    ]
    last_section = None
    for path, field in options():
        names = path.split(".")
        if names[:-1] != last_section:
            last_section = names[:-1]
            lines += ["", f"## {'.'.join(names[:-1]) or 'Top level'}", "", _section_at(names[:-1]).__doc__ or ""]
            lines += ["", "| option | default | allowed | effect |", "|---|---|---|---|"]
        default = "" if field.is_required() else f"`{json.dumps(field.default)}`"
        effect = " ".join((field.description or "").split())
        lines.append(f"| `{path}` | {default or 'required'} | {_allowed(names)} | {effect} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(config_markdown(), end="")
