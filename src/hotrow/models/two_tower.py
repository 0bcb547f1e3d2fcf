"""Two towers (Yi et al., 2019): a vector of the user and one of the item, whose product is the score.

    [dense_BI | rows of the user's features]  --user MLP--> u_BM --> u / |u| / temperature --+--> [u | v], [B, 2 M]
                [rows of the item's features] --item MLP--> v_BM --> v / |v| ----------------+

Neither tower sees what the other sees, so vectors of all items can be made once and searched for each user. The vectors
are trained by a softmax over items (objectives/sampled_softmax.py). The rows of a list of ids count as their mean, so
that a long history is no longer a vector than a short one.

Shape suffixes as in hotrow.batch, and: M width of a vector, P sum of the columns of a tower's features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hotrow.models.layers import MLP, Network, unit
from hotrow.models.spec import Dataset, Features, MLPSpec, ObjectiveName, Scale, Width


class TwoTower(Network):
    """dense [B, I], pooled rows of all features [B, sum of D] -> [B, 2 M], the user's vector, then the item's.

    num_dense: I, of the user; 0 if dense inputs are left out. dims: columns by feature, in the order of the collection.
    user_features, item_features: those of either tower; the first of an item is its id. tower_mlp: hidden widths of
    each; M is appended. generator: CPU generator from which all weights are drawn, user first.
    """

    retrieves = True

    def __init__(
        self,
        *,
        num_dense: int,
        dims: Mapping[str, int],
        user_features: Sequence[str],
        item_features: Sequence[str],
        tower_mlp: Sequence[int],
        vector_dim: int,
        temperature: float,
        dropout: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.dims, self.num_dense = dict(dims), num_dense
        self.user_features, self.item_features = tuple(user_features), tuple(item_features)
        self.temperature = temperature
        num_inputs = [sum(dims[name] for name in names) for names in (user_features, item_features)]
        widths = [num_dense + num_inputs[0], *tower_mlp, vector_dim], [num_inputs[1], *tower_mlp, vector_dim]
        self.user_tower, self.item_tower = (
            MLP(own, generator=generator, last="linear", dropout=dropout) for own in widths
        )

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        user_BP, item_BP = self.divided(pooled_BP)
        return torch.cat([self.user(dense_BI, user_BP), self.item(item_BP)], dim=1)

    def divided(self, pooled_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of the user's features and those of the item's, in the order in which towers take them."""
        rows = dict(zip(self.dims, torch.split(pooled_BP, [*self.dims.values()], dim=1), strict=True))
        first = pooled_BP[:, :0]
        user_BP, item_BP = (
            torch.cat([first, *(rows[name] for name in names)], dim=1)
            for names in (self.user_features, self.item_features)
        )
        return user_BP, item_BP

    def user(self, dense_BI: Tensor, user_BP: Tensor) -> Tensor:
        """Returns the vectors of users, divided by the temperature, [B, M]."""
        vector_BM: Tensor = self.user_tower(torch.cat([dense_BI[:, : self.num_dense], user_BP], dim=1))
        return unit(vector_BM) / self.temperature

    def item(self, item_BP: Tensor) -> Tensor:
        """Returns the vectors of items, [B, M]."""
        vector_BM: Tensor = self.item_tower(item_BP)
        return unit(vector_BM)


class TwoTowerSpec(MLPSpec):
    """A vector of the user and a vector of the item, for finding items among all: retrieval (docs/retrieval.md)."""

    network: ClassVar = TwoTower
    pooling: ClassVar = "mean"
    small: ClassVar[Mapping[str, Any]] = {"tower_mlp": [64]}

    name: Literal["two_tower"] = "two_tower"
    """Two towers (Yi et al., 2019)."""
    objective: ObjectiveName = "sampled_softmax"
    item: Features = ["item"]
    """Features of an item, each of one id per row. The first is its id, by which items are counted and told apart."""
    user: Features | None = None
    """Features of a user, histories among them. null means all features that are not the item's."""
    dense_inputs: Literal["user", "none"] = "user"
    """Whether dense inputs go to the user's tower or are left out. They must say nothing about the row's item."""
    tower_mlp: list[Width] = [256]
    """Widths of the hidden layers of each tower; a last layer of `vector_dim` is added."""
    vector_dim: Width = 64
    """Width of the vectors. They are divided by their length, so that their product is the cosine of their angle."""
    temperature: Scale = 0.05
    """What products are divided by: the smaller, the more a softmax over cosines can tell items apart."""

    def check_options(self) -> None:
        named = [*self.item, *(self.user or ())]
        if twice := [name for name in named if named.count(name) > 1]:
            raise ValueError(f"item and user name {twice[0]!r} twice; a feature belongs to one tower")

    def check(self, dataset: Dataset) -> None:
        """Raises ValueError if towers cannot be made of the features, or a user's input is made of the item."""
        super().check(dataset)
        info = dataset.info
        self._sides(info.feature_names)
        for feature in info.features:
            if feature.name in self.item and feature.kind != "one_hot":
                raise ValueError(
                    f"model.item names {feature.name!r}, a list of ids in {dataset.path}; an item has features of one "
                    "id: leave it out of model.item"
                )
        counted = (info.ids.get("schema") or {}).get("statistics", ())
        columns = [name for spec in counted for name in spec["columns"] if name in self.item]
        if columns and self.dense_inputs == "user":
            raise ValueError(
                f"dense inputs of {dataset.path} are statistics of {columns[0]!r}, a feature of the item, which would "
                "tell the user's tower what to find: set model.dense_inputs to none, or prepare without `statistics`"
            )

    def _sides(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the features of the user and those of the item. Raises ValueError if there are no such features."""
        user = [name for name in names if name not in self.item] if self.user is None else self.user
        for field, own in (("item", self.item), ("user", user)):
            if missing := [name for name in own if name not in names]:
                raise ValueError(
                    f"model.{field} names {missing[0]!r}, but the data has the features {', '.join(names)}; set "
                    f"model.{field} to those of the {field}"
                )
        if not user:
            raise ValueError(f"model.item has all features, {', '.join(names)}; leave the user's out of it")
        return user, self.item

    def build(self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator) -> TwoTower:
        user, item = self._sides(list(dims))
        return TwoTower(
            num_dense=num_dense if self.dense_inputs == "user" else 0,
            dims=dims,
            user_features=user,
            item_features=item,
            tower_mlp=self.tower_mlp,
            vector_dim=self.vector_dim,
            temperature=self.temperature,
            dropout=self.dropout,
            generator=generator,
        )
