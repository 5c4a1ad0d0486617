"""Chat through the gateway with the official client, on real engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from rollout.records import CompletionStatus
from rollout.trajectories import PromptRenderer
from tests.fixtures.engines import RunningEngine, eventually
from tests.server.gateways import Deployment, lines, tool

pytestmark = pytest.mark.engine

HELLO = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say something. \u00e9\u4e16"},
]
TOOLS = [tool("lookup", "city"), tool("clock", "zone")]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 3},
    "stop": {"stop": ["e", "a"]},
    "tools": {"tools": TOOLS},
    "required": {
        "tools": [tool("clock", "zone", strict=True)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 96,
    },
}


def ask(deployment: Deployment, **options: Any) -> Any:
    client = deployment.client(_strict_response_validation=True)
    values: dict[str, Any] = {"model": "ratchet", "messages": HELLO, "max_tokens": 12, "store": True}
    return client.chat.completions.create(**(values | options))


def own(engine: RunningEngine, body: dict[str, Any]) -> dict[str, Any]:
    """What the engine itself answers, without the gateway and without our client of it."""
    forced = {"model": "base", "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(engine.socket)), timeout=60) as http:
        response = http.post("http://engine/v1/chat/completions", json=body | forced)
    answer: dict[str, Any] = response.raise_for_status().json()
    return answer


def _calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Ids are drawn anew each time; arguments are text as sampled in a stream, written again otherwise."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def _options(deployment: Deployment, case: str) -> dict[str, Any]:
    forced = {"logit_bias": deployment.no_whitespace()} if case == "required" else {}
    return CASES[case] | forced


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_record_is_what_the_engine_sampled(
    deployment: Deployment, engine_standard: RunningEngine, case: str, stream: bool
) -> None:
    options = {"max_tokens": 12} | _options(deployment, case) | {"seed": 7, "temperature": 1.0}
    if stream:
        chunks = list(ask(deployment, stream=True, stream_options={"include_usage": True}, **options))
        completion_id = chunks[0].id
        assert {chunk.id for chunk in chunks} == {completion_id}
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert all(chunk.system_fingerprint == "p000000-standard" for chunk in chunks)
    else:
        completion_id = ask(deployment, **options).id
    record = deployment.recorded(completion_id)
    theirs = own(engine_standard, {"messages": HELLO, **options})
    assert record.status is CompletionStatus.COMPLETED
    assert record.prompt_token_ids == theirs["prompt_token_ids"]
    assert len(record.choices) == len(theirs["choices"]) == options.get("n", 1)
    for ours, choice in zip(record.choices, theirs["choices"], strict=True):
        assert ours.token_ids == choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert ours.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert ours.finish_reason == choice["finish_reason"]
        assert (ours.message["content"] or "") == (choice["message"]["content"] or "")
        assert _calls(ours.message) == _calls(choice["message"])
        assert bool(_calls(ours.message)) is (case == "required")
    assert record.trainable is (case != "required")


@pytest.mark.parametrize("case", CASES)
def test_a_stream_says_what_the_whole_answer_says(deployment: Deployment, case: str) -> None:
    options = _options(deployment, case) | {"temperature": 1.0, "seed": 11}
    whole = ask(deployment, **options)
    with deployment.client().chat.completions.stream(
        **({"model": "ratchet", "messages": HELLO, "max_tokens": 12, "store": True} | options)  # type: ignore[arg-type]
    ) as stream:
        for _ in stream:
            pass
        accumulated = stream.current_completion_snapshot
    for ours, theirs in zip(accumulated.choices, whole.choices, strict=True):
        assert ours.finish_reason == theirs.finish_reason
        assert (ours.message.content or "") == (theirs.message.content or "")
        assert _calls(ours.message.to_dict()) == _calls(theirs.message.to_dict())
    assert accumulated.model == whole.model


def test_nothing_that_was_only_captured_reaches_the_caller(deployment: Deployment) -> None:
    answer = ask(deployment).model_dump()
    assert answer["choices"][0]["logprobs"] is None
    assert not {"prompt_token_ids", "kv_transfer_params"} & set(answer)
    assert "token_ids" not in answer["choices"][0]
    for chunk in ask(deployment, stream=True):
        assert chunk.choices, "no usage chunk unless it was asked for"
        assert chunk.choices[0].logprobs is None
        assert "token_ids" not in chunk.choices[0].model_dump()


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_ids_on_request(deployment: Deployment, stream: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "extra_body": {"return_token_ids": True}}
    answer = ask(deployment, stream=stream, **options)
    chunks = list(answer) if stream else [answer]
    entries = [entry for chunk in chunks for entry in (chunk.choices[0].logprobs or _nothing()).content]
    ids = [i for chunk in chunks for i in chunk.choices[0].model_dump().get("token_ids") or []]
    record = deployment.recorded(chunks[0].id)
    assert ids == record.choices[0].token_ids
    assert [entry.logprob for entry in entries] == pytest.approx(record.choices[0].logprobs)
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert chunks[0].model_dump()["prompt_token_ids"] == record.prompt_token_ids


class _nothing:
    content: list[Any] = []


def test_a_stream_without_a_store_flag_leaves_no_record(deployment: Deployment) -> None:
    answer = ask(deployment, store=False)
    with pytest.raises(AssertionError):
        deployment.recorded(answer.id)


def test_the_wire_format_of_a_stream(deployment: Deployment) -> None:
    body = {"model": "ratchet", "messages": HELLO, "max_tokens": 4, "stream": True, "store": True}
    events = lines(deployment.call("POST", "/v1/chat/completions", body))
    assert events[-1] == "[DONE]"
    assert [event["object"] for event in events[:-1]] == ["chat.completion.chunk"] * (len(events) - 1)
    roles = [event["choices"][0]["delta"].get("role") for event in events[:-1]]
    assert roles[0] == "assistant"
    assert not any(roles[1:])
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]].count("length") == 1


@pytest.mark.parametrize(
    ("model", "service_tier", "tier", "wire"),
    [
        ("ratchet", None, "standard", "default"),
        ("ratchet", "default", "standard", "default"),
        ("ratchet", "fast", "fast", "fast"),
        ("ratchet", "priority", "fast", "fast"),
        ("ratchet", "flex", "fast", "flex"),
        ("ratchet-fast", None, "fast", "fast"),
        ("ratchet-fast@p000000", None, "fast", "fast"),
        ("ratchet@p000000", "auto", "standard", "default"),
    ],
)
def test_tiers_by_field_and_by_alias(
    deployment: Deployment, model: str, service_tier: Any, tier: str, wire: str
) -> None:
    answer = ask(deployment, model=model, **({"service_tier": service_tier} if service_tier else {}))
    assert answer.model == "ratchet@p000000"
    assert answer.service_tier == wire
    assert answer.system_fingerprint == f"p000000-{tier}"
    assert deployment.recorded(answer.id).tier == tier


def test_models(deployment: Deployment) -> None:
    client = deployment.client(_strict_response_validation=True)
    names = [model.id for model in client.models.list()]
    assert names[:2] == ["ratchet", "ratchet-fast"]
    assert "ratchet@p000000" in names
    assert client.models.retrieve("ratchet@p000000").id == "ratchet@p000000"
    with pytest.raises(openai.NotFoundError, match="use one of"):
        client.models.retrieve("gpt-4")


def test_many_at_once(deployment: Deployment) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.chat.completions.create(
            model=["ratchet", "ratchet-fast"][i % 2],
            messages=[{"role": "user", "content": f"Number {i}"}],
            max_tokens=8,
            store=True,
            stream=True,
        )
        ids = {chunk.id async for chunk in stream}
        assert len(ids) == 1
        return ids.pop()

    async def all_of_them() -> list[str]:
        async with deployment.async_client() as client:
            return await asyncio.gather(*(one(client, i) for i in range(24)))

    for completion_id in asyncio.run(all_of_them()):
        assert deployment.recorded(completion_id).trainable


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_ends_the_work(
    deployment: Deployment, engine_standard: RunningEngine, stream: bool
) -> None:
    name = f"left-{stream}"
    body = {
        "model": "ratchet",
        "messages": HELLO,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": stream,
        "store": True,
        "metadata": {"trajectory_id": name},
    }
    headers = {"authorization": f"Bearer {deployment.key}"}
    url = f"{deployment.url}/v1/chat/completions"
    if stream:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            for _, _line in zip(range(8), response.iter_lines(), strict=False):
                pass
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=1.0)

    async def running() -> float:
        async with engine_standard.client() as engine:
            return (await engine.metrics())["vllm:num_requests_running"]

    eventually(lambda: asyncio.run(running()) == 0, 5, "the engine stopped working for it")
    if stream:  # of an answer that was never begun there is nothing to record
        path = f"/v1/rl/trajectories/{name}"
        eventually(lambda: deployment.call("GET", path).status_code == 200, 5, "its record is committed")
        found = deployment.call("GET", path).json()["completions"][0]
        assert found["status"] == "cancelled"
        assert found["trainable"] is False
        assert 0 < found["usage"]["completion_tokens"] < 900


def test_prompts_render_as_the_engine_renders_them(deployment: Deployment) -> None:
    renderer = PromptRenderer(deployment.model_dir)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"city": "Oslo"}'},
    }
    conversations: list[tuple[list[dict[str, Any]], Any]] = [
        ([{"role": "user", "content": "hi"}], None),
        (HELLO, TOOLS),
        ([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}], TOOLS),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], None),
        (
            [
                *HELLO,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain \u2028 and more"},
            ],
            TOOLS,
        ),
    ]
    for messages, tools in conversations:
        record = deployment.recorded(ask(deployment, messages=messages, tools=tools or openai.omit).id)
        assert record.prompt_token_ids == renderer.prompt_ids(record.messages, record.tools), json.dumps(
            messages
        )
