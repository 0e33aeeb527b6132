"""models.config: every size's config.json parses, and what is not implemented is refused."""

import subprocess
import sys
from typing import Any

import pytest

from mlx_paged.models.config import Packing, Qwen2Config

# name: hidden, layers, heads, kv heads, intermediate, vocab, tied, parameters in all
SIZES = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True, 494_032_768),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True, 1_543_714_304),
    "3B": (2048, 36, 16, 2, 11008, 151936, True, 3_085_938_688),
    "7B": (3584, 28, 28, 4, 18944, 152064, False, 7_615_616_512),
    "14B": (5120, 48, 40, 8, 13824, 152064, False, 14_770_033_664),
    "32B": (5120, 64, 40, 8, 27648, 152064, False, 32_763_876_352),
    "72B": (8192, 80, 64, 8, 29568, 152064, False, 72_706_203_648),
}


def published(size: str = "0.5B", /, **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 4 wrote it for the published checkpoints."""
    hidden, layers, heads, kv_heads, inner, vocab, tied, _ = SIZES[size]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    } | changes


def transformers5(**changes: Any) -> dict[str, Any]:
    """The same as transformers 5 writes it."""
    config = published()
    for key in "rope_theta", "torch_dtype":
        del config[key]
    return (
        config
        | {
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 24,
            "pad_token_id": None,
            "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
            "sliding_window": None,
        }
        | changes
    )


@pytest.mark.parametrize("size", SIZES)
def test_every_size_parses(size: str) -> None:
    config = Qwen2Config.from_dict(published(size))
    hidden, layers, heads, kv_heads, *_, tied, parameters = SIZES[size]
    assert (config.hidden_size, config.num_hidden_layers) == (hidden, layers)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert config.head_dim == (64 if size == "0.5B" else 128)
    assert config.tie_word_embeddings is tied
    assert config.rope_theta == 1e6
    assert config.eos_token_ids == (151645,)
    assert config.quantization is None
    total = 0
    for _, shape in config.parameter_shapes():
        total += shape[0] * (shape[1] if len(shape) == 2 else 1)
    assert total == parameters


def test_transformers_5_spelling() -> None:
    config = Qwen2Config.from_dict(transformers5())
    assert config.rope_theta == 5000.0
    assert config.head_dim == 64


def test_rope_parameters_win_over_rope_theta() -> None:
    assert Qwen2Config.from_dict(transformers5(rope_theta=1.0)).rope_theta == 5000.0


def test_absent_keys_take_their_defaults() -> None:
    d = published()
    for key in "max_position_embeddings", "rope_theta", "tie_word_embeddings", "eos_token_id":
        del d[key]
    config = Qwen2Config.from_dict(d)
    assert config.max_position_embeddings == 32768
    assert config.rope_theta == 1e6
    assert config.tie_word_embeddings is True
    assert config.eos_token_ids == ()


def test_unknown_keys_are_ignored() -> None:
    assert Qwen2Config.from_dict(published(use_mrope=False)) == Qwen2Config.from_dict(published())


@pytest.mark.parametrize(
    "accepted",
    [
        {"head_dim": 64},
        {"head_dim": None},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"use_sliding_window": True, "max_window_layers": 24},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
        {"eos_token_id": [151645, 151643]},
        {"eos_token_id": None},
        {"quantization": None},
    ],
)
def test_accepted(accepted: dict[str, Any]) -> None:
    Qwen2Config.from_dict(published(**accepted))


REFUSED: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "qwen2_moe"},
    {"model_type": None},
    {"hidden_act": "gelu"},
    {"use_sliding_window": True, "max_window_layers": 20},
    {"use_sliding_window": "yes"},
    {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]},
    {"layer_types": ["full_attention"] * 23},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"factor": 2.0}},
    {"rope_scaling": "yarn"},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}},
    {"rope_parameters": {"rope_type": ["yarn"]}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_traditional": True},
    {"rope_theta": float("nan")},
    {"rope_theta": "1e6"},
    {"rms_norm_eps": 0},
    {"rms_norm_eps": None},
    {"hidden_size": 0},
    {"hidden_size": -896},
    {"hidden_size": 896.0},
    {"hidden_size": "896"},
    {"hidden_size": True},
    {"hidden_size": None},
    {"vocab_size": 0},
    {"max_position_embeddings": 0},
    {"num_key_value_heads": None},
    {"num_attention_heads": 15},
    {"num_key_value_heads": 3},
    {"head_dim": 128},
    {"tie_word_embeddings": 1},
    {"eos_token_id": "<|im_end|>"},
    {"eos_token_id": [-1]},
    {"quantize_activations": True},
    {"quantization": 4},
    {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
]


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_refused_naming_key_and_value(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it must be") as error:
        Qwen2Config.from_dict(published(**change))
    key = next(iter(change))
    assert key in str(error.value)


def test_rope_theta_within_rope_parameters_is_checked() -> None:
    with pytest.raises(ValueError, match="rope_theta is 0; it must be a positive number"):
        Qwen2Config.from_dict(transformers5(rope_parameters={"rope_theta": 0}))


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
    ],
)
def test_missing_key_is_named(key: str) -> None:
    d = published()
    del d[key]
    with pytest.raises(ValueError, match=key):
        Qwen2Config.from_dict(d)


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="head dim of 9; it must be even"):
        Qwen2Config.from_dict(
            published(hidden_size=36, num_attention_heads=4, num_key_value_heads=2)
        )


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_quantization(key: str) -> None:
    entry = {
        "group_size": 64,
        "bits": 4,
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 6},
        "model.embed_tokens": False,
        "model.layers.1.mlp.down_proj": True,
    }
    quantization = Qwen2Config.from_dict(published() | {key: entry}).quantization
    assert quantization is not None
    assert quantization.default == Packing(group_size=64, bits=4, mode="affine")
    assert quantization.packing("model.layers.5.mlp.up_proj") == quantization.default
    assert quantization.packing("model.layers.1.mlp.down_proj") == quantization.default
    assert quantization.packing("model.layers.0.mlp.down_proj") == Packing(32, 6)
    assert quantization.packing("model.embed_tokens") is None


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"group_size": 64}, "quantization.bits"),
        ({"bits": 4}, "quantization.group_size"),
        ({"group_size": 64, "bits": 7}, "quantization.bits"),
        ({"group_size": 64, "bits": True}, "quantization.bits"),
        ({"group_size": 48, "bits": 4}, "quantization.group_size"),
        ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, "quantization.group_size"),
        ({"group_size": 32, "bits": 4, "mode": "nf4"}, "quantization.mode"),
        ({"group_size": 64, "bits": 4, "lm_head": {"bits": 8}}, "quantization.lm_head.group_size"),
    ],
)
def test_quantization_refused(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Qwen2Config.from_dict(published(quantization=entry))


def test_config_is_hashable_and_equal_by_value() -> None:
    quantized = published(quantization={"group_size": 64, "bits": 4})
    assert Qwen2Config.from_dict(quantized) == Qwen2Config.from_dict(dict(quantized))
    assert len({Qwen2Config.from_dict(quantized), Qwen2Config.from_dict(published())}) == 2


def test_reading_a_config_imports_no_mlx() -> None:
    code = "import sys, mlx_paged.models.config; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
