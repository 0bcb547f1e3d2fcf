"""Many small cases as one test, which tries them all and names every one that fails.

    @looped(("size", "dim"), itertools.product(range(9), (1, 4)))     # written, and called, as pytest.mark.parametrize
    def test_sums(size: int, dim: int, tmp_path: Path) -> None: ...

A case of its own costs each worker of pytest more than most of these cases take. Cases that are marked slow are a
second test. Each case has an empty folder as `tmp_path`, and what it changes by `monkeypatch` is undone after it.
"""

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

MOST_SHOWN = 5
"""Cases whose tracebacks are printed; the others are named."""


def looped(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """cases: as those of pytest.mark.parametrize, with no mark but slow."""
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    quick, slow = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    for case in cases:
        marks = [mark.name for mark in case.marks] if isinstance(case, _PARAMETERS) else []
        assert set(marks) <= {"slow"}, f"{marks}: a mark of one case alone needs pytest.mark.parametrize"
        values = case.values if isinstance(case, _PARAMETERS) else tuple(case) if len(fields) > 1 else (case,)
        assert len(values) == len(fields), f"{values} for {fields}"
        (slow if marks else quick).append(values)
    assert quick, "no case"

    def over(function: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(function)
        assert set(fields) <= given.parameters.keys(), f"{fields}: {given}"

        @functools.wraps(function)
        def tried(**fixtures: Any) -> None:
            _try_all(function, fields, slow if slow and fixtures.pop("share") == REST else quick, fixtures)

        others = [parameter for name, parameter in given.parameters.items() if name not in fields]
        if slow:
            others.append(inspect.Parameter("share", inspect.Parameter.KEYWORD_ONLY))
        tried.__signature__ = given.replace(parameters=others)  # type: ignore[attr-defined]
        shares = pytest.mark.parametrize("share", ["sample", pytest.param(REST, marks=pytest.mark.slow)])
        return shares(tried) if slow else tried

    return over


REST = "rest"
_PARAMETERS: Any = type(pytest.param())


def _try_all(
    function: Callable[..., None], fields: Sequence[str], cases: Sequence[tuple[Any, ...]], fixtures: dict[str, Any]
) -> None:
    failed, skipped = list[str](), list[str]()
    for number, values in enumerate(cases):
        named = dict(zip(fields, values, strict=True))
        what = ", ".join(f"{name}={_shown(value)}" for name, value in named.items())
        try:
            with _own(fixtures, number) as own:
                function(**named, **own)
        except pytest.skip.Exception as reason:
            skipped.append(str(reason))
        except (Exception, pytest.fail.Exception):
            failed.append(what if len(failed) >= MOST_SHOWN else f"{what}\n{traceback.format_exc()}")
    assert not failed, f"{len(failed)} of {len(cases)} cases failed:\n" + "\n".join(failed)
    if len(skipped) == len(cases):
        pytest.skip(skipped[0])


@contextmanager
def _own(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Fixtures of one case."""
    own = dict(fixtures)
    with ExitStack() as stack:
        if "tmp_path" in own:
            own["tmp_path"] = own["tmp_path"] / str(number)
            own["tmp_path"].mkdir()
        if "monkeypatch" in own:
            own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        yield own


def _shown(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 80 else f"{text[:77]}..."
