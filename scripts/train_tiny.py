"""Train the bundled checkpoint `tiny`: tokenizer, weights and configuration, from nothing.

The text is made by `scripts.tiny_text`; nothing is downloaded. The model is mlx-lm's Qwen2, so the
folder that comes out loads with `mlx_lm.load` as well as with `mlx_paged.load`. The same arguments
on the same machine give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from scripts.tiny_text import (
    SYSTEM,
    Passage,
    chat_passage,
    chat_text,
    held_out_questions,
    plain_passage,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 1024
# Group size 2 with 2 key/value heads of 64, as small as the Metal kernel's head sizes allow.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
# A default system message, then every message between <|im_start|> and <|im_end|>.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\n" + SYSTEM + "<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# How Qwen2's tokenizer cuts text before its merges: transformers puts this on every tokenizer of a
# model of that type, whatever its file says.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

TOKENS_PER_STEP = 2048
# (share of the steps, lengths of rows to draw from): short contexts first.
STAGES = ((0.3, (96,)), (0.3, (96, 160)), (0.2, (96, 256)), (0.2, (128, 256, 448)))
# 3 from the object of a fact to its subject, 6 from where an answer begins to the question's end.
LOOK_BACK = (1, 2, 3, 6)
ANSWER_WEIGHT = 1.0
OTHER_WEIGHT, OTHER_SHARE = 0.4, 0.25


def make_passage(rng: random.Random, length: int) -> Passage:
    """A passage of about `length` tokens: few facts and many questions, or the other way round."""
    if rng.random() < 0.25:
        return plain_passage(rng, rng.randint(2, max(3, length // 24)), length // 7)
    facts = rng.randint(2, min(20, length // 16))
    return chat_passage(rng, facts, max(1, round((length - 11 - 7 * facts) / 19)))


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE with `VOCAB` entries; any text can be encoded and comes back unchanged."""
    rng = random.Random(f"tokenizer {seed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The special tokens are not learned: line ends stand in for them.
    texts = (make_passage(rng, 256).text for _ in range(4000))
    tokenizer.train_from_iterator((re.sub(r"<\|\w+\|>", "\n", t) for t in texts), trainer)
    return tokenizer


class Batch(NamedTuple):
    """Rows of a step and the targets that count in its loss."""

    ids: mx.array  # [rows, length]
    places: mx.array  # [targets], indices into the flattened ids
    targets: mx.array  # [targets], the id that comes next there
    weights: mx.array  # [targets]


def make_batch(rng: random.Random, tokenizer: Tokenizer, rows: int, length: int) -> Batch:
    """New passages as a batch: all their answer tokens count, and a sample of the others.

    What follows from the text teaches; most of the rest cannot be known in advance, and leaving it
    out saves time.
    """
    passages = [make_passage(rng, length) for _ in range(rows)]
    ids = np.zeros((rows, length + 1), np.int32)
    weights = np.zeros((rows, length + 1), np.float32)
    sample = np.random.default_rng(rng.getrandbits(64)).random((rows, length + 1))
    encoded = tokenizer.encode_batch([p.text for p in passages], add_special_tokens=False)
    for row, (passage, encoding) in enumerate(zip(passages, encoded, strict=True)):
        end = min(length + 1, len(encoding.ids))
        ids[row, :end] = encoding.ids[:end]
        starts = np.array([start for start, _ in encoding.offsets[:end]])
        weights[row, :end] = OTHER_WEIGHT * (sample[row, :end] < OTHER_SHARE)
        for first, last in passage.answers:
            weights[row, :end][(starts >= first) & (starts < last)] = ANSWER_WEIGHT
    targets, counts = ids[:, 1:].ravel(), weights[:, 1:].ravel()
    places = np.flatnonzero(counts).astype(np.int32)
    return Batch(
        mx.array(ids[:, :-1]),
        mx.array(places),
        mx.array(targets[places]),
        mx.array(counts[places]),
    )


def loss_of(model: qwen2.Model, batch: Batch) -> mx.array:
    """The weighted mean cross entropy of the batch's targets."""
    hidden = model.model(batch.ids)
    chosen = hidden.reshape(-1, hidden.shape[-1])[batch.places]
    losses = nn.losses.cross_entropy(model.model.embed_tokens.as_linear(chosen), batch.targets)
    return (losses * batch.weights).sum() / batch.weights.sum()


def start_weights(model: qwen2.Model, seed: int) -> None:
    """Start the two layers as induction heads, so that the training need not find them by chance.

    The first layer's heads look `LOOK_BACK` tokens back and copy what is there into the residual
    stream, each into its own 64 directions. The second layer's compare such copies: two find where
    the last words were said before and copy what came next; two find the word that stood 6 or 3
    tokens back and copy what stands 3 before it, the subject of a fact. All of it is then trained.
    Found by gradients alone, this takes most of a training (Olsson et al. 2022, "In-context
    Learning and Induction Heads").
    """
    rng = np.random.default_rng(seed)
    width, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    size = width // heads
    angles = CONFIG["rope_theta"] ** (-np.arange(size // 2) / (size // 2))
    reader = _orthogonal(rng, width)[:size]  # what a copy keeps of a token: [size, width]
    writers = np.split(_orthogonal(rng, width), heads, axis=1)  # a head's directions: [width, size]

    # Constant queries and keys give a score that depends on the distance alone (RoPE turns them);
    # the fastest angles tell neighbours apart.
    first, second = (layer.self_attn for layer in model.layers)
    sizes = np.where(np.arange(size // 2) < 8, 6.0, 0.0)
    looks = [
        np.concatenate([sizes * np.cos(back * angles), -sizes * np.sin(back * angles)])
        for back in LOOK_BACK
    ]
    first.q_proj.bias = _array(np.concatenate(looks))
    first.k_proj.bias = _array(np.tile(np.concatenate([sizes, 0 * sizes]), heads // 2))
    first.v_proj.weight = _array(np.tile(reader, (heads // 2, 1)))
    first.o_proj.weight = _array(np.concatenate(writers, axis=1) * 0.1)

    # Comparisons use the slowest angles only, which hardly turn over the length of a prompt.
    slow = np.tile(np.arange(size // 2) >= size // 5, 2)[:, None]
    compare = [slow * rng.normal(0, size**-0.5, (size, size)) for _ in range(3)]
    here, one, two, three, six = reader, *(writer.T for writer in writers)
    now, before, earlier = compare
    queries = [
        now @ here * 2 + before @ one + earlier @ two,
        now @ here * 2,
        now @ six,
        now @ three,
    ]
    keys = [now @ one + before @ two + earlier @ three, now @ here * 2]
    second.q_proj.weight = _array(np.concatenate(queries))
    second.k_proj.weight = _array(np.concatenate(keys))
    second.v_proj.weight = _array(np.concatenate([here, three]))
    second.o_proj.weight = _array(np.tile(reader.T, heads) * 0.1)
    for layer in model.layers:
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.2


def _orthogonal(rng: np.random.Generator, width: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(width, width)))[0]


def _array(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.float32))


def draw_length(rng: random.Random, progress: float) -> int:
    """The row length of a step at `progress`, from 0 to 1, through the training."""
    for share, lengths in STAGES:
        if progress < share:
            return rng.choice(lengths)
        progress -= share
    return rng.choice(STAGES[-1][1])


def examine(model: nn.Module, tokenizer: Tokenizer, count: int, seed: int) -> float:
    """The share of `count` held-out questions answered exactly, by greedy choice.

    One forward pass over question and answer shows it: greedy decoding gives the answer exactly if
    the answer's tokens, given the ones before, are the most likely ones.
    """
    right = 0
    for messages, answer in held_out_questions(count, seed):
        prompt = tokenizer.encode(chat_text(messages, answer_next=True)).ids
        ids = mx.array(prompt + tokenizer.encode(answer + "<|im_end|>").ids)
        best = model(ids[None, :-1])[0, len(prompt) - 1 :].argmax(-1)
        right += bool((best == ids[len(prompt) :]).all().item())
    return right / max(count, 1)


def train(
    model: qwen2.Model, tokenizer: Tokenizer, steps: int, rate: float, seed: int, folder: Path
) -> None:
    """Train in place and save now and then; Ctrl-C ends it early, with the model as it is then."""
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(0.0, rate, max(1, steps // 20)),
            optim.cosine_decay(rate, steps - steps // 20, rate / 50),
        ],
        [max(1, steps // 20)],
    )
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.01)
    gradient = nn.value_and_grad(model, loss_of)
    rng = random.Random(f"text {seed}")
    mean, score = 0.0, 0.0
    bar = tqdm(range(steps), unit="step", mininterval=1.0)
    try:
        for step in bar:
            length = draw_length(rng, step / steps)
            batch = make_batch(rng, tokenizer, max(1, TOKENS_PER_STEP // length), length)
            loss, grads = gradient(model, batch)
            grads, _ = optim.clip_grad_norm(grads, 1.0)
            optimizer.update(model, grads)
            mx.eval(loss, model.parameters(), optimizer.state)
            mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
            if (step + 1) % 250 == 0:
                score = examine(model, tokenizer, 50, seed + 1)
                save(model, tokenizer, folder)
            bar.set_postfix(loss=f"{mean:.3f}", held_out=f"{score:.0%}")
    except KeyboardInterrupt:
        tqdm.write("Stopped; saving what there is.")


def save(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint's files; an existing folder gets each of them replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    generation_config = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_tiny",
        description="Train the bundled checkpoint `tiny` from nothing: a Qwen2.5-architecture "
        "model of 0.9 million parameters that answers questions about small facts in its prompt. "
        "Ctrl-C stops early and saves.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("models/tiny"),
        metavar="FOLDER",
        help="where the checkpoint goes (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2400,
        help=f"training steps of {TOKENS_PER_STEP} tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", type=float, default=1.5e-3, help="highest learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of text and first weights (default: %(default)s)"
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=200,
        help="held-out questions to ask at the end (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; it must be at least 1")
    if not 0 < args.rate < 1:
        parser.error(f"--rate is {args.rate}; it must be between 0 and 1")
    if args.questions < 1:
        parser.error(f"--questions is {args.questions}; it must be at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    mx.random.seed(args.seed)
    tokenizer = train_tokenizer(args.seed)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(CONFIG))
    start_weights(model, args.seed)
    mx.eval(model.parameters())
    start = time.perf_counter()
    train(model, tokenizer, args.steps, args.rate, args.seed, args.out)
    seconds = time.perf_counter() - start
    save(model, tokenizer, args.out)
    score = examine(model, tokenizer, args.questions, args.seed)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(
        f"{args.out}: {score:.1%} of {args.questions} held-out questions, "
        f"{size:,} bytes, {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
