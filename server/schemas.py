"""HTTP bodies, checked at the edge. Every field has one of three fates: applied, accepted without effect
(documented here), or refused with 400 naming it. Nothing is dropped in silence.

Accepted without effect: ``user``, ``safety_identifier``, ``prompt_cache_key``, ``prompt_cache_options``,
``prompt_cache_retention``, ``prediction`` (its token counts are reported as 0), ``parallel_tool_calls:
true``, ``stream_options.include_obfuscation``, ``reasoning_effort: none`` and ``verbosity: medium``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout import trajectories
from rollout.outcomes import MAX_VALUE
from server import errors
from server.bodies import parse

Message = dict[str, Any]
CHOICES = 128
"""Most choices of one completion."""

_REFUSED = {
    "audio": "this server answers in text",
    "moderation": "no moderation model is served",
    "web_search_options": "this server does not search the web; offer a tool instead",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
}
_KEPT = ("content", "tool_calls", "tool_call_id", "name", "reasoning")
_ROLES = ("system", "user", "assistant", "tool")
APPLIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "seed",
    "stop",
    "n",
    "min_tokens",
    "ignore_eos",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
)
"""Fields that go to the engine as they are, and into the record."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(_Body):
    """``POST /v1/chat/completions``."""

    model: str
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=CHOICES)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: str | None = None
    user: str | None = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def params(self) -> dict[str, Any]:
        """Sampling parameters as they go to the engine and into the record."""
        params = {name: value for name in APPLIED if (value := getattr(self, name)) is not None}
        if self.max_new_tokens is not None:
            params["max_completion_tokens"] = self.max_new_tokens
        return params


class Feedback(_Body):
    """``POST /v1/rl/feedback``: a judgement of one completion or one trajectory."""

    id: str | None = Field(None, min_length=1, max_length=128)
    """Chosen by the caller; the same id with the same content is one outcome."""
    completion_id: str | None = None
    trajectory_id: str | None = None
    choice: int = Field(0, ge=0, lt=CHOICES)
    metric: str = Field("reward", min_length=1, max_length=64)
    value: bool | float | None = None
    error: str | None = None
    source: Literal["user", "grader", "verifier"] = "user"
    verifier: str | None = None
    verifier_version: str | None = None
    supersedes: str | None = None


class Promote(_Body):
    """``POST /v1/rl/tiers/promote``."""

    policy: str
    expected: str | None = None
    """The policy that the caller believes is promoted now; another one is a lost race (412)."""


class Rollback(_Body):
    """``POST /v1/rl/tiers/rollback``."""

    expected: str | None = None
    reason: str = "asked for"


class Restart(_Body):
    """``POST /v1/rl/tiers/restart``."""

    replica: str
    force: bool = False
    """Also when callers will be refused meanwhile."""


class Learning(_Body):
    """``POST /v1/rl/learning``."""

    enabled: bool


def chat_request(body: bytes) -> ChatRequest:
    """A checked request with messages and tools in the form the engine takes. Raises 400."""
    request = parse(ChatRequest, body)
    for name, why in _REFUSED.items():
        if getattr(request, name) is not None:
            raise errors.unsupported(name, why)
    if request.modalities not in (None, ["text"]):
        raise errors.unsupported("modalities", "this server answers in text")
    if request.reasoning_effort not in (None, "none"):
        raise errors.unsupported("reasoning_effort", "the served model has no reasoning to steer")
    if request.verbosity not in (None, "medium"):
        raise errors.unsupported("verbosity", "the served model cannot be steered by it")
    if request.top_logprobs is not None and not request.logprobs:
        raise errors.invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise errors.invalid("'stream_options' needs 'stream' to be true.", "stream_options")
    if isinstance(request.stop, list) and len(request.stop) > 4:
        raise errors.invalid("'stop' takes at most 4 strings.", "stop")
    _check_metadata(request.metadata or {})
    messages = [_message(message, i) for i, message in enumerate(request.messages)]
    tools = [_tool(tool, i) for i, tool in enumerate(request.tools or [])] or None
    _check_tool_choice(request.tool_choice, tools)
    return request.model_copy(update={"messages": messages, "tools": tools})


