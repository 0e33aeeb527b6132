"""`mlx-paged generate`: one prompt, one or several answers."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mlx_paged.options import (
    add_engine_arguments,
    add_model_arguments,
    add_sampling_arguments,
    engine_options,
    load_model,
    sampling_fields,
    unescape,
)

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_paged.generation import Generation
    from mlx_paged.responses import Answer

DESCRIPTION = """\
Generate text from a prompt; the text streams as it is made.

The default model, tiny, comes with this package. It is a very small Qwen2.5 that answers questions
about facts in its prompt, and knows nothing else: it is there so that everything runs at once. For
a real one name a folder (config.json, safetensors, tokenizer) or an id on the Hugging Face Hub;
Qwen2 and Qwen2.5 of every size work, as published or quantized by mlx-community.

The prompt goes through the model's chat template, as with mlx_lm.generate, unless
--ignore-chat-template is given or the model has none."""
EPILOG = """\
examples:
  mlx-paged generate --prompt "Anna lives in Oslo. Tom lives in Rome. Where does Anna live?"
  mlx-paged generate --model Qwen/Qwen2.5-1.5B-Instruct --prompt "Write a haiku about rain"
  mlx-paged generate --model mlx-community/Qwen2.5-7B-Instruct-4bit -p - --verbose < question.txt
  mlx-paged generate -p "Name a colour." --n 4 --temp 0.8 --seed 1 --memory-limit 64MB --verbose
  mlx-paged generate -p "Hello!" --n 2 --temp 1 --json
  mlx-paged generate -p "Hello!" --n 4 --temp 1 --num-blocks 64 --trace trace.jsonl

