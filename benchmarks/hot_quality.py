"""What turns of hot and cold batches do to quality, and to what crosses a link: the cells quality_* and link of
benchmarks.hot. Nothing is timed; `python -m benchmarks.study hot` measures the same over more axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import histories, hot_study
from benchmarks.hot_cells import HotCell, counted, make_shape, sizes_of
from benchmarks.hot_lab import interval
from benchmarks.markdown import heads, held, table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.hot.calibrate import calibrate
from hotrow.hot.hot_set import hot_samples

CRITEO, TAOBAO = "criteo_terabyte_80k.tsv.gz", "taobao_userbehavior_110k.csv.gz"
SMALL_TABLE = "32KiB"
"""Of 80,000 rows: FAE's megabyte is for 45 million."""
BUDGETS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the tables' bytes."""
DECAY = 0.5
"""Of the steps, in which learning rates fall: the cell quality_synthetic_decay."""
WIDTH = 64
"""Of the hidden layers: the cell quality_synthetic_narrow."""
SYNTHETIC_SEEDS = {"_decay": 20, "_narrow": 100}
"""Others take 3. Differences deviate by 0.002, also where rates fall and with narrow layers, which train in a third of
the time: it takes some hundred seeds to tell 0.0005."""
TURNS, SLOTS = ("exact", "covering"), "slots"
LINK_BATCH = 1024
"""Samples, of mixed batches: from 1024 up is what the promise is for."""
REAL = ("criteo", "taobao")
"""Too few rows to resolve the bar: asked is that no difference shows."""
TAOBAO_SEEDS = 20
"""A TBSM's starts differ far more than a DLRM's: twelve left a difference of 0.036 at two standard errors."""
WINDOW = 4
"""Batches: the default of hot.window."""
SETTINGS = ("rows", "amount", "batch_size", "schedule", "rate", "decay", "width")
MAX_DIFFERENCE, MIN_RATIO = 0.0005, 4.0


def criteo(data: Path, folder: Path) -> Path:
    """The real rows, packed: every id that occurs has a row."""
    packed = folder / "criteo-80k"
    if not (packed / "dataset.json").exists():
        run_prepare("criteo", str(data / CRITEO), packed, min_count=1)
    return packed


def taobao(data: Path, folder: Path) -> Path:
    """The real clicks, packed: at each event of a user but the first what came, and what did not."""
    packed = folder / "taobao-110k"
    if not (packed / "dataset.json").exists():
        histories.prepare(data / TAOBAO, packed)
    return packed


