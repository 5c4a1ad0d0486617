"""``python -m rollout demo``: drive traffic through a running stack and show that it learns.

program: the phases, one after another · traffic: the requests · watch: what the deployment does meanwhile ·
service: what callers saw of the swaps · drafting: a repetitive workload · report: tables, picture, evidence.
"""

from rollout.demo.program import main

__all__ = ["main"]
