"""One episode: ask the policy through the public API, run its tool calls, tell it the results, judge.

It is an ordinary client: the `openai` package, the chat completions route, and the feedback route that any
user has. Invariant: an episode that could not be run to its end (a refused or broken request) has a
`fault` and no value; it is never a zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from rollout.records import PRIORITY_HEADER
from rollout.tasks import Task
from rollout.tasks.world import World
from rollout.verifiers import Attempt, Verdict, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How an episode asks: everything about its requests that is not the task."""

    model: str = "ratchet"
    service_tier: str = "default"
    store: bool = True
    stream: bool = False
    temperature: float = 1.0
    seed: int | None = None
    """Sampling seed; with one, a policy gives a task the same answer again."""
    evaluation: bool = False
    """The gateway puts it behind interactive requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of an episode, as the caller measured it."""

    sent_at: float
    """Unix seconds."""
    ttft_s: float | None
    """Time to the first event of the stream; None when not streamed, or failed before."""
    seconds: float
    tier: str
    policy: str | None
    """Which policy answered; None when the request failed."""
    completion_id: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Episode:
    task: Task
    trajectory_id: str
    tier: str
    requests: list[Request] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What followed ``task.messages``."""
    verdict: Verdict | None = None
    fault: str | None = None

    @property
    def success(self) -> bool | None:
        """None when the episode could not be judged."""
        value = None if self.verdict is None else self.verdict.value
        return None if value is None else value == 1.0

    @property
    def policies(self) -> set[str]:
        return {request.policy for request in self.requests if request.policy is not None}

    @property
    def completion_tokens(self) -> int:
        return sum(request.completion_tokens for request in self.requests)


@dataclass(slots=True)
class _Answer:
    """One completion, put together from a body or from chunks."""

    message: dict[str, Any]
    completion_id: str = ""
    fingerprint: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None


async def run(client: openai.AsyncOpenAI, task: Task, ask: Ask, trajectory_id: str) -> Episode:
    """Attempt `task` and judge it. Only a request's failure is caught: it becomes the episode's fault."""
    episode = Episode(task=task, trajectory_id=trajectory_id, tier=ask.service_tier)
    world = World(task.world)
    for turn in range(task.max_turns):
        answer = await _request(client, episode, ask)
        if answer is None:
            break
        episode.messages.append(answer.message)
        calls = answer.message.get("tool_calls")
        if not calls:
            break
        results = [_result(world, call) for call in calls]
        if turn + 1 < task.max_turns:
            episode.messages += results
    episode.verdict = verify(task, Attempt(messages=episode.messages, fault=episode.fault))
    return episode


async def report(client: openai.AsyncOpenAI, episode: Episode) -> None:
    """Write the verdict as an outcome, on the completion or, with several turns, on the trajectory.

    The id is made of what was judged and by whom, so a repeated report is the same outcome.
    """
    verdict = episode.verdict
    answered = [request for request in episode.requests if request.completion_id is not None]
    if verdict is None or not answered:
        return
    single = len(answered) == 1
    about = (
        {"completion_id": answered[0].completion_id} if single else {"trajectory_id": episode.trajectory_id}
    )
    judgement = {"value": verdict.value} if verdict.error is None else {"error": verdict.error}
    await client.post(
        "/rl/feedback",
        cast_to=object,
        body={
            "id": f"{episode.trajectory_id}:{verdict.verifier}:{verdict.version}",
            **about,
            **judgement,
            "metric": "reward",
            "source": "verifier",
            "verifier": verdict.verifier,
            "verifier_version": verdict.version,
        },
    )


async def _request(client: openai.AsyncOpenAI, episode: Episode, ask: Ask) -> _Answer | None:
    """Ask for the next turn and note how it went; None (and a fault) when it failed."""
    sent_at, start = time.time(), time.perf_counter()
    body = _body(episode, ask)
    try:
        answer = await _streamed(client, body, start) if ask.stream else await _whole(client, body)
    except openai.OpenAIError as error:
        episode.fault = f"{type(error).__name__}: {error}"
        episode.requests.append(
            Request(
                sent_at=sent_at,
                ttft_s=None,
                seconds=time.perf_counter() - start,
                tier=ask.service_tier,
                policy=None,
                completion_id=None,
                error=episode.fault,
            )
        )
        return None
    policy, _, tier = answer.fingerprint.partition("-")
    episode.requests.append(
        Request(
            sent_at=sent_at,
            ttft_s=answer.ttft_s,
            seconds=time.perf_counter() - start,
            tier=tier or ask.service_tier,
            policy=policy or None,
            completion_id=answer.completion_id,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
        )
    )
    return answer


def _body(episode: Episode, ask: Ask) -> dict[str, Any]:
    task = episode.task
    body: dict[str, Any] = {
        "model": ask.model,
        "messages": task.messages + episode.messages,
        "tools": task.tools,
        "temperature": ask.temperature,
        "max_completion_tokens": task.max_tokens,
        "service_tier": ask.service_tier,
        "store": ask.store,
        "metadata": {"trajectory_id": episode.trajectory_id, "task": task.id},
    }
    if ask.seed is not None:
        body["seed"] = ask.seed
    if ask.evaluation:
        body["extra_headers"] = {PRIORITY_HEADER: "evaluation"}
    return body


async def _whole(client: openai.AsyncOpenAI, body: dict[str, Any]) -> _Answer:
    completion = await client.chat.completions.create(**body)
    said = completion.choices[0].message
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.tool_calls:
        message["tool_calls"] = [call.model_dump(exclude_none=True) for call in said.tool_calls]
    usage = completion.usage
    return _Answer(
        message=message,
        completion_id=completion.id,
        fingerprint=completion.system_fingerprint or "",
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
    )


async def _streamed(client: openai.AsyncOpenAI, body: dict[str, Any], start: float) -> _Answer:
    stream: AsyncIterator[ChatCompletionChunk] = await client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    answer = _Answer(message={"role": "assistant", "content": None})
    finished = False
    async for chunk in stream:
        if answer.ttft_s is None:
            answer.ttft_s = time.perf_counter() - start
        finished = _take(answer, chunk) or finished
    if not finished:
        # A clean end without a finish reason is a service that died mid-answer; the SDK does not say so.
        raise openai.OpenAIError("the stream ended before the answer did")
    return answer


def _take(answer: _Answer, chunk: ChatCompletionChunk) -> bool:
    """Add one chunk to `answer`; True when it carries the finish reason."""
    answer.completion_id = chunk.id or answer.completion_id
    answer.fingerprint = chunk.system_fingerprint or answer.fingerprint
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.completion_tokens = chunk.usage.completion_tokens
    if not chunk.choices:
        return False
    delta = chunk.choices[0].delta
    if delta.content:
        answer.message["content"] = (answer.message["content"] or "") + delta.content
    for piece in delta.tool_calls or []:
        calls = answer.message.setdefault("tool_calls", [])
        while len(calls) <= piece.index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[piece.index]
        call["id"] = piece.id or call["id"]
        if piece.function is not None:
            call["function"]["name"] = piece.function.name or call["function"]["name"]
            call["function"]["arguments"] += piece.function.arguments or ""
    return chunk.choices[0].finish_reason is not None


def _result(world: World, call: dict[str, Any]) -> dict[str, Any]:
    """The tool message that answers `call`; what cannot be parsed is told so, as a tool would."""
    function = call["function"]
    try:
        answer = world.execute(function["name"], json.loads(function["arguments"]))
    except (ValueError, RecursionError):
        answer = {"error": "arguments are not JSON"}
    return {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(answer)}
