"""fit, load, predict: raw rows in, a model and scores out, for paths and for frames."""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

import hotrow
from hotrow import api
from hotrow.base.progress import Progress
from hotrow.data.chunk import RowError
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.prepare.prepare import run_prepare
from hotrow.run import choice, runs, said
from hotrow.run.folder import RunFolder
from hotrow.run.runs import resume
from loops import looped
from prepare_data import file_hashes
from sampled import sampled

OPTIONS = {"batch_size": 64, "epochs": 3, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1}
OPTIONS |= {"refit": False}


def clicks(num_rows: int, seed: int = 0) -> pa.Table:
    """Item decides the click, price helps."""
    generator = np.random.default_rng(seed)
    item, user = generator.zipf(1.4, num_rows) % 60, generator.integers(0, 300, num_rows)
    price = generator.lognormal(2, 1, num_rows)
    chance = np.where(item % 3 == 0, 0.75, 0.12) + 0.1 * (price > 8)
    columns = {
        "user_id": pa.array([f"u{i}" for i in user]),
        "item_id": pa.array([f"i{i}" for i in item]).dictionary_encode(),
        "price": price.round(3),
        "click": (generator.random(num_rows) < chance).astype(np.int8),
        "ts": np.arange(num_rows) + 1_700_000_000,
    }
    return pa.table(columns)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("fit")
    return hotrow.fit(clicks(4000), label="click", time="ts", run=folder / "run", quiet=True, **OPTIONS)


def test_fit_on_a_frame_learns(run: hotrow.Run) -> None:
    assert run.metrics["split"] == "test"
    assert run.metrics["auc"] > 0.75
    assert run.record.metrics["test"]["num_rows"] == pytest.approx(400, abs=2)
    assert run.summary()["auc"] == run.metrics["auc"]


@pytest.mark.slow
def test_fit_learns_from_few_rows_with_its_own_defaults(tmp_path: Path) -> None:
    """3,200 training rows, an item's six or so: nobody would tune for these, so the defaults must find the effect."""
    generator = np.random.default_rng(0)
    chance = np.where(generator.random(500) < 0.5, 0.6, 0.2)
    item, user = generator.integers(0, 500, 4000), generator.integers(0, 2000, 4000)
    click = (generator.random(4000) < chance[item]).astype(np.int8)
    logs = pa.table({"click": click, "item": pa.array([f"i{i}" for i in item]), "user": user})
    run = hotrow.fit(logs, label="click", run=tmp_path / "run", quiet=True, threads=1)
    assert run.metrics["auc"] > 0.6  # 0.70 with the true chances


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_full_disk_while_scoring_names_the_file_and_leaves_none(
    run: hotrow.Run, tmp_path: Path, fill_disk: Callable[[int], Any], suffix: str
) -> None:
    out = tmp_path / f"scores{suffix}"
    message = rf"disk full while writing scores in {tmp_path}, writing {out} \(.* No scores are kept; .*same command"
    for room in (0, 500):
        with fill_disk(room), pytest.raises(OSError, match=message):
            run.write_scores(clicks(2000), out)
        assert list(tmp_path.iterdir()) == []
    assert run.write_scores(clicks(2000), out) == 2000


def test_predictions_of_the_test_rows_have_the_test_metrics(run: hotrow.Run) -> None:
    table = clicks(4000)
    last = table.slice(4000 - run.metrics["num_rows"])  # the split is by time
    scores = run.predict(last)
    assert scores.dtype == np.float32
    labels = last["click"].to_numpy()
    assert roc_auc_score(labels, scores) == pytest.approx(run.metrics["auc"], abs=1e-9)
    assert log_loss(labels, scores.astype(np.float64)) == pytest.approx(run.metrics["logloss"], abs=1e-5)


