"""One request and what the engine said -> one `Completion`, token for token. Pure: no clock, no store.

The gateway feeds a `Recorder` with the events of one exchange and asks it for the record at the end.
Invariant: a record whose counts do not agree (ids, log-probs, usage) never trains, and no choice with
unequal counts keeps its ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.records import Capture, Choice, Completion, CompletionStatus, Joint, Project, Usage

MISSING_LOGPROB = -9999.0
"""What the engine writes where it has no log-prob."""
GREEDY_BELOW = 0.01
"""At temperatures below this the engine takes the likeliest token, so nothing is sampled."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
}
"""Parameters that bend the distribution, with the values at which they do not."""


class Piece(Protocol):
    """Sampled ids of one choice with their log-probs, as one event brings them."""

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class Request:
    """What is known of a completion before the engine answers."""

    id: str
    project_id: str
    key_id: str
    created_at: float
    trajectory_id: str
    turn: int
    task: str | None
    model: str
    policy_id: str
    tier: str
    replica_id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    params: dict[str, Any]
    joint: Joint
    break_reason: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


def wanted(project: Project, store: bool | None) -> bool:
    """Whether a request with this ``store`` field is kept. An explicit false always wins."""
    if store is False or project.capture is Capture.OFF:
        return False
    return project.capture is Capture.ON or store is True


def bent_by(params: dict[str, Any], tools: list[dict[str, Any]] | None) -> str | None:
    """Why the log-probs are not the policy's at temperature alone; None when they are."""
    temperature = params.get("temperature")
    if temperature is not None and temperature < GREEDY_BELOW:
        return "temperature 0 is greedy"
    for name, neutral in _NEUTRAL.items():
        if params.get(name) not in neutral:
            return name
    if params.get("response_format", {"type": "text"}) not in (None, {"type": "text"}):
        return "response_format masks by grammar"
    if params.get("tool_choice") not in (None, "auto", "none"):
        return "tool_choice masks by grammar"
    if any(tool.get("function", {}).get("strict") for tool in tools or []):
        return "strict tools mask by grammar"
    return None


@dataclass(slots=True)
class _Sampled:
    """One choice while it grows."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add_delta(self, delta: dict[str, Any]) -> None:
        if delta.get("content"):
            self.content.append(delta["content"])
        if delta.get("reasoning"):
            self.reasoning.append(delta["reasoning"])
        for part in delta.get("tool_calls") or []:
            call = self.tool_calls.setdefault(
                part["index"], {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            function = part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""

    def as_message(self) -> dict[str, Any]:
        """The assistant message as the caller saw it."""
        if self.message is not None:
            return self.message
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content) or None}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [self.tool_calls[i] for i in sorted(self.tool_calls)]
        elif message["content"] is None:
            message["content"] = ""
        return message


def _essential(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the empty fields that engines add."""
    kept = {key: message[key] for key in ("reasoning", "tool_calls") if message.get(key)}
    content = message.get("content")
    return {"role": "assistant", "content": content or (None if "tool_calls" in kept else ""), **kept}


