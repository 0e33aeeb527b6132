"""How much memory n samples and n beams of one prompt save by sharing blocks.

The experiment of the PagedAttention paper (Kwon et al. 2023, section 6.3): blocks saved, over the
blocks that n sequences would hold if each had its own, summed over every step of every request. A
request of p prompt and a answer tokens holds n sequences of p + t tokens at step t = 1 ... a.

  samples   share the prompt's full blocks and nothing else, so (n - 1) * floor(p / block size)
            blocks are saved at every step. Exact.
  beams     also share what they inherit from common ancestors. A block is stored as often as the
            beams of today have different ancestors at the time when it became full, so what is
            saved follows from the number of ancestors of n beams, k tokens ago. Two answers:

    random    every beam descends from any beam of the step before with equal probability. The
              expected number of ancestors is exact then (the Wright-Fisher model of genetics).
    measured  beam searches by the engine on --model, for --searches of the requests: their mean
              number of ancestors k tokens ago, applied to all requests. Beside it, "engine" is
              what the block tables of these searches save, on their few lengths.

How beams fork depends on the model and on what it is asked. The paper used OPT-13B, its own sample
of the data sets and OPT's tokenizer; the bundled model is tiny and was taught one thing, and its
searches do not end before the request's length. So beams are to be compared in size, not digit by
digit. "per request" is the mean over requests, in which short ones weigh as much as long ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlx_paged.block_pool import common_length
from scripts.data import Requests, add_data_arguments, load_requests
from scripts.formats import FloatArray, IntArray
from scripts.published import KWON_SHARING
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

if TYPE_CHECKING:
    from mlx_paged.engine import Engine
    from mlx_paged.request import Output
    from mlx_paged.scheduler import Schedule

WIDTHS = (2, 4, 6)
LONGEST_SEARCH = 256  # tokens


@dataclass(frozen=True)
class Saving:
    """Blocks saved and blocks without sharing, [requests], each summed over a request's steps."""

    saved: FloatArray
    total: IntArray

    @property
    def fraction(self) -> float:
        """Of all blocks of all steps."""
        return round(float(self.saved.sum() / self.total.sum()), 6)

    @property
    def per_request(self) -> float:
        """The mean of each request's fraction."""
        return round(float((self.saved / self.total).mean()), 6)


def blocks_held(requests: Requests, block_size: int) -> IntArray:
    """Blocks of one sequence of each request, summed over its steps."""

    def upto(tokens: IntArray) -> IntArray:
        full, rest = np.divmod(tokens, block_size)
        total: IntArray = block_size * full * (full + 1) // 2 + rest * (full + 1)
        return total

    return upto(requests.prompt + requests.answer) - upto(requests.prompt)