def test_predict_from_files_needs_no_label_and_takes_unseen_ids(run: hotrow.Run, tmp_path: Path) -> None:
    new = clicks(50, seed=9).drop_columns(["click", "ts"])
    new = new.set_column(0, "user_id", pa.array(["never seen"] * 50))
    pq.write_table(new, tmp_path / "new.parquet")
    pa.csv.write_csv(new, tmp_path / "new.csv")
    scores = run.predict(new)
    assert np.isfinite(scores).all()
    assert ((scores > 0) & (scores < 1)).all()
    np.testing.assert_array_equal(scores, run.predict(tmp_path / "new.parquet"))
    np.testing.assert_array_equal(scores, run.predict(str(tmp_path / "*.csv")))


def test_scores_are_written(run: hotrow.Run, tmp_path: Path) -> None:
    table = clicks(70, seed=3)
    expected = run.predict(table)
    for suffix, read in ((".parquet", pq.read_table), (".csv", pa.csv.read_csv)):
        out = tmp_path / f"scores{suffix}"
        assert run.write_scores(table, out) == 70
        np.testing.assert_allclose(read(out)["score"].to_numpy(), expected, rtol=1e-6)
        with pytest.raises(ValueError, match="exists already"):
            run.write_scores(table, out)
    with pytest.raises(ValueError, match=r"ends in '\.txt'; choose \.parquet or \.csv"):
        run.write_scores(table, tmp_path / "scores.txt")
    with pytest.raises(ValueError, match=r"there is no folder .*absent; make it"):
        run.write_scores(table, tmp_path / "absent" / "scores.csv")


def test_a_loaded_run_is_the_run(run: hotrow.Run) -> None:
    table = clicks(100, seed=4)
    loaded = hotrow.load(run.path)
    np.testing.assert_array_equal(loaded.predict(table), run.predict(table))
    assert loaded.metrics == run.metrics
    assert loaded.evaluate("test")["auc"] == run.metrics["auc"]


def test_raw_rows_in_place_of_a_split_are_told_where_to_go(run: hotrow.Run) -> None:
    rows: Any = clicks(10).to_pydict()
    for call in (run.evaluate, run.judged):
        for arguments in ({"split": rows}, {"data": rows}):
            with pytest.raises(ValueError, match="evaluate_rows"):
                call(**arguments)


def test_a_run_predicts_without_its_dataset(run: hotrow.Run, tmp_path: Path) -> None:
    import shutil

    moved = tmp_path / "moved"
    shutil.copytree(run.path, moved, ignore=shutil.ignore_patterns("data", "tensorboard"))
    table = clicks(30, seed=5)
    np.testing.assert_array_equal(hotrow.load(moved).predict(table), run.predict(table))


def test_fit_on_a_packed_dataset(run: hotrow.Run, tmp_path: Path) -> None:
    again = hotrow.fit(run.path / "data", run=tmp_path / "again", quiet=True, **OPTIONS)
    assert again.metrics["auc"] == run.metrics["auc"]
    with pytest.raises(ValueError, match="label is for raw data"):
        hotrow.fit(run.path / "data", label="click")


