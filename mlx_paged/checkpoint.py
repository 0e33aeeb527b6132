"""A checkpoint folder, read and checked before any weight is loaded. No MLX here.

A folder holds config.json and one or many safetensors files. Everything that can be wrong with
them, but for the values themselves, shows in the files' headers.

Source: the safetensors format (8 bytes of length, a JSON header, the tensors' bytes), and the
index file of Hugging Face transformers.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_paged.models.config import Packing, Qwen2Config

INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
# Bytes of a value, by safetensors' names.
DTYPE_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file: its size in bytes, its raw header, and the tensors in it by name."""

    path: Path
    size: int
    header: bytes
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> "WeightFile":
        """Read and check the header of one file.

        Raises:
            ValueError: naming the file, when it is truncated or not a safetensors file.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(
                    f"{path}: not a safetensors file, or truncated: {size} bytes cannot hold "
                    f"the header of {max(length, 0)} bytes that they announce"
                )
            header = file.read(length)
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            tensors = {name: _tensor(name, path, entry) for name, entry in entries.items()}
            spans = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: corrupt safetensors header: {error!r}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: corrupt safetensors header: {error}") from error
        end = 0
        for begin, next_end in spans:
            if begin != end:
                raise ValueError(f"{path}: corrupt safetensors header: a gap at byte {end}")
            end = next_end
        if 8 + length + end != size:
            raise ValueError(
                f"{path}: truncated or corrupt: the file has {size} bytes, its header describes "
                f"{8 + length + end}"
            )
        return cls(path=path, size=size, header=header, tensors=tensors)

    @property
    def identity(self) -> str:
        """What tells these bytes from others under the same header, without reading them.

        In the Hugging Face cache a file is a link to a blob named by its content's hash;
        elsewhere the time of the last change has to do.
        """
        target = self.path.resolve()
        return target.name if target.parent.name == "blobs" else str(target.stat().st_mtime_ns)


def _tensor(name: str, path: Path, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"] if len(entry["data_offsets"]) == 2 else (-1, -1)
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError(f"{path}: corrupt safetensors header: {name} is {dict(entry)}")
    if dtype not in DTYPE_SIZES:
        raise ValueError(
            f"{path}: {name} is of dtype {dtype}; it must be one of {', '.join(FLOATS)}, "
            "or packed by MLX"
        )
    if end - begin != math.prod(shape) * DTYPE_SIZES[dtype]:
        raise ValueError(
            f"{path}: corrupt safetensors header: {name} of shape {shape} and dtype {dtype} "
            f"has {end - begin} bytes instead of {math.prod(shape) * DTYPE_SIZES[dtype]}"
        )
    return StoredTensor(name=name, file=path, dtype=dtype, shape=shape)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that has been found in order: what is in it is what the model needs.

    Attributes:
        folder: where it lies.
        config: the model's configuration, with the end tokens of generation_config.json.
        files: the weight files.
        packings: by module path, how each quantized module is packed.
        dropped: tensors that the files hold and the model does not need.
    """

    folder: Path
    config: Qwen2Config
    files: tuple[WeightFile, ...]
    packings: Mapping[str, Packing]
    dropped: frozenset[str]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read config.json and the headers of all weight files, and hold one against the other.

        Raises:
            FileNotFoundError: when config.json, the weights or a file of the index is missing.
            ValueError: naming file and key or tensor, when one is not what it must be.
        """
        try:
            config = Qwen2Config.from_dict(read_config(folder))
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        files = tuple(WeightFile.open(path) for path in weight_paths(folder))
        stored: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in file.tensors.items():
                if name in stored:
                    raise ValueError(f"{name} is in both {stored[name].file} and {file.path}")
                stored[name] = tensor
        dropped = frozenset(name for name in stored if _is_redundant(name, config))
        packings = _check(folder, config, {n: t for n, t in stored.items() if n not in dropped})
        return cls(folder=folder, config=config, files=files, packings=packings, dropped=dropped)

    def fingerprint(self, dtype: str | None) -> bytes:
        """32 bytes that differ whenever the keys and values that the model computes may differ.

        SHA-256 of the configuration (with the quantization), the dtype that floating weights are
        converted to (None: as stored), and of each weight file its name, size, header and
        identity (see `WeightFile.identity`). The weights themselves are not read: a file that is
        changed in place, keeping size and time of change, is not noticed.
        """
        described = {
            "config": asdict(self.config),
            "dtype": dtype,
            "files": [
                [f.path.name, f.size, hashlib.sha256(f.header).hexdigest(), f.identity]
                for f in self.files
            ],
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with eos_token_id from generation_config.json where that has one (as mlx-lm)."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; it must be a checkpoint's folder")
    config = _read_object(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        eos = _read_object(folder / "generation_config.json").get("eos_token_id")
        if eos is not None:
            config["eos_token_id"] = eos
    return config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}; it must hold a JSON object")
    return value


def weight_paths(folder: Path) -> list[Path]:
    """The files that the index names or, without an index, every model*.safetensors."""
    index = folder / INDEX
    if not index.is_file():
        paths = sorted(folder.glob("model*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder} has no model*.safetensors; these are the weights")
        return paths
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index}: weight_map is {names!r}; it must map tensors to files")
    for tensor, name in names.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ValueError(f"{index}: {tensor} is in {name!r}; it must be a file's name")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{index}: {tensor} is in {name}, which is not in {folder}")
    return [folder / name for name in sorted(set(names.values()))]


def _is_redundant(name: str, config: Qwen2Config) -> bool:
    """Rotary frequencies follow from rope_theta; a tied model's head is its embedding."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return config.tie_word_embeddings and name.startswith("lm_head.")