exit codes: 0 done, 1 failed while it ran, 2 a mistake in the arguments, 130 interrupted
"""
DEMONSTRATION = '"Anna lives in Oslo. Where does Anna live?"'


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "generate",
        usage="mlx-paged generate --prompt TEXT [--model NAME] [options]",
        help="generate text from a prompt",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument(
        "--prompt", "-p", metavar="TEXT", help="the prompt; - reads it from standard input"
    )
    prompt.add_argument(
        "--messages",
        metavar="FILE",
        help='a chat instead: a JSON file, [{"role": "user", "content": "..."}, ...]; - is '
        "standard input",
    )
    prompt.add_argument("--system-prompt", metavar="TEXT", help="what the model is told first")
    prompt.add_argument(
        "--prefill-response", metavar="TEXT", help="how its answer begins, for it to go on with"
    )
    prompt.add_argument(
        "--ignore-chat-template", action="store_true", help="give the model the bare prompt"
    )
    prompt.add_argument(
        "--chat-template-config",
        type=_json_object,
        metavar="JSON",
        default={},
        help="further arguments of the chat template, as a JSON object",
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--verbose",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="also print mlx-lm's figures and the block pool's",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object at the end")
    output.add_argument(
        "--trace", metavar="FILE", help="write to FILE which sequence holds which block, per step"
    )


def run(args: argparse.Namespace) -> int:
    """Generate, and print as it is made."""
    chat = _messages(args)
    model, tokenizer = load_model(args)
    prompt = _prompt(args, tokenizer, chat)
    from mlx_paged.api import generate
    from mlx_paged.generation import Generation
    from mlx_paged.trace import Trace

    fields = sampling_fields(args)
    options = engine_options(args)
    max_tokens = fields.pop("max_tokens", None)
    with ExitStack() as stack:
        if args.trace is not None:
            options["observer"] = stack.enter_context(Trace(args.trace))
        generation = Generation(
            generate, model, tokenizer, prompt, max_tokens, {**fields, **options}
        )
        show = _show_json if args.json else _show_text
        interrupted = show(args, generation, tokenizer)
    return 130 if interrupted else 0


def _show_text(
    args: argparse.Namespace, generation: Generation, tokenizer: TokenizerWrapper
) -> bool:
    """Print texts as they grow, then what else is wanted; return whether Ctrl-C ended it."""
    from mlx_paged.printing import OrderedPrinter

    def write(text: str) -> None:
        print(text, end="", flush=True)

    if args.verbose:
        write("=" * 10 + "\n")
    ranked = generation.params.best_of is not None
    printer = OrderedPrinter(generation.params.n, write)
    interrupted = False
    try:
        for response in generation:
            if not ranked:
                printer.add(response.index, response.text, response.finish_reason is not None)
    except KeyboardInterrupt:
        interrupted = True
    if ranked:
        for i, answer in enumerate(generation.best()):
            printer.add(i, answer.text, finished=True)
    printer.close()
    if generation.params.logprobs is not None:
        for answer in generation.best():
            write("".join(f"{line}\n" for line in _logprob_lines(answer, tokenizer)))
    if args.verbose:
        write("=" * 10 + f"\n{generation.figures}\n")
    return interrupted


def _logprob_lines(answer: Answer, tokenizer: TokenizerWrapper) -> Iterator[str]:
    """A line for each token: its log-probability, and the most likely ones beside it."""

    def shown(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    tops = answer.top_logprobs or [[]] * len(answer.token_ids)
    for token, logprob, top in zip(answer.token_ids, answer.logprobs, tops, strict=True):
        others = "  ".join(f"{shown(other)} {score:.3f}" for other, score in top)
        yield f"{logprob:8.3f}  {shown(token)}" + (f"  of  {others}" if others else "")


def _show_json(
    args: argparse.Namespace, generation: Generation, tokenizer: TokenizerWrapper
) -> bool:
    """Print one JSON object; return whether Ctrl-C ended the generation."""
    from dataclasses import asdict

    interrupted = False
    try:
        for _ in generation:
            pass
    except KeyboardInterrupt:
        interrupted = True
    samples = []
    for answer in generation.best():
        sample: dict[str, Any] = {
            "index": answer.index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
        }
        if generation.params.logprobs is not None:
            sample["logprobs"] = [_finite(x) for x in answer.logprobs]
            if answer.top_logprobs:
                sample["top_logprobs"] = [
                    [[token, _finite(x)] for token, x in top] for top in answer.top_logprobs
                ]
        samples.append(sample)
    figures = None if generation.figures is None else asdict(generation.figures)
    said = {"model": args.model, "samples": samples, "stats": figures}
    if interrupted:
        said["interrupted"] = True
    print(json.dumps(said, ensure_ascii=False, allow_nan=False), flush=True)
    return interrupted


def _messages(args: argparse.Namespace) -> list[dict[str, Any]] | str:
    """The messages, or the bare text where there is a prompt; without any model loaded."""
    if (args.prompt is None) == (args.messages is None):
        raise ValueError(
            f"give --prompt or --messages, and not both; for example --prompt {DEMONSTRATION}"
        )
    if args.messages is None:
        return sys.stdin.read() if args.prompt == "-" else unescape(args.prompt)
    if args.ignore_chat_template:
        raise ValueError("--messages need the chat template: give no --ignore-chat-template")
    where = "standard input" if args.messages == "-" else args.messages
    try:
        if args.messages == "-":
            messages = json.load(sys.stdin)
        else:
            with open(args.messages, encoding="utf-8") as file:
                messages = json.load(file)
    except ValueError as error:  # broken JSON or UTF-8
        raise ValueError(f"--messages: {where} is not JSON: {error}") from error
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"--messages: {where} must hold a list of messages, got {messages!r}")
    return messages


def _prompt(
    args: argparse.Namespace, tokenizer: TokenizerWrapper, chat: list[dict[str, Any]] | str
) -> str | list[int]:
    """What the model gets: ids of a chat, or the bare prompt."""
    from mlx_paged.chat import encode_chat

    template_wanted = (
        isinstance(chat, list)
        or args.system_prompt is not None
        or args.prefill_response is not None
    )
    if isinstance(chat, str):
        if args.ignore_chat_template or not tokenizer.has_chat_template:
            if template_wanted:
                why = "is ignored" if args.ignore_chat_template else "is not in this model"
                raise ValueError(
                    "--system-prompt and --prefill-response need the chat template, which " + why
                )
            return chat
        chat = [{"role": "user", "content": chat}]
    if args.system_prompt is not None:
        chat = [{"role": "system", "content": unescape(args.system_prompt)}, *chat]
    if args.prefill_response is not None:
        chat = [*chat, {"role": "assistant", "content": unescape(args.prefill_response)}]
    return encode_chat(tokenizer, chat, **args.chat_template_config)


def _finite(x: float) -> float | None:
    """JSON has no infinity: a forbidden token's log-probability is null."""
    return x if math.isfinite(x) else None


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "t"):
        return True
    if text.lower() in ("false", "f"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not True or False")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
