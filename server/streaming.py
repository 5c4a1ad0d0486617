"""Answers on the wire: the engine's bodies and chunks under our names, and server-sent events.

Rules that the official client's accumulator imposes (first deltas in index order, role and tool-call ids
once, usage last) hold because chunks are forwarded in the engine's order and only the finishing ones are
kept back until the record is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server import errors
from server.engine.client import ChatEvent, ChatResult, Piece
from server.exchange import Exchange
from server.schemas import ChatRequest
from server.tiers import FLEX, wire_tier

log = logging.getLogger(__name__)
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_SEPARATORS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]


class ClientGone(Exception):
    """The caller closed the connection."""


class Connection:
    """Notices that the caller went away while something else is awaited."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_until_disconnect(receive))

    async def race(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises ClientGone, after ending `work`, when the caller leaves first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _end(task)
            raise
        if task.done():
            return task.result()
        await _end(task)
        raise ClientGone

    def close(self) -> None:
        self._gone.cancel()


async def _until_disconnect(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Names:
    """What every body and chunk of one exchange says about who answered."""

    def __init__(self, exchange: Exchange, model: str) -> None:
        request = exchange.recorder.request
        self.request: ChatRequest = exchange.request
        self._stamp = {
            "id": request.id,
            "model": model,
            "service_tier": FLEX if exchange.request.service_tier == FLEX else wire_tier(request.tier),
            "system_fingerprint": f"{request.policy_id}-{request.tier}",
        }

    def body(self, result: ChatResult) -> dict[str, Any]:
        """A whole answer as the caller gets it."""
        body = result.body | self._stamp
        pieces = {piece.index: piece for piece in result.choices}
        for choice in body["choices"]:
            self._dress(choice, pieces.get(choice["index"]))
            message = choice["message"]
            if not message.get("tool_calls"):
                message.pop("tool_calls", None)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = result.prompt_token_ids
        self._usage(body)
        return body

    def chunk(self, event: ChatEvent) -> dict[str, Any] | None:
        """A chunk as the caller gets it; None when nothing in it is for the caller."""
        chunk = event.chunk | self._stamp
        pieces = {piece.index: piece for piece in event.pieces}
        for choice in chunk["choices"]:
            self._dress(choice, pieces.get(choice["index"]))
        if not chunk["choices"]:
            self._usage(chunk)
            return chunk if self._wants_usage else None
        if self.request.return_token_ids and event.prompt_token_ids:
            chunk["prompt_token_ids"] = event.prompt_token_ids
        chunk.pop("usage", None)
        return chunk if any(_says_something(choice) for choice in chunk["choices"]) else None

    @property
    def _wants_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    def _dress(self, choice: dict[str, Any], piece: Piece | None) -> None:
        choice.pop("stop_reason", None)
        if self.request.logprobs and piece is not None:
            choice["logprobs"] = {
                "content": _top(piece.logprobs_content, self.request.top_logprobs or 0),
                "refusal": None,
            }
        if self.request.return_token_ids and piece is not None:
            choice["token_ids"] = piece.token_ids

    def _usage(self, body: dict[str, Any]) -> None:
        usage = body.get("usage")
        if usage and self.request.prediction is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            }


def _top(content: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The engine lists the sampled token among the alternatives even when none were asked for."""
    return [entry | {"top_logprobs": entry.get("top_logprobs", [])[:n]} for entry in content]


def _says_something(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return any(delta.values()) or any(choice.get(key) for key in ("finish_reason", "logprobs", "token_ids"))


def event_bytes(data: dict[str, Any]) -> bytes:
    """One event. Line separators beyond ASCII are escaped: many clients would split the event at them."""
    encoded = msgspec.json.encode(data)
    for raw, escaped in _SEPARATORS:
        encoded = encoded.replace(raw, escaped)
    return b"data: " + encoded + b"\n\n"


async def caller_events(exchange: Exchange, names: Names) -> AsyncGenerator[bytes]:
    """Server-sent events: forwarded as they come, the finishing ones only once the record is committed.

    A fault after the first event becomes an error event and nothing after it: no ``[DONE]``.
    """
    kept_back: list[bytes] = []
    sent = False
    try:
        async with aclosing(exchange.events()) as events:
            async for event in events:
                chunk = names.chunk(event)
                if chunk is None:
                    continue
                choices = chunk["choices"]
                if not choices or any(choice.get("finish_reason") for choice in choices):
                    kept_back.append(event_bytes(chunk))
                else:
                    yield event_bytes(chunk)
                    sent = True
        await exchange.commit()
    except errors.ApiError as error:
        failure: errors.ApiError | None = error
    except Exception as error:  # noqa: BLE001 - logged, recorded and told by `broke`
        failure = await exchange.broke(error)
    else:
        failure = None
    if failure is None:
        yield b"".join(kept_back) + DONE
    elif sent:
        yield event_bytes(failure.body())
    else:
        raise failure


class EventStream(Response):
    """Sends events until they end or the caller leaves, whose request then ends in the engine too."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        connection: Connection,
        finish: Callable[[bool], Awaitable[None]],
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events = first, events
        self._connection, self._finish = connection, finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = True
        try:
            await self._connection.race(self._pump(send))
            gone = False
        except (ClientGone, OSError):
            log.info("the caller left during a stream")
        finally:
            self._connection.close()
            await self._finish(gone)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            # Of a backlog nothing above waits: others have their turn, and a caller who left is noticed.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
