"""A service that speaks the API and answers by script: policies of known skill, for tests of its clients.

A policy of skill 0.4 solves exactly the tasks whose hash is below 0.4, so a better one solves all that a
worse one does. The store, if given, is the real one: promoting through this API moves its rows.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse, StreamingResponse

from clients.client import AsyncRatchet
from rollout import policies
from rollout.store import Store
from rollout.tasks import demonstration, from_id

TIERS = ("standard", "fast")
METRICS = "ratchet_serving_epoch 1.0\n"


def hardness(task_id: str) -> float:
    """In [0, 1), the same for ever."""
    return int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:4], "big") / 2**32


@dataclass(slots=True, kw_only=True)
class Service:
    skills: dict[str, float]
    """By policy id."""
    promoted: str
    store: Store | None = None
    failing: int = 0
    """So many of the next chat requests are refused with 503."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    flips: list[dict[str, Any]] = field(default_factory=list)
    learning_on: bool = False
    learner: dict[str, Any] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    """Chat requests by policy."""

    def client(self) -> AsyncRatchet:
        transport = httpx2.ASGITransport(app=self.app())
        return AsyncRatchet(
            base_url="http://service/v1",
            api_key="key",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
        )

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/rl/feedback", self.feedback, methods=["POST"])
        app.add_api_route("/v1/rl/tiers/promote", self.promote, methods=["POST"])
        app.add_api_route("/v1/rl/tiers", self.tiers, methods=["GET"])
        app.add_api_route("/v1/rl/policies", self.list_policies, methods=["GET"])
        app.add_api_route("/v1/rl/learning", self.learning, methods=["GET", "POST"])
        app.add_api_route("/healthz", lambda: {"status": "ok"}, methods=["GET"])
        app.add_api_route("/metrics", lambda: Response(METRICS), methods=["GET"])
        return app

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.failing > 0:
            self.failing -= 1
            return _refusal(503, "no engine")
        _, _, pinned = body["model"].partition("@")
        policy = pinned or self.promoted
        self.asked[policy] += 1
        message = self._say(policy, body)
        tier = "fast" if body.get("service_tier") == "fast" else "standard"
        frame = {
            "id": f"chatcmpl-{len(self.bodies)}",
            "model": f"ratchet@{policy}",
            "created": 0,
            "system_fingerprint": f"{policy}-{tier}",
        }
        if body.get("stream"):
            return StreamingResponse(_events(frame, message), media_type="text/event-stream")
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        return JSONResponse({**frame, "object": "chat.completion", "choices": [choice], "usage": usage})

    async def feedback(self, request: Request) -> Response:
        body = await request.json()
        replayed = self.outcomes.get(body["id"])
        assert replayed in (None, body)
        self.outcomes[body["id"]] = body
        return JSONResponse({"object": "rl.outcome", **body}, status_code=200 if replayed else 201)

    async def promote(self, request: Request) -> Response:
        body = await request.json()
        assert self.store is not None
        try:
            with self.store.write() as tx:
                policies.promote(tx, body["policy"], expected=body["expected"], actor="test")
        except policies.PolicyConflict as conflict:
            return _refusal(412, str(conflict))
        self.promoted = body["policy"]
        now = time.time()
        loaded = {"standard-0": {"load_started_at": now - 0.5, "placed_ms": 100.0, "load_ms": 20.0}}
        flip = {"kind": "promote", "policy": self.promoted, "warm_started_at": now, "flipped_at": now}
        self.flips.append({**flip, "replicas": loaded})
        return JSONResponse({"promoted": self.promoted})

    async def tiers(self) -> Response:
        return JSONResponse({"promoted": self.promoted, "flips": self.flips})

    async def list_policies(self) -> Response:
        assert self.store is not None
        with self.store.read() as tx:
            data = [
                {
                    **msgspec.to_builtins(policy),
                    "history": msgspec.to_builtins(policies.history(tx, policy.id)),
                }
                for policy in policies.list_policies(tx)
            ]
        return JSONResponse({"object": "list", "data": data})

    async def learning(self, request: Request) -> Response:
        if request.method == "POST":
            self.learning_on = (await request.json())["enabled"]
        return JSONResponse({"enabled": self.learning_on, "status": self.learner})

    def _say(self, policy: str, body: dict[str, Any]) -> dict[str, Any]:
        if "metadata" not in body:
            return {"role": "assistant", "content": "Hello."}
        task = from_id(body["metadata"]["task"])
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if hardness(task.id) >= self.skills[policy]:
            return {"role": "assistant", "content": "I do not know."}
        answers = [message for message in demonstration(task) if message["role"] == "assistant"]
        answer: dict[str, Any] = answers[turn]
        return answer


def _refusal(status: int, message: str) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


async def _events(frame: dict[str, Any], message: dict[str, Any]) -> AsyncIterator[str]:
    """Role first, text in two pieces, each call's name and then its arguments in two pieces."""
    text = message.get("content") or ""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in (text[:3], text[3:]) if piece]
    for index, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        arguments = function["arguments"]
        head = {"index": index, "id": call["id"], "type": "function", "function": {"name": function["name"]}}
        deltas.append({"tool_calls": [head]})
        for piece in (arguments[:5], arguments[5:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    chunk = {**frame, "object": "chat.completion.chunk"}
    for position, delta in enumerate(deltas):
        finish = "stop" if position + 1 == len(deltas) else None
        yield _event({**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    yield _event({**chunk, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
