"""Peak memory of one side, in a process that does nothing else.

As a program it reads a request as JSON from stdin, runs the workload once, and writes what memory
it took as JSON to stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.benchmark.measurement import Options
    from scripts.benchmark.workloads import Sizes

ROOT = Path(__file__).parents[2]


def measure(options: Options, sizes: Sizes, side: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one side once in a new process.

    Args:
        side: the name of its class.

    Returns:
        Bytes: `peak_bytes` (MLX's, weights included), `rss_bytes` (the process's), `weight_bytes`,
        and of keys and values `kv_reserved_bytes`, `kv_held_bytes`, `kv_live_bytes`; or `error`.
    """
    request = {
        "model": asdict(options.model),
        "engine": dict(options.engine),
        "data": options.data,
        "seed": options.seed,
        "workload": sizes.name,
        "sizes": vars(sizes),
        "side": side,
        "settings": settings,
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """What the new process does."""
    import mlx.core as mx

    from scripts.benchmark import contiguous, machine, ours
    from scripts.benchmark.measurement import context
    from scripts.benchmark.models import ModelSpec, load_models
    from scripts.benchmark.recording import Recorder
    from scripts.benchmark.workloads import KINDS

    models = load_models(ModelSpec(**request["model"]))
    kind = next(kind for kind in KINDS if kind.name == request["workload"])
    workload = kind(**request["sizes"]).build(context(models, request["data"]), request["seed"])
    if request["side"] == "Ours":
        # The engine joins matrices; mlx-lm's model would keep the parts alive.
        models = replace(models, theirs=None)
    contender = getattr(ours if request["side"] == "Ours" else contiguous, request["side"])
    side = contender(models, request["engine"] if request["side"] == "Ours" else {})
    recorder = Recorder(workload.streams, watch=True)
    weight_bytes = models.weight_bytes
    mx.clear_cache()
    machine.reset_peak()
    side.prepare(workload, request["settings"])
    side.run(workload, request["settings"], recorder)
    return {
        "peak_bytes": mx.get_peak_memory(),
        "rss_bytes": machine.peak_rss(),
        "weight_bytes": weight_bytes,
        "kv_reserved_bytes": recorder.reserved,
        "kv_held_bytes": recorder.held,
        "kv_live_bytes": recorder.live,
    }


if __name__ == "__main__":
    print(json.dumps(serve(json.load(sys.stdin))))
