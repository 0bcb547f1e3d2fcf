"""Configs as text: YAML read, overridden and checked against schema.py, errors and options in words.

`load_config` reads a file, applies `--set a.b=v` overrides and checks everything; an unknown key, a value out of range
or a choice this version does not implement is a ValueError naming the field, the value and what is allowed.
scripts/config_page.py writes docs/config.md of it.
"""

from __future__ import annotations

import re
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hotrow.base.records import nearest
from hotrow.config.schema import Config
from hotrow.models import MODELS
from hotrow.objectives import OBJECTIVES

TUNE = "tune"
"""The section of a recipe that `hotrow tune` alone reads: what to search."""
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number"}
_MAX_VALUES = 100_000
"""The most values in one YAML text, in which every alias counts as all that it stands for. A schema of 1,000 columns
has about 4,000."""


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, with two changes: it refuses repeated keys, values that contain themselves and aliases that
    multiply, and it reads 1e-3 as a number (YAML 1.1 reads it as text)."""

    def construct_document(self, node: yaml.Node) -> Any:
        _count_values(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Returns the mapping of `node`. Raises for a repeated key, of which PyYAML would keep the last."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = ""
            if isinstance(key, list | dict):
                problem = "is not a name"
            elif not isinstance(key, str):
                problem = f"is read as {_KINDS.get(type(key), type(key).__name__)}, not as a name; put it in quotes"
            elif key in seen:
                problem = "is given twice; keep one"
            if problem:
                problem = f"key {reprlib.repr(key)} {problem}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Returns the number of values in `node`. counts: results by node; 0 while a node is being counted."""
    if id(node) not in counts:
        counts[id(node)] = 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in inner)
    problem = ""
    if counts[id(node)] == 0:
        problem = "a value contains itself; remove the alias"
    elif counts[id(node)] > _MAX_VALUES:
        problem = f"more than {_MAX_VALUES:,} values, aliases counted as what they stand for; write fewer"
    if problem:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return counts[id(node)]


