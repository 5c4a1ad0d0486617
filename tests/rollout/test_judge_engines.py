"""Episodes and the gate on real engines behind a real gateway. The tiny model solves nothing, by design:
what is tested is that everything is asked, judged, recorded and decided as it should be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout import episodes, gateway, outcomes, policies
from rollout.episodes import Ask, Episode
from rollout.evals.paired import Side, evaluate
from rollout.evals.suites import sealed
from rollout.judge import Judge
from rollout.promotion import Gate, JudgeConfig
from rollout.records import Joint, PolicyState, Source
from rollout.seed import PROJECT
from rollout.store import completions, evaluations
from rollout.tasks import generate
from tests.fixtures.engines import RunningEngine, eventually
from tests.rollout.scripted import TIERS
from tests.server.gateways import Deployment, running_gateway

pytestmark = pytest.mark.engine
SMALL = JudgeConfig(gate_tasks=4, gate_max_tasks=8, concurrency=8, poll_s=0.1)


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_deployment: tuple[Path, Path],
    engine_standard: RunningEngine,
    engine_fast: RunningEngine,
) -> Iterator[Deployment]:
    """A store of its own over the session's engines."""
    config, home = tiny_deployment
    own = tmp_path_factory.mktemp("judge")
    overrides = [
        'model.warm_start=""',
        f'store.url="sqlite:///{own}/store.db"',
        f'artifacts.root="{own}/artifacts"',
    ]
    found = Deployment(config, home, overrides)
    found.overrides.append(f"gateway.port={found.port}")
    found.prepare()
    with running_gateway(found):
        yield found
    for engine in (engine_standard, engine_fast):
        engine.unload_all()


def candidate(deployment: Deployment, seed: int) -> str:
    """A new candidate that every replica holds verified."""
    policy_id = deployment.new_policy(seed)

    def settled() -> bool:
        return deployment.verified(policy_id) or deployment.policy(policy_id)["state"] == PolicyState.REJECTED

    eventually(settled, 60.0, f"{policy_id} verified everywhere or rejected")
    found = deployment.policy(policy_id)
    assert found["state"] == PolicyState.CANDIDATE, found["reason"]
    return policy_id


def play(deployment: Deployment, ask: Ask, seeds: range, name: str) -> list[Episode]:
    async def all_of_them() -> list[Episode]:
        async with gateway.client(deployment.document, retries=0) as client:
            running = [episodes.run(client, generate(seed, "train"), ask, f"{name}-{seed}") for seed in seeds]
            made = list(await asyncio.gather(*running))
            for episode in made:
                await episodes.report(client, episode)
            return made

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(("tier", "service_tier"), [("standard", "default"), ("fast", "fast")])
@pytest.mark.parametrize("stream", [False, True])
def test_episodes_are_judged_and_recorded(
    deployment: Deployment, tier: str, service_tier: str, stream: bool
) -> None:
    name = f"{tier}-{stream}"
    made = play(deployment, Ask(service_tier=service_tier, stream=stream), range(4), name)
    for episode in made:
        assert (episode.fault, episode.success) == (None, False)
        (request,) = episode.requests
        assert (request.policy, request.tier) == ("p000000", tier)
        assert (request.ttft_s is not None) == stream
        assert request.completion_id is not None
        recorded = deployment.recorded(request.completion_id)
        assert (recorded.trajectory_id, recorded.task) == (episode.trajectory_id, episode.task.id)
        assert (recorded.joint, recorded.trainable) == (Joint.START, True)
        assert recorded.tools == episode.task.tools
        assert (
            recorded.usage.completion_tokens
            == request.completion_tokens
            == len(recorded.choices[0].token_ids)
        )
        with deployment.store() as store, store.read() as tx:
            (outcome,) = outcomes.for_completion(tx, PROJECT, request.completion_id)
        assert (outcome.value, outcome.source, outcome.verifier) == (0.0, Source.VERIFIER, "tool_use")
        assert outcome.trusted


def test_an_evaluation_is_reproducible_and_leaves_no_records(deployment: Deployment) -> None:
    with deployment.store() as store, store.read() as tx:
        before = completions.counts(tx)

    async def answers() -> list[list[int]]:
        async with gateway.client(deployment.document, retries=0) as client:
            side = Side(policy="p000000", model="ratchet@p000000")
            runs = [await evaluate(client, sealed(6), [side], TIERS, 3) for _ in range(2)]
            return [[result.completion_tokens for result in run["p000000"]] for run in runs]

    first, second = asyncio.run(answers())
    assert first == second
    with deployment.store() as store, store.read() as tx:
        assert completions.counts(tx) == before


def judge_once(deployment: Deployment) -> None:
    async def play() -> None:
        with deployment.store() as store:
            async with gateway.client(deployment.document, retries=1) as client:
                gate = Gate(store=store, client=client, config=SMALL, model="ratchet", tiers=TIERS)
                await Judge(store=store, client=client, gate=gate).round()

    asyncio.run(play())


def test_a_candidate_that_is_no_better_is_rejected_and_goes_on_not_serving(deployment: Deployment) -> None:
    policy_id = candidate(deployment, 11)
    judge_once(deployment)
    found = deployment.policy(policy_id)
    assert found["state"] == PolicyState.REJECTED
    assert "not shown to be better" in found["reason"]
    with deployment.store() as store, store.read() as tx:
        (evaluation,) = evaluations.list_evaluations(tx, policy_id)
        assert policies.serving(tx).promoted == "p000000"
    assert (evaluation.n, evaluation.baseline_id) == (8, "p000000")


def test_a_policy_that_passed_the_gate_is_flipped_to_on_both_tiers(deployment: Deployment) -> None:
    policy_id = candidate(deployment, 12)
    with deployment.store() as store, store.write() as tx:
        policies.transition(tx, policy_id, PolicyState.CANDIDATE, PolicyState.GATE, actor="judge")
        policies.transition(
            tx,
            policy_id,
            PolicyState.GATE,
            PolicyState.CANARY,
            actor="judge",
            evidence={"baseline": "p000000"},
        )
    judge_once(deployment)
    assert deployment.policy(policy_id)["state"] == PolicyState.PROMOTED
    for service_tier in ("default", "fast"):
        (episode,) = play(deployment, Ask(service_tier=service_tier), range(1), f"after-{service_tier}")
        assert episode.policies == {policy_id}
