"""A model of the time of a step on a network: computation, and all-reduces at a bandwidth and a latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The link of every worker: bit/s in each direction, and seconds for one way."""

    bandwidth: float
    latency: float


def all_reduce_s(size: float, workers: int, link: Link) -> float:
    """Seconds of an all-reduce of ``size`` bytes: the faster of a ring and of recursive doubling.

    A ring sends 2 (N - 1) / N of the message in 2 (N - 1) rounds, doubling the whole message in log2 N rounds.
    """
    if workers == 1:
        return 0.0
    seconds = 8 * size / link.bandwidth
    ring = 2 * (workers - 1) * (seconds / workers + link.latency)
    rounds = math.ceil(math.log2(workers))
    return min(ring, rounds * (seconds + link.latency))


def gloo_all_reduce_s(size: float, workers: int, link: Link) -> float:
    """Seconds of gloo's all-reduce: a ring in which every round waits for the receiver's answer, two latencies."""
    if workers == 1:
        return 0.0
    return 2 * (workers - 1) * (8 * size / link.bandwidth / workers + 2 * link.latency)


def gloo_step_s(compute_s: float, messages: Sequence[float], workers: int, link: Link) -> float:
    """Seconds of a step with gloo; see :func:`step_s`."""
    return compute_s + sum(gloo_all_reduce_s(size, workers, link) for size in messages)


def step_s(compute_s: float, messages: Sequence[float], workers: int, link: Link) -> float:
    """Seconds of a step whose messages, in bytes, follow its computation; nothing overlaps."""
    return compute_s + sum(all_reduce_s(size, workers, link) for size in messages)


def shared_step_s(unlimited_s: float, wire_bytes: float, workers: int, bandwidth: float) -> float:
    """Seconds of a step if all workers send through one medium: as measured on a loopback device with a limit."""
    return unlimited_s + 8 * wire_bytes * workers / bandwidth