@pytest.mark.slow_but("frame-True")
@pytest.mark.parametrize(("kind", "named"), sampled(["frame", "file"], [False, True], pairs=False))
def test_fit_stopped_in_preparation_goes_on_by_the_same_call(
    kind: str, named: bool, run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data: Any = clicks(4000)
    if kind == "file":
        pq.write_table(data, "clicks.parquet")
        data = "clicks.parquet"
    options: dict[str, Any] = {"label": "click", "time": "ts", "run": "mine" if named else None, **OPTIONS}

    def press(report: Progress) -> None:
        if report.stage == "count":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread shall see it before this worker is through

    with monkeypatch.context() as patch:
        small = {"options": Options(rows_per_chunk=50)}
        patch.setattr(choice, "prepare", lambda opened, out, **how: prepare(opened, out, **(how | small)))
        patch.setattr(choice, "progress_bar", lambda **_: nullcontext(press))
        with pytest.raises(Interrupted, match="run the same command to continue"):
            hotrow.fit(data, **options)
    begun = sorted(path.parent for path in Path().glob("**/run.json"))
    with pytest.raises(ValueError, match=r"was stopped while it prepared its data.* to continue, run again: "):
        resume(begun[0])
    said: list[str] = []
    monkeypatch.setattr(choice, "prepare", lambda opened, out, **_: prepare(opened, out, announce=said.append))
    again = hotrow.fit(data, quiet=True, **options)
    assert any("continuing the work found in" in line for line in said)
    assert [again.path] == begun == sorted(path.parent for path in Path().glob("**/run.json"))
    assert again.record.status == "finished" and again.record.error is None
    assert again.metrics["auc"] == run.metrics["auc"]
    hashes, plain = file_hashes(again.path / "data"), file_hashes(run.path / "data")
    assert kind == "file" or hashes == plain
    assert hashes | {"dataset.json": ""} == plain | {"dataset.json": ""}
    assert named or hotrow.fit(data, quiet=True, **options).path != again.path, "a run that trained is not taken up"


def test_fit_stopped_between_preparation_and_training_does_not_prepare_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = {"label": "click", "run": tmp_path / "run", "quiet": True, **OPTIONS}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(api, "train", stop)
        hotrow.fit(clicks(1000), **options)
    monkeypatch.setattr(choice, "prepare", stop)
    with pytest.raises(ValueError, match="exists already and is never overwritten"):
        hotrow.fit(clicks(1001), **options)
    assert hotrow.fit(clicks(1000), **options).record.status == "finished"


def test_two_runs_of_one_preparation_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin = partial(RunFolder.begin, None, name="clicks", preparation="p")
    with begin() as first, begin() as second:
        assert first.path != second.path
    with begin() as again:
        assert again.path == second.path, "the newest"
        with begin() as other:
            assert other.path == first.path


def test_options_are_found_by_their_last_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"option 'lr' may mean optimizer\.dense\.lr or optimizer\.sparse\.lr"):
        hotrow.fit(clicks(100), label="click", run=tmp_path / "a", lr=0.1)
    with pytest.raises(ValueError, match=r"unknown option 'epoch'; did you mean 'epochs'"):
        hotrow.fit(clicks(100), label="click", run=tmp_path / "b", epoch=1)
    with pytest.raises(ValueError, match=r"fit: train\.epochs is 0; allowed: an integer >= 1"):
        hotrow.fit(clicks(100), label="click", run=tmp_path / "c", epochs=0)
    assert list(tmp_path.iterdir()) == [], "nothing is made before the options are known to be good"


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run: it has no run\.json"):
        hotrow.load(tmp_path)
    with pytest.raises(ValueError, match="label column 'klick' is not there; did you mean 'click'"):
        hotrow.fit(clicks(100), label="klick", run=tmp_path / "c", quiet=True)
    assert not (tmp_path / "c").exists()
    table = clicks(100)
    spoilt = table.set_column(table.schema.get_field_index("click"), "click", pa.array([0, 1] * 49 + [0, None]))
    with pytest.raises(RowError, match=r"<frame>:100 \(click\)"):
        hotrow.fit(spoilt, label="click", run=tmp_path / "c", quiet=True)
    assert hotrow.load(tmp_path / "c").record.status == "failed"
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        hotrow.load(tmp_path / "c").predict(clicks(5))


def test_no_second_process_trains_in_a_run(tmp_path: Path) -> None:
    run = hotrow.fit(clicks(1000), label="click", run=tmp_path / "run", max_steps=2, quiet=True, **OPTIONS)
    with RunFolder.open(run.path).claimed(), pytest.raises(ValueError, match="another process trains in"):
        resume(run.path, ["train.max_steps=4"], quiet=True)
    assert resume(run.path, ["train.max_steps=4"], quiet=True).record.steps == 4


