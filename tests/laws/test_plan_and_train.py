"""`hotrow plan` and `hotrow train` accept and refuse the same configs, and refuse them in the same words."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from golden.data import TBSM, write_dataset
from hotrow.cli.plan import plan
from hotrow.config.load import apply_overrides, load_config, make_config, options
from hotrow.run import runs

MEMORY_BYTES = 1 << 30
"""What the tests say this process may use: it must not change between the two verbs."""
TRAIN = {"batch_size": 32, "max_steps": 1, "threads": 1, "eval_every": None}
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [4], "top_mlp": [4]},
    "dcn": {"name": "dcn", "embedding_dim": 8, "deep_mlp": [4], "num_cross_layers": 1},
    "tbsm": TBSM,
    "two_tower": {"name": "two_tower", "embedding_dim": 8, "item": ["small"], "tower_mlp": [4]},
}
FIXED = {"data", "run", "from_run", "model.name", "train.max_steps"}
"""Options that are not drawn; a run's folder may not exist yet, nor a package, of which a plan says nothing."""
WIDTHS: list[Any] = [[], [8], [16, 8], [0], 4]
VALUES: dict[str, list[Any]] = {
    "device": ["auto", "cpu", "cuda", "tpu"],
    "memory": ["auto", "dram", {"dram": "400KiB"}, "disk"],
    "model.embedding_dim": [1, 16, 24, 0, {"default": 8, "large": 4}, {"default": 8, "none": 4}, {"small": 4}],
    "model.embedding_init": [None, 0, 0.1, -1],
    "model.objective": ["binary_cross_entropy", "sampled_softmax", "hinge"],
    "model.bottom_mlp": WIDTHS,
    "model.top_mlp": WIDTHS,
    "model.concatenated": [True, False, 1],
    "model.first_order": [True, False, 1],
    "model.members": [1, 3, 0],
    "model.dropout": [0, 0.1, 1],
    "model.embedding_dropout": [0, 0.1, 1],
    "model.history_steps": [1, 4, 20, 0],
    "model.attention_mlp": WIDTHS,
    "model.final_mlp": WIDTHS,
    "model.num_cross_layers": [1, 3, 0],
    "model.low_rank": [None, 2, 0],
    "model.deep_mlp": WIDTHS,
    "model.second_order": [True, False, 1],
    "model.structure": ["parallel", "stacked", "none"],
    "model.first_mlp": WIDTHS,
    "model.second_mlp": WIDTHS,
    "model.experts": [1, 3, 0],
    "model.expert_mlp": WIDTHS,
    "model.tower_mlp": WIDTHS,
    "model.item": [["item"], ["small"], []],
    "model.user": [None, ["large"], ["small"]],
    "model.dense_inputs": ["user", "none", "item"],
    "model.vector_dim": [8, 0],
    "model.temperature": [0.1, 0],
    "optimizer.dense.name": ["sgd", "adagrad", "adam", "adamw", "lion"],
    "optimizer.dense.lr": [0.01, 1, 0],
    "optimizer.dense.weight_decay": [None, 0, 0.1, -1],
    "optimizer.sparse.name": ["sgd", "adagrad", "row_wise_adagrad", "adam", "ftrl", "lion"],
    "optimizer.sparse.lr": [0.01, 1, -1],
    "optimizer.sparse.initial_accumulator_value": [None, 0.1, -1],
    "optimizer.sparse.l1": [None, 0.1, -1],
    "optimizer.sparse.l2": [None, 0.1, -1],
    "optimizer.schedule.warmup_steps": [0, 10, -1],
    "optimizer.schedule.decay_start_step": [None, 5, 20],
    "optimizer.schedule.decay_steps": [0, 10],
    "train.batch_size": [1, 3, 500, 5000, 10**9, 0],
    "train.micro_batches": [None, 1, 3, 64, 70_000],
    "train.epochs": [1, 3, 0],
    "train.shuffle": [True, False],
    "train.eval_every": [None, 0.5, 2, 2.5, 0],
    "train.early_stopping": [None, 1, 0],
    "train.monitor": [None, "auc", "gauc", "logloss", "recall"],
    "train.seed": [0, 7, -1],
    "train.threads": ["auto", 1, 2, 1024, 0],
    "train.precision": ["fp32", "fp16", "split_bf16", "int8"],
    "train.dense_dtype": ["fp32", "tf32", "bf16"],
    "train.pos_weight": [1, 3, 0],
    "train.clip_norm": [None, 1, 0],
    "train.freeze": [[], ["dense"], ["tables"], ["large"], ["dense", "tables"], ["none"]],
    "train.nonfinite": ["raise", "skip"],
    "train.log_every": [1, 50, 0],
    "metrics.by": [None, "large", "list", "none"],
    "calibration.method": [None, "platt", "slope", "isotonic", "none"],
    "calibration.negatives_kept": [1, 0.1, 0],
    "checkpoint.every": [None, 0.5, 1.5, 3],
    "checkpoint.keep_last": [1, 2, 0],
    "memory.hbm": [None, "1MiB", "4KiB", 0, "much"],
    "memory.dram": ["auto", "400KiB", "90KiB", "1KiB", "3GiB", 0, "much"],
    "memory.ssd": [None, "FOLDER/ssd", "/dev/null/x"],
    "memory.file": [None, "FOLDER/file", "/dev/null/x"],
    "memory.file_bytes": [None, "100KiB", "1MiB", 0],
    "memory.writes": ["auto", "in_place", "gathered"],
    "memory.lookahead": [0, 1, 4, 64, 65],
    "memory.force": [True, False],
    "memory.write_budget": [None, "1GiB/day", "1MiB/hour", "10B/day", "much"],
    "hot.schedule": ["fae", "fixed", "window", "often"],
    "hot.budget": ["512MiB", "100KiB", "1KiB", 0, "much"],
    "hot.small_table": ["1MiB", 0, "1KiB", -1],
    "hot.rows": ["exact", "sampled", "covering"],
    "hot.rate": [50, 1, 100, 0],
    "hot.window": [2, 4, 1],
    "hot.merge_every": [1, 4, 0],
    "parallel.sharding": ["auto", {"large": "row"}, {"none": "row"}],
    "parallel.hot_rows": [0, 0.1, 1],
    "parallel.exchange": ["auto", "rows", "pooled", {"large": "pooled"}, {"none": "rows"}],
    "parallel.wire_dtype": ["fp32", "bf16"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("verbs")
    write_dataset(found / "counted")
    write_dataset(found / "uncounted", counts=False, num_rows=500)
    write_dataset(found / "histories", histories=True, num_rows=500)
    return found


def drawn(number: int, folder: Path) -> dict[str, Any]:
    """Returns a config of which one to six options are drawn. Most are allowed; the dataset, the machine or another
    option may still be against them."""
    random = Random(number)
    data = random.choice(["counted", "counted", "uncounted", "histories"])
    model = random.choice([*MODELS] if random.random() < 0.2 else ["tbsm"] if data == "histories" else ["dlrm", "dcn"])
    raw: dict[str, Any] = {"data": str(folder / data), "run": str(folder / f"run-{number}"), "device": "cpu"}
    raw |= {"model": dict(MODELS[model]), "train": dict(TRAIN)}
    of_model = {f"model.{name}" for name in type(make_config(raw).model).model_fields}
    names = [name for name in VALUES if not name.startswith("model.") or name in of_model]
    section = random.choice(["", "memory.", "hot.", "memory.", "train."])  # options of one section act together
    chosen = random.sample([name for name in names if name.startswith(section)], random.randint(1, 3))
    first = {"hot.": ["hot.schedule"], "memory.": ["memory.dram"]}.get(section, [])  # without which others do nothing
    for name in [*first, *chosen, *random.sample(names, random.randint(0, 2))]:
        value = random.choice(VALUES[name])
        value = value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
        with suppress(ValueError):  # memory is a word, which has no fields
            with_it = apply_overrides(raw, [f"{name}={json.dumps(value)}"])
            if random.random() >= 0.05:
                make_config(with_it)
            raw = with_it
    return raw


def test_every_option_is_drawn() -> None:
    assert VALUES.keys() | FIXED == options().keys()


def words_of(verb: Callable[[], Any]) -> str | None:
    """Returns why a verb refuses; None if it does not."""
    try:
        verb()
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture
def compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str | None]:
    for name, module in [*sys.modules.items()]:
        if name.startswith("hotrow.") and hasattr(module, "available_memory_bytes"):
            monkeypatch.setattr(module, "available_memory_bytes", lambda: MEMORY_BYTES)

    def check(number: int) -> str | None:
        raw = drawn(number, folder)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        planned = words_of(lambda: plan(path, tries=False))
        trained = words_of(lambda: runs.train(load_config(path), quiet=True))
        if planned == trained:
            return None
        return f"{number}: {raw}\nplan:  {planned}\ntrain: {trained}"

    return check


IN_THE_INTERPRETER = [number for number in range(10) if "hbm" in drawn(number, Path()).get("memory", "")]
"""Train with slots on a device, which Triton's interpreter stands in for here: each takes as long as fifty others."""


@pytest.mark.parametrize("number", [number for number in range(10) if number not in IN_THE_INTERPRETER])
def test_the_same_is_refused(compare: Callable[[int], str | None], number: int) -> None:
    assert (found := compare(number)) is None, found


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(1, 20))
def test_the_same_is_refused_of_many(compare: Callable[[int], str | None], tens: int) -> None:
    found = [each for number in range(10 * tens, 10 * tens + 10) if (each := compare(number)) is not None]
    assert not found, "\n\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("number", IN_THE_INTERPRETER)
def test_the_same_is_refused_in_the_interpreter(compare: Callable[[int], str | None], number: int) -> None:
    assert (found := compare(number)) is None, found
