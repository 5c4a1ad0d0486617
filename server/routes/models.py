"""``GET /v1/models`` and ``/v1/models/{id}``: the aliases, and every policy that can be pinned."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from rollout.records import Scope, pinned_policy
from server import errors
from server.gateway import Gateway, gateway
from server.responses import json_response, listing

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    return json_response(listing([_model(parts, name) for name in parts.fleet.names()]))


@router.get("/v1/models/{name:path}")
async def retrieve(request: Request, name: str) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    if name not in parts.fleet.names():
        raise errors.unknown_model(name, parts.fleet.names())
    return json_response(_model(parts, name))


def _model(parts: Gateway, name: str) -> dict[str, Any]:
    policy_id = pinned_policy(name) or parts.fleet.serving.promoted
    policy = parts.fleet.policies.get(policy_id or "")
    return {
        "id": name,
        "object": "model",
        "created": int(policy.created_at) if policy else 0,
        "owned_by": "ratchet",
        "policy": policy_id,
        "state": policy.state.value if policy else None,
    }