def bits(run: hotrow.Run) -> dict[str, str]:
    """Hashes of the tensors of the checkpoint that a run predicts with."""
    return {name: digest for name, digest in file_hashes(run.checkpoint).items() if name.endswith(".safetensors")}


def test_a_file_and_a_frame_give_the_same_bits(tmp_path: Path) -> None:
    """With a split by time and columns told; CSV, Parquet, pyarrow and polars."""
    table = clicks(1500)
    plain = table.set_column(1, "item_id", table["item_id"].cast(pa.string()))
    pyarrow.csv.write_csv(plain, tmp_path / "x.csv")
    pq.write_table(plain, tmp_path / "x.parquet")
    polars = pytest.importorskip("polars")
    sources = {"csv": tmp_path / "x.csv", "parquet": tmp_path / "x.parquet", "arrow": plain}
    sources["polars"] = polars.from_arrow(plain)
    told: dict[str, Any] = {"label": "click", "time": "ts", "categorical": ["user_id", "item_id"], "dense": ["price"]}
    runs = {
        name: hotrow.fit(data, run=tmp_path / name, quiet=True, **told, **OPTIONS, max_steps=20)
        for name, data in sources.items()
    }
    expected = bits(runs["csv"])
    assert expected
    for name, run in runs.items():
        assert bits(run) == expected, name
        assert run.metrics == runs["csv"].metrics, name