def measure(name: str, data: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """One cell's figures."""
    if name.startswith("quality_synthetic"):
        num_samples, scale = (50_000, 0.01) if quick else (2_500_000, 0.1)
        shape = {"source": "kaggle", "num_samples": num_samples, "scale": scale, "small_table": "100KiB"}
        shape |= {"rate": 10.0 if name.endswith("_10") else 50.0, "decay": DECAY if name.endswith("_decay") else 0.0}
        shape |= {"width": WIDTH if name.endswith("_narrow") else None}
        packed = folder / f"kaggle-{num_samples}"
        if not (packed / "dataset.json").exists():
            make_shape("kaggle", num_samples, scale, packed)
        seeds = 2 if quick else SYNTHETIC_SEEDS.get(name.removeprefix("quality_synthetic"), 3)
        return quality(packed, folder, {**shape, "rows": "exact", "amount": 0.2, "batch_size": 2048, "seeds": seeds})
    is_taobao = name.startswith("quality_taobao")
    packed = taobao(data, folder) if is_taobao else criteo(data, folder)
    shape = {"source": str(packed), "small_table": SMALL_TABLE}
    if name.startswith("quality_"):
        shape["schedule"] = "window" if name.endswith("_window") else "fae"
        seeds = 2 if quick else TAOBAO_SEEDS if is_taobao else 5
        return quality(packed, folder, {**shape, "rows": "covering", "amount": 0.5, "batch_size": 128, "seeds": seeds})
    return {"budgets": budgets(packed, shape), "least_ratio": MIN_RATIO}


def quality(packed: Path, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """An epoch of a schedule, FAE's where `fields` name none, beside one in shuffled order."""
    cell = HotCell(group="quality", kind="quality", **{"schedule": "fae", **fields})
    dataset = PackedDataset.open(packed)
    row = hot_study.quality(cell, dataset, folder) | label_rates(cell, dataset)
    return {"samples": dataset.split("train").num_rows, **{n: getattr(cell, n) for n in SETTINGS}, **row}


def label_rates(cell: HotCell, dataset: PackedDataset) -> dict[str, float]:
    """Of hot training samples and of cold ones, the share with a click."""
    record_bytes, table_bytes = sizes_of(cell, dataset)
    sizes = {"record_bytes": record_bytes, "small_table_bytes": cell.small_table_bytes}
    is_hot = hot_samples(dataset, calibrate(dataset, cell.rows, int(cell.amount * table_bytes), **sizes).hot)
    split = dataset.split("train")
    label = np.concatenate([split.block(index).label for index in range(split.num_blocks)])
    return {"label_rate_hot": float(label[is_hot].mean()), "label_rate_cold": float(label[~is_hot].mean())}


def budgets(packed: Path, shape: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes over the link by budget: turns by rows of counts, by samples covered, and slots; a row is its weights."""
    dataset, found = PackedDataset.open(packed), []
    names = ("hot_bytes", "hot_samples", "hit_rows", "link_bytes", "hybrid_bytes", "hybrid_ratio")
    for way in (*TURNS, SLOTS):
        for amount in BUDGETS:
            kind = {"kind": "cached", "rows": "exact"} if way == SLOTS else {"kind": "coverage", "rows": way}
            fields = {**shape, **kind, "amount": amount, "optimizer": "sgd", "batch_size": LINK_BATCH}
            try:
                row = counted(HotCell(group="link", **fields), dataset)
            except ValueError as error:  # no batch fits the slots
                found.append({"rows": way, "amount": amount, "refused": str(error)})
            else:
                found.append({"rows": way, "amount": amount, **{name: row[name] for name in names if name in row}})
    return found


# ---- the page


def quality_table(cells: list[dict[str, Any]]) -> list[str]:
    """Both kinds of data."""
    rows = []
    for cell in cells:
        difference, error = cell["auc_difference"], cell["auc_difference_se"]
        name = cell["name"].removeprefix("hot_quality_")
        for setting in ("_10", "_decay", "_narrow", "_window"):
            name = name.removesuffix(setting)
        low, high = interval(difference, error, cell["seeds"])
        if name in REAL:
            promise = held("none that seeds show", holds=low <= 0 <= high)
        else:
            promise = at_most(MAX_DIFFERENCE, low, high)
        auc = f"{cell['auc_baseline']:.4f} / {cell['auc_fae']:.4f}"
        loss = f"{cell['logloss_baseline']:.4f} / {cell['logloss_fae']:.4f}"
        clicks = [f"{cell[of]:.1%}" for of in ("label_rate_hot", "label_rate_cold") if of in cell]
        shares = [f"{cell['hot_samples']:.1%}", " / ".join(clicks), f"{cell['num_swaps']:.0f}"]
        name += f", layers of {cell['width']}" if cell.get("width") else ""
        first = f"window of {WINDOW}" if cell.get("schedule") == "window" else f"{cell['rate']:g}"
        what = [name, f"{cell['samples']:,}", first, f"{cell.get('decay', 0):.0%}", cell["seeds"]]
        told = f"{difference:+.5f} ({low:+.5f} to {high:+.5f})"
        rows.append([*what, *shares, auc, told, promise, loss])
    text = (
        "An epoch of turns of cold and hot batches, whose rate follows the validation loss, beside one in shuffled "
        "order from the same weights; dim 16, row-wise Adagrad. `criteo`: the 80,000 real rows with a DLRM, half of "
        "the tables' bytes hot, chosen so that most samples are. `synthetic`: clicks of Criteo Kaggle's shape with a "
        "planted teacher and a DLRM, a fifth of the bytes hot, by counts. `taobao`: two hours of real clicks with a "
        "TBSM, its layers at the published rate, hot rows as for `criteo`. `window of 4`: no turns, but the hot ones "
        "of every four batches come first. "
        "Rates fall over that share of the steps, at the end. Pairs are shuffled / turns, means over seeds; the "
        "difference is paired by seed, with its 95 % interval (Student's t)."
    )
    head = ("data", "samples", "first rate", "rates fall", "seeds", "hot samples")
    head = (*head, "clicks, hot / cold", "swaps", "AUC", "difference", "promised", "LogLoss")
    return [text, "", *table(heads(head, left=(0, 11)), rows)]


def at_most(bar: float, low: float, high: float) -> str:
    """The promise that a difference which lies between low and high is no more, either way, and what became of it."""
    if -bar <= low and high <= bar:
        return held(f"at most {bar}", holds=True)
    if low > bar or high < -bar:
        return held(f"at most {bar}", holds=False)
    return f"at most {bar}: not resolved"


def link_table(cells: list[dict[str, Any]]) -> list[str]:
    """Bytes by budget."""
    (cell,) = cells
    rows = [link_row(own) for own in cell["budgets"]]
    turns = best_ratio(cell, TURNS)
    slots = best_ratio(cell, (SLOTS,))
    bar = f"at least {cell['least_ratio']:g}x"
    text = (
        "An epoch on the same real rows, dim 16, SGD; the hybrid (pooled rows over, their gradients back) takes "
        f"{cell['budgets'][0]['hybrid_bytes'] / 1e6:.0f} MB. `exact`, `covering`: turns of 50 %. `slots`: mixed "
        f"batches of {LINK_BATCH:,} through slots on the device (hotrow.DeviceMemory). Bytes are counted by "
        "benchmarks/hot_lab.py, which the moves of a run equal for slots. With half of the bytes there, "
        f"turns {held(bar, holds=turns >= cell['least_ratio'])} ({turns:.2f}x), "
        f"slots {held(bar, holds=slots >= cell['least_ratio'])} ({slots:.2f}x)."
    )
    head = ("way", "budget, of the tables' bytes", "hot samples", "rows of a batch there", "MB over the link")
    head = (*head, "times fewer")
    return [text, "", *table(heads(head), rows)]


def best_ratio(cell: dict[str, Any], ways: tuple[str, ...]) -> float:
    """How many times fewer bytes one of these ways sends with up to half of the bytes on the device; 0 for none."""
    rows = [own for own in cell["budgets"] if own["rows"] in ways and own["amount"] <= 0.5]
    return max((own["hybrid_ratio"] for own in rows if "refused" not in own), default=0.0)


def link_row(own: dict[str, Any]) -> list[str]:
    """A budget's figures as text."""
    start = [own["rows"], f"{own['amount']:.0%}"]
    if "refused" in own:
        return [*start, "", "", "", "no batch fits"]
    shares = [f"{own[name]:.1%}" if name in own else "" for name in ("hot_samples", "hit_rows")]
    return [*start, *shares, f"{own['link_bytes'] / 1e6:.0f}", f"{own['hybrid_ratio']:.2f}x"]
