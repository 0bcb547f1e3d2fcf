"""Files with cells that are written otherwise, by slips or throughout: read, or refused with a cure that works.

Sixty mutations run always; `-m slow` runs 2,000. Every tenth is prepared in full, the others are guessed and read.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow.data.cells import MISSING
from hotrow.data.chunk import most_odd
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.options import NAMES
from hotrow.data.sources.readings import ODD_SHARE
from hotrow.data.sources.registry import open_source
from raw_rows import read

N = 600
ODD = [
    "n.a.", "-", "?", "unknown", "#REF!", "1e999", "inf", "-Infinity", "0x10", "1_000", "١٢", "12abc", "=1+2", "😀",
    "1,5", "$7", "7 %", "1.234,5", "1 234", "1,234.50", "€ 9", "(5)", "--5", "5-", "1.2.3", "12:30", "2024-13-45",
    "007", "-0", "99999999999999999999", "12.0", " 12", "12 ", "\t12", "5.", ".5", "+5", "1E3", "1700000000.25",
    "TRUE", "yes", "2", "-1", "0.5", "x" * 300, "a|b", "|", "null;", "[1]", "{}", "'", "\\", "\u00a05", "\u200b5",
]  # fmt: skip
"""Cells that no column or not every column has."""
THROUGHOUT = {
    "dollars": lambda text: f"${float(text):,.2f}",
    "euros": lambda text: f"{float(text):,.2f} €".translate(str.maketrans(",.", ".,")),
    "francs": lambda text: f"CHF {float(text):,.2f}".replace(",", "'"),
    "percent": lambda text: f"{text} %",
    "decimal comma": lambda text: text.replace(".", ","),
    "narrow blanks": lambda text: f"{float(text):,.2f}".replace(",", "\u202f").replace(".", ","),
    "floats": lambda text: f"{float(text):.1f}",
    "padded": lambda text: f" {text} ",
    "signs": lambda text: f"+{text}",
    "words": lambda text: "yes" if float(text) else "no",
    "letters": lambda text: "T" if float(text) else "F",
    "bools": lambda text: "True" if float(text) else "False",
    "minus one": lambda text: "1" if float(text) else "-1",
    "one and two": lambda text: "2" if float(text) else "1",
    "huge": lambda text: f"18446744073709{float(text):06.0f}",
}
"""Ways to write a whole column of numbers."""
OF_LABELS = ("floats", "padded", "words", "letters", "bools", "minus one", "one and two")


def good_columns() -> dict[str, list[str]]:
    draw = np.random.default_rng(7)
    return {
        "click": [str(v) for v in draw.integers(0, 2, N)],
        "ts": [str(1_700_000_000 + 11 * i) for i in range(N)],
        "price": [f"{v:.2f}" for v in draw.lognormal(6, 1.5, N)],
        "user": [str(v) for v in draw.integers(1, 60, N)],
        "item": [f"i{v}" for v in draw.integers(0, 40, N)],
    }


@dataclass(frozen=True)
class Mutation:
    """One file with cells that are written otherwise."""

    seed: int
    column: str
    columns: dict[str, list[str]] = field(repr=False)
    changed: tuple[int, ...] = field(repr=False)
    """Rows with another cell."""
    how: str
    suffix: str


def mutation(seed: int) -> Mutation:
    draw = np.random.default_rng([43, seed])
    columns = good_columns()
    column = str(draw.choice(list(columns)))
    suffix = str(draw.choice([".csv", ".jsonl", ".parquet"]))
    if column != "item" and draw.random() < 0.3:
        ways = (
            OF_LABELS
            if column == "click"
            else [way for way in THROUGHOUT if way not in OF_LABELS or way in ("floats", "padded")]
        )
        how = str(draw.choice(ways))
        columns[column] = [THROUGHOUT[how](text) for text in columns[column]]
        return Mutation(seed, column, columns, (), how, suffix)
    cell = str(draw.choice([*MISSING, "  ", *ODD]))
    count = int(draw.choice([1, 2, 5, 40]))
    rows = draw.choice(N, count, replace=False).tolist()
    for row in rows:
        columns[column][row] = cell
    return Mutation(seed, column, columns, tuple(sorted(rows)), f"{count} x {cell[:20]!r}", suffix)


def write(found: Mutation, folder: Path) -> Path:
    path = folder / f"x{found.suffix}"
    rows = zip(*found.columns.values(), strict=True)
    if found.suffix == ".parquet":
        pq.write_table(pa.table(found.columns), path)
    elif found.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(found.columns, row, strict=True))) for row in rows]
        path.write_text("\n".join(lines) + "\n")
    else:
        lines = [",".join('"' + text.replace('"', '""') + '"' for text in row) for row in rows]
        path.write_text("\n".join([",".join(found.columns), *lines]) + "\n", newline="")
    return path


def use(path: Path, told: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Reads a file by the guess with these options, or prepares it; returns what became of its columns."""
    opened = open_source("auto", path, **told)
    rows = read(opened.source)
    if out is not None:
        made = run_prepare("auto", path, out, overwrite=True, **told)
        assert sum(split.num_rows for split in made.info.splits.values()) == len(rows["label"])
    return {"schema": opened.schema, "rows": rows}