def test_fit_takes_a_schema_a_split_and_a_recipe(tmp_path: Path) -> None:
    table = clicks(1500)
    schema = {"label": "click", "categorical": ["user_id"], "dense": [{"column": "price", "transform": "log1p_clip0"}]}
    (tmp_path / "schema.yaml").write_text(json.dumps(schema))
    recipe = {"data": "elsewhere", "model": {"embedding_dim": 2, "bottom_mlp": [4], "top_mlp": [4]}}
    recipe |= {"train": {"batch_size": 128, "epochs": 1, "threads": 1}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    split = {"kind": "random", "fractions": [0.5, 0.25, 0.25], "seed": 3}
    by_content = hotrow.fit(table, schema=schema, split=split, config=recipe, run=tmp_path / "a", quiet=True)
    files = {"schema": tmp_path / "schema.yaml", "config": tmp_path / "recipe.yaml"}
    by_path = hotrow.fit(table, split=split, run=tmp_path / "b", quiet=True, **files)
    assert bits(by_content) == bits(by_path)
    assert by_content.record.rows["test"] == pytest.approx(375, abs=60)
    info = PackedDataset.open(tmp_path / "a" / "data").info
    assert (info.feature_names, info.dense_names) == (("user_id",), ("price",))
    config = (tmp_path / "a" / "config.yaml").read_text()
    assert "batch_size: 128" in config and "embedding_dim: 2" in config and "first_order: false" in config
    more = hotrow.fit(table, schema=schema, config=recipe, run=tmp_path / "c", quiet=True, batch_size=64)
    assert "batch_size: 64" in (more.path / "config.yaml").read_text()


@looped(
    ("options", "message"),
    [
        (
            {"schema": {"label": "click", "categorical": ["user_id"]}, "label": "click"},
            "label is a hint for guessing a schema",
        ),
        ({"schema": "nowhere.yaml"}, r"nowhere.yaml: No such file or directory; `hotrow init"),
        ({"schema": {"label": "click"}}, "schema: categorical is missing"),
        ({"config": "nowhere.yaml"}, "config nowhere.yaml: No such file or directory; pass a YAML file"),
        ({"config": {"trane": {}}}, "unknown key trane; did you mean 'train'"),
        ({"split": "chrono"}, "split.kind is 'chrono'"),
        ({"split": {"share": 1}}, "split has 'share'; it may have kind, fractions and seed"),
        ({"split": {"fractions": [1, 1, 1]}}, "fractions .* must be"),
        ({"dense": "price"}, r"dense is the text 'price'; give a list of names: dense=\['price'\]"),
        ({"dense": ["price"], "categorical": ["price"]}, "column 'price' is listed in categorical and in dense"),
        ({"model": "dlmr"}, "model.name is 'dlmr'"),
        ({"epochs": object()}, "option epochs is <object object"),
        ({"config": ["nobody"]}, r"config is \['nobody'\]; pass the path of a YAML file"),
        ({"config": {1: {}}}, "key 1 is not a text"),
        ({"config": {"train": {None: 1}}}, "key None is not a text"),
        ({"schema": [1.5]}, r"schema is \[1.5\]; pass the path of a YAML file"),
        ({"split": ["nobody"]}, r"split is \['nobody'\]; give time, random or reference"),
        ({"label": -0.5}, "label is -0.5; give a list of the names of columns"),
        ({"lists": 5}, "lists is 5; give a list of the names"),
        ({"dense": [None]}, r"dense is \[None\]; give a list of the names"),
        ({"run": 5}, "run is 5; give the path of a new folder"),
        ({"run": "\udcff"}, r"run is '\\udcff'; it must be valid Unicode text"),
        ({"run": "."}, r"run folder \. exists already"),
        ({"run": "/dev/null/run"}, "/dev/null/run cannot be made: /dev/null is not a folder"),
    ],
)
def test_what_is_wrong_with_options_is_said_before_data_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        hotrow.fit("absent.csv", quiet=True, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_leak_that_was_named_is_counted(tmp_path: Path) -> None:
    table = clicks(1500)
    told = table.append_column(
        "dwell", pa.array(np.asarray(table["click"]) * 10 + np.random.default_rng(0).random(1500))
    )
    run = hotrow.fit(told, label="click", dense=["dwell"], run=tmp_path / "run", quiet=True, **OPTIONS, max_steps=5)
    assert "column dwell may give the label away: it is nearly the label" in run.record.warnings["leak"]["text"]
    plain = hotrow.fit(told, label="click", run=tmp_path / "plain", quiet=True, **OPTIONS, max_steps=5)
    assert "leak" not in plain.record.warnings and "dwell" in (plain.path / "log.txt").read_text()
    assert "dwell" not in PackedDataset.open(plain.path / "data").info.dense_names
    assert "dwell" in plain.record.warnings["schema_guess"]["text"], "left out, and said so"
    assert "too few to judge by" in plain.record.warnings["few_positive_test_rows"]["text"]
    again = hotrow.fit(plain.path / "data", run=tmp_path / "again", quiet=True, **OPTIONS, max_steps=5)
    assert again.record.warnings["schema_guess"] == plain.record.warnings["schema_guess"]
    for run in (plain, again):
        assert "schema_guess" in (run.path / "report.html").read_text()


def test_what_the_terminal_says_is_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of Python: from before there is a folder, from whatever training calls, and from another thread."""

    def warning(text: str, function: Callable[..., Any], *, thread: bool = False) -> Callable[..., Any]:
        def warn_and_call(*arguments: Any, **options: Any) -> Any:
            warn = partial(warnings.warn, text, stacklevel=1)
            if thread:
                beside = threading.Thread(target=warn)
                beside.start()
                beside.join()
            else:
                warn()
            return function(*arguments, **options)

        return warn_and_call

    decide, shown = staticmethod(warning("of the machine", runs.Setup.decide)), warnings.showwarning
    monkeypatch.setattr(runs.Setup, "decide", decide)
    monkeypatch.setattr(runs, "_begin", warning("of the start", runs._begin))
    monkeypatch.setattr(said, "_of_disks", warning("from beside", said._of_disks, thread=True))
    with pytest.warns(UserWarning, match="of the machine"):
        run = hotrow.fit(clicks(1500), label="click", run=tmp_path / "run", quiet=True, **OPTIONS, max_steps=5)
    assert run.record.warnings["shown_warning"] == {"count": 3, "text": "of the machine"}
    assert "of the machine" in (run.path / "report.html").read_text()
    assert warnings.showwarning is shown
    with pytest.warns(UserWarning, match="of the machine"):
        again = resume(run.path, ["train.max_steps=8"], quiet=True)
    assert again.record.warnings["shown_warning"]["count"] == 6


def test_a_model_that_is_worse_than_none_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Labels of the later half of the rows mean the opposite."""
    table = clicks(3000)
    label = np.asarray(table["click"])
    turned = table.set_column(3, "click", pa.array(np.where(np.arange(3000) < 2400, label, 1 - label)))
    run = hotrow.fit(turned, label="click", time="ts", run=tmp_path / "run", **OPTIONS)
    said = capfd.readouterr().err
    for code in ("worse_than_a_constant", "auc_below_half"):
        text = run.record.warnings[code]["text"]
        assert "the test split" in text and text in said
    with pytest.warns(UserWarning, match="these rows is below 0.5"):
        run.evaluate_rows(turned.slice(2400))
    assert set(run.told()["warnings"]) >= {"worse_than_a_constant", "auc_below_half"}


def test_bad_rows_that_were_left_out_are_in_the_run(tmp_path: Path) -> None:
    pyarrow.csv.write_csv(
        clicks(1500).set_column(1, "item_id", clicks(1500)["item_id"].cast(pa.string())), tmp_path / "x.csv"
    )
    with (tmp_path / "x.csv").open("a") as file:
        file.write("broken\n")
    run_prepare("csv", str(tmp_path / "x.csv"), tmp_path / "data", label="click", skip_bad_rows=3)
    run = hotrow.fit(tmp_path / "data", run=tmp_path / "run", quiet=True, **OPTIONS, max_steps=5)
    assert "1 bad rows were left out" in run.record.warnings["rows_skipped"]["text"]


def test_a_published_layout_has_the_defaults_too(tmp_path: Path) -> None:
    """fit adds statistics to it, and leaves ids out that are seen once; prepare keeps it as published."""
    generator = np.random.default_rng(0)
    lines = [
        "\t".join([str(i % 4 // 3), *map(str, generator.integers(0, 9, 13)), *[f"{k:08x}" for k in ids]])
        for i, ids in enumerate(generator.integers(0, 40, (300, 26)))
    ]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    run = hotrow.fit(tmp_path / "train.txt", run=tmp_path / "run", max_steps=2, quiet=True, **OPTIONS)
    packed = run_prepare("criteo", tmp_path / "train.txt", tmp_path / "packed")
    names = PackedDataset.open(run.path / "data").info.dense_names
    assert names[:13] == packed.info.dense_names
    assert len(names) == 13 + 3 * 26
    assert len(run.predict(tmp_path / "train.txt")) == 300


def test_a_fit_that_failed_on_a_bad_row_goes_on_once_the_row_is_corrected(tmp_path: Path) -> None:
    """Under the same name; a run that was stopped, or has trained, is never taken for other rows."""
    lines = ["click,user", *(f"{i % 2},u{i % 9}" for i in range(400))]
    logs, run, told = tmp_path / "x.csv", tmp_path / "run", {"label": "click", "epochs": 1, "quiet": True}
    logs.write_text("\n".join([*lines[:200], "7,u1", *lines[200:]]) + "\n")
    with pytest.raises(ValueError, match=r"x\.csv:201 .*'7' is not a label"):
        hotrow.fit(logs, run=run, **told)
    assert not (run / "rows").exists() and not (run / "data").exists(), "nothing is left of the rows"
    logs.write_text("\n".join(lines) + "\n")
    assert hotrow.fit(logs, run=run, **told).record.status == "finished"
    assert not (run / "rows").exists()
    with pytest.raises(ValueError, match="exists already and is never overwritten"):
        hotrow.fit(logs, run=run, **told)
