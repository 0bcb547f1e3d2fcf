"""Mutated inputs through every verb, to see what a user sees: an error of ours with its place and cure, never worse.

A case writes a few small files (raw rows of every layout, schemas, configs), of which one is changed in structure or in
bytes, or runs a verb with a strange option. `judge` says what is wrong with the outcome. Two promises are checked:

- the run ends with code 0, or with code 2 and a message that names the file, field, option or value; no traceback,
  no word of pydantic, no hang;
- content that changed is not accepted silently: rows that were made bad are an error or are counted (`Wanted`), and
  files that only look different (line ends, quotes, compression) give the same rows and the same row numbers.
"""

import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import hotrow
from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.cli import app as cli

LIMIT_S = 60
MEMORY_BYTES = 8 << 30
"""A case that wants more fails as it would on a small machine, instead of taking this one."""
FORBIDDEN = (
    *("Traceback", "Exception ignored", "a bug in hotrow", "validation error", "pydantic", "input_value"),
    *("type=", "input_type", "Error: "),
)
"""What no user may read. `Error: ` is a Python exception's name in the text of another."""
NUM_ROWS = 60
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def words(text: str) -> list[str]:
    return text.split()


@dataclass(frozen=True)
class Wanted:
    """What must come of a case, if that is known."""

    outcome: str = "any"
    """any; error; same: as the unchanged file; skipped: `num_bad` rows are counted as skipped or the first is an error.
    """
    num_bad: int = 0


@dataclass(frozen=True)
class Case:
    """A command, or a call of fit, and what to expect."""

    verb: str
    what: str
    """The mutation, for people."""
    arguments: list[Any]
    """Words of the command line; for fit, (data, options)."""
    names: tuple[str, ...] = ()
    """Texts of which an error must show one; empty: any error will do."""
    wanted: Wanted = Wanted()


@dataclass
class Outcome:
    """What a user saw."""

    code: int | None
    out: str
    err: str
    faults: list[str] = field(default_factory=list)


def rows(seed: int = 0, num_rows: int = NUM_ROWS) -> list[list[str]]:
    """Records of clicks: header first; label, time, two numbers, an id of text, one of integers, and tags."""
    rng = random.Random(seed)
    made = [["click", "ts", "price", "age", "item", "user", "tags"]]
    for i in range(num_rows):
        tags = "|".join(f"t{rng.randrange(6)}" for _ in range(rng.randrange(3)))
        price = "" if rng.random() < 0.05 else f"{rng.lognormvariate(0, 1):.3f}"
        made.append(
            [
                *(str(int(i % 3 == 0) or rng.randrange(2)), str(1_700_000_000 + i), price, str(rng.randrange(18, 80))),
                *(f"i{rng.randrange(12)}", str(1000 + rng.randrange(9)), tags),
            ]
        )
    return made


def csv_bytes(records: list[list[str]], delimiter: str = ",") -> bytes:
    return "".join(delimiter.join(record) + "\n" for record in records).encode()


def table(records: list[list[str]]) -> pa.Table:
    """The same rows as typed columns."""
    click, ts, price, age, item, user, tags = zip(*records[1:], strict=True)
    columns = {"click": list(map(int, click)), "ts": list(map(int, ts)), "age": list(map(int, age)), "item": item}
    columns |= {"price": [float(p) if p else None for p in price], "user": list(map(int, user))}
    return pa.table({**columns, "tags": [[t for t in text.split("|") if t] for text in tags]})


def parquet_bytes(value: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(value, sink, row_group_size=25)
    return sink.getvalue()


def avazu_bytes(num_rows: int = NUM_ROWS) -> bytes:
    rng = random.Random(3)
    names = ["id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id"]
    names += ["app_domain", "app_category", "device_id", "device_ip", "device_model", "device_type"]
    names += ["device_conn_type", *(f"C{i}" for i in range(14, 22))]
    made = [names]
    for i in range(num_rows):
        made.append([str(10**18 + i), str(rng.randrange(2)), f"141021{i % 24:02}", "1005", "0"])
        made[-1] += [f"{rng.randrange(16**8):08x}" if 5 <= c <= 13 else str(rng.randrange(9)) for c in range(5, 24)]
    return csv_bytes(made)


def criteo_bytes(folder: Path) -> bytes:
    path = folder / "criteo.tmp"
    write_criteo(path, criteo_kaggle(NUM_ROWS, scale=0.001))
    text = path.read_bytes()
    path.unlink()
    return text


def taobao_bytes() -> bytes:
    rng = random.Random(5)
    made = [
        [
            *(str(u), str(rng.randrange(20)), str(rng.randrange(5)), rng.choice(["pv", "pv", "cart", "buy"])),
            str(1_511_500_000 + 100 * u + i),
        ]
        for u in range(6)
        for i in range(10)
    ]
    return csv_bytes(made)


SCHEMA = {
    "label": "click",
    "time": "ts",
    "dense": [{"column": "price", "transform": "log1p_clip0"}, "age"],
    "categorical": ["item", {"column": "user", "type": "int"}, {"column": "tags", "kind": "multi_hot"}],
    "tables": {"item": {"min_count": 1}},
    "split": {"kind": "time", "fractions": [0.6, 0.2, 0.2]},
}
"""The schema of the Parquet file; delimited text needs a separator too."""
SMALL = {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]}
CONFIG = {
    "data": "packed",
    "model": SMALL,
    "optimizer": {"dense": {"name": "sgd", "lr": 0.1}, "sparse": {"name": "adagrad", "lr": 0.05}},
    "train": {"batch_size": 16, "max_steps": 3, "threads": 1},
}


def text_schema(**changes: Any) -> dict[str, Any]:
    tags = {"column": "tags", "kind": "multi_hot", "separator": "|"}
    return {**SCHEMA, "categorical": [*SCHEMA["categorical"][:2], tags], **changes}


