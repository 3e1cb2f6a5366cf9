"""What Prometheus reads of a fleet's front. Replicas have the metrics of servers, each its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from batchmaker.fleet.balancer import Balancer


class FrontCounts(Protocol):
    """The front's own counts."""

    num_retried: int
    num_active: int


class _FrontMetrics(Collector):
    def __init__(self, balancer: Balancer, front: FrontCounts) -> None:
        self._balancer = balancer
        self._front = front

    def collect(self) -> Iterator[Metric]:
        replicas = self._balancer.replicas.values()
        by_state = Counter(replica.state for replica in replicas)
        states = GaugeMetricFamily("batchmaker_fleet_replicas", "Replicas by state", labels=("state",))
        for state in ("open", "suspended", "draining"):
            states.add_metric((state,), by_state[state])
        yield states
        labels = ("replica",)
        requests = GaugeMetricFamily("batchmaker_fleet_requests", "Requests not answered", labels=labels)
        sequences = GaugeMetricFamily("batchmaker_fleet_sequences", "Open sequences", labels=labels)
        waiting = GaugeMetricFamily("batchmaker_fleet_waiting_seconds", "Work not answered, estimated", labels=labels)
        routed = CounterMetricFamily("batchmaker_fleet_routed_requests", "Requests that it got", labels=labels)
        for replica in replicas:
            label = (str(replica.number),)
            requests.add_metric(label, replica.num_requests)
            sequences.add_metric(label, replica.num_sequences)
            waiting.add_metric(label, replica.work_us / 1e6)
            routed.add_metric(label, replica.routed)
        yield from (requests, sequences, waiting, routed)
        yield CounterMetricFamily(
            "batchmaker_fleet_retried_requests", "Requests that a second replica got", value=self._front.num_retried
        )
        yield CounterMetricFamily(
            "batchmaker_fleet_refused_requests",
            "Requests refused by the front, since every replica had enough",
            value=self._balancer.num_refused,
        )
        yield CounterMetricFamily(
            "batchmaker_fleet_lost_sequences",
            "Sequences that ended with their replica",
            value=self._balancer.num_lost_sequences,
        )
        yield CounterMetricFamily(
            "batchmaker_fleet_moved_sequences",
            "Sequences that a replica which left has handed over to another",
            value=self._balancer.num_moved_sequences,
        )
        yield GaugeMetricFamily("batchmaker_fleet_calls", "Calls in progress", value=self._front.num_active)


def front_metrics(balancer: Balancer, front: FrontCounts) -> bytes:
    """Return the metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FrontMetrics(balancer, front))
    return generate_latest(registry)
