"""Int8 weights and the native kernel against the same products in float64.

Experts are drawn at random and differ from each other, so a permutation of them, of their rows or of the
gate and up halves shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from quant.cpu import build
from quant.cpu.kernel import ExpertWeights, Int8Kernel, Isa, LinearWeights
from quant.cpu.quantize import ACTIVATION_LEVELS, GROUP, dequantize, pack, pack_gate_up, quantize

LIBRARY = build.library()
SUPPORTED = Int8Kernel(LIBRARY).supported()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(weight: Tensor) -> Tensor:
    """The weights that the kernel multiplies with, in float64."""
    return dequantize(quantize(weight))[..., : weight.shape[-1]].double()


def experts_reference(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Each token through each of its experts, with the dequantized weights, one after another in float64."""
    d13, d2 = kept(w13), kept(w2)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[token, choice])
            if expert >= 0:
                gate, up = (d13[expert] @ x[token].double()).chunk(2)
                out[token] += weights[token, choice] * (d2[expert] @ (functional.silu(gate) * up))
    return out


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@given(n=st.integers(1, 70), k=st.integers(1, 70), magnitude=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_weight_keeps_its_place_within_half_a_step_of_its_group(
    n: int, k: int, magnitude: float, seed: int
) -> None:
    weight = drawn(n, k, seed=seed) * magnitude
    made = quantize(weight)
    error = (dequantize(made)[:, :k] - weight).abs()
    step = made.scale.repeat_interleave(GROUP, -1)[:, :k]
    assert bool((error <= 0.5001 * step + 1e-6 * weight.abs()).all())


def test_weights_that_lie_on_a_grid_of_their_group_are_kept_exactly() -> None:
    """As those of a model that was stored in 4 bits with a scale and a minimum for each group."""
    levels = torch.randint(0, 16, (8, 4, GROUP), generator=torch.Generator().manual_seed(0))
    levels[..., 0], levels[..., 1] = 0, 15
    weight = (levels * 0.01 * drawn(8, 4, 1).abs() + drawn(8, 4, 1, seed=1)).flatten(1)
    assert relative(kept(weight), weight) < 1e-6


def test_a_group_of_equal_weights_is_exact() -> None:
    weight = torch.full((2, 2 * GROUP), 0.3)
    weight[:, GROUP:] = 0
    assert torch.equal(kept(weight), weight.double())


@given(n=st.integers(1, 70), groups=st.integers(1, 3), lead=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_packing_keeps_every_weight_and_scale_at_its_place(n: int, groups: int, lead: int) -> None:
    made = quantize(drawn(lead, n, groups * GROUP))
    q, scales = pack(made)
    for channel in {0, n // 2, n - 1}:
        panel, block, row = channel // 32, channel % 32 // 16, channel % 16
        assert torch.equal(q[:, panel, block, :, :, row].flatten(1), made.q[:, channel])
        assert torch.equal(scales[:, panel, block, :, 0, row], made.scale[:, channel])
        assert torch.equal(scales[:, panel, block, :, 1, row], made.offset[:, channel])
    assert int(q.int().sum()) == int(made.q.int().sum())


def test_a_panel_of_experts_holds_gates_beside_their_ups() -> None:
    made = quantize(drawn(2, 2 * 20, 2 * GROUP))
    q, scales = pack_gate_up(made)
    assert q.shape == (2, 2, 2, 2, 16, 16, 2)
    for half, first in ((0, 0), (1, 20)):
        assert torch.equal(q[1, 1, half, :, :, 3].flatten(), made.q[1, first + 19])
        assert torch.equal(scales[1, 1, half, :, 0, 3], made.scale[1, first + 19])
    assert not scales[:, 1, :, :, :, 4:].any()


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = drawn(4, 8)
    weight[1, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        quantize(weight)


SHAPES = [(1, 32, 2), (1, 960, 576), (7, 33, 575), (20, 96, 5000), (3, 1, 1)]


@pytest.mark.parametrize("isa", SUPPORTED, ids=lambda isa: isa.name)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_adds_exactly(isa: Isa, m: int, n: int, k: int) -> None:
    """Whole activations whose largest is the top level are not rounded, so only float32 sums are inexact."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-ACTIVATION_LEVELS, ACTIVATION_LEVELS + 1, (m, k), generator=generator)
    x[:, 0] = ACTIVATION_LEVELS
    weight, bias = drawn(n, k, seed=2), drawn(n, seed=3)
    found = Int8Kernel(LIBRARY, isa).linear(x.float(), LinearWeights.of(weight), bias)
    wanted = x.double() @ kept(weight).T + bias.double()
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-6


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_rounding_of_activations_is_small_beside_that_of_weights(m: int, n: int, k: int) -> None:
    x, weight = drawn(m, k, seed=1), drawn(n, k, seed=2)
    found = Int8Kernel(LIBRARY).linear(x, LinearWeights.of(weight))
    assert relative(found, x.double() @ kept(weight).T) < 1e-4


def test_linear_keeps_leading_dimensions_and_takes_strided_rows() -> None:
    x, weights = drawn(4, 3, 2, 64)[:, :, 0], LinearWeights.of(drawn(40, 64))
    kernel = Int8Kernel(LIBRARY)
    found = kernel.linear(x, weights)
    assert found.shape == (4, 3, 40)
    assert torch.equal(found[2, 1], kernel.linear(x[2, 1].contiguous(), weights))


@given(
    tokens=st.integers(4, 20),
    hidden=st.integers(1, 80),
    inter=st.integers(1, 50),
    experts=st.integers(1, 6),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_experts_equal_one_product_after_another(
    tokens: int, hidden: int, inter: int, experts: int, seed: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    w13, w2 = drawn(experts, 2 * inter, hidden, seed=seed), drawn(experts, hidden, inter, seed=seed + 1)
    x, weights = drawn(tokens, hidden, seed=seed + 2), drawn(tokens, top_k, seed=seed + 3).abs()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    found = Int8Kernel(LIBRARY).experts(x, ExpertWeights.of(w13, w2), weights, ids)
    wanted = experts_reference(x, w13, w2, weights, ids)
    assert relative(found, wanted) < 5e-3  # by norm: one token's sum may cancel


def test_experts_of_a_tiny_mixture_stay_close_to_full_precision() -> None:
    w13, w2 = drawn(8, 2 * 96, 64) / 8, drawn(8, 64, 96, seed=1) / 10
    x, weights = drawn(50, 64, seed=2), torch.rand(50, 2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(50)])
    found = Int8Kernel(LIBRARY).experts(x, ExpertWeights.of(w13, w2), weights, ids)
    wanted = torch.zeros(50, 64)
    for token in range(50):
        for choice in range(2):
            gate, up = (w13[ids[token, choice]] @ x[token]).chunk(2)
            wanted[token] += weights[token, choice] * (w2[ids[token, choice]] @ (functional.silu(gate) * up))
    assert relative(found, wanted) < 0.01


def test_every_instruction_set_gives_the_same_bits() -> None:
    x, weights = drawn(9, 96), LinearWeights.of(drawn(100, 96, seed=1))
    experts = ExpertWeights.of(drawn(4, 80, 96, seed=2), drawn(4, 96, 40, seed=3))
    ids, scores = torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    kernels = [Int8Kernel(LIBRARY, isa) for isa in SUPPORTED]
    linear = [kernel.linear(x, weights) for kernel in kernels]
    mixed = [kernel.experts(x, experts, scores, ids) for kernel in kernels]
    assert all(torch.equal(one, linear[0]) for one in linear)
    assert all(torch.equal(one, mixed[0]) for one in mixed)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    kernel = Int8Kernel(LIBRARY)
    x, weights = drawn(23, 64), LinearWeights.of(drawn(100, 64, seed=1))
    experts = ExpertWeights.of(drawn(4, 80, 64, seed=2), drawn(4, 64, 40, seed=3))
    ids, scores = torch.randint(0, 4, (23, 2)), torch.rand(23, 2)
    linear, mixed = kernel.linear(x, weights), kernel.experts(x, experts, scores, ids)
    for row in (0, 5, 22):
        one = slice(row, row + 1)
        assert torch.equal(kernel.linear(x[one], weights), linear[one])
        assert torch.equal(kernel.experts(x[one], experts, scores[one], ids[one]), mixed[one])


def test_a_token_without_experts_gives_zeros_and_an_unknown_expert_is_refused() -> None:
    kernel = Int8Kernel(LIBRARY)
    experts = ExpertWeights.of(drawn(2, 32, 16), drawn(2, 16, 16))
    x, scores = drawn(2, 16), torch.ones(2, 1)
    found = kernel.experts(x, experts, scores, torch.tensor([[-1], [1]]))
    assert not found[0].any()
    assert found[1].any()
    with pytest.raises(ValueError, match="expert 2 of 2"):
        kernel.experts(x, experts, scores, torch.tensor([[0], [2]]))


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    kernel, weights = Int8Kernel(LIBRARY), LinearWeights.of(drawn(32, 8))
    x = drawn(4, 8)
    x[0] = 0
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    found = kernel.linear(x, weights)
    assert not found[0].any()
    assert not torch.isfinite(found[1:3]).any()
    assert torch.isfinite(found[3]).all()


def test_activations_that_do_not_fit_are_refused() -> None:
    kernel, weights = Int8Kernel(LIBRARY), LinearWeights.of(drawn(32, 8))
    with pytest.raises(ValueError, match="do not fit"):
        kernel.linear(drawn(2, 40), weights)
    with pytest.raises(ValueError, match="do not fit"):
        kernel.linear(drawn(2, 8).bfloat16(), weights)


def test_the_kernel_is_built_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = build.library(tmp_path)
    assert "building" in capfd.readouterr().err
    assert build.library(tmp_path) == first
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == [first]


def test_without_a_compiler_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="g\\+\\+"):
        build.library(tmp_path)
