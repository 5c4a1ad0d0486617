"""The vocabulary: every record that reaches disk or another process.

One word per thing (README, "Words"): a *completion* is one request and its response, a *trajectory* the
ordered completions of one agent run, an *outcome* a judgement of either, a *policy* one immutable set of
weights. Records are frozen; what changes over time (a policy's state, a replica's placements) lives in
store rows, not in records.

Invariant: ``len(choice.token_ids) == len(choice.logprobs)`` for every captured choice; `capture` refuses
anything else.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

PIN = "@"
"""Between a model's name and the policy that it pins: ``ratchet@p000041``."""
PRIORITY_HEADER = "x-ratchet-priority"
"""Request header by which a caller says that nobody waits for the answer: ``batch``."""


def pinned_policy(model: str) -> str | None:
    """The policy that a model name pins, if it pins one."""
    return model.partition(PIN)[2] or None


class Capture(StrEnum):
    """Which completions of a project are kept. ``store: false`` on a request always wins."""

    OPT_IN = "opt_in"
    ON = "on"
    OFF = "off"


class Learn(StrEnum):
    """Whether kept completions of a project may train, and into which lineage of policies."""

    NONE = "none"
    SHARED = "shared"


class Scope(StrEnum):
    """What an API key may do."""

    INFERENCE = "inference"
    OUTCOMES_WRITE = "outcomes:write"
    TRAIN = "train"
    ADMIN = "admin"


class CompletionStatus(StrEnum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    ERROR = "error"


class Joint(StrEnum):
    """How a completion's prompt relates to the turn before it in its trajectory."""

    START = "start"
    JOINED = "joined"
    BREAK = "break"


class Source(StrEnum):
    """Who judged. Precedence when several judge one thing: verifier, grader, user."""

    VERIFIER = "verifier"
    GRADER = "grader"
    USER = "user"


class PolicyKind(StrEnum):
    ADAPTER = "adapter"
    FULL = "full"


class PolicyState(StrEnum):
    """States of a policy; `rollout.policies.TRANSITIONS` says which may follow which."""

    CANDIDATE = "candidate"
    GATE = "gate"
    CANARY = "canary"
    PROMOTED = "promoted"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


class Placement(StrEnum):
    """Where a policy stands on one replica."""

    LOADING = "loading"
    VERIFIED = "verified"
    FAILED = "failed"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer of a completion."""

    index: int
    message: dict[str, Any]
    """The assistant message as the caller saw it: content, tool_calls."""
    finish_reason: str | None
    token_ids: list[int]
    """Sampled ids, stop token included. [num_sampled]"""
    logprobs: list[float]
    """Log-prob in nats of each sampled id under the policy that sampled it. [num_sampled]"""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its response, token for token."""

    id: str
    project_id: str
    key_id: str
    created_at: float
    """Unix seconds at which the request was accepted."""
    trajectory_id: str
    turn: int
    """Position in the trajectory, from 0."""
    task: str | None
    model: str
    """The model name that the caller sent."""
    policy_id: str
    tier: str
    replica_id: str
    status: CompletionStatus
    error: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    params: dict[str, Any]
    """Sampling parameters as sent to the engine."""
    prompt_token_ids: list[int]
    choices: list[Choice]
    usage: Usage
    joint: Joint
    break_reason: str | None = None
    """Why the prompt could not be joined to the turn before; set when joint is BREAK."""
    trainable: bool
    untrainable_reason: str | None = None
    metadata: dict[str, str] = {}
    ttft_ms: float | None = None
    latency_ms: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A judgement of one completion or of one trajectory; exactly one of the two ids is set."""

    id: str
    project_id: str
    created_at: float
    completion_id: str | None = None
    choice: int = 0
    """Which choice of the completion was judged."""
    trajectory_id: str | None = None
    metric: str = "reward"
    value: float | None = None
    """None only when the judge failed; then `error` says why and nothing trains on it."""
    error: str | None = None
    source: Source
    verifier: str | None = None
    verifier_version: str | None = None
    trusted: bool
    """Whether the key that wrote it may write outcomes that train."""
    supersedes: str | None = None


class PolicyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``manifest.json`` in a policy folder says; immutable once registered."""

    id: str
    parent: str | None
    base: str
    """Identity of the base weights (`artifacts.base_id`)."""
    kind: PolicyKind
    target_modules: list[str]
    rank: int
    job: str
    step: int
    recipe: dict[str, Any]
    files: dict[str, str]
    """sha256 in hex of every other file of the folder, by relative name."""
    created_at: float


class FingerprintPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with the positions at which the policy differs most from its parent."""

    token_ids: list[int]
    positions: list[int]
    """Indices into token_ids whose log-prob (given all ids before) is compared. Never 0."""
    policy: list[float]
    parent: list[float]
    base: list[float]
    """Log-probs in nats at `positions` under the policy, its parent and the bare base."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica must reproduce before a policy may serve (``fingerprint.json``)."""

    policy: str
    parent: str
    prompts: list[FingerprintPrompt]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as the store knows it now."""

    id: str
    state: PolicyState
    manifest: PolicyManifest
    path: str
    reason: str | None
    created_at: float
    updated_at: float


class Project(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    capture: Capture = Capture.OPT_IN
    learn: Learn = Learn.SHARED
    default_tier: str = "standard"
    inference_outcomes: bool = False
    """Whether a key with scope inference alone may write outcomes that train."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    project_id: str
    scopes: list[Scope]
    created_at: float
    revoked_at: float | None = None
