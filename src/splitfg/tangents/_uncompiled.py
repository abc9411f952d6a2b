"""Calls outside compiled code. Importing this module imports torch's compiler, which takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call_uncompiled(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function without compiling it or anything it calls."""
    return function(*args, **kwargs)
