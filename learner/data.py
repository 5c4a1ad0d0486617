"""The judged feed to samples: reads outcomes in order, builds token sequences, counts what it drops and why.

A trajectory is one sequence where its turns were joined id for id: the last turn's prompt and sampled ids,
with loss on every sampled span and none on prompts and tool results. Where a turn could not be joined, a new
sequence begins.

Invariants: a turn (completion id, choice) goes into at most one sample; a reward is the judgement that counts
when it is handed out; the cursor never passes an outcome that was neither dropped nor handed out.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import Connection

from learner.batch import Sample
from rollout import outcomes, policies
from rollout.records import Choice, Completion, CompletionStatus, Joint, Learn, Outcome, PolicyState
from rollout.store import Store, completions, learning, projects

PAGE = 256
"""Outcomes read at once."""
SERVED = (PolicyState.PROMOTED, PolicyState.RETIRED, PolicyState.ROLLED_BACK)
"""States of the policies that were promoted at some time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_staleness: int
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class Counts:
    """What became of the outcomes up to the cursor."""

    judged: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Dropped(Exception):
    """An outcome gives no sample; the message is the reason that `ratchet learn status` shows."""


def keys_of(samples: Iterable[Sample]) -> list[tuple[str, int]]:
    """(completion id, choice) of every turn in `samples`."""
    return [key for sample in samples for key in sample.keys]


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """What one outcome judges, until it is handed out."""

    seq: int
    outcome: Outcome
    samples: list[Sample]

    @property
    def keys(self) -> list[tuple[str, int]]:
        return keys_of(self.samples)


class Feed:
    """Reads `outcomes.judged` from `cursor` on and hands samples out in order."""

    def __init__(self, store: Store, job: str, limits: Limits, cursor: int, counts: Counts) -> None:
        self.store, self.job, self.limits = store, job, limits
        self.cursor = cursor
        """Everything up to here was trained on or dropped."""
        self.counts = counts
        self._read = cursor
        self._pending: deque[_Waiting] = deque()
        self._drops: deque[tuple[int, str]] = deque()
        self._keys: set[tuple[str, int]] = set()

    def fill(self, wanted: int) -> int:
        """Reads on until `wanted` samples wait or the feed ends; returns how many wait."""
        while self.waiting < wanted:
            with self.store.read() as tx:
                page = outcomes.judged(tx, self._read, PAGE)
                for seq, outcome in page:
                    self._add(tx, seq, outcome)
            if not page:
                break
            self._read = page[-1][0]
        return self.waiting

    @property
    def waiting(self) -> int:
        return sum(len(waiting.samples) for waiting in self._pending)

    def take(self, wanted: int) -> list[Sample] | None:
        """At least `wanted` samples, in order, or None while there are fewer. Moves the cursor past them.

        A trajectory's sequences are never parted, so there may be a few more.
        """
        with self.store.read() as tx:
            served = served_policies(tx)
        while self.fill(wanted) >= wanted and self._review(wanted, served):
            pass  # what was dropped is made up for
        if self.waiting < wanted:
            return None
        taken: list[Sample] = []
        while len(taken) < wanted:
            waiting = self._pending.popleft()
            self.cursor = waiting.seq
            taken += waiting.samples
            self._keys.difference_update(waiting.keys)
            self.counts.judged += 1
        if not self._pending:
            self.cursor = self._read
        self._settle(len(taken))
        return taken

    def status(self) -> Counts:
        """The counts with what has been read beyond the cursor."""
        dropped = Counter(self.counts.dropped)
        dropped.update(reason for _, reason in self._drops)
        judged = self.counts.judged + len(self._drops) + len(self._pending)
        return Counts(judged=judged, trained=self.counts.trained, dropped=dropped)

    def _settle(self, trained: int) -> None:
        while self._drops and self._drops[0][0] <= self.cursor:
            self.counts.dropped[self._drops.popleft()[1]] += 1
            self.counts.judged += 1
        self.counts.trained += trained

    def _add(self, tx: Connection, seq: int, outcome: Outcome) -> None:
        try:
            samples = build(tx, outcome, self.limits)
            waiting = _Waiting(seq=seq, outcome=outcome, samples=samples)
            if self._keys.intersection(waiting.keys) or learning.used_keys(tx, self.job, waiting.keys):
                raise Dropped("duplicate")
        except Dropped as dropped:
            self._drops.append((seq, str(dropped)))
            return
        self._keys.update(waiting.keys)
        self._pending.append(waiting)

    def _review(self, wanted: int, served: list[str]) -> bool:
        """Judges anew what is about to be handed out: policies and outcomes came while it waited.

        Drops what is stale or struck out, and takes over the judgement that counts now. Returns
        whether any was dropped.
        """
        kept: deque[_Waiting] = deque()
        before = len(self._drops)
        with self.store.read() as tx:
            while self._pending and sum(len(waiting.samples) for waiting in kept) < wanted:
                waiting = self._pending.popleft()
                try:
                    if staleness(waiting.samples, served) > self.limits.max_staleness:
                        raise Dropped("stale")
                    reward = _counting(tx, waiting.outcome)[1]
                except Dropped as dropped:
                    self._drops.append((waiting.seq, str(dropped)))
                    self._keys.difference_update(waiting.keys)
                    continue
                for sample in waiting.samples:
                    sample.reward = reward
                kept.append(waiting)
        self._pending = kept + self._pending
        self._drops = deque(sorted(self._drops))
        return len(self._drops) > before


