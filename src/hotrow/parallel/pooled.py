"""The exchange of pooled vectors, for tables with an owner: it pools for the samples of all ranks.

    take     ids, lengths and weights of each rank's samples -> the owner, which looks up the whole batch -> a vector of
             each bag, to the rank that trains its sample
    update   the gradients of these vectors -> the owner, which sums those of a row in the tree, as one process does

The owner has all bags of a batch in their order, so the bits are the same as in one process. If several owners share
the columns of a table, each gets the ids and pools its columns, since no number of a vector needs those beside it. If a
step also looks up rows of a table with one owner one by one (`EmbeddingCollection.sequence`), its gradients travel as
sums of rows, since a sum must have all its terms in order. sharded.py calls this, and does the same for tables whose
rows travel.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops, tree
from hotrow.kernels.types import Feature, Layout
from hotrow.parallel.communicator import Arriving, Communicator
from hotrow.parallel.messages import WireDtype, widen, words_of
from hotrow.parallel.shards import Numbers, Shard
from hotrow.placement.base import Placement
from hotrow.placement.slots import check_ids, spans_of
from hotrow.tables import TableConfig

Bundle = tuple[Feature, ...]
"""Features of one owner that it looks up together, at most one of each table."""
_HEAD = 3
"""Words before the bags of a feature: number of ids, length of each bag (-1: they differ), and 1 if weights follow."""
_WIDE_ROWS = 1 << 31
"""Ids of tables with more rows take two words each."""


class Bags(NamedTuple):
    """The bags of one feature."""

    ids: Sequence[Numbers]
    """Of 32 bits if the table's fit in them, those of each rank in turn."""
    lengths: Tensor
    weights: Tensor | None

    @property
    def num_ids(self) -> int:
        return sum(map(len, self.ids))


class Served(NamedTuple):
    """What this rank pools of a batch for all ranks, and what it asked of them."""

    names: dict[int, list[str]]
    """The features of each table that this rank owns."""
    bags: dict[str, Bags]
    """By feature, of these tables, over the whole batch."""
    strides: list[int]
    """By rank, the number of its samples."""
    asked: list[Tensor]
    """By rank, what it was asked for."""

    @property
    def ids(self) -> dict[int, list[Numbers]]:
        """By table, the ids of its features one after another, in pieces."""
        return {t: [own for name in names for own in self.bags[name].ids] for t, names in self.names.items()}

    def cut(self, slots: Mapping[int, slice]) -> dict[str, slice]:
        """Returns by feature the place of its slots, given by table that of the slots of `ids`."""
        found: dict[str, slice] = {}
        for t, names in self.names.items():
            start = slots[t].start
            for name in names:
                found[name] = slice(start, start + self.bags[name].num_ids)
                start = found[name].stop
        return found


@dataclass
class PooledBatch:
    """A batch whose vectors have come, until it is over."""

    sparse: KeyedJaggedTensor
    """The ids of this rank's samples."""
    strides: list[int]
    out: Tensor | None
    """The lookup's output, with the columns of pooled features. None after it was taken."""
    served: list[KeyedJaggedTensor]
    """By bundle of this rank, the bags of all ranks, by the names of their tables, with slots for ids."""
    slots: Tensor | None = None
    """The slots by whose identity the batch is known: kept, so that no other tensor gets the same identity."""


