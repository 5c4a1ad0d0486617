"""``[learner]``: how the learner turns judged trajectories into policies.

The defaults suit the small model on a CPU; a larger model wants a smaller learning rate (1e-5 to 5e-5 for
adapters of models of billions of parameters).
"""

from __future__ import annotations

from pydantic import Field

from rollout.config import Section


class LearnerConfig(Section):
    folder: str = "{home}/learner"
    """Where checkpoints lie."""
    job: str = "continuous"
    """Name of the perpetual job: its checkpoint and the samples it has used are kept under it."""
    seed: int = 0
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto``: a GPU when one answers."""
    threads: int | None = None
    """Compute threads of one process on a CPU; None leaves torch's choice."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """ZeRO stage; above 0 it pays only with several processes."""
    dtype: str = "float32"
    """Type of the frozen weights. Adapter weights and the optimizer are always float32."""
    experts_implementation: str | None = "eager"
    """transformers' way of computing experts; None leaves its choice."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """LoRA scaling: the update is alpha / rank times the product of the two factors."""

    batch_size: int = Field(default=32, ge=1)
    """Samples of one update."""
    publish_every: int = Field(default=3, ge=1)
    """Updates between two candidate policies."""
    learning_rate: float = 3e-4
    warmup_updates: int = Field(default=8, ge=1)
    """Updates in which the learning rate rises to its value."""
    max_grad_norm: float = 1.0
    tokens_per_micro_batch: int = Field(default=1024, ge=1)
    """Positions computed at once, padding included; bounds memory."""
    max_sample_tokens: int = Field(default=2048, ge=2)
    """A longer trajectory is dropped and counted."""

    max_staleness: int = Field(default=4, ge=0)
    """A sample is dropped when its policy is more than this many promotions behind."""
    baseline_step: float = Field(default=0.2, gt=0, le=1)
    """Step of the exponential moving average that tracks a task's reward."""
    negative_weight: float = Field(default=0.0, ge=0, le=1)
    """Weight of samples that did worse than expected. Their gradient is by far the larger (a failure is
    unlikely tokens, a success likely ones) and wears a small model down while it is learning from a policy
    that it has left: in six updates of 32 samples at 3e-4 the default model went from 0.41 to 0.19 with 1,
    to 0.51 with 0. Raise it for models that keep many answers open."""
    ratio_cap: float = Field(default=2.0, gt=1)
    """Truncation of a token's importance weight."""
    ratio_floor: float = Field(default=0.2, ge=0, lt=1)
    """Tokens whose importance ratio lies below are masked."""
    sequence_band: tuple[float, float] = (0.5, 2.0)
    """A sample is rejected when the geometric mean of its ratios lies outside."""
    kl_coefficient: float = Field(default=1e-3, ge=0)
    """Weight of the KL to the promoted policy."""

    poll_seconds: float = Field(default=2.0, gt=0)
    """How often to look for work, and whether learning was switched on."""
