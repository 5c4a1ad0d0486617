"""``GET /v1/rl/trajectories/{id}``: turns and outcomes; ``?include=tokens`` adds ids."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from rollout import outcomes
from rollout.records import Completion, Outcome, Scope
from rollout.store import Store, completions, trajectories
from server import errors
from server.gateway import gateway
from server.responses import json_response

router = APIRouter()
TOKENS = "tokens"
_TOKEN_FIELDS = ("token_ids", "logprobs")


@router.get("/v1/rl/trajectories/{trajectory_id:path}")
async def retrieve(request: Request, trajectory_id: str, include: str | None = None) -> Response:
    parts = gateway(request)
    caller = await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    if include not in (None, TOKENS):
        raise errors.invalid(f"'include' knows only '{TOKENS}'.", "include", "invalid_value")
    body = await asyncio.to_thread(_read, parts.store, caller.project.id, trajectory_id, include == TOKENS)
    return json_response(body)


def _read(store: Store, project_id: str, trajectory_id: str, tokens: bool) -> dict[str, Any]:
    with store.read() as tx:
        trajectory = trajectories.get(tx, project_id, trajectory_id)
        if trajectory is None:
            raise errors.not_found("trajectory", trajectory_id)
        turns = completions.of_trajectory(tx, project_id, trajectory_id)
        judged = outcomes.for_trajectory(tx, project_id, trajectory_id, with_completions=True)
    counts = outcomes.effective([o for o in judged if o.trajectory_id is not None])
    return {
        "object": "rl.trajectory",
        **msgspec.to_builtins(trajectory),
        "completions": [_turn(turn, tokens) for turn in turns],
        "outcomes": [msgspec.to_builtins(outcome) for outcome in judged],
        "effective_outcome": _id(counts),
    }


def _turn(completion: Completion, tokens: bool) -> dict[str, Any]:
    turn: dict[str, Any] = msgspec.to_builtins(completion)
    if not tokens:
        del turn["prompt_token_ids"]
        for choice in turn["choices"]:
            for name in _TOKEN_FIELDS:
                del choice[name]
    return turn


def _id(outcome: Outcome | None) -> str | None:
    return None if outcome is None else outcome.id
