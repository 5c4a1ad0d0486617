"""``POST /v1/rl/feedback``: a judgement of a completion or trajectory, written once."""

from __future__ import annotations

import asyncio
import time
import uuid

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from rollout import outcomes
from rollout.records import Outcome, Scope, Source
from rollout.store import Store, completions, trajectories
from server import errors
from server.auth import Caller
from server.bodies import parse
from server.gateway import gateway
from server.responses import json_response
from server.schemas import Feedback, outcome_value
from server.writer import OUTCOMES

router = APIRouter()


@router.post("/v1/rl/feedback")
async def create(request: Request) -> Response:
    parts = gateway(request)
    caller = await parts.auth.caller(request.headers.get("authorization"))
    trusted = _may_write(caller)
    feedback = parse(Feedback, await request.body())
    value = outcome_value(feedback)
    await asyncio.to_thread(_require_subject, parts.store, caller.project.id, feedback)
    outcome = Outcome(
        id=feedback.id or f"outcome-{uuid.uuid4().hex}",
        project_id=caller.project.id,
        created_at=time.time(),
        completion_id=feedback.completion_id,
        choice=feedback.choice,
        trajectory_id=feedback.trajectory_id,
        metric=feedback.metric,
        value=value,
        error=feedback.error,
        source=Source(feedback.source),
        verifier=feedback.verifier,
        verifier_version=feedback.verifier_version,
        trusted=trusted,
        supersedes=feedback.supersedes,
    )

    def write(tx: Connection) -> Outcome:
        return outcomes.record(tx, outcome)

    try:
        stored = await parts.writer.run(write, OUTCOMES)
    except outcomes.OutcomeConflict as conflict:
        raise errors.lost_race(f"{conflict}.") from None
    except outcomes.OutcomeInvalid as wrong:
        raise errors.invalid(f"{wrong}.") from None
    body = {"object": "rl.outcome", **_fields(stored)}
    return json_response(body, 201 if stored is outcome else 200)


def _may_write(caller: Caller) -> bool:
    """Whether what this key writes trains. 403 when it may not even write."""
    scopes = caller.key.scopes
    if Scope.OUTCOMES_WRITE in scopes or Scope.ADMIN in scopes:
        return True
    caller.require(Scope.INFERENCE)
    return caller.project.inference_outcomes


def _require_subject(store: Store, project_id: str, feedback: Feedback) -> None:
    """404 unless the completion (and its choice) or the trajectory was recorded in this project."""
    with store.read() as tx:
        if feedback.trajectory_id is not None:
            if trajectories.get(tx, project_id, feedback.trajectory_id) is None:
                raise errors.not_found("recorded trajectory", feedback.trajectory_id)
            return
        completion = completions.get(tx, feedback.completion_id or "")
    if completion is None or completion.project_id != project_id:
        raise errors.not_found("recorded completion", feedback.completion_id or "")
    if feedback.choice not in [choice.index for choice in completion.choices]:
        raise errors.invalid(f"The completion has no choice {feedback.choice}.", "choice")


def _fields(outcome: Outcome) -> dict[str, object]:
    fields = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
    return fields | {"created_at": int(outcome.created_at)}
