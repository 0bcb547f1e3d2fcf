"""The shortest loop: tables and a linear layer, an optimizer for each, and one clip of both sides' gradients.

.venv/bin/python examples/plain_loop.py
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow

NUM_USERS, NUM_ITEMS = 1000, 200


class Model(nn.Module):
    """A logit from two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            hotrow.TableConfig(name=name, num_embeddings=n, embedding_dim=8, feature_names=(name,))
            for name, n in {"user": NUM_USERS, "item": NUM_ITEMS}.items()
        ]
        self.emb = hotrow.EmbeddingCollection(tables, seed=0)
        self.head = nn.Linear(self.emb.output_dim, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits [B] for ids [B, 2]."""
        return self.head(self.emb(ids)).squeeze(1)


def make_batches(number: int = 50) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns ids [B, 2] and labels [B]: every other item is clicked."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, NUM_ITEMS, (256, 2), generator=generator) for _ in range(number)]
    return [(each, (each[:, 1] % 2).float()) for each in ids]


def main() -> None:
    """Train and print the last loss."""
    torch.manual_seed(0)
    model = Model()
    dense_opt = torch.optim.Adam(model.parameters(), lr=0.01)  # the layers
    sparse_opt = hotrow.Adagrad(model.emb, lr=0.1)  # the tables, which torch's optimizers do not see
    for ids, label in make_batches():
        loss = binary_cross_entropy_with_logits(model(ids), label)
        dense_opt.zero_grad()
        loss.backward()
        hotrow.clip_grad_norm_(model, 1.0)  # torch.nn.utils.clip_grad_norm_ would see only the layers
        dense_opt.step()
        sparse_opt.step()
    print(f"last loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
