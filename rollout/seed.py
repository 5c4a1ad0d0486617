"""Make a migrated store usable: a project, a key, the base policy, the warm start. Safe to run again.

Invariant: running it on a store that has served changes nothing about what is served.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from rollout import artifacts, config, policies
from rollout.artifacts import Artifacts
from rollout.records import ApiKey, Learn, PolicyKind, PolicyManifest, PolicyState, Project, Scope
from rollout.store import Store, projects

PROJECT = "default"
BASE_POLICY = "p000000"
KEY_FILE = "dev.key"


def main(args: argparse.Namespace) -> None:
    """``python -m rollout seed``."""
    document = config.read(args.config, args.overrides)
    store = Store.open(config.section(document, "store", config.StoreConfig).url)
    try:
        seed(store, document)
    finally:
        store.close()


def seed(store: Store, document: dict[str, Any]) -> None:
    """Fill what is missing; prints one line for each thing it makes."""
    model = config.section(document, "model", config.ModelConfig)
    engine = config.section(document, "engine", config.EngineConfig)
    files = Artifacts(config.section(document, "artifacts", config.ArtifactsConfig).root)
    with store.write() as tx:
        _seed_project(tx)
    _seed_key(store, config.home(document) / KEY_FILE)

    base = artifacts.base_id(model.path)
    with store.write() as tx:
        _seed_base(tx, base, model.path)
        initial = policies.serving(tx).promoted == BASE_POLICY and len(policies.list_policies(tx)) == 1
    if model.warm_start and initial:
        source = Path(model.warm_start)
        try:
            artifacts.verify_policy(source, base, engine.target_modules, engine.max_lora_rank)
        except artifacts.PolicyInvalid as error:
            raise config.ConfigError(
                f'model.warm_start: {error}; name one made for this model, or "" to begin with the bare base'
            ) from error
        _seed_warm_start(store, files, source)


def _seed_project(tx: Connection) -> None:
    if projects.get_project(tx, PROJECT) is None:
        projects.create_project(tx, Project(id=PROJECT, name=PROJECT, learn=Learn.SHARED))
        print(f"project {PROJECT}")


def _seed_key(store: Store, path: Path) -> None:
    """A key with every scope, in a file that only its owner can read. The file is written before the row."""
    secret = path.read_text().strip() if path.exists() else ""
    if not secret:
        secret = f"sk-ratchet-{secrets.token_urlsafe(32)}"
        _write_private(path, secret + "\n")
    hashed = projects.hash_secret(secret)
    with store.write() as tx:
        if projects.find_key(tx, hashed) is None:
            key = ApiKey(
                id=f"key-{uuid.uuid4().hex[:12]}",
                project_id=PROJECT,
                scopes=list(Scope),
                created_at=time.time(),
            )
            projects.create_key(tx, key, hashed)
            print(f"key {key.id} with every scope: {path}")


def _write_private(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _seed_base(tx: Connection, base: str, path: str) -> None:
    """The bare base as a policy: engines serve it under the name ``base``, it needs no folder of its own."""
    known = policies.get(tx, BASE_POLICY)
    if known is not None:
        if known.manifest.base != base:
            raise config.ConfigError(
                f"model.path: {path} has base {base}, this store was made with {known.manifest.base}; "
                "use another [home] path for another model"
            )
        return
    manifest = PolicyManifest(
        id=BASE_POLICY,
        parent=None,
        base=base,
        kind=PolicyKind.FULL,
        target_modules=[],
        rank=0,
        job="seed",
        step=0,
        recipe={},
        files={},
        created_at=time.time(),
    )
    policies.register(tx, manifest, path, state=PolicyState.PROMOTED, reason="initial")
    print(f"policy {BASE_POLICY}: {path}")


def _seed_warm_start(store: Store, files: Artifacts, source: Path) -> None:
    """Import the folder `source` (already verified) and serve it."""
    manifest = artifacts.read_manifest(source)
    target = files.path(manifest.id)
    if not target.exists():  # a seed that was killed between folder and row finds it there

        def copy(folder: Path) -> None:
            for name in manifest.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, folder / name)

        files.write_policy(manifest, copy)
    imported = artifacts.read_manifest(target)
    if imported != manifest:
        raise config.ConfigError(f"{target} is not the warm start {source}; remove one of them")
    with store.write() as tx:
        policies.register(tx, manifest, str(target), state=PolicyState.PROMOTED, reason="initial")
    print(f"policy {manifest.id}: {target}")
