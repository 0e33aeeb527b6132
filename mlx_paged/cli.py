"""The command `mlx-paged`.

A command is a module with `add_parser(subparsers)`, which sets the defaults `run` (a function of
the parsed arguments that returns the exit code) and `parser`.

Exit codes: 0, done; 1, it failed while it ran; 2, the user's mistake; 130, interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("mlx_paged.cli_generate", "mlx_paged.cli_batch_sample")
DESCRIPTION = """\
Qwen2.5 on a paged KV cache, in MLX: keys and values live in blocks of a fixed size that any
sequence can use, share and give back, so many samples of one prompt store it once."""
EPILOG = """\
examples:
  mlx-paged generate --prompt "Anna lives in Oslo. Where does Anna live?"
  mlx-paged generate --model Qwen/Qwen2.5-1.5B-Instruct --prompt "Write a haiku" --n 4 --temp 0.8
  mlx-paged batch-sample prompts.jsonl -o samples.jsonl --n 8 --temp 0.8

`mlx-paged COMMAND --help` explains a command.
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="mlx-paged",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        import_module(command).add_parser(subparsers)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; an unknown option ends the program and names the closest known one."""
    args, unknown = make_parser().parse_known_args(argv)
    if unknown:
        known = list(args.parser._option_string_actions)
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        args.parser.error(f"unknown argument {unknown[0]}{hint}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = parse(argv)
    # The model is MLX's; transformers only brings the tokenizer and would say that it has no torch.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"{args.parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        print(f"{args.parser.prog}: failed: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
