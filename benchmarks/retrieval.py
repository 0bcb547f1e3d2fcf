"""Recall of the two-tower recipe on real histories, beside ItemCF and the most popular items.

    python -m benchmarks.retrieval --data ../shared/data/taobao_userbehavior_110k.csv.gz [--seeds 3]
    python -m benchmarks.retrieval --items 1000000 10000000

All three see the same training rows and find the items of the same test rows among the same items. ItemCF scores an
item by the sum, over the items of a row's history, of the cosine of their co-occurrence: how many users have both, over
the root of how many have either. Equal scores are ordered by popularity, and so are items without a score, which come
last.

`--items` measures an exact search instead: the product of users' vectors with those of so many items, and the 100
highest scores of each user.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray

from benchmarks.histories import prepare
from hotrow.config.load import load_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.run import runs

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "taobao-two-tower.yaml"
KS = (20, 100)
WIDTH, AT_ONCE = 64, (1, 16)


class Rows:
    """The rows with label 1 of a split: user, item, and history as a matrix of counts, [rows, items]."""

    def __init__(self, dataset: PackedDataset, split: str) -> None:
        num_items = dataset.info.table_by_name["item"].num_embeddings
        batch = next(iter(Loader(dataset.split(split), dataset.split(split).num_rows, shuffle_seed=None)))
        kept = np.flatnonzero(batch.label.numpy() > 0)
        values, offsets, _ = (None if part is None else part.numpy() for part in batch.sparse.bags("item_history"))
        ones = np.ones(len(values), np.float32)
        self.history = scipy.sparse.csr_matrix((ones, values, offsets), (len(batch), num_items))[kept]
        self.user, self.item = (batch.sparse.bags(name)[0].numpy()[kept] for name in ("user", "item"))
        every = batch.sparse.bags("item")[0].numpy()
        self.counts = np.bincount(every, minlength=num_items)
        """By item, the rows that have it, those with label 0 included, as two towers count them."""


def recalls(scores: scipy.sparse.csr_matrix, items_of_rows: NDArray[Any], order: NDArray[np.int64]) -> dict[str, float]:
    """Returns recall@k of scores above 0, then of the most popular of the other items. order: items by popularity."""
    place_of = np.full(scores.shape[1], len(order))
    place_of[order] = np.arange(len(order))
    found = dict.fromkeys(KS, 0)
    for k, item in enumerate(items_of_rows):
        row = scores[[k]]
        items, values = row.indices, row.data
        known = (place_of[items] < len(order)) & (values > 0)
        items, values = items[known], values[known]
        if place_of[item] == len(order):  # training has no such item
            continue
        mine = values[items == item]
        if len(mine):
            ahead = values > mine[0]
            place = int(ahead.sum() + ((values == mine[0]) & (place_of[items] < place_of[item])).sum())
        else:
            place = len(items) + int(place_of[item] - (place_of[items] < place_of[item]).sum())
        for most in KS:
            found[most] += place < most
    return {f"recall_{most}": number / len(items_of_rows) for most, number in found.items()}


def baselines(dataset: PackedDataset, split: str) -> dict[str, dict[str, float]]:
    """Returns recall@k of ItemCF and of the most popular items on the rows of a split that have label 1."""
    train, test = Rows(dataset, "train"), Rows(dataset, split)
    order = np.lexsort((np.arange(len(train.counts)), -train.counts))
    order = order[(train.counts[order] > 0) & (order > 0)]
    num_users, num_items = dataset.info.table_by_name["user"].num_embeddings, len(train.counts)
    of_row = scipy.sparse.csr_matrix(
        (np.ones(len(train.item), np.float32), (np.arange(len(train.item)), train.item)), (len(train.item), num_items)
    )
    own = scipy.sparse.csr_matrix(
        (np.ones(len(train.user), np.float32), (train.user, np.arange(len(train.user)))), (num_users, len(train.user))
    )
    has = ((own @ (of_row + train.history)) > 0).astype(np.float32)
    together = (has.T @ has).tocsr()
    scale = scipy.sparse.diags(1 / np.sqrt(np.maximum(together.diagonal(), 1)))
    together.setdiag(0)
    nothing = scipy.sparse.csr_matrix(test.history.shape, dtype=np.float32)
    return {
        "itemcf": recalls((test.history @ (scale @ together @ scale)).tocsr(), test.item, order),
        "popular": recalls(nothing, test.item, order),
    }


def search(num_items: int, num_users: int) -> dict[str, float]:
    """Returns the milliseconds of one core that a user takes if `num_users` are searched together, the least of five
    times. They are the processor's time, which other programs hardly change."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    items, users = (torch.randn(number, WIDTH, generator=generator) for number in (num_items, num_users))
    seconds = []
    for _ in range(5):
        start_s = time.process_time()
        (users @ items.T).topk(max(KS))
        seconds.append(time.process_time() - start_s)
    return {"items": num_items, "users": num_users, "ms_per_user": 1000 * min(seconds) / num_users}


def main() -> None:
    """Prints one JSON object a line: the baselines, then a run for each seed; or the times of searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", type=Path)
    what.add_argument("--items", type=int, nargs="+", help="numbers of items to search")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    options = parser.parse_args()
    for num_items in options.items or ():
        for num_users in AT_ONCE:
            print(json.dumps(search(num_items, num_users)), flush=True)
    if options.data is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepare(options.data, Path(folder) / "data")
        for name, found in baselines(dataset, "test").items():
            print(json.dumps({"model": name, **found}), flush=True)
        for seed in range(1, options.seeds + 1):
            own = [f"data={dataset.path}", f"run={folder}/run-{seed}", f"train.seed={seed}", *options.changes]
            run = runs.train(load_config(RECIPE, own), quiet=True)
            metrics = (run.record.metrics or {})["test"]
            shown = {name: metrics[name] for name in ("recall_20", "recall_100", "mrr", "unseen", "num_positives")}
            print(json.dumps({"model": "two_tower", "seed": seed, "step": run.record.chosen_step, **shown}), flush=True)


if __name__ == "__main__":
    main()
