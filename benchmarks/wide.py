"""Wide files: how long `fit` takes, and its AUC beside LightGBM's, if 20 of thousands of columns tell something.

    python -m benchmarks.wide FOLDER [--shapes 1500x5000 20000x1000] [--draws 10] [--seed 0]
    python -m benchmarks.wide FOLDER --shapes 140000xcriteo      # made-up clicks of Criteo's 39 columns, seconds alone

Both train on the same nine tenths of a file, LightGBM with as many trees as a tenth of the file finds best, and score
other rows. Each line has the difference with its standard error, over draws, or over rows if there is one draw.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

import hotrow
from benchmarks.days_quality import made_up
from hotrow.data.sources.split import TRAIN, RandomPlan
from hotrow.objectives import DEFAULT, OBJECTIVES
from hotrow.objectives.objective import compared

FRESH_ROWS = 4_000
SETTINGS = {"objective": "binary", "verbosity": -1, "learning_rate": 0.05, "num_threads": 2, "seed": 1}


def drawn(num_rows: int, num_columns: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns inputs, of which ten act on the log odds in proportion and ten by a step, and labels."""
    rng = np.random.default_rng([seed, num_columns])
    x = rng.standard_normal((num_rows, num_columns)).round(4)
    own, slopes = x[:, rng.permutation(num_columns)[:20]], rng.choice([-1, 1], 20) * rng.uniform(0.3, 1.0, 20)
    steps = own[:, 10:] > rng.uniform(-0.8, 0.8, 10)
    odds = own[:, :10] @ slopes[:10] + steps @ (1.5 * slopes[10:])
    return x, (rng.logistic(size=num_rows) < odds - np.median(odds)).astype(np.int64)


def trees(x: NDArray[np.float64], y: NDArray[np.int64], codes: NDArray[np.uint8]) -> lightgbm.Booster:
    train, val = (lightgbm.Dataset(x[codes == code], y[codes == code]) for code in (TRAIN, TRAIN + 1))
    stop = lightgbm.early_stopping(50, verbose=False)
    rounds = lightgbm.train(SETTINGS, train, 1000, valid_sets=[val], callbacks=[stop]).best_iteration
    return lightgbm.train(SETTINGS, lightgbm.Dataset(x[codes <= TRAIN + 1], y[codes <= TRAIN + 1]), rounds)


def measured(folder: Path, num_rows: int, num_columns: int, seed: int) -> tuple[float, float, float, float, float]:
    """Returns the seconds of `fit`, both AUCs, the difference and its standard error."""
    x, y = drawn(num_rows + FRESH_ROWS, num_columns, seed)
    tables = pa.table({"y": y} | {f"x{i}": x[:, i] for i in range(num_columns)})
    path, run = folder / f"wide-{num_rows}-{num_columns}-{seed}.csv", folder / f"run-{num_rows}-{num_columns}-{seed}"
    pyarrow.csv.write_csv(tables.slice(0, num_rows), path)
    started = time.monotonic()
    found = hotrow.fit(path, label="y", run=run, quiet=True)
    seconds = time.monotonic() - started
    path.unlink()
    booster = trees(x[:num_rows], y[:num_rows], RandomPlan(0, (0.8, 0.1, 0.1)).assign(np.arange(num_rows)))
    clicks, both = OBJECTIVES[DEFAULT], []
    for scores in (found.predict(tables.slice(num_rows)), booster.predict(x[num_rows:])):
        both.append(clicks.metrics())
        both[-1].update(np.log(scores / (1 - scores)), y[num_rows:].astype(np.float32))
    auc = compared(clicks, *both)["auc"]
    return seconds, auc["first"], auc["second"], -auc["difference"], auc["error"]


def seconds_of_clicks(folder: Path, num_rows: int) -> float:
    """Returns the seconds of `fit` on made-up clicks with the columns of Criteo Kaggle."""
    path, names = folder / "clicks.csv", ["label", *(f"i{k}" for k in range(1, 14)), *(f"c{k}" for k in range(1, 27))]
    rows = made_up(folder / "clicks.tsv", num_rows, drift=0.0).read_text().replace("\t", ",")
    path.write_text(",".join(names) + "\n" + rows)
    started = time.monotonic()
    hotrow.fit(path, label="label", run=folder / "run-clicks", quiet=True)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["1500x5000", "20000x1000"])
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for shape in args.shapes:
        if shape.endswith("xcriteo"):
            print(f"{shape}: fit {seconds_of_clicks(args.folder, int(shape.partition('x')[0])):.1f} s", flush=True)
            continue
        draws = [measured(args.folder, *map(int, shape.split("x")), args.seed + k) for k in range(args.draws)]
        s, own, other, less, error = np.mean(draws, axis=0)
        error = error if args.draws == 1 else np.std(draws, axis=0, ddof=1)[3] / args.draws**0.5
        print(f"{shape}: fit {s:.1f} s, AUC {own:.4f}, LightGBM {other:.4f}: {less:+.4f} +- {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
