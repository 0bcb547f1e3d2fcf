"""The scores of hotrow as it comes beside those of tuned peers: AUC and LogLoss of the same test rows of public files.

    pip install lightgbm==4.7.0 catboost==1.2.10 scikit-learn  # with --peers fuxictr: fuxictr==2.3.10
    python -m benchmarks.quality FOLDER [--files NAME...] [--seeds 5] [--peers NAME...] [--out quality.json]
                                        [--scores FOLDER]

FOLDER holds the files that benchmarks/quality.yaml lists, which says where each is from. Each becomes one CSV file with
a label of 0 or 1 and times in seconds, without what leaks; hotrow trains on it, told of label and time alone, and
nothing of it is tuned. A peer chooses among at most 8 settings by the LogLoss of validation rows, and trains again on
training and validation rows (benchmarks/quality_peers.py). The oldest 80 % of rows train and the newest 10 % test;
without times rows are drawn, the same for every seed.

Every contender runs in a process of its own on two cores. Its seconds are those of reading, choosing and one training;
its memory is the most that was ever resident. Differences from the best tree stand beside their standard error over
test rows; that tree is chosen by these very rows, in its favour. Linux only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars
import yaml
from numpy.typing import NDArray

from benchmarks.quality_peers import PEERS, THREADS, Floats, logloss, read_rows, scores_of

LIST = Path(__file__).with_name("quality.yaml")
HOTROW = "hotrow"
USUAL = [name for name in PEERS if name != "fuxictr"]
TREES = ("lightgbm", "lightgbm, target encodings", "catboost")
RULES = {">=": lambda cells, than: cells.cast(polars.Float64) >= float(than)}
RULES |= {"=": lambda cells, than: cells == than, "!=": lambda cells, than: cells != than}


def clear(path: Path, told: Mapping[str, Any]) -> polars.DataFrame:
    """Returns a listed file with `label` of 0 or 1 and `time` in unix seconds, if it has one, before its own text."""
    raw = polars.read_csv(
        path,
        infer_schema=False,
        separator=told.get("separator", ","),
        has_header="columns" not in told,
        new_columns=told.get("columns"),
    ).with_columns(polars.all().str.strip_chars())
    raw = raw.rename(str.strip)
    column, rule, than = re.fullmatch(r"(.+) (>=|!=|=) (.+)", told["label"]).groups()  # type: ignore[union-attr]
    raw = raw.filter(polars.col(column).is_not_null())
    front = [RULES[rule](raw[column], than).cast(polars.Int8).alias("label")]
    if names := told.get("time", "").split():
        times = raw.select(polars.concat_str(names, separator="-")).to_series()
        form = told.get("time_format")
        times = times.str.to_datetime(form).dt.epoch("s") if form else times.str.replace_all(r"\D", "")
        front.append(times.cast(polars.Int64).alias("time"))
    return polars.DataFrame(front).hstack(raw.drop(column, *names, *told.get("exclude", ())))


def split_of(frame: polars.DataFrame) -> NDArray[np.uint8]:
    """Returns which rows train (0), validate (1) and test (2), as hotrow splits them."""
    from hotrow.data.sources.split import RandomPlan, TimeHistogram

    shares = (0.8, 0.1, 0.1)
    if "time" not in frame.columns:
        return RandomPlan(0, shares).assign(np.arange(frame.height))
    times = frame["time"].to_numpy()
    histogram = TimeHistogram()
    histogram.add(times)
    return histogram.plan(shares).assign(np.arange(frame.height), times)


def hotrow_scores(folder: Path, split: NDArray[np.uint8], seeds: Sequence[int]) -> list[Floats]:
    """Returns the scores of test rows for each seed, once it is sure that hotrow tested on these rows too."""
    import hotrow
    from hotrow.data.packed.reader import PackedDataset
    from hotrow.run.folder import RunFolder

    test = polars.read_csv(folder / "test.csv", infer_schema=False)
    label, found = test["label"].cast(polars.Float64).to_numpy(), []
    for seed in seeds:
        run = hotrow.fit(
            str(folder / "rows.csv"),
            label="label",
            time="time" if "time" in test.columns else None,
            run=folder / f"run-{seed}",
            quiet=True,
            **{"train.seed": seed},
        )
        data = PackedDataset.open(RunFolder.open(run.folder.selection).record.dataset["path"])
        rows = [data.split(name).num_rows for name in ("train", "val", "test")]
        assert rows == np.bincount(split, minlength=3).tolist(), f"hotrow splits the rows of {folder.name} as {rows}"
        found.append(run.predict(folder / "test.csv").astype(float))
        gap = abs(float(logloss(label, found[-1]).mean()) - run.metrics["logloss"])
        assert gap < 1e-3, f"LogLoss of the test rows of {folder.name} is {gap:.4f} from what hotrow found"
    return found


def contend(name: str, folder: Path, categorical: Sequence[str], seeds: Sequence[int]) -> None:
    """Trains a contender for each seed, and writes its scores of test rows and its figures into the folder."""
    start, split, figures = time.perf_counter(), np.load(folder / "split.npy"), {}
    if name == HOTROW:
        scores = hotrow_scores(folder, split, seeds)
        several_s = time.perf_counter() - start
    else:
        rows = read_rows(folder / "rows.csv", categorical, split == 0)
        scores, figures = scores_of(name, rows, split, seeds)
        several_s = figures.pop("seeds_s")
    np.save(folder / f"{name}.npy", np.stack(scores))
    figures["seconds"] = time.perf_counter() - start - several_s * (1 - 1 / len(seeds))
    # Not ru_maxrss, which a process inherits from the one that started it.
    peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak is not None
    figures["peak_mib"] = int(peak[1]) / 1024
    (folder / f"{name}.json").write_text(json.dumps(figures))


def placements(label: Floats, scores: Floats) -> tuple[Floats, Floats]:
    """Returns the share of negatives below each positive, and of positives above each negative (DeLong et al. 1988)."""
    ranks, positive = polars.Series(scores).rank().to_numpy(), label > 0.5
    own = {side: polars.Series(scores[positive == side]).rank().to_numpy() for side in (True, False)}
    below = (ranks[positive] - own[True]) / max(np.sum(~positive), 1)
    above = 1 - (ranks[~positive] - own[False]) / max(np.sum(positive), 1)
    return below, above


def error_of(values: Floats) -> float:
    """Returns the standard error of the mean."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def judged(label: Floats, scores: Floats) -> dict[str, Any]:
    """Returns means of AUC and LogLoss over seeds, and standard errors if there are several. scores: [seeds, rows]."""
    aucs = np.array([placements(label, one)[0].mean() for one in scores])
    losses = np.array([logloss(label, one).mean() for one in scores])
    found = {"auc": float(aucs.mean()), "logloss": float(losses.mean())}
    return found | ({"auc_se": error_of(aucs), "logloss_se": error_of(losses)} if len(scores) > 1 else {})


