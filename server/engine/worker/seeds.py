"""Seeded requests on a CPU: what is sampled only to be thrown away must not count.

While a prompt is computed in parts, vLLM samples after each part, drops the token, and turns the request's
random generator back by an offset that only a GPU's has. On a CPU that raises, and the engine ends with all
its requests. Here the generator's whole state is kept and put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner._sample`, after which the generators of dropped tokens are as before."""

    def sample_and_turn_back(runner: Any, *args: Any, **kwargs: Any) -> Any:
        states = {generator: generator.get_state() for generator in _dropped(runner).values()}
        output = stock(runner, *args, **kwargs)
        for generator, state in states.items():
            generator.set_state(state)
        return output

    return sample_and_turn_back


def bookkeeping(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner._bookkeeping_sync`, which finds no generator left to turn back."""

    def keep_books(runner: Any, *args: Any, **kwargs: Any) -> Any:
        held, dropped = runner.input_batch.generators, _dropped(runner)
        runner.input_batch.generators = {i: held[i] for i in held if i not in dropped}
        try:
            return stock(runner, *args, **kwargs)
        finally:
            runner.input_batch.generators = held

    return keep_books


def _dropped(runner: Any) -> dict[int, torch.Generator]:
    """Generators of the requests whose sampled token is thrown away, by place in the batch."""
    mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    return {i: generator for i, generator in runner.input_batch.generators.items() if mask[i]}
