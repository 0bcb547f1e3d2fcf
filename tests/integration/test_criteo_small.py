"""The main job on real rows: 80,000 of Criteo 1TB prepared, trained by the recipe, and held against independent truths.

`test_against_plain_pytorch` holds it against a DLRM of nn.EmbeddingBag and torch.optim.SGD on the same batches,
`test_against_..._regression` against sklearn's on hashed raw ids, which this file reads from the text by itself.
"""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotrow.batch import KeyedJaggedTensor
from hotrow.config.load import load_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.objectives.binary import BinaryCrossEntropy
from hotrow.run import runs, trainer
from hotrow.run.meters import StepClock
from hotrow.setup.setup import Setup

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "criteo-small.yaml"
FILE = "criteo_terabyte_80k.tsv.gz"
SEEDS = (1, 2, 3, 4, 5)
HASH_BITS = 18
MIN_COUNT = 1
BATCH_SIZE = 512


TRAIN, VAL, TEST = slice(0, 64_000), slice(64_000, 72_000), slice(72_000, 80_000)
"""Rows of the file: its last 8,000 are the test, whose known scores are in the README beside it."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, real_data: Callable[[str], Path]) -> PackedDataset:
    """The file as two days: Criteo's published split (last day: first half test, rest validation) then cuts it so."""
    folder = tmp_path_factory.mktemp("criteo")
    with gzip.open(real_data(FILE)) as file:
        lines = file.readlines()
    for name, rows in (("day_0.tsv", lines[TRAIN]), ("day_1.tsv", lines[TEST] + lines[VAL])):
        (folder / name).write_bytes(b"".join(rows))
    return run_prepare("criteo", str(folder / "day_*.tsv"), folder / "packed", min_count=MIN_COUNT)


def auc(scores: Tensor | NDArray[np.float32], labels: Tensor | NDArray[np.float32]) -> float:
    metrics = BinaryCrossEntropy().metrics()
    metrics.update(scores, labels)
    return float(metrics.compute()["auc"])


