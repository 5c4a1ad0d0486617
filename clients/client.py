"""The official `openai` client plus `.rl`: report outcomes, read trajectories, see and move policies.

    client = Ratchet()                      # OPENAI_BASE_URL and OPENAI_API_KEY, like any OpenAI client
    client.rl.feedback(completion_id=answer.id, value=1.0)

`clients.calls` builds every request; the classes here only send it, once blocking and once not. Errors,
retries and time-outs are the official client's.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypedDict, TypeVar, Unpack

from openai import AsyncOpenAI, BaseModel, OpenAI

from clients import calls
from clients.calls import Call, Judgement, Learning, Outcome, Policy, Serving, Source, Trajectory

T = TypeVar("T", bound=BaseModel)


class Feedback(TypedDict, total=False):
    """Arguments of `feedback`: fields of `clients.calls.Judgement`."""

    completion_id: str
    trajectory_id: str
    choice: int
    value: float | bool
    error: str
    metric: str
    source: Source
    verifier: str
    verifier_version: str
    supersedes: str
    id: str


class Ratchet(OpenAI):
    """`openai.OpenAI` with `.rl`."""

    @cached_property
    def rl(self) -> Rl:
        return Rl(self)


class AsyncRatchet(AsyncOpenAI):
    """`openai.AsyncOpenAI` with `.rl`."""

    @cached_property
    def rl(self) -> AsyncRl:
        return AsyncRl(self)


def send(client: OpenAI, call: Call[T]) -> T:
    if call.method == "get":
        return client.get(call.path, cast_to=call.answer, options={"params": call.params})
    return client.post(call.path, cast_to=call.answer, body=call.body)


async def send_async(client: AsyncOpenAI, call: Call[T]) -> T:
    if call.method == "get":
        return await client.get(call.path, cast_to=call.answer, options={"params": call.params})
    return await client.post(call.path, cast_to=call.answer, body=call.body)


class Rl:
    """`client.rl`."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self.trajectories = Trajectories(client)
        self.policies = Policies(client)
        self.tiers = Tiers(client)
        self.learning = LearningSwitch(client)

    def feedback(self, **judgement: Unpack[Feedback]) -> Outcome:
        """Judge one completion (`completion_id`, and `choice` of several) or one `trajectory_id`."""
        return send(self._client, calls.feedback(Judgement(**judgement)))


class Trajectories:
    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def retrieve(self, trajectory_id: str, *, tokens: bool = False) -> Trajectory:
        """The whole trajectory, page by page; `tokens` adds ids and log-probs to every completion."""
        found = page = send(self._client, calls.trajectory(trajectory_id, tokens))
        while page.has_more:
            page = send(self._client, calls.trajectory(trajectory_id, tokens, page.last_id))
            found.completions += page.completions
        found.has_more, found.last_id = page.has_more, page.last_id
        return found


class Policies:
    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def list(self) -> list[Policy]:
        return send(self._client, calls.policies()).data

    def retrieve(self, policy_id: str) -> Policy:
        return send(self._client, calls.policy(policy_id))


class Tiers:
    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def retrieve(self) -> Serving:
        return send(self._client, calls.tiers())

    def promote(self, policy: str, *, expected: str | None = None) -> Serving:
        """Serve `policy` to everyone; fails with 412 when `expected` is given and not the promoted one."""
        return send(self._client, calls.promote(policy, expected))

    def rollback(self, *, expected: str | None = None, reason: str | None = None) -> Serving:
        """Serve the policy before the promoted one again."""
        return send(self._client, calls.rollback(expected, reason))

    def restart(self, replica: str, *, force: bool = False) -> Serving:
        """Start one engine anew once its requests are answered; `force` also when its tier has no other."""
        return send(self._client, calls.restart(replica, force))


class LearningSwitch:
    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def retrieve(self) -> Learning:
        return send(self._client, calls.learning())

    def set(self, enabled: bool) -> Learning:
        return send(self._client, calls.set_learning(enabled))


class AsyncRl:
    """`client.rl` of the asynchronous client."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self.trajectories = AsyncTrajectories(client)
        self.policies = AsyncPolicies(client)
        self.tiers = AsyncTiers(client)
        self.learning = AsyncLearningSwitch(client)

    async def feedback(self, **judgement: Unpack[Feedback]) -> Outcome:
        """Judge one completion (`completion_id`, and `choice` of several) or one `trajectory_id`."""
        return await send_async(self._client, calls.feedback(Judgement(**judgement)))


class AsyncTrajectories:
    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def retrieve(self, trajectory_id: str, *, tokens: bool = False) -> Trajectory:
        """The whole trajectory, page by page; `tokens` adds ids and log-probs to every completion."""
        found = page = await send_async(self._client, calls.trajectory(trajectory_id, tokens))
        while page.has_more:
            page = await send_async(self._client, calls.trajectory(trajectory_id, tokens, page.last_id))
            found.completions += page.completions
        found.has_more, found.last_id = page.has_more, page.last_id
        return found


class AsyncPolicies:
    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def list(self) -> list[Policy]:
        return (await send_async(self._client, calls.policies())).data

    async def retrieve(self, policy_id: str) -> Policy:
        return await send_async(self._client, calls.policy(policy_id))


class AsyncTiers:
    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def retrieve(self) -> Serving:
        return await send_async(self._client, calls.tiers())

    async def promote(self, policy: str, *, expected: str | None = None) -> Serving:
        """Serve `policy` to everyone; fails with 412 when `expected` is given and not the promoted one."""
        return await send_async(self._client, calls.promote(policy, expected))

    async def rollback(self, *, expected: str | None = None, reason: str | None = None) -> Serving:
        """Serve the policy before the promoted one again."""
        return await send_async(self._client, calls.rollback(expected, reason))

    async def restart(self, replica: str, *, force: bool = False) -> Serving:
        """Start one engine anew once its requests are answered; `force` also when its tier has no other."""
        return await send_async(self._client, calls.restart(replica, force))


class AsyncLearningSwitch:
    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def retrieve(self) -> Learning:
        return await send_async(self._client, calls.learning())

    async def set(self, enabled: bool) -> Learning:
        return await send_async(self._client, calls.set_learning(enabled))