def served_policies(tx: Connection) -> list[str]:
    """The policies that led to the promoted one, which is the last; later ones were rolled back."""
    promoted = policies.serving(tx).promoted or ""
    return [policy.id for policy in policies.list_policies(tx, SERVED) if policy.id <= promoted]


def staleness(samples: Iterable[Sample], served: Iterable[str]) -> int:
    """How many promotions lie between the oldest policy that sampled any of `samples` and the promoted one.

    0 for samples of the promoted policy, and of a candidate. Candidates are published, and promoted, in the
    order of their ids.
    """
    oldest = min(policy for sample in samples for policy in sample.policies)
    return sum(policy > oldest for policy in served)


def build(tx: Connection, outcome: Outcome, limits: Limits) -> list[Sample]:
    """The samples that `outcome` judges. Raises Dropped."""
    reward = _reward(tx, outcome)
    turns = _turns(tx, outcome)
    samples = sequences(turns, outcome.choice if outcome.completion_id else 0)
    trainable = [sample for sample in samples if sample.num_sampled]
    if not trainable:
        reasons = {turn.untrainable_reason or "unstated" for turn in turns if not turn.trainable}
        raise Dropped(f"untrainable: {min(reasons)}" if reasons else "broken")
    if any(len(sample.tokens) > limits.max_tokens for sample in trainable):
        raise Dropped("too long")
    for sample in trainable:
        sample.reward = reward
    return trainable


def sequences(turns: list[Completion], last_choice: int) -> list[Sample]:
    """One sample for each run of joined turns. Raises Dropped when ids and log-probs do not fit."""
    samples: list[Sample] = []
    for number, turn in enumerate(turns):
        following = turns[number + 1] if number + 1 < len(turns) else None
        choice = _continued(turn, following, last_choice)
        whole = len(choice.token_ids) == len(choice.logprobs) and all(map(math.isfinite, choice.logprobs))
        if not whole or not turn.prompt_token_ids:
            raise Dropped("broken")
        joined = (
            turn.joint is Joint.JOINED
            and samples
            and turn.prompt_token_ids[: len(samples[-1].tokens)] == samples[-1].tokens
        )
        if joined:
            _append(samples[-1], turn, choice)
        else:
            start = Sample(tokens=[], sampled=[], behaviour=[], strata=strata(turn), group=_group(turn))
            _append(start, turn, choice)
            samples.append(start)
    return samples


