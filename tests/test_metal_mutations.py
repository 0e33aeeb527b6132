"""Faults put into the real kernels: the tests' cases must notice each of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.kernels.metal import kernel_source
from tests.metal_cases import (
    METAL,
    TOLERANCE,
    Case,
    compiling_ahead,
    kernel_factory,
    make_case,
    require_emulator,
    run_case,
)
from tests.metal_on_cpu import MetalError

require_emulator()
if METAL:
    pytest.skip("the emulator finds them; a GPU may or may not", allow_module_level=True)


@dataclass(frozen=True)
class Mutation:
    """Replaces `old`, which the source has `count` times, and says how that shows.

    Attributes:
        case: "own" or "shared": which kernel is wrong.
        shows: a pattern for the emulator's message, or for "wrong result" or "wrong bytes".
    """

    case: str
    name: str
    old: str
    new: str
    shows: str = "wrong result"
    count: int = 1


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
COPY_END = "*(const device vec<T, 4>*)(values + from);\n    }\n    "
MUTATIONS = [
    Mutation("shared", "no barrier before a tile is used", COPY_END + BARRIER, COPY_END,
             "(data race on byte|load of byte).*threadgroup array `(key|value)_tile`.*thread "),
    Mutation("shared", "no barrier before a tile is filled anew",
             f"    {BARRIER}  // and the last tile has been used\n", "",
             "threadgroup array `(offsets|key_tile|value_tile)`.*thread "),
    Mutation("own", "no barrier after the queries are loaded",
             f"(my_queries + i);\n  {BARRIER}", "(my_queries + i);",
             "threadgroup array `query_tile`.*thread "),
    Mutation("own", "no barrier before the SIMD groups' parts are overwritten",
             f"      {BARRIER}\n    }}\n  }}\n}}\n\n// ---- many rows",
             "    }\n  }\n}\n\n// ---- many rows", "data race.*`parts`.*thread "),
    Mutation("own", "kv heads left out of the stride", "(block * kv_heads + head)",
             "(block + head)"),
    Mutation("own", "the block size as a stride of heads",
             "(block * kv_heads + head) * block_size", "(block * kv_heads + head * block_size)"),
    Mutation("own", "the token after", "token % block_size) * D",
             "(token + 1) % block_size) * D"),
    Mutation("own", "one token too many", "min(TOKENS_PER_TURN, tokens - turn)",
             "min(TOKENS_PER_TURN, tokens - turn + 1)"),
    Mutation("own", "one token too few", "turn < tokens;", "turn < tokens - 1;"),
    Mutation("own", "masked tokens are read", "if (t < valid) load_part<D>(row, lane, v);",
             "load_part<D>(row, lane, v);", "wrong bytes"),
    Mutation("own", "the accumulator is not rescaled", "state.acc[j][i] *= r;",
             "state.acc[j][i] *= 1.0f;"),
    Mutation("own", "the sum is not rescaled", "state.l * rescale + p", "state.l + p"),
    Mutation("own", "parts are added without weights", "exp2(maxima[s * G + query] - m)", "1.0f"),
    Mutation("own", "partials are merged without weights", "exp2(stats[place * 2] - m)", "1.0f"),
    Mutation("own", "the table of another row", "table_row * table_width + token",
             "token", "out of bounds|wrong result"),
    Mutation("own", "row and partial swapped", "simd_broadcast(pair, 0)",
             "simd_broadcast(pair, 1)", "out of bounds.*`queries`.*thread "),
    Mutation("own", "scores in the wrong domain", "exp2(score - m)", "exp(score - m)"),
    Mutation("own", "V is read twice", "w * v[i];",
             "w * v[i];\n        if (t < valid) load_part<D>(row, lane, v);", "wrong bytes"),
    Mutation("shared", "the tile's tail is read", "min(TILE, tokens - tile)", "TILE",
             "out of bounds|wrong"),
    Mutation("shared", "a neighbour's query", "number % G) * D", "(number + 1) % G) * D"),
    Mutation("shared", "the state of a long list is not restored", "tile > 0 && !in_registers",
             "false"),
    Mutation("shared", "partials of shared runs are forgotten",
             "shared_last = shared_starts[row + 1]", "shared_last = shared_starts[row]"),
    Mutation("shared", "an exchange in some lanes only",
             "state.m = simd_shuffle(state.m, ushort(slot * S));",
             "if (keeper) state.m = simd_shuffle(state.m, ushort(slot * S));", "divergent SIMD"),
]  # fmt: skip


def mutant(mutation: Mutation, make: Callable[..., Any] | None = None) -> Callable[..., Any]:
    make = make or kernel_factory()
    assert make is not None

    def factory(**arguments: Any) -> Any:
        header = arguments["header"].replace(mutation.old, mutation.new)
        return make(**{**arguments, "header": header})

    factory.kernels = make.kernels  # type: ignore[attr-defined]
    return factory


@functools.cache
def case_of(kind: str) -> Case:
    if kind == "own":  # unequal lengths around a block, a split, several rounds of merging
        return make_case([1, 16, 31, 300], group=5, head_dim=64)
    # More queries than registers hold, three tiles of which the last is short; all is shared.
    return make_case([72] * 20, group=7, head_dim=64, block_size=8, shared_tokens=72)


def what_shows(kind: str, factory: Callable[..., Any]) -> str:
    try:
        outcome = run_case(case_of(kind), factory, gpu_cores=16 if kind == "own" else 1)
    except MetalError as error:
        return str(error)
    if not outcome.error <= TOLERANCE[mx.float32]:  # NaN is wrong too
        return "wrong result"
    return "nothing" if outcome.loaded == 1.0 else "wrong bytes"


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    def launch(mutation: Mutation) -> Callable[[Any], object]:
        return lambda factory: what_shows(mutation.case, mutant(mutation, factory))

    with compiling_ahead(request, map(launch, MUTATIONS)):
        yield


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_the_kernels_as_they_are_show_nothing(kind: str) -> None:
    assert what_shows(kind, mutant(Mutation(kind, "none", "\0", "\0"))) == "nothing"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_is_caught(mutation: Mutation) -> None:
    assert kernel_source().count(mutation.old) == mutation.count
    shown = what_shows(mutation.case, mutant(mutation))
    assert re.search(mutation.shows, shown, re.S), shown