class World:
    """A folder with the plain files, a packed dataset and a run, that cases read and never change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.chdir(folder)
        records = rows()
        self.raw: dict[str, bytes] = {
            "clicks.csv": csv_bytes(records),
            "long.csv": csv_bytes(rows(1, 2200)),
            "headless.csv": csv_bytes(records[1:]),
            "clicks.tsv": csv_bytes(records, "\t"),
            "clicks.jsonl": b"".join(
                json.dumps(dict(zip(records[0], r, strict=True))).encode() + b"\n" for r in records[1:]
            ),
            "clicks.parquet": parquet_bytes(table(records)),
            "criteo.txt": criteo_bytes(folder),
            "avazu.csv": avazu_bytes(),
            "taobao.csv": taobao_bytes(),
        }
        for name, content in self.raw.items():
            (folder / name).write_bytes(content)
        dump("text.yaml", text_schema())
        dump("headless.yaml", text_schema(csv={"column_names": records[0]}))
        dump("parquet.yaml", SCHEMA)
        dump("config.yaml", CONFIG)
        for arguments in (
            ["prepare", "csv", "clicks.csv", "--schema", "text.yaml", "--out", "packed"],
            ["train", "config.yaml", "--set", "run=run"],
            ["init", "clicks.csv", "--out", "made"],
        ):
            outcome = run_command(arguments)
            assert outcome.code == 0, outcome.err
        self._prepared: dict[str, Any] = {}

    def prepared(self, name: str) -> Any:
        """What an unchanged file gives: rows and row numbers."""
        if name not in self._prepared:
            self._prepared[name] = content_of(run_command(prepare_case(name, "unchanged", name, Wanted()).arguments))
        return self._prepared[name]


def content_of(outcome: Outcome) -> Any:
    """What `prepare --json` made: rows, tables and the bytes of the splits' files."""
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    folder = Path(result["out"])
    files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    parts = {name: content for name, content in files.items() if not name.endswith(".json")}
    return result["rows"], result["num_embeddings"], parts


def dump(path: str, value: Any) -> None:
    Path(path).write_text(yaml.safe_dump(value, sort_keys=False))


@contextlib.contextmanager
def captured() -> Iterator[list[bytes]]:
    """What is written on the descriptors 1 and 2 inside, by Python or by native code: [out, err] afterwards."""
    seen: list[bytes] = []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = os.dup(1), os.dup(2)
        streams = sys.stdout, sys.stderr
        streams[0].flush()
        streams[1].flush()
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w", errors="backslashreplace")
        try:
            yield seen
        finally:
            sys.stdout.close()
            sys.stderr.close()
            sys.stdout, sys.stderr = streams
            for number, old in enumerate(kept, 1):
                os.dup2(old, number)
                os.close(old)
            for file in (out, err):
                file.seek(0)
                seen.append(file.read())


class Hang(BaseException):
    """A case took longer than LIMIT_S."""


def _hang(*_: object) -> None:
    raise Hang


def seen_by_user(act: Callable[[], None]) -> Outcome:
    """What `act` wrote, and the code of its SystemExit; ends it after LIMIT_S."""
    faults, code = [], None
    before = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(LIMIT_S)
    show, hook, memory = warnings.showwarning, sys.argv, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, memory[1]))
    with captured() as written:
        try:
            act()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except Hang:
            faults.append(f"took more than {LIMIT_S} s")
        except BaseException:
            faults.append("raised past main")
            traceback.print_exc()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            warnings.showwarning, sys.argv = show, hook
            resource.setrlimit(resource.RLIMIT_DATA, memory)
    out, err = (text.decode(errors="backslashreplace") for text in written)
    return Outcome(code, out, err, faults)


def run_command(arguments: list[str]) -> Outcome:
    """`hotrow ARGUMENTS` in this process."""

    def act() -> None:
        sys.argv = ["hotrow", *arguments]
        cli.main()

    return seen_by_user(act)


def run_fit(data: Any, options: dict[str, Any]) -> Outcome:
    """`hotrow.fit` as a script would call it; ValueError and OSError end as they would on the command line."""

    def act() -> None:
        try:
            run = hotrow.fit(data, **options)
        except (ValueError, OSError) as error:
            print(f"hotrow: {error}", file=sys.stderr)
            sys.exit(2)
        print(json.dumps(run.summary(), allow_nan=False))
        sys.exit(0)

    return seen_by_user(act)


def run_case(case: Case) -> Outcome:
    """Runs a case in a new folder beside the plain files, and judges what came of it."""
    outcome = run_fit(*case.arguments) if case.verb == "hotrow.fit" else run_command(case.arguments)
    outcome.faults += faults_of(case, outcome)
    return outcome


