"""Policy folders: written whole or not at all, and checked before anybody loads them.

Invariants: a folder under `policies/` without a leading dot is complete and on disk (every file fsynced
before the rename, the parent after it) and is never changed; `verify_policy` refuses whatever an engine would
load wrongly or ignore in silence.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rollout.adapters import PolicyInvalid, check_adapter, check_tensors
from rollout.records import Fingerprint, PolicyKind, PolicyManifest

MANIFEST = "manifest.json"
FINGERPRINT = "fingerprint.json"
BASE_SIDECAR = ".base_id.json"

TOKEN_IDS = 2**31
"""More than any vocabulary has."""
UNSTABLE_CONFIG_KEYS = ("transformers_version", "_name_or_path")
"""Keys of config.json that say who wrote it, not what the model is."""

__all__ = ["Artifacts", "PolicyExists", "PolicyInvalid", "base_id", "read_manifest", "verify_policy"]


class PolicyExists(Exception):
    """A folder for this policy id is there already."""


class Artifacts:
    """The folder of large durable things; `policies_dir` is made on first use."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.policies_dir = self.root / "policies"

    def path(self, policy_id: str) -> Path:
        return self.policies_dir / policy_id

    def write_policy(self, manifest: PolicyManifest, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a temporary folder, seal it with the manifest and give it its name.

        `manifest.files` is filled in here. Raises PolicyExists when the id has a folder; what `write` raises
        propagates and leaves nothing behind. A process killed half-way leaves a folder with a leading dot.
        """
        target = self.path(manifest.id)
        self.policies_dir.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise PolicyExists(f"{target} exists; a policy is never changed")
        partial = self.policies_dir / f".{manifest.id}.{uuid.uuid4().hex}.partial"
        partial.mkdir()
        try:
            write(partial)
            _seal(partial, manifest)
            try:
                os.rename(partial, target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise PolicyExists(f"{target} appeared meanwhile") from error
                raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _fsync(self.policies_dir)
        return target

    def remove_policy(self, policy_id: str) -> None:
        """Delete a folder so that no reader sees half of it: it loses its name first."""
        doomed = self.policies_dir / f".{policy_id}.{uuid.uuid4().hex}.partial"
        os.rename(self.path(policy_id), doomed)
        _fsync(self.policies_dir)
        shutil.rmtree(doomed)

    def sweep(self) -> list[Path]:
        """Remove what killed writers left. Only for the start of the one process that writes policies."""
        left = sorted(self.policies_dir.glob(".*.partial"))
        for path in left:
            shutil.rmtree(path)
        return left


def read_manifest(path: Path) -> PolicyManifest:
    """The manifest of a policy folder; raises PolicyInvalid when it is missing or unreadable."""
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=PolicyManifest)
    except (FileNotFoundError, NotADirectoryError):
        raise PolicyInvalid(f"{path.name}: {MANIFEST} is missing") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyInvalid(f"{path.name}: {MANIFEST} is not a manifest: {error}") from None


def read_fingerprint(path: Path) -> Fingerprint | None:
    """The fingerprint of a policy folder, None when it has none; raises PolicyInvalid if unreadable."""
    try:
        return msgspec.json.decode((path / FINGERPRINT).read_bytes(), type=Fingerprint)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyInvalid(f"{path.name}: {FINGERPRINT} is not a fingerprint: {error}") from None


def verify_policy(path: Path, base: str, allowed_modules: Iterable[str], max_rank: int) -> PolicyManifest:
    """Check a policy folder before an engine is told of it; raises PolicyInvalid with the reason.

    `base` is the identity of the weights that the engines hold, `allowed_modules` and `max_rank` what every
    tier can serve. Checks every file against its sha256, the tensors' headers against their files, and for an
    adapter that each tensor is one that an engine applies.
    """
    try:
        return _verify(path, base, frozenset(allowed_modules), max_rank)
    except FileNotFoundError as error:  # somebody deletes it while we look
        raise PolicyInvalid(f"{path.name}: {error.filename} is missing") from error


def _verify(path: Path, base: str, allowed_modules: frozenset[str], max_rank: int) -> PolicyManifest:
    manifest = read_manifest(path)
    _check_files(path, manifest)
    fingerprint = read_fingerprint(path)
    if fingerprint is not None and (fingerprint.policy, fingerprint.parent) != (
        manifest.id,
        manifest.parent,
    ):
        raise PolicyInvalid(f"{path.name}: {FINGERPRINT} is of {fingerprint.policy}, not of {manifest.id}")
    if fingerprint is not None and (fault := _fingerprint_fault(fingerprint)):
        raise PolicyInvalid(f"{path.name}: {FINGERPRINT}: {fault}")
    if manifest.kind is PolicyKind.ADAPTER:
        if manifest.base != base:
            raise PolicyInvalid(f"{path.name}: made for base {manifest.base}, the engines hold {base}")
        check_adapter(path, manifest, allowed_modules, max_rank)
    else:
        weights = sorted(path.glob("*.safetensors"))
        if not weights or not (path / "config.json").exists():
            raise PolicyInvalid(f"{path.name}: a full policy needs config.json and *.safetensors")
        for file in weights:
            check_tensors(file)
    return manifest


def _fingerprint_fault(fingerprint: Fingerprint) -> str | None:
    """Why no replica could be compared with it; None when one can."""
    for i, prompt in enumerate(fingerprint.prompts):
        n = len(prompt.positions)
        if not all(0 < position < len(prompt.token_ids) for position in prompt.positions):
            return f"prompt {i} has a position outside 1..{len(prompt.token_ids) - 1}"
        if not all(0 <= token < TOKEN_IDS for token in prompt.token_ids):
            return f"prompt {i} has an id that no vocabulary has"
        for name in ("policy", "parent", "base"):
            values: list[float] = getattr(prompt, name)
            if len(values) != n or not all(map(math.isfinite, values)):
                return f"prompt {i} needs {n} finite log-probs of the {name}, one a position"
    return None


def base_id(model_dir: Path | str) -> str:
    """Identity of base weights: sha256 in hex over config.json and the weight files, names included.

    Hashing gigabytes takes seconds, so the digest of each file is kept in a sidecar with the size and time of
    change that it was computed at.
    """
    folder = Path(model_dir)
    config = json.loads((folder / "config.json").read_text())
    for key in UNSTABLE_CONFIG_KEYS:
        config.pop(key, None)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{folder}: no *.safetensors")
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, digest in _weight_digests(folder, weights).items():
        total.update(f"\n{name} {digest}".encode())
    return total.hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weight_digests(folder: Path, weights: list[Path]) -> dict[str, str]:
    sidecar = folder / BASE_SIDECAR
    try:
        known = json.loads(sidecar.read_text())
    except (FileNotFoundError, ValueError):  # absent, or torn by a kill: compute again
        known = {}
    entries = {}
    for file in weights:
        stat = file.stat()
        entry = known.get(file.name)
        if entry is None or (entry["size"], entry["mtime_ns"]) != (stat.st_size, stat.st_mtime_ns):
            entry = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_of(file)}
        entries[file.name] = entry
    if entries != known and os.access(folder, os.W_OK):
        partial = folder / f"{BASE_SIDECAR}.{uuid.uuid4().hex}"
        partial.write_text(json.dumps(entries))
        os.replace(partial, sidecar)
    return {name: entry["sha256"] for name, entry in entries.items()}


def _seal(folder: Path, manifest: PolicyManifest) -> None:
    """Fsync every file, write the manifest with their digests, fsync the folders."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise PolicyInvalid(f"{path.name} is a link; a policy folder holds plain files")
        if path.is_file():
            _fsync(path)
            files[path.relative_to(folder).as_posix()] = sha256_of(path)
    sealed = msgspec.structs.replace(manifest, files=files)
    target = folder / MANIFEST
    target.write_bytes(msgspec.json.format(msgspec.json.encode(sealed), indent=2))
    _fsync(target)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_files(path: Path, manifest: PolicyManifest) -> None:
    for name, digest in manifest.files.items():
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()) or file.is_symlink():
            raise PolicyInvalid(f"{path.name}: {name} points outside the folder")
        if not file.is_file():
            raise PolicyInvalid(f"{path.name}: {name} is missing")
        if sha256_of(file) != digest:
            raise PolicyInvalid(f"{path.name}: {name} does not have the sha256 of the manifest")
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
    unlisted = sorted(present - set(manifest.files) - {MANIFEST})
    if unlisted:
        raise PolicyInvalid(f"{path.name}: {unlisted[0]} is not in the manifest")
