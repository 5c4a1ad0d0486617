"""Trajectories over several turns, on real engines: names, joins and breaks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.server.gateways import Deployment, tool

pytestmark = pytest.mark.engine

TOOLS = [tool("clock", "zone", strict=True)]


def ask(deployment: Deployment, messages: list[dict[str, Any]], **options: Any) -> Any:
    values: dict[str, Any] = {"model": "ratchet", "messages": messages, "max_tokens": 48, "store": True}
    return deployment.client().chat.completions.create(**(values | options))


def trajectory(deployment: Deployment, name: str) -> dict[str, Any]:
    response = deployment.call("GET", f"/v1/rl/trajectories/{name}?include=tokens")
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("named", [True, False])
def test_three_turns_with_tools_are_one_sequence(deployment: Deployment, named: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    options["logit_bias"] = deployment.no_whitespace()
    if named:
        options["metadata"] = {"trajectory_id": "three-turns", "task": "clocks"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What time is it? {named}"}]
    name = ""
    for turn in range(3):
        raw = deployment.client().chat.completions.with_raw_response.create(
            model="ratchet",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=96,
            store=True,
            **options,
        )
        name = raw.headers["x-trajectory-id"]
        answer = raw.parse().choices[0]
        assert answer.message.tool_calls, answer
        messages.append(answer.message.to_dict())
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"{turn} o'clock"}
            for call in answer.message.tool_calls
        ]
    found = trajectory(deployment, name)
    turns = found["completions"]
    assert [turn["turn"] for turn in turns] == [0, 1, 2]
    assert [turn["joint"] for turn in turns] == ["start", "joined", "joined"]
    assert found["breaks"] == 0
    for before, after in itertools.pairwise(turns):
        sequence = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
        assert after["prompt_token_ids"][: len(sequence)] == sequence
        assert len(after["prompt_token_ids"]) > len(sequence)
    if named:
        assert name == "three-turns"
        assert {turn["task"] for turn in turns} == {"clocks"}


def test_a_text_that_was_rewritten_breaks_and_is_counted(deployment: Deployment) -> None:
    options = {"metadata": {"trajectory_id": "rewritten"}}
    first = [{"role": "user", "content": "Hello"}]
    ask(deployment, first, **options)
    ask(
        deployment,
        [
            *first,
            {"role": "assistant", "content": "I never said this."},
            {"role": "user", "content": "Go on"},
        ],
        **options,
    )
    found = trajectory(deployment, "rewritten")
    assert [turn["joint"] for turn in found["completions"]] == ["start", "break"]
    assert "do not continue" in found["completions"][1]["break_reason"]
    assert found["breaks"] == 1


def test_a_stop_string_breaks_with_its_reason(deployment: Deployment) -> None:
    first = [{"role": "user", "content": "Hello"}]
    options: dict[str, Any] = {"metadata": {"trajectory_id": "stopped"}, "stop": ["e", "a", "o", "i"]}
    said = ask(deployment, first, **options).choices[0].message.content
    ask(
        deployment,
        [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on"}],
        **options,
    )
    assert "stop string" in trajectory(deployment, "stopped")["completions"][1]["break_reason"]


def test_two_trajectories_that_say_the_same_keep_apart(deployment: Deployment) -> None:
    first = [{"role": "user", "content": "Say the same"}]
    for name in ("twin-a", "twin-b"):
        said = (
            ask(deployment, first, temperature=0, metadata={"trajectory_id": name}).choices[0].message.content
        )
    more = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "And more"}]
    ask(deployment, more, metadata={"trajectory_id": "twin-a"})
    assert [turn["joint"] for turn in trajectory(deployment, "twin-a")["completions"]] == ["start", "joined"]
    assert len(trajectory(deployment, "twin-b")["completions"]) == 1


def test_a_name_by_header(deployment: Deployment) -> None:
    ask(deployment, [{"role": "user", "content": "Hello"}], extra_headers={"x-session-id": "by-header"})
    assert trajectory(deployment, "by-header")["turns"] == 1


def test_feedback_on_completion_and_trajectory(deployment: Deployment) -> None:
    answer = ask(deployment, [{"role": "user", "content": "Rate me"}], metadata={"trajectory_id": "rated"})
    by_completion = {
        "id": "mine",
        "completion_id": answer.id,
        "value": True,
        "source": "verifier",
        "verifier": "v",
    }
    first = deployment.call("POST", "/v1/rl/feedback", by_completion)
    assert (first.status_code, first.json()["object"], first.json()["value"]) == (201, "rl.outcome", 1.0)
    assert first.json()["trusted"] is True
    assert deployment.call("POST", "/v1/rl/feedback", by_completion).status_code == 200
    assert deployment.call("POST", "/v1/rl/feedback", by_completion | {"value": 0}).status_code == 412
    failed = {"trajectory_id": "rated", "error": "the sandbox died", "source": "verifier"}
    assert deployment.call("POST", "/v1/rl/feedback", failed).json()["value"] is None
    assert len(trajectory(deployment, "rated")["outcomes"]) == 2


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"value": 1}, 400, "completion_id"),
        ({"completion_id": "x", "trajectory_id": "y", "value": 1}, 400, "completion_id"),
        ({"completion_id": "x"}, 400, "value"),
        ({"completion_id": "x", "value": 1, "error": "e"}, 400, "value"),
        ({"completion_id": "x", "value": "good"}, 400, "value"),
        ({"completion_id": "chatcmpl-unknown", "value": 1}, 404, None),
        ({"trajectory_id": "unknown", "value": 1}, 404, None),
        ({"completion_id": "x", "value": 1, "colour": "red"}, 400, "colour"),
    ],
)
def test_feedback_that_is_wrong(
    deployment: Deployment, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = deployment.call("POST", "/v1/rl/feedback", body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param or str(response.json()["error"]["param"]).startswith(
        str(param)
    )
