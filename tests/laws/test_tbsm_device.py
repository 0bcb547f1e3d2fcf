"""Laws 2 and 3 for TBSM on a device: sequences through slots and copies of hot rows there, by Triton's interpreter.

Where a GPU is, dense layers add up in another order, and what is compared is near.
"""

from pathlib import Path

import numpy as np
import pytest
from gpu_device import DEVICE, HAS_GPU, slow_interpreted
from test_hot_placement import without_cost
from test_resume import outcome
from test_tbsm_law import config, prepared

from hot_rig import copies_in_dram
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from hotrow.setup import setup

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ["train.max_steps=4", "train.eval_every=null", "optimizer.sparse.name=adagrad"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few events: the interpreter takes a row at a time."""
    return prepared(tmp_path_factory.mktemp("tbsm") / "data", num_events=900)


def check(found: RunFolder, wanted: RunFolder) -> None:
    if HAS_GPU:
        losses = [[line["loss"] for line in run.measurements() if "loss" in line] for run in (found, wanted)]
        np.testing.assert_allclose(*losses, rtol=1e-3)
        return
    own, truth = without_cost(outcome(found)), without_cost(outcome(wanted))
    assert own["tensors"] == truth["tensors"] and own["metrics"] == truth["metrics"]


@pytest.mark.slow  # hot rows there and slots of other models guard the same law
def test_histories_through_slots(data: Path, tmp_path: Path) -> None:
    """Scored in batches of 4,096, whose rows are more than there are slots: looked up in halves."""
    plain = runs.train(config(data, tmp_path / "plain", SHORT))
    device: list[str] = [*SHORT, f"device={DEVICE.type}"]
    run = runs.train(config(data, tmp_path / "slots", device, {"hbm": 32_000}))
    hbm = run.record.memory["hbm"]
    assert hbm["evicted_rows"] > 0 and hbm["tables"]["item"]["cached"] < 1000
    check(run, plain)


@slow_interpreted
def test_histories_of_hot_rows_there(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = [*SHORT, "hot.schedule=fixed", "hot.small_table=0", "hot.budget=30000", "hot.rate=50", "train.max_steps=12"]
    with copies_in_dram() as steps:
        plain = runs.train(config(data, tmp_path / "plain", hot))
    if not HAS_GPU:
        monkeypatch.setattr(setup, "device_of_copies", lambda config, place: DEVICE)
    run = runs.train(config(data, tmp_path / "there", [*hot, f"device={DEVICE.type}"]))
    assert 1 < len(steps) < run.record.steps - 1 and run.record.hot["sync_s"] > 0
    check(run, plain)
