"""The arrays behind the block pool: one K and one V array per layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Slots(NamedTuple):
    """Where the tokens of a step are stored; the three arrays broadcast to [tokens, heads]."""

    blocks: mx.array  # [tokens, 1] int32
    heads: mx.array  # [1, kv heads] int32
    offsets: mx.array  # [tokens, 1] int32, inside the block


class KVCache:
    """Keys and values of all blocks.

    `keys[layer]` and `values[layer]` are `[num_blocks, num_kv_heads, block_size, head_dim]`: one
    block is contiguous, and so is each head's part of it. MLX updates such an array in place only
    while nobody else refers to its buffer, so nothing outside a step may keep one of these arrays
    or a view of it.

    Values past the computed tokens of a block are always finite: `open_blocks` clears them when a
    sequence starts to write, so no sequence ever multiplies a weight of zero with what another
    one left behind.

    Args:
        num_layers, num_blocks, num_kv_heads, block_size, head_dim: the shape.
        dtype: of keys and values.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: mx.Dtype,
    ) -> None:
        self.shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.dtype = dtype
        self.num_layers = num_layers
        most = self.most_blocks(num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim)
        if num_blocks > most:
            raise ValueError(
                f"num_blocks {num_blocks} makes a layer's array of 2**31 elements or more; "
                f"at most {most} blocks fit"
            )
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.reset()

    def view(self, keys: list[mx.array], values: list[mx.array]) -> KVCache:
        """A cache of the same geometry over other arrays."""
        other = copy(self)
        other.keys, other.values = list(keys), list(values)
        return other

    def adopt(self, keys: list[mx.array], values: list[mx.array]) -> None:
        """Go on with the arrays that a step has written, and let go of those before."""
        self.keys, self.values = keys, values

    @staticmethod
    def most_blocks(*, num_kv_heads: int, block_size: int, head_dim: int, **_: object) -> int:
        """Blocks of which a layer's array stays under 2**31 elements, MLX's limit."""
        return (2**31 - 1) // (num_kv_heads * block_size * head_dim)

    @staticmethod
    def block_bytes(
        *, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: mx.Dtype
    ) -> int:
        """Bytes of one block: K and V, all layers."""
        return 2 * num_layers * num_kv_heads * block_size * head_dim * dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in (*self.keys, *self.values))

    def reset(self) -> None:
        """Make all arrays anew, filled with zeros."""
        self.keys = [mx.zeros(self.shape, self.dtype) for _ in range(self.num_layers)]
        self.values = [mx.zeros(self.shape, self.dtype) for _ in range(self.num_layers)]
        mx.eval(self.keys, self.values)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all sources before any target.

        Sources are read and evaluated first: a scatter whose update still reads the array would
        make MLX copy the whole pool.

        Args:
            copies: (source, target) pairs; targets are distinct.
        """
        if not copies:
            return
        sources, targets = (
            mx.array(np.array(side, np.int32)) for side in zip(*copies, strict=True)
        )
        keys = [a[sources] for a in self.keys]
        values = [a[sources] for a in self.values]
        mx.eval(keys, values)
        for layer in range(self.num_layers):
            self.keys[layer][targets] = keys[layer]
            self.values[layer][targets] = values[layer]
        mx.eval(self.keys, self.values)

    def open_blocks(self, blocks: mx.array) -> None:
        """Clear the values of blocks that are about to be partly filled for the first time.

        Args:
            blocks: [n] block numbers.
        """
        for layer in range(self.num_layers):
            self.values[layer][blocks] = mx.array(0, self.dtype)

    def write(self, layer: int, keys: mx.array, values: mx.array, slots: Slots) -> None:
        """Store the keys and values of a step's tokens, with one scatter per array.

        Args:
            layer: which layer's arrays.
            keys, values: [tokens, num_kv_heads, head_dim].
            slots: where the tokens go.
        """
        index = (slots.blocks, slots.heads, slots.offsets)
        self.keys[layer][index] = keys
        self.values[layer][index] = values
