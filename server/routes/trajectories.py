"""``GET /v1/rl/trajectories/{id}``: a page of its turns, and outcomes; ``?include=tokens`` adds ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from rollout import outcomes
from rollout.records import Completion, Outcome, Scope
from rollout.store import Store, completions, trajectories
from server import errors
from server.gateway import gateway
from server.responses import json_response

router = APIRouter()
TOKENS = "tokens"
_TOKEN_FIELDS = ("token_ids", "logprobs")


@dataclass(slots=True, frozen=True, kw_only=True)
class _Page:
    """What of a trajectory was asked for."""

    tokens: bool
    limit: int
    after: str | None


@router.get("/v1/rl/trajectories/{trajectory_id:path}")
async def retrieve(
    request: Request,
    trajectory_id: str,
    include: str | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 100,
    after: str | None = None,
) -> Response:
    """`after` is a completion's id; ``has_more`` says whether turns follow the page's ``last_id``."""
    parts = gateway(request)
    caller = await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    if include not in (None, TOKENS):
        raise errors.invalid(f"'include' knows only '{TOKENS}'.", "include", "invalid_value")
    page = _Page(tokens=include == TOKENS, limit=limit, after=after)
    return await parts.read(_read, parts.store, caller.project.id, trajectory_id, page)


def _read(store: Store, project_id: str, trajectory_id: str, page: _Page) -> Response:
    with store.read() as tx:
        trajectory = trajectories.get(tx, project_id, trajectory_id)
        if trajectory is None:
            raise errors.not_found("trajectory", trajectory_id)
        ids = trajectories.turn_ids(tx, project_id, trajectory_id, after=page.after, limit=page.limit + 1)
        if ids is None:
            raise errors.invalid(f"'after' names no completion of {trajectory_id}.", "after", "invalid_value")
        has_more, ids = len(ids) > page.limit, ids[: page.limit]
        turns = [turn for i in ids if (turn := completions.get(tx, i)) is not None]
        judged = outcomes.for_trajectory(tx, project_id, trajectory_id, with_completions=True)
    counts = outcomes.effective([o for o in judged if o.trajectory_id is not None])
    body = {
        "object": "rl.trajectory",
        **msgspec.to_builtins(trajectory),
        "completions": [_turn(turn, page.tokens) for turn in turns],
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
        "outcomes": [msgspec.to_builtins(outcome) for outcome in judged],
        "effective_outcome": _id(counts),
    }
    return json_response(body)


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
