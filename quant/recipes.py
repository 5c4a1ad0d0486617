"""What makes a tier what it is: named ways of running one model on one kind of device.

A recipe is data: arguments and environment for vLLM, nothing else. This module imports no torch, so the
gateway and the engine supervisor can read it. `measured` is True only for recipes whose speed and quality
this project's benches have printed on real hardware; the others are known from vLLM's documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Device = Literal["cpu", "gpu", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a recipe may be from full precision (`python -m quant accept`)."""

    kl: float = 0.01
    """Mean KL in nats a token."""
    top1: float = 0.98
    """Least share of positions with the same likeliest token."""
    perplexity: float = 0.01
    """Largest relative rise of perplexity."""
    score: float = 0.02
    """Largest loss of task success that the 95 % interval may include."""
    validity: float = 0.02
    """The same of the share of answers whose tool calls are well formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way of running the model; `name` is what ``[tiers.NAME] recipe`` says in the TOML."""

    name: str
    device: Device
    engine_args: tuple[str, ...]
    """Appended to vLLM's arguments; wins over the deployment's own ``dtype``."""
    cpu_engine_args: tuple[str, ...] | None = None
    """In their place on a CPU, where vLLM's own way does not run."""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the engine's environment."""
    description: str
    measured: bool
    limits: Limits = field(default_factory=Limits)

    def args_on(self, device: str) -> tuple[str, ...]:
        """vLLM's arguments on a device of this kind ("cpu" or "gpu")."""
        return self.engine_args if device == "gpu" or self.cpu_engine_args is None else self.cpu_engine_args

    def dtype_on(self, device: str) -> str:
        """Of activations, and of the cache where a tier does not say otherwise."""
        args = self.args_on(device)
        return args[args.index("--dtype") + 1]

    @property
    def quantized(self) -> bool:
        """Whether it approximates the model's weights, and so has an acceptance test to pass."""
        return "--quantization" in self.engine_args


_ALL = (
    Recipe(
        name="float32",
        device="any",
        engine_args=("--dtype", "float32"),
        description="full precision: the reference of every other recipe, and the fastest plain type on AVX2",
        measured=True,
    ),
    Recipe(
        name="bfloat16",
        device="any",
        engine_args=("--dtype", "bfloat16"),
        description="half the memory; usual on a GPU, emulated and slow on a CPU without AVX512-BF16",
        measured=False,
    ),
    Recipe(
        name="cpu-int8",
        device="cpu",
        engine_args=("--dtype", "float32", "--quantization", "cpu_int8", "--enforce-eager"),
        description="weights int8 in groups of 32, activations 16 bits per token, one native call a layer",
        measured=True,
        limits=Limits(kl=0.002, top1=0.985),
    ),
    Recipe(
        name="gpu-fp8",
        device="gpu",
        engine_args=("--dtype", "bfloat16", "--quantization", "fp8_per_block"),
        description="fp8 made while loading, one scale per 128x128 block (Hopper or later)",
        measured=False,
    ),
    Recipe(
        name="gpu-fp8-tensor",
        device="gpu",
        engine_args=("--dtype", "bfloat16", "--quantization", "fp8_per_tensor"),
        description="fp8 made while loading, one scale per tensor (Ada or later)",
        measured=False,
    ),
    Recipe(
        name="bnb-nf4",
        device="any",
        engine_args=("--dtype", "bfloat16", "--quantization", "bitsandbytes"),
        cpu_engine_args=("--dtype", "float32", "--quantization", "cpu_bnb_nf4", "--enforce-eager"),
        description="bitsandbytes nf4 made while loading; on a CPU slow, to see what a GPU would answer",
        measured=False,
    ),
    Recipe(
        name="bnb-int8",
        device="any",
        engine_args=("--dtype", "bfloat16", "--quantization", "bitsandbytes", "--enforce-eager"),
        cpu_engine_args=("--dtype", "float32", "--quantization", "cpu_bnb_int8", "--enforce-eager"),
        description="bitsandbytes int8: on a GPU of a checkpoint saved in it; on a CPU of any, slow",
        measured=False,
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
