"""Seeding: everything that a first request needs, and nothing twice."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout import artifacts, config, policies, seed
from rollout.artifacts import Artifacts
from rollout.policies import Serving
from rollout.records import PolicyState, Scope
from rollout.store import Store, projects
from tests.fixtures.rows import manifest
from tests.rollout.test_artifacts import publish
from tests.rollout.test_base_id import model as model  # a fixture


@pytest.fixture
def document(tmp_path: Path, model: Path) -> dict[str, Any]:
    """A deployment with a warm start made for its model."""
    made = manifest("p000001", base=artifacts.base_id(model))
    warm_start = publish(tmp_path / "elsewhere", made)
    home = tmp_path / "home"
    return {
        "home": {"path": str(home)},
        "artifacts": {"root": str(home / "artifacts")},
        "model": {"path": str(model), "warm_start": str(warm_start)},
    }


def snapshot(store: Store, document: dict[str, Any]) -> object:
    secret = (config.home(document) / seed.KEY_FILE).read_text().strip()
    with store.read() as tx:
        return (
            secret,
            projects.find_key(tx, projects.hash_secret(secret)),
            len(projects.list_keys(tx, seed.PROJECT)),
            policies.list_policies(tx),
            policies.serving(tx),
        )


def test_a_seeded_store_serves_the_warm_start(store: Store, document: dict[str, Any]) -> None:
    seed.seed(store, document)
    path = config.home(document) / seed.KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with store.read() as tx:
        found = projects.find_key(tx, projects.hash_secret(path.read_text().strip()))
        assert found is not None
        assert found[0].scopes == list(Scope)
        assert found[1].id == seed.PROJECT
        assert policies.serving(tx) == Serving(promoted="p000001", previous="p000000", epoch=2)
        warm = policies.get(tx, "p000001")
        assert warm is not None
        assert [step.reason for step in policies.history(tx, "p000001")] == ["initial"]
    assert (
        artifacts.verify_policy(Path(warm.path), warm.manifest.base, ["q_proj", "v_proj"], 4) == warm.manifest
    )
    assert Path(warm.path).is_relative_to(config.home(document))


def test_seeding_again_changes_nothing(store: Store, document: dict[str, Any]) -> None:
    seed.seed(store, document)
    first = snapshot(store, document)
    seed.seed(store, document)
    assert snapshot(store, document) == first


def test_a_seed_that_was_killed_half_way_is_finished(store: Store, document: dict[str, Any]) -> None:
    bare = document | {"model": document["model"] | {"warm_start": ""}}
    seed.seed(store, bare)
    with store.read() as tx:
        assert policies.serving(tx).promoted == "p000000"
    source = Path(document["model"]["warm_start"])
    folder = Artifacts(document["artifacts"]["root"]).path("p000001")
    shutil.copytree(source, folder)  # the folder was renamed, the row not written
    seed.seed(store, document)
    with store.read() as tx:
        assert policies.serving(tx).promoted == "p000001"


def test_a_seed_does_not_undo_what_was_served_since(store: Store, document: dict[str, Any]) -> None:
    seed.seed(store, document)
    with store.write() as tx:
        policies.rollback(tx, actor="admin", reason="worse")
    seed.seed(store, document)
    with store.read() as tx:
        assert policies.serving(tx) == Serving(promoted="p000000", previous=None, epoch=3)


def test_a_lost_key_file_gets_a_new_key_and_a_lost_store_keeps_the_key(
    store: Store, document: dict[str, Any], tmp_path: Path
) -> None:
    seed.seed(store, document)
    path = config.home(document) / seed.KEY_FILE
    first = path.read_text()
    path.unlink()
    seed.seed(store, document)
    second = path.read_text()
    assert second != first
    other = Store.open(f"sqlite:///{tmp_path}/other.db")
    other.migrate()
    seed.seed(other, document)
    assert path.read_text() == second
    with other.read() as tx:
        assert projects.find_key(tx, projects.hash_secret(second.strip())) is not None
    other.close()


def test_a_warm_start_for_another_model_is_refused(
    store: Store, document: dict[str, Any], tmp_path: Path
) -> None:
    foreign = publish(tmp_path / "foreign", manifest("p000001", base="something else"))
    document["model"]["warm_start"] = str(foreign)
    with pytest.raises(config.ConfigError, match=r"model\.warm_start.*made for base something else"):
        seed.seed(store, document)
    with store.read() as tx:
        assert [p.id for p in policies.list_policies(tx)] == ["p000000"]


def test_another_model_on_a_used_store_is_refused(
    store: Store, document: dict[str, Any], model: Path
) -> None:
    seed.seed(store, document)
    (model / "config.json").write_text('{"hidden_size": 99}')
    with pytest.raises(config.ConfigError, match="another model"):
        seed.seed(store, document)


def test_the_commands_run_as_a_deployment_runs_them(tmp_path: Path, document: dict[str, Any]) -> None:
    toml = tmp_path / "deployment.toml"
    toml.write_text(
        f'[home]\npath = "{document["home"]["path"]}"\n[artifacts]\nroot = "{{home}}/artifacts"\n'
        f'[model]\npath = "{document["model"]["path"]}"\nwarm_start = "{document["model"]["warm_start"]}"\n'
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rollout", *arguments], capture_output=True, text=True, check=False
        )

    for command in ("migrate", "seed", "migrate", "seed"):
        done = run(command, "--config", str(toml))
        assert done.returncode == 0, done.stderr
    store = Store.open(f"sqlite:///{document['home']['path']}/ratchet.db")
    with store.read() as tx:
        assert policies.list_policies(tx, [PolicyState.PROMOTED])[0].id == "p000001"
    store.close()
    for refused in (run(), run("unknown"), run("seed", "--config", str(tmp_path / "absent.toml"))):
        assert refused.returncode == 1
        assert "Traceback" not in refused.stderr
    assert "absent.toml: no such file" in refused.stderr
