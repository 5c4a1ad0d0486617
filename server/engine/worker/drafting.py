"""Drafting (speculative decoding) on a CPU: one function of vLLM's rejection sampler that does nothing there.

Before it decides which drafted tokens to accept, vLLM repeats every request's temperature (and top-k and
top-p) for each of its drafted tokens. Its CPU version writes the result into a converted copy that it then
drops, so the logits are divided by whatever the memory held: at temperature 0 nothing shows, above it almost
every draft is refused and replaced by a token of no likelihood, while the reported log-probs look right.
"""

from __future__ import annotations

import torch


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Each value of `x` [requests] once per token of its request, `replace_from` replaced. [num_tokens]

    >>> expand_batch_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 3, 0, 1).tolist()
    [0.5, 0.5, 1.0]
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)
