"""docs/python.md, "Add a model of your own": its file and program run as written, and the export scores the same."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.package
PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
CHECK = """
import csv
import sys

from hotrow.config.load import load_config

sys.path.insert(0, "tower-export")
import score

model = load_config("runs/tower/config.yaml").model
assert isinstance(model, TowerSpec) and model.width == 32
with open("clicks.csv") as file:
    rows = list(csv.DictReader(file))
scorer = score.Scorer("tower-export")
theirs = scorer.score({name: [row[name] for row in rows] for name in scorer.columns})
ours = hotrow.load("runs/tower").predict("clicks.csv")
assert max(ours) - min(ours) > 0.01 and abs(ours - theirs.numpy()).max() < 1e-5, (ours, theirs)
"""


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Add a model of your own\n")[2].partition("\n## ")[0]
    model, program = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "tower.py").write_text(model)
    (tmp_path / "program.py").write_text(program + CHECK)
    rng = np.random.default_rng(0)
    users, prices = rng.integers(0, 20, 400), rng.random(400)
    clicks = rng.random(400) < np.where(users % 2, 0.8, 0.2)
    rows = [f"{click:d},u{user},{price:.3f}" for click, user, price in zip(clicks, users, prices, strict=True)]
    (tmp_path / "clicks.csv").write_text("\n".join(["click,user,price", *rows]) + "\n")
    # Its own process: the list of models is read once.
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
