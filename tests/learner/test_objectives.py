"""The policy gradient against sums worked out by hand and by plain loops."""

from __future__ import annotations

import math
import random

import pytest
import torch

from learner.objectives.rl import Bounds, Inputs, policy_gradient, within_band
from learner.objectives.sft import negative_log_likelihood

BOUNDS = Bounds(ratio_cap=2.0, ratio_floor=0.5, sequence_band=(0.1, 10.0), kl_coefficient=0.0)


def inputs(
    ratios: list[float], sample: list[int], advantages: list[float], reference: list[float] | None = None
) -> Inputs:
    logprobs = torch.full((len(ratios),), -1.0, requires_grad=True)
    behaviour = -1.0 - torch.tensor(ratios).log()
    return Inputs(
        logprobs_N=logprobs,
        behaviour_N=behaviour,
        reference_N=behaviour if reference is None else torch.tensor(reference),
        sample_N=torch.tensor(sample),
        advantage_S=torch.tensor(advantages),
    )


def test_weights_are_truncated_and_low_ratios_masked() -> None:
    given = inputs([1.0, 4.0, 0.4, 0.6], [0, 0, 1, 1], [1.0, -2.0])
    terms = policy_gradient(given, BOUNDS)
    terms.loss.backward()
    assert given.logprobs_N.grad is not None
    # -weight * advantage: 1 * 1, 4 cut to 2 * 1, 0.4 masked, 0.6 * -2
    assert given.logprobs_N.grad.tolist() == pytest.approx([-1.0, -2.0, 0.0, 1.2])
    assert (terms.kept, terms.tokens, terms.truncated, terms.masked, terms.rejected) == (3, 4, 1, 1, 0)
    assert float(terms.loss) == pytest.approx(1.0 + 2.0 - 1.2)


def test_a_sample_outside_the_band_is_rejected_whole() -> None:
    bounds = Bounds(ratio_cap=2.0, ratio_floor=0.0, sequence_band=(0.9, 1.1), kl_coefficient=0.0)
    # Geometric means: sqrt(0.5 * 2) = 1 and sqrt(1 * 1.5) = 1.22.
    given = inputs([0.5, 2.0, 1.0, 1.5], [0, 0, 1, 1], [1.0, 1.0])
    terms = policy_gradient(given, bounds)
    terms.loss.backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([-0.5, -2.0, 0.0, 0.0])
    assert (terms.kept, terms.rejected, terms.masked) == (2, 2, 0)


def test_the_band_does_not_depend_on_length() -> None:
    ratio = torch.full((30,), 1.2).log()
    sample = torch.tensor([0] + [1] * 29)
    assert within_band(ratio, sample, 2, (0.5, 1.3)).all()
    assert not within_band(ratio, sample, 2, (0.5, 1.1)).any()


def test_kl_enters_the_reward_of_each_token() -> None:
    bounds = Bounds(ratio_cap=2.0, ratio_floor=0.0, sequence_band=(0.1, 10.0), kl_coefficient=0.1)
    given = inputs([1.0, 1.0], [0, 0], [1.0], reference=[-1.5, -0.5])
    terms = policy_gradient(given, bounds)
    terms.loss.backward()
    assert given.logprobs_N.grad is not None
    # log pi - log ref is +0.5 and -0.5: advantage 1 - 0.05 and 1 + 0.05.
    assert given.logprobs_N.grad.tolist() == pytest.approx([-0.95, -1.05])
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(0.5) - 1 - 0.5)
    assert terms.kl == pytest.approx(k3)


def test_extreme_ratios_stay_finite() -> None:
    given = Inputs(
        logprobs_N=torch.tensor([-1e-4, -200.0, -1.0], requires_grad=True),
        behaviour_N=torch.tensor([-200.0, -1e-4, -1.0]),
        reference_N=torch.tensor([-1.0, -1.0, -1.0]),
        sample_N=torch.tensor([0, 1, 2]),
        advantage_S=torch.tensor([1.0, -1.0, 1.0]),
    )
    terms = policy_gradient(given, BOUNDS)
    terms.loss.backward()
    assert given.logprobs_N.grad is not None
    assert torch.isfinite(given.logprobs_N.grad).all()
    assert terms.kept == 1


def test_matches_a_plain_loop_on_random_batches() -> None:
    rng = random.Random(1)
    bounds = Bounds(ratio_cap=1.5, ratio_floor=0.6, sequence_band=(0.8, 1.3), kl_coefficient=0.05)
    for _ in range(30):
        samples = rng.randrange(1, 5)
        sample = [index for index in range(samples) for _ in range(rng.randrange(1, 6))]
        rng.shuffle(sample)
        pi = [-rng.random() * 3 for _ in sample]
        mu = [value + rng.gauss(0, 0.4) for value in pi]
        ref = [value + rng.gauss(0, 0.4) for value in pi]
        advantage = [rng.gauss(0, 1) for _ in range(samples)]
        terms = policy_gradient(
            Inputs(
                logprobs_N=torch.tensor(pi, requires_grad=True),
                behaviour_N=torch.tensor(mu),
                reference_N=torch.tensor(ref),
                sample_N=torch.tensor(sample),
                advantage_S=torch.tensor(advantage),
            ),
            bounds,
        )
        loss, kept = 0.0, 0
        for index, s in enumerate(sample):
            ratios = [pi[i] - mu[i] for i, other in enumerate(sample) if other == s]
            if not 0.8 <= math.exp(sum(ratios) / len(ratios)) <= 1.3:
                continue
            ratio = math.exp(pi[index] - mu[index])
            if ratio < 0.6:
                continue
            kept += 1
            loss -= min(ratio, 1.5) * (advantage[s] - 0.05 * (pi[index] - ref[index])) * pi[index]
        assert terms.kept == kept
        assert float(terms.loss) == pytest.approx(loss, abs=1e-4)


def test_supervised_loss_is_the_negative_sum() -> None:
    assert float(negative_log_likelihood(torch.tensor([-1.0, -2.5]))) == 3.5
