"""Episodes against a service that answers by script."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollout import episodes
from rollout.episodes import Ask, Episode
from rollout.records import PRIORITY_HEADER
from rollout.tasks import generate
from rollout.verifiers import Attempt, verify
from tests.rollout.scripted import Service


def service(skill: float = 1.0) -> Service:
    return Service(skills={"p000001": skill}, promoted="p000001")


def run(api: Service, seed: int, ask: Ask, trajectory: str = "t1") -> Episode:
    return asyncio.run(episodes.run(api.client(), generate(seed, "train"), ask, trajectory))


@pytest.mark.parametrize("stream", [False, True])
def test_the_gold_policy_solves_every_task(stream: bool) -> None:
    api = service()

    async def play() -> list[Episode]:
        client = api.client()
        return [
            await episodes.run(client, generate(seed, "train"), Ask(stream=stream), f"t{seed}")
            for seed in range(60)
        ]

    for episode in asyncio.run(play()):
        task = episode.task
        assert episode.success is True, (task, episode.verdict)
        assert len(episode.requests) == task.max_turns
        assert episode.policies == {"p000001"}
        assert episode.completion_tokens == 20 * task.max_turns
        assert all((request.ttft_s is not None) == stream for request in episode.requests)


def test_a_policy_that_does_not_know_is_a_zero() -> None:
    episode = run(service(skill=0.0), 0, Ask())
    assert (episode.success, episode.fault) == (False, None)


def test_a_refused_request_is_a_fault_and_not_a_zero() -> None:
    api = service()
    api.failing = 1
    episode = run(api, 0, Ask())
    assert episode.success is None
    assert episode.fault is not None
    assert "no engine" in episode.fault
    assert episode.requests[0].error == episode.fault
    assert episode.requests[0].policy is None


def test_turns_share_a_trajectory_and_carry_the_tool_results() -> None:
    api = service()
    seed = next(s for s in range(999) if generate(s, "train").family == "price_convert")
    run(api, seed, Ask(), "t9")
    assert [body["metadata"]["trajectory_id"] for body in api.bodies] == ["t9"] * 3
    assert api.bodies[0]["metadata"]["task"] == generate(seed, "train").id
    roles = [message["role"] for message in api.bodies[2]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert set(json.loads(api.bodies[1]["messages"][-1]["content"])) == {"usd"}


@pytest.mark.parametrize(
    "arguments", ['{"amount": 1e999, "from": "USD", "to": "JPY"}', "[" * 5000 + "]" * 5000, "9" * 5000, "{"]
)
def test_a_call_of_no_use_is_answered_and_the_episode_goes_on(arguments: str) -> None:
    class Odd(Service):
        def _say(self, policy: str, body: dict[str, Any]) -> dict[str, Any]:
            function = {"name": "convert_currency", "arguments": arguments}
            call = {"id": "c", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}

    api = Odd(skills={}, promoted="p000001")
    seed = next(s for s in range(999) if generate(s, "train").family == "price_convert")
    episode = run(api, seed, Ask())
    assert len(episode.requests) == 3
    assert set(json.loads(api.bodies[-1]["messages"][-1]["content"])) == {"error"}
    assert episode.success is False


def test_what_is_asked_is_what_is_sent() -> None:
    api = service()
    run(api, 0, Ask(service_tier="fast", store=False, seed=5, evaluation=True, temperature=0.5))
    body = api.bodies[0]
    assert (body["service_tier"], body["store"], body["seed"], body["temperature"]) == ("fast", False, 5, 0.5)
    assert api.headers[0][PRIORITY_HEADER] == "evaluation"
    run(api, 0, Ask())
    assert "seed" not in api.bodies[-1]
    assert PRIORITY_HEADER not in api.headers[-1]


def test_the_outcome_is_about_the_completion_or_the_trajectory_and_idempotent() -> None:
    api = service()
    single = next(s for s in range(99) if generate(s, "train").max_turns == 1)
    several = next(s for s in range(99) if generate(s, "train").max_turns > 1)

    async def play() -> None:
        client = api.client()
        for seed, name in ((single, "one"), (several, "many")):
            episode = await episodes.run(client, generate(seed, "train"), Ask(), name)
            await episodes.report(client, episode)
            await episodes.report(client, episode)

    asyncio.run(play())
    one, many = api.outcomes["one:tool_use:1"], api.outcomes["many:tool_use:1"]
    assert one["completion_id"] == "chatcmpl-1"
    assert "trajectory_id" not in one
    assert many["trajectory_id"] == "many"
    assert (one["value"], one["source"], one["verifier"], one["verifier_version"]) == (
        1.0,
        "verifier",
        "tool_use",
        "1",
    )


def test_a_fault_after_a_first_answer_is_reported_as_an_error() -> None:
    api = service()
    several = next(s for s in range(99) if generate(s, "train").max_turns > 1)

    async def play() -> Episode:
        client = api.client()
        episode = await episodes.run(client, generate(several, "train"), Ask(), "t")
        episode.verdict = verify(episode.task, Attempt(messages=[], fault="engine gone"))
        await episodes.report(client, episode)
        return episode

    asyncio.run(play())
    outcome = api.outcomes["t:tool_use:1"]
    assert outcome["error"] == "engine gone"
    assert "value" not in outcome
