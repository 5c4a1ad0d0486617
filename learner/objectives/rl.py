"""Policy gradient from verified outcomes, with log-probs as the sampler logged them.

With r_t = pi(t) / mu(t), mu the policy that really sampled, engine and precision included, a token's term is

    - sg(min(r_t, C)) * (A - beta * sg(log pi(t) - log ref(t))) * log pi(t)

REINFORCE with truncated importance weights, the CISPO form (arXiv 2506.13585): the weight is bounded but no
token's gradient is cut. Tokens with r_t below a floor are masked (IcePop, arXiv 2510.18855, lower end), and
samples whose geometric mean of r_t leaves a band are rejected whole (Geo-RS: independent of length). The KL
to the reference is the k1 estimate inside the reward, whose gradient is right where that of k1 or k3 as a
loss is not (arXiv 2512.21852).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far from the sampling policy a token may still teach."""

    ratio_cap: float
    ratio_floor: float
    sequence_band: tuple[float, float]
    kl_coefficient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One micro-batch, all of shape [N] but `advantage_S`."""

    logprobs_N: torch.Tensor
    """Under the policy being trained, with gradient."""
    behaviour_N: torch.Tensor
    """Under the policy that sampled, as logged."""
    reference_N: torch.Tensor
    """Under the promoted policy."""
    sample_N: torch.Tensor
    """Sample of each token, an index into `advantage_S`."""
    advantage_S: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A loss as a sum over `kept` tokens, and sums to report."""

    loss: torch.Tensor
    kept: int
    tokens: int
    truncated: int
    """Tokens whose weight was cut to the cap."""
    masked: int
    """Tokens below the floor, outside rejected samples."""
    rejected: int
    """Tokens of samples outside the band."""
    kl: float
    """Sum over tokens of the k3 estimate of KL(policy || reference), in nats."""
    mismatch: float
    """Sum over tokens of |log pi - log mu|."""


def policy_gradient(inputs: Inputs, bounds: Bounds) -> Terms:
    """The loss of the module's docstring. Works in log space, so no ratio overflows."""
    logprobs_N = inputs.logprobs_N.detach()
    log_ratio_N = logprobs_N - inputs.behaviour_N
    inside_N = within_band(log_ratio_N, inputs.sample_N, len(inputs.advantage_S), bounds.sequence_band)
    floor = math.log(bounds.ratio_floor) if bounds.ratio_floor > 0 else -math.inf
    keep_N = inside_N & (log_ratio_N >= floor)
    cap = math.log(bounds.ratio_cap)
    weight_N = log_ratio_N.clamp(max=cap).exp()
    log_reference_N = logprobs_N - inputs.reference_N
    advantage_N = inputs.advantage_S[inputs.sample_N] - bounds.kl_coefficient * log_reference_N
    loss_N = -weight_N * advantage_N * inputs.logprobs_N
    k3_N = torch.expm1(-log_reference_N) + log_reference_N
    return Terms(
        loss=loss_N[keep_N].sum(),
        kept=int(keep_N.sum()),
        tokens=keep_N.numel(),
        truncated=int((keep_N & (log_ratio_N > cap)).sum()),
        masked=int((inside_N & ~keep_N).sum()),
        rejected=int((~inside_N).sum()),
        kl=float(k3_N.sum()),
        mismatch=float(log_ratio_N.abs().sum()),
    )


def within_band(
    log_ratio_N: torch.Tensor, sample_N: torch.Tensor, samples: int, band: tuple[float, float]
) -> torch.Tensor:
    """Whether the geometric mean of the ratios of a token's sample lies in `band`. [N], bool"""
    totals_S = torch.zeros(samples, dtype=log_ratio_N.dtype, device=log_ratio_N.device)
    counts_S = torch.zeros_like(totals_S)
    totals_S.index_add_(0, sample_N, log_ratio_N)
    counts_S.index_add_(0, sample_N, torch.ones_like(log_ratio_N))
    mean_N = (totals_S / counts_S.clamp(min=1))[sample_N]
    return (mean_N >= math.log(band[0])) & (mean_N <= math.log(band[1]))
