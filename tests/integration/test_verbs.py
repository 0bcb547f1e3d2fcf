"""What the verbs do at their edges: new labelled rows, kept columns, standard input, interruptions, closing lines."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

import hotrow
from forked import COMMAND, run_forked
from hotrow.run import runs
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.folder import RunFolder, resume_command

OPTIONS: dict[str, Any] = {"batch_size": 64, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1}
OPTIONS["refit"] = False
N = 1500


def rows(seed: int = 0) -> pa.Table:
    generator = np.random.default_rng(seed)
    item = generator.integers(0, 40, N)
    click = (generator.random(N) < np.where(item % 3 == 0, 0.7, 0.1)).astype(np.int64)
    big = [2**63 - 1 - i for i in range(N)]
    text = pa.array([f"i{i}" for i in item])
    columns = {"big, id": big, "price": generator.lognormal(0, 1, N), "item": text, "ts": np.arange(N) + 1_700_000_000}
    return pa.table({"click": click, **columns})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("verbs") / "my runs" / "a b$c"
    folder.parent.mkdir()
    schema = {"label": "click", "time": "ts", "categorical": ["item"], "dense": ["price"]}
    # A rate that does not fall overfits, so that the best weights are not the last.
    stops = {"epochs": 12, "early_stopping": 2, "eval_every": 1, "optimizer.sparse.lr": 20, "decay_steps": 0}
    return hotrow.fit(rows(), schema=schema, run=folder, quiet=True, **stops, **OPTIONS)


def test_eval_judges_new_labelled_rows(run: hotrow.Run, tmp_path: Path, command: Any) -> None:
    """Against scikit-learn on what predict says; times are not needed."""
    new = rows(1).drop_columns(["ts"])
    pyarrow.csv.write_csv(new, tmp_path / "new.csv")
    found = command("eval", run.path, tmp_path / "new.csv", "--json")
    scores, label = run.predict(new), new["click"].to_numpy()
    assert found["num_rows"] == N
    assert found["auc"] == pytest.approx(roc_auc_score(label, scores))
    assert found["logloss"] == pytest.approx(log_loss(label, scores), rel=1e-5)
    assert run.evaluate_rows(new)["auc"] == found["auc"]
    bad = new.set_column(0, "click", pa.array(["1"] * 7 + ["x"] + ["0"] * (N - 8)))
    pyarrow.csv.write_csv(bad, tmp_path / "bad.csv")
    err = command("eval", run.path, tmp_path / "bad.csv", code=2)
    assert "bad.csv:9 (click): 'x' is not a label" in err
    pyarrow.csv.write_csv(new.slice(0, 0), tmp_path / "empty.csv")
    err = command("eval", run.path, tmp_path / "empty.csv", code=2)
    assert "empty.csv'] has no rows" in err
    no_label = [run.path, tmp_path / "none.csv"]
    pyarrow.csv.write_csv(new.drop_columns(["click"]), tmp_path / "none.csv")
    err = command("eval", *no_label, code=2)
    assert "lacks column 'click'" in err
    err = command("eval", *no_label, "--split", "val", code=2)
    assert "give one or the other" in err


def test_eval_for_people_says_undefined_only_of_what_is(run: hotrow.Run, tmp_path: Path, command: Any) -> None:
    pyarrow.csv.write_csv(rows(1).set_column(0, "click", pa.array(["1"] * N)), tmp_path / "ones.csv")
    shown = command("eval", run.path, tmp_path / "ones.csv")
    assert re.search(r"^auc +undefined$", shown, re.MULTILINE) and re.search(r"^logloss +\d", shown, re.MULTILINE)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predict_keeps_columns(
    run: hotrow.Run, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """Ids to the last digit, in the rows' order, over batches and files of odd sizes."""
    monkeypatch.setattr("hotrow.api.EVAL_BATCH_SIZE", 97)
    new, folder = rows(2), tmp_path / "new"
    folder.mkdir()
    for start in (0, 400, 1000):
        pq.write_table(new.slice(start, {0: 400, 400: 600, 1000: 500}[start]), folder / f"part-{start:04}.parquet")
    out = tmp_path / f"scores.{suffix}"
    keep = ["--keep", "big, id", "--keep", "ts"]
    command("predict", run.path, folder, "--out", out, *keep)
    found = pq.read_table(out) if suffix == "parquet" else pyarrow.csv.read_csv(out)
    assert found.column_names == ["big, id", "ts", "score"]
    assert found["big, id"].to_pylist() == new["big, id"].to_pylist()
    assert found["ts"].to_pylist() == new["ts"].to_pylist()
    np.testing.assert_allclose(found["score"].to_numpy(), run.predict(new), rtol=1e-6)
    for wrong, message in [("bigg", "column 'bigg' to keep is not there"), ("score", "has the name of the scores")]:
        options = ("--out", tmp_path / "x.csv", "--keep", wrong)
        err = command("predict", run.path, folder, *options, code=2)
        assert message in err and not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize("given", ["open('{}')", "os.popen('cat {}')"])