def paired(label: Floats, ours: Floats, theirs: Floats) -> dict[str, float]:
    """Returns how far the first scores' AUC and LogLoss are above the second's, and standard errors over rows."""
    sides = [
        np.mean([placements(label, one)[side] for one in ours], 0)
        - np.mean([placements(label, one)[side] for one in theirs], 0)
        for side in (0, 1)
    ]
    losses = np.mean([logloss(label, one) for one in ours], 0) - np.mean([logloss(label, one) for one in theirs], 0)
    return {
        "auc": float(sides[0].mean()),
        "auc_se": math.hypot(*map(error_of, sides)),
        "logloss": float(losses.mean()),
        "logloss_se": error_of(losses),
    }


def compare(
    path: Path, told: Mapping[str, Any], names: Sequence[str], seeds: Sequence[int], kept: Path | None
) -> dict[str, Any]:
    """Returns the figures of all contenders on one file; prints each when it is known. kept: where scores of the
    contenders that have finished lie, which are not run again."""
    frame = clear(path, told)
    split, categorical = split_of(frame), told.get("categorical", ())
    label = frame["label"].to_numpy()[split == 2].astype(float)
    found: dict[str, Any] = {"file": path.name, "rows": np.bincount(split).tolist(), "positive": float(label.mean())}
    with tempfile.TemporaryDirectory(prefix="hotrow-quality-") as temporary:
        folder = kept / path.name if kept else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        frame.write_csv(folder / "rows.csv")
        frame.filter(split == 2).write_csv(folder / "test.csv")
        np.save(folder / "split.npy", split)
        for one in names:
            if not (folder / f"{one}.json").exists():
                child = multiprocessing.get_context("spawn").Process(
                    target=contend, args=(one, folder, categorical, seeds)
                )
                child.start()
                child.join()
                if child.exitcode:
                    raise RuntimeError(f"{one} failed on {path.name}: the reason stands above")
            figures = judged(label, np.load(folder / f"{one}.npy")) | json.loads((folder / f"{one}.json").read_text())
            print(json.dumps({"file": path.name, "contender": one, **figures}), flush=True)
            found.setdefault("contenders", {})[one] = figures
        trees = [one for one in names if one in TREES]
        beside = {"logistic regression": "logistic regression"} if "logistic regression" in names else {}
        if trees:
            found["best_tree"] = min(trees, key=lambda one: found["contenders"][one]["logloss"])
            beside["best tree"] = found["best_tree"]
        for what, other in beside.items() if HOTROW in names else ():
            sides = (np.load(folder / f"{one}.npy") for one in (HOTROW, other))
            found[f"hotrow less {what}"] = paired(label, *sides)
    return found