def faults_of(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong with an outcome, in words."""
    text = outcome.out + outcome.err
    faults = [f"says {word!r}" for word in FORBIDDEN if word in outcome.err]
    if outcome.code not in (0, 2):
        faults.append(f"ends with code {outcome.code}")
    if outcome.code == 2:
        if re.search(r"^hotrow: (?!warning).{20,}|^Usage: ", outcome.err, re.DOTALL | re.MULTILINE) is None:
            faults.append("an error without a message of ours")
        if case.names and not any(name in text for name in case.names):
            faults.append(f"names none of {case.names}")
        if len(outcome.err) > 12_000:
            faults.append(f"writes {len(outcome.err)} characters")
    return faults


def prepare_case(path: str, what: str, plain: str, wanted: Wanted, *, skip: int = 0) -> Case:
    """`hotrow prepare` of the file at `path`, which was made of the plain file of that name."""
    source = {"criteo.txt": "criteo", "avazu.csv": "avazu", "taobao.csv": "taobao"}.get(plain, "csv")
    schema = {"headless.csv": "headless.yaml", "clicks.parquet": "parquet.yaml"}.get(plain, "text.yaml")
    arguments = ["prepare", source, path, "--out", "case/out", "--overwrite", "--json"]
    arguments += ["--schema", schema] if source == "csv" else ["--split", "random"] if source == "criteo" else []
    arguments += ["--skip-bad-rows", str(skip)] if skip else []
    return Case("prepare", f"{plain}: {what}", arguments, (path,), wanted)


BAD_VALUES: dict[str, tuple[str, ...]] = {
    "click": ("2", "", "yes", "0.5", "-1", "nan", "10", "1e0x"),
    "ts": ("x", "", "2021-13-45", "1.7e9.1", "--1", "\N{FULLWIDTH DIGIT ONE}"),
    "price": ("\N{FULLWIDTH DIGIT ONE}", "1 2", *words("abc NaN inf -Infinity 1e400 1e39 0x10 1_000 -")),
    "age": ("twenty", "1.2.3", "\N{MINUS SIGN}5", "5%", "$5", "1e", "\x00"),
    "user": ("12x", "9" * 30, "0x1F", "1.5", "1e30", "-"),
}
"""Values of the columns that no row may have."""
ODD_IDS = ("", "a\x00b", "\N{GRINNING FACE}", "x" * 100_000, " ", "\u202e", "\ufeff", *words("é nan 1e5 ' NULL"))


def bad_field(records: list[list[str]], rng: random.Random, header: int) -> tuple[str, Wanted]:
    """One value of one row that its column cannot have."""
    column = rng.choice(list(BAD_VALUES))
    value = rng.choice(BAD_VALUES[column])
    first = header + (column == "ts")  # the first time decides how all are read
    row = rng.randrange(first, len(records))
    records[row][rows(0, 0)[0].index(column)] = value
    return f"{column} of record {row + 1} is {value!r}", Wanted("skipped", 1)


def odd_id(records: list[list[str]], rng: random.Random, header: int) -> tuple[str, Wanted]:
    """An id that is strange and may be one."""
    row, value = rng.randrange(header, len(records)), rng.choice(ODD_IDS)
    records[row][4] = value
    return f"item of record {row + 1} is {value[:20]!r}", Wanted("rows")


def ragged(records: list[list[str]], rng: random.Random, header: int) -> tuple[str, Wanted]:
    """Rows of fewer or more fields."""
    chosen = rng.sample(range(header, len(records)), rng.choice([1, 1, 2, 5]))
    for row in chosen:
        records[row] = records[row][: rng.randrange(1, 7)] if rng.random() < 0.5 else [*records[row], "x"]
    return f"records {sorted(chosen)} are ragged", Wanted("skipped", len(chosen))


def headers(records: list[list[str]], rng: random.Random, header: int) -> tuple[str, Wanted]:
    """Another first line."""
    kind, column = rng.choice(["renamed", "missing", "again", "twice", "empty", "only", "blank"]), rng.randrange(7)
    if kind == "again":
        records.insert(rng.randrange(1, len(records)), list(records[0]))
        return "the header stands twice", Wanted("skipped", 1) if header else Wanted()
    if kind == "missing":
        records[:] = [record[:column] + record[column + 1 :] for record in records]
    elif kind == "only":
        del records[1:]
    else:
        names = records[0]
        other = {"renamed": f"{names[column]}_", "twice": names[(column + 1) % 7], "empty": ""}
        names[column] = other.get(kind, f" {names[column]}")
    return f"header: {kind}", Wanted("error" if header else "any")


RECORDS = (bad_field, bad_field, odd_id, ragged, ragged, headers)


def replaced(text: bytes, at: int, new: bytes, length: int = 0) -> bytes:
    return text[:at] + new + text[at + length :]


def random_line(text: bytes, rng: random.Random, first: int = 1) -> tuple[int, int]:
    """Begin and end of a line from number `first` on."""
    lines = text.splitlines(keepends=True)
    number = rng.randrange(min(first, len(lines) - 1), len(lines))
    begin = sum(map(len, lines[:number]))
    return begin, begin + len(lines[number])


def wrong_bytes(text: bytes, rng: random.Random) -> tuple[bytes, str, Wanted]:
    """A line that is no UTF-8, also with too few fields."""
    begin, end = random_line(text, rng)
    if rng.random() < 0.5:
        line = b"1,\xff\xfe\n"
        return replaced(text, begin, line, end - begin), f"a ragged line of wrong bytes at {begin}", Wanted("error")
    bad, at = rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xe9t\xe9"]), begin + rng.choice([0, 1])
    return replaced(text, at, bad), f"{bad!r} at byte {at}", Wanted("error")


def unclosed(text: bytes, rng: random.Random) -> tuple[bytes, str, Wanted]:
    begin, end = random_line(text, rng)
    at = begin + text[begin:end].replace(b"\t", b",").rfind(b",") + 1
    return replaced(text, at, b'"'), f"a quote opens at byte {at}", Wanted("error")


def same_text(text: bytes, rng: random.Random) -> tuple[bytes, str, Wanted]:
    """Another form of the same rows."""
    kind = rng.choice(["crlf", "bom", "blank", "no end", "cr", "quoted"])
    changed = {
        "crlf": text.replace(b"\n", b"\r\n"),
        "cr": text.replace(b"\n", b"\r"),
        "bom": b"\xef\xbb\xbf" + text,
        "blank": text.replace(b"\n", b"\n\n", 3) + b"\n\n",
        "no end": text.rstrip(b"\n"),
        "quoted": b"\n".join(re.sub(rb"[^,\t]+", rb'"\g<0>"', line) for line in text.split(b"\n")),
    }[kind]
    return changed, kind, Wanted("same")


def packed_text(text: bytes, rng: random.Random) -> tuple[bytes, str, Wanted]:
    """Compressed: whole, which is the same, or damaged, which is an error."""
    codec = rng.choice(["gzip", "zstd", "bz2", "lz4"])
    whole = packed(text, codec)
    at = rng.randrange(20, len(whole) - 1)
    flipped = replaced(whole, at, bytes([whole[at] ^ (1 << rng.randrange(8))]), 1)
    damage, changed, wanted = rng.choice(
        [
            ("whole", whole, "same"),
            ("cut", whole[:at], "error"),
            ("a flipped bit", flipped, "error" if codec in ("gzip", "bz2") else "any"),
            ("twice", packed(whole, codec), "error"),
            ("a tail", whole + b"garbage after the end", "error"),
        ]
    )
    return changed, f"{codec}, {damage}, {at} of {len(whole)}", Wanted(wanted)


def packed(text: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(text)
    return bytes(sink.getvalue())


WHOLE = {
    "empty": b"",
    "newlines": b"\r\n" * 50,
    "zip": b"PK\x03\x04" + bytes(range(256)),
    "NULs": b"\x00" * 500,
    "commas": b"," * 300 + b"\n",
    "a png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "html": b"<!DOCTYPE html><html><body>404, not found</body></html>\n",
    "a gzip header": b"\x1f\x8b",
    "a quote": b'"',
    "json": b'[{"click": 1}, {"click": 0}]',
}


def whole_file(text: bytes, rng: random.Random) -> tuple[bytes, str, Wanted]:
    """Something else than rows."""
    kind, changed = rng.choice([*WHOLE.items(), ("utf-16", text.decode().encode("utf-16"))])
    return changed, f"the file is {kind}", Wanted("error")


def noise(text: bytes, rng: random.Random) -> tuple[bytes, str, Wanted]:
    """Random bytes set, inserted or removed."""
    what = []
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(text))
        new = rng.choice([b"", b"\x00", b'"', b",", b"\n", b"\r", b"\\", b"'", b";", b"9", bytes([rng.randrange(256)])])
        length = rng.choice([0, 1])
        text = replaced(text, at, new, length) or b"\n"
        what.append(f"{new!r} at {at} for {length}")
    return text, "; ".join(what[:3]), Wanted()


BYTES = (wrong_bytes, wrong_bytes, unclosed, same_text, packed_text, packed_text, whole_file, noise, noise)


OF_ROWS = {
    "guess": "prepare auto PATH --out case/out --label click",
    "auto": "prepare auto PATH --out case/out",
    "init": "init PATH --out case/made",
    "inspect": "inspect PATH",
    "predict": "predict run PATH --out case/s.csv",
    "eval": "eval run PATH",
    "fit": "fit PATH --schema text.yaml --set train.max_steps=2 --set train.threads=1"
    + "".join(f" --set model.{name}={value}".replace(", ", ",") for name, value in SMALL.items()),
}
"""Commands that read rows."""


def case_of_rows(how: str, path: str, what: str, names: tuple[str, ...], wanted: Wanted, **options: Any) -> Case:
    """A command of OF_ROWS, or `hotrow.fit` with these options."""
    if how == "hotrow.fit":
        return Case(how, what, [path, fit_options(**options)], (path, *names), wanted)
    line = [path if word == "PATH" else word for word in words(OF_ROWS[how])]
    return Case(line[0], what, [*line, "--json"], (path, *names), wanted)


def fit_options(**options: Any) -> dict[str, Any]:
    return {"run": "case/run", "quiet": True, "max_steps": 2, "threads": 1, **SMALL, **options}


def raw_case(rng: random.Random, world: World) -> Case:
    """A text file of rows, changed as records or as bytes, for a verb that reads rows."""
    plain = rng.choice(["clicks.csv", "clicks.csv", "headless.csv", "clicks.tsv", "long.csv"])
    header, delimiter = int(plain != "headless.csv"), "\t" if plain == "clicks.tsv" else ","
    text, column = world.raw[plain], ""
    if rng.random() < 0.5:
        records = [line.split(delimiter) for line in text.decode().splitlines()]
        what, wanted = rng.choice(RECORDS)(records, rng, header)
        column = what.split(" ")[0]
        text = csv_bytes(records, delimiter)
    else:
        text, what, wanted = rng.choice(BYTES)(text, rng)
    path = "case/" + rng.choice([plain, plain, "x y.csv", "a,b.csv", "q'\".csv", "ü.csv"])
    Path(path).write_bytes(text)
    how = rng.choice(["prepare", "prepare", "prepare", *OF_ROWS, "hotrow.fit"])
    if how == "prepare" or (not header and how not in ("guess", "auto", "init", "inspect")):
        skip = wanted.num_bad if rng.random() < 0.5 else 0
        return prepare_case(path, what, plain, wanted, skip=skip)
    bad, of_header = wanted.outcome in ("error", "skipped"), "header" in what
    is_cell = column in BAD_VALUES  # one that is no number or id is scored as missing, and counted
    is_error = {
        "guess": wanted.outcome == "error" and not of_header,
        "auto": False,
        "init": False,
        "inspect": True,
        "predict": bad and not of_header and not is_cell,
        "eval": bad and not of_header and (not is_cell or column == "click"),
    }.get(how, bad)
    names = ("click", "label") if how in ("guess", "auto") else ()
    expected = Wanted("error") if is_error else Wanted()
    return case_of_rows(how, path, f"{plain}: {what}", names, expected, schema=text_schema())


def layout_case(rng: random.Random, world: World) -> Case:
    """A published layout with a field or a line changed."""
    plain = rng.choice(["criteo.txt", "avazu.csv", "taobao.csv"])
    delimiter = "\t" if plain == "criteo.txt" else ","
    records = [line.split(delimiter) for line in world.raw[plain].decode().splitlines()]
    row, wanted, skip = rng.randrange(1, len(records)), Wanted("skipped", 1), rng.choice([0, 1])
    kind = rng.choice(["label", "short", "long", "field", "time", "bytes", "whole"])
    label, time = {"criteo.txt": (0, 1), "avazu.csv": (1, 2), "taobao.csv": (3, 4)}[plain]
    path = f"case/{plain}"
    if kind == "label":
        records[row][label] = rng.choice(["2", "", "x", "pv2", "-1", "0.5"])
    elif kind == "short":
        records[row] = records[row][: rng.randrange(1, len(records[row]))]
    elif kind == "long":
        records[row].append("1")
    elif kind == "time":
        records[row][time] = rng.choice(["x", "1.5.2", "--3", "nan", "9" * 25])
    elif kind == "field":
        column = rng.choice([7, 20]) if plain == "criteo.txt" else rng.choice([0, 2])
        records[row][column] = rng.choice(["x!", "zzzzzzzzz", "1.5.1"])
        wanted = Wanted()
    text = csv_bytes(records, delimiter)
    if kind == "bytes":
        text, what, wanted = rng.choice([wrong_bytes, wrong_bytes, noise, packed_text])(text, rng)
        kind, bad = what, "byte" in what or "ragged" in what  # category ids are hex digits: such bytes are a bad row
        wanted = Wanted("error") if "cut" in what else Wanted("skipped" if plain == "criteo.txt" else "error", 1)
        wanted = wanted if bad or "cut" in what else Wanted()
    elif kind == "whole":
        text, kind, wanted = whole_file(text, rng)
    Path(path).write_bytes(text)
    case = prepare_case(path, f"record {row + 1}: {kind}", plain, wanted, skip=skip)
    if rng.random() < 0.2:
        case.arguments[1] = "auto"
        return Case(case.verb, case.what + " (auto)", case.arguments, (), Wanted())
    return case


def json_case(rng: random.Random, world: World) -> Case:
    """JSON Lines with a line that is not an object of these members, or with other bytes."""
    plain = "clicks.jsonl"
    lines = world.raw[plain].splitlines()
    row = rng.randrange(len(lines))
    good = lines[row]
    bad = [
        *(good[: rng.randrange(1, len(good))], good + b"}", b"[1]", b"null", b"7", b'"x"', b"{", b"\xff" + good),
        *(good[:-1] + b', "click": 1}', good[:-1] + b', "more": NaN}', good[:-1] + b', "more": "\\ud800"}'),
        *(good[:-1] + b', "more": ' + b"[" * 50_000 + b"}", good[:-1] + b', "a.b": 1, "a": {"b": 2}}'),
    ]
    text, wanted, what = None, Wanted("skipped", 1), f"line {row + 1} changed"
    kind = rng.choice(["line", "line", "line", "array", "noise", "blank", "members", "whole"])
    if kind == "line":
        lines[row] = rng.choice(bad)
    elif kind == "array":
        text, wanted, what = b"[" + b",".join(lines) + b"]", Wanted("error"), "one array"
    elif kind == "noise":
        text, what, wanted = noise(world.raw[plain], rng)
    elif kind == "blank":
        lines[row:row], wanted, what = [b"", b" \t"], Wanted("same"), "blank lines"
    elif kind == "members":
        record = list(json.loads(good).items())
        rng.shuffle(record)
        lines[row] = b" " + json.dumps({**dict(record), "more": {"deep": [1, {"x": None}]}}).encode() + b"\r"
        wanted, what = Wanted("same"), "members in another order, and more"
    else:
        text, what, wanted = whole_file(world.raw[plain], rng)
    path = f"case/{plain}"
    Path(path).write_bytes(b"\n".join(lines) + b"\n" if text is None else text)
    return prepare_case(path, what, plain, wanted, skip=wanted.num_bad if rng.random() < 0.5 else 0)


def column_values(n: int) -> list[pa.Array]:
    """Columns of every Arrow type that a file or frame may bring."""
    ints, ones = pa.array([i % 5 for i in range(n)]), pa.array([1.0] * n)
    text, days = pa.array([f"v{i % 7}" for i in range(n)]), ints.cast(pa.int32())
    cast = (pa.float64(), pa.int8(), pa.timestamp("ns", "Europe/Berlin"), pa.duration("s"), pa.decimal128(25, 3))
    repeated = ([0.5], [math.nan], [True, False], [[1, None]], [[[1]]], [None, ["a"]], [{"a": 1}], [b"\xff\x00"])
    return [
        *(ints, text, text.dictionary_encode(), ones.cast(pa.float16()), pa.nulls(n), pa.nulls(n, pa.int64())),
        *(ints.cast(kind) for kind in cast),
        *(days.cast(pa.date32()), days.cast(pa.time32("s"))),
        *(pa.array(values * (n // len(values))) for values in repeated),
        pa.StringArray.from_buffers(n, pa.py_buffer(memoryview(_offsets(n))), pa.py_buffer(b"\xff" * n)),
        pa.array([math.inf] + [1.0] * (n - 1)),
        pa.array([[("k", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        pa.array([2**64 - 1 - i for i in range(n)], pa.uint64()),
        pa.array([b"1234"] * n, pa.binary(4)),
        pa.array([[1.5, 2.5]] * n, pa.list_(pa.float32(), 2)),
    ]


def _offsets(num_rows: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in range(num_rows + 1))


def frame_of(rng: random.Random) -> tuple[pa.Table, str]:
    """The plain table with one column changed in type, values or name."""
    value = table(rows())
    index = rng.randrange(value.num_columns)
    name = value.column_names[index]
    kind = rng.choice(["type", "type", "type", "drop", "twice", "empty", "rename", "none"])
    if kind == "type":
        column = rng.choice(column_values(len(value)))
        return value.set_column(index, name, column), f"{name} has type {column.type}"
    if kind == "drop":
        return value.drop_columns([name]), f"{name} is missing"
    if kind == "twice":
        return value.append_column(name, value.column(index)), f"{name} stands twice"
    if kind == "empty":
        return value.slice(0, rng.choice([0, 1, 2])), "few rows"
    if kind == "none":
        return value.select([]), "no column"
    return value.rename_columns([n + "\x00" if n == name else n for n in value.column_names]), f"{name} renamed"


def parquet_case(rng: random.Random, world: World) -> Case:
    """A Parquet file, changed in types or in bytes."""
    path, wanted, known = "case/clicks.parquet", Wanted(), ("label", "split", "rows")
    if rng.random() < 0.6:
        value, what = frame_of(rng)
        content = parquet_bytes(value)
    else:
        plain = world.raw["clicks.parquet"]
        at, byte = rng.randrange(1, len(plain)), bytes([rng.randrange(256)])
        kind, content, outcome = rng.choice(
            [
                *(("cut", plain[:at], "error"), ("empty", b"", "error"), ("text", world.raw["clicks.csv"], "error")),
                ("another byte", replaced(plain, at, byte, 1), "any"),
                ("another byte of the footer", replaced(plain, len(plain) - rng.randrange(1, 1500), byte, 1), "any"),
            ]
        )
        what, wanted = f"{kind} at {at} of {len(plain)}", Wanted(outcome)
    Path(path).write_bytes(content)
    how = rng.choice(["prepare", "prepare", "auto", "init", "predict", "hotrow.fit"])
    if how == "prepare":
        case = prepare_case(path, what, "clicks.parquet", wanted)
        case.arguments[1] = rng.choice(["parquet", "auto"])
        return replace(case, names=(path, *known))
    return case_of_rows(how, path, what, known, wanted, label="click")


NASTY: tuple[Any, ...] = (
    *(None, True, False, "", "x", "é", "\N{GRINNING FACE}", -1, 0, 1, 2, 3, 2**31, 2**63, 2**64, 10**30, -(10**18)),
    *(1.5, -0.5, 0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"), [], {}, [1], [[]], [None], {"a": 1}),
    *([-1], [0], ["a", "a"], [1.5], {1: 2}, {True: 1}, {None: 1}, "1e3", "8GiB", "0", "nan", "a" * 5000, "../x", " "),
    *("\x00", "a\nb", b"\xff", [2**70], *words("/dev/null 2024-01-01 null auto cpu time text 1GB/day *")),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value in nested maps and lists is; the empty place aside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*at, key)
        yield from places(part, (*at, key))


def changed_tree(value: Any, rng: random.Random, known: tuple[str, ...]) -> tuple[Any, str, str]:
    """A copy with one thing changed; what, and the name concerned."""
    value = copy.deepcopy(value)
    place = rng.choice(list(places(value)))
    parent = value
    for key in place[:-1]:
        parent = parent[key]
    name = next(str(key) for key in reversed(place) if isinstance(key, str))
    kind = rng.choice(["value", "value", "value", "value", "drop", "key", "unknown", "known", "known", "wrap"])
    if kind == "drop":
        del parent[place[-1]]
    elif kind == "wrap":
        parent[place[-1]] = rng.choice([[parent[place[-1]]], {"x": parent[place[-1]]}])
    elif kind == "key" and isinstance(parent, dict):
        parent[rng.choice([1, None, True, 1.5, "", " ", "x" * 300, "a.b", "\x00"])] = parent.pop(place[-1])
    elif kind == "unknown" and isinstance(parent, dict):
        parent[name + rng.choice(["s", "_", "\u00e9"])] = 1
    elif kind == "known":
        *parents, leaf = rng.choice(known).split(".")
        section = value
        for key in parents:
            inner = section.get(key)
            section[key] = inner if isinstance(inner, dict) else {}
            section = section[key]
        section[leaf] = rng.choice(NASTY)
        return value, f"{'.'.join([*parents, leaf])} = {section[leaf]!r:.40}", leaf
    else:
        parent[place[-1]] = rng.choice(NASTY)
        return value, f"{'.'.join(map(str, place))} = {parent[place[-1]]!r:.40}", name
    return value, f"{kind} at {'.'.join(map(str, place))}", name


def yaml_text(value: Any) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """Without anchors of its own."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def changed_yaml(text: str, rng: random.Random) -> tuple[bytes, str]:
    """The text of a YAML file, changed as text."""
    lines = text.splitlines()
    line = rng.randrange(len(lines))
    first = next(line for line in lines if ":" in line)
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    made: dict[str, str | bytes] = {
        "tab": text.replace("  ", "\t", 1) if "  " in text else "\t" + text,
        "bomb": bomb + text,
        "bomb inside": bomb.replace("a: &a", "x-a: &a") + text + "\nlicence: *i\n",
        "twice": text + "\n" + first + "\n",
        "two documents": text + "\n---\n" + text,
        "not utf-8": text.encode() + b"\nx: \xff\n",
        "utf-16": text.encode("utf-16"),
        "deep": "a: " + "[" * 3000,
        "deep map": "{a: " * 3000,
        "cut": text[: rng.randrange(1, len(text))],
        "crlf": text.replace("\n", "\r\n"),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "line gone": "\n".join(lines[:line] + lines[line + 1 :]),
        "line twice": "\n".join([*lines[: line + 1], *lines[line:]]),
        "indented": "\n".join([*lines[:line], " " + lines[line], *lines[line + 1 :]]),
        "a directive": "%YAML 9.9\n---\n" + text,
    }
    made |= {f"only {alone[:9]!r}": alone for alone in ("", "just text", "- a\n- b\n", "null\n", "# nothing\n")}
    made |= {f"and {more[:30]!r}": f"{text}\n{more}\n" for more in YAML_LINES}
    for i in range(6):
        at = rng.randrange(len(text))
        made[f"noise {i}"] = text[:at] + rng.choice("{}[]&*!|>'\"%@`:,#-?\\\t\x07") + text[at + rng.randrange(2) :]
    what = rng.choice(list(made))
    new = made[what]
    return new if isinstance(new, bytes) else new.encode(), what


YAML_LINES = (
    *("loop: &l [*l]", "tables: &l {x: *l}", "more: &m {x: 1}\ntrain:\n  <<: *m", "<<: x", "x: *nowhere"),
    *("x: !!python/object/apply:os.system ['true']", "x: !huh y", "x: !!binary aaaa", "x: !!binary '*'"),
    *("x: !!set {a, b}", "x: !!int abc", "x: !!omap [1]", "x: 2024-13-45", "x: 1:60:99", "x: " + "9" * 5000),
    *("x: \x00", 'x: "\\ud800"', "=: 1", "? [a, b]\n: 1", "? {a: b}\n: 1", "2024-01-01: 1"),
)
"""Lines that no schema or config may have."""


SCHEMA_FIELDS = (
    *("version", "licence", "time", "label", "dense", "categorical", "tables", "split", "csv"),
    *("label.column", "label.positive", "label.negative", "label.at_least", "time.column", "time.format"),
    *("tables.item", "tables.item.min_count", "tables.item.hash_cap", "tables.user.hash_cap", "tables.nobody"),
    *("split.kind", "split.fractions", "split.seed", "csv.delimiter", "csv.column_names", "csv.null_values"),
)


def schema_case(rng: random.Random, world: World) -> Case:
    """A changed schema for the plain rows."""
    plain = rng.choice(["clicks.csv", "clicks.csv", "clicks.parquet", "clicks.tsv"])
    value = SCHEMA if plain == "clicks.parquet" else text_schema()
    if rng.random() < 0.65:
        value, what, name = changed_tree(value, rng, SCHEMA_FIELDS)
        names: tuple[str, ...] = (name, "case/schema.yaml", plain)
        content = yaml_text(value).encode()
    else:
        text = rng.choice([yaml_text(value), Path("made/schema.yaml").read_text()])
        content, what = changed_yaml(text, rng)
        names = ("case/schema.yaml", plain)
    Path("case/schema.yaml").write_bytes(content)
    if rng.random() < 0.15 and isinstance(value, dict):
        options = fit_options(schema=value if rng.random() < 0.5 else "case/schema.yaml")
        return Case("hotrow.fit", f"schema: {what}", [plain, options], (*names, "schema"))
    arguments = ["prepare", rng.choice(["csv", "auto"]), plain, "--schema", "case/schema.yaml", "--out", "case/out"]
    return Case("prepare", f"schema of {plain}: {what}", [*arguments, "--overwrite", "--json"], names)


def config_case(rng: random.Random, world: World) -> Case:
    """A changed config, or a changed recipe of the repository."""
    from hotrow.config.load import options

    known = tuple(options())
    recipe = rng.choice([None, None, *sorted(RECIPES.glob("*.yaml"))])
    value = copy.deepcopy(CONFIG)
    if recipe is not None:
        value = {**yaml.safe_load(recipe.read_text()), "data": "packed"}
        value["train"] = {**value.get("train", {}), "max_steps": 2, "threads": 1}
        value["model"] = {**value.get("model", {}), **SMALL}
        value["model"].pop("final_mlp", None)
    value["run"] = "case/run"
    if rng.random() < 0.7:
        value, what, name = changed_tree(value, rng, known)
        names: tuple[str, ...] = (name, "case/config.yaml")
        content = yaml_text(value).encode()
    else:
        content, what = changed_yaml(yaml_text(value), rng)
        names = ("case/config.yaml",)
    Path("case/config.yaml").write_bytes(content)
    arguments = ["train", "case/config.yaml", "--json"]
    names = (*names, "packed", "case/run", "tbsm", "din", "File name too long")
    return Case("train", f"{recipe.name if recipe else 'config'}: {what}", arguments, names)


VALUES = (
    *("", " ", "9" * 30, "price >= 1", ">= 4", "item >= 1", "click >= 1", "a\nb", "\udcff", "\N{GRINNING FACE}"),
    "x" * 5000,
    *words("x -1 0 1 2 0.5 1.5 -0.5 1e3 1e400 nan inf -inf 2**3 0.8,0.1,0.1 1,0,0 0,1,0 0.5,0.5 ,, nan,0,1"),
    *words("0.4,0.3,0.3 1e-9,0.5,0.5 é time random reference train val test click price price>= ts item nobody"),
    *words("8GiB 128MiB 1TB 0B -5GiB 1.5.5MB /dev/null .. * [ [a packed run clicks.csv text.yaml config.yaml made"),
    *words("absent/absent sgd adam kernels memory hot s3:// file:///etc http://x a://b ~ $HOME -- -"),
)
OPTIONS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "prepare": (
        ["csv", "clicks.csv", "--schema", "text.yaml", "--out", "case/out"],
        (
            *("--schema", "--label", "--time", "--split", "--fractions", "--seed", "--min-count", "--hash-cap"),
            *("--sample", "--rows", "--skip-bad-rows", "--memory", "--threads", "--out"),
        ),
    ),
    "init": (["clicks.csv", "--out", "case/made"], ("--label", "--time", "--out")),
    "inspect": (
        ["packed"],
        (*("--split", "--batch-size", "--dim", "--batches", "--sample", "--seed", "--hot"), *("--optimizer", "--out")),
    ),
    "train": (["config.yaml", "--set", "run=case/run"], ("--set", "--resume")),
    "eval": (["run"], ("--data", "--split")),
    "predict": (["run", "clicks.csv", "--out", "case/s.csv"], ("--out", "--keep")),
    "export": (["run", "--out", "case/export"], ("--out", "--since", "--step", "--rows")),
    "check": (["packed"], ()),
    "fit": (
        ["clicks.csv", "--schema", "text.yaml", "--set", "train.max_steps=2", "--set", "train.threads=1"],
        ("--label", "--time", "--schema", "--split", "--fractions", "--set"),
    ),
    "runs": (["--clean", "run"], ()),
}
SETS = (
    "",
    *words("train.epochs train.batch_size model.embedding_dim model.top_mlp model train optimizer.sparse"),
    *words("optimizer.sparse.lr memory memory.dram memory.dram.x hot.budget train.x x.y.z . a..b data run device"),
    *words("train.seed checkpoint.every train.eval_every memory.ssd memory.file é"),
)
SET_VALUES = (
    *("", "={a: 1}", "=&a [*a]", "=\x00", "=\udcff", "=" + "9" * 5000),
    *words("=1 = =[ ={ =nan =.inf =-1 =x =[1,2] =null =1e400 =*a =!!python/name:os =' =2024-13-45 =true =0"),
    *words("=/dev/null =packed"),
)


