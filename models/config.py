"""What a Qwen2 or Qwen2.5 checkpoint says about itself in config.json.

Source of the keys: the Qwen2 configuration of Hugging Face transformers, releases 4 and 5, and
the `quantization` entry that MLX checkpoints add.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# What mx.quantize can pack, by mode: (group sizes, bits). Affine's 1 bit is left out: nothing is
# published in it.
QUANTIZATION_MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((32, 64, 128), (2, 3, 4, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}


def _wrong(key: str, value: object, right: str) -> ValueError:
    return ValueError(f"config: {key} is {value!r}; it must be {right}")


def _integer(d: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = d.get(key, default)
    if key not in d and default is None:
        raise ValueError(f"config: {key} is missing; it must be a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(key, value, "a positive integer")
    return value


def _number(d: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = d.get(key, default)
    if key not in d and default is None:
        raise ValueError(f"config: {key} is missing; it must be a positive number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(key, value, "a positive number")
    if not math.isfinite(value) or value <= 0:
        raise _wrong(key, value, "a positive number")
    return float(value)


def _boolean(d: Mapping[str, Any], key: str, default: bool) -> bool:
    value = d.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


@dataclass(frozen=True)
class Packing:
    """How one matrix is packed: groups of `group_size` values along a row, `bits` bits each."""

    group_size: int
    bits: int
    mode: str = "affine"

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], key: str) -> "Packing":
        """Read a packing; `key` says where it stands in config.json, for the error messages."""
        mode = d.get("mode", "affine")
        if not isinstance(mode, str) or mode not in QUANTIZATION_MODES:
            raise _wrong(f"{key}.mode", mode, f"one of {', '.join(QUANTIZATION_MODES)}")
        for name, allowed in zip(("group_size", "bits"), QUANTIZATION_MODES[mode], strict=True):
            value = d.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
                right = " or ".join(map(str, allowed))
                raise _wrong(f"{key}.{name}", value, f"{right} in mode {mode!r}")
        return cls(group_size=d["group_size"], bits=d["bits"], mode=mode)


@dataclass(frozen=True)
class Quantization:
    """The packing of a quantized checkpoint's matrices.

    Attributes:
        default: the packing of every quantized module that `modules` does not name.
        modules: by module path (`model.layers.0.mlp.down_proj`) its own packing, or None where
            the module is stored as it is. Not to be changed.
    """

    default: Packing
    modules: Mapping[str, Packing | None] = field(default_factory=dict, hash=False)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "Quantization":
        """Read the `quantization` of config.json: sizes, and an entry per module that differs."""
        default = Packing.from_dict(d, "quantization")
        modules: dict[str, Packing | None] = {}
        for path, own in d.items():
            if isinstance(own, Mapping):
                modules[path] = Packing.from_dict(own, f"quantization.{path}")
            elif isinstance(own, bool):
                modules[path] = default if own else None
        return cls(default=default, modules=modules)

    def packing(self, path: str) -> Packing | None:
        """The packing of the module at `path`, were it quantized; None: it is stored as it is."""
        return self.modules.get(path, self.default)


@dataclass(frozen=True)
class Qwen2Config:
    """A Qwen2 model: sizes, constants, and how its matrices are packed."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    quantization: Quantization | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        """Values per attention head."""
        return self.hidden_size // self.num_attention_heads

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise _wrong(
                "num_attention_heads",
                self.num_attention_heads,
                f"a divisor of hidden_size {self.hidden_size}",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise _wrong(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"a divisor of num_attention_heads {self.num_attention_heads}",
            )
        if self.head_dim % 2:
            raise ValueError(
                f"config: hidden_size {self.hidden_size} over num_attention_heads "
                f"{self.num_attention_heads} is a head dim of {self.head_dim}; it must be even, "
                "as rotary embeddings turn pairs of values"
            )

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "Qwen2Config":
        """Read a parsed config.json. Keys that do not concern the model are ignored.

        Raises:
            ValueError: naming key, value and what would be right, for a model that is not a
                Qwen2, that asks for something not implemented, or whose sizes make no sense.
        """
        if d.get("model_type") != "qwen2":
            raise _wrong("model_type", d.get("model_type"), "'qwen2'")
        if d.get("hidden_act", "silu") != "silu":
            raise _wrong("hidden_act", d["hidden_act"], "'silu'")
        if d.get("quantize_activations"):
            raise _wrong("quantize_activations", d["quantize_activations"], "false or absent")
        config = cls(
            hidden_size=_integer(d, "hidden_size"),
            num_hidden_layers=_integer(d, "num_hidden_layers"),
            intermediate_size=_integer(d, "intermediate_size"),
            num_attention_heads=_integer(d, "num_attention_heads"),
            num_key_value_heads=_integer(d, "num_key_value_heads"),
            rms_norm_eps=_number(d, "rms_norm_eps"),
            vocab_size=_integer(d, "vocab_size"),
            max_position_embeddings=_integer(d, "max_position_embeddings", 32768),
            rope_theta=_rope_theta(d),
            tie_word_embeddings=_boolean(d, "tie_word_embeddings", True),
            quantization=_quantization(d),
            eos_token_ids=_eos_token_ids(d),
        )
        # A head dim of its own would change the projections' shapes; readers of Qwen2 disagree on
        # whether it counts, so only the one that both readings give is taken.
        if d.get("head_dim") not in (None, config.head_dim):
            right = f"hidden_size // num_attention_heads = {config.head_dim}, or absent"
            raise _wrong("head_dim", d["head_dim"], right)
        _refuse_sliding_window(d, config.num_hidden_layers)
        return config

    def parameter_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every parameter of the unquantized model, in the model's order."""
        hidden, inner = self.hidden_size, self.intermediate_size
        kv = self.num_key_value_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for i in range(self.num_hidden_layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (hidden,)
            for name, size in ("q_proj", hidden), ("k_proj", kv), ("v_proj", kv):
                yield f"{layer}.self_attn.{name}.weight", (size, hidden)
                yield f"{layer}.self_attn.{name}.bias", (size,)
            yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
            yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
            yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)


