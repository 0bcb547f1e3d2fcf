"""Every verb as a user types it: exit codes, the last line of stdout as JSON, and errors of one line with a cure."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from forked import COMMAND, start_forked
from hotrow.cli import app as cli
from hotrow.cli import tools as verbs
from hotrow.data.packed.reader import PackedDataset
from loops import looped
from packed_data import OF_TOY_ROWS
from resealed import reseal

SMALL = "{embedding_dim: 4, bottom_mlp: [8], top_mlp: [8]}"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, holding clicks.txt: 3,000 synthetic rows in Criteo's layout."""
    monkeypatch.chdir(tmp_path)
    write_criteo("clicks.txt", criteo_kaggle(3000, scale=0.001))
    Path("small.yaml").write_text(f"data: packed\nmodel: {SMALL}\ntrain: {{batch_size: 100, threads: 1}}\n")
    return tmp_path


def test_from_raw_rows_to_scores(work: Path, command: Any) -> None:
    command("init", "clicks.txt", "--out", "recipe", "--json")
    made = command("prepare", "criteo", "clicks.txt", "--out", "packed", "--json")
    assert sum(made["rows"].values()) == 3000
    result = command("train", "small.yaml", "--set", "train.epochs=2", "--json")
    assert (result["status"], result["epochs"], result["run_dir"]) == ("finished", 2.0, "runs/packed-dlrm-001")
    assert "is a run, and inspect reads data" in command("inspect", result["run_dir"], code=2)
    evaluated = command("eval", result["run_dir"], "--json")
    assert evaluated["auc"] == result["auc"]
    scored = command("predict", result["run_dir"], "clicks.txt", "--out", "scores.parquet", "--json")
    assert scored["rows"] == 3000
    exported = command("export", result["run_dir"], "--out", "exported", "--json")
    assert (exported["step"], exported["tables"]) == (result["steps"], 26)
    assert "exported exists already" in command("export", result["run_dir"], "--out", "exported", code=2)
    assert command("check", "exported", "--json")["kind"] == "export"
    again = command("train", "small.yaml", "--set", "train.epochs=3", "--json")
    written = command("export", again["run_dir"], "--since", "exported", "--out", "delta", "--json")
    assert written["number"] == 1 and written["rows"] > 0
    assert command("check", "delta", "--json")["kind"] == "delta"
    assert command("apply", "exported", "delta", "--out", "next", "--json")["rows"] == written["rows"]
    assert "has it already" in command("apply", "next", "delta", "--out", "more", code=2)
    for artifact in ("packed", result["run_dir"], f"{result['run_dir']}/checkpoints/step-{result['steps']}"):
        assert command("check", artifact, "--json")["ok"]
    assert command("runs", "--clean", result["run_dir"], "--json")["bytes_freed"] >= 0


def test_fit_names_logs_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    clicks = [{"click": i % 3 == 0, "user": f"u{i % 7}", "item": f"i{i % 3}"} for i in range(300)]
    pq.write_table(pa.Table.from_pylist(clicks), "my clicks.parquet")
    told = ("--label", "click", "--no-choice", "--set", "train.epochs=1", "--json")
    result = command("fit", "my *.parquet", *told)
    prog, *arguments = shlex.split(result["next"])
    assert prog == "hotrow" and command(*arguments, "--json")["rows"] == 300
    pq.write_table(pa.Table.from_pylist(clicks[:100]), "more.parquet")
    both = command("fit", "my clicks.parquet", "more.parquet", *told)
    assert both["rows"] == "2 files" and "NEW_ROWS" in both["next"]
    splits = PackedDataset.open(Path(both["run_dir"], "data")).info.splits
    assert sum(split.num_rows for split in splits.values()) == 400


