"""Tables larger than memory: part of the rows on disk, fetched before they are needed, with the same bits as in DRAM.

.venv/bin/python examples/larger_than_memory.py
"""

import tempfile

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow

NUM_ITEMS, NUM_USERS, BATCH_SIZE = 300_000, 200_000, 512


def make_batches(number: int) -> list[hotrow.Batch]:
    """Returns batches of skewed ids; an item is clicked when its number and the user's are both even or both odd."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(number):
        ids_FB = torch.rand(2, BATCH_SIZE, generator=generator) ** 4 * torch.tensor([[NUM_USERS], [NUM_ITEMS]])
        label = (ids_FB.long() % 2).sum(0) != 1
        sparse = hotrow.KeyedJaggedTensor(["user", "item"], ids_FB.long().flatten())
        batches.append(hotrow.Batch(torch.empty(BATCH_SIZE, 0), sparse, label.float()))
    return batches


def train(memory: hotrow.Memory | None) -> float:
    """Returns the loss of the last step, with the tables where `memory` puts them."""
    tables = [
        hotrow.TableConfig(name=name, num_embeddings=n, embedding_dim=16, feature_names=(name,))
        for name, n in {"user": NUM_USERS, "item": NUM_ITEMS}.items()
    ]
    emb = hotrow.EmbeddingCollection(tables, memory=memory, seed=0)
    optimizer = hotrow.Adagrad(emb, lr=0.05)
    torch.manual_seed(0)
    head = nn.Linear(emb.output_dim, 1)
    for batch in hotrow.lookahead(make_batches(60), emb, depth=4):
        loss = binary_cross_entropy_with_logits(head(emb(batch.sparse)).squeeze(1), batch.label)
        loss.backward()
        optimizer.step()
    if counters := emb.placement.counters():
        rows = sum(table["read_rows"] for table in counters.values())
        print(f"{rows:,} rows were read from disk")
    return loss.item()


def main() -> None:
    """Trains with a tenth of the tables in memory, then with all of them, and compares the losses."""
    with tempfile.TemporaryDirectory(dir=".", prefix="hotrow-example-") as folder:
        part = train(hotrow.Memory(dram="4MiB", ssd=folder))
    everything = train(None)
    print(f"loss with a part in memory {part}, with everything {everything}")
    assert part == everything


if __name__ == "__main__":
    main()
