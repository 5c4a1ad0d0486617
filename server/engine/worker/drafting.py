"""Drafting (speculative decoding) inside vLLM: what is verified is chosen here, and a repair on a CPU.

`speculation.Controller` decides; here it is told when steps begin, what was sampled and what was drafted.

The repair: one function of vLLM's rejection sampler does nothing on a CPU. Before it decides which drafted
tokens to accept, vLLM repeats every request's temperature (and top-k and top-p) for each of its drafted
tokens. Its CPU version writes the result into a converted copy that it then drops, so the logits are
divided by whatever the memory held: at temperature 0 nothing shows, above it almost every draft is refused
and replaced by a token of no likelihood, while the reported log-probs look right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from server.engine.launch import BASE_MODEL, DRAFTS
from server.engine.worker.speculation import Controller, Step


def controller(runner: Any) -> Controller:
    """The controller of vLLM's model runner, made at its first use."""
    found: Controller | None = getattr(runner, "ratchet_controller", None)
    if found is None:
        settings = runner.vllm_config.additional_config
        found = runner.ratchet_controller = Controller(settings.get(DRAFTS, "auto"))
    return found


def execute(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.execute_model`, which tells the controller that a step begins."""

    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.speculative_config is not None:
            controller(runner).began(_step(scheduler_output), time.perf_counter())
        return stock(runner, scheduler_output, *args, **kwargs)

    return execute_model


def propose(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.propose_draft_token_ids`, of which only what is worth verifying is kept.

    While steps are scheduled ahead of their results nobody can choose, and all that was drafted is kept.
    """

    def propose_draft_token_ids(
        runner: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafts = stock(runner, scheduler_output, sampled_token_ids, *args, **kwargs)
        if runner.use_async_scheduling:
            return drafts
        policies = {name: _policy(runner.requests[name]) for name in runner.input_batch.req_ids}
        sampled = _sampled(runner, sampled_token_ids)
        offered = drafts.tolist() if torch.is_tensor(drafts) else drafts
        return controller(runner).choose(policies, sampled, offered)

    return propose_draft_token_ids


def _step(scheduler_output: Any) -> Step | None:
    """None for a step that computes prompts, too."""
    scheduled = scheduler_output.num_scheduled_tokens
    verified = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
    rows = scheduler_output.total_num_scheduled_tokens
    return Step(frozenset(scheduled), rows, verified) if rows == len(scheduled) + verified else None


def _policy(request: Any) -> str:
    return request.lora_request.lora_name if request.lora_request else BASE_MODEL


def _sampled(runner: Any, token_ids: Any) -> list[list[int]]:
    """Tokens of each request that count; none where a prompt was computed in part."""
    if not torch.is_tensor(token_ids):
        return list(token_ids)
    dropped = runner.discard_request_mask.np
    rows = enumerate(token_ids.tolist())
    return [[] if dropped[i] else [token for token in row if token >= 0] for i, row in rows]


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