def strata(turn: Completion) -> tuple[str, ...]:
    """From everything to the task's path (its last part names one instance) to the tools it offers."""
    *path, _ = (turn.task or "").split("/")
    levels = [""] + ["/".join(path[: depth + 1]) for depth in range(len(path))]
    names = sorted(tool.get("function", {}).get("name", "") for tool in turn.tools or [])
    return (*levels, f"{levels[-1]} {','.join(names)}") if names else tuple(levels)


def _append(sample: Sample, turn: Completion, choice: Choice) -> None:
    """Extends `sample` by the rest of the turn's prompt and what was sampled after it."""
    prompt = turn.prompt_token_ids[len(sample.tokens) :]
    sample.tokens += [*prompt, *choice.token_ids]
    # Log-probs that are not the policy's at temperature alone teach nothing; the text stays as context.
    teaches = turn.trainable and turn.status is CompletionStatus.COMPLETED
    sample.sampled += [False] * len(prompt) + [teaches] * len(choice.token_ids)
    sample.behaviour += [0.0] * len(prompt) + list(choice.logprobs)
    sample.policies = (*sample.policies, turn.policy_id)
    sample.keys = (*sample.keys, (turn.id, choice.index))


def _continued(turn: Completion, following: Completion | None, last_choice: int) -> Choice:
    """The choice that the conversation went on from; of the last turn, the one that was judged."""
    if following is not None:
        for choice in turn.choices:
            known = [*turn.prompt_token_ids, *choice.token_ids]
            if following.prompt_token_ids[: len(known)] == known:
                return choice
        last_choice = 0
    for choice in turn.choices:
        if choice.index == last_choice:
            return choice
    raise Dropped("broken")


def _group(turn: Completion) -> str:
    prompt = hashlib.sha256(repr(turn.prompt_token_ids).encode()).hexdigest()[:16]
    return f"{turn.policy_id} {turn.task or ''} {prompt}"


def _reward(tx: Connection, outcome: Outcome) -> float:
    """Its value. Raises Dropped unless this outcome is the one that counts for its subject."""
    if not outcome.trusted:
        raise Dropped("untrusted")
    if outcome.error is not None:
        raise Dropped("judge failed")
    if outcome.metric != "reward":
        raise Dropped("another metric")
    counts, value = _counting(tx, outcome)
    if counts != outcome.id:
        raise Dropped("superseded")
    return value


def _counting(tx: Connection, outcome: Outcome) -> tuple[str, float]:
    """Id and value of what counts now for the subject of `outcome`. Raises Dropped when nothing trains it."""
    project = projects.get_project(tx, outcome.project_id)
    if project is None or project.learn is Learn.NONE:
        raise Dropped("learn is none")
    if outcome.completion_id is not None:
        judgements = outcomes.for_completion(tx, outcome.project_id, outcome.completion_id, outcome.choice)
    else:
        assert outcome.trajectory_id is not None
        judgements = outcomes.for_trajectory(tx, outcome.project_id, outcome.trajectory_id)
    counts = outcomes.effective(judgements)
    if counts is None or counts.value is None:
        raise Dropped("superseded")
    if abs(counts.value) > outcomes.MAX_VALUE:
        raise Dropped("out of range")
    return counts.id, counts.value


def _turns(tx: Connection, outcome: Outcome) -> list[Completion]:
    """The completions that `outcome` judges, failed calls left out. Raises Dropped when none was kept."""
    if outcome.completion_id is not None:
        found = completions.get(tx, outcome.completion_id)
        turns = [] if found is None or found.project_id != outcome.project_id else [found]
    else:
        assert outcome.trajectory_id is not None
        turns = completions.of_trajectory(tx, outcome.project_id, outcome.trajectory_id)
    if not turns:
        raise Dropped("not kept")
    turns = [turn for turn in turns if turn.status is CompletionStatus.COMPLETED and turn.choices]
    if not turns:
        raise Dropped("not completed")
    return turns
