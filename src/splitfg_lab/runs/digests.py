"""Digests of configs and of data: a checkpoint stores them, and a run resumes only if they still match."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitfg_lab.runs._errors import RunError
from splitfg_lab.runs.config import Difference, flat_differences


def canonical(config: Mapping[str, Any]) -> str:
    """Write a config as text that does not depend on the order of its fields or on ``1`` against ``1.0``."""
    return json.dumps(_plain_numbers(config), sort_keys=True)


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config, as ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(canonical(config).encode()).hexdigest()}"


def require_same_run(path: Path, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the ``config.json`` with which a run began with the one that is there now.

    Raises:
        RunError: They differ; the error lists every field that does.
    """
    changes = flat_differences(began, now)
    if changes:
        raise RunError(
            f"{path} was edited after the run began (began with -> now):\n{_lines(changes)}\n"
            "Undo the edit to resume. For a run with other settings use `splitfg run TARGET --set FIELD=VALUE`, which"
            " has its own folder."
        )


def require_same_data(began: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Compare the data with which a run began with the data that is there now.

    Raises:
        RunError: A data set has another digest; the error shows both digests of each.
    """
    both = [name for name in began if name in now]
    changes = tuple(Difference(name, began[name], now[name]) for name in both if began[name] != now[name])
    if changes:
        raise RunError(
            f"the data changed after the run began (began with -> now):\n{_lines(changes)}\n"
            "The run may have trained on rows that are now held out. Restore the earlier data to resume, or delete the"
            " run folder to start over."
        )


def _lines(changes: tuple[Difference, ...]) -> str:
    return "\n".join(f"  {change}" for change in changes)


def _plain_numbers(value: Any) -> Any:
    """Turn whole floats into ints, at every level."""
    if isinstance(value, Mapping):
        return {name: _plain_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