ALSO = {"--step": ("step",), "--label": ("schema",), "--time": ("schema",)}
ALSO |= dict.fromkeys(("--hot", "--memory"), ("memory", "size"))
"""What an error may name in place of an option."""


def option_case(rng: random.Random, world: World) -> Case:
    """A verb with one option or argument of a strange value."""
    verb = rng.choice(list(OPTIONS))
    plain, known = OPTIONS[verb]
    arguments = list(plain)
    if verb in ("prepare",) and rng.random() < 0.5:  # without a schema
        arguments = ["auto", "clicks.csv", "--label", "click", "--out", "case/out"]
    given = [i for i, text in enumerate(plain) if not text.startswith("-") and (i == 0 or plain[i - 1][:2] != "--")]
    places = given or [len(plain) - 1]
    if not known or rng.random() < 0.2:
        value = rng.choice(VALUES)
        arguments[rng.choice(places)] = value
        what = f"argument {value[:30]!r}"
        names: tuple[str, ...] = ()
    else:
        option = rng.choice(known)
        value = rng.choice(VALUES)
        if option == "--set":
            value = rng.choice(SETS) + rng.choice(SET_VALUES)
        if option in ("--out", "--schema", "--data", "--label") and option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments += [option, value]
        if verb == "inspect" and option == "--optimizer":
            arguments += ["--hot", "64KiB"]
        if verb == "train" and option == "--resume":
            arguments = ["--resume", value]
        what = f"{option} {value[:30]!r}"
        names = (option, option.strip("-").replace("-", "_"), option.strip("-"), value[:60].strip() or repr(value))
        names += ("no input path", repr(value)[1:50], str(Path(value))[:60])  # a path may be shown in its plain form
        names += ALSO.get(option, ())
        if option == "--set":
            names += tuple(value.partition("=")[0].split("."))
    if "\x00" in "".join(arguments):  # no shell can pass one
        return option_case(rng, world)
    return Case(verb, what, [verb, *arguments, "--json"], tuple(n for n in names if n))


