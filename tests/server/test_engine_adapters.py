"""The CPU adapter products against the formula, for every way in which rows can be mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SLOTS, RANK, INPUTS, OUTPUTS = 3, 4, 10, (6, 2, 4)
SLOT_OF = {7: 2, 8: 0, 9: 1}
"""Slot of each adapter id; every slot is taken, so index -1 would be somebody's."""


def wrapper() -> Any:
    from server.engine.worker.lora import GroupedAdapters

    return GroupedAdapters(256, max_batches=8, device="cpu")


def mapping(rows: list[int]) -> Any:
    from vllm.lora.layers import LoRAMapping

    return LoRAMapping(index_mapping=tuple(rows), prompt_mapping=tuple(rows), is_prefill=True)


def stacked(generator: torch.Generator) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    a = tuple(torch.randn(SLOTS, 1, RANK, INPUTS, generator=generator) for _ in OUTPUTS)
    b = tuple(torch.randn(SLOTS, 1, size, RANK, generator=generator) for size in OUTPUTS)
    return a, b


def expected(
    y: torch.Tensor,
    x: torch.Tensor,
    rows: list[int],
    a: tuple[torch.Tensor, ...],
    b: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    y = y.clone()
    for row, adapter in enumerate(rows):
        if adapter > 0:
            slot = SLOT_OF[adapter]
            y[row] += torch.cat([x[row] @ s[slot, 0].t() @ t[slot, 0].t() for s, t in zip(a, b, strict=True)])
    return y


@pytest.mark.parametrize(
    "rows",
    [
        [7, 7, 7, 7],
        [0, 0, 0],
        [0, 7, 7, 8, 9, 9, 0],
        [7, 8, 7, 0, 8, 9, 0, 7],
        [8] * 50 + [0] * 3 + [7] * 40 + [8] * 20,
        [0],
        [9],
    ],
    ids=["one", "none", "runs", "scattered", "many scattered", "lone base", "lone adapter"],
)
def test_rows_get_their_own_adapter(rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    a, b = stacked(generator)
    reference = tuple(s.clone() for s in a), tuple(s.clone() for s in b)
    x = torch.randn(len(rows), INPUTS, generator=generator)
    y = torch.randn(len(rows), sum(OUTPUTS), generator=generator)
    punica = wrapper()
    punica.update_metadata(mapping(rows), [8, 9, 7], SLOTS + 1, 100)
    want = expected(y, x, rows, *reference)
    punica.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    torch.testing.assert_close(y, want)


def test_an_adapter_put_into_a_slot_later_is_used() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = stacked(generator)
    x = torch.randn(2, INPUTS, generator=generator)
    punica = wrapper()
    punica.update_metadata(mapping([7, 0]), [8, 9, 7], SLOTS + 1, 100)
    punica.add_lora_linear(torch.zeros(2, sum(OUTPUTS)), x, a, b, 1.0, OUTPUTS)
    a[1][2, 0].fill_(0.5)
    b[2][2] = 0
    y = torch.zeros(2, sum(OUTPUTS))
    punica.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    torch.testing.assert_close(y, expected(torch.zeros_like(y), x, [7, 0], a, b))


def test_half_precision_output() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = stacked(generator)
    rows = [7, 0, 7, 8]
    x = torch.randn(4, INPUTS, generator=generator).bfloat16()
    y = torch.zeros(4, sum(OUTPUTS), dtype=torch.bfloat16)
    punica = wrapper()
    punica.update_metadata(mapping(rows), [8, 9, 7], SLOTS + 1, 100)
    punica.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
    want = expected(torch.zeros(4, sum(OUTPUTS)), x.float(), rows, a, b)
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2)


def test_the_head_uses_the_sampled_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(SLOTS, 1, RANK, INPUTS), torch.randn(SLOTS, 1, 20, RANK)
    x, y = torch.randn(3, INPUTS, generator=generator), torch.zeros(3, 20)
    punica = wrapper()
    punica.update_metadata(mapping([0, 9, 8]), [8, 9, 7], SLOTS + 1, 100)
    punica.add_lora_logits(y, x, a, b, 1.0)
    assert not y[0].any()
    torch.testing.assert_close(y, expected(torch.zeros(3, 20), x, [0, 9, 8], (a,), (b,)))