def proposed(error: ValueError, num_bad: int) -> list[dict[str, Any]]:
    """The options that an error names with a value, each as it would be pasted."""
    options = []
    text = str(error).replace("--skip-bad-rows N", f"--skip-bad-rows {num_bad}")
    for flags in re.findall(
        r"--[a-z][a-z-]* (?:'[^']*'|[^\s,;:()]+)(?: --[a-z][a-z-]* (?:'[^']*'|[^\s,;:()]+))*", text
    ):
        words = shlex.split(flags)
        told: dict[str, Any] = {}
        for flag, value in zip(words[::2], words[1::2], strict=True):
            name = flag[2:].replace("-", "_")
            if name == "skip_bad_rows":
                told[name] = int(value)
            elif name in NAMES:
                told[name] = value if name in ("label", "objective", "time", "time_format") else [value]
        if told and "..." not in told.values():
            options.append(told)
    return options


def check(found: Mutation, folder: Path) -> str:
    """Reads one mutated file; returns "read", or "cured" if an option that an error proposed was needed."""
    path = write(found, folder)
    out = folder / "out" if found.seed % 10 == 0 else None
    told: dict[str, Any] = {}
    result, pasted = None, 0
    while result is None:
        try:
            result = use(path, told, out)
        except ValueError as error:
            options = proposed(error, len(found.changed) or N)
            assert options, f"no cure to paste: {error}"
            fresh = [each for each in options if not each.items() <= told.items()]
            assert fresh and pasted < 3, f"what was proposed does not work: {told}: {error}"
            told, pasted = told | fresh[-1], pasted + 1
    if not told:
        kept_as_they_were(found, result)
    return "cured" if told else "read"


def kept_as_they_were(found: Mutation, result: dict[str, Any]) -> None:
    """A column with as few odd cells as may be has the kind it had, and every other cell its value."""
    schema, rows = result["schema"], result["rows"]
    if len(found.changed) > most_odd(N, ODD_SHARE):
        return
    assert (schema.time is not None and schema.time.column == "ts") or found.how in ("huge", *THROUGHOUT)
    assert "price" in schema.dense_names or found.how == "huge"
    truth = good_columns()
    left_out = N - len(rows["label"])
    assert left_out <= (len(found.changed) if found.column in ("ts", "click") else 0)
    if left_out == 0 and "price" in schema.dense_names and found.column == "price" and found.how != "huge":
        at = schema.dense_names.index("price")
        want = np.array([float(text) for text in truth["price"]], np.float32)
        got = np.array(rows["dense"], np.float32)[:, at]
        same = (got == want) | (np.abs(got - want) < 0.06 * (found.how == "floats"))
        assert set(np.flatnonzero(~same).tolist()) <= set(found.changed)
    if found.column == "click" and found.how in OF_LABELS:
        assert rows["label"] == [float(text) for text in truth["click"]]


def test_ten_mutated_files_are_read_or_cured(tmp_path: Path) -> None:
    run(range(10), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_two_thousand_mutated_files_are_read_or_cured(block: int, tmp_path: Path) -> None:
    run(range(100 * block, 100 * block + 100), tmp_path)


def run(seeds: range, folder: Path) -> None:
    faults = []
    for seed in seeds:
        found = mutation(seed)
        try:
            check(found, folder)
        except Exception as error:
            faults.append(f"{found}: {type(error).__name__}: {error}")
    assert not faults, f"{len(faults)} of {len(seeds)}:\n" + "\n".join(faults)


def test_a_reader_is_needed_for_none_of_it() -> None:
    """The good file itself is read as it is meant."""
    schema = open_source("frame", pa.table(good_columns())).schema
    assert (schema.label.column, schema.dense_names) == ("click", ("price",))
    assert len(read(ColumnsSource(pa.table(good_columns()), schema))["label"]) == N
