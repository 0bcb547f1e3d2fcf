"""Who takes the training step of benchmarks.end_to_end: hotrow, and its peers, each from the same weights.

A peer is imported when it is built; `missing` says why it cannot be, where a package or a path is not there. Nothing of
a peer is copied here: facebookresearch/dlrm runs from the folder that --dlrm names.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks import bench
from benchmarks.dense_cells import interact_in_torch
from benchmarks.step_shapes import Setting
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.models.dlrm import DLRM
from hotrow.models.layers import MLP
from hotrow.optim import SGD, RowWiseAdagrad, SplitSGDBF16
from hotrow.tables import TableConfig

Arithmetic = Literal["fp32", "bf16"]


class Step:
    """One training step: forward, loss, gradients, every optimizer, on inputs made beforehand.

    inputs: one entry per batch. forward: of an entry, what `loss` compares with the batch's label.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[Any, Tensor]],
        forward: Callable[[Any], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.inputs, self.forward, self.loss, self.optimizers = inputs, forward, loss, optimizers
        self.is_probability = loss is not binary_cross_entropy_with_logits

    def prepare(self, batch: int) -> None:
        """Choose the batch."""
        self.input, self.label = self.inputs[batch % len(self.inputs)]

    def run(self) -> None:
        """Train on it."""
        out = self.forward(self.input)
        loss = self.loss(out, self.label)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.out, self.last_loss = out.detach(), loss.detach()

    def outputs(self) -> Iterable[Tensor]:
        """The loss, and the probability given to each sample."""
        return [self.last_loss, (self.out if self.is_probability else self.out.sigmoid()).flatten()]


class Parts(NamedTuple):
    """What every side starts from."""

    model: DLRM
    weights: list[Tensor]
    """Rows of each table; a peer copies them."""

    def layers(self, which: str) -> list[nn.Linear]:
        """The layers of the "bottom" or the "top" MLP."""
        return [cast(nn.Linear, layer) for layer in cast(MLP, getattr(self.model, which)).layers]


def labelled(setting: Setting, entry: Callable[[Batch], Any]) -> list[tuple[Any, Tensor]]:
    """`inputs` of a Step."""
    return [(entry(batch), batch.label) for batch in setting.batches]


def make_model(setting: Setting) -> DLRM:
    """hotrow's DLRM of the shape, from a fixed seed."""
    shape = setting.shape
    return DLRM(
        num_dense=shape.num_dense,
        num_features=len(shape.rows),
        embedding_dim=shape.embedding_dim,
        bottom_mlp=shape.bottom_mlp,
        top_mlp=shape.top_mlp,
        first_order=False,
        generator=torch.Generator().manual_seed(1),
    )


def make_ours(setting: Setting, sparse: bench.Optimizer, arithmetic: Arithmetic = "fp32") -> tuple[Step, Parts]:
    """hotrow's step, and the parts a peer starts from.

    bf16: as with `train.precision: split_bf16` and `train.dense_dtype: bf16`.
    """
    shape, is_narrow = setting.shape, arithmetic == "bf16"
    emb = EmbeddingCollection(
        (
            TableConfig(
                name=f"C{i + 1}",
                num_embeddings=n,
                embedding_dim=shape.embedding_dim,
                feature_names=(f"C{i + 1}",),
                dtype="bfloat16" if is_narrow else "float32",
            )
            for i, n in enumerate(shape.rows)
        ),
        seed=1,
    )
    model = make_model(setting)
    tables: torch.optim.Optimizer = SGD(emb, shape.lr)
    if sparse == "rowwise_adagrad":
        tables = RowWiseAdagrad(emb, shape.lr, eps=bench.EPS, initial_accumulator_value=bench.ACCUMULATOR)

    def forward(entry: tuple[Tensor, KeyedJaggedTensor]) -> Tensor:
        rows = emb(entry[1])
        with torch.autocast("cpu", dtype=torch.bfloat16) if is_narrow else nullcontext():
            logits: Tensor = model(entry[0], rows)
        return logits

    dense = SplitSGDBF16(model.parameters(), lr=shape.lr) if is_narrow else dense_sgd([model], shape.lr)
    inputs = labelled(setting, lambda batch: (batch.dense, batch.sparse))
    step = Step(inputs, forward, binary_cross_entropy_with_logits, [dense, tables])
    return step, Parts(model, list(emb.weights.values()))


# ---- plain PyTorch


def plain_mlp(layers: Iterable[nn.Linear], *, last_relu: bool) -> nn.Sequential:
    """Copies of `layers` with ReLUs between them, and after the last where `last_relu`."""
    modules = [module for layer in layers for module in (copy.deepcopy(layer), nn.ReLU())]
    return nn.Sequential(*(modules if last_relu else modules[:-1]))


def split_ids(setting: Setting, batch: Batch) -> tuple[list[Tensor], Tensor]:
    """The ids of each table, and the bag starts that all of them share."""
    shape = setting.shape
    return list(batch.sparse.values.chunk(len(shape.rows))), torch.arange(shape.batch_size) * shape.lookups


def dense_sgd(modules: Iterable[nn.Module], lr: float) -> torch.optim.Optimizer:
    """SGD for parameters with dense gradients; torch's fused one is the fastest, and takes no sparse gradients."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr, fused=True)


def make_plain(setting: Setting, parts: Parts, *, copy_rows: bool = True) -> Step:
    """The same model of torch's own parts: a sparse EmbeddingBag per table, cat + bmm + gather, torch's SGD."""
    num_tables = len(setting.shape.rows)
    bags = nn.ModuleList(
        nn.EmbeddingBag.from_pretrained(w.clone() if copy_rows else w, freeze=False, mode="sum", sparse=True)
        for w in parts.weights
    )
    bottom = plain_mlp(parts.layers("bottom"), last_relu=True)
    top = plain_mlp(parts.layers("top"), last_relu=False)
    interact = interact_in_torch(num_tables)

    def forward(entry: tuple[Tensor, list[Tensor], Tensor]) -> Tensor:
        dense, ids, offsets = entry
        pooled = torch.stack([bag(column, offsets) for bag, column in zip(bags, ids, strict=True)], 1)
        return top(interact(bottom(dense), pooled)).squeeze(1)

    return Step(
        labelled(setting, lambda batch: (batch.dense, *split_ids(setting, batch))),
        forward,
        binary_cross_entropy_with_logits,
        [dense_sgd([bottom, top], setting.shape.lr), torch.optim.SGD(bags.parameters(), lr=setting.shape.lr)],
    )


# ---- facebookresearch/dlrm


def load_dlrm(folder: Path) -> Any:
    """The module dlrm_s_pytorch of a checkout of facebookresearch/dlrm; what it prints goes to stderr."""
    sys.path.insert(0, str(folder))
    try:
        with redirect_stdout(sys.stderr):
            return importlib.import_module("dlrm_s_pytorch")
    finally:
        sys.path.remove(str(folder))


def make_dlrm(setting: Setting, parts: Parts, *, folder: Path) -> Step:
    """DLRM_Net, its BCE loss on probabilities and its torch.optim.SGD over everything, tables among it."""
    shape, module = setting.shape, load_dlrm(folder)
    top = (shape.top_inputs, *shape.top_mlp, 1)
    net = module.DLRM_Net(
        shape.embedding_dim,
        np.ones(len(shape.rows), dtype=int),  # tables of one row, replaced below: their own draws take minutes
        np.array((shape.num_dense, *shape.bottom_mlp, shape.embedding_dim)),
        np.array(top),
        arch_interaction_op="dot",
        sigmoid_bot=-1,
        sigmoid_top=len(top) - 2,
    )
    with torch.no_grad():
        for bag, rows in zip(net.emb_l, parts.weights, strict=True):
            bag.num_embeddings, bag.weight.data = len(rows), rows.clone()
        for name, theirs in (("bottom", net.bot_l), ("top", net.top_l)):
            copy_linears(parts.layers(name), theirs)

    def entry(batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        ids, offsets = split_ids(setting, batch)
        return batch.dense, offsets.expand(len(ids), -1).contiguous(), ids

    return Step(
        [(entry(batch), batch.label.unsqueeze(1)) for batch in setting.batches],
        lambda inputs: net(*inputs),
        net.loss_fn,
        [dense_sgd([net.bot_l, net.top_l], shape.lr), torch.optim.SGD(net.emb_l.parameters(), lr=shape.lr)],
    )


def copy_linears(layers: Sequence[nn.Linear], into: nn.Module) -> None:
    """Copy weights and biases into the linear layers of a module, in their order."""
    theirs = [module for module in into.modules() if isinstance(module, nn.Linear)]
    for mine, other in zip(layers, theirs, strict=True):
        with torch.no_grad():
            other.weight.copy_(mine.weight)
            other.bias.copy_(mine.bias)


# ---- torchrec on FBGEMM


def make_torchrec(setting: Setting, parts: Parts, *, sparse: bench.Optimizer, plain_dense: bool) -> Step:
    """torchrec's fused EmbeddingBagCollection (FBGEMM's CPU kernels) under torchrec's own DLRM or under torch's parts.

    The fused optimizer runs inside backward.
    """
    shape = setting.shape
    with redirect_stdout(sys.stderr):
        torchrec = importlib.import_module("torchrec")
        fused = importlib.import_module("torchrec.modules.fused_embedding_modules")
        models = importlib.import_module("torchrec.models.dlrm")
    names = setting.batches[0].sparse.keys
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=n, embedding_dim=shape.embedding_dim, feature_names=[name]
        )
        for name, n in zip(names, shape.rows, strict=True)
    ]
    optimizer: Any = torch.optim.SGD
    settings: dict[str, float] = {"lr": shape.lr}
    if sparse == "rowwise_adagrad":
        optimizer = importlib.import_module("torchrec.optim").RowWiseAdagrad
        settings["eps"] = bench.EPS
    collection = fused.FusedEmbeddingBagCollection(configs, optimizer, settings, device=torch.device("cpu"))
    with torch.no_grad():
        for (_, theirs), mine in zip(collection.state_dict().items(), parts.weights, strict=True):
            theirs.copy_(mine)
    if sparse == "rowwise_adagrad":
        for state in collection.fused_optimizer().state.values():
            for sums in state.values():
                sums.fill_(bench.ACCUMULATOR)

    def entry(batch: Batch) -> tuple[Tensor, Any]:
        offsets = torch.arange(len(names) * shape.batch_size + 1) * shape.lookups
        return batch.dense, torchrec.KeyedJaggedTensor(list(names), batch.sparse.values, offsets=offsets)

    dense: list[nn.Module]
    if plain_dense:
        bottom = plain_mlp(parts.layers("bottom"), last_relu=True)
        top = plain_mlp(parts.layers("top"), last_relu=False)
        dense, interact = [bottom, top], interact_in_torch(len(names))

        def forward(inputs: tuple[Tensor, Any]) -> Tensor:
            pooled = collection(inputs[1]).values().view(-1, len(names), shape.embedding_dim)
            return top(interact(bottom(inputs[0]), pooled)).squeeze(1)
    else:
        net = models.DLRM(collection, shape.num_dense, [*shape.bottom_mlp, shape.embedding_dim], [*shape.top_mlp, 1])
        dense = [net.dense_arch, net.over_arch]
        copy_linears(parts.layers("bottom"), net.dense_arch)
        copy_linears(in_order_of_torchrec(parts.layers("top"), shape.embedding_dim, len(names)), net.over_arch)

        def forward(inputs: tuple[Tensor, Any]) -> Tensor:
            return cast(Tensor, net(*inputs)).squeeze(1)

    return Step(labelled(setting, entry), forward, binary_cross_entropy_with_logits, [dense_sgd(dense, shape.lr)])


def in_order_of_torchrec(layers: list[nn.Linear], dim: int, num_features: int) -> list[nn.Linear]:
    """`layers` with the columns of the first moved from our order of the pairs (by the larger) to torchrec's."""
    n = num_features + 1
    large, small = torch.tril_indices(n, n, offset=-1)
    ours = {(int(i), int(j)): k for k, (i, j) in enumerate(zip(small, large, strict=True))}
    order = [ours[(int(i), int(j))] for i, j in zip(*torch.triu_indices(n, n, offset=1), strict=True)]
    first = copy.deepcopy(layers[0])
    with torch.no_grad():
        first.weight[:, dim:] = layers[0].weight[:, dim:][:, torch.tensor(order)]
    return [first, *layers[1:]]


