"""Transforms: named functions of columns. Preparation, prediction and exports compute them by this code.

    standardize = Transform("standardize", {"mean": 1.5, "std": 0.25})
    standardize(np.array([2.0, np.nan]))                # [2.0, nan]: float64 [n] in and out, NaN = missing

A transform is one file in this folder, and a new one needs no other change. The file has a function of its own name.
Columns are the function's positional arguments; options are its keyword-only ones, and it raises ValueError for options
that it does not allow. If options are found in training rows, the file also has a function `fit`. Exports copy these
files, so they import NumPy and the standard library alone.

The annotations say what a column is, of arguments and of what is returned; without one it is a number:

    NDArray[np.float64]                             numbers [n]
    NDArray[np.uint64]                              ids [n]: their 64-bit hashes in, ids out
    tuple[NDArray[np.uint64], NDArray[np.int64]]    lists of ids: all hashes, and where each row's begin [n + 1]
    NDArray[np.bool_]                               returned alone: which ids of the lists stay, in the same order
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from hotrow.base.records import describe, nearest

Kind = Literal["number", "id", "list"]
"""What a column holds in each row: a number, an id, or several ids."""
_KINDS: tuple[tuple[Any, Kind], ...] = (
    (NDArray[np.float64], "number"),
    (NDArray[np.uint64], "id"),
    (tuple[NDArray[np.uint64], NDArray[np.int64]], "list"),
    (NDArray[np.bool_], "list"),
)
_NOTHING: dict[Kind, Any] = {
    "number": np.empty(0),
    "id": np.empty(0, np.uint64),
    "list": (np.empty(0, np.uint64), np.zeros(1, np.int64)),
}


class Moments(Protocol):
    """Exact moments of a column in the training rows, as `fit` gets them."""

    num_values: int

    def mean(self) -> Any:
        """Returns the mean of the values; there must be at least one."""

    def variance(self) -> Any:
        """Returns the variance of the values; there must be at least one."""


def names() -> tuple[str, ...]:
    """Returns the names of all transforms. The folder is listed once, so a process may lose the right to list it."""
    return _names_in(tuple(__path__))


@cache
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders)))


@dataclass(frozen=True)
class Transform:
    """A transform and its options, by which it is called; `str` writes the form that dataset.json keeps.

    Raises ValueError if the name is unknown, or naming an option that is unknown, missing or not allowed.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in names():
            known = ", ".join(names())
            raise ValueError(f"there is no transform {self.name!r}{nearest(self.name, names())}; known: {known}")
        try:
            # JSON mode: strict about scalars, while a tuple may stand for a list.
            options = _options_of(self.name).model_validate_json(json.dumps(dict(self.options)))
        except ValidationError as error:
            known = ", ".join(_options_of(self.name).model_fields) or "none"
            raise ValueError(f"{self.name}.{describe(error)} (options: {known})") from None
        object.__setattr__(self, "options", options.model_dump(mode="json"))
        try:
            self(*(_NOTHING[kind] for kind in self.takes(self.num_columns)))
        except ValueError as error:
            raise ValueError(f"{self.name}.{error}") from None

    def __call__(self, *columns: Any) -> NDArray[Any]:
        """Returns the computed column, of columns of the kinds that it `takes`; a missing number is NaN."""
        function: Callable[..., NDArray[Any]] = _function(self.name)
        return function(*columns, **self.options)

    @property
    def num_columns(self) -> int:
        """Number of columns that the transform takes; if it `takes_more`, the least number."""
        return len(_parameters(self.name, Parameter.POSITIONAL_OR_KEYWORD)) or 2

    @property
    def takes_more(self) -> bool:
        """Whether the transform takes any number of columns."""
        return bool(_parameters(self.name, Parameter.VAR_POSITIONAL))

    def takes(self, num_columns: int) -> tuple[Kind, ...]:
        """Returns the kind of each of `num_columns` columns that the transform takes."""
        found = _parameters(self.name, Parameter.POSITIONAL_OR_KEYWORD)
        found = found or _parameters(self.name, Parameter.VAR_POSITIONAL) * num_columns
        return tuple(_kind(p.annotation) for p in found)

    @property
    def makes(self) -> Kind:
        """The kind of the column that the transform computes."""
        return _kind(signature(_function(self.name), eval_str=True).return_annotation)

    def __str__(self) -> str:
        """As `log1p_clip0` or `standardize(mean=1.5, std=0.25)`."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    @staticmethod
    def parse(text: str) -> Transform:
        """Reads what `str` wrote. Raises ValueError for any other text."""
        try:
            node = ast.parse(text, mode="eval").body
            call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
            options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
            if not isinstance(call.func, ast.Name) or call.args:
                raise ValueError(f"{text!r} is not the form of a transform")
            return Transform(call.func.id, options)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            reason = f"dense transform {text!r} is not known ({error})"
            raise ValueError(f"{reason}; prepare the data set again with this version") from None


def is_fitted(name: str) -> bool:
    """Returns whether the options of a transform are found in training rows."""
    return hasattr(_module(name), "fit")


def fitted(name: str, moments: Moments) -> Transform:
    """Returns the transform with the options that the moments of training rows give."""
    return Transform(name, _module(name).fit(moments))


def source_of(name: str) -> str:
    """Returns the text of a transform's file, which exports copy."""
    return Path(str(_module(name).__file__)).read_text("utf-8")


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def _function(name: str) -> Any:
    return getattr(_module(name), name)


def _kind(annotation: Any) -> Kind:
    return next((kind for known, kind in _KINDS if known == annotation), "number")


@cache
def _parameters(name: str, kind: Any) -> tuple[Parameter, ...]:
    return tuple(p for p in signature(_function(name), eval_str=True).parameters.values() if p.kind == kind)


@cache
def _options_of(name: str) -> type[BaseModel]:
    """Returns the options of a transform as fields, by their annotations and defaults."""
    options = {
        option.name: (option.annotation, ... if option.default is Parameter.empty else option.default)
        for option in _parameters(name, Parameter.KEYWORD_ONLY)
    }
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    made: type[BaseModel] = create_model(name, __config__=strict, **options)  # type: ignore[call-overload]
    return made
