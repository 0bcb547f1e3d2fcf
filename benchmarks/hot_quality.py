"""What turns of hot and cold batches do to quality, and to what crosses a link: the cells quality_* and link of
benchmarks.hot. Nothing is timed; `hotrow study hot` measures the same over more axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.markdown import held, table
from hotrow.data.packed import PackedDataset
from hotrow.data.prepare import run_prepare
from hotrow.study import hot
from hotrow.study.shapes import make_shape

CRITEO = "criteo_terabyte_80k.tsv.gz"
SMALL_TABLE = "32KiB"
"""Of 80,000 rows: FAE's megabyte is for 45 million."""
BUDGETS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the tables' bytes."""
MOST_DIFFERENCE, LEAST_RATIO = 0.0005, 4.0


def criteo(data: Path, folder: Path) -> Path:
    """The real rows, packed: every id that occurs has a row."""
    packed = folder / "criteo-80k"
    if not (packed / "dataset.json").exists():
        run_prepare("criteo", str(data / CRITEO), packed, min_count=1)
    return packed


def measure(name: str, data: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """One cell's figures."""
    if name.startswith("quality_synthetic"):
        num_samples, scale = (50_000, 0.01) if quick else (2_500_000, 0.1)
        shape = {"source": "kaggle", "num_samples": num_samples, "scale": scale, "small_table": "100KiB"}
        shape |= {"rate": 10.0 if name.endswith("_10") else 50.0}
        packed = folder / f"kaggle-{num_samples}"
        if not (packed / "dataset.json").exists():
            make_shape("kaggle", num_samples, scale, packed)
        return quality(packed, folder, {**shape, "rows": "exact", "amount": 0.2, "batch_size": 2048, "seeds": 3})
    packed = criteo(data, folder)
    shape = {"source": str(packed), "small_table": SMALL_TABLE}
    if name == "quality_criteo":
        seeds = 2 if quick else 5
        return quality(packed, folder, {**shape, "rows": "covering", "amount": 0.5, "batch_size": 128, "seeds": seeds})
    return {"budgets": budgets(packed, shape), "least_ratio": LEAST_RATIO}


def quality(packed: Path, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """An epoch of FAE's schedule beside one in shuffled order."""
    cell = hot.HotCell(group="quality", kind="quality", schedule="fae", **fields)
    row = hot.quality(cell, PackedDataset.open(packed), folder)
    samples = PackedDataset.open(packed).split("train").num_rows
    return {"samples": samples, **{n: getattr(cell, n) for n in ("rows", "amount", "batch_size", "rate")}, **row}


def budgets(packed: Path, shape: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes over the link by budget, rows chosen by counts and by samples covered; with SGD a row is its weights."""
    dataset, found = PackedDataset.open(packed), []
    for rows in ("exact", "covering"):
        for amount in BUDGETS:
            fields = {**shape, "rows": rows, "amount": amount, "optimizer": "sgd"}
            cell = hot.HotCell(group="link", kind="coverage", **fields)
            row = hot.coverage(cell, dataset)
            names = ("hot_bytes", "hot_samples", "link_bytes", "hybrid_bytes", "hybrid_ratio")
            found.append({"rows": rows, "amount": amount, **{name: row[name] for name in names}})
    return found


# ---- the page


def quality_table(cells: list[dict[str, Any]]) -> list[str]:
    """Both kinds of data."""
    rows = []
    for cell in cells:
        difference, error = cell["auc_difference"], cell["auc_difference_se"]
        if cell["name"] == "hot_quality_criteo":
            promise = held("within two standard errors", holds=abs(difference) <= 2 * error)
        else:
            promise = held(f"at most {MOST_DIFFERENCE}", holds=abs(difference) <= MOST_DIFFERENCE)
        auc = f"{cell['auc_baseline']:.4f} / {cell['auc_fae']:.4f}"
        loss = f"{cell['logloss_baseline']:.4f} / {cell['logloss_fae']:.4f}"
        shares = [f"{cell['hot_samples']:.1%}", f"{cell['num_swaps']:.0f}"]
        name = cell["name"].removeprefix("hot_quality_").removesuffix("_10")
        what = [name, f"{cell['samples']:,}", f"{cell['rate']:g}", cell["seeds"]]
        rows.append([*what, *shares, auc, f"{difference:+.5f} ({error:.5f})", promise, loss])
    text = (
        "An epoch of turns of cold and hot batches whose rate follows the validation loss, beside one in shuffled "
        "order, from the same weights: `criteo` the 80,000 real rows (half of the tables' bytes hot, chosen so that "
        "most samples are), `synthetic` clicks of Criteo Kaggle's shape with a planted teacher (a fifth of the bytes, "
        "by counts). DLRM, dim 16, row-wise Adagrad. Pairs: shuffled / turns, means over seeds; the difference is "
        "paired by seed, its standard error in brackets."
    )
    head = ("data", "samples", "first rate", "seeds", "hot samples")
    head = (*head, "swaps", "AUC", "difference", "promised", "LogLoss")
    return [text, "", *table({name: "left" if k in (0, 8) else "right" for k, name in enumerate(head)}, rows)]


def link_table(cells: list[dict[str, Any]]) -> list[str]:
    """Bytes by budget."""
    (cell,) = cells
    rows = [
        [
            own["rows"],
            f"{own['amount']:.0%}",
            f"{own['hot_bytes'] / 1e6:.1f}",
            f"{own['hot_samples']:.1%}",
            f"{own['link_bytes'] / 1e6:.0f}",
            f"{own['hybrid_ratio']:.2f}x",
        ]
        for own in cell["budgets"]
    ]
    most = max(own["hybrid_ratio"] for own in cell["budgets"] if own["amount"] <= 0.5)
    promise = held(f"at least {cell['least_ratio']:g}x, with half of the bytes hot", holds=most >= cell["least_ratio"])
    hybrid = f"{cell['budgets'][0]['hybrid_bytes'] / 1e6:.0f} MB"
    text = (
        "Bytes over the link to a fast device in an epoch of turns of 50 %, on the same real rows, dim 16, SGD; the "
        f"hybrid (pooled rows over, their gradients back) takes {hybrid}. Counted, by the formulas of hot/link.py, "
        f"which a run's counts equal. {promise} ({most:.2f}x)."
    )
    head = ("rows by", "budget, of the tables' bytes", "hot MB", "hot samples", "MB over the link", "times fewer")
    return [text, "", *table({name: "left" if k == 0 else "right" for k, name in enumerate(head)}, rows)]
