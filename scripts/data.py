"""Where the scripts' requests come from: how many tokens each prompt and each answer has.

`--data` of every script takes

  sharegpt, alpaca          5,000 requests of each, committed in scripts/data (the default)
  hub:sharegpt, hub:alpaca  the same data sets from the Hugging Face hub, at pinned revisions
  FILE                      lengths (CSV), an Azure or Mooncake trace, or conversations as JSON in
                            ShareGPT's or Alpaca's shape; any of them may be gzipped

Conversations are selected as vLLM's serving benchmark selects them: shuffled, counted with the
Qwen2.5 tokenizer, without a template; left out where prompt or answer has fewer than 4 tokens,
the prompt more than 1,024, or both together more than 2,048; the first 5,000 that remain. The
counts are kept in a cache folder ($MLX_PAGED_CACHE, by default ~/.cache/mlx_paged).

As a script: prints what a source holds, and writes its lengths as CSV.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.formats import (
    FloatArray,
    IntArray,
    Lengths,
    Pair,
    alpaca_pair,
    kind_of,
    read_lengths,
    read_pairs,
)
from scripts.report import (
    Cell,
    add_output_arguments,
    make_parser,
    print_table,
    progress,
    pyplot,
    run,
    save_figure,
    write_json,
)

FOLDER = Path(__file__).parent / "data"
COMMITTED = {"sharegpt": FOLDER / "sharegpt_5000.csv", "alpaca": FOLDER / "alpaca_5000.csv"}
DEFAULT_TOKENIZER = "Qwen/Qwen2.5-1.5B-Instruct"  # every Qwen2.5 model has the same
DEFAULT_REQUESTS = 5000
_PERCENTILES = [50, 90, 99, 100]

SHAREGPT_ID = "anon8231489123/ShareGPT_Vicuna_unfiltered"
SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
SHAREGPT_REVISION = "192ab2185289094fc556ec8ce5ce1e8e587154ca"
ALPACA_ID = "tatsu-lab/alpaca"
ALPACA_REVISION = "dce01c9b08f87459cf36a430d809084718273017"

Counter = Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True)
class Requests:
    """Requests of one source, each array [requests]; every prompt and answer has a token or more.

    Attributes:
        name: what to call them in a table.
        left_out: requests of the source without a prompt or an answer token.
        arrival: seconds after the first, where the source tells.
    """

    name: str
    prompt: IntArray
    answer: IntArray
    left_out: int = 0
    arrival: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def family(self) -> str | None:
        """The data set whose published figures belong beside: sharegpt, alpaca, or neither."""
        return next((name for name in COMMITTED if name in self.name.lower()), None)


def add_data_arguments(parser: argparse.ArgumentParser, default: Sequence[str] | None) -> None:
    """Add `--data`, `--requests`, `--tokenizer` and `--seed`.

    Args:
        default: the sources without `--data`; None if the script takes one source only.
    """
    group = parser.add_argument_group("data")
    if default is None:
        group.add_argument(
            "--data", metavar="SOURCE", default="sharegpt", help=f"{_SOURCES} (default: sharegpt)"
        )
    else:
        group.add_argument(
            "--data",
            metavar="SOURCE",
            nargs="+",
            default=list(default),
            help=f"{_SOURCES} (default: {' '.join(default)})",
        )
    group.add_argument(
        "--requests",
        metavar="N",
        type=int,
        help=f"take N requests, 0 for all (default: {DEFAULT_REQUESTS:,} of conversations, "
        "all of lengths and traces)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="ID_OR_FOLDER",
        default=DEFAULT_TOKENIZER,
        help="counts the tokens of conversations (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="of every random choice (default: %(default)s)"
    )


_SOURCES = "sharegpt, alpaca, hub:sharegpt, hub:alpaca or a file"


def load_requests(
    source: str,
    requests: int | None = None,
    tokenizer: str = DEFAULT_TOKENIZER,
    seed: int = 0,
) -> Requests:
    """Requests of a source, as the module's docstring describes them.

    Args:
        requests: how many; 0 is all; None is 5,000 of conversations and all of anything else.
        tokenizer: Hugging Face id or folder, read only where text is counted.
        seed: of the shuffle of conversations.

    Raises:
        ValueError: the source is unknown or broken, or holds no request.
        OSError: it cannot be read or fetched.
    """
    if requests is not None and requests < 0:
        raise ValueError(f"requests is {requests}; give 0 for all, or how many")
    if source in COMMITTED:
        lengths, name = read_lengths(COMMITTED[source], "lengths"), source
    elif source.startswith("hub:"):
        lengths, name = _from_hub(source, requests, tokenizer, seed), source
    else:
        path = Path(source)
        if not path.is_file():
            names = ", ".join([*COMMITTED, *(f"hub:{name}" for name in COMMITTED)])
            raise ValueError(f"data is {source!r}, which is no file and none of {names}")
        lengths, name = _from_file(path, requests, tokenizer, seed), path.name
    kept = (lengths.prompt > 0) & (lengths.answer > 0)
    rows = np.flatnonzero(kept)[: requests or None]
    if not len(rows):
        raise ValueError(f"{source}: no request with a prompt and an answer")
    arrival = None if lengths.arrival is None else lengths.arrival[rows]
    return Requests(
        name=name,
        prompt=lengths.prompt[rows],
        answer=lengths.answer[rows],
        left_out=int((~kept).sum()),
        arrival=arrival,
    )


def select(pairs: Sequence[Pair], count: Counter, requests: int, seed: int) -> Lengths:
    """Shuffle, count, filter; the first `requests` that remain, or all for 0.

    The filter is that of vLLM's serving benchmark; see the module's docstring.
    """
    order = list(range(len(pairs)))
    random.Random(seed).shuffle(order)
    found: list[tuple[int, int]] = []
    for start in progress(range(0, len(order), 512), "counting tokens"):
        chosen = [pairs[i] for i in order[start : start + 512]]
        prompts = count([prompt for prompt, _ in chosen])
        answers = count([answer for _, answer in chosen])
        found += [pair for pair in zip(prompts, answers, strict=True) if is_served(*pair)]
        if requests and len(found) >= requests:
            break
    rows = np.array(found[: requests or None], dtype=np.int64).reshape(-1, 2)
    return Lengths(rows[:, 0].copy(), rows[:, 1].copy())


def is_served(prompt: int, answer: int) -> bool:
    """vLLM's rule on the token counts of a request: neither too short nor too long."""
    return prompt >= 4 and answer >= 4 and prompt <= 1024 and prompt + answer <= 2048