class Recorder:
    """Collects one exchange. Feed `prompt`, `pieces`, `chunk` or `body`, `usage`; then `completion`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt_token_ids: list[int] = []
        self.expected_prompt: list[int] | None = None
        """Ids that the engine was told to use as the prompt, of a joined turn."""
        self.usage: Usage | None = None
        self._choices: dict[int, _Sampled] = {}

    def prompt(self, token_ids: Sequence[int] | None) -> None:
        if token_ids and not self.prompt_token_ids:
            self.prompt_token_ids = list(token_ids)

    def pieces(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            sampled = self._choice(piece.index)
            sampled.token_ids.extend(piece.token_ids)
            sampled.logprobs.extend(piece.logprobs)

    def chunk(self, chunk: dict[str, Any]) -> None:
        """One `chat.completion.chunk` as the engine sent it."""
        for choice in chunk.get("choices") or []:
            sampled = self._choice(choice["index"])
            sampled.add_delta(choice.get("delta") or {})
            sampled.finish_reason = choice.get("finish_reason") or sampled.finish_reason

    def body(self, body: dict[str, Any]) -> None:
        """A whole `chat.completion`."""
        for choice in body["choices"]:
            sampled = self._choice(choice["index"])
            sampled.message = _essential(choice["message"])
            sampled.finish_reason = choice.get("finish_reason")

    def count(self, usage: dict[str, Any] | None) -> None:
        """The engine's own usage object."""
        if usage is not None:
            details = usage.get("prompt_tokens_details") or {}
            self.usage = Usage(
                prompt_tokens=usage["prompt_tokens"],
                completion_tokens=usage.get("completion_tokens") or 0,
                cached_tokens=details.get("cached_tokens") or 0,
            )

    @property
    def sampled(self) -> int:
        """Tokens sampled so far over all choices."""
        return sum(len(sampled.token_ids) for sampled in self._choices.values())

    def mismatch(self) -> str | None:
        """How the counts of a finished exchange disagree; None when they agree."""
        for index, sampled in sorted(self._choices.items()):
            if len(sampled.token_ids) != len(sampled.logprobs):
                return (
                    f"choice {index} has {len(sampled.token_ids)} ids and {len(sampled.logprobs)} log-probs"
                )
            if MISSING_LOGPROB in sampled.logprobs:
                return f"choice {index} has a missing log-prob"
        if self.usage is None:
            return "the engine reported no usage"
        if self.sampled != self.usage.completion_tokens:
            return f"{self.sampled} ids, usage says {self.usage.completion_tokens}"
        if len(self.prompt_token_ids) != self.usage.prompt_tokens:
            return f"{len(self.prompt_token_ids)} prompt ids, usage says {self.usage.prompt_tokens}"
        if self.expected_prompt not in (None, self.prompt_token_ids):
            return "the engine did not use the joined prompt"
        return None

    def completion(
        self,
        *,
        status: CompletionStatus,
        error: str | None = None,
        ttft_ms: float | None,
        latency_ms: float,
    ) -> Completion:
        """The record. A finished exchange whose counts disagree becomes an error record."""
        if status is CompletionStatus.COMPLETED and (mismatch := self.mismatch()):
            status, error = CompletionStatus.ERROR, f"capture_mismatch: {mismatch}"
        request = self.request
        reason = self._untrainable(status, error)
        return Completion(
            id=request.id,
            project_id=request.project_id,
            key_id=request.key_id,
            created_at=request.created_at,
            trajectory_id=request.trajectory_id,
            turn=request.turn,
            task=request.task,
            model=request.model,
            policy_id=request.policy_id,
            tier=request.tier,
            replica_id=request.replica_id,
            status=status,
            error=error,
            messages=request.messages,
            tools=request.tools,
            params=request.params,
            prompt_token_ids=self.prompt_token_ids,
            choices=self._records(),
            usage=self.usage
            or Usage(prompt_tokens=len(self.prompt_token_ids), completion_tokens=self.sampled),
            joint=request.joint,
            break_reason=request.break_reason,
            trainable=reason is None,
            untrainable_reason=reason,
            metadata=request.metadata,
            ttft_ms=ttft_ms,
            latency_ms=latency_ms,
        )

    def _untrainable(self, status: CompletionStatus, error: str | None) -> str | None:
        if status is CompletionStatus.CANCELLED:
            return "cancelled by the caller"
        if status is CompletionStatus.ERROR:
            return error or "failed"
        return bent_by(self.request.params, self.request.tools)

    def _records(self) -> list[Choice]:
        records = []
        for index, sampled in sorted(self._choices.items()):
            agree = len(sampled.token_ids) == len(sampled.logprobs)
            records.append(
                Choice(
                    index=index,
                    message=sampled.as_message(),
                    finish_reason=sampled.finish_reason,
                    token_ids=sampled.token_ids if agree else [],
                    logprobs=sampled.logprobs if agree else [],
                )
            )
        return records

    def _choice(self, index: int) -> _Sampled:
        return self._choices.setdefault(index, _Sampled())
