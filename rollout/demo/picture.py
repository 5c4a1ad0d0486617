"""Success by policy, with intervals, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"standard": "#1b6ca8", "fast": "#d9822b"}
SEALED_COLOUR = "#222222"
OFFSET = {"standard": -0.12, "fast": 0.12}


def draw(evidence: dict[str, Any], path: Path) -> None:
    """Traffic by policy and tier, and the sealed tasks of the first and the last policy."""
    served = {row["policy"] for row in evidence["traffic"]} | set(evidence["sealed"])
    order = sorted(served - {"none"})
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for tier, colour in COLOURS.items():
        rows = [
            r for r in evidence["traffic"] if r["tier"] == tier and r["episodes"] and r["policy"] in order
        ]
        x = [order.index(row["policy"]) + OFFSET[tier] for row in rows]
        _bars(
            axes,
            x,
            [row["success"] for row in rows],
            {"color": colour, "marker": "o", "label": f"traffic, {tier}"},
        )
    sealed = evidence["sealed"]
    style = {"color": SEALED_COLOUR, "marker": "D", "label": "sealed tasks"}
    _bars(
        axes, [order.index(policy) for policy in sealed], [row["success"] for row in sealed.values()], style
    )
    axes.set_xticks(range(len(order)), order)
    axes.set_ylim(0, 1)
    axes.set_xlabel("policy")
    axes.set_ylabel("success, with 95 % interval")
    axes.set_title("Success by policy")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def _bars(axes: Any, x: list[float], intervals: list[list[float]], style: dict[str, str]) -> None:
    if not x:
        return
    estimates = [interval[0] for interval in intervals]
    below = [interval[0] - interval[1] for interval in intervals]
    above = [interval[2] - interval[0] for interval in intervals]
    axes.errorbar(x, estimates, yerr=[below, above], linestyle="none", capsize=3, **style)
