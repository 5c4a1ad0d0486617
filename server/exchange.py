"""One chat request from arrival to record: which policy and replica, which prompt, what is kept.

`Exchanges.open` decides everything before the engine is asked; `Exchange` is then driven by the route, which
streams or waits. Invariant: what a caller sees end was committed before; a caller who left is recorded as
cancelled, and the engine stops working for it at once.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from sqlalchemy.exc import DataError, SQLAlchemyError

from rollout import capture, trajectories
from rollout.records import Completion, CompletionStatus, Joint
from rollout.store import completions
from server import errors, routing, warm
from server.auth import Caller
from server.config import GatewayConfig
from server.engine.client import ChatEvent, ChatResult
from server.engine.errors import EngineRejected, EngineUnavailable
from server.metrics import Metrics
from server.schemas import ChatRequest
from server.sessions import Session
from server.tiers import AUTO, Fleet, Named, Replica, engine_model
from server.turns import Turn, Turns
from server.warm import Prefixes
from server.writer import Writer, turn_of

log = logging.getLogger(__name__)
FINISHES = ("stop", "length", "tool_calls", "content_filter")
ABORTED = EngineRejected(500, {"message": "the engine aborted the request"})
"""Without a finish reason, or with one that is not OpenAI's, an answer is not whole."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request in flight. Call `answer`, or `events` to its end, or `abandon`; then `close`."""

    request: ChatRequest
    recorder: capture.Recorder
    keep: bool
    replica: Replica
    turn: Turn
    engine_body: dict[str, Any]
    priority: int
    parts: Exchanges
    started: float
    ttft_s: float | None = None
    held: ExitStack = field(default_factory=ExitStack)
    ended: bool = False

    async def answer(self) -> ChatResult:
        """The whole answer, after its record is committed. Raises ApiError."""
        try:
            return await self._answer()
        except errors.ApiError:
            raise
        except Exception as error:
            raise await self.broke(error) from error

    async def _answer(self) -> ChatResult:
        try:
            result = await self.replica.engine.chat(
                self.engine_body, prompt_token_ids=self.turn.prompt_token_ids, priority=self.priority
            )
        except (EngineRejected, EngineUnavailable) as error:
            raise await self._failed(error) from error
        self.ttft_s = time.monotonic() - self.started
        self.recorder.prompt(result.prompt_token_ids)
        self.recorder.pieces(result.choices)
        self.recorder.body(result.body)
        self.recorder.count(result.body.get("usage"))
        if any(choice.get("finish_reason") not in FINISHES for choice in result.body["choices"]):
            raise await self._failed(ABORTED)
        await self._commit(CompletionStatus.COMPLETED)
        return result

    async def events(self) -> AsyncGenerator[ChatEvent]:
        """Events as the engine sends them. Ends normally only when the answer is complete, uncommitted."""
        stream = cast(
            AsyncGenerator[ChatEvent],
            self.replica.engine.stream_chat(
                self.engine_body, prompt_token_ids=self.turn.prompt_token_ids, priority=self.priority
            ),
        )
        finished: set[int] = set()
        try:
            async with aclosing(stream):
                async for event in stream:
                    finished |= self._note(event)
                    yield event
        except (EngineRejected, EngineUnavailable) as error:
            raise await self._failed(error) from error
        if len(finished) != (self.request.n or 1):
            raise await self._failed(ABORTED)

    def _note(self, event: ChatEvent) -> set[int]:
        """Record one event; the choices it finishes."""
        if self.ttft_s is None and event.pieces:
            self.ttft_s = time.monotonic() - self.started
        self.recorder.prompt(event.prompt_token_ids)
        self.recorder.pieces(event.pieces)
        self.recorder.chunk(event.chunk)
        self.recorder.count(event.usage)
        return {c["index"] for c in event.chunk["choices"] if c.get("finish_reason") in FINISHES}

    async def commit(self) -> None:
        """Make the record of a complete answer durable. Raises ApiError when it cannot be."""
        await self._commit(CompletionStatus.COMPLETED)

    async def abandon(self) -> None:
        """The caller is gone: record what there was, which never trains."""
        if not self.ended:
            try:
                await self._commit(CompletionStatus.CANCELLED, "the caller left")
            except errors.ApiError as error:
                log.warning("%s: cancelled and not recorded: %s", self.recorder.request.id, error.message)

    async def broke(self, error: Exception) -> errors.ApiError:
        """What to tell the caller of a fault of ours; the record says it too."""
        log.error("%s failed", self.recorder.request.id, exc_info=error)
        if not self.ended:
            await self._record_error(f"{type(error).__name__}: {error}")
        return errors.server_failed()

    def close(self) -> None:
        self.held.close()

    async def _failed(self, error: EngineRejected | EngineUnavailable) -> errors.ApiError:
        """What to tell the caller of a fault of the engine; records it when tokens were sampled."""
        if isinstance(error, EngineUnavailable) or error.status in (404, 500):
            log.warning("%s: %s", self.replica.id, error)
            if isinstance(error, EngineUnavailable) and not await self.replica.engine.health():
                # Out of rotation at once; the reconciler puts it back when it answers and is verified.
                self.replica.ready, self.replica.why_not = False, str(error)
            answer = errors.engine_lost()
        else:
            answer = self.parts.refused(error)
        await self._record_error(str(error))
        return answer

    async def _record_error(self, why: str) -> None:
        try:
            await self._commit(CompletionStatus.ERROR, why)
        except errors.ApiError as unrecorded:
            log.warning("%s: failed and not recorded: %s", self.recorder.request.id, unrecorded.message)

    async def _commit(self, status: CompletionStatus, error: str | None = None) -> None:
        self.ended = True
        completion = self.recorder.completion(
            status=status,
            error=error,
            ttft_ms=None if self.ttft_s is None else self.ttft_s * 1e3,
            latency_ms=(time.monotonic() - self.started) * 1e3,
        )
        self.parts.measure(completion, self.ttft_s)
        if status is CompletionStatus.COMPLETED:
            self.parts.prefixes.observe(
                self.engine_body["cache_salt"], self.request.messages, self.request.tools
            )
        if not self.keep or (status is not CompletionStatus.COMPLETED and not self.recorder.sampled):
            return
        hashes = trajectories.contexts(completion) if completion.status is CompletionStatus.COMPLETED else []
        try:
            await self.parts.writer.run(
                lambda tx: completions.insert(tx, completion, hashes),
                turn_of(completion.project_id, completion.trajectory_id),
            )
        except SQLAlchemyError as failure:
            self.parts.metrics.commit_failures.inc()
            log.error("%s: not committed: %s", completion.id, failure)
            told = errors.cannot_be_stored if isinstance(failure, DataError) else errors.not_recorded
            raise told() from failure
        self.turn.session.turns = max(self.turn.session.turns, self.turn.number + 1)