def samples(requests: Requests, n: int, block_size: int) -> Saving:
    """What n samples save, exactly."""
    saved = (n - 1) * (requests.prompt // block_size) * requests.answer
    return Saving(saved.astype(np.float64), n * blocks_held(requests, block_size))


def beams(requests: Requests, width: int, block_size: int, ancestors: FloatArray) -> Saving:
    """What `width` beams save, if k tokens ago they have `ancestors[k]` ancestors on average.

    `ancestors` begins with `width`; after its end it is taken to stay as it is.
    """
    prompt, answer = requests.prompt, requests.answer
    longest = int((prompt + answer).max())
    curve = np.concatenate([ancestors, np.full(longest, ancestors[-1])])[:longest]
    # A block that became full k steps ago is stored ancestors[k] times. [i] is what it saves in
    # the i + 1 steps from then on; then the same for it and all full ones after it.
    saves = np.cumsum(width - curve)
    for k in range(block_size, longest):
        saves[k] += saves[k - block_size]
    full = prompt // block_size
    blocks = (prompt + answer) // block_size - full  # that become full after the prompt
    oldest = (prompt + answer) % block_size + block_size * (blocks - 1)  # steps since the first
    saved = (width - 1.0) * full * answer + np.where(blocks > 0, saves[np.maximum(oldest, 0)], 0)
    return Saving(saved.astype(np.float64), width * blocks_held(requests, block_size))


def random_ancestors(width: int, steps: int) -> FloatArray:
    """[steps + 1] expected numbers of ancestors where every beam's parent is any beam."""
    # [m, j]: the probability that m beams have j parents, by one more beam at a time.
    parents = np.zeros((width + 1, width + 1))
    parents[0, 0] = 1
    taken = np.arange(width + 1) / width
    for m in range(width):
        parents[m + 1] = parents[m] * taken
        parents[m + 1, 1:] += (parents[m] * (1 - taken))[:-1]
    state = np.zeros(width + 1)
    state[width] = 1
    expected = []
    for _ in range(steps + 1):
        expected.append(state @ np.arange(width + 1))
        state = state @ parents
    return np.array(expected)


# Measured


@dataclass
class Measured:
    """What beam searches of one width have shown.

    Attributes:
        ancestors: [k] mean number of ancestors of the beams, k tokens ago.
        saved, total: blocks, over the steps of all searches.
    """

    ancestors: FloatArray
    saved: int
    total: int

    @property
    def fraction(self) -> float:
        """Of the blocks without sharing."""
        return round(self.saved / self.total, 6)


class Watcher:
    """An engine's observer and attention backend that counts blocks and ancestors of beams."""

    def __init__(self, prompts: Sequence[int], steps: int) -> None:
        from mlx_paged.kernels.paged_attention import ReferenceAttention

        self.saved = self.total = 0
        self._prompts = prompts  # tokens of each request's prompt
        self._sums = np.zeros(steps + 1)
        self._counts = np.zeros(steps + 1)
        self._blocks = (0, 0)
        watcher = self

        class Counting(ReferenceAttention):
            """Counts the blocks of every decode row."""

            compiles = False

            def plan(
                self,
                block_tables: NDArray[np.int32],
                context_lens: NDArray[np.int32],
                query_lens: NDArray[np.int32],
                *,
                block_size: int,
                num_kv_heads: int,
            ) -> Any:
                rows = np.flatnonzero(query_lens == 1)
                held = -(-context_lens[rows] // block_size)
                is_held = np.arange(block_tables.shape[1]) < held[:, None]
                total = int(held.sum())
                watcher._blocks = (total, total - len(np.unique(block_tables[rows][is_held])))
                return super().plan(
                    block_tables,
                    context_lens,
                    query_lens,
                    block_size=block_size,
                    num_kv_heads=num_kv_heads,
                )

        self.backend = Counting()

    @property
    def ancestors(self) -> FloatArray:
        """Mean numbers, as far as there are any."""
        seen = self._counts > 0
        return self._sums[seen] / self._counts[seen]

    def __call__(self, engine: Engine, schedule: Schedule, outputs: list[Output]) -> None:
        """At the end of a step."""
        # Where no table has changed no plan is made, and the blocks are those of the last one.
        total, saved = self._blocks
        self.total += total
        self.saved += saved
        found: dict[int, list[list[int]]] = {}
        for seq in engine.scheduler.running:
            found.setdefault(seq.age[0], []).append(seq.tokens)
        for request, texts in found.items():
            length = len(texts[0]) - self._prompts[request]
            if length > 0:
                self._count(sorted(text[self._prompts[request] :] for text in texts), length)

    def _count(self, answers: list[list[int]], length: int) -> None:
        """Different beginnings of the beams' answers are their ancestors."""
        counts = np.ones(length + 1)  # [g]: ancestors of g tokens
        for a, b in pairwise(answers):
            counts[common_length(a, b) + 1 :] += 1
        self._sums[: length + 1] += counts[::-1]
        self._counts[: length + 1] += 1


def measure(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[int],
    width: int,
    block_size: int = 16,
) -> Measured:
    """Run beam searches through the engine, all at once.

    Args:
        model: what `load` returned.
        prompts: token ids.
        answers: how many tokens each search makes; nothing ends it before.
    """
    from mlx_paged.beam import BeamParams
    from mlx_paged.engine import Engine

    watcher = Watcher([len(prompt) for prompt in prompts], max(answers))
    blocks = [
        width * -(-(len(prompt) + answer) // block_size)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    engine = Engine(
        model,
        block_size=block_size,
        num_blocks=sum(blocks) + sum(blocks) // 50 + 2,
        max_num_seqs=max(256, width * len(prompts)),
        max_batched_tokens=max(1024, width * len(prompts)),
        prefix_caching=False,
        backend=watcher.backend,
        observer=watcher,
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        engine.add_beam_search(
            list(prompt), BeamParams(width=width, max_tokens=answer, ignore_eos=True)
        )

    def steps() -> Any:
        while engine.has_work:
            yield engine.step()

    most = max(answers) + sum(map(len, prompts)) // 1024
    for _ in progress(steps(), f"{width} beams", most):
        pass
    return Measured(watcher.ancestors, watcher.saved, watcher.total)


def make_prompts(
    tokenizer: Any, lengths: Sequence[int], text: str | None, seed: int
) -> list[list[int]]:
    """Prompts of so many tokens, from places of a text, or of sentences like the bundled model's.

    Raises:
        ValueError: the text has no token.
    """
    rng = random.Random(seed)
    if text is None:
        people = ("Anna", "Tom", "Mia", "Paul", "Emma", "Leo", "Nina", "Max")
        cities = ("Oslo", "Rome", "Paris", "Bern", "Prague", "Madrid", "Vienna", "Lisbon")
        text = "\n".join(
            f"{rng.choice(people)} lives in {rng.choice(cities)}." for _ in range(2000)
        )
    ids = [
        token
        for line in text.splitlines(keepends=True)
        for token in tokenizer.encode(line, add_special_tokens=False)
    ]
    if not ids:
        raise ValueError("text is empty; it must have a token at least")
    ids *= 1 + max(lengths) // len(ids)
    starts = [rng.randrange(len(ids) - length + 1) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def share(
    requests: Requests,
    widths: Sequence[int] = WIDTHS,
    block_size: int = 16,
    measured: dict[int, Measured] | None = None,
) -> dict[str, Any]:
    """The savings of samples and beams, by their number; fractions rounded to six digits.

    Raises:
        ValueError: a width below 2, or a block size below 1.
    """
    if min(widths) < 2:
        raise ValueError(
            f"widths must be at least 2, got {min(widths)}: one sequence shares nothing"
        )
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    steps = int((requests.prompt + requests.answer).max())
    figures: dict[str, Any] = {}
    for n in widths:
        exact = samples(requests, n, block_size)
        expected = beams(requests, n, block_size, random_ancestors(n, steps))
        figures[str(n)] = {
            "samples": exact.fraction,
            "samples_per_request": exact.per_request,
            "beams_random": expected.fraction,
            "beams_random_per_request": expected.per_request,
        }
        if measured and n in measured:
            applied = beams(requests, n, block_size, measured[n].ancestors)
            figures[str(n)] |= {
                "beams_measured": applied.fraction,
                "beams_measured_per_request": applied.per_request,
                "beams_engine": measured[n].fraction,
                "ancestors": [round(float(x), 4) for x in measured[n].ancestors[:65]],
            }
    return figures


def measure_all(
    requests: Requests, args: Any, model: Any, tokenizer: Any, text: str | None
) -> dict[int, Measured]:
    """Beam searches over some of the requests, for every width."""
    rng = np.random.default_rng(args.seed)
    rows = rng.choice(len(requests), min(args.searches, len(requests)), replace=False)
    answers = np.minimum(requests.answer[rows], LONGEST_SEARCH)
    most = model.config.max_position_embeddings - LONGEST_SEARCH
    lengths = np.minimum(requests.prompt[rows], most)
    prompts = make_prompts(tokenizer, lengths.tolist(), text, args.seed)
    return {
        width: measure(model, prompts, answers.tolist(), width, args.block_size)
        for width in args.widths
    }


def table_rows(requests: Requests, figures: dict[str, Any]) -> list[list[Cell]]:
    """Ours, and beside it what was published for the same data set."""
    published = KWON_SHARING.get(requests.family or "", {})

    def percent(n: str, name: str) -> float | None:
        return 100 * figures[n][name] if name in figures[n] else None

    rows: list[list[Cell]] = []
    for label, name, kind in (
        ("samples", "samples", "samples"),
        ("beams, random", "beams_random", "beams"),
        ("beams, measured", "beams_measured", "beams"),
    ):
        for n in figures:
            if name in figures[n]:
                engine = percent(n, "beams_engine") if name == "beams_measured" else None
                rows.append(
                    [
                        f"{n} {label}",
                        percent(n, name),
                        percent(n, f"{name}_per_request"),
                        engine,
                        published.get(kind, {}).get(int(n)),
                    ]
                )
    return rows


def _plot(results: Sequence[tuple[Requests, dict[str, Any]]], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(results), figsize=(1 + 3.6 * len(results), 3.2), sharey=True, squeeze=False
    )
    for axis, (requests, figures) in zip(axes[0], results, strict=True):
        widths = [int(n) for n in figures]
        for name, label, style in (
            ("samples", "samples", "o-"),
            ("beams_random", "beams, random", "s-"),
            ("beams_measured", "beams, measured", "^-"),
        ):
            values = [figures[n].get(name) for n in figures]
            if None not in values:
                axis.plot(widths, [100 * value for value in values], style, label=label)
        axis.plot(widths, [100 * (n - 1) / n for n in widths], ":", color="#999999", label="most")
        published = KWON_SHARING.get(requests.family or "", {})
        for kind, points in published.items():
            axis.plot(*zip(*points.items(), strict=True), "kx", label="paper" * (kind == "samples"))
        axis.set(title=requests.name, xlabel="samples or beams", xticks=widths, ylim=(0, 90))
    axes[0][0].set_ylabel("blocks saved (%)")
    axes[0][0].legend(ncols=2, fontsize=7)
    save_figure(figure, path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "python -m scripts.share --data sharegpt alpaca --plot share")
    add_data_arguments(parser, default=("sharegpt", "alpaca"))
    parser.add_argument(
        "--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N", help="(2 4 6)"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="(16)")
    group = parser.add_argument_group("measured beams")
    group.add_argument(
        "--searches", type=int, default=16, metavar="N", help="beam searches; 0: none (16)"
    )
    group.add_argument(
        "--model", default="tiny", metavar="NAME", help="tiny, a folder or an id on the Hub (tiny)"
    )
    group.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="what prompts are cut from; by default sentences like those of the bundled model",
    )
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    if args.searches < 0:
        raise ValueError(f"searches is {args.searches}; it must be at least 0")
    text = None if args.text is None else args.text.read_text(encoding="utf-8")
    sources = [load_requests(s, args.requests, args.tokenizer, args.seed) for s in args.data]
    for requests in sources:
        share(requests, args.widths, args.block_size)  # complains before any model is loaded
    if args.searches:
        from mlx_paged.loader import load

        model, tokenizer = load(args.model)
    results = []
    for requests in sources:
        measured = None
        if args.searches:
            measured = measure_all(requests, args, model, tokenizer, text)
        figures = share(requests, args.widths, args.block_size, measured)
        results.append((requests, figures))
        what = f"; {args.searches} searches on {args.model}" if args.searches else ""
        print_table(
            f"{requests.name}: blocks saved by sharing, block size {args.block_size}, "
            f"{len(requests):,} requests{what}",
            ["", "saved %", "per request %", "engine %", "published %"],
            table_rows(requests, figures),
        )
    write_json(args.json, {requests.name: figures for requests, figures in results})
    if args.plot is not None:
        _plot(results, args.plot)
    return 0


if __name__ == "__main__":
    run(main)
