"""``GET /v1/rl/learning`` (is it on, and what has it done) and ``POST /v1/rl/learning {"enabled": true}``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from rollout.records import Scope
from rollout.store import Store, learning
from server.bodies import parse
from server.gateway import gateway
from server.responses import json_response
from server.schemas import Learning

router = APIRouter()
SETTING = "learning"


@router.get("/v1/rl/learning")
async def state(request: Request) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    return json_response(await asyncio.to_thread(_state, parts.store))


@router.post("/v1/rl/learning")
async def switch(request: Request) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.TRAIN)
    asked = parse(Learning, await request.body())
    await parts.writer.run(lambda tx: learning.set_setting(tx, SETTING, asked.enabled))
    return json_response(await asyncio.to_thread(_state, parts.store))


def _state(store: Store) -> dict[str, Any]:
    with store.read() as tx:
        return {
            "object": "rl.learning",
            "enabled": bool(learning.get_setting(tx, SETTING, False)),
            "status": learning.get_learner_status(tx),
        }
