"""One update: a batch of samples with advantages to a step of the optimizer, and what it measured.

Every process holds the whole batch and computes its share of the micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from learner.batch import MicroBatch, Sample, micro_batches
from learner.objectives.rl import Bounds, Inputs, Terms, policy_gradient
from learner.publish import Weights
from learner.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The promoted policy, which the trained one must not leave far behind."""

    policy: str
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of one update, over all of its samples."""

    reward: float
    samples: int
    taught: int
    """Samples with an advantage; the others are not computed, and the figures below are of these."""
    tokens: int
    """Sampled tokens."""
    positions: int
    """Positions computed, padding included and shared prefixes once."""
    truncated: float
    masked: float
    rejected: float
    """Shares of the sampled tokens."""
    kl: float
    """To the promoted policy, nats a token."""
    mismatch: float
    """Mean |log pi - log mu|, nats a token."""
    grad_norm: float
    seconds: float


class Abandoned(Exception):
    """The process was asked to stop; nothing of the update counts."""


def update(
    session: Session,
    samples: Sequence[Sample],
    advantages: Sequence[float],
    reference: Reference,
    stopping: Callable[[], bool],
) -> Metrics:
    """Makes one step, or none when no sample has an advantage.

    Raises Abandoned, on every process, when `stopping` says so on rank 0.
    """
    engine, started = session.engine, time.monotonic()
    reward = sum(sample.reward for sample in samples) / len(samples)
    taught = [(sample, value) for sample, value in zip(samples, advantages, strict=True) if value]
    settings = session.settings
    bounds = Bounds(
        ratio_cap=settings.ratio_cap,
        ratio_floor=settings.ratio_floor,
        sequence_band=settings.sequence_band,
        kl_coefficient=settings.kl_coefficient,
    )
    advantage_S = torch.tensor([value for _, value in taught], dtype=torch.float32, device=engine.device)
    total = sum(sample.num_sampled for sample, _ in taught)
    totals = _Totals()
    for batch, on_reference, counts in _shares(session, [sample for sample, _ in taught], reference.policy):
        if engine.broadcast(stopping()):
            raise Abandoned
        terms = policy_gradient(
            _inputs(session, batch, reference, advantage_S, on_reference=on_reference), bounds
        )
        engine.backward(terms.loss / total if counts else terms.loss * 0.0)
        if counts:
            totals.add(terms, batch)
    values = dict(zip(totals.names(), engine.sum(totals.values()), strict=True))
    # The denominator was every sampled token; masked ones leave it here. With none left nothing moves.
    scale = total / values["kept"] if values["kept"] else 0.0
    grad_norm = engine.step(scale) if taught else 0.0
    per_token = 1 / max(total, 1)
    return Metrics(
        reward=reward,
        samples=len(samples),
        taught=len(taught),
        tokens=total,
        positions=int(values["positions"]),
        truncated=values["truncated"] * per_token,
        masked=values["masked"] * per_token,
        rejected=values["rejected"] * per_token,
        kl=values["kl"] * per_token,
        mismatch=values["mismatch"] * per_token,
        grad_norm=grad_norm,
        seconds=time.monotonic() - started,
    )


def _inputs(
    session: Session,
    batch: MicroBatch,
    reference: Reference,
    advantage_S: torch.Tensor,
    *,
    on_reference: bool,
) -> Inputs:
    """Log-probs of a micro-batch; those of the reference are the logged ones where it sampled."""
    engine = session.engine
    behaviour_N = batch.behaviour_N.to(engine.device)
    reference_N = behaviour_N
    if not on_reference and session.settings.kl_coefficient > 0:
        with engine.using(reference.weights):
            reference_N = engine.score(batch)
    return Inputs(
        logprobs_N=engine.logprobs(batch),
        behaviour_N=behaviour_N,
        reference_N=reference_N,
        sample_N=batch.sample_N.to(engine.device),
        advantage_S=advantage_S,
    )


def _shares(
    session: Session, samples: Sequence[Sample], promoted: str
) -> Iterator[tuple[MicroBatch, bool, bool]]:
    """This process's micro-batches, whether the promoted policy sampled them, and whether they count.

    Every process gets equally many of each sort, since forward passes are collective under ZeRO; one without
    a batch of its own computes another's for nothing.
    """
    engine = session.engine
    for on_reference in (True, False):
        members = [
            index
            for index, sample in enumerate(samples)
            if (set(sample.policies) == {promoted}) is on_reference
        ]
        if not members:
            continue
        batches = micro_batches(
            [samples[index] for index in members],
            max_tokens=session.settings.tokens_per_micro_batch,
            pad_id=session.pad_id,
        )
        for batch in batches:
            batch.sample_N = torch.tensor(members)[batch.sample_N]
        for start in range(0, len(batches), engine.world):
            mine = start + engine.rank
            yield batches[min(mine, len(batches) - 1)], on_reference, mine < len(batches)


class _Totals:
    """Sums of `Terms` over this process's micro-batches."""

    def __init__(self) -> None:
        self._sums = {field.name: 0.0 for field in fields(Terms) if field.name != "loss"} | {"positions": 0.0}

    def add(self, terms: Terms, batch: MicroBatch) -> None:
        for name in self._sums:
            self._sums[name] += batch.positions if name == "positions" else getattr(terms, name)

    def names(self) -> list[str]:
        return list(self._sums)

    def values(self) -> list[float]:
        return list(self._sums.values())
