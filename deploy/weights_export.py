"""A version as a Hugging Face model directory: its weights in one safetensors file, all else from policy.model.

Published weights are bit patterns, and so they are written: what loads the directory has the engines' bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..schemas.dtypes import Dtype
from ..schemas.errors import ConfigError

WEIGHTS_FILE = "model.safetensors"
_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.index.json",
)
"""Not copied from the model's directory."""
_TORCH_NAMES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32"}


def export_model(
    bits: Mapping[str, np.ndarray],
    dtypes: Mapping[str, Dtype],
    model: Path,
    target: Path,
    *,
    version: int,
    weights_hash: int,
) -> int:
    """Write the directory `target`, which must not be there yet, all or nothing; bytes of its weights.

    `bits`: tensor name -> bit patterns in the tensor's shape. `model`: the directory the policy began with, which
    has its configuration and its tokenizer. Raises ConfigError where the two do not belong together.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already: give a folder that is not, or is empty")
    extra = _check_fits(bits, model)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    part.mkdir(parents=True)
    try:
        for path in sorted(p for p in model.iterdir() if not any(p.match(w) for w in _WEIGHTS)):
            if path.is_dir():
                shutil.copytree(path, part / path.name, ignore=shutil.ignore_patterns(*_WEIGHTS))
            else:
                shutil.copyfile(path, part / path.name)
        _write_config(part / "config.json", dtypes)
        about = {
            "format": "pt",
            "headrace_version": str(version),
            "headrace_weights_hash": f"{weights_hash:016x}",
        }
        with (part / WEIGHTS_FILE).open("wb") as file:
            size = _write_weights(file, bits, dtypes, extra, about)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return size


def _check_fits(bits: Mapping[str, np.ndarray], model: Path) -> dict[str, Any]:
    """Buffers of the model that are no weights and are saved with them: name -> tensor of its own files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"policy.model = {str(model)!r} has no usable config.json: {e}") from None
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(p.shape) for name, p in made.named_parameters()}
    given = {name: array.shape for name, array in bits.items()}
    if expected != given:
        name = min(expected.items() ^ given.items())[0]
        raise ConfigError(
            f"the weights are not those of the model in {model}: {name} is {list(given.get(name, ())) or 'not there'}, "
            f"the model says {list(expected.get(name, ())) or 'there is none'}. Set policy.model to the directory that "
            "this policy was started with"
        )
    parameters = {name for name, _ in made.named_parameters(remove_duplicate=False)}
    return _buffers(model, set(made.state_dict()) - parameters)


def _buffers(model: Path, names: set[str]) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for path in sorted(model.glob("*.safetensors")) if names else ():
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in names & set(file.keys())}
    if names - found.keys():
        lost = ", ".join(sorted(names - found.keys())[:5])
        raise ConfigError(
            f"the model in {model} has no tensor {lost} in its safetensors files, and the policy has none"
        )
    return found


def _write_config(path: Path, dtypes: Mapping[str, Dtype]) -> None:
    """The configuration says how the weights are stored, which are not always as those the policy began with."""
    config = json.loads(path.read_text())
    formats = {_TORCH_NAMES[d] for d in dtypes.values()}
    if len(formats) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = formats.pop()
        path.write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(
    file: IO[bytes],
    bits: Mapping[str, np.ndarray],
    dtypes: Mapping[str, Dtype],
    extra: Mapping[str, Any],
    about: Mapping[str, str],
) -> int:
    """A safetensors file, tensor by tensor; its bytes."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    at = 0
    for name, dtype, shape, size in _entries(bits, dtypes, extra):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    for name in sorted(bits):
        array = np.ascontiguousarray(bits[name])
        file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8))  # type: ignore[call-overload]
    for name in sorted(extra):
        file.write(_raw(extra[name]))
    return 8 + len(head) + at


def _entries(
    bits: Mapping[str, np.ndarray], dtypes: Mapping[str, Dtype], extra: Mapping[str, Any]
) -> Iterator[tuple[str, str, list[int], int]]:
    for name, array in sorted(bits.items()):
        yield name, dtypes[name].safetensors, list(array.shape), array.nbytes
    for name, tensor in sorted(extra.items()):
        yield name, _SAFETENSORS[str(tensor.dtype)], list(tensor.shape), len(_raw(tensor))


_SAFETENSORS = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float64": "F64",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def _raw(tensor: Any) -> bytes:
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())
