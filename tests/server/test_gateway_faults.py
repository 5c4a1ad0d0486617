"""What callers are told when something is wrong, over a small server that speaks the engine's protocol."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollout.records import PRIORITY_HEADER, Scope
from server import keys
from tests.fixtures.engines import eventually, write_config
from tests.server.doubled import HELLO, chat, say
from tests.server.engine_double import MALFORMED, EngineDouble, running_double
from tests.server.gateways import Deployment, is_ready, lines, running_gateway


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def double(home: Path) -> Iterator[EngineDouble]:
    with running_double(home, "standard-0") as running:
        yield running


@pytest.fixture(scope="module")
def prepared(home: Path, tiny_moe: Path) -> Deployment:
    config = write_config(home / "deployment.toml", home, tiny_moe, {"standard": "float32"})
    found = Deployment(config, home, ['model.warm_start=""'])
    found.prepare()
    return found


@pytest.fixture(scope="module")
def process(prepared: Deployment, double: EngineDouble) -> Iterator[subprocess.Popen[bytes]]:
    with running_gateway(prepared) as running:
        yield running


@pytest.fixture
def deployment(prepared: Deployment, process: subprocess.Popen[bytes]) -> Deployment:
    return prepared


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("DELETE", "/v1/models", 405), ("GET", "/v1/rl/policies/p1", 404)],
)
def test_every_error_is_in_the_envelope(deployment: Deployment, method: str, path: str, status: int) -> None:
    response = deployment.call(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic x", "Bearer"])
def test_a_bad_key(deployment: Deployment, header: str | None) -> None:
    headers = {"authorization": header} if header else {}
    response = httpx.post(f"{deployment.url}/v1/chat/completions", json={}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


def test_scopes(deployment: Deployment) -> None:
    with deployment.store() as store:
        inference = keys.create(store, "default", [Scope.INFERENCE])
        outcomes = keys.create(store, "default", [Scope.OUTCOMES_WRITE])
    answer = chat(deployment).json()
    refused = [
        ("POST", "/v1/rl/tiers/promote", {"policy": "p000000"}, inference),
        ("POST", "/v1/rl/tiers/rollback", {}, inference),
        ("POST", "/v1/rl/learning", {"enabled": True}, inference),
        ("POST", "/v1/chat/completions", {"model": "ratchet", "messages": HELLO}, outcomes),
    ]
    for method, path, body, key in refused:
        response = deployment.call(method, path, body, key=key)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "insufficient_scope"), path
    feedback = {"completion_id": answer["id"], "value": 1}
    assert deployment.call("POST", "/v1/rl/feedback", feedback, key=inference).json()["trusted"] is False
    assert deployment.call("POST", "/v1/rl/feedback", feedback, key=outcomes).json()["trusted"] is True


def test_line_separators_in_text_do_not_split_an_event(deployment: Deployment) -> None:
    events = lines(chat(deployment, stream=True))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert text == "one two\u2028\x85\u2029 three"


def test_what_goes_to_the_engine(deployment: Deployment, double: EngineDouble) -> None:
    chat(deployment, max_tokens=5, max_completion_tokens=4, user="me", metadata={"a": "b"}, seed=3)
    sent = double.bodies[-1]
    assert sent["max_completion_tokens"] == 4
    assert sent["seed"] == 3
    assert len(sent["cache_salt"]) == 32
    assert sent["model"] == "base"
    assert not {"max_tokens", "user", "metadata", "store", "service_tier"} & set(sent)


@pytest.mark.parametrize(
    ("headers", "priority"), [({}, 0), ({PRIORITY_HEADER: "batch"}, 10), ({PRIORITY_HEADER: "evaluation"}, 5)]
)
def test_what_may_wait_goes_to_the_engine_as_such(
    deployment: Deployment, double: EngineDouble, headers: dict[str, str], priority: int
) -> None:
    messages: Any = say("hello")
    deployment.client(default_headers=headers).chat.completions.create(model="ratchet", messages=messages)
    assert double.bodies[-1]["priority"] == priority


@pytest.mark.parametrize(
    ("fault", "status", "code"), [("refused", 400, "invalid_request"), ("crashed", 503, "engine_unavailable")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_comes_before_the_stream(
    deployment: Deployment, fault: str, status: int, code: str, stream: bool
) -> None:
    response = chat(deployment, messages=say(f"fault:{fault}"), stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) is (status == 503)
    eventually(lambda: is_ready(deployment), 10, "back in rotation")


@pytest.mark.parametrize("fault", sorted(MALFORMED))
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_malformed_ends_with_an_error_and_says_so(
    deployment: Deployment, fault: str, stream: bool
) -> None:
    name = f"{fault}-{stream}"
    response = chat(
        deployment, messages=say(f"fault:{fault}"), stream=stream, metadata={"trajectory_id": name}
    )
    assert response.status_code == (200 if stream else 503)
    told = lines(response)[-1]["error"] if stream else response.json()["error"]
    assert told["code"] in ("engine_unavailable", "server_error")
    if stream:
        found = deployment.call("GET", f"/v1/rl/trajectories/{name}").json()["completions"][0]
        assert found["status"] == "error"
        assert "left" not in found["error"]
    eventually(lambda: is_ready(deployment), 10, "back in rotation")


@pytest.mark.parametrize("fault", ["error event", "cut", "no finish", "aborted"])
def test_a_fault_in_a_stream_is_an_error_event_without_done(deployment: Deployment, fault: str) -> None:
    name = fault.replace(" ", "-")
    response = chat(deployment, messages=say(f"fault:{fault}"), stream=True, metadata={"trajectory_id": name})
    events = lines(response)
    assert response.status_code == 200
    assert "error" in events[-1]
    assert events[-1]["error"]["code"] == "engine_unavailable"
    assert not any(event.get("choices", [{}])[0].get("finish_reason") for event in events[:-1])
    found = deployment.call("GET", f"/v1/rl/trajectories/{name}").json()["completions"][0]
    assert (found["status"], found["trainable"]) == ("error", False)
    eventually(lambda: is_ready(deployment), 10, "back in rotation")
    client = deployment.client()
    with pytest.raises(openai.APIError, match="went away"):
        list(client.chat.completions.create(model="ratchet", messages=say(f"fault:{fault}"), stream=True))  # type: ignore[arg-type]
    eventually(lambda: is_ready(deployment), 10, "back in rotation")


@pytest.mark.parametrize(
    ("fault", "stream"), [("wrong usage", False), ("wrong usage", True), ("fewer logprobs", False)]
)
def test_counts_that_disagree_are_recorded_and_never_train(
    deployment: Deployment, fault: str, stream: bool
) -> None:
    answer = chat(deployment, messages=say(f"fault:{fault}"), stream=stream)
    completion_id = (lines(answer)[0] if stream else answer.json())["id"]
    record = deployment.recorded(completion_id)
    assert (record.error or "").startswith("capture_mismatch")
    assert not record.trainable
    # The double has no metrics of its own, which costs nobody the gateway's.
    metrics = httpx.get(f"{deployment.url}/metrics").raise_for_status().text
    assert "ratchet_capture_mismatches_total" in metrics
    assert "ratchet_capture_mismatches_total 0.0" not in metrics


def test_the_engine_is_told_at_once_when_the_caller_leaves(
    deployment: Deployment, double: EngineDouble
) -> None:
    before = double.cancelled
    body = {"model": "ratchet", "messages": say("fault:slow"), "stream": True}
    headers = {"authorization": f"Bearer {deployment.key}"}
    with httpx.stream(
        "POST", f"{deployment.url}/v1/chat/completions", json=body, headers=headers
    ) as response:
        next(response.iter_lines())
    eventually(lambda: double.cancelled > before, 5, "the engine's request was closed")


def test_disk_full_withholds_the_end(deployment: Deployment, process: subprocess.Popen[bytes]) -> None:
    chat(deployment)  # the key is known and the file is open
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        stream = lines(chat(deployment, stream=True, metadata={"trajectory_id": "full"}))
        whole = chat(deployment)
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert stream[-1]["error"]["code"] == "record_not_committed"
    assert not any(event.get("choices", [{}])[0].get("finish_reason") for event in stream[:-1])
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "record_not_committed")
    assert deployment.call("GET", "/v1/rl/trajectories/full").status_code == 404
    answer = chat(deployment)
    assert answer.status_code == 200
    assert deployment.recorded(answer.json()["id"]).trainable


def test_without_its_engine_a_tier_says_503_and_comes_back(prepared: Deployment, tmp_path: Path) -> None:
    other = tmp_path / "home"
    deployment = Deployment(
        write_config(tmp_path / "d.toml", other, prepared.model_dir, {"standard": "float32"}),
        other,
        ['model.warm_start=""'],
    )
    deployment.prepare()
    with running_gateway(deployment, wait=False):
        eventually(lambda: _status(deployment) is not None, 60, "the gateway listens")
        assert _status(deployment) == "starting"
        refused = chat(deployment)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "engine_unavailable"
        with running_double(other, "standard-0"):
            eventually(lambda: is_ready(deployment), 30, "the engine was found")
            assert chat(deployment).status_code == 200
        eventually(lambda: _status(deployment) == "starting", 30, "the loss was noticed")
        assert chat(deployment).status_code == 503
        with running_double(other, "standard-0"):
            eventually(lambda: chat(deployment).status_code == 200, 30, "service resumed")


def _status(deployment: Deployment) -> str | None:
    try:
        status: str = httpx.get(f"{deployment.url}/healthz").json()["status"]
        return status
    except (httpx.TransportError, json.JSONDecodeError):
        return None


def test_a_restart_finds_what_was_recorded_after_kill_9(prepared: Deployment, tmp_path: Path) -> None:
    home = tmp_path / "home"
    deployment = Deployment(
        write_config(tmp_path / "d.toml", home, prepared.model_dir, {"standard": "float32"}),
        home,
        ['model.warm_start=""'],
    )
    deployment.prepare()
    seen = []
    with running_double(home, "standard-0"):
        for _ in range(3):
            with running_gateway(deployment) as process:
                for i in range(5):
                    events = lines(chat(deployment, stream=True, metadata={"trajectory_id": f"t{i}"}))
                    assert events[-1] == "[DONE]"
                    seen.append(events[0]["id"])
                process.kill()
                process.wait(10)
    for completion_id in seen:
        assert deployment.recorded(completion_id).trainable


def test_learning_is_switched_in_the_store(deployment: Deployment) -> None:
    assert deployment.call("GET", "/v1/rl/learning").json()["enabled"] is False
    assert deployment.call("POST", "/v1/rl/learning", {"enabled": True}).json()["enabled"] is True
    assert deployment.call("GET", "/v1/rl/learning").json()["enabled"] is True
    assert deployment.call("POST", "/v1/rl/learning", {"enabled": False}).json()["enabled"] is False
