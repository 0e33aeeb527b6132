"""mlx_paged.loader and mlx_paged.checkpoint, on random small checkpoints made here."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_paged.checkpoint import Checkpoint, WeightFile
from mlx_paged.loader import TINY, find_folder, load, load_model

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
COMMIT, OLDER = "a" * 40, "b" * 40


def save(
    folder: Path, weights: dict[str, mx.array], config: dict[str, Any], files: int = 1
) -> None:
    """Write config.json and the weights, dealt out in turn to `files` files (with an index)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return
    weight_map: dict[str, str] = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[i::files]}
        mx.save_safetensors(str(folder / name), part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def random_weights(
    dtype: mx.Dtype = mx.float32, seed: int = 0, **changes: Any
) -> dict[str, mx.array]:
    """What a Qwen2 checkpoint of CONFIG holds, its names written out independently."""
    config = CONFIG | changes
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (hidden, hidden),
                "self_attn.q_proj.bias": (hidden,),
                "self_attn.k_proj.weight": (kv, hidden),
                "self_attn.k_proj.bias": (kv,),
                "self_attn.v_proj.weight": (kv, hidden),
                "self_attn.v_proj.bias": (kv,),
                "self_attn.o_proj.weight": (hidden, hidden),
                "mlp.gate_proj.weight": (inner, hidden),
                "mlp.up_proj.weight": (inner, hidden),
                "mlp.down_proj.weight": (hidden, inner),
            }.items()
        }
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {
        name: mx.random.normal(shape, key=key).astype(dtype)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


def quantized_weights(
    bits: int, group_size: int = 32, mode: str = "affine", skip: str = "norm"
) -> dict[str, mx.array]:
    """The same with every matrix packed, but those with `skip` in their name."""
    weights: dict[str, mx.array] = {}
    for name, array in random_weights(mx.float16).items():
        if array.ndim == 1 or skip in name:
            weights[name] = array
            continue
        packed = mx.quantize(array, group_size=group_size, bits=bits, mode=mode)
        path = name.removesuffix(".weight")
        for part, value in zip(("weight", "scales", "biases"), packed, strict=False):
            weights[f"{path}.{part}"] = value
    return weights


def assert_holds(model: Any, weights: dict[str, mx.array]) -> None:
    """The model's parameters are exactly these, dtypes included."""
    found: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(found[name], array), name


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and two special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"})
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint, without a tokenizer."""
    save(tmp_path / "model", random_weights(), CONFIG)
    return tmp_path / "model"


# What loads


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_arrive_as_stored(tmp_path: Path, dtype: mx.Dtype, files: int, tied: bool) -> None:
    weights = random_weights(dtype, tie_word_embeddings=tied)
    save(tmp_path, weights, CONFIG | {"tie_word_embeddings": tied}, files)
    assert_holds(load_model(Checkpoint.open(tmp_path)), weights)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_packed_weights_arrive_as_stored(tmp_path: Path, bits: int, key: str) -> None:
    weights = quantized_weights(bits)
    save(tmp_path, weights, CONFIG | {key: {"group_size": 32, "bits": bits}})
    assert_holds(load_model(Checkpoint.open(tmp_path)), weights)


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
)
def test_other_modes_of_packing(tmp_path: Path, mode: str, group_size: int, bits: int) -> None:
    weights = quantized_weights(bits, group_size, mode)
    quantization = {"group_size": group_size, "bits": bits, "mode": mode}
    save(tmp_path, weights, CONFIG | {"quantization": quantization})
    assert_holds(load_model(Checkpoint.open(tmp_path)), weights)


def test_packing_per_module(tmp_path: Path) -> None:
    weights = quantized_weights(4, skip="embed_tokens")  # no scales: stored as it is
    wide = quantized_weights(8)
    own = "model.layers.1.mlp.down_proj"
    weights |= {name: array for name, array in wide.items() if name.startswith(own)}
    quantization = {"group_size": 32, "bits": 4, own: {"group_size": 32, "bits": 8}}
    save(tmp_path, weights, CONFIG | {"quantization": quantization})
    model = load_model(Checkpoint.open(tmp_path))
    assert_holds(model, weights)
    assert model.model.layers[1].mlp.down_proj.bits == 8
    assert model.model.layers[0].mlp.down_proj.bits == 4


def test_mlx_lm_reads_and_writes_the_same(tmp_path: Path) -> None:
    from mlx_lm.models.qwen2 import Model, ModelArgs
    from mlx_lm.utils import load_model as mlx_lm_load_model
    from mlx_lm.utils import quantize_model, save_config, save_model

    theirs: Any = Model(ModelArgs.from_dict(CONFIG))

    def mixed(path: str, _: Any) -> bool | dict[str, Any]:
        return {"group_size": 32, "bits": 8} if "down_proj" in path else "k_proj" not in path

    theirs, config = quantize_model(theirs, CONFIG, 32, 4, quant_predicate=mixed)
    save_model(tmp_path, theirs)
    save_config(config, tmp_path / "config.json")
    ours = load_model(Checkpoint.open(tmp_path))
    assert_holds(ours, dict(tree_flatten(theirs.parameters())))
    assert_holds(ours, dict(tree_flatten(mlx_lm_load_model(tmp_path)[0].parameters())))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_dtype_converts_floating_weights(folder: Path, dtype: mx.Dtype) -> None:
    weights = {name: array.astype(dtype) for name, array in random_weights().items()}
    assert_holds(load_model(Checkpoint.open(folder), dtype=dtype), weights)


def test_dtype_leaves_packed_weights_alone(tmp_path: Path) -> None:
    weights = quantized_weights(4)
    save(tmp_path, weights, CONFIG | {"quantization": {"group_size": 32, "bits": 4}})
    wanted = {
        name: array if array.dtype == mx.uint32 else array.astype(mx.float32)
        for name, array in weights.items()
    }
    assert_holds(load_model(Checkpoint.open(tmp_path), dtype=mx.float32), wanted)


def test_redundant_tensors_are_dropped(tmp_path: Path) -> None:
    weights = random_weights()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros((8,)),
        "lm_head.weight": weights["model.embed_tokens.weight"],
    }
    save(tmp_path, weights | extra, CONFIG)
    assert_holds(load_model(Checkpoint.open(tmp_path)), weights)


def test_load_returns_model_and_tokenizer(folder: Path) -> None:
    make_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 3]}))
    model, tokenizer = load(folder, dtype="float16")
    assert model.config.eos_token_ids == (257, 3)
    assert tokenizer.eos_token_ids == {256, 257, 3}  # 256 is the tokenizer's own
    assert tokenizer.decode(tokenizer.encode("blocks é")) == "blocks é"
    assert model.model.norm.weight.dtype == mx.float16
    assert load(str(folder), {"eos_token": "<|im_end|>"}, lazy=True)[1].eos_token_id == 257


# What is refused, and by what name

Edit = Callable[[dict[str, mx.array]], object]
BAD_TENSORS: dict[str, tuple[Edit, str]] = {
    "missing": (
        lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
        r"no weight file holds model\.layers\.1\.mlp\.up_proj\.weight.*\(96, 64\)",
    ),
    "misshapen": (
        lambda w: w.update({"model.layers.0.self_attn.k_proj.weight": mx.zeros((64, 64))}),
        r"model\.safetensors: model\.layers\.0\.self_attn\.k_proj\.weight.*\(64, 64\).*\(32, 64\)",
    ),
    "transposed": (
        lambda w: w.update({"model.layers.0.mlp.up_proj.weight": mx.zeros((64, 96))}),
        r"up_proj\.weight.*\(64, 96\).*\(96, 64\)",
    ),
    "unexpected": (
        lambda w: w.update({"model.layers.2.input_layernorm.weight": mx.zeros((64,))}),
        r"model\.layers\.2\.input_layernorm\.weight.*unexpected",
    ),
    "unexpected bias": (
        lambda w: w.update({"model.layers.0.self_attn.o_proj.bias": mx.zeros((64,))}),
        r"o_proj\.bias.*unexpected",
    ),
    "integers": (
        lambda w: w.update({"model.norm.weight": mx.zeros((64,), mx.int32)}),
        r"model\.norm\.weight is of dtype I32; it must be of dtype F32 or F16 or BF16",
    ),
    "packed, undeclared": (
        lambda w: w.update(quantized_weights(4)),
        r"model\.embed_tokens\.weight is of shape \(288, 8\).*\(288, 64\)",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensor_is_named(tmp_path: Path, name: str) -> None:
    edit, message = BAD_TENSORS[name]
    weights = random_weights()
    edit(weights)
    save(tmp_path, weights, CONFIG)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"group_size": 32, "bits": 8}, r"embed_tokens\.weight.*\(288, 8\).*\(288, 16\)"),
        ({"group_size": 64, "bits": 4}, r"embed_tokens\.scales.*\(288, 2\).*\(288, 1\)"),
        ({"group_size": 128, "bits": 4}, r"group_size is 128.*divide the 64 columns"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, r"scales is of dtype F16.*U8"),
        ({"group_size": 32, "bits": 4, "model.embed_tokens": False}, r"\(288, 8\).*\(288, 64\)"),
    ],
)
def test_wrong_quantization_is_refused(
    tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    save(tmp_path, quantized_weights(4), CONFIG | {"quantization": quantization})
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_packed_weight_without_its_parts_is_refused(tmp_path: Path, part: str) -> None:
    weights = quantized_weights(4)
    del weights[f"model.layers.0.mlp.up_proj.{part}"]
    save(tmp_path, weights, CONFIG | {"quantization": {"group_size": 32, "bits": 4}})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\."):
        Checkpoint.open(tmp_path)


def test_config_and_weights_that_disagree_in_layers(tmp_path: Path) -> None:
    save(tmp_path, random_weights(), CONFIG | {"num_hidden_layers": 10**12})
    with pytest.raises(ValueError, match=r"model\.layers\.2\.input_layernorm"):
        Checkpoint.open(tmp_path)


def test_no_folder_no_config_no_weights_no_tokenizer(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match="there is no folder '~nobody-of-that-name/x'"):
        load("~nobody-of-that-name/x")
    with pytest.raises(TypeError, match="path_or_id must be a folder or a Hub id, got 5"):
        load(5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no tokenizer: neither"):
        load(folder)
    with pytest.raises(ValueError, match="is a file; it must be the folder"):
        load(folder / "config.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\*\.safetensors"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff\xfe"])
def test_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_config_error_names_the_folder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"model: config: model_type is 'llama'"):
        Checkpoint.open(folder)


def test_corrupt_tokenizer_names_the_folder(folder: Path) -> None:
    make_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(ValueError, match="model: the tokenizer cannot be read"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 4000, -1])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*truncated"):
        Checkpoint.open(folder)


def test_lengthened_file_is_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match="truncated or corrupt"):
        Checkpoint.open(folder)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xff",
        b"{]",
        b"[]",
        b'{"a": 1}',
        json.dumps({"a": ENTRY | {"shape": [3]}}).encode(),
        json.dumps({"a": ENTRY | {"shape": [-2]}}).encode(),
        json.dumps({"a": ENTRY | {"shape": ["2"]}}).encode(),
        json.dumps({"a": ENTRY | {"dtype": "F4"}}).encode(),
        json.dumps({"a": ENTRY | {"dtype": []}}).encode(),
        json.dumps({"a": ENTRY | {"data_offsets": [8, 16]}}).encode(),
        json.dumps({"a": ENTRY | {"data_offsets": [0]}}).encode(),
        json.dumps({"a": ENTRY, "b": ENTRY}).encode(),
        json.dumps({"a": {"dtype": "F32"}}).encode(),
    ],
    ids=repr,
)
def test_corrupt_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        WeightFile.open(path)


def test_index_is_held_to(tmp_path: Path) -> None:
    save(tmp_path, random_weights(), CONFIG, files=2)
    index = tmp_path / "model.safetensors.index.json"
    second = tmp_path / "model-00002-of-00002.safetensors"
    shutil.copy(second, tmp_path / "model-copy.safetensors")
    Checkpoint.open(tmp_path)  # a file that the index does not name is not looked at
    sound = json.loads(index.read_text())
    sound["weight_map"]["model.norm.weight"] = "model-copy.safetensors"
    index.write_text(json.dumps(sound))
    with pytest.raises(ValueError, match=r"is in both .*model-0000.* and .*model-copy"):
        Checkpoint.open(tmp_path)
    for name in "../model.safetensors", 3, "":
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match="it must be a file's name"):
            Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ValueError, match="weight_map"):
        Checkpoint.open(tmp_path)
    second.unlink()
    index.write_text(json.dumps({"weight_map": {"a": second.name}}))
    with pytest.raises(FileNotFoundError, match=r"index\.json: a is in model-00002-of-00002"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("dtype", ["float64", "int8", "F16", 16, mx.int32])
def test_dtype_is_checked_first(dtype: Any) -> None:
    with pytest.raises(ValueError, match="it must be None or one of float32"):
        load("no/such/folder", dtype=dtype)


def test_arguments_of_the_name_are_checked(folder: Path) -> None:
    for name in folder, "tiny":
        with pytest.raises(ValueError, match="revision is 'main'; it must be None"):
            find_folder(name, "main")
    for name in "", "one", "a/b/c", "./a", "../a", "a/b ":
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            load(name)
    with pytest.raises(TypeError, match="unexpected keyword"):
        load(folder, device="cpu")  # type: ignore[call-arg]


def test_tiny_is_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_folder("tiny") == TINY
    assert find_folder("./tiny").resolve() == (tmp_path / "tiny").resolve()


# The root of the prefix cache's hash chain


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    def fingerprint(name: str, dtype: mx.Dtype | None = None, **changes: Any) -> bytes:
        folder = tmp_path / name
        if not folder.exists():
            save(folder, random_weights(seed=len(name)), CONFIG | changes)
            os.utime(folder / "model.safetensors", ns=(len(name), len(name)))
        return load_model(Checkpoint.open(folder), dtype=dtype, lazy=True).fingerprint

    first = fingerprint("a")
    assert isinstance(first, bytes)
    assert len(first) == 32
    assert fingerprint("a") == first
    others = {
        fingerprint("bb"),  # same header and size, other weights
        fingerprint("a", mx.float16),
        fingerprint("a", mx.bfloat16),
        fingerprint("c", rope_theta=5e5),
        fingerprint("d", rms_norm_eps=1e-5),
    }
    assert len(others | {first}) == 6


# Ids on the Hugging Face Hub


def fill_cache(cache: Path) -> Path:
    """A cache as huggingface_hub lays it out: one repository, at two commits."""
    repository = cache / "models--some--qwen"
    for seed, commit in enumerate((COMMIT, OLDER)):
        made = cache / commit
        save(made, random_weights(seed=seed), CONFIG)
        make_tokenizer(made)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        for file in made.iterdir():
            blob = hashlib.sha256(file.read_bytes()).hexdigest()
            file.replace(repository / "blobs" / blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob)
        made.rmdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "v1").write_text(OLDER)
    return repository / "snapshots"


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return fill_cache(tmp_path)


@pytest.mark.parametrize(
    ("revision", "commit"),
    [(None, COMMIT), ("main", COMMIT), ("v1", OLDER), (OLDER, OLDER), (COMMIT, COMMIT)],
)
def test_cached_id_loads_offline(offline_cache: Path, revision: str | None, commit: str) -> None:
    assert find_folder("some/qwen", revision) == offline_cache / commit


def test_cached_id_loads_whole(offline_cache: Path) -> None:
    newer, tokenizer = load("some/qwen")
    assert_holds(newer, random_weights(seed=0))
    assert tokenizer.eos_token_ids == {256, 257}
    older, _ = load("some/qwen", revision="v1")
    assert_holds(older, random_weights(seed=1))
    assert newer.fingerprint != older.fingerprint
    assert load("some/qwen", revision=COMMIT, lazy=True)[0].fingerprint == newer.fingerprint


@pytest.mark.parametrize(
    ("name", "revision"), [("some/other", None), ("some/qwen", "v2"), ("some/qwen", "c" * 40)]
)
@pytest.mark.usefixtures("offline_cache")
def test_uncached_id_says_offline(name: str, revision: str | None) -> None:
    with pytest.raises(FileNotFoundError, match=r"offline \(.*not wholly, in the") as error:
        load(name, revision=revision)
    assert name in str(error.value)
    assert revision is None or revision in str(error.value)


def test_environment_of_the_hub_is_heeded(tmp_path: Path) -> None:
    snapshots = fill_cache(tmp_path / "hub")
    code = "from mlx_paged.loader import find_folder; print(find_folder('some/qwen'))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == str(snapshots / COMMIT), run.stderr
