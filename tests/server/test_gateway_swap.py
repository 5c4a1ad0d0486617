"""Policies on real engines: verified, pinned, promoted under load, rolled back, refused."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from rollout import artifacts, policies
from rollout.artifacts import Artifacts
from rollout.config import ArtifactsConfig, section
from rollout.records import Fingerprint, PolicyState
from tests.fixtures.engines import eventually
from tests.server.gateways import Deployment, tool

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Hello, who answers?"}]


def ask(deployment: Deployment, model: str = "ratchet", **options: Any) -> Any:
    values: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "store": True, "temperature": 0}
    return deployment.client().chat.completions.create(model=model, **(values | options))


def promoted(deployment: Deployment) -> str:
    policy: str = deployment.state()["promoted"]
    return policy


def promote(deployment: Deployment, policy: str, **body: Any) -> Any:
    return deployment.call("POST", "/v1/rl/tiers/promote", {"policy": policy} | body)


def clear(deployment: Deployment) -> None:
    """Reject what a test left waiting, so that the next one finds free slots."""
    with deployment.store() as store, store.write() as tx:
        for policy in policies.list_policies(
            tx, {PolicyState.CANDIDATE, PolicyState.GATE, PolicyState.CANARY}
        ):
            policies.transition(
                tx, policy.id, policy.state, PolicyState.REJECTED, actor="test", reason="the test is over"
            )


@pytest.fixture(autouse=True)
def _free_slots(deployment: Deployment) -> Any:
    yield
    clear(deployment)


def folder(deployment: Deployment, policy: str) -> Path:
    return Artifacts(section(deployment.document, "artifacts", ArtifactsConfig).root).path(policy)


def test_a_candidate_is_verified_pinned_promoted_and_rolled_back(deployment: Deployment) -> None:
    before = promoted(deployment)
    policy = deployment.new_policy(11)
    deployment.place(policy)
    placed = deployment.policy(policy)["placements"]
    assert {row["replica_id"]: row["placement"] for row in placed} == {
        "standard-0": "verified",
        "fast-0": "verified",
    }
    for alias in ("ratchet", "ratchet-fast"):
        pinned = ask(deployment, f"{alias}@{policy}")
        assert pinned.model == f"ratchet@{policy}"
        assert pinned.choices[0].message.content != ask(deployment, alias).choices[0].message.content
    refused = promote(deployment, policy)
    assert refused.status_code == 412
    assert "passed the gate" in refused.json()["error"]["message"]

    deployment.pass_gate(policy)
    assert promote(deployment, policy, expected="p999999").status_code == 412
    assert promoted(deployment) == before
    done = promote(deployment, policy, expected=before)
    assert done.status_code == 200, done.text
    assert (done.json()["promoted"], done.json()["previous"]) == (policy, before)
    for alias in ("ratchet", "ratchet-fast"):
        assert ask(deployment, alias).model == f"ratchet@{policy}"
        assert ask(deployment, f"{alias}@{before}").model == f"ratchet@{before}"

    back = deployment.call("POST", "/v1/rl/tiers/rollback", {"expected": policy, "reason": "a test"})
    assert back.json()["promoted"] == before
    assert ask(deployment).model == f"ratchet@{before}"
    assert deployment.policy(policy)["state"] == "rolled_back"
    assert deployment.policy(policy)["reason"] == "a test"
    assert deployment.call("POST", "/v1/rl/tiers/rollback", {}).status_code == 412
    with pytest.raises(openai.NotFoundError):
        ask(deployment, f"ratchet@{policy}")


def test_swaps_under_traffic_lose_nothing_and_trajectories_stay(deployment: Deployment) -> None:
    before = promoted(deployment)
    policy = deployment.new_policy(12)
    deployment.place(policy)
    deployment.pass_gate(policy)
    started = time.time()

    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[float, str]:
        begun = time.time()
        answer = await client.chat.completions.create(
            model=["ratchet", "ratchet-fast"][i % 2],
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Number {i}"}],
            tools=[tool("clock", "zone")],  # type: ignore[list-item]
            max_tokens=12,
            store=True,
            metadata={"trajectory_id": f"swap-{started}-{i % 6}"} if i % 4 == 0 else {},
        )
        return begun, answer.model

    async def traffic() -> tuple[list[tuple[float, str]], float]:
        async with deployment.async_client() as client:
            await one(client, 1)  # so that there is a prefix to warm
            running = [asyncio.create_task(one(client, i)) for i in range(16)]
            response = await asyncio.to_thread(promote, deployment, policy)
            assert response.status_code == 200, response.text
            flipped = time.time()
            later = [asyncio.create_task(one(client, i)) for i in range(16)]
            return await asyncio.gather(*running, *later), flipped

    answers, flipped = asyncio.run(traffic())
    names = {f"ratchet@{before}", f"ratchet@{policy}"}
    assert {model for _, model in answers} <= names
    unnamed = [model for i, (begun, model) in enumerate(answers) if begun > flipped and i % 4 != 0]
    assert set(unnamed) == {f"ratchet@{policy}"}
    flip = deployment.state()["flips"][-1]
    assert flip["policy"] == policy
    assert flip["warmed_prefixes"] > 0
    deployment.call("POST", "/v1/rl/tiers/rollback", {})


def test_a_trajectory_stays_on_the_policy_it_began_with(deployment: Deployment) -> None:
    before = promoted(deployment)
    held: dict[str, Any] = {"metadata": {"trajectory_id": f"held-{time.time()}"}}
    assert ask(deployment, **held).model == f"ratchet@{before}"
    policy = deployment.new_policy(13)
    deployment.place(policy)
    deployment.pass_gate(policy)
    assert promote(deployment, policy).status_code == 200
    assert ask(deployment, **held).model == f"ratchet@{before}"
    assert ask(deployment).model == f"ratchet@{policy}"
    deployment.call("POST", "/v1/rl/tiers/rollback", {})


def corrupt_truncated(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def corrupt_missing(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()


def corrupt_base(path: Path) -> None:
    _edit_manifest(path, base="0" * 64)


def corrupt_gone(path: Path) -> None:
    shutil.rmtree(path)


def corrupt_fingerprint(path: Path) -> None:
    """The log-probs of another policy: what a replica says must not pass."""
    known = msgspec.json.decode((path / "fingerprint.json").read_bytes(), type=Fingerprint)
    prompts = [
        msgspec.structs.replace(p, policy=[2 * b - x for b, x in zip(p.parent, p.policy, strict=True)])
        for p in known.prompts
    ]
    (path / "fingerprint.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(known, prompts=prompts))
    )
    _edit_manifest(path)


def corrupt_no_fingerprint(path: Path) -> None:
    (path / "fingerprint.json").unlink()
    _edit_manifest(path)


def _edit_manifest(path: Path, **changes: Any) -> None:
    manifest = artifacts.read_manifest(path)
    files = {f.name: artifacts.sha256_of(f) for f in path.iterdir() if f.name != "manifest.json"}
    edited = msgspec.structs.replace(manifest, files=files, **changes)
    (path / "manifest.json").write_bytes(msgspec.json.encode(edited))


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (corrupt_truncated, "sha256"),
        (corrupt_missing, "missing"),
        (corrupt_base, "base"),
        (corrupt_gone, "manifest.json is missing"),
        (corrupt_fingerprint, "fingerprint mismatch"),
        (corrupt_no_fingerprint, "fingerprint.json is missing"),
    ],
)
def test_a_bad_folder_is_refused_with_its_reason(deployment: Deployment, corrupt: Any, reason: str) -> None:
    before = promoted(deployment)
    policy = deployment.new_policy(20, register=False)
    path = folder(deployment, policy)
    manifest = artifacts.read_manifest(path)
    corrupt(path)
    with deployment.store() as store, store.write() as tx:
        policies.register(tx, manifest, str(path))
    eventually(lambda: deployment.policy(policy)["state"] == "rejected", 30, "the folder was refused")
    assert reason in deployment.policy(policy)["reason"]
    assert promoted(deployment) == before
    assert ask(deployment).model == f"ratchet@{before}"
    eventually(lambda: _unknown(deployment, f"ratchet@{policy}"), 5, "the refused policy has no name")


def _unknown(deployment: Deployment, model: str) -> bool:
    return deployment.call("GET", f"/v1/models/{model}").status_code == 404


def test_a_folder_deleted_under_load_ends_no_engine(deployment: Deployment) -> None:
    instances = [replica["instance"] for tier in deployment.state()["tiers"].values() for replica in tier]
    policy = deployment.new_policy(14)
    deployment.place(policy)
    said = ask(deployment, f"ratchet@{policy}").choices[0].message.content
    shutil.rmtree(folder(deployment, policy))
    others = [deployment.new_policy(15), deployment.new_policy(16)]
    for other in others:
        deployment.place(other)
        ask(deployment, f"ratchet@{other}")
    assert ask(deployment, f"ratchet@{policy}").choices[0].message.content == said
    now = [replica["instance"] for tier in deployment.state()["tiers"].values() for replica in tier]
    assert now == instances


def test_more_candidates_than_slots_wait_and_break_nothing(deployment: Deployment) -> None:
    slots = 4 - (promoted(deployment) != "p000000")
    waiting = [deployment.new_policy(30 + i) for i in range(slots + 1)]
    for policy in waiting[:slots]:
        deployment.place(policy)
    assert not deployment.verified(waiting[slots])
    with deployment.store() as store, store.write() as tx:
        policies.transition(
            tx, waiting[0], PolicyState.CANDIDATE, PolicyState.REJECTED, actor="test", reason="makes room"
        )
    deployment.place(waiting[slots])