FIT_OPTIONS: tuple[str, ...] = (
    *("label", "time", "schema", "categorical", "dense", "lists", "split", "config", "model", "run", "epochs", "lr"),
    *("batch_size", "embedding_dim", "bottom_mlp", "top_mlp", "max_steps", "eval_every", "monitor", "memory", "device"),
    *("optimizer.dense.lr", "optimizer.sparse", "train", "hot", "checkpoint.every", "embedding_init", "threads"),
)
FIT_DATA: tuple[Any, ...] = (
    *(None, 5, "", " ", [], (), {}, "absent.csv", b"clicks.csv", "\x00", ".", "/dev/null", object(), ["clicks.csv", 5]),
    *(["clicks.csv", "clicks.csv"], ["clicks.csv", "clicks.parquet"], {"click": [1, 0]}, [[1, 2]], "run", "made"),
    "*.nope",
    *("s3://", "file:///nope", "\udcff", "x" * 5000, ["clicks.csv", None], Path("packed"), Path(), iter(()), "packed"),
)


def fit_case(rng: random.Random, world: World) -> Case:
    """`hotrow.fit` with a strange value of an argument, or a strange frame."""
    options, data = fit_options(label="click"), "clicks.csv"
    kind = rng.choice(["option", "option", "data", "frame", "tree"])
    if kind == "option":
        name = rng.choice(FIT_OPTIONS)
        odd = ({"kind": "random"}, {"kind": 5}, {"fractions": [1]}, ["click"], ["nobody"])
        value = rng.choice((*NASTY, object(), *odd))
        if name == "schema":
            options.pop("label")
        options[name] = value
        return Case("hotrow.fit", f"{name} = {value!r:.40}", [data, options], (name, name.rpartition(".")[2]))
    if kind == "tree":
        name = rng.choice(["schema", "config"])
        value, what, leaf = changed_tree(text_schema() if name == "schema" else CONFIG, rng, SCHEMA_FIELDS)
        if name == "schema":
            options.pop("label")
        options[name] = value
        return Case("hotrow.fit", f"{name}: {what}", [data, options], (leaf, name, "clicks.csv", "config", "fit"))
    if kind == "data":
        data = rng.choice(FIT_DATA)
        return Case("hotrow.fit", f"data = {data!r:.40}", [data, options], ())
    data, what = frame_of(rng)
    return Case("hotrow.fit", f"frame: {what}", [data, options], ())