def parse_yaml(text: str, *, origin: str) -> Any:
    """Returns the value of a YAML text. Raises ValueError, which names `origin`, line and column."""
    try:
        return yaml.load(text, Loader=_YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{origin}{place}: {error.problem}") from None
    except RecursionError:
        raise ValueError(f"{origin} is nested too deeply to be read") from None
    except ValueError as error:  # such as a date that does not exist, or a number with too many digits
        raise ValueError(f"{origin}: a value cannot be read ({error}); put it in quotes if it is text") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{origin} is not readable as YAML: {error}") from None


def load_yaml(path: Path | str, *, cure: str, what: str = "") -> Any:
    """Reads a YAML file. Errors are ValueErrors that name the file, after `what`; if it cannot be read, with `cure`."""
    origin = f"{what} {path}".lstrip()
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{origin}: {error.strerror}; {cure}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin}: byte {error.start} is not UTF-8; convert it (iconv -t UTF-8)") from None
    except ValueError as error:  # of a path that no file can have
        raise ValueError(f"{origin!r}: {error}; {cure}") from None
    return parse_yaml(text, origin=origin)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Returns the config in the YAML file at `path`, changed by `a.b=v` overrides, whose values are YAML. If they set
    `model.name`, options in the file that the new model does not have are left out, with a warning. Raises ValueError
    naming file, field, value and what is allowed, also if there is no such file."""
    raw = {name: section for name, section in read_config(path).items() if name != TUNE}
    raw = with_model(raw, overrides_of(overrides).get("model.name"))
    return make_config(apply_overrides(raw, overrides), origin=f"config {path}")


def with_model(raw: dict[str, Any], name: Any) -> dict[str, Any]:
    """Returns the fields of a recipe for model `name`, if that is not None, in place of its own model.

    Options that the recipe's own model has and `name` does not have are left out, and one warning names them. All other
    fields stay, right or wrong: `make_config` checks them.
    """
    field = Config.model_fields["model"]
    known = {model: section.model_fields for model, section in sections_of(field).items()}
    given = raw.get("model", {})
    before = given.get("name", field.default.name) if isinstance(given, dict) else None
    if not (isinstance(before, str) and isinstance(name, str) and {before, name} <= known.keys()):
        return raw
    dropped = [option for option in given if option in known[before].keys() - known[name].keys()]
    objective = given.get("objective")
    if isinstance(objective, str) and objective in OBJECTIVES and not MODELS[name].fits(objective):
        dropped.append("objective")
    if dropped:
        text = f"the recipe is for model {before}; options that model {name} does not have are left out: "
        warnings.warn(text + ", ".join(f"model.{option}" for option in dropped), stacklevel=3)
    return raw | {"model": {option: value for option, value in given.items() if option not in dropped}}


def read_config(
    path: Path | str,
    *,
    what: str = "config",
    example: str = "recipes/criteo-small.yaml",
    field: str = "data: data/criteo",
) -> dict[str, Any]:
    """Returns the fields in the YAML file at `path`, unchecked. Raises ValueError, which names the file, if it has
    none. what, example, field: the kind of file, and the examples of a file and of a field that errors name."""
    if not isinstance(path, str | Path):
        raise ValueError(f"{what} is {reprlib.repr(path)}; pass the path of a YAML file, or its content as a dict")
    raw = load_yaml(path, what=what, cure=f"pass a YAML file such as {example}")
    if not isinstance(raw, dict):
        raise ValueError(f"{what} {path} holds {reprlib.repr(raw)}; it must be a mapping such as `{field}`")
    return raw


def make_config(raw: dict[str, Any], *, origin: str = "config") -> Config:
    """Returns a nested dict as a Config. Raises ValueError with all wrong fields, their values and what is allowed."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ValueError(f"{origin}: " + "; ".join(dict.fromkeys(_explain(error)))) from None


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of `raw` with each `a.b=v` set. Raises ValueError if an override has no `=` or goes through a
    plain value, or if a key of `raw` is not a text."""
    result: dict[str, Any] = _copy(raw)
    for override in overrides:
        ((path, value),) = overrides_of([override]).items()
        set_field(result, path, value, where=f"--set {override!r}")
    return result


def set_field(raw: dict[str, Any], path: str, value: Any, *, where: str) -> None:
    """Sets the field of `raw` with a dotted name. Raises ValueError, which begins with `where`, if the way there leads
    through a plain value."""
    *parents, leaf = path.split(".")
    if parents and isinstance(raw.get(parents[0]), str) and parents[0] == "memory":
        raw["memory"] = {}  # instead of a word such as auto
    for name in parents:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{where}: {name} holds {reprlib.repr(raw)}, which has no fields")
    raw[leaf] = value


def overrides_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns `a.b=v` overrides as `{"a.b": value}`. Raises ValueError if one has no name or no value."""
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
        names, section, tag, entry = _locate(problem["loc"])
        path = ".".join(name or "''" for name in (*names, *entry))
        match problem["type"]:
            case "extra_forbidden":
                yield _unknown(path, names, section, tag)
            case "value_error":
                yield (f"{path}: " if path else "") + problem["msg"].removeprefix("Value error, ")
            case "missing":
                yield f"{path} is missing; set it to {allowed_in(section, names[-1])}"
            case "union_tag_invalid":
                known, name = list(sections_of(section.model_fields[names[-1]])), problem["input"]["name"]
                hint = nearest(str(name), known) or ";"
                yield f"{path}.name is {reprlib.repr(name)}{hint} allowed: {', '.join(known)}"
            case _:
                allowed = allowed_in(section, names[-1], of_entry=bool(entry))
                yield f"{path} is {reprlib.repr(problem['input'])}; allowed: {allowed}"


def _unknown(path: str, names: Sequence[str], section: type[BaseModel], tag: str) -> str:
    """Says that `section` has no such option; tag: which of several sections in its place it is, or ''."""
    name, known = names[-1], list(section.model_fields)
    others = sections_of(_section_at(names[:-2]).model_fields[names[-2]]) if tag else {}
    having = [other for other, fields in others.items() if name in fields.model_fields]
    said = f"unknown key {path}" + (f" for {names[-2]} {tag}" if len(others) > 1 else "")
    if having:
        return f"{said}; it is one of {' and '.join(having)}: remove it, or set {names[-2]}.name to {having[0]}"
    return said + (nearest(name, known) or f"; known here: {', '.join(known)}")


