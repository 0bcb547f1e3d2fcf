"""The embedding, interaction and MLP ops in plain torch, readable from top to bottom: every kernel must equal them.

Native lookups, updates and initial rows equal these bit for bit (tests/laws); interaction and MLP in float32 agree
within docs/numerics.md. Each function states the order of its sums. Without the native module these run instead:
slower, same results. MLPs in bfloat16 are torch's then; tests/laws/bfloat16_truth.py says what native ones compute.
Shape legend: B batch, F features, D embedding dim, N rows, n occurrences of ids, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import tree
from hotrow.kernels.keys import pack as pack_keys
from hotrow.kernels.keys import unpack as unpack_keys
from hotrow.kernels.types import (
    Activation,
    ComingSums,
    Distinct,
    Drop,
    Feature,
    FlatSums,
    Layout,
    Numbers,
    Pending,
    Pieces,
    RowSums,
    Rule,
    Shares,
    count_parts,
    split,
    widen,
    write_rows,
)
from hotrow.tables import Pooling

# Storage: tables hold float32, float16, or float32 in two halves; all arithmetic is float32


def split_sgd(weight: Tensor, low: Tensor, grad: Tensor, *, lr: float, weight_decay: float) -> None:
    """One step of SGD of a weight in two halves, in place: `w - lr * (grad + weight_decay * w)` of the joined ones.

    weight: the upper half, float32 with zeros below; low: int16. lr and weight_decay are rounded to float32, and so is
    every operation; without decay nothing is added to a gradient.
    """
    w = widen(split(weight)[0], low)
    if weight_decay != 0:
        grad = grad + weight.new_tensor(weight_decay) * w
    high, lower = split(w - weight.new_tensor(lr) * grad)
    weight.copy_(high)
    low.copy_(lower)


# Lookup


@torch.no_grad()
def lookup(layout: Layout, weights: Sequence[Tensor], sparse: KeyedJaggedTensor, out: Tensor) -> None:
    """`out[b, columns of f] = pool(rows of bag (f, b))` for every feature; out is float32 [B, width]."""
    for feature in layout.features:
        values, offsets, sample_weights = sparse.bags(feature.name)
        out[:, feature.columns] = pool(weights[feature.table], values, offsets, sample_weights, feature.pooling)


def pool(weight_ND: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, pooling: Pooling) -> Tensor:
    """`sum over the bag of w_i * row_i`, divided by the bag's length for "mean"; an empty bag is 0. [B, D] float32.

    The sum starts at +0 and runs in bag order: the loop below adds position p of every bag that has one.
    """
    lengths = offsets.diff()
    acc_BD = torch.zeros(lengths.numel(), weight_ND.shape[1])
    for p in range(_largest(lengths)):
        bags = (lengths > p).nonzero().squeeze(1)
        at = offsets[bags] + p
        rows = widen(weight_ND[values[at].long()])
        acc_BD[bags] += rows if sample_weights is None else sample_weights[at, None] * rows
    if pooling == "mean":
        filled = lengths > 0
        acc_BD[filled] /= lengths[filled, None].float()
    return acc_BD


@torch.no_grad()
def weight_gradient(
    layout: Layout, weights: Sequence[Tensor], sparse: KeyedJaggedTensor, grad: Tensor, out: Tensor
) -> None:
    """`out[i] = fold16(grad[b, columns] * row_i)`, divided by the bag's length for "mean"; out as `sparse.weights`."""
    for feature in layout.features:
        values, offsets, _ = sparse.bags(feature.name)
        start = int(sparse.offsets[sparse.keys.index(feature.name) * sparse.stride])
        bag_of = _bag_of(offsets)
        d = fold16(grad[bag_of, feature.columns] * widen(weights[feature.table][values.long()]))
        if feature.pooling == "mean":
            d = d / offsets.diff()[bag_of].float()
        out[start : start + values.numel()] = d


