"""Live progress: a panel that is redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rollout.demo.traffic import Log
from rollout.demo.watch import View

LINE_EVERY_S = 15.0


@dataclass(slots=True, kw_only=True)
class Progress:
    """Shows the latest `show`; use as a context."""

    console: Console
    log: Log
    view: View
    begun: float = field(default_factory=time.monotonic)
    _live: Live | None = None
    _last_line: float = 0.0

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, phase: str, *, now: bool = False) -> None:
        """`phase` in words, with the figures of this moment; off a terminal at most every 15 s."""
        if self._live is not None:
            self._live.update(self._panel(phase))
        elif now or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            facts = " · ".join(f"{name} {value}" for name, value in self._facts().items())
            line = f"{self._clock()}  {phase} · {facts}"
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _panel(self, phase: str) -> Table:
        panel = Table.grid(padding=(0, 2))
        panel.add_row(self._clock(), f"[bold]{phase}[/bold]")
        for name, value in self._facts().items():
            panel.add_row(name, value)
        return panel

    def _facts(self) -> dict[str, str]:
        recent = self.log.recent
        success = f"{sum(recent) / len(recent):.2f} of the last {len(recent)}" if recent else "-"
        coming = [
            f"{policy.id} {policy.state}" for policy in self.view.policies.values() if _coming(policy.state)
        ]
        learner = self.view.learner
        return {
            "requests": str(len(self.log.requests)),
            "failed": str(len(self.log.failures)),
            "success": success,
            "serving": ", ".join([self.view.promoted or "-", *coming]),
            "learner": f"{learner.get('state', 'off')} (trained on {learner.get('trained', 0)})",
        }

    def _clock(self) -> str:
        seconds = int(time.monotonic() - self.begun)
        return f"{seconds // 60:02d}:{seconds % 60:02d}"


def _coming(state: str) -> bool:
    return state in ("candidate", "gate", "canary")
