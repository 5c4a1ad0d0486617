"""Supervised: the log-likelihood of demonstrated tokens."""

from __future__ import annotations

import torch


def negative_log_likelihood(logprobs_N: torch.Tensor) -> torch.Tensor:
    """Sum of -log pi(token), in nats."""
    return -logprobs_N.sum()