def fold16(x_nD: Tensor) -> Tensor:
    """Sums each row in one fixed order that vectors of any width can follow: [n, D] -> [n].

    Partial sum k of 16 starts at +0 and takes x[k], x[k + 16], ... in turn; then 8, 4, 2, 1 partials fold in halves.
    """
    n, dim = x_nD.shape
    padded = torch.zeros(n, -(-dim // 16) * 16)
    padded[:, :dim] = x_nD
    partial = torch.zeros(n, 16)
    for block in torch.split(padded, 16, dim=1):
        partial = partial + block
    for half in (8, 4, 2, 1):
        partial = partial[:, :half] + partial[:, half : 2 * half]
    return partial.squeeze(1)


# Update


@torch.no_grad()
def update(
    layout: Layout,
    weights: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    pending: Iterable[tuple[Layout, KeyedJaggedTensor, Tensor]],
    rules: Sequence[Rule],
    *,
    low: Sequence[Tensor | None] | None = None,
) -> None:
    """Applies the optimizer to every row that `pending` lookups read. Weights and states change in place.

    A row is read once, as float32, receives all its occurrences in the batch, and is written once; only then does
    float16 round.

    Occurrences of a table's rows are taken in the order (feature, forward pass, bag, position). Occurrence i receives
    `g_i = s_i * grad[b, columns]`; s_i is its weight w_i (1 if none), for "mean" w_i / float(length of the bag).
    pending: in forward order, the layout of a lookup (`layout`, or some of its features with their own columns), its
    batch and the gradient of its output. states: NUM_STATES lists with an array per table. rules: one per table. low:
    the lower halves of bfloat16 tables, None for others.

    If the batches are cut into micro-batches (`KeyedJaggedTensor.parts`), a row has one occurrence: the sum of its
    `row_sums` over all of them.
    """
    pending = list(pending)
    if (num_parts := count_parts([sparse for _, sparse, _ in pending])) > 1:
        pending = _summed(layout, pending, num_parts)
    for t, weight in enumerate(weights):
        rows, grads = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, weight.shape[1])]
        for name in (f.name for f in layout.features if f.table == t):
            for served, sparse, grad in pending:
                for feature in (f for f in served.features if f.name == name):
                    row, g = _occurrences(feature, sparse, grad)
                    rows.append(row)
                    grads.append(g)
        touched, row_n = torch.unique(torch.cat(rows), return_inverse=True)
        low_t = low[t] if low else None
        w = widen(weight[touched], None if low_t is None else low_t[touched])
        s = [state[t][touched] for state in states]
        if rules[t].algorithm == "sgd":
            _sgd(w, row_n, torch.cat(grads), _float32(rules[t].lr))
        else:
            _adaptive(w, s, row_n, torch.cat(grads), rules[t])
        write_rows(weight, low_t, touched, w)
        for state, changed in zip(states, s, strict=True):
            state[t][touched] = changed


