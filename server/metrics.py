"""The gateway's counters, for Prometheus. One registry a gateway; the live state is read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from server.tiers import Fleet

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


class Metrics:
    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ratchet_requests",
            "Chat requests by how they ended",
            ["tier", "policy", "status"],
            registry=self.registry,
        )
        self.tokens = Counter("ratchet_tokens", "Tokens", ["tier", "policy", "kind"], registry=self.registry)
        self.breaks = Counter(
            "ratchet_trajectory_breaks", "Turns that could not be joined", ["reason"], registry=self.registry
        )
        self.joined = Counter("ratchet_turns_joined", "Turns joined token for token", registry=self.registry)
        self.mismatches = Counter(
            "ratchet_capture_mismatches", "Records whose counts disagree", registry=self.registry
        )
        self.commit_failures = Counter(
            "ratchet_commit_failures", "Answers withheld because the store failed", registry=self.registry
        )
        self.flips = Counter(
            "ratchet_flips", "Changes of the served policy", ["kind"], registry=self.registry
        )
        self.placements = Counter(
            "ratchet_placements", "Loads of a policy on a replica", ["result"], registry=self.registry
        )
        self.ttft = Histogram(
            "ratchet_ttft_seconds",
            "Time to the first token",
            ["tier"],
            registry=self.registry,
            buckets=SECONDS,
        )
        self.latency = Histogram(
            "ratchet_request_seconds",
            "Time to the last byte",
            ["tier"],
            registry=self.registry,
            buckets=SECONDS,
        )
        self.registry.register(_Live(fleet))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Live(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ready = GaugeMetricFamily("ratchet_replica_ready", "1 in rotation", labels=["replica", "tier"])
        in_flight = GaugeMetricFamily("ratchet_in_flight", "Requests in flight", labels=["replica", "policy"])
        held = GaugeMetricFamily("ratchet_policies_verified", "Policies verified", labels=["replica"])
        for replica in self._fleet.replicas:
            ready.add_metric([replica.id, replica.tier], float(replica.ready))
            held.add_metric([replica.id], float(len(replica.verified)))
            for policy, count in replica.in_flight.items():
                in_flight.add_metric([replica.id, policy], float(count))
        yield from (ready, in_flight, held)
        yield GaugeMetricFamily(
            "ratchet_serving_epoch", "Flips since the beginning", value=self._fleet.serving.epoch
        )
