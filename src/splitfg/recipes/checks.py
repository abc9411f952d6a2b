"""Validation of recipes and configs at construction."""

from __future__ import annotations


def below(least: int, recipe: object, *fields: str) -> list[str]:
    """List the fields that are smaller than ``least``; ``None`` values are skipped."""
    values = {name: getattr(recipe, name) for name in fields}
    return [f"{n} must be at least {least}, got {v}" for n, v in values.items() if v is not None and v < least]


def not_positive(recipe: object, *fields: str) -> list[str]:
    """List the fields that are not positive."""
    values = {name: getattr(recipe, name) for name in fields}
    return [f"{name} must be positive, got {value}" for name, value in values.items() if not value > 0]


def not_fractions(recipe: object, *fields: str) -> list[str]:
    """List the fields outside [0, 1), or with an element outside."""
    values = {name: getattr(recipe, name) for name in fields}
    return [f"{name} must be in [0, 1), got {value}" for name, value in values.items() if not _all_fractions(value)]


def rho_problems(rho: float) -> list[str]:
    """List the problems of a trunk step scale."""
    if 0 < rho <= 1:
        return []
    return [f"rho must be in (0, 1], got {rho}: for an untrained trunk choose FrozenMethod"]


def adaptive_problems(adaptive: bool, rho: float) -> list[str]:
    """List the problems of a line search for the trunk step scale."""
    return [f"a line search finds rho, so rho must be 1, got {rho}"] if adaptive and rho != 1 else []


def warmup_problems(warmup: int, total: int) -> list[str]:
    """List the problems of a warmup within ``total`` steps."""
    return [] if 0 <= warmup < total else [f"warmup must be in [0, {total}), the schedule's steps, got {warmup}"]


def _all_fractions(value: float | tuple[float, ...]) -> bool:
    return all(0 <= v < 1 for v in (value if isinstance(value, tuple) else (value,)))
