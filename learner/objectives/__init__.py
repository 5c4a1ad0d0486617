"""Losses: pure functions of log-probs of sampled tokens. N sampled tokens, S samples.

Each returns a *sum* over the tokens that count and how many those are. The caller divides by the count over
the whole batch, all micro-batches and processes, so tokens that are masked leave the denominator too.
"""
