"""A measurement that stands for a real one. Other processes import this file, so it imports no torch."""

from __future__ import annotations

import os
import signal

from splitfg.errors import SplitError


def measure_made_up(name: str, config: object, seed: int, device: str) -> dict[str, float]:
    """Measure the length of a name; "broken" fails, and "killed" kills its process."""
    if name == "broken":
        raise SplitError(["it does not compile", "nor does it fit"])
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"mib": float(len(name)), "seed": float(seed)}
