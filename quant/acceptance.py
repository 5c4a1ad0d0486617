"""What an acceptance test found of a recipe on one model, kept in the deployment's folder.

An engine reads it before it starts: a recipe that failed is not served. One that was never tested is, with
a note in the engine's log, so that a deployment works before its first test.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from quant.recipes import Limits
from rollout.evals.statistics import Interval


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Full precision is the reference of all; differences are the recipe's value less the reference's."""

    recipe: str
    kv_cache_dtype: str = "auto"
    kv_bytes: int
    """Of one token in the cache."""
    base: str
    """Identity of the base weights (`rollout.artifacts.base_id`)."""
    policy: str | None
    """The adapter that was loaded on both sides."""
    tokens: int
    kl: float
    kl_99: float
    top1: float
    perplexity_ratio: float
    tasks: int
    reference_success: float
    success: float
    score: Interval
    """Difference of task success, paired, 95 %."""
    validity: Interval
    """Difference of the share of answers whose tool calls parse and name an offered tool, paired, 95 %."""
    limits: Limits
    tested_at: float

    @property
    def failures(self) -> list[str]:
        """One sentence for each limit that is not kept; none: the recipe is accepted."""
        limits = self.limits
        # "not within" and not "beyond": what is no number is refused.
        broken = [
            (not self.kl <= limits.kl, f"KL {self.kl:.4g} nats a token is above {limits.kl}"),
            (not self.top1 >= limits.top1, f"top-1 agreement {self.top1:.4f} is below {limits.top1}"),
            (
                not self.perplexity_ratio <= 1 + limits.perplexity,
                f"perplexity rises by a factor {self.perplexity_ratio:.4f}, above {1 + limits.perplexity}",
            ),
            *(_loss("task success", self.score, limits.score)),
            *(_loss("validity of tool calls", self.validity, limits.validity)),
        ]
        return [sentence for is_broken, sentence in broken if is_broken]


def _loss(what: str, difference: Interval, limit: float) -> list[tuple[bool, str]]:
    shown = f"[{difference.low:+.3f}, {difference.high:+.3f}]"
    return [
        (difference.high < -limit, f"{what} falls by {-difference.estimate:.3f} {shown}, more than {limit}"),
        (
            difference.low < -limit <= difference.high,
            f"{what} may fall by more than {limit}: {difference.estimate:+.3f} {shown}; test with more tasks",
        ),
    ]


def path(home: Path, recipe: str, kv_cache_dtype: str) -> Path:
    name = recipe if kv_cache_dtype == "auto" else f"{recipe}.{kv_cache_dtype}"
    return home / "acceptance" / f"{name}.json"


def write(home: Path, finding: Finding) -> Path:
    target = path(home, finding.recipe, finding.kv_cache_dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(finding), indent=2))
    scratch.replace(target)
    return target


def read(home: Path, recipe: str, kv_cache_dtype: str = "auto") -> Finding | None:
    """None when the two were never tested in this deployment. Raises ValueError for a damaged file."""
    target = path(home, recipe, kv_cache_dtype)
    try:
        content = target.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=Finding)
    except msgspec.DecodeError as error:
        raise ValueError(f"{target}: {error}; test the recipe again or delete the file") from None