def _locate(location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel], str, list[str]]:
    """Returns the path of a field as users write it, the section it is in, that section's tag in a union or '', and the
    key, if what is wrong is a value in a mapping from names to values, as a list of one.

    location: pydantic's, which also has names for the branches of unions and for positions in lists.
    """
    names: list[str] = []
    section: type[BaseModel] = Config
    inside: dict[str, type[BaseModel]] = {"": Config}
    tag = next_tag = ""
    parts = [str(part) for part in location]
    while parts and next_tag in inside:
        section, tag = inside[next_tag], next_tag
        names.append(parts.pop(0))
        field = section.model_fields.get(names[-1])
        inside = sections_of(field) if field else {}
        next_tag = parts.pop(0) if parts and "" not in inside else ""
    entry = parts if len(parts) == 1 else []  # two parts: the key itself is wrong, and is what is shown
    return names, section, tag, entry


def sections_of(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """Returns the sections that a field may hold: one, by '', or a union's by their tags."""
    annotation: Any = field.annotation
    if _is_section(annotation):
        return {"": annotation}
    tagged = [get_args(part) for part in get_args(annotation)]
    return {part[1].tag: part[0] for part in tagged if len(part) == 2 and _is_section(part[0])}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _section_at(names: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for name in names:
        section = next(iter(sections_of(section.model_fields[name]).values()))
    return section


def allowed_in(section: type[BaseModel], name: str, *, of_entry: bool = False) -> str:
    """Returns in words what a field may hold; of_entry: what a value in its mapping may hold."""
    field = section.model_fields[name]
    if inner := sections_of(field):
        mapping = f"a mapping with {', '.join(dict.fromkeys(chain(*(part.model_fields for part in inner.values()))))}"
        return " or ".join([*(", ".join(words) for words in _words(field)), mapping])
    schema = section.model_json_schema()["properties"][name]
    if of_entry:
        choices = schema.get("anyOf") or schema.get("oneOf") or [schema]
        schema = next(choice["additionalProperties"] for choice in choices if "additionalProperties" in choice)
    return _render(schema)


def _words(field: FieldInfo) -> list[tuple[str, ...]]:
    """Returns the values that may stand in a field in place of a section."""
    tagged = [get_args(part) for part in get_args(field.annotation)]
    return [get_args(part[0]) for part in tagged if len(part) == 2 and not _is_section(part[0])]


def _render(schema: dict[str, Any]) -> str:
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_render(choice) for choice in choices)
    if "const" in schema or "enum" in schema:
        return ", ".join(schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "object":
        return f"a mapping from names to {_render(schema['additionalProperties']).replace('an integer', 'integers')}"
    if kind == "array":
        return f"a list of {_render(schema['items']).replace('an integer', 'integers')}"
    words = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false"}
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    return " ".join([words.get(kind, kind), " and ".join(limits)]).strip()


def sections(
    section: type[BaseModel] = Config, path: str = "", title: str = "Top level"
) -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Yields every section as (title, dotted path of its options with a dot at the end, section), outer ones first."""
    yield title, path, section
    for name, field in section.model_fields.items():
        inner = sections_of(field)
        for tag, subsection in inner.items():
            yield from sections(subsection, f"{path}{name}.", f"{path}{name}" + (f": {tag}" if len(inner) > 1 else ""))


def options_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the options that have a value of their own: all but those that are a section and nothing else."""
    return {name: field for name, field in section.model_fields.items() if not sections_of(field) or _words(field)}


def options() -> dict[str, FieldInfo]:
    """Returns every option by its dotted path; if several models have an option, the first model's."""
    found: dict[str, FieldInfo] = {}
    for _, path, section in sections():
        for name, field in options_of(section).items():
            found.setdefault(path + name, field)
    return found
