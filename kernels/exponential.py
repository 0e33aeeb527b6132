"""Exponentials, fast where MLX's are not.

On a CPU without a vector library, MLX computes one exponential after the other: a softmax then
costs several times the two matrix products around it. A polynomial in plain operations becomes
one loop that the compiler vectorises, when it is part of a compiled function.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_paged.kernels.compiled import compiled

LOG2_E = 1.4426950408889634
# 2**f = exp(f ln 2) for f in [-1/2, 1/2]: Taylor's terms up to the sixth, error 1.2e-7.
TERMS = (
    1.5403530393381606e-4,
    1.3333558146428443e-3,
    9.6181291076284772e-3,
    5.5504108664821580e-2,
    2.4022650695910072e-1,
    6.9314718055994531e-1,
    1.0,
)
LEAST, MOST = -126.0, 127.0  # the exponents of float32's normal numbers
MAGIC = 1.5 * 2**23  # added to a small number, it leaves the nearest integer in the last bits


def exp(x: mx.array) -> mx.array:
    """e**x of a float32 array, to a relative error of about 1e-7 times the exponent.

    Results below the smallest normal number are 0. On a GPU this is `mx.exp`.
    """
    if mx.default_device() == mx.Device(mx.gpu):
        return mx.exp(x)
    power = x * LOG2_E
    clipped = mx.minimum(mx.maximum(power, LEAST), MOST)
    rounded = clipped + MAGIC
    rest = clipped - (rounded - MAGIC)
    mantissa = mx.array(TERMS[0])
    for term in TERMS[1:]:
        mantissa = mantissa * rest + term
    # Adding to the exponent's bits multiplies by a power of two.
    bits = mantissa.view(mx.int32) + mx.left_shift(rounded.view(mx.int32), 23)
    return mx.where(power < LEAST, 0.0, bits.view(mx.float32))


def exponentials(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """exp(scores - maximum) over the last axis, with what a softmax or a merge needs besides.

    Args:
        scores: [..., n] float32; -inf for what is masked, but not all of a row.

    Returns:
        Weights [..., n], their maxima of scores and their sums, both [..., 1].
    """
    maxima = mx.max(scores, axis=-1, keepdims=True)
    weights = _shifted(scores, maxima)
    return weights, maxima, mx.sum(weights, axis=-1, keepdims=True)


@compiled
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """gate * sigmoid(gate) * up, in the inputs' dtype."""
    if mx.default_device() == mx.Device(mx.gpu):
        return gate * mx.sigmoid(gate) * up
    x = gate.astype(mx.float32)
    return (x / (1 + exp(-x)) * up).astype(gate.dtype)


@compiled
def _shifted(scores: mx.array, maxima: mx.array) -> mx.array:
    return exp(scores - maxima)