# ---- the list


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A step to compare ours with."""

    name: str
    title: str
    build: Callable[[Setting, Parts], Step]
    sparse: bench.Optimizer = "sgd"
    """Of the tables, on both sides."""
    ours: Arithmetic = "fp32"
    """Of hotrow's side."""
    within: float = bench.Cell.within
    """As `bench.Cell.within`."""
    modules: tuple[str, ...] = ()
    """What must be importable."""
    missing_path: str | None = None
    """Why what it needs besides is not there."""

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        if absent:
            return f"not installed here: {', '.join(absent)}"
        return self.missing_path


def peers(dlrm: Path | None) -> list[Peer]:
    """Every peer; `dlrm` is the checkout of facebookresearch/dlrm, if the user has one."""
    missing = None
    if dlrm is None:
        missing = "no checkout of facebookresearch/dlrm was named: --dlrm PATH"
    elif not (dlrm / "dlrm_s_pytorch.py").exists():
        missing = f"{dlrm} holds no dlrm_s_pytorch.py"
    torchrec = ("torchrec", "fbgemm_gpu")
    return [
        Peer(name="torch", title="plain PyTorch DLRM (sparse EmbeddingBag, bmm, torch.optim.SGD)", build=make_plain),
        Peer(
            name="dlrm",
            title="facebookresearch/dlrm, DLRM_Net with torch.optim.SGD",
            build=partial(make_dlrm, folder=dlrm or Path()),
            modules=("sklearn", "tensorboard", "tqdm"),
            missing_path=missing,
        ),
        Peer(
            name="torchrec",
            title="torchrec's fused EmbeddingBagCollection (FBGEMM CPU, SGD) under a plain torch DLRM",
            build=partial(make_torchrec, sparse="sgd", plain_dense=True),
            modules=torchrec,
        ),
        Peer(
            name="torchrec-dlrm",
            title="torchrec's DLRM on its fused EmbeddingBagCollection (FBGEMM CPU, SGD)",
            build=partial(make_torchrec, sparse="sgd", plain_dense=False),
            modules=torchrec,
        ),
        Peer(
            name="torchrec-rowwise",
            title="torchrec's fused EmbeddingBagCollection (FBGEMM CPU, row-wise Adagrad, its one parallel optimizer) "
            "under a plain torch DLRM; ours in row-wise Adagrad too",
            build=partial(make_torchrec, sparse="rowwise_adagrad", plain_dense=True),
            sparse="rowwise_adagrad",
            modules=torchrec,
        ),
        Peer(
            name="float32",
            title="hotrow in float32; ours with bfloat16 products and split weights, tables and MLPs",
            build=lambda setting, parts: make_ours(setting, "sgd")[0],
            ours="bf16",
            within=5e-2,  # in half a dozen steps, losses and probabilities part by a hundredth
            missing_path=None if ops.bfloat16_products() else "hotrow's products of bfloat16 do not run here",
        ),
    ]