def _expected(
    config: Qwen2Config, stored: Mapping[str, StoredTensor], packings: dict[str, Packing]
) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Name, shape and dtypes of every tensor that must be there; fills `packings` on the way.

    A matrix is quantized if its scales are stored, as in mlx-lm.
    """
    quantization = config.quantization
    for name, shape in config.parameter_shapes():
        path = name.removesuffix(".weight")
        packing = quantization.packing(path) if quantization and len(shape) == 2 else None
        named = quantization is not None and quantization.modules.get(path) is not None
        if packing is None or not (f"{path}.scales" in stored or named):
            yield name, shape, FLOATS
            continue
        rows, columns = shape
        if columns % packing.group_size:
            raise ValueError(
                f"config: quantization group_size is {packing.group_size}; it must divide the "
                f"{columns} columns of {name}"
            )
        packings[path] = packing
        affine = packing.mode == "affine"
        groups = (rows, columns // packing.group_size)
        yield name, (rows, columns * packing.bits // 32), ("U32",)
        yield f"{path}.scales", groups, FLOATS if affine else ("U8",)
        if affine:
            yield f"{path}.biases", groups, FLOATS


def _check(
    folder: Path, config: Qwen2Config, stored: Mapping[str, StoredTensor]
) -> dict[str, Packing]:
    packings: dict[str, Packing] = {}
    expected = set()
    for name, shape, dtypes in _expected(config, stored, packings):
        tensor = stored.get(name)
        if tensor is None:
            raise ValueError(
                f"{folder}: no weight file holds {name}; by config.json it must be there, "
                f"of shape {shape}"
            )
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.file}: {name} is of shape {tensor.shape}; by config.json it must be "
                f"of shape {shape}"
            )
        if tensor.dtype not in dtypes:
            raise ValueError(
                f"{tensor.file}: {name} is of dtype {tensor.dtype}; it must be of "
                f"dtype {' or '.join(dtypes)}"
            )
        expected.add(name)
    for name, tensor in stored.items():
        if name not in expected:
            raise ValueError(
                f"{tensor.file}: {name} (shape {tensor.shape}, dtype {tensor.dtype}) is "
                "unexpected: by config.json the model has no such tensor"
            )
    return packings