def test_fit_takes_what_prepare_and_train_take(work: Path, command: Any) -> None:
    columns = {"rating": [1, 2, 4, 5, 3] * 100, "user": [f"u{i // 3 % 17}" for i in range(500)]}
    columns["x"] = [i % 83 + 0.5 for i in range(500)]
    pq.write_table(pa.table(columns), "my.parquet")
    Path("schema.yaml").write_text("label: {column: rating, at_least: 4}\ncategorical: [user]\n")
    assert "--label 'rating >= 4'" in command("fit", "my.parquet", code=2)
    common = ("my.parquet", "--set", "train.max_steps=3", "--set", "train.threads=1", "--json")
    by_schema = command("fit", *common, "--schema", "schema.yaml", "--fractions", "0.5,0.25,0.25")
    assert by_schema["steps"] == 3
    assert PackedDataset.open(Path(by_schema["run_dir"]) / "data").info.feature_names == ("user",)
    log = (Path(by_schema["run_dir"]) / "log.txt").read_text()
    assert "the test split has" in log and "too few to judge by" in log and "--fractions" in log
    by_rule = command("fit", *common, "--label", "rating >= 4", "--split", "random", "--no-refit")
    assert "x" in PackedDataset.open(Path(by_rule["run_dir"]) / "data").info.dense_names
    has_selection = [(Path(each["run_dir"]) / "selection").exists() for each in (by_schema, by_rule)]
    assert has_selection == [True, False]
    wrong = command("fit", "my.parquet", "--label", "rating >= 4", "--set", "train.epoch=1", code=2)
    assert "unknown option 'train.epoch'; did you mean 'train.epochs'" in wrong
    assert len(list(Path("runs").iterdir())) == 2, "a wrong option began a run"


