"""From a table of clicks to a trained model and scores, in one call each.

    .venv/bin/python examples/fit_clicks.py [CLICKS.csv LABEL_COLUMN]

Without arguments it makes 20,000 clicks in which the item decides, so that there is something to learn.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

import hotrow


def made_up_clicks(path: Path, num_rows: int = 20_000) -> None:
    """Users, items, a price and a click whose chance depends on the item."""
    generator = np.random.default_rng(0)
    item = generator.zipf(1.3, num_rows) % 500
    click = generator.random(num_rows) < np.where(item % 3 == 0, 0.6, 0.1)
    columns = {
        "user": [f"u{i}" for i in generator.integers(0, 2_000, num_rows)],
        "item": [f"i{i}" for i in item],
        "price": generator.lognormal(2.0, 1.0, num_rows).round(2),
        "click": click.astype(np.int8),
    }
    csv.write_csv(pa.table(columns), path)


def main() -> None:
    """Train, print the metrics, score the rows that were trained on."""
    with tempfile.TemporaryDirectory() as folder:
        path, label = Path(folder) / "clicks.csv", "click"
        if len(sys.argv) == 3:
            path, label = Path(sys.argv[1]), sys.argv[2]
        else:
            made_up_clicks(path)
        run = hotrow.fit(str(path), label=label)
        print(run.metrics)
        print(run.predict(str(path))[:5])


if __name__ == "__main__":
    main()
