"""fit, predict and load on a frame in memory: pandas, polars, duckdb or, as here, pyarrow.

.venv/bin/python examples/fit_frame.py
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

import hotrow


def clicks(num_rows: int, seed: int) -> pa.Table:
    """Returns rows in which the item decides most and the hour a little."""
    generator = np.random.default_rng(seed)
    item, hour = generator.integers(0, 200, num_rows), generator.integers(0, 24, num_rows)
    chance = np.where(item % 4 == 0, 0.5, 0.1) + 0.1 * (hour > 18)
    return pa.table(
        {
            "item": pa.array([f"item-{i}" for i in item]),
            "hour_of_day": hour,
            "click": (generator.random(num_rows) < chance).astype(np.int8),
        }
    )


def main() -> None:
    """Train on one frame, and score another that has no labels."""
    with tempfile.TemporaryDirectory() as folder:
        run = hotrow.fit(clicks(20_000, seed=0), label="click", run=Path(folder) / "run", epochs=2)
        print(f"test AUC {run.metrics['auc']:.4f}, LogLoss {run.metrics['logloss']:.4f}")
        new = clicks(5, seed=1).drop_columns(["click"])
        print("scores of new rows:", hotrow.load(run.path).predict(new))


if __name__ == "__main__":
    main()