def test_predict_reads_standard_input(run: hotrow.Run, tmp_path: Path, given: str) -> None:
    path, out = tmp_path / "rows", tmp_path / "scores.csv"
    pyarrow.csv.write_csv(rows(3), path)
    program = f"import os; given = {given.format(path)}; os.dup2(given.fileno(), 0); {COMMAND}"
    done = run_forked(program, "predict", run.path, "-", "--out", out, "--keep", "big, id")
    assert done.returncode == 0, done.stderr
    found = pyarrow.csv.read_csv(out)
    assert found["big, id"].to_pylist() == rows(3)["big, id"].to_pylist()
    np.testing.assert_allclose(found["score"].to_numpy(), run.predict(rows(3)), rtol=1e-5)


def test_what_is_said_at_the_end(run: hotrow.Run) -> None:
    """The step is that of the weights that were scored."""
    chosen = run.record.chosen_step
    log = (run.path / "log.txt").read_text()
    assert chosen < run.record.steps, "the best weights are the last: the test shows nothing"
    assert f"test at step {chosen}:" in log and f"test at step {run.record.steps}:" not in log
    measured = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in measured if line.get("split") == "test"] == [chosen]
    for line in run.next_commands():
        assert str(run.path) in shlex.split(line), line
    assert shlex.split(resume_command(run.path))[-1] == str(run.path)


def test_a_lost_manifest_is_said_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hotrow.fit(
        rows(), label="click", time="ts", run=tmp_path / "run", quiet=True, epochs=2, early_stopping=None,
        **{"checkpoint.every": 10, "checkpoint.keep_last": 3}, **OPTIONS,
    )  # fmt: skip
    steps = list(list_checkpoints(run.path / "checkpoints"))
    (run.path / "checkpoints" / f"step-{steps[-1]}" / "manifest.json").unlink()
    lost = hotrow.load(run.path)
    with pytest.warns(UserWarning, match=rf"checkpoint of step {steps[-1]} is missing or has lost its manifest; step"):
        lost.predict(rows(1).slice(0, 10))
    assert RunFolder.open(run.path).record.warnings["checkpoint_lost"]["count"] == 1
    resumed = runs.resume(run.path, ["train.epochs=3"], quiet=True)
    assert resumed.record.warnings["checkpoint_lost"]["count"] == 2
    assert f"lost its manifest; the run goes on from step {steps[-2]}\n" in capsys.readouterr().err


def test_options_of_hot_that_do_nothing_are_said(tmp_path: Path) -> None:
    options = {**OPTIONS, "hot.rate": 20, "hot.window": 8}
    run = hotrow.fit(rows(), label="click", run=tmp_path / "a", quiet=True, max_steps=1, **options)
    text = run.record.warnings["unused_hot_options"]["text"]
    assert text == "hot.schedule is none, which does not use hot.rate, hot.window"
    used = {**OPTIONS, "hot.schedule": "window", "hot.window": 8}
    run = hotrow.fit(rows(), label="click", run=tmp_path / "b", quiet=True, max_steps=1, **used)
    assert "unused_hot_options" not in run.record.warnings


AS_IN_A_TERMINAL = """
import signal
from hotrow.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with it ignored
print("ready", flush=True)
main()
"""


@pytest.mark.parametrize("after_s", [0.02, 0.3, 1.2])
def test_ctrl_c_at_any_time_ends_without_a_traceback(run: hotrow.Run, after_s: float) -> None:
    line = [sys.executable, "-c", AS_IN_A_TERMINAL, "eval", str(run.path)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode in (-signal.SIGINT, 130, 0), err


EVERY_VERB = """
import signal, sys
from hotrow.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)
verbs = {"demo": "", "prepare": "csv x --out y", "predict": "x y --out z", "export": "x --out y", "doctor": "",
         "apply": "x y --out z", "serve": "x", "days": "x --out y",
         "plan": "x", "runs": "", "tune": "x",
         **dict.fromkeys(("fit", "init", "train", "eval", "inspect", "report", "check"), "x")}
for name, options in verbs.items():
    sys.argv = ["hotrow", name, *options.split()]
    try:
        main()
    except SystemExit as error:
        print(name, error)
from hotrow.cli.app import app
print({command.name for command in app.registered_commands} == {*verbs})
"""


def test_no_verb_imports_torch_with_pythons_handler_of_ctrl_c(tmp_path: Path) -> None:
    """A stub of torch says what Ctrl-C would do; KeyboardInterrupt there would come to torch's own initialisation."""
    (tmp_path / "torch.py").write_text("import signal\nraise SystemExit(signal.getsignal(signal.SIGINT).name)\n")
    line, environ = [sys.executable, "-c", EVERY_VERB], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=False)
    *verbs, all_of_them = done.stdout.splitlines()
    assert (done.returncode, all_of_them) == (0, "True"), done.stderr
    assert [line for line in verbs if not line.endswith(" SIG_DFL")] == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_verb_says_so(sent: signal.Signals, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.setattr("hotrow.cli.tools.check", lambda path: os.kill(os.getpid(), sent))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    err = command("check", "x", code=128 + sent)
    assert err == "hotrow: aborted\n"
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_an_error_of_ours_is_called_one(monkeypatch: pytest.MonkeyPatch, run: hotrow.Run, command: Any) -> None:
    def broken(path: object) -> object:
        raise KeyError("num_bytes")

    monkeypatch.setattr("hotrow.cli.tools.check", broken)
    err = command("check", run.path, code=1)
    assert "it is a bug in hotrow (KeyError: 'num_bytes')" in err and "Traceback" not in err


def test_the_version(command: Any) -> None:
    assert command("--version") == f"hotrow {hotrow.__version__}\n"
