"""The whole loop on the tiny model, every part a process of its own: traffic, outcomes, learner, gate, swap.

The tiny model solves no task, so the gate is told to let through what is not behind; that it refuses what is
not better is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from clients import Ratchet
from tests.fixtures.engines import RunningEngine, eventually
from tests.fixtures.models import RANK
from tests.server.gateways import Deployment, running_gateway, running_module

pytestmark = pytest.mark.engine
SAMPLES = 8
PATIENCE_S = 300.0
Tier = Literal["default", "fast"]
TIERS: tuple[Tier, ...] = ("default", "fast")


@pytest.fixture
def deployment(
    tmp_path: Path,
    tiny_deployment: tuple[Path, Path],
    engine_standard: RunningEngine,
    engine_fast: RunningEngine,
) -> Iterator[Deployment]:
    """A store, a learner and a judge of its own over the session's engines."""
    config, home = tiny_deployment
    overrides = [
        'model.warm_start=""',
        f'store.url="sqlite:///{tmp_path}/store.db"',
        f'artifacts.root="{tmp_path}/artifacts"',
        f'learner.folder="{tmp_path}/learner"',
        f"learner.rank={RANK}",
        f"learner.batch_size={SAMPLES}",
        "learner.publish_every=1",
        "learner.learning_rate=0.02",
        "judge.gate_tasks=4",
        "judge.gate_max_tasks=4",
        "judge.gate_confidence=0.0",
    ]
    found = Deployment(config, home, overrides)
    found.overrides.append(f"gateway.port={found.port}")
    found.prepare()
    with ExitStack() as stack:
        stack.enter_context(running_gateway(found))
        for command in (("rollout", "judge"), ("learner", "run")):
            log = tmp_path / f"{command[0]}.log"
            stack.enter_context(running_module(config, found.overrides, log, *command))
        yield found
    for engine in (engine_standard, engine_fast):
        engine.unload_all()


def ask(client: Ratchet, number: int, tier: Tier) -> tuple[str, str]:
    """(id, model) of one answer."""
    answer = client.chat.completions.create(
        model="ratchet",
        messages=[{"role": "user", "content": f"Say something about {number}."}],
        max_completion_tokens=12,
        service_tier=tier,
        store=True,
        metadata={"task": f"numbers/{number}"},
    )
    return answer.id, answer.model


def test_judged_production_becomes_the_policy_that_both_tiers_serve(deployment: Deployment) -> None:
    with Ratchet(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0) as client:
        client.rl.learning.set(True)
        for number in range(2 * SAMPLES):
            completion, model = ask(client, number, "fast" if number % 2 else "default")
            assert model == "ratchet@p000000"
            client.rl.feedback(completion_id=completion, value=float(number % 3 == 0), source="verifier")

        def promoted() -> bool:
            return bool(deployment.state()["promoted"] != "p000000")

        eventually(promoted, PATIENCE_S, "a learned policy is promoted")
        client.rl.learning.set(False)
        serving = deployment.state()["promoted"]
        policy = deployment.policy(serving)
        assert (policy["manifest"]["job"], policy["manifest"]["parent"]) == ("continuous", "p000000")
        assert [step["to"] for step in policy["history"]] == ["candidate", "gate", "canary", "promoted"]
        (evaluation,) = policy["evaluations"]
        assert (evaluation["policy_id"], evaluation["baseline_id"], evaluation["n"]) == (
            serving,
            "p000000",
            4,
        )
        for tier in TIERS:
            completion, model = ask(client, 99, tier)
            assert model == f"ratchet@{serving}"
            assert deployment.recorded(completion).policy_id == serving