MAKERS = (
    *(raw_case,) * 8, *(layout_case,) * 3, *(json_case,) * 2, *(parquet_case,) * 3, *(schema_case,) * 5,
    *(config_case,) * 5, *(option_case,) * 6, *(fit_case,) * 4,
)  # fmt: skip


def case_of(seed: int, number: int, world: World) -> tuple[Case, Outcome]:
    """The case `number` of a seed, made and run in an empty folder `case`."""
    os.chdir(world.folder)
    for leftover in ("case", "runs", "run-new"):
        shutil.rmtree(leftover, ignore_errors=True)
    Path("case").mkdir()
    rng = random.Random(f"{seed}-{number}")
    case = rng.choice(MAKERS)(rng, world)
    outcome = run_case(case)
    outcome.faults += [*accepted_faults(case, outcome), *content_faults(case, outcome, world)]
    return case, outcome


def accepted_faults(case: Case, outcome: Outcome) -> list[str]:
    """Whether what must be an error was none."""
    return ["is accepted"] if case.wanted.outcome == "error" and outcome.code == 0 else []


def content_faults(case: Case, outcome: Outcome, world: World) -> list[str]:
    """Whether rows were lost without being counted, or unchanged content gave something else."""
    wanted, plain = case.wanted, case.what.partition(":")[0]
    if case.verb != "prepare" or wanted.outcome in ("any", "error"):
        return []
    if wanted.outcome == "same":
        is_same = outcome.code == 0 and content_of(outcome) == world.prepared(plain)
        return [] if is_same else ["differs from the plain file"]
    if outcome.code != 0:
        allowed = "--skip-bad-rows" in case.arguments
        return ["is an error though it may be skipped"] if wanted.outcome == "skipped" and allowed else []
    result = json.loads(outcome.out.splitlines()[-1])
    found = sum(result["rows"].values())
    expected = 2200 if plain == "long.csv" else NUM_ROWS
    if wanted.outcome == "rows":
        return [] if found == expected else [f"{found} of {expected} rows"]
    told = result["summary"].get("rows_skipped", 0)
    if told != wanted.num_bad or (found != expected - told and "header" not in case.what):
        return [f"{wanted.num_bad} bad rows: {told} skipped, {found} of {expected} kept"]
    return []
