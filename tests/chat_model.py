"""A random Qwen2 with a byte-level chat tokenizer, in a folder as it would be published."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_paged.loader import load
from tests.models import config, random_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folder(folder: Path, *, window: int = 512, chat: bool = True) -> None:
    """Fill a folder with config, weights and tokenizer; the end token is never likely."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    if chat:
        named["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    cfg = config(vocab=len(alphabet) + len(SPECIAL), window=window)
    _, theirs = random_model(cfg)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(theirs.parameters())))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "hidden_size": cfg.hidden_size,
                "num_hidden_layers": cfg.num_hidden_layers,
                "intermediate_size": cfg.intermediate_size,
                "num_attention_heads": cfg.num_attention_heads,
                "num_key_value_heads": cfg.num_key_value_heads,
                "rms_norm_eps": cfg.rms_norm_eps,
                "vocab_size": cfg.vocab_size,
                "max_position_embeddings": window,
                "rope_theta": cfg.rope_theta,
                "tie_word_embeddings": True,
                "eos_token_id": 258,
            }
        )
    )


@functools.cache
def folder() -> Path:
    """Such a folder, for the life of the process."""
    holder = tempfile.TemporaryDirectory(prefix="mlx_paged_test_")
    _HOLDERS.append(holder)
    write_folder(Path(holder.name))
    return Path(holder.name)


_HOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def ours() -> tuple[Any, Any]:
    """Our model and tokenizer of the folder."""
    return load(folder())


@functools.cache
def theirs() -> tuple[Any, Any]:
    """mlx-lm's model and tokenizer of the same folder."""
    import mlx_lm

    return mlx_lm.load(str(folder()))[:2]
