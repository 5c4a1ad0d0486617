"""bitsandbytes' formats on a CPU: the products of the weights that they stand for, and an engine on each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor
from torch.nn import functional

from quant.cpu.bnb import BLOCK, Int8Rows, Nf4
from quant.cpu.scheme import Scheme
from tests.fixtures.engines import RunningEngine, running_engine, write_config
from tests.quant.test_fast_engine import distance, scored_with


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# How far four and eight bits with so few scales are from the weights.
schemes = pytest.mark.parametrize(("scheme", "error"), [(Nf4(), 0.12), (Int8Rows(), 0.02)])


@schemes
def test_a_product_is_that_of_the_weights_as_far_as_the_format_keeps_them(
    scheme: Scheme, error: float
) -> None:
    weight, x, bias = drawn(96, 128), drawn(5, 3, 128, seed=1), drawn(96, seed=2)
    packed = scheme.pack_linear(weight)
    assert packed[0].dtype is scheme.dtype
    found = scheme.linear(x, packed, 96, bias)
    assert found.shape == (5, 3, 96)
    assert 0 < relative(found, x @ weight.T + bias) < error


def test_nf4_multiplies_with_what_bitsandbytes_itself_expands() -> None:
    weight, x = drawn(64, 64), drawn(4, 64, seed=1)
    expanded = dequantize_4bit(*quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4"))
    found = Nf4().linear(x, Nf4().pack_linear(weight), 64, None)
    assert relative(found, x @ expanded.T) < 1e-5


def kept(scheme: Scheme, weight: Tensor) -> Tensor:
    """The weights [N, K] that a scheme multiplies with."""
    return scheme.linear(torch.eye(weight.shape[1]), scheme.pack_linear(weight), weight.shape[0], None).T


# Nf4 leaves activations as they are, the other rounds them to eight bits.
@pytest.mark.parametrize(("scheme", "error"), [(Nf4(), 1e-4), (Int8Rows(), 0.03)])
def test_experts_are_products_one_after_another_each_with_its_own_tokens(
    scheme: Scheme, error: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    w13, w2, x = drawn(4, 2 * 96, 64) / 8, drawn(4, 64, 96, seed=1) / 10, drawn(20, 64, seed=2)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(20)])
    ids[3, 1] = -1
    scores = torch.rand(20, 2, generator=generator)
    wanted = torch.zeros(20, 64)
    for token in range(20):
        for choice in range(2):
            expert = int(ids[token, choice])
            if expert >= 0:
                gate, up = (kept(scheme, w13[expert]) @ x[token]).chunk(2)
                inner = functional.silu(gate) * up
                wanted[token] += scores[token, choice] * (kept(scheme, w2[expert]) @ inner)
    packed = scheme.pack_experts(w13, w2)
    assert relative(scheme.experts(x, *packed, scores, ids), wanted) < error
    assert not scheme.experts(x, *packed, scores, torch.full_like(ids, -1)).any()


@pytest.mark.engine
@pytest.mark.parametrize(("recipe", "share"), [("bnb-nf4", 0.8), ("bnb-int8", 0.2)])
def test_an_engine_on_it_answers_with_adapters_on_top(
    recipe: str,
    share: float,
    tmp_path: Path,
    tiny_moe: Path,
    tiny_adapters: dict[str, Path],
    engine_standard: RunningEngine,
) -> None:
    """Closer to full precision under the same adapter than adapters are to each other."""
    config = write_config(tmp_path / "deployment.toml", tmp_path, tiny_moe, {"fast": recipe})
    with running_engine(config, tmp_path, "fast-0") as running:
        found = asyncio.run(scored_with(running, tiny_adapters))
    wanted = asyncio.run(scored_with(engine_standard, tiny_adapters))
    for name, scores in wanted.items():
        others = [distance(scores, wanted[other]) for other in wanted if other != name]
        assert 0 < distance(scores, found[name]) < share * min(others), name
