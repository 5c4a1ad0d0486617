"""Names of trajectories, what continues them, and the policy they stay on; without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from rollout.store import trajectories
from tests.fixtures.databases import Cluster
from tests.fixtures.engines import eventually
from tests.server.doubled import HELLO, Doubled, chat, doubled, publish, say
from tests.server.gateways import lines, running_gateway

LONG = "n" * 257
NAMES = ["run/1", "a b", " a ", "100%", "100%25", "\u65e5\u672c", "caf\u00e9 \U0001f600", "x" * 256]


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path, postgresql: Cluster
) -> Iterator[Doubled]:
    url = postgresql.create_database()
    with doubled(tmp_path_factory.mktemp("names"), tiny_moe, f'store.url="{url}"') as found:
        yield found
    postgresql.drop_database(url)


def turns(running: Doubled, name: str) -> list[dict[str, Any]]:
    with running.deployment.client() as client:
        found: Any = client.get(f"/rl/trajectories/{name}", cast_to=object)
    turns: list[dict[str, Any]] = found["completions"]
    return turns


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_comes_back_whatever_its_characters(running: Doubled, name: str, stream: bool) -> None:
    response = running.chat(metadata={"trajectory_id": name}, stream=stream)
    assert response.status_code == 200, response.text
    if stream:
        assert lines(response)[-1] == "[DONE]"
    assert unquote(response.headers["x-trajectory-id"]) == name
    with running.deployment.store() as store, store.read() as tx:
        assert trajectories.get(tx, "default", name) is not None


@pytest.mark.parametrize("name", [LONG, "a\nb", "a\r\nset-cookie: x", "a\tb", "\x7f", "a\x85b", "a\u2028b"])
def test_a_name_that_none_can_have_is_refused_before_the_engine_is_asked(running: Doubled, name: str) -> None:
    before = len(running.double.bodies)
    response = running.chat(metadata={"trajectory_id": name})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "metadata.trajectory_id")
    assert len(running.double.bodies) == before


@pytest.mark.parametrize("name", [LONG, "a\tb"])
def test_a_session_that_none_can_have_is_refused(running: Doubled, name: str) -> None:
    response = running.deployment.http.post(
        f"{running.deployment.url}/v1/chat/completions",
        json={"model": "ratchet", "messages": HELLO},
        headers={"authorization": f"Bearer {running.deployment.key}", "x-session-id": name},
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-session-id")


def test_one_cache_key_of_many_users_is_not_one_trajectory(running: Doubled) -> None:
    key = "app" * 2000
    names = [
        running.chat(prompt_cache_key=key, messages=say(f"user {i}")).headers["x-trajectory-id"]
        for i in range(3)
    ]
    assert len(set(names)) == 3
    assert all(len(turns(running, name)) == 1 for name in names)


def continued(answer: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = answer["choices"][0]["message"]
    return [*messages, {"role": "assistant", "content": said["content"]}, *say("go on")]


def test_a_turn_is_found_in_the_trajectory_that_is_named(running: Doubled) -> None:
    opening = say("the same opening")
    for name in ("twin-a", "twin-b", "twin-c"):
        answer = running.chat(messages=opening, metadata={"trajectory_id": name}).json()
    running.chat(messages=continued(answer, opening), metadata={"trajectory_id": "twin-a"})
    running.chat(messages=continued(answer, opening), metadata={"trajectory_id": "new"})
    found = [[turn["turn"] for turn in turns(running, name)] for name in ("twin-a", "twin-b", "new")]
    assert found == [[0, 1], [0], [0]]


@pytest.mark.parametrize("arguments", ["9" * 5000, "[" * 100_000, "not json", '{"a": NaN}'])
def test_a_history_with_odd_arguments_can_be_followed_up(running: Doubled, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        *say("use the tool"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    first = running.chat(messages=history)
    assert first.status_code == 200
    again = running.chat(messages=continued(first.json(), history))
    assert again.status_code == 200, again.text
    assert again.headers["x-trajectory-id"] == first.headers["x-trajectory-id"]


def test_a_pinned_request_leaves_the_trajectory_on_what_serves(running: Doubled) -> None:
    deployment = running.deployment
    candidate = publish(deployment)
    deployment.place(candidate)

    def ask(name: str, model: str = "ratchet") -> str:
        answer: str = chat(deployment, model=model, metadata={"trajectory_id": name}).json()["model"]
        return answer

    assert ask("held") == "ratchet@p000000"
    for name in ("held", "pinned"):
        assert ask(name, f"ratchet@{candidate}") == f"ratchet@{candidate}"
        assert ask(name) == "ratchet@p000000"
        assert ask(name, f"ratchet@{candidate}") == f"ratchet@{candidate}"
    assert ask("pinned only", f"ratchet@{candidate}") == f"ratchet@{candidate}"
    running.gateway.kill()
    running.gateway.wait(10)
    with running_gateway(deployment):
        eventually(lambda: deployment.verified(candidate), 20, "adopted")
        for name in ("held", "pinned", "pinned only"):
            assert ask(name) == "ratchet@p000000"
        with deployment.store() as store, store.read() as tx:
            rows = [trajectories.get(tx, "default", name) for name in ("held", "pinned", "pinned only")]
        assert {row and row.policy_id for row in rows} == {"p000000"}
