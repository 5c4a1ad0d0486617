"""Projects, placements, learning and evaluations."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError

from rollout.records import ApiKey, Capture, Learn, Placement, Project, Scope
from rollout.store import Store, evaluations, learning, placements, projects
from tests.fixtures.rows import add_project


def test_a_key_is_found_by_its_secret_until_revoked(store: Store) -> None:
    project = Project(
        id="p", name="P", capture=Capture.ON, learn=Learn.NONE, default_tier="fast", inference_outcomes=True
    )
    key = ApiKey(id="k", project_id="p", scopes=[Scope.INFERENCE, Scope.OUTCOMES_WRITE], created_at=5.0)
    hashed = projects.hash_secret("secret")
    with store.write() as tx:
        projects.create_project(tx, project)
        projects.create_key(tx, key, hashed)
    with store.read() as tx:
        assert projects.find_key(tx, hashed) == (key, project)
        assert projects.find_key(tx, projects.hash_secret("other")) is None
        assert projects.list_projects(tx) == [project]
    with store.write() as tx:
        assert projects.revoke_key(tx, "k")
        assert not projects.revoke_key(tx, "k")
    with store.read() as tx:
        assert projects.find_key(tx, hashed) is None
        assert projects.list_keys(tx, "p")[0].revoked_at is not None


def test_a_key_needs_its_project(store: Store) -> None:
    key = ApiKey(id="k", project_id="nobody", scopes=[], created_at=0.0)
    with pytest.raises(IntegrityError), store.write() as tx:
        projects.create_key(tx, key, "h")


def test_placements_are_overwritten_and_go_with_their_instance(store: Store) -> None:
    with store.write() as tx:
        placements.heartbeat(tx, "standard-0", "standard", "i1", ready=False)
        placements.set_placement(tx, "standard-0", "i1", "p000001", Placement.LOADING)
        placements.set_placement(tx, "standard-0", "i1", "p000001", Placement.VERIFIED, "0.1 to policy")
        placements.set_placement(tx, "fast-0", "j1", "p000001", Placement.FAILED, "no such file")
        placements.heartbeat(tx, "standard-0", "standard", "i1", ready=True)
    with store.read() as tx:
        rows = placements.placements(tx, policy_id="p000001")
        assert [(r.replica_id, r.placement, r.detail) for r in rows] == [
            ("fast-0", Placement.FAILED, "no such file"),
            ("standard-0", Placement.VERIFIED, "0.1 to policy"),
        ]
        assert [(r.id, r.tier, r.ready) for r in placements.replicas(tx)] == [
            ("standard-0", "standard", True)
        ]
    with store.write() as tx:
        placements.heartbeat(tx, "standard-0", "standard", "i2", ready=False)
    with store.read() as tx:
        assert placements.placements(tx, replica_id="standard-0") == []
        assert len(placements.placements(tx)) == 1
    with store.write() as tx:
        placements.clear_placement(tx, "fast-0", "p000001")
    with store.read() as tx:
        assert placements.placements(tx) == []


def test_a_sample_is_used_once_a_job_and_with_its_checkpoint(store: Store) -> None:
    key = learning.trajectory_key("default", "t")
    with store.write() as tx:
        learning.mark_used(tx, "job", 1, [("c1", 0), ("c1", 1), (key, 0)])
        learning.mark_used(tx, "another", 1, [("c1", 0)])
        learning.mark_used(tx, "job", 1, [])
    checkpoint = learning.Checkpoint(job="job", update=2, path="/x", cursor=9, state={"a": [1]})

    def update() -> None:
        with store.write() as tx:
            learning.set_checkpoint(tx, checkpoint)
            learning.mark_used(tx, "job", 2, [("c2", 0), (key, 0)])

    with pytest.raises(learning.AlreadyUsed):
        update()
    with store.read() as tx:
        assert learning.get_checkpoint(tx, "job") is None
        wanted = [("c1", 0), ("c1", 2), ("c2", 0), (key, 0)]
        assert learning.used_keys(tx, "job", wanted) == {("c1", 0), (key, 0)}
        assert learning.used_keys(tx, "job", []) == set()


def test_many_keys_can_be_asked_for(store: Store) -> None:
    keys = [(f"c{n}", n % 2) for n in range(2300)]
    with store.write() as tx:
        learning.mark_used(tx, "job", 1, keys[::2])
    with store.read() as tx:
        assert learning.used_keys(tx, "job", keys) == set(keys[::2])


def test_checkpoint_settings_and_status_are_overwritten(store: Store) -> None:
    with store.write() as tx:
        for update in (1, 2):
            checkpoint = learning.Checkpoint(job="j", update=update, path=f"/{update}", cursor=update)
            learning.set_checkpoint(tx, checkpoint)
        learning.set_setting(tx, "learning", True)
        learning.set_setting(tx, "learning", False)
        learning.set_learner_status(tx, {"seen": 3, "why_not": {"stale": 1}})
    with store.read() as tx:
        stored = learning.get_checkpoint(tx, "j")
        assert stored is not None
        assert (stored.update, stored.path, stored.cursor, stored.state) == (2, "/2", 2, {})
        assert stored.updated_at > 0
        assert learning.get_setting(tx, "learning", True) is False
        assert learning.get_setting(tx, "absent", "default") == "default"
        status = learning.get_learner_status(tx)
        assert status is not None
        assert status["why_not"] == {"stale": 1}
        assert status["updated_at"] > 0


def test_evaluations_are_kept_in_order(store: Store) -> None:
    add_project(store)
    made = [
        evaluations.Evaluation(
            id=f"e{n}",
            policy_id=f"p{n % 2}",
            baseline_id=None if n == 2 else "p000000",
            suite="held_out",
            n=200,
            results={"difference": 0.1, "interval": [0.02, 0.18]},
            created_at=float(n),
        )
        for n in (3, 1, 2)
    ]
    with store.write() as tx:
        for evaluation in made:
            evaluations.insert(tx, evaluation)
    with store.read() as tx:
        assert evaluations.get(tx, "e3") == made[0]
        assert evaluations.get(tx, "e9") is None
        assert evaluations.list_evaluations(tx) == made
        assert evaluations.list_evaluations(tx, "p1") == made[:2]
