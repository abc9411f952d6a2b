"""Durations in words."""

from __future__ import annotations

import math


def format_duration(seconds: float) -> str:
    """Round a duration to two units: ``45 s``, ``12 min``, ``3 h 20 min``, ``5 days 2 h``."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    unit = "day" if days == 1 else "days"
    return f"{days:,} {unit} {hours} h" if hours else f"{days:,} {unit}"
