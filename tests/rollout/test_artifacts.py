"""Policy folders: written whole or not at all; everything an engine would load wrongly is refused."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout import artifacts
from rollout.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_tensors
from rollout.artifacts import Artifacts, PolicyExists, PolicyInvalid
from rollout.records import Fingerprint, PolicyKind, PolicyManifest
from tests.fixtures.rows import manifest

ALLOWED = ["q_proj", "k_proj", "v_proj", "o_proj"]
MAX_RANK = 16
LAYERS = 2


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A file in the format, from (type, shape, bytes) by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def zeros(*shape: int) -> tuple[str, list[int], bytes]:
    count = 1
    for n in shape:
        count *= n
    return "F32", list(shape), array("f", [0.25] * count).tobytes()


def adapter_tensors(modules: list[str], rank: int = 4) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = zeros(rank, 8)
            tensors[f"{name}.lora_B.weight"] = zeros(8, rank)
    return tensors


CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["v_proj", "q_proj"],
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "use_dora": False,
}


def publish(
    root: Path,
    made: PolicyManifest,
    config: dict[str, Any] = CONFIG,
    tensors: dict[str, tuple[str, list[int], bytes]] | None = None,
) -> Path:
    """An adapter folder, by the way that the learner takes."""
    content = safetensors(adapter_tensors(["q_proj", "v_proj"]) if tensors is None else tensors)

    def write(folder: Path) -> None:
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
        (folder / ADAPTER_WEIGHTS).write_bytes(content)
        fingerprint = Fingerprint(policy=made.id, parent="p000000", prompts=[])
        (folder / artifacts.FINGERPRINT).write_bytes(msgspec.json.encode(fingerprint))

    return Artifacts(root).write_policy(made, write)


def verify(path: Path) -> PolicyManifest:
    return artifacts.verify_policy(path, "base-1", ALLOWED, MAX_RANK)


def test_a_published_adapter_passes_and_lists_its_files(tmp_path: Path) -> None:
    path = publish(tmp_path, manifest("p000002"))
    assert path == tmp_path / "policies" / "p000002"
    sealed = verify(path)
    assert sorted(sealed.files) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS, artifacts.FINGERPRINT]
    assert sealed == artifacts.read_manifest(path)
    assert sealed.files[ADAPTER_CONFIG] == artifacts.sha256_of(path / ADAPTER_CONFIG)
    assert [p.name for p in path.parent.iterdir()] == ["p000002"]


def test_the_header_reader_agrees_with_the_library(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    made = {"a": np.zeros((3, 4), np.float32), "b": np.ones((2,), np.float16), "c": np.zeros((0, 5), np.int8)}
    numpy.save_file(made, tmp_path / "x.safetensors")
    tensors = check_tensors(tmp_path / "x.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"a": [3, 4], "b": [2], "c": [0, 5]}


def test_a_policy_is_never_overwritten(tmp_path: Path) -> None:
    path = publish(tmp_path, manifest("p000002"))
    with pytest.raises(PolicyExists):
        publish(tmp_path, manifest("p000002", step=2))
    assert verify(path).step == 1


def test_a_writer_that_raises_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Artifacts(tmp_path).write_policy(manifest("p000002"), write)
    assert list((tmp_path / "policies").iterdir()) == []


def test_two_writers_of_one_id_leave_one_whole_policy(tmp_path: Path) -> None:
    meeting = threading.Barrier(2, timeout=30)
    results: list[object] = []

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "x.safetensors").write_bytes(safetensors({"w": zeros(2)}))
        meeting.wait()

    def run() -> None:
        try:
            results.append(Artifacts(tmp_path).write_policy(manifest("p000002", kind=PolicyKind.FULL), write))
        except PolicyExists as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(isinstance(result, PolicyExists) for result in results) == [False, True]
    verify(tmp_path / "policies" / "p000002")
    assert len(list((tmp_path / "policies").iterdir())) == 1


def flip_a_byte(path: Path) -> None:
    weights = path / ADAPTER_WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def resign(path: Path, **fields: Any) -> None:
    """Write the manifest anew with right digests, as a careless tool would."""
    sealed = artifacts.read_manifest(path)
    files = {name: artifacts.sha256_of(path / name) for name in sealed.files if (path / name).is_file()}
    changed = msgspec.structs.replace(sealed, **{"files": files, **fields})
    (path / artifacts.MANIFEST).write_bytes(msgspec.json.encode(changed))


def cut(path: Path, keep: int) -> None:
    weights = path / ADAPTER_WEIGHTS
    weights.write_bytes(weights.read_bytes()[:keep])
    resign(path)


def replace(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    resign(path)


def link_outside(path: Path) -> None:
    outside = path.parent / "weights"
    shutil.move(path / ADAPTER_WEIGHTS, outside)
    (path / ADAPTER_WEIGHTS).symlink_to(outside)


def huge_header(path: Path) -> None:
    replace(path, ADAPTER_WEIGHTS, struct.pack("<Q", 2**60) + b"{}")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "manifest.json is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda p: (p / "manifest.json").write_text('{"id": "p00'), "not a manifest"),
    "a manifest of something else": (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest"),
    "no weights": (lambda p: (p / ADAPTER_WEIGHTS).unlink(), "adapter_model.safetensors is missing"),
    "weights cut, digest kept": (lambda p: (p / ADAPTER_WEIGHTS).write_bytes(b"x"), "sha256"),
    "one bit": (flip_a_byte, "sha256"),
    "a file too many": (lambda p: (p / "new_embeddings.bin").write_text("x"), "not in the manifest"),
    "a link outside": (link_outside, "points outside"),
    "a name outside": (lambda p: resign(p, files={"../../x": "0"}), "points outside"),
    "no header": (lambda p: cut(p, 4), "no whole header"),
    "half a header": (lambda p: cut(p, 100), "no whole header"),
    "half the data": (lambda p: cut(p, -64), "its header says"),
    "an impossible header": (huge_header, "no whole header"),
    "a header that is no JSON": (
        lambda p: replace(p, ADAPTER_WEIGHTS, struct.pack("<Q", 4) + b"{{{{"),
        "not safetensors",
    ),
    "a header that is no object": (
        lambda p: replace(p, ADAPTER_WEIGHTS, struct.pack("<Q", 2) + b"[]"),
        "not safetensors",
    ),
    "weights unlisted": (lambda p: resign(p, files={}), "missing from the manifest|not in the manifest"),
    "another base": (lambda p: resign(p, base="base-2"), "made for base base-2"),
    "modules not served": (lambda p: resign(p, target_modules=["q_proj", "gate"]), "do not serve.*gate"),
    "rank too high": (lambda p: resign(p, rank=32), "rank 32"),
    "rank of the config": (lambda p: resign(p, rank=8), "config says rank 4"),
    "a fingerprint of another": (
        lambda p: replace(
            p,
            artifacts.FINGERPRINT,
            msgspec.json.encode(Fingerprint(policy="p000009", parent="p000000", prompts=[])),
        ),
        "is of p000009",
    ),
    "half a fingerprint": (lambda p: replace(p, artifacts.FINGERPRINT, b'{"policy'), "not a fingerprint"),
    "a config that is no JSON": (lambda p: replace(p, ADAPTER_CONFIG, b"{"), "not JSON"),
    "not LoRA": (lambda p: replace(p, ADAPTER_CONFIG, b'{"peft_type": "IA3"}'), "not describe a LoRA"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGE[name]
    path = publish(tmp_path, manifest("p000002"))
    damage(path)
    with pytest.raises(PolicyInvalid, match=reason):
        verify(path)


@pytest.mark.parametrize(
    "option",
    [
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"use_dora": True},
        {"bias": "all"},
        {"target_parameters": ["experts.w"]},
    ],
)
def test_options_that_engines_ignore_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    path = publish(tmp_path, manifest("p000002"), config=CONFIG | option)
    with pytest.raises(PolicyInvalid, match="would ignore " + next(iter(option))):
        verify(path)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["q_proj", "v_proj", "o_proj"], None])
def test_the_config_names_the_modules_of_the_manifest(tmp_path: Path, targets: Any) -> None:
    path = publish(tmp_path, manifest("p000002"), config=CONFIG | {"target_modules": targets})
    with pytest.raises(PolicyInvalid, match="config targets"):
        verify(path)


LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": zeros(4, 8)}, "would ignore tensor"),
        ({f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": zeros(8)}, "would ignore tensor"),
        ({f"{LAYER}.mlp.gate.lora_A.weight": zeros(4, 8)}, "of no target module"),
        ({f"{LAYER}.self_attn.q_proj.lora_A.weight": None}, "has only lora_B"),
        ({f"{LAYER}.self_attn.q_proj.lora_A.weight": zeros(8, 4)}, "has shape"),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": ("F32", [8, 4], b"\0" * 124)}, "does not fit"),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": ("X9", [8, 4], b"\0" * 128)}, "unknown type"),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": ("I32", [8, 4], b"\0" * 128)}, "no adapters in I32"),
        (
            {
                f"{LAYER}.self_attn.q_proj.lora_B.weight": (
                    "F32",
                    [8, 4],
                    struct.pack("<32f", *[float("nan")] * 32),
                )
            },
            "not finite",
        ),
        (
            {f"{LAYER}.self_attn.q_proj.lora_B.weight": ("BF16", [8, 4], b"\0\0" * 31 + b"\x80\x7f")},
            "not finite",
        ),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": ("F16", [8, 4], b"\x00\x7c" * 32)}, "not finite"),
    ],
)
def test_tensors_that_engines_would_not_apply_are_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    tensors = adapter_tensors(["q_proj", "v_proj"]) | change
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path = publish(tmp_path, manifest("p000002"), tensors=present)
    with pytest.raises(PolicyInvalid, match=reason):
        verify(path)


def test_a_target_without_tensors_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, manifest("p000002"), tensors=adapter_tensors(["q_proj"]))
    with pytest.raises(PolicyInvalid, match="no tensors for v_proj"):
        verify(path)


def test_sixteen_bit_adapters_pass(tmp_path: Path) -> None:
    tensors = {
        name: ("BF16", shape, content[: len(content) // 2])
        for name, (_, shape, content) in adapter_tensors(["q_proj", "v_proj"]).items()
    }
    verify(publish(tmp_path, manifest("p000002"), tensors=tensors))


def test_a_full_policy_is_checked_too(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(safetensors({"w": zeros(2, 3)}))

    full = manifest("p000003", kind=PolicyKind.FULL, base="itself")
    path = Artifacts(tmp_path).write_policy(full, write)
    assert verify(path).kind is PolicyKind.FULL
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-4])
    resign(path)
    with pytest.raises(PolicyInvalid, match="its header says"):
        verify(path)


ENDLESS = """
import sys
from pathlib import Path
from rollout.artifacts import Artifacts
from tests.fixtures.rows import manifest
from tests.rollout.test_artifacts import publish
n = 0
while True:
    publish(Path(sys.argv[1]), manifest(f"p{n:06d}"))
    print(n, flush=True)
    n += 1
"""


def test_a_killed_writer_leaves_only_whole_policies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 20:
                child.kill()
                break
    policies = tmp_path / "policies"
    visible = sorted(path for path in policies.iterdir() if not path.name.startswith("."))
    assert len(visible) >= 21
    for path in visible:
        verify(path)
    Artifacts(tmp_path).sweep()
    assert sorted(policies.iterdir()) == visible


def test_removal_leaves_no_half_folder(tmp_path: Path) -> None:
    publish(tmp_path, manifest("p000002"))
    Artifacts(tmp_path).remove_policy("p000002")
    assert list((tmp_path / "policies").iterdir()) == []
