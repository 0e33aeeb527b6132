"""`mlx-paged batch-sample`: a file of prompts in, a file of samples out."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_paged.options import (
    add_engine_arguments,
    add_model_arguments,
    add_sampling_arguments,
    engine_options,
    load_model,
    sampling_fields,
)

if TYPE_CHECKING:
    from mlx_paged.batch_samples import BatchSample, BatchSampler
    from mlx_paged.jobs import Job
    from mlx_paged.sample_file import SampleFile

DESCRIPTION = """\
Sample many prompts. INPUT has a JSON object on each line, with one of

  "prompt"     text, given to the model as it is
  "messages"   a chat: [{"role": "user", "content": "..."}, ...]
  "token_ids"  a list of token ids

and, if need be, "id" (anything; its samples carry it) and sampling options of its own: max_tokens,
temperature, n, best_of, seed, stop, logprobs and so on, as in Python's SamplingParams. The options
below are for lines that have none.

OUTPUT gets a JSON object on a line for each sample: line (from 1), sample (from 0), id, text,
token_ids, prompt_tokens, seed, finish_reason ("stop", "length" or "error"); logprobs and
top_logprobs if asked for; mean_logprob with best_of. A line that cannot be sampled is reported,
gets a record with "error", and does not stop the others.

Samples are on the disk as soon as they are made. After a crash, a kill or a loss of power the same
command goes on where it was; what is there is not made again. At the end the file is put in the
order of INPUT, and is the same however often it was interrupted, but for rounding: in another
batch log-probabilities may differ in their last digits. OUTPUT.run beside it says what it is made
from; with another input, model or sampling option the command refuses to go on. Engine options may
change: go on with a lower --memory-limit if it was too high.

Sample i of a line has the seed SEED + i, where SEED is the line's own, or follows from --seed (0)
and the line's number."""
EPILOG = """\
examples:
  mlx-paged batch-sample prompts.jsonl -o samples.jsonl --n 4 --temp 0.8
  mlx-paged batch-sample chats.jsonl -o samples.jsonl --model Qwen/Qwen2.5-1.5B-Instruct \\
      --temp 0.7 --n 16 --best-of 32 --max-tokens 400 --memory-limit 4GB

exit codes: 0 done, 1 done but some lines failed, or it failed while it ran, 2 a mistake in the
arguments, 130 interrupted
"""
REFRESH = 0.2  # seconds


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "batch-sample",
        help="sample a file of prompts",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("input", metavar="INPUT", type=Path, help="a JSON object on each line")
    parser.add_argument(
        "-o", "--output", metavar="OUTPUT", type=Path, required=True, help="where the samples go"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="begin anew, whatever OUTPUT holds"
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Sample, or go on with it."""
    fields = {"seed": 0, **sampling_fields(args)}
    lines, digest = _measure(args.input)
    if args.output.resolve() == args.input.resolve():
        raise ValueError(f"INPUT and OUTPUT are the same file: {args.input}")
    model, tokenizer = load_model(args)
    from mlx_paged.batch_samples import BatchSampler
    from mlx_paged.sample_file import SampleFile

    template = str(getattr(tokenizer, "chat_template", None))
    made_from = {
        "format": 1,
        "input": digest,
        "model": model.fingerprint.hex(),
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
        **{name: _plain(value) for name, value in sorted(fields.items())},
    }
    # The engine's options are checked before the file is touched.
    given = {**fields, **engine_options(args)}
    BatchSampler(model, tokenizer, (), given)
    with SampleFile(args.output, made_from, overwrite=args.overwrite) as file:
        sampler = BatchSampler(model, tokenizer, _read_jobs(args.input), given, file.is_done)
        if len(file):
            print(f"{args.output} has {len(file):,} samples already", file=sys.stderr)
        try:
            _sample(sampler, file, lines)
        except KeyboardInterrupt:
            print(
                f"interrupted; {args.output} has {len(file):,} samples, and the same command goes "
                "on from there",
                file=sys.stderr,
            )
            return 130
        file.finish()
        print(f"{lines:,} prompts, {_counted(file)} in {args.output}", file=sys.stderr)
        return 1 if file.errors else 0


def _sample(sampler: BatchSampler, file: SampleFile, lines: int) -> None:
    """Bring samples to the file as they finish, with a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(total=lines, unit="prompt", disable=None, dynamic_ncols=True) as bar:
        begin = shown = time.perf_counter()
        for samples in sampler:
            file.write(samples)
            for sample in samples:
                if sample.error is not None:
                    bar.write(_complaint(sample), file=sys.stderr)
            now = time.perf_counter()
            if now - shown >= REFRESH:
                shown = now
                speed = sampler.tokens / (now - begin)
                bar.set_postfix_str(f"{speed:,.0f} tokens/s, {sampler.pool_figures}", refresh=False)
                bar.update(sampler.jobs_done - bar.n)
        bar.update(sampler.jobs_done - bar.n)


def _complaint(sample: BatchSample) -> str:
    which = "" if sample.sample is None else f", sample {sample.sample}"
    return f"line {sample.number}{which}: {sample.error}"


def _counted(file: SampleFile) -> str:
    good = len(file) - file.errors
    return f"{good:,} samples" + (f" and {file.errors:,} errors" if file.errors else "")


def _measure(path: Path) -> tuple[int, str]:
    """Lines that are not blank, and a digest of the whole."""
    digest, lines = hashlib.sha256(), 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            lines += bool(line.strip())
    return lines, digest.hexdigest()


def _read_jobs(path: Path) -> Iterator[Job]:
    """The lines of the input, as they are needed."""
    from mlx_paged.jobs import Job, read_job

    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except ValueError as error:
                yield Job(number, error=ValueError(f"the line is not JSON: {error}"))
                continue
            if isinstance(item, dict):
                yield read_job(number, item)
            else:
                yield Job(
                    number, error=ValueError(f"the line must be a JSON object, got {item!r:.40}")
                )


def _plain(value: Any) -> Any:
    """As JSON has it, for comparison."""
    if isinstance(value, dict):
        return {str(key): repr(item) for key, item in sorted(value.items())}
    return value
