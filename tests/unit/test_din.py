"""DIN against plain torch that follows the paper: padded histories under a mask, one activation unit per history."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hotrow import KeyedJaggedTensor, TableConfig
from hotrow.embedding import EmbeddingCollection
from hotrow.models.din import DIN, DINSpec
from hotrow.optim import SGD
from hotrow.run.build import look_up
from loops import looped

DIMS, ROWS = {"user": 3, "item": 8, "category": 5}, {"user": 30, "item": 50, "category": 9}
FEATURES = {"user": "user", "item": "item", "item_history": "item", "category": "category"}
FEATURES |= {"category_history": "category", "tags": "category"}
ITEM, CATEGORY = [3, 0, 6, 1, 6, 2, 0, 5], [0, 2, 6, 1, 5, 2, 0, 7]
TAGS = [1, 0, 2, 3, 1, 1, 0, 4]
LENGTHS = {"item_history": ITEM, "category_history": CATEGORY, "tags": TAGS}
B = len(ITEM)


def make_embedding() -> EmbeddingCollection:
    names = {table: tuple(feature for feature, own in FEATURES.items() if own == table) for table in ROWS}
    tables = [
        TableConfig(name=name, num_embeddings=rows, embedding_dim=DIMS[name], feature_names=names[name])
        for name, rows in ROWS.items()
    ]
    return EmbeddingCollection(tables, seed=3)


def make_model(embedding: EmbeddingCollection, *, num_dense: int = 0, **options: object) -> DIN:
    spec = DINSpec.model_validate({"attention_mlp": [7], "top_mlp": [11, 4], **options})
    dims = {name: DIMS[FEATURES[name]] for name in embedding.feature_names}
    return spec.build(num_dense=num_dense, dims=dims, generator=torch.Generator().manual_seed(5))


def make_ids(lengths: dict[str, list[int]] = LENGTHS, num_samples: int = B) -> dict[str, list[list[int]]]:
    g = torch.Generator().manual_seed(1)
    each = {name: lengths.get(name, [1] * num_samples) for name in FEATURES}
    return {
        name: [torch.randint(0, ROWS[FEATURES[name]], (n,), generator=g).tolist() for n in own]
        for name, own in each.items()
    }


def jagged(ids: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    bags = [bag for own in ids.values() for bag in own]
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    return KeyedJaggedTensor(list(ids), values, lengths=torch.tensor([len(bag) for bag in bags]))


class PlainDIN(nn.Module):
    """In float64, on histories padded at their end with an id that has a row, which the mask leaves out."""

    def __init__(self, model: DIN, embedding: EmbeddingCollection) -> None:
        super().__init__()
        self.names = embedding.feature_names
        weights = {name: embedding.weights[name].double() for name in ROWS}
        self.tables = nn.ParameterDict({name: nn.Parameter(own.clone()) for name, own in weights.items()})
        pairs = zip(model.histories.values(), model.attentions, strict=True)
        self.units = nn.ModuleDict({history: plain_mlp(one.mlp.layers) for history, one in pairs})
        self.top = plain_mlp(model.top.layers)

    def forward(self, dense: Tensor, ids: dict[str, list[list[int]]], *, filler: int) -> Tensor:
        parts = [dense.double()]
        for name in self.names:
            longest = max(1, *map(len, ids[name]))
            padded = torch.tensor([bag + [filler] * (longest - len(bag)) for bag in ids[name]])
            mask = torch.tensor([[k < len(bag) for k in range(longest)] for bag in ids[name]])
            rows = self.tables[FEATURES[name]][padded]
            weights = mask.double()
            if name in self.units:
                q = self.tables[FEATURES[name]][torch.tensor(ids[name.removesuffix("_history")])].expand(rows.shape)
                weights = self.units[name](torch.cat([q, rows, q - rows, q * rows], 2)).squeeze(2) * mask
            parts.append((weights[:, :, None] * rows).sum(1))
        return self.top(torch.cat(parts, 1))[:, 0]


def plain_mlp(layers: Sequence[nn.Linear]) -> nn.Sequential:
    found = []
    for layer in layers:
        own = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
        own.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
        found += [own, nn.ReLU()]
    return nn.Sequential(*found[:-1])


@looped("num_dense", [0, 2])
@looped("filler", [0, 4])
def test_against_plain_torch(num_dense: int, filler: int) -> None:
    """Outputs, gradients of every weight, and rows after a step of rate 1, which are the rows less their gradients."""
    embedding = make_embedding()
    model = make_model(embedding, num_dense=num_dense)
    with torch.no_grad():
        for name in ROWS:  # large enough for weights of steps that differ
            embedding.weights[name].mul_(5)
    twin = PlainDIN(model, embedding)
    dense, ids = torch.randn(B, num_dense, generator=torch.Generator().manual_seed(2)), make_ids()
    logits = model(dense, look_up(model, embedding, jagged(ids)))
    expected = twin(dense, ids, filler=filler)
    assert logits.shape == (B,) and float(logits.detach().std()) > 1e-3, "the samples differ"
    torch.testing.assert_close(logits, expected.float(), rtol=1e-5, atol=1e-5)
    optimizer = SGD(embedding, lr=1.0)
    logits.square().sum().backward()
    expected.square().sum().backward()
    optimizer.step()
    for name, table in twin.tables.items():
        updated = (table - table.grad).detach().float()
        torch.testing.assert_close(embedding.weights[name], updated, rtol=1e-4, atol=1e-5)
    ours = [*(layer for one in model.attentions for layer in one.mlp.layers), *model.top.layers]
    theirs = [layer for part in (*twin.units.values(), twin.top) for layer in part if isinstance(layer, nn.Linear)]
    assert sum(own.numel() for own in model.parameters()) == sum(own.numel() for own in twin.parameters()) - sum(
        table.numel() for table in twin.tables.values()
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.weight.grad, other.weight.grad.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.bias.grad, other.bias.grad.float(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_step_counts_as_it_matters_to_the_item() -> None:
    """Steps may come in any order; each of them, and the item they are compared with, changes the score."""
    embedding, ids = make_embedding(), make_ids({name: [5] for name in LENGTHS}, 1)
    model = make_model(embedding)

    def logit(**changes: list[list[int]]) -> float:
        return float(model(torch.empty(1, 0), look_up(model, embedding, jagged(ids | changes))))

    (steps,) = ids["item_history"]
    assert logit(item_history=[steps[::-1]]) == pytest.approx(logit(), abs=1e-6)
    with_others = [logit(item_history=[[*steps[:4], other]]) for other in range(ROWS["item"])]
    assert len({round(value, 7) for value in with_others}) > 30

    def attended(item: int) -> Tensor:
        rows = look_up(model, embedding, jagged(ids))
        k, offsets = rows["item_history"]
        return model.attentions[0](k, embedding.weights["item"][[item]], offsets)

    assert all(not torch.equal(attended(a), attended(b)) for a, b in itertools.combinations(range(4), 2))


@looped(
    ("dims", "names"),
    [
        ({"user": 4, "item": 4}, ["item_history", "user, item", "histories"]),
        ({"user": 4, "item_history": 4}, ["item_history", "'item'", "lacks"]),
        ({"item": 4, "item_history": 5}, ["item_history", "4 columns", "of 5", "model.embedding_dim"]),
    ],
)
def test_data_it_refuses(dims: dict[str, int], names: list[str]) -> None:
    with pytest.raises(ValueError, match="din") as told:
        DINSpec().build(num_dense=0, dims=dims, generator=torch.Generator())
    assert all(name in str(told.value) for name in names)


def test_a_batch_without_a_feature_is_refused() -> None:
    embedding, ids = make_embedding(), make_ids()
    model = make_model(embedding)
    del ids["user"]
    with pytest.raises(ValueError, match="'user' is missing"):
        model(torch.empty(B, 0), look_up(model, embedding, jagged(ids)))