@pytest.fixture(scope="module")
def recipe_aucs(dataset: PackedDataset, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Test AUC of the recipe by seed, two at a time: so small a model gains nothing from a second thread."""
    folder = tmp_path_factory.mktemp("runs")
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return list(pool.map(recipe_auc, [(dataset.path, folder / str(seed), seed) for seed in SEEDS]))


def recipe_auc(task: tuple[Path, Path, int]) -> float:
    """Of a run with a seed, in a process of its own."""
    data, run, seed = task
    changes = [f"data={data}", f"run={run}", f"train.seed={seed}", "train.threads=1"]
    return float(runs.train(load_config(RECIPE, changes), quiet=True).record.metrics["test"]["auc"])


@pytest.mark.package
def test_the_commands_as_the_recipe_prints_them(tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    """On the file as it stands, whose one day is cut 6/7, 1/14, 1/14: rates decay until the last step, no further."""
    (tmp_path / FILE).symlink_to(real_data(FILE).resolve())
    (tmp_path / "recipes").symlink_to(RECIPE.parent)
    commands = re.findall(r"^# +(hotrow .*)$", RECIPE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["prepare", "train"]
    prepared, trained = (printed_json(command, tmp_path) for command in commands)
    assert prepared["rows"] == {"train": 68_572, "val": 5_714, "test": 5_714}
    assert (prepared["summary"]["rows_read"], prepared["summary"]["rows_skipped"]) == (80_000, 0)
    promised = {"auc", "logloss", "ne", "calibration", "samples_per_s", "step_ms", "steps", "epochs", "run_dir"}
    assert promised <= set(trained)
    assert (trained["status"], trained["epochs"], trained["split"]) == ("finished", 3.0, "test")
    assert trained["auc"] > 0.7
    assert trained["ne"] < 0.95 and trained["logloss"] < trained["base_logloss"]
    assert (tmp_path / trained["run_dir"] / "config.yaml").is_file()
    config = load_config(RECIPE)
    assert trained["steps"] == config.optimizer.schedule.decay_steps
    lines = (tmp_path / trained["run_dir"] / "metrics.jsonl").read_text().splitlines()
    rates = [line["lr"]["sparse"] for line in map(json.loads, lines) if line["kind"] == "train"]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(config.optimizer.sparse.lr / trained["steps"] ** 2)  # of its last step alone


def printed_json(command: str, folder: Path) -> dict[str, Any]:
    """What a command prints with --json, in a process of its own at work in `folder`."""
    words = [sys.executable, "-m", *shlex.split(command), "--json"]
    patient = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # where other tests have the cores too
    done = subprocess.run(words, cwd=folder, env=patient, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_preparation_of_the_real_file(dataset: PackedDataset) -> None:
    assert sum(split.num_rows for split in dataset.splits.values()) == 80_000
    blocks = (split.block(i) for split in dataset.splits.values() for i in range(split.num_blocks))
    labels = np.concatenate([block.label for block in blocks])
    assert labels.mean() == pytest.approx(0.03216, abs=5e-6)  # the file's README


class PlainDLRM(nn.Module):
    """DLRM with the first-order term, of torch modules only, with the weights of ours copied in."""

    def __init__(self, parts: trainer.Parts) -> None:
        super().__init__()
        weights = parts.embedding.weights
        self.features = parts.embedding.feature_names
        tables = [table for table in parts.embedding.tables for _ in table.feature_names]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weights[table.name].clone(), freeze=False, mode="sum", sparse=True)
            for table in tables
        )
        self.bottom, self.top = self.copied(parts.model.bottom), self.copied(parts.model.top, last=nn.Identity)
        self.linear = nn.Linear(13, 1, bias=False)
        self.linear.weight.data.copy_(parts.model.first_order_I.detach())
        count = len(self.features) + 1
        self.pairs = torch.tril_indices(count, count, offset=-1)

    @staticmethod
    def copied(mlp: nn.Module, last: type[nn.Module] = nn.ReLU) -> nn.Sequential:
        stack: list[nn.Module] = []
        for i, layer in enumerate(mlp.layers):
            twin = nn.Linear(layer.in_features, layer.out_features)
            twin.load_state_dict(layer.state_dict())
            stack += [twin, nn.ReLU() if i < len(mlp.layers) - 1 else last()]
        return nn.Sequential(*stack)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x]
        for feature, bag in zip(self.features, self.bags, strict=True):
            values, offsets, _ = sparse.bags(feature)
            vectors.append(bag(values.long(), offsets[:-1]))
        stacked = torch.stack(vectors, dim=1)
        dots = stacked @ stacked.transpose(1, 2)
        first_order = self.linear(dense).squeeze(1) + stacked[:, 1:, 0].sum(dim=1)
        return self.top(torch.cat([x, dots[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1) + first_order


def test_against_plain_pytorch(dataset: PackedDataset) -> None:
    changes = ["optimizer.dense={name: sgd, lr: 0.1}", "optimizer.sparse={name: sgd, lr: 0.1}", "data=unused"]
    config = load_config(RECIPE, [*changes, "model.embedding_init=null", "optimizer.schedule={}"])
    parts = trainer.build(Setup.decide(config, dataset, Path("run")))
    plain = PlainDLRM(parts)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    clock = StepClock()
    worst = 0.0
    # Products summed in another order may put a value that is all but 0 on the other side of a ReLU: once in some ten
    # million, after which both runs are right and drift apart. In batches of 512 one such sample moves losses by 4e-6.
    for step, batch in enumerate(Loader(dataset.split("train"), BATCH_SIZE, shuffle_seed=1).epoch(0)):
        ours = trainer.train_step(parts, batch, step, clock)
        optimizer.zero_grad()
        theirs = nn.functional.binary_cross_entropy_with_logits(plain(batch.dense, batch.sparse), batch.label)
        theirs.backward()
        optimizer.step()
        worst = max(worst, abs(float(ours) - float(theirs.detach())))
        assert worst < 1e-4, f"step {step}: {float(ours)} and {float(theirs.detach())}"
    assert step + 1 == -(-dataset.split("train").num_rows // BATCH_SIZE)
    scores: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    with torch.no_grad():
        for batch in Loader(dataset.split("test"), 4096, shuffle_seed=None).epoch(0):
            scores[0].append(parts.model(batch.dense, parts.embedding(batch.sparse)))
            scores[1].append(plain(batch.dense, batch.sparse))
            scores[2].append(batch.label)
    ours_all, theirs_all, labels = (torch.cat(values) for values in scores)
    assert abs(auc(ours_all, labels) - auc(theirs_all, labels)) < 0.001
    print(f"largest difference of a step's loss: {worst:.2e}")


def hashed_rows(path: Path) -> tuple[object, NDArray[np.float32]]:
    """Standardisable dense values and one hashed column per (field, category), straight from the text; and labels."""
    from scipy.sparse import csr_matrix

    labels, dense, columns = [], [], []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            fields = line.rstrip("\n").split("\t")
            labels.append(float(fields[0]))
            dense.append([np.log1p(max(float(v), 0.0)) if v else 0.0 for v in fields[1:14]])
            columns.append([zlib.crc32(f"{j}={v}".encode()) % (1 << HASH_BITS) for j, v in enumerate(fields[14:])])
    flat = np.array(columns).ravel()
    ids = csr_matrix(
        (np.ones(flat.size, np.float32), flat, np.arange(0, flat.size + 1, 26)), shape=(len(labels), 1 << HASH_BITS)
    )
    return (np.array(dense, np.float32), ids), np.array(labels, np.float32)


@pytest.mark.slow
def test_against_the_known_score(recipe_aucs: list[float]) -> None:
    """0.717: what a hashed logistic regression is known to reach on these rows (README beside the file)."""
    assert float(np.mean(recipe_aucs)) > 0.717


@pytest.fixture(scope="module")
def regression_aucs(dataset: PackedDataset, real_data: Callable[[str], Path]) -> dict[float, tuple[float, float]]:
    """Validation and test AUC of hashed logistic regressions fitted here, by their strength of L2 (1.0: sklearn's)."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression

    (dense, ids), labels = hashed_rows(real_data(FILE))
    test_labels = [dataset.split("test").block(i).label for i in range(dataset.split("test").num_blocks)]
    np.testing.assert_array_equal(np.concatenate(test_labels), labels[TEST])
    dense = (dense - dense[TRAIN].mean(0)) / dense[TRAIN].std(0)
    inputs = hstack([csr_matrix(dense), ids]).tocsr()
    scores = {}
    for strength in (0.03, 0.1, 0.3, 1.0):
        fitted = LogisticRegression(C=strength, max_iter=300).fit(inputs[TRAIN], labels[TRAIN])
        logits = fitted.decision_function(inputs)
        scores[strength] = auc(logits[VAL], labels[VAL]), auc(logits[TEST], labels[TEST])
    return scores


@pytest.mark.slow
def test_against_a_regression(recipe_aucs: list[float], regression_aucs: dict[float, tuple[float, float]]) -> None:
    """As the library fits it; its L2 tuned is the next test."""
    assert float(np.mean(recipe_aucs)) > regression_aucs[1.0][1]
