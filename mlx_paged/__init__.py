"""Qwen2.5 on a paged KV cache, in MLX.

    from mlx_paged import load, generate

    model, tokenizer = load("tiny")
    print(generate(model, tokenizer, "Anna lives in Oslo. Where does Anna live?"))

Names are imported when they are first used, so that `import mlx_paged` loads no model code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_paged.api import batch_generate, generate, stream_generate
    from mlx_paged.batch_samples import BatchSample, batch_sample
    from mlx_paged.beam import BeamParams, beam_search
    from mlx_paged.engine import Engine, EngineStats
    from mlx_paged.loader import load
    from mlx_paged.request import Hypothesis, Output
    from mlx_paged.responses import BatchResponse, BatchStats, GenerationResponse
    from mlx_paged.sampling import SamplingParams
    from mlx_paged.trace import Trace

_HOMES = {
    "BatchResponse": "responses",
    "BatchSample": "batch_samples",
    "BatchStats": "responses",
    "BeamParams": "beam",
    "Engine": "engine",
    "EngineStats": "engine",
    "GenerationResponse": "responses",
    "Hypothesis": "request",
    "Output": "request",
    "SamplingParams": "sampling",
    "Trace": "trace",
    "batch_generate": "api",
    "batch_sample": "batch_samples",
    "beam_search": "beam",
    "generate": "api",
    "load": "loader",
    "stream_generate": "api",
}

__all__ = [
    "BatchResponse",
    "BatchSample",
    "BatchStats",
    "BeamParams",
    "Engine",
    "EngineStats",
    "GenerationResponse",
    "Hypothesis",
    "Output",
    "SamplingParams",
    "Trace",
    "batch_generate",
    "batch_sample",
    "beam_search",
    "generate",
    "load",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
