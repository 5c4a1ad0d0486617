"""Samples to micro-batches: which positions are computed, and at which of them a log-prob is wanted.

Samples that begin alike (same tools, same prompt, the same trajectory so far) share their common beginning:
a *row* is one shared prefix followed by a branch a sample, with a mask under which a branch sees the prefix
and itself. The model then computes exactly what it would compute for each sample alone, gradients included,
at the cost of the prefix once.

Shapes: B rows, L positions of the longest row, N sampled tokens.
Invariant: every sampled token of every sample appears exactly once in exactly one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIN_SAVING = 16
"""Tokens that sharing must save before a sample joins a row; below, the mask costs more."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One token sequence to learn from; only sampled tokens carry loss."""

    tokens: list[int]
    sampled: list[bool]
    """Whether the policy sampled this token; prompt and tool results are False. Never True at 0."""
    behaviour: list[float]
    """Log-prob of each token under the policy that sampled it; 0 where not sampled."""
    reward: float = 0.0
    strata: tuple[str, ...] = ()
    """What it is an attempt at, from the widest to the narrowest: the keys of the reward tracker."""
    group: str = ""
    """Equal for samples of one task instance by one policy."""
    policies: tuple[str, ...] = ()
    """Policies that sampled it, one a turn."""
    keys: tuple[tuple[str, int], ...] = ()
    """(completion id, choice) of every turn: what is marked as used."""

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass computes."""

    ids_BL: torch.Tensor
    positions_BL: torch.Tensor
    mask_B1LL: torch.Tensor | None
    """True where a position may look; None when rows hold one sample each (plain causal)."""
    row_N: torch.Tensor
    predictor_N: torch.Tensor
    """Position in its row whose output predicts the sampled token."""
    target_N: torch.Tensor
    behaviour_N: torch.Tensor
    sample_N: torch.Tensor
    """Index of the sample in the batch."""

    @property
    def positions(self) -> int:
        return self.ids_BL.numel()

    def to(self, device: torch.device) -> MicroBatch:
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name in self.__slots__
            for value in (getattr(self, name),)
        }
        return MicroBatch(**moved)


@dataclass(slots=True, kw_only=True)
class Row:
    """Samples (by index) that share their first `prefix` tokens."""

    members: list[int]
    prefix: int
    length: int


def micro_batches(samples: Sequence[Sample], *, max_tokens: int, pad_id: int) -> list[MicroBatch]:
    """`samples` as micro-batches of at most `max_tokens` positions each (more only for one longer row)."""
    rows = sorted(share_prefixes(samples, max_tokens), key=lambda row: -row.length)
    batches: list[list[Row]] = []
    for row in rows:
        if batches and batches[-1][0].length * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_layout(samples, members, pad_id) for members in batches]


def share_prefixes(samples: Sequence[Sample], max_tokens: int) -> list[Row]:
    """Greedy rows over the samples in lexical order, where neighbours share the longest beginnings."""
    rows: list[Row] = []
    for index in sorted(range(len(samples)), key=lambda i: samples[i].tokens):
        tokens = samples[index].tokens
        if rows:
            row = rows[-1]
            # The last token of a sample never belongs to the prefix: a branch holds at least one token.
            limit = min(row.prefix, len(tokens) - 1)
            if len(row.members) == 1:
                limit = min(len(samples[row.members[0]].tokens), len(tokens)) - 1
            prefix = common_prefix(samples[row.members[0]].tokens, tokens, limit)
            lengths = [len(samples[i].tokens) for i in (*row.members, index)]
            shared = prefix + sum(length - prefix for length in lengths)
            if shared + MIN_SAVING <= row.length + len(tokens) and shared <= max_tokens:
                rows[-1] = Row(members=[*row.members, index], prefix=prefix, length=shared)
                continue
        rows.append(Row(members=[index], prefix=0, length=len(tokens)))
    return rows


def common_prefix(one: list[int], other: list[int], limit: int) -> int:
    """Number of equal leading tokens, at most `limit`."""
    for position in range(limit):
        if one[position] != other[position]:
            return position
    return max(limit, 0)


def _layout(samples: Sequence[Sample], rows: list[Row], pad_id: int) -> MicroBatch:
    longest = max(row.length for row in rows)
    ids = torch.full((len(rows), longest), pad_id)
    positions = torch.zeros((len(rows), longest), dtype=torch.long)
    shared = any(len(row.members) > 1 for row in rows)
    mask = torch.ones((longest, longest), dtype=torch.bool).tril().repeat(len(rows), 1, 1) if shared else None
    wanted: list[tuple[int, int, int, float, int]] = []
    for number, row in enumerate(rows):
        start = row.prefix
        for index in row.members:
            sample = samples[index]
            first = start - row.prefix  # where token `row.prefix` would lie if the prefix preceded it
            end = first + len(sample.tokens)
            ids[number, start:end] = torch.tensor(sample.tokens[row.prefix :])
            positions[number, start:end] = torch.arange(row.prefix, len(sample.tokens))
            if mask is not None:
                mask[number, start:end, row.prefix : start] = False
            for at, sampled in enumerate(sample.sampled):
                if sampled:
                    predictor = at - 1 if at - 1 < row.prefix else first + at - 1
                    wanted.append((number, predictor, sample.tokens[at], sample.behaviour[at], index))
            start = end
        ids[number, : row.prefix] = torch.tensor(
            samples[row.members[0]].tokens[: row.prefix], dtype=torch.long
        )
        positions[number, : row.prefix] = torch.arange(row.prefix)
    row_N, predictor_N, target_N, behaviour_N, sample_N = zip(*wanted, strict=True)
    return MicroBatch(
        ids_BL=ids,
        positions_BL=positions,
        mask_B1LL=None if mask is None else mask[:, None],
        row_N=torch.tensor(row_N),
        predictor_N=torch.tensor(predictor_N),
        target_N=torch.tensor(target_N),
        behaviour_N=torch.tensor(behaviour_N),
        sample_N=torch.tensor(sample_N),
    )