class Pooled:
    """The tables of a collection whose pooled vectors travel. All calls except `without`, `of` and `taken` are
    collective, or make messages of those that are. below: the placement of this rank's own rows; for each of `tables`
    it has a table with one feature, of the same name."""

    def __init__(
        self,
        comm: Communicator,
        tables: Sequence[TableConfig],
        shards: Sequence[Shard],
        below: Placement,
        *,
        wire_dtype: WireDtype,
    ) -> None:
        self.tables = frozenset(t for t, shard in enumerate(shards) if shard.exchange == "pooled")
        self.layout, self._below = Layout.of(tables), below
        self.features = [feature for feature in self.layout.features if feature.table in self.tables]
        self._comm, self._configs, self._wire_dtype = comm, tables, wire_dtype
        self._shards = shards
        self._owned = [[f for f in self.features if rank in shards[f.table].owners] for rank in range(comm.size)]
        """By owner, the features that it pools."""
        self._bundles = [_bundles([self._of(f, rank) for f in own]) for rank, own in enumerate(self._owned)]
        """By owner, with the columns that it pools."""
        self._kernels: dict[tuple[str, ...], ops.Kernels] = {}
        self._batches: dict[int, PooledBatch] = {}
        """The batches that are not over, by the identity of their slots."""

    def _of(self, feature: Feature, rank: int) -> Feature:
        """Returns a feature with those columns of the output that a rank pools."""
        own, start = self._shards[feature.table].columns(_width((feature,)), rank), feature.columns.start
        return replace(feature, columns=slice(start + own.start, start + own.stop))

    # ---- lookups

    def without(self, sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with empty bags for the features of these tables; the batch itself if there are none."""
        names = {feature.name for feature in self.features}
        if names.isdisjoint(sparse.keys):
            return sparse
        kept = [sparse.span(key) for key in sparse.keys if key not in names]
        offsets = torch.zeros(len(sparse.keys) * sparse.stride + 1, dtype=torch.int64)
        values, weights = _cut(sparse, kept)
        if len(values):
            lengths = sparse.lengths.view(len(sparse.keys), sparse.stride)
            lengths[[key in names for key in sparse.keys]] = 0
            torch.cumsum(lengths.view(-1), 0, out=offsets[1:])
        return KeyedJaggedTensor.unchecked(sparse.keys, values, weights, offsets, sparse.stride)

    def requests(self, sparse: KeyedJaggedTensor, *, training: bool) -> list[Tensor]:
        """Returns by rank the bags of this rank's samples in tables of that rank, as words of 32 bits.

        Raises ValueError for a missing feature, for an id outside its table, for weights that want a gradient, and in
        training for weights that are not finite.
        """
        self.layout.check_keys(sparse.keys)
        spans = [span for span in spans_of(self.layout, sparse) if span[0] in self.tables]
        check_ids(self.layout, self._configs, sparse, spans)
        if sparse.weights is not None:
            self._check_weights(sparse, sparse.weights, training=training)
        return _pack(
            sparse, [[(feature.name, _is_wide(self._configs[feature.table])) for feature in own] for own in self._owned]
        )

    def _check_weights(self, sparse: KeyedJaggedTensor, weights: Tensor, *, training: bool) -> None:
        if weights.requires_grad and torch.is_grad_enabled():
            first = self.features[0]
            raise ValueError(
                f"the weights of the batch want a gradient, which takes the rows of feature {first.name!r}; the rank "
                f"that owns table {self._configs[first.table].name!r} sends pooled vectors: make its Shard with "
                "exchange='rows' (parallel.exchange)"
            )
        for feature in self.features if training else ():
            found = ops.first_nonfinite(weights[sparse.span(feature.name)])
            if found is not None:  # its gradients could be finite, if the loss leaves this vector out
                offsets, value = sparse.bags(feature.name)[1], weights[sparse.span(feature.name)][found[0]]
                sample = int(torch.searchsorted(offsets, found[0], right=True)) - 1
                raise ValueError(
                    f"the weight of feature {feature.name!r} (table {self._configs[feature.table].name!r}), sample "
                    f"{sample}, position {found[0] - int(offsets[sample])} is {float(value)}: weights of ids must be "
                    "finite if their owner pools"
                )

    def serve(self, words: Sequence[Tensor], strides: list[int], asked: list[Tensor]) -> Served:
        """Returns what this rank is to pool. words: by rank, its `requests` here; asked: this rank's, of all ranks."""
        names, own = defaultdict[int, list[str]](list), self._owned[self._comm.rank]
        wide = [_is_wide(self._configs[feature.table]) for feature in own]
        each = [_unpack(come, n, wide) for come, n in zip(words, strides, strict=True)]
        for feature in own:
            names[feature.table].append(feature.name)
        bags = {feature.name: _joined(of_ranks) for feature, of_ranks in zip(own, zip(*each, strict=True), strict=True)}
        return Served(names, bags, strides, asked)

    def is_of(self, served: Served, sparse: KeyedJaggedTensor) -> bool:
        """Returns whether the batch still is what this rank asked for when it was announced."""
        now = self.requests(sparse, training=True)
        return all(torch.equal(one, other) for one, other in zip(served.asked, now, strict=True))

    def begin(
        self,
        served: Served,
        slots: Callable[[], tuple[Tensor, Mapping[int, slice]]],
        sparse: KeyedJaggedTensor,
        *,
        training: bool,
    ) -> Callable[[], PooledBatch]:
        """Pools for all ranks, and sends the vectors. Returns a function that waits for the vectors of this rank's
        samples. slots: returns slots below, and by table the place of those of its ids. If it raises, all ranks raise
        when they wait."""
        starts = tree.starts(sum(served.strides), self._comm.ranks.micro_batches) if training else None
        found = list[KeyedJaggedTensor]()

        def vectors() -> list[Tensor]:
            (values, places), own = slots(), self._bundles[self._comm.rank]
            cut = served.cut(places)
            found[:] = [self._bags_below(bundle, served, values, cut).in_parts(starts) for bundle in own]
            return self._vectors(own, found, served.strides)

        arriving = self._comm.begin(vectors, purpose="pooled")

        def bring() -> PooledBatch:
            out = ops.empty(sparse.stride, self.layout.width)
            for words, bundles in zip(arriving.wait(), self._bundles, strict=True):
                sizes = [sparse.stride * _width(bundle) for bundle in bundles]
                numbers = torch.split(widen(words, sum(sizes), self._wire_dtype), sizes)
                for bundle, each in zip(bundles, numbers, strict=True):
                    _spread(each.view(sparse.stride, _width(bundle)), bundle, out)
            return PooledBatch(sparse, served.strides, out, found)

        return bring

    def _bags_below(self, bundle: Bundle, served: Served, slots: Tensor, cut: Mapping[str, slice]) -> KeyedJaggedTensor:
        bags = [served.bags[feature.name] for feature in bundle]
        lengths = torch.cat([own.lengths for own in bags])
        weights = [own.weights for own in bags if own.weights is not None]  # of all, or of none
        names = [self._configs[f.table].name for f in bundle]
        values = _joined_spans(slots, [cut[f.name] for f in bundle])
        one_hot = bool((lengths == 1).all())
        return KeyedJaggedTensor(
            names, values, torch.cat(weights) if weights else None, lengths=None if one_hot else lengths
        )

    def _vectors(
        self, bundles: Sequence[Bundle], bags: Sequence[KeyedJaggedTensor], strides: list[int]
    ) -> list[Tensor]:
        """Returns by rank the pooled vectors of its samples, one bundle after another."""
        kernels = [self._kernels_of(bundle) for bundle in bundles]
        pooled = [own.lookup(self._below.arrays, each) for own, each in zip(kernels, bags, strict=True)]
        each = [torch.split(vectors, strides) for vectors in pooled]
        return [
            words_of([vectors[rank].reshape(-1) for vectors in each], self._wire_dtype) for rank in range(len(strides))
        ]

    def _kernels_of(self, features: Bundle) -> ops.Kernels:
        """Returns the kernels that look up and update `features` below, where each has the name of its table."""
        key = tuple(feature.name for feature in features)
        if key not in self._kernels:
            ends = np.cumsum([_width((feature,)) for feature in features]).tolist()
            named = tuple(
                replace(f, name=self._configs[f.table].name, columns=slice(end - _width((f,)), end))
                for f, end in zip(features, ends, strict=True)
            )
            self._kernels[key] = ops.Kernels(Layout(named, ends[-1]), among=self._below.kernels.pooled.layout)
        return self._kernels[key]

    def keep(self, batch: PooledBatch, slots: KeyedJaggedTensor) -> Callable[[], object]:
        """Keeps a batch, whose slots the lookup gets; returns what to call when it is over."""
        batch.slots = slots.values
        self._batches[id(slots.values)] = batch
        return partial(self._batches.pop, id(slots.values), None)

    def taken(self, slots: KeyedJaggedTensor) -> Tensor | None:
        """Returns the output of a lookup with the columns of pooled features, once. None if the lookup is of rows."""
        batch = self._batches.get(id(slots.values))
        if batch is None:
            return None
        out, batch.out = batch.out, None
        assert out is not None, "a lookup is made once"
        return out

    def of(self, slots: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
        """Returns the ids of a batch if its pooled vectors came here, None if its rows did."""
        batch = self._batches.get(id(slots.values))
        return None if batch is None else batch.sparse

    # ---- updates

    def tables_by_row(self, lookups: ops.Lookups) -> frozenset[int]:
        """Returns which of these tables were looked up row by row too: their gradients must be summed row by row."""
        alone = [kernels for kernels, sparse, _ in lookups if id(sparse.values) not in self._batches]
        whole = {t for t in self.tables if not self._shards[t].is_cut}  # of the others, nobody looks up rows
        return frozenset(whole & {feature.table for kernels in alone for feature in kernels.layout.features})

    def gradients(
        self, lookups: ops.Lookups, *, but: frozenset[int]
    ) -> tuple[Arriving | None, Callable[[], ops.Lookups]]:
        """Sends gradients of pooled vectors to the owners, except for the tables in `but`. Returns the arriving
        gradients (None if there are none), and a function that returns them as lookups of rows below."""
        waiting = []
        for kernels, sparse, grad in lookups:
            if (batch := self._batches.get(id(sparse.values))) is not None:
                wanted = frozenset(f.name for f in kernels.layout.features if f.table not in but)
                waiting.append(_Waiting(batch, wanted, grad))
        if not any(own.of(bundle) for own in waiting for bundles in self._bundles for bundle in bundles):
            return None, lambda: []
        arriving = self._comm.begin(partial(self._gradients_for, waiting), purpose="pooled_gradients")
        return arriving, partial(self._come, waiting, arriving)

    def _come(self, waiting: Sequence[_Waiting], arriving: Arriving) -> ops.Lookups:
        """Returns the gradients that come here as lookups of rows below: features of a table in their order, and each
        of them in the order of the forward passes."""
        come, bundles = arriving.wait(), self._bundles[self._comm.rank]
        parts = [(k, i, own.of(bundle)) for i, own in enumerate(waiting) for k, bundle in enumerate(bundles)]
        parts = [part for part in parts if part[2]]
        each = [self._numbers(words, rank, waiting, parts) for rank, words in enumerate(come)]
        found: list[tuple[int, int, tuple[ops.Kernels, KeyedJaggedTensor, Tensor]]] = []
        for (k, i, features), *grads in zip(parts, *each, strict=True):
            grad = torch.cat(grads, out=ops.empty(sum(map(len, grads)), _width(features)))
            found.append((k, i, (self._kernels_of(features), waiting[i].batch.served[k], grad)))
        return [lookup for _, _, lookup in sorted(found, key=lambda each: each[:2])]

    def _gradients_for(self, waiting: Sequence[_Waiting]) -> list[Tensor]:
        """Returns by owner the gradients of vectors that came from it: by lookup, by bundle, by sample."""
        found = []
        for bundles in self._bundles:
            parts = [(own.grad, features) for own in waiting for each in bundles if (features := own.of(each))]
            shapes = [(len(grad), _width(features)) for grad, features in parts]
            sizes = [num_samples * width for num_samples, width in shapes]
            numbers = ops.empty(sum(sizes))
            for (grad, features), shape, own in zip(parts, shapes, torch.split(numbers, sizes), strict=True):
                torch.cat([grad[:, f.columns] for f in features], 1, out=own.view(shape))
            found.append(words_of([numbers], self._wire_dtype))
        return found

    def _numbers(
        self, words: Tensor, rank: int, waiting: Sequence[_Waiting], parts: Sequence[tuple[int, int, Bundle]]
    ) -> list[Tensor]:
        """Returns what one rank sent here: by lookup and bundle, gradients [B, width] of its samples."""
        shapes = [(waiting[i].batch.strides[rank], _width(features)) for _, i, features in parts]
        sizes = [num_samples * width for num_samples, width in shapes]
        numbers = torch.split(widen(words, sum(sizes), self._wire_dtype), sizes)
        return [each.view(shape) for each, shape in zip(numbers, shapes, strict=True)]


class _Waiting(NamedTuple):
    """A lookup that waits for the optimizer."""

    batch: PooledBatch
    wanted: frozenset[str]
    """Features that are updated."""
    grad: Tensor

    def of(self, bundle: Bundle) -> Bundle:
        return tuple(feature for feature in bundle if feature.name in self.wanted)


def only(sparse: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    at = [sparse.keys.index(name) for name in names]
    lengths = None if sparse.one_hot else sparse.lengths.view(len(sparse.keys), sparse.stride)[at].view(-1)
    return KeyedJaggedTensor(names, *_cut(sparse, [sparse.span(name) for name in names]), lengths=lengths)


def _cut(sparse: KeyedJaggedTensor, spans: Sequence[slice]) -> tuple[Tensor, Tensor | None]:
    """Returns ids and weights of some spans, one after another."""
    return _joined_spans(sparse.values, spans), None if sparse.weights is None else _joined_spans(sparse.weights, spans)


def _joined_spans(values: Tensor, spans: Sequence[slice]) -> Tensor:
    """Returns some spans of values [n] end to end: where they are, if each begins where the one before it ends."""
    if all(own.stop == after.start for own, after in pairwise(spans)):
        return values[spans[0].start : spans[-1].stop] if spans else values[:0]
    return torch.cat([values[span] for span in spans])


def _bundles(features: Sequence[Feature]) -> list[Bundle]:
    """Puts the first feature of each table into one bundle, the second into another, and so on."""
    bundles: list[list[Feature]] = []
    seen: Counter[int] = Counter()
    for feature in features:
        if seen[feature.table] == len(bundles):
            bundles.append([])
        bundles[seen[feature.table]].append(feature)
        seen[feature.table] += 1
    return [tuple(own) for own in bundles]


def _width(features: Sequence[Feature]) -> int:
    return sum(feature.columns.stop - feature.columns.start for feature in features)


def _spread(vectors: Tensor, features: Bundle, out: Tensor) -> None:
    """Puts vectors [B, width] of `features`, side by side, into their columns of a lookup's output."""
    at = 0
    for feature in features:
        end = at + _width((feature,))
        out[:, feature.columns] = vectors[:, at:end]
        at = end


# ---- bags as words of 32 bits


def bytes_of_bags(table: TableConfig, num_ids: float, num_bags: float, *, jagged: bool) -> float:
    """Returns the bytes of bags of a table after their heads. jagged: their lengths differ, and travel too."""
    return 4 * (1 + _is_wide(table)) * num_ids + 4 * num_bags * jagged


def bytes_of_bag_heads(num_features: float) -> float:
    return 4 * _HEAD * num_features


def _is_wide(table: TableConfig) -> bool:
    return table.num_embeddings > _WIDE_ROWS


def _pack(sparse: KeyedJaggedTensor, wanted: Sequence[Sequence[tuple[str, bool]]]) -> list[Tensor]:
    """Returns messages of bags, each of some features, and whether their ids take 64 bits: the features' heads; then
    the lengths of those whose bags differ; then ids; then weights, if there are any."""
    lengths = sparse.lengths.view(len(sparse.keys), sparse.stride).to(torch.int32)
    differ = (lengths != lengths[:, :1]).any(1).tolist()
    first, ids, ends = lengths[:, :1].sum(1).tolist(), sparse.values.to(torch.int32), sparse.key_ends()
    weights = None if sparse.weights is None else sparse.weights.detach().view(torch.int32)
    found = []
    for features in wanted:
        at = [(sparse.keys.index(name), wide) for name, wide in features]
        spans = [(slice(ends[k], ends[k + 1]), wide) for k, wide in at]
        heads = [[ends[k + 1] - ends[k], -1 if differ[k] else first[k], int(weights is not None)] for k, _ in at]
        words = [torch.tensor(heads, dtype=torch.int32).view(-1), *(lengths[k] for k, _ in at if differ[k])]
        words += [sparse.values[own].to(torch.int64).view(torch.int32) if wide else ids[own] for own, wide in spans]
        words += [weights[own] for own, _ in spans] if weights is not None else []
        found.append(torch.cat(words))
    return found


def _unpack(words: Tensor, num_bags: int, wide: Sequence[bool]) -> list[Bags]:
    """Returns the bags that `_pack` was given, by feature."""
    heads, num = words[: _HEAD * len(wide)].view(-1, _HEAD).tolist(), len(wide)
    sizes = [num_bags * (length < 0) for _, length, _ in heads]
    sizes += [num_ids << twice for (num_ids, _, _), twice in zip(heads, wide, strict=True)]
    sizes += [num_ids * weighted for num_ids, _, weighted in heads]
    parts, found = torch.split(words[_HEAD * num :], sizes), []
    for (_, length, weighted), twice, own, ids, weights in zip(
        heads, wide, parts[:num], parts[num : 2 * num], parts[2 * num :], strict=True
    ):
        lengths = torch.full((num_bags,), length) if length >= 0 else own.to(torch.int64)
        numbers = ids.clone().view(torch.int64) if twice else ids  # a copy lies aligned
        found.append(Bags([numbers.numpy()], lengths, weights.view(torch.float32) if weighted else None))
    return found


def _joined(each: Sequence[Bags]) -> Bags:
    """Returns the bags of several ranks, one after another. Those of a rank without weights, or ids, weigh 1."""
    weights = None
    if any(own.weights is not None for own in each):
        weights = torch.cat([torch.ones(own.num_ids) if own.weights is None else own.weights for own in each])
    return Bags([ids for own in each for ids in own.ids], torch.cat([own.lengths for own in each]), weights)