def token_counter(tokenizer: str) -> Counter:
    """A function that counts the tokens of texts, nothing added to them.

    Raises:
        ValueError: a folder without tokenizer.json.
        OSError: an id that cannot be fetched.
    """
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(_tokenizer_file(tokenizer)))

    def count(texts: Sequence[str]) -> list[int]:
        encoded = loaded.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(one) for one in encoded]

    return count


def cache_folder() -> Path:
    """$MLX_PAGED_CACHE, else mlx_paged in the user's cache folder."""
    if folder := os.environ.get("MLX_PAGED_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_paged"


def write_lengths(path: Path, prompt: Iterable[int], answer: Iterable[int]) -> None:
    """Write a lengths CSV; whoever reads meanwhile sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{p},{a}\n" for p, a in zip(prompt, answer, strict=True)]
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    new.write_text("prompt_tokens,answer_tokens\n" + "".join(rows), encoding="ascii")
    new.replace(path)


def _from_file(path: Path, requests: int | None, tokenizer: str, seed: int) -> Lengths:
    kind = kind_of(path)
    if kind not in ("sharegpt", "alpaca"):
        return read_lengths(path, kind)
    with path.open("rb") as file:
        origin = hashlib.file_digest(file, "sha256").hexdigest()
    return _counted(origin, lambda: read_pairs(path, kind), requests, tokenizer, seed)


def _from_hub(source: str, requests: int | None, tokenizer: str, seed: int) -> Lengths:
    if source == "hub:sharegpt":
        origin, pairs = f"{SHAREGPT_ID}@{SHAREGPT_REVISION}", _hub_sharegpt
    elif source == "hub:alpaca":
        origin, pairs = f"{ALPACA_ID}@{ALPACA_REVISION}", _hub_alpaca
    else:
        raise ValueError(f"data is {source!r}; on the hub there are hub:sharegpt and hub:alpaca")
    return _counted(origin, pairs, requests, tokenizer, seed)


def _counted(
    origin: str,
    pairs: Callable[[], list[Pair]],
    requests: int | None,
    tokenizer: str,
    seed: int,
) -> Lengths:
    """`select`, kept in the cache under everything that its result depends on."""
    wanted = DEFAULT_REQUESTS if requests is None else requests
    parts = [origin, tokenizer, str(wanted), str(seed)]
    if Path(tokenizer).is_dir():
        parts[1] = hashlib.sha256(_tokenizer_file(tokenizer).read_bytes()).hexdigest()
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    cached = cache_folder() / "lengths" / f"{key}.csv"
    if not cached.is_file():
        lengths = select(pairs(), token_counter(tokenizer), wanted, seed)
        if not len(lengths):
            raise ValueError("no conversation of the data passes the filter")
        write_lengths(cached, lengths.prompt, lengths.answer)
    return read_lengths(cached, "lengths")


def _hub_sharegpt() -> list[Pair]:
    path = _hub_file(SHAREGPT_ID, SHAREGPT_FILE, repo_type="dataset", revision=SHAREGPT_REVISION)
    return read_pairs(path, "sharegpt")


def _hub_alpaca() -> list[Pair]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "hub:alpaca needs the package datasets: pip install 'mlx-paged[data]'"
        ) from error
    try:
        rows = load_dataset(ALPACA_ID, split="train", revision=ALPACA_REVISION)
    except Exception as error:  # its own, the hub's and the network's errors have no common base
        raise _unfetched(ALPACA_ID, error) from error
    return [alpaca_pair(row) for row in rows]


def _tokenizer_file(tokenizer: str) -> Path:
    folder = Path(tokenizer)
    if not folder.is_dir():
        return _hub_file(tokenizer, "tokenizer.json")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer {tokenizer!r} is a folder without a tokenizer.json")
    return folder / "tokenizer.json"


def _hub_file(
    repo: str, name: str, repo_type: str | None = None, revision: str | None = None
) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, repo_type=repo_type, revision=revision))
    except Exception as error:  # the hub's and the network's errors have no common base
        raise _unfetched(repo, error) from error


def _unfetched(repo: str, error: Exception) -> OSError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return OSError(f"cannot fetch {repo} from the hub ({reason}); name a local file instead")


def _plot(sources: Sequence[Requests], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for axis, what in zip(axes, ("prompt", "answer"), strict=True):
        for one in sources:
            values = np.sort(getattr(one, what))
            axis.plot(values, np.arange(1, len(one) + 1) / len(one) * 100, label=one.name)
        axis.set(xscale="log", xlabel=f"{what} length (tokens)")
    axes[0].set_ylabel("requests at most so long (%)")
    axes[0].legend()
    save_figure(figure, path)
    plt.close(figure)


def summary(requests: Requests) -> dict[str, object]:
    """Counts, means and percentiles (50, 90, 99, 100) of the lengths, in tokens."""
    return {
        "requests": len(requests),
        "left_out": requests.left_out,
        "prompt_mean": round(float(requests.prompt.mean()), 4),
        "answer_mean": round(float(requests.answer.mean()), 4),
        "prompt_p50_p90_p99_max": np.percentile(requests.prompt, _PERCENTILES).tolist(),
        "answer_p50_p90_p99_max": np.percentile(requests.answer, _PERCENTILES).tolist(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__,
        "python -m scripts.data --data ShareGPT.json --tokenizer Qwen2.5-1.5B --csv out.csv",
    )
    add_data_arguments(parser, default=("sharegpt", "alpaca"))
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the lengths of one source")
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    if args.csv is not None and len(args.data) != 1:
        raise ValueError(f"--csv writes one source, but --data names {len(args.data)}")
    sources = [
        load_requests(source, args.requests, args.tokenizer, args.seed) for source in args.data
    ]
    rows: list[list[Cell]] = []
    for one in sources:
        for what in ("prompt", "answer"):
            values: IntArray = getattr(one, what)
            percentiles = [int(value) for value in np.percentile(values, _PERCENTILES)]
            rows.append([one.name, what, len(one), float(values.mean()), *percentiles])
        if one.left_out:
            print(f"{one.name}: {one.left_out} requests without tokens left out", file=sys.stderr)
    header = ["data", "", "requests", "mean", "median", "90th", "99th", "longest"]
    print_table("Lengths in tokens", header, rows)
    if args.csv is not None:
        write_lengths(args.csv, sources[0].prompt.tolist(), sources[0].answer.tolist())
    write_json(args.json, {one.name: summary(one) for one in sources})
    if args.plot is not None:
        _plot(sources, args.plot)
    return 0


if __name__ == "__main__":
    run(main)
