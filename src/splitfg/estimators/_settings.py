"""What the settings of tangent estimators must satisfy."""

from __future__ import annotations


def tangent_problems(K: int, micro_batch: int | None) -> list[str]:
    """What is wrong with a tangent count and a micro-batch size."""
    found = []
    if K < 1:
        found.append(f"K must be at least 1 tangent, got {K}: for an untrained trunk use FrozenTrunk()")
    if micro_batch is not None and micro_batch < 1:
        found.append(f"micro_batch must be at least 1 row (or None for the whole batch), got {micro_batch}")
    return found