def outcome_value(feedback: Feedback) -> float | None:
    """The value as a number. Raises 400 unless exactly one of value and error, and one id, are given."""
    if (feedback.completion_id is None) == (feedback.trajectory_id is None):
        raise errors.invalid("Give exactly one of 'completion_id' and 'trajectory_id'.", "completion_id")
    if (feedback.value is None) == (feedback.error is None):
        raise errors.invalid("Give exactly one of 'value' and 'error'.", "value")
    if feedback.value is None:
        return None
    value = float(feedback.value)
    if abs(value) > MAX_VALUE:
        raise errors.invalid(
            f"'value' must be a number from -{MAX_VALUE:.0f} to {MAX_VALUE:.0f}.", "value", "invalid_value"
        )
    return value


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > 16:
        raise errors.invalid("'metadata' takes at most 16 pairs.", "metadata")
    if not trajectories.can_be_named(metadata.get(trajectories.NAME_KEY, "")):
        raise errors.wrong_name(f"metadata.{trajectories.NAME_KEY}")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise errors.invalid(
                "'metadata' keys take at most 64 characters and values at most 512.", f"metadata.{key[:64]}"
            )


def _message(message: Message, i: int) -> Message:
    """The message with known keys only; ``developer`` becomes ``system``, which every template has."""
    where = f"messages.{i}"
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in _ROLES:
        raise errors.invalid(
            f"'{where}.role' must be developer, system, user, assistant or tool.", f"{where}.role"
        )
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and role != "assistant":
        raise errors.invalid(f"'{where}.content' is required.", f"{where}.content")
    _check_content(content, where)
    if calls is not None:
        _check_tool_calls(calls, role, where)
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise errors.invalid(f"'{where}.tool_call_id' must be a string.", f"{where}.tool_call_id")
    kept = {key: message[key] for key in _KEPT if message.get(key) is not None}
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
    if content is None and "tool_calls" not in kept:
        kept["content"] = ""
    return {"role": role, **kept}


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise errors.invalid(
            f"'{where}.content' must be a string or a list of text parts.", f"{where}.content"
        )
    for j, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise errors.invalid(
                f"'{where}.content.{j}' must be a text part; this server takes text only.",
                f"{where}.content.{j}",
            )


def _check_tool_calls(calls: Any, role: str, where: str) -> None:
    if role != "assistant" or not isinstance(calls, list):
        raise errors.invalid(
            f"'{where}.tool_calls' must be a list on an assistant message.", f"{where}.tool_calls"
        )
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(call.get("id"), str):
            raise errors.invalid(
                f"'{where}.tool_calls.{j}' must have an 'id' and a 'function'.", f"{where}.tool_calls.{j}"
            )
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
            raise errors.invalid(
                f"'{where}.tool_calls.{j}.function' must have 'name' and 'arguments' as strings.",
                f"{where}.tool_calls.{j}.function",
            )


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    where = f"tools.{i}"
    if tool.get("type") != "function":
        raise errors.unsupported(f"{where}.type", "only tools of type 'function' are served")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise errors.invalid(f"'{where}.function.name' must be a string.", f"{where}.function.name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise errors.invalid(
            f"'{where}.function.parameters' must be a JSON schema object.", f"{where}.function.parameters"
        )
    if not isinstance(function.get("description") or "", str):
        raise errors.invalid(
            f"'{where}.function.description' must be a string.", f"{where}.function.description"
        )
    return tool


def _check_tool_choice(choice: Any, tools: list[dict[str, Any]] | None) -> None:
    if choice in (None, "none"):
        return
    if not tools:
        raise errors.invalid("'tool_choice' needs 'tools'.", "tool_choice")
    if isinstance(choice, str):
        return
    if choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
        raise errors.unsupported("tool_choice", "use 'none', 'auto', 'required' or one function by name")
    name = choice["function"].get("name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise errors.invalid(f"'tool_choice' names '{name}', which is not in 'tools'.", "tool_choice")
