"""The Triton kernels: what one program does. triton_ops.py prepares their arguments.

Tables can be anywhere, so kernels get their addresses as int64 numbers. Arithmetic is float32 in the order that
reference.py states: products and sums are never contracted (launches pass enable_fp_fusion=False), divisions and roots
follow IEEE 754. No atomics: one program writes each output and each row. Legend: b bags, n occurrences, d columns of a
row. Loops are `while`, because Triton 3.6's interpreter has no range up to a loaded number under numpy 2.4.
"""

import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set when this was imported: kernels then run slowly, on the CPU and CPU tensors."""

FLOAT32, FLOAT16, SPLIT = 0, 1, 2
"""How a table stores weights; split ones are read by their upper halves, as lookups read them."""
ALGORITHMS = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 2, "adam": 3, "ftrl": 4}
ROW_BITS = 40
"""A key is table << ROW_BITS | row."""
CHUNK: tl.constexpr = tl.constexpr(8)
"""Occurrences of a row that an update takes at a time: what they read is asked for before the last one is added."""


@triton.jit
def read_row(address, at, mask, STORAGE: tl.constexpr):
    """Weights as float32: exact, except split ones, which are the upper half with lower bits 0."""
    if STORAGE == 0:
        row = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    elif STORAGE == 1:
        row = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0).to(tl.float32)
    else:
        high = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0)
        row = (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return row


@triton.jit
def to_float16(x):
    """`reference.to_float16`: to nearest, ties to even; NaN quiet, with sign and leading payload."""
    bits = x.to(tl.int32, bitcast=True)
    nan = (((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)).to(tl.int16)
    rounded = x.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(x != x, nan, rounded)


@triton.jit
def fold16(x, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """`reference.fold16` of [BLOCK, BLOCK_D], zeros beyond the row's end: partial k of 16 takes x[k], x[k + 16], ...

    The sum that picks a chunk has one term that is not 0, so its order is free; a sum of two terms is one addition.
    """
    chunks = tl.reshape(x, [BLOCK, BLOCK_D // 16, 16])
    number = tl.arange(0, BLOCK_D // 16)[None, :, None]
    partial = tl.zeros([BLOCK, 16], dtype=tl.float32)
    for c in tl.static_range(BLOCK_D // 16):
        partial = partial + tl.sum(tl.where(number == c, chunks, 0.0), axis=1)
    half8 = tl.sum(tl.reshape(partial, [BLOCK, 2, 8]), axis=1)
    half4 = tl.sum(tl.reshape(half8, [BLOCK, 2, 4]), axis=1)
    half2 = tl.sum(tl.reshape(half4, [BLOCK, 2, 2]), axis=1)
    return tl.sum(half2, axis=1)


@triton.jit
def bags_of(offsets, first, b, inside, ONE_HOT: tl.constexpr):
    """Where bags `first + b` start and stop among the batch's ids."""
    if ONE_HOT:
        start = first + b
        stop = start + inside.to(tl.int64)
    else:
        start = tl.load(offsets + first + b, mask=inside, other=0)
        stop = tl.load(offsets + first + b + 1, mask=inside, other=0)
    return start, stop


@triton.jit
def slots_of(rows, mask, at, MAPPED: tl.constexpr):
    """Where rows [n] lie in their tables' arrays: those below a prefix at their numbers, the others by a map.

    at: int64 [2], of the table or of each row's: the prefix, and the address where the map would have row 0. If not
    MAPPED, arrays have every row.
    """
    if MAPPED:
        passing = mask & (rows >= tl.load(at))
        entries = tl.load(at + 1).to(tl.pointer_type(tl.int32))
        rows = tl.where(passing, tl.load(entries + rows, mask=passing, other=0).to(tl.int64), rows)
    return rows


