"""What the demonstration found out, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.demo.drafting import Drafting
from rollout.evals.paired import Comparison, Result


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the demonstration has to show."""

    started_at: float
    first_answer_s: float = 0.0
    learning_since: float = 0.0
    consumed_before: int = 0
    """Samples that the learner had used up when learning began."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase."""
    baseline: str = ""
    last: str = ""
    results: dict[str, list[Result]] = field(default_factory=dict)
    """Sealed results by policy."""
    comparison: Comparison | None = None
    drafting: Drafting | str = "not measured"
