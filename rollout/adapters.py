"""What may stand in an adapter folder: everything in it must be something that the engines apply.

Reads safetensors headers itself (8 bytes of length, JSON, data), so that checking a policy needs no torch.
Invariant: an adapter that passes names only modules that are served, with one complete pair of finite tensors
of the declared rank for each, and nothing besides.
"""

from __future__ import annotations

import json
import math
import re
import struct
from array import array
from pathlib import Path
from typing import Any

import msgspec

from rollout.records import PolicyManifest

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

MAX_HEADER = 100_000_000
"""Bytes; the format's own bound."""

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

EXPONENT_MASK = {"F16": 0x7C00, "BF16": 0x7F80}
"""All exponent bits set: an infinity or not a number."""

IGNORED_BY_ENGINES = {
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
}
"""Options of an adapter that training honours and the engines do not, with the values that mean "off"."""

TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class PolicyInvalid(Exception):
    """The folder must not be served; the message is the reason that the policy shows."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
    """Begin and end in the data section, which follows the header."""


def check_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; raises PolicyInvalid unless header and file fit exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise PolicyInvalid(f"{path.name} is truncated or not safetensors: no whole header")
        try:
            header = msgspec.convert(json.loads(file.read(length)), dict[str, Any])
            header.pop("__metadata__", None)
            tensors = msgspec.convert(header, dict[str, Tensor])
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise PolicyInvalid(f"{path.name}: the header is not safetensors: {error}") from None
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, stop = tensor.data_offsets
        if tensor.dtype not in DTYPE_BYTES:
            raise PolicyInvalid(f"{path.name}: {name} has unknown type {tensor.dtype}")
        if (
            min(tensor.shape, default=0) < 0
            or begin != end
            or stop - begin != math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        ):
            raise PolicyInvalid(f"{path.name}: {name} does not fit its place in the file")
        end = stop
    if 8 + length + end != size:
        raise PolicyInvalid(f"{path.name} has {size} bytes, its header says {8 + length + end}")
    return tensors


def check_adapter(
    path: Path, manifest: PolicyManifest, allowed_modules: frozenset[str], max_rank: int
) -> None:
    """Check config and tensors of an adapter folder against the manifest and against what is served."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if name not in manifest.files:
            raise PolicyInvalid(f"{path.name}: {name} is missing from the manifest")
    targets = set(manifest.target_modules)
    if not targets <= allowed_modules:
        refused = ", ".join(sorted(targets - allowed_modules))
        raise PolicyInvalid(f"{path.name}: the engines do not serve adapters on {refused}")
    if not 0 < manifest.rank <= max_rank:
        raise PolicyInvalid(f"{path.name}: rank {manifest.rank}, the engines serve up to {max_rank}")
    _check_config(path, manifest)
    weights = path / ADAPTER_WEIGHTS
    tensors = check_tensors(weights)
    _check_pairs(path, manifest, tensors)
    _check_finite(weights, tensors)


def _check_config(path: Path, manifest: PolicyManifest) -> None:
    try:
        config: Any = json.loads((path / ADAPTER_CONFIG).read_text())
    except ValueError as error:
        raise PolicyInvalid(f"{path.name}: {ADAPTER_CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise PolicyInvalid(f"{path.name}: {ADAPTER_CONFIG} does not describe a LoRA adapter")
    if config.get("r") != manifest.rank:
        raise PolicyInvalid(f"{path.name}: config says rank {config.get('r')}, manifest {manifest.rank}")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or set(targets) != set(manifest.target_modules):
        raise PolicyInvalid(f"{path.name}: config targets {targets}, manifest {manifest.target_modules}")
    for option, off in IGNORED_BY_ENGINES.items():
        if config.get(option) not in off:
            raise PolicyInvalid(f"{path.name}: the engines would ignore {option}={config[option]!r}")


def _check_pairs(path: Path, manifest: PolicyManifest, tensors: dict[str, Tensor]) -> None:
    """Each module has A [rank, in] and B [out, rank]; the modules are the declared targets, all of them."""
    sides: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            raise PolicyInvalid(f"{path.name}: the engines would ignore tensor {name}")
        module, side = match["module"], match["side"]
        if module.rsplit(".", 1)[-1] not in manifest.target_modules:
            raise PolicyInvalid(f"{path.name}: tensor {name} is of no target module")
        rank_axis = 0 if side == "A" else 1
        if len(tensor.shape) != 2 or tensor.shape[rank_axis] != manifest.rank:
            raise PolicyInvalid(f"{path.name}: {name} has shape {tensor.shape}, rank is {manifest.rank}")
        sides.setdefault(module, set()).add(side)
    for module, found in sides.items():
        if found != {"A", "B"}:
            raise PolicyInvalid(f"{path.name}: {module} has only lora_{found.pop()}")
    missing = set(manifest.target_modules) - {module.rsplit(".", 1)[-1] for module in sides}
    if missing:
        raise PolicyInvalid(f"{path.name}: no tensors for {', '.join(sorted(missing))}")


def _check_finite(weights: Path, tensors: dict[str, Tensor]) -> None:
    """One tensor that is not finite makes every answer of the policy nonsense, and no hash shows it."""
    data = weights.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        values = data[start + begin : start + end]
        if tensor.dtype == "F32":
            finite = math.isfinite(sum(array("f", values)))
        elif tensor.dtype in EXPONENT_MASK:
            mask = EXPONENT_MASK[tensor.dtype]
            finite = not any(bits & mask == mask for bits in array("H", values))
        else:
            raise PolicyInvalid(f"{weights.name}: the engines serve no adapters in {tensor.dtype}")
        if not finite:
            raise PolicyInvalid(f"{weights.name}: {name} holds values that are not finite")