def others_seconds(of: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Returns the seconds in which eight settings of LightGBM and one of CatBoost choose their rounds."""
    if not all(name in of for name in TREES):
        return None
    eight = [own for name in TREES[:2] for own in of[name]["settings_s"]][:8]
    return float(sum(eight) + of["catboost"]["settings_s"][0])


def is_behind(gap: Mapping[str, float]) -> bool:
    """Returns whether scores are worse by more than two standard errors in AUC or in LogLoss."""
    return gap["auc"] < -2 * gap["auc_se"] or gap["logloss"] > 2 * gap["logloss_se"]


def mean_ranks(cells: Sequence[Mapping[str, Any]], measure: str, sign: int) -> dict[str, float]:
    """Returns the mean place of each contender over files; 1 is the best."""
    places: dict[str, list[int]] = {}
    for cell in cells:
        of = cell["contenders"]
        for place, name in enumerate(sorted(of, key=lambda one: sign * of[one][measure]), 1):
            places.setdefault(name, []).append(place)
    return {name: float(np.mean(own)) for name, own in places.items()}


def page(cells: Sequence[Mapping[str, Any]]) -> str:
    """Returns the figures in Markdown: scores, differences from the best tree and the regression, and what they say."""
    names = list(cells[0]["contenders"])
    lines = [f"| file, test rows | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for cell in cells:
        of = [f"{own['auc']:.4f} / {own['logloss']:.4f}" for own in cell["contenders"].values()]
        lines.append(f"| {cell['file']}, {cell['rows'][2]:,} | {' | '.join(of)} |")
    heads = ["best tree", "AUC less it", "LogLoss", "AUC less regression's", "LogLoss", "seconds of fit, of trees"]
    lines += ["", f"| file | {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 1)]
    behind: dict[str, list[str]] = {"best tree": [], "logistic regression": []}
    ratios = []
    for cell in cells:
        ours, theirs = cell["contenders"][HOTROW]["seconds"], others_seconds(cell["contenders"])
        ratios += [] if theirs is None else [ours / theirs]
        row = [cell["file"], cell.get("best_tree", "")]
        for what in behind:
            gap = cell.get(f"hotrow less {what}")
            row += [f"{gap[own]:+.4f}±{gap[own + '_se']:.4f}" if gap else "" for own in ("auc", "logloss")]
            behind[what] += [cell["file"]] if gap and is_behind(gap) else []
        lines.append(f"| {' | '.join([*row, f'{ours:.0f}, {theirs:.0f}' if theirs else ''])} |")
    lines += [
        "",
        *(f"- Behind {what} by more than two standard errors: {own or 'nowhere'}." for what, own in behind.items()),
    ]
    for title, measure, sign in (("AUC", "auc", -1), ("LogLoss", "logloss", 1)):
        ranks = sorted(mean_ranks(cells, measure, sign).items(), key=lambda one: one[1])
        lines.append(f"- Mean place in {title}: {', '.join(f'{name} {own:.2f}' for name, own in ranks)}.")
    if ratios:
        lines.append(
            f"- `fit` takes at most twice the seconds of the trees on {sum(one <= 2 for one in ratios)} files."
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", nargs="*", help="only these files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--peers", nargs="*", choices=list(PEERS), default=USUAL, help="these peers (default: all but fuxictr)"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--scores", type=Path, help="keeps scores here; contenders that have some are not run again")
    given = parser.parse_args()
    every = [
        one for one in yaml.safe_load(LIST.read_text(encoding="utf-8")) if not given.files or one["file"] in given.files
    ]
    if missing := [one["file"] for one in every if not (given.folder / one["file"]).exists()]:
        parser.error(f"{given.folder} lacks {', '.join(missing)}: {LIST.name} says where they are from")
    for name in given.peers:
        if importlib.util.find_spec(library := PEERS[name][1]) is None:
            parser.error(f"{name} wants {library}, which is not installed: install it, or name other --peers")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin for each other crawl on a busy machine
    cells = []
    for told in every:
        names, seeds = [HOTROW, *given.peers], range(1, given.seeds + 1)
        cells.append(compare(given.folder / told["file"], told, names, seeds, given.scores))
        if given.out:
            given.out.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    print(page(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
