"""``GET /v1/rl/policies`` and ``/v1/rl/policies/{id}``: what became of every set of weights, and why."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from rollout import policies
from rollout.records import Policy, Scope
from rollout.store import Store, evaluations, placements
from server import errors
from server.gateway import gateway
from server.responses import json_response, listing

router = APIRouter()


@router.get("/v1/rl/policies")
async def list_policies(request: Request) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    return await parts.read(_list, parts.store)


@router.get("/v1/rl/policies/{policy_id}")
async def retrieve(request: Request, policy_id: str) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    return await parts.read(_get, parts.store, policy_id)


def _list(store: Store) -> Response:
    with store.read() as tx:
        return json_response(listing([_policy(tx, policy) for policy in policies.list_policies(tx)]))


def _get(store: Store, policy_id: str) -> Response:
    with store.read() as tx:
        policy = policies.get(tx, policy_id)
        if policy is None:
            raise errors.not_found("policy", policy_id)
        return json_response(_policy(tx, policy))


def _policy(tx: Connection, policy: Policy) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(policy)
    return {
        "object": "rl.policy",
        **fields,
        "placements": msgspec.to_builtins(placements.placements(tx, policy_id=policy.id)),
        "history": msgspec.to_builtins(policies.history(tx, policy.id)),
        "evaluations": msgspec.to_builtins(evaluations.list_evaluations(tx, policy.id)),
    }
