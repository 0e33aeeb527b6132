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
    from mlx_paged.engine import Engine, EngineStats
    from mlx_paged.loader import load
    from mlx_paged.request import Output
    from mlx_paged.sampling import SamplingParams

_HOMES = {
    "Engine": "engine",
    "EngineStats": "engine",
    "Output": "request",
    "SamplingParams": "sampling",
    "load": "loader",
}

__all__ = ["Engine", "EngineStats", "Output", "SamplingParams", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
