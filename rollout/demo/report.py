"""The end of the demonstration: tables on the console, a picture, and the evidence as JSON.

Invariant: what is printed and drawn comes from the evidence, so the file alone is enough to check it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollout.demo import picture, service
from rollout.demo.drafting import Drafting
from rollout.demo.findings import Findings
from rollout.demo.traffic import Log
from rollout.demo.watch import View
from rollout.evals.paired import by_family
from rollout.evals.statistics import Interval, wilson

EVIDENCE = "evidence.json"
PICTURE = "success.png"
SHOWN_FAILURES = 5
MILLI = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    findings: Findings
    log: Log
    view: View
    wanted_policies: int


def write(report: Report, folder: Path, console: Console) -> bool:
    """Print and save everything; whether every claim held."""
    evidence = collect(report)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EVIDENCE).write_text(json.dumps(evidence, indent=1))
    picture.draw(evidence, folder / PICTURE)
    for table in (_traffic(evidence), _gates(evidence), _memory(evidence)):
        console.print(table)
    for line in _lines(evidence):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for claim, holds in evidence["claims"].items():
        console.print(f"{'[green]yes[/green]' if holds else '[red]NO[/red] '} {claim}", highlight=False)
    console.print(f"picture   {folder / PICTURE}", highlight=False, soft_wrap=True)
    console.print(f"evidence  {folder / EVIDENCE}", highlight=False, soft_wrap=True)
    return all(evidence["claims"].values())


def collect(report: Report) -> dict[str, Any]:
    """Everything that was found, as JSON."""
    found, log, view = report.findings, report.log, report.view
    since = found.learning_since
    swaps = service.windows(view.flips, since)
    promoted = view.promotions(since) if since else []
    failures = log.failures
    evidence: dict[str, Any] = {
        "started_at": found.started_at,
        "first_answer_s": found.first_answer_s,
        "phases_s": found.phases,
        "baseline": found.baseline,
        "last": found.last,
        "promoted": promoted,
        "traffic": [
            {
                "policy": policy,
                "tier": tier,
                "success": _interval(tally.success),
                "tokens_per_s": tally.tokens_per_s,
            }
            | {name: getattr(tally, name) for name in ("requests", "failed", "episodes", "successes")}
            for (policy, tier), tally in sorted(log.tallies.items())
        ],
        "sealed": {
            policy: {
                "success": _interval(wilson(*_judged([r.success for r in results]))),
                "faults": sum(r.success is None for r in results),
                "by_family": by_family(results),
            }
            for policy, results in found.results.items()
        },
        "comparison": found.comparison.evidence() if found.comparison else None,
        "requests": {
            "sent": len(log.requests),
            "failed": len(failures),
            "failures": failures[:SHOWN_FAILURES],
        },
        "outcomes_reported": log.reported,
        "swaps": len(promoted),
        "swap_windows": [[window.start, window.end] for window in swaps],
        "ttft": {
            where: dataclasses.asdict(waits) for where, waits in service.waits(log.requests, swaps).items()
        },
        "drafting": _drafting(found.drafting),
        "peak_mib": dict(sorted(view.peak_mib.items())),
        "learner": view.learner,
        "watch_errors": view.errors[:SHOWN_FAILURES],
        "policies": [
            {"id": p.id, "state": p.state, "reason": p.reason, "history": p.history}
            for p in view.policies.values()
        ],
        "sealed_results": msgspec.to_builtins(found.results),
    }
    evidence["claims"] = _claims(evidence, report.wanted_policies)
    return evidence


def _claims(evidence: dict[str, Any], wanted: int) -> dict[str, bool]:
    comparison = evidence["comparison"]
    failed = evidence["requests"]["failed"]
    low = comparison["difference_95"][0] if comparison else 0.0
    return {
        f"at least {wanted} policies were swapped in under traffic ({evidence['swaps']})": evidence["swaps"]
        >= wanted,
        f"no request failed ({failed} of {evidence['requests']['sent']})": failed == 0,
        "the last policy beats the first on the sealed tasks: "
        + (f"95 % interval of the difference from {low:+.3f}" if comparison else "nothing to compare"): bool(
            comparison and low > 0
        ),
    }


def _judged(successes: list[bool | None]) -> tuple[int, int]:
    judged = [success for success in successes if success is not None]
    return sum(judged), len(judged)


def _interval(interval: Interval) -> list[float]:
    return [interval.estimate, interval.low, interval.high]


def _drafting(found: Drafting | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"not_measured": found}
    rates = {"tokens_per_step": found.tokens_per_step, "acceptance": found.acceptance}
    return dataclasses.asdict(found) | rates


def _traffic(evidence: dict[str, Any]) -> Table:
    table = Table("policy", "tier", "requests", "failed", "success (95 %)", "tokens/s", title="Traffic")
    for row in evidence["traffic"]:
        table.add_row(
            row["policy"],
            row["tier"],
            str(row["requests"]),
            str(row["failed"]),
            f"{_percent(row['success'])} of {row['episodes']}",
            f"{row['tokens_per_s']:.0f}",
        )
    return table


def _gates(evidence: dict[str, Any]) -> Table:
    table = Table("policy", "became", "why", title="Policies")
    for policy in evidence["policies"]:
        steps = [step for step in policy["history"] if step["reason"] and step["actor"] == "judge"]
        why = steps[-1]["reason"] if steps else policy["reason"]
        table.add_row(policy["id"], policy["state"], escape(why or ""))
    return table


def _memory(evidence: dict[str, Any]) -> Table:
    table = Table("process", "peak resident MiB", title="Memory")
    for name, mib in evidence["peak_mib"].items():
        table.add_row(name, f"{mib:.0f}")
    table.add_row("together", f"{sum(evidence['peak_mib'].values()):.0f}")
    return table


def _lines(evidence: dict[str, Any]) -> list[str]:
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in evidence["phases_s"].items())
    lines = [f"first answer {evidence['first_answer_s']:.1f} s after the service was found; {phases}"]
    for policy, sealed in evidence["sealed"].items():
        lines.append(f"sealed tasks, {policy}: success {_percent(sealed['success'])}")
    if comparison := evidence["comparison"]:
        low, high = comparison["difference_95"]
        lines.append(
            f"difference on {comparison['n']} paired sealed tasks: {comparison['difference']:+.3f} "
            f"(95 % {low:+.3f} to {high:+.3f}; exact McNemar p {comparison['p_differ']:.2g}); "
            "the first policy was asked at the start, with the same tasks and sampling seeds"
        )
    requests = evidence["requests"]
    lines.append(f"requests {requests['sent']}, failed {requests['failed']}, swaps {evidence['swaps']}")
    lines += [f"  {failure}" for failure in requests["failures"]]
    for where, waits in evidence["ttft"].items():
        lines.append(
            f"time to first token {where} swap windows: p50 {waits['p50_s'] * MILLI:.0f} ms, "
            f"p99 {waits['p99_s'] * MILLI:.0f} ms ({waits['n']} requests)"
        )
    lines.append(_drafting_line(evidence["drafting"]))
    return lines


def _drafting_line(drafting: dict[str, Any]) -> str:
    if "not_measured" in drafting:
        return f"drafting: {drafting['not_measured']}"
    acceptance = drafting["acceptance"]
    why_unknown = "no counters" if drafting["drafted"] is None else "nothing was drafted"
    accepted = f"unknown ({why_unknown})" if acceptance is None else f"{acceptance:.2f}"
    return (
        f"drafting on a repetitive workload: {drafting['tokens_per_step']:.2f} tokens a step, "
        f"acceptance {accepted}, "
        f"{drafting['tokens'] / drafting['seconds']:.0f} tokens/s"
    )


def _percent(interval: list[float]) -> str:
    estimate, low, high = interval
    return f"{estimate:.2f} [{low:.2f}, {high:.2f}]"
