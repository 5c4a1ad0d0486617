"""How requests to vLLM are written and its answers read: plain data in, plain data out.

Every chat request asks for the prompt's ids, the sampled ids and their log-probs; reading an answer takes
them out of what is handed on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

_CAPTURE_FIELDS = (
    "prompt_token_ids",
    "prompt_text",
    "prompt_logprobs",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
)
_CAPTURE_CHOICE_FIELDS = ("token_ids", "logprobs", "routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens sampled for one choice: those of one chunk, or all of them."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    """In nats, of `token_ids`."""
    logprobs_content: list[dict[str, Any]]
    """The same in OpenAI's form, with as many alternatives as `top_logprobs` asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEvent:
    """One chunk of a streamed answer."""

    chunk: dict[str, Any]
    prompt_token_ids: list[int] | None
    """On the first chunk of each choice."""
    pieces: list[Piece]
    usage: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult:
    """A whole answer."""

    body: dict[str, Any]
    prompt_token_ids: list[int]
    choices: list[Piece]


async def server_sent(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, of a stream cut anywhere.

    Lines end at a newline and at nothing else: a model may well say U+2028, which JSON need not escape and
    which `httpx.Response.aiter_lines` takes for the end of a line.
    """
    pending = b""
    async for part in parts:
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].rstrip(b"\r")


def request(body: dict[str, Any], prompt_token_ids: list[int] | None, priority: int) -> dict[str, Any]:
    """`body` with what capture needs; with `prompt_token_ids` the prompt is exactly those ids."""
    asked = dict(body)
    asked["logprobs"] = True
    asked["top_logprobs"] = body.get("top_logprobs") or 0
    asked["return_token_ids"] = True
    # Hiding the reasoning here would hide its ids and log-probs too; whoever answers the caller hides it.
    asked["include_reasoning"] = True
    asked["priority"] = priority
    if prompt_token_ids is not None:
        asked["kv_transfer_params"] = {"prompt_token_ids": prompt_token_ids}
    return asked


def event(chunk: dict[str, Any]) -> ChatEvent:
    ids: list[int] | None = chunk.get("prompt_token_ids")
    pieces = take_pieces(chunk)
    return ChatEvent(chunk=take_fields(chunk), prompt_token_ids=ids, pieces=pieces, usage=chunk.get("usage"))


def take_pieces(answer: dict[str, Any]) -> list[Piece]:
    """The sampled tokens of every choice that has some."""
    pieces = []
    for choice in answer["choices"]:
        ids: list[int] = choice.get("token_ids") or []
        content: list[dict[str, Any]] = (choice.get("logprobs") or {}).get("content") or []
        if not ids and not content:
            continue
        logprobs = [float(entry["logprob"]) for entry in content]
        pieces.append(
            Piece(index=choice["index"], token_ids=ids, logprobs=logprobs, logprobs_content=content)
        )
    return pieces


def take_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """`answer` without what only capture asked for."""
    for name in _CAPTURE_FIELDS:
        answer.pop(name, None)
    for choice in answer["choices"]:
        for name in _CAPTURE_CHOICE_FIELDS:
            choice.pop(name, None)
    return answer


def totals(exposition: str) -> dict[str, float]:
    """Counters and gauges by name, summed over their labels; histograms as _sum and _count."""
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if line.startswith("#") or not name or name.endswith("_bucket"):
            continue
        found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def status_of(error: Any) -> int:
    """The HTTP status of an error that came in a stream, whose code may be a word or nothing."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def error_body(status: int, content: bytes) -> dict[str, Any]:
    """OpenAI's error object, whatever shape this route of vLLM answered in."""
    try:
        decoded = msgspec.json.decode(content)
    except msgspec.DecodeError:
        decoded = content.decode(errors="replace")
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    if isinstance(error, dict) and "message" in error:
        return error
    detail = error.get("detail", error) if isinstance(error, dict) else error
    return {
        "message": str(detail) or f"status {status}",
        "type": "engine_error",
        "param": None,
        "code": status,
    }
