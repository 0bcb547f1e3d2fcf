"""W&B and MLflow as sinks: fakes take the place of both packages and keep what they are given; then the packages
themselves, if they are installed."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.run import runs
from hotrow.run.folder import RunFolder

Numbers = dict[tuple[str, str, int], float]
"""By run, name and step."""


class Tracker(ModuleType):
    """What both packages have that hotrow calls. A server that is away fails at each number."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.numbers: Numbers = {}
        self.configs: dict[str, dict[str, str]] = {}
        self.open: str | None = None
        self.away = False

    def take(self, name: str, value: float, step: int) -> None:
        if self.away:
            raise ConnectionError("the server is away")
        assert self.open is not None
        self.numbers[self.open, name, step] = value


class Wandb(Tracker):
    def init(self, *, id: str, name: str, config: dict[str, str], resume: str) -> Wandb:
        assert resume == "allow" and not set(id) & set("/\\#?%:")
        self.open, self.configs[id] = id, config
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        (name, value), (_, step) = values.items()
        self.take(name, value, step)

    def finish(self) -> None:
        self.open = None


class Mlflow(Tracker):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tags: dict[str, dict[str, str]] = {}

    def search_runs(self, *, filter_string: str, output_format: str) -> list[Any]:
        assert output_format == "list"
        found = [run for run, tags in self.tags.items() if filter_string == f"tags.hotrow = '{tags['hotrow']}'"]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in found]

    def start_run(self, *, run_id: str | None = None, run_name: str = "", tags: dict[str, str] | None = None) -> None:
        self.open = run_id or f"run {len(self.tags)}"
        if run_id is None:
            assert tags is not None
            self.tags[self.open] = tags

    def log_params(self, params: dict[str, str]) -> None:
        assert self.open is not None
        self.configs[self.open] = params

    def log_metric(self, name: str, value: float, *, step: int) -> None:
        self.take(name, value, step)

    def end_run(self) -> None:
        self.open = None


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> PackedDataset:
    return make_dataset(tmp_path_factory.mktemp("sinks") / "data")


@pytest.fixture(params=["wandb", "mlflow"])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    fake = {"wandb": Wandb, "mlflow": Mlflow}[request.param](request.param)
    monkeypatch.setitem(sys.modules, request.param, fake)
    return fake


def train(dataset: PackedDataset, run: Path, *sinks: str) -> RunFolder:
    model = {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}
    options = {"batch_size": 64, "threads": 1, "log_every": 2, "max_steps": 4, "sinks": list(sinks)}
    raw = {"data": str(dataset.path), "run": str(run), "model": model, "train": options, "memory": "dram"}
    return runs.train(make_config(raw), quiet=True)


def scalars(run: RunFolder) -> dict[tuple[str, int], float]:
    """The numbers of metrics.jsonl, by the name that TensorBoard gives them and by step."""
    found = {}
    for line in run.measurements():
        for name, value in line.items():
            inner = value if isinstance(value, dict) else {"": value}
            for tag, number in inner.items() if name != "step" else ():
                if isinstance(number, int | float):
                    path = "/".join(part for part in (line.get("split", line["kind"]), name, tag) if part)
                    found[path, line["step"]] = number
    return found


def test_a_tracker_gets_all_numbers_and_follows_a_resumed_run(
    dataset: PackedDataset, tmp_path: Path, tracker: Tracker
) -> None:
    run = train(dataset, tmp_path / "a run", tracker.__name__)
    run = runs.resume(run.path, ["train.max_steps=8"], quiet=True)
    assert tracker.open is None, "closed at the end"
    (key,) = tracker.configs
    assert tracker.configs[key]["train.batch_size"] == "64"
    assert {run for run, *_ in tracker.numbers} == {key}
    assert scalars(run).items() <= {(name, step): v for (_, name, step), v in tracker.numbers.items()}.items()
    train(dataset, tmp_path / "b", tracker.__name__)
    assert len(tracker.configs) == 2, "another run is another one there too"


def test_a_tracker_that_fails_costs_a_warning_and_not_the_run(
    dataset: PackedDataset, tmp_path: Path, tracker: Tracker
) -> None:
    tracker.away = True
    run = train(dataset, tmp_path / "run", tracker.__name__)
    assert run.record.status == "finished"
    assert run.record.warnings["sink_lost"]["count"] == 1


@pytest.mark.parametrize("method", [("init", "start_run"), ("finish", "end_run")], ids=["to begin", "to end"])
def test_a_tracker_may_fail_to_begin_or_to_end(
    dataset: PackedDataset, tmp_path: Path, tracker: Tracker, method: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(**_: Any) -> None:
        raise ConnectionError("nobody has logged in")

    monkeypatch.setattr(tracker, method[isinstance(tracker, Mlflow)], away)
    run = train(dataset, tmp_path / "run", tracker.__name__)
    assert run.record.status == "finished"
    assert "nobody has logged in" in run.record.warnings["sink_lost"]["text"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_absent_tracker_is_refused_before_a_folder_is_made(
    dataset: PackedDataset, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"train.sinks .*pip install {name}"):
        train(dataset, tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


def wandb_records(path: Path) -> Iterator[Any]:
    """The records that W&B has put into a file: 7 bytes, then LevelDB's log format, whose blocks have 32 KiB."""
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record

    content, at, begun = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if kind:  # 0 fills the rest of a block
            begun += content[at + 7 : at + 7 + length]
            at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(begun)
            begun = b""
        if not kind or -at % 32768 < 7:
            at += -at % 32768


@pytest.mark.slow
def test_mlflow_itself_has_all_numbers(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run = train(dataset, tmp_path / "a run", "mlflow")
    run = runs.resume(run.path, ["train.max_steps=8"], quiet=True)
    assert "sink_lost" not in run.record.warnings
    client = mlflow.MlflowClient()
    (found,) = client.search_runs(["0"])
    assert found.data.params["train.batch_size"] == "64"
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    kept = {(name, one.step): one.value for name, history in histories.items() for one in history}
    assert scalars(run).items() <= kept.items()


@pytest.mark.slow
def test_wandb_itself_has_all_numbers(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = train(dataset, tmp_path / "a run", "wandb")
    run = runs.resume(run.path, ["train.max_steps=8"], quiet=True)
    assert "sink_lost" not in run.record.warnings
    kept, keys, options = {}, set(), {}
    for record in (one for path in tmp_path.glob("wandb/*/*.wandb") for one in wandb_records(path)):
        if record.HasField("run"):
            keys.add(record.run.run_id)
            options |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            kept |= {(name, row["step"]): value for name, value in row.items()}
    assert len(keys) == 1 and options["train.batch_size"] == "64"
    assert scalars(run).items() <= kept.items()