def _rope_theta(d: Mapping[str, Any]) -> float:
    """The base of the rotary embedding: transformers 5 writes it within `rope_parameters`."""
    if d.get("rope_traditional"):
        raise _wrong("rope_traditional", d["rope_traditional"], "false or absent")
    theta = _number(d, "rope_theta", 1e6)
    for key in "rope_scaling", "rope_parameters":
        rope = d.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise _wrong(key, rope, "null or an object")
        kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
        if any(kind != "default" for kind in kinds) or rope.get("factor", 1) != 1:
            raise _wrong(
                key, dict(rope), "null or of rope_type 'default': rope scaling is not implemented"
            )
        if rope.get("partial_rotary_factor", 1) != 1:
            raise _wrong(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1")
        if "rope_theta" in rope:
            theta = _number(rope, "rope_theta")
    return theta


def _refuse_sliding_window(d: Mapping[str, Any], layers: int) -> None:
    kinds = d.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise _wrong("layer_types", kinds, f"a list of {layers} (num_hidden_layers) names")
        for i, kind in enumerate(kinds):
            if kind != "full_attention":
                raise _wrong(
                    f"layer_types[{i}]",
                    kind,
                    "'full_attention': sliding-window layers are not implemented",
                )
    elif _boolean(d, "use_sliding_window", False) and d.get("sliding_window", 4096) is not None:
        full = d.get("max_window_layers", 28)
        if isinstance(full, bool) or not isinstance(full, int) or full < layers:
            raise _wrong(
                "use_sliding_window",
                True,
                f"false, or max_window_layers ({full}) at least num_hidden_layers ({layers}): "
                "sliding-window layers are not implemented",
            )


def _quantization(d: Mapping[str, Any]) -> Quantization | None:
    for key in "quantization", "quantization_config":
        value = d.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise _wrong(key, value, "null or an object")
        if "quant_method" in value:
            raise _wrong(
                f"{key}.quant_method",
                value["quant_method"],
                "absent: only MLX's own quantization (group_size, bits, mode) is read",
            )
        return Quantization.from_dict(value)
    return None


def _eos_token_ids(d: Mapping[str, Any]) -> tuple[int, ...]:
    value = d.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise _wrong("eos_token_id", value, "a token id or a list of token ids")
    return tuple(ids)
