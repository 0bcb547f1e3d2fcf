"""Your own model over a packed dataset: `hotrow.Loader` gives `len(loader)` batches per epoch.

.venv/bin/python examples/packed_dataset.py
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from hotrow.data.prepare.prepare import run_prepare  # `hotrow prepare csv clicks.csv --out clicks` on the command line


def write_clicks(path: Path, num_rows: int = 5000) -> None:
    """Writes raw rows in which the item decides."""
    generator = np.random.default_rng(0)
    item, user = generator.integers(0, 50, num_rows), generator.integers(0, 300, num_rows)
    click = (generator.random(num_rows) < np.where(item % 2, 0.6, 0.1)).astype(int)
    columns = {"user": [f"u{u}" for u in user], "item": [f"i{i}" for i in item], "price": generator.random(num_rows)}
    pyarrow.csv.write_csv(pa.table({**columns, "click": click}), path)


def main() -> None:
    """Prepare, train two epochs, print the mean loss of each."""
    with tempfile.TemporaryDirectory() as folder:
        write_clicks(Path(folder) / "clicks.csv")
        run_prepare("csv", Path(folder) / "clicks.csv", Path(folder) / "clicks", label="click", split="random")
        dataset = hotrow.PackedDataset.open(Path(folder) / "clicks")
        emb = hotrow.EmbeddingCollection(dataset.table_configs(8), seed=0)
        torch.manual_seed(0)
        head = nn.Linear(emb.output_dim + len(dataset.info.dense_names), 1)
        dense_opt, sparse_opt = torch.optim.Adam(head.parameters(), lr=0.01), hotrow.Adagrad(emb, lr=0.05)
        loader = hotrow.Loader(dataset.split("train"), 256, shuffle_seed=1)
        for epoch in range(2):
            total = 0.0
            for dense, sparse, label in loader:
                logit = head(torch.cat([dense, emb(sparse)], dim=1)).squeeze(1)
                loss = binary_cross_entropy_with_logits(logit, label)
                dense_opt.zero_grad()
                loss.backward()
                dense_opt.step()
                sparse_opt.step()
                total += loss.item()
            print(f"epoch {epoch}: mean loss {total / len(loader):.4f} over {len(loader)} batches")


if __name__ == "__main__":
    main()