@pytest.mark.slow
def test_demo_repeats(work: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.setattr(verbs, "NUM_ROWS", 600)
    monkeypatch.setattr(verbs, "TABLE_SCALE", 0.001)
    results = [command("demo", "--json") for _ in range(2)]
    assert [result["run_dir"] for result in results] == ["runs/demo-dlrm-001", "runs/demo-dlrm-002"]
    assert results[0]["auc"] == results[1]["auc"]


def test_fit_on_the_users_own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """It learns which items are clicked, is scored on the last tenth by time, and the next step it names runs."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    item, user, minute = rng.integers(0, 20, 1000), rng.integers(0, 30, 1000), rng.permutation(1000)
    clicked = (rng.random(1000) < np.where(item % 2, 0.7, 0.1)).astype(int)
    rows = [f"{i},{u},{1_700_000_000 + 60 * t},{c}" for i, u, t, c in zip(item, user, minute, clicked, strict=True)]
    Path("file.csv").write_text("\n".join(["item,user,t,clicked", *rows]) + "\n")
    result = command("fit", "file.csv", "--label", "clicked", "--time", "t", "--no-choice", "--json")
    assert result["status"] == "finished" and result["auc"] > 0.7
    test = PackedDataset.open(Path(result["run_dir"], "data")).split("test")
    labels = np.concatenate([test.block(b).label for b in range(test.num_blocks)])
    assert labels.sum() == clicked[minute >= 900].sum() != clicked[-100:].sum()
    command(*shlex.split(result["next"])[1:], "--json")
    assert len(Path("scores.csv").read_text().splitlines()) == 1001


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc says the peak")
def test_the_demo_keeps_to_its_promised_memory_and_disk(tmp_path: Path) -> None:
    """Below 4 GB of memory and 2 GB of disk, at its full size; it beats a constant rate."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom hotrow.__main__ import main\n"
        "sys.argv = ['hotrow', 'demo', '--json']\n"
        "try:\n    main()\nfinally:\n"
        # Not ru_maxrss, which begins at what the parent had.
        "    Path('peak').write_text(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as demo_run:
        most = 0
        while demo_run.poll() is None:
            most = max(most, disk_bytes(tmp_path))
            time.sleep(0.2)
        result = json.loads(demo_run.communicate()[0].splitlines()[-1])
    assert demo_run.returncode == 0
    assert result["auc"] > 0.6 and result["rows"] == "600,000 synthetic rows"
    assert 1024 * int((tmp_path / "peak").read_text()) < 4e9
    assert 50e6 < max(most, disk_bytes(tmp_path)) < 2e9


def disk_bytes(folder: Path) -> int:
    """Blocks that the files below `folder` take, now; files may come and go."""
    total = 0
    with suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                total += 512 * path.stat().st_blocks
    return total


def test_inspect_writes_its_report(work: Path, command: Any) -> None:
    command("prepare", "criteo", "clicks.txt", "--out", "packed", "--json")
    options = ["--batch-size", "100", "--dim", "32", "--split", "val"]
    looked = command("inspect", "packed", *options, "--out", "report", "--json")
    assert [Path(file).name for file in looked["files"]] == ["hotness.json", "hotness.html"]
    assert looked["demand"]["gross_bytes"] == 100 * 26 * 32 * 4
    assert (looked["split"], looked["samples"], looked["batch_size"]) == ("val", looked["rows"]["val"], 100)
    assert len(looked["tables"]) == 26 and looked["tables"][0]["num_dropped"] == 0


def test_only_some_verbs_run_under_torchrun(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """Processes that know nothing of each other would write the same file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    err = command("predict", "run", "clicks.csv", "--out", "scores.csv", code=2)
    assert "hotrow predict runs in one process, but WORLD_SIZE is 2: start it without torchrun" in err
    err = command("train", "x.yaml", code=2)
    assert "WORLD_SIZE is 2 in the environment, but RANK, MASTER_ADDR, MASTER_PORT not" in err


@looped(
    ("arguments", "message"),
    [
        (["train", "absent.yaml"], r"config absent\.yaml: No such file or directory; pass a YAML file"),
        (["train"], "pass a config to start a run, --from RUN .*, or --resume RUN"),
        (["train", "small.yaml", "--set", "train.epoch=2"], r"unknown key train\.epoch; did you mean 'epochs'"),
        (["train", "small.yaml"], r"packed: no dataset\.json"),
        (["train", "--resume", "nowhere"], r"nowhere is not a run: it has no run\.json"),
        (["prepare", "cireto", "clicks.txt", "--out", "x"], "source 'cireto' is not known; did you mean 'criteo'"),
        (
            ["prepare", "criteo", "clicks.txt", "--out", "x", "--fractions", "a,b"],
            "is not a list of numbers; write it as",
        ),
        (["check", "."], "was not written by hotrow"),
        (["inspect", "small.yaml"], r"small\.yaml: no dataset\.json, so this is not a complete packed dataset"),
        (["predict", "nowhere", "clicks.txt", "--out", "s.csv"], "nowhere is not a run"),
        (["export", "nowhere", "--out", "x"], "nowhere is not a run"),
        (["runs", "--clean", "."], "is not a run"),
        (["runs", "--clean", "a", "b"], "--clean names the run to clean, so leave out b"),
        (["runs", "--data"], "name the run with --clean"),
        (["doctor", "absent"], "absent is not a folder; name a folder on the disk to measure"),
        (["prepare", "csv", "small.yaml", "--out", "x", "--memory", "9" * 400], "memory"),
        (["prepare", "avazu", "clicks.txt", "--out", "x", "--rows", "9" * 400], "rows is 9+"),
        (["inspect", "absent", "--seed", "-1"], "seed is -1"),
        (["check", "\udcff"], r"an argument is '\\udcff'; it must be valid Unicode text: rename it"),
    ],
)
def test_bad_input_is_one_line_with_a_cure(work: Path, arguments: list[str], message: str, command: Any) -> None:
    err = command(*arguments, code=2)
    last = err.strip().splitlines()[-1]
    assert last.startswith("hotrow: ")
    assert re.search(message, last), last
    assert "Traceback" not in err


@looped(
    ("arguments", "message"),
    [
        (["prepare", "csv", "absent.csv", "--out", "x", "--fractions", "1,1,1"], "options: split: fractions"),
        (["prepare", "csv", "absent.csv", "--out", "x", "--sample", "2"], r"sample is 2\.0"),
        (["prepare", "csv", "absent.csv", "--out", "x", "--memory", "much"], "memory is 'much'"),
        (["prepare", "csv", "absent.csv", "--out", "x", "--schema", "small.yaml"], "unknown key 'model'"),
        (["prepare", "csv", "absent.csv", "--out", "."], r"\. exists and is not a dataset folder"),
        (["prepare", "csv", "absent.csv", "--out", "clicks.txt/x"], "clicks.txt/x cannot be made: .* is not a folder"),
        (["init", "absent.csv", "--out", "made"], "made/recipe.yaml exists and will not be overwritten"),
        (["fit", "absent.csv", "--set", "data=x"], "--set data: not an option of a config"),
        (["fit", "absent.csv", "--set", "nothing"], "--set 'nothing' has no name and value"),
        (["fit", "absent.csv", "--set", "run=made"], "run folder made exists already"),
        (["prepare", "csv", "clicks.txt", "--out", "x", "--schema", "s.yaml", "--label", "y"], "label is a hint for"),
        (["prepare", "criteo", "clicks.txt", "--out", "x", "--time", "y"], "source criteo has its own schema"),
    ],
)
def test_options_are_judged_before_data_is_read(work: Path, arguments: list[str], message: str, command: Any) -> None:
    Path("made").mkdir(exist_ok=True)
    Path("made/recipe.yaml").touch()
    Path("s.yaml").write_text("label: c0\ncategorical: [c1]\n")

    err = command(*arguments, code=2)
    assert re.search(message, err) and "absent.csv" not in err, err


@pytest.mark.parametrize("damage", ["header", "other", "cut", "content"])
def test_training_looks_at_the_vocabularies_it_takes(work: Path, damage: str, command: Any) -> None:
    """At sizes and headers, before a folder is made: contents, which `check` reads, can be prepared again."""
    command("prepare", "criteo", "clicks.txt", "--out", "packed", "--json")
    vocabulary = Path("packed", "vocab", "C3")
    data, other = vocabulary.read_bytes(), Path("packed", "vocab", "C9").read_bytes()
    header, content = (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (40, len(data) - 1))
    vocabulary.write_bytes({"header": header, "other": other, "cut": data[:-1], "content": content}[damage])
    train = ("train", "small.yaml", "--set", "train.max_steps=1", "--json")
    if damage == "content":
        run = command(*train)["run_dir"]
        assert "C3 is missing or damaged" in command("check", run, code=2)
        return
    if damage == "other":  # as a manifest would have it that was made with the wrong file in place
        reseal(Path("packed", "dataset.json"), lambda own: own["files"].update({"vocab/C3": own["files"]["vocab/C9"]}))
    says = {"header": "its header", "other": "dataset.json names", "cut": "it was cut or altered"}[damage]
    assert re.search(rf"vocab/C3.* {says}", command(*train, code=2))
    assert not Path("runs").exists()


def test_debugging_shows_the_traceback(work: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.setenv("HOTROW_DEBUG", "1")
    assert "Traceback" in command("train", "absent.yaml", code=2)


def test_a_signal_saves_says_how_to_go_on_and_resumes(work: Path, command: Any) -> None:
    """SIGUSR1, by which Slurm says that the time of a job is nearly over; then --max-minutes."""
    command("prepare", "criteo", "clicks.txt", "--out", "packed", "--json")
    options = ["--set", "train.epochs=1000", "--set", "train.log_every=1", "--json"]
    metrics = Path("runs/packed-dlrm-001/metrics.jsonl")
    with start_forked(COMMAND, "train", "small.yaml", *options) as training:
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(training.pid, signal.SIGUSR1)
        done = training.finish()
    out, err = done.stdout, done.stderr
    assert done.returncode == 128 + signal.SIGUSR1, err
    told = "because its time is over; continue with: hotrow train --resume runs/packed-dlrm-001"
    assert told in err
    stopped = json.loads(out.splitlines()[-1])
    assert (stopped["status"], stopped["signal"]) == ("interrupted", signal.SIGUSR1)
    resume = ["train", "--resume", "runs/packed-dlrm-001"]
    assert told in command(*resume, "--max-minutes", "0.001", code=128 + signal.SIGUSR1)
    assert "--max-minutes is 0; give a number above 0" in command(*resume, "--max-minutes", "0", code=2)
    reached = json.loads(Path("runs/packed-dlrm-001/run.json").read_text())["epochs"]
    assert reached >= stopped["epochs"]
    epochs = int(reached) + 2
    changes = ["--set", f"train.epochs={epochs}", "--json"]
    result = command(*resume, *changes)
    assert (result["status"], result["epochs"]) == ("finished", epochs)
    assert set(result["warnings"]) <= {"reference_backend", *OF_TOY_ROWS}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_stop_says_what_it_left(sent: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, cli.saying_interruptions():
        try:
            os.kill(os.getpid(), sent)
            time.sleep(10)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; run the same command to continue") from None
    assert ended.value.exit_code == 128 + sent
    assert capsys.readouterr().err == "hotrow: stopped; run the same command to continue\n"
    assert signal.getsignal(signal.SIGTERM) == before
