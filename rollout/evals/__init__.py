"""Evaluations: sealed suites, paired runs of two policies, and the statistics that decide."""
