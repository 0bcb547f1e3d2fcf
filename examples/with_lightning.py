"""The plain loop as a LightningModule: with two optimizers, one of them hotrow's, optimization is manual.

.venv/bin/python examples/with_lightning.py     (pip install lightning)
"""

from typing import Any

import lightning
import torch
from plain_loop import Model, make_batches
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import hotrow


class Clicks(lightning.LightningModule):
    """The model of plain_loop.py."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = Model()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for the layers, one for the tables."""
        return [torch.optim.Adam(self.model.parameters(), lr=0.01), hotrow.Adagrad(self.model.emb, lr=0.1)]

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """One step of both."""
        ids, label = batch
        dense_opt, sparse_opt = self.optimizers()
        loss = binary_cross_entropy_with_logits(self.model(ids), label)
        dense_opt.zero_grad()
        self.manual_backward(loss)
        hotrow.clip_grad_norm_(self.model, 1.0)
        dense_opt.step()
        sparse_opt.step()
        self.last_loss = loss.item()
        return loss


def main() -> None:
    """Train one epoch and print the last loss, that of plain_loop.py."""
    torch.manual_seed(0)
    clicks = Clicks()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet)
    trainer.fit(clicks, DataLoader(make_batches(), batch_size=None))  # or a hotrow.Loader
    print(f"last loss {clicks.last_loss:.6f}")


if __name__ == "__main__":
    main()
