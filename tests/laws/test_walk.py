"""Laws of `hotrow days`: it is the commands of docs/daily.md by hand, to the byte, wherever it is killed on its way."""

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotrow
import mutate
from at_step import at_step
from expanded import expanded
from forked import run_forked
from hotrow.base.files import claim
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.days import walk
from hotrow.days.walk import walk_days
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.folder import RunFolder
from loops import looped
from prepare_data import file_hashes

RECIPE = """
data: ""
model: {embedding_dim: 4, bottom_mlp: [], top_mlp: [8]}
optimizer: {sparse: {name: adagrad, lr: 0.05}, schedule: {warmup_steps: 4}}
train: {batch_size: 64, epochs: 2, eval_every: null, seed: 3, threads: 1}
checkpoint: {every: 4}
"""
NAMES = ("day_1", "day_2", "day_10")
TOLD = {"label": "click", "time": "ts", "categorical": ["user", "item"]}
FLAGS = ("--label", "click", "--time", "ts", "--categorical", "user", "--categorical", "item")


def write_day(path: Path, day: int, num_rows: int = 500) -> None:
    """Clicks that depend on the item; the ids of a day drift away from those of the day before."""
    rng = np.random.default_rng(day)
    item, user = rng.integers(10 * day, 10 * day + 40, num_rows), rng.integers(0, 60 + 20 * day, num_rows)
    click = rng.random(num_rows) < np.where(item % 3 == 0, 0.7, 0.2)
    lines = (
        f"{int(click[k])},{1_700_000_000 + 100_000 * day + 100 * k},u{user[k]},i{item[k]},{rng.normal():.3f}"
        for k in range(num_rows)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("click,ts,user,item,price\n" + "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walk") / "logs"
    for number, name in enumerate(NAMES, 1):
        write_day(folder / name / "part.csv", number)
    (folder.parent / "recipe.yaml").write_text(RECIPE)
    return folder


def go(logs: Path, out: Path, **options: Any) -> dict[str, Any]:
    return walk_days(logs, out, recipe=logs.parent / "recipe.yaml", **TOLD, **options)


@pytest.fixture(scope="module")
def chain(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain that was never stopped; all of its days are kept."""
    out = tmp_path_factory.mktemp("walk") / "chain"
    assert go(logs, out, keep=9)["new"] == list(NAMES)
    return out


def bits(chain: Path) -> dict[str, Any]:
    """All that must be the same in two chains: datasets, tensors, deltas and the model that is served."""
    found: dict[str, Any] = {}
    for run in (chain / "runs").iterdir():
        checkpoints = list_checkpoints(run / "checkpoints")
        found[run.name] = expanded(checkpoints[max(checkpoints)])
        parent = RunFolder.open(run).record.parent
        found[f"{run.name} before"] = None if parent is None else parent.metrics
    return found | {name: file_hashes(chain / name) for name in ("data", "deltas", "model")}


def hotrow_in(folder: Path, *words: object) -> list[str]:
    """Lines on stderr."""
    with chdir(folder):
        done = mutate.run_command([*map(str, words)])
    assert done.code == 0, done.err
    return done.err.splitlines()


def test_the_one_command_is_the_commands_by_hand(logs: Path, chain: Path, tmp_path: Path) -> None:
    later = ["train.epochs=1", "train.max_steps=null", "train.early_stopping=null", "train.eval_every=null"]
    later += ["optimizer.schedule={warmup_steps: 0, decay_steps: 0}"]
    for before, name in zip((None, *NAMES), NAMES, strict=False):
        first = before is None
        base = ("--base", "none", *FLAGS) if first else ("--base", f"data/{before}")
        hotrow_in(tmp_path, "prepare", "auto", logs / name, *base, "--out", f"data/{name}")
        start = (logs.parent / "recipe.yaml",) if first else ("--from", f"runs/{before}")
        changes = [f"data=data/{name}", f"run=runs/{name}", *([] if first else later)]
        hotrow_in(tmp_path, "train", *start, *(word for change in changes for word in ("--set", change)))
        if first:
            hotrow_in(tmp_path, "export", f"runs/{name}", "--out", "model")
            (tmp_path / "deltas").mkdir()
        else:
            hotrow_in(tmp_path, "export", f"runs/{name}", "--since", "model", "--out", f"deltas/{name}")
            hotrow_in(tmp_path, "apply", "model", f"deltas/{name}", "--out", "next")
            shutil.rmtree(tmp_path / "model")
            (tmp_path / "next").rename(tmp_path / "model")
    by_hand = bits(tmp_path)
    for what, found in bits(chain).items():
        assert found == by_hand[what], what
    whole = tmp_path / "whole"
    hotrow.load(chain / "runs" / NAMES[-1]).export(whole)
    exported = file_hashes(whole)
    assert {name: own for name, own in file_hashes(chain / "model").items() if name != "chain.json"} == exported


AT_RANDOM = """
import os, signal, sys, threading
from hotrow.__main__ import main
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
sys.argv = ["hotrow", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize("num_kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_chain_killed_anywhere_ends_in_the_same_bits(logs: Path, chain: Path, tmp_path: Path, num_kills: int) -> None:
    """Each call goes on from what the one before it left."""
    out, rng, killed = tmp_path / "chain", random.Random(0), 0
    words = ("days", logs, "--out", out, "--recipe", logs.parent / "recipe.yaml", "--keep", 9, *FLAGS)
    while killed < num_kills:
        done = run_forked(AT_RANDOM, rng.uniform(0, 2), *words)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        killed += done.returncode != 0
        if done.returncode == 0 or killed == num_kills:
            go(logs, out, keep=9)
            found = bits(out)
            assert {what: own for what, own in bits(chain).items() if found[what] != own} == {}
            assert (out / "report.html").is_file()
            assert [path.name for path in (out / "versions").iterdir()] == [NAMES[-1]]
            shutil.rmtree(out)


def test_a_signal_saves_and_ends_the_call(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda _: signal.raise_signal(signal.SIGTERM))
        found = go(logs, tmp_path / "chain")
    assert (found["status"], found["signal"], found["days"], found["newest"]) == ("interrupted", 15, 0, {})
    assert list_checkpoints(tmp_path / "chain" / "runs" / "day_1" / "checkpoints").keys() == {3}


def test_days_that_are_done_are_skipped(logs: Path, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_hashes(chain / "model") | file_hashes(chain / "runs") | file_hashes(chain / "data")
    for name in ("run_prepare", "train", "apply_delta"):
        monkeypatch.setattr(walk, name, None)
    found = go(logs, chain, keep=9)
    assert (found["days"], found["new"], found["newest"]["name"]) == (3, [], "day_10")
    assert file_hashes(chain / "model") | file_hashes(chain / "runs") | file_hashes(chain / "data") == before


def test_a_days_figures_are_those_of_the_commands(logs: Path, chain: Path) -> None:
    days = json.loads((chain / "days.json").read_text())["days"]
    assert [day["name"] for day in days] == list(NAMES), "day_2 comes before day_10"
    assert days[0]["metrics"] is None and days[0]["unknown"] is None
    assert days[0]["new_rows"] == days[0]["table_rows"]
    for before, day in pairwise(days):
        found = hotrow.load(chain / "runs" / before["name"])
        raw = found.evaluate_rows(str(logs / day["name"]))
        assert day["metrics"]["num_rows"] == raw["num_rows"] == day["rows"] == 500
        assert day["metrics"]["auc"] == RunFolder.open(chain / "runs" / day["name"]).record.parent.metrics["auc"]  # type: ignore[union-attr,index]
        times = [int(line.split(",")[1]) for line in (logs / day["name"] / "part.csv").read_text().split()[1:]]
        assert [part["begins_s"] for part in day["parts"]] == sorted({second // 3600 * 3600 for second in times})
        assert 0 < day["unknown"] < 1 and day["new_rows"] > 0
        assert day["table_rows"] == before["table_rows"] + day["new_rows"]


def test_old_datasets_and_runs_go(logs: Path, chain: Path, tmp_path: Path) -> None:
    out = tmp_path / "chain"
    go(logs, out, keep=1)
    assert [path.name for kind in ("data", "runs") for path in (out / kind).iterdir()] == ["day_10", "day_10"]
    assert file_hashes(out / "deltas") == file_hashes(chain / "deltas")
    assert file_hashes(out / "model") == file_hashes(chain / "model")
    page = (out / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in NAMES)


def test_options_of_later_days_are_checked_by_the_model_of_the_chain(tmp_path: Path) -> None:
    """Also if the recipe is not given again: another model than the usual one takes other options."""
    logs, out, recipe = tmp_path / "logs", tmp_path / "chain", tmp_path / "recipe.yaml"
    tower = "{name: two_tower, item: [item], dense_inputs: none, embedding_dim: 4}"
    recipe.write_text(f"data: ''\nmodel: {tower}\noptimizer: {{sparse: {{name: ftrl}}}}\ntrain: {{batch_size: 64}}\n")
    write_day(logs / "day_1" / "part.csv", 1, 200)
    walk_days(logs, out, recipe=recipe, **TOLD)
    write_day(logs / "day_2" / "part.csv", 2, 200)
    with pytest.raises(ValueError, match=r"ftrl has no such option"):
        walk_days(logs, out, overrides=["optimizer.sparse.initial_accumulator_value=0.1"])
    assert walk_days(logs, out, overrides=["optimizer.sparse.l1=0.001"])["new"] == ["day_2"]


def test_options_of_the_first_day_may_be_mended(logs: Path, tmp_path: Path) -> None:
    """A newcomer learns of a wrong column or recipe by an error; nothing was made by it."""
    recipe, out, own = tmp_path / "recipe.yaml", tmp_path / "chain", tmp_path / "logs"
    shutil.copytree(logs / "day_1", own / "day_1")
    recipe.write_text(RECIPE + "metrics: {by: shop}\n")
    with pytest.raises(ValueError, match="clicked"):
        walk_days(own, out, recipe=recipe, **{**TOLD, "label": "clicked"})
    with pytest.raises(ValueError, match="shop"):
        walk_days(own, out, recipe=recipe, **TOLD)
    with pytest.raises(ValueError, match="label is another one than"):  # a dataset was made by it
        walk_days(own, out, recipe=recipe, **{**TOLD, "label": "price >= 0"})
    recipe.write_text(RECIPE)
    assert walk_days(own, out, recipe=recipe, overrides=["train.max_steps=2"], **TOLD)["new"] == ["day_1"]
    recipe.write_text(RECIPE + "metrics: {by: user}\n")
    with pytest.raises(ValueError, match="recipe is another one than"):
        walk_days(own, out, recipe=recipe, **TOLD)


def test_later_days_are_read_as_the_first_one(begun: tuple[Path, Path]) -> None:
    """Logs of days that are done may go and may be touched. A day of another model, whose training could not be sent
    as a delta, is refused before it trains."""
    logs, out = begun
    shutil.rmtree(logs / "day_1")
    os.utime(logs / "day_2" / "part.csv")
    write_day(logs / "day_11" / "part.csv", 4)
    with pytest.raises(ValueError, match=r"--set model\.embedding_init: a chain of days has one model"):
        go(logs, out, keep=9, overrides=["model.embedding_init=0.05", "train.batch_size=32"])
    assert (out / "deltas").is_dir() and not (out / "runs" / "day_11").exists()
    assert walk_days(logs, out, overrides=["train.batch_size=32"])["new"] == ["day_11"]


def test_a_day_whose_rows_were_wrong_may_be_mended(begun: tuple[Path, Path]) -> None:
    """Bad rows may be skipped from any day on, or a chain would end at the first; a day of bad rows alone is not
    empty, however many may be skipped: something has changed."""
    logs, out = begun
    day = logs / "day_11.csv"
    day.write_text("")
    assert go(logs, out, keep=9)["new"] == [], "no later day is done, so that it may yet get its rows"
    day.write_text(EMPTY["a header alone"] + "odd,1700600000,u1,i1,1\n" * 3)
    with pytest.raises(ValueError, match=r"day_11\.csv has no good row, and 3 bad ones"):
        go(logs, out, keep=9, skip_bad_rows=5)
    write_day(day, 1)
    with pytest.raises(ValueError, match="prepare days in the order of time"):
        go(logs, out, keep=9)
    write_day(day, 4)
    edit(day, "\n0,", "\nno,")
    with pytest.raises(ValueError, match=r"'no' is not a label.*--skip-bad-rows"):
        go(logs, out, keep=9)
    found = go(logs, out, keep=9, skip_bad_rows=1)
    assert (found["new"], found["newest"]["rows"]) == (["day_11"], 499)
    assert go(logs, out, keep=9)["new"] == []


def test_what_a_kill_leaves_of_an_old_run_goes(begun: tuple[Path, Path]) -> None:
    logs, out = begun
    (out / "runs" / "day_1" / "run.json").unlink()
    go(logs, out, keep=1)
    assert [path.name for path in (out / "runs").iterdir()] == ["day_10"]


def test_a_chain_without_schema_and_recipe(tmp_path: Path) -> None:
    """A newcomer's first call; files may be days as folders may."""
    for number in (1, 2):
        write_day(tmp_path / "logs" / f"2026-11-0{number}.csv", number, 300)
    words = ("days", "logs", "--out", "chain", "--label", "click", "--time", "ts", "--set", "train.max_steps=20")
    said = hotrow_in(tmp_path, *words)
    assert (tmp_path / "chain" / "recipe.yaml").is_file()
    assert {path.name for path in (tmp_path / "chain" / "runs").iterdir()} == {"2026-11-01", "2026-11-02"}
    first = RunFolder.open(tmp_path / "chain" / "runs" / "2026-11-01").record
    count = sum(warning["count"] for warning in first.warnings.values())
    assert len(said) == 2 and count and f"{count} warnings" in said[0] and "warning" not in said[1]
    write_day(tmp_path / "logs" / "2026-11-03.csv", 3, 300)
    assert len(hotrow_in(tmp_path, *words, "-v")) > 5
    assert not hotrow_in(tmp_path, *words)


def test_ids_that_expire_are_told(logs: Path, tmp_path: Path) -> None:
    own = tmp_path / "logs"
    for name in NAMES[:2]:
        shutil.copytree(logs / name, own / name)
    tables = "{default: {expire: {unused_days: 1}}}"
    (tmp_path / "schema.yaml").write_text(
        f"version: 1\nlabel: click\ncategorical: [user, item]\nsplit: {{kind: random}}\ntables: {tables}\n"
    )
    walk_days(own, tmp_path / "chain", schema=tmp_path / "schema.yaml", overrides=["train.max_steps=4"])
    first, day = json.loads((tmp_path / "chain" / "days.json").read_text())["days"]
    found = PackedDataset.open(tmp_path / "chain" / "data" / "day_2").info
    lost: Any = found.summary["ids"]
    assert first["gone_rows"] is None
    assert day["gone_rows"] == sum(table["expired"] for table in lost.values()) > 0
    assert "<td>day_2</td>" in (tmp_path / "chain" / "report.html").read_text()


def test_days_go_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in (
        "day_10.csv",
        "day_2-late.csv",
        "day_2.csv.gz",
        "2026.11.28.jsonl",
        ".hidden",
        "_SUCCESS",
        "day_02.csv",
    ):
        (tmp_path / name).touch()
    (tmp_path / "day_1").mkdir()
    found = walk._days_in(tmp_path, tmp_path.parent / "chain")
    assert [*found] == ["2026.11.28", "day_1", "day_02", "day_2", "day_2-late", "day_10"]


@pytest.fixture
def begun(logs: Path, chain: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the logs and of the chain, whose logs may be changed."""
    shutil.copytree(logs.parent, tmp_path / "walk")
    own = tmp_path / "walk" / "logs"
    state = walk._DOCUMENT.read(chain / "days.json")
    shutil.copytree(chain, tmp_path / "chain", symlinks=True)
    walk._DOCUMENT.write(tmp_path / "chain" / "days.json", state)
    return own, tmp_path / "chain"


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


@looped(
    ("change", "error"),
    [
        (lambda logs: edit(logs / "day_2" / "part.csv", ",u", ",v"), r"day_2/part\.csv has changed since day_2 was"),
        (lambda logs: edit(logs / "day_1" / "part.csv", ",u", ",uu"), r"day_1/part\.csv has changed"),
        (lambda logs: write_day(logs / "day_2" / "late.csv", 9), r"day_2/late\.csv is new since .* into a new day"),
        (lambda logs: (logs / "day_2" / "part.csv").rename(logs / "day_2" / "b.csv"), r"day_2/b\.csv is new"),
        (lambda logs: write_day(logs / "day_3" / "part.csv", 9), r"day_3 comes before day_10, which is done"),
        (lambda logs: write_day(logs / "day_10.csv", 9), r"day_10 and .*day_10\.csv are both day 'day_10'"),
    ],
)
def test_changed_days_are_refused(begun: tuple[Path, Path], tmp_path: Path, change: Any, error: str) -> None:
    kept, out = begun
    logs, before = shutil.copytree(kept.parent, tmp_path / "walk") / "logs", file_hashes(out)
    change(logs)
    with pytest.raises(ValueError, match=error):
        go(logs, out, keep=9)
    assert file_hashes(out) == before


EMPTY = {"no byte": "", "a header alone": "click,ts,user,item,price\n"}


@pytest.mark.slow_but("a header alone")
@pytest.mark.parametrize("what", EMPTY)
def test_an_empty_day_is_passed_over(begun: tuple[Path, Path], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that follow it go on, and the chain is as if it were not there; rows that come to it later are refused."""
    logs, out = begun
    empty = logs / "day_11.csv"
    empty.write_text(EMPTY[what])
    assert go(logs, out, keep=9)["new"] == []
    assert "day_11" in capsys.readouterr().err
    write_day(logs / "day_12" / "part.csv", 4)
    assert go(logs, out, keep=9)["new"] == ["day_12"]
    assert go(logs, out, keep=9)["new"] == []
    assert PackedDataset.open(out / "data" / "day_12").info.summary.keys() >= {"ids"}
    write_day(empty, 3)
    with pytest.raises(ValueError, match=r"day_11\.csv .*new day"):
        go(logs, out, keep=9)


def test_files_that_hold_no_rows_are_passed_over(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside days that do; in the folder of a day too."""
    own = Path(shutil.copytree(logs / "day_1", tmp_path / "logs" / "day_1")).parent
    for name in ("README.md", "day_1/README.md", "checksums.md5", "SHA256SUMS"):
        (own / name).write_text("of the team")
    (own / "day_1" / "b.csv").write_text(EMPTY["a header alone"])
    (own / "day_0.csv").write_text("")
    assert walk_days(own, tmp_path / "chain", overrides=["train.max_steps=2"], **TOLD)["new"] == ["day_1"]
    said = capsys.readouterr().err
    assert "passed over, of formats that are not read: README.md, SHA256SUMS, checksums.md5" in said
    assert "day_0 has no rows and is passed over" in said


@looped(
    ("day", "old", "new", "named"),
    [
        ("day_1", 1, 0, r"day_1: label 'click' is 1 in 0 of 400 rows; see"),
        ("day_11", 1, 0, r"is 1 in 0 of 500 rows, and in 3\d\.\d\d% of those of the day before; .*--accept day_11"),
        ("day_11", 0, 1, r"is 1 in 500 of 500 rows, and in 3"),
    ],
)
def test_a_day_of_odd_labels_stops_until_it_is_mended_or_accepted(
    begun: tuple[Path, Path], tmp_path: Path, day: str, old: int, new: int, named: str
) -> None:
    logs, out = begun
    if day == "day_1":
        logs, out = tmp_path / "first" / "logs", tmp_path / "first" / "chain"
        shutil.copytree(begun[0].parent, logs.parent)
        shutil.rmtree(logs)
    path = logs / day / "part.csv"
    write_day(path, 4)
    good = path.read_text()
    path.write_text(good.replace(f"\n{old},", f"\n{new},"))
    for _ in range(2):
        with pytest.raises(ValueError, match=named):
            go(logs, out, keep=9)
    assert not (out / "runs" / day).exists()
    with pytest.raises(ValueError, match=r"--accept day_12: .*has no such day; did you mean"):
        go(logs, out, keep=9, accept=["day_12"])
    path.write_text(good if new else path.read_text())
    assert go(logs, out, keep=9, accept=() if new else [day])["new"] == [day]
    shutil.rmtree(out)


@looped(
    ("count", "usual", "is_odd"),
    [
        (0, 15, False),
        (0, 16, True),
        (2, 20, True),
        (3, 20, False),
        (200, 20, True),
        (190, 20, False),
        (1000, 700, True),
    ],
)
def test_labels_are_odd_beyond_chance(count: int, usual: float, *, is_odd: bool) -> None:
    """Of 1,000 rows."""
    assert walk._is_odd(count, usual, 1000) == is_odd


def test_rows_that_come_while_a_day_is_found_empty_are_not_passed_over(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that finds it empty cannot know of them; the next one does, and refuses to leave them out."""
    logs, out = begun
    late, do = logs / "day_11.csv", walk._do

    def do_slowly(own: Any, name: str, *rest: Any) -> Any:
        try:
            return do(own, name, *rest)
        finally:
            if name == "day_11":
                write_day(late, 3)

    late.write_text(EMPTY["a header alone"])
    write_day(logs / "day_12" / "part.csv", 4)
    monkeypatch.setattr(walk, "_do", do_slowly)
    assert go(logs, out, keep=9)["new"] == ["day_12"]
    with pytest.raises(ValueError, match=r"day_11\.csv has changed"):
        go(logs, out, keep=9)


def test_a_file_that_comes_while_a_day_is_prepared_is_refused(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would be in no day. A file of a format that is not read may come."""
    logs, out = begun
    write_day(logs / "day_11" / "part.csv", 4)

    def prepare(*arguments: Any, **options: Any) -> Any:
        found = run_prepare(*arguments, **options)
        (logs / "day_11" / "notes.md").touch()
        write_day(logs / "day_11" / "more.csv", 5)
        return found

    monkeypatch.setattr(walk, "run_prepare", prepare)
    with pytest.raises(ValueError, match=r"day_11/more\.csv is new since day_11 was prepared"):
        go(logs, out, keep=9)
    (logs / "day_11" / "more.csv").unlink()
    monkeypatch.chdir(logs.parent)
    assert go(Path("logs"), out, keep=9)["new"] == ["day_11"]
    newest = walk._DOCUMENT.read(out / "days.json").days[-1].files
    assert newest["day_11/part.csv"][1].startswith("crc32:") and newest["day_11/notes.md"][:2] == (0, "")


@contextmanager
def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: str) -> Iterator[None]:
    """Inside the block a call of `walk_days` is interrupted as it comes to a step."""

    def stopped(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(walk, step, stopped)
        yield


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("_trained", r"day_11 was prepared on another day than day_10b: remove it"),
        ("_figures", r"day_10b comes before day_11, which is done"),
    ],
)
def test_a_day_that_was_begun_takes_no_other_before_it(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, step: str, error: str
) -> None:
    """Once its delta was applied, a day before it would take that delta's place."""
    logs, out = begun
    write_day(logs / "day_11" / "part.csv", 4)
    with interrupted_at(monkeypatch, step):
        go(logs, out, keep=9)
    write_day(logs / "day_10b" / "part.csv", 5)
    with pytest.raises(ValueError, match=error):
        go(logs, out, keep=9)
    shutil.rmtree(logs / "day_10b")
    if step == "_figures":
        assert go(logs, out, keep=9)["new"] == ["day_11"]


def test_no_day_comes_before_the_first_one_that_was_exported(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill came before it was noted as done: the model would be taken for that of the day before."""
    shutil.copytree(logs / "day_2", tmp_path / "logs" / "day_2")
    given: dict[str, Any] = {"recipe": logs.parent / "recipe.yaml", **TOLD}

    with interrupted_at(monkeypatch, "_figures"):
        walk_days(tmp_path / "logs", tmp_path / "chain", **given)
    shutil.copytree(logs / "day_1", tmp_path / "logs" / "day_1")
    with pytest.raises(ValueError, match=r"day_1 comes before day_2, which is done"):
        walk_days(tmp_path / "logs", tmp_path / "chain", **given)
    shutil.rmtree(tmp_path / "logs" / "day_1")
    assert walk_days(tmp_path / "logs", tmp_path / "chain", **given)["new"] == ["day_2"]


@looped(
    ("options", "error"),
    [
        ({"keep": 0}, r"keep is 0; it must be at least 1"),
        ({"overrides": ["run=mine"]}, r"--set run: each day of a chain has its own"),
        ({"overrides": ["train.epoch=1"]}, r"recipe\.yaml: .*train\.epoch"),
        ({"overrides": ["calibration.method=platt"]}, r"'platt', which needs validation rows; only"),
        ({"overrides": ["hot={schedule: fae}"]}, r"hot\.schedule is 'fae', which needs validation rows"),
        ({"overrides": ["epochs"]}, r"--set 'epochs' has no name and value"),
        ({"time_format": "%s"}, r"time_format is another one than .* was begun with"),
        ({"schema": "recipe.yaml"}, r"schema is another one than .* was begun with"),
    ],
)
def test_other_options_are_refused(
    logs: Path, chain: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: str
) -> None:
    monkeypatch.chdir(logs.parent)
    with pytest.raises(ValueError, match=error):
        go(logs, chain, **options)


def test_other_folders_are_refused(logs: Path, chain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder; name the folder"):
        walk_days(logs / "day_1" / "part.csv", tmp_path / "out")
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    with pytest.raises(ValueError, match="empty is empty; put a file or a folder"):
        walk_days(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ValueError, match=r"days: .*train\.epoch"):
        walk_days(logs, tmp_path / "out", overrides=["train.epoch=1"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"chain lies in .*logs, whose folders are days: name a folder outside"):
        go(logs, logs / "chain")
    assert not (logs / "chain").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"taken has no days\.json, but mine\.txt"):
        go(logs, tmp_path / "taken")
    with claim(chain), pytest.raises(ValueError, match="another process works on"):
        go(logs, chain)


def test_text_on_the_page_is_escaped(logs: Path, tmp_path: Path) -> None:
    own = tmp_path / "walk" / "logs"
    shutil.copytree(logs / "day_1", own / "<b>day")
    shutil.copy(logs.parent / "recipe.yaml", own.parent)
    go(own, tmp_path / "<i>chain", overrides=["train.max_steps=2"])
    page = (tmp_path / "<i>chain" / "report.html").read_text()
    assert "<b>day" not in page and "&lt;b&gt;day" in page and "<i>chain" not in page
