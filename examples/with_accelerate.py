"""The plain loop under Accelerate: `prepare` takes the model and both optimizers, `backward` is the accelerator's.

.venv/bin/python examples/with_accelerate.py     (pip install accelerate)
"""

import accelerate
import torch
from plain_loop import Model, make_batches
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow


def main() -> None:
    """Train and print the last loss, that of plain_loop.py."""
    torch.manual_seed(0)
    model = Model()
    accelerator = accelerate.Accelerator(cpu=True)
    model, dense_opt, sparse_opt = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.01), hotrow.Adagrad(model.emb, lr=0.1)
    )
    for ids, label in make_batches():
        loss = binary_cross_entropy_with_logits(model(ids), label)
        dense_opt.zero_grad()
        accelerator.backward(loss)
        hotrow.clip_grad_norm_(model, 1.0)  # accelerator.clip_grad_norm_ would see only the layers
        dense_opt.step()
        sparse_opt.step()
    print(f"last loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
