"""What `.rl` sends and gets back: one function a request, one record an answer.

Pure: a function here returns a `Call`; the clients send it. Records keep fields they do not know, so that an
older client can read a newer server.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from openai import BaseModel

T = TypeVar("T", bound=BaseModel)
Source = Literal["user", "grader", "verifier"]


class Outcome(BaseModel):
    """A judgement of one completion or trajectory, as the server keeps it."""

    id: str
    completion_id: str | None = None
    choice: int = 0
    trajectory_id: str | None = None
    metric: str
    value: float | None = None
    error: str | None = None
    source: str
    verifier: str | None = None
    verifier_version: str | None = None
    trusted: bool
    """Whether the key that wrote it may write outcomes that train."""
    supersedes: str | None = None


class Trajectory(BaseModel):
    """The ordered completions of one agent run, with their outcomes."""

    id: str
    task: str | None = None
    completions: list[dict[str, Any]] = []
    has_more: bool = False
    """Whether completions follow these; false of what `retrieve` returns, which reads every page."""
    last_id: str | None = None
    outcomes: list[Outcome] = []


class Policy(BaseModel):
    """One immutable set of weights and what became of it."""

    id: str
    state: str
    reason: str | None = None
    manifest: dict[str, Any]
    placements: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []


class PolicyList(BaseModel):
    data: list[Policy]


class Replica(BaseModel):
    """One engine of a tier."""

    id: str
    ready: bool
    why_not: str | None = None
    verified: list[str] = []
    """Policies that it holds and that passed their fingerprint."""
    in_flight: dict[str, int] = {}


class Serving(BaseModel):
    """What every tier serves now, and on which replicas."""

    promoted: str | None = None
    previous: str | None = None
    tiers: dict[str, list[Replica]] = {}


class Learning(BaseModel):
    """Whether the learner may learn, and its own account of what it did."""

    enabled: bool
    status: dict[str, Any] | None = None
    """Counts of what was seen, kept, judged and trained, and why not."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request: path below the base URL, and the record that answers it."""

    method: Literal["get", "post"]
    path: str
    answer: type[T]
    body: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a caller says of a completion or trajectory: `value`, or `error` when the judge itself failed."""

    completion_id: str | None = None
    trajectory_id: str | None = None
    choice: int = 0
    value: float | bool | None = None
    error: str | None = None
    metric: str = "reward"
    source: Source = "user"
    verifier: str | None = None
    verifier_version: str | None = None
    supersedes: str | None = None
    id: str | None = None
    """Sending the same id and content again is harmless; chosen here when not given, so retries are."""


def feedback(judgement: Judgement) -> Call[Outcome]:
    named = {name: getattr(judgement, name) for name in Judgement.__dataclass_fields__}
    body = {name: value for name, value in named.items() if value is not None}
    body.setdefault("id", f"out_{uuid.uuid4().hex}")
    return Call("post", "/rl/feedback", Outcome, body)


def trajectory(trajectory_id: str, tokens: bool, after: str | None = None) -> Call[Trajectory]:
    """One page; the next one is `after` its ``last_id``."""
    params = _given(include="tokens" if tokens else None, after=after)
    return Call("get", f"/rl/trajectories/{quote(trajectory_id, safe='')}", Trajectory, params=params)


def policies() -> Call[PolicyList]:
    return Call("get", "/rl/policies", PolicyList)


def policy(policy_id: str) -> Call[Policy]:
    return Call("get", f"/rl/policies/{quote(policy_id, safe='')}", Policy)


def tiers() -> Call[Serving]:
    return Call("get", "/rl/tiers", Serving)


def promote(policy_id: str, expected: str | None) -> Call[Serving]:
    return Call("post", "/rl/tiers/promote", Serving, _given(policy=policy_id, expected=expected))


def rollback(expected: str | None, reason: str | None) -> Call[Serving]:
    return Call("post", "/rl/tiers/rollback", Serving, _given(expected=expected, reason=reason))


def restart(replica: str, force: bool) -> Call[Serving]:
    return Call("post", "/rl/tiers/restart", Serving, {"replica": replica, "force": force})


def learning() -> Call[Learning]:
    return Call("get", "/rl/learning", Learning)


def set_learning(enabled: bool) -> Call[Learning]:
    return Call("post", "/rl/learning", Learning, {"enabled": enabled})


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