@dataclass(slots=True, kw_only=True)
class Exchanges:
    """Everything an exchange needs of the gateway."""

    config: GatewayConfig
    max_model_len: int
    base: str
    writer: Writer
    fleet: Fleet
    turns: Turns
    prefixes: Prefixes
    metrics: Metrics

    async def open(self, caller: Caller, request: ChatRequest, headers: Mapping[str, str]) -> Exchange:
        """Decide policy, replica and prompt. Raises ApiError (404, 400, 503)."""
        started, now = time.monotonic(), time.time()
        priority = routing.priority(headers, request.service_tier)
        named = self.fleet.named(request.model, request.service_tier, caller.project.default_tier)
        keep = capture.wanted(caller.project, request.store)
        turn = await self.turns.of(caller.project.id, request, headers, keep)
        salt = _cache_salt(caller.project.id, self.base)
        policy_id, replica = self._place(named, request, salt, turn.session, now)
        turn.session.on_replica(replica.tier, replica.id)
        if named.policy is None:
            turn.session.answered(policy_id, now)
        recorder = capture.Recorder(
            capture.Request(
                id=f"chatcmpl-{uuid.uuid4().hex}",
                project_id=caller.project.id,
                key_id=caller.key.id,
                created_at=now,
                trajectory_id=turn.trajectory_id,
                turn=turn.number,
                task=(request.metadata or {}).get("task"),
                model=request.model,
                policy_id=policy_id,
                tier=replica.tier,
                replica_id=replica.id,
                messages=request.messages,
                tools=request.tools,
                params=request.params(),
                joint=turn.joint,
                break_reason=turn.break_reason,
                metadata=request.metadata or {},
            )
        )
        recorder.expected_prompt = turn.prompt_token_ids
        exchange = Exchange(
            request=request,
            recorder=recorder,
            keep=keep,
            replica=replica,
            turn=turn,
            engine_body=_engine_body(request, engine_model(self.fleet.policies[policy_id]), salt),
            priority=priority,
            parts=self,
            started=started,
        )
        exchange.held.enter_context(replica.carrying(policy_id))
        return exchange

    def refused(self, error: EngineRejected) -> errors.ApiError:
        """An engine's refusal in our words."""
        message = str(error.error.get("message", ""))
        if "maximum context length" in message or "max_model_len" in message:
            return errors.context_overflow(self.max_model_len)
        status = error.status if 400 <= error.status < 500 else 500
        return errors.ApiError(status, message, param=error.error.get("param"), code="invalid_request")

    def measure(self, completion: Completion, ttft_s: float | None) -> None:
        tier, policy = completion.tier, completion.policy_id
        self.metrics.requests.labels(tier, policy, completion.status.value).inc()
        self.metrics.tokens.labels(tier, policy, "prompt").inc(completion.usage.prompt_tokens)
        self.metrics.tokens.labels(tier, policy, "cached").inc(completion.usage.cached_tokens)
        self.metrics.tokens.labels(tier, policy, "sampled").inc(completion.usage.completion_tokens)
        if ttft_s is not None:
            self.metrics.ttft.labels(tier).observe(ttft_s)
        self.metrics.latency.labels(tier).observe(completion.latency_ms / 1e3)
        if (completion.error or "").startswith("capture_mismatch"):
            self.metrics.mismatches.inc()
            log.error("%s: %s", completion.id, completion.error)
        if completion.joint is Joint.BREAK:
            self.metrics.breaks.labels(completion.break_reason).inc()
        elif completion.joint is Joint.JOINED:
            self.metrics.joined.inc()

    def _place(
        self, named: Named, request: ChatRequest, salt: str, session: Session, now: float
    ) -> tuple[str, Replica]:
        """The policy and the replica; both are of this very moment, so nothing is awaited in here."""
        tier, pinned = named.tier, named.policy
        replicas = self.fleet.replicas if tier == AUTO else self.fleet.of(tier)
        replicas = routing.without_drafts(tier, replicas, request.params())
        begins = warm.shared(salt, request.messages, request.tools) if len(replicas) > 1 else None
        prefix = None if begins is None else msgspec.json.encode(begins)
        held = session.held(now, self.config.policy_hold_s)
        promoted = self.fleet.serving.promoted
        if not self.fleet.has_served(held):
            held = None
        for policy in [pinned] if pinned else [held, promoted]:
            if policy is None or policy not in self.fleet.policies:
                continue
            able = routing.able(replicas, policy)
            chosen_tier = routing.choose_tier(tier, able)
            able = [replica for replica in able if replica.tier == chosen_tier]
            replica = routing.choose(able, session.replica_of_tier.get(chosen_tier), prefix)
            if replica is not None:
                return policy, replica
        reasons = "; ".join(f"{r.id}: {r.why_not}" for r in replicas if r.why_not)
        raise errors.tier_unavailable(tier, reasons or f"policy {pinned} is still being verified")


def _engine_body(request: ChatRequest, model: str, cache_salt: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": request.messages, "cache_salt": cache_salt}
    if request.tools:
        body["tools"] = request.tools
    if request.top_logprobs:
        body["top_logprobs"] = request.top_logprobs
    return body | request.params()


def _cache_salt(project_id: str, base: str) -> str:
    """Tenants never share cached prefixes, and a prefix of another base is never reused."""
    return hashlib.sha256(f"{project_id}\0{base}".encode()).hexdigest()[:32]
