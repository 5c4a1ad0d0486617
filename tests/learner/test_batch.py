"""Sharing prefixes changes what is computed, not what comes out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from learner import batch as batches
from learner import model as models
from learner.batch import MicroBatch, Sample, common_prefix, micro_batches, share_prefixes
from learner.model import Loading
from tests.learner.training import ADAPTER, samples


def alone(made: list[Sample]) -> list[MicroBatch]:
    return [micro_batches([sample], max_tokens=4096, pad_id=2)[0] for sample in made]


def logprobs(model: models.PolicyModel, made: list[Sample], computed: list[MicroBatch]) -> torch.Tensor:
    """Summed log-prob of each sample."""
    totals = torch.zeros(len(made))
    for micro in computed:
        totals = totals.index_add(0, micro.sample_N, model(micro))
    return totals


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> models.PolicyModel:
    loaded = models.load(str(tiny_moe), ADAPTER, Loading(), seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.trainable().values():
            parameter.normal_(std=0.05, generator=generator)
    return loaded


@pytest.mark.parametrize("max_tokens", [48, 128, 4096])
def test_shared_prefixes_give_the_same_logprobs_and_gradients(
    model: models.PolicyModel, max_tokens: int
) -> None:
    made = samples(12)
    computed = micro_batches(made, max_tokens=max_tokens, pad_id=2)
    if max_tokens > 48:
        assert sum(micro.positions for micro in computed) < sum(len(s.tokens) for s in made)
    weight_S = torch.linspace(-1, 1, len(made))
    gradients, sums = [], []
    for micros in (computed, alone(made)):
        if micros is not computed:
            for index, micro in enumerate(micros):
                micro.sample_N = torch.full_like(micro.sample_N, index)
        totals = logprobs(model, made, micros)
        model.zero_grad()
        (totals * weight_S).sum().backward()
        sums.append(totals.detach())
        gradients.append([p.grad.clone() for p in model.trainable().values() if p.grad is not None])
    torch.testing.assert_close(sums[0], sums[1], atol=1e-4, rtol=1e-5)
    for shared, single in zip(*gradients, strict=True):
        torch.testing.assert_close(shared, single, atol=1e-4, rtol=1e-3)


def test_every_sampled_token_is_wanted_once_with_its_predecessor() -> None:
    rng = random.Random(5)
    for _ in range(20):
        made = samples(rng.randrange(1, 10), seed=rng.randrange(1000))
        seen: dict[int, list[tuple[int, int]]] = {}
        for micro in micro_batches(made, max_tokens=rng.choice([40, 100, 1000]), pad_id=2):
            for row, predictor, target, sample in zip(
                micro.row_N.tolist(),
                micro.predictor_N.tolist(),
                micro.target_N.tolist(),
                micro.sample_N.tolist(),
                strict=True,
            ):
                before = int(micro.ids_BL[row, predictor])
                assert int(micro.positions_BL[row, predictor]) + 1 < len(made[sample].tokens)
                seen.setdefault(sample, []).append((before, target))
        for index, sample in enumerate(made):
            wanted = [(sample.tokens[at - 1], sample.tokens[at]) for at, s in enumerate(sample.sampled) if s]
            assert seen[index] == wanted


def test_sampled_tokens_inside_a_shared_prefix_count_for_every_sample(model: models.PolicyModel) -> None:
    first = list(range(100, 140))
    made = [
        Sample(
            tokens=[*first, *tail],
            sampled=[False] * 20 + [True] * 20 + [False, *[True] * (len(tail) - 1)],
            behaviour=[0.0] * (40 + len(tail)),
        )
        for tail in ([7, 8, 9], [7, 8, 10, 11], [12, 13])
    ]
    (computed,) = micro_batches(made, max_tokens=4096, pad_id=2)
    assert len(computed.ids_BL) == 1
    assert torch.bincount(computed.sample_N).tolist() == [sample.num_sampled for sample in made]
    single = [float(model(micro).sum()) for micro in alone(made)]
    assert logprobs(model, made, [computed]).tolist() == pytest.approx(single, abs=1e-3)


def test_rows_hold_at_most_the_allowed_positions() -> None:
    made = samples(20)
    assert all(row.length <= 90 for row in share_prefixes(made, 90))
    for micro in micro_batches(made, max_tokens=90, pad_id=2):
        assert micro.positions <= 90 or len(micro.ids_BL) == 1


def test_equal_samples_still_have_a_branch_each() -> None:
    sample = samples(1)[0]
    (row,) = share_prefixes([sample, sample, sample], 4096)
    assert row.prefix == len(sample.tokens) - 1
    assert row.length == len(sample.tokens) + 2


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4], 3) == 2
    assert common_prefix([1, 2], [1, 2], 1) == 1
    assert common_prefix([1], [2], 0) == 0
    assert batches.MIN_SAVING > 0
