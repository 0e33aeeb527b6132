"""The same tokens from blocks as from one long array.

Two prompts are decoded in turn by one engine, on a pool of 64 blocks of 16 tokens, so that their
blocks interleave; then each is decoded alone by mlx-lm, on its contiguous cache and the same
weights. Both take the most likely token, and both must give the same ones.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_paged.engine import Engine
from mlx_paged.loader import find_folder, load
from mlx_paged.sampling import SamplingParams
from scripts.report import make_parser, progress, run, write_json

if TYPE_CHECKING:
    from mlx_paged.models.qwen2 import Qwen2

PROMPTS = ("The KV cache stores", "Paged attention borrows an idea from operating systems:")
TOKENS = 100
NUM_BLOCKS, BLOCK_SIZE = 64, 16


def decode(
    engine: Engine, prompts: Sequence[list[int]], count: int
) -> Generator[list[list[int]], None, None]:
    """Decode all prompts in turn, and yield what there is after each step.

    The requests are still held when the last one has `count` tokens; closing the iterator ends
    them.
    """
    params = SamplingParams(max_tokens=count + 1, ignore_eos=True)
    ids = [engine.add(prompt, params) for prompt in prompts]
    tokens: dict[int, list[int]] = {request: [] for request in ids}
    try:
        while any(len(answer) < count for answer in tokens.values()):
            for output in engine.step():
                assert output.token is not None
                tokens[output.request_id].append(output.token)
            yield list(tokens.values())
    finally:
        for request in ids:
            engine.cancel(request)


def contiguous(model: Any, prompt: list[int], count: int) -> Iterator[int]:
    """mlx-lm's greedy tokens on its contiguous cache."""
    from mlx_lm.generate import generate_step

    for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
        yield int(token)


def mlx_lm_model(path_or_id: str, model: Qwen2) -> Any:
    """mlx-lm's model of the same checkpoint, on the very arrays of ours."""
    from mlx_lm.utils import load_model

    theirs, _ = load_model(find_folder(path_or_id), lazy=True)
    theirs.update(model.parameters())
    return theirs


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "python -m scripts.same --model path/to/Qwen2.5-0.5B")
    parser.add_argument(
        "--model", default="tiny", help="tiny, a checkpoint's folder, or an id on the Hub (tiny)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of weights, keys and values; only float32 is exact enough to promise equal tokens",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write the figures as JSON to FILE; without FILE as one line after the text",
    )
    args = parser.parse_args(argv)
    model, tokenizer = load(args.model, dtype=args.dtype)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    engine = Engine(model, tokenizer, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    block_bytes = engine.stats.block_bytes
    print(
        f"block: {BLOCK_SIZE} tokens, {block_bytes:,} bytes "
        f"({model.config.num_hidden_layers} layers, keys and values)"
    )
    ours: list[list[int]] = []
    steps = decode(engine, prompts, TOKENS)
    for _ in progress(range(TOKENS), "paged", TOKENS):
        ours = next(steps)
    tables = list(engine.block_tables().values())
    stats = engine.stats
    free = stats.num_blocks - stats.blocks_used
    steps.close()
    for table in tables:
        print(f"table: {table}")

    theirs_model = mlx_lm_model(args.model, model)
    same: list[bool] = []
    for prompt, answer in zip(prompts, ours, strict=True):
        theirs = contiguous(theirs_model, prompt, TOKENS)
        same.append(list(progress(theirs, "contiguous", TOKENS)) == answer)
        print(f"same {TOKENS} tokens as the contiguous cache: {same[-1]}")
    print(f"{free} of {stats.num_blocks} blocks free")
    write_json(
        args.json,
        {
            "model": args.model,
            "dtype": args.dtype,
            "block_bytes": block_bytes,
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "tables": tables,
            "same": same,
            "blocks_free": free,
            "num_blocks": stats.num_blocks,
        },
    )
    return 0 if all(same) else 1


if __name__ == "__main__":
    run(main)
