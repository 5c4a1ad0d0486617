"""Kills on real parts: the gateway by SIGKILL, the engine by SIGKILL, and what is there afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fixtures.engines import RunningEngine, eventually, running_engine, write_config
from tests.server.gateways import Deployment, is_ready, lines, running_gateway

pytestmark = pytest.mark.engine
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def killable(
    tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path
) -> Iterator[tuple[Deployment, RunningEngine]]:
    """A deployment of one replica whose engine this module may kill."""
    home = tmp_path_factory.mktemp("killable")
    config = write_config(home / "deployment.toml", home, tiny_moe, {"standard": "float32"})
    deployment = Deployment(config, home, ['model.warm_start=""'])
    deployment.prepare()
    with running_engine(config, home, "standard-0") as engine:
        yield deployment, engine


def chat(deployment: Deployment, **body: Any) -> httpx.Response:
    values = {"model": "ratchet", "messages": HELLO, "max_tokens": 8, "store": True}
    return deployment.call("POST", "/v1/chat/completions", values | body)


def promoted_policy(deployment: Deployment) -> str:
    policy = deployment.new_policy(1)
    deployment.place(policy)
    deployment.pass_gate(policy)
    answer = deployment.call("POST", "/v1/rl/tiers/promote", {"policy": policy})
    assert answer.status_code == 200, answer.text
    return policy


def test_a_killed_gateway_forgets_nothing_and_finds_its_engine(
    killable: tuple[Deployment, RunningEngine],
) -> None:
    deployment, _ = killable
    with running_gateway(deployment) as process:
        policy = promoted_policy(deployment)
        instance = deployment.state()["tiers"]["standard"][0]["instance"]
        events = lines(chat(deployment, stream=True, metadata={"trajectory_id": "kept"}))
        assert events[-1] == "[DONE]"
        process.kill()
        process.wait(10)
    with running_gateway(deployment):
        record = deployment.recorded(events[0]["id"])
        assert record.trainable
        assert record.policy_id == policy
        replica = deployment.state()["tiers"]["standard"][0]
        assert replica["instance"] == instance
        assert policy in replica["verified"]
        assert replica["load_ms"] == {}, "nothing was loaded again"
        # The next turn of the trajectory joins what the killed gateway recorded.
        said = record.choices[0].message
        more = [*HELLO, said, {"role": "user", "content": "Go on"}]
        chat(deployment, messages=more, metadata={"trajectory_id": "kept"})
        turns = deployment.call("GET", "/v1/rl/trajectories/kept").json()["completions"]
        assert [turn["joint"] for turn in turns] == ["start", "joined"]


def test_a_killed_engine_comes_back_verified(killable: tuple[Deployment, RunningEngine]) -> None:
    deployment, engine = killable
    with running_gateway(deployment):
        policy = deployment.state()["promoted"]
        before = chat(deployment, temperature=0).json()["choices"][0]["message"]["content"]
        state = engine.state()
        assert state is not None
        outcome: list[Any] = []

        def long_request() -> None:
            outcome.append(chat(deployment, max_tokens=900, ignore_eos=True, stream=True))

        running = threading.Thread(target=long_request)
        running.start()
        eventually(
            lambda: deployment.state()["tiers"]["standard"][0]["in_flight"] != {},
            20,
            "the request is in flight",
        )
        os.killpg(state.pid, signal.SIGKILL)
        running.join(60)
        events = lines(outcome[0]) if outcome[0].status_code == 200 else []
        assert outcome[0].status_code == 503 or "error" in events[-1]
        assert "[DONE]" not in events

        refused = chat(deployment)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        with pytest.raises(openai.InternalServerError, match="try again"):
            deployment.client().chat.completions.create(model="ratchet", messages=HELLO)  # type: ignore[arg-type]

        eventually(lambda: is_ready(deployment), 180, "service resumed by itself")
        replica = deployment.state()["tiers"]["standard"][0]
        assert replica["instance"] != state.instance
        assert policy in replica["verified"]
        after = chat(deployment, temperature=0)
        assert after.json()["model"] == f"ratchet@{policy}"
        assert after.json()["choices"][0]["message"]["content"] == before