def _occurrences(feature: Feature, sparse: KeyedJaggedTensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    values, offsets, sample_weights = sparse.bags(feature.name)
    bag_of = _bag_of(offsets)
    scale = torch.ones(values.numel()) if sample_weights is None else sample_weights
    if feature.pooling == "mean":
        scale = scale / offsets.diff()[bag_of].float()
    return values.long(), scale[:, None] * grad[bag_of, feature.columns]


def _by_rank(row_n: Tensor) -> list[Tensor]:
    """Groups occurrences by rank: list[r] holds the r-th occurrence of every row that has more than r."""
    order = torch.argsort(row_n, stable=True)
    _, counts = torch.unique_consecutive(row_n[order], return_counts=True)
    starts = counts.cumsum(0) - counts
    return [order[starts[counts > r] + r] for r in range(_largest(counts))]


def _ordered_sums(row_n: Tensor, g_nD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows that occur, rising, and of each `g = g_1 + g_2 + ...` in order, starting from g_1."""
    ranks = _by_rank(row_n)
    if not ranks:
        return row_n, g_nD
    row, total = row_n[ranks[0]], g_nD[ranks[0]]
    for occurrence in ranks[1:]:
        at = torch.searchsorted(row, row_n[occurrence])
        total[at] = total[at] + g_nD[occurrence]
    return row, total


def _sgd(weight: Tensor, row_n: Tensor, g_nD: Tensor, lr: Tensor) -> None:
    """`w = w - lr * g_i`, one occurrence after another."""
    for occurrence in _by_rank(row_n):
        row = row_n[occurrence]
        weight[row] = weight[row] - lr * g_nD[occurrence]


def _adaptive(weight: Tensor, states: Sequence[Tensor], row_n: Tensor, g_nD: Tensor, rule: Rule) -> None:
    """`g = g_1 + g_2 + ...` in order, then one step of the rule for each row."""
    row, total = _ordered_sums(row_n, g_nD)
    if not len(row):
        return
    weight[row], *changed = _STEPS[rule.algorithm](rule, total, weight[row], *(state[row] for state in states))
    for state, rows in zip(states, changed, strict=True):
        state[row] = rows


# Sums over micro-batches


@torch.no_grad()
def row_sums(layout: Layout, pending: Pending, leaves: tuple[int, int]) -> dict[tree.Node, list[RowSums]]:
    """For each node of `tree.aligned(*leaves)`: by table, the rows that occur in it and the sums of their gradients.

    Part k of the batches is leaf leaves[0] + k; leaves beyond the parts are absent. Within a micro-batch a row's sum is
    `g_1 + g_2 + ...` in the order of `update`, starting from g_1; micro-batches are added in the tree, and one that
    does not touch a row is skipped. pending: as `update` takes it. Ids must be in range.
    """
    pending, (lo, hi) = list(pending), leaves
    num_parts = count_parts([sparse for _, sparse, _ in pending])
    assert num_parts <= hi - lo, f"{num_parts} micro-batches for the leaves {lo} to {hi}"
    parts = [_sums_of_part(layout, pending, part) if part < num_parts else None for part in range(hi - lo)]
    return tree.sums(parts, lo, hi, lambda left, right: [*map(_added, left, right)])


def _sums_of_part(layout: Layout, pending: Pending, part: int) -> list[RowSums]:
    found = []
    for t in range(1 + max(feature.table for feature in layout.features)):
        own = [feature for feature in layout.features if feature.table == t]
        rows = [torch.empty(0, dtype=torch.int64)]
        grads = [torch.empty(0, own[0].columns.stop - own[0].columns.start)]
        for name in (feature.name for feature in own):
            for served, sparse, grad in pending:
                for feature in (f for f in served.features if f.name == name):
                    row, g = _occurrences(feature, sparse, grad)
                    offsets, starts = sparse.bags(name)[1], sparse.parts or (0, sparse.stride)
                    span = slice(int(offsets[starts[part]]), int(offsets[starts[part + 1]]))
                    rows.append(row[span])
                    grads.append(g[span])
        found.append(RowSums(*_ordered_sums(torch.cat(rows), torch.cat(grads))))
    return found


def _added(left: RowSums, right: RowSums) -> RowSums:
    """Returns left + right for rows in both; the sums of other rows stay as they are."""
    rows = torch.unique(torch.cat([left.rows, right.rows]))
    at_left, at_right = torch.searchsorted(rows, left.rows), torch.searchsorted(rows, right.rows)
    sums = torch.empty(len(rows), left.sums.shape[1])
    sums[at_left] = left.sums
    in_left = torch.zeros(len(rows), dtype=torch.bool)
    in_left[at_left] = True
    sums[at_right] = torch.where(in_left[at_right, None], sums[at_right] + right.sums, right.sums)
    return RowSums(rows, sums)


def _summed(layout: Layout, pending: Pending, num_parts: int) -> list[tuple[Layout, KeyedJaggedTensor, Tensor]]:
    """Returns lookups in which each row of `pending` occurs once; its gradient is its sum over all micro-batches."""
    whole = (0, tree.width(num_parts))
    tables = row_sums(layout, pending, whole)[whole]
    names = [next(f.name for f in layout.features if f.table == t) for t in range(len(tables))]
    return [
        (layout.sequence_of(name), KeyedJaggedTensor((name,), rows), sums)
        for name, (rows, sums) in zip(names, tables, strict=True)
    ]


# Rows on several ranks


def distinct_rows(
    values: Tensor, spans: Sequence[tuple[int, int, int]], num_rows: Sequence[int], shares: Shares
) -> Distinct | None:
    """Returns the distinct rows of the ids values[start:stop] of each span (table, start, stop); tables rise. None if
    an id is outside [0, num_rows) of its table."""
    ids, R = values.numpy(), shares.num_ranks
    found, counts = [], np.zeros((len(num_rows), 1 + R), np.int64)
    for t, (prefix, owner) in enumerate(zip(shares.prefix, shares.owner, strict=True)):
        own = np.concatenate([np.empty(0, np.int64), *(ids[start:stop] for of, start, stop in spans if of == t)])
        if len(own) and not 0 <= int(own.min()) <= int(own.max()) < num_rows[t]:
            return None
        rows, place = np.unique(own, return_inverse=True)
        ranks = np.full_like(rows, owner) if owner >= 0 else (rows - prefix) % R
        groups = np.where((rows < prefix) | (ranks == shares.rank), 0, 1 + ranks)
        local = rows if owner >= 0 else np.where(rows < prefix, rows, prefix + (rows - prefix) // R)
        order = np.argsort(groups, kind="stable")
        place_of = np.empty(len(rows), np.int64)
        place_of[order] = np.arange(len(rows))
        counts[t] = np.bincount(groups, minlength=1 + R)
        found.append((rows[order], local[order], place_of[place]))
    rows, local, places = (np.concatenate(each) for each in zip(*found, strict=True))
    return Distinct(counts, rows, local, places)


def pack_sums(
    nodes: Sequence[FlatSums],
    first_keys: Numbers,
    dims: Sequence[int],
    row_of: Sequence[Numbers] = (),
    shares: Shares | None = None,
) -> list[tuple[Tensor, int]]:
    """Returns a message for each rank, of the rows whose home it is, and how many of its words are keys.

    The home of a row that lies on every rank is its number mod R; of any other, the rank that holds it. A key is the
    first one of its table, plus the row's number in the shard. row_of[t][slot]: the row in a slot of table t. Without
    shares, rows of nodes are numbers in the shard, and one message has all of them.
    """
    num_ranks = 1 if shares is None else shares.num_ranks
    heads, sums = [[] for _ in range(num_ranks)], [[] for _ in range(num_ranks)]  # type: ignore[var-annotated]
    for node in nodes:
        keys = [[np.empty(0, np.int64)] for _ in range(num_ranks)]
        for t, (own, values) in enumerate(node.tables(dims)):
            home, local = np.zeros(len(own), np.int64), own.numpy()
            if shares is not None:
                rows, prefix, owner = row_of[t][local], shares.prefix[t], shares.owner[t]
                beyond = rows - prefix
                home = np.where(beyond < 0, rows % num_ranks, owner if owner >= 0 else beyond % num_ranks)
                local = np.where((beyond < 0) | (owner >= 0), rows, prefix + beyond // num_ranks)
            for rank in range(num_ranks):
                places = np.flatnonzero(home == rank)
                places = places[np.argsort(local[places])]
                keys[rank].append(first_keys[t] + local[places])
                sums[rank].append(values[torch.from_numpy(places)].reshape(-1).view(torch.int32))
        for rank, own_keys in enumerate(keys):
            heads[rank].append(torch.from_numpy(pack_keys(np.concatenate(own_keys))))
    return [(torch.cat([*head, *own]), sum(map(len, head))) for head, own in zip(heads, sums, strict=True)]


def unpack_sums(
    messages: Sequence[ComingSums],
    pieces: Sequence[tuple[int, int]],
    first_keys: Numbers,
    dims: Sequence[int],
    prefix: Sequence[int],
) -> Pieces:
    """Returns the rows of some nodes (message, node) that `pack_sums` packed; prefix: by table."""
    found: dict[tuple[int, int], list[tuple[Numbers, int]]] = {}
    for m, (words, num_nodes, taken) in enumerate(messages):
        keys, at = list[Numbers](), 0
        for _ in range(num_nodes):
            own, length = unpack_keys(words[at:].numpy())
            keys.append(own)
            at += length
        for k, own in enumerate(keys):
            cuts = np.searchsorted(own, first_keys)
            for t, (first, end) in enumerate(pairwise(cuts.tolist())):
                rows = own[first:end] - first_keys[t]
                cut = 0 if taken == "all" else int(np.searchsorted(rows, prefix[t]))
                lo, hi = (0, cut) if taken == "below_prefix" else (cut, len(rows))
                found.setdefault((m, k), []).append((rows[lo:hi], at + lo * dims[t]))
                at += len(rows) * dims[t]
    tables = [[found[piece][t] for piece in pieces] for t in range(len(dims))]
    counts = np.array([[len(rows) for rows, _ in own] for own in tables], np.int64).reshape(len(dims), -1)
    starts = np.array([[start for _, start in own] for own in tables], np.int64).reshape(len(dims), -1)
    rows = np.concatenate([np.empty(0, np.int64), *(rows for own in tables for rows, _ in own)])
    return Pieces(counts, starts, rows)


def pack_rows(
    weights: Sequence[Tensor],
    rows: Tensor,
    counts: Numbers,
    slots: Sequence[Tensor],
    firsts: Sequence[int],
    messages: Sequence[Tensor],
) -> None:
    """Copies rows of `weights` to slots and messages: `ops.pack_rows` says which and where."""
    groups = torch.split(rows, counts.ravel().tolist())
    at = [0] * len(messages)
    for t in range(len(weights)):
        own, *others = groups[t * counts.shape[1] :][: 1 + len(messages)]
        if len(own):
            slots[t][firsts[t] : firsts[t] + len(own)] = weights[t][own]
        for m, each in enumerate(others):
            values = weights[t][each].view(-1).view(torch.uint8)
            messages[m][at[m] : at[m] + len(values)] = values
            at[m] += len(values)


def unpack_rows(messages: Sequence[Tensor], counts: Numbers, slots: Sequence[Tensor], firsts: Sequence[int]) -> None:
    """Copies rows from messages to slots: what `pack_rows` undoes."""
    at = [0] * len(messages)
    for t in range(len(slots)):
        first = firsts[t] + int(counts[t, 0])
        for m, count in enumerate(counts[t, 1 : 1 + len(messages)].tolist()):
            to = slots[t][first : first + count].view(-1).view(torch.uint8)
            to[:] = messages[m][at[m] : at[m] + len(to)]
            at[m], first = at[m] + len(to), first + count


def _adagrad(rule: Rule, g: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """`h += g * g;  w -= lr * (g / (sqrt(h) + eps))`."""
    h = h + g * g
    return w - _float32(rule.lr) * (g / (_sqrt(h) + _float32(rule.eps))), h


def _row_wise_adagrad(rule: Rule, g: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """`h += fold16(g * g) / D;  w -= (lr / (sqrt(h) + eps)) * g`, one h per row."""
    h = h + fold16(g * g) / float(g.shape[1])
    return w - (_float32(rule.lr) / (_sqrt(h) + _float32(rule.eps)))[:, None] * g, h


def _adam(rule: Rule, g: Tensor, w: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """`m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g);  w -= lr * (m / (sqrt(v) + eps))`.

    Row-lazy: rows that no batch looked up keep m, v and w.
    """
    m = _float32(rule.beta1) * m + _float32(1 - rule.beta1) * g
    v = _float32(rule.beta2) * v + _float32(1 - rule.beta2) * (g * g)
    return w - _float32(rule.lr) * (m / (_sqrt(v) + _float32(rule.eps))), m, v


def _ftrl(rule: Rule, g: Tensor, w: Tensor, z: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    """FTRL-proximal (McMahan et al., KDD'13), per element:

    `n' = n + g * g;  z += g - ((sqrt(n') - sqrt(n)) / lr) * w`
    `w = 0 if |z| <= l1 else -((z - sign(z) * l1) / ((beta + sqrt(n')) / lr + l2))`
    """
    lr, l1 = _float32(rule.lr), _float32(rule.l1)
    before, n = _sqrt(n), n + g * g
    after = _sqrt(n)
    z = z + (g - (after - before) / lr * w)
    shrunk = torch.where(z.abs() <= l1, torch.zeros_like(z), z - torch.copysign(l1, z))
    return -(shrunk / ((_float32(rule.beta) + after) / lr + _float32(rule.l2))), z, n


_STEPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "adagrad": _adagrad,
    "row_wise_adagrad": _row_wise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
}


def _bag_of(offsets: Tensor) -> Tensor:
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel()), lengths)


def _sqrt(x: Tensor) -> Tensor:
    # numpy rounds correctly, as IEEE 754 and the kernels do; torch calls MKL, which does not (0.6 % of random float32
    # arguments differ in the last bit, torch 2.13).
    return torch.from_numpy(np.sqrt(x.numpy()))


def _float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _largest(counts: Tensor) -> int:
    return int(counts.max()) if counts.numel() else 0


# Initial rows


def fill_uniform(
    key: int, first_row: int, out: Tensor, bound: float, zero_rows: int, step: int = 1, column: int = 0
) -> None:
    """Writes a table's rows `first_row`, `first_row + step`, ... into out [n, D]; see `uniform_rows`."""
    n, dim = out.shape
    out[:] = uniform_rows(key, first_row + step * torch.arange(n), dim, bound, zero_rows, column)


def uniform_rows(key: int, rows: Tensor, dim: int, bound: float, zero_rows: int, column: int = 0) -> Tensor:
    """Returns the initial `rows` [n] of a table, [n, D]: `((x >> 8) * 2^-23 - 1) * bound` in float32, x random uint32.

    column: the first of the D columns, a multiple of 4.
    x of (row, column) is word `column % 4` of the Philox4x32-10 block with counter (row mod 2^32, row >> 32,
    column // 4, 0). Rows below `zero_rows` are +0.0, and with a bound of 0 all are.
    """
    quads = -(-dim // 4)
    row = rows.repeat_interleave(quads)
    quad = (column // 4 + torch.arange(quads)).repeat(len(rows))
    words = philox4x32(torch.stack([row & _MASK, row >> 32, quad, torch.zeros_like(quad)], dim=1), key)
    unit = (words >> 8).float() * 2.0**-23 - 1.0
    out = (unit * _float32(bound)).reshape(len(rows), quads * 4)[:, :dim]
    out[rows < zero_rows] = 0.0
    return out if bound else torch.zeros_like(out)  # a random number below zero times 0 is -0.0


_MASK = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: int) -> Tensor:
    """Philox4x32-10 of Salmon et al. (SC'11): counters, int64 [n, 4] of 32-bit words -> words of the same shape."""
    c0, c1, c2, c3 = counter.unbind(1)
    k0, k1 = key & _MASK, key >> 32
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack([c0, c1, c2, c3], dim=1)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns high and low 32 bits of a * b, computed by halves: torch has no unsigned 64-bit product."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | (low & 0xFFFF)


def kept(drop: Drop, num_samples: int, width: int) -> Tensor:
    """What a dropout multiplies x [B, W] by: 0 for elements whose number is below the limit, else the scale.

    Numbers of 16 bits are those of Philox4x64-10 with key (seed, place) and counter (n, 0, step, 0), n from 1 on; each
    sample has blocks of 16 of its own.
    """
    blocks = -(-width // 16)
    counter, key = [drop.sample * blocks, 0, drop.step, 0], [drop.seed, drop.place]
    bits = np.random.Philox(counter=np.array(counter, np.uint64), key=np.array(key, np.uint64))
    numbers = bits.random_raw(num_samples * blocks * 4).view(np.uint16).reshape(num_samples, blocks * 16)[:, :width]
    return torch.from_numpy(np.where(numbers < drop.limit, np.float32(0), np.float32(drop.scale)))


# Interaction


def interact(dense_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
    """`[dense, T_i . T_j for i > j]` with T = [dense; pooled]: the dot interaction of DLRM, [B, D + (F + 1) F / 2]."""
    t = torch.cat([dense_BD[:, None], pooled_BFD], dim=1)
    i, j = torch.tril_indices(t.shape[1], t.shape[1], offset=-1, device=t.device).unbind(0)
    return torch.cat([dense_BD, torch.bmm(t, t.transpose(1, 2))[:, i, j]], dim=1)


def mlp(x_BI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, last: Activation) -> Tensor:
    """`x = relu(x W^T + b)` layer by layer, the last one without relu if `last` is "linear"."""
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True), start=1):
        x_BI = torch.nn.functional.linear(x_BI, weight, bias)
        if k < len(weights) or last == "relu":
            x_BI = torch.relu(x_BI)
    return x_BI
