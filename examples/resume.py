"""Your own training loop, stopped and continued: checkpoints of tables, model and both optimizers.

    .venv/bin/python examples/resume.py

Trains six steps in one go, then three steps, a checkpoint, and three more steps in fresh objects: the same bits.
"""

import tempfile
from pathlib import Path

import torch

import hotrow

TABLES = [hotrow.TableConfig(name="item", num_embeddings=1000, embedding_dim=8, feature_names=("item",))]


def make_parts() -> dict[str, torch.nn.Module | torch.optim.Optimizer]:
    """Tables, a linear model on them, and an optimizer for each."""
    emb = hotrow.EmbeddingCollection(TABLES, seed=0)
    torch.manual_seed(0)
    head = torch.nn.Linear(emb.output_dim, 1)
    dense, sparse = torch.optim.Adam(head.parameters(), lr=0.01), hotrow.Adagrad(emb, lr=0.1)
    return {"embedding": emb, "model": head, "dense_optimizer": dense, "sparse_optimizer": sparse}


def train(parts: dict, steps: range) -> float:
    """Steps on made-up batches that depend on the step alone; returns the last loss."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 1000, (64, 1), generator=generator)
        label = (ids[:, 0] % 2).float()
        logit = parts["model"](parts["embedding"](ids)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        parts["dense_optimizer"].zero_grad()
        loss.backward()
        parts["dense_optimizer"].step()
        parts["sparse_optimizer"].step()
    return loss.item()


def main() -> None:
    """Compare the loss of the sixth step with and without a stop."""
    whole = train(make_parts(), range(6))
    with tempfile.TemporaryDirectory() as folder:
        first = make_parts()
        train(first, range(3))
        path = hotrow.save_checkpoint(Path(folder) / "step-3", first, extra={"step": 3})

        second = make_parts()
        state = hotrow.load_checkpoint(path, second)
        resumed = train(second, range(state["step"], 6))
    print(f"loss of step 6: {whole!r} at once, {resumed!r} after a stop")
    assert whole == resumed


if __name__ == "__main__":
    main()