@triton.jit(do_not_specialize=["num_samples", "out_stride"])
def lookup(
    out, out_stride, values, offsets, sample_weights, features, tables, maps, num_samples,
    ONE_HOT: tl.constexpr, WEIGHTED: tl.constexpr, MAPPED: tl.constexpr, STORAGE: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`out[b, columns of f] = pool(rows of bag (f, b))` for BLOCK_B bags of feature number program_id(1).

    features: int64 [F, 5]: table, first column, dim, 1 for "mean", position among the batch's keys.
    """
    feature = features + tl.program_id(1) * 5
    table = tl.load(feature)
    address = tl.load(tables + table)
    column, dim, mean = tl.load(feature + 1), tl.load(feature + 2), tl.load(feature + 3)
    b = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    exists = b < num_samples
    start, stop = bags_of(offsets, tl.load(feature + 4) * num_samples, b, exists, ONE_HOT)
    total = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    at = start
    while tl.max(stop - at, axis=0) > 0:
        inside = at < stop
        row = tl.load(values + at, mask=inside, other=0).to(tl.int64)
        row = slots_of(row, inside, maps + 2 * table, MAPPED)
        x = read_row(address, row[:, None] * dim + d, inside[:, None] & (d < dim), STORAGE)
        if WEIGHTED:
            x = tl.load(sample_weights + at, mask=inside, other=0.0)[:, None] * x
        total = tl.where(inside[:, None], total + x, total)
        at += 1
    length = (stop - start).to(tl.float32)[:, None]
    divided = tl.div_rn(total, tl.maximum(length, 1.0) + tl.zeros_like(total))
    total = tl.where((mean == 1) & (length > 0), divided, total)
    tl.store(out + b[:, None] * out_stride + column + d, total, mask=exists[:, None] & (d < dim))


@triton.jit(do_not_specialize=["num_samples", "grad_stride"])
def weight_gradient(
    out, grad, grad_stride, values, offsets, features, tables, maps, num_samples,
    ONE_HOT: tl.constexpr, MAPPED: tl.constexpr, STORAGE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`out[i] = fold16(grad[b, columns of f] * row_i)`, over the bag's length for "mean"; features as in `lookup`."""
    feature = features + tl.program_id(1) * 5
    table = tl.load(feature)
    address = tl.load(tables + table)
    column, dim, mean = tl.load(feature + 1), tl.load(feature + 2), tl.load(feature + 3)
    b = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    exists = b < num_samples
    start, stop = bags_of(offsets, tl.load(feature + 4) * num_samples, b, exists, ONE_HOT)
    g = tl.load(grad + b[:, None] * grad_stride + column + d, mask=exists[:, None] & (d < dim), other=0.0)
    length = tl.maximum((stop - start).to(tl.float32), 1.0)
    at = start
    while tl.max(stop - at, axis=0) > 0:
        inside = at < stop
        row = tl.load(values + at, mask=inside, other=0).to(tl.int64)
        row = slots_of(row, inside, maps + 2 * table, MAPPED)
        mask = inside[:, None] & (d < dim)
        x = read_row(address, row[:, None] * dim + d, mask, STORAGE)
        folded = fold16(tl.where(mask, g * x, 0.0), BLOCK_B, BLOCK_D)
        folded = tl.where(mean == 1, tl.div_rn(folded, length), folded)
        tl.store(out + at, folded, mask=inside)
        at += 1


@triton.jit
def read_gradient(sources, scales, i, inside, mask, d, dim, SCALED: tl.constexpr):
    """`g_i = s_i * grad[b, columns]` of those occurrences i [n] in sorted order that are in `mask`: [n, d].

    inside: those that there are, whose addresses are read; they are known before `mask` is.
    """
    address = tl.load(sources + i, mask=inside, other=0)
    live = mask[:, None] & (d < dim[:, None])
    g = tl.load(address[:, None].to(tl.pointer_type(tl.float32)) + d, mask=live, other=0.0)
    if SCALED:
        g = tl.load(scales + i, mask=inside, other=0.0)[:, None] * g
    return g


@triton.jit
def number_of(numbers, table, mask, which: tl.constexpr):
    """A number of the rules of tables [n], as [n, 1]: of lr, eps, beta1, 1 - beta1, beta2, 1 - beta2, beta, l1, l2."""
    return tl.load(numbers + table * 9 + which, mask=mask, other=1.0)[:, None]


@triton.jit
def full(x, like):
    """`x` [n, 1] in the shape of `like`, as div_rn needs it."""
    return x + tl.zeros_like(like)


@triton.jit(do_not_specialize=["first", "last"])
def update(
    keys, sources, scales, first, last, table_of, dims, weights, lows, states_a, states_b, maps, numbers,
    ALGORITHM: tl.constexpr, STORAGE: tl.constexpr, SCALED: tl.constexpr, MAPPED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For sorted occurrences [first, last): the lane at the first occurrence of a row takes all of that row's.

    keys: int64, (rank of the table) << ROW_BITS | row, rising; table_of: rank -> table, which indexes the rest.
    sources: addresses of gradients. Reads a row once, sums or applies its occurrences in order, writes it once.
    Nothing that is read depends on what was added, so that of CHUNK occurrences several are on their way at a time.
    """
    i = first + (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = i < last
    key = tl.load(keys + i, mask=inside, other=-1)
    starts = inside & (key != tl.load(keys + i - 1, mask=inside & (i > first), other=-1))
    table = tl.load(table_of + (key >> 40), mask=starts, other=0)
    row = slots_of(key & 0xFFFFFFFFFF, starts, maps + 2 * table, MAPPED)
    dim = tl.load(dims + table, mask=starts, other=0)
    d = tl.arange(0, BLOCK_D)[None, :]
    live = starts[:, None] & (d < dim[:, None])
    at = row[:, None] * dim[:, None] + d
    address = tl.load(weights + table, mask=starts, other=0)[:, None]
    w = read_row(address, at, live, STORAGE)
    if STORAGE == 2:
        low_address = tl.load(lows + table, mask=starts, other=0)[:, None].to(tl.pointer_type(tl.int16))
        low = tl.load(low_address + at, mask=live, other=0).to(tl.int32) & 0xFFFF
        w = (w.to(tl.int32, bitcast=True) | low).to(tl.float32, bitcast=True)
    lr = number_of(numbers, table, starts, 0)
    g = read_gradient(sources, scales, i, starts, starts, d, dim, SCALED)
    if ALGORITHM == 0:
        w = w - lr * g
    following = i + 1
    more = starts & (tl.load(keys + following, mask=starts & (following < last), other=-1) == key)
    while tl.max(more.to(tl.int32), axis=0) > 0:
        for _ in tl.static_range(CHUNK):
            next_g = read_gradient(sources, scales, following, starts & (following < last), more, d, dim, SCALED)
            if ALGORITHM == 0:
                w = tl.where(more[:, None], w - lr * next_g, w)
            else:
                g = tl.where(more[:, None], g + next_g, g)
            following += 1
            more = more & (tl.load(keys + following, mask=starts & (following < last), other=-1) == key)
    if ALGORITHM != 0:
        state = tl.load(states_a + table, mask=starts, other=0).to(tl.pointer_type(tl.float32))
        eps = number_of(numbers, table, starts, 1)
    if ALGORITHM == 1:
        h = tl.load(state[:, None] + at, mask=live, other=0.0)
        h = h + g * g
        w = w - lr * tl.div_rn(g, tl.sqrt_rn(h) + eps)
        tl.store(state[:, None] + at, h, mask=live)
    if ALGORITHM == 2:
        h = tl.load(state + row, mask=starts, other=0.0)
        square = fold16(tl.where(live, g * g, 0.0), BLOCK_N, BLOCK_D)
        h = h + tl.div_rn(square, tl.maximum(dim, 1).to(tl.float32))
        w = w - tl.div_rn(lr, tl.sqrt_rn(h)[:, None] + eps) * g
        tl.store(state + row, h, mask=starts)
    if ALGORITHM >= 3:
        second = tl.load(states_b + table, mask=starts, other=0).to(tl.pointer_type(tl.float32))
    if ALGORITHM == 3:
        m = tl.load(state[:, None] + at, mask=live, other=0.0)
        v = tl.load(second[:, None] + at, mask=live, other=0.0)
        m = number_of(numbers, table, starts, 2) * m + number_of(numbers, table, starts, 3) * g
        v = number_of(numbers, table, starts, 4) * v + number_of(numbers, table, starts, 5) * (g * g)
        w = w - lr * tl.div_rn(m, tl.sqrt_rn(v) + eps)
        tl.store(state[:, None] + at, m, mask=live)
        tl.store(second[:, None] + at, v, mask=live)
    if ALGORITHM == 4:
        z = tl.load(state[:, None] + at, mask=live, other=0.0)
        n = tl.load(second[:, None] + at, mask=live, other=0.0)
        beta = number_of(numbers, table, starts, 6)
        l1 = number_of(numbers, table, starts, 7)
        l2 = number_of(numbers, table, starts, 8)
        before = tl.sqrt_rn(n)
        n = n + g * g
        after = tl.sqrt_rn(n)
        z = z + (g - tl.div_rn(after - before, full(lr, g)) * w)
        shrunk = tl.where(tl.abs(z) <= l1, 0.0, z - tl.where(z > 0, full(l1, z), full(l1 * -1.0, z)))
        # Times -1: Triton turns a minus into 0 - x, but the reference gives -0 if z is small.
        w = tl.div_rn(shrunk, tl.div_rn(beta + after, full(lr, after)) + l2) * -1.0
        tl.store(state[:, None] + at, z, mask=live)
        tl.store(second[:, None] + at, n, mask=live)
    if STORAGE == 0:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, w, mask=live)
    elif STORAGE == 1:
        tl.store(address.to(tl.pointer_type(tl.int16)) + at, to_float16(w), mask=live)
    else:
        bits = w.to(tl.int32, bitcast=True)
        tl.store(address.to(tl.pointer_type(tl.int16)) + at, (bits >> 16).to(tl.int16), mask=live)
        tl.store(low_address + at, bits.to(tl.int16), mask=live)


@triton.jit
def move_rows(
    blocks, rows, buffer, INTO_BUFFER: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Copies rows of arrays into their blocks of a buffer, or back: BLOCK_N rows of block program_id(1).

    blocks: int64 [*, 5]: address of the array, words in a row, index of its first row in `rows`, number of rows, and
    start of the block in the buffer, in words of 4 bytes (WIDE) or 2. Words are copied unchanged.
    """
    block = blocks + tl.program_id(1) * 5
    address, words, first = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    count, start = tl.load(block + 3), tl.load(block + 4)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.load(rows + first + n, mask=n < count, other=0)
    if WIDE:  # noqa: SIM108  # only the branch that is taken is compiled
        array = address.to(tl.pointer_type(tl.int32))
    else:
        array = address.to(tl.pointer_type(tl.int16))
    done = tl.zeros([], dtype=tl.int64)
    while done < words:
        w = (done + tl.arange(0, BLOCK_W))[None, :]
        mask = (n < count)[:, None] & (w < words)
        there, here = array + row[:, None] * words + w, buffer + start + n[:, None] * words + w
        if INTO_BUFFER:
            tl.store(here, tl.load(there, mask=mask, other=0), mask=mask)
        else:
            tl.store(there, tl.load(here, mask=mask, other=0), mask=mask)
        done += BLOCK_W


@triton.jit
def read_vector(dense, pooled, b, v, d, num_features, dim, mask):
    """Numbers d of vector v of sample b: vector 0 is the dense one, the others are the pooled rows."""
    # v, which is 0 there, gives the pointers their shape.
    first = tl.load(dense + b * dim + v + d, mask=mask & (v == 0), other=0.0)
    row = tl.load(pooled + (b * num_features + v - 1) * dim + d, mask=mask & (v > 0), other=0.0)
    return tl.where(v == 0, first, row)


@triton.jit(do_not_specialize=["num_features", "dim"])
def interact(out, dense, pooled, num_features, dim, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the dense vector of sample program_id(0), and the products of BLOCK vectors i with every j < i. A product
    is the sum of its terms in the order of the columns, from 0."""
    b = tl.program_id(0).to(tl.int64)
    out += b * (dim + (num_features + 1) * num_features // 2)
    last = tl.minimum(tl.program_id(1) * BLOCK + BLOCK - 1, num_features)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    first = tl.zeros([], dtype=tl.int32)
    while first < last:
        j = first + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        d = tl.zeros([], dtype=tl.int32)
        while d < dim:
            one = read_vector(dense, pooled, b, i, d, num_features, dim, i <= num_features)
            total += one * read_vector(dense, pooled, b, j, d, num_features, dim, j <= num_features)
            d += 1
        tl.store(out + dim + i * (i - 1) // 2 + j, total, mask=(j < i) & (i <= num_features))
        first += BLOCK
    columns = tl.arange(0, BLOCK_D)
    copied = (columns < dim) & (tl.program_id(1) == 0)
    tl.store(out + columns, tl.load(dense + b * dim + columns, mask=copied), mask=copied)


@triton.jit(do_not_specialize=["num_features", "dim"])
def interact_backward(
    grad_dense, grad_pooled, grad, dense, pooled, num_features, dim, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Gradients of BLOCK vectors i of sample program_id(0), columns d: for j != i in order, the pair's times T[j, d].
    The dense vector then adds the gradient of its own columns."""
    b = tl.program_id(0).to(tl.int64)
    grad += b * (dim + (num_features + 1) * num_features // 2)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    j = tl.zeros([], dtype=tl.int32)
    while j <= num_features:
        high, low = tl.maximum(i, j), tl.minimum(i, j)
        pair = tl.load(grad + dim + high * (high - 1) // 2 + low, mask=(high > low) & (i <= num_features), other=0.0)
        x = read_vector(dense, pooled, b, j, d, num_features, dim, d < dim)
        total = tl.where(high > low, total + pair * x, total)
        j += 1
    exists = (i <= num_features) & (d < dim)
    own = tl.load(grad + d, mask=d < dim, other=0.0)
    tl.store(grad_dense + b * dim + i + d, total + own, mask=exists & (i == 0))
    tl.store(grad_pooled + (b * num_features + i - 1) * dim + d, total, mask=exists & (i > 0))
