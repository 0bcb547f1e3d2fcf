"""hotrow's tables inside your own PyTorch model: only the embedding layer and its optimizer change.

.venv/bin/python examples/own_model.py
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow


class TwoTowers(nn.Module):
    """score(user, item) = dot of two small MLPs over pooled embeddings; a user is the bag of items seen lately."""

    def __init__(self, emb: hotrow.EmbeddingCollection, dim: int) -> None:
        super().__init__()
        self.emb = emb
        self.towers = nn.ModuleDict({name: nn.Linear(dim, dim) for name in emb.feature_names})

    def forward(self, sparse: hotrow.KeyedJaggedTensor) -> torch.Tensor:
        """Logits [B]."""
        pooled_BFD = self.emb(sparse).view(sparse.stride, len(self.towers), -1)
        user, item = (tower(pooled_BFD[:, f]) for f, tower in enumerate(self.towers.values()))
        return (user * item).sum(1)


def make_batch(generator: torch.Generator, batch_size: int = 512) -> tuple[hotrow.KeyedJaggedTensor, torch.Tensor]:
    """Returns histories of 1 to 5 items and a candidate, clicked if it is of the last item's kind (id modulo 10)."""
    lengths = torch.randint(1, 6, (batch_size,), generator=generator)
    history = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
    candidate = torch.randint(0, 1000, (batch_size,), generator=generator)
    label = (history[lengths.cumsum(0) - 1] % 10 == candidate % 10).float()
    sparse = hotrow.KeyedJaggedTensor(
        ["history", "candidate"],
        torch.cat([history, candidate]),
        lengths=torch.cat([lengths, torch.ones_like(lengths)]),
    )
    return sparse, label


def main(num_steps: int = 300) -> None:
    """Train and print the loss now and then."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    # One table, two features: both teach what an item means.
    tables = [
        hotrow.TableConfig(
            name="items", num_embeddings=1000, embedding_dim=16, feature_names=("history", "candidate"), pooling="mean"
        )
    ]
    emb = hotrow.EmbeddingCollection(tables, seed=0)
    model = TwoTowers(emb, dim=16)
    dense_opt = torch.optim.Adam(model.parameters(), lr=1e-2)  # does not touch the tables: they are not parameters
    sparse_opt = hotrow.Adagrad(emb, lr=0.1)
    for step in range(num_steps):
        sparse, label = make_batch(generator)
        loss = binary_cross_entropy_with_logits(model(sparse), label)
        dense_opt.zero_grad()
        loss.backward()
        dense_opt.step()
        sparse_opt.step()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
