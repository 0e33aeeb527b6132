"""Exponentials, fast where MLX's are not.

On a CPU without a vector library, MLX computes one exponential after the other: a softmax then
costs several times the two matrix products around it. A polynomial in plain operations becomes
one loop that the compiler vectorises, when it is part of a compiled function.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_paged.kernels.compiled import compiled

LOG2_E = 1.4426950408889634
# 2**f for f in [-1/2, 1/2], interpolated where Chebyshev's polynomial is 0: error 1.0e-7.
TERMS = (
    1.3390863364698205e-3,
    9.6760319182984740e-3,
    5.5503571142190296e-2,
    2.4022107485309188e-1,
    6.9314718802622940e-1,
    1.0000000754548972,
)
LEAST, MOST = -126.0, 127.0  # the exponents of float32's normal numbers
FLOOR = -100.0  # of a softmax's weights, as exponents: far below what float32 can add to 1
MANY = 1024  # weights that a product with ones sums faster
MAGIC = 1.5 * 2**23  # added to a small number, it leaves the nearest integer in the last bits


def exp(x: mx.array) -> mx.array:
    """e**x of a float32 array, to a relative error of about 1e-7 times the exponent.

    Results below the smallest normal number are 0. On a GPU this is `mx.exp`.
    """
    if mx.default_device() == mx.Device(mx.gpu):
        return mx.exp(x)
    power = x * LOG2_E
    return mx.where(power < LEAST, 0.0, _exp2(mx.minimum(mx.maximum(power, LEAST), MOST)))


def _exp2(power: mx.array) -> mx.array:
    """2**power of float32 numbers from LEAST to MOST."""
    rounded = power + MAGIC
    rest = power - (rounded - MAGIC)
    mantissa = mx.array(TERMS[0])
    for term in TERMS[1:]:
        mantissa = mantissa * rest + term
    # Adding to the exponent's bits multiplies by a power of two.
    return (mantissa.view(mx.int32) + mx.left_shift(rounded.view(mx.int32), 23)).view(mx.float32)


def exponentials(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """exp(scores - maximum) over the last axis, with what a softmax or a merge needs besides.

    Args:
        scores: [..., n] float32; -inf for what is masked, but not all of a row.

    Returns:
        Weights [..., n], their maxima of scores and their sums, both [..., 1].
    """
    maxima = mx.max(scores, axis=-1, keepdims=True)
    weights = _shifted(scores, maxima)
    count = scores.shape[-1]
    if count < MANY:
        return weights, maxima, mx.sum(weights, axis=-1, keepdims=True)
    return weights, maxima, weights @ mx.ones((count, 1))


@compiled
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """gate * sigmoid(gate) * up, in the inputs' dtype."""
    if mx.default_device() == mx.Device(mx.gpu):
        return gate * mx.sigmoid(gate) * up
    x = gate.astype(mx.float32)
    return (x / (1 + exp(-x)) * up).astype(gate.dtype)


@compiled
def _shifted(scores: mx.array, maxima: mx.array) -> mx.array:
    if mx.default_device() == mx.Device(mx.gpu):
        return mx.exp(scores - maxima)
    # What is masked comes out as the least weight; less that, it is exactly 0.
    least = float(np.float32(TERMS[-1])) * 2.0**FLOOR
    return _exp2(mx.maximum((scores - maxima) * LOG2_E, FLOOR)) - least
