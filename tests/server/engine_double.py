"""A small real HTTP server on a Unix socket that speaks vLLM's protocol, for faults no real engine gives.

A request's last message says what happens: ``fault:NAME`` picks a script of `FAULTS`, anything else is
answered with three tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.engine.supervisor import EngineState
from tests.fixtures.engines import eventually

PROMPT_IDS = [1, 2, 3]
MALFORMED = {
    "torn chunk": '{"choices": [{"ind',
    "a list": "[1]",
    "no choices": '{"id": "x"}',
    "an odd choice": '{"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{}]}}]}',
    "a word as code": '{"error": {"message": "boom", "code": "internal_error"}}',
    "a text as error": '{"error": "boom"}',
    "no index": '{"choices": [{"delta": {"content": "x"}}]}',
}
"""What `event` scripts of these names send as their second chunk."""
BASE, ADAPTED = -1.0, -2.0
SAMPLED = [(11, "one "), (12, "two\u2028\x85\u2029 "), (2, "three")]


class EngineDouble:
    """What it was asked is in `bodies`; `slow` requests wait for ever.

    It loads whatever adapter it is told of, and gives each id the log-prob BASE, or ADAPTED with one.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.loaded = ["base"]
        self.refuses: str | None = None
        """First message of conversations that it refuses."""
        self.rival: list[str] = []
        """What another gateway loads just before the next adapter, which is refused; "*": that very one."""
        self.cancelled = 0
        self.app = Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/v1/models", self.models),
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
                Route("/collective_rpc", lambda _: JSONResponse({"results": []}), methods=["POST"]),
                Route("/v1/completions", self.score, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": name} for name in self.loaded]})

    async def load(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if self.rival:
            self.loaded += [name if rival == "*" else rival for rival in self.rival]
            self.rival = []
            return JSONResponse({"error": {"message": "loaded already, or full", "code": 400}}, 400)
        self.loaded.append(name)
        return Response()

    async def unload(self, request: Request) -> Response:
        self.loaded.remove((await request.json())["lora_name"])
        return Response()

    async def score(self, request: Request) -> Response:
        body = await request.json()
        logprob = BASE if body["model"] == "base" else ADAPTED
        entries = [None, *({str(token): {"logprob": logprob}} for token in body["prompt"][1:])]
        return JSONResponse({"choices": [{"prompt_logprobs": entries}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        _, _, fault = str(body["messages"][-1]["content"]).partition("fault:")
        if fault == "refused" or body["messages"][0]["content"] == self.refuses:
            error = {
                "message": "min_p is not possible here",
                "type": "BadRequestError",
                "param": "min_p",
                "code": 400,
            }
            return JSONResponse({"error": error}, 400)
        if fault == "crashed":
            return JSONResponse({"error": {"message": "boom", "type": "x", "param": None, "code": 500}}, 500)
        if body["stream"]:
            return StreamingResponse(self.events(fault), media_type="text/event-stream")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(text for _, text in SAMPLED)},
            "finish_reason": "abort" if fault == "aborted" else "stop",
            "token_ids": [token for token, _ in SAMPLED],
            "logprobs": {
                "content": [entry(text) for _, text in SAMPLED][: 2 if fault == "fewer logprobs" else 3]
            },
        }
        if fault in MALFORMED:
            return Response(MALFORMED[fault], media_type="application/json")
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": usage(4 if fault == "wrong usage" else 3),
            "prompt_token_ids": PROMPT_IDS,
        }
        return JSONResponse(answer)

    async def events(self, fault: str) -> AsyncIterator[str]:
        try:
            yield data(
                [{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=PROMPT_IDS
            )
            for i, (token, text) in enumerate(SAMPLED):
                if fault == "error event" and i == 1:
                    yield 'data: {"error": {"message": "boom", "type": "x", "code": 500}}\n\ndata: [DONE]\n\n'
                    return
                if fault == "cut" and i == 1:
                    return
                if fault in MALFORMED and i == 1:
                    yield f"data: {MALFORMED[fault]}\n\n"
                if fault == "slow" and i == 1:
                    await asyncio.Event().wait()
                last = i == len(SAMPLED) - 1
                if last and fault == "no finish":
                    break
                choice: dict[str, Any] = {
                    "index": 0,
                    "delta": {"content": text},
                    "token_ids": [token],
                    "logprobs": {"content": [entry(text)]},
                    "finish_reason": ("abort" if fault == "aborted" else "stop") if last else None,
                }
                yield data([choice])
            yield data([], usage=usage(4 if fault == "wrong usage" else 3))
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def entry(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}


def usage(sampled: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": sampled, "total_tokens": 3 + sampled}


def data(choices: list[dict[str, Any]], **extra: Any) -> str:
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "base", "choices": choices}
    return f"data: {json.dumps(chunk | extra)}\n\n"


@contextmanager
def running_double(home: Path, replica: str) -> Iterator[EngineDouble]:
    """A double on the socket where the gateway looks for `replica`."""
    folder = home / "run"
    folder.mkdir(parents=True, exist_ok=True)
    double = EngineDouble()
    config = uvicorn.Config(
        double.app, uds=str(folder / f"{replica}.sock"), log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: server.started, 10, "the double listens")
    state = EngineState(
        replica=replica,
        tier=replica.partition("-")[0],
        instance=uuid.uuid4().hex,
        pid=os.getpid(),
        start_ticks=0,
        started_at=time.time(),
        socket=str(folder / f"{replica}.sock"),
        supervisor=os.getpid(),
    )
    (folder / f"{replica}.json").write_bytes(msgspec.json.encode(state))
    try:
        yield double
    finally:
        (folder / f"{replica}.json").unlink()
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
