"""Requests that are wrong, or that no engine or store can hold: refused at the edge, by name, for good."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from rollout.store import completions
from tests.fixtures import rows
from tests.fixtures.databases import Cluster
from tests.server.doubled import Doubled, doubled, say
from tests.server.gateways import tool

CHAT = "/v1/chat/completions"
FEEDBACK = "/v1/rl/feedback"
BIG = {"maximum": 10**30}
MAX_MB = 2
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path, postgresql: Cluster
) -> Iterator[Doubled]:
    url = postgresql.create_database()
    overrides = (f'store.url="{url}"', f"gateway.max_body_mb={MAX_MB}")
    with doubled(tmp_path_factory.mktemp("edge"), tiny_moe, *overrides) as found:
        with found.deployment.store() as store, store.write() as tx:
            completions.insert(tx, rows.completion("c0", trajectory_id="t"))
        yield found
    postgresql.drop_database(url)


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "gpt-4"}, 404, "model", "model_not_found"),
        ({"model": "ratchet@p999999"}, 404, "model", "model_not_found"),
        ({"service_tier": "golden"}, 400, "service_tier", "unknown_service_tier"),
        ({"service_tier": "flex"}, 400, "service_tier", "unknown_service_tier"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": "hi"}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role", None),
        ({"messages": [USER, {"role": "user"}]}, 400, "messages.1.content", None),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages.0.content.0",
            None,
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id", None),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            400,
            "messages.0.tool_calls.0",
            None,
        ),
        ({"temperature": "hot"}, 400, "temperature", "invalid_value"),
        ({"temperature": 3}, 400, "temperature", "invalid_value"),
        ({"n": 0}, 400, "n", "invalid_value"),
        ({"n": True}, 400, "n", "invalid_value"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens", "invalid_value"),
        ({"top_logprobs": 2}, 400, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
        ({"stop": list("abcde")}, 400, "stop", None),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", None),
        ({"metadata": {"k": 1}}, 400, "metadata.k", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k", None),
        ({"tool_choice": "auto"}, 400, "tool_choice", None),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            400,
            "tool_choice",
            None,
        ),
        ({"tools": [{"type": "custom"}]}, 400, "tools.0.type", "unsupported_parameter"),
        ({"functions": []}, 400, "functions", "unsupported_parameter"),
        ({"audio": {}}, 400, "audio", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, 400, "modalities", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort", "unsupported_parameter"),
        ({"frequency": 1}, 400, "frequency", "unknown_parameter"),
        ({"cache_salt": "x"}, 400, "cache_salt", "unknown_parameter"),
        ({"kv_transfer_params": {}}, 400, "kv_transfer_params", "unknown_parameter"),
        ({"priority": -1}, 400, "priority", "unknown_parameter"),
    ],
)
def test_a_wrong_request_is_told_what_to_change(
    running: Doubled,
    body: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
) -> None:
    before = len(running.double.bodies)
    response = running.chat(**body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    assert response.headers["x-request-id"]
    assert len(running.double.bodies) == before, "a wrong request never reaches an engine"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b""])
def test_a_body_that_is_no_object(running: Doubled, content: bytes) -> None:
    response = running.post(content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"seed": 2**70}, "seed"),
        (CHAT, {"seed": -(2**63) - 1}, "seed"),
        (CHAT, {"max_tokens": 2**63}, "max_tokens"),
        (CHAT, {"repetition_penalty": float("inf")}, "repetition_penalty"),
        (CHAT, {"temperature": float("nan")}, "temperature"),
        (CHAT, {"logit_bias": {"1": float("nan")}}, "logit_bias.1"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": BIG}}]},
            "tools.0.function.parameters.maximum",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "k": 10**30}]}]},
            "messages.0.content.0.k",
        ),
        (CHAT, {"metadata": {"trajectory_id": "a\0b"}}, "metadata.trajectory_id"),
        (CHAT, {"metadata": {"task": "a\0b"}}, "metadata.task"),
        (CHAT, {"metadata": {"a\0b": "c"}}, "metadata"),
        (CHAT, {"tools": [tool("a\0b")]}, "tools.0.function.name"),
        (CHAT, {"model": "ratchet@\0"}, "model"),
        (FEEDBACK, {"trajectory_id": "t", "value": 1, "verifier": "a\0"}, "verifier"),
        (FEEDBACK, {"trajectory_id": "a\0", "value": 1}, "trajectory_id"),
        (FEEDBACK, {"completion_id": "a\0", "value": 1}, "completion_id"),
        (FEEDBACK, {"trajectory_id": "t", "error": "a\0"}, "error"),
        (FEEDBACK, {"trajectory_id": "t", "value": 1, "choice": 2**31}, "choice"),
        (FEEDBACK, {"trajectory_id": "t", "value": 1, "choice": 2**70}, "choice"),
        (FEEDBACK, {"trajectory_id": "t", "value": 1, "choice": 128}, "choice"),
        (FEEDBACK, {"trajectory_id": "t", "value": 1e308}, "value"),
        (FEEDBACK, {"trajectory_id": "t", "value": -1000.5}, "value"),
        (FEEDBACK, {"trajectory_id": "t", "value": float("nan")}, "value"),
        (FEEDBACK, {"trajectory_id": "t", "value": 10**400}, "value"),
        ("/v1/rl/tiers/promote", {"policy": "a\0"}, "policy"),
        ("/v1/rl/tiers/rollback", {"reason": "a\0"}, "reason"),
    ],
)
def test_a_value_that_nothing_can_hold(running: Doubled, path: str, body: dict[str, Any], param: str) -> None:
    if path == CHAT:
        body = {"model": "ratchet", "messages": say("hi"), "store": True} | body
    before = len(running.double.bodies)
    response = running.post(json.dumps(body).encode(), path)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value"), error
    assert len(running.double.bodies) == before


@pytest.mark.parametrize(
    "content",
    [b'{"model":"\\ud800"}', b'{"model":"\xff"}', b'{"model":' + b"[" * 100_000, b'{"temperature":1e}'],
)
def test_what_is_no_json(running: Doubled, content: bytes) -> None:
    response = running.post(content)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_the_range_of_a_value_is_said_and_its_ends_are_in(running: Doubled) -> None:
    for value in (1000, -1000.0, True, 0):
        assert running.deployment.call("POST", FEEDBACK, {"trajectory_id": "t", "value": value}).is_success, (
            value
        )
    refused = running.deployment.call("POST", FEEDBACK, {"trajectory_id": "t", "value": 1001})
    assert "from -1000 to 1000" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/rl/trajectories/%00",
        "/v1/rl/policies/a%00b",
        "/v1/models/%00",
        "/v1/rl/trajectories/t?include=%00",
    ],
)
def test_a_nul_in_the_url(running: Doubled, path: str) -> None:
    response = running.deployment.call("GET", path)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
    assert response.headers["x-request-id"]


def test_what_a_model_can_say_can_be_sent_back(running: Doubled) -> None:
    messages = [*say("hi"), {"role": "assistant", "content": "nul \0"}, *say("go on")]
    answer = running.chat(messages=messages)
    assert answer.status_code == 200
    assert running.deployment.recorded(answer.json()["id"]).messages == messages


def test_a_body_beyond_the_limit_is_not_read(running: Doubled) -> None:
    size = MAX_MB * 1_000_000
    assert running.chat(messages=say("x" * (size - 1000))).status_code == 200
    told = running.chat(messages=say("x" * size))
    assert (told.status_code, told.json()["error"]["code"]) == (413, "request_too_large")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {running.deployment.key}\r\n"
    for length in (f"content-length: {10**12}", "transfer-encoding: chunked"):
        with socket.create_connection(("127.0.0.1", running.deployment.port), timeout=10) as connection:
            connection.sendall(f"{head}{length}\r\n\r\n".encode())
            if "chunked" in length:
                chunk = b"x" * 100_000
                for _ in range(size // len(chunk) + 1):
                    connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            assert connection.recv(100).startswith(b"HTTP/1.1 413"), length
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass  # the gateway closes: it waits for nothing more


def test_what_the_database_itself_refuses_is_not_worth_trying_again(running: Doubled) -> None:
    def limit(kind: str) -> None:
        with running.deployment.store() as store, store.write() as tx:
            for column in ("completions ALTER task", "outcomes ALTER verifier"):
                tx.execute(text(f"ALTER TABLE {column} TYPE {kind}"))

    limit("VARCHAR(3)")
    try:
        answer = running.chat(metadata={"task": "longer"})
        feedback = {"trajectory_id": "t", "value": 1, "verifier": "longer"}
        outcome = running.deployment.call("POST", FEEDBACK, feedback)
    finally:
        limit("VARCHAR")
    assert (answer.status_code, outcome.status_code) == (400, 400)
