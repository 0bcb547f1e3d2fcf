"""What a user may say about raw files without a schema: one list of options for `fit`, `init` and `prepare`.

    @with_read_options
    def run_init(paths, *, read: ReadOptions, out=None): ...      run_init("logs.csv", label="click", exclude=["row"])

`ReadOptions` is the list. In Python its fields are keyword arguments, on the command line they are flags (cli/app.py).
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature, signature
from typing import Any, Literal, TypeVar, get_args, get_type_hints

Role = Literal["categorical", "dense", "lists", "text", "exclude"]
"""The roles that a user may give a column."""
Result = TypeVar("Result")


def _option(help: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ReadOptions:
    """How the columns of raw files are read; what is not said is guessed.

    Raises ValueError naming an option that has another type, or a column that is listed twice.
    """

    label: str | Sequence[str] = _option(
        'The 0/1 column, or a rule: "rating >= 4", "action = buy, cart". Guessed if not given.', ()
    )
    objective: str | None = _option("What the model is for, as in model.objective; it says what the label must be.")
    weight: str | None = _option("The column of how much a row counts, 0 or more. Every row counts 1 if not given.")
    time: str | None = _option("The column to split by time; guessed if not given.")
    time_format: str | None = _option('strptime format of that column\'s text, e.g. "%d/%m/%Y %H:%M".')
    categorical: Sequence[str] = _option("Columns of ids.", ())
    dense: Sequence[str] = _option("Columns of numbers.", ())
    lists: Sequence[str] = _option("Columns with several ids a row.", ())
    text: Sequence[str] = _option("Columns of ids that stay text, so that 007 is not 7.", ())
    exclude: Sequence[str] = _option("Columns to leave out.", ())
    at_serving: Mapping[str, int | float | str] = _option(
        "What a column counts as in all rows to score, as position=1; training sees it as it is.", ()
    )
    null_values: Sequence[str] = _option("Texts that mean a missing value, besides the empty one.", ())
    skip_bad_rows: int = _option("How many bad rows may be skipped; skipped rows are counted.", 0)

    def __post_init__(self) -> None:
        for name in ("objective", "weight", "time", "time_format"):
            if not isinstance(given := getattr(self, name), str | None):
                kinds = {"time_format": "a strptime format", "objective": "its name"}
                what = kinds.get(name, "the name of a column")
                raise ValueError(f"{name} is {reprlib.repr(given)}; give {what}")
        if isinstance(self.label, str):
            object.__setattr__(self, "label", (self.label,))
        if not isinstance(self.at_serving, Mapping):  # from the command line, COLUMN=VALUE
            self._check_list("at_serving", self.at_serving)
            if bare := [text for text in self.at_serving if "=" not in text]:
                raise ValueError(f"at_serving is {bare[0]!r}; write COLUMN=VALUE, such as position=1")
            object.__setattr__(self, "at_serving", dict(text.split("=", 1) for text in self.at_serving))
        for name in ("label", *get_args(Role), "null_values"):
            self._check_list(name, getattr(self, name))
        if twice := [label for label in self.label if self.label.count(label) > 1]:
            raise ValueError(f"label lists {twice[0]!r} twice; list each label once")
        if self.time_format is not None and self.time is None:
            raise ValueError("time_format needs time, the column that has this format")
        if isinstance(self.skip_bad_rows, bool) or not isinstance(self.skip_bad_rows, int) or self.skip_bad_rows < 0:
            raise ValueError(f"skip_bad_rows is {self.skip_bad_rows!r}; give a whole number, at least 0")
        self.roles  # noqa: B018  # a column that is listed twice is refused before files are looked at

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> ReadOptions:
        """The read options in `options`, which are removed from it."""
        given = {name: options.pop(name) for name in NAMES if name in options}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @staticmethod
    def _check_list(name: str, given: Any) -> None:
        what = "texts" if name == "null_values" else "the names of columns"
        if isinstance(given, str):
            raise ValueError(f"{name} is the text {given!r}; give a list of names: {name}=[{given!r}]")
        if not isinstance(given, Sequence) or not all(isinstance(item, str) for item in given):
            raise ValueError(f"{name} is {reprlib.repr(given)}; give a list of {what}")

    @property
    def roles(self) -> dict[str, Role]:
        """The role of each column that has one."""
        roles: dict[str, Role] = {}
        for role in get_args(Role):
            for column in getattr(self, role):
                if column in roles:
                    raise ValueError(f"column {column!r} is listed in {roles[column]} and in {role}; list it once")
                roles[column] = role
        return roles

    @property
    def hints(self) -> tuple[str, ...]:
        """Names of the options that were given and help to guess a schema."""
        return tuple(name for name in self.given if name not in ("skip_bad_rows", "objective"))

    @property
    def given(self) -> tuple[str, ...]:
        """Names of all options that were given."""
        return tuple(name for name in NAMES if getattr(self, name))


NAMES = tuple(option.name for option in fields(ReadOptions))


def with_read_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns `function` with the fields of `ReadOptions` as keyword arguments in place of its argument `read`.

    In its docstring the line "{read}" becomes a line for each of them.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Result:
        return function(*arguments, read=ReadOptions.taken_from(options), **options)

    told = {option.name: option.metadata["help"] for option in fields(ReadOptions)}
    lines = "\n    ".join(f"{name}: {text[:1].lower() + text[1:]}" for name, text in told.items())
    call.__doc__ = (function.__doc__ or "").replace("{read}", lines)
    call.__signature__ = spread(signature(function))  # type: ignore[attr-defined]  # help() and notebooks read it
    return call


def spread(function: Signature, annotations: Mapping[str, Any] | None = None) -> Signature:
    """Returns a signature with the fields of `ReadOptions` in place of `read`. annotations: of fields, if not their
    types; a list is then optional, as typer has it."""
    types = get_type_hints(ReadOptions)
    parameters: list[Parameter] = []
    for parameter in function.parameters.values():
        if parameter.name != "read":
            parameters.append(parameter)
            continue
        for option in fields(ReadOptions):
            kind = types[option.name] if annotations is None else annotations[option.name]
            default = None if annotations is not None and option.default == () else option.default
            parameters.append(Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return function.replace(parameters=parameters)
