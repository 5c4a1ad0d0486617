"""One engine as the gateway sees it: with `wire`, everything that is peculiar to vLLM's HTTP.

`ChatEvent.chunk` and `ChatResult.body` are what an OpenAI server would have sent.

Invariant: of each choice, the ids and log-probs of its pieces, joined in order, are those that the engine
sampled, one log-prob an id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from server.engine.errors import EngineRejected, EngineUnavailable
from server.engine.launch import BASE_MODEL, KEEP_ALIVE_SECONDS
from server.engine.wire import (
    ChatEvent,
    ChatResult,
    Piece,
    error_body,
    event,
    request,
    server_sent,
    status_of,
    take_fields,
    take_pieces,
    totals,
)

__all__ = ["ChatEvent", "ChatResult", "Engine", "Piece"]

CONNECT_SECONDS = 5.0
CONTROL_SECONDS = 600.0
"""Control calls wait for the step that is running and for weights to be read."""
HEALTH_SECONDS = 5.0


class Engine:
    """Client of one engine, by its Unix socket or its URL.

    Every method raises EngineUnavailable when the engine is starting, dead or dies meanwhile, and
    EngineRejected when it answers with an error.
    """

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)
        over_http = self.address.startswith(("http://", "https://"))
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_SECONDS / 4
        )
        transport = (
            httpx.AsyncHTTPTransport(limits=limits)
            if over_http
            else httpx.AsyncHTTPTransport(uds=self.address, limits=limits)
        )
        self._http = httpx.AsyncClient(
            transport=transport,
            base_url=self.address if over_http else "http://engine",
            # An answer may be queued for long; whoever waits for it sets the limit and closes the request.
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> bool:
        """Whether the engine computes; True also while it is paused."""
        for _ in range(2):
            try:
                return (await self._http.get("/health", timeout=HEALTH_SECONDS)).status_code == 200
            except httpx.ConnectError:
                return False
            except httpx.TransportError:
                # vLLM closes the connection after an unforeseen error, perhaps just as it is used again.
                continue
        return False

    async def models(self) -> set[str]:
        """Names that can be asked for: ``base`` and every loaded policy."""
        response = await self._call("GET", "/v1/models")
        with self._understood():
            return {model["id"] for model in response["data"]}

    async def load_adapter(self, policy_id: str, path: str | Path) -> None:
        """Make the adapter in folder `path` answer under the name `policy_id`.

        Rejected, with nothing changed, when it cannot be read, when some of its modules would have no
        effect on this engine, or when the engine already holds as many adapters as it can keep in memory.
        """
        await self._call("POST", "/v1/load_lora_adapter", {"lora_name": policy_id, "lora_path": str(path)})

    async def unload_adapter(self, policy_id: str) -> None:
        """Forget the name; its memory is given up once no running request uses it.

        The caller makes sure that no request in flight names it.
        """
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": policy_id})
        await self._worker("release_adapter", policy_id)

    async def reload_weights(self, path: str | Path) -> None:
        """Replace the base weights by those of the checkpoint folder `path`.

        Adapters of the old base are unloaded and the prefix cache is emptied. Requests in flight finish
        first, requests that come meanwhile wait. Rejected, with the old weights in place, when the
        checkpoint does not fit; an engine that fails half-way ends itself and is started anew.
        """
        for answer in await self._worker("check_weights", str(path)):
            if answer:
                raise EngineRejected(400, error_body(400, msgspec.json.encode(answer)))
        for name in await self.models() - {BASE_MODEL}:
            await self.unload_adapter(name)
        await self._call("POST", "/pause?mode=wait")
        try:
            await self._worker("replace_weights", str(path))
            await self._call("POST", "/reset_prefix_cache")
        finally:
            await self._call("POST", "/resume")

    async def score(self, model: str, token_ids: list[int]) -> list[float | None]:
        """Log-prob in nats of each id given those before it; None for the first. [len(token_ids)]

        Computed afresh, never from the prefix cache.
        """
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choice = (await self._call("POST", "/v1/completions", body))["choices"][0]
        entries: list[dict[str, dict[str, Any]] | None] = choice["prompt_logprobs"]
        return [
            None if entry is None else entry[str(token)]["logprob"]
            for entry, token in zip(entries, token_ids, strict=True)
        ]

    async def tokenize(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Ids of the prompt that the model's chat template makes of a conversation."""
        body = {"messages": messages, "add_generation_prompt": True} | ({"tools": tools} if tools else {})
        ids: list[int] = (await self._call("POST", "/tokenize", body))["tokens"]
        return ids

    async def chat(
        self, body: dict[str, Any], *, prompt_token_ids: list[int] | None = None, priority: int = 0
    ) -> ChatResult:
        """Answer a chat request; with `prompt_token_ids` the prompt is exactly those ids."""
        asked = request(body, prompt_token_ids, priority) | {"stream": False}
        asked.pop("stream_options", None)
        answer = await self._call("POST", "/v1/chat/completions", asked, seconds=None)
        with self._understood():
            ids: list[int] = answer["prompt_token_ids"]
            return ChatResult(prompt_token_ids=ids, choices=take_pieces(answer), body=take_fields(answer))

    async def stream_chat(
        self, body: dict[str, Any], *, prompt_token_ids: list[int] | None = None, priority: int = 0
    ) -> AsyncIterator[ChatEvent]:
        """The answer chunk by chunk; closing the iterator ends the request in the engine.

        The last chunk carries the usage. Ending without an exception means that the answer is complete.
        """
        asked = request(body, prompt_token_ids, priority) | {"stream": True}
        asked["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        content = msgspec.json.encode(asked)
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", content=content, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise await self._error(response.status_code, await response.aread())
                async for data in server_sent(response.aiter_bytes()):
                    if data == b"[DONE]":
                        return
                    with self._understood():
                        chunk = msgspec.json.decode(data)
                        error = chunk.get("error")
                        said = None if error else event(chunk)
                    if said is None:
                        raise await self._error(status_of(error), data)
                    yield said
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{self.address}: {error or type(error).__name__}") from error
        raise EngineUnavailable(f"{self.address}: the stream ended before the answer did")

    async def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name, summed over their labels; histograms as _sum and _count."""
        try:
            response = await self._http.get("/metrics", timeout=HEALTH_SECONDS)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{self.address}: {error or type(error).__name__}") from error
        with self._understood():
            return totals(response.text)

    async def choose_drafts(self, mode: str) -> None:
        """Verify "all" or "none" of what is drafted, or what pays ("auto"), until the engine ends."""
        await self._worker("choose_drafts", mode)

    async def speculation(self) -> dict[str, Any]:
        """What the worker's controller has counted of drafts: ``policies`` and ``loads``."""
        (report, *_) = await self._worker("speculation")
        return dict(report)

    async def _worker(self, method: str, *arguments: str) -> list[Any]:
        answer = await self._call("POST", "/collective_rpc", {"method": method, "args": list(arguments)})
        return list(answer["results"]) if answer else []

    async def _call(
        self,
        verb: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float | None = CONTROL_SECONDS,
    ) -> Any:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            response = await self._http.request(
                verb,
                path,
                content=content,
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
            )
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{self.address}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise await self._error(response.status_code, response.content)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        with self._understood():
            return msgspec.json.decode(response.content) if is_json and response.content else None

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """While an answer is read: one that is not what vLLM's protocol says is a fault of the engine."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineUnavailable(f"{self.address}: what it said is malformed: {error!r}") from error

    async def _error(self, status: int, content: bytes) -> EngineRejected | EngineUnavailable:
        """A fault of an engine that still answers is about the request; otherwise it is about the engine."""
        error = error_body(status, content)
        if status == 503 or (status >= 500 and not await self.health()):
            return EngineUnavailable(f"{self.address}: {error['message']}")
        return EngineRejected(status, error)
