"""MLPs in bfloat16 as avx512_bf16 and amx_bf16 compute them, in plain torch: the native ones equal these to the bit.

Shape legend: B batch, I inputs and O outputs of a layer; products are [M, K] by [K, N].
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotrow.kernels.types import Activation

PAIRED_SAMPLES = 1024
"""Samples after which the sum of a weight's gradient is put aside and starts at +0 again."""


def round_to_bfloat16(x: Tensor) -> Tensor:
    """Returns x, float32, rounded to the 8 bits of bfloat16: to nearest, ties to even; below 2^-126 to zeros."""
    zero = torch.zeros_like(x).copysign(x)
    return torch.where(x.abs() < 2.0**-126, zero, x.bfloat16().float())


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns `a * b + c`, rounded once, to nearest even; a, b hold bfloat16 and c float32, none of them denormal.

    A result below 2^-126 becomes a zero with its sign, unless it rounds to 2^-126 with 24 bits of any exponent.
    """
    # The product is exact. Rounding the sum to 53 and then to 24 bits is rounding it once: a sum of 16 and of 24 bits
    # that float64 cannot hold is far from the middle between two float32.
    total = a.double() * b.double() + c.double()
    tiny = (total * 2.0**64).float().abs() < 2.0 ** (64 - 126)
    return torch.where(tiny, torch.zeros_like(total).copysign(total), total).float()


def multiply_pairs(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Returns `a b` [M, N], float32, of values of bfloat16. Sums start at +0 and take k = 1, 0, 3, 2, 5, 4, ...

    One instruction (vdpbf16ps) multiplies the elements 2j and 2j + 1, and adds the product of the odd one first. An odd
    K is followed by a zero.
    """
    M, K, N = *a_MK.shape, b_KN.shape[1]
    if K % 2:
        a_MK, b_KN = torch.cat([a_MK, torch.zeros(M, 1)], 1), torch.cat([b_KN, torch.zeros(1, N)])
    acc_MN = torch.zeros(M, N)
    for even in range(0, K, 2):
        for k in (even + 1, even):
            acc_MN = multiply_add(a_MK[:, k, None], b_KN[k], acc_MN)
    return acc_MN


def multiply_tiles(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`multiply_pairs` by AMX's instruction (tdpbf16ps), which takes 32 elements at a time: even ones in one chain from
    +0, odd ones in another. The sum of both is added to C, which starts at +0. Sums round and flush as `multiply_add`.

    K is padded with zeros to a multiple of 32. That changes nothing but the sign of a zero: a chain that ends in a
    flushed -0 has +0 after a pair of zeros.
    """
    M, K, N = *a_MK.shape, b_KN.shape[1]
    a_MK, b_KN = torch.cat([a_MK, torch.zeros(M, -K % 32)], 1), torch.cat([b_KN, torch.zeros(-K % 32, N)])
    acc_MN, one = torch.zeros(M, N), torch.ones(())
    for first in range(0, K, 32):
        even_MN, odd_MN = torch.zeros(M, N), torch.zeros(M, N)
        for k in range(first, first + 32, 2):
            even_MN = multiply_add(a_MK[:, k, None], b_KN[k], even_MN)
            odd_MN = multiply_add(a_MK[:, k + 1, None], b_KN[k + 1], odd_MN)
        acc_MN = multiply_add(one, multiply_add(one, even_MN, odd_MN), acc_MN)
    return acc_MN


Multiply = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Multiply] = {"avx512_bf16": multiply_pairs, "amx_bf16": multiply_tiles}
"""By the name that `ops.bfloat16_products` has for them."""


def mlp_bf16(
    x_BI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, last: Activation, multiply: Multiply
) -> tuple[Tensor, list[Tensor]]:
    """`mlp` with products of bfloat16: returns the output, float32, and the input of every layer as it was rounded.

    x, weights and the output of every layer but the last are rounded to bfloat16; sums and biases are float32.
    """
    inputs = [round_to_bfloat16(x_BI)]
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True), start=1):
        out_BO = multiply(inputs[-1], round_to_bfloat16(weight).T) + bias
        if k < len(weights) or last == "relu":
            out_BO = torch.where(out_BO < 0, 0.0, out_BO)
        inputs.append(round_to_bfloat16(out_BO))
    return out_BO, inputs[:-1]


def mlp_bf16_backward(
    grad_BO: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], multiply: Multiply
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns the gradients of x, weights and biases, float32; inputs: what `mlp_bf16` returned.

    grad: of the last layer's output, before its ReLU. The gradient of every layer's output is rounded to bfloat16. Sums
    over samples are made of stretches of PAIRED_SAMPLES, each from +0 upward, which are then added in order.
    """
    grad_weights: list[Tensor] = []
    grad_biases: list[Tensor] = []
    for k in reversed(range(len(weights))):
        g_BO = round_to_bfloat16(grad_BO)
        stretches = zip(torch.split(g_BO, PAIRED_SAMPLES), torch.split(inputs[k], PAIRED_SAMPLES), strict=True)
        parts = [(multiply(g.T, x), _sum_upward(g)) for g, x in stretches]
        grad_weights.insert(0, functools.reduce(torch.add, [part for part, _ in parts]))
        grad_biases.insert(0, functools.reduce(torch.add, [part for _, part in parts]))
        grad_BO = multiply(g_BO, round_to_bfloat16(weights[k]))
        if k > 0:
            grad_BO = torch.where(inputs[k] <= 0, 0.0, grad_BO)
    return grad_BO, grad_weights, grad_biases


def _sum_upward(g_BO: Tensor) -> Tensor:
    total_O = torch.zeros(g_BO.shape[1])
    for g_O in g_BO:
        total_O = total_O + g_O
    return total_O
