"""``GET /v1/rl/tiers``, and ``POST`` to ``/promote``, ``/rollback`` and ``/restart`` below it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from rollout.records import Scope
from server import restart as restarting
from server.bodies import parse
from server.gateway import Gateway, gateway
from server.responses import json_response
from server.schemas import Promote, Restart, Rollback
from server.tiers import Replica

router = APIRouter()


@router.get("/v1/rl/tiers")
async def state(request: Request) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    return json_response(_state(parts))


@router.post("/v1/rl/tiers/promote")
async def promote(request: Request) -> Response:
    parts = gateway(request)
    caller = await parts.auth.caller(request.headers.get("authorization"), Scope.ADMIN)
    asked = parse(Promote, await request.body())
    await parts.flips.promote(asked.policy, asked.expected, f"key {caller.key.id}")
    return json_response(_state(parts))


@router.post("/v1/rl/tiers/rollback")
async def rollback(request: Request) -> Response:
    parts = gateway(request)
    caller = await parts.auth.caller(request.headers.get("authorization"), Scope.ADMIN)
    asked = parse(Rollback, await request.body())
    await parts.flips.rollback(asked.expected, f"key {caller.key.id}", asked.reason)
    return json_response(_state(parts))


@router.post("/v1/rl/tiers/restart")
async def restart(request: Request) -> Response:
    parts = gateway(request)
    await parts.auth.caller(request.headers.get("authorization"), Scope.ADMIN)
    asked = parse(Restart, await request.body())
    wait_s = parts.config.drain_s
    await restarting.restart(parts.fleet, asked.replica, force=asked.force, wait_s=wait_s)
    return json_response(_state(parts))


def _state(parts: Gateway) -> dict[str, Any]:
    fleet = parts.fleet
    return {
        "object": "rl.tiers",
        "promoted": fleet.serving.promoted,
        "previous": fleet.serving.previous,
        "epoch": fleet.serving.epoch,
        "tiers": {tier: [_replica(replica) for replica in fleet.of(tier)] for tier in fleet.tiers},
        "flips": parts.flips.recent,
    }


def _replica(replica: Replica) -> dict[str, Any]:
    return {
        "id": replica.id,
        "instance": replica.instance,
        "ready": replica.ready,
        "why_not": replica.why_not,
        "verified": sorted(replica.verified),
        "in_flight": {policy: count for policy, count in replica.in_flight.items() if count},
        "load_ms": replica.load_ms,
        "placed_ms": replica.placed_ms,
    }
