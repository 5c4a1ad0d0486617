"""From trained weights to a policy: the folder, its manifest, and the fingerprint that replicas must match.

Invariant: a policy is registered only after its folder is complete on disk, and its fingerprint was computed
with the very tensors in the folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from learner.batch import Sample, micro_batches
from learner.engine import Engine
from learner.model import Adapter, read_adapter, save_adapter, without_effect
from rollout.artifacts import FINGERPRINT, Artifacts
from rollout.records import Fingerprint, FingerprintPrompt, Policy, PolicyKind, PolicyManifest

PROMPTS, PROMPT_TOKENS, POSITIONS = 4, 16, 9
"""Size of a fingerprint: prompts, tokens of each at most, positions of each. Replicas compute the prompts
between their callers' requests, which wait meanwhile."""
LIKELY = -6.0
"""Positions below this log-prob are used only for want of others: rounding moves unlikely tokens most."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What a new policy comes from."""

    base: str
    """`rollout.artifacts.base_id` of the frozen weights."""
    parent: str
    """The policy that it must beat."""
    parent_weights: Weights
    job: str
    step: int
    recipe: dict[str, Any]


def weights_of(policy: Policy, adapter: Adapter, like: Weights) -> Weights:
    """The adapter of a registered policy; one without effect for the bare base."""
    if policy.manifest.kind is PolicyKind.FULL:
        return without_effect(like)
    return read_adapter(Path(policy.path), adapter)


def manifest_of(policy_id: str, adapter: Adapter, lineage: Lineage) -> PolicyManifest:
    """The manifest without `files`, which `Artifacts.write_policy` fills in."""
    return PolicyManifest(
        id=policy_id,
        parent=lineage.parent,
        base=lineage.base,
        kind=PolicyKind.ADAPTER,
        target_modules=sorted(adapter.target_modules),
        rank=adapter.rank,
        job=lineage.job,
        step=lineage.step,
        recipe=lineage.recipe,
        files={},
        created_at=time.time(),
    )


def fingerprint(
    engine: Engine, policy_id: str, lineage: Lineage, prompts: Sequence[Sequence[int]], pad_id: int
) -> Fingerprint:
    """Log-probs of `prompts` under the trained weights, their parent and the base, where they differ most.

    Of each prompt the end alone, where the answer is.
    Every process calls it; all compute the same.
    """
    probes = [_probe(list(tokens[-PROMPT_TOKENS:])) for tokens in prompts[:PROMPTS]]
    policy = _score(engine, probes, pad_id)
    with engine.using(lineage.parent_weights):
        parent = _score(engine, probes, pad_id)
    with engine.using(without_effect(lineage.parent_weights)):
        base = _score(engine, probes, pad_id)
    return Fingerprint(
        policy=policy_id,
        parent=lineage.parent,
        prompts=[_pick(*values) for values in zip(probes, policy, parent, base, strict=True)],
    )


def write(
    artifacts: Artifacts, manifest: PolicyManifest, adapter: Adapter, weights: Weights, mark: Fingerprint
) -> Path:
    """The policy's folder, whole."""

    def fill(folder: Path) -> None:
        save_adapter(folder, adapter, weights)
        (folder / FINGERPRINT).write_bytes(msgspec.json.encode(mark))

    return artifacts.write_policy(manifest, fill)


def export(folder: Path, target: Path) -> None:
    """Moves a policy folder to `target`, outside the artifacts, in place of what is there."""
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(folder, target)


def _probe(tokens: list[int]) -> Sample:
    return Sample(tokens=tokens, sampled=[False] + [True] * (len(tokens) - 1), behaviour=[0.0] * len(tokens))


def _score(engine: Engine, probes: list[Sample], pad_id: int) -> list[list[float]]:
    """Log-prob of every token but the first of each probe."""
    scores: list[list[float]] = []
    for probe in probes:
        (batch,) = micro_batches([probe], max_tokens=PROMPT_TOKENS, pad_id=pad_id)
        scores.append(engine.score(batch).tolist())
    return scores


def _pick(probe: Sample, policy: list[float], parent: list[float], base: list[float]) -> FingerprintPrompt:
    """The positions that tell the policy from its parent best, in order."""

    def preference(index: int) -> tuple[bool, float]:
        likely = min(policy[index], parent[index], base[index]) > LIKELY
        return not likely, -abs(policy[index] - parent[index])

    chosen = sorted(sorted(range(len(policy)), key=preference)[:POSITIONS])
    return FingerprintPrompt(
        token_ids=probe.tokens,
        positions=[index + 1 for index in chosen],
        policy=[policy[index] for index in chosen],
        parent=[parent[index] for index in chosen],
        base=[base[index] for index in chosen],
    )
