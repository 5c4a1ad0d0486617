"""Which turn of which trajectory a request is: found by its name and by what its messages go on from."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from rollout import trajectories
from rollout.records import Joint
from rollout.store import Store, completions
from rollout.store import trajectories as rows
from server import errors
from server.schemas import ChatRequest
from server.sessions import Session, Sessions


@dataclass(slots=True, frozen=True, kw_only=True)
class Turn:
    """Where a request stands in its trajectory."""

    trajectory_id: str
    session: Session
    number: int
    joint: Joint
    break_reason: str | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(slots=True, kw_only=True)
class Turns:
    store: Store
    sessions: Sessions
    renderer: trajectories.PromptRenderer

    async def of(self, project_id: str, request: ChatRequest, headers: Mapping[str, str], keep: bool) -> Turn:
        """The turn that this request is. Raises 400 for a name that no trajectory can have."""
        name = _name(request, headers)
        answer = trajectories.last_answer(request.messages)
        if keep and answer is not None:
            found = await asyncio.to_thread(self._continued, project_id, request, answer, name)
            if found is not None:
                match, joint = found
                return await self._next(project_id, match, joint)
        if name is None:
            name = f"traj_{uuid.uuid4().hex}"
            return Turn(
                trajectory_id=name, session=self.sessions.new(project_id, name), number=0, joint=Joint.START
            )
        session = await self.sessions.get(project_id, name)
        if session.turns == 0:
            return Turn(trajectory_id=name, session=session, number=0, joint=Joint.START)
        return Turn(
            trajectory_id=name,
            session=session,
            number=session.turns,
            joint=Joint.BREAK,
            break_reason="the messages do not continue a recorded turn",
        )

    async def _next(
        self,
        project_id: str,
        match: completions.ContextMatch,
        joint: trajectories.Joined | trajectories.Break,
    ) -> Turn:
        earlier = match.completion
        joined = isinstance(joint, trajectories.Joined)
        return Turn(
            trajectory_id=earlier.trajectory_id,
            session=await self.sessions.get(project_id, earlier.trajectory_id),
            number=earlier.turn + 1,
            joint=Joint.JOINED if joined else Joint.BREAK,
            break_reason=joint.reason if isinstance(joint, trajectories.Break) else None,
            prompt_token_ids=joint.prompt_token_ids if isinstance(joint, trajectories.Joined) else None,
        )

    def _continued(
        self, project_id: str, request: ChatRequest, answer: int, name: str | None
    ) -> tuple[completions.ContextMatch, trajectories.Joined | trajectories.Break] | None:
        """The recorded turn that these messages go on from, and how. In a thread: it reads and renders."""
        context = trajectories.context_hash(project_id, request.tools, request.messages[: answer + 1])
        with self.store.read() as tx:
            match = _match(tx, project_id, context, name)
        if match is None:
            return None
        earlier = match.completion
        return match, trajectories.join(
            self.renderer, earlier, earlier.choices[match.choice], request.messages, answer
        )


def _match(
    tx: Connection, project_id: str, context: str, name: str | None
) -> completions.ContextMatch | None:
    """The newest turn with this context, of the named trajectory when there is a name."""
    if name is None:
        return completions.match_context(tx, project_id, context)
    found = rows.turn_with_context(tx, project_id, name, context)
    completion = None if found is None else completions.get(tx, found.completion_id)
    if found is None or completion is None:
        return None
    return completions.ContextMatch(completion=completion, choice=found.choice)


def _name(request: ChatRequest, headers: Mapping[str, str]) -> str | None:
    """What the caller calls the trajectory. `request` was checked, the header is here."""
    session = headers.get(trajectories.SESSION_HEADER)
    if session is not None and not trajectories.can_be_named(session):
        raise errors.wrong_name(trajectories.SESSION_HEADER)
    return trajectories.named(request.metadata or {}, session)
